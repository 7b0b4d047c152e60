"""Merging of text: fewer operations, and every prompt has the parts that it had."""

import pytest
import umbel as ul
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.compiler.graph import Builder, Graph, Node, Parameter, rebuilt
from umbel.compiler.operations import Append, Argument, Begin, Concat, Constant
from umbel.compiler.passes import optimise
from umbel.compiler.passes.text import merge_text
from umbel.compiler.running.compiled import CompiledProgram
from umbel.interpreter.backends.echo import Echo
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.ops import RoleBegin

from ...lang.templates import FAMILIES, Family
from ..watching import Watched
from .building import put_together, said, shredded, straight, whole
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
    for each in (graph, optimise(graph)):
        assert isinstance(CompiledProgram(each).run(backend=backend).error(), ul.TemplateError)


def saying_nothing_for(graph: Graph, text: str) -> Graph:
    def silence(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
        return builder.node(Constant("") if node.op == Constant(text) else node.op, inputs, node.line)

    return rebuilt(graph, silence)


@pytest.mark.parametrize("together", [False, True])
def test_a_text_that_may_lead_an_answer_in_stays_alone(together: bool) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.user("Why?")
        with s.assistant():
            s += "\n"
            s += "\nBecause"
            s += "."

    backend = Watched(Echo(chat_template=ChatTemplate(LEADS)))
    interpreted = ran(program, backend)
    graph = program.trace()
    merged = optimise(put_together(graph) if together else graph)
    assert said(merged) == (["Why?", "\n", "\nBecause."] if not together else ["Why?", "\n\nBecause."])
    if not together:
        assert ran(CompiledProgram(merged), backend) == interpreted


PIECES = st.sampled_from([" ", "\n", "a", " b ", "\n\nc", "d\n"])
TURNS = st.lists(
    st.tuples(
        st.lists(PIECES | st.just("?") | st.just("!"), max_size=5).map(tuple),
        st.lists(PIECES | st.just("?") | st.just("!"), max_size=5).map(tuple),
    ),
    min_size=1,
    max_size=2,
)


@pytest.mark.parametrize("family", TEMPLATES, ids=lambda family: family.name)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(turns=TURNS)
def test_templates_see_the_same_text_in_whatever_pieces(
    family: Family, turns: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> None:
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
        merged = optimise(pieces)
        assert ran(CompiledProgram(merged), backend, **arguments) == interpreted


def test_a_text_that_may_lead_an_answer_in_is_not_taken_apart() -> None:
    builder = Builder()
    place = builder.node(RoleBegin("assistant"), (builder.node(Begin("p")),))
    question = builder.node(Argument("question"))
    text = builder.node(Concat(), (question, builder.node(Constant("\nBecause"))))
    first = builder.node(Append(), (place, text))
    last = builder.node(Append(), (builder.node(Append(), (first, builder.node(Constant("!")))), text))
    graph = whole(builder.graph("p", [Parameter("question")], (last,), (), builder.node(Constant(None))))
    led = said(optimise(graph))
    assert led == [Concat(), "!", Argument("question"), "\nBecause"]
