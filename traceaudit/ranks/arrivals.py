"""When the last participant of each collective arrived, and who it was (attribution rules 3.2 and 4)."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.intervals import Array
from traceaudit.ranks.align import Clock
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
    awaited_rank: Array
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
    rank, start, end = (table[name].to_numpy(dtype=np.int64) for name in ("rank", "start_ns", "end_ns"))
    matched = matching.instance >= 0
    shift = clock.offsets(rank, start)
    aligned = start - shift
    comparable = _comparable(table, matching, clock)
    last, by = _last(table, matching.instance, aligned)
    together = table["kind"].isin(ENDING_TOGETHER).to_numpy()
    shortest, quickest = _shortest(rank, matching.instance, end - start)
    by_duration = matched & ~comparable & together
    awaited = np.where(by_duration, end - shortest, last + shift)
    found = Arrivals(
        awaited_ns=awaited,
        awaited_rank=np.where(by_duration, quickest, by),
        known=matched & (comparable | by_duration),
        aligned_ns=aligned,
        by_duration=by_duration,
    )
    checked = matched & comparable & together & matching.complete
    waits = np.maximum(last + shift - start, 0), (end - start) - shortest
    apart = np.abs(waits[0] - waits[1])[checked]
    return found, replace(clock, disagreement_ns=int(np.median(apart)) if len(apart) else None)


def _comparable(table: pd.DataFrame, matching: Matching, clock: Clock) -> npt.NDArray[np.bool_]:
    """Tell which rows belong to instances whose ranks share a clock, or have aligned ones."""
    host = table["host"].to_numpy()
    aligned = pd.Series(clock.aligned).reindex(table["rank"]).to_numpy(dtype=np.bool_)
    frame = pd.DataFrame({"instance": matching.instance, "host": host, "aligned": aligned})
    by_instance = frame.groupby("instance")
    one_host = by_instance["host"].transform("nunique").to_numpy() == 1
    return np.asarray(one_host | by_instance["aligned"].transform("all").to_numpy(dtype=np.bool_))


def _last(table: pd.DataFrame, instance: Array, arrival: Array) -> tuple[Array, Array]:
    """Return the last arrival of each row's instance (of a rooted kind the root's), and the rank that made it."""
    rank = table["rank"].to_numpy(dtype=np.int64)
    root = table["root"].to_numpy(dtype=np.int64)
    rooted = table["kind"].isin(ROOTED).to_numpy() & (root >= 0)
    counted = ~rooted | (rank == root)
    frame = pd.DataFrame({"instance": instance, "ns": np.where(counted, arrival, np.iinfo(np.int64).min), "rank": rank})
    return _pick(frame, instance, ascending=True)


def _shortest(rank: Array, instance: Array, length: Array) -> tuple[Array, Array]:
    """Return the shortest duration of each row's instance, and the rank that had it."""
    return _pick(pd.DataFrame({"instance": instance, "ns": length, "rank": rank}), instance, ascending=False)


def _pick(frame: pd.DataFrame, instance: Array, *, ascending: bool) -> tuple[Array, Array]:
    """Return for each row the last value of its instance in the given order, and its rank."""
    chosen = frame.sort_values(["ns", "rank"], ascending=ascending, kind="stable").drop_duplicates(
        "instance", keep="last"
    )
    chosen = chosen.set_index("instance").reindex(instance)
    return chosen["ns"].to_numpy(dtype=np.int64), chosen["rank"].to_numpy(dtype=np.int64)
