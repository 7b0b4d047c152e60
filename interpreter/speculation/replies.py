"""A text that was generated in one go, and what is known of its tokens.

text   H a r r y \n J o b :   w i z a r d
ends           5  6     9 10            17      offsets after each token, where the backend told them
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from ...lang.protocol import Final, FinishReason


@dataclass(frozen=True, slots=True)
class LongReply:
    """Attributes:
    text: all of it.
    ends: character offsets after each of its tokens; () where they are not known.
    tokens: how many there are, and not fewer.
    ended: the model itself ended the text here; else there might be more.
    """

    text: str
    ends: tuple[int, ...]
    tokens: int
    ended: bool

    def at_most(self, start: int, end: int) -> int:
        """A bound on the tokens of `text[start:end]` when it is generated alone: a token holds a byte at least, and
        tokens that are known stay as they are, but for one that `start` cuts, whose rest may be several."""
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
        """Whether a token is known to begin at this offset."""
        if not self.ends:
            return False
        return place == 0 or self.ends[min(bisect_left(self.ends, place), len(self.ends) - 1)] == place

    def after(self, start: int, count: int) -> int | None:
        """The offset after `count` tokens from `start`; None where that is not known, or there are fewer."""
        if not self.begins_token(start):
            return None
        last = bisect_right(self.ends, start) + count - 1
        return self.ends[last] if last < len(self.ends) else None

    def counted(self, start: int, end: int) -> int:
        """Counts the tokens of `text[start:end]`, for accounts: those that end in it, or its share of all.
        Neighbouring pieces add up."""
        if self.ends:
            return bisect_right(self.ends, end) - bisect_right(self.ends, start)
        if not self.text:
            return 0
        return round(self.tokens * end / len(self.text)) - round(self.tokens * start / len(self.text))


def reply_of(final: Final) -> LongReply:
    """The first continuation of a call."""
    completion = final.completions[0]
    ends = _ends([token.text for token in completion.logprobs], completion.text)
    tokens = max(final.usage.completion_tokens, len(completion.token_ids), len(ends))
    if not tokens:  # they were not counted
        tokens = len(completion.text.encode("utf-8", "surrogatepass"))
    ended = completion.finish_reason is FinishReason.STOP and completion.matched_stop is None
    return LongReply(completion.text, ends, tokens, ended)


def _ends(tokens: list[str], text: str) -> tuple[int, ...]:
    """Offsets after the tokens, if they spell the text. Some servers tell the end-of-sequence token after it too."""
    ends = tuple(accumulate(map(len, tokens)))
    spelled = "".join(tokens)
    if not text or not spelled.startswith(text) or len(text) not in ends:
        return ()
    return ends[: ends.index(len(text)) + 1]
