"""What a model is told about a constraint that its provider does not enforce.

The wording is constant, so that prefix caches find it again; what varies stands last.
"""

from ...lang.constraint import INTEGER, NUMBER
from ...lang.protocol import ConstraintSpec

# In a conversation, behind what the program itself says last. `demand`: see `demand`.
NOTE = "Write your answer as {demand}\nWrite nothing before it, nothing behind it, and no code fence around it."
# ... where the program has begun the answer. `said`: its last words.
NEXT_NOTE = (
    "Your answer is written piece by piece. Write the next piece of it as {demand}\nWrite nothing before it, nothing "
    "behind it, and no code fence around it. The answer so far ends with {said}"
)
# Behind an answer that cannot be used. `problem`: of `validation.holds`; `note`: one of those above.
COMPLAINT = "That cannot be used: {problem}.\n\n{note}"
# In front of a text outside of roles. `correction`: "", or what it does not go on with.
FOREWORD = "(Below is the beginning of a text. It goes on with {demand}{correction})\n\n"
CORRECTION = "\nIt does not go on with {failed}: {problem}."

_SHOWN = 80  # characters of an answer, or of what was said before


def demand(constraint: ConstraintSpec) -> str:
    """The constraint in words, behind "write it as"; ends its line."""
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
    """What the model is told before it answers. `said`: what its answer says already, or ""."""
    if not said:
        return NOTE.format(demand=demand(constraint))
    return NEXT_NOTE.format(demand=demand(constraint), said=repr(said[-_SHOWN:]))


def complaint(problem: str, told: str) -> str:
    """What the model is told about an answer that cannot be used. `told`: the note it had."""
    return COMPLAINT.format(problem=problem, note=told)


def foreword(constraint: ConstraintSpec, correction: str = "") -> str:
    """What stands in front of a text that is to be continued."""
    return FOREWORD.format(demand=demand(constraint), correction=correction)


def correction(failed: str, problem: str) -> str:
    """What a foreword says of the continuation that came last."""
    return CORRECTION.format(failed=shortened(failed), problem=problem)


def shortened(text: str) -> str:
    """A text in a message."""
    return repr(text) if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]!r} … {text[-_SHOWN:]!r}"
