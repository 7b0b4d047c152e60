"""Longest cached prefix first, while admissions make prefixes longer (the paper's section 3).

Every admission may put tokens into the tree that bring another request forward. So the order is asked for one request
after the other, and visits the radix tree of the waiting requests depth first, which is optimal (Theorem 3.1).

Between salts the oldest waiting request decides, so that the order of answers says nothing about what another salt
has cached.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...cache.radix_node import common_length
from ...core.counters import Counters
from ..request import Request
from .fork_siblings import Siblings
from .priority import Lane, LaneKey, Lanes
from .program_fairness import Service

Peek = Callable[[Request], int]  # cached tokens of a waiting request

# (lane's key …, oldest of the salt, turn of a called sibling, −cached, service of the program, place, number)
_Key = tuple[LaneKey, int, int, int, int, int, int]


class LongestPrefix:
    """By lane, salt of the oldest, call, longest cached prefix, service of the program, arrival.

    Args:
        waiting: oldest first.
        behind: those behind the window, oldest first: they come last, by arrival.
        siblings, service: None leaves them out of account.
        places: number → place in the order of arrival, of those that have another's.
    """

    def __init__(
        self,
        waiting: Sequence[Request],
        behind: Sequence[Request],
        peek: Peek,
        lanes: Lanes,
        counters: Counters,
        *,
        siblings: Siblings | None,
        service: Service | None,
        places: Mapping[int, int],
    ) -> None:
        self._behind = list(reversed(behind))
        self._lanes = lanes
        self._counters = counters
        self._siblings = siblings
        self._service = service
        self._places = places
        self._oldest_of_salt: dict[tuple[int, str], int] = {}
        self._left = {request.number: request for request in waiting}
        self._cached: dict[int, int] = {}  # by number
        self._heap: list[_Key] = []
        self._pushed: dict[int, _Key] = {}  # by number: its one entry of the heap that counts
        # (salt, cached length, next token) → those that an admission may bring forward
        self._followers: dict[tuple[str, int, int], list[Request]] = {}
        self._reordered: set[int] = set()  # given before an older one that was its equal but for service
        if siblings is not None:
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
                continue  # given already, or it has moved
            if self._key(request) != key:
                self._push(request)  # its program has been served since: later than the entry says
                continue
            if self._overtakes(key):
                self._reordered.add(request.number)
            del self._left[request.number]
            return request
        return self._behind.pop() if self._behind else None

    def admitted(self, request: Request) -> None:
        """`request` has been planned: its tokens before kv_length are in the tree now."""
        self._lanes.admitted(request)
        self._counters.fair_admissions += request.number in self._reordered
        tokens = request.tokens[: request.kv_length]
        self._bring_forward(request.schedule.salt, tokens)
        if self._siblings is not None:
            self._counters.sibling_admissions += self._siblings.turn(request) < 0
            for called in self._siblings.call(request, tokens, self._left, self._cached):
                self._push(called)

    def put_back(self, request: Request) -> None:
        """`request` was given, and does not fit: it is the next one again."""
        if request.number not in self._pushed:
            self._behind.append(request)
            return
        self._left[request.number] = request
        self._push(request)

    def upcoming(self, count: int) -> list[Request]:
        """The next ones, as things stand."""
        return [self._left[key[-1]] for key in heapq.nsmallest(count, map(self._pushed.__getitem__, self._left))]

    def press(self, moved: Sequence[Request]) -> None:
        """These have changed their lane."""
        for request in moved:
            self._push(request)

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
        lane, number = self._lanes.key(request), request.number
        if lane[1] is not Lane.ORDERED:
            return (lane, 0, 0, 0, 0, number, number)
        schedule = request.schedule
        salt = self._oldest_of_salt[schedule.priority, schedule.salt]
        turn = self._siblings.turn(request) if self._siblings else 0
        service = self._service.of(request) if self._service else 0
        return (lane, salt, turn, -self._cached[number], service, self._places.get(number, number), number)

    def _bring_forward(self, salt: str, tokens: NDArray[np.int32]) -> None:
        """Those that share more with `tokens` than they had cached have that cached now."""
        for cached in {length for _, length, _ in self._followers if length < len(tokens)}:
            for other in self._followers.pop((salt, cached, int(tokens[cached])), ()):
                if other.number in self._left:
                    self._place(other, max(cached, common_length(tokens, other.tokens)))

    def _overtakes(self, key: _Key) -> bool:
        """An older request would have been next if programs were not told apart by their service."""
        if self._service is None:
            return False
        equal, place = key[:4], key[-2]
        entries = (self._pushed[other] for other in self._left)
        return any(other[-2] < place and other[:4] == equal for other in entries)
