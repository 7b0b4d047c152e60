"""The engine's step on the oracle model: what is reused, what is answered, and how everything ends."""

import numpy as np
import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.protocol import FinishReason
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.messages import ControlEnded, Ended, EngineAbort, EngineControl, EngineFailed, ScoreEnded
from umbel.srt.scheduler.scheduler import PolicyName

from ..engine_harness import EOS, VOCABULARY, Engine, letters

PREFIX = list(range(1, 18))  # 17 tokens
OTHERS = PREFIX[::-1]


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **fields})  # type: ignore[arg-type]


class TestReuse:
    def test_second_identical_request_finds_all_but_the_last_token(self) -> None:
        engine = Engine()
        first = engine.generate(PREFIX)
        engine.run()
        second = engine.generate(PREFIX)
        engine.run()
        assert (engine.cached(first), engine.cached(second)) == (0, len(PREFIX) - 1)
        assert engine.tokens(first) == engine.tokens(second) == engine.reference(PREFIX).token_ids

    def test_prefix_of_17_tokens_is_reused_to_the_token(self) -> None:
        engine = Engine()
        engine.generate([*PREFIX, 20, 21])
        engine.run()
        other = engine.generate([*PREFIX, 19, 18])
        engine.run()
        assert engine.cached(other) == 17

    def test_generated_tokens_are_reused_by_the_next_turn(self) -> None:
        engine = Engine()
        first = engine.generate(PREFIX, greedy(6))
        engine.run()
        second = engine.generate([*PREFIX, *engine.tokens(first), 5])
        engine.run()
        assert engine.cached(second) == len(PREFIX) + 5, "the key of the last sampled token was never computed"

    def test_fork_computes_every_unique_token_once_without_waiting_a_step(self) -> None:
        engine = Engine()
        prompts = [[*PREFIX, branch, branch + 1] for branch in range(1, 9)]
        ids = [engine.generate(prompt, greedy(0)) for prompt in prompts]
        engine.step()
        assert len(engine.endings) == 8
        assert engine.count("computed_prompt_tokens") == engine.scheduler.kv.cache.total_tokens == 17 + 8 * 2
        assert engine.count("in_step_tokens") == 7 * 17
        assert engine.count("duplicate_rows") == 0
        assert sorted(engine.cached(i) for i in ids) == [0] + [17] * 7

    def test_identical_requests_of_one_step_share_all_but_the_row_they_sample_from(self) -> None:
        engine = Engine()
        ids = [engine.generate(PREFIX) for _ in range(4)]
        engine.step()
        assert list(engine.runner.batches) == [17 + 3]
        engine.run()
        assert [engine.cached(i) for i in ids] == [0, 16, 16, 16]
        assert engine.count("duplicate_rows") == 3

    def test_a_long_shared_prompt_is_computed_by_turns(self) -> None:
        engine = Engine(max_step_tokens=8)
        shared = [1 + i % 20 for i in range(40)]
        ids = [engine.generate([*shared, branch]) for branch in (1, 2, 3)]
        engine.run()
        assert engine.count("computed_prompt_tokens") == 40 + 3
        for message_id, branch in zip(ids, (1, 2, 3), strict=True):
            engine.assert_equals_reference(message_id, [*shared, branch])

    def test_without_sharing_in_the_step_the_same_tokens_cost_more(self) -> None:
        counts, answers = [], []
        for sharing in (True, False):
            engine = Engine(in_step_sharing=sharing)
            ids = [engine.generate([*PREFIX, branch]) for branch in range(1, 9)]
            engine.run()
            answers.append([engine.tokens(i) for i in ids])
            counts.append(engine.count("computed_prompt_tokens"))
            assert engine.scheduler.kv.cache.total_tokens <= 17 + 8 * 4, "duplicates are freed when they are inserted"
        assert answers[0] == answers[1]
        assert counts == [17 + 8, 8 * 18]

    def test_without_the_cache_nothing_is_reused_or_kept(self) -> None:
        engine = Engine(radix_cache=False)
        ids = []
        for _ in range(2):
            ids.append(engine.generate(PREFIX))
            engine.run()
        assert [engine.cached(i) for i in ids] == [0, 0]
        assert engine.scheduler.kv.pool.free == engine.scheduler.kv.pool.total

    def test_salts_never_share_and_the_same_salt_does(self) -> None:
        engine = Engine()
        ids = []
        for salt in ("", "a", "b", "a"):
            ids.append(engine.generate(PREFIX, salt=salt))
            engine.run()
        assert [engine.cached(i) for i in ids] == [0, 0, 0, 16]

    def test_flush_forgets_everything_that_nobody_uses(self) -> None:
        engine = Engine()
        engine.generate(PREFIX)
        engine.run()
        engine.scheduler.handle_message(EngineControl(900, "flush_cache"))
        engine.run()
        again = engine.generate(PREFIX)
        engine.run()
        assert engine.endings[900] == ControlEnded(900, {"evicted": 17 + 3, "kept": 0})
        assert engine.cached(again) == 0

    def test_a_hint_is_computed_and_never_answered(self) -> None:
        engine = Engine()
        hint = engine.hint(PREFIX)
        engine.run()
        real = engine.generate([*PREFIX, 3])
        engine.run()
        assert engine.count("computed_prompt_tokens") == 18, "the hint computes 17 of them"
        assert engine.cached(real) == 0
        assert hint not in engine.endings

    @pytest.mark.parametrize("steps", range(8))
    @pytest.mark.parametrize("head", [0, 5])
    def test_what_a_hint_computed_counts_as_computed_by_the_first_request_that_finds_it(
        self, head: int, steps: int
    ) -> None:
        engine = Engine(max_step_tokens=4)
        if head:
            engine.generate(PREFIX[:head], greedy(1))
            engine.run()
        engine.hint(PREFIX)
        for _ in range(steps):
            engine.step()
        call, other = engine.generate(PREFIX), engine.generate(PREFIX)
        engine.run()
        assert engine.cached(call) == head
        assert engine.cached(other) == len(PREFIX) - 1
        engine.assert_equals_reference(call, PREFIX)

    def test_calls_have_computed_what_the_engine_has_whatever_was_hinted(self) -> None:
        engine = Engine()
        for end in (7, 12, len(PREFIX)):  # each goes on where the one before it ends
            engine.hint(PREFIX[:end])
            engine.run()
        short, long = engine.generate(PREFIX[:10]), engine.generate(PREFIX)
        engine.run()
        computed = len(PREFIX[:10]) + len(PREFIX) - engine.cached(short) - engine.cached(long)
        assert computed == len(PREFIX) + 1, "all of it once, and the last token of the short prompt again"

    def test_slots_that_a_hint_had_are_new_for_who_gets_them_next(self) -> None:
        engine = Engine(pool=len(PREFIX) + 10)
        engine.hint(PREFIX)
        engine.run()
        engine.generate(OTHERS)  # evicts it
        engine.run()
        again = engine.generate(OTHERS)
        engine.run()
        assert engine.cached(again) == len(PREFIX) - 1

    def test_a_hint_that_does_not_fit_is_dropped_and_blocks_nobody(self) -> None:
        engine = Engine(pool=30)
        long = engine.generate(PREFIX, greedy(12))
        engine.step()
        engine.hint(range(22, 2, -1))
        engine.hint([])  # empty
        small = engine.generate([2, 3])
        engine.run()
        assert engine.count("dropped_hints") == 2
        assert set(engine.endings) == {long, small}


