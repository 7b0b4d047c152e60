"""Several engines of one gateway: which gets a call, what moves when one is lost, and what all are asked."""

import msgspec
import pytest
from umbel.lang.caching import CacheMark, Caching
from umbel.lang.prompt import Text
from umbel.lang.protocol import (
    Abort,
    Chunk,
    Control,
    Done,
    Failure,
    Final,
    GenRequest,
    Hint,
    Origin,
    ReadStatus,
    Release,
    Scored,
    ScoreRequest,
    StatusRead,
    Survey,
    Surveyed,
)
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import EngineState, PoolGauges, TreeNode, TreeSurvey
from umbel.srt.core.messages import (
    CacheEvents,
    ControlEnded,
    EngineControl,
    EngineFailed,
    EngineGenerate,
    EnginePrefill,
    EngineRelease,
    EngineScore,
    EngineSnapshot,
    EngineSurvey,
    EngineSurveyed,
    Heartbeat,
    MarksPlaced,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    ScoreEnded,
    TierRooms,
    Tokens,
)
from umbel.srt.gateway.replicas import GATHERING, HINT_SECONDS, LATE
from umbel.srt.placement.meta_tree import packed

from ..gateway_harness import CONTEXT, Harness, ended, generate

PREFIX = "a prefix that is long enough to be worth a trip to it"


def of_group(label: str, group: str, text: str = PREFIX) -> GenRequest:
    return msgspec.structs.replace(generate(label, text), origin=Origin(fork_group=group))


def tokens_of(harness: Harness, text: str) -> list[int]:
    return harness.gateway.encoder.encode((Text(text),))


def generates_at(harness: Harness, replica: int) -> list[EngineGenerate]:
    return [message for message in harness.to[replica] if isinstance(message, EngineGenerate)]


def place_of(harness: Harness, label: str) -> int:
    (call,) = harness.gateway._calls.with_id(harness.front_end.client(), label)
    assert call.replica is not None
    return call.replica


def finals(harness: Harness) -> dict[str, Final]:
    return {message.id: message for message in harness.answers() if isinstance(message, Final)}


def failures(harness: Harness) -> list[Failure]:
    return [message for message in harness.answers() if isinstance(message, Failure)]


