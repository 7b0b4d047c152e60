"""Every example runs: on the oracle model, which finds any wrong reuse of a key, and scripted where texts matter."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import umbel as ul
from umbel.srt.in_process import LocalBackend

FOLDER = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def oracle() -> Iterator[LocalBackend]:
    backend = LocalBackend()
    with ul.default_backend(backend):
        yield backend


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_oracle(name: str, oracle: LocalBackend, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", NAMES)
def test_is_short_and_says_what_it_shows(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert len(source.splitlines()) < 80
    assert source.startswith('"""')


def test_the_issue_names_these_examples() -> None:
    assert set(NAMES) >= {
        "quickstart", "judge", "tree_of_thought", "self_consistency", "skeleton_of_thought", "react_agent",
        "multi_turn", "document_qa", "batch", "streaming", "async_program", "extract", "field_card",
    }  # fmt: skip


def test_the_judge_stops_early_when_the_essay_is_about_something_else() -> None:
    judge = load("judge").judge
    state = judge.run(essay="x", backend=ul.Echo(scores={" no": -0.1, " yes": -5.0}))
    assert state["related"] == " no"
    assert "verdict" not in state
    assert state.usage.calls == 1


def test_the_judge_asks_three_sides_and_merges_them() -> None:
    judge = load("judge").judge
    state = judge.run(
        essay="x",
        backend=ul.Echo(
            lambda prompt: f" about {prompt[-12:]!r}\nmore",
            scores={" yes": -0.1, " no": -5.0, " A": -1.0, " B": -0.5, " C": -2.0},
        ),
    )
    text = state.text()
    assert [line.split(":")[0] for line in text.splitlines()[-5:]] == ["Facts", "Tone", "Weakness", "Verdict", "Grade"]
    assert state.usage.calls == 6


def test_the_tool_agent_answers_by_what_a_tool_returned() -> None:
    module = load("tool_agent")
    echo = ul.Echo([module.population.spelled(country="Iceland"), "390,000 people live in Iceland."])
    state = module.ask.run(question="How many people live in Iceland?", backend=echo)
    assert state.ret_value == ["population('Iceland') = '390000'"]
    assert state["answer"] == "390,000 people live in Iceland."


def test_the_agent_uses_its_tools() -> None:
    module = load("react_agent")
    assert module.calculate("2 * (3 + 4)") == "14"
    assert module.calculate("__import__('os')") == "cannot calculate \"__import__('os')\""
    assert module.population("Atlantis") == "unknown country 'Atlantis'"


def test_a_note_becomes_an_object() -> None:
    module = load("extract")
    record = '{"title": "Hamlet", "author": "Shakespeare", "year": 1603, "kind": "play", "translated": false}'
    state = module.read.run(note="x", backend=ul.Echo([record]))
    assert state.ret_value == module.Book("Hamlet", "Shakespeare", 1603, "play", False)


def test_a_card_is_filled_in_as_its_form_has_it() -> None:
    module = load("field_card")
    card = "Species: Grey heron\nLength: 95 cm\nDiet: fish\nNocturnal: no"
    state = module.fill_in.run(sighting="x", backend=ul.Echo([card, "2\n", "calm"]))
    assert state.text().endswith(f"x\n{card}\nSeen: 2\nMood: calm")
    assert (state.value("seen"), state.value("mood")) == (2, "calm")


def test_a_failed_review_does_not_take_the_batch_with_it(
    oracle: LocalBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    load("batch").main()
    printed = capsys.readouterr().out
    assert "ValueError('an empty review')" in printed
    assert printed.count("positive") + printed.count("negative") == 6


def test_what_a_search_finds_is_ranked(oracle: LocalBackend, capsys: pytest.CaptureFixture[str]) -> None:
    search = load("semantic_search")
    assert search.nearest(search.NOTES[2], [*search.NOTES, search.TASK + search.NOTES[2]], None, 1) == [
        search.TASK + search.NOTES[2]
    ]
    search.main(oracle, oracle)
    scores = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()[4:]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
