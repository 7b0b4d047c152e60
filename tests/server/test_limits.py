"""Every limit of the server, pinned: a change of one is a change of what users may rely on."""

import msgspec
import pytest
from openai import DEFAULT_CONNECTION_LIMITS
from umbel.fsm.errors import Limits
from umbel.interpreter import body, media, remote_images
from umbel.lang import chat_template, checks, sampling
from umbel.lang.errors import ParameterError
from umbel.lang.protocol import ConstraintKind, ConstraintSpec
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.templates import child
from umbel.server import limits
from umbel.server.access import Access, Caller
from umbel.server.app import application
from umbel.server.bodies import Salt
from umbel.server.command import http_config
from umbel.server.front import Front
from umbel.server.limits import HttpLimits, check_constraint, check_depth
from umbel.srt.core.config import CompilerLimits, GatewayLimits, PictureLimits
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
        ("MAX_CUT_ARGUMENTS", 65_536),
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


LIMITS: tuple[tuple[str, float, float], ...] = (
    ("n over HTTP", 16, limits.MAX_N),
    ("n", 128, sampling.MAX_N),
    ("top_logprobs", 20, sampling.MAX_TOP_LOGPROBS),
    ("stops", 16, sampling.MAX_STOPS),
    ("characters of a stop", 256, sampling.MAX_STOP_LENGTH),
    ("entries of logit_bias", 300, sampling.MAX_LOGIT_BIAS),
    ("max_tokens before the context is known", 1_048_576, sampling.MAX_TOKENS),
    ("seconds of a request", 600.0, RuntimeOptions().request_timeout),
    ("seconds of a request at the gateway", 600.0, GatewayLimits().request_timeout),
    ("waiting requests", 1_024, RuntimeOptions().max_queue),
    ("waiting requests at the gateway", 1_024, GatewayLimits().max_queue),
    ("bytes of a body", 32_000_000, limits.MAX_BODY),
    ("levels of JSON", 64, limits.MAX_DEPTH),
    ("bytes of headers", 16_384, limits.MAX_HEADER_BYTES),
    ("headers", 100, limits.MAX_HEADERS),
    ("characters of a regex", 4_096, limits.MAX_REGEX),
    ("bytes of a schema", 65_536, limits.MAX_SCHEMA),
    ("levels of a schema, of a regex", 64, Limits().depth),
    ("states of an automaton", 50_000, Limits().states),
    ("CPU seconds of a constraint", 2.0, CompilerLimits().cpu_seconds),
    ("bytes of memory of its process", 268_435_456, CompilerLimits().memory),
    ("constraints that are kept", 256, RuntimeOptions().constraint_cache),
    ("bytes of constraints that are kept", 67_108_864, CompilerLimits().kept_bytes),
    ("pictures of a prompt", 8, PictureLimits().most_media),
    ("bytes of all pictures of a prompt", 20_971_520, PictureLimits().most_bytes),
    ("bytes of a picture in a program", 20_971_520, media.MAX_MEDIA_BYTES),
    ("pixels of a picture", 16_800_000, PictureLimits().most_pixels),
    ("redirects", 3, remote_images.MAX_REDIRECTS),
    ("seconds of silence of a fetch", 10.0, remote_images.READ_SECONDS),
    ("CPU seconds of a template", 1.0, child.CPU_SECONDS),
    ("characters that a template writes", 1_048_576, chat_template.MOST_TEXT),
    ("characters of a salt", 128, checks.LONGEST_SALT),
    ("characters of a salt at the gateway", 128, GatewayLimits().max_salt_length),
)


@pytest.mark.parametrize(("value", "home"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_the_limits_of_a_request_wherever_they_are_held(value: float, home: float) -> None:
    """All that one request may cost. `home`: the constant that its check reads."""
    assert home == value


@pytest.mark.parametrize("salt", ["x" * 128, "", "aZ09_-"])
def test_a_salt_is_the_same_everywhere(salt: str) -> None:
    """The four that read one: the field of a body, the server's rights, a run of a program, and the gateway's limit."""
    assert msgspec.convert(salt, Salt) == salt
    assert Access().salt(Caller(), salt)
    assert body._checked_salt(salt) == salt
    assert len(salt) <= GatewayLimits().max_salt_length
    for wrong in (salt + "x" * 128 + "y", salt + "ä"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Salt)
        with pytest.raises(ParameterError):
            Access().salt(Caller(), wrong)
        with pytest.raises(ParameterError):
            body._checked_salt(wrong)


def test_a_connection_waits_longer_for_its_next_request_than_clients_keep_it() -> None:
    """The clients of OpenAI and Anthropic keep one for 5 s: a server that closes it then would meet their request."""
    assert http_config(application(Front(LocalBackend()))).timeout_keep_alive == limits.IDLE_SECONDS
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
