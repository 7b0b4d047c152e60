"""Simulates replicas coarsely: real placement and one radix tree for all of them, steps in closed form.

A replica admits calls, computes prompts in chunks and decodes as the scheduler does, with three simplifications: steps
in which all sequences only decode are taken together, at their sum by the step model; placement learns at
once what a replica has cached; and room in the pool is estimated: nothing in the tree is locked.

    waiting ── longest prefix first ──▶ prompts ── a chunk in each step ──▶ decoding ── the next end ──▶ ended
"""

import heapq
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from ...lang.errors import ParameterError
from ...lang.prompt import Part
from ...lang.protocol import Origin, RequestTimes
from ..core.batch import StepShape
from ..placement.meta_tree import TOKEN_BYTES, packed
from ..placement.placement import Placement
from ..placement.policies import Placing
from ..tokenizer.prompt import PromptEncoder
from ..tokenizer.tokenizer import Tokenizer
from .answers import AnswerTokens, mix
from .calls import Answered, SimulatedCall
from .events import Events
from .exact import ReplicaShape
from .measurements import Measurements
from .step_model import StepModel
from .tiers import TierContents, TierModel, rooms_of

_HEADROOM = 8  # slots for each running sequence, as SchedulerConfig.headroom
_MAX_WAIT = 10.0  # seconds, as SchedulerConfig.max_wait
_WINDOW = 256  # as SchedulerConfig.policy_window


