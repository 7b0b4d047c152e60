"""The gateway's end of the process that decodes pictures and clips (decode_worker.py)."""

from collections import Counter
from collections.abc import Callable

from ...lang.errors import BackendError, RequestError
from ..config import PictureLimits
from ..worker_process import Trouble, WorkerProcess
from .decode import Answer, Decoded, DecodeJob, Refused, too_long, too_much_memory


class DecoderProcess:
    """A `PictureDecoder` on one running loop.

    Args:
        after: is called when an answer has been given, so that what it led to is sent.
    """

    def __init__(self, limits: PictureLimits, after: Callable[[], None]) -> None:
        self._worker: WorkerProcess[DecodeJob, Decoded | Refused] = WorkerProcess(
            "pictures.decode_worker", "picture", Decoded | Refused, wall_seconds=limits.wall_seconds, after=after
        )
        self.counters: Counter[str] = self._worker.counters

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id

    def decode(self, job: DecodeJob, answer: Callable[[Answer | None], None], wanted: Callable[[], bool]) -> None:
        late, died = too_long(job), f"{too_much_memory(job)} (it ended the process that decodes)"

        def hear(given: Decoded | Refused | Trouble | None) -> None:  # it keeps no bytes of the job
            answer(_explained(given, late, died) if isinstance(given, Trouble) else given)

        self._worker.submit(job, hear, wanted)

    async def close(self) -> None:
        """Ends the process; what waits is never answered."""
        await self._worker.close()


def _explained(trouble: Trouble, late: str, died: str) -> RequestError | BackendError:
    match trouble:
        case Trouble.LATE:
            return RequestError(late)
        case Trouble.DIED:
            return RequestError(died)
        case Trouble.UNREADABLE:
            return BackendError("internal error while decoding a picture; see the log")
