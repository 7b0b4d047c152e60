"""Runs a program as its graph: like the program it was compiled from, with none of its Python.

compiled = ask.compile()                       state = compiled.run("Why?", backend=model)
compiled.save("ask.graph")                     umbel.load("ask.graph").run_batch([...])

`Host` starts its runs: from sync code, from a coroutine, in the background, in a batch. However a run is started, one
message goes to the streams' loop, and at most one comes back: when the program has ended. No thread waits in between,
and none is used.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments, Parameter, Signature
from typing import Any, Literal, overload

from ...interpreter import batch as _batch
from ...interpreter import body, loop
from ...interpreter.body import Arguments, RunOptions, run_options
from ...interpreter.budget import Allowance, allowance_of
from ...interpreter.data.output import BatchOutput
from ...interpreter.data.progress import BatchProgress
from ...interpreter.run import Run, SpeculationSetting, ending, recording, speculation_of_run
from ...interpreter.speculation.planner import Planner
from ...interpreter.stream import Stream
from ...lang import checks, notebook, ops
from ...lang.errors import BudgetError, CapabilityError, ParameterError, ProgramError, shown
from ...lang.state import AsyncState, BaseState, State
from ..files import serialise
from ..graph import Graph
from ..passes import Report
from ..shared_prefix import BatchPlan
from .execution import Execution, settle_future
from .plan import Plan
from .shipping import OutgoingProgram, Server, execution


class CompiledProgram:
    """Runs a graph. Made by `program.compile()` and by `umbel.load()`; immutable.

    Args:
        graph: whole, as `verify` says.
        report: what the passes did to the graph.
        speculation: of the program it was compiled from. A file has none: its runs can ask for it.
        server: whether its runs are shipped to the runtime, see `Program.compile`.

    Attributes:
        graph (Graph): the graph that runs.
        report (Report): what the passes did to it; `print(compiled.report)` shows it.

    Raises:
        ParameterError: a `server` that is none of True, False and "auto".

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += "The capital of " + country + " is" + ul.gen("city", max_tokens=4)
        >>> compiled = capital.compile()
        >>> compiled
        <compiled program capital(country): 10 nodes in one stream>
        >>> compiled.run("France", backend=ul.Echo([" Paris"]))["city"]
        ' Paris'
        >>> compiled.save("capital.umbel.json")  # text and options, no code
    """

    def __init__(
        self,
        graph: Graph,
        *,
        report: Report | None = None,
        speculation: SpeculationSetting | None = None,
        server: Server = "auto",
    ) -> None:
        if not isinstance(server, bool) and not (isinstance(server, str) and checks.plain(server) == "auto"):
            raise ParameterError(f"server={shown(server)}; write True, False or 'auto'")
        self.graph = graph
        self.report = report if report is not None else Report(())
        defaults = {each.name: each.default for each in graph.parameters if not each.required}
        self._host = Host(OutgoingProgram(Plan(graph)), server, defaults, speculation)
        self._arguments = Arguments(graph.name, _signature(graph), fixed=graph.fixed)

    @property
    def name(self) -> str:
        """Name of the program that it was compiled from."""
        return self.graph.name

    def __repr__(self) -> str:
        streams = len(self.graph.streams)
        counted = "one stream" if streams == 1 else f"{streams} streams"
        return f"<compiled program {self._arguments}: {len(self.graph.nodes)} nodes in {counted}>"

    def _repr_html_(self) -> str:
        """Describes the program for a notebook: its parameters, and its graph."""
        return notebook.folded(f"compiled program {self._arguments}", self.graph._repr_html_(), is_open=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph to a file, which `umbel.load` reads. It holds text and options, and no code.

        Args:
            path: of the file, such as "capital.umbel.json".

        Raises:
            GraphError: the program holds a value that no file can.
            OSError: the file cannot be written.
        """
        serialise.save(self.graph, path)

    # -------------------------------------------------------------------------------- running

    def __call__(self, *arguments: Any, **keywords: Any) -> State:
        """Runs the program: the same as `run`."""
        return self.run(*arguments, **keywords)

    def run(self, *arguments: Any, **keywords: Any) -> State:
        """Runs the program: as `Program.run`, with the same options and the same state.

        Returns when all is known that the program looked at: what it put into text, assigned or returned. What else it
        appended may still be running; reading waits for it. All variables can be asked for from the beginning. What is
        appended to the state afterwards has the sampling defaults of the run, not those of the program.

        Args:
            arguments: as of `Program.run`.
            keywords: as of `Program.run`, its options included.

        Raises:
            ParameterError: arguments that do not fit, or that are no text where the program needs text.
            BudgetError: the program looked at what the budget has no room for; its `state` has what there was room for.
            Exception: whatever else ended what it looked at.
        """
        call, options = self._prepare(arguments, keywords)
        with body.journaled(self._host, options):
            run, state = body.opened(self._host, options, allowance_of(options.budget), call)
            try:
                self._host.run(run, state, call)
            except BudgetError as error:
                error.state = state
                raise
            finally:
                body.await_printer(run)
        return state

    async def run_async(self, *arguments: Any, **keywords: Any) -> AsyncState:
        """Runs the program as `run` does, awaited. Cancelling the awaiting task cancels the run.

        Args:
            arguments: as of `run`.
            keywords: as of `run`, its options included.
        """
        call, options = self._prepare(arguments, keywords)
        async with body.journaled_async(self._host, options):
            run, state = body.opened(self._host, options, allowance_of(options.budget), call)
            shown = AsyncState(state._sink)
            try:
                await self._host.run_async(run, shown, call)
            except BudgetError as error:
                error.state = shown
                raise
            if run.printer is not None:
                await asyncio.to_thread(body.await_printer, run)
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
        pin_head: bool = True,
        plan_memory: bool = False,
        **options: Any,  # as of run()
    ) -> Any:  # as the overloads say
        """Runs a batch, and returns the same, as `Program.run_batch` does.

        `batch_arguments`, `progress`, `progress_bar`, `generator_style`, `on_error`, `output`, `if_exists`, `view` and
        the options are those of `Program.run_batch`.

        Args:
            num_threads: most programs at once; no threads are used.
            pin_head: what the prompts of all programs begin with is computed once and kept while the batch runs,
                where the backend keeps what it is asked to keep.
            plan_memory: start no program whose keys may not fit the runtime's pool next to those in flight, so that
                nothing is sent back and computed again. It counts with what texts and answers have at most.

        Raises:
            CapabilityError: memory is to be planned on a backend that has no pool.
        """
        checked = run_options(options, f"{self.name}.run_batch()", _batch.PARAMETERS)
        return _batch.run_batch(
            self._host,
            self._arguments,
            batch_arguments,
            checked,
            num_threads=num_threads,
            progress=progress,
            progress_bar=progress_bar,
            generator_style=generator_style,
            on_error=on_error,
            output=output,
            if_exists=if_exists,
            view=view,
            companion=BatchPlan(self.graph, checked, self._host.defaults, pin_head=pin_head, plan_memory=plan_memory),
        )

    def _prepare(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[BoundArguments, RunOptions]:
        outer = recording()
        if outer is not None:
            raise outer.refuse(
                f"the compiled {self.name} is run by a program that is being traced",
                f"{self.name}.run(...) of the program that it was compiled from, which becomes part of the graph",
            )
        if arguments and isinstance(arguments[0], BaseState):
            raise ParameterError(
                f"a compiled program runs on its own; write {self.name}(s, ...) inside a program, with the program "
                "that it was compiled from"
            )
        own, options = self._arguments.split(keywords)
        return self._arguments.bind(arguments, own), options


def load(path: str | os.PathLike[str], *, server: Server = "auto") -> CompiledProgram:
    """Loads the program of a file that `save` wrote. Nothing of the file is run as code.

    Args:
        path: of the file.
        server: as of `Program.compile`: True ships runs to the runtime, False never does, "auto" where it saves ways.

    Returns:
        The program, ready to run.

    Raises:
        ParameterError: a `server` that is none of True, False and "auto", or what is no path.
        GraphError: it is no file of a graph, or of one that is not whole.
        OSError: there is no such file, or it cannot be read.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += "The capital of " + country + " is" + ul.gen("city", max_tokens=4)
        >>> capital.compile().save("capital.umbel.json")
        >>> ul.load("capital.umbel.json").run(country="France", backend=ul.Echo([" Paris"])).text()
        'The capital of France is Paris'
    """
    return CompiledProgram(serialise.read(path), server=server)


def _signature(graph: Graph) -> Signature:
    """Returns the signature of the program, without its state. A required parameter after one that is not can only be
    given by its name."""
    parameters: list[Parameter] = []
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD  # of a private type
    for each in graph.parameters:
        if each.required and any(before.default is not Parameter.empty for before in parameters):
            kind = Parameter.KEYWORD_ONLY
        parameters.append(Parameter(each.name, kind, default=Parameter.empty if each.required else each.default))
    return Signature(parameters)


@dataclass(frozen=True)
class Host:
    """Starts runs of one plan. A `batch.Host`.

    `program`: the plan as it is shipped. `server`: whether it is. `defaults`: arguments that may be left out.
    `speculation`: when a run asks for none; `planner`: what all runs have learned about it.
    """

    program: OutgoingProgram
    server: Server
    defaults: Mapping[str, Any]
    speculation: SpeculationSetting | None = None
    planner: Planner = field(default_factory=Planner, compare=False)

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def name(self) -> str:
        return self.plan.graph.name

    def parts(self) -> Mapping[str, str]:
        """Returns the digest of the graph, for a journal.

        Raises:
            GraphError: the program holds a value that no file can, so that another graph cannot be told from it.
        """
        return {"graph": serialise.digest(self.plan.graph)}

    def open(self, options: RunOptions, allowance: Allowance | None) -> tuple[Run, State]:
        run = Run(
            options.backend,
            timeout=options.timeout,
            allowance=allowance,
            streaming=options.stream,
            salt=options.salt,
            priority=options.priority,
            adapter=options.sampling.get("adapter", ""),
            speculation=speculation_of_run(options.speculation or self.speculation, self.planner),
            record=options.record,
            program=self.name,
        )
        stream = Stream(run, None, options.sampling)
        if options.verbose:
            run.printer = body.follow(stream, self.name)
        return run, State(stream)

    # -------------------------------------------------------------------------------- started from sync code

    def run(self, run: Run, state: State, call: BoundArguments) -> None:
        """Runs it here and now; a streaming run goes on in the background."""
        if loop.streams.current:
            raise ProgramError(f"inside a coroutine of the streams' loop write: await {self.name}.run_async(...)")
        begun = self._begun(run, state, call, server=self.server)
        if not self.plan.waits:
            self._end_at_once(begun, run, state)
        elif run.streaming:
            run.home.call(begun.go, partial(_keep, state))
        else:
            outcome = _Outcome()
            run.home.call(begun.go, outcome.settle)
            try:
                state.ret_value = outcome.wait()
            except BaseException as error:
                run.end(ending(error))  # of the program itself, or what interrupted the wait
                raise

    async def run_async(self, run: Run, state: AsyncState, call: BoundArguments) -> None:
        """Runs it for the caller's loop. Cancelling the awaiting task cancels the run."""
        begun = self._begun(run, state, call, server=self.server)
        if not self.plan.waits:
            self._end_at_once(begun, run, state)
            return
        if run.streaming:
            run.home.call(begun.go, partial(_keep, state))
            return
        here = asyncio.get_running_loop()
        future: asyncio.Future[Any] = here.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the waiter's loop is closed
                here.call_soon_threadsafe(settle_future, future, result, error)

        run.home.call(begun.go, settle)
        try:
            state.ret_value = await future
        except asyncio.CancelledError:
            run.cancel()
            raise

    # -------------------------------------------------------------------------------- in a batch

    def start(
        self,
        run: Run,
        state: State,
        call: BoundArguments,
        pool: ThreadPoolExecutor,
        *,
        body_ended: Callable[[BaseException | None], None],
        finished: Callable[[], None],
    ) -> None:
        """Starts one run of a batch. `pool` is for bodies, and there is none: `body_ended` is called at once, with the
        error of a run that cannot begin. An error that ends the program is the reason of its run."""
        error: BaseException | None = None
        try:
            # One budget for many: a program that is shipped would have to hold all of it.
            begun = self._begun(run, state, call, server=False if run.ledger.limited else self.server)
            if self.plan.waits:
                run.home.call(begun.go, partial(_keep, state))
            else:
                self._end_at_once(begun, run, state)
        except Exception as raised:
            error = raised
        body_ended(error)
        run.when_finished(finished)

    # -------------------------------------------------------------------------------- how

    def _begun(self, run: Run, state: BaseState, call: BoundArguments, *, server: Server) -> Execution:
        """`server`: a run with a journal is not shipped, since the runtime would make calls that it does not get."""
        stream = state._sink
        assert isinstance(stream, Stream), "`open` made it"
        arguments = {**self.defaults, **call.arguments}
        for name, value in arguments.items():
            ops.refuse_operations(value, f"{self.name}({name}=...): an argument of a compiled program")
        try:
            if run.stored is not None:
                if server is True:
                    raise CapabilityError(
                        f"{self.name} runs in the runtime (server=True), which keeps no journal; compile it with "
                        "server='auto', or leave journal= out"
                    )
                server = False
            return execution(self.program, arguments, run, stream=stream, options=stream.run_options, server=server)
        except BaseException as error:
            run.end(error)
            raise

    def _end_at_once(self, begun: Execution, run: Run, state: BaseState) -> None:
        """Ends a program that waits for nothing, before its first call: what it said runs on."""
        try:
            state.ret_value = begun.result()
        except BaseException as error:
            run.end(error)
            raise
        else:
            run.end()
        finally:
            run.home.call(begun.launch)


class _Outcome:
    """The end of a program that a thread waits for. A thread that is woken once needs no more than a lock."""

    __slots__ = ("_error", "_gate", "_result")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    def settle(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._gate.release()

    def wait(self) -> Any:
        while not self._gate.acquire(timeout=loop.hearing()):
            pass
        if self._error is not None:
            raise self._error
        return self._result


def _keep(state: BaseState, result: Any, error: BaseException | None) -> None:
    """Keeps the result of a program that no caller waits for; its run has the error, which reading the state raises."""
    if error is None:
        state.ret_value = result
