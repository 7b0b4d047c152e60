"""Gives pytest the fixture `umbel_journal`, and tracebacks without frames of umbel.

Programs of a test are recorded once, and replayed without a model from then on:

    def test_capital(umbel_journal):
        backend = umbel_journal.backend(lambda: ul.OpenAI("gpt-4o"))
        assert capital.run("France", backend=backend)["answer"] == "Paris"

All runs of the test are in one file: `journals/MODULE.TEST.jsonl`, or `MODULE.CLASS.TEST.jsonl`, in the folder of the
test. `--umbel-record` says what happens to it:

    once    a file that is there is replayed; a new one is recorded (the default)
    none    files are replayed, and a test without one fails: for CI
    new     files are replayed; calls that are not in them are made, and appended
    all     files are recorded afresh

A file that was begun by a test that failed before its runs had ended is removed, and so is a folder without another
one: calls that failed are not recorded.

A test that fails by an error of umbel's, or of a program's own, shows the lines of the test and of the program;
`pytest --full-trace` shows those between. An error that umbel itself has made keeps them.
"""

import contextlib
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ...lang.protocol import Backend
    from .use import JournalUse

FOLDER = "journals"
_LONGEST = 160  # characters of the name of a test in that of its file
_FAILED = pytest.StashKey[bool]()
_ROOT = __name__.partition(".")[0]
_INSTALLED = ("<frozen ", *{path + os.sep for path in sysconfig.get_paths().values() if path})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("umbel").addoption(
        "--umbel-record",
        choices=("once", "none", "new", "all"),
        default="once",
        help="what umbel_journal records: once (new files; default), none (for CI), new (missing calls), all (afresh)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> None:
    """Notes whether the test has failed, and hides the frames of umbel, but in its own tests."""
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or call.excinfo is not None
    package = sys.modules.get(_ROOT)
    if call.excinfo is None or package is None or item.config.rootpath == Path(str(package.__file__)).parent:
        return
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == _ROOT and isinstance(module, ModuleType):
            vars(module).setdefault("__tracebackhide__", _hides)


def _hides(error: "pytest.ExceptionInfo[BaseException]") -> bool:
    """Returns whether the frames of umbel tell nothing of this error: it was meant, or raised below the user's code."""
    from ...lang.errors import UmbelError

    if isinstance(error.value, UmbelError):
        return True
    hides = False
    frame: TracebackType | None = error.tb
    while frame is not None:  # the last one that is of umbel, or of code that is not installed, decides
        code = frame.tb_frame
        if str(code.f_globals.get("__name__")).partition(".")[0] == _ROOT:
            hides = False
        elif not code.f_code.co_filename.startswith(_INSTALLED):
            hides = True
        frame = frame.tb_next
    return hides


class JournalOfTest:
    """The journal of one test.

    Attributes:
        path: of the file.
        replays: no call is made.
    """

    def __init__(self, path: Path, *, replays: bool) -> None:
        from .file import JournalFile

        self.path = path
        self.replays = replays
        self._runs = 0
        self._file = JournalFile(str(path), writes=not replays)

    def backend(self, make: "Callable[[], Backend]") -> "Backend":
        """Returns the backend that `make` gives; in a replay the recorded model, and `make` is not called: it may need
        a key, or a server."""
        from .offline import offline

        return offline(self._file, str(self._runs)) if self.replays else make()

    def use(self) -> "JournalUse":
        """Returns the use of the file by the next run of the test."""
        from .offline import offline
        from .use import JournalMode, JournalUse

        item, self._runs = str(self._runs), self._runs + 1
        return JournalUse(
            str(self.path),
            JournalMode.REPLAY if self.replays else JournalMode.EXTEND,
            file=self._file,
            item=item,
            backend=offline(self._file, item) if self.replays else None,
            remedy="the program asks other things than it did; look whether that is meant, then record the test again: "
            "pytest --umbel-record=all",
        )

    @property
    def whole(self) -> bool:
        """True if it has runs, and all of them have ended without an error."""
        return bool(self._file.programs) and self._file.programs.keys() <= self._file.finished

    def close(self) -> None:
        self._file.release()


@pytest.fixture
def umbel_journal(request: pytest.FixtureRequest) -> Iterator[JournalOfTest]:
    """Records the runs of programs in this test, or replays them. See `--umbel-record`."""
    from ..run import journal_of_block

    record = request.config.getoption("--umbel-record")
    path = request.path.parent / FOLDER / f"{request.path.stem}.{_name_of(request.node)}.jsonl"
    there = path.is_file() and path.stat().st_size > 0
    if record == "none" and not there:
        pytest.fail(f"{path} is not there; record it: pytest --umbel-record=once, with a model", pytrace=False)
    if record == "all" and there:
        path.unlink()
    path.parent.mkdir(exist_ok=True)
    journal = JournalOfTest(path, replays=record == "none" or (record == "once" and there))
    try:
        with journal_of_block(journal.use):
            yield journal
    finally:
        begun = not journal.replays and (record == "all" or not there)
        useless = begun and request.node.stash.get(_FAILED, False) and not journal.whole
        journal.close()
        if useless:
            path.unlink()
            with contextlib.suppress(OSError):  # other tests have files there
                path.parent.rmdir()


def _name_of(test: pytest.Item) -> str:
    """Returns the name of a test in its module, as a file may be called; with a digest where something is left out."""
    name = test.nodeid.partition("::")[2].replace("::", ".")
    written = re.sub(r"[^\w.\[\]-]+", "_", name)[:_LONGEST]
    return written if written == name else f"{written}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
