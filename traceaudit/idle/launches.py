"""How the host fed the GPU of a rank: launches, their delays, and the queue between launch and start."""

from typing import Any

import numpy as np
import pandas as pd

from traceaudit.classify import enclosing, thread_keys
from traceaudit.events import GPU_KINDS, Kind, Trace
from traceaudit.idle.calls import by_name
from traceaudit.intervals import Array, Intervals, covers, cross
from traceaudit.steps import OPTIMIZER_STEP, Steps

LOOP_NS = 1_000_000  # launches of a thread further apart are not one loop

Facts = dict[str, Any]


def throughput(trace: Trace, activities: pd.DataFrame, steps: Steps) -> Facts:
    """Return what passed from host to GPU within the steps of a rank.

    Keys: ``steps``, ``window_ns``, ``activities`` (started in them), ``launches`` (a CUDA graph is one),
    ``graph_kernels`` (activities that a graph's launch started), ``kernels_per_step``, ``kernels_per_ms``,
    ``kernel_ns_median``, ``launch_interval_ns_median`` (between launches of one thread, at most 1 ms apart),
    ``launch_delay_ns`` (``p50``, ``p90``, ``p99`` from the end of the call to the start; negative where the clocks of
    host and GPU differ), ``queue_depth_mean``, ``queue_depth_max`` (launches not yet started) and
    ``queue_empty_share`` of the time. Figures without evidence are None.
    """
    start, end = activities["start_ns"].to_numpy(), activities["end_ns"].to_numpy()
    launch = activities["launch"].to_numpy()
    inside = covers(steps.windows, start)
    window_ns = int((steps.windows.end - steps.windows.start).sum())
    first = np.zeros(len(launch), np.bool_)
    first[np.unique(launch, return_index=True)[1]] = True  # activities are in the order of their starts
    first &= launch >= 0
    size = pd.Series(launch[inside & (launch >= 0)]).value_counts()
    fed = np.flatnonzero(first & inside)
    called = trace.events["end_ns"].to_numpy()[launch[fed]]
    delay = start[fed] - called
    count = int(inside.sum())
    kernels = inside & (trace.events["kind"].to_numpy()[activities["row"].to_numpy()] == Kind.KERNEL)
    return {
        "steps": len(steps.step),
        "window_ns": window_ns,
        "activities": count,
        "launches": len(fed),
        "graph_kernels": int(size[size > 1].sum()),
        "kernels_per_step": count / len(steps.step),
        "kernels_per_ms": count / (window_ns / 1e6),
        "kernel_ns_median": int(np.median((end - start)[kernels])) if kernels.any() else None,
        "launch_interval_ns_median": _interval(trace, launch[fed]),
        "launch_delay_ns": {
            name: int(np.quantile(delay, share, method="nearest")) if len(delay) else None
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
        },
        **_depth(trace.events["end_ns"].to_numpy()[launch[first]], start[first], steps.windows),
    }


def _interval(trace: Trace, calls: Array) -> int | None:
    """Return the median time between the starts of launches that follow each other on a thread."""
    keys, starts = thread_keys(trace.events)[calls], trace.events["start_ns"].to_numpy()[calls]
    order = np.lexsort((starts, keys))
    apart = np.diff(starts[order])
    kept = apart[(np.diff(keys[order]) == 0) & (apart <= LOOP_NS)]
    return int(np.median(kept)) if len(kept) else None


def _depth(called: Array, started: Array, windows: Intervals) -> Facts:
    """Return how many launches had been made and not yet started, over the time of some windows."""
    if not len(called):
        return {"queue_depth_mean": None, "queue_depth_max": None, "queue_empty_share": None}
    at = np.concatenate((np.minimum(called, started), started, windows.end[-1:]))
    change = np.concatenate((np.ones(len(called), np.int64), -np.ones(len(started), np.int64), [0]))
    order = np.argsort(at, kind="stable")
    at, depth = at[order], np.cumsum(change[order])
    parts = cross(Intervals(at[:-1], at[1:]), windows)
    length, level = parts.end - parts.start, depth[parts.left]
    whole = int((windows.end - windows.start).sum())
    return {
        "queue_depth_mean": float((length * level).sum() / whole),
        "queue_depth_max": int(level[length > 0].max(initial=0)),
        "queue_empty_share": 1 - int(length[level > 0].sum()) / whole,
    }


def optimizer_loops(trace: Trace, activities: pd.DataFrame, steps: Steps) -> Facts:
    """Return how the optimizer launched its kernels: ``steps``, ``kernels_per_step`` and ``style``.

    The style is "fused", "foreach" or "loop" (a few kernels for each tensor), "" where no optimizer was recorded.
    """
    events = trace.events
    rows = np.flatnonzero(
        by_name(events, OPTIMIZER_STEP) & np.isin(events["kind"].to_numpy(), (Kind.ANNOTATION, Kind.OPERATOR))
    )
    rows = rows[covers(steps.windows, events["start_ns"].to_numpy()[rows])]
    launched = activities["row"].to_numpy()[enclosing(events, rows, activities["launch"].to_numpy()) >= 0]
    launched = launched[np.isin(events["kind"].to_numpy()[launched], GPU_KINDS)]
    if not len(rows) or not len(launched):
        return {"steps": len(rows), "kernels_per_step": None, "style": ""}
    names = events["name"].cat.categories.to_numpy(dtype=object)
    used = [str(names[code]) for code in np.unique(events["name"].cat.codes.to_numpy()[launched])]
    fused = any("fused" in name.lower() for name in used)
    foreach = any("multi_tensor_apply" in name for name in used)
    style = "fused" if fused else "foreach" if foreach else "loop"
    return {"steps": len(rows), "kernels_per_step": len(launched) / len(rows), "style": style}
