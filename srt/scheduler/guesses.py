"""Guesses the next tokens of texts, so that one step may check several of them. A guess never changes a text.

A decode step reads all weights for one token of each text. The rows of guessed tokens read the same weights, so a few
of them cost little more than the step alone. Each guessed token is a row after the newest token of its text:

    tokens      … t₉ │ g₁ g₂ g₃       rows of the step: t₉ and the guesses, each at its own position
    chosen           │ c₁ c₂ c₃ c₄    what the rows choose, by the same draws (seed, position) as one after the other
    committed        │ c₁ c₂ c₃       here g₁ = c₁ and g₂ = c₂, and g₃ is wrong: c₃ is chosen after g₂ and holds

The keys of right guesses are those that the text would have had (`Batch.generated` computes their attention row by
row). The keys of wrong ones lie in spare slots, which the next step writes again. `Commit.verify` reads the rows one
after the other, with penalties, constraints, stops and log-probabilities as they are after the guesses before.

Two sources guess: what followed the same tokens in the prompt and in the text itself, and what followed them in earlier
texts of the same namespace, siblings of a fork among them. A draft (draft_model.py) guesses where they know less: for
all such texts together, and for as many tokens as are worth the time of both models.

With overlap the newest token of a text is still being chosen while the step is planned. It is then guessed as well, and
the guesses after it run:

    running     … t₈ ─▸ ?             the token that this step chooses is guessed to be t₉
    planned     │ ? g₁ g₂             its row reads what was chosen; the others are right if that was t₉

The step after one with guesses is planned when that has completed: how far its texts have come decides where their rows
begin. So guesses run only where such texts are many (`InFlightStep.delays_too_many`), at a small batch above all, and
their time is measured with what the step that waits loses.

Which guesses run follows two measurements: how often guesses of a kind were right, and what steps of so many rows take
on this machine. Where a row costs more than it brings, none runs, and the step is the one it would have been.
"""

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ..core.batch import PICTURE_BASE, Runner
from .constrained import ConstrainedTexts
from .draft_model import DraftModel
from .policy import SchedulerConfig
from .request import NO_SOURCE, Generation, Rate, Request
from .request_table import SchedulerContext
from .step import Guessed, PlannedRows, StepPlan, delays_too_many, takes_all_logits

MOST_GUESSES = 16  # rows of guesses of a text in one step
_INSTANT = 1e-9  # seconds; a step that took none took so many
_LEAST = 0.02  # no guess counts as surely wrong, nor as surely right: what follows may be another text
_MOST = 0.98
_MARGIN = 1.2  # a row must bring so many times what its time is worth
_WAITS = 7  # of which the median counts
_DRAFT_MARGIN = 1.05  # the same of a step with the draft's guesses and the passes of the draft
_DRAFT, _DRAFT_RATE = "draft", 0.7  # its name among sources; the part of its tokens that is right, before that is known
_DRAFT_ROWS = 512  # of a pass of the draft, where steps have no limit
_FARTHER = 4  # steps with so many times the rows that were measured are not estimated
# Steps in which guesses were found and none ran, or some ran in each: then one does the other, to measure. Twice as
# many after each that changed nothing, up to the most.
_EXPLORE, _MOST_EXPLORE = 64, 1024

_log = logging.getLogger("umbel.engine")


class Guess(NamedTuple):
    """Tokens that may follow a text. `kind`: guesses of one kind of a source are right about equally often."""

    tokens: list[int]
    kind: int


_MOST_SHARED = 8  # tokens before a place that are compared
_BETWEEN = -1  # stands between two texts of a log
_RATES_BY_SHARED = (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.8, 0.9)


