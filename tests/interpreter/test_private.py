"""Private parts of programs: what comes before them is shared, what comes after is cached for one tenant."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter import loop
from umbel.interpreter.backends.hosted.sglang.wire import SGLangPlanner
from umbel.interpreter.position import Position
from umbel.lang.caching import CacheMark, Caching
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.errors import CapabilityError, ParameterError, RequestError, TemplateError
from umbel.lang.prompt import Generated, Media, Part, Private, Text, media_of, namespace, openings
from umbel.lang.protocol import (
    ConstraintSpec,
    Final,
    GenRequest,
    Hint,
    Locate,
    Origin,
    ScoreRequest,
)
from umbel.lang.sampling import SamplingParams
from umbel.srt.gateway.images import _placed_media
from umbel.srt.in_process import LocalBackend

MANUAL = "All about umbels, for everybody. "
RECORD = "The record of this customer. "
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend(chat_template="chatml")
    yield made
    loop.streams.run(made.close())


@ul.function(temperature=0, max_tokens=3, ignore_eos=True)
def support(s: ul.State, tenant: str, question: str) -> None:
    s += ul.system(MANUAL)
    s.private(tenant)
    s += ul.user(RECORD + question)
    s += ul.assistant(ul.gen("answer"))


def cached(program: ul.Program, backend: Any, **arguments: Any) -> int:
    state = program.run(**arguments, backend=backend)
    return state.cost.usage.cached_tokens


def test_tenants_share_the_head_and_never_the_tail(backend: LocalBackend) -> None:
    first, other, again = (cached(support, backend, tenant=name, question="Why?") for name in ("a", "b", "a"))
    shown = (Text("<|im_start|>system\n", True), Text(MANUAL), Text("<|im_end|>\n", True))
    head = loop.streams.run(backend.locate(Locate("head", shown, ()))).tokens
    assert (first, other) == (0, head)
    assert again > head + len(RECORD), "one tenant finds its tail"


def test_a_private_part_changes_no_text(backend: LocalBackend) -> None:
    @ul.function(temperature=0, max_tokens=3, ignore_eos=True)
    def plain(s: ul.State, question: str) -> None:
        s += ul.system(MANUAL)
        s += ul.user(RECORD + question)
        s += ul.assistant(ul.gen("answer"))

    private = support.run(tenant="a", question="Why?", backend=backend)
    alone = plain.run(question="Why?", backend=backend)
    assert (private.text(), private["answer"]) == (alone.text(), alone["answer"])
    assert private.messages() == alone.messages()


# ------------------------------------------------------------------------------------ what prompts are made of

TENANTS = st.sampled_from("xy")
PIECES = st.one_of(st.sampled_from(["a", "b ", "ab"]).map(Text), TENANTS.map(Private))
PROMPTS = st.lists(PIECES, min_size=1, max_size=6).map(tuple)


def named(parts: tuple[Part, ...]) -> list[tuple[str, str]]:
    """Each character (a token of the toy tokenizer) with its namespace; BOS first."""
    found, space = [("", "<bos>")], ""
    opened = dict(openings("", parts))
    for place, part in enumerate(parts, 1):
        found += [(space, character) for character in part.text]  # type: ignore[union-attr]
        space = opened.get(place, space)
    return found


@settings(max_examples=25, deadline=None)
@given(st.lists(PROMPTS, min_size=1, max_size=5))
def test_what_is_cached_is_what_was_said_in_the_same_namespaces(prompts: list[tuple[Part, ...]]) -> None:
    """Against a set of prefixes; tokens of gen, of select, of a hint and of unconditional scores are all in it."""

    async def scenario() -> None:
        backend = LocalBackend()
        await backend.start()
        known: list[list[tuple[str, str]]] = []
        for number, parts in enumerate(prompts):
            sequence = named(parts)
            best = max((shared(sequence, other) for other in known), default=0)
            match number % 3:
                case 0:
                    request = GenRequest(str(number), parts, ONE)
                    final = [event async for event in backend.generate(request)][-1]
                    assert isinstance(final, Final)
                    assert final.usage.cached_tokens == min(best, len(sequence) - 1)
                case 1:
                    await backend.score(ScoreRequest(str(number), parts, ("c",), unconditional=True))
                    space = namespace("", parts)
                    known.append([("", "<bos>"), (space, "c")])
                    sequence.append((space, "c"))
                case _:
                    backend.hint(Hint(str(number), parts, pin=60.0))
                    await asyncio.sleep(0)
                    request = GenRequest(f"{number}-gen", parts, ONE)
                    assert [event async for event in backend.generate(request)]
            known.append(sequence)
        await backend.close()

    loop.streams.run(scenario())


def shared(left: list[tuple[str, str]], right: list[tuple[str, str]]) -> int:
    length = min(len(left), len(right))
    return next((place for place in range(length) if left[place] != right[place]), length)


# ------------------------------------------------------------------------------------ programs


def prompts(program: ul.Program, *arguments: Any, **options: Any) -> list[list[tuple[int, str]]]:
    """Runs on Echo → where the private namespaces of each call's prompt open."""
    echo = ul.Echo(["said"] * 9)
    program.run(*arguments, backend=echo, **options).sync()
    return [openings("", request.prompt) for request in echo.requests if isinstance(request, GenRequest)]


