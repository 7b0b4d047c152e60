"""Programs over HTTP: a graph that is put once runs by name, one request a run, with the values of a run at home."""

import asyncio
import json
import random
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx2
import openai
import pytest
import umbel as ul
from hypothesis import HealthCheck, Phase, given, settings
from umbel.compiler.files import serialise
from umbel.compiler.running.hosted import VariableSet, as_json
from umbel.lang.errors import DeadlineError, ParameterError, UmbelError, VariableError
from umbel.lang.protocol import Chunk, Final, GenRequest, Origin
from umbel.lang.sampling import SamplingParams
from umbel.server.access import Access
from umbel.server.cost import Recorder, read_records
from umbel.server.errors import HttpError, http_error
from umbel.server.programs import ProgramModel, RunBody, _event
from umbel.srt.in_process import LocalBackend

from ..compiler.random_programs import bodies, program_of
from ..serving import PATIENCE
from .client import Answered, AsgiClient, served
from .serving import ADMIN_KEY, KEY, Serving

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

T = TypeVar("T")


def backend() -> LocalBackend:
    return LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15)


def file_of(program: ul.Program) -> bytes:
    return serialise.encode(program.trace())


def on_a_server(work: Callable[[AsgiClient], Awaitable[T]], **front: Any) -> T:
    async def run() -> T:
        async with served(backend(), **front) as client:
            return await work(client)

    return asyncio.run(run())


async def put(client: AsgiClient, name: str, data: bytes, **headers: str) -> Any:
    return await client.begin("PUT", f"/v1/programs/{name}", data, headers).ended()


@ul.function(temperature=0)
def judge(s: ul.State, essay: str, sides: str = "tone") -> Any:
    s += f"Essay: {essay}"
    branches = s.fork(2)
    for number, branch in enumerate(branches):
        branch += f"\n{sides} {number}:" + ul.gen("side", max_tokens=3)
    branches.join()
    s += "\nGrade:" + ul.select("grade", [" A", " B"]) + " of " + ul.gen("points", dtype=int, max_tokens=4)
    s += "\nVerdict:" + ul.gen("verdict", max_tokens=5)
    return s["verdict"]


JUDGE = file_of(judge)


@ul.function(temperature=0)
def reads(s: ul.State, question: str) -> Any:
    s += "a manual " * 200 + ul.cache_point(ttl=600)
    s += question + ul.gen("a", max_tokens=2)
    return s["a"]


# ------------------------------------------------------------------------------------------- one request


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.nightly)])
def test_programs_give_what_they_give_at_home_in_one_request_each(count: int) -> None:
    drawn = random.Random(18)
    written = [program_of(body, []) for body in some_bodies(count)]
    questions = [f'why {drawn.randrange(100)} of "so"?' for _ in written]

    async def work(client: AsgiClient) -> tuple[list[Any], int]:
        for number, program in enumerate(written):
            assert (await put(client, f"p{number}", file_of(program))).status == 201
        runs = [
            client.post(f"/v1/programs/p{number}/runs", {"arguments": {"question": question}})
            for number, question in enumerate(questions)
        ]
        answers = await asyncio.gather(*runs)
        return answers, (await client.app.front.backend.control("info")).result["gateway_programs"]

    answers, counted = on_a_server(work)
    assert counted == len(written)
    home = backend()
    for program, question, answer in zip(written, questions, answers, strict=True):
        state = program.compile(server=False).run(question=question, backend=home, timeout=60.0)
        assert answer.status == 200
        assert answer.json["variables"] == {name: as_json(state[name]) for name in state.variables()}
        assert answer.json["result"] == as_json(state.ret_value)
        assert answer.json["usage"]["calls"] == state.usage.calls


def some_bodies(count: int) -> list[Any]:
    """Bodies of random programs, the same in every run."""
    found: list[Any] = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(body=bodies(2))
    def collect(body: Any) -> None:
        found.append(body)

    collect()
    assert len(found) >= count
    return found[:count]


# ------------------------------------------------------------------------------------------- kept


