"""What is said of hosted models: estimated from what the provider counts, and from the texts."""

import itertools

import pytest
import umbel as ul
from umbel.lang.cache_report import CacheCause, CallReport
from umbel.testing import AnthropicFeatures, FakeAnthropic, FakeOpenAI

from ..conftest import PATIENCE

DOCUMENT = "Every word of this document counts as a token. " * 200
STORES = AnthropicFeatures(prefill=False, cache_minimum=1024)
_clock = itertools.count(1000)


def now() -> int:
    return next(_clock)


@ul.function
def dated(s, question):
    s += ul.system(f"It is {now()}. " + DOCUMENT)
    s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=8))


@ul.function
def ask(s, question, document=DOCUMENT):
    s += ul.system(document)
    s += ul.user("Please answer. " + question) + ul.assistant(ul.gen("answer", max_tokens=8))


def second(program: ul.Program, backend: object, one: str, other: str) -> CallReport:
    program.run(one, backend=backend, timeout=PATIENCE).sync()
    return program.run(other, backend=backend, timeout=PATIENCE).explain_cache()["answer"]


def anthropic(server: FakeAnthropic, **options: bool) -> ul.Anthropic:
    return ul.Anthropic("claude-sonnet-4-6", base_url=server.base_url, api_key=server.api_key, **options)


def fake_anthropic() -> FakeAnthropic:
    return FakeAnthropic(lambda text: "Yes.", models=["claude-sonnet-4-6"], features=STORES)


def openai(server: FakeOpenAI) -> ul.OpenAI:
    return ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)


def test_a_volatile_value_is_named_to_users_of_openai() -> None:
    with FakeOpenAI(lambda text: "Yes.") as server:
        call = second(dated, openai(server), "Why?", "Why?")
    assert call.cause is CacheCause.VOLATILE
    assert call.miss is not None
    assert call.miss.source is not None
    assert call.miss.source.expression == "now()"
    assert call.miss.source.code.startswith('s += ul.system(f"It is {now()}. "')
    assert (call.miss.token, call.miss.estimated) == (None, True)
    assert call.created_tokens == 0  # the provider does not say


def test_a_volatile_value_is_named_to_users_of_anthropic() -> None:
    with fake_anthropic() as server:
        call = second(dated, anthropic(server), "Why?", "Why?")
    assert call.cause is CacheCause.VOLATILE
    assert call.miss is not None
    assert call.miss.source is not None
    assert call.miss.source.expression == "now()"
    assert call.cached_tokens == 0
    assert call.created_tokens > 1000  # what the provider charges for storing


@pytest.mark.parametrize("hosted", ["openai", "anthropic"])
def test_an_argument_is_named(hosted: str) -> None:
    if hosted == "openai":
        with FakeOpenAI(lambda text: "Yes.") as server:
            call = second(ask, openai(server), "Where is it?", "What is it?")
    else:
        with fake_anthropic() as server:
            call = second(ask, anthropic(server), "Where is it?", "What is it?")
    assert call.cause is CacheCause.ARGUMENT
    assert call.miss is not None
    assert call.miss.argument == "question"
    assert call.miss.before.endswith("Please answer. Wh")
    assert call.cached_tokens > 1000
    assert "(estimated)" in call.explanation


@pytest.mark.parametrize("hosted", ["openai", "anthropic"])
def test_the_same_prompt_again_is_a_hit(hosted: str) -> None:
    if hosted == "openai":
        with FakeOpenAI(lambda text: "Yes.") as server:
            call = second(ask, openai(server), "Why?", "Why?")
    else:
        with fake_anthropic() as server:
            call = second(ask, anthropic(server), "Why?", "Why?")
    assert call.cause is CacheCause.HIT


def test_a_prompt_that_the_provider_does_not_store_is_too_short() -> None:
    @ul.function
    def short(s, question):
        s += ul.user("Please: " + question) + ul.assistant(ul.gen("answer", max_tokens=8))

    with fake_anthropic() as server:
        call = second(short, anthropic(server), "Why?", "Where?")
    assert call.cause is CacheCause.SHORT
    assert call.miss is not None
    assert call.miss.argument == "question"  # where the prompts part is said all the same


def test_a_cache_that_is_switched_off_says_so() -> None:
    with fake_anthropic() as server:
        call = second(ask, anthropic(server, cache=False), "Why?", "Why?")
    assert call.cause is CacheCause.OFF


def test_what_the_provider_has_lost_is_told_apart() -> None:
    filler = "Other words that fill the cache of the provider until it is emptied. " * 200
    with FakeOpenAI(lambda text: "Yes.", cache_tokens=4096) as server:
        backend = openai(server)
        ask.run("Why?", backend=backend, timeout=PATIENCE).sync()
        ask.run("Why?", filler, backend=backend, timeout=PATIENCE).sync()
        call = ask.run("Why?", backend=backend, timeout=PATIENCE).explain_cache()["answer"]
    assert call.cause is CacheCause.EVICTED


def test_what_a_model_is_told_about_a_constraint_is_ours() -> None:
    @ul.function
    def count(s, thing):
        s += ul.user(f"How many {thing}?") + ul.assistant(ul.gen("answer", regex="[0-9]{1,3}", max_tokens=8))

    answers = iter(["many", "12"])
    with FakeAnthropic(lambda text: next(answers), models=["claude-sonnet-4-6"], features=STORES) as server:
        report = count.run("cats", backend=anthropic(server), timeout=PATIENCE).explain_cache()
    assert [(call.attempt, call.label) for call in report.calls] == [
        (1, "gen('answer')"),
        (2, "gen('answer'), call 2"),
    ]
