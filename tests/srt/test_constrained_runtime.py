"""Constraints through the whole runtime, on the oracle model: every text satisfies what was asked of it."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

import jsonschema
import pytest
import torch
from umbel.fsm.engines.llguidance_tokens import MatcherLimits
from umbel.lang.errors import ConstraintError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Chunk, Completion, ConstraintSpec, Final, FinishReason, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend

from .random_schemas import Schema, random_schema, text_of
from .toy_constraint import encode

SCHEMAS = [random_schema(random.Random(seed)) for seed in range(64)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the oracle's rows are small


def request(label: str, spec: ConstraintSpec, prompt: str = "Answer: ", **sampling: object) -> GenRequest:
    return GenRequest(label, (Text(prompt),), SamplingParams(**sampling), constraint=spec)  # type: ignore[arg-type]


def schema_spec(schema: Schema) -> ConstraintSpec:
    return ConstraintSpec("json_schema", text_of(schema))


async def ask(backend: LocalBackend, asked: GenRequest) -> Final | ConstraintError:
    try:
        async for event in backend.generate(asked):
            if isinstance(event, Final):
                return event
    except ConstraintError as error:
        return error
    raise AssertionError("a stream without an end")


def answers(
    requests: Sequence[GenRequest], look: Callable[[dict[str, object]], None] | None = None, **options: object
) -> list[Final | ConstraintError]:
    """All requests together, on one backend. `look` is given its facts at the end."""

    async def run() -> list[Final | ConstraintError]:
        backend = LocalBackend(seed=1, **{"debug": {"check_every_step": False}, **options})  # type: ignore[arg-type]
        try:
            finals = await asyncio.gather(*(ask(backend, asked) for asked in requests))
            if look is not None:
                look(dict((await backend.control("info")).result))
            return finals
        finally:
            await backend.close()

    return asyncio.run(run())


def only(final: Final | ConstraintError) -> Completion:
    assert isinstance(final, Final), final
    (completion,) = final.completions
    return completion


def validates(schema: Schema, text: str) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 8), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.nightly
def test_every_text_of_random_schemas_validates(seeds: range) -> None:
    asked = [
        (schema, request(f"{index}-{seed}", schema_spec(schema), max_tokens=160, seed=seed, temperature=1.0))
        for index, schema in enumerate(SCHEMAS)
        for seed in seeds
    ]
    reasons: Counter[FinishReason] = Counter()
    for (schema, _), final in zip(asked, answers([one for _, one in asked], max_running=256), strict=True):
        completion = only(final)
        validates(schema, completion.text)
        assert completion.guarantee == "enforced"
        reasons[completion.finish_reason] += 1
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH_CLOSED}


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.nightly), 1.0])
def test_jumps_change_nothing(temperature: float) -> None:
    asked = [
        request(str(index), schema_spec(schema), max_tokens=120, seed=index, temperature=temperature)
        for index, schema in enumerate(SCHEMAS)
    ]
    steps: list[object] = []
    seen = []
    for jump_forward in (True, False):
        finals = answers(asked, lambda facts: steps.append(facts["steps"]), jump_forward=jump_forward)
        seen.append([(c.text, c.token_ids, c.finish_reason, c.forced_tokens) for c in map(only, finals)])
    assert seen[0] == seen[1]


@pytest.mark.nightly
def test_every_budget_from_the_least_on_gives_a_whole_text() -> None:
    for index, schema in enumerate(SCHEMAS[:24]):
        (refused,) = answers([request("a", schema_spec(schema), max_tokens=0, seed=1)])
        if isinstance(refused, Final):
            assert only(refused).finish_reason is FinishReason.STOP
            continue
        found = re.search(r"write max_tokens=(\d+) or more", str(refused))
        assert found is not None, refused
        least = int(found[1])
        asked = [
            request(f"{most}", schema_spec(schema), max_tokens=most, seed=index, temperature=1.0)
            for most in range(least - 1, least + 9)
        ]
        short, *whole = answers(asked)
        # One token less may be too few, or enough for a longer text: what is not certain is tried.
        assert isinstance(short, ConstraintError) or bool(only(short).guarantee) == (
            only(short).finish_reason is not FinishReason.LENGTH
        )
        for one, final in zip(asked[1:], whole, strict=True):
            completion = only(final)
            validates(schema, completion.text)
            assert len(completion.token_ids) <= one.sampling.max_tokens


# Ambiguous in a way that no determinisation escapes: every state of its automaton is new.
HOSTILE = ConstraintSpec("regex", "(0|1)*1(0|1){60}(00|11)+")


def test_a_hostile_constraint_leaves_the_steps_of_others_alone() -> None:
    schema = ConstraintSpec("json_schema", text_of(SCHEMAS[0]))
    others = [request(f"{i}", schema, max_tokens=100, seed=i, temperature=1.0) for i in range(4)]
    alone = [only(final).text for final in answers(others)]
    hostile = [request(f"h{i}", HOSTILE, max_tokens=400, seed=i, temperature=1.0) for i in range(2)]
    finals = answers([*hostile, *others])
    assert [only(final).text for final in finals[2:]] == alone
    for final in finals[:2]:
        assert isinstance(final, ConstraintError) or re.fullmatch("(0|1)*1(0|1){60}(00|11)+", only(final).text)


def test_continuations_of_one_prompt_are_constrained_each() -> None:
    spec = ConstraintSpec("regex", r"[a-z]{3,9}( and [a-z]{3,9})?")
    (final,) = answers([request("n", spec, max_tokens=30, n=5, seed=3, temperature=1.0)])
    assert isinstance(final, Final)
    texts = [completion.text for completion in final.completions]
    assert all(re.fullmatch(spec.source, text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("jump_forward", [True, False])
def test_a_stream_has_all_of_the_text_in_order(jump_forward: bool) -> None:
    async def run() -> tuple[str, Final, list[int]]:
        backend = LocalBackend(jump_forward=jump_forward)
        asked = GenRequest(
            "s",
            (Text("Answer: "),),
            SamplingParams(max_tokens=150, seed=2, logprobs=True),
            True,
            constraint=schema_spec(SCHEMAS[3]),
        )
        said, described, final = "", [], None
        async for event in backend.generate(asked):
            if isinstance(event, Chunk):
                said += event.text
                described += [entry.token_id for entry in event.logprobs]
            else:
                final = event
        await backend.close()
        assert final is not None
        return said, final, described

    said, final, described = asyncio.run(run())
    completion = only(final)
    assert said == completion.text
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    assert described == list(completion.token_ids)[: len(described)]
    validates(SCHEMAS[3], said)


def test_equal_constraints_are_compiled_and_opened_once() -> None:
    facts: dict[str, object] = {}
    spec = schema_spec(SCHEMAS[5])
    answers([request(f"{i}", spec, max_tokens=200, seed=i) for i in range(24)], facts.update)
    assert facts["gateway_constraint_compiles"] == 1
    assert facts["gateway_constraint_cache_hits"] == 23
    assert (facts["constraints_opened"], facts["constraint_hits"]) == (1, 23)


@pytest.mark.parametrize("engine", ["fsm", "llguidance", "interegular", "outlines-core"])
def test_every_engine_enforces_a_regex(engine: str) -> None:
    spec = ConstraintSpec("regex", "[a-z]{2,5}-[0-9]{2}", engine=engine)  # type: ignore[arg-type]
    for final in answers([request(f"{i}", spec, max_tokens=12, seed=i, temperature=1.0) for i in range(4)]):
        assert re.fullmatch(spec.source, only(final).text)


@pytest.mark.parametrize("jump_forward", [True, False])
def test_a_grammar_is_enforced(jump_forward: bool) -> None:
    spec = ConstraintSpec("lark", 'start: "a" nested\nnested: "(" nested ")" | "x"')
    for final in answers(
        [request(f"{i}", spec, max_tokens=20, seed=i, temperature=1.0) for i in range(4)], jump_forward=jump_forward
    ):
        text = only(final).text
        depth = text.count("(")
        assert text == "a" + "(" * depth + "x" + ")" * depth


def test_a_grammar_beyond_llguidances_limits_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MatcherLimits(row_items=60)
    monkeypatch.setattr("umbel.fsm.engines.llguidance_tokens.MatcherLimits", lambda: limits)
    ambiguous = ConstraintSpec("lark", 'start: s "!"\ns: s s | "a" | "b" | s "c" s')
    others = [request(f"{i}", schema_spec(SCHEMAS[0]), max_tokens=100, seed=i, temperature=1.0) for i in range(4)]
    alone = [only(final).text for final in answers(others)]
    facts: dict[str, object] = {}
    endless = request("g", ambiguous, max_tokens=400, seed=1, temperature=1.0, logit_bias={ord("!"): -100.0})
    greedy, *finals = answers([endless, *others], facts.update)
    assert isinstance(greedy, ConstraintError)
    assert "llguidance" in str(greedy)
    assert [only(final).text for final in finals] == alone
    assert (facts["failed_steps"], facts["pool_rebuilds"]) == (0, 0)


def test_what_is_not_enforced_is_reported() -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99}, "uniqueItems": True, "maxItems": 3}
    strict = ConstraintSpec("json_schema", text_of(schema))
    (refused,) = answers([request("a", strict)])
    assert isinstance(refused, ConstraintError)
    assert "uniqueItems" in str(refused)
    lenient = ConstraintSpec("json_schema", text_of(schema), allow_unenforced=True)
    completion = only(answers([request("a", lenient, max_tokens=40, seed=1)])[0])
    assert completion.unenforced == (("uniqueItems", "#/uniqueItems"),)
    validates({**schema, "uniqueItems": False}, completion.text)


LISTING = '''start: step+ answer
step: "Step " /[0-9]+/ ": " /[^\\n]+/ "\\n"
answer: "Answer: " /[^\\n]+/ "\\n"'''
FUNCTION = '''start: "def " name "(" args? "):" body
name: /[a-z]+/
args: name ("," name)*
body: " " name ("+" name)*  "\\n"'''


@pytest.mark.sampled(4)
@pytest.mark.parametrize("budget", [1, 2, 16, 24, 32, 48])
@pytest.mark.parametrize(
    ("grammar", "whole"),
    [(LISTING, r"(Step \d+: [^\n]+\n)+Answer: [^\n]+\n"), (FUNCTION, r"def [a-z]+\([a-z,]*\): [a-z+]+\n")],
)
def test_a_grammar_is_tried_with_any_budget_and_ends_truthfully(grammar: str, whole: str, budget: int) -> None:
    """That a short end was not found refuses nothing."""
    spec = ConstraintSpec("lark", grammar)
    for final in answers([request(f"{i}", spec, max_tokens=budget, seed=i, temperature=1.0) for i in range(3)]):
        completion = only(final)
        if completion.finish_reason is FinishReason.LENGTH:
            assert not completion.guarantee
        else:
            assert completion.guarantee == "enforced"
            assert re.fullmatch(whole, completion.text)


def test_a_grammar_with_an_end_in_sight_is_closed_in_time() -> None:
    spec = ConstraintSpec("lark", FUNCTION)
    for final in answers([request(f"{i}", spec, max_tokens=40, seed=i, temperature=1.0) for i in range(4)]):
        assert only(final).guarantee == "enforced"


def test_a_longer_text_of_fewer_tokens_is_not_refused_for_the_shortest() -> None:
    """The oracle's tokens are bytes and a few words: ` the` is one token, `abc` three."""
    spec = ConstraintSpec("regex", "abc| the")
    (final,) = answers([request("a", spec, max_tokens=1, temperature=0.0)])
    completion = only(final)
    assert completion.guarantee == ("enforced" if completion.text == " the" else "")


