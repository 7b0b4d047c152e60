"""Admits branches of one fork together: when one is admitted, its waiting siblings are called, that is, put next.

The program continues only when its last branch has ended, so one waiting branch delays all of them.

A call must keep the depth-first order that makes longest prefix first optimal (Theorem 3.1). The siblings diverge from
the path of the admitted branch at some depth; all requests that diverge from it deeper are called with them:

    S ─┬─ branch 1, admitted ─┬─ …
       │                      └─ another request: called too, and goes first (it shares more than S)
       ├─ branch 2: called
       └─ branch 3: called              a request elsewhere with a longer match waits until they are in

A later call precedes an earlier one. While called requests wait, every admission also calls the requests that diverge
from its path deeper than they do. Otherwise the call would leave a subtree before it is finished.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from ...cache.radix_cache import common_length
from ..request import Request

_Group = tuple[str, str, str]  # salt, program, fork group


def _group(request: Request) -> _Group | None:
    schedule = request.schedule
    return (schedule.salt, schedule.program_id, schedule.fork_group) if schedule.fork_group else None


class ForkSiblings:
    """Remembers which requests have been called, across steps: a step may be full before the last sibling is in."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}  # number → turn; smaller goes first, 0: not called
        self._calls = 0
        self._groups: dict[_Group, list[Request]] = {}

    def begin(self, waiting: Collection[Request]) -> None:
        """Prepares for a new order over `waiting`."""
        self._groups.clear()
        for request in waiting:
            group = _group(request)
            if group is not None:
                self._groups.setdefault(group, []).append(request)
        if self._turns:
            here = {request.number for request in waiting}
            self._turns = {number: turn for number, turn in self._turns.items() if number in here}

    def turn(self, request: Request) -> int:
        return self._turns.get(request.number, 0)

    def call(
        self,
        admitted: Request,
        tokens: NDArray[np.int32],
        left: Mapping[int, Request],
        cached: Mapping[int, int],
    ) -> list[Request]:
        """Calls requests of `left` now that the admitted request's `tokens` are in the tree, and returns them.

        Both mappings are keyed by request number; `cached` is up to date.
        """
        group = _group(admitted)
        siblings = [request for request in self._groups.get(group, ()) if request.number in left] if group else []
        salt = admitted.schedule.salt
        before = [left[number] for number in self._turns if number in left and left[number].schedule.salt == salt]
        if not siblings and not before:
            return []
        depth = min(common_length(tokens, request.tokens) for request in (*siblings, *before))
        names = {sibling.number for sibling in siblings}
        deeper = [
            request
            for number, request in left.items()
            if number not in names
            and cached[number] > depth
            and request.schedule.salt == salt
            and common_length(tokens, request.tokens) > depth
        ]
        self._calls += 1
        called = siblings + deeper
        self._turns.update((request.number, -self._calls) for request in called)
        return called
