"""GBNF grammars (`root ::= ...`), as llama.cpp, XGrammar and SGLang write them → Lark grammars, by llguidance's
converter. What the converter does not read of the dialect is respelled before it sees the grammar."""

from __future__ import annotations

import importlib
import re

from ..errors import ConstraintRefused
from .source import MissingEngine

# A quoted text, a class of characters, a comment; a line that goes on with another alternative.
_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*|[ \t\r\n]*\n[ \t\r\n]*\|', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_KEPT = frozenset('\\"[]nrt')  # escapes that the converter reads itself
_MOST_SHOWN = 200  # characters of the converter's own words


def lark_of_gbnf(grammar: str) -> str:
    """The Lark grammar of the same language.

    Raises:
        MissingEngine: llguidance is not installed.
        ConstraintRefused: the text is no GBNF; the message says where.
    """
    try:
        converter = importlib.import_module("llguidance.gbnf_to_lark")
    except ImportError as error:
        raise MissingEngine("llguidance") from error
    respelled = _TOKENS.sub(_respelled, grammar)
    try:
        converted: str = converter.gbnf_to_lark(respelled)
    except RecursionError:
        raise ConstraintRefused("the grammar is nested too deeply; write a flatter one", keyword="gbnf") from None
    except Exception as error:  # the converter raises bare Exceptions for rules that are missing or come twice
        why = str(error)[:_MOST_SHOWN]
        raise ConstraintRefused(f'{why}; write rules such as root ::= "yes" | "no"', keyword="gbnf") from None
    return converted


def _respelled(token: re.Match[str]) -> str:
    text = token[0]
    match text[0]:
        case '"' | "[":
            return _ESCAPE.sub(_character, text)
        case "#":
            return text
        case _:
            return " |"


def _character(escape: re.Match[str]) -> str:
    """An escape that the converter reads. It takes no \\-, and drops zeros of \\u that Lark needs."""
    *digits, other = escape.groups()
    if other is not None and (other in _KEPT or other.isalnum()):
        return escape[0]
    code = ord(other) if other is not None else int(next(given for given in digits if given is not None), 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ConstraintRefused(f"{escape[0]} is no character; write its code in hexadecimal digits", keyword="gbnf")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