class TestScore:
    def test_log_probabilities_are_those_of_a_run_without_cache(self) -> None:
        engine = Engine()
        sequences = [[*PREFIX, 1, 2], [*PREFIX, 1, 3, 4], [*PREFIX, 9]]
        score = engine.score(sequences, 17)
        engine.run()
        ending = engine.endings[score]
        assert isinstance(ending, ScoreEnded)
        for mine, sequence in zip(ending.logprobs, sequences, strict=True):
            assert mine == pytest.approx(engine.reference_score(sequence, 17), abs=1e-4)

    def test_all_choices_run_in_one_forward_and_share_their_prompt(self) -> None:
        engine = Engine()
        engine.score([[*PREFIX, choice, choice] for choice in range(1, 6)], 17)
        engine.run()
        assert engine.count("steps") == 1
        assert engine.count("computed_prompt_tokens") - engine.count("duplicate_rows") == 17 + 5 * 2

    def test_a_scored_choice_is_reused_when_it_is_taken(self) -> None:
        engine = Engine()
        engine.score([[*PREFIX, 1, 2], [*PREFIX, 3, 4]], 17)
        engine.run()
        taken = engine.generate([*PREFIX, 3, 4, 5])
        engine.run()
        assert engine.cached(taken) == 19

    def test_a_sequence_without_tokens_to_score_gives_an_empty_list(self) -> None:
        engine = Engine()
        score = engine.score([PREFIX, [*PREFIX, 2]], 17)
        engine.run()
        ending = engine.endings[score]
        assert isinstance(ending, ScoreEnded)
        assert list(map(len, ending.logprobs)) == [0, 1]

    def test_prompt_log_probabilities_come_from_the_right_rows_also_when_the_prompt_is_cached(self) -> None:
        engine = Engine(max_step_tokens=5)
        sampling = greedy(2, prompt_logprobs_from=9, logprobs=True, top_logprobs=2)
        for _ in range(2):
            message_id = engine.generate(PREFIX, sampling)
            engine.run()
        ending = engine.endings[message_id]
        assert isinstance(ending, Ended)
        assert ending.cached_tokens == 8
        assert [entry.token_id for entry in ending.prompt_logprobs] == PREFIX[9:]
        mine = [entry.logprob for entry in ending.prompt_logprobs]
        assert mine == pytest.approx(engine.reference_score(PREFIX, 9), abs=1e-4)
        assert [len(entry.top) for entry in ending.prompt_logprobs] == [2] * 8
        generated = engine.tokens(message_id)
        mine = [entry.logprob for entry in ending.logprobs]
        assert mine == pytest.approx(engine.reference_score(PREFIX + generated, 17), abs=1e-4)
        assert all(entry.top[0][0] == entry.token_id for entry in ending.logprobs), "greedy takes the most likely"

    def test_rows_with_logits_are_bounded(self) -> None:
        engine = Engine(max_step_tokens=None, max_running=4, max_step_logits=4)
        message_id = engine.generate(PREFIX, greedy(1, prompt_logprobs_from=0))
        engine.run()
        ending = engine.endings[message_id]
        assert isinstance(ending, Ended)
        assert len(ending.prompt_logprobs) == 16
        assert engine.count("steps") == 5  # 17 rows with logits, 4 in a step


