"""What may be said of a text that had to satisfy a constraint: `State.meta(name)["guarantee"]`.

enforced      no other text could have come
incomplete    the beginning of such a text: it ended at a stop of the program, at the end of the context, or early
validated     what nobody enforced (all of it, or what of a schema is `unenforced`) was looked at, and holds
violated      ... and does not hold; `violations` says how
best_effort   the program allowed a text that does not hold, or that nobody looked at; `violations` says what is wrong

A text that is enforced or validated was also accepted by its type, where that has code of its own (`lang.result`): what
the type refuses is asked for again. A text that is violated may be refused by its type as well.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

import msgspec

from ...lang.constraint import ENDINGS, OPEN_ENDED
from ...lang.errors import BackendError
from ...lang.protocol import Completion, ConstraintSpec, FinishReason
from ...lang.sampling import SamplingParams
from ..variables import Meta
from . import schemas, validation


async def of_completion(constraint: ConstraintSpec, completion: Completion, backend: str) -> Meta:
    """Facts about one continuation whose constraint the backend enforces. `backend`: its name, for messages.

    Raises:
        BackendError: the backend gave an ordinary text, and does not say that it satisfies the constraint.
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
    """A number ends at the blank that its expression allows behind it, which to the backend is a stop like others."""
    return constraint.source in OPEN_ENDED and completion.matched_stop in ENDINGS


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a continuation is that nobody enforced anything of.

    Attributes:
        completion: with the text that is kept: what models put around an answer is taken off where that helps.
        guarantee: of an accepted one, as above; "" otherwise.
        violations: of one that is not.
        may_be_cut: one that is not accepted is the beginning of one that would be, and a stop of the program may have
            ended it: the provider does not say.
    """

    completion: Completion
    guarantee: Literal["", "enforced", "validated", "violated", "incomplete"]
    violations: tuple[str, ...] = ()
    may_be_cut: bool = False

    @property
    def accepted(self) -> bool:
        return self.guarantee != ""


def judge(constraint: ConstraintSpec, completion: Completion, sampling: SamplingParams) -> Verdict:
    """Looks at a continuation. Raises as `validation.check`.

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
