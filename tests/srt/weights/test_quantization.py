"""The seam of weight formats: a method that no engine knows runs in the torch decoder, and the table of formats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch.nn import functional
from umbel.lang.errors import ModelError, ParameterError
from umbel.lang.runtime_options import Weights
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.cpu.quantise import quantise_int4
from umbel.srt.layers.checkpoint import BlockTensor, BlockTensors, Checkpoint, LinearTensors
from umbel.srt.layers.linear import DenseMethod
from umbel.srt.layers.low_rank import TorchChanges
from umbel.srt.layers.quantized import Codes, QuantizedTensor, quantise_int8
from umbel.srt.models.decoder import build_model
from umbel.srt.models.decoder_config import EMBEDDING, HEAD
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.torch_runner import TorchRunner
from umbel.srt.weights.gguf_tensors import restored
from umbel.srt.weights.quantization import FORMATS, Int4Method, cpu_method, require_dense

from ..models.reference import Piece, Sequences, random_tokens, reference_model, relative_error, run_steps, tensors_of
from ..runners.cuda.engines import in_torch, on_host

MAPS = LinearTensors(("a", "b"), (32, 16), 48, biased=True)
TENSORS = {
    f"{name}.{kind}": torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, (name, kind, shape) in enumerate(
        [("a", "weight", (32, 48)), ("b", "weight", (16, 48)), ("a", "bias", (32,)), ("b", "bias", (16,))]
    )
}


@dataclass
class ScaledMethod(TorchChanges):
    """A format that keeps each matrix divided by its largest number; notes what it was asked for."""

    name: str = "scaled"
    loaded: list[str] = field(default_factory=list)
    applied: int = 0

    def create(self, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.cat(list(sources))
        scale = weight.abs().max()
        return weight / scale, scale

    def stored(self, tensors: LinearTensors) -> list[str]:
        return tensors.weights

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> tuple[torch.Tensor, torch.Tensor]:
        self.loaded.extend(tensors.names)
        return self.create(checkpoint.take_weights(tensors))

    def apply(
        self, weight: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.applied += 1
        out = functional.linear(x, weight[0]) * weight[1]
        return out if bias is None else out + bias


def test_the_torch_decoder_keeps_and_multiplies_its_weights_as_a_method_says() -> None:
    reference = reference_model("qwen2")
    config, tensors, method = reference.config.to_dict(), tensors_of(reference), ScaledMethod()
    sequences = Sequences([random_tokens(9, 0)], 20)
    steps = [[Piece(0, 0, 9)]]
    dense = TorchRunner(build_model(config, tensors, dtype=torch.float32), num_slots=20)
    fake = TorchRunner(build_model(config, tensors, dtype=torch.float32, method=method), num_slots=20)
    expected, actual = (run_steps(runner, sequences, steps)[0] for runner in (dense, fake))
    assert relative_error(actual, expected) < 1e-5
    assert len(method.loaded) == 7 * config["num_hidden_layers"]
    assert method.applied == 4 * config["num_hidden_layers"], "gate and up are one product, and so are q, k and v"


class RenamedMethod(ScaledMethod):
    """A format that checkpoints store, under names of its own."""

    def stored(self, tensors: LinearTensors) -> list[str]:
        return [f"{name}.packed" for name in tensors.names]

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self.stored(tensors), tensors.widths, strict=True)
        return self.create([checkpoint.take(name, width, tensors.inputs) for name, width in pairs])


def test_a_format_says_which_tensors_a_layer_has() -> None:
    reference = reference_model("qwen2")
    config, tensors = reference.config.to_dict(), dict(tensors_of(reference))
    packed = {name.replace("_proj.weight", "_proj.packed"): tensor for name, tensor in tensors.items()}
    build_model(config, packed, dtype=torch.float32, method=RenamedMethod())
    with pytest.raises(ModelError, match=r"lacks \d+ tensors: .*down_proj\.packed"):
        build_model(config, tensors, dtype=torch.float32, method=RenamedMethod())


def test_every_format_of_the_cpu_multiplies_what_it_has_loaded() -> None:
    checkpoint = Checkpoint(TENSORS, dtype=torch.float32, device=torch.device("cpu"))
    x, bias = torch.randn(3, 48, generator=torch.Generator().manual_seed(9)), checkpoint.take_bias(MAPS)
    dense = DenseMethod()
    expected = dense.apply(dense.load(checkpoint, MAPS), x, bias)
    tolerances: dict[Weights, float] = {"float32": 1e-5, "bf16": 0.02, "int8": 0.02, "int4": 0.2}
    assert set(tolerances) == set(FORMATS)
    for name, tolerance in tolerances.items():
        method = cpu_method(name, load_library(), exact=True)
        assert relative_error(method.apply(method.load(checkpoint, MAPS), x, bias), expected) < tolerance, name


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")])
def test_auto_keeps_the_floats_that_the_checkpoint_has(dtype: torch.dtype, name: str) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in TENSORS.items()}
    checkpoint = Checkpoint(stored, dtype=torch.float32, device=torch.device("cpu"))
    method = cpu_method("auto", load_library(), exact=True)
    weight = method.load(checkpoint, MAPS)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(9))
    expected = x @ torch.cat([stored["a.weight"], stored["b.weight"]]).float().t()
    assert relative_error(method.apply(weight, x), expected) < 1e-5
    assert method.name == name


class Blocks(BlockTensors):
    """Matrices of 64 inputs, each in blocks of its own kind."""

    def __init__(self, **matrices: BlockTensor) -> None:
        self.matrices = {f"{name}.weight": matrix for name, matrix in matrices.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        matrix = self.matrices[name]
        values = torch.from_numpy(gguf.dequantize(matrix.data, gguf.GGMLQuantizationType[matrix.kind]))
        return values if matrix.heads is None else restored(values, matrix.heads)

    def __contains__(self, name: object) -> bool:
        return name in self.matrices

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)

    def block(self, name: str) -> BlockTensor | None:
        return self.matrices[name]


def in_blocks(kind: str, rows: int, *, seed: int, heads: int | None = None) -> BlockTensor:
    values = torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).numpy()
    return BlockTensor(kind, (rows, 64), gguf.quantize(values, gguf.GGMLQuantizationType[kind]), heads)


MIXED = Blocks(a=in_blocks("Q8_0", 32, seed=1, heads=2), b=in_blocks("Q4_0", 16, seed=2))
MIXED_MAPS = LinearTensors(("a", "b"), (32, 16), 64)


def test_auto_multiplies_blocks_as_they_are_each_in_its_kind() -> None:
    checkpoint = Checkpoint(MIXED, dtype=torch.float32, device=torch.device("cpu"))
    method = cpu_method("auto", load_library(), exact=True)
    weight = method.load(checkpoint, MIXED_MAPS)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
    expected = x @ torch.cat([MIXED["a.weight"], MIXED["b.weight"]]).t()
    assert relative_error(method.apply(weight, x), expected) < 0.02, "inputs are rounded to 8 bits"
    assert method.name == "Q8_0, Q4_0"


def test_every_other_format_dequantises_blocks_and_restores_the_order_of_heads() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
    expected = x @ torch.cat([MIXED["a.weight"], MIXED["b.weight"]]).t()
    tolerances: dict[Weights, float] = {"float32": 1e-5, "bf16": 0.02, "int8": 0.02, "int4": 0.2}
    assert set(tolerances) == set(FORMATS)
    for name, tolerance in tolerances.items():
        checkpoint = Checkpoint(MIXED, dtype=torch.float32, device=torch.device("cpu"))
        method = cpu_method(name, load_library(), exact=True)
        assert relative_error(method.apply(method.load(checkpoint, MIXED_MAPS), x), expected) < tolerance, name


def test_blocks_without_a_kernel_are_unpacked_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tensors = Blocks(a=BlockTensor("TQ2_0", (2, 256), np.full((2, 66), 0x15, np.uint8)))
    checkpoint = Checkpoint(tensors, dtype=torch.float32, device=torch.device("cpu"))
    method = cpu_method("auto", load_library(), exact=True)
    weight = method.load(checkpoint, LinearTensors(("a",), (2,), 256))
    assert method.name == "bf16"
    assert "no kernel multiplies blocks of type TQ2_0" in caplog.text
    assert relative_error(method.apply(weight, torch.eye(256)).t(), tensors["a.weight"]) < 0.01


def test_torch_takes_the_formats_of_its_dtype_only() -> None:
    require_dense("auto", torch.float16, "torch computes")
    require_dense("bf16", torch.bfloat16, "torch computes")
    for name, dtype in (("int8", torch.float32), ("bf16", torch.float32)):
        with pytest.raises(ParameterError, match=f"weights='{name}': torch computes, with weights of the dtype"):
            require_dense(name, dtype, "torch computes")


def int4_model() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Configuration, tensors, and tensors with the numbers that int4 keeps: 8 bits in the vocabulary."""
    reference = reference_model("qwen2", num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    tensors = tensors_of(reference)
    kept = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            kept[name] = QuantizedTensor(Codes.INT4, *quantise_int4(tensor)).dense()
        elif name in (EMBEDDING, HEAD):
            kept[name] = quantise_int8(tensor).dense()
    return reference.config.to_dict(), tensors, kept


def logits_of(runner: Any, count: int = 9) -> torch.Tensor:
    return run_steps(runner, Sequences([random_tokens(count, 0)], 20), [[Piece(0, 0, count)]])[0]


def test_int4_in_torch_is_the_model_with_rounded_matrices() -> None:
    config, tensors, kept = int4_model()
    runner = build_runner(config, tensors, num_slots=20, dtype="float32", weights="int4", kernels="torch")
    exact = build_runner(config, kept, num_slots=20, dtype="float32", kernels="torch")
    assert relative_error(logits_of(runner), logits_of(exact)) < 1e-4
    assert runner.facts()["weights"] == "int4"


def test_int4_on_the_cpu_kernels_is_close_to_it() -> None:
    config, tensors, kept = int4_model()
    runner = build_runner(config, tensors, num_slots=20, dtype="float32", weights="int4", kernels="native")
    exact = build_runner(config, {**kept, EMBEDDING: tensors[EMBEDDING]}, num_slots=20, dtype="float32")
    assert relative_error(logits_of(runner), logits_of(exact)) < 0.05  # inputs in 8 bits
    assert runner.facts()["weights"] == "int4"


def test_int4_in_the_cuda_decoder_is_the_model_with_rounded_matrices() -> None:
    config, tensors, kept = int4_model()
    batch = Sequences([random_tokens(9, 0)], 20).batch([Piece(0, 0, 9)])
    expected = in_torch(config, kept).forward(batch).values
    assert relative_error(on_host(config, tensors, method=Int4Method()).forward(batch).values, expected) < 1e-4


def test_models_of_transformers_are_not_rounded() -> None:
    reference = reference_model("gpt2", n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(ParameterError, match="weights='int4': 'gpt2' runs in transformers"):
        build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=20, weights="int4")
