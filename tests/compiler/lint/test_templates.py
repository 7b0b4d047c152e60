"""The twenty templates: every bad layout is found, and no good one is accused."""

from pathlib import Path

import pytest
from umbel.compiler.lint.command import load
from umbel.compiler.lint.linter import findings_of
from umbel.compiler.lint.pieces import ESTIMATE

from .templates.table import TEMPLATES, Template


def named(template: Template) -> str:
    return template.name


@pytest.mark.parametrize("template", TEMPLATES, ids=named)
def test_the_linter_finds_what_is_planted_and_nothing_else(template: Template) -> None:
    file = template.module.__file__
    assert file is not None
    subjects, notes = load(Path(file), template.name)
    assert notes == []
    assert {finding.rule for finding in findings_of(subjects[0], ESTIMATE)} == template.rules
