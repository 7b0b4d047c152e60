"""Starts runs of a compiled program: from sync code, from a coroutine, in the background, in a batch.

However it is started, one message goes to the streams' loop, and at most one comes back: when the program has ended.
No thread waits in between, and none is used.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from inspect import BoundArguments
from typing import Any

from ...interpreter import body, loop
from ...interpreter.body import RunOptions
from ...interpreter.budgets.budget import Allowance
from ...interpreter.run import Run, SpeculationSetting, ending, speculation_of_run
from ...interpreter.speculation.planner import Planner
from ...interpreter.stream import Stream
from ...lang import inline
from ...lang.errors import ProgramError
from ...lang.state import AsyncState, BaseState, State
from .execution import Execution
from .plan import Plan
from .shipping import OutgoingProgram, Server, execution


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

    def open(self, options: RunOptions, allowance: Allowance | None) -> tuple[Run, State]:
        run = Run(
            options.backend,
            timeout=options.timeout,
            allowance=allowance,
            streaming=options.stream,
            salt=options.salt,
            priority=options.priority,
            speculation=speculation_of_run(options.speculation or self.speculation, self.planner),
        )
        stream = Stream(run, None, options.sampling)
        if options.verbose:
            body.follow(stream, self.name)
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
                here.call_soon_threadsafe(_set, future, result, error)

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
        stream = state._sink
        assert isinstance(stream, Stream), "`open` made it"
        arguments = {**self.defaults, **call.arguments}
        for name, value in arguments.items():
            inline.refuse(value, f"{self.name}({name}=...): an argument of a compiled program")
        try:
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
        self._gate.acquire()
        if self._error is not None:
            raise self._error
        return self._result


def _keep(state: BaseState, result: Any, error: BaseException | None) -> None:
    """Keeps the result of a program that no caller waits for; its run has the error, which reading the state raises."""
    if error is None:
        state.ret_value = result


def _set(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():  # its waiter was cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
