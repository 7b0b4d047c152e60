"""Holds every limit of the server: sizes, counts and seconds, each pinned by tests/server/test_limits.py.

What a prompt, a picture or a constraint may cost is limited by the runtime (`srt/core/config.py`, `lang/sampling.py`);
the server refuses some of it earlier.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ..lang.caching import CACHE_MINIMUM
from ..lang.errors import ParameterError
from ..lang.protocol import ConstraintSpec

MAX_BODY = 32_000_000  # bytes; a frame to the gateway takes 32 MiB
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16_384  # of all names and values together
MAX_DEPTH = 64  # of JSON in JSON
BODY_SECONDS = 60.0  # for a whole body to come
IDLE_SECONDS = 75  # of a connection between two requests; clients and gateways give up theirs after 5 to 60

MAX_MESSAGES = 10_000  # of a conversation; and parts of a message
MAX_N = 16  # continuations of one request over HTTP; programs may ask for 128
MAX_BATCH = 1_024  # prompts of one request
MAX_TOOLS = 128
MAX_SCHEMA = 65_536  # bytes of a JSON schema, as JSON; and of a grammar
MAX_REGEX = 4_096  # characters
MAX_CUT_ARGUMENTS = 65_536  # characters of a call that was cut: reading what is whole of them takes time
MAX_NAME = 256  # characters of a model's name, an id or a label
MAX_PROGRAMS = 128  # that are kept; the gateway keeps as many, so that none travels twice
MAX_PROGRAM_BYTES = 32 << 20  # of their files together; of one, `lang.programs.MAX_GRAPH_BYTES`
MAX_TTL = 3_600.0  # seconds that a mark or a cache object is kept after its last use

# What a process remembers of earlier requests, however many salts, names and fields its clients make up. The oldest
# give way: those of the same salt to its own limit, then all of the salt that asked longest ago.
SALT_ANSWERS = 1 << 16  # tokens of answers whose text may come back, 3 MB
ALL_ANSWERS = 1 << 20  # of all salts, 48 MB
SALT_EXCHANGES = 8 << 20  # bytes of prompts that diagnostics compare
ALL_EXCHANGES = 64 << 20  # of all salts
WATCHED_SALTS = 256  # in which lines that change with every request are looked for
WATCHED_REQUESTS = 8  # of each of them
WATCHED_HEAD = 4_096  # characters of a text that begin its head
WATCHED_LINES = 256  # of a head
REFUSED_NAMES = 100  # of fields that /metrics shows; the rest are "other"
READINGS = 300  # of the load, a second apart, for the live page


class HttpLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits that an operator may set, by `umbel serve --NAME` or in the table [limits] of its file.

    Attributes:
        most_in_flight: requests that run or wait; one more is refused with 503. A request for several continuations,
            or with several prompts, counts as so many.
        keep_alive: seconds without an event after which a stream says that it is alive.
        drain: seconds that requests in flight get to end after Ctrl-C or SIGTERM.
        retry_after: seconds after which a refused client shall try again.
        cache_minimum: tokens of the shortest prefix that marks of a request keep.
    """

    most_in_flight: int = 1_280  # 256 streams and 1,024 that wait
    keep_alive: float = 10.0
    drain: float = 30.0
    retry_after: int = 1
    cache_minimum: int = CACHE_MINIMUM

    def __post_init__(self) -> None:
        for name, low, high in (
            ("most_in_flight", 1, 1 << 20),
            ("keep_alive", 0.01, 3_600),
            ("drain", 0, 86_400),
            ("retry_after", 1, 120),
            ("cache_minimum", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not low <= value <= high:
                raise ParameterError(f"{name} must be {low} to {high}, got {value!r}")


def check_depth(name: str, value: object) -> None:
    """Raises ParameterError for JSON that is nested deeper than `MAX_DEPTH`; never recurses."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [member for each in level for member in _members(each)]
        if not level:
            return
    raise ParameterError(f"{name} is nested more than {MAX_DEPTH} levels deep")


# Any: JSON
def check_schema(name: str, schema: Mapping[str, Any]) -> None:
    """Raises ParameterError for a schema that is too large or nested too deep."""
    check_depth(name, schema)
    size = len(msgspec.json.encode(schema))
    if size > MAX_SCHEMA:
        raise ParameterError(f"{name} has {size} bytes; at most {MAX_SCHEMA} are taken")


def check_constraint(name: str, spec: ConstraintSpec) -> None:
    """Raises ParameterError for a source that is longer than the fields for it take. Choices have limits of their own,
    by count and by length."""
    if spec.kind == "choices":
        return
    regex = spec.kind == "regex"
    size = len(spec.source if regex else spec.source.encode("utf-8", "surrogatepass"))
    most, unit = (MAX_REGEX, "characters") if regex else (MAX_SCHEMA, "bytes")
    if size > most:
        raise ParameterError(f"{name} has {size} {unit}; at most {most} are taken of the kind {spec.kind!r}")


def _members(value: Any) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
