"""Which source a segment of a graph comes from, and with it what of its constants is volatile."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from .marked import Marked
from .pieces import Kind, Piece, Segment
from .runs import Aligned, Run, aligned
from .source import SourceFile, SourceProgram
from .volatile import LOOKS_VOLATILE, volatile_call


@dataclass
class Origins:
    """Looks segments up, each once.

    Attributes:
        file: of the program; None where there is no source to be read.
        program: likewise.
        volatile_lines: on which tracing noticed a call that gives another answer each time.
    """

    file: SourceFile | None = None
    program: SourceProgram | None = None
    volatile_lines: Collection[int] = ()
    _refined: dict[Segment, tuple[Piece, ...]] = field(default_factory=dict)

    def refine(self, segment: Segment) -> tuple[Piece, ...]:
        """The pieces of a segment with what is volatile told apart."""
        found = self._refined.get(segment)
        if found is None:
            found = self._refined[segment] = tuple(self._told_apart(segment))
        return found

    def run_of(self, segment: Segment) -> Run | None:
        """What wrote the segment; None where that is not certain."""
        found = self._origin(segment, Marked.of(self.refine(segment)))
        return found[0] if found else None

    def _told_apart(self, segment: Segment) -> Iterator[Piece]:
        marked = Marked.of(segment.pieces)
        origin = self._origin(segment, marked)
        spans = [(part.start, part.end) for part in origin[1] if self._is_volatile(part)] if origin else []
        written = "" if self.file is None else self.file.text
        for match in LOOKS_VOLATILE.finditer(marked.text):
            inside = any(start < match.end() and match.start() < end for start, end in spans)
            if not inside and match[0] not in written:
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

    def _origin(self, segment: Segment, marked: Marked) -> tuple[Run, list[Aligned]] | None:
        if self.program is None:
            return None
        lines = {append.line.number for append in segment.appends if append.line is not None}
        for run in self.program.runs:
            first, last = run.lines
            if any(first <= line <= last for line in lines):
                parts = aligned(run, marked)
                if parts is not None:
                    return run, parts
        return None

    def _is_volatile(self, part: Aligned) -> bool:
        assert self.program is not None, "sources are parts of a program"
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
