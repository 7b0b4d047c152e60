"""Shapes of published programs, on a runtime, on a server of the OpenAI dialect, and on an SGLang server.

The runtime's model is the oracle. The fakes are held to constraints as a model under a grammar is: their answer is a
shortest text of the language. README tells how many of them run; `test_the_readme_has_the_count` compares.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
import umbel.compat.sglang as sgl
from umbel.interpreter import loop
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.fakes.provider import Form
from umbel.interpreter.guarantees import expressions
from umbel.lang.chat_template import CHATML
from umbel.lang.protocol import Backend, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend
from umbel.testing import VLLM, FakeOpenAI, FakeSGLang

from .shapes import SHAPES, Shape

ROOT = Path(__file__).resolve().parents[2]
NAMES = [each.name for each in SHAPES]

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::umbel.TraceWarning")

# (shape, backend) → what the refusal says: the provider has no such thing.
REFUSED = {
    ("select_by_each_method", "openai"): 'method="token_length_normalized"',
    ("bind_and_cache_a_prompt", "openai"): "has no cache that a program could fill",
    ("cache_and_facts_of_the_server", "openai"): "cannot empty the provider's cache",
}


def words(text: str) -> str:
    """What a fake says: the same words behind the same text."""
    return " one two, three four. five six\nseven"


def shortest(form: Form, said: str, sampling: SamplingParams) -> str:
    """What a model says that is held to a form."""
    constraint = form.constraint
    match constraint.kind:
        case "choices":
            return str(json.loads(constraint.source)[0])
        case "gbnf":
            return " yes."
        case kind:
            return expressions.shortest(kind, constraint.source)


@contextmanager
def runtime(shape: Shape) -> Iterator[Backend]:
    backend = LocalBackend(chat_template=CHATML)
    try:
        yield backend
    finally:
        loop.streams.run(backend.close())


@contextmanager
def openai(shape: Shape) -> Iterator[Backend]:
    with FakeOpenAI(words, features=VLLM) as server:
        yield sgl.OpenAI(
            "gpt-4o",
            is_chat_model=shape.roles,
            base_url=server.base_url,
            api_key=server.api_key,
            profile="vllm",
            environment=Environment(variables={}),
        )


@contextmanager
def endpoint(shape: Shape) -> Iterator[Backend]:
    with FakeSGLang(words) as server:
        yield sgl.RuntimeEndpoint(server.address, server.api_key)


BACKENDS: dict[str, Callable[[Shape], AbstractContextManager[Backend]]] = {
    "runtime": runtime,
    "openai": openai,
    "endpoint": endpoint,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
@pytest.mark.sampled(5)
def test_a_published_shape_runs(shape: Shape, backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Form, "shaped", shortest)
    with BACKENDS[backend](shape) as model:
        sgl.set_default_backend(model)
        try:
            if (shape.name, backend) not in REFUSED:
                shape.run()
                return
            with pytest.raises(ul.CapabilityError, match=re.escape(REFUSED[shape.name, backend])):
                shape.run()
        finally:
            sgl.set_default_backend(None)


def test_the_readme_has_the_count():
    text = " ".join((ROOT / "README.md").read_text().split())
    counts = {backend: len(SHAPES) - sum(where == backend for _, where in REFUSED) for backend in BACKENDS}
    assert counts["runtime"] == counts["endpoint"] == len(SHAPES)
    assert f"all {len(SHAPES)} run on a `Runtime` and on a `RuntimeEndpoint`" in text
    assert f"{counts['openai']} on a server of the OpenAI dialect" in text
    assert {name for name, _ in REFUSED} <= set(NAMES)


# ------------------------------------------------------------------------------------------- prompts without programs


class LocalRuntime(sgl.Runtime):
    """The frame's runtime over an engine in this process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(model_path="oracle", **options)
        self.local = LocalBackend()

    def generate(self, prompt: Any = None, sampling_params: Any = None, **options: Any) -> Any:
        if isinstance(prompt, GenRequest):
            return self.local.generate(prompt)
        return super().generate(prompt, sampling_params, **options)

    async def start(self) -> None:
        await self.local.start()

    async def close(self) -> None:
        await self.local.close()


class LocalEngine(LocalRuntime, sgl.Engine):
    """The same for the engine."""

    def generate(self, prompt: Any = None, sampling_params: Any = None, **options: Any) -> Any:
        if isinstance(prompt, GenRequest):
            return self.local.generate(prompt)
        return sgl.Engine.generate(self, prompt, sampling_params, **options)


@pytest.fixture
def serving() -> Iterator[LocalRuntime]:
    with LocalRuntime() as runtime:
        yield runtime


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


