"""The native automaton beside its reference in fsm/automaton: the same states with the same numbers, step by step."""

import gc
import json
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import Automaton
from umbel.fsm.automaton.nodes import Remaining
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import LimitExceeded, Limits
from umbel.fsm.language import AnyOrder, Call, Chars, Concat, Grammar, Literal, Repeat, Spelled, Union
from umbel.fsm.schema import SchemaOptions, compile_schema
from umbel.srt.kernels.cpu.automaton import AutomatonCalls, CpuAutomaton
from umbel.srt.kernels.cpu.library import load_host_library

from ...fsm.languages import ANY, LANGUAGES, any_orders, dfas, recursive_grammars

BYTES = b'ab01c"{}[](),: \\\n\xc3\xa9\xf0\x9f\x98\x80'
STRINGS = st.builds(
    lambda least, more, after: Concat((Spelled(Repeat(Chars(ANY), least, least + more)), after)),
    st.integers(0, 30),
    st.integers(0, 60),
    st.sampled_from([Literal(b'"'), Literal(b'a"'), Repeat(Chars(ANY), 0, 7)]),
)
NULLABLE_DFAS = st.tuples(dfas(), dfas()).map(lambda pair: Repeat(Spelled(Repeat(Concat(pair), 0, 3)), 0, 40))
GRAMMARS = st.one_of(
    LANGUAGES.map(Grammar),
    any_orders().map(lambda order: resolve(Grammar(order), Limits())),
    recursive_grammars(),
    STRINGS.map(Grammar),
    NULLABLE_DFAS.map(Grammar),
)
OF_SIGHT = ("step", "step", "step", "expand", "plain", "lookahead")  # what lookahead states are for: they may never end
OPERATIONS = (*OF_SIGHT, "run", "forced", "close", "length")


@pytest.fixture(scope="module")
def calls() -> AutomatonCalls:
    return AutomatonCalls(load_host_library())


def tried(automaton: Automaton | CpuAutomaton, operation: str, state: int, choice: int) -> Any:
    """What an operation returns, or why it was refused."""
    try:
        match operation:
            case "step":
                return automaton.step(state, BYTES[choice % len(BYTES)] if choice % 4 else choice % 256)
            case "run":
                return automaton.run(state, automaton.close(state)[: choice % 9] + b"a" * (choice & 1))
            case "expand":
                automaton.expand(state)
                return automaton.row(state).tolist()
            case "forced":
                return automaton.forced(state)
            case "close":
                return automaton.close(state)
            case "length":
                return automaton.close_length(state)
            case "plain":
                return automaton.plain_run(state), automaton.plain_limit(state)
            case _:
                return automaton.lookahead(state, (3, 20)[choice & 1])
    except LimitExceeded as error:
        return str(error)


def compare(calls: AutomatonCalls, grammar: Grammar, limits: Limits, seed: int, operations: int) -> None:
    """Does the same to both, at states that were reached before."""
    reference, native = Automaton(grammar, limits), CpuAutomaton(calls, grammar, limits)
    drawn = random.Random(seed)
    states: list[tuple[int, tuple[str, ...]]] = [(reference.start, OPERATIONS)]
    for _ in range(operations):
        state, known = drawn.choice(states)
        operation, choice = drawn.choice(known), drawn.randrange(1 << 16)
        expected = tried(reference, operation, state, choice)
        assert tried(native, operation, state, choice) == expected, (operation, state, choice)
        assert (native.start, native.states, native.half_full) == (
            reference.start,
            reference.states,
            reference.half_full,
        )
        assert isinstance(expected, str) or native.steps == reference.steps
        if operation in ("step", "run", "lookahead") and isinstance(expected, int) and expected >= 0:
            states.append((expected, OF_SIGHT if operation == "lookahead" else known))
        elif operation == "expand" and isinstance(expected, list):
            states += [(following, known) for following in sorted({*expected} - {-1})[:6]]
    for state in range(reference.states):
        assert native.accepting(state) == reference.accepting(state)
        assert native.expanded(state) == reference.expanded(state)
        assert native.row(state).tolist() == reference.row(state).tolist()


@settings(max_examples=300, deadline=None)
@given(grammar=GRAMMARS, seed=st.integers(0, 1 << 32))
def test_it_makes_the_states_of_the_reference(calls: AutomatonCalls, grammar: Grammar, seed: int) -> None:
    compare(calls, grammar, Limits(), seed, 60)


