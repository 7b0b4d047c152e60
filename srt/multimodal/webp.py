"""The size of a WebP from its header: libwebp reserves its canvases before Pillow has told anybody how large they are.

    RIFF ‹4› WEBP │ VP8X ‹4› flags ‹3› width−1 ‹3› height−1 ‹3›                 extended; sizes in 3 bytes
                  │ VP8␣ ‹4› frame tag ‹3› 9D 01 2A, width, height              14 of 16 bits each
                  │ VP8L ‹4› 2F, width−1, height−1                              14 bits, one behind the other

All numbers begin with their lowest byte (RFC 9649).
"""

_HEADER = 30  # bytes, with the longest of the three
_FOURTEEN = (1 << 14) - 1  # bits


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height; None for what is no WebP, or one whose size cannot be read."""
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
