"""Cache points of programs: they change no text, and mark what the prompt says before them."""

from collections.abc import AsyncIterator, Iterator

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter import loop
from umbel.interpreter.position import Position, since
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Chunk, Final, GenRequest
from umbel.srt.in_process import LocalBackend

MANUAL = "All about umbels. " * 100
GEMMA = "gemma"


class Watched(LocalBackend):
    """Keeps the requests that it is asked."""

    def __init__(self, chat_template: str | None = None) -> None:
        super().__init__(chat_template=chat_template)
        self.requests: list[GenRequest] = []
        self.finals: list[Final] = []

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:  # type: ignore[override]
        self.requests.append(request)
        async for event in super().generate(request):
            if isinstance(event, Final):
                self.finals.append(event)
            yield event


@pytest.fixture
def backend() -> Iterator[Watched]:
    made = Watched("chatml")
    yield made
    loop.streams.run(made.close())


def before_marks(request: GenRequest) -> list[tuple[str, float]]:
    """The text before each mark, and its TTL."""
    assert request.caching is not None
    marks = request.caching.marks
    return [("".join(part.text for part in request.prompt[: mark.place]), mark.ttl) for mark in marks]  # type: ignore[union-attr]


def test_a_point_keeps_a_prompt_for_the_runs_after_it(backend: Watched) -> None:
    @ul.function
    def ask(s: ul.State, question: str) -> None:
        s += MANUAL
        s += ul.cache_point(ttl=600)
        s += question
        s += ul.gen("answer", max_tokens=2)

    @ul.function
    def plain(s: ul.State, question: str) -> None:
        s += MANUAL + question + ul.gen("answer", max_tokens=2)

    states = []
    for question in ("What? ", "And why? "):
        states.append(ask.run(question=question, backend=backend, temperature=0))
        states[-1].sync()
    alone = plain.run(question="And why? ", backend=backend, temperature=0)
    assert states[1]["answer"] == alone["answer"]
    assert states[1].text() == alone.text()
    written, again = (state.cost.usage.cache_write_tokens for state in states)
    assert (written > 1024, again) == (True, 0)
    assert [state.cost.usage.cache_read_tokens for state in states] == [0, written]
    figures = [final.caching for final in backend.finals]
    assert figures[2] is None
    assert [(each.created, each.read) for each in figures[:2] if each] == [(written, 0), (0, written)]
    assert before_marks(backend.requests[0]) == [(MANUAL, 600.0)]
    assert backend.requests[2].caching is None


@pytest.mark.parametrize("method", ["token_length_normalized", "unconditional_likelihood_normalized", "exact"])
def test_a_select_stores_and_reads_what_a_point_covers(backend: Watched, method: str) -> None:
    @ul.function
    def judge(s: ul.State) -> None:
        s += MANUAL
        s += ul.cache_point(ttl=600)
        s += "Is it useful? " + ul.select("verdict", ["yes", "no"], choices_method=method)

    verdict = judge.run(backend=backend)["verdict"]  # before the next run: of runs at once one creates it for all
    states = [judge.run(backend=backend), judge.compile(server=True).run(backend=backend)]
    assert [state["verdict"] for state in states] == [verdict] * 2
    gateway = backend._gateway
    assert gateway is not None
    written = gateway.counters["cache_created_tokens"]
    assert (gateway.counters["cache_read_tokens"], written > 1024) == (2 * written, True)
    figures = [(state.cost.usage.cache_write_tokens, state.cost.usage.cache_read_tokens) for state in states]
    assert figures == [(0, written)] * 2


def test_the_branches_of_a_fork_store_what_they_share_once(backend: Watched) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += MANUAL
        s += ul.cache_point()
        for number, branch in enumerate(s.fork(4)):
            branch += f"Question {number}: " + ul.gen("answer", max_tokens=2)
            branch.sync()

    state = program.run(backend=backend, temperature=0)
    usages = [final.usage.cache_write_tokens for final in backend.finals]
    assert state.cost.usage.cache_write_tokens == sum(usages) == max(usages) > 1024


