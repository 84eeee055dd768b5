"""The contract of a training log: one table, whatever wrote it.

Rows stand in the order of writing, so a step may come twice: the run was resumed from an earlier one. Columns:

``step`` (int64) and, as float64, ``loss``, ``grad_norm``, ``lr``, ``loss_scale`` (of FP16 training), ``skipped``
(optimizer steps that were skipped since the row before), ``tokens`` and ``samples`` (consumed since the run began);
then every watched metric under its own name. NaN: the row does not say. Infinity: the row says, and the value is no
finite number (NaN or infinite).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.errors import InputError
from traceaudit.norms.speed import speed_table, tells_speed

Floats = npt.NDArray[np.float64]
Row = Mapping[str, object]

STEPS = re.compile(
    r"(?:.*/)?(?:step|iteration|iter|global_step|globalstep|train_step|trainer/global_step)$|_step$", re.IGNORECASE
)
# Names of the columns, tried in this order; the rest of a name that a dashboard put before a slash does not matter.
NAMES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (column, re.compile(rf"(?:{pattern})$", re.IGNORECASE))
    for column, pattern in (
        ("loss", r"loss|train_loss|training_loss"),
        ("loss", r"(?:train|training|metrics)/(?:loss|train_loss|lm_loss)"),
        (
            "loss",
            r"lm_loss|loss_metrics/global_avg_loss|reduced_train_loss|lm-loss-training/lm_loss|train/cross_?entropy",
        ),
        ("loss", r"(?!(?:.*/)?(?:val|valid|validation|eval|test)).*/(?:loss|lm_loss|crossentropyloss)"),
        ("grad_norm", r"(?:.*/)?(?:grad|gradient)[_-]?norm|(?:.*/)?(?:total|global)_(?:grad_)?norm|norm"),
        ("lr", r"(?:.*/)?(?:lr|learning[_-]rate)(?:_group0)?|lr-\w+(?:/pg1)?"),
        ("loss_scale", r"(?:.*/)?(?:loss[_-]scale|grad_scale|scaler/scale)"),
        ("skipped", r"(?:.*/)?(?:number_of_skipped_iterations|skipped(?:_steps|_iterations|_iter)?)"),
        (
            "tokens",
            r"(?:.*/)?(?:consumed_tokens|n?tokens(?:_seen)?|n_tokens_seen|num_(?:input_)?tokens_seen|total_tokens)",
        ),
        ("samples", r"(?:.*/)?consumed[_-]samples"),
    )
)
CANONICAL = ("loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "samples")
WATCHED = re.compile(
    r"norm|logit|activation|(?:^|[/_.])act(?:s|_)|rms|amax|kurtosis|max_abs|entropy|fp8.*scale|scale.*fp8|scale_inv",
    re.IGNORECASE,
)
NOT_WATCHED = re.compile(r"eval|valid|/time|throughput|memory|num_zeros", re.IGNORECASE)
MOST_WATCHED = 256  # columns: more, as of each layer of a deep model, are left out and counted


@dataclass(frozen=True)
class TrainingLog:
    """A training log as read.

    Attributes:
        source: the file or folder.
        format: what wrote it, in words.
        table: see above.
        watched: the columns of other metrics.
        checkpoints: steps of which the log says that a checkpoint was saved.
        remarks: what was dropped or guessed.
        speed: how fast the run was (`traceaudit.norms.speed.speed_table`).
    """

    source: str
    format: str
    table: pd.DataFrame
    watched: tuple[str, ...]
    checkpoints: tuple[int, ...]
    remarks: tuple[str, ...]
    speed: pd.DataFrame = field(default_factory=pd.DataFrame)


def number(value: object) -> float | None:
    """Return a logged value as a float, None where it is no number; what is not finite becomes infinity.

    >>> number("3.5"), number("1,024"), number("nan"), number(True), number("abc"), number(float("-inf"))
    (3.5, 1024.0, inf, None, None, inf)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value.replace(",", "") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else math.inf


def flat(row: Row, prefix: str = "") -> dict[str, object]:
    """Return a row whose nested objects are columns, names joined by a slash.

    >>> flat({"train": {"loss": 2}, "step": 1})
    {'train/loss': 2, 'step': 1}
    """
    found: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


def build(
    source: str,
    written_by: str,
    rows: Iterable[Row],
    *,
    checkpoints: Iterable[int] = (),
    remarks: Sequence[str] = (),
) -> TrainingLog:
    """Return the log of rows in the order of writing.

    Raises:
        InputError: no row has a loss or a gradient norm.
    """
    kept = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in kept for name in row))
    plain = {name: name.strip().replace(" ", "_") for name in names}
    chosen = _choose(names, plain)
    if "loss" not in chosen and "grad_norm" not in chosen:
        shown = ", ".join(sorted(names)[:12]) or "nothing"
        raise InputError(f"{source}: no loss and no gradient norm found in this {written_by}; it holds {shown}.")
    said = list(remarks)
    columns = {name: _column(kept, chosen.get(name)) for name in CANONICAL}
    step = _steps(kept, [name for name in names if STEPS.match(plain[name])], said)
    used = set(chosen.values())
    watched = [name for name in names if name not in used and _is_watched(plain[name])]
    watched = [name for name in watched if np.isfinite(_column(kept, name)).any()]
    if len(watched) > MOST_WATCHED:
        said.append(f"{len(watched) - MOST_WATCHED} of {len(watched)} watched metrics were left out")
    others = {plain[name]: _column(kept, name) for name in watched[:MOST_WATCHED]}
    table = pd.DataFrame({"step": step, **columns, **others})
    table = table[(step >= 0) & table[["loss", "grad_norm"]].notna().any(axis=1)].reset_index(drop=True)
    table = table.astype({"step": np.int64})
    if chosen.get("skipped") and re.search(r"total|cum", chosen["skipped"]):
        table = table.assign(skipped=table["skipped"].diff().clip(lower=0))
    speed = speed_table({plain[name]: _column(kept, name) for name in names if tells_speed(plain[name])}, step)
    return TrainingLog(source, written_by, table, tuple(others), tuple(sorted(set(checkpoints))), tuple(said), speed)


def _choose(names: Sequence[str], plain: Mapping[str, str]) -> dict[str, str]:
    """Return the column that stands for each canonical name."""
    chosen: dict[str, str] = {}
    for column, pattern in NAMES:
        if column not in chosen:
            found = [name for name in names if pattern.match(plain[name]) and not re.match(r"eval|val", plain[name])]
            if found:
                chosen[column] = min(found, key=len)
    return chosen


def _is_watched(name: str) -> bool:
    return bool(WATCHED.search(name)) and not NOT_WATCHED.search(name)


def _column(rows: Sequence[Row], name: str | None) -> Floats:
    if name is None:
        return np.full(len(rows), np.nan)
    values = [number(row.get(name)) for row in rows]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _steps(rows: Sequence[Row], names: Sequence[str], said: list[str]) -> Floats:
    """Return each row's step, -1 where it has none; rows are counted where no column is a step."""
    if not names:
        said.append("no step column: rows are counted from 1")
        return np.arange(1, len(rows) + 1, dtype=np.float64)
    best = min(names, key=lambda name: (name.startswith("_"), len(name)))
    step = _column(rows, best)
    for name in names:  # other loggers' steps fill the gaps
        step = np.where(np.isnan(step), _column(rows, name), step)
    lost = int((~np.isfinite(step)).sum())
    if lost:
        said.append(f"{lost} rows without a step were dropped")
    return np.where(np.isfinite(step), step, -1.0)
