"""Runs a `gen`, validates the answer, and asks again while the text breaks its constraint.

A constraint that the backend does not enforce (`enforcement`) is validated. A type with code of its own (a validator
of Pydantic) also judges texts that satisfy its schema, enforced or not. The model is asked again while the answer is
rejected, in at most `max_tries` calls for each continuation:

* Inside an assistant turn the model is told: before its first answer what is demanded, where that is not enforced;
  afterwards its answer and what is wrong with it (`reask_prompts`). The program's own text stays as it is, and
  the state keeps only the text that was accepted.
* Elsewhere a text is continued, and there is no turn to talk in. The first call is the program's own prompt. Where the
  model draws (temperature above 0) the same prompt is sent again, with another seed if it had one, so that the accepted
  text is distributed as the model's texts that satisfy the constraint are. Where it does not, it would only say the
  same again, and what is demanded is put in front of the text. A chat model that is asked to continue a text finds it
  there from the beginning.

Pieces of such a text are given to readers when it is accepted.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from ...lang.constraint import ENDINGS, OPEN_ENDED
from ...lang.errors import CapabilityError, GuaranteeError, MissingExtraError
from ...lang.ops import Gen
from ...lang.prompt import Part, Text
from ...lang.protocol import Capabilities, Chunk, Completion, ConstraintSpec, Final, FinishReason, GenRequest, Usage
from ...lang.sampling import SamplingParams
from ..calls import Calls, OnChunk
from ..position import Position
from ..variables import Meta, meta_of_completion
from . import enforcement, reask_prompts, validation
from .validation import Verdict

_CALLED = {"regex": "regex", "json_schema": "JSON Schema", "choices": "choices", "lark": "grammar", "gbnf": "grammar"}


@dataclass(frozen=True, slots=True)
class Reply:
    """The final event of a request, and facts about each of its continuations."""

    final: Final
    facts: list[Meta]


async def ask(
    calls: Calls, capabilities: Capabilities, op: Gen, request: GenRequest, on_chunk: OnChunk, position: Position
) -> Reply:
    """Runs `request` until its text satisfies the constraint and type of `op`.

    Args:
        position: of the stream; its text is the request's prompt.

    Raises:
        CapabilityError: the backend cannot serve the constraint; before any call.
        ConstraintError: the constraint is wrong; before any call where it is validated here.
        GuaranteeError: no answer satisfies the constraint.
        BackendError: the backend's answer is not what was asked for.
    """
    if op.constraint is None:
        final = await calls.generate(request, on_chunk)
        return Reply(final, _facts(op, final))
    sent = enforcement.lower(calls.backend, op.constraint, allow_best_effort=op.allow_best_effort)
    judged = op.result is not None and op.result.judges and not capabilities.made_up
    if sent is None or judged:
        template = calls.backend.chat_template
        asked = await template.away(_Judged, calls, capabilities, op, op.constraint, sent, request, position)
        return await asked.reply()
    final = await calls.generate(msgspec.structs.replace(request, constraint=sent), on_chunk)
    facts = _facts(op, final)
    for completion, known in zip(final.completions, facts, strict=True):
        known |= await validation.of_completion(sent, completion, capabilities.name)
        known["tries"] = 1
    return Reply(final, facts)


def _facts(op: Gen, final: Final) -> list[Meta]:
    return [meta_of_completion(final, completion, with_text=op.text_in_logprobs) for completion in final.completions]


class _Judged:
    """Runs one `gen` whose answers are validated: by its constraint if that is not enforced, or by its type.

    `sent`: the constraint that the backend enforces; None: it enforces none.
    """

    def __init__(
        self,
        calls: Calls,
        capabilities: Capabilities,
        op: Gen,
        constraint: ConstraintSpec,
        sent: ConstraintSpec | None,
        request: GenRequest,
        position: Position,
    ) -> None:
        self._sent = sent
        self._calls = calls
        self._name = capabilities.name
        self._converses = capabilities.converses
        self._op = op
        self._constraint = constraint
        self._template = calls.backend.chat_template
        self._dialogue = reask_prompts.of(position, self._template)
        self._note = reask_prompts.note(constraint, self._dialogue.said if self._dialogue is not None else "")
        sampling = self._sampling(request.sampling, position) if sent is None else request.sampling
        self._request = msgspec.structs.replace(request, constraint=sent, stream=False, sampling=sampling)
        self._tries = op.max_tries if sent is not None or capabilities.asks_again else 1
        self._usage = Usage()

    async def reply(self) -> Reply:
        unlooked = ""  # why the text cannot be validated
        try:
            if self._sent is None:  # in a thread, like all that follows constraints: they may take long
                await asyncio.to_thread(validation.check, self._constraint)
        except (CapabilityError, MissingExtraError) as error:
            if not self._op.allow_best_effort:
                raise
            unlooked = str(error)
        final = await self._call(
            msgspec.structs.replace(self._request, prompt=await self._template.away(self._first_prompt))
        )
        if unlooked:
            facts: Meta = {"guarantee": "best_effort", "tries": 1, "violations": [], "unvalidated": unlooked}
            settled = [(completion, facts) for completion in final.completions]
        else:
            settled = [await self._settled(index, given) for index, given in enumerate(final.completions)]
        completions = tuple(completion for completion, _ in settled)
        final = msgspec.structs.replace(final, id=self._request.id, completions=completions, usage=self._usage)
        return Reply(final, [known | facts for known, (_, facts) in zip(_facts(self._op, final), settled, strict=True)])

    async def _settled(self, index: int, completion: Completion) -> tuple[Completion, Meta]:
        """Asks again until a continuation is accepted. `index`: among those of the `gen`."""
        tries = 1
        while True:
            verdict, facts = await self._judged(completion)
            if verdict.accepted:
                return verdict.completion, {**facts, "tries": tries}
            if tries == self._tries:
                break
            tries += 1
            final = await self._call(await self._template.away(self._again, index, tries, completion.text, verdict))
            completion = final.completions[0]
        if verdict.may_be_cut:
            return verdict.completion, {"guarantee": "incomplete", "tries": tries}
        if self._op.allow_best_effort:
            known: Meta = {"guarantee": "best_effort", "tries": tries, "violations": list(verdict.violations)}
            return verdict.completion, {**facts, **known}
        raise GuaranteeError(self._failure(tries, completion, verdict))

    async def _judged(self, completion: Completion) -> tuple[Verdict, Meta]:
        """Judges a continuation by the constraint, then by the type."""
        if self._sent is None:
            verdict = await asyncio.to_thread(validation.judge, self._constraint, completion, self._request.sampling)
            facts: Meta = {"guarantee": verdict.guarantee, "narrowed": []}
            whole = verdict.guarantee == "validated"
        else:
            facts = await validation.of_completion(self._sent, completion, self._name)
            verdict = Verdict(completion, facts["guarantee"])
            whole = verdict.guarantee in ("enforced", "validated")
        if whole and self._op.result is not None:
            refusal = await asyncio.to_thread(self._op.result.refusal, verdict.completion.text)
            if refusal is not None:
                verdict = Verdict(verdict.completion, "", (refusal,))
        return verdict, facts

    def _first_prompt(self) -> tuple[Part, ...]:
        if self._sent is not None:
            return self._request.prompt
        if self._dialogue is not None:
            return self._dialogue.first(self._note)
        if self._converses:
            return (Text(reask_prompts.foreword(self._constraint)), *self._request.prompt)
        return self._request.prompt

    def _again(self, index: int, tries: int, failed: str, verdict: Verdict) -> GenRequest:
        sampling, problem = self._request.sampling, "; ".join(verdict.violations)
        prompt: tuple[Part, ...] = self._request.prompt
        seed = sampling.seed
        if self._dialogue is not None:
            prompt = self._dialogue.again(self._note, failed, reask_prompts.complaint(problem, self._note))
        elif sampling.greedy or self._converses:
            prompt = (
                Text(reask_prompts.foreword(self._constraint, reask_prompts.correction(failed, problem))),
                *prompt,
            )
        elif seed is not None:
            seed = (seed + index + (tries - 1) * sampling.n) % 2**63  # none that another call had
        return msgspec.structs.replace(
            self._request,
            id=f"{self._request.id}-{index}-{tries}",
            prompt=prompt,
            sampling=msgspec.structs.replace(sampling, n=1, seed=seed, prompt_logprobs_from=None),
        )

    async def _call(self, request: GenRequest) -> Final:
        final = await self._calls.generate(request, _withheld)
        self._usage = self._usage + final.usage
        return final

    def _sampling(self, sampling: SamplingParams, position: Position) -> SamplingParams:
        """Drops the stops of a number, which would match at leading blanks and cut off the number: `validation.tidied`
        applies them. A continued text does not end by itself, so there the end of the line stays a stop."""
        if self._constraint.source not in OPEN_ENDED:
            return sampling
        text = position.prompt.text
        kept: tuple[str, ...] = ENDINGS if text[-1:].isspace() else ENDINGS[1:]
        if self._dialogue is not None and not self._dialogue.said:
            kept = ()
        stops = tuple(stop for stop in sampling.stop if stop in kept or stop not in ENDINGS)
        return msgspec.structs.replace(sampling, stop=stops)

    def _failure(self, tries: int, completion: Completion, verdict: Verdict) -> str:
        cut = completion.finish_reason is FinishReason.LENGTH
        more = "max_tokens" if cut else f"max_tries={self._op.max_tries}"
        variable = f"variable {self._op.name!r}" if self._op.name else "a variable without a name"
        demand = _CALLED[self._constraint.kind]
        if self._op.result is not None and self._op.result.judges:
            demand = f"type {self._op.result.wanted}"
        otherwise = "write allow_best_effort=True to keep such a text"
        otherwise = f"{otherwise}, or run the program on a Runtime" if self._sent is None else f"or {otherwise}"
        return (
            f"{self._name} wrote no text for {variable} that satisfies its {demand} in {tries} "
            f"{'try' if tries == 1 else 'tries'}; the last was {reask_prompts.shortened(completion.text)}: "
            f"{'; '.join(verdict.violations)}. Raise {more}, {otherwise}"
        )


def _withheld(chunk: Chunk) -> None:
    """Drops a chunk: readers get the text once it is accepted."""
