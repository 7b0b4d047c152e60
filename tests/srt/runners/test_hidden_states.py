"""Hidden states after the final norm, on every executor, against transformers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from umbel.srt.core.batch import Logits, Runner
from umbel.srt.runners.build import build_runner

from ..models.reference import Piece, Sequences, random_tokens, reference_model, relative_error, tensors_of
from .cuda.engines import on_host

SLOTS = 100
LENGTHS = (23, 9)
# Two families with something between the final norm and the logits, and one that runs in transformers.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 16}),
    "granite": ("granite", {"logits_scaling": 8.0, "head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 20.0}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
}
RUNS = [(case, kernels) for case in CASES for kernels in ("torch", "native", "triton") if case != "gpt_neox"]


def states_of(runner: Runner, sequences: Sequences) -> tuple[list[torch.Tensor], torch.Tensor]:
    """All hidden states of both sequences, computed in two steps, and logits of the last row of the first sequence."""
    steps = [[Piece(0, 0, 12), Piece(1, 0, 4)], [Piece(0, 12, 11), Piece(1, 4, 5)]]
    collected: list[list[torch.Tensor]] = [[], []]
    for step in steps:
        batch = sequences.batch(step)
        asked = np.array([step[0].count - 1])  # its logits are asked for, not its state
        others = np.setdiff1d(np.arange(batch.rows), asked)
        answer: Logits = runner.forward(replace(batch, logit_rows=asked, hidden_rows=others))
        assert answer.hidden is not None
        states = answer.hidden.clone()
        assert len(states) == batch.rows - 1
        collected[0].append(states[: step[0].count - 1])
        collected[1].append(states[step[0].count - 1 :])
    return [torch.cat(parts) for parts in collected], answer.values.clone()


@pytest.mark.parametrize(("case", "kernels"), [*RUNS, ("gpt_neox", "torch")])
def test_states_are_those_of_transformers(case: str, kernels: str) -> None:
    family, changes = CASES[case]
    model = reference_model(family, **changes)
    config, tensors = model.config.to_dict(), tensors_of(model)
    sequences = Sequences([random_tokens(length, seed) for seed, length in enumerate(LENGTHS)], SLOTS)
    if kernels == "triton":
        runner: Runner = on_host(config, tensors, num_slots=SLOTS)
    else:
        runner = build_runner(
            config, tensors, num_slots=SLOTS, dtype="float32", kernels=kernels, weights="auto", pack=False
        )
    actual, logits = states_of(runner, sequences)
    for place, ids in enumerate(sequences.token_ids):
        with torch.no_grad():
            given = model(input_ids=torch.from_numpy(ids)[None], use_cache=False, output_hidden_states=True)
        expected = given.hidden_states[-1][0]
        if place == 0:
            assert relative_error(logits[0], given.logits[0, -1]) < 1e-4, "logits stand next to states"
            expected = expected[[row for row in range(len(ids)) if row not in (11, 22)]]
        assert relative_error(actual[place], expected) < 1e-4


def test_a_step_that_asks_for_states_alone_gives_no_logits() -> None:
    model = reference_model("qwen3", head_dim=16)
    runner = build_runner(model.config.to_dict(), tensors_of(model), num_slots=SLOTS, dtype="float32", kernels="native")
    batch = Sequences([random_tokens(9, 0)], SLOTS).batch([Piece(0, 0, 9)])
    answer = runner.forward(replace(batch, logit_rows=np.zeros(0, dtype=np.int64), hidden_rows=np.array([8])))
    assert answer.hidden is not None
    assert answer.hidden.shape == (1, 48)
    assert len(answer.values) == 0
