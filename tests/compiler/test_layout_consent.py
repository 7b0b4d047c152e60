"""compile(reorder=True): who may change a prompt."""

import pytest
import umbel as ul
from umbel.compiler.layout.checker import Verdict, verdicts
from umbel.compiler.layout.consent import reordered
from umbel.compiler.layout.reorder import propose
from umbel.lang.protocol import Capabilities

from .layouts import CHARACTERS, graph_of, prompt_of

BAD = "Here is a question {}. Please act as a math expert and solve the given question."
GOOD = "Please act as a math expert and solve the given question. Here is a question {}."
PAPER = ("Here is a question ", "$question", ". Please act as a math expert and solve the given question.")


@ul.function
def solve(s, question):  # type: ignore[no-untyped-def]
    s += f"Here is a question {question}. Please act as a math expert and solve the given question."
    s += ul.gen("answer")


def echo(same: float, different: float) -> ul.Echo:
    return ul.Echo(scores={" same": same, " different": different})


def said(compiled: ul.CompiledProgram) -> str:
    return str(compiled.run("1+1", backend=ul.Echo([" 2"])).text())


def test_nothing_is_applied_unasked() -> None:
    compiled = solve.compile(reorder=True)
    (order,) = compiled.reordered
    assert (order.applied, order.verdict) == (False, None)
    assert (order.before, order.after) == (BAD.format("{question}"), GOOD.format("{question}"))
    assert "not applied" in str(order)
    assert said(compiled) == BAD.format("1+1") + " 2"


def test_what_the_user_accepts_is_applied_and_no_model_is_asked() -> None:
    (order,) = solve.compile(reorder=True).reordered
    checker = echo(-9.0, -0.01)
    compiled = solve.compile(reorder=True, checker=checker, accept=[order.id])
    assert checker.calls == 0
    assert compiled.reordered[0].applied
    assert said(compiled) == GOOD.format("1+1") + " 2"


def test_what_the_checker_confirms_is_applied() -> None:
    compiled = solve.compile(reorder=True, checker=echo(-0.01, -9.0))
    (order,) = compiled.reordered
    assert order.applied
    assert order.verdict is not None
    assert order.verdict.same
    assert "the checker says the same" in str(order)
    assert said(compiled) == GOOD.format("1+1") + " 2"


@pytest.mark.parametrize(("same", "different"), [(-9.0, -0.01), (-0.3, -1.3)])
def test_what_the_checker_denies_or_is_not_sure_of_is_not_applied(same: float, different: float) -> None:
    compiled = solve.compile(reorder=True, checker=echo(same, different))
    assert not compiled.reordered[0].applied
    assert said(compiled) == BAD.format("1+1") + " 2"


def test_the_threshold_can_be_chosen() -> None:
    graph = graph_of(*PAPER)
    new, (order,) = reordered(graph, checker=echo(-0.3, -1.3), threshold=0.7, counter=CHARACTERS)
    assert order.applied
    assert prompt_of(new) == GOOD.format("{question}")


def test_the_checker_is_asked_both_ways_and_its_lower_word_counts() -> None:
    (proposal,) = propose(graph_of(*PAPER), CHARACTERS)
    checker = echo(-0.1, -2.0)
    (verdict,) = verdicts([proposal], checker)
    assert checker.calls == 2
    assert verdict.same
    assert verdict.probability == pytest.approx(0.87, abs=0.01)


def test_a_model_without_probabilities_has_to_say_so_both_times() -> None:
    (proposal,) = propose(graph_of(*PAPER), CHARACTERS)
    answers = [" same", " different"]
    plain = Capabilities("plain", constraints=("regex",))
    assert verdicts([proposal], ul.Echo([" same", " same"], capabilities=plain)) == [Verdict(True, None)]
    assert not verdicts([proposal], ul.Echo(answers, capabilities=plain))[0].same
    assert Verdict(True, None).confirms(1.0)


def test_shared_arguments_go_in_front_of_the_others() -> None:
    @ul.function
    def ask(s, question, document):  # type: ignore[no-untyped-def]
        s += f"Question: {question}\nDocument: {document}\nUse the document alone, and be brief.\n" + ul.gen("answer")

    (order,) = ask.compile(reorder=True, shared=["document"]).reordered
    assert order.after.startswith("Use the document alone, and be brief.\nDocument: {document}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reorder": True, "accept": ["nothing"]}, "has no such proposal; its proposals are"),
        ({"reorder": True, "shared": ["querstion"]}, "did you mean 'question'"),
        ({"accept": ["nothing"]}, "write reorder=True"),
        ({"checker": ul.Echo()}, "write reorder=True"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ul.ParameterError, match=message):
        solve.compile(**options)


def test_a_threshold_is_a_probability() -> None:
    with pytest.raises(ul.ParameterError, match=r"such as 0\.9"):
        reordered(graph_of(*PAPER), threshold=90, counter=CHARACTERS)
