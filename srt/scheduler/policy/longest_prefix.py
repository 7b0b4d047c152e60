"""Orders waiting requests by longest cached prefix, while admissions make prefixes longer (the paper's section 3).

Every admission may put tokens into the tree that lengthen another request's prefix. So the planner asks for one request
at a time. The order visits the radix tree of the waiting requests depth first, which is optimal (Theorem 3.1).

Salts are ordered by their oldest waiting request, so the order of answers reveals nothing about what another salt has
cached.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...cache.radix_cache import common_length
from ...core.counters import Counters
from ..request import Request
from .fork_siblings import ForkSiblings
from .priority import Ageing, PriorityKey
from .program_fairness import ProgramUsage

Peek = Callable[[Request], int]  # cached tokens of a waiting request

# ((−priority, not aged), oldest of the salt, turn of a called sibling, −cached, usage of the program, place, number)
_Key = tuple[PriorityKey, int, int, int, int, int, int]


class LongestPrefix:
    """Orders by priority and age, salt of the oldest, call, longest cached prefix, usage of the program, arrival.

    Args:
        waiting: oldest first.
        rest: requests outside the window, oldest first: they come last, by arrival.
        places: number → place in the order of arrival, of requests that exchanged theirs.
    """

    def __init__(
        self,
        waiting: Sequence[Request],
        rest: Sequence[Request],
        peek: Peek,
        ageing: Ageing,
        counters: Counters,
        *,
        siblings: ForkSiblings,
        usage: ProgramUsage,
        places: Mapping[int, int],
    ) -> None:
        self._rest = list(reversed(rest))
        self._ageing = ageing
        self._counters = counters
        self._siblings = siblings
        self._usage = usage
        self._places = places
        self._oldest_of_salt: dict[tuple[int, str], int] = {}
        self._left = {request.number: request for request in waiting}
        self._cached: dict[int, int] = {}  # by number
        self._heap: list[_Key] = []
        self._pushed: dict[int, _Key] = {}  # by number: its one entry of the heap that counts
        # (salt, cached length, next token) → those that an admission may bring forward
        self._followers: dict[tuple[str, int, int], list[Request]] = {}
        self._reordered: set[int] = set()  # returned before an older one with an equal key but for usage
        siblings.begin(waiting)
        for request in waiting:
            schedule = request.schedule
            self._oldest_of_salt.setdefault((schedule.priority, schedule.salt), request.number)
            self._place(request, peek(request))

    def next(self) -> Request | None:
        while self._heap:
            key = heapq.heappop(self._heap)
            request = self._left.get(key[-1])
            if request is None or self._pushed[request.number] is not key:
                continue  # already returned, or its key has changed
            if self._key(request) != key:
                self._push(request)  # its program has run rows since, so it moves back
                continue
            if self._overtakes(key):
                self._reordered.add(request.number)
            del self._left[request.number]
            return request
        return self._rest.pop() if self._rest else None

    def admitted(self, request: Request) -> None:
        """Updates the order after an admission: the request's tokens before kv_length are in the tree now."""
        self._ageing.admitted(request)
        self._counters.fair_admissions += request.number in self._reordered
        tokens = request.tokens[: request.kv_length]
        self._bring_forward(request.schedule.salt, tokens)
        self._counters.sibling_admissions += self._siblings.turn(request) < 0
        for called in self._siblings.call(request, tokens, self._left, self._cached):
            self._push(called)

    # ---------------------------------------------------------------------------------------- inside

    def _place(self, request: Request, cached: int) -> None:
        self._cached[request.number] = cached
        self._push(request)
        if cached < request.length:
            follower = (request.schedule.salt, cached, int(request.tokens[cached]))
            self._followers.setdefault(follower, []).append(request)

    def _push(self, request: Request) -> None:
        key = self._pushed[request.number] = self._key(request)
        heapq.heappush(self._heap, key)

    def _key(self, request: Request) -> _Key:
        number = request.number
        if self._ageing.aged(request):
            return (self._ageing.key(request), 0, 0, 0, 0, number, number)
        schedule = request.schedule
        salt = self._oldest_of_salt[schedule.priority, schedule.salt]
        turn, usage = self._siblings.turn(request), self._usage.rows(request)
        place = self._places.get(number, number)
        return (self._ageing.key(request), salt, turn, -self._cached[number], usage, place, number)

    def _bring_forward(self, salt: str, tokens: NDArray[np.int32]) -> None:
        """Updates the cached lengths of requests that share more with `tokens` than they had cached."""
        for cached in {length for _, length, _ in self._followers if length < len(tokens)}:
            for other in self._followers.pop((salt, cached, int(tokens[cached])), ()):
                if other.number in self._left:
                    self._place(other, max(cached, common_length(tokens, other.tokens)))

    def _overtakes(self, key: _Key) -> bool:
        """Returns whether an older request would have been next if usage of programs did not count."""
        equal, place = key[:4], key[-2]
        entries = (self._pushed[other] for other in self._left)
        return any(other[-2] < place and other[:4] == equal for other in entries)
