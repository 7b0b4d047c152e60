"""A reply that went on behind the gen it was asked for, and the place of the prompt at which it begins.

prompt   ... "Name: " │ "Harry"  "\\nJob: "  "wizard"  ...      what the stream has said since
reply                 │  Harry \\n Job:  wizard \\n Age:  11     begins with it, or is dropped
                    anchor
"""

from dataclasses import dataclass

from ...lang.prompt import Prompt, Text
from ...lang.sampling import SamplingParams
from ..position import since
from .replies import LongReply


@dataclass(frozen=True, slots=True)
class Surplus:
    """Attributes:
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
        """How much of the reply the stream has said; None when it has said something else, or all of it."""
        said: list[str] = []
        for part in since(self.anchor, prompt):
            if not isinstance(part, Text) or part.control:
                return None  # an image, another turn
            said.append(part.text)
        text = "".join(said)
        return len(text) if len(text) < len(self.reply.text) and self.reply.text.startswith(text) else None
