"""Sampling parameters are whole and valid when they are born, at both ends of the wire."""

import math

import msgspec
import pytest
from umbel.lang import sampling
from umbel.lang.errors import ParameterError, UmbelError
from umbel.lang.sampling import SamplingParams, merge, overrides


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("max_tokens", -1, "write from 0"),
        ("max_tokens", True, "must be an integer"),
        ("max_tokens", 1.5, "must be an integer"),
        ("max_tokens", 1 << 30, "out of range"),
        ("n", 0, "write from 1 to 128"),
        ("n", 129, "write from 1 to 128"),
        ("temperature", -0.1, "write 0.0 to"),
        ("temperature", math.nan, "write 0.0 to"),
        ("temperature", "0.5", "must be a number"),
        ("top_p", 0.0, "temperature=0"),
        ("top_p", 1.1, "write 0.0 to 1.0"),
        ("top_k", 0, "top_k=-1"),
        ("top_k", -2, "at least -1"),
        ("min_p", math.inf, "write 0.0 to 1.0"),
        ("frequency_penalty", 2.5, "write -2.0 to 2.0"),
        ("presence_penalty", -3, "write -2.0 to 2.0"),
        ("repetition_penalty", 0.0, "write 1.0 for none"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("logit_bias", {1: 101.0}, "write -100.0 to 100.0"),
        ("logit_bias", dict.fromkeys(range(301), 1.0), "at most 300"),
        ("seed", -1, "write from 0"),
        ("ignore_eos", 1, "True or False"),
        ("top_logprobs", 21, "write from 0 to 20"),
        ("stop", ("",), "write 1 to 256"),
        ("stop", ("x" * 257,), "write 1 to 256"),
        ("stop", ("x",) * 17, "at most 16"),
        ("stop_regex", ("",), "write 1 to 1024"),
        ("stop_regex", ("x" * 1025,), "write 1 to 1024"),
        ("stop_regex", (3,), "must be strings, got int 3"),
        ("stop_regex", ("x",) * 17, "at most 16"),
        ("stop_token_ids", (-5,), "at least 0"),
        ("prompt_logprobs_from", -2, "at least 0"),
    ],
)
def test_a_bad_value_names_the_field_and_the_remedy(field: str, value: object, remedy: str) -> None:
    with pytest.raises(ParameterError, match=remedy) as caught:
        SamplingParams(**{field: value})
    assert field.split("_", maxsplit=1)[0] in str(caught.value)
    assert isinstance(caught.value, UmbelError)
    assert isinstance(caught.value, ValueError)


def test_more_minimum_than_maximum_is_refused() -> None:
    with pytest.raises(ParameterError, match="raise max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_the_wire_validates_again() -> None:
    good = msgspec.msgpack.encode(SamplingParams(temperature=0.5, stop=("a",), logit_bias={7: 1.0}))
    assert msgspec.msgpack.decode(good, type=SamplingParams) == SamplingParams(
        temperature=0.5, stop=("a",), logit_bias={7: 1.0}
    )
    for bad in ({"n": 1000}, {"temperature": -1.0}, {"unheard_of": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=SamplingParams)


def test_user_spellings_become_fields() -> None:
    assert overrides({"stop": "\n", "return_logprob": True, "top_logprobs_num": 3, "top_p": None}) == {
        "stop": ("\n",),
        "logprobs": True,
        "top_logprobs": 3,
    }
    assert overrides({"max_new_tokens": 5, "min_new_tokens": 2}) == {"max_tokens": 5, "min_tokens": 2}
    assert overrides({"logprob_start_len": -1}) == {}
    assert overrides({"logprob_start_len": 4}) == {"prompt_logprobs_from": 4}


@pytest.mark.parametrize("options", [{"stop": 5}, {"stop": b"x"}, {"stop_token_ids": "12"}, {"logit_bias": [1]}])
def test_wrong_shapes_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        overrides(options)


def test_unknown_options_are_errors_that_suggest_the_nearest() -> None:
    with pytest.raises(ParameterError, match="'temprature'; did you mean 'temperature'"):
        overrides({"temprature": 1.0})


def test_one_field_under_two_names_is_refused() -> None:
    with pytest.raises(ParameterError, match="return_logprob=True is a second value of logprobs"):
        overrides({"logprobs": False, "return_logprob": True})


def test_later_layers_win() -> None:
    assert merge({"temperature": 0.1, "top_k": 5}, {"temperature": 0.2}) == SamplingParams(temperature=0.2, top_k=5)


def test_limits_are_what_the_documentation_says() -> None:
    assert (sampling.MAX_N, sampling.MAX_STOPS, sampling.MAX_STOP_LENGTH) == (128, 16, 256)
    assert (sampling.MAX_TOP_LOGPROBS, sampling.MAX_LOGIT_BIAS) == (20, 300)
