"""What the host threads of a rank did, sorted by what it would mean for an idle GPU (attribution rule 3.4)."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, thread_keys
from traceaudit.events import HOST_KINDS, Kind, Trace, frame_matters
from traceaudit.intervals import Array, Intervals, covers, difference, empty, union
from traceaudit.leaves import Leaf
from traceaudit.nesting import is_leaf
from traceaudit.steps import LAUNCH_CALL, PROFILER_STEP

Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]

STALL_NS = 1_000_000  # one call this long with nothing beneath it is no launch loop
HOLE_NS = 100_000  # operators and launches closer than this are back to back; between them runs Python
BURST_BYTES = 500_000_000  # copies to the host in a row, with nothing launched between, that are a checkpoint's:
BURST_COPIES, BURST_LEAST_BYTES = 20, 16 << 20  # together so long, or so many that are together not tiny

# What the host did, by the names of its calls; the first leaf of `ORDER` that holds at an instant takes it.
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
            r"|^\W*(?:data_?load(?:er|ing)?|(?:get|next|fetch|fetching|load)_?batch|load_?data)\b"
            r"|\.py\(\d+\): (?:get|next|fetch|load)_batch$",
            re.I,
        ),
    ),
    (Leaf.GC, HOST_KINDS, re.compile(r"^Python GC|gc\.collect|built-in function collect>")),
    (
        Leaf.COMPILE,
        (Kind.RUNTIME, Kind.OPERATOR, Kind.ANNOTATION),
        re.compile(r"\(dynamo_timed\)|autotun|_compile\.|compile_fx|(?:cu|cuda|hip)(?:Module|Library)Load"),
    ),
    (
        Leaf.COMPILE,
        (Kind.FRAME,),  # the frames of compiled code at work stand in files of the same names
        re.compile(
            r"torch/_dynamo/convert_frame\.py\(\d+\): |(?:benchmark_all_configs|autotune_to_one_config)$"
            r"|triton/compiler/compiler\.py\(\d+\): compile$|torch/utils/cpp_extension\.py\(\d+\): load"
        ),
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
ORDER = tuple(dict.fromkeys(leaf for leaf, _, _ in CAUSES))
WIDE_ANNOTATION = re.compile(r"^ProfilerStep#")
SYNCHRONISATION = re.compile(r"^(?:cuda|hip|cu)(?:Device|Stream|Event|Ctx)Synchronize")
WHOLE_DEVICE = re.compile(r"^(?:cuda|hip)DeviceSynchronize|^cuCtxSynchronize")
FREES = re.compile(r"^(?:cuda|hip)Free(?:Async)?$|^(?:cu|hip)Mem(?:Unmap|Release)$")
ALLOCATES = re.compile(r"^(?:cuda|hip)Malloc(?:Async)?$|^(?:cu|hip)MemCreate$")
LOADING = re.compile(r"Lazy Function Loading|Runtime Triggered Module Loading")  # rows of the profiler without a thread


@dataclass(frozen=True)
class Bursts:
    """Runs of copies to the host that no annotation explains: a checkpoint being taken.

    Attributes:
        copy: which activities belong to one.
        host: by thread key, from the first launch of a burst to the end of the last call that waited for a copy.
        refill: by thread key, from there to the next launch.
        awaited: of each burst, whether the host waited for its copies.
        bytes: of each burst.
    """

    copy: Mask
    host: dict[int, Intervals]
    refill: dict[int, Intervals]
    awaited: Mask
    bytes: Array


@dataclass(frozen=True)
class Host:
    """What the host threads of a rank did, by thread.

    Attributes:
        causes: spans of each leaf of `ORDER` by thread key, as unions.
        looping: operators and launches back to back, by thread key.
        calling: any call or annotation of interest, by thread key; outside it a thread is blocked or in plain Python.
        threads: thread keys, those that launch first.
        rows: host rows of each thread, as rows of `Trace.events` in its order.
        named: rows that a leaf's rule names.
        bursts: checkpoints without annotation.
        retries: of the allocator: when it freed what it held to allocate again, by thread key.
        final_sync: row of the profiler's own synchronisation when it stops; -1 if there is none.
    """

    causes: dict[Leaf, dict[int, Intervals]]
    looping: dict[int, Intervals]
    calling: dict[int, Intervals]
    threads: tuple[int, ...]
    rows: dict[int, Index]
    named: dict[Leaf, Mask]
    bursts: Bursts
    retries: dict[int, Intervals]
    final_sync: int


def by_name(events: pd.DataFrame, pattern: re.Pattern[str]) -> Mask:
    """Tell which rows have a name that a pattern finds; each distinct name is looked at once."""
    found = np.array([pattern.search(str(name)) is not None for name in events["name"].cat.categories], np.bool_)
    return found[events["name"].cat.codes.to_numpy()] if len(events) else np.zeros(0, np.bool_)


def host_activity(trace: Trace, activities: pd.DataFrame) -> Host:
    """Sort the host rows of a rank by what they would mean for an idle GPU."""
    events = trace.events
    keys = thread_keys(events)
    kinds = events["kind"].to_numpy()
    spans = Intervals(events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    linked = activities["launch"].to_numpy()
    launching = np.zeros(len(events), np.bool_)
    launching[linked[linked >= 0]] = True
    launching |= (kinds == Kind.RUNTIME) & by_name(events, LAUNCH_CALL)
    host = np.flatnonzero(np.isin(kinds, HOST_KINDS))
    threads = _by_launches(keys, host, launching)
    rows = {key: host[keys[host] == key] for key in threads}
    final_sync = _final_sync(events, spans, launching)
    named = _named(events, activities, final_sync)
    first_launch = _first_launches(activities, events)
    loading = np.flatnonzero((kinds == Kind.OVERHEAD) & by_name(events, LOADING))
    passing = (kinds == Kind.FRAME) & ~_kept_frames(events)
    wide = by_name(events, WIDE_ANNOTATION)
    causes: dict[Leaf, dict[int, Intervals]] = {leaf: {} for leaf in ORDER}
    looping, calling, retries = {}, {}, {}
    bursts = _bursts(events, activities, keys, spans, launching, named[Leaf.HOST_SYNC])
    for key, own in rows.items():
        stalled = _stalled_calls(spans, kinds, own)
        retries[key] = _retries(events, spans, own[kinds[own] == Kind.RUNTIME])
        named[Leaf.HOST_SYNC][own[covers(retries[key], spans.start[own])]] = False
        more = {
            Leaf.CHECKPOINT: bursts.host.get(key, empty()),
            Leaf.COMPILE: _loaded(spans, own, stalled & first_launch[own], loading, kinds),
            Leaf.ALLOCATOR: retries[key],
        }
        for leaf in ORDER:
            matching = own[named[leaf][own]]
            start, end = spans.start[matching], spans.end[matching]
            extra = more.get(leaf, empty())
            causes[leaf][key] = union(np.concatenate((start, extra.start)), np.concatenate((end, extra.end)))
        calls = own[np.isin(kinds[own], (Kind.RUNTIME, Kind.OPERATOR))]
        loop = closed(union(spans.start[calls], spans.end[calls]))
        still = own[stalled]
        looping[key] = difference(loop, union(spans.start[still], spans.end[still]))
        marked = own[~wide[own] & ~passing[own]]
        calling[key] = closed(union(spans.start[marked], spans.end[marked]))
    _refill(causes[Leaf.HOST_SYNC], calling, rows, spans, named[Leaf.HOST_SYNC], launching)
    return Host(causes, looping, calling, threads, rows, named, bursts, retries, final_sync)


def _by_launches(keys: Array, host: Index, launching: Mask) -> tuple[int, ...]:
    number, found = pd.factorize(keys[host], sort=True)
    count = np.bincount(number, launching[host], len(found))
    return tuple(int(found[index]) for index in np.argsort(-count, kind="stable"))


def _kept_frames(events: pd.DataFrame) -> Mask:
    """Tell which rows have the name of a frame that is kept whatever its length."""
    kept = np.array([frame_matters(str(name)) for name in events["name"].cat.categories], np.bool_)
    return kept[events["name"].cat.codes.to_numpy()] if len(events) else np.zeros(0, np.bool_)


def _named(events: pd.DataFrame, activities: pd.DataFrame, final_sync: int) -> dict[Leaf, Mask]:
    """Return the rows that the rule of each leaf names; a pageable copy's call waits for the copy."""
    kinds = events["kind"].to_numpy()
    named = {leaf: np.zeros(len(events), np.bool_) for leaf in ORDER}
    for leaf, allowed, pattern in CAUSES:
        named[leaf] |= np.isin(kinds, allowed) & by_name(events, pattern)
    launch = activities["launch"].to_numpy()
    named[Leaf.HOST_SYNC][launch[activities["pageable"].to_numpy() & (launch >= 0)]] = True
    if final_sync >= 0:
        named[Leaf.HOST_SYNC][final_sync] = False
    return named


