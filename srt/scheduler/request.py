"""Defines a request: one token sequence with its slots in the KV pool, the job it runs for, and when its text ends.

position      0            match.length          kv_length     slot_end        length
slots         [── tree, locked by us ──|── private ──|─── spare ───)
rows          [────────── computed ──────────|───── to compute ─────)

match.length ≤ kv_length        the tree owns the slots before match.length; we own those after it
kv_length ≤ slot_end            spare slots for tokens to come, allocated ahead in runs; slot_end may exceed length
computed ≤ kv_length            rows before `computed` have run, or run now; a row whose key is already in the pool
                                (it was found in the tree, but its logits are needed) writes to no slot

While a step is planned and another one still runs (step.py), `length` counts a token that is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...fsm.choice_search import ChoiceSearch, SearchNode
from ...fsm.stops import StopMatcher, Stops
from ...lang.protocol import FinishReason, TextOrigin
from ...lang.sampling import SamplingParams
from ..cache.prefix_cache import Seen
from ..cache.radix_cache import Match, RadixNode
from ..cache.state_slots import NO_STATE
from ..constraints.matcher import Matcher
from ..core.messages import NO_ADAPTER, EngineMark, IdLogprob, Schedule, TokenRun
from ..multimodal.sequence import NO_PICTURES, SequencePictures
from ..sampling.sampler import Limits

if TYPE_CHECKING:  # which imports this module
    from .page_cache import RequestPages

PENDING_TOKEN = -1  # stands for a token that a running step is about to choose
NO_SOURCE = -1  # source of a request whose tokens are all known

Path = tuple[tuple[int, int, int], ...]  # root first: (node id, position of its first token, number of tokens)


class Phase(Enum):
    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # as running, but no row is planned before its pages came from a tier, or are late
    RUNNING = "running"  # holds slots and a lock on its path in the tree
    ENDED = "ended"  # holds nothing, has been answered


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a text ends. `text_bytes`: its length without the stop string or stop token."""

    reason: FinishReason
    matched: str | int | None
    text_bytes: int


class SamplingNeeds(NamedTuple):
    """Describes how the rows of a text choose their tokens, by its sampling parameters."""

    alone: bool  # the runner can choose the token
    limits: Limits | None  # of the draw; None: the most likely token
    plain: bool  # it can in every row, any token may come, and nothing else is asked of a row
    counted: bool  # penalties may need the occurrences of tokens
    only_token: bool  # see `step.needs_only_token`


@dataclass(slots=True)
class Generation:
    """Continues the sequence. Owned by one request; filled as its tokens are sampled."""

    sampling: SamplingParams
    seed: int
    stream: bool
    ends: frozenset[int]  # tokens that end the text
    stops: Stops | None  # strings and expressions
    length_limit: int  # of the sequence, prompt included
    matcher: StopMatcher | None = field(init=False)
    matcher_base: int = 0  # bytes fed before the current matcher was made
    text_bytes: int = 0  # of all generated tokens
    sent: int = 0  # generated tokens that went out with Tokens
    logprobs: list[IdLogprob] = field(default_factory=list)
    prompt_logprobs: list[IdLogprob] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)  # generated token → occurrences, where `needs` wants them
    cursor: Matcher | None = None  # the constraint's matcher, at the end of the text
    stop: Stop | None = None  # the text has ended, and log-probabilities of its tokens are still to be computed
    first_token_at: float | None = None  # on the clock
    last_token_at: float = 0.0
    timed: int = 0  # generated tokens that these times know
    needs: SamplingNeeds | None = None  # of its sampling parameters, once they were asked for
    origins: dict[int, TextOrigin] = field(default_factory=dict)  # generated tokens that took no step of their own

    def __post_init__(self) -> None:
        self.matcher = self.stops.matcher() if self.stops is not None else None

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs or self.sampling.top_logprobs > 0

    @property
    def runs(self) -> list[TokenRun]:
        """The generated tokens that took no step of their own, in order."""
        found: list[TokenRun] = []
        for token, origin in sorted(self.origins.items()):
            if found and (found[-1].origin, found[-1].end) == (origin, token):
                found[-1] = TokenRun(origin, found[-1].first, token + 1)
            else:
                found.append(TokenRun(origin, token, token + 1))
        return found


