"""What is known about the causes of host gaps on a rank beside their time: counts, sizes and kinds."""

import re
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.classify import State
from traceaudit.events import Kind, Trace
from traceaudit.idle.calls import ALLOCATES, FREES, SYNCHRONISATION, Host, by_name
from traceaudit.idle.launches import optimizer_loops
from traceaudit.intervals import Array, Intervals, covers, cross, union
from traceaudit.leaves import Leaf
from traceaudit.recompute import BACKWARD
from traceaudit.steps import OPTIMIZER_STEP, PROFILER_STEP, Steps

SINGLE_PROCESS = re.compile(r"SingleProcessDataLoaderIter")
STREAM_WAIT = re.compile(r"^(?:cuda|hip)StreamWaitEvent|^cuStreamWaitEvent")
SLOW_SHARE = 0.01
SPARSE = 0.1  # of a file's correlation ids, the share with a row below which rows were taken out of it

Facts = dict[str, Any]


def host_facts(trace: Trace, activities: pd.DataFrame, parts: pd.DataFrame, steps: Steps, host: Host) -> Facts:
    """Return the facts behind the leaves of a rank's host gaps, by leaf; times are within the steps."""
    ns = _by_leaf(parts, steps)
    return {
        "data_loader": {"gap_ns": ns.get(Leaf.DATA_LOADER, 0), **_loader(trace, activities, steps, host, ns)},
        "checkpoint": {"gap_ns": ns.get(Leaf.CHECKPOINT, 0), **_checkpoint(trace, steps, host)},
        "gc": {"gap_ns": ns.get(Leaf.GC, 0), **_rows(trace, steps, host, Leaf.GC)},
        "compile": {"gap_ns": ns.get(Leaf.COMPILE, 0), **_rows(trace, steps, host, Leaf.COMPILE)},
        "allocator": {"gap_ns": ns.get(Leaf.ALLOCATOR, 0), **_allocator(trace, steps, host)},
        "host_sync": {"gap_ns": ns.get(Leaf.HOST_SYNC, 0), **_syncs(trace, steps)},
        "launch_bound": {
            "gap_ns": ns.get(Leaf.LAUNCH_BOUND, 0),
            "cuda_graphs_would_win_ns": ns.get(Leaf.LAUNCH_BOUND, 0) + ns.get(Leaf.LAUNCH_LATENCY, 0),
        },
        "optimizer": optimizer_loops(trace, activities, steps),
        "profiler": _profiler(trace, parts, steps, host),
        "unattributed": _reasons(trace, activities, parts, steps),
        "phase": _phase(trace),
    }


def _by_leaf(parts: pd.DataFrame, steps: Steps) -> dict[int, int]:
    settled = parts[parts["after"] < 0]
    cut = cross(Intervals(settled["start_ns"].to_numpy(), settled["end_ns"].to_numpy()), steps.windows)
    sums = pd.Series(cut.end - cut.start).groupby(settled["leaf"].to_numpy()[cut.left]).sum()
    return {int(leaf): int(value) for leaf, value in sums.items()}  # type: ignore[call-overload]  # keys are integers


def _begun(trace: Trace, steps: Steps) -> Array:
    """Return the number of the step (by position) in which each row begins, -1 outside."""
    start = trace.events["start_ns"].to_numpy()
    slot = np.searchsorted(steps.windows.start, start, side="right") - 1
    return np.where((slot >= 0) & (start < steps.windows.end[np.maximum(slot, 0)]), slot, -1)


def _rows(trace: Trace, steps: Steps, host: Host, leaf: Leaf) -> Facts:
    """Return number and summed time of the outermost rows of a leaf that begin in the steps."""
    chosen = host.named[leaf] & (_begun(trace, steps) >= 0)
    spans = union(trace.events["start_ns"].to_numpy()[chosen], trace.events["end_ns"].to_numpy()[chosen])
    return {"count": len(spans.start), "ns": int((spans.end - spans.start).sum())}


