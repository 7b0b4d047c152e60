"""Finds text that prevents prefix sharing of one program's prompts, in its graph and in its source."""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..graph import Graph, Line, Node
from ..operations import Fork
from .pieces import (
    PRIVATE,
    Call,
    Counter,
    Kind,
    Marked,
    Piece,
    Segment,
    Shareable,
    calls_of,
    free_tokens,
    segments_of,
    sentences_of,
)
from .rules import LEAST_AFTER, NO_GAIN, Finding, audible, source_findings, volatile_text
from .source import LOOKS_VOLATILE, Aligned, SourceFile, SourceProgram, aligned, volatile_call

LEAST_COMMON = 16  # common tokens of branches; fewer are a label


@dataclass(frozen=True, slots=True)
class Subject:
    """A program to look at.

    Attributes:
        file, program: its source.
        graph: traced, or read from the source as far as that says what the program says (`command.sketch`).
        volatile_lines: see `Origins`.
    """

    file: SourceFile
    program: SourceProgram
    graph: Graph
    volatile_lines: Collection[int] = ()


def findings_of(subject: Subject, counter: Counter, *, shared: Collection[str] = ()) -> list[Finding]:
    """Returns all findings, by line, without silenced ones.

    Args:
        shared: arguments that many runs have in common.
    """
    found = list(_GraphLinter(subject, counter, shared).findings())
    found += source_findings(subject.program, counter)
    return audible(found, subject.file.text.splitlines())


class _GraphLinter:
    def __init__(self, subject: Subject, counter: Counter, shared: Collection[str]) -> None:
        self._subject = subject
        self._graph = subject.graph
        self._counter = counter
        self._shared = shared
        self._origins = Origins(subject.file, subject.program, subject.volatile_lines)

    def findings(self) -> Iterator[Finding]:
        segments = segments_of(self._graph, self._shared)
        for call in calls_of(self._graph, self._shared, segments, self._origins.refine):
            for rule, place, after in self._late(call):
                yield self._finding(rule, call.pieces, place, after)
            yield from self._late_media(call)
        yield from branch_findings(self._graph, self._counter)

    # -------------------------------------------------------------------------------- constants after values

    def _late(self, call: Call) -> Iterator[tuple[str, int, int]]:
        """Yields rule, place of the piece, and tokens of constant text after it.

        One piece for every rule, and one for every turn: moving its constants moves them before the other values too.
        """
        seen: set[str] = set()
        role, told = "", False
        for place, piece in enumerate(call.pieces):
            if piece.kind is Kind.ROLE:
                role = piece.name
            if piece.kind in (Kind.ROLE, Kind.MEDIA):
                told = False
            if piece.kind is Kind.GENERATED:
                return  # from here on no two runs share anything, however it is ordered
            if piece.kind in PRIVATE and not told:
                after = self._constant_after(call.pieces, place)
                rule = self._rule(call.pieces, place, role, after)
                if rule is not None and rule not in seen:
                    seen.add(rule)
                    told = True
                    yield rule, place, after

    def _rule(self, pieces: tuple[Piece, ...], place: int, role: str, after: int) -> str | None:
        """Returns the rule that a piece breaks at its place; None for none."""
        if after < LEAST_AFTER:
            return "shared-late" if self._shared_after(pieces, place) else None
        return _rule_of_kind(pieces, place, role)

    def _shared_after(self, pieces: Sequence[Piece], place: int) -> str:
        """Returns the first shared argument after a piece that could come before it; empty where there is none."""
        for piece in pieces[place + 1 :]:
            if piece.kind is Kind.GENERATED:
                break
            if piece.kind is Kind.SHARED and piece.name:
                return piece.name
        return ""

    def _constant_after(self, pieces: Sequence[Piece], place: int) -> int:
        tokens, run = 0, [pieces[place]]
        for piece in (*pieces[place + 1 :], Piece(Kind.GENERATED)):
            if piece.kind in (Kind.ROLE, Kind.MEDIA, Kind.GENERATED):
                tokens += free_tokens(Marked.of(run), self._counter)
                run = []
            else:
                run.append(piece)
            if piece.kind is Kind.GENERATED:
                break
        return tokens

    def _finding(self, rule: str, pieces: tuple[Piece, ...], place: int, after: int) -> Finding:
        piece = pieces[place]
        first, last = self._lines(piece.line)
        what = _what(rule, piece, after)
        if rule == "shared-late":
            name = self._shared_after(pieces, place)
            what = f"{piece.name} stands in front of {name}, which runs have in common; put {name} first"
        return Finding(rule, first, last, self._graph.name, what, Shareable(after, after))

    def _lines(self, line: Line | None) -> tuple[int, int]:
        """Returns the first and the last line of the statement that is on a line."""
        number = self._subject.program.function.lineno if line is None else line.number
        for run in self._subject.program.runs:
            for source in run.sources:
                statement = source.statement
                if statement.lineno <= number <= (statement.end_lineno or number):
                    return statement.lineno, statement.end_lineno or number
        return number, number

    # -------------------------------------------------------------------------------- images

    def _late_media(self, call: Call) -> Iterator[Finding]:
        private = ""
        for piece in call.pieces:
            if piece.kind is Kind.GENERATED:
                return
            if piece.kind in PRIVATE:
                private = private or piece.name or "volatile text"
            elif piece.kind is Kind.MEDIA and private and piece.line is not None:
                first, last = self._lines(piece.line)
                what = f"the image {piece.name or 'of the program'} stands behind {private}; put it in front"
                yield Finding("image-late", first, last, self._graph.name, what, NO_GAIN)
                return


