"""The file of a journal: JSON lines that are appended, each with a sum over itself and the line before it.

    {"sum":"…","type":"journal", …}      format, version of umbel, the program and what it calls, as digests
    {"sum":"…","type":"model", …}        name, capabilities and chat template: what a replay needs of the model
    {"sum":"…","type":"program", …}      a program of the batch has begun: its item and its arguments
    {"sum":"…","type":"call", …}         a call has ended: item, place, request, result
    {"sum":"…","type":"finished", …}     a program of the batch has ended

Sums are chained, so a line that was edited, moved or taken out is found, wherever it stands. A last line without its
line feed is torn: its process was killed in the middle of it. It is dropped, with a JournalWarning.

A call is one `os.write` to a file that was opened for appending, so a process that is killed loses the calls that it
waits for and nothing before them. There is no `fsync` for each line: it would protect from a power cut alone, at
milliseconds for each call. The file is synchronised once, when it is closed. What a power cut takes away is the end of
the file, which is dropped as a torn line or refused as a damaged one; its calls are made again.

One process has the file at a time (lang/transport/file_lock.py). It is made for its owner alone (0600). Requests hold
no keys of providers, and neither do lines. In memory is where lines lie, not what they say.
"""

import base64
import contextlib
import os
import threading
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, Self

import msgspec

from ...lang.errors import JournalError
from ...lang.protocol import Capabilities, ConstraintSpec, Final, Scored
from ...lang.sampling import SamplingParams
from ...lang.transport.file_lock import lock_file
from ..loop import wait_for

FORMAT = 1
LONGEST_END = 30.0  # seconds that a new run waits for the bodies of stopped runs to return
_OPENING = b'{"sum":"'
_SUM_BYTES = 8
_HEAD = len(_OPENING) + 2 * _SUM_BYTES + 2  # to the first member after the sum


