"""The body of a program and the ways to run it: here, in a thread, on the caller's loop, on a loop of ours.

However a body runs, its run is told when it ends, and an error of the body ends what the run still has
in flight: a caller that got an exception has no state to read from.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..lang.errors import BudgetError, DeadlineError, ParameterError, ProgramError
from ..lang.state import AsyncState, BaseState, State
from . import loop
from .arguments import RunOptions
from .budgets.budget import Allowance
from .recording import recording
from .run import Run, ending
from .speculation.planner import Planner
from .speculation.settings import Rest, Setting, Speculating
from .stream import Stream
from .variables import Piece
from .waiting import seconds_left

if TYPE_CHECKING:
    from rich.console import Console


Call = inspect.BoundArguments  # the arguments after the state


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
    speculation: Setting | None = None
    planner: Planner = field(default_factory=Planner, compare=False)
    state: type[State] = State

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def open(self, options: RunOptions, allowance: Allowance | None) -> tuple[Run, State]:
        run = Run(
            options.backend,
            timeout=options.timeout,
            allowance=allowance,
            streaming=options.stream,
            salt=options.salt,
            priority=options.priority,
            speculation=self._speculating(options),
        )
        stream = Stream(run, self.options, options.sampling)
        if options.verbose:
            follow(stream, self.name)
        return run, self.state(stream)

    def _speculating(self, options: RunOptions) -> Speculating | None:
        setting = options.speculation or self.speculation
        return Speculating(setting, self.planner, Rest()) if setting is not None and setting.tokens != 0 else None

    # -------------------------------------------------------------------------------- started from sync code

    def run(self, run: Run, state: State, call: Call) -> None:
        """Runs the body in the caller's thread, or in the background for a streaming run."""
        if self.is_async:
            self._run_on_programs_loop(run, state, call)
        elif run.streaming:
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._run_quietly, run, state, call), name=f"umbel-{self.name}", daemon=True
            ).start()
        else:
            self._run_here(run, state, call)

    def _run_here(self, run: Run, state: BaseState, call: Call) -> None:
        run.journal.note_arguments(call.arguments)
        try:
            with run.inside():
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
            future.result()
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
            await work

    async def _run_on_this_loop(self, run: Run, state: AsyncState, call: Call, *, shown: State | None = None) -> None:
        """Runs an async body until the run's deadline. `shown`: the state that sync code has of the same run."""
        run.journal.note_arguments(call.arguments)
        try:
            with run.inside():
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
            return self.invoke(state, call)

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

        async def async_body() -> None:
            try:
                await self._run_on_this_loop(run, AsyncState(state._sink), call, shown=state)
            except BaseException as error:
                return end(error)
            return end(None)

        if self.is_async:
            loop.programs.spawn(async_body(), contextvars.copy_context())
        else:
            pool.submit(contextvars.copy_context().run, body)

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
    thread = threading.Thread(target=_print, args=(pieces, name, target), name=f"umbel-show-{name}", daemon=True)
    thread.start()
    return thread


def _print(pieces: Iterator[Piece], name: str, console: "Console") -> None:
    from rich.text import Text

    console.rule(name, style="dim", align="left")
    try:
        for text, facts in pieces:
            console.print(Text(text, style="bold" if facts else "dim"), end="")
        console.print()
    except Exception as error:  # reads of the state raise it; here it is only shown
        console.print(Text(f"\n{type(error).__name__}: {error}", style="red"))
