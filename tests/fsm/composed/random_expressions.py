"""Random expressions, a recogniser that knows nothing of automata, and texts: members and what is nearly one.

A composition is a tree of tuples, built twice: as an expression of umbel's, and as what `Reference` follows, which
lists where each part may end, in the order in which they are to be tried, with what was captured on the way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import umbel as ul
from umbel.fsm.composed.expression import Expression

Part = tuple[Any, ...]
Captured = tuple[tuple[str, str], ...]

TEXTS = ("a", "b", "ab", "ba", "", "é", "aa,")
PATTERNS = ("[ab]+", "a*", "(ab|b)?c?", "[^a]", "a{2,3}", "b|ab|aba", "é?a", "(?i:A)b")
SCHEMAS = (  # with all their texts
    ({"type": "boolean"}, ("true", "false")),
    ({"enum": [1, "a", None]}, ("1", '"a"', "null")),
    ({"type": "array", "items": {"const": 7}, "maxItems": 2}, ("[]", "[7]", "[7, 7]")),
)
QUOTED = ("abba", "ab b")
ALPHABET = 'abcé,17[] "truefalsn'


def composition(dice: random.Random, names: Iterator[str], depth: int = 3, rule: str | None = None) -> Part:
    """Returns a random tree. rule: the recursive expression around it, which it may refer to after a text."""
    kind = (
        dice.choice(("text", "regex", "json", "choice", "substring", "until"))
        if depth == 0
        else dice.choice(
            (
                "text",
                "regex",
                "json",
                "substring",
                "sequence",
                "sequence",
                "either",
                "either",
                "repeat",
                "capture",
                "capture",
                "optional",
                "separated",
                "recursive" if rule is None else "call",
            )
        )
    )
    inside = lambda: composition(dice, names, depth - 1, rule)  # noqa: E731 (short, and used below only)
    match kind:
        case "text":
            return "text", dice.choice(TEXTS)
        case "regex":
            return "regex", dice.choice(PATTERNS)
        case "json":
            return "json", dice.randrange(len(SCHEMAS))
        case "choice":
            return "either", tuple(("text", text) for text in dice.sample(TEXTS, 3))
        case "substring":
            return "substring", dice.choice(QUOTED), dice.choice(("characters", "words"))
        case "until":
            return "until", dice.choice(("b", "ab", "aab"))
        case "sequence":
            return "sequence", tuple(inside() for _ in range(dice.randint(2, 3)))
        case "either":
            return "either", tuple(inside() for _ in range(dice.randint(2, 3)))
        case "repeat":
            low = dice.randint(0, 2)
            return "repeat", inside(), low, dice.choice((None, low, low + 2))
        case "optional":
            return "repeat", inside(), 0, 1
        case "separated":
            return "separated", inside(), dice.randint(0, 2), dice.choice((None, 3)), dice.choice((",", "a"))
        case "capture":
            return "capture", next(names), inside()
        case "recursive":
            base = composition(dice, names, 0)
            other = composition(dice, names, depth - 1, "inside")
            return "recursive", ("either", (base, other, ("sequence", (("text", "a"), ("call",), ("text", "b")))))
        case _:
            return "sequence", (("text", dice.choice("ab")), ("call",))


def built(part: Part, inner: Expression | None = None) -> Expression:
    """Returns the expression of a tree."""
    match part:
        case "text", text:
            return ul.literal(text)
        case "regex", pattern:
            return ul.regex(pattern)
        case "json", index:
            return ul.json(SCHEMAS[index][0])
        case "substring", text, by:
            return ul.substring(text, by)
        case "until", mark:
            return ul.until(mark)
        case "sequence", parts:
            first, *rest = (built(each, inner) for each in parts)
            for each in rest:
                first = first + each
            return first
        case "either", options:
            return ul.choice([built(each, inner) for each in options])
        case "repeat", body, low, high:
            return built(body, inner).repeat(low, high)
        case "separated", body, low, high, separator:
            return built(body, inner).repeat(low, high, separator=separator)
        case "capture", name, body:
            return built(body, inner).capture(name)
        case "recursive", body:
            return ul.recursive(lambda again: built(body, again))
        case ("call",):
            assert inner is not None
            return inner
    raise AssertionError(part)


class Reference:
    """Recognises a text: for each part and place, the ends that it may have, the preferred one first."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.ends = lru_cache(maxsize=None)(self._ends)

    def read(self, part: Part) -> list[tuple[str, str]] | None:
        """Returns what is captured, in the order in which it begins; None where the text is none of the tree's."""
        for end, captured in self.ends(part, 0, None):
            if end == len(self.text):
                return list(captured)
        return None

    def _ends(self, part: Part, at: int, rule: Part | None) -> list[tuple[int, Captured]]:
        found: dict[int, Captured] = {}
        for end, captured in self._tries(part, at, rule):
            found.setdefault(end, captured)
        return list(found.items())

    def _tries(self, part: Part, at: int, rule: Part | None) -> Iterator[tuple[int, Captured]]:
        match part:
            case "text", text:
                if self.text.startswith(text, at):
                    yield at + len(text), ()
            case "sequence", parts:
                if not parts:
                    yield at, ()
                    return
                for middle, before in self.ends(parts[0], at, rule):
                    for end, after in self.ends(("sequence", parts[1:]), middle, rule):
                        yield end, before + after
            case "either", options:
                for option in options:
                    yield from self.ends(option, at, rule)
            case "repeat", body, low, high:
                if high != 0:
                    following = ("repeat", body, max(low - 1, 0), None if high is None else high - 1)
                    for middle, before in self.ends(body, at, rule):
                        if low > 0 or middle > at:
                            for end, after in self.ends(following, middle, rule):
                                yield end, before + after
                if low == 0:
                    yield at, ()
            case "separated", body, low, high, separator:
                more = ("sequence", (("text", separator), body))
                turns = ("repeat", more, max(low - 1, 0), None if high is None else high - 1)
                yield from self.ends(("sequence", (body, turns)), at, rule)
                if low == 0:
                    yield at, ()
            case "capture", name, body:
                for end, captured in self.ends(body, at, rule):
                    yield end, ((name, self.text[at:end]), *captured)
            case "recursive", body:
                yield from self.ends(body, at, body)
            case ("call",):
                assert rule is not None
                yield from self.ends(rule, at, rule)
            case _:
                for end in range(len(self.text), at - 1, -1):
                    if _is_leaf(part, self.text[at:end]):
                        yield end, ()


