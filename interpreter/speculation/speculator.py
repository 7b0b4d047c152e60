"""Speculation in one stream: requests surplus text, and answers later gens from it.

gen ──► in the surplus? ──yes──► its text, no call
          │ no: it is dropped, unless the call below generates the same text
          ▼
        worth more text? ──yes──► one call without stops ──► its end is certain? ──yes──► text, and a new surplus
          │ no                                                 │ no: counted as waste
          ▼                                                    ▼
        the plain call  ◄──────────────────────────────────────┘
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ...lang.errors import BudgetError, CapabilityError, EngineError, RequestError
from ...lang.ops import Gen, Select
from ...lang.prompt import Prompt
from ...lang.protocol import Final, GenRequest, Speculation, Usage
from ...lang.sampling import MAX_TOKENS, SamplingParams
from .. import selecting
from ..calls import OnChunk
from ..guarantees import guarantee
from ..guarantees.guarantee import Reply
from ..position import Position, text_of
from ..run import RunSpeculation
from ..steps import Step
from ..variables import Meta, meta_of_completion
from .planner import Outlook, look, tokens_of
from .replies import (
    End,
    Field,
    LongReply,
    Pieces,
    Surplus,
    completion_of,
    end_of,
    lead_of,
    manner_of,
    reaches_end,
    reply_of,
    speaks_plainly,
)

if TYPE_CHECKING:
    from ..executor import StepQueue
    from ..run import Run

LONG = "-s"  # ends the id of a call for more text than its gen needs
USUAL_PRICES = (1.0, 4.0)  # of an input and an output token, for models without a price: the ratio is what counts


class _Refused(Exception):
    """A provider refused a call for more text."""


class Speculator:
    """Answers the gens of one stream. A branch begins without a surplus.

    Args:
        run: its streams share a setting, a planner and a ledger.
        queue: of the stream, for its next steps.
        position: of the stream's beginning.
    """

    __slots__ = ("_answered", "_queue", "_run", "_shared", "_surplus")

    def __init__(self, run: "Run", shared: RunSpeculation, queue: "StepQueue", position: Position) -> None:
        self._run = run
        self._shared = shared
        self._queue = queue
        self._surplus: Surplus | None = None
        # The beginning of the turn in which something has been generated, so that not all of it is the program's.
        self._answered: Prompt | None = position.turn.start if position.turn is not None else None

    async def reply(
        self, op: Gen, request: GenRequest, position: Position, on_chunk: OnChunk, *, thinks: bool
    ) -> Reply:
        """Answers as `guarantee.ask` does, with fewer calls. `thinks`: not all of the text stays in the prompt."""
        plain = speaks_plainly(request.sampling) and not thinks
        reply = await self._taken(op, plain, request, position)
        if reply is None:
            reply = await self._asked(op, plain, request, position, on_chunk)
        self.note_answer(position)
        return reply

    def drop(self) -> None:
        """Drops the surplus, at the border of a turn."""
        self._surplus = None

    def note_answer(self, position: Position) -> None:
        """Records that the open turn holds generated text."""
        if position.turn is not None:
            self._answered = position.turn.start

    # -------------------------------------------------------------------------------- from what is in hand

    async def _taken(self, op: Gen, plain: bool, request: GenRequest, position: Position) -> Reply | None:
        surplus, self._surplus = self._surplus, None
        if surplus is None:
            return None
        start = surplus.reached(position.prompt)
        fits = plain and manner_of(request.sampling) == surplus.manner
        field = self._field(op, request.sampling)
        end = await self._end(field, surplus.reply, start) if fits and start is not None else None
        self._shared.planner.note((surplus.before, op.name or ""), end is not None)
        if start is None or end is None:
            self._run.ledger.note(Speculation(misses=1))
            if start is not None and (not fits or reaches_end(field, surplus.reply, start)):
                self._surplus = surplus
            return None
        self._surplus = replace(surplus, before=op.name or "")
        taken = surplus.reply.counted(start, end.read)
        self._shared.planner.note_length(op.name or "", taken)
        self._run.ledger.note(
            Speculation(
                calls_saved=1,
                input_tokens_saved=surplus.prompt_tokens + surplus.reply.counted(0, start),
                output_tokens_wasted=-taken,
                hits=1,
            )
        )
        final = Final(surplus.request_id, (completion_of(surplus.reply, start, end),), Usage())
        return Reply(final, [_facts(final, end, taken, calls=0)])

    # -------------------------------------------------------------------------------- by a call

    async def _asked(self, op: Gen, plain: bool, request: GenRequest, position: Position, on_chunk: OnChunk) -> Reply:
        capabilities, planner = self._run.backend.capabilities, self._shared.planner
        field = self._field(op, request.sampling)
        refused = False
        recorded = self._recorded(request)
        refuses = recorded is None and planner.refuses(capabilities.name, "more tokens")
        eligible = plain and field.ends_inside and not field.enforced and self._surplus is None
        if eligible and not refuses:
            lead, anchor = "", position.prompt
            if not capabilities.continues:
                lead, anchor = lead_of(position, self._answered)
            longer = await self._longer(op, field, request, lead, anchor) if recorded is None else recorded
            if longer:
                try:
                    reply = await self._long_call(op, field, request, lead, anchor, longer[0], on_chunk)
                    if reply is not None:
                        return reply
                except _Refused:
                    refused = True  # perhaps for its length; the plain call says whether that was the reason
                except BudgetError:
                    pass  # others have spent meanwhile what there was room for
        reply = await guarantee.ask(self._run.calls, capabilities, op, request, on_chunk, position)
        if refused:
            planner.note_refusal(capabilities.name, "more tokens")
        planner.note_length(op.name or "", reply.final.usage.completion_tokens)
        for facts in reply.facts:
            facts["speculated"] = False
        return reply

    def _recorded(self, request: GenRequest) -> tuple[SamplingParams, ...] | None:
        """Returns the parameters of the call for more text in the journal, () for none; None where it has no call."""
        stored = self._run.stored
        return None if stored is None else stored.speculated(request.id)

    async def _longer(
        self, op: Gen, field: Field, request: GenRequest, lead: str, anchor: Prompt
    ) -> tuple[SamplingParams, ...]:
        """Returns the parameters of a call that covers the following gens; () for the plain call."""
        tokens = await self._tokens(op, field, request, lead, anchor)
        if not tokens:
            return ()
        return (msgspec.structs.replace(request.sampling, stop=(), stop_regex=(), max_tokens=tokens),)

    async def _tokens(self, op: Gen, field: Field, request: GenRequest, lead: str, anchor: Prompt) -> int:
        """Returns the number of tokens of a call that covers the following gens; 0 for the plain call."""
        most, sampling = self._shared.setting.tokens, request.sampling
        manner = manner_of(sampling)

        def takes(step: Step) -> SamplingParams | None:
            following = self._sampling(step)
            fits = following is not None and speaks_plainly(following) and manner_of(following) == manner
            return following if fits else None

        def enough(seen: Outlook) -> bool:
            return seen.closed or (most is not None and bool(seen.coming))

        seen = await look(self._queue, self._run, takes, enough)
        if not seen.can_follow(field):
            return 0
        own, extra = sampling.max_tokens, most
        if extra is None:
            own = self._shared.planner.tokens(op.name or "", sampling)
            prompt_tokens = tokens_of(text_of(list(request.prompt)))
            extra = self._shared.planner.worthwhile(op.name or "", seen.coming, prompt_tokens, self._prices())
        if not extra:
            return 0
        tokens = min(own + extra + 2 * tokens_of(lead), MAX_TOKENS, *self._limits(anchor))
        return tokens if tokens > own else 0

    def _limits(self, anchor: Prompt) -> list[int]:
        """Returns the limits on a call's tokens: by the budget, and by the context of the model."""
        limits = []
        affordable = self._run.calls.affordable_tokens(anchor.parts)
        if affordable is not None:
            limits.append(affordable)
        context = self._run.backend.capabilities.max_context
        if context is not None:
            limits.append(context - self._run.backend.tokens_at_most(anchor.parts))
        return limits

    def _prices(self) -> tuple[float, float]:
        price = self._run.ledger.price
        if price is None or not (price.input or price.output):
            return USUAL_PRICES
        return price.input, price.output

    async def _long_call(
        self,
        op: Gen,
        field: Field,
        request: GenRequest,
        lead: str,
        anchor: Prompt,
        sampling: SamplingParams,
        on_chunk: OnChunk,
    ) -> Reply | None:
        """Makes the long call; None if its text is unusable. Raises _Refused, or BudgetError without a call."""
        longer = msgspec.structs.replace(
            request, id=request.id + LONG, prompt=anchor.parts, sampling=sampling, constraint=None
        )
        final = await self._generate(longer, Pieces(field, lead, on_chunk))
        final = msgspec.structs.replace(final, id=request.id)
        reply, usage = reply_of(final), final.usage
        prompt_tokens = usage.prompt_tokens or tokens_of(anchor.text)
        begins = reply.text.startswith(lead)
        end = await self._end(field, reply, len(lead)) if begins else None
        manner = manner_of(request.sampling)
        surplus = Surplus(reply, anchor, manner, final.id, prompt_tokens, before=op.name or "")
        if end is None:
            if begins and reaches_end(field, reply, len(lead)):
                self._surplus = surplus
            self._run.ledger.note(
                Speculation(
                    calls_saved=-1,
                    input_tokens_saved=-prompt_tokens,
                    output_tokens_wasted=reply.tokens,
                    tokens_speculated=reply.tokens,
                    misses=1,
                )
            )
            return None
        own = reply.counted(0, end.read)
        beyond = reply.tokens - own
        self._shared.planner.note_length(op.name or "", own)
        self._run.ledger.note(Speculation(output_tokens_wasted=beyond, tokens_speculated=beyond))
        self._surplus = surplus
        answer = Final(final.id, (completion_of(reply, len(lead), end),), usage)
        return Reply(answer, [_facts(answer, end, own, calls=1)])

    async def _generate(self, request: GenRequest, pieces: Pieces) -> Final:
        """Makes one call, with log-probabilities if available: they give the ends of tokens.

        Raises:
            _Refused: the provider does not take it, and readers have none of its text.
        """
        try:
            return await self._generate_with_ends(request, pieces)
        except (RequestError, CapabilityError) as error:
            if pieces.delivered:
                raise
            raise _Refused from error

    async def _generate_with_ends(self, request: GenRequest, pieces: Pieces) -> Final:
        planner, capabilities = self._shared.planner, self._run.backend.capabilities
        decided = request.sampling.logprobs or self._recorded(request) is not None  # as it was recorded
        if decided or not capabilities.logprobs or planner.refuses(capabilities.name, "logprobs"):
            return await self._run.calls.generate(request, pieces.feed)
        with_logprobs = msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, logprobs=True)
        )
        try:
            return await self._run.calls.generate(with_logprobs, pieces.feed)
        except (RequestError, CapabilityError, EngineError):  # servers of unknown kind may not have them
            if pieces.delivered:
                raise
            final = await self._run.calls.generate(request, pieces.feed)
            planner.note_refusal(capabilities.name, "logprobs")
            return final

    # -------------------------------------------------------------------------------- what follows

    def _sampling(self, step: Step) -> SamplingParams | None:
        """Returns the parameters of a step whose generated text stays in the prompt, else None."""
        match step.op:
            case Select() as op if not self._run.backend.capabilities.score:
                seed = step.sampling.seed if step.sampling is not None else None
                return selecting.generation_of(op, seed, self._run.backend.capabilities)[1]
            case Gen() if step.tags is None:
                return step.sampling
            case _:
                return None

    # -------------------------------------------------------------------------------- where a gen ends

    def _field(self, op: Gen, sampling: SamplingParams) -> Field:
        """Builds the field of a gen. Raises CapabilityError for a constraint that cannot be served here."""
        if op.constraint is None:
            return Field(sampling, result=op.result)
        sent = guarantee.lower(self._run.backend, op.constraint, allow_best_effort=op.allow_best_effort)
        return Field(sampling, op.constraint, sent is not None, op.result)

    async def _end(self, field: Field, reply: LongReply, start: int) -> End | None:
        if field.constraint is None and field.result is None and not field.sampling.stop_regex:
            return end_of(field, reply, start, "")
        following = ""
        if field.constraint is not None and not field.enforced:
            seen = await look(self._queue, self._run, self._sampling, lambda seen: seen.closed or seen.says)
            following = seen.literal
        return await asyncio.to_thread(end_of, field, reply, start, following)  # expressions may take long


def _facts(final: Final, end: End, tokens: int, *, calls: int) -> Meta:
    """Returns facts about a variable answered from a long reply. `tokens`: its share."""
    facts = meta_of_completion(final, final.completions[0], with_text=False)
    facts["completion_tokens"] = tokens
    facts["speculated"] = calls == 0
    if end.guarantee:
        facts |= {"guarantee": end.guarantee, "tries": calls}
    return facts
