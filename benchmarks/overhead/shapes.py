"""Programs of different shapes, for measuring what the language costs beside the model, interpreted and compiled.

The texts of every run are new. What decides the course of a program is fixed, so that it can be traced.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import umbel as ul
from umbel.lang.protocol import Backend

TURNS = 8
FIELDS = 5

# ------------------------------------------------------------------------------------------ programs


@ul.function
def one_gen(s: ul.State, text: str, tokens: int) -> None:
    s += text + ul.gen("answer", max_tokens=tokens, temperature=0, ignore_eos=True)


@ul.function
def chat(s: ul.State, a: str, b: str, c: str, d: str, e: str, f: str, g: str, h: str) -> None:
    for number, turn in enumerate((a, b, c, d, e, f, g, h)):
        s += ul.user(turn)
        s += ul.assistant(ul.gen(f"answer {number}", max_tokens=2, temperature=0, ignore_eos=True))


@ul.function
def chain(s: ul.State, text: str) -> str:
    s += text
    for number in range(TURNS):
        s += f"\nStep {number}:" + ul.gen("step", max_tokens=2, temperature=0, ignore_eos=True)
        s += f"\nIn short: {s['step'].strip()}."
    return str(s["step"])


@ul.function
def card(s: ul.State, text: str) -> None:
    s += text
    for number in range(FIELDS):
        s += f"\nField {number}:" + ul.gen(f"field {number}", max_tokens=2, temperature=0, ignore_eos=True)


@ul.function
def fan(s: ul.State, text: str, branches: int) -> None:
    s += text
    forks = s.fork(branches)
    forks += lambda i: f"\nQuestion {i}:" + ul.gen("answer", max_tokens=2, temperature=0, ignore_eos=True)
    forks.join()


@ul.function
def choose(s: ul.State, text: str) -> None:
    s += text + ul.select("answer", choices=["red", "green", "blue", "yellow"])


Made = ul.Program | ul.CompiledProgram
Make = Callable[..., Made]  # a program, with some of its arguments fixed


def interpreted(program: ul.Program, **fixed: Any) -> Made:
    return program.bind(**fixed)


@cache
def compiled(program: ul.Program, **fixed: Any) -> Made:
    """It runs in this process, as the interpreter does."""
    return program.compile(static_args=fixed, server=False)


@cache
def shipped(program: ul.Program, **fixed: Any) -> Made:
    """It runs in the gateway."""
    return program.compile(static_args=fixed, server=True)


# ------------------------------------------------------------------------------------------ shapes


Run = Callable[[Backend], None]


@dataclass(frozen=True)
class Shape:
    """One kind of program: how often it runs in a measurement, how many calls each makes, and how to run them all.

    `prepare` makes the texts, none of which has been seen before, and gives what is to be measured, of programs that
    are made so.
    """

    name: str
    programs: int
    calls: int
    prepare: Callable[[Make], Run]


class Writer:
    """Texts of a wanted length that do not repeat themselves.

    Args:
        characters_per_token: of the tokenizer, for such texts.
    """

    def __init__(self, characters_per_token: float) -> None:
        self._dice = random.Random(time.time_ns())
        self._ratio = characters_per_token
        self._vocabulary = ["".join(self._dice.choices("etaoinshrdlucm", k=n % 8 + 2)) for n in range(5000)]

    def words(self, tokens: int) -> str:
        wanted = int(tokens * self._ratio)
        return " ".join(self._dice.choices(self._vocabulary, k=wanted // 5))[:wanted]


def shapes(writer: Writer) -> list[Shape]:
    words = writer.words

    def gens(make: Make) -> Run:
        program, texts = make(one_gen, tokens=1), [words(100) for _ in range(40)]
        return lambda backend: [program.run(text, backend=backend).sync() for text in texts][-1]

    def chats(tokens: int) -> Callable[[Make], Run]:
        def prepare(make: Make) -> Run:
            program = make(chat)
            conversations = [[words(tokens // TURNS) for _ in range(TURNS)] for _ in range(2)]
            return lambda backend: [program.run(*turns, backend=backend).sync() for turns in conversations][-1]

        return prepare

    def chains(make: Make) -> Run:
        program, texts = make(chain), [words(100) for _ in range(10)]
        return lambda backend: [program.run(text, backend=backend).sync() for text in texts][-1]

    def cards(make: Make) -> Run:
        program, texts = make(card), [words(100) for _ in range(16)]
        return lambda backend: [program.run(text, backend=backend).sync() for text in texts][-1]

    def forks(branches: int, programs: int) -> Callable[[Make], Run]:
        def prepare(make: Make) -> Run:
            program, texts = make(fan, branches=branches), [words(500) for _ in range(programs)]
            return lambda backend: [program.run(text, backend=backend).sync() for text in texts][-1]

        return prepare

    def selects(make: Make) -> Run:
        program, texts = make(choose), [words(100) for _ in range(40)]
        return lambda backend: [program.run(text, backend=backend).sync() for text in texts][-1]

    def streams(make: Make) -> Run:
        program, texts = make(one_gen, tokens=64), [words(10) for _ in range(4)]

        def run(backend: Backend) -> None:
            for text in texts:
                for _ in program.run(text, backend=backend, stream=True).text_iter("answer"):
                    pass

        return run

    def batch(make: Make) -> Run:
        program = make(one_gen, tokens=4)
        head = words(400)  # what a few-shot prompt has in common
        items = [{"text": f"{head}\nQuestion: {words(12)}"} for _ in range(1000)]

        def run(backend: Backend) -> None:
            for state in program.run_batch(items, num_threads=32, backend=backend, generator_style=True):
                state.sync()

        return run

    return [
        Shape("one gen", 40, 1, gens),
        Shape("chat, 8 turns to 2k tokens", 2, TURNS, chats(2000)),
        Shape("chat, 8 turns to 8k tokens", 2, TURNS, chats(8000)),
        Shape("chain of 8, each step read", 10, TURNS, chains),
        Shape("five gens, none read", 16, FIELDS, cards),
        Shape("fork of 8", 10, 8, forks(8, 10)),
        Shape("fork of 64", 2, 64, forks(64, 2)),
        Shape("select of 4", 40, 1, selects),
        Shape("streaming 64 tokens", 4, 1, streams),
        Shape("run_batch, 1,000 programs, 32 in flight", 1000, 1, batch),
    ]
