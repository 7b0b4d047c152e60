"""The linter's rules, and one finding of one of them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .tokens import Shareable

# Rule → why what it finds costs something.
RULES = {
    "constants-late": "Runs share the beginning of their prompts. Text that is the same in every run is computed for "
    "each of them when it stands behind an argument.",
    "shared-late": "Runs that have an argument in common, a document for instance, share it only where nothing of "
    "their own stands in front of it.",
    "instance-in-system": "A system turn stands in front of everything. With an argument in it, no two runs share it, "
    "nor anything behind it.",
    "counter-early": "A number that changes from call to call ends what these calls share; what stands behind it is "
    "computed for each of them.",
    "volatile-early": "The time, an identifier or a random choice is another text at every run, even of the same "
    "question: nothing behind it is ever found in the cache.",
    "unstable-order": "The same values can be printed in another order, which is another prompt.",
    "image-late": "Questions about one image share it when the image stands in front of them. Behind a question, it is "
    "encoded and computed for each.",
    "history-rewritten": "A history that grows at its end keeps its beginning, which is in the cache. Printed newest "
    "first, or cut at its beginning, it is another text at every turn.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    rule: of `RULES`.
    line, end_line: of the statement.
    program: its name.
    what: was found, and what to write instead.
    gain: tokens more that runs share at most; zero where that depends on the values.
    """

    rule: str
    line: int
    end_line: int
    program: str
    what: str
    gain: Shareable

    @property
    def why(self) -> str:
        return RULES[self.rule]


_NOQA = re.compile(r"#\s*umbel:\s*noqa(?:\[([^\]]*)\])?")


def audible(findings: Iterable[Finding], lines: Sequence[str]) -> list[Finding]:
    """Removes findings silenced by a comment on a line of their statement; keeps one for each rule and line."""
    kept: dict[tuple[str, int], Finding] = {}
    for finding in findings:
        statement = lines[finding.line - 1 : finding.end_line]
        if not any(_silences(line, finding.rule) for line in statement):
            kept.setdefault((finding.rule, finding.line), finding)
    return sorted(kept.values(), key=lambda finding: (finding.line, finding.rule))


def _silences(line: str, rule: str) -> bool:
    """Returns whether a line silences a rule: `# umbel: noqa` all rules, `# umbel: noqa[rule, rule]` these."""
    match = _NOQA.search(line)
    return match is not None and (match[1] is None or rule in [name.strip() for name in match[1].split(",")])
