"""The default model, Gemma 3 270M with its real weights, against transformers."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.torch_runner import TorchRunner
from umbel.srt.weights import open_model

from .reference import Piece, Sequences, reference_logits, relative_error, run_steps

pytestmark = pytest.mark.model

NUM_SLOTS = 600
TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    source = open_model("default")
    return build_runner(source.config, source.tensors, num_slots=NUM_SLOTS, dtype="float32", weights="float32")


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    source = open_model("default")
    config = Gemma3TextConfig(**{key: value for key, value in source.config.items() if key != "model_type"})
    return Gemma3ForCausalLM.from_pretrained(
        None, config=config, state_dict=dict(source.tensors), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompt() -> list[int]:
    return [2, *open_model("default").tokenizer().encode(TEXT, first=True)]


def test_logits_equal_those_of_transformers_whole_and_in_chunks(runner: TorchRunner, reference: Any) -> None:
    ids = prompt()
    expected = reference_logits(reference, ids)
    sequences = Sequences([ids], NUM_SLOTS)
    middle = len(ids) // 2
    for steps in (
        [[Piece(0, 0, len(ids))]],
        [[Piece(0, 0, 3)], [Piece(0, 3, middle - 3)], *[[Piece(0, at, 1)] for at in range(middle, len(ids))]],
    ):
        runner.clear()
        assert relative_error(run_steps(runner, sequences, steps)[0], expected) < 1e-4


@pytest.mark.nightly
def test_logits_past_the_sliding_window_equal_those_of_transformers(runner: TorchRunner, reference: Any) -> None:
    ids = (prompt() * 40)[:540]  # the window is 512
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=10).logits[0]
    runner.clear()
    sequences = Sequences([ids], NUM_SLOTS)
    nothing = np.array([], dtype=np.int64)  # logits of 530 rows are half a gigabyte
    runner.forward(dataclasses.replace(sequences.batch([Piece(0, 0, 530)]), logit_rows=nothing))
    assert relative_error(runner.forward(sequences.batch([Piece(0, 530, 10)])).values, expected) < 1e-4


@pytest.mark.nightly
def test_greedy_text_equals_that_of_transformers_generate(runner: TorchRunner, reference: Any) -> None:
    ids = prompt()
    generated = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0]
    runner.clear()
    steps = [[Piece(0, 0, len(ids))], *[[Piece(0, at, 1)] for at in range(len(ids), len(generated) - 1)]]
    logits = run_steps(runner, Sequences([generated.tolist()], NUM_SLOTS), steps)[0]
    assert logits[len(ids) - 1 :].argmax(-1).tolist() == generated[len(ids) :].tolist()
