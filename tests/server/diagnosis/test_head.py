"""Lines at the head of prompts: those that the operator drops, and those that a warning names."""

import asyncio
import logging
from typing import Any

import pytest
from umbel.lang.conversations.messages import Message
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Media
from umbel.server.diagnosis.head import MOST_LINE, MOST_PATTERN, MOST_PATTERNS, ChangingLines, IgnoredLines
from umbel.server.limits import WATCHED_HEAD, WATCHED_LINES, WATCHED_REQUESTS, WATCHED_SALTS
from umbel.srt.in_process import LocalBackend

from ..client import AsgiClient, served

pytestmark = pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
BILLING = "^x-anthropic-billing-header:.*$"
RULES = "You are a coding agent.\n" + "Rule: answer in short words.\n" * 40


def billing(number: int) -> str:
    """Writes the line that Claude Code sends at the head of each request."""
    return f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={0xFA690 + number:x};"


def system(*blocks: str) -> list[Message]:
    return [Message("system", blocks), Message("user", ("hello",))]


def texts(messages: Any) -> list[tuple[Any, ...]]:
    return [message.content for message in messages]


# ------------------------------------------------------------------------------------------ dropping


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (system(billing(1), RULES), [("", RULES), ("hello",)]),
        (system(billing(1) + "\n" + RULES), [(RULES,), ("hello",)]),
        (system("a\r\n" + billing(1) + "\r\nb"), [("a\r\nb",), ("hello",)]),
        (system("see " + billing(1)), [("see " + billing(1),), ("hello",)]),
        (system("a" * WATCHED_HEAD + "\n" + billing(1)), [("a" * WATCHED_HEAD + "\n" + billing(1),), ("hello",)]),
        (system("a" * WATCHED_HEAD, billing(1)), [("a" * WATCHED_HEAD, billing(1)), ("hello",)]),
        (system(billing(1) + "x" * MOST_LINE), [(billing(1) + "x" * MOST_LINE,), ("hello",)]),
        (
            [Message("user", (Media("image", "0", b""), billing(1))), Message("user", (billing(2),))],
            [(Media("image", "0", b""), ""), (billing(2),)],
        ),
        ([], []),
    ],
    ids=[
        "block",
        "first line",
        "crlf",
        "part of a line",
        "below the head",
        "block below",
        "long",
        "first message",
        "-",
    ],
)
def test_whole_lines_of_the_head_are_dropped(given: list[Message], left: list[tuple[Any, ...]]) -> None:
    assert texts(IgnoredLines([BILLING]).dropped(given)) == left
    assert IgnoredLines().dropped(given) is given


def test_the_head_of_the_system_text_goes_over_its_messages() -> None:
    messages = [Message("system", ("a",)), Message("system", (billing(1),)), Message("user", (billing(2),))]
    assert texts(IgnoredLines(["b", BILLING]).dropped(messages)) == [("a",), ("",), ("",)]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "write 1 to 200"),
        ("a" * (MOST_PATTERN + 1), "write 1 to 200"),
        ("[a", "unterminated character set"),
        ("(a+)+$", "groups and | are not taken"),
        ("a|b", "groups and | are not taken"),
        ("a?a?a?aaa", "at most 2 of"),
        (".*.*.*x", "at most 2 of"),
        ("a{1,9}b{,2}c{3,}", "at most 2 of"),
        (r"\1", "invalid group reference"),
    ],
)
def test_a_pattern_that_may_take_long_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(ParameterError, match=r"--ignore-line .*") as refused:
        IgnoredLines([pattern])
    assert said in str(refused.value)


def test_patterns_are_of_characters_classes_and_two_repeats() -> None:
    for pattern in (BILLING, r"\(a\|b\)[(|)*+?]{3}", r"Date: \d\d:\d\d.*", r"[]*+?{1,2}]+x?", r"[^]+*]\?"):
        IgnoredLines([pattern])
    with pytest.raises(ParameterError, match="17 times --ignore-line; write at most 16"):
        IgnoredLines(["a"] * (MOST_PATTERNS + 1))


