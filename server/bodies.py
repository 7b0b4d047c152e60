"""Reads requests: bytes of a bounded body → a msgspec struct, and errors that name the field.

Every field that is known stands in a struct with its type and range; a field that is not known is refused, since one
that is ignored would be a wish that is not granted. A field that is known and not offered is typed as its default, and
`not_offered` says what to do instead.
"""

import asyncio
import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from starlette.types import Receive

from ..lang import sampling
from ..lang.checks import LONGEST_SALT
from ..lang.protocol import MAX_PRIORITY
from .errors import HttpError
from .limits import BODY_SECONDS, MAX_BODY, MAX_N, MAX_NAME, MAX_REGEX, REFUSED_NAMES

B = TypeVar("B")
Json = dict[str, Any]  # Any: JSON

# Types of fields with their ranges. Those of sampling are the language's, or narrower.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Label = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
ToolName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
Salt = Annotated[str, msgspec.Meta(max_length=LONGEST_SALT, pattern="^[A-Za-z0-9_-]*$")]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_N)]  # of continuations
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=sampling.MAX_TOKENS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=sampling.MAX_TOKEN_ID)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=sampling.MAX_STOP_LENGTH)]
Stops = Annotated[tuple[Stop, ...], msgspec.Meta(max_length=sampling.MAX_STOPS)]
StopTokens = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=sampling.MAX_STOP_TOKEN_IDS)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=sampling.MAX_TEMPERATURE)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=sampling.MAX_TOKEN_ID)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-sampling.MAX_PENALTY, le=sampling.MAX_PENALTY)]
Repetition = Annotated[float, msgspec.Meta(ge=sampling.MIN_REPETITION_PENALTY, le=sampling.MAX_REPETITION_PENALTY)]
Bias = Annotated[float, msgspec.Meta(ge=-sampling.MAX_BIAS, le=sampling.MAX_BIAS)]
Biases = Annotated[
    dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,10}$")], Bias], msgspec.Meta(max_length=sampling.MAX_LOGIT_BIAS)
]
Seed = Annotated[int, msgspec.Meta(ge=0, le=sampling.MAX_SEED)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=sampling.MAX_TOP_LOGPROBS)]
Regex = Annotated[str, msgspec.Meta(max_length=MAX_REGEX)]


class Disconnected(Exception):
    """The client went away before its body had come."""


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the bodies of requests, and of the objects in them.

    Attributes:
        told_as: a parameter of the runtime, by which its errors name it → the field that gives it, where that has
            another name. "prompt" is what errors are about that name no parameter.
    """

    told_as: ClassVar[Mapping[str, str]] = {}

    def field_of(self, parameter: str) -> str | None:
        """Returns the field that gave a parameter of the runtime; None where none did."""
        field = self.told_as.get(parameter, parameter)
        return field if field.partition(".")[0] in self.__struct_fields__ else None

    def given(self) -> frozenset[str]:
        """Returns the sampling parameters that the body gives. False is none: gateways add it where it is the usual."""
        fields = {name: self.field_of(name) for name in sampling.FIELDS}
        values = {name: getattr(self, field) for name, field in fields.items() if field in self.__struct_fields__}
        return frozenset(name for name, value in values.items() if value is not None and value is not False)


class UmbelFields(Body, frozen=True):
    """Fields that umbel takes on top of a dialect, in the field `umbel` of every body (`extra_body` of Python clients).

    Attributes:
        program: groups the calls of one program, for fairness and scheduling.
        fork_group: siblings of one fork share it; they are scheduled together.
        ahead: tokens that the program still has to generate one after the other from this call on.
        priority: higher runs earlier.
        timeout: seconds until the request is given up.
    """

    program: Label = ""
    fork_group: Label = ""
    ahead: TokenCount = 0
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    timeout: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None


class UmbelBody(Body, frozen=True, kw_only=True):
    """Base of the bodies that have the field `umbel`: all but that of `/runtime`, whose messages have an origin."""

    umbel: UmbelFields | None = None


refused_fields: Counter[str] = Counter()  # fields that were refused, by name, for /metrics: the next client's surprise


async def read_body(receive: Receive, length: str | None) -> bytes:
    """Reads the body of a request.

    Raises:
        HttpError: 413 for more than `MAX_BODY` bytes, announced or sent; 408 where they do not come in time.
    """
    if length is not None and length.isdigit() and int(length[:12]) > MAX_BODY:
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > MAX_BODY:
                    raise _too_large()
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_SECONDS:g} s", "body_timeout") from None


def _too_large() -> HttpError:
    return HttpError(
        413, f"the body is larger than {MAX_BODY} bytes", "request_too_large", headers={"connection": "close"}
    )


def decode(data: bytes, decoder: "msgspec.json.Decoder[B]", not_offered: Mapping[str, str] | None = None) -> B:
    """Decodes a body.

    Args:
        not_offered: the name of a field that is known and not offered → what to do instead.

    Raises:
        HttpError: 400, with the path of the field.
    """
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), not_offered or {}, getattr(decoder.type, "__struct_fields__", ())) from None
    except msgspec.DecodeError as error:
        raise HttpError(400, f"the body is not JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise HttpError(400, "the body is JSON that is nested too deep", "invalid_json") from None
    except UnicodeDecodeError:
        raise HttpError(400, "the body is not UTF-8", "invalid_json") from None


def convert(value: Json, kind: type[B], param: str, not_offered: Mapping[str, str] | None = None) -> B:
    """Reads an object of a body, whose own fields say of which kind it is.

    Args:
        param: the path of the object.
        not_offered: as of `decode`.

    Raises:
        HttpError: 400, with the path of the field.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), not_offered or {}, getattr(kind, "__struct_fields__", ()), param) from None


_AT = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def _invalid(said: str, not_offered: Mapping[str, str], fields: Sequence[str], within: str = "") -> HttpError:
    """Turns a message of msgspec, such as "Expected `int`, got `str` - at `$.n`", into an answer.

    Args:
        fields: of the body, or of the object of it that was read.
        within: the path of that object.
    """
    found = _AT.search(said)
    inner, what = (found["path"], said[: found.start()]) if found else ("", said)
    path = f"{within}.{inner}".strip(".")
    if unknown := _UNKNOWN.fullmatch(what):
        name = unknown["name"][:MAX_NAME]
        _count_refused(name)
        param = f"{path}.{name}" if path else name
        near = () if inner else difflib.get_close_matches(name, set(fields) - set(not_offered), n=1)
        meant = f"; did you mean {near[0]}?" if near else " is known here"
        return HttpError(400, f"{param}: no such field{meant}", "unknown_parameter", param=param)
    if missing := _MISSING.fullmatch(what):
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return HttpError(400, f"{param} is missing", "missing_required_parameter", param=param)
    field = path.rpartition(".")[2].partition("[")[0]
    if field in not_offered:
        _count_refused(field)
        return HttpError(400, f"{path}: {not_offered[field]}", "unsupported_parameter", param=path)
    return HttpError(400, f"{path or 'the body'}: {what[0].lower()}{what[1:]}", param=path or None)


def _count_refused(name: str) -> None:
    """Counts a refused field; beyond REFUSED_NAMES together as "other"."""
    known = name in refused_fields or len(refused_fields) < REFUSED_NAMES
    refused_fields[name if known and name.isidentifier() else "other"] += 1


def wrong(param: str, message: str, code: str = "invalid_value") -> HttpError:
    """Returns the answer to a request whose field `param` cannot be honoured."""
    return HttpError(400, f"{param}: {message}", code, param=param)
