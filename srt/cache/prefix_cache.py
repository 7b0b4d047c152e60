"""Defines what KVManager asks of a prefix cache and its pool: RadixCache is one, BlockCache another to compare with.

Both keep the slots of tokens whose keys were computed, find the longest cached prefix of a sequence, and give slots up
when others need them. They differ in their unit, `page`: the tree shares prefixes to the token, blocks whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...lang.prompt import Borders
from .slot_allocator import Slots

if TYPE_CHECKING:
    from .radix_cache import Match, RadixNode, RadixRoot, Tokens


class SlotPool(Protocol):
    """Hands out slots, and takes them back."""

    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int:
        """Slots that no request holds and that have no cached token."""

    def allocate(self, count: int) -> Slots:
        """Allocates `count` slots, a multiple of the cache's page. The caller has made room before."""

    def release(self, slots: Slots) -> None: ...
    def clear(self) -> None: ...
    def check(self, held: Iterable[Slots]) -> None:
        """Checks that free and held slots together are all slots, none twice. Raises IntegrityError."""


@dataclass(slots=True)
class Seen:
    """Remembers where the cached prefix of a sequence ended when it was looked for last.

    Its first `length` tokens are those from the root on, and the last of them is in `node`, or was before that was
    split; what comes after it there may be others. `resumed`: that look began where an earlier one had ended.
    """

    node: RadixNode | None = None
    length: int = 0
    resumed: bool = False


class PrefixCache(Protocol):
    """Maps sequences to slots. The methods do what those of RadixCache do; a match goes back to the cache it is from.

    Attributes:
        page: slots are taken over, and allocated, in multiples of so many tokens.
        splits: cumulative; while it stays the same, so do the paths of matches.
    """

    page: int
    splits: int

    @property
    def total_tokens(self) -> int: ...
    @property
    def evictable_tokens(self) -> int: ...
    @property
    def pinned_tokens(self) -> int: ...
    @property
    def kept_tokens(self) -> int: ...
    @property
    def node_count(self) -> int: ...
    @property
    def salts(self) -> Iterable[RadixRoot]: ...

    def peek(self, tokens: Tokens, salt: str, borders: Borders = (), seen: Seen | None = None) -> int:
        """Returns the length of the longest cached prefix; this is no use, and changes nothing.

        seen: of earlier calls for this sequence, which may have become longer; kept for the next one.
        """

    def match(self, tokens: Tokens, salt: str, borders: Borders = ()) -> Match: ...
    def advance(self, match: Match, tokens: Tokens, borders: Borders = ()) -> Match: ...
    def extend(self, match: Match, tokens: Tokens, slots: Slots, *, borders: Borders = (), priority: int = 0) -> Match:
        """Appends tokens to a match. The cache takes the slots over of as many tokens as the result is longer."""

    def lock(self, match: Match) -> None: ...
    def unlock(self, match: Match) -> None: ...
    def move_lock(self, held: Match, wanted: Match) -> None: ...
    def pin(self, match: Match) -> None: ...
    def unpin(self, match: Match) -> None: ...
    def keep(self, match: Match) -> None: ...
    def end_keep(self, match: Match) -> None: ...
    def unkept(self, match: Match) -> int: ...

    def make_room(self, count: int) -> int:
        """Evicts until `count` slots can be allocated, and returns the number of evicted tokens."""

    def evict_of(self, root: RadixRoot, count: int) -> int: ...
    def discard(self, match: Match) -> int: ...
    def clear(self) -> int: ...
    def forget(self) -> None: ...

    def survey(self, most: int) -> tuple[list[RadixNode], int]: ...
    def held_slots(self) -> list[Slots]:
        """Returns the slots of all cached tokens."""

    def check_some(self, pinned: Iterable[Match], kept: Iterable[Match] = ()) -> bool: ...
    def check(self, holders: list[Match], pinned: Iterable[Match] = (), kept: Iterable[Match] = ()) -> None: ...