class TestEndings:
    def test_end_of_sequence_ends_the_text_and_is_its_last_token(self) -> None:
        engine = Engine()
        prompt = next(
            [a, b]
            for a in range(1, 24)
            for b in range(1, 24)
            if int(engine.runner.model.reference([a, b]).argmax()) in EOS
        )
        message_id = engine.generate(prompt, greedy(5, ignore_eos=False))
        ignoring = engine.generate(prompt, greedy(5))
        waiting = engine.generate(prompt, greedy(5, ignore_eos=False, min_tokens=1))
        engine.run()
        ending = engine.endings[message_id]
        assert isinstance(ending, Ended)
        assert (ending.token_ids, ending.finish_reason, ending.matched_stop, ending.text_bytes) == (
            [0],
            FinishReason.STOP,
            0,
            0,
        )
        assert engine.tokens(ignoring)[0] == 0
        assert len(engine.tokens(ignoring)) == 5
        assert engine.tokens(waiting)[0] != 0
        engine.assert_equals_reference(waiting, prompt, greedy(5, ignore_eos=False, min_tokens=1))

    def test_an_end_of_sequence_id_that_the_model_lacks_harms_nobody(self) -> None:
        """Tokenizers name control tokens for which a small model has no row."""
        engine = Engine(eos_ids=frozenset({0, VOCABULARY + 7}))
        message_id = engine.generate(PREFIX, greedy(4, ignore_eos=False, min_tokens=4))
        engine.run()
        assert len(engine.tokens(message_id)) == 4

    def test_a_stop_token_ends_the_text_after_min_tokens(self) -> None:
        engine = Engine()
        free = engine.reference(PREFIX, greedy(8)).token_ids
        stopped = engine.generate(PREFIX, greedy(8, stop_token_ids=(free[2],)))
        later = greedy(8, stop_token_ids=(free[2],), min_tokens=5)
        delayed = engine.generate(PREFIX, later)
        engine.run()
        assert engine.tokens(stopped) == free[: free.index(free[2]) + 1]
        assert free[2] not in engine.tokens(delayed)[:5]
        engine.assert_equals_reference(delayed, PREFIX, later)

    def test_a_stop_string_is_found_across_tokens_and_is_not_part_of_the_text(self) -> None:
        engine = Engine()
        text = b"".join(map(letters, engine.reference(PREFIX, greedy(12)).token_ids)).decode()
        stop = text[3:8]
        message_id = engine.generate(PREFIX, greedy(12, stop=(stop,)))
        engine.run()
        ending = engine.endings[message_id]
        assert isinstance(ending, Ended)
        assert (ending.finish_reason, ending.matched_stop) == (FinishReason.STOP, stop)
        assert ending.text_bytes == text.find(stop)
        engine.assert_equals_reference(message_id, PREFIX, greedy(12, stop=(stop,)))

    def test_max_tokens_0_computes_the_prompt_and_generates_nothing(self) -> None:
        engine = Engine()
        ids = []
        for _ in range(2):
            ids.append(engine.generate(PREFIX, greedy(0)))
            engine.run()
        assert [engine.tokens(i) for i in ids] == [[], []]
        assert [engine.cached(i) for i in ids] == [0, 17]

    def test_the_end_of_the_context_ends_with_length(self) -> None:
        engine = Engine(context=20)
        message_id = engine.generate(PREFIX, greedy(50))
        engine.run()
        ending = engine.endings[message_id]
        assert isinstance(ending, Ended)
        assert (ending.finish_reason, ending.completion_tokens) == (FinishReason.LENGTH, 3)

    @pytest.mark.parametrize(
        ("context", "pool", "named"), [(17, 90, "the context of 17"), (90, 17, "the KV pool of 17")]
    )
    def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(
        self, context: int, pool: int, named: str
    ) -> None:
        engine = Engine(context=context, pool=pool)
        too_long, fits = engine.generate(PREFIX), engine.generate(PREFIX[:16])
        engine.run()
        ending = engine.endings[too_long]
        assert isinstance(ending, EngineFailed)
        assert ending.kind == "ContextLengthError"
        assert "17 tokens" in ending.message
        assert named in ending.message
        assert len(engine.tokens(fits)) == 1

    @pytest.mark.parametrize(
        ("sampling", "named"),
        [
            (greedy(2, stop_token_ids=(VOCABULARY,)), f"stop_token_ids: token id {VOCABULARY}"),
            (greedy(2, logit_bias={VOCABULARY + 5: 1.0}), f"logit_bias: token id {VOCABULARY + 5}"),
            (
                greedy(2, prompt_logprobs_from=18),
                "logprob_start_len (prompt_logprobs_from=18) is past the prompt of 17 tokens; write 0 to 17",
            ),
        ],
    )
    def test_what_cannot_be_served_is_refused_by_name(self, sampling: SamplingParams, named: str) -> None:
        engine = Engine()
        message_id = engine.generate(PREFIX, sampling)
        engine.run()
        ending = engine.endings[message_id]
        assert isinstance(ending, EngineFailed)
        assert named in ending.message

    @pytest.mark.parametrize("tokens", [[-1], [1, VOCABULARY]])
    def test_tokens_outside_the_vocabulary_never_reach_the_model(self, tokens: list[int]) -> None:
        engine = Engine()
        ids = [engine.generate(tokens), engine.score([tokens], 1)]
        engine.run()
        failures = [ending for ending in (engine.endings[i] for i in ids) if isinstance(ending, EngineFailed)]
        assert ["outside the vocabulary" in failure.message for failure in failures] == [True] * 2
        assert not engine.runner.batches

    @pytest.mark.parametrize(
        ("sequences", "start"), [([], 1), ([[]], 1), ([[1]], 0), ([[1]], 2), ([[1, 2, 3], [1, 4, 3]], 2)]
    )
    def test_a_score_that_no_gateway_sends_fails_alone(self, sequences: list[list[int]], start: int) -> None:
        engine = Engine()
        score, text = engine.score(sequences, start), engine.generate(PREFIX)
        engine.run()
        ending = engine.endings[score]
        assert isinstance(ending, EngineFailed)
        assert ending.kind == "EngineError"
        assert engine.tokens(text)

    def test_an_id_in_use_is_refused_to_the_caller(self) -> None:
        engine = Engine()
        first = engine.generate(PREFIX)
        engine._next_id = first - 1
        with pytest.raises(ParameterError, match=f"request id {first} is in use"):
            engine.generate(PREFIX)

    def test_an_unknown_verb_is_refused(self) -> None:
        engine = Engine()
        engine.scheduler.handle_message(EngineControl(5, "explode"))
        engine.scheduler.handle_message(EngineControl(6, "info"))
        engine.run()
        failed, info = engine.endings[5], engine.endings[6]
        assert isinstance(failed, EngineFailed)
        assert "explode" in failed.message
        assert isinstance(info, ControlEnded)
        assert info.result["total_slots"] == 200

    def test_streamed_tokens_come_in_order_and_the_ending_has_the_rest(self) -> None:
        engine = Engine()
        streaming, plain = engine.generate(PREFIX, greedy(6), stream=True), engine.generate(PREFIX, greedy(6))
        engine.run()
        assert len(engine.streamed[streaming]) == 5
        assert plain not in engine.streamed
        assert engine.tokens(streaming) == engine.tokens(plain)


