"""Runs the steps of an engine in a thread, so that the event loop stays responsive while a model computes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..core.messages import FromEngine

if TYPE_CHECKING:  # the scheduler needs torch, which importers of this module may not
    from ..scheduler.scheduler import Scheduler

MOST_STEPS = 4  # in a row; then the loop checks deadlines


class EngineThread:
    """Runs all steps in one thread: the libraries below a model keep memory for each thread that calls them.

    Args:
        news: returns whether there are messages for the scheduler. Called in the thread.
    """

    def __init__(self, scheduler: "Scheduler", news: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._news = news
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local engine")

    async def advance(self) -> list[FromEngine]:
        """Runs some steps. A cancelled caller still waits for them: they use the engine's memory."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._some_steps)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Ends the thread, which holds the objects of its last step. No caller may wait for steps."""
        self._thread.shutdown()

    def _some_steps(self) -> list[FromEngine]:
        """Runs up to MOST_STEPS steps, until there are events or messages.

        A return to the loop and back costs a millisecond without any step."""
        scheduler = self._scheduler
        for _ in range(MOST_STEPS):
            events = scheduler.step()
            resting = scheduler.idle and not scheduler.unchecked
            if events or self._news() or resting or scheduler.opening:
                return events
        return []
