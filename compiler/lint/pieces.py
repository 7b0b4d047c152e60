"""Cuts prompts into pieces, says of each piece whether every run says the same there, and counts tokens.

    s += f"Question: {question}\\n"        Constant "Question: ", Instance question, Constant "\\n"

A *segment* is what one stream appends between two operations that are no text. `Marked` is pieces as one string, in
which a value is one character, for rules that look for sentences. Sentences and lines are the smallest pieces that can
be told apart.

Tokens are counted with the default model's tokenizer where it is at hand, else estimated as a token for four bytes.
Scaffolding of chat templates counts as nothing, and so do images, and arguments that are shared.
"""

import functools
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from ...lang.errors import UmbelError
from ...lang.ops import RoleBegin, RoleEnd
from ..graph import Graph, Line, Node
from ..operations import (
    Append,
    Apply,
    Argument,
    Choose,
    Concat,
    Constant,
    Generate,
    GetForkItem,
    Join,
    Look,
    Object,
    StreamText,
    Structure,
    Variable,
)

_FIRST_MARK = 0xF0000  # of a private plane
LIST_ITEM = re.compile(
    r"[ \t]*(?:[-*•+]|\(?\d{1,3}[.):]|\(?[a-zA-Z][.)])[ \t]+\S|[ \t]*(?:First|Step \d+)\b", re.IGNORECASE
)
HEADING = re.compile(r"[ \t]*(#{1,6})[ \t]+\S")
TAG = re.compile(r"<(/?)([A-Za-z][\w.-]*)(?:\s[^<>]*)?>|\[(/?)([A-Z]{3,})\]")
# After these a new sentence begins. A capital, a quote or a hole must follow, so that "e.g. this" stays whole.
SENTENCE_END = re.compile(
    r"(?<![A-Z])(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\b[DM]r)(?<!\bvs)(?<!\bNo)[.!?]+[\"'”’)\]*_]*[ \t]+"
    r"|[。！？]+[”’」』）]*"
)
BYTES_PER_TOKEN = 4  # of English text, for the estimate


class Kind(Enum):
    CONSTANT = auto()  # the same in every run
    SHARED = auto()  # an argument that the user calls shared: the same in many runs
    INSTANCE = auto()  # an argument of this run
    VOLATILE = auto()  # another text at every run, whatever the arguments are: the time, say
    GENERATED = auto()  # what a model wrote
    MEDIA = auto()  # an image or a video; `name` is its argument, or empty
    ROLE = auto()  # where a turn begins (`name` is its role) or ends (no name)


PRIVATE = frozenset({Kind.INSTANCE, Kind.VOLATILE, Kind.GENERATED})  # text that no two runs have in common


