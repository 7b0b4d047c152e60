"""What clients have pinned: the name they gave it → the engine's.

The engine knows no clients, so the gateway keeps who asked for what, and lets go for those that leave.
"""

from .front_end import Client


class PinTable:
    """Pins by client and label.

    Args:
        most: that are kept; of all clients together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pins: dict[tuple[Client, str], tuple[int, float]] = {}  # → (engine's id, end if unused)

    def __len__(self) -> int:
        return len(self._pins)

    def room(self, now: float) -> bool:
        """Whether one more may be added. Where there are too many, those whose time is over are forgotten: the engine
        ends them by itself, a while later if they were used."""
        if len(self._pins) >= self._most:
            self._pins = {name: pin for name, pin in self._pins.items() if pin[1] > now}
        return len(self._pins) < self._most

    def add(self, client: Client, label: str, number: int, ends: float) -> None:
        assert (client, label) not in self._pins, "take the former one first"
        self._pins[client, label] = (number, ends)

    def take(self, client: Client, label: str) -> int | None:
        """The engine's id, which is forgotten here; None for a label that has pinned nothing."""
        pin = self._pins.pop((client, label), None)
        return None if pin is None else pin[0]

    def take_all(self, client: Client) -> list[int]:
        """As `take`, for everything of one client."""
        labels = [label for owner, label in self._pins if owner == client]
        return [self._pins.pop((client, label))[0] for label in labels]

    def clear(self) -> None:
        """The engine that had them is gone."""
        self._pins.clear()
