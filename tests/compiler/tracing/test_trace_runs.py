"""Programs inside of a program that is traced: in its state, or as streams of their own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import umbel as ul
from umbel.compiler.operations import Append, Begin, Generate, Variable
from umbel.lang import sampling

from .traces import refused, said, traced, value_of


@ul.function(temperature=0.5, max_tokens=7)
def inner(s, word):
    s += f"<{word}>" + ul.gen("inner", top_p=0.5)
    return s["inner"]


def generates(graph: ul.Graph) -> list[Generate]:
    return [node.op for node in graph.nodes if isinstance(node.op, Generate)]


# ------------------------------------------------------------------------------------------ in the state


def test_a_program_inside_says_it_in_the_same_stream() -> None:
    @ul.function(max_tokens=3, stop="\n")
    def outer(s, q):
        s += ul.gen("a")
        answer = inner(s, q)
        s += ul.gen("b") + answer

    graph = outer.trace()
    assert len(graph.streams) == 1
    assert [node.defaults for node in generates(graph)] == [
        {"max_tokens": 3, "stop": ("\n",)},
        {"max_tokens": 7, "stop": ("\n",), "temperature": 0.5},
        {"max_tokens": 3, "stop": ("\n",)},
    ]
    assert [name for name, _ in graph.variables] == ["a", "inner", "b"]


def test_options_of_a_gen_are_checked_with_those_around_it() -> None:
    @ul.function(max_tokens=3)
    def program(s):
        s += ul.gen("x", min_tokens=5)

    with pytest.raises(ul.ParameterError, match="min_tokens=5 is more than max_tokens=3"):
        program.trace()


# ------------------------------------------------------------------------------------------ streams of their own


def test_a_run_inside_is_a_stream_of_its_own() -> None:
    def program(s, q):
        s += ul.gen("x")
        state = inner.run(s["x"], temperature=0.1, sampling={"max_tokens": 2})
        assert state["inner"] is state.ret_value
        s += state.ret_value + state.text()

    graph = traced(program)
    assert [stream[0].op for stream in graph.streams] == [Begin("program", 0), Begin("inner", 1)]
    assert generates(graph)[1].defaults == {"temperature": 0.1, "max_tokens": 2}
    first = next(
        node for node in graph.streams[1] if isinstance(node.op, Append) and node.inputs[1].op == Variable("x")
    )
    assert first.inputs[1].inputs[0] in graph.streams[0]
    assert len(graph.ends) == 2


def test_defaults_are_those_that_the_interpreter_merges() -> None:
    requests = []

    class Noting(ul.Echo):
        async def generate(self, request):
            requests.append(request)
            async for event in super().generate(request):
                yield event

    @ul.function(max_tokens=9)
    def program(s):
        inner(s, "a")
        s.sync()
        inner.run("b", temperature=0.2).sync()

    with ul.default_backend(Noting(lambda prompt: "x")):
        program.run()
    merged = [sampling.merge(node.defaults, node.gen.options) for node in generates(program.trace())]
    assert merged == [request.sampling for request in requests]


def test_a_batch_inside_is_as_many_streams() -> None:
    def program(s, q):
        states = inner.run_batch([{"word": q}, ("b",)])
        s += "".join(state["inner"] for state in states)
        s += "".join(state.ret_value for state in inner.run_batch([[q]], generator_style=True))

    graph = traced(program)
    assert [stream[0].op for stream in graph.streams][1:] == [Begin("inner", number) for number in (1, 2, 3)]


def test_streams_of_runs_fork_too() -> None:
    @ul.function
    def forking(s, q):
        s += q
        with s.fork(2) as forks:
            forks += ul.gen("x")
        return s["x"]

    def program(s, q):
        s += " ".join(forking.run(q).ret_value)

    graph = traced(program)
    assert len(graph.streams) == 4
    assert graph.parents(2) == (1, 0)
    assert said(graph, x="X") == "X X"


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "another"}, {"timeout": 3}, {"budget": ul.Budget(calls=1)}, {"stream": True}, {"verbose": True},
        {"salt": "x"}, {"priority": 1}, {"num_api_spec_tokens": 4}, {"speculate": "auto"}, {"sampling": {"timeout": 3}},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_a_run_that_no_graph_can_say(options: dict[str, Any]) -> None:
    def program(s):
        inner.run("a", **options)  # here

    name = next(iter(options.get("sampling", options)))
    assert refused(program).startswith(f"inner.run({name}=...) inside of the program: a graph runs as a whole")


def test_options_that_say_nothing_are_fine() -> None:
    def program(s):
        inner.run("a", backend=None, timeout=None, stream=False, priority=0)

    traced(program)


@pytest.mark.parametrize("options", [{"num_threads": 2}, {"on_error": "return"}], ids=str)
def test_options_of_a_batch_that_no_graph_can_say(options: dict[str, Any]) -> None:
    def program(s):
        inner.run_batch([("a",)], **options)  # here

    assert f"inner.run_batch({next(iter(options))}=" in refused(program)


def test_options_may_not_be_symbols() -> None:
    def program(s, n):
        inner.run("a", max_tokens=n)  # here

    assert refused(program).startswith("an option of inner.run() has argument 'n' inside")


def test_unknown_arguments_of_a_run_inside() -> None:
    def program(s):
        inner.run("a", wrod="b")

    with pytest.raises(ul.ParameterError, match="did you mean 'word'"):
        ul.function(program).trace()


def test_estimates_and_traces_inside() -> None:
    def estimating(s):
        inner.estimate("a")  # here

    def tracing(s):
        inner.trace()  # here

    assert refused(estimating).startswith("estimate() asks what a run costs")
    assert refused(tracing).startswith("a program that is being traced traces another")


# ------------------------------------------------------------------------------------------ others' states and threads


def test_a_state_of_another_program() -> None:
    other = inner.run("a", backend=ul.Echo(lambda prompt: "x"))
    other.sync()

    def program(s):
        inner(other, "b")  # here

    assert refused(program).startswith("the state is of another program, which runs")


def test_a_state_that_runs_is_not_written_to() -> None:
    other = inner.run("a", backend=ul.Echo(lambda prompt: "x"))

    def program(s, q):
        nonlocal other
        s += other["inner"]  # what has been generated is a constant
        other += q  # here

    assert refused(program).startswith("the state is of another program, which runs")
    assert other.text() == "<a>x"


def test_a_branch_of_another_program() -> None:
    other = inner.run("a", backend=ul.Echo(lambda prompt: "x")).copy()

    def program(s):
        s._sink.join([other._sink], "gather_variable")  # here

    assert refused(program).startswith("a branch of another program is joined")


def test_a_state_outside_of_its_trace() -> None:
    kept: list[Any] = []

    def program(s):
        s += ul.gen("x")
        kept.append(s)

    traced(program)
    for use in (lambda s: s["x"], lambda s: s.fork(2), lambda s: s.__iadd__("!"), lambda s: s.text()):
        with pytest.raises(ul.TraceError, match="the trace is over"):
            use(kept[0])


def test_a_symbol_of_another_trace() -> None:
    kept: list[Any] = []

    def first(s, q):
        kept.append(q)

    def second(s):
        s += kept[0]  # here

    traced(first)
    assert refused(second).startswith("argument 'q' is of another trace")


def test_threads_that_use_the_state() -> None:
    def program(s):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: s.__iadd__("a")).result()

    with pytest.raises(ul.TraceError, match="another thread uses the state"):
        ul.function(program).trace()


def test_threads_whose_error_nobody_sees() -> None:
    def program(s):
        def work() -> None:
            try:
                s["x"] = 1
            except ul.TraceError:
                return

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    with pytest.raises(ul.TraceError, match="another thread uses the state"):
        ul.function(program).trace()


def test_results_of_runs_are_values() -> None:
    def program(s, q):
        return inner.run(q).ret_value

    graph = traced(program)
    assert value_of(graph.result, {"inner": "X"}) == "X"