class JournalWarning(UserWarning):
    """Warns that something of a journal was dropped: its last line, which a killed process had begun to write.

    The call of that line is made again.

    Examples:
        >>> import warnings
        >>> @ul.function
        ... def capital(s, country):
        ...     s += country + ":" + ul.gen("city", max_tokens=4)
        >>> state = capital.run("France", journal="run.jsonl")
        >>> with open("run.jsonl", "a") as file:
        ...     _ = file.write('{"sum":')  # as a process leaves it that was killed
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     state = capital.run("France", journal="run.jsonl")
        >>> print(caught[0].category.__name__, caught[0].message)
        JournalWarning run.jsonl: the last line (6) is torn, and is dropped; its call is made again
        >>> state.cost.read.calls
        1
    """

    __module__ = "umbel"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all lines."""


class JournalHeader(_Line, frozen=True, tag="journal"):
    """The first line.

    Attributes:
        format: of the file.
        umbel: version that wrote it.
        program: name of the program; "" where the file is of a test, which may run several.
        parts: what the program consists of → digest: its functions, or its graph.
        draws: random number that seeds the draws of choices, so that a run that goes on draws the same.
    """

    format: int
    umbel: str
    program: str = ""
    parts: dict[str, str] = {}
    draws: int = 0


class JournalModel(_Line, frozen=True, tag="model"):
    """A model that answered calls, without its address and its keys.

    Attributes:
        capabilities: of its backend, name and model among them.
        template: source of its chat template; None is the plain one.
        tokens, options: of the template.
        called: name of the template, for messages.
    """

    capabilities: Capabilities
    template: str | None = None
    tokens: dict[str, str] = {}
    options: dict[str, Any] = {}  # Any: JSON
    called: str = ""


class JournalProgram(_Line, frozen=True, tag="program"):
    """A program has begun.

    Attributes:
        item: of the batch, "0" for a run; "3>0" for the first run that the body of item 3 started.
        program: its name.
        arguments: name → digest, options of the run among them.
        given: the arguments by name, where JSON can say them all.
        sampling: sampling options of the run.
        speculate: tokens of speculation of the run or program, "auto", or None.
        positions: the first arguments, where a parameter is taken by position alone.
    """

    item: str
    program: str
    arguments: dict[str, str] = {}
    given: dict[str, Any] | None = None  # Any: JSON
    sampling: dict[str, Any] = {}
    speculate: int | str | None = None
    positions: list[Any] = []  # Any: JSON


class PromptText(msgspec.Struct, frozen=True, array_like=True):
    """The text of a prompt: the first `kept` characters of the prompt in line `base`, then `text`; base 0: only it.

    Pictures appear as their digest."""

    base: int
    kept: int
    text: str


class JournalCall(_Line, frozen=True, tag="call"):
    """A call has ended.

    Attributes:
        item: of the program.
        place: the stream, as its path through the forks, the number of the call in it, and the try: "0.1_2/3-0-2".
        request: digest of prompt, parameters and constraint.
        model: name of the backend.
        kind, name: "gen" or "select", and the variable.
        prompt: its text.
        result: Final or Scored, with its usage; as text in base64 of msgpack where JSON cannot say a number of it.
        dollars: that it cost then; None where there was no price.
        sampling, constraint: of a generation.
        choices: of a scored select.
    """

    item: str
    place: str
    request: str
    model: str
    kind: str
    name: str
    prompt: PromptText
    result: msgspec.Raw
    dollars: float | None = None
    sampling: SamplingParams | None = None
    constraint: ConstraintSpec | None = None
    choices: tuple[str, ...] = ()


class JournalEnd(_Line, frozen=True, tag="finished"):
    """A program has ended without an error."""

    item: str


Line = JournalHeader | JournalModel | JournalProgram | JournalCall | JournalEnd
_written: "weakref.WeakValueDictionary[str, JournalFile]" = weakref.WeakValueDictionary()  # by runs of this process
_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_RESULTS: msgspec.json.Decoder[Final | Scored] = msgspec.json.Decoder(Final | Scored)
_PACKED: msgspec.msgpack.Decoder[Final | Scored] = msgspec.msgpack.Decoder(Final | Scored)


class JournalFile:
    """An open journal. Its methods may be called on any thread.

    Args:
        path: of the file. A new one is made where it may be written.
        writes: lines may be appended; the file is locked. False reads a file that is there.

    Attributes:
        header: None for a file without one, which is new.
        models: by name.
        programs: item → the digests of its arguments, and its line; only the last line of an item counts.
        calls: item → place → (digest of the request, line) of each call there, in order.
        finished: items that have ended.
        constraints: that calls were sent with.
        closed: set when the last user has released it.
        model: of the first call that no inner run has made; "" before it.

    Raises:
        JournalError: it cannot be opened, another run has it, a line is damaged, or it is of another format.
    """

    def __init__(self, path: str, *, writes: bool) -> None:
        self.path = path
        self.header: JournalHeader | None = None
        self.models: dict[str, JournalModel] = {}
        self.programs: dict[str, tuple[dict[str, str], int]] = {}
        self.calls: dict[str, dict[str, list[tuple[str, int]]]] = {}
        self.finished: set[str] = set()
        self.constraints: set[ConstraintSpec] = set()
        self.model = ""
        self._writes = writes
        self._lock = threading.Lock()
        self._offsets = array("Q", [0])  # where lines end: line n is from [n - 1] to [n]
        self._sum = b""
        self._waiting: list[bytes] = []
        self._broken = False
        self._users = 1
        self._ends: list[Callable[[], bool]] = []  # of each run: whether it has ended
        self.closed = threading.Event()
        self._open = _opened(path, writes=writes)
        try:
            self._load()
        except BaseException:
            os.close(self._open)
            raise
        if writes:
            _written[os.path.realpath(path)] = self

    # -------------------------------------------------------------------------------- users

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def retain(self, ended: Callable[[], bool] | None = None) -> None:
        """Adds a user: the file stays open for it. `ended`: of a run, whether it will release the file soon."""
        with self._lock:
            self._users += 1
            if ended is not None:
                self._ends.append(ended)

    @property
    def closes(self) -> bool:
        """True if it is written by runs that have ended or were stopped: it will be closed when their bodies return."""
        with self._lock:
            return all(ended() for ended in self._ends) and self._users <= len(self._ends)

    def release(self, ended: Callable[[], bool] | None = None) -> None:
        """Takes a user away. The file is closed after the last. `ended`: that of a run, as `retain` was given it."""
        with self._lock:
            self._users -= 1
            if ended is not None:
                self._ends.remove(ended)
            if self._users:
                return
            if self._writes:
                # What waits is not needed. Pipes and some file systems cannot be synchronised.
                with contextlib.suppress(JournalError, OSError):
                    self._write()
                    os.fsync(self._open)
            os.close(self._open)
        self.closed.set()

    def check_open(self) -> None:
        """Raises JournalError where the last user has released it."""
        if self._users == 0:
            raise JournalError(
                f"{self.path} is closed, since its run has ended; make further calls in the body of a program"
            )

    # -------------------------------------------------------------------------------- lines

    def append(self, line: Line, *, later: bool = False) -> int:
        """Writes a line. Returns its number, counted from 1.

        `later`: with the next line, or when the file is closed. For lines whose loss costs nothing.

        Raises:
            JournalError: the file is closed, the disk is full, or a text is no Unicode.
        """
        try:
            body = msgspec.json.encode(line)[1:]
        except UnicodeEncodeError:
            raise JournalError(
                f"{self.path}: a journal holds Unicode, and an argument, a prompt or an answer has half of a surrogate "
                "pair; clean the text, or run without journal="
            ) from None
        with self._lock:
            self.check_open()
            sum_ = _sum_of(self._sum, body)
            data = _OPENING + sum_ + b'",' + body + b"\n"
            self._waiting.append(data)
            self._offsets.append(self._offsets[-1] + len(data))
            self._sum = sum_
            if not later:
                self._write()
            self._index(line, len(self._offsets) - 1)
            return len(self._offsets) - 1

    def call(self, number: int) -> JournalCall:
        """Returns the call in this line."""
        line = _LINES.decode(self._read(number))
        assert isinstance(line, JournalCall), "the index has numbers of calls"
        return line

    def program(self, number: int) -> JournalProgram:
        """Returns the program in this line."""
        line = _LINES.decode(self._read(number))
        assert isinstance(line, JournalProgram), "the index has numbers of programs"
        return line

    def text_of(self, number: int) -> str:
        """Returns the text of the prompt in this line."""
        kept: int | None = None
        pieces: list[str] = []
        while number:
            prompt = self.call(number).prompt
            if kept is None:
                pieces.append(prompt.text)
                kept = prompt.kept
            elif kept > prompt.kept:
                pieces.append(prompt.text[: kept - prompt.kept])
                kept = prompt.kept
            number = prompt.base
        return "".join(reversed(pieces))

    def model_of(self, item: str) -> JournalModel | None:
        """Returns the model of an item's first call; of the first call in the file where the item has none."""
        first = next((lines for lines in self.calls.get(item, {}).values()), None)
        if first is not None:
            return self.models.get(self.call(first[0][1]).model)
        return next(iter(self.models.values()), None)

    # -------------------------------------------------------------------------------- how

    def _write(self) -> None:
        """Writes the waiting lines at once. Called with the lock held."""
        if self._broken:
            raise JournalError(f"{self.path}: an earlier line could not be written; nothing is appended any more")
        data, written = b"".join(self._waiting), 0
        try:
            while written < len(data):
                written += os.write(self._open, data[written:])
        except OSError as error:
            self._broken = True
            with contextlib.suppress(OSError):
                os.ftruncate(self._open, self._offsets[-1] - len(data))
            raise JournalError(f"{self.path} cannot be written: {error}; its lines so far are whole") from error
        self._waiting.clear()

    def _read(self, number: int) -> bytes:
        start, end = self._offsets[number - 1], self._offsets[number]
        with self._lock:
            self.check_open()
            os.lseek(self._open, start, os.SEEK_SET)  # what is written is appended, wherever this is
            return b"{" + os.read(self._open, end - start)[_HEAD:]

    def _load(self) -> None:
        for number, data in enumerate(self._lines(), 1):
            body = data[_HEAD:-1]
            if data[:_HEAD] != _OPENING + _sum_of(self._sum, body) + b'",':
                raise self._damaged(number)
            try:
                line = _LINES.decode(b"{" + body)
            except msgspec.DecodeError as error:
                raise JournalError(
                    f"{self.path} line {number} cannot be read ({error}): another version of umbel wrote it. Use that "
                    "one, or write journal= with the path of a new file"
                ) from None
            self._sum = data[len(_OPENING) : len(_OPENING) + 2 * _SUM_BYTES]
            self._offsets.append(self._offsets[-1] + len(data))
            self._check_format(line, number)
            self._index(line, number)

    def _lines(self) -> Iterator[bytes]:
        """Yields whole lines; drops a torn last one."""
        with open(self._open, "rb", closefd=False) as stream:
            for data in stream:
                if data.endswith(b"\n"):
                    yield data
                    continue
                number = len(self._offsets)
                if number == 1 and data[: len(_OPENING)] != _OPENING[: len(data)]:  # nothing of it is a journal's
                    raise self._damaged(1)
                warnings.warn(
                    f"{self.path}: the last line ({number}) is torn, and is dropped; its call is made again",
                    JournalWarning,
                    stacklevel=2,
                )
                if self._writes:
                    os.ftruncate(self._open, self._offsets[-1])

    def _damaged(self, number: int) -> JournalError:
        if number == 1:
            return JournalError(
                f"{self.path} is no journal, or its first line was edited; write the path of a new file"
            )
        return JournalError(
            f"{self.path} line {number} was edited or damaged, or a line before it was taken out. Restore the file; or "
            f"keep what stands before (head -n {number - 1} {self.path} > new.jsonl) and write journal='new.jsonl': "
            "the calls of later lines are made again"
        )

    def _check_format(self, line: Line, number: int) -> None:
        if (number == 1) != isinstance(line, JournalHeader):
            raise self._damaged(number)
        if isinstance(line, JournalHeader) and line.format != FORMAT:
            raise JournalError(
                f"{self.path} has format {line.format}, and umbel reads {FORMAT}; write the path of a new file, or use "
                f"umbel {line.umbel}"
            )

    def _index(self, line: Line, number: int) -> None:
        match line:
            case JournalHeader():
                self.header = line
            case JournalModel():
                self.models[line.capabilities.name] = line
            case JournalProgram():
                self.programs[line.item] = line.arguments, number
            case JournalCall():
                if line.constraint is not None:
                    self.constraints.add(line.constraint)
                if not self.model and ">" not in line.item:
                    self.model = line.model
                self.calls.setdefault(line.item, {}).setdefault(line.place, []).append((line.request, number))
            case JournalEnd():
                self.finished.add(line.item)


