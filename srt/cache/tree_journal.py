"""Records how a radix tree changes, so that a copy of it elsewhere can follow.

    RadixCache ── added, extended, split, took up, removed, cleared ──▶ TreeJournal ── take(), once a step ──▶ events

What cancels within a step is not told. The rules, of which each leaves a tree that is true at the end of the step:

    added N, then removed N            neither, unless an event that stays names N
    extended N, then removed N         only the removal
    added or extended N, extended N    one event with all tokens
    anything, then cleared             only cleared

To extend a node commutes with all that happens at its beginning (a split, or tokens that its parent takes up) and below
it, so tokens may join the earlier event. Not where its end has moved since: after it took up tokens of a child.
"""

from dataclasses import dataclass, field

from ..core.messages import (
    CacheCleared,
    CacheEvent,
    CacheEvents,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)
from .radix_cache import RadixCache, RadixNode, Tokens

MOST_TOLD = 4 << 20  # bytes of tokens of one message, before the last node: a frame takes far more


@dataclass(slots=True)
class _Grown:
    """An event that brings tokens of a node: an addition, or with `place` None an extension."""

    id: int
    place: tuple[int, str, str | None] | None  # parent, salt and root of NodeAdded
    pieces: list[bytes]
    named: int = 0  # events that stay and name the node: as a parent, in a split, in tokens that moved
    grows: bool = True  # its end has not moved since

    def event(self) -> CacheEvent:
        tokens = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        if self.place is None:
            return NodeExtended(self.id, tokens)
        parent, salt, root = self.place
        return NodeAdded(self.id, parent, salt, tokens, root)


@dataclass(slots=True)
class TreeJournal:
    """A TreeListener: it keeps the changes of one tree until they are taken. One thread uses tree and journal.

    Attributes:
        cancelled: changes that were not told, cumulative: they became a part of others, or came to nothing.
    """

    cancelled: int = 0
    _entries: dict[int, "_Grown | CacheEvent"] = field(default_factory=dict)  # by the order of the changes
    _grown: dict[int, int] = field(default_factory=dict)  # node → its entry that brings tokens
    _next: int = 0

    def __bool__(self) -> bool:
        """Returns whether there is something to take."""
        return bool(self._entries)

    # ------------------------------------------------------------------------------------------ the tree says

    def added(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "a node that is added has a parent"
        below_root = parent.is_root
        root = parent.salt if below_root and parent.salt != node.salt else None
        self._name(parent.id, 1)
        place = (0 if below_root else parent.id, node.salt, root)
        self._grown[node.id] = self._append(_Grown(node.id, place, [as_bytes(node.tokens)]))

    def extended(self, node: RadixNode, tokens: Tokens) -> None:
        earlier = self._entry_of(node.id)
        if earlier is not None and earlier.grows:
            earlier.pieces.append(as_bytes(tokens))
            self.cancelled += 1
        else:
            self._grown[node.id] = self._append(_Grown(node.id, None, [as_bytes(tokens)]))

    def split(self, node: RadixNode, upper: RadixNode) -> None:
        self._name(node.id, 1)
        self._append(NodeSplit(node.id, upper.id, len(upper.tokens)))

    def took_up(self, node: RadixNode, child: RadixNode, count: int) -> None:
        self._name(child.id, 1)
        earlier = self._entry_of(node.id)
        if earlier is not None:
            earlier.grows = False  # the child is new, too, and names it
        self._append(NodeTookUp(node.id, child.id, count))

    def removed(self, node: RadixNode, parent: RadixNode) -> None:
        earlier = self._entry_of(node.id)
        if earlier is not None and not earlier.named:
            del self._entries[self._grown.pop(node.id)]
            self.cancelled += len(earlier.pieces)
            if earlier.place is not None:
                self._name(parent.id, -1)
                self.cancelled += 1
                return
        self._append(NodeRemoved(node.id))

    def cleared(self) -> None:
        self.cancelled += len(self._entries)
        self._entries.clear()
        self._grown.clear()
        self._append(CacheCleared())

    # ------------------------------------------------------------------------------------------ the engine takes

    def snapshot(self, tree: RadixCache) -> None:
        """Replaces all that was recorded by the whole tree, parents before their children."""
        self.cleared()
        for _, node in tree.walk():
            self.added(node)

    def take(self) -> list[CacheEvents]:
        """Returns the changes since the last call, in order: one message, or several where they bring many tokens."""
        messages: list[CacheEvents] = []
        events: list[CacheEvent] = []
        size = 0
        for entry in self._entries.values():
            if isinstance(entry, _Grown):
                size += sum(map(len, entry.pieces))
                events.append(entry.event())
            else:
                events.append(entry)
            if size >= MOST_TOLD:
                messages.append(CacheEvents(events))
                events, size = [], 0
        if events:
            messages.append(CacheEvents(events))
        self._entries.clear()
        self._grown.clear()
        return messages

    # ------------------------------------------------------------------------------------------ inside

    def _append(self, entry: "_Grown | CacheEvent") -> int:
        self._next += 1
        self._entries[self._next] = entry
        return self._next

    def _entry_of(self, number: int) -> _Grown | None:
        entry = self._entries.get(self._grown.get(number, 0))
        return entry if isinstance(entry, _Grown) else None

    def _name(self, number: int, count: int) -> None:
        entry = self._entry_of(number)
        if entry is not None:
            entry.named += count


def as_bytes(tokens: Tokens) -> bytes:
    """Returns tokens as the messages carry them."""
    return tokens.astype("<i4", copy=False).tobytes()
