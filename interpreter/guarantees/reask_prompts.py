"""Prompts that describe a constraint the provider does not enforce, and the errors of a rejected answer.

    first     ...user: what the program says ∥ NOTE ∥ assistant: what it has begun ▸
    again     ...user: what the program says ∥ NOTE ∥ assistant: what it has begun, the failed answer
                 user: COMPLAINT              assistant: what it has begun ▸

Where the constraint is enforced, and a type or a check refuses the answer, NOTE is in the complaint alone: both prompts
begin with the program's own.

The wording is constant, so that prefix caches hit; the varying part comes last. The turns exist in the request only,
never in the program's prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...lang.chat_template import ChatTemplate, Turn
from ...lang.generation import INTEGER, NUMBER
from ...lang.prompt import EMPTY, Part, Text
from ...lang.protocol import ConstraintSpec
from ..position import Position, since, text_of
from . import expressions

# In a conversation, after what the program itself says last. `demand`: see `demand`.
NOTE = "Write your answer as {demand}\nWrite nothing before it, nothing after it, and no code fence around it."
# ... where the program has begun the answer. `said`: its last words.
NEXT_NOTE = (
    "Your answer is written piece by piece. Write the next piece of it as {demand}\nWrite nothing before it, nothing "
    "after it, and no code fence around it. The answer so far ends with {said}"
)
# After an answer that cannot be used. `problem`: of `guarantee.holds`; `note`: one of those above.
COMPLAINT = "That cannot be used: {problem}.\n\n{note}"
# ... where nothing is demanded but that the program's own check accepts it.
AGAIN = "Write the answer again."
# In front of a text outside of roles. `correction`: "", or what it does not go on with.
FOREWORD = "(Below is the beginning of a text. It goes on with {demand}{correction})\n\n"
CORRECTION = "\nIt does not go on with {failed}: {problem}."

_SHOWN = 80  # characters of an answer, or of what was said before


def demand(constraint: ConstraintSpec | None) -> str:
    """Describes the constraint in words, after "write it as"; ends its line. None: the program's check decides."""
    if constraint is None:
        return "a text that can be used."
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
        case "expression":
            return (
                'a text of this form ("..." is a text as it stands, /.../ what a regular expression matches, JSON(...) '
                f"JSON of a schema, | separates what may be chosen from):\n{expressions.spelled(constraint.source)}"
            )
        case "tools":
            raise AssertionError("guarantee.lower refuses calls of tools where they are not enforced")


def note(constraint: ConstraintSpec | None, said: str) -> str:
    """Returns the instruction before the answer; "" without a constraint. `said`: the beginning of the answer."""
    if constraint is None:
        return ""
    if not said:
        return NOTE.format(demand=demand(constraint))
    return NEXT_NOTE.format(demand=demand(constraint), said=repr(said[-_SHOWN:]))


def complaint(problem: str, note: str) -> str:
    """Returns the message about a rejected answer. `note`: the one sent before."""
    return COMPLAINT.format(problem=problem, note=note or AGAIN)


def foreword(constraint: ConstraintSpec | None, correction: str = "") -> str:
    """Returns the instruction put before a text that is to be continued."""
    return FOREWORD.format(demand=demand(constraint), correction=correction)


def correction(failed: str, problem: str) -> str:
    """Returns the part of a foreword about the last rejected continuation."""
    return CORRECTION.format(failed=shortened(failed), problem=problem)


def shortened(text: str) -> str:
    """Quotes a text for a message, shortened."""
    return repr(text) if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]!r} … {text[-_SHOWN:]!r}"


# A note joins the last turn of one of these: two user turns in a row are refused by many templates.
_LISTENED_TO = ("user", "system", "developer")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation with an open assistant turn.

    Attributes:
        before: parts up to the end of the last closed turn, its scaffolding included.
        turns: the closed turns.
        begun: parts of the open assistant turn so far.
    """

    template: ChatTemplate
    before: tuple[Part, ...]
    turns: tuple[Turn, ...]
    begun: tuple[Part, ...]

    @property
    def said(self) -> str:
        """The text of the answer so far."""
        return text_of(list(self.begun))

    def first(self, note: str) -> tuple[Part, ...]:
        """Returns the prompt with a note after the program's last text."""
        parts, turns = self._noted(note)
        return _joined((*parts, *self.template.open(turns, "assistant"), *self.begun))

    def again(self, note: str, failed: str, complaint: str) -> tuple[Part, ...]:
        """Returns the prompt after a rejected answer. Providers take no empty turns, so an empty answer is left out
        and only the complaint is added."""
        answer = self.said + failed
        if not answer.strip():
            return self.first(complaint)
        parts, turns = self._noted(note) if note else (self.before, self.turns)
        parts = (*parts, *self.template.open(turns, "assistant"), *self.begun, Text(failed))
        turns = (*turns, Turn("assistant", answer))
        parts = (*parts, *self.template.close(turns))
        parts, turns = self._with_note(parts, turns, complaint)
        return _joined((*parts, *self.template.open(turns, "assistant"), *self.begun))

    def _noted(self, note: str) -> tuple[tuple[Part, ...], tuple[Turn, ...]]:
        if self.turns and self.turns[-1].role in _LISTENED_TO:
            content = _without(self.before, self.template.close(self.turns))
            if content is not None:
                last = self.turns[-1]
                longer = Turn(last.role, f"{last.content or ''}\n\n{note}")
                turns = (*self.turns[:-1], longer)
                return (*content, Text(f"\n\n{note}"), *self.template.close(turns)), turns
        return self._with_note(self.before, self.turns, note)

    def _with_note(
        self, parts: tuple[Part, ...], turns: tuple[Turn, ...], text: str
    ) -> tuple[tuple[Part, ...], tuple[Turn, ...]]:
        """Adds one more user turn."""
        parts = (*parts, *self.template.open(turns, "user"), Text(text))
        turns = (*turns, Turn("user", text))
        return (*parts, *self.template.close(turns)), turns


def of(position: Position, template: ChatTemplate) -> Dialogue | None:
    """Returns the conversation of a stream; None without an open assistant turn, so notes have no place."""
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
    """Returns the parts before their trailing scaffolding; None if they do not end with it, as with templates that
    write a turn only together with the next one."""
    text = text_of(list(scaffolding))
    *rest, last = parts or (Text(""),)
    if not isinstance(last, Text) or not last.text.endswith(text):
        return None
    left = last.text[: len(last.text) - len(text)]
    return (*rest, Text(left, last.control)) if left else tuple(rest)


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Joins adjacent parts of one kind, as a prompt does."""
    prompt = EMPTY
    for part in parts:
        prompt = prompt.append(part)
    return prompt.parts
