"""The bytes of a trace, wherever it lies: plain or compressed, in an archive, on this machine or in a remote store."""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from traceaudit.errors import InputError
from traceaudit.reading import archives
from traceaudit.reading.archives import DAMAGES, INFLATED_UP_TO, Span

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

COMPRESSED_BYTES = 1 << 18  # read at a time from a compressed file
INFLATED_BYTES = (
    1 << 20
)  # inflated at a time, so that a small file that inflates to a huge one does not fill the memory
FRAME_BYTES = 1 << 16  # decompressed at a time from a .zst: what is lost at the point of a cut
REMOTE_BYTES = 16 << 20  # asked for at a time from a remote store: fewer round trips
REMOTE = re.compile(r"^[a-z][a-z0-9+.-]+(?:://|::)", re.IGNORECASE)
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Place:
    """Where a file lies.

    Attributes:
        address: a path of this machine, or a URL that fsspec knows.
        member: the file's name inside the archive at `address`; "" if it is no archive.
    """

    address: str
    member: str = ""

    @property
    def name(self) -> str:
        """The file's own name."""
        return PurePosixPath(self.member or self.address).name if self.member or self.remote else self.path.name

    @property
    def path(self) -> Path:
        """The place as a path, which can be opened if it is a file of this machine."""
        return Path(self.address) / self.member if self.member else Path(self.address)

    @property
    def remote(self) -> bool:
        """The file lies in a store that fsspec reads."""
        return is_remote(self.address)

    @property
    def inflated_up_to(self) -> bool:
        """The file lies in an archive that is inflated from its beginning to where the file is."""
        return bool(self.member) and self.address.lower().endswith(INFLATED_UP_TO)


def is_remote(address: str) -> bool:
    """Tell a URL from a path.

    >>> is_remote("s3://bucket/run"), is_remote("C:/run"), is_remote("run/rank0.json")
    (True, False, False)
    """
    return REMOTE.match(address) is not None


def remote(address: str) -> "tuple[AbstractFileSystem, str]":
    """Return the store that a URL names, and the path inside it.

    Raises:
        InputError: what reads such a store is not installed, or it cannot be reached.
    """
    try:
        from fsspec.core import url_to_fs

        store, path = url_to_fs(address)
    except ImportError as error:
        raise InputError(f"{address}: {error}; pip install 'traceaudit[scale]' reads remote files.") from error
    except Exception as error:  # whatever a store's library raises
        raise InputError(f"{address}: cannot be reached: {error}") from error
    return store, str(path)


@contextmanager
def opened(place: Place) -> "Iterator[IO[bytes] | Span]":
    """Open a file for reading as it is stored, wherever it lies.

    Raises:
        OSError: it cannot be opened.
        InputError: as `remote`, or the archive cannot be read.
    """
    with archives.member(place.address, place.member, _stored) if place.member else _stored(place.address) as file:
        yield file


def members(address: str) -> dict[str, int]:
    """Return the names of the files in an archive in their order, and their sizes as stored in it.

    Raises:
        InputError: it is not readable.
    """
    return archives.members(address, _stored)


def _stored(address: str) -> IO[bytes]:
    if not is_remote(address):
        return open(address, "rb")
    store, path = remote(address)
    try:
        file: IO[bytes] = store.open(path, "rb", block_size=REMOTE_BYTES, cache_type="readahead")
    except OSError:
        raise
    except Exception as error:  # whatever a store's library raises
        raise OSError(f"{type(error).__name__}: {error}") from error
    return file


class Inflating:
    """Bytes of a plain, gzipped or zstd-compressed file; one that is cut or damaged gives what can be inflated.

    Attributes:
        torn: the compressed data ended early or are damaged, as far as they were read.
    """

    def __init__(self, file: "IO[bytes] | Span") -> None:
        self._file = file
        self.torn = False
        self._head = file.read(4)  # given back first: going back may mean to inflate an archive again
        magic = self._head
        self._parts = self._unzipped() if magic[:2] == GZIP else self._unframed() if magic == ZSTD else self._plain()

    def part(self) -> bytes:
        """Return the next bytes, as many as are inflated at a time, or nothing at the end."""
        return next(self._parts, b"")

    def _stored(self, size: int) -> bytes:
        """Return bytes as they are stored; an archive that is damaged ends there."""
        head, self._head = self._head, b""
        try:
            return head or self._file.read(size)
        except DAMAGES:
            self.torn = True
            return b""

    def _plain(self) -> Iterator[bytes]:
        while part := self._stored(INFLATED_BYTES):
            yield part

    def _unframed(self) -> Iterator[bytes]:
        import pyarrow as pa

        self._file.seek(0)
        stream = pa.CompressedInputStream(pa.PythonFile(self._file, "r"), "zstd")
        try:
            while part := stream.read(FRAME_BYTES):
                yield part
        except (OSError, *DAMAGES):
            self.torn = True

    def _unzipped(self) -> Iterator[bytes]:
        """Inflate with the fastest library there is, and again from the start with care if it finds damage."""
        library = _fast_inflate()
        given = 0
        if library is not None:
            try:
                for part in self._members(library, careful=False):
                    given += len(part)
                    yield part
                return
            except _DamagedError:
                self._file.seek(0)
        for part in self._members(zlib, careful=True):
            given -= len(part)
            if given < 0:
                yield part[max(len(part) + given, 0) :]
                given = 0

    def _members(self, library: Any, *, careful: bool) -> Iterator[bytes]:  # noqa: ANN401  a module like zlib
        """Yield what the members of a gzip file inflate to.

        With care, damaged data yield what precedes the damage and end the file.

        Raises:
            _DamagedError: the file is cut or damaged, and `careful` is not set.
        """
        inflate = library.decompressobj(31)
        inside = False  # a member has begun and not ended
        finished = 0
        while True:
            compressed = inflate.unconsumed_tail
            if inflate.eof:  # another member follows, or the end
                compressed = inflate.unused_data
                inflate = library.decompressobj(31)
                inside = False
                finished += 1
            compressed = compressed or self._stored(COMPRESSED_BYTES)
            if not compressed:
                if inside and not careful:
                    raise _DamagedError
                self.torn |= inside
                return
            if finished and not inside and not compressed.strip(b"\0"):
                continue  # padding
            before = inflate.copy() if careful else None
            try:
                part = inflate.decompress(compressed, INFLATED_BYTES)
            except library.error as error:
                if before is None:
                    raise _DamagedError from error
                self.torn |= inside or not finished  # else padding after the last member
                yield _up_to_damage(before, compressed)
                return
            inside = True
            if part:
                yield part


class _DamagedError(Exception):
    """A gzip file is cut or damaged."""


def _fast_inflate() -> Any:  # noqa: ANN401  a module with zlib's functions
    try:
        from isal import isal_zlib
    except ImportError:
        return None
    return isal_zlib


def _up_to_damage(inflate: "zlib._Decompress", compressed: bytes) -> bytes:
    """Return what a damaged piece of gzip inflates to, byte by byte, before zlib notices."""
    whole = bytearray()
    with suppress(zlib.error):
        for at in range(len(compressed)):
            whole += inflate.decompress(compressed[at : at + 1])
    return bytes(whole)
