"""Numbers, strings and formats, against what Python says of the same values."""

import datetime
import ipaddress
import random
import re
import uuid
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.errors import ConstraintRefused

from .texts import admits, automaton, sample, takes


def numbers(schema: dict[str, object], *texts: str) -> list[bool]:
    admitted = automaton({"type": "number"} | schema)
    return [takes(admitted, text.encode()) for text in texts]


def test_numbers_have_one_plain_spelling() -> None:
    assert numbers({}, "0", "-1", "1.5", "-0.25", "1e9", "2.5E-3") == [True] * 6
    assert numbers({}, "", "-", "+1", "01", "1.", ".5", "1e", "-0", "1e999", "NaN") == [False] * 10
    assert numbers({"type": "integer"}, "0", "12", "-7", "-0", "1.0", "1e3", "007") == [True] * 3 + [False] * 4


@settings(max_examples=60, deadline=None)
@given(
    low=st.integers(-1200, 1200),
    span=st.integers(0, 2500),
    values=st.lists(st.integers(-3000, 3000), min_size=5, max_size=20),
)
def test_integers_of_a_range(low: int, span: int, values: list[int]) -> None:
    high = low + span
    admitted = automaton({"type": "integer", "minimum": low, "maximum": high})
    for value in [*values, low, high, low - 1, high + 1]:
        assert takes(admitted, str(value).encode()) == (low <= value <= high)


BOUNDS = st.decimals(-200, 200, allow_nan=False, places=2) | st.integers(-20, 20).map(Decimal)


@settings(max_examples=80, deadline=None)
@given(
    low=BOUNDS,
    high=BOUNDS,
    low_open=st.booleans(),
    high_open=st.booleans(),
    values=st.lists(st.decimals(-250, 250, allow_nan=False, places=3), min_size=5, max_size=15),
)
def test_decimals_of_a_range(
    low: Decimal, high: Decimal, low_open: bool, high_open: bool, values: list[Decimal]
) -> None:
    words = ("exclusiveMinimum" if low_open else "minimum", "exclusiveMaximum" if high_open else "maximum")
    schema = {"type": "number", words[0]: float(low), words[1]: float(high)}
    if low > high or (low == high and (low_open or high_open)):
        with pytest.raises(ConstraintRefused, match="no number is"):
            automaton(schema)
        return
    admitted = automaton(schema)
    for value in [*values, low, high, low.normalize() + 0, (low + high) / 2]:
        inside = (low < value or (low == value and not low_open)) and (
            value < high or (value == high and not high_open)
        )
        text = format(value, "f")
        if text.startswith("-") and not value:
            continue  # "-0.000" is a spelling of 0 that ranges leave out
        assert takes(admitted, text.encode()) == inside, text


@pytest.mark.parametrize("step", ["1", "7", "12", "100", "0.01", "0.5", "0.25", "2.5"])
def test_multiples(step: str) -> None:
    admitted = automaton(f'{{"type": "number", "multipleOf": {step}, "minimum": -50, "maximum": 1000}}')
    choose = random.Random(7)
    for _ in range(200):
        value = Decimal(choose.randrange(-6000, 110000)) / choose.choice([1, 10, 100])
        expected = value % Decimal(step) == 0 and -50 <= value <= 1000
        if not value:
            continue
        assert takes(admitted, format(value, "f").encode()) == expected or (
            "." in str(value) and expected and Decimal(step) % 1 == 0  # 7.0 is a multiple of 7, spelt as no integer
        ), value


def test_bounds_of_draft_4_and_of_openapi() -> None:
    assert numbers({"minimum": 3, "exclusiveMinimum": True}, "3", "3.1") == [False, True]
    assert numbers({"type": "integer", "format": "int32"}, "2147483647", "2147483648") == [True, False]


def test_lengths_are_in_characters() -> None:
    schema = {"type": "string", "minLength": 2, "maxLength": 3}
    assert admits(schema, "ab", "日本語", '"\\\n', "\x01😀", "a", "abcd") == [True] * 4 + [False] * 2


def test_patterns_are_searched_for_and_meet_lengths() -> None:
    assert admits({"type": "string", "pattern": "b+"}, "abc", "b", "\n\nb", "ac") == [True, True, True, False]
    both = {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4}
    assert admits(both, "ab", "abcd", "a", "abcde", "AB") == [True, True, False, False, False]
    assert admits({"enum": ["abc", "x1", "yy"], "pattern": "^[a-z]+$"}, "abc", "yy", "x1") == [True, True, False]


