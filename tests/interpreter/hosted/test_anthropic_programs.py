"""Programs on a server of the Anthropic dialect: what its prompt cache is read for, and prefills that keep the text."""

import json
import warnings

import pytest
import umbel as ul
from umbel.interpreter.fakes.server import Faults
from umbel.testing import AnthropicFeatures, FakeAnthropic

from .storyteller import Storyteller, StorytellingEcho

DOCUMENT = "Every word of this document counts as a token. " * 200
SHARED = 2000  # tokens of the document at least, as the server counts them
STORES = AnthropicFeatures(prefill=False, cache_minimum=1024)


def claude(server: FakeAnthropic, model: str = "claude-sonnet-4-6", **options: object) -> ul.Anthropic:
    return ul.Anthropic(model, base_url=server.base_url, api_key=server.api_key, **options)  # type: ignore[arg-type]


def storing(faults: Faults = ()) -> FakeAnthropic:
    return FakeAnthropic(lambda text: "Yes.", models=["claude-sonnet-4-6"], features=STORES, faults=faults)


@ul.function
def talk(s, questions):
    s += ul.system(DOCUMENT)
    for question in questions:
        s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=8))


@ul.function
def ask_in_branches(s, count):
    s += ul.user_begin() + DOCUMENT
    branches = s.fork(count)
    for number, branch in enumerate(branches):
        branch += f"Question {number}?" + ul.user_end() + ul.assistant(ul.gen("answer", max_tokens=8))
    branches.join()


@ul.function
def complete_in_branches(s, count):
    s += DOCUMENT
    branches = s.fork(count)
    for number, branch in enumerate(branches):
        branch += f"Note {number}:" + ul.gen("answer", max_tokens=8)
    branches.join()


def test_a_conversation_reads_what_its_turns_have_stored():
    with storing() as server:
        state = talk.run(questions=["One?", "Two?", "Three?"], backend=claude(server))
        state.text()
        assert state.usage.cached_tokens > 2 * SHARED
        assert state.usage.cache_write_tokens < SHARED + 200
        assert state.usage == server.usage


def test_the_next_program_reads_the_system_turn():
    with storing() as server:
        backend = claude(server)
        for question in ("One?", "Two?"):
            state = talk.run(questions=[question], backend=backend)
            state.text()
        assert state.usage.cached_tokens > SHARED


@pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")
@pytest.mark.parametrize("program", [ask_in_branches, complete_in_branches])
def test_of_eight_branches_one_stores_and_seven_read(program: ul.Program):
    with storing() as server:
        backend = claude(server)
        state = program.run(count=8, backend=backend)
        assert state["answer"] == ["Yes."] * 8
        assert state.usage.cached_tokens > 7 * SHARED
        assert state.usage.cache_write_tokens < SHARED + 1000
        with ul.default_backend(backend):
            told = ul.get_server_info()
        assert told["waited"] == 7
        assert told["breakpoints"] == 16


@pytest.mark.parametrize("marked", [True, False])
def test_a_cache_point_is_a_breakpoint_inside_of_a_turn(marked: bool):
    @ul.function
    def ask(s, question):
        s += ul.user_begin() + DOCUMENT
        if marked:
            s += ul.cache_point(ttl=300)
        s += question + ul.user_end() + ul.assistant(ul.gen("answer", max_tokens=8))

    with storing() as server:
        backend = claude(server)
        states = [ask.run(question=question, backend=backend) for question in ("One?", "Two?")]
        assert [state["answer"] for state in states] == ["Yes."] * 2
        read = sum(state.usage.cached_tokens for state in states)
        assert read > SHARED if marked else read == 0