# ------------------------------------------------------------------------------------------ warning


def watched(*conversations: list[Message], salts: str = "") -> list[str | None]:
    lines = ChangingLines()
    return [lines.watch(salts[n : n + 1], messages) for n, messages in enumerate(conversations)]


def test_a_line_that_changed_three_times_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "umbel.server"):
        found = watched(*(system(billing(n), RULES) for n in range(5)))
    assert found[:2] == [None, None]
    assert found[3:] == [None, None]
    named = (
        "line 1 of the system text changes with every request, so nothing after it is reused; "
        "start umbel serve with --ignore-line {}, or send the line last"
    )
    assert found[2] == named.format("'x-anthropic-billing-header:.*'")
    # The log is read by others than the caller: it has no text of the prompt, the label neither.
    assert [record.getMessage() for record in caplog.records] == [named.format("REGEX")]


def test_the_suggested_pattern_drops_the_line() -> None:
    warning = watched(*(system(f"v. No: {n}\n{RULES}") for n in range(3)))[2]
    assert warning is not None
    pattern = warning.partition("--ignore-line '")[2].partition("'")[0]
    assert pattern == r"v\. No:.*"
    assert texts(IgnoredLines([pattern]).dropped(system(f"v. No: 9\n{RULES}"))) == [(RULES,), ("hello",)]


def test_a_line_without_a_label_is_named_by_its_place_alone() -> None:
    warning = watched(*(system(f"Rules\n{n}{n} secret\n{RULES}") for n in range(3)))[2]
    assert warning is not None
    assert warning.startswith("line 2 of the system text")
    assert "--ignore-line REGEX" in warning
    assert "secret" not in warning


def test_the_first_message_is_watched_too() -> None:
    warning = watched(*([Message("user", (f"Time: {n}\n{RULES}",))] for n in range(3)))[2]
    assert warning is not None
    assert warning.startswith("line 1 of the first message changes")


