"""The twenty templates: what is planted in each, and what a person says of the order that is proposed for it.

Written after patterns that prompt collections have in common. Five are the checker's examples (`shot`), fifteen are
tests.
"""

from dataclasses import dataclass
from types import ModuleType

from umbel import Program

from . import answering, coding, reading, writing


@dataclass(frozen=True)
class Template:
    """Attributes:
    rules: what the linter has to find; empty for a good layout.
    lawful: whether there is an order that no rule of the text forbids and that gains enough.
    keeps_meaning: a person's verdict on that order; None where there is none.
    reason: for both.
    shot: it is one of the checker's examples.
    volatile: its first constants are other ones at every run, which only the source shows.
    """

    name: str
    module: ModuleType
    rules: frozenset[str]
    lawful: bool
    keeps_meaning: bool | None
    reason: str
    shot: bool = False
    volatile: bool = False

    @property
    def program(self) -> Program:
        program = getattr(self.module, self.name)
        assert isinstance(program, Program), "the table names programs"
        return program


LATE = frozenset({"constants-late"})
GOOD: frozenset[str] = frozenset()

TEMPLATES = (
    # the checker's examples
    Template(
        "translate", writing, LATE, True, True, "The rules name English and German and nothing by its place.", shot=True
    ),
    Template(
        "moderation",
        reading,
        LATE,
        False,
        None,
        'The question is about "the message above", and "earlier" is counted from where it stands.',
        shot=True,
    ),
    Template("keywords", writing, LATE, True, True, "What to suggest is said without pointing anywhere.", shot=True),
    Template("maths", answering, LATE, False, None, '"First", "after that", "the last line": an order.', shot=True),
    Template("product", writing, LATE, True, True, "Rules of style hold wherever they stand.", shot=True),
    # the tests
    Template(
        "rag_answer",
        answering,
        LATE,
        True,
        True,
        "Question and context keep their labels and their order; the rules speak of the context by name.",
    ),
    Template("summarise", reading, LATE, True, True, "The editor's rules are about articles in general."),
    Template("classify", reading, GOOD, False, None, "Constants first: instruction, shots, then the message."),
    Template(
        "entities", reading, LATE, True, True, "The list of kinds moves in one piece; the cue Entities: stays last."
    ),
    Template(
        "sql", coding, LATE, True, True, "Rules first; question and schema follow in their order, each with its label."
    ),
    Template("code_review", coding, LATE, True, True, "The fence stays whole; nothing says where the change stands."),
    Template("unit_tests", coding, GOOD, False, None, "Instruction first, then the code."),
    Template(
        "judge",
        reading,
        LATE,
        True,
        True,
        'Only the scale moves, a sentence of its own. What speaks of "the answer above" stays behind the answer.',
    ),
    Template(
        "persona",
        answering,
        LATE,
        True,
        False,
        "A story: the candles go out after the player speaks, not before. No word of the text says so.",
    ),
    Template(
        "email_reply",
        writing,
        LATE,
        False,
        None,
        '"End of the mail" and "from here on" tell a stranger\'s words from the owner\'s; in front of the mail they '
        "would turn the mail into instructions.",
    ),
    Template("extract", reading, GOOD, False, None, "Instruction first, then the invoice."),
    Template(
        "rewrite", writing, LATE, True, True, '"The given style" is the one with the label, wherever that stands.'
    ),
    Template(
        "dated_agent",
        coding,
        frozenset({"volatile-early"}),
        True,
        True,
        "When a session began changes nothing about the rules; it still stands in front of the task.",
        volatile=True,
    ),
    Template(
        "tutoring",
        answering,
        frozenset({"counter-early"}),
        True,
        True,
        "The number of the exercise goes to the exercise.",
    ),
    Template("meeting_notes", reading, GOOD, False, None, "All that is constant is the system turn."),
)
