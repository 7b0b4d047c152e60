"""Every limit of the server, pinned: a change of one is a change of what users may rely on."""

import pytest
from openai import DEFAULT_CONNECTION_LIMITS
from umbel.lang.errors import ParameterError
from umbel.lang.protocol import ConstraintKind, ConstraintSpec
from umbel.server import limits
from umbel.server.command import http_config
from umbel.server.front import Front
from umbel.server.limits import HttpLimits, check_constraint, check_depth
from umbel.srt.in_process import LocalBackend


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_BODY", 32_000_000),
        ("MAX_HEADERS", 100),
        ("MAX_HEADER_BYTES", 16_384),
        ("MAX_DEPTH", 64),
        ("BODY_SECONDS", 60.0),
        ("IDLE_SECONDS", 75),
        ("MAX_MESSAGES", 10_000),
        ("MAX_N", 16),
        ("MAX_BATCH", 1_024),
        ("MAX_TOOLS", 128),
        ("MAX_SCHEMA", 65_536),
        ("MAX_REGEX", 4_096),
        ("MAX_NAME", 256),
        ("MAX_TTL", 3_600.0),
        ("MAX_PROGRAMS", 128),
        ("MAX_PROGRAM_BYTES", 33_554_432),
        ("SALT_ANSWERS", 65_536),
        ("ALL_ANSWERS", 1_048_576),
        ("SALT_EXCHANGES", 8_388_608),
        ("ALL_EXCHANGES", 67_108_864),
        ("WATCHED_SALTS", 256),
        ("WATCHED_REQUESTS", 8),
        ("WATCHED_HEAD", 4_096),
        ("WATCHED_LINES", 256),
        ("REFUSED_NAMES", 100),
        ("READINGS", 300),
    ],
)
def test_the_fixed_limits(name: str, value: float) -> None:
    assert getattr(limits, name) == value


def test_a_connection_waits_longer_for_its_next_request_than_clients_keep_it() -> None:
    """The clients of OpenAI and Anthropic keep one for 5 s: a server that closes it then would meet their request."""
    assert http_config(Front(LocalBackend())).timeout_keep_alive == limits.IDLE_SECONDS
    assert (DEFAULT_CONNECTION_LIMITS.keepalive_expiry or 0.0) < limits.IDLE_SECONDS


def test_the_defaults_of_those_that_can_be_set() -> None:
    assert HttpLimits() == HttpLimits(
        most_in_flight=1_280, keep_alive=10.0, drain=30.0, retry_after=1, cache_minimum=1_024
    )


@pytest.mark.parametrize(
    "given",
    [
        {"most_in_flight": 0},
        {"most_in_flight": True},
        {"keep_alive": 0},
        {"drain": -1},
        {"retry_after": 121},
        {"cache_minimum": 0},
    ],
)
def test_a_limit_out_of_its_range_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match=next(iter(given))):
        HttpLimits(**given)  # type: ignore[arg-type]


def test_json_that_is_nested_too_deep_is_refused_without_recursion() -> None:
    value: object = 1
    for depth in range(100_000):
        value = {"a": value} if depth % 2 else [value]
    with pytest.raises(ParameterError, match="nested more than 64"):
        check_depth("tools[0].parameters", value)
    check_depth("x", [[[]]] * 1000)


@pytest.mark.parametrize(
    ("kind", "most"), [("regex", 4_096), ("json_schema", 65_536), ("gbnf", 65_536), ("lark", 65_536)]
)
def test_the_source_of_a_constraint_is_limited_by_its_kind(kind: ConstraintKind, most: int) -> None:
    check_constraint("constraint", ConstraintSpec(kind, "a" * most))
    with pytest.raises(ParameterError, match=f"^constraint has {most + 1} .* of the kind '{kind}'"):
        check_constraint("constraint", ConstraintSpec(kind, "a" * (most + 1)))
    check_constraint("constraint", ConstraintSpec("choices", "a" * 100_000))
