"""Ollama by its own API: what is sent, what is enforced, what the start finds out, and what is said where it fails."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.fakes.server import Exchange, HttpRequest, Server

from .wired import Wire, http

PICTURE = b"\x89PNG\r\n\x1a\n" + b"\0" * 16


@ul.function
def ask(s, **options):
    s += ul.system("Be brief.") + ul.user("Capital?") + ul.assistant(ul.gen("answer", **options))


class Ollama:
    """A server of Ollama's API, by shape. `said`: answers in order, each a text or (status, error)."""

    def __init__(self, said: list[Any], abilities: list[str]) -> None:
        self.said, self.abilities = said, abilities
        self.asked: list[dict[str, Any]] = []
        self.server = Server(self._serve, "ollama")

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def _serve(self, request: HttpRequest, exchange: Exchange) -> None:
        body = json.loads(request.body)
        if body["model"] != "llama3.2":
            await self._respond(exchange, 404, {"error": f"model '{body['model']}' not found"})
        elif request.path == "/api/show":
            await self._respond(exchange, 200, {"capabilities": self.abilities})
        else:
            self.asked.append(body)
            said = self.said.pop(0)
            if isinstance(said, tuple):
                await self._respond(exchange, said[0], {"error": said[1]})
                return
            end = {"done": True, "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 3}
            if not body["stream"]:
                await self._respond(exchange, 200, {"message": {"content": said}, **end})
                return
            pieces = [{"message": {"content": word + " "}, "done": False} for word in said.split(" ")]
            lines = "".join(json.dumps(each) + "\n" for each in (*pieces, {"message": {"content": ""}, **end}))
            await exchange.respond(200, {"content-type": "application/x-ndjson"}, lines.encode())

    async def _respond(self, exchange: Exchange, status: int, data: object) -> None:
        await exchange.respond(status, {"content-type": "application/json"}, json.dumps(data).encode())


@contextmanager
def ollama(*said: Any, abilities: tuple[str, ...] = ("completion",)) -> Iterator[Ollama]:
    fake = Ollama(list(said), list(abilities))
    fake.server.start()
    try:
        yield fake
    finally:
        fake.server.close()


def test_a_call_has_ollamas_names_and_says_every_default() -> None:
    with ollama("Paris") as server:
        model = ul.Ollama("llama3.2", base_url=server.base_url, num_ctx=8192, keep_alive="10m")
        state = ask.run(backend=model, max_tokens=8, temperature=0.5, seed=3, stop=".")
        assert (state["answer"], state.usage.prompt_tokens, state.usage.completion_tokens) == ("Paris", 7, 3)
        assert model.capabilities.max_context == 8192
    (asked,) = server.asked
    assert asked["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}]
    assert (asked["keep_alive"], asked["model"]) == ("10m", "llama3.2")
    assert asked["options"] == {
        "num_ctx": 8192, "num_predict": 8, "temperature": 0.5, "seed": 3, "stop": ["."], "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip


def test_it_streams() -> None:
    with ollama("one two three") as server:
        state = ask.run(backend=ul.Ollama("llama3.2", base_url=server.base_url), stream=True)
        assert "".join(state.text_iter("answer")) == state["answer"] == "one two three "
        assert state.usage.completion_tokens == 3


def test_schemas_and_choices_are_enforced_and_what_a_grammar_leaves_out_is_validated() -> None:
    @ul.function
    def program(s):
        s += ul.user("?") + ul.assistant(ul.gen("numbers", dtype=list[int])) + ul.user("?")
        s += ul.assistant(ul.select("sure", ["yes", "no"])) + ul.user("?")
        s += ul.assistant(ul.gen("word", regex="[a-c]+"))

    with ollama("[1, 2]", '{"answer": "no"}', "xyz", "abc") as server:
        state = program.run(backend=ul.Ollama("llama3.2", base_url=server.base_url))
        assert (state.value("numbers"), state["sure"], state["word"]) == ([1, 2], "no", "abc")
        found = [state.get_meta_info(name)["guarantee"] for name in ("numbers", "sure", "word")]
        assert found == ["enforced", "enforced", "validated"]
    assert [asked.get("format", {}).get("type") for asked in server.asked] == ["array", "object", None, None]


def test_the_start_finds_out_whether_the_model_sees_and_thinks() -> None:
    @ul.function
    def see(s):
        s += ul.user(ul.image(PICTURE) + "What?") + ul.assistant(ul.gen("answer"))

    with ollama("a flower", abilities=("completion", "vision", "thinking")) as server:
        model = ul.Ollama("llama3.2", base_url=server.base_url)
        assert see.run(backend=model)["answer"] == "a flower"
        assert server.asked[0]["messages"][0]["images"][0].startswith("iVBOR")
        assert model.capabilities.thinking_tokens == 4096
    with ollama() as server, pytest.raises(ul.CapabilityError, match="takes no images"):
        see.run(backend=ul.Ollama("llama3.2", base_url=server.base_url))["answer"]
    with ollama("x", abilities=("thinking",)) as server:
        model = ul.Ollama("llama3.2", base_url=server.base_url, think=False)
        ask.run(backend=model).sync()
        assert (model.capabilities.thinking_tokens, server.asked[0]["think"]) == (0, False)


def test_a_model_that_is_not_there_names_the_command_that_brings_it() -> None:
    with ollama() as server, pytest.raises(ul.RequestError, match="run `ollama pull qwen3:8b`"):
        ask.run(backend=ul.Ollama("qwen3:8b", base_url=server.base_url))["answer"]


def nowhere(variables: dict[str, str]) -> Environment:
    return Environment(wire=Wire(http.ConnectError("refused")), variables=variables)


def test_where_no_server_answers_it_says_how_to_start_one() -> None:
    with pytest.raises(
        ul.ConnectionLostError, match=r"no Ollama answers at http://box:1; start it with `ollama serve`"
    ):
        ask.run(backend=ul.Ollama("llama3.2", base_url="http://box:1", environment=nowhere({})))["answer"]


@pytest.mark.parametrize("streams", [False, True])
def test_errors_of_the_server_are_ours(streams: bool) -> None:
    with ollama((400, "invalid option"), (503, "busy"), "up") as server:
        model = ul.Ollama("llama3.2", base_url=server.base_url)
        with pytest.raises(ul.RequestError, match="invalid option"):
            ask.run(backend=model, stream=streams)["answer"]
        assert ask.run(backend=model, stream=streams)["answer"].strip() == "up"


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("box:8080", "http://box:8080"),
        ("https://box", "https://box:443"),
        ("http://box/", "http://box:80"),
        ("[::1]:9", "http://[::1]:9"),
        ("box:port", "http://box:11434"),
    ],
)
def test_the_address_is_read_as_ollama_reads_it(given: str, address: str) -> None:
    with pytest.raises(ul.ConnectionLostError) as raised:
        ask.run(backend=ul.Ollama("m", environment=nowhere({"OLLAMA_HOST": given})))["answer"]
    assert f"answers at {address};" in str(raised.value)
