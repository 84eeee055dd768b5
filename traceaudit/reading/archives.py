"""Files in ``.zip`` and ``.tar`` archives, also in archives that were cut."""

import atexit
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from traceaudit.errors import InputError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
INFLATED_UP_TO = (".tar.gz", ".tgz")  # what is in there is found by inflating all that precedes it
DAMAGES = (EOFError, zlib.error, zipfile.BadZipFile, tarfile.ReadError)

Opening = Callable[[str], IO[bytes]]


class Span:
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


class _Kept(threading.local):
    """The compressed archive that a thread reads, open from one of its files to the next if it is to be.

    Attributes:
        keeping: it is to be.
    """

    def __init__(self) -> None:
        self.keeping = False
        self._address = ""
        self._packed: tarfile.TarFile | None = None
        self._closing = ExitStack()

    def tar(self, address: str, open_file: Opening) -> tarfile.TarFile:
        """Return an archive, as far as it was read."""
        if self._packed is None or self._address != address:
            self.close()
            self._packed = _opened(address, open_file, self._closing)
            self._address = address
        return self._packed

    def close(self) -> None:
        """Close the archive."""
        self._packed = None
        self._closing.close()


_KEPT = _Kept()


def keep_open() -> None:
    """Keep a compressed archive open in this thread, so that it is inflated once for all of its files in their order.

    For processes that read one job and end; others use `kept_open`.
    """
    _KEPT.keeping = True
    atexit.register(_KEPT.close)


@contextmanager
def kept_open() -> Iterator[None]:
    """Keep a compressed archive open in this thread meanwhile."""
    before, _KEPT.keeping = _KEPT.keeping, True
    try:
        yield
    finally:
        _KEPT.keeping = before
        if not before:
            _KEPT.close()


@contextmanager
def member(address: str, name: str, open_file: Opening) -> "Iterator[IO[bytes] | Span]":
    """Open a file in an archive, which `open_file` opens as it is stored.

    Raises:
        OSError: the archive cannot be opened.
        InputError: the file cannot be read from it.
    """
    with ExitStack() as stack:
        found: IO[bytes] | Span | None = None
        reason = "it is not in there"
        try:
            if address.lower().endswith(".zip"):
                archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(open_file(address))))
                found = stack.enter_context(archive.open(name))
            else:
                found = _in_tar(_tar(address, open_file, stack), name)
        except (KeyError, NotImplementedError, RuntimeError, *DAMAGES) as error:  # RuntimeError: encrypted
            _KEPT.close()
            reason = str(error)
        if found is None:
            raise InputError(f"{address}: {name} cannot be read from this archive: {reason}")
        yield found


def _tar(address: str, open_file: Opening, closing: ExitStack) -> tarfile.TarFile:
    if _KEPT.keeping and address.lower().endswith(INFLATED_UP_TO):
        return _KEPT.tar(address, open_file)
    return _opened(address, open_file, closing)


def _opened(address: str, open_file: Opening, closing: ExitStack) -> tarfile.TarFile:
    return closing.enter_context(tarfile.open(fileobj=closing.enter_context(open_file(address))))


def _in_tar(packed: tarfile.TarFile, name: str) -> Span | None:
    """Return a file in an archive, of which the entries are read one after the other: the end may be cut off."""
    entry = next((entry for entry in packed if entry.name == name), None)
    stored: IO[bytes] | None = packed.fileobj  # type: ignore[assignment]
    return Span(stored, entry.offset_data, entry.size) if entry is not None and entry.isreg() and stored else None


def members(address: str, open_file: Opening) -> dict[str, int]:
    """Return the names of the files in an archive in their order, and their sizes as stored in it.

    Raises:
        InputError: it is not readable.
    """
    try:
        with ExitStack() as stack:
            if address.lower().endswith(".zip"):
                archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(open_file(address))))
                return {own.filename: own.compress_size for own in archive.infolist() if not own.is_dir()}
            return _listed(_tar(address, open_file, stack))
    except (OSError, *DAMAGES) as error:
        _KEPT.close()
        raise InputError(f"{address}: not a readable archive: {error}") from error


def _listed(packed: tarfile.TarFile) -> dict[str, int]:
    """Return the files of a tar archive as far as it goes."""
    found: dict[str, int] = {}
    with suppress(*DAMAGES):
        found.update((entry.name, entry.size) for entry in packed if entry.isfile())
    return found
