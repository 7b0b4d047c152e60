"""How many tokens another order lets runs share, over the twenty prompt templates of the tests (the paper's D.2).

    python -m benchmarks.layouts [--checker MODEL]

The paper reports 60 tokens more on average, over its own templates, and 12 of 13 orders that keep the meaning, with
GPT-4 as what reorders. Here rules reorder; with a checker, a model says of each order whether it keeps the meaning, and
a person's verdicts (`tests/compiler/templates/table.py`) say how often it is right.
"""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel import Runtime
from umbel.compiler.layout.checker import Verdict, verdicts
from umbel.compiler.layout.consent import THRESHOLD
from umbel.compiler.layout.findings import Finding
from umbel.compiler.layout.linting import findings_of
from umbel.compiler.layout.loading import load
from umbel.compiler.layout.reorder import Proposal
from umbel.compiler.layout.tokens import Counter, default_counter
from umbel.compiler.tracing.effects import TraceWarning
from umbel.lang.protocol import Backend

from tests.compiler.templates.table import TEMPLATES, Template

PAPER_GAIN = 60


@dataclass(frozen=True)
class Row:
    template: Template
    findings: list[Finding]
    verdict: Verdict | None

    @property
    def proposal(self) -> Proposal | None:
        return next((finding.proposal for finding in self.findings if finding.proposal is not None), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__.splitlines()[0])
    parser.add_argument("--checker", metavar="MODEL", help='a model that is asked about each order; "default" is one')
    options = parser.parse_args(arguments)
    counter = default_counter()
    if options.checker is None:
        report(measure(counter, None), counter)
        return 0
    with Runtime(options.checker) as checker:
        report(measure(counter, checker), counter)
    return 0


def measure(counter: Counter, checker: Backend | None) -> list[Row]:
    rows = []
    for template in TEMPLATES:
        if template.shot:
            continue
        file = template.module.__file__
        assert file is not None, "templates are files"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TraceWarning)
            subjects, _ = load(Path(file), template.name)
        row = Row(template, findings_of(subjects[0], counter), None)
        if checker is not None and row.proposal is not None:
            row = Row(template, row.findings, verdicts([row.proposal], checker)[0])
        rows.append(row)
    return rows


def report(rows: list[Row], counter: Counter) -> None:
    print(f"tokens that two runs share, by {counter.name}\n")
    print(f"{'template':<14} {'found':<16} {'before':>6} {'after':>6} {'gain':>5}  {'a person':<9} checker")
    for row in rows:
        print(_line(row))
    proposed = [row for row in rows if row.proposal is not None]
    gains = [row.proposal.gain.first for row in proposed if row.proposal is not None]
    bad = [row for row in rows if row.template.rules]
    good = [row for row in rows if not row.template.rules]
    kept = sum(bool(row.template.keeps_meaning) for row in proposed)
    print()
    print(f"bad layouts found       {sum(bool(row.findings) for row in bad)} of {len(bad)}")
    print(f"good layouts accused    {sum(bool(row.findings) for row in good)} of {len(good)}")
    print(f"orders proposed         {len(proposed)}, of which a person says {kept} keep the meaning")
    print(f"mean gain               {sum(gains) / len(gains):.1f} tokens (the paper: {PAPER_GAIN})")
    asked = [row for row in proposed if row.verdict is not None]
    if asked:
        right = sum(row.verdict is not None and row.verdict.same == row.template.keeps_meaning for row in asked)
        applied = [row for row in asked if row.verdict is not None and row.verdict.confirms(THRESHOLD)]
        wrong = sum(not row.template.keeps_meaning for row in applied)
        print(f"the checker is right    {right} of {len(asked)} times")
        print(f"orders it would apply   {len(applied)}, of which {wrong} change the meaning")


def _line(row: Row) -> str:
    found = ", ".join(finding.rule for finding in row.findings) or "-"
    line = f"{row.template.name:<14} {found:<16} "
    if row.proposal is None:
        return f"{line}{'-':>6} {'-':>6} {'-':>5}"
    before, after = row.proposal.old.first, row.proposal.new.first
    person = "same" if row.template.keeps_meaning else "different"
    line += f"{before:>6} {after:>6} {after - before:>5}  {person:<9}"
    if row.verdict is None:
        return line
    chance = "" if row.verdict.probability is None else f" {row.verdict.probability:.0%}"
    return f"{line} {'same' if row.verdict.same else 'different'}{chance}"


if __name__ == "__main__":
    raise SystemExit(main())
