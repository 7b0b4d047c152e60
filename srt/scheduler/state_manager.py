"""Manages the recurrent states of requests: the slot of each running one, and the snapshots that it takes and uses.

A state cannot be cut, so a request goes on from the deepest snapshot on its cached prefix, and computes what follows
again. Keys that the tree has are read, not written, in these rows.

    tree        root ───────── A ●──────── fork ──┬── B ●          ● a node with a snapshot
                                                  └── C            B goes on from its own, C from A's
    of C        [─ from A's ─][── computed again ─]●[─ new ─       and leaves one at the fork

Snapshots are taken

    at forks        where another request, waiting or in its prompt, goes another way or starts to need logits; and
                    where a request stops to compute again what is cached
    at marks        of explicit caching
    at intervals    of long prompts: every `stride` tokens, times a power of two, so that one prompt takes a quarter of
                    the slots at most
    at ends         of texts, hints and retracted requests: their slot becomes the snapshot, without a copy

A step computes runs of rows (`batch.StateRuns`): each goes from the state in one slot to that in another. Saving and
restoring are such runs, not copies of their own. They take effect in the order in which requests are planned, like the
tokens that enter the tree when they are planned: a request may begin with a snapshot that an earlier one takes in the
same step.

Guesses (guesses.py) are runs of their own, because only the checked text says how many of them hold. After each run, of
one guess where there are slots enough and of four at most, the state is kept. The request goes on from the last state
that only right ones have led to, and computes those after it again.
"""

from collections.abc import Iterable, Sequence

from ..cache.radix_cache import RadixCache, RadixNode, ascend, shared_length
from ..cache.state_slots import StateSlots
from ..core.batch import StateRun
from ..core.instruments import Counters
from .policy import SchedulerConfig
from .request import Choosing, Request, RequestState, Scoring

_PROMPT_SHARE = 4  # the snapshots at intervals of one prompt are at most this part of the slots
_GUESS_SHARE = 8  # and the states after guesses, but for one
_MOST_AGAIN = 4  # guesses for each slot: of right ones, one less at most are computed again


