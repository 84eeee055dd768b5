"""Compare a run with a control of another precision: the same model, data and schedule, at equal tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traceaudit.errors import InputError
from traceaudit.norms.restarts import surviving
from traceaudit.norms.training_log import TrainingLog

Floats = npt.NDArray[np.float64]

# DeepSeek-V3 (arXiv 2412.19437, section 3.3) reports FP8 within 0.25 % of its BF16 control.
TOLERANCE = 0.0025
BLOCKS = 16
CRITICAL = 3.733  # Student's t, 15 degrees of freedom, one-sided 0.1 %
LEAST_ROWS = 2 * BLOCKS
TEST = (
    "relative loss above the control at equal {axis}, means of 16 equal blocks of the second half of what both logs "
    "cover; one-sided t test, 15 degrees of freedom, 0.1 %, against a tolerance of {tolerance:.2%}"
)


@dataclass(frozen=True)
class Comparison:
    """How a run's loss lies relative to its control's.

    Attributes:
        axis: what was held equal, tokens or steps.
        difference: mean relative difference over the blocks.
        t: how far above the tolerance, in standard errors.
        diverged: `t` is beyond `CRITICAL`.
        since: step from which on the difference is above the tolerance in every block; None where it is not.
        rows: of the run, that were compared.
        test: in words.
    """

    axis: str
    difference: float
    t: float
    diverged: bool
    since: int | None
    rows: int
    test: str


def compare(run: TrainingLog, control: TrainingLog, tolerance: float = TOLERANCE) -> Comparison:
    """Return how far the run is above its control.

    Raises:
        InputError: the logs have too little in common.
    """
    both = all(log.table["tokens"].notna().any() for log in (run, control))
    axis = "tokens" if both else "step"
    where, loss, step = _curve(run, axis)
    other_where, other, _ = _curve(control, axis)
    common = (where >= other_where[0]) & (where <= other_where[-1]) if len(other_where) else np.zeros(len(where), bool)
    if int(common.sum()) < 2 * LEAST_ROWS:
        raise InputError(
            f"{run.source} and {control.source} have {int(common.sum())} rows at equal {axis}; {2 * LEAST_ROWS} needed."
        )
    expected = np.interp(where[common], other_where, other)
    relative = loss[common] / expected - 1
    half = relative[len(relative) // 2 :]
    means = np.array([block.mean() for block in np.array_split(half, BLOCKS)])
    error = float(means.std(ddof=1)) / np.sqrt(BLOCKS)
    t = float((means.mean() - tolerance) / max(error, 1e-12))
    since = _since(relative, step[common], tolerance) if t > CRITICAL else None
    words = TEST.format(axis="tokens" if both else "steps", tolerance=tolerance)
    return Comparison(axis, float(means.mean()), t, t > CRITICAL, since, len(relative), words)


def _curve(log: TrainingLog, axis: str) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Return where, loss and step of the rows that still count, in order of `axis`, each place once."""
    table = log.table.iloc[surviving(log.table["step"].to_numpy())]
    table = table[np.isfinite(table["loss"]) & np.isfinite(table[axis])].drop_duplicates(axis).sort_values(axis)
    return table[axis].to_numpy(dtype=np.float64), table["loss"].to_numpy(), table["step"].to_numpy()


def _since(relative: Floats, step: npt.NDArray[np.int64], tolerance: float) -> int | None:
    blocks = np.array_split(np.arange(len(relative)), 2 * BLOCKS)
    above = [float(relative[block].mean()) > tolerance for block in blocks]
    first = len(above)
    while first and above[first - 1]:
        first -= 1
    return int(step[blocks[first][0]]) if first < len(above) else None
