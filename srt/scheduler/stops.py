"""Compiles stop strings and expressions, and caches them for requests with the same ones."""

from functools import lru_cache

from ...fsm.errors import ConstraintRefused
from ...fsm.stops import Stops, stops_of
from ...lang.errors import ConstraintError
from ...lang.sampling import SamplingParams

KEPT = 256  # different lists of stops


class CompiledStops:
    """Caches compiled stops for one thread. Compiled stops grow in use, so every owner has a cache of its own."""

    def __init__(self) -> None:
        self._compiled = lru_cache(maxsize=KEPT)(stops_of)

    def of(self, sampling: SamplingParams) -> Stops | None:
        """Returns the compiled stop strings and expressions of a request; None without any.

        Raises:
            ConstraintError: an expression that cannot be used; the message names it.
        """
        try:
            return self._compiled(sampling.stop, sampling.stop_regex)
        except ConstraintRefused as error:
            raise ConstraintError(str(error)) from None