def _is_leaf(part: Part, text: str) -> bool:
    match part:
        case "regex", pattern:
            return re.fullmatch(pattern, text) is not None
        case "json", index:
            return text in SCHEMAS[index][1]
        case "substring", quoted, "characters":
            return text != "" and text in quoted
        case "substring", quoted, _:
            words = re.findall(r"\s*\S+", quoted)
            return text in {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
        case "until", mark:
            return text.endswith(mark) and text.find(mark) == len(text) - len(mark)
    raise AssertionError(part)


def member(dice: random.Random, part: Part, rule: Part | None = None, depth: int = 0) -> str:
    """Returns a text of the tree."""
    match part:
        case "text", text:
            return str(text)
        case "regex", pattern:
            return dice.choice([each for each in _SAMPLES if re.fullmatch(pattern, each)])
        case "json", index:
            return dice.choice(SCHEMAS[index][1])
        case "substring", quoted, "characters":
            start = dice.randrange(len(quoted))
            return str(quoted[start : dice.randint(start + 1, len(quoted))])
        case "substring", quoted, _:
            words = re.findall(r"\s*\S+", quoted)
            start = dice.randrange(len(words))
            return "".join(words[start : dice.randint(start + 1, len(words))])
        case "until", mark:
            return dice.choice(["", "a", "é1"]).replace(mark, "") + str(mark)
        case "sequence", parts:
            return "".join(member(dice, each, rule, depth) for each in parts)
        case "either", options:
            return member(dice, options[0] if depth > 3 else dice.choice(options), rule, depth)
        case "repeat", body, low, high:
            turns = dice.randint(low, min(low + 2, low + 2 if high is None else high))
            return "".join(member(dice, body, rule, depth) for _ in range(turns))
        case "separated", body, low, high, separator:
            turns = dice.randint(low, min(low + 2, low + 2 if high is None else high))
            return str(separator).join(member(dice, body, rule, depth) for _ in range(turns))
        case "capture", _, body:
            return member(dice, body, rule, depth)
        case "recursive", body:
            return member(dice, body, body, depth)
        case _:
            assert rule is not None
            return member(dice, rule, rule, depth + 1)


_SAMPLES = ["", "a", "aa", "aaa", "b", "ab", "aba", "abab", "c", "abc", "bc", "é", "éa", "Ab", "AB", ",", "bb"]


def mutated(dice: random.Random, text: str) -> str:
    """Returns the text with a character taken out, put in or exchanged."""
    place = dice.randint(0, len(text))
    character = dice.choice(ALPHABET)
    return dice.choice(
        (
            text[:place] + character + text[place:],
            text[:place] + text[place + 1 :],
            text[:place] + character + text[place + 1 :],
        )
    )