def test_branches_inherit_it_and_joined_branches_bring_it() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "head "
        s.private("a")
        for number, branch in enumerate(forks := s.fork(2)):
            branch.private(f"b{number}")
            branch += f"{number} " + ul.gen("x")
        forks.join("concate_and_append")
        s += ul.gen("last")

    # parts   "head " | a | b0 | "0 " | said | b1 | "1 " | said
    nested = [[(2, "/a"), (3, "/a/b0")], [(2, "/a"), (3, "/a/b1")]]
    *branches, last = prompts(program)
    assert sorted(branches) == nested
    assert last == [(2, "/a"), (3, "/a/b0"), (6, "/a/b0/b1")]


def test_the_same_tenant_inside_itself_changes_nothing_and_another_state_is_shared() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        with s.copy() as branch:
            branch.private("a")
            branch.private("a")
            branch += "x " + ul.gen("x")
        s += branch["x"] + ul.gen("y")

    assert prompts(program) == [[(1, "/a")], []]


def test_white_space_before_it_stays_before_it() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        with s.user():
            s += "one "
            for branch in (forks := s.fork(2)):
                branch.private("a")
                branch += "two "
            forks.join("concate_and_append")
        s += ul.assistant(ul.gen("x"))

    for template in ("chatml", "gemma"):
        backend = LocalBackend(chat_template=template)
        state = program.run(backend=backend, temperature=0, max_tokens=1)
        assert "one two two" in state.text()
        loop.streams.run(backend.close())


def test_where_the_template_shows_a_turn_later_it_begins_later() -> None:
    """Gemma's template writes the system text at the beginning of the user's turn."""
    template, position = ChatTemplate("gemma"), Position()
    position.open_turn(template, "system")
    position.append_text("Be brief.")
    position.close_turn(template)
    assert position.open_private("a") == ""
    branch = position.copy()
    position.open_turn(template, "user")
    position.append_text("Why?")
    parts = position.prompt.parts
    place = parts.index(Private("a"))
    assert parts[place + 1] == Text("Why?")
    assert "".join(part.text for part in parts[:place]).endswith("Be brief.\n\n")  # type: ignore[union-attr]
    with pytest.raises(TemplateError, match=r"move private\(\) before both"):
        branch.open_turn(template, "system")


def test_in_a_turn_that_is_shown_later_it_is_refused() -> None:
    template, position = ChatTemplate("gemma"), Position()
    position.open_turn(template, "system")
    position.append_text("Be brief.")
    with pytest.raises(TemplateError, match=r"private\(\) cannot stand inside it; move it out of system"):
        position.open_private("a")


@ul.function(temperature=0, max_tokens=2, ignore_eos=True)
def late(s: ul.State, tenant: str) -> None:
    s += ul.system(MANUAL)
    with s.user():
        s += ul.gen("who", regex="(ada|eve)", max_tokens=4)
    s.private(f"{tenant}-{s['who']}")
    s += ul.user(RECORD) + ul.assistant(ul.gen("answer") + ul.select("more", ["yes", "no"]))


@pytest.mark.parametrize("program", [support, late])
def test_a_compiled_program_shares_and_keeps_apart_the_same(program: ul.Program) -> None:
    found = []
    for compiled in (program, program.compile(server=False), program.compile(server=True)):
        backend = LocalBackend(chat_template="chatml")
        given = {"question": "Why?"} if program is support else {}
        states = [compiled.run(tenant=tenant, **given, backend=backend) for tenant in ("a",)]
        for tenant in ("b", "a"):
            states[-1].sync()
            states.append(compiled.run(tenant=tenant, **given, backend=backend))
        found.append([(state.text(), state.cost.usage) for state in states])
        loop.streams.run(backend.close())
    assert found[0] == found[1] == found[2]
    counts = [usage.cached_tokens for _, usage in found[0]]
    assert counts[0] < counts[1] < counts[2]
    assert "Private" in program.trace().text()


