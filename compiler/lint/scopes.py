"""Resolves names in a user's source: what was assigned to them or imported as them, which functions there are.

Says also which calls give another text at every run: the time, identifiers, random choices, the process. Read from the
syntax tree alone; nothing of the file runs for it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef


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


CALLS = frozenset(
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
    return name in CALLS or (name.startswith(_MODULES) and name not in _SEEDED)
