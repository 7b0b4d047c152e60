"""Facts about the repository itself: what ships, what is imported, what is forbidden."""

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"tests", "examples", "benchmarks", "docs"}


def tracked(*suffixes: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if name.endswith(suffixes) and (ROOT / name).is_file()]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_list_of_packages_is_the_folders() -> None:
    folders = {
        ".".join(("umbel", *path.parent.relative_to(ROOT).parts))
        for path in tracked("__init__.py")
        if path.relative_to(ROOT).parts[0] not in NOT_SHIPPED
    }
    assert set(project()["tool"]["setuptools"]["packages"]) == folders


def test_no_other_module_lies_at_the_root() -> None:
    """`testing` is for tests of users, and ships as `umbel.testing`."""
    assert {path.name for path in tracked(".py") if path.parent == ROOT} <= {"__init__.py", "testing.py"}


FORBIDDEN = re.compile(
    r"\b(pickle|dill|marshal|shelve|diskcache)\b|recv_pyobj|send_pyobj|torch\.load|trust_remote_code\s*=\s*True"
    r"|(?<![\w.])eval\("
)


def test_nothing_that_runs_foreign_code_is_used() -> None:
    """Words in comments and docstrings that forbid it are fine."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] != "tests"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line.split("#")[0])
        and not re.search(r"\b(no|never|without|not)\b", line.lower())
        and "allow_pickle=False" not in line
    ]
    assert found == []


def test_wall_clock_time_is_not_used_for_decisions() -> None:
    """`time.time()` jumps when someone sets the clock; `srt.clock` and `time.monotonic` do not."""
    found = [
        str(path.relative_to(ROOT))
        for path in tracked(".py")
        if path.relative_to(ROOT).parts[0] not in NOT_SHIPPED and "time.time()" in path.read_text()
    ]
    assert found == []


def test_files_refer_to_no_numbered_notes_of_elsewhere() -> None:
    """A reader has this repository alone."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:80]}"
        for path in [*tracked(".py"), *tracked(".md")]
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"""(\"{3}|# |\()[FNR][0-9]{1,2}(:|,|\)| of)|(reliability|review) notes?\b""", line)
    ]
    assert found == []


def test_the_command_exists() -> None:
    module, _, function = project()["project"]["scripts"]["umbel"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