def test_a_program_is_put_described_replaced_and_deleted() -> None:
    async def work(client: AsgiClient) -> None:
        first = await put(client, "judge", JUDGE)
        assert first.status == 201
        facts = (await client.get("/v1/programs/judge")).json
        assert facts == first.json
        assert facts["parameters"]["required"] == ["essay"]
        assert facts["parameters"]["properties"]["sides"] == {"type": "string", "default": "tone"}
        assert facts["variables"] == {
            "side": "list",
            "grade": "text",
            "points": "int",
            "verdict": "text",
        }
        assert facts["bytes"] == len(JUDGE)
        assert facts["model"] is False
        assert (await put(client, "judge", JUDGE)).status == 200
        other = await put(client, "judge", file_of(program_of((), [])))
        assert other.status == 200
        assert other.json["digest"] != facts["digest"]
        assert [each["name"] for each in (await client.get("/v1/programs")).json["data"]] == ["judge"]
        gone = await client.begin("DELETE", "/v1/programs/judge").ended()
        assert gone.json == {"name": "judge", "deleted": True, "object": "program"}
        assert (await client.get("/v1/programs/judge")).status == 404
        assert (await client.begin("DELETE", "/v1/programs/judge").ended()).status == 404

    on_a_server(work)


def test_a_run_in_flight_keeps_the_program_that_it_began_with() -> None:
    async def work(client: AsgiClient) -> None:
        await put(client, "judge", JUDGE)
        live = client.begin("POST", "/v1/programs/judge/runs", {"arguments": {"essay": "x"}, "stream": True})
        await live.until(b'"type":"text"')
        await client.begin("DELETE", "/v1/programs/judge").ended()
        answered = await live.ended()
        assert answered.events[-2][1]["type"] == "result"

    on_a_server(work)


def test_keeping_a_program_takes_the_admin_key() -> None:
    async def work(client: AsgiClient) -> None:
        user, admin = {"authorization": "Bearer user"}, {"authorization": "Bearer admin"}
        assert (await put(client, "judge", JUDGE)).status == 401
        assert (await put(client, "judge", JUDGE, **user)).status == 403
        assert (await put(client, "judge", JUDGE, **admin)).status == 201
        assert (await client.begin("DELETE", "/v1/programs/judge", headers=user).ended()).status == 403
        ran = await client.post("/v1/programs/judge/runs", {"arguments": {"essay": "x"}}, **user)
        assert ran.status == 200

    on_a_server(work, access=Access({"team": "user"}, "admin"))


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 65, "%2e%2e%2fetc", "a%00"])
def test_names_are_plain(name: str) -> None:
    async def work(client: AsgiClient) -> None:
        answered = await put(client, name, JUDGE)
        assert answered.status == 400
        assert "cannot be called" in answered.json["error"]["message"]

    on_a_server(work)


# ------------------------------------------------------------------------------------------- run


def test_a_run_gives_variables_objects_result_and_usage() -> None:
    async def work(client: AsgiClient) -> Any:
        await put(client, "judge", JUDGE)
        return (await client.post("/v1/programs/judge/runs", {"arguments": {"essay": "x"}})).json

    got = on_a_server(work)
    state = judge.run(essay="x", backend=backend())
    assert got["variables"] == {name: state[name] for name in ("side", "grade", "points", "verdict")}
    assert got["objects"] == {"points": state.value("points")}
    assert got["result"] == state["verdict"]
    assert got["unreadable"] == {}
    assert got["usage"]["calls"] == 5
    assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] + got["usage"]["completion_tokens"]


def test_a_stream_has_the_pieces_of_every_branch_then_the_whole_answer() -> None:
    async def work(client: AsgiClient) -> tuple[Any, Any]:
        await put(client, "judge", JUDGE)
        whole = await client.post("/v1/programs/judge/runs", {"arguments": {"essay": "x"}})
        streamed = await client.post("/v1/programs/judge/runs", {"arguments": {"essay": "x"}, "stream": True})
        return whole, streamed

    whole, streamed = on_a_server(work)
    *events, end, done = [data for _, data in streamed.events]
    assert done == "[DONE]"
    assert end["type"] == "result"
    assert {name: end[name] for name in ("variables", "objects", "result")} == {
        name: whole.json[name] for name in ("variables", "objects", "result")
    }
    for branch, text in enumerate(end["variables"]["side"]):
        pieces = [e["text"] for e in events if e["type"] == "text" and e["branch"] == str(branch)]
        assert "".join(pieces) == text
        assert len(pieces) == 3
    assert streamed.writes < len(events)


