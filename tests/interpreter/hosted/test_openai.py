"""`OpenAI` as programs see it: roles and texts, stops, constraints, costs, and what is wrong before money is spent."""

import asyncio
import importlib.util
import sys
import threading
import types
import warnings
from dataclasses import replace

import openai
import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.transport import http_library
from umbel.interpreter.fakes.openai_requests import LLAMA_CPP, OPENAI, REASONING, SGLANG, VLLM
from umbel.lang.chat_template import TemplateWarning
from umbel.lang.errors import (
    BackendError,
    CapabilityError,
    ConnectionLostError,
    DeadlineError,
    MissingExtraError,
    ParameterError,
    RequestError,
)
from umbel.lang.prompt import Text
from umbel.lang.protocol import ConstraintSpec, FinishReason, Origin, ScoreRequest
from umbel.testing import FakeOpenAI

from ..conftest import PATIENCE
from .wired import DONE, KEY, USAGE, Pieces, Wire, answer, asking, backend, conversation, event, generate, streamed

http = http_library(openai)  # httpx or httpx2, as the SDK is written for


@ul.function
def introduce(s, question):
    s += ul.system("You are brief.")
    s += ul.user(question)
    s += ul.assistant("Name: " + ul.gen("name", max_tokens=8, stop="\n") + "\nJob: " + ul.gen("job", max_tokens=3))


def speak(text: str) -> str:
    return {"Name: ": "Ada\nand more", "Job: ": "counts all the numbers"}[text[text.rfind("\n") + 1 :]]


PLACES = [
    (OPENAI, "gpt-4o", "chat"),
    (OPENAI, "gpt-3.5-turbo-instruct", "completion"),
    (REASONING, "o3", "chat"),
    (VLLM, "Qwen/Qwen3-8B", "chat"),
    (VLLM, "Qwen/Qwen3-8B", "completion"),
    (SGLANG, "Qwen/Qwen3-8B", "chat"),
    (LLAMA_CPP, "qwen3", "chat"),
    (LLAMA_CPP, "qwen3", "completion"),
]


