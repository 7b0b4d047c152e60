"""What lies ahead of every call: the critical path, what is learned about it, and what the order is worth."""

from typing import Any

import pytest
from umbel.compiler.graph import Graph
from umbel.compiler.operations import Choose, Generate
from umbel.compiler.program import function
from umbel.compiler.running.plan import CriticalPaths
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.run import get_server_info
from umbel.lang.generation import gen, select
from umbel.lang.protocol import GenRequest
from umbel.srt.in_process import LocalBackend

SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SHORT, LONG = 12, 60


@function
def report(s: Any, topic: str) -> None:
    """One long branch, said last, behind seven short ones."""
    s += f"About {topic}. "
    forks = s.fork(8)
    for number, fork in enumerate(forks):
        fork += f"Part {number}: "
        fork += gen("part", max_tokens=LONG if number == 7 else SHORT)
    forks.join()
    s += gen("end", max_tokens=10)


def paths(graph: Graph) -> tuple[CriticalPaths, dict[int, int], dict[str, list[int]]]:
    """With slots counted through, the longest texts, and slots by the names of calls."""
    calls = {node: slot for slot, node in enumerate(n for n in graph.nodes if isinstance(n.op, Generate | Choose))}
    longest = {slot: node.op.gen.options["max_tokens"] for node, slot in calls.items() if isinstance(node.op, Generate)}
    names: dict[str, list[int]] = {}
    for node, slot in calls.items():
        said = node.op.gen if isinstance(node.op, Generate) else node.op.select  # type: ignore[union-attr]
        names.setdefault(str(said.name), []).append(slot)
    return CriticalPaths(graph, calls), longest, names


def test_what_is_ahead_is_the_longest_way_to_the_end() -> None:
    critical, longest, names = paths(report.trace())
    ahead = critical.ahead(longest)
    assert [ahead[slot] for slot in names["part"]] == [SHORT + 10] * 7 + [LONG + 10]
    assert [ahead[slot] for slot in names["end"]] == [10]


def test_a_variable_that_another_stream_reads_is_on_the_way() -> None:
    @function
    def program(s: Any) -> None:
        forks = s.fork(2)
        forks[0] += gen("first", max_tokens=5)
        forks[1] += gen("second", max_tokens=7)
        forks[1] += forks[0]["first"]
        forks[1] += select("third", ["a", "b"])
        forks[1] += gen("fourth", max_tokens=50)

    critical, longest, names = paths(program.trace())
    ahead = critical.ahead(longest)
    assert [ahead[names[name][0]] for name in ("first", "second", "third", "fourth")] == [56, 58, 51, 50]


def test_lengths_are_learned_and_never_above_what_is_allowed() -> None:
    critical, longest, names = paths(report.trace())
    part = names["part"][7]
    for tokens in (30, 31):
        critical.note(part, tokens)
    assert critical.expected(part, LONG) == 31
    assert critical.expected(part, 12) == 12
    assert critical.ahead(longest)[part] == 31 + 10
    assert critical.ahead({**longest, part: 12})[part] == 12 + 10


def test_paths_are_computed_anew_when_the_texts_have_doubled() -> None:
    critical, longest, names = paths(report.trace())
    part, seen = names["part"][7], []
    for _ in range(9):
        critical.note(part, 50)
        seen.append(critical.ahead(longest))
    assert len({id(ahead) for ahead in seen}) == 4  # after 1, 2, 4 and 8 texts


def test_calls_of_a_compiled_program_say_what_is_ahead() -> None:
    echo = Echo(lambda _: "one two three")
    compiled = report.compile()
    for known in (False, True):
        echo.requests.clear()
        compiled.run("umbels", backend=echo).sync()
        sent = [request for request in echo.requests if isinstance(request, GenRequest)]
        aheads = sorted(request.origin.ahead for request in sent)
        assert aheads == ([3] + [6] * 8 if known else [10] + [SHORT + 10] * 7 + [LONG + 10])


def test_a_program_of_one_stream_says_nothing() -> None:
    @function
    def ask(s: Any) -> None:
        s += gen("x", max_tokens=4)

    echo = Echo(lambda _: "yes")
    ask.compile().run(backend=echo).sync()
    (request,) = echo.requests
    assert isinstance(request, GenRequest)
    assert request.origin.ahead == 0


@pytest.mark.parametrize("running", [2, 4])
def test_a_long_branch_that_is_said_last_does_not_come_last(running: int) -> None:
    """The interpreter says nothing of what is ahead; the compiled program is faster, and says the same."""
    steps, texts = {}, {}
    for kind in ("interpreted", "compiled"):
        backend = LocalBackend(max_running=running)
        program = report if kind == "interpreted" else report.compile()
        state = program.run("umbels", backend=backend, **SAMPLING)
        texts[kind] = (state["part"], state["end"])
        steps[kind] = get_server_info(backend)["steps"]
        loop.streams.run(backend.close())
    assert texts["compiled"] == texts["interpreted"]
    best = max(LONG, (7 * SHORT + LONG) / running) + 10
    assert steps["compiled"] <= best + 15
    assert steps["interpreted"] >= steps["compiled"] + SHORT - 5
