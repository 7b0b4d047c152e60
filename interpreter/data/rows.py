"""Reads the rows of a batch: of a file, of a frame, of an Arrow table. Lazily, in constant memory.

    "reviews.jsonl"    ─┐
    "reviews.parquet"   ├─► table_of() ─► Table: name, columns, total, rows ─► RowCalls: arguments of each program
    pandas, polars, ...─┘

Frames are known by their methods, so no library is imported to find out. Columns are matched to the program's
parameters by name, and values to the annotations of these, where they are plain (`str`, `int | None`). Other columns
are carried along: they are in `Failure.arguments` and in the output.

A text file is read once before anything runs, so a torn line is found before the first call is paid, and the number of
rows is known. A row that does not fit its program is an error of this row.
"""

import contextlib
import csv
import difflib
import gzip
import inspect
import math
import os
import stat
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import BoundArguments
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TextIO, Union, get_args, get_origin

import msgspec

from ...lang import checks
from ...lang.errors import MissingExtraError, ParameterError, shown

if TYPE_CHECKING:
    from ..body import Arguments

Row = dict[str, Any]  # column → the user's value
CHUNK = 1000  # rows of a frame that are converted at once
MOST_COLUMNS = 10_000
KINDS = (".jsonl", ".ndjson", ".jsonl.gz", ".csv", ".parquet")
_FRAMES = "a pandas or polars DataFrame, an Arrow table"
_LONGEST_FIELD = 1 << 30  # characters of a field of CSV


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with named columns.

    Attributes:
        name: of the file or the kind of frame, for messages.
        columns: of all rows, where those are read beforehand; else of the first one.
        total: number of rows; None where it is not known.
        rows: yields them, once.
        is_text: values are texts that stand for numbers, as in CSV.
        schema: pyarrow's, of a table that has one.
        path: of the file; "" for what is in memory.
        skips: is given the number and the input of a row, and says that it needs no run; None: every row needs one.
    """

    name: str
    columns: tuple[str, ...]
    total: int | None
    rows: Iterator[Row]
    is_text: bool = False
    schema: Any = None  # Any: pyarrow.Schema, which need not be installed
    path: str = ""
    skips: Callable[[int, Row], bool] | None = None


def table_of(given: object, asked: str = "run_batch(batch_arguments)") -> Table | None:
    """Returns the rows of a path or a frame, or None for anything else, such as a list of dicts. `asked`: the
    parameter that it was given for, in messages.

    Raises:
        ParameterError: no such file, a file that is not what its name says, a torn line, columns without names.
        MissingExtraError: Parquet without pyarrow.
    """
    if isinstance(given, Table):
        return given
    if isinstance(given, str | os.PathLike):
        return _file(checks.path(asked, given), asked)
    kind: Any = type(given)
    if hasattr(kind, "itertuples") and hasattr(kind, "iloc"):
        return _pandas(given)
    if hasattr(kind, "iter_rows") and hasattr(kind, "columns"):
        return _polars(given)
    if hasattr(kind, "collect_schema") and hasattr(kind, "collect"):
        raise ParameterError(f"{asked} is a lazy frame; write frame.collect()")
    if hasattr(kind, "schema") and any(hasattr(kind, name) for name in ("to_batches", "read_next_batch", "to_pylist")):
        return _arrow(given)
    if hasattr(kind, "column_names") and hasattr(kind, "__iter__"):
        return _dataset(given, asked)
    return None


# -------------------------------------------------------------------------------- files


def _file(path: str, asked: str) -> Table:
    suffix = next((suffix for suffix in KINDS if path.lower().endswith(suffix)), None)
    if suffix is None:
        raise ParameterError(
            f"{asked}={shown(path)}: write a path that ends in {', '.join(KINDS)}, {_FRAMES}, "
            "or an iterable of dicts or tuples"
        )
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {error.strerror}; write the path of a file") from None
    if suffix == ".parquet":
        return _parquet(path)
    read = _csv_rows if suffix == ".csv" else _json_rows
    total: int | None = None
    columns: tuple[str, ...] = ()
    rows = read(path)
    if regular:  # it can be read again
        total, names = 0, dict[str, None]()
        for row in read(path):
            names |= dict.fromkeys(row)
            total += 1
        columns = tuple(names)
    else:
        first = next(rows, None)
        columns = () if first is None else tuple(first)
        rows = _after(first, rows)
    return Table(path, columns, total, rows, is_text=suffix == ".csv", path=path)


def _after(first: Row | None, rows: Iterator[Row]) -> Iterator[Row]:
    if first is not None:
        yield first
    yield from rows


def _text_of(path: str) -> TextIO:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


@contextlib.contextmanager
def _reading(path: str, kind: str, lines: Callable[[], int]) -> Iterator[None]:
    """Turns errors of a file into one that names file and line. `lines`: how many were read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is no text in UTF-8 ({error}); save it as UTF-8") from None
    except (OSError, EOFError, csv.Error) as error:
        line = lines() + (not isinstance(error, csv.Error))
        raise ParameterError(f"{path}, line {line}: no {kind} ({error}); mend the file, or its name") from None


