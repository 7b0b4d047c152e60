"""Variables: write-once bindings of names.

A name is bound when the operation that sets it is submitted, in program order and in the program's
thread. So a read finds the binding that the program text means, also when a loop uses one name again
and again, and it cannot miss a value that is computed later. The streams' loop resolves the binding.
With the value it records the answer of `get_meta_info`: facts about the call, under SGLang's names.
"""

import asyncio
import difflib
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

from ..lang.errors import VariableError
from ..lang.protocol import Chunk, Completion, Final, TokenLogprob
from ..lang.result import Result
from ..lang.state import Value
from .loop import Signal, set_done

Meta = dict[str, Any]  # JSON-like facts about a call; see State.get_meta_info
Facts = Meta | list[Any]  # of a variable: a list for n above 1, and one entry per branch after a join
Piece = tuple[str, Meta]


class Feed:
    """Streamed text: pieces that any number of readers iterate over, each at its own pace."""

    __slots__ = ("changed", "length", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.length = 0  # characters
        self.changed = Signal()

    def append(self, text: str, meta: Meta) -> None:
        if text:
            self.pieces.append((text, meta))
            self.length += len(text)
            self.changed.fire()


class Binding:
    """One future value: unresolved, then resolved or failed, once.

    Resolved and failed by the streams' loop (or at once, for values that the program assigns); read
    on any thread. Value and error are recorded before a waiter is woken.

    Args:
        name: of the variable; "" for none.
        result: converts its text to an object; None: the value is the object.
    """

    __slots__ = ("_branches", "_error", "_traceback", "_value", "done", "feed", "meta", "name", "result", "settled")

    def __init__(self, name: str, result: Result | None = None) -> None:
        self.name = name
        self.result = result
        self.feed = Feed()
        self.done = False
        self.settled = Signal()
        self.meta: Facts = {}
        self._value: Value = None
        self._branches: tuple[Binding | None, ...] | None = None  # whose values a join brought together
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def resolve(self, value: Value, meta: Facts | None = None) -> None:
        """Records the value. The part of a text that was not streamed becomes its last piece; of several texts (n
        above 1) the first is streamed, with which the program goes on."""
        assert not self.done, f"variable {self.name!r} is written once"
        self._value = value
        self.meta = {} if meta is None else meta
        first = value[0] if type(value) is list and value else value  # a subclass may have an idea of its own
        if isinstance(first, str):
            last = self.meta[0] if isinstance(self.meta, list) and self.meta else self.meta
            self.feed.append(first[self.feed.length :], last if isinstance(last, dict) else {})
        self._finish()

    def resolve_gathered(self, branches: "tuple[Binding | None, ...]") -> None:
        """Records the branches' values, one entry per branch, None where the name has no value. It has no pieces.

        Raises the error of a branch's binding that has failed.
        """
        assert not self.done, f"variable {self.name!r} is written once"
        self._value = [branch.value() if branch is not None else None for branch in branches]
        self.meta = [branch.meta if branch is not None else {} for branch in branches]
        self._branches = branches
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Records the error that every read raises; a binding that is done stays as it is."""
        if self.done:
            return
        self._error = error
        self._traceback = error.__traceback__
        self._finish()

    def _finish(self) -> None:
        self.done = True
        self.settled.fire()
        self.feed.changed.fire()  # readers of pieces wait there

    async def settled_here(self) -> None:
        """Waits until it is resolved or failed. Runs on the loop that resolves it, so no thread has to be woken."""
        while not self.done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            wake = partial(set_done, future)
            self.settled.add(wake)
            try:
                await future
            finally:
                self.settled.discard(wake)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def value(self) -> Value:
        """Returns the value of a done binding, or raises its error with the original traceback."""
        assert self.done, f"variable {self.name!r} is not known yet"
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)
        return self._value

    def object(self) -> Any:
        """Converts the value of a done binding to its object, anew for every call. Lists as `value` has them.

        Raises:
            ResultError: the text is no object of the requested kind.
        """
        value = self.value()
        if self._branches is not None:
            return [branch.object() if branch is not None else None for branch in self._branches]
        if self.result is None:
            return value
        if isinstance(self.meta, list):  # n above 1
            pairs = zip(value, self.meta, strict=True)
            return [self.result.read(self.name, text, facts) for text, facts in pairs]
        return self.result.read(self.name, value, self.meta)


class VariableTable:
    """The names of one stream: its own, and those bound before it was forked off.

    own    names bound by this stream, in order of first use
    base   names of the parent at the fork; one dict, shared by all siblings, never changed
    """

    __slots__ = ("_base", "bound", "own")

    def __init__(self, base: Mapping[str, Binding] | None = None) -> None:
        self._base: Mapping[str, Binding] = base if base is not None else {}
        self.own: dict[str, Binding] = {}
        self.bound = Signal()

    def bind(self, binding: Binding) -> None:
        self.own[binding.name] = binding
        self.bound.fire()

    def get(self, name: str) -> Binding | None:
        found = self.own.get(name)
        return found if found is not None else self._base.get(name)

    def before(self, name: str) -> Binding | None:
        """Returns the binding that the stream began with."""
        return self._base.get(name)

    def names(self) -> list[str]:
        return list(dict.fromkeys((*self._base, *self.own)))

    def snapshot(self) -> dict[str, Binding]:
        """Copies all bindings, once for all branches of a fork."""
        return {**self._base, **self.own}

    def unknown(self, name: str) -> VariableError:
        """Returns the error for a name the program has not set, with the names it may have meant."""
        names = self.names()
        close = difflib.get_close_matches(str(name), names, n=3)
        if close:
            hint = f"did you mean {' or '.join(map(repr, close))}?"
        elif names:
            hint = f"it sets {', '.join(map(repr, names[:20]))}"
        else:
            hint = "it has set none so far"
        return VariableError(f"the program sets no variable {name!r}; {hint}")


# (log-probability, token id, text or None), as SGLang writes a token.
LogprobEntry = tuple[float, int, str | None]


def meta_of_completion(final: Final, completion: Completion, *, with_text: bool) -> Meta:
    """Describes one continuation. The prompt's numbers are those of the whole call, also when n is above 1."""
    meta: Meta = {
        "id": final.id,
        "prompt_tokens": final.usage.prompt_tokens,
        "cached_tokens": final.usage.cached_tokens,
        "completion_tokens": len(completion.token_ids) or final.usage.completion_tokens,
        "finish_reason": str(completion.finish_reason),
        "matched_stop": completion.matched_stop,
    }
    if completion.guessed_tokens is not None:
        meta["guessed_tokens"] = completion.guessed_tokens
    if completion.spans:
        meta |= {"spans": list(completion.spans), "characters": len(completion.text)}
    if completion.logprobs:
        meta |= _logprobs("output", completion.logprobs, with_text)
    if final.prompt_logprobs:
        meta |= _logprobs("input", final.prompt_logprobs, with_text)
    return meta


def meta_of_chunk(chunk: Chunk) -> Meta:
    """Describes one piece of a stream."""
    meta: Meta = {"id": chunk.id, "index": chunk.index, "completion_tokens": len(chunk.token_ids)}
    if chunk.logprobs:
        meta |= _logprobs("output", chunk.logprobs, with_text=True)
    return meta


def _logprobs(side: str, tokens: tuple[TokenLogprob, ...], with_text: bool) -> dict[str, Any]:
    def entry(logprob: float, token_id: int, text: str) -> LogprobEntry:
        return (logprob, token_id, text if with_text else None)

    result: dict[str, Any] = {
        f"{side}_token_logprobs": [entry(token.logprob, token.token_id, token.text) for token in tokens]
    }
    if any(token.top for token in tokens):
        result[f"{side}_top_logprobs"] = [
            [entry(logprob, token_id, text) for token_id, text, logprob in token.top] for token in tokens
        ]
    return result