class TestBetweenSteps:
    def test_abort_ends_exactly_its_request_waiting_or_running(self) -> None:
        engine = Engine(max_running=1)
        ids = [engine.generate([*PREFIX, 1], greedy(20), stream=True), engine.generate(PREFIX), engine.generate(PREFIX)]
        engine.step()
        engine.step()
        engine.scheduler.handle_message(EngineAbort(ids[0]))
        engine.scheduler.handle_message(EngineAbort(ids[1]))
        engine.scheduler.handle_message(EngineAbort(12345))  # never existed: nothing to say
        engine.run()
        first, second = engine.endings[ids[0]], engine.endings[ids[1]]
        assert isinstance(first, Ended)
        assert isinstance(second, Ended)
        assert (first.finish_reason, second.finish_reason) == (FinishReason.ABORT, FinishReason.ABORT)
        assert engine.tokens(ids[0]) == engine.reference([*PREFIX, 1], greedy(2)).token_ids
        engine.assert_equals_reference(ids[2], PREFIX)

    def test_an_aborted_score_says_so(self) -> None:
        engine = Engine(max_step_tokens=4)
        score = engine.score([[*PREFIX, 1], [*PREFIX, 2]], 17)
        hint = engine.hint(PREFIX[::-1])
        engine.step()
        engine.scheduler.handle_message(EngineAbort(score))
        engine.scheduler.handle_message(EngineAbort(hint))
        engine.run()
        ending = engine.endings[score]
        assert isinstance(ending, EngineFailed)
        assert ending.kind == "CancelledError"
        assert hint not in engine.endings

    def test_a_deadline_counts_from_arrival_by_the_injected_clock(self) -> None:
        engine = Engine(max_running=1)
        slow = engine.generate(PREFIX, greedy(50), timeout=3.0)
        queued = engine.generate(PREFIX, timeout=2.0)
        unhurried = engine.generate(PREFIX)
        for _ in range(10):
            engine.step()
            engine.clock.advance(0.5)
        engine.run()
        assert [type(engine.endings[i]) for i in (slow, queued, unhurried)] == [EngineFailed, EngineFailed, Ended]
        for message_id, after in ((slow, 6), (queued, 4)):
            ending = engine.endings[message_id]
            assert isinstance(ending, EngineFailed)
            assert ending.kind == "DeadlineError"
            assert engine.ended_in[message_id] == after + 1


