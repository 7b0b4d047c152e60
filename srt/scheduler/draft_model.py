"""Runs a draft: a smaller model of the same tokenizer, which guesses what the model will say.

The draft has a KV pool of its own with as many slots, and keeps the key of a token in the slot that the token has in
the pool of the model. So it shares prefixes wherever the model does, forks among them, and needs no tree of its own:

    slot        17  18  19  20  21          `drafted`: the slots whose keys it has. A slot that is allocated anew leaves
    the model   t₁  t₂  t₃  t₄  ·           it, and the draft computes the missing ones of a text before it guesses:
    the draft   t₁  t₂  ·   ·   ·           here t₃ and t₄, and with the logits of t₄ it chooses its first guess

The keys of its own guesses lie in the spare slots in which the model checks them. They stay if the text says the same.

It draws as the model does: by the same noise, of (seed, position), at the same temperature, and among the tokens that a
constraint allows. So where both give about the same probabilities, both draw the same token, at any temperature.
Penalties, biases and top_p are the model's alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cache.slot_allocator import Slots
from ..core.batch import DUMMY_SLOT, Allowed, Batch, Logits, RowNeed, RowRequests, Runner
from ..core.instruments import Clock
from ..multimodal.sequence import NO_PICTURES
from ..sampling.sampler import Sampler, draw_keys, draws_of, inverse_temperature
from .constrained import ConstrainedTexts
from .kv_manager import KVManager
from .request import Generation, Phase, Request
from .step import MAX_SAMPLED_TOP_K, allowed_of


class DraftPass(NamedTuple):
    """A forward pass of the draft."""

    rows: int
    seconds: float


@dataclass(slots=True)
class _Text:
    """A text that is drafted. `first`: its first token without a key; `end`: of the rows of the first pass; `has_keys`:
    all its tokens have theirs, and the first pass repeats the last one to choose after it."""

    request: Request
    count: int  # tokens to guess
    first: int = 0
    end: int = 0
    has_keys: bool = False
    found: list[int] = field(default_factory=list)
    allowed: Allowed | None = None  # the tokens that its next pass may choose; None: all

    @property
    def generation(self) -> Generation:
        job = self.request.job
        assert isinstance(job, Generation), "only generations sample"
        return job

    @property
    def chooses(self) -> bool:
        """Returns whether its next pass chooses a token: all tokens before have their keys then."""
        return bool(self.found) or self.end == self.request.length


class _Fed(NamedTuple):
    """Guesses whose keys the draft has computed, from `start` on, in these slots."""

    request: Request
    start: int
    tokens: list[int]
    slots: Slots


class DraftModel:
    """A draft, its keys, and its choice of tokens.

    Args:
        runner: the draft. Its slots are those of the model, and it has no recurrent states.
        vocab_size: of the model; tokens are below it.
    """

    def __init__(self, runner: Runner, vocab_size: int) -> None:
        assert not runner.num_states, "launch.py refuses such a draft"
        assert runner.window_pool is None, "its window layers have the slots of the others"
        self._runner = runner
        self._sampler = Sampler(runner.vocab_size, runner.chooser)
        self._vocab_size = vocab_size
        self._fed: list[_Fed] = []

    def attach(self, kv: KVManager, constrained: ConstrainedTexts, clock: Clock) -> None:
        """Connects it to the scheduler that owns it."""
        assert self._runner.num_slots >= kv.pool.total + 1, "it has the slots of the model"
        self._kv = kv
        self._constrained = constrained
        self._clock = clock
        self._drafted = kv.drafted = np.zeros(self._runner.num_slots, dtype=np.bool_)

    def takes(self, request: Request) -> bool:
        """Returns whether the draft can continue the text: one without pictures, whose next token is not forced."""
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        forced = generation.cursor is not None and bool(generation.cursor.pending)
        return not forced and request.pictures is NO_PICTURES and request.length < self._runner.context_length

    def missing(self, requests: Sequence[Request]) -> int:
        """Counts the rows of a first pass for these texts; what they share is computed once."""
        marked = [self._mark(request, request.length) for request in requests]
        for slots in marked:
            self._drafted[slots] = False
        return sum(max(1, len(slots)) for slots in marked)

    def guess(self, asked: Sequence[tuple[Request, int]], rows: int) -> tuple[list[list[int]], list[DraftPass]]:
        """Guesses up to so many tokens of each text; [] for one whose keys are not complete yet.

        Args:
            asked: texts, and for how many tokens each has spare slots.
            rows: that the first pass may have; texts that need more are computed in parts.

        Returns:
            The guesses of each text, and the passes that they took.
        """
        self._settle()
        texts = [_Text(request, count) for request, count in asked]
        going: list[_Text] = []
        for text in texts:
            if rows and self._restrict(text):
                self._begin(text, rows)
                rows -= text.end - text.first
                going.append(text)
        passes: list[DraftPass] = []
        while going:
            began = self._clock.now()
            batch = self._batch(going)
            tokens = self._choose(self._runner.forward(batch), batch)
            passes.append(DraftPass(batch.rows, self._clock.now() - began))
            going = [text for text in going if text.chooses]
            for text, token in zip(going, tokens, strict=True):
                if 0 <= token < self._vocab_size:
                    text.found.append(token)
                else:
                    text.count = 0  # the model does not know it, or the draft's logits are not numbers
            going = [text for text in going if len(text.found) < text.count and self._restrict(text)]
        for text in texts:
            if fed := text.found[:-1]:
                start = text.request.length
                slots = text.request.slots(start, start + len(fed)).copy()
                self._fed.append(_Fed(text.request, start, fed, slots))
        return [text.found for text in texts], passes

    # ------------------------------------------------------------------------------------------ passes

    def _settle(self) -> None:
        """Keeps the keys of guesses that the texts have said since."""
        fed, self._fed = self._fed, []
        for request, start, tokens, slots in fed:
            if request.phase is not Phase.RUNNING:
                continue
            said = request.tokens[start : start + len(tokens)]
            right = np.logical_and.accumulate(said == np.array(tokens[: len(said)], dtype=np.int32))
            count = min(int(right.sum()), max(0, request.kv_length - start))
            kept = slots[:count]
            self._drafted[kept[request.slots(start, start + count) == kept]] = True

    def _mark(self, request: Request, end: int) -> Slots:
        """Marks the slots of a text's tokens before `end` that have no key yet, and returns them."""
        slots = request.slots(0, end)
        known = self._drafted[slots]
        missing = slots[len(known) if known.all() else int(known.argmin()) :]
        self._drafted[missing] = True
        return missing

    def _begin(self, text: _Text, rows: int) -> None:
        """Plans the rows of a text in the first pass: its missing tokens, and always its last one; `rows` at most."""
        request = text.request
        text.count = min(text.count, self._runner.context_length - request.length)
        missing = len(self._mark(request, request.length))
        text.has_keys = missing == 0
        text.first = request.length - max(1, missing)
        text.end = min(text.first + rows, request.length)
        self._drafted[request.slots(text.end, request.length)] = False

    def _restrict(self, text: _Text) -> bool:
        """Finds the tokens that may come next; False: the text ends here, or what comes is not known yet."""
        generation = text.generation
        if text.found and text.found[-1] in generation.ends:
            return False
        if generation.cursor is None:
            return True
        try:
            after = self._constrained.allowed_after(text.request, text.found)
            allowed = after[-1] if after else allowed_of(text.request, generation)
        except Exception:  # a text that gets there meets the error itself
            return False
        if len(after) < len(text.found):
            return False
        if allowed is not None and allowed.few is not None:
            allowed = Allowed(allowed.few[allowed.few < self._runner.vocab_size], None)
        elif allowed is not None and allowed.bits is not None:
            words = np.zeros(-(-self._runner.vocab_size // 32), dtype=np.uint32)
            shared = min(len(words), len(allowed.bits))
            words[:shared] = allowed.bits[:shared]
            allowed = Allowed(None, words)
        text.allowed = allowed
        return allowed is None or allowed.few is None or len(allowed.few) > 0

    def _batch(self, texts: Sequence[_Text]) -> Batch:
        """Makes the next pass: the first rows of the texts, or one row each."""
        ranges: list[tuple[int, int]] = []
        token_ids: list[NDArray[np.int32]] = []
        for text in texts:
            if text.found:
                end = text.request.length + len(text.found)
                ranges.append((end - 1, end))
                token_ids.append(np.array(text.found[-1:], dtype=np.int32))
            else:
                ranges.append((text.first, text.end))
                token_ids.append(text.request.tokens[text.first : text.end])
        slots = tuple(text.request.slots(0, end) for text, (_, end) in zip(texts, ranges, strict=True))
        # Texts that are equal so far share the slot of their last token, whose key one of them writes.
        writes = [
            np.full(1, DUMMY_SLOT) if text.has_keys and not text.found else own[start:]
            for text, own, (start, _) in zip(texts, slots, ranges, strict=True)
        ]
        starts, ends = np.array(ranges, dtype=np.int64).T
        last_rows = np.cumsum(ends - starts) - 1
        return Batch(
            token_ids=np.concatenate(token_ids).astype(np.int64),
            positions=np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in ranges]),
            write_slots=np.concatenate(writes).astype(np.int64),
            query_lengths=(ends - starts).astype(np.int32),
            prefix_lengths=starts.astype(np.int32),
            slots=slots,
            logit_rows=last_rows[[text.chooses for text in texts]],
            row_requests=self._requests([text for text in texts if text.chooses]),
        )

    def _requests(self, texts: Sequence[_Text]) -> RowRequests:
        """Says how texts choose their next tokens."""
        samplings = [text.generation.sampling for text in texts]
        kinds = [RowNeed.SAMPLE if sampling.temperature else RowNeed.ARGMAX for sampling in samplings]
        top_k = [sampling.top_k if 0 < sampling.top_k <= MAX_SAMPLED_TOP_K else 0 for sampling in samplings]
        return RowRequests(
            kinds=np.array(kinds, dtype=np.uint8),
            inverse_temperatures=np.array([inverse_temperature(sampling.temperature) for sampling in samplings]),
            keys=draw_keys(
                [text.generation.seed for text in texts], [text.request.length + len(text.found) for text in texts]
            ),
            top_k=np.array(top_k, dtype=np.int32),
            min_p=np.array([sampling.min_p for sampling in samplings]),
            allowed={row: text.allowed for row, text in enumerate(texts) if text.allowed is not None},
        )

    def _choose(self, logits: Logits, batch: Batch) -> list[int]:
        """Returns the token of each logit row; -1 where there is none."""
        assert batch.row_requests is not None, "it says how"
        tokens = logits.tokens.copy()
        rows = np.flatnonzero((tokens < 0) & (logits.places >= 0))
        if len(rows):
            draws = draws_of(batch.row_requests, rows, logits.places[rows], self._runner.vocab_size)
            tokens[rows] = self._sampler.choose(logits.values, draws)
        found: list[int] = tokens.tolist()
        return found
