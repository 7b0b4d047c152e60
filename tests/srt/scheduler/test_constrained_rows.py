"""Rows that may choose among some tokens only: a runner answers as if all logits were looked at, under the mask."""

import dataclasses

import numpy as np
import pytest
import torch
from umbel.fsm.tokens.vocabulary import pack
from umbel.srt.core.batch import Allowed, Draws, RowNeed, RowRequests
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import CpuRunner
from umbel.srt.runners.torch_runner import TorchRunner
from umbel.srt.sampling.sampler import TorchSampling, choose_few, draw_keys, draws_of

from ..models.reference import Piece, Sequences, random_tokens, reference_model, tensors_of

VOCABULARY = 97
ROWS = 40
WORDS = (VOCABULARY + 31) // 32


@pytest.fixture(scope="module", params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> TorchRunner | CpuRunner:
    torch.set_num_threads(1)
    reference = reference_model("gemma3_text", head_dim=16, sliding_window=5, sliding_window_pattern=3)
    config, tensors = reference.config.to_dict(), tensors_of(reference)
    return build_runner(config, tensors, num_slots=120, dtype="float32", kernels=request.param)


def picks(dice: np.random.Generator) -> RowRequests:
    kinds = dice.integers(0, 3, ROWS).astype(np.uint8)
    drawn = kinds == RowNeed.SAMPLE
    allowed = {}
    for row in np.flatnonzero(kinds != RowNeed.LOGITS).tolist():
        tokens = np.flatnonzero(dice.random(VOCABULARY) < dice.choice([0.03, 0.5, 0.97])).astype(np.int32)
        if not len(tokens) or dice.random() < 0.2:
            continue  # this row may choose among all
        few = bool(len(tokens) < 10)
        allowed[row] = Allowed(tokens if few else None, None if few else pack(tokens, WORDS))
    return RowRequests(
        kinds=kinds,
        inverse_temperatures=np.where(drawn, dice.choice([0.5, 1.0, 3.0], ROWS), 0.0),
        keys=draw_keys(dice.integers(0, 1 << 40, ROWS).tolist(), list(range(ROWS))),
        top_k=np.where(drawn, dice.choice([0, 0, 0, 3], ROWS), 0).astype(np.int32),
        min_p=np.where(drawn, dice.choice([0.0, 0.0, 0.0, 0.2], ROWS), 0.0),
        allowed=allowed,
    )


def reference_tokens(logits: torch.Tensor, asked: RowRequests) -> list[int]:
    masks: list[np.ndarray | None] = []
    for row in range(ROWS):
        allowed = asked.allowed.get(row)
        masks.append(None if allowed is None else allowed.bits if allowed.few is None else pack(allowed.few, WORDS))
    rows = np.arange(ROWS, dtype=np.int64)
    draws = Draws(rows, asked.inverse_temperatures, asked.keys, asked.top_k, np.ones(ROWS), asked.min_p, masks)
    tokens: list[int] = TorchSampling().choose(logits, draws).tolist()
    return tokens


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_from_all_logits(runner: TorchRunner | CpuRunner, seed: int) -> None:
    asked = picks(np.random.default_rng(seed))
    batch = Sequences([random_tokens(ROWS, seed)], 120).batch([Piece(0, 0, ROWS)])
    batch = dataclasses.replace(batch, logit_rows=np.arange(ROWS))
    expected = reference_tokens(runner.forward(batch).values.clone(), asked)
    logits = runner.forward(dataclasses.replace(batch, row_requests=asked))
    tokens = logits.tokens.copy()
    left = np.flatnonzero((tokens < 0) & (asked.kinds != RowNeed.LOGITS))
    if len(left):
        tokens[left] = TorchSampling().choose(logits.values, draws_of(asked, left, logits.places[left], VOCABULARY))
    for row in np.flatnonzero(asked.kinds != RowNeed.LOGITS).tolist():
        assert tokens[row] == expected[row], f"row {row}"
    assert (logits.places[asked.kinds == RowNeed.LOGITS] >= 0).all()
    if isinstance(runner, CpuRunner):
        few = [row for row, allowed in asked.allowed.items() if allowed.few is not None]
        assert (logits.tokens[few] >= 0).all()


def test_a_choice_among_few_breaks_ties_by_the_first() -> None:
    best = RowRequests(*(np.zeros(1, dtype) for dtype in (np.uint8, float, np.uint64, np.int32, float)))
    best.kinds[0] = RowNeed.ARGMAX
    tokens = np.array([3, 5, 9], np.int32)
    assert choose_few(np.array([1.0, 2.0, 2.0], np.float32), tokens, best, 0) == 5
