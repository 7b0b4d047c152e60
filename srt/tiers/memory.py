"""Pages in host memory: a map of arrays that forgets the least recently used ones beyond its size.

It takes the arrays it is given and lends them without a copy: a payload lives as long as a copy to the device reads it,
evicted or not. So page-locked memory stays page-locked, and there is nothing to hold and release. An arena of equal
pages was measured next to it: storing a page of 1.18 MB took a copy more there (see docs/tiers.md).
"""

from collections import OrderedDict
from collections.abc import Sequence

from .tier import Payload, TierFacts

ENTRY_BYTES = 256  # of a page without its payload: name, dictionary, array


class HostMemory:
    """Implements `Tier`. Used from one thread.

    Args:
        limit: bytes of all pages.
    """

    name = "host"

    def __init__(self, limit: int) -> None:
        assert limit > 0, "a cache of no bytes is switched off, not made"
        self._limit = limit
        self._pages: OrderedDict[bytes, Payload] = OrderedDict()  # the next to be evicted first
        self._bytes = 0
        self._hits = self._misses = self._stored = self._evicted = self._dropped = 0

    def open(self) -> None:
        """Has nothing to prepare."""

    def longest(self, names: Sequence[bytes]) -> int:
        pages = self._pages
        count = 0
        for name in names:
            if name not in pages:
                break
            count += 1
        self._use(names[:count])
        return count

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        found = [self._pages.get(name) for name in names]
        self._use([name for name, payload in zip(names, found, strict=True) if payload is not None])
        missing = sum(payload is None for payload in found)
        self._hits += len(found) - missing
        self._misses += missing
        return found

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        first = len(names) - len(payloads)
        assert first >= 0, "every payload has a name"
        for index, payload in enumerate(payloads, first):
            size = payload.nbytes + ENTRY_BYTES
            if names[index] in self._pages:
                continue
            if size > self._limit or (index and names[index - 1] not in self._pages):
                self._dropped += len(names) - index
                break
            self._pages[names[index]] = payload
            self._bytes += size
            self._stored += 1
        self._use([name for name in names if name in self._pages])
        self._trim()

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            payload = self._pages.pop(name, None)
            if payload is not None:
                self._bytes -= payload.nbytes + ENTRY_BYTES

    def sample(self, size: int) -> float | None:
        """Has nothing to measure: a payload is lent without a copy."""
        return None

    def facts(self) -> TierFacts:
        return TierFacts(
            self.name,
            pages=len(self._pages),
            bytes=self._bytes,
            limit=self._limit,
            hits=self._hits,
            misses=self._misses,
            stored=self._stored,
            evicted=self._evicted,
            dropped=self._dropped,
        )

    def close(self) -> None:
        self._pages.clear()
        self._bytes = 0

    def _use(self, names: Sequence[bytes]) -> None:
        """Makes the pages of a sequence the last to be evicted, the head after its tail."""
        for name in reversed(names):
            self._pages.move_to_end(name)

    def _trim(self) -> None:
        while self._bytes > self._limit:
            _, payload = self._pages.popitem(last=False)
            self._bytes -= payload.nbytes + ENTRY_BYTES
            self._evicted += 1
