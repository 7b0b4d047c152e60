"""LangChain's own suites for chat models on `ChatUmbel`. Skipped where they are not installed: `make frameworks`.

The integration suite wants a model that calls the right tool with the right arguments: a scripted `Echo` does. Which
calls a runtime can write is tested in `test_langchain_tools.py`. Nothing of the suites is overridden but the abilities:

- `has_tool_choice` is off on Echo, as it enforces no call: the suite's test of forced calls is skipped;
- `supports_image_inputs` and other media are off, as Echo reads text alone.
"""

import importlib
from typing import Any

import pytest
import umbel as ul
from umbel.lang.tool_calls import FENCED, ToolCall

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed; `make frameworks` runs these")
ChatUmbel: Any = importlib.import_module("umbel.langchain").ChatUmbel
unit: Any = importlib.import_module("langchain_tests.unit_tests")
integration: Any = importlib.import_module("langchain_tests.integration_tests")

JOKE = '{"setup": "Why do cats purr?", "punchline": "They are content."}'
# A tool's name, as the prompt shows it → the arguments of its call.
CALLS = {
    "magic_function": '{"input": 3}',
    "magic_function_no_args": "{}",
    "greeting_generator": '{"answer_style": "pirate"}',
    "get_weather": '{"location": "San Francisco"}',
    "my_adder_tool": '{"a": 3, "b": 4}',
    "unicode_customer": '{"customer_name": "你好こんにちは", "description": "?"}',
    "Joke": JOKE,
}


def said(prompt: str) -> str:
    if "joke" in prompt and "tool_call" not in prompt:
        return JOKE
    if "```tool_result" in prompt and "What is 3 + 4" not in prompt:
        return "It is done."
    called = next((name for name in CALLS if f'"name": "{name}"' in prompt), None)
    return "Hello, I am an umbel." if called is None else FENCED.spell([ToolCall(called, CALLS[called])])


class Scripted:
    """The model under test."""

    @property
    def chat_model_class(self) -> Any:
        return ChatUmbel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"backend": ul.Echo(said), "temperature": 0}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnit(Scripted, unit.ChatModelUnitTests):  # type: ignore[misc]
    """The suite that calls no model."""


class TestIntegration(Scripted, integration.ChatModelIntegrationTests):  # type: ignore[misc]
    """The suite that calls one."""

    @property
    def has_tool_choice(self) -> bool:
        return False
