"""Manages the slots of requests: the pool and the radix tree as one request sees them.

Every change of a slot's owner goes through here: found in the tree, allocated, handed to the tree, released.

    open     lock the cached prefix              place    give the request slots for its next rows
    advance  lock what was cached since          adopt    hand private slots to the tree
    close    hand over what is computed, free the rest, unlock

A decoding request allocates a run of slots ahead, for its next tokens: with one slot at a time, in turns with all other
requests, its keys would lie scattered. Spare slots are private, and are taken back before a request is retracted.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...lang.runtime_options import SAVE_SECONDS, most_of_salt
from ...lang.status import PoolGauges, TreeNode, TreeSurvey
from ..cache.block_cache import BlockCache, BlockPool
from ..cache.prefix_cache import PrefixCache, SlotPool
from ..cache.radix_cache import Match, RadixCache, RadixRoot
from ..cache.slot_allocator import IntegrityError, SlotAllocator, Slots
from ..cache.state_slots import StateSlots
from ..cache.tree_journal import TreeJournal
from ..cache.window_slots import WindowSlots
from ..core.batch import PagePart, StateRun, WindowPool
from ..core.instruments import Clock, Counters, FaultHook, Stopwatch
from ..core.messages import EngineMark
from ..tiers.names import PAGE_TOKENS
from ..tiers.tier import Payload
from .page_cache import PageCache
from .page_loads import PageLoad
from .policy import SchedulerConfig
from .request import Generation, Prefilling, Request
from .state_manager import StateManager
from .window_manager import WindowManager


@dataclass(slots=True)
class _Pin:
    match: Match
    seconds: float  # it ends so long after its last use
    ends: float  # on the clock
    used: int  # last use of its last node, as read by the latest `renew`


@dataclass(slots=True)
class _Keep:
    match: Match
    ends: float  # on the clock


class Pins:
    """Pins prefixes: keeps them from eviction for a time, also while no request uses them. Oldest first.

        put ───▶ pinned ─┬─ release     its client no longer needs it
        (a hint)         ├─ expire      it was not used for its number of seconds
                         ├─ give_way    the oldest, when a request finds no room, or pins hold too much
                         └─ forget      the tree was emptied

        keep ──▶ kept ───┬─ release     its time is over by the gateway's ledger, or its caller no longer needs it
        (explicit        ├─ expire      neither renewed nor released for its number of seconds
         caching)        └─ forget      the tree was emptied

    A pin of a hint never takes slots that a request needs. When a running request would have to be retracted, or a
    waiting one cannot be admitted, the oldest pin ends, and its tokens are evicted like all others.

    A kept prefix never gives way, so no request may ever need its slots. Law: for every request of any length up to
    `longest` (RequestFactory), longest + kept ≤ pool, because `keep` refuses what would break most_kept ≤ pool −
    longest. Then no request waits or is retracted for ever:

        waiting     The running requests drain (policy.Ageing). Then only kept nodes and the request's own path are
                    held. At least pool − kept ≥ longest slots serve the path and what the request misses, so
                    `Planner._has_room` is true as soon as the pins of hints have given way.
        running     `Planner._ensure_room` retracts all others before the request of the highest rank. It then has the
                    same pool − kept ≥ longest slots, so it advances in every step and ends.

    Other rules were simulated with two salts, one of which keeps prefixes, in a pool as long as the context. Of 410
    requests of the other salt 369 never ended without a rule. Refusing at admission what does not fit into pool − kept
    refused 207 because of another salt's caches, and 92 that had been admitted earlier never ended. Lowering `longest`
    to pool − share, wherever prefixes may be kept, refused 170, also where none is ever kept. The rule taken refuses
    none; its price is that a pool keeps nothing unless it is longer than the context.

    Args:
        cache: the tree.
        most_tokens: the limit for pins and kept prefixes together; tokens that they share count once.
        most_kept: the limit for kept prefixes alone, at most `most_tokens`.
        most_of_salt: the limit for those of one salt.
    """

    def __init__(
        self, cache: PrefixCache, counters: Counters, most_tokens: int, most_kept: int, most_of_salt: int
    ) -> None:
        self._cache = cache
        self._counters = counters
        self._most_tokens = most_tokens
        self.most_kept = most_kept
        self._most_of_salt = most_of_salt
        self._pins: dict[int, _Pin] = {}
        self._kept: dict[int, _Keep] = {}
        self._kept_until = math.inf  # no kept prefix ends before
        self._lost: list[int] = []  # kept prefixes that ended without a release, to be reported

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def matches(self) -> Iterator[Match]:
        return (pin.match for pin in self._pins.values())

    @property
    def kept(self) -> Iterator[Match]:
        return (keep.match for keep in self._kept.values())

    @property
    def keeps(self) -> int:
        """The number of kept prefixes."""
        return len(self._kept)

    def keep(self, number: int, match: Match, *, seconds: float, now: float) -> bool:
        """Keeps the tokens of `match`, which the caller has locked. Pins of hints give way to it.

        False: kept prefixes would hold more than they may, or it covers no token; then nothing changes.

        Args:
            seconds: it ends so long after `now`, or after the last `prolong`.
        """
        assert number not in self._kept, "a mark is placed once"
        more = self._cache.unkept(match)
        too_much = self._cache.kept_tokens + more > self.most_kept
        if not match.length or too_much or match.node.root.kept_tokens + more > self._most_of_salt:
            self._counters.keeps_refused += 1
            return False
        self._cache.keep(match)
        self._kept[number] = _Keep(match, now + seconds)
        self._kept_until = min(self._kept_until, now + seconds)
        self._counters.keeps_placed += 1
        while self._cache.pinned_tokens > self._most_tokens:
            self.give_way()
        return True

    def prolong(self, number: int, *, seconds: float, now: float) -> None:
        """Lets a kept prefix end `seconds` from now at the earliest; nothing for one that has ended."""
        if number in self._kept:
            self._kept[number].ends = max(self._kept[number].ends, now + seconds)

    def take_lost(self) -> list[int]:
        """Returns the numbers of kept prefixes that ended without a release since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def put(self, number: int, match: Match, *, seconds: float, now: float) -> None:
        """Pins the tokens of `match`, which the caller has locked. Older pins give way if together they hold too much.

        A pin that does not fit into the limit next to what is kept, or covers no token, is refused and counted as
        refused.
        """
        assert number not in self._pins, "a message pins once"
        if not match.length or self._cache.kept_tokens + self._cache.unkept(match) > self._most_tokens:
            self._counters.pins_refused += 1
            return
        self._cache.pin(match)
        self._pins[number] = _Pin(match, seconds, now + seconds, match.last_use)
        self._counters.pins_placed += 1
        while self._cache.pinned_tokens > self._most_tokens:
            self.give_way()

    def release(self, number: int) -> None:
        """Ends a pin or a kept prefix, unless it has already ended."""
        if number in self._pins:
            self._remove(number)
            self._counters.pins_released += 1
        elif number in self._kept:
            self._end_keep(number)
            self._counters.keeps_released += 1

    def expire(self, now: float) -> None:
        """Ends the pins and kept prefixes whose time is over. Called before a step."""
        for number in [number for number, pin in self._pins.items() if now >= pin.ends]:
            self._remove(number)
            self._counters.pins_expired += 1
        if now < self._kept_until:
            return
        for number in [number for number, keep in self._kept.items() if now >= keep.ends]:
            self._end_keep(number)
            self._counters.keeps_expired += 1
            self._lost.append(number)
        self._kept_until = min((keep.ends for keep in self._kept.values()), default=math.inf)

    def renew(self, now: float) -> None:
        """Restarts the time of pins that the step has used. Called after a step."""
        for pin in self._pins.values():
            if pin.used != pin.match.last_use:
                pin.used, pin.ends = pin.match.last_use, now + pin.seconds

    def give_way(self, salt: RadixRoot | None = None) -> bool:
        """Ends the oldest pin of a hint, or of one salt's; False: there is none. Kept prefixes stay."""
        pins = (number for number, pin in self._pins.items() if salt is None or pin.match.node.root is salt)
        oldest = next(pins, None)
        if oldest is None:
            return False
        self._remove(oldest)
        self._counters.pins_given_way += 1
        return True

    def drop(self) -> None:
        """Ends all pins and kept prefixes."""
        for pin in self._pins.values():
            self._cache.unpin(pin.match)
        for keep in self._kept.values():
            self._cache.end_keep(keep.match)
        self.forget()

    def forget(self) -> None:
        """Forgets all pins and kept prefixes, after the tree was forgotten."""
        self._counters.pins_lost += len(self._pins)
        self._counters.keeps_lost += len(self._kept)
        self._lost += self._kept
        self._pins.clear()
        self._kept.clear()
        self._kept_until = math.inf

    def _remove(self, number: int) -> None:
        self._cache.unpin(self._pins.pop(number).match)

    def _end_keep(self, number: int) -> None:
        self._cache.end_keep(self._kept.pop(number).match)


