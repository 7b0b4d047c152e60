"""What tests of GGUF families have in common: equality with transformers, closeness in blocks, and refusals."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel
from umbel.lang.errors import ModelError
from umbel.lang.runtime_options import Kernels
from umbel.srt.layers.checkpoint import BlockTensors
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import CpuRunner
from umbel.srt.weights import ModelSource, open_model

from ..models.reference import Piece, Sequences, random_tokens, reference_logits, relative_error, run_steps
from .tiny import Family, byte_level, write_gguf

SLOTS = 80
CHUNKS = [[Piece(0, 0, 17)], [Piece(0, 17, 1), Piece(1, 0, 9)], [Piece(0, 18, 5), Piece(1, 9, 8)]]

Spelled = list[tuple[str, torch.Tensor]]


def apart(name: str, tensor: torch.Tensor) -> Spelled:
    """Gate and up of all experts are tensors of their own."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return [(name.replace("gate_up", "gate") + ".weight", gate), (name.replace("gate_up", "up") + ".weight", up)]
    return [(name + ".weight" if name.endswith(("down_proj", "sinks")) else name, tensor)]


def family(
    name: str,
    architecture: gguf.MODEL_ARCH,
    build: Callable[[int], PreTrainedModel],
    metadata: dict[str, Any],  # Any: values of GGUF metadata
    spelled: Callable[[str, torch.Tensor], Spelled] = apart,
    **options: bool,
) -> Family:
    return Family(name, architecture, build, byte_level, metadata=metadata, spelled=spelled, **options)


def sequences() -> Sequences:
    return Sequences([random_tokens(23, 0), random_tokens(17, 1)], SLOTS)


def assert_equals_transformers(family: Family, kernels: Kernels, folder: Path) -> None:
    model = write_gguf(folder / "tiny.gguf", family)
    source = open_model(folder / "tiny.gguf", cache=folder / "cache")
    runner = build_runner(source.config, source.tensors, num_slots=SLOTS, dtype="float32", kernels=kernels)
    expected = [reference_logits(model, ids.tolist()) for ids in sequences().token_ids]
    for actual, logits in zip(run_steps(runner, sequences(), CHUNKS), expected, strict=True):
        assert relative_error(actual, logits) < 1e-4


def open_in_blocks(family: Family, kind: str, folder: Path) -> tuple[ModelSource, BlockTensors]:
    """A file whose matrices are of this kind, and its tensors."""
    write_gguf(folder / "tiny.gguf", family, kind=kind)
    source = open_model(folder / "tiny.gguf", cache=folder / "cache")
    assert isinstance(source.tensors, BlockTensors)
    return source, source.tensors


def assert_near_unpacked(source: ModelSource, bound: float) -> CpuRunner:
    """Compares the logits of blocks with those of exact weights, all together: a token may meet another expert."""
    native = build_runner(source.config, source.tensors, num_slots=SLOTS, dtype="float32", kernels="native")
    assert isinstance(native, CpuRunner)
    unpacked = {name: source.tensors[name].float() for name in source.tensors}
    exact = build_runner(source.config, unpacked, num_slots=SLOTS, dtype="float32", kernels="torch")
    rounded, logits = (torch.cat(run_steps(runner, sequences(), CHUNKS)) for runner in (native, exact))
    assert (rounded - logits).norm() < bound * logits.norm()
    return native


def assert_refused(family: Family, change: Mapping[str, object], message: str, folder: Path) -> None:
    """With some metadata replaced, opening fails with this message, and nothing is written."""
    write_gguf(folder / "odd.gguf", replace(family, metadata={**family.metadata, **change}))
    with pytest.raises(ModelError, match=message):
        open_model(folder / "odd.gguf", cache=folder / "cache")
    assert not (folder / "cache").exists()