@dataclass(slots=True)
class ScoreGroup:
    """Groups the requests of one EngineScore, which ends when every member has its log-probabilities."""

    start: int
    members: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Scoring:
    """Computes log-probabilities of tokens [group.start, length) of this sequence."""

    group: ScoreGroup
    logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Choosing:
    """Computes, with its last rows, the next-token log-probabilities at nodes of a choice search."""

    search: ChoiceSearch | None  # None until the vocabulary's trie is ready
    nodes: list[SearchNode]  # one for each row; the last one has all tokens that the search put after the prompt
    answered: int = 0


@dataclass(slots=True)
class Prefilling:
    """Computes keys and values for a hint, which gets no answer."""

    pin: float | None = None  # seconds for which they are kept


@dataclass(slots=True)
class Embedding:
    """Pools hidden states to the vector of the text: of its last row, or of all rows.

    `total`: the sum of those that were read, in float64. Rows are read in order, also those whose keys were cached.
    """

    dimensions: int  # of the vector; 0: all
    every_row: bool
    total: torch.Tensor | None = None  # [hidden]
    rows: int = 0  # in `total`

    def add(self, states: torch.Tensor) -> None:
        """Adds the hidden states of the next rows, [n, hidden]."""
        summed = states.double().sum(0)
        self.total = summed if self.total is None else self.total + summed
        self.rows += len(states)


Job = Generation | Scoring | Choosing | Embedding | Prefilling


@dataclass(slots=True)
class RequestState:
    """The recurrent state of a running request, after its first `position` tokens.

    `source`: the slot that has it: its own, that of the snapshot at `node`, or the slot of zeros. `node`: that of the
    snapshot, which it has locked until its next rows are planned. `guessed`: (position, slot) of the states after some
    of the guessed tokens that follow in this step.
    """

    slot: int = NO_STATE  # its own
    source: int = NO_STATE
    node: RadixNode | None = None
    position: int = 0
    guessed: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Rate:
    """Measures how often guesses are right; older observations count less."""

    right: float
    tried: float
    kept: float  # the part of an observation's weight that each later one leaves it

    def add(self, right: int, wrong: int) -> None:
        self.right = self.right * self.kept + right
        self.tried = self.tried * self.kept + right + wrong

    @property
    def mean(self) -> float:
        return self.right / self.tried


