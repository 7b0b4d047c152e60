"""Branches that end early: cancelled alone, by the first ones, by a rule, by a quorum; and searches made of them."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, Gate
from umbel.interpreter.loop import streams
from umbel.lang.state import Ended, State, StateGroup
from umbel.srt.in_process import LocalBackend

from .conftest import PATIENCE

ANSWERS = ["7", "9", "7", "8", " 7\n", "7", "5", "6"]


def numbered(prompt: str) -> str:
    """Answers branch n with ANSWERS[n]; a later call of it with what it is asked to repeat."""
    question = prompt.rsplit("#", 1)[1]
    return ANSWERS[int(question)] if question.isdigit() else f"<{question}>"


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def echo(gate: Gate) -> Echo:
    return Echo(numbered, gate=gate)


def forked(s: State, size: int = 8) -> StateGroup[State]:
    s += "How many? "
    forks = s.fork(size)
    forks += lambda index: f"#{index}" + ul.gen("answer", max_tokens=10)
    return forks


def run(body: Callable[[State], Any], backend: Echo, **options: Any) -> State:
    return ul.function(body).run(backend=backend, timeout=PATIENCE, **options)


def test_the_first_ones_that_end_are_taken_and_the_others_stop(echo: Echo, gate: Gate) -> None:
    def body(s: State) -> list[str]:
        forks = forked(s)
        forks += "#more" + ul.gen("later", max_tokens=30)
        gate.wait_for(8)
        gate.step(16)  # all eight answers, and the later texts of those that ask first
        return [branch["answer"] for branch in forks.first(2)]

    state = run(body, echo)
    cost = state.cost
    assert len(state.ret_value) == 2
    assert echo.active == set()
    assert cost.usage.calls + cost.cancelled_calls == 16
    assert cost.tokens_saved <= 30 * cost.cancelled_calls


def test_three_equal_answers_of_eight_decide_and_the_tokens_of_five_are_saved(echo: Echo, gate: Gate) -> None:
    def body(s: State) -> Any:
        forks = forked(s)
        gate.wait_for(8)
        gate.step(5)  # branches 0 to 4 answer 7 9 7 8 7
        ended = forks.until(ul.vote("answer", agree=3))
        forks.join()
        return [branch["answer"] for branch in ended], ul.vote("answer").winner(ended), s["answer"]

    state = run(body, echo)
    state.sync()
    assert sorted(state.ret_value[0]) == sorted(ANSWERS[:5])
    assert state.ret_value[1].strip() == "7"
    assert state.ret_value[2] == ANSWERS[:5], "in the order of the branches, without those that were cancelled"
    assert (state.cost.cancelled_calls, state.cost.tokens_saved, state.cost.usage.calls) == (3, 30, 5)
    assert (len(echo.aborted), echo.active) == (3, set())


def test_a_vote_without_a_number_waits_until_no_other_answer_can_win() -> None:
    rule = ul.vote("answer")

    def ended(texts: list[str], waiting: int) -> Ended[Any]:
        branches = run(lambda s: [s.copy() for _ in texts], Echo()).ret_value
        found: Ended[Any] = Ended(waiting)
        for branch, text in zip(branches, texts, strict=True):
            branch["answer"] = text
            found.append(branch)
        return found

    assert [rule(ended(["7", "9", "7"], waiting)) for waiting in (2, 1, 0)] == [False, False, True]
    assert rule(ended(["7", "7", "7"], 2))
    assert rule.winner(ended(["9", "7", "7 "], 0)) == "7"
    assert rule.counts(ended(["9", "7", "7 "], 0)) == {"7": 2, "9": 1}
    assert ul.vote("answer", key=len).winner(ended(["9", "70", "7 "], 0)) == "70"
    with pytest.raises(ul.ParameterError, match="no branch has ended"):
        rule.winner([])
    assert not rule(ended([], 2))
    assert not ul.vote("answer", agree=1)(ended([], 2))
    assert ul.vote("answer", key=lambda text: float("nan")).winner(ended(["9", "7"], 0)) == "9"
    with pytest.raises(ul.ParameterError, match=r"vote\(key=...\) gave \['9'\], which cannot be counted"):
        ul.vote("answer", key=list)(ended(["9"], 0))  # type: ignore[arg-type]


def test_a_branch_is_cancelled_alone_with_what_it_has_forked(echo: Echo, gate: Gate) -> None:
    def body(s: State) -> Any:
        forks = forked(s, 3)
        inner = forks[1].fork(2)
        inner += "#inner" + ul.gen("deep")
        inner.join()
        gate.wait_for(3)
        forks[1].cancel()
        gate.open()
        forks.join()
        s.sync()
        return forks, inner

    state = run(body, echo)
    state.sync()
    forks, inner = state.ret_value
    assert state["answer"] == ["7", "7"]
    for read in (lambda: forks[1]["answer"], lambda: inner[0]["deep"], forks[1].text, inner[1].text):
        with pytest.raises(ul.BranchCancelledError, match="the branch was cancelled"):
            read()
    forks[1].cancel()  # again: nothing
    forks[1].__iadd__("more" + ul.gen("more"))
    with pytest.raises(ul.BranchCancelledError):
        forks[1]["more"]
    assert state.error() is None
    assert forks[0].error() is None


def test_choices_of_a_cancelled_branch_count_as_calls_without_tokens(echo: Echo, gate: Gate) -> None:
    def body(s: State) -> None:
        forks = s.fork(2)
        forks += "#0" + ul.select("x", ["a", "b"]) + ul.select("y", ["a", "b"])
        gate.wait_for(2)
        forks[1].cancel()
        gate.open()
        forks.join()

    state = run(body, echo)
    assert (state.cost.cancelled_calls, state.cost.tokens_saved) == (2, 0)
    assert len(state["y"]) == 1


def test_what_a_branch_had_said_when_it_was_cancelled_stays(gate: Gate) -> None:
    echo = Echo(numbered)

    def body(s: State) -> Any:
        forks = forked(s, 2)
        forks[0].sync()
        forks[0].cancel()
        forks.join("concate_and_append")
        return forks[0]["answer"], forks[0].text()

    state = run(body, echo)
    state.sync()
    assert state.ret_value == ("7", "How many? #07")
    assert state.text() == "How many? #19"


def test_a_join_with_a_quorum_takes_those_that_end_first_and_does_not_wait(echo: Echo, gate: Gate) -> None:
    def body(s: State) -> None:
        forks = forked(s)
        forks.join(quorum=3)
        gate.wait_for(8)  # the join did not wait for them
        gate.step(3)
        assert s["answer"] == ["7", "9", "7"]

    state = run(body, echo)
    assert state.cost.cancelled_calls == 5, "it waits until they have ended"
    assert (len(echo.aborted), echo.active) == (5, set())


def failing(numbers: set[int]) -> Callable[[str], str]:
    def answer(prompt: str) -> str:
        number = int(prompt.rsplit("#", 1)[1])
        if number in numbers:
            raise ValueError(f"branch {number} fails")
        return ANSWERS[number]

    return answer


@pytest.mark.parametrize("quorum", [True, False])
def test_branches_that_fail_do_not_count_while_enough_others_are_left(quorum: bool) -> None:
    def body(s: State) -> Any:
        forks = forked(s, 4)
        if quorum:
            forks.join(quorum=2)
            return s["answer"]
        return sorted(branch["answer"] for branch in forks.first(2))

    state = run(body, Echo(failing({0, 3})))
    state.sync()
    assert state.ret_value == (["9", "7"] if quorum else ["7", "9"])
    with pytest.raises(ValueError, match="branch"):
        run(body, Echo(failing({0, 1, 3}))).sync()


def test_branches_are_told_as_they_end_failed_ones_too(gate: Gate) -> None:
    def body(s: State) -> list[object]:
        forks = forked(s, 3)
        ending = forks.as_completed()
        told = []
        for number in range(3):
            gate.wait_for(3)
            gate.step(1)
            branch = next(ending)
            told.append((branch is forks[number], type(branch.error()).__name__))
        return told

    state = run(body, Echo(failing({1}), gate=gate))
    assert state.ret_value == [(True, "NoneType"), (True, "ValueError"), (True, "NoneType")]


def test_a_rule_that_is_never_true_gives_all_that_ended_well(echo: Echo, gate: Gate) -> None:
    gate.open()
    seen: list[int] = []

    def body(s: State) -> int:
        return len(forked(s).until(lambda ended: seen.append(ended.waiting)))

    assert run(body, echo).ret_value == 8
    assert seen == list(range(7, -1, -1))


def test_time_runs_out_and_no_branch_is_cancelled(echo: Echo, gate: Gate) -> None:
    def body(s: State) -> Any:
        forks = forked(s)
        with pytest.raises(ul.DeadlineError, match="in time"):
            forks.first(1, timeout=0.01)
        gate.open()
        forks.join()
        return s["answer"]

    assert run(body, echo).ret_value == ANSWERS


async def decides_async(ended: Any) -> bool:
    return len(ended) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda forks: forks.first(9), "count=9"),
        (lambda forks: forks.first(0), "count=0"),
        (lambda forks: forks.join(quorum=True), "quorum"),
        (lambda forks: forks.join(quorum=9), "up to 8"),
        (lambda forks: ul.vote("", 3), "name"),
        (lambda forks: ul.vote("answer", 0), "agree=0"),
        (lambda forks: forks.until(ul.vote("answer", agree=9)), "agree=9 is out of range; .* up to 8"),
        (lambda forks: forks.until(None), r"until\(None\) has no rule; write a function"),
        (lambda forks: forks.until(decides_async), "coroutine function in a sync program"),
        (lambda forks: forks.until(lambda ended: decides_async(ended)), "coroutine function in a sync program"),
    ],
)
def test_mistakes_are_named(echo: Echo, gate: Gate, call: Callable[[Any], Any], words: str) -> None:
    gate.open()

    def body(s: State) -> None:
        with pytest.raises(ul.ParameterError, match=words):
            call(forked(s))

    run(body, echo).sync()


def test_async_programs_have_the_same(gate: Gate) -> None:
    echo = Echo(numbered)

    @ul.function
    async def program(s: Any) -> Any:
        s += "How many? "
        forks = s.fork(8)
        forks += lambda index: f"#{index}" + ul.gen("answer", max_tokens=10)
        first = [await branch["answer"] async for branch in forks.as_completed()]

        async def two_sevens(ended: Any) -> bool:
            return [(await branch["answer"]).strip() for branch in ended].count("7") == 2

        ended = await forks.until(two_sevens)
        found = await ul.self_consistency(s, lambda branch, n: branch.__iadd__(f"#{n}" + ul.gen("answer")), agree=3)
        best = await ul.best_of(s, 4, ask_async, score=score_async)
        return sorted(first), len(ended), found.value.strip(), await best["answer"], (await s["answer"]).strip()

    async def ask_async(branch: Any, number: int) -> None:
        branch += f"#{number}" + ul.gen("answer")

    async def score_async(branch: Any) -> float:
        return float(await branch["answer"])

    state = program.run(backend=echo, timeout=PATIENCE)
    assert state.ret_value == (sorted(ANSWERS), 3, "7", "9", "7")


def test_a_traced_program_says_that_a_graph_does_not_know_who_ends_first() -> None:
    @ul.function
    def program(s: State) -> None:
        forked(s).first(2)

    with pytest.raises(ul.TraceError, match="which branches end first"):
        program.trace()


@pytest.mark.parametrize("seed", range(20))
def test_no_other_text_changes_where_branches_are_cancelled_at_random(seed: int) -> None:
    """Texts of branches that are not cancelled are those of a run without cancellations."""
    dice = random.Random(seed)
    size, steps = 10, 3
    doomed = set(dice.sample(range(size), dice.randint(1, 8)))

    def body(s: State) -> Any:
        s += "begin "
        forks = s.fork(size)
        for step in range(steps):
            forks += lambda index, step=step: f"#{index}.{step} " + ul.gen(f"x{step}", max_tokens=8)
            for number in sorted(doomed):
                if dice.random() < 0.5:
                    forks[number].cancel()
        for number in doomed:
            forks[number].cancel()
        forks.join("concate_and_append")
        return [branch.text() for number, branch in enumerate(forks) if number not in doomed]

    gate = Gate()
    echo = Echo(lambda prompt: f"<{prompt[-6:]}>", gate=gate)
    gate.open()
    state = run(body, echo)
    texts = state.ret_value
    plain = [
        "begin " + "".join(said(number, step) for step in range(steps))
        for number in range(size)
        if number not in doomed
    ]
    assert texts == plain
    assert state.text() == "begin " + "".join(text.removeprefix("begin ") for text in plain)
    assert echo.active == set()


def said(number: int, step: int) -> str:
    asked = f"#{number}.{step} "
    before = "" if step else "begin "
    return asked + f"<{(before + said(number, step - 1) + asked if step else before + asked)[-6:]}>"


BRANCHES, LENGTH = 8, 60  # LENGTH: tokens of a text that is not cancelled
ENDLESS = 1500  # tokens of one that is: it has not ended when the cancellation comes, on a busy machine neither


@pytest.fixture(scope="module")
def oracle() -> Iterator[LocalBackend]:
    backend = LocalBackend(seed=5, pool_tokens=4_000)
    yield backend
    streams.run(backend.close())


@ul.function
def tell(s: ul.State, number: int, doomed: dict[int, int]) -> list[str]:
    """Doomed: branch → chunks of its text that are read before it is cancelled."""
    s += f"Story {number}. "
    forks = s.fork(BRANCHES)

    def part(index: int) -> Any:
        length = ENDLESS if index in doomed else LENGTH
        return f"Branch {index}: " + ul.gen("text", max_tokens=length, temperature=0.0, ignore_eos=True)

    forks += part
    for branch, chunks in doomed.items():
        read = forks[branch].text_iter("text")
        for _ in range(chunks):
            next(read, None)
        forks[branch].cancel()
    return [branch["text"] for index, branch in enumerate(forks) if index not in doomed]


def cancellations(programs: int, seed: int) -> list[dict[int, int]]:
    dice = random.Random(seed)
    some = [dice.sample(range(BRANCHES), dice.randint(3, BRANCHES - 1)) for _ in range(programs)]
    return [{branch: dice.randrange(5) for branch in each} for each in some]


@pytest.mark.parametrize(("programs", "calls"), [(4, 10), pytest.param(120, 500, marks=pytest.mark.nightly)])
def test_the_runtime_changes_no_other_text_and_its_pool_is_whole(
    programs: int, calls: int, oracle: LocalBackend
) -> None:
    """At least so many calls are cancelled while they run."""
    doomed = cancellations(programs, seed=programs)
    whole = [{"number": number, "doomed": {}} for number in range(programs)]
    undisturbed = [state.ret_value for state in tell.run_batch(whole, backend=oracle, timeout=20 * PATIENCE)]

    def disturbed(number: int) -> State:
        state = tell.run(number, doomed[number], backend=oracle, stream=True, timeout=20 * PATIENCE)  # texts in chunks
        assert state.usage.calls  # waits for the end of the body
        return state

    with ThreadPoolExecutor(6) as pool:
        states = list(pool.map(disturbed, range(programs)))
    for state, texts, gone in zip(states, undisturbed, doomed, strict=True):
        assert state.ret_value == [text for index, text in enumerate(texts) if index not in gone]
    assert sum(state.cost.cancelled_calls for state in states) >= calls
    assert sum(state.cost.tokens_saved for state in states) > 20 * programs
    status = streams.run(oracle.status())
    assert (status.running, status.waiting) == (0, 0)
    assert status.pool.free + status.pool.cached == status.pool.total


# ---------------------------------------------------------------------------------------- searches


def digits(prompt: str) -> str:
    """The digit after the last '#'."""
    return prompt.rsplit("#", 1)[1][0]


def grow(branch: Any, number: int) -> None:
    branch += f" #{number}" + ul.gen(f"digit{number}", max_tokens=2)


def total(branch: Any) -> int:
    return sum(int(word[1]) for word in branch.text().split())


def test_a_beam_keeps_the_best_states_of_each_level() -> None:
    calls = Echo(digits)
    best = run(lambda s: ul.beam_search(s, grow, total, width=2, depth=3, branches=3).text(), calls).ret_value
    assert best == " #22 #22 #22"
    assert calls.calls == 3 + 6 + 6


def test_a_beam_ends_when_the_best_is_done_or_its_tokens_are_spent() -> None:
    echo = Echo(digits)
    body = lambda s: ul.beam_search(  # noqa: E731
        s, grow, total, width=2, depth=9, branches=2, done=lambda branch: total(branch) >= 2
    ).text()
    assert run(body, echo).ret_value == " #11 #11"
    spent = Echo(digits)
    run(lambda s: ul.beam_search(s, grow, total, width=1, depth=9, branches=2, tokens=1), spent).sync()
    assert spent.calls == 2


def test_a_tree_is_searched_from_its_best_state() -> None:
    echo = Echo(digits)

    def body(s: State) -> str:
        found = ul.tree_search(
            s, grow, total, branches=2, expansions=10, done=lambda branch: branch.text().count("#1") == 3
        )
        return found.text()

    assert run(body, echo).ret_value == " #11 #11 #11"
    assert echo.calls == 6
    shallow = Echo(digits)
    run(lambda s: ul.tree_search(s, grow, total, branches=2, expansions=10, depth=2), shallow).sync()
    assert shallow.calls == 2 + 2 * 2


def test_answers_that_cannot_be_hashed_vote() -> None:
    def body(s: State) -> Any:
        def ask(branch: Any, number: int) -> None:
            branch += f" #{number}" + ul.gen("answer", dtype=tuple[list[int], int])

        return ul.self_consistency(s, ask, branches=3)

    majority = run(body, Echo(lambda prompt: "[[1], 2]")).ret_value
    assert (majority.value, majority.votes) == (([1], 2), {"([1], 2)": 2})


def test_a_branch_that_failed_was_not_cancelled() -> None:
    def body(s: State) -> Any:
        def ask(branch: Any, number: int) -> None:
            branch += f" #{number}" + ul.gen("answer", **({"dtype": int, "max_tries": 1} if number == 0 else {}))

        return ul.self_consistency(s, ask, branches=3, agree=2)

    majority = run(body, Echo(lambda prompt: "x")).ret_value
    assert (majority.ended, majority.cancelled) == (2, 0)


def test_more_branches_than_there_are_cannot_agree() -> None:
    def body(s: State) -> None:
        with pytest.raises(ul.ParameterError, match="agree=5 is out of range; write a number of branches, up to 3"):
            ul.self_consistency(s, grow, "digit0", branches=3, agree=5)
        with pytest.raises(ul.ParameterError, match="branches=0"):
            ul.self_consistency(s, grow, "digit0", branches=0)

    run(body, Echo(digits)).sync()


def test_a_search_takes_whatever_is_a_number() -> None:
    def body(s: State) -> None:
        for kind in (np.float32, np.int64, Fraction, Decimal, np.asarray):
            best = ul.best_of(s, 2, grow, score=lambda branch, kind=kind: kind(total(branch)))
            assert best["digit1"].strip() == "1"
        with pytest.raises(ul.ParameterError, match="return a number that a float holds"):
            ul.best_of(s, 2, grow, score=lambda branch: 10**400)
        for score in (True, np.str_("1"), np.asarray([1, 2])):
            with pytest.raises(ul.ParameterError, match="score returned"):
                ul.best_of(s, 2, grow, score=lambda branch, score=score: score)

    run(body, Echo(digits)).sync()


def test_the_tokens_of_a_search_are_a_number() -> None:
    def body(s: State) -> None:
        for wrong in ("many", -1, 1.5):
            with pytest.raises(ul.ParameterError, match="tokens"):
                ul.beam_search(s, grow, total, width=1, depth=2, branches=2, tokens=wrong)  # type: ignore[arg-type]
            with pytest.raises(ul.ParameterError, match="tokens"):
                ul.tree_search(s, grow, total, branches=2, expansions=2, tokens=wrong)  # type: ignore[arg-type]
        assert ul.tree_search(s, grow, total, branches=2, expansions=2, tokens=0) is s

    run(body, Echo(digits)).sync()


def test_a_search_refuses_scores_that_are_none_and_coroutines_in_sync_programs() -> None:
    async def ask(branch: Any, number: int) -> None:
        grow(branch, number)

    def body(s: State) -> None:
        for score in (lambda branch: "7", lambda branch: float("nan"), lambda branch: None):
            with pytest.raises(ul.ParameterError, match="score returned"):
                ul.best_of(s, 2, grow, score=score)
        with pytest.raises(ul.ParameterError, match="coroutine"):
            ul.best_of(s, 2, ask, score=total)
        for sizes in ({"width": 0, "depth": 1, "branches": 1}, {"width": 1, "depth": 0, "branches": 1}):
            with pytest.raises(ul.ParameterError, match="=0"):
                ul.beam_search(s, grow, total, **sizes)

    run(body, Echo(digits)).sync()