@pytest.mark.parametrize(("features", "model", "mode"), PLACES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.sampled(4)
def test_one_program_gives_the_same_everywhere(features, model, mode, stream):
    chat_template = ul.ChatTemplate(CHATML) if mode == "completion" else None
    with FakeOpenAI(speak, features=features, models=[model]) as server:
        backend = ul.OpenAI(
            model, base_url=server.base_url, api_key=server.api_key, mode=mode, chat_template=chat_template
        )
        state = introduce.run(question="Who are you?", backend=backend, stream=stream)
        assert (state["name"], state["job"]) == ("Ada", "counts all the")
        assert state.text().endswith("assistant\nName: Ada\nJob: counts all the<|im_end|>\n")
        assert state.usage.calls == server.calls == 2
        if model != "o3":  # which takes no stops: its answers are left at one, before it says what they cost
            assert state.usage.prompt_tokens == server.usage.prompt_tokens
        shutdown(backend)


@ul.function
def decide(s):
    s += ul.user("Tea?")
    s += ul.assistant(ul.gen("sure", regex="[a-z]+", max_tokens=8) + " " + ul.select("choice", ["yes", "no"]))


@pytest.mark.parametrize(("features", "model", "mode"), PLACES)
def test_a_constraint_holds_everywhere(features, model, mode):
    chat_template = ul.ChatTemplate(CHATML) if mode == "completion" else None

    def script(text: str) -> str:
        return "no" if "surely" in text else "surely"

    with FakeOpenAI(script, features=features, models=[model], scores={"no": -0.1, "yes": -3.0}) as server:
        backend = ul.OpenAI(
            model, base_url=server.base_url, api_key=server.api_key, mode=mode, chat_template=chat_template
        )
        state = decide.run(backend=backend)
        assert (state["sure"], state["choice"]) == ("surely", "no")
        expected = "enforced" if backend.enforces(ConstraintSpec("regex", "[a-z]+")) else "validated"
        assert state.meta("sure")["guarantee"] == expected
        shutdown(backend)


@pytest.mark.parametrize(("model", "marked"), [("gpt-5.6", True), ("gpt-5.4", False)])
@pytest.mark.parametrize("ttl", [300, 7_200])
def test_a_cache_point_is_a_breakpoint_where_the_model_has_them(model, marked, ttl):
    @ul.function
    def ask(s, question):
        s += ul.user_begin() + "The document. " + ul.cache_point(ttl=ttl) + question + ul.user_end()
        s += ul.assistant(ul.gen("answer", max_tokens=8))

    features = replace(REASONING, breakpoints=marked)
    with FakeOpenAI(lambda text: "Yes.", features=features, models=[model]) as server:
        backend = ul.OpenAI(model, base_url=server.base_url, api_key=server.api_key, profile="openai")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for question in ("One?", "Two?"):
                assert ask.run(question=question, backend=backend)["answer"] == "Yes."
        sent = [asked.body["messages"][0]["content"] for asked in server.requests]
        kept = {"type": "text", "text": "The document. ", "prompt_cache_breakpoint": {"mode": "explicit"}}
        if marked:
            assert sent == [[kept, {"type": "text", "text": question}] for question in ("One?", "Two?")]
        else:
            assert sent == ["The document. One?", "The document. Two?"]
        says = "keeps a prefix for at least 1800 s after its last use, and cache_point(ttl=7200) asks for more"
        assert sum(says in str(each.message) for each in warned) == (marked and ttl > 1_800)
        shutdown(backend)


def shutdown(backend: ul.OpenAI) -> None:
    loop.streams.run(backend.close())


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# -------------------------------------------------------------------------------------------- answers


def test_a_stream_gives_what_is_certain():
    stream = streamed(event(""), event("One,"), event(" two"), event("\nthree"), event(None, "stop"), USAGE, DONE)
    wire = Wire(stream)
    many = tuple("abcd\n")
    chunks, final = generate(backend(wire), asking(stream=True, stop=many))
    assert [chunk.text for chunk in chunks] == ["One,", " two"]
    (completion,) = final.completions
    assert (completion.text, completion.matched_stop, completion.finish_reason) == ("One, two", "\n", "stop")
    assert "stop" not in wire.bodies[0]


def test_the_connection_is_closed_at_a_stop_that_is_found_here():
    pieces = Pieces([event("One."), event(" Two\n"), *[event("more")] * 50])
    wire = Wire(http.Response(200, headers={"content-type": "text/event-stream"}, stream=pieces))
    _, final = generate(backend(wire), asking(stop=("\n", "1", "2", "3", "4"), max_tokens=8))
    assert final.completions[0].text == "One. Two"
    assert pieces.closed
    assert final.usage.completion_tokens == 8  # a bound: nobody said


def test_several_continuations_come_in_turn():
    stream = streamed(
        event("a", None, 0), event("x", None, 1), event("b", "stop", 0), event("y\nz", "length", 1), USAGE, DONE
    )
    chunks, final = generate(backend(Wire(stream)), asking(stream=True, n=2))
    assert [completion.text for completion in final.completions] == ["ab", "xy\nz"]
    assert [completion.finish_reason for completion in final.completions] == [FinishReason.STOP, FinishReason.LENGTH]
    assert [(chunk.index, chunk.text) for chunk in chunks] == [(0, "a"), (1, "x"), (0, "b"), (1, "y\nz")]


def test_log_probabilities_come_without_ids():
    top = [{"token": "Par", "logprob": -0.5}, {"token": "Lon", "logprob": -1.5}]
    content = [{"token": "Par", "logprob": -0.5, "top_logprobs": top}, {"token": "is.", "logprob": -0.25}]
    _, final = generate(backend(Wire(answer("Paris.", logprobs={"content": content}))), asking(top_logprobs=2))
    first, second = final.completions[0].logprobs
    assert (first.token_id, first.text, first.logprob) == (-1, "Par", -0.5)
    assert first.top == ((-1, "Par", -0.5), (-1, "Lon", -1.5))
    assert second.top == ()


def test_the_server_names_its_stop():
    _, final = generate(backend(Wire(answer("Paris", stop_reason="."))), asking(stop=(".",)))
    assert final.completions[0].matched_stop == "."


@pytest.mark.parametrize(
    ("more", "cached", "written", "read"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 6}}, 6, 0, 6),
        ({"prompt_tokens_details": {"cached_tokens": 6, "cache_read_input_tokens": 0}}, 6, 0, 0),
        ({"prompt_tokens_details": {"cached_tokens": 6, "cache_read_input_tokens": 5}}, 6, 0, 5),
        ({"prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3}}, 4, 3, 4),
        ({"prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 30}}, 4, 5, 4),
        ({"prompt_cache_hit_tokens": 5}, 5, 0, 5),
        ({}, 0, 0, 0),
    ],
)
def test_usage_tells_what_was_cached_and_stored(more, cached, written, read):
    usage = {"prompt_tokens": 9, "completion_tokens": 2, **more}
    choice = {"message": {"content": "Hi"}, "finish_reason": "stop"}
    _, final = generate(backend(Wire(http.Response(200, json={"choices": [choice], "usage": usage}))))
    assert final.usage == ul.Usage(9, cached, 2, 1, written, cache_read_tokens=read)


def test_a_server_that_does_not_count_is_counted_from_above():
    choice = {"message": {"content": "Paris"}, "finish_reason": "stop"}
    model = backend(Wire(http.Response(200, json={"choices": [choice]})))
    _, final = generate(model, asking(max_tokens=100))
    assert final.usage.prompt_tokens == model.tokens_at_most(conversation())
    assert final.usage.completion_tokens == 20  # four bytes for each character at most
    assert asyncio.run(model.control("info")).result["calls_with_estimated_usage"] == 1


def test_an_empty_reason_is_none_yet():
    stream = streamed(event("Par", ""), event("is.", ""), event(None, "stop"), USAGE, DONE)
    _, final = generate(backend(Wire(stream)), asking(stream=True))
    assert final.completions[0].text == "Paris."


def test_nothing_is_asked_for_no_tokens():
    wire = Wire(answer())
    _, final = generate(backend(wire), asking(max_tokens=0, n=2))
    assert [completion.text for completion in final.completions] == ["", ""]
    assert wire.seen == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer("", "content_filter"), "content filter ended the answer"),
        (http.Response(200, json={"choices": [{"message": {"refusal": "I cannot."}, "finish_reason": "stop"}]}),
         "the model refused: I cannot"),
    ],
)  # fmt: skip
def test_answers_that_the_provider_keeps_back_are_errors(reply, words):
    with pytest.raises(RequestError, match=words):
        generate(backend(Wire(reply)))


