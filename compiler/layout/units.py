"""Sentences and lines: the smallest pieces of a prompt that can be told apart."""

from collections.abc import Iterator
from dataclasses import dataclass

from . import phrases
from .marked import Marked, is_mark
from .tokens import Counter


@dataclass(slots=True)
class Unit:
    """A sentence or a line. `starts_line`: it does not stand behind another one in its line."""

    text: str
    gap: str
    starts_line: bool


def units_of(text: str) -> Iterator[Unit]:
    """Lines; those that are no list items, headings or labels' beginnings are cut at the ends of sentences."""
    position = 0
    while position < len(text):
        end = text.find("\n", position)
        line = text[position:] if end < 0 else text[position:end]
        position += len(line)
        start = position
        while position < len(text) and text[position].isspace():
            position += 1
        gap = text[start:position]  # blank lines and what indents the next one
        sentences = [line] if phrases.LIST_ITEM.match(line) or phrases.HEADING.match(line) else _sentences(line)
        for number, sentence in enumerate(sentences):
            bare = sentence.rstrip()
            behind = sentence[len(bare) :]
            yield Unit(bare, behind if number < len(sentences) - 1 else behind + gap, starts_line=number == 0)


def _sentences(line: str) -> list[str]:
    sentences, start = [], 0
    for end in phrases.SENTENCE_END.finditer(line):
        behind = line[end.end() : end.end() + 1]
        if behind and (not behind.islower() or is_mark(behind)):
            sentences.append(line[start : end.end()])
            start = end.end()
    return [*sentences, line[start:]] if line[start:] else sentences


def free_tokens(marked: Marked, counter: Counter) -> int:
    """Tokens of sentences and lines without a hole. Labels and tags do not count: they go where their values go."""
    units = units_of(marked.text.lstrip())
    return sum(counter.tokens(unit.text) for unit in units if not has_hole(unit, marked) and _is_saying(unit))


def has_hole(unit: Unit, marked: Marked) -> bool:
    return any(character in marked.holes for character in unit.text)


def _is_saying(unit: Unit) -> bool:
    """Whether a unit is more than a label, a separator or a tag."""
    bare = phrases.TAG.sub("", unadorned(unit.text))
    return not bare.endswith((":", "：")) and (len(bare.split()) > 2 or len(bare) > 12)


def unadorned(text: str) -> str:
    """Without what makes the last letters bold."""
    return text.rstrip("*_ ")
