"""The body of a program: the arguments of a call, and the ways to run it.

A body runs here, in a thread, on the caller's loop, or on a loop of ours. Either way it reports its end to the run, and
an error of the body ends what the run still has in flight: a caller that got an exception has no state to read from.
Meanwhile the run's backend is the default one: a program that the body runs goes to it.

A program's own parameters, options of the run and sampling defaults share one list of keywords, and the program goes
first: a parameter called `stop` or `timeout` receives its own value. The option of that name can then be given in
`sampling={...}`.
"""

import asyncio
import contextvars
import inspect
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..lang import checks, ops, sampling
from ..lang.errors import (
    BudgetError,
    CancelledError,
    DeadlineError,
    ParameterError,
    ProgramError,
    option_remedy,
    shown,
    unknown_option,
)
from ..lang.protocol import MAX_PRIORITY, Backend
from ..lang.state import AsyncState, BaseState, State
from . import loop
from .budget import Allowance, Budget
from .loop import hearing, seconds_left
from .notebooks.interrupts import interrupted_with_cell
from .run import (
    Run,
    SpeculationSetting,
    chosen_backend,
    chosen_journal,
    default_backend,
    ending,
    recording,
    speculation_of,
    speculation_of_run,
)
from .speculation.planner import Planner
from .stream import Stream
from .variables import Piece

if TYPE_CHECKING:
    from rich.console import Console

    from .journal.use import JournalUse


RUN_OPTIONS = (
    "backend",
    "budget",
    "journal",
    "num_api_spec_tokens",
    "priority",
    "record",
    "salt",
    "speculate",
    "stream",
    "timeout",
    "verbose",
)