class GuessSource(ABC):
    """Finds guesses. One that raises, or gives what is no token, is switched off.

    `name`: counters are guessed_NAME_rows and accepted_NAME_rows. `first_rates`: by kind, the part of its tokens that
    is right, before anything was measured.
    """

    name: str
    first_rates: Sequence[float]

    @abstractmethod
    def guess(self, request: Request, most: int) -> Guess | None:
        """Returns at most `most` tokens that may follow the known ones; None: it knows of none."""

    def learn(self, request: Request) -> None:  # noqa: B027 (a source need not learn)
        """Learns from a text that has ended."""

    def forget(self) -> None:  # noqa: B027
        """Forgets all texts."""


class PromptSource(GuessSource):
    """Guesses that a text repeats what was in its prompt, or in itself: what followed the same tokens there.

    Of the places that share most tokens before them the latest counts. The kind is the number of those tokens.
    """

    name = "prompt"
    first_rates = _RATES_BY_SHARED

    def guess(self, request: Request, most: int) -> Guess | None:
        tokens = request.known_tokens
        end = len(tokens)
        places = np.flatnonzero(tokens[: end - 1] == tokens[end - 1])
        if not len(places):
            return None
        shared = 1
        while shared < _MOST_SHARED:
            longer = places[places >= shared]
            longer = longer[tokens[longer - shared] == tokens[end - 1 - shared]]
            if not len(longer):
                break
            places, shared = longer, shared + 1
        first = int(places[-1]) + 1
        found: list[int] = tokens[first : first + most].tolist()
        if max(found) >= PICTURE_BASE:
            return _guess_of(found, shared)
        while len(found) < most:  # the text repeats its end, again and again
            found += found[: most - len(found)]
        return Guess(found, shared)


def _guess_of(following: list[int], kind: int) -> Guess | None:
    """Returns the tokens before a picture or the end of a text as a guess; None: there are none."""
    ends = (place for place, token in enumerate(following) if token >= PICTURE_BASE or token == _BETWEEN)
    following = following[: next(ends, None)]
    return Guess(following, kind) if following else None


_MOST_LOGS = 16  # namespaces; the least recently used one is forgotten
_LOG_TOKENS = 1 << 16  # of a namespace: 256 KiB, and as much for each of its tables
_WINDOWS = (6, 2)  # tokens by which places are found


class _Log:
    """The last texts of a namespace one after the other, and where the same tokens were seen last.

    A table has a place for each hash of the tokens before it. Newer places overwrite older ones, and a full log begins
    again at its start, so a place counts only where the tokens before it are those that are looked for.
    """

    def __init__(self) -> None:
        self._tokens = np.full(_LOG_TOKENS, _BETWEEN, dtype=np.int32)
        self._end = 0
        self._tables = {window: np.zeros(_LOG_TOKENS, dtype=np.int32) for window in _WINDOWS}

    def append(self, tokens: NDArray[np.int32]) -> None:
        tokens = tokens[-(_LOG_TOKENS - 1) :]
        if self._end + len(tokens) >= _LOG_TOKENS:
            self._end = 0
        start, self._end = self._end, self._end + len(tokens) + 1
        self._tokens[start : self._end - 1] = tokens
        self._tokens[self._end - 1] = _BETWEEN
        for window, table in self._tables.items():
            if len(tokens) > window:  # nothing follows the last one
                places = sliding_window_view(tokens[:-1].astype(np.uint64), window)
                table[_bucket(places.T)] = np.arange(start + window, start + len(tokens), dtype=np.int32)

    def find(self, before: list[int], most: int) -> Guess | None:
        """Returns what followed these tokens last, at most _MOST_SHARED of them; the kind is how many were the same."""
        for window, table in self._tables.items():
            if len(before) < window:
                continue
            place = int(table[_bucket(before[-window:])])
            known = self._tokens[max(0, place - len(before)) : place].tolist()
            shared = 0
            while shared < len(known) and known[-1 - shared] == before[-1 - shared]:
                shared += 1
            if shared >= window:
                return _guess_of(self._tokens[place : place + most].tolist(), shared)
        return None


