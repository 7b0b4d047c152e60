"""Compiled stops, kept for the requests that bring the same ones."""

from functools import lru_cache

from ...fsm.errors import ConstraintRefused
from ...fsm.stops import Stops, stops_of
from ...lang.errors import ConstraintError
from ...lang.sampling import SamplingParams

KEPT = 256  # different lists of stops


class CompiledStops:
    """Each owner has its own: what is compiled grows when it is used, and is for one thread."""

    def __init__(self) -> None:
        self._compiled = lru_cache(maxsize=KEPT)(stops_of)

    def of(self, sampling: SamplingParams) -> Stops | None:
        """The stop strings and expressions of a request; None without any.

        Raises:
            ConstraintError: an expression that cannot be used; the message names it.
        """
        try:
            return self._compiled(sampling.stop, sampling.stop_regex)
        except ConstraintRefused as error:
            raise ConstraintError(str(error)) from None
