"""Gives results as frames and Parquet files: rows as dicts → pandas, polars, Arrow.

A column has the type of its values. One whose values have no common type (a text and a number) becomes texts of JSON.
An input column of an Arrow table or a Parquet file keeps its type.
"""

import base64
import contextlib
import datetime
import decimal
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from ...lang.errors import MissingExtraError

GROUP = 10_000  # rows of a row group


class Framed(ABC):
    """Base of results that can be had as a frame. Its frames are in the order of the input."""

    @abstractmethod
    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each result as a dict: `row`, the number of its input, then the input, then the variables."""

    def to_pandas(self) -> Any:  # Any: a pandas.DataFrame
        """Returns a pandas DataFrame. Raises MissingExtraError where pandas is not installed."""
        return imported("pandas").DataFrame(_sorted(self.rows()))

    def to_polars(self) -> Any:  # Any: a polars.DataFrame
        """Returns a polars DataFrame. Raises MissingExtraError where polars or pyarrow is not installed."""
        imported("pyarrow")
        return imported("polars").from_arrow(self.to_arrow())

    def to_arrow(self) -> Any:  # Any: a pyarrow.Table
        """Returns an Arrow table. Raises MissingExtraError where pyarrow is not installed."""
        rows = _sorted(self.rows())
        return _table(rows, _schema_of([rows], None))


def _sorted(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["row"])


def imported(name: str) -> Any:  # Any: a module that need not be installed
    try:
        return __import__(name)
    except ModuleNotFoundError:
        raise MissingExtraError(name, "data") from None


# -------------------------------------------------------------------------------- Arrow


def write_parquet(path: str, rows: Callable[[], Iterator[dict[str, Any]]], known: Any) -> None:
    """Writes rows to a Parquet file in groups, and puts it in its place when it is whole.

    Args:
        rows: yields all of them; called twice, the first time for their types.
        known: the pyarrow.Schema of the input, or None.
    """
    from pyarrow import parquet

    schema = _schema_of(_groups(rows()), known)
    temporary = f"{path}.tmp"
    try:
        with parquet.ParquetWriter(temporary, schema) as writer:
            for group in _groups(rows()):
                writer.write_table(_table(group, schema))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read_parquet(path: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file. Raises pyarrow.ArrowException for what is none."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=GROUP):
            yield from batch.to_pylist()


def _groups(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while group := list(islice(rows, GROUP)):
        yield group


def _schema_of(groups: Iterable[list[dict[str, Any]]], known: Any) -> Any:
    """Returns the common pyarrow.Schema of rows."""
    pa = imported("pyarrow")
    types: dict[str, Any] = {"row": pa.int64()}
    for group in groups:
        for name in dict.fromkeys(name for row in group for name in row):
            values = [row.get(name) for row in group]
            if known is not None and known.get_field_index(name) >= 0:
                types.setdefault(name, known.field(name).type)
                if not _is_writable(values, types[name]):
                    types[name] = pa.string()
                continue
            found = _type_of(values)
            if name in types and types[name] != found:
                try:
                    both = [pa.schema([(name, kind)]) for kind in (types[name], found)]
                    found = pa.unify_schemas(both, promote_options="permissive").field(name).type
                except pa.ArrowException:
                    found = pa.string()
            types[name] = found
    return pa.schema(list(types.items()))


def _type_of(values: list[Any]) -> Any:
    pa = imported("pyarrow")
    try:
        kind = pa.array(values).type
    except (pa.ArrowException, OverflowError, ValueError):
        return pa.string()
    return pa.string() if _has_nothing(kind) else kind


def _has_nothing(kind: Any) -> bool:
    """Returns whether a type has a struct without members in it, which Parquet cannot hold."""
    types = imported("pyarrow").types
    if types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_nothing(kind.field(index).type) for index in range(kind.num_fields))
    return types.is_list(kind) and _has_nothing(kind.value_type)


def _is_writable(values: list[Any], kind: Any) -> bool:
    """Returns whether the values of an input column can have their type again."""
    pa = imported("pyarrow")
    try:
        _array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return False
    return not _has_nothing(kind)


def _table(rows: list[dict[str, Any]], schema: Any) -> Any:
    pa = imported("pyarrow")
    return pa.table([_array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema)


def _array(values: list[Any], kind: Any) -> Any:
    pa = imported("pyarrow")
    read = None if pa.types.is_timestamp(kind) else _reader(kind)  # pyarrow casts a column of times, and no member
    try:
        return pa.array(values if read is None else list(map(read, values)), type=kind)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return pa.array([text_of(value) for value in values], type=pa.string()).cast(kind)


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Returns what makes a value of JSON one that pyarrow takes for this type; None where it takes it as it is."""
    types = imported("pyarrow").types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        each = _reader(kind.value_type)
        return each and (lambda found: list(map(each, found)) if isinstance(found, list) else found)
    if types.is_struct(kind):
        members = [(kind.field(index).name, _reader(kind.field(index).type)) for index in range(kind.num_fields)]
        known = {name: read for name, read in members if read is not None}
        if not known:
            return None
        return lambda found: found and {**found, **{name: read(found.get(name)) for name, read in known.items()}}
    if types.is_map(kind):
        key, item = _reader(kind.key_type) or _same, _reader(kind.item_type) or _same
        return lambda found: found and [(key(one), item(other)) for one, other in found]
    for reads, read in (
        (types.is_binary, base64.b64decode),
        (types.is_large_binary, base64.b64decode),
        (types.is_fixed_size_binary, base64.b64decode),
        (types.is_time, datetime.time.fromisoformat),
        (types.is_date, datetime.date.fromisoformat),
        (types.is_decimal, decimal.Decimal),
        (types.is_duration, lambda text: msgspec.convert(text, datetime.timedelta)),
        (types.is_timestamp, lambda text: imported("pyarrow").scalar(text).cast(kind).value),  # with nanoseconds
    ):
        if reads(kind):
            return lambda found, read=read: read(found) if isinstance(found, str) else found  # type: ignore[misc]
    return None


def _same(value: Any) -> Any:
    return value


def text_of(value: Any) -> str | None:
    """Returns a text as it is, with halves of characters spelled out, and anything else as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def joined(index: int, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one row of results. A variable that has the name of an input is called `NAME_out`, and an input that is
    called "row", as in what another batch has written, "row_in"."""
    row: dict[str, Any] = {"row": index}
    for suffix, named in (("_in", inputs), ("_out", values)):
        for name, value in named.items():
            while name in row:
                name += suffix
            row[name] = value
    return row
