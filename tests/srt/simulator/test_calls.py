"""Programs of workload files ask as the language does; arrivals begin them when they say."""

from collections.abc import Callable

import numpy as np
import pytest
from umbel.lang.errors import CapabilityError, ParameterError
from umbel.lang.prompt import Part
from umbel.lang.protocol import Origin
from umbel.srt.simulator.arrivals import AtOnce, ClosedLoop, Poisson, parse_arrivals, start_sessions
from umbel.srt.simulator.calls import Answered, ProgramSession, Shape, SimulatedCall, parse_shape
from umbel.srt.simulator.events import Events
from umbel.srt.simulator.workload import Fork, Gen, Image, Op, Program, Select, Text, Var


class Answering:
    """A host whose calls end when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, SimulatedCall, Callable[[Answered], None]]] = []
        self.hints: list[str] = []

    def ask(self, call: SimulatedCall, then: Callable[[Answered], None]) -> None:
        assert isinstance(call.prompt, tuple)
        self.asked.append((text_of(call.prompt), call, then))

    def hint(self, prompt: tuple[Part, ...], origin: Origin) -> None:
        self.hints.append(text_of(prompt))

    def answer(self, prompt: str, text: str) -> None:
        index = next(i for i, (asked, _, _) in enumerate(self.asked) if asked == prompt)
        _, _, then = self.asked.pop(index)
        then(Answered(text, tuple(text.encode())))

    @property
    def prompts(self) -> list[str]:
        return [prompt for prompt, _, _ in self.asked]


def text_of(prompt: tuple[Part, ...]) -> str:
    return "".join(getattr(part, "text", "") for part in prompt)


def begun(*ops: Op) -> tuple[Answering, list[str]]:
    host, ended = Answering(), []
    ProgramSession(Program("p", ops), 1).begin(host, lambda: ended.append("ended"))
    return host, ended


def test_a_state_waits_for_each_of_its_answers() -> None:
    host, ended = begun(Text("a"), Gen("x", 3), Text("b"), Gen("y", 3))
    assert host.prompts == ["a"]
    host.answer("a", "1")
    assert host.prompts == ["a1b"]
    assert not ended
    host.answer("a1b", "2")
    assert ended == ["ended"]


def test_the_parent_of_a_fork_goes_on_and_waits_where_it_needs_a_branch() -> None:
    fork = Fork(((Text("l"), Gen("x", 3)), (Text("r"), Gen("x", 3))))
    host, ended = begun(Text("a"), fork, Gen("y", 3), Var("1.x"), Gen("z", 3))
    assert sorted(host.prompts) == ["a", "al", "ar"]
    assert host.hints == ["a"]
    assert len({call.origin.fork_group for prompt, call, _ in host.asked if prompt != "a"}) == 1
    host.answer("a", "0")
    host.answer("al", "1")
    assert host.prompts == ["ar"]
    host.answer("ar", "2")
    assert host.prompts == ["a02"]
    host.answer("a02", "3")
    assert ended == ["ended"]


def test_a_joined_fork_is_waited_for() -> None:
    host, _ = begun(Fork(((Text("l"), Gen("x", 3)), (Text("r"), Gen("x", 3))), join=True), Text("b"), Gen("y", 3))
    host.answer("l", "1")
    assert host.prompts == ["r"]
    host.answer("r", "1")
    assert host.prompts == ["b"]


def test_a_select_goes_on_with_one_of_its_choices() -> None:
    host, ended = begun(Text("a"), Select("x", ("yes", "no")), Gen("y", 1))
    assert host.asked[0][1].choices == ("yes", "no")
    host.answer("a", "")
    assert host.prompts[0] in ("ayes", "ano")
    assert not ended


def test_a_program_with_pictures_is_refused(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(CapabilityError, match="takes text only"):
        ProgramSession(Program("p", (Image(Path("cat.png")),)), 1)


def test_a_shape_has_its_prefixes_and_tokens_of_its_own() -> None:
    shape = Shape(prefixes=3, prefix=5, own=2, requests=20)
    prompts = [session.call.prompt for session in shape.sessions()]
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 3
    assert len({int(token) for prompt in prompts for token in prompt[5:]}) == 40


def test_a_skewed_shape_uses_its_first_prefixes_most() -> None:
    prompts = [session.call.prompt for session in Shape(prefixes=50, prefix=1, skew=1.5, requests=500).sessions()]
    counts = np.bincount([int(prompt[0]) for prompt in prompts], minlength=50)
    assert counts[0] > 5 * counts[10]


@pytest.mark.parametrize("text", ["prefixes=x", "own", "colour=3", "own=0", "prefixes=1000000,prefix=100000"])
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ParameterError):
        parse_shape(text)


class Immediate:
    """A host whose calls take a second; it counts those in flight."""

    def __init__(self, events: Events) -> None:
        self.events, self.began = events, []
        self.in_flight = self.most = 0

    def ask(self, call: SimulatedCall, then: Callable[[Answered], None]) -> None:
        self.began.append(self.events.now)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)

        def end() -> None:
            self.in_flight -= 1
            then(Answered())

        self.events.at(self.events.now + 1.0, end)

    def hint(self, prompt: tuple[Part, ...], origin: Origin) -> None: ...


def test_clients_ask_again_when_they_are_answered() -> None:
    events = Events()
    host = Immediate(events)
    start_sessions(ClosedLoop(3), Shape(requests=9).sessions(), events, host)
    events.run()
    assert host.most == 3
    assert host.began == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_random_arrivals_have_their_rate() -> None:
    events = Events()
    host = Immediate(events)
    start_sessions(Poisson(50.0), Shape(prefix=1, requests=2_000).sessions(), events, host)
    events.run()
    assert host.began[-1] == pytest.approx(2_000 / 50, rel=0.1)
    assert host.began == sorted(host.began)


def test_arrivals_are_read() -> None:
    assert parse_arrivals("all") == AtOnce()
    assert parse_arrivals("poisson:2.5", 7) == Poisson(2.5, 7)
    assert parse_arrivals("clients:8") == ClosedLoop(8)
    for text in ("clients:0", "poisson:-1", "soon", "clients:x"):
        with pytest.raises(ParameterError, match="write all, poisson:60"):
            parse_arrivals(text)
