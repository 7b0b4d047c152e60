"""Engines with real tiers: a restart finds its pages, salts find nothing of each other, and faults change no text.

The oracle's pages hold tokens, positions and histories, so a page at a wrong place fails loudly.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from umbel.srt.core.batch import PICTURE_BASE
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EnginePicture
from umbel.srt.scheduler.page_cache import PageTiers
from umbel.srt.testing.oracle import reference_generate
from umbel.srt.tiers.access import DirectAccess
from umbel.srt.tiers.disk import DiskTier
from umbel.srt.tiers.memory import HostMemory
from umbel.srt.tiers.names import PAGE_TOKENS, PageScheme
from umbel.srt.tiers.page_folder import PageFiles
from umbel.srt.tiers.shared_store import SharedStore
from umbel.srt.tiers.tier import Payload, Tier

from ..engine_harness import GREEDY, Engine
from ..scheduler.test_pages import prompt, text_of
from .test_disk import FaultyFiles, size_of
from .test_shared_store import RedisServer

pytest.importorskip("xxhash", reason="the store extra is not installed")

SCHEME = PageScheme(b"oracle", "int64", "oracle")
LIMIT = 1 << 24

Open = Callable[..., Tier]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "pages"


@pytest.fixture(params=["host", "disk", pytest.param("shared", marks=pytest.mark.processes)])
def open_tier(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens a tier anew each time it is called, as an engine that starts does; host memory ends with its engine."""
    if request.param == "host":
        memory = HostMemory(LIMIT)
        yield lambda scheme=SCHEME: memory
    elif request.param == "disk":
        yield lambda scheme=SCHEME: DiskTier(folder, LIMIT, scheme.digest)
    else:
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
        server = RedisServer(tmp_path)
        yield lambda scheme=SCHEME: SharedStore(server.url, scheme.digest)
        server.kill()


def engine_of(*tiers: Tier, scheme: PageScheme = SCHEME, **settings: object) -> Engine:
    accesses = tuple(DirectAccess(tier, clock=VirtualClock()) for tier in tiers)
    chosen = {"pool": 2_000, "context": 1_200, "tiers": PageTiers(scheme, accesses, measured=False), **settings}
    return Engine(**chosen)  # type: ignore[arg-type]


def filled(tier: Tier, tokens: list[int], **schedule: object) -> None:
    """Lets an engine of its own save the pages of a prompt."""
    engine = engine_of(tier)
    for _ in range(2):
        text_of(engine, tokens, **schedule)
    engine.scheduler.kv.save_rest()


def test_the_first_request_after_a_restart_reports_cached_tokens(open_tier: Open) -> None:
    tokens = prompt(300)
    filled(open_tier(), tokens)
    assert text_of(engine_of(open_tier()), tokens).cached_tokens == 4 * PAGE_TOKENS


def cached_of(engine: Engine, tokens: list[int], salts: list[str]) -> list[int]:
    """Runs one request for each salt, several at once → the cached tokens of each."""
    text = reference_generate(engine.runner.model, tokens, GREEDY).token_ids
    found = []
    for first in range(0, len(salts), 20):
        numbers = [engine.generate(tokens, salt=salt) for salt in salts[first : first + 20]]
        engine.run()
        for number in numbers:
            ended = engine.endings.pop(number)
            assert isinstance(ended, Ended)
            assert ended.token_ids == text
            found.append(ended.cached_tokens)
    return found


@pytest.mark.parametrize("pairs", [50, pytest.param(500, marks=pytest.mark.nightly)])
def test_pairs_of_salts_find_nothing_of_each_other_and_all_of_their_own(open_tier: Open, pairs: int) -> None:
    random = Random(7)
    tokens = prompt(PAGE_TOKENS + 8)
    salts = [f"{random.choice('ab')}{random.choice(['', 'b', 'bc', '|', ' '])}{number}" for number in range(2 * pairs)]
    own, others = salts[:pairs], salts[pairs:]
    filling = engine_of(open_tier())
    for _ in range(2):
        cached_of(filling, tokens, own)
    filling.scheduler.kv.save_rest()
    reading = engine_of(open_tier())
    assert cached_of(reading, tokens, others) == [0] * pairs
    assert cached_of(reading, tokens, own) == [PAGE_TOKENS] * pairs


@pytest.mark.parametrize(
    "other",
    [
        PageScheme(b"another", "int64", "oracle"),
        PageScheme(b"oracle", "int32", "oracle"),
        PageScheme(b"oracle", "int64", "oracle", 1, 2),
        PageScheme(b"oracle", "int64", "another"),
    ],
    ids=["model", "dtype", "rank", "layout"],
)
def test_an_engine_of_another_kind_finds_nothing(open_tier: Open, other: PageScheme) -> None:
    tokens = prompt(300)
    filled(open_tier(), tokens)
    assert text_of(engine_of(open_tier(other), scheme=other), tokens).cached_tokens == 0