def test_a_runtime_answers_prompts_with_json(serving: LocalRuntime):
    params = {"max_new_tokens": 5, "temperature": 0}
    told = json.loads(serving.generate("The river", sampling_params=params))
    assert (len(told["output_ids"]), told["meta_info"]["finish_reason"]) == (5, {"type": "length", "length": 5})
    assert told["meta_info"]["prompt_tokens"] > 0
    both = json.loads(serving.generate(["The river", "A hill"], params, return_logprob=True, top_logprobs_num=2))
    assert both[0]["text"] == told["text"]
    assert all(len(each["meta_info"]["output_token_logprobs"]) == 5 for each in both)
    constrained = json.loads(serving.generate("n: ", {"max_new_tokens": 8, "regex": "[0-9]{3}"}))
    assert re.fullmatch("[0-9]{3}", constrained["text"])
    serving.cache_prefix("A long beginning of many prompts")
    assert json.loads(serving.generate("A long beginning of many prompts.", params))["meta_info"]["cached_tokens"] > 10


def test_a_runtime_streams_pieces_of_text(serving: LocalRuntime):
    async def pieces() -> list[str]:
        return [piece async for piece in serving.async_generate("The river", {"max_new_tokens": 6, "temperature": 0})]

    whole = json.loads(serving.generate("The river", {"max_new_tokens": 6, "temperature": 0}))["text"]
    assert "".join(loop.streams.run(pieces())) == whole


def test_an_engine_answers_with_dictionaries(engine: LocalEngine):
    params = {"max_new_tokens": 4, "temperature": 0}
    one = engine.generate("The river", params)
    assert (
        engine.generate(prompt=["The river", "The river"], sampling_params=[params, params])[1]["text"] == one["text"]
    )
    *growing, last = engine.generate("The river", params, stream=True)
    assert last["text"] == one["text"]
    assert all(one["text"].startswith(piece["text"]) for piece in growing)
    assert len(engine.generate("The river", {**params, "n": 2})) == 2

    async def asked() -> tuple[str, str]:
        answer = await engine.async_generate("The river", params)
        pieces = await engine.async_generate("The river", params, stream=True)
        return answer["text"], [piece async for piece in pieces][-1]["text"]

    assert loop.streams.run(asked()) == (one["text"], one["text"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda runtime: runtime.generate(3), "a prompt is a string"),
        (lambda runtime: runtime.generate("x", {"max_tokenz": 3}), "did you mean"),
        (lambda runtime: runtime.generate("x", "ab"), "sampling_params must be a dict"),
        (lambda runtime: runtime.generate("x", 5), "sampling_params must be a dict"),
        (lambda runtime: runtime.generate(["x"], ["ab"]), "sampling_params must be a dict"),
        (lambda runtime: runtime.generate("x", {3: 4}), "no option 3"),
        (lambda runtime: runtime.generate("x", {"skip_special_tokens": False}), "always True"),
        (lambda runtime: runtime.generate("x", {}, lora_path="y"), "takes no lora_path"),
        (lambda runtime: runtime.generate(["x", "y"], [{}]), "1 sampling_params for 2 prompts"),
        (lambda runtime: runtime.generate("x", {"regex": "a", "ebnf": "root ::= x"}), "one constraint"),
    ],
)
def test_wrong_prompts_and_parameters_are_refused(serving: LocalRuntime, call: Any, message: str):
    with pytest.raises(ul.ParameterError, match=message):
        call(serving)


def test_an_engine_refuses_options_that_there_are_not(engine: LocalEngine):
    for streams in (False, True):
        with pytest.raises(ul.ParameterError, match="takes no logprobs"):
            engine.generate("x", {}, stream=streams, logprobs=1)
        with pytest.raises(ul.ParameterError, match="takes no logprobs"):
            loop.streams.run(engine.async_generate("x", {}, stream=streams, logprobs=1))
    with pytest.raises(ul.ParameterError, match="stream must be"):
        engine.generate("x", {}, stream=5)
    with pytest.raises(ul.ParameterError, match="stream must be"):
        loop.streams.run(engine.async_generate("x", {}, stream=5))


@pytest.mark.parametrize("option", ["input_ids", "image_data", "lora_path", "custom_logit_processor"])
def test_an_engine_refuses_what_it_does_not_serve(engine: LocalEngine, option: str):
    with pytest.raises(ul.ParameterError, match=option):
        engine.generate("x", {}, **{option: [1]})


@pytest.mark.processes
def test_the_runtime_of_the_frame_runs_in_its_own_processes():
    with sgl.Runtime(model_path="oracle", tp_size=1, random_seed=1, schedule_policy="fcfs") as runtime:
        assert json.loads(runtime.generate("The river", {"max_new_tokens": 3}))["text"] is not None
        assert runtime.get_server_info()["option_policy"] == "fcfs"
        runtime.flush_cache()
        assert runtime.get_chat_template().name
