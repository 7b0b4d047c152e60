"""The parts alone: what is known of tokens, where a field ends, whether more text pays."""

import json
import threading

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.echo_answers import cut
from umbel.interpreter.backends.echo_tokens import pieces
from umbel.interpreter.run import SpeculationSetting, speculation_of
from umbel.interpreter.speculation.planner import MOST_REFUSALS, MOST_SITES, Coming, Outlook, Planner
from umbel.interpreter.speculation.replies import End, Field, LongReply, Pieces, end_of, reply_of
from umbel.lang.protocol import Chunk, Completion, ConstraintSpec, Final, FinishReason, TokenLogprob, Usage
from umbel.lang.sampling import SamplingParams


def reply(text: str, *, known: bool = True, ended: bool = False, tokens: int | None = None) -> LongReply:
    texts = pieces(text)
    ends = tuple(sum(map(len, texts[: index + 1])) for index in range(len(texts))) if known else ()
    return LongReply(text, ends, len(texts) if tokens is None else tokens, ended)


def field(
    max_tokens: int = 50, *, constraint: ConstraintSpec | None = None, enforced: bool = False, **options
) -> Field:
    return Field(SamplingParams(max_tokens=max_tokens, **options), constraint, enforced)


def text_of(end: End | None, whole: str, start: int = 0) -> str | None:
    return None if end is None else whole[start : end.stop]


# ------------------------------------------------------------------------------------------ tokens


def test_a_bound_on_tokens_is_the_best_that_is_known():
    whole = "Name: Harry\n"  # Name|:| Harry|\n
    assert reply(whole).at_most(5, 12) == 2
    assert reply(whole).at_most(6, 12) == 6  # the first token is cut: its rest may be as many as it has bytes
    assert reply(whole, known=False).at_most(5, 12) == 4  # no more than there are in all
    assert reply(whole, known=False, tokens=100).at_most(5, 12) == 7
    assert reply(whole).at_most(5, 5) == 0


def test_counts_of_neighbours_add_up():
    for known in (True, False):
        long = reply("Name: Harry\nJob: wizard\n", known=known)
        assert long.counted(0, 11) + long.counted(11, 17) + long.counted(17, 24) == long.tokens


def test_a_place_behind_tokens_is_known_from_the_beginning_of_one_only():
    long = reply("Name: Harry\n")
    assert long.after(5, 1) == 11
    assert long.after(6, 1) is None
    assert long.after(5, 3) is None
    assert reply("Name: Harry\n", known=False).after(0, 1) is None


def logprobs(*texts: str) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(index, text, -0.1) for index, text in enumerate(texts))


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (logprobs("a", "b c"), (1, 4)),
        (logprobs("a", "b c", "<|end|>"), (1, 4)),  # servers that tell the end of the sequence, too
        (logprobs("a", "b"), ()),
        (logprobs("ab", " d"), ()),
        ((), ()),
    ],
)
def test_ends_of_tokens_are_believed_when_they_spell_the_text(tokens, ends):
    completion = Completion("ab c", (), 0, "ab c", FinishReason.STOP, None, tokens)
    assert reply_of(Final("1", (completion,), Usage(5, 0, 2, 1))).ends == ends


def test_a_reply_that_nobody_counted_has_a_token_for_every_byte_at_most():
    completion = Completion("né", (), 0, "né", FinishReason.LENGTH)
    assert reply_of(Final("1", (completion,), Usage())) == LongReply("né", (), 3, False)


# ------------------------------------------------------------------------------------------ where fields end

TEXTS = st.text(alphabet="ab \n;.7é", max_size=30)
EXPRESSIONS = st.sampled_from([(), (r"7[ab]",), (r"[;.]+", "b b")])


@settings(max_examples=120, deadline=None)
@given(TEXTS, st.data(), st.booleans(), st.booleans())
def test_a_certain_end_is_that_of_a_call_of_its_own(whole, data, known, ended):
    start = data.draw(st.integers(0, len(whole)))
    stops = data.draw(st.lists(st.sampled_from(["\n", ";", "a\n", ". ", "ab"]), unique=True))
    wanted = field(data.draw(st.integers(1, 20)), stop=tuple(stops), stop_regex=data.draw(EXPRESSIONS))
    end = end_of(wanted, reply(whole, known=known, ended=ended), start, "")
    if end is None:
        return
    more = "" if ended else "\n" + data.draw(TEXTS)  # behind the last token, not inside of it
    alone, _ = cut(whole[start:] + more, wanted.sampling)
    assert alone.text == whole[start : end.stop]
    if end.reason is FinishReason.STOP:
        assert alone.matched_stop == end.matched