@dataclass(slots=True, eq=False)
class _Ask:
    """A call: its sequences, one or with choices several, and what is left of them."""

    number: int
    call: SimulatedCall
    placed: int  # its number in the placement
    sent: float
    then: Callable[[Answered], None]
    answer: tuple[int, ...]
    left: int  # sequences
    is_hint: bool = False
    prompt_tokens: int = 0
    admitted: float = -1.0
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence of a call.

    `most_cached`: tokens that may be found, at most: the rows after them are needed for their logits.
    `cached`: tokens found in the tree; while it waits, at the last look.
    """

    ask: _Ask
    order: int
    tokens: bytes
    length: int
    most_cached: int
    cached: int = 0
    rows: int = 0  # of the prompt that are still to compute
    prefix: bytes = b""  # the cached part, which is kept while it runs
    version: int = 0  # of its entry in the heap of those that wait
    taken: bool = False
    looked: int = 0  # evictions of the replica when `cached` was looked up


class _WaitingSequences:
    """The sequences that wait at a replica: the longest prefix first, those that waited too long before it."""

    def __init__(self) -> None:
        self._window: list[tuple[int, int, int, _Sequence]] = []  # (−cached, order, version, sequence)
        self._rest: deque[_Sequence] = deque()
        self._oldest: deque[_Sequence] = deque()
        self._followers: dict[tuple[int, bytes], list[_Sequence]] = {}  # (cached, next token) → sequences
        self._inside = 0  # of the window

    def __len__(self) -> int:
        return self._inside + len(self._rest)

    def add(self, sequence: _Sequence) -> None:
        self._oldest.append(sequence)
        if self._inside < _WINDOW:
            self._enter(sequence)
        else:
            self._rest.append(sequence)

    def first(self, now: float, held: Callable[[_Sequence], int]) -> _Sequence:
        """Returns the sequence that is admitted next. held: looks for its prefix in the tree."""
        while self._oldest[0].taken:
            self._oldest.popleft()
        if self._oldest[0].ask.sent <= now - _MAX_WAIT:
            return self._oldest[0]
        while True:
            _, _, version, sequence = self._window[0]
            if sequence.taken or version != sequence.version:
                heapq.heappop(self._window)
                continue
            cached = held(sequence)
            if cached >= sequence.cached:
                return sequence
            heapq.heappop(self._window)  # something of it was evicted
            self._push(sequence, cached)

    def take(self, sequence: _Sequence) -> None:
        """Removes a sequence that is admitted."""
        sequence.taken = True
        if sequence.version:
            self._inside -= 1
        else:
            self._rest.remove(sequence)  # an old one from outside of the window
        while self._rest and self._inside < _WINDOW:
            self._enter(self._rest.popleft())

    def admitted(self, tokens: bytes) -> None:
        """Brings forward those that share more with an admitted sequence than they had cached."""
        for cached in {length for length, _ in self._followers if length * TOKEN_BYTES < len(tokens)}:
            at = cached * TOKEN_BYTES
            for other in self._followers.pop((cached, tokens[at : at + TOKEN_BYTES]), ()):
                if not other.taken and other.cached == cached:
                    self._push(other, _shared(tokens, other.tokens, cached))

    def _enter(self, sequence: _Sequence) -> None:
        self._inside += 1
        self._push(sequence, sequence.cached)

    def _push(self, sequence: _Sequence, cached: int) -> None:
        sequence.cached, sequence.version = cached, sequence.version + 1
        heapq.heappush(self._window, (-cached, sequence.order, sequence.version, sequence))
        at = cached * TOKEN_BYTES
        if at < len(sequence.tokens):
            self._followers.setdefault((cached, sequence.tokens[at : at + TOKEN_BYTES]), []).append(sequence)


def _unpacked(tokens: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return ids


def _shared(left: bytes, right: bytes, start: int) -> int:
    """Returns how many tokens two sequences share that share the first `start` ones."""
    size = min(len(left), len(right))
    here = np.frombuffer(left, np.int32, size // TOKEN_BYTES)[start:]
    there = np.frombuffer(right, np.int32, size // TOKEN_BYTES)[start:]
    different = here != there
    first = int(different.argmax()) if len(different) else 0
    return start + (first if len(different) and different[first] else len(different))


class _CoarseReplica:
    """Runs the sequences of one replica: a step with rows of prompts at a time, decode steps many at a time."""

    def __init__(self, number: int, simulation: "CoarseSimulation") -> None:
        self.number = number
        self.busy = 0.0
        self.computed = 0  # tokens of prompts
        self._simulation = simulation
        self._events = simulation.events
        self._tree = simulation.tree
        self._settings, self._model = simulation.settings, simulation.model
        self._waiting = _WaitingSequences()
        self._prompts: deque[_Sequence] = deque()
        self._decoding: list[tuple[int, int, _Sequence]] = []  # (step after which it ends, order, sequence)
        self._steps = 0
        self._keys = 0  # that the sequences which decode attend to in the next step
        self._private = 0  # slots of answers, and of prompts that run, outside of shared prefixes
        self._prefixes: Counter[bytes] = Counter()  # cached parts of what runs
        self._prefix_tokens = 0
        self._loading = 0  # sequences of which a slower tier brings a part
        self._evictions = 0  # times that something was evicted
        self._turn = 0  # of the segment that runs; an older end of it does not count
        self._began: float | None = None  # when the segment of decode steps began; None: it may not be cut
        self._planned = 0  # decode steps of the segment
        self._running = False

    @property
    def _count(self) -> int:
        return len(self._prompts) + len(self._decoding) + self._loading

    def receive(self, sequences: list[_Sequence]) -> None:
        for sequence in sequences:
            sequence.looked = self._evictions
            self._waiting.add(sequence)
        self._wake()

    def _wake(self) -> None:
        """Sees to it that a step begins: something may run."""
        if not self._running:
            self._running = True
            turn = self._turn
            self._events.at(self._events.now, lambda: self._plan() if turn == self._turn else None)
        elif self._began is not None:
            self._cut()

    # ------------------------------------------------------------------ steps

    def _plan(self) -> None:
        """Starts the next step, or the next decode steps."""
        self._turn += 1
        turn, began = self._turn, self._events.now
        self._began = None
        rows, keys, parts = self._fill()
        decoding = len(self._decoding)
        if parts:
            shape = StepShape(rows + decoding, keys + self._keys, rows, len(parts) + decoding, len(parts) + decoding)
            seconds = self._model.seconds(shape)
            self._events.at(began + seconds, lambda: self._end_prompts(parts, seconds))
        elif decoding:
            self._planned = self._decoding[0][0] - self._steps
            self._began = began
            end = began + self._decode_seconds(self._planned)
            self._events.at(end, lambda: self._end_decoding() if turn == self._turn else None)
        else:
            assert self._loading or not len(self._waiting), "a sequence waits at a replica that has room"
            self._running = False

    def _fill(self) -> tuple[int, int, list[tuple[_Sequence, int]]]:
        """Chooses the rows of prompts of a step → how many, the keys they attend to, (sequence, rows)."""
        chunk = self._settings.chunk
        left = max(1, chunk - len(self._decoding)) if chunk is not None else 1 << 62
        parts: list[tuple[_Sequence, int]] = []
        total = keys = 0

        def add(sequence: _Sequence) -> None:
            nonlocal left, total, keys
            rows = min(left, sequence.rows)
            start = sequence.length - sequence.rows
            keys += rows * start + rows * (rows + 1) // 2
            left, total = left - rows, total + rows
            sequence.rows -= rows
            parts.append((sequence, rows))

        for sequence in self._prompts:
            if not left:
                break
            add(sequence)
        while left and len(self._waiting) and self._count < self._settings.max_running:
            sequence = self._waiting.first(self._events.now, self._held)
            sequence.cached = min(self._held(sequence), sequence.most_cached)
            fits = self._fits(sequence)
            if sequence.ask.is_hint and not (fits and self._worth_it(sequence)):
                self._waiting.take(sequence)
                self._simulation.ended(self.number, sequence.ask)
                continue
            if not fits:
                break
            self._waiting.take(sequence)
            loading = self._admit(sequence)
            if not loading:
                self._prompts.append(sequence)
                add(sequence)
        return total, keys, parts

    def _held(self, sequence: _Sequence) -> int:
        """Returns the tokens of a sequence that waits which are cached. Only evictions change what is known of it."""
        if sequence.looked == self._evictions:
            return sequence.cached
        sequence.looked = self._evictions
        lengths = self._tree.lengths(sequence.tokens, sequence.ask.call.origin.salt, replicas=self.number + 1)
        return int(lengths.held[self.number])

    def _fits(self, sequence: _Sequence) -> bool:
        if not self._count:
            return True
        needed = self._private + self._prefix_tokens + _HEADROOM * (self._count + 1) + sequence.length
        return needed <= self._settings.pool

    def _worth_it(self, sequence: _Sequence) -> bool:
        """Returns whether a hint misses enough tokens."""
        return sequence.length - sequence.cached >= self._settings.least_ahead

    def _admit(self, sequence: _Sequence) -> bool:
        """Gives a sequence its place → whether something of it is loaded from a slower tier first."""
        ask = sequence.ask
        if ask.admitted < 0:
            ask.admitted = self._events.now
        found, seconds = self._simulation.load(
            self.number, sequence.tokens, ask.call.origin.salt, sequence.cached, sequence.most_cached
        )
        sequence.rows = sequence.length - sequence.cached - found
        self.computed += sequence.rows
        ask.prompt_tokens += sequence.length
        sequence.prefix = sequence.tokens[: sequence.cached * TOKEN_BYTES]
        self._prefixes[sequence.prefix] += 1
        if self._prefixes[sequence.prefix] == 1:
            self._prefix_tokens += sequence.cached
        self._private += sequence.length - sequence.cached
        self._store(sequence, sequence.tokens, counted=0)
        self._waiting.admitted(sequence.tokens)
        if found:
            self._loading += 1
            self._events.at(self._events.now + seconds, lambda: self._loaded(sequence))
        return found > 0

    def _loaded(self, sequence: _Sequence) -> None:
        self._loading -= 1
        self._prompts.append(sequence)
        self._wake()

    def _store(self, sequence: _Sequence, tokens: bytes, *, counted: int) -> None:
        self._tree.insert(self.number, tokens, sequence.ask.call.origin.salt)
        for tier in self._simulation.tiers:
            tier.store(self.number, tokens, sequence.ask.call.origin.salt, counted=counted)
        self._evictions += bool(self._tree.evict(self.number, self._settings.pool - _HEADROOM * self._count))

    def _end_prompts(self, parts: list[tuple[_Sequence, int]], seconds: float) -> None:
        self.busy += seconds
        self._advance(1)
        done = [sequence for sequence, _ in parts if not sequence.rows]
        for sequence in done:
            self._prompts.remove(sequence)
            ask = sequence.ask
            self._simulation.began(ask)
            if ask.answer and ask.first_token is None:
                ask.first_token = self._events.now
            if len(ask.answer) > 1:
                heapq.heappush(self._decoding, (self._steps + len(ask.answer) - 1, sequence.order, sequence))
                self._keys += sequence.length + 1
                self._private += 1
            else:
                self._end(sequence)
        self._end_those_due()
        self._plan()

    # ------------------------------------------------------------------ decode steps

    def _decode_seconds(self, steps: int) -> float:
        """Sums the next decode steps: in each, every sequence attends to one key more."""
        count = len(self._decoding)
        first = self._model.seconds(StepShape(count, self._keys, 0, count, count))
        return steps * first + self._model.key * count * steps * (steps - 1) / 2

    def _cut(self) -> None:
        """Ends the decode steps after the one that runs: a call has arrived."""
        assert self._began is not None, "decode steps run"
        elapsed = self._events.now - self._began
        first, growth = self._decode_seconds(1), self._model.key * len(self._decoding)
        if growth > 1e-9 * first:
            linear = first - growth / 2
            steps = math.ceil((math.sqrt(linear * linear + 2 * growth * elapsed) - linear) / growth)
        else:
            steps = math.ceil(elapsed / first)
        steps = max(1, steps)
        if steps < self._planned:
            self._planned = steps
            self._turn += 1
            turn = self._turn
            end = self._began + self._decode_seconds(steps)
            self._events.at(end, lambda: self._end_decoding() if turn == self._turn else None)
        self._began = None

    def _end_decoding(self) -> None:
        self.busy += self._decode_seconds(self._planned)
        self._advance(self._planned)
        self._end_those_due()
        self._plan()

    def _advance(self, steps: int) -> None:
        self._steps += steps
        self._keys += steps * len(self._decoding)
        self._private += steps * len(self._decoding)

    def _end_those_due(self) -> None:
        while self._decoding and self._decoding[0][0] <= self._steps:
            _, _, sequence = heapq.heappop(self._decoding)
            made = len(sequence.ask.answer)
            self._keys -= sequence.length + made
            self._private -= made
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        self._private -= sequence.length - len(sequence.prefix) // TOKEN_BYTES
        self._prefixes[sequence.prefix] -= 1
        if not self._prefixes[sequence.prefix]:
            del self._prefixes[sequence.prefix]
            self._prefix_tokens -= len(sequence.prefix) // TOKEN_BYTES
        if len(sequence.ask.answer) > 1:
            tokens = sequence.tokens + packed(sequence.ask.answer[:-1])
            self._store(sequence, tokens, counted=sequence.length)
        self._simulation.ended(self.number, sequence.ask)


def _nothing(answer: Answered) -> None:
    """No session waits for a hint."""


class CoarseSimulation:
    """Implements `calls.Host` on replicas in closed form.

    Args:
        tokenizer, tokens: those of the prompts and of the answers.
        policy: the name of a placement policy.
        tiers: slower ones, the fastest first.
        seed: of policies that draw.

    Raises:
        ParameterError: the replicas order their calls in another way than by the longest prefix.
    """

    def __init__(
        self,
        events: Events,
        tokenizer: Tokenizer,
        tokens: AnswerTokens,
        model: StepModel,
        settings: ReplicaShape,
        measurements: Measurements,
        policy: str = "added-delay",
        tiers: Sequence[TierModel] = (),
        seed: int = 0,
    ) -> None:
        if settings.policy != "lpm":
            raise ParameterError(f"a coarse simulation orders by lpm, not by {settings.policy}; leave --coarse out")
        self.events, self.model, self.settings = events, model, settings
        self._tokenizer, self._tokens, self._measurements = tokenizer, tokens, measurements
        self._placement = Placement(policy, range(measurements.replicas), seed=seed)
        for replica in range(measurements.replicas):
            self._placement.rates(replica, prefill=model.prefill_rate, decode=model.decode_rate)
            self._placement.room(replica, settings.pool)
            if tiers:
                self._placement.rates(replica, load=max(tier.rate for tier in tiers))
                self._placement.tiers(replica, rooms_of(tiers))
        self.tree = self._placement.tree
        self.tiers = tuple(map(TierContents, tiers))
        self._encoder = PromptEncoder(tokenizer)
        self._replicas = [_CoarseReplica(number, self) for number in range(measurements.replicas)]
        self._numbers, self._orders = count(1), count(1)
        self._open = 0

    # ------------------------------------------------------------------ Host

    def ask(self, call: SimulatedCall, then: Callable[[Answered], None]) -> None:
        self._place(call, then, is_hint=False)

    def _place(self, call: SimulatedCall, then: Callable[[Answered], None], *, is_hint: bool) -> None:
        sequences, start = self._sequences(call)
        alone = sequences[0][: start * TOKEN_BYTES] if call.choices else sequences[0]
        origin, now = call.origin, self.events.now
        work = call.max_tokens
        placing = Placing(alone, origin.salt, (), origin.fork_group, origin.program_id, work)
        placed = self._placement.place(placing, now)
        assert placed is not None, "all replicas are up"
        number = next(self._numbers)
        ask = _Ask(number, call, placed.number, now, then, self._answer(call, alone, number), len(sequences), is_hint)
        if not is_hint:
            kept = map(_unpacked, sequences) if self._measurements.keeps_sequences else ()
            self._measurements.sent(number, placed.replica, now, tuple(kept))
        self._open += 1
        made = []
        for tokens in sequences:
            length = len(tokens) // TOKEN_BYTES
            most = start - 1 if call.choices else length - 1
            made.append(_Sequence(ask, next(self._orders), tokens, length, most, cached=placed.cached))
        self._replicas[placed.replica].receive(made)

    def hint(self, prompt: tuple[Part, ...], origin: Origin) -> None:
        """Computes a prompt ahead where enough of it is missing; it counts as no call."""
        self._place(SimulatedCall(prompt, origin=origin), _nothing, is_hint=True)

    def _sequences(self, call: SimulatedCall) -> tuple[list[bytes], int]:
        """Returns the tokens of a call, of a select with each choice; and how many of them all share."""
        if not isinstance(call.prompt, tuple):
            return [call.prompt.astype("<i4").tobytes()], len(call.prompt)
        if not call.choices:
            token_ids = self._encoder.encode(call.prompt)
            return [packed(token_ids)], len(token_ids)
        alone, endings = self._encoder.encode_endings(call.prompt, call.choices)
        prompt, sequences = packed(alone), [packed(ending) for ending in endings]
        return sequences, min(_shared(prompt, sequence, 0) for sequence in sequences)

    def _answer(self, call: SimulatedCall, prompt: bytes, number: int) -> tuple[int, ...]:
        if not call.max_tokens or call.choices:
            return ()
        seed = zlib.crc32(prompt, number if call.sampled else 0) << 32
        hashes = mix(np.arange(seed, seed + call.max_tokens, dtype=np.uint64))
        return tuple(self._tokens.pick(hashes).tolist())

    # ------------------------------------------------------------------ from the replicas

    def load(self, replica: int, tokens: bytes, salt: str, cached: int, most: int) -> tuple[int, float]:
        """Decides what a slower tier brings of a prompt, whose first `cached` tokens are on the device.

        Returns:
            Tokens, at most up to `most`, and the seconds that it takes. None is brought where computing takes less.
        """
        for tier in self.tiers:
            found = min(tier.longest(replica, tokens, salt), most) - cached
            if found > 0 and (seconds := tier.seconds(found)) < found / self.model.prefill_rate:
                loaded = self._measurements.tier_tokens
                loaded[tier.model.name] = loaded.get(tier.model.name, 0) + found
                return found, seconds
        return 0, 0.0

    def began(self, ask: _Ask) -> None:
        """Says that the prompt of a call is computed."""
        self._placement.began(ask.placed, self.events.now)

    def ended(self, replica: int, ask: _Ask) -> None:
        """Says that a sequence of a call has ended; with the last one the call does."""
        ask.left -= 1
        if ask.left:
            return
        now = self.events.now
        self._placement.ended(ask.placed, now, len(ask.answer))
        self._placement.apply(replica, ())
        self._open -= 1
        if ask.is_hint:
            return
        first = None if ask.first_token is None else ask.first_token - ask.sent
        times = RequestTimes(ask.admitted - ask.sent, first, now - ask.sent if first is not None else None)
        self._measurements.ended(ask.number, now, ask.prompt_tokens, ask.answer, times)
        ask.then(Answered(self._text(ask), ask.answer))

    def _text(self, ask: _Ask) -> str:
        if not isinstance(ask.call.prompt, tuple):
            return ""
        return b"".join(map(self._tokenizer.token_bytes, ask.answer)).decode("utf-8", "replace")

    def finish(self) -> None:
        """Takes what the replicas counted into the measurements. Every session has ended."""
        assert not self._open, f"{self._open} calls have no answer"
        for replica in self._replicas:
            self._measurements.worked(replica.number, replica.busy, {"computed_prompt_tokens": replica.computed})
