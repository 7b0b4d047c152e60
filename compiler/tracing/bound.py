"""What a name of a recorded stream is bound to."""

from dataclasses import dataclass
from typing import Any

from ..graph import Node


@dataclass(frozen=True, slots=True)
class Generated:
    """A name that a stream node binds. `count`: of texts. `typed`: the text stands for an object that is none."""

    name: str
    setter: Node
    count: int = 1
    typed: bool = False


@dataclass(frozen=True, slots=True)
class Assigned:
    """A name that the program binds to what it has."""

    value: Any  # the user's


@dataclass(frozen=True, slots=True)
class Gathered:
    """A name that a join brings back: of every branch what the name meant there, None where it meant nothing."""

    branches: "tuple[Bound | None, ...]"


Bound = Generated | Assigned | Gathered
