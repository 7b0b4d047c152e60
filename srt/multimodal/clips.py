"""Decodes some frames of a clip.

Frames are taken evenly: of a clip of N frames the k-th of n is frame ⌊k · (N − 1) / (n − 1)⌋, counted from 0, so the
first is the first one and the last is the last one; of one it is the first. A clip is read twice: once for the times of
its frames, which decodes nothing, and once from keyframe to keyframe, which decodes from a keyframe to each wanted
frame.
"""

import bisect
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from ...lang.errors import CapabilityError, ParameterError, RequestError
from ..core.config import PictureLimits
from .stills import check_size

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_MOVIE_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
# Containers and codings that are read. Others, playlists above all, may name files and addresses.
_CODINGS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg", "gif")
USUAL_RATE = 24  # frames a second of a clip that does not say it
_ATTACHED = 0x400  # of a stream's disposition: the cover of an album
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


class ClipFrame(NamedTuple):
    """A frame of a clip in mode RGB, and the seconds from the first frame of the clip to it."""

    image: Image.Image
    seconds: float


def frames_of(data: bytes, count: int, limits: PictureLimits) -> Iterator[ClipFrame]:
    """Yields `count` frames, in order.

    Raises:
        CapabilityError: PyAV is not installed.
        ParameterError: bytes that are no clip, or one without pictures or with fewer frames.
        RequestError: frames that are too large, or too many of them to look through.
        Exception: any error of PyAV for a damaged clip.
    """
    load_library()
    container = _container(data)
    with _opened(data, container) as opened:
        times = _times(opened, _stream(opened, limits), limits)
    frames = len(times.shown)
    if frames < count:
        raise ParameterError(
            f"video(num_frames={count}): the clip has {frames} frame{'s' if frames != 1 else ''}; "
            f"write num_frames={frames} or less"
            if frames
            else f"video() of {len(data)} bytes holds no frame; save it anew"
        )
    wanted = [index * (frames - 1) // max(1, count - 1) for index in range(count)]
    with _opened(data, container) as opened:
        stream = _stream(opened, limits)
        for index, frame in zip(wanted, _decoded(opened, stream, times, wanted), strict=True):
            check_size("a frame of video()", frame.width, frame.height, limits.clip_pixels, limits)
            image = _as_image(frame)
            turn = _TURNS.get(frame.rotation % 360)
            yield ClipFrame(image if turn is None else image.transpose(turn), _seconds(times, index, stream))


def load_library() -> None:
    """Imports PyAV. Raises CapabilityError when it is not installed."""
    try:
        import av

        av.logging.set_level(None)  # no log lines about files of clients
    except ImportError:
        raise CapabilityError("video() needs PyAV, which is not installed; run: pip install 'umbel[video]'") from None


@dataclass(frozen=True, slots=True)
class _Times:
    """Times of a clip's frames, in its own unit.

    `known`: every frame has a time of its own. Otherwise they are counted.
    """

    shown: list[int]  # ascending
    keyframes: list[int]  # ascending
    known: bool


def _seconds(times: _Times, index: int, stream: "VideoStream") -> float:
    """Returns the seconds from the first frame to that of this index."""
    if times.known and stream.time_base is not None:
        return float((times.shown[index] - times.shown[0]) * stream.time_base)
    return float(index / (stream.average_rate or USUAL_RATE))


def _as_image(frame: "VideoFrame") -> Image.Image:
    """Converts a frame to RGB. PyAV's own conversion copies all pixels once more."""
    (plane,) = frame.reformat(format="rgb24").planes
    return Image.frombytes("RGB", (frame.width, frame.height), memoryview(plane), "raw", "RGB", plane.line_size, 1)


def _container(data: bytes) -> str:
    """Returns the name of the reader, from the first bytes: a file never chooses among all available readers."""
    if data[4:8] in _MOVIE_BOXES:
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:4] == b"GIF8":
        return "gif"
    raise ParameterError(
        f"video() of {len(data)} bytes is no MP4, MOV, WebM, Matroska, AVI or GIF; convert it to one of them"
    )


def _opened(data: bytes, container: str) -> "InputContainer":
    import av

    return av.open(io.BytesIO(data), mode="r", format=container, io_open=_refuse)


def _refuse(*_: Any) -> None:  # Any: an address, flags, options
    raise PermissionError("a clip opens no other files")


def _stream(opened: "InputContainer", limits: PictureLimits) -> "VideoStream":
    stream = next((each for each in opened.streams.video if not int(each.disposition) & _ATTACHED), None)
    if stream is None:
        raise ParameterError("video(): there are no pictures in it, only sound; give a clip with a video track")
    context = stream.codec_context
    coding = context.codec.canonical_name
    if coding not in _CODINGS:
        raise ParameterError(
            f"video(): its coding {coding!r} is none of {', '.join(_CODINGS)}; convert it, for example with "
            "ffmpeg -i CLIP -c:v libx264 OTHER.mp4"
        )
    if context.width and context.height:
        check_size("a frame of video()", context.width, context.height, limits.clip_pixels, limits)
    context.options = {"max_pixels": str(limits.clip_pixels)}  # frames that are larger than the file says
    context.thread_count = 1  # threads would reserve memory, and the model needs the cores
    return stream


def _times(opened: "InputContainer", stream: "VideoStream", limits: PictureLimits) -> _Times:
    shown: list[int] = []
    keyframes: list[int] = []
    known = True
    for packet in opened.demux(stream):
        if not packet.size:  # the last one, which flushes the decoder
            continue
        if len(shown) >= limits.most_packets:
            raise RequestError(f"video() has more than {limits.most_packets} frames; cut out the part that matters")
        known = known and packet.pts is not None
        shown.append(len(shown) if packet.pts is None else packet.pts)
        if packet.is_keyframe:
            keyframes.append(shown[-1])
    known = known and len(set(shown)) == len(shown)
    return _Times(sorted(shown), sorted(keyframes), known)


def _decoded(
    opened: "InputContainer", stream: "VideoStream", times: _Times, wanted: list[int]
) -> Iterator["VideoFrame"]:
    """Yields the frames with these ascending indices.

    Some containers list frames that are not shown: the one before is taken instead, unless it was taken already."""
    coming = opened.decode(stream)
    at = taken = -1  # indices of the last frame that was decoded, and that was taken
    last: VideoFrame | None = None
    for index in wanted:
        if times.known and _keyframe_between(times, at, index):
            opened.seek(times.shown[index], stream=stream)
            coming = opened.decode(stream)
        while at < index and (found := next(coming, None)) is not None:
            last = found
            at = bisect.bisect_left(times.shown, last.pts) if times.known and last.pts is not None else at + 1
        if last is None or at <= taken:
            raise ParameterError(f"video(): frame {index} cannot be decoded, the clip is damaged; save it anew")
        taken = at
        yield last


def _keyframe_between(times: _Times, at: int, index: int) -> bool:
    """Returns whether a keyframe lies after the frame decoded last and not after the wanted one."""
    if index <= at + 1:
        return False
    before = times.shown[at] if at >= 0 else times.shown[0]
    place = bisect.bisect_right(times.keyframes, times.shown[index]) - 1
    return place >= 0 and times.keyframes[place] > before
