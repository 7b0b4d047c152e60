"""Decodes media as programs send them → rasters for the cache, and keys that are equal for equal pictures.

Libraries that read untrusted pictures may take long, use much memory, or crash, so the runtime runs them in a process
that can be killed (`DecoderProcess`, decode_worker.py). Tests, simulations and the in-process backend call them
directly, with `InlineDecoder`. The seam is `PictureDecoder`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Literal, Protocol, assert_never

import msgspec

from ...lang.errors import (
    WIRE_ERRORS,
    BackendError,
    CapabilityError,
    OverloadedError,
    ParameterError,
    RequestError,
    UmbelError,
)
from ..core.config import PictureLimits, WorkerLimits
from ..processes.worker import Cause, Trouble, WorkerProcess
from .format import PictureFormat, Raster, frame_format

MOST_SECONDS = 86_400  # the longest clip for models that read the times of its parts


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
    """A decoded picture, or a part of a clip.

    `key`: SHA-256 of its pixels and their preparation, see `stills.key_of`. `text`: before it in a prompt, its time.
    """

    key: bytes
    raster: Raster
    text: str = ""


class Decoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The picture, or the frames of the clip, or its parts, in their order."""

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
    from .stills import key_of, open_still, prepare

    image = open_still(job.data, job.limits)
    return (DecodedPicture(key_of(image, job.form), prepare(image, job.form)),)


def _clip(job: DecodeJob) -> tuple[DecodedPicture, ...]:
    from .clips import frames_of
    from .stills import key_of, prepare

    form = frame_format(job.form)
    frames: list[DecodedPicture] = []
    seconds: list[float] = []
    for image, second in frames_of(job.data, job.frames, job.limits):
        frames.append(DecodedPicture(key_of(image, form), prepare(image, form)))
        seconds.append(second)
    return tuple(frames) if form.clips == "frames" else tuple(_parts(frames, seconds, form))


def _parts(frames: list[DecodedPicture], seconds: list[float], form: PictureFormat) -> Iterator[DecodedPicture]:
    """Joins the frames of a clip to parts. The last part repeats its last frame until it is full.

    Raises:
        ParameterError: frames of several sizes.
        RequestError: a clip that is too long.
    """
    if len({(frame.raster.tile_height, frame.raster.tile_width) for frame in frames}) > 1:
        raise ParameterError("video(): its frames have several sizes, and the model joins frames; save it anew")
    if not 0 <= seconds[-1] <= MOST_SECONDS:
        raise RequestError(
            f"video() lasts {seconds[-1]:.0f} s; at most {MOST_SECONDS} can be shown, cut out the part that matters"
        )
    count = form.part_frames
    between = (seconds[-1] - seconds[0]) / max(1, len(seconds) - 1) * count  # two parts
    step = form.positions_per_second * between if form.positions_per_second else 1.0
    for index in range(-(-len(frames) // count)):
        places = [min(place, len(frames) - 1) for place in range(index * count, (index + 1) * count)]
        time = int(index * step) if form.clips == "joined" and index else None
        shown = (seconds[places[0]] + seconds[places[-1]]) / 2
        text = f"<{shown:.1f} seconds>" if form.clips == "timed" else ""
        key = sha256(b"".join(frames[place].key for place in places) + f"{time}/{text}".encode()).digest()
        raster = frames[places[0]].raster
        pixels = b"".join(frames[place].raster.pixels for place in places)
        yield DecodedPicture(key, msgspec.structs.replace(raster, pixels=pixels, frames=count, time=time), text)


class DecoderProcess:
    """Decodes pictures in a process (decode_worker.py), as a `PictureDecoder` on the gateway's running loop.

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
