"""A tour of the whole system in one file: read it from top to bottom, run it in seconds.

Programs run through interpreter, gateway, scheduler, radix tree and the oracle model, whose KV cache holds the
tokens themselves and which fails loudly when a request is given a key that is not its own.
"""

import asyncio
from collections.abc import Iterator

import pytest
import umbel as ul
from umbel.srt.in_process import LocalBackend


@pytest.fixture
def runtime() -> Iterator[LocalBackend]:
    backend = LocalBackend(seed=1)
    with ul.default_backend(backend):
        yield backend


def counters(runtime: LocalBackend) -> dict[str, float]:
    return runtime.engine.scheduler.counters


# ------------------------------------------------------------------------------------- one program


@ul.function
def answer(s, question, words=8):
    s += "Q: " + question + "\nA:"
    s += ul.gen("answer", max_tokens=words, temperature=0)
    return s["answer"]


def test_a_program_is_a_function_whose_variables_are_generated(runtime: LocalBackend) -> None:
    state = answer.run(question="what is an umbel?")
    assert state.ret_value == state["answer"]
    assert state.text() == "Q: what is an umbel?\nA:" + state["answer"]
    assert state.usage.completion_tokens == 8


def test_the_same_question_costs_one_token_the_second_time(runtime: LocalBackend) -> None:
    first = answer.run(question="again?").get_meta_info("answer")
    second = answer.run(question="again?").get_meta_info("answer")
    assert second["cached_tokens"] == second["prompt_tokens"] - 1 == first["prompt_tokens"] - 1
    ul.flush_cache()
    assert answer.run(question="again?").get_meta_info("answer")["cached_tokens"] == 0


def test_a_prefix_is_shared_to_the_exact_token(runtime: LocalBackend) -> None:
    @ul.function
    def ask(s, text):
        s += text + ul.gen("x", max_tokens=1)

    shared = "0123456789abcdef"  # 16 tokens, and the BOS before them
    ask.run(text=shared + "X tail").sync()
    assert ask.run(text=shared + "Y tail").get_meta_info("x")["cached_tokens"] == 17


# ------------------------------------------------------------------------------------- branches


@ul.function
def judge(s, essay):
    s += "You grade essays.\nEssay: " + essay
    s += "\nIs it about a city?" + ul.select("related", choices=[" yes", " no"])
    forks = s.fork(3)
    forks += lambda i: "\nIts " + ["clarity", "originality", "evidence"][i] + ":" + ul.gen("judgment", max_tokens=6)
    s += "\nJudgments:" + ";".join(branch["judgment"] for branch in forks)
    s += "\nSummary:" + ul.gen("summary", max_tokens=6)


def test_branch_solve_merge(runtime: LocalBackend) -> None:
    state = judge.run(essay="Venice is sinking by two millimetres a year.")
    assert state["related"] in (" yes", " no")
    assert set(state.get_meta_info("related")["choice_scores"]) == {" yes", " no"}
    assert len(state["summary"]) > 0
    assert state.usage.calls == 5


def test_a_fork_computes_every_token_of_the_tree_once(runtime: LocalBackend) -> None:
    @ul.function
    def fan(s):
        s += "A prefix that eight branches share, and that is computed for all of them at once. "
        branches = s.fork(8)
        branches += lambda i: f"Branch number {i}:" + ul.gen("x", max_tokens=1)
        branches.join()

    state = fan.run()
    assert len(state["x"]) == 8
    # With one generated token per branch no key of a generated token exists: the tree holds prompts only.
    assert counters(runtime)["computed_prompt_tokens"] == runtime.engine.scheduler.kv.cache.total_tokens


def test_join_keeps_branches_aligned(runtime: LocalBackend) -> None:
    @ul.function
    def uneven(s):
        s += "x"
        with s.fork(3) as branches:
            branches[0] += ul.gen("a", max_tokens=2)
            branches[2] += ul.gen("a", max_tokens=2)

    first, second, third = uneven.run()["a"]
    assert second is None
    assert first == third


# ------------------------------------------------------------------------------------- many programs


def test_a_batch_keeps_what_is_finished_when_one_program_fails(runtime: LocalBackend) -> None:
    @ul.function
    def risky(s, n):
        s += f"number {n}:" + ul.gen("x", max_tokens=2)
        if n == 3:
            raise RuntimeError("three")

    results = risky.run_batch([{"n": n} for n in range(6)], on_error="return")
    assert [isinstance(result, ul.Failure) for result in results] == [False, False, False, True, False, False]
    assert str(results[3].error) == "three"


def test_async_programs_await_their_variables(runtime: LocalBackend) -> None:
    @ul.function
    async def ask(s, n):
        s += f"number {n}:" + ul.gen("x", max_tokens=3, temperature=0)
        return await s["x"]

    async def all_of_them() -> list[str]:
        return [state.ret_value for state in await asyncio.gather(*(ask.run_async(n=n % 5) for n in range(50)))]

    answers = asyncio.run(all_of_them())
    assert answers[:5] * 10 == answers


def test_streams_give_the_same_text_to_every_reader(runtime: LocalBackend) -> None:
    @ul.function
    def talk(s):
        s += "one " + ul.gen("a", max_tokens=5) + " two " + ul.gen("b", max_tokens=5)

    state = talk.run(stream=True)
    everything = "".join(state.text_iter())
    assert "".join(state.text_iter("b")) == state["b"]
    assert everything == "".join(state.text_iter()) == state.text()


# ------------------------------------------------------------------------------------- what goes wrong


def test_what_cannot_be_done_is_said_at_the_line_that_asks_for_it(runtime: LocalBackend) -> None:
    with pytest.raises(ul.ParameterError, match="did you mean 'temperature'"):
        ul.gen("x", temprature=0)
    with pytest.raises(ul.RequestError, match="context"):
        _ = answer.run(question="x" * 100_000)["answer"]
    with pytest.raises(ul.VariableError, match="did you mean 'answer'"):
        _ = answer.run(question="?")["answr"]


def test_the_integrity_of_pool_and_tree_was_checked_after_every_step(runtime: LocalBackend) -> None:
    judge.run(essay="short").sync()
    assert runtime.engine.scheduler.config.check_every_step
    runtime.engine.scheduler.check()
    assert counters(runtime)["integrity_failures"] == 0
