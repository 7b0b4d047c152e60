"""Echo, the backend that ships for tests: it does what it says."""

import asyncio

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import pieces, token_id
from umbel.lang.prompt import Generated, Private, Text
from umbel.lang.protocol import Chunk, Completion, ConstraintSpec, Final, GenRequest, Locate, Origin, ScoreRequest
from umbel.lang.sampling import SamplingParams

from .conftest import PATIENCE


def generate(echo: Echo, prompt: str, **sampling: object) -> Final:
    events = collect(echo, GenRequest("1", (Text(prompt),), SamplingParams(**sampling)))
    final = events[-1]
    assert isinstance(final, Final)
    return final


def collect(echo: Echo, request: GenRequest) -> list[Chunk | Final]:
    async def run() -> list[Chunk | Final]:
        return [event async for event in echo.generate(request)]

    return asyncio.run(run())


def complete(text: str, **sampling: object) -> Completion:
    return generate(Echo([text]), "p", **sampling).completions[0]


def test_without_a_script_the_last_words_of_the_program_come_back() -> None:
    assert generate(Echo(), "say this").completions[0].text == "say this"


def test_a_dict_answers_by_what_stands_last_in_the_prompt() -> None:
    echo = Echo({"France": "Paris", "Japan": ["Tokyo"]})
    assert generate(echo, "France, then Japan?").completions[0].text == "Tokyo"
    assert generate(echo, "Japan, then France?").completions[0].text == "Paris"
    with pytest.raises(ul.RequestError, match="no key that stands in the prompt ending with 'Peru"):
        generate(echo, "Peru?")


def test_a_text_that_cannot_be_made_up_has_to_be_given() -> None:
    unique = ConstraintSpec("json_schema", '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}')
    request = GenRequest("1", (Text("p"),), SamplingParams(max_tokens=9), constraint=unique)
    with pytest.raises(ul.CapabilityError, match=r"as in Echo\(\['...'\]\)"):
        collect(Echo(), request)
    assert collect(Echo(['["a"]']), request)[-1].completions[0].text == '["a"]'


def test_prompts_are_the_texts_of_the_calls_without_hints() -> None:
    @ul.function(max_tokens=4)
    def ask(s, question):
        s += question
        forks = s.fork(2)
        forks += lambda i: f" {i}:" + ul.gen("answer")
        forks.join()
        s += ul.select("sure", choices=["yes", "no"])

    echo = Echo(["a", "b"])
    ask.run("Why?", backend=echo).sync()
    assert sorted(echo.prompts) == ["Why?", "Why? 0:", "Why? 1:"]
    assert len(echo.requests) > len(echo.prompts)


def test_a_list_answers_in_order_and_can_be_used_up() -> None:
    echo = Echo(["a", "b", ["c", "d"]])
    assert [c.text for c in generate(echo, "p", n=2).completions] == ["a", "b"]
    assert [c.text for c in generate(echo, "p", n=2).completions] == ["c", "d"]
    with pytest.raises(ul.RequestError, match="used up"):
        generate(echo, "p")


def test_a_function_answers_by_the_prompt() -> None:
    echo = Echo(lambda prompt: prompt.upper())
    assert [c.text for c in generate(echo, "abc", n=2).completions] == ["ABC", "ABC"]


def test_a_string_is_not_a_script() -> None:
    with pytest.raises(ul.ParameterError, match="write a list of answers"):
        Echo("hello")


def test_max_tokens_cuts_and_says_length() -> None:
    completion = complete("one two three", max_tokens=2)
    assert (completion.text, completion.finish_reason, completion.kept, completion.tail) == ("one two", "length", 2, "")


def test_a_stop_string_is_cut_away_wherever_it_begins() -> None:
    completion = complete("one two three", stop=("o th",))
    assert (completion.text, completion.matched_stop, completion.kept, completion.tail) == ("one tw", "o th", 1, " tw")
    assert [token_id(piece) for piece in ["one", " two", " three"]] == list(completion.token_ids)


def test_the_stop_that_ends_first_wins_and_of_those_the_longest() -> None:
    assert complete("one two three", stop=("three", "two", "e two")).matched_stop == "e two"


def test_a_stop_behind_max_tokens_does_not_count() -> None:
    completion = complete("one two three", stop=("three",), max_tokens=2)
    assert (completion.text, completion.finish_reason) == ("one two", "length")


