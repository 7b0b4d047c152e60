"""Batches of compiled programs: the head they share is computed once and kept, and their memory is planned."""

from collections.abc import Iterator
from typing import Any

import pytest
from umbel.compiler.program import function
from umbel.compiler.running.compiled import CompiledProgram
from umbel.compiler.shared_prefix import BatchPlan
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.batch import Failure
from umbel.interpreter.body import run_options
from umbel.interpreter.run import get_server_info
from umbel.lang.errors import CapabilityError
from umbel.lang.generation import gen
from umbel.lang.prompt import Text
from umbel.lang.protocol import GenRequest, Hint
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend

RULES = "Answer in one word. Be brief, be kind, be right, and do not explain. " * 2
SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
QUESTIONS = [{"question": f"What is number {number}?", "style": "terse"} for number in range(12)]


@function
def ask(s: Any, question: str, style: str = "plain") -> None:
    s += RULES
    s += f"Style: {style}. Question: {question}"
    s += gen("answer", max_tokens=60)


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    return ask.compile()


@pytest.fixture
def small() -> Iterator[LocalBackend]:
    """A pool for about three of these programs at once."""
    backend = LocalBackend(pool_tokens=420, chunk_size=64)
    yield backend
    loop.streams.run(backend.close())


def answers(states: list[Any]) -> list[str]:
    return [state["answer"] for state in states]


def pinned_prompts(echo: Echo) -> list[tuple[Any, ...]]:
    return [hint.prompt for hint in echo.requests if isinstance(hint, Hint) and hint.pin is not None]


def sent(echo: Echo) -> list[GenRequest]:
    return [request for request in echo.requests if isinstance(request, GenRequest)]


# -------------------------------------------------------------------------------- the head


def test_the_head_of_a_batch_has_the_arguments_that_are_the_same_in_all(compiled: CompiledProgram) -> None:
    echo = Echo(lambda _: "yes")
    compiled.run_batch(QUESTIONS, backend=echo)
    assert pinned_prompts(echo) == [(Text(RULES + "Style: terse. Question: "),)]


def test_without_knowing_all_items_the_head_is_what_is_constant(compiled: CompiledProgram) -> None:
    echo = Echo(lambda _: "yes")
    list(compiled.run_batch(iter(QUESTIONS), generator_style=True, backend=echo))
    assert pinned_prompts(echo) == [(Text(RULES + "Style: "),)]


def test_the_switch_leaves_the_calls_as_they_are(compiled: CompiledProgram) -> None:
    with_, without = Echo(lambda _: "yes"), Echo(lambda _: "yes")
    one = compiled.run_batch(QUESTIONS, backend=with_, salt="s")
    other = compiled.run_batch(QUESTIONS, backend=without, salt="s", pin_head=False)
    assert answers(one) == answers(other)
    assert {request.prompt for request in sent(with_)} == {request.prompt for request in sent(without)}
    assert len(sent(with_)) == len(sent(without)) == len(QUESTIONS)
    assert pinned_prompts(without) == []
    assert next(hint for hint in with_.requests if isinstance(hint, Hint)).origin.salt == "s"


def test_the_pin_ends_with_the_batch(compiled: CompiledProgram, small: LocalBackend) -> None:
    states = compiled.run_batch(QUESTIONS[:3], backend=small, **SAMPLING)
    assert len(states) == 3
    counters = get_server_info(small)
    assert (counters["pins_placed"], counters["pins_released"], counters["pinned_slots"]) == (1, 1, 0)


def test_the_pin_ends_with_a_batch_that_is_left_early(compiled: CompiledProgram, small: LocalBackend) -> None:
    batch = compiled.run_batch(QUESTIONS, backend=small, generator_style=True, num_threads=2, **SAMPLING)
    next(batch)
    batch.close()  # type: ignore[attr-defined]  # it is a generator
    assert get_server_info(small)["pins"] == 0