def test_a_stop_is_certain_within_max_tokens_only():
    whole = "Harry Potter\nJob:"
    assert text_of(end_of(field(3, stop=("\n",)), reply(whole), 0, ""), whole) == "Harry Potter"
    assert end_of(field(2, stop=("\n",)), reply(whole), 0, "") == End(12, 12, FinishReason.LENGTH)
    assert end_of(field(3, stop=("\n",)), reply(whole, known=False), 0, "") is None
    assert end_of(field(13, stop=("\n",)), reply(whole, known=False, tokens=99), 0, "") is not None


def test_without_a_stop_in_sight_only_the_models_own_end_is_one():
    wanted = field(stop=("\n",))
    assert end_of(wanted, reply("Harry", known=False), 0, "") is None
    assert end_of(wanted, reply("Harry", known=False, ended=True), 0, "") == End(5, 5, FinishReason.STOP)


def regex(source: str) -> ConstraintSpec:
    return ConstraintSpec("regex", source)


def choices(*texts: str) -> ConstraintSpec:
    return ConstraintSpec("choices", json.dumps(texts))


@pytest.mark.parametrize(
    ("constraint", "whole", "following", "found"),
    [
        (regex("[0-9]+"), "1980, born", ", born", "1980"),
        (regex("[0-9]+"), "1980, born", ", made", None),
        (regex("[0-9]+"), "1980, born", "", None),  # nobody knows what the program says next
        (regex("[0-9]+"), "1980", ", born", None),  # more digits may follow
        (regex("[0-9]{4}"), "1980, born", ", born", "1980"),
        (regex("[a-z]+"), "1980, born", ", born", None),
        (regex(" [a-z]+"), " wizard, born", ", born", None),  # if max_tokens cut it there, it would be tidied
        (choices("elf", "elfin"), "elf, born", ", born", "elf"),
        (choices("elf", "elfin"), "el", ", born", None),
        (ConstraintSpec("json_schema", '{"type": "object"}'), '{"a": 1}\nJob', "\nJob", '{"a": 1}'),
        (regex("("), "1980, born", ", born", None),  # the call of its own says what is wrong
    ],
)
def test_a_constraint_ends_where_the_program_goes_on(constraint, whole, following, found):
    end = end_of(field(constraint=constraint), reply(whole, known=False, tokens=99), 0, following)
    assert text_of(end, whole) == found
    assert end is None or end.guarantee == "validated"


@pytest.mark.parametrize(
    ("constraint", "whole", "found"),
    [
        (regex("[0-9]{4}"), "1980\nJob", "1980"),
        (regex("[0-9]{2,4}"), "19\nJob", None),  # under the constraint the model might have gone on
        (choices("elf", "elfin"), "elf\nJob", None),
        (choices("elf", "wizard"), "elf\nJob", "elf"),
        (ConstraintSpec("json_schema", '{"type": "object"}'), '{"a": 1}\nJob', None),
    ],
)
def test_a_constraint_that_the_provider_enforces_ends_where_nothing_can_be_added(constraint, whole, found):
    end = end_of(field(constraint=constraint, enforced=True), reply(whole), 0, "\nJob")
    assert text_of(end, whole) == found


def test_a_constrained_text_with_a_stop_is_judged_as_a_whole():
    wanted = field(stop=("\n",), constraint=regex("[a-z]+"))
    assert text_of(end_of(wanted, reply("wizard\nAge"), 0, "\nAge"), "wizard\nAge") == "wizard"
    assert end_of(wanted, reply(" wizard\nAge"), 0, "\nAge") is None  # a call of its own would tidy it
    assert end_of(wanted, reply("wizard"), 0, "\nAge") is None
    early = field(stop=(" ",), constraint=regex("[a-z]+ [a-z]+"))
    assert end_of(early, reply("a wizard\nAge"), 0, "\nAge").guarantee == "incomplete"


# ------------------------------------------------------------------------------------------ pieces


def told(wanted: Field, texts: list[str], lead: str = "") -> list[str]:
    said: list[str] = []
    sink = Pieces(wanted, lead, lambda chunk: said.append(chunk.text))
    for text in texts:
        sink.feed(Chunk("1", 0, text))
    assert sink.delivered == bool(said)
    return said


