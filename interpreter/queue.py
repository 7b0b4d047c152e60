"""The queue of a stream, and the one task that empties it on the streams' loop.

    pushed by the program's thread → [step step step] → one task while there are steps → Executor → bindings

A queue fails as a whole: the first error is recorded, then every pending and later binding carries it,
and later steps do nothing else. The queue of a branch waits until its parent comes to the place of the fork.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from ..lang.errors import CancelledError
from .executor import Executor
from .position import Position, Reached
from .run import Run
from .steps import Step
from .variables import Feed
from .waiting import Signal


class StepQueue:
    """Steps of one stream, in order.

    Args:
        run: the run the stream belongs to.
        fork_group: id shared by the siblings of one fork.
        waits: True for a branch, which its parent starts.
    """

    __slots__ = (
        "_executor",
        "_run",
        "_steps",
        "_traceback",
        "active",
        "error",
        "failed",
        "fork_group",
        "lock",
        "pushed",
        "spoken",
        "streaming",
    )

    def __init__(self, run: Run, *, fork_group: str = "", waits: bool = False) -> None:
        self.lock = threading.Lock()  # held around `push`, so that what is pushed and what is bound agree
        self.active = waits  # a task runs or is about to, or the parent will begin one
        self.error: BaseException | None = None
        self.failed = Signal()
        self.pushed = Signal()
        self.fork_group = fork_group
        self.spoken = Feed()  # all text the stream appends
        self.streaming = False  # a reader takes pieces: requests from now on ask for chunks
        self._run = run
        self._steps: deque[Step] = deque()
        self._traceback: TracebackType | None = None
        self._executor: Executor | None = None if waits else Executor(self, run, Position())

    # -------------------------------------------------------------------------------- any thread

    def push(self, step: Step) -> None:
        """Queues a step and returns at once. Called with the lock held."""
        self._steps.append(step)
        self.pushed.fire()
        if not self.active:
            self.active = True
            self._run.begin_work()
            self._run.home.call(self.launch)

    def load(self, steps: Iterable[Step]) -> None:
        """Queues all steps known ahead, before another thread has the queue. `launch` or the parent starts them."""
        self._steps.extend(steps)
        if not self.active:
            self.active = True
            self._run.begin_work()

    def upcoming(self) -> tuple[Step, ...]:
        """Returns the steps queued after the running one."""
        with self.lock:
            return tuple(self._steps)

    def standing(self) -> Reached | None:
        """Returns the position of an idle stream; None while it works or if it has failed. Called with the lock held.
        No other task uses the executor then: its last task is over, and the next one needs the lock to begin."""
        if self.active or self.error is not None or self._run.reason is not None or self._executor is None:
            return None
        return self._executor.reached()

    def raise_error(self) -> None:
        """Raises the error of the queue or of its run, if there is one, with its original traceback."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)
        if self._run.reason is not None:
            raise self._run.reason

    # -------------------------------------------------------------------------------- the streams' loop

    def start(self, position: Position, *, ready: bool) -> None:
        """Starts a branch: its parent has reached the fork."""
        self._executor = Executor(self, self._run, position, ready=ready)
        self._released()

    def start_failed(self, error: BaseException) -> None:
        """Fails a branch: its parent failed before it reached the fork."""
        self._fail(error)
        self._released()

    def _released(self) -> None:
        with self.lock:
            self.active = bool(self._steps)
            if self.active:
                self._run.begin_work()
        if self.active:
            self.launch()
        else:
            self.spoken.changed.fire()

    def launch(self) -> None:
        """Starts the task. The queue is active, and its run counts it."""
        task = asyncio.get_running_loop().create_task(self._drain())
        self._run.track(task)
        task.add_done_callback(self._drained)

    async def _drain(self) -> None:
        while (step := self._next()) is not None:
            error = self.error or self._run.reason
            if error is None:
                assert self._executor is not None, "a branch that has failed to begin has an error"
                try:
                    work = self._executor.execute(step)
                    if work is not None:
                        await work
                    continue
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    while task is not None and task.cancelling():
                        task.uncancel()
                    error = self._run.reason or CancelledError("the interpreter is shutting down")
                except BaseException as raised:  # whatever it is, the program's reads have to raise it
                    error = raised
            self._fail(error)
            step.fail(error)
        self._empty()

    def _drained(self, task: "asyncio.Task[None]") -> None:
        """Ends a task. One cancelled before it began has failed none of its steps yet, so they fail here."""
        self._run.untrack(task)
        if task.cancelled():
            error = self.error or self._run.reason or CancelledError("the interpreter is shutting down")
            self._fail(error)
            while (step := self._next()) is not None:
                step.fail(error)
            self._empty()

    def _next(self) -> Step | None:
        """Takes the next step. None ends the task; a later push starts a new one."""
        with self.lock:
            self.active = bool(self._steps)
            return self._steps.popleft() if self.active else None

    def _empty(self) -> None:
        self._run.end_work()
        self.spoken.changed.fire()

    def _fail(self, error: BaseException) -> None:
        """Records the error, then wakes readers. The traceback goes first: a reader that sees the error takes both."""
        if self.error is None:
            self._traceback = error.__traceback__
            self.error = error
        self.failed.fire()
        self.spoken.changed.fire()
