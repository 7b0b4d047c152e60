"""Writes the results of a batch into a file while it runs, and its failures into another one.

    results.jsonl            {"row": 7, "review": "...", "sentiment": " positive"}      as programs end
    results.failed.jsonl     {"row": 9, "error": "ValueError", "message": "...", "input": {...}, "variables": {...}}
    results.parquet          made of results.partial.jsonl when the batch has ended: a Parquet file that is not
                             finished cannot be read

A line is one `os.write` to a file that was opened for appending, so a process that is killed loses the line that it
was writing at most, and that one is torn: `if_exists="resume"` takes it off. Lines come in the order in which programs
end: one slow program holds nothing up, and nothing that has ended waits in memory to be lost. `row` says the input.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...lang import checks, notebook
from ...lang.errors import ParameterError, shown
from ...lang.protocol import Cost
from ...lang.transport.file_lock import lock_file
from .frames import Framed, imported, joined, read_parquet, text_of, write_parquet
from .progress import told_calls

SUFFIXES = (".jsonl", ".parquet")
EXISTING = ("error", "resume", "overwrite")
_BEGINNING = b'{"row":'  # of each line
_MOST_DEPTH = 100  # of values inside of each other
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what Python shows of an object: another one in each process


@dataclass(frozen=True, slots=True)
class BatchOutput(Framed):
    """Describes a batch that was run with `output=`: its results are in a file, not in memory.

    Attributes:
        path: of the file.
        done: number of programs whose results are in it, those of earlier runs included.
        resumed: number of those of earlier runs.
        failed: number of programs that failed.
        failed_path: path of the file of failures, or None without one.
        cost: of this run.
        seconds: that this run took.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += country + ":" + ul.gen("city", max_tokens=4)
        >>> countries = [{"country": "France"}, {"country": "Italy"}]
        >>> model = ul.Echo({"France": " Paris", "Italy": " Rome"})
        >>> done = capital.run_batch(countries, output="capitals.jsonl", backend=model)
        >>> print(done)
        capitals.jsonl: 2 done · 4 tokens in, 0% cached, 2 out
        >>> sorted(row["city"] for row in done.rows())
        [' Paris', ' Rome']
    """

    path: str
    done: int
    resumed: int
    failed: int
    failed_path: str | None
    cost: Cost
    seconds: float

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of the file as dicts, in its order: that in which programs ended."""
        return read_parquet(self.path) if self.path.endswith(".parquet") else _rows(self.path)

    def failures(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of the file of failures as dicts: `row`, `error`, `message`, `input` and `variables`."""
        return iter(()) if self.failed_path is None else _rows(self.failed_path)

    def __str__(self) -> str:
        facts = [f"{self.path}: {self.done:,} done"]
        facts += [f"{self.resumed:,} of them before"] if self.resumed else []
        facts += [f"{self.failed:,} failed, in {self.failed_path}"] if self.failed else []
        facts += told_calls(self.cost.usage, self.cost.read)
        return " · ".join(facts)

    def _repr_html_(self) -> str:
        facts = {name: getattr(self, name) for name in ("path", "done", "resumed", "failed", "failed_path")}
        usage = self.cost.usage
        facts["tokens"] = f"{usage.prompt_tokens} in ({usage.cached_tokens} cached), {usage.completion_tokens} out"
        if self.cost.read.calls:
            facts["calls read from the journal"] = self.cost.read.calls
        cells = [(notebook.escaped(name), notebook.escaped(str(value))) for name, value in facts.items()]
        return notebook.folded(f"batch: {self.done} done, {self.failed} failed", notebook.table(cells), is_open=True)


class ResultFile:
    """The output of one batch. Its methods are called on one thread at a time.

    Args:
        path: ends in .jsonl or .parquet.
        if_exists: "error" refuses a file that is there; "resume" keeps its rows and adds the missing ones;
            "overwrite" begins anew.
        schema: pyarrow's, of the input; None: not known.
        source: path of the file that the input is read from; "" for none.

    Attributes:
        done: rows that the file has → where the line begins.

    Raises:
        ParameterError: the file exists, is none of a batch, is written by another run, or is the input; no such folder.
        MissingExtraError: Parquet without pyarrow.
    """

    def __init__(self, path: object, if_exists: object, schema: Any = None, source: str = "") -> None:
        self.path = checks.path("output", path)
        existing = checks.one_of("if_exists", if_exists, EXISTING)
        stem, suffix = os.path.splitext(self.path)
        if suffix not in SUFFIXES:
            raise ParameterError(f"output={shown(path)}; write a path that ends in {' or '.join(SUFFIXES)}")
        checks.output("output", self.path)
        self._is_parquet = suffix == ".parquet"
        if self._is_parquet:
            imported("pyarrow")
        self._schema = schema
        self.failed_path = f"{stem}.failed.jsonl"
        self._lines_path = f"{stem}.partial.jsonl" if self._is_parquet else self.path
        self.done: dict[int, int] = {}
        self.resumed = 0
        self._failures: int | None = None
        self._refuse_source(source)
        if existing == "error":
            self._refuse_existing()
        self._lines = self._opened(existing)
        try:
            if existing == "overwrite":
                os.ftruncate(self._lines, 0)
                self._remove(self.path if self._is_parquet else self.failed_path)
            self._end = self._load()
            self._remove(self.failed_path)  # failed programs run again
        except BaseException:
            os.close(self._lines)
            raise
        self.resumed = len(self.done)

    # -------------------------------------------------------------------------------- rows

    def has(self, index: int, inputs: Mapping[str, Any]) -> bool:
        """Returns whether the row is in the file.

        Raises:
            ParameterError: it is there with another input.
        """
        row = self.line(index)
        if row is None:
            return False
        now = json.loads(encoded(plain(joined(index, inputs, {}))))
        differing = [name for name in now if name not in row or not _is_same(row[name], now[name])]
        if differing:
            name = differing[0]
            raise ParameterError(
                f"{self.path} has row {index} with {name}={shown(row.get(name))}, and the input now has "
                f"{shown(now[name])}; give the input of that run, or another output="
            )
        return True

    def line(self, index: int) -> dict[str, Any] | None:
        """Returns the line of a row, or None where the file has none."""
        place = self.done.get(index)
        if place is None:
            return None
        with open(self._lines_path, "rb") as file:
            file.seek(place)
            found: dict[str, Any] = json.loads(file.readline())
        return found

    def write(self, index: int, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Appends one result. Raises OSError where the disk is full, say."""
        line = encoded(plain(joined(index, inputs, values))) + b"\n"
        _write(self._lines, line)
        self.done[index] = self._end
        self._end += len(line)

    def fail(self, index: int, inputs: Mapping[str, Any], error: BaseException, values: Mapping[str, Any]) -> None:
        """Appends one failure to its file, which is made for the first one."""
        if self._failures is None:
            self._failures = os.open(self.failed_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        told = {"row": index, "error": type(error).__name__, "message": str(error)}
        _write(self._failures, encoded(plain({**told, "input": dict(inputs), "variables": dict(values)})) + b"\n")

    def finish(self) -> None:
        """Makes the Parquet file. Called when the batch has come to its end; not after an error."""
        if self._is_parquet:
            write_parquet(self.path, lambda: _rows(self._lines_path), self._schema)
            self._remove(self._lines_path)

    def close(self) -> None:
        for file in (self._lines, self._failures):
            if file is not None:
                with contextlib.suppress(OSError):  # pipes and some file systems cannot be synchronised
                    os.fsync(file)
                os.close(file)

    @property
    def failures_written(self) -> bool:
        return self._failures is not None

    # -------------------------------------------------------------------------------- how

    def _refuse_existing(self) -> None:
        for path in dict.fromkeys((self.path, self._lines_path, self.failed_path)):
            if os.path.exists(path):
                raise ParameterError(
                    f"{path} exists; write if_exists='resume' to keep its rows and add the missing ones, "
                    "if_exists='overwrite' to begin anew, or another output="
                )

    def _refuse_source(self, source: str) -> None:
        for path in dict.fromkeys((self.path, self._lines_path, self.failed_path)):
            if source and checks.is_one_file(path, source):
                first = "; or give the input of the first run with if_exists='resume', which runs again what failed"
                raise ParameterError(
                    f"output={shown(self.path)} would write to {path}, which the input is read from; write another "
                    f"output={first if path == self.failed_path else ''}"
                )

    def _opened(self, existing: str) -> int:
        if self._is_parquet and existing == "resume" and os.path.exists(self.path):
            self._unpack()
        try:
            file = os.open(self._lines_path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise ParameterError(f"{self.path} cannot be written: {error.strerror}; write another output=") from None
        if not lock_file(file):
            os.close(file)
            raise ParameterError(f"{self.path} is written by another run; wait for it, or write elsewhere")
        return file

    def _unpack(self) -> None:
        """Turns a Parquet file into lines, so that more can be added."""
        if os.path.exists(self._lines_path):
            return  # those of a run that did not end
        temporary = f"{self._lines_path}.tmp"
        try:
            with open(temporary, "wb") as file:
                for row in read_parquet(self.path):
                    file.write(encoded(plain(row)) + b"\n")
        except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
            raise ParameterError(
                f"{self.path} is no Parquet file ({error}); write if_exists='overwrite', or another output="
            ) from None
        os.replace(temporary, self._lines_path)

    def _load(self) -> int:
        """Finds the rows that are there, and takes off a torn last line. Returns where the file ends."""
        place = 0
        with open(self._lines_path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    self.done[row["row"]] = place
                except (ValueError, TypeError, KeyError):
                    is_ours = number > 1 or line[: len(_BEGINNING)] == _BEGINNING[: len(line)]
                    if is_ours and not line.endswith(b"\n"):  # its process was killed in the middle of it
                        os.ftruncate(self._lines, place)
                        break
                    raise ParameterError(
                        f"{self._lines_path}, line {number} is no result of a batch; write if_exists='overwrite' to "
                        "begin anew, or another output="
                    ) from None
                place += len(line)
                if not line.endswith(b"\n"):  # it was killed one byte before its end
                    _write(self._lines, b"\n")
                    return place + 1
        return place

    @staticmethod
    def _remove(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def refuse_one_file(paths: Mapping[str, object]) -> None:
    """Raises ParameterError where two options name one file: each would write into the other's."""
    named = [(option, os.fsdecode(path)) for option, path in paths.items() if isinstance(path, str | os.PathLike)]
    for (one, path), (other, other_path) in itertools.combinations(named, 2):
        if checks.is_one_file(path, other_path):
            raise ParameterError(f"{one}= and {other}= name one file, {other_path}; write two paths")


def _write(file: int, data: bytes) -> None:
    while data:  # a full disk takes a part, then raises
        data = data[os.write(file, data) :]


def _rows(path: str) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)


def encoded(value: Any) -> bytes:
    """Returns JSON in one line. Integers of any size and halves of characters are kept."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return json.dumps(value, ensure_ascii=True, default=shown).encode()


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: objects as dicts, times as text, bytes in base64, sets in the order of their
    texts, what has no such form, or is deeper than 100 levels, as it is shown in messages."""
    return _plain(value, 0)


def _plain(value: Any, depth: int) -> Any:
    match value:
        case _ if depth > _MOST_DEPTH:  # it may hold itself
            return shown(value)
        case dict():
            return {_key(key): _plain(each, depth + 1) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each, depth + 1) for each in value]
        case set() | frozenset():
            return sorted((_plain(each, depth + 1) for each in value), key=encoded)
    try:
        return msgspec.to_builtins(value, enc_hook=_other, str_keys=True)
    except (TypeError, RecursionError):  # what it holds
        return _ADDRESS.sub("", shown(value))


def _key(key: Any) -> str:
    if type(key) is str:
        return key
    try:
        return str(next(iter(msgspec.json.decode(msgspec.json.encode({key: None})))))
    except (TypeError, UnicodeEncodeError, OverflowError):
        return shown(key)


def _other(value: Any) -> Any:
    kind = type(value)
    if hasattr(kind, "model_dump"):  # of Pydantic
        return value.model_dump(mode="json")
    if hasattr(kind, "isoformat"):  # subclasses of times
        return value.isoformat()
    if hasattr(kind, "tolist"):  # arrays, and numbers of numpy
        return value.tolist()
    return _ADDRESS.sub("", shown(value))


def _is_same(kept: Any, now: Any) -> bool:
    """Returns whether the value of a file is that of an input: a column of Parquet has one type, for which a value may
    have become the text of its JSON, or have got members that are None."""
    if kept == now:
        return True
    match kept, now:
        case dict(), dict():
            return all(_is_same(kept.get(name), now.get(name)) for name in {*kept, *now})
        case list(), list():
            return len(kept) == len(now) and all(map(_is_same, kept, now))
        case str(), _:
            return kept == text_of(now)
    return False
