"""Makes the tiles of a decoded picture for a model's tower, as transformers' PIL-based image processors do.

The pixels are equal to theirs bit by bit, with two exceptions. Where resizing by the shorter side would make a strip of
more than `STRIP_PIXELS` of which the crop keeps the middle, and where padding a tall picture would make a square of
more than `SQUARE_PIXELS`, only the part that is kept is computed. PIL holds its box in single precision, so a value may
differ by one.
"""

import math

from PIL import Image

from .format import PictureFormat, Raster, Resample, best_grid, picture_tokens_at

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
    """Makes the picture's tiles: the overview, then those of its grid, row by row.

    It needs the picture and some megabytes, or a strip of the tile's width and the picture's longer side.

    Args:
        image: mode RGB, at least one pixel.
    """
    assert image.mode == "RGB", "towers see three channels; whoever decodes converts"
    tiles = [_overview(image, form)]
    columns = rows = 0
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
        tile_height=form.tile_height,
        tile_width=form.tile_width,
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