# -------------------------------------------------------------------------------------------- constraints


@pytest.mark.parametrize(
    ("said", "stop", "text", "guarantee", "reason"),
    [
        ('{"answer": "blue"}', (), "blue", "enforced", "stop"),
        ('{"answer": "blue sky"}', (" ",), "blue", "", "stop"),
        ('{"answer": "bl', (), "bl", "", "length"),
        ("blue", (), "blue", "", "stop"),  # a server that ignores what was asked
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_taken_out_of_their_object(said, stop, text, guarantee, reason, stream):
    constraint = ConstraintSpec("regex", "[a-z ]+")
    ends = "length" if reason == "length" else "stop"
    parts = [event(said[:9]), event(said[9:]), event(None, ends), USAGE, DONE]
    reply = streamed(*parts) if stream or stop else answer(said, ends)
    chunks, final = generate(backend(Wire(reply)), asking(constraint=constraint, stop=stop, stream=stream))
    (completion,) = final.completions
    assert (completion.text, completion.guarantee, completion.finish_reason) == (text, guarantee, reason)
    assert "".join(chunk.text for chunk in chunks) == (text if stream else "")


def test_the_backend_says_what_it_enforces():
    model = backend(Wire(answer()))
    assert model.enforces(ConstraintSpec("regex", "a+"))
    assert model.enforces(ConstraintSpec("json_schema", '{"type": "integer"}'))
    assert not model.enforces(ConstraintSpec("json_schema", '{"type": "string", "maxLength": 3}'))
    assert model.capabilities.constraints == ("regex", "json_schema", "choices")


# -------------------------------------------------------------------------------------------- scores


def test_choices_are_scored_where_the_prompt_is_told():
    with FakeOpenAI(features=VLLM, scores={" yes": -0.5, " no": [-2.0]}) as server:
        model = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key, mode="completion")

        async def run():
            await model.start()
            scored = await model.score(ScoreRequest("1", (Text("Is it?"),), (" yes", " no")))
            await model.close()
            return scored

        scored = asyncio.run(run())
    assert [choice.logprobs for choice in scored.choices] == [(-0.5,), (-2.0,)]
    assert scored.usage.calls == 2


def test_chat_models_score_nothing():
    model = backend(Wire(answer()))
    assert not model.capabilities.score
    with pytest.raises(CapabilityError, match="cannot give scores"):
        asyncio.run(model.score(ScoreRequest("1", conversation(), ("a", "b"))))


# -------------------------------------------------------------------------------------------- before money is spent


def listing(*models: dict[str, object]) -> http.Response:
    return http.Response(200, json={"object": "list", "data": list(models)})


def started(wire: Wire, **options: object) -> ul.OpenAI:
    model = backend(wire, **options)

    async def run() -> None:
        await asyncio.gather(model.start(), model.start())
        await model.close()

    asyncio.run(run())
    return model


def test_a_start_asks_once_who_the_server_is():
    wire = Wire(listing({"id": "gpt-4o", "owned_by": "vllm", "max_model_len": 4096}))
    model = started(wire, base_url="http://127.0.0.1:1/v1")
    assert [request.url.path for request in wire.seen] == ["/v1/models"]
    assert model.capabilities.max_context == 4096
    assert asyncio.run(model.control("info")).result["profile"] == "vllm"


@pytest.mark.parametrize("status", [403, 404, 405])
def test_a_server_without_a_list_is_taken_at_its_word(status):
    assert started(Wire(http.Response(status)), base_url="http://h/v1").capabilities.constraints == ()


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (listing({"id": "gpt-4o-mini"}, {"id": "tts"}), RequestError, r"no model 'gpt-4o'; it has 'gpt-4o-mini'"),
        (listing(), RequestError, "it has none at all"),
        (http.Response(401, json={"error": {"message": "no"}}), RequestError, "refused the key"),
        (http.Response(200, html="<html>"), RequestError, "text/html where a list of models .*ends in /v1"),
        (http.ConnectError("no"), ConnectionLostError, "no connection to http://h, or it was lost; check base_url"),
    ],
)
def test_what_is_wrong_shows_at_the_start(reply, kind, words):
    with pytest.raises(kind, match=words):
        started(Wire(reply), base_url="http://h/v1")


