"""Runs a plan once, on the loop that its streams live on: all steps are made at once, then the streams go.

    plan ──► bindings, steps ──► one queue per stream ──► the interpreter's executor
                                   ▲                          │
                                   └─ text waits for values ◄─┘

There is no body that speaks, and no thread. What stands for the body is what it would wait for: the program has ended
when everything that it looked at is known, or with the first error among that, in the program's order.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...interpreter.executor import StepQueue
from ...interpreter.run import Run
from ...interpreter.steps import Step
from ...interpreter.stream import Stream
from ...interpreter.variables import Binding
from ..operations import Options
from ..values import Values
from .plan import Plan

# Called once, on the loop, when the program has ended: with what it returned, or with its error.
Ended = Callable[[Any, BaseException | None], None]

_NONE: Options = {}


class Execution:
    """One run of a plan. Made in any thread, then used on the loop.

    Args:
        plan: of the program.
        arguments: all of them, by name.
        run: gives backend, deadline and ledger; its home is the loop.
        stream: the program's own, where readers hold it already; None makes one.
        options: sampling fields of the run.

    Attributes:
        stream: has the variables and the text.
        ahead: slot of a call → tokens that lie ahead of it, where that orders anything.

    Raises:
        ParameterError: an argument that is no text where the program needs text; fields that do not fit together.
        What the program's own functions of its arguments raise.
    """

    __slots__ = ("_ended", "_plan", "_read", "_run", "ahead", "bindings", "queues", "sampling", "stream", "values")

    def __init__(
        self,
        plan: Plan,
        arguments: Mapping[str, Any],
        run: Run,
        *,
        stream: Stream | None = None,
        options: Options = _NONE,
    ) -> None:
        run.log.note_arguments(arguments)
        self._plan = plan
        self._run = run
        self._read = 0  # how many of the plan's reads are over
        self._ended: Ended | None = None
        self.sampling = plan.sampling(options)
        self.stream = Stream(run, None, options) if stream is None else stream
        self.bindings = [Binding(name, result) for name, result in plan.slots.bindings]
        self.values = Values(plan.slots.values, plan.sources, self.bindings, arguments)
        self._assign_known()
        self.ahead = self._looked_ahead()
        self.queues = self._opened()
        self._load()

    # -------------------------------------------------------------------------------- on the loop

    def launch(self) -> None:
        """Starts the streams."""
        for queue, stream in zip(self.queues, self._plan.streams, strict=True):
            if stream.fork is None:
                queue.launch()

    def go(self, ended: Ended) -> None:
        """Starts the streams, and calls `ended` when the program has ended."""
        self.launch()
        self.follow(ended)

    def follow(self, ended: Ended) -> None:
        """Ends the run where the body of the program would, and calls `ended` there."""
        self._ended = ended
        if self._run.speculation is not None:
            self._run.speculation.waits.start()  # what the program says has been said
        self._advance()

    async def run(self) -> Any:
        """Runs all of it, to the end of every stream; returns what the program returned.

        Raises:
            What the body of the program would. A stream that failed and that the program did not look at is seen in
            `stream`.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        finished: asyncio.Future[None] = loop.create_future()
        self.launch()
        self.follow(partial(settle_future, outcome))
        try:
            await asyncio.wait((outcome,))
            self._run.when_finished(partial(settle_future, finished, None, None))
            await finished
        except asyncio.CancelledError:
            if not outcome.cancel():  # its error has no reader any more
                outcome.exception()
            self._run.cancel()
            raise
        return outcome.result()

    def result(self) -> Any:
        """Returns what the program returns, when all that it takes is known."""
        return self.values.value(self._plan.graph.result)

    # -------------------------------------------------------------------------------- how it begins

    def _assign_known(self) -> None:
        for read in self._plan.known:
            self.bindings[read.slot].resolve(self.values.value(read.value))

    def _load(self) -> None:
        """Loads the steps of every stream; of none if an argument does not fit."""
        plan = self._plan
        loaded = [[action.step(self) for action in stream.actions] for stream in plan.streams]
        for number, (queue, steps) in enumerate(zip(self.queues, loaded, strict=True)):
            if number != plan.root:
                queue.load(steps)
        self._load_own(loaded[plan.root])

    def _load_own(self, steps: list[Step]) -> None:
        """Loads the program's own stream, with the variables that it leaves."""
        plan = self._plan
        variables = [(name, self.bindings[slot]) for name, slot in plan.variables]
        self.stream.preload(steps, variables, plan.grammar)

    def _opened(self) -> list[StepQueue]:
        """Makes a queue for every stream."""
        run, plan = self._run, self._plan
        groups = [run.request_id() if fork.size > 1 else "" for fork in plan.forks]
        queues: list[StepQueue] = []
        for number, stream in enumerate(plan.streams):
            if number == plan.root:
                queues.append(self.stream.queue)
            elif stream.fork is None:
                queues.append(StepQueue(run))
            else:
                queues.append(StepQueue(run, fork_group=groups[stream.fork], waits=True))
        return queues

    def _looked_ahead(self) -> Mapping[int, int]:
        plan = self._plan
        if not plan.paths.matter:
            return {}
        for slot in plan.gens:
            self.bindings[slot].settled.add(partial(self._learn, slot))
        return plan.paths.ahead({slot: self.sampling[call].max_tokens for slot, call in plan.gens.items()})

    def _learn(self, slot: int) -> None:
        """Records the length of a generated text, for later runs."""
        facts = self.bindings[slot].meta
        first = facts[0] if isinstance(facts, list) else facts
        tokens = first.get("completion_tokens")
        if tokens is not None:
            self._plan.paths.note(slot, tokens)

    # -------------------------------------------------------------------------------- where it ends

    def _advance(self) -> None:
        """Advances over the body's reads while they are settled. The first unsettled one calls it again."""
        plan, bindings, values = self._plan, self.bindings, self.values
        try:
            while self._read < len(plan.reads):
                read = plan.reads[self._read]
                if not self._is_known(plan.sources[read.value]):
                    return
                value = values.value(read.value)
                if read.slot is not None:
                    bindings[read.slot].resolve(value)
                self._read += 1
            if not self._is_known(plan.sources[plan.graph.result]):
                return
            result = self.result()
        except Exception as error:  # the body would have ended with it
            self._end(None, error)
        else:
            self._end(result, None)

    def _is_known(self, slots: tuple[int, ...]) -> bool:
        """Returns whether all these are settled; if not, `_advance` is called when the first of them is. Raises the
        error of one that failed."""
        for slot in slots:
            binding = self.bindings[slot]
            if not binding.done:
                binding.settled.add(self._advance)
                return False
            binding.value()
        return True

    def _end(self, result: Any, error: BaseException | None) -> None:
        run, ended = self._run, self._ended
        assert ended is not None, "only `follow` advances"
        if error is not None:
            for read in self._plan.reads[self._read :]:
                if read.slot is not None:
                    self.bindings[read.slot].fail(error)
        if run.speculation is not None:
            run.speculation.waits.end()
        run.end(error)
        ended(result, error)


def settle_future(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
