"""Files of a release: what packages hold, what the workflows run, what the Dockerfile installs."""

import email
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from umbel.srt.kernels.cpu import library

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]


# --------------------------------------------------------------------------------------- extras and the version


def named(extra: str) -> set[str]:
    """The extras that an extra takes, and those that they take."""
    found = {extra}
    for requirement in EXTRAS[extra]:
        if match := re.fullmatch(r"umbel\[([\w,-]+)\]", requirement):
            found |= set().union(*(named(name) for name in match[1].split(",")))
    return found


def test_the_extra_all_has_every_extra_of_users_that_fits() -> None:
    frameworks = {"ray", "dspy", "lm-eval", "litellm"}  # versions of their own; large frameworks; exact pins
    ours = {"docs", "release", "dev"}
    assert set(EXTRAS) - named("all") == frameworks | ours


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "umbel.lang.__version__"}
    lines = (ROOT / "lang" / "__init__.py").read_text().splitlines()
    assert len([line for line in lines if re.match(r'__version__ = "\d+\.\d+\.\d+"', line)]) == 1


def test_the_changelog_is_by_release_and_breaks_first() -> None:
    """As CONTRIBUTING.md says. What is unreleased is put in order when it is released."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert titles[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", title) for title in titles[1:])
    known = ["Breaking changes", "Added", "Changed", "Fixed", "Security"]
    for section in sections:
        headings = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert set(headings) <= set(known)
        assert section.startswith("Unreleased") or headings == sorted(headings, key=known.index)


# ---------------------------------------------------------------------------------------------------- workflows


def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([\w-]+)(?:\s[\w-]+)*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"nightly"}


def jobs(workflow: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load(workflow.read_text())["jobs"].values()


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(workflow):
        yield from job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_of_make_by_pinned_actions(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    assert True in document  # "on", as YAML 1.1 reads it
    assert "secrets" not in workflow.read_text()
    for job in document["jobs"].values():
        assert job["timeout-minutes"] <= 300
        assert not [
            step["uses"] for step in job["steps"] if not re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))
        ]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        made = [word for command in commands for word in re.findall(r'\bmake ("?[$\w]+"?)', command)]
        asked = job.get("strategy", {}).get("matrix", {}).get("target", []) if '"$TARGET"' in made else made
        assert asked
        assert set(asked) <= targets()


def test_workflows_run_everything_that_is_to_pass() -> None:
    texts = "".join(path.read_text() for path in WORKFLOWS)
    for target in ("check", "test", "docs", "package", "wheels", "nightly", "newest", "ray", "frameworks"):
        assert re.search(rf"\bmake {target}\b|\btarget: .*\b{target}\b", texts), target


# --------------------------------------------------------------------------------------------------- Dockerfile


def stages() -> list[list[str]]:
    """Instructions of each stage of the Dockerfile, without comments, a line each."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[list[str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("FROM"):
            found.append([])
        if found:
            found[-1].append(" ".join(line.split()))
    return found


def test_the_image_has_a_wheel_and_no_compiler_and_serves_as_a_user() -> None:
    _, last = stages()
    text = "\n".join(last)
    assert not re.search(r"g\+\+|gcc|clang|apt-get", text)
    assert "umbel-*-manylinux_*.whl" in text
    assert "UMBEL_KERNELS=prebuilt" in text
    (user,) = (line.split()[1] for line in last if line.startswith("USER"))
    assert user == re.search(r"useradd .*--uid (\d+)", text)[1] != "0"  # type: ignore[index]
    after_user = last[last.index(f"USER {user}") :]
    assert {line.split()[0] for line in after_user} >= {"HEALTHCHECK", "VOLUME", "EXPOSE", "ENTRYPOINT"}
    assert f"ARG {re.search(r'^TORCH .= (.*)$', (ROOT / 'Makefile').read_text(), re.MULTILINE)[1]}" in text.replace(  # type: ignore[index]
        "ARG TORCH=", "ARG "
    )
    (extras,) = (line.partition("=")[2].split(",") for line in last if line.startswith("ARG EXTRAS="))
    assert set(extras) <= set(EXTRAS)


def test_the_options_of_the_image_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from umbel.server.command import main

    with pytest.raises(SystemExit):
        main(["--help"])
    known = capsys.readouterr().out
    for line in stages()[-1]:
        if line.startswith(("ENTRYPOINT", "CMD")):
            for option in re.findall(r'"(--[\w-]+)"', line):
                assert f"{option} " in known


def test_the_image_is_built_of_everything_that_ships() -> None:
    allowed = set(re.findall(r"^!/(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    folders = {name.split(".")[1] for name in PACKAGES if "." in name}
    assert folders <= allowed
    assert {"Makefile", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "release", "tests/lock.txt"} <= allowed
    assert not allowed & {"tests", "docs", "benchmarks", ".git"}


# ----------------------------------------------------------------------------------------------------- packages


def shipped() -> set[str]:
    """Paths in the wheel of the tracked files that ship."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {package.removeprefix("umbel").removeprefix(".").replace(".", "/") for package in PACKAGES}
    data = ("srt/kernels/cpu/source", "srt/kernels/triton/tuned")
    at_root = ("__init__.py", "__main__.py", "testing.py", "py.typed")
    here = [name for name in names if name in at_root or (name.rpartition("/")[0] or ".") in {*folders, *data}]
    return {f"umbel/{name}" for name in here}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of the tracked files, and the wheel that is made of the archive."""
    source, to = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(to), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return to


@pytest.mark.nightly
def test_the_wheel_is_the_files_that_ship(packages: Path) -> None:
    (wheel,) = packages.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert names == shipped()
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        read = email.message_from_bytes(archive.read(metadata))
    from umbel import __version__

    assert read["Version"] == __version__
    assert set(read.get_all("Provides-Extra") or ()) == set(EXTRAS)


@pytest.mark.nightly
def test_the_source_archive_has_what_a_wheel_is_made_of_and_no_more(packages: Path) -> None:
    (source,) = packages.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    names = {name for name in names if not name.startswith("umbel.egg-info/")}  # setuptools' own
    made = {"PKG-INFO", "setup.cfg"}
    asked = {"pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
    assert names == {name.removeprefix("umbel/") for name in shipped()} | made | asked


@pytest.mark.nightly
def test_twine_finds_nothing(packages: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, packages.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and g++")
def test_a_wheel_with_a_library_runs_without_a_compiler(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's library alone, which compiles in seconds; the others are made in the same way."""
    pytest.importorskip("auditwheel")
    from release import wheels

    monkeypatch.setattr(wheels, "PREBUILT_FOR", {platform.machine(): ()})
    monkeypatch.setattr(wheels, "COMPILED", tmp_path / "compiled")
    (pure,) = packages.glob("*-py3-none-any.whl")
    assert wheels.main([str(pure), "--to", str(tmp_path)]) == 0
    (made,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"umbel-.*-py3-none-manylinux_2_\d+_{platform.machine()}\.whl", made.name)
    with zipfile.ZipFile(made) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from umbel.srt.kernels.cpu import library, trie_walk\n"
        "loaded = library.load_host_library()\n"
        "trie_walk.CpuTrieWalk(loaded)\n"
        "print(library.compiler_of_prebuilt(loaded))"
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "UMBEL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("g++ "), done.stderr


def test_a_wheel_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from release import wheels

    (tmp_path / "sources").mkdir()
    shutil.copy(library.SOURCES / "memory.h", tmp_path / "sources")
    assert wheels.same_sources(library.SOURCES, library.SOURCES)
    assert not wheels.same_sources(library.SOURCES, tmp_path / "sources")
