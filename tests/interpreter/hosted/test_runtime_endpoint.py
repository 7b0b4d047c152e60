"""A model behind the address of a server: SGLang's own API, and any server of the OpenAI dialect."""

import asyncio
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
import umbel.compat.sglang as sgl
from umbel.compat.sglang.lang.chat_template import get_chat_template
from umbel.interpreter.backends.hosted.errors import Provider
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.sglang.endpoint import _IMAGE_TOKENS, _MODELS, named_template, template_name_of
from umbel.interpreter.backends.hosted.sglang.wire import Reader
from umbel.interpreter.fakes.server import Exchange, HttpRequest, at_once
from umbel.lang.chat_template import CHATML, chat_template_by_name
from umbel.lang.prompt import Text
from umbel.lang.protocol import Hint
from umbel.lang.templates.formats import NAMES
from umbel.testing import LLAMA_CPP, VLLM, FakeOpenAI, FakeSGLang, Fault

PICTURE = b"\x89PNG\r\n\x1a\n" + b"\0" * 16


@ul.function
def answer(s, question):
    s += "Q: " + question + "\nA:" + ul.gen("answer", stop="\n", max_tokens=12)


@ul.function
def choose(s, method=None):
    s += "The answer is" + ul.select("choice", [" yes", " no", " not at all"], choices_method=method)


def endpoint(fake: FakeOpenAI, **options: object) -> ul.RuntimeEndpoint:
    return ul.RuntimeEndpoint(fake.address, api_key=fake.api_key, **options)


# ------------------------------------------------------------------------------------------- who the server is


def test_an_sglang_server_is_asked_by_its_own_api():
    with FakeSGLang(lambda text: " Paris\n") as server:
        model = endpoint(server)
        assert answer.run("Capital of France?", backend=model)["answer"] == " Paris"
        assert [asked.path for asked in server.requests] == ["/generate"]
        assert server.requests[0].body["sampling_params"]["stop"] == ["\n"]
        assert (model.model, model.capabilities.name) == (server.models[0], f"sglang {server.models[0]}")


@pytest.mark.parametrize("address", ["", "/", "/v1", "/v1/"])
def test_another_server_is_asked_by_the_openai_dialect(address: str):
    with FakeOpenAI(lambda text: " Paris\n", models=["local-7b"]) as server:
        model = ul.RuntimeEndpoint(server.address + address, api_key=server.api_key)
        assert answer.run("Capital of France?", backend=model)["answer"] == " Paris"
        assert [asked.path for asked in server.requests] == ["/v1/completions"]
        assert model.model == "local-7b"


# ------------------------------------------------------------------------------------------- routing keys


class KeyedSGLang(FakeSGLang):
    """Keeps the header that a gateway routes by."""

    keys: list[str | None]

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.path == "/generate":
            self.keys.append(request.headers.get("x-smg-routing-key"))
        await super()._respond(request, exchange)


class KeyedOpenAI(FakeOpenAI):
    """Keeps the header that a gateway routes by."""

    keys: list[str | None]

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        if request.path == "/v1/completions":
            self.keys.append(request.headers.get("x-smg-routing-key"))
        await super()._respond(request, exchange)


@ul.function
def advise(s, scored):
    s += "Tips: " + ul.gen("plan", max_tokens=4, stop="\n")
    branches = s.fork(3)
    for branch in branches:
        branch += " more: " + ul.gen("more", max_tokens=4, stop="\n")
        if scored:
            branch += ul.select("kind", ["a", "b"])
    branches.join()
    s += " end: " + ul.gen("end", max_tokens=4, stop="\n")


@pytest.mark.parametrize("fake", [KeyedSGLang, KeyedOpenAI])
def test_the_calls_of_a_fork_carry_one_routing_key(fake: type[KeyedSGLang] | type[KeyedOpenAI]):
    def keys(model: ul.RuntimeEndpoint) -> list[str | None]:
        fake.keys = []
        assert advise.run(fake is KeyedSGLang, backend=model)["end"] == " x"
        return fake.keys

    with fake(lambda text: " x\n", scores={"a": -1.0, "b": -2.0}) as server:
        model = endpoint(server, routing_key_header="X-SMG-Routing-Key")
        first, *forked, last = keys(model)
        assert first is last is None, "calls of no fork go where their prefix is"
        assert len(set(forked)) == 1
        assert forked[0] is not None
        assert len(forked) >= 3
        assert forked[0] not in keys(model), "another run is another group"
        assert set(keys(endpoint(server))) == {None}


