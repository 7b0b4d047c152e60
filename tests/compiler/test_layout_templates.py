"""The twenty templates: every bad layout is found, no good one is, and what is proposed is what a person was asked
about."""

import ast
import warnings
from pathlib import Path

import pytest
import umbel as ul
from umbel.compiler.graph import Graph
from umbel.compiler.layout.consent import reordered
from umbel.compiler.layout.examples import EXAMPLES
from umbel.compiler.layout.linting import findings_of
from umbel.compiler.layout.loading import load
from umbel.compiler.layout.patches import together, unified
from umbel.compiler.layout.reorder import Proposal, apply, propose
from umbel.compiler.layout.tokens import ESTIMATE
from umbel.compiler.tracing.effects import TraceWarning

from benchmarks.layouts import measure, report

from .layouts import lint, patched, prompt_of
from .templates.table import TEMPLATES, Template

ROOT = Path(__file__).resolve().parents[2]
TESTS = [template for template in TEMPLATES if not template.shot]
SHOTS = [template for template in TEMPLATES if template.shot]


def named(template: Template) -> str:
    return template.name


def source_of(template: Template) -> Path:
    file = template.module.__file__
    assert file is not None
    return Path(file)


def traced(template: Template) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        return template.program.trace()


def proposals(template: Template) -> tuple[Proposal, ...]:
    return propose(traced(template), ESTIMATE)


def test_there_are_twenty_five_of_them_examples() -> None:
    assert (len(TEMPLATES), len(SHOTS), len(TESTS)) == (20, 5, 15)


@pytest.mark.parametrize("template", TEMPLATES, ids=named)
def test_the_linter_finds_what_is_planted_and_nothing_else(template: Template) -> None:
    subjects, notes = load(source_of(template), template.name)
    found = findings_of(subjects[0], ESTIMATE)
    assert notes == []
    assert {finding.rule for finding in found} == template.rules
    assert [finding.proposal is not None for finding in found] == [template.lawful] * len(template.rules)


@pytest.mark.parametrize("template", [t for t in TEMPLATES if not t.volatile], ids=named)
def test_there_is_a_proposal_where_a_person_sees_a_lawful_one(template: Template) -> None:
    assert bool(proposals(template)) is template.lawful
    assert (template.keeps_meaning is not None) is template.lawful


@pytest.mark.parametrize("template", [t for t in TEMPLATES if t.lawful], ids=named)
def test_the_patch_gives_the_program_in_the_proposed_order(template: Template, tmp_path: Path) -> None:
    source = source_of(template).read_text()
    path = tmp_path / "program.py"
    found = [finding for finding in lint(path, source, counter=ESTIMATE) if finding.program == template.name]
    assert all(finding.patch is not None for finding in found), "every lawful order can be written"
    edits = together(finding.patch for finding in found if finding.patch is not None)
    new_source = patched(path, unified(Path(path.name), source, edits))
    ast.parse(new_source)
    subjects, _ = load(path, template.name)
    assert subjects[0].graph is not None
    if not template.volatile:  # what is volatile was another text in the first trace
        graph = traced(template)
        assert prompt_of(subjects[0].graph) == prompt_of(apply(graph, propose(graph, ESTIMATE)))
    assert [finding for finding in findings_of(subjects[0], ESTIMATE) if finding.proposal is not None] == []


@pytest.mark.parametrize("template", TEMPLATES, ids=named)
def test_nothing_is_reordered_without_consent(template: Template) -> None:
    """0 changes, with nobody to ask and with a checker that is not sure."""
    graph = traced(template)
    unsure = ul.Echo(scores={" same": -0.2, " different": -1.7})  # 82%
    for checker in (None, unsure):
        new, records = reordered(graph, checker=checker, counter=ESTIMATE)
        assert new is graph
        assert [record.applied for record in records] == [False] * len(records)


def test_a_checker_of_a_persons_judgement_applies_what_keeps_the_meaning() -> None:
    applied = set()
    for template in TESTS:
        kept = template.keeps_meaning
        checker = ul.Echo(scores={" same": -0.01 if kept else -5.0, " different": -5.0 if kept else -0.01})
        _, records = reordered(traced(template), checker=checker, counter=ESTIMATE)
        if any(record.applied for record in records):
            applied.add(template.name)
    assert applied == {t.name for t in TESTS if t.keeps_meaning and not t.volatile}


@pytest.mark.parametrize("template", SHOTS, ids=named)
def test_the_checkers_examples_are_these_templates(template: Template) -> None:
    before = prompt_of(traced(template))
    example = next(example for example in EXAMPLES if example.before == before)
    assert example.same is template.lawful, "what keeps its meaning is proposed, and what does not is not"
    if template.lawful:
        assert [proposal.after for proposal in proposals(template)] == [example.after]
    else:
        assert sorted(example.after.split()) == sorted(before.split())


def test_no_template_of_the_tests_is_shown_to_the_checker() -> None:
    shown = {example.before for example in EXAMPLES}
    assert all(prompt_of(traced(template)) not in shown for template in TESTS)


def test_the_table_of_the_benchmark_counts_the_fifteen(capsys: pytest.CaptureFixture[str]) -> None:
    report(measure(ESTIMATE, None), ESTIMATE)
    out = capsys.readouterr().out
    assert "bad layouts found       11 of 11" in out
    assert "good layouts accused    0 of 4" in out
    assert "orders proposed         10, of which a person says 9 keep the meaning" in out
