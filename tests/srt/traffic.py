"""Programs like those of the paper's workloads, a quarter of their size, played against the engine.

A program is a generator: it yields the calls that it makes at the same time and is sent their answers. So many run
at once, the next begins when one ends, and each gets steps of the virtual clock to think in no time at all.
"""

import random
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

from umbel.lang.sampling import SamplingParams
from umbel.srt.simulator.optimum import optimal_cached_tokens

from .engine_harness import Engine

VOCABULARY = 48
Tokens = list[int]


@dataclass(frozen=True)
class Call:
    prompt: Tokens
    answer: int  # tokens
    fork_group: str = ""


Program = Generator[list[Call], list[Tokens], None]
Make = Callable[[random.Random, int], Program]


def words(dice: random.Random, count: int) -> Tokens:
    return [dice.randrange(1, VOCABULARY) for _ in range(count)]


def shared(name: str, count: int) -> Tokens:
    """The same tokens for everybody who says this name."""
    return words(random.Random(name), count)


def few_shot(dice: random.Random, number: int) -> Program:
    """One long system prompt, a short question."""
    yield [Call(shared("system", 350) + words(dice, 12), 8)]


def exam(dice: random.Random, number: int) -> Program:
    """One of eight subjects with its examples, a question, one token (MMLU)."""
    yield [Call(shared(f"subject {number % 8}", 90) + words(dice, 25), 1)]


def judge(dice: random.Random, number: int) -> Program:
    """An essay judged from six sides at once, then a summary."""
    essay = shared("instruction", 12) + words(dice, 75)
    judgments = yield [Call(essay + shared(f"side {i}", 8), 6, "judge") for i in range(6)]
    yield [Call(essay + [token for judgment in judgments for token in judgment], 8)]


def thoughts(dice: random.Random, number: int) -> Program:
    """Three levels of two thoughts each: every thought goes on from the one before (tree of thought)."""
    level = [shared("task", 8) + words(dice, 10)]
    for depth in range(3):
        calls = [Call([*node, 1 + branch], 4, f"{depth} {i}") for i, node in enumerate(level) for branch in range(2)]
        answers = yield calls
        level = [call.prompt + answer for call, answer in zip(calls, answers, strict=True)]


def chat(dice: random.Random, number: int) -> Program:
    """Four turns of one conversation."""
    said = shared("chat", 5)
    for _ in range(4):
        said = said + words(dice, dice.randrange(20, 60))
        (answer,) = yield [Call(said, 6)]
        said = said + answer


def agent(dice: random.Random, number: int) -> Program:
    """Long examples, three steps, each behind the last and what was observed (ReAct)."""
    said = shared("react", 300) + words(dice, 10)
    for _ in range(3):
        (answer,) = yield [Call(said, 6)]
        said = said + answer + words(dice, 20)


WORKLOADS: dict[str, Make] = {make.__name__: make for make in (few_shot, exam, judge, thoughts, chat, agent)}


@dataclass
class Played:
    """One program that runs."""

    program: Program
    name: str
    calls: list[Call]
    ids: list[int]


@dataclass
class Run:
    """What the engine did, and what it could have done."""

    engine: Engine
    prompts: list[Tokens] = field(default_factory=list)
    answers: list[Tokens] = field(default_factory=list)

    @property
    def achieved(self) -> float:
        """By what was computed, for a hint's tokens too: a hint makes hits of others, but is no call of a program."""
        return 1 - self.engine.count("computed_prompt_tokens") / sum(map(len, self.prompts))

    @property
    def optimal(self) -> float:
        return optimal_cached_tokens(self.prompts, self.answers) / sum(map(len, self.prompts))


def play(programs: Iterable[Program], *, in_flight: int = 32, **settings: object) -> Run:
    """Runs all programs on a fresh engine."""
    engine = Engine(context=2000, vocabulary=VOCABULARY, check_every_step=False, **settings)  # type: ignore[arg-type]
    run = Run(engine)
    waiting = enumerate(programs)
    flying: list[Played] = []
    more = True
    while more or flying:
        while more and len(flying) < in_flight:
            number, program = next(waiting, (-1, None))
            more = program is not None
            if program is not None:
                flying.append(_advance(engine, Played(program, f"program {number}", [], []), None))
        if not engine.scheduler.idle:
            engine.step()
            engine.clock.advance(0.05)
        for played in list(flying):
            if all(message_id in engine.endings for message_id in played.ids):
                answers = [engine.tokens(message_id) for message_id in played.ids]
                run.prompts.extend(call.prompt for call in played.calls)
                run.answers.extend(answers)
                try:
                    _advance(engine, played, answers)
                except StopIteration:
                    flying.remove(played)
    engine.run()
    return run


def _advance(engine: Engine, played: Played, answers: Sequence[Tokens] | None) -> Played:
    """Sends the program's next calls, a hint before a fork."""
    calls = next(played.program) if answers is None else played.program.send(list(answers))
    played.calls, played.ids = calls, []
    if len(calls) > 1:
        prefix = _common([call.prompt for call in calls])
        engine.hint(prefix, program_id=played.name, fork_group=calls[0].fork_group)
    for call in calls:
        sampling = SamplingParams(temperature=0.0, max_tokens=call.answer, ignore_eos=True)
        played.ids.append(engine.generate(call.prompt, sampling, program_id=played.name, fork_group=call.fork_group))
    return played


def _common(prompts: Sequence[Tokens]) -> Tokens:
    first, *others = prompts
    length = next(
        (i for i in range(len(first)) if any(i >= len(other) or other[i] != first[i] for other in others)), len(first)
    )
    return first[:length]