@dataclass(frozen=True, slots=True)
class Piece:
    """Attributes:
    text: of a constant; else empty.
    name: of the argument or variable it comes from.
    """

    kind: Kind
    text: str = ""
    name: str = ""
    line: Line | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive `Append`s of one stream with nothing else between them.

    Attributes:
        appends: in order, at least one. Nothing but the next append depends on any of them except the last.
        pieces: the same, value by value; neighbouring constants are not merged.
        before: the stream node before the first.
    """

    appends: tuple[Node, ...]
    pieces: tuple[Piece, ...]
    before: Node

    @property
    def line(self) -> Line | None:
        return next((append.line for append in self.appends if append.line is not None), None)


Refine = Callable[[Segment], tuple[Piece, ...]]  # the pieces of a segment, with what is volatile in constants apart


def unrefined(segment: Segment) -> tuple[Piece, ...]:
    return segment.pieces


@dataclass(frozen=True, slots=True)
class Call:
    """A `gen` or `select` and everything in its prompt; `Generate`s before it are GENERATED pieces."""

    node: Node
    pieces: tuple[Piece, ...]


def pieces_of(value: Node, line: Line | None, shared: Collection[str] = ()) -> Iterator[Piece]:
    """Yields the pieces of a value that is appended."""
    match value.op:
        case Constant(text):
            yield Piece(Kind.CONSTANT, str(text), line=line)
        case Concat():
            for part in value.inputs:
                yield from pieces_of(part, line, shared)
        case Argument(name):
            yield Piece(Kind.SHARED if name in shared else Kind.INSTANCE, name=name, line=line)
        case Variable(name) | Object(name):
            yield Piece(Kind.GENERATED, name=name, line=line)
        case StreamText():
            yield Piece(Kind.GENERATED, line=line)
        case Apply() | Structure():
            yield _derived(value, line, shared)
        case _:
            raise AssertionError(f"{value.op} is no value")


def _derived(value: Node, line: Line | None, shared: Collection[str]) -> Piece:
    """Returns the piece of a function of values: it says the same where all of them do."""
    parts = [piece for part in value.inputs for piece in pieces_of(part, line, shared)]
    for kind in (Kind.INSTANCE, Kind.GENERATED, Kind.SHARED):
        for part in parts:
            if part.kind is kind:
                return Piece(kind, name=part.name, line=line)
    return Piece(Kind.SHARED, line=line)  # constants only: the same in every run, and not worked out here


def segments_of(graph: Graph, shared: Collection[str] = ()) -> tuple[Segment, ...]:
    """Returns all segments, in the order of the program."""
    found = []
    for stream in graph.streams:
        appends: list[Node] = []
        for node in stream:
            if isinstance(node.op, Append):
                appends.append(node)
                if _goes_on(graph, node):
                    continue
            if appends:
                found.append(_segment(graph, appends, shared))
                appends = []
    return tuple(found)


def _goes_on(graph: Graph, append: Node) -> bool:
    """Returns whether the next append of the stream is all that needs this one."""
    users = graph.users[append]
    return (
        len(users) == 1 and isinstance(users[0].op, Append) and users[0].before is append and append not in graph.ends
    )


def _segment(graph: Graph, appends: list[Node], shared: Collection[str]) -> Segment:
    before = appends[0].before
    assert before is not None, "a stream begins with no append"
    pieces = tuple(piece for append in appends for piece in pieces_of(append.inputs[1], append.line, shared))
    return Segment(tuple(appends), pieces, before)


def calls_of(
    graph: Graph, shared: Collection[str] = (), segments: Collection[Segment] | None = None, refine: Refine = unrefined
) -> tuple[Call, ...]:
    """Returns every call with the pieces before it, in the order of the program; those of a branch begin with its
    parent's.

    Args:
        segments: those of the graph, where they are known.
    """
    found = segments if segments is not None else segments_of(graph, shared)
    first_of = {segment.appends[0]: refine(segment) for segment in found}
    inside = {append for segment in found for append in segment.appends}
    prompts: dict[Node, tuple[Piece, ...]] = {}
    calls = []
    for node in graph.nodes:
        if not node.in_stream:
            continue
        before = node.inputs[0] if isinstance(node.op, GetForkItem) else node.before
        pieces = () if before is None else prompts[before]
        if isinstance(node.op, Generate | Choose):
            calls.append(Call(node, pieces))
        prompts[node] = (*pieces, *_said(node, first_of, inside, shared))
    return tuple(calls)


def _said(
    node: Node, first_of: dict[Node, tuple[Piece, ...]], inside: set[Node], shared: Collection[str]
) -> tuple[Piece, ...]:
    match node.op:
        case Append():
            assert node in inside, "every append is in a segment"
            return first_of.get(node, ())  # the whole segment, at its first append: no call stands inside
        case Generate(gen):
            return (Piece(Kind.GENERATED, name=gen.name or "", line=node.line),)
        case Choose(select):
            return (Piece(Kind.GENERATED, name=select.name or "", line=node.line),)
        case Look():
            (source,) = pieces_of(node.inputs[1], node.line, shared)
            return (
                replace(source, kind=Kind.MEDIA, text="", name="" if source.kind is Kind.CONSTANT else source.name),
            )
        case RoleBegin(role):
            return (Piece(Kind.ROLE, name=role, line=node.line),)
        case RoleEnd():
            return (Piece(Kind.ROLE, line=node.line),)
        case Join("concate_and_append"):
            return (Piece(Kind.GENERATED, line=node.line),)
        case _:
            return ()


# ------------------------------------------------------------------------------------ text with holes


def is_mark(character: str) -> bool:
    """Returns whether a character is from the planes that marks are taken from."""
    return ord(character) >= _FIRST_MARK


@dataclass(frozen=True, slots=True)
class Marked:
    """Pieces as one string: a hole is one character that no constant has.

    Attributes:
        holes: mark → piece.
    """

    text: str
    holes: dict[str, Piece]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> "Marked":
        pieces = list(pieces)
        taken = {character for piece in pieces for character in piece.text if is_mark(character)}
        marks = (chr(number) for number in range(_FIRST_MARK, 0x110000) if chr(number) not in taken)
        holes: dict[str, Piece] = {}
        text = []
        for piece in pieces:
            if piece.kind is Kind.CONSTANT:
                text.append(piece.text)
            else:
                mark = next(marks)
                holes[mark] = piece
                text.append(mark)
        return cls("".join(text), holes)

    def pieces(self, text: str) -> Iterator[Piece]:
        """Cuts a string with these marks into pieces; constants have no line."""
        constant = ""
        for character in text:
            hole = self.holes.get(character)
            if hole is None:
                constant += character
                continue
            if constant:
                yield Piece(Kind.CONSTANT, constant)
            constant = ""
            yield hole
        if constant:
            yield Piece(Kind.CONSTANT, constant)


# ------------------------------------------------------------------------------------ counting tokens


@dataclass(frozen=True, slots=True)
class Counter:
    """Attributes:
    name: how it counts, for people.
    encode: text → tokens; None for the estimate.
    """

    name: str
    encode: Callable[[str], Sequence[int]] | None = None

    def tokens(self, text: str) -> int:
        """Counts those of a whole text."""
        if self.encode is None:
            return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
        return len(self.encode(text)) if text else 0


ESTIMATE = Counter(f"an estimate of {BYTES_PER_TOKEN} bytes per token")


def default_counter() -> Counter:
    """Counts with the default model's tokenizer where the model is installed, else by the estimate."""
    try:
        return _model_counter()
    except (ImportError, UmbelError, OSError):
        return ESTIMATE


