"""What each program has been given: fairness among requests that the policy holds for equal.

Of two requests that have equally much cached, the one of the program with less service goes first. So a program
of one call does not stand behind all 64 branches of another one that it shares its prefix with.
"""

from collections import OrderedDict

from ..request import Request

_REMEMBERED = 4096  # programs; the one that was served longest ago is forgotten


class Service:
    """Rows run for every program: its computed prompt tokens and its generated ones.

    A request without a program is a program of its own, and has had nothing.
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

    def of(self, request: Request) -> int:
        return self._rows.get((request.schedule.salt, request.schedule.program_id), 0)
