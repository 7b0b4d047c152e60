"""Lints files that a test writes."""

from collections.abc import Collection
from pathlib import Path

from umbel.compiler.lint.command import load
from umbel.compiler.lint.linter import findings_of
from umbel.compiler.lint.pieces import Counter
from umbel.compiler.lint.rules import Finding

# A token is a character: what is shared can be counted on paper.
CHARACTERS = Counter("characters", lambda text: [ord(character) for character in text])


def lint(path: Path, source: str, *, shared: Collection[str] = (), counter: Counter = CHARACTERS) -> list[Finding]:
    """The findings of a file with this source."""
    path.write_text(source)
    subjects, _ = load(path)
    return [finding for subject in subjects for finding in findings_of(subject, counter, shared=shared)]
