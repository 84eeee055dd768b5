"""Files that are written: none is overwritten unasked, and one that cannot be written is an error of ours."""

from collections.abc import Iterable
from pathlib import Path
from typing import IO

from traceaudit.errors import InputError


def refuse_overwriting(paths: Iterable[Path], *, force: bool) -> None:
    """Fail before the work, not after it.

    Raises:
        InputError: one of the files exists and `force` is not set.
    """
    for path in paths:
        if path.exists() and not force:
            raise InputError(f"{path} exists; pass --force to overwrite it.")


def created(path: Path, *, force: bool) -> IO[bytes]:
    """Open a file that must not exist yet, unless `force` is set.

    Raises:
        InputError: it exists, or cannot be written.
    """
    refuse_overwriting([path], force=force)
    try:
        return path.open("wb")
    except OSError as error:
        raise _unwritable(path, error) from error


def write(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file that must not exist yet, unless `force` is set.

    Raises:
        InputError: it exists, or cannot be written.
    """
    refuse_overwriting([path], force=force)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written: {error.strerror or error}")
