"""The prompts of recent conversations: bounds, salts and digests."""

import tracemalloc
from sys import getsizeof

import msgspec
import pytest
from umbel.lang.conversations.messages import Message
from umbel.lang.prompt import Generated, Media, Part, Text
from umbel.lang.tool_calls import Tool, ToolCall
from umbel.server.diagnosis.exchanges import (
    Exchange,
    Exchanges,
    digests_of_messages,
    digests_of_tools,
)

OWN = 1_024 + 128 + getsizeof("")  # bytes of an exchange with one part, without the characters


def exchange(size: int) -> Exchange:
    """Makes an exchange of so many bytes."""
    return Exchange("", (), (), (), {}, True, (Text("a" * (size - OWN)),))


@pytest.mark.parametrize(
    ("prompt", "digests"),
    [
        ((Text("é"),), 0),
        ((Text("a" * 4_000), Text("日" * 4_000)), 2),
        ((Generated("ab" * 500, tuple(range(1_000, 2_000))), Media("image", "0" * 64, b"1" * 9_000)), 1),
        (tuple(Text(f"{number}", control=bool(number % 2)) for number in range(1_000)), 1_000),
    ],
    ids=["small", "wide", "ids and pixels", "many parts"],
)
def test_the_size_is_about_the_memory_that_it_takes(prompt: tuple[Part, ...], digests: int) -> None:
    tracemalloc.start()
    kept = Exchange(
        "",
        (),
        (),
        tuple(number.to_bytes(16) for number in range(digests)),
        {},
        True,
        msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=tuple[Part, ...]),
    )
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 2 < kept.size < 2 * taken + 2_048


def test_the_oldest_of_a_salt_give_way() -> None:
    kept = Exchanges(salt_bytes=5_000)
    for name in ("one", "two", "three"):
        kept.keep("a", name, exchange(2_000))
    assert [kept.find("a", name) is not None for name in ("one", "two", "three")] == [False, True, True]


def test_one_that_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    kept = Exchanges(salt_bytes=5_000)
    kept.keep("a", "one", exchange(2_000))
    kept.keep("a", "large", exchange(5_001))
    assert kept.find("a", "large") is None
    assert kept.find("a", "one") is not None
    assert not kept.takes(exchange(5_001))
    assert kept.takes(exchange(5_000))


def test_another_salt_neither_finds_an_exchange_nor_drives_it_out() -> None:
    kept = Exchanges(salt_bytes=5_000, all_bytes=10_000)
    kept.keep("a", "one", exchange(2_000))
    for number in range(9):
        kept.keep("b", str(number), exchange(2_000))
    assert kept.find("b", "one") is None
    assert kept.find("a", "one") is not None


def test_beyond_all_bytes_the_salt_that_asked_longest_ago_is_given_up() -> None:
    kept = Exchanges(salt_bytes=5_000, all_bytes=6_000)
    for salt in ("a", "b", "a", "c"):
        kept.keep(salt, f"of {salt}", exchange(1_500 if salt == "a" else 2_000))
    assert [kept.find(salt, f"of {salt}") is not None for salt in "abc"] == [True, False, True]


CALL = ToolCall("search", "{}", "1")


@pytest.mark.parametrize(
    "changed",
    [
        Message("user", ("a", "b")),
        Message("assistant", ("a",)),
        Message("assistant", ("a", "b"), name="n"),
        Message("assistant", ("ab",)),
        Message("assistant", ("a", Media("image", "b", b""))),
        Message("assistant", ("a", "b"), (ToolCall("search", "{ }", "1"),)),
    ],
    ids=["role", "fewer", "name", "joined", "picture", "arguments"],
)
def test_a_change_of_a_message_changes_its_digests(changed: Message) -> None:
    whole = digests_of_messages([Message("assistant", ("a", "b"), (CALL,))])
    assert len(set(whole)) == 4
    assert digests_of_messages([changed]) != whole


def test_what_is_added_leaves_the_digests_before_it() -> None:
    short = digests_of_messages([Message("user", ("a",))])
    longer = digests_of_messages([Message("user", ("a", "b")), Message("assistant", calls=(CALL,))])
    assert longer[: len(short)] == short
    assert digests_of_messages([Message("user", (Generated("a", (1,)),), reasoning="hm")]) == short


def test_every_field_of_a_tool_counts() -> None:
    tools = [Tool("a"), Tool("b"), Tool("a", "b"), Tool("a", parameters={"type": "object", "properties": {"b": {}}})]
    assert len(set(digests_of_tools(tools))) == 4
