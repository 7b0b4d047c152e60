"""Traces a program: runs the user's function once, with symbols for unknown values, and records a graph.

This works for programs whose course does not depend on the values. Loops over constants and ranges unroll; what looks
at an argument or at an answer raises TraceError with its line (`symbols.py`), and so does what a graph cannot say.

A symbol cannot detect every look at it; `looks.py` finds the others.
"""

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass
from functools import partial
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
from .lines import line_of, raising_line
from .looks import check_call, check_source
from .recorder import Recorder
from .symbols import Symbol, describe, is_lazy, is_text, node_of
from .tape import Tape
from .texts import TextLooks

if TYPE_CHECKING:
    from ...interpreter.program import Program


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
        texts = TextLooks(self._tape)
        self._watch = Watch(partial(check_call, self._tape, texts), texts.check_builtin)

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
        graph = self._tape.builder.graph(self._body.name, parameters, ends, variables, returned, self._arguments.bound)
        return Trace(graph, self._watch.effects, self._watch.watching)

    def body_result(self, own: Recorder, call: Call) -> object:
        """Runs the body and returns what it returns."""
        with self._watch.watched():
            if self._body.is_async:
                return _finish(self._body.invoke(AsyncState(own), call), self._tape)
            return self._body.invoke(State(own), call)

    def _symbolic_call(self) -> tuple[list[Parameter], Call]:
        """Returns the parameters of the graph, and the call with symbols for them.

        Raises:
            TraceError: there is a `*` parameter: the graph would be that of no arguments.
        """
        for collecting in self._collecting(inspect.Parameter.VAR_POSITIONAL):
            raise self._uncollected(f"*{collecting}", "a parameter that is a list, and fix it with static_args")
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

    def _collecting(self, kind: object) -> list[str]:
        return [p.name for p in inspect.signature(self._body.function).parameters.values() if p.kind is kind]

    def _uncollected(self, written: str, instead: str) -> TraceError:
        code = getattr(inspect.unwrap(self._body.function), "__code__", None)
        line = None if code is None else Line(code.co_filename, code.co_firstlineno, code.co_name)
        run = f"{self._body.name}.run(...) to run the program with the interpreter"
        return self._tape.refuse_at(line, f"a graph has no {written}", f"{instead}; or {run}")

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
            if isinstance(error, KeyError):  # of **words, which are those that are fixed
                for collecting in self._collecting(inspect.Parameter.VAR_KEYWORD):
                    instead = f"a parameter {error.args[0]}, or fix it with static_args"
                    raise self._uncollected(f"**{collecting} but for what is fixed", instead) from error
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
