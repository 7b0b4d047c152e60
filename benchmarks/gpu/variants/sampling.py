"""Sampling as engines launch it: vocabularies of Llama 3 and Gemma 3."""

from umbel.srt.kernels.triton.jit import block_of
from umbel.srt.kernels.triton.sampling import TILE, scan, select, summarise_rows

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


def sampling_variants() -> list[Variant]:
    return [
        _scan(128_256, "fp32"),
        _scan(262_144, "bf16"),
        _select(128_256),
        _select(262_144),
        _summary(128_256),
    ]


def _tiles(vocab: int) -> dict[str, object]:
    tiles = -(-vocab // (16 * TILE.value)) * 16
    return {"TILES": tiles, "TILE_BLOCK": block_of(tiles), "READ_TILES": 16}


def _scan(vocab: int, logits: str) -> Variant:
    return Variant(
        name=f"scan {vocab} {logits}",
        kernel=scan,
        arguments={"logits": f"*{logits}", **_LOGITS, **_DRAWS, **_TILES, "span": "i32"},
        constants={**_tiles(vocab), "PDL": True},
        aligned=_ALIGNED,
        fused=False,
    )


def _select(vocab: int) -> Variant:
    return Variant(
        name=f"select {vocab} fp32",
        kernel=select,
        arguments={"logits": "*fp32", **_LOGITS, **_DRAWS, **_TILES, **_COPIES, "part": "i32"},
        constants={**_tiles(vocab), "PART": 256, "ROOM": 8192, "READ": 1024, "SOME": 4096, "PDL": True},
        warps=8,
        aligned=_ALIGNED,
        fused=False,
    )


def _summary(vocab: int) -> Variant:
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
        constants={**_tiles(vocab), "READ_TILES": 8, "ROOM": 8192, "READ": 1024},
        warps=8,
        aligned=_ALIGNED,
        fused=False,
    )
