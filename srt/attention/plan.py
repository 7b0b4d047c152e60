"""Plans attention: cuts one step into a flat list of work items, the same for every backend.

A work item is (query rows) × (a run of KV slots with consecutive logical positions). Every mask is one interval of
positions per row, so causal, sliding window, chunked extend and decode differ only in how rows and runs are cut:

    positions   0         4         8        12
    row 0       [=========]                            row_lo=0  row_hi=5
    row 1       [===========]                          row_lo=0  row_hi=6
    row 2               [===========]                  row_lo=4  row_hi=10   (a window of 6)
                |       |           |
    items       |-- item 0 --|- item 1 -|              rows 0-2 × positions [0,7), rows 2 × positions [7,10)

A picture [a, b) whose rows see each other widens their intervals to [min(lo, a), max(pos + 1, b)). pos lies in both, so
the union of the causal or windowed interval and the picture is one interval too. Along a sequence neither end
decreases: hi is at most a before the picture, b in it and more after it; lo in it is the smaller of two numbers that do
not decrease, at least that of the previous row, which is below a, and at most that of the next row. So the first row of
a tile has the lowest lo and the last row the highest hi, with pictures and without.

In a text that is seen both ways (`BothWays`) a row sees [pos − size + 1, pos + size). Neither end decreases.

A row in two items has two partial results, merged by log-sum-exp; a row with one part is written directly. Rows of an
item may belong to several sequences that share its keys (`find_sharing`), so tree attention is only a way of cutting.
The arrays are numpy on the host. A backend copies them to its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from ..core.batch import Batch

Int32 = NDArray[np.int32]
Step = tuple[int, int, int]  # of a path: node id, first position, length

# Merging a further part of one row costs as much as reading this many keys. Measured on Zen 3 in float32, where a
# shared prefix is in the L3 cache and sharing saves little: with a lower value sharing costs 5 to 15 percent.
MERGE_KEYS = 64
ITEMS_PER_WORKER = 4  # enough that the last ones end at about the same time
SHORTEST_RUN = 128  # keys; shorter ones are not cut further to keep workers busy
SINGLE_RUN = 256  # keys of a row that is alone: its cut does not depend on the rest of the step
LOAD_COST = 4  # rows: on the CPU reading a key costs as much as computing it for this many rows


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention within chunks: a row sees the positions of its own chunk, which begins at a multiple of `size`."""

    size: int


@dataclass(frozen=True, slots=True)
class BothWays:
    """Attention within a text that one step computes whole: a row sees those before it and those after it.

    `size`: so many positions on either side, its own included; None: all.
    """

    size: int | None = None


# A row sees this many positions, its own included, or those of its chunk; None: all before it.
Window = int | Chunk | BothWays | None


