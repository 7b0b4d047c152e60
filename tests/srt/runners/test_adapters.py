"""Adapters in one batch against models in which they are merged, on each kind of kernels."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from umbel.lang.runtime_options import Kernels
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.core.batch import Runner
from umbel.srt.kernels.cpu.library import Isa, load_library
from umbel.srt.layers.low_rank import Adapter, AdapterRows, LowRank
from umbel.srt.models.decoder_config import linear_maps
from umbel.srt.models.families import read_config
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import CpuRunner, build_cpu_runner

from ..kernels.native import isa_cases, with_each_team
from ..models.reference import Piece, Sequences, random_tokens, reference_model, relative_error, tensors_of
from .cuda.engines import on_host

NUM_SLOTS = 200
LENGTH = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "gemma3_text": {"head_dim": 32, "sliding_window": 5, "sliding_window_pattern": 3, "intermediate_size": 96},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "phi3": {"hidden_size": 64, "pad_token_id": 0},
    "qwen3_5_text": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}


def adapter(config: Mapping[str, Any], seed: int, *, rank: int = 3, dtype: torch.dtype = torch.float32) -> Adapter:
    """Changes of two maps of three, of ranks that differ from map to map.

    Scales stay small: seven times such changes make a delta net that turns 1e-7 of its inputs into 1e-4 of its logits.
    """
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    maps = [
        (name, width, product.inputs)
        for product in linear_maps(read_config(config))
        for name, width in zip(product.names, product.widths, strict=True)
    ]
    for place, (name, width, inputs) in enumerate(maps):
        own = rank + place % 4
        if (place + seed) % 3:
            down, up = (torch.randn(shape, generator=generator) * 0.2 for shape in ((own, inputs), (width, own)))
            changes[name] = LowRank(down.to(dtype), up.to(dtype), 0.5 + seed / 4)
    return Adapter(f"adapter-{seed}", changes)


def merged(tensors: Mapping[str, torch.Tensor], change: Adapter) -> dict[str, torch.Tensor]:
    result = dict(tensors)
    for name, low in change.changes.items():
        result[f"{name}.weight"] = tensors[f"{name}.weight"] + low.scale * (low.up.float() @ low.down.float())
    return result


def run(runner: Runner, steps: Sequence[Sequence[Piece]], chosen: Sequence[int]) -> list[torch.Tensor]:
    """Logits of all tokens of sequences, each with its adapter."""
    prompts = Sequences([random_tokens(LENGTH, seed) for seed in range(len(chosen))], NUM_SLOTS)
    found: list[list[torch.Tensor]] = [[] for _ in chosen]
    for pieces in steps:
        adapters = np.concatenate([np.full(piece.count, chosen[piece.sequence], np.int32) for piece in pieces])
        batch = dataclasses.replace(prompts.batch(pieces), adapters=adapters)
        logits = runner.forward(batch).values.clone()
        for piece, part in zip(pieces, logits.split([piece.count for piece in pieces]), strict=True):
            found[piece.sequence].append(part)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in found]


WHOLE = [[Piece(index, 0, LENGTH) for index in (8, 0, 3, 1, 2, 7, 4, 5, 6)]]
CUTS = [[5 + index % 3, 10, 11, LENGTH] for index in range(9)]
CHUNKS = [
    [Piece(index, before, end - before) for index, (before, end) in enumerate(places)]
    for places in ([([0, *cuts][step], cuts[step]) for cuts in CUTS] for step in range(4))
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kernels", ["torch", "native", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_adapters_in_a_batch_equal_the_merged_models(family: str, kernels: Kernels) -> None:
    """With the references of Triton's kernels, whose last steps are captured graphs."""
    reference = reference_model(family, **FAMILIES[family])
    config, tensors = reference.config.to_dict(), tensors_of(reference)
    adapters = [adapter(config, seed) for seed in range(8)]

    def build(weights: Mapping[str, torch.Tensor], given: Sequence[Adapter]) -> Runner:
        if kernels == "triton":
            return on_host(config, weights, num_slots=NUM_SLOTS, max_running=9, adapters=given)
        return build_runner(
            config, weights, num_slots=NUM_SLOTS, dtype="float32", kernels=kernels, adapters=given, pack=None
        )

    runner = build(tensors, adapters)
    mixed = run(runner, WHOLE, [*range(8), -1])
    runner.clear()
    pieces = run(runner, CHUNKS, [*range(8), -1])
    for index, (together, cut) in enumerate(zip(mixed, pieces, strict=True)):
        alone = build(merged(tensors, adapters[index]) if index < 8 else tensors, ())
        expected = run(alone, [[Piece(index, 0, LENGTH)]], [-1] * 9)[index]
        assert relative_error(together, expected) < 1e-4, index
        assert relative_error(cut, expected) < 1e-4, index
        if index < 8:
            plain = run(runner, [[Piece(index, 0, LENGTH)]], [-1] * 9)[index]
            assert relative_error(plain, expected) > 1e-2  # the adapter changes the logits


