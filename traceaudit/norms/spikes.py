"""Spikes of the loss: where they begin and end, what the gradient norm said before, whether clipping would have helped.

Precedent for rewinding and skipping: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) restarted from about
100 steps before a spike and skipped 200 to 500 batches.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.norms.baseline import Baseline, baseline
from traceaudit.norms.restarts import Segment, lr_changes, segments, tolerant

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

LOSS_SCALES, LEAST_RISE = 8.0, 0.01  # above the usual loss, in scales and as a share of it
GRADIENT_SCALES, LEAST_RATIO = 8.0, 2.0  # of the logarithm of the gradient norm
PRECURSOR_SCALES, PRECURSOR_RATIO = 4.0, 1.5  # less is asked of a gradient norm next to a spike
NEXT_TO = 2  # rows
MORE_ALLOWED = 2.0  # times the scales, in rows where the usual is in doubt
BEFORE = 10  # rows in which a precursor is looked for
CALM, CALM_SCALES = 4, 4.0  # so many rows below so many scales end a spike
HARD_ROWS = 2
LASTING = 32  # rows from which a loss that does not come back is a divergence
FOLLOWS = 64  # rows after a new learning rate in which a spike is put down to it


@dataclass(frozen=True)
class Judged:
    """A metric with what is usual for each row; NaN and False where the log does not say it or it is not finite."""

    value: Floats
    level: Floats
    scale: Floats
    score: Floats
    outside: Mask
    settled: Mask  # rows at which a new level was taken for the usual one


@dataclass(frozen=True)
class Spike:
    """A stretch of rows in which the loss is not what it was.

    Attributes:
        start, end: rows; `end` is the first that is usual again, or the end of the part of the log.
        peak: row of the highest loss.
        recovered: the loss came back.
        precursor: row before or at the start where the gradient norm first was unusual; None where it was not.
        lr_factor: jump of the learning rate that it follows.
    """

    start: int
    end: int
    peak: int
    recovered: bool
    precursor: int | None
    lr_factor: float | None


def judged_loss(table: pd.DataFrame, gradients: Judged) -> Judged:
    """Judge the loss of each row by the rows before it that still counted.

    Where more is allowed, it is not if the gradient norm is unusual as well.
    """
    borne_out = np.convolve(gradients.outside, np.ones(2 * NEXT_TO + 1), mode="full")[NEXT_TO:-NEXT_TO] > 0
    threshold = np.where(tolerant(table) & ~borne_out, MORE_ALLOWED, 1.0) * LOSS_SCALES
    return _judged(table, table["loss"].to_numpy(), threshold, LEAST_RISE)


def judged_gradients(table: pd.DataFrame) -> Judged:
    """Judge the logarithm of the gradient norm, whose scatter is a factor."""
    norm = table["grad_norm"].to_numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        logarithm = np.where((norm > 0) & np.isfinite(norm), np.log(norm), np.nan)
    threshold = np.where(tolerant(table), MORE_ALLOWED, 1.0) * GRADIENT_SCALES
    return _judged(table, logarithm, threshold, -np.log(LEAST_RATIO))


def _judged(table: pd.DataFrame, value: Floats, threshold: Floats, least_rise: float) -> Judged:
    count = len(table)
    level, scale, score = np.full(count, np.nan), np.full(count, np.nan), np.zeros(count)
    outside, settled = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    finite = np.isfinite(value)
    for part in segments(table["step"].to_numpy()):
        rows = np.arange(part.start, part.end)[finite[part.start : part.end]]
        before = part.before[finite[part.before] & ~outside[part.before]]
        found: Baseline = baseline(value[rows], threshold[rows], least_rise, value[before])
        level[rows], scale[rows], score[rows] = found.level, found.scale, found.score
        outside[rows] = found.outside
        settled[rows[list(found.settled_at)]] = True
    return Judged(np.where(finite, value, np.nan), level, scale, score, outside, settled)


def spikes(table: pd.DataFrame, loss: Judged, gradients: Judged) -> list[Spike]:
    """Return the spikes of the loss in the order of writing."""
    changes = lr_changes(table)
    found = []
    for part in segments(table["step"].to_numpy()):
        rows = np.arange(part.start, part.end)[np.isfinite(loss.value[part.start : part.end])]
        for start, end, recovered in stretches(loss.outside[rows], loss.score[rows]):
            first, last = int(rows[start]), int(rows[end]) if end < len(rows) else part.end
            recovered = recovered and not loss.settled[first:last].any()
            peak = int(rows[start + int(np.argmax(loss.value[rows[start:end]]))])
            factor = next((factor for row, factor in changes if row <= first < row + FOLLOWS), None)
            found.append(Spike(first, last, peak, recovered, precursor(gradients, part, first), factor))
    return found


def stretches(outside: Mask, score: Floats) -> list[tuple[int, int, bool]]:
    """Return begin, end and recovery of stretches that `CALM` rows within `CALM_SCALES` end.

    >>> stretches(np.array([0, 1, 0, 0, 0, 0, 0], bool), np.array([0, 9, 5, 1, 1, 1, 1.0]))
    [(1, 3, True)]
    """
    found: list[tuple[int, int, bool]] = []
    row = 0
    count = len(outside)
    while row < count:
        ahead = np.flatnonzero(outside[row:])
        if not len(ahead):
            break
        start = end = row + int(ahead[0])
        calm = 0
        while end < count and calm < CALM:
            calm = calm + 1 if score[end] < CALM_SCALES and not outside[end] else 0
            end += 1
        found.append((start, end - calm, calm >= CALM))
        row = end
    return found


def precursor(gradients: Judged, part: Segment, start: int) -> int | None:
    """Return the first row of the `BEFORE` before a spike, or its own, whose gradient norm was unusual."""
    first = max(start - BEFORE, part.start)
    rise = gradients.value[first : start + 1] - gradients.level[first : start + 1]
    score = gradients.score[first : start + 1]
    unusual = np.flatnonzero((score > PRECURSOR_SCALES) & (rise > np.log(PRECURSOR_RATIO)))
    return first + int(unusual[0]) if len(unusual) else None


def kind(spike: Spike, loss: Judged) -> str:
    """Return what a stretch is: "spike", "divergence" (long, and not on its way back), or "hard_batch".

    The last is a row or two, not far outside, after which nothing is different and of which the gradient norm says
    nothing: the data was unusual, not the model.
    """
    length = spike.end - spike.start
    highest = loss.score[spike.peak]
    if spike.recovered and length <= HARD_ROWS and spike.precursor is None and highest < MORE_ALLOWED * LOSS_SCALES:
        return "hard_batch"
    last = float(np.nanmedian(loss.score[max(spike.end - CALM, spike.start) : spike.end]))
    lasting = length >= LASTING and last > 0.5 * highest
    return "divergence" if lasting and not spike.recovered else "spike"


def lone_gradients(table: pd.DataFrame, gradients: Judged, found: list[Spike]) -> list[tuple[int, int]]:
    """Return stretches of unusual gradient norms that no spike of the loss stands next to: first and last row."""
    taken = np.zeros(len(table), dtype=bool)
    for spike in found:
        taken[max(spike.start - BEFORE, 0) : spike.end + BEFORE] = True
    rows = np.flatnonzero(gradients.outside & ~taken)
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > BEFORE) + 1) if len(rows) else []
    return [(int(part[0]), int(part[-1])) for part in parts]


def clipping(
    table: pd.DataFrame, gradients: Judged, start: int, early: int | None, clip: float | None
) -> tuple[str, str]:
    """Return whether clipping the gradient norm would have caught a spike: "yes", "partly", "no", "unknown"; and why.

    The loss of a row is from before its own update, so only a norm that was unusual in an earlier row belongs to an
    update that can have caused the spike.
    """
    norm = table["grad_norm"].to_numpy()
    if not np.isfinite(gradients.level[max(start - 1, 0) : start + 1]).any():
        return "unknown", "no gradient norm is logged"
    if early is None:
        return "no", f"the gradient norm was usual before it ({norm[max(start - 1, 0)]:.3g})"
    usual, seen = float(np.exp(gradients.level[early])), float(norm[early])
    limit = clip if clip is not None else PRECURSOR_RATIO * usual
    step = int(table["step"].iloc[early])
    about = f"the gradient norm was {seen:.3g} at step {step}, usually {usual:.3g}"
    if clip is not None and clip >= seen:
        return "no", f"{about}: a clip at {clip:g} does not touch it; one at {PRECURSOR_RATIO * usual:.2g} would"
    if clip is not None and clip < usual:
        about += f"; a clip at {clip:g} shortens every update, this one {seen / usual:.1f} times as much"
    if early == start:
        return "partly", f"{about}: a clip at {limit:.2g} limits this update, but the loss was high before it"
    return "yes", f"{about}: a clip at {limit:.2g} scales the update before the spike by {limit / seen:.2g}"
