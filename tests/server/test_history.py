"""Answers that come back as text go into the prompt with the ids that the model chose."""

import asyncio

import pytest
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.conversations.messages import Message
from umbel.lang.prompt import Generated
from umbel.lang.protocol import Completion, Final, FinishReason, GenRequest, Origin, Usage
from umbel.lang.sampling import SamplingParams
from umbel.server.history import AnswerHistory
from umbel.srt.in_process import LocalBackend

from .client import served

USER = {"role": "user", "content": "What happens then?"}


def completion(text: str, *token_ids: int, tail: str = "") -> Completion:
    return Completion(text, token_ids, len(token_ids), tail, FinishReason.STOP)


def said(text: str) -> list[Message]:
    return [Message("user", ("hi",)), Message("assistant", (text,)), Message("user", ("and?",))]


async def answer(backend: LocalBackend, messages: list[Message], name: str, salt: str) -> Final:
    prompt = ChatTemplate("chatml").conversation(messages).parts
    letters = {ord("e"): 100.0, ord("s"): 100.0}  # never "es" in one token, as the tokenizer writes it
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, logit_bias=letters)
    async for event in backend.generate(GenRequest(name, prompt, sampling, origin=Origin(salt=salt))):
        if isinstance(event, Final):
            return event
    raise AssertionError("no answer")


def test_the_next_turn_finds_all_of_the_last_one_in_the_cache() -> None:
    """The model writes tokens that its tokenizer would not: as text, less of an answer is found."""

    async def two_turns(backend: LocalBackend, salt: str, history: AnswerHistory) -> tuple[Usage, Usage]:
        messages = [Message("user", ("What happens then?",))]
        first = await answer(backend, messages, f"{salt}-1", salt)
        text = first.completions[0].text
        history.keep(salt, text, first.completions[0])
        messages += [Message("assistant", (text,)), Message("user", ("And then?",))]
        return first.usage, (await answer(backend, history.recall(salt, messages), f"{salt}-2", salt)).usage

    async def run() -> None:
        backend = LocalBackend("oracle")
        await backend.start()
        try:
            first, second = await two_turns(backend, "remembered", AnswerHistory())
            _, forgotten = await two_turns(backend, "forgotten", AnswerHistory(salt_tokens=0))
        finally:
            await backend.close()
        # The last token's KV is computed only when another one follows it.
        assert second.cached_tokens == first.prompt_tokens + first.completion_tokens - 1
        assert forgotten.cached_tokens < second.cached_tokens

    asyncio.run(run())


def test_answers_of_another_salt_are_not_found() -> None:
    history = AnswerHistory()
    history.keep("me", "hello", completion("hello", 1, 2))
    assert history.recall("me", said("hello"))[1].content == (Generated("hello", (1, 2)),)
    assert history.recall("you", said("hello")) == said("hello")
    history.keep("you", "hello", completion("hello", 3))
    assert history.recall("me", said("hello"))[1].content == (Generated("hello", (1, 2)),)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("hello", completion("<think>hm</think>hello", 1, 2)),
        ("hello", completion("hello", 1, tail="lo")),
        ("hello", Completion("hello", (1,), 0, "", FinishReason.STOP)),
    ],
)
def test_ids_that_do_not_spell_the_text_are_not_kept(text: str, kept: Completion) -> None:
    history = AnswerHistory()
    history.keep("me", text, kept)
    assert history.recall("me", said(text)) == said(text)


def test_only_what_an_assistant_said_is_replaced() -> None:
    history = AnswerHistory()
    history.keep("me", "hi", completion("hi", 1))
    assert history.recall("me", said("hello")) == said("hello")
    several = [Message("assistant", ("hi", "there"))]
    assert history.recall("me", several) == several


def test_the_least_recently_used_answers_are_given_up() -> None:
    history = AnswerHistory(salt_tokens=2 * (16 + 3))
    for number, text in enumerate("ab"):
        history.keep("me", text, completion(text, number, number, number))
    history.keep("you", "c", completion("c", 3, 3, 3))
    history.recall("me", said("a"))
    history.keep("me", "d", completion("d", 4, 4, 4))
    found = [text for text in "abd" if history.recall("me", said(text)) != said(text)]
    assert found == ["a", "d"]
    assert history.recall("you", said("c")) != said("c"), "another salt has its own share"
    history.keep("me", "a", completion("a", 5, 5))
    assert history.recall("me", said("a"))[1].content == (Generated("a", (5, 5)),), "the latest answer counts"


@pytest.mark.parametrize("bound", [{"all_tokens": 10 * (16 + 2)}, {"most": 10 * (16 + 2)}])
def test_the_answers_of_all_salts_are_bounded(bound: dict[str, int]) -> None:
    """Those of the salts that asked longest ago are given up, however many salts a client makes up."""
    history = AnswerHistory(**bound)
    for number in range(1_000):
        history.keep(f"salt {number}", "a", completion("a", 1, 2))
        history.recall("salt 0", said("a"))
    found = [number for number in range(1_000) if history.recall(f"salt {number}", said("a")) != said("a")]
    assert found == [0, *range(991, 1_000)]
    assert len(history) == 10
    history.keep("salt 0", "b" * 800, completion("b" * 800, *range(150)))
    assert history.recall("salt 0", said("b" * 800)) == said("b" * 800), "it is larger than all may be"


def test_a_server_remembers_answers_as_long_as_the_cache_could_hold_them() -> None:
    async def kept() -> int:
        async with served(LocalBackend(pool_tokens=512, context_length=256)) as client:
            for number in range(20):
                body = {"model": "oracle", "max_tokens": 24, "cache_salt": f"s{number}", "seed": number}
                answer = await client.post("/v1/chat/completions", {**body, "messages": [USER], "temperature": 1.0})
                assert answer.status == 200
            return len(client.app.front.history)

    assert 1 < asyncio.run(kept()) < 20