def _bucket(tokens: Iterable[Any]) -> Any:  # int; or uint64 arrays, of many sequences
    """Returns where a table has a sequence of tokens, given token by token: 0 to _LOG_TOKENS - 1."""
    mixed = 0  # below 2 ** 32, and its product below 2 ** 64
    for token in tokens:
        mixed = (mixed + token) * 0x9E3779B1 & 0xFFFFFFFF
    return mixed >> 16


class HistorySource(GuessSource):
    """Guesses that a text repeats an earlier one of the same namespace: what followed the same tokens there last.

    It keeps the generated tokens of texts that have ended, with a few before them: prompts are `PromptSource`'s, and
    with them as well fewer guesses are right. The kind is the number of tokens that both share before the place.
    """

    name = "history"
    first_rates = _RATES_BY_SHARED

    def __init__(self) -> None:
        self._logs: OrderedDict[str, _Log] = OrderedDict()

    def guess(self, request: Request, most: int) -> Guess | None:
        log = self._logs.get(request.namespace)
        return None if log is None else log.find(request.known_tokens[-_MOST_SHARED:].tolist(), most)

    def learn(self, request: Request) -> None:
        if request.generated < 2:
            return
        log = self._logs.get(request.namespace)
        if log is None:
            log = self._logs[request.namespace] = _Log()
            if len(self._logs) > _MOST_LOGS:
                self._logs.popitem(last=False)
        self._logs.move_to_end(request.namespace)
        log.append(request.tokens[max(0, request.prompt_length - _MOST_SHARED) :])

    def forget(self) -> None:
        self._logs.clear()


class StepCosts:
    """Estimates the seconds of a step by its rows, from the last ones that were measured without prompts.

    Of the last steps with about the same number of rows the median counts. Between and beyond these medians the
    estimate is linear.
    """

    _FIRST_SHARE = 0.1  # of a step of one row: what a further row costs, before that was measured
    _LEAST = 3  # measurements; the first steps of a process are slow
    _KEPT = 7

    def __init__(self) -> None:
        self._seconds: dict[int, deque[tuple[int, float]]] = {}  # bit length of rows → (rows, seconds)
        self._points: list[tuple[float, float]] = []  # the same, ascending, seconds not falling
        self._estimates: dict[int, float] = {}  # by rows, since the last measurement

    def knows(self, rows: int) -> bool:
        """Returns whether steps of about so many rows were measured."""
        return len(self._seconds.get((rows - 1).bit_length(), ())) >= self._LEAST

    def covers(self, rows: int) -> bool:
        """Returns whether so many rows are not far more than were measured."""
        points = self._points or self._sorted()
        return bool(points) and rows <= _FARTHER * points[-1][0]

    def measured(self, rows: int, seconds: float) -> None:
        last = self._seconds.setdefault((rows - 1).bit_length(), deque(maxlen=self._KEPT))
        last.append((rows, seconds))
        self._points.clear()
        self._estimates.clear()

    def seconds(self, rows: int) -> float:
        """Returns an estimate of a step's seconds. 0: nothing was measured, or steps take no time."""
        seconds = self._estimates.get(rows)
        if seconds is None:
            seconds = self._estimates[rows] = self._estimate(rows)
        return seconds

    def _estimate(self, rows: int) -> float:
        points = self._points or self._sorted()
        if not points:
            return 0.0
        below = max((point for point in points if point[0] <= rows), default=points[0])
        above = min((point for point in points if point[0] > below[0]), default=None)
        slope = self._slope_beyond(points) if above is None else (above[1] - below[1]) / (above[0] - below[0])
        return max(below[1] + slope * (rows - below[0]), 0.0)

    def _slope_beyond(self, points: list[tuple[float, float]]) -> float:
        """Returns the seconds of a row beyond the largest step that was measured."""
        last = points[-1]
        if len(points) == 1:
            return self._FIRST_SHARE * last[1] / last[0]
        before = points[-2]
        return (last[1] - before[1]) / (last[0] - before[0])

    def _sorted(self) -> list[tuple[float, float]]:
        longest = 0.0
        for _, measured in sorted(self._seconds.items()):
            longest = max(longest, median(seconds for _, seconds in measured))
            self._points.append((fmean(rows for rows, _ in measured), longest))
        return self._points


