"""The bound of what a run holds: never below what the engine really holds at once, and not absurdly above."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.compiler.memory import peak_tokens
from umbel.compiler.program import Program, function
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.stream import Stream
from umbel.lang.errors import ParameterError
from umbel.lang.generation import gen, select
from umbel.srt.core.batch import Batch, Logits
from umbel.srt.in_process import LocalBackend

Spec = list[tuple[Any, ...]]  # what a program says: ("say", text), ("gen", tokens, n), ("fork", branches, join), ...
SAMPLING = {"temperature": 0, "ignore_eos": True}


class Watched(LocalBackend):
    """Remembers the most keys that requests held in any step. Pins, leftovers and slots taken ahead are nobody's."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.most = 0

    async def start(self) -> None:
        fresh = not self._engines
        await super().start()
        if fresh:
            self._watch()

    def _watch(self) -> None:
        scheduler, runner = self.engine.scheduler, self.engine.runner
        forward = runner.forward

        def watched(batch: Batch) -> Logits:
            cache = scheduler.kv.cache
            locked = sum(len(node.tokens) for _, node in cache.walk() if node.locks)
            running = scheduler._table.running.values()
            self.most = max(self.most, locked + sum(one.kv_length - one.tree_length for one in running))
            return forward(batch)

        runner.forward = watched  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def backend() -> Iterator[Watched]:
    watched = Watched(pool_tokens=20_000, context_length=4000, debug={"check_every_step": False})
    loop.streams.run(watched.start())
    yield watched
    loop.streams.run(watched.close())


def speak(s: Any, spec: Spec, name: str = "v") -> None:
    for number, (kind, *what) in enumerate(spec):
        variable = f"{name}_{number}"
        match kind:
            case "say":
                s += what[0]
            case "gen":
                s += gen(variable, max_tokens=what[0], n=what[1])
            case "again" if what[0] in s:
                s += s[what[0]]
            case "select":
                s += select(variable, what[0])
            case "role":
                with s.user():
                    s += what[0]
            case "fork":
                branches, join = what
                forks = s.fork(len(branches))
                for index, branch in enumerate(branches):
                    speak(forks[index], branch, f"{variable}_{index}")
                if join is not None:
                    forks.join(join)


def program_of(spec: Spec) -> Program:
    @function
    def program(s: Any, topic: str) -> None:
        s += "About "
        s += topic
        speak(s, spec)

    return program


def ratio(backend: Watched, spec: Spec) -> float:
    program = program_of(spec)
    bound = peak_tokens(program.trace(), backend, {"topic": "umbels"}, SAMPLING)
    backend.most = 0
    for _ in range(2):  # the second one finds the first one's keys
        state = program.run("umbels", backend=backend, **SAMPLING)
        stream = state._sink
        assert isinstance(stream, Stream)
        stream.run.wait_finished()  # also for branches that nobody joins
        assert state.error() is None
    assert backend.most <= bound
    return bound / max(1, backend.most)


words = st.text("abc d", min_size=1, max_size=40)
leaves = st.one_of(
    st.tuples(st.just("say"), words),
    st.tuples(st.just("gen"), st.integers(1, 30), st.sampled_from([1, 1, 1, 3])),
    st.tuples(st.just("select"), st.lists(words, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("role"), words),
    st.tuples(st.just("again"), st.sampled_from(["v_0", "v_1"])),
)
specs = st.recursive(
    st.lists(leaves, min_size=1, max_size=4),
    lambda inner: st.lists(
        st.one_of(
            leaves,
            st.tuples(
                st.just("fork"),
                st.lists(inner, min_size=1, max_size=3),
                st.sampled_from([None, "gather_variable", "concate_and_append"]),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    max_leaves=8,
)


@pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::umbel.TraceWarning")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_no_run_holds_more_than_its_bound(backend: Watched, spec: Spec) -> None:
    ratio(backend, spec)


TYPICAL: dict[str, Spec] = {
    "a prompt and an answer": [("say", "a" * 60), ("gen", 30, 1)],
    "a choice, then an answer": [("say", "a" * 40), ("select", ["yes", "no", "perhaps"]), ("gen", 20, 1)],
    "three answers": [("say", "a" * 60), ("gen", 20, 3)],
    "turns": [("role", "a" * 40), ("gen", 20, 1), ("role", "b" * 30), ("gen", 20, 1)],
    "a variable used again": [("say", "a" * 40), ("gen", 20, 1), ("say", "b"), ("again", "v_1"), ("gen", 10, 1)],
    "branches that are read": [("say", "a" * 60), ("fork", [[("gen", 20, 1)]] * 3, "gather_variable"), ("gen", 9, 1)],
    "branches of branches": [
        ("say", "a" * 60),
        ("fork", [[("say", "b" * 20), ("fork", [[("gen", 10, 1)]] * 2, None)]] * 2, "concate_and_append"),
        ("gen", 10, 1),
    ],
}


@pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::umbel.TraceWarning")
@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.sampled(4)
def test_the_bound_is_not_absurd(backend: Watched, name: str) -> None:
    assert ratio(backend, TYPICAL[name]) < 1.5


FORK = [("say", "x" * 100), ("fork", [[("gen", 20, 1)]] * 8, "gather_variable"), ("gen", 30, 1)]


def test_what_branches_share_counts_once(backend: Watched) -> None:
    bound = peak_tokens(program_of(FORK).trace(), backend, {"topic": "umbels"})
    shared = 1 + len("About umbels") + 100
    assert bound == shared + 8 * 20
    assert ratio(backend, FORK) < 1.1


def test_branches_that_nobody_joins_count_beside_what_comes_later(backend: Watched) -> None:
    loose = [("fork", [[("gen", 50, 1)]] * 2, None), ("gen", 30, 1)]
    bound = peak_tokens(program_of(loose).trace(), backend, {"topic": ""})
    assert bound == 1 + len("About ") + 2 * 50 + 30


def test_calls_one_after_the_other_do_not_add_up(backend: Watched) -> None:
    turns = [("gen", 10, 1), ("gen", 10, 4), ("gen", 10, 1)]
    assert peak_tokens(program_of(turns).trace(), backend, {"topic": ""}) == 1 + len("About ") + 10 + 40


def test_options_of_the_run_count() -> None:
    @function
    def program(s: Any) -> None:
        s += gen("x")

    graph = program.trace()
    assert peak_tokens(graph, Echo(), {}, {"max_tokens": 7, "n": 2}) == 14
    assert peak_tokens(graph, Echo(), {}) == 128
    assert graph.peak_tokens(Echo(), options={"max_tokens": 7}) == 7


def test_an_argument_that_is_missing_is_named() -> None:
    with pytest.raises(ParameterError, match=r"arguments=\{'topic'"):
        peak_tokens(program_of([("gen", 1, 1)]).trace(), Echo(), {})
