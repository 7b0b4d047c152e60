"""Providers for tests of your own programs: real HTTP servers on this machine, with answers from a script.

    from umbel.testing import FakeOpenAI, Fault

    with FakeOpenAI({"capital of France?": "Paris."}, faults=[Fault.SPLIT_JSON]) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        assert capital.run(country="France", backend=backend)["answer"] == "Paris."
        assert server.calls == 1 and server.usage.completion_tokens == 2

A server answers from `with` to the end of its block, which raises what went wrong with the script. Scripts are those of
`Echo`: a dict, a list, or a function of the text. `Fault` says what a provider can do to its clients, and `faults=`
makes it do so at the requests that are named. `VLLM`, `SGLANG`, `LLAMA_CPP`, `OPENROUTER` and `REASONING` are features
to play: other servers of the OpenAI dialect, and models that take few parameters.
`FakeSGLang` is a server for `RuntimeEndpoint`, with its own API; `FakeOllama` has Ollama's, `FakeGemini` Google's.
"""

import importlib.util

from .lang.errors import MissingExtraError

if importlib.util.find_spec("h11") is None:
    raise MissingExtraError("h11", "testing")

from .interpreter.fakes.anthropic import AnthropicFeatures, FakeAnthropic
from .interpreter.fakes.gemini import FakeGemini
from .interpreter.fakes.ollama import FakeOllama
from .interpreter.fakes.openai import FakeOpenAI
from .interpreter.fakes.openai_requests import LLAMA_CPP, OPENROUTER, REASONING, SGLANG, VLLM, OpenAIFeatures
from .interpreter.fakes.server import Fault, Unreachable
from .interpreter.fakes.sglang import FakeSGLang

__all__ = [
    "LLAMA_CPP",
    "OPENROUTER",
    "REASONING",
    "SGLANG",
    "VLLM",
    "AnthropicFeatures",
    "FakeAnthropic",
    "FakeGemini",
    "FakeOllama",
    "FakeOpenAI",
    "FakeSGLang",
    "Fault",
    "OpenAIFeatures",
    "Unreachable",
]
