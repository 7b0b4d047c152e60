"""Errors as answers: a row for each error that a runtime sends."""

import pytest
from umbel.lang import errors
from umbel.server.errors import HttpError, http_error
from umbel.server.openai.chat import ChatBody


@pytest.mark.parametrize("name", sorted(errors.WIRE_ERRORS))
def test_every_error_of_the_wire_has_an_answer_that_says_it(name: str) -> None:
    error = http_error(errors.WIRE_ERRORS[name]("what was wrong"))
    assert 400 <= error.status < 600
    assert error.message == "what was wrong"
    assert error.code != "internal_error"


@pytest.mark.parametrize(
    ("error", "status", "retried"),
    [
        (errors.ParameterError("x"), 400, None),
        (errors.RequestError("x"), 400, None),
        (errors.ContextLengthError("x"), 400, None),
        (errors.GuaranteeError("x"), 422, None),
        (errors.OverloadedError("x"), 503, "true"),
        (errors.EngineError("x"), 503, "true"),
        (errors.DeadlineError("x"), 504, "false"),
    ],
)
def test_clients_are_told_whether_to_try_again(error: errors.UmbelError, status: int, retried: str | None) -> None:
    answer = http_error(error)
    assert (answer.status, answer.headers.get("x-should-retry")) == (status, retried)


def test_a_defect_says_nothing_of_itself() -> None:
    answer = http_error(KeyError("a prompt of a user"))
    assert answer.status == 500
    assert "prompt" not in answer.message


def test_the_field_that_a_parameter_error_begins_with_is_named() -> None:
    assert http_error(errors.ParameterError("top_k=0 keeps no token")).param == "top_k"
    assert http_error(errors.ParameterError("2 stop strings given")).param is None


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (errors.ParameterError("top_k=0 keeps no token"), "top_k", "top_k=0 keeps no token"),
        (errors.ParameterError("tools[1].function: no"), "tools[1].function", "tools[1].function: no"),
        (errors.ConstraintError("json_schema: #/enum: no"), "response_format", "response_format: #/enum: no"),
        (errors.ConstraintError("stop_regex '(': no"), "stop_regex", "stop_regex '(': no"),
        (errors.ConstraintError("no"), None, "no"),
        (errors.ParameterError("it is no parameter: no"), "messages", "it is no parameter: no"),
        (errors.ContextLengthError("the prompt has 9 tokens"), "messages", "the prompt has 9 tokens"),
        (errors.EngineError("top_k: no"), None, "top_k: no"),
    ],
    ids=str,
)
def test_a_field_has_the_name_of_the_body(error: errors.UmbelError, param: str | None, message: str) -> None:
    body = ChatBody(model="oracle", messages=())
    answer = http_error(error, field_of=body.field_of)
    assert (answer.param, answer.message) == (param, message)


def test_a_field_has_the_name_of_the_body_in_the_remedy_too() -> None:
    body = ChatBody(model="oracle", messages=(), max_completion_tokens=2)
    answer = http_error(errors.ConstraintError("max_tokens=2: too few; write max_tokens=4"), field_of=body.field_of)
    assert answer.message == "max_completion_tokens=2: too few; write max_completion_tokens=4"


def test_both_shapes() -> None:
    error = HttpError(400, "must be a number", param="temperature")
    assert error.shape("openai", "id-1") == {
        "error": {
            "message": "must be a number",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }
    assert error.shape("anthropic", "id-1") == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "temperature: must be a number"},
        "request_id": "id-1",
    }


def test_the_seconds_until_a_second_try_are_those_of_the_limits() -> None:
    assert http_error(errors.EngineError("x"), 7).headers == {"retry-after": "7", "x-should-retry": "true"}
    assert "retry-after" not in http_error(errors.DeadlineError("x"), 7).headers