@functools.cache  # a second to open; errors are not kept
def _model_counter() -> Counter:
    # By name: the compiler imports no runtime.
    weights: Any = importlib.import_module("umbel.srt.weights.source")
    tokenizer: Any = weights.open_model().tokenizer()
    return Counter(f"the tokenizer of {tokenizer.name}", lambda text: tokenizer.encode(text, first=False))


@dataclass(frozen=True, slots=True)
class Shareable:
    """Tokens that runs share: of the first call's prompt, and of all prompts together."""

    first: int
    total: int


def sentences_of(text: str) -> Iterator[str]:
    """Yields sentences and lines, without white space after them.

    Lines that are no list items or headings are cut at the ends of sentences.
    """
    for line in text.splitlines():
        whole = LIST_ITEM.match(line) or HEADING.match(line)
        for sentence in [line] if whole else _cut(line):
            if bare := sentence.strip():
                yield bare


def _cut(line: str) -> list[str]:
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(line):
        after = line[end.end() : end.end() + 1]
        if after and (not after.islower() or is_mark(after)):
            sentences.append(line[start : end.end()])
            start = end.end()
    return [*sentences, line[start:]]


def free_tokens(marked: Marked, counter: Counter) -> int:
    """Counts tokens of sentences and lines without a hole, except labels and tags: they go where their values go."""
    return sum(
        counter.tokens(sentence)
        for sentence in sentences_of(marked.text)
        if not any(character in marked.holes for character in sentence) and _is_saying(sentence)
    )


def _is_saying(sentence: str) -> bool:
    """Returns whether a sentence is more than a label, a separator or a tag."""
    bare = TAG.sub("", sentence.rstrip("*_ "))  # stars make the last letters bold
    return not bare.endswith((":", "：")) and (len(bare.split()) > 2 or len(bare) > 12)