class StateManager:
    """Owns the slots of states. KVManager calls it, which owns the tree."""

    def __init__(self, slots: StateSlots, cache: RadixCache, config: SchedulerConfig, counters: Counters) -> None:
        self.slots = slots
        self._cache = cache
        self._counters = counters
        self._stride = config.snapshot_stride
        self._gap = config.snapshot_gap
        self._guessed = 0  # slots of guesses in this step

    def begin_step(self) -> None:
        """Notes that a step is planned: no guess has a slot."""
        self._guessed = 0

    # ------------------------------------------------------------------------------------------ a request

    def reusable(self, request: Request) -> int:
        """Returns the number of tokens of an opened request after which a snapshot lets it go on; 0: there is none."""
        best = _deepest(request)
        return 0 if best is None else best[1]

    def begin(self, request: Request) -> bool:
        """Gives an opened request a slot, and the deepest snapshot on its path; False: no slot is free."""
        assert request.state is None, "a request begins once"
        state = RequestState()
        self._deepen(request, state)
        slot = self.slots.allocate()
        if slot is None and state.node is not None:
            slot = self.slots.take_over(state.node)
            state.node = state.node if slot is None else None
        if slot is None:
            self._unlock(state)
            return False
        state.slot = slot
        request.state = state
        self._counters.snapshot_hits += state.position > 0
        return True

    def seek(self, request: Request) -> int:
        """Moves the request to a deeper snapshot that others have left meanwhile; returns the position of its state."""
        state = request.state
        assert state is not None, "it runs"
        self._counters.snapshot_hits += self._deepen(request, state)
        return state.position

    def run(self, request: Request, end: int, known: int, others: Iterable[Request]) -> tuple[StateRun, ...]:
        """Plans the runs of the request's rows up to `end`, with the snapshots that they leave.

        Args:
            known: tokens that had keys before; the rows of these compute them again.
            others: requests that may share tokens with it.
        """
        state = request.state
        assert state is not None, "it runs"
        assert state.position == request.computed, "a state takes every token once"
        runs: list[StateRun] = []
        start, source, last = state.position, state.source, state.node
        for place in [] if request.decoding else self._places(request, state, end, known, others):
            node = self._node_at(request, place)
            slot = None if node.state else self.slots.allocate_spare()
            if slot is None:
                continue
            self.slots.put(node, slot)
            last = node
            self._counters.snapshots_taken += 1
            runs.append(StateRun(place - start, source, slot))
            start, source = place, slot
        self._unlock(state)
        if start < end:
            runs.append(StateRun(end - start, source, state.slot))
            state.source = state.slot
        else:  # the state after the last row is that of the snapshot alone
            assert last is not None, "a request has rows to run"
            state.source, state.node = source, last
            self.slots.lock(last)
        state.position = end
        return tuple(runs)

    def guess(self, request: Request, count: int, used: set[int]) -> tuple[StateRun, ...]:
        """Plans runs of `count` guessed tokens after the planned rows, each into a slot of its own.

        There are fewer guesses where few slots are left: all those of a step have an eighth of them at most.

        Args:
            used: slots of the runs of this step, which are executed in the order of their requests. Those of the
                guesses are added.
        """
        state = request.state
        assert state is not None, "it runs"
        assert not state.guessed, "the guesses of one step at a time"
        slots: list[int] = []
        while len(slots) < count and self._guessed < max(1, self.slots.total // _GUESS_SHARE):
            slot = self.slots.allocate_apart(used)
            if slot is None:
                break
            self._guessed += 1
            slots.append(slot)
            used.add(slot)
        runs: list[StateRun] = []
        source, position, end = state.source, state.position, state.position + min(count, len(slots) * _MOST_AGAIN)
        for left, slot in zip(range(len(slots), 0, -1), slots, strict=True):
            rows = -(-(end - position) // left)
            runs.append(StateRun(rows, source, slot))
            source, position = slot, position + rows
            state.guessed.append((position, slot))
        return tuple(runs)

    def advance(self, request: Request, position: int) -> None:
        """Moves the state over guesses that were right, up to the first `position` tokens or not so far."""
        state = request.state
        assert state is not None, "it runs"
        right = [kept for kept in state.guessed if kept[0] <= position]
        if not right:
            return
        self._unlock(state)
        for slot in (state.slot, *(slot for _, slot in right[:-1])):
            self.slots.release(slot)
        state.position, state.slot = right[-1]
        state.source = state.slot
        del state.guessed[: len(right)]

    def settle_guesses(self, request: Request) -> None:
        """Frees the slots of guesses that were wrong. Rows after the state are to be computed again."""
        if request.state is not None:
            self._drop_guesses(request.state)
            request.computed = request.state.position

    def end(self, request: Request) -> None:
        """Ends the use of a state. That of a request whose computed tokens are in the tree becomes a snapshot."""
        state = request.state
        if state is None:
            return
        self._drop_guesses(state)
        useful = state.position >= self._gap and not isinstance(request.job, Scoring)
        if useful and request.tree_length >= state.position:
            node = self._node_at(request, state.position)
            if not node.state:
                assert state.source == state.slot, "a snapshot that it goes on from is there"
                self.slots.put(node, state.slot)
                self._counters.snapshots_taken += 1
                request.state = None
                return
        self.release(request)

    def release(self, request: Request) -> None:
        """Frees the slot of a request; its state may be wrong."""
        state = request.state
        if state is not None:
            self._unlock(state)
            self._drop_guesses(state)
            self.slots.release(state.slot)
            request.state = None

    def check(self, running: Sequence[Request]) -> None:
        """Checks that all slots have one owner, and that states are where their requests are.

        Raises:
            IntegrityError: says what contradicts what.
        """
        states = [request.state for request in running if request.state is not None]
        held = [slot for state in states for slot in (state.slot, *(slot for _, slot in state.guessed))]
        self.slots.check(held, [state.node for state in states if state.node is not None])

    # ------------------------------------------------------------------------------------------ inside

    def _drop_guesses(self, state: RequestState) -> None:
        for _, slot in state.guessed:
            self.slots.release(slot)
        state.guessed.clear()

    def _unlock(self, state: RequestState) -> None:
        if state.node is not None:
            self.slots.unlock(state.node)
            state.node = None

    def _deepen(self, request: Request, state: RequestState) -> bool:
        """Lets a state begin at the deepest snapshot on the request's path, if that lies after its position."""
        best = _deepest(request)
        if best is None or best[1] <= state.position:
            return False
        self._unlock(state)
        state.node, state.position = best
        state.source = state.node.state
        self.slots.lock(state.node)
        self.slots.use(state.node)
        return True

    def _node_at(self, request: Request, place: int) -> RadixNode:
        """Returns the node that ends after the first `place` tokens of a request, which the tree has."""
        match = self._cache.match(request.tokens[:place], request.schedule.salt, request.schedule.private)
        assert match.length == place, "the request's lock holds its path"
        return match.node

    def _places(
        self, request: Request, state: RequestState, end: int, known: int, others: Iterable[Request]
    ) -> list[int]:
        """Returns the positions before `end` at which to take snapshots, ascending, none close after another."""
        first, prompt = request.first_logit_row, request.prompt_length
        places = {mark.length for mark in request.marks or ()}
        places.update(_fork(request, other) for other in others)
        if known > request.computed:
            places.add(min(known, first))
        if isinstance(request.job, Choosing):
            places.add(first)  # nodes of later rounds go on there
        stride = self._stride
        while prompt > stride * max(1, self.slots.total // _PROMPT_SHARE):
            stride *= 2
        places.update(range(stride, prompt + 1, stride))
        begins = state.position == 0 or state.node is not None  # there is a snapshot where it goes on from
        last = state.position if begins else -self._gap
        limit = min(end, request.tree_length)
        chosen: list[int] = []
        for place in sorted(places):
            if state.position < place <= limit and place >= max(last, 0) + self._gap:
                chosen.append(place)
                last = place
        return chosen


def _deepest(request: Request) -> tuple[RadixNode, int] | None:
    """Returns the last snapshot on the request's path from which its next rows can go on, and its position."""
    match = request.match
    assert match is not None, "it is open"
    most = min(request.kv_length, request.first_logit_row)
    end = match.length
    for node in ascend(match.node):
        if node.state and end <= most:
            return node, end
        end -= len(node.tokens)
    return None


def _fork(request: Request, other: Request) -> int:
    """Returns the number of tokens that the rows of two requests have in common, and need no logits of."""
    left, right = request.schedule, other.schedule
    if other is request or left.salt != right.salt:
        return 0
    return min(shared_length(request.tokens, left.private, other.tokens, right.private), other.first_logit_row)
