"""Why the GPU of a rank was idle, or only copied to or from the host (attribution rule 3.4)."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing, thread_keys
from traceaudit.events import HOST_KINDS, Kind, Trace
from traceaudit.intervals import Array, Intervals, complement, cross, difference, intersection, outside, union
from traceaudit.leaves import Leaf
from traceaudit.nesting import is_leaf
from traceaudit.steps import LAUNCH_CALL

DEPENDENCY_NS = 5_000  # an activity that ended this shortly before another on a different stream released it
LATENCY_LIMIT_NS = 100_000  # a launched kernel that waits longer waits for something that was not recorded
STALL_NS = 1_000_000  # one call this long with nothing beneath it is no launch loop
HOLE_NS = 100_000  # operators and launches closer than this are back to back; between them runs Python
LOOK_BACK = 16  # activities inspected before a gap's end

# What the host did, by the names of its calls; the first cause that holds at an instant takes it.
CAUSES: tuple[tuple[Leaf, tuple[Kind, ...], re.Pattern[str]], ...] = (
    (
        Leaf.CHECKPOINT,
        HOST_KINDS,
        re.compile(
            r"(?:save|saving)\w*[_. -]?(?:checkpoint|ckpt)|(?:checkpoint|ckpt)\w*[_. :-]*sav"
            r"|torch/serialization\.py\(\d+\): save|distributed/checkpoint/.*save|dist_checkpointing/.*save",
            re.I,
        ),
    ),
    (
        Leaf.DATA_LOADER,
        HOST_KINDS,
        re.compile(
            r"^enumerate\((?:DataLoader|DataPipe)\)|DataLoaderIter\.__next__|dataloader\.py\(\d+\): __next__"
            r"|^\W*(?:data_?load(?:er|ing)?|(?:get|next|fetch|fetching|load)_?batch|load_?data)\b",
            re.I,
        ),
    ),
    (Leaf.GC, HOST_KINDS, re.compile(r"^Python GC|gc\.collect|built-in function collect>")),
    (
        Leaf.COMPILE,
        HOST_KINDS,
        re.compile(r"\(dynamo_timed\)|autotun|_compile\.|compile_fx|(?:cu|cuda|hip)(?:Module|Library)Load"),
    ),
    (
        Leaf.ALLOCATOR,
        (Kind.RUNTIME,),
        re.compile(
            r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostMalloc|HostFree|HostRegister)|^(?:cu|hip)Mem(?:Create|Map|Unmap|Release)"
        ),
    ),
    (
        Leaf.LATE_RANK,
        HOST_KINDS,
        re.compile(r"^gloo:|monitored_barrier|store_(?:based_)?barrier|TCPStore|(?:broadcast|gather|scatter)_object"),
    ),
    (
        Leaf.HOST_SYNC,
        HOST_KINDS,
        re.compile(
            r"^(?:cuda|hip|cu)(?:Device|Stream|Event|Ctx)Synchronize|^(?:cuda|hip)Memcpy(?:WithStream|\dD)?$"
            r"|^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero|equal)$"
        ),
    ),
)
WIDE_ANNOTATION = re.compile(r"^ProfilerStep#")


@dataclass(frozen=True)
class Host:
    """What the host threads of a rank did, by thread.

    Attributes:
        causes: spans of each cause of `CAUSES` by thread key, as unions.
        looping: operators and launches back to back, by thread key.
        calling: any call or annotation of interest, by thread key; outside it a thread is blocked or in plain Python.
        threads: thread keys, those that launch first.
    """

    causes: dict[Leaf, dict[int, Intervals]]
    looping: dict[int, Intervals]
    calling: dict[int, Intervals]
    threads: tuple[int, ...]


def host_activity(trace: Trace, activities: pd.DataFrame) -> Host:
    """Sort the host rows of a rank by what they would mean for an idle GPU."""
    events = trace.events
    keys = thread_keys(events)
    kinds, codes = events["kind"].to_numpy(), events["name"].cat.codes.to_numpy()
    spans = Intervals(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    names = [str(name) for name in events["name"].cat.categories]
    launching = np.zeros(len(events), np.bool_)
    linked = activities["launch"].to_numpy()
    launching[linked[linked >= 0]] = True
    launching |= (kinds == Kind.RUNTIME) & np.array([bool(LAUNCH_CALL.search(name)) for name in names], np.bool_)[codes]
    first_launch = _first_launches(activities, events)
    causes: dict[Leaf, dict[int, Intervals]] = {leaf: {} for leaf, _, _ in CAUSES}
    looping, calling = {}, {}
    host = np.flatnonzero(np.isin(kinds, HOST_KINDS))
    threads = _by_launches(keys, host, launching)
    matches = [
        (leaf, np.isin(kinds, allowed) & np.array([bool(pattern.search(name)) for name in names], np.bool_)[codes])
        for leaf, allowed, pattern in CAUSES
    ]
    blocking = np.zeros(len(events), np.bool_)
    pageable = activities["launch"].to_numpy()[activities["pageable"].to_numpy() & (linked >= 0)]
    blocking[pageable] = True
    wide = np.array([bool(WIDE_ANNOTATION.search(name)) for name in names], np.bool_)[codes]
    for key in threads:
        own = host[keys[host] == key]
        stalled = _stalled_calls(spans, kinds, own)
        for leaf, matching in matches:
            rows = own[matching[own] | (blocking[own] if leaf == Leaf.HOST_SYNC else False)]
            start, end = spans.start[rows], spans.end[rows]
            if leaf == Leaf.HOST_SYNC:
                end = _refilled(end, np.sort(spans.start[own[launching[own]]]))
            if leaf == Leaf.COMPILE:
                lazy = own[stalled & first_launch[own]]
                start, end = np.concatenate((start, spans.start[lazy])), np.concatenate((end, spans.end[lazy]))
            causes[leaf][key] = union(start, end)
        calls = own[np.isin(kinds[own], (Kind.RUNTIME, Kind.OPERATOR))]
        loop = _closed(union(spans.start[calls], spans.end[calls]))
        still = own[stalled]
        looping[key] = difference(loop, union(spans.start[still], spans.end[still]))
        marked = own[~wide[own]]
        calling[key] = _closed(union(spans.start[marked], spans.end[marked]))
    return Host(causes, looping, calling, threads)


def _by_launches(keys: Array, host: npt.NDArray[np.intp], launching: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    found, inverse = np.unique(keys[host], return_inverse=True)
    count = np.bincount(inverse, launching[host], len(found))
    return tuple(int(found[index]) for index in np.argsort(-count, kind="stable"))


def _first_launches(activities: pd.DataFrame, events: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tell which rows are the first launch of their kernel in the trace."""
    first = np.zeros(len(events), np.bool_)
    linked = activities[activities["launch"] >= 0].sort_values("launch", kind="stable")
    code = events["name"].cat.codes.to_numpy()[linked["row"].to_numpy()]
    first[linked["launch"].to_numpy()[np.unique(code, return_index=True)[1]]] = True
    return first


