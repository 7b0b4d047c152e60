"""Tiles within the shared memory of a device: by formulas before a launch, and after Triton's refusal."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import FLOAT8
from umbel.srt.kernels.triton import attention_backend, fitting, linear, low_rank, moe, quantized, reference
from umbel.srt.kernels.triton.attention import Tile, tile_bytes, tiles_for
from umbel.srt.kernels.triton.fitting import (
    Room,
    largest_that_fits,
    launch_fitting,
    replaced_tiles,
    shared_bytes,
    smaller,
)
from umbel.srt.kernels.triton.tuning import RowsTile, read_tuning
from umbel.srt.layers.quantized import Codes

from ...attention.batches import Sequence, make_batch
from .attention_cases import SCALE, attend_reference, normal, pool_for, tiny_backend
from .closeness import random, random_codes, relative_error

ROOT = Path(__file__).resolve().parents[4]
BF16 = torch.bfloat16
GEFORCE = Room(99 << 10, warp_groups=False)
A100 = Room(163 << 10, warp_groups=False)
HOPPER = Room(227 << 10, warp_groups=True)
ROWS = RowsTile(outputs=64, depth=256, warps=4, stages=4, most_rows=32)


@pytest.fixture(autouse=True)
def _nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_REPLACED", {})


def test_a_tile_gets_smaller_until_there_is_none() -> None:
    found, tile = [], ROWS
    while (less := smaller(tile)) is not None:
        tile = less
        found.append((tile.stages, tile.depth))
    assert found == [(3, 256), (2, 256), (2, 128), (2, 64), (2, 32), (1, 32)]


def test_products_of_few_rows_have_the_most_stages_that_a_device_holds() -> None:
    """An RTX 3090 and an A100 multiply up to 32 rows on tensor cores, too."""
    found = {
        (name, rows): linear.rows_tile(rows, ROWS, room)
        for name, room in {"geforce": GEFORCE, "a100": A100, "hopper": HOPPER, "interpreter": Room()}.items()
        for rows in (16, 32)
    }
    assert {key: tile.stages for key, tile in found.items()} == {
        ("geforce", 16): 3,
        ("geforce", 32): 3,
        ("a100", 16): 4,
        ("a100", 32): 4,
        ("hopper", 16): 4,
        ("hopper", 32): 4,
        ("interpreter", 16): 4,
        ("interpreter", 32): 4,
    }
    assert {tile.depth for tile in found.values()} == {256}
    assert replaced_tiles() == 2


def test_what_a_formula_replaces_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            linear.rows_tile(16, ROWS, GEFORCE)
    assert [record.getMessage() for record in caplog.records] == [
        f"linear_rows: a smaller tile in place of {ROWS}: it takes 122880 bytes of shared memory, there are 101376"
    ]


@pytest.mark.parametrize("name", ["ampere", "geforce_ampere", "ada", "geforce_blackwell", "hopper"])
@pytest.mark.parametrize(
    ("geometry", "dtype", "kv_dtype"),
    [
        (AttentionGeometry(32, 8, 128), BF16, BF16),
        (AttentionGeometry(8, 4, 256), BF16, BF16),
        (AttentionGeometry(8, 4, 256), BF16, FLOAT8),
        (AttentionGeometry(128, 1, 128), BF16, BF16),
        (AttentionGeometry(32, 8, 128), torch.float32, torch.float32),
        (AttentionGeometry(16, 2, 512), BF16, BF16),
        (AttentionGeometry(128, 1, 576, latent=True), BF16, BF16),
        (AttentionGeometry(20, 1, 576, latent=True), torch.float32, torch.float32),
    ],
    ids=str,
)
def test_attention_fits_every_class(
    geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype, name: str
) -> None:
    room = {"ampere": A100, "hopper": HOPPER}.get(name, GEFORCE)
    plain = tiles_for(geometry, dtype, kv_dtype, tuning=read_tuning(name))
    fitting_tiles = tiles_for(geometry, dtype, kv_dtype, tuning=read_tuning(name), room=room)
    takes = [shared_bytes(tile, room, *tile_bytes(tile, geometry, dtype, kv_dtype)) for tile in fitting_tiles]
    assert max(takes) <= (room.bytes or 0)
    assert [tile.vectors for tile in fitting_tiles] == [tile.vectors for tile in plain]
    too_large = geometry.head_dim == 576 and dtype is BF16 and room is GEFORCE and geometry.group == 128
    assert (fitting_tiles != plain) == too_large


def test_other_products_fit_every_class() -> None:
    for name, room in {"ampere": A100, "ada": GEFORCE, "hopper": HOPPER}.items():
        tuning = read_tuning(name)
        for cut in (tuning.moe_decode, tuning.moe_middle, tuning.moe_prefill):
            assert moe.block_cut(cut, None, BF16, room) == cut
        for cut in (tuning.moe_codes_decode, tuning.moe_codes_middle, tuning.moe_codes_prefill):
            assert moe.block_cut(cut, 8, BF16, room) == cut
        assert quantized.codes_tile(64, 8, BF16, tuning.quantized_rows, room) == tuning.quantized_rows
        assert low_rank.changes_tile(64, BF16, tuning.low_rank, room) == tuning.low_rank
    wide = low_rank.changes_tile(256, BF16, read_tuning("ada").low_rank, GEFORCE)
    assert (wide.stages, wide.depth) == (2, 128), "three stages of 272 rows take 136 KiB"


def test_what_cannot_be_made_smaller_is_launched_as_it_is() -> None:
    least = RowsTile(outputs=64, depth=32, warps=4, stages=1, most_rows=32)
    assert largest_that_fits("linear_rows", least, GEFORCE, lambda tile: 1 << 20) == least


# ------------------------------------------------------------------------------------------ refusals


class Refusing:
    """A kernel that a device refuses until its constants are small enough; then it runs in the interpreter.

    Args:
        fits: decides by what it is launched with.
    """

    def __init__(self, kernel: Any, fits: Callable[[dict[str, Any]], bool]) -> None:
        self._kernel = kernel
        self._fits = fits
        self.refused = 0
        self.launched: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if not self._fits(options):
                self.refused += 1
                raise OutOfResources(147_456, 101_376, "shared memory")
            self.launched.append(options)
            self._kernel[grid](*arguments, **options)

        return launch


def test_a_product_that_the_device_refuses_is_launched_smaller(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Refusing(linear.multiply_few_rows, lambda options: options["BLOCK_K"] <= 128)
    monkeypatch.setattr(linear, "multiply_few_rows", kernel)
    x, weight = random(5, 272, dtype=BF16).to(device), random(70, 272, dtype=BF16, seed=1).to(device)
    out = torch.empty((5, 70), dtype=BF16, device=device)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            linear.multiply_few(x, weight, None, out)
            assert relative_error(out, reference.linear(x, weight, None)) < 2e-2
    assert kernel.refused == 3, "four stages, three, two; later calls begin with what fits"
    assert [(options["num_stages"], options["BLOCK_K"]) for options in kernel.launched] == [(2, 128)] * 3
    assert replaced_tiles() == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("linear_rows: a smaller tile in place of RowsTile(")
    assert "Hardware limit: 101376" in line


def test_attention_that_the_device_refuses_is_launched_with_fewer_stages(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many query vectors: the step was cut for those."""
    kernel = Refusing(attention_backend.attend_items, lambda options: options["num_stages"] <= 2)
    monkeypatch.setattr(attention_backend, "attend_items", kernel)
    geometry = AttentionGeometry(4, 2, 16)
    batch, num_slots = make_batch([Sequence(20, 1), Sequence(5, 14), Sequence(0, 70)], seed=0)
    pool = pool_for(num_slots, geometry, torch.float32, device)
    queries = normal(batch.rows, 4, 16).to(device)
    backend = tiny_backend(geometry, device)
    found = backend.attend(0, queries, pool, backend.plan(batch, None), scale=SCALE)
    torch.testing.assert_close(found, attend_reference(batch, pool, queries, None), rtol=1e-5, atol=1e-5)
    assert kernel.refused == 2, "once for items of few rows, once for those of more"
    assert {options["num_stages"] for options in kernel.launched} == {2}