def test_a_pinned_head_is_computed_once_whatever_else_fills_the_pool(compiled: CompiledProgram) -> None:
    """One program at a time, and a flood before each."""

    async def flood(backend: LocalBackend, round_: int) -> None:
        for number in range(4):
            text = Text(f"{round_}.{number} is something else. " + "pack my box with five dozen jugs " * 8)
            request = GenRequest(f"flood-{round_}-{number}", (text,), SamplingParams(max_tokens=1, temperature=0))
            _ = [event async for event in backend.generate(request)]

    def items(backend: LocalBackend) -> Iterator[dict[str, str]]:
        for number, item in enumerate(QUESTIONS[:4]):
            loop.streams.run(flood(backend, number))
            yield item

    cached = {}
    for pin_head in (True, False):
        backend = LocalBackend(pool_tokens=420, chunk_size=64)
        states = compiled.run_batch(
            items(backend), backend=backend, generator_style=True, num_threads=1, pin_head=pin_head, **SAMPLING
        )
        cached[pin_head] = [state.get_meta_info("answer")["cached_tokens"] for state in states]
        loop.streams.run(backend.close())
    assert min(cached[True][1:]) > 100 > cached[True][0], "the first one has it computed"
    assert max(cached[False][1:]) < 10


def test_a_backend_that_cannot_start_fails_every_program_and_not_the_batch(compiled: CompiledProgram) -> None:
    class Broken(Echo):
        async def start(self) -> None:
            raise CapabilityError("no start today")

    results = compiled.run_batch(QUESTIONS[:2], backend=Broken(lambda _: "yes"), on_error="return")
    assert all(isinstance(result, Failure) and "no start today" in str(result.error) for result in results)


# -------------------------------------------------------------------------------- memory


def test_planned_programs_are_never_sent_back(compiled: CompiledProgram) -> None:
    """A pool for three programs at their longest, and twelve of them: unplanned ones are admitted while they are short,
    and sent back when they have grown."""
    measured = {}
    for planned in (False, True):
        backend = LocalBackend(pool_tokens=420, chunk_size=64)
        states = compiled.run_batch(QUESTIONS, backend=backend, plan_memory=planned, pin_head=False, **SAMPLING)
        texts = answers(states)
        info = get_server_info(backend)
        measured[planned] = (texts, info["retractions"], info["recomputed_tokens"])
        loop.streams.run(backend.close())
    (texts, retractions, _), (same, none, recomputed) = measured[False], measured[True]
    assert same == texts
    assert retractions > 0
    assert (none, recomputed) == (0, 0)


def test_programs_start_in_order_and_one_alone_always(compiled: CompiledProgram, small: LocalBackend) -> None:
    plan = BatchPlan(
        compiled.graph, run_options({"backend": small}), {"style": "plain"}, pin_head=False, plan_memory=True
    )
    signature = compiled._arguments
    call, huge = (signature.bind((), {"question": text}) for text in ("short?", "long? " * 100))
    plan.begin(None)
    assert plan.admits(0, huge)  # alone
    assert not plan.admits(1, call)
    assert not plan.admits(1, call)
    plan.leaves(0)
    assert plan.admits(1, call)
    assert plan.admits(2, call)
    assert not plan.admits(3, huge)
    assert (plan.waited, plan.most_tokens > 420) == (2, True)
    plan.end()


def test_a_batch_that_shares_its_head_counts_it_once(compiled: CompiledProgram, small: LocalBackend) -> None:
    plan = BatchPlan(compiled.graph, run_options({"backend": small}), {}, pin_head=False, plan_memory=True)
    calls = [compiled._arguments.bind((), item) for item in QUESTIONS]
    plan.begin(calls)
    admitted = sum(plan.admits(index, call) for index, call in enumerate(calls))
    assert admitted == 3
    assert plan.most_tokens <= 420
    plan.end()


def test_a_backend_without_a_pool_says_so(compiled: CompiledProgram) -> None:
    with pytest.raises(CapabilityError, match="leave out plan_memory=True"):
        compiled.run_batch(QUESTIONS, backend=Echo(lambda _: "yes"), plan_memory=True)
