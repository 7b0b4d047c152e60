"""The earlier prompts that a prompt is nearest to: what of it could have been in the cache."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from .history import Asked
from .layout import Layout, common_length, with_answer

BESIDE = 8  # earlier prompts whose tokens are compared


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An earlier call. `common`: characters that its prompt and answer begin with as the prompt in question does."""

    asked: Asked
    layout: Layout
    common: int

    @property
    def goes_on(self) -> bool:
        """It says something else, or more, where the prompt in question parts from it."""
        return self.common < len(self.layout.text)

    def had_ended(self, asked: Asked) -> bool:
        """Before that call began."""
        return self.asked.ended is not None and self.asked.ended < asked.began


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The nearest first; of equally near ones those that go on, and of these the latest."""

    same_salt: tuple[Neighbour, ...]
    other_salts: tuple[Neighbour, ...]


class EarlierCalls:
    """Earlier prompts as the calls of one report see them: each is laid out once.

    Args:
        calls: in any order, some of them perhaps twice.
    """

    def __init__(self, calls: Iterable[Asked]) -> None:
        self._calls = sorted(dict.fromkeys(calls), key=lambda call: call.began, reverse=True)
        self._layouts: dict[Asked, Layout] = {}

    def of(self, asked: Asked, text: str) -> Neighbours:
        """Among calls that began before this one, and have anything in common with its text."""
        same, others = _Nearest(text), _Nearest(text)
        for call in self._calls[bisect_right(self._calls, -asked.began, key=lambda call: -call.began) :]:
            layout = self._layouts.get(call)
            if layout is None:
                layout = self._layouts[call] = with_answer(call)
            (same if call.salt == asked.salt else others).look_at(call, layout)
        return Neighbours(same.found(), others.found())


class _Nearest:
    """The nearest of many prompts. Most are far away, which a look at the characters of the last of them tells."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: list[Neighbour] = []
        self._least = text[:1]  # what a prompt has to begin with to be among them

    def look_at(self, asked: Asked, layout: Layout) -> None:
        if not self._least or not layout.text.startswith(self._least):
            return
        self._found.append(Neighbour(asked, layout, common_length(self._text, layout.text)))
        if len(self._found) >= 2 * BESIDE:
            del self._sorted()[BESIDE:]
            self._least = self._text[: self._found[-1].common]

    def found(self) -> tuple[Neighbour, ...]:
        return tuple(self._sorted()[:BESIDE])

    def _sorted(self) -> list[Neighbour]:
        self._found.sort(key=lambda neighbour: (neighbour.common, neighbour.goes_on), reverse=True)  # the latest first
        return self._found