def _loader(trace: Trace, activities: pd.DataFrame, steps: Steps, host: Host, ns: dict[int, int]) -> Facts:
    """Return what fetching batches took, the copies to the device, and which of both is slow.

    ``slow`` is "workers", "training process" (batches are made in it) or "copy", whichever idles the GPU most; "" if
    both together idle it for less than `SLOW_SHARE` of the steps.
    """
    events = trace.events
    named = host.named[Leaf.DATA_LOADER]
    single = bool((named & by_name(events, SINGLE_PROCESS)).any())
    up = (activities["state"].to_numpy() == State.HOST_COPY) & ~activities["to_host"].to_numpy()
    up &= covers(steps.windows, activities["start_ns"].to_numpy())
    length = (activities["end_ns"] - activities["start_ns"]).to_numpy()
    size = np.maximum(events["bytes"].to_numpy()[activities["row"].to_numpy()], 0)
    pageable = activities["pageable"].to_numpy()
    copies = {
        name: {"count": int(own.sum()), "bytes": int(size[own].sum()), "ns": int(length[own].sum())}
        for name, own in (("pageable", up & pageable), ("other", up & ~pageable))
    }
    waiting, copying = ns.get(Leaf.DATA_LOADER, 0), ns.get(Leaf.INPUT_COPY, 0)
    source = "training process" if single else "workers"
    window_ns = int((steps.windows.end - steps.windows.start).sum())
    slow = ("copy" if copying > waiting else source) if waiting + copying > SLOW_SHARE * window_ns else ""
    return {
        **_rows(trace, steps, host, Leaf.DATA_LOADER),
        "in_training_process": single,
        "copies": copies,
        "input_copy_ns": copying,
        "slow": slow,
    }


def _checkpoint(trace: Trace, steps: Steps, host: Host) -> Facts:
    awaited = host.bursts.awaited
    return {
        **_rows(trace, steps, host, Leaf.CHECKPOINT),
        "bursts": len(awaited),
        "bursts_asynchronous": int((~awaited).sum()),
        "burst_bytes": int(host.bursts.bytes.sum()),
    }


def _allocator(trace: Trace, steps: Steps, host: Host) -> Facts:
    """Return calls of the driver for memory; a steady step is any but the first, and should need none."""
    events = trace.events
    runtime = events["kind"].to_numpy() == Kind.RUNTIME
    begun = _begun(trace, steps) >= 0
    steady = events["start_ns"].to_numpy() >= _steady_from(trace, steps)
    asks, frees = runtime & by_name(events, ALLOCATES), runtime & by_name(events, FREES)
    starts = [spans.start for spans in host.retries.values()]
    retries = sum(int(covers(steps.windows, start).sum()) for start in starts)
    memory = trace.memory
    peak = memory.iloc[int(memory["reserved"].to_numpy().argmax())] if len(memory) else None
    reserved = int(peak["reserved"]) if peak is not None else None
    allocated = int(memory["allocated"].max()) if len(memory) else None
    return {
        "allocations": int((asks & begun).sum()),
        "frees": int((frees & begun).sum()),
        "allocations_in_steady_steps": int((asks & steady).sum()),
        "frees_in_steady_steps": int((frees & steady).sum()),
        "retries": retries,
        "reserved_peak_bytes": reserved,
        "allocated_peak_bytes": allocated,
        "unused_share_at_peak": None if not reserved or allocated is None else 1 - allocated / reserved,
    }


def _steady_from(trace: Trace, steps: Steps) -> int:
    """Return when the host began the second step; the end of time if it recorded one."""
    events = trace.events
    marks = by_name(events, PROFILER_STEP) & np.isin(events["kind"].to_numpy(), (Kind.ANNOTATION, Kind.OPERATOR))
    starts = np.unique(events["start_ns"].to_numpy()[marks])
    starts = starts if len(starts) else steps.windows.start
    return int(starts[1]) if len(starts) > 1 else int(np.iinfo(np.int64).max)


def _syncs(trace: Trace, steps: Steps) -> Facts:
    """Return how often the host waited for the GPU in the steps, whether or not that idled the GPU."""
    events = trace.events
    waits = (events["kind"].to_numpy() == Kind.RUNTIME) & by_name(events, SYNCHRONISATION)
    waits &= _begun(trace, steps) >= 0
    length = (events["end_ns"] - events["start_ns"]).to_numpy()
    return {
        "count": int(waits.sum()),
        "ns": int(length[waits].sum()),
        "per_step": int(waits.sum()) / max(len(steps.step), 1),
    }


