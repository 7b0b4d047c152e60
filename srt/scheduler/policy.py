"""Sets how requests share the engine's steps, and orders waiting requests for admission.

    policy   order
    lpm      priority · aged · oldest of the namespace · called siblings of a fork · longest cached prefix · least
             usage of the program · among the calls of one program the longest remaining critical path · arrival
    fcfs     priority · arrival

An `Order` is made for one step. The planner asks it for one request at a time, because an admission may change which
comes next. The AdmissionPolicy makes orders and keeps the state that outlives a step.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from ..cache.radix_cache import shared_length
from ..core.instruments import Counters
from .request import Request


class PolicyName(StrEnum):
    LPM = "lpm"  # longest prefix match first
    FCFS = "fcfs"  # first come, first served


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings by which requests share the engine's steps and its KV pool. lang/runtime_options.py checks the user's.

    Attributes:
        max_running: sequences that hold slots at the same time.
        max_step_tokens: rows of one step; decode rows come first, prompts are cut into chunks that fit
            in the rest (at least one row, so that prompts advance under any load). None: no chunks.
        max_step_logits: rows of one step whose logits are computed; log-probabilities of long prompts would
            otherwise take gigabytes at a vocabulary of 262,144. At least max_running.
        policy: order of waiting requests; see above.
        policy_window: waiting requests that are ordered by their cached prefix; the others keep their order of arrival.
        radix_cache: keep and reuse keys and values of finished and running requests.
        block_cache: tokens of a block of BlockCache, which takes the place of the tree; 0: the tree.
        in_step_sharing: a request may use keys that another request computes in the same step.
        least_ahead: a hint that misses fewer tokens than this is dropped, unless it pins.
        pin_share: the part of the pool that all pins and kept prefixes together may hold.
        salt_share: the part of the pool that one salt may hold, cached and running together.
        max_wait: seconds after which a waiting request precedes every cache-aware order; Ageing bounds its
            whole wait.
        headroom: slots left for every running sequence when another one is admitted, against early retraction.
        partial_logits: the runner may answer a row that only chooses a token with the token, without its logits.
        jump_forward: tokens that a constraint forces are appended without a decode step of their own.
        token_guesses: steps check guesses of the next tokens where that is faster (guesses.py).
        constraint_fuel: work on masks of one step, in units of 10 µs: a transition of an automaton in Python, or
            eight in C++. Masks that need more are finished in later steps.
        snapshot_stride: tokens of a long prompt between two snapshots of recurrent states, at least.
        snapshot_gap: tokens that are computed again rather than saved by one more snapshot.
        whole_texts: all rows of a text run in one step, which then may exceed max_step_tokens by less than one text.
        cache_events: tell how the nodes of the radix tree change, in messages of every step that changes them.
        overlap: a step is planned while the previous one runs (step.py); the runner is a batch.AsyncRunner.
        check_every_step: verify pool and tree after every step (tests; costs time in the size of the pool).
    """

    max_running: int = 64
    max_step_tokens: int | None = 512
    max_step_logits: int = 256
    policy: PolicyName = PolicyName.LPM
    policy_window: int = 256
    radix_cache: bool = True
    block_cache: int = 0
    in_step_sharing: bool = True
    least_ahead: int = 0
    pin_share: float = 0.5
    salt_share: float = 1.0
    max_wait: float = 10.0
    headroom: int = 8
    whole_texts: bool = False
    partial_logits: bool = True
    jump_forward: bool = True
    token_guesses: bool = False
    constraint_fuel: int = 250
    snapshot_stride: int = 512
    snapshot_gap: int = 8
    cache_events: bool = False
    overlap: bool = False
    check_every_step: bool = False

    def __post_init__(self) -> None:
        assert 0 < self.max_running <= self.max_step_logits, "each running sequence may need logits"


