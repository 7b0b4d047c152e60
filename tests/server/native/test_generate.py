"""`/generate` on the oracle."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from umbel.lang.protocol import Chunk
from umbel.server.access import Access
from umbel.server.limits import HttpLimits
from umbel.server.native.fields import SamplingFields
from umbel.server.native.generate import GENERATE_NOT_OFFERED, SNAPSHOT, _Shown

from ..client import Answered, AsgiClient, served

GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
BODY = {"text": "hello world", "sampling_params": GREEDY}
PATH = "/generate"


def run(scenario: Callable[[AsgiClient], Awaitable[None]], **front: Any) -> None:
    async def whole() -> None:
        async with served(**front) as client:
            await asyncio.wait_for(scenario(client), 60)  # type: ignore[arg-type]

    asyncio.run(whole())


def ask(body: dict[str, Any]) -> Answered:
    found: list[Answered] = []

    async def scenario(client: AsgiClient) -> None:
        found.append(await client.post(PATH, body))

    run(scenario)
    return found[0]


def without_times(answers: Any) -> list[dict[str, Any]]:
    """Answers as a list, without what differs between two equal requests."""
    found = json.loads(json.dumps(answers if isinstance(answers, list) else [answers]))
    for each in found:
        for name in ("e2e_latency", "id", "cached_tokens"):
            del each["meta_info"][name]
    return sorted(found, key=lambda each: each["index"])


def last_events(answer: Answered) -> list[dict[str, Any]]:
    assert answer.events[-1] == ("", "[DONE]")
    return [event for _, event in answer.events[:-1] if event["meta_info"]["finish_reason"]]


def test_a_private_part_shares_what_lies_before_it() -> None:
    cached: list[int] = []

    async def scenario(client: AsgiClient) -> None:
        for tenant in ("a", "b", "a"):
            parts = [["t", "shared head"], ["p", tenant], ["t", "own tail"]]
            answer = await client.post(PATH, {"parts": parts, "sampling_params": GREEDY})
            cached.append(answer.json["meta_info"]["cached_tokens"])
        answer = await client.post(PATH, {"parts": [["p", "a/b"]], "sampling_params": GREEDY})
        assert (answer.status, "write 1 to 128" in answer.json["error"]["message"]) == (400, True)

    run(scenario)
    assert cached == [0, 1 + len("shared head"), 1 + len("shared head" + "own tai")]


LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True, "logprob_start_len": 0}
SHAPES: list[dict[str, Any]] = [
    {},
    {"sampling_params": {**GREEDY, "n": 3, "temperature": 1, "sampling_seed": 7}},
    {"text": ["one", "two"]},
    {"text": ["one", "two"], **LOGPROBS},
    LOGPROBS,
    {"text": None, "input_ids": [104, 101]},
    {"text": None, "parts": [["t", "a"], ["g", "", [98]]]},
    {"sampling_params": {**GREEDY, "stop": ["g"], "max_new_tokens": 30}},
    {"sampling_params": {**GREEDY, "max_new_tokens": 0}, **LOGPROBS},
    {"sampling_params": {"regex": "[ab]{3}", "temperature": 0}},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_a_stream_and_a_whole_answer_are_equal(fields: dict[str, Any]) -> None:
    async def scenario(client: AsgiClient) -> None:
        whole = await client.post(PATH, BODY | fields)
        assert whole.status == 200, whole.json
        expected = without_times(whole.json)
        streamed = await client.post(PATH, BODY | fields | {"stream": True})
        assert streamed.status == 200, streamed.content
        assert without_times(last_events(streamed)) == expected
        pieces = await client.post(PATH, BODY | fields | {"stream": True, "incremental": True})
        for each in expected:
            mine = [event for _, event in pieces.events[:-1] if event["index"] == each["index"]]
            assert "".join(event["text"] for event in mine) == each["text"]
            assert [token for event in mine for token in event["output_ids"]] == each["output_ids"]
            for name in ("output_token_logprobs", "output_top_logprobs"):
                told = [token for event in mine for token in event["meta_info"].get(name, [])]
                assert told == each["meta_info"].get(name, [])
            assert mine[-1]["meta_info"]["finish_reason"] == each["meta_info"]["finish_reason"]
            assert all(event["meta_info"]["finish_reason"] is None for event in mine[:-1])

    run(scenario)


def test_a_prompt_is_the_same_in_every_form() -> None:
    async def scenario(client: AsgiClient) -> None:
        forms = [
            {"text": "hi"},
            {"text": "<s>hi"},
            {"input_ids": [104, 105]},
            {"input_ids": [256, 104, 105]},
            {"parts": [["t", "hi"]]},
            {"parts": [["t", "<s>", True], ["g", "", [104]], ["t", "i"]]},
        ]
        answers = [(await client.post(PATH, {**form, "sampling_params": GREEDY})).json for form in forms]
        assert len({answer["text"] for answer in answers}) == 1
        assert {answer["meta_info"]["prompt_tokens"] for answer in answers} == {3}

    run(scenario)


def test_an_answer_has_the_shape_of_sglang() -> None:
    answer = ask({**BODY, **LOGPROBS, "rid": "mine"}).json
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 6
    assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("mine", 12, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    first, *others = meta["input_token_logprobs"]
    assert first == [None, 256, "<s>"], "nothing comes before it; its name is its text"
    assert "".join(text for _, _, text in others) == "hello world"
    assert all(logprob < 0 for logprob, _, _ in others)
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 6
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]


def test_texts_of_tokens_are_told_when_they_are_asked_for() -> None:
    meta = ask({**BODY, "return_logprob": True}).json["meta_info"]
    assert {text for _, _, text in meta["output_token_logprobs"]} == {None}
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert "output_token_logprobs" not in ask(BODY).json["meta_info"]


def test_fields_with_lists_have_an_entry_for_each_prompt() -> None:
    several = [{**GREEDY, "max_new_tokens": 2}, {**GREEDY, "max_new_tokens": 3}]
    body = {"text": ["one", "two"], "sampling_params": several, "return_logprob": [False, True], "rid": ["a", "b"]}
    one, two = ask(body).json
    assert (len(one["output_ids"]), len(two["output_ids"])) == (2, 3)
    assert "output_token_logprobs" not in one["meta_info"]
    assert len(two["meta_info"]["output_token_logprobs"]) == 3
    assert (one["meta_info"]["id"], two["meta_info"]["id"]) == ("a", "b")


CONSTRAINTS = [
    ({"sampling_params": {"regex": "[ab]{3}"}}, lambda text: set(text) <= set("ab") and len(text) == 3),
    ({"sampling_params": {"json_schema": '{"type": "boolean"}'}}, lambda text: text in ("true", "false")),
    ({"sampling_params": {"json_schema": {"enum": ["x", 1]}}}, lambda text: text in ('"x"', "1")),
    ({"sampling_params": {"ebnf": 'root ::= "a" | "b"'}}, lambda text: text in ("a", "b")),
    (
        {"constraint": {"kind": "choices", "source": '["yes", "no"]'}, "token_healing": False},
        ("yes", "no").__contains__,
    ),
]


@pytest.mark.parametrize(("fields", "holds"), CONSTRAINTS, ids=[str(fields) for fields, _ in CONSTRAINTS])
def test_constraints_hold_and_are_told(fields: dict[str, Any], holds: Callable[[str], bool]) -> None:
    answer = ask({"text": "is it ", **fields}).json
    assert holds(answer["text"])
    assert answer["meta_info"]["umbel"]["guarantee"] == "enforced"


def test_what_gateways_send_at_its_default_is_taken() -> None:
    """The fields that smg adds to each request, and those that SGLang's own client sends."""
    added = {
        "model": "unknown",
        "return_text_in_logprobs": False,
        "log_metrics": True,
        "return_hidden_states": False,
        "background": False,
        "no_logs": False,
        "return_bytes": False,
        "return_entropy": False,
        "image_data": None,
        "lora_path": None,
        "logprob_start_len": -1,
    }
    sampling = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False, "top_k": -1}
    answer = ask({**BODY, **added, "sampling_params": {**GREEDY, **sampling}})
    assert answer.json["text"] == ask(BODY).json["text"]


