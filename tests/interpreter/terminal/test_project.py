"""`umbel new` makes a project whose program and tests run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from umbel.interpreter.cli import main
from umbel.interpreter.terminal.project import FILES, make_project

from ...test_house import ROOT


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "essays"
    make_project(folder)
    return folder


def make(project: Path, target: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / ".types"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of this environment take seconds
    command = ["make", target, f"PYTHON={sys.executable}"]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_says_what_is_there_and_what_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-essays"]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in FILES)
    assert "  cd my-essays\n  make demo " in printed
    assert {path.name for path in (tmp_path / "my-essays").iterdir()} == FILES.keys()
    assert 'name = "my-essays"' in (tmp_path / "my-essays" / "pyproject.toml").read_text()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["new", str(tmp_path)]) == 1
    assert "write the name of a new folder, or of an empty one" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["3x", "a b", "-x", "x.y"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "--", str(tmp_path / name)]) == 1
    assert f"{name!r} is no name of a project" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["new", "."]) == 0
    assert (folder / "reviews.py").is_file()


def test_a_file_in_its_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert main(["new", str(tmp_path / "taken")]) == 1
    assert "write the name of a folder that can be made" in capsys.readouterr().err


@pytest.mark.processes
def test_make_demo_runs_the_program_without_a_model(project: Path) -> None:
    done = make(project, "demo")
    assert done.returncode == 0, done.stderr
    assert "food   bad   The soup was cold" in done.stdout
    assert "9 calls, " in done.stdout


@pytest.mark.processes
def test_make_test_passes(project: Path) -> None:
    done = make(project, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.mark.model
@pytest.mark.nightly
def test_the_program_runs_on_the_default_model(project: Path) -> None:
    command = "from umbel.interpreter.cli import main; raise SystemExit(main(['run', 'reviews.py']))"
    path = os.pathsep.join([str(ROOT / ".types"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()[:6:2]]
    assert lines == [["food", "bad"], ["staff", "good"], ["price", "bad"]]
