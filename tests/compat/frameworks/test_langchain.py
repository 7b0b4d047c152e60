"""`umbel.langchain.ChatUmbel` as LangChain calls it. Skipped where LangChain is not installed: `make frameworks`."""

import asyncio
import importlib
import json
from typing import Any, Literal

import pytest
import umbel as ul
from pydantic import BaseModel
from umbel.testing import FakeOpenAI

core: Any = pytest.importorskip("langchain_core", reason="LangChain is not installed; `make frameworks` runs these")
messages: Any = importlib.import_module("langchain_core.messages")
callbacks: Any = importlib.import_module("langchain_core.callbacks")
ChatUmbel: Any = importlib.import_module("umbel.langchain").ChatUmbel
TURNS = [messages.SystemMessage("Be brief."), messages.HumanMessage("Capital of France?")]


class Judgement(BaseModel):
    """A judgement."""

    label: Literal["yes", "no"]


def said(prompt: str) -> str:
    return '{"label": "yes"}' if "Judge" in prompt else "It is Paris."


@pytest.fixture
def model() -> Any:
    return ChatUmbel(backend=ul.Echo(said))


def test_a_conversation_is_answered_and_counted(model: Any) -> None:
    first, second = model.invoke(TURNS), model.invoke(TURNS)
    assert first.content == "It is Paris."
    assert first.response_metadata["finish_reason"] == "stop"
    assert second.usage_metadata["input_token_details"]["cache_read"] > 0
    assert second.usage_metadata["total_tokens"] == sum(
        second.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )


def test_pieces_come_with_the_usage_last_and_callbacks_see_them(model: Any) -> None:
    seen: list[str] = []

    class Listener(callbacks.BaseCallbackHandler):  # type: ignore[misc]
        def on_llm_new_token(self, token: str, **_: Any) -> None:
            seen.append(token)

    chunks = list(model.stream(TURNS, config={"callbacks": [Listener()]}))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == "".join(seen) == "It is Paris."
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


def test_tasks_and_batches_are_answered(model: Any) -> None:
    async def ask() -> tuple[str, str]:
        pieces = [chunk.content async for chunk in model.astream(TURNS)]
        return (await model.ainvoke(TURNS)).content, "".join(pieces)

    assert asyncio.run(ask()) == ("It is Paris.", "It is Paris.")
    assert [each.content for each in model.batch([TURNS, "Hm?"])] == ["It is Paris."] * 2


def test_stop_and_sampling_reach_the_backend(model: Any) -> None:
    assert model.invoke(TURNS, stop=[" Paris"]).content == "It is"
    assert model.bind(max_tokens=1).invoke(TURNS).response_metadata["finish_reason"] == "length"


def test_a_schema_is_enforced(model: Any) -> None:
    assert model.with_structured_output(Judgement).invoke("Judge it.") == Judgement(label="yes")
    made = model.with_structured_output(Judgement.model_json_schema(), include_raw=True).invoke("Judge it.")
    assert made["parsed"] == json.loads(made["raw"].content) == {"label": "yes"}
    with pytest.raises(ul.UmbelError, match="is no JSON"):
        model.with_structured_output(Judgement).invoke("Something else.")


@pytest.mark.model
def test_tokens_are_counted_by_the_model_and_bounded_elsewhere() -> None:
    hosted = ul.OpenAI("gpt-4o", base_url="http://127.0.0.1:9/v1", api_key="none")
    with ul.Runtime() as runtime:
        counted = ChatUmbel(backend=runtime)
        assert counted.get_num_tokens("The capital of France is Paris.") == 8
        assert counted.get_num_tokens("") == 1  # BOS
        assert counted.get_num_tokens_from_messages(TURNS) > counted.get_num_tokens(TURNS[1].content)
    assert ChatUmbel(backend=hosted).get_num_tokens("The capital of France is Paris.") >= 8


def test_a_hosted_model_answers() -> None:
    with FakeOpenAI(said) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        assert ChatUmbel(backend=backend).with_structured_output(Judgement).invoke("Judge it.").label == "yes"


def test_settings_reach_the_backend_and_others_are_named(model: Any) -> None:
    with FakeOpenAI(said) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        ChatUmbel(backend=backend, frequency_penalty=0.5, presence_penalty=0.25).invoke(TURNS)
        assert server.requests[0].body["frequency_penalty"] == 0.5
        assert server.requests[0].body["presence_penalty"] == 0.25
        with pytest.raises(ul.CapabilityError, match="top_k=5"):
            ChatUmbel(backend=backend, top_k=5).invoke(TURNS)
    with pytest.raises(
        ul.ParameterError, match=r"ChatUmbel\(\) has no option 'temprature'; did you mean 'temperature'"
    ):
        ChatUmbel(backend=ul.Echo(said), temprature=0)
    with pytest.warns(UserWarning, match="does nothing with max_retries=; give it to the backend"):
        ChatUmbel(backend=ul.Echo(said), max_retries=2)
    with pytest.raises(ul.ParameterError, match="'gpt-4' is not a backend"):
        ChatUmbel(backend="gpt-4")


def test_what_is_not_offered_is_named(model: Any) -> None:
    with pytest.raises(ul.ParameterError, match="takes no 'tempreture'"):
        model.invoke(TURNS, tempreture=0)
    with pytest.raises(ul.CapabilityError, match="no message of the type 'function'"):
        model.invoke([*TURNS, messages.FunctionMessage("result", name="a")])
    with pytest.raises(ul.ParameterError, match="'xml' is not known"):
        model.with_structured_output(Judgement, method="xml")
    with pytest.raises(ul.ParameterError, match="not fetched"):
        model.invoke([messages.HumanMessage([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}])])
