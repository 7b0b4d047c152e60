"""Which sentences and lines are tied to their neighbours, so that they cannot move alone.

Rules only ever tie: what no rule knows stays where it is beside its neighbours' order. A label stays with what it
labels, a list in one piece, an opening tag with its closing one, examples with each other.
"""

import re
from collections.abc import Iterator

from . import phrases
from .marked import Marked, is_mark
from .units import Unit, has_hole, unadorned

_LEADS_ON = (":", ",", ";", "—", "-", "：", "，", "；")


def ties_of(units: list[Unit], marked: Marked) -> list[bool]:
    """For every unit whether it is tied to the next one."""
    tied = [False] * len(units)

    def tie(first: int, last: int) -> None:
        for number in range(max(first, 0), min(last, len(units) - 1)):
            tied[number] = True

    for number, unit in enumerate(units):
        if unadorned(unit.text).endswith((":", ",", ";", "—", "-", "：", "，", "；")) or points(
            phrases.FORWARD, unit, marked
        ):
            tie(number, number + 1)
        if points(phrases.BACKWARD, unit, marked) or continues(unit):
            tie(number - 1, number)
        if number and has_hole(units[number - 1], marked) and points(phrases.PRONOUN, unit, marked):
            tie(number - 1, number)
        if phrases.SEPARATOR.match(unit.text):
            tie(number - 1, number + 1)
        if phrases.LIST_ITEM.match(unit.text) and number and phrases.LIST_ITEM.match(units[number - 1].text):
            tie(number - 1, number)
        if phrases.HEADING.match(unit.text):
            tie(number, _section_end(units, number))
    for first, last in (*_enclosed(units), *_fenced(units), *_bracketed(units), *_examples(units)):
        tie(first, last)
    return tied


def continues(unit: Unit) -> bool:
    """Whether a unit goes on with the one in front. A hole may hold anything, so a line that begins with one does
    not, and what follows it in the same line does."""
    first = unit.text[:1]
    if first and is_mark(first):
        return not unit.starts_line
    return phrases.CONTINUES.match(unit.text) is not None and phrases.LIST_ITEM.match(unit.text) is None


def bare_text(text: str, marked: Marked) -> str:
    """Without holes: what they hold says nothing about its place."""
    return "".join(" " if character in marked.holes else character for character in text)


def points(words: re.Pattern[str], unit: Unit, marked: Marked) -> bool:
    return words.search(bare_text(unit.text, marked)) is not None


def _section_end(units: list[Unit], start: int) -> int:
    """The last unit in front of the next heading."""
    for number in range(start + 1, len(units)):
        if phrases.HEADING.match(units[number].text):
            return number - 1
    return len(units) - 1


def _enclosed(units: list[Unit]) -> Iterator[tuple[int, int]]:
    """From opening tags to closing ones. One without the other reaches to the end, or the beginning."""
    open_tags: list[tuple[str, int]] = []
    for number, unit in enumerate(units):
        for match in phrases.TAG.finditer(unit.text):
            closes, name = bool(match[1] or match[3]), match[2] or match[4]
            if not closes:
                open_tags.append((name, number))
                continue
            for index in range(len(open_tags) - 1, -1, -1):
                if open_tags[index][0] == name:
                    yield open_tags[index][1], number
                    del open_tags[index:]
                    break
            else:
                yield 0, number
    for _, number in open_tags:
        yield number, len(units) - 1


def _fenced(units: list[Unit]) -> Iterator[tuple[int, int]]:
    """Between two fences of a kind; a quotation mark that is not closed in its unit is one too."""
    opened: dict[str, int] = {}
    for number, unit in enumerate(units):
        fences = phrases.FENCE.findall(unit.text)
        rest = phrases.FENCE.sub("", unit.text)
        for sign in (*fences, *(['"'] * (rest.count('"') % 2))):
            if sign in opened:
                yield opened.pop(sign), number
            else:
                opened[sign] = number
    for number in opened.values():
        yield number, len(units) - 1


def _bracketed(units: list[Unit]) -> Iterator[tuple[int, int]]:
    """From an opening bracket to the one that closes it; smileys and the like close nothing."""
    waiting: list[tuple[str, int]] = []
    for number, unit in enumerate(units):
        for character in unit.text:
            if character in phrases.OPENING:
                waiting.append((phrases.CLOSING[phrases.OPENING.index(character)], number))
            elif waiting and character == waiting[-1][0]:
                yield waiting.pop()[1], number


def _examples(units: list[Unit]) -> Iterator[tuple[int, int]]:
    """Shots: where a label comes again, everything from the first label that does to the last is one piece. What is
    asked about stands behind its examples, and nothing else between them."""
    places: dict[str, list[int]] = {}
    for number, unit in enumerate(units):
        label = phrases.LABEL.match(unit.text)
        if label is not None:
            places.setdefault(label[1].strip().lower(), []).append(number)
    repeated = [numbers for numbers in places.values() if len(numbers) > 1]
    if repeated:
        yield min(numbers[0] for numbers in repeated), max(numbers[-1] for numbers in repeated)
