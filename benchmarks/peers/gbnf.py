"""Regular expressions as llama.cpp grammars (GBNF), which is what its server takes instead.

The dialect is that of the workload files: literals, character classes, `.`, groups, alternation, `? * +` and bounded
repetition. Classes, groups and repetitions are written the same in both; literals are quoted in GBNF.
"""

from .peer import PeerError

CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " \\t\\n\\r"}  # inside of brackets, as GBNF writes it
CLASS_ESCAPES = {"\\", '"', "[", "]", "-", "n", "t", "r"}  # the only ones that GBNF knows there
CONTROL = {"n": "\n", "t": "\t", "r": "\r"}


def grammar_of(regex: str) -> str:
    """A grammar whose `root` is exactly the language of `regex`.

    Raises:
        PeerError: the expression uses something outside the dialect.
    """
    pieces: list[str] = []
    place = 0
    while place < len(regex):
        piece, place = _piece(regex, place)
        pieces.append(piece)
    return "root ::= " + " ".join(pieces)


def _piece(regex: str, place: int) -> tuple[str, int]:
    """The grammar of what begins at `place`, and where the next piece begins."""
    character = regex[place]
    match character:
        case "[":
            return _class(regex, place)
        case "{":
            end = regex.index("}", place) + 1
            return regex[place:end], end
        case "(":
            if regex.startswith("(?:", place):
                return "(", place + 3
            if regex.startswith("(?", place):
                raise PeerError(
                    f"regex {regex!r}: {regex[place : place + 3]!r} has no counterpart in GBNF; write (?:...)"
                )
            return "(", place + 1
        case ")" | "|" | "?" | "*" | "+":
            return character, place + 1
        case ".":
            return "[^\\n]", place + 1
        case "^" | "$":
            raise PeerError(f"regex {regex!r}: {character!r} at {place}; the whole value is matched, leave it out")
        case "\\":
            return _escape(regex, place), place + 2
        case _:
            return _literal(character), place + 1


def _escape(regex: str, place: int) -> str:
    letter = regex[place + 1]
    if letter in CLASSES:
        return f"[{CLASSES[letter]}]"
    if letter.isalnum() and letter not in CONTROL:
        raise PeerError(f"regex {regex!r}: \\{letter} at {place} has no counterpart in GBNF; write it as a class")
    return _literal(CONTROL.get(letter, letter))


def _literal(character: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + escapes.get(character, character) + '"'


def _class(regex: str, start: int) -> tuple[str, int]:
    """The class that begins at `start`, with its escapes as GBNF has them, and where the next piece begins."""
    written = "["
    place = start + 1
    while regex[place] != "]":
        if regex[place] != "\\":
            written += regex[place]
            place += 1
            continue
        letter = regex[place + 1]
        if letter in CLASSES:
            written += CLASSES[letter]
        elif letter in CLASS_ESCAPES:
            written += "\\" + letter
        elif letter.isalnum():
            raise PeerError(f"regex {regex!r}: \\{letter} at {place} has no counterpart in GBNF; write the characters")
        else:
            written += f"\\x{ord(letter):02X}"  # "^" would negate if it came first
        place += 2
    return written + "]", place + 1
