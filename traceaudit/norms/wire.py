"""The two framings of records and the wire format of protocol buffers, as far as logs need them."""

import struct
from collections.abc import Iterator

BLOCK = 32_768  # bytes of a block of the log format of LevelDB, https://github.com/google/leveldb doc/log_format.md
HEADER = 7  # checksum (4), length (2), type (1)
FULL, LAST = 1, 4


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: number, and an integer or the bytes of it; a torn end is left out.

    https://protobuf.dev/programming-guides/encoding

    >>> list(fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
    [(1, 150), (2, b'hi')]
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            return
        if at + size > end:
            return
        yield key >> 3, message[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, at


def signed(value: int) -> int:
    """Return a varint as a 64-bit integer with sign."""
    return value - (1 << 64) if value >= 1 << 63 else value


def tf_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a TFRecord file up to a torn end: length (8 bytes), checksum (4), data, checksum (4).

    https://www.tensorflow.org/tutorials/load_data/tfrecord; checksums are not verified.
    """
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        at += 12
        if at + size > len(data):
            return
        yield data[at : at + size]
        at += size + 4


def leveldb_records(data: bytes, start: int) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB up to a torn end; blocks count from the file's first byte."""
    at, parts = start, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if kind == 0 and size == 0:  # the rest of the block is padding
            at += left
            continue
        if at + HEADER + size > len(data):
            return
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield parts
            parts = b""
