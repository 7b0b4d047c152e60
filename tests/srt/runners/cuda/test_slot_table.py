"""The table of slots: whatever sequences come, grow, change and stay away, it has what each step reads."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import DUMMY_SLOT, Batch
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import EngineGenerate, Schedule
from umbel.srt.runners.cuda.device import HostAccelerator
from umbel.srt.runners.cuda.slot_table import MOST_ENTRIES, SlotTable, table_entries
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

from .engines import on_host, tiny_model


@dataclass
class Text:
    """A sequence with slots, and with other ones in window layers."""

    number: int
    slots: list[int] = field(default_factory=list)
    window_slots: list[int] = field(default_factory=list)
    changed: int = 0
    computed: int = 0


def batch_of(texts: list[Text], rows: list[int], known: list[int]) -> Batch:
    """A step of so many rows of each text, of which so many have their keys already."""
    prefixes = [text.computed for text in texts]
    ends = [prefix + count for prefix, count in zip(prefixes, rows, strict=True)]
    writes = [
        [*[DUMMY_SLOT] * seen, *text.slots[prefix + seen : end]]
        for text, prefix, end, seen in zip(texts, prefixes, ends, known, strict=True)
    ]
    window_writes = [slot for t, p, e in zip(texts, prefixes, ends, strict=True) for slot in t.window_slots[p:e]]
    return Batch(
        token_ids=np.zeros(sum(rows), dtype=np.int64),
        positions=np.concatenate([np.arange(p, e) for p, e in zip(prefixes, ends, strict=True)]),
        write_slots=np.array([slot for own in writes for slot in own], dtype=np.int64),
        query_lengths=np.array(rows, dtype=np.int32),
        prefix_lengths=np.array(prefixes, dtype=np.int32),
        slots=tuple(np.array(text.slots[:end], dtype=np.int32) for text, end in zip(texts, ends, strict=True)),
        logit_rows=np.zeros(0, dtype=np.int64),
        window_slots=tuple(np.array(t.window_slots[:end], dtype=np.int32) for t, end in zip(texts, ends, strict=True)),
        window_write_slots=np.array(window_writes, dtype=np.int64),
        sequences=np.array([text.number for text in texts], dtype=np.int64),
        changed=np.array([min(t.changed, p) for t, p in zip(texts, prefixes, strict=True)], dtype=np.int32),
    )


def run(table: SlotTable, batch: Batch) -> None:
    """Places a step, writes its rows, and compares the table with the slots."""
    places = table.place(batch)
    assert places is not None
    batch = replace(batch, places=places)
    rows = table.rows(batch)
    table.write(*(torch.from_numpy(array) for array in (rows.entries, rows.slots, rows.window_slots)))
    for windowed in (False, True):
        entries = table.slots_of(windowed=windowed).numpy()
        for place, slots in zip(places.tolist(), batch.slots_of(windowed=windowed), strict=True):
            np.testing.assert_array_equal(entries[place : place + len(slots)], slots)
        assert entries[0] == DUMMY_SLOT
    owned = sorted((place, place + len(slots)) for place, slots in zip(places.tolist(), batch.slots, strict=True))
    assert all(one[1] <= other[0] for one, other in pairwise(owned)), "sequences lie apart"


@settings(max_examples=150, deadline=None)
@given(data=st.data(), entries=st.sampled_from([1500, 4000, 100_000]), known_numbers=st.booleans())
def test_it_has_the_slots_of_every_step(data: st.DataObject, entries: int, known_numbers: bool) -> None:
    table = SlotTable(HostAccelerator(), entries, windows=True)
    texts = [Text(number) for number in range(4)]
    fresh = iter(range(1, 1 << 30))
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=4, unique_by=lambda text: text.number))
        rows = []
        known = []
        for text in chosen:
            what = data.draw(st.sampled_from(["rows", "row", "row", "row", "taken over", "begins again"]))
            if what == "begins again" or len(text.slots) > 280:
                text.slots, text.window_slots, text.computed, text.changed = [], [], 0, 0
                cached = data.draw(st.integers(0, 30))
                text.slots = [next(fresh) for _ in range(cached)]
                text.window_slots = [next(fresh) for _ in range(cached)]
                text.computed = data.draw(st.integers(0, cached))
            if what == "taken over" and text.computed:
                text.changed = min(text.changed, data.draw(st.integers(0, text.computed - 1)))
                text.slots[text.changed : text.computed] = [
                    next(fresh) for _ in text.slots[text.changed : text.computed]
                ]
            count = 1 if what == "row" else data.draw(st.integers(1, 40))
            missing = max(0, text.computed + count - len(text.slots))
            seen = min(count, len(text.slots) - text.computed)
            text.slots += [next(fresh) for _ in range(missing)]
            text.window_slots += [next(fresh) for _ in range(missing)]
            rows.append(count)
            known.append(seen)
        batch = batch_of(chosen, rows, known)
        run(table, batch if known_numbers else replace(batch, sequences=None, changed=None))
        for text, count in zip(chosen, rows, strict=True):
            text.computed += count
            text.changed = text.computed
        if data.draw(st.integers(0, 9)) == 0:
            table.clear()
    assert table.sent > 0


def test_a_row_that_decodes_is_all_that_is_sent() -> None:
    table = SlotTable(HostAccelerator(), 10_000, windows=False)
    texts = [Text(7, list(range(1, 301)), list(range(1, 301))), Text(8, list(range(301, 311)), list(range(301, 311)))]
    run(table, batch_of(texts, [300, 10], [0, 0]))
    assert table.sent == 310
    for step in range(200):
        for text in texts:
            text.computed = text.changed = len(text.slots)
            text.slots.append(1000 + 2 * step + text.number)
            text.window_slots.append(text.slots[-1])
        run(table, batch_of(texts, [1, 1], [0, 0]))
    assert table.sent == 310


def test_a_step_that_is_too_large_is_not_placed() -> None:
    table = SlotTable(HostAccelerator(), 700, windows=False)
    large = [Text(number, list(range(1, 301)), list(range(1, 301))) for number in range(2)]
    assert table.place(batch_of(large, [300, 300], [0, 0])) is None
    run(table, batch_of(large[:1], [300], [0]))
    assert table.place(replace(batch_of(large * 2, [300] * 4, [0] * 4), sequences=None)) is None
    run(table, batch_of(large[1:], [300], [0]))


def test_the_size_follows_the_steps_within_limits() -> None:
    assert table_entries(4, 1000) == 2 * 4 * 1256
    assert table_entries(1024, 1 << 20) == MOST_ENTRIES


def test_texts_are_the_same_where_the_table_is_too_small() -> None:
    """Some steps find room after the table was emptied; others send their slots with their plan."""
    config, tensors = tiny_model("gemma 3")
    said, eager = [], []
    for entries in (None, 2700, 300):
        runner = on_host(config, tensors)
        if entries is not None:
            runner._table = SlotTable(HostAccelerator(), entries, windows=False)
            runner._backend.use_table(runner._table)
        settings_ = SchedulerConfig(overlap=True, max_running=9)
        scheduler = Scheduler(runner, lambda token: b"ab", frozenset(), settings_, VirtualClock())
        for number in range(25):
            sampling = SamplingParams(temperature=0.0, max_tokens=5 + number % 9, ignore_eos=True)
            scheduler.handle_message(EngineGenerate(number, [1, 2, 3, number], sampling, False, Schedule()))
        events = []
        while not scheduler.idle:
            events += scheduler.step()
        said.append({event.id: event.token_ids for event in events})  # type: ignore[union-attr]
        eager.append(int(runner.facts()["eager_steps"]))
        assert int(runner.facts()["graph_replays"]) > 0
    assert said[0] == said[1] == said[2]
    assert eager[0] == eager[1] < eager[2]
