"""Reads the numbers that make kernels fast: one table for each class of devices, in `tuned/`.

    tuned/default.json    a row for each kernel: devices that no class names, and Triton's interpreter
    tuned/CLASS.json      the rows in which a class of devices differs, and where each was measured

`python -m benchmarks.gpu --sweep` times other numbers on a card and writes those that are faster into the file of its
class. The rows say what to launch a kernel with; what a kernel can do at all (least sizes of products on tensor cores,
most shared memory, registers) is no matter of speed, and stands with the kernel.

A row is one of the classes below; their fields are the numbers. Sizes that are blocks of a kernel are powers of two.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "tuned"
DEFAULT = "default"
# Compute capability → class.
CLASSES = {
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "geforce_ampere",
    (8, 7): "ampere",  # Orin
    (8, 9): "ada",
    (9, 0): "hopper",
    (12, 0): "geforce_blackwell",
    (12, 1): "geforce_blackwell",  # GB10
}


@dataclass(frozen=True, slots=True)
class VectorTile:
    """Sizes of a program of attention, for items of one kind and vectors of one size.

    Attributes:
        vectors: query vectors, more where a row has more heads.
        keys: at most.
        tile_bytes: of a tile of keys, at most.
        stages: tiles of keys that are under way at once, the one that is computed included.
        resident: programs on a multiprocessor.
        registers: of a thread, at most; None: as the compiler likes.
    """

    vectors: int
    keys: int
    tile_bytes: int
    warps: int
    stages: int
    resident: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class HugeTile:
    """Sizes for heads whose results fill the registers. latent_keys: of keys that hold their values."""

    keys: int
    latent_keys: int
    few_warps: int
    warps: int
    stages: int
    resident: int
    some_vectors: int
    many_vectors: int


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Says how a step is cut into items.

    Attributes:
        some_vectors: query vectors of the larger items of a captured step that decodes.
        wide_vectors: the same, where keys are streamed.
        shortest_run: keys. Of shorter runs, starting and merging costs more than it saves.
        run_per_vector: keys for each query vector of an item: a part of one is written and read in float32.
        load_vectors: query vectors whose products take as long as loading one key.
        merge_keys: keys; with two rows a shared run pays from twice as many on, with many from so many.
        start_keys: keys that a program would have read while it starts an item: it waits for the item, its slots and a
            first tile.
    """

    some_vectors: int
    wide_vectors: int
    shortest_run: int
    run_per_vector: int
    load_vectors: int
    merge_keys: int
    start_keys: int


@dataclass(frozen=True, slots=True)
class MergeTile:
    parts: int  # that are read at once
    resident: int  # programs on a multiprocessor
    warps: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Sizes of a program that has some columns of a row."""

    columns: int
    warps: int


@dataclass(frozen=True, slots=True)
class RowTile:
    """Sizes of a program that multiplies one row. outputs: rows of the matrix, or gates and as many ups."""

    outputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class RowsTile:
    """Sizes of a program that multiplies a few rows on tensor cores.

    Attributes:
        most_rows: of x; of more, every program would read more of x than of the matrix.
        least_outputs: of the matrix. torch splits the sums of smaller ones, so that more programs read it.
    """

    outputs: int
    depth: int
    warps: int
    stages: int
    most_rows: int
    least_outputs: int = 0


@dataclass(frozen=True, slots=True)
class CodesRowTile:
    """Sizes of a program that multiplies one row with codes. code_bytes: of each output, that are read at once."""

    outputs: int
    code_bytes: int
    warps: int


@dataclass(frozen=True, slots=True)
class WidenTile:
    """Sizes of a program that widens codes. most: weights that are widened at a time."""

    outputs: int
    depth: int
    warps: int
    most: int


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Sizes of the products of adapters."""

    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class WholeRow:
    """Says how many warps share a row."""

    elements: int  # of a warp
    most_warps: int


@dataclass(frozen=True, slots=True)
class HeadsTile:
    """Sizes of a program that turns and stores heads.

    Attributes:
        few_rows: up to so many, programs take few heads each, so that there are enough of them.
        pairs: of numbers, of a warp.
    """

    few_rows: int
    heads_of_few: int
    heads_of_many: int
    pairs: int
    most_warps: int


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """Sizes of the products of a program: `rows` × `columns` of gates, as many of ups, and 2 · columns of down.

    Accumulators are rows · 2 · columns floats.
    """

    rows: int
    columns: int
    depth: int  # in numbers of two bytes; of four, half as many are in the same shared memory
    group: int  # blocks whose programs lie side by side, so that they find each other's weights in the cache
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class MoeChoice:
    """Says which way pairs of token and expert go.

    Attributes:
        decode_pairs, middle_pairs: of an expert on average, up to which these tiles are used.
        share: pairs are few up to an expert in so many: of a fourth as many, one of eight repeats an expert.
    """

    decode_pairs: int
    middle_pairs: int
    share: int


@dataclass(frozen=True, slots=True)
class ArrangeTile:
    pairs: int  # that are read at once
    warps: int


@dataclass(frozen=True, slots=True)
class CodesPairTile:
    """Sizes of a program that multiplies pairs with codes. most_depth, least_depth: inputs at once."""

    columns: int
    numbers: int
    most_depth: int
    least_depth: int
    warps: int


@dataclass(frozen=True, slots=True)
class ScanTile:
    """Sizes of the first pass of sampling.

    Attributes:
        tiles: that a program reads at once.
        programs: of a scan, where there is so much: large devices hold them at once.
        most_reads: of a program.
    """

    tiles: int
    programs: int
    most_reads: int
    warps: int


