"""Traces a program: runs the user's function once, with symbols for unknown values, and records a graph.

This works for programs whose course does not depend on the values. Loops over constants and ranges unroll; what looks
at an argument or at an answer raises TraceError with its line (`symbols.py`), and so does what a graph cannot say.

A symbol cannot detect every look at it. The others are found here:

hint is None                 in the source: a symbol is never None, whatever the argument will be
isinstance(docs, list)       in the source: a symbol is a str
match answer: ...            in the source: patterns ask for types
answer in "yes, no"          in the source: C code looks for the characters
re.search(r"[0-9]+", text)   by the profile hook: C code reads the characters
"""

import ast
import asyncio
import contextlib
import inspect
import textwrap
import tokenize
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVarTuple, Unpack

from ...interpreter.batch import MAX_ARGUMENTS
from ...interpreter.body import RUN_OPTIONS, Arguments, Body, Call, sampling_defaults
from ...interpreter.run import recorded, recording
from ...lang import checks
from ...lang.errors import ProgramError, TraceError, shown
from ...lang.state import AsyncState, Sink, State
from ..graph import Graph, Line, Parameter
from ..operations import Argument, Begin, Options
from .effects import Effect, Watch
from .lines import is_ours, line_of, raising_line
from .recorder import Recorder
from .symbols import Symbol, describe, is_lazy, is_text, node_of
from .tape import Tape

if TYPE_CHECKING:
    from ...interpreter.program import Program

