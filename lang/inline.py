"""Operations inside of text: `f"Hello {gen('x')}"`.

Python makes an ordinary string of it, so an operation that is formatted leaves a placeholder there, and the place
where text becomes part of a prompt takes the operation back out:

    f"Hello {gen('x')}!"   →   "Hello " + placeholder + "!"   →   "Hello " + gen("x") + "!"

    mark gen('x') mark word_number mark      what a person reads of it where it is printed: gen('x')

No text of a user can hold one: the word is a secret of the process, and a placeholder stands only for an operation of
its thread that has not been said yet. What is left of one that was cut or changed is found by its marks and its word,
and refused.
"""

import itertools
import re
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from .errors import ProgramError

MOST_WAITING = 1000  # operations of a thread in texts that no program has said; the oldest are forgotten

# Three characters of a plane that no script uses: fonts have single ones, which any text may hold. They read the same
# from the end, as what is left of an operation in a reversed text does.
_OUTER, _INNER = (chr(0x100000 + number) for number in secrets.SystemRandom().sample(range(0xFFFD), 2))
_MARK = _OUTER + _INNER + _OUTER
_WORD = "".join(secrets.choice("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(10))
_LOWERED = _WORD.lower()
_WHOLE = re.compile(f"({_MARK}[^{_MARK}]*{_MARK}{_WORD}_[0-9]+{_MARK})")
_LABEL = re.compile(f"[{_MARK}]([^{_MARK}]+)")
_NO_MARKS = {ord(character): None for character in _MARK}
_SHOWN = 80  # characters of a label

_numbers = itertools.count(1)  # of all threads together: a placeholder of one is none of another
_used = threading.Event()  # set when the first placeholder is made: until then no text has to be searched


class _Waiting(threading.local):
    """The placeholders of one thread with their operations, in the order in which they were made."""

    def __init__(self) -> None:
        self.operations: dict[str, Any] = {}  # Any: an operation; this module is below them


_waiting = _Waiting()


def placeholder(operation: Any, label: str) -> str:
    """A text that stands for `operation` until it is said once. `label`: how a person reads it."""
    waiting = _waiting
    text = _written(label, next(_numbers))
    waiting.operations[text] = operation
    if len(waiting.operations) > MOST_WAITING:
        del waiting.operations[next(iter(waiting.operations))]
    return text


def misplaced(label: str) -> str:
    """A text for what may be printed and must not be said, such as a state."""
    return _written(label, 0)


def _written(label: str, number: int) -> str:
    _used.set()
    shown = " ".join(label.translate(_NO_MARKS).split())
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
    return f"{_MARK}{shown}{_MARK}{_WORD}_{number}{_MARK}"


def touches(text: str) -> bool:
    """Returns whether a placeholder, or a remainder of one, is in the text."""
    if not _used.is_set():
        return False
    return str.__contains__(text, _MARK) or _LOWERED in str.lower(text)


def split(text: str) -> Iterator[Any]:
    """Texts and operations, in order; no text is empty. Each operation is given out once.

    Raises:
        ProgramError: what is left of a placeholder, or one whose operation is not there for the taking.
    """
    for index, part in enumerate(_WHOLE.split(text)):
        if index % 2:
            yield _taken(part)
        elif touches(part):
            raise _cut(part)
        elif part:
            yield part


def readable(text: str) -> str:
    """A text for a message: with the labels of the operations in it."""
    return _WHOLE.sub(lambda found: _label(found[0]), text) if touches(text) else text


def refuse(value: object, what: str) -> None:
    """Raises ProgramError when there is an operation in a text that is not said. `what`: the value is, for messages."""
    waiting, seen = [value] if _used.is_set() else [], set[int]()
    while waiting:
        match waiting.pop():
            case str(text):
                if touches(text):
                    raise ProgramError(
                        f"{what} holds {_label(text)}, which can only be said: s += ... ; write a text there, such as "
                        "s[name]"
                    )
            case (list() | tuple() | dict()) as members if id(members) not in seen:
                seen.add(id(members))
                waiting += _members(members)


def _members(found: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterator[Any]:
    """Iterates by the methods of the base: a subclass's are user code, and may raise or never end."""
    if isinstance(found, dict):
        return itertools.chain.from_iterable(dict.items(found))
    return list.__iter__(found) if isinstance(found, list) else tuple.__iter__(found)


def _taken(part: str) -> Any:
    operation = _waiting.operations.pop(part, None)
    if operation is not None:
        return operation
    label = _label(part)
    if label.startswith("<"):
        raise ProgramError(
            f"a text holds {label}, which is no text; write its text(), or one of its variables, s[name]"
        )
    raise ProgramError(
        f"a text holds {label}, which was said before, or was put into the text by another thread or long ago; put it "
        f'into a new text where it is said: s += f"... {{{label}}}", or s += "..." + {label}'
    )


def _cut(part: str) -> ProgramError:
    label = _label(part)
    return ProgramError(
        f"a text that holds {label} was cut, split, escaped or changed, and {label} is not whole any more; change the "
        f'text before it is put together: write s += "...".strip() + {label}'
    )


def _label(text: str) -> str:
    """Names the first operation in the text as it was written; where it was cut, in general."""
    found = _LABEL.search(text)
    return found[1] if found is not None and len(found[1]) <= _SHOWN and _WORD not in found[1] else "gen(...)"