def _final_sync(events: pd.DataFrame, spans: Intervals, launching: Mask) -> int:
    """Return the row of the synchronisation by which the profiler stops; -1 if there is none.

    Nothing is launched after it, and it stands outside the steps.
    """
    waits = np.flatnonzero((events["kind"].to_numpy() == Kind.RUNTIME) & by_name(events, WHOLE_DEVICE))
    if not len(waits) or not launching.any():
        return -1
    last = int(waits[np.argmax(spans.start[waits])])
    steps = by_name(events, PROFILER_STEP) & np.isin(events["kind"].to_numpy(), (Kind.ANNOTATION, Kind.OPERATOR))
    ended = max(int(spans.start[launching].max()), int(spans.end[steps].max()) if steps.any() else 0)
    return last if int(spans.start[last]) >= ended else -1


def _first_launches(activities: pd.DataFrame, events: pd.DataFrame) -> Mask:
    """Tell which rows are the first launch of their kernel in the trace; copies load no code."""
    first = np.zeros(len(events), np.bool_)
    kernel = events["kind"].to_numpy()[activities["row"].to_numpy()] == Kind.KERNEL
    linked = activities[(activities["launch"].to_numpy() >= 0) & kernel].sort_values("launch", kind="stable")
    code = events["name"].cat.codes.to_numpy()[linked["row"].to_numpy()]
    first[linked["launch"].to_numpy()[np.unique(code, return_index=True)[1]]] = True
    return first