def test_a_stop_token_ends_the_text_before_it() -> None:
    completion = complete("one two three", stop_token_ids=(token_id(" two"),))
    assert (completion.text, completion.matched_stop) == ("one", token_id(" two"))
    assert len(completion.token_ids) == 2


def test_min_tokens_puts_the_end_off() -> None:
    assert complete("one stop two stop", stop=(" stop",), min_tokens=3).text == "one stop two"
    assert len(complete("one", min_tokens=4).token_ids) == 4


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    completion = complete("one", ignore_eos=True, max_tokens=5)
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")


def test_a_stop_regex_ends_the_text_where_a_match_first_ends() -> None:
    completion = complete("one 12 three", stop_regex=("[0-9]+",))
    assert (completion.text, completion.matched_stop, completion.finish_reason) == ("one ", "[0-9]+", "stop")
    assert complete("one two", stop_regex=("(?i)TW.", "wo"), stop=("zzz",)).text == "one "  # the longer one
    assert complete("a1 b2 c3", stop_regex=("[0-9]",), min_tokens=2).text == "a1 b"
    assert complete("one two", stop_regex=("[0-9]",)).text == "one two"
    with pytest.raises(ul.ConstraintError, match="matches the empty text"):
        complete("one", stop_regex=("a*",))


def constrained(text: str, constraint: ConstraintSpec, **sampling: object) -> Completion:
    request = GenRequest("1", (Text("p"),), SamplingParams(**sampling), constraint=constraint)
    final = collect(Echo([text]), request)[-1]
    assert isinstance(final, Final)
    return final.completions[0]


def test_a_constrained_answer_ends_where_its_constraint_does() -> None:
    letters = ConstraintSpec("regex", "[a-z ]+")
    completion = constrained("one two", letters, max_tokens=9, min_tokens=5, ignore_eos=True)
    assert (completion.text, completion.finish_reason, completion.guarantee) == ("one two", "stop", "enforced")
    cut = constrained("one two", letters, max_tokens=1)
    assert (cut.finish_reason, cut.guarantee) == ("length", "")
    stopped = constrained("one two 3", letters, stop=(" 3",))
    assert (stopped.text, stopped.guarantee) == ("one two", "")
    assert constrained("one two", ConstraintSpec("regex", "one two"), stop=(" ",)).text == "one"


def test_syntax_that_re_does_not_know_is_left_to_the_regex_package() -> None:
    assert constrained("Ünder", ConstraintSpec("regex", r"\p{L}+")).text == "Ünder"
    with pytest.raises(ul.ConstraintError, match=r"regex '\(a'"):
        constrained("a", ConstraintSpec("regex", "(a"))


@pytest.mark.parametrize(
    "grammar", [ConstraintSpec("lark", 'start: "a" "b"*'), ConstraintSpec("gbnf", 'root ::= "a" [b]*')]
)
def test_an_answer_is_held_against_a_grammar(grammar: ConstraintSpec) -> None:
    pytest.importorskip("llguidance")
    assert constrained("abb", grammar).text == "abb"
    with pytest.raises(ul.RequestError, match="no text of the grammar"):
        constrained("ba", grammar)


def test_chunks_add_up_to_the_text_of_every_continuation() -> None:
    request = GenRequest("1", (Text("p"),), SamplingParams(n=2, stop=("r f",)), stream=True)
    *chunks, final = collect(Echo([["one two three four", "naïve ✓"]]), request)
    assert isinstance(final, Final)
    for index, completion in enumerate(final.completions):
        assert "".join(c.text for c in chunks if isinstance(c, Chunk) and c.index == index) == completion.text


def test_tokens_join_to_the_text() -> None:
    text = "Ça va?\n  Yes,\tthanks 你好 🎉"
    assert "".join(pieces(text)) == text


def test_the_cache_counts_as_a_real_one() -> None:
    echo = Echo(lambda prompt: "four five")
    assert generate(echo, "one two three").usage.cached_tokens == 0
    assert generate(echo, "one two three").usage.cached_tokens == 2  # the last token's result is needed
    assert generate(echo, "one two other").usage.cached_tokens == 2
    again = GenRequest("1", (Text("one two three"), Generated("four five", tuple(map(token_id, ["four", " five"])))))
    final = collect(echo, again)[-1]
    assert isinstance(final, Final)
    assert (final.usage.prompt_tokens, final.usage.cached_tokens) == (5, 4)


