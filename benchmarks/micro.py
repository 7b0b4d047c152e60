"""The small figures: start, time to first token, decoding by batch size, prefill, and the decode step of a fork."""

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from umbel.lang.prompt import Text as TextPart
from umbel.srt.simulator.workload import Fork, Gen, Op, Program, Text
from umbel.srt.tokenizer.prompt import PromptEncoder

from .configuration import FULL, Value
from .systems import System, Umbel, start

BATCHES = (1, 8, 16, 32)
PROMPT = 32  # tokens
NEW = 128
START = "start to first token"
PREFILL = 2048
BRANCHES = 8

_WORDS = (
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "candle",
    "bridge",
    "winter",
    "apple",
    "silver",
    "music",
    "paper",
)

_NEAR = 64  # characters: the number of tokens grows with the text but for a few characters inside a word


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of one system: the median of its runs, and how far they spread."""

    name: str
    system: str
    unit: str
    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def prompt_of(length: int, number: int, encoder: PromptEncoder) -> str:
    """Text of exactly `length` tokens, BOS included, that shares no beginning with that of another number.

    Raises:
        ValueError: the tokenizer joins words so that the length is not met.
    """
    words = (_WORDS[(number * 7 + place * place) % len(_WORDS)] for place in range(length))
    text = f"{number}: " + " ".join(words)  # a word is at least one token
    cut = bisect.bisect_right(range(len(text)), length, key=lambda end: _length(text[:end], encoder)) - 1
    for end in range(cut, max(0, cut - _NEAR), -1):
        if _length(text[:end], encoder) == length:
            return text[:end]
    raise ValueError(f"no text of {length} tokens begins like {text[:40]!r}")


def _length(text: str, encoder: PromptEncoder) -> int:
    return len(encoder.encode((TextPart(text),)))


def _program(text: str, tokens: int) -> Program:
    return Program("micro", (Text(text), Gen("text", tokens)))


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class Micro:
    """Runs the figures on systems that are running. Every prompt is used once: nothing is found in a cache."""

    def __init__(self, encoder: PromptEncoder, repeat: int) -> None:
        self._encoder = encoder
        self._repeat = repeat
        self._number = 0

    def all_of(self, system: System) -> list[Figure]:
        self.warm(system)
        return [
            self._figure(system, "time to first token, 32 tokens", "ms", lambda: 1000 * self.prefill(system, PROMPT)),
            *(
                self._figure(system, f"decode, batch {batch}", "tokens/s", partial(self.decode, system, batch, NEW))
                for batch in BATCHES
            ),
            self._figure(system, "prefill, 2048 tokens", "tokens/s", lambda: PREFILL / self.prefill(system, PREFILL)),
        ]

    def warm(self, system: System) -> None:
        """Asks for one token, so that what is made at first use is made."""
        system.one(_program("Hello", 1))

    def _figure(self, system: System, name: str, unit: str, run: Callable[[], float]) -> Figure:
        return Figure(name, system.name, unit, tuple(run() for _ in range(self._repeat)))

    def _prompts(self, count: int, length: int) -> list[str]:
        first, self._number = self._number, self._number + count
        return [prompt_of(length, number, self._encoder) for number in range(first, first + count)]

    def decode(self, system: System, batch: int, new: int) -> float:
        """New tokens per second without the prompts' computation: the time of one token each is taken off."""
        one, all_of_them = (self._batch_seconds(system, batch, tokens) for tokens in (1, new))
        return batch * (new - 1) / (all_of_them - one)

    def _batch_seconds(self, system: System, batch: int, tokens: int) -> float:
        programs = [_program(prompt, tokens) for prompt in self._prompts(batch, PROMPT)]
        return _seconds(lambda: _succeed(system.many(programs, batch)))

    def prefill(self, system: System, length: int) -> float:
        """Seconds to the first token after a prompt of so many tokens."""
        (prompt,) = self._prompts(1, length)
        return _seconds(lambda: system.one(_program(prompt, 1)))

    # ---------------------------------------------------------------------------------- tree attention

    def fork_step(self, system: System) -> Figure:
        """Milliseconds of a decode step of 8 branches over one prefix of 2,048 tokens."""
        short, long = 8, 40

        def run() -> float:
            (prefix,) = self._prompts(1, PREFILL)
            system.one(_program(prefix, 1))
            taken = {tokens: _seconds(lambda n=tokens: system.one(_fork(prefix, n))) for tokens in (short, long)}  # type: ignore[misc]
            return 1000 * (taken[long] - taken[short]) / (long - short)

        return self._figure(system, f"decode step, {BRANCHES} branches on {PREFILL} tokens", "ms", run)


def _fork(prefix: str, tokens: int) -> Program:
    branches: Sequence[tuple[Op, ...]] = [(Text(f"\n{n}."), Gen("text", tokens)) for n in range(BRANCHES)]
    return Program("fork", (Text(prefix), Fork(tuple(branches))))


def _succeed(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, Exception):
            raise result


def start_to_first_token(model: str | None, common: Mapping[str, Value], repeat: int) -> Figure:
    """Seconds from making a runtime to its first token, in a process whose imports are done."""

    def run() -> float:
        started = time.perf_counter()
        runtime, _ = start(FULL, model, common)
        try:
            Umbel(FULL, runtime).one(_program("Hello", 1))
            return time.perf_counter() - started
        finally:
            runtime.shutdown()

    return Figure(START, FULL.name, "s", tuple(run() for _ in range(repeat)))
