"""Prompts: persistent linked parts, so that appending and forking cost O(1).

A part says where its characters come from, because that decides how they are tokenized:
constant text is tokenized in maximal runs, template scaffolding may become control tokens,
and text that the runtime generated travels as the token ids that produced it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import msgspec

from .source import Source

# A message says how long a list is before its first element: one that is too long is refused before it is read.
MAX_TOKEN_IDS = 1 << 21
TokenIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKEN_IDS)]


class Text(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """Constant text. Only template scaffolding has `control=True` and may become special tokens."""

    text: str
    control: bool = False


class Generated(msgspec.Struct, frozen=True, tag="g", array_like=True):
    """Text that this runtime generated, with the ids whose KV it still has."""

    text: str
    token_ids: TokenIds


class Media(msgspec.Struct, frozen=True, tag="m", array_like=True):
    """An image or a clip. The receiver checks `digest` against the bytes; it never trusts it as a cache key."""

    kind: str  # "image" or "video"
    digest: str  # SHA-256 of data, hexadecimal
    data: bytes
    num_frames: int = 0  # of a video


Part = Text | Generated | Media
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
