"""Numbers of kernels by class of devices: those that stood in the kernels' files, and how others get into a table."""

import json
import shutil
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import FLOAT8
from umbel.srt.kernels.triton.attention import Tile, tiles_for
from umbel.srt.kernels.triton.linear import linear
from umbel.srt.kernels.triton.tuning import (
    CLASSES,
    DEFAULT,
    FOLDER,
    MoeTiles,
    RowTile,
    Tuning,
    class_of,
    measured_of,
    read_tuning,
    rows_of,
    tuned,
    tuning_for,
    write_row,
)

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = (DEFAULT, *sorted(set(CLASSES.values())))
SMALL = ("turing", "geforce_ampere", "ada", "geforce_blackwell")  # 99 KiB of shared memory, or less
LARGE = (DEFAULT, "hopper")

Numbers = tuple[int, ...]
# Vectors, keys, warps, stages, resident, two loops, registers, apart; of few, some and many; as they were measured on
# an H100, and followed from its shared memory for others; 64 vectors of some were not measured.
STREAM = ((16, 64, 4, 2, 4, 0, 128, 0), (64, 32, 4, 2, 4, 0, 128, 0))
TILES: dict[str, tuple[AttentionGeometry, torch.dtype, torch.dtype, dict[tuple[str, ...], tuple[Numbers, ...]]]] = {
    "128": (
        AttentionGeometry(32, 8, 128),
        *(BF16, BF16),
        {(*LARGE, "ampere"): (*STREAM, (64, 64, 4, 3, 2, 1, 0, 1)), SMALL: (*STREAM, (64, 64, 4, 2, 2, 1, 0, 1))},
    ),
    "64": (
        AttentionGeometry(32, 8, 64),
        *(BF16, BF16),
        {
            (*LARGE, "ampere"): ((16, 128, *STREAM[0][2:]), (64, 64, *STREAM[1][2:]), (128, 64, 4, 3, 2, 1, 0, 1)),
            SMALL: ((16, 128, *STREAM[0][2:]), (64, 64, *STREAM[1][2:]), (128, 64, 4, 2, 2, 1, 0, 1)),
        },
    ),
    "256": (
        AttentionGeometry(8, 4, 256),
        *(BF16, BF16),
        {
            LARGE: ((16, 32, 4, 3, 2, 0, 0, 0), (32, 32, 4, 3, 2, 0, 0, 0), (128, 64, 8, 2, 1, 1, 0, 1)),
            ("ampere",): ((16, 32, 4, 3, 2, 0, 0, 0), (32, 32, 4, 3, 2, 0, 0, 0), (64, 32, 8, 3, 1, 1, 0, 1)),
            SMALL: ((16, 32, 4, 2, 2, 0, 0, 0), (32, 32, 4, 2, 2, 0, 0, 0), (64, 32, 8, 2, 1, 1, 0, 1)),
        },
    ),
    "128 in float8": (
        AttentionGeometry(32, 8, 128),
        *(BF16, FLOAT8),
        {
            (*LARGE, "ampere"): ((16, 64, 4, 3, 2, 0, 0, 0), (64, 32, 4, 3, 2, 0, 0, 0), (128, 64, 8, 3, 1, 1, 0, 1)),
            SMALL: ((16, 64, 4, 2, 2, 0, 0, 0), (64, 32, 4, 2, 2, 0, 0, 0), (128, 64, 8, 2, 1, 1, 0, 1)),
        },
    ),
    "256 in float8": (
        AttentionGeometry(8, 4, 256),
        *(BF16, FLOAT8),
        {
            (*LARGE, "ampere"): ((16, 32, 4, 3, 2, 0, 0, 0), (32, 32, 4, 3, 2, 0, 0, 0), (64, 32, 8, 3, 1, 1, 0, 1)),
            SMALL: ((16, 32, 4, 2, 2, 0, 0, 0), (32, 32, 4, 2, 2, 0, 0, 0), (64, 32, 8, 2, 1, 1, 0, 1)),
        },
    ),
    "128 in float32": (
        AttentionGeometry(32, 8, 128),
        *(FP32, FP32),
        {
            (*LARGE, "ampere"): ((16, 32, 8, 3, 2, 0, 0, 0), (32, 16, 8, 3, 2, 0, 0, 0), (64, 32, 8, 3, 1, 1, 0, 1)),
            SMALL: ((16, 32, 8, 2, 2, 0, 0, 0), (32, 16, 8, 2, 2, 0, 0, 0), (64, 32, 8, 2, 1, 1, 0, 1)),
        },
    ),
    "64, 71 heads of a group": (
        AttentionGeometry(71, 1, 64),
        *(BF16, BF16),
        {
            (*LARGE, "ampere"): ((128, 128, 8, 3, 2, 0, 0, 0),) * 2 + ((128, 64, 4, 3, 2, 1, 0, 1),),
            SMALL: ((128, 128, 8, 2, 2, 0, 0, 0),) * 2 + ((128, 64, 4, 2, 2, 1, 0, 1),),
        },
    ),
    "128, 128 heads of a group": (
        AttentionGeometry(128, 1, 128),
        *(BF16, BF16),
        {
            (*LARGE, "ampere"): ((128, 64, 8, 3, 2, 0, 0, 0),) * 2 + ((128, 64, 8, 3, 1, 1, 0, 1),),
            SMALL: ((128, 64, 8, 2, 2, 0, 0, 0),) * 2 + ((128, 64, 8, 2, 1, 1, 0, 1),),
        },
    ),
    "512": (
        AttentionGeometry(16, 2, 512),
        *(BF16, BF16),
        {NAMES: ((16, 16, 4, 2, 1, 0, 0, 0), (32, 16, 8, 2, 1, 0, 0, 1), (64, 16, 8, 2, 1, 1, 0, 1))},
    ),
    "512 in float32": (
        AttentionGeometry(16, 2, 512),
        *(FP32, FP32),
        {NAMES: ((16, 16, 8, 2, 1, 0, 0, 0), (16, 16, 8, 2, 1, 0, 0, 1), (16, 16, 8, 2, 1, 0, 0, 1))},
    ),
    "latents, 20 heads": (
        AttentionGeometry(20, 1, 576, latent=True),
        *(BF16, BF16),
        {NAMES: ((32, 32, 8, 2, 1, 0, 0, 0), (32, 32, 8, 2, 1, 0, 0, 1), (32, 32, 8, 2, 1, 0, 0, 1))},
    ),
}


