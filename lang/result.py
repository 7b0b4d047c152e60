"""Results: how the text of a variable becomes the object that the program asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ResultError


@dataclass(frozen=True, slots=True)
class Result:
    """What a text stands for.

    Attributes:
        wanted: what the text has to be, for messages: "int", "Person".
        parse: text → object; a ValueError says why it is none.
    """

    wanted: str
    parse: Callable[[str], Any] = field(compare=False)

    def read(self, name: str, text: str, facts: Mapping[str, Any]) -> Any:
        """The object that variable `name` holds. `facts`: about the call, as `get_meta_info` tells them.

        Raises:
            ResultError: the text is none; the message says what ended it.
        """
        if facts.get("violations"):
            raise ResultError(f"variable {name!r} holds no {self.wanted}: {'; '.join(facts['violations'])}")
        try:
            return self.parse(text)
        except (ValueError, RecursionError, TypeError) as error:
            shown = repr(text) if len(text) <= 200 else f"{text[:80]!r} … {text[-80:]!r}"
            raise ResultError(f"variable {name!r} holds no {self.wanted}{_ending(facts)}: {shown}: {error}") from error


@dataclass(frozen=True, slots=True)
class Members:
    """How a text becomes one of some objects. `named`: the text of each → the object."""

    named: Mapping[str, Any]

    def parse(self, text: str) -> Any:
        """Raises ValueError for a text that is none of them."""
        if text not in self.named:
            raise ValueError(f"it is none of {', '.join(map(repr, self.named))}")
        return self.named[text]


def _ending(facts: Mapping[str, Any]) -> str:
    """Why a text may be incomplete."""
    match facts.get("finish_reason"):
        case "length":
            tokens = facts.get("completion_tokens")
            return f", for it was cut off after {tokens} tokens (finish_reason 'length'); raise max_tokens"
        case "abort":
            return ", for the call was aborted before its end"
        case _ if isinstance(facts.get("matched_stop"), str):
            return f", for it ended at stop={facts['matched_stop']!r}; remove that stop"
        case _:
            return ""
