"""`/v1/caches`: the beginning of conversations, kept under a name for a time.

    POST   /v1/caches          {"name": "manual", "model": …, "messages": […], "ttl": 600}
    GET    /v1/caches/manual   tokens, and the seconds that are left
    PATCH  /v1/caches/manual   {"ttl": 3600} begins now
    DELETE /v1/caches/manual

A chat completion with `"cached_content": "manual"` goes on after it: the messages of the cache come first, and the
usage says that they were read. Names and what they keep belong to the salt of the request.
"""

from typing import Annotated, Any, Literal

import msgspec

from ..lang.caching import CACHE_SECONDS, CacheObject
from ..lang.protocol import CreateCache, DeleteCache, ExtendCache, Origin, ReadCaches
from ..lang.tool_calls import call_format_of
from .bodies import Name, Salt, UmbelBody, UmbelFields, wrong
from .errors import HttpError
from .http import Asked, Endpoint, Reply
from .limits import MAX_MESSAGES, MAX_TTL
from .openai.chat import ChatMessage, KeptTurns, ask_caches, marks_of, message_of, tools_of
from .openai.fields import TokenUsage, token_usage
from .tokens import tokenizing

CacheName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
# What ends within a second may have ended before it is created.
Seconds = Annotated[float, msgspec.Meta(ge=1, le=MAX_TTL)] | Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,5}s$")]


class CacheBody(KeptTurns, frozen=True, kw_only=True):
    """Asks to keep the beginning of conversations.

    Attributes:
        name: new to the caller; without one it is made up.
        ttl: seconds, as a number or as "600s"; each use begins them anew.
    """

    told_as = {"prompt": "messages"}

    model: Name
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    name: CacheName | None = None
    ttl: Seconds = CACHE_SECONDS
    cache_salt: Salt | None = None
    umbel: UmbelFields | None = None


class ExtendBody(UmbelBody, frozen=True):
    """Gives a cache another time to live, which begins now."""

    ttl: Seconds
    cache_salt: Salt | None = None


class CacheEntry(msgspec.Struct, frozen=True):
    """A cache. `seconds_left` ends when nothing uses it; `usage` is that of its creation."""

    name: str
    tokens: int
    ttl: float
    seconds_left: float
    age: float
    object: Literal["cache"] = "cache"
    usage: TokenUsage | msgspec.UnsetType = msgspec.UNSET


class CacheList(msgspec.Struct, frozen=True):
    """The caches of a caller, without their messages."""

    data: list[CacheEntry]
    object: Literal["list"] = "list"


class CacheDeleted(msgspec.Struct, frozen=True):
    """The answer to a deletion."""

    name: str
    object: Literal["cache"] = "cache"
    deleted: Literal[True] = True


def _entry(cache: CacheObject, usage: TokenUsage | msgspec.UnsetType = msgspec.UNSET) -> CacheEntry:
    return CacheEntry(cache.name, cache.tokens, cache.ttl, cache.seconds_left, cache.age, usage=usage)


def _seconds(ttl: float | str) -> float:
    """Reads a time to live. Raises HttpError for a text out of range."""
    seconds = float(ttl[:-1]) if isinstance(ttl, str) else ttl
    if not 1 <= seconds <= MAX_TTL:
        raise wrong("ttl", f"write 1 to {MAX_TTL:g} seconds")
    return seconds


def _missing(name: str) -> HttpError:
    return HttpError(404, f"no cache {name[:64]!r}; its time is over, or it was never created", "cache_not_found")


async def create(asked: Asked[CacheBody]) -> Reply:
    """Keeps the beginning of conversations under a name."""
    body, front = asked.body, asked.front
    if front.model(body.model).program:
        raise wrong("model", "it is a program, which keeps no conversation")
    template = front.template
    messages = [
        message_of(message, f"messages[{number}]", asked.warnings) for number, message in enumerate(body.messages)
    ]
    conversation = await template.conversation_away(
        front.ignored.dropped(messages),
        tools_of(body.tools),
        call_format=call_format_of(template.source, tokenizing(front).vocabulary.control),
        generation=False,
    )
    place = marks_of(body.messages, body.tools).last(conversation)
    request = CreateCache(
        asked.id,
        body.name or f"cache-{asked.id}",
        conversation.parts[:place],
        _seconds(body.ttl),
        front.limits.cache_minimum,
        msgspec.json.encode(KeptTurns(messages=body.messages, tools=body.tools)),
        front.origin(asked.caller, body.umbel, body.cache_salt, body.model),
    )
    with front.open():
        made = await ask_caches(front, request)
    front.note(made.usage)
    return Reply(_entry(made.caches[0], token_usage(made.usage)), 201)


async def list_caches(asked: Asked[None]) -> Reply:
    """Lists the caches of the caller, by the query's `cache_salt` if there is one."""
    found = await ask_caches(asked.front, ReadCaches(asked.id, origin=_origin(asked)))
    return Reply(CacheList([_entry(cache) for cache in found.caches]))


async def look_up(asked: Asked[None]) -> Reply:
    """Describes one cache; this is no use of it."""
    name = asked.path["name"]
    found = await ask_caches(asked.front, ReadCaches(asked.id, name, _origin(asked)))
    if not found.caches:
        raise _missing(name)
    return Reply(_entry(found.caches[0]))


async def extend(asked: Asked[ExtendBody]) -> Reply:
    """Gives a cache another time to live."""
    name, front = asked.path["name"], asked.front
    origin = front.origin(asked.caller, asked.body.umbel, asked.body.cache_salt)
    found = await ask_caches(front, ExtendCache(asked.id, name, _seconds(asked.body.ttl), origin))
    if not found.caches:
        raise _missing(name)
    return Reply(_entry(found.caches[0]))


async def delete(asked: Asked[None]) -> Reply:
    """Ends a cache."""
    name = asked.path["name"]
    found = await ask_caches(asked.front, DeleteCache(asked.id, name, _origin(asked)))
    if not found.caches:
        raise _missing(name)
    return Reply(CacheDeleted(name))


def _origin(asked: Asked[Any]) -> Origin:
    asked.front.check_open()
    return asked.front.origin(asked.caller, None, asked.query.get("cache_salt"))


_QUERY = {"cache_salt": Salt}
ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/caches",
        create,
        "Keep the beginning of conversations",
        body=CacheBody,
        answer=CacheEntry,
        statuses=(201,),
        errors=(404, 504),
    ),
    Endpoint("GET", "/v1/caches", list_caches, "List the caches", answer=CacheList, errors=(400, 503), query=_QUERY),
    Endpoint(
        "GET",
        "/v1/caches/{name}",
        look_up,
        "Describe one cache",
        answer=CacheEntry,
        errors=(400, 404, 503),
        query=_QUERY,
    ),
    Endpoint(
        "PATCH",
        "/v1/caches/{name}",
        extend,
        "Give a cache more time",
        body=ExtendBody,
        answer=CacheEntry,
        errors=(404,),
    ),
    Endpoint(
        "DELETE",
        "/v1/caches/{name}",
        delete,
        "End a cache",
        answer=CacheDeleted,
        errors=(400, 404, 503),
        query=_QUERY,
    ),
)
