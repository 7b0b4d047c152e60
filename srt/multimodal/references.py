"""Keeps pictures by number as long as any request needs them.

The gateway says which pictures no later message will use. Earlier requests, such as a hint or a retracted request, may
still compute rows of them. So each request holds its pictures, and a forgotten picture is freed when the last of them
has ended.
"""

from typing import Generic, TypeVar
from weakref import WeakValueDictionary

Value = TypeVar("Value")


class Hold(Generic[Value]):
    """Keeps a picture while this object is referenced."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Value) -> None:
        self.value = value


class HeldPictures(Generic[Value]):
    """Maps numbers to the values that a store keeps of pictures."""

    def __init__(self) -> None:
        self._known: dict[int, Hold[Value]] = {}
        self._held: WeakValueDictionary[int, Hold[Value]] = WeakValueDictionary()  # known ones too

    def put(self, number: int, value: Value) -> None:
        """Adds a picture; keeps a present one, because a number belongs to the same pixels for ever."""
        hold = self._held.get(number)
        if hold is None:
            hold = self._held[number] = Hold(value)
        self._known[number] = hold

    def forget(self, number: int) -> None:
        """Hides a picture from new messages; ignores unknown numbers."""
        self._known.pop(number, None)

    def known(self, number: int) -> Value | None:
        """Returns the value for a new message; None when it is unknown."""
        hold = self._known.get(number)
        return None if hold is None else hold.value

    def hold(self, number: int) -> Hold[Value]:
        """Returns an object that keeps a known picture."""
        return self._known[number]

    def find(self, number: int) -> Value | None:
        """Returns the value for a row of a request, also of a forgotten picture that is still held."""
        hold = self._held.get(number)
        return None if hold is None else hold.value
