"""Expresses strings of a schema as languages of characters, tells whether a text is of one, and knows the formats.

A format is inside what its standard admits, never beyond: a generator may leave out rare spellings (lower-case "t" in
date-times, leap seconds, quoted local parts of addresses, non-ASCII domain names), a validator may not complain.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, reduce

from ..algebra import ANY_CHARACTER, concat, difference, intersection, repeat
from ..boolean.character_automata import determinised
from ..errors import LimitExceeded, Limits
from ..language import (
    NOTHING,
    AnyOrder,
    Call,
    Chars,
    Concat,
    Dfa,
    Difference,
    Intersection,
    Language,
    Literal,
    Ranges,
    Repeat,
    Spelled,
    Union,
)
from ..regex.parser import parse_regex
from .expressions import none_of, one_of, union


@dataclass(frozen=True, slots=True)
class Strings:
    """The strings of certain lengths, in characters, that are of some languages, and not of others."""

    least: int = 0
    most: int | None = None
    languages: tuple[Language, ...] = ()
    barred: tuple[Language, ...] = ()
    excluded: tuple[str, ...] = ()
    narrow: bool = False  # a language among them is inside what is meant: what is outside it may be meant as well

    @property
    def empty(self) -> bool:
        """Tells whether the lengths leave nothing. The languages are intersected later, by `boolean`."""
        return self.most is not None and self.most < self.least

    def holds(self, text: str) -> bool:
        """Tells whether a string is one of these."""
        return (
            len(text) >= self.least
            and (self.most is None or len(text) <= self.most)
            and text not in self.excluded
            and all(admits(language, text) for language in self.languages)
            and not any(admits(language, text) for language in self.barred)
        )

    def characters(self) -> Language:
        """Returns the strings as they are, without quotes or escapes."""
        if self.empty:
            return NOTHING
        parts = list(self.languages)
        if self.least or self.most is not None or not (parts or self.excluded):
            parts.insert(0, repeat(ANY_CHARACTER, self.least, self.most))
        if self.excluded and not self.languages:
            parts.append(none_of(self.excluded))
            return difference(reduce(intersection, parts), union(self.barred))
        return difference(
            reduce(intersection, parts), union([*self.barred, *([one_of(self.excluded)] if self.excluded else [])])
        )


def quoted(characters: Language) -> Language:
    """Writes a JSON string of these characters."""
    if characters == NOTHING:
        return NOTHING
    if isinstance(characters, Concat | Literal) and (text := _plain(characters)) is not None:
        return Literal(b'"' + text + b'"')
    return concat([Literal(b'"'), Spelled(characters), Literal(b'"')])


def _plain(language: Language) -> bytes | None:
    """Returns the text of a literal that is written inside a JSON string as it is."""
    if not isinstance(language, Literal):
        return None
    return language.data if all(byte >= 0x20 and byte not in b'"\\' for byte in language.data) else None


LONGEST_TEXT = 1_000  # characters that are matched while a schema is compiled


def admits(language: Language, text: str) -> bool:
    """Tells whether a text is of a language, which is over characters: no Call, no Spelled.

    Raises:
        LimitExceeded: the text is long; the time is polynomial in its length.
    """
    if len(text) > LONGEST_TEXT:
        raise LimitExceeded(
            f"a constant or name of {len(text)} characters would have to be matched; {LONGEST_TEXT} are allowed"
        )
    return len(text) in _ends(language, text, 0, {})


def _ends(node: Language, text: str, start: int, known: dict[tuple[int, int], frozenset[int]]) -> frozenset[int]:
    """Returns the places at which a text of `node` that begins at `start` may end."""
    key = (id(node), start)
    found = known.get(key)
    if found is None:
        found = known[key] = frozenset(_walk(node, text, start, known))
    return found


def _walk(node: Language, text: str, start: int, known: dict[tuple[int, int], frozenset[int]]) -> set[int]:
    match node:
        case Literal(data):
            expected = data.decode("utf-8")
            return {start + len(expected)} if text.startswith(expected, start) else set()
        case Chars(ranges):
            return {start + 1} if start < len(text) and _holds(ranges, text[start]) else set()
        case Concat(parts):
            here = {start}
            for part in parts:
                here = {end for begin in here for end in _ends(part, text, begin, known)}
            return here
        case Union(options):
            return {end for option in options for end in _ends(option, text, start, known)}
        case Repeat(body, least, most):
            return _repeat_ends(body, least, most, text, start, known)
        case Dfa():
            return _dfa_ends(node, text, start)
        case Intersection(left, right):
            return set(_ends(left, text, start, known) & _ends(right, text, start, known))
        case Difference(left, right):
            return set(_ends(left, text, start, known) - _ends(right, text, start, known))
        case Call() | Spelled() | AnyOrder():
            raise AssertionError("a language of characters calls nothing and spells nothing")


def _repeat_ends(
    body: Language,
    least: int,
    most: int | None,
    text: str,
    start: int,
    known: dict[tuple[int, int], frozenset[int]],
) -> set[int]:
    found: set[int] = set()
    here = {start}
    count = 0
    # A round that adds nothing new after `least` rounds will never add anything: ends are at most len(text) many.
    while here and (most is None or count <= most):
        if count >= least:
            fresh = here - found
            if not fresh:
                break
            found |= fresh
            here = fresh
        following = {end for begin in here for end in _ends(body, text, begin, known)}
        if count < least and following == here:
            count = least  # only empty rounds are left
            continue
        here = following
        count += 1
    return found


def _dfa_ends(node: Dfa, text: str, start: int) -> set[int]:
    found: set[int] = set()
    state: int | None = 0
    for position in range(start, len(text) + 1):
        if state is None:
            break
        if node.accepting[state]:
            found.add(position)
        if position < len(text):
            character = text[position]
            state = next((target for ranges, target in node.edges[state] if _holds(ranges, character)), None)
    return found


def _holds(ranges: Ranges, character: str) -> bool:
    index = bisect_right(ranges, (ord(character), 0x110000)) - 1
    return index >= 0 and ranges[index][0] <= ord(character) <= ranges[index][1]


# RFC 3339. Years 0001 to 9999; 29 February in leap years only.
_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_MULTIPLE_OF_FOUR = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:\d\d{_MULTIPLE_OF_FOUR}|{_MULTIPLE_OF_FOUR}00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"

# RFC 3339, appendix A.
_COUNT = r"\d{1,9}"
_CLOCK = rf"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS = rf"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = rf"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_COUNT}W)"


def _label(longest: int) -> str:
    """Writes a label of RFC 1123, without "--" as its third and fourth characters (that announces an encoded one)."""
    a, h = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
    return rf"(?:{a}|{a}{a}|{a}{h}{a}|{a}{h}{a}{h}{{0,{longest - 4}}}{a}|{a}{h}-{a}(?:{h}{{0,{longest - 5}}}{a})?)"


# At most 253 characters: few long labels or many short ones.
_HOSTNAME = rf"(?:{_label(63)}(?:\.{_label(63)}){{0,2}}|{_label(30)}(?:\.{_label(30)}){{3,7}})"


def _email(atom: str, longest: int) -> str:
    """Writes RFC 5321 with an unquoted local part of at most 64 octets: one atom, or up to four with dots between."""
    few = rf"{atom}{{1,{longest // 4 - 1}}}"
    return rf"(?:{atom}{{1,{longest}}}|{few}(?:\.{few}){{1,3}})@{_HOSTNAME}"


_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_WIDE_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\u00a1-\U0010ffff-]"  # of at most four octets
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"


def _ipv6() -> str:
    """Writes RFC 4291: eight groups, or `::` for at least one of them; the last two may be an IPv4 address."""
    group = "[0-9a-fA-F]{1,4}"
    tail = rf"(?:{group}:{group}|{_IPV4})"
    options = [rf"(?:{group}:){{6}}{tail}"]
    for left in range(8):
        head = "::" if not left else rf"{group}(?::{group}){{{left - 1}}}::"
        right = 7 - left
        rest = [rf"{group}(?::{group}){{0,{right - 1}}}"] if right else []
        if right >= 2:
            rest.append(rf"(?:{group}:){{0,{right - 2}}}{_IPV4}")
        options.append(f"{head}(?:{'|'.join(rest)})?" if rest else head)
    return f"(?:{'|'.join(options)})"


# RFC 3986.
_ENCODED = "%[0-9A-Fa-f]{2}"
_PLAIN = r"a-zA-Z0-9._~!$&'()*+,;=\-"
_WIDE = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd"  # of RFC 3987


def _uri(plain: str, *, relative: bool) -> str:
    """Writes a URI, or an IRI by the characters that are plain; or, when relative, what may refer to one."""
    path = rf"(?:[{plain}:@/]|{_ENCODED})*"
    segment = rf"(?:[{plain}:@]|{_ENCODED})+"
    first = rf"(?:[{plain}@]|{_ENCODED})+" if relative else segment  # a colon would end a scheme
    after = rf"(?:[{plain}:@/?]|{_ENCODED})*"
    address = rf"\[(?:{_ipv6()}|[vV][0-9a-fA-F]+\.[{_PLAIN}:]+)\]"
    host = rf"(?:{address}|(?:[{plain}]|{_ENCODED})*)"
    authority = rf"(?:(?:[{plain}:]|{_ENCODED})*@)?{host}(?::\d{{0,5}})?"
    hierarchy = rf"(?://{authority}(?:/{path})?|/(?:{segment}(?:/{path})?)?|{first}(?:/{path})?)?"
    scheme = "" if relative else "[a-zA-Z][a-zA-Z0-9+.-]*:"
    return rf"{scheme}{hierarchy}(?:\?{after})?(?:#{after})?"


def _reference(plain: str) -> str:
    return rf"(?:{_uri(plain, relative=False)}|{_uri(plain, relative=True)})"


# RFC 6570.
_VARIABLE = rf"(?:[a-zA-Z0-9_]|{_ENCODED})+(?:\.(?:[a-zA-Z0-9_]|{_ENCODED})+)*(?::[1-9]\d{{0,3}}|\*)?"
_TEMPLATE = rf"(?:[a-zA-Z0-9._~!$&()*+,;=:@/?#\[\]-]|{_ENCODED}|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"

# RFC 6901, and draft-bhutton-relative-json-pointer.
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


def _expression() -> str:
    """Writes regular expressions that mean the same in every dialect, with groups two levels deep."""
    escape = r"\\[dDwWsS.*+?()|\[\]{}^$/\\]"
    member = r"(?:[a-zA-Z0-9_ .,:;@#%/=]|a-z|A-Z|0-9|\\[dws\]\\.-])"
    atom = rf"(?:[a-zA-Z0-9_ ,:;@#%/=&~<>!'\x22-]|\.|{escape}|\[\^?{member}+\])"
    count = r"(?:[*+?]|\{[1-9]\d?\}|\{\d,\}|\{0,[1-9]\d?\})?"
    inner = rf"(?:{atom}{count})"
    for _ in range(2):
        branches = rf"{inner}+(?:\|{inner}+)*"
        inner = rf"(?:(?:{atom}|\((?:\?:)?{branches}\)){count})"
    return rf"\^?{inner}*(?:\|{inner}+)*\$?"


_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _email(_ATOM, 64),
    "idn-email": _email(_WIDE_ATOM, 16),
    "hostname": _HOSTNAME,
    "host-name": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ip-address": _IPV4,
    "ipv6": _ipv6(),
    "uri": _uri(_PLAIN, relative=False),
    "iri": _uri(_PLAIN + _WIDE, relative=False),
    "uri-reference": _reference(_PLAIN),
    "iri-reference": _reference(_PLAIN + _WIDE),
    "uri-template": _TEMPLATE,
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d{{0,3}})(?:#|{_POINTER})",
    "regex": _expression(),
}
FORMATS = frozenset(_PATTERNS)

# Counters are smaller than states.
_COUNTED = frozenset({"email", "idn-email", "hostname", "host-name", "idn-hostname"})
_LIMITS = Limits(pattern_bytes=1 << 20)  # these are ours, however long


def is_format(name: str) -> bool:
    """Tells whether a name is a format of strings that means something; others are annotations, as for validators."""
    return name in FORMATS


@cache
def format_language(name: str) -> Language:
    """Compiles a format to characters: an automaton where that is small, to be followed without alternatives."""
    language = parse_regex(f"(?a:{_PATTERNS[name]})", _LIMITS)
    return language if name in _COUNTED else determinised(language, _LIMITS)
