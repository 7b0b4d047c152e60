"""Steps of an engine in a thread, for an event loop that must stay awake while a model computes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..core.messages import FromEngine

if TYPE_CHECKING:  # the scheduler needs torch, which whoever reads this may not
    from ..scheduler.scheduler import Scheduler

MOST_STEPS = 4  # behind each other; then the loop looks at deadlines


class EngineThread:
    """One thread for all steps: the libraries below a model keep memory for each thread that calls them.

    Args:
        news: whether there are messages for the scheduler. Asked in the thread.
    """

    def __init__(self, scheduler: "Scheduler", news: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._news = news
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local engine")

    async def advance(self) -> list[FromEngine]:
        """Some steps. Whoever is cancelled waits for them all the same: they work with the engine's memory."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._some_steps)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Ends the thread, which holds what it has run last. Nobody waits for steps any more."""
        self._thread.shutdown()

    def _some_steps(self) -> list[FromEngine]:
        """Until there is something to tell, or to take. To go to the loop and back takes a millisecond, in which
        nothing is planned."""
        scheduler = self._scheduler
        for _ in range(MOST_STEPS):
            events = scheduler.step()
            resting = scheduler.idle and not scheduler.unchecked
            if events or self._news() or resting or scheduler.opening:
                return events
        return []