class TestPlacing:
    def test_calls_without_a_common_prefix_are_spread(self) -> None:
        harness = Harness(replicas=4)
        for index in range(8):
            harness.send(generate(str(index), chr(ord("a") + index) * 40))
        assert [len(generates_at(harness, replica)) for replica in range(4)] == [2, 2, 2, 2]

    def test_a_call_goes_where_events_say_that_its_prefix_is(self) -> None:
        harness = Harness(replicas=2)
        for replica in (1, 0):
            tokens = tokens_of(harness, PREFIX if replica else "something else")
            harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", packed(tokens))]), replica)
        harness.send(generate("a", PREFIX + "?"))
        assert place_of(harness, "a") == 1
        harness.gateway.engine_event(ended(generates_at(harness, 1)[0].id, [65]), 1)
        placed = finals(harness)["a"].placed
        assert placed is not None
        assert (placed.replica, placed.moved) == (1, 0)
        cached = len(tokens_of(harness, PREFIX))
        assert f"{cached} of {cached + 1} tokens cached there" in placed.reason

    def test_a_short_prefix_in_a_full_pool_draws_no_call(self) -> None:
        """What the call would evict there counts; heartbeats have the size of the pool."""
        for room, place in ((1000, 1), (len(PREFIX) // 2, 0)):
            harness = Harness(replicas=2)
            cached = tokens_of(harness, PREFIX)[: len(PREFIX) // 4]
            harness.gateway.engine_event(Heartbeat(1, 0, 0, pool=PoolGauges(total=room)), 1)
            harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", packed(cached))]), 1)
            harness.send(generate("a", PREFIX))
            assert place_of(harness, "a") == place

    def test_a_call_goes_where_its_prefix_can_be_loaded(self) -> None:
        harness = Harness(replicas=2)
        for replica in range(2):
            harness.gateway.engine_ready(CONTEXT, replica, TierRooms(host=1_000, page=16))
        harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", packed(tokens_of(harness, PREFIX)))]), 1)
        harness.send(generate("a", PREFIX))
        harness.gateway.engine_event(ended(generates_at(harness, 1)[0].id, [65]), 1)
        harness.gateway.engine_event(CacheEvents([NodeRemoved(1)]), 1)
        harness.send(generate("b", PREFIX + "?"))
        assert place_of(harness, "b") == 1
        harness.gateway.engine_event(ended(generates_at(harness, 1)[1].id, [65]), 1)
        placed = finals(harness)["b"].placed
        assert placed is not None
        assert "48 to be loaded from its tiers" in placed.reason

    def test_what_another_salt_has_cached_draws_no_call(self) -> None:
        harness = Harness(replicas=2)
        tokens = packed(tokens_of(harness, PREFIX))
        harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "hers", tokens)]), 1)
        mine = msgspec.structs.replace(generate("a", PREFIX), origin=Origin(salt="mine"))
        hers = msgspec.structs.replace(generate("b", PREFIX), origin=Origin(salt="hers"))
        harness.send(mine)
        harness.send(hers)
        assert (place_of(harness, "a"), place_of(harness, "b")) == (0, 1)

    def test_the_calls_of_a_fork_group_are_one_engines(self) -> None:
        harness = Harness(replicas=4)
        for index in range(8):
            harness.send(of_group(str(index), "fork 1", PREFIX + str(index)))
        assert len({place_of(harness, str(index)) for index in range(8)}) == 1

    def test_a_hint_goes_where_its_group_will_follow(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("other", "x" * 40))
        harness.send(Hint("h", (Text(PREFIX),), Origin(fork_group="g"), pin=10.0))
        harness.send(of_group("a", "g"))
        (hint,) = [message for message in harness.to[1] if isinstance(message, EnginePrefill)]
        assert (place_of(harness, "other"), place_of(harness, "a")) == (0, 1)
        harness.send(Release("h"))
        assert [message for message in harness.to_engine if isinstance(message, EngineRelease)] == [
            EngineRelease(hint.id)
        ]
        assert harness.to[1][-1] == EngineRelease(hint.id)

    def test_an_engine_whose_heartbeats_are_late_gets_no_new_call(self) -> None:
        harness = Harness(replicas=2)
        for replica in range(2):
            harness.gateway.engine_event(Heartbeat(1, 0, 0), replica)
        harness.clock.advance(LATE + 0.1)
        harness.gateway.engine_event(Heartbeat(2, 0, 0), 0)
        for index in range(4):
            harness.send(generate(str(index), chr(ord("a") + index) * 40))
        assert len(generates_at(harness, 0)) == 4
        harness.clock.advance(LATE + 0.1)  # all are late: there is nothing to prefer
        for index in range(4, 8):
            harness.send(generate(str(index), chr(ord("a") + index) * 40))
        assert generates_at(harness, 1) != []

    def test_a_single_engine_has_no_placement(self) -> None:
        harness = Harness()
        harness.send(generate("a", max_tokens=1))
        harness.gateway.engine_event(ended(harness.generates()[0].id, [65]))
        assert finals(harness)["a"].placed is None
        assert harness.gateway._replicas._placement is None


