"""What is remembered of calls: in order, for each backend apart, within bounds."""

import gc
import weakref

from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.cache_explain.history import CallLog, History, Intent, history_of
from umbel.lang.prompt import EMPTY, Media, Prompt, Text
from umbel.lang.protocol import GenRequest, ScoreRequest, Usage


def intent(text: str) -> Intent:
    return Intent("gen", "x", EMPTY.append(Text(text)), None)


def test_calls_stand_in_the_order_in_which_they_began() -> None:
    history = History()
    calls = [history.record(intent(text), (Text(text),), "", own=True) for text in ("a", "b", "c")]
    history.end(calls[1], Usage(3), "answer")
    assert history.calls == calls
    assert calls[1].ended is not None
    assert calls[1].ended > calls[2].began
    assert (calls[0].ended, calls[1].answer) == (None, "answer")


def test_the_oldest_prompts_go_first() -> None:
    history = History(prompts=2)
    calls = [history.record(intent("a"), (Text("a"),), "", own=True) for _ in range(4)]
    assert history.calls == calls[2:]


def test_long_prompts_leave_room_for_few() -> None:
    history = History(characters=10)
    calls = [history.record(intent(text), (Text(text),), "", own=True) for text in ("a" * 6, "b" * 4, "c" * 5)]
    assert history.calls == calls[1:]
    longest = history.record(intent("d" * 99), (Text("d" * 99),), "", own=True)
    assert history.calls == [longest]  # however long


def test_pictures_leave_room_for_few() -> None:
    history = History(characters=10)
    shown = [(Text("a"), Media("image", str(size), bytes(size))) for size in (6, 4, 4)]
    calls = [history.record(intent("a"), parts, "", own=False) for parts in shown]
    assert history.calls == calls[1:]


def test_every_backend_has_a_history_of_its_own_and_is_not_kept_by_it() -> None:
    one, other = Echo(), Echo()
    assert history_of(one) is history_of(one)
    assert history_of(one) is not history_of(other)
    reference = weakref.ref(one)
    del one
    gc.collect()
    assert reference() is None


def test_a_backend_that_nobody_can_refer_to_weakly_is_served_all_the_same() -> None:
    class Slotted:
        __slots__ = ()

    assert isinstance(history_of(Slotted()), History)  # type: ignore[arg-type]  # a backend by nothing but its memory


def test_calls_belong_to_the_gen_that_their_id_names() -> None:
    log = CallLog(History())
    prompt = EMPTY.append(Text("a"))
    said = log.intend("r-1-2", "gen", "x", prompt, None)
    own = log.record(GenRequest("r-1-2", prompt.parts))
    again = log.record(GenRequest("r-1-2-0-2", (Text("b"),)))
    assert own is not None
    assert again is not None
    assert own.intent is again.intent is said
    assert (own.parts, again.parts) == (None, (Text("b"),))
    assert log.record(GenRequest("r-1-20", prompt.parts)) is None  # another gen's, which nobody announced
    log.end(None, Usage(), "")


def test_choices_that_are_scored_are_sequences_each() -> None:
    log = CallLog(History())
    log.intend("r-1-1", "select", "x", EMPTY, None)
    scored = log.record(ScoreRequest("r-1-1", (), ("yes", "no")))
    searched = log.record(ScoreRequest("r-1-1", (), ("yes", "no"), probability="exact"))
    assert scored is not None
    assert searched is not None
    assert (scored.sequences, searched.sequences) == (2, 1)


def test_a_gen_that_has_its_answer_keeps_no_joined_text() -> None:
    prompt = EMPTY.append(Text("a")).append(Text("b"))
    assert prompt.parts == (Text("ab"),)
    said = Intent("gen", "x", prompt, None)
    said.settle()
    said.settle()
    assert said.settled
    assert isinstance(said.prompt, Prompt)
    assert said.prompt is not prompt
    assert said.prompt.parts == prompt.parts


def test_what_cannot_be_recognised_in_a_text_is_not_kept() -> None:
    log = CallLog(History())
    log.note_arguments({"text": "a", "number": 1, "turns": ["a"], "other": object(), "code": len})
    assert list(log.arguments) == ["text", "number", "turns"]
