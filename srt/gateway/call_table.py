"""The calls of a gateway that have not ended, found by whatever somebody knows of them.

engine request id ──▶ call ◀── (client, label)        a call stands here from its arrival to its one ending
                       ▲
                deadline heap                       entries of ended calls are skipped, and cleared when they are many
"""

import heapq
import itertools
from collections.abc import Iterator

from .calls import Call
from .front_end import Client

_CLEARED_AT = 256  # entries: a call that ended early would be held until its deadline, prompt and all


class CallTable:
    """Calls in order of arrival, with three indexes that `add` and `remove` keep true."""

    def __init__(self) -> None:
        self._live: dict[Call, None] = {}  # a set in order of arrival
        self._by_request: dict[int, Call] = {}
        self._by_label: dict[tuple[Client, str], list[Call]] = {}
        self._deadlines: list[tuple[float, int, Call]] = []
        self._order = itertools.count()  # between equal deadlines: calls do not compare

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, call: Call) -> bool:
        return call in self._live

    def __iter__(self) -> Iterator[Call]:
        """In order of arrival; calls may be removed meanwhile."""
        return iter(tuple(self._live))

    def add(self, call: Call) -> None:
        self._live[call] = None
        for message in call.messages:
            self._by_request[message.id] = call
        self._by_label.setdefault((call.client, call.label), []).append(call)
        self.watch(call, call.deadline)

    def remove(self, call: Call) -> None:
        del self._live[call]
        for message in call.messages:
            self._by_request.pop(message.id, None)
        key = (call.client, call.label)
        calls = self._by_label[key]
        calls.remove(call)
        if not calls:
            del self._by_label[key]
        if len(self._deadlines) > _CLEARED_AT and len(self._deadlines) > 4 * len(self._live):
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._live]
            heapq.heapify(self._deadlines)

    def repeat(self, call: Call, ids: Iterator[int]) -> None:
        """The call asks again what has no ending. Events of the former ids are late from now on."""
        for id in call.open:
            self._by_request.pop(id, None)
        call.repeat(ids)
        for id in call.open:
            self._by_request[id] = call

    def of_request(self, id: int) -> Call | None:
        """The call of an engine request that has not ended."""
        return self._by_request.get(id)

    def request_ended(self, id: int) -> None:
        """Nothing more will come for this engine request; its call may have others."""
        self._by_request.pop(id, None)

    def of_label(self, client: Client, label: str) -> tuple[Call, ...]:
        return tuple(self._by_label.get((client, label), ()))

    def of_client(self, client: Client) -> tuple[Call, ...]:
        return tuple(call for call in self._live if call.client == client)

    @property
    def next_due(self) -> float:
        """When `due` may have something to say; infinite when there is nothing to wait for."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def watch(self, call: Call, when: float) -> None:
        """`due` names the call once the time has come."""
        heapq.heappush(self._deadlines, (when, next(self._order), call))

    def due(self, now: float) -> Iterator[Call]:
        """Calls whose time has come and that have not ended, each once per `watch`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, call = heapq.heappop(self._deadlines)
            if call in self._live:
                yield call