class TestFirstStart:
    """Calls that come before the engines are held until all are ready or have failed, for a bounded time."""

    def held(self, replicas: int) -> Harness:
        harness = Harness(replicas=replicas, ready=False)
        for index in range(6):
            harness.send(generate(str(index), chr(ord("a") + index) * 40))
        return harness

    def test_calls_wait_for_all_engines_and_are_spread(self) -> None:
        harness = self.held(3)
        for replica in (1, 0):
            harness.gateway.engine_ready(CONTEXT, replica)
            harness.gateway.tick()
            assert harness.generates() == []
            assert harness.gateway.state is EngineState.STARTING
        assert harness.gateway.states == (EngineState.READY, EngineState.READY, EngineState.STARTING)
        harness.gateway.engine_ready(CONTEXT, 2)
        assert harness.gateway.state is EngineState.READY
        assert [len(generates_at(harness, replica)) for replica in range(3)] == [2, 2, 2]

    def test_an_engine_that_takes_too_long_is_not_waited_for(self) -> None:
        harness = self.held(2)
        harness.clock.advance(100.0)  # the wait begins with the first that is ready
        harness.gateway.engine_ready(CONTEXT, 0)
        assert harness.gateway.next_deadline == 100.0 + GATHERING
        harness.clock.advance(GATHERING - 0.1)
        harness.gateway.tick()
        assert harness.generates() == []
        harness.clock.advance(0.1)
        harness.gateway.tick()
        assert len(generates_at(harness, 0)) == 6
        harness.gateway.engine_ready(CONTEXT, 1)
        harness.send(generate("next", "z" * 40))
        assert place_of(harness, "next") == 1

    def test_an_engine_that_is_given_up_is_not_waited_for(self) -> None:
        harness = self.held(2)
        harness.gateway.engine_ready(CONTEXT, 1)
        harness.gateway.engine_given_up("no such device", 0)
        assert harness.gateway.state is EngineState.READY
        assert len(generates_at(harness, 1)) == 6

    def test_with_the_first_lost_the_wait_begins_anew(self) -> None:
        harness = self.held(2)
        harness.gateway.engine_ready(CONTEXT, 0)
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        harness.clock.advance(2 * GATHERING)
        harness.gateway.tick()
        harness.gateway.engine_ready(CONTEXT, 1)
        assert harness.generates() == []
        harness.gateway.engine_ready(CONTEXT, 0)
        assert [len(generates_at(harness, replica)) for replica in range(2)] == [3, 3]

    def test_an_engine_that_starts_again_holds_no_call(self) -> None:
        harness = Harness(replicas=2)
        harness.gateway.engine_lost("it was ended by SIGKILL", 1)
        harness.send(generate("a"))
        assert place_of(harness, "a") == 0
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        harness.send(generate("b"))
        harness.gateway.engine_ready(CONTEXT, 1)
        assert {place_of(harness, label) for label in "ab"} == {1}


class TestLoss:
    def test_calls_that_have_sent_nothing_go_elsewhere_at_once(self) -> None:
        harness = Harness(replicas=2)
        for index in range(64):
            harness.send(generate(str(index), f"{index} {PREFIX}", stream=True))
        lost = len(generates_at(harness, 0))
        assert 0 < lost < 64
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        assert harness.gateway.counters["retried_requests"] == lost
        for request in generates_at(harness, 1):
            harness.gateway.engine_event(ended(request.id, [65]), 1)
        answers = finals(harness)
        assert len(answers) == 64
        assert failures(harness) == []
        moved = [final.placed.moved for final in answers.values() if final.placed is not None]
        assert sorted(moved) == [0] * (64 - lost) + [1] * lost

    def test_a_text_that_has_begun_ends_with_the_error(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("a", stream=True))
        (request,) = generates_at(harness, 0)
        harness.gateway.engine_event(Tokens(request.id, [65]), 0)
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        chunk, failure = harness.answers()
        assert isinstance(chunk, Chunk)
        assert isinstance(failure, Failure)
        assert "a part of the text was delivered before" in failure.message
        assert generates_at(harness, 1) == []

    def test_a_call_that_two_engines_died_of_is_not_given_to_a_third(self) -> None:
        harness = Harness(replicas=3)
        harness.send(generate("a"))
        for _ in range(2):
            harness.gateway.engine_lost("it ran out of memory", place_of(harness, "a"))
        (failure,) = failures(harness)
        assert "it may be the cause" in failure.message
        assert harness.gateway.state is EngineState.READY

    def test_a_lost_engine_is_not_chosen_again_before_it_is_ready_although_it_had_the_prefix(self) -> None:
        harness = Harness(replicas=2)
        tokens = packed(tokens_of(harness, PREFIX))
        harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", tokens)]), 1)
        harness.send(of_group("a", "g"))
        assert place_of(harness, "a") == 1
        harness.gateway.engine_lost("it was ended by SIGKILL", 1)
        for label in "bcd":
            harness.send(of_group(label, "g"))
        assert {place_of(harness, label) for label in "abcd"} == {0}
        harness.gateway.engine_ready(CONTEXT, 1)
        harness.send(generate("new", "z" * 40))
        assert place_of(harness, "new") == 1

    def test_refusals_and_failures_of_requests_do_not_count_against_an_engine(self) -> None:
        harness = Harness(replicas=2)
        for index in range(20):
            harness.send(generate(f"too long {index}", "x" * 2 * CONTEXT))
            harness.send(of_group(f"failing {index}", "g"))
            at = place_of(harness, f"failing {index}")
            harness.gateway.engine_event(EngineFailed(generates_at(harness, at)[-1].id, "RequestError", "no"), at)
        harness.send(of_group("next", "g"))
        assert place_of(harness, "next") == at
        assert len(failures(harness)) == 40
        assert harness.gateway.states == (EngineState.READY, EngineState.READY)

    def test_with_all_lost_calls_are_held_for_the_first_that_returns(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("a"))
        for replica in (0, 1):
            harness.gateway.engine_lost("it was ended by SIGKILL", replica)
        harness.send(generate("b"))
        assert harness.gateway.state is EngineState.STARTING
        harness.gateway.engine_ready(CONTEXT, 1)
        assert harness.gateway.state is EngineState.READY
        assert {place_of(harness, "b")} == {1}

    def test_an_engine_is_given_up_alone(self) -> None:
        harness = Harness(replicas=2, ready=False)
        harness.send(generate("a"))
        harness.gateway.engine_given_up("no such device", 1)
        assert harness.answers() == []
        harness.gateway.engine_ready(CONTEXT, 0)
        assert place_of(harness, "a") == 0
        assert harness.gateway.states == (EngineState.READY, EngineState.FAILED)
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        harness.gateway.engine_given_up("out of memory", 0)
        (failure,) = failures(harness)
        assert "out of memory" in failure.message or "no such device" in failure.message

    def test_lost_frames_of_one_engine_repeat_its_calls_only_and_ask_for_its_tree(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("a", "a" * 40))
        harness.send(generate("b", "b" * 40))
        before = len(generates_at(harness, place_of(harness, "b")))
        at, other = place_of(harness, "a"), place_of(harness, "b")
        assert at != other
        harness.gateway.events_lost(1, at)
        assert harness.gateway.counters["retried_requests"] == 1
        assert EngineSnapshot() in harness.to[at]
        assert EngineSnapshot() not in harness.to[other]
        assert len(generates_at(harness, other)) - before <= 1

    def test_an_aborted_call_is_aborted_at_its_engine(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("a", "a" * 40))
        harness.send(generate("b", "b" * 40))
        harness.send(Abort("b"))
        assert harness.aborts() == [generates_at(harness, place_of(harness, "b"))[0].id]
        assert len(harness.to[place_of(harness, "a")]) == 1


