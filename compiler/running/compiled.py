"""Runs a program as its graph: like the program it was compiled from, with none of its Python.

compiled = ask.compile()                       state = compiled.run("Why?", backend=model)
compiled.save("ask.graph")                     umbel.load("ask.graph").run_batch([...])
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from inspect import BoundArguments, Parameter, Signature
from typing import Any, Literal, overload

from ...interpreter import batch as _batch
from ...interpreter.body import Arguments, RunOptions, run_options
from ...interpreter.budgets.budget import allowance_of
from ...interpreter.run import SpeculationSetting, recording
from ...lang import checks
from ...lang.errors import BudgetError, ParameterError, shown
from ...lang.state import AsyncState, State
from ..files import serialise
from ..graph import Graph
from ..passes import Report
from ..shared_prefix import BatchPlan
from .host import Host
from .plan import Plan
from .shipping import OutgoingProgram, Server


class CompiledProgram:
    """A graph that runs. Made by `program.compile()` and by `umbel.load()`; immutable.

    Args:
        graph: whole, as `verify` says.
        report: what the passes did to the graph.
        speculation: of the program it was compiled from. A file has none: its runs can ask for it.
        server: whether its runs are shipped to the runtime, see `Program.compile`.

    Raises:
        ParameterError: a `server` that is none of True, False and "auto".
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
        self._arguments = Arguments(graph.name, _signature(graph))

    @property
    def name(self) -> str:
        return self.graph.name

    def __repr__(self) -> str:
        streams = len(self.graph.streams)
        counted = "one stream" if streams == 1 else f"{streams} streams"
        return f"<compiled program {self._arguments}: {len(self.graph.nodes)} nodes in {counted}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph to a file, which `umbel.load` reads. It holds text and options, and no code.

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

        Raises:
            ParameterError: arguments that do not fit, or that are no text where the program needs text.
            BudgetError: the program looked at what the budget has no room for; its `state` has what there was room for.
            Whatever else ended what it looked at.
        """
        call, options = self._prepare(arguments, keywords)
        run, state = self._host.open(options, allowance_of(options.budget))
        try:
            self._host.run(run, state, call)
        except BudgetError as error:
            error.state = state
            raise
        return state

    async def run_async(self, *arguments: Any, **keywords: Any) -> AsyncState:
        """`run` for the caller's event loop. Cancelling the awaiting task cancels the run."""
        call, options = self._prepare(arguments, keywords)
        run, state = self._host.open(options, allowance_of(options.budget))
        shown = AsyncState(state._sink)
        try:
            await self._host.run_async(run, shown, call)
        except BudgetError as error:
            error.state = shown
            raise
        return shown

    @overload
    def run_batch(
        self,
        batch_arguments: Iterable[_batch.Item],
        *,
        generator_style: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> list[State]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: Iterable[_batch.Item],
        *,
        generator_style: Literal[False] = False,
        on_error: Literal["return"],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> list[State | _batch.Failure]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: Iterable[_batch.Item],
        *,
        generator_style: Literal[True],
        on_error: Literal["raise"] = "raise",
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> Iterator[State]: ...

    @overload
    def run_batch(
        self,
        batch_arguments: Iterable[_batch.Item],
        *,
        generator_style: Literal[True],
        on_error: Literal["return"],
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> Iterator[State | _batch.Failure]: ...

    def run_batch(
        self,
        batch_arguments: Iterable[_batch.Item],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        on_error: _batch.OnError = "raise",
        pin_head: bool = True,
        plan_memory: bool = False,
        **options: Any,  # as of run()
    ) -> Any:  # as the overloads say
        """Runs a batch as `Program.run_batch` does. `num_threads` bounds concurrent programs; no threads are used.

        Args:
            pin_head: what the prompts of all programs begin with is computed once and kept while the batch runs,
                where the backend keeps what it is asked to keep.
            plan_memory: start no program whose keys may not fit the runtime's pool next to those in flight, so that
                nothing is sent back and computed again. It counts with what texts and answers have at most.

        Raises:
            CapabilityError: memory is to be planned on a backend that has no pool.
        """
        checked = run_options(options)
        if checked.stream or checked.verbose:
            raise ParameterError("run_batch() takes no stream and no verbose; generator_style=True gives early results")
        job = _batch.Job(
            self._host,
            self._arguments,
            batch_arguments,
            num_threads=num_threads,
            on_error=on_error,
            options=checked,
            companion=BatchPlan(self.graph, checked, self._host.defaults, pin_head=pin_head, plan_memory=plan_memory),
        )
        if generator_style:
            return job.generate(progress_bar=progress_bar)
        return job.collect(progress_bar=progress_bar)

    def _prepare(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[BoundArguments, RunOptions]:
        outer = recording()
        if outer is not None:
            raise outer.refuse(
                f"the compiled {self.name} is run by a program that is being traced",
                f"{self.name}.run(...) of the program that it was compiled from, which becomes part of the graph",
            )
        own, options = self._arguments.split(keywords)
        return self._arguments.bind(arguments, own), options


def load(path: str | os.PathLike[str], *, server: Server = "auto") -> CompiledProgram:
    """Loads the program of a file that `save` wrote. Nothing of the file is run as code.

    `server`: as of `Program.compile`.

    Raises:
        ParameterError: a `server` that is none of True, False and "auto", or what is no path.
        GraphError: it is no file of a graph, or of one that is not whole.
        OSError: there is no such file, or it cannot be read.
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
