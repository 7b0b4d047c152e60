"""Checks media and bounds their tokens before any of them is decoded."""

from collections.abc import Sequence

from ...lang.errors import ParameterError, RequestError
from ...lang.prompt import Media
from ..core.config import PictureLimits
from .format import PictureFormat, picture_tokens_at


def most_tokens(form: PictureFormat) -> int:
    """Returns the largest number of tokens of a picture, or of a frame of a clip, with the text around it.

    A picture with a grid's own proportions has no padding to leave out, so the maximum is among those."""
    tiles = max((picture_tokens_at(form, width, height) for height, width in form.grids), default=form.tile_tokens)
    return max(tiles, form.tile_tokens) + len((form.before + form.after).encode())


def check_media(media: Sequence[Media], form: PictureFormat, limits: PictureLimits) -> None:
    """Checks the media of one prompt.

    Raises:
        ParameterError: media of a wrong kind or number of frames.
        RequestError: more than is accepted.
    """
    if len(media) > limits.most_media:
        raise RequestError(
            f"the prompt shows {len(media)} pictures and clips; at most {limits.most_media} are accepted, ask about "
            "the others in another call"
        )
    for part in media:
        if part.kind not in ("image", "video"):
            raise ParameterError(f"media of kind {part.kind!r} are not known; write image(...) or video(...)")
        if part.kind == "video" and part.num_frames < 1:
            raise ParameterError(f"video(num_frames={part.num_frames}); write an integer of at least 1")
        if part.kind == "image" and part.num_frames:
            raise ParameterError(f"image(...) with {part.num_frames} frames; write video(...) for a clip")
    size = sum(len(part.data) for part in media)
    if size > limits.most_bytes:
        raise RequestError(
            f"the prompt shows pictures and clips of {size} bytes together; at most {limits.most_bytes} are accepted: "
            "make them smaller, or save them as JPEG or WebP"
        )
    frames = sum(part.num_frames for part in media)
    frame_bytes = form.tile_height * form.tile_width * 3
    most = min(limits.most_frames, limits.frame_bytes // frame_bytes)
    if frames > most:
        raise RequestError(f"the clips of the prompt have num_frames={frames} together; write at most {most}")
