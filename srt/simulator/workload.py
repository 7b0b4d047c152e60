"""Reads workload files: one program a line, as operations on one prompt state (benchmarks/workloads/FORMAT.md).

A program's result maps every variable to its text; a variable of a branch is named by its path, "0.judgment".
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ...lang.errors import ParameterError

_Program = TypeVar("_Program")

Schema = Mapping[str, Any]  # Any: a JSON Schema is whatever JSON it is


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    path: Path


@dataclass(frozen=True, slots=True)
class Gen:
    name: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: Schema | None = None
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Select:
    name: str
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Var:
    """The value of `name`: of this state, of a state around it, or of a branch ("0.judgment")."""

    name: str


@dataclass(frozen=True, slots=True)
class Fork:
    branches: tuple["Ops", ...]
    join: bool = False  # the parent waits until all branches have ended


Op = Text | Image | Gen | Select | Var | Fork
Ops = tuple[Op, ...]
Values = dict[str, str]  # a program's result
Branch = tuple[int, ...]  # numbers of the branches on the way to a state


@dataclass(frozen=True, slots=True)
class Program:
    id: str
    ops: Ops

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(keys_of(self.ops))


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str
    licence: str
    programs: tuple[Program, ...]
    serial: bool  # replayed one after the other, if asked for

    def first(self, count: int | None) -> "Workload":
        """The same file, cut after `count` programs. Raises as `first_programs` does."""
        return replace(self, programs=first_programs(self.programs, count))

    def relaxed(self) -> "Workload":
        """The same file without `regex` and `json_schema`."""
        return replace(self, programs=tuple(Program(p.id, without_constraints(p.ops)) for p in self.programs))


def first_programs(programs: Sequence[_Program], count: int | None) -> tuple[_Program, ...]:
    """Returns the first `count` programs; None: all. Raises ParameterError for a count below 1."""
    if count is not None and count < 1:
        raise ParameterError(f"the first {count} programs; write 1 or more")
    return tuple(programs[:count])


def key_of(branch: Branch, name: str) -> str:
    return ".".join((*map(str, branch), name))


def keys_of(ops: Sequence[Op], branch: Branch = ()) -> Iterator[str]:
    """Every variable of the result, in the order of the file."""
    for op in ops:
        match op:
            case Gen(name=name) | Select(name=name):
                yield key_of(branch, name)
            case Fork(branches=branches):
                for number, inner in enumerate(branches):
                    yield from keys_of(inner, (*branch, number))


def scope_of(keys: Mapping[str, object], branch: Branch, name: str) -> str:
    """The key that `name` means in a state: its own variable, else that of the nearest state around it.

    Raises:
        ParameterError: no operation of the program sets it.
    """
    for depth in range(len(branch), -1, -1):
        key = key_of(branch[:depth], name)
        if key in keys:
            return key
    raise ParameterError(f"the program's var {name!r} is set by none of its operations; it sets {', '.join(keys)}")


def without_constraints(ops: Sequence[Op]) -> Ops:
    """The same operations with `regex` and `json_schema` left out: bounded free text of exact length."""
    relaxed: list[Op] = []
    for op in ops:
        match op:
            case Gen(regex=regex, json_schema=schema) if regex is not None or schema is not None:
                relaxed.append(Gen(op.name, op.max_tokens, op.stop, temperature=op.temperature, ignore_eos=not op.stop))
            case Fork(branches=branches, join=join):
                relaxed.append(Fork(tuple(without_constraints(inner) for inner in branches), join))
            case _:
                relaxed.append(op)
    return tuple(relaxed)


# -------------------------------------------------------------------------------------------- files


def read_workload(path: Path) -> Workload:
    """Reads a workload file.

    Raises:
        ParameterError: there is no such file, or a line of it is not in the format; the message says which.
    """
    try:
        # Not `splitlines`: texts may hold U+2028 and the like, which JSON does not escape.
        header, *lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"the workload {path} cannot be read: {error}") from error
    programs = []
    number = 1
    try:
        about = json.loads(header)
        announced, name = about["n_programs"], path.name.removesuffix(".jsonl")
        for line in lines:
            number += 1
            record = json.loads(line)
            programs.append(Program(str(record["id"]), _ops(record["ops"], path.parent)))
        workload = Workload(name, about["about"], about["licence"], tuple(programs), about.get("replay") == "serial")
    except (KeyError, TypeError, ValueError) as error:
        others = ", and as no recording, journal or saved run does either" if number == 1 else ""
        raise ParameterError(f"{path.name}, line {number}: {error!r}{others}; see FORMAT.md") from error
    if len(programs) != announced:
        raise ParameterError(f"{path.name} announces {announced} programs and holds {len(programs)}")
    return workload


def _ops(records: Sequence[Mapping[str, Any]], folder: Path) -> Ops:  # Any: JSON
    return tuple(_op(record, folder) for record in records)


def _op(record: Mapping[str, Any], folder: Path) -> Op:  # Any: JSON
    fields = dict(record)
    kind = fields.pop("op")
    fields.pop("answer", None)  # the reference, never shown to the model
    match kind:
        case "text":
            return Text(**fields)
        case "image":
            return Image(folder / fields.pop("path"), **fields)
        case "gen":
            return _gen(**fields)
        case "select":
            return Select(fields.pop("name"), tuple(fields.pop("choices")), **fields)
        case "var":
            return Var(**fields)
        case "fork":
            return Fork(tuple(_ops(branch, folder) for branch in fields.pop("branches")), **fields)
        case _:
            raise ValueError(f"unknown op {kind!r}")


def _gen(
    name: str,
    max_tokens: int,
    stop: Sequence[str] = (),
    regex: str | None = None,
    json_schema: Schema | None = None,
    temperature: float = 0.0,
    ignore_eos: bool | None = None,
) -> Gen:
    """`ignore_eos` left out: an exact length, unless something else can end the text."""
    if ignore_eos is None:
        ignore_eos = not (stop or regex is not None or json_schema is not None)
    return Gen(name, max_tokens, tuple(stop), regex, json_schema, temperature, ignore_eos)
