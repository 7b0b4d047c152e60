"""Providers that are reached by clients of their own: LiteLLM, and Google's for Gemini models."""

import asyncio
import gc
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import umbel as ul
import umbel.compat.sglang as sgl
from umbel.interpreter import loop
from umbel.interpreter.backends.hosted.openai.wire import ProviderError
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.fakes.server import Exchange, HttpRequest, Server
from umbel.lang.protocol import ConstraintSpec
from umbel.testing import FakeOpenAI

from ... import conformance

PICTURE = b"\x89PNG\r\n\x1a\n" + b"\0" * 16


@ul.function
def ask(s, question):
    s += ul.system("Be brief.") + ul.user(question)
    s += ul.assistant(ul.gen("answer", max_tokens=8, stop="."))


@ul.function
def decide(s):
    s += ul.user("Sure?") + ul.assistant(ul.select("sure", ["yes", "no"]))


# ------------------------------------------------------------------------------------------- LiteLLM


class Dumped:
    """An object of LiteLLM's."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def model_dump(self, **options: object) -> dict[str, Any]:
        return self._data


class FakeLibrary(ModuleType):
    """What is used of the package. `said`: answers (texts, or lists of calls), or errors, in order."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__("litellm")
        self.__spec__ = importlib.machinery.ModuleSpec("litellm", None)
        self.said, self.asked = said, []
        self.parameters = ["tools", "tool_choice"]

    def get_supported_openai_params(self, model: str) -> list[str]:
        if not model.startswith(("mistral/", "x/", "a/", "openai/")):
            raise ValueError("LLM Provider NOT provided")
        return self.parameters

    def supports_function_calling(self, model: str) -> bool:
        return model == "mistral/large"

    async def acompletion(self, **asked: Any) -> Any:
        self.asked.append(asked)
        answer = self.said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        if asked.get("stream"):
            return self._pieces(answer, usage)
        called = isinstance(answer, list)
        message = {"content": None, "tool_calls": answer} if called else {"content": answer}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if called else "stop"}
        return Dumped({"choices": [choice], "usage": usage})

    async def _pieces(self, answer: str, usage: dict[str, int]) -> AsyncIterator[Dumped]:
        for word in answer.split(" "):
            yield Dumped({"choices": [{"index": 0, "delta": {"content": word + " "}}]})
        yield Dumped({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary([])
    monkeypatch.setitem(sys.modules, "litellm", fake)
    return fake


def test_litellm_is_asked_with_messages_and_without_retries_of_its_own(library: FakeLibrary):
    library.said[:] = ["Paris"]
    model = ul.LiteLLM("mistral/large", api_key="key-of-mistral", extra_body={"metadata": {"a": 1}})
    state = ask.run("Capital?", backend=model)
    assert (state["answer"], state.usage.prompt_tokens, state.usage.completion_tokens) == ("Paris", 5, 2)
    (asked,) = library.asked
    assert asked["model"] == "mistral/large"
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert (asked["num_retries"], asked["api_key"], asked["metadata"]) == (0, "key-of-mistral", {"a": 1})
    assert (asked["max_tokens"], asked["stop"]) == (8, ["."])


def test_litellm_streams(library: FakeLibrary):
    library.said[:] = ["one two three"]
    state = ask.run("Count", backend=ul.LiteLLM("x/y"), stream=True)
    assert "".join(state.text_iter("answer")) == state["answer"] == "one two three "


def test_constraints_at_litellm_are_validated(library: FakeLibrary):
    library.said[:] = ["perhaps", "no"]
    state = decide.run(backend=ul.LiteLLM("x/y"))
    assert (state["sure"], state.get_meta_info("sure")["tries"]) == ("no", 2)


@ul.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@ul.function
def agent(s, **options):
    s += ul.user("1 + 2?")
    return s.call_tools([add], "answer", **options)


def called(**arguments: int) -> dict[str, Any]:
    """A call of `add`, in OpenAI's words."""
    return {"id": "x", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize("takes_parallel", [False, True])
def test_a_model_at_litellm_that_calls_tools_gets_them_in_fields(library: FakeLibrary, takes_parallel: bool):
    library.said[:] = [[called(a=1, b=2), called(a=3, b=4)], "3."]
    library.parameters += ["parallel_tool_calls"] * takes_parallel
    model = ul.LiteLLM("mistral/large")
    result = agent.run(backend=model, tool_choice="required", parallel=False).ret_value
    assert (result.answer, [run.result for run in result.calls]) == ("3.", ["3"])  # the second one is left out
    first, second = library.asked
    assert first["tools"][0]["function"]["name"] == "add"
    assert (first["tool_choice"], second["tool_choice"]) == ("required", "auto")
    assert ("parallel_tool_calls" in first) is takes_parallel
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "call00001", "content": "3"}


@pytest.mark.parametrize("name", ["x/y", "unknown"])
def test_a_model_that_litellm_does_not_know_gets_tools_as_text(library: FakeLibrary, name: str):
    library.said[:] = [add.spelled(a=1, b=2), "3."]
    assert agent.run(backend=ul.LiteLLM(name)).ret_value.calls[0].result == "3"
    assert "tools" not in library.asked[0]


class Refusal(Exception):
    """An exception of the library, by shape."""

    __module__ = "litellm.exceptions"

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status_code, self.body = status, {"error": {"message": said}}


def test_errors_of_litellm_are_ours_and_hold_no_key(library: FakeLibrary):
    library.said[:] = [Refusal(500, "down"), "up"]
    clock = ul.LiteLLM("x/y", api_key="sk-secret-key-1")
    assert ask.run("?", backend=clock)["answer"] == "up"
    library.said[:] = [Refusal(401, "wrong key sk-secret-key-1")]
    with pytest.raises(ul.RequestError, match="refused the key") as raised:
        ask.run("?", backend=clock).sync()
    assert "sk-secret-key-1" not in str(raised.value)
    library.said[:] = [RuntimeError("a mistake")]
    with pytest.raises(RuntimeError, match="a mistake"):
        ask.run("?", backend=clock).sync()


@pytest.mark.parametrize(
    ("make", "extra"), [(lambda: ul.LiteLLM("a/b"), "litellm"), (lambda: ul.VertexAI("m", project="p"), "vertexai")]
)
def test_a_package_that_is_not_installed_is_named(make, extra, monkeypatch):
    find = importlib.util.find_spec
    hidden = ("litellm", "google", "google.genai")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else find(name, *more))
    with pytest.raises(ul.MissingExtraError, match=rf"pip install 'umbel\[{extra}\]'"):
        make()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ul.LiteLLM("a/b"), "LiteLLM"),
        (lambda: ul.VertexAI("m", client=Gemini([])), "VertexAI"),
        (lambda: ul.Gemini("m", client=Gemini([])), "Gemini"),
        (lambda: ul.OpenAI("m", base_url="http://127.0.0.1:9"), "OpenAI"),
        (lambda: ul.Anthropic("claude-haiku-4-5", api_key="k-1234567"), "Anthropic"),
        (lambda: ul.RuntimeEndpoint("http://127.0.0.1:9"), "RuntimeEndpoint"),
    ],
)
def test_a_backend_is_shown_under_its_own_name(make, name: str, library: FakeLibrary):
    assert repr(make()).startswith(f"{name}(")