def test_a_routing_key_header_is_the_name_of_a_header():
    with pytest.raises(ul.ParameterError, match="no name of a header"):
        ul.RuntimeEndpoint("http://127.0.0.1:9", routing_key_header="two words")
    with pytest.raises(ul.ParameterError, match="no name of a header"):
        ul.OpenAI("m", base_url="http://127.0.0.1:9", api_key="k", routing_key_header=7)


# ------------------------------------------------------------------------------------------- gateways


class Gateway(FakeOpenAI):
    """A server of the OpenAI dialect behind a gateway that answers all other paths with one status."""

    def __init__(self, status: int) -> None:
        super().__init__(lambda text: " Paris\n", models=["local-7b"])
        self.status, self.asked = status, list[str]()

    async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
        self.asked.append(request.path)
        if request.path.startswith("/v1/"):
            await super()._respond(request, exchange)
        else:
            await exchange.respond(self.status, {"content-type": "application/json"}, b'{"error": "who are you?"}')


AT_ONCE = Environment(sleep=lambda seconds: asyncio.sleep(0))


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 408, 410, 418, 422, 429, 500, 501, 502, 503, 504, 529])
@pytest.mark.parametrize("named", [None, "local-7b"])
@pytest.mark.sampled(4)
def test_a_gateway_that_refuses_unknown_paths_is_asked_by_the_openai_dialect(status: int, named: str | None):
    with Gateway(status) as server:
        model = endpoint(server, model=named, environment=AT_ONCE)
        assert answer.run("Capital of France?", backend=model)["answer"] == " Paris"
        assert server.asked.count("/get_model_info") == (4 if status in (408, 429, 503, 529) else 1)


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_is_said_to_be_sglang_keeps_its_refusal(status: int):
    with Gateway(status) as server, pytest.raises(ul.BackendError, match=str(status)):
        answer.run("?", backend=endpoint(server, server="sglang", environment=AT_ONCE)).sync()


def test_an_sglang_server_that_is_busy_is_not_taken_for_another():
    class Starting(FakeSGLang):
        async def _respond(self, request: HttpRequest, exchange: Exchange) -> None:
            if busy:
                await exchange.respond(busy.pop(), {}, b"{}")
            else:
                await super()._respond(request, exchange)

    busy = [503, 429]
    with Starting(lambda text: " Paris\n") as server:
        assert answer.run("?", backend=endpoint(server, environment=AT_ONCE))["answer"] == " Paris"
        assert [asked.path for asked in server.requests] == ["/generate"]


def test_a_wrong_key_at_an_sglang_server_is_told():
    with FakeSGLang() as server, pytest.raises(ul.RequestError, match="check api_key="):
        answer.run("?", backend=ul.RuntimeEndpoint(server.address, api_key="wrong-key-1234")).sync()


def test_an_sglang_server_may_be_asked_by_the_openai_dialect():
    with FakeSGLang(lambda text: " Paris\n") as server:
        assert answer.run("Capital?", backend=endpoint(server, server="openai"))["answer"] == " Paris"
        assert [asked.path for asked in server.requests] == ["/v1/completions"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"server": "sglang"}, ul.RequestError, "server='openai'"),
        ({"model": "another"}, ul.RequestError, "no model 'another'"),
        ({"api_key": "wrong-key-1234"}, ul.RequestError, "check api_key="),
    ],
)
def test_a_wrong_server_model_or_key_is_said_before_anything_is_generated(options, error, message):
    with FakeOpenAI(lambda text: "x", models=["local-7b"]) as server:
        model = ul.RuntimeEndpoint(server.address, **{"api_key": server.api_key, **options})
        with pytest.raises(error, match=message) as raised:
            answer.run("Why?", backend=model).sync()
    assert "wrong-key-1234" not in str(raised.value)
    assert not server.requests


