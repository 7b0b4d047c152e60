"""Sampling as engines launch it: vocabularies of Llama 3 and Gemma 3."""

from umbel.srt.kernels.triton.fitting import Room
from umbel.srt.kernels.triton.jit import block_of
from umbel.srt.kernels.triton.sampling import TILE, scan, select, summarise_rows
from umbel.srt.kernels.triton.tuning import ScanTile, Tuning

from .variant import Variant

_LOGITS = {"stride": "i32", "vocab": "i32"}
_DRAWS = {
    **dict.fromkeys(("rows", "mask_rows", "keys", "top_k", "chosen"), "*i64"),
    **dict.fromkeys(("inverse_temperatures", "top_p", "log_min_p"), "*fp64"),
    **dict.fromkeys(("masks", "counters"), "*i32"),
    "words": "i32",
}
_TILES = dict.fromkeys(("maxima", "scores", "masses", "roots"), "*fp32")
_COPIES = {"packed": "*i64", "held": "*i32"}
_ALIGNED = frozenset({"stride", "vocab", "span", "part"})


def sampling_variants(tuning: Tuning, room: Room) -> list[Variant]:
    return [
        _scan(128_256, "fp32", tuning),
        _scan(262_144, "bf16", tuning),
        _select(128_256, tuning),
        _select(262_144, tuning),
        _summary(128_256, tuning),
    ]


def _tiles(vocab: int, scan: ScanTile) -> dict[str, object]:
    tiles = -(-vocab // (scan.tiles * TILE.value)) * scan.tiles
    return {"TILES": tiles, "TILE_BLOCK": block_of(tiles)}


def _scan(vocab: int, logits: str, tuning: Tuning) -> Variant:
    tile = tuning.sampling_scan
    return Variant(
        name=f"scan {vocab} {logits}",
        kernel=scan,
        arguments={"logits": f"*{logits}", **_LOGITS, **_DRAWS, **_TILES, "span": "i32"},
        constants={**_tiles(vocab, tile), "READ_TILES": tile.tiles, "PDL": True},
        warps=tile.warps,
        aligned=_ALIGNED,
        fused=False,
    )


def _select(vocab: int, tuning: Tuning) -> Variant:
    tile = tuning.sampling_select
    return Variant(
        name=f"select {vocab} fp32",
        kernel=select,
        arguments={"logits": "*fp32", **_LOGITS, **_DRAWS, **_TILES, **_COPIES, "part": "i32"},
        constants={
            **_tiles(vocab, tuning.sampling_scan),
            "READ_TILES": tile.tiles,
            "PART": tile.part,
            "ROOM": tile.candidates,
            "READ": tile.read,
            "SOME": tile.some,
            "PDL": True,
        },
        warps=tile.warps,
        aligned=_ALIGNED,
        fused=False,
    )


def _summary(vocab: int, tuning: Tuning) -> Variant:
    tile = tuning.sampling_summary
    return Variant(
        name=f"summarise {vocab} fp32",
        kernel=summarise_rows,
        arguments={
            **dict.fromkeys(("logits", "top_logits"), "*fp32"),
            **_LOGITS,
            **_TILES,
            **_COPIES,
            "rows": "*i64",
            "counters": "*i32",
            "normalisers": "*fp64",
            "top_tokens": "*i32",
            "top": "i32",
        },
        constants={
            **_tiles(vocab, tuning.sampling_scan),
            "READ_TILES": tile.tiles,
            "ROOM": tuning.sampling_select.candidates,
            "READ": tile.read,
        },
        warps=tile.warps,
        aligned=_ALIGNED,
        fused=False,
    )
