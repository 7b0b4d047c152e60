"""Membership by sets of end positions: slow, and short enough to be seen to be right. An oracle for tests.

`ends(node, start)` is every position at which a text of `node` that begins at `start` can end; the rest is set
algebra. Intersection and difference are those of the sets, a call of a rule is its body.
"""

from umbel.fsm.language import (
    AnyOrder,
    Call,
    Chars,
    Concat,
    Dfa,
    Difference,
    Grammar,
    Intersection,
    Language,
    Literal,
    Repeat,
    Spelled,
    Union,
)

SHORT_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}


def spelling(character: str) -> str:
    """How a JSON string writes this character."""
    code = ord(character)
    return SHORT_ESCAPES.get(code) or (f"\\u{code:04x}" if code < 0x20 else character)


SPELLINGS = {spelling(chr(code)): chr(code) for code in (*range(0x20), 0x22, 0x5C)}


def matches(language: Grammar | Language, text: bytes) -> bool:
    """Whether the whole text is of the language. A rule that begins with itself fails an assertion."""
    grammar = language if isinstance(language, Grammar) else Grammar(language)
    return len(text) in _Matcher(grammar, text).ends(grammar.start, 0)


class _Matcher:
    """Of one text; remembers what was found at each (node, position)."""

    def __init__(self, grammar: Grammar, text: bytes) -> None:
        self.grammar = grammar
        self.text = text
        self.known: dict[tuple[int, int], frozenset[int] | None] = {}

    def ends(self, node: Language, start: int) -> frozenset[int]:
        key = (id(node), start)
        if key not in self.known:
            self.known[key] = None
            self.known[key] = frozenset(self.find(node, start))
        found = self.known[key]
        assert found is not None, "a rule begins with itself"
        return found

    def find(self, node: Language, start: int) -> set[int] | frozenset[int]:
        match node:
            case Literal(data):
                return {start + len(data)} if self.text.startswith(data, start) else set()
            case Chars(ranges):
                character = self.character(start)
                inside = character and any(first <= ord(character) <= last for first, last in ranges)
                return {start + len(character.encode())} if inside else set()
            case Concat(parts):
                ends = {start}
                for part in parts:
                    ends = {end for middle in ends for end in self.ends(part, middle)}
                return ends
            case Union(options):
                return {end for option in options for end in self.ends(option, start)}
            case Repeat():
                return self.repeated(node, start)
            case AnyOrder():
                return self.arranged(node, start)
            case Call(rule):
                return self.ends(self.grammar.rules[rule], start)
            case Dfa():
                return self.walked(node, start)
            case Spelled(body):
                return self.spelled(body, start)
            case Intersection(left, right):
                return self.ends(left, start) & self.ends(right, start)
            case Difference(left, right):
                return self.ends(left, start) - self.ends(right, start)

    def character(self, start: int) -> str:
        """The character that begins here, "" where none does."""
        for length in (1, 2, 3, 4):
            try:
                return self.text[start : start + length].decode()
            except UnicodeDecodeError:
                continue
        return ""

    def repeated(self, node: Repeat, start: int) -> set[int]:
        current = {start}
        for _ in range(node.least):
            following = {end for middle in current for end in self.ends(node.body, middle)}
            if following == current:
                break
            current = following
        found = set(current)
        count = node.least
        while current and (node.most is None or count < node.most):
            current = {end for middle in current for end in self.ends(node.body, middle)} - found
            found |= current
            count += 1
        return found

    def arranged(self, node: AnyOrder, start: int) -> set[int]:
        """Every sequence of parts that the words of AnyOrder allow, as far as the text goes along. -1: an other one."""
        found: set[int] = set()
        pending: list[tuple[tuple[int, ...], int]] = [((), start)]
        while pending:
            came, at = pending.pop()
            if self.complete(node, came):
                found.add(at)
            for index in range(-1 if node.others is not None else 0, len(node.parts)):
                if node.most is not None and len(came) == node.most:
                    continue
                if index in came if index >= 0 else len(came) > len(self.text):
                    continue
                part = node.others if index < 0 else node.parts[index]
                assert part is not None, "others are there"
                begins = self.ends(node.separator, at) if came else {at}
                pending += [((*came, index), end) for begin in begins for end in self.ends(part, begin)]
        return found

    def complete(self, node: AnyOrder, came: tuple[int, ...]) -> bool:
        parts = [index for index in came if index >= 0]
        others = len(came) - len(parts)
        if node.ordered:
            if node.ordered - 1 not in came:
                return False
            first = came[: came.index(node.ordered - 1) + 1]
            if list(first) != sorted(first) or first[0] < 0:
                return False
            if any(index not in first for index in node.required if index < node.ordered):
                return False
        enough = len(parts) + min(others, 1) >= node.least and others >= node.others_least
        return enough and set(node.required) <= set(parts)

    def walked(self, node: Dfa, start: int) -> set[int]:
        found, state = set(), 0
        while True:
            if node.accepting[state]:
                found.add(start)
            character = self.character(start)
            code = ord(character) if character else -1
            following = [
                target for ranges, target in node.edges[state] if any(first <= code <= last for first, last in ranges)
            ]
            if not following:
                return found
            (state,) = following
            start += len(character.encode())

    def spelled(self, body: Language, start: int) -> set[int]:
        """Reads what is spelt here, as far as it is, matches that, and maps the ends back."""
        meant, positions = b"", {0: start}
        while True:
            spelt = self.character(start)
            if spelt == "\\":
                lengths = (2, 6)
                spelt = next(
                    (s for n in lengths if (s := self.text[start : start + n].decode("latin-1")) in SPELLINGS), ""
                )
            elif spelt and spelling(spelt) != spelt:
                spelt = ""
            if not spelt:
                break
            meant += SPELLINGS.get(spelt, spelt).encode()
            start += len(spelt.encode())
            positions[len(meant)] = start
        return {positions[end] for end in _Matcher(self.grammar, meant).ends(body, 0) if end in positions}
