"""A user's file, read: its programs, and what each of them says, in which order."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from .runs import Container, Run, Shot, Source
from .scopes import Function, Scope

ROLES = frozenset({"system", "user", "assistant", "role"})
CALLS = frozenset({"gen", "gen_int", "gen_string", "select"})
MEDIA = frozenset({"image", "video"})


class Stop(Enum):
    """What stands between runs."""

    CALL = auto()
    MEDIA = auto()
    TURN_ENDS = auto()
    BRANCH = auto()  # what follows depends on values, or is said by several streams


@dataclass(frozen=True, slots=True)
class Turn:
    """Here one begins."""

    role: str


Said = Run | Turn | Stop


@dataclass(frozen=True, slots=True)
class SourceProgram:
    """One function of the file.

    Attributes:
        said: runs and what stands between them, as they are written.
        media: likewise.
    """

    function: Function
    scope: Scope
    said: tuple[Said, ...]
    media: tuple[Shot, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(said for said in self.said if isinstance(said, Run))


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Attributes:
    path: as the user gave it.
    text: all of it.
    programs: functions that a decorator named `function` makes programs of.
    """

    path: Path
    text: str
    programs: tuple[SourceProgram, ...]

    @classmethod
    def read(cls, path: Path) -> "SourceFile":
        """Raises OSError, UnicodeDecodeError and SyntaxError."""
        return cls.of(path, path.read_text(encoding="utf-8"))

    @classmethod
    def of(cls, path: Path, text: str) -> "SourceFile":
        tree = ast.parse(text, str(path))
        scope = Scope.of_module(tree)
        programs = [
            _program(node, scope) for node in ast.walk(tree) if isinstance(node, Function) and _is_program(node, scope)
        ]
        return cls(path, text, tuple(sorted(programs, key=lambda program: program.function.lineno)))


# --------------------------------------------------------------------------------- reading a function


def _is_program(node: Function, scope: Scope) -> bool:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = scope.full_name(called)
        if name.rpartition(".")[2] == "function" and (name.startswith("umbel.") or "." not in name):
            return True
    return False


def _program(function: Function, module: Scope) -> SourceProgram:
    reader = _Reader(function, module.inside(function))
    reader.read(function.body)
    reader.end_run()
    return SourceProgram(function, reader.scope, tuple(reader.said), tuple(reader.media))