@pytest.mark.parametrize(
    "conversations",
    [
        [system(billing(n), "short\nlines") for n in range(4)],
        [system(billing(n)) for n in range(4)],
        [system(billing(n // 2), RULES) for n in range(6)],
        [system(billing(n), f"{n}\n{RULES}") for n in range(4)],
        [system(RULES + billing(n)) for n in range(4)],
        [[Message("user", (f"question {n}",))] for n in range(4)],
        [system("".join(f"{n} {m}\n" for m in range(200))) for n in range(4)],
    ],
    ids=["little follows", "alone", "stays for two", "neighbour differs", "at the end", "questions", "other texts"],
)
def test_other_differences_are_not_named(conversations: list[list[Message]]) -> None:
    assert watched(*conversations) == [None] * len(conversations)


def test_conversations_in_between_do_not_hide_the_line() -> None:
    other = [Message("user", ("summarise",))]
    found = watched(system(billing(1), RULES), other, system(billing(2), RULES), other, system(billing(3), RULES))
    assert [each is not None for each in found] == [False, False, False, False, True]


def test_requests_of_another_salt_do_not_count() -> None:
    conversations = [system(billing(n), RULES) for n in range(5)]
    found = watched(*conversations, salts="ababa")
    assert [each is not None for each in found] == [False, False, False, False, True]


def test_what_is_remembered_of_heads_is_bounded() -> None:
    """However many salts a client makes up, and into however many lines and blocks it divides its texts."""
    lines = ChangingLines()
    blocks = tuple("\n" * 9 for _ in range(1_000))
    for number in range(WATCHED_SALTS + 50):
        lines.watch(str(number), [Message("system", blocks), Message("user", ("ab\n" * 9_000,))])
    for number in range(WATCHED_REQUESTS + 5):
        lines.watch("the last", system("\n".join(f"{number}" for _ in range(9_000))))
    watched = [each.recent for each in lines._salts.values()]
    heads = [head for recent in watched for pair in recent for head in pair]
    assert len(watched) == WATCHED_SALTS
    assert len(watched[-1]) == WATCHED_REQUESTS
    assert max(map(len, heads)) == WATCHED_LINES
    assert max(sum(map(len, head)) for head in heads) <= WATCHED_HEAD


# ------------------------------------------------------------------------------------------ over HTTP


async def _cached(client: AsgiClient, dialect: str, number: int, own_block: bool) -> tuple[int, int, str]:
    """Asks with the changing line → (tokens of the prompt, cached, the warning)."""
    line = billing(number)
    if dialect == "anthropic":
        given: Any = [{"type": "text", "text": each} for each in (line, RULES)] if own_block else f"{line}\n{RULES}"
        turns = [{"role": "user", "content": "hello"}]
        body = {"model": "oracle", "max_tokens": 1, "system": given, "messages": turns, "temperature": 0}
        answer = await client.post("/v1/messages", body)
        usage = answer.json["usage"]
        return usage["input_tokens"], usage["umbel"]["cached_tokens"], answer.headers.get("umbel-warning", "")
    if dialect == "responses":
        body = {"model": "oracle", "max_output_tokens": 1, "instructions": f"{line}\n{RULES}", "input": "hello"}
        answer = await client.post("/v1/responses", body)
        usage = answer.json["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return usage["input_tokens"], cached, answer.headers.get("umbel-warning", "")
    given = [{"type": "text", "text": each} for each in (line, RULES)] if own_block else f"{line}\n{RULES}"
    turns = [{"role": "system", "content": given}, {"role": "user", "content": "hello"}]
    answer = await client.post("/v1/chat/completions", {"model": "oracle", "max_tokens": 1, "messages": turns})
    usage = answer.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, answer.headers.get("umbel-warning", "")


@pytest.mark.parametrize(
    ("dialect", "own_block"),
    [("anthropic", True), ("anthropic", False), ("chat", True), ("chat", False), ("responses", False)],
)
def test_without_the_line_the_whole_prompt_is_reused(dialect: str, own_block: bool) -> None:
    async def scenario() -> None:
        async with served(LocalBackend(chat_template="chatml"), ignored=IgnoredLines([BILLING])) as client:
            asked = [await _cached(client, dialect, number, own_block) for number in range(3)]
            assert [cached for _, cached, _ in asked] == [0, asked[1][0] - 1, asked[2][0] - 1]
            assert [warning for *_, warning in asked] == ["", "", ""]

    asyncio.run(scenario())


@pytest.mark.parametrize("dialect", ["anthropic", "chat", "responses"])
def test_with_the_line_the_third_answer_warns(dialect: str) -> None:
    async def scenario() -> None:
        async with served(LocalBackend(chat_template="chatml")) as client:
            asked = [await _cached(client, dialect, number, False) for number in range(4)]
            assert max(cached for _, cached, _ in asked) < 120
            assert ["--ignore-line" in warning for *_, warning in asked] == [False, False, True, False]

    asyncio.run(scenario())


def test_a_cache_by_name_has_the_prompt_of_the_conversation() -> None:
    """The messages of a cache lose the line, as those of the conversations that begin with it do."""

    async def scenario() -> None:
        async with served(LocalBackend(chat_template="chatml"), ignored=IgnoredLines([BILLING])) as client:
            turns = [{"role": "system", "content": f"{billing(1)}\n{RULES * 2}"}]
            made = await client.post("/v1/caches", {"model": "oracle", "messages": turns, "ttl": 60})
            assert made.status == 201, made.content
            turns = [{"role": "system", "content": f"{billing(2)}\n{RULES * 2}"}, {"role": "user", "content": "hello"}]
            answer = await client.post("/v1/chat/completions", {"model": "oracle", "max_tokens": 1, "messages": turns})
            assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 1_024

    asyncio.run(scenario())
