"""Why the GPU of a rank was idle, or only copied to or from the host (attribution rule 3.4)."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing, thread_keys
from traceaudit.events import Kind, Trace
from traceaudit.idle.calls import ORDER, Host, host_activity
from traceaudit.idle.edges import recorded_dependencies
from traceaudit.intervals import Array, Intervals, complement, cross, intersection, outside, union
from traceaudit.leaves import Leaf
from traceaudit.steps import queued_before

DEPENDENCY_NS = 5_000  # an activity that ended this shortly before another on a different stream released it
LATENCY_LIMIT_NS = 100_000  # a launched kernel that waits longer waits for something that was not recorded
LOOK_BACK = 16  # activities inspected before a gap's end
COLUMNS = ("start_ns", "end_ns", "leaf", "after", "ender", "thread", "dependency")


def resolve(
    trace: Trace,
    activities: pd.DataFrame,
    pieces: pd.DataFrame,
    main_thread: tuple[int, int] | None,
    host: Host | None = None,
) -> pd.DataFrame:
    """Give a leaf to every idle and host-copy piece of the base states.

    Returns a table of parts that partition those pieces: ``start_ns``, ``end_ns``, ``leaf`` (`Leaf`), ``after``: the
    communication that just ended and is charged with the idle time, whose leaf is decided later, -1 elsewhere;
    ``ender``: the activity that ended the gap, or the copy, -1 if none; ``thread``: key of the thread that was late,
    -1 where none was; ``dependency``: the activity that the ender waited for, -1 where unknown.
    """
    host = host_activity(trace, activities) if host is None else host
    idle = pieces[pieces["state"] == State.IDLE]
    copying = pieces[pieces["state"] == State.HOST_COPY]
    copy_leaf = _copy_leaves(trace, activities, host)
    owner = copying["owner"].to_numpy()
    copies = _labelled(copying["start_ns"].to_numpy(), copying["end_ns"].to_numpy(), copy_leaf[owner], ender=owner)
    parts = [copies, *_idle_parts(trace, activities, idle, host, copy_leaf, main_thread)]
    return pd.concat([part for part in parts if len(part)], ignore_index=True) if any(map(len, parts)) else copies


def _idle_parts(
    trace: Trace,
    activities: pd.DataFrame,
    idle: pd.DataFrame,
    host: Host,
    copy_leaf: Array,
    main_thread: tuple[int, int] | None,
) -> list[pd.DataFrame]:
    """Split idle gaps at the end of the launch that ends each: before it the host's, after it the GPU's."""
    events = trace.events
    keys = thread_keys(events)
    start, end = idle["start_ns"].to_numpy(), idle["end_ns"].to_numpy()
    ender = idle["owner"].to_numpy()
    known = np.maximum(ender, 0)
    launch = np.where(ender >= 0, activities["launch"].to_numpy()[known] if len(activities) else -1, -1)
    tail = ender < 0
    launched = np.minimum(events["end_ns"].to_numpy()[np.maximum(launch, 0)], end) if len(events) else end
    if len(activities):
        # The rest of a graph waits for its kernels before, unless the call still holds it back (HIP enqueues node by
        # node); what was queued before the recording waits for the GPU.
        held = (launched > start) & (end - start > LATENCY_LIMIT_NS)
        ready = (_later_of_launch(activities)[known] & ~held) | queued_before(activities)[known]
        launched = np.where(ready, start, launched)
        launch = np.where(ready & ~tail & (launch < 0), 0, launch)
    missing = ~tail & (launch < 0)
    early = ~tail & ~missing & (launched <= start)
    late = ~tail & ~missing & ~early
    main = _main_key(main_thread, host)
    thread = np.where(tail, main, keys[np.maximum(launch, 0)] if len(keys) else main)
    split = np.where(late, launched, np.where(tail, end, start))
    released, recorded = _released_by(trace, activities, start, end, ender, early)
    parts = [
        _labelled(start[missing], end[missing], Leaf.LAUNCH_MISSING, ender=ender[missing]),
        *_host_parts(start, split, thread, ender, late | tail, host),
        _labelled(split[late], end[late], _latency(end[late] - split[late]), ender=ender[late]),
        _dependency_parts(
            start[early], end[early], ender[early], released[early], recorded[early], activities, copy_leaf
        ),
    ]
    return [part[part["end_ns"] > part["start_ns"]] for part in parts]


def _later_of_launch(activities: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tell which activities are not the first that their launch started: those of a CUDA graph after its first."""
    launch = activities["launch"].to_numpy()
    later = np.ones(len(launch), np.bool_)
    later[np.unique(launch, return_index=True)[1]] = False  # activities are in the order of their starts
    return np.asarray(later & (launch >= 0))


