"""Guarantees that the text of a `gen` satisfies its constraint: enforced by the backend, or validated and asked again.

Before any call `lower` decides:

    enforced      its kind is in the backend's capabilities, and its method `enforces`, if it has one, accepts it;
                  otherwise the request goes out without it, and the text is validated here:
    validated     the backend `asks_again`: the request is repeated, with the violations, until the text satisfies it
    best effort   the program allows it, and gets the text that comes
    refused       a CapabilityError

Validation, by kind:

    regex         by our automata, as the runtime reads it; what they do not honour by llguidance, where it is installed
    json_schema   parsed, then by the schema; blanks between JSON tokens and the order of keys do not matter
    choices       by equality
    lark, gbnf    by llguidance
    expression    by our automata; blanks between JSON tokens and the order of keys do not matter

A type with code of its own (a validator of Pydantic, see `lang.result`) also judges texts that satisfy its schema,
enforced or not, and so does `validate` of a gen, also where it is all that is demanded. The model is asked again while
the answer is rejected, in at most `max_tries` calls for each continuation:

* Inside an assistant turn the request says before the first answer what is demanded, where that is not enforced;
  afterwards it goes on with the answer and its violations (`reask_prompts`). The program's own text stays as it is, and
  the state keeps only the text that was accepted.
* Elsewhere a text is continued, and there is no turn to talk in. The first call is the program's own prompt. Where the
  model draws (temperature above 0) the same prompt is sent again, with another seed if it had one, so that the accepted
  text is distributed as the model's texts that satisfy the constraint are. Where it does not, it would only repeat
  itself, and what is demanded is put in front of the text. A chat model that is asked to continue a text finds it
  there from the beginning.

Readers get the pieces of such a text when it is accepted. Its guarantee, `State.meta(name)["guarantee"]`, is one of

    enforced      no other text could have come
    incomplete    the beginning of such a text: it ended at a stop of the program, at the end of the context, or early
    validated     what was not enforced (all of it, or what of a schema is `unenforced`) was validated, and holds
    violated      ... and does not hold; `violations` has the reasons. Its type may refuse it as well
    best_effort   the program allowed a text that does not hold, or that was not validated; see `violations`
"""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...lang.errors import BackendError, CapabilityError, ConstraintError, GuaranteeError, MissingExtraError
from ...lang.generation import ENDINGS, OPEN_ENDED, alternatives
from ...lang.ops import Gen, Select
from ...lang.prompt import Part, Text
from ...lang.protocol import (
    Backend,
    Capabilities,
    Chunk,
    Completion,
    ConstraintSpec,
    Final,
    FinishReason,
    GenRequest,
    Usage,
)
from ...lang.sampling import SamplingParams
from ..calls import Calls, OnChunk
from ..position import Position
from ..variables import Meta, meta_of_completion
from . import expressions, reask_prompts, schemas

_BLANK = re.compile("[ \n]")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_CALLED = {
    "regex": "regex",
    "json_schema": "JSON Schema",
    "choices": "choices",
    "lark": "grammar",
    "gbnf": "grammar",
    "expression": "constraint",
}
_REFUSED = "`lower` refuses calls of tools where they are not enforced"


# -------------------------------------------------------------------------------- before a call


def check_gen(capabilities: Capabilities, op: Gen, sampling: SamplingParams) -> None:
    """Raises CapabilityError for what the backend does not offer, MissingExtraError for what this machine lacks."""
    name = capabilities.name
    asks_logprobs = sampling.logprobs or sampling.top_logprobs or sampling.prompt_logprobs_from is not None
    if asks_logprobs and not capabilities.logprobs:
        raise CapabilityError(
            f"{name} gives no log-probabilities; remove return_logprob, top_logprobs_num and logprob_start_len"
        )
    if sampling.stop_regex and not capabilities.stop_regex:
        raise CapabilityError(f"{name} has no stop_regex; write stop= with the strings that may end the text")
    _check_adapter(capabilities, sampling.adapter)
    if op.constraint is not None and op.constraint.allow_unenforced:
        schemas.check_installed()


