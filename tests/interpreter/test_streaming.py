"""Reading while it is written: any number of readers, no piece lost, none twice."""

import asyncio
import threading

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, FailCall, Gate
from umbel.lang.protocol import GenRequest

from .conftest import PATIENCE


@ul.function
def story(s):
    s += "Once " + ul.gen("first") + " and " + ul.gen("second") + ul.select("end", [" End", " Fin"])


SCRIPT = ["upon a time", "so on"]
SCORES = {" End": -0.1, " Fin": -1.0}


def test_pieces_come_as_they_are_made() -> None:
    gate = Gate()
    state = story.run(backend=Echo(SCRIPT, scores=SCORES, gate=gate), stream=True, timeout=PATIENCE)
    pieces = state.text_iter()
    assert next(pieces) == "Once "
    gate.step(2)  # the call, and its first piece
    assert next(pieces) == "upon"
    gate.step()
    assert next(pieces) == " a"
    gate.open()
    assert list(pieces) == [" time", " and ", "so", " on", " End"]


def test_the_pieces_of_a_variable_are_its_value() -> None:
    state = story.run(backend=Echo(SCRIPT, scores=SCORES), stream=True, timeout=PATIENCE)
    assert list(state.text_iter("second")) == ["so", " on"]
    assert "".join(state.text_iter("first")) == state["first"]
    assert list(state.text_iter("end")) == [" End"]
    assert "".join(state.text_iter()) == state.text()


def test_a_reader_that_comes_late_sees_everything() -> None:
    state = story.run(backend=Echo(SCRIPT, scores=SCORES), timeout=PATIENCE)
    state.sync()
    for _ in range(2):
        assert "".join(state.text_iter()) == "Once upon a time and so on End"
        assert "".join(state.text_iter("first")) == "upon a time"


def test_requests_are_streamed_only_when_someone_reads_pieces() -> None:
    echo = Echo(SCRIPT * 2, scores=SCORES)
    story.run(backend=echo, timeout=PATIENCE).sync()
    assert [r.stream for r in echo.requests if isinstance(r, GenRequest)] == [False, False]
    list(story.run(backend=echo, stream=True, timeout=PATIENCE).text_iter())
    assert [r.stream for r in echo.requests if isinstance(r, GenRequest)][2:] == [True, True]


def test_a_program_can_read_pieces_of_its_own_text() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x")
        whole = "".join(s.text_iter())
        s += "b" + ul.gen("y")
        return whole, "".join(s.text_iter("y")), "".join(s.text_iter())

    assert program.run(backend=Echo(["1", "2"]), timeout=PATIENCE).ret_value == ("a1", "2", "a1b2")


def test_pieces_carry_facts() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x", return_logprob=True)

    state = program.run(backend=Echo(["one two"]), stream=True, timeout=PATIENCE)
    pieces = list(state.text_iter("x", return_meta_data=True))
    assert [text for text, _ in pieces] == ["one", " two"]
    assert all(meta["id"] and len(meta["output_token_logprobs"]) == 1 for _, meta in pieces)


def test_a_piece_of_a_finished_call_carries_all_of_its_facts() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x")

    state = program.run(backend=Echo(["one two"]), timeout=PATIENCE)
    state.sync()
    ((text, meta),) = state.text_iter("x", return_meta_data=True)
    assert (text, meta["completion_tokens"], meta["finish_reason"]) == ("one two", 2, "stop")


def test_of_several_continuations_the_first_is_streamed() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x", n=2)

    state = program.run(backend=Echo([["one two", "three four"]]), stream=True, timeout=PATIENCE)
    assert list(state.text_iter("x")) == ["one", " two"]
    assert list(state.text_iter()) == ["a", "one", " two"]
    assert state["x"] == ["one two", "three four"]


def test_text_before_a_stop_string_is_streamed_and_the_stop_is_not() -> None:
    @ul.function
    def program(s):
        s += "a" + ul.gen("x", stop="rST") + "!"

    state = program.run(backend=Echo(["one fourSTOP five"]), stream=True, timeout=PATIENCE)
    assert "".join(state.text_iter("x")) == state["x"] == "one fou"
    assert "".join(state.text_iter()) == "aone fou!"


