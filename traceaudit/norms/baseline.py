"""What a metric usually is, from its own past: a trailing median and the median absolute deviation.

Causal: a row is judged by the rows before it alone, so a growing file gives the same verdicts as a whole one. Robust:
half of the window may be wrong. Rows found outside do not enter the windows of later ones; if the metric stays outside
for `PATIENCE` rows, the new level is taken for the usual one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

WINDOW = 64  # rows of the trailing window
SIZES = (24, 32, 48, WINDOW)  # of the window while the history is short; with less, no row is judged
CHUNK = 16_384  # windows at a time, which bounds the memory of long logs
LATEST = 8  # rows that tell where a falling metric has got to
PATIENCE = 2 * WINDOW
TO_SIGMA = 1.4826  # median absolute deviation of a normal distribution, as standard deviation
LEAST_SCALE = 1e-3  # of the level: a metric logged with few digits seems not to vary at all


@dataclass(frozen=True)
class Baseline:
    """For each row: the usual value, its scale, how many scales the row lies above, and whether that is outside."""

    level: Floats
    scale: Floats
    score: Floats
    outside: Mask
    settled_at: tuple[int, ...]  # rows at which a new level was taken for the usual one


def baseline(values: Floats, threshold: Floats, least_rise: Floats | float, history: Floats | None = None) -> Baseline:
    """Judge finite values, each by those before it.

    Args:
        values: in the order of writing.
        threshold: scales above the usual value from which a row is outside, one a row.
        least_rise: what a row must exceed the usual value by, as a share of it; in the metric's own unit if negative.
        history: usual values before the first one.
    """
    before = np.empty(0) if history is None else history[-WINDOW:]
    first = len(before)
    series = np.concatenate([before, values])
    level, scale = _windows(series)
    state = _State(series, level, scale, first, threshold, np.broadcast_to(least_rise, values.shape))
    outside = state.judge()
    at = slice(first, None)
    score = _score(series[at], state.level[at], state.scale[at])
    return Baseline(state.level[at], state.scale[at], score, outside[at], tuple(state.settled_at))


def _score(values: Floats, level: Floats, scale: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num((values - level) / scale, nan=0.0)


def _windows(series: Floats) -> tuple[Floats, Floats]:
    """Return level and scale of the window before each value; NaN where the history is too short."""
    level, scale = np.full(len(series), np.nan), np.full(len(series), np.nan)
    for size, longer in zip(SIZES, (*SIZES[1:], len(series) + 1), strict=True):
        end = min(longer, len(series))
        if end > size:  # rows `size` to `end` have a window of this size before them
            windows = np.lib.stride_tricks.sliding_window_view(series[: end - 1], size)
            for first in range(0, len(windows), CHUNK):
                part = slice(size + first, min(size + first + CHUNK, end))
                level[part], scale[part] = _usual(windows[first : first + CHUNK])
    return level, scale


def _of_window(usual: list[float]) -> tuple[float, float]:
    size = max(size for size in SIZES if size <= len(usual))
    level, scale = _usual(np.array(usual[-size:])[None, :])
    return float(level[0]), float(scale[0])


def _usual(windows: Floats) -> tuple[Floats, Floats]:
    """Return level and scale at the end of each window (a row).

    A metric that falls is followed: its slope, from the medians of both halves, is taken out of the scatter, and the
    level is that of the latest rows as far as the slope explains them. A rise is not followed.
    """
    size = windows.shape[1]
    half = size // 2
    middle = np.median(windows, axis=1)
    slope = (np.median(windows[:, half:], axis=1) - np.median(windows[:, :half], axis=1)) / (size - half)
    slope = np.minimum(slope, 0.0)
    level = np.minimum(middle, np.maximum(middle + slope * half, np.median(windows[:, -LATEST:], axis=1)))
    straight = windows - slope[:, None] * (np.arange(size) - (size - 1) / 2)
    straight -= np.median(straight, axis=1)[:, None]
    return level, _floored(TO_SIGMA * np.median(np.abs(straight), axis=1), middle)


def _floored(scale: Floats, level: Floats) -> Floats:
    return np.maximum(scale, np.maximum(LEAST_SCALE * np.abs(level), 1e-12))


class _State:
    """The pass over the rows; where no row in the window was outside, the vectorised windows are right as they are."""

    def __init__(
        self, series: Floats, level: Floats, scale: Floats, first: int, threshold: Floats, rise: Floats
    ) -> None:
        self.series, self.level, self.scale, self.first = series, level, scale, first
        self.threshold, self.rise = threshold, rise
        self.settled_at: list[int] = []

    def judge(self) -> Mask:
        outside = np.zeros(len(self.series), dtype=bool)
        outside[self.first :] = self._beyond(np.arange(self.first, len(self.series)))
        row = self.first
        while True:
            ahead = np.flatnonzero(outside[row:])
            if not len(ahead):
                return outside
            row = self._slowly(row + int(ahead[0]), outside)

    def _beyond(self, rows: npt.NDArray[np.intp]) -> Mask:
        level, over = self.level[rows], self.series[rows] - self.level[rows]
        rise = self.rise[rows - self.first]
        least = np.where(rise < 0, -rise, rise * np.abs(level))
        result: Mask = (over > self.threshold[rows - self.first] * self.scale[rows]) & (over > least)
        return result

    def _slowly(self, row: int, outside: Mask) -> int:
        """Go on row by row, leaving out those outside, until none is in the window; return the next row to look at."""
        usual = self.series[max(0, row - WINDOW) : row].tolist()
        last, run = row, 0
        while row < len(self.series) and row - last <= WINDOW:
            self.level[row], self.scale[row] = _of_window(usual)
            outside[row] = bool(self._beyond(np.array([row]))[0])
            if outside[row]:
                last, run = row, run + 1
            else:
                usual.append(self.series[row])
                run = 0
            row += 1
            if run >= PATIENCE:
                self.settled_at.append(row - 1 - self.first)
                usual, run = self.series[row - WINDOW : row].tolist(), 0
        return row
