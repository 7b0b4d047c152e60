"""Reads a user's file: its programs, and the text each of them appends, in order.

A *run* is what a program's source appends between two things that are no text, as a segment of a graph is:

    s += SYSTEM + f"Question: {question}\\n"      hole SYSTEM, words "Question: ", hole question, words "\\n"

`aligned` finds which part of a segment came from which expression. A `Scope` resolves names: what was assigned to them
or imported as them, which functions there are, and which calls give another text at every run: the time, identifiers,
random choices, the process. Everything is read from the syntax tree; nothing of the file runs for it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from .pieces import Marked

Function = ast.FunctionDef | ast.AsyncFunctionDef
VOLATILE_CALLS = frozenset(
    {
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
        "time.time",
        "time.time_ns",
        "time.ctime",
        "time.asctime",
        "time.localtime",
        "time.gmtime",
        "time.monotonic",
        "time.perf_counter",
        "uuid.uuid1",
        "uuid.uuid4",
        "os.urandom",
        "os.getpid",
        "os.times",
        "socket.gethostname",
        "id",
    }
)
_MODULES = ("random.", "secrets.", "numpy.random.")
_SEEDED = frozenset({"random.Random", "random.seed", "numpy.random.default_rng", "numpy.random.seed"})
# A date with a time of day, a time of day with seconds, a UUID: what programs write, and what texts seldom do.
LOOKS_VOLATILE = re.compile(
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\b\d\d:\d\d:\d\d\b"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
)
ROLES = frozenset({"system", "user", "assistant", "role"})
CALLS = frozenset({"gen", "gen_int", "gen_string", "select"})
MEDIA = frozenset({"image", "video"})


@dataclass(frozen=True, slots=True)
class Scope:
    """Attributes:
    assigned: name → what was assigned to it, anywhere in this function or module.
    functions: name → function of the module.
    imports: name → its full name, `dt` → `datetime` after `import datetime as dt`.
    outer: of the module; None for the module's own.
    """

    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    outer: "Scope | None" = None

    @classmethod
    def of_module(cls, tree: ast.Module) -> "Scope":
        scope = cls()
        for node in ast.walk(tree):
            match node:
                case ast.Import(names):
                    for alias in names:
                        name = alias.asname or alias.name.partition(".")[0]
                        scope.imports[name] = alias.name if alias.asname else name
                case ast.ImportFrom(str(module), names):
                    for alias in names:
                        scope.imports[alias.asname or alias.name] = f"{module}.{alias.name}"
        for statement in tree.body:
            if isinstance(statement, Function):
                scope.functions[statement.name] = statement
        scope._assign(tree.body)
        return scope

    def inside(self, function: Function) -> "Scope":
        scope = Scope(functions=self.functions, imports=self.imports, outer=self)
        scope._assign(function.body)
        return scope

    def values(self, name: str) -> list[ast.expr]:
        """Returns what a name may stand for; empty for parameters and what is not known."""
        if name in self.assigned or self.outer is None:
            return self.assigned.get(name, [])
        return self.outer.values(name)

    def full_name(self, expression: ast.expr) -> str:
        """Resolves a name: `dt.datetime.now` → "datetime.datetime.now"; empty for what is no dotted name."""
        match expression:
            case ast.Name(name):
                return self.imports.get(name, name)
            case ast.Attribute(value, attribute):
                owner = self.full_name(value)
                return f"{owner}.{attribute}" if owner else ""
        return ""

    def constant(self, expression: ast.expr) -> str | None:
        """Returns the text of a literal, or of a name that stands for one; None for anything else."""
        match expression:
            case ast.Constant(str(text)):
                return text
            case ast.Name(name):
                values = self.values(name)
                if len(values) == 1 and not isinstance(values[0], ast.Name):
                    return self.constant(values[0])
            case ast.BinOp(left, ast.Add(), right):
                texts = self.constant(left), self.constant(right)
                if texts[0] is not None and texts[1] is not None:
                    return texts[0] + texts[1]
        return None

    def flowing(self, expression: ast.expr) -> "Iterator[tuple[ast.AST, Scope]]":
        """Yields every node that an expression's value may be made of: through names, and through what functions of the
        module return. Each with the scope in which it stands."""
        waiting: list[tuple[ast.AST, Scope]] = [(expression, self)]
        seen: set[ast.AST] = set()
        while waiting:
            node, scope = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            yield node, scope
            waiting += [(child, scope) for child in ast.iter_child_nodes(node)]
            match node:
                case ast.Name(name, ast.Load()):
                    owner = scope if name in scope.assigned else scope.outer or scope
                    waiting += [(value, owner) for value in scope.values(name)]
                case ast.Call(ast.Name(name)) if name in scope.functions:
                    function = scope.functions[name]
                    inner = (scope.outer or scope).inside(function)
                    waiting += [
                        (part.value, inner)
                        for part in ast.walk(function)
                        if isinstance(part, ast.Return) and part.value is not None
                    ]

    def _assign(self, body: list[ast.stmt]) -> None:
        for node in walk_here(body):
            match node:
                case ast.Assign(targets, value):
                    for target in targets:
                        if isinstance(target, ast.Name):
                            self.assigned.setdefault(target.id, []).append(value)
                case ast.AnnAssign(ast.Name(name), _, value) if value is not None:
                    self.assigned.setdefault(name, []).append(value)
                case ast.NamedExpr(ast.Name(name), value):
                    self.assigned.setdefault(name, []).append(value)
                case ast.AugAssign(ast.Name(name), _, value) if name in self.assigned:
                    self.assigned[name].append(value)


def walk_here(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yields every node of these statements, not of functions and classes inside of them."""
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def volatile_call(expression: ast.expr, scope: Scope) -> ast.Call | None:
    """Returns the call that makes an expression's value another one each time; None where none is seen."""
    for node, inner in scope.flowing(expression):
        if isinstance(node, ast.Call) and is_volatile(node, inner):
            return node
    return None


