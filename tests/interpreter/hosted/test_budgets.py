"""Budgets against providers that count for themselves: what the server counted never passes a limit."""

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai")
pytest.importorskip("h11")

from umbel.testing import FakeOpenAI, Fault

PATIENCE = 20.0

# Turns: what the user says, and what is generated: with text of the assistant's own around it, or without.
TURNS = st.lists(
    st.tuples(st.text("ab é", max_size=12), st.text("xy ", max_size=6), st.integers(1, 30), st.booleans()),
    min_size=1,
    max_size=3,
)


@ul.function
def conversation(s, turns, width):
    forks = s.fork(width)
    for branch in forks:
        for said, begun, tokens, twice in turns:
            branch += ul.user(said or "?")
            answer = begun + ul.gen(max_tokens=tokens)
            branch += ul.assistant(answer + " and " + ul.gen(max_tokens=tokens) if twice else answer)
    forks.join()


@ul.function
def text(s, turns, width):
    forks = s.fork(width)
    for branch in forks:
        for said, begun, tokens, _ in turns:
            branch += (said or "?") + begun + ul.gen(max_tokens=tokens)
    forks.join()


def error_of(state: ul.State) -> BaseException | None:
    """When all branches have ended: those that had room go on while one has failed."""
    state._sink.run.wait_finished()  # type: ignore[attr-defined]
    return state.error()


def answer(prompt: str) -> str:
    return " word" * (len(prompt) * 7 % 40 + 1)


@pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")
@pytest.mark.parametrize(
    ("program", "model"), [(conversation, "gpt-4o"), (text, "gpt-4o"), (text, "gpt-3.5-turbo-instruct")]
)
def test_what_a_server_counts_stays_inside_the_budget_and_the_estimate(program: ul.Program, model: str) -> None:
    with FakeOpenAI(answer) as server:
        backend = ul.OpenAI(model, base_url=server.base_url, api_key=server.api_key)

        @settings(max_examples=10, deadline=None)
        @given(turns=TURNS, width=st.integers(1, 4), tokens=st.integers(200, 3000))
        def runs(turns: list[tuple[str, str, int, bool]], width: int, tokens: int) -> None:
            before = server.usage
            state = program.run(turns, width, backend=backend, budget=ul.Budget(tokens=tokens), timeout=PATIENCE)
            error = error_of(state)
            counted = server.usage.total_tokens - before.total_tokens
            assert counted == state.usage.total_tokens <= tokens
            estimate = program.estimate(turns, width, backend=backend, timeout=PATIENCE)
            if error is None:
                assert estimate.total_tokens >= counted
                assert estimate.calls == server.usage.calls - before.calls
            else:
                assert isinstance(error, ul.BudgetError)
                assert estimate.total_tokens > tokens

        runs()


def test_eight_forks_share_a_thousand_tokens() -> None:
    with FakeOpenAI(lambda prompt: " word" * 300) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        state = conversation.run(
            [("Tell me.", "", 200, False)], 8, backend=backend, budget=ul.Budget(tokens=1000), timeout=PATIENCE
        )
        assert isinstance(error_of(state), ul.BudgetError)
        assert 0 < server.usage.total_tokens == state.usage.total_tokens <= 1000
        assert server.calls == state.usage.calls


def test_dollars_are_spent_by_the_price_of_the_model() -> None:
    with FakeOpenAI(lambda prompt: " word" * 300) as server:
        backend = ul.OpenAI("gpt-4o-mini", base_url=server.base_url, api_key=server.api_key)
        turns = [("Tell me.", "", 200, False)]
        state = conversation.run(turns, 8, backend=backend, budget=ul.Budget(dollars=0.0005), timeout=PATIENCE)
        assert isinstance(error_of(state), ul.BudgetError)
        assert state.cost.dollars == pytest.approx(ul.prices["gpt-4o-mini"].dollars(server.usage))
        assert 0.0003 < state.cost.dollars <= 0.0005


def test_requests_that_a_server_refuses_are_not_charged() -> None:
    with FakeOpenAI(lambda prompt: " word", faults=[Fault.RATE_LIMIT_AND_WHEN], retry_after="0") as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        turns = [("Tell me.", "", 5, False)]
        state = conversation.run(turns, 1, backend=backend, budget=ul.Budget(calls=1), timeout=PATIENCE)
        assert error_of(state) is None
        assert (len(server.requests), server.calls, state.usage.calls) == (2, 1, 1)