def _json_rows(path: str) -> Iterator[Row]:
    decode = msgspec.json.Decoder().decode
    number = 0
    with _reading(path, "JSON lines", lambda: number), _text_of(path) as file:
        for line in file:
            number += 1
            if not line.strip():
                continue
            try:
                row = decode(line)
            except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
                torn = "" if line.endswith("\n") else " It is the last one, and torn: it has no line feed at its end."
                raise ParameterError(
                    f"{path}, line {number}: no JSON ({error}).{torn} Mend the line, or take it out; it begins "
                    f"{shown(line[:60])}"
                ) from None
            if not isinstance(row, dict):
                raise ParameterError(
                    f"{path}, line {number}: {shown(row)} is no JSON object; write one object a line, such as "
                    '{"text": "..."}'
                )
            yield row


def _csv_rows(path: str) -> Iterator[Row]:
    reader: Any = None
    csv.field_size_limit(_LONGEST_FIELD)
    with _reading(path, "CSV", lambda: 0 if reader is None else reader.line_num), _text_of(path) as file:
        reader = csv.reader(file, strict=True)
        head: list[str] = next(reader, [])
        _check_names(path, head)
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(head):
                raise ParameterError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields, and the head names {len(head)} columns; "
                    "mend the line: a field with a comma, a quote or a line break stands in double quotes"
                )
            yield dict(zip(head, fields, strict=True))


def _parquet(path: str) -> Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "data") from None
    try:
        file: Any = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ParameterError(f"{path} is no Parquet file ({error}); mend the file, or its name") from None

    def rows() -> Iterator[Row]:
        with file:
            try:
                for batch in file.iter_batches(batch_size=CHUNK):
                    yield from batch.to_pylist()
            except (OSError, pyarrow.ArrowException) as error:
                raise ParameterError(f"{path} is damaged ({error}); write the file again") from None

    schema = file.schema_arrow
    return Table(path, _check_names(path, schema.names), file.metadata.num_rows, rows(), schema=schema, path=path)


# -------------------------------------------------------------------------------- frames


def _pandas(frame: Any) -> Table:
    columns = _check_names("the frame", frame.columns)

    def rows() -> Iterator[Row]:
        for start in range(0, len(frame), CHUNK):
            part = frame.iloc[start : start + CHUNK].astype(object)
            yield from part.where(part.notna(), None).to_dict("records")

    return Table("the frame", columns, len(frame), rows())


