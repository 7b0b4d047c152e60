"""What may be said of a text that had to satisfy a constraint: `State.meta(name)["guarantee"]`.

enforced      no other text could have come
incomplete    the beginning of such a text: it ended at a stop of the program, at the end of the context, or early
validated     all that the backend could enforce; the rest (`unenforced`) was looked at and holds
violated      ... and does not hold; `violations` says how
"""

import asyncio

from ..lang.constraint import ENDINGS, OPEN_ENDED
from ..lang.errors import BackendError
from ..lang.protocol import Completion, ConstraintSpec, FinishReason
from . import schemas
from .variables import Meta


async def of_completion(constraint: ConstraintSpec, completion: Completion, backend: str) -> Meta:
    """Facts about one constrained continuation. `backend`: its name, for messages.

    Raises:
        BackendError: the backend gave an ordinary text, and does not say that it satisfies the constraint.
    """
    facts: Meta = {"forced_tokens": completion.forced_tokens, "guarantee": "enforced"}
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
