"""Commits a step: reads its logits, and turns what they say into tokens, log-probabilities and endings.

`read_step_result` samples tokens and computes log-probabilities. Rows are read together. If that raises, each row is
tried alone (batch.isolate): requests whose rows raise end with the error, and the others get the results they would
have had without them. The keys of the step are sound by then.

`Commit` applies the result. When a step completes, the next one may already be running (step.py). `computed` of a
request then counts rows that have not been read yet. So Commit takes the rows that were read from the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import EngineError
from ...lang.protocol import FinishReason
from ..core.batch import Logits, LogitsError, RowNeed, RowRequests, isolate
from ..core.messages import EmbedEnded, IdLogprob, MarksPlaced, Tokens
from ..sampling.sampler import Sampler, SampleRequest, Wanted, bits_of, describe, draws_of, look_up
from .choice_search import ChoiceSearches, questions
from .constrained import ConstrainedTexts
from .request import Choosing, Embedding, Generation, Phase, Prefilling, Request, Scoring, Stop, accept
from .request_table import SchedulerContext, score_ended
from .step import PlannedRows, StepPlan, allowed_of, forbidden_ends

P = TypeVar("P")
R = TypeVar("R")


class SampledToken(NamedTuple):
    """A new token, None when a constraint ends the text without one; its log-probability when requested."""

    token: int | None
    logprob: IdLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step, keyed by request number.

    `plain`: of all rows in their order the token that the runner chose for a plain row; -1: see the other results.
    `known`: log-probabilities of prompt tokens, in order. `forced`: the same of generated tokens that were appended
    before their rows ran. `sampled`: new tokens. `asked`: log-probabilities for choice searches, in order of the rows.
    `states`: hidden states of an Embedding's rows, [n, hidden]. `errors`: why a request fails.
    """

    plain: Sequence[int]
    known: Mapping[int, list[IdLogprob]]
    forced: Mapping[int, list[IdLogprob]]
    sampled: Mapping[int, SampledToken]
    asked: Mapping[int, list[NDArray[np.float64]]]
    states: Mapping[int, torch.Tensor]
    errors: Mapping[int, Exception]


def read_step_result(
    logits: Logits,
    planned: Sequence[PlannedRows],
    row_requests: RowRequests | None,
    sampler: Sampler,
    errors: Mapping[int, Exception],
) -> StepResult:
    """Reads tokens and log-probabilities of a step. Rows the runner left unsampled are sampled here.

    planned: rows of the step, of requests that have not ended. row_requests: those of the batch. errors: of requests
    that have already failed in this step.

    Log-probabilities are the model's own: they are taken before the sampler changes rows.

    Raises:
        Exception: the forward pass has failed after all, on a device that reports it late.
    """
    tokens = logits.tokens.tolist()
    plain = [tokens[rows.first_index] if rows.plain else -1 for rows in planned]
    if errors:
        plain = [-1 if rows.request.number in errors else token for rows, token in zip(planned, plain, strict=True)]
    others = [rows for rows, token in zip(planned, plain, strict=True) if token < 0]
    if not others:
        return StepResult(plain, {}, {}, {}, {}, {}, {})
    reading = _Reading(logits, tokens, row_requests, sampler, dict(errors))
    going = {rows.request.number: rows for rows in others if rows.request.number not in reading.errors}
    telling = {n: rows for n, rows in going.items() if rows.first_logit < min(rows.last_logit, rows.request.length - 1)}
    known, forced = reading.known(telling), reading.forced(telling)
    result = StepResult(
        plain, known, forced, reading.sampled(going), reading.asked(going), reading.states(going), reading.errors
    )
    if reading.errors and len(logits.values):
        logits.values[0, 0].item()
    return result