def test_wrong_options_are_refused(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    for make, message in (
        (lambda: ul.LiteLLM("a/b", keys="x"), "LiteLLM\\(\\) has no option 'keys'"),
        (lambda: ul.LiteLLM("a/b", azure_endpoint="https://x"), "no option 'azure_endpoint'"),
        (lambda: ul.VertexAI("m", client=Gemini([]), organization="x"), "no option 'organization'"),
        (lambda: ul.LiteLLM("a/b", profile="vllm"), "Profile"),
        (lambda: ul.LiteLLM(""), "LiteLLM\\(\\): model=''"),
        (lambda: ul.VertexAI("m"), "project='my-project'"),
        (lambda: ul.Gemini("m", environment={}), "set GEMINI_API_KEY or GOOGLE_API_KEY"),
        (lambda: ul.Gemini("m", client=Gemini([]), thinking_budget=-2), "thinking_budget"),
        (lambda: ul.VertexAI("m", client=Gemini([]), safety_settings=["x"]), "safety_settings"),
        (lambda: ul.VertexAI("m", client=Gemini([]), projects="x"), "VertexAI\\(\\) has no option 'projects'"),
    ):
        with pytest.raises(ul.ParameterError, match=message):
            make()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *(("timeout", "first_byte_timeout="), ("num_retries", "max_retries="), ("max_retries", "max_retries=")),
        *(
            ("drop_params", "leave it out"),
            ("api_key", "api_key="),
            ("base_url", "base_url="),
            ("api_base", "base_url="),
        ),
        *(("extra_headers", "default_headers="), ("headers", "default_headers=")),
    ],
)
@pytest.mark.parametrize("make", [ul.LiteLLM, sgl.LiteLLM])
def test_arguments_of_litellm_that_are_set_here_are_refused(make, name, instead, library: FakeLibrary):
    with pytest.raises(ul.ParameterError, match=instead) as raised:
        make("a/b", extra_body={name: "sk-secret-key-1"})
    assert "sk-secret-key-1" not in str(raised.value)