_OPTIONS = frozenset({*RUN_OPTIONS, *sampling.OPTIONS, "sampling"})
_SALT = re.compile(f"[A-Za-z0-9_-]{{0,{checks.LONGEST_SALT}}}")
_USUAL_PRIORITY = f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, 0 being usual and more being earlier"
_TIMEOUT = f"seconds above 0 and up to {checks.LONGEST_SECONDS:g}, or None for no limit"
MOST_OPTIONS = 256


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run, checked.

    Attributes:
        backend: serves the run.
        budget: limit of the run's cost; for a batch, of all its runs together.
        journal: the file that has its calls.
        priority: of its requests; higher runs earlier.
        record: keep what its streams do, for `state.show()`.
        salt: a namespace of the prefix cache, shared with no other.
        speculation: from num_api_spec_tokens or speculate, overrides the program's own; None: neither was given.
        stream: the body runs in the background, and requests ask for pieces.
        timeout: seconds for all of the run.
        verbose: print the text while it runs.
        sampling: defaults for every `gen`.
    """

    backend: Backend
    budget: Budget | None = None
    journal: "JournalUse | None" = None
    priority: int = 0
    record: bool = True
    salt: str = ""
    speculation: SpeculationSetting | None = None
    stream: bool = False
    timeout: float | None = None
    verbose: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)


class Arguments:
    """The parameters of a program after its state.

    Args:
        name: of the program, for messages.
        function: the user's function, or the signature of one.
        leading: how many parameters come before the program's own: the state, and `self` for a method.
        bound: values fixed by `bind`; a call may give others.
        fixed: parameters that a compiled program had and has no more; a call may not give them.

    Attributes:
        leading: names of the parameters before the program's own.
        takes_any: there is a `**` parameter.

    Raises:
        ParameterError: the function has no parameter for the state, or `bound` names one that it does not have.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any] | inspect.Signature,
        leading: int = 0,
        bound: Mapping[str, Any] | None = None,
        fixed: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.bound = dict(bound or {})
        self._fixed = frozenset(fixed)
        signature = function if isinstance(function, inspect.Signature) else _signature_of(name, function)
        parameters = list(signature.parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < leading:
            raise ParameterError(
                f"program {name}{_written(signature)} has no parameter for the state; write def {name}(s, ...)"
            )
        self.leading = frozenset(each.name for each in parameters[:leading])
        self._parameters = parameters[leading:]
        self._signature = inspect.Signature(self._parameters)
        self._named = {p.name for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._function = function
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters)
        for given in self.bound:
            if given not in self._named and not self.takes_any:
                raise ParameterError(f"program {self} has no parameter {shown(given)} to bind")

    def __str__(self) -> str:
        return f"{self.name}{_written(self._signature)}"

    def split(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], RunOptions]:
        """Splits the keywords of `run` into the program's own and the run's options.

        Raises:
            ParameterError: a keyword that is neither, or an option with a wrong value.
        """
        own, options = self.divide(keywords)
        return own, run_options(options)

    def divide(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits keywords as `split` does, with the options unchecked."""
        own: dict[str, Any] = {}
        options: dict[str, Any] = {}
        for name, value in keywords.items():
            if name in self._named:
                own[name] = value
            elif name in self._fixed:
                raise ParameterError(f"{self}: {_fixed_remedy(name, value)}")
            elif name in _OPTIONS:
                options[name] = value
            elif self.takes_any:
                own[name] = value
            else:
                known = _OPTIONS.union(self._named)
                own_names = ", ".join(parameter.name for parameter in self.unbound()) or "no arguments"
                instead = option_remedy(name, known, f"the program takes {own_names}")
                raise ParameterError(f"{self} has no parameter {shown(name)}, and neither has run(); {instead}")
        return own, options

    def unbound(self) -> list[inspect.Parameter]:
        """Returns the parameters a call may give by name: without bound ones, `*args` and `**kwargs`."""
        collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p for p in self._parameters if p.name not in self.bound and p.kind not in collecting]

    def annotations(self) -> dict[str, Any]:
        """Returns parameters → their annotations; none where these cannot be evaluated, as of a compiled program."""
        if isinstance(self._function, inspect.Signature):
            return {}
        try:
            signature = inspect.signature(self._function, eval_str=True)
        except Exception:  # of the annotations' own code
            return {}
        return {p.name: p.annotation for p in signature.parameters.values() if p.annotation is not p.empty}

    def bind(self, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> inspect.BoundArguments:
        """Binds a call's arguments to the function's parameters after its state. Positions skip bound parameters.

        Raises:
            ParameterError: a missing, unknown or repeated argument; the message shows the signature.
        """
        if not self.bound:
            try:
                return self._signature.bind(*positional, **keywords)
            except TypeError as error:
                raise ParameterError(f"{self}: {error}") from None
        given = {name: value for name, value in self.bound.items() if name not in keywords}
        visible = [p for p in self._parameters if p.name not in given]
        try:
            bound = inspect.Signature(visible).bind(*positional, **keywords)
        except TypeError as error:
            raise ParameterError(f"{self}: {error}") from None
        extra = {name: value for name, value in given.items() if name not in self._named}
        arguments = {**given, **bound.arguments}
        ordered = {p.name: arguments[p.name] for p in self._parameters if p.name in arguments}
        if extra:
            catch_all = next(p.name for p in self._parameters if p.kind is p.VAR_KEYWORD)
            ordered[catch_all] = {**extra, **ordered.get(catch_all, {})}
        return inspect.BoundArguments(self._signature, ordered)


def _fixed_remedy(name: str, value: object) -> str:
    what = f"{name} was fixed by static_args or bind; compile again"
    if name not in _OPTIONS or name == "sampling":
        return f"{what} for another value"
    return f"{what}, or write sampling={{{name!r}: {shown(value)}}} for the option of that name"


def _signature_of(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:  # of a builtin, say
        raise ParameterError(f"program {name}: {error}; write def {name}(s, ...)") from None


def _written(signature: inspect.Signature) -> str:
    """Formats a signature; without defaults where one of them has no text."""
    try:
        return str(signature)
    except Exception:  # of a default's own code
        return f"({', '.join(signature.parameters)})"


def run_options(options: Mapping[str, Any], owner: str = "run()", others: Iterable[str] = ()) -> RunOptions:
    """Checks options given by keyword and inside `sampling={...}`; the latter win.

    Args:
        owner: the call, for messages.
        others: parameters of the call that are no options, for messages.

    Raises:
        ParameterError: an unknown option or a wrong value.
        ProgramError: an option holds an operation, which can only be said.
    """
    for name in options:
        if name not in _OPTIONS:
            raise unknown_option(owner, name, _OPTIONS.union(others))
    ops.refuse_operations(options, "an option of the run")
    inner = options.get("sampling")
    merged = {name: value for name, value in options.items() if name != "sampling"}
    if inner is not None:
        merged |= checks.entries("sampling", inner, MOST_OPTIONS, "a dict such as sampling={'temperature': 0}")
    timeout = merged.pop("timeout", None)
    journal = chosen_journal(merged.pop("journal", None))
    backend = merged.pop("backend", None)
    return RunOptions(
        backend=journal.backend if journal is not None and journal.backend is not None else chosen_backend(backend),
        budget=_checked_budget(merged.pop("budget", None)),
        journal=journal,
        priority=checks.integer("priority", merged.pop("priority", 0), -MAX_PRIORITY, MAX_PRIORITY, _USUAL_PRIORITY),
        record=checks.switch("record", merged.pop("record", True)),
        salt=_checked_salt(merged.pop("salt", "")),
        speculation=speculation_of(merged.pop("num_api_spec_tokens", None), merged.pop("speculate", None)),
        stream=checks.switch("stream", merged.pop("stream", False)),
        timeout=None if timeout is None else checks.seconds("timeout", timeout, instead=_TIMEOUT),
        verbose=checks.switch("verbose", merged.pop("verbose", False)),
        sampling=sampling_defaults(merged),
    )


def _checked_budget(budget: object) -> Budget | None:
    if budget is not None and not isinstance(budget, Budget):
        raise ParameterError(
            f"budget={shown(budget)}; write umbel.Budget(tokens=10_000), or with calls, dollars or seconds"
        )
    return budget


def _checked_salt(salt: object) -> str:
    if not isinstance(salt, str) or not _SALT.fullmatch(checks.plain(salt)):
        raise ParameterError(
            f"salt={shown(salt)}; write at most {checks.LONGEST_SALT} of the characters A-Z a-z 0-9 _ -"
        )
    return checks.plain(salt)


def sampling_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Validates the sampling fields of one layer. Rules across fields are checked once all layers are merged."""
    fields = sampling.overrides(options)
    for name, value in fields.items():
        alone = {name: value}
        if name == "min_tokens":
            alone["max_tokens"] = sampling.MAX_TOKENS
        sampling.merge(alone)
    return fields


Call = inspect.BoundArguments  # the arguments after the state


class Host(Protocol):
    """A program that opens its runs."""

    @property
    def name(self) -> str: ...

    def parts(self) -> Mapping[str, str]:
        """Returns what the program consists of → digest, for a journal."""

    def open(self, options: RunOptions, allowance: Allowance | None) -> tuple[Run, State]:
        """Creates a run that has not begun. `allowance`: what is left of its budget, or of its batch's."""


def journaled(host: Host, options: RunOptions) -> AbstractContextManager[None]:
    """Holds the journal of a run, or of a batch, open. Its block ends when all calls have: the file is closed then. A
    streaming run closes it at its end. Raises JournalError."""
    return nullcontext() if options.journal is None else options.journal.kept(host, waits=not options.stream)


def journaled_async(host: Host, options: RunOptions) -> AbstractAsyncContextManager[None]:
    """As `journaled`, on the caller's loop."""
    return nullcontext() if options.journal is None else options.journal.kept_async(host, waits=not options.stream)


def opened(
    host: Host, options: RunOptions, allowance: Allowance | None, call: Call, number: int | None = None
) -> tuple[Run, State]:
    """Creates a run that has not begun, with its calls in the journal. `number`: of the program in its batch.

    Raises:
        JournalError: the journal has it with other arguments.
    """
    run, state = host.open(options, allowance)
    if options.journal is not None:
        try:
            options.journal.begin(run, state, host, options, call, number)
        except BaseException as error:
            run.end(error)
            raise
    return run, state


class Speaker(Protocol):
    """The sink of a program's state, which runs the program or records it."""

    def options(self, program_options: Mapping[str, Any], /) -> AbstractContextManager[None]:
        """Applies a nested program's sampling defaults over those of the program around it."""


@dataclass(frozen=True)
class Body:
    """Runs the user's function, with its defaults. A host of batches.

    `speculation`: the default of its runs. `planner`: statistics of all runs of the program. `state`: the class of the
    states that a sync function gets, and that `run` returns.
    """

    name: str
    function: Callable[..., Any]  # parameters and result are the user's
    options: Mapping[str, Any] = field(default_factory=dict)
    instance: tuple[object, ...] = ()  # the object a method is bound to, before the state
    speculation: SpeculationSetting | None = None
    planner: Planner = field(default_factory=Planner, compare=False)
    state: type[State] = State

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def parts(self) -> Mapping[str, str]:
        """Returns the digests of the function and of what it calls, for a journal."""
        from .journal.identity import parts_of

        return parts_of(self.function)

    def open(self, options: RunOptions, allowance: Allowance | None) -> tuple[Run, State]:
        run = Run(
            options.backend,
            timeout=options.timeout,
            allowance=allowance,
            streaming=options.stream,
            salt=options.salt,
            priority=options.priority,
            adapter={**self.options, **options.sampling}.get("adapter", ""),
            speculation=speculation_of_run(options.speculation or self.speculation, self.planner),
            record=options.record,
            program=self.name,
        )
        stream = Stream(run, self.options, options.sampling)
        if options.verbose:
            run.printer = follow(stream, self.name)
        return run, self.state(stream)

    # -------------------------------------------------------------------------------- started from sync code

    def run(self, run: Run, state: State, call: Call) -> None:
        """Runs the body in the caller's thread, or in the background for a streaming run. A run that is printed has
        been printed when this returns, but for a streaming one."""
        if run.streaming and not self.is_async:
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._run_quietly, run, state, call), name=f"umbel-{self.name}", daemon=True
            ).start()
            return
        try:
            if self.is_async:
                self._run_on_programs_loop(run, state, call)
            else:
                self._run_here(run, state, call)
        finally:
            await_printer(run)

    def _run_here(self, run: Run, state: BaseState, call: Call) -> None:
        run.log.note_arguments(call.arguments)
        try:
            with run.inside(), default_backend(run.backend):
                state.ret_value = self.invoke(state, call)
        except BaseException as error:
            run.end(ending(error))
            raise
        run.end()

    def _run_quietly(self, run: Run, state: State, call: Call) -> None:
        try:
            self._run_here(run, state, call)
        except BaseException:  # the run has recorded it: reads of the state raise it
            return

    def _run_on_programs_loop(self, run: Run, state: State, call: Call) -> None:
        if loop.programs.current:
            raise ProgramError(f"inside an async program write: await {self.name}.run_async(...)")
        work = self._run_on_this_loop(run, AsyncState(state._sink), call, shown=state)
        if run.streaming:
            loop.programs.spawn(_quietly(work), contextvars.copy_context())
            return
        future = loop.programs.spawn(work, contextvars.copy_context())
        try:
            loop.result_of(future)
        except BaseException:
            run.cancel()
            future.cancel()
            raise

    # -------------------------------------------------------------------------------- started from a coroutine

    async def run_async(self, run: Run, state: AsyncState, call: Call) -> None:
        """Runs an async body on this loop, a sync body on a worker thread; in the background for a streaming run."""
        work = self._run_on_this_loop(run, state, call) if self.is_async else self._run_in_worker(run, state, call)
        if run.streaming:
            run.body = asyncio.ensure_future(_quietly(work))
        else:
            with interrupted_with_cell(run):
                await work
                if run.printer is not None:
                    await asyncio.to_thread(await_printer, run)

    async def _run_on_this_loop(self, run: Run, state: AsyncState, call: Call, *, shown: State | None = None) -> None:
        """Runs an async body until the run's deadline. `shown`: the state that sync code has of the same run."""
        run.log.note_arguments(call.arguments)
        try:
            with run.inside(), default_backend(run.backend):
                async with asyncio.timeout(seconds_left(run.deadline)) as limit:
                    state.ret_value = await self.invoke(state, call)
            if shown is not None:
                shown.ret_value = state.ret_value
        except TimeoutError as error:
            if not limit.expired():  # a timeout of the body's own
                run.end(error)
                raise
            run.expire()
            late = run.reason if isinstance(run.reason, DeadlineError | BudgetError) else run.lateness()
            run.end(late)
            raise late from error
        except BaseException as error:
            run.end(ending(error))
            raise
        run.end()

    async def _run_in_worker(self, run: Run, state: AsyncState, call: Call) -> None:
        """Runs a sync body on a worker thread: its reads block."""
        blocking = State(state._sink)
        try:
            await asyncio.to_thread(self._run_here, run, blocking, call)
        except asyncio.CancelledError:
            run.cancel()
            raise
        finally:
            state.ret_value = blocking.ret_value

    # -------------------------------------------------------------------------------- inside another program

    def run_inside(self, state: BaseState, call: Call) -> Any:
        """Runs the body in the state of the program around it. Returns its result, or a coroutine for it.

        Raises:
            ParameterError: an async body inside a sync program.
            TraceError: the program around it is being traced, and the state is of another one.
        """
        recorder = recording()
        if recorder is not None:
            recorder.enter(self, call, state._sink)
        if self.is_async and not isinstance(state, AsyncState):
            raise ParameterError(
                f"{self.name} is an async program and cannot run inside the sync program that owns this state; "
                f"make that one async def too, or call {self.name}.run(...)"
            )
        speaker = cast(Speaker, state._sink)
        if self.is_async:
            return self._run_inside_async(state, speaker, call)
        with speaker.options(self.options):
            try:
                return self.invoke(state, call)
            except (AttributeError, ProgramError) as error:
                if isinstance(state, AsyncState):  # whose values are waited for
                    error.add_note(
                        f"{self.name} is a sync program in the state of an async one; make it async def, too"
                    )
                raise

    async def _run_inside_async(self, state: BaseState, speaker: Speaker, call: Call) -> Any:
        with speaker.options(self.options):
            return await self.invoke(state, call)

    # -------------------------------------------------------------------------------- in a batch

    def start(
        self,
        run: Run,
        state: State,
        call: Call,
        pool: ThreadPoolExecutor,
        *,
        body_ended: Callable[[BaseException | None], None],
        finished: Callable[[], None],
    ) -> None:
        def end(error: BaseException | None) -> None:
            body_ended(error)
            run.when_finished(finished)

        def body() -> None:
            try:
                self._run_here(run, state, call)
            except BaseException as error:
                return end(error)
            return end(None)

        def given_up(queued: Future[None]) -> None:
            if queued.cancelled():  # the batch has ended before a thread was free: the body never runs
                error = CancelledError("the batch was given up")
                run.end(error)
                end(error)

        async def async_body() -> None:
            try:
                await self._run_on_this_loop(run, AsyncState(state._sink), call, shown=state)
            except BaseException as error:
                return end(error)
            return end(None)

        if self.is_async:
            loop.programs.spawn(async_body(), contextvars.copy_context())
        else:
            pool.submit(contextvars.copy_context().run, body).add_done_callback(given_up)

    # -------------------------------------------------------------------------------- how

    def invoke(self, state: BaseState, call: Call) -> Any:
        shown = state if isinstance(state, AsyncState | self.state) else self.state(state._sink)
        return self.function(*self.instance, shown, *call.args, **call.kwargs)


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """Awaits a body and drops its error: the run has recorded it, and reads of the state raise it."""
    try:
        await work
    except Exception:
        return