def _check_adapter(capabilities: Capabilities, adapter: str) -> None:
    known = capabilities.adapters
    if adapter and known is not None and adapter not in known:
        instead = f"write one of {', '.join(known)}" if known else "leave it out, or name it in Runtime(adapters={...})"
        raise CapabilityError(f"{capabilities.name} has no adapter {adapter!r}; {instead}")


def check_select(capabilities: Capabilities, op: Select, adapter: str) -> None:
    """Raises CapabilityError when the backend has no such adapter, or not the scores that the method compares."""
    name = capabilities.name
    _check_adapter(capabilities, adapter)
    if not capabilities.score and op.method != "token_length_normalized":
        raise CapabilityError(
            f"{name} cannot score choices, which method={op.method!r} compares; leave the method out, and one of the "
            "choices is generated, or run the program on a Runtime"
        )
    if op.method in ("overshoot", "exact") and not capabilities.probability:
        raise CapabilityError(
            f"{name} cannot say how probable a choice is over all its tokens, which method={op.method!r} needs; "
            'write method="token_length_normalized", or run the program on a Runtime'
        )


# Kind of constraint → how users write it.
_WRITTEN = {
    "regex": "regex= and dtype=",
    "json_schema": "json_schema= and dtype=",
    "lark": "ebnf= and grammar= in Lark",
    "gbnf": "ebnf= and grammar= in GBNF",
    "choices": "choices=, select(), and dtype= of a Literal or Enum",
    "tools": "calls of tools",
    "expression": "constraint=",
}


def lower(backend: Backend, constraint: ConstraintSpec, *, allow_best_effort: bool) -> ConstraintSpec | None:
    """Returns the constraint to send to the backend; None: the finished text is validated here.

    Raises:
        CapabilityError: neither is possible here.
    """
    capabilities = backend.capabilities
    name = capabilities.name
    if capabilities.asks_again and constraint.engine not in (None, "auto"):
        raise CapabilityError(
            f"{name} has no constraint engines to choose from; remove constraint_engine={constraint.engine!r}, or run "
            "the program on a Runtime"
        )
    for candidate in _readings(constraint, capabilities):
        if _is_enforced(backend, candidate):
            return candidate
    if constraint.kind == "tools":
        raise CapabilityError(f"{name} does not enforce calls of tools; run them on a Runtime")
    if capabilities.asks_again or allow_best_effort:
        return None
    others = [_WRITTEN[kind] for kind in capabilities.constraints if kind != constraint.kind]
    scores = "" if constraint.kind != "choices" or capabilities.score else " cannot score choices,"
    raise CapabilityError(
        f"{name}{scores} does not enforce {_WRITTEN[constraint.kind]}"
        + (f" as they are written here (it enforces {'; '.join(others)})" if others else "")
        + ", and is not asked again when an answer breaks them; write allow_best_effort=True to take what comes, "
        "stop= and parse the text, or run the program on a Runtime"
    )


def _readings(constraint: ConstraintSpec, capabilities: Capabilities) -> list[ConstraintSpec]:
    """Returns the constraint and its equivalent forms. Raises ConstraintError: it is wrong."""
    enforced = capabilities.constraints
    pattern = grammar = None
    match constraint.kind:
        case "choices":
            pattern = alternatives(json.loads(constraint.source))
        case "expression" if "expression" not in enforced:
            pattern = expressions.as_regex(constraint.source) if "regex" in enforced else None
            grammar = expressions.as_gbnf(constraint.source) if pattern is None and "gbnf" in enforced else None
    readings = [constraint]
    if pattern is not None:
        readings.append(msgspec.structs.replace(constraint, kind="regex", source=pattern))
    if grammar is not None:
        readings.append(msgspec.structs.replace(constraint, kind="gbnf", source=grammar))
    return readings


