"""`umbel.dspy.LM` in DSPy's own programs. Skipped where DSPy is not installed: `make frameworks` installs it."""

import asyncio
import copy
import importlib
import json
import re
import secrets
from typing import Any, Literal

import pytest
import umbel as ul
from umbel.testing import FakeOpenAI

dspy: Any = pytest.importorskip("dspy", reason="DSPy is not installed; `make frameworks` runs these tests")
of_dspy: Any = importlib.import_module("umbel.dspy")
LM, JSONAdapter = of_dspy.LM, of_dspy.JSONAdapter
ADAPTERS = [dspy.ChatAdapter, dspy.JSONAdapter, JSONAdapter]
lm15: Any = importlib.import_module("dspy.lm15")


class Judge(dspy.Signature):  # type: ignore[misc]  # DSPy has no types
    """Judge the claim."""

    claim: str = dspy.InputField()
    label: Literal["yes", "no"] = dspy.OutputField()


def said(prompt: str) -> str:
    """Answers in the form that the adapter's prompt asks for; each field is a word."""
    fields = re.findall(r"`(?:\[\[ ## )?(\w+)(?: ## \]\])?`", prompt.rpartition("Respond with")[2])
    values = {"next_tool_name": "finish", "next_tool_args": {}, "label": "yes", "answer": "Paris", "reasoning": "known"}
    answer = {field: values.get(field, "done") for field in fields if field != "completed"}
    if "JSON object in the following order" in prompt:
        return json.dumps(answer)
    written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in answer.items()}
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{text}" for name, text in written.items()), "[[ ## completed ## ]]"])


@pytest.fixture
def echo() -> ul.Echo:
    return ul.Echo(said)


def programs(lm: Any, adapter: Any) -> None:
    """Runs three programs of DSPy's documentation: chain of thought, ReAct, and few-shot by BootstrapFewShot."""

    def population(city: str) -> str:
        """Tells how many people live in a city."""
        return f"many live in {city}"

    with dspy.context(lm=lm, adapter=adapter):
        think = dspy.ChainOfThought("question -> answer")
        first = think(question="What is the capital of France?")
        assert isinstance(first.answer, str)
        assert isinstance(first.reasoning, str)
        agent = dspy.ReAct("question -> answer", tools=[population], max_iters=2)
        assert isinstance(agent(question="How many live in Paris?").answer, str)
        examples = [dspy.Example(question=f"Capital {i}?", answer="Paris").with_inputs("question") for i in range(2)]
        compiler = dspy.BootstrapFewShot(metric=lambda example, made, trace=None: True, max_bootstrapped_demos=1)
        compiled = compiler.compile(think, trainset=examples)
        assert compiled.predictors()[0].demos
        assert isinstance(compiled(question="Capital?").answer, str)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_three_documented_programs_run_on_echo(echo: ul.Echo, adapter: Any) -> None:
    programs(LM(echo, cache=False), adapter())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_three_documented_programs_run_on_a_hosted_model(adapter: Any) -> None:
    with FakeOpenAI(said) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        programs(LM(backend, cache=False), adapter())
        assert server.calls >= 5


@pytest.mark.model
@pytest.mark.processes
def test_three_documented_programs_run_on_the_default_model() -> None:
    with ul.Runtime() as runtime:
        lm = LM(runtime, cache=False, temperature=0, max_tokens=200)
        programs(lm, JSONAdapter())
        assert sum(call["usage"]["prompt_tokens_details"]["cached_tokens"] for call in lm.history) > 0


def test_a_schema_is_enforced(echo: ul.Echo) -> None:
    """Echo refuses to be asked for what its answer breaks, as `json_schema` of a `gen` does."""
    with dspy.context(lm=LM(ul.Echo(lambda prompt: '{"label": "yes"}'), cache=False), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Judge)(claim="water is wet").label == "yes"
    lm = LM(ul.Echo(lambda prompt: '{"label": "perhaps"}'), cache=False)
    request = lm15.Request(
        model=lm.model,
        messages=(lm15.Message.user("Is it?"),),
        config=lm15.Config(response_format={"type": "json_schema", "schema": {"enum": ["yes"]}, "name": "a"}),
    )
    with pytest.raises(dspy.LMError):
        lm(request)


def test_usage_and_history_count_cached_tokens(echo: ul.Echo) -> None:
    lm = LM(echo, cache=False)
    with dspy.context(lm=lm):
        dspy.Predict(Judge)(claim="one")
        dspy.Predict(Judge)(claim="two")
    first, second = (call["usage"] for call in lm.history)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]
    assert second["completion_tokens"] > 0


def test_sampling_reaches_the_backend_and_n_answers_come(echo: ul.Echo) -> None:
    lm = LM(ul.Echo(lambda prompt: "one two three four"), cache=False, temperature=0.5)
    assert lm("hello", n=2, stop=["three"]) == ["one two ", "one two "]
    assert lm("hello", max_tokens=1) == ["one"]
    (scored,) = lm("hello", logprobs=True, top_logprobs=2)
    assert len(scored["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_tasks_and_threads_are_answered_at_once() -> None:
    """The gate lets nothing out before all eight calls have arrived."""
    gate = ul.Gate()
    lm = LM(ul.Echo(said, gate=gate), cache=False)

    async def ask_all() -> list[Any]:
        with dspy.context(lm=lm):
            calls = [asyncio.create_task(dspy.Predict(Judge).acall(claim=str(i))) for i in range(4)]
            await asyncio.to_thread(gate.wait_for, 4)
            gate.open()
            return await asyncio.gather(*calls)

    assert [made.label for made in asyncio.run(ask_all())] == ["yes"] * 4
    with dspy.context(lm=lm):
        made = dspy.Parallel(num_threads=4, disable_progress_bar=True)(
            [(dspy.Predict(Judge), dspy.Example(claim=str(i)).with_inputs("claim")) for i in range(4)]
        )
    assert [each.label for each in made] == ["yes"] * 4


def test_pieces_are_streamed(echo: ul.Echo) -> None:
    async def pieces() -> str:
        with dspy.context(lm=LM(echo, cache=False), adapter=dspy.ChatAdapter()):
            listener = dspy.streaming.StreamListener("label")
            program = dspy.streamify(dspy.Predict(Judge), stream_listeners=[listener])
            chunks = [chunk async for chunk in program(claim="one")]
        return "".join(chunk.chunk for chunk in chunks if isinstance(chunk, dspy.streaming.StreamResponse))

    assert asyncio.run(pieces()).startswith("yes")


def test_the_cache_of_dspy_answers_a_second_time() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "answered"

    lm = LM(ul.Echo(answer), model=f"umbel/{secrets.token_hex(8)}")  # DSPy keeps answers on disk, by the model's name
    assert lm("hello") == ["answered"]
    before = len(asked)
    assert lm("hello") == ["answered"]
    assert len(asked) == before > 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"user": "me"}, "user_id"),
        ({"stop": ["x" * 300]}, "stop string of 300"),
        ({"service_tier": "flex"}, "service_tier"),
    ],
)
def test_what_is_not_offered_is_named(echo: ul.Echo, setting: dict[str, Any], words: str) -> None:
    with pytest.raises(dspy.LMError, match=words):
        LM(echo, cache=False)("hello", **setting)


