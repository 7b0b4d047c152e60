"""Settings of speculation, its state shared by the streams of one run, and whether the run's body rests.

A body rests while it waits for a value: it adds no steps meanwhile. Steps after a `gen` may come a moment later, from
another thread, so the speculator waits until a step follows, the body rests, or it has ended.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...lang import checks
from ...lang.errors import ParameterError, shown
from ...lang.sampling import MAX_TOKENS
from ..waiting import Signal

if TYPE_CHECKING:
    from .planner import Planner


if TYPE_CHECKING:
    from ..run import Run


@dataclass(frozen=True, slots=True)
class Setting:
    """The number of tokens by which calls go beyond what their `gen` needs.

    Attributes:
        tokens: the most; 0 turns speculation off, None lets the planner decide.
    """

    tokens: int | None


@dataclass(frozen=True, slots=True)
class Speculating:
    """Speculation state that the streams of one run share.

    Attributes:
        setting: of the run or its program.
        planner: of the program, shared by all of its runs.
        rest: of the body of this run.
    """

    setting: Setting
    planner: "Planner"
    rest: "Rest"


def setting_of(num_api_spec_tokens: object, speculate: object) -> Setting | None:
    """Builds the setting from the options of a program or a run; None when neither is given.

    Raises:
        ParameterError: both, or a value that is none of theirs.
    """
    if num_api_spec_tokens is None and speculate is None:
        return None
    if num_api_spec_tokens is not None and speculate is not None:
        raise ParameterError(
            f"num_api_spec_tokens={shown(num_api_spec_tokens)} and speculate={shown(speculate)} are two answers to one "
            'question; give the number of tokens, or speculate="auto"'
        )
    if num_api_spec_tokens is None:
        if not isinstance(speculate, str) or checks.plain(speculate) != "auto":
            raise ParameterError(
                f'speculate={shown(speculate)}; write speculate="auto", or num_api_spec_tokens=64 for a fixed number'
            )
        return Setting(None)
    remedy = f"a number of tokens from 0 to {MAX_TOKENS}, such as 64"
    return Setting(checks.integer("num_api_spec_tokens", num_api_spec_tokens, 0, MAX_TOKENS, remedy))


class Rest:
    """Counts the reads of a run's body that wait now."""

    __slots__ = ("_lock", "_waiting", "changed")

    def __init__(self) -> None:
        self.changed = Signal()
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def resting(self) -> bool:
        return self._waiting > 0

    def start(self) -> None:
        with self._lock:
            self._waiting += 1
        self.changed.fire()

    def end(self) -> None:
        with self._lock:
            self._waiting -= 1


@contextmanager
def resting(run: "Run") -> Iterator[None]:
    """Marks the body as resting during a wait, if the program itself waits and not an observer."""
    if run.speculation is None or not run.is_inside:
        yield
        return
    run.speculation.rest.start()
    try:
        yield
    finally:
        run.speculation.rest.end()
