"""Which call, operator and Python frame stood behind each idle gap of a rank: the facts beside the leaves."""

import re

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.events import Kind, Trace
from traceaudit.idle.calls import ORDER, STALL_NS, WIDE_ANNOTATION, Host, Index, Mask, by_name
from traceaudit.intervals import Array, Intervals, cross
from traceaudit.leaves import Bucket, Leaf
from traceaudit.nesting import innermost, parents
from traceaudit.steps import Steps

LARGEST = 200  # gaps of a rank that are kept one by one
CALLS = 200  # sums of a rank by leaf and call that are kept
LOGGING = re.compile(r"wandb|tensorboard|SummaryWriter|mlflow|logging/__init__\.py|function print>|tqdm|loguru", re.I)
GPU_SIDE = (Leaf.LAUNCH_LATENCY, Leaf.NOT_STARTED, Leaf.LAUNCH_MISSING)
GAP_COLUMNS = (
    "step",
    "start_ns",
    "end_ns",
    "leaf",
    "call",
    "inside",
    "thread",
    "frame",
    "ended_by",
    "stream",
    "dependency",
    "dependency_stream",
)
SUM_COLUMNS = ("leaf", "call", "inside", "ns", "count", "longest_ns")


def named_gaps(
    trace: Trace, activities: pd.DataFrame, parts: pd.DataFrame, steps: Steps, host: Host
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the largest gaps of a rank one by one, and the sums of all by leaf and call.

    The first has the columns `GAP_COLUMNS`: ``call`` is the host call, operator or annotation that took the most of
    it (for a gap of the GPU: the launch; for a lonely copy: the copy), ``inside`` the innermost annotation around
    that, or else operator; ``frame`` the innermost Python frame recorded; ``thread`` an OS id, -1 where no thread was
    late; ``ended_by`` the activity that ended the gap, on ``stream``; ``dependency`` what that waited for. The second
    has `SUM_COLUMNS`: ``count`` and ``longest_ns`` are of gaps.
    """
    kept = parts[(parts["after"] < 0) & _of_the_host(parts["leaf"].to_numpy())]
    kept = kept.sort_values("start_ns", kind="stable")
    cut = cross(Intervals(kept["start_ns"].to_numpy(), kept["end_ns"].to_numpy()), steps.windows)
    table = kept.iloc[cut.left].assign(start_ns=cut.start, end_ns=cut.end, step=steps.step[cut.right])
    table = table.reset_index(drop=True)
    events = trace.events
    row = _call_rows(events, activities, table, host)
    inside = _around(events, row, host)
    names = np.append(events["name"].cat.categories.to_numpy(dtype=object), "")
    codes = np.append(events["name"].cat.codes.to_numpy().astype(np.int64), len(names) - 1)  # row -1 is nameless
    table = table.assign(call=codes[row], inside=codes[inside], ns=table["end_ns"] - table["start_ns"])
    sums = _sums(table)
    largest = table.sort_values(["ns", "start_ns"], ascending=[False, True], kind="stable").head(LARGEST)
    largest = largest.sort_values("start_ns", kind="stable")
    frame = _frames(events, largest, host)
    activity_row = np.append(activities["row"].to_numpy(), -1)
    streams = np.append(activities["stream"].to_numpy(), -1)
    ender, dependency = largest["ender"].to_numpy(), largest["dependency"].to_numpy()
    shown = pd.DataFrame(
        {
            "step": largest["step"].to_numpy(),
            "start_ns": largest["start_ns"].to_numpy(),
            "end_ns": largest["end_ns"].to_numpy(),
            "leaf": largest["leaf"].to_numpy(),
            "call": names[largest["call"].to_numpy()],
            "inside": names[largest["inside"].to_numpy()],
            "thread": _thread_ids(events, largest["thread"].to_numpy(), host),
            "frame": names[codes[frame]],
            "ended_by": names[codes[activity_row[ender]]],
            "stream": streams[ender],
            "dependency": names[codes[activity_row[dependency]]],
            "dependency_stream": streams[dependency],
        },
        columns=list(GAP_COLUMNS),
    )
    return shown, sums.assign(call=names[sums["call"].to_numpy()], inside=names[sums["inside"].to_numpy()])


def _of_the_host(leaf: npt.NDArray[np.int64]) -> Mask:
    wanted = [leaf for leaf in Leaf if leaf.bucket in (Bucket.HOST_GAP, Bucket.UNATTRIBUTED)]
    return np.isin(leaf, [*wanted, Leaf.LATE_RANK])


def _sums(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up by leaf and call; ``inside`` is where most of the time was."""
    gaps = table.groupby(["leaf", "call", "inside", "ender", "step"], as_index=False, sort=False)["ns"].sum()
    places = gaps.groupby(["leaf", "call", "inside"], as_index=False)["ns"].sum()
    places = places.sort_values("ns", ascending=False, kind="stable").drop_duplicates(["leaf", "call"])
    whole = gaps.groupby(["leaf", "call", "ender", "step"], as_index=False, sort=False)["ns"].sum()
    sums = whole.groupby(["leaf", "call"], as_index=False).agg(
        total=("ns", "sum"), count=("ns", "size"), longest_ns=("ns", "max")
    )
    sums = sums.rename(columns={"total": "ns"}).merge(places[["leaf", "call", "inside"]], on=["leaf", "call"])
    sums = sums.sort_values(["ns", "leaf", "call"], ascending=[False, True, True], kind="stable").head(CALLS)
    kept: pd.DataFrame = sums[list(SUM_COLUMNS)].reset_index(drop=True)
    return kept


def _call_rows(events: pd.DataFrame, activities: pd.DataFrame, table: pd.DataFrame, host: Host) -> Array:
    """Return for each part the row of `Trace.events` that names it, -1 where nothing was recorded."""
    result = np.full(len(table), -1, np.int64)
    leaf, thread, ender = (table[name].to_numpy() for name in ("leaf", "thread", "ender"))
    gpu_side = np.isin(leaf, GPU_SIDE) & (ender >= 0)
    result[gpu_side] = activities["launch"].to_numpy()[ender[gpu_side]]
    copies = (thread < 0) & ~np.isin(leaf, GPU_SIDE) & (ender >= 0)
    result[copies] = activities["row"].to_numpy()[ender[copies]]
    spans = Intervals(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    kinds = events["kind"].to_numpy()
    telling = ~by_name(events, WIDE_ANNOTATION)
    calls = np.isin(kinds, (Kind.RUNTIME, Kind.OPERATOR))
    logs = by_name(events, LOGGING)
    codes = events["name"].cat.codes.to_numpy().astype(np.int64)
    for key in np.unique(thread[thread >= 0]):
        others = [other for other in host.threads if other != key]
        for value in np.unique(leaf[thread == key]):
            asked = np.flatnonzero((thread == key) & (leaf == value))
            parts = Intervals(table["start_ns"].to_numpy()[asked], table["end_ns"].to_numpy()[asked])
            if value in ORDER:
                chosen = host.named[Leaf(int(value))]
                if value == Leaf.COMPILE:
                    chosen = chosen | (calls & (spans.end - spans.start > STALL_NS))
                choices = [chosen]
            elif value == Leaf.LAUNCH_BOUND:
                choices = [calls & telling]
            else:
                choices = [logs & telling, telling]
            found = np.full(len(asked), -1, np.int64)
            for own in (int(key), *others):
                rows = host.rows.get(own, np.empty(0, np.intp))
                for chosen in choices:
                    if (found >= 0).all():
                        break
                    candidates = rows[chosen[rows]]
                    if value == Leaf.OTHER_HOST:
                        picked = _longest(spans, candidates, parts)
                    else:
                        picked = _most(spans, candidates, codes, parts)
                    found = np.where(found < 0, picked, found)
            if value in (Leaf.HOST_SYNC, Leaf.CHECKPOINT) and (found < 0).any():  # the queue refills behind the call
                rows = host.rows.get(int(key), np.empty(0, np.intp))
                rows = rows[host.named[Leaf.HOST_SYNC][rows]]
                found = np.where(found < 0, _last_ended(spans, rows, parts.start), found)
            result[asked] = found
    return result


def _longest(spans: Intervals, rows: Index, parts: Intervals) -> Array:
    """Return for disjoint parts in order the row that overlaps each most, -1 if none; of equals the innermost."""
    common = cross(Intervals(spans.start[rows], spans.end[rows]), parts)
    order = np.lexsort((-common.left, common.start - common.end, common.right))
    part, first = np.unique(common.right[order], return_index=True)
    result = np.full(len(parts.start), -1, np.int64)
    result[part] = rows[common.left[order[first]]]
    return result


def _most(spans: Intervals, rows: Index, codes: Array, parts: Intervals) -> Array:
    """Return for disjoint parts in order the longest row of the name that overlaps each most in sum, -1 if none.

    Rows inside others of `rows` do not count.
    """
    outer = rows[parents(Intervals(spans.start[rows], spans.end[rows])) < 0]
    common = cross(Intervals(spans.start[outer], spans.end[outer]), parts)
    table = pd.DataFrame(
        {"part": common.right, "name": codes[outer[common.left]], "ns": common.end - common.start, "row": common.left}
    )
    table = table.assign(sum=table.groupby(["part", "name"])["ns"].transform("sum"))
    table = table.sort_values(["part", "sum", "ns", "row"], ascending=[True, False, False, True], kind="stable")
    table = table.drop_duplicates("part")
    result = np.full(len(parts.start), -1, np.int64)
    result[table["part"].to_numpy()] = outer[table["row"].to_numpy()]
    return result


def _last_ended(spans: Intervals, rows: Index, instant: Array) -> Array:
    """Return the row that ended last before each instant, -1 if none; of equals the outer."""
    order = rows[np.lexsort((-spans.start[rows], spans.end[rows]))]
    slot = np.searchsorted(spans.end[order], instant, side="right") - 1
    return np.where(slot >= 0, order[np.maximum(slot, 0)] if len(order) else -1, -1)


def _around(events: pd.DataFrame, row: Array, host: Host) -> Array:
    """Return the innermost annotation around each row on its thread, else operator, that is not the row; -1 if none."""
    result = np.full(len(row), -1, np.int64)
    kinds = events["kind"].to_numpy()
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    outer = np.isin(kinds, (Kind.ANNOTATION, Kind.OPERATOR)) & ~by_name(events, WIDE_ANNOTATION)
    for rows in host.rows.values():
        own = rows[outer[rows]]
        mine = np.flatnonzero(np.isin(row, rows))
        if not len(own) or not len(mine):
            continue
        above = parents(Intervals(starts[own], ends[own]))
        at = innermost(Intervals(starts[own], ends[own]), starts[row[mine]])
        # Up to the row itself, where it is one of these, and one further.
        while (deeper := (at >= 0) & (own[np.maximum(at, 0)] > row[mine])).any():
            at = np.where(deeper, above[np.maximum(at, 0)], at)
        itself = (at >= 0) & (own[np.maximum(at, 0)] == row[mine])
        at = np.where(itself, above[np.maximum(at, 0)], at)
        nearest, top = at, at
        while (climbing := (top >= 0) & (kinds[own[np.maximum(top, 0)]] != Kind.ANNOTATION)).any():
            top = np.where(climbing, above[np.maximum(top, 0)], top)
        chosen = np.where(top >= 0, top, nearest)
        result[mine] = np.where(chosen >= 0, own[np.maximum(chosen, 0)], -1)
    return result


def _frames(events: pd.DataFrame, table: pd.DataFrame, host: Host) -> Array:
    """Return the innermost Python frame in the middle of each part on its thread, else on any, as rows; -1 if none."""
    kinds = events["kind"].to_numpy()
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    middle = (table["start_ns"].to_numpy() + table["end_ns"].to_numpy()) // 2
    thread = table["thread"].to_numpy()
    result = np.full(len(table), -1, np.int64)
    for own_thread in (True, False):
        for key, rows in host.rows.items():
            frames = rows[kinds[rows] == Kind.FRAME]
            asked = np.flatnonzero((result < 0) & (thread >= 0) & ((thread == key) | (not own_thread)))
            if len(frames) and len(asked):
                found = innermost(Intervals(starts[frames], ends[frames]), middle[asked])
                result[asked] = np.where(found >= 0, frames[np.maximum(found, 0)], -1)
    return result


def _thread_ids(events: pd.DataFrame, thread: Array, host: Host) -> Array:
    """Return the OS ids behind thread keys; -1 where there is none."""
    ids = {key: int(events["thread"].to_numpy()[rows[0]]) for key, rows in host.rows.items() if len(rows)}
    return np.array([ids.get(int(key), -1) for key in thread], np.int64)