def test_every_argument_that_litellm_is_called_with_is_reserved(library: FakeLibrary):
    library.said[:] = ["x", "x"]
    model = ul.LiteLLM("a/b", api_key="k", base_url="http://127.0.0.1:9", default_headers={"x-a": "b"})
    for streams in (False, True):
        assert ask.run("?", backend=model, stream=streams)["answer"]
    for body in library.asked:
        for name in body.keys() - {"max_tokens", "max_completion_tokens", "temperature", "top_p"}:
            with pytest.raises(ul.ParameterError):
                ul.LiteLLM("a/b", extra_body={name: 1})


def test_the_real_litellm_asks_a_server_of_the_openai_dialect():
    pytest.importorskip("litellm", reason="litellm is not installed here")
    with FakeOpenAI(lambda text: "Paris. It is") as server:
        model = ul.LiteLLM("openai/gpt-4o", api_key=server.api_key, base_url=server.base_url)
        state = ask.run("Capital?", backend=model)
        assert (state["answer"], server.calls) == ("Paris", 1)
        streamed = ask.run("Capital?", backend=model, stream=True)
        assert "".join(streamed.text_iter("answer")) == "Paris"
    with FakeOpenAI([add.spelled(a=1, b=2), "Three."]) as server:
        model = ul.LiteLLM("openai/gpt-4o", api_key=server.api_key, base_url=server.base_url)
        assert agent.run(backend=model).ret_value.calls[0].result == "3"
        assert "tools" in server.requests[0].body
        wrong = ul.LiteLLM("openai/gpt-4o", api_key="sk-wrong-key-12", base_url=server.base_url, max_retries=0)
        with pytest.raises(ul.RequestError, match="refused the key"):
            ask.run("Capital?", backend=wrong).sync()


# ------------------------------------------------------------------------------------------- Gemini


