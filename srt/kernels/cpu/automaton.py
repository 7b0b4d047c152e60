"""Steps through a constraint's lazy automaton in C++. The reference is fsm/automaton; the states are the same.

Python lowers the grammar, and answers what C++ asks: a node when a text first comes to it, what follows in an object
whose keys come in any order, the characters of a state of a character automaton. All else is done without Python.
"""

import ctypes
import itertools
from array import array
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from ....fsm.automaton.automaton import ROW_BYTES
from ....fsm.automaton.characters import Character, CharacterStates, StatePlace
from ....fsm.automaton.lowering import lower
from ....fsm.automaton.nodes import Leaf, Loop, Nested, Node, Opened, Options, Remaining, Sequence, Unfolding
from ....fsm.automaton.places import END, LiteralTrie, Place, Text
from ....fsm.errors import Limits, too_ambiguous, too_many_states
from ....fsm.language import Grammar

_NODE, _BODY, _SHORTEST_PARTS, _CHARACTERS, _PLAIN = range(5)  # enum Question
_LEAF, _SEQUENCE, _OPTIONS, _LOOP, _NESTED, _OPENED, _REMAINING = range(1, 8)  # enum NodeKind
_AMBIGUITY, _STATES, _PYTHON, _MEMORY = -3, -4, -5, -6  # enum Failure
_ASK = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)

_numbers = itertools.count()
_automata: WeakValueDictionary[int, "CpuAutomaton"] = WeakValueDictionary()  # those that C++ may ask


def _answer(number: int, question: int, identity: int, depth: int) -> int:
    return _automata[number]._answer(question, identity, depth)


_ask = _ASK(_answer)


