"""The equality suite of a family: whatever the scheduler does with requests, each text is that of its prompt alone.

    runner = build_runner(config, tensors, num_slots=SLOTS, dtype="float32")
    assert_texts_do_not_depend_on_the_schedule(runner)

The vocabulary of the model is `VOCABULARY`: constraints are texts of the byte tokenizer.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Runner
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineConstraint, EngineGenerate, Schedule
from umbel.srt.scheduler.draft_model import DraftModel
from umbel.srt.scheduler.guesses import Guesser
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from ..guessing import Free, told
from ..toy_constraint import TOKENIZER, texts, toy_shelf

VOCABULARY = TOKENIZER.vocab_size
SLOTS = 90  # of the pool: room for the longest request, not for all that arrive
REQUESTS = 14


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    sampling: SamplingParams
    constraint: EngineConstraint | None


def traffic(seed: int) -> list[Request]:
    """Requests that fork behind prefixes cut at any token; some repeat a prompt whole, some are constrained."""
    dice = random.Random(seed)
    stems = [[dice.randrange(97, 123) for _ in range(length)] for length in (38, 21)]
    requests: list[Request] = []
    for number in range(REQUESTS):
        stem = dice.choice(stems)
        prompt = stem[: dice.randrange(1, len(stem) + 1)] + [dice.randrange(97, 123) for _ in range(dice.randrange(3))]
        if number % 5 == 4:
            prompt = requests[number - 2].prompt
        constraint = texts("yes, the end", "yes, an error", "no") if number % 4 == 3 else None
        sampling = SamplingParams(temperature=0.0 if number % 3 else 0.8, seed=number, max_tokens=dice.randrange(4, 18))
        requests.append(Request(prompt, sampling, constraint))
    return requests


def answers(
    runner: Runner, requests: list[Request], guesser: Guesser | None = None, **settings: object
) -> tuple[list[list[int]], Scheduler]:
    """Returns the tokens of all requests; a new one arrives at every second step."""
    config = SchedulerConfig(**{"check_every_step": True, **settings})  # type: ignore[arg-type]
    shelf = toy_shelf()
    eos = TOKENIZER.eos_ids
    scheduler = Scheduler(
        runner, TOKENIZER.token_bytes, eos, config, VirtualClock(), constraints=shelf, guesser=guesser
    )
    ended: dict[int, list[int]] = {}
    waiting = list(enumerate(requests))
    for step in range(3000):
        if waiting and step % 2 == 0:
            number, request = waiting.pop(0)
            message = EngineGenerate(number, request.prompt, request.sampling, False, Schedule(), request.constraint)
            scheduler.handle_message(message)
        for event in scheduler.step():
            assert isinstance(event, Ended), event
            ended[event.id] = event.token_ids
        if not waiting and scheduler.idle:
            break
    return [ended[number] for number in range(len(requests))], scheduler


def assert_texts_do_not_depend_on_the_schedule(runner: Runner, *, seed: int = 0, plain: Runner | None = None) -> None:
    """Chunks, forks, cuts, constraints and retractions against one request after another, without a cache.

    plain: computes the texts to compare with; None: the runner does.
    """
    requests = traffic(seed)
    truth, _ = answers(plain or runner, requests, radix_cache=False, max_running=1, max_step_tokens=None)
    runner.clear()
    actual, scheduler = answers(runner, requests, max_running=6, max_step_tokens=7, headroom=0)
    for number, (text, expected) in enumerate(zip(actual, truth, strict=True)):
        assert text == expected, f"request {number}: {requests[number]}"
    counters = scheduler.counters
    assert counters["retractions"] > 0, "the pool is too large: nothing was retracted"
    assert counters["cached_tokens"] > 0, "nothing was shared"
    if runner.window_pool is not None:
        assert counters["window_slots_reclaimed"] > 0, "the pool of windows is too large: none was reclaimed"


def assert_guesses_change_no_text(runner: Runner, seeds: Iterable[int]) -> None:
    """Traffic whose tokens are guessed, every fourth one wrong, against one request after another, without a cache."""
    guessed, accepted = _guessed(runner, seeds, "prompt", lambda truth: told(dict(enumerate(truth)), 4, VOCABULARY))
    assert guessed > accepted > 0, "some guesses are right, and some are wrong"


def assert_drafts_change_no_text(runner: Runner, draft: Runner, seeds: Iterable[int]) -> float:
    """The same with the guesses of a draft → the part of them that was right."""
    guessed, accepted = _guessed(
        runner, seeds, "draft", lambda _: Guesser([], Free, VOCABULARY, DraftModel(draft, VOCABULARY))
    )
    assert guessed, "nothing was drafted"
    return accepted / guessed


def _guessed(
    runner: Runner, seeds: Iterable[int], source: str, guesser: Callable[[list[list[int]]], Guesser]
) -> tuple[float, float]:
    """Compares the texts of each traffic → how many tokens the source guessed, and how many of these were right.

    guesser: makes it from the true texts.
    """
    guessed = accepted = 0.0
    for seed in seeds:
        requests = traffic(seed)
        runner.clear()
        truth, _ = answers(runner, requests, radix_cache=False, max_running=1, max_step_tokens=None)
        runner.clear()
        actual, scheduler = answers(runner, requests, guesser(truth), max_running=6, max_step_tokens=7, headroom=0)
        for number, (text, expected) in enumerate(zip(actual, truth, strict=True)):
            assert text == expected, f"seed {seed}, request {number}: {requests[number]}"
        assert not scheduler.counters["guess_failures"]
        guessed += scheduler.counters[f"guessed_{source}_rows"]
        accepted += scheduler.counters[f"accepted_{source}_rows"]
    return guessed, accepted