@dataclass(frozen=True, slots=True)
class Cut:
    """Parameters for cutting a step.

    block_rows: most rows of an item.
    split: most keys of an item; None: no limit.
    tree: keys that several sequences share are read once for all of them, where it pays.
    workers: long runs are cut so that this many workers are busy; 1 cuts none.
    merge_keys: cost of merging a further part of one row, in keys that are read.
    load_cost: reading a key costs as much as computing it for this many rows.
    shortest_run: keys; shorter runs are not cut further to keep workers busy.
    run_per_row: the same, in keys for each row of a tile, where parts cost much to write and to merge.
    single_run: most keys of a row that is alone in its item; None: cut like items of several rows.
    queues: steps that share keys are cut for this many queues of equal cost (`_balanced`), in place of workers; 0: they
        are cut like others.
    start_keys: in queues, starting an item costs as much as reading this many keys.
    part_keys: in queues, writing a row's part costs as much as reading this many keys.
    """

    block_rows: int
    split: int | None = None
    tree: bool = True
    workers: int = 1
    merge_keys: int = MERGE_KEYS
    load_cost: int = LOAD_COST
    shortest_run: int = SHORTEST_RUN
    run_per_row: int = 0
    single_run: int | None = SINGLE_RUN
    queues: int = 0
    start_keys: int = 0
    part_keys: int = 0

    def __post_init__(self) -> None:
        assert self.block_rows >= 1, "a tile holds at least one row"
        assert self.split is None or self.split >= 1, "a run holds at least one key"
        assert self.workers >= 1, "a plan has workers"
        assert not (self.queues and self.split), "queues are cut where they end"


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step and one window class. R rows, I items, S partial slots (S >= R), T keys.

    Items come in ascending cost, for workers that take them from the end; with queues, those of the first queue last.

    item_q   0        3     5          item i owns partial slots [item_q[i], item_q[i+1])
    q_rows   0  1  2  2  3             the row that each partial slot belongs to
    item_kv  [0,7)    [7,10)           item i reads kv_idx[item_kv[i,0] : item_kv[i,1]]
    item_pos 0        7                logical position of the first key of that run
    """

    row_lo: Int32  # [R] first visible position
    row_hi: Int32  # [R] one past the last visible position
    item_q: Int32  # [I+1] ranges in q_rows
    q_rows: Int32  # [S] row of each partial slot
    item_kv: Int32  # [I, 2] ranges in kv_idx
    item_pos: Int32  # [I] logical position of the first key of the range
    item_full: NDArray[np.uint8]  # [I] 1: each of its rows sees the whole range, no mask is needed
    kv_idx: Int32  # [T] physical slots; items may share a range. Empty: ranges are of a table (`Batch.places`)
    merge_ptr: Int32  # [R+1] ranges in merge_slot
    merge_slot: Int32  # [S] partial slots grouped by row
    item_queue: Int32  # [I] the queue of each item, descending. Empty: there are no queues
    keys_saved: int = 0  # reads of a key that sharing saved

    @property
    def keys_read(self) -> int:
        """Keys read by all items: a key that two items read counts twice."""
        return int((self.item_kv[:, 1] - self.item_kv[:, 0]).sum())

    @property
    def items(self) -> int:
        return len(self.item_pos)


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A run of positions [first, end) whose keys all of `sequences` have in the same slots."""

    first: int
    end: int
    sequences: tuple[int, ...]  # ascending
    saved: int  # key reads that are saved


@dataclass(frozen=True, slots=True)
class Sharing:
    """The shared runs of a step, and the position from which each sequence is alone."""

    runs: tuple[SharedRun, ...]
    alone_from: Int32  # [B]


@dataclass(frozen=True, slots=True)
class _RowTiles:
    """N tiles: rows [first, first + rows) of a list × positions [lo, hi), which are in kv_idx at position + offset."""

    first: Int32
    rows: Int32
    lo: Int32
    hi: Int32
    offset: Int32

    def where(self, chosen: NDArray[np.bool_]) -> "_RowTiles":
        return _RowTiles(self.first[chosen], self.rows[chosen], self.lo[chosen], self.hi[chosen], self.offset[chosen])

    def and_more(self, other: "_RowTiles") -> "_RowTiles":
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return _RowTiles(*map(np.concatenate, pairs))


def make_plan(batch: Batch, window: Window, cut: Cut) -> AttentionPlan:
    """Cuts a batch into items. Keys that no row of a tile sees are left out, and rows that see nothing of a run."""
    batch = generated_apart(batch)
    row_lo, row_hi, first_row = visible_intervals(batch, window)
    kv_start, kv_idx = _where_slots_lie(batch, window)

    sharing = no_sharing(batch)
    if cut.tree:
        visible = row_lo[first_row]
        sharing = find_sharing(batch, visible, block_rows=cut.block_rows, merge_keys=cut.merge_keys)
    sharers = [
        np.concatenate([np.arange(first_row[i], first_row[i] + batch.query_lengths[i]) for i in run.sequences])
        for run in sharing.runs
    ]
    rows = np.concatenate([np.arange(batch.rows), *sharers]).astype(np.int32)
    tiles = _own_tiles(batch, row_lo, row_hi, first_row, kv_start, sharing.alone_from, cut.block_rows)
    if sharing.runs:
        counts = [len(of_run) for of_run in sharers]
        tiles = tiles.and_more(_shared_tiles(sharing.runs, counts, rows, row_lo, row_hi, kv_start, cut.block_rows))
    item_queue = np.zeros(0, dtype=np.int32)
    if sharing.runs and cut.queues:
        item_tile, item_pos, item_end, item_queue = _balanced(tiles, int((tiles.first < batch.rows).sum()), cut)
    else:
        item_tile, item_pos, item_end = _alike(tiles, cut)
    slot_item, row_in_tile = _cut(tiles.rows[item_tile], 1)
    return _assemble(
        row_lo,
        row_hi,
        kv_idx=kv_idx,
        item_pos=item_pos,
        item_kv=np.stack([item_pos, item_end], axis=1) + tiles.offset[item_tile][:, None],
        slot_item=slot_item,
        q_rows=rows[tiles.first[item_tile][slot_item] + row_in_tile],
        item_queue=item_queue,
        keys_saved=sum(run.saved for run in sharing.runs),
    )