def decode(runner: CpuRunner, chosen: Sequence[int], sequences: Sequence[int]) -> torch.Tensor:
    """Logits of the first tokens of some sequences, each with its adapter: they attend to themselves alone."""
    prompts = Sequences([[token] for token in random_tokens(len(chosen), 3)], NUM_SLOTS)
    batch = prompts.batch([Piece(index, 0, 1) for index in sequences])
    adapters = np.array([chosen[index] for index in sequences], dtype=np.int32)
    return runner.forward(dataclasses.replace(batch, adapters=adapters)).values.clone()


@pytest.mark.parametrize("isa", isa_cases())
@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_a_row_has_the_same_bits_alone_and_among_rows_of_other_adapters(
    isa: Isa, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """Adapters in float32 are rounded to 16 bits, next to weights that are not float32."""
    reference = reference_model("llama", head_dim=16, intermediate_size=96)
    config = reference.config.to_dict()
    library = load_library(isa)
    runner = build_cpu_runner(
        config,
        {name: tensor.bfloat16() for name, tensor in tensors_of(reference).items()},
        library=library,
        size=lambda geometry: PoolSize(NUM_SLOTS),
        dtype=dtype,
        weights="bf16",
        tree_attention=True,
        screened_head=False,
        adapters=[adapter(config, seed, rank=33, dtype=stored) for seed in range(3)],
    )
    chosen = [index % 4 - 1 for index in range(37)]
    among, *others = with_each_team(library, lambda: decode(runner, chosen, range(37)))
    assert all(torch.equal(other, among) for other in others)
    for index in (0, 1, 15, 18, 36):
        assert torch.equal(decode(runner, chosen, [index])[0], among[index])
    assert torch.equal(decode(runner, [-1] * 37, range(37))[::4], among[::4])


def test_rows_of_a_part_are_counted_from_its_beginning() -> None:
    rows = AdapterRows.of(np.array([1, -1, 0, 1, -1, 0]))
    assert rows is not None
    part = rows.part(2, 4)
    assert [(index, places.tolist()) for index, places in part.groups] == [(0, [0]), (1, [1])]
    assert not rows.part(4, 5).groups
    assert AdapterRows.of(np.array([-1, -1])) is None


def test_long_prompts_go_through_the_mlp_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = reference_model("llama")
    config = reference.config.to_dict()
    runner = build_runner(
        config,
        tensors_of(reference),
        num_slots=NUM_SLOTS,
        dtype="float32",
        kernels="torch",
        adapters=[adapter(config, 1), adapter(config, 2)],
    )
    whole = run(runner, WHOLE, [0, 1, -1] * 3)
    monkeypatch.setattr("umbel.srt.models.decoder.MLP_ROWS", 7)
    runner.clear()
    for parts, together in zip(run(runner, WHOLE, [0, 1, -1] * 3), whole, strict=True):
        assert relative_error(parts, together) < 1e-5


@pytest.mark.parametrize(("outlier", "most"), [(1.0, 1e-3), (1e4, 1e-5)], ids=["rounded", "not rounded"])
def test_adapters_of_weights_in_16_bits_are_rounded_where_that_loses_little(outlier: float, most: float) -> None:
    """An outlier, here of an input that is 0, would take the bits of the others: such changes stay float32."""
    reference = reference_model("llama", head_dim=16, intermediate_size=96)
    config, tensors = reference.config.to_dict(), {k: v.half().float() for k, v in tensors_of(reference).items()}
    tensors["model.embed_tokens.weight"][:, 0] = 0
    maps = {f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    change = Adapter("sql", {name: low for name, low in adapter(config, 1).changes.items() if name in maps})
    for low in change.changes.values():
        low.down[:, 0] *= outlier

    def logits(weights: Mapping[str, torch.Tensor], given: Sequence[Adapter]) -> torch.Tensor:
        runner = build_runner(
            config, weights, num_slots=NUM_SLOTS, dtype="float32", kernels="native", adapters=given, pack=None
        )
        return run(runner, [[Piece(0, 0, LENGTH)]], [len(given) - 1])[0]

    halves = {name: tensor.half() for name, tensor in tensors.items()}
    assert 0 < relative_error(logits(halves, [change]), logits(merged(tensors, change), ())) < most
