"""Explicit caching: marks in a prompt keep its beginning for a time, and the answer says what they read and created.

    prompt     persona │ knowledge │ dialogue │ question
                       1           2          3            marks, each with a time to live (TTL)

A mark covers the tokens before it that stay the same whatever follows. Where the same tokens were marked before, they
are read, which restarts their TTL; otherwise they are created: kept from eviction until the TTL ends. What is kept
belongs to the salt of the request, and outlives its connection. Beyond the backend's share for it nothing is created.

A prefix may also be kept under a name (`protocol.CreateCache`), which its caller looks up, extends and deletes.

`Usage.cached_tokens` counts what a request did not have to compute, with marks or without. The figures here count what
marks promise, `Usage.cache_read_tokens` and `Usage.cache_write_tokens` in sum: they may differ from it when something
else has left tokens in the cache, or has taken them.
"""

from typing import Annotated

import msgspec

from .prompt import MAX_PARTS

COUNTED_MARKS = 4  # of a request: the last ones; the others neither read nor create
LOOK_BACK = 20  # blocks
CACHE_MINIMUM = 1024  # tokens
CACHE_SECONDS = 300.0
HOUR = 3_600.0  # seconds from which providers charge more for what a mark creates


class CacheMark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A place in a prompt, after its first `place` parts, and the TTL in seconds of what lies before it."""

    place: int
    ttl: float = CACHE_SECONDS


class Caching(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The marks of a prompt.

    Attributes:
        marks: in the order of their places, each place once. The last four count, if they cover enough tokens.
        blocks: places at which blocks of content end, ascending. Marks are such places too.
        look_back: a mark reads what an earlier request has marked up to so many blocks before it; None: anywhere
            before it.
        minimum: tokens, at least 1; a mark that covers fewer does not count, so it neither reads nor creates.
    """

    marks: Annotated[tuple[CacheMark, ...], msgspec.Meta(max_length=MAX_PARTS)]
    blocks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    look_back: int | None = LOOK_BACK
    minimum: int = CACHE_MINIMUM


class MarkUsage(msgspec.Struct, frozen=True, array_like=True):
    """The figures of one mark. `read` and `created` count the tokens between the mark before and this one.

    Attributes:
        length: tokens that it covers, from the beginning of the prompt.
        read: tokens that were kept already.
        created: tokens that are kept from now on.
        ttl: seconds, of what was created.
    """

    length: int
    read: int
    created: int
    ttl: float


class CacheObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prefix that is kept under a name.

    Attributes:
        tokens: that are kept.
        ttl: seconds; a hit restarts them.
        seconds_left: of the TTL.
        age: seconds since it was created.
        record: what its creator has given to be kept with it; b"" in lists.
    """

    name: str
    tokens: int
    ttl: float
    seconds_left: float
    age: float
    record: bytes = b""


class CachingUsage(msgspec.Struct, frozen=True):
    """The figures of all marks of a request that count, in order."""

    marks: tuple[MarkUsage, ...] = ()

    @property
    def read(self) -> int:
        """Tokens that all marks have read."""
        return sum(mark.read for mark in self.marks)

    @property
    def created(self) -> int:
        """Tokens that all marks have created."""
        return sum(mark.created for mark in self.marks)

    @property
    def long_created(self) -> int:
        """Tokens that marks have created for an hour or longer."""
        return sum(mark.created for mark in self.marks if mark.ttl >= HOUR)


class Begun(msgspec.Struct, frozen=True):
    """The figures of a request whose prompt is computed.

    Attributes:
        prompt_tokens, cached_tokens: as in `Usage`.
        caching: what its marks have read and created; without marks, of none.
    """

    prompt_tokens: int
    cached_tokens: int
    caching: CachingUsage = CachingUsage()
