"""`validate=` of a gen: the program's own check refuses answers, and the model is asked again, on every backend."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.lang.protocol import Backend, Capabilities
from umbel.srt.in_process import LocalBackend
from umbel.testing import VLLM, FakeAnthropic, FakeOpenAI, FakeSGLang

from .conftest import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")


def short(text: str) -> None:
    if len(text) > 5:
        raise ValueError(f"it has {len(text)} characters, and 5 are allowed")


@ul.function
def chat(s, **options):
    s += ul.user("Well?") + ul.assistant(ul.gen("x", max_tokens=20, validate=short, **options))


@ul.function
def plain(s, **options):
    s += "Well? " + ul.gen("x", max_tokens=20, validate=short, **options)


@contextmanager
def echo(answers: list[str]) -> Iterator[Backend]:
    yield Echo(answers)


@contextmanager
def openai(answers: list[str]) -> Iterator[Backend]:
    with FakeOpenAI(answers) as server:
        yield ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key, profile="openai")


@contextmanager
def vllm(answers: list[str]) -> Iterator[Backend]:
    with FakeOpenAI(answers, features=VLLM) as server:
        yield ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key, profile="vllm", mode="chat")


@contextmanager
def claude(answers: list[str]) -> Iterator[Backend]:
    with FakeAnthropic(answers) as server:
        yield ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)


@contextmanager
def sglang(answers: list[str]) -> Iterator[Backend]:
    with FakeSGLang(answers) as server:
        yield ul.RuntimeEndpoint(server.address, api_key=server.api_key)


@pytest.mark.parametrize("opened", [echo, openai, vllm, claude, sglang], ids=lambda opened: opened.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_backend_is_asked_again(opened: Callable[[list[str]], Any], compiled: bool) -> None:
    made: Any = chat.compile() if compiled else chat
    with opened(["far too long", "fine"]) as backend:
        state = made.run(backend=backend, timeout=PATIENCE)
        assert state["x"] == "fine"
        meta = state.get_meta_info("x")
        assert (meta["guarantee"], meta["tries"], state.usage.calls) == ("validated", 2, 2)


def test_a_runtime_is_asked_again() -> None:
    seen: list[str] = []

    def second(text: str) -> bool:
        seen.append(text)
        return len(seen) > 1

    @ul.function
    def program(s):
        s += ul.user("Well?") + ul.assistant(ul.gen("x", max_tokens=6, validate=second))

    state = program.run(backend=LocalBackend(), timeout=PATIENCE)
    assert state["x"] == seen[-1]
    assert state.get_meta_info("x")["tries"] == len(seen) == 2


def test_the_model_is_told_what_is_wrong_and_the_state_is_not() -> None:
    backend = Echo(["far too long", "fine"])
    state = chat.run(backend=backend, timeout=PATIENCE)
    assert state["x"] == "fine"
    first, second = [prompt_text(request.prompt) for request in backend.requests]
    assert second.startswith(first + "far too long")
    assert "That cannot be used: validate refuses it: it has 12 characters, and 5 are allowed." in second
    assert "Write the answer again." in second
    assert state.text().startswith(first + "fine")


def test_outside_of_roles_a_greedy_model_is_told_in_front_of_the_text() -> None:
    backend = Echo(["far too long", "fine"])
    plain.run(temperature=0, backend=backend, timeout=PATIENCE).sync()
    first, second = [prompt_text(request.prompt) for request in backend.requests]
    assert first == "Well? "
    assert second.startswith("(Below is the beginning of a text. It goes on with a text that can be used.")
    assert second.endswith(first)


def test_a_drawing_model_gets_the_same_prompt_and_another_seed() -> None:
    backend = Echo(["far too long", "fine"])
    plain.run(temperature=1, seed=7, backend=backend, timeout=PATIENCE).sync()
    first, second = backend.requests
    assert first.prompt == second.prompt
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)


def test_the_object_is_judged_after_the_constraint() -> None:
    def even(numbers: list[int]) -> bool:
        return sum(numbers) % 2 == 0

    @ul.function
    def program(s):
        s += "Numbers: " + ul.gen("x", dtype=list[int], validate=even)

    state = program.run(backend=Echo(["[1, 2]", "[1, 3]"]), timeout=PATIENCE)
    assert (state.value("x"), state.get_meta_info("x")["guarantee"]) == ([1, 3], "enforced")
    hosted = Echo(["[1, 2]", "no list", "[1, 3]"], capabilities=Capabilities("hosted", asks_again=True))
    state = program.run(backend=hosted, timeout=PATIENCE)
    assert (state.value("x"), state.get_meta_info("x")["tries"]) == ([1, 3], 3)


def test_the_second_prompt_goes_on_with_the_first_where_the_constraint_is_enforced() -> None:
    @ul.function
    def program(s):
        s += ul.user("Two even numbers?")
        s += ul.assistant(ul.gen("x", dtype=list[int], validate=lambda numbers: sum(numbers) % 2 == 0))

    backend = Echo(["[1, 2]", "[1, 3]"])
    state = program.run(backend=backend, timeout=PATIENCE)
    assert (state.value("x"), state.get_meta_info("x")["guarantee"]) == ([1, 3], "enforced")
    first, second = [prompt_text(request.prompt) for request in backend.requests]
    assert second.startswith(first + "[1, 2]"), "the prefix cache has the first prompt and its answer"
    assert "That cannot be used" in second[len(first) :]
    assert second.count("JSON Schema") == 1


def test_each_of_several_texts_is_judged() -> None:
    state = chat.run(n=2, backend=Echo([["fine", "far too long"], "good"]), timeout=PATIENCE)
    assert state["x"] == ["fine", "good"]
    assert [facts["tries"] for facts in state.get_meta_info("x")] == [1, 2]


def test_after_the_last_try_it_raises_or_keeps_the_text() -> None:
    with pytest.raises(
        ul.GuaranteeError, match=r"satisfies its validate= in 2 tries.*5 are allowed\. Raise max_tries=2"
    ):
        chat.run(max_tries=2, backend=Echo(["much too long"] * 2), timeout=PATIENCE)["x"]
    state = chat.run(max_tries=1, allow_best_effort=True, backend=Echo(["much too long"]), timeout=PATIENCE)
    assert state["x"] == "much too long"
    assert state.get_meta_info("x")["guarantee"] == "best_effort"
    with pytest.raises(ul.ResultError, match="5 are allowed"):
        state.value("x")


def test_a_fault_of_the_check_is_raised_and_nothing_is_asked_again() -> None:
    def faulty(text: str) -> None:
        raise KeyError(text)

    @ul.function
    def program(s):
        s += "a" + ul.gen("x", validate=faulty)

    backend = Echo(["one", "two"])
    with pytest.raises(KeyError, match="one"):
        program.run(backend=backend, timeout=PATIENCE)["x"]
    assert len(backend.requests) == 1


class NumpyBool:
    """Plays numpy's, which is no bool."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return self.value


