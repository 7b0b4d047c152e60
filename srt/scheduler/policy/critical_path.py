"""The order among the calls of one program: those that most has to follow go first.

A program knows its graph: behind one branch of a fork a long text may follow, behind seven others nothing. With fewer
places than branches the long one should not be begun last. `Schedule.ahead` says so, and nothing but the program's own
order depends on it: its waiting calls exchange their places in the order of arrival among themselves.

    arrival          1 P   2 P   3 Q   4 P           ahead of P's calls: 10, 20, 90
    places           4     2     3     1             P still has places 1, 2 and 4, and Q its own

So no other program gains or loses a place, whatever a program claims to have ahead. Requests that have waited too long
are ordered by their true arrival (lanes.py).
"""

from collections.abc import Mapping, Sequence

from ..request import Request


class CriticalPath:
    """Who has whose place, across steps: a call that was admitted has taken its place with it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # number → place, of those that have another's

    def arrange(self, waiting: Sequence[Request]) -> Mapping[int, int]:
        """Number → place (a number of arrival), for calls of programs that say what is ahead of them."""
        programs: dict[tuple[str, int, str], list[Request]] = {}
        for request in waiting:
            schedule = request.schedule
            if schedule.program_id:
                programs.setdefault((schedule.salt, schedule.priority, schedule.program_id), []).append(request)
        before, self._places = self._places, {}
        for requests in programs.values():
            if any(request.schedule.ahead or request.number in before for request in requests):
                places = sorted(before.get(request.number, request.number) for request in requests)
                in_order = sorted(requests, key=lambda request: (-request.schedule.ahead, request.number))
                self._places.update((request.number, place) for request, place in zip(in_order, places, strict=True))
        return self._places
