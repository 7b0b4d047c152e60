"""Results: how the text of a variable becomes the object that the program asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ParameterError, ResultError, shown

_REFUSALS = (ValueError, TypeError, AssertionError, RecursionError)
_OF_CHECKS = (ValueError, AssertionError)  # what a program's own check raises to refuse; all else is a fault of it
_MOST_WORDS = 400  # characters of a refusal that is quoted to a model


@dataclass(frozen=True, slots=True)
class Result:
    """Makes the object of a text.

    Attributes:
        wanted: what the text has to be, for messages: "int", "Person".
        parse: text → object; a ValueError says why it is none.
        judges: whether a text that satisfies the constraint may be refused: by `parse`, which runs code of the type
            itself, such as a validator of Pydantic, or by `check`.
        check: `validate` of a gen: is given the object, and refuses it with False or an error; None: no check.
    """

    wanted: str
    parse: Callable[[str], Any] = field(compare=False)
    judges: bool = False
    check: Callable[[Any], object] | None = None

    def refusal(self, text: str) -> str | None:
        """Why the type or the check refuses a text that satisfies the constraint, in one line; None where neither does.

        Runs the program's code. Raises what is a fault of the check.
        """
        if not self.judges:
            return None
        try:
            value = self.parse(text)
        except _REFUSALS as error:
            return f"{self.wanted} refuses it: {words_of(error)}"
        except Exception:  # a fault of the type's code, which reading the value raises
            return None
        if self.check is None:
            return None
        try:
            accepted = self.check(value)
        except _OF_CHECKS as error:
            return f"validate refuses it: {words_of(error)}"
        if accepted is None or accepted is True:
            return None
        if type(accepted).__name__ not in ("bool", "bool_"):  # numpy's, too
            raise ParameterError(f"validate returned {shown(accepted)}; return True or False, or raise ValueError")
        return None if accepted else "validate refuses it"

    def read(self, name: str, text: str, facts: Mapping[str, Any]) -> Any:
        """The object that variable `name` holds. `facts`: about the call, as `get_meta_info` tells them.

        Raises:
            ResultError: the text is none; the message says what ended it.
        """
        if facts.get("violations"):
            raise ResultError(f"variable {name!r} holds no {self.wanted}: {'; '.join(facts['violations'])}")
        try:
            return self.parse(text)
        except _REFUSALS as error:
            said = repr(text) if len(text) <= 200 else f"{text[:80]!r} … {text[-80:]!r}"
            raise ResultError(f"variable {name!r} holds no {self.wanted}{_ending(facts)}: {said}: {error}") from error


@dataclass(frozen=True, slots=True)
class Members:
    """Makes one of some objects of a text. `named`: the text of each → the object."""

    named: Mapping[str, Any]

    def parse(self, text: str) -> Any:
        """Raises ValueError for a text that is none of them."""
        if text not in self.named:
            raise ValueError(f"it is none of {', '.join(map(repr, self.named))}")
        return self.named[text]


def words_of(error: Exception) -> str:
    """Puts the message of an error into one line. Of Pydantic's only what is wrong and where, no values."""
    listed = getattr(error, "errors", None)
    if callable(listed):
        try:
            problems = [(".".join(map(str, each["loc"])), str(each["msg"])) for each in listed()]
        except Exception:  # another library's idea of the name
            problems = [("", str(error))]
    else:
        problems = [("", str(error) or type(error).__name__)]
    text = " ".join("; ".join(f"{where}: {what}" if where else what for where, what in problems).split())
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]} …"


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


Named = Mapping[str, Any]  # name of a capture → its text; None or a list of texts where it may be left out or repeat


@dataclass(frozen=True, slots=True)
class Captures:
    """The named parts of texts under one constraint.

    Attributes:
        results: name → how its text becomes an object. Of a name that may come several times it takes the list.
        read: text → what the names hold; None for a text that does not satisfy the constraint.
        parts: name → how one text of the part becomes an object.
    """

    results: Mapping[str, Result]
    read: Callable[[str], Named | None] = field(compare=False)
    parts: Mapping[str, Result] = field(default_factory=dict, compare=False)