_Rows = Mapping[int, PlannedRows]  # by number of the request


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Reads one step's logits. All mappings are keyed by request number.

    `errors` grows; requests in it are left out of everything that follows.
    """

    logits: Logits
    tokens: list[int]  # those of the logits
    row_requests: RowRequests | None
    sampler: Sampler
    errors: dict[int, Exception] = field(default_factory=dict)

    # ---------------------------------------------------------------------------------------- what is wanted

    def known(self, planned: _Rows) -> dict[int, list[IdLogprob]]:
        """Returns log-probabilities of tokens of prompts and scored sequences."""
        return self._describe(self._one_by_one(self._going(planned), self._known_tokens))

    def forced(self, planned: _Rows) -> dict[int, list[IdLogprob]]:
        """Returns log-probabilities of generated tokens that were known before their rows ran."""
        return self._describe(self._one_by_one(self._going(planned), self._forced_tokens))

    def sampled(self, planned: _Rows) -> Mapping[int, SampledToken]:
        """Returns new tokens: chosen by the runner, chosen here by the row requests, or sampled from logits."""
        tokens, errors = self.tokens, self.logits.errors
        described = self.row_requests.described if self.row_requests is not None else None
        told: dict[int, SampledToken] = {}  # by tokens that nothing overrules, and nothing more is asked of
        owners: dict[int, PlannedRows] = {}
        chosen: dict[int, int] = {}
        for number, rows in self._going(planned).items():
            request, row = rows.request, rows.logits_of_last
            if rows.end != request.length or not request.samples:
                continue
            if errors and row in errors:
                self.errors[number] = errors[row]
            elif tokens[row] >= 0 and not request.constrained and (described is None or not described[row]):
                told[number] = SampledToken(tokens[row], None)
            else:
                owners[number], chosen[number] = rows, tokens[row]
        if not owners:
            return told
        if self.row_requests is not None:
            left = [number for number, token in chosen.items() if token < 0]
            picked = {n: owners[n] for n in left if self.row_requests.kinds[owners[n].logits_of_last] != RowNeed.LOGITS}
            chosen.update(self._together(picked, self._pick))
        settled = self._settle(owners, {number: token for number, token in chosen.items() if token >= 0})
        sampled = {number: SampledToken(token, None) for number, token in settled.items()}
        sampled.update(self._described(owners, settled))
        sampled.update(
            self._sample({n: owners[n] for n, token in chosen.items() if token < 0 and n not in self.errors})
        )
        return {**told, **self._going(sampled)}

    def asked(self, planned: _Rows) -> dict[int, list[NDArray[np.float64]]]:
        """Returns, for each row of a choice search, the log-probabilities that it requested."""
        asking = {n: rows for n, rows in self._going(planned).items() if isinstance(rows.request.job, Choosing)}
        wanted = self._one_by_one(asking, self._questions)
        return self._together(wanted, self._look_up)

    # ---------------------------------------------------------------------------------------- new tokens

    def _pick(self, owners: Sequence[PlannedRows]) -> list[int]:
        """Chooses tokens by the batch's row_requests, for rows that the runner answered with logits."""
        assert self.row_requests is not None, "called for rows that need a token"
        rows = np.array([rows.logits_of_last for rows in owners], dtype=np.int64)
        places = np.array([_place(self.logits, row) for row in rows.tolist()], dtype=np.int64)
        draws = draws_of(self.row_requests, rows, places, self.sampler.vocab_size)
        tokens: list[int] = self.sampler.choose(self.logits.values, draws).tolist()
        return tokens

    def _described(self, owners: _Rows, tokens: Mapping[int, int | None]) -> dict[int, SampledToken]:
        """Returns tokens with their log-probabilities, for rows that requested both."""
        described = self.row_requests.described if self.row_requests is not None else None
        if described is None or not described.any():
            return {}
        asking = {
            number: (owners[number], token)
            for number, token in tokens.items()
            if token is not None and described[owners[number].logits_of_last]
        }
        wanted = self._one_by_one(asking, self._wanted)
        logprobs = self._together(wanted, lambda some: describe(self.logits.values, some, self.sampler.chooser))
        return {number: SampledToken(tokens[number], logprob) for number, logprob in logprobs.items()}

    def _wanted(self, chosen: tuple[PlannedRows, int]) -> Wanted:
        rows, token = chosen
        return Wanted(_place(self.logits, rows.logits_of_last), token, _top(rows.request))

    def _sample(self, owners: _Rows) -> dict[int, SampledToken]:
        """Samples tokens from logits that the sampler changes; log-probabilities come from the unchanged logits."""
        if not owners:
            return {}
        values = self.logits.values
        draws = self._one_by_one(owners, self._sample_request)
        asked = [number for number in draws if _wants_logprobs(owners[number].request)]
        unadjusted = values[[draws[number].row for number in asked]] if asked else values[:0]
        tokens = self._settle(owners, self._together(draws, lambda some: self.sampler.sample(values, some)))
        for number in draws:
            if isinstance(self.errors.get(number), LogitsError) and _sound(values[draws[number].row]):
                self.errors[number] = EngineError(
                    "no token can be chosen: those that may come have the probability 0; the model cannot spell what "
                    "the constraint or min_tokens asks for"
                )
        wanted = {
            number: Wanted(place, token, draws[number].sampling.top_logprobs)
            for place, number in enumerate(asked)
            if (token := tokens.get(number)) is not None
        }
        logprobs = self._together(wanted, lambda some: describe(unadjusted, some, self.sampler.chooser))
        return {number: SampledToken(token, logprobs.get(number)) for number, token in tokens.items()}

    def _sample_request(self, rows: PlannedRows) -> SampleRequest:
        request = rows.request
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        return SampleRequest(
            row=_place(self.logits, rows.logits_of_last),
            sampling=generation.sampling,
            seed=generation.seed,
            position=request.length,
            counts=generation.counts,
            prompt=request.tokens[: request.prompt_length],
            forbidden=forbidden_ends(request, generation),
            mask=bits_of(allowed_of(request, generation), self.sampler.vocab_size),
        )

    def _settle(self, owners: _Rows, tokens: Mapping[int, int]) -> dict[int, int | None]:
        """Settles tokens with the requests' constraints. That advances each constraint: call it once for each token."""
        sampled = {number: (owners[number].request, token) for number, token in tokens.items()}
        return self._one_by_one(sampled, lambda entry: _settled(*entry))

    # ---------------------------------------------------------------------------------------- known tokens

    def _known_tokens(self, rows: PlannedRows) -> list[Wanted]:
        request = rows.request
        if isinstance(request.job, Choosing):
            return []
        return self._tokens(rows, rows.first_logit, min(rows.last_logit, request.prompt_length - 1))

    def _forced_tokens(self, rows: PlannedRows) -> list[Wanted]:
        request = rows.request
        if not _wants_logprobs(request):
            return []
        assert isinstance(request.job, Generation), "only generations have tokens of their own"
        first = max(rows.first_logit, request.prompt_length - 1 + len(request.job.logprobs))
        return self._tokens(rows, first, min(rows.last_logit, request.length - 1))

    def _tokens(self, rows: PlannedRows, first: int, last: int) -> list[Wanted]:
        """Requests log-probabilities of the known tokens that rows [first, last) predict: row p − 1 that of token p."""
        if first >= last:
            return []
        tokens = rows.request.tokens[first + 1 : last + 1].tolist()
        index = rows.first_index - rows.first_logit
        top = _top(rows.request)
        return [Wanted(_place(self.logits, index + row), token, top) for row, token in enumerate(tokens, first)]

    def _describe(self, wanted: Mapping[int, list[Wanted]]) -> dict[int, list[IdLogprob]]:
        return self._together({number: own for number, own in wanted.items() if own}, self._describe_all)

    def _describe_all(self, wanted: Sequence[list[Wanted]]) -> list[list[IdLogprob]]:
        flat = [want for own in wanted for want in own]
        described = iter(describe(self.logits.values, flat, self.sampler.chooser))
        return [[next(described) for _ in own] for own in wanted]

    # ---------------------------------------------------------------------------------------- searches

    def _questions(self, rows: PlannedRows) -> list[tuple[int, NDArray[np.int32]]]:
        asked = questions(rows.request, rows.first_logit, rows.last_logit)
        return [(_place(self.logits, row), ids) for row, ids in enumerate(asked, rows.first_index)]

    def _look_up(self, asked: Sequence[list[tuple[int, NDArray[np.int32]]]]) -> list[list[NDArray[np.float64]]]:
        found = iter(look_up(self.logits.values, [entry for own in asked for entry in own], self.sampler.chooser))
        return [[next(found) for _ in own] for own in asked]

    # ---------------------------------------------------------------------------------------- hidden states

    def states(self, planned: _Rows) -> dict[int, torch.Tensor]:
        """Returns the hidden states of each Embedding's rows."""
        return self._one_by_one({n: rows for n, rows in self._going(planned).items() if rows.hidden}, self._states)

    def _states(self, rows: PlannedRows) -> torch.Tensor:
        assert self.logits.hidden is not None, "the step was asked for them"
        states = self.logits.hidden[rows.hidden_index : rows.hidden_index + rows.hidden]
        if not bool(states.isfinite().all()):
            raise LogitsError
        return states

    # ---------------------------------------------------------------------------------------- errors

    def _going(self, entries: Mapping[int, P]) -> Mapping[int, P]:
        if not self.errors:
            return entries
        return {number: entry for number, entry in entries.items() if number not in self.errors}

    def _together(self, entries: Mapping[int, P], function: Callable[[Sequence[P]], Sequence[R]]) -> dict[int, R]:
        """Calls a function for all entries together. The function must change nothing when it raises."""
        return self._sorted(list(entries), isolate(list(entries.values()), function))

    def _one_by_one(self, entries: Mapping[int, P], function: Callable[[P], R]) -> dict[int, R]:
        """Calls a function once for each entry."""
        answers: list[R | Exception] = []
        for entry in entries.values():
            try:
                answers.append(function(entry))
            except Exception as error:
                answers.append(error)
        return self._sorted(list(entries), answers)

    def _sorted(self, numbers: Sequence[int], answers: Sequence[R | Exception]) -> dict[int, R]:
        """Returns the answers by request number; exceptions go to `errors`."""
        good: dict[int, R] = {}
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, Exception):
                self.errors[number] = answer
            else:
                good[number] = answer
        return good


