"""Images as hosted models take them: bytes in base64, with their type."""

import base64

from ....lang.errors import CapabilityError
from ....lang.prompt import Media

_TYPES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def media_type(part: Media, backend: str) -> str:
    """The MIME type of an image, read from its first bytes.

    Raises:
        CapabilityError: a video, or a format that hosted models do not take.
    """
    if part.kind != "image":
        raise CapabilityError(f"{backend} takes images and no {part.kind}; give single frames with image(...)")
    for beginning, kind in _TYPES:
        if part.data.startswith(beginning):
            return kind
    if part.data[:4] == b"RIFF" and part.data[8:12] == b"WEBP":
        return "image/webp"
    raise CapabilityError(f"{backend} takes PNG, JPEG, GIF and WebP images; convert this one, which is none of them")


def encoded(part: Media) -> str:
    return base64.b64encode(part.data).decode("ascii")
