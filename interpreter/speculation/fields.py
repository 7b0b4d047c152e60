"""Finds where a `gen` ends inside a text that went on after it.

stop         the stop that ends first; certain when its tokens are within max_tokens
length       max_tokens are reached at a known end of a token
own end      the model ended the text
constraint   the longest text that satisfies it, if what comes next in the program stands right after
"""

from dataclasses import dataclass, replace
from typing import Literal

from ...lang.errors import UmbelError
from ...lang.protocol import Completion, ConstraintSpec, FinishReason
from ...lang.result import Result
from ...lang.sampling import SamplingParams
from ..guarantees import expressions, guarantee
from .replies import LongReply


@dataclass(frozen=True, slots=True)
class Field:
    """The conditions that end the text of one `gen`.

    `enforced`: the provider would enforce the constraint. `result`: its type, which may refuse a text."""

    sampling: SamplingParams
    constraint: ConstraintSpec | None = None
    enforced: bool = False
    result: Result | None = None

    @property
    def stops(self) -> bool:
        return bool(self.sampling.stop or self.sampling.stop_regex)

    @property
    def ends_inside(self) -> bool:
        """True if a stop or constraint may end it before the model does, so that text after it is useful."""
        return self.stops or self.constraint is not None


@dataclass(frozen=True, slots=True)
class End:
    """The end of a field. `stop`: offset after its text. `read`: offset after its stop. `guarantee`: if constrained."""

    stop: int
    read: int
    reason: FinishReason
    matched: str | None = None
    guarantee: Literal["", "enforced", "validated", "violated", "incomplete"] = ""


def end_of(field: Field, reply: LongReply, start: int, following: str) -> End | None:
    """Finds the end of a field that begins at `start`; None where it is uncertain, or its type refuses the text.

    Args:
        following: the program's next constant text; "" if it is not known.
    """
    try:
        end = _certain_end(field, reply, start, following)
    except UmbelError:  # a constraint or an expression that is refused: the call of its own says so
        return None
    if end is None or field.result is None or field.result.refusal(reply.text[start : end.stop]) is None:
        return end
    return None


def _certain_end(field: Field, reply: LongReply, start: int, following: str) -> End | None:
    if field.constraint is None:
        return _plain_end(field, reply, start)
    if field.enforced:
        return _enforced_end(field, field.constraint, reply, start)
    return _validated_end(field, field.constraint, reply, start, following)


def reaches_end(field: Field, reply: LongReply, start: int) -> bool:
    """Returns whether the field ends inside the reply, though perhaps at an uncertain place. If its own call then
    generates the same text, the surplus after it stays usable."""
    if reply.ended or field.constraint is not None:
        return True
    try:
        return first_stop(field, reply.text, start) is not None
    except UmbelError:
        return False


def _plain_end(field: Field, reply: LongReply, start: int) -> End | None:
    found = first_stop(field, reply.text, start)
    end = len(reply.text) if found is None else found[1]
    if (found is not None or reply.ended) and reply.at_most(start, end) <= field.sampling.max_tokens:
        stop, matched = (end, None) if found is None else (found[0], found[2])
        return End(stop, end, FinishReason.STOP, matched)
    cut = reply.after(start, field.sampling.max_tokens)
    if cut is not None and (found is None or cut < end):
        return End(cut, cut, FinishReason.LENGTH)
    return None


def _validated_end(
    field: Field, constraint: ConstraintSpec, reply: LongReply, start: int, following: str
) -> End | None:
    """Finds the end of a validated text: the whole text if it is accepted untidied, as in a call of its own, else the
    end by the constraint. Tidied text would leave a prompt that the reply does not continue."""
    whole = _plain_end(field, reply, start)
    if whole is not None:
        text = reply.text[start : whole.stop]
        verdict = guarantee.judge(constraint, completion_of(reply, start, whole), field.sampling)
        if verdict.accepted:
            return replace(whole, guarantee=verdict.guarantee) if verdict.completion.text == text else None
    elif field.stops:
        return None
    length = guarantee.longest(constraint, reply.text[start:])
    if not length or not following or not reply.text.startswith(following, start + length):
        return None
    text = reply.text[start : start + length]
    if whole is None and text != text.strip():  # max_tokens might leave more of it, which would be tidied
        return None
    return _constrained(field, reply, start, start + length)


def _enforced_end(field: Field, constraint: ConstraintSpec, reply: LongReply, start: int) -> End | None:
    """Finds the end of a text that the provider would enforce; None if the constraint allows it to go on, or for JSON,
    whose white space may differ."""
    if constraint.kind not in ("regex", "choices"):
        return None
    rest = reply.text[start:]
    length = guarantee.longest(constraint, rest)
    if not length or guarantee.longest(constraint, rest[:length]) != length:
        return None
    return _constrained(field, reply, start, start + length)


def _constrained(field: Field, reply: LongReply, start: int, end: int) -> End | None:
    """Returns the end of a text by its constraint, unless a stop or max_tokens ends it before."""
    found = first_stop(field, reply.text, start)
    if found is not None and found[0] < end:
        return None
    if reply.at_most(start, end) > field.sampling.max_tokens:
        return None
    return End(end, end, FinishReason.STOP, guarantee="validated")


def completion_of(reply: LongReply, start: int, end: End) -> Completion:
    """Builds the completion that a call of its own would have returned."""
    text = reply.text[start : end.stop]
    return Completion(text, (), 0, text, end.reason, end.matched)


def first_stop(field: Field, text: str, start: int) -> tuple[int, int, str] | None:
    """Finds the stop that ends first, from `start`: (start, end, stop); the longest of those that end together. None
    without one.

    Raises:
        ConstraintError: a stop_regex that cannot be used.
    """
    found = [(place + len(stop), place, stop) for stop in field.sampling.stop if (place := text.find(stop, start)) >= 0]
    if field.sampling.stop_regex:
        match = expressions.first_match(field.sampling.stop_regex, text[start:])
        if match is not None:
            found.append((start + match[1], start + match[0], match[2]))
    if not found:
        return None
    end, begin, stop = min(found)
    return begin, end, stop
