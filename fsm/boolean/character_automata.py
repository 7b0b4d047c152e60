"""Intersections and differences as deterministic automata over characters, trimmed and minimal.

An expression becomes a nondeterministic automaton first (Thompson's construction, 1968), with counted repeats written
out. States are numbers; sets of states are the bits of an integer, so that union and comparison are one operation
however many states there are.

Every side is determinised as far as the product asks (subset construction over classes of characters that no side
tells apart), and the product stops where no text can be accepted any more. What costs too much ends early: the
number of product states and the transitions that subsets follow are limited.

A deterministic automaton under construction is `accepting` [states] and `rows` [states]: symbol → next state; state 0
starts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable

from ..errors import LimitExceeded, Limits
from ..language import (
    NOTHING,
    SCALARS,
    Chars,
    CharSet,
    Concat,
    Dfa,
    Difference,
    Intersection,
    Language,
    Literal,
    Ranges,
    Repeat,
    Spelled,
    Union,
    common_ranges,
    normal_ranges,
)


class Fuel:
    """Counts work, so that what would take too long ends at the same place on every machine.

    `spend` raises LimitExceeded when more was spent than there was; `why` is its text, `keyword` what it names.
    """

    def __init__(self, steps: int, why: str, keyword: str) -> None:
        self.left = steps
        self.why = why
        self.keyword = keyword

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise LimitExceeded(self.why, keyword=self.keyword)


_ESCAPED = CharSet.of(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
_RAW = ~_ESCAPED


class CharacterNfa:
    """The automaton of an expression without calls, intersections and differences.

    Raises:
        LimitExceeded: more than `most_states`, or no fuel is left.
    """

    start = 0
    end = 1

    def __init__(self, language: Language, most_states: int, fuel: Fuel) -> None:
        self.most_states = most_states
        self.labels: list[Ranges] = []  # the sets of characters on edges
        self._label_of: dict[int, int] = {}  # id of ranges → label; copies of a repeat share the object
        self._fuel = fuel
        self.empty_edges: list[list[int]] = [[], []]  # [states]: states reached without a character
        self.edges: list[list[tuple[int, int]]] = [[], []]  # [states]: (label, next state)
        self._closures: list[int | None] = []
        self._build(language)
        self._closures = [None] * len(self.edges)

    def _state(self) -> int:
        if len(self.edges) >= self.most_states:
            why = f"an intersection, a difference or a lookahead, written out, has more than {self.most_states} states"
            raise LimitExceeded(f"{why}; write smaller bounds", keyword="intersection")
        self.edges.append([])
        self.empty_edges.append([])
        return len(self.edges) - 1

    def _edge(self, source: int, ranges: Ranges, target: int) -> None:
        label = self._label_of.get(id(ranges))
        if label is None:
            label = self._label_of[id(ranges)] = len(self.labels)
            self.labels.append(ranges)
        self.edges[source].append((label, target))

    def _build(self, language: Language) -> None:
        """Puts each part between two states in turn; a list of what is to be put takes the place of recursion."""
        pending: list[tuple[Language, int, int, bool]] = [(language, self.start, self.end, False)]
        while pending:
            node, source, target, spelled = pending.pop()
            match node:
                case Literal(data):
                    self._chain(data.decode(), source, target, spelled)
                case Chars(ranges):
                    self._characters(ranges, source, target, spelled)
                case Concat(parts):
                    pending += [(part, *ends, spelled) for part, ends in self._links(parts, source, target)]
                case Union(options):
                    pending += [(option, source, target, spelled) for option in options]
                case Repeat():
                    pending += [(node.body, *ends, spelled) for ends in self._rounds(node, source, target)]
                case Dfa():
                    self._automaton(node, source, target, spelled)
                case Spelled(body):
                    assert not spelled, "a spelling of a spelling"
                    pending.append((body, source, target, True))
                case _:
                    raise AssertionError(f"{type(node).__name__} in an expression over characters")

    def _links(self, parts: tuple[Language, ...], source: int, target: int) -> list[tuple[Language, tuple[int, int]]]:
        if not parts:
            self.empty_edges[source].append(target)
            return []
        joints = [source, *(self._state() for _ in parts[1:]), target]
        return [(part, (joints[at], joints[at + 1])) for at, part in enumerate(parts)]

    def _rounds(self, node: Repeat, source: int, target: int) -> list[tuple[int, int]]:
        """source ─body─▶ ... least times ... ─▶ ─body─▶ ... up to most, each with a way out; without most a loop."""
        rounds = []
        at = source
        for _ in range(node.least):
            following = self._state()
            rounds.append((at, following))
            at = following
        if node.most is None:
            loop = self._state()
            self.empty_edges[at].append(loop)
            rounds.append((loop, loop))
            at = loop
        else:
            for _ in range(node.most - node.least):
                self.empty_edges[at].append(target)
                following = self._state()
                rounds.append((at, following))
                at = following
        self.empty_edges[at].append(target)
        return rounds

    def _chain(self, text: str, source: int, target: int, spelled: bool) -> None:
        if spelled:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        for character in text:
            following = self._state()
            self._edge(source, ((ord(character), ord(character)),), following)
            source = following
        self.empty_edges[source].append(target)

    def _characters(self, ranges: Ranges, source: int, target: int, spelled: bool) -> None:
        if not spelled:
            self._edge(source, ranges, target)
            return
        if raw := common_ranges(ranges, _RAW.ranges):
            self._edge(source, raw, target)
        for first, last in common_ranges(ranges, _ESCAPED.ranges):
            for code in range(first, last + 1):
                self._chain(chr(code), source, target, True)

    def _automaton(self, node: Dfa, source: int, target: int, spelled: bool) -> None:
        states = [self._state() for _ in node.accepting]
        self.empty_edges[source].append(states[0])
        for state, accepting, edges in zip(states, node.accepting, node.edges, strict=True):
            if accepting:
                self.empty_edges[state].append(target)
            for ranges, following in edges:
                self._characters(ranges, state, states[following], spelled)

    def closure(self, state: int) -> int:
        """Returns the states that are reached without a character and have an edge or are the end."""
        known = self._closures[state]
        if known is not None:
            return known
        seen, pending = {state}, [state]
        bits = bytearray(len(self.edges) // 8 + 1)
        while pending:
            at = pending.pop()
            if self.edges[at] or at == self.end:
                bits[at >> 3] |= 1 << (at & 7)
            for following in self.empty_edges[at]:
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
        self._fuel.spend(len(seen))
        found = self._closures[state] = int.from_bytes(bits, "little")
        return found

    def universal(self) -> int:
        """Returns the states from which every text is accepted, found where a loop over any character may end."""
        found = 0
        for state, edges in enumerate(self.edges):
            for label, following in edges:
                if (
                    self.labels[label] == SCALARS
                    and self.closure(following) >> state & 1
                    and self.closure(state) >> self.end & 1
                ):
                    found |= 1 << state
        return found


_STEPS_PER_STATE = 60  # of determinisation, on average; a million steps are about half a second
_RANGES_PER_STATE = 20  # of characters, on average; \\w alone has 734
_TOO_MANY_STEPS = (
    "an intersection, a difference or a lookahead takes too many steps; "
    "write smaller bounds, or alternatives that begin differently"
)
_TOO_MANY_RANGES = (
    "an intersection, a difference or a lookahead has too many ranges of characters; "
    "write [A-Za-z0-9_] for \\w, [0-9] for \\d, or smaller bounds"
)

# A formula says how sides combine: a side by its number, or ("and" | "but not", formula, formula).
Formula = int | tuple[str, "Formula", "Formula"]
DEAD = 0  # of a side: no text is accepted from here
UNIVERSAL = 1  # of a side: every text is


class Alphabet:
    """Classes of characters: two of a class are in the same ones of the given sets.

    sets         [a-z] [a-f0-9]
    classes      a-f │ g-z │ 0-9 │ (everything else is in no class)
    """

    def __init__(self, sets: Iterable[Ranges]) -> None:
        distinct = list(dict.fromkeys(sets))
        changes: dict[int, int] = {}  # code point → the sets that begin or end there, as bits
        for index, ranges in enumerate(distinct):
            for first, last in ranges:
                changes[first] = changes.get(first, 0) ^ 1 << index
                changes[last + 1] = changes.get(last + 1, 0) ^ 1 << index
        members: dict[int, list[tuple[int, int]]] = {}
        signature, begin = 0, 0
        for code in sorted(changes):
            if signature:
                members.setdefault(signature, []).append((begin, code - 1))
            signature ^= changes[code]
            begin = code
        self.classes = [tuple(ranges) for ranges in members.values()]  # [classes]: their characters
        self._of_set = {
            ranges: [number for number, signature in enumerate(members) if signature >> index & 1]
            for index, ranges in enumerate(distinct)
        }

    def of(self, ranges: Ranges) -> list[int]:
        """Returns the classes that make up one of the sets."""
        return self._of_set[ranges]

    def __len__(self) -> int:
        return len(self.classes)


class Side:
    """One expression, determinised on demand. State 0 is DEAD, 1 is UNIVERSAL, 2 is the start unless it is either."""

    def __init__(self, nfa: CharacterNfa, alphabet: Alphabet, fuel: Fuel) -> None:
        self._nfa = nfa
        self._classes = [alphabet.of(ranges) for ranges in nfa.labels]  # [labels]: their classes
        self._class_count = len(alphabet)
        self._fuel = fuel
        self._universal = nfa.universal()
        self._weight = 1 + len(nfa.edges) // 1024  # of an operation on a set of states, against one on a word
        self._moves: dict[int, list[tuple[int, int]]] = {}  # of a state of the nfa: (class, states after it)
        self._subsets = [0, 0]
        self._numbers: dict[int, int] = {0: DEAD}
        self._rows: list[list[int] | None] = [[DEAD] * len(alphabet), [UNIVERSAL] * len(alphabet)]
        self.accepting = [False, True]
        self.start = self._number(nfa.closure(nfa.start))

    def _number(self, subset: int) -> int:
        if subset & self._universal:
            return UNIVERSAL
        number = self._numbers.get(subset)
        if number is None:
            number = self._numbers[subset] = len(self._subsets)
            self._subsets.append(subset)
            self._rows.append(None)
            self.accepting.append(bool(subset >> self._nfa.end & 1))
        return number

    def row(self, number: int) -> list[int]:
        """[classes]: the state after a character of each class."""
        known = self._rows[number]
        if known is not None:
            return known
        after = [0] * self._class_count
        subset = self._subsets[number]
        while subset:
            lowest = subset & -subset
            subset ^= lowest
            moves = self._moves_of(lowest.bit_length() - 1)
            self._fuel.spend((1 + len(moves)) * self._weight)
            for each, states in moves:
                after[each] |= states
        row = self._rows[number] = [self._number(states) for states in after]
        return row

    def _moves_of(self, state: int) -> list[tuple[int, int]]:
        moves = self._moves.get(state)
        if moves is None:
            moves = [
                (each, self._nfa.closure(following))
                for label, following in self._nfa.edges[state]
                for each in self._classes[label]
            ]
            self._moves[state] = moves
        return moves


def determinised(language: Language, limits: Limits) -> Language:
    """Builds the trimmed and minimal Dfa of an expression of Intersection and Difference, or NOTHING.

    Raises:
        LimitExceeded: the automaton, or the way to it, is larger than the limits.
    """
    sides: list[Language] = []
    formula = _formula(language, sides)
    fuel = step_fuel(limits)
    automata = [CharacterNfa(side, limits.dfa_states, fuel) for side in sides]
    alphabet = Alphabet(ranges for nfa in automata for ranges in nfa.labels)
    product = _Product(formula, [Side(nfa, alphabet, fuel) for nfa in automata], len(alphabet), limits.dfa_states)
    product.explore()
    return reduced(product.accepting, product.rows, alphabet, limits)


def step_fuel(limits: Limits) -> Fuel:
    """Returns the steps that one automaton may spend on being determinised."""
    return Fuel(limits.dfa_states * _STEPS_PER_STATE, _TOO_MANY_STEPS, "intersection")


def too_many_states(most: int) -> LimitExceeded:
    why = f"an intersection, a difference or a lookahead has more than {most} states; write smaller bounds"
    return LimitExceeded(why, keyword="intersection")


def reduced(accepting: list[bool], rows: Rows, alphabet: Alphabet, limits: Limits) -> Language:
    """Returns the trimmed and minimal Dfa of rows over classes, or NOTHING.

    Raises:
        LimitExceeded: its edges have too many ranges of characters.
    """
    kept = trimmed(accepting, rows)
    if kept is None:
        return NOTHING
    accepting, rows = minimal(*kept)
    return Dfa(tuple(accepting), tuple(map(_Edges(alphabet, limits).of, rows)))


def _formula(language: Language, sides: list[Language]) -> Formula:
    match language:
        case Intersection(left, right):
            return ("and", _formula(left, sides), _formula(right, sides))
        case Difference(left, right):
            return ("but not", _formula(left, sides), _formula(right, sides))
        case _:
            sides.append(language)
            return len(sides) - 1


class _Edges:
    """Rows of classes as edges of characters; states with the same classes share the ranges."""

    def __init__(self, alphabet: Alphabet, limits: Limits) -> None:
        self._alphabet = alphabet
        self._fuel = Fuel(limits.dfa_states * _RANGES_PER_STATE, _TOO_MANY_RANGES, "intersection")
        self._known: dict[tuple[int, ...], Ranges] = {}

    def of(self, row: dict[int, int]) -> tuple[tuple[Ranges, int], ...]:
        by_target: dict[int, list[int]] = {}
        for each, target in sorted(row.items()):
            by_target.setdefault(target, []).append(each)
        return tuple(sorted((self._ranges(tuple(classes)), target) for target, classes in by_target.items()))

    def _ranges(self, classes: tuple[int, ...]) -> Ranges:
        known = self._known.get(classes)
        if known is None:
            known = normal_ranges(range_ for each in classes for range_ in self._alphabet.classes[each])
            self._known[classes] = known
        self._fuel.spend(len(known))
        return known


class _Product:
    """The states of all sides together, as far as something can still be accepted; state 0 starts."""

    def __init__(self, formula: Formula, sides: list[Side], classes: int, most_states: int) -> None:
        self._formula = formula
        self._sides = sides
        self._classes = classes
        self._most_states = most_states
        self._numbers: dict[tuple[int, ...], int] = {}
        self.accepting: list[bool] = []
        self.rows: list[dict[int, int]] = []  # [states]: class → next state; absent where nothing is accepted

    def explore(self) -> None:
        start = tuple(side.start for side in self._sides)
        pending = [start]
        self._add(start)
        for at in pending:
            row = self.rows[self._numbers[at]]
            rows = [side.row(state) for side, state in zip(self._sides, at, strict=True)]
            for each, following in enumerate(zip(*rows, strict=True)):
                number = self._numbers.get(following)
                if number is None:
                    if not self._alive(self._formula, following):
                        continue
                    number = self._add(following)
                    pending.append(following)
                row[each] = number

    def _add(self, states: tuple[int, ...]) -> int:
        if len(self.rows) >= self._most_states:
            raise too_many_states(self._most_states)
        self._numbers[states] = len(self.rows)
        self.rows.append({})
        self.accepting.append(self._accepts(self._formula, states))
        return len(self.rows) - 1

    def _accepts(self, formula: Formula, states: tuple[int, ...]) -> bool:
        if isinstance(formula, int):
            return self._sides[formula].accepting[states[formula]]
        operator, left, right = formula
        return self._accepts(left, states) and self._accepts(right, states) == (operator == "and")

    def _alive(self, formula: Formula, states: tuple[int, ...]) -> bool:
        """Tells whether something may still be accepted, as far as the sides alone tell."""
        if isinstance(formula, int):
            return states[formula] != DEAD
        operator, left, right = formula
        if not self._alive(left, states):
            return False
        return self._alive(right, states) if operator == "and" else not self._accepts_all(right, states)

    def _accepts_all(self, formula: Formula, states: tuple[int, ...]) -> bool:
        if isinstance(formula, int):
            return states[formula] == UNIVERSAL
        operator, left, right = formula
        if not self._accepts_all(left, states):
            return False
        return self._accepts_all(right, states) if operator == "and" else not self._alive(right, states)


Rows = list[dict[int, int]]


def trimmed(accepting: list[bool], rows: Rows) -> tuple[list[bool], Rows] | None:
    """Keeps the states that reach an accepting one, all reached from the start; None when the start is not one."""
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in row.values():
            sources[target].append(state)
    live = [False] * len(rows)
    pending = [state for state, accepts in enumerate(accepting) if accepts]
    for state in pending:
        live[state] = True
    while pending:
        for source in sources[pending.pop()]:
            if not live[source]:
                live[source] = True
                pending.append(source)
    if not live[0]:
        return None
    numbers = {state: number for number, state in enumerate(state for state in range(len(rows)) if live[state])}
    kept = [{symbol: numbers[target] for symbol, target in rows[state].items() if live[target]} for state in numbers]
    return [accepting[state] for state in numbers], kept


def minimal(accepting: list[bool], rows: Rows) -> tuple[list[bool], Rows]:
    """Returns the one automaton with the fewest states (Hopcroft, 1971, for partial transition functions).

    A block of states that has not told others apart yet waits; of two halves of a block that has, the smaller waits.
    """
    sources: list[dict[int, list[int]]] = [{} for _ in rows]  # [states]: symbol → states that lead here
    for state, row in enumerate(rows):
        for symbol, target in row.items():
            sources[target].setdefault(symbol, []).append(state)
    halves = [{state for state, accepts in enumerate(accepting) if accepts is wanted} for wanted in (False, True)]
    blocks = [half for half in halves if half]
    block_of = [0] * len(rows)
    for number, block in enumerate(blocks):
        for state in block:
            block_of[state] = number
    waiting = deque(range(len(blocks)))
    is_waiting = [True] * len(blocks)
    while waiting:
        splitter = waiting.popleft()
        is_waiting[splitter] = False
        leading: dict[int, list[int]] = {}
        for state in blocks[splitter]:
            for symbol, states in sources[state].items():
                leading.setdefault(symbol, []).extend(states)
        for states in leading.values():
            touched: dict[int, set[int]] = {}
            for state in states:
                touched.setdefault(block_of[state], set()).add(state)
            for number, part in touched.items():
                if len(part) == len(blocks[number]):
                    continue
                blocks[number] -= part
                blocks.append(part)
                for state in part:
                    block_of[state] = len(blocks) - 1
                is_waiting.append(False)
                new = number if not is_waiting[number] and len(blocks[number]) <= len(part) else len(blocks) - 1
                waiting.append(new)
                is_waiting[new] = True
    order: dict[int, int] = {}  # block → number, the start's first
    for state in range(len(rows)):
        order.setdefault(block_of[state], len(order))
    firsts = {number: min(blocks[block]) for block, number in order.items()}
    merged = [{symbol: order[block_of[to]] for symbol, to in rows[firsts[number]].items()} for number in firsts]
    return [accepting[firsts[number]] for number in firsts], merged
