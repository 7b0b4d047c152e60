"""Random programs: whatever they do, they end, and the reads of a failed one raise what failed it.

Depth up to 4, width up to 8; one in ten raises in its body, and backend calls fail at random.
"""

import contextlib
import threading
from dataclasses import dataclass

import umbel as ul
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo, FailCall

from .conftest import PATIENCE
from .test_batch import _tick


class BodyError(Exception):
    pass


class CallError(Exception):
    pass


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Ask:
    name: str
    n: int


@dataclass(frozen=True)
class Choose:
    name: str


@dataclass(frozen=True)
class Read:
    name: str


@dataclass(frozen=True)
class Turn:
    role: str
    body: tuple[object, ...]


@dataclass(frozen=True)
class Scope:
    name: str
    body: tuple[object, ...]


@dataclass(frozen=True)
class Fork:
    width: int
    body: tuple[object, ...]
    join: str


@dataclass(frozen=True)
class Raise:
    pass


NAMES = st.sampled_from("abcd")
LEAVES = st.one_of(
    st.builds(Say, st.sampled_from(["hello ", "", "naïve ✓ ", "<|im_end|>", "x" * 200])),
    st.builds(Ask, NAMES, st.integers(1, 2)),
    st.builds(Choose, NAMES),
    st.builds(Read, NAMES),
)


def bodies(depth: int) -> st.SearchStrategy[tuple[object, ...]]:
    statement = LEAVES
    if depth > 1:
        inner = bodies(depth - 1)
        statement = st.one_of(
            LEAVES,
            st.builds(Fork, st.integers(1, 8), inner, st.sampled_from(["gather_variable", "concate_and_append", ""])),
            st.builds(Scope, NAMES, inner),
            st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), st.lists(LEAVES, max_size=3).map(tuple)),
        )
    return st.lists(statement, max_size=5).map(tuple)


def run_body(s, body: tuple[object, ...]) -> None:
    for statement in body:
        match statement:
            case Say(text):
                s += text
            case Ask(name, n):
                s += ul.gen(name, n=n, max_tokens=5)
            case Choose(name):
                s += ul.select(name, ["yes", "no way"])
            case Read(name):
                if name in s:
                    s[name]
            case Turn(role, inner):
                if s._sink._grammar.open_role is None:
                    with getattr(s, role)():
                        run_body(s, inner)
            case Scope(name, inner):
                with s.var_scope(name):
                    run_body(s, inner)
            case Fork(width, inner, join):
                forks = s.fork(width)
                for branch in forks:
                    run_body(branch, inner)
                if join:
                    forks.join(join)
            case Raise():
                raise BodyError


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    body=bodies(4),
    tail=st.sampled_from([()] * 9 + [(Raise(),)]),
    failing_call=st.integers(0, 60),
    stream=st.booleans(),
)
def test_every_random_program_ends(
    body: tuple[object, ...], tail: tuple[object, ...], failing_call: int, stream: bool
) -> None:
    error = CallError()
    faults = FailCall(failing_call, error, ("generate", "score", "chunk", "hint")) if failing_call else None
    echo = Echo(lambda prompt: "one two three", faults=faults)

    @ul.function
    def program(s):
        run_body(s, body)
        s += ul.gen("last")
        run_body(s, tail)

    with contextlib.suppress(CallError, BodyError):
        state = program.run(backend=echo, stream=stream, timeout=PATIENCE)
        for name in ("a", "b", "c", "d", "last"):
            with contextlib.suppress(CallError, BodyError, ul.VariableError):
                state[name]
                state.get_meta_info(name)
        assert "".join(state.text_iter()) == state.text()  # or both raise, which the second read shows
        state.sync()
        assert state.error() is None
    loop.streams.run(_tick(), PATIENCE)
    assert echo.active == set()
    assert threading.active_count() < 40
