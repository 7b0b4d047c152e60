"""Token ids of texts that were encoded before, found by the text itself.

Bounded by bytes; the least recently used goes first. A key is the whole text, so what is found is what was asked
for: nothing rests on a hash alone. Requests with a salt find only what was kept under the same salt, so that the time
an answer takes tells nobody what others have asked.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from sys import getsizeof

_ENTRY = 250  # bytes: the entry of the dictionary, two tuples
_TOKEN = 36  # bytes: an integer and the reference to it


class TokenCache:
    """Text → token ids.

    Args:
        most_bytes: of memory; 0 keeps nothing.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._entries: OrderedDict[Hashable, tuple[Sequence[int], int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> Sequence[int] | None:
        """What was put there; it counts as used now."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """`key` is a text, or a tuple that holds one."""
        size = _ENTRY + _TOKEN * len(token_ids) + _weight(key)
        if size > self._most:
            return
        known = self._entries.pop(key, None)
        self.bytes += size - (0 if known is None else known[1])
        self._entries[key] = token_ids, size
        while self.bytes > self._most:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed

    def namespace(self, salt: str) -> "Namespace":
        """The part of this memory that belongs to a salt."""
        return Namespace(self, salt)


class Namespace:
    """A TokenCache as requests with one salt see it."""

    def __init__(self, cache: TokenCache, salt: str) -> None:
        self._cache = cache
        self._salt = salt

    def __contains__(self, key: Hashable) -> bool:
        return (self._salt, key) in self._cache

    def get(self, key: Hashable) -> Sequence[int] | None:
        return self._cache.get((self._salt, key))

    def put(self, key: Hashable, token_ids: Sequence[int]) -> None:
        self._cache.put((self._salt, key), token_ids)


def _weight(key: Hashable) -> int:
    return getsizeof(key) + (sum(map(_weight, key)) if isinstance(key, tuple) else 0)
