"""Reasoning that a provider gives in a field of its own: `separate_reasoning` has it, and no text does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.lang.protocol import Backend
from umbel.testing import OPENROUTER, VLLM, FakeGemini, FakeOllama, FakeOpenAI

THOUGHT = "First Rome, but no."
SAID = [f"<think>\n{THOUGHT}\n</think>\n\nParis.", "Rome."]


@ul.function
def ask(s: ul.State, **options: Any) -> None:
    s += ul.user("Capital?") + ul.assistant(ul.separate_reasoning(ul.gen("answer", **options)))
    s += ul.user("And?") + ul.assistant(ul.separate_reasoning(ul.gen("more")))


@contextmanager
def ollama(script: Any) -> Iterator[tuple[Any, Backend]]:
    with FakeOllama(script, abilities=["completion", "thinking"]) as server:
        yield server, ul.Ollama("llama3.2", base_url=server.base_url, think=True)


@contextmanager
def gemini(script: Any) -> Iterator[tuple[Any, Backend]]:
    with FakeGemini(script) as server:
        yield (
            server,
            ul.Gemini("gemini-2.5-flash", base_url=server.base_url, api_key=server.api_key, include_thoughts=True),
        )


@contextmanager
def openrouter(script: Any) -> Iterator[tuple[Any, Backend]]:
    with FakeOpenAI(script, models=["a/b"], features=OPENROUTER) as server:
        model = ul.OpenRouter("a/b", base_url=server.base_url, api_key=server.api_key, reasoning={"effort": "low"})
        yield server, model


@contextmanager
def dialect(script: Any) -> Iterator[tuple[Any, Backend]]:
    features = replace(VLLM, reasoning="reasoning_content")
    with FakeOpenAI(script, features=features) as server:
        yield server, ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)


HOSTED = [ollama, openrouter, dialect, gemini]


@pytest.fixture(autouse=True)
def own_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ul.prices, "_prices", dict(ul.prices))


@pytest.mark.parametrize("hosted", HOSTED)
@pytest.mark.parametrize("streams", [False, True])
def test_a_program_that_separates_reasoning_has_it(hosted: Callable[[Any], Any], streams: bool) -> None:
    with hosted(SAID) as (server, model):
        state = ask.run(backend=model, stream=streams)
        if streams:
            assert "".join(state.text_iter("answer_reasoning_content")).strip() == THOUGHT
            assert "".join(state.text_iter("answer")) == "Paris."
        assert (state["answer"], state["answer_reasoning_content"].strip()) == ("Paris.", THOUGHT)
        assert (state["more"], state["more_reasoning_content"]) == ("Rome.", "")
        assert THOUGHT not in state.text()
        assert THOUGHT not in str(server.requests[1].body)
        assert state.usage.completion_tokens > len(THOUGHT.split())  # thoughts are paid for


@pytest.mark.parametrize("hosted", HOSTED)
@pytest.mark.parametrize("streams", [False, True])
def test_a_program_that_does_not_gets_the_answer_alone(hosted: Callable[[Any], Any], streams: bool) -> None:
    @ul.function
    def plain(s: ul.State) -> None:
        s += ul.user("Capital?") + ul.assistant(ul.gen("answer", max_tokens=60))

    with hosted(SAID) as (_, model):
        state = plain.run(backend=model, stream=streams)
        assert state["answer"] == "Paris."
        assert state.messages()[1]["content"] == "Paris."


@pytest.mark.parametrize("hosted", HOSTED)
def test_a_journal_has_the_reasoning(hosted: Callable[[Any], Any], tmp_path: Path) -> None:
    journal = str(tmp_path / "run.jsonl")
    with hosted(SAID) as (server, model):
        first = ask.run(backend=model, journal=journal)
        first.sync()
        again = ask.run(backend=model, journal=journal)
        assert again["answer_reasoning_content"] == first["answer_reasoning_content"] != ""
        assert server.calls == 2


@pytest.mark.parametrize("hosted", HOSTED)
def test_an_answer_of_a_schema_has_its_reasoning_too(hosted: Callable[[Any], Any]) -> None:
    with hosted(["<think>Even.</think>[2, 4]", "Rome."]) as (_, model):
        state = ask.run(backend=model, dtype=list[int])
        assert (state.value("answer"), state["answer_reasoning_content"]) == ([2, 4], "Even.")


def test_agents_read_calls_and_not_thoughts() -> None:
    @ul.tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @ul.function
    def agent(s: ul.State) -> ul.AgentResult:
        s += ul.user("1 + 2?")
        return s.call_tools([add], "answer")

    script = ["<think>I add.</think>" + add.spelled(a=1, b=2), "<think>So.</think>3."]
    with FakeOllama(script, abilities=["completion", "thinking", "tools"]) as server:
        state = agent.run(backend=ul.Ollama("llama3.2", base_url=server.base_url))
        assert (state["answer"], [run.result for run in state["answer_calls"]]) == ("3.", ["3"])
        assert "I add" not in state.text()