def test_a_model_that_the_server_does_not_have_is_refused():
    with FakeSGLang() as server, pytest.raises(ul.RequestError, match="not 'another'"):
        answer.run("Why?", backend=endpoint(server, model="another")).sync()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "vllm"}, "write one of 'auto', 'umbel', 'sglang', 'openai'"),
        ({"image_token": ""}, "image_token"),
        ({"model": ""}, "the name of one of the server's models"),
        ({"profile": "vlm"}, "did you mean 'vllm'"),
        ({"extra_body": {"text": "x"}}, "extra_body sets 'text'"),
        ({"extra_body": {"sampling_params": 3}}, "must be a dict"),
        ({"templates": 1}, "has no option 'templates'"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ul.ParameterError, match=message):
        ul.RuntimeEndpoint("http://127.0.0.1:1", **options)


@pytest.mark.parametrize("address", ["127.0.0.1:30000", "ftp://x", "", "http://me:secret@host", 3, None])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ul.ParameterError) as raised:
        ul.RuntimeEndpoint(address)
    assert "secret" not in str(raised.value)


def test_keys_of_the_environment_go_to_no_endpoint(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    with FakeOpenAI(lambda text: "x", models=["m"]) as server:
        with pytest.raises(ul.RequestError, match="refused the key"):
            answer.run("Why?", backend=ul.RuntimeEndpoint(server.address)).sync()
        assert not server.requests


# ------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("incremental", [False, True])
def test_streamed_pieces_add_up_and_never_hold_a_stop(incremental: bool):
    with FakeSGLang(lambda text: " one two\n\nthree", incremental=incremental) as server:

        @ul.function
        def program(s):
            s += "Count:" + ul.gen("counted", stop="\n\n", max_tokens=20)

        state = program.run(backend=endpoint(server), stream=True)
        assert "".join(state.text_iter("counted")) == state["counted"] == " one two"
        assert state.get_meta_info("counted")["matched_stop"] == "\n\n"


def read(events: list[tuple[str, str | None]], *, incremental: bool) -> str:
    """The text of events (text, matched stop at the end)."""
    reader = Reader(("\n\n",), 1, incremental=incremental)
    provider = Provider("test", "host", "", ())
    pieces = []
    for text, matched in events:
        finish = {"type": "stop", "matched": matched} if matched is not None else None
        piece = reader({"text": text, "meta_info": {"finish_reason": finish}}, provider)
        pieces.append(piece.choices[0].text or "")
    return "|".join(pieces)


def test_a_stop_that_the_server_takes_back_is_not_given_out():
    assert read([("a", None), ("a\n", None), ("a", "\n\n")], incremental=False) == "a||"
    assert read([("a", None), ("a\n", None), ("a\nb", None), ("a\nb", "x")], incremental=False) == "a||\nb|"
    assert read([("a", None), ("\n", None), ("b", None), ("", "x")], incremental=True) == "a||\nb|"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": 3}, "no answer of /generate"),
        ("a page", "no answer of /generate"),
        ({"text": "", "index": 7, "meta_info": {}}, "more than 1 continuations"),
        ({"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "out of memory"}}}, "out of memory"),
    ],
)
def test_what_is_no_answer_is_an_error(data, message):
    with pytest.raises(ul.BackendError, match=message):
        Reader((), 1, incremental=False)(data, Provider("test", "host", "", ()))


def test_log_probabilities_are_told_of_prompt_and_text():
    @ul.function
    def program(s):
        s += "One two three"
        s += ul.gen("nothing", max_tokens=0, return_logprob=True, logprob_start_len=0)
        s += ul.gen("text", max_tokens=2, return_logprob=True, top_logprobs_num=2)

    with FakeSGLang(lambda text: " four five six") as server:
        state = program.run(backend=endpoint(server))
        told = state.get_meta_info("nothing")["input_token_logprobs"]
        assert "".join(text for _, _, text in told) == "One two three"
        assert state["nothing"] == ""
        meta = state.get_meta_info("text")
        assert [text for _, _, text in meta["output_token_logprobs"]] == [" four", " five"]
        assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2]


def test_n_continuations_are_one_call():
    with FakeSGLang([[" a b", " c d"]]) as server:

        @ul.function
        def program(s):
            s += "Say:" + ul.gen("said", n=2, max_tokens=4)

        assert program.run(backend=endpoint(server))["said"] == [" a b", " c d"]
        assert len(server.requests) == 1


