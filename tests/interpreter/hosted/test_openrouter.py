"""OpenRouter: routing that drops nothing, what the list of models says, and prices."""

from dataclasses import replace
from typing import Any

import pytest
import umbel as ul
from umbel.testing import OPENROUTER, FakeOpenAI

MODEL = "openai/gpt-4o"


@ul.function
def ask(s, **options):
    s += ul.user("Capital?") + ul.assistant(ul.gen("answer", **options))


@ul.function
def decide(s):
    s += ul.user("Sure?") + ul.assistant(ul.select("sure", ["yes", "no"]))


@pytest.fixture(autouse=True)
def own_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ul.prices, "_prices", dict(ul.prices))


def routed(server: FakeOpenAI, model: str = MODEL, **options: Any) -> ul.OpenRouter:
    return ul.OpenRouter(model, base_url=server.base_url, api_key=server.api_key, **options)


def test_requests_go_only_to_providers_that_take_every_parameter() -> None:
    with FakeOpenAI(["Paris"], models=[MODEL], features=OPENROUTER) as server:
        model = routed(server, provider={"order": ["mistral"]}, reasoning={"effort": "low"}, app_name="Tests")
        assert ask.run(backend=model)["answer"] == "Paris"
        (received,) = server.requests
        assert received.body["provider"] == {"require_parameters": True, "order": ["mistral"]}
        assert received.body["reasoning"] == {"effort": "low"}
        assert received.headers["x-title"] == "Tests"


def test_the_list_of_models_says_what_is_enforced() -> None:
    with FakeOpenAI(["yes"], models=[MODEL], features=OPENROUTER) as server:
        state = decide.run(backend=routed(server))
        assert (state["sure"], state.get_meta_info("sure")["guarantee"]) == ("yes", "enforced")
    told = OPENROUTER.supported_parameters - {"structured_outputs"}
    for features, options in (
        (replace(OPENROUTER, supported_parameters=told), {}),
        (OPENROUTER, {"provider": {"require_parameters": False}}),
    ):
        with FakeOpenAI(["perhaps", "no"], models=[MODEL], features=features) as server:
            state = decide.run(backend=routed(server, **options))
            assert (state["sure"], state.get_meta_info("sure")["guarantee"]) == ("no", "validated")
            assert all("response_format" not in request.body for request in server.requests)


def test_a_parameter_that_no_provider_of_the_model_takes_is_refused() -> None:
    with FakeOpenAI(["x"], models=[MODEL], features=OPENROUTER) as server:
        with pytest.raises(ul.CapabilityError, match="logit_bias"):
            ask.run(logit_bias={1: 5}, backend=routed(server))["answer"]
        assert not server.requests


def test_prices_come_from_the_list_and_a_budget_in_dollars_holds() -> None:
    with FakeOpenAI(["Paris", "Rome"], models=[MODEL], features=OPENROUTER) as server:
        state = ask.run(backend=routed(server), max_tokens=8, budget=ul.Budget(dollars=1))
        usage = state.cost.usage
        assert ul.prices[MODEL] == ul.Price(1.0, 2.0, 0.5)
        assert state.cost.dollars == pytest.approx((usage.prompt_tokens + 2 * usage.completion_tokens) / 1e6)
        ul.prices[MODEL] = ul.Price(9.0, 9.0)
        ask.run(backend=routed(server)).sync()
        assert ul.prices[MODEL] == ul.Price(9.0, 9.0), "a price of your own stays"


def test_a_variant_is_known_by_its_model_and_a_wrong_name_is_told() -> None:
    with FakeOpenAI(["x"], models=[MODEL, f"{MODEL}:nitro"], features=OPENROUTER) as server:
        assert ask.run(backend=routed(server, f"{MODEL}:nitro"))["answer"] == "x"
        with pytest.raises(ul.RequestError, match=r"has no model 'openai/gpt-4'; it has 'openai/gpt-4o'"):
            ask.run(backend=routed(server, "openai/gpt-4")).sync()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": {}}, "set OPENROUTER_API_KEY"),
        ({"api_key": "k", "provider": {"require_parameters": 3}}, "require_parameters"),
        ({"api_key": "k", "provider": {"order": {1}}}, "provider must be JSON"),
        ({"api_key": "k", "extra_body": {"provider": {}}}, "write provider= instead"),
        ({"api_key": "k", "organization": "x"}, "has no option 'organization'"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ul.ParameterError, match=message):
        ul.OpenRouter("a/b", **options)


def test_the_key_comes_from_the_environment_and_is_not_shown() -> None:
    model = ul.OpenRouter("a/b", environment={"OPENROUTER_API_KEY": "sk-or-secret-1"})
    assert "sk-or-secret-1" not in repr(model)
    assert model.capabilities.name == "openrouter a/b"