def _where_slots_lie(batch: Batch, window: Window) -> tuple[Int32, Int32]:
    """Returns where the slots of each sequence begin, [B], and what they lie in: kv_idx, or a table (empty here)."""
    if batch.places is not None:
        return batch.places, np.zeros(0, dtype=np.int32)
    lengths = batch.prefix_lengths + batch.query_lengths
    kv_idx = np.concatenate(batch.slots_of(windowed=window is not None))
    return (np.cumsum(lengths) - lengths).astype(np.int32), kv_idx


def _own_tiles(
    batch: Batch, row_lo: Int32, row_hi: Int32, first_row: Int32, kv_start: Int32, alone_from: Int32, block_rows: int
) -> _RowTiles:
    """Makes tiles of consecutive rows of one sequence × its unshared keys, from the first that its first row sees."""
    sequence, number = _cut(batch.query_lengths, block_rows)
    first = first_row[sequence] + number * block_rows
    rows = np.minimum(block_rows, batch.query_lengths[sequence] - number * block_rows)
    lo = np.maximum(row_lo[first], alone_from[sequence])
    hi = row_hi[first + rows - 1]
    return _RowTiles(first, rows, lo, hi, kv_start[sequence]).where(lo < hi)


def _shared_tiles(
    runs: tuple[SharedRun, ...],
    counts: list[int],
    rows: Int32,
    row_lo: Int32,
    row_hi: Int32,
    kv_start: Int32,
    block_rows: int,
) -> _RowTiles:
    """Makes tiles of shared runs: the rows of all sharers × the run's keys, at the first sharer's slots.

    counts: rows of each run; they lie at the end of `rows`.
    """
    tiles: list[tuple[int, int, int, int, int]] = []
    end = len(rows) - sum(counts)
    for run, count in zip(runs, counts, strict=True):
        start, end = end, end + count
        for first in range(start, end, block_rows):
            here = rows[first : min(first + block_rows, end)]
            lo = max(run.first, int(row_lo[here].min()))
            hi = min(run.end, int(row_hi[here].max()))
            if lo < hi:
                tiles.append((first, len(here), lo, hi, int(kv_start[run.sequences[0]])))
    return _RowTiles(*np.array(tiles, dtype=np.int32).T)


def _alike(tiles: _RowTiles, cut: Cut) -> tuple[Int32, Int32, Int32]:
    """Cuts each tile into equal runs; returns the tile, the first position and the end of each, in ascending cost."""
    runs = _run_lengths(tiles, cut)
    item_tile, part = _cut(tiles.hi - tiles.lo, runs)
    item_pos = tiles.lo[item_tile] + part * runs[item_tile]
    item_end = np.minimum(item_pos + runs[item_tile], tiles.hi[item_tile])
    order = np.argsort((item_end - item_pos) * (cut.load_cost + tiles.rows[item_tile]), kind="stable")
    return item_tile[order], item_pos[order], item_end[order]


GRAIN = 32  # keys: where a queue ends, a tile is cut at a multiple of it
TOLERANCE = 16  # a queue may cost this part more than its share, if it ends with a tile
RUN_OF_PART = 2  # the keys of an item cost at least as much as this many times the parts of its rows


