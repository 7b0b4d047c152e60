"""The formats of the specification as languages of characters.

Each is inside what its standard admits, never beyond: a generator may leave out rare spellings (lower-case "t" in
date-times, leap seconds, quoted local parts of addresses, non-ASCII domain names), a validator may not complain.
"""

from __future__ import annotations

from functools import cache

from ..boolean.character_dfa import determinised
from ..language import Language
from ..limits import Limits
from ..regex.parser import parse_regex

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
