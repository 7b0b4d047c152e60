"""Options that change the model of an engine itself."""

from pathlib import Path

import pytest
import torch
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.srt.core.instruments import VirtualClock, no_faults
from umbel.srt.launch import open_engine
from umbel.srt.runners.torch_runner import TorchRunner

from .models.reference import Piece, Sequences, random_tokens, reference_logits, relative_error, run_steps
from .weights.tiny import BY_NAME, write_folder

SLOTS = 150
ORIGINAL = 64  # tokens that the tiny Phi was first made for; its context is 512


def runner_of(folder: Path, context: int | None) -> TorchRunner:
    torch.set_num_threads(1)
    options = RuntimeOptions(
        model=str(folder), context_length=context, dtype="float32", kernels="torch", pool_tokens=SLOTS
    )
    engine = open_engine(options, clock=VirtualClock(), faults=no_faults, phase=lambda _: None)
    engine.close()
    assert isinstance(engine.runner, TorchRunner)
    return engine.runner


def test_context_length_chooses_the_factors_of_longrope(tmp_path: Path) -> None:
    """transformers chooses by the length of each sequence: here of a short one, and of a long one."""
    model = write_folder(tmp_path / "phi", BY_NAME["phi3"])
    for context, length in ((ORIGINAL, ORIGINAL - 4), (None, ORIGINAL + 4)):
        ids = random_tokens(length, 3, model.config.vocab_size)
        runner = runner_of(tmp_path / "phi", context)
        assert runner.context_length == (context or 512)
        logits = run_steps(runner, Sequences([ids], SLOTS), [[Piece(0, 0, 20)], [Piece(0, 20, length - 20)]])[0]
        assert relative_error(logits, reference_logits(model, ids)) < 1e-4


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "phi", BY_NAME["phi3"])
    with pytest.raises(ParameterError, match="context_length=513 is more than the 512 tokens phi was made for"):
        runner_of(tmp_path / "phi", 513)