def test_an_error_in_the_middle_comes_after_the_pieces_before_it() -> None:
    error = RuntimeError("cut")
    echo = Echo(["one two three"], faults=FailCall(3, error, verbs=["chunk"]))

    @ul.function
    def program(s):
        s += "a" + ul.gen("x")

    state = program.run(backend=echo, stream=True, timeout=PATIENCE)
    for name, expected in (("x", ["one", " two"]), (None, ["a", "one", " two"])):
        seen: list[str] = []
        with pytest.raises(RuntimeError) as caught:
            seen.extend(state.text_iter(name))
        assert caught.value is error
        assert seen == expected


def test_an_observer_waits_for_a_name_until_it_is_bound_or_the_program_ended() -> None:
    go = threading.Event()

    @ul.function
    def program(s):
        assert go.wait(PATIENCE)
        s += "a" + ul.gen("x")

    state = program.run(backend=Echo(["1"]), stream=True, timeout=PATIENCE)
    seen: list[object] = []

    def observe() -> None:
        seen.append(state["x"])
        try:
            state["z"]
        except ul.VariableError as error:
            seen.append(str(error))

    thread = threading.Thread(target=observe)
    thread.start()
    go.set()
    thread.join(PATIENCE)
    assert seen[0] == "1"
    assert "sets no variable 'z'" in str(seen[1])


def test_the_program_itself_does_not_wait_for_a_name_it_never_says() -> None:
    @ul.function
    def program(s):
        with pytest.raises(ul.VariableError):
            s["z"]
        return "went on"

    state = program.run(backend=Echo(), stream=True, timeout=PATIENCE)
    state.sync()
    assert "".join(state.text_iter()) == ""
    assert state.ret_value == "went on"


def test_an_error_of_the_body_reaches_the_observers() -> None:
    go = threading.Event()

    @ul.function
    def program(s):
        s += "a" + ul.gen("x")
        s["x"]
        assert go.wait(PATIENCE)
        raise ValueError("body")

    state = program.run(backend=Echo(["1"]), stream=True, timeout=PATIENCE)
    assert state["x"] == "1"
    go.set()
    with pytest.raises(ValueError, match="body"):
        state["never"]
    with pytest.raises(ValueError, match="body"):
        list(state.text_iter())
    assert state["x"] == "1"


def test_thinking_and_answer_are_streamed_apart() -> None:
    @ul.function
    def program(s):
        s += "Q: " + ul.separate_reasoning(ul.gen("a"))

    state = program.run(backend=Echo(["<think> one two </think>\n\nthree four"]), stream=True, timeout=PATIENCE)
    assert "".join(state.text_iter("a_reasoning_content")) == "one two" == state["a_reasoning_content"]
    assert list(state.text_iter("a")) == ["three", " four"]
    assert "".join(state.text_iter()) == state.text() == "Q: three four"


def test_many_async_readers_on_another_loop() -> None:
    gate = Gate()
    state = story.run(backend=Echo(SCRIPT, scores=SCORES, gate=gate), stream=True, timeout=PATIENCE)

    async def read(name: str | None) -> str:
        return "".join([piece async for piece in state.text_async_iter(name)])

    async def read_all() -> list[str]:
        readers = [asyncio.create_task(read(name)) for name in (None, "first", None, "second", "end")]
        await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(*readers)

    whole = "Once upon a time and so on End"
    assert asyncio.run(read_all()) == [whole, "upon a time", whole, "so on", " End"]


def test_a_branch_streams_what_it_says_itself() -> None:
    @ul.function
    def program(s):
        s += "root "
        fork = s.fork(2)
        fork += lambda i: f"{i}:" + ul.gen("x")
        return fork

    state = program.run(backend=Echo(lambda prompt: "one two"), stream=True, timeout=PATIENCE)
    assert "".join(state.text_iter()) == "root "
    assert list(state.ret_value[1].text_iter()) == ["1:", "one", " two"]