class TestAllEngines:
    def controls(self, harness: Harness) -> list[EngineControl]:
        return [message for message in harness.to_engine if isinstance(message, EngineControl)]

    def test_the_caches_of_all_are_flushed_and_the_answers_added_up(self) -> None:
        harness = Harness(replicas=2)
        harness.send(Control("f", "flush_cache"))
        for replica, control in enumerate(self.controls(harness)):
            assert harness.answers() == []
            result = {"evicted": 10 + replica, "kernels": f"of {replica}"}
            harness.gateway.engine_event(ControlEnded(control.id, result), replica)
        assert harness.answers() == [Done("f", {"evicted": 21, "kernels": "of 0"})]

    def test_an_engine_that_is_lost_meanwhile_is_not_waited_for(self) -> None:
        harness = Harness(replicas=2)
        harness.send(Control("f", "flush_cache"))
        first, second = self.controls(harness)
        harness.gateway.engine_event(ControlEnded(first.id, {"evicted": 10}), 0)
        harness.gateway.engine_lost("it was ended by SIGKILL", 1)
        assert harness.answers() == [Done("f", {"evicted": 10})]
        harness.gateway.engine_event(ControlEnded(second.id, {"evicted": 1}), 1)
        assert len(harness.answers()) == 1

    def test_only_engines_that_are_ready_are_asked(self) -> None:
        harness = Harness(replicas=3, ready=False)
        harness.send(Control("f", "flush_cache"))
        harness.gateway.engine_ready(CONTEXT, 2)
        harness.clock.advance(GATHERING)
        harness.gateway.tick()
        (control,) = self.controls(harness)
        harness.gateway.engine_event(ControlEnded(control.id, {"evicted": 3}), 2)
        assert harness.answers() == [Done("f", {"evicted": 3})]

    def test_a_survey_has_the_trees_of_all_with_ids_of_their_own(self) -> None:
        harness = Harness(replicas=2)
        harness.send(Survey("s", 10, 5))
        surveys = [message for message in harness.to_engine if isinstance(message, EngineSurvey)]
        for replica, question in enumerate(surveys):
            nodes = (TreeNode(1, None, 3, 0, 0, 0, 0, 0), TreeNode(2, 1, 2, 0, 0, 0, 0, 0))
            survey = TreeSurvey(nodes, 2, PoolGauges(total=100, free=95, cached=5))
            harness.gateway.engine_event(EngineSurveyed(question.id, survey, [[97], [98]]), replica)
        (answer,) = harness.answers()
        assert isinstance(answer, Surveyed)
        survey = answer.survey
        assert (survey.total_nodes, survey.pool.total, survey.pool.cached) == (4, 200, 10)
        assert [(node.replica, node.text) for node in survey.nodes] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
        assert len({node.id for node in survey.nodes}) == 4
        assert [node.parent for node in survey.nodes] == [None, survey.nodes[0].id, None, survey.nodes[2].id]

    @pytest.mark.parametrize(
        ("counts", "kept"), [((2, 9), (2, 8)), ((9, 9), (5, 5)), ((3, 4), (3, 4)), ((0, 12), (0, 10))]
    )
    def test_a_survey_has_as_many_nodes_of_all_engines_as_were_asked_for(
        self, counts: tuple[int, ...], kept: tuple[int, ...]
    ) -> None:
        harness = Harness(replicas=2)
        harness.send(Survey("s", 10))
        surveys = [message for message in harness.to_engine if isinstance(message, EngineSurvey)]
        for replica, (question, count) in enumerate(zip(surveys, counts, strict=True)):
            nodes = tuple(TreeNode(number, None, 3, 0, 0, 0, 0, 0) for number in range(count))
            survey = TreeSurvey(nodes, count, PoolGauges())
            harness.gateway.engine_event(EngineSurveyed(question.id, survey), replica)
        (answer,) = harness.answers()
        assert isinstance(answer, Surveyed)
        assert tuple(sum(node.replica == each for node in answer.survey.nodes) for each in range(2)) == kept
        assert answer.survey.total_nodes == sum(counts)

    def test_the_status_has_each_engine_and_their_sums(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("a"))
        for replica in range(2):
            pool = PoolGauges(total=50, free=40 + replica)
            harness.gateway.engine_event(Heartbeat(1, 1, replica, {"steps": 2.0 + replica}, pool), replica)
        harness.gateway.engine_lost("it was ended by SIGKILL", 1)
        harness.send(ReadStatus("q"))
        (read,) = [message for message in harness.answers() if isinstance(message, StatusRead)]
        status = read.status
        assert (status.engine, status.running, status.waiting) == (EngineState.READY, 1, 0)
        assert (status.pool.total, status.counters["steps"]) == (50, 5.0)
        assert [replica.engine for replica in status.replicas] == [EngineState.READY, EngineState.STARTING]
        assert [replica.in_flight for replica in status.replicas] == [1, 0]
        assert [replica.counters["steps"] for replica in status.replicas] == [2.0, 3.0]