def _balanced(tiles: _RowTiles, own: int, cut: Cut) -> tuple[Int32, Int32, Int32, Int32]:
    """Cuts tiles for queues of equal cost; returns as `_alike` does, and the queue of each item, descending.

    Tiles lie end to end, those of shared runs first. A queue takes its share of what is left, so a tile is cut where a
    queue ends and nowhere else: it has as few parts as balance allows.

        tiles    |        shared run        | shared | own 0 | own 1 | own 2 | …
        queues   |    0    |    1    |    2    |    3    |    4    |    5    …

    An item costs its keys, its start, and the parts of its rows. Shares are at least a run of `shortest_run` keys, so
    that a small step leaves queues empty rather than being cut into pieces that cost more than their keys.

    Args:
        own: number of tiles of rows that are alone, which are the first.
    """
    per_keys = (cut.load_cost + tiles.rows).tolist()
    onces = (cut.load_cost * (cut.start_keys + tiles.rows * cut.part_keys)).tolist()
    leasts = np.maximum(GRAIN, tiles.rows * (cut.part_keys * RUN_OF_PART)).tolist()
    spans = (tiles.hi - tiles.lo).tolist()
    left = sum(once + span * per_key for once, span, per_key in zip(onces, spans, per_keys, strict=True))
    items: list[tuple[int, int, int, int]] = []
    queue = used = share = 0
    for tile in [*range(own, len(spans)), *range(own)]:
        once, per_key, position, end = onces[tile], per_keys[tile], int(tiles.lo[tile]), int(tiles.hi[tile])
        while position < end:
            keys, queues = end - position, cut.queues - queue
            if not used:  # each end of a queue is about to start a further item
                even = -(-(left + (queues - 1) * cut.load_cost * cut.start_keys) // queues)
                share = max(even, once + cut.shortest_run * per_key)
            room = share - used
            if queues > 1 and once + keys * per_key > room + share // TOLERANCE:
                fit = (room - once + GRAIN * per_key // 2) // (GRAIN * per_key) * GRAIN
                if fit < leasts[tile] and used:
                    queue, used = queue + 1, 0
                    continue
                fit = max(fit, leasts[tile])
                if keys - fit >= GRAIN:
                    keys, left = fit, left + once
            cost = once + keys * per_key
            items.append((tile, position, position + keys, queue))
            position, used, left = position + keys, used + cost, left - cost
            if used >= share and queues > 1:
                queue, used = queue + 1, 0
    item_tile, item_pos, item_end, item_queue = np.array(items[::-1], dtype=np.int32).T
    return item_tile, item_pos, item_end, item_queue


def _run_lengths(tiles: _RowTiles, cut: Cut) -> Int32:
    """Computes the keys of each run of a tile: equal parts (so the last is not tiny), as short as the cut requires."""
    span = tiles.hi - tiles.lo
    longest = span
    if cut.workers > 1:
        row_cost = cut.load_cost + tiles.rows
        alone = (tiles.rows == 1) & (cut.single_run is not None)
        work = int((span.astype(np.int64) * row_cost)[~alone].sum())
        share = work // (cut.workers * ITEMS_PER_WORKER)
        least = np.maximum(cut.shortest_run, cut.run_per_row * tiles.rows)
        longest = np.where(alone, cut.single_run or 0, np.maximum(share // row_cost, least))
    if cut.split is not None:
        longest = np.minimum(longest, cut.split)
    parts = -(-span // longest)
    return (-(-span // parts)).astype(np.int32)


def visible_intervals(batch: Batch, window: Window) -> tuple[Int32, Int32, Int32]:
    """Computes the visible interval [lo, hi) of each row, and the first row of each sequence."""
    query = batch.query_lengths
    ends = np.cumsum(query, dtype=np.int32)
    first_row = ends - query
    position = np.arange(batch.rows, dtype=np.int32) + np.repeat(batch.prefix_lengths - first_row, query)
    row_lo = _first_visible(position, window)
    if isinstance(window, BothWays):
        assert not batch.prefix_lengths.any(), "a text that is seen both ways runs whole"
        lengths = np.repeat(query, query)
        row_hi = lengths if window.size is None else np.minimum(position + window.size, lengths)
        return row_lo, row_hi, first_row
    row_hi = position + 1
    for index, spans in enumerate(batch.spans):
        before, count = int(batch.prefix_lengths[index]), int(query[index])
        for start, end in spans:
            assert end <= before + count, "rows that see each other run in one step"
            rows = slice(int(first_row[index]) + max(start - before, 0), int(first_row[index]) + max(end - before, 0))
            row_lo[rows] = np.minimum(row_lo[rows], start)
            row_hi[rows] = end
    return row_lo, row_hi, first_row


def _first_visible(position: Int32, window: Window) -> Int32:
    if isinstance(window, Chunk):
        assert window.size >= 1, "a row sees at least its own key"
        return position // window.size * window.size
    size = window.size if isinstance(window, BothWays) else window
    if size is None:
        return np.zeros_like(position)
    assert size >= 1, "a row sees at least its own key"
    return np.maximum(position - (size - 1), 0)


def _cut(lengths: Int32, size: Int32 | int) -> tuple[Int32, Int32]:
    """Cuts each length into pieces of `size`; returns for each piece the index of its length, and its number there."""
    counts = -(-lengths // size)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    number = np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    return owner, number.astype(np.int32)


def _assemble(
    row_lo: Int32,
    row_hi: Int32,
    *,
    kv_idx: Int32,
    item_pos: Int32,
    item_kv: Int32,  # [I, 2]
    slot_item: Int32,  # [S] ascending
    q_rows: Int32,  # [S]
    item_queue: Int32,  # [I] or [0]
    keys_saved: int,
) -> AttentionPlan:
    """Drops rows that see nothing of their item, marks items that need no mask, and lists the parts of each row."""
    item_end = item_pos + (item_kv[:, 1] - item_kv[:, 0])
    sees = (row_lo[q_rows] < item_end[slot_item]) & (row_hi[q_rows] > item_pos[slot_item])
    slot_item, q_rows = slot_item[sees], q_rows[sees]
    counts = np.bincount(slot_item, minlength=len(item_pos))
    if not counts.all():  # rows of several sequences may leave a gap between their windows
        seen = counts > 0
        slot_item = (np.cumsum(seen) - 1)[slot_item]
        item_pos, item_end, item_kv, counts = item_pos[seen], item_end[seen], item_kv[seen], counts[seen]
        item_queue = item_queue[seen] if len(item_queue) else item_queue
    item_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    whole = (row_lo[q_rows] <= item_pos[slot_item]) & (row_hi[q_rows] >= item_end[slot_item])
    parts = np.bincount(q_rows, minlength=len(row_lo))
    return AttentionPlan(
        row_lo=row_lo,
        row_hi=row_hi,
        item_q=item_q,
        q_rows=q_rows.astype(np.int32),
        item_kv=item_kv.astype(np.int32),
        item_pos=item_pos.astype(np.int32),
        item_full=np.logical_and.reduceat(whole, item_q[:-1]).astype(np.uint8),
        kv_idx=kv_idx.astype(np.int32, copy=False),
        merge_ptr=np.concatenate([[0], np.cumsum(parts)]).astype(np.int32),
        merge_slot=np.argsort(q_rows, kind="stable").astype(np.int32),
        item_queue=item_queue,
        keys_saved=keys_saved,
    )


def no_sharing(batch: Batch) -> Sharing:
    return Sharing((), np.zeros(len(batch.query_lengths), dtype=np.int32))


def find_sharing(batch: Batch, first_visible: Int32, *, block_rows: int, merge_keys: int = MERGE_KEYS) -> Sharing:
    """Finds the runs of keys that tree attention reads once for several sequences of a step.

    Sequences whose paths contain the same radix nodes read the same keys. Their paths diverge, so the sharers of a run
    are a subset of those of the previous run. They are found by walking the paths from the root down:

        node       1 (40 tokens)      2 (900)            4 (3)   own
        seq 0   [= 0 1 2 3 ===|===== 0 1 2 =======|== 0 1 ==|------]
        seq 1   [             |                   |         |---]
        seq 2   [             |                   |---------]
        seq 3   [             |-------]

    A run gets an item of its own when the saved reads pay for merging one more partial result per row. A run that does
    not pay (node 1 here, for all four) is added to the runs below it: the run of 0, 1, 2 starts at position 0, and the
    rest of each sequence is always one run to its end. So nested nodes give nested items, and short nodes cost nothing.

    Args:
        first_visible: [B] lowest position that any row of the sequence sees: what its first row sees.
        block_rows: rows that read a run of keys together when it is not shared.
        merge_keys: cost of merging a further part of one row, in keys that are read.
    """
    paths, queries, visible = batch.paths, batch.query_lengths.tolist(), first_visible.tolist()
    alone_from = [0] * len(queries)
    runs: list[SharedRun] = []
    todo = [(list(range(len(paths))), 0, 0)] if paths else []  # sequences, depth, positions that are covered
    while todo:
        group, depth, covered = todo.pop()
        for sequences in _by_step(paths, group, depth):
            end, below = _common_end(paths, sequences, depth)
            saved = _saved(sequences, covered, end, queries, visible, block_rows, merge_keys)
            start = covered
            if saved is not None:
                first = max(covered, min(visible[i] for i in sequences))
                sharers = tuple(i for i in sequences if visible[i] < end)
                runs.append(SharedRun(first, end, sharers, saved))
                start = end
                for i in sequences:
                    alone_from[i] = end
            todo.append((sequences, below, start))
    return Sharing(tuple(runs), np.array(alone_from, dtype=np.int32))


def _by_step(paths: Sequence[Sequence[Step]], group: list[int], depth: int) -> list[list[int]]:
    """Groups sequences that take the same next step, two or more each, in the order of their first sequence."""
    takers: dict[Step, list[int]] = {}
    for i in group:
        if depth < len(paths[i]):
            takers.setdefault(paths[i][depth], []).append(i)
    return [sequences for sequences in takers.values() if len(sequences) > 1]


def _common_end(paths: Sequence[Sequence[Step]], sequences: list[int], depth: int) -> tuple[int, int]:
    """Returns the end of the steps that all of them take from `depth` on, and the depth of the first they do not."""
    leader = paths[sequences[0]]
    below = depth + 1
    while below < len(leader) and all(
        below < len(paths[i]) and paths[i][below] == leader[below] for i in sequences[1:]
    ):
        below += 1
    _, first, length = leader[below - 1]
    return first + length, below


def _saved(
    sequences: list[int],
    covered: int,
    end: int,
    queries: list[int],
    visible: list[int],
    block_rows: int,
    merge_keys: int,
) -> int | None:
    """Returns the key reads saved by one run [covered, end) for all of them; None when it does not pay."""
    rows = apart = 0
    lowest = end
    for i in sequences:
        if visible[i] < end:
            rows += queries[i]
            apart += -(-queries[i] // block_rows) * (end - max(covered, visible[i]))
            lowest = min(lowest, max(covered, visible[i]))
    saved = apart - -(-rows // block_rows) * (end - lowest)
    return saved if saved > 0 and saved >= merge_keys * rows else None


# More rows are a text that is recomputed (after a retraction), or a long forced text: they are computed like prompts.
MOST_ROWS = 64


def generated_apart(batch: Batch) -> Batch:
    """Returns the same rows, with generated rows of a sequence as separate sequences if there are several.

    Tokens that jump-forward appends are computed together in one step. Attention of many rows rounds differently from
    that of one row, and a text must not depend on jumps. So attention of each of these rows is computed as in a step of
    its own:

        prompt and generated rows of one step:      | p p p p | g | g | g |
        planned as                                  [--- 4 ---]
                                                             [1]   and all keys before it
                                                                 [1]
                                                                     [1]

    Only the last row keeps the radix path: rows of one request do not share keys by tree attention, and would not in
    steps of their own. Pictures are in prompts, so rows that see them whole are among the first rows.
    """
    if batch.generated is None:
        return batch
    apart = (batch.generated > 0) & (batch.query_lengths > 1) & (batch.generated <= MOST_ROWS)
    if not apart.any():
        return batch
    query: list[int] = []
    prefix: list[int] = []
    slots: list[Int32] = []
    window_slots: list[Int32] = []
    paths = []
    spans: list[tuple[tuple[int, int], ...]] = []
    owners: list[int] = []
    for index, split in enumerate(apart.tolist()):
        rows, before = int(batch.query_lengths[index]), int(batch.prefix_lengths[index])
        path = batch.paths[index] if batch.paths else ()
        first = rows - int(batch.generated[index]) if split else rows
        for start, count in [(0, first)] * (first > 0) + [(row, 1) for row in range(first, rows)]:
            end = start + count
            owners.append(index)
            query.append(count)
            prefix.append(before + start)
            slots.append(batch.slots[index][: before + end])
            if batch.window_slots is not None:
                window_slots.append(batch.window_slots[index][: before + end])
            paths.append(path if end == rows else ())
            spans.append(batch.spans[index] if batch.spans and start < first else ())
    return replace(
        batch,
        query_lengths=np.array(query, dtype=np.int32),
        prefix_lengths=np.array(prefix, dtype=np.int32),
        slots=tuple(slots),
        window_slots=None if batch.window_slots is None else tuple(window_slots),
        paths=tuple(paths) if batch.paths else (),
        spans=tuple(spans) if batch.spans else (),
        generated=None,
        places=None if batch.places is None else batch.places[owners],
    )
