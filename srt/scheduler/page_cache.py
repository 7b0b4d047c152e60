"""Connects the pool with the tiers of the cache: what is saved, when, and what is loaded for a request.

The tree knows every token on the device. Tiers hold pages of 64 tokens, by name. Two places lead from one to the other:

    saved     pages of a running request that were used before, some in each step; those that are evicted, before their
              slots are freed; at the end of the engine what is left of both
    loaded    when a request is admitted, the pages after its match, see page_loads.py

A page is worth saving when a second request uses it, or a pin holds it. Uses are counted by name, so they outlive
the eviction of the page. All pages before such a page are used at least as often: pages are saved head first.

Layers with a window that have slots of their own keep the last tokens of a sequence only. Their part of a page has a
name and a payload of its own, and is saved where all tokens of the page still have it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from ...lang.prompt import adapter_of
from ..cache.radix_cache import RadixNode, ascend
from ..cache.slot_allocator import IntegrityError, Slots
from ..cache.window_slots import WindowSlots
from ..core.batch import PagePart, PagePort, PictureStore, SavedPages
from ..core.instruments import Clock, Counters
from ..core.messages import TierRooms
from ..tiers.access import TierAccess
from ..tiers.memory import HostMemory
from ..tiers.names import PAGE_TOKENS, PageScheme, page_names
from ..tiers.rates import Rates
from .page_loads import PageLoad, PageLoads
from .request import Phase, Request

_PAGES_A_STEP = 4  # saved of all requests together: copying a page takes about as long as computing a token
_PAGES_AT_END = 16  # of a request that ends, or of a leaf that is evicted
_MOST_KNOWN = 1 << 16  # pages whose uses are known
_PAGE_OVERHEAD = 3 * 4096  # bytes of a file's header, its last block and its folders
_FLUSHED_BYTES = 64 << 20  # given to the tiers when the engine ends, before it waits for them
_FLUSH_SHARE = 0.8  # of the time for the end: the rest is for what the tiers were given last

_ALL = (PagePart.TOKENS,)  # where windows have no slots of their own

_SEEN, _WANTED, _TOKENS, _WINDOWS = 1, 2, 4, 8  # used once · worth saving · saved: TOKENS and WINDOWS of PagePart


@dataclass(frozen=True, slots=True)
class PageTiers:
    """The tiers of one engine, fastest first, and what names its pages.

    Attributes:
        adapters: name → digest of the adapter's weights.
        measured: steps are timed, and a tier that is slower than computing is not used.
    """

    scheme: PageScheme
    accesses: tuple[TierAccess, ...]
    adapters: Mapping[str, bytes] = field(default_factory=dict)
    measured: bool = True

    def settle(self, seconds: float) -> None:
        """Waits until the tiers have stored what they were given, for at most `seconds`."""
        for access in self.accesses:
            access.settle(seconds)

    def close(self, seconds: float) -> None:
        """Ends the tiers, which store what waits for at most `seconds` each."""
        for access in self.accesses:
            access.close(seconds)

    @property
    def room(self) -> int:
        """Bytes that tiers which outlive the engine can take without an eviction. Those of a server are its own."""
        facts = [access.facts() for access in self.accesses if access.name != HostMemory.name]
        return min((each.limit - each.bytes for each in facts if each.limit), default=0)


@dataclass(slots=True, eq=False)
class RequestPages:
    """The pages of one request.

    Attributes:
        names: of its whole pages, as far as they were needed.
        counted: pages whose use by this request was counted.
        saved: pages from the head on that need not be looked at for saving.
        load: what it waits for.
    """

    root: bytes
    names: list[bytes]
    counted: int = 0
    saved: int = 0
    load: PageLoad | None = None


class PageLedger:
    """Counts uses of pages by name, and knows which were saved. The least recently used pages are forgotten."""

    def __init__(self) -> None:
        self._flags: OrderedDict[bytes, int] = OrderedDict()
        self.unsaved = 0  # pages that are worth saving, and were not

    def use(self, names: Sequence[bytes]) -> None:
        """Counts a use of each page, the head as the latest."""
        for name in reversed(names):
            flags = self._flags.get(name, 0)
            self._set(name, flags | (_WANTED if flags & _SEEN else _SEEN))
            self._flags.move_to_end(name)
        while len(self._flags) > _MOST_KNOWN:
            self.drop([next(iter(self._flags))])

    def add(self, names: Iterable[bytes], flags: int) -> None:
        for name in names:
            self._set(name, self._flags.get(name, 0) | flags)

    def remove(self, names: Iterable[bytes], flags: int) -> None:
        for name in names:
            if name in self._flags:
                self._set(name, self._flags[name] & ~flags)

    def lacks(self, name: bytes, flag: int) -> bool:
        """Returns whether a page is worth saving, and a part of it was not."""
        flags = self._flags.get(name, 0)
        return bool(flags & _WANTED) and not flags & flag

    def promote(self, names: Iterable[bytes]) -> int:
        """Makes pages worth saving that were used once → the number of those that were not saved."""
        fresh = [name for name in names if self._flags.get(name, 0) & (_SEEN | _WANTED | _TOKENS) == _SEEN]
        self.add(fresh, _WANTED)
        return len(fresh)

    def drop(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._set(name, 0)
            self._flags.pop(name, None)

    def _set(self, name: bytes, flags: int) -> None:
        unsaved = (_WANTED, _WANTED | _SEEN)
        before = self._flags.get(name, 0) & ~_WINDOWS
        self.unsaved += (flags & ~_WINDOWS in unsaved) - (before in unsaved)
        self._flags[name] = flags


def window_name(name: bytes) -> bytes:
    """Returns the name of a page's window layers."""
    return sha256(b"umbel windows" + name).digest()