def test_points_stand_in_turns_and_the_last_four_count(backend: Watched) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.system("Be brief.") + ul.cache_point(60)
        with s.user():
            s += ["one ", ul.cache_point(1), "two ", ul.cache_point(2), f"three{ul.cache_point(3)} four"]
        s += ul.cache_point(4)
        s += ul.assistant(ul.gen("answer", max_tokens=2))

    program.run(backend=backend, temperature=0).sync()
    (request,) = backend.requests
    marks = before_marks(request)
    assert [ttl for _, ttl in marks] == [1.0, 2.0, 3.0, 4.0]
    assert [text[-5:] for text, _ in marks[:3]] == ["one ".rjust(5, "\n"), " two "[-5:], "three"]
    assert marks[3][0].endswith("four<|im_end|>\n")
    assert "".join(part.text for part in request.prompt) == program.run(backend=backend).text()[: len(marks[3][0])] + (  # type: ignore[union-attr]
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_is_shown_with_the_next_one_is_covered_where_it_is_shown() -> None:
    """Gemma's template writes the system text at the beginning of the user's turn."""
    template = ChatTemplate(GEMMA)
    position = Position()
    position.open_turn(template, "system")
    position.append_text("Be brief.")
    position.close_turn(template)
    position.set_point(60.0)
    position.set_point(30.0)
    assert position.marked()[1] is None
    position.open_turn(template, "user")
    position.append_text("Why?")
    parts, caching = position.marked()
    assert caching is not None
    (mark,) = caching.marks
    assert mark.ttl == 60.0
    assert "".join(part.text for part in parts[: mark.place]).endswith("Be brief.\n\n")  # type: ignore[union-attr]
    assert parts[mark.place] == Text("Why?")


def test_a_joined_branch_brings_its_points(backend: Watched) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "start "
        forks = s.fork(2)
        for number, branch in enumerate(forks):
            branch += f"branch {number} "
            branch += ul.cache_point(10 + number)
            branch += "end "
        forks.join("concate_and_append")
        s += ul.gen("answer", max_tokens=1)

    program.run(backend=backend).sync()
    assert before_marks(backend.requests[0]) == [
        ("start branch 0 ", 10.0),
        ("start branch 0 end branch 1 ", 11.0),
    ]


def test_a_backend_that_cannot_keep_prefixes_ignores_points() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "a" + ul.cache_point() + "b" + ul.gen("answer")

    state = program.run(backend=ul.Echo(["c"]))
    assert state.text() == "abc"
    assert state.cost.usage.cache_write_tokens == 0


def test_a_compiled_program_marks_the_same(backend: Watched) -> None:
    @ul.function
    def program(s: ul.State, question: str) -> None:
        s += MANUAL
        s += ul.cache_point(ttl=600)
        s += question + ul.gen("answer", max_tokens=2)

    program.run(question="Why? ", backend=backend, temperature=0).sync()
    assert "CachePoint 600 s" in program.trace().text()
    gateway = backend._gateway
    assert gateway is not None
    for times, server in enumerate((False, True), 1):
        state = program.compile(server=server).run(question="Why? ", backend=backend, temperature=0)
        assert state.cost.usage.cache_write_tokens == 0, "the first run has stored it"
        assert gateway.counters["cache_read_tokens"] == times * gateway.counters["cache_created_tokens"]
    assert len(backend.requests) == 2, "the last run is one request"
    assert backend.requests[0].prompt == backend.requests[1].prompt
    assert backend.requests[0].caching == backend.requests[1].caching


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), 90_000, "1h", True, None])
def test_a_time_that_is_none_is_refused(ttl: object) -> None:
    with pytest.raises(ParameterError, match="cache_point ttl"):
        ul.cache_point(ttl)  # type: ignore[arg-type]


pieces = st.lists(st.one_of(st.sampled_from(["a", "b ", "", "c\n"]), st.sampled_from([1.0, 2.0])), max_size=12)


@settings(max_examples=60, deadline=None)
@given(pieces)
def test_marks_split_the_prompt_and_change_nothing_of_it(said: list[str | float]) -> None:
    marked, plain = Position(), Position()
    expected: dict[str, float] = {}
    for each in said:
        if isinstance(each, float):
            marked.set_point(each)
            if text := plain.prompt.text:
                expected[text] = max(each, expected.pop(text, 0.0))
        else:
            marked.append_text(each)
            plain.append_text(each)
    parts, caching = marked.marked()
    assert "".join(part.text for part in parts) == plain.prompt.text  # type: ignore[union-attr]
    assert all(isinstance(part, Text) and part.text for part in parts)
    marks = () if caching is None else caching.marks
    found = {"".join(part.text for part in parts[: mark.place]): mark.ttl for mark in marks}  # type: ignore[union-attr]
    assert found == dict(list(expected.items())[-4:])
    assert len(since(Position().prompt, marked.prompt)) == len(since(Position().prompt, plain.prompt))
