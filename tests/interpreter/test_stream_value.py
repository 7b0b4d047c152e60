"""Typed values while they are written: parts, then the whole, for any number of readers and on every backend."""

import asyncio
import dataclasses
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, FailCall, Gate
from umbel.testing import VLLM, FakeAnthropic, FakeOpenAI

from .conftest import PATIENCE


@dataclasses.dataclass
class Book:
    title: str
    year: int
    tags: list[str]


TEXT = '{"title": "Dune Messiah", "year": 1969, "tags": ["sand", "worm"]}'
WHOLE = Book("Dune Messiah", 1969, ["sand", "worm"])


@dataclasses.dataclass
class Old(Book):
    def __post_init__(self) -> None:
        if self.year > 1968:
            raise ValueError("too new")


@ul.function
def program(s, dtype):
    s += "A book: " + ul.gen("book", dtype=dtype)


def parts(state: ul.State) -> list[Any]:
    return list(state.stream_value("book"))


def test_parts_come_as_the_text_does() -> None:
    gate = Gate()
    state = program.run(Book, backend=Echo([TEXT], gate=gate), stream=True, timeout=PATIENCE)
    growing = state.stream_value("book")
    gate.step(2)  # the call, and "{"
    assert repr(next(growing)) == "Partial[Book](title=None, year=None, tags=None)"
    gate.step(6)  # as far as the quote that begins the title
    assert next(growing).title == ""
    gate.step(1)
    assert next(growing).title == "Dune"
    gate.open()
    *_, last = growing
    assert last == WHOLE == state.value("book")


def test_readers_do_not_disturb_each_other_and_late_ones_get_the_whole() -> None:
    state = program.run(Book, backend=Echo([TEXT]), stream=True, timeout=PATIENCE)
    one, other = state.stream_value("book"), state.stream_value("book")
    assert [[*one][-1], [*other][-1]] == [WHOLE, WHOLE]
    assert parts(state) == [WHOLE]
    assert "".join(state.text_iter("book")) == TEXT


def test_an_async_program_and_its_reader() -> None:
    @ul.function
    async def inner(s):
        s += "A book: " + ul.gen("book", dtype=Book)

    async def read() -> Any:
        state = await inner.run_async(backend=Echo([TEXT]), stream=True, timeout=PATIENCE)
        return [part async for part in state.stream_value("book")][-1]

    assert asyncio.run(read()) == WHOLE


def test_the_state_of_a_sync_program_is_read_by_async_for() -> None:
    async def read() -> Any:
        state = program.run(Book, backend=Echo([TEXT]), stream=True, timeout=PATIENCE)
        return [part async for part in state.stream_value_async("book")][-1]

    assert asyncio.run(read()) == WHOLE


def test_text_without_a_type_grows_as_text() -> None:
    @ul.function
    def plain(s):
        s += "a" + ul.gen("book")

    gate = Gate()
    state = plain.run(backend=Echo(["one two three"], gate=gate), stream=True, timeout=PATIENCE)
    growing = state.stream_value("book")
    gate.step(2)
    assert next(growing) == "one"
    gate.open()
    assert list(growing)[-1] == "one two three"


def test_numbers_and_choices_come_whole() -> None:
    @ul.function
    def counted(s):
        s += "a" + ul.gen("n", dtype=int) + ul.select("c", ["x", "y"])
        s["given"] = [1, 2]

    echo = Echo(["1234"], scores={"x": -0.1, "y": -1.0})
    state = counted.run(backend=echo, stream=True, timeout=PATIENCE)
    assert list(state.stream_value("n")) == [1234]
    assert list(state.stream_value("c"))[-1] == "x"
    assert list(state.stream_value("given")) == [[1, 2]]


def test_an_error_of_the_run_comes_after_the_parts() -> None:
    error = RuntimeError("cut")
    echo = Echo([TEXT], faults=FailCall(4, error, verbs=["chunk"]))
    state = program.run(Book, backend=echo, stream=True, timeout=PATIENCE)
    with pytest.raises(RuntimeError) as caught:
        parts(state)
    assert caught.value is error


def test_an_unknown_name_is_told() -> None:
    state = program.run(Book, backend=Echo([TEXT]), stream=True, timeout=PATIENCE)
    with pytest.raises(ul.VariableError, match="did you mean 'book'"):
        next(state.stream_value("bok"))


def test_a_text_that_was_cut_off_has_parts_and_no_value() -> None:
    gate = Gate()
    state = program.run(Book, backend=Echo([TEXT], gate=gate), max_tokens=3, stream=True, timeout=PATIENCE)
    growing = state.stream_value("book")
    gate.step(2)
    assert isinstance(next(growing), ul.Partial)
    gate.open()
    with pytest.raises(ul.ResultError, match="holds no Book"):
        list(growing)


def test_of_several_texts_the_first_has_parts() -> None:
    @ul.function
    def several(s):
        s += "a" + ul.gen("book", dtype=Book, n=2)

    state = several.run(backend=Echo([[TEXT, TEXT.replace("1969", "1970")]]), stream=True, timeout=PATIENCE)
    assert [book.year for book in parts(state)[-1]] == [1969, 1970]


@pytest.mark.parametrize("compiled", [False, True])
def test_on_hosted_backends_that_stream(compiled: bool) -> None:
    @ul.function
    def chat(s):
        s += ul.user("A book?") + ul.assistant(ul.gen("book", dtype=Book, max_tokens=60))

    made: Any = chat.compile() if compiled else chat
    for features, profile in ((None, "openai"), (VLLM, "vllm")):
        with FakeOpenAI([TEXT], **({} if features is None else {"features": features})) as server:
            model = ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key, profile=profile)
            assert parts(made.run(backend=model, stream=True, timeout=PATIENCE))[-1] == WHOLE
    with FakeAnthropic([TEXT]) as server:
        claude = ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)
        assert parts(made.run(backend=claude, stream=True, timeout=PATIENCE))[-1] == WHOLE


def test_while_tracing_it_is_refused() -> None:
    @ul.function
    def reads(s):
        s += "a" + ul.gen("x")
        for _ in s.stream_value("x"):
            pass

    with pytest.raises(ul.TraceError, match="the parts of a value"):
        reads.trace()


def test_an_answer_that_is_asked_again_has_no_parts_before_it_counts() -> None:
    echo = Echo([TEXT, TEXT.replace("1969", "1950")])
    state = program.run(Old, backend=echo, stream=True, timeout=PATIENCE)
    assert parts(state) == [Old("Dune Messiah", 1950, ["sand", "worm"])]
    assert state.get_meta_info("book")["tries"] == 2