def test_a_string_has_one_spelling() -> None:
    admitted = automaton({"type": "string"})
    assert takes(admitted, '"é\\n\\u0001/"'.encode())
    assert not any(takes(admitted, text) for text in (b'"\\u00e9"', b'"\\/"', b'"\n"', b'"\\u000A"'))


def is_date(text: str) -> bool:
    datetime.date.fromisoformat(text)
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None


def is_time(text: str) -> bool:
    datetime.time.fromisoformat(re.sub(r"\.\d+", "", text))
    return re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", text, re.ASCII) is not None


def is_moment(text: str) -> bool:
    day, _, clock = text.partition("T")
    return is_date(day) and is_time(clock)


def is_host(text: str) -> bool:
    labels = text.split(".")
    return len(text) <= 253 and all(re.fullmatch(r"(?!-)[a-zA-Z0-9-]{1,63}(?<!-)", label) for label in labels)


def is_uuid(text: str) -> bool:
    return str(uuid.UUID(text)) == text.lower()


def is_expression(text: str) -> bool:
    return re.compile(text) is not None


CHECKS = {
    "date": (
        is_date,
        ["2024-02-29", "2000-02-29", "0001-01-01"],
        ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"],
    ),
    "time": (is_time, ["23:59:59Z", "00:00:00.5+14:00"], ["24:00:00Z", "12:00:00", "12:60:00Z", "12:00:60Z"]),
    "date-time": (is_moment, ["2024-02-29T12:00:00Z"], ["2024-02-29", "2024-02-30T12:00:00Z", "2024-02-29 12:00:00Z"]),
    "hostname": (is_host, ["a", "example.com", "a-b.c-d.e1.f2.g3"], ["-a", "a-", "a..b", "xn--a", "a_b", "", "a" * 64]),
    "ipv4": (ipaddress.IPv4Address, ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (
        ipaddress.IPv6Address,
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4", "1::8"],
        ["1:2:3:4:5:6:7", "1::2::3", ":1", "12345::", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:1.2.3.4", "::%eth0"],
    ),
    "uuid": (is_uuid, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "123e4567"]),
    "email": (lambda text: text.count("@") == 1, ["a.b+c@example.com"], ["a@", "@b", "a", ".a@b", "a..b@c", "a b@c"]),
    "duration": (lambda text: text[0] == "P", ["P1Y2M3D", "PT1H", "P4W", "P1DT12H"], ["P", "PT", "P1S", "1D", "P1Y3D"]),
    "uri": (
        lambda text: ":" in text,
        ["https://a.b/c?d=e#f", "urn:x:y", "http://[::1]:80/"],
        ["/a", "a b:c", "//x", "%"],
    ),
    "uri-reference": (lambda text: True, ["", "/a/b", "#x", "a?b", "http://x"], ["a b", "\\x", "%zz"]),
    "json-pointer": (lambda text: text in ("",) or text[0] == "/", ["", "/a~0b/~1"], ["a", "/~2"]),
    "regex": (is_expression, ["^a+(b|c)*[^x0-9]{2}$", ""], ["(", "[", "*"]),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.sampled(4)
def test_formats_admit_the_usual_and_nothing_wrong(name: str) -> None:
    check, right, wrong = CHECKS[name]
    schema = {"type": "string", "format": name}
    assert admits(schema, *right) == [True] * len(right)
    assert admits(schema, *wrong) == [False] * len(wrong)
    admitted, choose = automaton(schema), random.Random(3)
    for _ in range(60):
        text = sample(admitted, choose, 40)
        assert check(text[1:-1].replace("\\\\", "\\").replace('\\"', '"')), text


def test_formats_that_nobody_specifies_are_annotations() -> None:
    assert admits({"type": "string", "format": "topic"}, "anything at all") == [True]


def test_twenty_thousand_constants() -> None:
    words = [f"word {number:x}" for number in range(20_000)]
    admitted = automaton({"enum": words})
    assert takes(admitted, b'"word 4e1f"')
    assert not takes(admitted, b'"word 4e20"')
