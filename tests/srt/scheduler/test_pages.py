"""Pages go to tiers and come back: the same texts, fewer computed tokens, and nothing waits for what is late."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineAbort, EngineControl
from umbel.srt.scheduler.page_cache import PageLedger, PageTiers, window_name
from umbel.srt.testing.oracle import reference_generate
from umbel.srt.tiers.access import DirectAccess, PageRun
from umbel.srt.tiers.memory import HostMemory
from umbel.srt.tiers.names import PAGE_TOKENS, PageScheme, page_names

from ..engine_harness import GREEDY, Engine

SCHEME = PageScheme(b"oracle", "int64", "oracle")
LARGE = 1 << 30


class Desk(DirectAccess):
    """A tier that answers and gives pages when the test says so; by default at once."""

    def __init__(self, name: str = "disk", *, prompt: bool = True, limit: int = LARGE) -> None:
        super().__init__(HostMemory(limit), clock=VirtualClock())
        self.name = name
        self.prompt = prompt
        self.runs: list[PageRun] = []

    def look(self, names: Sequence[bytes]) -> PageRun:
        if self.prompt:
            return super().look(names)
        run = PageRun(names, lambda run: None)
        self.runs.append(run)
        return run

    def answer(self) -> None:
        """Answers every look, and gives every page that was asked for."""
        for run in self.runs:
            if run.cancelled:
                continue
            if run.found is None:
                run.answer(self._tier.longest(run.names))
            elif run.asked and not run.done:
                self._load(run)


def host(limit: int = LARGE) -> DirectAccess:
    return DirectAccess(HostMemory(limit), clock=VirtualClock())


def engine(*accesses: DirectAccess, seconds: float | None = None, **settings: object) -> Engine:
    """seconds: of computing a token; None: not known, so that every load is worth it."""
    tiers = PageTiers(SCHEME, accesses, measured=False) if accesses else None
    made = Engine(**{"pool": 2000, "context": 1200, "tiers": tiers, **settings})  # type: ignore[arg-type]
    if seconds is not None:
        assert made.scheduler.kv.pages is not None
        made.scheduler.kv.pages.loads.rates.computed(100, 100 * seconds)
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(1, 24) for _ in range(length)]


def text_of(engine: Engine, tokens: list[int], **schedule: object) -> Ended:
    """Runs one request alone, and compares its text with the oracle's."""
    number = engine.generate(tokens, **schedule)
    engine.run()
    ended = engine.endings[number]
    assert isinstance(ended, Ended)
    assert ended.token_ids == reference_generate(engine.runner.model, tokens, GREEDY).token_ids
    return ended


def warmed(access: DirectAccess, tokens: list[int], **settings: object) -> None:
    """Lets an engine of its own fill a tier with the pages of a prompt."""
    first = engine(access, **settings)
    for _ in range(2):
        text_of(first, tokens)
    first.scheduler.kv.save_rest()


TIGHT = (450, 130)
WINDOWS = [None, (700, 65), TIGHT]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_page_is_saved_when_a_second_request_uses_it(windows: tuple[int, int] | None) -> None:
    tier = host()
    filling = engine(tier, windows=windows)
    text_of(filling, prompt(200))
    filling.scheduler.kv.save_rest()
    assert filling.scheduler.counters["saved_pages"] == 0
    text_of(filling, prompt(200))
    filling.scheduler.kv.save_rest()
    assert filling.scheduler.counters["saved_pages"] == 3


