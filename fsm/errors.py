"""The refusals of front ends and automata, each with its place.

ConstraintRefused            a ValueError
├── Unsupported              the expression is valid, and means something that is not honoured here
└── LimitExceeded            honouring it would take more states, bytes, depth or time than allowed
"""


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
