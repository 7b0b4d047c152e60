"""Answers that may call tools: which texts are admitted, and that every generated call is one of the tools'."""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import Automaton
from umbel.fsm.language import Grammar
from umbel.interpreter.reasoning import ReasoningTags, split_reasoning
from umbel.interpreter.tool_reader import ReadAnswer, read_answer
from umbel.lang.prompt import Text
from umbel.lang.protocol import Completion, ConstraintSpec, Final, FinishReason, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.lang.tool_calls import FENCED, FORMATS, HERMES, LLAMA_3, MISTRAL, CallFormat, Tool, ToolCall, ToolChoice
from umbel.lang.tool_constraint import Thinking, tools_constraint
from umbel.srt.constraints.compiler import Compiled, Refused, compile_constraint
from umbel.srt.in_process import LocalBackend

from ..random_schemas import random_schema

OPEN, CLOSE = "<think>", "</think>"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPEN_WEATHER = {**WEATHER, "additionalProperties": True}
TOOLS = [Tool("get_weather", "", {**WEATHER, "additionalProperties": False}), Tool("get", "", OPEN_WEATHER)]
ROME = ToolCall("get_weather", '{"city": "Rome"}')
CHOICES = [ToolChoice(), ToolChoice("required"), ToolChoice("none"), ToolChoice.only("get")]
THINKING = [None, Thinking(OPEN, CLOSE), Thinking(OPEN, CLOSE, begun=True)]


def opened(spec: ConstraintSpec) -> Automaton:
    compiled = compile_constraint(spec, "auto")
    assert isinstance(compiled, Compiled), compiled
    return Automaton(msgspec.msgpack.decode(compiled.constraint.data, type=Grammar))


def admits(automaton: Automaton, text: str) -> bool:
    state = automaton.run(automaton.start, text.encode())
    return state >= 0 and automaton.accepting(state)


def read(call_format: CallFormat, tools: Sequence[Tool], thinking: Thinking | None, text: str) -> ReadAnswer:
    """Reads as a server does: reasoning first, then calls."""
    if thinking is not None:
        tail = thinking.open if thinking.begun else ""
        text = split_reasoning(ReasoningTags(thinking.open, thinking.close), tail, text, opened=True).answer
    return read_answer(call_format, [tool.name for tool in tools], text)