@dataclass
class _Reader:
    """Walks the statements of a function."""

    function: Function
    scope: Scope
    said: list[Said] = field(default_factory=list)
    media: list[Shot] = field(default_factory=list)
    _current: list[Source] = field(default_factory=list)
    _target: str = ""
    _states: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        names = [parameter.arg for parameter in (*self.function.args.posonlyargs, *self.function.args.args)]
        self._states = set(names[1:2] if names[:1] == ["self"] else names[:1])

    def end_run(self) -> None:
        if self._current:
            self.said.append(Run(tuple(self._current)))
        self._current = []

    def stop(self, what: Turn | Stop) -> None:
        self.end_run()
        self.said.append(what)

    def read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.AugAssign(target, ast.Add(), value) if self._root(target) in self._states:
                    self._append(statement, ast.unparse(target), value, body)
                case ast.Expr(ast.Call(ast.Attribute(ast.Name(state), role), [content])) if (
                    state in self._states and role in ROLES
                ):
                    self._target = state
                    self._turn(role, content, statement, body)
                case ast.With(items, inner) | ast.AsyncWith(items, inner):
                    self._block(items, inner)
                case ast.For(target, iterated) | ast.AsyncFor(target, iterated):
                    if isinstance(target, ast.Name) and self._root(iterated) in self._states:
                        self._states.add(target.id)
                    self._branch(statement.body, statement.orelse)
                case ast.While() | ast.If():
                    self._branch(statement.body, statement.orelse)
                case ast.Try():
                    self._branch(statement.body, statement.orelse, statement.finalbody)
                case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(owner, "fork" | "copy"))) if (
                    self._root(owner) in self._states
                ):
                    self._states.add(name)
                    self.stop(Stop.BRANCH)
                case _:
                    pass  # says nothing, or nothing that can be read here

    def _branch(self, *bodies: list[ast.stmt]) -> None:
        self.end_run()
        before = len(self.said)
        for body in bodies:
            self.read(body)
            self.end_run()
        if len(self.said) > before:
            self.said.insert(before, Stop.BRANCH)

    def _block(self, items: list[ast.withitem], inner: list[ast.stmt]) -> None:
        turns = 0
        for item in items:
            match item.context_expr:
                case ast.Call(ast.Attribute(owner, name)) if self._root(owner) in self._states:
                    if name in ROLES:
                        turns += 1
                        self.stop(Turn(name))
                    else:
                        self.stop(Stop.BRANCH)
                    if isinstance(item.optional_vars, ast.Name):
                        self._states.add(item.optional_vars.id)
        self.read(inner)
        self.end_run()
        for _ in range(turns):
            self.stop(Stop.TURN_ENDS)

    def _append(self, statement: ast.stmt, target: str, value: ast.expr, siblings: list[ast.stmt]) -> None:
        if target != self._target:
            self.end_run()
            self._target = target
        operands = list(_operands(value))
        texts = [operand for operand in operands if not self._is_other(operand)]
        self._expression(operands, statement, whole=len(texts) == len(operands), siblings=siblings)

    def _expression(
        self, operands: list[ast.expr], statement: ast.stmt, *, whole: bool, siblings: list[ast.stmt]
    ) -> None:
        container = Container(statement, [], whole, siblings)
        for operand in operands:
            if not self._is_other(operand):
                container.operands.append(operand)
                self._current += _sources(operand, container)
                continue
            container = Container(statement, [], False, siblings)
            assert isinstance(operand, ast.Call), "the others are calls"
            name = self._called(operand)
            if name in ROLES and operand.args:
                self._turn(name, operand.args[-1], statement, siblings)
            elif name in CALLS:
                self.stop(Stop.CALL)
            elif name in MEDIA:
                self.stop(Stop.MEDIA)
                self.media.append(Shot(operand, statement, tuple(operands), siblings))

    def _turn(self, role: str, content: ast.expr, statement: ast.stmt, siblings: list[ast.stmt]) -> None:
        self.stop(Turn(role))
        self._expression(list(_operands(content)), statement, whole=False, siblings=siblings)
        self.stop(Stop.TURN_ENDS)

    def _is_other(self, operand: ast.expr) -> bool:
        return isinstance(operand, ast.Call) and self._called(operand) in ROLES | CALLS | MEDIA

    def _called(self, call: ast.Call) -> str:
        return self.scope.full_name(call.func).rpartition(".")[2]

    def _root(self, expression: ast.expr) -> str:
        while isinstance(expression, ast.Attribute | ast.Subscript):
            expression = expression.value
        return expression.id if isinstance(expression, ast.Name) else ""


def _operands(expression: ast.expr) -> Iterator[ast.expr]:
    match expression:
        case ast.BinOp(left, ast.Add(), right):
            yield from _operands(left)
            yield from _operands(right)
        case ast.List(items) | ast.Tuple(items):
            for item in items:
                yield from _operands(item)
        case _:
            yield expression


def _sources(operand: ast.expr, container: Container) -> Iterator[Source]:
    match operand:
        case ast.Constant(str(text)):
            yield Source(text, operand, container)
        case ast.JoinedStr(values):
            for value in values:
                match value:
                    case ast.Constant(str(text)):
                        yield Source(text, value, container, in_f_string=True)
                    case ast.FormattedValue(inner, conversion, specification):
                        suffix = f"!{chr(conversion)}" if conversion >= 0 else ""
                        if specification is not None:
                            suffix += ":" + ast.unparse(specification)[2:-1]  # without f"" around it
                        yield Source(None, inner, container, suffix, in_f_string=True)
        case _:
            yield Source(None, operand, container)
