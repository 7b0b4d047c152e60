"""The picture format of a model: one tile of fixed size, an overview and the tiles of a grid ("anyres"), or one tile of
the picture's own proportions ("dynamic").

The format crosses process boundaries. It fixes the number of tokens of a picture before its pixels are decoded, so
media are checked before that, too.

                  pad to a square   resize        crop around the middle
    fixed     ──▶ (pad_colour)  ──▶ (resize)  ──▶ to the tile             ──▶ 1 tile
    anyres    ──▶ the same                                                ──▶ the overview, and
              ──▶ the best of `grids`: fitted into it, black around it    ──▶ its tiles, row by row
    dynamic   ──▶ resized to the nearest multiples of `patch_size`        ──▶ 1 tile, a token for each of its squares
"""

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

import msgspec

from ...lang.errors import ParameterError, RequestError
from ...lang.prompt import Media
from ..core.config import PictureLimits

Layout = Literal["fixed", "anyres", "dynamic"]
Resample = Literal["lanczos", "bilinear", "bicubic", "box", "hamming"]
Clips = Literal["frames", "joined", "timed"]

LONGEST_TIME = "<86400.0 seconds>"  # before a part of a clip
FRAME_TOKENS = 256  # of a frame of a clip at most, where pictures have any size
LONGEST_RATIO = PictureLimits().longest_ratio
_VERSION = 1  # of the output of `prepare` for a picture and its format


class PictureFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The picture format of a model. Sizes are pixels, height before width.

    Attributes:
        tile_height, tile_width: of a dynamic picture, the numbers that its height and width are multiples of.
        tile_tokens: tokens of one tile, all together; of a dynamic picture at most.
        patch_size: side of the squares that a tile's tokens stand for; what an anyres grid is cut by.
        resize: to exactly this size; one number is the length of the shorter side, which keeps the proportions; None
            leaves the picture as it is.
        pad_colour: first make the picture square, in the middle of this colour.
        grids: sizes that anyres may choose from, multiples of the tile.
        least_pixels, most_pixels: a dynamic picture is resized to about so many, if it has fewer or more.
        before, after: control text around the picture's tokens.
        clips: the prompt has the frames of a clip as pictures, or parts of `part_frames` frames each: "joined", all of
            them within one text before and after, or "timed", each within its own, with its time as text before it.
        part_frames: frames that the tower sees as one picture of the parts of a clip.
        positions_per_second: of joined parts on the rotary axis of time; 0: each part takes one.
    """

    layout: Layout
    tile_height: int
    tile_width: int
    tile_tokens: int
    patch_size: int
    resize: tuple[int, int] | int | None
    resample: Resample = "bicubic"
    pad_colour: tuple[int, int, int] | None = None
    grids: tuple[tuple[int, int], ...] = ()
    least_pixels: int = 0
    most_pixels: int = 0
    before: str = ""
    after: str = ""
    clips: Clips = "frames"
    part_frames: int = 1
    positions_per_second: float = 0.0

    @property
    def fingerprint(self) -> str:
        """Returns a digest of everything that decides which pixels the model sees, and in which layout."""
        pixels = msgspec.structs.replace(self, before="", after="")
        return sha256(f"{_VERSION}/".encode() + msgspec.msgpack.encode(pixels)).hexdigest()


class Raster(msgspec.Struct, frozen=True, array_like=True):
    """A picture as a tower sees it: the fields of `core.messages.EnginePicture`."""

    tokens: int
    width: int
    height: int
    columns: int
    rows: int
    tile_height: int
    tile_width: int
    pixels: bytes  # uint8 RGB [tiles or frames, tile_height, tile_width, 3]
    frames: int = 1
    time: int | None = None


def picture_tokens_at(form: PictureFormat, width: int, height: int) -> int:
    """Returns the number of tokens of a picture of `width` × `height` pixels."""
    if form.layout == "fixed":
        return form.tile_tokens
    if form.layout == "dynamic":
        height, width = dynamic_size(form, width, height)
        return (height // form.patch_size) * (width // form.patch_size)
    grid_height, grid_width = best_grid(form.grids, width, height)
    top, bottom, left, right = unpadded(grid_height // form.patch_size, grid_width // form.patch_size, width, height)
    return form.tile_tokens + anyres_tokens(bottom - top, right - left)


def frame_format(form: PictureFormat) -> PictureFormat:
    """Returns the format of the frames of a clip: small or overviews only, because others would fill the context."""
    if form.layout == "dynamic":
        most = min(form.most_pixels, FRAME_TOKENS * form.patch_size**2)
        least = min(form.least_pixels, most)
        tokens = dynamic_tokens(form.patch_size, least, most)
        return msgspec.structs.replace(form, least_pixels=least, most_pixels=most, tile_tokens=tokens)
    return msgspec.structs.replace(form, layout="fixed", grids=())


def dynamic_size(form: PictureFormat, width: int, height: int) -> tuple[int, int]:
    """Returns the size (height, width) of a dynamic picture: the nearest multiples of `patch_size`.

    If these are too many pixels or too few, both sides are first made smaller or larger, in proportion. As Qwen-VL
    resizes (transformers: smart_resize).
    """
    unit = form.patch_size
    size = round(height / unit) * unit, round(width / unit) * unit
    if size[0] * size[1] > form.most_pixels:
        shrink = math.sqrt(height * width / form.most_pixels)
        return max(unit, int(height / shrink / unit) * unit), max(unit, int(width / shrink / unit) * unit)
    if size[0] * size[1] < form.least_pixels:
        grow = math.sqrt(form.least_pixels / (height * width))
        return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
    return size


def dynamic_tokens(unit: int, least_pixels: int, most_pixels: int) -> int:
    """Returns a bound on the tokens of a dynamic picture, whose squares have a side of `unit` pixels.

    A very long picture that is made smaller keeps one square across, so it may have more than `most_pixels`. One that
    is made larger is rounded up on both sides, by most where it is longest.
    """
    least, most = least_pixels / unit**2, most_pixels / unit**2
    long, short = math.sqrt(least * LONGEST_RATIO), math.sqrt(least / LONGEST_RATIO)
    return int(max(most, math.sqrt(most * LONGEST_RATIO), (long + 1) * (short + 1)))


def best_grid(grids: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """Returns the grid (height, width) that shows most of the picture's pixels; of equals the one with least padding.

    As LLaVA-NeXT chooses (transformers: select_best_resolution); the first of those that are equal in both.
    """

    def worth(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - grid[0] * grid[1]

    return max(grids, key=worth)


def unpadded(rows: int, columns: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Returns the patches [top, bottom) and [left, right) of a grid that show a picture of `width` × `height`.

    As LLaVA-NeXT cuts (transformers: unpad_image): equally much on both sides, so that a patch of padding may stay.
    """
    if width / height > columns / rows:
        shown = int(round(height * (columns / width), 7))
        padding = (rows - shown) // 2
        return padding, rows - padding, 0, columns
    shown = int(round(width * (rows / height), 7))
    padding = (columns - shown) // 2
    return 0, rows, padding, columns - padding


def anyres_tokens(rows: int, columns: int) -> int:
    """Returns the tokens of the part of a grid that shows the picture: one per patch, and one at each row's end."""
    return rows * (columns + 1)


def most_tokens(form: PictureFormat) -> int:
    """Returns the largest number of tokens of a picture, or of a frame of a clip, with the text around it.

    A picture with a grid's own proportions has no padding to leave out, so the maximum is among those."""
    tiles = max((picture_tokens_at(form, width, height) for height, width in form.grids), default=form.tile_tokens)
    text = form.before + form.after + (LONGEST_TIME if form.clips == "timed" else "")
    return max(tiles, form.tile_tokens) + len(text.encode())


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
    if form.layout == "dynamic":
        frame_bytes *= frame_format(form).tile_tokens
    most = min(limits.most_frames, limits.frame_bytes // frame_bytes)
    if frames > most:
        raise RequestError(f"the clips of the prompt have num_frames={frames} together; write at most {most}")
