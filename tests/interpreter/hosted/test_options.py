"""Options of hosted backends, and of the frame's: a value of a wrong kind is a ParameterError when it is given."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
import umbel.compat.sglang as sgl

from .test_translated import FakeLibrary, Gemini


class Rude:
    """Whose own code raises."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __bool__(self) -> bool:
        raise RuntimeError("asked")


WRONG: dict[str, object] = {
    "object": object(),
    "bytes": b"x",
    "list": ["a"],
    "dict of numbers": {1: 2},
    "dict of objects": {"a": object()},
    "set": {"a"},
    "not a number": float("nan"),
    "rude": Rude(),
}
NUMBER = {**WRONG, "number": 5}
HERE = "http://127.0.0.1:9"
MAKES: dict[str, tuple[Any, dict[str, object]]] = {
    "RuntimeEndpoint": (ul.RuntimeEndpoint, {"base_url": HERE}),
    "OpenAI": (ul.OpenAI, {"model": "m", "base_url": HERE}),
    "Anthropic": (ul.Anthropic, {"model": "claude-haiku-4-5", "api_key": "key-of-this"}),
    "LiteLLM": (ul.LiteLLM, {"model": "a/b"}),
    "VertexAI": (ul.VertexAI, {"model": "m", "client": Gemini([])}),
    "OpenRouter": (ul.OpenRouter, {"model": "a/b", "api_key": "key-of-this"}),
    "Ollama": (ul.Ollama, {"model": "m"}),
    "Gemini": (ul.Gemini, {"model": "m", "client": Gemini([])}),
    "sgl.RuntimeEndpoint": (sgl.RuntimeEndpoint, {"base_url": HERE}),
    "sgl.OpenAI": (sgl.OpenAI, {"model_name": "m", "base_url": HERE}),
    "sgl.Anthropic": (sgl.Anthropic, {"model_name": "claude-haiku-4-5", "api_key": "key-of-this"}),
    "sgl.LiteLLM": (sgl.LiteLLM, {"model_name": "a/b"}),
    "sgl.VertexAI": (sgl.VertexAI, {"model_name": "m", "client": Gemini([])}),
}


CASES = [(backend, option) for backend, (make, _) in MAKES.items() for option in make.option_names()]


@pytest.mark.parametrize(("backend", "option"), CASES)
@pytest.mark.sampled(5)
def test_a_value_of_a_wrong_kind_is_refused_where_it_is_given(
    backend: str, option: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "litellm", FakeLibrary([]))
    make, usual = MAKES[backend]
    if "model_name" in usual and option == "model":
        return  # the frame has its own name of it
    make(**usual)
    numeric = option.endswith(("timeout", "_budget")) or option.startswith(("max_", "num_", "keep_"))
    for value in (WRONG if numeric else NUMBER).values():
        with pytest.raises((ul.ParameterError, ul.TemplateError)) as raised:
            make(**{**usual, option: value})
        assert len(str(raised.value)) <= 2_000


@pytest.mark.parametrize("make", [ul.RuntimeEndpoint, sgl.RuntimeEndpoint])
def test_fields_that_are_no_json_are_refused_at_an_endpoint(make: Callable[..., object]):
    for extra in ({"a": float("nan")}, {"sampling_params": {"a": {1, 2}}}, {3: 4}):
        with pytest.raises(ul.ParameterError, match="extra_body"):
            make(HERE, extra_body=extra)


def test_the_frame_adds_an_organization_to_fields_that_are_none(monkeypatch: pytest.MonkeyPatch):
    library = FakeLibrary(["x", "x"])
    monkeypatch.setitem(sys.modules, "litellm", library)

    @ul.function
    def program(s):
        s += ul.user("Hi") + ul.assistant(ul.gen("x"))

    for extra in (None, {"metadata": {}}):
        program.run(backend=sgl.LiteLLM("a/b", organization="o", extra_body=extra)).sync()
    assert [asked["organization"] for asked in library.asked] == ["o", "o"]
    assert "metadata" in library.asked[1]


def test_a_client_without_the_methods_of_googles_is_refused():
    for client in (object(), Gemini, "client"):
        with pytest.raises(ul.ParameterError, match=r"google\.genai\.Client"):
            ul.VertexAI("m", client=client)


def test_environment_variables_may_be_given_as_a_mapping() -> None:
    backend = ul.OpenAI("gpt-4o-mini", environment={"OPENAI_API_KEY": "sk-of-this-test"})
    assert "sk-of-this-test" not in repr(backend)
    with pytest.raises(ul.ParameterError, match="has no key"):
        ul.OpenAI("gpt-4o-mini", environment={})


def test_an_endpoint_at_openai_needs_a_key() -> None:
    with pytest.raises(ul.ParameterError, match="needs a key; write api_key="):
        ul.RuntimeEndpoint("https://api.openai.com")