class Request:
    """One sequence. Only the scheduler changes it, between and during steps.

    Args:
        number: order of arrival; ties of rank are broken by it.
        message_id: the id under which its ending is sent.
        token_ids: the prompt.
        job: generation, score, choice search or hint.
        arrival: time on the clock when it arrived.
        pictures: those of the prompt.
    """

    __slots__ = (
        "_path",
        "_path_of",
        "_slots",
        "_tokens",
        "adapted_or_seeing",
        "admitted_at",
        "arrival",
        "cached_tokens",
        "changed",
        "computed",
        "deadline",
        "guess_rates",
        "job",
        "kv_length",
        "length",
        "loaded",
        "marked",
        "marks",
        "match",
        "message_id",
        "number",
        "pages",
        "phase",
        "pictures",
        "prompt_length",
        "rank",
        "reached",
        "schedule",
        "seen",
        "slot_end",
        "source",
        "state",
    )

    def __init__(
        self,
        number: int,
        message_id: int,
        token_ids: NDArray[np.int32],
        job: Job,
        schedule: Schedule,
        arrival: float,
        pictures: SequencePictures = NO_PICTURES,
    ) -> None:
        self.number = number
        self.message_id = message_id
        self.job = job
        self.schedule = schedule
        self.rank = (-schedule.priority, number)  # with a smaller one it keeps its slots longer
        self.arrival = arrival
        self.pictures = pictures
        self.adapted_or_seeing = schedule.adapter != NO_ADAPTER or pictures is not NO_PICTURES
        self.marks: tuple[EngineMark, ...] | None = None  # prefixes to keep once they are computed, which is reported
        self.marked = False  # this was tried; a retraction does not try it again
        self.deadline = None if schedule.timeout is None else arrival + schedule.timeout
        self.phase = Phase.WAITING
        self.admitted_at: float | None = None  # on the clock; None: it has never been running
        self._tokens = token_ids
        self._slots = np.zeros(0, dtype=np.int32)  # as long as _tokens while running
        self.prompt_length = self.length = len(token_ids)
        self.match: Match | None = None
        self.seen = Seen()  # of the tree, while it waits
        self._path: Path = ()
        self._path_of: tuple[Match, int] | None = None  # and the tree's splits when _path was taken
        self.kv_length = 0
        self.slot_end = 0
        self.changed = 0  # no slot before it is another than in the last batch with this request
        self.computed = 0
        self.reached = 0  # most rows ever computed or found: rows after it are new, rows before it repeated
        self.cached_tokens = 0  # prompt tokens that were found, but for those that a hint computed for this request
        self.pages: RequestPages | None = None  # where tiers keep pages: its pages, once it has been admitted
        self.loaded: dict[str, int] | None = None  # tokens that came from each tier
        self.state: RequestState | None = None  # of a running request of a model with recurrent states
        self.guess_rates: dict[tuple[str, int], Rate] = {}  # of its guessed tokens, by source and kind
        self.source = NO_SOURCE  # the logit row of the running step that chooses the token which is PENDING_TOKEN

    @property
    def namespace(self) -> str:
        """The namespace of the cache at the end of the sequence."""
        schedule = self.schedule
        return schedule.private[-1][1] if schedule.private else schedule.salt

    # ---------------------------------------------------------------------------------------- tokens

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and generated tokens."""
        return self._tokens[: self.length]

    @property
    def known_tokens(self) -> NDArray[np.int32]:
        """Those tokens but for one that the running step still chooses."""
        return self._tokens[: self.length - (self.source != NO_SOURCE)]

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def generated_ids(self) -> list[int]:
        ids: list[int] = self._tokens[self.prompt_length : self.length].tolist()
        return ids

    def append(self, token: int) -> None:
        assert self.source == NO_SOURCE, "the pending token comes first"
        length, tokens = self.length, self._tokens
        if length == len(tokens):
            tokens = self._grow()
        tokens[length] = token
        self.length = length + 1

    def _grow(self) -> NDArray[np.int32]:
        grown = np.zeros(2 * self.length + 16, dtype=np.int32)
        grown[: self.length] = self._tokens
        self._tokens = grown
        return grown

    @staticmethod
    def expect(coming: Iterable[tuple[Request, int]]) -> None:
        """Appends PENDING_TOKEN to each; `remove_pending` undoes it. coming: with the logit rows that choose it."""
        for request, source in coming:
            assert request.source == NO_SOURCE, "a step runs ahead of one other only"
            length, tokens = request.length, request._tokens
            if length == len(tokens):
                tokens = request._grow()
            tokens[length] = PENDING_TOKEN
            request.length = length + 1
            request.source = source

    @staticmethod
    def remove_pending(requests: Iterable[Request]) -> None:
        """Removes the pending token from the end of each."""
        for request in requests:
            assert request.source != NO_SOURCE, "nothing was expected"
            request.length -= 1
            request.source = NO_SOURCE

    def drop_prompt_token(self) -> None:
        """Drops the prompt's last token, which will be sampled again."""
        assert isinstance(self.job, Generation), "only generations sample"
        assert self.length == self.prompt_length > 1, "a prompt keeps a token, and nothing has been generated"
        self.length -= 1
        self.prompt_length -= 1
        self.job.length_limit -= 1

    def restore_prompt_token(self, token: int) -> None:
        """Puts back the dropped prompt token, after it was sampled again unchanged."""
        assert isinstance(self.job, Generation), "only generations sample"
        assert self.length == self.prompt_length, "nothing has been generated"
        self.append(token)
        self.prompt_length += 1
        self.job.length_limit += 1

    # ----------------------------------------------------------------------------------------- slots

    def slots(self, start: int, end: int) -> NDArray[np.int32]:
        return self._slots[start:end]

    def set_slots(self, start: int, slots: NDArray[np.int32]) -> None:
        end = start + len(slots)
        if end > len(self._slots):
            grown = np.zeros(max(end, len(self._tokens)), dtype=np.int32)
            grown[:start] = self._slots[:start]
            self._slots = grown
        self._slots[start:end] = slots
        self.changed = min(self.changed, start)

    def take_changed(self, start: int, end: int) -> int:
        """Returns the first position whose slot may be another than in the last batch, for one with rows [start, end).

        The slots of these rows may be, too."""
        changed, self.changed = self.changed, end
        return min(changed, start)

    @property
    def path(self) -> Path:
        """Path of its match. Cached, because most steps change neither the match nor the tree above it."""
        match = self.match
        if match is None:
            return ()
        splits = match.node.tree.splits
        if self._path_of is None or self._path_of[0] is not match or self._path_of[1] != splits:
            self._path, self._path_of = match.path, (match, splits)
        return self._path

    def path_to(self, end: int) -> Path:
        """Returns the path up to `end`: rows of later chunks are not computed yet."""
        path = self.path
        if self.match is None or self.match.length <= end:
            return path
        return tuple((node, first, min(length, end - first)) for node, first, length in path if first < end)

    def row(self, place: int) -> tuple[int, int, NDArray[np.int32], Path, int, int]:
        """Returns a row's token and slot, the slots and the path up to it, the number, and `take_changed`."""
        end, match, known, slots, changed = place + 1, self.match, self._path_of, self._slots, self.changed
        if match is None or known is None or known[0] is not match or known[1] != match.node.tree.splits:
            path = self.path_to(end)
        else:
            path = self._path if match.length <= end else self.path_to(end)
        self.changed = end
        if changed > place:
            changed = place
        return self._tokens.item(place), slots.item(place), slots[:end], path, self.number, changed

    @property
    def tree_length(self) -> int:
        return self.match.length if self.match else 0

    @property
    def private_slots(self) -> NDArray[np.int32]:
        """Slots that the request owns: those with a key, and the spare ones after them."""
        return self._slots[self.tree_length : self.slot_end]

    # ------------------------------------------------------------------------------------------ rows

    @property
    def remaining_rows(self) -> int:
        return self.length - self.computed

    @property
    def wants_rows(self) -> bool:
        """Returns whether rows are to be planned; if not, it waits until the running step completes.

        The row of a last token, after which no token is chosen, is not needed.
        """
        job = self.job
        return self.length - self.computed > (isinstance(job, Generation) and job.stop is not None)

    @property
    def decoding(self) -> bool:
        """Returns whether only the row of the newest token is missing."""
        return self.length - self.computed == 1 and self.length > self.prompt_length

    @property
    def samples(self) -> bool:
        """Returns whether a token is sampled from the last row's logits."""
        job = self.job
        if not isinstance(job, Generation) or job.stop is not None:
            return False
        return job.sampling.max_tokens > self.length - self.prompt_length

    @property
    def goes_on(self) -> bool:
        """Returns whether it `samples` and the text may have a token after that one."""
        return self.samples and isinstance(self.job, Generation) and self.length + 1 < self.job.length_limit

    @property
    def constrained(self) -> bool:
        """Returns whether its next token needs a mask."""
        return isinstance(self.job, Generation) and self.job.cursor is not None and self.job.stop is None

    @property
    def continuing(self) -> bool:
        """Returns whether several rows of generated tokens are missing: forced ones, and the one before them."""
        return self.computed >= self.prompt_length and self.remaining_rows > 1

    @property
    def owes_logprobs(self) -> bool:
        """Returns whether known tokens still wait for their log-probabilities."""
        return self.first_logit_row < self.length - 1

    @property
    def first_logit_row(self) -> int:
        """First row whose logits or hidden states are needed: it and later rows run even if their keys are cached."""
        last = self.length - 1 if self.samples else self.length
        match self.job:
            case Generation(sampling=sampling, prompt_logprobs=collected) as generation:
                if sampling.prompt_logprobs_from is not None:
                    wanted = max(sampling.prompt_logprobs_from, 1) - 1 + len(collected)
                    if wanted < self.prompt_length - 1:
                        return min(last, wanted)
                if generation.wants_logprobs and len(generation.logprobs) < self.generated:  # forced tokens
                    return min(last, self.prompt_length - 1 + len(generation.logprobs))
                return last
            case Scoring(group=group, logprobs=collected):
                wanted = group.start - 1 + len(collected)
                return wanted if wanted < self.length - 1 else last
            case Choosing(nodes=nodes, answered=answered):
                return last - len(nodes) + answered
            case Embedding(every_row=every_row, rows=read):
                return min(read, last) if every_row else self.length - 1
            case Prefilling():
                return last

    def logit_rows(self, start: int, end: int) -> tuple[int, int]:
        """Returns the interval of rows in [start, end) whose logits are needed; they lie at the end."""
        if isinstance(self.job, Embedding):
            return end, end
        first = max(start, self.first_logit_row)
        if not (self.samples or isinstance(self.job, Choosing)):
            end = min(end, self.length - 1)  # the last row predicts nothing that is asked for
        return (first, end) if first < end else (end, end)

    def hidden_rows(self, start: int, end: int) -> int:
        """Returns the number of rows in [start, end) whose hidden states are needed; they lie at the end."""
        return max(0, end - max(start, self.first_logit_row)) if isinstance(self.job, Embedding) else 0