class TestRates:
    """Rates come from counters of heartbeats, by tokens and the seconds of steps and loads."""

    def beat(self, harness: Harness, replica: int, **counters: float) -> None:
        harness.gateway.engine_event(Heartbeat(1, 0, 0, counters), replica)

    def rates(self, harness: Harness, replica: int) -> tuple[float, float, float]:
        placement = harness.gateway._replicas._placement
        assert placement is not None
        table = placement._table
        return float(table.prefill[replica]), float(table.decode[replica]), float(table.load[replica])

    def test_what_one_engine_measured_is_the_guess_for_the_others_and_gives_the_rest_its_proportion(self) -> None:
        harness = Harness(replicas=2)
        self.beat(harness, 0, prompt_step_rows=1000.0, prompt_step_seconds=2.0)
        assert self.rates(harness, 0) == self.rates(harness, 1) == (500.0, 62.5, 5000.0)
        self.beat(harness, 1, prompt_step_rows=1000.0, prompt_step_seconds=1.0)
        self.beat(harness, 1, decode_step_rows=100.0, decode_step_seconds=0.5, loaded_disk_tokens=512, load_seconds=0.1)
        assert self.rates(harness, 0) == pytest.approx((500.0, 200.0, 5120.0))
        assert self.rates(harness, 1) == pytest.approx((1000.0, 200.0, 5120.0))
        harness.send(ReadStatus("q"))
        (read,) = [message for message in harness.answers() if isinstance(message, StatusRead)]
        assert [dict(replica.rates) for replica in read.status.replicas] == [
            {"prefill": 500.0},
            pytest.approx({"prefill": 1000.0, "decode": 200.0, "load": 5120.0}),
        ]

    def test_a_rate_is_a_moving_mean_over_samples_of_many_tokens_and_idle_time_says_nothing(self) -> None:
        harness = Harness(replicas=2)
        before = self.rates(harness, 0)
        self.beat(harness, 0, prompt_step_rows=255.0, prompt_step_seconds=9.0)
        assert self.rates(harness, 0) == before
        self.beat(harness, 0, prompt_step_rows=1000.0, prompt_step_seconds=10.0)
        for _ in range(3):
            harness.clock.advance(100.0)
            self.beat(harness, 0, prompt_step_rows=1000.0, prompt_step_seconds=10.0)
        assert self.rates(harness, 0)[0] == pytest.approx(100.0)
        self.beat(harness, 0, prompt_step_rows=2000.0, prompt_step_seconds=12.0)
        assert self.rates(harness, 0)[0] == pytest.approx(1 / (0.75 * 0.01 + 0.25 * 0.002))

    def test_the_next_engine_of_a_place_counts_from_0_and_keeps_the_rate_until_then(self) -> None:
        harness = Harness(replicas=2)
        self.beat(harness, 0, prompt_step_rows=10_000.0, prompt_step_seconds=100.0)
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        harness.gateway.engine_ready(CONTEXT, 0)
        assert self.rates(harness, 0)[0] == pytest.approx(100.0)
        self.beat(harness, 0, prompt_step_rows=300.0, prompt_step_seconds=3.0)
        self.beat(harness, 0, prompt_step_rows=600.0, prompt_step_seconds=3.0)  # without seconds: no evidence
        assert self.rates(harness, 0)[0] == pytest.approx(100.0)

    def test_an_engine_that_computes_slowly_gets_fewer_calls(self) -> None:
        harness = Harness(replicas=2)
        self.beat(harness, 0, prompt_step_rows=1000.0, prompt_step_seconds=4.0)
        self.beat(harness, 1, prompt_step_rows=1000.0, prompt_step_seconds=1.0)
        for index in range(10):
            harness.send(generate(str(index), f"{index} {PREFIX}", max_tokens=1))
        assert [len(generates_at(harness, replica)) for replica in range(2)] == [2, 8]


