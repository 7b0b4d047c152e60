"""How fast the engine has been going, in its own steps: what a deadline is compared with.

Smoothed over the last steps, so that one long prompt or one pause does not decide.
"""

from ..request import Generation, Prefilling, Request

_SMOOTHING = 0.1  # weight of the newest step


class Pace:
    """Seconds of a step, and waiting requests admitted in a step.

    Args:
        step_rows: prompt rows of one step; None: prompts are computed whole.
    """

    def __init__(self, step_rows: int | None) -> None:
        self._step_rows = step_rows
        self._step_seconds = 0.0  # unknown: nothing is late before a step has been timed
        self._admissions = 1.0  # in a step at whose beginning somebody waited
        self._begun: float | None = None

    def begin_step(self, now: float, *, busy: bool) -> None:
        """`busy`: the step before has left somebody running, so the time since its beginning was all work."""
        if busy and self._begun is not None:
            seconds = now - self._begun
            weight = _SMOOTHING if self._step_seconds else 1.0
            self._step_seconds += weight * (seconds - self._step_seconds)
        self._begun = now

    def admitted(self, count: int) -> None:
        """So many of those that waited were admitted in this step."""
        self._admissions += _SMOOTHING * (count - self._admissions)

    def service_seconds(self, request: Request) -> float:
        """What the request takes once it is admitted, at most: nothing cached, and all tokens it may generate."""
        to_compute = request.length
        steps = 1 if self._step_rows is None else -(-to_compute // self._step_rows)
        if isinstance(request.job, Generation):
            steps += max(0, request.job.sampling.max_tokens - request.generated)
        return steps * self._step_seconds

    def waiting_seconds(self, ahead: int) -> float:
        """Until a request is admitted that has so many ahead of it."""
        return ahead / max(self._admissions, 1e-3) * self._step_seconds

    def needs_help(self, request: Request, ahead: int, now: float) -> bool:
        """It would end in time if it were next, and too late behind those `ahead`. A hint is never late."""
        if request.deadline is None or isinstance(request.job, Prefilling):
            return False
        left = request.deadline - now
        service = self.service_seconds(request)
        return service <= left < service + self.waiting_seconds(ahead)