def test_hanging_up_ends_the_run_everywhere() -> None:
    @ul.function(temperature=0, ignore_eos=True)
    def endless(s: ul.State) -> None:
        s += "on" + ul.gen("a", max_tokens=4000)

    async def work(client: AsgiClient) -> None:
        await put(client, "endless", file_of(endless))
        for body in ({"stream": True}, {}):
            live = client.begin("POST", "/v1/programs/endless/runs", body)
            for _ in range(20):
                await asyncio.sleep(0)
            await live.hang_up()
            scheduler = client.app.front.backend.engine.scheduler
            for _ in range(10_000):
                if scheduler.idle:
                    break
                await asyncio.sleep(0)
            assert scheduler.idle
        assert client.app.front.in_flight == 0
        assert client.app.front.disconnects == 2

    on_a_server(work)


def test_salts_of_runs_share_nothing() -> None:
    async def work(client: AsgiClient) -> list[int]:
        await put(client, "judge", JUDGE)
        cached = []
        for salt in ("a", "a", "b"):
            body = {"arguments": {"essay": "an essay of some length"}, "cache_salt": salt}
            cached.append((await client.post("/v1/programs/judge/runs", body)).json["usage"]["cached_tokens"])
        return cached

    first, again, other = on_a_server(work)
    assert again > first
    assert other == first


def test_a_cache_point_of_a_program_keeps_what_stands_before_it() -> None:
    async def work(client: AsgiClient) -> list[Any]:
        await put(client, "reads", file_of(reads))
        runs = [{"arguments": {"question": question}} for question in ("why?", "how?")]
        return [(await client.post("/v1/programs/reads/runs", body)).json["usage"] for body in runs]

    first, second = on_a_server(work)
    assert first["cache_write_tokens"] > 1024
    assert first["cache_read_tokens"] == second["cache_write_tokens"] == 0
    assert second["cache_read_tokens"] == first["cache_write_tokens"] <= second["cached_tokens"]


def test_sampling_budget_and_timeout_hold_for_all_of_a_run() -> None:
    @ul.function(ignore_eos=True)
    def free(s: ul.State) -> None:
        s += "x" + ul.gen("a") + ul.gen("b", max_tokens=2)

    async def work(client: AsgiClient) -> None:
        await put(client, "free", file_of(free))

        async def run(**body: Any) -> Any:
            return await client.post("/v1/programs/free/runs", body)

        sampled = await run(sampling={"max_tokens": 3, "temperature": 0, "logit_bias": {"65": 100}})
        assert sampled.json["usage"]["completion_tokens"] == 5
        assert sampled.json["variables"]["a"] == "AAA"
        spent = await run(budget={"calls": 1}, sampling={"max_tokens": 3})
        assert spent.status == 422
        assert spent.json["error"]["code"] == "budget_exhausted"
        assert set(spent.json["variables"]) == {"a"}
        assert spent.json["usage"]["calls"] == 1
        late = await run(sampling={"max_tokens": 4000}, umbel={"timeout": 0.02})
        assert late.status == 504

    on_a_server(work)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "misses its argument 'essay'"),
        ({"arguments": {"essay": "x", "color": "red"}}, "no parameter 'color'"),
        ({"arguments": {"essay": None}}, "cannot put argument 'essay'"),
        ({"arguments": {"essay": ["x"]}}, "cannot put argument 'essay'"),
        ({"arguments": {"essay": "x" * 17_000_000}}, "can be shipped"),
        ({"arguments": {"essay": "x"}, "sampling": {"temperture": 0}}, "did you mean 'temperature'"),
        ({"arguments": {"essay": "x"}, "sampling": {"temperature": -1}}, "temperature"),
        ({"arguments": {"essay": "x"}, "sampling": {"logit_bias": {"x": 1}}}, "token ids"),
        ({"arguments": {"essay": "x"}, "budget": {}}, "limits nothing"),
        ({"arguments": {"essay": "x"}, "budget": {"dollars": 1}}, "budget.dollars"),
        ({"arguments": {"essay": "x"}, "umbel": {"priority": 10**9}}, "umbel.priority"),
        ({"argument": {}}, "argument"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_is_named(body: dict[str, Any], says: str, stream: bool) -> None:
    async def work(client: AsgiClient) -> None:
        await put(client, "judge", JUDGE)
        answered = await client.post("/v1/programs/judge/runs", {**body, "stream": stream})
        assert answered.status == 400
        assert says in answered.json["error"]["message"]
        assert client.app.front.in_flight == 0

    on_a_server(work)


def test_an_error_of_the_program_has_what_came_before_it() -> None:
    @ul.function(temperature=0)
    def wrong(s: ul.State) -> Any:
        s += "x" + ul.gen("a", max_tokens=3)
        s["b"] = s["a"][40]

    async def work(client: AsgiClient) -> None:
        await put(client, "wrong", file_of(wrong))
        whole = await client.post("/v1/programs/wrong/runs", {})
        assert whole.status == 400
        assert "IndexError" in whole.json["error"]["message"]
        assert set(whole.json["variables"]) == {"a"}
        streamed = await client.post("/v1/programs/wrong/runs", {"stream": True})
        assert streamed.status == 200
        last = streamed.events[-1][1]
        assert last["type"] == "error"
        assert last["error"] == whole.json["error"]
        assert last["variables"] == whole.json["variables"]

    on_a_server(work)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"arguments": {"essay": "x" * 20_000}}, 400),
        ({"arguments": {"essay": "x"}, "umbel": {"timeout": 1e-6}}, 504),
    ],
    ids=["long", "late"],
)
def test_a_stream_that_fails_at_once_is_a_whole_answer(body: dict[str, Any], status: int) -> None:
    async def work(client: AsgiClient) -> None:
        await put(client, "judge", JUDGE)
        whole = await client.post("/v1/programs/judge/runs", body)
        streamed = await client.post("/v1/programs/judge/runs", {**body, "stream": True})
        assert (whole.status, streamed.status) == (status, status)
        assert streamed.json["error"] == whole.json["error"]
        assert client.app.front.in_flight == 0

    on_a_server(work)