WORD = {"pattern": "^[a-z]{2,3}$"}
MEMBERS = {"type": "object", "propertyNames": WORD, "additionalProperties": {"type": "integer"}}
NAMED = {"type": "object", "properties": {"n": {"type": "string", **WORD}}, "required": ["n"]}
LISTED = {"type": "array", "items": {**NAMED, "additionalProperties": False}}


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize(("schema", "invented"), [(MEMBERS, '"aa": 0}'), (LISTED, '{"n": "aa"}]')])
@pytest.mark.sampled(4)
def test_a_text_closes_before_a_comma_and_not_behind_it(schema: Schema, invented: str, jump_forward: bool) -> None:
    """What the shortest end would write behind a comma is nobody's member."""
    spec, comma = schema_spec(schema), {ord(","): 30.0, ord("}"): 12.0, ord('"'): 20.0, ord("]"): -30.0}
    asked = [
        request(f"{budget}-{seed}", spec, max_tokens=budget, seed=seed, temperature=1.0, logit_bias=comma)
        for budget in range(16, 72, 4)
        for seed in range(3)
    ]
    closed = 0
    for final in answers(asked, jump_forward=jump_forward):
        completion = only(final)
        validates(schema, completion.text)
        if completion.finish_reason is FinishReason.LENGTH_CLOSED:
            closed += 1
            assert not completion.text.endswith(f", {invented}"), completion.text
    assert closed