def test_roles_are_written_by_the_template_of_the_models_family():
    @ul.function
    def program(s):
        s += ul.user("Hi") + ul.assistant(ul.gen("x", max_tokens=1))

    with FakeSGLang(lambda text: "yes", model="meta-llama/Llama-3.1-8B-Instruct") as server:
        program.run(backend=endpoint(server)).sync()
        assert server.requests[0].text.endswith("Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    with FakeSGLang(lambda text: "yes", model="nobody/knows-it") as server, pytest.warns(ul.TemplateWarning):
        program.run(backend=endpoint(server)).sync()
    with FakeSGLang(lambda text: "yes", model="nobody/knows-it") as server:
        for template in (named_template("gemma-it"), "gemma-it"):
            program.run(backend=endpoint(server, chat_template=template)).sync()
            assert server.requests[-1].text == "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Who? "},
    {"role": "assistant", "content": "Ada."},
    {"role": "user", "content": "When?"},
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(4)
def test_a_name_gives_one_prompt_and_no_process_wherever_it_is_written(name: str, monkeypatch: pytest.MonkeyPatch):
    expected = chat_template_by_name(name).render(CONVERSATION, add_generation_prompt=True)
    chat = "http://127.0.0.1:9"
    made = {
        "named": named_template(name),
        "endpoint": ul.RuntimeEndpoint(chat, chat_template=name).chat_template,
        "openai": ul.OpenAI("m", base_url=chat, chat_template=name, mode="completion").chat_template,
        "frame": get_chat_template(name),
        "frame's endpoint": sgl.RuntimeEndpoint(chat, chat_template_name=name).chat_template,
        "frame's openai": sgl.OpenAI("m", False, name, base_url=chat).chat_template,
        "frame's runtime": sgl.Runtime(model_path="oracle", chat_template=name).chat_template,
    }
    monkeypatch.setattr(subprocess, "Popen", None)  # a template that is ours is rendered here
    for where, template in made.items():
        assert template.render(CONVERSATION, add_generation_prompt=True) == expected, where
        assert not template.is_foreign, where


def test_a_file_is_a_template_at_every_endpoint(tmp_path: Path):
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    chat = "http://127.0.0.1:9"
    for given in (file, str(file)):
        for model in (ul.RuntimeEndpoint(chat, chat_template=given), sgl.OpenAI("m", False, given, base_url=chat)):
            assert model.chat_template.source == CHATML


def test_the_template_of_every_known_family_is_there():
    for _, name in _MODELS:
        assert name in NAMES
    assert set(_IMAGE_TOKENS) <= set(NAMES)


def test_an_unknown_template_name_is_an_error():
    with pytest.raises(ul.ParameterError, match="got int"):
        ul.RuntimeEndpoint("http://127.0.0.1:1", chat_template=3)
    for make in (named_template, lambda name: ul.RuntimeEndpoint("http://127.0.0.1:1", chat_template=name)):
        with pytest.raises(ul.TemplateError, match="did you mean 'chatml'"):
            make("chat-ml")
    for call in (named_template, template_name_of):
        for wrong in (3, None, ["chatml"], "x" * 5000):
            with pytest.raises(ul.ParameterError):
                call(wrong)


def test_pictures_travel_beside_the_text():
    @ul.function
    def program(s):
        s += ul.user(ul.image(PICTURE) + "What is it?") + ul.assistant(ul.gen("x", max_tokens=1))

    with FakeSGLang(lambda text: "sun", model="Qwen/Qwen2-VL-7B-Instruct") as server:
        program.run(backend=endpoint(server)).sync()
        body = server.requests[0].body
        assert body["text"].count("<|vision_start|><|image_pad|><|vision_end|>") == 1
        assert [each[:22] for each in body["image_data"]] == ["data:image/png;base64,"]


# ------------------------------------------------------------------------------------------- constraints


@pytest.mark.parametrize(
    ("options", "said", "field"),
    [
        ({"regex": "[a-c]+"}, "abc", "regex"),
        ({"json_schema": '{"type": "integer"}'}, "12", "json_schema"),
        ({"ebnf": 'root ::= "a" [bc]+'}, "abc", "ebnf"),
        ({"dtype": bool}, "True", "regex"),
    ],
)
def test_constraints_are_the_servers(options, said, field):
    @ul.function
    def program(s):
        s += "Say: " + ul.gen("x", **options)

    with FakeSGLang(lambda text: said) as server:
        state = program.run(backend=endpoint(server))
        assert state["x"] == said
        assert field in server.requests[0].body["sampling_params"]
        assert state.get_meta_info("x")["guarantee"] == "enforced"


