"""A compiled program is the interpreted one: the same prompts, the same calls, the same variables."""

import zlib
from typing import Any

import pytest
import umbel as ul
from hypothesis import HealthCheck, Phase, given, settings
from umbel.interpreter.backends.echo import Echo
from umbel.srt.in_process import LocalBackend

from ..random_programs import Ask, Fork, Keep, bodies, program_of
from ..watching import Watched, known_facts, seen

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

PATIENCE = 60.0  # seconds, far above what any of these programs needs
ARGUMENTS = {"question": 'why "so"? '}
QUIETLY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": (Phase.explicit, Phase.generate, Phase.shrink),
    "suppress_health_check": list(HealthCheck),
}


def answer(prompt: str) -> str:
    """Some words, others for every prompt."""
    number = zlib.crc32(prompt.encode("utf-8", "surrogatepass"))
    return " ".join(f"w{number >> shift & 255:x}e" for shift in range(0, 24, 4))


@pytest.fixture(scope="module")
def oracle() -> Watched:
    return Watched(LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15))


def check_equal(body: tuple[object, ...], backend: Watched, passes: str) -> None:
    beside: list[ul.State] = []
    program = program_of(body, beside)
    with ul.default_backend(backend):
        state = program.run(**ARGUMENTS, timeout=PATIENCE)
    expected = seen(state)
    for each in (state, *beside):
        each._sink.run.wait_finished()
    calls = backend.forget()
    state = program.compile(passes=passes).run(**ARGUMENTS, backend=backend, timeout=PATIENCE)
    found = seen(state)
    for name, facts in expected["facts"].items():
        found["facts"][name] = known_facts(facts, found["facts"][name])
    assert found == expected
    state._sink.run.wait_finished()
    assert backend.forget() == calls


ONE, TWO = Ask("a", (("max_tokens", 3),)), Ask("a", (("max_tokens", 2), ("n", 2)))
LEFT_ALONE: list[tuple[object, ...]] = [  # names that some branches leave as they were before the fork
    (ONE, Fork(3, (ONE,), "gather_variable", 2), Keep("a")),
    (TWO, Fork(3, (ONE,), "gather_variable", 2), Keep("a")),
    (ONE, Fork(2, (Fork(3, (TWO,), "gather_variable", 2),), "gather_variable", 2), Keep("a")),
    (Fork(2, (ONE,), "gather_variable"), Fork(2, (ONE,), "gather_variable", 2), Keep("a")),
]


@pytest.mark.parametrize("passes", ["none", "default"])
@pytest.mark.parametrize("body", LEFT_ALONE)
def test_a_variable_that_a_branch_leaves_alone_is_the_same_in_a_graph(
    body: tuple[object, ...], passes: str, oracle: Watched
) -> None:
    check_equal(body, oracle, passes)


@settings(max_examples=80, **QUIETLY)
@given(body=bodies(4))
def test_random_programs_on_echo(body: tuple[object, ...]) -> None:
    check_equal(body, Watched(Echo(answer)), "none")


@settings(max_examples=80, **QUIETLY)
@given(body=bodies(4))
def test_random_programs_on_the_oracle(body: tuple[object, ...], oracle: Watched) -> None:
    check_equal(body, oracle, "default")
