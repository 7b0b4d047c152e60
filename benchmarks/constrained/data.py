"""Constraints with texts that satisfy them and texts that do not: real schemas, the official test suite, regexes.

The files are read where they lie and are no part of the project (the schemas carry no licence of their own).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from umbel.fsm.engines.source import Kind

SETS = ("schemas", "suite", "regexes")
_FILES = {"schemas": "schemas.jsonl", "suite": "json_schema_test_suite.jsonl", "regexes": "regexes.jsonl"}


@dataclass(frozen=True, slots=True)
class Item:
    """A constraint. `valid` and `invalid`: JSON values of a schema, texts of a regex."""

    name: str
    kind: Kind
    source: str
    valid: tuple[object, ...]
    invalid: tuple[object, ...]

    def text(self, value: object, separators: tuple[str, str]) -> str:
        """As a model would write it."""
        return str(value) if self.kind == "regex" else json.dumps(value, ensure_ascii=False, separators=separators)


def read_items(folder: Path, name: str, *, every: int = 1) -> list[Item]:
    """A set, or every nth of it. Raises FileNotFoundError."""
    lines = (folder / _FILES[name]).read_text(encoding="utf-8").splitlines()
    return [_READERS[name](json.loads(line), number) for number, line in enumerate(lines) if number % every == 0]


def _schema(row: dict[str, object], number: int) -> Item:
    invalid = tuple(instance["data"] for instance in _list(row["invalid"]))
    return Item(str(row["id"]), "json_schema", json.dumps(row["schema"]), tuple(_list(row["valid"])), invalid)


def _group(row: dict[str, object], number: int) -> Item:
    tests = _list(row["tests"])
    return Item(
        f"{row['file']} {row['description']}",
        "json_schema",
        json.dumps(row["schema"]),
        tuple(test["data"] for test in tests if test["valid"]),
        tuple(test["data"] for test in tests if not test["valid"]),
    )


def _regex(row: dict[str, object], number: int) -> Item:
    return Item(str(row["id"]), "regex", str(row["pattern"]), tuple(_list(row["match"])), tuple(_list(row["nomatch"])))


def _list(value: object) -> list:  # type: ignore[type-arg]  # whatever JSON holds
    assert isinstance(value, list), "the files hold lists there"
    return value


_READERS = {"schemas": _schema, "suite": _group, "regexes": _regex}