def _rule_of_kind(pieces: tuple[Piece, ...], place: int, role: str) -> str:
    if pieces[place].kind is Kind.VOLATILE:
        return "volatile-early"
    if role == "system":
        return "instance-in-system"
    return "counter-early" if is_counter(pieces, place) else "constants-late"


def _what(rule: str, piece: Piece, after: int) -> str:
    value = piece.text if piece.kind is Kind.VOLATILE else piece.name
    if rule == "volatile-early":
        return volatile_text(repr(value), after)
    how = "say these first, in words that fit there"
    if rule == "instance-in-system":
        how = f"say {value} after them, in the user's turn for instance"
        return f"the system turn has {value} in front of {after} tokens that never change; {how}"
    if rule == "counter-early":
        return f"the counter {value} stands in front of {after} tokens that never change; {how}"
    return f"{value} stands in front of {after} tokens that never change; {how}"


# ------------------------------------------------------------------------------------ branches of a fork


def branch_findings(graph: Graph, counter: Counter) -> Iterator[Finding]:
    """Finds branches that diverge too early: their common text comes after their own.

    forks += lambda i: f"Tip {i} of 3. Name one concrete action in at most ten words."
    """
    first_segments: dict[Node, list[Segment]] = {}
    starts = {segment.before: segment for segment in segments_of(graph)}
    for number, stream in enumerate(graph.streams):
        if graph.parents(number) is not None and stream[0] in starts:
            first_segments.setdefault(stream[0].inputs[0], []).append(starts[stream[0]])
    for fork, segments in first_segments.items():
        assert isinstance(fork.op, Fork), "branches begin at forks"
        common = _common_tokens(segments, counter)
        line = segments[0].line
        if len(segments) > 1 and common >= LEAST_COMMON and line is not None:
            what = (
                f"{len(segments)} branches part in front of {common} tokens that all of them say; "
                "say these in front of the fork, or first in every branch"
            )
            saved = common * (len(segments) - 1)
            yield Finding("counter-early", line.number, line.number, graph.name, what, Shareable(0, saved))


def _common_tokens(segments: list[Segment], counter: Counter) -> int:
    """Counts tokens of sentences that every branch says after the first one in which they differ."""
    said = [list(sentences_of(Marked.of(_named(segment)).text)) for segment in segments]
    parting = next((n for n, alike in enumerate(zip(*said, strict=False)) if len(set(alike)) > 1), None)
    if parting is None:
        return 0
    after = [set(sentences[parting + 1 :]) for sentences in said]
    common = [sentence for sentence in said[0][parting + 1 :] if all(sentence in others for others in after)]
    return sum(counter.tokens(sentence) for sentence in common if len(re.findall(r"\w+", sentence)) > 2)


