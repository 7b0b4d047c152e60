"""Prices: what names find, what tokens cost, and what users may write."""

import pytest
import umbel as ul
from umbel.interpreter import budget
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.budget import Ledger, PriceTable
from umbel.lang.protocol import Capabilities


def test_cached_and_stored_tokens_have_prices_of_their_own() -> None:
    usage = ul.Usage(prompt_tokens=1000, cached_tokens=600, completion_tokens=50, calls=1, cache_write_tokens=300)
    assert ul.Price(2.0, 10.0).dollars(usage) == pytest.approx((1000 * 2 + 50 * 10) / 1e6)
    price = ul.Price(2.0, 10.0, cached_input=0.2, cache_write=2.5)
    assert price.dollars(usage) == pytest.approx((100 * 2 + 600 * 0.2 + 300 * 2.5 + 50 * 10) / 1e6)
    long = ul.Usage(prompt_tokens=1000, calls=1, cache_write_tokens=300, long_write_tokens=100)
    assert price.dollars(long) == pytest.approx((700 * 2 + 300 * 2.5) / 1e6)
    dear = ul.Price(2.0, 10.0, cache_write=2.5, long_cache_write=4.0)
    assert dear.dollars(long) == pytest.approx((700 * 2 + 200 * 2.5 + 100 * 4) / 1e6)
    assert (price.dearest_input, dear.dearest_input) == (2.5, 4.0)


def test_a_dated_version_has_the_price_of_its_name_and_another_model_has_not() -> None:
    price = ul.Price(1.0, 2.0)
    table = PriceTable({"gpt-9": price, "gpt-9-mini": ul.Price(0.1, 0.2)})
    for name in ("gpt-9", "gpt-9-2031-02-03", "gpt-9-20310203", "gpt-9-latest", "gpt-9@20310203", "gpt-9-0613"):
        assert table.find(name) is price
    for other in ("gpt-9-nano", "gpt-9o", "gpt-9-1", "gpt-9-0125-preview", "my-gpt-9", "gpt"):
        assert table.find(other) is None
    assert table.find("gpt-9-mini-2031-02-03") == ul.Price(0.1, 0.2)


def test_a_dated_name_of_its_own_goes_first() -> None:
    assert ul.prices.find("gpt-4o-2024-05-13") == ul.Price(5.0, 15.0)
    assert ul.prices.find("gpt-4o-2024-08-06") == ul.prices["gpt-4o"]


def test_a_model_without_a_name_costs_nothing() -> None:
    assert ul.prices.find("") == ul.Price(0.0, 0.0)


def test_users_edit_the_table() -> None:
    table = PriceTable()
    table["mine"] = ul.Price(0.1, 0.4)
    assert table.find("mine") == ul.Price(0.1, 0.4)
    assert dict(table) == {"mine": ul.Price(0.1, 0.4)}
    del table["mine"]
    assert len(table) == 0
    with pytest.raises(ul.ParameterError, match=r"write prices\['mine'\] = umbel.Price\(input, output\)"):
        table["mine"] = 0.1  # type: ignore[assignment]
    with pytest.raises(ul.ParameterError, match=r"prices\[''\]; write the name of a model"):
        table[""] = ul.Price(0.1, 0.4)


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ((-1, 1), r"Price: input=-1"),
        ((1, None), r"Price: output=None"),
        ((1, 1, "x"), r"Price: cached_input='x'"),
        ((1, 1, 1, float("inf")), r"Price: cache_write=inf"),
        ((True, 1), r"Price: input=True"),
    ],
)
def test_a_price_is_numbers(numbers: tuple[float, ...], problem: str) -> None:
    with pytest.raises(ul.ParameterError, match=problem):
        ul.Price(*numbers)


def test_the_list_is_plausible() -> None:
    for model in budget.PRICES:
        price = ul.prices[model]
        assert 0 < price.input < price.output
        assert price.cached_input is None or price.cached_input < price.input
        assert price.cache_write is None or price.cache_write > price.input


def test_costs_add_up_and_one_unknown_price_makes_the_sum_unknown() -> None:
    one = ul.Cost(ul.Usage(10, 0, 5, 1), 0.25, ul.Speculation(calls_saved=1, hits=1), 0.5)
    assert one + one == ul.Cost(ul.Usage(20, 0, 10, 2), 0.5, ul.Speculation(calls_saved=2, hits=2), 1.0)
    assert sum([one, one], ul.Cost()).usage.total_tokens == 30
    assert (one + ul.Cost(dollars=None)).dollars is None
    assert (one + ul.Cost(dollars=None)).dollars_saved == 0.5


def test_speculation_is_worth_its_saved_prompts_less_its_wasted_tokens() -> None:
    known = Ledger(Echo(capabilities=Capabilities("shop", model="gpt-4o")), None)
    for _ in range(2):
        known.note(ul.Speculation(calls_saved=1, input_tokens_saved=1000, output_tokens_wasted=100, hits=1))
    assert known.cost.dollars_saved == pytest.approx(2 * (1000 * 2.5 - 100 * 10) / 1e6)
    assert known.cost.speculation.hits == 2
    unknown = Ledger(Echo(capabilities=Capabilities("shop", model="gpt-0")), None)
    unknown.note(ul.Speculation(calls_saved=1))
    assert unknown.cost.dollars_saved is None


def test_a_run_on_a_model_without_a_price_has_no_dollars() -> None:
    @ul.function
    def asks(s):
        s += ul.gen("x", max_tokens=3)

    state = asks.run(backend=Echo(lambda prompt: "ja", capabilities=Capabilities("shop", model="gpt-0")))
    state.sync()
    assert state.cost.dollars is None
    assert state.cost.usage == state.usage == ul.Usage(0, 0, 1, 1)
