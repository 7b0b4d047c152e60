"""The gateway's end of the process that decodes pictures and clips (decode_worker)."""

from collections import Counter
from collections.abc import Callable
from typing import assert_never

from ...lang.errors import BackendError, OverloadedError, RequestError
from ..core.config import PictureLimits, WorkerLimits
from ..processes.worker import Cause, Trouble, WorkerProcess
from .decode import Answer, Decoded, DecodeJob, RefusedMedia, too_long, too_much_memory


class DecoderProcess:
    """Decodes pictures in a process, as a `PictureDecoder` on one running loop.

    Args:
        after: called after each answer, to flush the messages that it led to.
        worker_limits: limits for a process that hangs.
    """

    def __init__(
        self, limits: PictureLimits, after: Callable[[], None], worker_limits: WorkerLimits | None = None
    ) -> None:
        self._limits = limits
        self._worker: WorkerProcess[DecodeJob, Decoded | RefusedMedia] = WorkerProcess(
            "umbel.srt.multimodal.decode_worker", "picture", Decoded | RefusedMedia, after=after, limits=worker_limits
        )
        self.counters: Counter[str] = self._worker.counters

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id

    def decode(self, job: DecodeJob, answer: Callable[[Answer | None], None], wanted: Callable[[], bool]) -> None:
        what, late, large = job.kind, too_long(job), too_much_memory(job)

        def hear(given: Decoded | RefusedMedia | Trouble | None) -> None:  # does not hold the job's bytes
            answer(explained(given, what, late, large) if isinstance(given, Trouble) else given)

        self._worker.submit(job, hear, wanted, cpu_seconds=job.seconds + self._limits.library_seconds)

    async def close(self) -> None:
        """Ends the process; waiting jobs are never answered."""
        await self._worker.close()


def explained(trouble: Trouble, what: str, late: str, large: str) -> RequestError | BackendError:
    """Makes the error for a failed job. It blames the picture only for exceeding its CPU time or memory.

    Args:
        what: "image" or "video".
        late: message for one that takes too long.
        large: message for one that takes too much memory.
    """
    not_its_fault = f"the {what} is not the cause; send the request again"
    match trouble.cause:
        case Cause.CPU:
            return RequestError(late)
        case Cause.MEMORY:
            return RequestError(large)
        case Cause.CRASHED:
            return RequestError(
                f"decoding the {what} ended the process that did it, in every try ({trouble.how}); save it anew"
            )
        case Cause.KILLED | Cause.HUNG | Cause.NOT_STARTED:
            return BackendError(f"the process that decodes pictures was lost ({trouble.how}); {not_its_fault}")
        case Cause.BUSY:
            return OverloadedError(
                f"the machine is busy: decoding the {what} got {trouble.cpu_seconds:.1f} s of CPU time in "
                f"{trouble.wall_seconds:.0f} s; {not_its_fault} when it has less to do"
            )
        case Cause.UNREADABLE:
            return BackendError("internal error while decoding a picture; see the log")
        case _:
            assert_never(trouble.cause)