def test_what_the_server_does_not_enforce_is_validated_here():
    @ul.function
    def program(s):
        s += "Say: " + ul.gen("x", ebnf='start: "a" "b"+', temperature=1)

    with FakeSGLang([["no"], ["abb"]]) as server:
        state = program.run(backend=endpoint(server))
        assert (state["x"], state.get_meta_info("x")["guarantee"]) == ("abb", "validated")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_regex": "a+"}, "no stop_regex"),
        ({"regex": "a", "token_healing": True}, "token_healing"),
        ({"seed": 3}, "--enable-deterministic-inference"),
    ],
)
def test_what_the_server_would_drop_is_refused(options, message):
    @ul.function
    def program(s):
        s += "Say: " + ul.gen("x", **options)

    with FakeSGLang(lambda text: "a", deterministic=False) as server:
        with pytest.raises(ul.CapabilityError, match=message):
            program.run(backend=endpoint(server)).sync()
        assert not server.requests


# ------------------------------------------------------------------------------------------- choices

SCORES = {" yes": -1.0, " no": -0.25, " not at all": [-2.0, -0.1, -0.1]}


@pytest.mark.parametrize(("features", "native"), [(VLLM, False), (VLLM, True)], ids=["openai dialect", "sglang"])
def test_choices_are_scored_by_the_prompts_log_probabilities(features, native):
    with FakeSGLang(scores=SCORES, native=native, features=features) as server:
        state = choose.run(backend=endpoint(server))
        assert state["choice"] == " no"
        scores = state.get_meta_info("choice")["choice_scores"]
        assert scores == pytest.approx({" yes": -1.0, " no": -0.25, " not at all": -2.2 / 3})
        assert choose.run("greedy_token_selection", backend=endpoint(server))["choice"] == " no"


def test_scores_without_the_prompt_stand_behind_the_token_that_begins_texts():
    with FakeSGLang(scores=SCORES) as server:
        state = choose.run("unconditional_likelihood_normalized", backend=endpoint(server))
        meta = state.get_meta_info("choice")
        assert [len(values) for values in meta["unconditional_token_logprobs"]] == [1, 1, 3]
        assert all(math.isfinite(value) for value in meta["choice_scores"].values())
        assert server.requests[-1].body["input_ids"][0][0] == 1


def test_a_choice_that_shares_a_token_with_the_prompt_is_counted_from_that_token():
    @ul.function
    def program(s):
        s += "The cat is call" + ul.select("end", ["ed Tom", "ing"])

    with FakeSGLang(scores={"ed Tom": [-3.0, -1.0], "ing": -0.5}) as server:
        meta = program.run(backend=endpoint(server)).get_meta_info("end")
        told = [[token[0] for token in choice] for choice in meta["input_token_logprobs"]]
        assert told == [[-3.0, -1.0], [-0.5]]


def test_a_server_without_scores_generates_one_of_the_choices():
    with FakeOpenAI(lambda text: " no", features=LLAMA_CPP, models=["m"]) as server:
        state = choose.run(backend=endpoint(server))
        assert state["choice"] == " no"
        assert state.get_meta_info("choice")["choices_method"] == "generated"


@pytest.mark.parametrize("method", ["overshoot", "exact"])
def test_probabilities_over_all_tokens_are_refused(method: str):
    with FakeSGLang(scores=SCORES) as server, pytest.raises(ul.CapabilityError, match="Runtime"):
        choose.run(method, backend=endpoint(server)).sync()


# ------------------------------------------------------------------------------------------- the server itself


def test_the_cache_is_flushed_and_the_server_tells_of_itself():
    with FakeSGLang(lambda text: " x") as server:
        model = endpoint(server)
        first, second = (answer.run("Why?", backend=model) for _ in range(2))
        second.sync()
        assert (first.usage.cached_tokens, second.usage.cached_tokens > 0) == (0, True)
        ul.flush_cache(model)
        assert server.flushes == 1
        third = answer.run("Why?", backend=model)
        third.sync()
        assert third.usage.cached_tokens == 0
        assert ul.get_server_info(model)["model_path"] == server.models[0]