_NO_SLOTS: Slots = np.empty(0, dtype=np.int32)
_LONGEST_RUN = 64  # slots taken ahead: taking some costs a step as much as planning ten rows
_PAGES_AT_ONCE = 8  # of a load; window layers have room for so many beyond what they keep
_GUESS_SHARE = 4  # the slots of one text's guesses are at most this part of what is free or evictable
_SPARE_SHARE = 16  # all spare slots together are at most this part of the pool


class KVManager:
    """Owns pool and tree together; free + tree + private = total at any time between its calls.

    The same law as for the pool holds for the share of each salt, in slots of that salt alone: its kept prefixes leave
    room for one sequence, its pins give way, and its request of the highest rank may take all of the share.

    Attributes:
        tree: the cache, unless it is one of blocks.
        most_of_salt: slots that one salt may own.
        limited: these are fewer than all.
        states: manages recurrent states; None: the model has none.
        windows: manages the slots of window layers; None: they have none of their own.
        journal: has the changes of the tree that are not told yet; None: they are not told.
        drafted: slots of which a draft has the keys (draft_model.py); None: there is no draft.
        longest: tokens of the longest sequence: those of the context, as far as the share of a salt holds them. Kept
            prefixes leave room for one.
    """

    def __init__(
        self,
        num_slots: int,
        config: SchedulerConfig,
        counters: Counters,
        clock: Clock,
        faults: FaultHook,
        *,
        context_length: int,
        num_states: int = 0,
        window_pool: WindowPool | None = None,
        pages: Callable[[WindowSlots | None, Callable[[Slots], bool]], PageCache] | None = None,
    ) -> None:
        window_slots = None if window_pool is None else WindowSlots(num_slots, window_pool)
        slots = StateSlots(num_states) if num_states else None
        self.pool: SlotPool
        self.cache: PrefixCache
        self.tree: RadixCache | None = None
        self.states: StateManager | None = None
        self.journal: TreeJournal | None = None
        if config.block_cache:
            refused = num_states or window_pool or config.salt_share < 1
            assert not refused, "_check_block_cache of launch.py"
            self.pool = blocks = BlockPool(num_slots, config.block_cache, faults)
            self.cache = BlockCache(blocks)
        else:
            self.pool = allocator = SlotAllocator(num_slots, faults, window_slots)
            by_salt = most_of_salt(config.salt_share, allocator.total) < allocator.total
            self.journal = TreeJournal() if config.cache_events else None
            self.cache = self.tree = RadixCache(allocator, by_salt=by_salt, states=slots, listener=self.journal)
            self.states = None if slots is None else StateManager(slots, self.tree, config, counters)
        self.most_of_salt = most_of_salt(config.salt_share, self.pool.total)
        self.limited = self.most_of_salt < self.pool.total
        self.longest = min(context_length, self.most_of_salt)
        share = int(config.pin_share * self.pool.total)
        most_kept = min(share, self.pool.total - self.longest)
        self.pins = Pins(self.cache, counters, share, most_kept, self.most_of_salt - self.longest)
        self.windows: WindowManager | None = None
        if window_slots is not None:
            self.windows = WindowManager(window_slots, config, counters, lambda: (*self.pins.matches, *self.pins.kept))
        self.pages = None if pages is None else pages(window_slots, self._written)
        if self.pages is not None:
            assert self.tree is not None, "tiers have no blocks: RuntimeOptions"
            self.tree.before_eviction = self.pages.before_eviction
            if self.windows is not None:
                self.windows.margin = 2 * PAGE_TOKENS  # so that the pages around a window can be saved whole
        self.drafted: NDArray[np.bool_] | None = None
        self._planning = False
        self.tree_time = Stopwatch(clock)
        self._counters = counters
        self._reuse = config.radix_cache
        self._share_in_step = config.radix_cache and config.in_step_sharing
        self._run = max(1, min(_LONGEST_RUN, self.pool.total // (_SPARE_SHARE * config.max_running)))
        self._step = 0
        self._placed_in = np.zeros(num_slots, dtype=np.int64)  # slot → step that placed it
        self._by_hint = np.zeros(num_slots, dtype=np.bool_)  # slots that hints computed and no request has found yet

    @property
    def available(self) -> int:
        """Slots that can be allocated now: free ones, and those of the tree that no lock, pin or keep holds."""
        return self.pool.free + self.cache.evictable_tokens

    def narrow(self, request: Request, count: int) -> RadixRoot | None:
        """Returns the salt of an opened request where its share is what leaves too few slots for `count` more."""
        if not self.limited:
            return None
        salt = _root(request)
        return salt if salt.owned - salt.evictable_tokens + count > self.most_of_salt else None

    @property
    def gauges(self) -> PoolGauges:
        cache = self.cache
        return PoolGauges(
            total=self.pool.total,
            free=self.pool.free,
            cached=cache.total_tokens,
            pinned=cache.pinned_tokens,
            pins=len(self.pins),
            kept=cache.kept_tokens,
            window_total=0 if self.windows is None else self.windows.slots.total,
            window_free=0 if self.windows is None else self.windows.slots.free,
        )

    def survey(self, most: int, shown: int) -> tuple[TreeSurvey, list[list[int]]]:
        """Returns the tree, and the first `shown` tokens of each node."""
        nodes, now = self.cache.survey(most)
        numbers = {salt: _number_of(salt) for salt in {node.salt for node in nodes}}
        described = tuple(
            TreeNode(
                id=node.id,
                parent=None if node.parent is None or node.parent.is_root else node.parent.id,
                tokens=len(node.tokens),
                locks=node.locks,
                pins=node.pins,
                keeps=node.keeps,
                age=now - node.last_use,
                salt=numbers[node.salt],
            )
            for node in nodes
        )
        tokens = [node.tokens[:shown].tolist() for node in nodes] if shown else []
        return TreeSurvey(described, self.cache.node_count, self.gauges), tokens

    def begin_step(self) -> None:
        self._step += 1
        self._planning = True
        if self.windows is not None:
            self.windows.begin_step()
        if self.states is not None:
            self.states.begin_step()

    def end_plan(self) -> None:
        """Notes that the planned rows were launched, or that there are none."""
        self._planning = False

    def _written(self, slots: Slots) -> bool:
        """Returns whether all keys in `slots` were computed, or are by a step that was launched."""
        if not self._planning:
            return True
        if self.windows is not None and self.windows.attached_now(slots):
            return False
        return not (self._placed_in[slots] == self._step).any()

    def peek(self, request: Request) -> int:
        """Returns the number of cached tokens of a waiting request."""
        if not self._reuse:
            return 0
        schedule, seen = request.schedule, request.seen
        with self.tree_time:
            length = self.cache.peek(request.tokens, schedule.salt, schedule.private, seen)
        self._counters.resumed_peeks += seen.resumed
        return length

    # ---------------------------------------------------------------------------------------- requests

    def open(self, request: Request) -> None:
        """Finds and locks the cached prefix. Undo with `close`."""
        assert request.match is None, "a request is opened once"
        known = request.tokens if self._reuse else request.tokens[:0]
        with self.tree_time:
            match = self.cache.match(known, request.schedule.salt, request.schedule.private)
            self.cache.lock(match)
        self._take_match(request, match)
        if self.windows is not None:
            self.windows.open(request)

    def advance(self, request: Request) -> None:
        """Extends the match by what other requests have cached since, while this one was computing its prompt."""
        if not self._reuse or request.match is None or request.tree_length < request.kv_length:
            return  # private slots follow the match, so no slot of the tree can
        with self.tree_time:
            match = self.cache.advance(request.match, request.tokens, request.schedule.private)
            self.cache.move_lock(request.match, match)
        self._take_match(request, match)

    def skip_cached_rows(self, request: Request) -> None:
        """Skips rows whose keys are in the pool and whose logits are not needed.

        Only as far as a snapshot lets them, or a window that is whole.
        """
        following = min(request.kv_length, request.first_logit_row)
        if self.states is not None:
            following = self.states.seek(request)
        if following <= request.computed:
            return
        if self.windows is not None:
            following = self.windows.usable(request)
            if following <= request.computed:
                return
            self.windows.use(request, following)
        first = max(request.computed, request.reached)
        last = min(following, request.prompt_length)
        if first < last:
            found = request.slots(first, last)
            request.cached_tokens += last - first - self._claimed(request, found)
            self._counters.cached_tokens += last - first
            fresh = self._placed_in[found] == self._step
            self._counters.in_step_tokens += int(np.count_nonzero(fresh))
        request.computed = following
        request.reached = max(request.reached, following)

    def _claimed(self, request: Request, found: Slots) -> int:
        """Counts those of the slots that a hint computed, and that no request has found before: they count as computed
        by the first one, as a hint has no usage of its own."""
        if isinstance(request.job, Prefilling):
            return 0
        claimed = int(np.count_nonzero(self._by_hint[found]))
        if claimed:
            self._by_hint[found] = False
        return claimed

    def reusable(self, request: Request) -> int:
        """Returns the number of tokens of an opened request that need not be computed."""
        if self.windows is not None:
            return self.windows.usable(request)
        return request.kv_length if self.states is None else self.states.reusable(request)

    def window_fits(self, request: Request) -> bool:
        """Returns whether the windows of an opened request and of those that run fit together."""
        return self.windows is None or self.windows.fits(request, lambda other: self.missing(other, other.length))

    def most_rows(self, request: Request) -> int | None:
        """Returns the most rows of a request that can run in one step; None: any number that has slots."""
        return None if self.windows is None else self.windows.most_rows(request)

    def rows_that_fit(self, request: Request, end: int) -> int:
        """Returns the exclusive end of the rows up to `end` of a prompt for which there is room in window layers."""
        return end if self.windows is None else self.windows.rows_that_fit(request, end)

    def begin_state(self, request: Request) -> bool:
        """Gives an opened request its recurrent state; False: there is no slot for it."""
        with self.tree_time:
            return self.states is None or self.states.begin(request)

    def run_state(
        self, request: Request, end: int, known: int = 0, others: Iterable[Request] = ()
    ) -> tuple[StateRun, ...]:
        """Plans the recurrent state of rows up to `end`. Arguments as for `StateManager.run`."""
        if self.states is None:
            return ()
        with self.tree_time:
            return self.states.run(request, end, known, others)

    def guess_states(self, request: Request, count: int, used: set[int]) -> tuple[StateRun, ...]:
        """Plans the recurrent states of `count` guesses, or fewer. Arguments as for `StateManager.guess`."""
        assert self.states is not None, "the model has recurrent states"
        with self.tree_time:
            return self.states.guess(request, count, used)

    def advance_state(self, request: Request, position: int) -> None:
        """Moves the recurrent state over guesses that were right, up to `position` tokens or not so far."""
        if self.states is not None:
            self.states.advance(request, position)

    def settle_guess_states(self, request: Request) -> None:
        """Frees the recurrent states of guesses that were wrong. Rows after the state are to be computed again."""
        if self.states is not None:
            self.states.settle_guesses(request)

    def missing(self, request: Request, end: int) -> int:
        """Returns the number of slots to allocate before rows up to `end` can run."""
        return max(0, self._whole(end) - request.slot_end)

    def _whole(self, count: int) -> int:
        """Returns the slots that a request holds for so many tokens: a cache of blocks gives whole ones."""
        return -(-count // self.cache.page) * self.cache.page

    def has_slots(self, request: Request, count: int) -> bool:
        """Returns whether `count` slots for a request are free, or can be by eviction."""
        return count <= self.available and self.narrow(request, count) is None

    def make_room(self, request: Request, end: int, count: int) -> bool:
        """Evicts until `count` slots are free for a request; False if even an empty cache would leave too few.

        What its salt has too much goes first, then the leaves of all. Makes room in window layers, too, for all rows up
        to `end`.
        """
        if not self.has_slots(request, count):
            return False
        if self.windows is not None and not self.windows.make_room(request, end, count):
            return False
        self._evict_for(request, count)
        return True

    def _evict_for(self, request: Request, count: int) -> None:
        """Evicts until `count` slots are free for a request: so many are, or can be."""
        if self.limited and (excess := _root(request).owned + count - self.most_of_salt) > 0:
            with self.tree_time:
                self._counters.evicted_tokens += self.cache.evict_of(_root(request), excess)
        with self.tree_time:
            self._counters.evicted_tokens += self.cache.make_room(count)

    def allocate(self, request: Request, count: int) -> Slots:
        """Allocates `count` slots for a request, ascending. The caller has called `make_room`."""
        if not count:
            return _NO_SLOTS
        slots = self.pool.allocate(count)
        self._by_hint[slots] = False
        if self.drafted is not None:
            self.drafted[slots] = False
        _root(request).private_slots += count
        return slots

    def _release(self, request: Request, slots: Slots) -> None:
        """Frees private slots of a request."""
        self.pool.release(slots)
        _root(request).private_slots -= len(slots)

    def run_length(self, request: Request) -> int:
        """Returns the number of slots that a decoding request without a spare one allocates at once: as many as it may
        still need, but few when the pool is nearly full."""
        assert isinstance(request.job, Generation), "only generations decode"
        wanted = self._whole(min(self._run, request.job.sampling.max_tokens - request.generated))
        if self.windows is not None and wanted > self.windows.slots.free:
            return 1
        return wanted if self.has_slots(request, wanted * _SPARE_SHARE) else self.cache.page

    def take_ahead(self, request: Request) -> bool:
        """Gives a decoding request a run of spare slots, if so many are free now, and it follows tokens of its own."""
        if self.windows is not None or self.limited or request.tree_length == request.kv_length:
            return False
        wanted = self.run_length(request)
        if wanted > self.pool.free:
            return False
        request.set_slots(request.slot_end, self.allocate(request, wanted))
        request.slot_end += wanted
        return True

    def stretch(self, request: Request, count: int) -> int:
        """Returns for how many of the next `count` tokens there are spare slots; takes some where enough are left."""
        missing = count - (request.slot_end - request.kv_length)
        if missing > 0:
            missing = self._whole(missing)
            narrow = self.windows is not None and missing > self.windows.slots.free
            if not narrow and self.has_slots(request, missing * _GUESS_SHARE):
                self._evict_for(request, missing)
                request.set_slots(request.slot_end, self.allocate(request, missing))
                request.slot_end += missing
        return min(count, request.slot_end - request.kv_length)

    def place(self, request: Request, end: int, slots: Slots) -> int:
        """Places the keys of rows before `end` in the spare slots and in new ones after them.

        Returns the first row that writes to a slot of window layers, where these have slots of their own.

        Prompt tokens go into the tree at once: every layer stores its keys before it attends, so a request planned
        later in this step may already read them. Tokens after private ones do not: the tree may have received the same
        tokens since, and their slots would be written twice.
        """
        follows_tree = request.kv_length - request.tree_length < self.cache.page
        first_write = 0 if self.windows is None else self.windows.fill(request, end)
        if len(slots):
            request.set_slots(request.slot_end, slots)
            request.slot_end += len(slots)
        if self.windows is not None:
            self.windows.mark(request, end)
        if end <= request.kv_length:
            return first_write
        if not request.decoding:
            placed = request.slots(request.kv_length, end)
            self._placed_in[placed] = self._step
            if isinstance(request.job, Prefilling):
                self._by_hint[placed] = True
        request.kv_length = end
        if self._share_in_step and follows_tree and not request.decoding:
            self.adopt(request, end)
        return first_write

    def pin(self, request: Request, *, seconds: float, now: float) -> None:
        """Pins the request's tokens in the tree. Its rows have run, and it is still open."""
        assert request.match is not None, "what no request holds may be gone"
        if self.pages is not None:
            self.pages.want(request, request.length)
        whole = request.length - request.tree_length < self.cache.page  # without a tree nothing is
        self.pins.put(
            request.message_id, request.match if whole else Match(request.match.node, 0), seconds=seconds, now=now
        )

    def keep(self, request: Request, marks: Iterable[EngineMark], now: float) -> list[bool]:
        """Keeps the first tokens of the request up to each mark → whether each is kept.

        Their rows have run, and the request is still open.
        """
        placed = []
        for mark in marks:
            cached = mark.length - request.tree_length < self.cache.page  # not without a tree
            known = request.tokens[: mark.length if cached else 0]
            with self.tree_time:
                match = self.cache.match(known, request.schedule.salt, request.schedule.private)
            assert len(known) - match.length < self.cache.page, "the request's lock holds its path"
            placed.append(self.pins.keep(mark.id, match, seconds=mark.seconds, now=now))
            if self.pages is not None and placed[-1]:
                self.pages.want(request, mark.length)
        return placed

    def take_back_spare(self, requests: Iterable[Request]) -> bool:
        """Frees the spare slots of all requests; False: there were none."""
        found = False
        for request in requests:
            found |= request.slot_end > self._whole(request.kv_length)
            self._release_spare(request)
        return found

    def _release_spare(self, request: Request) -> None:
        end = self._whole(request.kv_length)
        if request.match is not None:
            self._release(request, request.slots(end, request.slot_end))
        request.slot_end = end

    def adopt(self, request: Request, end: int) -> None:
        """Hands private slots before `end` to the tree. Slots of tokens that the tree already has are freed."""
        if not self._reuse or request.match is None or request.tree_length >= end:
            return
        held = request.match
        tokens = request.tokens[:end]
        with self.tree_time:
            match = self.cache.advance(held, tokens, request.schedule.private)
            self.cache.move_lock(held, match)
            if match.length > held.length:
                own, cached = request.slots(held.length, match.length), match.slots(held.length)
                if self.windows is not None:
                    self.windows.slots.move(own, cached)
                self._release(request, own)
                request.set_slots(held.length, cached)
            if match.length < end:
                known = match.length
                own = request.slots(known, end)
                schedule = request.schedule
                match = self.cache.extend(
                    match, tokens[known:], own, borders=schedule.private, priority=schedule.priority
                )
                match.node.root.private_slots -= match.length - known
        request.match = match

    def close(self, request: Request) -> None:
        """Releases all slots of the request. What it has computed, or computes now, stays in the tree, evictable."""
        if request.match is None:
            return
        self.adopt(request, min(request.computed, request.kv_length, request.length))
        if self.pages is not None:
            self.pages.end(request)
        if self.windows is not None:
            self.windows.end(request)
        self._release(request, request.private_slots)
        with self.tree_time:
            if self.states is not None:
                self.states.end(request)
            self.cache.unlock(request.match)
        self.detach(request)

    def discard(self, request: Request) -> None:
        """Closes the request and removes its path from the tree, except for nodes that are held: its keys may be wrong.

        Other requests that have read wrong keys fail by themselves, and the last of them discards what is left.
        """
        if request.match is None:
            return
        if self.pages is not None:
            self.pages.distrust(request)
        self._release(request, request.private_slots)
        with self.tree_time:
            if self.states is not None:
                self.states.release(request)
            self.cache.unlock(request.match)
            self._counters.discarded_tokens += self.cache.discard(request.match)
        self.detach(request)

    def detach(self, request: Request) -> None:
        """Forgets the request's slots without releasing them (they were released, or the pool was cleared)."""
        if self.windows is not None:
            self.windows.detach(request)
        if self.pages is not None:
            self.pages.leave(request)
        request.match = request.state = None
        request.kv_length = request.slot_end = request.computed = 0

    def _take_match(self, request: Request, match: Match) -> None:
        if match.length > request.kv_length:
            self._release_spare(request)
            request.set_slots(request.kv_length, match.slots(request.kv_length))
            request.kv_length = request.slot_end = match.length
        request.match = match

    # ------------------------------------------------------------------------------------------ pages of tiers

    def load(self, request: Request) -> bool:
        """Looks in the tiers for the pages after the match of a request that was admitted; True: it waits for them."""
        if self.pages is None or not (self._reuse and self.pages.active):
            return False
        load = self.pages.admit(request, self.reusable(request))
        if load is None:
            return False
        if load.ended:
            self.receive(request, load)
        return not load.ended

    def receive(self, request: Request, load: PageLoad) -> None:
        """Puts the pages of a load into slots of a request that has waited for it, and hands them to the tree.

        The first request that receives a load takes all of it; the others find it in the tree.
        """
        assert self.pages is not None, "a load has begun"
        self.advance(request)
        first, end = request.kv_length, load.end * PAGE_TOKENS
        if first < load.first * PAGE_TOKENS or request.slot_end != first:
            return  # another one than began the load, which shares less
        while request.kv_length < end:
            page = request.kv_length // PAGE_TOKENS
            stop = min(end, (page + _PAGES_AT_ONCE) * PAGE_TOKENS)
            if not self._place_pages(
                request, stop, load.payloads[page - load.first : stop // PAGE_TOKENS - load.first]
            ):
                break
        if self.windows is not None:
            for page in load.wanted:
                self._place_window(request, page, load)
        if request.kv_length > first or load.windows:
            self._counters.loads += 1
            self.pages.arrived(load, request, first, request.kv_length)
            self.adopt(request, request.kv_length)
        load.windows.clear()

    def _place_pages(self, request: Request, end: int, payloads: Sequence[Payload]) -> bool:
        """Loads the tokens up to `end` into new slots; False: there is no room for them."""
        assert self.pages is not None, "a load has begun"
        start = request.kv_length
        count = end - start
        if not self.has_slots(request, count) or not (self.windows is None or self.windows.reserve(count)):
            return False
        self._evict_for(request, count)
        slots = self.allocate(request, count)
        if self.windows is not None:
            self.windows.slots.detach(slots)  # those that are needed come afterwards
        request.set_slots(start, slots)
        self.pages.port.load(slots, payloads, PagePart.TOKENS)
        request.kv_length = request.slot_end = end
        return True

    def _place_window(self, request: Request, page: int, load: PageLoad) -> None:
        """Loads a page of window layers, where it came and its tokens are here."""
        assert self.pages is not None, "a load has begun"
        assert self.windows is not None, "only then are there such pages"
        end = (page + 1) * PAGE_TOKENS
        payload = load.windows.get(page)
        if payload is None or end > request.kv_length:
            return
        slots = request.slots(end - PAGE_TOKENS, end)
        if self.windows.complete(slots):
            self.pages.port.load(self.windows.slots.of(slots), [payload], PagePart.WINDOWS)

    def save_rest(self, seconds: float = SAVE_SECONDS) -> None:
        """Saves what is worth it and was not saved, at the end of the engine, for at most `seconds`."""
        if self.pages is not None and self.tree is not None:
            self.pages.flush([node for _, node in self.tree.walk() if not node.children], seconds)

    # ------------------------------------------------------------------------------------------ whole

    def flush(self) -> int:
        """Ends all pins and kept prefixes, and evicts everything that no running request holds."""
        self.pins.drop()
        with self.tree_time:
            given = self.cache.clear()
        self._counters.evicted_tokens += given
        return given

    def clear(self) -> None:
        """Forgets everything; the caller detaches the running requests."""
        self.pool.clear()
        self.cache.forget()
        if self.states is not None:
            self.states.slots.clear()
        if self.pages is not None:
            self.pages.clear()
        self.pins.forget()

    def check_some(self) -> bool:
        """Runs a slice of `check` while no request runs; True: with it everything has been checked.

        Raises:
            IntegrityError: says what contradicts what.
        """
        complete = self.cache.check_some(self.pins.matches, self.pins.kept)
        if complete and self.states is not None:
            self.states.check([])
        return complete

    def check(self, running: Sequence[Request]) -> None:
        """Checks that free + tree + private = total, and that locks, pins and keeps are those of `running` and `pins`.

        Raises:
            IntegrityError: says what contradicts what.
        """
        held = [request.match for request in running if request.match is not None]
        self.cache.check(held, self.pins.matches, self.pins.kept)
        if self.states is not None:
            self.states.check(running)
        if self.windows is not None:
            self.windows.check(running)
        if self.pages is not None:
            self.pages.check(running)
        in_tree = self.cache.held_slots()
        self.pool.check(in_tree + [request.private_slots for request in running])
        private: Counter[RadixRoot] = Counter()
        for request in running:
            if request.match is not None:
                private[_root(request)] += len(request.private_slots)
        for salt in self.cache.salts:
            if salt.private_slots != private[salt] or salt.owned > self.most_of_salt:
                raise IntegrityError(
                    f"salt {salt.salt!r} owns {salt.owned} slots of {self.most_of_salt}, {salt.private_slots} of them "
                    f"private, and its requests have {private[salt]}"
                )


def _number_of(salt: str) -> int:
    """Returns the number of a namespace, which is the same in all engines and exact in a page's 64-bit floats."""
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=6).digest(), "little")


def _root(request: Request) -> RadixRoot:
    """Returns the salt of a request that is open."""
    assert request.match is not None, "it is open"
    return request.match.node.root