def test_readers_get_a_text_when_its_end_is_certain_and_nothing_behind_it():
    assert told(field(stop=("\n",)), ["Har", "ry", "\nJob", ": wizard\n"]) == ["Harry"]
    assert told(field(4, stop=("\n",)), ["Har", "ry", "\nJob"]) == []  # perhaps too many tokens
    assert told(field(stop=("\n",)), ["Na", "me: Har", "ry\n"], "Name: ") == ["Harry"]
    assert told(field(stop=("\n",)), ["Job: ", "wizard\n"], "Name: ") == []
    assert told(field(stop=("\n",), constraint=regex("[a-z]+")), ["harry\n"]) == []


# ------------------------------------------------------------------------------------------ the outlook and the planner

SAMPLING = SamplingParams(max_tokens=20, temperature=0)


def test_what_follows_begins_with_the_stop():
    def ahead(literal: str) -> Outlook:
        return Outlook(literal, (Coming(literal, "job", SAMPLING),), closed=True)

    assert ahead("\nJob:").can_follow(field(stop=(";", "\n")))
    assert ahead("").can_follow(field(stop=("\n",)))
    assert not ahead("Job:").can_follow(field(stop=("\n",)))
    assert ahead("Job:").can_follow(field(stop=("\n",), stop_regex=("[a-z]",)))
    assert ahead(", Job:").can_follow(field(constraint=regex("[0-9]+")))
    assert not Outlook("\n", (), closed=True).can_follow(field(stop=("\n",)))
    assert Outlook("\n", (), closed=False).can_follow(field(stop=("\n",)))


COMING = (Coming("\nJob:", "job", SAMPLING), Coming("\nAge:", "age", SAMPLING))


def test_more_text_pays_where_the_prompt_is_long():
    planner = Planner()
    assert planner.worthwhile("name", COMING, 2000, (1.0, 4.0)) == 2 * (2 + 20)
    assert planner.worthwhile("name", COMING, 10, (1.0, 4.0)) == 0
    assert planner.worthwhile("name", COMING, 10, (1.0, 0.0)) > 0
    assert planner.worthwhile("name", (), 2000, (1.0, 4.0)) == 0


def test_the_planner_learns_how_often_text_fits_and_how_long_it_is():
    planner = Planner()
    for _ in range(50):
        planner.note(("job", "age"), False)
        planner.note(("name", "job"), True)
        planner.note_length("job", 4)
    assert planner.chance(("job", "age")) < 0.1 < 0.9 < planner.chance(("name", "job"))
    assert planner.worthwhile("name", COMING, 100, (1.0, 4.0)) == 2 + 6  # the job alone, and no more than it needs


def test_the_planner_forgets_sites_that_are_long_gone_and_counts_on_many_threads():
    planner = Planner()

    def work() -> None:
        for index in range(MOST_SITES):
            planner.note(("", f"x{index}"), True)
            planner.note(("", "same"), True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert planner.chance(("", "same")) == (2 + 4 * MOST_SITES) / (3 + 4 * MOST_SITES)
    assert len(planner._sites) == MOST_SITES


def test_a_backend_refuses_after_some_refusals():
    planner = Planner()
    for _ in range(MOST_REFUSALS):
        assert not planner.refuses("a", "more tokens")
        planner.note_refusal("a", "more tokens")
    assert planner.refuses("a", "more tokens")
    assert not planner.refuses("a", "logprobs")
    assert not planner.refuses("b", "more tokens")


# ------------------------------------------------------------------------------------------ settings


def test_settings():
    assert speculation_of(None, None) is None
    assert speculation_of(64, None) == SpeculationSetting(64)
    assert speculation_of(None, "auto") == SpeculationSetting(None)


@pytest.mark.parametrize(
    ("tokens", "speculate", "problem"),
    [
        (64, "auto", "two answers"),
        (-1, None, "out of range"),
        (True, None, "write a number of tokens"),
        ("64", None, "write a number of tokens"),
        (None, True, 'speculate="auto"'),
        (None, "always", 'speculate="auto"'),
    ],
)
def test_settings_that_are_none(tokens, speculate, problem):
    with pytest.raises(ul.ParameterError, match=problem):
        ul.function(num_api_spec_tokens=tokens, speculate=speculate)