@pytest.mark.parametrize(
    ("ttl", "mark"),
    [(60, {}), (300, {}), (301, {"ttl": "1h"}), (3_600, {"ttl": "1h"}), (7_200, {"ttl": "1h"})],
)
def test_a_cache_point_is_kept_for_the_provider_s_next_longer_time(ttl: float, mark: dict[str, str]):
    @ul.function
    def ask(s):
        s += ul.system(DOCUMENT) + ul.cache_point(ttl=ttl)
        s += ul.user("One?") + ul.assistant(ul.gen("answer", max_tokens=8))

    with storing() as server:
        backend = claude(server)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            usage = (state := ask.run(backend=backend)).usage
        says = f"for at most 3600 s after its last use, and cache_point(ttl={ttl}) asks for more"
        assert sum(says in str(each.message) for each in warned) == (ttl > 3_600)
        assert server.requests[0].body["system"][-1]["cache_control"] == {"type": "ephemeral", **mark}
        written, hour = usage.cache_write_tokens, usage.long_write_tokens
        assert (hour > SHARED, written - hour < 50) == (bool(mark), bool(mark))  # the user's turn is stored, too
        prompt = usage.prompt_tokens - written + 1.25 * (written - hour) + 2 * hour
        assert state.cost.dollars == pytest.approx((prompt * 3.0 + usage.completion_tokens * 15.0) / 1e6)


def test_without_breakpoints_nothing_is_read_or_stored():
    with storing() as server:
        state = talk.run(questions=["One?", "Two?"], backend=claude(server, cache=False))
        state.text()
        assert (state.usage.cached_tokens, state.usage.cache_write_tokens) == (0, 0)
        assert "cache_control" not in json.dumps([asked.body for asked in server.requests])


def test_a_branch_that_fails_lets_the_next_one_store():
    @ul.function
    def survey(s):
        s += ul.user_begin() + DOCUMENT
        branches = s.fork(2)
        for branch in branches:
            branch += ul.user_end() + ul.assistant(ul.gen("answer", max_tokens=8))
        answered = []
        for branch in branches:
            try:
                answered.append(branch["answer"])
            except ul.RequestError:
                answered.append(None)
        return answered

    with storing(faults=[400]) as server:
        assert sorted(survey.run(backend=claude(server)).ret_value, key=str) == [None, "Yes."]
        assert server.usage.cache_write_tokens > SHARED


def test_breakpoints_are_the_same_each_time():
    with storing() as server:
        backend = claude(server)
        for _ in range(3):
            talk.run(questions=["One?", "Two?"], backend=backend).text()
        places = [
            [number for number, block in enumerate(_blocks(asked.body)) if "cache_control" in block]
            for asked in server.requests
        ]
        assert places[0] == places[2] == places[4]
        assert places[1] == places[3] == places[5]
        assert server.usage.cached_tokens > 5 * SHARED


@ul.function
def form(s):
    s += ul.user("Who are you?")
    s += ul.assistant("Name: " + ul.gen("name", stop=",", max_tokens=8) + ",\n\nJob:\n" + ul.gen("job", max_tokens=8))


FORM = {"Name: ": "Ada, a person", ",\n\nJob:\n": "engineer"}


@pytest.mark.parametrize(
    ("model", "features"),
    [
        ("claude-haiku-4-5", AnthropicFeatures()),
        ("claude-sonnet-4-6", AnthropicFeatures(prefill=False)),
    ],
)
def test_the_text_is_the_same_with_and_without_prefill(model: str, features: AnthropicFeatures):
    expected = form.run(backend=StorytellingEcho(FORM)).text()
    with FakeAnthropic(Storyteller(FORM), models=[model], features=features) as server:
        assert form.run(backend=claude(server, model)).text() == expected
        last = [asked.body["messages"][-1] for asked in server.requests]
    assert [message["role"] for message in last] == ["assistant" if features.prefill else "user"] * 2


def test_max_tokens_zero_stores_the_prompt():
    with storing() as server:
        backend = claude(server)

        @ul.function
        def warm(s):
            s += ul.system(DOCUMENT) + ul.user("One?") + ul.assistant(ul.gen("answer", max_tokens=0))

        state = warm.run(backend=backend)
        assert state["answer"] == ""
        assert state.usage.cache_write_tokens > SHARED
        talk.run(questions=["One?"], backend=backend).text()
        assert server.usage.cached_tokens > SHARED


def _blocks(body: dict) -> list[dict]:
    return [*body.get("system", []), *(block for message in body["messages"] for block in message["content"])]