def test_an_event_of_a_variable_has_the_text_of_an_answer() -> None:
    told = [VariableError("a was not generated"), UmbelError("a defect, with anything in it")]
    events = [_event(VariableSet(0, "a", "", error=error), RunBody().field_of) for error in told]
    assert [event["error"] for event in events] == [http_error(error).message for error in told]
    assert "anything" not in events[1]["error"]


def test_a_constraint_of_a_program_has_the_limits_of_a_request() -> None:
    @ul.function
    def long(s: ul.State) -> None:
        (branch,) = s.fork(1)
        branch += ul.gen("side", regex="a" * 5_000, max_tokens=1)

    async def work(client: AsgiClient) -> None:
        refused = await put(client, "long", file_of(long))
        assert refused.status == 400
        assert refused.json["error"]["message"].startswith("the constraint of 'side' has 5000 characters; at most 4096")
        assert (await client.get("/v1/programs")).json["data"] == []

    on_a_server(work)


# ------------------------------------------------------------------------------------------- as a model


def test_a_program_with_a_parameter_is_listed_as_a_model() -> None:
    async def work(client: AsgiClient) -> None:
        kept = await put(client, "judge?parameter=essay", JUDGE)
        assert (kept.json["model"], kept.json["parameter"]) == (True, "essay")
        listed = (await client.get("/v1/models")).json["data"]
        assert [(each["id"], each["umbel"]["program"]) for each in listed][-1] == ("judge", "judge")
        assert (await put(client, "judge?parameter=esay", JUDGE)).status == 400
        assert (await put(client, "judge?parametr=essay", JUDGE)).status == 400
        own = listed[0]["id"]
        taken = await put(client, f"{own}?parameter=essay", JUDGE)
        assert taken.status == 400
        assert "name of the model" in taken.json["error"]["message"]
        await put(client, "judge", JUDGE)
        assert [each["id"] for each in (await client.get("/v1/models")).json["data"]] == [own]

    on_a_server(work)


def asked_of_a_model(message: str, names: tuple[str, ...] = (), **given: Any) -> list[Any]:
    """The events of a request to the judge as a model."""

    async def work(client: AsgiClient) -> list[Any]:
        await put(client, "judge?parameter=essay", JUDGE)
        front = client.app.front
        answerer = ProgramModel(front, front.model("judge"), message, names)
        return [event async for _, event in answerer.events([GenRequest("r", (), **given)])]

    return on_a_server(work)


