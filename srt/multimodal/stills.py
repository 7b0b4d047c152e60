"""Decodes the bytes of a picture into pixels, as a person sees them.

Of several frames the first is shown. Transparent parts lie on white, EXIF says which side is up, and colour profiles
are not applied. Limits that need no pixels are checked before decoding.
"""

import io
import warnings
from hashlib import sha256

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
from .format import PictureFormat

_VERSION = "umbel picture 1"
_STRIP = 1 << 20  # bytes of pixels that are in memory twice
_HEADER = 30  # bytes, with the longest of the three
_FOURTEEN = (1 << 14) - 1  # bits


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Reads width and height from the header of a WebP; None for other data, or where the size cannot be read.

    libwebp reserves its canvases before Pillow tells a size.

        RIFF ‹4› WEBP │ VP8X ‹4› flags ‹3› width−1 ‹3› height−1 ‹3›             extended; sizes in 3 bytes
                      │ VP8␣ ‹4› frame tag ‹3› 9D 01 2A, width, height          14 of 16 bits each
                      │ VP8L ‹4› 2F, width−1, height−1                          14 bits, one after the other

    All numbers begin with their lowest byte (RFC 9649).
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < _HEADER:
        return None
    match data[12:16]:
        case b"VP8X":
            return _number(data[24:27]) + 1, _number(data[27:30]) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            return _number(data[26:28]) & _FOURTEEN, _number(data[28:30]) & _FOURTEEN
        case b"VP8L" if data[20] == 0x2F:
            sizes = _number(data[21:25])
            return (sizes & _FOURTEEN) + 1, (sizes >> 14 & _FOURTEEN) + 1
        case _:
            return None


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


# TIFF is not among them: a container of a dozen codings that cameras and browsers do not write.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")

_WEBP_BYTES = 17  # of memory for a pixel: libwebp keeps two canvases and the frame, Pillow its own
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
    """Decodes a picture in mode RGB. At most two pictures of its size are in memory at the same time.

    Raises:
        ParameterError: bytes that are none of FORMATS.
        RequestError: too many pixels, or a strip.
        Exception: any error of Pillow for a damaged picture.
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
    """Raises RequestError for a picture without pixels, or with too many."""
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
    """Returns how to turn the picture; None without readable EXIF."""
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


def key_of(image: Image.Image, form: PictureFormat) -> bytes:
    """Computes a key of a picture: equal for equal pixels, shape and format.

    SHA-256 over version, mode, width, height, format and pixels, each after its length, so that two
    different pictures never give the same bytes. 30 × 100 and 100 × 30 of equal bytes are two pictures.
    """
    width, height = image.size
    digest = sha256()
    for field in (_VERSION, image.mode, str(width), str(height), form.fingerprint):
        content = field.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    row_bytes = width * len(image.getbands())
    digest.update((row_bytes * height).to_bytes(8, "little"))
    rows = max(1, _STRIP // row_bytes)
    for top in range(0, height, rows):
        digest.update(image.crop((0, top, width, min(top + rows, height))).tobytes())
    return digest.digest()
