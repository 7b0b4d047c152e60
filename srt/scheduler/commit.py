"""Commits a step: turns its results into tokens, log-probabilities and endings.

When a step completes, the next one may already be running (overlap.py). `computed` of a request then counts rows that
have not been read yet. So commit takes the rows that were read from the step, not from the request.
"""

from collections.abc import Sequence
from typing import assert_never

from ...lang.protocol import FinishReason
from ..core.messages import Tokens
from .choice_search import ChoiceSearches
from .constrained import ConstrainedTexts
from .context import SchedulerContext
from .request import Choosing, Generation, Phase, Prefilling, Request, Scoring
from .request_table import score_ended
from .step_plan import PlannedRows, StepPlan
from .step_results import SampledToken, StepResult
from .stopping import Stop


class Commit:
    """Turns the results of a step into tokens, log-probabilities and endings."""

    def __init__(self, context: SchedulerContext, constrained: ConstrainedTexts, searches: ChoiceSearches) -> None:
        self._context = context
        self._kv = context.kv
        self._table = context.table
        self._counters = context.counters
        self._clock = context.clock
        self._faults = context.faults
        self._constrained = constrained
        self._searches = searches

    def begin(self, plan: StepPlan) -> None:
        """Counts the rows of the plan, just before they run."""
        counters = self._counters
        for rows in plan.planned:
            request = rows.request
            new = max(rows.start, request.reached)
            counters.computed_prompt_tokens += max(0, min(rows.end, request.prompt_length) - new)
            counters.recomputed_tokens += min(rows.end, new) - rows.start
            counters.duplicate_rows += max(0, min(rows.known, rows.end) - rows.start)
            request.computed = rows.end
            request.reached = max(request.reached, rows.end)

    def commit(self, planned: Sequence[PlannedRows], result: StepResult) -> None:
        """Applies the result of these rows, which have run."""
        for rows in planned:
            request = rows.request
            if request.phase is not Phase.RUNNING:
                continue  # its message has failed in this commit
            try:
                self._faults("engine.commit")
                if (error := result.errors.get(request.number)) is not None:
                    self._table.fail(request, error)
                    continue
                if rows.start < request.prompt_length:
                    self._kv.adopt(request, rows.end)
                self._commit_request(request, result, last=rows.end == request.length)
            except Exception as error:
                self._table.fail(request, error)

    def _commit_request(self, request: Request, result: StepResult, *, last: bool) -> None:
        """Commits the result of one request. last: its rows in this step are the last that it has now."""
        known = result.known.get(request.number, [])
        match request.job:
            case Generation() as generation:
                generation.prompt_logprobs.extend(known)
                generation.logprobs.extend(result.forced.get(request.number, []))
                sampled = result.sampled.get(request.number)
                if sampled is not None:
                    self._commit_token(request, generation, sampled)
                    return
                if generation.stop is not None and not request.owes_logprobs:
                    self.finish(request)
                    return
                self._stream(request, generation)
            case Scoring(logprobs=values):
                values.extend(entry.logprob for entry in known)
            case Choosing():
                self._searches.take(request, result.asked.get(request.number, []))
            case Prefilling():
                pass
            case _:
                assert_never(request.job)
        if last:
            self.finish(request)

    def _commit_token(self, request: Request, generation: Generation, sampled: SampledToken) -> None:
        cursor = generation.cursor
        if sampled.logprob is not None and not (cursor is not None and cursor.restored):
            generation.logprobs.append(sampled.logprob)
        if cursor is None:
            assert sampled.token is not None, "only a constraint ends a text without a token"
            stop = self._context.append_token(request, sampled.token)
        else:
            stop = self._constrained.commit(request, generation, sampled.token)
        if stop is not None:
            self._table.end_text(request, stop)
        else:
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

    def finish(self, request: Request) -> None:
        """Ends a request that needs no more keys and no more tokens.

        A score ends when the last of its sequences does.
        """
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
            case Prefilling(pin=seconds):
                if seconds is not None:
                    self._kv.pin(request, seconds=seconds, now=self._clock.now())
                self._table.end(request.message_id, None)
            case _:
                assert_never(request.job)
