"""Numbers that broke: NaN and infinity, and loss scales that fall and do not come back."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.norms.restarts import segments, warm_up

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

COLLAPSE = 32.0  # of the highest scale in the rows before; dynamic loss scaling halves once in a while
LOOK_BACK = 64  # rows
NEAR = 2  # rows around a skipped step in which an infinite gradient norm is its reason
MANY_SKIPPED = 5  # steps in a row


@dataclass(frozen=True)
class Run:
    """Rows `start` to `end`, the last one included."""

    start: int
    end: int


def not_finite(table: pd.DataFrame) -> list[Run]:
    """Return the stretches in which the loss, or a gradient norm of a step that was not skipped, is not finite."""
    skipped = _near(_skipped(table))
    broken = np.isinf(table["loss"].to_numpy()) | (np.isinf(table["grad_norm"].to_numpy()) & ~skipped)
    return _runs(broken, table)


def overflows(table: pd.DataFrame) -> int:
    """Return how many rows have an infinite gradient norm and a skipped step: FP16 doing what it should."""
    return int((np.isinf(table["grad_norm"].to_numpy()) & _near(_skipped(table))).sum())


def skipped_in_a_row(table: pd.DataFrame) -> list[Run]:
    """Return stretches of at least `MANY_SKIPPED` skipped steps."""
    count = np.nan_to_num(table["skipped"].to_numpy(), posinf=0.0)
    return [run for run in _runs(count > 0, table) if count[run.start : run.end + 1].sum() >= MANY_SKIPPED]


def collapses(table: pd.DataFrame, column: str) -> list[Run]:
    """Return where a scale fell below 1/`COLLAPSE` of what it was in the rows before, from the first fall on."""
    scale = table[column].to_numpy()
    known = np.flatnonzero(np.isfinite(scale) & (scale > 0))
    known = known[known >= warm_up(table)]
    if len(known) < 2:
        return []
    values = pd.Series(scale[known])
    highest = values.rolling(LOOK_BACK, min_periods=1).max().to_numpy()
    fallen = values.to_numpy() <= highest / COLLAPSE
    found = []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], fallen, [False]]).astype(np.int8)))
    for first, after in edges.reshape(-1, 2):
        whole = values.to_numpy()[max(first - LOOK_BACK, 0) : first + 1]
        begin = max(first - LOOK_BACK, 0) + int(np.flatnonzero(whole >= highest[first])[-1]) + 1
        found.append(Run(int(known[begin]), int(known[after - 1])))
    return found


def _skipped(table: pd.DataFrame) -> Mask:
    """Return the rows in which a step was skipped: the log says so, or the loss scale was halved."""
    count, scale = table["skipped"].to_numpy(), table["loss_scale"].to_numpy()
    halved = np.concatenate([[False], scale[1:] < scale[:-1]])
    said: Mask = (np.nan_to_num(count, posinf=0.0) > 0) | halved
    return said


def _near(mask: Mask) -> Mask:
    wide: Mask = np.convolve(mask, np.ones(2 * NEAR + 1), mode="full")[NEAR:-NEAR] > 0
    return wide


def _runs(mask: Mask, table: pd.DataFrame) -> list[Run]:
    """Return the runs of a mask, cut where the run was resumed."""
    found = []
    for part in segments(table["step"].to_numpy()):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask[part.start : part.end].astype(np.int8), [0]])))
        found += [Run(part.start + int(a), part.start + int(b) - 1) for a, b in edges.reshape(-1, 2)]
    return found
