"""Times as exact nanoseconds, and integers of any width, as columns."""

from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from traceaudit.intervals import Array

TIME_LIMIT_NS = 1 << 61  # so that start, base and length add up within int64

Column = npt.NDArray[np.integer[Any]]  # of 8 or 32 bits, where the values fit
Mask = npt.NDArray[np.bool_]


DOT, COMMA = ord("."), ord(",")


def nanoseconds(raws: list[msgspec.Raw], missing: int | None = None) -> tuple[Array, Mask]:
    """Return microsecond texts as exact integer nanoseconds, and which of them are no usable number.

    A value beyond `TIME_LIMIT_NS` is unusable; an absent one or null is too, unless `missing` stands for it.
    """
    found = _decimals(b",".join(raws), len(raws))
    if found is not None:
        return found, np.zeros(len(raws), np.bool_)
    texts = list(map(bytes, raws))
    exact = [missing if missing is not None and text in (b"", b"null") else exact_nanoseconds(text) for text in texts]
    bad = np.array([value is None for value in exact], np.bool_)
    return np.array([value or 0 for value in exact], np.int64), bad


def _decimals(joined: bytes, size: int) -> Array | None:
    """Read numbers between commas that all have three decimals, or none, in thousandths; nothing if they do not."""
    text = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(text == COMMA), len(text))
    dots = np.flatnonzero(text == DOT)
    digits = int(((text >= ord("0")) & (text <= ord("9"))).sum())
    if len(ends) != size or digits + len(dots) + size - 1 != len(text):
        return None
    width = np.diff(ends, prepend=-1) - 1
    if len(dots) == size and width.min() > 4 and width.max() <= 20 and (dots == ends - 4).all():
        values = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
    elif not len(dots) and width.min() > 0 and width.max() <= 15:
        values = np.fromstring(joined, np.int64, sep=",") * 1000
    else:
        return None
    return values if values.max() < TIME_LIMIT_NS else None


def exact_nanoseconds(text: bytes) -> int | None:
    """Return one microsecond text as nanoseconds, rounded half to even below one; nothing if it is no usable number."""
    try:
        value = Decimal(text.decode().strip('"'))
        if not value.is_finite() or value.adjusted() > 16:  # as an integer, 1e999999999 fills the memory
            return None
        number = int((value * 1000).to_integral_value())
    except (ArithmeticError, ValueError):
        return None
    return number if abs(number) < TIME_LIMIT_NS else None
