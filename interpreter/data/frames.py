"""Gives results as frames and Parquet files: rows as dicts → pandas, polars, Arrow.

A column has the type of its values. One whose values have no common type (a text and a number) becomes texts of JSON.
An input column of an Arrow table or a Parquet file keeps its type.
"""

import base64
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

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
    with parquet.ParquetWriter(temporary, schema) as writer:
        for group in _groups(rows()):
            writer.write_table(_table(group, schema))
    os.replace(temporary, path)


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
            if known is not None and known.get_field_index(name) >= 0:
                types.setdefault(name, known.field(name).type)
                continue
            found = _type_of([row.get(name) for row in group])
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
        return pa.array(values).type
    except (pa.ArrowException, OverflowError, ValueError):
        return pa.string()


def _table(rows: list[dict[str, Any]], schema: Any) -> Any:
    pa = imported("pyarrow")
    return pa.table([_array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema)


def _array(values: list[Any], kind: Any) -> Any:
    pa = imported("pyarrow")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        values = [base64.b64decode(value) if isinstance(value, str) else value for value in values]
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowException, OverflowError, ValueError):
        return pa.array([_text(value) for value in values], type=pa.string()).cast(kind)  # times come as texts


def _text(value: Any) -> str | None:
    """Returns a text as it is, with halves of characters spelled out, and anything else as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def joined(index: int, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one row of results. A variable that has the name of an input is called `NAME_out`."""
    row = {"row": index, **inputs}
    for name, value in values.items():
        while name in row:
            name += "_out"
        row[name] = value
    return row
