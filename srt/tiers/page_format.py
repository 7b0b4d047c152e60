"""The bytes of a page outside this process: a header, then the payload.

    0        8        12       16            48            80          88             104          112
    ├ magic ─┼ format ┼ header ┼ name ───────┼ scheme ─────┼ length ───┼ xxh3 of the ─┼ xxh3 of ───┤ payload ...
    │ "umbelKV\\n"     │ size   │ of the page │ digest of … │ of the …  │ payload, 128 │ the header │

Everything is checked on reading: what is damaged, cut off, of another model or of a newer format is no page. A
checksum finds damage; it does not keep out who can write to the folder or the server (docs/tiers.md).
"""

import struct
from typing import Any

from ...lang.errors import MissingExtraError
from .names import FORMAT, NAME_BYTES
from .tier import Payload

MAGIC = b"umbelKV\n"
_FIELDS = struct.Struct(f"<8sII{NAME_BYTES}s32sQ16s")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECK.size
MOST_PAYLOAD = 1 << 30  # bytes; larger ones are foreign, and not read


class BadPage(Exception):
    """Bytes that are not the page they should be.

    Attributes:
        kind: "foreign", "newer", "truncated", "damaged", "other model" or "other name".
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def checksums() -> Any:
    """Returns the module xxhash, which has no types: 32 GB/s a core, where SHA-256 has 1.4.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import xxhash
    except ImportError as error:
        raise MissingExtraError("xxhash", "runtime") from error
    return xxhash


class PageFormat:
    """Makes and checks headers.

    Args:
        scheme: digest of the engine's scheme, `PageScheme.digest`.
    """

    def __init__(self, scheme: bytes) -> None:
        assert len(scheme) == 32, "SHA-256"
        self._scheme = scheme
        self._xxhash = checksums()

    def header(self, name: bytes, payload: Payload) -> bytes:
        check = self._xxhash.xxh3_128_digest(payload)
        fields = _FIELDS.pack(MAGIC, FORMAT, HEADER_BYTES, name, self._scheme, payload.nbytes, check)
        return fields + _CHECK.pack(self._xxhash.xxh3_64_intdigest(fields))

    def payload(self, name: bytes, page: Payload) -> Payload:
        """Returns the payload of a page, a view of it.

        Raises:
            BadPage: it is none, or not the one of this name.
        """
        if page.nbytes < HEADER_BYTES:
            raise BadPage("truncated")
        header = page[:HEADER_BYTES].tobytes()
        magic, version, size, named, scheme, length, check = _FIELDS.unpack_from(header)
        if magic != MAGIC:
            raise BadPage("foreign")
        if version > FORMAT:
            raise BadPage("newer")  # its header may be another
        if _CHECK.unpack_from(header, _FIELDS.size)[0] != self._xxhash.xxh3_64_intdigest(header[: _FIELDS.size]):
            raise BadPage("damaged")
        if version != FORMAT or size != HEADER_BYTES:
            raise BadPage("foreign")
        if scheme != self._scheme:
            raise BadPage("other model")
        if named != name:
            raise BadPage("other name")
        payload = page[HEADER_BYTES:]
        if payload.nbytes != length:
            raise BadPage("truncated")
        if self._xxhash.xxh3_128_digest(payload) != check:
            raise BadPage("damaged")
        return payload
