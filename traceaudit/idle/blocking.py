"""Exposed communication that blocked nothing: the host was late as well (attribution rule 2)."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State
from traceaudit.idle.calls import Host
from traceaudit.intervals import Array, Intervals, outside, union
from traceaudit.leaves import Leaf


def not_blocking(events: pd.DataFrame, activities: pd.DataFrame, pieces: pd.DataFrame, host: Host) -> Array:
    """Return for each activity how much of the time it owns as exposed communication would be a host gap without it.

    That is its time before the launch of the compute that ends the island, but for the time in which a thread of the
    host waits for the GPU, which may be for this communication, and in which it refills the queue up to the next
    launch. Where the launch is not recorded, nothing is.
    """
    owned = pieces[pieces["state"] == State.COMMUNICATION]
    start, end = owned["start_ns"].to_numpy(), owned["end_ns"].to_numpy()
    owner = owned["owner"].to_numpy()
    late = Intervals(start, np.clip(_launched(events, activities, end), start, end))
    waits = [spans for spans in host.causes[Leaf.HOST_SYNC].values() if len(spans.start)]
    if waits:
        waiting = union(np.concatenate([span.start for span in waits]), np.concatenate([span.end for span in waits]))
        free = outside(late, waiting)
        owner, late = owner[free.left], Intervals(free.start, free.end)
    return _sums(owner, late.end - late.start, len(activities))


def _launched(events: pd.DataFrame, activities: pd.DataFrame, island_end: Array) -> Array:
    """Return when the compute that ends an island was launched; long ago where nothing ends it or tells."""
    compute = np.flatnonzero(activities["state"].to_numpy() == State.COMPUTE)
    place = np.searchsorted(activities["start_ns"].to_numpy()[compute], island_end)
    launch = np.append(activities["launch"].to_numpy()[compute], -1)[place]
    ends = np.append(events["end_ns"].to_numpy(), np.iinfo(np.int64).min)
    return np.asarray(ends[launch], np.int64)


def _sums(owner: npt.NDArray[np.intp], ns: Array, size: int) -> Array:
    result = np.zeros(size, np.int64)
    np.add.at(result, owner, ns)
    return result
