"""The gateway: every request ends exactly once, with the right text or the right error."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.lang.errors import EngineError, ParameterError
from umbel.lang.prompt import Generated, Media, Text
from umbel.lang.protocol import (
    Abort,
    Chunk,
    ConstraintSpec,
    Control,
    Done,
    Failure,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Origin,
    ReadStatus,
    RequestTimes,
    Scored,
    ScoreRequest,
    StatusRead,
    Survey,
    Surveyed,
    TokenLogprob,
)
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import PoolGauges, RuntimeStatus, TreeNode, TreeSurvey
from umbel.srt.core.batch import PICTURE_BASE
from umbel.srt.core.config import CompilerLimits, GatewayLimits, PictureLimits
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import (
    ChooseEnded,
    ControlEnded,
    EngineChoose,
    EngineControl,
    EngineFailed,
    EnginePrefill,
    EngineSurvey,
    EngineSurveyed,
    Heartbeat,
    IdLogprob,
    ScoreEnded,
    Tokens,
)
from umbel.srt.tokenizer.prompt import CACHE_BYTES
from umbel.srt.tokenizer.tokenizer import MOST_STOP_CHARACTERS, MOST_STOPS, ByteTokenizer

from ..gateway_harness import CONTEXT, Harness, ended, generate

BOS, EOS = 256, 257


class NoBeginning(ByteTokenizer):
    """A tokenizer of a model that was trained without any token that begins a text."""

    name = "beginless"
    bos_id = None
    eos_ids = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.special_ids = {}


class Separated(ByteTokenizer):
    """Without BOS, but with a token between documents."""

    bos_id = None

    def __init__(self) -> None:
        super().__init__()
        self.special_ids = {"<|endoftext|>": 257}


def kinds(harness: Harness) -> list[str]:
    return [message.kind for message in harness.answers() if isinstance(message, Failure)]


class TestGenerate:
    def test_a_request_becomes_tokens_and_its_tokens_become_text(self) -> None:
        harness = Harness()
        harness.send(generate(max_tokens=3))
        (request,) = harness.generates()
        assert request.token_ids == [BOS, *b"hello"]
        harness.gateway.engine_event(ended(request.id, list(b"you"), cached=4))
        (final,) = harness.answers()
        assert isinstance(final, Final)
        assert final.id == "a"
        assert final.completions[0].text == "you"
        assert (final.usage.prompt_tokens, final.usage.cached_tokens, final.usage.completion_tokens) == (6, 4, 3)
        assert harness.gateway.in_flight == 0

    def test_chunks_come_in_order_and_carry_their_tokens_once(self) -> None:
        harness = Harness()
        harness.send(generate(stream=True, stop=("END",)))
        (request,) = harness.generates()
        harness.gateway.engine_event(Tokens(request.id, list(b"ab")))
        harness.gateway.engine_event(Tokens(request.id, list(b"EN")))
        harness.gateway.engine_event(Tokens(request.id, list(b"c")))
        harness.gateway.engine_event(
            ended(request.id, list(b"xEND"), reason=FinishReason.STOP, matched="END", text_bytes=6)
        )
        *chunks, final = harness.answers()
        assert [chunk.text for chunk in chunks if isinstance(chunk, Chunk)] == ["ab", "ENc", "x"]
        assert [token for chunk in chunks if isinstance(chunk, Chunk) for token in chunk.token_ids] == list(
            b"abENcxEND"
        )
        assert isinstance(final, Final)
        completion = final.completions[0]
        assert (completion.text, completion.kept, completion.tail) == ("abENcx", 6, "")
        assert completion.matched_stop == "END"

    def test_a_stop_that_begins_inside_a_token_leaves_a_tail(self) -> None:
        harness = Harness()
        harness.send(generate(stop=("d",)))
        (request,) = harness.generates()
        word = ByteTokenizer().encode("END", first=False)  # one token
        harness.gateway.engine_event(
            ended(request.id, [*b"x", *word], reason=FinishReason.STOP, matched="D", text_bytes=3)
        )
        (final,) = harness.answers()
        assert isinstance(final, Final)
        assert (final.completions[0].text, final.completions[0].kept, final.completions[0].tail) == ("xEN", 1, "EN")

    def test_n_continuations_have_seeds_in_a_row_and_one_final_in_order(self) -> None:
        harness = Harness()
        harness.send(generate(n=3, seed=2**63 - 2))
        requests = harness.generates()
        assert [request.sampling.seed for request in requests] == [2**63 - 2, 2**63 - 1, 0]
        assert all(request.sampling.n == 1 for request in requests)
        for request, text, cached in zip(reversed(requests), (b"c", b"b", b"a"), (5, 5, 0), strict=True):
            assert harness.answers() == []
            harness.gateway.engine_event(ended(request.id, list(text), cached=cached))
        (final,) = harness.answers()
        assert isinstance(final, Final)
        assert [completion.text for completion in final.completions] == ["a", "b", "c"]
        assert (final.usage.prompt_tokens, final.usage.cached_tokens, final.usage.completion_tokens) == (6, 0, 3)

    def test_a_missing_seed_is_drawn_once_per_request(self) -> None:
        harness = Harness()
        harness.send(generate("a", n=2))
        harness.send(generate("b"))
        first, second, other = (request.sampling.seed for request in harness.generates())
        assert first is not None
        assert second == (first + 1) % 2**63
        assert other not in (first, second)

    def test_one_failed_continuation_ends_the_request_and_aborts_the_others(self) -> None:
        harness = Harness()
        harness.send(generate(n=2))
        first, second = harness.generates()
        harness.gateway.engine_event(EngineFailed(first.id, "EngineError", "the step failed"))
        harness.gateway.engine_event(ended(second.id, list(b"x"), reason=FinishReason.ABORT))
        assert harness.answers() == [Failure("a", "EngineError", "the step failed")]
        assert harness.aborts() == [second.id]

    def test_logprobs_carry_text_and_bytes_of_their_tokens(self) -> None:
        """Halves of a character have bytes that join to it; a control token has none."""
        harness = Harness()
        harness.send(generate(logprobs=True, top_logprobs=1))
        (request,) = harness.generates()
        told = [IdLogprob(0xC3, -0.5, ((263, -0.7),)), IdLogprob(0xA9, -1.0, ((0xFF, -0.1),)), IdLogprob(EOS, -2.0)]
        event = ended(request.id, [0xC3, 0xA9, EOS], reason=FinishReason.STOP, matched=EOS, text_bytes=2)
        harness.gateway.engine_event(msgspec.structs.replace(event, logprobs=told))
        (final,) = harness.answers()
        assert isinstance(final, Final)
        assert final.completions[0].text == "é"
        assert final.completions[0].logprobs == (
            TokenLogprob(0xC3, "\ufffd", -0.5, ((263, "in", -0.7),), b"\xc3", (b"in",)),
            TokenLogprob(0xA9, "\ufffd", -1.0, ((0xFF, "\ufffd", -0.1),), b"\xa9", (b"\xff",)),
            TokenLogprob(EOS, "", -2.0),
        )

    def test_generated_parts_travel_as_their_ids(self) -> None:
        harness = Harness()
        harness.send(GenRequest("a", (Text("x"), Generated("th", (116, 104)), Text("e"))))
        assert harness.generates()[0].token_ids == [BOS, *b"x", *b"th", *b"e"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "kind", "says"),
        [
            (
                generate(text="x" * CONTEXT),
                "ContextLengthError",
                f"{CONTEXT + 1} tokens and the context of toy holds {CONTEXT}",
            ),
            (generate(logit_bias={268: 1.0, 9999: 1.0}), "ParameterError", "9999 is outside the vocabulary"),
            (generate(stop_token_ids=(300,)), "ParameterError", "300 is outside the vocabulary"),
            (GenRequest("a", (Generated("x", (5, -1)),)), "ParameterError", "-1 is outside the vocabulary"),
            (GenRequest("a", (Text("x"),), origin=Origin(salt="a b")), "ParameterError", "salt 'a b'"),
            (GenRequest("a", (Text("x"),), origin=Origin(priority=10**9)), "ParameterError", "priority=1000000000"),
            (GenRequest("a", (Text("x"),), origin=Origin(timeout=float("nan"))), "ParameterError", "timeout=nan"),
            (GenRequest("a" * 300, (Text("x"),)), "ParameterError", "300 characters"),
            (GenRequest("a", (Media("image", "00", b""),)), "CapabilityError", "reads text only"),
            (ScoreRequest("a", (Text("x"),), ()), "ParameterError", "at least one"),
            (ScoreRequest("a", (Text("x"),), ("y", "")), "ParameterError", "non-empty"),
            (ScoreRequest("a", (Text("x"),), ("y" * 20_000,)), "RequestError", "20000 characters"),
            (ScoreRequest("a", (Text("x"),), ("y" * CONTEXT,)), "ContextLengthError", "longest choice"),
            (GenRequest("a", (Text("x\ud800"),)), "ParameterError", "'\\ud800' at position 1"),
            (ScoreRequest("a", (Text("x"),), ("\udfff",)), "ParameterError", "no character"),
            (Control("a", "reboot"), "ParameterError", "unknown control verb 'reboot'"),
        ],
    )
    def test_a_wrong_request_is_answered_by_what_to_write(
        self, request_: GenRequest | ScoreRequest | Control, kind: str, says: str
    ) -> None:
        harness = Harness()
        harness.send(request_)
        (failure,) = harness.answers()
        assert isinstance(failure, Failure)
        assert failure.kind == kind
        assert says in failure.message
        assert harness.to_engine == []
        assert harness.gateway.in_flight == 0

    @pytest.mark.parametrize(
        ("length", "max_tokens", "fits"), [(98, 1, True), (99, 1, False), (99, 0, True), (100, 0, False)]
    )
    def test_the_context_holds_prompt_and_one_token(self, length: int, max_tokens: int, fits: bool) -> None:
        harness = Harness()
        harness.send(generate(text="x" * length, max_tokens=max_tokens))  # and BOS
        assert bool(harness.generates()) is fits

    def test_a_full_queue_refuses_at_once_and_takes_again_when_one_has_ended(self) -> None:
        harness = Harness(limits=GatewayLimits(max_queue=2))
        for label in "abc":
            harness.send(generate(label))
        assert kinds(harness) == ["OverloadedError"]
        harness.gateway.engine_event(ended(harness.generates()[0].id, [97]))
        harness.send(generate("d"))
        assert len(harness.generates()) == 3

    def test_an_empty_prompt_begins_with_the_beginning(self) -> None:
        for tokenizer, first in ((ByteTokenizer(), 256), (Separated(), 257)):
            harness = Harness(tokenizer=tokenizer)
            harness.send(generate(text=""))
            assert harness.generates()[0].token_ids == [first]

    def test_an_empty_prompt_without_any_beginning_is_refused(self) -> None:
        harness = Harness(tokenizer=NoBeginning())
        harness.send(generate(text=""))
        assert kinds(harness) == ["CapabilityError"]


class TestScore:
    def test_choices_are_scored_from_what_they_share_with_the_prompt(self) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text("say t"),), ("he", "an")))  # " the" is one token, " t" is two
        (score,) = harness.scores()
        prompt = [BOS, *b"say t"]
        tokenizer = ByteTokenizer()
        assert score.sequences == [
            [BOS, *tokenizer.encode("say the", first=True)],
            [BOS, *tokenizer.encode("say tan", first=True)],
        ]
        assert score.start == 4
        assert all(sequence[:4] == prompt[:4] for sequence in score.sequences)

    @given(st.text("thean .", max_size=6), st.lists(st.text("thean .", min_size=1, max_size=4), min_size=1, max_size=4))
    def test_scored_tokens_and_shared_tokens_spell_prompt_and_choice(self, prompt: str, choices: list[str]) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text(prompt),), tuple(choices), unconditional=True))
        given_prompt, alone = harness.scores()
        spell = ByteTokenizer().token_bytes
        for choice, sequence, rest in zip(choices, given_prompt.sequences, alone.sequences, strict=True):
            assert b"".join(map(spell, sequence)).decode() == prompt + choice
            assert 1 <= given_prompt.start < len(sequence)
            assert rest == [BOS, *sequence[given_prompt.start :]]
        assert len({tuple(sequence[: given_prompt.start]) for sequence in given_prompt.sequences}) == 1
        assert alone.start == 1

    def test_both_scores_make_one_answer(self) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text("x"),), ("a", "bc"), unconditional=True))
        first, second = harness.scores()
        harness.gateway.engine_event(ScoreEnded(second.id, [[-4.0], [-5.0, -6.0]], 5, 1))
        assert harness.answers() == []
        harness.gateway.engine_event(ScoreEnded(first.id, [[-1.0], [-2.0, -3.0]], 7, 2))
        (scored,) = harness.answers()
        assert isinstance(scored, Scored)
        assert [choice.token_ids for choice in scored.choices] == [(97,), (98, 99)]
        assert [choice.logprobs for choice in scored.choices] == [(-1.0,), (-2.0, -3.0)]
        assert [choice.unconditional for choice in scored.choices] == [(-4.0,), (-5.0, -6.0)]
        assert (scored.usage.prompt_tokens, scored.usage.cached_tokens) == (12 - first.start - second.start, 3 - 1)

    def test_what_the_choices_share_is_counted_once(self) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text("four"),), ("a", "b", "c")))
        (score,) = harness.scores()
        lengths = [len(sequence) for sequence in score.sequences]
        assert lengths == [score.start + 1] * 3
        found = [0, score.start - 1, score.start - 1]  # the first computes the prompt
        harness.gateway.engine_event(ScoreEnded(score.id, [[-1.0]] * 3, sum(lengths), sum(found)))
        harness.send(ScoreRequest("t", (Text("four"),), ("a", "b", "c")))
        again = harness.scores()[-1]
        harness.gateway.engine_event(ScoreEnded(again.id, [[-1.0]] * 3, sum(lengths), 3 * (score.start - 1)))
        cold, warm = harness.answers()
        assert isinstance(cold, Scored)
        assert isinstance(warm, Scored)
        assert (cold.usage.prompt_tokens, cold.usage.cached_tokens) == (score.start + 3, 0)
        assert (warm.usage.prompt_tokens, warm.usage.cached_tokens) == (score.start + 3, score.start - 1)

    def test_without_bos_the_document_separator_begins_and_without_any_it_is_refused(self) -> None:
        harness = Harness(tokenizer=Separated())
        harness.send(ScoreRequest("s", (), ("a", "b")))
        assert (harness.scores()[0].sequences, harness.scores()[0].start) == ([[257, 97], [257, 98]], 1)
        harness = Harness(tokenizer=NoBeginning())
        harness.send(ScoreRequest("s", (Text("x"),), ("a",)))  # needs no beginning
        harness.send(ScoreRequest("s", (Text("x"),), ("a",), unconditional=True))
        assert len(harness.scores()) == 1
        assert kinds(harness) == ["CapabilityError"]

    def test_an_answer_that_does_not_fit_the_choices_ends_the_request_only(self) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text("x"),), ("ab",)))
        harness.send(generate("g"))
        harness.gateway.engine_event(ScoreEnded(harness.scores()[0].id, [[-1.0]], 3, 0))
        assert kinds(harness) == ["BackendError"]
        assert harness.gateway.in_flight == 1


class TestEndings:
    def test_abort_is_exact_and_owner_checked(self) -> None:
        harness = Harness()
        harness.send(generate("a"), b"one")
        harness.send(generate("ab"), b"one")
        harness.send(generate("a"), b"two")
        first = harness.generates()[0].id
        harness.send(Abort("a"), b"three")
        harness.send(Abort(""), b"one")
        assert harness.aborts() == []
        harness.send(Abort("a"), b"one")
        assert harness.aborts() == [first]
        harness.gateway.engine_event(ended(first, [104], reason=FinishReason.ABORT))
        (final,) = harness.answers(b"one")
        assert isinstance(final, Final)
        assert final.completions[0].finish_reason is FinishReason.ABORT
        assert harness.answers(b"two") == []

    def test_a_label_is_only_a_label(self) -> None:
        harness = Harness()
        harness.send(generate("same"))
        harness.send(generate("same"))
        for request in harness.generates():
            harness.gateway.engine_event(ended(request.id, [97]))
        assert len(harness.answers()) == 2
        assert harness.gateway.in_flight == 0

    def test_requests_of_a_peer_that_is_gone_are_aborted_and_others_are_not(self) -> None:
        harness = Harness()
        harness.send(generate("a", n=2), b"gone")
        harness.send(generate("b"), b"here")
        gone = [request.id for request in harness.generates()[:2]]
        harness.lose(b"gone")
        assert sorted(harness.aborts()) == gone
        for id in gone:
            harness.gateway.engine_event(ended(id, [], reason=FinishReason.ABORT))
        assert harness.front_end.delivered == []
        assert harness.gateway.in_flight == 1

    def test_later_requests_wait_for_the_next_engine(self) -> None:
        harness = Harness()
        harness.gateway.engine_lost("it was ended by SIGKILL")
        harness.send(generate("after", timeout=5.0))
        assert harness.generates() == []
        harness.clock.advance(2.0)
        harness.gateway.engine_ready(CONTEXT)
        assert harness.generates()[0].schedule.timeout == pytest.approx(3.0)

    def test_an_engine_that_is_given_up_fails_held_and_later_requests_with_the_cause(self) -> None:
        harness = Harness(ready=False)
        harness.send(generate("held"))
        harness.gateway.engine_given_up("no such file")
        harness.send(generate("later"))
        harness.send(Control("flush", "flush_cache"))
        failures = [message for message in harness.answers() if isinstance(message, Failure)]
        assert [failure.id for failure in failures] == ["held", "later", "flush"]
        assert all("no such file" in failure.message for failure in failures)

    def test_a_request_held_past_its_deadline_says_what_it_waited_for(self) -> None:
        harness = Harness(ready=False)
        harness.send(generate("a", timeout=2.0))
        harness.clock.advance(1.9)
        harness.gateway.tick()
        assert harness.answers() == []
        harness.clock.advance(0.1)
        harness.gateway.tick()
        (failure,) = harness.answers()
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.message) == (
            "DeadlineError",
            "the deadline passed waiting for the engine to start",
        )

    def test_a_silent_engine_gets_a_grace_and_then_the_request_ends(self) -> None:
        harness = Harness()
        harness.send(generate("a", timeout=2.0))
        harness.send(generate("b"))  # the limit's own deadline
        harness.clock.advance(2.5)
        harness.gateway.tick()
        assert harness.answers() == []
        harness.clock.advance(1.0)
        harness.gateway.tick()
        assert kinds(harness) == ["DeadlineError"]
        assert harness.aborts() == [harness.generates()[0].id]
        harness.clock.advance(600.0)
        harness.gateway.tick()
        assert kinds(harness) == ["DeadlineError", "DeadlineError"]

    def test_a_held_request_that_is_aborted_ends_at_once(self) -> None:
        harness = Harness(ready=False)
        harness.send(generate("a"))
        harness.send(Abort("a"))
        assert kinds(harness) == ["CancelledError"]

    def test_a_prompt_too_long_for_the_engine_that_comes_is_refused_then(self) -> None:
        harness = Harness(ready=False)
        harness.send(generate("a", text="x" * CONTEXT))
        assert harness.answers() == []
        harness.gateway.engine_ready(CONTEXT)
        assert kinds(harness) == ["ContextLengthError"]
        assert harness.to_engine == []

    def test_an_error_of_an_unknown_kind_is_an_engine_error(self) -> None:
        harness = Harness()
        harness.send(generate("a"))
        harness.gateway.engine_event(EngineFailed(harness.generates()[0].id, "OracleError", "wrong key"))
        (failure,) = harness.answers()
        assert isinstance(failure, Failure)
        assert isinstance(failure.error(), EngineError)

    @pytest.mark.parametrize("point", ["gateway.tokenize", "gateway.send"])
    def test_a_failure_inside_ends_its_own_request_only(self, point: str) -> None:
        harness = Harness(faults=FailAt(point, 2, RuntimeError("0x7fff secret prompt")))
        for label in "abc":
            harness.send(generate(label))
        failures = [message for message in harness.answers() if isinstance(message, Failure)]
        assert [failure.id for failure in failures] == ["b"]
        assert "secret" not in failures[0].message
        assert harness.gateway.in_flight == 2


def lose_engine(harness: Harness) -> None:
    harness.gateway.engine_lost("it was ended by SIGKILL")
    harness.to_engine.clear()
    harness.gateway.engine_ready(CONTEXT)


def lose_frame(harness: Harness) -> None:
    harness.to_engine.clear()
    harness.gateway.events_lost(1)


@pytest.mark.parametrize("lose", [lose_engine, lose_frame])
class TestAskingAgain:
    """What an engine had is lost, with the engine or with a frame of its. What was not given away is asked again."""

    def test_a_text_that_no_client_has_seen_is_asked_again_as_it_was_asked_first(
        self, lose: Callable[[Harness], None]
    ) -> None:
        harness = Harness()
        harness.send(generate(timeout=9.0, temperature=0.7))  # its seed was drawn
        (first,) = harness.generates()
        harness.gateway.engine_event(Tokens(first.id, list(b"lost")))
        harness.clock.advance(2.0)
        lose(harness)
        (second,) = harness.generates()
        assert second.id != first.id
        assert (second.token_ids, second.sampling) == (first.token_ids, first.sampling)
        assert second.schedule.timeout == pytest.approx(7.0)
        harness.gateway.engine_event(ended(first.id, list(b"late")))
        harness.gateway.engine_event(ended(second.id, list(b"you")))
        (final,) = harness.answers()
        assert isinstance(final, Final)
        assert final.completions[0].text == "you"
        assert harness.gateway.counters["retried_requests"] == 1
        assert harness.gateway.counters["late_events"] == 1

    def test_a_second_loss_ends_it_with_an_error_that_names_both(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(generate())
        lose(harness)
        assert harness.answers() == []
        harness.gateway.engine_lost("it was ended by SIGSEGV")
        (failure,) = harness.answers()
        assert isinstance(failure, Failure)
        assert failure.kind == "EngineError"
        assert "asked again" in failure.message
        assert "SIGSEGV" in failure.message
        harness.to_engine.clear()
        harness.gateway.engine_ready(CONTEXT)
        assert harness.to_engine == []
        assert harness.gateway.in_flight == 0

    def test_a_stream_is_asked_again_until_its_first_text(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(generate("silent", stream=True))
        harness.send(generate("begun", stream=True))
        harness.gateway.engine_event(Tokens(harness.generates()[1].id, list(b"a")))
        lose(harness)
        chunk, failure = harness.answers()
        assert isinstance(chunk, Chunk)
        assert isinstance(failure, Failure)
        assert (failure.id, failure.kind) == ("begun", "EngineError")
        assert "was delivered before" in failure.message
        (again,) = harness.generates()
        harness.gateway.engine_event(ended(again.id, list(b"b")))
        assert isinstance(harness.answers()[-1], Final)

    @pytest.mark.parametrize("stream", [False, True])
    def test_continuations_that_have_ended_are_kept(self, stream: bool, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(generate(n=3, seed=5, stream=stream))
        first = harness.generates()
        harness.gateway.engine_event(ended(first[1].id, list(b"kept")))
        harness.gateway.engine_event(Tokens(first[2].id, []))
        lose(harness)
        again = harness.generates()
        assert [request.sampling.seed for request in again] == [5, 7]
        for request in again:
            harness.gateway.engine_event(ended(request.id, list(b"new")))
        final = harness.answers()[-1]
        assert isinstance(final, Final)
        assert [completion.text for completion in final.completions] == ["new", "kept", "new"]
        assert harness.gateway.in_flight == 0

    def test_scores_are_asked_again_as_far_as_they_are_open(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text("x"),), ("a", "bc"), unconditional=True))
        first = harness.scores()
        harness.gateway.engine_event(ScoreEnded(first[1].id, [[-4.0], [-5.0, -6.0]], 5, 1))
        lose(harness)
        (again,) = harness.scores()
        assert again.sequences == first[0].sequences
        harness.gateway.engine_event(ScoreEnded(again.id, [[-1.0], [-2.0, -3.0]], 7, 2))
        (scored,) = harness.answers()
        assert isinstance(scored, Scored)
        assert [choice.logprobs for choice in scored.choices] == [(-1.0,), (-2.0, -3.0)]
        assert [choice.unconditional for choice in scored.choices] == [(-4.0,), (-5.0, -6.0)]

    def test_a_search_among_choices_is_asked_again(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(ScoreRequest("s", (Text("x"),), ("a", "bc"), probability="exact"))
        lose(harness)
        (again,) = (message for message in harness.to_engine if isinstance(message, EngineChoose))
        harness.gateway.engine_event(ChooseEnded(again.id, [-1.0, -2.0], [-1.0, -2.0], [[-1.0], [-2.0, 0.0]], 3, 7, 2))
        (scored,) = harness.answers()
        assert isinstance(scored, Scored)
        assert scored.evaluations == 3

    def test_a_constraint_is_sent_again_without_being_compiled_again(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(generate(constraint=ConstraintSpec("regex", "a|b")))
        first = harness.generates()[-1]
        assert first.constraint is not None
        lose(harness)
        assert harness.generates()[-1].constraint == first.constraint

    def test_flushing_is_asked_again_and_facts_are_told_without_an_engine(
        self, lose: Callable[[Harness], None]
    ) -> None:
        harness = Harness()
        harness.send(Control("flush", "flush_cache"))
        harness.send(Control("info", "info"))
        lose(harness)
        (again,) = (message for message in harness.to_engine if isinstance(message, EngineControl))
        assert again.verb == "flush_cache"
        (done,) = harness.answers()
        assert isinstance(done, Done)
        assert (done.id, done.result["model"]) == ("info", "toy")

    def test_a_hint_is_not_asked_again(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(Hint("h", (Text("abc"),)))
        lose(harness)
        assert harness.to_engine == []

    def test_what_was_cancelled_is_not_asked_again(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(generate())
        harness.send(Abort("a"))
        lose(harness)
        assert kinds(harness) == ["CancelledError"]
        assert harness.generates() == []

    def test_a_peer_that_is_gone_is_asked_nothing_again(self, lose: Callable[[Harness], None]) -> None:
        harness = Harness()
        harness.send(generate())
        harness.lose()
        lose(harness)
        assert (harness.generates(), harness.answers()) == ([], [])


class TestHintsAndControls:
    def test_a_hint_is_sent_and_never_answered(self) -> None:
        harness = Harness()
        harness.send(Hint("h", (Text("abc"),), Origin(salt="s")))
        (prefill,) = harness.to_engine
        assert isinstance(prefill, EnginePrefill)
        assert (prefill.token_ids, prefill.schedule.salt) == ([BOS, *b"abc"], "s")
        assert harness.answers() == []

    @pytest.mark.parametrize("text", ["x" * 200, "y"])
    def test_a_hint_that_cannot_be_used_is_counted_and_answered_by_nothing(self, text: str) -> None:
        harness = Harness(ready=text != "y")
        harness.send(Hint("h", (Text(text),)))
        assert (harness.to_engine, harness.front_end.delivered) == ([], [])
        assert harness.gateway.counters["hints_unused"] == 1

    def test_info_joins_what_gateway_and_engine_know(self) -> None:
        harness = Harness()
        harness.gateway.engine_event(Heartbeat(3, 1, 2, {"steps": 3.0}))
        harness.send(Control("i", "info"))
        (question,) = harness.to_engine
        assert isinstance(question, EngineControl)
        harness.gateway.engine_event(ControlEnded(question.id, {"steps": 4.0}))
        (done,) = harness.answers()
        assert isinstance(done, Done)
        assert (done.result["model"], done.result["steps"], done.result["waiting"]) == ("toy", 4.0, 2)

    def test_the_status_is_read_at_once_however_much_is_in_flight(self) -> None:
        harness = Harness(limits=GatewayLimits(max_queue=2))
        harness.send(generate("a"))
        harness.send(Control("i", "info"))
        harness.gateway.engine_event(Heartbeat(3, 1, 2, {"steps": 3.0}, PoolGauges(9, 5, 3, 2, 1)))
        harness.clock.advance(0.25)
        asked = len(harness.to_engine)
        status = status_of(harness)
        assert len(harness.to_engine) == asked
        assert (status.model, status.engine, status.heartbeat_age) == ("toy", "ready", 0.25)
        assert (status.in_flight, status.max_queue, status.running, status.waiting) == (2, 2, 1, 2)
        assert status.pool == PoolGauges(9, 5, 3, 2, 1)
        assert (status.counters["steps"], status.counters["gateway_requests"]) == (3.0, 2)

    def test_counters_in_the_status_add_up_over_engines(self) -> None:
        harness = Harness()
        harness.gateway.engine_event(Heartbeat(3, 1, 0, {"steps": 3.0}, PoolGauges(9, 5)))
        first = status_of(harness)
        harness.gateway.engine_lost("it was killed")
        between = status_of(harness)
        assert (between.engine, between.heartbeat_age, between.running) == ("starting", None, 0)
        assert between.pool == PoolGauges()
        assert between.counters["steps"] == 3.0
        harness.gateway.engine_ready(CONTEXT)
        harness.gateway.engine_event(Heartbeat(1, 0, 0, {"steps": 1.0}))
        second = status_of(harness)
        assert second.counters["steps"] == 4.0
        assert [status.generation for status in (first, between, second)] == [1, 1, 2]
        assert [status.engine_losses for status in (first, between, second)] == [0, 1, 1]
        assert first.gateway == second.gateway != status_of(Harness()).gateway

    def test_the_status_says_why_there_will_be_no_engine(self) -> None:
        harness = Harness(ready=False)
        harness.gateway.engine_given_up("no such file")
        status = status_of(harness)
        assert (status.engine, status.engine_cause, status.generation) == ("failed", "no such file", 0)

    def test_info_is_answered_while_there_is_no_engine(self) -> None:
        harness = Harness(ready=False)
        harness.send(Control("i", "info"))
        (done,) = harness.answers()
        assert isinstance(done, Done)
        assert done.result["engine"] == "starting"


def test_the_times_of_a_call_are_those_of_its_continuations_together() -> None:
    harness = Harness()
    harness.send(generate("a", n=3))
    told = (RequestTimes(2.0, 3.0, 9.0), RequestTimes(1.0, 4.0, 5.0), RequestTimes(5.0))
    for message, times in zip(harness.generates(), told, strict=True):
        harness.gateway.engine_event(msgspec.structs.replace(ended(message.id, [97]), times=times))
    final = harness.answers()[-1]
    assert isinstance(final, Final)
    assert final.times == RequestTimes(1.0, 3.0, 9.0)


NODE = TreeNode(3, None, 4, 1, 0, 0, 2, 0)


@pytest.mark.parametrize(("text", "says"), [(0, ""), (2, "Aé")])
def test_a_survey_has_the_texts_that_were_asked_for(text: int, says: str) -> None:
    harness = Harness()
    harness.send(Survey("s", 10, text))
    (question,) = harness.to_engine
    assert isinstance(question, EngineSurvey)
    assert (question.most, question.shown) == (10, text)
    survey = TreeSurvey((NODE,), 1, PoolGauges(9))
    shown = [[0x41, PICTURE_BASE + 7, 0xC3, 0xA9, 0x42]] if text else []
    harness.gateway.engine_event(EngineSurveyed(question.id, survey, shown))
    assert harness.answers() == [
        Surveyed("s", msgspec.structs.replace(survey, nodes=(msgspec.structs.replace(NODE, text=says),)))
    ]


@pytest.mark.parametrize(
    ("survey", "says"),
    [
        (Survey("s", 0), "survey\\(most=0\\) is out of range; write 1 to 5000"),
        (Survey("s", 5_001), "write 1 to 5000"),
        (Survey("s", 1, 201), "survey\\(text=201\\) is out of range; write 0 to 200"),
    ],
)
def test_a_survey_out_of_range_is_refused(survey: Survey, says: str) -> None:
    harness = Harness()
    harness.send(survey)
    (failure,) = harness.answers()
    assert isinstance(failure, Failure)
    with pytest.raises(ParameterError, match=says):
        raise failure.error()


def test_a_survey_is_asked_of_the_next_engine() -> None:
    harness = Harness()
    harness.send(Survey("s", 10))
    harness.gateway.engine_lost("it was killed")
    harness.gateway.engine_ready(CONTEXT)
    assert [type(message) for message in harness.to_engine] == [EngineSurvey] * 2


def status_of(harness: Harness) -> RuntimeStatus:
    harness.send(ReadStatus("status"))
    read = harness.answers()[-1]
    assert isinstance(read, StatusRead)
    assert read.id == "status"
    return read.status


def test_every_limit_is_what_the_reliability_note_says() -> None:
    limits = GatewayLimits()
    assert (limits.request_timeout, limits.max_queue) == (600.0, 1024)
    assert (limits.max_salt_length, limits.max_choices, limits.max_choice_length) == (128, 1024, 16_384)
    assert (limits.max_prompt_parts, limits.max_label_length, limits.max_priority) == (100_000, 256, 1_000_000)
    assert (limits.deadline_grace, limits.client_silence, limits.max_clients) == (1.0, 60.0, 1024)
    assert (limits.max_pins, limits.longest_pin) == (1024, 86_400.0)
    assert (limits.max_caches, limits.max_salt_caches, limits.max_cache_records) == (4096, 512, 64 << 20)
    assert (limits.max_programs, limits.program_timeout, limits.program_share) == (256, 86_400.0, 0.5)
    assert (limits.max_argument_bytes, limits.max_graph_bytes, limits.long_graph) == (256 << 20, 8 << 20, 8_192)
    assert (limits.kept_graphs, limits.kept_graph_bytes) == (128, 32 << 20)
    assert SamplingParams(n=128).n == 128
    assert (CACHE_BYTES, CompilerLimits().kept_bytes, PictureLimits().cache_bytes) == (64 << 20,) * 3
    assert (PictureLimits().cache_sources, PictureLimits().cache_numbers) == (4_096, 65_536)
    assert (MOST_STOPS, MOST_STOP_CHARACTERS) == (256, 16_384)
