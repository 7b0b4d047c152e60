"""Decodes the bytes of a picture into pixels, as a person sees them, and makes tiles for a model's tower of them.

Of several frames the first is shown. Transparent parts lie on white, EXIF says which side is up, and colour profiles
are not applied. Limits that need no pixels are checked before decoding.
"""

import io
import math
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
from .format import PictureFormat, Raster, Resample, best_grid, dynamic_size, picture_tokens_at

_VERSION = "umbel picture 1"
_STRIP = 1 << 20  # bytes of pixels that are in memory twice
_HEADER = 30  # bytes, with the longest of the three
_FOURTEEN = (1 << 14) - 1  # bits


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


FILTERS: dict[Resample, Image.Resampling] = {
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
STRIP_PIXELS = 1 << 22  # 16 MiB as PIL holds them
REACH = 3  # pixels to each side that a value is made of, at most (Lanczos), where nothing is made smaller
SQUARE_PIXELS = 1 << 24
BAND_PIXELS = 1 << 20  # of a padded square that is never whole in memory


def prepare(image: Image.Image, form: PictureFormat) -> Raster:
    """Makes the picture's tiles as transformers' PIL-based image processors do: the overview, then its grid by rows.

    The pixels are equal to theirs bit by bit, with two exceptions. Where resizing by the shorter side would make a
    strip of more than `STRIP_PIXELS` of which the crop keeps the middle, and where padding a tall picture would make a
    square of more than `SQUARE_PIXELS`, only the part that is kept is computed. PIL holds its box in single precision,
    so a value may differ by one.

    It needs the picture and some megabytes, or a strip of the tile's width and the picture's longer side.

    Args:
        image: mode RGB, at least one pixel.
    """
    assert image.mode == "RGB", "towers see three channels; the decoder converts"
    tile_height, tile_width = form.tile_height, form.tile_width
    columns = rows = 0
    if form.layout == "dynamic":
        tile_height, tile_width = dynamic_size(form, image.width, image.height)
        tiles = [image.resize((tile_width, tile_height), FILTERS[form.resample])]
    else:
        tiles = [_overview(image, form)]
    if form.layout == "anyres":
        grid = best_grid(form.grids, image.width, image.height)
        rows, columns = grid[0] // form.tile_height, grid[1] // form.tile_width
        tiles += _tiles(_fitted(image, grid, FILTERS[form.resample]), rows, columns, form)
    return Raster(
        tokens=picture_tokens_at(form, image.width, image.height),
        width=image.width,
        height=image.height,
        columns=columns,
        rows=rows,
        tile_height=tile_height,
        tile_width=tile_width,
        pixels=b"".join(tile.tobytes() for tile in tiles),
    )


def _overview(image: Image.Image, form: PictureFormat) -> Image.Image:
    """Makes one tile of the whole picture."""
    resample = FILTERS[form.resample]
    if form.pad_colour is not None and image.width != image.height:
        assert form.resize is not None, "a square as large as the picture's longer side might fill the memory"
        size = (form.resize, form.resize) if isinstance(form.resize, int) else form.resize
        resized = _resized_square(image, form.pad_colour, size, resample)
    elif isinstance(form.resize, int):
        resized = _resized_by_shorter_side(image, form.resize, form.tile_width, form.tile_height, resample)
    elif form.resize is not None:
        resized = image.resize((form.resize[1], form.resize[0]), resample)
    else:
        resized = image
    return _cropped(resized, form.tile_width, form.tile_height)


def _cropped(image: Image.Image, width: int, height: int) -> Image.Image:
    """Crops the middle; adds black around a smaller image. Odd differences are rounded as numpy's // does."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _resized_by_shorter_side(
    image: Image.Image, side: int, crop_width: int, crop_height: int, resample: Image.Resampling
) -> Image.Image:
    """Resizes with equal proportions. A strip that is too large for memory is resized only where the crop lies."""
    width, height = image.size
    long = int(side * max(image.size) / min(image.size))
    size = (side, long) if width <= height else (long, side)
    if size[0] * size[1] <= STRIP_PIXELS:
        return image.resize(size, resample)
    keep = (min(size[0], _same_parity(crop_width, size[0])), min(size[1], _same_parity(crop_height, size[1])))
    left, top = (size[0] - keep[0]) // 2, (size[1] - keep[1]) // 2
    x, y = width / size[0], height / size[1]
    box = (left * x, top * y, (left + keep[0]) * x, (top + keep[1]) * y)
    near = _surroundings(box, image.size, margin=math.ceil(REACH * max(x, y, 1)) + 1)
    # Only what is near: PIL keeps a box in single precision, and takes columns first in what is a hundred times taller.
    return image.crop(near).resize(
        keep, resample, box=(box[0] - near[0], box[1] - near[1], box[2] - near[0], box[3] - near[1])
    )


def _surroundings(
    box: tuple[float, float, float, float], size: tuple[int, int], margin: int
) -> tuple[int, int, int, int]:
    """Returns the box in whole pixels with `margin` around it, within an image of (width, height)."""
    return (
        max(0, math.floor(box[0]) - margin),
        max(0, math.floor(box[1]) - margin),
        min(size[0], math.ceil(box[2]) + margin),
        min(size[1], math.ceil(box[3]) + margin),
    )


def _same_parity(kept: int, whole: int) -> int:
    """Rounds `kept` up to the parity of `whole`: cropping twice to the middle must not round twice."""
    return kept + (whole - kept) % 2


def _resized_square(
    image: Image.Image, colour: tuple[int, int, int], size: tuple[int, int], resample: Image.Resampling
) -> Image.Image:
    """Puts the picture in the middle of a square of `colour`, resized to (height, width).

    PIL resizes rows first, then columns, and rows of one colour stay as they are. So the square, which may be a
    thousand times larger than the picture, is never made: its rows are resized in bands, and of a tall picture's rows,
    where they are very long, the part that the picture touches.
    """
    height, width = size
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    narrow = Image.new("RGB", (width, side), colour)
    if image.height < side:
        narrow.paste(image.resize((width, image.height), resample), (0, top))
        return narrow.resize((width, height), resample)
    scale = side / width
    reach = math.ceil(REACH * max(scale, 1)) + 1
    first, last, near = 0, width, (0, side)  # columns of the result, and the part of the square they are made of
    if side * side > SQUARE_PIXELS:
        first = max(0, math.floor((left - reach) / scale))
        last = min(width, math.ceil((left + image.width + reach) / scale))
        near = (max(0, math.floor(first * scale) - reach), min(side, math.ceil(last * scale) + reach))
    band = max(1, BAND_PIXELS // (near[1] - near[0]))
    for row in range(0, side, band):
        rows = Image.new("RGB", (near[1] - near[0], min(band, side - row)), colour)
        rows.paste(image, (left - near[0], -row))
        box = (first * scale - near[0], 0, last * scale - near[0], rows.height)
        narrow.paste(rows.resize((last - first, rows.height), resample, box=box), (first, row))
    return narrow.resize((width, height), resample)


def _fitted(image: Image.Image, grid: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    """Fits the picture into the grid (height, width) with its proportions kept, centred on black."""
    height, width = grid
    by_width, by_height = width / image.width, height / image.height
    if by_width < by_height:
        size = (width, min(math.ceil(image.height * by_width), height))
    else:
        size = (min(math.ceil(image.width * by_height), width), height)
    fitted = Image.new("RGB", (width, height))
    fitted.paste(image.resize(size, resample), ((width - size[0]) // 2, (height - size[1]) // 2))
    return fitted


def _tiles(fitted: Image.Image, rows: int, columns: int, form: PictureFormat) -> list[Image.Image]:
    height, width = form.tile_height, form.tile_width
    return [
        fitted.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
        for row in range(rows)
        for column in range(columns)
    ]
