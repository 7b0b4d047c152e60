"""Answers of Claude models: texts piece by piece, stops that are found here, what they cost, and how they fail."""

import json
import logging

import anthropic
import pytest
import umbel as ul
from umbel.interpreter.backends.hosted.anthropic.backend import Anthropic
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.transport import http_library

from .messages_wire import Event, MessagesWire, events

http = http_library(anthropic)  # httpx or httpx2, as the SDK is written for

LONG = "A long text about one thing. " * 200


@ul.function
def chat(s, stop=(), max_tokens=64):
    s += ul.user("Say something.") + ul.assistant(ul.gen("said", max_tokens=max_tokens, stop=list(stop)))


def run(wire: MessagesWire, **arguments: object) -> ul.State:
    return chat.run(backend=wire.claude(), **arguments)


def test_the_text_comes_in_pieces():
    state = chat.run(backend=MessagesWire("Hello there.").claude(), stream=True)
    assert "".join(state.text_iter("said")) == "Hello there." == state["said"]


def test_usage_counts_what_was_read_from_the_cache_and_what_was_stored():
    wire = MessagesWire(events(["a"], usage={"cache_read_input_tokens": 30, "cache_creation_input_tokens": 5}))
    assert run(wire)["said"] == "a"
    state = run(wire)
    state.text()
    assert state.usage == ul.Usage(45, 30, 7, 1, 5, cache_read_tokens=30)


def test_a_stop_of_the_provider_is_named():
    state = run(MessagesWire(events(["One."], reason="stop_sequence", sequence="END")), stop=["END"])
    assert state["said"] == "One."
    assert state.meta("said")["matched_stop"] == "END"


def test_a_line_ends_here_and_the_connection_is_closed():
    wire = MessagesWire(events(["One.", " Two", "\nThree", *["more"] * 100]))
    state = run(wire, stop=["\n"])
    assert state["said"] == "One. Two"
    assert state.meta("said")["matched_stop"] == "\n"
    assert state.meta("said")["finish_reason"] == "stop"
    assert "stop_sequences" not in wire.bodies[0]
    assert wire.read[0] < 10
    assert wire.closed == 1
    assert state.usage.prompt_tokens == 10
    assert 0 < state.usage.completion_tokens <= 64


def test_text_that_may_become_a_stop_is_held_back():
    state = chat.run(backend=MessagesWire("a\nb\n\nc").claude(), stop=["\n\n"], stream=True)
    pieces = list(state.text_iter("said"))
    assert "".join(pieces) == "a\nb"
    assert "\n" not in pieces


def test_the_end_of_the_tokens_is_told():
    state = run(MessagesWire(events(["One"], reason="max_tokens")))
    assert state["said"] == "One"
    assert state.meta("said")["finish_reason"] == "length"


def test_thoughts_are_not_text():
    empty = {"type": "thinking", "thinking": "", "signature": ""}
    thought: list[Event] = [
        {"type": "content_block_start", "index": 0, "content_block": empty},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_stop", "index": 0},
    ]  # fmt: skip
    assert run(MessagesWire(events(["Yes."], before=thought)))["said"] == "Yes."
    with pytest.raises(ul.RequestError, match="raise max_tokens"):
        run(MessagesWire(events([], before=thought, reason="max_tokens")))["said"]


