"""The linter: the findings of one program, from its graph and from its source."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..graph import Graph, Line
from .branches import branch_findings
from .findings import Finding, audible
from .habits import LEAST_BEHIND, NO_GAIN, source_findings, volatile_text
from .marked import Marked
from .origins import Origins, is_counter
from .patches import Edit, Offsets, Patch
from .pieces import PRIVATE, Call, Kind, Piece, calls_of, segments_of
from .reorder import LEAST_GAIN, Proposal, propose
from .rewriting import patch_for
from .runs import Shot
from .sketch import sketch
from .source import SourceFile, SourceProgram
from .tokens import Counter, Shareable
from .units import free_tokens


@dataclass(frozen=True, slots=True)
class Subject:
    """A program to look at.

    Attributes:
        file, program: its source.
        graph: None where none can be made of it; then its beginning is looked at as the source has it.
        volatile_lines: see `Origins`.
    """

    file: SourceFile
    program: SourceProgram
    graph: Graph | None
    volatile_lines: Collection[int] = ()


def findings_of(subject: Subject, counter: Counter, *, shared: Collection[str] = ()) -> list[Finding]:
    """All findings, by line, without silenced ones.

    Args:
        shared: arguments that many runs have in common.
    """
    graph = subject.graph if subject.graph is not None else sketch(subject.file, subject.program)
    found = list(_GraphLinter(subject, graph, counter, shared).findings())
    found += source_findings(subject.file, subject.program, counter)
    return audible(found, subject.file.text.splitlines())


class _GraphLinter:
    def __init__(self, subject: Subject, graph: Graph, counter: Counter, shared: Collection[str]) -> None:
        self._subject = subject
        self._graph = graph
        self._counter = counter
        self._shared = shared
        self._origins = Origins(subject.file, subject.program, subject.volatile_lines)
        self._proposals = propose(graph, counter, shared=shared, refine=self._origins.refine)

    def findings(self) -> Iterator[Finding]:
        calls = calls_of(self._graph, self._shared, segments_of(self._graph, self._shared), self._origins.refine)
        told: set[str] = set()  # one order is proposed once, however many values it moves
        for call in calls:
            for rule, place, behind in self._late(call):
                finding = self._finding(rule, call.pieces, place, behind)
                if finding.proposal is None or finding.proposal.id not in told:
                    yield finding
                if finding.proposal is not None:
                    told.add(finding.proposal.id)
            yield from self._late_media(call)
        yield from branch_findings(self._graph, self._counter)

    # -------------------------------------------------------------------------------- constants behind values

    def _late(self, call: Call) -> Iterator[tuple[str, int, int]]:
        """Rule, place of the piece, and tokens of constant text behind it; the first piece of every rule."""
        seen: set[str] = set()
        role = ""
        for place, piece in enumerate(call.pieces):
            if piece.kind is Kind.ROLE:
                role = piece.name
            if piece.kind is Kind.GENERATED:
                return  # from here on no two runs share anything, however it is ordered
            if piece.kind in PRIVATE:
                behind = self._constant_behind(call.pieces, place)
                rule = self._rule(call.pieces, place, role, behind)
                if rule is not None and rule not in seen:
                    seen.add(rule)
                    yield rule, place, behind

    def _rule(self, pieces: tuple[Piece, ...], place: int, role: str, behind: int) -> str | None:
        """What is wrong with a piece where it stands; None where nothing is."""
        if behind < LEAST_BEHIND:
            if self._shared_behind(pieces, place):
                return "shared-late"
            proposal = self._proposal_at(pieces[place])
            if proposal is None or proposal.gain.first < LEAST_GAIN:
                return None
        return _rule_of_kind(pieces, place, role)

    def _shared_behind(self, pieces: Sequence[Piece], place: int) -> str:
        """The first shared argument behind a piece that could stand in front of it; empty where there is none."""
        for piece in pieces[place + 1 :]:
            if piece.kind is Kind.GENERATED:
                break
            if piece.kind is Kind.SHARED and piece.name:
                return piece.name
        return ""

    def _constant_behind(self, pieces: Sequence[Piece], place: int) -> int:
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

    def _finding(self, rule: str, pieces: tuple[Piece, ...], place: int, behind: int) -> Finding:
        piece = pieces[place]
        first, last = self._lines(piece.line)
        proposal = self._proposal_at(piece)
        gain = proposal.gain if proposal is not None else Shareable(behind, behind)
        patch = self._patch(proposal) if proposal is not None else None
        what = _what(rule, piece, behind, proposal)
        if rule == "shared-late":
            name = self._shared_behind(pieces, place)
            what = f"{piece.name} stands in front of {name}, which runs have in common; put {name} first"
        return Finding(rule, first, last, self._graph.name, what, gain, patch, proposal)

    def _proposal_at(self, piece: Piece) -> Proposal | None:
        """The proposal that moves the piece."""
        for proposal in self._proposals:
            if any(other is piece for other in proposal.marked.holes.values()):
                return proposal
        return None

    def _patch(self, proposal: Proposal) -> Patch | None:
        run = self._origins.run_of(proposal.segment)
        if run is None:
            return None
        return patch_for(self._subject.file, self._subject.program, run, proposal.marked, proposal.new_text)

    def _lines(self, line: Line | None) -> tuple[int, int]:
        """Of the statement that is on a line."""
        number = self._subject.program.function.lineno if line is None else line.number
        for run in self._subject.program.runs:
            for source in run.sources:
                statement = source.container.statement
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
                patch = _media_patch(self._subject, piece.line.number)
                yield Finding("image-late", first, last, self._graph.name, what, NO_GAIN, patch)
                return


def _rule_of_kind(pieces: tuple[Piece, ...], place: int, role: str) -> str:
    if pieces[place].kind is Kind.VOLATILE:
        return "volatile-early"
    if role == "system":
        return "instance-in-system"
    return "counter-early" if is_counter(pieces, place) else "constants-late"


def _what(rule: str, piece: Piece, behind: int, proposal: Proposal | None) -> str:
    value = piece.text if piece.kind is Kind.VOLATILE else piece.name
    if rule == "volatile-early":
        return volatile_text(repr(value), behind)
    how = "put these first" if proposal is not None else "say these first, in words that fit there"
    if rule == "instance-in-system":
        how = f"say {value} behind them, in the user's turn for instance" if proposal is None else how
        return f"the system turn has {value} in front of {behind} tokens that never change; {how}"
    if rule == "counter-early":
        return f"the counter {value} stands in front of {behind} tokens that never change; {how}"
    return f"{value} stands in front of {behind} tokens that never change; {how}"


def _media_patch(subject: Subject, line: int) -> Patch | None:
    """The image to the front of its expression, or its statement in front of the one that says what is private."""
    for shot in subject.program.media:
        if shot.statement.lineno <= line <= (shot.statement.end_lineno or line):
            offsets = Offsets(subject.file.text)
            return _operand_first(shot, subject, offsets) or _statement_first(shot, subject, offsets)
    return None


def _operand_first(shot: Shot, subject: Subject, offsets: Offsets) -> Patch | None:
    place = shot.operands.index(shot.call)
    if place == 0:
        return None
    text = subject.file.text
    first, last = offsets.start(shot.operands[0]), offsets.end(shot.operands[place - 1])
    if text[last : offsets.start(shot.call)].strip() != "+":
        return None
    moved = f"{text[offsets.start(shot.call) : offsets.end(shot.call)]} + {text[first:last]}"
    return (Edit(first, offsets.end(shot.call), moved),)


def _statement_first(shot: Shot, subject: Subject, offsets: Offsets) -> Patch | None:
    place = shot.siblings.index(shot.statement)
    if len(shot.operands) > 1 or place == 0:
        return None
    for earlier in shot.siblings[:place]:
        for run in subject.program.runs:
            for source in run.sources:
                if source.container.statement is earlier and source.text is None and source.container.whole:
                    start = offsets.lines_of(earlier)[0]
                    begin, end = offsets.lines_of(shot.statement)
                    return (Edit(start, start, subject.file.text[begin:end]), Edit(begin, end, ""))
    return None
