"""Keeps the rest of a reply after a gen, decides whether it answers the next gen, and streams it.

prompt   ... "Name: " │ "Harry"  "\\nJob: "  "wizard"  ...      the stream's text since then
reply                 │  Harry \\n Job:  wizard \\n Age:  11     begins with it, or is dropped
                    anchor

A gen may be answered from a reply only if one call would choose both gens' tokens in the same way. Readers of a gen
whose call goes on get its text as soon as its end is certain, and no more. Where a model cannot continue a turn, it is
asked for all of it, as it was trained to answer, and the reply begins with a lead:

    assistant("Name: " + gen("name", stop="\\n") + ...)      prompt   ... <|im_start|>assistant
                                                            lead     Name:
"""

from dataclasses import dataclass

import msgspec

from ...lang.prompt import Prompt, Text
from ...lang.protocol import Chunk
from ...lang.sampling import SamplingParams
from ..calls import OnChunk
from ..position import Position, since, text_of
from .fields import Field, end_of
from .replies import LongReply


@dataclass(frozen=True, slots=True)
class Surplus:
    """The rest of a reply.

    Attributes:
        reply: the whole of it.
        anchor: the prompt that it continues.
        manner: how its tokens were chosen, see `manner_of`.
        request_id: of its call.
        prompt_tokens: of its call.
        before: name of the gen that took text from it last.
    """

    reply: LongReply
    anchor: Prompt
    manner: SamplingParams
    request_id: str
    prompt_tokens: int
    before: str

    def reached(self, prompt: Prompt) -> int | None:
        """Returns the offset in the reply that the stream has reached; None if it differs, or is used up."""
        said: list[str] = []
        for part in since(self.anchor, prompt):
            if not isinstance(part, Text) or part.control:
                return None  # an image, another turn
            said.append(part.text)
        text = "".join(said)
        return len(text) if len(text) < len(self.reply.text) and self.reply.text.startswith(text) else None


class Pieces:
    """Streams the first field of a long reply to readers.

    Nothing is given out until the end of the field is certain: the reply may be discarded, and delivered text cannot.

    Args:
        field: what ends the text.
        lead: the required beginning of the reply, not part of the text.
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


def manner_of(sampling: SamplingParams) -> SamplingParams:
    """Returns the parameters without those that only end a text, or do not affect the best token."""
    manner = msgspec.structs.replace(sampling, max_tokens=1, stop=(), stop_regex=())
    if not sampling.greedy:
        return manner
    return msgspec.structs.replace(manner, top_p=1.0, top_k=-1, min_p=0.0, seed=None)


def speaks_plainly(sampling: SamplingParams) -> bool:
    """Returns whether a gen is one text whose tokens do not depend on where its call began.

    Not so with several continuations, least lengths and stop tokens, of which a text shows nothing; log-probabilities,
    which belong to a call; penalties, which count what the call has generated; and draws from a seed, which every call
    begins anew.
    """
    return (
        sampling.n == 1
        and sampling.max_tokens > 0
        and sampling.min_tokens == 0
        and not sampling.ignore_eos
        and not sampling.stop_token_ids
        and not sampling.logprobs
        and not sampling.top_logprobs
        and sampling.prompt_logprobs_from is None
        and sampling.frequency_penalty == 0
        and sampling.presence_penalty == 0
        and (sampling.greedy or sampling.seed is None)
    )


def lead_of(position: Position, answered: Prompt | None) -> tuple[str, Prompt]:
    """Returns constant text at the beginning of the open turn, and the prompt before it; "" if it must stay.

    Args:
        answered: the beginning of a turn that holds something generated.
    """
    turn = position.turn
    if turn is None or turn.role != "assistant" or turn.start is answered:
        return "", position.prompt
    parts = since(turn.start, position.prompt)
    if not all(isinstance(part, Text) and not part.control for part in parts):
        return "", position.prompt
    return text_of(parts), turn.start
