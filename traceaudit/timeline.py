"""The base state of every instant on a rank: which one activity, or which idle gap, owns it (attribution rule 2)."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State
from traceaudit.intervals import Array, Intervals, complement, cross, outside, union

Index = npt.NDArray[np.intp]


def base_states(activities: pd.DataFrame, start_ns: int, end_ns: int) -> pd.DataFrame:
    """Return pieces that partition ``[start_ns, end_ns)``, sorted by start.

    Columns: ``start_ns``, ``end_ns``, ``state`` (`State`) and ``owner``: the index in `activities` of the activity
    that owns the piece; for an idle piece the activity that ends it (ties: lowest stream), -1 if none does.
    Activities must be sorted by start, stream and correlation.
    """
    spans = Intervals(activities["start_ns"].to_numpy(), activities["end_ns"].to_numpy())
    state = activities["state"].to_numpy()
    compute = np.flatnonzero(state == State.COMPUTE)
    communication = np.flatnonzero(state == State.COMMUNICATION)
    copies = np.flatnonzero(state == State.HOST_COPY)
    computing = union(spans.start[compute], spans.end[compute])
    busy = union(
        np.concatenate((computing.start, spans.start[communication])),
        np.concatenate((computing.end, spans.end[communication])),
    )
    parts = [
        (State.COMPUTE, *_first_started(spans, compute)),
        (State.COMMUNICATION, *_awaited(spans, communication, computing)),
        (State.HOST_COPY, *_uncovered(_first_started(spans, copies), busy)),
        (State.IDLE, *_gaps(spans, start_ns, end_ns)),
    ]
    table = pd.DataFrame(
        {
            "start_ns": np.concatenate([part.start for _, part, _ in parts]),
            "end_ns": np.concatenate([part.end for _, part, _ in parts]),
            "state": np.repeat([kind for kind, _, _ in parts], [len(owner) for _, _, owner in parts]).astype(np.int8),
            "owner": np.concatenate([owner for _, _, owner in parts]),
        }
    )
    return table.sort_values("start_ns", kind="stable", ignore_index=True)


def _first_started(spans: Intervals, chosen: Index) -> tuple[Intervals, Index]:
    """Give every instant to the activity that started first among those running; `chosen` is sorted by start."""
    start, end = spans.start[chosen], spans.end[chosen]
    reached = np.maximum.accumulate(end) if len(end) else end
    own = np.maximum(start, np.concatenate((start[:1], reached[:-1])))
    keep = end > own
    return Intervals(own[keep], end[keep]), chosen[keep]


def _awaited(spans: Intervals, chosen: Index, computing: Intervals) -> tuple[Intervals, Index]:
    """Give every instant of an island without compute to the communication that the compute waited for.

    Of those running, the one whose end is the latest inside the island; if none ends inside, the one that started
    first.
    """
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    islands = Intervals(
        np.concatenate(([low], computing.end)).astype(np.int64),
        np.concatenate((computing.start, [high])).astype(np.int64),
    )
    parts = cross(Intervals(spans.start[chosen], spans.end[chosen]), islands)
    owner = chosen[parts.left]
    inside = spans.end[owner] <= islands.end[parts.right]
    ending = _latest_end(Intervals(parts.start[inside], parts.end[inside]), owner[inside])
    passing = _first_of_island(
        parts.right[~inside], Intervals(parts.start[~inside], parts.end[~inside]), owner[~inside]
    )
    rest = _uncovered(passing, union(ending[0].start, ending[0].end))
    return (
        Intervals(np.concatenate((ending[0].start, rest[0].start)), np.concatenate((ending[0].end, rest[0].end))),
        np.concatenate((ending[1], rest[1])),
    )


def _latest_end(parts: Intervals, owner: Index) -> tuple[Intervals, Index]:
    """Give every instant to the part with the latest end (ties: the one that started first)."""
    order = np.lexsort((owner, parts.start, -parts.end))
    start, end, owner = parts.start[order], parts.end[order], owner[order]
    high = np.array([np.iinfo(np.int64).max], np.int64)
    taken = np.minimum.accumulate(np.concatenate((high, start)))[:-1]
    own = np.minimum(end, taken)
    keep = own > start
    return Intervals(start[keep], own[keep]), owner[keep]


def _first_of_island(island: Index, parts: Intervals, owner: Index) -> tuple[Intervals, Index]:
    """Keep the first started part of each island; all of them last until the island's end."""
    order = np.lexsort((owner, island))
    first = order[np.unique(island[order], return_index=True)[1]]
    return Intervals(parts.start[first], parts.end[first]), owner[first]


def _uncovered(owned: tuple[Intervals, Index], cover: Intervals) -> tuple[Intervals, Index]:
    rest = outside(owned[0], cover)
    return Intervals(rest.start, rest.end), owned[1][rest.left]


def _gaps(spans: Intervals, start_ns: int, end_ns: int) -> tuple[Intervals, Index]:
    """Return the idle gaps and the activity that ends each, -1 for a gap that runs to `end_ns`."""
    gaps = complement(union(spans.start, spans.end), start_ns, end_ns)
    slot = np.searchsorted(spans.start, gaps.end, side="left")
    ended = (
        (slot < len(spans.start)) & (spans.start[np.minimum(slot, max(len(spans.start) - 1, 0))] == gaps.end)
        if len(spans.start)
        else np.zeros(len(gaps.end), np.bool_)
    )
    return gaps, np.where(ended, slot, -1).astype(np.intp)


def overlapped(activities: pd.DataFrame) -> Intervals:
    """Return when the rank communicates under compute: time that costs nothing here."""
    state, start, end = (activities[name].to_numpy() for name in ("state", "start_ns", "end_ns"))
    computing = union(start[state == State.COMPUTE], end[state == State.COMPUTE])
    communicating = union(start[state == State.COMMUNICATION], end[state == State.COMMUNICATION])
    common = cross(communicating, computing)
    return Intervals(common.start, common.end)


def busy(activities: pd.DataFrame, state: State | None = None) -> Intervals:
    """Return when any activity runs, or any of one state."""
    chosen = activities if state is None else activities[activities["state"] == state]
    return union(chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy())


def within(parts: Intervals, windows: Intervals) -> Array:
    """Return how many nanoseconds of a union lie in each window."""
    common = cross(parts, windows)
    return np.bincount(common.right, common.end - common.start, len(windows.start)).astype(np.int64)
