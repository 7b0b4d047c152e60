"""Bytes of strangers → pictures: what is the same, what is refused, and that nothing dies of them."""

import random
import sys
import warnings

import msgspec
import pytest
from PIL import Image
from umbel.srt.core.config import PictureLimits
from umbel.srt.multimodal.decode import Decoded, DecodeJob, InlineDecoder, RefusedMedia, decode_media
from umbel.srt.multimodal.format import PictureFormat, check_media, most_tokens, picture_tokens_at
from umbel.srt.multimodal.stills import FORMATS, open_still, webp_size

from .samples import FORM, bomb, decoded, media, noise, refusal, saved

LIMITS = PictureLimits()
SMALL = PictureLimits(most_pixels=64 * 64)


def key(image: Image.Image, form: str = "PNG", shown: PictureFormat = FORM, **options: object) -> bytes:
    (picture,) = decoded(saved(image, form, **options), form=shown)
    return picture.key


# ------------------------------------------------------------------------------------------ what is the same


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read(form: str) -> None:
    (picture,) = decoded(saved(noise(40, 30), form))
    assert (picture.raster.width, picture.raster.height, picture.raster.tokens) == (40, 30, 4)
    assert len(picture.raster.pixels) == 16 * 16 * 3


def test_equal_pixels_are_one_picture_whatever_file_they_come_in() -> None:
    image = noise(21, 13)
    assert key(image) == key(image, "BMP") == key(image, "WEBP", lossless=True) == key(image, "PNG", compress_level=0)


def test_one_pixel_makes_another_picture() -> None:
    image = noise(64, 64)
    other = image.copy()
    red, green, blue = other.getpixel((63, 63))  # type: ignore[misc]  # three bands
    other.putpixel((63, 63), (red, green, blue ^ 1))
    assert key(image) != key(other)


def test_equal_bytes_in_another_shape_are_another_picture() -> None:
    content = noise(30, 100).tobytes()
    assert key(Image.frombytes("RGB", (30, 100), content)) != key(Image.frombytes("RGB", (100, 30), content))


def test_another_preparation_makes_another_picture() -> None:
    image = noise(20, 20)
    assert key(image) != key(image, shown=msgspec.structs.replace(FORM, resample="bilinear"))
    assert key(image) == key(image, shown=msgspec.structs.replace(FORM, before="<x>"))  # text around it is not it


def test_transparent_pixels_lie_on_white() -> None:
    image = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    for form in ("PNG", "WEBP"):
        assert open_still(saved(image, form, **({"lossless": True} if form == "WEBP" else {})), LIMITS).getcolors() == [
            (64, (255, 255, 255))
        ]
    half = open_still(saved(Image.new("LA", (8, 8), (0, 128))), LIMITS)
    assert half.getpixel((0, 0)) == (127, 127, 127)
    palette = Image.new("P", (8, 8), 3)
    palette.putpalette([9] * 768)
    assert open_still(saved(palette, "GIF", transparency=3), LIMITS).getpixel((0, 0)) == (255, 255, 255)


