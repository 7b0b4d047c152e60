"""Text that is another one at every run: the time, identifiers, random choices, the process.

Found in the source, where an expression's value comes from such a call, and in constant text that looks like it.
"""

import ast
import re

from .scopes import Scope

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
    """The call that makes an expression's value another one each time; None where there is none to be seen."""
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
