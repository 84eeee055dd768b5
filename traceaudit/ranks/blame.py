"""Who caused the waits for late ranks, and why (attribution rule 5).

For a wait of rank A on the late rank B, go back to their previous common synchronisation and compare what both did
since, class by class. B's excess over A, scaled to the wait, is the cost of that class; the share of B's own waits is
handed on to whoever made B wait. (Delay costs: Böhme et al., ACM TOPC 3(2), 2016.) Costs add up to the waits exactly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.intervals import Array
from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.memory import give_back
from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.elapsed import PIPELINE, TRANSFER, Elapsed, by_row
from traceaudit.ranks.instances import ROWS, Instances, Integers, sliced, small, stretches
from traceaudit.ranks.matching import Matching
from traceaudit.ranks.owned import Owned
from traceaudit.ranks.peers import Peers
from traceaudit.ranks.synchronisations import Synchronisations

Floats = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]

EXPLAINED = 0.5  # an excess below this share of the wait explains twice itself, and the rest is jitter
WAIT_LEAVES = (Leaf.LATE_RANK, Leaf.DATA_IMBALANCE, Leaf.HOST_CAUSED, Leaf.SLOW_LINK, Leaf.JITTER)
COMPUTE = (Leaf.NOT_SPLIT, Leaf.KERNELS)


@dataclass(frozen=True)
class Blame:
    """Where the waits for late ranks come from.

    Attributes:
        shares: by row of the table of communications: the share of its wait by `WAIT_LEAVES`; rows sum to 1, to the
            precision of 32 bits. Empty once the waits are divided.
        costs: ``rank, cls, ns``: waits of others that a rank caused by a class of its time; sums to the waits.
            ``cls`` is a `Leaf` of `CLASSES`, TRANSFER, PIPELINE, or JITTER where no excess explains the wait.
    """

    shares: Shares
    costs: pd.DataFrame


def blame(
    owned: Owned,
    table: pd.DataFrame,
    matching: Matching,
    arrivals: Arrivals,
    exposed: pd.DataFrame,
    peers: Peers,
) -> Blame:
    """Follow the waits to their origins.

    Args:
        owned: tables of the ranks, in the order of `table`.
        table: communications of all ranks (`traceaudit.ranks.collectives.gather`).
        matching: of its rows.
        arrivals: of its rows.
        exposed: ``row, leaf, ns`` of the time owned by communications.
        peers: tells slow kernels from more work.
    """
    wait = small(by_row(*_owned_by(exposed, exposed["leaf"].to_numpy() == Leaf.LATE_RANK), len(table)))
    shares = np.zeros((len(table), len(WAIT_LEAVES)), np.float32)
    if not wait.any():
        return Blame(shares, pd.DataFrame({"rank": [], "cls": [], "ns": []}).astype(np.int64))
    spent = {
        TRANSFER: _owned_by(exposed, in_bucket(exposed["leaf"], Bucket.EXPOSED_COMM)),
        PIPELINE: _owned_by(exposed, exposed["leaf"].to_numpy() == Leaf.UNDIVIDED),
    }
    elapsed = Elapsed(owned, table, spent)
    delays = _Delays(table, matching, arrivals, wait)
    give_back()
    mixture = _mixtures(peers, int(table["rank"].max()) + 1)
    for cls in elapsed.classes:
        delays.add(cls, elapsed.of(cls), mixture, shares)
    delays.resolve(shares)
    weight, unexplained = delays.weights()
    costs = {cls: delays.cost(elapsed.of(cls), weight) for cls in elapsed.classes}
    costs[Leaf.JITTER] = unexplained
    return Blame(shares, _whole(costs, int(wait.sum())))


def _owned_by(exposed: pd.DataFrame, chosen: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """Return the rows and the lengths of some of the exposed time."""
    return exposed["row"].to_numpy()[chosen], exposed["ns"].to_numpy()[chosen]


class _Delays:
    """The instances with waits, each with the rank that came last, and what delayed that one.

    Attributes:
        culprit: the rank that came last, by delay.
    """

    def __init__(self, table: pd.DataFrame, matching: Matching, arrivals: Arrivals, wait: Integers) -> None:
        self._rank = table["rank"].to_numpy()
        self._wait = wait
        self._total = np.zeros(len(wait))  # excess and inherited waits, by waiting row
        rows = matching.rows
        waiting = rows.rows[wait[rows.rows] > 0]
        place = rows.place[waiting]
        self._first = np.flatnonzero(np.diff(place, prepend=-1))
        self._size = np.diff(np.append(self._first, len(waiting)))
        self._rows = waiting  # of the waiting ranks, those of a delay together
        number = place[self._first]
        self.culprit = arrivals.awaited_rank[waiting[self._first]]
        find = _Rows(rows, self._rank)
        self._own = find.of(number, self.culprit)
        self._since(Synchronisations(table, rows, arrivals).previous(number), find)
        self._order(arrivals.aligned_ns)

    def _delay_of(self, some: slice) -> npt.NDArray[np.intp]:
        """Return the delay of some of the waiting rows."""
        at = np.arange(some.start, min(some.stop, len(self._rows)))
        return np.searchsorted(self._first, at, side="right") - 1

    def _since(self, common: Array, find: "_Rows") -> None:
        """Find the parts of the ranks in the common synchronisation; -1 where not all have one."""
        self._own_before = find.of(common, self.culprit)
        self._before = np.empty(len(self._rows), np.int32)
        for some in stretches(len(self._rows)):
            delay = self._delay_of(some)
            self._before[some] = find.of(common[delay], self._rank[self._rows[some]])
        missing = np.logical_or.reduceat(self._before < 0, self._first) | (self._own_before < 0)
        self._own_before[missing] = -1
        self._before[np.repeat(missing, self._size)] = -1

    def _order(self, arrival: Array) -> None:
        """Find for each delay the culprit's own waits since the common synchronisation, and whom it has to follow."""
        wait, rank = self._wait, self._rank
        by_time = np.flatnonzero(wait > 0)
        by_time = by_time[np.lexsort((arrival[by_time], rank[by_time]))]
        self._inherited = small(by_time)  # waits of each rank in the order of time; a delay inherits a stretch
        begun = np.flatnonzero(np.diff(rank[by_time], prepend=-1))
        span = np.full(int(rank.max()) + 2, len(by_time), np.int64)
        span[rank[by_time][begun]] = begun
        span = np.minimum.accumulate(span[::-1])[::-1]
        moment = arrival[self._own]
        since = np.where(self._own_before >= 0, arrival[self._own_before], np.iinfo(np.int64).min)
        when = arrival[by_time]
        self._low, self._high = np.empty(len(moment), np.int64), np.empty(len(moment), np.int64)
        for culprit, own in _groups(self.culprit):
            held = when[span[culprit] : span[culprit + 1]]
            self._low[own] = span[culprit] + np.searchsorted(held, since[own], side="right")
            self._high[own] = span[culprit] + np.searchsorted(held, moment[own], side="left")
        self._high = np.maximum(self._high, self._low)
        turn = np.empty(len(moment), np.int64)
        turn[np.argsort(moment, kind="stable")] = np.arange(len(moment))
        delay = np.full(len(wait), -1, np.int32)
        delay[self._rows] = np.repeat(np.arange(len(self._first), dtype=np.int32), self._size)
        self._source = delay[self._inherited]  # the delay that each wait is part of
        self._turn = turn
        self._level = _levels(turn, self._low, self._high, self._source)

    def _excess(self, elapsed: tuple[Integers, Integers], some: slice) -> tuple[npt.NDArray[np.intp], Floats]:
        """Return for some waiting rows their delay, and how much more of a class the culprit did than they."""
        before, after = elapsed
        delay, rows, since = self._delay_of(some), self._rows[some], self._before[some]
        own = before[self._own] - np.where(self._own_before >= 0, after[self._own_before], 0).astype(np.int64)
        theirs = before[rows] - np.where(since >= 0, after[since], 0).astype(np.int64)
        return delay, np.maximum(own[delay] - theirs, 0).astype(np.float64)

    def add(self, cls: Leaf, elapsed: tuple[Integers, Integers], mixture: Floats, shares: Shares) -> None:
        """Add the excess of a class to the leaves that it stands for; `mixture` says by rank how compute divides."""
        for some in stretches(len(self._rows)):
            delay, excess = self._excess(elapsed, some)
            rows = self._rows[some]
            if cls in COMPUTE:
                for leaf, share in enumerate(mixture[self.culprit[delay]].T):
                    shares[rows, leaf] += excess * share
            else:
                shares[rows, WAIT_LEAVES.index(_leaf_of(cls))] += excess

    def resolve(self, shares: Shares) -> None:
        """Turn the excess of each waiting row into shares of its wait, with what the culprit inherited.

        What a culprit inherits is resolved before: the waits that it had before it made others wait.
        """
        for delays in self._by_level():
            rows, own = self._rows_of(delays)
            waits, of, known = self._inherits(delays)
            ns = self._wait[waits].astype(np.float64)
            excess = shares[rows].astype(np.float64)
            total = excess.sum(axis=1) + np.bincount(of, ns, len(delays))[own]
            for leaf in range(len(WAIT_LEAVES)):
                passed = np.bincount(of, np.where(known, ns * shares[waits, leaf], 0.0), len(delays))
                excess[:, leaf] += passed[own]
            self._total[rows] = total
            rate, unexplained = self._rates(rows)
            excess *= rate[:, None]
            excess[:, JITTERY] += unexplained
            excess[:, JITTERY] += excess.sum(axis=1) == 0
            shares[rows] = excess / excess.sum(axis=1, keepdims=True)

    def weights(self) -> tuple[Floats, Floats]:
        """Hand the waits back in time to the delays that caused them.

        Returns:
            By waiting row, what a nanosecond of the culprit's excess cost; and by rank, what no excess explains.
        """
        burden = self._wait.astype(np.float64)
        weight = np.zeros(len(burden))
        unknown = np.zeros(int(self._rank.max()) + 1)
        for delays in reversed(self._by_level()):
            rows, own = self._rows_of(delays)
            carried = (
                burden[rows] / self._wait[rows]
            )  # what it carries for others comes on top, in the same proportions
            rate, unexplained = self._rates(rows)
            weight[rows] = rate * carried
            np.add.at(unknown, self.culprit[delays[own]], unexplained * carried)
            waits, of, known = self._inherits(delays)
            passed = np.bincount(own, weight[rows], len(delays))[of] * self._wait[waits]
            np.add.at(burden, waits[known], passed[known])
        return weight, unknown

    def cost(self, elapsed: tuple[Integers, Integers], weight: Floats) -> Floats:
        """Return by rank what its excess of a class cost."""
        costs = np.zeros(int(self._rank.max()) + 1)
        for some in stretches(len(self._rows)):
            delay, excess = self._excess(elapsed, some)
            costs += np.bincount(self.culprit[delay], weight[self._rows[some]] * excess, len(costs))
        return costs

    def _rates(self, rows: Integers) -> tuple[Floats, Floats]:
        """Return for waiting rows the factor from excess to wait, and the part of the wait that no excess explains."""
        wait, total = self._wait[rows].astype(np.float64), self._total[rows]
        rate = np.minimum(wait / np.maximum(total, 1.0), 1 / EXPLAINED) * (total > 0)
        return rate, np.maximum(wait - rate * total, 0.0)

    def _by_level(self) -> list[npt.NDArray[np.intp]]:
        """Return delays that do not depend on one another, those that others depend on first; about `ROWS` at most."""
        order = np.lexsort((self._turn, self._level))
        parts = []
        for level in np.split(order, np.flatnonzero(np.diff(self._level[order])) + 1):
            piece = np.cumsum(self._size[level]) // ROWS
            parts += np.split(level, np.flatnonzero(np.diff(piece)) + 1)
        return parts

    def _rows_of(self, delays: npt.NDArray[np.intp]) -> tuple[Integers, npt.NDArray[np.intp]]:
        """Return the waiting rows of delays, and for each which of the delays it is of."""
        size = self._size[delays]
        return self._rows[sliced(self._first[delays], size)], np.repeat(np.arange(len(delays)), size)

    def _inherits(self, delays: npt.NDArray[np.intp]) -> tuple[Integers, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
        """Return the rows of waits that delays inherit, for each which delay inherits it, and if it came before."""
        size = self._high[delays] - self._low[delays]
        at, of = sliced(self._low[delays], size), np.repeat(np.arange(len(delays)), size)
        return self._inherited[at], of, self._turn[self._source[at]] < self._turn[delays[of]]


JITTERY = WAIT_LEAVES.index(Leaf.JITTER)


class _Rows:
    """Finds the row of a rank in an instance; of several, the last."""

    def __init__(self, rows: Instances, rank: Integers) -> None:
        self._ranks = int(rank.max(initial=0)) + 1
        self._rows = rows.rows
        self._key = rows.place[rows.rows].astype(np.int64) * self._ranks + rank[rows.rows]

    def of(self, place: Integers, rank: Integers) -> npt.NDArray[np.int32]:
        """Return the rows, -1 where a rank has no part in the instance at a place or the place is -1."""
        wanted = place.astype(np.int64) * self._ranks + rank
        slot = np.searchsorted(self._key, wanted, side="right") - 1
        found = (slot >= 0) & (self._key[slot] == wanted)
        return np.where(found, self._rows[slot], -1).astype(np.int32)


def _groups(values: Integers) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield distinct values, and where they stand."""
    order = np.argsort(values, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(values[order])) + 1):
        yield int(values[own[0]]), own


def _levels(turn: Array, low: Array, high: Array, source: Integers) -> npt.NDArray[np.int32]:
    """Return for each delay one more than the most of those that it depends on: the delays of the waits it inherits.

    A delay that comes later, as it may on another stream, is none of them.
    """
    level = [0] * len(turn)
    begin, end = low.tolist(), high.tolist()
    for delay in np.argsort(turn).tolist():
        before = source[begin[delay] : end[delay]].tolist()
        level[delay] = 1 + max(map(level.__getitem__, before), default=0)
    return np.array(level, np.int32)


def _mixtures(peers: Peers, ranks: int) -> Floats:
    """Return by rank how its excess of compute divides into slow kernels and more work."""
    result = np.zeros((ranks, 2))
    result[:, 0] = 1.0
    for rank, own in peers.work.items():
        total = own.excess_ns + own.more_ns
        if total > 0 and rank < ranks:
            result[rank, 0] = own.excess_ns / total
            result[rank, 1] = 1.0 - result[rank, 0]
    return result


def _leaf_of(cls: Leaf) -> Leaf:
    """Return the leaf of a wait that a class of the late rank's time caused."""
    if cls == TRANSFER:
        return Leaf.SLOW_LINK
    return Leaf.HOST_CAUSED if cls.bucket in (Bucket.HOST_GAP, Bucket.UNATTRIBUTED) else Leaf.LATE_RANK


def _whole(costs: Mapping[Leaf, Floats], total: int) -> pd.DataFrame:
    """Return costs by rank and class as integers that add up to the total."""
    keys = sorted((int(rank), int(cls)) for cls, own in costs.items() for rank in np.flatnonzero(own > 0))
    exact = np.array([costs[Leaf(cls)][rank] for rank, cls in keys])
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: total - int(whole.sum())]] += 1
    return pd.DataFrame(keys, columns=["rank", "cls"]).assign(ns=whole)
