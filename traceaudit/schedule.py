"""The forward and backward work of a rank of a pipeline, micro-batch by micro-batch, in the order it ran.

Multi-stage schedules of torch.distributed.pipelining annotate each piece of work (``PP:2F0``: virtual stage 2, forward
of micro-batch 0; B a whole backward, I its input half, W its weight half). Elsewhere a kernel belongs to the backward
if a backward node launched it, and a new piece of work begins where that changes or where a send or receive was
launched in between.
"""

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing
from traceaudit.events import HOST_KINDS, Kind, Trace
from traceaudit.intervals import Array, Intervals, cross, elapsed
from traceaudit.leaves import Bucket, Leaf
from traceaudit.nesting import innermost
from traceaudit.steps import Steps, launch_times

WORK_ANNOTATION = re.compile(r"^PP:(\d+)([FBIW])(\d+)$")
BACKWARD_NODE = re.compile(r"^autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"^Optimizer\.")
SLIVER = 0.02  # of a typical forward, below which a piece of work is none

COLUMNS = (
    "step",
    "kind",
    "stage",
    "microbatch",
    "free_ns",
    "start_ns",
    "end_ns",
    "work_ns",
    "recompute_ns",
    "gap_before_ns",
    "gap_ns",
)


def schedule(
    trace: Trace,
    activities: pd.DataFrame,
    pieces: pd.DataFrame,
    idle: pd.DataFrame,
    steps: Steps,
    recompute: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """Return the work of a rank in order; empty for a rank without point-to-point communication.

    Columns: ``step``; ``kind``: F, B, I, W, or O for all other work; ``stage``: annotated virtual stage, -1 without;
    ``microbatch``: annotated, else counted from 0 by kind; ``free_ns``: end of the work before, or the step's begin;
    ``start_ns``, ``end_ns``: first to last kernel; ``work_ns``: time owned by its kernels, ``recompute_ns`` of it in
    recomputed ones; ``gap_before_ns``, ``gap_ns``: idle time of the host's making before it and within.
    """
    none = pd.DataFrame({name: np.empty(0, object if name == "kind" else np.int64) for name in COLUMNS})
    crossing = activities["kind"].to_numpy(dtype=object) == "send_recv"
    owned = pieces[pieces["state"] == State.COMPUTE]
    if not crossing.any() or not len(owned):
        return none
    common = cross(Intervals(owned["start_ns"].to_numpy(), owned["end_ns"].to_numpy()), steps.windows)
    owner = owned["owner"].to_numpy()[common.left]
    labels = _labels(trace, activities, np.flatnonzero(crossing))
    frame = pd.DataFrame(
        {
            "step": steps.step[common.right],
            "start_ns": common.start,
            "end_ns": common.end,
            "work_ns": common.end - common.start,
            "recompute_ns": np.where(recompute[owner], common.end - common.start, 0),
            **{name: values[owner] for name, values in labels.items()},
        }
    ).sort_values("start_ns", kind="stable", ignore_index=True)
    frame = _other_after_backward(frame)
    keys = ["step", "kind", "stage", "microbatch", "part"]
    changes = (frame[keys] != frame[keys].shift()).any(axis=1)
    frame = frame.assign(number=changes.cumsum())
    work = frame.groupby("number").agg(
        step=("step", "first"),
        kind=("kind", "first"),
        stage=("stage", "first"),
        microbatch=("microbatch", "first"),
        start_ns=("start_ns", "first"),
        end_ns=("end_ns", "last"),
        work_ns=("work_ns", "sum"),
        recompute_ns=("recompute_ns", "sum"),
    )
    work = _without_slivers(work)
    counted = work.groupby(["step", "kind"]).cumcount()
    work = work.assign(microbatch=np.where(work["microbatch"] >= 0, work["microbatch"], counted))
    return _with_gaps(work, idle, steps).reset_index(drop=True)[list(COLUMNS)]


def _labels(
    trace: Trace, activities: pd.DataFrame, crossing: npt.NDArray[np.intp]
) -> dict[str, npt.NDArray[np.generic]]:
    """Return kind, annotated stage and micro-batch of each activity, and after how many launches of p2p it came."""
    events = trace.events
    names = [str(name) for name in events["name"].cat.categories]
    codes = events["name"].cat.codes.to_numpy()
    kinds = events["kind"].to_numpy()
    launched = launch_times(trace, activities)
    spans = Intervals(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    backward = np.array([BACKWARD_NODE.search(name) is not None for name in names], np.bool_)
    nodes = np.flatnonzero((kinds == Kind.OPERATOR) & backward[codes])
    in_backward = enclosing(events, nodes, activities["launch"].to_numpy()) >= 0
    host = np.isin(kinds, HOST_KINDS)
    optimizing = np.flatnonzero(host & np.array([bool(OPTIMIZER.match(name)) for name in names], np.bool_)[codes])
    other = _inside(spans, optimizing, launched) >= 0
    kind = np.where(other, "O", np.where(in_backward, "B", "F")).astype(object)
    stage, microbatch = np.full(len(activities), -1, np.int64), np.full(len(activities), -1, np.int64)
    marked = [WORK_ANNOTATION.match(name) for name in names]
    annotated = np.flatnonzero(host & np.array([match is not None for match in marked], np.bool_)[codes])
    if len(annotated):
        kind[:] = "O"
        within = _inside(spans, annotated, launched)
        for code in np.unique(codes[annotated]):
            match = marked[code]
            chosen = (within >= 0) & (codes[np.maximum(within, 0)] == code)
            if match is not None:
                kind[chosen], stage[chosen], microbatch[chosen] = match[2], int(match[1]), int(match[3])
    part = np.searchsorted(np.sort(launched[crossing]), launched, side="right")
    part = np.where(kind == "O", 0, part) if not len(annotated) else np.zeros(len(activities), np.int64)
    return {"kind": kind, "stage": stage, "microbatch": microbatch, "part": part}


def _inside(spans: Intervals, rows: npt.NDArray[np.intp], instant: Array) -> Array:
    """Return for each instant the innermost of some host spans around it, on whatever thread; -1 for none."""
    found = innermost(Intervals(spans.start[rows], spans.end[rows]), instant)
    return np.where(found >= 0, rows[np.maximum(found, 0)] if len(rows) else -1, -1)


def _other_after_backward(frame: pd.DataFrame) -> pd.DataFrame:
    """Call what ran after the last backward of a step other work: gradient norms are no forward."""
    last = frame["start_ns"].where(frame["kind"].isin(("B", "I", "W"))).groupby(frame["step"]).transform("max")
    late = (frame["kind"] == "F") & (frame["start_ns"] > last)
    return frame.assign(kind=frame["kind"].where(~late, "O"), part=frame["part"].where(~late, 0))


def _without_slivers(work: pd.DataFrame) -> pd.DataFrame:
    """Call forwards that are next to nothing other work: a gradient of one is filled in, or a mask is made."""
    forward = (work["kind"] == "F") & (work["microbatch"] < 0)
    ns = work["work_ns"].astype(np.float64)
    typical = (ns[forward] ** 2).sum() / max(ns[forward].sum(), 1.0)  # of the piece that an instant of forwards is in
    sliver = forward & (ns < SLIVER * typical)
    return work.assign(kind=work["kind"].where(~sliver, "O"))


def _with_gaps(work: pd.DataFrame, idle: pd.DataFrame, steps: Steps) -> pd.DataFrame:
    """Add when a rank was free for each piece of work, and the idle time of the host's making before and within it."""
    host = [leaf for leaf in Leaf if leaf.bucket in (Bucket.HOST_GAP, Bucket.UNATTRIBUTED)]
    own = idle[(idle["after"] < 0) & idle["leaf"].isin(host)].sort_values("start_ns", kind="stable")
    spans = Intervals(own["start_ns"].to_numpy(), own["end_ns"].to_numpy())
    step, start, end = (work[name].to_numpy(dtype=np.int64) for name in ("step", "start_ns", "end_ns"))
    first = np.concatenate(([True], step[1:] != step[:-1]))
    order = np.argsort(steps.step)
    begun = steps.windows.start[order][np.searchsorted(steps.step[order], step)]
    free = np.where(first, begun, np.concatenate((end[:1], end[:-1])))
    idle_free, idle_start, idle_end = (elapsed(spans, edge) for edge in (free, start, end))
    return work.assign(free_ns=free, gap_before_ns=idle_start - idle_free, gap_ns=idle_end - idle_start)