def _named(segment: Segment) -> list[Piece]:
    """Writes values as their names: two of a name are the same in all branches."""
    return [
        piece if piece.kind is Kind.CONSTANT else Piece(Kind.CONSTANT, f"{{{piece.name}}}") for piece in segment.pieces
    ]


@dataclass
class Origins:
    """Looks segments up, each once.

    Attributes:
        file, program: the source.
        volatile_lines: on which tracing noticed a call that gives another answer each time.
    """

    file: SourceFile
    program: SourceProgram
    volatile_lines: Collection[int] = ()
    _refined: dict[Segment, tuple[Piece, ...]] = field(default_factory=dict)

    def refine(self, segment: Segment) -> tuple[Piece, ...]:
        """Returns the pieces of a segment, with what is volatile apart."""
        found = self._refined.get(segment)
        if found is None:
            found = self._refined[segment] = tuple(self._told_apart(segment))
        return found

    def _told_apart(self, segment: Segment) -> Iterator[Piece]:
        marked = Marked.of(segment.pieces)
        spans = [(part.start, part.end) for part in self._parts(segment, marked) if self._is_volatile(part)]
        for match in LOOKS_VOLATILE.finditer(marked.text):
            inside = any(start < match.end() and match.start() < end for start, end in spans)
            if not inside and match[0] not in self.file.text:
                spans.append(match.span())
        position = 0
        for start, end in sorted(span for span in spans if span[0] < span[1]):
            yield from self._between(marked, position, start, segment)
            yield Piece(Kind.VOLATILE, marked.text[start:end], line=segment.line)
            position = end
        yield from self._between(marked, position, len(marked.text), segment)

    def _between(self, marked: Marked, start: int, end: int, segment: Segment) -> Iterator[Piece]:
        for piece in marked.pieces(marked.text[start:end]):
            yield piece if piece.line is not None else replace(piece, line=segment.line)

    def _parts(self, segment: Segment, marked: Marked) -> list[Aligned]:
        """Returns the parts of the source's run that wrote the segment; none where that is not certain."""
        lines = {append.line.number for append in segment.appends if append.line is not None}
        for run in self.program.runs:
            first, last = run.lines
            if any(first <= line <= last for line in lines):
                parts = aligned(run, marked)
                if parts is not None:
                    return parts
        return []

    def _is_volatile(self, part: Aligned) -> bool:
        source, scope = part.source, self.program.scope
        if source.text is not None or scope.constant(source.expression) is not None:
            return False
        if volatile_call(source.expression, scope) is not None:
            return True
        if self._stands_outside(source.expression):
            return False
        first, last = source.expression.lineno, source.expression.end_lineno or source.expression.lineno
        return part.end - part.start > 1 and any(first <= line <= last for line in self.volatile_lines)

    def _stands_outside(self, expression: ast.expr) -> bool:
        """Returns whether it is a name, or an attribute of one, that the function does not set: what is volatile on its
        line is another expression."""
        while isinstance(expression, ast.Attribute):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id not in self._own_names

    @cached_property
    def _own_names(self) -> frozenset[str]:
        nodes = list(ast.walk(self.program.function))
        parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
        return frozenset(
            parameters | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        )


COUNTER_NAME = re.compile(
    r"(?:.*_)?(?:index|idx|counter|count|step|turn|round|attempt|iteration|number|num|no|page|part|chunk)(?:_number|_no)?"
    r"|i|j|k|n"
)
COUNTER_LEAD = re.compile(
    r"(?:step|page|part|round|attempt|question|item|number|turn|chunk|no\.|#|try)[ #]*\Z", re.IGNORECASE
)


def is_counter(pieces: tuple[Piece, ...], place: int) -> bool:
    """Returns whether an argument counts: by its name, or by the text before and after it ("step 3 of 10")."""
    if COUNTER_NAME.fullmatch(pieces[place].name):
        return True
    before = pieces[place - 1].text if place else ""
    after = pieces[place + 1].text if place + 1 < len(pieces) else ""
    return COUNTER_LEAD.search(before) is not None and re.match(r"\s*(?:of\b|/|\))", after) is not None