# ------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("tenant", ["", "a/b", "a b", "x" * 129, 7, None, "né"])
def test_a_tenant_that_is_none_is_refused(tenant: Any) -> None:
    @ul.function
    def program(s: ul.State, name: Any) -> None:
        s.private(name)
        s += ul.gen("x")

    for run in (program.run, program.compile(server=False).run):
        with pytest.raises(ParameterError, match=r"private\(.*: write 1 to 128 of the characters"):
            run(tenant, backend=ul.Echo(["said"])).sync()


def test_what_a_client_sends_is_checked_before_it_is_used(backend: LocalBackend) -> None:
    async def refusal(*tenants: str) -> str:
        request = GenRequest("r", tuple(map(Private, tenants)), ONE)
        with pytest.raises((ParameterError, RequestError)) as caught:
            [event async for event in backend.generate(request)]
        return str(caught.value)

    assert "write 1 to 128" in loop.streams.run(refusal("a/b"))
    assert "more than 16 private parts" in loop.streams.run(refusal(*"ab" * 9))


def test_a_server_that_has_one_cache_for_all_refuses_it() -> None:
    planner = SGLangPlanner("server", "", False, {})
    for question in (GenRequest("g", (Text("x"), Private("a")), ONE), ScoreRequest("s", (Private("a"),), ("y",))):
        with pytest.raises(CapabilityError, match=r"private\(\).*cannot be kept apart"):
            planner.check_shared(question)


# ------------------------------------------------------------------------------------ what else is kept by salt


def test_marks_keep_the_tail_of_one_tenant_only(backend: LocalBackend) -> None:
    async def figures(tenant: str) -> list[tuple[int, int]]:
        """(read, created) of a mark in the head and one in the tail."""
        end = Text("<|im_end|>", True)
        prompt = (Text("shared"), end, Private(tenant), Text("own"), end, Text("?"))
        request = GenRequest(tenant, prompt, ONE, caching=Caching((CacheMark(2), CacheMark(5)), minimum=1))
        final = [event async for event in backend.generate(request)][-1]
        assert isinstance(final, Final)
        assert final.caching is not None
        return [(mark.read, mark.created) for mark in final.caching.marks]

    first, other, again = (loop.streams.run(figures(tenant)) for tenant in ("a", "b", "a"))
    assert first == [(0, 8), (0, 4)]
    assert other == [(8, 0), (0, 4)]
    assert again == [(8, 0), (4, 0)]


def test_a_constraint_of_the_tail_is_compiled_for_its_tenant(backend: LocalBackend) -> None:
    async def hits(tenant: str) -> int:
        request = GenRequest(tenant, (Text("x"), Private(tenant)), ONE, constraint=ConstraintSpec("regex", "[ab]"))
        assert [event async for event in backend.generate(request)]
        facts = (await backend.control("info")).result
        return int(facts.get("gateway_constraint_cache_hits", 0))  # type: ignore[arg-type]

    assert [loop.streams.run(hits(tenant)) for tenant in ("a", "b", "a")] == [0, 0, 1]


def test_text_of_the_tail_is_tokenized_for_its_tenant(backend: LocalBackend) -> None:
    async def tokenized(tenant: str) -> int:
        request = GenRequest(tenant, (Text("x"), Private(tenant), Text("y" * 50)), ONE)
        assert [event async for event in backend.generate(request)]
        facts = (await backend.control("info")).result
        return int(facts["gateway_tokenized_characters"])  # type: ignore[arg-type]

    first, other, again = (loop.streams.run(tokenized(tenant)) for tenant in ("a", "b", "a"))
    assert other == 2 * first
    assert again == other


def test_a_picture_of_the_head_is_shared_and_one_of_the_tail_is_not() -> None:
    picture: Media = media_of("image", b"png")
    prompt = (picture, Text("x"), Private("a"), picture, Generated("y", (1,)), Private("b"), picture)
    placed = _placed_media(GenRequest("r", prompt, origin=Origin(salt="s")))
    assert [salt for _, salt in placed] == ["s", "s/a", "s/a/b"]