def test_a_picture_of_the_network_is_not_fetched(echo: ul.Echo) -> None:
    request = lm15.Request(
        model="umbel/Echo", messages=(lm15.Message.user([lm15.ImagePart(url="https://example.com/a.png")]),)
    )
    with pytest.raises(dspy.LMError, match="not fetched"):
        LM(echo, cache=False)(request)


def test_a_copy_asks_the_same_backend(echo: ul.Echo) -> None:
    lm = LM(echo, cache=False, temperature=0.5)
    for copied in (copy.deepcopy(lm), lm.copy(temperature=0.7)):
        with dspy.context(lm=copied):
            assert dspy.Predict("question -> answer")(question="Capital?").answer == "Paris"
    assert echo.calls == 2


def test_a_thing_that_is_no_backend_is_refused() -> None:
    with pytest.raises(ul.ParameterError, match="is not a backend"):
        LM("gpt-4o")


@pytest.mark.parametrize(
    ("setting", "says"),
    [("max_new_tokens", "did you mean 'max_tokens'"), ("foo", "umbel.dspy.LM.. has no option 'foo'")],
)
def test_a_setting_that_is_none_is_refused_where_it_is_written(setting: str, says: str, echo: ul.Echo) -> None:
    with pytest.raises(ul.ParameterError, match=says):
        LM(echo, **{setting: 2})
