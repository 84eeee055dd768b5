"""Where a run was resumed, which rows still count, and where the learning rate is no guide to the usual."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.norms.baseline import TO_SIGMA

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

SETTLE = 32  # rows after a restart or a new learning rate in which more is allowed
WARM_UP_ROWS = 96  # where no learning rate says how long the warm-up is
LR_CHANGE = 1.2  # from one row to the next, outside of the warm-up
LEAST_OVERLAP = 5  # replayed rows from which they are compared with those they replace
BESIDE = 5.0  # standard errors from which a replayed part is not the same


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``end`` of the table, written without a restart; ``before`` are the rows they build on."""

    start: int
    end: int
    before: Integers


@dataclass(frozen=True)
class Resume:
    """The run began again at ``step`` after having been at ``last_step``.

    Attributes:
        row: of the table, where it began.
        replayed: rows of the same steps in both parts.
        difference: median of the new loss minus the old one over those; None where too few.
        errors: the same in standard errors.
    """

    row: int
    step: int
    last_step: int
    replayed: int
    difference: float | None
    errors: float | None


def segments(step: Integers) -> list[Segment]:
    """Return the parts of a log between restarts; each builds on the rows before its first step that still count.

    >>> [(part.start, part.end, part.before.tolist()) for part in segments(np.array([1, 2, 3, 2, 3]))]
    [(0, 3, []), (3, 5, [0])]
    """
    edges = [0, *(np.flatnonzero(np.diff(step) <= 0) + 1).tolist(), len(step)]
    counting = np.empty(0, dtype=np.int64)
    found = []
    for start, end in pairwise(edges):
        if start < end:
            counting = counting[step[counting] < step[start]]
            found.append(Segment(start, end, counting))
            counting = np.concatenate([counting, np.arange(start, end)])
    return found


def surviving(step: Integers) -> Integers:
    """Return the rows that still count at the end of the log, in the order of steps."""
    parts = segments(step)
    return np.concatenate([parts[-1].before, np.arange(parts[-1].start, parts[-1].end)]) if parts else step


def resumes(table: pd.DataFrame) -> list[Resume]:
    """Return the restarts of a log, and whether the steps run again went as they had before."""
    step, loss = table["step"].to_numpy(), table["loss"].to_numpy()
    found = []
    parts = segments(step)
    for earlier, part in pairwise(parts):
        old = np.concatenate([earlier.before, np.arange(earlier.start, earlier.end)])
        new = np.arange(part.start, part.end)
        _, left, right = np.intersect1d(step[old], step[new], return_indices=True)
        apart = loss[new[right]] - loss[old[left]]
        apart = apart[np.isfinite(apart)]
        difference = float(np.median(apart)) if len(apart) >= LEAST_OVERLAP else None
        found.append(
            Resume(part.start, int(step[part.start]), int(step[old].max()), len(left), difference, _errors(apart))
        )
    return found


def _errors(apart: Floats) -> float | None:
    """Return the median over its standard error, from the median absolute deviation: a spike in either does not matter.

    The standard error of a median is 1.2533 times that of a mean, for a normal distribution.
    """
    if len(apart) < LEAST_OVERLAP:
        return None
    middle = float(np.median(apart))
    spread = 1.2533 * TO_SIGMA * float(np.median(np.abs(apart - middle))) / float(np.sqrt(len(apart)))
    return middle / max(spread, 1e-12) if abs(middle) > 1e-9 else 0.0


def warm_up(table: pd.DataFrame) -> int:
    """Return the first row after the warm-up: the learning rate has stopped rising, or `WARM_UP_ROWS` are over."""
    lr = table["lr"].to_numpy()
    known = np.flatnonzero(np.isfinite(lr))
    if len(known) < 2:
        return min(WARM_UP_ROWS, len(table))
    falls = np.flatnonzero(np.diff(lr[known]) <= 0)
    top = known[falls[0]] if len(falls) else known[-1]
    return int(top) + 1 if lr[known[0]] < 0.5 * lr[top] else min(WARM_UP_ROWS, len(table))


def lr_changes(table: pd.DataFrame) -> list[tuple[int, float]]:
    """Return row and factor of each jump of the learning rate outside of the warm-up."""
    lr = table["lr"].to_numpy()
    known = np.flatnonzero(np.isfinite(lr) & (lr > 0))
    known = known[known >= max(warm_up(table) - 1, 0)]
    factor = lr[known[1:]] / lr[known[:-1]]
    # The end of a decay multiplies what is almost nothing.
    jumps = (factor > LR_CHANGE) & (lr[known[1:]] > 0.01 * np.nanmax(lr, initial=0.0, where=np.isfinite(lr)))
    return [(int(known[at + 1]), float(factor[at])) for at in np.flatnonzero(jumps)]


def tolerant(table: pd.DataFrame) -> Mask:
    """Return the rows in which more is allowed: the warm-up, and after restarts and jumps of the learning rate."""
    mask = np.zeros(len(table), dtype=bool)
    mask[: warm_up(table)] = True
    starts = [resume.row for resume in resumes(table)] + [row for row, _ in lr_changes(table)]
    for start in starts:
        mask[start : start + SETTLE] = True
    return mask