def test_a_salt_is_a_cache_of_its_own() -> None:
    echo = Echo()

    def cached(salt: str) -> int:
        final = collect(echo, GenRequest("1", (Text("one two three"),), origin=Origin(salt=salt)))[-1]
        assert isinstance(final, Final)
        return final.usage.cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached("")] == [0, 0, 2, 0]


def test_a_private_part_is_a_cache_of_its_own_after_a_shared_head() -> None:
    echo = Echo()

    def cached(*tenants: str) -> int:
        parts = (Text("one two"), *map(Private, tenants), Text(" three four"))
        final = collect(echo, GenRequest("1", parts))[-1]
        assert isinstance(final, Final)
        assert final.usage.prompt_tokens == 4
        return final.usage.cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached()] == [0, 2, 3, 2]
    assert [cached("a", "b"), cached("a", "b"), cached("a", "a")] == [2, 3, 3]
    question = Locate("l", (Text("one two"), Private("a"), Text(" three")), (2,), ((Text("one two three"),),))
    located = asyncio.run(echo.locate(question))
    assert (located.characters, located.tokens, located.shared) == ((7,), 3, (2,))


def test_a_full_cache_is_emptied() -> None:
    echo = Echo(cache_tokens=10)
    for number in range(100):
        generate(echo, f"a b c {number}", max_tokens=1)
        assert len(echo._cache) <= 10
    assert Echo(cache_tokens=0)._cache.match("", [1, 2]) == 0


def test_scores_are_given_or_hashed_and_repeatable() -> None:
    echo = Echo(scores={"yes": -0.5, "no way": [-1.0, -2.0]})

    def score(prompt: str) -> list[tuple[float, ...]]:
        request = ScoreRequest("1", (Text(prompt),), ("yes", "no way", "maybe"), unconditional=True)
        scored = asyncio.run(echo.score(request))
        assert all(len(c.unconditional) == len(c.token_ids) for c in scored.choices)
        return [choice.logprobs for choice in scored.choices]

    assert score("a")[:2] == [(-0.5,), (-1.0, -2.0)]
    assert score("a") == score("a") != score("b")
    with pytest.raises(ul.ParameterError, match="1 numbers for the tokens"):
        asyncio.run(Echo(scores={"no way": [-1.0]}).score(ScoreRequest("1", (), ("no way",))))


@pytest.mark.parametrize("written", ["goood", " good", "Good"])
def test_a_score_of_what_is_nearly_a_choice_is_an_error(written: str) -> None:
    echo = Echo(scores={written: -1.0, "bad": -2.0})
    with pytest.raises(ul.RequestError, match=f"{written!r}, which is no choice here, and not the choice 'good'"):
        asyncio.run(echo.score(ScoreRequest("1", (), ("good", "bad"))))


@pytest.mark.parametrize("choices", [("disagree", "unsure"), ("relevant", "agree"), ("good", "bad")])
def test_scores_of_other_words_leave_choices_to_the_hash(choices: tuple[str, str]) -> None:
    scored = asyncio.run(Echo(scores={"agree": -1.0}).score(ScoreRequest("1", (), choices)))
    assert all(choice.logprobs for choice in scored.choices)


def test_a_delay_is_slept_by_the_clock_it_was_given() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    echo = Echo(["one two"], delay=0.5, sleep=sleep)
    collect(echo, GenRequest("1", (Text("p"),), stream=True))
    assert slept == [0.5] * 3


def test_requests_are_recorded_for_assertions_up_to_a_bound() -> None:
    echo = Echo(record=2)

    @ul.function
    def program(s, x):
        s += x + ul.gen("y")

    program.run_batch([("a",), ("b",), ("c",)], backend=echo, num_threads=1, timeout=PATIENCE)
    assert [request.prompt for request in echo.requests] == [(Text("b"),), (Text("c"),)]
    assert echo.calls == 3


def test_an_unknown_control_verb_is_refused() -> None:
    with pytest.raises(ul.CapabilityError, match="no control verb 'reboot'"):
        asyncio.run(Echo().control("reboot"))