def _stalled_calls(spans: Intervals, kinds: npt.NDArray[np.int8], own: Index) -> Mask:
    """Tell which calls of one thread are long and have no call or operator beneath them."""
    call = np.isin(kinds[own], (Kind.RUNTIME, Kind.OPERATOR, Kind.ANNOTATION))
    long = spans.end[own] - spans.start[own] > STALL_NS
    result = np.zeros(len(own), np.bool_)
    calls = np.flatnonzero(call)
    result[calls] = is_leaf(Intervals(spans.start[own[calls]], spans.end[own[calls]]))
    return np.asarray(result & long & (kinds[own] != Kind.ANNOTATION))


def _loaded(spans: Intervals, own: Index, lazy: Mask, loading: Index, kinds: npt.NDArray[np.int8]) -> Intervals:
    """Return when a thread loaded kernels: long first launches, and rows of loading that began in one of its calls."""
    start, end = spans.start[own[lazy]], spans.end[own[lazy]]
    calls = own[kinds[own] == Kind.RUNTIME]
    if len(loading) and len(calls):
        slot = np.searchsorted(spans.start[calls], spans.start[loading], side="right") - 1
        inside = (slot >= 0) & (spans.start[loading] < spans.end[calls[np.maximum(slot, 0)]])
        start = np.concatenate((start, spans.start[loading[inside]]))
        end = np.concatenate((end, spans.end[loading[inside]]))
    return Intervals(start, end)


def _retries(events: pd.DataFrame, spans: Intervals, calls: Index) -> Intervals:
    """Return when a thread's allocator freed what it held and asked again, with the synchronisations in between.

    That is a run of allocations, frees and synchronisations with no other call between them, that holds a free and an
    allocation after it.
    """
    codes = events["name"].cat.codes.to_numpy()[calls]
    texts = [str(name) for name in events["name"].cat.categories]
    frees, asks, waits = (
        np.array([pattern.search(text) is not None for text in texts], np.bool_)[codes]
        if len(calls)
        else np.zeros(0, np.bool_)
        for pattern in (FREES, ALLOCATES, SYNCHRONISATION)
    )
    member = frees | asks | waits
    run = np.cumsum(np.diff(member.astype(np.int8), prepend=0) != 0)
    starts, ends = [], []
    for number in np.unique(run[frees]):
        own = np.flatnonzero(run == number)
        freed = own[frees[own]][0]
        asked = own[asks[own]]
        if not len(asked) or asked[-1] < freed:
            continue
        begun = asked[asked < freed]
        first = begun[-1] if len(begun) else freed
        before = own[(own < first) & waits[own]]
        if not len(begun) and len(before) and before[-1] == freed - 1:
            first = before[-1]
        starts.append(int(spans.start[calls[first]]))
        ends.append(int(spans.end[calls[asked[-1]]]))
    return Intervals(np.array(starts, np.int64), np.array(ends, np.int64))