def test_sixteen_bits_of_grey_keep_their_brightness() -> None:
    deep = Image.frombytes("I;16", (2, 1), (0x8000).to_bytes(2, "little") + (0xFFFF).to_bytes(2, "little"))
    shown = open_still(saved(deep), LIMITS)
    assert (shown.getpixel((0, 0)), shown.getpixel((1, 0))) == ((128,) * 3, (255,) * 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_modes_become_colours(mode: str) -> None:
    assert open_still(saved(noise(9, 5).convert(mode)), LIMITS).mode == "RGB"


def test_four_inks_become_colours() -> None:
    assert open_still(saved(noise(16, 16, mode="CMYK"), "JPEG"), LIMITS).mode == "RGB"


def test_exif_says_which_side_is_up() -> None:
    image = noise(12, 7)
    upright = {1: image}
    upright |= {2: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 3: image.rotate(180)}
    upright |= {6: image.rotate(-90, expand=True), 8: image.rotate(90, expand=True)}
    for orientation, expected in upright.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert open_still(saved(image, "PNG", exif=exif.tobytes()), LIMITS).tobytes() == expected.tobytes()


def test_exif_that_makes_no_sense_turns_nothing() -> None:
    image = noise(12, 7)
    assert open_still(saved(image, "PNG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff"), LIMITS).size == (12, 7)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_several_frames_the_first_is_shown(form: str) -> None:
    white, black = Image.new("RGB", (8, 8), "white"), Image.new("RGB", (8, 8))
    moving = saved(white, form, save_all=True, append_images=[black, white], duration=50)
    assert open_still(moving, LIMITS).getpixel((4, 4)) == (255, 255, 255)


# ------------------------------------------------------------------------------------------ what is refused


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    data = bomb()
    assert len(data) < 21_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = refusal(data)
    assert answer.kind == "RequestError"
    assert "13000 x 13000 = 169,000,000 pixels; at most 16,800,000" in answer.message
    assert "178,956,970" in refusal(bomb(20_000)).message  # which Pillow refuses by itself
    assert Image.MAX_IMAGE_PIXELS == 89_478_485  # as Pillow has it


@pytest.mark.parametrize(("width", "height"), [(1, 1000), (1000, 1), (2, 401)])
def test_a_strip_is_refused_by_rule(width: int, height: int) -> None:
    answer = refusal(saved(noise(width, height)))
    assert f"{width} x {height} pixels: one side is more than 200 times the other" in answer.message


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (b"VP8 ", {"quality": 20}),
        (b"VP8L", {"lossless": True}),
        (b"VP8X", {"icc_profile": b"a profile"}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (300, 7), (5, 1000)])
def test_the_size_of_a_webp_stands_in_its_header(
    kind: bytes, options: dict[str, object], size: tuple[int, int]
) -> None:
    data = saved(Image.new("RGB", size, "red"), "WEBP", **options)
    assert data[12:16] == kind
    assert webp_size(data) == size
    assert webp_size(data[:29]) is None


def test_a_large_webp_is_refused_before_its_decoder_reserves_memory() -> None:
    data = saved(Image.new("RGB", (8, 8)), "WEBP", icc_profile=b"a profile")
    answer = refusal(data[:24] + (16_382).to_bytes(3, "little") * 2 + data[30:])
    assert "16383 x 16383 = 268,402,689 pixels; at most 16,800,000" in answer.message


def test_a_webp_may_have_as_many_pixels_as_its_decoder_has_memory_for() -> None:
    answer = refusal(saved(Image.new("RGB", (64, 64)), "WEBP"), limits=PictureLimits(memory=17 * 4095))
    assert "has 64 x 64 pixels; a WebP may have 4,095" in answer.message


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 200), (200, 1), (3, 2)])
def test_tiny_pictures_are_pictures(width: int, height: int) -> None:
    (picture,) = decoded(saved(noise(width, height)))
    assert (picture.raster.width, picture.raster.height) == (width, height)


def test_the_name_of_a_format_is_not_asked_for() -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    for data in (svg, b"", b"%PDF-1.7", saved(noise(8, 8), "TIFF"), saved(noise(8, 8), "ICO"), b"P6 1 1 255 abc"):
        answer = refusal(data)
        assert answer.kind == "ParameterError"
        assert "is no PNG, JPEG, GIF, WebP or BMP" in answer.message