@pytest.mark.parametrize("windows", [None, (700, 65)], ids=str)
def test_pages_that_all_tiers_have_evicted_are_saved_again(windows: tuple[int, int] | None) -> None:
    fast, slow, tokens = Desk("host"), Desk("disk"), prompt(200)
    machine = engine(fast, slow, windows=windows)
    names = page_names(SCHEME.root(""), tokens)
    saved = []
    for turn, emptied in enumerate([(), (), (fast,), (fast, slow), ()]):
        for shelf in emptied:
            shelf.forget([*names, *map(window_name, names)])
        machine.scheduler.handle_message(EngineControl(1_000_000 + turn, "flush_cache"))
        text_of(machine, tokens)
        machine.scheduler.kv.save_rest()
        saved.append(machine.scheduler.counters["saved_pages"])
    assert saved == [3, 3, 3, 6, 6]
    assert fast.look(names).found == slow.look(names).found == 3


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
def test_another_engine_finds_the_pages(windows: tuple[int, int] | None, overlap: bool) -> None:
    tier, tokens = host(), prompt(500)
    warmed(tier, tokens, windows=windows)
    second = engine(tier, windows=windows, overlap=overlap)
    first = text_of(second, tokens)
    assert first.cached_tokens == 7 * PAGE_TOKENS
    assert first.loaded == {"host": 7 * PAGE_TOKENS}
    assert second.scheduler.counters["loaded_host_tokens"] == 7 * PAGE_TOKENS
    assert text_of(second, tokens[:450] + prompt(40, 1)).cached_tokens == 450
    if windows != TIGHT:  # whose window pages of the middle were gone before they could be saved
        assert text_of(second, tokens[:300]).cached_tokens >= 4 * PAGE_TOKENS


def test_a_page_whose_beginning_is_on_the_device_is_loaded_from_its_middle() -> None:
    tier, tokens = host(), prompt(200)
    warmed(tier, tokens)
    second = engine(tier, max_step_tokens=64)
    text_of(second, tokens[:10])
    assert text_of(second, tokens).cached_tokens == 3 * PAGE_TOKENS


def test_requests_with_the_same_prefix_load_it_once() -> None:
    tier, tokens = Desk(), prompt(300)
    warmed(tier, tokens)
    tier.prompt = False
    second = engine(tier, pool=4000)
    numbers = [second.generate([*tokens, token]) for token in range(1, 9)]
    second.step()
    assert len(tier.runs) == 1
    assert second.scheduler.opening
    while any(number not in second.endings for number in numbers):
        tier.answer()
        second.step()
    assert second.scheduler.counters["loads"] == 1
    assert second.scheduler.counters["shared_loads"] == 7
    assert second.scheduler.counters["computed_prompt_tokens"] == 300 % PAGE_TOKENS + 8
    for token, number in enumerate(numbers, 1):
        expected = reference_generate(second.runner.model, [*tokens, token], GREEDY).token_ids
        assert second.endings[number].token_ids == expected  # type: ignore[union-attr]


def test_other_requests_run_while_one_waits_for_its_pages() -> None:
    tier, tokens = Desk(), prompt(300)
    warmed(tier, tokens)
    tier.prompt = False
    second = engine(tier)
    waiting, other = second.generate(tokens), second.generate(prompt(20, 5))
    for _ in range(10):
        second.step()
    assert other in second.endings
    assert waiting not in second.endings
    for _ in range(20):
        tier.answer()
        second.step()
    assert second.endings[waiting].cached_tokens == 4 * PAGE_TOKENS  # type: ignore[union-attr]


def test_a_load_that_is_late_gives_way_to_computing() -> None:
    tier, tokens = Desk(), prompt(300)
    warmed(tier, tokens)
    tier.prompt = False
    second = engine(tier, seconds=0.01)
    number = second.generate(tokens)
    second.step()
    assert second.scheduler.opening
    second.clock.advance(3.0)
    second.run()
    assert second.endings[number].cached_tokens == 0  # type: ignore[union-attr]
    assert second.scheduler.counters["late_loads"] == 1
    assert not second.scheduler.opening
    second.generate(prompt(300, 9))
    second.run()
    assert len(tier.runs) == 1  # the tier rests after it was late


@pytest.mark.parametrize("end", ["abort", "flush", "expire"])
def test_a_request_may_end_while_it_waits_for_its_pages(end: str) -> None:
    tier, tokens = Desk(), prompt(300)
    warmed(tier, tokens)
    tier.prompt = False
    second = engine(tier)
    number = second.generate(tokens, timeout=5.0)
    second.step()
    if end == "abort":
        second.scheduler.handle_message(EngineAbort(number))
    elif end == "flush":
        second.scheduler.handle_message(EngineControl(1_000_000, "flush_cache"))
    else:
        second.clock.advance(6.0)
    for _ in range(12):
        second.step()
        tier.answer()
    second.run()
    assert number in second.endings
    tier.prompt = True
    assert text_of(second, tokens[:100]).token_ids
    second.scheduler.check()