class TestWaiting:
    """A call waits until its prompt is computed; without a token that tells it, the events of its engine do."""

    def waiting(self, harness: Harness) -> list[tuple[int, int]]:
        """Returns for each engine the calls that wait, and all."""
        harness.gateway.tick()
        placement = harness.gateway._replicas._placement
        assert placement is not None
        placement.check()
        return [(facts.waiting, facts.running) for facts in placement.facts().replicas]

    def test_the_prompt_of_a_call_that_does_not_stream_is_computed_when_events_show_it(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("a", PREFIX))
        tokens = tokens_of(harness, PREFIX)
        assert self.waiting(harness) == [(1, 1), (0, 0)]
        harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", packed(tokens))]), 1)  # of another engine
        harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", packed(tokens[:20]))]), 0)
        assert self.waiting(harness) == [(1, 1), (0, 0)]
        harness.gateway.engine_event(CacheEvents([NodeExtended(1, packed(tokens[20:]))]), 0)
        assert self.waiting(harness) == [(0, 1), (0, 0)]
        harness.gateway.engine_event(ended(generates_at(harness, 0)[0].id, [65]), 0)
        assert self.waiting(harness) == [(0, 0), (0, 0)]

    def test_a_hint_is_load_until_its_prefix_is_there(self) -> None:
        harness = Harness(replicas=2)
        harness.send(Hint("h", (Text(PREFIX),)))
        harness.clock.advance(5.0)
        assert self.waiting(harness) == [(1, 1), (0, 0)]
        harness.gateway.engine_event(CacheEvents([NodeAdded(1, 0, "", packed(tokens_of(harness, PREFIX)))]), 0)
        assert self.waiting(harness) == [(0, 0), (0, 0)]

    def test_a_hint_that_is_dropped_counts_for_some_seconds_only(self) -> None:
        harness = Harness(replicas=2)
        harness.send(Hint("h", (Text(PREFIX),)))
        harness.gateway.engine_lost("it was ended by SIGKILL", 0)
        harness.send(Hint("i", (Text(PREFIX),)))
        assert self.waiting(harness) == [(0, 0), (1, 1)]
        harness.clock.advance(HINT_SECONDS)
        assert self.waiting(harness) == [(0, 0), (0, 0)]