@pytest.mark.parametrize("form", FORMATS)
def test_a_picture_that_is_cut_off_is_refused(form: str) -> None:
    data = saved(noise(64, 64), form)
    answer = refusal(data[: len(data) // 2])
    assert answer.kind == "ParameterError"
    assert "damaged" in answer.message


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "umbel.srt.multimodal.stills", None)
    answer = refusal(saved(noise(8, 8)))
    assert (answer.kind, "pip install 'umbel[runtime]'" in answer.message) == ("CapabilityError", True)


def test_what_a_library_says_is_never_told() -> None:
    data = bytearray(saved(noise(64, 64)))
    data[60] ^= 0xFF
    answer = refusal(bytes(data))
    assert "0x" not in answer.message
    assert answer.message.endswith("it is damaged or cut off; save it anew")


def test_a_thousand_mutated_pictures_end_with_an_answer() -> None:
    dice = random.Random(7)
    seeds = [saved(noise(24, 18, index), form) for index, form in enumerate(FORMATS)]
    seeds.append(saved(noise(24, 18).convert("P"), "PNG", transparency=3))
    seeds.append(saved(noise(24, 18), "GIF", save_all=True, append_images=[noise(24, 18, 1)]))
    ends = {Decoded: 0, RefusedMedia: 0}
    for turn in range(1000):
        data = bytearray(seeds[turn % len(seeds)])
        for _ in range(dice.choice((1, 2, 8))):
            place = dice.randrange(min(len(data), dice.choice((32, 128, 1 << 20))))
            match dice.randrange(4):
                case 0:
                    data[place] ^= 1 << dice.randrange(8)
                case 1:
                    data[place : place + 4] = dice.randbytes(4)
                case 2:
                    del data[place : place + dice.randrange(1, 16)]
                case _:
                    data[place:place] = data[: dice.randrange(1, 16)]
        answer = decode_media(DecodeJob("image", bytes(data), 0, FORM, SMALL))
        ends[type(answer)] += 1
    assert min(ends.values()) > 100


# ------------------------------------------------------------------------------------------ what is known before


def test_a_bound_holds_for_every_size() -> None:
    grids = ((672, 672), (336, 1008), (1008, 336))
    form = PictureFormat("anyres", 336, 336, 576, 14, 336, grids=grids, before="<image>")
    bound = most_tokens(form)
    assert bound - len("<image>") == max(
        picture_tokens_at(form, width, height)
        for width, height in ((672, 672), (1008, 336), (336, 1008), (30, 10), (10, 30))
    )
    assert all(picture_tokens_at(form, 7 * w, 11 * h) < bound for w in range(1, 40) for h in range(1, 40))
    assert most_tokens(FORM) == 4


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        ([media(b"x")] * 9, "shows 9 pictures and clips; at most 8"),
        ([media(b"x" * (11 << 20))] * 2, "23068672 bytes together; at most 20971520"),
        ([media(b"x", 40), media(b"x", 25)], "num_frames=65 together; write at most 64"),
        ([msgspec.structs.replace(media(b"x"), kind="sound")], "'sound' are not known"),
        ([msgspec.structs.replace(media(b"x"), kind="video")], "num_frames=0"),
        ([msgspec.structs.replace(media(b"x"), num_frames=3)], "video(...) for a clip"),
    ],
)
def test_what_a_prompt_may_show_is_checked_before_anything_is_decoded(shown: list, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(Exception, match=says.replace("(", r"\(").replace(")", r"\)").replace("...", r"\.\.\.")):
        check_media(shown, FORM, LIMITS)


def test_frames_of_a_large_tile_are_fewer() -> None:
    large = msgspec.structs.replace(FORM, tile_height=896, tile_width=896)
    with pytest.raises(Exception, match="write at most 17"):
        check_media([media(b"x", 21)], large, LIMITS)


def test_jobs_and_answers_travel() -> None:
    job = DecodeJob("image", saved(noise(8, 8)), 0, FORM, LIMITS)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=DecodeJob)
    assert again == job
    answer = decode_media(again)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Decoded | RefusedMedia) == answer
    told: list[object] = []
    InlineDecoder().decode(job, told.append, lambda: True)
    assert told == [answer]


def test_the_limits_are_these() -> None:
    assert (
        PictureLimits(
            most_media=8,
            most_bytes=20 << 20,
            most_pixels=16_800_000,
            clip_pixels=6_000_000,
            longest_ratio=200,
            most_frames=64,
            frame_bytes=40 << 20,
            most_packets=1 << 17,
            picture_seconds=5.0,
            clip_seconds=20.0,
            library_seconds=5.0,
            memory=176 << 20,
            niceness=10,
            waiting_bytes=512 << 20,
            cache_bytes=64 << 20,
            cache_sources=4096,
            cache_numbers=1 << 16,
            held_bytes=1 << 30,
        )
        == LIMITS
    )
