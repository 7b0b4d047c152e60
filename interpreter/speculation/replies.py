"""Answers several gens from the text of one call.

A `LongReply` has the text, with the ends of its tokens where the backend returns them:

    text   H a r r y \\n J o b :   w i z a r d
    ends           5  6     9 10            17      offsets after each token

`end_of` finds where a `gen` ends inside a text that went on after it:

    stop         the stop that ends first; certain when its tokens are within max_tokens
    length       max_tokens are reached at a known end of a token
    own end      the model ended the text
    constraint   the longest text that satisfies it, if what comes next in the program stands right after

A `Surplus` is the rest of a reply, which may answer the next gen:

    prompt   ... "Name: " │ "Harry"  "\\nJob: "  "wizard"  ...      the stream's text since then
    reply                 │  Harry \\n Job:  wizard \\n Age:  11     begins with it, or is dropped
                        anchor

A gen may be answered from a reply only if one call would choose both gens' tokens in the same way. Readers of a gen
whose call goes on get its text as soon as its end is certain, and no more. Where a model cannot continue a turn, it is
asked for all of it, as it was trained to answer, and the reply begins with a lead:

    assistant("Name: " + gen("name", stop="\\n") + ...)      prompt   ... <|im_start|>assistant
                                                            lead     Name:
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import msgspec

from ...lang.errors import UmbelError
from ...lang.prompt import Prompt, Text
from ...lang.protocol import Chunk, Completion, ConstraintSpec, Final, FinishReason
from ...lang.result import Result
from ...lang.sampling import SamplingParams
from ..calls import OnChunk
from ..guarantees import expressions, guarantee
from ..position import Position, since, text_of


@dataclass(frozen=True, slots=True)
class LongReply:
    """The text of one call.

    Attributes:
        text: all of it.
        ends: character offsets after each of its tokens; () where they are not known.
        tokens: an upper bound on their number.
        ended: the model itself ended the text here; else there might be more.
    """

    text: str
    ends: tuple[int, ...]
    tokens: int
    ended: bool

    def at_most(self, start: int, end: int) -> int:
        """Returns a bound on the tokens of `text[start:end]` generated alone: a token holds at least a byte, and known
        tokens stay as they are, except one cut by `start`, whose rest may become several."""
        count = len(self.text[start:end].encode("utf-8", "surrogatepass"))
        if start == end:
            return 0
        if not self.ends:
            return min(count, self.tokens)
        first = bisect_right(self.ends, start)  # the token that holds the character at `start`
        last = bisect_left(self.ends, end)
        known = last - first + 1
        if not self.begins_token(start):
            known += len(self.text[start : min(end, self.ends[first])].encode("utf-8", "surrogatepass")) - 1
        return min(count, known)

    def begins_token(self, place: int) -> bool:
        """Returns whether a token is known to begin at this offset."""
        if not self.ends:
            return False
        return place == 0 or self.ends[min(bisect_left(self.ends, place), len(self.ends) - 1)] == place

    def after(self, start: int, count: int) -> int | None:
        """Returns the offset after `count` tokens from `start`; None if unknown, or if there are fewer."""
        if not self.begins_token(start):
            return None
        last = bisect_right(self.ends, start) + count - 1
        return self.ends[last] if last < len(self.ends) else None

    def counted(self, start: int, end: int) -> int:
        """Counts the tokens of `text[start:end]`, for usage: those that end in it, or its share of all. Adjacent
        pieces add up."""
        if self.ends:
            return bisect_right(self.ends, end) - bisect_right(self.ends, start)
        if not self.text:
            return 0
        return round(self.tokens * end / len(self.text)) - round(self.tokens * start / len(self.text))


def reply_of(final: Final) -> LongReply:
    """Reads the first continuation of a call."""
    completion = final.completions[0]
    ends = _ends([token.text for token in completion.logprobs], completion.text)
    tokens = max(final.usage.completion_tokens, len(completion.token_ids), len(ends))
    if not tokens:  # they were not counted
        tokens = len(completion.text.encode("utf-8", "surrogatepass"))
    ended = completion.finish_reason is FinishReason.STOP and completion.matched_stop is None
    return LongReply(completion.text, ends, tokens, ended)


def _ends(tokens: list[str], text: str) -> tuple[int, ...]:
    """Returns the offsets after the tokens, if they spell the text. Some servers append the end-of-sequence token."""
    ends = tuple(accumulate(map(len, tokens)))
    spelled = "".join(tokens)
    if not text or not spelled.startswith(text) or len(text) not in ends:
        return ()
    return ends[: ends.index(len(text)) + 1]


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
    if end is None or field.result is None or not field.result.judges:
        return end
    if field.result.refusal(reply.text[start : end.stop]) is not None:
        return None
    return end if field.constraint is not None else replace(end, guarantee="validated")


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


@dataclass(frozen=True, slots=True)
class Surplus:
    """The rest of a reply.

    Attributes:
        reply: the whole of it.
        anchor: the prompt that it continues.
        manner: how its tokens were chosen, see `manner_of`.
        request_id: of its call.
        prompt_tokens: of its call.
        before: name of the gen that took text from it last.
    """

    reply: LongReply
    anchor: Prompt
    manner: SamplingParams
    request_id: str
    prompt_tokens: int
    before: str

    def reached(self, prompt: Prompt) -> int | None:
        """Returns the offset in the reply that the stream has reached; None if it differs, or is used up."""
        texts: list[str] = []
        for part in since(self.anchor, prompt):
            if not isinstance(part, Text) or part.control:
                return None  # an image, another turn
            texts.append(part.text)
        text = "".join(texts)
        return len(text) if len(text) < len(self.reply.text) and self.reply.text.startswith(text) else None


class Pieces:
    """Streams the first field of a long reply to readers.

    Nothing is given out until the end of the field is certain: the reply may be discarded, and delivered text cannot.

    Args:
        field: what ends the text.
        lead: the required beginning of the reply, not part of the text.
        on_chunk: gets the text.
    """

    __slots__ = ("_done", "_field", "_lead", "_on_chunk", "_text", "delivered")

    def __init__(self, field: Field, lead: str, on_chunk: OnChunk) -> None:
        self._field = field
        self._lead = lead
        self._on_chunk = on_chunk
        self._text = ""
        self.delivered = False  # readers have the text
        self._done = field.constraint is not None  # looked at when all of it is there

    def feed(self, chunk: Chunk) -> None:
        if self._done:
            return
        self._text += chunk.text
        if not self._text.startswith(self._lead):
            return
        bytes_so_far = len(self._text.encode("utf-8", "surrogatepass"))
        end = end_of(self._field, LongReply(self._text, (), bytes_so_far, ended=False), len(self._lead), "")
        if end is not None:
            self._done = self.delivered = True
            text = self._text[len(self._lead) : end.stop]
            self._on_chunk(msgspec.structs.replace(chunk, text=text, token_ids=(), logprobs=()))


def manner_of(sampling: SamplingParams) -> SamplingParams:
    """Returns the parameters without those that only end a text, or do not affect the best token."""
    manner = msgspec.structs.replace(sampling, max_tokens=1, stop=(), stop_regex=())
    if not sampling.greedy:
        return manner
    return msgspec.structs.replace(manner, top_p=1.0, top_k=-1, min_p=0.0, seed=None)


def speaks_plainly(sampling: SamplingParams) -> bool:
    """Returns whether a gen is one text whose tokens do not depend on where its call began.

    Not so with several continuations, least lengths and stop tokens, of which a text shows nothing; log-probabilities,
    which belong to a call; penalties, which count what the call has generated; and draws from a seed, which every call
    begins anew.
    """
    return (
        sampling.n == 1
        and sampling.max_tokens > 0
        and sampling.min_tokens == 0
        and not sampling.ignore_eos
        and not sampling.stop_token_ids
        and not sampling.logprobs
        and not sampling.top_logprobs
        and sampling.prompt_logprobs_from is None
        and sampling.frequency_penalty == 0
        and sampling.presence_penalty == 0
        and (sampling.greedy or sampling.seed is None)
    )


def lead_of(position: Position, answered: Prompt | None) -> tuple[str, Prompt]:
    """Returns constant text at the beginning of the open turn, and the prompt before it; "" if it must stay.

    Args:
        answered: the beginning of a turn that holds something generated.
    """
    turn = position.turn
    if turn is None or turn.role != "assistant" or turn.start is answered:
        return "", position.prompt
    parts = since(turn.start, position.prompt)
    if not all(isinstance(part, Text) and not part.control for part in parts):
        return "", position.prompt
    return text_of(parts), turn.start
