"""Prompts that ask a model for a text which its provider does not enforce, and again with what is wrong.

    first     ...user: what the program says ∥ NOTE ∥ assistant: what it has begun ▸
    again     ...user: what the program says ∥ NOTE ∥ assistant: what it has begun, the failed answer
                 user: COMPLAINT              assistant: what it has begun ▸

The wording is constant, so that prefix caches find it again; what varies stands last. The turns exist in the request
only, never in the program's prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...lang.chat_template import ChatTemplate, Turn
from ...lang.constraint import INTEGER, NUMBER
from ...lang.prompt import EMPTY, Part, Text
from ...lang.protocol import ConstraintSpec
from ..position import Position, since, text_of

# In a conversation, after what the program itself says last. `demand`: see `demand`.
NOTE = "Write your answer as {demand}\nWrite nothing before it, nothing behind it, and no code fence around it."
# ... where the program has begun the answer. `said`: its last words.
NEXT_NOTE = (
    "Your answer is written piece by piece. Write the next piece of it as {demand}\nWrite nothing before it, nothing "
    "behind it, and no code fence around it. The answer so far ends with {said}"
)
# After an answer that cannot be used. `problem`: of `validation.holds`; `note`: one of those above.
COMPLAINT = "That cannot be used: {problem}.\n\n{note}"
# In front of a text outside of roles. `correction`: "", or what it does not go on with.
FOREWORD = "(Below is the beginning of a text. It goes on with {demand}{correction})\n\n"
CORRECTION = "\nIt does not go on with {failed}: {problem}."

_SHOWN = 80  # characters of an answer, or of what was said before


def demand(constraint: ConstraintSpec) -> str:
    """The constraint in words, after "write it as"; ends its line."""
    match constraint.kind:
        case "regex" if constraint.source == INTEGER:
            return "an integer, in digits."
        case "regex" if constraint.source == NUMBER:
            return "a number, in digits."
        case "regex":
            return f"a text that this regular expression matches from its beginning to its end:\n{constraint.source}"
        case "json_schema":
            return f"JSON that satisfies this JSON Schema:\n{constraint.source}"
        case "choices":
            return f"exactly one of the texts of this JSON array, without the quotes:\n{constraint.source}"
        case "lark":
            return f"a text in the language of this Lark grammar:\n{constraint.source}"
        case "gbnf":
            return f"a text in the language of this GBNF grammar, from its rule root:\n{constraint.source}"


def note(constraint: ConstraintSpec, said: str) -> str:
    """Gives what the model is told before it answers. `said`: what its answer says already, or ""."""
    if not said:
        return NOTE.format(demand=demand(constraint))
    return NEXT_NOTE.format(demand=demand(constraint), said=repr(said[-_SHOWN:]))


def complaint(problem: str, told: str) -> str:
    """Gives what the model is told about an answer that cannot be used. `told`: the note it had."""
    return COMPLAINT.format(problem=problem, note=told)


def foreword(constraint: ConstraintSpec, correction: str = "") -> str:
    """Gives what stands in front of a text that is to be continued."""
    return FOREWORD.format(demand=demand(constraint), correction=correction)


def correction(failed: str, problem: str) -> str:
    """Gives what a foreword says of the continuation that came last."""
    return CORRECTION.format(failed=shortened(failed), problem=problem)


def shortened(text: str) -> str:
    """A text in a message."""
    return repr(text) if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]!r} … {text[-_SHOWN:]!r}"


# A note joins the last turn of one of these: two user turns in a row are refused by many templates.
_LISTENED_TO = ("user", "system", "developer")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation whose assistant is to speak.

    Attributes:
        before: parts up to the end of the last closed turn, its scaffolding included.
        turns: those.
        begun: what the open assistant turn says already.
    """

    template: ChatTemplate
    before: tuple[Part, ...]
    turns: tuple[Turn, ...]
    begun: tuple[Part, ...]

    @property
    def said(self) -> str:
        """Gives what the answer says already."""
        return text_of(list(self.begun))

    def first(self, note: str) -> tuple[Part, ...]:
        """The prompt with a note after what the program says last."""
        parts, turns = self._noted(note)
        return _joined((*parts, *self.template.open(turns, "assistant"), *self.begun))

    def again(self, note: str, failed: str, complaint: str) -> tuple[Part, ...]:
        """The prompt after an answer that cannot be used. Providers take no empty turns, so an empty answer is only
        complained of."""
        answer = self.said + failed
        if not answer.strip():
            return self.first(complaint)
        parts, turns = self._noted(note)
        parts = (*parts, *self.template.open(turns, "assistant"), *self.begun, Text(failed))
        turns = (*turns, Turn("assistant", answer))
        parts = (*parts, *self.template.close(turns))
        parts, turns = self._told(parts, turns, complaint)
        return _joined((*parts, *self.template.open(turns, "assistant"), *self.begun))

    def _noted(self, note: str) -> tuple[tuple[Part, ...], tuple[Turn, ...]]:
        if self.turns and self.turns[-1].role in _LISTENED_TO:
            content = _without(self.before, self.template.close(self.turns))
            if content is not None:
                last = self.turns[-1]
                longer = Turn(last.role, f"{last.content or ''}\n\n{note}")
                turns = (*self.turns[:-1], longer)
                return (*content, Text(f"\n\n{note}"), *self.template.close(turns)), turns
        return self._told(self.before, self.turns, note)

    def _told(
        self, parts: tuple[Part, ...], turns: tuple[Turn, ...], text: str
    ) -> tuple[tuple[Part, ...], tuple[Turn, ...]]:
        """With one more user turn."""
        parts = (*parts, *self.template.open(turns, "user"), Text(text))
        turns = (*turns, Turn("user", text))
        return (*parts, *self.template.close(turns)), turns


def of(position: Position, template: ChatTemplate) -> Dialogue | None:
    """The conversation that a stream is in; None where no assistant turn is open, so that the model cannot be told."""
    turn = position.turn
    if turn is None or turn.role != "assistant":
        return None
    start = turn.start
    begun = since(start, position.prompt)
    if turn.lead and start.part == Text(turn.lead) and start.parent is not None:
        start, begun = start.parent, [Text(turn.lead), *begun]
    before = _without(start.parts, template.open(position.turns, "assistant"))
    return None if before is None else Dialogue(template, before, position.turns, tuple(begun))


def _without(parts: tuple[Part, ...], scaffolding: Sequence[Part]) -> tuple[Part, ...] | None:
    """Parts before the scaffolding that they end with; None where they do not, as with templates that write a turn
    only together with the next one."""
    text = text_of(list(scaffolding))
    *rest, last = parts or (Text(""),)
    if not isinstance(last, Text) or not last.text.endswith(text):
        return None
    left = last.text[: len(last.text) - len(text)]
    return (*rest, Text(left, last.control)) if left else tuple(rest)


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """As a prompt gives them: neighbours of one kind are one."""
    prompt = EMPTY
    for part in parts:
        prompt = prompt.append(part)
    return prompt.parts