def test_openai_keeps_its_profile_by_name():
    model = started(Wire(listing({"id": "gpt-4o", "owned_by": "someone"})))
    assert model.capabilities.constraints == ("regex", "json_schema", "choices")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": None}, "has no key; write api_key"),
        ({"api_key": 5}, "api_key must be a string, got int"),
        ({"base_url": ""}, "is no address; write one such as"),
        ({"base_url": "api.openai.com"}, "must name a host behind https://"),
        ({"base_url": "https://user:pw@h/v1"}, "an address alone; keys go into api_key="),
        ({"base_url": "http://[h"}, "is no address"),
        ({"base_url": "http://h:port"}, "is no address"),
        ({"mode": "text"}, "write one of 'auto', 'chat', 'completion'"),
        ({"mode": "chat", "chat_template": "x"}, "is for mode='completion'"),
        ({"max_concurrency": 0}, "from 1 to 4096"),
        ({"max_retries": -1}, "from 0 to 20"),
        ({"max_retry": 1}, "no option 'max_retry'; did you mean 'max_retries'"),
        ({"model": ""}, "write the name of a model"),
        ({"extra_body": {"stop": "a"}}, "extra_body sets 'stop'"),
        ({"default_headers": {"a": 1}}, "must be a dict of names to texts"),
        ({"azure_deployment": "d"}, "need azure_endpoint="),
        ({"azure_endpoint": "https://r.openai.azure.com"}, "needs api_version="),
        ({"azure_endpoint": "https://r.openai.azure.com", "base_url": "http://h"}, "name two servers"),
        ({"azure_endpoint": "https://r", "api_version": "1", "api_key": None}, "set AZURE_OPENAI_API_KEY"),
    ],
)
def test_wrong_options_are_refused_when_it_is_made(options, words):
    with pytest.raises(ParameterError, match=words):
        backend(Wire(answer()), **options)


