"""Budgets against providers that count for themselves: what the server counted never passes a limit."""

import pytest
import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("h11")

from umbel.testing import FakeAnthropic, FakeOpenAI, Fault

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
            branch += ul.user("q" + said)
            answer = begun + ul.gen(max_tokens=tokens)
            branch += ul.assistant(answer + " and " + ul.gen(max_tokens=tokens) if twice else answer)
    forks.join()


@ul.function
def text(s, turns, width):
    forks = s.fork(width)
    for branch in forks:
        for said, begun, tokens, _ in turns:
            branch += "q" + said + begun + ul.gen(max_tokens=tokens)
    forks.join()


def error_of(state: ul.State) -> BaseException | None:
    """When all branches have ended: those that had room go on while one has failed."""
    state._sink.run.wait_finished()  # type: ignore[attr-defined]
    return state.error()


def answer(prompt: str) -> str:
    return " word" * (len(prompt) * 7 % 40 + 1)


Server = FakeOpenAI | FakeAnthropic


def client(server: Server, model: str) -> ul.OpenAI | ul.Anthropic:
    kind = ul.OpenAI if isinstance(server, FakeOpenAI) else ul.Anthropic
    return kind(model, base_url=server.base_url, api_key=server.api_key)


@pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")
@pytest.mark.parametrize(
    ("program", "kind", "model"),
    [
        (conversation, FakeOpenAI, "gpt-4o"),
        (text, FakeOpenAI, "gpt-4o"),
        (text, FakeOpenAI, "gpt-3.5-turbo-instruct"),
        (conversation, FakeAnthropic, "claude-haiku-4-5"),
        (text, FakeAnthropic, "claude-haiku-4-5"),
        (conversation, FakeAnthropic, "claude-opus-4-6"),  # which cannot go on with a message
    ],
)
@pytest.mark.sampled(4)
def test_what_a_server_counts_stays_inside_the_budget_and_the_estimate(
    program: ul.Program, kind: type[Server], model: str
) -> None:
    with kind(answer) as server:
        backend = client(server, model)

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


@ul.function
def form(s):
    s += ul.user("A plant as JSON.")
    s += ul.assistant(ul.gen("plant", json_schema=PLANT, max_tokens=40))
    s += ul.user("A code.") + ul.assistant(ul.gen("code", regex="[A-Z]{3}-[0-9]{3}", max_tokens=20))
    s += ul.user("Is it green?") + ul.assistant(ul.select("green", ["yes", "no"]))


PLANT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "heights": {"type": "array", "items": {"type": "number"}}},
    "required": ["name", "heights"],
    "additionalProperties": False,
}


def filled(prompt: str) -> str:
    asked = max(("A plant as JSON.", "A code.", "Is it green?"), key=prompt.rfind)
    return {"A plant as JSON.": '{"name": "dill", "heights": [1.5, 2]}', "A code.": "ABC-123"}.get(asked, "yes")


@pytest.mark.parametrize(("kind", "model"), [(FakeOpenAI, "gpt-4o"), (FakeAnthropic, "claude-haiku-4-5")])
def test_what_models_are_told_about_constraints_is_inside_the_estimate(kind: type[Server], model: str) -> None:
    with kind(filled) as server:
        backend = client(server, model)
        estimate = form.estimate(backend=backend, timeout=PATIENCE)
        assert server.usage.calls == 0
        budget = ul.Budget(tokens=estimate.total_tokens, dollars=estimate.dollars, calls=estimate.calls)
        state = form.run(backend=backend, budget=budget, timeout=PATIENCE)
        assert error_of(state) is None
        assert (state["code"], state["green"]) == ("ABC-123", "yes")
        assert server.usage.total_tokens <= estimate.total_tokens
        assert server.usage.calls == estimate.calls == 3