@dataclass(frozen=True, slots=True)
class SelectTile:
    """Sizes of the second pass of sampling.

    Attributes:
        tiles: that are read again at once.
        part: tiles of a program; wide_part: where nuclei may be wide.
        candidates: tokens of a row that are copied at most, of 8 bytes each.
        read: tokens of a search that are read at once.
        some: tokens that are read once for all.
    """

    tiles: int
    part: int
    wide_part: int
    candidates: int
    read: int
    some: int
    warps: int


@dataclass(frozen=True, slots=True)
class SummaryTile:
    tiles: int
    read: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The numbers of one class of devices, a row for each kernel.

    Attributes:
        attention_stream: items of few rows, in the dtype of the queries, with vectors of 256 bytes at most: decode.
        attention_few, attention_few_wide: other items of few rows; with more than 64 heads of a group, or in float32.
        attention_many_small, _half, _large: prompts, with vectors of at most 128, 256 and 512 bytes.
        attention_many_widened: keys of another dtype, or in float32, with vectors of 512 bytes.
        attention_many: other prompts.
        moe_codes_decode and the like: experts of codes, which are widened in registers.
    """

    attention_stream: VectorTile
    attention_few: VectorTile
    attention_few_wide: VectorTile
    attention_many_small: VectorTile
    attention_many_half: VectorTile
    attention_many_large: VectorTile
    attention_many_widened: VectorTile
    attention_many: VectorTile
    attention_huge: HugeTile
    attention_plan: PlanSizes
    attention_merge: MergeTile
    attention_store: Columns
    linear_row: RowTile
    linear_gate: RowTile
    linear_rows: RowsTile
    linear_act: Columns
    quantized_row: CodesRowTile
    quantized_rows: RowsTile
    quantized_widen: WidenTile
    low_rank: GroupedTile
    norm: WholeRow
    rope: HeadsTile
    moe_choice: MoeChoice
    moe_decode: MoeTiles
    moe_middle: MoeTiles
    moe_prefill: MoeTiles
    moe_codes_decode: MoeTiles
    moe_codes_middle: MoeTiles
    moe_codes_prefill: MoeTiles
    moe_arrange: ArrangeTile
    moe_combine: Columns
    moe_gate_pairs: RowTile
    moe_down_tokens: RowTile
    moe_codes_pairs: CodesPairTile
    sampling_scan: ScanTile
    sampling_select: SelectTile
    sampling_summary: SummaryTile


def class_of(capability: tuple[int, int] | None) -> str:
    """Returns the class of devices of a compute capability; None is Triton's interpreter."""
    return DEFAULT if capability is None else CLASSES.get(capability, DEFAULT)


def device_class(device: torch.device) -> str:
    return class_of(torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


@cache
def read_tuning(name: str = DEFAULT, folder: Path = FOLDER) -> Tuning:
    """Returns the numbers of a class of devices: its own rows, and those of the default for the others.

    Raises:
        ValueError: a row that no kernel has, or that lacks a number.
    """
    rows = rows_of(DEFAULT, folder) | (rows_of(name, folder) if name != DEFAULT else {})
    kinds = {field.name: field.type for field in fields(Tuning)}
    if unknown := rows.keys() - kinds.keys():
        raise ValueError(f"{folder / name}.json has rows of no kernel: {', '.join(sorted(unknown))}")
    return Tuning(**{kernel: _row(kinds[kernel], numbers, kernel) for kernel, numbers in rows.items()})


# Any, in both: a class of rows, and what json makes of one.
def _row(kind: Any, numbers: Mapping[str, Any], kernel: str) -> Any:
    try:
        return kind(**numbers)
    except TypeError as error:
        raise ValueError(f"the row {kernel} has other numbers than {kind.__name__}: {error}") from None


def rows_of(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Returns the rows of one file: kernel → its numbers by name."""
    rows: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["numbers"]
    return rows


def measured_of(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Returns where the rows of one file were measured: kernel → card, versions, date, time and gain."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["measured"]
    return found


def write_row(name: str, kernel: str, numbers: Mapping[str, Any], measured: Mapping[str, Any], folder: Path) -> None:
    """Writes one row into the file of a class, and where it was measured. The file is replaced whole."""
    rows, places = rows_of(name, folder), measured_of(name, folder)
    rows[kernel], places[kernel] = dict(numbers), dict(measured)
    order = [field.name for field in fields(Tuning) if field.name in rows]
    parts = [
        f'  "{title}": {{' + ",".join(f"\n    {json.dumps(one)}: {json.dumps(table[one])}" for one in kernels) + "\n  }"
        for title, table, kernels in (("numbers", rows, order), ("measured", places, [k for k in order if k in places]))
    ]
    path = folder / f"{name}.json"
    fresh = path.with_suffix(".new")
    fresh.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    fresh.replace(path)


_IN_USE: dict[torch.device, Tuning] = {}  # those that launches read, by device


def tuning_for(device: torch.device) -> Tuning:
    """Returns the numbers with which kernels are launched on a device."""
    found = _IN_USE.get(device)
    if found is None:
        found = _IN_USE[device] = read_tuning(device_class(device))
    return found


@contextmanager
def tuned(device: torch.device, **rows: Any) -> Iterator[Tuning]:
    """Launches with other rows within the block: a sweep's candidates, and tests. rows: as fields of `Tuning`."""
    before = tuning_for(device)
    _IN_USE[device] = replace(before, **rows)
    try:
        yield _IN_USE[device]
    finally:
        _IN_USE[device] = before
