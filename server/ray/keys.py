"""Reads from an HTTP request what placement needs to know of it.

    salt      API key, model and `cache_salt`: requests that differ there share no cache
    units     the prompt as it was sent, in pieces of 4 bytes, each about a token
    group     `umbel.fork_group`: the branches of one fork
    program   `umbel.program`

The tokenizer lies in the replicas, so prompts are compared as bytes. Equal beginnings of prompts have equal beginnings
of tokens but for the last one, and no more is asked of a key: a wrong one costs time and changes no answer. A body that
cannot be read has an empty key; the replica that gets it says what is wrong.
"""

import enum
import hashlib
import re
from collections.abc import Iterable, Mapping

import msgspec

from ...lang.programs import RunProgram
from ...lang.prompt import Generated, Media, Part, Private, Text
from ...lang.protocol import (
    Control,
    CreateCache,
    DeleteCache,
    ExtendCache,
    GenRequest,
    Hint,
    Origin,
    ReadCaches,
    Release,
    ScoreRequest,
)
from ..native.runtime_messages import MessageBody, Question, read_question

UNIT = 4  # bytes; English text has about as many to a token
USUAL_WORK = 128  # tokens that a request generates that names no limit
MOST_KEY = 1 << 20  # bytes of a prompt that are compared
_LONG_BASE64 = re.compile(rb"[A-Za-z0-9+/=_-]{4096,}")  # a picture


class Reach(enum.Enum):
    """The replicas that a request goes to."""

    ONE = "one"
    ALL = "all"  # it changes what each of them keeps, or asks all of them
    NONE = "none"  # a single replica would keep what it asks for


class RoutingKey(msgspec.Struct, frozen=True):
    """Carries what placement knows of a request.

    Attributes:
        units: little-endian int32 numbers; none for a request that leaves no prompt in the cache.
        work: tokens that it may generate.
    """

    reach: Reach = Reach.ONE
    salt: str = ""
    units: bytes = b""
    group: str = ""
    program: str = ""
    work: int = 0


class _Groups(msgspec.Struct):
    program: str = ""
    fork_group: str = ""


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None


class _Fields(msgspec.Struct):
    """The fields of all dialects that a key is made of; prompts in the order in which chat templates write them."""

    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    parts: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()
    model: str | None = None
    cache_salt: str | None = None
    umbel: _Groups | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    sampling_params: _Sampling | None = None

    @property
    def work(self) -> int:
        """Tokens that the request may generate, as far as it says."""
        sampling = self.sampling_params or _Sampling()
        given = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens, sampling.max_new_tokens)
        return next((each for each in given if each is not None), USUAL_WORK)


_PROMPTS = _Fields.__struct_fields__[: _Fields.__struct_fields__.index("model")]
_fields = msgspec.json.Decoder(_Fields)
_message = msgspec.json.Decoder(MessageBody)
_FILLING = re.compile(r"/generate|/score|/hints|/v1/(completions|chat/completions|responses|messages|programs/.+/runs)")
_KEPT_BY_ONE = re.compile(r"\w+ /(v1/caches|ui)\b.*|(PUT|DELETE) /v1/programs/.*|POST /abort|DELETE /hints/.*")


def routing_key(method: str, path: str, headers: Mapping[str, str], body: bytes) -> RoutingKey:
    """Returns the key of a request.

    Args:
        headers: by their names in lower case.
    """
    if path in ("/flush_cache", "/metrics"):
        return RoutingKey(Reach.ALL)
    if _KEPT_BY_ONE.fullmatch(f"{method} {path}"):
        return RoutingKey(Reach.NONE)
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    if not body:
        return RoutingKey()
    try:
        if path == "/runtime":
            return _of_message(read_question(_message.decode(body).message), key)
        found = _fields.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return RoutingKey()
    groups = found.umbel or _Groups()
    written = b"".join(_open_end(getattr(found, name)) for name in _PROMPTS)
    if path.startswith("/v1/programs/"):
        written = path.encode() + b"\0" + written
    salt = _salt(key, found.model or "", found.cache_salt)
    fills = _FILLING.fullmatch(path) is not None
    return RoutingKey(
        salt=salt,
        units=_units(written) if fills else b"",
        group=_within(salt, groups.fork_group),
        program=_within(salt, groups.program),
        work=found.work if fills else 0,
    )


def _of_message(question: Question, key: str) -> RoutingKey:
    """Returns the key of a message of the runtime, by which a `RuntimeEndpoint` asks."""
    match question:
        case Control(verb="flush_cache") | Release():
            return RoutingKey(Reach.ALL)
        case CreateCache() | ReadCaches() | ExtendCache() | DeleteCache():
            return RoutingKey(Reach.NONE)
        case GenRequest(prompt=prompt, origin=origin, sampling=sampling):
            return _keyed(key, origin, _written(prompt), sampling.max_tokens or USUAL_WORK)
        case ScoreRequest(prompt=prompt, origin=origin) | Hint(prompt=prompt, origin=origin):
            return _keyed(key, origin, _written(prompt))
        case RunProgram(digest=digest, arguments=arguments, origin=origin):
            return _keyed(key, origin, digest.encode() + arguments, USUAL_WORK)
        case _:
            return RoutingKey()


def _keyed(key: str, origin: Origin, written: bytes, work: int = 0) -> RoutingKey:
    salt = _salt(key, origin.adapter, origin.salt or None)
    group, program = _within(salt, origin.fork_group), _within(salt, origin.program_id)
    return RoutingKey(salt=salt, units=_units(written), group=group, program=program, work=work)


def _written(prompt: Iterable[Part]) -> bytes:
    """Returns the bytes by which the parts of a prompt are compared."""
    found = []
    for part in prompt:
        match part:
            case Text(text=text) | Private(tenant=text):
                found.append(text.encode("utf-8", "surrogatepass"))
            case Generated(text=text, token_ids=ids):
                found.append(text.encode("utf-8", "surrogatepass") if text else repr(ids).encode())
            case Media(digest=digest):
                found.append(digest.encode())
    return b"".join(found)


def _open_end(value: msgspec.Raw) -> bytes:
    """Returns JSON without the sign that ends it, so that a text or a list that goes on begins with it."""
    written = bytes(value)
    return written[:-1] if written[-1:] in (b'"', b"]", b"}") else written


def _units(written: bytes) -> bytes:
    """Cuts bytes to whole units. Pictures are replaced by their digests."""
    if len(written) > MOST_KEY or _LONG_BASE64.search(written):
        written = _LONG_BASE64.sub(lambda found: hashlib.sha256(found[0]).digest(), written)[:MOST_KEY]
    return written[: len(written) // UNIT * UNIT]


def _within(salt: str, name: str) -> str:
    """Returns a caller's name for a group as one that no other caller has."""
    return f"{salt}/{name}" if name else ""


def _salt(key: str, model: str, asked: str | None) -> str:
    """Returns the namespace of a request: a digest of its fields, each with its length before it."""
    framed = b""
    for each in (key, model, "" if asked is None else f"={asked}"):
        data = each.encode("utf-8", "surrogatepass")
        framed += len(data).to_bytes(4) + data
    return hashlib.sha256(framed).hexdigest()[:32]
