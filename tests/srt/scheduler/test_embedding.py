"""Vectors of texts from the scheduler: alone, in batches, in chunks, after hits and after faults, on the oracle."""

import random

import numpy as np
import pytest
import torch
from umbel.srt.core.instruments import FailAt, VirtualClock, no_faults
from umbel.srt.core.messages import EmbedEnded, EngineEmbed, EngineFailed, EngineGenerate, FromEngine
from umbel.srt.core.vectors import VectorConfig
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig
from umbel.srt.testing.launched_oracle import LaunchedOracle
from umbel.srt.testing.oracle import HIDDEN, OracleModel, OracleRunner, histories
from umbel.srt.weights.vector_head import LoadedHead

from ..engine_harness import EOS, GREEDY, POINTS, VOCABULARY, letters


class Vectors:
    """A scheduler on the oracle, whose vectors are its hidden states."""

    def __init__(self, *, mean: bool, pool: int = 200, states: int = 0, fails: str = "", **settings: object) -> None:
        runner = OracleRunner(VOCABULARY, 120, pool + 1, num_states=states)
        config = SchedulerConfig(**{"check_every_step": True, **settings})  # type: ignore[arg-type]
        used: OracleRunner | LaunchedOracle = LaunchedOracle(runner) if config.overlap else runner
        head = LoadedHead(VectorConfig(HIDDEN, every_row=mean, normalized=False))
        faults = FailAt(fails, 3, RuntimeError("a fault")) if fails else no_faults
        self.scheduler = Scheduler(used, letters, EOS, config, VirtualClock(), faults, vectors=head)
        used.expected = self.scheduler.planned_tokens
        self.mean = mean

    def run(self, messages: list[EngineEmbed | EngineGenerate]) -> dict[int, FromEngine]:
        """Sends a message at each step, and returns the endings."""
        ended: dict[int, FromEngine] = {}
        waiting = list(messages)
        for _ in range(500):
            if waiting:
                self.scheduler.handle_message(waiting.pop(0))
            ended |= {event.id: event for event in self.scheduler.step()}
            if not waiting and self.scheduler.idle:
                return ended
        raise AssertionError("it does not end")

    def check(self, message: EngineEmbed, ending: FromEngine) -> EmbedEnded:
        assert isinstance(ending, EmbedEnded), ending
        states = OracleModel(VOCABULARY).hidden(histories(np.array(message.token_ids)))
        expected = states.mean(0) if self.mean else states[-1]
        assert np.allclose(np.frombuffer(ending.vector, "<f4"), expected, atol=1e-6)
        assert ending.prompt_tokens == len(message.token_ids)
        return ending


def texts(seed: int = 0, count: int = 12) -> list[EngineEmbed]:
    """Texts that share beginnings, some of them whole."""
    dice = random.Random(seed)
    stem = [dice.randrange(1, VOCABULARY) for _ in range(40)]
    ends = [[dice.randrange(1, VOCABULARY) for _ in range(dice.randrange(6))] for _ in range(count)]
    return [EngineEmbed(number, stem[: dice.randrange(1, 41)] + end) for number, end in enumerate(ends)]


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_vectors_do_not_depend_on_the_schedule(*, mean: bool, overlap: bool) -> None:
    """Chunks, shared prefixes, and a pool so small that requests are retracted."""
    engine = Vectors(mean=mean, pool=90, overlap=overlap, max_step_tokens=7, max_running=5, headroom=0)
    messages = texts()
    writing = [EngineGenerate(100 + n, [5, 6, n + 1], GREEDY, False) for n in range(3)]
    endings = engine.run([*messages, *writing])
    for message in messages:
        engine.check(message, endings[message.id])
    assert engine.scheduler.counters["retractions"] + engine.scheduler.counters["cached_tokens"] > 0


def test_a_last_token_reads_the_cache_and_a_mean_computes_every_row() -> None:
    message = texts(count=1)[0]
    length = len(message.token_ids)
    last, mean = Vectors(mean=False), Vectors(mean=True)
    for engine, cached in ((last, length - 1), (mean, 0)):
        engine.check(message, engine.run([message])[0])
        again = EngineEmbed(1, message.token_ids)
        assert engine.check(again, engine.run([again])[1]).cached_tokens == cached


def test_a_generation_reads_what_an_embedding_has_cached() -> None:
    engine = Vectors(mean=True)
    message = texts(count=1)[0]
    engine.run([message])
    engine.run([EngineGenerate(7, [*message.token_ids, 3], GREEDY, False)])
    assert engine.scheduler.counters["cached_tokens"] == len(message.token_ids)


def test_a_model_with_recurrent_states_gives_its_vectors() -> None:
    for mean in (False, True):
        engine = Vectors(mean=mean, states=12, max_step_tokens=7)
        messages = texts(seed=3)
        endings = engine.run(list(messages))
        for message in messages:
            engine.check(message, endings[message.id])


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_ends_no_other_request_wrongly(point: str) -> None:
    engine = Vectors(mean=True, fails=point, max_step_tokens=9)
    messages = texts(seed=1)
    endings = engine.run(list(messages))
    failed = [message for message in messages if isinstance(endings[message.id], EngineFailed)]
    assert 0 < len(failed) < len(messages)
    for message in messages:
        if message not in failed:
            engine.check(message, endings[message.id])


def test_states_that_are_no_numbers_end_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Vectors(mean=True)
    good, bad = texts(seed=2, count=2)
    bad = EngineEmbed(1, [*bad.token_ids, 9])
    wrong = histories(np.array(bad.token_ids))[-1]
    right = OracleModel.hidden

    def hidden(model: OracleModel, fingerprints: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        states = right(model, fingerprints)
        states[fingerprints == wrong] = np.nan
        return states

    monkeypatch.setattr(OracleModel, "hidden", hidden)
    endings = engine.run([good, bad])
    engine.check(good, endings[0])
    assert isinstance(endings[1], EngineFailed)
    assert "not numbers" in endings[1].message


def test_dimensions_keep_the_beginning() -> None:
    engine = Vectors(mean=False)
    message = texts(count=1)[0]
    whole = engine.run([message])[0]
    part = engine.run([EngineEmbed(1, message.token_ids, 3)])[1]
    assert isinstance(whole, EmbedEnded)
    assert isinstance(part, EmbedEnded)
    assert part.vector == whole.vector[:12]


def test_normalised_vectors_have_length_one_after_they_are_cut() -> None:
    head = LoadedHead(VectorConfig(4))
    assert np.allclose(np.frombuffer(head.vector(torch.tensor([3.0, 4.0, 9.0, 9.0]), 2), "<f4"), [0.6, 0.8])
    assert np.frombuffer(head.vector(torch.zeros(4), 0), "<f4").tolist() == [0.0] * 4