def _profiler(trace: Trace, parts: pd.DataFrame, steps: Steps, host: Host) -> Facts:
    """Return what the profiler itself did while the GPU idled: its own rows, and the synchronisation by which it stops.

    Python frames are not rows of its own, but recording them costs host time: their number is that of the kept ones.
    """
    events = trace.events
    own = events["kind"].to_numpy() == Kind.OVERHEAD
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    spans = union(starts[own], ends[own])
    late = parts[parts["thread"] >= 0]
    idle = union(late["start_ns"].to_numpy(), late["end_ns"].to_numpy())
    both = cross(idle, spans)
    inside = cross(Intervals(both.start, both.end), steps.windows)
    final = host.final_sync
    return {
        "overhead_rows": int(own.sum()),
        "overhead_in_gaps_ns": int((inside.end - inside.start).sum()),
        "final_sync_ns": int(ends[final] - starts[final]) if final >= 0 else 0,
    }


def _phase(trace: Trace) -> Facts:
    """Return how many operators, backward nodes and optimizer steps there are: what tells training from a forward."""
    events = trace.events
    kinds = events["kind"].to_numpy()
    operators = np.isin(kinds, (Kind.OPERATOR, Kind.ANNOTATION))
    return {
        "operators": int((kinds == Kind.OPERATOR).sum()),
        "backward": int((operators & by_name(events, BACKWARD)).sum()),
        "optimizer": int((operators & by_name(events, OPTIMIZER_STEP)).sum()),
    }


def _reasons(trace: Trace, activities: pd.DataFrame, parts: pd.DataFrame, steps: Steps) -> Facts:
    """Return the unattributed idle time by what the trace lacks."""
    kept = parts[parts["leaf"].isin((Leaf.LAUNCH_MISSING, Leaf.NOT_STARTED))]
    cut = cross(Intervals(kept["start_ns"].to_numpy(), kept["end_ns"].to_numpy()), steps.windows)
    ender, leaf = kept["ender"].to_numpy()[cut.left], kept["leaf"].to_numpy()[cut.left]
    length = cut.end - cut.start
    launch = activities["launch"].to_numpy()[ender]
    missing = leaf == Leaf.LAUNCH_MISSING
    graph = _of_graphs(trace, activities)[ender] & ~missing
    waiting = _behind_a_wait(trace, activities)[ender] & ~missing & ~graph & (launch >= 0)
    rest = ~missing & ~graph & ~waiting
    found = {"no launch record": missing, "kernels of a CUDA graph are not recorded": graph}
    if _is_sparse(trace):
        found["rows were taken out of the file"] = rest | waiting
    else:
        found["waited for an event behind which nothing is recorded"] = waiting
        found["launched, and nothing recorded ran"] = rest
    return {reason: int(length[own].sum()) for reason, own in found.items() if own.any()}


def _of_graphs(trace: Trace, activities: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tell which activities belong to a CUDA graph."""
    launch = activities["launch"].to_numpy()
    graph = by_name(trace.events, re.compile(r"GraphLaunch"))
    return np.asarray((launch >= 0) & graph[np.maximum(launch, 0)])


def _behind_a_wait(trace: Trace, activities: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tell which activities were launched behind a stream-wait call, with no other launch of the thread between."""
    events = trace.events
    starts = events["start_ns"].to_numpy()
    waits = np.sort(starts[(events["kind"].to_numpy() == Kind.RUNTIME) & by_name(events, STREAM_WAIT)])
    launch = activities["launch"].to_numpy()
    linked = np.flatnonzero(launch >= 0)
    order = linked[np.argsort(starts[launch[linked]], kind="stable")]
    called = starts[launch[order]]
    before = np.searchsorted(waits, called)
    result = np.zeros(len(launch), np.bool_)
    result[order] = np.diff(before, prepend=0) > 0
    return result


def _is_sparse(trace: Trace) -> bool:
    """Tell whether most calls between the first and the last recorded one are absent, by their correlation ids."""
    events = trace.events
    ids = np.unique(events["correlation"].to_numpy()[events["kind"].to_numpy() == Kind.RUNTIME])
    ids = ids[ids > 0]
    return len(ids) > 1 and len(ids) < SPARSE * int(ids[-1] - ids[0] + 1)