class Gemini:
    """A client of Google's, by shape. `said`: answers in order: a text, (text, reason), or an error."""

    def __init__(self, said: list[Any]) -> None:
        self.said, self.asked, self.closed = said, [], 0
        self.aio = SimpleNamespace(models=self, aclose=self._close)

    async def _close(self) -> None:
        self.closed += 1

    async def generate_content(self, **asked: Any) -> Any:
        return self._answer(asked)

    async def generate_content_stream(self, **asked: Any) -> Any:
        whole = self._answer(asked)

        async def pieces() -> AsyncIterator[Any]:
            for word in whole.candidates[0].content.parts[0].text.split(" "):
                yield self._object(word + " ", None)
            yield self._object("", "STOP")

        return pieces()

    def _answer(self, asked: dict[str, Any]) -> Any:
        self.asked.append(asked)
        said = self.said.pop(0)
        if isinstance(said, Exception):
            raise said
        text, reason = said if isinstance(said, tuple) else (said, "STOP")
        return self._object(text, reason)

    def _object(self, text: str, reason: str | None) -> Any:
        content = SimpleNamespace(parts=[SimpleNamespace(text=text, thought=False)])
        counted = SimpleNamespace(prompt_token_count=7, candidates_token_count=3, cached_content_token_count=4)
        candidate = SimpleNamespace(index=None, content=content, finish_reason=reason)
        return SimpleNamespace(candidates=[candidate], usage_metadata=counted, prompt_feedback=None)


class Failed(Exception):
    """An error of Google's client, by shape."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def test_gemini_gets_turns_rules_and_parameters_under_googles_names():
    client = Gemini(["Paris"])
    model = ul.VertexAI("gemini-2.5-flash", client=client, safety_settings={"HARM_CATEGORY_HARASSMENT": "BLOCK_NONE"})
    state = ask.run("Capital?", backend=model, temperature=0.5, top_k=4)
    assert (state["answer"], state.usage.prompt_tokens, state.usage.cached_tokens) == ("Paris", 7, 4)
    (asked,) = client.asked
    assert asked["model"] == "gemini-2.5-flash"
    assert asked["contents"] == [{"role": "user", "parts": [{"text": "Capital?"}]}]
    assert asked["config"] == {
        "system_instruction": "Be brief.",
        "temperature": 0.5,
        "top_k": 4,
        "max_output_tokens": 8,
        "stop_sequences": ["."],
        "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    }


def test_gemini_streams_sees_pictures_and_enforces_schemas():
    @ul.function
    def program(s):
        s += ul.user(ul.image(PICTURE) + "How many?")
        s += ul.assistant(ul.gen("number", json_schema={"type": "object", "properties": {"n": {"type": "integer"}}}))

    client = Gemini(["one two", '{"n": 2}'])
    model = ul.VertexAI("gemini", client=client)
    state = ask.run("Count", backend=model, stream=True)
    assert "".join(state.text_iter("answer")) == state["answer"] == "one two "
    counted = program.run(backend=model)
    assert counted.value("number") == {"n": 2}
    assert counted.get_meta_info("number")["guarantee"] == "enforced"
    asked = client.asked[1]
    assert asked["contents"][0]["parts"][0] == {"inline_data": {"mime_type": "image/png", "data": PICTURE}}
    assert asked["config"]["response_mime_type"] == "application/json"
    assert asked["config"]["response_json_schema"]["type"] == "object"


@pytest.mark.parametrize("reason", ["MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_gemini_could_not_finish_is_an_error_with_its_reason(reason: str, streams: bool):
    class Broken(Gemini):
        async def generate_content_stream(self, **asked: Any) -> Any:
            async def pieces() -> AsyncIterator[Any]:
                yield self._object("", reason)

            return pieces()

    model = ul.Gemini("gemini-2.5-flash", client=Broken([("", reason)]))
    with pytest.raises(ul.BackendError, match=rf"cannot be read \({reason}\); ask again"):
        ask.run("?", backend=model, stream=streams)["answer"]


def test_errors_of_google_are_ours():
    model = ul.VertexAI("gemini", client=Gemini([Failed(503, "busy"), "up", Failed(403, "no"), ("x", "SAFETY")]))
    assert ask.run("?", backend=model)["answer"] == "up"
    with pytest.raises(ul.RequestError, match="refused the key"):
        ask.run("?", backend=model).sync()
    with pytest.raises(ul.RequestError, match="content filter"):
        ask.run("?", backend=model).sync()
    assert ProviderError(400, "no").status_code == 400


def of_google_auth(name: str) -> type[Exception]:
    """An exception of Google's library of credentials, by shape."""
    return type(name, (Exception,), {"__module__": "google.auth.exceptions"})


