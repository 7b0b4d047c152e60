"""The bytes of a picture → its pixels, as a person sees them.

Of several frames the first is shown. What is transparent lies on white, EXIF says which side is up, and colour profiles
are not applied. All that is known of a picture without its pixels is checked before there are any.
"""

import io
import warnings

# Each of these teaches Pillow one format; without them it would load the readers of forty others.
from PIL import (  # noqa: F401
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from ...lang.errors import ParameterError, RequestError
from ..core.config import PictureLimits
from .webp import webp_size

# TIFF is not among them: a container of a dozen codings that cameras and browsers do not write.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")

_WEBP_BYTES = 17  # of memory for a pixel: libwebp keeps two canvases beside the frame, Pillow its own
_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_still(data: bytes, limits: PictureLimits) -> Image.Image:
    """The picture in mode RGB. At most two pictures of its size are in memory at the same time.

    Raises:
        ParameterError: bytes that are none of FORMATS.
        RequestError: too many pixels, or a strip.
        Exception: whatever Pillow raises for a picture that is damaged.
    """
    if (size := webp_size(data)) is not None:
        _check_webp(*size, limits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes and sloppy files: the first are refused here, the others are shown
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise ParameterError(
                f"image() of {len(data)} bytes is no PNG, JPEG, GIF, WebP or BMP, or its first bytes are damaged; "
                "convert it to one of them"
            ) from None
        except Image.DecompressionBombError:
            raise _too_large("image()", "more than 178,956,970", limits.most_pixels) from None
        check_size("image()", image.width, image.height, limits.most_pixels, limits)
        image.load()
        check_size("image()", image.width, image.height, limits.most_pixels, limits)  # a file may say two things
        turn = _turn(image)
        image = _as_rgb(image)
        return image if turn is None else image.transpose(turn)


def check_size(what: str, width: int, height: int, most_pixels: int, limits: PictureLimits) -> None:
    """Raises RequestError when there is nothing to see, or too much."""
    if width < 1 or height < 1:
        raise RequestError(f"{what} has {width} x {height} pixels; give one with at least 1 x 1")
    if width * height > most_pixels:
        raise _too_large(what, f"{width} x {height} = {width * height:,}", most_pixels)
    if max(width, height) > limits.longest_ratio * min(width, height):
        raise RequestError(
            f"{what} has {width} x {height} pixels: one side is more than {limits.longest_ratio} times the other, "
            "and the model would see a line; cut it into pieces"
        )


def _check_webp(width: int, height: int, limits: PictureLimits) -> None:
    check_size("image()", width, height, limits.most_pixels, limits)
    most = limits.memory // _WEBP_BYTES
    if width * height > most:
        raise RequestError(
            f"image() has {width} x {height} pixels; a WebP may have {most:,}, because its decoder takes much memory: "
            "make it smaller, or save it as JPEG"
        )


def _too_large(what: str, pixels: str, most: int) -> RequestError:
    return RequestError(f"{what} has {pixels} pixels; at most {most:,} are accepted: make it smaller")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """How it is to be turned. EXIF that cannot be read says nothing."""
    try:
        return _TURNS.get(int(image.getexif().get(_ORIENTATION, 1)))
    except Exception:
        return None


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey: the upper ones
        image = image.point(lambda level: level * (1 / 256)).convert("L")
    if image.has_transparency_data:
        return _on_white(image if image.mode == "RGBA" else image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white