def with_adapter(name: str) -> dict[str, object]:
    return {"adapter": 0, "private": ((0, f"@{name}"),)}


def engine_with_adapter(tier: Tier, name: str, weights: bytes, **settings: object) -> Engine:
    return engine_of(tier, tiers=PageTiers(SCHEME, (DirectAccess(tier),), {name: weights}, measured=False), **settings)


def evicted(engine: Engine, tokens: list[int], **schedule: object) -> None:
    """Uses a prompt twice, and lets other prompts evict it before it was saved whole."""
    for seed in (None, None, 1, 2, 3):
        engine.generate(tokens if seed is None else prompt(300, seed), **schedule)
        engine.run()


def test_no_page_of_an_adapter_is_read_by_another_one_or_without_one(folder: Path) -> None:
    """Two adapters of one name, too: after a restart a name may stand for other weights."""
    tokens = prompt(300)

    def tier() -> Tier:
        return DiskTier(folder, LIMIT, SCHEME.digest)

    filling = engine_with_adapter(tier(), "sql", b"A", pool=700)
    evicted(filling, tokens, **with_adapter("sql"))
    filling.scheduler.kv.save_rest()
    for name, weights in (("sql", b"B"), ("law", b"B")):
        other = engine_with_adapter(tier(), name, weights)
        assert text_of(other, tokens).cached_tokens == 0
        assert cached_with(other, tokens, name) == 0
    assert cached_with(engine_with_adapter(tier(), "law", b"A"), tokens, "law") == 0  # its namespace is another one
    assert cached_with(engine_with_adapter(tier(), "sql", b"A"), tokens, "sql") == 4 * PAGE_TOKENS


def test_pages_of_an_adapter_are_saved_before_their_eviction_and_at_the_end(folder: Path) -> None:
    """By the names by which requests look for them."""
    tokens = prompt(40 * PAGE_TOKENS)
    long = {"pool": 3_500, "context": 3_000, "max_step_tokens": 1_024}
    filling = engine_with_adapter(DiskTier(folder, LIMIT, SCHEME.digest), "sql", b"A", **long)
    for _ in range(2):
        cached_with(filling, tokens, "sql")
    filling.scheduler.kv.save_rest()
    reading = engine_with_adapter(DiskTier(folder, LIMIT, SCHEME.digest), "sql", b"A", **long)
    assert cached_with(reading, tokens, "sql") == 39 * PAGE_TOKENS  # the last token is computed


def cached_with(engine: Engine, tokens: list[int], adapter: str) -> int:
    """Runs one request with an adapter → its cached tokens. The oracle's own text is that of the model without one."""
    number = engine.generate(tokens, **with_adapter(adapter))
    engine.run()
    ended = engine.endings.pop(number)
    assert isinstance(ended, Ended)
    return ended.cached_tokens


def test_the_end_saves_what_was_used_once_where_there_is_room(folder: Path) -> None:
    tokens = prompt(300)
    filling = engine_of(DiskTier(folder, LIMIT, SCHEME.digest))
    text_of(filling, tokens)
    assert filling.scheduler.counters["saved_pages"] == 0
    filling.scheduler.kv.save_rest()
    assert text_of(engine_of(DiskTier(folder, LIMIT, SCHEME.digest)), tokens).cached_tokens == 4 * PAGE_TOKENS


def test_the_end_evicts_nothing_for_what_was_used_once(folder: Path) -> None:
    def small() -> DiskTier:
        return DiskTier(folder, 6 * 3 * 4096, SCHEME.digest)

    kept, once = prompt(300), prompt(1_000, 1)
    filled(small(), kept)
    engine = engine_of(small())
    text_of(engine, once)
    engine.scheduler.kv.save_rest()
    assert text_of(engine_of(small()), kept).cached_tokens == 4 * PAGE_TOKENS