def test_a_model_that_is_a_program_answers_with_its_result() -> None:
    *chunks, streamed = asked_of_a_model("x", stream=True)
    (whole,) = asked_of_a_model("x")
    expected = judge.run(essay="x", backend=backend())["verdict"]
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert len(chunks) == 5
    assert "".join(chunk.text for chunk in chunks) == expected
    for end in (streamed, whole):
        assert isinstance(end, Final)
        assert end.completions[0].text == expected
        assert end.usage.calls == 5


def test_fields_of_the_client_hold_for_the_calls_of_the_program() -> None:
    (usual,) = asked_of_a_model("x", sampling=SamplingParams(max_tokens=9, logit_bias={65: 100}))
    (biased,) = asked_of_a_model("x", ("logit_bias",), sampling=SamplingParams(max_tokens=9, logit_bias={65: 100}))
    assert usual.completions[0].text == judge.run(essay="x", backend=backend())["verdict"]
    assert biased.completions[0].text == "AAAAA"


@ul.function(temperature=0, max_tokens=4, ignore_eos=True)
def repeats(s: ul.State, question: str) -> Any:
    s += question + ul.gen("a")
    return s["a"]


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
@pytest.mark.sampled(4)
def test_fields_that_equal_the_defaults_of_the_library_hold_too(path: str, limit: str) -> None:
    question: Any = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}

    async def work(client: AsgiClient) -> None:
        await put(client, "repeats?parameter=question", file_of(repeats))

        async def tokens(**fields: Any) -> tuple[int, str]:
            answer = (await client.post(path, {"model": "repeats", **question, **fields})).json
            usage = answer["usage"]
            if "choices" in answer:
                return usage["completion_tokens"], answer["choices"][0]["message"]["content"]
            blocks = answer["output"][0]["content"] if "output" in answer else answer["content"]
            return usage["output_tokens"], blocks[0]["text"]

        if path != "/v1/messages":  # there max_tokens is always given
            assert (await tokens())[0] == 4
        assert (await tokens(**{limit: 128}))[0] == 128
        assert (await tokens(**{limit: 7}))[0] == 7
        likeliest = [await tokens(**{limit: 30}) for _ in range(2)]
        assert likeliest[0] == likeliest[1] != await tokens(**{limit: 30, "temperature": 1})

    on_a_server(work)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sampling": SamplingParams(n=2)}, "is a program"),
        ({"sampling": SamplingParams(stop=("x",))}, "is a program"),
        ({"sampling": SamplingParams(logprobs=True)}, "is a program"),
    ],
)
def test_what_a_program_cannot_honour_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises((HttpError, ParameterError), match=says):
        asked_of_a_model("x", **given)


def test_an_error_of_a_model_that_is_a_program_is_raised() -> None:
    with pytest.raises(DeadlineError):
        asked_of_a_model("x" * 2000, origin=Origin(timeout=1e-6))


TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]


TOOL: Any = {
    "name": "clock",
    "input_schema": {"type": "object", "properties": {}},
    "cache_control": {"type": "ephemeral"},
}


def talked(path: str, body: dict[str, Any]) -> Any:
    async def work(client: AsgiClient) -> Any:
        await put(client, "judge?parameter=essay", JUDGE)
        return await client.post(path, {"model": "judge", **body})

    return on_a_server(work)


