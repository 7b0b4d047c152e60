"""Packed checkpoints: each format's layout, the model that runs on it, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from umbel.lang.errors import ModelError
from umbel.lang.runtime_options import Kernels
from umbel.srt.evaluation import memory_of
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.triton import reference
from umbel.srt.layers.checkpoint import Checkpoint, LinearTensors
from umbel.srt.layers.linear import DenseMethod
from umbel.srt.layers.quantized import Codes, QuantizedMethod, QuantizedStack, QuantizedTensor
from umbel.srt.models.decoder_config import EMBEDDING
from umbel.srt.models.experts import Experts
from umbel.srt.models.families import read_config
from umbel.srt.models.vision.parts import Renamed
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.device import weight_bytes
from umbel.srt.weights import open_model
from umbel.srt.weights.native_rows import native_rows
from umbel.srt.weights.packed_config import read_packed_config
from umbel.srt.weights.packed_tensors import PackedTensors, dense_view
from umbel.srt.weights.quantization import Int4Method, cpu_method

from ..models.reference import (
    Piece,
    Sequences,
    random_tokens,
    reference_logits,
    reference_model,
    relative_error,
    run_steps,
    tensors_of,
)
from ..runners.cuda.engines import in_torch, on_host, tiny_model
from .packed_formats import BY_NAME, FOLDERS, GROUP, PackedFolder, mxfp4, pack
from .tiny import byte_level

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TOKENS = random_tokens(9, 0)


def matrix(outputs: int = 48, inputs: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def read(folder: PackedFolder, tensors: dict[str, torch.Tensor]) -> PackedTensors:
    config = read_packed_config({"quantization_config": folder.config})
    assert config is not None
    return PackedTensors(tensors, config)


def written(folder: PackedFolder, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    parts, values = folder.write(weight)
    return {f"a.{suffix}": part for suffix, part in parts.items()}, values


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_layout_gives_the_numbers_that_were_packed(folder: PackedFolder) -> None:
    tensors, values = written(folder, matrix())
    packed = read(folder, tensors)
    assert list(packed) == ["a.weight"]
    assert packed.quantized_names == {"a.weight"}
    torch.testing.assert_close(packed["a.weight"], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_of_a_packed_checkpoint_are_those_of_its_dequantised_weights(folder: PackedFolder) -> None:
    model = reference_model("qwen3", num_hidden_layers=2, **SIZES)
    stored, values = pack(tensors_of(model), folder)
    model.load_state_dict(values)
    config = {**model.config.to_dict(), "quantization_config": folder.config}
    runner = build_runner(config, stored, num_slots=20, dtype="float32", kernels="torch")
    actual = run_steps(runner, Sequences([TOKENS], 20), [[Piece(0, 0, 5)], [Piece(0, 5, 4)]])[0]
    assert relative_error(actual, reference_logits(model, TOKENS)) < 1e-4
    assert runner.facts()["weights"] == "packed"


# Of products on the CPU kernels, relative to the largest: inputs have 16 bits with integers, 32 with codes of floats.
NATIVE = {
    "awq": 3e-4,
    "gptq, act-order, zeros": 3e-4,
    "gptq, v2, 8 bits": 3e-4,
    "compressed, int8": 1e-3,
    "compressed, float8, static": 1e-6,
    "fp8, blocks": 1e-6,
    "nf4, nested": 1e-6,
    "fp4": 1e-6,
}


@pytest.mark.parametrize("name", NATIVE)
def test_the_cpu_kernels_multiply_packed_matrices(name: str) -> None:
    tensors, values = written(BY_NAME[name], matrix(64, 256))
    view = read(BY_NAME[name], {**tensors, EMBEDDING: torch.zeros(2, 2, dtype=torch.bfloat16)})
    checkpoint = Checkpoint(view, dtype=torch.float32, device=torch.device("cpu"))
    method = cpu_method("auto", load_library(), exact=True)
    weight = method.load(checkpoint, LinearTensors(("a",), (64,), 256))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    assert relative_error(method.apply(weight, x), x @ values.t()) < NATIVE[name]
    assert weight.bytes < 64 * 256 * 1.13  # a float32 scale for each 32 inputs
    assert torch.equal(method.apply(weight, x[2:3])[0], method.apply(weight, x)[2]), "a row has the same bits alone"


FORMS = {
    "awq": "int4",
    "gptq": "Q4_0",
    "gptq, act-order, zeros": "int4",
    "gptq, v2, 8 bits": "int8_groups",
    "gptq, 8 bits, act-order": "Q8_0",
    "auto-round": "Q4_0",
    "compressed, 4 bits": "Q4_0",
    "compressed, 4 bits, zeros": "int4",
    "compressed, int8": "int8",
    "compressed, float8, outputs": "float8",
    "compressed, float8, static": "float8",
    "fp8, blocks": "float8",
    "fbgemm": "float8",
    "nf4": "nf4",
    "nf4, nested": "nf4",
    "fp4": "fp4",
    "bitsandbytes, int8": "int8",
}


@pytest.mark.parametrize(("name", "form"), FORMS.items())
def test_a_packed_checkpoint_runs_on_the_cpu_kernels(name: str, form: str) -> None:
    folder = BY_NAME[name]
    model = reference_model("qwen3", num_hidden_layers=2, **SIZES)
    stored, values = pack(tensors_of(model), folder)
    model.load_state_dict(values)
    config = {**model.config.to_dict(), "quantization_config": folder.config}
    runner = build_runner(config, stored, num_slots=20, dtype="float32", kernels="native")
    actual = run_steps(runner, Sequences([TOKENS], 20), [[Piece(0, 0, 9)]])[0]  # type: ignore[arg-type]
    assert relative_error(actual, reference_logits(model, TOKENS)) < 1e-3
    assert runner.facts()["weights"] == f"{form}, f32"


def packed_experts(folder: PackedFolder) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A configuration, the packed tensors of its model, and those that they stand for."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 64, "head_dim": 16}
    model = reference_model("qwen3_moe", num_hidden_layers=1, **sizes)
    tensors = tensors_of(model)
    for name in [name for name in tensors if ".experts." in name]:  # stacked by transformers, one by one in the files
        halves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[name.rpartition(".")[2]]
        for expert, matrix in enumerate(tensors.pop(name)):
            for half, part in zip(halves, matrix.chunk(len(halves)), strict=True):
                tensors[f"{name.rpartition('.')[0]}.{expert}.{half}.weight"] = part
    stored, values = pack(tensors, folder)
    return {**model.config.to_dict(), "quantization_config": folder.config}, stored, values


@pytest.mark.parametrize(("kernels", "tolerance"), [("torch", 1e-4), ("native", 1e-3)])
def test_experts_of_a_packed_checkpoint_run(kernels: Kernels, tolerance: float) -> None:
    config, stored, values = packed_experts(BY_NAME["awq"])
    runner = build_runner(config, stored, num_slots=20, dtype="float32", kernels=kernels)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    dense = build_runner(plain, values, num_slots=20, dtype="float32", kernels="torch")
    steps = [[Piece(0, 0, 9)]]
    actual, expected = (run_steps(run, Sequences([TOKENS], 20), steps)[0] for run in (runner, dense))  # type: ignore[arg-type]
    assert relative_error(actual, expected) < tolerance


# Bytes of the experts of a layer: 4 × 3 matrices of 64 × 64 weights, in groups of 32.
_WEIGHTS, _GROUPS = 4 * 3 * 64 * 64, 4 * 3 * 64 * 2
STACKS = {
    "awq": _WEIGHTS // 2 + 3 * _GROUPS,  # float16 scales, zeros of a byte
    "compressed, 4 bits": _WEIGHTS // 2 + 2 * _GROUPS,
    "gptq, v2, 8 bits": _WEIGHTS + 3 * _GROUPS,
    "compressed, int8": _WEIGHTS + 4 * _GROUPS // 2,
    "fp8, blocks": _WEIGHTS + 4 * _GROUPS,
    "fbgemm": _WEIGHTS + 4 * _GROUPS // 2,
    "nf4, nested": _WEIGHTS // 2 + 4 * _GROUPS,
    "gptq, act-order, zeros": 4 * _WEIGHTS,  # each expert has an order of its own: float32
}


@pytest.mark.parametrize("name", STACKS)
def test_the_cuda_decoder_keeps_experts_packed(name: str) -> None:
    config, stored, values = packed_experts(BY_NAME[name])
    view = read(BY_NAME[name], stored)
    weights = Checkpoint(view, dtype=torch.float32, device=torch.device("cpu"))
    experts = read_config(config).layers[0].experts
    assert experts is not None
    options = {"hidden": 64, "activation": "silu", "kernels": reference, "method": QuantizedMethod()}
    layer = Experts("model.layers.0", experts, weights, **options)
    router = weights.take("model.layers.0.mlp.gate.weight", 4, 64)
    assert memory_of(layer) - router.nbytes == STACKS[name]
    batch = Sequences([TOKENS], 20).batch([Piece(0, 0, 9)])
    packed = on_host(config, view, method=QuantizedMethod())
    assert relative_error(packed.forward(batch).values, on_host(config, values).forward(batch).values) < 1e-4


def test_experts_are_rounded_to_four_bits() -> None:
    config, _, values = packed_experts(BY_NAME["awq"])
    experts = read_config(config).layers[0].experts
    assert experts is not None
    layers = []
    for method in (Int4Method(), DenseMethod()):
        weights = Checkpoint(values, dtype=torch.float32, device=torch.device("cpu"))
        layers.append(
            Experts("model.layers.0", experts, weights, hidden=64, activation="silu", kernels=reference, method=method)
        )
    rounded, exact = layers
    assert memory_of(exact) - memory_of(rounded) == 4 * _WEIGHTS - (_WEIGHTS // 2 + 2 * _GROUPS)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert relative_error(rounded(x), exact(x)) < 0.2
    assert Int4Method().round(torch.zeros(4, 40)) is None


def test_stacks_under_other_names_are_those_of_the_checkpoint() -> None:
    _, config, stored = gpt_oss()
    _, view = dense_view(config, stored)
    name = "model.layers.0.mlp.experts.down_proj"
    renamed = Renamed(view, {"a": name, "b": EMBEDDING})
    assert renamed.stacked_names == {"a"}
    assert torch.equal(renamed.quantized_expert("a", 2, 4, 64, 96).dense(), view[name][2].t().float())
    assert Renamed({EMBEDDING: torch.zeros(2, 2)}, {"b": EMBEDDING}).stacked_names == frozenset()


def test_stacks_take_matrices_of_one_layout() -> None:
    def codes(*, zeros: bool = False, group: int = 32) -> QuantizedTensor:
        points = torch.full((2, 64 // group), 3, dtype=torch.int8) if zeros else None
        numbers = torch.full((2, 32), 0xA7, dtype=torch.uint8)
        return QuantizedTensor(Codes.INT4, numbers, torch.ones(2, 64 // group), points)

    stack = QuantizedStack(6, torch.device("cpu"))
    assert all(map(stack.add, (codes(), codes(zeros=True), codes())))
    assert torch.equal(stack.matrix.dense(), torch.cat([codes(zeros=zeros).dense() for zeros in (False, True, False)]))
    other = QuantizedStack(4, torch.device("cpu"))
    assert other.add(codes())
    assert not other.add(codes(group=64)), "groups of another size"
    assert not QuantizedStack(2, torch.device("cpu")).add(codes(group=16)), "groups that do not fit tiles"


def test_odd_widths_and_large_scales_on_the_cpu_kernels() -> None:
    small = QuantizedTensor(Codes.INT8, torch.ones(4, 40, dtype=torch.int8), torch.ones(4, 1))
    assert torch.equal(native_rows(small), torch.ones(4, 40))  # type: ignore[arg-type]  # 32 does not divide 40
    tables = QuantizedTensor(Codes.NF4, torch.full((4, 6), 0xFF, dtype=torch.uint8), torch.ones(4, 1))
    assert torch.equal(native_rows(tables), torch.ones(4, 12))  # type: ignore[arg-type]  # nor 8 12
    large = QuantizedTensor(Codes.INT8, torch.ones(4, 64, dtype=torch.int8), torch.full((4, 2), 1e6))
    with pytest.raises(ModelError, match="a scale of 1000000"):
        native_rows(large)


def test_the_cuda_decoder_keeps_matrices_packed() -> None:
    folder = BY_NAME["compressed, 4 bits, zeros"]
    config, tensors = tiny_model("llama, biases everywhere", num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    stored, values = pack(tensors, folder)
    packed = on_host(config, read(folder, stored), method=QuantizedMethod())
    batch = Sequences([TOKENS], 20).batch([Piece(0, 0, 9)])
    expected = in_torch(config, values).forward(batch).values
    assert relative_error(packed.forward(batch).values, expected) < 1e-4
    assert packed.facts()["weights"] == "packed"
    assert weight_bytes(read(folder, stored), torch.float32) < weight_bytes(values, torch.float32) / 2


@pytest.mark.parametrize(("name", "row_bytes"), [("compressed, 4 bits", 32 + 2 * 2), ("fbgemm", 64 + 4)])
def test_embedding_and_head_stay_packed(name: str, row_bytes: int) -> None:
    folder = BY_NAME[name]
    config, tensors = tiny_model("llama, biases everywhere", num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    stored, values = pack(tensors, folder)
    half = on_host(config, read(folder, stored), method=QuantizedMethod())  # all but those two
    for matrix in ("model.embed_tokens", "lm_head"):
        parts, values[f"{matrix}.weight"] = folder.write(stored.pop(f"{matrix}.weight"))
        stored |= {f"{matrix}.{suffix}": part for suffix, part in parts.items()}
    runner = on_host(config, read(folder, stored), method=QuantizedMethod())
    rows = len(values["lm_head.weight"])
    assert memory_of(half.model) - memory_of(runner.model) == 2 * rows * (64 * 4 - row_bytes)
    batch = Sequences([TOKENS], 20).batch([Piece(0, 0, 9)])
    expected = in_torch(config, values).forward(batch).values
    assert relative_error(runner.forward(batch).values, expected) < 1e-4
    in_packed_torch = in_torch({**config, "quantization_config": folder.config}, stored)
    assert relative_error(in_packed_torch.forward(batch).values, expected) < 1e-4


def test_products_dequantise_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BY_NAME["gptq, act-order, zeros"]
    tensors, values = written(folder, matrix())
    packed = read(folder, tensors).quantized("a.weight")
    assert packed is not None
    monkeypatch.setattr("umbel.srt.layers.quantized.PIECE", 96 * 7)
    assert len(list(packed.pieces())) == 7
    x = torch.randn(3, 96)
    torch.testing.assert_close(QuantizedMethod().apply((packed,), x), x @ values.t(), rtol=1e-4, atol=1e-4)


def test_maps_with_one_layout_are_one_product_and_others_stay_apart() -> None:
    folder = BY_NAME["gptq, act-order, zeros"]
    tensors = {"c.weight": matrix(8, seed=3)}
    for name, seed in (("a", 1), ("b", 2)):
        parts, _ = folder.write(matrix(16, seed=seed))
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    view = read(folder, tensors)
    checkpoint = Checkpoint(view, dtype=torch.float32, device=torch.device("cpu"))
    method, maps = QuantizedMethod(), LinearTensors(("a", "b", "c"), (16, 16, 8), 96)
    weight = method.load(checkpoint, maps)
    assert [type(part) for part in weight] == [QuantizedTensor, torch.Tensor]
    x = torch.randn(2, 96)
    dense = torch.cat([view[name] for name in maps.weights])
    torch.testing.assert_close(method.apply(weight, x), x @ dense.t(), rtol=1e-4, atol=1e-4)
    checkpoint.finish(is_unused=lambda name: False)


def test_memory_stays_packed() -> None:
    tensors, _ = written(BY_NAME["compressed, 4 bits"], matrix(256, 1024))
    packed = read(BY_NAME["compressed, 4 bits"], tensors).quantized("a.weight")
    assert packed is not None
    assert packed.codes.nbytes == 256 * 1024 // 2
    assert packed.scales.nbytes == 2 * 256 * 1024 // GROUP


def test_other_formats_of_weights_are_made_of_the_dequantised_ones() -> None:
    folder = BY_NAME["awq"]
    model = reference_model("llama", num_hidden_layers=1, **SIZES)
    stored, values = pack(tensors_of(model), folder)
    model.load_state_dict(values)
    config = {**model.config.to_dict(), "quantization_config": folder.config}
    runner = build_runner(config, stored, num_slots=20, dtype="float32", weights="float32")
    actual = run_steps(runner, Sequences([TOKENS], 20), [[Piece(0, 0, 9)]])[0]  # type: ignore[arg-type]
    assert relative_error(actual, reference_logits(model, TOKENS)) < 1e-4
    assert runner.facts()["weights"] in ("f32", "float32")


def test_experts_of_mxfp4_are_stacks_of_exact_numbers() -> None:
    config = read_packed_config(
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    )
    assert config is not None
    parts, values = mxfp4(torch.randn(3, 64, 40))
    view = PackedTensors({"e.gate_up_proj_blocks": parts["blocks"], "e.gate_up_proj_scales": parts["scales"]}, config)
    assert list(view) == ["e.gate_up_proj"]
    assert view["e.gate_up_proj"].dtype is torch.bfloat16
    assert torch.equal(view["e.gate_up_proj"].float(), values)


def gpt_oss() -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """The model, its configuration, and its packed tensors."""
    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
    }
    model = reference_model("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"], **sizes)
    values = tensors_of(model)
    stored = dict(values)
    for name in [name for name in values if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts, values[name] = mxfp4(stored.pop(name))
        stored |= {f"{name}_{suffix}": part for suffix, part in parts.items()}
    model.load_state_dict(values)
    return model, {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}, stored


@pytest.mark.parametrize(("kernels", "tolerance"), [("torch", 1e-4), ("native", 1e-3)])
def test_gpt_oss_runs_on_mxfp4(kernels: Kernels, tolerance: float) -> None:
    model, config, stored = gpt_oss()
    runner = build_runner(config, stored, num_slots=20, dtype="float32", kernels=kernels)
    actual = run_steps(runner, Sequences([TOKENS], 20), [[Piece(0, 0, 9)]])[0]  # type: ignore[arg-type]
    assert relative_error(actual, reference_logits(model, TOKENS)) < tolerance
    assert ("MXFP4" in str(runner.facts()["weights"])) == (kernels == "native")
    wrong = {**stored, "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8)}
    wrong["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(4, 64, 2, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"check that config\.json belongs to these weights"):
        build_runner(config, wrong, num_slots=20, dtype="float32", kernels=kernels)


def test_the_cuda_decoder_keeps_mxfp4_as_the_file_has_it() -> None:
    model, config, stored = gpt_oss()
    plain, view = dense_view(config, stored)
    runner = on_host(plain, view, method=QuantizedMethod())
    actual = run_steps(runner, Sequences([TOKENS], 200), [[Piece(0, 0, 5)], [Piece(0, 5, 4)]])[0]  # type: ignore[arg-type]
    assert relative_error(actual, reference_logits(model, TOKENS)) < 1e-4
    in_file = sum(part.nbytes for name, part in stored.items() if name.endswith(("_blocks", "_scales")))
    floats = on_host(plain, view)  # as `weights` asks for, float32
    assert memory_of(floats.model) - memory_of(runner.model) == 4 * in_file // 17 * 32 - in_file
    assert runner.facts()["weights"] == "packed"


def test_a_packed_folder_opens_and_runs(tmp_path: Path) -> None:
    folder = BY_NAME["compressed, 4 bits"]
    model = reference_model("llama", num_hidden_layers=1, **SIZES)
    stored, values = pack(tensors_of(model), folder)
    model.load_state_dict(values)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": folder.config}))
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    source = open_model(tmp_path, cache=tmp_path / "cache")
    runner = build_runner(source.config, source.tensors, num_slots=20, dtype="bfloat16", kernels="torch")
    actual = run_steps(runner, Sequences([TOKENS], 20), [[Piece(0, 0, 9)]])[0]  # type: ignore[arg-type]
    assert relative_error(actual, reference_logits(model, TOKENS)) < 3e-2  # bfloat16


def test_biases_of_zeros_that_converters_add_are_ignored() -> None:
    checkpoint = Checkpoint(
        {"a.bias": torch.zeros(4), "b.bias": torch.ones(4)}, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(ModelError, match=r"has 1 tensors this model does not use: b\.bias"):
        checkpoint.finish(is_unused=lambda name: False)


# ------------------------------------------------------------------------------------------ bad input

Change = Callable[[dict[str, torch.Tensor]], object]
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "scales of another shape": (
        "awq",
        lambda t: t.update({"a.scales": t["a.scales"][:, :40]}),
        r"tensor a\.scales has shape \[3, 40\], the weights and the configuration say \[3, 48\]",
    ),
    "zeros of another shape": (
        "awq",
        lambda t: t.update({"a.qzeros": t["a.qzeros"][:2]}),
        r"a\.qzeros has shape \[2, 6\]",
    ),
    "scales that are no numbers": ("gptq", lambda t: t["a.scales"].fill_(torch.nan), "has scales that are no numbers"),
    "codes of another type": (
        "gptq",
        lambda t: t.update({"a.qweight": t["a.qweight"].float()}),
        r"a\.qweight has type float32, not int32",
    ),
    "a group that is not there": ("gptq", lambda t: t["a.g_idx"].__setitem__(3, 77), "names groups outside 0 to 2"),
    "a negative group": ("gptq", lambda t: t["a.g_idx"].__setitem__(3, -2), "names groups outside 0 to 2"),
    "an order that is not promised": (
        "gptq",
        lambda t: t["a.g_idx"].copy_(t["a.g_idx"].flip(0)),
        "says desc_act=false",
    ),
    "groups of different sizes": (
        "gptq, act-order, zeros",
        lambda t: t["a.g_idx"].fill_(0),
        "groups of different sizes; each should have 32 inputs",
    ),
    "no order": ("gptq, act-order, zeros", lambda t: t.pop("a.g_idx"), "lacks g_idx, which desc_act=true promises"),
    "a missing part": ("awq", lambda t: t.pop("a.qzeros"), r"a\.weight lacks qzeros; check that all files"),
    "a shape of another matrix": (
        "compressed, 4 bits",
        lambda t: t["a.weight_shape"].fill_(1 << 40),
        "no 4 or 8 bits a weight",
    ),
    "a float where codes should be": (
        "compressed, int8",
        lambda t: t.update({"a.weight": t["a.weight"].float()}),
        r"a\.weight has type float32, not int8 or float8_e4m3fn",
    ),
    "codes that no group has": (
        "compressed, int8",
        lambda t: t.update({"a.weight": t["a.weight"].to(torch.float8_e4m3fn)}),
        "stored as 8-bit floats, which no group of the configuration has",
    ),
    "too few blocks": ("fp8, blocks", lambda t: t.update({"a.weight_scale_inv": torch.ones(1, 3)}), r"say \[2, 3\]"),
    "codes without scales": (
        "fp8, blocks",
        lambda t: t.pop("a.weight_scale_inv"),
        "float8_e4m3fn without the scales of fp8",
    ),
    "a state that is no JSON": (
        "nf4",
        lambda t: t["a.weight.quant_state.bitsandbytes__nf4"].fill_(91),
        "is no state of a 4-bit matrix",
    ),
    "a shape that the codes do not have": (
        "nf4",
        lambda t: t.update({"a.weight": t["a.weight"][:9]}),
        r"has shape \[9, 1\]",
    ),
    "another table": ("nf4", lambda t: t["a.weight.quant_map"].fill_(0), "is not the table of nf4"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_parts_are_one_clear_error(case: str) -> None:
    name, change, message = DAMAGE[case]
    tensors, _ = written(BY_NAME[name], matrix())
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    change(tensors)
    with pytest.raises(ModelError, match=message):
        read(BY_NAME[name], tensors)["a.weight"]


def test_a_matrix_of_another_shape_than_the_configuration_says_is_refused() -> None:
    tensors, _ = written(BY_NAME["awq"], matrix())
    checkpoint = Checkpoint(read(BY_NAME["awq"], tensors), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"a\.weight has shape \[48, 96\], the configuration says \[48, 97\]"):
        QuantizedMethod().load(checkpoint, LinearTensors(("a",), (48,), 97))


GPTQ = BY_NAME["gptq"].config
REFUSED: dict[str, tuple[Any, str]] = {  # Any: JSON
    "no object": (3, "quantization_config=3 is no object"),
    "unknown": ({"quant_method": "hqq"}, "quant_method='hqq', which umbel does not read; it reads auto-round, awq"),
    "no method": ({}, "quant_method=None"),
    "3 bits": ({**GPTQ, "bits": 3}, "GPTQ: bits=3; umbel reads 4 and 8"),
    "bits as text": ({**GPTQ, "bits": "4"}, "GPTQ: bits='4'"),
    "group 0": ({**GPTQ, "group_size": 0}, "GPTQ: group_size=0; it should be a positive number, or -1"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'; umbel reads gptq and gptq_v2"),
    "mixed bits": ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "modules of different bits are not read"),
    "gemv": ({**BY_NAME["awq"].config, "version": "gemv"}, "AWQ: version='gemv'; umbel reads the layout 'gemm'"),
    "5 bits": (
        {**BY_NAME["compressed, int8"].config, "config_groups": {"g": {"weights": {"num_bits": 5}}}},
        "weights of type 'int', 5 bits; umbel reads int 4, int 8 and float 8",
    ),
    "no groups": ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is empty"),
    "sparse": (
        {**BY_NAME["compressed, int8"].config, "sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse weights",
    ),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "format='nvfp4-pack-quantized'",
    ),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8: fmt='e5m2'; umbel reads e4m3"),
    "a block of nothing": ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"blocks of \[128, 0\]"),
    "fp3": ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp3"}, "bnb_4bit_quant_type='fp3'; umbel reads nf4 and fp4"),
    "own packing": ({"quant_method": "auto-round", "packing_format": "qbits"}, "auto-round: packing_format='qbits'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case: str) -> None:
    stated, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        read_packed_config({"quantization_config": stated})
    with pytest.raises(ModelError, match=message):
        read_packed_config({"text_config": {"quantization_config": stated}})
