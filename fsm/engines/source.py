"""Constraints as they are written, and respelled so that every engine reads the same.

    Source                a constraint as the program wrote it, with the names of the engines
    in_common_syntax      its regular expressions with characters, classes, groups and counts only
    lark_of_gbnf          a GBNF grammar as a Lark grammar

Engines have dialects. `[[:alpha:]]` is a class here and six characters there, `a++` is possessive or a repeat of a
repeat, `\\w` and `$` differ in what they take. So no engine but ours is given an expression as its author wrote it: our
parser reads it, as Python's `re` (or, in a schema, ECMAScript) does, and what it read is written in a syntax that has
one meaning everywhere.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any
from typing import Literal as OneOf

from ..errors import ConstraintRefused, Limits, Unsupported
from ..language import ANY, Chars, CharSet, Concat, Language, Literal, Repeat, Union
from ..regex.parser import parse_regex, search_regex

Kind = OneOf["regex", "json_schema", "lark"]
Whitespace = OneOf["spaced", "compact", "flexible"]
KeyOrder = OneOf["declared", "any"]
Engine = OneOf["auto", "fsm", "llguidance", "outlines-core", "interegular"]


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


# GBNF grammars (`root ::= ...`), as llama.cpp, XGrammar and SGLang write them: llguidance's converter reads them, and
# what it does not read of the dialect is respelled before.

# A quoted text, a class of characters, a comment; a line that goes on with another alternative; a group's two ends.
_GBNF_TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*|[ \t\r\n]*\n[ \t\r\n]*\||[()]', re.DOTALL
)
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_GBNF_KEPT = frozenset('\\"[]nrt')  # escapes that the converter reads itself
_MOST_GBNF_LEVELS = 64  # of groups inside each other: the converter calls itself
_MOST_SHOWN = 200  # characters of the converter's own words


def lark_of_gbnf(grammar: str) -> str:
    """Returns the Lark grammar of the same language.

    Raises:
        MissingEngine: llguidance is not installed.
        ConstraintRefused: the text is no GBNF, and the message says where; or its groups nest more than 64 deep.
    """
    try:
        converter = importlib.import_module("llguidance.gbnf_to_lark")
    except ImportError as error:
        raise MissingEngine("llguidance") from error
    too_deep = ConstraintRefused(
        f"the grammar is nested too deeply: at most {_MOST_GBNF_LEVELS} groups inside each other; write rules for the "
        "inner ones",
        keyword="gbnf",
    )
    level = 0
    for token in _GBNF_TOKENS.finditer(grammar):
        level += {"(": 1, ")": -1}.get(token[0], 0)
        if level > _MOST_GBNF_LEVELS:
            raise too_deep
    try:
        converted: str = converter.gbnf_to_lark(_GBNF_TOKENS.sub(_respelled, grammar))
    except RecursionError:  # the caller stands deep itself
        raise too_deep from None
    except Exception as error:  # the converter raises bare Exceptions for rules that are missing or come twice
        why = str(error)[:_MOST_SHOWN]
        raise ConstraintRefused(f'{why}; write rules such as root ::= "yes" | "no"', keyword="gbnf") from None
    return converted


def _respelled(token: re.Match[str]) -> str:
    text = token[0]
    match text[0]:
        case '"' | "[":
            return _GBNF_ESCAPE.sub(_gbnf_character, text)
        case "#" | "(" | ")":
            return text
        case _:
            return " |"


def _gbnf_character(escape: re.Match[str]) -> str:
    """Respells an escape as the converter reads it. It takes no \\-, and drops zeros of \\u that Lark needs."""
    *digits, other = escape.groups()
    if other is not None and (other in _GBNF_KEPT or other.isalnum()):
        return escape[0]
    code = ord(other) if other is not None else int(next(given for given in digits if given is not None), 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ConstraintRefused(f"{escape[0]} is no character; write its code in hexadecimal digits", keyword="gbnf")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


_SPECIAL = frozenset("\\.^$*+?{}[]()|")
_SPECIAL_IN_CLASS = frozenset("\\^-[]&~|#")
_DATA = ("const", "default", "enum", "examples")  # keywords whose values are no schemas


def in_common_syntax(source: Source, limits: Limits) -> Source:
    """Returns the source with its regular expressions in the common syntax; what else it says stays as it is.

    Raises:
        ConstraintRefused: an expression that our parser refuses.
        Unsupported: one that looks around (lookahead, anchors inside), which the common syntax cannot say.
    """
    match source.kind:
        case "regex":
            return replace(source, text=written(parse_regex(source.text, limits)))
        case "json_schema":
            return replace(source, text=_schema(source.text, limits))
    return source


def written(language: Language) -> str:
    """Returns an expression that matches exactly the texts of the language, from end to end.

    Raises:
        Unsupported: the language is not one of characters, sequences, alternatives and repeats.
    """
    match language:
        case Literal(data):
            return "".join(map(_character, data.decode()))
        case Chars(ranges):
            return _class(CharSet(ranges))
        case Concat(parts):
            return "".join(_grouped(part) if isinstance(part, Union) else written(part) for part in parts)
        case Union(options) if options:
            return "|".join(written(option) for option in options)
        case Repeat(body, least, most):
            return f"{_grouped(body)}{_count(least, most)}"
    raise Unsupported(
        "an expression with lookaheads, or with anchors inside, is read by umbel's own automata only; leave "
        "constraint_engine out",
        keyword="regex",
    )


def _grouped(language: Language) -> str:
    single = isinstance(language, Chars) or (isinstance(language, Literal) and len(language.data.decode()) == 1)
    return written(language) if single else f"(?:{written(language)})"


def _count(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if short is not None:
        return short
    return f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"


def _character(character: str) -> str:
    return f"\\{character}" if character in _SPECIAL else _printed(character)


def _printed(character: str) -> str:
    """Writes control characters by their number: two digits after \\x are read alike everywhere."""
    return f"\\x{ord(character):02x}" if ord(character) < 0x20 or ord(character) == 0x7F else character


def _class(characters: CharSet) -> str:
    if characters == ANY:
        return r"[\s\S]"
    others = ~characters
    if len(others) < len(characters):
        return f"[^{_ranges(others)}]"
    return f"[{_ranges(characters)}]"


def _ranges(characters: CharSet) -> str:
    parts = []
    for first, last in characters.ranges:
        parts.append(_member(first) if first == last else f"{_member(first)}-{_member(last)}")
    return "".join(parts)


def _member(code: int) -> str:
    character = chr(code)
    return f"\\{character}" if character in _SPECIAL_IN_CLASS else _printed(character)


def _schema(text: str, limits: Limits) -> str:
    """Returns the schema with its patterns in the common syntax; a text without patterns stays as it is."""
    if not any(f'"{keyword}"' in text for keyword in ("pattern", "patternProperties")):
        return text
    return json.dumps(_rewritten(json.loads(text, parse_float=_exact), "#", limits), ensure_ascii=False)


def _rewritten(value: Any, path: str, limits: Limits) -> Any:  # Any: what json.loads gives
    if isinstance(value, list):
        return [_rewritten(inner, f"{path}/{index}", limits) for index, inner in enumerate(value)]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, inner in value.items():
        where = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        if key in _DATA:
            found[key] = inner
        elif key == "pattern" and isinstance(inner, str):
            found[key] = _searched(inner, where, limits)
        elif key == "patternProperties" and isinstance(inner, dict):
            found[key] = {
                _searched(pattern, where, limits): _rewritten(schema, f"{where}/{pattern}", limits)
                for pattern, schema in inner.items()
            }
        else:
            found[key] = _rewritten(inner, where, limits)
    return found


def _searched(pattern: str, where: str, limits: Limits) -> str:
    """Writes a pattern that is looked for anywhere in a string as one for the whole string."""
    keyword = where.rpartition("/")[2]
    try:
        return f"^(?:{written(search_regex(pattern, limits))})$"
    except Unsupported as error:
        raise Unsupported(f"the pattern {pattern!r}: {error}", where=where, keyword=keyword) from None
    except ConstraintRefused as error:
        raise ConstraintRefused(f"the pattern {pattern!r}: {error}", where=where, keyword=keyword) from None


def _exact(text: str) -> float:
    """Reads a number, and refuses one that would not be written again as it was."""
    number = float(text)
    if Decimal(repr(number)) != Decimal(text):
        raise Unsupported(f"the number {text} of the schema has more digits than a double; leave constraint_engine out")
    return number