Peek = Callable[[Request], int]  # cached tokens of a waiting request
PriorityKey = tuple[int, bool]  # (−priority, not aged): smaller goes first


class Order(Protocol):
    """Returns the waiting requests of a step, each once, and of the next ones as long as it is kept."""

    def extend(self, arrived: Sequence[Request]) -> bool:
        """Adds requests that wait since then; False: an order over all of them has to be made."""

    def next(self) -> Request | None: ...

    def admitted(self, request: Request) -> None:
        """Updates the order after `request` was planned: its tokens before kv_length are in the tree now."""


class Ageing:
    """Puts priority and age before every cache-aware order, in one step.

    A request that has waited longer than max_wait is aged: it is first within its priority, by arrival.

    The bound on waiting. Once a request is aged, no later request of its priority is admitted before it, only aged ones
    that came earlier. A request that does not fit blocks all requests after it until running requests have released
    their slots. So the wait is at most max_wait plus the time in which the running requests, and the earlier ones that
    still wait, drain. Running requests drain because the one of the highest rank advances in every step. Neither cache
    hits nor forks prolong the wait.

    Args:
        aged_before: requests that arrived at or before this time have waited too long.
    """

    def __init__(self, aged_before: float, counters: Counters) -> None:
        self._aged_before = aged_before
        self._counters = counters

    def aged(self, request: Request) -> bool:
        return request.arrival <= self._aged_before

    def key(self, request: Request) -> PriorityKey:
        return (-request.schedule.priority, not self.aged(request))

    def admitted(self, request: Request) -> None:
        self._counters.aged_admissions += self.aged(request)


_Group = tuple[str, str, str]  # namespace, program, fork group


def _group(request: Request) -> _Group | None:
    schedule = request.schedule
    return (request.namespace, schedule.program_id, schedule.fork_group) if schedule.fork_group else None


def _shared(tokens: NDArray[np.int32], of: Request, request: Request) -> int:
    """Returns how many of `tokens`, the first ones of a request, another one would find in the tree."""
    return shared_length(tokens, of.schedule.private, request.tokens, request.schedule.private)


class ForkSiblings:
    """Admits branches of one fork together: when one is admitted, its waiting siblings are called, that is, put next.

    The program continues only when its last branch has ended, so one waiting branch delays all of them. Calls are
    remembered across steps: a step may be full before the last sibling is in.

    A call must keep the depth-first order that makes longest prefix first optimal (Theorem 3.1). The siblings diverge
    from the path of the admitted branch at some depth; all requests that diverge from it deeper are called with them:

        S ─┬─ branch 1, admitted ─┬─ …
           │                      └─ another request: called too, and goes first (it shares more than S)
           ├─ branch 2: called
           └─ branch 3: called              a request elsewhere with a longer match waits until they are in

    A later call precedes an earlier one. While called requests wait, every admission also calls the requests that
    diverge from its path deeper than they do. Otherwise the call would leave a subtree before it is finished.
    """

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}  # number → turn; smaller goes first, 0: not called
        self._calls = 0
        self._groups: dict[_Group, list[Request]] = {}

    def begin(self, waiting: Collection[Request]) -> None:
        """Prepares for a new order over `waiting`."""
        self._groups.clear()
        self.join(waiting)
        if self._turns:
            here = {request.number for request in waiting}
            self._turns = {number: turn for number, turn in self._turns.items() if number in here}

    def join(self, arrived: Collection[Request]) -> None:
        """Adds requests to the order."""
        for request in arrived:
            group = _group(request)
            if group is not None:
                self._groups.setdefault(group, []).append(request)

    def turn(self, request: Request) -> int:
        return self._turns.get(request.number, 0)

    def call(
        self,
        admitted: Request,
        tokens: NDArray[np.int32],
        left: Mapping[int, Request],
        cached: Mapping[int, int],
    ) -> list[Request]:
        """Calls requests of `left` now that the admitted request's `tokens` are in the tree, and returns them.

        Both mappings are keyed by request number; `cached` is up to date.
        """
        group = _group(admitted)
        siblings = [request for request in self._groups.get(group, ()) if request.number in left] if group else []
        namespace = admitted.namespace
        before = [left[number] for number in self._turns if number in left and left[number].namespace == namespace]
        if not siblings and not before:
            return []
        depth = min(_shared(tokens, admitted, request) for request in (*siblings, *before))
        names = {sibling.number for sibling in siblings}
        deeper = [
            request
            for number, request in left.items()
            if number not in names
            and cached[number] > depth
            and request.namespace == namespace
            and _shared(tokens, admitted, request) > depth
        ]
        self._calls += 1
        called = siblings + deeper
        self._turns.update((request.number, -self._calls) for request in called)
        return called