@pytest.mark.parametrize("ending", [" the", "\n", ".", ",", ")"])
@pytest.mark.parametrize("regex", [r"[0-9]+", r"(0|-?[1-9][0-9]{0,18})[ \n]?"])
def test_a_token_that_cannot_go_on_with_a_complete_text_ends_it(regex: str, ending: str) -> None:
    """After `24` the model wants a word: the number is over, and does not run on to its last digit."""
    (token,) = encode(ending)
    digits = {ord(digit): 40.0 for digit in "24"}
    spec = ConstraintSpec("regex", regex)
    (final,) = answers([request("a", spec, max_tokens=30, temperature=0.0, logit_bias={token: 60.0, **digits})])
    completion = only(final)
    assert completion.text.rstrip("\n") in ("2", "4")  # the second expression takes the line feed
    assert completion.finish_reason is FinishReason.STOP
    assert completion.guarantee == "enforced"


def test_such_a_token_ends_nothing_where_its_first_character_may_come() -> None:
    (final,) = answers(
        [
            request(
                "a", ConstraintSpec("regex", "[ b]{6,9}"), max_tokens=30, temperature=0.0, logit_bias={ord(" "): 50.0}
            )
        ]
    )
    assert only(final).text == " " * 9


def test_what_is_read_more_narrowly_travels_with_the_text() -> None:
    pair = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    closed = schema_spec({**pair, "additionalProperties": False})
    (final,) = answers([request("a", closed, max_tokens=40)])
    assert only(final).narrowed == (("properties", "#/properties", "members come in the order of the schema"),)
    (plain,) = answers([request("a", schema_spec({"type": "boolean"}), max_tokens=40)])
    assert only(plain).narrowed == ()
