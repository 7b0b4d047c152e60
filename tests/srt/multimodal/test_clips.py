"""Frames of clips: which ones, from which files, and what is said of files that are none."""

import io
import random
import struct
import sys

import msgspec
import pytest
from PIL import Image
from umbel.srt.core.config import PictureLimits
from umbel.srt.multimodal import decode
from umbel.srt.multimodal.clips import frames_of
from umbel.srt.multimodal.decode import Decoded, DecodeJob, RefusedMedia, decode_media
from umbel.srt.multimodal.format import PictureFormat

from .samples import FORM, clip, decoded, noise, refusal, saved

pytest.importorskip("av", reason="clips need PyAV (the video extra)")
LIMITS = PictureLimits()


def brightness(data: bytes, count: int) -> list[int]:
    """Of each frame in steps of 8, which `clip` numbers frames with."""
    found = []
    for frame, _ in frames_of(data, count, LIMITS):
        level = frame.convert("L").getpixel((16, 16))
        assert isinstance(level, int | float)
        found.append(round(level / 8))
    return found


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [0, 19]), (4, [0, 6, 12, 19]), (20, list(range(20)))])
def test_frames_are_taken_evenly(count: int, expected: list[int]) -> None:
    assert brightness(clip(20), count) == expected


@pytest.mark.parametrize(
    ("container", "coding"),
    [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mjpeg"), ("mov", "mjpeg"), ("mp4", "h264")],
)
def test_containers_and_codings_give_the_same_frames(container: str, coding: str) -> None:
    import av

    if coding == "h264" and "libx264" not in av.codecs_available:
        pytest.skip("this PyAV writes no H.264")
    data = clip(23, container=container, coding="libx264" if coding == "h264" else coding)
    assert brightness(data, 5) == [0, 5, 11, 16, 22]


def test_a_gif_that_moves_is_a_clip() -> None:
    first, *others = [noise(16, 16, index) for index in range(6)]
    data = saved(first, "GIF", save_all=True, append_images=others, duration=40)
    assert len(list(frames_of(data, 3, LIMITS))) == 3


def test_clips_that_begin_alike_share_their_first_frames() -> None:
    left = [picture.key for picture in decoded(clip(9), 3)]
    again = [picture.key for picture in decoded(clip(9), 3)]
    assert left == again
    assert len(set(left)) == 3
    (first,) = decoded(clip(30), 1)
    assert first.key == left[0]


DYNAMIC = PictureFormat("dynamic", 8, 8, 16, 8, None, least_pixels=64, most_pixels=1024, part_frames=2)


def test_frames_become_parts_with_places_in_time() -> None:
    joined = msgspec.structs.replace(DYNAMIC, clips="joined", positions_per_second=4.0)
    timed = msgspec.structs.replace(DYNAMIC, clips="timed")
    counted = msgspec.structs.replace(DYNAMIC, clips="joined")
    data = clip(21)  # 10 frames a second: of five the frames 0, 5, 10, 15 and 20 are taken
    parts = decoded(data, 5, form=joined)
    assert [part.raster.time for part in parts] == [None, 4, 8], "1 s from part to part"
    assert [(part.raster.frames, len(part.raster.pixels)) for part in parts] == [(2, 2 * 32 * 32 * 3)] * 3
    half = len(parts[2].raster.pixels) // 2
    assert parts[2].raster.pixels[:half] == parts[2].raster.pixels[half:] != parts[1].raster.pixels[half:]
    told = decoded(data, 5, form=timed)
    assert [part.text for part in told] == ["<0.2 seconds>", "<1.2 seconds>", "<2.0 seconds>"]
    assert [(part.raster.time, part.text) for part in decoded(data, 5, form=counted)] == [(None, ""), (1, ""), (2, "")]
    assert len({part.key for part in (*parts, *told)}) == 6


def test_a_clip_of_days_is_refused_where_times_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MOST_SECONDS", 1)
    form = msgspec.structs.replace(DYNAMIC, clips="joined")
    answer = decode_media(DecodeJob("video", clip(21), 4, form, LIMITS))
    assert isinstance(answer, RefusedMedia)
    assert "lasts 2 s; at most 1 can be shown" in answer.message


def test_a_frame_is_the_picture_of_its_pixels() -> None:
    data = clip(9)
    (still,) = decoded(saved(next(frames_of(data, 1, LIMITS)).image))
    assert decoded(data, 1) == (still,)


def test_frames_are_overviews_where_pictures_are_cut_into_tiles() -> None:
    form = PictureFormat("anyres", 16, 16, 4, 8, 16, grids=((32, 32),))
    (still,) = decoded(saved(next(frames_of(clip(9), 1, LIMITS)).image), form=form)
    (frame,) = decoded(clip(9), 1, form=form)
    assert (still.raster.columns, still.raster.tokens) == (2, 4 + 4 * 5)
    assert (frame.raster.columns, frame.raster.tokens) == (0, 4)
    assert frame.key != still.key


def test_a_clip_that_was_filmed_upright_is_shown_upright() -> None:
    """A telephone writes how it was held into the movie: here that its left side is the upper one."""
    import av

    half = Image.new("RGB", (32, 16))
    half.paste("white", (0, 0, 16, 16))
    buffer = io.BytesIO()
    with av.open(buffer, mode="w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        output.mux(stream.encode(av.VideoFrame.from_image(half)))
        output.mux(stream.encode(None))
    data = bytearray(buffer.getvalue())
    matrix = data.index(b"tkhd") + 44  # nine numbers of 32 bits
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 16 << 16, 0, 1 << 30)
    ((frame, _),) = frames_of(bytes(data), 1, LIMITS)
    assert frame.size == (16, 32)
    assert frame.convert("L").getpixel((8, 4)) > 200 > 50 > frame.convert("L").getpixel((8, 28))  # type: ignore[operator]  # one band


def test_a_clip_with_fewer_frames_says_how_many_to_write() -> None:
    assert "the clip has 3 frames; write num_frames=3 or less" in refusal(clip(3), 4).message


def test_a_clip_of_sound_shows_nothing() -> None:
    answer = refusal(clip(0, container="matroska", pictures=False), 1)
    assert (answer.kind, "only sound" in answer.message) == ("ParameterError", True)


@pytest.mark.parametrize(
    "data", [b"", b"#EXTM3U\nhttp://127.0.0.1/x.ts\n", b"ffconcat version 1.0\nfile /etc/passwd\n"]
)
def test_playlists_and_other_bytes_are_no_clips(data: bytes) -> None:
    assert "is no MP4, MOV, WebM, Matroska, AVI or GIF" in refusal(data, 2).message


def test_frames_that_are_too_large_are_refused() -> None:
    answer = refusal(clip(3, size=128), 1, PictureLimits(clip_pixels=100 * 100))
    assert "a frame of video() has 128 x 128 = 16,384 pixels" in answer.message


def test_too_many_frames_to_look_through_are_refused() -> None:
    assert "more than 10 frames" in refusal(clip(12), 2, PictureLimits(most_packets=10)).message


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    answer = refusal(b"\0\0\0\x20ftypisom", 2)
    assert (answer.kind, "pip install 'umbel[video]'" in answer.message) == ("CapabilityError", True)


def test_mutated_clips_end_with_an_answer() -> None:
    dice = random.Random(3)
    seeds = [clip(9), clip(9, container="matroska"), clip(9, container="avi", coding="mjpeg")]
    ends = {Decoded: 0, RefusedMedia: 0}
    for turn in range(120):
        data = bytearray(seeds[turn % len(seeds)])
        for _ in range(dice.choice((1, 4))):
            place = dice.randrange(len(data))
            if dice.random() < 0.3:
                del data[place : place + dice.randrange(1, 64)]
            else:
                data[place : place + 2] = dice.randbytes(2)
        answer = decode_media(DecodeJob("video", bytes(data), 3, FORM, LIMITS))
        ends[type(answer)] += 1
    assert min(ends.values()) > 10
