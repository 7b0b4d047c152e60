"""What happens on the way to a provider: tries, waits, bounds, and errors that hold no key."""

import gzip
import json
import traceback
import zlib
from email.utils import formatdate

import openai
import pytest
from umbel.interpreter.backends.hosted import transport
from umbel.interpreter.backends.hosted.errors import retry_after
from umbel.interpreter.backends.hosted.session import Retries, Timeouts
from umbel.interpreter.backends.hosted.transport import http_library
from umbel.lang.errors import (
    BackendError,
    CapabilityError,
    ConnectionLostError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    OverloadedError,
    ParameterError,
    RequestError,
    UmbelError,
)
from umbel.lang.protocol import Origin

from .wired import DONE, KEY, Clock, Pieces, Wire, answer, asking, backend, event, failing, generate, streamed

http = http_library(openai)  # httpx or httpx2, as the SDK is written for


def refused(wire: Wire, clock: Clock | None = None, *, stream: bool = False, **options: object) -> UmbelError:
    """The error that a request ends with."""
    with pytest.raises(UmbelError) as raised:
        generate(backend(wire, clock, **options), asking(stream=stream))
    return raised.value


# -------------------------------------------------------------------------------------------- tries and waits


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_a_failure_that_passes_is_tried_again(status):
    wire, clock = Wire(failing(status), failing(status), answer()), Clock()
    _, final = generate(backend(wire, clock))
    assert final.completions[0].text == "Paris."
    assert final.usage.calls == 1
    assert clock.slept == [0.25, 0.5]  # half of 0.5 and of 1 s, as chance says


