"""Plays the calls of a trace: each begins when those that it waits for have ended.

Prompts are encoded with the tokenizer of the simulation. An answer has as many tokens as it had, where the same model
has counted them, and else as many as its text has; they are made up, and stand in the prompts that go on from it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from ...lang.prompt import Generated, Part, Text
from ...lang.protocol import Origin
from ...lang.traces.calls import TracedCall
from ..tokenizer.tokenizer import Tokenizer
from .calls import Answered, Host, SimulatedCall


class TraceSession:
    """Runs the calls of one program.

    Args:
        number: of the program.
        counted: the tokens that the trace tells are those of the tokenizer.
    """

    def __init__(self, calls: Sequence[TracedCall], number: int, tokenizer: Tokenizer, *, counted: bool) -> None:
        self._calls = calls
        self._number = number
        self._tokenizer = tokenizer
        self._counted = counted
        self._answers: dict[int, tuple[Part, ...]] = {}
        self._missing = [len(call.after) for call in calls]
        self._next: list[list[int]] = [[] for _ in calls]
        self._left = len(calls)
        for index, call in enumerate(calls):
            for earlier in call.after:
                self._next[earlier].append(index)

    def begin(self, host: Host, ended: Callable[[], None]) -> None:
        self._host, self._ended = host, ended
        for index in [index for index, missing in enumerate(self._missing) if not missing]:
            self._ask(index)

    def _ask(self, index: int) -> None:
        call = self._calls[index]
        prompt: list[Part] = []
        for piece in call.prompt:
            prompt += self._answers[piece] if isinstance(piece, int) else (Text(piece.text, piece.control),)
        name = f"t{self._number}"
        origin = Origin(program_id=name, fork_group=f"{name}.{call.branch}" if call.branch else "")
        text = 0 if call.choices else len(self._tokenizer.encode(call.answer, first=False))
        tokens = max(1, call.tokens if self._counted and call.tokens else text)
        asked = SimulatedCall(tuple(prompt), tokens, call.sampled, call.choices, origin)
        self._host.ask(asked, partial(self._answered, index, min(text, tokens)))

    def _answered(self, index: int, text: int, answer: Answered) -> None:
        """text: tokens of the answer that its text has."""
        call = self._calls[index]
        kept, tail = (call.kept, call.tail) if self._counted and call.kept is not None else (text, "")
        parts = (Generated("", answer.token_ids[:kept]), Text(tail))
        self._answers[index] = tuple(part for part in parts if part != Generated("", ()) and part != Text(""))
        self._left -= 1
        for later in self._next[index]:
            self._missing[later] -= 1
            if not self._missing[later]:
                self._ask(later)
        if not self._left:
            self._ended()
