"""Breaks ties of the policy by the programs that requests belong to.

Among programs. Of two requests with equally long cached prefixes, the one whose program has less usage goes first. So a
program of one call does not wait for all 64 branches of another program with the same prefix.

Among the calls of one program: longest remaining critical path first. A program knows its graph: after one branch of a
fork a long text may follow, after seven others nothing. If not all branches fit at once, the long one should not start
last. `Schedule.ahead` holds that length. It affects only the program's own order: its waiting calls exchange their
places in the order of arrival among themselves.

    arrival          1 P   2 P   3 Q   4 P           ahead of P's calls: 10, 20, 90
    places           4     2     3     1             P still has places 1, 2 and 4, and Q its own

So no other program gains or loses a place, whatever a program claims to have ahead. Aged requests are ordered by their
true arrival (priority.py).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ..request import Request

_REMEMBERED = 4096  # programs; the one whose rows ran longest ago is forgotten


class ProgramUsage:
    """Counts the rows run for every program: computed prompt tokens and generated ones.

    A request without a program counts as a program of its own with no usage.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[tuple[str, str], int] = OrderedDict()  # (salt, program)

    def add(self, request: Request, rows: int) -> None:
        program = request.schedule.program_id
        if not program:
            return
        name = (request.schedule.salt, program)
        self._rows[name] = self._rows.get(name, 0) + rows
        self._rows.move_to_end(name)
        if len(self._rows) > _REMEMBERED:
            self._rows.popitem(last=False)

    def rows(self, request: Request) -> int:
        """Rows run for the request's program so far."""
        return self._rows.get((request.schedule.salt, request.schedule.program_id), 0)


class CriticalPath:
    """Keeps the place of each call across steps. An admitted call keeps its place; no waiting call gets it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # number → place, of calls that exchanged theirs

    def arrange(self, waiting: Sequence[Request]) -> Mapping[int, int]:
        """Returns number → place (a number of arrival), for calls of programs that set `Schedule.ahead`."""
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
