"""Finds the source that a segment of a graph comes from, and with it which of its constants are volatile."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from .pieces import Kind, Marked, Piece, Segment
from .scopes import LOOKS_VOLATILE, volatile_call
from .source import Aligned, SourceFile, SourceProgram, aligned


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
        """The pieces of a segment with what is volatile told apart."""
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
        first, last = source.expression.lineno, source.expression.end_lineno or source.expression.lineno
        return part.end - part.start > 1 and any(first <= line <= last for line in self.volatile_lines)


COUNTER_NAME = re.compile(
    r"(?:.*_)?(?:index|idx|counter|count|step|turn|round|attempt|iteration|number|num|no|page|part|chunk)(?:_number|_no)?"
    r"|i|j|k|n"
)
COUNTER_LEAD = re.compile(
    r"(?:step|page|part|round|attempt|question|item|number|turn|chunk|no\.|#|try)[ #]*\Z", re.IGNORECASE
)


def is_counter(pieces: tuple[Piece, ...], place: int) -> bool:
    """Whether an argument counts: by its name, or by what stands in front of it and behind it ("step 3 of 10")."""
    if COUNTER_NAME.fullmatch(pieces[place].name):
        return True
    before = pieces[place - 1].text if place else ""
    behind = pieces[place + 1].text if place + 1 < len(pieces) else ""
    return COUNTER_LEAD.search(before) is not None and re.match(r"\s*(?:of\b|/|\))", behind) is not None
