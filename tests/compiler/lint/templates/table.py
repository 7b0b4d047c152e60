"""The twenty templates, and what is planted in each. Written after patterns that prompt collections have in common."""

from dataclasses import dataclass
from types import ModuleType

from . import answering, coding, reading, writing


@dataclass(frozen=True)
class Template:
    """Attributes:
    name: of the program in `module`.
    rules: what the linter has to find; empty for a good layout.
    """

    name: str
    module: ModuleType
    rules: frozenset[str]


LATE = frozenset({"constants-late"})
GOOD: frozenset[str] = frozenset()

TEMPLATES = (
    Template("translate", writing, LATE),
    Template("moderation", reading, LATE),
    Template("keywords", writing, LATE),
    Template("maths", answering, LATE),
    Template("product", writing, LATE),
    Template("rag_answer", answering, LATE),
    Template("summarise", reading, LATE),
    Template("classify", reading, GOOD),
    Template("entities", reading, LATE),
    Template("sql", coding, LATE),
    Template("code_review", coding, LATE),
    Template("unit_tests", coding, GOOD),
    Template("judge", reading, LATE),
    Template("persona", answering, LATE),
    Template("email_reply", writing, LATE),
    Template("extract", reading, GOOD),
    Template("rewrite", writing, LATE),
    Template("dated_agent", coding, frozenset({"volatile-early"})),
    Template("tutoring", answering, frozenset({"counter-early"})),
    Template("meeting_notes", reading, GOOD),
)