def _is_enforced(backend: Backend, constraint: ConstraintSpec) -> bool:
    """Returns whether the backend enforces a constraint. `enforces` decides for kinds it enforces only in part."""
    if constraint.kind not in backend.capabilities.constraints:
        return False
    enforces = getattr(backend, "enforces", None)  # most backends that enforce a kind enforce all of it
    return enforces is None or bool(enforces(constraint))


# -------------------------------------------------------------------------------- validating a text


def check_validatable(constraint: ConstraintSpec) -> None:
    """Checks that texts can be validated, before any call. May take long: it compiles.

    Raises:
        ConstraintError: the constraint is wrong.
        CapabilityError, MissingExtraError: a package that is needed is not installed.
    """
    match constraint.kind:
        case "regex" | "lark" | "gbnf" | "expression":
            expressions.check(constraint.kind, constraint.source)
        case "json_schema":
            schemas.check(constraint.source)
        case "choices":
            _choices(constraint)
        case "tools":
            raise AssertionError(_REFUSED)


def holds(constraint: ConstraintSpec, text: str) -> list[str]:
    """Returns the violations of a constraint by `text`, a sentence each; empty when it holds. Raises as
    `check_validatable`."""
    match constraint.kind:
        case "regex" | "lark" | "gbnf" | "expression":
            walk = expressions.walk(constraint.kind, constraint.source, text)
            return [] if walk.accepted == len(text) else [_where(text, walk)]
        case "json_schema":
            return schemas.violations(constraint.source, text)
        case "choices":
            return [] if text in _choices(constraint) else ["the text is none of the choices"]
        case "tools":
            raise AssertionError(_REFUSED)


def begins(constraint: ConstraintSpec, text: str) -> bool:
    """Returns whether `text` is a prefix of a text that satisfies the constraint; False if a schema leaves it open.
    Raises as `check_validatable`."""
    match constraint.kind:
        case "choices":
            return any(choice.startswith(text) for choice in _choices(constraint))
        case "json_schema":
            try:
                return expressions.walk("json_schema", constraint.source, text).read == len(text)
            except ConstraintError:  # more than automata take: the validator needs whole texts
                return False
        case "tools":
            raise AssertionError(_REFUSED)
    return expressions.walk(constraint.kind, constraint.source, text).read == len(text)


def longest(constraint: ConstraintSpec, text: str) -> int | None:
    """Returns the length of the longest prefix of `text` that satisfies the constraint and that no later text could
    extend; None where there is none. Raises as `check_validatable`.

    The blank that a number may end with (see `lang.generation.NUMBER`) is counted.
    """
    match constraint.kind:
        case "regex" | "lark" | "gbnf" | "expression":
            walk = expressions.walk(constraint.kind, constraint.source, text)
            return None if walk.read == len(text) and walk.extendable else walk.accepted
        case "choices":
            choices = _choices(constraint)
            if any(choice.startswith(text) and choice != text for choice in choices):
                return None
            return max((len(choice) for choice in choices if text.startswith(choice)), default=None)
        case "json_schema":
            return _json_end(constraint.source, text)
        case "tools":
            raise AssertionError(_REFUSED)


def tidied(constraint: ConstraintSpec, text: str) -> str:
    """Strips white space, and a code fence around JSON, if `text` satisfies the constraint only without them. Raises as
    `check_validatable`."""
    stripped = text.strip()
    candidates = [text, stripped]
    if constraint.source in OPEN_ENDED:
        candidates = [_BLANK.split(stripped, maxsplit=1)[0]]  # a number ends at a blank, which is no part of it
    if constraint.kind == "json_schema":
        candidates.reverse()  # JSON ignores white space around it, and a variable need not hold it
        fenced = _FENCED.fullmatch(stripped)
        if fenced is not None:
            candidates.append(fenced[1].strip())
    return next((candidate for candidate in dict.fromkeys(candidates) if not holds(constraint, candidate)), text)


def _choices(constraint: ConstraintSpec) -> list[str]:
    choices: list[str] = json.loads(constraint.source)
    return choices


