"""Hosted models beside the runtime: one model of texts, asked by the runtime as tokens and by providers as text.

The runtime computes the examples on the oracle model. Echo and the fake providers are driven by a second runtime with
the same model, which is given nothing but the text that a provider would be given, and the variables must be equal.
So whatever a hosted backend does to a prompt (turns, continuation requests, stops found on this side) is held against
keys and token ids.

Three things have to be the same on both sides for that:

* Tokens. What was generated goes back to the runtime as ids and to a provider as text. Here that makes no difference:
  no token begins inside another one's text (`Words`). The last test shows a tokenizer for which it does.
* What `max_tokens` counts: each token that the model favours is one word of the fakes.
* Tokens that are drawn. A script is told no sampling parameters, so the model takes the best token whatever is asked
  for (`Greedy`).

A `select` is scored by the runtime, by Echo and in completion mode, where the provider tells the log-probabilities of
the prompt. Chat models say a choice; the script says the one that the model scores best. What is constrained (`extract`,
`field_card`) stays with the scripted tests in `test_every_backend.py`: the runtime masks tokens, and a text that a
mask allows is not what the model says without one.
"""

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Self, TypeVar

import msgspec
import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import Backend, Chunk, Completion, Final, GenRequest, Scored, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt import assembly
from umbel.srt.local import LocalBackend
from umbel.srt.tokenizer import ByteTokenizer
from umbel.testing import FakeAnthropic, FakeOpenAI

from ...test_examples import load
from .test_every_backend import EXAMPLES, IGNORED

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::DeprecationWarning")

T = TypeVar("T")
CONSTRAINED = {"extract", "field_card"}
LONGEST = 64  # tokens; no example asks for more
CHOICES = {  # how a prompt ends → what a program chooses from there
    "\nTopic:": (" geography", " literature", " science"),
    "\nSentiment:": (" positive", " negative"),
    "\nIs the essay about a city?": (" yes", " no"),
    "\nGrade:": (" A", " B", " C"),
    "Useful?": (" yes", " no"),
    "\nAction:": (" calculate", " population", " finish"),
    "\nAction: ": ("calculate", "population", "finish"),
}
_SCAFFOLDING = re.compile(r"((?:<\|im_end\|>\n)*<\|im_start\|>\w+\n)")


class Words(ByteTokenizer):
    """Bytes and a few words, each with the space before it, none the beginning of another one.

    So the tokens of a text are those of its parts, wherever it is cut between two tokens.
    """

    _MERGES = tuple(
        b" " + word.encode()
        for word in [
            "river",
            "cities",
            "letters",
            "umbel",
            "sings",
            "seven",
            "green",
            "walks",
            "behind",
            "under",
            "morning",
            "yes",
            "no",
        ]
    )


FAVOURITES = (*range(260, Words().vocab_size), *b"\n.;]", 257)  # words, what stops texts, and the end of a text


class Greedy(LocalBackend):
    """The runtime with a model whose every token is the best one."""

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        sampling = msgspec.structs.replace(request.sampling, temperature=0.0, frequency_penalty=0.0, seed=None)
        async with aclosing(super().generate(msgspec.structs.replace(request, sampling=sampling))) as events:
            async for event in events:
                yield event


class Voice:
    """A runtime that is asked by text alone, as a script: in a thread of its own, from any other one."""

    def __init__(self, model: LocalBackend, longest: int) -> None:
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
        _, tokenizer = assembly.open_tokenizer(self._model.options)
        texts = [tokenizer.token_bytes(token).decode() for token in whole.token_ids]
        assert "".join(texts) == text, "offsets are counted in these texts"
        return [(text, own if place else None) for place, (text, own) in enumerate(zip(texts, whole.logprobs))]

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
    """Prompts that are given back have the model's log-probabilities."""

    def __init__(self, voice: Voice) -> None:
        super().__init__(voice)
        self._voice = voice

    def _text_choices(self, body: Any) -> Any:  # Any: the fake's own types
        told = super()._text_choices(body)
        return told if told.echo is None else type(told)(body.prompt, self._voice.logprobs(body.prompt), body.logprobs)


@contextmanager
def echo(voice: Voice) -> Iterator[Backend]:
    yield VoicedEcho(voice)


@contextmanager
def openai_completion(voice: Voice) -> Iterator[Backend]:
    with EchoingOpenAI(voice) as server:
        yield ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key, profile="openai")


@contextmanager
def openai_chat(voice: Voice) -> Iterator[Backend]:
    with FakeOpenAI(voice) as server:
        yield ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key, profile="openai")


@contextmanager
def claude(voice: Voice) -> Iterator[Backend]:
    with FakeAnthropic(voice) as server:
        yield ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key, may_ignore=IGNORED)


BESIDE = (echo, openai_completion, openai_chat, claude)
Beside = Callable[[Voice], Any]  # Any: a context with a backend


@pytest.fixture(scope="module")
def oracle() -> Iterator[tuple[LocalBackend, Voice]]:
    """The runtime, and a second one with the same model that speaks for the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "ByteTokenizer", Words)
        patch.setattr(assembly, "ORACLE_FAVOURITES", FAVOURITES)
        with Voice(Greedy(check_every_step=False), LONGEST) as voice:
            yield Greedy(), voice


def observed(name: str, backend: Backend) -> Any:
    with ul.default_backend(backend):
        return EXAMPLES[name].observe(load(name))


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - CONSTRAINED))
def test_the_variables_are_those_of_the_runtime(
    name: str, oracle: tuple[LocalBackend, Voice], capsys: pytest.CaptureFixture[str]
) -> None:
    runtime, voice = oracle
    expected = observed(name, runtime)
    for beside in BESIDE:
        with beside(voice) as backend:
            assert observed(name, backend) == expected, beside.__name__
