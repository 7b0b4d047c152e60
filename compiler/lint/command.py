"""The command `umbel lint`: prints text that prevents prefix sharing, and what to move or write instead."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...lang.errors import UmbelError, shown
from ...lang.source import shown_name
from ..script import by_name
from .findings import Finding
from .linter import findings_of
from .loading import load
from .source import SourceFile
from .tokens import Counter, default_counter


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 without findings, 1 with, 2 for a file that cannot be looked at."""
    options = _parser().parse_args(arguments)
    path, _, name = _split(options.file)
    try:
        subjects, notes = load(Path(path), name or None, by_name("--static", options.static))
    except UmbelError as error:
        print(f"umbel lint: {error}", file=sys.stderr)
        return 2
    for line, note in notes:
        print(f"umbel lint: {path}:{line}: only the source was looked at: {note}", file=sys.stderr)
    counter = default_counter()
    found = [finding for subject in subjects for finding in findings_of(subject, counter, shared=options.shared)]
    found.sort(key=lambda finding: (finding.line, finding.rule))
    if subjects:
        _print(found, subjects[0].file, counter, options)
    if not options.json:
        print(f"umbel lint: {path}: {_counted(found, len(subjects))}")
    return 1 if found else 0


def _counted(found: list[Finding], programs: int) -> str:
    findings = "no findings" if not found else "1 finding" if len(found) == 1 else f"{len(found)} findings"
    if not programs:
        return "no programs; write a function of the language, with @function"
    return f"{findings} in {programs} program{'' if programs == 1 else 's'}"


def _split(given: str) -> tuple[str, str, str]:
    """`FILE.py:program`; a colon elsewhere is part of the path."""
    path, colon, name = given.rpartition(":")
    return (path, colon, name) if colon and name.isidentifier() else (given, "", "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="umbel lint",
        description="Say what keeps prompts from sharing their beginnings, what it costs, and what to write instead. "
        "The file runs as an import of it would; no model is asked. Exit status 1 with findings, 0 without. "
        "A comment '# umbel: noqa[rule]' on the line silences a finding.",
    )
    parser.add_argument("file", metavar="FILE.py[:program]", help="a Python file with programs, or one of them")
    parser.add_argument(
        "--shared", action="append", default=[], metavar="NAME", help="an argument that many runs have in common"
    )
    parser.add_argument(
        "--static",
        action="append",
        default=[],
        type=_static,
        metavar="NAME=JSON",
        help="the value of an argument that decides what the program does, as static_args of trace()",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _static(text: str) -> tuple[str, Any]:  # Any: JSON
    name, _, value = text.partition("=")
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise argparse.ArgumentTypeError(
            f'{shown(text)} is no NAME=JSON; write --static n=3, or --static \'names=["a", "b"]\''
        ) from None


def _print(found: list[Finding], file: SourceFile, counter: Counter, options: argparse.Namespace) -> None:
    if options.json:
        print(_json(found, file, counter))
    else:
        for finding in found:
            print(_text(finding, file, counter))


def _text(finding: Finding, file: SourceFile, counter: Counter) -> str:
    lines = [f"{file.path}:{finding.line}: {finding.rule}: {finding.program}: {finding.what}", f"    {finding.why}"]
    gain = finding.gain
    if gain.first or gain.total:
        lines.append(
            f"    gain: at most {gain.first} tokens of the first call's prompt, {gain.total} of all calls', "
            f"by {counter.name}"
        )
    return "\n".join([*lines, ""])


def _json(found: list[Finding], file: SourceFile, counter: Counter) -> str:
    listed = [
        {
            "rule": finding.rule,
            "file": shown_name(str(file.path)),
            "line": finding.line,
            "program": finding.program,
            "what": finding.what,
            "why": finding.why,
            "gain": {"first_call": finding.gain.first, "all_calls": finding.gain.total},
        }
        for finding in found
    ]
    return msgspec.json.format(msgspec.json.encode({"counted_by": counter.name, "findings": listed})).decode()


if __name__ == "__main__":
    sys.exit(main())
