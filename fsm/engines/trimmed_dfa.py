"""Automata of other packages as expressions: live states only, numbered from the initial one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ..charset import CharSet
from ..language import Dfa


def trimmed_dfa(
    initial: int, finals: Collection[int], edges: Mapping[int, Iterable[tuple[CharSet, int]]]
) -> Dfa | None:
    """The automaton without states that lead nowhere or are not reached; None when nothing is left.

    edges: of each state, characters that are disjoint with the state behind them.
    """
    into: dict[int, list[int]] = {}
    behind: dict[int, dict[int, CharSet]] = {}
    for state, out in edges.items():
        targets = behind.setdefault(state, {})
        for characters, target in out:
            if characters:
                targets[target] = targets.get(target, CharSet()) | characters
                into.setdefault(target, []).append(state)
    live = _reached(finals, into)
    if initial not in live:
        return None
    forward = {state: [target for target in targets if target in live] for state, targets in behind.items()}
    numbers = {state: number for number, state in enumerate(_reached([initial], forward))}
    return Dfa(
        tuple(state in finals for state in numbers),
        tuple(
            tuple(
                (characters.ranges, numbers[target])
                for target, characters in behind.get(state, {}).items()
                if target in live
            )
            for state in numbers
        ),
    )


def _reached(starts: Iterable[int], along: Mapping[int, list[int]]) -> dict[int, None]:
    """The states on ways from `starts`, in the order in which they are found."""
    found = dict.fromkeys(starts)
    waiting = list(found)
    while waiting:
        for state in along.get(waiting.pop(), []):
            if state not in found:
                found[state] = None
                waiting.append(state)
    return found