def test_pages_of_another_salt_namespace_or_adapter_are_not_found() -> None:
    tier, tokens = host(), prompt(200)
    warmed(tier, tokens)
    second = engine(tier)
    assert text_of(second, tokens, salt="acme").cached_tokens == 0
    assert text_of(second, tokens, private=((70, "globex"),)).cached_tokens == PAGE_TOKENS
    assert text_of(second, tokens).cached_tokens == 3 * PAGE_TOKENS


def test_what_loading_does_not_speed_up_is_computed() -> None:
    class Slow(Desk):
        def facts(self):  # type: ignore[no-untyped-def]
            return replace(super().facts(), latency=10.0)

    tier, tokens = Slow(), prompt(300)
    warmed(tier, tokens)
    second = engine(tier, seconds=0.001)
    assert text_of(second, tokens).cached_tokens == 0
    assert second.scheduler.counters["loads_declined"] == 1


def test_evicted_pages_are_saved_before_their_slots_are_freed() -> None:
    tier = host()
    small = engine(tier, pool=420, context=400)
    tokens = prompt(300)
    text_of(small, tokens)
    text_of(small, tokens[:290])  # the second use
    before = small.scheduler.counters["saved_pages"]
    for seed in range(1, 4):
        text_of(small, prompt(300, seed))
    assert small.scheduler.counters["evicted_tokens"] > 0
    assert before <= small.scheduler.counters["saved_pages"]
    assert text_of(small, tokens).cached_tokens == 4 * PAGE_TOKENS


def test_a_pinned_prefix_is_saved_at_its_first_use() -> None:
    tier, tokens = host(), prompt(200)
    first = engine(tier)
    first.mark(tokens, 150)
    first.run()
    first.scheduler.kv.save_rest()
    second = engine(tier)
    assert text_of(second, tokens).cached_tokens == 2 * PAGE_TOKENS


def test_a_ledger_counts_what_is_worth_saving() -> None:
    ledger = PageLedger()
    names = [bytes([number]) for number in range(5)]
    ledger.use(names)
    assert ledger.unsaved == 0
    ledger.use(names[:3])
    ledger.use(names[:3])
    assert ledger.unsaved == 3
    ledger.add(names[:1], 4)
    assert ledger.unsaved == 2
    assert [ledger.lacks(name, 4) for name in names] == [False, True, True, False, False]
    ledger.drop(names)
    assert ledger.unsaved == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("running", "chunk", "reuse"),
    [
        (1, None, True),
        (32, 48, True),
        (32, None, False),
        *(pytest.param(*rest, marks=pytest.mark.nightly) for rest in [(1, 48, True), (32, None, True)]),
        *(
            pytest.param(*rest, marks=pytest.mark.nightly)
            for rest in [(1, None, False), (1, 48, False), (32, 48, False)]
        ),
    ],
)
def test_tiers_change_no_text(windows: tuple[int, int] | None, running: int, chunk: int | None, reuse: bool) -> None:
    """64 prompts with common beginnings, twice, in a pool that holds a part of them."""
    random = Random(7)
    heads = [prompt(random.randrange(60, 400), seed) for seed in range(6)]
    prompts = [random.choice(heads) + prompt(random.randrange(1, 80), 100 + index) for index in range(64)]
    tier = host()
    tested = engine(
        tier, Desk("disk"), pool=1500, windows=windows, max_running=running, max_step_tokens=chunk, radix_cache=reuse
    )
    for _ in range(2):
        numbers = [tested.generate(tokens) for tokens in prompts]
        tested.run()
        for number, tokens in zip(numbers, prompts, strict=True):
            expected = reference_generate(tested.runner.model, tokens, GREEDY).token_ids
            ended = tested.endings[number]
            assert isinstance(ended, Ended), ended
            assert ended.token_ids == expected
    tested.scheduler.check()
    assert (tested.scheduler.counters["loaded_host_tokens"] > 0) == reuse
