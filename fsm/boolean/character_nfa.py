"""An expression as a nondeterministic automaton over characters (Thompson's construction, 1968).

Counted repeats are written out. States are numbers; sets of states are the bits of an integer, so that union and
comparison are one operation however many states there are.
"""

import json

from ..charset import SCALARS, CharSet, common
from ..errors import LimitExceeded
from ..language import Chars, Concat, Dfa, Language, Literal, Ranges, Repeat, Spelled, Union


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
        if raw := common(ranges, _RAW.ranges):
            self._edge(source, raw, target)
        for first, last in common(ranges, _ESCAPED.ranges):
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