@pytest.mark.parametrize("name", ["DefaultCredentialsError", "RefreshError", "MalformedError"])
@pytest.mark.parametrize("streams", [False, True])
def test_missing_credentials_of_google_are_told_with_what_to_do(name: str, streams: bool):
    client = Gemini([of_google_auth(name)("Your default credentials were not found.")])
    with pytest.raises(ul.RequestError, match="gcloud auth application-default login") as raised:
        ask.run("?", backend=ul.VertexAI("gemini", client=client), stream=streams)["answer"]
    assert "were not found" in str(raised.value)
    assert len(client.asked) == 1


def test_a_connection_that_is_lost_for_credentials_is_tried_again():
    client = Gemini([of_google_auth("TransportError")("no way there"), "up"])
    environment = Environment(sleep=lambda seconds: asyncio.sleep(0))
    assert ask.run("?", backend=ul.VertexAI("gemini", client=client, environment=environment))["answer"] == "up"
    assert len(client.asked) == 2


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (of_google_auth("DefaultCredentialsError")("none were found"), "gcloud auth application-default login"),
        (ValueError("Missing key inputs argument! sk-secret-key-1"), "check project="),
    ],
)
def test_a_client_of_google_that_cannot_be_made_is_told(error: Exception, message: str, monkeypatch):
    library = ModuleType("google.genai")
    library.__spec__ = importlib.machinery.ModuleSpec("google.genai", None)

    def client(**where: Any) -> None:
        raise error

    library.Client = client
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.genai", library)
    model = ul.VertexAI("gemini", project="p")
    with pytest.raises(ul.RequestError, match=message) as raised:
        ask.run("?", backend=model).sync()
    assert "sk-secret-key-1" not in str(raised.value)


def test_gemini_refuses_system_turns_that_its_api_does_not_have():
    @ul.function
    def later(s, role):
        s += ul.system("Be brief.") + ul.user("Hi")
        s += role("Be rude.") + ul.assistant(ul.gen("x"))

    @ul.function
    def seen(s, role):
        s += role("Like this: " + ul.image(PICTURE)) + ul.user("Hi") + ul.assistant(ul.gen("x"))

    client = Gemini([])
    model = ul.VertexAI("gemini", client=client)
    roles = (ul.system, lambda text: ul.role("developer", text))
    for program, message in ((later, "stands behind other turns"), (seen, "no images in system turns")):
        for role in roles:
            for streams in (False, True):
                with pytest.raises(ul.CapabilityError, match=message):
                    program.run(role, backend=model, stream=streams)["x"]
    assert not client.asked


def test_gemini_takes_several_system_turns_in_front():
    @ul.function
    def program(s):
        s += ul.system("Be brief.") + ul.system("Be kind.") + ul.user("Hi") + ul.assistant(ul.gen("x"))

    client = Gemini(["yes"])
    assert program.run(backend=ul.VertexAI("gemini", client=client))["x"] == "yes"
    assert client.asked[0]["config"]["system_instruction"] == "Be brief.\n\nBe kind."