@settings(max_examples=100, deadline=None)
@given(
    grammar=GRAMMARS,
    seed=st.integers(0, 1 << 32),
    limits=st.builds(
        Limits,
        states=st.integers(1, 60),
        ambiguity=st.integers(1, 6),
        depth=st.integers(3, 5),
        forced_bytes=st.integers(1, 9),
    ),
)
def test_it_ends_at_the_limits_of_the_reference(
    calls: AutomatonCalls, grammar: Grammar, seed: int, limits: Limits
) -> None:
    refusals = [refusal(Automaton, grammar, limits), refusal(partial(CpuAutomaton, calls), grammar, limits)]
    assert refusals[0] == refusals[1]
    if refusals[0] is None:
        compare(calls, grammar, limits, seed, 30)


def refusal(make: Callable[[Grammar, Limits], object], grammar: Grammar, limits: Limits) -> tuple[str, str] | None:
    try:
        make(grammar, limits)
    except LimitExceeded as error:
        return str(error), error.keyword
    return None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 80},
        "kind": {"enum": ["red", "green", "grey", 7, None]},
        "when": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]+$"},
        "size": {"type": "number", "minimum": -3, "maximum": 1000},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "inner": {"$ref": "#"},
    },
    "required": ["name", "kind"],
    "additionalProperties": {"type": "boolean"},
}


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("seed", range(8))
def test_it_makes_the_states_of_a_schema(calls: AutomatonCalls, order: str, seed: int) -> None:
    compiled = compile_schema(json.dumps(SCHEMA), SchemaOptions(key_order=order))  # type: ignore[arg-type]
    compare(calls, resolve(compiled.grammar, Limits()), Limits(), seed, 400)


def test_counts_that_are_far_apart_are_united(calls: AutomatonCalls) -> None:
    """Nested repeats without separators: a text can be read in thousands of ways, which differ in counts alone."""
    letter = Chars(((97, 98),))
    inner = Concat((Repeat(letter, 0, 50), Literal(b"a")))
    grammar = Grammar(Repeat(Concat((inner, Repeat(letter, 1, 9))), 0, 60))
    for seed in range(5):
        compare(calls, grammar, Limits(), seed, 80)


def test_ambiguous_recursion_shares_its_calls(calls: AutomatonCalls) -> None:
    body = Union((Literal(b"a"), Concat((Literal(b"("), Call("r"), Repeat(Call("r"), 0, 4), Literal(b")")))))
    for seed in range(5):
        compare(calls, Grammar(Call("r"), {"r": body}), Limits(depth=9), seed, 200)


def test_an_error_of_python_ends_the_call_and_not_the_automaton(
    calls: AutomatonCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = AnyOrder((Literal(b"a"), Literal(b"b"), Literal(b"c")), Literal(b","))
    grammar = resolve(Grammar(order), Limits())
    reference, native = Automaton(grammar), CpuAutomaton(calls, grammar, Limits())
    unfolded = Remaining._unfolded

    def failing(self: Remaining) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Remaining, "_unfolded", failing)
    with pytest.raises(KeyboardInterrupt):
        native.run(native.start, b"a,b")
    monkeypatch.setattr(Remaining, "_unfolded", unfolded)
    state, same = native.run(native.start, b"b,a,"), reference.run(reference.start, b"b,a,")
    assert native.close(state) == reference.close(same) == b"c"


def test_it_goes_when_the_last_one_lets_go_of_it(calls: AutomatonCalls) -> None:
    freed: list[int] = []
    free = calls.free
    calls.free = lambda handle: freed.append(handle) or free(handle)  # type: ignore[func-returns-value]
    try:
        gc.disable()  # nothing keeps itself alive
        made = CpuAutomaton(calls, Grammar(Repeat(Literal(b"ab"))), Limits())
        handle, seen = made.handle, weakref.ref(made)
        assert made.run(made.start, b"abab") >= 0
        del made
        assert seen() is None
        assert freed == [handle]
    finally:
        gc.enable()
        calls.free = free


def test_its_memory_grows_with_its_states(calls: AutomatonCalls) -> None:
    native = CpuAutomaton(calls, Grammar(Repeat(Chars(((97, 122),)), 0, 9_000)), Limits())
    before = native.nbytes
    state = native.start
    for _ in range(8_000):
        state = native.step(state, 97)
    assert native.states >= 8_000
    assert 8_000 * 1_024 < native.nbytes - before < 8_000 * 4_096
    assert native.row(state).tolist()[97] == -2, "not asked for yet"
