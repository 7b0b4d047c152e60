"""Streaming a gen whose call goes on behind it: readers get its text as soon as its end is certain, and no more."""

import msgspec

from ...lang.protocol import Chunk
from ..calls import OnChunk
from .fields import Field, end_of
from .replies import LongReply


class Pieces:
    """Chunks of a long reply in, the text of its first field out.

    Until the end of the field is in sight the reply may still be of no use, and what readers have cannot be taken back.

    Args:
        field: what ends the text.
        lead: what the reply has to begin with, which is no part of it.
        on_chunk: gets the text.
    """

    __slots__ = ("_done", "_field", "_lead", "_on_chunk", "_text", "told")

    def __init__(self, field: Field, lead: str, on_chunk: OnChunk) -> None:
        self._field = field
        self._lead = lead
        self._on_chunk = on_chunk
        self._text = ""
        self.told = False  # readers have the text
        self._done = field.constraint is not None  # looked at when all of it is there

    def feed(self, chunk: Chunk) -> None:
        if self._done:
            return
        self._text += chunk.text
        if not self._text.startswith(self._lead):
            return
        bytes_so_far = len(self._text.encode("utf-8", "surrogatepass"))
        end = end_of(self._field, LongReply(self._text, (), bytes_so_far, ended=False), len(self._lead), "")
        if end is not None:
            self._done = self.told = True
            text = self._text[len(self._lead) : end.stop]
            self._on_chunk(msgspec.structs.replace(chunk, text=text, token_ids=(), logprobs=()))