def _refill(
    causes: dict[int, Intervals],
    calling: dict[int, Intervals],
    rows: dict[int, Index],
    spans: Intervals,
    waits: Mask,
    launching: Mask,
) -> None:
    """Extend synchronisations to the start of the next launch on any thread: the drained queue refills.

    Where another thread makes that launch, which was idle when the synchronisation ended (the backward's), the time in
    between is the synchronisation's on that thread, too.
    """
    launches = np.concatenate([own[launching[own]] for own in rows.values()] or [np.empty(0, np.intp)])
    by_thread = np.concatenate([np.full(int(launching[own].sum()), key) for key, own in rows.items()] or [launches])
    order = np.argsort(spans.start[launches], kind="stable")
    started, by_thread = spans.start[launches][order], by_thread[order]
    if not len(started):
        return
    for key, own in rows.items():
        end = spans.end[own[waits[own]]]
        slot = np.searchsorted(started, end, side="left")
        followed = slot < len(started)
        end, slot = end[followed], slot[followed]
        for other in np.unique(by_thread[slot]):
            mine = by_thread[slot] == other
            idle = mine & ~covers(calling[int(other)], end)
            for thread, chosen in ((key, mine), (int(other), idle)):
                old = causes[thread]
                causes[thread] = union(
                    np.concatenate((old.start, end[chosen])), np.concatenate((old.end, started[slot[chosen]]))
                )


def closed(spans: Intervals) -> Intervals:
    """Close holes too short to be anything but Python between two calls."""
    if len(spans.start) < 2:
        return spans
    apart = spans.start[1:] - spans.end[:-1] > HOLE_NS
    return Intervals(
        spans.start[np.concatenate(([True], apart))],
        spans.end[np.concatenate((apart, [True]))],
    )


def _bursts(
    events: pd.DataFrame, activities: pd.DataFrame, keys: Array, spans: Intervals, launching: Mask, waits: Mask
) -> Bursts:
    """Find the runs of copies to the host that are too long to be anything but the state being saved.

    A run that comes back, as copies to the device in a row of at least half the bytes before the next run, is state
    kept on the host instead (an offloaded optimizer), and no checkpoint.
    """
    launch = activities["launch"].to_numpy()
    linked = np.flatnonzero(launch >= 0)
    order = linked[np.argsort(spans.start[launch[linked]], kind="stable")]
    moved = np.maximum(events["bytes"].to_numpy()[activities["row"].to_numpy()[order]], 0)
    host_copy = activities["state"].to_numpy()[order] == State.HOST_COPY
    down = host_copy & activities["to_host"].to_numpy()[order]
    kind = np.where(down, 1, np.where(host_copy, 2, 0))
    run = np.cumsum(np.diff(kind, prepend=-1) != 0) - 1
    total, count = np.bincount(run, moved).astype(np.int64), np.bincount(run)
    kind_of = kind[np.unique(run, return_index=True)[1]] if len(run) else np.zeros(0, np.int64)
    long = (total >= BURST_BYTES) | ((count >= BURST_COPIES) & (total >= BURST_LEAST_BYTES))
    chosen = [
        int(number) for number in np.flatnonzero(long & (kind_of == 1)) if not _comes_back(int(number), kind_of, total)
    ]
    copy = np.zeros(len(activities), np.bool_)
    host: dict[int, list[tuple[int, int]]] = {}
    refill: dict[int, list[tuple[int, int]]] = {}
    awaited = []
    for number in chosen:
        own = order[run == number]
        copy[own] = True
        key = int(keys[launch[own[0]]])
        rows = np.flatnonzero((keys == key) & (waits | launching))
        first, last = int(spans.start[launch[own[0]]]), int(spans.end[launch[own]].max())
        ended = int(activities["end_ns"].to_numpy()[own].max())
        later = rows[launching[rows] & (spans.start[rows] >= last)]
        following = int(spans.start[later].min()) if len(later) else None
        held = rows[waits[rows] & (spans.end[rows] >= ended) & (spans.start[rows] >= first)]
        held = held[spans.start[held] < (following if following is not None else np.iinfo(np.int64).max)]
        awaited.append(bool(len(held)))
        end = max(last, int(spans.end[held].min())) if len(held) else last
        host.setdefault(key, []).append((first, end))
        if len(held) and following is not None and following > end:
            refill.setdefault(key, []).append((end, following))
    return Bursts(copy, _unions(host), _unions(refill), np.array(awaited, np.bool_), total[chosen])


def _comes_back(number: int, kind: npt.NDArray[np.int64], total: Array) -> bool:
    """Tell whether a run of copies to the host is followed by one back before the next to the host."""
    later = np.arange(len(kind)) > number
    again = np.flatnonzero(later & (kind == 1) & (total * 2 >= total[number]))
    until = int(again[0]) if len(again) else len(kind)
    back = (kind == 2) & later & (np.arange(len(kind)) < until)
    return bool((total[back] * 2 >= total[number]).any())


def _unions(spans: dict[int, list[tuple[int, int]]]) -> dict[int, Intervals]:
    return {
        key: union(np.array([start for start, _ in listed], np.int64), np.array([end for _, end in listed], np.int64))
        for key, listed in spans.items()
    }