@pytest.mark.parametrize(("model", "mode"), [("gpt-4o", "completion"), ("gpt-3.5-turbo-instruct", "chat")])
def test_a_model_without_the_mode_is_refused_when_it_is_made(model, mode):
    with pytest.raises(CapabilityError, match=f"has no {mode} API; write mode="):
        backend(Wire(answer()), model=model, mode=mode)


def test_the_environment_gives_key_and_address():
    wire = Wire(answer())
    variables = {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "http://there:8/v1/"}
    model = backend(wire, api_key=None, environment=Environment(wire=wire, variables=variables))
    generate(model)
    assert str(wire.seen[0].url) == "http://there:8/v1/chat/completions"
    assert wire.seen[0].headers["authorization"] == "Bearer k"


def test_azure_names_the_deployment_in_the_address():
    for deployment, model in ((None, "my-deployment"), ("my-deployment", "gpt-4o")):
        wire = Wire(answer())
        azure = {"azure_endpoint": "https://r.openai.azure.com/", "api_version": "2024-10-21"}
        generate(backend(wire, model=model, azure_deployment=deployment, **azure))
        url = wire.seen[0].url
        assert url.path == "/openai/deployments/my-deployment/chat/completions"
        assert url.params["api-version"] == "2024-10-21"
        assert wire.seen[0].headers["api-key"] == KEY


def test_its_name_shows_no_key():
    assert repr(backend(Wire(answer()))) == "OpenAI('gpt-4o', host='api.openai.com', mode='chat')"


def test_the_package_may_be_missing(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openai" else find(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'umbel\[openai\]'"):
        ul.OpenAI("gpt-4o", api_key="k")


def test_a_chat_model_warns_once_when_it_is_given_a_text():
    model = backend(Wire(answer(), answer()))
    with pytest.warns(TemplateWarning, match="is a chat model"):
        generate(model, asking((Text("Once"),)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, asking((Text("Once"),)))


# -------------------------------------------------------------------------------------------- the rest of the protocol


def test_controls():
    model = backend(Wire(answer()))
    assert asyncio.run(model.control("info")).result["host"] == "api.openai.com"
    with pytest.raises(CapabilityError, match="cannot empty the provider's cache"):
        asyncio.run(model.control("flush_cache"))
    with pytest.raises(CapabilityError, match="no control verb 'dance'"):
        asyncio.run(model.control("dance"))


def test_a_tokenizer_makes_bounds_tighter(monkeypatch):
    model = started(Wire(listing({"id": "gpt-4o"})))
    loose = model.tokens_at_most(conversation("a " * 500))
    encoding = types.SimpleNamespace(encode_ordinary=str.split)
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(encoding_for_model=lambda name: encoding))
    model = started(Wire(listing({"id": "gpt-4o"})))
    assert 500 < model.tokens_at_most(conversation("a " * 500)) < loose