def _main_key(main_thread: tuple[int, int] | None, host: Host) -> int:
    if main_thread is None:
        return host.threads[0] if host.threads else -1
    return int(np.int64(main_thread[0]) * np.int64(1_000_003) + np.int64(main_thread[1]))


def _labelled(
    start: Array,
    end: Array,
    leaf: Leaf | Array,
    after: Array | int = -1,
    *,
    ender: Array | int = -1,
    thread: int = -1,
    dependency: Array | int = -1,
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "start_ns": start,
            "end_ns": end,
            "leaf": np.int64(leaf) if isinstance(leaf, Leaf) else leaf,
            "after": after,
            "ender": ender,
            "thread": np.int64(thread),
            "dependency": dependency,
        }
    )


def _latency(length: Array) -> Array:
    return np.where(length > LATENCY_LIMIT_NS, int(Leaf.NOT_STARTED), int(Leaf.LAUNCH_LATENCY))


def _released_by(
    trace: Trace, activities: pd.DataFrame, start: Array, end: Array, ender: Array, asked: npt.NDArray[np.bool_]
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return for gaps the activity on another stream that released what ended them, -1 if none, and if it is recorded.

    That is the activity a recorded event names, if it ended last of all; else the one that ended last on another
    stream, shortly before the gap's end.
    """
    result = np.full(len(end), -1, np.int64)
    if not len(activities):
        return result, np.zeros(len(end), np.bool_)
    ends, streams = activities["end_ns"].to_numpy(), activities["stream"].to_numpy()
    named = recorded_dependencies(trace, activities)[np.maximum(ender, 0)]
    ended = ends[np.maximum(named, 0)]
    recorded = asked & (named >= 0) & (ended > start - DEPENDENCY_NS) & (ended <= end)
    result = np.where(recorded, named, result)
    order = np.argsort(ends, kind="stable")
    position = np.searchsorted(ends[order], end, side="right")
    own = streams[np.maximum(ender, 0)]
    for back in range(1, LOOK_BACK + 1):
        candidate = order[np.maximum(position - back, 0)]
        fits = (position >= back) & (ends[candidate] >= end - DEPENDENCY_NS) & (streams[candidate] != own)
        result = np.where(asked & fits & (result < 0), candidate, result)
    return result, recorded


def _dependency_parts(
    start: Array,
    end: Array,
    ender: Array,
    released: Array,
    recorded: npt.NDArray[np.bool_],
    activities: pd.DataFrame,
    copy_leaf: Array,
) -> pd.DataFrame:
    """Charge gaps of kernels that were launched in time to what released them, else to the launch."""
    state = np.where(
        released >= 0, activities["state"].to_numpy()[np.maximum(released, 0)] if len(activities) else 0, -1
    )
    after = np.where(state == State.COMMUNICATION, released, -1)
    leaf = _latency(end - start)
    leaf = np.where((state == State.COMPUTE) & ~recorded, int(Leaf.LAUNCH_LATENCY), leaf)
    if len(copy_leaf):
        leaf = np.where(state == State.HOST_COPY, copy_leaf[np.maximum(released, 0)], leaf)
    return _labelled(start, end, leaf, after, ender=ender, dependency=released)


def _host_parts(
    start: Array, end: Array, thread: Array, ender: Array, chosen: npt.NDArray[np.bool_], host: Host
) -> list[pd.DataFrame]:
    """Split the host's share of gaps by what the launching thread did, or the threads it was blocked on."""
    parts = []
    for key in np.unique(thread[chosen]):
        own = np.flatnonzero(chosen & (thread == key) & (end > start))
        own = own[np.argsort(start[own], kind="stable")]
        rest, gap = Intervals(start[own], end[own]), ender[own]
        blocked = _blocked(int(key), host, rest)
        for leaf, cover in _covers(int(key), host, blocked):
            taken = cross(rest, cover)
            parts.append(_labelled(taken.start, taken.end, leaf, ender=gap[taken.left], thread=int(key)))
            left = outside(rest, cover)
            rest, gap = Intervals(left.start, left.end), gap[left.left]
        parts.append(_labelled(rest.start, rest.end, Leaf.OTHER_HOST, ender=gap, thread=int(key)))
    return parts


def _blocked(key: int, host: Host, rest: Intervals) -> Intervals:
    """Return when a thread runs no call at all within the extent of some intervals."""
    if not len(rest.start):
        return rest
    calling = host.calling.get(key, Intervals(rest.start[:0], rest.end[:0]))
    return complement(calling, int(rest.start[0]), int(rest.end[-1]))


def _covers(key: int, host: Host, blocked: Intervals) -> list[tuple[Leaf, Intervals]]:
    """Return the causes in order, each with the time it held on the thread or on one it was blocked on.

    Between a checkpoint's copies and the next launch it is the checkpoint's unless something else held.
    """
    layers: list[tuple[Leaf, dict[int, Intervals]]] = [
        *((leaf, host.causes[leaf]) for leaf in ORDER if leaf != Leaf.HOST_SYNC),
        (Leaf.CHECKPOINT, host.bursts.refill),
        (Leaf.HOST_SYNC, host.causes[Leaf.HOST_SYNC]),
        (Leaf.LAUNCH_BOUND, host.looping),
    ]
    result: list[tuple[Leaf, Intervals]] = []
    for leaf, by_thread in layers:
        own = by_thread.get(key, Intervals(blocked.start[:0], blocked.end[:0]))
        others = [intersection(spans, blocked) for other, spans in by_thread.items() if other != key]
        starts = np.concatenate([own.start, *(spans.start for spans in others)])
        ends = np.concatenate([own.end, *(spans.end for spans in others)])
        result.append((leaf, union(starts, ends)))
    return result


def _copy_leaves(trace: Trace, activities: pd.DataFrame, host: Host) -> Array:
    """Return the leaf of each host copy, were it to run alone; meaningless for other activities."""
    events = trace.events
    launch = activities["launch"].to_numpy()
    backward = np.flatnonzero(
        np.array(
            [str(name).startswith("autograd::engine::evaluate_function") for name in events["name"].cat.categories],
            np.bool_,
        )[events["name"].cat.codes.to_numpy()]
        & (events["kind"].to_numpy() == Kind.OPERATOR)
    )
    in_backward = enclosing(events, backward, launch) >= 0
    called = np.where(
        launch >= 0, events["start_ns"].to_numpy()[np.maximum(launch, 0)], activities["start_ns"].to_numpy()
    )
    saved = _holds(host.causes[Leaf.CHECKPOINT], called) | host.bursts.copy
    end = activities["end_ns"].to_numpy()
    to_host = activities["to_host"].to_numpy()
    awaited = _holds(host.causes[Leaf.HOST_SYNC], end) | activities["pageable"].to_numpy()
    awaited = _any_of_run(awaited, to_host, activities)
    down = np.where(awaited, int(Leaf.HOST_SYNC), int(Leaf.OFFLOAD_COPY))
    up = np.where(in_backward, int(Leaf.OFFLOAD_COPY), int(Leaf.INPUT_COPY))
    return np.where(saved, int(Leaf.CHECKPOINT), np.where(to_host, down, up))


def _any_of_run(
    marked: npt.NDArray[np.bool_], member: npt.NDArray[np.bool_], activities: pd.DataFrame
) -> npt.NDArray[np.bool_]:
    """Spread a mark over the members that follow each other on one stream with nothing else between."""
    order = np.lexsort((activities["start_ns"].to_numpy(), activities["stream"].to_numpy()))
    stream = activities["stream"].to_numpy()[order]
    changes = (np.diff(member[order].astype(np.int8), prepend=0) != 0) | (np.diff(stream, prepend=-2) != 0)
    run = np.cumsum(changes)
    found = np.zeros(int(run.max(initial=0)) + 1, np.bool_)
    found[run[marked[order]]] = True
    result = np.empty_like(marked)
    result[order] = found[run]
    return np.asarray(result & member)


def _holds(by_thread: dict[int, Intervals], instant: Array) -> npt.NDArray[np.bool_]:
    """Tell at which instants a cause holds on any thread."""
    held = np.zeros(len(instant), np.bool_)
    for spans in by_thread.values():
        if len(spans.start):
            slot = np.searchsorted(spans.start, instant, side="right") - 1
            held |= (slot >= 0) & (instant < spans.end[np.maximum(slot, 0)])
    return held
