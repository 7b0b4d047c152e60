"""Constraints in the scheduler, with a constraint that is a list of texts."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from umbel.lang.protocol import FinishReason
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.matcher import MEASURED_EVERY, ImmediateExecutor, MatcherCache
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineAbort, EngineConstraint, EngineFailed

from ..engine_harness import Engine
from ..toy_constraint import TOKENIZER, ToyConstraint, ToyOpener, encode, texts, toy_shelf

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
FORM = tuple(
    f'{{"name": "{name}", "kind": "{kind}"}}'
    for name, kind in itertools.product(("ann", "theo", "END"), ("in", "an", "a"))
)
ANSWERS = ("yes", "no", "not in the thing", "not in the end", "é")
PROMPT = [256, *encode("say in the form ")]


def engine(**settings: object) -> Engine:
    return Engine(
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=toy_shelf(),
        **{"context": 200, **settings},  # type: ignore[arg-type]
    )


def text(engine: Engine, message_id: int) -> str:
    ending = engine.endings[message_id]
    assert isinstance(ending, Ended), ending
    data = b"".join(map(TOKENIZER.token_bytes, engine.tokens(message_id)))
    return data[: ending.text_bytes].decode()


def run(engine: Engine, message_id: int) -> Ended:
    ending = engine.run().endings[message_id]
    assert isinstance(ending, Ended), ending
    return ending


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("allowed", [FORM, ANSWERS, ("",), ("", "a", "ab"), ("one",)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(5)
def test_the_text_is_one_of_those_allowed_and_the_same_without_jumps(
    temperature: float, allowed: tuple[str, ...], seed: int
) -> None:
    told = []
    for jump_forward in (True, False):
        machine = engine(jump_forward=jump_forward)
        sampling = SamplingParams(temperature=temperature, max_tokens=64, seed=seed)
        ending = run(machine, machine.constrain(PROMPT, texts(*allowed), sampling, stream=True))
        assert text(machine, 1) in allowed
        assert ending.enforced
        assert ending.finish_reason is FinishReason.STOP
        told.append((machine.tokens(1), ending.forced_tokens, ending.matched_stop, ending.completion_tokens))
    assert told[0] == told[1]


def test_what_is_forced_takes_no_step_of_its_own() -> None:
    with_jumps, without = engine(), engine(jump_forward=False)
    for machine in (with_jumps, without):
        run(machine, machine.constrain(PROMPT, texts(*FORM), GREEDY))
    saved = with_jumps.count("forward_passes_saved")
    assert saved > 10
    assert without.count("steps") - with_jumps.count("steps") == saved
    assert without.count("forward_passes_saved") == 0
    assert without.count("forced_tokens") == with_jumps.count("forced_tokens") == saved
    told = [machine.endings[1].runs for machine in (with_jumps, without)]  # type: ignore[union-attr]
    assert told[0] == told[1]
    assert {run.origin for run in told[0]} == {"forced"}
    assert sum(run.end - run.first for run in told[0]) == saved


def test_a_text_without_any_choice_takes_no_step_at_all() -> None:
    machine = engine()
    ending = run(machine, machine.constrain(PROMPT, texts("the only one"), GREEDY))
    assert text(machine, 1) == "the only one"
    assert machine.count("steps") == 0
    assert ending.forced_tokens == ending.completion_tokens == len(encode("the only one"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize("allowed", [FORM, ANSWERS, ("a", "ab" * 10, "abc"), ("", "a", "ab" * 5)])
def test_the_text_is_complete_at_every_budget(jump_forward: bool, allowed: tuple[str, ...]) -> None:
    least = ToyConstraint(0, list(allowed)).minimum_tokens
    reasons = set()
    for max_tokens, seed in itertools.product(range(max(least, 1), least + 12), range(3)):
        machine = engine(jump_forward=jump_forward)
        sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens, seed=seed)
        ending = run(machine, machine.constrain(PROMPT, texts(*allowed), sampling))
        assert text(machine, 1) in allowed
        assert ending.completion_tokens <= max_tokens
        assert ending.enforced
        reasons.add(ending.finish_reason)
    assert FinishReason.LENGTH_CLOSED in reasons or allowed is not FORM


def test_a_budget_below_the_shortest_text_is_refused_with_the_number() -> None:
    machine = engine()
    least = min(len(encode(one)) for one in FORM)
    message_id = machine.constrain(PROMPT, texts(*FORM), SamplingParams(max_tokens=least - 1, seed=1))
    failed = machine.run().endings[message_id]
    assert isinstance(failed, EngineFailed)
    assert failed.kind == "ConstraintError"
    assert f"max_tokens={least} or more" in failed.message


def test_a_context_too_short_for_the_shortest_text_is_refused() -> None:
    machine = engine(context=len(PROMPT) + 5)
    message_id = machine.constrain(PROMPT, texts(*FORM), GREEDY)
    failed = machine.run().endings[message_id]
    assert isinstance(failed, EngineFailed)
    assert "shorten the prompt" in failed.message


def test_an_end_of_text_only_where_the_text_is_complete() -> None:
    allowed = ("a", "aa", "aab", "aabin")
    ends = set()
    for seed in range(40):
        machine = engine()
        ending = run(
            machine,
            machine.constrain(PROMPT, texts(*allowed), SamplingParams(temperature=3.0, max_tokens=9, seed=seed)),
        )
        ends.add(text(machine, 1))
        assert ending.matched_stop in (None, *TOKENIZER.eos_ids)
    assert ends == set(allowed)


def test_min_tokens_withholds_the_end_while_there_is_another_way() -> None:
    for seed in range(10):
        machine = engine()
        sampling = SamplingParams(max_tokens=9, min_tokens=4, seed=seed)
        ending = run(machine, machine.constrain(PROMPT, texts("a", "ax", "axyzu", "b"), sampling))
        assert text(machine, 1) in ("axyzu", "b")
        assert ending.finish_reason is FinishReason.STOP


def test_ignored_ends_are_taken_only_when_nothing_else_may_come() -> None:
    for seed in range(10):
        machine = engine()
        sampling = SamplingParams(max_tokens=9, ignore_eos=True, seed=seed)
        run(machine, machine.constrain(PROMPT, texts("a", "ax", "axyzu"), sampling))
        assert text(machine, 1) == "axyzu"


def test_a_stop_string_inside_a_forced_run_ends_the_text() -> None:
    machine = engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=64, stop=('", "',))
    ending = run(machine, machine.constrain(PROMPT, texts(*FORM), sampling, stream=True))
    assert text(machine, 1) in {one.split('", "')[0] for one in FORM}
    assert ending.matched_stop == '", "'
    assert not ending.enforced


@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 3}, {"max_step_logits": 64}, {"jump_forward": False}])
@pytest.mark.parametrize("prompt_logprobs", [None, 0])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("allowed", [FORM, ("the only one",)])
@pytest.mark.sampled(4)
def test_forced_tokens_have_their_own_log_probabilities(
    settings: dict[str, object], prompt_logprobs: int | None, stream: bool, allowed: tuple[str, ...]
) -> None:
    machine = engine(**settings)
    sampling = SamplingParams(
        temperature=0.7, seed=5, max_tokens=64, logprobs=True, top_logprobs=2, prompt_logprobs_from=prompt_logprobs
    )
    message_id = machine.constrain(PROMPT, texts(*allowed), sampling, stream=stream)
    received = []
    while not machine.scheduler.idle:
        for event in machine.step():
            assert len(event.logprobs) == len(event.token_ids)  # type: ignore[union-attr]  # Tokens and Ended
            received += event.logprobs  # type: ignore[union-attr]
    machine.scheduler.check()
    tokens = machine.tokens(message_id)
    tokens = tokens[:-1] if tokens[-1] in TOKENIZER.eos_ids else tokens
    assert text(machine, message_id) in allowed
    assert [entry.token_id for entry in received][: len(tokens)] == tokens
    truth = machine.reference_score([*PROMPT, *tokens], len(PROMPT))
    assert [entry.logprob for entry in received][: len(tokens)] == pytest.approx(truth, abs=1e-4)
    ending = machine.endings[message_id]
    assert isinstance(ending, Ended)
    if prompt_logprobs is not None:
        expected = machine.reference_score(PROMPT, 1)
        assert [entry.logprob for entry in ending.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


def test_retraction_in_the_middle_changes_nothing() -> None:
    def tokens(pool: int) -> list[list[int]]:
        machine = engine(pool=pool, headroom=0, radix_cache=False)
        sampling = SamplingParams(temperature=1.0, max_tokens=64, seed=3)
        ids = [machine.constrain([*PROMPT, 97 + i], texts(*FORM), sampling) for i in range(6)]
        machine.run()
        if pool < 200:
            assert machine.count("retractions") > 0
        return [machine.tokens(i) for i in ids]

    assert tokens(75) == tokens(2000)


def test_constrained_and_free_requests_share_their_steps() -> None:
    machine = engine(pool=600)
    free = SamplingParams(temperature=0.8, max_tokens=20, seed=4, ignore_eos=True)
    frees = [machine.generate([*PROMPT, i], free) for i in range(3)]
    bound = [machine.constrain([*PROMPT, i], texts(*FORM), GREEDY) for i in range(3)]
    machine.run()
    alone = engine(pool=600)
    alone_ids = [alone.generate([*PROMPT, i], free) for i in range(3)]
    alone.run()
    assert [machine.tokens(i) for i in frees] == [alone.tokens(i) for i in alone_ids]
    assert all(text(machine, i) in FORM for i in bound)


def test_a_mask_that_is_a_long_way_off_holds_up_nobody_else() -> None:
    machine = engine(constraint_fuel=10, pool=600)
    slow = machine.constrain(PROMPT, texts("abc", "xyz", cost=400), GREEDY)
    free = machine.generate([*PROMPT, 97], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    quick = machine.constrain([*PROMPT, 98], texts("yes", "no"), GREEDY)
    machine.run()
    assert text(machine, slow) in ("abc", "xyz")
    assert machine.ended_in[free] == 12
    assert machine.ended_in[quick] < 5
    assert machine.ended_in[slow] > 40
    assert machine.count("mask_waits") > 0


def test_a_constraint_that_grows_too_large_ends_its_own_request_only() -> None:
    machine = engine(pool=600)
    hostile = machine.constrain(PROMPT, texts("abc", "xyz", cost=-1), GREEDY)
    other = machine.constrain(PROMPT, texts(*FORM), GREEDY)
    machine.run()
    failed = machine.endings[hostile]
    assert isinstance(failed, EngineFailed)
    assert failed.kind == "ConstraintError"
    assert text(machine, other) in FORM


def test_a_constraint_that_cannot_be_opened_ends_its_request() -> None:
    machine = engine()
    failed = machine.constrain(PROMPT, texts(), GREEDY)
    machine.run()
    ending = machine.endings[failed]
    assert isinstance(ending, EngineFailed)
    assert (ending.kind, ending.message) == ("ConstraintError", "it admits nothing")


def test_an_engine_without_constraints_says_so() -> None:
    machine = Engine(vocabulary=TOKENIZER.vocab_size, eos_ids=TOKENIZER.eos_ids)
    refused = machine.constrain(PROMPT, texts("a"), GREEDY)
    machine.run()
    ending = machine.endings[refused]
    assert isinstance(ending, EngineFailed)
    assert ending.kind == "CapabilityError"


def test_the_same_constraint_is_opened_once() -> None:
    machine = engine(pool=2000)
    for index in range(24):
        machine.constrain([*PROMPT, index], texts(*FORM), GREEDY)
    machine.constrain(PROMPT, texts(*FORM), GREEDY, salt="other")
    machine.run()
    assert machine.count("constraints_opened") == 2
    assert machine.count("constraint_hits") == 23


def test_open_constraints_are_bounded_in_number_and_bytes() -> None:
    for shelf in (
        toy_shelf(entries=2),
        MatcherCache(ToyOpener, ImmediateExecutor(), ImmediateExecutor(), entries=99, most_bytes=5),
    ):
        for answer in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
            shelf.find(texts(answer), "")
        assert (shelf.opened, shelf.hits) == (4, 2)


def test_open_constraints_that_have_grown_are_given_up_without_a_new_one() -> None:
    shelf = MatcherCache(ToyOpener, ImmediateExecutor(), ImmediateExecutor(), entries=99, most_bytes=20)
    grown, _ = shelf.find(texts("aaaa"), "").result()
    assert isinstance(grown, ToyConstraint)
    for answer in ("bbbb", "cccc"):
        shelf.find(texts(answer), "")
    grown.allowed.append(b"a" * 13)
    for _ in range(MEASURED_EVERY):
        shelf.find(texts("bbbb"), "")
    assert (shelf.opened, shelf.hits) == (3, MEASURED_EVERY)
    shelf.find(texts("bbbb"), "")
    assert shelf.opened == 3, "those that were used since are kept"
    shelf.find(texts("aaaa"), "")
    assert shelf.opened == 4


def test_what_llguidance_reads_slowly_holds_up_no_constraint_of_ours() -> None:
    released = threading.Event()

    class SlowOpener(ToyOpener):
        def open(self, compiled: EngineConstraint) -> ToyConstraint:
            if compiled.engine == "llguidance":
                assert released.wait(60.0)
            return super().open(compiled)

    with ThreadPoolExecutor(1) as fast, ThreadPoolExecutor(1) as slow:
        shelf = MatcherCache(SlowOpener, fast, slow, entries=9)
        reading = shelf.find(msgspec.structs.replace(texts("a"), engine="llguidance"), "")
        assert shelf.find(texts("b"), "").result(60.0)[0].minimum_tokens == 1
        assert not reading.done()
        released.set()
        assert reading.result(60.0)[0].minimum_tokens == 1


def test_the_opener_is_made_once_whichever_constraint_comes_first() -> None:
    made: list[ToyOpener] = []

    def load() -> ToyOpener:
        if not made:
            made.append(ToyOpener())
            raise OSError("no room")  # the first time
        made.append(ToyOpener())
        return made[-1]

    with ThreadPoolExecutor(1) as fast, ThreadPoolExecutor(1) as slow:
        shelf = MatcherCache(load, fast, slow, entries=9)
        with pytest.raises(OSError, match="no room"):
            shelf.prepare().result(60.0)
        for future in [
            shelf.find(texts("a"), ""),
            shelf.find(msgspec.structs.replace(texts("b"), engine="llguidance"), ""),
        ]:
            future.result(60.0)
        shelf.prepare().result(60.0)
    assert len(made) == 2


def test_without_a_cache_every_request_opens_its_own() -> None:
    shelf = toy_shelf(entries=0)
    for _ in range(3):
        shelf.find(texts("a"), "")
    assert (shelf.opened, shelf.hits) == (3, 0)


def test_an_abort_gives_what_there_is() -> None:
    machine = engine(jump_forward=False)
    message_id = machine.constrain(PROMPT, texts(*FORM), GREEDY)
    for _ in range(6):
        machine.step()
    machine.scheduler.handle_message(EngineAbort(message_id))
    ending = run(machine, message_id)
    assert ending.finish_reason is FinishReason.ABORT
    assert not ending.enforced
    assert any(one.startswith(text(machine, message_id)) for one in FORM)


@pytest.mark.parametrize("point", ["engine.plan", "engine.forward", "engine.sample", "engine.commit"])
def test_a_fault_costs_its_own_request_or_step_only(point: str) -> None:
    machine = engine(faults=FailAt(point, 5, RuntimeError("injected")), max_running=2, pool=600)
    ids = [machine.constrain([*PROMPT, i], texts(*FORM), GREEDY) for i in range(6)]
    machine.run()
    ended = [i for i in ids if isinstance(machine.endings[i], Ended)]
    assert len(ended) >= 4
    assert all(text(machine, i) in FORM for i in ended)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.2}, {"logit_bias": {97: -50.0}}]
)
def test_penalties_and_restrictions_act_on_what_the_mask_leaves(penalty: dict[str, object]) -> None:
    for seed in range(3):
        machine = engine()
        sampling = SamplingParams(max_tokens=64, seed=seed, **penalty)  # type: ignore[arg-type]
        run(machine, machine.constrain(PROMPT, texts(*ANSWERS), sampling))
        assert text(machine, 1) in ANSWERS


# --------------------------------------------------------------------------------------- token healing

SPACED = [256, *encode("they sing in th")]  # "th" is a token, and so is " the"
AT_A_SPACE = [256, *encode("they sing in ")]  # "n", "in" and " " are; " the" and " a" begin with the last


def healed(seed: int, prompt: list[int], *allowed: str, heal: bool = True, **options: object) -> tuple[Engine, Ended]:
    machine = engine()
    sampling = SamplingParams(**{"max_tokens": 20, "seed": seed, "temperature": 1.0, **options})  # type: ignore[arg-type]
    return machine, run(machine, machine.constrain(prompt, texts(*allowed), sampling, heal=heal, stream=True))


def text_of(machine: Engine, ending: Ended) -> str:
    data = b"".join(map(TOKENIZER.token_bytes, machine.tokens(1)))[ending.healed :]
    return data[: ending.text_bytes].decode()


def test_the_last_token_of_the_prompt_may_be_replaced() -> None:
    seen = set()
    for seed in range(60):
        machine, ending = healed(seed, AT_A_SPACE, "the end", "a thing", "bees")
        assert text_of(machine, ending) in ("the end", "a thing", "bees")
        assert ending.enforced
        assert ending.prompt_tokens == len(AT_A_SPACE)
        assert ending.completion_tokens <= 20
        first = TOKENIZER.token_bytes(machine.tokens(1)[0])
        assert (ending.healed > 0) == first.startswith(b" ")
        seen.add(ending.healed > 0)
    assert seen == {True, False}


def test_without_a_longer_token_nothing_is_dropped() -> None:
    for allowed in (("xyz", "yes"), ("the",)):
        told = []
        for heal in (True, False):
            machine, ending = healed(1, PROMPT if allowed[0] == "xyz" else [256, *encode("q")], *allowed, heal=heal)
            told.append((machine.tokens(1), ending.healed, machine.count("steps")))
        assert told[0] == told[1]


def test_where_the_prompt_keeps_its_token_all_is_as_without_healing() -> None:
    same = 0
    for seed in range(30):
        machine, ending = healed(seed, AT_A_SPACE, "the end", "a thing", "bees", logprobs=True)
        plain, unhealed = healed(seed, AT_A_SPACE, "the end", "a thing", "bees", logprobs=True, heal=False)
        if not ending.healed:
            same += 1
            assert machine.tokens(1) == plain.tokens(1)
            assert ending.completion_tokens == unhealed.completion_tokens
    assert same > 5


def test_healing_keeps_the_budget() -> None:
    for seed, most in itertools.product(range(20), (4, 5, 6)):
        machine, ending = healed(seed, AT_A_SPACE, "the end", "a thing", "bees", max_tokens=most)
        assert text_of(machine, ending) in ("the end", "a thing", "bees")
        assert ending.completion_tokens <= most


def test_stops_are_not_found_in_the_prompt() -> None:
    for seed in range(20):
        machine, ending = healed(seed, AT_A_SPACE, "the end", "a thing", stop=(" t", " e"))
        assert text_of(machine, ending) in ("the", "a")
