"""Replicas with real radix trees and closed-form service times, one call after the other: to try policies on."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from umbel.srt.cache.radix_cache import Match, RadixCache
from umbel.srt.cache.slot_allocator import SlotAllocator
from umbel.srt.cache.tree_journal import TreeJournal
from umbel.srt.placement.placement import DECODE_RATE, PREFILL_RATE, Placement
from umbel.srt.placement.policies import Placing


@dataclass
class Outcome:
    """What a run came to. `most`: the most calls of a replica over the mean, while another had none."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed: list[int] = field(default_factory=list)  # replica → tokens of prompts
    placed: list[int] = field(default_factory=list)  # replica → calls
    waits: list[float] = field(default_factory=list)  # seconds until each prompt was computed
    end: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def throughput(self) -> float:
        return self.calls / self.end


class CoarseReplica:
    """Serves one call at a time, in the order of their placement."""

    def __init__(self, room: int) -> None:
        self.pool = SlotAllocator(room + 1)
        self.journal = TreeJournal()
        self.cache = RadixCache(self.pool, listener=self.journal)
        self.queue: deque[tuple[int, Placing, float]] = deque()  # number, call, time of arrival
        self.serving: Match | None = None

    def take_in(self, call: Placing) -> int:
        """Brings a prompt into the tree and locks it; returns how many tokens were cached."""
        tokens = np.frombuffer(call.tokens, np.int32)
        match = self.cache.match(tokens, call.salt, call.borders)
        self.cache.lock(match)
        cached, rest = match.length, tokens[match.length :]
        if len(rest):
            if self.pool.free < len(rest):
                self.cache.evict(len(rest) - self.pool.free)
            match = self.cache.extend(match, rest, self.pool.allocate(len(rest)), borders=call.borders)
        self.serving = match
        return min(cached, len(tokens) - 1)

    def let_go(self) -> None:
        assert self.serving is not None
        self.cache.unlock(self.serving)
        self.serving = None


def run(
    placement: Placement, rooms: Sequence[int], calls: Iterable[tuple[float, Placing]], *, delay: float = 0.0
) -> Outcome:
    """Runs calls to their end; events of a replica reach the placement `delay` seconds after the end of a call."""
    replicas = [CoarseReplica(room) for room in rooms]
    outcome = Outcome(computed=[0] * len(rooms), placed=[0] * len(rooms))
    agenda: list[tuple[float, int, str, int, object]] = []
    for time, call in calls:
        heapq.heappush(agenda, (time, len(agenda), "arrival", 0, call))
    order = len(agenda)

    def later(time: float, what: str, replica: int, of: object) -> None:
        nonlocal order
        order += 1
        heapq.heappush(agenda, (time, order, what, replica, of))

    def start(index: int, now: float) -> None:
        replica = replicas[index]
        if replica.serving is not None or not replica.queue:
            return
        number, call, arrived = replica.queue.popleft()
        cached = replica.take_in(call)
        outcome.cached_tokens += cached
        outcome.computed[index] += call.length - cached
        computed = now + (call.length - cached) / PREFILL_RATE
        outcome.waits.append(computed - arrived)
        later(computed, "began", index, number)
        later(computed + call.work / DECODE_RATE, "ended", index, (number, call.work))

    while agenda:
        now, _, what, index, of = heapq.heappop(agenda)
        match what:
            case "arrival":
                placed = placement.place(of, now)
                assert placed is not None
                outcome.calls += 1
                outcome.prompt_tokens += of.length
                outcome.placed[placed.replica] += 1
                replicas[placed.replica].queue.append((placed.number, of, now))
                start(placed.replica, now)
            case "began":
                placement.began(of, now)
            case "ended":
                outcome.end = now
                replicas[index].let_go()
                placement.ended(of[0], now, of[1])
                events = [event for message in replicas[index].journal.take() for event in message.events]
                later(now + delay, "told", index, events)
                start(index, now)
            case "told":
                assert placement.apply(index, of)
    return outcome
