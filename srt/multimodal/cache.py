"""The gateway's picture cache: decodes each picture once, numbers it, and sends it to the engines that need it.

    bytes ──SHA-256──▶ source ──decoder──▶ keys ──▶ pictures ──▶ the engine, before the first message that holds one
      (salt, kind, frames, digest)      (salt, key) → number

Decoded pictures are found by a digest of the bytes, computed here. A picture's number belongs to its decoded
pixels, so two files of equal pixels have one number, and no number is given twice. Nothing is shared between salts.

A picture is present as long as its raster is here or at the engine. The least recently used rasters are evicted first.
A picture that no request in flight holds is then forgotten at the engine too; one that is held, and that the engine
has, is forgotten when it is released. With several engines the rasters of held pictures stay: the next request with one
may go to an engine that lacks it.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

import msgspec

from ...lang.errors import EngineError, OverloadedError, ParameterError, UmbelError
from ...lang.prompt import Media
from ..core.batch import PICTURE_BASE
from ..core.config import PictureLimits
from ..core.messages import EngineForget, EnginePicture
from .decode import Answer, Decoded, DecodedPicture, DecodeJob, PictureDecoder, RefusedMedia
from .format import PictureFormat, Raster

LARGE = 1 << 19  # bytes whose digest takes about a millisecond

_Source = tuple[str, str, int, bytes]  # salt, kind, frames, SHA-256 of the bytes
_Identity = tuple[str, bytes]  # salt, key


@dataclass(slots=True, eq=False)
class Picture:
    """A picture that prompts may show. The cache owns it; others read `number` and `tokens`."""

    identity: _Identity
    number: int
    tokens: int
    size: int  # bytes of its raster
    raster: Raster | None  # None: only the engine has it
    text: str = ""  # before it in a prompt
    holders: int = 0  # requests in flight
    engines: set[int] = field(default_factory=set)  # that have it
    doubtful: set[int] = field(default_factory=set)  # of those: they may not have it


@dataclass(slots=True, eq=False)
class PictureInquiry:
    """A wait for pictures. `forget` ends it without an answer."""

    notify: Callable[[tuple[Picture, ...] | UmbelError], None]
    wanted: bool = True

    def forget(self) -> None:
        self.wanted = False


@dataclass(slots=True, eq=False)
class _DecodeWork:
    size: int  # bytes to be decoded
    inquiries: list[PictureInquiry] = field(default_factory=list)

    def wanted(self) -> bool:
        return any(inquiry.wanted for inquiry in self.inquiries)


class Digests(Protocol):
    """Computes SHA-256 of media, one after the other."""

    def compute(self, data: bytes, notify: Callable[[bytes], None]) -> None:
        """Computes a digest; calls `notify` once, now or later on the caller's loop."""


