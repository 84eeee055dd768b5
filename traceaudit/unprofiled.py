"""The run's own log against its traces: are the profiled steps like the others, and what did the profiler cost?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.mfu.model import Run
from traceaudit.norms.training_log import TrainingLog

ALIKE = 0.03  # of the step: closer ones are the same
WARM_UP = 1  # rows at the log's begin that are left out, if there are others


def against_log(log: TrainingLog, run: Run, result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``log`` of the result; None where the log tells no speed.

    Speeds are medians over the log's rows but the first, which pays for compilation and caches. MFU of the log is that
    of the traced steps at the log's step time, since both hold the same FLOPs; what the log itself calls MFU stands
    beside it, by whatever convention.
    """
    speeds = {name: _median(log.speed[name]) for name in log.speed if name != "step"}
    job = result["job"]
    world_size = job["world_size"] or job["ranks_traced"]
    tokens = run.number("tokens_per_step")
    seq_len = run.number("seq_len")
    batch, of_gpu = speeds.get("batch"), speeds.get("gpu_tokens_per_second")
    if tokens is None and batch and seq_len:
        tokens = batch * seq_len
    rate = speeds.get("tokens_per_second") or (of_gpu * world_size if of_gpu else None)
    seconds = speeds.get("step_seconds") or (tokens / rate if tokens and rate else None)
    rate = rate or (tokens / seconds if tokens and seconds else None)
    if rate is None and seconds is None and speeds.get("mfu") is None:
        return None
    traced_ns = sum(rank["window_ns"] for rank in result["ranks"]) / sum(len(rank["steps"]) for rank in result["ranks"])
    mfu = job["mfu"]
    from_log = None if mfu is None or not seconds else mfu * traced_ns / 1e9 / seconds
    return {
        "file": str(log.source),
        "format": log.format,
        "rows": len(log.speed),
        "tokens_per_second": rate,
        "step_seconds": seconds,
        "traced_step_seconds": traced_ns / 1e9,
        "mfu_from_log": from_log,
        "mfu_reported": speeds.get("mfu"),
        "traced_mfu": mfu,
        "difference": None if from_log is None or mfu is None else from_log - mfu,
        "text": _text(seconds, traced_ns / 1e9, from_log, mfu, speeds.get("mfu")),
    }


def _median(values: "pd.Series[float]") -> float | None:
    known = values[np.isfinite(values)]
    known = known.iloc[WARM_UP:] if len(known) > WARM_UP else known
    return float(known.median()) if len(known) else None


def _text(
    seconds: float | None, traced: float, from_log: float | None, mfu: float | None, reported: float | None
) -> str:
    """Return what the comparison says, in a sentence or two."""
    said = f" The log itself says MFU {reported:.1%}." if reported is not None else ""
    if seconds is None:
        return f"the log does not tell how long a step took.{said}"
    apart = traced / seconds - 1
    if abs(apart) <= ALIKE:
        verdict = "the profiled steps are like the others, and the profiler costs little"
    elif apart > 0:
        verdict = f"the profiled steps take {apart:.1%} longer: the profiler's cost, or steps unlike the others"
    else:
        verdict = f"the profiled steps are {-apart:.1%} shorter: they are unlike the others"
    shares = "" if from_log is None or mfu is None else f"; MFU {from_log:.1%} without the profiler, {mfu:.1%} traced"
    return f"a step takes {seconds:.4g} s by the log and {traced:.4g} s traced: {verdict}{shares}.{said}"