def follow(stream: Stream, name: str, console: "Console | None" = None) -> threading.Thread:
    """Prints `stream` until its run has ended. Returns the thread that prints."""
    from rich.console import Console

    pieces = stream.iterate(None)
    stream.ask_for_pieces()  # before the program says anything
    target = console or Console(highlight=False)
    if target.is_jupyter:  # where each print would be a block of its own: to the cell's output, with its colours
        target = Console(highlight=False, force_jupyter=False, force_terminal=True, color_system="standard")
    thread = threading.Thread(target=_print, args=(pieces, name, target), name=f"umbel-show-{name}", daemon=True)
    thread.start()
    return thread


def await_printer(run: Run) -> None:
    """Waits until a verbose run has been printed; a streaming one goes on meanwhile."""
    while not run.streaming and run.printer is not None and run.printer.is_alive():
        run.printer.join(hearing())


def _print(pieces: Iterator[Piece], name: str, console: "Console") -> None:
    from rich.text import Text

    console.rule(name, style="dim", align="left")
    try:
        for text, facts in pieces:
            console.print(Text(text, style="bold" if facts else "dim"), end="", soft_wrap=True)
        console.print()
    except Exception as error:  # reads of the state raise it; here it is only shown
        console.print(Text(f"\n{type(error).__name__}: {error}", style="red"))