def numbers(tile: Tile) -> Numbers:
    return (
        *(tile.vectors, tile.keys, tile.warps, tile.stages, tile.resident),
        *(int(tile.two_loops), tile.registers or 0, int(tile.apart)),
    )


@pytest.mark.parametrize("case", TILES)
def test_attention_has_the_tiles_of_each_class(case: str) -> None:
    geometry, dtype, kv_dtype, by_class = TILES[case]
    expected = {name: tiles for names, tiles in by_class.items() for name in names}
    found = {name: tiles_for(geometry, dtype, kv_dtype, tuning=read_tuning(name)) for name in NAMES}
    assert {name: tuple(map(numbers, (one.few, one.some, one.many))) for name, one in found.items()} == expected


def test_all_classes_have_one_number_for_all_but_attention() -> None:
    """They were measured on an H100, and hold for others until a sweep on one says otherwise."""
    found = {kernel: asdict(getattr(read_tuning(), kernel)) for kernel in ("linear_row", "linear_rows", "norm", "rope")}
    assert found == {
        "linear_row": {"outputs": 4, "warps": 4},
        "linear_rows": {
            "outputs": 64,
            "depth": 256,
            "warps": 4,
            "stages": 4,
            "most_rows": 32,
            "least_outputs": 2048,
        },
        "norm": {"elements": 512, "most_warps": 16},
        "rope": {"few_rows": 64, "heads_of_few": 2, "heads_of_many": 8, "pairs": 128, "most_warps": 4},
    }
    tuning = read_tuning()
    assert (tuning.moe_decode, tuning.moe_middle, tuning.moe_prefill) == (
        MoeTiles(16, 32, 128, 1, 4, 4),
        MoeTiles(64, 64, 64, 4, 4, 4),
        MoeTiles(128, 128, 64, 8, 8, 3),
    )
    assert (tuning.moe_codes_decode, tuning.moe_codes_middle, tuning.moe_codes_prefill) == (
        MoeTiles(16, 32, 128, 1, 4, 3),
        MoeTiles(64, 32, 128, 4, 4, 3),
        MoeTiles(128, 64, 64, 8, 8, 3),
    )
    for name in NAMES:
        own = rows_of(name) if name != DEFAULT else {}
        assert {kernel for kernel in own if not kernel.startswith("attention_")} == set(measured_of(name)), name


