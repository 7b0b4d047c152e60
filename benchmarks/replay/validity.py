"""Whether what was generated under a constraint satisfies it: every value of a program, by `re` and by `jsonschema`.

A value that was cut off is the beginning of one that would satisfy it; it is counted apart (see `FORMAT.md`).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import jsonschema
import referencing
import regex
from umbel.srt.simulator.workload import Branch, Fork, Gen, Ops, Program, Schema, Values, key_of


@dataclass(frozen=True, slots=True)
class Validity:
    """Of the constrained values of a run: how many satisfy their constraint, were cut off, or break it."""

    satisfied: int = 0
    cut: int = 0
    broken: int = 0

    def __add__(self, other: "Validity") -> "Validity":
        return Validity(self.satisfied + other.satisfied, self.cut + other.cut, self.broken + other.broken)

    @property
    def total(self) -> int:
        return self.satisfied + self.cut + self.broken


def of_programs(programs: Iterable[Program], results: Iterable[Values | Exception]) -> Validity | None:
    """The values of all programs that ended; None where none of them is constrained."""
    found = Validity()
    for program, result in zip(programs, results, strict=True):
        if not isinstance(result, Exception):
            found = _of_ops(program.ops, result, (), found)
    return found if found.total else None


def _of_ops(ops: Ops, values: Values, branch: Branch, found: Validity) -> Validity:
    for op in ops:
        match op:
            case Gen(name=name, regex=expression) if expression is not None:
                found += of_regex(expression, values[key_of(branch, name)])
            case Gen(name=name, json_schema=schema) if schema is not None:
                found += of_schema(schema, values[key_of(branch, name)])
            case Fork(branches=branches):
                for number, inner in enumerate(branches):
                    found = _of_ops(inner, values, (*branch, number), found)
    return found


def of_regex(expression: str, text: str) -> Validity:
    match = regex.fullmatch(expression, text, partial=True)
    if match is None:
        return Validity(broken=1)
    return Validity(cut=1) if match.partial else Validity(satisfied=1)


def of_schema(schema: Schema, text: str) -> Validity:
    """Of JSON that does not parse nobody can say what it would have become; it counts as cut off."""
    try:
        instance = json.loads(text)
    except ValueError:
        return Validity(cut=1)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, registry=referencing.Registry(), format_checker=jsonschema.FormatChecker())
    return Validity(satisfied=1) if validator.is_valid(instance) else Validity(broken=1)
