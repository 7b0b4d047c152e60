"""Programs: functions whose first parameter is the state, and the ways to run them.

@function                        program.run(x)                 a sync body runs in the caller's thread
def program(s, x): ...           program.run(x, stream=True)    ... in a thread of its own; read while it runs
                                 await program.run_async(x)     an async body runs on the caller's loop
                                 program.run_batch([...])       many; see batch.py
                                 program(s, x)                  inside another program, in its state
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from ..lang.errors import CancelledError, DeadlineError, ParameterError, ProgramError
from ..lang.state import AsyncState, BaseState, State
from . import batch as _batch
from . import loop
from .arguments import Arguments, RunOptions, run_options, sampling_defaults
from .run import Run
from .stream import Stream
from .waiting import seconds_left

Body = Callable[..., Any]  # the user's function: its parameters and result are the user's


class Program:
    """A function of the language. Made by `@function`; immutable.

    Args:
        body: the user's function, sync or `async def`.
        name: for messages.
        options: sampling defaults of the program, under those of a run and of a `gen`.
        instance: what a method is bound to.
        bound: arguments fixed by `bind`.
    """

    def __init__(
        self,
        body: Body,
        *,
        name: str,
        options: Mapping[str, Any],
        instance: tuple[object, ...] = (),
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.options = dict(options)
        self._body = body
        self._instance = instance
        self._arguments = Arguments(name, body, len(instance) + 1, bound)
        functools.update_wrapper(self, body)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._body)

    def __get__(self, instance: object, owner: type | None = None) -> "Program":
        """As a method: `self` goes before the state."""
        if instance is None:
            return self
        return self._with(instance=(instance,))

    def bind(self, **arguments: Any) -> "Program":
        """The same program with these arguments fixed. Positional arguments of a call fill the others; a call may
        give a bound one anew by keyword.

        Raises:
            ParameterError: the program has no such parameter.
        """
        return self._with(bound={**self._arguments.bound, **arguments})

    def _with(self, *, instance: tuple[object, ...] | None = None, bound: Mapping[str, Any] | None = None) -> "Program":
        return Program(
            self._body,
            name=self.name,
            options=self.options,
            instance=self._instance if instance is None else instance,
            bound=self._arguments.bound if bound is None else bound,
        )

    def __repr__(self) -> str:
        return f"<program {self._arguments}>"

    # -------------------------------------------------------------------------------- running

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """With a state first: run inside it, and return what the body returns (for an `async def` program, a
        coroutine). Otherwise the same as `run`."""
        if not arguments or not isinstance(arguments[0], BaseState):
            return self.run(*arguments, **keywords)
        state, *rest = arguments
        if self.is_async and not isinstance(state, AsyncState):
            raise ParameterError(
                f"{self.name} is an async program and cannot run inside the sync program that owns this state; "
                f"make that one async def too, or call {self.name}.run(...)"
            )
        call = self._arguments.bind(tuple(rest), keywords)
        sink = state._sink
        if not isinstance(sink, Stream):  # being recorded, not run
            return self._invoke(state, call)
        if self.is_async:
            return self._nested_async(state, sink, call)
        with sink.options(self.options):
            return self._invoke(state, call)

    async def _nested_async(self, state: BaseState, sink: Stream, call: inspect.BoundArguments) -> Any:
        with sink.options(self.options):
            return await self._invoke(state, call)

    def run(self, *arguments: Any, **keywords: Any) -> State:
        """Run the program. Beside its own parameters it takes `backend=`, `timeout=` in seconds for all of the run,
        `stream=True` to return at once and read while the body runs, sampling defaults, and `sampling={...}` for
        any of these whose name the program uses itself.

        Returns when the body has returned; what it appended last may still be running. Reading waits for it.

        Raises:
            ParameterError: arguments that do not fit, before anything runs.
            Whatever the body raises.
        """
        call, options = self._prepare(arguments, keywords)
        run, stream = self._open(options)
        state = State(stream)
        if self.is_async:
            return self._run_on_programs_loop(run, state, call)
        if options.stream:
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._run_quietly, run, state, call), name=f"umbel-{self.name}", daemon=True
            ).start()
            return state
        self._run_body(run, state, call)
        return state

    async def run_async(self, *arguments: Any, **keywords: Any) -> AsyncState:
        """`run` for the caller's event loop. An async body runs on it; a sync body runs on a worker thread.

        Cancelling the awaiting task cancels the run.
        """
        call, options = self._prepare(arguments, keywords)
        run, stream = self._open(options)
        state = AsyncState(stream)
        start = self._run_async_body if self.is_async else self._run_in_worker
        work = start(run, state, call)
        if options.stream:
            run.body = asyncio.ensure_future(_quietly(work))
            return state
        await work
        return state

    @overload
    def run_batch(
        self, batch_arguments: Iterable[_batch.Item], *, generator_style: Literal[True], **options: Any
    ) -> Iterator[State | _batch.Failure]: ...

    @overload
    def run_batch(
        self, batch_arguments: Iterable[_batch.Item], *, generator_style: Literal[False] = False, **options: Any
    ) -> list[State | _batch.Failure]: ...

    def run_batch(
        self,
        batch_arguments: Iterable[_batch.Item],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: _batch.OnError = "raise",
        **options: Any,  # as of run(): backend, timeout of each program, sampling defaults
    ) -> list[State | _batch.Failure] | Iterator[State | _batch.Failure]:
        """Run the program for every dict of keywords or tuple of positions; results in the order of the arguments.

        Args:
            batch_arguments: with `generator_style` any iterable, read as it is needed.
            num_threads: most programs at once. "auto" runs bodies on at most 32 threads, and async bodies on none.
            progress_bar: show one.
            generator_style: give results one by one, in bounded memory; closing the iterator cancels what runs.
            on_error: "return" puts a `Failure` in the place of a program that failed. "raise" starts no more
                programs after one failed, lets the running ones finish and raises the first error by position; the
                states of those that succeeded are kept in its `batch_results`, a dict by position. In generator
                form the error is raised in its place, after the results before it.

        Raises:
            ParameterError: arguments that do not fit, before anything runs.
        """
        checked = run_options(options)
        if checked.stream:
            raise ParameterError("run_batch() takes no stream; results come as they finish with generator_style=True")
        job = _batch.Job(
            self._launch,
            self._arguments,
            batch_arguments,
            num_threads=num_threads,
            on_error=on_error,
            options=checked,
        )
        if generator_style:
            return job.generate(progress_bar=progress_bar)
        return job.collect(progress_bar=progress_bar)

    # -------------------------------------------------------------------------------- how

    def _prepare(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[inspect.BoundArguments, RunOptions]:
        own, options = self._arguments.split(keywords)
        return self._arguments.bind(arguments, own), options

    def _open(self, options: RunOptions) -> tuple[Run, Stream]:
        run = Run(options.backend, timeout=options.timeout, streaming=options.stream)
        return run, Stream(run, self.options, options.sampling)

    def _invoke(self, state: BaseState, call: inspect.BoundArguments) -> Any:
        return self._body(*self._instance, state, *call.args, **call.kwargs)

    def _run_body(self, run: Run, state: BaseState, call: inspect.BoundArguments) -> None:
        """A sync body, here and now. An error of the body ends what the run still has in flight."""
        try:
            with run.inside():
                state.ret_value = self._invoke(state, call)
        except BaseException as error:
            run.end(_ending(error))
            raise
        run.end()

    def _run_quietly(self, run: Run, state: State, call: inspect.BoundArguments) -> None:
        try:
            self._run_body(run, state, call)
        except BaseException:  # the run has recorded it: whoever reads the state raises it
            return

    async def _run_async_body(
        self, run: Run, state: AsyncState, call: inspect.BoundArguments, *, shown: State | None = None
    ) -> None:
        """An async body on this loop, until the run's deadline. `shown` is what sync code sees of the same run."""
        try:
            with run.inside():
                async with asyncio.timeout(seconds_left(run.deadline)) as limit:
                    state.ret_value = await self._invoke(state, call)
            if shown is not None:
                shown.ret_value = state.ret_value
        except TimeoutError as error:
            if not limit.expired():
                run.end(error)
                raise
            run.expire()
            late = run.reason if isinstance(run.reason, DeadlineError) else DeadlineError(str(error))
            run.end(late)
            raise late from error
        except BaseException as error:
            run.end(_ending(error))
            raise
        run.end()

    async def _run_in_worker(self, run: Run, state: AsyncState, call: inspect.BoundArguments) -> None:
        """A sync body, which reads with blocking calls, on a thread of the caller's loop."""
        blocking = State(state._sink)
        try:
            await asyncio.to_thread(self._run_body, run, blocking, call)
        except asyncio.CancelledError:
            run.cancel()
            raise
        finally:
            state.ret_value = blocking.ret_value

    def _run_on_programs_loop(self, run: Run, state: State, call: inspect.BoundArguments) -> State:
        """An async body, started from sync code."""
        if loop.programs.current:
            raise ProgramError(f"inside an async program write: await {self.name}.run_async(...)")
        inner = AsyncState(state._sink)
        work = self._run_async_body(run, inner, call, shown=state)
        if run.streaming:
            loop.programs.spawn(_quietly(work), contextvars.copy_context())
            return state
        future = loop.programs.spawn(work, contextvars.copy_context())
        try:
            future.result()
        except BaseException:
            run.cancel()
            future.cancel()
            raise
        return state

    def _launch(
        self,
        call: inspect.BoundArguments,
        options: RunOptions,
        pool: ThreadPoolExecutor,
        *,
        body_ended: Callable[[BaseException | None], None],
        finished: Callable[[], None],
    ) -> tuple[Run, State]:
        """Start one program of a batch."""
        run, stream = self._open(options)
        state = State(stream)

        def end(error: BaseException | None) -> None:
            body_ended(error)
            run.when_finished(finished)

        def body() -> None:
            try:
                self._run_body(run, state, call)
            except BaseException as error:
                return end(error)
            return end(None)

        async def async_body() -> None:
            try:
                await self._run_async_body(run, AsyncState(stream), call, shown=state)
            except BaseException as error:
                return end(error)
            return end(None)

        if self.is_async:
            loop.programs.spawn(async_body(), contextvars.copy_context())
        else:
            pool.submit(contextvars.copy_context().run, body)
        return run, state


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """For a body that nobody awaits: the run has recorded its error, and whoever reads the state raises it."""
    try:
        await work
    except Exception:
        return


def _ending(error: BaseException) -> BaseException:
    """What reads of the run raise after its body ended with `error`."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | GeneratorExit):
        ending = CancelledError(f"the run was interrupted by {type(error).__name__}")
        ending.__cause__ = error
        return ending
    return error


@overload
def function(body: Body, /) -> Program: ...


@overload
def function(*, name: str | None = None, **options: Any) -> Callable[[Body], Program]: ...


def function(
    body: Body | None = None, /, *, name: str | None = None, **options: Any
) -> Program | Callable[[Body], Program]:
    """Make a program of a function whose first parameter is the state (after `self` for a method).

    Bare, or with sampling defaults: `@function(temperature=0, stop="\\n")`.

    Raises:
        ParameterError: an unknown option, or a function without a parameter.
    """
    defaults = sampling_defaults(options)

    def decorate(body: Body) -> Program:
        if not callable(body) or isinstance(body, type):
            raise ParameterError(f"@function needs a function, got {body!r}")
        return Program(body, name=name or str(getattr(body, "__name__", "program")), options=defaults)

    return decorate if body is None else decorate(body)
