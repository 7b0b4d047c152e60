"""The hosted backends of this package against this server: they pass as clients what they pass with providers."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.hosted.session import Environment
from umbel.lang.protocol import Backend
from umbel.server.app import application
from umbel.server.front import Front
from umbel.srt.in_process import LocalBackend

from .. import conformance

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")


def environment(local: LocalBackend) -> tuple[Front, Environment]:
    front = Front(local)
    return front, Environment(wire=httpx2.ASGITransport(application(front)), variables={})


class ServedOpenAI(ul.OpenAI):
    """OpenAI's dialect, answered in the same process."""

    def __init__(self, local: LocalBackend | None = None, **options: Any) -> None:
        self.local = local or LocalBackend()
        self.front, wired = environment(self.local)
        super().__init__("oracle", base_url="http://localhost/v1", environment=wired, **options)

    async def prepare(self) -> None:
        await self.front.start()
        await super().prepare()

    async def close(self) -> None:
        await super().close()
        await self.local.close()


class ServedAnthropic(ul.Anthropic):
    """Anthropic's dialect, answered in the same process."""

    def __init__(self, local: LocalBackend | None = None, **options: Any) -> None:
        self.local = local or LocalBackend()
        self.front, wired = environment(self.local)
        super().__init__("oracle", base_url="http://localhost", api_key="none", environment=wired, **options)

    async def prepare(self) -> None:
        await self.front.start()
        await super().prepare()

    async def close(self) -> None:
        await super().close()
        await self.local.close()


def openai_chat() -> Backend:
    return ServedOpenAI()


def openai_completion() -> Backend:
    return ServedOpenAI(mode="completion")


BACKENDS: tuple[Callable[[], Backend], ...] = (openai_chat, openai_completion, ServedAnthropic)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("make", BACKENDS, ids=conformance.name_of)
@pytest.mark.parametrize("case", conformance.CASES, ids=conformance.name_of)
def test_a_hosted_backend_conforms_on_this_server(case: conformance.Case, make: Callable[[], Backend]) -> None:
    conformance.check(case, make)


@ul.function
def talk(s: ul.State) -> None:
    """Every statement of the language that a chat model can serve."""
    s += ul.system("Be brief. " * 8) + ul.cache_point(ttl=60)
    with s.user():
        s += "Who are you?"
    s += ul.assistant(ul.gen("plain", max_tokens=8) + " or " + ul.gen("stopped", max_tokens=24, stop_regex="[a-h]"))
    s += ul.user("A number.") + ul.assistant(ul.gen("number", dtype=int, max_tokens=6))
    s += ul.user("A word.") + ul.assistant("It is " + ul.gen("word", regex="[a-z]{3,5}", max_tokens=9))
    s += ul.user("A record.") + ul.assistant(ul.gen("record", json_schema=SCHEMA, max_tokens=60))
    with s.var_scope("turn"):
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += ul.user(f"Side {number}?") + ul.assistant(ul.gen("side", max_tokens=4))
        branches.join()
    s += ul.user("Last?") + ul.assistant(ul.gen("two", max_tokens=4, n=2, temperature=0.9, top_k=5, seed=3))
    s += ul.user("Which?") + ul.assistant(ul.select("which", ["left", "right"]))


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_program_in_openai_s_dialect_says_what_it_says_on_the_runtime() -> None:
    """The server writes roles by its own template, goes on with answers, and enforces every constraint."""
    hosted, direct = ServedOpenAI(LocalBackend(chat_template=CHATML)), LocalBackend(chat_template=CHATML)
    states = [talk.run(backend=backend, temperature=0) for backend in (hosted, direct)]
    over_http, expected = ({name: state[name] for name in state.variables()} for state in states)
    assert over_http.pop("which") in ("left", "right")  # it is generated, and the runtime scores
    assert over_http == {name: value for name, value in expected.items() if name != "which"}
    assert over_http.keys() >= {"plain", "stopped", "number", "word", "record", "side", "two"}
    for name in ("word", "record", "which"):
        assert states[0].meta(name)["guarantee"] == "enforced"
    for backend in (hosted, direct):
        loop.streams.run(backend.close())


@ul.function
def choose(s: ul.State) -> None:
    s += "The answer is" + ul.select("choice", [" yes", " no", " not at all"])
    s += " and" + ul.gen("rest", max_tokens=8, stop="q")


def test_choices_in_openai_s_completions_are_those_of_the_runtime() -> None:
    hosted, direct = ServedOpenAI(mode="completion"), LocalBackend()
    states = [choose.run(backend=backend, temperature=0) for backend in (hosted, direct)]
    assert [state["choice"] for state in states] == [states[1]["choice"]] * 2
    assert [state["rest"] for state in states] == [states[1]["rest"]] * 2
    ours, theirs = (state.meta("choice")["choice_scores"] for state in states)
    assert ours == pytest.approx(theirs, abs=1e-4)
    for backend in (hosted, direct):
        loop.streams.run(backend.close())


def test_a_point_of_a_program_is_kept_by_this_server_in_both_dialects() -> None:
    @ul.function
    def ask(s: ul.State, question: str) -> None:
        s += ul.system("Be brief. " * 500) + ul.cache_point(ttl=60)
        s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=2))

    for made in (ServedOpenAI, ServedAnthropic):
        hosted = made(LocalBackend(context_length=8_192, pool_tokens=1 << 15, debug={"check_every_step": False}))
        states = []
        for question in ("One?", "Two?"):
            states.append(ask.run(question=question, backend=hosted))
            states[-1].sync()
        first, second = (state.usage for state in states)
        assert first.cache_write_tokens > 1024 > second.cache_write_tokens
        assert second.cache_read_tokens == first.cache_write_tokens
        loop.streams.run(hosted.close())


@ul.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@ul.tool
def name_of(letters: str, capital: bool = False) -> str:
    """Makes a name of letters."""
    return letters.upper() if capital else letters


@ul.function
def agent(s: ul.State, **options: Any) -> ul.AgentResult:
    s += ul.user("Well?")
    return s.call_tools([add, name_of], "answer", max_steps=2, max_tokens=120, seed=3, **options)


@pytest.mark.parametrize("options", [{"tool_choice": "add"}, {"tool_choice": "required"}, {"parallel": False}])
def test_calls_of_tools_are_enforced_by_this_server(options: dict[str, Any]) -> None:
    """The oracle's texts are as good as random, so that names and arguments fit by the server's constraint alone."""
    backend = ServedOpenAI()
    try:
        result = agent.run(backend=backend, **options).ret_value
        assert backend.capabilities.tools
    finally:
        loop.streams.run(backend.close())
    assert not any(run.failed for run in result.calls)
    assert result.calls or "tool_choice" not in options
    if result.calls:
        assert result.guarantee == "enforced"