def test_the_prefix_of_a_fork_is_computed_ahead():
    @ul.function
    def program(s):
        s += "A long beginning. "
        forks = s.fork(2)
        forks += ul.gen("x", max_tokens=2)
        forks.join()

    with FakeSGLang(lambda text: "a b") as server:
        assert program.run(backend=endpoint(server))["x"] == ["a b", "a b"]
        ahead = [asked.body for asked in server.requests if asked.body["sampling_params"]["max_new_tokens"] == 0]
        assert [body["text"] for body in ahead] == ["A long beginning. "]


@pytest.mark.parametrize("fault", [Fault.RATE_LIMIT_AND_WHEN, Fault.SERVER_ERROR, Fault.DISCONNECT])
def test_what_fails_before_an_answer_is_tried_again(fault: Fault):
    with FakeSGLang(lambda text: " x\n", faults=[fault], retry_after="0") as server:
        assert answer.run("Why?", backend=endpoint(server))["answer"] == " x"
        assert len(server.requests) == 2


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.ERROR_EVENT, Fault.NO_DONE, Fault.SPLIT_UTF8, Fault.SPLIT_JSON])
def test_a_stream_that_breaks_is_an_error_or_whole(fault: Fault):
    with FakeSGLang(lambda text: " één twee drie vier", faults=[fault]) as server:
        state = answer.run("Why?", backend=endpoint(server), stream=True)
        try:
            assert state["answer"] == " één twee drie vier"
        except ul.BackendError:
            assert fault in (Fault.CUT, Fault.ERROR_EVENT, Fault.NO_DONE)
        else:
            assert fault not in (Fault.CUT, Fault.ERROR_EVENT)


def test_nobody_there_is_an_error_that_says_so():
    with FakeSGLang() as server:
        address = server.address
    with pytest.raises(ul.ConnectionLostError, match="check base_url"):
        answer.run("Why?", backend=ul.RuntimeEndpoint(address, max_retries=0)).sync()


def test_hints_end_with_the_endpoint():
    async def run() -> None:
        model = endpoint(server)
        await model.start()
        model.hint(Hint("h", (Text("A long beginning."),)))
        await model.close()
        assert len(asyncio.all_tasks()) == 1

    with FakeSGLang(faults=[Fault.SILENCE]) as server:
        asyncio.run(run())


class Hostile(FakeSGLang):
    """A server that answers with something else."""

    def __init__(self, listing: object = None, told: object = None) -> None:
        super().__init__(lambda text: "x")
        self._told_instead, self._listing_instead = told, listing

    def _listing(self, path: str) -> object | None:
        return super()._listing(path) if self._listing_instead is None else self._listing_instead

    def _answered(self, question: Any, text: str) -> Any:
        answered = super()._answered(question, text)
        return answered if self._told_instead is None else replace(answered, events=at_once(self._told_instead))


@pytest.mark.parametrize(
    "told",
    [
        [],
        [{"text": "x"}] * 3,
        {"text": "x"},
        {"meta_info": {"prompt_tokens": -1}},
        {"text": "x", "meta_info": {"finish_reason": {"type": "nonsense"}}},
        {"text": "x" * 100_000, "meta_info": {"finish_reason": {"type": "stop"}}},
        {"error": {"message": "m" * 100_000}},
        {"meta_info": {"input_token_logprobs": [[None, 1, "a"]] * 50, "prompt_tokens": 2}},
        "text",
        7,
        [None],
    ],
)
@pytest.mark.sampled(4)
def test_an_answer_that_is_none_is_an_error_of_ours(told: object):
    with Hostile(told=told) as server:
        for program in (answer, choose):
            with pytest.raises(ul.UmbelError) as raised:
                program.run(*(["Why?"] if program is answer else []), backend=endpoint(server)).sync()
            assert len(str(raised.value)) < 2_000


@pytest.mark.parametrize("listing", [{"model_path": "m" * 100_000, "context_length": True}, {"model_path": 3}, [], "x"])
def test_facts_that_are_none_do_no_harm(listing: object):
    with Hostile(listing=listing) as server:
        model = endpoint(server)
        error = answer.run("Why?", backend=model).error()  # a server without a model's path is asked by /v1
        assert error is None or (isinstance(error, ul.UmbelError) and len(str(error)) < 2_000)
        assert model.capabilities.max_context is None
        assert len(model.capabilities.name) < 200
