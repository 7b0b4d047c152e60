"""Breakpoints of the provider's prompt cache, placed by the structure of the program.

The provider stores the prefix that ends at a breakpoint, charges a quarter more for storing it and a tenth for reading
it again, and takes at most four breakpoints a request. It stores nothing shorter than a minimum, so places before it
get none. The last four cache points of the program go first; the others, in order of importance:

1. the last place that branches share (the interpreter hints at it when a program forks), or where this program has
   asked before: texts outside of roles have no other structure;
2. the end of the last closed turn: the next turn of the conversation reads all of it;
3. the end of the system turns: other conversations of the same program read it;
4. the end of the turn that came before the last answer: what the request before this one has stored.

    system  ┃ You are ...            ┃            ┐
    user    ┃ Here is the document.  ┃ fork here  │ prefixes: everything from the beginning to the end of a block
            ┃ Question 3: ...        ┃            │
    assistant ...                                 ┘

The rules look at the prompt alone and at places that are remembered, so a prefix gets the same breakpoints each time.

A stored prefix is kept for five minutes or, where a cache point asks for more, for an hour after its last use; storing
it for an hour costs twice its tokens. The provider wants longer times before shorter ones, so whatever lies before a
breakpoint of an hour is stored for an hour, too.
"""

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ..places import Block, Places, cut

Role = Literal["system", "user", "assistant"]
Lifetime = Literal["", "5m", "1h"]  # "": no cache point has said how long

LIFETIMES: tuple[tuple[float, Lifetime], ...] = ((300.0, "5m"), (3600.0, "1h"))  # seconds, ascending


def lifetime_of(seconds: float) -> Lifetime:
    """Returns the provider's shortest time that is at least so long; its longest one where none is."""
    return next((name for most, name in LIFETIMES if seconds <= most), LIFETIMES[-1][1])


def prefix_hashes(blocks: Sequence[Block]) -> list[bytes]:
    """Hashes each stored prefix, in order. The places of cuts are part of the hash."""
    state = hashlib.blake2b(digest_size=16)
    hashes: list[bytes] = []
    for block in blocks:
        state.update(f"{block.spelling}\x06".encode("utf-8", "surrogatepass"))
        if block.cached:
            hashes.append(state.digest())
    return hashes


MOST = 4  # breakpoints that the provider takes
LIFETIME = 240.0  # seconds for which a stored prefix is taken to be there; the provider keeps it for 300 at least
REMEMBERED = 4096  # stored prefixes


def with_breakpoints(blocks: Sequence[Block], places: Places, minimum: int) -> list[Block]:
    """Cuts the blocks at the known places and marks the ends of stored prefixes.

    Args:
        minimum: tokens of the shortest prefix that the provider stores.
    """
    known = places.within(blocks)
    pieces, ends = cut(blocks, known)
    points = {index: known[length] for index, length in ends.items() if known[length]}
    tokens = 0
    long_enough: set[int] = set()
    for index, piece in enumerate(pieces):
        tokens += piece.tokens
        if tokens >= minimum:
            long_enough.add(index)
    chosen: list[int] = []
    for index in (*reversed(points), *_wishes(pieces, list(ends))):
        if index in long_enough and index not in chosen and len(chosen) < MOST:
            chosen.append(index)
    marked = list(pieces)
    longest: Lifetime = "5m"
    for index in sorted(chosen, reverse=True):
        longest = "1h" if points.get(index) == "1h" else longest
        marked[index] = replace(pieces[index], cached=longest)
    return marked


def _wishes(blocks: Sequence[Block], shared: Sequence[int]) -> list[int]:
    """Returns indices of candidate blocks for breakpoints, the most important first."""
    closed = [index for index, block in enumerate(blocks) if block.closes]
    system = [index for index in closed if blocks[index].role == "system"]
    answers = [index for index in closed if blocks[index].role == "assistant"]
    before = [index for index in closed if answers and index < answers[-1] and blocks[index].role != "assistant"]
    return [*shared[-1:], *closed[-1:], *system[-1:], *before[-1:], *shared[-2:-1]]


class Leaders:
    """Orders requests: one stores a shared prefix, and those that read it wait until its answer has begun.

    A prefix can be read from when the answer of the request that stored it begins. Eight branches sent at once would
    all store what they share; here one of them does, and seven read.

    Args:
        counts: gets one under "waited" for every request that waits.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._stored: OrderedDict[bytes, float] = OrderedDict()  # hash of a prefix → when it was last stored or read
        self._leading: dict[bytes, asyncio.Future[None]] = {}

    async def turn(self, blocks: Sequence[Block]) -> "Turn":
        """Waits until no other request is about to store a prefix of this one.

        The turn has to be ended: `began` when the answer begins, and `over` in any case.
        """
        hashes = prefix_hashes(blocks)
        loop = asyncio.get_running_loop()
        waited = False
        while True:
            leaders = [self._leading[hash_] for hash_ in hashes if hash_ in self._leading]
            if not leaders:
                break
            if not waited:
                waited = True
                self._counts["waited"] += 1
            await asyncio.wait(leaders[-1:])
        missing = [hash_ for hash_ in hashes if loop.time() - self._stored.get(hash_, -LIFETIME) >= LIFETIME]
        leads: asyncio.Future[None] = loop.create_future()
        for hash_ in missing:
            self._leading[hash_] = leads
        return Turn(self, hashes, missing, leads)

    def store(self, hashes: Sequence[bytes], now: float) -> None:
        for hash_ in hashes:
            self._stored[hash_] = now
            self._stored.move_to_end(hash_)
        while len(self._stored) > REMEMBERED:
            self._stored.popitem(last=False)

    def release(self, hashes: Sequence[bytes]) -> None:
        for hash_ in hashes:
            self._leading.pop(hash_, None)


class Turn:
    """Permission of one request to be sent."""

    def __init__(
        self, leaders: Leaders, hashes: Sequence[bytes], missing: Sequence[bytes], leads: "asyncio.Future[None]"
    ) -> None:
        self._leaders, self._hashes, self._missing, self._leads = leaders, hashes, missing, leads

    def began(self) -> None:
        """Records that the answer begins: the stored prefixes can be read."""
        self._leaders.store(self._hashes, self._leads.get_loop().time())
        self.over()

    def over(self) -> None:
        """Ends the turn, after success or failure; a waiting request may go. Calling it again does nothing."""
        if not self._leads.done():
            self._leaders.release(self._missing)
            self._leads.set_result(None)