@dataclass(frozen=True, slots=True, eq=False)
class _Saving:
    """Pages that are being copied: names from the head on; the copies are those of the last ones."""

    names: list[bytes]
    copies: SavedPages
    part: PagePart


class PageCache:
    """Saves and loads pages. KVManager calls it, which owns pool and tree.

    Args:
        port: of the runner.
        windows: the slots of window layers; None: they have none of their own.
        written: returns whether the keys in slots are there for a copy that begins now.
    """

    def __init__(
        self,
        tiers: PageTiers,
        port: PagePort,
        windows: WindowSlots | None,
        pictures: PictureStore | None,
        counters: Counters,
        clock: Clock,
        written: Callable[[Slots], bool],
    ) -> None:
        self.port = port
        self.measures = tiers.measured  # steps are timed
        self.active = True  # pages are saved and loaded; not of requests that only measure
        self._written = written
        self.tiers = tiers
        self._windows = windows
        self._pictures = pictures
        self._counters = counters
        window_tokens = 0 if windows is None else windows.reach - 1
        self._reach = -(-window_tokens // PAGE_TOKENS)  # pages
        self.loads = PageLoads(
            tiers.accesses,
            Rates(PAGE_TOKENS, {access.name: access.facts for access in tiers.accesses}, clock),
            counters,
            clock,
            page_tokens=PAGE_TOKENS,
            token_bytes=PAGE_TOKENS * port.bytes_per_token(PagePart.TOKENS),
            window_bytes=0 if windows is None else PAGE_TOKENS * port.bytes_per_token(PagePart.WINDOWS),
            gone=self._evicted_by_tiers,
        )
        self._page_bytes = PAGE_TOKENS * sum(map(port.bytes_per_token, PagePart))
        self._clock = clock
        self._ledger = PageLedger()
        self._open: dict[int, Request] = {}  # running requests, by number
        self._saving: list[_Saving] = []

    # ------------------------------------------------------------------------------------------ a request

    @property
    def rooms(self) -> TierRooms:
        """Returns what the tiers hold at most. A store whose server decides counts as what a PageLedger knows."""
        tokens = {"host": 0, "lasting": 0}
        for access in self.tiers.accesses:
            limit, name = access.facts().limit, "host" if access.name == HostMemory.name else "lasting"
            pages = limit // self._page_bytes if limit else _MOST_KNOWN
            tokens[name] = max(tokens[name], PAGE_TOKENS * pages)
        return TierRooms(**tokens, page=PAGE_TOKENS)

    def admit(self, request: Request, usable: int) -> PageLoad | None:
        """Counts the use of a prompt's pages, and looks for those that are not on the device.

        Returns the load that brings them. It may have ended already.

        Args:
            usable: tokens that need not be computed as it is.
        """
        self._name(request, request.length)
        pages = request.pages
        assert pages is not None, "it was named"
        self._open[request.number] = request
        pages.saved = 0
        first = request.kv_length // PAGE_TOKENS
        most = min(request.first_logit_row // PAGE_TOKENS, len(pages.names))
        names = pages.names[first:most]
        gain = (first + len(names)) * PAGE_TOKENS - usable
        if gain < PAGE_TOKENS:
            return None
        load = self.loads.join(request, names[0]) if names else None
        if load is None:
            windows = [] if self._windows is None else [window_name(name) for name in pages.names[:most]]
            present = self._window_pages(request, max(0, first - self._reach), first)
            load = self.loads.begin(request, first, names, windows, reach=self._reach, present=present, tokens=gain)
        if load is not None and not load.ended:
            pages.load = load
        return load

    def _window_pages(self, request: Request, first: int, end: int) -> frozenset[int]:
        """Returns the pages of [first, end) that have all their keys in window layers."""
        if self._windows is None:
            return frozenset()
        slots = request.slots(first * PAGE_TOKENS, end * PAGE_TOKENS)
        whole = (self._windows.of(slots) != 0).reshape(end - first, PAGE_TOKENS).all(axis=1)
        return frozenset((first + np.flatnonzero(whole)).tolist())

    def arrived(self, load: PageLoad, request: Request, first: int, end: int) -> None:
        """Notes that tokens [first, end) of a request came with a load: other tiers than theirs get the pages."""
        pages = request.pages
        assert pages is not None, "it waited for the load"
        request.loaded = request.loaded or {}
        for index, medium in enumerate(load.media):
            page = load.first + index
            tokens = min(end, (page + 1) * PAGE_TOKENS) - max(first, page * PAGE_TOKENS)
            if tokens > 0:
                request.loaded[medium] = request.loaded.get(medium, 0) + tokens
                self._counters.add_loaded(medium, tokens)
        fastest = self.tiers.accesses[0]
        if any(medium != fastest.name for medium in load.media):
            fastest.store(pages.names[: load.first + len(load.payloads)], load.payloads)
        self._ledger.add(pages.names[load.first : load.first + len(load.payloads)], _TOKENS)
        for page, payload in load.windows.items():
            fastest.store([window_name(pages.names[page])], [payload])
            self._ledger.add([pages.names[page]], _WINDOWS)

    def end(self, request: Request) -> None:
        """Counts the pages that a request has computed, and saves some that were used before. It is still open."""
        pages = request.pages
        if pages is None or request.number not in self._open:
            return
        if request.kv_length and request.computed:
            self._name(request, min(request.computed, request.kv_length, request.length))
            self._save(request, _PAGES_AT_END)

    def leave(self, request: Request) -> None:
        """Forgets a request that has no slots any more."""
        self._open.pop(request.number, None)
        pages = request.pages
        if pages is not None and pages.load is not None:
            self.loads.leave(request, pages.load)
            pages.load = None

    def want(self, request: Request, length: int) -> None:
        """Notes that a pin holds the first tokens of a request."""
        pages = request.pages
        if pages is not None:
            self._ledger.add(pages.names[: length // PAGE_TOKENS], _WANTED)
            pages.saved = 0

    def distrust(self, request: Request) -> None:
        """Removes the pages of a request, whose keys may be wrong, from all tiers."""
        if request.pages is None:
            return
        self._name(request, request.length)
        names = request.pages.names
        self._ledger.drop(names)
        wrong = {*names}
        self._saving = [saving for saving in self._saving if wrong.isdisjoint(saving.names)]
        windows = [window_name(name) for name in names] if self._windows is not None else []
        for access in self.tiers.accesses:
            access.forget([*names, *windows])

    def _name(self, request: Request, length: int) -> None:
        """Names the whole pages of the first tokens, and counts a use of those that are new."""
        pages = request.pages
        if pages is None:
            schedule = request.schedule
            first = next((name for place, name in schedule.private if not place), schedule.salt)
            pages = request.pages = RequestPages(self._root(schedule.salt, first), [])
        known = pages.names
        if len(known) < length // PAGE_TOKENS:
            pages.names = page_names(
                pages.root,
                request.tokens[:length],
                borders=request.schedule.private,
                digest_of=self._digest,
                known=known,
            )
        whole = min(len(pages.names), length // PAGE_TOKENS)
        self._ledger.use(pages.names[pages.counted : whole])
        pages.counted = max(pages.counted, whole)

    def _root(self, salt: str, namespace: str) -> bytes:
        """Returns the name before the first page. An adapter computes all of a sequence, so its first namespace has it.

        Args:
            namespace: in which the first token lies.
        """
        adapter = adapter_of(namespace)
        return self.tiers.scheme.root(salt, self.tiers.adapters[adapter] if adapter else b"")

    def _digest(self, number: int) -> bytes | None:
        return None if self._pictures is None else self._pictures.digest(number)

    def _evicted_by_tiers(self, names: Sequence[bytes]) -> None:
        """Notes that no tier has these pages any more, so that they are saved again when they are computed."""
        self._ledger.remove(names, _TOKENS | _WINDOWS)

    # ------------------------------------------------------------------------------------------ saving

    def after_step(self) -> None:
        """Gives the tiers what was copied before, and begins to copy some pages of running requests."""
        self._deliver()
        left = _PAGES_A_STEP
        if self._ledger.unsaved or self._windows is not None:
            for request in self._open.values():
                if left <= 0:
                    break
                left -= self._save(request, left)

    def before_eviction(self, leaf: RadixNode) -> None:
        """Saves pages that end in a leaf that is about to be evicted, with those before them that were not saved."""
        if not self._ledger.unsaved:
            return
        length = sum(len(node.tokens) for node in ascend(leaf))
        if length // PAGE_TOKENS == (length - len(leaf.tokens)) // PAGE_TOKENS:
            return
        names, slots = self._path(leaf)
        self._save_pages(names, slots, 0, _PAGES_AT_END)

    def _path(self, leaf: RadixNode) -> tuple[list[bytes], Slots]:
        """Returns the names of the whole pages from the root to the end of a leaf, and the slots of its tokens."""
        path = list(ascend(leaf))[::-1]
        tokens = np.concatenate([node.tokens for node in path])
        slots = np.concatenate([node.slots for node in path])
        starts = np.cumsum([0, *(len(node.tokens) for node in path)]).tolist()
        borders = tuple((start, node.salt) for start, node in zip(starts, path, strict=False) if node.opens)
        root = self._root(leaf.root.salt, path[0].salt)
        return page_names(root, tokens, borders=borders, digest_of=self._digest), slots

    def flush(self, leaves: Iterable[RadixNode], seconds: float) -> None:
        """Saves what is left of the tree, when the engine ends: head first, the most recently used leaves first.

        First the pages that are worth it at any time. Then those that were used once, as far as the folder has room
        for them: another page is not evicted for one of them.
        """
        until = self._clock.now() + _FLUSH_SHARE * seconds
        recent = sorted(leaves, key=lambda leaf: -leaf.last_use)
        self._deliver()
        if self._ledger.unsaved or self._windows is not None:
            self._flush_paths(recent, until)
        self.tiers.settle(max(0.0, until - self._clock.now()))
        page_bytes = PAGE_TOKENS * sum(map(self.port.bytes_per_token, PagePart if self._windows is not None else _ALL))
        room = self.tiers.room // max(1, page_bytes + _PAGE_OVERHEAD)
        if room > 0:
            self._flush_paths(recent, until, room)

    def _flush_paths(self, leaves: Sequence[RadixNode], until: float, once: int = 0) -> None:
        """Saves pages of leaves until a time on the clock.

        Args:
            once: pages that may be saved although they were used once only.
        """
        given = 0  # bytes
        token_bytes = PAGE_TOKENS * self.port.bytes_per_token(PagePart.TOKENS)
        for leaf in leaves:
            names, slots = self._path(leaf)
            page = 0
            while page < len(names) and self._clock.now() < until:
                if once > 0:
                    once -= self._ledger.promote(names[page : page + min(once, _PAGES_AT_END)])
                before = page
                count, page = self._save_pages(names, slots, page, _PAGES_AT_END)
                self._deliver()
                given += count * token_bytes
                if given >= _FLUSHED_BYTES:
                    self.tiers.settle(max(0.0, until - self._clock.now()))
                    given = 0
                if page == before:
                    break  # keys that are not there

    def crossings(self) -> list[str]:
        """Says of each tier from where on loading pays, by the rates of now."""
        size = PAGE_TOKENS * sum(map(self.port.bytes_per_token, PagePart if self._windows is not None else _ALL))
        return self.loads.rates.lines([access.name for access in self.tiers.accesses], size)

    def facts(self) -> dict[str, str | int | float]:
        """Returns the state of each tier, for people."""
        found: dict[str, str | int | float] = {}
        for access, crossing in zip(self.tiers.accesses, self.crossings(), strict=True):
            facts, name = access.facts(), f"{access.name}_cache"
            found |= {
                f"{name}_pages": facts.pages,
                f"{name}_bytes": facts.bytes,
                f"{name}_hits": facts.hits,
                f"{name}_misses": facts.misses,
                f"{name}_stored": facts.stored,
                f"{name}_evicted": facts.evicted,
                f"{name}_dropped": facts.dropped,
                f"{name}_faults": sum(facts.faults.values()),
                name: crossing,
            }
        return found

    def check(self, running: Iterable[Request]) -> None:
        """Checks that those that wait for a load are known to it, and hold nothing but their match.

        Raises:
            IntegrityError: says what contradicts what.
        """
        waiting = {request.number: request for load in self.loads.going for request in load.waiting.values()}
        loading = {request.number: request for request in running if request.phase is Phase.LOADING}
        if waiting != loading:
            raise IntegrityError(f"{len(loading)} requests wait for pages, and loads have {len(waiting)} requests")
        if any(len(request.private_slots) for request in loading.values()):
            raise IntegrityError("a request that waits for pages has slots of its own")

    def clear(self) -> None:
        """Drops what is being copied: the pool's content was given up."""
        self._saving.clear()

    def _save(self, request: Request, most: int) -> int:
        """Begins to copy pages of a request that are worth it → their number."""
        pages = request.pages
        assert pages is not None, "it is open"
        whole = min(request.computed, request.kv_length) // PAGE_TOKENS
        end = min(whole, len(pages.names))
        if pages.saved >= end:
            return 0
        slots = request.slots(0, end * PAGE_TOKENS)
        saved, pages.saved = self._save_pages(pages.names[:end], slots, pages.saved, most)
        return saved

    def _save_pages(self, names: list[bytes], slots: Slots, first: int, most: int) -> tuple[int, int]:
        """Begins to copy up to `most` pages → their number, and the page to go on with."""
        tokens: list[int] = []
        windows: list[int] = []
        page = first
        while page < len(names) and max(len(tokens), len(windows)) < most:
            name = names[page]
            of_page = slots[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            if not self._written(of_page):
                break
            if self._ledger.lacks(name, _TOKENS):
                tokens.append(page)
            of_windows = self._windows is not None and self._ledger.lacks(name, _WINDOWS)
            if of_windows and self._windows is not None and self._windows.of(of_page).all():
                windows.append(page)
            page += 1
        by_page = slots[: len(names) * PAGE_TOKENS].reshape(-1, PAGE_TOKENS)
        for run in _runs(tokens):
            copies = self.port.save(by_page[run.start : run.stop], PagePart.TOKENS)
            self._saving.append(_Saving(names[: run.stop], copies, PagePart.TOKENS))
            self._ledger.add(names[run.start : run.stop], _TOKENS)
        if windows:
            assert self._windows is not None, "only then are there such pages"
            copies = self.port.save(self._windows.of(by_page[windows]), PagePart.WINDOWS)
            self._saving.append(_Saving([names[page] for page in windows], copies, PagePart.WINDOWS))
            self._ledger.add([names[page] for page in windows], _WINDOWS)
        self._counters.saved_pages += len(tokens)
        self._counters.saved_window_pages += len(windows)
        return max(len(tokens), len(windows)), page

    def _deliver(self) -> None:
        """Gives the tiers the copies that were begun before: they are done with the step that followed them."""
        savings, self._saving = self._saving, []
        for saving in savings:
            try:
                payloads = saving.copies.result()
            except Exception:
                self._counters.save_failures += 1
                self._ledger.drop(saving.names)
                continue
            dropped = sum(access.facts().dropped for access in self.tiers.accesses)
            for access in self.tiers.accesses:
                if saving.part is PagePart.TOKENS:
                    access.store(saving.names, payloads)
                else:
                    for name, payload in zip(saving.names, payloads, strict=True):
                        access.store([window_name(name)], [payload])
            if sum(access.facts().dropped for access in self.tiers.accesses) > dropped:
                flag = _TOKENS if saving.part is PagePart.TOKENS else _WINDOWS
                self._ledger.remove(saving.names[-len(payloads) :], flag)  # tried again when it is used again


def _runs(pages: Sequence[int]) -> Iterable[range]:
    """Yields consecutive pages together."""
    first = 0
    for index, page in enumerate(pages):
        if index + 1 == len(pages) or pages[index + 1] != page + 1:
            yield range(pages[first], page + 1)
            first = index + 1
