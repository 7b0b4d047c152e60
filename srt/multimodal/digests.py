"""Computes SHA-256 of media: small ones at once, large ones in a thread, so that the loop goes on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

LARGE = 1 << 19  # bytes: about a millisecond


class Digests(Protocol):
    """Computes digests, one after the other."""

    def compute(self, data: bytes, tell: Callable[[bytes], None]) -> None:
        """Computes a digest; calls `tell` once, now or later on the caller's loop."""


class InlineDigests:
    """Computes digests in the caller's thread."""

    def compute(self, data: bytes, tell: Callable[[bytes], None]) -> None:
        tell(sha256(data).digest())


class ThreadedDigests:
    """Computes digests on the running loop, large ones in a thread.

    Args:
        after: called after each answer of the thread, to flush the messages that it led to.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="umbel-digests")
        self._waiting: set[asyncio.Future[bytes]] = set()

    def compute(self, data: bytes, tell: Callable[[bytes], None]) -> None:
        if len(data) < LARGE:
            tell(sha256(data).digest())
            return

        def hear(future: asyncio.Future[bytes]) -> None:
            self._waiting.discard(future)
            tell(future.result())
            self._after()

        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: sha256(data).digest())
        self._waiting.add(future)
        future.add_done_callback(hear)
