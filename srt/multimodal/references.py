"""Pictures by number, for as long as anybody needs them.

The gateway says which pictures no later message will hold. Requests that came before may still compute rows of them, a
hint that nobody waits for or one that was sent back: so each keeps hold of its pictures, and what is forgotten goes
when the last of them has ended.
"""

from typing import Generic, TypeVar
from weakref import WeakValueDictionary

Value = TypeVar("Value")


class Hold(Generic[Value]):
    """Whoever has this object keeps the picture."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Value) -> None:
        self.value = value


class HeldPictures(Generic[Value]):
    """What a store keeps of each picture."""

    def __init__(self) -> None:
        self._known: dict[int, Hold[Value]] = {}
        self._held: WeakValueDictionary[int, Hold[Value]] = WeakValueDictionary()  # known ones too

    def put(self, number: int, value: Value) -> None:
        """A number belongs to the same pixels for ever: one that is there already stays."""
        hold = self._held.get(number)
        if hold is None:
            hold = self._held[number] = Hold(value)
        self._known[number] = hold

    def forget(self, number: int) -> None:
        """New messages do not find it any more. One that is not known is no mistake."""
        self._known.pop(number, None)

    def known(self, number: int) -> Value | None:
        """For a new message."""
        hold = self._known.get(number)
        return None if hold is None else hold.value

    def hold(self, number: int) -> Hold[Value]:
        """Keeps a known picture."""
        return self._known[number]

    def find(self, number: int) -> Value | None:
        """For a row of a request: forgotten ones too, while somebody holds them."""
        hold = self._held.get(number)
        return None if hold is None else hold.value
