"""Whether two orders of a prompt mean the same: a model is asked, in a program of this language.

The question is asked twice, with the two orders in both places, because small models answer by place. A verdict is as
good as the model; what a model of a few hundred million parameters says is little better than chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...lang.errors import CapabilityError
from ...lang.ops import select
from ...lang.protocol import Backend
from ...lang.state import State
from ..program import function
from .examples import EXAMPLES
from .reorder import Proposal

SAME, DIFFERENT = " same", " different"

_INSTRUCTION = """\
A prompt and the same prompt in another order are compared. Words in braces stand for text that is filled in later.
Say "same" if a careful reader does the same task with the same material in both orders. Say "different" if a sentence \
then speaks of the wrong place ("the text above", "the following"), if steps or events change their order, if rules \
become part of a quoted text or a quoted text becomes a rule, or if what the answer has to continue is no longer at \
the end.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Attributes:
    same: whether the model said so both times.
    probability: of "same", the lower of both times; None for a model that gives no probabilities.
    """

    same: bool
    probability: float | None

    def confirms(self, threshold: float) -> bool:
        return self.same and (self.probability is None or self.probability >= threshold)


@function(temperature=0)
def same_meaning(s: State, before: str, after: str) -> None:
    s += _INSTRUCTION
    for example in EXAMPLES:
        s += _case(example.before, example.after) + (SAME if example.same else DIFFERENT) + "\n"
    s += _case(before, after)
    s += select("verdict", choices=[SAME, DIFFERENT])


def _case(before: str, after: str) -> str:
    return f"\n<prompt>\n{before}\n</prompt>\n<reordered>\n{after}\n</reordered>\nMeaning:"


def verdicts(proposals: Sequence[Proposal], backend: Backend) -> list[Verdict]:
    """One for each proposal. All are asked at once.

    Raises:
        Whatever the backend raises.
    """
    questions = [
        {"before": one, "after": other}
        for proposal in proposals
        for one, other in ((proposal.before, proposal.after), (proposal.after, proposal.before))
    ]
    states = same_meaning.run_batch(questions, backend=backend)
    answers = [(state["verdict"] == SAME, _probability(state)) for state in states]
    return [_together(answers[place], answers[place + 1]) for place in range(0, len(answers), 2)]


def _probability(state: State) -> float | None:
    try:
        probabilities: dict[str, Any] = state.get_meta_info("verdict")["probabilities"]
    except (CapabilityError, KeyError):
        return None
    return float(probabilities[SAME])


def _together(one: tuple[bool, float | None], other: tuple[bool, float | None]) -> Verdict:
    known = [probability for _, probability in (one, other) if probability is not None]
    return Verdict(one[0] and other[0], min(known) if known else None)