class _Candidate(NamedTuple):
    """The next guess of a text that may run. `chance`: that it and all before it are right, negative for the heap."""

    chance: float
    place: int  # of the text's rows in the plan
    depth: int


def make_guesser(config: SchedulerConfig, runner: Runner, draft: Runner | None = None) -> "Guesser | None":
    """Makes the guesser that a configuration asks for; None: nothing is guessed. draft: runs the draft, if any."""
    if not config.token_guesses:
        return None
    model = None if draft is None else DraftModel(draft, runner.vocab_size)
    return Guesser([PromptSource(), HistorySource()], StepCosts, runner.vocab_size, model)


class _Exploration:
    """Says when a step does the other thing than the steps before, to measure it: ever more seldom, if nothing changes.

    `patience`: steps until the next one that measures.
    """

    def __init__(self) -> None:
        self.patience = _EXPLORE
        self._same = 0  # steps since one did what the one before did not
        self._did = False

    @property
    def near(self) -> bool:
        """Returns whether the next step may measure."""
        return self._same >= self.patience - 1

    def due(self, does: bool) -> bool:
        """Notes whether a step would do it, and returns whether it does the other thing."""
        if does is self._did:
            self._same += 1
        else:
            self._same, self.patience = 0, _EXPLORE
        self._did = does
        if self._same < self.patience:
            return False
        self._same, self.patience = 0, min(2 * self.patience, _MOST_EXPLORE)
        return True


