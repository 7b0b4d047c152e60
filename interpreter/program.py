"""Programs: functions whose first parameter is the state. Runs, batches, nests and estimates them.

@function                        program.run(x)                 a sync body runs in the caller's thread
def program(s, x): ...           program.run(x, stream=True)    ... in a thread of its own; read while it runs
                                 await program.run_async(x)     an async body runs on the caller's loop
                                 program.run_batch([...])       many; see batch.py
                                 program.estimate(x)            what it may cost; asks no model
                                 program(s, x)                  inside another program, in its state

Users get a subclass, `compiler.program.Program`, which can also be traced and compiled.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar, cast, overload

from ..lang import checks, notebook
from ..lang.errors import BudgetError, ParameterError, shown
from ..lang.ops import MAX_NAME_LENGTH
from ..lang.state import AsyncState, BaseState, State
from . import batch as _batch
from .body import Arguments, Body, RunOptions, journaled, journaled_async, opened, run_options, sampling_defaults
from .budget import allowance_of
from .data.output import BatchOutput
from .data.progress import BatchProgress
from .estimate import Estimate, StandIn
from .run import Recording, default_backend, recording, speculation_of

Function = Callable[..., Any]  # the user's: its parameters and result are the user's


class Program:
    """A function of the language that can be run. Made by `maker`; immutable.

    Args:
        body: the user's function with its name and options.
        bound: arguments fixed by `bind`.
    """

    def __init__(self, body: Body, bound: Mapping[str, Any] | None = None) -> None:
        self._body = body
        self._arguments = Arguments(body.name, body.function, len(body.instance) + 1, bound)
        functools.update_wrapper(self, body.function, updated=())

    @property
    def name(self) -> str:
        """Name of the program: that of its function, or the `name` that `@function` was given."""
        return self._body.name

    @property
    def body(self) -> Body:
        """The function with its name and options, as runs take it; of interest to other parts of umbel."""
        return self._body

    @property
    def bound(self) -> Mapping[str, Any]:
        """Arguments fixed by `bind`."""
        return self._arguments.bound

    @property
    def options(self) -> dict[str, Any]:
        """The sampling defaults given to the decorator."""
        return dict(self._body.options)

    @property
    def is_async(self) -> bool:
        """Whether the function is an `async def`."""
        return self._body.is_async

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        """Binds a method: `self` goes before the state."""
        if instance is None:
            return self
        return type(self)(replace(self._body, instance=(instance,)), self._arguments.bound)

    def bind(self, **arguments: Any) -> Self:
        """Returns the program with these arguments fixed. Positional arguments of a call fill the others; a call may
        override a bound one by keyword.

        Args:
            arguments: by the names of the program's parameters.

        Raises:
            ParameterError: the program has no such parameter.
        """
        return type(self)(self._body, {**self._arguments.bound, **arguments})

    def __repr__(self) -> str:
        return f"<program {self._arguments}>"

    def _repr_html_(self) -> str:
        """Describes the program for a notebook: its parameters, what is bound, its docstring."""
        rows = [
            (f"<b>{notebook.escaped(name)}</b>", notebook.escaped(shown(value))) for name, value in self.bound.items()
        ]
        body = notebook.preformatted(inspect.getdoc(self._body.function) or "no docstring") + notebook.table(rows)
        return notebook.folded(f"program {self._arguments}", body)

    # -------------------------------------------------------------------------------- running

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Runs inside a state given first, and returns the body's result (a coroutine for an `async def` program).
        Otherwise the same as `run`."""
        if arguments and isinstance(arguments[0], BaseState):
            return self._body.run_inside(arguments[0], self._arguments.bind(arguments[1:], keywords))
        return self.run(*arguments, **keywords)

    def run(self, *arguments: Any, **keywords: Any) -> State:
        """Runs the program, and returns its state.

        Returns when the body has returned; what it appended last may still be running. Reading waits for it. With a
        journal it returns when all calls have ended, and the file is closed.

        Args:
            arguments: of the program's own parameters, by position.
            keywords: of the program's own parameters, by name; the options below; and sampling parameters of `gen`,
                such as temperature and max_tokens, which are defaults for the calls of this run.

        Keyword Args:
            backend (Backend): to run on; default: that of the program whose body runs this one, or else that of
                `set_default_backend`.
            stream (bool): True returns at once, to read while the body runs; default: False.
            timeout (float): seconds for all of the run: every wait ends by then; default: None, no limit.
            budget (Budget): tokens, calls, dollars or seconds that no call goes beyond; default: None.
            verbose (bool): True prints the text while it runs; default: False.
            journal (str): path of a file: calls that it has are read from it, others are made and kept there, so that a
                run that was killed goes on where it was (docs/journal.md); default: None.
            num_api_spec_tokens (int): as of `function`, for this run; 0 for none.
            speculate (str): as of `function`, for this run.
            salt (str): a namespace of the prefix cache for these requests alone; default: "", which all share.
            priority (int): of the requests; higher runs earlier; default: 0.
            record (bool): False keeps no record of the run, which `state.show()` needs; default: True.
            sampling (dict): for any of all these whose name the program uses itself.

        Raises:
            ParameterError: arguments that do not fit, before anything runs.
            JournalError: the journal is damaged, in use, or of another program, version, model or arguments.
            BudgetError: the body read what the budget has no room for; its `state` has what there was room for.
            Exception: whatever the body raises.
        """
        recorder = recording()
        if recorder is not None:
            return recorder.run(self._body, *self._recorded(arguments, keywords))
        call, options = self._prepare(arguments, keywords)
        with journaled(self._body, options):
            run, state = opened(self._body, options, allowance_of(options.budget), call)
            try:
                self._body.run(run, state, call)
            except BudgetError as error:
                error.state = state
                raise
        return state

    async def run_async(self, *arguments: Any, **keywords: Any) -> AsyncState:
        """Runs the program as `run` does, awaited. An async body runs on the caller's event loop, a sync body on a
        worker thread. Cancelling the awaiting task cancels the run.

        Args:
            arguments: as of `run`.
            keywords: as of `run`, its options included.
        """
        recorder = recording()
        if recorder is not None:
            return await recorder.run_async(self._body, *self._recorded(arguments, keywords))
        call, options = self._prepare(arguments, keywords)
        async with journaled_async(self._body, options):
            run, state = opened(self._body, options, allowance_of(options.budget), call)
            shown = AsyncState(state._sink)
            try:
                await self._body.run_async(run, shown, call)
            except BudgetError as error:
                error.state = shown
                raise
        return shown

    @overload
    def run_batch(
        self,
        batch_arguments: _batch.Source,
        *,
        generator_style: Literal[False] = False,
        on_error: Literal["raise"] | None = None,
        output: None = None,
        if_exists: _batch.IfExists = "error",
        view: str | os.PathLike[str] | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool | Callable[[BatchProgress], object] = False,
        progress_bar: bool = False,
        **options: Any,
    ) -> _batch.Results[State]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: _batch.Source,
        *,
        generator_style: Literal[False] = False,
        on_error: Literal["return"],
        output: None = None,
        if_exists: _batch.IfExists = "error",
        view: str | os.PathLike[str] | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool | Callable[[BatchProgress], object] = False,
        progress_bar: bool = False,
        **options: Any,
    ) -> _batch.Results[State | _batch.Failure]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: _batch.Source,
        *,
        generator_style: Literal[False] = False,
        on_error: _batch.OnError | None = None,
        output: str | os.PathLike[str],
        if_exists: _batch.IfExists = "error",
        view: str | os.PathLike[str] | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool | Callable[[BatchProgress], object] = False,
        progress_bar: bool = False,
        **options: Any,
    ) -> BatchOutput: ...

    @overload
    def run_batch(
        self,
        batch_arguments: _batch.Source,
        *,
        generator_style: Literal[True],
        on_error: Literal["raise"] | None = None,
        output: None = None,
        if_exists: _batch.IfExists = "error",
        view: str | os.PathLike[str] | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool | Callable[[BatchProgress], object] = False,
        progress_bar: bool = False,
        **options: Any,
    ) -> Iterator[State]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: _batch.Source,
        *,
        generator_style: Literal[True],
        on_error: _batch.OnError | None = None,
        output: str | os.PathLike[str] | None = None,
        if_exists: _batch.IfExists = "error",
        view: str | os.PathLike[str] | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool | Callable[[BatchProgress], object] = False,
        progress_bar: bool = False,
        **options: Any,
    ) -> Iterator[State | _batch.Failure]: ...

    def run_batch(
        self,
        batch_arguments: _batch.Source,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool | Callable[[BatchProgress], object] = False,
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: _batch.OnError | None = None,
        output: str | os.PathLike[str] | None = None,
        if_exists: _batch.IfExists = "error",
        view: str | os.PathLike[str] | None = None,
        **options: Any,  # as of run(): backend, timeout of each program, budget of all together, sampling defaults
    ) -> Any:  # as the overloads say
        """Runs the program for every dict of keywords, tuple of positions or row; results are in their order.

        Args:
            batch_arguments: a list or any iterable, read as it is needed; a DataFrame or an Arrow table; or the path of
                a .jsonl, .csv or .parquet file. Columns are matched to parameters by name, others are carried along.
            num_threads: most programs at once. "auto" runs bodies on at most 32 threads, and async bodies on none.
            progress: True shows a bar with the numbers of the batch; a function gets them as a `BatchProgress`, on the
                thread that waits for results.
            progress_bar: SGLang's name of `progress=True`.
            generator_style: give results one by one, in bounded memory; closing the iterator cancels what runs.
            on_error: "return" puts a `Failure` in the place of a program that failed. "raise" starts no more
                programs after one failed, lets the running ones finish and raises the first error by position; the
                states of those that succeeded are kept in its `batch_results`, a dict by position. In generator
                form the error is raised in its place, after the results before it. None is "return" where there is
                an output, which has a file for failures, and "raise" where there is none.
            output: path of a .jsonl or .parquet file, into which results are written as they come; a `BatchOutput` is
                returned instead of the states, and memory is bounded.
            if_exists: "resume" keeps the results of an output that is there, and runs the programs that it lacks;
                "overwrite" begins anew; "error" refuses.
            view: path of a file for `umbel view --live FILE`, which shows the batch while it runs, and its programs'
                streams as `state.show()` does.
            options: as of `run`, the same for every program. A `budget` is for all of them together, its seconds from
                the first result that is asked for; programs that it has no room for fail with BudgetError.

        Returns:
            A list of the states, of which `to_pandas()` and the like make frames; an iterator of them with
                `generator_style`; a `BatchOutput` with `output`.

        Raises:
            ParameterError: arguments that do not fit, before anything runs; an output that exists.
            JournalError: as of `run`.
            Exception: whatever the iterable raises, when the programs before it have ended.
        """
        recorder = recording()
        if recorder is not None:
            taken = {
                "num_threads": (num_threads, "auto"),
                "on_error": (on_error or "raise", "raise"),
                "output": (output, None),
            }
            return self._recorded_batch(
                recorder, cast(Iterable[_batch.Item], batch_arguments), generator_style, taken, options
            )
        return _batch.run_batch(
            self._body,
            self._arguments,
            batch_arguments,
            run_options(options, f"{self.name}.run_batch()", _batch.PARAMETERS),
            num_threads=num_threads,
            progress=progress,
            progress_bar=progress_bar,
            generator_style=generator_style,
            on_error=on_error,
            output=output,
            if_exists=if_exists,
            view=view,
        )

    def estimate(self, *arguments: Any, **keywords: Any) -> Estimate:
        """Estimates the most that `run` with these arguments may cost, without calling a model.

            if summarise.estimate(text, backend=model).dollars < 0.05:
                summarise.run(text, backend=model)

        The body runs once, so what else it does is done: it reads files, it calls functions. No prompt is
        sent; the backend is started, which loads a local model and asks a hosted one for its list of models. Every
        answer is made up: `max_tokens` long, the first of choices, a shortest text for a constraint. A body that asks
        other things of other answers, or goes on until an answer says enough, costs what it then asks; so do answers
        that break a constraint and are asked for again. What speculation saves and wastes is not in it. Programs that
        the body itself runs count where they are given no backend of their own.

        It blocks: from a coroutine, `await asyncio.to_thread(program.estimate, ...)`.

        Args:
            arguments: as of `run`.
            keywords: as of `run`, but no `stream`, `verbose` and `journal`.

        Raises:
            ParameterError: arguments that do not fit.
            BudgetError: the most does not fit the `budget` that was given.
            Exception: whatever the body raises, with a note that the answers were made up.
        """
        recorder = recording()
        if recorder is not None:
            raise recorder.refuse("estimate() asks what a run costs, and a graph is none", "it outside of the program")
        call, options = self._prepare(arguments, keywords)
        if options.stream or options.verbose:
            raise ParameterError("estimate() takes no stream and no verbose: the answers are made up")
        if "journal" in self._arguments.divide(keywords)[1]:
            raise ParameterError("estimate() takes no journal: the answers are made up")
        stand_in = StandIn(options.backend)
        try:
            with default_backend(stand_in):
                run, state = self._body.open(replace(options, backend=stand_in), allowance_of(options.budget))
                self._body.run(run, state, call)
            run.wait_finished()
            error = state._sink.error()
            if error is not None:
                raise error
        except Exception as error:
            error.add_note("estimate(): no model was asked; the answers that the body read were made up")
            raise
        return stand_in.estimate()

    # -------------------------------------------------------------------------------- inside a program that is traced

    def _recorded(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[inspect.BoundArguments, dict[str, Any]]:
        """Splits and binds arguments as `_prepare` does, but chooses no backend: nothing runs."""
        own, options = self._arguments.divide(keywords)
        return self._arguments.bind(arguments, own), options

    def _recorded_batch(
        self,
        recorder: Recording,
        items: Iterable[_batch.Item],
        generator_style: bool,
        taken: Mapping[str, tuple[object, object]],
        options: Mapping[str, Any],
    ) -> list[State] | Iterator[State]:
        for name, (given, usual) in taken.items():
            if given != usual:
                raise recorder.refuse(f"{self.name}.run_batch({name}={given!r}) in a graph", f"{name}={usual!r}")
        calls = _batch.calls_of(self._arguments, items)
        bound = [call for _, _, call in calls if not isinstance(call, ParameterError)]
        states = [recorder.run(self._body, call, options) for call in bound]
        return iter(states) if generator_style else states

    def _prepare(
        self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[inspect.BoundArguments, RunOptions]:
        own, options = self._arguments.split(keywords)
        return self._arguments.bind(arguments, own), options


P = TypeVar("P", bound=Program)


def maker(
    kind: type[P],
    *,
    name: str | None = None,
    num_api_spec_tokens: int | None = None,
    speculate: Literal["auto"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Function], P]:
    """Checks the options of `@function` and returns the decorator, which makes programs of class `kind`.

    `compiler.program.function`, the public decorator, documents the options.

    Raises:
        ParameterError: an unknown option; the returned callable: a function without a parameter, or a generator.
    """
    given_name = None if name is None else checks.text("name", name, MAX_NAME_LENGTH)
    defaults = sampling_defaults(options or {})
    speculation = speculation_of(num_api_spec_tokens, speculate)

    def make(body: Function) -> P:
        if not callable(body) or isinstance(body, type):
            raise ParameterError(f"@function needs a function, got {shown(body)}")
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise ParameterError(
                f"@function: {shown(body)} is a generator, which calling does not run; return a list instead"
            )
        own = given_name or str(getattr(body, "__name__", "program"))
        return kind(Body(own, body, defaults, speculation=speculation))

    return make