class TestOrder:
    def test_a_long_prompt_does_not_hold_up_decoding(self) -> None:
        engine = Engine(max_step_tokens=8)
        talking = engine.generate([1, 2], greedy(10))
        engine.step()
        long = engine.generate([1 + i % 20 for i in range(60)], greedy(1))
        engine.run()
        assert engine.ended_in[talking] == 10
        assert engine.ended_in[long] == 10  # 60 rows in chunks of 7 beside one decode row
        assert max(engine.runner.batches) <= 8

    def test_prompts_advance_even_when_decoding_fills_the_step(self) -> None:
        engine = Engine(max_step_tokens=2)
        talking = [engine.generate([i], greedy(20)) for i in (1, 2, 3)]
        for _ in range(4):
            engine.step()
        late = engine.generate([7, 8, 9], greedy(1))
        engine.run()
        assert engine.ended_in[late] < min(engine.ended_in[i] for i in talking)

    def test_longest_prefix_goes_first(self) -> None:
        engine = Engine(max_running=1)
        engine.generate(PREFIX)
        engine.run()
        cold, warm, warmest = (
            engine.generate([20, 21]),
            engine.generate([*PREFIX[:5], 20]),
            engine.generate([*PREFIX[:9], 20]),
        )
        engine.run()
        assert sorted((cold, warm, warmest), key=engine.ended_in.__getitem__) == [warmest, warm, cold]

    def test_first_come_first_served_when_asked_for(self) -> None:
        engine = Engine(max_running=1, policy=PolicyName.FCFS)
        engine.generate(PREFIX)
        engine.run()
        cold, warm = engine.generate([20, 21]), engine.generate([*PREFIX, 20])
        engine.run()
        assert engine.ended_in[cold] < engine.ended_in[warm]

    def test_higher_priority_goes_before_a_longer_prefix(self) -> None:
        engine = Engine(max_running=1)
        engine.generate(PREFIX)
        engine.run()
        warm, urgent = engine.generate([*PREFIX, 20]), engine.generate([20, 21], priority=1)
        engine.run()
        assert engine.ended_in[urgent] < engine.ended_in[warm]

    @pytest.mark.parametrize(("bound", "starves"), [(5.0, False), (1e9, True)])
    def test_endless_hot_traffic_holds_a_cold_request_up_only_to_the_bound(self, bound: float, starves: bool) -> None:
        engine = Engine(max_running=2, max_wait=bound)
        engine.generate(PREFIX)
        engine.run()
        cold = engine.generate([20, 21])
        for turn in range(60):
            while engine.scheduler.waiting < 4:
                engine.generate([*PREFIX, 1 + turn % 20], greedy(2))
            engine.step()
            engine.clock.advance(0.5)
        assert (cold not in engine.endings) == starves, "the inverse shows that the bound is what helps"
        if not starves:
            assert engine.ended_in[cold] <= 5.0 / 0.5 + 8


