"""Graphs that clients sent, ready to be run: read, checked and planned once, found again by the digest of their bytes.

The digest is computed here, from the bytes: nobody can put a graph in another one's place.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from ...lang.errors import GraphError, UmbelError
from ...lang.programs import digest_of
from ..core.config import Limits

log = logging.getLogger("umbel.gateway")

T = TypeVar("T")


class GraphShelf(Generic[T]):
    """The least recently used ones go first.

    Args:
        read: bytes → what can be run. Called in a thread for long graphs, one at a time; may raise anything.
        counters: what is counted goes there.
    """

    def __init__(self, limits: Limits, read: Callable[[bytes], T], counters: Counter[str]) -> None:
        self._limits = limits
        self._read = read
        self._graphs: OrderedDict[str, tuple[T, int]] = OrderedDict()  # with the length of their bytes
        self._reading: dict[str, asyncio.Task[T]] = {}
        self._bytes = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="umbel-graphs")
        self.counters = counters

    async def find(self, digest: str, data: bytes) -> T | None:
        """The graph of this digest, read from `data` if need be; None when it is not here and `data` is empty.

        Raises:
            GraphError: the bytes are no graph, not that of the digest, or too many.
        """
        kept = self._graphs.get(digest)
        if kept is not None:
            self._graphs.move_to_end(digest)
            self.counters["graphs_found"] += 1
            return kept[0]
        reading = self._reading.get(digest)
        if reading is None:
            if not data:
                self.counters["graphs_wanted"] += 1
                return None
            if len(data) > self._limits.max_graph_bytes:
                raise GraphError(
                    f"the graph has {len(data)} bytes and {self._limits.max_graph_bytes} are accepted; run the program "
                    "with program.run(...), or split it"
                )
            if len(data) <= self._limits.long_graph:
                return self._keep(digest, self._opened(digest, data), len(data))
            reading = self._reading[digest] = asyncio.create_task(self._open_beside(digest, data), name="a long graph")
            reading.add_done_callback(lambda _: self._reading.pop(digest, None))
        return await asyncio.shield(reading)  # others may wait for it, too

    async def _open_beside(self, digest: str, data: bytes) -> T:
        graph = await asyncio.get_running_loop().run_in_executor(self._pool, self._opened, digest, data)
        return self._keep(digest, graph, len(data))

    def _opened(self, digest: str, data: bytes) -> T:
        self.counters["graphs_read"] += 1
        if digest_of(data) != digest:
            raise GraphError(f"the graph's bytes have another digest than {digest[:64]!r}")
        try:
            return self._read(data)
        except UmbelError:
            raise
        except Exception as error:  # bytes of strangers: whatever they lead to, it is their fault
            log.warning("a graph could not be read", exc_info=error)
            raise GraphError(f"the graph cannot be read: {type(error).__name__}") from error

    def _keep(self, digest: str, graph: T, length: int) -> T:
        if digest not in self._graphs:
            self._graphs[digest] = graph, length
            self._bytes += length
        while len(self._graphs) > self._limits.kept_graphs or self._bytes > self._limits.kept_graph_bytes:
            _, (_, gone) = self._graphs.popitem(last=False)
            self._bytes -= gone
        return graph
