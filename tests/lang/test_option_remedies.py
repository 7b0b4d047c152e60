"""A keyword of another library, or one that is nearly right, is answered with the one that is meant."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from umbel.lang.errors import ELSEWHERE, MOST_OFFERED, SYNONYMS, option_remedy, remedy


@ul.function
def program(s, question):
    s += question + ul.gen("answer")


CALLS: dict[str, Callable[..., Any]] = {
    "gen": lambda **given: ul.gen("x", **given),
    "select": lambda **given: ul.select("x", ["a", "b"], **given),
    "run": lambda **given: program.run("q", backend=ul.Echo(), **given),
    "run_batch": lambda **given: program.run_batch([{"question": "q"}], backend=ul.Echo(), **given),
    "Runtime": lambda **given: ul.Runtime("oracle", **given),
    "OpenAI": lambda **given: ul.OpenAI("gpt-4.1-mini", **given),
    "Anthropic": lambda **given: ul.Anthropic("claude", **given),
}


@pytest.mark.parametrize(
    ("call", "given", "says"),
    [
        ("gen", "response_model", "did you mean 'dtype' or 'json_schema'?"),
        ("gen", "schema", "did you mean 'json_schema' or 'dtype'?"),
        ("gen", "response_format", "did you mean 'json_schema', 'dtype' or 'regex'?"),
        ("gen", "max_new_tokens", "did you mean 'max_tokens'?"),
        ("gen", "stop_sequences", "did you mean 'stop'?"),
        ("gen", "num_return_sequences", "did you mean 'n'?"),
        ("gen", "tools", "write s.call_tools([function], max_tokens=256)"),
        ("gen", "messages", 's += ul.system("...") + ul.user("...")'),
        ("gen", "progress", "write program.run_batch(..., progress=True)"),
        ("gen", "temprature", "did you mean 'temperature'?"),
        ("gen", "zzz", "none of the 38 known ones has a name like it"),
        ("select", "options", "did you mean 'choices'?"),
        ("select", "n", "for branches s.fork(3)"),
        ("select", "stop", "it belongs to gen("),
        ("run", "response_model", 'write gen("name", dtype=MyClass)'),
        ("run", "progress", "write program.run_batch(..., progress=True)"),
        ("run", "zzz", "program(question) has no parameter 'zzz', and neither has run(); the program takes question"),
        ("run", "num_threads", "it is a parameter of program.run_batch(...)"),
        ("run_batch", "n_jobs", "did you mean 'num_threads'?"),
        ("run_batch", "tqdm", "did you mean 'progress'?"),
        ("run_batch", "tools", "s.call_tools("),
        ("run_batch", "generator", "did you mean 'generator_style'?"),
        ("Runtime", "tp_size", "did you mean 'tensor_parallel'?"),
        ("Runtime", "n_ctx", "did you mean 'context_length'?"),
        ("Runtime", "gpu_memory_utilization", "did you mean 'memory_share'?"),
        ("Runtime", "temperature", "it belongs to gen("),
        ("Runtime", "port", "write umbel serve --port 30000"),
        ("OpenAI", "api_base", "did you mean 'base_url'?"),
        ("Anthropic", "token", "did you mean 'api_key'?"),
        ("Anthropic", "tools", "s.call_tools("),
    ],
)
def test_what_another_library_calls_it_is_answered_with_our_name(call: str, given: str, says: str) -> None:
    with pytest.raises(ul.ParameterError) as caught:
        CALLS[call](**{given: 1})
    assert repr(given) in str(caught.value)
    assert says in str(caught.value)


def test_at_most_three_names_are_offered() -> None:
    known = [f"max_token{letter}" for letter in "abcdefgh"]
    assert len(re.findall("'max_token.'", remedy("max_tokens", known))) == MOST_OFFERED
    for name in SYNONYMS:
        assert len(SYNONYMS[name]) <= MOST_OFFERED


def test_synonyms_name_what_a_call_takes() -> None:
    """Each is offered by one of the calls at least; none is a name that no call has."""
    taken: set[str] = set()
    for call in (ul.gen, ul.select, ul.Runtime, ul.OpenAI, ul.Anthropic, ul.Program.run_batch):
        taken |= set(inspect.signature(call).parameters)
    taken |= set(ul.OpenAI.option_names()) | {"backend", "timeout"}
    assert {name for names in SYNONYMS.values() for name in names} - taken == set()


def test_variables_are_answered_with_variables_alone() -> None:
    assert remedy("n", ["answer", "number"]) == "known are answer, number"
    assert option_remedy("n", ["answer"]) == ELSEWHERE["n"]
