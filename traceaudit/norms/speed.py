"""How fast a run was by its log: the columns of speed, under the names that frameworks give them.

Console lines of torchtitan have ``tps`` (tokens a second and GPU), ``tflops`` and ``mfu``; those of Megatron-LM the
elapsed milliseconds of an iteration, the TFLOP/s of a GPU and the global batch; ``trainer_state.json`` ends with the
steps a second; Composer, NeMo and others write scalars to TensorBoard and W&B, which has a clock of its own.
"""

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

# Columns, the names that mean them (spaces are underscores), and what a value is multiplied with; -1: its inverse.
SPEEDS: tuple[tuple[str, re.Pattern[str], float], ...] = tuple(
    (column, re.compile(rf"(?:{pattern})$", re.IGNORECASE), factor)
    for column, pattern, factor in (
        ("step_seconds", r"elapsed_time_per_iteration_\(ms\)|(?:.*/)?(?:step|iteration)_time_ms", 1e-3),
        ("step_seconds", r"(?:.*/)?(?:iteration-time|iteration_time|step_time|time_per_(?:step|iteration))", 1.0),
        (
            "step_seconds",
            r"(?:.*/)?(?:end_to_end\(s\)|train_step_timing(?:_in_s)?|sec(?:ond)?s?_per_(?:step|iter))",
            1.0,
        ),
        ("step_seconds", r"(?:.*/)?(?:train_)?steps_per_sec(?:ond)?", -1.0),
        ("gpu_tokens_per_second", r"(?:.*/)?(?:tps|throughput\(tps\)|device/tokens_per_sec(?:ond)?)", 1.0),
        ("gpu_tokens_per_second", r"(?:.*/)?tokens(?:_per_|/)s(?:ec(?:ond)?)?(?:_per_|/)(?:gpu|device)", 1.0),
        ("tokens_per_second", r"(?!(?:.*/)?device/)(?:.*/)?(?:train_)?tok(?:en)?s(?:_per_|/)s(?:ec(?:ond)?)?", 1.0),
        ("batch", r"(?:.*/)?(?:global_batch_size|batch-size)", 1.0),
        ("gpu_tflops", r"(?:.*/)?(?:tflops|tflops_per_gpu|throughput_per_gpu_\(tflop/s/gpu\))", 1.0),
        ("mfu", r"(?:.*/)?mfu(?:_?\(%\))?", 1.0),
        ("clock", r"_runtime|_timestamp", 1.0),
    )
)
COLUMNS = ("step_seconds", "gpu_tokens_per_second", "tokens_per_second", "batch", "gpu_tflops", "mfu")


def tells_speed(name: str) -> bool:
    """Tell whether a column of a log is one of speed.

    >>> [tells_speed(name) for name in ("tps", "throughput_per_GPU_(TFLOP/s/GPU)", "eval/loss")]
    [True, True, False]
    """
    return any(pattern.match(name) for _, pattern, _ in SPEEDS)


def speed_table(named: Mapping[str, Floats], step: Floats) -> pd.DataFrame:
    """Return ``step`` and `COLUMNS` of the rows that tell any; NaN where a row does not tell one.

    ``mfu`` is a share of one. Where no column has the time of a step, a clock and the steps between rows do.
    """
    found: dict[str, Floats] = {}
    for column, pattern, factor in SPEEDS:
        names = sorted((name for name in named if pattern.match(name)), key=len)
        if names and column not in found:
            values = np.where(np.isfinite(named[names[0]]) & (named[names[0]] > 0), named[names[0]], np.nan)
            found[column] = 1 / values if factor < 0 else values * factor
    if "clock" in found and "step_seconds" not in found:
        found["step_seconds"] = _between(found["clock"], step)
    if "mfu" in found and np.nanmax(np.append(found["mfu"], 0.0)) > 1:
        found["mfu"] = found["mfu"] / 100
    table = pd.DataFrame({"step": step, **{name: found.get(name, np.full(len(step), np.nan)) for name in COLUMNS}})
    kept: pd.DataFrame = table[table[list(COLUMNS)].notna().any(axis=1)].reset_index(drop=True)
    return kept


def _between(clock: Floats, step: Floats) -> Floats:
    """Return the seconds of a step since the row before; NaN where steps or clock do not go on."""
    passed, steps = np.diff(clock, prepend=np.nan), np.diff(step, prepend=np.nan)
    going = (passed > 0) & (steps > 0)
    return np.asarray(np.divide(passed, steps, out=np.full(len(clock), np.nan), where=going), np.float64)
