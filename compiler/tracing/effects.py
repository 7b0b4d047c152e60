"""Detects side effects of a program while it is traced: it prints, writes, reads the time.

An *effect* happens once, now, and never when the graph runs. What is *volatile* gives another answer each time; the
graph keeps the one that it gave now. Both are noticed by a profile hook on calls, which sees functions and not their
arguments: a file that is opened is reported when it is written to.
"""

import _thread
import builtins
import datetime
import gc
import io
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

from ..graph import Line
from .lines import is_ours, is_traced, users_frame

Kind = Literal["effect", "volatile"]


class TraceWarning(UserWarning):
    """Warns that a traced program has side effects or volatile values: it prints, writes, or reads the time.

    They happen once, when the program is traced or compiled, and never in a run of the graph.

    Examples:
        >>> import datetime, warnings
        >>> @ul.function
        ... def greet(s, name):
        ...     s += f"It is {datetime.date.today()}. Greet " + name + ":" + ul.gen("greeting")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     compiled = greet.compile()
        >>> print(str(caught[0].message).partition(": ")[0])
        greet was traced. What it does is different each time, and kept in the graph as it is now
    """

    __module__ = "umbel"


@dataclass(frozen=True, slots=True)
class Effect:
    """A call that a graph does not make.

    Attributes:
        line: of the user's.
        what: the function as the user called it, "random.choice()".
        kind: "effect", or "volatile" for what gives another answer each time.
    """

    line: Line
    what: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.line}: {self.what}"


# ------------------------------------------------------------------------------------------ what is noticed

_SYSTEM = sys.modules[os.name]  # posix or nt: where the functions of os come from
_SYSTEM_EFFECTS = (
    "chdir", "chmod", "chown", "fchmod", "fchown", "fork", "forkpty", "ftruncate", "kill", "killpg", "lchown", "link",
    "mkdir", "mkfifo", "mknod", "execv", "execve", "posix_spawn", "posix_spawnp", "putenv", "remove", "rename",
    "replace", "rmdir", "sendfile", "setxattr", "startfile", "symlink", "system", "truncate", "unlink", "unsetenv",
    "utime", "write",
)  # fmt: skip
_SYSTEM_VOLATILE = ("getloadavg", "getpid", "getppid", "times", "urandom")
_Socket = socket.socket.__mro__[1]  # in C, beneath the one in Python
_TIMES = (
    "ctime", "gmtime", "localtime", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "time", "time_ns",
)  # fmt: skip


def _of(module: Any, names: tuple[str, ...], kind: Kind) -> dict[Any, Kind]:
    return {getattr(module, name): kind for name in names if hasattr(module, name)}


# Functions in C that belong to nothing.
_FUNCTIONS: Mapping[Any, Kind] = {
    **_of(builtins, ("print", "input"), "effect"),
    **_of(builtins, ("id",), "volatile"),
    **_of(_SYSTEM, _SYSTEM_EFFECTS, "effect"),
    **_of(_SYSTEM, _SYSTEM_VOLATILE, "volatile"),
    **_of(time, ("sleep",), "effect"),
    **_of(time, _TIMES, "volatile"),
    **_of(_thread, ("start_new_thread", "start_joinable_thread"), "effect"),  # threading calls the second from 3.13 on
}
# Methods in C: name → the type of what they are called on, and what they are.
_METHODS: Mapping[str, tuple[type, Kind]] = {
    **dict.fromkeys(("write", "writelines", "truncate"), (io.IOBase, "effect")),
    **dict.fromkeys(("bind", "connect", "connect_ex", "listen", "send", "sendall", "sendto"), (_Socket, "effect")),
    **dict.fromkeys(("random", "getrandbits"), (random.Random, "volatile")),
    **dict.fromkeys(("now", "utcnow", "today"), (type, "volatile")),
}
_SHARED_RANDOM = getattr(random.random, "__self__", None)  # what the functions of random are methods of
# Functions in Python, by module and name.
_PYTHON: Mapping[tuple[str, str], Kind] = {
    ("logging", "Logger._log"): "effect",
    ("subprocess", "Popen.__init__"): "effect",
    ("os", "_Environ.__getitem__"): "volatile",
    ("uuid", "uuid1"): "volatile",
}