@pytest.mark.parametrize(
    ("reason", "error", "words"),
    [
        ("refusal", ul.RequestError, "declined"),
        ("tool_use", ul.BackendError, "no tools"),
        (None, ul.ConnectionLostError, "ended too early"),
    ],
)
def test_other_endings_are_errors(reason: str | None, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        run(MessagesWire(events(["One"], reason=reason)))["said"]


def test_what_is_no_answer_is_an_error():
    page = http.Response(200, headers={"content-type": "text/html"}, text="<html>Welcome</html>")
    with pytest.raises(ul.BackendError, match="no answer of this API"):
        run(MessagesWire(page))["said"]
    with pytest.raises(ul.BackendError, match="no answer of this API"):
        run(MessagesWire(events([], before=[{"type": "content_block_delta", "index": 0}])))["said"]


def test_an_answer_without_an_end_is_left():
    with pytest.raises(ul.BackendError, match="more text than max_tokens=1 allows"):
        run(MessagesWire(events(["x" * 1000] * 1000)), max_tokens=1)["said"]
    ping = {"type": "content_block_stop", "index": 0}
    with pytest.raises(ul.BackendError, match="does not end"):
        run(MessagesWire(events([], before=[ping] * 20_000)), max_tokens=1)["said"]


def refusal(status: int, kind: str, message: str) -> http.Response:
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return http.Response(status, headers={"content-type": "application/json"}, text=json.dumps(body))


@pytest.mark.parametrize("status", [429, 500, 503, 529])
def test_it_tries_again_before_an_answer_begins(status: int):
    wire = MessagesWire(refusal(status, "overloaded_error", "Overloaded"), "ok")
    assert run(wire)["said"] == "ok"
    assert len(wire.bodies) == 2


def test_it_does_not_try_again_for_ever():
    wire = MessagesWire(refusal(529, "overloaded_error", "Overloaded"))
    with pytest.raises(ul.OverloadedError, match="tried 4 times"):
        run(wire)["said"]
    assert len(wire.bodies) == 4


def test_an_error_inside_an_answer_is_final():
    broken = [*events(["One"])[:-3], {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}]
    wire = MessagesWire(broken)
    with pytest.raises(ul.OverloadedError, match="broke its answer off"):
        run(wire)["said"]
    assert len(wire.bodies) == 1


def test_no_error_says_the_key(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    wire = MessagesWire(refusal(401, "authentication_error", "invalid x-api-key sk-ant-secret"))
    claude = wire.claude()
    with pytest.raises(ul.RequestError) as raised:
        chat.run(backend=claude)["said"]
    sent = wire.headers[0]
    assert "sk-ant-secret" in (sent.get("x-api-key"), sent.get("authorization", "").removeprefix("Bearer "))
    told = "".join([repr(raised.value), repr(raised.value.__cause__), repr(raised.value.__context__), repr(claude)])
    assert "sk-ant-secret" not in told + caplog.text


def test_a_missing_key_is_said_when_the_backend_is_made():
    with pytest.raises(ul.ParameterError, match="ANTHROPIC_API_KEY"):
        Anthropic("claude-haiku-4-5", environment=Environment(variables={}))
    assert "sk-1" not in repr(
        Anthropic("claude-haiku-4-5", environment=Environment(variables={"ANTHROPIC_API_KEY": "sk-1"}))
    )
    with pytest.raises(ul.ParameterError, match="did you mean 'api_key'"):
        Anthropic("claude-haiku-4-5", apikey="x")
    with pytest.raises(ul.ParameterError, match=r"base_url=.* must name a host"):
        Anthropic("claude-haiku-4-5", api_key="x", base_url="api.anthropic.com")


def test_a_conversation_stores_its_turns():
    wire = MessagesWire("ok")

    @ul.function
    def talk(s):
        s += ul.system(LONG)
        for question in ("One?", "Two?"):
            s += ul.user(question) + ul.assistant(ul.gen("answer"))

    talk.run(backend=wire.claude("claude-sonnet-4-6")).text()
    system, messages = wire.bodies[1]["system"], wire.bodies[1]["messages"]
    assert "cache_control" in system[-1]
    assert ["cache_control" in message["content"][-1] for message in messages] == [True, False, True]


@pytest.mark.parametrize("why", ["an option", "a salt", "a private part"])
def test_nothing_is_stored_where_nothing_may_be(why: str):
    wire = MessagesWire("ok")
    options = {"cache": False} if why == "an option" else {}
    salt = {"salt": "one"} if why == "a salt" else {}

    @ul.function
    def talk(s):
        s += ul.system(LONG)
        if why == "a private part":
            s.private("one")
        s += ul.user("One?") + ul.assistant(ul.gen("answer"))

    talk.run(backend=wire.claude("claude-sonnet-4-6", **options), **salt).text()
    assert "cache_control" not in json.dumps(wire.bodies)


def test_what_branches_share_inside_a_turn_is_stored():
    wire = MessagesWire("ok")

    @ul.function
    def questions(s):
        s += ul.user_begin()
        s += LONG
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += f"Question {number}?"
            branch += ul.user_end()
            branch += ul.assistant(ul.gen("answer"))
        branches.join()

    questions.run(backend=wire.claude("claude-sonnet-4-6"))["answer"]
    for body in wire.bodies:
        shared, own = body["messages"][0]["content"]
        assert shared["text"] == LONG
        assert "cache_control" in shared
        assert own["text"].startswith("Question")


def test_more_continuations_are_as_many_calls():
    wire = MessagesWire("ok")

    @ul.function
    def sample(s):
        s += ul.user("Say something.") + ul.assistant(ul.gen("said", n=3))

    state = sample.run(backend=wire.claude())
    assert state["said"] == ["ok"] * 3
    assert (len(wire.bodies), state.usage.calls, state.usage.prompt_tokens) == (3, 3, 30)


def test_the_backend_counts():
    wire = MessagesWire(refusal(529, "overloaded_error", "Overloaded"), "ok")
    with ul.default_backend(wire.claude()):
        chat.run().text()
        told = ul.get_server_info()
    assert told["calls"] == 1
    assert told["prompt_tokens"] == 10
    assert told["retries_529"] == 1


def test_the_providers_cache_cannot_be_emptied():
    with ul.default_backend(MessagesWire("ok").claude()), pytest.raises(ul.CapabilityError, match="salt="):
        ul.flush_cache()
