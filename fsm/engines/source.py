"""What a constraint's engine is given: the source as it was written, and the names of the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConstraintRefused

Kind = Literal["regex", "json_schema", "lark"]
Whitespace = Literal["spaced", "compact", "flexible"]
KeyOrder = Literal["declared", "any"]
Engine = Literal["auto", "fsm", "llguidance", "outlines-core", "interegular"]


@dataclass(frozen=True, slots=True)
class Source:
    """A constraint as it was written.

    Attributes:
        kind: how `text` is read: a regular expression that is matched as a whole, a JSON Schema as JSON text, or a
            Lark grammar.
        whitespace: of JSON.
        key_order: of the members of JSON objects; see `schema.SchemaOptions`.
    """

    kind: Kind
    text: str
    whitespace: Whitespace = "spaced"
    key_order: KeyOrder = "declared"


class MissingEngine(ConstraintRefused):
    """An engine that is not installed here."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"constraint_engine={package!r} needs the package {package}: run pip install {package}, "
            "or leave constraint_engine out",
            keyword=package,
        )
