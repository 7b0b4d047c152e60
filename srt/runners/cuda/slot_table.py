"""Keeps the slots of sequences on the device from step to step, so that a step sends those of its rows only.

    entry        0     1                                513
                 pad   | slots of A in logical order … | slots of B …  | free
                       '--- room of A, a quarter more than it had ---'

A step that decodes 256 texts of 4,096 keys reads a million slots. Of these 256 are new: the rows of the step write them
into the table, at (place of the sequence) + (position of the row), as their first work on the device. All else that a
step needs is sent first: the slots of a sequence that is not in the table, or has no room there, and those that changed
because the radix tree has them from another sequence.

Entry 0 is the slot of padding. Rooms are given one after the other and are not taken back. When the table is full it is
emptied, and the sequences of the step that comes are sent whole. Window layers with slots of their own have a table of
the same rooms.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.batch import DUMMY_SLOT, Batch
from .device import Accelerator

MOST_ENTRIES = 1 << 25  # 128 MiB
LEAST_GROWTH = 256  # entries that a room has at least for tokens to come; else a quarter of those it has
Int32 = NDArray[np.int32]


def table_bytes(sequences: int, context_length: int, *, windows: bool) -> int:
    """Returns the bytes of a SlotTable of `table_entries`."""
    return 4 * table_entries(sequences, context_length) * (2 if windows else 1)


def table_entries(sequences: int, context_length: int) -> int:
    """Returns the size of a table for steps of at most so many sequences: twice what they can take, within limits."""
    return min(2 * sequences * _room(context_length), MOST_ENTRIES)


def _room(length: int) -> int:
    return length + max(LEAST_GROWTH, length // 4)


@dataclass(frozen=True, slots=True, eq=False)
class RowEntries:
    """Says what the rows of a step write to the table."""

    entries: NDArray[np.int64]  # [R]; 0: padding
    slots: Int32  # [R]
    window_slots: Int32  # [R] in window layers; the same where they have no slots of their own


NO_ENTRIES = RowEntries(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))


class SlotTable:
    """The tables of a runner, on its device.

    Args:
        entries: size, at least 1.
        windows: window layers have slots of their own.
    """

    def __init__(self, accelerator: Accelerator, entries: int, *, windows: bool) -> None:
        assert entries >= 1, "padding has an entry"
        self.entries = entries
        self.sent = 0  # slots that were sent apart from those of rows
        self._accelerator = accelerator
        self._slots = torch.full((entries,), DUMMY_SLOT, dtype=torch.int32, device=accelerator.device)
        self._window_slots = self._slots.clone() if windows else None
        self._rooms: dict[int, tuple[int, int]] = {}  # number of a sequence → its place and the end of its room
        self._free = 1
        self._numbers: NDArray[np.int64] | None = None  # of the last step, its places and the ends of its rooms
        self._places = self._ends = np.zeros(0, dtype=np.int32)

    def slots_of(self, *, windowed: bool) -> torch.Tensor:
        """Returns the table of layers that are `windowed`, or of the others: int32 [entries]"""
        return self._window_slots if windowed and self._window_slots is not None else self._slots

    def clear(self) -> None:
        """Forgets all sequences."""
        self._rooms = {}
        self._free = 1
        self._numbers = None

    # ------------------------------------------------------------------------------------------ a step

    def place(self, batch: Batch) -> Int32 | None:
        """Sends what the rows of the step do not write themselves, and returns the place of each sequence.

        None: the sequences do not fit, all of them together. The table is empty then.
        """
        ends = batch.prefix_lengths + batch.query_lengths
        numbers, changed = batch.sequences, batch.changed
        if numbers is None or changed is None:
            return self._place_unknown(batch, ends)
        if self._numbers is None or not np.array_equal(numbers, self._numbers):
            rooms = [self._rooms.get(number, (0, 0)) for number in numbers.tolist()]
            self._numbers = numbers
            self._places, self._ends = np.array(rooms, dtype=np.int32).reshape(-1, 2).T
        lacking = self._places + ends > self._ends
        if lacking.any() and not self._make_rooms(numbers, ends, np.flatnonzero(lacking)):
            if not self._make_rooms(numbers, ends, np.arange(len(numbers)), empty=True):
                self.clear()
                return None
            lacking[:] = True
        places = self._places
        stale = lacking | (changed < batch.prefix_lengths)
        if stale.any():
            first = np.where(lacking, 0, changed)
            self._send(batch, places, first, ends, np.flatnonzero(stale))
        return places

    def _place_unknown(self, batch: Batch, ends: Int32) -> Int32 | None:
        """Places sequences of which nothing is known, and which nothing will be known of."""
        total = int(ends.sum())
        if self._free + total > self.entries:
            self.clear()
            if self._free + total > self.entries:
                return None
        places = (self._free + np.cumsum(ends) - ends).astype(np.int32)
        self._free += total
        self._send(batch, places, np.zeros_like(ends), ends, np.arange(len(ends)))
        return places

    def _make_rooms(
        self, numbers: NDArray[np.int64], ends: Int32, lacking: NDArray[np.int64], *, empty: bool = False
    ) -> bool:
        """Gives new rooms to some sequences of the step; False: there are not enough entries. empty: it begins anew."""
        rooms = [_room(end) for end in ends[lacking].tolist()]
        free = 1 if empty else self._free
        if free + sum(rooms) > self.entries:
            return False
        if empty:
            self.clear()
            self._numbers = numbers
        self._places, self._ends = self._places.copy(), self._ends.copy()
        for index, room in zip(lacking.tolist(), rooms, strict=True):
            self._rooms[int(numbers[index])] = free, free + room
            self._places[index], self._ends[index] = free, free + room
            free += room
        self._free = free
        return True

    def _send(self, batch: Batch, places: Int32, first: Int32, ends: Int32, which: NDArray[np.int64]) -> None:
        """Sends the slots [first, end) of some sequences."""
        tables = [(self._slots, batch.slots)]
        if self._window_slots is not None:
            tables.append((self._window_slots, batch.slots_of(windowed=True)))
        chosen = list(
            zip(which.tolist(), first[which].tolist(), ends[which].tolist(), places[which].tolist(), strict=True)
        )
        total = sum(end - begin for _, begin, end, _ in chosen)
        for table, slots in tables:
            host = self._accelerator.host_buffer(4 * total).view(torch.int32)
            numbers, done = host.numpy(), 0
            for index, begin, end, place in chosen:
                count = end - begin
                numbers[done : done + count] = slots[index][begin:end]
                table[place + begin : place + end].copy_(host[done : done + count], non_blocking=True)
                done += count
        self.sent += total

    # ------------------------------------------------------------------------------------------ its rows

    def rows(self, batch: Batch) -> RowEntries:
        """Returns what the rows of a step write whose sequences have `places`."""
        assert batch.places is not None, "they have been placed"
        counts = batch.query_lengths
        first = (batch.places + batch.prefix_lengths).astype(np.int64)
        if batch.rows == len(counts):
            entries = first
        else:
            entries = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(batch.rows)
        slots = _row_slots(batch, batch.slots, batch.write_slots)
        if self._window_slots is None:
            return RowEntries(entries, slots, slots)
        window_slots = _row_slots(batch, batch.slots_of(windowed=True), batch.write_slots_of(windowed=True))
        return RowEntries(entries, slots, window_slots)

    def write(self, entries: torch.Tensor, slots: torch.Tensor, window_slots: torch.Tensor) -> None:
        """Writes the rows' slots: the tensors of `RowEntries`, on the device. Part of the work of a step."""
        self._slots.index_copy_(0, entries, slots)
        if self._window_slots is not None:
            self._window_slots.index_copy_(0, entries, window_slots)


def _row_slots(batch: Batch, slots: tuple[Int32, ...], write_slots: NDArray[np.int64]) -> Int32:
    """Returns the slot of each row, also of rows that do not write there: [R]"""
    if write_slots.all():
        return write_slots.astype(np.int32)
    first = batch.prefix_lengths.tolist()
    return np.concatenate([own[begin:] for own, begin in zip(slots, first, strict=True)])
