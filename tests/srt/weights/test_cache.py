"""The cache folder: made once, whole or not at all, by one process at a time."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from umbel.lang.errors import ModelError
from umbel.srt.core.cache_folder import build_once, cache_folder, locked, make_private, write_atomically


def is_whole(folder: Path) -> bool:
    return (folder / "whole").exists()


def write_whole(folder: Path) -> None:
    (folder / "whole").write_text("1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"UMBEL_CACHE": "/big/umbel", "XDG_CACHE_HOME": "/x"}, Path("/big/umbel")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/umbel")),
        ({}, Path.home() / ".cache" / "umbel"),
    ],
)
def test_the_folder_follows_the_environment(
    environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder(environment) == expected


def test_it_is_private(tmp_path: Path) -> None:
    build_once(tmp_path / "cache" / "models" / "m", write_whole, complete=is_whole)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert (tmp_path / "cache" / "models").stat().st_mode & 0o077 == 0
    assert (tmp_path / "cache" / "models" / "m").stat().st_mode & 0o077 == 0


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ModelError, match="chmod go-w"):
        make_private(tmp_path / "open")


def test_a_folder_that_cannot_be_made_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="set UMBEL_CACHE"):
        make_private(tmp_path / "file" / "cache")


def test_what_is_complete_is_not_built_again(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    assert build_once(target, write_whole, complete=is_whole)
    assert not build_once(target, lambda folder: pytest.fail("built twice"), complete=is_whole)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left on device.*UMBEL_CACHE"):
        build_once(tmp_path / "models" / "m", fail, complete=is_whole)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".m.lock"]


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir(mode=0o700)
    for stale in (".m.making-x", ".other.making-x"):
        (models / stale).mkdir()
        (models / stale / "half").write_text("1")
    build_once(models / "m", write_whole, complete=is_whole)
    assert sorted(path.name for path in models.iterdir()) == [".m.lock", ".other.making-x", "m"]


def test_an_incomplete_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir(mode=0o700)
    (tmp_path / "models" / "m").mkdir()
    (tmp_path / "models" / "m" / "old").write_text("1")
    assert build_once(tmp_path / "models" / "m", write_whole, complete=is_whole)
    assert [path.name for path in (tmp_path / "models" / "m").iterdir()] == ["whole"]


def test_waiting_for_another_holder_ends(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "lock"),
        pytest.raises(ModelError, match="another process has held"),
        locked(tmp_path / "lock", seconds=0.0),
    ):
        pass


def test_a_disk_without_locks_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ModelError, match=r"No locks available.*local disk"), locked(tmp_path / "lock"):
        pass


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


BUILDER = """
import sys
from pathlib import Path
from umbel.srt.core.cache_folder import build_once

def build(folder):
    with Path(sys.argv[2]).open("a") as file:
        file.write("built\\n")
    (folder / "whole").write_text("1")

sys.stdin.readline()  # all of them start together
build_once(Path(sys.argv[1]), build, complete=lambda folder: (folder / "whole").exists())
"""


@pytest.mark.processes
def test_processes_that_ask_at_once_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILDER, str(tmp_path / "models" / "m"), str(tmp_path / "builds")]
    asking = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for process in asking:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in asking:
        process.communicate(timeout=60)
    assert [process.returncode for process in asking] == [0] * 4
    assert (tmp_path / "builds").read_text() == "built\n"
