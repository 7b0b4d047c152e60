"""The earlier prompts that a prompt is nearest to: what of it could have been in the cache."""

from dataclasses import dataclass

from .history import Asked, History
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


def neighbours_of(asked: Asked, text: str, history: History) -> Neighbours:
    """Among calls that began before this one, and have anything in common with it."""
    same: list[Neighbour] = []
    others: list[Neighbour] = []
    for call in history.before(asked):
        layout = with_answer(call)
        common = common_length(text, layout.text)
        if common:
            (same if call.salt == asked.salt else others).append(Neighbour(call, layout, common))
    for found in (same, others):
        found.sort(key=lambda neighbour: (neighbour.common, neighbour.goes_on), reverse=True)  # the latest stay first
        del found[BESIDE:]
    return Neighbours(tuple(same), tuple(others))