class TestMemory:
    def test_a_pool_that_is_too_small_retracts_and_loses_nothing(self) -> None:
        prompts = [[*PREFIX[:8], branch, branch] for branch in range(1, 7)]
        sampling = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)
        engine = Engine(pool=60, headroom=0)
        ids = [engine.generate(prompt, sampling) for prompt in prompts]
        engine.run()
        assert engine.count("retractions") > 0
        for message_id, prompt in zip(ids, prompts, strict=True):
            engine.assert_equals_reference(message_id, prompt, sampling)
            assert engine.cached(message_id) <= len(prompt)

    def test_a_pool_of_a_quarter_of_the_need_changes_no_token(self) -> None:
        """Reliability note G4 at a fifth of its size."""
        numbers = np.random.default_rng(1)
        engine = Engine(pool=160, headroom=0, max_running=32, check_every_step=False)
        wishes = []
        for i in range(100):
            prompt = [1 + i % 3, *numbers.integers(1, VOCABULARY, size=numbers.integers(1, 6)).tolist()]
            sampling = SamplingParams(max_tokens=16, seed=i, temperature=0.9, ignore_eos=True)
            wishes.append((engine.generate(prompt, sampling), prompt, sampling))
        engine.run()
        for message_id, prompt, sampling in wishes:
            engine.assert_equals_reference(message_id, prompt, sampling)
        assert engine.count("retractions") >= 40

    def test_the_cache_yields_all_its_room_to_running_requests(self) -> None:
        engine = Engine(pool=40)
        engine.generate(range(1, 22), greedy(0))
        engine.run()
        assert engine.scheduler.kv.cache.total_tokens == 21
        other = engine.generate([23], greedy(39))
        engine.run()
        assert len(engine.tokens(other)) == 39
        assert engine.count("evicted_tokens") == 21
        assert engine.count("retractions") == 0

    def test_the_youngest_of_the_lowest_priority_is_retracted(self) -> None:
        engine = Engine(pool=40, headroom=0)
        first = engine.generate([1, 2], greedy(25), priority=1)
        second = engine.generate([3, 4], greedy(25))
        third = engine.generate([5, 6], greedy(25), priority=1)
        engine.run()
        assert engine.ended_in[first] <= engine.ended_in[third] < engine.ended_in[second]

    @pytest.mark.parametrize("pool", [28, 29, 30, 31])
    def test_a_prompt_without_room_waits_for_the_rows_that_this_step_has_planned(self, pool: int) -> None:
        """The last slot goes to a decode row of lower rank: that row stays, and its request yields in the next step."""
        engine = Engine(pool=pool, headroom=0, max_step_tokens=2)
        talking = engine.generate([1, 2], greedy(20))
        for _ in range(3):
            engine.step()
        urgent = engine.generate(range(3, 23), greedy(2), priority=1)
        engine.run()
        assert engine.count("retractions") == 1
        engine.assert_equals_reference(talking, [1, 2], greedy(20))
        engine.assert_equals_reference(urgent, list(range(3, 23)), greedy(2))

    def test_head_room_prevents_retraction(self) -> None:
        retractions = []
        for headroom in (0, 20):
            engine = Engine(pool=40, headroom=headroom)
            for branch in range(4):
                engine.generate([1 + branch, 2], greedy(15))
            engine.run()
            retractions.append(engine.count("retractions"))
        assert retractions[0] > 0 == retractions[1]

    def test_hit_rate_follows_from_the_counters(self) -> None:
        engine = Engine()
        ids = [engine.generate([*PREFIX[:n], 20]) for n in (3, 9, 17, 9)]
        engine.run()
        endings = [engine.endings[i] for i in ids]
        assert sum(e.cached_tokens for e in endings if isinstance(e, Ended)) == engine.count("cached_tokens")
        assert engine.count("prompt_tokens") == engine.count("cached_tokens") + engine.count("computed_prompt_tokens")

    def test_counters_never_fall(self) -> None:
        engine = Engine(pool=50, headroom=0)
        for branch in range(5):
            engine.generate([*PREFIX[:5], branch + 1], greedy(12))
        before = engine.scheduler.counters
        while not engine.scheduler.idle:
            engine.step()
            now = engine.scheduler.counters
            assert all(now[name] >= before[name] for name in now)
            before = now


def test_paths_cover_what_lies_in_the_tree() -> None:
    engine = Engine()
    seen = []
    forward = engine.runner.forward

    def spy(batch):  # type: ignore[no-untyped-def]
        seen.append(batch)
        return forward(batch)

    engine.runner.forward = spy  # type: ignore[method-assign]
    for branch in (1, 2):
        engine.generate([*PREFIX, branch], greedy(2))
    engine.run()
    first, second = seen[0].paths
    assert first[0] == second[0], "the shared node is one node"
    assert first[0][1:] == (0, 17)
    assert [step[1:] for step in first] == [step[1:] for step in second] == [(0, 17), (17, 1)]
    assert np.array_equal(seen[0].slots[0][:17], seen[0].slots[1][:17])


def test_equal_settings_give_equal_endings_twice() -> None:
    def run() -> list[object]:
        engine = Engine(pool=60, max_step_tokens=7)
        for branch in range(1, 9):
            engine.generate([*PREFIX[:branch], branch], SamplingParams(max_tokens=9, seed=branch))
        engine.run()
        return [engine.endings[i] for i in sorted(engine.endings)] + [engine.scheduler.counters]

    assert run() == run()