class _View(ctypes.Structure):
    """struct View."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("states", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
    )


class AutomatonCalls:
    """The functions of source/automaton.cpp. They keep Python's GIL: most take less than a switch of threads.

    Args:
        library: `load_library()` or `load_host_library()`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def call(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            return ctypes.PYFUNCTYPE(result, *arguments)((f"umbel_automaton{name}", library))

        pointer, long, i32, i64 = ctypes.c_void_p, ctypes.c_long, ctypes.c_int32, ctypes.c_int64
        self.make = call("", pointer, i64, i64, i64, i64, _ASK, i64)
        self.free = call("_free", None, pointer)
        self.view = call("_view", pointer, pointer)
        self.node = call("_node", None, pointer, i32, i32, pointer, long, long)
        self.parts = call("_parts", None, pointer, pointer, long)
        self.text = call("_text", i32, pointer, ctypes.c_char_p, long)
        self.trie = call("_trie", i32, pointer, ctypes.c_char_p, pointer, long)
        self.character = call("_character", i32, pointer, pointer, long, i32, i64, i64)
        self.never = call("_never", i32, pointer, i64, i64)
        self.states = call("_states", i32, pointer, pointer, ctypes.c_char_p, long, i32)
        self.state = call("_state", i32, pointer, i32, i32)
        self.begun_state = call("_begun_state", i32, pointer, i32, i32, i64)
        self.characters = call("_characters", None, pointer, pointer, long)
        self.start = call("_start", i64, pointer, i32)
        self.step = call("_step", i64, pointer, i32, i32)
        self.run = call("_run", i64, pointer, i32, ctypes.c_char_p, long)
        self.accepting = call("_accepting", i64, pointer, i32)
        self.expanded = call("_expanded", i64, pointer, i32)
        self.expand = call("_expand", i64, pointer, i32)
        self.forced = call("_forced", i64, pointer, i32, pointer)
        self.close = call("_close", i64, pointer, i32, pointer)
        self.close_length = call("_close_length", i64, pointer, i32)
        self.plain_run = call("_plain_run", i64, pointer, i32)
        self.plain_limit = call("_plain_limit", i64, pointer, i32)
        self.lookahead = call("_lookahead", i64, pointer, i32, i64)


class CpuAutomaton:
    """Implements `fsm.automaton.automaton.LazyAutomaton`. Not for several threads at once.

    Args, Raises: as `fsm.automaton.automaton.Automaton`.
    """

    def __init__(self, calls: AutomatonCalls, grammar: Grammar, limits: Limits) -> None:
        lowered = lower(grammar, limits)
        self._calls = calls
        self._limits = limits
        self._lowered = lowered
        self._nodes: list[Node] = []
        self._node_numbers: dict[Node, int] = {}
        self._place_numbers: dict[Place, int] = {END: 0}
        self._character_states: list[CharacterStates] = []
        self._owners: dict[CharacterStates, int] = {}  # numbers of them, from 1
        self._error: BaseException | None = None
        number = next(_numbers)
        _automata[number] = self
        self.handle: int = calls.make(limits.states, limits.depth, limits.ambiguity, limits.forced_bytes, _ask, number)
        finalize(self, calls.free, self.handle)
        self._view = _View.from_address(calls.view(self.handle))
        self._text = ctypes.c_void_p()  # where a text lies that was asked for
        self._text_address = ctypes.addressof(self._text)
        self.start = self.checked(calls.start(self.handle, self._number(lowered.root)))

    @property
    def half_full(self) -> bool:
        return 2 * self.states > self._limits.states

    @property
    def states(self) -> int:
        return int(self._view.states)

    @property
    def steps(self) -> int:
        return int(self._view.steps)

    @property
    def nbytes(self) -> int:
        return int(self._view.nbytes) + self._lowered.nbytes

    def step(self, state: int, byte: int) -> int:
        following: int = self._calls.step(self.handle, state, byte)
        return following if following >= -2 else self.checked(following)

    def run(self, state: int, data: bytes) -> int:
        following: int = self._calls.run(self.handle, state, data, len(data))
        return following if following >= -2 else self.checked(following)

    def accepting(self, state: int) -> bool:
        return bool(self._calls.accepting(self.handle, state))

    def expanded(self, state: int) -> bool:
        return bool(self._calls.expanded(self.handle, state))

    def expand(self, state: int) -> None:
        self.checked(self._calls.expand(self.handle, state))

    def row(self, state: int) -> NDArray[np.int32]:
        return np.frombuffer(ctypes.string_at(self._view.table + ROW_BYTES * state, ROW_BYTES), np.int32)

    def forced(self, state: int) -> bytes:
        return self._written(self._calls.forced, state)

    def close(self, state: int) -> bytes:
        return self._written(self._calls.close, state)

    def close_length(self, state: int) -> int:
        return self.checked(self._calls.close_length(self.handle, state))

    def plain_run(self, state: int) -> int:
        return self.checked(self._calls.plain_run(self.handle, state))

    def plain_limit(self, state: int) -> int:
        return self.checked(self._calls.plain_limit(self.handle, state))

    def lookahead(self, state: int, reach: int) -> int:
        return self.checked(self._calls.lookahead(self.handle, state, reach))

    def _written(self, call: Callable[..., int], state: int) -> bytes:
        length = self.checked(call(self.handle, state, self._text_address))
        return ctypes.string_at(self._text.value, length) if length else b""  # type: ignore[arg-type]

    def checked(self, found: int) -> int:
        """Returns what a call has found, or raises why it has failed."""
        if found >= -2:
            return found
        if found == _AMBIGUITY:
            raise too_ambiguous(self._limits.ambiguity)
        if found == _STATES:
            raise too_many_states(self._limits.states)
        if found == _MEMORY:
            raise MemoryError("no memory for another state of a constraint's automaton")
        assert found == _PYTHON, "there are four failures"
        assert self._error is not None, "a failed answer keeps its error"
        error, self._error = self._error, None
        raise error

    # ---------------------------------------------------------------------------------------- what C++ asks

    def _answer(self, question: int, identity: int, depth: int) -> int:
        """An error ends the call that asks, and is raised after it, never through C++."""
        try:
            if question == _NODE:
                self._describe(self._nodes[identity], identity)
            elif question == _BODY:
                node = self._nodes[identity]
                assert isinstance(node, Unfolding), "the bodies of other nodes are known with them"
                return self._number(node.body())
            elif question == _SHORTEST_PARTS:
                node = self._nodes[identity]
                assert isinstance(node, Remaining), "of other nodes C++ knows the shortest text"
                parts = array("q", map(self._number, node.shortest_parts(depth)))
                self._calls.parts(self.handle, parts.buffer_info()[0], len(parts))
            elif question == _CHARACTERS:
                edges = self._character_states[identity - 1].dfa.edges[depth]
                triples = [(*codes, after) for ranges, after in edges for codes in ranges]
                numbers = array("i", itertools.chain.from_iterable(triples))
                self._calls.characters(self.handle, numbers.buffer_info()[0], len(triples))
            else:
                return self._character_states[identity - 1].plain_runs[depth]
        except BaseException as error:
            self._error = error
            return -1
        return 0

    def _number(self, node: Node) -> int:
        number = self._node_numbers.get(node)
        if number is None:
            number = self._node_numbers[node] = len(self._nodes)
            self._nodes.append(node)
        return number

    def _describe(self, node: Node, number: int) -> None:
        numbers = self._numbers_of(node)
        levels = array("q", node.levels)
        levels.extend(numbers[1:])
        self._calls.node(self.handle, number, numbers[0], levels.buffer_info()[0], len(node.levels), len(levels))

    def _numbers_of(self, node: Node) -> list[int]:
        """The kind of a node, and what belongs to it."""
        match node:
            case Leaf():
                return [_LEAF, self._place(node.place)]
            case Sequence():
                return [_SEQUENCE, *map(self._number, node.parts)]
            case Options():
                return [_OPTIONS, *map(self._number, node.options)]
            case Loop():
                return [_LOOP, self._number(node.body), node.least, node.most]
            case Nested():
                return [_NESTED, self._number(node.body())]
            case Opened():
                return [_OPENED]
            case Remaining():
                return [_REMAINING]
            case _:
                raise AssertionError(f"no node: {node!r}")

    def _place(self, place: Place) -> int:
        number = self._place_numbers.get(place)
        if number is None:
            number = self._place_numbers[place] = self._made(place)
        return number

    def _made(self, place: Place) -> int:
        calls, handle = self._calls, self.handle
        number: int
        match place:
            case Text():
                number = calls.text(handle, place.data, len(place.data))
            case LiteralTrie():
                options = array("q")
                for data, rest, after in place.options:
                    options.extend((len(data), -1 if rest is None else self._number(rest), after))
                spelled = b"".join([data for data, _, _ in place.options])
                number = calls.trie(handle, spelled, options.buffer_info()[0], len(place.options))
            case Character():
                ranges = array("i", itertools.chain.from_iterable(place.ranges))
                number = calls.character(
                    *(handle, ranges.buffer_info()[0], len(place.ranges), place.spelled, place.shortest, place.plain)
                )
            case StatePlace():
                owner = self._owner(place.states)
                if place is place.states.place(place.state):
                    number = calls.state(handle, owner, place.state)
                else:
                    number = calls.begun_state(handle, owner, place.state, place.shortest)
            case _:
                assert not place.edges, "what has edges is one of the others"
                number = calls.never(handle, place.shortest, place.plain)
        return number

    def _owner(self, states: CharacterStates) -> int:
        owner = self._owners.get(states)
        if owner is None:
            dfa, shortest = states.dfa, array("q", states.shortest)
            flags = bytes([ends + 2 * (not edges) for ends, edges in zip(dfa.accepting, dfa.edges, strict=True)])
            owner = self._calls.states(self.handle, shortest.buffer_info()[0], flags, len(flags), states.spelled)
            self._owners[states] = owner
            self._character_states.append(states)
        return owner
