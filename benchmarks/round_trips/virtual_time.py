"""Time that only passes where everybody waits for it: an event loop for exact latencies, without a single real second.

with VirtualTime() as time:
    seconds = time.run(work())        programs, gateway and engine on one loop, whose clock jumps to the next timer
"""

import asyncio
import selectors
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from umbel.interpreter import loop

PATIENCE = 30.0  # real seconds that something outside of the loop, a thread perhaps, may take


class _Jumping(selectors.BaseSelector):
    """Looks, and instead of waiting moves the clock."""

    def __init__(self) -> None:
        self._inner = selectors.DefaultSelector()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._inner.select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is not None:
            self.now += timeout
            return []
        found = self._inner.select(PATIENCE)
        if not found:
            raise TimeoutError("everything waits, and nothing is to come")
        return found

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._inner.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, selector: _Jumping) -> None:
        self._jumping = selector
        super().__init__(selector)
        self._clock_resolution = 1e-9  # seconds: timers are due when they are, not some time before

    def time(self) -> float:
        return self._jumping.now


class VirtualTime:
    """A loop of its own with such a clock, which a runtime takes as its own: `LocalBackend(clock=time)`."""

    def __init__(self) -> None:
        self._loop = _Loop(_Jumping())

    def now(self) -> float:
        return self._loop.time()

    def run(self, work: Coroutine[Any, Any, Any]) -> float:
        """Virtual seconds that `work` took, to the microsecond. Streams of programs live on this loop meanwhile."""
        began = self._loop.time()
        with self._home():
            self._loop.run_until_complete(work)
        return round(self._loop.time() - began, 6)

    @contextmanager
    def _home(self) -> Iterator[None]:
        usual = loop.streams

        async def here() -> loop.RunningLoop:
            return loop.RunningLoop()

        loop.streams = self._loop.run_until_complete(here())  # type: ignore[assignment]  # runs need a home, no thread
        try:
            yield
        finally:
            loop.streams = usual

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