@pytest.mark.parametrize("name", sorted(GENERATE_NOT_OFFERED))
def test_what_is_not_offered_is_refused_by_name(name: str) -> None:
    inner = name in SamplingFields.__struct_fields__
    body = {**BODY, "sampling_params": {name: "x"}} if inner else {**BODY, name: "x"}
    answer = ask(body)
    path = f"sampling_params.{name}" if inner else name
    assert (answer.status, answer.json["error"]["param"]) == (400, path)
    assert GENERATE_NOT_OFFERED[name] in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "input_ids"),
        ({"text": None, "input_ids": [1, 999]}, "input_ids"),
        ({"text": None, "input_ids": [[1], [999]]}, "input_ids[1]"),
        ({"text": None, "input_ids": [1, [2]]}, "input_ids"),
        ({"text": None, "input_ids": [-1]}, "input_ids[0]"),
        ({"text": None, "parts": [["g", "", [999]]]}, "parts"),
        ({"text": []}, "text"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logit_bias": {"999": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"n": 17}}, "sampling_params.n"),
        ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params.ebnf"),
        ({"sampling_params": {"regex": "a"}, "constraint": {"kind": "regex", "source": "b"}}, "constraint"),
        ({"sampling_params": {"json_schema": {"enum": ["x" * 70_000]}}}, "sampling_params.json_schema"),
        ({"constraint": {"kind": "prayer", "source": "x"}}, "constraint.kind"),
        ({"constraint": {"kind": "regex", "source": "a" * 4_097}}, "constraint.source"),
        ({"constraint": {"kind": "json_schema", "source": '{"enum": ["' + "é" * 33_000 + '"]}'}}, "constraint.source"),
        ({"constraint": {"kind": "gbnf", "source": 'root ::= "a" ' + "#" * 65_536}}, "constraint.source"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"umbel": {"no": 1}}, "umbel.no"),
        ({"cache_salt": "ü"}, "cache_salt"),
    ],
    ids=str,
)
def test_a_wrong_body_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    answer = ask(BODY | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.json


def test_another_model_is_not_here() -> None:
    assert ask({**BODY, "model": "gpt-9"}).status == 404


def test_every_text_of_a_batch_counts() -> None:
    many = {**BODY, "text": ["a", "b"], "sampling_params": {**GREEDY, "n": 2}}

    async def scenario(client: AsgiClient) -> None:
        endless = {**BODY, "sampling_params": {**GREEDY, "max_new_tokens": 3_000}, "stream": True}
        live = client.begin("POST", PATH, endless)
        await live.until(b"data: ")
        assert (await client.post(PATH, many)).status == 503, "one runs, and these are four more"
        assert (await client.post(PATH, {**many, "text": "a"})).status == 200
        await live.hang_up()
        assert (await client.post(PATH, many)).status == 200

    run(scenario, limits=HttpLimits(most_in_flight=4))


def test_a_request_is_aborted_by_its_caller_alone_and_gives_its_text() -> None:
    keys = {"authorization": "Bearer one"}
    others = {"authorization": "Bearer two"}
    endless = {**BODY, "sampling_params": {**GREEDY, "max_new_tokens": 3_000}, "rid": "long"}

    async def scenario(client: AsgiClient) -> None:
        live = client.begin("POST", PATH, {**endless, "stream": True}, keys)
        whole = client.begin("POST", PATH, {**endless, "rid": "whole"}, keys)
        await live.until(b"data: ")
        for headers, rid, aborted in ((others, "long", 0), (keys, "no", 0), (keys, "long", 1), (keys, "whole", 1)):
            answer = await client.post("/abort", {"rid": rid}, **headers)
            assert answer.json == {"aborted": aborted}
        *_, last = last_events(await live.ended())
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(last["output_ids"]) < 3_000
        ended = (await whole.ended()).json
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await client.post("/abort", {"rid": "long"}, **keys)).json == {"aborted": 0}, "it has ended"

    run(scenario, access=Access({"a": "one", "b": "two"}))


