"""The tier on a disk: found again after a restart, shared by processes, and never wrong."""

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from umbel.lang.errors import ModelError
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.tiers import disk, page_format
from umbel.srt.tiers.access import ThreadedAccess
from umbel.srt.tiers.disk import DiskTier
from umbel.srt.tiers.page_folder import BLOCK, PageFiles
from umbel.srt.tiers.tier import Payload

from .pages import PAGE, chain, pages

SCHEME = b"s" * 32
ROOM = 40 * BLOCK


def tier(folder: Path, limit: int = 1 << 24, **more: object) -> DiskTier:
    made = DiskTier(folder, limit, more.pop("scheme", SCHEME), **more)  # type: ignore[arg-type]
    made.open()
    return made


def values(found: list[Payload | None]) -> list[int | None]:
    return [None if page is None else int(page[0]) for page in found]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/??/*") if path.is_file())


def size_of(folder: Path) -> int:
    """Bytes of all files and folders of pages, in whole blocks."""
    return sum(
        -(-max(path.stat().st_size, 1) // BLOCK) * BLOCK
        for path in [*folder.glob("??"), *folder.glob("??/??"), *files_of(folder), *folder.glob("writing/*.*")]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "pages"


def test_pages_outlive_the_tier_and_are_found_without_reading_them(folder: Path) -> None:
    names = chain("a", 3)
    one = tier(folder)
    one.store(names, pages(3, 5))
    assert (one.longest(names), values(one.load(names))) == (3, [5, 6, 7])
    one.close()

    class NoReads(PageFiles):
        def read(self, path: Path) -> Payload:
            raise AssertionError("a payload is read")

    again = tier(folder, files=NoReads())
    assert again.longest(names) == 3
    again.close()
    assert values(tier(folder).load(names)) == [5, 6, 7]


def test_files_lie_in_two_levels_of_folders_that_others_cannot_read(folder: Path) -> None:
    tier(folder).store(chain("a", 1), pages(1))
    (path,) = files_of(folder)
    name = chain("a", 1)[0].hex()
    assert path.relative_to(folder) == Path(name[:2], name[2:4], name)
    assert [path.stat().st_mode & 0o777 for path in (folder, path.parent, path)] == [0o700, 0o700, 0o600]
    assert path.stat().st_size == page_format.HEADER_BYTES + PAGE


def test_a_page_after_a_gap_is_not_stored(folder: Path) -> None:
    one = tier(folder)
    one.store(chain("a", 3), pages(2))
    assert files_of(folder) == []
    assert one.facts().dropped == 2


def fill(one: DiskTier) -> None:
    """Stores new pages until one is evicted."""
    before = one.facts().evicted
    for number in range(40):
        one.store(chain(f"fill{number}-", 1), pages(1))
        if one.facts().evicted > before:
            return
    pytest.fail("nothing was evicted")


def there(one: DiskTier, letter: str, count: int) -> list[bool]:
    return [one._folder.path_of(name).exists() for name in chain(letter, count)]


def test_least_recently_used_pages_leave_first_and_tails_before_heads(folder: Path) -> None:
    one = tier(folder, ROOM)
    for letter in "abc":
        one.store(chain(letter, 3), pages(3))
    one.longest(chain("a", 3))
    one.close()
    again = tier(folder, ROOM)  # the order outlives the process
    fill(again)
    assert there(again, "b", 3) == [True, True, False]
    assert there(again, "a", 3) == there(again, "c", 3) == [True] * 3


def test_the_limit_is_kept_over_many_pages(folder: Path) -> None:
    one = tier(folder, ROOM)
    for number in range(60):
        one.store(chain(f"n{number}-", 2), pages(2))
        assert size_of(folder) <= ROOM
    facts = one.facts()
    assert facts.bytes == size_of(folder)
    assert facts.pages == len(files_of(folder)) > 8
    assert facts.evicted == facts.stored - facts.pages > 0


def test_a_page_larger_than_the_limit_leaves_the_others_alone(folder: Path) -> None:
    one = tier(folder, ROOM)
    one.store(chain("a", 1), pages(1))
    one.store(chain("b", 1), [np.zeros(ROOM, dtype=np.uint8)])
    assert one.longest(chain("a", 1)) == 1
    assert one.facts().dropped == 1


def test_two_tiers_of_a_folder_read_each_other_and_share_one_limit(folder: Path) -> None:
    one, two = tier(folder, ROOM), tier(folder, ROOM)
    one.store(chain("a", 2), pages(2, 3))
    assert values(two.load(chain("a", 2))) == [3, 4]
    for number in range(60):
        (one, two)[number % 2].store(chain(f"n{number}-", 1), pages(1))
        assert size_of(folder) <= ROOM
    assert one.facts().bytes <= ROOM
    assert sum(each.facts().evicted for each in (one, two)) > 10
    assert one.facts().faults == two.facts().faults == {}


def test_what_another_process_uses_is_not_evicted_first(folder: Path) -> None:
    one, two = tier(folder, ROOM), tier(folder, ROOM)
    one.store(chain("a", 1), pages(1))
    one.store(chain("b", 1), pages(1))
    two.longest(chain("a", 1))
    fill(one)
    assert there(one, "a", 1) + there(one, "b", 1) == [True, False]


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from umbel.srt.tiers.disk import DiskTier
from umbel.srt.tiers.page_folder import PageFiles
class Dies(PageFiles):
    def write(self, path, header, payload):
        with open(path, "r+b") as file:
            file.write(header + bytes(payload)[:100])
        os._exit(9)
tier = DiskTier(Path(sys.argv[1]), 1 << 24, b"s" * 32, files=Dies())
tier.open()
tier.store([b"k" * 32], [np.zeros(100_000, dtype=np.uint8)])
"""


@pytest.mark.processes
def test_what_a_killed_process_was_writing_is_removed_and_what_a_living_one_writes_stays(folder: Path) -> None:
    living = tier(folder)
    with living._folder.locked() as usage:
        mine = living._folder.reserve(usage, 10 * BLOCK)
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == 9
    assert len(list(folder.glob("writing/*.*"))) == 2
    again = tier(folder)
    assert list(folder.glob("writing/*.*")) == [mine]
    assert again.facts().bytes == 10 * BLOCK
    assert again.longest([b"k" * 32]) == 0


def test_a_folder_without_other_processes_is_counted_anew(folder: Path) -> None:
    one = tier(folder)
    one.store(chain("a", 3), pages(3))
    one.close()
    (folder / "usage").write_bytes(b"nonsense")
    assert tier(folder).facts().bytes == size_of(folder)


def test_a_clock_that_was_ahead_changes_only_what_is_evicted_first(folder: Path) -> None:
    """Pages used after one from the future was seen are newer than it."""
    one = tier(folder, ROOM)
    one.store(chain("a", 1), pages(1))
    future = 1 << 62
    os.utime(files_of(folder)[0], ns=(future, future))
    one.close()
    again = tier(folder, ROOM)
    again.store(chain("b", 1), pages(1))
    fill(again)
    assert there(again, "a", 1) + there(again, "b", 1) == [False, True]
    assert not again.facts().faults


# ---- pages that are none


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def other_model(path: Path) -> None:
    header = page_format.PageFormat(b"o" * 32).header(bytes.fromhex(path.name), pages(1)[0])
    path.write_bytes(header + bytes(PAGE))


def other_name(path: Path) -> None:
    header = page_format.PageFormat(SCHEME).header(b"o" * 32, pages(1)[0])
    path.write_bytes(header + bytes(PAGE))


def newer(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = (99).to_bytes(4, "little")
    path.write_bytes(data)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda path: path.write_bytes(b""), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:50]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "truncated"),
        (lambda path: path.write_bytes(b"GGUF" + bytes(2000)), "foreign"),
        (lambda path: flip(path, 20), "damaged"),
        (lambda path: flip(path, 105), "damaged"),
        (lambda path: flip(path, 112), "damaged"),
        (lambda path: flip(path, 1_000), "damaged"),
        (other_model, "other model"),
        (other_name, "other name"),
        (newer, "newer"),
        (link, "foreign"),
        (fifo, "foreign"),
    ],
)
def test_a_page_that_is_none_is_a_miss_counted_said_and_removed(
    folder: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], kind: str
) -> None:
    one = tier(folder)
    names = chain("a", 2)
    one.store(names, pages(2, 3))
    path = one._folder.path_of(names[0])
    harm(path)
    with caplog.at_level(logging.WARNING, "umbel.engine"):
        assert values(one.load(names)) == [None, None]
        assert one.load(names) == [None, None]
    assert one.facts().faults == {kind: 1}
    assert len(caplog.messages) == 1
    assert "disk cache" in caplog.messages[0]
    assert os.path.lexists(path) == (kind == "newer"), "what a newer umbel has written stays"
    assert one.longest(names) == 0
    one.store(names[:1], pages(1, 3))
    assert values(one.load(names)) == [3, 4]
    one.close()
    assert tier(folder).facts().bytes == size_of(folder)


def test_a_folder_in_the_place_of_a_page_is_left_alone(folder: Path) -> None:
    one = tier(folder)
    path = one._folder.path_of(chain("a", 1)[0])
    path.mkdir(parents=True)
    assert one.load(chain("a", 1)) == [None]
    assert one.longest(chain("a", 1)) == 0
    one.store(chain("a", 1), pages(1))
    assert path.is_dir()
    assert one.facts().faults


def test_other_files_in_the_folder_are_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("mine")
    (folder / "61" / "30").mkdir(parents=True)
    (folder / "61" / "30" / "notes.txt").write_text("mine")
    one = tier(folder, ROOM)
    for number in range(30):
        one.store(chain(f"n{number}-", 1), pages(1))
    assert one.facts().evicted > 0
    assert (folder / "notes.txt").read_text() == (folder / "61" / "30" / "notes.txt").read_text() == "mine"


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ModelError, match="set disk_cache to a folder of yours"):
        DiskTier(folder, ROOM, SCHEME)


def test_a_folder_that_is_a_file_is_refused(folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(ModelError, match="disk_cache"):
        DiskTier(folder, ROOM, SCHEME)


# ---- faults of the disk


class FaultyFiles(PageFiles):
    """Fails calls at random, or damages what is read and written."""

    CALLS = ("read", "create", "write", "replace", "unlink", "stat", "touch", "make_folder")

    def __init__(self, seed: int, share: float) -> None:
        self.random = random.Random(seed)
        self.share = share
        self.failed: list[str] = []

    def _fails(self, call: str) -> bool:
        return self.random.random() < self.share

    def _perhaps(self, call: str) -> None:
        if self._fails(call):
            number = self.random.choice([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.ESTALE])
            self.failed.append(f"{call} {errno.errorcode[number]}")
            raise OSError(number, os.strerror(number))

    def read(self, path: Path) -> Payload:
        self._perhaps("read")
        page = super().read(path)
        if self._fails("read"):
            how = self.random.choice(["flip", "cut", "empty", "other"])
            self.failed.append(f"read {how}")
            if how == "flip":
                page[self.random.randrange(len(page))] ^= 1 << self.random.randrange(8)
            elif how == "cut":
                page = page[: self.random.randrange(len(page))]
            elif how == "empty":
                page = page[:0]
            else:
                page = np.frombuffer(
                    page_format.PageFormat(b"o" * 32).header(bytes.fromhex(path.name), page[112:]) + bytes(page[112:]),
                    dtype=np.uint8,
                )
        return page

    def create(self, path: Path, size: int) -> None:
        self._perhaps("create")
        super().create(path, size)

    def write(self, path: Path, header: bytes, payload: Payload) -> None:
        if self._fails("write"):
            self.failed.append("write half")
            super().write(path, header, payload[: len(payload) // 2])
            raise OSError(errno.ENOSPC, "full")
        self._perhaps("write")
        super().write(path, header, payload)
        if self._fails("write"):
            self.failed.append("write lost")  # as after a crash of the machine
            os.truncate(path, self.random.randrange(len(header) + len(payload)))

    def replace(self, source: Path, target: Path) -> None:
        self._perhaps("replace")
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._perhaps("unlink")
        super().unlink(path)

    def stat(self, path: Path) -> os.stat_result:
        self._perhaps("stat")
        return super().stat(path)

    def touch(self, path: Path, nanoseconds: int) -> None:
        self._perhaps("touch")
        super().touch(path, nanoseconds)

    def make_folder(self, path: Path) -> None:
        self._perhaps("make_folder")
        super().make_folder(path)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(4)
def test_faults_give_no_wrong_page_no_error_and_keep_the_limit(folder: Path, seed: int) -> None:
    """200 faults and more: a payload is the one that was stored, or none."""
    files = FaultyFiles(seed, 0.05)
    clock = VirtualClock()
    limit = 100 * BLOCK
    one = tier(folder, limit, files=files, clock=clock)
    chooser = random.Random(seed)
    loaded = rounds = 0
    while len(files.failed) < 200:
        rounds += 1
        clock.advance(1.0)
        letter, count = f"n{chooser.randrange(40)}-", chooser.randrange(1, 5)
        names = chain(letter, count)
        value = int(letter[1:-1]) * 5
        found = one.load(names[: one.longest(names)])
        for place, page in enumerate(found):
            if page is not None:
                loaded += 1
                assert page.tolist() == [value + place] * PAGE
        one.store(names, pages(count, value))
        if chooser.random() < 0.02:
            shutil.rmtree(folder)
        if chooser.random() < 0.05:
            one.forget(names)
        assert size_of(folder) <= limit * 1.05
        if chooser.random() < 0.05:
            one.close()
            one = tier(folder, limit, files=files, clock=clock)
    assert loaded > 20, "pages were read all the same"
    assert len(set(files.failed)) > 30
    assert rounds < 5_000


def test_a_file_that_cannot_be_removed_does_not_stop_eviction(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Immovable(PageFiles):
        def unlink(self, path: Path) -> None:
            if path.name == chain("a", 1)[0].hex():
                raise PermissionError(errno.EPERM, "no")
            super().unlink(path)

    one = tier(folder, ROOM, files=Immovable())
    one.store(chain("a", 1), pages(1))
    for number in range(40):
        one.store(chain(f"n{number}-", 1), pages(1))
        assert size_of(folder) <= ROOM
    assert one.facts().evicted > 5
    assert one.facts().stored == 41
    assert one.facts().faults == {"EPERM": 1}


def test_where_nothing_can_be_removed_nothing_is_stored_and_the_limit_holds(folder: Path) -> None:
    class Frozen(PageFiles):
        def unlink(self, path: Path) -> None:
            raise PermissionError(errno.EPERM, "no")

    one = tier(folder, ROOM, files=Frozen())
    for number in range(40):
        one.store(chain(f"n{number}-", 1), pages(1))
    assert size_of(folder) <= ROOM
    assert one.facts().faults["no room"] > 10
    assert one.longest(chain("n0-", 1)) == 1


def test_a_folder_that_was_removed_is_made_again(folder: Path) -> None:
    one = tier(folder)
    one.store(chain("a", 2), pages(2))
    shutil.rmtree(folder)
    assert one.load(chain("a", 2)) == [None, None]
    one.store(chain("b", 1), pages(1))
    one.store(chain("b", 1), pages(1))
    assert one.longest(chain("b", 1)) == 1
    assert one.facts().bytes == size_of(folder)


def test_a_disk_that_fails_is_written_to_again_after_a_pause(folder: Path) -> None:
    class Broken(PageFiles):
        broken = True
        tried = 0

        def create(self, path: Path, size: int) -> None:
            self.tried += 1
            if self.broken:
                raise OSError(errno.EIO, "broken")
            super().create(path, size)

    files, clock = Broken(), VirtualClock()
    one = tier(folder, files=files, clock=clock)
    for number in range(20):
        one.store(chain(f"n{number}-", 1), pages(1))
    assert files.tried == disk._OPEN_AFTER
    files.broken = False
    clock.advance(disk._PAUSE)
    one.store(chain("a", 1), pages(1))
    assert one.longest(chain("a", 1)) == 1


def test_a_disk_that_stalls_makes_a_load_late_and_blocks_nothing(folder: Path) -> None:
    stall, stalled = threading.Event(), threading.Event()

    class Stalls(PageFiles):
        def read(self, path: Path) -> Payload:
            stalled.set()
            assert stall.wait(60)
            return super().read(path)

    tier(folder).store(chain("a", 2), pages(2, 3))
    came = threading.Semaphore(0)
    access = ThreadedAccess(DiskTier(folder, ROOM, SCHEME, files=Stalls()), notify=came.release)
    run = access.look(chain("a", 2))
    assert came.acquire(timeout=60)
    assert run.found == 2
    run.load(0, 2)
    assert stalled.wait(60)
    late = access.look(chain("a", 2))
    assert (run.take(), run.done, late.found) == ([], False, None)
    run.cancel()
    stall.set()
    while late.found is None:
        assert came.acquire(timeout=60)
    assert late.found == 2
    access.close(60)


# ---- a real file system that is full


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_a_smaller_cache(tmp_path: Path) -> None:
    disk_path = tmp_path / "small"
    disk_path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(disk_path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        one = tier(disk_path / "pages", 1 << 24)
        for number in range(200):
            names = chain(f"n{number}-", 2)
            one.store(names, pages(2, number % 200))
            for place, page in enumerate(one.load(names)):
                assert page is None or page.tolist() == [number % 200 + place] * PAGE
        facts = one.facts()
        assert facts.faults["ENOSPC"] > 10
        assert facts.evicted > 50
        assert one.longest(chain("n199-", 2)) > 0, "new pages find room"
        one.close()
    finally:
        subprocess.run(["umount", str(disk_path)], check=True)


WRITER = """
import sys
from pathlib import Path
import numpy as np
from umbel.srt.tiers.disk import DiskTier
folder, limit, mine = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier = DiskTier(folder, limit, b"s" * 32)
tier.open()
rng = np.random.default_rng(mine)
wrong = 0
for _ in range(400):
    number = int(rng.integers(60))
    names = [f"{number}-{place}".encode().ljust(32, b".") for place in range(3)]
    for place, page in enumerate(tier.load(names[: tier.longest(names)])):
        wrong += page is not None and page.tolist() != [number + place] * 1000
    tier.store(names, [np.full(1000, number + place, dtype=np.uint8) for place in range(3)])
facts = tier.facts()
print(wrong, facts.stored, facts.evicted, facts.hits, sum(facts.faults.values()))
"""


@pytest.mark.processes
@pytest.mark.nightly
def test_processes_that_write_to_one_folder_at_once_keep_one_limit(folder: Path) -> None:
    limit = 150 * BLOCK
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(limit), str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, size_of_moving(folder))
    for writer in writers:
        assert writer.stdout is not None
        wrong, stored, evicted, hits, faults = map(int, writer.stdout.read().split())
        writer.stdout.close()
        assert (wrong, faults) == (0, 0)
        assert min(stored, evicted, hits) > 20
    assert size_of(folder) <= limit
    assert most <= limit * 1.05
    assert tier(folder, limit).facts().bytes == size_of(folder)


def size_of_moving(folder: Path) -> int:
    """Counts a folder while others change it: at least what lay there all the time."""
    try:
        return size_of(folder)
    except FileNotFoundError:
        return 0
