"""The bytes of a trace, wherever it lies: plain or compressed, in an archive, on this machine or in a remote store."""

import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from traceaudit.errors import InputError

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
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
DAMAGES = (EOFError, zlib.error, zipfile.BadZipFile, tarfile.ReadError)


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
def opened(place: Place) -> "Iterator[IO[bytes] | _Span]":
    """Open a file for reading as it is stored, wherever it lies.

    Raises:
        OSError: it cannot be opened.
        InputError: as `remote`, or the archive cannot be read.
    """
    with ExitStack() as stack:
        file = stack.enter_context(_stored(place))
        yield _member(file, place, stack) if place.member else file


def _stored(place: Place) -> IO[bytes]:
    if not place.remote:
        return open(place.address, "rb")
    store, path = remote(place.address)
    try:
        file: IO[bytes] = store.open(path, "rb", block_size=REMOTE_BYTES, cache_type="readahead")
    except OSError:
        raise
    except Exception as error:  # whatever a store's library raises
        raise OSError(f"{type(error).__name__}: {error}") from error
    return file


def _member(file: IO[bytes], place: Place, stack: ExitStack) -> "IO[bytes] | _Span":
    """Open a file in an archive; `stack` closes it."""
    found: IO[bytes] | _Span | None = None
    reason = "it is not in there"
    try:
        if place.address.lower().endswith(".zip"):
            archive = stack.enter_context(zipfile.ZipFile(file))
            found = stack.enter_context(archive.open(place.member))
        else:
            packed = stack.enter_context(tarfile.open(fileobj=file))  # noqa: SIM115  it is closed with the stack
            # one after the other, since the end of an archive that was cut cannot be looked into
            entry = next((entry for entry in packed if entry.name == place.member), None)
            stored: IO[bytes] | None = packed.fileobj  # type: ignore[assignment]
            if entry is not None and entry.isreg() and stored is not None:
                found = _Span(stored, entry.offset_data, entry.size)
    except (KeyError, NotImplementedError, RuntimeError, *DAMAGES) as error:  # RuntimeError: encrypted
        reason = str(error)
    if found is None:
        raise InputError(f"{place.address}: {place.member} cannot be read from this archive: {reason}")
    return found


class _Span:
    """A part of a file, which ends where it was meant to or where the file ends."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size = file, start, size
        self.closed = False
        self.seek(0)

    def seek(self, at: int) -> int:
        """Go to an offset."""
        self._file.seek(self._start + at)
        self._left = self._size - at
        return at

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, or nothing at the end."""
        part = self._file.read(max(min(size, self._left), 0))
        self._left -= len(part)
        return part


def members(address: str) -> dict[str, int]:
    """Return the names of the files in an archive, and their sizes as stored in it.

    Raises:
        InputError: it is not readable.
    """
    try:
        with _stored(Place(address)) as file:
            if address.lower().endswith(".zip"):
                with zipfile.ZipFile(file) as archive:
                    return {own.filename: own.compress_size for own in archive.infolist() if not own.is_dir()}
            with tarfile.open(fileobj=file) as packed:
                return _listed(packed)
    except (OSError, *DAMAGES) as error:
        raise InputError(f"{address}: not a readable archive: {error}") from error


def _listed(packed: tarfile.TarFile) -> dict[str, int]:
    """Return the files of a tar archive as far as it goes."""
    found: dict[str, int] = {}
    with suppress(*DAMAGES):
        found.update((entry.name, entry.size) for entry in packed if entry.isfile())
    return found


class Inflating:
    """Bytes of a plain, gzipped or zstd-compressed file; one that is cut or damaged gives what can be inflated.

    Attributes:
        torn: the compressed data ended early or are damaged, as far as they were read.
    """

    def __init__(self, file: "IO[bytes] | _Span") -> None:
        self._file = file
        self.torn = False
        magic = file.read(4)
        file.seek(0)
        self._parts = self._unzipped() if magic[:2] == GZIP else self._unframed() if magic == ZSTD else self._plain()

    def part(self) -> bytes:
        """Return the next bytes, as many as are inflated at a time, or nothing at the end."""
        return next(self._parts, b"")

    def _stored(self, size: int) -> bytes:
        """Return bytes as they are stored; an archive that is damaged ends there."""
        try:
            return self._file.read(size)
        except DAMAGES:
            self.torn = True
            return b""

    def _plain(self) -> Iterator[bytes]:
        while part := self._stored(INFLATED_BYTES):
            yield part

    def _unframed(self) -> Iterator[bytes]:
        import pyarrow as pa

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
