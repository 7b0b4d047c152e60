"""What a notebook shows of states, programs, batches and reports: escaped, folded, without waiting."""

import re

import pytest
import umbel as ul
from umbel.lang import notebook

TAGS = {"details", "summary", "table", "tr", "td", "th", "b", "pre", "span", "p", "small"}


@ul.function
def program(s: ul.State, topic: str) -> None:
    """Says <one> thing."""
    s += "On " + topic + ": " + ul.gen("a", max_tokens=64)


def tags(content: str) -> set[str]:
    return set(re.findall(r"<(\w+)", content))


def test_a_state_shows_its_variables_and_its_text_by_origin() -> None:
    state = program.run(topic="<script>", backend=ul.Echo(["<img src=x onerror=alert(1)>"]))
    state.sync()
    content = state._repr_html_()
    assert tags(content) <= TAGS
    assert "&lt;img src=x onerror=alert(1)&gt;" in content
    assert 'title="argument"' in content
    assert 'title="generated"' in content
    assert "state of program: 1 call, " in content
    legend = content[content.index("<small>") :]
    assert re.findall(r'title="(\w+)"', legend) == ["argument", "generated"]


def test_a_state_that_runs_is_described_without_waiting() -> None:
    gate = ul.Gate()
    state = program.run(topic="x", backend=ul.Echo(gate=gate), stream=True)
    gate.wait_for(1)
    assert repr(state) == "<State a=…>"
    assert "…" in state._repr_html_()
    gate.open()
    state.sync()
    assert repr(state).startswith("<State a='")


def test_a_failed_state_names_its_error() -> None:
    state = program.run(topic="x", backend=ul.Echo(faults=ul.FailCall(1, ul.BackendError("<b>away</b>"))))
    with pytest.raises(ul.BackendError):
        state.sync()
    assert repr(state) == "<State a=(BackendError), error=BackendError('<b>away</b>')>"
    assert "BackendError: &lt;b&gt;away&lt;/b&gt;" in state._repr_html_()


def test_a_state_without_a_record_shows_its_variables() -> None:
    state = program.run(topic="x", backend=ul.Echo(["said"]), record=False)
    state.sync()
    assert "said" in state._repr_html_()


def test_a_program_shows_its_parameters_and_its_docstring() -> None:
    content = program.bind(topic="<x>")._repr_html_()
    assert tags(content) <= TAGS
    assert "Says &lt;one&gt; thing." in content
    assert "&lt;x&gt;" in content


def test_a_batch_shows_a_row_for_each_program_and_a_column_for_each_variable() -> None:
    backend = ul.Echo(["one", "two"], faults=ul.FailCall(2, ul.BackendError("away")))
    results = program.run_batch([{"topic": "a"}, {"topic": "b"}], backend=backend, num_threads=1, on_error="return")
    content = results._repr_html_()
    assert tags(content) <= TAGS
    assert content.count("<tr>") == 3
    assert re.findall(r"<th[^>]*>(\w*)<", content) == ["", "a", "error"]
    assert re.findall(r"<td[^>]*>([^<]*)<", content) == [
        "0",
        "&#x27;one&#x27;",
        "",
        "1",
        "(BackendError)",
        "BackendError: away",
    ]
    assert isinstance(results, list)


def test_reports_are_tables() -> None:
    state = program.run(topic="x", backend=ul.Echo())
    content = state.explain_cache()._repr_html_()
    assert tags(content) <= TAGS
    assert "gen(&#x27;a&#x27;)" in content
    assert "1 call on Echo" in content
    assert "completion_tokens" in program.estimate(topic="x", backend=ul.Echo())._repr_html_()


def test_a_cost_has_the_table_of_its_usage_and_the_price() -> None:
    content = ul.Cost(ul.Usage(prompt_tokens=12, cached_tokens=3, calls=2), dollars=0.5)._repr_html_()
    assert tags(content) <= TAGS
    assert "2 calls, $0.500000" in content
    assert ">3 (25%)<" in content
    assert "read from a journal" not in content
    read = ul.Cost(ul.Usage(), read=ul.Usage(prompt_tokens=7, calls=1))._repr_html_()
    assert "prompt tokens, read from a journal</td>" in read
    assert "without a price" in ul.Cost(dollars=None)._repr_html_()
    assert "1 calls, $0<" in ul.Cost(ul.Usage(calls=1), dollars=0.0)._repr_html_()


def test_a_usage_is_a_table_with_the_cached_share() -> None:
    content = ul.Usage(prompt_tokens=1200, cached_tokens=300, calls=2, loaded_tokens={"disk": 5})._repr_html_()
    assert tags(content) <= TAGS
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td></tr>", content)
    assert rows == [
        ("calls", "2"),
        ("prompt tokens", "1,200"),
        ("cached", "300 (25%)"),
        ("generated", "0"),
        ("loaded from disk", "5"),
    ]


def test_a_compiled_program_shows_its_graph() -> None:
    compiled = program.compile()
    content = compiled._repr_html_()
    assert "<summary>compiled program program(topic" in content
    assert compiled.graph._repr_html_() in content


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("<!-- & \"'", "&lt;!-- &amp; &quot;&#x27;"),
        ("\ud800", "\\ud800"),
        ("a\u202eb\x00", "a\\u202eb\\u0000"),
        ("\u061c\u200e\u200f\u2066", "\\u061c\\u200e\\u200f\\u2066"),
    ],
)
def test_text_is_escaped(text: str, escaped: str) -> None:
    assert notebook.escaped(text) == escaped


def test_long_texts_have_a_beginning_and_an_end() -> None:
    shown = notebook.escaped("a" * 10_000 + "z")
    assert len(shown) < 5_000
    assert shown.endswith("z")
