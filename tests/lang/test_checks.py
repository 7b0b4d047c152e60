"""Checks of arguments: plain values come out, and what is refused is named in a message that a person can read."""

import itertools
import math
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import umbel as ul
from umbel.lang import checks, errors
from umbel.lang.errors import ParameterError, shown
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions, plain_options

HUGE = 10**400
LONG = "a" * 1_000_000


class Rude:
    """Every method that is called unasked fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __len__ = __iter__ = __eq__ = __bool__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class RudeInteger(int):
    def __int__(self) -> int:
        raise RuntimeError("no")

    __index__ = __repr__ = __str__ = __lt__ = __gt__ = __ge__ = __float__ = __int__  # type: ignore[assignment]


class RudeText(str):
    def __str__(self) -> str:
        raise RuntimeError("no")

    __repr__ = __len__ = strip = __iter__ = __format__ = __str__  # type: ignore[assignment]


def own() -> list[object]:
    made: list[object] = []
    made.append(made)
    return made


# ------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "value",
    [
        HUGE,
        10**6000,
        LONG,
        [LONG] * 100,
        {LONG: LONG},
        own(),
        Rude(),
        RudeInteger(3),
        RudeText("x"),
        [Rude()],
        "\ud800",
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_shown_is_short_and_can_be_written(value: object) -> None:
    said = shown(value)
    assert len(said) <= errors.MAX_SHOWN_OBJECT
    said.encode()


def test_small_values_are_shown_as_python_writes_them() -> None:
    for value in (1, -0.5, "x'y", None, True, [1, "a"], (1,), {"a": 1}, b"x", math.inf, Decimal("1.5")):
        assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "kind", [ul.UmbelError, ul.ParameterError, ul.ConnectionLostError, ul.DeadlineError, ul.ModelError]
)
def test_no_message_is_longer_than_a_person_reads(kind: type[ul.UmbelError]) -> None:
    error = kind(f"model={LONG!r}; write a name")
    assert len(str(error)) <= errors.MAX_MESSAGE < 2000
    assert str(error).startswith("model='aaa")
    assert str(error).endswith("; write a name")
    assert str(kind("short")) == "short"


# ------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), RudeInteger(3)], ids=lambda value: type(value).__name__)
def test_integers_of_every_kind_become_plain_ones(value: object) -> None:
    found = checks.integer("n", value, 0, 5)
    assert (type(found), found) == (int, 3)


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_every_kind_become_plain_ones(value: object) -> None:
    found = checks.number("p", value, 0, 1)
    assert (type(found), found) == (float, 0.5)


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), np.array(3), np.array([3]), "3", None, 3.0, Decimal(3), Rude(), math.nan]
)
def test_what_is_no_integer_is_refused_by_name(value: object) -> None:
    with pytest.raises(ParameterError, match="size"):
        checks.integer("size", value, 0, 5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, HUGE, -HUGE, np.array(0.5), 1j, "0.5", True])
def test_what_is_no_number_in_the_range_is_refused_by_name(value: object) -> None:
    with pytest.raises(ParameterError, match="share"):
        checks.number("share", value, 0, 1)


def test_numbers_of_numpy_are_taken_wherever_numbers_are() -> None:
    op = ul.gen(
        "x", np.int64(7), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]), logit_bias={np.int32(3): 1}
    )
    assert op.options["max_tokens"] == 7
    assert op.options["temperature"] == 0.5
    assert op.options["stop_token_ids"] == (1, 2)
    assert {type(value) for value in (op.options["max_tokens"], *op.options["stop_token_ids"])} == {int}
    assert ul.Budget(tokens=np.int64(5)).tokens == 5
    assert plain_options(RuntimeOptions(max_running=np.int64(3))).max_running == 3
    assert ul.select("x", ["a", "b"], temperature=np.float64(0.5)).temperature == 0.5


# Every number that a public call takes, with the name that its message has to have.
NUMBERS = [
    *[(ul.gen, name, {}) for name in (
        "max_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "seed", "logprob_start_len", "top_logprobs_num")],
    (ul.gen, "max_tries", {"regex": "a"}),
    (ul.select, "temperature", {"choices": ["a"]}),
    (ul.select, "max_tries", {"choices": ["a"]}),
    (ul.video, "num_frames", {"source": b"x"}),
    *[(ul.Budget, name, {}) for name in ("tokens", "calls", "dollars", "seconds")],
    *[(ul.Price, name, {"input": 1, "output": 1}) for name in ("input", "output", "cached_input", "cache_write")],
    *[(ul.Echo, name, {}) for name in ("cache_tokens", "delay", "record")],
    *[(ul.Runtime, name, {"model": "oracle"}) for name in (
        "tensor_parallel", "context_length", "max_running", "chunk_size", "pool_tokens", "pool_memory", "memory_share",
        "pin_share",
        "host_cache", "disk_cache_size",
        "salt_share", "constraint_cache", "max_wait", "max_queue", "request_timeout", "seed", "threads",
        "startup_timeout")],
    (DebugOptions, "step_delay", {}),
    *[(kind, name, {"model": "m", "api_key": "k"}) for kind in (ul.OpenAI, ul.Anthropic) for name in (
        "timeout", "first_byte_timeout", "connect_timeout", "idle_timeout", "max_retries", "max_concurrency")],
    (ul.function, "num_api_spec_tokens", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [HUGE, -HUGE, math.nan, math.inf, True, np.array([1, 2]), own(), Rude()],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize(("call", "name", "valid"), NUMBERS, ids=lambda part: getattr(part, "__name__", str(part)))
@pytest.mark.sampled(5)
def test_every_number_has_a_range_and_its_message_a_name(call, name, valid, value) -> None:
    with pytest.raises(ParameterError, match=name) as caught:
        call(**{**valid, name: value})
    assert len(str(caught.value)) < 2000


def test_options_that_exclude_each_other_are_compared_as_plain_values() -> None:
    with pytest.raises(ParameterError, match="tensor_parallel=2: the oracle has no weights"):
        ul.Runtime(RudeText("oracle"), tensor_parallel=RudeInteger(2))


# ------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ul.gen("x", stop=itertools.repeat("a")), "stop"),
        (lambda: ul.gen("x", stop_token_ids=range(10**9)), "stop_token_ids"),
        (lambda: ul.gen("x", stop_token_ids=itertools.count()), "stop_token_ids"),
        (lambda: ul.gen("x", logit_bias=dict.fromkeys(range(10**5), 1.0)), "logit_bias"),
        (lambda: ul.gen("x", choices=map(str, itertools.count())), "choices"),
        (lambda: ul.select("x", [LONG]), "choices"),
        (lambda: ul.gen(LONG), "name"),
        (lambda: ul.gen("x", regex=LONG + "a" * 50_000), "regex"),
        (lambda: ul.gen("x", json_schema={"a": own()}), "json_schema"),
        (lambda: ul.gen("x", dtype=Rude()), "dtype"),
        (lambda: ul.user(own()), "contains itself"),
        (lambda: ul.fetch_image("https://a.example.org/x", hosts=map(str, itertools.count())), "hosts"),
        (lambda: ul.Echo(range(10**9)), "script"),
        (lambda: ul.Echo(probabilities=1), "probabilities"),
        (lambda: ul.OpenAI("m", api_key="k", extra_body={"a": own()}), "extra_body"),
        (lambda: ul.load(3), "path"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_has_no_end_is_refused_by_name(call, name: str) -> None:
    with pytest.raises(ul.ProgramError, match=name) as caught:
        call()
    assert len(str(caught.value)) < 2000


def test_forks_and_batches_have_a_largest_size() -> None:
    @ul.function
    def branches(s: ul.State, size: int) -> None:
        s.fork(size)

    with pytest.raises(
        ParameterError, match="fork: size=1000000 is out of range; write a number of branches from 1 to 16384"
    ):
        branches.run(10**6, backend=ul.Echo())
    with pytest.raises(ParameterError, match="generator_style=True"):
        branches.run_batch([{}] * 1_000_001, backend=ul.Echo())
    with pytest.raises(ParameterError, match="num_threads"):
        branches.run_batch([{"size": 1}], num_threads=HUGE, backend=ul.Echo())


# ------------------------------------------------------------------------------------------- no effect


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ul.gen("x", token_healing=False), "token_healing=False is for constrained text"),
        (lambda: ul.gen("x", choices_method="exact"), "needs choices"),
        (lambda: ul.gen("x", json_whitespace="compact"), "json_whitespace='compact' needs json_schema"),
        (lambda: ul.gen("x", dtype=int, json_key_order="any"), "json_key_order='any' needs json_schema"),
        (lambda: ul.gen("x", max_tries=2), "max_tries=2 needs a constraint"),
        (lambda: ul.gen("x", constraint_engine="fsm"), "constraint_engine='fsm' needs a constraint"),
        (lambda: ul.gen("x", choices=["a"], return_text_in_logprobs=True), "return_text_in_logprobs"),
        (lambda: ul.select("x", ["a"], method="exact", max_tries=2), "max_tries=2 is for models that generate"),
        (lambda: ul.separate_reasoning("text"), "generates nothing"),
        (lambda: ul.separate_reasoning(ul.separate_reasoning(ul.gen("x"))), "the outer one does nothing"),
        (lambda: ul.Echo(sleep=lambda seconds: None), "sleep= does nothing without a delay"),
        (lambda: ul.Runtime("oracle", chat_template=ul.ChatTemplate(None), template_options={"a": 1}), "does nothing"),
        (lambda: ul.OpenAI("m", api_key="k", timeout=5, first_byte_timeout=6), "first_byte_timeout=6.0 is more than"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_an_error_that_names_it(call, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()


def test_texts_of_log_probabilities_that_nobody_asks_for_are_an_error() -> None:
    @ul.function
    def ask(s: ul.State) -> None:
        s += ul.gen("x", max_tokens=2, return_text_in_logprobs=False)

    with pytest.raises(ParameterError, match="return_text_in_logprobs=False does nothing without log-probabilities"):
        ask.run(backend=ul.Echo())
    assert ask.run(backend=ul.Echo(["hi"]), return_logprob=True)["x"] == "hi"


def test_two_paths_name_one_file_also_before_it_is_made(tmp_path: Path) -> None:
    file, link, hard = (str(tmp_path / name) for name in ("a", "link", "hard"))
    assert checks.is_one_file(file, str(tmp_path / "b" / ".." / "a"))
    Path(file).write_text("")
    os.symlink(file, link)
    os.link(file, hard)
    assert checks.is_one_file(file, link)
    assert checks.is_one_file(link, hard)
    assert not checks.is_one_file(file, str(tmp_path / "c"))
    assert not checks.is_one_file(file, "\0")
