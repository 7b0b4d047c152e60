"""Decodes media as programs send them → rasters for the cache, and keys that are equal for equal pictures.

Libraries that read untrusted pictures may take long, use much memory, or crash, so the runtime runs them in a process
that can be killed (decode_process.py). Tests, simulations and the in-process backend call them directly, with
`InlineDecoder`. The seam is `PictureDecoder`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from ...lang.errors import WIRE_ERRORS, CapabilityError, ParameterError, RequestError, UmbelError
from ..core.config import PictureLimits
from .format import PictureFormat, Raster, frame_format


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """Media to decode. `frames`: number of pictures to take from a clip."""

    kind: Literal["image", "video"]
    data: bytes
    frames: int
    form: PictureFormat
    limits: PictureLimits

    @property
    def seconds(self) -> float:
        """Limit of CPU time."""
        return self.limits.clip_seconds if self.kind == "video" else self.limits.picture_seconds


class DecodedPicture(msgspec.Struct, frozen=True, array_like=True):
    """A decoded picture. `key`: SHA-256 of its pixels and their preparation, see `stills.key_of`."""

    key: bytes
    raster: Raster


class Decoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The picture, or the frames of the clip in their order."""

    pictures: tuple[DecodedPicture, ...]


class RefusedMedia(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Media that cannot be shown, and why. The same bytes are refused again. `kind` names a class of WIRE_ERRORS."""

    kind: str
    message: str

    def error(self) -> UmbelError:
        return WIRE_ERRORS[self.kind](self.message)


Answer = Decoded | RefusedMedia | UmbelError  # an UmbelError: the work failed, and might succeed another time


class PictureDecoder(Protocol):
    """Decodes media, one after the other."""

    counters: Counter[str]

    def decode(self, job: DecodeJob, answer: Callable[[Answer | None], None], wanted: Callable[[], bool]) -> None:
        """Decodes media; calls `answer` once, now or later on the caller's loop.

        Args:
            wanted: called when the work would begin; where it returns False the answer is None.
        """


class InlineDecoder:
    """Decodes in the caller's thread, without a limit of time or memory."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def decode(self, job: DecodeJob, answer: Callable[[Answer | None], None], wanted: Callable[[], bool]) -> None:
        answer(decode_media(job))


def decode_media(job: DecodeJob) -> Decoded | RefusedMedia:
    """Decodes media. Any bytes lead to an answer, without the messages of libraries."""
    try:
        return Decoded(_clip(job) if job.kind == "video" else _still(job))
    except UmbelError as error:
        return RefusedMedia(type(error).__name__, str(error))
    except MemoryError:
        return RefusedMedia(RequestError.__name__, too_much_memory(job))
    except ImportError:
        return RefusedMedia(
            CapabilityError.__name__,
            f"{job.kind}() needs Pillow, which is not installed; run: pip install 'umbel[runtime]'",
        )
    except Exception:
        return RefusedMedia(
            ParameterError.__name__,
            f"{job.kind}() of {len(job.data)} bytes cannot be decoded: it is damaged or cut off; save it anew",
        )


def too_much_memory(job: DecodeJob) -> str:
    return (
        f"{job.kind}() of {len(job.data)} bytes takes more than {job.limits.memory >> 20} MiB of memory to decode; "
        "give a smaller one"
    )


def too_long(job: DecodeJob) -> str:
    return f"{job.kind}() of {len(job.data)} bytes takes more than {job.seconds:g} s to decode; give a smaller one"


# Pillow and PyAV are loaded when the first picture or clip comes: the gateway starts without them.


def _still(job: DecodeJob) -> tuple[DecodedPicture, ...]:
    from .prepare import prepare
    from .stills import key_of, open_still

    image = open_still(job.data, job.limits)
    return (DecodedPicture(key_of(image, job.form), prepare(image, job.form)),)


def _clip(job: DecodeJob) -> tuple[DecodedPicture, ...]:
    from .clips import frames_of
    from .prepare import prepare
    from .stills import key_of

    form = frame_format(job.form)
    return tuple(
        DecodedPicture(key_of(image, form), prepare(image, form))
        for image in frames_of(job.data, job.frames, job.limits)
    )