def check(answer: ReadAnswer, tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Fails unless the calls are those of tools, with valid arguments, and as many as the choice asks for."""
    schemas = {tool.name: tool.parameters for tool in choice.among(tools)}
    for call in answer.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name], format_checker=jsonschema.FormatChecker())
    assert not answer.cut
    assert (choice.mode == "required") <= bool(answer.calls) <= (choice.mode != "none")
    assert choice.parallel or len(answer.calls) <= 1
    if choice.mode == "required":
        assert answer.content == ""


@pytest.mark.parametrize("call_format", [HERMES, FENCED, MISTRAL], ids=lambda each: each.name)
def test_auto_admits_text_and_text_with_calls(call_format: CallFormat) -> None:
    automaton = opened(tools_constraint(TOOLS, ToolChoice(), call_format))
    calls = call_format.spell([ROME, ToolCall("get", '{"city": "", "more": [1]}')])
    for text in ("", "Hello < `` [TOOL\n\n", "Let me see.\n\n" + calls, calls, calls + "\n"):
        assert admits(automaton, text), text
    for text in (
        call_format.mark,
        "x" + call_format.mark + "y",
        calls + "x",
        calls[:-1],
        calls.replace('"get"', '"got"'),
    ):
        assert not admits(automaton, text), text
    single = opened(tools_constraint(TOOLS, ToolChoice(parallel=False), call_format))
    assert admits(single, call_format.spell([ROME]))
    assert not admits(single, calls)


def test_a_format_without_a_mark_admits_a_call_as_the_whole_answer() -> None:
    automaton = opened(tools_constraint(TOOLS, ToolChoice(), LLAMA_3))
    call = LLAMA_3.spell([ROME])
    header = LLAMA_3.header("get_weather")
    for text in (call, "\n\n" + call, "Hm: " + call, '{"name": "Rome"}', header[:-1]):
        assert admits(automaton, text), text
    for text in (header, "\n" + header + "1", call + " ", LLAMA_3.spell([ToolCall("get_weather", "{}")])):
        assert not admits(automaton, text), text


def test_reasoning_may_come_first_and_hold_anything_but_its_end() -> None:
    thoughts = f"I need {HERMES.mark} and <think>.{CLOSE}\n\n"
    call = HERMES.spell([ROME])
    begun = opened(tools_constraint(TOOLS, ToolChoice("required"), HERMES, thinking=THINKING[2]))
    assert admits(begun, thoughts + call)
    assert not admits(begun, call)
    optional = opened(tools_constraint(TOOLS, ToolChoice(), HERMES, thinking=THINKING[1]))
    for text in (OPEN + thoughts + call, "\n" + OPEN + thoughts, call, "No." + call, OPEN + thoughts[:9], "no <think>"):
        assert admits(optional, text), text
    assert not admits(optional, "so: " + OPEN + thoughts)  # text, in which the mark begins a call


def test_a_schema_of_the_answer_takes_the_place_of_free_text() -> None:
    spec = tools_constraint(TOOLS, ToolChoice(), HERMES, answer={"enum": [1, "a"]}, thinking=THINKING[2])
    automaton = opened(spec)
    for text in ("1", '"a"', HERMES.spell([ROME])):
        assert admits(automaton, f"hm{CLOSE}\n{text}"), text
    for text in ("2", "", "1" + HERMES.spell([ROME])):
        assert not admits(automaton, f"hm{CLOSE}\n{text}"), text


def test_an_answer_with_a_schema_needs_no_tool() -> None:
    spec = tools_constraint([], ToolChoice("none"), HERMES, answer={"enum": [1, "a"]}, thinking=THINKING[2])
    automaton = opened(spec)
    for text in ("1", '"a"'):
        assert admits(automaton, f"hm{CLOSE}\n{text}"), text
    for text in ("2", "", HERMES.spell([ROME])):
        assert not admits(automaton, f"hm{CLOSE}\n{text}"), text
    assert not admits(automaton, "hm")


def test_arguments_that_are_not_declared_do_not_come_unless_the_schema_says_so() -> None:
    tools = [Tool("shut", "", WEATHER), Tool("none"), Tool("any", "", {"type": "object"}), *TOOLS]
    spec = tools_constraint(tools, ToolChoice("required"), HERMES)
    compiled = compile_constraint(spec, "auto")
    assert isinstance(compiled, Compiled)
    assert ("additionalProperties", "shut#/properties") in [entry[:2] for entry in compiled.narrowed]
    for name, admitted in (("shut", False), ("none", False), ("any", True), ("get", True), ("get_weather", False)):
        assert admits(opened(spec), HERMES.spell([ToolCall(name, '{"city": "Rome", "mood": 1}')])) == admitted


def test_rules_of_one_name_in_several_schemas_are_kept_apart() -> None:
    def tree(leaf: str) -> dict[str, Any]:
        node = {"type": "array", "items": {"anyOf": [{"type": leaf}, {"$ref": "#/$defs/node"}]}}
        return {"type": "object", "properties": {"node": {"$ref": "#/$defs/node"}, "any": {}}, "$defs": {"node": node}}

    tools = [Tool("a", "", tree("null")), Tool("b", "", tree("boolean"))]
    automaton = opened(tools_constraint(tools, ToolChoice("required"), HERMES))
    for name, leaf, other in (("a", "null", "true"), ("b", "true", "null")):
        for value, admitted in ((leaf, True), (other, False)):
            arguments = f'{{"node": [[{value}], {value}], "any": [1, {{"x": null}}]}}'
            assert admits(automaton, HERMES.spell([ToolCall(name, arguments)])) == admitted


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            tools_constraint([Tool("f", "", {"properties": {"x": {"$ref": "#/nowhere"}}})], ToolChoice(), HERMES),
            "f: .*nowh",
        ),
        (tools_constraint([Tool("f", "", {"uniqueItems": True, "not": {}})], ToolChoice(), HERMES), "tools: f: "),
        (ConstraintSpec("tools", '{"format": "hermes", "tools": [{"name": "f", "schema": {}}]}'), '"type": "object"'),
        (
            ConstraintSpec("tools", tools_constraint(TOOLS, ToolChoice(), HERMES).source, engine="llguidance"),
            "leave it out",
        ),
        (ConstraintSpec("tools", "[]"), "tools: Expected"),
    ],
)
def test_what_is_wrong_is_refused_with_the_tool(spec: ConstraintSpec, words: str) -> None:
    compiled = compile_constraint(spec, "auto")
    assert isinstance(compiled, Refused)
    with pytest.raises(Exception, match=words):
        raise compiled.error()


def test_demands_that_are_not_enforced_are_named_by_tool() -> None:
    unique = {"properties": {"x": {"type": "array", "uniqueItems": True}}, "required": ["x"]}
    tools = [Tool("f", "", unique), TOOLS[0]]
    assert isinstance(compile_constraint(tools_constraint(tools, ToolChoice(), HERMES), "auto"), Refused)
    compiled = compile_constraint(tools_constraint(tools, ToolChoice(), HERMES, allow_unenforced=True), "auto")
    assert isinstance(compiled, Compiled)
    assert compiled.unenforced == (("uniqueItems", "f#/properties/x/uniqueItems"),)


def walked(automaton: Automaton, dice: random.Random, scripts: Sequence[bytes], longest: int) -> str:
    """Writes scripts and single bytes at random, as far as they are admitted, and then a shortest end."""
    state, text = automaton.start, b""
    while len(text) < longest and not (automaton.accepting(state) and dice.random() < 0.05):
        automaton.expand(state)
        script = dice.choice(scripts)[: dice.choice((99, 99, 3))]
        following = automaton.run(state, script)
        if following < 0:
            live = [byte for byte in range(256) if automaton.step(state, byte) >= 0]
            if not live:
                break
            script = bytes([dice.choice(live)])
            following = automaton.run(state, script)
        state, text = following, text + script
    return (text + automaton.close(state)).decode()


@settings(max_examples=20)
@given(st.integers(0, 1 << 32))
def test_every_admitted_text_reads_as_calls_of_the_tools(seed: int) -> None:
    dice = random.Random(seed)
    tools = [*TOOLS, Tool("random", "", {"type": "object", "properties": {"x": random_schema(dice, 2)}})]
    call_format, choice = dice.choice(list(FORMATS.values())), dice.choice(CHOICES)
    thinking = dice.choice(THINKING)
    automaton = opened(tools_constraint(tools, choice, call_format, thinking=thinking))
    header = (call_format.open + call_format.header("get")).encode()
    scripts = [header, b"\n", call_format.mark.encode(), OPEN.encode(), CLOSE.encode(), b"{}", b'"', "é".encode(), b" "]
    for _ in range(3):
        text = walked(automaton, dice, scripts, 200)
        check(read(call_format, tools, thinking, text), tools, choice)


def answers(requests: Sequence[GenRequest]) -> list[Completion]:
    """All requests together, on one backend with the oracle model."""

    async def ask(backend: LocalBackend, asked: GenRequest) -> Completion:
        async for event in backend.generate(asked):
            if isinstance(event, Final):
                return event.completions[0]
        raise AssertionError("a stream without an end")

    async def run() -> list[Completion]:
        backend = LocalBackend(seed=1, max_running=64, debug={"check_every_step": False})
        try:
            return list(await asyncio.gather(*(ask(backend, asked) for asked in requests)))
        finally:
            await backend.close()

    return asyncio.run(run())


def request(label: str, spec: ConstraintSpec | None, **sampling: Any) -> GenRequest:  # Any: SamplingParams takes them
    return GenRequest(label, (Text("Say: "),), SamplingParams(**sampling), constraint=spec)


def test_every_generated_call_is_one_of_the_tools() -> None:
    cases = []
    for seed in range(12):
        dice = random.Random(seed)
        tools = [
            *TOOLS,
            Tool("r", "", {"type": "object", "properties": {"x": random_schema(dice, 2)}, "required": ["x"]}),
        ]
        choice = dice.choice([ToolChoice("required"), ToolChoice.only("r"), ToolChoice("required", parallel=False)])
        cases.append((tools, choice, dice.choice(list(FORMATS.values())), dice.choice(THINKING)))
    asked = [
        request(
            str(seed),
            tools_constraint(tools, choice, call_format, thinking=thinking),
            max_tokens=160,
            seed=seed,
            temperature=1.0,
        )
        for seed, (tools, choice, call_format, thinking) in enumerate(cases)
    ]
    calls = 0
    for (tools, choice, call_format, thinking), completion in zip(cases, answers(asked), strict=True):
        assert completion.guarantee == "enforced", completion
        answer = read(call_format, tools, thinking, completion.text)
        check(answer, tools, choice)
        calls += len(answer.calls)
    assert calls >= len(cases)


@pytest.mark.parametrize("call_format", FORMATS.values(), ids=lambda each: each.name)
@pytest.mark.sampled(4)
def test_an_answer_without_a_call_is_the_one_without_tools(call_format: CallFormat) -> None:
    """To the last token: also where little is left of max_tokens."""
    auto = tools_constraint(TOOLS, ToolChoice(), call_format)
    asked = [
        request(f"{most} {heat} {spec is None}", spec, max_tokens=most, temperature=heat, seed=1)
        for most in (1, 17, 60)
        for heat in (0.0, 0.3)
        for spec in (None, auto)
    ]
    found = answers(asked)
    for free, constrained in zip(found[::2], found[1::2], strict=True):
        assert (constrained.text, constrained.token_ids) == (free.text, free.token_ids)
        assert (constrained.finish_reason, constrained.forced_tokens) == (FinishReason.LENGTH, 0)