def is_volatile(call: ast.Call, scope: Scope) -> bool:
    name = scope.full_name(call.func)
    if name == "time.strftime":
        return len(call.args) == 1  # with a second argument it formats that time
    if name in ("time.ctime", "time.asctime", "time.localtime", "time.gmtime"):
        return not call.args
    return name in VOLATILE_CALLS or (name.startswith(_MODULES) and name not in _SEEDED)


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a run.

    Attributes:
        text: of words; None for a hole.
        expression: of a hole; for words the literal.
        statement: it is in.
    """

    text: str | None
    expression: ast.expr
    statement: ast.stmt


@dataclass(frozen=True, slots=True)
class Run:
    """Text between two things that are none."""

    sources: tuple[Source, ...]

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of its statements."""
        statements = [source.statement for source in self.sources]
        return min(s.lineno for s in statements), max(s.end_lineno or s.lineno for s in statements)


@dataclass(frozen=True, slots=True)
class Aligned:
    """The part of a segment that a source wrote: `text[start:end]` in marks."""

    source: Source
    start: int
    end: int


def aligned(run: Run, marked: Marked) -> list[Aligned] | None:
    """Returns the parts of a segment that a run made; None where it made another text.

    An expression that gave constant text is taken to end where the next words begin.
    """
    text, position, found = marked.text, 0, []
    for number, source in enumerate(run.sources):
        start = position
        if source.text is not None:
            if not text.startswith(source.text, position):
                return None
            position += len(source.text)
        elif text[position : position + 1] in marked.holes:
            position += 1
        else:
            following = run.sources[number + 1].text if number + 1 < len(run.sources) else None
            mark = next((i for i in range(position, len(text)) if text[i] in marked.holes), len(text))
            position = mark if following is None else text.find(following, position, mark + len(following))
            if position < 0:
                return None
        found.append(Aligned(source, start, position))
    return found if position == len(text) else None


class Stop(Enum):
    """The separators between runs."""

    CALL = auto()
    MEDIA = auto()
    TURN_ENDS = auto()
    BRANCH = auto()  # what follows depends on values, or is said by several streams


@dataclass(frozen=True, slots=True)
class Turn:
    """The beginning of a turn."""

    role: str


Said = Run | Turn | Stop


@dataclass(frozen=True, slots=True)
class SourceProgram:
    """One function of the file.

    Attributes:
        said: runs and what stands between them, as they are written.
    """

    function: Function
    scope: Scope
    said: tuple[Said, ...]

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
        """Reads a file. Raises OSError, UnicodeDecodeError and SyntaxError."""
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
    return SourceProgram(function, reader.scope, tuple(reader.said))


@dataclass
class _Reader:
    """Walks the statements of a function."""

    function: Function
    scope: Scope
    said: list[Said] = field(default_factory=list)
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
                    self._append(statement, ast.unparse(target), value)
                case ast.Expr(ast.Call(ast.Attribute(ast.Name(state), role), [content])) if (
                    state in self._states and role in ROLES
                ):
                    self._target = state
                    self._turn(role, content, statement)
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

    def _append(self, statement: ast.stmt, target: str, value: ast.expr) -> None:
        if target != self._target:
            self.end_run()
            self._target = target
        self._expression(value, statement)

    def _expression(self, value: ast.expr, statement: ast.stmt) -> None:
        for operand in _operands(value):
            if not self._is_other(operand):
                self._current += _sources(operand, statement)
                continue
            assert isinstance(operand, ast.Call), "the others are calls"
            name = self._called(operand)
            if name in ROLES and operand.args:
                self._turn(name, operand.args[-1], statement)
            elif name in CALLS:
                self.stop(Stop.CALL)
            elif name in MEDIA:
                self.stop(Stop.MEDIA)

    def _turn(self, role: str, content: ast.expr, statement: ast.stmt) -> None:
        self.stop(Turn(role))
        self._expression(content, statement)
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


def _sources(operand: ast.expr, statement: ast.stmt) -> Iterator[Source]:
    match operand:
        case ast.Constant(str(text)):
            yield Source(text, operand, statement)
        case ast.JoinedStr(values):
            for value in values:
                match value:
                    case ast.Constant(str(text)):
                        yield Source(text, value, statement)
                    case ast.FormattedValue(inner):
                        yield Source(None, inner, statement)
        case _:
            yield Source(None, operand, statement)