def _stalled_calls(spans: Intervals, kinds: npt.NDArray[np.int8], own: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Tell which calls of one thread are long and have nothing beneath them."""
    call = np.isin(kinds[own], (Kind.RUNTIME, Kind.OPERATOR))
    long = spans.end[own] - spans.start[own] > STALL_NS
    return np.asarray(call & long & is_leaf(Intervals(spans.start[own], spans.end[own])))


def _refilled(end: Array, launches: Array) -> Array:
    """Extend the end of a synchronisation to the start of the next launch: the drained queue refills."""
    if not len(launches):
        return end
    slot = np.searchsorted(launches, end, side="left")
    return np.where(slot < len(launches), launches[np.minimum(slot, len(launches) - 1)], end)


def _closed(spans: Intervals) -> Intervals:
    """Close holes too short to be anything but Python between two calls."""
    if len(spans.start) < 2:
        return spans
    apart = spans.start[1:] - spans.end[:-1] > HOLE_NS
    return Intervals(
        spans.start[np.concatenate(([True], apart))],
        spans.end[np.concatenate((apart, [True]))],
    )


def resolve(
    trace: Trace, activities: pd.DataFrame, pieces: pd.DataFrame, main_thread: tuple[int, int] | None
) -> pd.DataFrame:
    """Give a leaf to every idle and host-copy piece of the base states.

    Returns a table of parts that partition those pieces: ``start_ns``, ``end_ns``, ``leaf`` (`Leaf`) and ``after``:
    the communication that just ended and is charged with the idle time, whose leaf is decided later; -1 elsewhere.
    """
    host = host_activity(trace, activities)
    idle = pieces[pieces["state"] == State.IDLE]
    copying = pieces[pieces["state"] == State.HOST_COPY]
    copy_leaf = _copy_leaves(trace, activities, host)
    copies = copying.assign(leaf=copy_leaf[copying["owner"].to_numpy()], after=-1)[
        ["start_ns", "end_ns", "leaf", "after"]
    ]
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
    launch = np.where(ender >= 0, activities["launch"].to_numpy()[np.maximum(ender, 0)] if len(activities) else -1, -1)
    tail = ender < 0
    launched = np.minimum(events["end_ns"].to_numpy()[np.maximum(launch, 0)], end) if len(events) else end
    missing = ~tail & (launch < 0)
    early = ~tail & ~missing & (launched <= start)
    late = ~tail & ~missing & ~early
    main = _main_key(main_thread, host)
    thread = np.where(tail, main, keys[np.maximum(launch, 0)])
    split = np.where(late, launched, np.where(tail, end, start))
    released = _released_by(activities, end, ender, early)
    parts = [
        _labelled(start[missing], end[missing], Leaf.LAUNCH_MISSING),
        *_host_parts(start, split, thread, late | tail, host),
        _labelled(split[late], end[late], _latency(end[late] - split[late])),
        *_dependency_parts(start[early], end[early], released[early], activities, copy_leaf),
    ]
    return [part[part["end_ns"] > part["start_ns"]] for part in parts]


def _main_key(main_thread: tuple[int, int] | None, host: Host) -> int:
    if main_thread is None:
        return host.threads[0] if host.threads else -1
    return int(np.int64(main_thread[0]) * np.int64(1_000_003) + np.int64(main_thread[1]))


def _labelled(start: Array, end: Array, leaf: Leaf | Array, after: Array | int = -1) -> pd.DataFrame:
    return pd.DataFrame(
        {"start_ns": start, "end_ns": end, "leaf": np.int64(leaf) if isinstance(leaf, Leaf) else leaf, "after": after}
    )


def _latency(length: Array) -> Array:
    return np.where(length > LATENCY_LIMIT_NS, int(Leaf.NOT_STARTED), int(Leaf.LAUNCH_LATENCY))


def _released_by(activities: pd.DataFrame, end: Array, ender: Array, asked: npt.NDArray[np.bool_]) -> Array:
    """Return for gaps the activity on another stream that ended last, shortly before the gap's end; -1 if none."""
    result = np.full(len(end), -1, np.int64)
    if not len(activities):
        return result
    ends, streams = activities["end_ns"].to_numpy(), activities["stream"].to_numpy()
    order = np.argsort(ends, kind="stable")
    position = np.searchsorted(ends[order], end, side="right")
    own = streams[np.maximum(ender, 0)]
    for back in range(1, LOOK_BACK + 1):
        candidate = order[np.maximum(position - back, 0)]
        fits = (position >= back) & (ends[candidate] >= end - DEPENDENCY_NS) & (streams[candidate] != own)
        result = np.where(asked & fits & (result < 0), candidate, result)
    return result


def _dependency_parts(
    start: Array, end: Array, released: Array, activities: pd.DataFrame, copy_leaf: Array
) -> list[pd.DataFrame]:
    """Charge gaps of kernels that were launched in time to what released them, else to the launch."""
    state = np.where(
        released >= 0, activities["state"].to_numpy()[np.maximum(released, 0)] if len(activities) else 0, -1
    )
    after = np.where(state == State.COMMUNICATION, released, -1)
    leaf = _latency(end - start)
    leaf = np.where(state == State.COMPUTE, int(Leaf.LAUNCH_LATENCY), leaf)
    if len(copy_leaf):
        leaf = np.where(state == State.HOST_COPY, copy_leaf[np.maximum(released, 0)], leaf)
    return [_labelled(start, end, leaf, after)]


def _host_parts(
    start: Array, end: Array, thread: Array, chosen: npt.NDArray[np.bool_], host: Host
) -> list[pd.DataFrame]:
    """Split the host's share of gaps by what the launching thread did, or the threads it was blocked on."""
    parts = []
    for key in np.unique(thread[chosen]):
        own = chosen & (thread == key) & (end > start)
        rest = union_of_disjoint(start[own], end[own])
        blocked = _blocked(int(key), host, rest)
        for leaf, cover in _covers(int(key), host, blocked):
            taken = cross(rest, cover)
            parts.append(_labelled(taken.start, taken.end, leaf))
            left = outside(rest, cover)
            rest = Intervals(left.start, left.end)
        parts.append(_labelled(rest.start, rest.end, Leaf.OTHER_HOST))
    return parts


def union_of_disjoint(start: Array, end: Array) -> Intervals:
    """Return disjoint intervals in order, without joining those that touch."""
    order = np.argsort(start, kind="stable")
    return Intervals(start[order], end[order])


def _blocked(key: int, host: Host, rest: Intervals) -> Intervals:
    """Return when a thread runs no call at all within the extent of some intervals."""
    if not len(rest.start):
        return rest
    calling = host.calling.get(key, Intervals(rest.start[:0], rest.end[:0]))
    return complement(calling, int(rest.start[0]), int(rest.end[-1]))


def _covers(key: int, host: Host, blocked: Intervals) -> list[tuple[Leaf, Intervals]]:
    """Return the causes in order, each with the time it held on the thread or on one it was blocked on."""
    layers = [(leaf, host.causes[leaf]) for leaf, _, _ in CAUSES] + [(Leaf.LAUNCH_BOUND, host.looping)]
    result = []
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
    saved = _holds(host.causes[Leaf.CHECKPOINT], called)
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