def test_a_chat_client_runs_the_judge_as_a_model() -> None:
    expected = judge.run(essay="x", backend=backend())
    whole = talked("/v1/chat/completions", {"messages": TALK}).json
    assert whole["model"] == "judge"
    assert whole["choices"][0]["message"]["content"] == expected["verdict"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == expected.usage.completion_tokens
    streamed = talked(
        "/v1/chat/completions", {"messages": TALK, "stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = [data for _, data in streamed.events[:-1]]
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == expected["verdict"]
    assert len([text for text in texts if text]) == 5
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_the_place_of_a_request_changes_nothing_of_a_run_and_a_header_says_so() -> None:
    place = {"umbel": {"program": "p", "fork_group": "f", "ahead": 3}}

    async def work(client: AsgiClient) -> list[Answered]:
        await put(client, "judge?parameter=essay", JUDGE)
        run = {"arguments": {"essay": "x"}, **place}
        talk = {"model": "judge", "messages": TALK, **place}
        return [
            await client.post("/v1/programs/judge/runs", run),
            await client.post("/v1/programs/judge/runs", {**run, "stream": True}),
            await client.post("/v1/chat/completions", talk),
        ]

    for answer in on_a_server(work):
        assert answer.status == 200
        assert answer.headers["umbel-warning"].startswith("umbel.ahead: ")


def test_an_answer_of_a_program_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl")

    async def work(client: AsgiClient) -> Any:
        await put(client, "judge?parameter=essay", JUDGE)
        return await client.post("/v1/chat/completions", {"model": "judge", "messages": TALK})

    usage = on_a_server(work, recorder=recorder).json["usage"]
    recorder.close()
    (record,) = read_records(tmp_path / "run.jsonl")
    assert (record.prompt, record.completion) == (usage["prompt_tokens"], usage["completion_tokens"])


def test_every_dialect_tells_what_the_points_of_a_program_created_and_read() -> None:
    async def work(client: AsgiClient) -> list[Any]:
        await put(client, "reads?parameter=question", file_of(reads))
        asked = {"model": "reads", "messages": [{"role": "user", "content": "why?"}], "max_tokens": 4}
        bodies = (
            ("/v1/chat/completions", asked),
            ("/v1/messages", asked),
            ("/v1/messages", asked | {"stream": True}),
            ("/v1/responses", {"model": "reads", "input": "why?"}),
        )
        return [await client.post(path, body) for path, body in bodies]

    chat, message, stream, response = on_a_server(work)
    first = chat.json["usage"]["prompt_tokens_details"]
    kept = first["cache_write_tokens"]
    assert kept > 1024
    assert first["cache_read_input_tokens"] == 0
    last = stream.events[-2][1]["usage"]
    for usage in (message.json["usage"], last):
        assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, kept)
        assert usage["input_tokens"] == chat.json["usage"]["prompt_tokens"] - kept
    details = response.json["usage"]["input_tokens_details"]
    assert (details["cache_write_tokens"], details["cache_read_input_tokens"]) == (0, kept)


def test_the_client_of_openai_runs_the_judge_as_a_model() -> None:
    async def work(client: AsgiClient) -> tuple[str | None, str]:
        await put(client, "judge?parameter=essay", JUDGE)
        transport = httpx2.ASGITransport(client.app)
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url="http://localhost/v1",
            http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        ) as official:
            messages: Any = TALK
            whole = await official.chat.completions.create(model="judge", messages=messages)
            stream = await official.chat.completions.create(model="judge", messages=messages, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    expected = judge.run(essay="x", backend=backend())["verdict"]
    assert on_a_server(work) == (expected, expected)


def test_a_client_of_responses_runs_the_judge_as_a_model() -> None:
    expected = judge.run(essay="x", backend=backend())["verdict"]
    whole = talked("/v1/responses", {"input": "x"}).json
    assert whole["output"][0]["content"][0]["text"] == expected
    streamed = talked("/v1/responses", {"input": "x", "stream": True})
    deltas = [data["delta"] for name, data in streamed.events if name == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert len(deltas) == 5


def test_the_client_of_anthropic_runs_the_judge_as_a_model() -> None:
    async def work(client: AsgiClient) -> tuple[Any, str, Any]:
        await put(client, "judge?parameter=essay", JUDGE)
        async with anthropic.AsyncAnthropic(
            api_key="none",
            base_url="http://localhost",
            http_client=anthropic.DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(client.app)),
        ) as official:
            asked: Any = {"model": "judge", "max_tokens": 64, "messages": TALK[1:], "system": "be brief"}
            whole = await official.messages.create(**asked, tools=[TOOL], tool_choice={"type": "none"})
            async with official.messages.stream(**asked, thinking={"type": "disabled"}) as stream:
                pieces = [text async for text in stream.text_stream]
                final = await stream.get_final_message()
        return whole, "".join(pieces), final

    expected = judge.run(essay="x", backend=backend())
    whole, streamed, final = on_a_server(work)
    assert whole.content[0].text == streamed == final.content[0].text == expected["verdict"]
    assert whole.stop_reason == final.stop_reason == "end_turn"
    assert whole.usage.output_tokens == final.usage.output_tokens == expected.usage.completion_tokens


def test_the_tokens_of_a_program_are_not_counted_before_it_runs() -> None:
    answered = talked("/v1/messages/count_tokens", {"messages": TALK[1:]})
    assert answered.status == 400
    assert "makes its prompts as it runs" in answered.json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": TALK[:1]}, "there is none"),
        ({"messages": TALK, "n": 2}, "n: 'judge' is a program"),
        ({"messages": TALK, "stop": "x"}, "stop: 'judge' is a program"),
        ({"messages": TALK, "logprobs": True}, "logprobs: 'judge' is a program"),
        ({"messages": TALK, "response_format": {"type": "json_object"}}, "leave the format out"),
        ({"messages": TALK, "reasoning_effort": "low"}, "no options of a chat template"),
        ({"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}, "continues no message"),
        ({"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}, "calls no tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wishes_that_only_a_model_can_honour_are_refused(body: dict[str, Any], says: str, stream: bool) -> None:
    answered = talked("/v1/chat/completions", {**body, "stream": stream})
    assert answered.status == 400
    assert says in answered.json["error"]["message"]


@pytest.mark.processes
def test_a_server_process_runs_the_judge_by_name_and_as_a_model(oracle_server: Serving) -> None:
    place = f"{oracle_server.address}/v1/programs/judge"

    def administer(method: str, url: str, body: bytes | None = None) -> int:
        request = urllib.request.Request(url, body, {"authorization": f"Bearer {ADMIN_KEY}"}, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return int(answer.status)

    def counted() -> int:
        info = oracle_server.ask("/server_info", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        return int(info.get("gateway_programs", 0))

    expected = judge.run(essay="x", backend=backend())
    assert administer("PUT", f"{place}?parameter=essay", JUDGE) == 201
    try:
        before = counted()
        ran = oracle_server.ask("/v1/programs/judge/runs", {"arguments": {"essay": "x"}})
        assert ran["variables"] == {name: expected[name] for name in expected.variables()}
        client = openai.OpenAI(base_url=oracle_server.address + "/v1", api_key=KEY)
        message: Any = TALK[1:]
        whole = client.chat.completions.create(model="judge", messages=message)
        assert whole.choices[0].message.content == expected["verdict"]
        chunks = client.chat.completions.create(model="judge", messages=message, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["verdict"]
        assert counted() == before + 3
    finally:
        assert administer("DELETE", place) == 200


# ------------------------------------------------------------------------------------------- any bytes


def test_no_bytes_make_the_server_fail() -> None:
    draw = random.Random(18)
    whole = json.loads(JUDGE)

    def mutated() -> bytes:
        text = json.dumps(whole).encode()
        at = draw.randrange(len(text))
        match draw.randrange(4):
            case 0:
                return text[:at] + draw.randbytes(3) + text[at:]
            case 1:
                return text[:at] + text[at + draw.randrange(30) :]
            case 2:
                changed = json.loads(JUDGE)
                node = draw.choice(changed["nodes"])
                node[draw.choice(["op", "inputs", "value", "name", "gen", "size", "mode"])] = draw.choice(ODD)
                return json.dumps(changed).encode()
            case _:
                changed = json.loads(JUDGE)
                changed[draw.choice(list(changed))] = draw.choice(ODD)
                return json.dumps(changed).encode()

    async def work(client: AsgiClient) -> list[int]:
        bodies = [b"", b"null", b"\xff\xfe", b"[" * 50_000, b'{"umbel":"graph"}', *(mutated() for _ in range(400))]
        return [(await put(client, "p", body)).status for body in bodies]

    statuses = on_a_server(work)
    assert set(statuses) <= {200, 201, 400}
    assert statuses.count(400) > 200


ODD = [
    None,
    -1,
    10**30,
    0.5,
    "",
    "x" * 1000,
    "__class__",
    [],
    [[0]],
    [0, 0, 0],
    {},
    {"path": "/etc/passwd"},
    {"a": 1},
    True,
]


def test_too_many_bytes_are_refused() -> None:
    async def work(client: AsgiClient) -> None:
        answered = await put(client, "p", b" " * (8 << 20) + JUDGE)
        assert answered.status == 400
        assert "the most of one program" in answered.json["error"]["message"]

    on_a_server(work)