def test_experts_that_the_device_refuses_are_computed_in_smaller_blocks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Refusing(moe.gate_up_blocks, lambda options: options["BLOCK_K"] <= 64)
    monkeypatch.setattr(moe, "gate_up_blocks", kernel)
    x = random(9, 96).to(device)
    gate_up, down = (random(*shape, seed=seed).to(device) for seed, shape in ((1, (4, 48, 96)), (2, (4, 96, 24))))
    weights = torch.full((9, 2), 0.5, device=device)
    chosen = torch.arange(18, dtype=torch.int32, device=device).view(9, 2) % 4
    tiles = moe.MoeTiles(rows=16, columns=16, depth=256, group=2, warps=4, stages=3)
    found = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu", tiles=tiles)
    expected = reference.fused_experts(x, gate_up, down, weights, chosen, activation="silu")
    assert relative_error(found, expected) < 1e-5
    assert kernel.refused > 0


def test_codes_that_the_device_refuses_are_widened_in_smaller_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Refusing(quantized.multiply_codes_rows, lambda options: options["BLOCK_K"] <= 64)
    monkeypatch.setattr(quantized, "multiply_codes_rows", kernel)
    weight = random_codes(Codes.INT4, 70, 256, 128).to(device)
    x = random(5, 256).to(device)
    assert relative_error(quantized.quantized_linear(x, weight), reference.quantized_linear(x, weight)) < 1e-5
    assert kernel.refused > 0


def test_other_errors_and_the_last_refusal_are_raised() -> None:
    launches: list[Tile | RowsTile] = []

    def refuse(tile: RowsTile) -> None:
        launches.append(tile)
        raise OutOfResources(1 << 20, 101_376, "shared memory")

    def fail(tile: RowsTile) -> None:
        launches.append(tile)
        raise ValueError("another error")

    with pytest.raises(OutOfResources):
        launch_fitting("linear_rows", ROWS, refuse)
    assert len(launches) == 7
    launches.clear()
    with pytest.raises(ValueError, match="another error"):
        launch_fitting("norm", ROWS, fail)
    assert len(launches) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("devices", ["geforce_ampere", "ada", "geforce_blackwell", "ampere"])
def test_the_compiler_takes_no_more_than_the_formulas_say(devices: str, tmp_path: Path) -> None:
    """The command fails where a variant takes more shared memory than devices of the class have."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    only = ["attend many d256", "attend many d576 group 128", "rows 32 x", "low rank", "prefill", "codes rows 64"]
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.ptx", "--devices", devices, "--only", *only],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
