"""Providers for tests of your own programs: real HTTP servers on this machine, with answers from a script.

from umbel.testing import FakeOpenAI, Fault

with FakeOpenAI({"capital of France?": "Paris."}, faults=[Fault.RATE_LIMIT]) as server:
    backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
    assert capital.run(country="France", backend=backend)["answer"] == "Paris."
    assert len(server.requests) == 2 and server.calls == 1
"""

import importlib.util

from .lang.errors import MissingExtraError

if importlib.util.find_spec("h11") is None:
    raise MissingExtraError("h11", "testing")

from .interpreter.fakes.anthropic import FakeAnthropic
from .interpreter.fakes.anthropic_bodies import AnthropicFeatures
from .interpreter.fakes.faults import Fault, Unreachable
from .interpreter.fakes.openai import FakeOpenAI
from .interpreter.fakes.openai_bodies import LLAMA_CPP, REASONING, SGLANG, VLLM, OpenAIFeatures

__all__ = [
    "LLAMA_CPP",
    "REASONING",
    "SGLANG",
    "VLLM",
    "AnthropicFeatures",
    "FakeAnthropic",
    "FakeOpenAI",
    "Fault",
    "OpenAIFeatures",
    "Unreachable",
]
