"""What a constraint admits, as an expression: the common form of regular expressions and JSON schemas.

Front ends (`regex`, `schema`) build it, `boolean` takes intersections and differences out of it, and `automaton` reads
it as it is: nothing is expanded ahead of need. The nodes are msgpack, so an expression that was built in one process
can be used in another.

Characters are Unicode scalar values: surrogates are never part of a language.
"""

from __future__ import annotations

import msgspec

from .arrangement import Arrangement

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included; ascending, disjoint, not adjacent


class _Node(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Literal(_Node, frozen=True):
    """Exactly these bytes (UTF-8); b"" is the empty text."""

    data: bytes


class Chars(_Node, frozen=True):
    """One character of a set."""

    ranges: Ranges


class Concat(_Node, frozen=True):
    parts: tuple[Language, ...]


class Union(_Node, frozen=True):
    """Any of the options; without options nothing at all."""

    options: tuple[Language, ...]


class Repeat(_Node, frozen=True):
    """`body` at least `least` and at most `most` times; None: without end."""

    body: Language
    least: int = 0
    most: int | None = None


class AnyOrder(_Node, frozen=True):
    """Parts in any order, each at most once, those that `required` lists exactly once; never none, and none is empty.

    The first `ordered` of them keep their order until the last of these, a required one, has come: those of them that
    are not required and were left out may come after it. With it come the `others`, any number of times;
    `others_least` 1: at least once.

    `least` and `most` of all together; towards `least` the others are one part. No separator is a Call.
    """

    parts: tuple[Language, ...]
    separator: Language
    others: Language | None = None
    required: tuple[int, ...] = ()  # indexes of parts, ascending
    ordered: int = 0
    least: int = 1
    most: int | None = None
    others_least: int = 0

    @property
    def arrangement(self) -> Arrangement:
        required = sum(1 << index for index in self.required)
        others = self.others is not None
        return Arrangement(len(self.parts), required, self.ordered, self.least, self.most, others, self.others_least)


class Call(_Node, frozen=True):
    """The language of a rule of the grammar; rules may call each other and themselves."""

    rule: str


class Dfa(_Node, frozen=True):
    """A deterministic automaton over characters. State 0 starts; every state reaches an accepting one."""

    accepting: tuple[bool, ...]  # [states]
    edges: tuple[tuple[tuple[Ranges, int], ...], ...]  # [states]: (characters, next state), characters disjoint


class Spelled(_Node, frozen=True):
    """The characters of `body` as they are written inside a JSON string, without the quotes around it.

    A character has one spelling: raw UTF-8, but for `\\"`, `\\\\`, the short escapes of \\b \\t \\n \\f \\r, and
    `\\u00xx` (lower case) of the other characters below U+0020. `body` holds no Call and no AnyOrder.
    """

    body: Language


class Both(_Node, frozen=True):
    """What both admit. Neither side holds a Call or AnyOrder; `boolean` makes a Dfa of it."""

    left: Language
    right: Language


class Without(_Node, frozen=True):
    """What `left` admits and `right` does not. Neither side holds a Call or AnyOrder; `boolean` makes a Dfa of it."""

    left: Language
    right: Language


Language = Literal | Chars | Concat | Union | Repeat | AnyOrder | Call | Dfa | Spelled | Both | Without

EMPTY_TEXT = Literal(b"")
NOTHING = Union(())


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """A language with the rules that it calls."""

    start: Language
    rules: dict[str, Language] = {}
