"""stop_regex through gateway and engine: both watch, the text ends before the match, and what is shown stays."""

import asyncio
import itertools
import re
from contextlib import aclosing
from typing import Any

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.stops import stops_of
from umbel.lang.prompt import Text
from umbel.lang.protocol import Chunk, Completion, Final, FinishReason, GenRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend
from umbel.srt.tokenizer.tokenizer import Detokenizer

PATIENCE = 60.0


def generate(sampling: SamplingParams, prompt: str = "a text") -> tuple[list[str], Completion]:
    """The chunks' texts, and the completion."""

    async def run() -> tuple[list[str], Completion]:
        backend = LocalBackend(seed=1)
        await backend.start()
        pieces = []
        try:
            async with aclosing(backend.generate(GenRequest("1", (Text(prompt),), sampling, stream=True))) as events:
                async for event in events:
                    match event:
                        case Chunk(text=text):
                            pieces.append(text)
                        case Final(completions=(completion,)):
                            return pieces, completion
        finally:
            await backend.close()
        raise AssertionError("no ending")

    return asyncio.run(asyncio.wait_for(run(), PATIENCE))


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, **fields)


@pytest.mark.parametrize("pattern", ["[0-9]", "[a-m][A-M]", r"\W{2}", "[^a-z]{3}[a-z]"])
@pytest.mark.parametrize("minimum", [0, 20])
@pytest.mark.sampled(4)
def test_the_text_ends_before_the_first_match_to_end(pattern: str, minimum: int) -> None:
    _, free = generate(sampling())
    pieces, stopped = generate(sampling(stop_regex=(pattern, "not found"), min_tokens=minimum))
    assert "".join(pieces) == stopped.text
    assert free.text.startswith(stopped.text)
    if stopped.finish_reason is FinishReason.LENGTH:
        assert stopped.text == free.text
        assert re.search(pattern, free.text[minimum:]) is None
        return
    assert stopped.matched_stop == pattern
    found = re.compile(pattern).match(free.text, len(stopped.text))
    assert found is not None
    if not minimum:
        assert re.search(pattern, free.text[: found.end() - 1]) is None


def test_strings_and_expressions_end_the_same_request() -> None:
    _, free = generate(sampling())
    stop = free.text[30:33]
    _, first = generate(sampling(stop=(stop,), stop_regex=("zzzzz",)))
    assert first.matched_stop == stop
    _, second = generate(sampling(stop=(stop,), stop_regex=(re.escape(free.text[10]),)))
    assert len(second.text) <= 10


@settings(max_examples=150, deadline=None)
@given(
    st.text("ab1é✓ ", max_size=14),
    st.lists(st.sampled_from(["[0-9]", "a+b", "(?:a|b)*1", "é.", "[^ ]{3} "]), min_size=1, max_size=2, unique=True),
    st.sampled_from([(), ("ab",), ("é", "1 ")]),
    st.lists(st.integers(0, 40)),
    st.integers(0, 12),
)
def test_what_is_shown_never_reaches_into_the_stop_that_counts(
    text: str, patterns: list[str], strings: tuple[str, ...], places: list[int], minimum: int
) -> None:
    """The engine begins anew behind a stop that min_tokens overrules; the detokenizer goes on where it is."""
    data = text.encode()
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    tokens = [data[begin:end] for begin, end in itertools.pairwise([0, *ends])]
    stops = stops_of(strings, patterns)
    assert stops is not None
    subject = Detokenizer(tokens.__getitem__, stops)
    matcher, base, seen = stops.matcher(), 0, 0
    for index, token in enumerate(tokens):
        rest = token
        while (match := matcher.feed(rest)) is not None:
            if index + 1 >= minimum:
                subject.finish([index], base + match.start)
                assert subject.text == data[: base + match.start].decode()
                return
            base += match.end
            rest = token[base - seen :]
            matcher = stops.matcher()
        seen += len(token)
        subject.feed([index])
    subject.finish([], seen)
    assert subject.text == text


def test_the_language_reaches_it_and_refuses_what_cannot_be_used() -> None:
    @ul.function
    def program(s, pattern):
        s += "a text" + ul.gen("first", max_tokens=2, temperature=0)
        s += ul.gen("x", max_tokens=60, temperature=0, ignore_eos=True, stop_regex=pattern)

    backend = LocalBackend(seed=1)
    state = program.run(pattern=["[a-z]", "[A-Z]"], backend=backend, timeout=PATIENCE)
    assert re.search("[a-zA-Z]", state["x"]) is None
    assert state.meta("x")["matched_stop"] in ("[a-z]", "[A-Z]")
    for pattern, problem in (("^a", "anchor"), ("(a", r"stop_regex '\(a'"), ("a?", "empty text"), ("a{999}", "states")):
        refused = program.run(pattern=pattern, backend=backend, timeout=PATIENCE)
        with pytest.raises(ul.ConstraintError, match=problem):
            refused["x"]
        assert refused["first"]
