"""Automata of expressions that look ahead at places that are passed any number of times: ((?!--)[a-z-])*.

A guard says at its place that the rest of the text, to the very end, is of a language or is not. It is written into
the expression as a mark, a number beyond the last character. The automaton passes a mark without a character and
from then on carries the guard along, as a state of the guard's own automaton, until that decides:

    ((?!ab).)*      at "a", with the guard in the state after "a"     ─b▶  the guard is broken: this way is dead
                                                                      ─c▶  it holds whatever comes: forgotten
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import Limits
from ..language import Chars, Language
from .character_automata import DEAD, UNIVERSAL, Alphabet, CharacterNfa, Fuel, Side, reduced, step_fuel, too_many_states

_FIRST_MARK = 0x110000


@dataclass(frozen=True, slots=True)
class Guard:
    """Asserts that the rest of the text is of the language, or, negative, is not.

    No calls, intersections, differences.
    """

    language: Language
    negative: bool


def mark(guard: int) -> Language:
    """Returns the place of a guard, by its number. `algebra` knows no marks: put nodes around them as they are."""
    return Chars(((_FIRST_MARK + guard, _FIRST_MARK + guard),))


def guarded_automaton(language: Language, guards: list[Guard], limits: Limits) -> Language:
    """Returns the Dfa of an expression with marks, trimmed and minimal, or NOTHING.

    Raises:
        LimitExceeded: the automaton, or the way to it, is larger than the limits.
    """
    fuel = step_fuel(limits)
    nfa = CharacterNfa(language, limits.dfa_states, fuel)
    inner = [CharacterNfa(guard.language, limits.dfa_states, fuel) for guard in guards]
    alphabet = Alphabet(ranges for each in (nfa, *inner) for ranges in each.labels if not _is_mark(ranges))
    sides = [Side(each, alphabet, fuel) for each in inner]
    exploration = _GuardedProduct(nfa, guards, sides, alphabet, limits, fuel)
    exploration.explore()
    return reduced(exploration.accepting, exploration.rows, alphabet, limits)


def _is_mark(ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first >= _FIRST_MARK for first, _ in ranges)


# What is carried along: (guard, state of its side). A text is accepted when all that is carried holds at its end.
Carried = frozenset[tuple[int, int]]
# States of the expression, as bits, by what is carried to them.
Places = dict[Carried, int]


class _GuardedProduct:
    """Explores states, which are sets of places, by steps from the start; state 0 starts."""

    def __init__(
        self,
        nfa: CharacterNfa,
        guards: list[Guard],
        sides: list[Side],
        alphabet: Alphabet,
        limits: Limits,
        fuel: Fuel,
    ) -> None:
        self._nfa = nfa
        self._guards = guards
        self._sides = sides
        self._classes = [() if _is_mark(ranges) else alphabet.of(ranges) for ranges in nfa.labels]
        self._most_states = limits.dfa_states
        self._fuel = fuel
        marks = {label for label, ranges in enumerate(nfa.labels) if _is_mark(ranges)}
        self._marked = sum(
            1 << state for state, edges in enumerate(nfa.edges) if any(label in marks for label, _ in edges)
        )
        self._numbers: dict[frozenset[tuple[Carried, int]], int] = {}
        self.accepting: list[bool] = []
        self.rows: list[dict[int, int]] = []  # [states]: class → next state; absent where nothing is accepted

    def explore(self) -> None:
        pending: list[Places] = []
        self._number({frozenset(): self._nfa.closure(self._nfa.start)}, pending)
        for at, places in enumerate(pending):
            for each, following in self._after(places).items():
                if following:
                    self.rows[at][each] = self._number(following, pending)

    def _number(self, places: Places, pending: list[Places]) -> int:
        self._pass_marks(places)
        self._fuel.spend(1 + len(places) ** 2 // 4)  # what _pass_marks compares
        key = frozenset(places.items())
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.rows)
            if number >= self._most_states:
                raise too_many_states(self._most_states)
            pending.append(places)
            self.rows.append({})
            self.accepting.append(any(map(self._accepts, places.items())))
        return number

    def _accepts(self, place: tuple[Carried, int]) -> bool:
        carried, states = place
        held = all(self._sides[guard].accepting[state] != self._guards[guard].negative for guard, state in carried)
        return held and bool(states >> self._nfa.end & 1)

    def _pass_marks(self, places: Places) -> None:
        """Adds the places after marks; of two with the same state, the one that carries more is left out."""
        pending = list(places.items())
        while pending:
            carried, states = pending.pop()
            for state in _bits(states & self._marked):
                for label, target in self._nfa.edges[state]:
                    first = self._nfa.labels[label][0][0]
                    after = self._carried([(first - _FIRST_MARK, None)], carried) if first >= _FIRST_MARK else None
                    if after is None:
                        continue
                    closure = self._nfa.closure(target)
                    new = closure & ~places.get(after, 0)
                    self._fuel.spend(1 + len(places))
                    if new:
                        places[after] = places.get(after, 0) | new
                        pending.append((after, new))
        for carried in sorted(places, key=len):
            for more in [each for each in places if carried < each]:
                places[more] &= ~places[carried]
        for carried in [each for each, states in places.items() if not states]:
            del places[carried]

    def _carried(self, added: Iterable[tuple[int, int | None]], kept: Iterable[tuple[int, int]]) -> Carried | None:
        """Returns the guards that are still open of all these; None when one of the guards is broken for good."""
        open_guards = []
        for guard, state in (*added, *kept):
            state = self._sides[guard].start if state is None else state
            negative = self._guards[guard].negative
            if state == (UNIVERSAL if negative else DEAD):
                return None
            if state != (DEAD if negative else UNIVERSAL):
                open_guards.append((guard, state))
        return frozenset(open_guards)

    def _after(self, places: Places) -> dict[int, Places]:
        """Class → the places after a character of it."""
        found: dict[int, Places] = {}
        for carried, states in places.items():
            moved: dict[int, int] = {}
            for state in _bits(states):
                for label, target in self._nfa.edges[state]:
                    closure = self._nfa.closure(target)
                    self._fuel.spend(1 + len(self._classes[label]))
                    for each in self._classes[label]:
                        moved[each] = moved.get(each, 0) | closure
            for each, targets in moved.items():
                self._fuel.spend(1 + 4 * len(carried))
                after = self._carried((), [(guard, self._sides[guard].row(state)[each]) for guard, state in carried])
                if after is not None:
                    into = found.setdefault(each, {})
                    into[after] = into.get(after, 0) | targets
        return found


def _bits(states: int) -> Iterable[int]:
    while states:
        lowest = states & -states
        states ^= lowest
        yield lowest.bit_length() - 1