class SlowFiles(PageFiles):
    """Each page that is written takes a second of a clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def write(self, path: Path, header: bytes, payload: Payload) -> None:
        self.clock.advance(1.0)
        super().write(path, header, payload)


def test_an_end_whose_time_is_up_has_saved_heads_of_what_was_used_last(folder: Path) -> None:
    files = SlowFiles()
    engine = engine_of(DiskTier(folder, LIMIT, SCHEME.digest, files=files))
    files.clock = engine.clock
    old, new = prompt(1_100), prompt(1_100, 1)
    for tokens in (old, new):
        text_of(engine, tokens)
    engine.scheduler.kv.save_rest(seconds=5.0)
    again = engine_of(DiskTier(folder, LIMIT, SCHEME.digest))
    assert text_of(again, new).cached_tokens == 16 * PAGE_TOKENS
    assert text_of(again, old).cached_tokens == 0


def test_a_picture_finds_its_pages_after_a_restart_and_another_one_of_its_number_never(folder: Path) -> None:
    """After a restart numbers begin anew, so another picture of the same size may have the number of this one."""

    def asked(digest: bytes, files: PageFiles | None = None) -> int:
        engine = engine_of(DiskTier(folder, LIMIT, SCHEME.digest, files=files, clock=VirtualClock()))
        engine.scheduler.handle_message(EnginePicture(1, 4, 8, 8, 0, 0, 1, 1, bytes(3), digest=digest))
        tokens = [*prompt(70), *[PICTURE_BASE + 1] * 4, *prompt(150, 5)]
        cached = [text_of(engine, tokens).cached_tokens for _ in range(2)]
        engine.scheduler.kv.save_rest()
        return cached[0]

    head, whole = PAGE_TOKENS, 3 * PAGE_TOKENS
    assert asked(b"c" * 32) == 0
    assert asked(b"c" * 32) == whole
    assert asked(b"d" * 32) == head
    found = []
    for seed in range(20):
        other = bytes([seed]) * 32
        assert asked(other, FaultyFiles(seed, 0.2)) <= head
        asked(other)  # saves what the faults have kept from being saved
        found.append(asked(other))
    assert found.count(whole) > 15  # of a page that looks like a newer umbel's, the rest is computed each time


def test_another_beginning_finds_nothing(open_tier: Open) -> None:
    """As another chat template has."""
    tokens = prompt(300)
    filled(open_tier(), tokens)
    assert text_of(engine_of(open_tier()), [23, *tokens]).cached_tokens == 0


@pytest.mark.parametrize("seed", range(2))
def test_faults_of_the_disk_change_no_text_and_end_no_engine(folder: Path, seed: int) -> None:
    """200 faults and more; texts are compared with the oracle's."""
    files, clock, chooser = FaultyFiles(seed, 0.0), VirtualClock(), Random(seed)
    limit = 400 * 4096

    def tier() -> DiskTier:
        return DiskTier(folder, limit, SCHEME.digest, files=files, clock=clock)

    disk = tier()
    engine = engine_of(disk)
    files.share = 0.1
    cached = rounds = 0
    while len(files.failed) < 200:
        rounds += 1
        clock.advance(1.0)
        tokens = prompt(200 + 64 * chooser.randrange(4), chooser.randrange(12))
        cached += text_of(engine, tokens).cached_tokens
        if chooser.random() < 0.3:
            engine.scheduler.kv.save_rest()
            files.share = 0.0
            engine = engine_of(tier())
            files.share = 0.1
        if chooser.random() < 0.02:
            shutil.rmtree(folder)
        assert size_of(folder) <= limit * 1.05
        assert rounds < 3_000
    assert cached > 1_000
    assert len(set(files.failed)) > 20


@pytest.mark.processes
def test_a_store_that_dies_between_requests_changes_no_text(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path)
    tokens = prompt(300)
    filled(SharedStore(server.url, SCHEME.digest), tokens)
    clock = VirtualClock()
    reading = engine_of(SharedStore(server.url, SCHEME.digest, clock=clock))
    assert text_of(reading, tokens).cached_tokens == 4 * PAGE_TOKENS
    server.kill()
    for seed in range(1, 4):
        assert text_of(reading, prompt(300, seed)).cached_tokens == 0
    server.start()
    filled(SharedStore(server.url, SCHEME.digest), prompt(300, 9))
    clock.advance(60.0)
    assert text_of(reading, prompt(300, 9)).cached_tokens == 4 * PAGE_TOKENS
    server.kill()


def test_tiers_fill_each_other(folder: Path) -> None:
    """What the disk has is in host memory after its first use."""
    tokens = prompt(300)
    filled(DiskTier(folder, LIMIT, SCHEME.digest), tokens)
    memory = HostMemory(LIMIT)
    text_of(engine_of(memory, DiskTier(folder, LIMIT, SCHEME.digest)), tokens)

    class NoReads(PageFiles):
        def read(self, path: Path) -> object:  # type: ignore[override]
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    again = engine_of(memory, DiskTier(folder, LIMIT, SCHEME.digest, files=NoReads()))
    assert text_of(again, tokens).cached_tokens == 4 * PAGE_TOKENS


def test_two_engines_on_one_folder_reuse_each_others_pages(folder: Path) -> None:
    one, two = (engine_of(DiskTier(folder, LIMIT, SCHEME.digest)) for _ in range(2))
    cached = 0
    for seed in range(20):
        tokens = prompt(200, seed)
        for _ in range(2):
            text_of(one, tokens)
        one.scheduler.kv.save_rest()
        cached += text_of(two, tokens).cached_tokens
    assert cached == 20 * 3 * PAGE_TOKENS
