"""Validates texts that no provider enforced, and sets the guarantee of a text: `State.meta(name)["guarantee"]`.

regex         by our automata, as the runtime reads it; what they do not honour by llguidance, where it is installed
json_schema   parsed, then by the schema; blanks between JSON tokens and the order of keys are not looked at
choices       by equality
lark, gbnf    by llguidance

enforced      no other text could have come
incomplete    the beginning of such a text: it ended at a stop of the program, at the end of the context, or early
validated     what was not enforced (all of it, or what of a schema is `unenforced`) was validated, and holds
violated      ... and does not hold; `violations` says how
best_effort   the program allowed a text that does not hold, or that was not validated; `violations` says what is wrong

A text that is enforced or validated was also accepted by its type, where that has code of its own (`lang.result`): what
the type refuses is asked for again. A text that is violated may be refused by its type as well.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...lang.constraint import ENDINGS, OPEN_ENDED
from ...lang.errors import BackendError, ConstraintError
from ...lang.protocol import Completion, ConstraintSpec, FinishReason
from ...lang.sampling import SamplingParams
from ..variables import Meta
from . import expressions, schemas, validation

_BLANK = re.compile("[ \n]")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def check(constraint: ConstraintSpec) -> None:
    """Checks that texts can be validated, before any call. May take long: it compiles.

    Raises:
        ConstraintError: the constraint is wrong.
        CapabilityError, MissingExtraError: a package that is needed is not installed.
    """
    match constraint.kind:
        case "regex" | "lark" | "gbnf":
            expressions.check(constraint.kind, constraint.source)
        case "json_schema":
            schemas.check(constraint.source)
        case "choices":
            _choices(constraint)


def holds(constraint: ConstraintSpec, text: str) -> list[str]:
    """Returns the violations of a constraint by `text`, a sentence each; empty when it holds. Raises as `check`."""
    match constraint.kind:
        case "regex" | "lark" | "gbnf":
            walk = expressions.walk(constraint.kind, constraint.source, text)
            return [] if walk.accepted == len(text) else [_where(text, walk)]
        case "json_schema":
            return schemas.violations(constraint.source, text)
        case "choices":
            return [] if text in _choices(constraint) else ["the text is none of the choices"]


def begins(constraint: ConstraintSpec, text: str) -> bool:
    """Returns whether `text` is a prefix of a text that satisfies the constraint; False if a schema leaves it open.
    Raises as `check`."""
    match constraint.kind:
        case "choices":
            return any(choice.startswith(text) for choice in _choices(constraint))
        case "json_schema":
            try:
                return expressions.walk("json_schema", constraint.source, text).read == len(text)
            except ConstraintError:  # more than automata take: the validator needs whole texts
                return False
    return expressions.walk(constraint.kind, constraint.source, text).read == len(text)


def longest(constraint: ConstraintSpec, text: str) -> int | None:
    """Returns the length of the longest prefix of `text` that satisfies the constraint and that no later text could
    extend; None where there is none. Raises as `check`.

    The blank that a number may end with (see `lang.constraint.NUMBER`) is counted.
    """
    match constraint.kind:
        case "regex" | "lark" | "gbnf":
            walk = expressions.walk(constraint.kind, constraint.source, text)
            return None if walk.read == len(text) and walk.extendable else walk.accepted
        case "choices":
            choices = _choices(constraint)
            if any(choice.startswith(text) and choice != text for choice in choices):
                return None
            return max((len(choice) for choice in choices if text.startswith(choice)), default=None)
        case "json_schema":
            return _json_end(constraint.source, text)


def tidied(constraint: ConstraintSpec, text: str) -> str:
    """Strips white space, and a code fence around JSON, if `text` satisfies the constraint only without them. Raises as
    `check`."""
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
        return f"the text ends too early, behind {text[-40:]!r}" if text else "the text is empty"
    rest, said = text[walk.read : walk.read + 40], text[: walk.read][-40:]
    return f"no such text goes on with {rest!r} behind {said!r}" if said else f"no such text begins with {rest!r}"


async def of_completion(constraint: ConstraintSpec, completion: Completion, backend: str) -> Meta:
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
    """Judges a continuation. Raises as `validation.check`.

    A stop of the program may cut a text that satisfies the constraint, as it may where the constraint is enforced.
    """
    text = validation.tidied(constraint, completion.text)
    if text != completion.text:
        completion = msgspec.structs.replace(completion, text=text, kept=0, tail=text)
    violations = validation.holds(constraint, text)
    if not violations:
        return Verdict(completion, "validated")
    if completion.finish_reason is FinishReason.LENGTH:
        return Verdict(completion, "", (*violations, f"it was cut off at max_tokens={sampling.max_tokens}"))
    own = ENDINGS if constraint.source in OPEN_ENDED else ()
    stops = (*(stop for stop in sampling.stop if stop not in own), *sampling.stop_regex)
    matched = completion.matched_stop
    may_be_cut = bool(stops) and (matched is None or matched in stops) and validation.begins(constraint, text)
    if may_be_cut and matched is not None:
        return Verdict(completion, "incomplete")
    return Verdict(completion, "", tuple(violations), may_be_cut)