def _json_end(schema: str, text: str) -> int | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if end == len(text) and isinstance(value, int | float) and not isinstance(value, bool):
        return None  # a digit may follow
    return end if not schemas.violations(schema, text[:end]) else None


def _where(text: str, walk: expressions.Walk) -> str:
    """Describes the character at which a text leaves its expression."""
    if walk.read == len(text):
        return f"the text ends too early, after {text[-40:]!r}" if text else "the text is empty"
    rest, before = text[walk.read : walk.read + 40], text[: walk.read][-40:]
    return f"no such text goes on with {rest!r} after {before!r}" if before else f"no such text begins with {rest!r}"


async def _facts_of_enforced(constraint: ConstraintSpec, completion: Completion, backend: str) -> Meta:
    """Returns facts about one continuation whose constraint the backend enforces. `backend`: its name, for messages.

    Raises:
        BackendError: the backend returned a text without stating that it satisfies the constraint.
    """
    facts: Meta = {"forced_tokens": completion.forced_tokens, "guarantee": "enforced"}
    facts["narrowed"] = list(completion.narrowed)
    if not completion.guarantee and not _ended_with_its_number(constraint, completion):
        if completion.finish_reason is FinishReason.STOP and not isinstance(completion.matched_stop, str):
            raise BackendError(f"{backend} did not enforce the {constraint.kind} of gen()")
        facts["guarantee"] = "incomplete"
    elif completion.unenforced:
        # In a thread: a schema may hold expressions that take long.
        violations = await asyncio.to_thread(schemas.violations, constraint.source, completion.text)
        facts["guarantee"] = "violated" if violations else "validated"
        facts["unenforced"] = list(completion.unenforced)
        facts["violations"] = violations
    return facts