def _kind_of_builtin(function: Any) -> Kind | None:
    try:
        found = _FUNCTIONS.get(function)
    except TypeError:  # a method of what has no hash
        found = None
    if found is not None:
        return found
    method = _METHODS.get(getattr(function, "__name__", ""))
    owner = getattr(function, "__self__", None)
    if method is None or not isinstance(owner, method[0]):
        return None
    if isinstance(owner, random.Random) and owner is not _SHARED_RANDOM:
        return None  # a generator of the program's own, which may have a seed; that of secrets asks os.urandom
    if isinstance(owner, type) and not issubclass(owner, datetime.date):
        return None
    if isinstance(owner, io.BytesIO | io.StringIO):
        return None
    return method[1]


# ------------------------------------------------------------------------------------------ noticing


class Watch:
    """Records effects in order, each line and function once.

    Args:
        check: called with the frame of every function in Python that is called; what it raises, the call raises.
        check_builtin: as `check`, with the calling frame and every function in C.
    """

    def __init__(self, check: Callable[[FrameType], None], check_builtin: Callable[[FrameType, Any], None]) -> None:
        self._check = check
        self._check_builtin = check_builtin
        self._found: dict[Effect, None] = {}
        self.watching = False

    @property
    def effects(self) -> tuple[Effect, ...]:
        return tuple(self._found)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the body. Another profiler that is a function goes on seeing what it saw; next to one that is not
        (cProfile before Python 3.12), nothing is watched."""
        other = sys.getprofile()
        if other is not None and not isinstance(other, FunctionType | MethodType):
            yield
            return
        self.watching = True
        sys.setprofile(self._hook if other is None else self._chained(other))
        try:
            yield
        finally:
            sys.setprofile(other)

    def _chained(self, other: Callable[..., Any]) -> Callable[[FrameType, str, Any], None]:
        def both(frame: FrameType, event: str, argument: Any) -> None:
            other(frame, event, argument)
            self._hook(frame, event, argument)

        return both

    def _hook(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            kind = _kind_of_builtin(argument)
            if kind is not None and (argument is not id or users_frame(frame) is frame):  # copy.deepcopy asks for many
                self._note(frame, _called(argument), kind)
            self._check_builtin(frame, argument)
        elif event == "call":
            key = (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)
            kind = _PYTHON.get(key)
            if kind is not None:
                self._note(frame, "", kind)
            self._check(frame)

    def _note(self, frame: FrameType, what: str, kind: Kind) -> None:
        """Records an effect. `what`: the outermost function between the user's line and the call."""
        users = users_frame(frame)
        if users is None or _is_collecting(users) or not is_traced(users):
            return
        inner: FrameType | None = frame
        while inner is not None and inner is not users:
            if is_ours(inner) or _is_collecting(inner):
                return
            what = _called_in_python(inner)
            inner = inner.f_back
        line = Line(users.f_code.co_filename, users.f_lineno, users.f_code.co_name)
        if kind == "effect" or Effect(line, what, "effect") not in self._found:
            self._found.setdefault(Effect(line, what, kind))


def _is_collecting(frame: FrameType) -> bool:
    """Returns whether the garbage collector called it, which comes when it likes."""
    code = frame.f_code
    return code.co_name == "__del__" or any(getattr(hook, "__code__", None) is code for hook in gc.callbacks)


def _called(function: Any) -> str:
    """Names a function as users write it: `os.remove()`, `datetime.now()`, `print()`."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if isinstance(owner, ModuleType):
        module = "os" if owner is _SYSTEM else owner.__name__
        return f"{name}()" if owner is builtins else f"{module}.{name}()"
    return f"{owner.__name__ if isinstance(owner, type) else type(owner).__name__}.{name}()"


def _called_in_python(frame: FrameType) -> str:
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    module = module.partition("._")[0]  # from 3.13 on pathlib is pathlib._local
    return "os.environ" if (module, name) == ("os", "__getitem__") else f"{module}.{name}()"


def warn(program: str, effects: tuple[Effect, ...]) -> None:
    """Issues one TraceWarning for all effects; none for none."""
    done = [str(effect) for effect in effects if effect.kind == "effect"]
    kept = [str(effect) for effect in effects if effect.kind == "volatile"]
    said = []
    if done:
        said.append(f"done once, now, and never when the graph runs: {', '.join(done)}")
    if kept:
        said.append(f"different each time, and kept in the graph as it is now: {', '.join(kept)}")
    if said:
        advice = "Move it out of the program, and give the program what it needs as an argument"
        message = f"{program} was traced. What it does is {'; '.join(said)}. {advice}"
        asking = users_frame(sys._getframe())
        if asking is None:  # asked for by our command line
            warnings.warn(message, TraceWarning, stacklevel=2)
        else:
            registry = asking.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(message, TraceWarning, asking.f_code.co_filename, asking.f_lineno, registry=registry)