class PictureCache:
    """Keeps decoded pictures by number, and tracks which of them each engine has. Used from one thread.

    Args:
        form: the model's picture format.
        decoder: decodes media.
        digests: computes the digests of media.
        engines: how many there are.
    """

    def __init__(
        self,
        form: PictureFormat,
        decoder: PictureDecoder,
        digests: Digests,
        limits: PictureLimits,
        engines: int = 1,
    ) -> None:
        self.form = form
        self._single = engines == 1
        self._digests = digests
        self.limits = limits
        self._decoder = decoder
        self._sources: OrderedDict[_Source, tuple[_Identity, ...] | RefusedMedia] = OrderedDict()
        self._pictures: OrderedDict[_Identity, Picture] = OrderedDict()  # those present
        self._numbers: OrderedDict[_Identity, int] = OrderedDict()
        self._next_number = 0
        self._works: dict[_Source, _DecodeWork] = {}
        self._waiting_bytes = 0  # of media that are being decoded, or will be
        self._bytes = 0  # of rasters
        self._held_bytes = 0
        self._forgotten: tuple[deque[int], ...] = tuple(deque() for _ in range(engines))  # numbers; it is not told yet
        self._counters: Counter[str] = Counter(
            dict.fromkeys(("pictures_decoded", "picture_hits", "pictures_refused", "pictures_sent"), 0)
        )

    @property
    def counters(self) -> dict[str, int]:
        return {**self._counters, **self._decoder.counters}

    # ------------------------------------------------------------------ from media to pictures

    def find(
        self, media: Media, salt: str, notify: Callable[[tuple[Picture, ...] | UmbelError], None]
    ) -> PictureInquiry:
        """Finds or decodes a picture, or the frames of a clip; calls `notify` once, now or later, unless forgotten.

        The error is ParameterError when the digest is not that of the bytes, OverloadedError when too much waits."""
        inquiry = PictureInquiry(notify)
        size = len(media.data)
        if self._waiting_bytes + size > self.limits.waiting_bytes:
            notify(
                OverloadedError(
                    f"pictures and clips of {self._waiting_bytes} bytes wait to be decoded, and with this one they are "
                    f"more than {self.limits.waiting_bytes}; try again when some have been"
                )
            )
            return inquiry
        self._waiting_bytes += size
        self._digests.compute(media.data, lambda digest: self._identify(media, salt, digest, inquiry))
        return inquiry

    def _identify(self, media: Media, salt: str, digest: bytes, inquiry: PictureInquiry) -> None:
        self._waiting_bytes -= len(media.data)
        if not inquiry.wanted:
            return
        if digest.hex() != media.digest:
            inquiry.notify(
                ParameterError(
                    f"{media.kind}() of {len(media.data)} bytes says that its digest is {media.digest[:16]}…, and it "
                    f"is {digest.hex()[:16]}…; send the SHA-256 of the bytes"
                )
            )
            return
        source = (salt, media.kind, media.num_frames, digest)
        known = self._known(source)
        if known is not None:
            self._counters["picture_hits"] += 1
            inquiry.notify(known)
        elif (work := self._works.get(source)) is not None and work.wanted():
            self._counters["picture_hits"] += 1
            work.inquiries.append(inquiry)
        else:
            self._begin(source, media, inquiry)

    def _known(self, source: _Source) -> tuple[Picture, ...] | UmbelError | None:
        """Returns the kept answer; None when the source has to be decoded, perhaps again."""
        found = self._sources.get(source)
        if found is None:
            return None
        self._sources.move_to_end(source)
        if isinstance(found, RefusedMedia):
            return found.error()
        pictures = tuple(self._pictures[identity] for identity in found if identity in self._pictures)
        if len(pictures) < len(found):
            return None
        for picture in pictures:
            self._pictures.move_to_end(picture.identity)
        return self._admitted(pictures)

    def _begin(self, source: _Source, media: Media, inquiry: PictureInquiry) -> None:
        size = len(media.data)
        work = self._works[source] = _DecodeWork(size, [inquiry])
        self._waiting_bytes += size
        job = DecodeJob(
            "video" if media.kind == "video" else "image", media.data, media.num_frames, self.form, self.limits
        )
        self._decoder.decode(job, lambda answer: self._learn(source, work, answer), work.wanted)

    def _learn(self, source: _Source, work: _DecodeWork, answer: Answer | None) -> None:
        self._waiting_bytes -= work.size
        if self._works.get(source) is work:
            del self._works[source]
        salt = source[0]
        match answer:
            case None:  # no request waited any more
                return
            case Decoded(decoded):
                self._counters["pictures_decoded"] += len(decoded)
                self._remember(source, tuple(self._put(salt, picture).identity for picture in decoded))
            case RefusedMedia():
                self._counters["pictures_refused"] += 1
                self._remember(source, answer)
            case _:
                self._counters["pictures_refused"] += 1
        for inquiry in work.inquiries:
            if inquiry.wanted:
                inquiry.notify(self._told(salt, answer))
        self._trim()

    def _told(self, salt: str, answer: Answer) -> tuple[Picture, ...] | UmbelError:
        """Makes the answer for one waiting request; an earlier one may have released the pictures already."""
        match answer:
            case Decoded(decoded):
                return self._admitted(tuple(self._put(salt, picture) for picture in decoded))
            case RefusedMedia():
                return answer.error()
            case _:
                return answer

    def _remember(self, source: _Source, found: tuple[_Identity, ...] | RefusedMedia) -> None:
        self._sources[source] = found
        self._sources.move_to_end(source)
        if len(self._sources) > self.limits.cache_sources:
            self._sources.popitem(last=False)

    def _put(self, salt: str, decoded: DecodedPicture) -> Picture:
        """Adds a decoded picture, or returns the equal one that is present."""
        identity, raster = (salt, decoded.key), decoded.raster
        picture = self._pictures.get(identity)
        if picture is None:
            size = len(raster.pixels)
            number = self._number(identity)
            picture = Picture(identity, number, raster.tokens, size, None, decoded.text)
            self._pictures[identity] = picture
        if picture.raster is None:
            picture.raster = raster
            self._bytes += picture.size
        self._pictures.move_to_end(identity)
        return picture

    def _number(self, identity: _Identity) -> int:
        """Returns the number that the picture had before, or a new one."""
        number = self._numbers.get(identity)
        if number is None:
            assert self._next_number < PICTURE_BASE, "a thousand pictures a second would take twelve days"
            number, self._next_number = self._next_number, self._next_number + 1
        self._numbers[identity] = number
        self._numbers.move_to_end(identity)
        if len(self._numbers) > self.limits.cache_numbers:
            self._numbers.popitem(last=False)
        return number

    def _admitted(self, pictures: tuple[Picture, ...]) -> tuple[Picture, ...] | OverloadedError:
        """Returns the pictures, or an error if requests in flight would hold too much."""
        more = sum(picture.size for picture in set(pictures) if not picture.holders)
        if not more or self._held_bytes + more <= self.limits.held_bytes:
            return pictures
        return OverloadedError(
            f"the requests in flight hold pictures of {self._held_bytes} bytes, and with these more than "
            f"{self.limits.held_bytes}; try again when some have ended"
        )

    # ------------------------------------------------------------------ who needs them

    def hold(self, pictures: Sequence[Picture]) -> None:
        """Keeps pictures for a request, until `release`."""
        for picture in pictures:
            if not picture.holders:
                self._held_bytes += picture.size
            picture.holders += 1

    def release(self, pictures: Sequence[Picture]) -> None:
        for picture in pictures:
            picture.holders -= 1
            assert picture.holders >= 0, "let go more often than held"
            if not picture.holders:
                self._held_bytes -= picture.size
                if picture.raster is None and self._pictures.get(picture.identity) is picture:
                    self._fall(picture)
        self._trim()

    def _trim(self) -> None:
        """Evicts rasters beyond the limit, except those of held pictures that the engine does not have."""
        if self._bytes <= self.limits.cache_bytes:
            return
        for picture in tuple(self._pictures.values()):
            if picture.raster is None or (picture.holders and not (self._single and picture.engines)):
                continue
            picture.raster = None
            self._bytes -= picture.size
            if not picture.holders:
                self._fall(picture)
            if self._bytes <= self.limits.cache_bytes:
                return

    def _fall(self, picture: Picture) -> None:
        """Removes a picture, and has the engines forget it."""
        del self._pictures[picture.identity]
        for engine in picture.engines:
            self._forgotten[engine].append(picture.number)
        picture.engines.clear()

    # ------------------------------------------------------------------ the engines

    def upload(
        self, pictures: Sequence[Picture], send: Callable[[EnginePicture | EngineForget], None], engine: int = 0
    ) -> None:
        """Sends an engine the pictures it lacks, before a message that uses them.

        Raises:
            EngineError: the engine that had one is gone, and its raster is too.
        """
        self.send_forgotten(send, engine)  # first: a picture that comes back has the number of one that was forgotten
        for picture in pictures:
            if engine in picture.engines and not (engine in picture.doubtful and picture.raster is not None):
                continue
            if picture.raster is None:
                raise EngineError("the engine that had the request's pictures died; run it again")
            raster = msgspec.structs.asdict(picture.raster)
            send(EnginePicture(number=picture.number, digest=picture.identity[1], **raster))
            picture.engines.add(engine)
            picture.doubtful.discard(engine)
            self._counters["pictures_sent"] += 1

    def doubt(self, pictures: Sequence[Picture], engine: int = 0) -> None:
        """Sends pictures again next time: the engine failed a request with them, perhaps because it lacks them."""
        for picture in pictures:
            picture.doubtful.add(engine)

    def send_forgotten(self, send: Callable[[EngineForget], None], engine: int = 0) -> None:
        """Tells an engine which pictures no later message uses."""
        forgotten = self._forgotten[engine]
        while forgotten:
            send(EngineForget(forgotten[0]))
            forgotten.popleft()

    def engine_lost(self, engine: int = 0) -> None:
        """Notes that an engine has lost all pictures: each is sent again when it is next needed."""
        self._forgotten[engine].clear()
        for picture in tuple(self._pictures.values()):
            picture.engines.discard(engine)
            picture.doubtful.discard(engine)
            if picture.raster is None:
                del self._pictures[picture.identity]


class InlineDigests:
    """Computes digests in the caller's thread."""

    def compute(self, data: bytes, notify: Callable[[bytes], None]) -> None:
        notify(sha256(data).digest())


class ThreadedDigests:
    """Computes digests on the running loop, large ones in a thread.

    Args:
        after: called after each answer of the thread, to flush the messages that it led to.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="umbel-digests")
        self._waiting: set[asyncio.Future[bytes]] = set()

    def compute(self, data: bytes, notify: Callable[[bytes], None]) -> None:
        if len(data) < LARGE:
            notify(sha256(data).digest())
            return

        def hear(future: asyncio.Future[bytes]) -> None:
            self._waiting.discard(future)
            notify(future.result())
            self._after()

        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: sha256(data).digest())
        self._waiting.add(future)
        future.add_done_callback(hear)