class Guesser:
    """Chooses the guesses of each step, and learns from what became of them.

    Args:
        sources: all are asked; the guess that is most likely right is taken.
        costs: makes what estimates the seconds of steps.
        vocab_size: tokens are below it.
        draft: guesses for many texts together; None: there is none.
    """

    def __init__(
        self,
        sources: Sequence[GuessSource],
        costs: Callable[[], StepCosts],
        vocab_size: int,
        draft: DraftModel | None = None,
    ) -> None:
        self._sources = list(sources)
        self._costs = {False: costs(), True: costs()}  # whether a step computes all logits of a row
        self._vocab_size = vocab_size
        self._rates: dict[tuple[str, int], Rate] = {}
        self._rows = _Exploration()  # steps with guesses: whether rows of some ran
        self._draft = draft
        self._draft_costs = costs()
        self._drafts = _Exploration()  # steps with texts for the draft: whether it ran
        self._drafted = 0.0  # seconds that it took for the last plan
        self._waits: deque[float] = deque([0.0], maxlen=_WAITS)  # see `waited`

    def attach(self, context: SchedulerContext, constrained: ConstrainedTexts) -> None:
        """Connects it to the scheduler that owns it."""
        self._kv = context.kv
        self._clock = context.clock
        self._draft_rows = context.config.max_step_tokens or _DRAFT_ROWS
        if self._draft is not None:
            assert not context.config.overlap, "a draft reads tokens that are known"
            self._draft.attach(context.kv, constrained, context.clock)
        self._overlap = context.config.overlap
        self._counters = context.counters
        self._faults = context.faults  # visited at engine.guess, for each source and text
        self._constrained = constrained
        context.table.on_text_end = self._text_ended

    # ------------------------------------------------------------------------------------------ planning

    def extend(self, plan: StepPlan) -> None:
        """Adds rows of guesses to a plan that is otherwise complete, where they are worth their time."""
        sampling = [
            index
            for index, rows in enumerate(plan.planned)
            if rows.plain or (rows.end == rows.request.length and rows.request.samples and not rows.later)
        ]
        plan.all_logits = any(row.request.samples and takes_all_logits(row.request) for row in plan.planned)
        self._drafted = 0.0
        if not ((self._sources or self._draft) and sampling):
            return
        found: dict[int, Guessed] = {}
        looked = self._rows.near or self._may_pay(plan, len(sampling))
        if looked:
            for index in sampling:
                request = plan.planned[index].request
                if request.goes_on and (guess := self._best(request)) is not None:
                    found[index] = guess
        drafted = self._add_drafts(plan, sampling, found) if self._draft is not None else set()
        if looked and not found:
            return
        counts = self._worth(plan, found, len(sampling))
        if self._rows.due(bool(counts)):
            counts = {} if counts else {next(iter(found)): 1}
        if drafted and not counts:
            counts = {min(drafted): 1}  # the draft has run, to measure
        chosen: dict[int, Guessed] = {}
        states = {slot for rows in plan.planned for run in rows.states for slot in (run.source, run.target)}
        for index, count in counts.items():
            if (guess := self._possible(plan.planned[index].request, found[index], count, states)) is not None:
                chosen[index] = guess
        others = sum(plan.planned[index].request.goes_on for index in sampling) - len(chosen)
        if chosen and (not self._overlap or delays_too_many(len(chosen), others)):
            plan.guess(chosen)

    def _may_pay(self, plan: StepPlan, sampling: int) -> bool:
        """Returns whether a row could be worth its time if its guess were as good as certain."""
        costs = self._costs_of(plan)
        rows = plan.row_count
        if not (costs.knows(sampling) and costs.covers(rows + 1)):
            return False
        more = costs.seconds(rows + 1) - costs.seconds(rows)
        return _MOST * costs.seconds(sampling) >= _MARGIN * more * sampling

    def _add_drafts(self, plan: StepPlan, sampling: Sequence[int], found: dict[int, Guessed]) -> set[int]:
        """Adds guesses of the draft for texts of which it knows more than the sources → those texts."""
        draft = self._draft
        assert draft is not None, "it is called with a draft"
        chances: dict[int, float] = {}
        for index in sampling:
            request = plan.planned[index].request
            if request.goes_on and draft.takes(request):
                chance = self._chance(request, _DRAFT, 0, _DRAFT_RATE)
                if index not in found or found[index].chance < chance:
                    chances[index] = chance
        costs, rows = self._costs_of(plan), plan.row_count
        if not (chances and costs.knows(len(sampling)) and costs.covers(rows + len(chances))):
            return set()
        requests = {index: plan.planned[index].request for index in chances}
        depth = self._depth(plan, list(requests.values()), list(chances.values()), len(sampling))
        if self._drafts.due(depth > 0) and depth == 0 and draft.missing(list(requests.values())) <= self._draft_rows:
            depth = 1
        asked = {
            index: count
            for index, request in requests.items()
            if (count := self._room(request, min(depth, self._most(request)))) > 0
        }
        guesses = self._ask_draft(draft, [(requests[index], count) for index, count in asked.items()])
        added = set()
        for index, tokens in zip(asked, guesses, strict=False):  # none, where the draft has failed
            if tokens:
                found[index] = Guessed(_DRAFT, tokens, 0, chances[index])
                added.add(index)
        return added

    def _room(self, request: Request, count: int) -> int:
        """Returns for how many of `count` guesses a text has spare slots."""
        try:
            return self._kv.stretch(request, count)
        except Exception:  # a text that needs slots later meets the error itself
            return 0

    def _ask_draft(self, draft: DraftModel, asked: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """Returns the draft's guesses, and measures it. A draft that fails is switched off, and there are none."""
        if not asked:
            return []
        try:
            self._faults("engine.guess")
            guesses, passes = draft.guess(asked, self._draft_rows)
        except Exception as error:
            self._draft = None
            self._warn(_DRAFT, error)
            return []
        self._drafted = sum(one.seconds for one in passes)
        for one in passes:
            self._draft_costs.measured(one.rows, one.seconds)
        self._counters.draft_rows += sum(one.rows for one in passes)
        self._counters.draft_seconds += self._drafted
        return guesses

    def _depth(self, plan: StepPlan, requests: Sequence[Request], chances: Sequence[float], sampling: int) -> int:
        """Returns how many tokens the draft is to guess of each of these texts; 0: none are worth the time.

        So many that a step brings most tokens for its seconds, those of the draft among them. What the draft has to
        compute of prompts first counts in parts, one for each step that a text may still take.
        """
        assert self._draft is not None, "it is called with a draft"
        costs, passes, texts = self._costs_of(plan), self._draft_costs, len(requests)
        if not passes.knows(texts):
            return 2  # the second pass has so many rows
        generations = [request.job for request in requests if isinstance(request.job, Generation)]
        left = sum(one.length_limit for one in generations) - sum(request.length for request in requests)
        late = max(0.0, passes.seconds(self._draft.missing(requests)) - passes.seconds(texts))
        alone = costs.seconds(sampling)
        best, depth = _DRAFT_MARGIN * sampling / max(alone, _INSTANT), 0
        for count in range(1, MOST_GUESSES + 1):
            if not costs.covers(sampling + count * texts):
                break
            more = sum(chance * (1 - chance**count) / (1 - chance) for chance in chances)
            share = min(1.0, (texts + more) / max(left, 1))
            seconds = costs.seconds(sampling + count * texts) + count * passes.seconds(texts) + share * late
            if (rate := (sampling + more) / max(seconds, _INSTANT)) > best:
                best, depth = rate, count
        return depth

    def _possible(self, request: Request, guess: Guessed, count: int, states: set[int]) -> Guessed | None:
        """Returns the first `count` tokens of a guess, as far as there are slots and its constraint allows them.

        states: slots of recurrent states that the step uses; those of the guess are added.
        """
        try:
            tokens = guess.tokens[: self._room(request, count)]
            allowed = self._constrained.allowed_after(request, tokens) if request.constrained else None
            if allowed is not None:
                tokens = tokens[: len(allowed)]
            if request.state is None:
                return guess._replace(tokens=tokens, allowed=allowed) if tokens else None
            runs = self._kv.guess_states(request, len(tokens), states)
            rows = sum(run.rows for run in runs)
            few = None if allowed is None else allowed[:rows]
            return guess._replace(tokens=tokens[:rows], allowed=few, states=runs) if runs else None
        except Exception:  # the step runs without it; a text that needs the same later meets the error itself
            return None

    def _best(self, request: Request) -> Guessed | None:
        """Returns the guess whose first token is most likely right."""
        most = self._most(request)
        pending = request.source != NO_SOURCE
        best: Guessed | None = None
        for source in tuple(self._sources):
            try:
                self._faults("engine.guess")
                guess = source.guess(request, most + pending)
                if guess is None:
                    continue
                tokens = guess.tokens
                if not 0 < len(tokens) <= most + pending or not all(0 <= t < self._vocab_size for t in tokens):
                    raise ValueError("it gave what is no guess")
                chance = self._chance(request, source.name, guess.kind, source.first_rates[guess.kind])
            except Exception as error:
                self._switch_off(source, error)
                continue
            if len(tokens) > pending and (best is None or chance > best.chance):
                best = Guessed(source.name, tokens[pending:], guess.kind, chance, tokens[0] if pending else None)
        return best

    def _most(self, request: Request) -> int:
        """Returns the most tokens that may be guessed of a text."""
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        return min(MOST_GUESSES, generation.length_limit - 1 - request.length)

    def _switch_off(self, source: GuessSource, error: Exception) -> None:
        self._sources.remove(source)
        self._warn(source.name, error)

    def _warn(self, name: str, error: Exception) -> None:
        """Counts a source that was switched off, and says why."""
        self._counters.guess_failures += 1
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        _log.warning("no more guesses come from %r, texts are not affected: %s", name, reason)

    def _chance(self, request: Request, source: str, kind: int, first: float) -> float:
        """Returns how likely a token of such a guess is right: as in this text so far, and in all others.

        first: before any was measured.
        """
        key = source, kind
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = Rate(4 * first, 4, 0.98)
        chance = rate.mean
        if (own := request.guess_rates.get(key)) is not None:
            chance = (own.right + 2 * chance) / (own.tried + 2)
        return min(max(chance, _LEAST), _MOST)

    def _worth(self, plan: StepPlan, found: Mapping[int, Guessed], sampling: int) -> dict[int, int]:
        """Returns how many tokens of which guesses run: {index: number}.

        A row runs if it brings more tokens in its time than a step that only decodes, without this row, and a margin
        more, because what is measured is never quite true.

        sampling: texts that get a token of this step anyway.
        """
        costs = self._costs_of(plan)
        if not (found and costs.knows(sampling)):
            return {}
        rows = plan.row_count
        left = plan.logits_left if plan.rows_left is None else min(plan.logits_left, plan.rows_left)
        heap = [
            _Candidate(-(guess.chance ** (1 if guess.assumed is None else 2)), index, 0)
            for index, guess in found.items()
        ]
        heapify(heap)
        tokens, seconds = float(sampling), costs.seconds(sampling)
        counts: dict[int, int] = {}
        while heap and left > 0 and costs.covers(rows + 1):
            chance, place, depth = heappop(heap)
            more = costs.seconds(rows + 1) - costs.seconds(rows)
            if -chance * seconds < _MARGIN * more * tokens:
                break
            tokens, seconds = tokens - chance, seconds + more
            rows, left = rows + 1, left - 1
            counts[place] = depth + 1
            if depth + 1 < len(found[place].tokens):
                heappush(heap, _Candidate(chance * found[place].chance, place, depth + 1))
        if self._overlap and tokens * costs.seconds(sampling) < _MARGIN * sampling * (seconds + median(self._waits)):
            return {}  # all of them together are not worth that the next step waits
        return counts

    def _costs_of(self, plan: StepPlan) -> StepCosts:
        return self._costs[plan.all_logits]

    # ------------------------------------------------------------------------------------------ learning

    def forget(self) -> None:
        """Forgets earlier texts; what was measured stays."""
        for source in self._sources:
            source.forget()

    def _text_ended(self, request: Request) -> None:
        for source in tuple(self._sources):
            try:
                source.learn(request)
            except Exception as error:
                self._switch_off(source, error)

    def decoded(self, plan: StepPlan, rows: int, seconds: float, *, alone: bool) -> None:
        """Takes the time by which a step without prompts has delayed the next one.

        Args:
            rows: guesses included.
            alone: no other step ran while it was planned.
        """
        waited = median(self._waits) if self._overlap and alone else 0.0
        self._costs_of(plan).measured(rows, max(0.0, seconds - self._drafted - waited))

    def waited(self, seconds: float) -> None:
        """Takes the time that a runner waited for a step which did not overlap with the one before.

        Where steps overlap that is the price of guesses: all rows of a step pay it together.
        """
        self._waits.append(seconds)

    def learn(self, rows: PlannedRows, accepted: int) -> None:
        """Counts the guesses of a text, of which the first `accepted` were right."""
        guessed = rows.guessed
        assert guessed is not None, "it had some"
        self._counters.add_guesses(guessed.source, len(guessed.tokens), accepted)
        known = rows.request.length - rows.end  # of its tokens: the text may have ended before the last guess
        wrong = int(accepted < min(known, len(guessed.tokens)))
        if guessed.assumed is not None:  # the token before them was guessed as well
            right = int(rows.request.tokens[rows.end - 1]) == guessed.assumed
            accepted, wrong = (accepted + 1, wrong) if right else (0, 1)
        key = guessed.source, guessed.kind
        self._rates[key].add(accepted, wrong)
        rows.request.guess_rates.setdefault(key, Rate(0.0, 0.0, 0.9)).add(accepted, wrong)
