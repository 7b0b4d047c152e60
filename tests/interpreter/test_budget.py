"""Budgets: no call begins that could go beyond one; what was generated before stays readable."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import umbel as ul
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.echo import Echo, FailCall, Gate
from umbel.interpreter.budget import Allowance, charge_at_most
from umbel.lang.protocol import Capabilities, Chunk, Final, GenRequest

from .conftest import PATIENCE

HOSTED = Capabilities("shop small", score=True, logprobs=True, stop_regex=True, model="shop-small")


class Shop(Echo):
    """A hosted model: its calls have a price. Remembers how many were in flight at once."""

    def __init__(self, script: object = None, **options: object) -> None:
        super().__init__(script, **({"capabilities": HOSTED} | options))  # type: ignore[arg-type]
        self.most_active = 0

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        self.most_active = max(self.most_active, len(self.active) + 1)
        async for event in super().generate(request):
            yield event


@pytest.fixture
def shop_price() -> object:
    ul.prices["shop-small"] = ul.Price(1.0, 10.0, cached_input=0.5)
    yield ul.prices["shop-small"]
    del ul.prices["shop-small"]


def refusal(state: ul.State) -> str:
    """What the budget said, when all branches have ended."""
    state._sink.run.wait_finished()  # type: ignore[attr-defined]
    with pytest.raises(ul.BudgetError) as caught:
        state.sync()
    return str(caught.value)


@ul.function
def branches(s, count, tokens):
    s += "one two three"
    forks = s.fork(count)
    forks += ul.gen("x", max_tokens=tokens)
    forks.join()


@ul.function
def twice(s):
    s += "one two" + ul.gen("a", max_tokens=4) + " three" + ul.gen("b", max_tokens=4)


def test_a_call_that_does_not_fit_is_not_made_and_the_error_says_what_would() -> None:
    echo = Echo(["1 2 3", "4"])
    state = twice.run(backend=echo, budget=ul.Budget(tokens=11), timeout=PATIENCE)
    # The first call took 5 of 11 tokens. The second has a prompt of 2 + 3 + 1.
    assert refusal(state) == (
        "a call that may take 10 tokens (at most 6 of its prompt, 4 generated) does not fit the 6 left of "
        "Budget(tokens=11); raise tokens to 15, or lower max_tokens"
    )
    assert state["a"] == "1 2 3"
    assert echo.calls == 1
    assert state.usage.total_tokens == 5
    assert twice.run(backend=Echo(["1 2 3", "4"]), budget=ul.Budget(tokens=15))["b"] == "4"


def test_a_thousand_tokens_over_eight_forks_are_never_exceeded() -> None:
    echo = Echo(lambda prompt: "word " * 200)
    state = branches.run(8, 190, backend=echo, budget=ul.Budget(tokens=1000), timeout=PATIENCE)
    assert "may take 193 tokens" in refusal(state)
    assert echo.calls == 5
    assert state.usage.total_tokens == 5 * (3 + 190)


def test_calls_wait_for_those_in_flight_which_cost_less_than_they_hold() -> None:
    shop = Shop(lambda prompt: "short", delay=1.0, sleep=lambda _: asyncio.sleep(0))  # a turn of the loop
    state = branches.run(8, 100, backend=shop, budget=ul.Budget(tokens=230), timeout=PATIENCE)
    assert state["x"] == ["short"] * 8
    assert shop.most_active == 2
    assert state.usage.total_tokens == 8 * 4


def test_calls_that_wait_go_on_in_the_order_in_which_they_came() -> None:
    echo = Echo(lambda prompt: "short")

    @ul.function
    def widths(s):
        forks = s.fork(4)
        for index, tokens in enumerate((60, 90, 20, 50)):
            forks[index] += f"{index}" + ul.gen("x", max_tokens=tokens)
        forks.join()

    widths.run(backend=echo, budget=ul.Budget(tokens=110), timeout=PATIENCE).sync()
    assert [request.sampling.max_tokens for request in echo.requests if isinstance(request, GenRequest)] == [
        60,
        90,
        20,
        50,
    ]


def test_the_number_of_calls_is_limited() -> None:
    echo = Echo()
    state = branches.run(8, 5, backend=echo, budget=ul.Budget(calls=3), timeout=PATIENCE)
    assert refusal(state) == "3 calls have been made, and one more does not fit Budget(calls=3); raise calls to 4"
    assert echo.calls == 3


def test_choices_count_with_their_prompt() -> None:
    @ul.function
    def choose(s):
        s += "one two" + ul.select("x", ["yes", "no"])

    assert choose.run(backend=Echo(), budget=ul.Budget(tokens=4), timeout=PATIENCE)["x"] in ("yes", "no")
    with pytest.raises(ul.BudgetError, match="may take 4 tokens"):
        choose.run(backend=Echo(), budget=ul.Budget(tokens=3), timeout=PATIENCE).sync()


def test_a_hosted_model_may_read_the_prompt_for_every_choice_and_for_none() -> None:
    shop = Shop()

    @ul.function
    def choose(s):
        s += "one two" + ul.select("x", ["yes", "no"], method="unconditional_likelihood_normalized")

    with pytest.raises(ul.BudgetError, match="at most 12 of its prompt, 4 generated"):
        choose.run(backend=shop, budget=ul.Budget(tokens=10), timeout=PATIENCE).sync()
    with pytest.raises(ul.BudgetError, match="0 calls have been made, and 2 more do not fit"):
        choose.run(backend=shop, budget=ul.Budget(calls=1), timeout=PATIENCE).sync()


def test_dollars_are_those_of_the_price_table(shop_price: ul.Price) -> None:
    shop = Shop(lambda prompt: "word " * 100)
    # A call: 3 tokens of prompt at $1 and 97 generated ones at $10 for a million.
    state = branches.run(8, 97, backend=shop, budget=ul.Budget(dollars=0.003), timeout=PATIENCE)
    said = refusal(state)
    # What is reported counts cached tokens at their own price: 2 of 3 from the second call on.
    assert state.cost.dollars == pytest.approx(3 * 0.000973 - 2 * 2 * 0.5e-6)
    assert said.startswith(
        "a call that may cost $0.000973 (at most 3 tokens of its prompt, 97 generated) does not fit the $0.000083 left "
        "of Budget(dollars=0.003); raise dollars to 0.0038"
    )
    assert shop.calls == 3


def test_dollars_need_a_price_before_any_call() -> None:
    shop = Shop()
    with pytest.raises(ul.BudgetError, match=r"write umbel.prices\['shop-small'\] = umbel.Price\(input, output\)"):
        twice.run(backend=shop, budget=ul.Budget(dollars=1), timeout=PATIENCE).sync()
    assert shop.calls == 0
    assert twice.run(backend=shop, timeout=PATIENCE).cost.dollars in (0.0, None)


def test_a_model_that_runs_here_costs_nothing(echo: Echo) -> None:
    state = twice.run(backend=echo, budget=ul.Budget(dollars=1e-9), timeout=PATIENCE)
    state.sync()
    assert state.cost.dollars == 0


def test_seconds_end_a_run_with_the_budgets_own_error() -> None:
    gate = Gate()
    state = twice.run(backend=Echo(gate=gate), budget=ul.Budget(seconds=1e-6), timeout=PATIENCE)
    with pytest.raises(ul.BudgetError, match=r"within the seconds of its Budget\(seconds=1e-06\)"):
        state.sync()
    with pytest.raises(ul.BudgetError):
        state["a"]
    late = twice.run(backend=Echo(gate=gate), budget=ul.Budget(seconds=PATIENCE), timeout=1e-6)
    with pytest.raises(ul.DeadlineError):
        late.sync()


def test_seconds_end_async_bodies_too() -> None:
    gate = Gate()

    @ul.function
    async def waits(s):
        s += ul.gen("a")
        await s["a"]

    async def main() -> None:
        with pytest.raises(ul.BudgetError, match="seconds"):
            await waits.run_async(backend=Echo(gate=gate), budget=ul.Budget(seconds=1e-6), timeout=PATIENCE)

    asyncio.run(main())


def test_an_error_of_the_backend_at_the_deadline_is_the_budgets() -> None:
    """Backends are told how many seconds are left, and may ring first."""

    class Late(Echo):
        async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
            await asyncio.Event().wait() if request.origin.timeout else None
            raise ul.DeadlineError("too late")
            yield

    state = twice.run(backend=Late(), budget=ul.Budget(seconds=1e-6), timeout=PATIENCE)
    with pytest.raises(ul.BudgetError):
        state.sync()


def test_what_a_body_had_generated_is_read_from_the_error() -> None:
    @ul.function
    def asks(s):
        for index in range(5):
            s += f"{index}" + ul.gen(f"x{index}", max_tokens=3)
            s[f"x{index}"]

    with pytest.raises(ul.BudgetError) as caught:
        asks.run(backend=Echo(lambda prompt: "ja"), budget=ul.Budget(calls=2), timeout=PATIENCE)
    assert isinstance(caught.value.state, ul.State)
    assert caught.value.state["x0"] == caught.value.state["x1"] == "ja"


def test_other_branches_go_on_when_one_has_no_room() -> None:
    @ul.function
    def uneven(s):
        forks = s.fork(2)
        forks[0] += "a" + ul.gen("x", max_tokens=500)
        forks[1] += "b" + ul.gen("x", max_tokens=5)
        s["answers"] = forks
        return forks

    state = uneven.run(backend=Echo(lambda prompt: "ja"), budget=ul.Budget(tokens=100), timeout=PATIENCE)
    with pytest.raises(ul.BudgetError):
        state.ret_value[0]["x"]
    assert state.ret_value[1]["x"] == "ja"


def test_the_budget_of_a_batch_is_for_all_of_it() -> None:
    echo = Echo(lambda prompt: "ja")
    results = branches.run_batch(
        [(1, 5)] * 6, backend=echo, budget=ul.Budget(calls=4), on_error="return", timeout=PATIENCE
    )
    failed = [result for result in results if isinstance(result, ul.Failure)]
    assert len(failed) == 2
    assert all(isinstance(failure.error, ul.BudgetError) for failure in failed)
    assert echo.calls == 4
    states = [result for result in results if isinstance(result, ul.State)]
    assert sum((state.cost for state in states), ul.Cost()).usage.calls == 4


def test_programs_on_many_threads_share_one_budget() -> None:
    @ul.function
    def chain(s, x):
        s += f"number {x}"
        for index in range(3):
            s += ul.gen(f"x{index}", max_tokens=20)
            s[f"x{index}"]

    echo = Echo(lambda prompt: " w" * (len(prompt) % 23), delay=1.0, sleep=lambda _: asyncio.sleep(0))
    budget = ul.Budget(tokens=2000)
    results = chain.run_batch(
        [(x,) for x in range(100)], backend=echo, num_threads=64, budget=budget, on_error="return", timeout=PATIENCE
    )
    states = [result.state if isinstance(result, ul.Failure) else result for result in results]
    spent = sum((state.cost for state in states), ul.Cost()).usage.total_tokens
    assert 1900 < spent <= 2000


def test_the_seconds_of_a_batch_are_for_all_of_it() -> None:
    budget = ul.Budget(seconds=1e-6)
    results = branches.run_batch([(1, 5)] * 3, backend=Echo(gate=Gate()), budget=budget, on_error="return")
    assert all(isinstance(result, ul.Failure) and isinstance(result.error, ul.BudgetError) for result in results)


def test_the_same_budget_for_two_runs_is_for_each(echo: Echo) -> None:
    budget = ul.Budget(calls=1)
    for _ in range(2):
        branches.run(1, 5, backend=echo, budget=budget, timeout=PATIENCE).sync()


def test_calls_that_fail_before_their_first_token_are_not_charged() -> None:
    echo = Echo(lambda prompt: "ja", faults=FailCall(1, ul.OverloadedError("busy")))

    @ul.function
    def tries(s):
        for _ in range(2):
            branch = s.copy()
            branch += "q" + ul.gen("x", max_tokens=9)
            error = branch.error()
        return error

    assert tries.run(backend=echo, budget=ul.Budget(tokens=10, calls=1), timeout=PATIENCE).ret_value is None


def test_calls_that_fail_later_are_charged_what_came() -> None:
    echo = Echo(lambda prompt: "a b c d", faults=FailCall(4, ul.ConnectionLostError("gone"), verbs=["chunk"]))

    @ul.function
    def tries(s):
        errors = []
        for _ in range(2):
            branch = s.copy()
            assert list(branch.text_iter()) == []  # someone reads pieces, so the call is streamed
            branch += "q" + ul.gen("x", max_tokens=9)
            errors.append(branch.error())
        return errors

    state = tries.run(backend=echo, budget=ul.Budget(tokens=13), timeout=PATIENCE)
    first, second = state.ret_value
    assert isinstance(first, ul.ConnectionLostError)
    assert "does not fit the 9 left" in str(second)
    assert state.usage == ul.Usage()


def test_cancelled_calls_and_those_that_wait_give_back_what_they_held() -> None:
    gate = Gate()
    echo = Echo(lambda prompt: "ja", gate=gate)
    gate_of_body = threading.Event()

    @ul.function
    def slow(s, x):
        s += x + ul.gen("a", max_tokens=9)
        if x == "waits":
            gate_of_body.set()

    outcomes = slow.run_batch(
        [("runs",), ("waits",)], backend=echo, budget=ul.Budget(tokens=12), generator_style=True, timeout=PATIENCE
    )
    reader = threading.Thread(target=lambda: next(outcomes))
    reader.start()
    gate.wait_for(1)
    assert gate_of_body.wait(PATIENCE)
    gate.step()  # the first one ends, and the second one comes to the gate
    reader.join(PATIENCE)
    gate.wait_for(2)
    outcomes.close()
    assert gate.arrived == 2


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({}, r"Budget\(\) limits nothing"),
        ({"tokens": 0}, r"tokens=0 is out of range; write an integer from 1 to"),
        ({"tokens": 1.5}, r"tokens=1.5"),
        ({"calls": True}, r"calls=True"),
        ({"dollars": 0}, r"dollars=0 is out of range; write a number above 0"),
        ({"dollars": float("nan")}, r"dollars=nan"),
        ({"seconds": "1"}, r"seconds='1'"),
    ],
)
def test_a_wrong_limit_says_what_to_write(limits: dict[str, object], problem: str) -> None:
    with pytest.raises(ul.ParameterError, match=problem):
        ul.Budget(**limits)  # type: ignore[arg-type]


def test_a_budget_is_given_as_one(echo: Echo) -> None:
    with pytest.raises(ul.ParameterError, match=r"budget=100; write umbel.Budget\(tokens=10_000\)"):
        twice.run(backend=echo, budget=100)
    assert str(replace(ul.Budget(tokens=5), calls=2)) == "Budget(tokens=5, calls=2)"


def test_a_program_with_a_parameter_of_that_name_gets_its_own(echo: Echo) -> None:
    @ul.function
    def trip(s, budget):
        s += f"a trip for {budget}" + ul.gen("x")
        return budget

    state = trip.run(budget=500, sampling={"budget": ul.Budget(calls=1)}, backend=echo, timeout=PATIENCE)
    assert state.ret_value == 500


# A program: operations in order. A number generates at most so many tokens, a text is said, a tuple of choices is
# chosen from, and a list is a fork with a program for every branch.
PROGRAMS = st.recursive(
    st.one_of(st.integers(1, 40), st.text("ab ", min_size=1, max_size=8), st.just(("yes", "no no", "maybe"))).map(
        lambda op: [op]
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map(lambda parts: [op for part in parts for op in part]),
        st.lists(inner, min_size=1, max_size=4).map(lambda branches: [branches]),
    ),
    max_leaves=12,
)


@ul.function
def random_program(s, operations):
    def say(state, operations):
        for operation in operations:
            match operation:
                case str():
                    state += operation
                case int():
                    state += ul.gen(max_tokens=operation)
                case tuple():
                    state += ul.select(choices=operation)
                case list():
                    forks = state.fork(len(operation))
                    for branch, inner in zip(forks, operation, strict=True):
                        say(branch, inner)
                    forks.join("concate_and_append")

    say(s, operations)


@settings(max_examples=60, deadline=None)
@given(
    program=PROGRAMS,
    words=st.integers(1, 50),
    tokens=st.none() | st.integers(1, 300),
    calls=st.none() | st.integers(1, 8),
    nanodollars=st.none() | st.integers(1, 3000),
    copies=st.integers(1, 3),
)
def test_whatever_runs_no_limit_is_passed(
    program: list[object],
    words: int,
    tokens: int | None,
    calls: int | None,
    nanodollars: int | None,
    copies: int,
) -> None:
    assume(tokens or calls or nanodollars)
    budget = ul.Budget(tokens, calls, nanodollars and nanodollars / 1e6)
    answers = [(index * 7) % words for index in range(200)]  # of various lengths, the same ones in every order
    shop = Shop([" word" * answer for answer in answers], delay=1.0, sleep=lambda _: asyncio.sleep(0))
    ul.prices["shop-small"] = ul.Price(1.0, 10.0, cached_input=0.5)
    results = random_program.run_batch(
        [(program,)] * copies, backend=shop, budget=budget, on_error="return", timeout=PATIENCE
    )
    states = [result.state if isinstance(result, ul.Failure) else result for result in results]
    cost = sum((state.cost for state in states), ul.Cost())
    assert tokens is None or cost.usage.total_tokens <= tokens
    assert calls is None or cost.usage.calls == shop.calls <= calls
    assert cost.dollars is not None
    assert budget.dollars is None or cost.dollars <= budget.dollars * (1 + 1e-9)
    for result in results:
        assert not isinstance(result, ul.Failure) or isinstance(result.error, ul.BudgetError)
    assert not shop.active


@settings(max_examples=100, deadline=None)
@given(limit=st.integers(1, 1000), prompt=st.integers(0, 300), data=st.data())
def test_what_is_affordable_fits_and_one_more_does_not(limit: int, prompt: int, data: st.DataObject) -> None:
    price = ul.Price(data.draw(st.sampled_from([0.0, 0.1, 2.5])), data.draw(st.sampled_from([0.4, 10.0])))
    budget = data.draw(st.sampled_from([ul.Budget(tokens=limit), ul.Budget(dollars=limit / 1e5)]))
    allowance = Allowance(budget)
    affordable = allowance.affordable(prompt, price)
    assert affordable is not None

    async def fits(generated: int) -> bool:
        try:
            await Allowance(budget).reserve(charge_at_most(prompt, generated, 1, price))
        except ul.BudgetError:
            return False
        return True

    assert affordable == 0 or asyncio.run(fits(affordable))
    assert not asyncio.run(fits(affordable + 1))