MOST_PROGRAMS = 4_096  # whose usage is counted; the one whose rows ran longest ago is forgotten


class ProgramUsage:
    """Counts the rows run for every program: computed prompt tokens and generated ones.

    Of two requests with equally long cached prefixes, the one whose program has less usage goes first. So a program of
    one call does not wait for all 64 branches of another program with the same prefix.

    A request without a program counts as a program of its own with no usage.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, str], int] = OrderedDict()  # (salt, program)

    def add(self, request: Request, rows: int) -> None:
        program = request.schedule.program_id
        if not program:
            return
        name = (request.schedule.salt, program)
        self._rows[name] = self._rows.get(name, 0) + rows
        self._rows.move_to_end(name)
        if len(self._rows) > MOST_PROGRAMS:
            self._rows.popitem(last=False)

    def rows(self, request: Request) -> int:
        """Rows run for the request's program so far."""
        return self._rows.get((request.schedule.salt, request.schedule.program_id), 0)


class CriticalPath:
    """Orders the waiting calls of one program: longest remaining critical path first.

    A program knows its graph: after one branch of a fork a long text may follow, after seven others nothing. If not all
    branches fit at once, the long one should not start last. `Schedule.ahead` holds that length. It affects only the
    program's own order: its waiting calls exchange their places in the order of arrival among themselves.

        arrival          1 P   2 P   3 Q   4 P           ahead of P's calls: 10, 20, 90
        places           4     2     3     1             P still has places 1, 2 and 4, and Q its own

    So no other program gains or loses a place, whatever a program claims to have ahead. Aged requests are ordered by
    their true arrival. Places are kept across steps: an admitted call keeps its place, and no waiting call gets it.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # number → place, of calls that exchanged theirs

    def arrange(self, waiting: Sequence[Request]) -> Mapping[int, int]:
        """Returns number → place (a number of arrival), for calls of programs that set `Schedule.ahead`."""
        programs: dict[tuple[str, int, str], list[Request]] = {}
        for request in waiting:
            schedule = request.schedule
            if schedule.program_id:
                programs.setdefault((schedule.salt, schedule.priority, schedule.program_id), []).append(request)
        before, self._places = self._places, {}
        for requests in programs.values():
            if any(request.schedule.ahead or request.number in before for request in requests):
                places = sorted(before.get(request.number, request.number) for request in requests)
                in_order = sorted(requests, key=lambda request: (-request.schedule.ahead, request.number))
                self._places.update((request.number, place) for request, place in zip(in_order, places, strict=True))
        return self._places


# ((−priority, not aged), oldest of the namespace, turn of a called sibling, −cached, usage of the program, place,
# number)
_Key = tuple[PriorityKey, int, int, int, int, int, int]


class LongestPrefix:
    """Orders by longest cached prefix, while admissions make prefixes longer (the paper's section 3).

    Every admission may put tokens into the tree that lengthen another request's prefix. The order visits the radix tree
    of the waiting requests depth first, which is optimal (Theorem 3.1). Namespaces are ordered by their oldest waiting
    request, so the order of answers reveals nothing about what another salt or private namespace has cached.

    Args:
        waiting: oldest first.
        rest: requests outside the window, oldest first: they come last, by arrival.
        places: number → place in the order of arrival, of requests that exchanged theirs.
        most: requests that it has at most.
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
        most: int,
    ) -> None:
        self._peek = peek
        self._most = most
        self._rest = list(reversed(rest))
        self._ageing = ageing
        self._counters = counters
        self._siblings = siblings
        self._usage = usage
        self._places = places
        self._oldest: dict[tuple[int, str], int] = {}  # (priority, namespace) → number
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
            self._oldest.setdefault((schedule.priority, request.namespace), request.number)
            self._place(request, peek(request))

    def extend(self, arrived: Sequence[Request]) -> bool:
        if self._rest or self._places or len(self._left) + len(arrived) > self._most:
            return False
        for request in arrived:
            schedule = request.schedule
            oldest = self._oldest.setdefault((schedule.priority, request.namespace), request.number)
            if schedule.ahead or request.number < oldest:
                return False
        self._siblings.join(arrived)
        for request in arrived:
            self._left[request.number] = request
            self._place(request, self._peek(request))
        return True

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
        self._bring_forward(request, tokens)
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
        oldest = self._oldest[schedule.priority, request.namespace]
        turn, usage = self._siblings.turn(request), self._usage.rows(request)
        place = self._places.get(number, number)
        return (self._ageing.key(request), oldest, turn, -self._cached[number], usage, place, number)

    def _bring_forward(self, admitted: Request, tokens: NDArray[np.int32]) -> None:
        """Updates the cached lengths of requests that share more with `tokens` than they had cached."""
        salt = admitted.schedule.salt
        for cached in {length for _, length, _ in self._followers if length < len(tokens)}:
            for other in self._followers.pop((salt, cached, int(tokens[cached])), ()):
                if other.number in self._left:
                    self._place(other, max(cached, _shared(tokens, admitted, other)))

    def _overtakes(self, key: _Key) -> bool:
        """Returns whether an older request would have been next if usage of programs did not count."""
        equal, place = key[:4], key[-2]
        entries = (self._pushed[other] for other in self._left)
        return any(other[-2] < place and other[:4] == equal for other in entries)