class TestExplicitCaches:
    def marked(self, label: str, text: str = " and so on") -> GenRequest:
        request = GenRequest(label, (Text(PREFIX), Text(text)), SamplingParams(max_tokens=1))
        return msgspec.structs.replace(request, caching=Caching((CacheMark(1, 60.0),), minimum=1))

    def serve(self, harness: Harness, label: str) -> int:
        """Answers a marked call as an engine that places its marks → the engine."""
        at = place_of(harness, label)
        request = generates_at(harness, at)[-1]
        assert request.marks is not None
        placed = [True for _ in request.marks]
        harness.gateway.engine_event(MarksPlaced(request.id, placed, len(request.token_ids), 0), at)
        harness.gateway.engine_event(ended(request.id, [65]), at)
        return at

    def test_calls_that_mark_follow_the_prefix_that_is_kept_for_them(self) -> None:
        harness = Harness(replicas=2)
        harness.send(generate("other", "x" * 60))
        harness.send(self.marked("first"))
        kept_at = self.serve(harness, "first")
        assert kept_at == 1
        for index in range(6):  # more calls than any balance of load would leave there
            harness.send(self.marked(f"next {index}", str(index) * 20))
            assert self.serve(harness, f"next {index}") == 1
        usage = finals(harness)["next 5"].caching
        assert usage is not None
        assert usage.read > 0
        assert harness.gateway.counters["placed_kept"] == 6

    def test_calls_follow_one_that_is_still_creating_what_they_mark(self) -> None:
        harness = Harness(replicas=2)
        for label in ("a", "b", "c"):
            harness.send(self.marked(label, label * 20))
        assert len({place_of(harness, label) for label in ("a", "b", "c")}) == 1

    def test_a_lost_engine_loses_its_entries_only(self) -> None:
        harness = Harness(replicas=2)
        harness.send(self.marked("first"))
        at = self.serve(harness, "first")
        harness.gateway.engine_lost("it was ended by SIGKILL", 1 - at)
        assert harness.gateway.counters["caches_lost"] == 0
        harness.gateway.engine_ready(CONTEXT, 1 - at)
        harness.gateway.engine_lost("it was ended by SIGKILL", at)
        assert harness.gateway.counters["caches_lost"] == 1
        harness.send(self.marked("again"))
        assert self.serve(harness, "again") == 1 - at


def test_a_score_says_where_it_was_computed() -> None:
    harness = Harness(replicas=2)
    harness.send(ScoreRequest("s", (Text(PREFIX),), ("yes", "no")))
    (request,) = harness.scores()
    assert isinstance(request, EngineScore)
    rows = [[-0.5] * (len(sequence) - request.start) for sequence in request.sequences]
    harness.gateway.engine_event(ScoreEnded(request.id, rows, 10, 0), place_of(harness, "s"))
    (scored,) = harness.answers()
    assert isinstance(scored, Scored)
    assert scored.placed is not None
    assert scored.placed.replica == 0


@pytest.mark.parametrize("policy", ["round-robin", "power-of-two", "random", "consistent-hashing", "cache-aware"])
def test_every_policy_places_calls_and_their_load_ends_with_them(policy: str) -> None:
    harness = Harness(replicas=3, placement=policy)
    for index in range(12):
        harness.send(generate(str(index), f"{index} {PREFIX}"))
    for replica in range(3):
        for request in generates_at(harness, replica):
            harness.gateway.engine_event(ended(request.id, [65]), replica)
    assert len(finals(harness)) == 12
    placement = harness.gateway._replicas._placement
    assert placement is not None
    assert placement.policy.name == policy
    assert sum(facts.running for facts in placement.facts().replicas) == 0
