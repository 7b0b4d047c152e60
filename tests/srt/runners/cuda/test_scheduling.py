"""The scheduler on the CUDA engine: texts are those of the torch engine, one request after another, without a cache."""

import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Runner
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineGenerate, EngineScore, Schedule, ScoreEnded
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from ...models.equality import VOCABULARY, assert_texts_do_not_depend_on_the_schedule
from ...toy_constraint import TOKENIZER, texts, toy_shelf
from .engines import in_torch, on_host, tiny_model

EOS = frozenset({0})
KINDS = [
    *({"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.8}),
    *({"temperature": 0.0, "logprobs": True}, {"top_logprobs": 2}, {"frequency_penalty": 0.5}),
    *({"temperature": 0.0, "min_tokens": 3}, {"temperature": 0.0, "repetition_penalty": 1.2}),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    sampling: SamplingParams


def traffic(count: int) -> list[Question]:
    """Requests of all kinds behind a few prefixes."""
    dice = random.Random(5)
    prefixes = [[dice.randrange(1, 97) for _ in range(length)] for length in (3, 20, 30)]
    return [
        Question(
            dice.choice(prefixes) + [dice.randrange(1, 97) for _ in range(dice.randrange(1, 6))],
            SamplingParams(max_tokens=dice.randrange(3, 12), seed=number, **KINDS[number % len(KINDS)]),
        )
        for number in range(count)
    ]


def answers(runner: Runner, questions: list[Question], **settings: object) -> tuple[list[list[int]], Scheduler]:
    """Tokens of all questions; a new one comes at every second step."""
    config = SchedulerConfig(check_every_step=True, max_step_tokens=24, **settings)  # type: ignore[arg-type]
    scheduler = Scheduler(runner, lambda token: b"" if token in EOS else b"ab", EOS, config, VirtualClock())
    endings: dict[int, list[int]] = {}
    waiting = list(enumerate(questions, 1))
    scheduler.handle_message(EngineScore(1000, [[1, 2, 3, 9], [1, 2, 3, 10, 11]], 3, Schedule()))
    for step in range(2000):
        if waiting and step % 2 == 0:
            number, question = waiting.pop(0)
            scheduler.handle_message(EngineGenerate(number, question.prompt, question.sampling, False, Schedule()))
        for event in scheduler.step():
            assert isinstance(event, Ended | ScoreEnded), event
            if isinstance(event, Ended):
                endings[event.id] = event.token_ids
        if not waiting and scheduler.idle:
            break
    return [endings[number] for number in range(1, len(questions) + 1)], scheduler


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("family", ["qwen 3", pytest.param("gemma 3", marks=pytest.mark.nightly)])
@pytest.mark.sampled(4)
def test_texts_are_those_of_torch(family: str, overlap: bool, cuda_graphs: bool) -> None:
    config, tensors = tiny_model(family)
    questions = traffic(26)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1, partial_logits=False)
    runner = on_host(config, tensors, cuda_graphs=cuda_graphs)
    texts, scheduler = answers(runner, questions, max_running=8, overlap=overlap)
    assert texts == truth
    facts = runner.facts()
    assert (int(facts["graph_replays"]) > 10) is cuda_graphs
    assert int(facts["eager_steps"]) > 2
    assert (scheduler.counters["overlapped_steps"] > 20) is overlap
    assert scheduler.counters["picked_rows"] > 50


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_constrained_texts_run_ahead_of_their_masks(cuda_graphs: bool) -> None:
    config, tensors = tiny_model("qwen 3", vocab_size=TOKENIZER.vocab_size)
    allowed = texts(*("".join(letters) for length in (5, 9) for letters in product("ab", repeat=length)))
    said = []
    for overlap in (False, True):
        scheduler = Scheduler(
            on_host(config, tensors, cuda_graphs=cuda_graphs),
            TOKENIZER.token_bytes,
            TOKENIZER.eos_ids,
            SchedulerConfig(check_every_step=True, overlap=overlap),
            VirtualClock(),
            constraints=toy_shelf(),
        )
        for number in range(6):
            kind = {**KINDS[number % 4], "max_tokens": 20, "seed": number}
            scheduler.handle_message(
                EngineGenerate(number, [5, 6, number], SamplingParams(**kind), False, Schedule(), allowed)  # type: ignore[arg-type]
            )
        endings = {}
        while not scheduler.idle:
            endings |= {event.id: event.token_ids for event in scheduler.step() if isinstance(event, Ended)}
        said.append(endings)
        assert (scheduler.counters["late_rows"] > 20) is overlap
    assert len(said[0]) == 6
    assert said[0] == said[1]


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen 3.5", marks=pytest.mark.nightly)])
def test_texts_of_models_with_states_do_not_depend_on_the_schedule(family: str) -> None:
    runner = on_host(*tiny_model(family, vocab_size=VOCABULARY), num_slots=66)
    assert_texts_do_not_depend_on_the_schedule(runner)
    assert int(runner.facts()["graph_replays"]) > 50
    assert int(runner.facts()["eager_steps"]) > 20


def test_texts_do_not_change_where_the_pool_is_so_small_that_requests_wait_again() -> None:
    config, tensors = tiny_model("qwen 3")
    questions = traffic(26)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1)
    runner = on_host(config, tensors, num_slots=60)
    texts, scheduler = answers(runner, questions, max_running=8, overlap=True, headroom=0)
    assert texts == truth
    assert scheduler.counters["retractions"] > 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_texts_do_not_change_where_window_layers_have_few_slots(cuda_graphs: bool) -> None:
    config, tensors = tiny_model("gemma 3")
    questions = traffic(16)
    truth, _ = answers(in_torch(config, tensors), questions, radix_cache=False, max_running=1)
    runner = on_host(config, tensors, window_slots=40, cuda_graphs=cuda_graphs)
    texts, scheduler = answers(runner, questions, max_running=8, overlap=True)
    assert texts == truth
    assert scheduler.counters["window_slots_reclaimed"] > 0


def test_no_switch_of_the_engine_changes_a_text() -> None:
    config, tensors = tiny_model("gemma 3")
    questions = traffic(16)
    texts = [
        answers(on_host(config, tensors, **switches), questions, max_running=8, overlap=True)[0]
        for switches in ({}, {"tree_attention": False}, {"cuda_graphs": False})
    ]
    assert texts[0] == texts[1] == texts[2]