def _settled(request: Request, token: int) -> int | None:
    """Returns the token that the request's constraint settles on for a sampled one."""
    generation = request.job
    assert isinstance(generation, Generation), "only generations sample"
    if generation.cursor is None:
        return token
    return generation.cursor.settle(token, generation.length_limit - request.length)


def _place(logits: Logits, row: int) -> int:
    place = int(logits.places[row])
    if place < 0:
        raise _no_answer(row)
    return place


def _no_answer(row: int) -> EngineError:
    return EngineError(f"the model gave neither logits nor a token for row {row} of the step's logits")


def _wants_logprobs(request: Request) -> bool:
    return isinstance(request.job, Generation) and request.job.wants_logprobs


def _top(request: Request) -> int:
    """Returns the number of most likely tokens to report with a log-probability."""
    return request.job.sampling.top_logprobs if isinstance(request.job, Generation) else 0


def _sound(logits: torch.Tensor) -> bool:
    """Returns whether the logits describe a distribution. logits: [vocab], unchanged by the sampler."""
    return bool(logits.isfinite().any()) and not bool((logits.isnan() | logits.isposinf()).any())


class Commit:
    """Applies the results of steps to their requests."""

    def __init__(self, context: SchedulerContext, constrained: ConstrainedTexts, searches: ChoiceSearches) -> None:
        self._context = context
        self._kv = context.kv
        self._table = context.table
        self._counters = context.counters
        self._timing = context.timing
        self._clock = context.clock
        self._faults = context.faults
        self._token_bytes, self._longest = context.token_bytes, context.factory.longest
        self._constrained = constrained
        self._searches = searches
        self._now = 0.0  # on the clock, when the results of the step were there
        self._verified: set[int] = set()  # requests whose new tokens are told when all rows of guesses were read

    def begin(self, plan: StepPlan) -> None:
        """Counts the rows of the plan, just before they run."""
        counters = self._counters
        for rows in plan.planned:
            request = rows.request
            if rows.plain and request.reached <= rows.start:
                request.computed = request.reached = rows.end  # of a new token: no counter changes
                continue
            new = max(rows.start, request.reached)
            counters.computed_prompt_tokens += max(0, min(rows.end, request.prompt_length) - new)
            counters.recomputed_tokens += min(rows.end, new) - rows.start
            counters.duplicate_rows += max(0, min(rows.known, rows.end) - rows.start)
            again = max(0, min(rows.known, rows.first_logit) - rows.start)
            if rows.states:
                counters.snapshot_misses += again
            else:
                counters.window_misses += again
            request.computed = rows.end
            request.reached = max(request.reached, rows.end)

    def commit(self, planned: Sequence[PlannedRows], result: StepResult) -> None:
        """Applies the result of these rows, which have run."""
        self._now = self._clock.now()
        telling = bool(result.known or result.forced)
        faults, commit_plain, running = self._faults, self._commit_plain, Phase.RUNNING
        for rows, token in zip(planned, result.plain, strict=True):
            request = rows.request
            if request.phase is not running:
                continue  # its message has failed in this commit
            try:
                faults("engine.commit")
                if token >= 0:
                    commit_plain(request, token)
                    continue
                if (error := result.errors.get(request.number)) is not None:
                    self._table.fail(request, error)
                    continue
                if rows.start < request.prompt_length:
                    self._kv.adopt(request, rows.end)
                if rows.end >= request.prompt_length:  # its first row may lie after a prompt that was cached whole
                    self._keep_marks(request)
                if telling:
                    self._commit_known(request, result)
                if (sampled := result.sampled.get(request.number)) is not None:
                    self._commit_token(request, sampled)
                else:
                    self._commit_request(request, result, last=rows.end == request.length)
            except Exception as error:
                self._table.fail(request, error)

    def verify(
        self, planned: Sequence[PlannedRows], result: StepResult, read: Callable[[Sequence[PlannedRows]], StepResult]
    ) -> dict[int, int]:
        """Applies the result of rows that rows of guesses follow, then those of the guesses that were right.

        The row of a guess counts once the text has this token. It is read then, as if it had run in a step of its own.

        Args:
            result: of these rows without guesses.
            read: reads further rows.

        Returns:
            By number of the request: how many of its guesses were right.
        """
        self._verified = {rows.request.number for rows in planned}
        try:
            self.commit(planned, result)
            going = list(planned)
            while going:
                following = [(rows, after) for rows in going if (after := self._following(rows)) is not None]
                going = [rows for rows, _ in following]
                if following:
                    self.commit([after for _, after in following], read([after for _, after in following]))
        finally:
            self._verified = set()
        for rows in planned:
            request = rows.request
            self._kv.settle_guess_states(request)
            if request.phase is Phase.RUNNING and isinstance(request.job, Generation):
                self._timing.committed(request, request.job)
                self._stream(request, request.job)
        return {rows.request.number: rows.right_guesses for rows in planned}

    def _following(self, rows: PlannedRows) -> PlannedRows | None:
        """Returns the rows of guesses that the text has reached since; None: there are none."""
        request = rows.request
        if request.phase is not Phase.RUNNING:
            return None
        end = rows.end + rows.right_guesses
        if end > request.computed and end == request.length and request.constrained:
            if self._constrained.ready(request):
                end = rows.end + rows.right_guesses  # forced tokens may have followed
            else:
                end -= 1  # its mask is not finished: the row runs again
        start = request.computed
        if request.phase is not Phase.RUNNING or end <= start:
            return None
        request.computed = request.kv_length = end
        request.reached = max(request.reached, end)
        if isinstance(request.job, Generation):
            for token in range(start - request.prompt_length, end - request.prompt_length):
                request.job.origins.setdefault(token, "guessed")
        self._kv.advance_state(request, end)
        first, last = request.logit_rows(start, end)
        return PlannedRows(request, start, end, start, first, last, rows.logits_of_last + first - (rows.end - 1))

    def _commit_known(self, request: Request, result: StepResult) -> None:
        """Takes the log-probabilities of tokens that were known before their rows ran."""
        known = result.known.get(request.number, [])
        if isinstance(request.job, Generation):
            request.job.prompt_logprobs.extend(known)
            request.job.logprobs.extend(result.forced.get(request.number, []))
        elif isinstance(request.job, Scoring):
            request.job.logprobs.extend(entry.logprob for entry in known)

    def _commit_request(self, request: Request, result: StepResult, *, last: bool) -> None:
        """Commits rows that gave no new token. last: they are the last that the request has now."""
        match request.job:
            case Generation() as generation:
                if generation.stop is not None and not request.owes_logprobs:
                    self.finish(request)
                    return
                if request.number not in self._verified:
                    self._stream(request, generation)
            case Choosing():
                self._searches.take(request, result.asked.get(request.number, []))
            case Embedding() as embedding:
                if (states := result.states.get(request.number)) is not None:
                    embedding.add(states)
            case Scoring() | Prefilling():
                pass
            case _:
                assert_never(request.job)
        if last:
            self.finish(request)

    def _commit_plain(self, request: Request, token: int) -> None:
        """Commits the token of a plain row: `_commit_token` for it, in half of the time."""
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        self._counters.completion_tokens += 1
        stop = accept(request, token, self._token_bytes, self._longest)
        self._timing.committed(request, generation, self._now)
        if stop is not None:
            self._table.end_text(request, stop)
        elif generation.stream:
            self._stream(request, generation)

    def _commit_token(self, request: Request, sampled: SampledToken) -> None:
        generation = request.job
        assert isinstance(generation, Generation), "only generations sample"
        cursor = generation.cursor
        if sampled.logprob is not None and not (cursor is not None and cursor.restored):
            generation.logprobs.append(sampled.logprob)
        if cursor is None:
            assert sampled.token is not None, "only a constraint ends a text without a token"
            stop = self._context.append_token(request, sampled.token)
        else:
            stop = self._constrained.commit(request, generation, sampled.token)
        if stop is not None:
            self._timing.committed(request, generation, self._now)
            self._table.end_text(request, stop)
        elif request.number not in self._verified:
            self._timing.committed(request, generation, self._now)
            self._stream(request, generation)

    def _stream(self, request: Request, generation: Generation) -> None:
        """Sends new tokens; forced tokens wait for their log-probabilities when these are wanted."""
        known = len(generation.logprobs) if generation.wants_logprobs else request.generated
        if generation.stream and known > generation.sent:
            token_ids = request.generated_ids[generation.sent : known]
            healed = generation.cursor.healed if generation.cursor is not None else 0
            self._table.events.append(
                Tokens(request.message_id, token_ids, generation.logprobs[generation.sent : known], healed)
            )
            generation.sent = known

    def _keep_marks(self, request: Request) -> None:
        """Keeps the prefixes that the request marks, once, and says so: its prompt is computed, and it is open."""
        if request.marks is not None and not request.marked:
            request.marked = True
            placed = self._kv.keep(request, request.marks, self._clock.now())
            job = request.job
            healed = job.cursor.healed if isinstance(job, Generation) and job.cursor is not None else 0
            tokens = request.prompt_length + (healed > 0)
            self._table.events.append(MarksPlaced(request.message_id, placed, tokens, request.cached_tokens))

    def finish(self, request: Request) -> None:
        """Ends a request that needs no more keys and no more tokens.

        A score ends when the last of its sequences does.
        """
        self._keep_marks(request)  # where the row of the prompt's last token has not run
        match request.job:
            case Generation(stop=stop):
                self._table.finish_text(request, stop or Stop(FinishReason.LENGTH, None, 0))  # no stop: max_tokens=0
            case Scoring(group=group):
                self._table.release(request)
                if not self._table.alive[request.message_id]:
                    self._counters.finished += 1
                    self._table.end(request.message_id, score_ended(request.message_id, group))
            case Choosing():
                self._searches.finish(request)
            case Embedding() as embedding:
                self._counters.finished += 1
                self._table.end(request.message_id, self._embedded(request, embedding))
            case Prefilling(pin=seconds):
                if seconds is not None:
                    self._kv.pin(request, seconds=seconds, now=self._clock.now())
                self._table.end(request.message_id, None)
            case _:
                assert_never(request.job)

    def _embedded(self, request: Request, embedding: Embedding) -> EmbedEnded:
        """Computes the vector from the pooled hidden states."""
        head = self._context.vectors
        assert head is not None, "the message was accepted"
        assert embedding.total is not None, "its rows have run"
        vector = head.vector(embedding.total / embedding.rows, embedding.dimensions)
        return EmbedEnded(request.message_id, vector, request.prompt_length, request.cached_tokens)
