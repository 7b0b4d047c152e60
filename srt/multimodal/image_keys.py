"""When two pictures are the same: their pixels are, their shape is, and the model is shown them in the same way."""

from hashlib import sha256

from PIL import Image

from .format import PictureFormat

_VERSION = "umbel picture 1"
_STRIP = 1 << 20  # bytes of pixels that are in memory twice


def key_of(image: Image.Image, form: PictureFormat) -> bytes:
    """SHA-256 over version, mode, width, height, format and pixels, each behind its length: nothing that two pictures
    differ in can be taken for something else. 30 × 100 and 100 × 30 of equal bytes are two pictures."""
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