def accept(request: Request, token: int, token_bytes: Callable[[int], bytes], longest: int) -> Stop | None:
    """Appends a token; returns a Stop if the text ends with it. `longest`: tokens a sequence may have.

    It looks at token ids and at bytes, so that it finds a stop string wherever the token boundaries lie.
    """
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    request.append(token)
    needs, cursor, sampling = generation.needs, generation.cursor, generation.sampling
    if needs is None or needs.counted:
        generation.counts[token] = generation.counts.get(token, 0) + 1
    before, generated = generation.text_bytes, request.length - request.prompt_length
    data = token_bytes(token)
    if cursor is not None and generated == 1:
        data = data[cursor.healed :]
    generation.text_bytes = before + len(data)
    if token in generation.ends and generated >= sampling.min_tokens:
        return Stop(FinishReason.STOP, token, before)
    if generation.matcher is not None:
        found = _feed(generation, data, before, generated >= sampling.min_tokens)
        if found is not None:
            return found
    if cursor is not None and cursor.finished:
        return constraint_end(generation, token if cursor.ended else None)
    if generated >= sampling.max_tokens or request.length >= longest:
        return Stop(FinishReason.LENGTH, None, generation.text_bytes)
    return None


def constraint_end(generation: Generation, token: int | None = None) -> Stop:
    """Returns the stop of a text that satisfies its constraint, also if it was closed by the shortest way to an end.

    `token`: the token with which the model ended it.
    """
    assert generation.cursor is not None, "a constraint ends the text"
    reason = FinishReason.LENGTH_CLOSED if generation.cursor.closing else FinishReason.STOP
    return Stop(reason, token, generation.text_bytes)


def _feed(generation: Generation, data: bytes, offset: int, may_stop: bool) -> Stop | None:
    """Feeds bytes to the stop matcher. Skips stops that end before min_tokens: the search continues after them."""
    while generation.matcher is not None and generation.stops is not None:
        match = generation.matcher.feed(data)
        if match is None:
            return None
        if may_stop:
            return Stop(FinishReason.STOP, match.stop, generation.matcher_base + match.start)
        end = generation.matcher_base + match.end
        data = data[end - offset :]
        offset = end
        generation.matcher_base = end
        generation.matcher = generation.stops.matcher()
    return None
