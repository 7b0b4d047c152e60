"""Limits what a constraint may cost, and refuses with the place that a refusal is about.

ConstraintRefused            a ValueError
├── Unsupported              the expression is valid, and means something that is not honoured here
└── LimitExceeded            honouring it would take more states, bytes, depth or time than allowed
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one constraint.

    Sizes are bytes, times are left to the process that compiles, which can be killed.
    """

    pattern_bytes: int = 16 << 10  # of a regular expression's source; the longest real ones have a few kB
    schema_bytes: int = 256 << 10  # of a schema's source; real ones of 70 kB exist
    depth: int = 64  # of nesting, in sources and in texts of a recursive grammar
    dfa_states: int = 20_000  # of an automaton that is built ahead: intersections, differences
    states: int = 50_000  # of a lazy automaton, as far as it was explored
    ambiguity: int = 2_000  # positions that one state of a lazy automaton stands for
    forced_bytes: int = 4_096  # of one forced run
    shortest_bytes: int = 64 << 10  # of the shortest text: its end is spelled in tokens again as a text grows


class ConstraintRefused(ValueError):
    """A constraint that cannot be honoured.

    Args:
        why: one sentence with what was given and what to write instead.
        where: "position 7" of a regular expression, "#/properties/age/minimum" of a schema, or "".
        keyword: the schema keyword or the construct that is refused: "uniqueItems", "backreference"; or "".
    """

    def __init__(self, why: str, *, where: str = "", keyword: str = "") -> None:
        super().__init__(f"{where}: {why}" if where else why)
        self.why = why
        self.where = where
        self.keyword = keyword


class Unsupported(ConstraintRefused):
    """A constraint that is valid, and not honoured here."""


class LimitExceeded(ConstraintRefused):
    """A constraint that is too large, too deep or too ambiguous."""


def too_ambiguous(most: int) -> LimitExceeded:
    """Says that a state of a lazy automaton stands for more than so many positions."""
    return LimitExceeded(
        f"a text can be read in more than {most} ways at once; write a constraint whose repeats and options differ in "
        "what they begin with",
        keyword="ambiguity",
    )


def too_many_states(most: int) -> LimitExceeded:
    """Says that a lazy automaton has more than so many states."""
    return LimitExceeded(
        f"the automaton has more than {most} states; write shorter repeats or fewer options", keyword="states"
    )