def _ended_with_its_number(constraint: ConstraintSpec, completion: Completion) -> bool:
    """Returns whether a number ended at the blank that its expression allows after it: for the backend, a stop."""
    return constraint.source in OPEN_ENDED and completion.matched_stop in ENDINGS


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a continuation that was not enforced.

    Attributes:
        completion: with the text that is kept, tidied.
        guarantee: of an accepted continuation, as above; "" otherwise.
        violations: of a rejected one.
        may_be_cut: a rejected one is a prefix of an acceptable text, and a stop of the program may have ended it: the
            provider does not say.
    """

    completion: Completion
    guarantee: Literal["", "enforced", "validated", "violated", "incomplete"]
    violations: tuple[str, ...] = ()
    may_be_cut: bool = False

    @property
    def accepted(self) -> bool:
        return self.guarantee != ""


def judge(constraint: ConstraintSpec, completion: Completion, sampling: SamplingParams) -> Verdict:
    """Judges a continuation. Raises as `check_validatable`.

    A stop of the program may cut a text that satisfies the constraint, as it may where the constraint is enforced.
    """
    text = tidied(constraint, completion.text)
    if text != completion.text:
        completion = msgspec.structs.replace(completion, text=text, kept=0, tail=text)
    violations = holds(constraint, text)
    if not violations:
        return Verdict(completion, "validated")
    if completion.finish_reason is FinishReason.LENGTH:
        return Verdict(completion, "", (*violations, f"it was cut off at max_tokens={sampling.max_tokens}"))
    own = ENDINGS if constraint.source in OPEN_ENDED else ()
    stops = (*(stop for stop in sampling.stop if stop not in own), *sampling.stop_regex)
    matched = completion.matched_stop
    may_be_cut = bool(stops) and (matched is None or matched in stops) and begins(constraint, text)
    if may_be_cut and matched is not None:
        return Verdict(completion, "incomplete")
    return Verdict(completion, "", tuple(violations), may_be_cut)


# -------------------------------------------------------------------------------- asking


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
    judged = op.result is not None and op.result.judges and not capabilities.made_up
    if op.constraint is None and not judged:
        final = await calls.generate(request, on_chunk)
        return Reply(final, _facts(op, final))
    sent = op.constraint and lower(calls.backend, op.constraint, allow_best_effort=op.allow_best_effort)
    if sent is None or judged:
        template = calls.backend.chat_template
        judged_gen = await template.away(_Judged, calls, capabilities, op, op.constraint, sent, request, position)
        return await judged_gen.reply()
    final = await calls.generate(msgspec.structs.replace(request, constraint=sent), on_chunk)
    facts = _facts(op, final)
    for completion, known in zip(final.completions, facts, strict=True):
        known |= await _facts_of_enforced(sent, completion, capabilities.name)
        known["tries"] = 1
    return Reply(final, facts)


def _facts(op: Gen, final: Final) -> list[Meta]:
    return [meta_of_completion(final, completion, with_text=op.text_in_logprobs) for completion in final.completions]


class _Judged:
    """Runs one `gen` whose answers are validated: by its constraint if that is not enforced, by its type or its check.

    `constraint`: None where only the check demands something. `sent`: the constraint that the backend enforces; None:
    it enforces none.
    """

    def __init__(
        self,
        calls: Calls,
        capabilities: Capabilities,
        op: Gen,
        constraint: ConstraintSpec | None,
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
        asked_again = sent is not None or constraint is None or capabilities.asks_again
        self._tries = op.max_tries if asked_again else 1
        self._usage = Usage()

    async def reply(self) -> Reply:
        unlooked = ""  # why the text cannot be validated
        try:
            if (
                self._sent is None and self._constraint is not None
            ):  # in a thread, like all that follows constraints: they may take long
                await asyncio.to_thread(check_validatable, self._constraint)
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
        """Judges a continuation by the constraint, then by the type and the check."""
        if self._constraint is None:
            facts: Meta = {"guarantee": "validated"}
            verdict, whole = Verdict(completion, "validated"), True
        elif self._sent is None:
            verdict = await asyncio.to_thread(judge, self._constraint, completion, self._request.sampling)
            facts = {"guarantee": verdict.guarantee, "narrowed": []}
            whole = verdict.guarantee == "validated"
        else:
            facts = await _facts_of_enforced(self._sent, completion, self._name)
            verdict = Verdict(completion, facts["guarantee"])
            whole = verdict.guarantee in ("enforced", "validated")
        if whole and self._op.result is not None:
            refusal = await asyncio.to_thread(self._op.result.refusal, verdict.completion.text)
            if refusal is not None:
                verdict = Verdict(verdict.completion, "", (refusal,))
        return verdict, facts

    def _first_prompt(self) -> tuple[Part, ...]:
        if self._sent is not None or self._constraint is None:
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
            said = "" if self._sent is not None else self._note  # as in the first prompt, which the cache has
            prompt = self._dialogue.again(said, failed, reask_prompts.complaint(problem, self._note))
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
        """Drops the stops of a number, which would match at leading blanks and cut off the number: `tidied`
        applies them. A continued text does not end by itself, so there the end of the line stays a stop."""
        if self._constraint is None or self._constraint.source not in OPEN_ENDED:
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
        demand = "validate=" if self._constraint is None else _CALLED[self._constraint.kind]
        if self._op.result is not None and self._op.result.judges and self._op.result.check is None:
            demand = f"type {self._op.result.wanted}"
        otherwise = "write allow_best_effort=True to keep such a text"
        elsewhere = self._sent is None and self._constraint is not None
        otherwise = f"{otherwise}, or run the program on a Runtime" if elsewhere else f"or {otherwise}"
        return (
            f"{self._name} wrote no text for {variable} that satisfies its {demand} in {tries} "
            f"{'try' if tries == 1 else 'tries'}; the last was {reask_prompts.shortened(completion.text)}: "
            f"{'; '.join(verdict.violations)}. Raise {more}, {otherwise}"
        )


def _withheld(chunk: Chunk) -> None:
    """Drops a chunk: readers get the text once it is accepted."""
