"""When the last participant of each collective arrived, and who it was (attribution rules 3.2 and 4)."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.intervals import Array
from traceaudit.ranks.align import Clock, by_rank
from traceaudit.ranks.instances import Instances, Integers
from traceaudit.ranks.matching import ENDING_TOGETHER, Matching

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


@dataclass(frozen=True)
class Arrivals:
    """The arrival that each communication waited for, by row of the table of communications.

    Attributes:
        awaited_ns: on the clock of the row's rank; meaningless where not `known`.
        awaited_rank: the rank that arrived then.
        known: the row is matched, and clocks or durations tell the arrival.
        aligned_ns: start of each row on the aligned clock; its own where the rank is not aligned.
        by_duration: the clocks could not be compared: the shortest duration tells the transfer.
    """

    awaited_ns: Array
    awaited_rank: Integers
    known: npt.NDArray[np.bool_]
    aligned_ns: Array
    by_duration: npt.NDArray[np.bool_]


def arrivals(table: pd.DataFrame, matching: Matching, clock: Clock) -> tuple[Arrivals, Clock]:
    """Return the arrivals, and the clock with its disagreement to the clock-free method.

    Rooted collectives wait for their root alone. Where the hosts of an instance are not tied by evidence, the last
    arrival is the end minus the shortest duration of the instance, for kinds that all leave together.
    """
    if not len(table):
        none = np.empty(0, np.int64)
        nothing = np.empty(0, np.bool_)
        return Arrivals(none, none, nothing, none, nothing), clock
    rank, start, end = (table[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    shift = clock.offsets(rank, start)
    aligned = start - shift
    rows = matching.rows
    matched = matching.instance >= 0
    comparable = rows.spread(_comparable(table, rows, clock), False)
    together = table["kind"].isin(ENDING_TOGETHER).to_numpy()
    by_duration = matched & ~comparable & together
    shortest, quickest = _shortest(rank, rows, end - start)
    last, by = _last(table, rows, aligned)
    awaited = rows.spread(last, aligned)
    awaited += shift
    checked = matched & comparable & together & matching.complete
    apart = _disagreement(start, end, awaited, rows.spread(shortest, 0), checked)
    awaited = np.where(by_duration, end - rows.spread(shortest, 0), awaited)
    found = Arrivals(
        awaited_ns=awaited,
        awaited_rank=np.where(by_duration, rows.spread(quickest, rank), rows.spread(by, rank)),
        known=matched & (comparable | by_duration),
        aligned_ns=aligned,
        by_duration=by_duration,
    )
    return found, replace(clock, disagreement_ns=int(np.median(apart)) if len(apart) else None)


def _disagreement(start: Array, end: Array, awaited: Array, shortest: Array, rows: npt.NDArray[np.bool_]) -> Array:
    """Return how far waits by clocks and clock-free waits lie apart."""
    start, end = start[rows], end[rows]
    return np.asarray(np.abs(np.maximum(awaited[rows] - start, 0) - ((end - start) - shortest[rows])))


def _comparable(table: pd.DataFrame, rows: Instances, clock: Clock) -> npt.NDArray[np.bool_]:
    """Tell which instances have ranks that share a clock, or have aligned ones."""
    host, rank = table["host"].to_numpy(), table["rank"].to_numpy()
    aligned = by_rank(clock.aligned, np.bool_)[rank]
    return np.asarray((rows.min(host) == rows.max(host)) | ~rows.any(~aligned))


def _last(table: pd.DataFrame, rows: Instances, arrival: Array) -> tuple[Array, Integers]:
    """Return the last arrival of each instance (of a rooted kind the root's), and the rank that made it."""
    rank, root = table["rank"].to_numpy(), table["root"].to_numpy()
    rooted = table["kind"].isin(ROOTED).to_numpy() & (root >= 0)
    if rooted.any():
        arrival = np.where(~rooted | (rank == root), arrival, np.iinfo(np.int64).min)
    last = rows.max(arrival)
    return last, rows.max(np.where(arrival == rows.spread(last, 0), rank, -1))


def _shortest(rank: Integers, rows: Instances, length: Array) -> tuple[Array, Integers]:
    """Return the shortest duration of each instance, and the rank that had it."""
    shortest = rows.min(length)
    return shortest, rows.min(np.where(length == rows.spread(shortest, 0), rank, np.iinfo(rank.dtype).max))