def closing_file(path: str) -> JournalFile | None:
    """Returns the file at this path that runs of this process still hold, though all of them have ended or were
    stopped; None where there is none."""
    mine = _written.get(os.path.realpath(path))
    return mine if mine is not None and mine.closes else None


def written_result(result: Final | Scored) -> msgspec.Raw:
    """Returns a result as JSON; as base64 of msgpack where a number is infinite or none, which JSON cannot say."""
    data = msgspec.json.encode(result)
    if b"null" in data:
        try:
            same = _RESULTS.decode(data) == result
        except msgspec.ValidationError:
            same = False
        if not same:
            return msgspec.Raw(b'"' + base64.b64encode(msgspec.msgpack.encode(result)) + b'"')
    return msgspec.Raw(data)


def read_result(raw: msgspec.Raw) -> Final | Scored:
    """Returns the result of a line."""
    data = bytes(raw)
    return _PACKED.decode(base64.b64decode(data[1:-1])) if data.startswith(b'"') else _RESULTS.decode(data)


def _sum_of(before: bytes, body: bytes) -> bytes:
    return blake2b(before + body, digest_size=_SUM_BYTES).hexdigest().encode()


def _opened(path: str, *, writes: bool) -> int:
    """Opens the file, and locks it where it is written."""
    flags = (os.O_RDWR | os.O_CREAT | os.O_APPEND) if writes else os.O_RDONLY
    try:
        opened = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
    except OSError as error:
        raise JournalError(f"journal {path!r} cannot be opened: {error.strerror}; write the path of a file") from error
    if writes:
        ending = closing_file(path)
        if ending is not None:
            wait_for(ending.closed, LONGEST_END)
        if not lock_file(opened):
            os.close(opened)
            raise JournalError(
                f"journal {path!r} is in use by another run; wait for its end, or write the path of another file"
            )
    return opened
