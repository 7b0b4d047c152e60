"""Splitting the thinking of a model off its answer, all at once or piece by piece.

    template wrote the opening tag   thinking ... </think> answer
    the model wrote it               <think> thinking ... </think> answer
    cut off by max_tokens            <think> thinking ...
    no tags at all                   answer

White space around the thinking and before the answer belongs to neither.
"""

from dataclasses import dataclass
from enum import Enum, auto

from .steps import ReasoningTags


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str
    answer: str


class _Phase(Enum):
    UNDECIDED = auto()  # no tag seen: held back, since a closing tag would make it thinking
    REASONING = auto()
    ANSWER = auto()


class Splitter:
    """Text in, thinking and answer out. The sum of the pieces is what `split` gives for the whole.

    Args:
        tags: how the model marks its thinking.
        prompt_tail: the end of the prompt, which shows whether the template wrote the opening tag.
    """

    def __init__(self, tags: ReasoningTags, prompt_tail: str) -> None:
        self._tags = tags
        opened = prompt_tail.rstrip().endswith(tags.open)
        self._phase = _Phase.REASONING if opened else _Phase.UNDECIDED
        self._held = ""  # received, not given out
        self._began = False  # whether the current side has shown a character yet

    def feed(self, text: str) -> Split:
        self._held += text
        reasoning = answer = ""
        if self._phase is _Phase.UNDECIDED:
            start = self._held.lstrip()
            if start.startswith(self._tags.open):
                self._phase, self._held = _Phase.REASONING, start[len(self._tags.open) :]
            elif self._tags.close in self._held:
                self._phase = _Phase.REASONING
        if self._phase is _Phase.REASONING:
            reasoning = self._think()
        if self._phase is _Phase.ANSWER:
            answer, self._held = self._begin(self._held), ""
        return Split(reasoning, answer)

    def finish(self) -> Split:
        """What was held back: thinking if a tag opened it, else the answer."""
        held, self._held = self._held, ""
        if self._phase is _Phase.REASONING:
            return Split(self._begin(held).rstrip(), "")
        return Split("", self._begin(held))

    def _think(self) -> str:
        before, tag, after = self._held.partition(self._tags.close)
        if tag:
            thought = self._begin(before).rstrip()
            self._phase, self._held, self._began = _Phase.ANSWER, after, False
            return thought
        # Keep back white space at the end, which may be the last, and what may begin the closing tag.
        safe = before[: len(before) - _overlap(before, self._tags.close)].rstrip()
        self._held = self._held[len(safe) :]
        return self._begin(safe)

    def _begin(self, text: str) -> str:
        """`text` without the white space at the beginning of its side."""
        if not self._began:
            text = text.lstrip()
            self._began = bool(text)
        return text


def split(tags: ReasoningTags, prompt_tail: str, text: str) -> Split:
    """A whole text at once."""
    splitter = Splitter(tags, prompt_tail)
    first, last = splitter.feed(text), splitter.finish()
    return Split(first.reasoning + last.reasoning, first.answer + last.answer)


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
