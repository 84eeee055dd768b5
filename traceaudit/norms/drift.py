"""What changes too slowly to be a spike: medians of blocks that keep rising."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.norms.baseline import TO_SIGMA
from traceaudit.norms.restarts import SETTLE, lr_changes, segments, surviving, warm_up

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

BLOCK = 32  # rows
RISING = 4  # blocks of the loss in a row, each above the one before
LEAST_BLOCKS = 8
SCALES, LEAST_RISE = 6.0, 0.01  # of the loss over its lowest level: scatter of blocks, and share
LEAST_METRIC_BLOCKS, MOST_METRIC_BLOCKS = 12, 32
TAU = 0.8  # Kendall's, of the last third of the blocks
GROWTH = 1.5  # over the last third of the log


@dataclass(frozen=True)
class Drift:
    """A metric that rose from about `start` on (a row), by `ratio`, and was still rising at `end`."""

    start: int
    end: int
    ratio: float


def loss_drift(table: pd.DataFrame) -> list[Drift]:
    """Return where the loss rose block by block, judged by the rows before it alone; one for each part of the log."""
    loss = table["loss"].to_numpy()
    changed = [row for row, _ in lr_changes(table)]
    found: list[Drift] = []
    for part in segments(table["step"].to_numpy()):
        rows = np.concatenate([part.before, np.arange(part.start, part.end)])
        rows = rows[(rows >= warm_up(table)) & np.isfinite(loss[rows])]
        edges = [0, *(int(np.searchsorted(rows, row)) for row in changed), len(rows)]
        for number, (first, last) in enumerate(pairwise(edges)):
            settled = rows[first + (SETTLE if number else 0) : last]
            drift = _rising(loss, settled)
            if drift is not None and drift.end >= part.start and drift.start not in [known.start for known in found]:
                found.append(drift)
    return found


def _rising(loss: Floats, rows: Integers) -> Drift | None:
    """Return the first rise of block medians that is more than their scatter."""
    count = len(rows) // BLOCK
    if count < LEAST_BLOCKS + RISING:
        return None
    block = np.median(loss[rows[: count * BLOCK]].reshape(count, BLOCK), axis=1)
    four = np.median(np.lib.stride_tricks.sliding_window_view(block, RISING), axis=1)
    for last in range(LEAST_BLOCKS + RISING - 1, count):
        lowest = int(np.argmin(four[: last - 2 * RISING + 2]))
        apart = np.diff(block[: last - RISING + 1])
        scatter = TO_SIGMA * float(np.median(np.abs(apart - np.median(apart)))) / np.sqrt(2)
        rise = block[last] - four[lowest]
        steady = bool((np.diff(block[last - RISING + 1 : last + 1]) > 0).all())
        if steady and rise > max(SCALES * scatter, LEAST_RISE * abs(four[lowest])):
            begin = last - RISING + 1
            while begin > lowest + RISING and block[begin - 1] < block[begin]:
                begin -= 1
            above = block[last:] > four[lowest] + rise / 2
            last += int(np.argmin(above)) - 1 if not above.all() else len(above) - 1
            return Drift(int(rows[begin * BLOCK]), int(rows[(last + 1) * BLOCK - 1]), float(block[last] / four[lowest]))
    return None


def metric_drift(table: pd.DataFrame, column: str, growth: float = GROWTH) -> Drift | None:
    """Return whether a metric still grows at the end of the log: Kendall's tau over the last third of its blocks."""
    rows = surviving(table["step"].to_numpy())
    values = np.abs(table[column].to_numpy())
    rows = rows[(rows >= warm_up(table)) & np.isfinite(values[rows])]
    size = max(8, -(-len(rows) // MOST_METRIC_BLOCKS))
    count = len(rows) // size
    if count < LEAST_METRIC_BLOCKS:
        return None
    rows = rows[len(rows) - count * size :]
    block = np.median(values[rows].reshape(count, size), axis=1)
    first = count - max(count // 3, RISING + 2)
    if block[first] <= 0 or block[-1] / block[first] < growth or kendall(block[first:]) < TAU:
        return None
    begin = first
    while begin > 1 and block[begin - 1] < block[begin] and block[begin] > 1.05 * block[begin - 1]:
        begin -= 1
    return Drift(int(rows[begin * size]), int(rows[-1]), float(block[-1] / block[begin]))


def kendall(values: Floats) -> float:
    """Return Kendall's tau of values against their order: 1 rises always, -1 falls always.

    >>> kendall(np.array([1.0, 2.0, 4.0])), kendall(np.array([3.0, 2.0, 1.0]))
    (1.0, -1.0)
    """
    left, right = np.triu_indices(len(values), 1)
    return float(np.sign(values[right] - values[left]).mean())