class FixedOrder:
    """Keeps its order after admissions."""

    def __init__(self, in_order: Sequence[Request], ageing: Ageing) -> None:
        self._left = list(reversed(in_order))
        self._ageing = ageing

    def next(self) -> Request | None:
        return self._left.pop() if self._left else None

    def extend(self, arrived: Sequence[Request]) -> bool:
        del arrived  # making it anew costs little
        return False

    def admitted(self, request: Request) -> None:
        self._ageing.admitted(request)


class AdmissionPolicy:
    """Makes the orders of one scheduler."""

    def __init__(self, config: SchedulerConfig, peek: Peek, counters: Counters) -> None:
        self.usage = ProgramUsage()
        self._config = config
        self._peek = peek
        self._counters = counters
        self._siblings = ForkSiblings()
        self._critical_path = CriticalPath()

    def order(self, waiting: Sequence[Request], now: float) -> Order:
        """Makes the order of a step, by priority first. Requests outside the window come last, by arrival."""
        oldest_first = sorted(waiting, key=lambda request: request.rank)
        ageing = Ageing(now - self._config.max_wait, self._counters)
        match self._config.policy:
            case PolicyName.FCFS:
                return FixedOrder(oldest_first, ageing)
            case PolicyName.LPM:
                window = oldest_first[: self._config.policy_window]
                return LongestPrefix(
                    window,
                    oldest_first[self._config.policy_window :],
                    self._peek,
                    ageing,
                    self._counters,
                    siblings=self._siblings,
                    usage=self.usage,
                    places=self._critical_path.arrange(window),
                    most=self._config.policy_window,
                )
            case _:
                assert_never(self._config.policy)
