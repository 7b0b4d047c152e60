"""Pictures and clips for tests, made here."""

import io
import random
import zlib
from hashlib import sha256

from PIL import Image
from umbel.lang.prompt import Media
from umbel.srt.core.config import PictureLimits
from umbel.srt.launch import ORACLE_PICTURES
from umbel.srt.multimodal.decode import Decoded, DecodedPicture, DecodeJob, RefusedMedia, decode_media
from umbel.srt.multimodal.format import PictureFormat

FORM = ORACLE_PICTURES


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Pixels that no compression makes alike."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (width, height), random.Random(seed).randbytes(width * height * bands))


def saved(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def media(data: bytes, frames: int = 0) -> Media:
    return Media("video" if frames else "image", sha256(data).hexdigest(), data, frames)


def decoded(
    data: bytes,
    frames: int = 0,
    form: PictureFormat = FORM,
    limits: PictureLimits = PictureLimits(),  # noqa: B008
) -> tuple[DecodedPicture, ...]:
    answer = decode_media(DecodeJob("video" if frames else "image", data, frames, form, limits))
    assert isinstance(answer, Decoded), answer
    return answer.pictures


def refusal(data: bytes, frames: int = 0, limits: PictureLimits = PictureLimits()) -> RefusedMedia:  # noqa: B008
    answer = decode_media(DecodeJob("video" if frames else "image", data, frames, FORM, limits))
    assert isinstance(answer, RefusedMedia)
    return answer


def bomb(side: int = 13_000) -> bytes:
    """A PNG of side × side black pixels in some 20,000 bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + name + content + check

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])  # one bit of grey
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def clip(
    count: int, *, size: int = 32, container: str = "mp4", coding: str = "mpeg4", pictures: bool = True, first: int = 0
) -> bytes:
    """Frames of one grey each, a different one for each; frame k is 8 · (first + k) bright. Without pictures: sound."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, mode="w", format=container) as output:
        if not pictures:
            sound = output.add_stream("pcm_s16le" if container == "matroska" else "aac", rate=8000)
            samples = av.AudioFrame(format="s16" if container == "matroska" else "fltp", layout="mono", samples=1024)
            samples.sample_rate = 8000
            for plane in samples.planes:
                plane.update(bytes(plane.buffer_size))
            output.mux(sound.encode(samples))
            output.mux(sound.encode(None))
        else:
            stream = output.add_stream(coding, rate=10)
            stream.width = stream.height = size
            stream.pix_fmt = "yuvj420p" if coding == "mjpeg" else "yuv420p"
            stream.codec_context.gop_size = 5
            for index in range(count):
                grey = 8 * (first + index) % 256
                output.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (size, size), (grey,) * 3))))
            output.mux(stream.encode(None))
    return buffer.getvalue()