NumpyBool.__name__ = "bool_"


def test_a_bool_of_numpy_is_one_and_what_is_none_is_named() -> None:
    @ul.function
    def program(s, check):
        s += "a" + ul.gen("x", validate=check, max_tries=2)

    backend = Echo(["one", "two"])
    assert program.run(lambda text: NumpyBool(text == "two"), backend=backend, timeout=PATIENCE)["x"] == "two"
    for wrong in ("a message", 0, 1):
        with pytest.raises(ul.ParameterError, match=f"validate returned {wrong!r}; return True or False"):
            program.run(lambda text, wrong=wrong: wrong, backend=Echo(["one"]), timeout=PATIENCE)["x"]


def test_batches_async_programs_and_branches() -> None:
    def answer(prompt: str) -> str:
        return "fine" if "cannot be used" in prompt else "far too long"

    states = chat.run_batch([{}, {}, {}], backend=Echo(answer), timeout=PATIENCE)
    assert [state["x"] for state in states] == ["fine"] * 3

    @ul.function
    async def program(s):
        s += ul.user("Well?")
        forks = s.fork(2)
        forks += ul.assistant(ul.gen("x", validate=short))
        forks.join()
        return await s["x"]

    async def run() -> Any:
        return (await program.run_async(backend=Echo(answer), timeout=PATIENCE)).ret_value

    assert asyncio.run(run()) == ["fine", "fine"]


def test_the_budget_counts_every_try() -> None:
    with pytest.raises(ul.BudgetError):
        chat.run(backend=Echo(["far too long", "fine"]), budget=ul.Budget(calls=1), timeout=PATIENCE)["x"]
    state = chat.run(backend=Echo(["far too long", "fine"]), budget=ul.Budget(calls=2), timeout=PATIENCE)
    assert (state["x"], state.cost.usage.calls) == ("fine", 2)


def test_speculated_text_is_judged_too() -> None:
    @ul.function(temperature=0, num_api_spec_tokens=64)
    def card(s):
        s += "Name:" + ul.gen("name", stop="\n", max_tokens=8)
        s += "\nJob:" + ul.gen("job", stop="\n", max_tokens=8, validate=short)

    def answer(prompt: str) -> str:
        if "does not go on with" in prompt:
            return " fox\n"
        return " far too\n" if prompt.endswith("Job:") else " Bo\nJob: fisherman\n"

    with FakeOpenAI(answer) as server:
        model = ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key, profile="openai")
        state = card.run(backend=model, timeout=PATIENCE)
        assert state["job"] == " fox"
        assert state.get_meta_info("job")["guarantee"] == "validated"
    with FakeOpenAI([" Bo\nJob: fox\n"]) as server:
        model = ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key, profile="openai")
        state = card.run(backend=model, timeout=PATIENCE)
        assert (state["job"], state.usage.calls) == (" fox", 1)
        assert state.get_meta_info("job")["guarantee"] == "validated"


async def later(text: str) -> None:
    raise ValueError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validate": 3}, "validate=3; write a function"),
        ({"validate": later}, "is an async function"),
        ({"validate": short, "choices": ["a", "b"]}, "validate= judges what is generated"),
        ({"validate": short, "max_tries": 0}, "max_tries"),
        ({"validate": short, "token_healing": True}, "token_healing"),
        ({"max_tries": 2}, "needs a constraint"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ul.ParameterError, match=message):
        ul.gen("x", **options)


def test_a_check_does_not_travel() -> None:
    with pytest.raises(ul.GraphError, match="validate="):
        chat.compile().save("never.json")
    with pytest.raises(ul.GraphError, match="may refuse what was generated"):
        chat.compile(server=True).run(backend=LocalBackend(), timeout=PATIENCE)
