"""Prompts: persistent linked parts, so that appending and forking cost O(1).

A part says where its characters come from, because that decides how they are tokenized:
constant text is tokenized in maximal runs, template scaffolding may become control tokens,
and text that the runtime generated travels as the token ids that produced it.

A part also has its source: the line that said it, for explanations, traces and messages. Operations are submitted far
more often than their places are read, so a place is kept as a code object and an instruction; file, line and columns
are looked up when they are read.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import islice, zip_longest
from types import CodeType
from typing import Annotated, Protocol

import msgspec

from .checks import LONGEST_SALT, plain
from .errors import ParameterError, shown

# Frames of these modules are ours: what the user wrote is further out. `with s.user():` goes through contextlib.
_ROOT = __name__.partition(".")[0]
_OURS = (f"{_ROOT}.lang.", f"{_ROOT}.interpreter.", f"{_ROOT}.compiler.", f"{_ROOT}.compat.", "contextlib")


class Place(Protocol):
    """A line of the user's program: `compiler.graph.Line`, or a CodePlace."""

    @property
    def file(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def function(self) -> str: ...


class CodePlace(msgspec.Struct, frozen=True, gc=False):
    """An instruction of a function that runs."""

    code: CodeType
    instruction: int  # offset in bytes

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def number(self) -> int:
        """The line number, counted from 1. A statement of several lines has the one on which it begins."""
        return self.span[0] or self.code.co_firstlineno

    @property
    def function(self) -> str:
        return self.code.co_name

    @property
    def span(self) -> tuple[int | None, int | None]:
        """First and last line of what is being computed there; None where Python keeps no positions."""
        found = next(islice(self.code.co_positions(), self.instruction // 2, None), None)
        return (None, None) if found is None else found[:2]


def public_name(file: str) -> str:
    """A source file as files that leave this machine may name it: from its outermost package on, or by its own name.

    /home/me/secret/app/prompts/tip.py is "app/prompts/tip.py" where app is a package. The folders before it tell
    private things: names of people and of projects. Relative names, and no paths at all such as "<stdin>", stay. A
    cell of a notebook is "In[3]", as its tracebacks name it, not the file that IPython makes up for it.
    """
    cell = cell_name(file)
    if cell is not None:
        return cell
    if not os.path.isabs(file) and os.pardir not in file.split(os.sep):
        return file
    folder, name = os.path.split(os.path.abspath(file))
    while folder and os.path.isfile(os.path.join(folder, "__init__.py")):
        outer, package = os.path.split(folder)
        if not package or outer == folder:
            break
        folder, name = outer, f"{package}/{name}"
    return name


def cell_name(file: str) -> str | None:
    """Returns how IPython names the cell whose source it keeps under this name. IPython is not imported."""
    module = sys.modules.get("IPython")
    running = getattr(module, "get_ipython", None)  # None while it is imported
    shell = running() if running is not None else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = named(file) if named is not None else None
    return None if found is None else str(found[1])


def shown_name(file: str) -> str:
    """Returns the name of a source file for messages: from the current folder on, or by its public name."""
    cell = cell_name(file)
    if cell is not None:
        return cell
    if not os.path.isabs(file):
        return file
    below = os.path.relpath(file)
    return public_name(file) if below.startswith(os.pardir) else below


def calling_place() -> CodePlace | None:
    """Finds the line that the user's program is at: the innermost frame that is none of ours."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_OURS):
        outer = frame.f_back
        if outer is None:
            return None
        frame = outer
    return CodePlace(frame.f_code, frame.f_lasti)


class SourceKind(StrEnum):
    TEXT = "text"  # of the program
    SCAFFOLD = "scaffold"  # what a chat template writes around a turn
    GENERATED = "generated"
    CHOSEN = "chosen"


class Source(msgspec.Struct, frozen=True, gc=False):
    """The origin of a piece of prompt text.

    Attributes:
        place: the line; None where no line of a program said it.
        name: the role of a scaffold, the variable of a generated or chosen text.
    """

    kind: SourceKind
    place: Place | None
    name: str = ""

    def of(self, kind: SourceKind, name: str) -> "Source":
        """The same line as the source of something else."""
        return Source(kind, self.place, name)


# A message says how long a list is before its first element: one that is too long is refused before it is read.
MAX_TOKEN_IDS = 1 << 21
TokenIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKEN_IDS)]


class Text(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """Constant text.

    With `control`, names of control tokens in it become these tokens: in scaffolding of a template, and in the one text
    that is a completion's own prompt. Contents of messages never have it.
    """

    text: str
    control: bool = False


class Generated(msgspec.Struct, frozen=True, tag="g", array_like=True):
    """Text that this runtime generated, with the ids whose KV it still has.

    A prompt given as token ids is such a part without text. BOS comes before the ids unless they begin with it.
    """

    text: str
    token_ids: TokenIds


class Media(msgspec.Struct, frozen=True, tag="m", array_like=True):
    """An image or a clip. The receiver checks `digest` against the bytes; it never trusts it as a cache key."""

    kind: str  # "image" or "video"
    digest: str  # SHA-256 of data, hexadecimal
    data: bytes
    num_frames: int = 0  # of a video


def media_of(kind: str, data: bytes, num_frames: int = 0) -> Media:
    """Returns encoded bytes as a part of a prompt, with their digest."""
    return Media(kind, hashlib.sha256(data).hexdigest(), data, num_frames)


class Private(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """Opens a private part: what the prompt says after it is cached for this tenant alone. It has no text itself.

    Inside the private part of another tenant it opens one for both, the outer one first; inside that of the same tenant
    it changes nothing.
    """

    tenant: str

    @property
    def text(self) -> str:
        return ""


Part = Text | Generated | Media | Private
MAX_PARTS = 1 << 17  # of a prompt that is sent
Parts = Annotated[tuple[Part, ...], msgspec.Meta(max_length=MAX_PARTS)]


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt is its parent and one more part. The empty prompt has neither."""

    parent: "Prompt | None" = None
    part: Part | None = None
    length: int = field(default=0)  # parts from the root to here
    source: Source | None = None  # of the part

    def append(self, part: Part, source: Source | None = None) -> "Prompt":
        """This prompt with one more part; the receiver is unchanged."""
        return Prompt(self, part, self.length + 1, source)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts in order; neighbouring Text of one kind is joined. What a prompt before this one has joined already is
        taken from there."""
        chain: list[Part] = []
        node: Prompt | None = self
        joined: list[Part] = []
        while node is not None and node.part is not None:
            known = node.__dict__.get("parts")
            if known is not None:
                joined.extend(known)
                break
            chain.append(node.part)
            node = node.parent
        run: list[str] = []
        control = False
        if joined and isinstance(last := joined[-1], Text):  # it may go on
            joined.pop()
            control = last.control
            run.append(last.text)
        for part in reversed(chain):
            if isinstance(part, Text):
                if not part.text:
                    continue
                if run and part.control != control:
                    joined.append(Text("".join(run), control))
                    run = []
                control = part.control
                run.append(part.text)
                continue
            if run:
                joined.append(Text("".join(run), control))
                run = []
            joined.append(part)
        if run:
            joined.append(Text("".join(run), control))
        return tuple(joined)

    @property
    def text(self) -> str:
        """The prompt as a person reads it; media appear as <image> and <video>."""
        return "".join(f"<{part.kind}>" if isinstance(part, Media) else part.text for part in self.parts)


EMPTY = Prompt()

MAX_PRIVATE = 16  # private parts inside of each other
_TENANT = re.compile(f"[A-Za-z0-9_-]{{1,{LONGEST_SALT}}}")


def checked_tenant(tenant: object) -> str:
    """Returns the name of a tenant. Raises ParameterError for what is none."""
    if not isinstance(tenant, str) or not _TENANT.fullmatch(plain(tenant)):
        raise ParameterError(f"private({shown(tenant)}): write 1 to {LONGEST_SALT} of the characters A-Z a-z 0-9 _ -")
    return plain(tenant)


Borders = tuple[tuple[int, str], ...]  # (place, private namespace from there on), the places ascending


def parting(left: Borders, right: Borders, length: int) -> int:
    """Returns how much of the common beginning of two sequences of one salt lies in the same namespaces.

    Args:
        length: of that beginning, counted as the places are.
    """
    for mine, other in zip_longest(left, right, fillvalue=(length, "")):
        if mine != other:
            return min(length, mine[0], other[0])
    return length


def openings(salt: str, parts: Sequence[Part]) -> list[tuple[int, str]]:
    """Returns the places of a prompt at which private namespaces open: (number of parts before it, namespace).

        salt "s"   [ Text ][ Private acme ][ Text ][ Private eve ][ Text ]   →   (2, "s/acme"), (4, "s/acme/eve")

    Salts and tenants have no "/" and no "@", so no two lists of names have one namespace; `salt` may be that of an
    adapter (`adapted_salt`). Places beyond MAX_PRIVATE + 1 are left out: more than MAX_PRIVATE are refused.
    """
    opened: list[tuple[int, str]] = []
    tenants: list[str] = []
    if Private not in map(type, parts):  # a session of a thousand calls has thousands of parts
        return opened
    for index, part in enumerate(parts):
        if isinstance(part, Private) and tenants[-1:] != [part.tenant]:
            tenants.append(part.tenant)
            opened.append((index + 1, "/".join([salt, *tenants])))
            if len(opened) > MAX_PRIVATE:
                break
    return opened


def adapted_salt(salt: str, adapter: str) -> str:
    """Returns the namespace of what an adapter computes for a salt: keys of two adapters are never the same."""
    return f"{salt}@{adapter}" if adapter else salt


def adapter_of(namespace: str) -> str:
    """Returns the adapter in whose namespace keys lie; "": they are the model's own."""
    return namespace.partition("@")[2].partition("/")[0]


def namespace(salt: str, parts: Sequence[Part]) -> str:
    """Returns the namespace of the cache at the end of a prompt."""
    opened = openings(salt, parts)
    return opened[-1][1] if opened else salt


def told_apart(part: Media) -> str:
    """Names a picture in the text that explanations count characters in: two pictures have two names."""
    return f"<{part.kind} {part.digest[:8]}>"


def tokens_at_most(parts: Iterable[Part], image_tokens: int = 0) -> int:
    """A bound that needs no tokenizer: a token holds at least one byte of UTF-8, and one may open the prompt. A
    picture, or a frame of a clip, has at most `image_tokens`."""
    bound = 1
    for part in parts:
        match part:
            case Text(text):
                bound += len(text.encode("utf-8", "surrogatepass"))
            case Generated(_, token_ids):
                bound += len(token_ids)
            case Media(num_frames=frames):
                bound += max(1, frames) * image_tokens
    return bound
