"""Splits the model's reasoning off its answer, in streamed and in whole texts."""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around the model's reasoning, inside `separate_reasoning`."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str
    answer: str


class _Phase(Enum):
    UNDECIDED = auto()  # no tag seen: held back, since a closing tag would make it thinking
    START = auto()  # the opening tag may come: white space and a part of the tag are held back
    REASONING = auto()
    ANSWER = auto()


class Splitter:
    """Splits streamed text into reasoning and answer. The pieces add up to `split_reasoning` of the whole.

    Args:
        tags: mark the model's reasoning.
        prompt_tail: the end of the prompt, which shows whether the template wrote the opening tag.
        opened: reasoning begins with the opening tag, in the prompt or at the beginning of the text. All other text is
            an answer, and is given out at once. False: a closing tag alone ends reasoning, too, so text without tags
            is held back until its end.
    """

    def __init__(self, tags: ReasoningTags, prompt_tail: str, *, opened: bool = False) -> None:
        self._tags = tags
        if prompt_tail.rstrip().endswith(tags.open):
            self._phase = _Phase.REASONING
        else:
            self._phase = _Phase.START if opened else _Phase.UNDECIDED
        self._held = ""  # received, not given out
        self._began = False  # the current side has given out a character

    def feed(self, text: str) -> Split:
        self._held += text
        reasoning = answer = ""
        if self._phase in (_Phase.UNDECIDED, _Phase.START):
            self._decide()
        if self._phase is _Phase.REASONING:
            reasoning = self._think()
        if self._phase is _Phase.ANSWER:
            answer, self._held = self._begin(self._held), ""
        return Split(reasoning, answer)

    def _decide(self) -> None:
        """Finds out whether the text begins with reasoning, if that is certain by now."""
        start = self._held.lstrip()
        if start.startswith(self._tags.open):
            self._phase, self._held = _Phase.REASONING, start[len(self._tags.open) :]
        elif self._phase is _Phase.START:
            if not self._tags.open.startswith(start):
                self._phase = _Phase.ANSWER
        elif self._tags.close in self._held:
            self._phase = _Phase.REASONING

    def finish(self) -> Split:
        """Returns the text held back: reasoning if a tag opened it, else answer."""
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
        """Strips white space at the beginning of a side."""
        if not self._began:
            text = text.lstrip()
            self._began = bool(text)
        return text


def split_reasoning(tags: ReasoningTags, prompt_tail: str, text: str, *, opened: bool = False) -> Split:
    """Splits a whole text into reasoning and answer. The arguments are those of `Splitter`."""
    splitter = Splitter(tags, prompt_tail, opened=opened)
    first, last = splitter.feed(text), splitter.finish()
    return Split(first.reasoning + last.reasoning, first.answer + last.answer)


def _overlap(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
