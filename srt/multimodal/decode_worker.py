"""The process that decodes pictures and clips: one at a time, within limits; killed if it does not stop."""

import contextlib

from ...lang.errors import CapabilityError, RequestError
from ..core.config import PictureLimits
from ..processes.child import cpu_limit, lift_memory_limit, limit_memory, run
from .decode import Decoded, DecodeJob, RefusedMedia, decode_media, too_long


class Decoder:
    """Decodes media; loads the library for clips with the first one: it is large, and most programs show none."""

    def __init__(self, limits: PictureLimits) -> None:
        self._limits = limits
        self._clips = False

    def load(self) -> None:
        with contextlib.suppress(ImportError):  # reported when a picture comes
            from . import stills  # noqa: F401
        limit_memory(self._limits.memory)

    def work(self, job: DecodeJob) -> Decoded | RefusedMedia:
        if job.kind == "video" and not self._clips:
            self._clips = True
            self._load_clips()
        return decode_within(job, job.seconds)

    def _load_clips(self) -> None:
        from .clips import load_library

        lift_memory_limit()
        try:
            load_library()
        except CapabilityError:
            return  # reported when the clip is opened
        finally:
            limit_memory(self._limits.memory)


class _DecodeLateError(Exception):
    """Raised when the time of a job is over."""


def decode_within(job: DecodeJob, seconds: float) -> Decoded | RefusedMedia:
    """Calls `decode_media`; refuses when it takes more CPU time. For the main thread, because of the signal."""
    late = False

    def expire() -> _DecodeLateError:
        nonlocal late
        late = True
        return _DecodeLateError()

    try:
        with cpu_limit(seconds, expire):
            answer = decode_media(job)
    except _DecodeLateError:  # raised outside of the inner handler
        pass
    return RefusedMedia(RequestError.__name__, too_long(job)) if late else answer


def main() -> None:
    limits = PictureLimits()
    decoder = Decoder(limits)
    run(limits.niceness, decoder.load, DecodeJob, decoder.work)


if __name__ == "__main__":
    main()