def test_waits_spread_over_intervals_that_double_up_to_a_bound():
    retries = Retries(10)
    assert [retries.wait(failed, None, 0.0) for failed in (1, 2, 9)] == [0.0, 0.0, 0.0]
    assert [retries.wait(failed, None, 1.0) for failed in (1, 2, 3, 4, 5, 9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_server_says_when():
    wire, clock = Wire(failing(429, {"retry-after": "7"}), answer()), Clock()
    generate(backend(wire, clock))
    assert clock.slept == [7.25]


def test_a_server_cannot_say_never():
    wire, clock = Wire(failing(429, {"retry-after": "86400"}), answer()), Clock()
    generate(backend(wire, clock))
    assert clock.slept == [60.25]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": formatdate(1000, usegmt=True), "date": formatdate(990, usegmt=True)}, 10.0),
        ({"retry-after": formatdate(1000, usegmt=True)}, 20.0),  # by our clock, which shows 980
        ({"retry-after": formatdate(900, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_a_number_or_a_date(headers, seconds):
    assert retry_after(headers, lambda: 980.0) == seconds


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (failing(429), OverloadedError),
        (failing(503), OverloadedError),
        (failing(500), EngineError),
        (http.ConnectError("no route"), ConnectionLostError),
        (http.ConnectTimeout("slow"), ConnectionLostError),
        (http.ReadTimeout("no first byte"), ConnectionLostError),
        (http.RemoteProtocolError("closed"), ConnectionLostError),
    ],
)
def test_what_does_not_pass_ends_after_four_tries(reply, kind):
    wire = Wire(reply)
    error = refused(wire)
    assert type(error) is kind
    assert "tried 4 times" in str(error)
    assert len(wire.seen) == 4


def test_max_retries_is_the_number_of_further_tries():
    wire = Wire(failing(500))
    refused(wire, max_retries=0)
    assert len(wire.seen) == 1


def test_no_wait_goes_past_the_deadline():
    wire, clock = Wire(failing(429, {"retry-after": "30"})), Clock()
    with pytest.raises(DeadlineError, match="no time is left for another try"):
        generate(backend(wire, clock), asking(origin=Origin(timeout=20.0)))
    assert clock.slept == []
    assert len(wire.seen) == 1


def test_a_deadline_that_has_passed_sends_nothing():
    wire = Wire(answer())
    with pytest.raises(DeadlineError):
        generate(backend(wire), asking(origin=Origin(timeout=0.0)))
    assert wire.seen == []


def test_an_answer_in_pieces_ends_with_the_deadline():
    wire = Wire(streamed(event("Pa"), None))
    with pytest.raises(DeadlineError, match="did not end in its time"):
        generate(backend(wire), asking(stream=True, origin=Origin(timeout=0.05)))


# ------------------------------------------------------------------------------------ never after the first byte


@pytest.mark.parametrize(
    "pieces",
    [
        [event("Pa"), http.ReadError("reset")],
        [event("Pa")],
        [event("Pa"), event("ris"), DONE],
        [event("Pa"), b'data: {"error": {"message": "overloaded", "type": "overloaded_error"}}\n\n'],
        [event("Pa"), b'data: {"choices": [{"delta": {"con'],
        [event("Pa"), b"data: not json\n\n"],
        [event("Pa"), b"data: 7\n\n"],
    ],
    ids=["reset", "cut", "no end", "error event", "half an event", "no json", "no object"],
)
def test_an_answer_that_breaks_off_is_an_error_and_not_tried_again(pieces):
    wire = Wire(streamed(*pieces))
    error = refused(wire, stream=True)
    assert isinstance(error, BackendError)
    assert len(wire.seen) == 1


def test_silence_in_the_middle_is_an_error():
    error = refused(Wire(streamed(event("Pa"), None)), stream=True, idle_timeout=0.02)
    assert isinstance(error, ConnectionLostError)
    assert "silent" in str(error)


@pytest.mark.parametrize(("code", "kind"), [("server_error", EngineError), ("rate_limit_exceeded", OverloadedError)])
def test_an_error_inside_an_answer_is_not_tried_again(code, kind):
    told = {"error": {"message": "busy", "type": code}}
    wire = Wire(streamed(event(""), b"data: " + json.dumps(told).encode() + b"\n\n"))
    assert type(refused(wire, stream=True)) is kind
    whole = Wire(http.Response(200, json=told))
    assert type(refused(whole)) is kind
    assert len(wire.seen) == len(whole.seen) == 1


@pytest.mark.parametrize("rest", [[], [b"data: {"], [http.ReadError("reset")]])
def test_nothing_that_happens_after_the_end_matters(rest):
    _, final = generate(
        backend(Wire(streamed(event("Paris."), event(None, "stop"), *rest))), asking(stream=True, max_tokens=8)
    )
    assert final.completions[0].text == "Paris."
    assert final.usage.prompt_tokens > 9  # a bound, as nobody said
    assert final.usage.completion_tokens == 8


# -------------------------------------------------------------------------------------------- bounds


def test_redirects_are_not_followed():
    wire = Wire(http.Response(307, headers={"location": "https://evil.example/v1?key=1"}))
    error = refused(wire)
    assert isinstance(error, RequestError)
    assert "redirects to evil.example" in str(error)
    assert "key=1" not in str(error)
    assert len(wire.seen) == 1


def test_identity_is_asked_for_and_gzip_is_understood():
    body = gzip.compress(answer().content)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    wire = Wire(http.Response(200, headers=headers, stream=Pieces([body[:20], body[20:]])))
    _, final = generate(backend(wire))
    assert final.completions[0].text == "Paris."
    assert wire.seen[0].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("stream", [False, True])
def test_a_gzip_bomb_is_cut_off(monkeypatch, stream):
    monkeypatch.setattr(transport, "MOST_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (8 << 20))
    headers = {"content-encoding": "gzip", "content-type": "text/event-stream" if stream else "application/json"}
    error = refused(Wire(http.Response(200, headers=headers, stream=Pieces([bomb]))), stream=stream)
    assert "as one answer; it was cut off" in str(error)


def test_broken_compression_is_an_error():
    headers = {"content-encoding": "deflate", "content-type": "application/json"}
    error = refused(Wire(http.Response(200, headers=headers, stream=Pieces([zlib.compress(b"{}")[:4], b"????"]))))
    assert "no answer of this API" in str(error)


def test_other_encodings_are_refused():
    error = refused(Wire(http.Response(200, headers={"content-encoding": "br"}, stream=Pieces([b"?"]))))
    assert "in the encoding 'br'" in str(error)


@pytest.mark.parametrize("text", ["abc " * 5000, ""])
def test_an_answer_that_does_not_end_is_cut_off(text):
    wire = Wire(streamed(*[event(text)] * 6000))
    with pytest.raises(BackendError, match=r"more text than max_tokens=4 allows|an answer that does not end"):
        generate(backend(wire), asking(stream=True, max_tokens=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 0), ("first_byte_timeout", -1.0), ("connect_timeout", "1"), ("idle_timeout", float("nan"))],
)
def test_times_are_numbers_above_zero(name, value):
    with pytest.raises(ParameterError, match=f"{name}=.*write a number of seconds above 0"):
        backend(Wire(answer()), **{name: value})


def test_the_first_byte_may_take_as_long_as_the_call():
    assert Timeouts().silent == Timeouts().whole


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (failing(401), RequestError, "refused the key .*check api_key= or OPENAI_API_KEY"),
        (failing(403), RequestError, "refused the key"),
        (failing(404), RequestError, "no such model or address .*base_url"),
        (failing(429, None, code="insufficient_quota"), RequestError, "no credit left"),
        (
            failing(400, None, code="unsupported_parameter", param="logit_bias"),
            CapabilityError,
            "does not offer 'logit_bias' of this request .*leave it out",
        ),
        (failing(400, None, code="context_length_exceeded"), ContextLengthError, "refused the request"),
        (failing(422), RequestError, "refused the request"),
        (failing(418), RequestError, "refused the request"),
    ],
)
def test_a_refusal_says_what_to_do_and_is_not_tried_again(reply, kind, words):
    wire = Wire(reply)
    error = refused(wire)
    assert type(error) is kind
    with pytest.raises(kind, match=words):
        raise error
    assert len(wire.seen) == 1


@pytest.mark.parametrize(
    "reply",
    [
        http.Response(200, html="<html>Log in</html>"),
        http.Response(200, json=[1]),
        http.Response(200, json={"choices": [{"index": -1}]}),
        http.Response(200, json={"choices": []}),
        http.Response(200, content=b'{"choices": [', headers={"content-type": "application/json"}),
        http.Response(200, json={"choices": [{"message": {"content": "Par"}, "finish_reason": None}]}),
        http.Response(200, json={"choices": [{"message": {"content": "Par"}, "finish_reason": "tool_calls"}]}),
    ],
    ids=["html", "list", "index", "empty", "cut", "no reason", "tools"],
)
def test_what_is_no_answer_is_an_error(reply):
    wire = Wire(reply)
    assert isinstance(refused(wire), BackendError)
    assert len(wire.seen) == 1


def test_a_page_instead_of_a_stream_is_an_error():
    error = refused(Wire(http.Response(200, html="<html>Log in</html>")), stream=True)
    assert "sent text/html where a stream of events was asked for" in str(error)


@pytest.mark.parametrize("status", [400, 401, 429, 500])
@pytest.mark.parametrize("stream", [False, True])
def test_no_error_holds_the_key(status, stream):
    wire = Wire(failing(status, None, message=f"key {KEY} or Bearer abcdefgh or sk-other-key-1 is wrong"))
    model = backend(wire, default_headers={"x-api-key": "another-secret"})
    with pytest.raises(UmbelError) as raised:
        generate(model, asking(stream=stream))
    told = "".join(traceback.format_exception(raised.value)) + repr(model)
    error: BaseException | None = raised.value
    while error is not None:
        told += repr(error) + repr(getattr(error, "request", "")) + repr(vars(error))
        assert not hasattr(error, "request")
        error = error.__cause__ or error.__context__
    for secret in (KEY, "abcdefgh", "sk-other", "another-secret"):
        assert secret not in told
    assert wire.seen[0].headers["authorization"] == f"Bearer {KEY}"