# Modules whose functions look at text through C, or at what it is of.
_LOOKING_MODULES = frozenset({"ast", "difflib", "json", "re"})
_ASKING = frozenset({"callable", "isinstance", "type"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of tracing a program.

    Attributes:
        graph: of the program.
        effects: its side effects, in order; see `effects.py`.
        watched: False where another profiler kept effects from being noticed.
    """

    graph: Graph
    effects: tuple[Effect, ...] = ()
    watched: bool = True


def trace(
    program: "Program",
    *,
    static_args: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Trace:
    """Runs the user's function once and records its operations. See `Program.trace`, which also warns of effects.

    Args:
        static_args: values of arguments that the course of the program depends on. They are given as they are, as
            those fixed by `bind` are; all others are symbols.
        given: values that the program reads for variables, so that it takes one of its courses. The graph is for
            looking at: it says the same for other answers, and the program would not.

    Raises:
        TraceError: the program does what no graph can say; the message has the line.
        ParameterError: `static_args` has what the program has no parameter for, `given` a variable it does not read.
        Whatever else the function raises.
    """
    outer = recording()
    if outer is not None:
        raise outer.refuse("a program that is being traced traces another", "the trace outside of the program")
    body = program.body
    known = {**program.bound, **_checked_static(static_args)}
    return _Tracer(body, Arguments(body.name, body.function, len(body.instance) + 1, known), given).record()


class _Tracer:
    """One trace: its tape, its streams, and the runs that are opened inside of it. A `Recording`."""

    def __init__(self, body: Body, arguments: Arguments, given: Mapping[str, Any] | None) -> None:
        self._body = body
        self._arguments = arguments
        unbound = arguments.unbound()
        self._tape = Tape(body.name, {p.name: p.default for p in unbound if p.default is not p.empty}, given)
        self._streams: list[Recorder] = []
        self._runs = 0
        self._read: set[tuple[Callable[..., Any], frozenset[str], frozenset[str]]] = (
            set()
        )  # looked into, for these names
        self._watch = Watch(partial(check_call, self._tape))

    def record(self) -> Trace:
        """Traces the program. `lines.BOUNDARY` names this frame: outer frames are not the program's."""
        parameters, call = self._symbolic_call()
        with recorded(self), self._naming_unread(), self._explaining():
            own = self._open(self._body, {})
            self.enter(self._body, call, own)
            returned = self._tape.value(self.body_result(own, call), "what the program returns")
            variables = own.variables()
        self._tape.check_given()
        ends = (stream.last for stream in self._streams)
        graph = self._tape.builder.graph(self._body.name, parameters, ends, variables, returned)
        return Trace(graph, self._watch.effects, self._watch.watching)

    def body_result(self, own: Recorder, call: Call) -> object:
        """Runs the body and returns what it returns."""
        with self._watch.watched():
            if self._body.is_async:
                return _finish(self._body.invoke(AsyncState(own), call), self._tape)
            return self._body.invoke(State(own), call)

    def _symbolic_call(self) -> tuple[list[Parameter], Call]:
        """Returns the parameters of the graph, and the call with symbols for them."""
        parameters: list[Parameter] = []
        given: dict[str, Any] = {}
        positional: list[Any] = []
        for parameter in self._arguments.unbound():
            parameters.append(_described(parameter))
            symbol = self._tape.symbol(self._tape.builder.node(Argument(parameter.name)))
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(symbol)
            else:
                given[parameter.name] = symbol
        return parameters, self._arguments.bind(tuple(positional), given)

    def _open(self, body: Body, run_options: Options) -> Recorder:
        """Makes a stream for a run of `body`."""
        begin = self._tape.builder.node(Begin(body.name, self._runs))
        self._runs += 1
        return Recorder(self._tape, begin, body.options, run_options, self._streams)

    @contextlib.contextmanager
    def _naming_unread(self) -> Iterator[None]:
        """Adds to an error which given values were not read when it came: one may be misspelt."""
        try:
            yield
        except Exception as error:
            if self._tape.unread():
                error.add_note(f"not read until then, of what is given: {', '.join(map(shown, self._tape.unread()))}")
            raise

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Adds the line and the symbols involved to errors; raises a refusal again that the program caught."""
        try:
            yield
        except TraceError:
            raise
        except Exception as error:
            fault = self._tape.fault
            if fault is not None:
                raise fault from error
            line = raising_line(error)
            source = self._tape.inside(str(error))
            if source is not None:
                message = f"{describe(source)} stands where a value has to be known now"
                raise self._tape.unknown(line, source, f"{message}: {self._tape.shown(str(error))}") from error
            if isinstance(error, ProgramError) and line is not None:
                error.add_note(f"{line}, while {self._body.name} was traced")
            elif line is not None:
                error.add_note(f"{line}, while {self._body.name} was traced: arguments and variables are symbols then")
            raise
        finally:
            self._tape.closed = True
        if self._tape.fault is not None:
            raise self._tape.fault

    # -------------------------------------------------------------------------------- runs inside of the program

    def run(self, body: Body, call: Call, options: Mapping[str, Any]) -> State:
        if body.is_async:
            raise self.refuse(f"{body.name} is an async program", f"await {body.name}.run_async(...)")
        state = State(self._open(body, self._run_options(body, options)))
        self.enter(body, call, state._sink)
        state.ret_value = body.invoke(state, call)
        return state

    async def run_async(self, body: Body, call: Call, options: Mapping[str, Any]) -> AsyncState:
        state = AsyncState(self._open(body, self._run_options(body, options)))
        self.enter(body, call, state._sink)
        if body.is_async:
            state.ret_value = await body.invoke(state, call)
        else:
            state.ret_value = body.invoke(State(state._sink), call)
        return state

    def _run_options(self, body: Body, options: Mapping[str, Any]) -> Options:
        inner = options.get("sampling") or {}
        given = {name: value for name, value in options.items() if name != "sampling"} | dict(inner)
        for name in RUN_OPTIONS:
            if given.pop(name, None):
                raise self.refuse(
                    f"{body.name}.run({name}=...) inside of the program: a graph runs as a whole",
                    f"{body.name}.run(...) without it, and {name} where the graph is run",
                )
        self._tape.check_constant(given, f"an option of {body.name}.run()")
        return sampling_defaults(given)

    def enter(self, body: Body, call: Call, sink: Sink) -> None:
        if not isinstance(sink, Recorder) or sink.tape is not self._tape:
            raise self.refuse("the state is of another program, which runs", f"{body.name}(s, ...) with its own state")
        symbols = {name: value for name, value in call.arguments.items() if isinstance(value, Symbol)}
        unknown = frozenset(name for name, symbol in symbols.items() if not is_text(node_of(symbol)))
        key = body.function, frozenset(symbols), unknown
        if key not in self._read:
            self._read.add(key)
            check_source(self._tape, body.function, len(body.instance), *key[1:])

    def refuse(self, what: str, instead: str) -> TraceError:
        return self._tape.refuse(what, instead)


def _checked_static(static_args: Mapping[str, Any] | None) -> dict[str, Any]:
    if static_args is None:
        return {}
    given = checks.entries("static_args", static_args, MAX_ARGUMENTS, 'a dict such as static_args={"n": 3}')
    for name, value in given.items():
        if is_lazy(value):
            raise TraceError(
                f"static_args[{shown(name)}] is a {type(value).__name__}, which is read once; write list(...) around it"
            )
    return given


def _described(parameter: inspect.Parameter) -> Parameter:
    if parameter.default is parameter.empty:
        return Parameter(parameter.name)
    return Parameter(parameter.name, False, parameter.default)


# ------------------------------------------------------------------------------------ the event loop of a trace

# An async program awaits its variables, which a trace has at once. What waits for anything else, a timer, a thread, a
# socket, would wait for ever: the loop runs what is ready, and a body that has not ended then is the error.

Ts = TypeVarTuple("Ts")


def _finish(coroutine: Coroutine[Any, Any, Any], tape: Tape) -> Any:
    """Runs the coroutine to its end here and now, also inside a running loop, and returns what it returns.

    Raises:
        TraceError: it awaits what is not the program's own.
    """
    loop = _ReadyLoop()  # type: ignore[abstract]  # what waits is left out
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        task = loop.create_task(coroutine)
        loop.run_ready()
        if not task.done():
            frames = task.get_stack()
            refusal = _refusal(tape, line_of(frames[-1]) if frames else None)
            task.cancel()
            loop.run_ready()
            raise refusal
        try:
            return task.result()
        except NotImplementedError as error:
            if _is_of_the_loop(error):
                raise _refusal(tape, raising_line(error)) from None
            raise
    finally:
        asyncio._set_running_loop(running)


def _refusal(tape: Tape, line: Line | None) -> TraceError:
    return tape.refuse_at(
        line,
        "the program awaits what is not its own: a timer, a thread or a connection",
        "await in front of variables of the state and of programs that are run, and of nothing else",
    )


def _is_of_the_loop(error: BaseException) -> bool:
    """Returns whether the loop was asked for a thread or a connection, which the class that it is made of refuses."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__") == asyncio.events.__name__


class _ReadyLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()

    def run_ready(self) -> None:
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Makes a handle that never fires, as time stands still: the handle can be cancelled, and never rings."""
        return asyncio.TimerHandle(when, callback, args, self, context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def time(self) -> float:
        return 0.0

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignores a task whose error was not looked at: the body has, or it has ended with another."""
        return

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return


# ------------------------------------------------------------------------------------ looks that no symbol sees


def check_source(
    tape: Tape, function: Callable[..., Any], state: int, symbols: Collection[str], unknown: Collection[str]
) -> None:
    """Raises TraceError for a function that looks at arguments or variables where no symbol sees it.

    Args:
        state: the place of the parameter for the state.
        symbols: names of the arguments that are symbols. One that the function has set before the look is another.
        unknown: those among them that may be of any type.
    """
    tree, first = _source(function)
    if tree is None:
        return
    file = inspect.getfile(inspect.unwrap(function))
    stored = _first_stores(tree)
    for name, how, number in _looks(tree, frozenset(unknown)):
        if stored.get(name, number) >= number:
            line = Line(file, first + number - 1, function.__name__)
            node = tape.builder.node(Argument(name))
            raise tape.unknown(line, node, f"{how} asks what argument {name!r} is, and a symbol is a str")
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    states = [parameter.arg for parameter in parameters[state : state + 1]]  # none where a decorator hides it
    searched = _Searched(function, "".join(states), frozenset(symbols))
    for value, number in searched.looks(tree):
        name = value.id if isinstance(value, ast.Name) else ""
        if stored.get(name, number) >= number:
            line = Line(file, first + number - 1, function.__name__)
            raise tape.unknown(
                line,
                tape.builder.node(Argument(name)) if name else None,
                f"in asks whether {ast.unparse(value)} is part of a text, and no symbol sees that",
            )


class _Searched:
    """`value in text`, where the value is a symbol and the text is one that is known.

    Args:
        state: the name of the state.
        symbols: names of arguments.
    """

    def __init__(self, function: Callable[..., Any], state: str, symbols: frozenset[str]) -> None:
        known = inspect.getclosurevars(inspect.unwrap(function))
        self._known = {**known.globals, **known.nonlocals}
        self._state = state
        self._symbols = symbols

    def looks(self, tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
        for node in ast.walk(tree):
            match node:
                case ast.Compare(left=value, ops=[ast.In() | ast.NotIn()], comparators=[text]):
                    if self._is_symbol(value) and self._is_text(text):
                        yield value, node.lineno

    def _is_symbol(self, value: ast.expr) -> bool:
        match value:
            case ast.Name(id=name):
                return name in self._symbols
            case ast.Subscript(value=ast.Name(id=name)) | ast.Await(value=ast.Subscript(value=ast.Name(id=name))):
                return name == self._state
            case _:
                return False

    def _is_text(self, text: ast.expr) -> bool:
        match text:
            case ast.Constant(value=str()) | ast.JoinedStr():
                return True
            case ast.Name(id=name):
                return isinstance(self._known.get(name), str)
            case _:
                return False


def check_call(tape: Tape, frame: FrameType) -> None:
    """Raises TraceError when a function of `_LOOKING_MODULES` has just been called with a symbol."""
    if frame.f_globals.get("__name__") in _LOOKING_MODULES and frame.f_back is not None and not is_ours(frame.f_back):
        for value in tuple(frame.f_locals.values()):
            node = tape.inside(value)
            if node is not None:
                tape.looked_at(node, f"{frame.f_globals['__name__']}.{frame.f_code.co_name}()")


def _source(function: Callable[..., Any]) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None, int]:
    """Returns the function's tree and its first line; no tree where there is no source to read."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the last from Python 3.12 on, for foreign text
        return None, 0
    functions = (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))
    return next(functions, None), first


def _first_stores(tree: ast.AST) -> dict[str, int]:
    """Maps names to the first line that sets them."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
    return lines


def _looks(function: ast.AST, unknown: frozenset[str]) -> Iterator[tuple[str, str, int]]:
    """Returns names whose kind is asked for, how, and the line, counted from 1. A function inside has parameters of its
    own."""
    waiting = [(child, unknown) for child in ast.iter_child_nodes(function)]
    while waiting:
        node, names = waiting.pop()
        if isinstance(node, _FUNCTIONS):
            names -= {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        waiting.extend((child, names) for child in ast.iter_child_nodes(node))
        match node:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as way]) if name in names:
                yield name, "is not" if isinstance(way, ast.IsNot) else "is", node.lineno
            case ast.Call(func=ast.Name(id=asked), args=[ast.Name(id=name), *_]) if asked in _ASKING and name in names:
                yield name, f"{asked}()", node.lineno
            case ast.Match(subject=ast.Name(id=name)) if name in names:
                yield name, "match", node.lineno