def test_the_real_client_of_google_asks_a_server():
    genai = pytest.importorskip("google.genai", reason="google-genai is not installed here")
    asked: list[dict[str, Any]] = []

    async def serve(request: HttpRequest, exchange: Exchange) -> None:
        asked.append(json.loads(request.body))
        candidate = {"content": {"role": "model", "parts": [{"text": "Paris"}]}, "finishReason": "STOP", "index": 0}
        told = {"candidates": [candidate], "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 1}}
        streams = "streamGenerateContent" in request.path
        body = f"data: {json.dumps(told)}\r\n\r\n" if streams else json.dumps(told)
        kind = "text/event-stream" if streams else "application/json"
        await exchange.respond(200, {"content-type": kind}, body.encode())

    server = Server(serve, "gemini")
    server.start()
    try:
        address = f"http://127.0.0.1:{server.port}"
        for model in (
            ul.VertexAI("gemini-2.5-flash", client=genai.Client(api_key="k", http_options={"base_url": address})),
            ul.Gemini("gemini-2.5-flash", environment={"GEMINI_API_KEY": "k"}, base_url=address, thinking_budget=0),
        ):
            state = ask.run("Capital?", backend=model)
            assert (state["answer"], state.usage.prompt_tokens) == ("Paris", 7)
            assert ask.run("Capital?", backend=model, stream=True)["answer"] == "Paris"
            assert asked[-1]["systemInstruction"]["parts"][0]["text"] == "Be brief."
            assert asked[-1]["generationConfig"]["maxOutputTokens"] == 8
        assert list(asked[-1]["generationConfig"]["thinkingConfig"].values()) == [0]
    finally:
        server.close()


def test_a_budget_for_thinking_is_sent_and_counted():
    client = Gemini(["Paris", "Paris"])
    model = ul.Gemini("gemini-2.5-flash", client=client, thinking_budget=512)
    assert ask.run("Capital?", backend=model)["answer"] == "Paris"
    assert client.asked[0]["config"]["thinking_config"] == {"thinking_budget": 512}
    assert model.capabilities.thinking_tokens == 512
    assert model.capabilities.name == "gemini gemini-2.5-flash"
    ask.run("Capital?", backend=ul.Gemini("gemini-2.5-flash", client=client)).sync()
    assert "thinking_config" not in client.asked[1]["config"]


@pytest.mark.parametrize("end", ["closed", "dropped"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.sampled(4)
def test_the_client_of_google_is_closed_with_its_backend_unless_it_was_given(
    given: bool, end: str, monkeypatch: pytest.MonkeyPatch
):
    client = Gemini(["Paris"])
    library = ModuleType("google.genai")
    library.__spec__ = importlib.machinery.ModuleSpec("google.genai", None)
    library.Client = lambda **_: client
    monkeypatch.setitem(sys.modules, "google.genai", library)
    backend = ul.Gemini("m", api_key="k", client=client if given else None)

    async def used(backend: ul.Gemini) -> None:
        """Without a run, which timers that were cancelled keep for a while."""
        await backend.start()
        await conformance.generate(backend, conformance.request())

    loop.streams.run(used(backend))
    if end == "closed":
        loop.streams.run(backend.close())
    del backend

    async def collected() -> None:
        """On the loop, which then holds nothing of the run any more."""
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.streams.run(collected())
    assert client.closed == (0 if given else 1)


@pytest.mark.parametrize(
    ("schema", "enforced"),
    [
        ({"type": "array", "items": {"type": "integer", "minimum": 0}}, True),
        ({"enum": ["a", 1]}, True),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"x": {"type": "string"}}}}}, True),
        ({"type": "string", "pattern": "a+"}, False),
        ({"type": "string", "format": "date"}, False),
        ({"enum": [True]}, False),
        ({"oneOf": [{"type": "string"}]}, False),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}}}, False),
    ],
)
def test_gemini_enforces_the_keywords_that_google_names_and_the_rest_is_validated(schema: Any, enforced: bool):
    model = ul.Gemini("m", client=Gemini([]))
    assert model.enforces(ConstraintSpec("json_schema", json.dumps(schema))) is enforced


def test_gemini_chooses_by_a_schema():
    client = Gemini(['{"answer": "no"}'])
    state = decide.run(backend=ul.Gemini("m", client=client))
    assert (state["sure"], state.get_meta_info("sure")["guarantee"]) == ("no", "enforced")