def test_calls_at_once_are_bounded():
    running = most = 0
    full = asyncio.Event()  # as many run as may: until then nobody is answered

    class Counting(http.AsyncBaseTransport):
        async def handle_async_request(self, request):
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                full.set()
            await asyncio.wait_for(full.wait(), PATIENCE)
            await asyncio.sleep(0)
            running -= 1
            return answer()

    model = backend(Counting(), max_concurrency=3)

    async def run():
        async def one():
            return [each async for each in model.generate(asking())]

        await asyncio.gather(*(one() for _ in range(12)))
        await model.close()

    asyncio.run(run())
    assert most == 3


def test_a_deadline_holds_also_for_calls_that_wait_for_their_turn():
    wire = Wire(lambda: streamed(event("One"), None))
    model = backend(wire, max_concurrency=1)

    async def run():
        first = model.generate(asking(stream=True))
        await anext(first)
        with pytest.raises(DeadlineError, match="did not end in its time"):
            await anext(model.generate(asking(origin=Origin(timeout=0.02))))
        await first.aclose()
        await model.close()

    asyncio.run(run())
    assert len(wire.seen) == 1


def test_every_loop_has_a_client_of_its_own_and_a_closed_backend_opens_again():
    wire = Wire(answer)
    model = backend(wire)
    results = []

    async def one():
        results.extend([event async for event in model.generate(asking())])

    threads = [threading.Thread(target=asyncio.run, args=(one(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2):
        results.append(generate(model)[1])
    assert [final.completions[0].text for final in results] == ["Paris."] * 5


def test_leaving_early_closes_the_connection():
    pieces = Pieces([event("One"), event(" two"), None])
    wire = Wire(http.Response(200, headers={"content-type": "text/event-stream"}, stream=pieces))

    async def run():
        model = backend(wire)
        events = model.generate(asking(stream=True))
        await anext(events)
        await events.aclose()
        await model.close()

    asyncio.run(run())
    assert pieces.closed


def test_errors_of_ours_are_not_blamed_on_the_server(monkeypatch):
    model = backend(Wire(answer()))
    monkeypatch.setattr("umbel.interpreter.backends.hosted.openai.answers._whole", None)
    with pytest.raises(TypeError):
        generate(model)


def test_a_stream_of_nothing_is_an_error():
    with pytest.raises(BackendError, match="its end never came"):
        generate(backend(Wire(streamed(DONE))), asking(stream=True))


def prompt_scored(server, **options):
    @ul.function
    def program(s):
        s += "One two three"
        s += ul.gen("nothing", max_tokens=0, return_logprob=True, logprob_start_len=1)

    return program.run(backend=ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key, **options))


def test_log_probabilities_of_a_prompt_alone_are_told_where_the_server_has_them():
    with FakeOpenAI(features=VLLM) as server:
        state = prompt_scored(server, profile="vllm", mode="completion")
        assert [text for *_, text in state.get_meta_info("nothing")["input_token_logprobs"]] == [" two", " three"]
        assert state.usage.prompt_tokens == server.usage.prompt_tokens > 0


@pytest.mark.parametrize(("profile", "mode"), [("vllm", "chat"), ("compatible", "completion"), ("openai", "chat")])
def test_log_probabilities_of_a_prompt_alone_are_refused_elsewhere(profile, mode):
    with FakeOpenAI(features=VLLM) as server:
        with pytest.raises(CapabilityError, match="prompt_logprobs_from"):
            prompt_scored(server, profile=profile, mode=mode).sync()
        assert not server.requests