@pytest.mark.parametrize(("rid", "aborted"), [("r", 2), ("r_0", 1), ("r_1", 1)])
def test_the_name_of_a_batch_aborts_all_of_it(rid: str, aborted: int) -> None:
    body = {"text": ["one", "two"], "sampling_params": {**GREEDY, "max_new_tokens": 3_000}, "rid": "r", "stream": True}

    async def scenario(client: AsgiClient) -> None:
        live = client.begin("POST", PATH, body)
        await live.until(b'"r_1"')
        assert (await client.post("/abort", {"rid": rid})).json == {"aborted": aborted}
        await client.post("/abort", {"rid": "r"})
        assert {event["meta_info"]["finish_reason"]["type"] for event in last_events(await live.ended())} == {"abort"}
        assert (await client.post("/abort", {"rid": "r"})).json == {"aborted": 0}

    run(scenario)


def test_events_with_all_of_a_long_text_cost_no_more_than_its_length_so_many_times() -> None:
    shown = _Shown()
    sent, last = 0, ""
    for _ in range(60_000):
        shown.add(Chunk("a", 0, "x"))
        if shown.due(incremental=False):
            last, _, _ = shown.take(incremental=False)
            sent += len(last)
    assert sent < 2 * SNAPSHOT * 60_000
    assert len(last) > 60_000 * (1 - 1 / SNAPSHOT), "what was not shown is small"
