"""The law: with speculation every variable is what it is without, whatever the model does. 500 random programs."""

from dataclasses import dataclass
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.lang.protocol import Capabilities

from ..conftest import PATIENCE
from .models import ASKED, BLIND, FREE, PAID, Follower
from .random_programs import Form

SEEDS = 500


@dataclass(frozen=True)
class Outcome:
    """Variables with their facts up to the first that failed, and why it did."""

    values: dict[str, Any]
    facts: dict[str, Any]
    error: str


def outcome(form: Form, backend: Any, **options: Any) -> tuple[Outcome, ul.State]:
    program = ul.function(temperature=0)(form.program())
    state = program.run(backend=backend, timeout=PATIENCE, **options)
    error = state.error()
    values: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for name in state.variables():
        try:
            values[name], facts[name] = state[name], state.meta(name)
        except ul.UmbelError:
            break
    return Outcome(values, facts, type(error).__name__), state


def once(facts: Any) -> bool:
    """Whether the plain run needed one try: an answer that was asked for again comes from another prompt."""
    return all(map(once, facts)) if isinstance(facts, list) else facts.get("tries", 1) == 1


def check(form: Form, capabilities: Capabilities, deviates: int, seed: int, **options: Any) -> ul.State:
    model = Follower(form.text, deviates, seed)
    plain, _ = outcome(form, Echo(model, capabilities=FREE))
    speculative, state = outcome(form, Echo(model, capabilities=capabilities), **options)
    for name, value in plain.values.items():
        if not once(plain.facts[name]):
            break
        assert speculative.values[name] == value, (seed, name)
    else:
        if not plain.error.startswith("Guarantee"):  # where no answer was accepted, speculation may have had one
            assert speculative.error == plain.error, seed
    return state


@pytest.mark.parametrize("part", range(5))
@pytest.mark.sampled(4)
def test_variables_are_those_of_the_plain_run(part: int) -> None:
    saved = missed = 0
    for seed in range(part * SEEDS // 5, (part + 1) * SEEDS // 5):
        form = Form(seed, chat=seed % 3 == 0)
        capabilities = (PAID, ASKED, BLIND, PAID)[seed // 3 % 4]
        state = check(form, capabilities, (0, 5, 20, 60)[seed % 4], seed, num_api_spec_tokens=(16, 64, 300)[seed % 3])
        saved += state.cost.speculation.hits
        missed += state.cost.speculation.misses
    assert saved > 15, "the programs leave nothing to save: this test tests nothing"
    assert missed > 5


def test_variables_are_those_of_the_plain_run_where_the_planner_decides() -> None:
    for seed in range(60):
        check(Form(seed, chat=seed % 3 == 0), PAID, (0, 20)[seed % 2], seed, speculate="auto")
