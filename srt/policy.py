"""The order in which waiting requests are admitted (the paper's section 3, cache-aware scheduling).

One `Order` is made per step and asked for one request after the other, because every admission may put tokens
into the tree that bring another request forward: longest prefix first, asked this way, visits the radix tree of
the waiting requests depth first, which is optimal (Theorem 3.1).

For both policies: higher `priority` first, then requests that have waited longer than the bound, by arrival.
Between salts the oldest waiting request decides, so that the order of answers says nothing about
what another salt has cached.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from .radix_cache import common_length
from .request import Request
from .scheduler_config import PolicyName

Peek = Callable[[Request], int]  # cached tokens of a waiting request


class Order(Protocol):
    """The waiting requests of one step, each given once."""

    def next(self) -> Request | None: ...

    def admitted(self, request: Request) -> None:
        """`request` has been planned: tokens before its kv_length are in the tree now."""


class FirstCome:
    """By priority, then by arrival (which is also the order of ageing)."""

    def __init__(self, waiting: Sequence[Request]) -> None:
        self._left = sorted(waiting, key=lambda request: request.rank, reverse=True)

    def next(self) -> Request | None:
        return self._left.pop() if self._left else None

    def admitted(self, request: Request) -> None:
        pass  # what is cached does not matter here


_Key = tuple[int, int, int, int, int]  # its last entry is the request's number


class LongestPrefix:
    """By priority, age beyond the bound, salt of the oldest, longest cached prefix, arrival.

    Those that an admission may bring forward are found by the token that follows what they have cached.
    """

    def __init__(self, waiting: Sequence[Request], peek: Peek, *, aged_before: float, window: int) -> None:
        oldest_first = sorted(waiting, key=lambda request: request.rank)
        self._behind = oldest_first[window:][::-1]
        self._aged_before = aged_before
        self._oldest_of_salt: dict[tuple[int, str], int] = {}
        self._left = {request.number: request for request in oldest_first[:window]}
        self._cached: dict[int, int] = {}  # by number
        self._heap: list[_Key] = []  # an entry that is not its request's present key counts no more
        self._followers: dict[tuple[str, int, int], list[Request]] = {}  # (salt, cached length, next token)
        for request in self._left.values():
            schedule = request.schedule
            self._oldest_of_salt.setdefault((schedule.priority, schedule.salt), request.number)
            self._place(request, peek(request))

    def _place(self, request: Request, cached: int) -> None:
        self._cached[request.number] = cached
        heapq.heappush(self._heap, self._key(request))
        if cached < request.length:
            follower = (request.schedule.salt, cached, int(request.tokens[cached]))
            self._followers.setdefault(follower, []).append(request)

    def _key(self, request: Request) -> _Key:
        schedule = request.schedule
        if request.arrival <= self._aged_before:
            return (-schedule.priority, 0, 0, 0, request.number)
        salt = self._oldest_of_salt[schedule.priority, schedule.salt]
        return (-schedule.priority, 1, salt, -self._cached[request.number], request.number)

    def next(self) -> Request | None:
        while self._heap:
            key = heapq.heappop(self._heap)
            request = self._left.get(key[-1])
            if request is not None and key == self._key(request):
                del self._left[request.number]
                return request
        return self._behind.pop() if self._behind else None

    def admitted(self, request: Request) -> None:
        """Those that share more with `request` than they had cached have that cached now."""
        tokens = request.tokens[: request.kv_length]
        salt = request.schedule.salt
        for cached in {length for _, length, _ in self._followers if length < len(tokens)}:
            for other in self._followers.pop((salt, cached, int(tokens[cached])), ()):
                if other.number in self._left:
                    self._place(other, max(cached, common_length(tokens, other.tokens)))


def arrange(
    policy: PolicyName, waiting: Sequence[Request], peek: Peek, *, now: float, max_wait: float, window: int
) -> Order:
    match policy:
        case PolicyName.FCFS:
            return FirstCome(waiting)
        case PolicyName.LPM:
            return LongestPrefix(waiting, peek, aged_before=now - max_wait, window=window)
        case _:
            assert_never(policy)
