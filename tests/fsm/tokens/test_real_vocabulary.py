"""The vocabulary of the default model: 262,144 tokens, user-defined ones, bytes, and duplicates among them."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.engines.selection import Engines, own_grammar
from umbel.fsm.engines.source import Source
from umbel.fsm.errors import ConstraintRefused, Limits
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.vocabulary import Vocabulary, unpack

pytestmark = pytest.mark.model

DATA = Path(__file__).resolve().parents[4] / "shared" / "constrained"
CONTROL = (0, 1, 2, 3, 105, 106)  # pad, eos, bos, unk, and the ends of a turn
OBJECT = {"type": "object", "properties": {"html": {"type": "string"}, "n": {"type": "integer"}}, "required": ["html"]}
FUEL = 1 << 40


@pytest.fixture(scope="module")
def encode() -> Callable[[str], list[int]]:
    from umbel.srt.weights import open_model

    tokenizer = open_model().tokenizer()
    return lambda text: tokenizer.encode(text, first=False)


@pytest.fixture(scope="module")
def engines(encode: Callable[[str], list[int]]) -> Engines:
    from umbel.srt.weights import open_model

    source = open_model()
    return Engines(Masks(Vocabulary(list(source.vocabulary()), source.eos_ids)), encode=encode)


@pytest.mark.nightly
def test_the_canonical_tokens_of_a_text_are_allowed(engines: Engines, encode: Callable[[str], list[int]]) -> None:
    constraint = engines.open(Source("json_schema", json.dumps(OBJECT)))
    text = '{"html": "<h1>Füße 漢字 😀</h1>\\n<b>x</b>", "n": 12}'
    state = constraint.begin()
    for token in encode(text):
        assert state.prepare(FUEL) is not None
        assert state.mask[token >> 5] >> np.uint32(token & 31) & 1
        assert not any(state.mask[control >> 5] >> np.uint32(control & 31) & 1 for control in CONTROL)
        state.advance(token)
    assert state.finished


def test_a_third_of_the_tokens_of_an_object_are_forced(engines: Engines, encode: Callable[[str], list[int]]) -> None:
    names = ["title", "summary", "rating", "published"]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    state = engines.open(Source("json_schema", json.dumps({**schema, "additionalProperties": False}))).begin()
    text = '{"title": "Emma", "summary": "A novel of manners", "rating": "five stars", "published": "1815"}'
    forced = tokens = 0
    for token in encode(text):
        plan = state.forced_tokens()
        assert not plan or plan[0] == token
        forced, tokens = forced + bool(plan), tokens + 1
        state.advance(token)
    assert 3 * forced >= tokens


def test_both_engines_allow_the_same_tokens_on_the_way(engines: Engines) -> None:
    """Except where llguidance knows the canonical token and allows no other, and for its own spelling of strings."""
    source = Source("regex", r"(Paris|London|New York), [0-9]{1,3} (km|miles)\.")
    ours, theirs = engines.open(source, "fsm"), engines.open(source, "llguidance")
    choose = random.Random(1)
    for _ in range(3):
        one, other = ours.begin(), theirs.begin()
        while not one.finished:
            assert one.prepare(FUEL) is not None
            assert other.prepare(FUEL) is not None
            mine, yours = unpack(one.mask).tolist(), unpack(other.mask).tolist()
            assert mine == yours or len(yours) == 1 or len(mine) == 1
            assert set(mine) & set(yours)
            token = choose.choice(sorted(set(mine) & set(yours)))
            one.advance(token)
            other.advance(token)
        assert other.finished


@pytest.mark.skipif(not DATA.is_dir(), reason="the collection of schemas is not beside the repository")
def test_masks_of_real_schemas_hold_the_canonical_tokens(engines: Engines, encode: Callable[[str], list[int]]) -> None:
    """Every 25th schema. A token of a valid text is in the mask wherever the automaton takes it, unless it is forced;
    what the automaton takes is compared with jsonschema in tests/fsm/schema."""
    rows = [json.loads(line) for line in (DATA / "schemas.jsonl").read_text(encoding="utf-8").splitlines()[::25]]
    masks = 0
    for row in rows:
        try:
            grammar = own_grammar(Source("json_schema", json.dumps(row["schema"])), Limits())
        except ConstraintRefused:
            continue
        constraint, automaton = engines.open_grammar(grammar), Automaton(grammar)
        for value in row["valid"]:
            text = json.dumps(value, ensure_ascii=False)
            if automaton.run(automaton.start, text.encode()) == DEAD:
                continue
            state = constraint.begin()
            for token in encode(text):
                assert state.prepare(FUEL) is not None
                assert state.mask[token >> 5] >> np.uint32(token & 31) & 1 or state.forced_tokens()
                state.advance(token)
                masks += 1
            assert state.accepting
    assert masks > 1_000
