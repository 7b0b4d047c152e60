"""Speculation against servers: fewer calls, fewer tokens, the same variables."""

from dataclasses import replace

import pytest
import umbel as ul
from umbel.interpreter.backends.hosted.openai.profiles import SERVERS

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from umbel.testing import VLLM, FakeAnthropic, FakeOpenAI

from .models import Follower
from .random_programs import Form
from .test_random_forms import once

EXAMPLES = "Describe a character.\n\nName: Ron\nJob: student\nAge: 11\n\nName: Dobby\nJob: elf\nAge: 30\n\n"
FORM = "Name: Harry\nJob: wizard\nAge: 11\nMood: calm\n"
FIELDS = ["name", "job", "age"]


@ul.function(temperature=0, stop="\n", max_tokens=16)
def character(s):
    s += EXAMPLES
    s += "Name:" + ul.gen("name") + "\nJob:" + ul.gen("job") + "\nAge:" + ul.gen("age")


@ul.function(temperature=0, stop="\n", max_tokens=16)
def character_by_chat(s):
    s += ul.user("Describe Harry.")
    s += ul.assistant("Name: " + ul.gen("name") + "\nJob: " + ul.gen("job") + "\nAge: " + ul.gen("age"))


def described(program, backend, **options):
    state = program.run(backend=backend, **options)
    state.sync()
    return state, {name: state[name] for name in FIELDS}


def test_a_completion_server_gets_one_call_instead_of_three():
    with FakeOpenAI(Follower("elf\nAge: 30\n\n" + FORM)) as server:
        backend = ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key)
        plain, expected = described(character, backend)
        calls = server.calls
        state, found = described(character, backend, num_api_spec_tokens=64)
        assert (calls, server.calls - calls) == (3, 1)
    assert found == expected == {"name": " Harry", "job": " wizard", "age": " 11"}
    assert state.cost.usage.calls == 1
    assert state.cost.usage.prompt_tokens < 0.4 * plain.cost.usage.prompt_tokens
    spared = plain.cost.usage.prompt_tokens - state.cost.usage.prompt_tokens
    assert state.cost.speculation.input_tokens_saved == pytest.approx(spared, abs=4)
    assert [state.meta(name)["speculated"] for name in FIELDS] == [False, True, True]


def chat_servers():
    text = "assistant\n" + FORM
    yield (
        "openai",
        lambda: FakeOpenAI(Follower(text)),
        lambda s: ul.OpenAI("gpt-4o", base_url=s.base_url, api_key=s.api_key),
    )
    yield (
        "vllm",
        lambda: FakeOpenAI(Follower(text), models=["m"], features=VLLM),
        lambda s: ul.OpenAI("m", base_url=s.base_url, api_key=s.api_key, profile=SERVERS["vllm"]),
    )
    for prefill in (True, False):
        yield f"anthropic, prefill={prefill}", lambda: FakeAnthropic(Follower(text), models=["m"]), claude(prefill)


def claude(prefill):
    def connect(server):
        backend = ul.Anthropic("m", base_url=server.base_url, api_key=server.api_key)
        profile = replace(backend.profile, prefill=prefill)
        return ul.Anthropic("m", base_url=server.base_url, api_key=server.api_key, profile=profile)

    return connect


@pytest.mark.parametrize(
    ("start", "connect"), [each[1:] for each in chat_servers()], ids=[e[0] for e in chat_servers()]
)
def test_a_chat_server_gets_one_call_instead_of_three(start, connect):
    with start() as server:
        backend = connect(server)
        _, expected = described(character_by_chat, backend)
        calls = server.calls
        state, found = described(character_by_chat, backend, num_api_spec_tokens=64)
        assert (calls, server.calls - calls) == (3, 1)
    assert found == expected == {"name": "Harry", "job": "wizard", "age": "11"}
    assert state.cost.speculation.calls_saved == 2


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_servers_that_deviate_leave_variables_as_they_are(mode):
    model = [Follower("")]
    with FakeOpenAI(lambda text: model[0](text)) as server:
        name = "gpt-4o" if mode == "chat" else "gpt-3.5-turbo-instruct"
        backend = ul.OpenAI(name, base_url=server.base_url, api_key=server.api_key)
        hits = 0
        for seed in range(12):
            form = Form(seed, chat=mode == "chat")
            model[0] = Follower(form.text, 20, seed)
            program = ul.function(temperature=0, stop="\n")(form.program())
            plain = program.run(backend=backend)
            state = program.run(backend=backend, num_api_spec_tokens=64)
            if plain.error() is None and all(once(plain.meta(name)) for name in plain.variables()):
                assert {name: state[name] for name in form.names} == {name: plain[name] for name in form.names}
            hits += state.cost.speculation.hits
    assert hits > 3
