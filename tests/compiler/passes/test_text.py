"""Merging of text: fewer operations, and every prompt has the parts that it had."""

import pytest
import umbel as ul
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from umbel.compiler.graph import Builder, Graph, Node, rebuilt
from umbel.compiler.operations import Constant
from umbel.compiler.passes import rewrite
from umbel.compiler.passes.folding import merge_text
from umbel.compiler.running.compiled import CompiledProgram
from umbel.interpreter.backends.echo import Echo
from umbel.lang.chat_template import ChatTemplate

from ...lang.templates.examples import FAMILIES, Family
from ..watching import Watched
from .building import put_together, said, shredded, straight
from .running import answer, ran

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

# Two line breaks between the opening of an answer and its first text, which the text may bring itself.
LEADS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ '\n\n' if m['role'] == 'assistant' }}{{ m['content'] }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEMPLATES = [*FAMILIES, Family("leads", LEADS)]


def test_constants_side_by_side_are_one() -> None:
    builder = Builder()
    graph = straight(*(builder.node(Constant(text)) for text in ("Q: ", "", "why", "?")), builder=builder)
    outcome = merge_text(graph)
    assert said(outcome.graph) == ["Q: why?"]
    assert outcome.counts == {"merged into the next": 3}


def test_nothing_is_not_said() -> None:
    builder = Builder()
    assert said(merge_text(straight(builder.node(Constant("")), builder=builder)).graph) == []


def test_scopes_forks_and_reads_of_the_text_are_borders() -> None:
    @ul.function
    def program(s: ul.State) -> str:
        s += "a"
        with s.var_scope("x"):
            s += "b"
        s += "c"
        seen = s.text()
        s += "d"
        s.fork(2)
        s += "e"
        return seen

    graph = program.trace()
    assert merge_text(graph).graph is graph


def test_nothing_said_behind_an_owed_turn_is_still_refused() -> None:
    """Llama 2 writes a system turn only together with the user's."""

    @ul.function
    def program(s: ul.State) -> None:
        s += ul.system("Be brief.")
        s += "!"
        s += ul.user("Why?")

    llama2 = next(family for family in FAMILIES if family.name == "llama2")
    backend = Echo(chat_template=ChatTemplate(llama2.source, tokens=llama2.tokens))
    graph = saying_nothing_for(program.trace(), "!")
    for each in (graph, rewrite(graph).graph):
        assert isinstance(CompiledProgram(each).run(backend=backend).error(), ul.TemplateError)


def saying_nothing_for(graph: Graph, text: str) -> Graph:
    def silence(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
        return builder.node(Constant("") if node.op == Constant(text) else node.op, inputs, node.line)

    return rebuilt(graph, silence)


PIECES = st.sampled_from([" ", "\n", "a", " b ", "\n\nc", "d\n"])
TURNS = st.lists(
    st.tuples(
        st.lists(PIECES | st.just("?") | st.just("!"), max_size=5).map(tuple),
        st.lists(PIECES | st.just("?") | st.just("!"), max_size=5).map(tuple),
    ),
    min_size=1,
    max_size=2,
)


def check_pieces(family: Family, turns: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> None:
    @ul.function(max_tokens=3)
    def program(s: ul.State, question: str) -> None:
        for asked, answered in turns:
            for role, pieces in (("user", asked), ("assistant", answered)):
                with getattr(s, role)():
                    for piece in pieces:
                        s += ul.gen("x") if piece == "!" else question if piece == "?" else piece

    template = ChatTemplate(family.source, tokens=family.tokens, options=family.options, name=family.name)
    backend = Watched(Echo(answer, chat_template=template))
    arguments = {"question": " \n why"}
    interpreted = ran(program, backend, **arguments)
    graph = program.trace()
    for pieces in (graph, shredded(graph), put_together(graph), put_together(shredded(graph))):
        for each in (pieces, rewrite(pieces).graph):
            assert ran(CompiledProgram(each), backend, **arguments) == interpreted


@pytest.mark.parametrize("family", TEMPLATES, ids=lambda family: family.name)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=TURNS)
@example(turns=[((), ("\n\nc",))])
@example(turns=[((), ("\n", "\nc"))])
@example(turns=[((), ("\n",)), ((), ("\n", "!"))])
def test_templates_see_the_same_text_in_whatever_pieces(
    family: Family, turns: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    check_pieces(family, turns)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TEMPLATES, ids=lambda family: family.name)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns=TURNS)
def test_templates_see_the_same_text_in_many_pieces(
    family: Family, turns: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
    check_pieces(family, turns)


@pytest.mark.parametrize("text", ["\n\nBecause.", "\nBecause.", "Because.", "\n\n", "\n"])
def test_the_lead_of_an_answer_does_not_depend_on_the_pieces_of_its_text(text: str) -> None:
    """Beside other pieces also scopes and forks, which are places that the program looks at."""

    @ul.function
    def program(s: ul.State, pieces: list[str], scoped: bool) -> tuple[str, str]:
        with s.assistant():
            for piece in pieces:
                s += piece
            if scoped:
                with s.var_scope("inside"):
                    s += "x"
                forks = s.fork(2)
                forks += "y"
                forks.join("concate_and_append")
        return s.text(), "".join(s.text_iter())

    for scoped in (False, True):
        backend = Echo(chat_template=ChatTemplate(LEADS))
        whole, *shreds = (
            program.run(pieces=pieces, scoped=scoped, backend=backend)
            for pieces in ([text], list(text), ["", *text, ""], [text[:1], text[1:]])
        )
        assert whole.ret_value[0] == whole.ret_value[1]
        assert {(shred.ret_value, str(shred.messages())) for shred in shreds} == {
            (whole.ret_value, str(whole.messages()))
        }
        assert not scoped or {shred["inside"] for shred in (whole, *shreds)} == {"x"}