def test_every_class_has_a_file_and_the_default_has_every_row() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)
    assert list(rows_of(DEFAULT)) == [field.name for field in fields(Tuning)]
    assert class_of((9, 0)) == "hopper"
    assert class_of((12, 0)) == "geforce_blackwell"
    assert class_of((8, 7)) == "ampere"
    assert class_of((10, 0)) == class_of(None) == DEFAULT
    shipped = tomllib.loads((FOLDER.parents[3] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert shipped["umbel.srt.kernels.triton"] == ["tuned/*.json"]


def test_a_row_that_is_written_is_read_with_where_it_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(FOLDER, folder)
    before = (folder / "ada.json").read_text()
    write_row("ada", "linear_row", {"outputs": 8, "warps": 2}, {"card": "Toy 5000", "gain": 1.25}, folder)
    assert read_tuning("ada", folder).linear_row == RowTile(8, 2)
    assert measured_of("ada", folder)["linear_row"] == {"card": "Toy 5000", "gain": 1.25}
    assert read_tuning("hopper", folder) == read_tuning("hopper")
    assert read_tuning("ada", folder).attention_many == read_tuning("ada").attention_many
    lines = (folder / "ada.json").read_text().splitlines()
    assert set(before.splitlines()) - set(lines) <= {next(x for x in before.splitlines() if '"attention_many"' in x)}


def test_files_are_written_as_a_sweep_writes_them(tmp_path: Path) -> None:
    """So that what a sweep changes is all that a commit shows."""
    shutil.copytree(FOLDER, tmp_path / "tuned")
    for name in NAMES:
        rows, measured = rows_of(name), measured_of(name)
        if rows:
            kernel = next(iter(rows))
            write_row(name, kernel, rows[kernel], {"card": "Toy 5000"}, tmp_path / "tuned")
            written = json.loads((tmp_path / "tuned" / f"{name}.json").read_text())
            assert written == {"numbers": rows, "measured": {kernel: {"card": "Toy 5000"}, **measured}}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"speed": {}}, "has rows of no kernel: speed"),
        ({"linear_row": {"outputs": 4}}, "the row linear_row has other numbers than RowTile"),
    ],
)
def test_a_wrong_row_is_named(rows: dict[str, object], said: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "tuned")
    (tmp_path / "tuned" / "ada.json").write_text(json.dumps({"numbers": rows, "measured": {}}))
    with pytest.raises(ValueError, match=said):
        read_tuning("ada", tmp_path / "tuned")


def test_launches_read_the_table(device: torch.device) -> None:
    """With other numbers a product has the same result, and the table is as before afterwards."""
    x, weight = torch.ones(1, 32, device=device), torch.arange(7 * 32, device=device).view(7, 32).float()
    before = tuning_for(x.device)
    usual = linear(x, weight)
    with tuned(x.device, linear_row=RowTile(outputs=2, warps=1)) as tuning:
        assert tuning_for(x.device) is tuning
        assert torch.equal(linear(x, weight), usual)
    assert tuning_for(x.device) is before
