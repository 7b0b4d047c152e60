"""A decoder that decodes when the test says so."""

from collections import Counter, deque
from collections.abc import Callable

from umbel.srt.multimodal.decode import Answer, DecodeJob, decode_media


class PatientDecoder:
    """A `PictureDecoder` whose jobs wait for `work`. `asked` are those that were decoded, `answers` replace results."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.asked: list[DecodeJob] = []
        self.answers: list[Answer] = []
        self._waiting: deque[tuple[DecodeJob, Callable[[Answer | None], None], Callable[[], bool]]] = deque()

    def decode(self, job: DecodeJob, answer: Callable[[Answer | None], None], wanted: Callable[[], bool]) -> None:
        self._waiting.append((job, answer, wanted))

    def work(self) -> None:
        """Everything that waits."""
        while self._waiting:
            job, answer, wanted = self._waiting.popleft()
            if not wanted():
                answer(None)
                continue
            self.asked.append(job)
            answer(self.answers.pop(0) if self.answers else decode_media(job))
