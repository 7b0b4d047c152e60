"""Text → ids and ids → text, answered by the gateway from its tokenizer."""

import asyncio

import pytest
from umbel.lang.errors import ParameterError, RequestError
from umbel.lang.prompt import Generated, Media, Text
from umbel.lang.protocol import Detokenize, Detokenized, Failure, Origin, Tokenize, Tokenized
from umbel.srt.in_process import LocalBackend
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import Harness

BOS, EOS = 256, 257


class NoBos(ByteTokenizer):
    bos_id = None


def ask(question: Tokenize | Detokenize, tokenizer: ByteTokenizer | None = None) -> object:
    harness = Harness(ready=False, tokenizer=tokenizer)
    harness.send(question)
    (answer,) = harness.answers()
    assert harness.to_engine == [], "the engine is not asked"
    assert harness.gateway.in_flight == 0
    return answer


def test_a_prompt_is_tokenized_as_a_call_would_compute_it() -> None:
    parts = (Text("<|im_start|>", control=True), Text("a the</s>"), Generated("b", (98,)))
    harness = Harness()
    harness.send(Tokenize("t", parts, Origin(salt="s")))
    (answer,) = harness.answers()
    assert answer == Tokenized("t", (BOS, 258, 97, harness.gateway.encoder.encode([Text(" the")])[1], *b"</s>", 98))
    assert answer.token_ids == tuple(harness.gateway.encoder.encode(parts))


@pytest.mark.parametrize(("tokenizer", "ids"), [(ByteTokenizer(), (BOS,)), (NoBos(), ())])
def test_an_empty_prompt_has_only_the_token_that_begins_it(tokenizer: ByteTokenizer, ids: tuple[int, ...]) -> None:
    assert ask(Tokenize("t", ()), tokenizer) == Tokenized("t", ids)


def test_control_tokens_have_text_when_it_is_asked_for() -> None:
    ids = (BOS, *b"caf", 268, 258, EOS)
    assert ask(Detokenize("d", ids)) == Detokenized("d", "café")
    assert ask(Detokenize("d", ids, control=True)) == Detokenized("d", "<s>café<|im_start|></s>")


def test_halves_of_characters_are_shown_as_such() -> None:
    assert ask(Detokenize("d", (0xC3,))) == Detokenized("d", "\ufffd")
    assert ask(Detokenize("d", (0xC3, 0xA9, 98))) == Detokenized("d", "éb")


@pytest.mark.parametrize("ids", [(97, -1), (272,), (97, 1 << 63)])
def test_ids_outside_the_vocabulary_are_named(ids: tuple[int, ...]) -> None:
    wrong = next(token for token in ids if token != 97)
    message = f"token_ids: token {wrong} is outside the vocabulary; write 0 to 271"
    assert ask(Detokenize("d", ids)) == Failure("d", ParameterError.__name__, message)


def test_wrong_questions_are_refused() -> None:
    picture = ask(Tokenize("t", (Text("a"), Media("image", "0" * 64, b""))))
    assert isinstance(picture, Failure)
    assert (picture.kind, "leave them out" in picture.message) == (RequestError.__name__, True)
    for question in (
        Tokenize("t", (Text("\ud800"),)),
        Tokenize("t", (), Origin(salt="no salt")),
        Tokenize("t" * 257, ()),
        Detokenize("t" * 257, ()),
    ):
        answer = ask(question)
        assert isinstance(answer, Failure)
        assert answer.kind == ParameterError.__name__


def test_a_backend_answers_and_describes_its_vocabulary() -> None:
    async def story() -> None:
        backend = LocalBackend()
        question = Tokenize("t", (Text("an é"),))
        ids = (await backend.tokenize(question)).token_ids
        assert (await backend.detokenize(Detokenize("d", ids))).text == "an é"
        with pytest.raises(ParameterError, match="write 0 to 271"):
            await backend.detokenize(Detokenize("d", (272,)))
        vocabulary = backend.vocabulary
        assert (vocabulary.size, vocabulary.bos_id, vocabulary.eos_ids) == (272, BOS, (EOS,))
        assert vocabulary.control["<|im_end|>"] == 259
        await backend.close()

    asyncio.run(story())