def _polars(frame: Any) -> Table:
    rows = (
        {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in frame.iter_rows(named=True)
    )
    return Table("the frame", _check_names("the frame", frame.columns), len(frame), rows)


def _arrow(table: Any) -> Table:
    def rows() -> Iterator[Row]:
        batches = table.to_batches() if hasattr(table, "to_batches") else [table] if hasattr(table, "slice") else table
        for batch in batches:
            for start in range(0, len(batch), CHUNK):
                yield from batch.slice(start, CHUNK).to_pylist()

    columns = _check_names("the Arrow table", table.schema.names)
    return Table("the Arrow table", columns, getattr(table, "num_rows", None), rows(), schema=table.schema)


def _dataset(dataset: Any, asked: str) -> Table | None:
    """Reads a data set of Hugging Face's `datasets`, which yields dicts. One without known columns has those of its
    first row."""
    rows, names = iter(dataset), dataset.column_names
    if names is None:
        first = next(rows, None)
        rows, names = _after(first, rows), () if first is None else tuple(first)
    if not isinstance(names, list | tuple):
        raise ParameterError(
            f"{asked} is a {type(dataset).__name__} of several data sets; write one of them: dataset['train']"
        )
    total = len(dataset) if hasattr(type(dataset), "__len__") else None
    return Table("the data set", _check_names("the data set", names), total, rows)


def _check_names(name: str, given: Iterable[Any]) -> tuple[str, ...]:
    columns = tuple(islice(given, MOST_COLUMNS + 1))
    if len(columns) > MOST_COLUMNS:
        raise ParameterError(f"{name} has more than {MOST_COLUMNS} columns; give those that the program needs")
    for column in columns:
        if not isinstance(column, str) or columns.count(column) > 1:
            twice = "twice" if isinstance(column, str) else "that is no text"
            raise ParameterError(f"{name} has the column {shown(column)} {twice}; give each column a name of its own")
    return columns


# -------------------------------------------------------------------------------- arguments


class RowCalls:
    """Binds rows to the parameters of a program.

    Args:
        arguments: the program's parameters.
        table: that the rows come from; None for dicts of an iterable, whose further keys are carried along.

    Raises:
        ParameterError: the table has no column for a parameter that has no default.
    """

    def __init__(self, arguments: "Arguments", table: Table | None = None) -> None:
        self._arguments = arguments
        self._table = table
        self._parameters = {each.name: each for each in arguments.unbound() if each.kind is not each.POSITIONAL_ONLY}
        self._kinds = {} if table is None else _plain_kinds(arguments.annotations(), self._parameters)
        if table is not None and table.total != 0:
            self._check_columns(table)

    def bind(self, index: int, row: Mapping[str, Any]) -> BoundArguments:
        """Returns the arguments of one program.

        Raises:
            ParameterError: a column is missing in this row, or its value does not fit the annotation.
        """
        names: Iterable[str] = [name for name in self._parameters if name in row]
        if self._arguments.takes_any:
            taken = {*self._arguments.leading, *self._arguments.bound}
            names = [name for name in row if name not in taken]
        given = {name: row[name] for name in names}
        for name, kind in self._kinds.items():
            if name in given:
                given[name] = self._fitting(index, name, given[name], kind)
        try:
            return self._arguments.bind((), given)
        except ParameterError as error:
            place = f"row {index}" if self._table is None else f"row {index} of {self._table.name}"
            raise ParameterError(f"{place}: {error}; it has {listed(row)}") from None

    def _check_columns(self, table: Table) -> None:
        missing = [
            name
            for name, each in self._parameters.items()
            if each.default is inspect.Parameter.empty and name not in table.columns
        ]
        if not missing:
            return
        near = difflib.get_close_matches(missing[0], table.columns, n=1)
        if table.name == "the frame":
            written = f"frame.rename(columns={{{repr(near[0]) if near else 'COLUMN'}: {missing[0]!r}}})"
        else:
            written = f"the name {missing[0]!r} over the column {repr(near[0]) if near else 'that has it'}"
        raise ParameterError(
            f"{table.name} has no column {', '.join(map(repr, missing))}, which {self._arguments} takes; it has "
            f"{listed(table.columns)}. Write {written}, or {self._arguments.name}.bind({missing[0]}=...) for a value "
            "that is the same in all rows"
        )

    def _fitting(self, index: int, name: str, value: Any, kind: Any) -> Any:  # Any: the user's value and annotation
        table = self._table
        assert table is not None, "only tables have kinds"
        if table.is_text and value == "" and not _takes(kind, str) and _takes(kind, type(None)):
            return None
        if isinstance(value, float) and value.is_integer() and _takes(kind, int) and not _takes(kind, float):
            return int(value)  # pandas has floats in a column of numbers with gaps
        try:
            return msgspec.convert(value, kind, strict=not table.is_text)
        except msgspec.ValidationError:
            written = inspect.formatannotation(kind)
            raise ParameterError(
                f"row {index} of {table.name}: column {name!r} is {shown(value)}, and {self._arguments.name} takes "
                f"{name}: {written}; mend the value, or annotate the parameter with what it may be"
            ) from None


_PLAIN = (str, int, float, bool, type(None))


def _plain_kinds(annotations: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: annotations[name] for name in names if name in annotations and _is_plain(annotations[name])}


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) in (Union, types.UnionType):
        return all(_is_plain(part) for part in get_args(kind))
    return kind in _PLAIN or kind is None or get_origin(kind) is Literal


def _takes(kind: Any, wanted: type) -> bool:
    return kind is wanted or wanted in get_args(kind)


def listed(columns: Iterable[str], noun: str = "columns") -> str:
    """Returns the names of columns for a message. `noun`: what they are, where they are no columns."""
    found = list(columns)
    if not found:
        return f"no {noun}"
    more = f" and {len(found) - 20} more" if len(found) > 20 else ""
    return f"the {noun} {', '.join(map(repr, found[:20]))}{more}"
