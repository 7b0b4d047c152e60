"""A runtime that speaks for providers: its model is the script of Echo and of the fakes, given text alone."""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from functools import cached_property
from typing import Any, Self, TypeVar

import msgspec
import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.lang.chat_template import CHATML
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import Backend, Chunk, Completion, Final, GenRequest, Scored, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt import launch
from umbel.srt.in_process import LocalBackend
from umbel.srt.tokenizer.tokenizer import ByteTokenizer, Tokenizer
from umbel.testing import VLLM, FakeAnthropic, FakeOpenAI

T = TypeVar("T")
CHOICES = {  # how a prompt of the examples ends → what its program chooses from there
    "\nTopic:": (" geography", " literature", " science"),
    "\nSentiment:": (" positive", " negative"),
    "\nIs the essay about a city?": (" yes", " no"),
    "\nGrade:": (" A", " B", " C"),
    "Useful?": (" yes", " no"),
    "\nAction:": (" calculate", " population", " finish"),
    "\nAction: ": ("calculate", "population", "finish"),
    " lies in": (" Europe", " Asia", " Africa", " America"),
}
_SCAFFOLDING = re.compile(r"((?:<\|im_end\|>\n)*<\|im_start\|>\w+\n)")


class Words(ByteTokenizer):
    """Bytes and a few words, each with the space before it, none the beginning of another one.

    So the tokens of a text are those of its parts, wherever it is cut between two tokens.
    """

    _MERGES = tuple(  # type: ignore[assignment]  # of another length than there
        b" " + word
        for word in b"river cities letters umbel sings seven green walks behind under morning yes no".split()
    )


FAVOURITES = (*range(260, Words().vocab_size), *b"\n.;]", 257)  # words, what stops texts, and the end of a text


class Greedy(LocalBackend):
    """The runtime with a model whose every token is the best one."""

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        sampling = msgspec.structs.replace(request.sampling, temperature=0.0, frequency_penalty=0.0, seed=None)
        async with aclosing(super().generate(msgspec.structs.replace(request, sampling=sampling))) as events:
            async for event in events:
                yield event

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return launch.open_tokenizer(self.options)[1]


class Wordy(Greedy):
    """The oracle with `Words`, and with a taste for them."""

    def __init__(self) -> None:
        super().__init__(chat_template=CHATML)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Words()

    def _open(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "ByteTokenizer", Words)
            patch.setattr(launch, "ORACLE_FAVOURITES", FAVOURITES)
            super()._open()


class Voice:
    """A runtime that is asked by text alone, as a script: on a loop of its own, from any other thread.

    Args:
        model: nobody else asks it while this is open; closed with it.
        longest: tokens of an answer, no fewer than a program takes of it; its stops and `max_tokens` cut it later.
    """

    def __init__(self, model: Greedy, longest: int) -> None:
        self._model, self._longest = model, longest
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="voice", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._wait(self._model.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __call__(self, text: str) -> str:
        """What the model says behind this text, which may be a conversation in ChatML."""
        choices = next((CHOICES[end] for end in CHOICES if text.endswith(end)), None)
        if choices is None:
            sampling = SamplingParams(max_tokens=self._longest, temperature=0.0)
            return self._wait(completion(self._model, parts(text), sampling)).text
        scored = self.scored(ScoreRequest("choice", parts(text), choices))
        means = [sum(choice.logprobs) / len(choice.logprobs) for choice in scored.choices]
        return choices[means.index(max(means))]

    def scored(self, request: ScoreRequest) -> Scored:
        return self._wait(self._model.score(request))

    def logprobs(self, text: str) -> list[tuple[str, float | None]]:
        """The tokens of a text and their log-probabilities; none for the first, as providers have it."""
        (whole,) = self.scored(ScoreRequest("echo", (), (text,))).choices
        texts = [self._model.tokenizer.token_bytes(token).decode() for token in whole.token_ids]
        assert "".join(texts) == text, "offsets are counted in these texts"
        return list(zip(texts, (None, *whole.logprobs[1:]), strict=True))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


async def completion(model: LocalBackend, prompt: tuple[Part, ...], sampling: SamplingParams) -> Completion:
    async with aclosing(model.generate(GenRequest("voice", prompt, sampling))) as events:
        async for event in events:
            if isinstance(event, Final):
                return event.completions[0]
    raise AssertionError("no ending")


def parts(text: str) -> tuple[Part, ...]:
    """A text as the interpreter writes it: what opens and closes turns may be control tokens."""
    pieces = enumerate(_SCAFFOLDING.split(text))
    return tuple(Text(piece, control=place % 2 == 1) for place, piece in pieces if piece)


class VoicedEcho(Echo):
    """Echo, whose scores are the model's."""

    def __init__(self, voice: Voice) -> None:
        super().__init__(voice)
        self._voice = voice

    async def score(self, request: ScoreRequest) -> Scored:
        return self._voice.scored(ScoreRequest(request.id, parts(prompt_text(request.prompt)), request.choices))


class EchoingOpenAI(FakeOpenAI):
    """Prompts that are given back have the model's tokens and log-probabilities."""

    def __init__(self, voice: Voice) -> None:
        super().__init__(voice, features=VLLM)
        self._voice = voice

    def _text_choices(self, body: Any) -> Any:  # Any: the fake's own types
        told = super()._text_choices(body)
        return told if told.echo is None else type(told)(body.prompt, self._voice.logprobs(body.prompt), body.logprobs)


@contextmanager
def echo(voice: Voice) -> Iterator[Backend]:
    yield VoicedEcho(voice)


@contextmanager
def openai_completion(voice: Voice) -> Iterator[Backend]:
    """At OpenAI, whose completion models tell nothing of the prompt any more."""
    with FakeOpenAI(voice) as server:
        yield ul.OpenAI(
            "gpt-3.5-turbo-instruct",
            base_url=server.base_url,
            api_key=server.api_key,
            profile="openai",
            chat_template=CHATML,
        )


@contextmanager
def vllm_completion(voice: Voice) -> Iterator[Backend]:
    """At a server that tells the log-probabilities of the prompt."""
    with EchoingOpenAI(voice) as server:
        yield ul.OpenAI(
            "gpt-4o",
            base_url=server.base_url,
            api_key=server.api_key,
            profile="vllm",
            mode="completion",
            chat_template=CHATML,
        )


@contextmanager
def openai_chat(voice: Voice) -> Iterator[Backend]:
    with FakeOpenAI(voice) as server:
        yield ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key, profile="openai")


@contextmanager
def claude(voice: Voice) -> Iterator[Backend]:
    with FakeAnthropic(voice) as server:
        yield ul.Anthropic(
            "claude-haiku-4-5",
            base_url=server.base_url,
            api_key=server.api_key,
            may_ignore=("seed", "frequency_penalty"),
        )
