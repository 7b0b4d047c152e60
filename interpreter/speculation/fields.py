"""Where a `gen` ends inside a text that went on behind it.

stop         the stop that ends first; certain when its tokens are within max_tokens
length       max_tokens are reached at a known end of a token
own end      the model ended the text
constraint   the longest text that satisfies it, if what comes next in the program stands right behind
"""

from dataclasses import dataclass

from ...lang.errors import UmbelError
from ...lang.ops import Gen
from ...lang.protocol import ConstraintSpec, FinishReason
from ...lang.sampling import SamplingParams
from .. import expressions, validation
from .replies import LongReply


@dataclass(frozen=True, slots=True)
class Field:
    """What ends the text of one `gen`. `enforced`: the provider would enforce the constraint."""

    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    max_tokens: int
    constraint: ConstraintSpec | None = None
    enforced: bool = False

    @property
    def ends_inside(self) -> bool:
        """Whether something ends it before the model would, so that text behind it is worth having."""
        return bool(self.stop or self.stop_regex or self.constraint)


@dataclass(frozen=True, slots=True)
class End:
    """`stop`: offset behind the text of the field. `read`: behind what ended it."""

    stop: int
    read: int
    reason: FinishReason
    matched: str | None = None


def field_of(op: Gen, sampling: SamplingParams, *, enforced: bool) -> Field:
    return Field(sampling.stop, sampling.stop_regex, sampling.max_tokens, op.constraint, enforced)


def end_of(field: Field, reply: LongReply, start: int, following: str) -> End | None:
    """Where a field that begins at `start` ends; None where that is not certain.

    Args:
        following: constant text that the program is known to say next; "" when nothing is known.
    """
    try:
        if field.constraint is None:
            return _plain_end(field, reply, start)
        if field.enforced:
            return _enforced_end(field, field.constraint, reply, start)
        return _validated_end(field, field.constraint, reply, start, following)
    except UmbelError:  # a constraint or an expression that is refused: the call of its own says so
        return None


def _plain_end(field: Field, reply: LongReply, start: int) -> End | None:
    found = first_stop(field, reply.text, start)
    end = len(reply.text) if found is None else found[1]
    if (found is not None or reply.ended) and reply.at_most(start, end) <= field.max_tokens:
        stop, matched = (end, None) if found is None else (found[0], found[2])
        return End(stop, end, FinishReason.STOP, matched)
    cut = reply.after(start, field.max_tokens)
    if cut is not None and (found is None or cut < end):
        return End(cut, cut, FinishReason.LENGTH)
    return None


def _validated_end(
    field: Field, constraint: ConstraintSpec, reply: LongReply, start: int, following: str
) -> End | None:
    end = _plain_end(field, reply, start)
    if end is not None and end.reason is FinishReason.STOP:
        text = reply.text[start : end.stop]
        # Text that has to be tidied first would stand in the prompt as nobody wrote it.
        if validation.tidied(constraint, text) == text and not validation.holds(constraint, text):
            return end
    length = validation.longest(constraint, reply.text[start:])
    if not length or not following or not reply.text.startswith(following, start + length):
        return None
    return _fitting(field, reply, start, start + length)


def _enforced_end(field: Field, constraint: ConstraintSpec, reply: LongReply, start: int) -> End | None:
    """Under a constraint another text could have come, unless nothing can be added to this one. JSON may have other
    blanks."""
    if constraint.kind not in ("regex", "choices"):
        return None
    rest = reply.text[start:]
    length = validation.longest(constraint, rest)
    if not length or validation.longest(constraint, rest[:length]) != length:
        return None
    return _fitting(field, reply, start, start + length)


def _fitting(field: Field, reply: LongReply, start: int, end: int) -> End | None:
    """The end of a constrained text, unless a stop or max_tokens ends it before."""
    found = first_stop(field, reply.text[:end], start)
    if found is not None or reply.at_most(start, end) > field.max_tokens:
        return None
    return End(end, end, FinishReason.STOP)


def first_stop(field: Field, text: str, start: int) -> tuple[int, int, str] | None:
    """The stop that ends first, from `start`: (where it begins, where it ends, which); the longest of those that end
    together. None without one.

    Raises:
        ConstraintError: a stop_regex that cannot be used.
    """
    found = [(place + len(stop), place, stop) for stop in field.stop if (place := text.find(stop, start)) >= 0]
    if field.stop_regex:
        match = expressions.first_match(field.stop_regex, text[start:])
        if match is not None:
            found.append((start + match[1], start + match[0], match[2]))
    if not found:
        return None
    end, begin, stop = min(found)
    return begin, end, stop
