"""Who caused the waits for late ranks, and why (attribution rule 5).

For a wait of rank A on the late rank B, go back to their previous common synchronisation and compare what both did
since, class by class. B's excess over A, scaled to the wait, is the cost of that class; the share of B's own waits is
handed on to whoever made B wait. (Delay costs: Böhme et al., ACM TOPC 3(2), 2016.) Costs add up to the waits exactly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import CLASSES, RankAccount
from traceaudit.intervals import Array
from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.matching import ENDING_TOGETHER, Matching
from traceaudit.ranks.members import coded
from traceaudit.ranks.peers import Peers

Floats = npt.NDArray[np.float64]

SYNCHRONISING = ENDING_TOGETHER | {"all_to_all"}
TRANSFER, PIPELINE = Leaf.SLOW_LINK, Leaf.UNDIVIDED  # classes of exposed communication beside `CLASSES`
EXPLAINED = 0.5  # an excess below this share of the wait explains twice itself, and the rest is jitter
WAIT_LEAVES = (Leaf.LATE_RANK, Leaf.DATA_IMBALANCE, Leaf.HOST_CAUSED, Leaf.SLOW_LINK, Leaf.JITTER)


@dataclass(frozen=True)
class Blame:
    """Where the waits for late ranks come from.

    Attributes:
        shares: by row of the table of communications: the share of its wait by `WAIT_LEAVES`; rows sum to 1.
        costs: ``rank, cls, ns``: waits of others that a rank caused by a class of its time; sums to the waits.
            ``cls`` is a `Leaf` of `CLASSES`, TRANSFER, PIPELINE, or JITTER where no excess explains the wait.
    """

    shares: Floats
    costs: pd.DataFrame


@dataclass(frozen=True, slots=True)
class _Delay:
    """The waits in one collective instance, and what the late rank did more than the waiting ones."""

    rows: npt.NDArray[np.intp]  # of the waiting ranks
    culprit: int
    excess: Floats  # waiting ranks x classes
    inherited: npt.NDArray[np.intp]  # rows of the culprit's own waits since the common synchronisation
    inherited_ns: Floats


def blame(
    accounts: Sequence[RankAccount],
    table: pd.DataFrame,
    matching: Matching,
    arrivals: Arrivals,
    exposed: pd.DataFrame,
    peers: Peers,
) -> Blame:
    """Follow the waits to their origins.

    Args:
        accounts: of the ranks with GPU activity, in the order of `table`.
        table: communications of all ranks (`traceaudit.ranks.collectives.gather`).
        matching: of its rows.
        arrivals: of its rows.
        exposed: ``row, leaf, ns`` of the time owned by communications.
        peers: tells slow kernels from more work.
    """
    rows = exposed["row"].to_numpy(dtype=np.int64)
    leaf = exposed["leaf"].to_numpy(dtype=np.int64)
    ns = exposed["ns"].to_numpy(dtype=np.int64)
    wait = _by_row(rows[leaf == Leaf.LATE_RANK], ns[leaf == Leaf.LATE_RANK], len(table))
    if not wait.any():
        return Blame(
            np.zeros((len(table), len(WAIT_LEAVES))), pd.DataFrame({"rank": [], "cls": [], "ns": []}).astype(np.int64)
        )
    pipeline = _by_row(rows[leaf == Leaf.UNDIVIDED], ns[leaf == Leaf.UNDIVIDED], len(table))
    carried = in_bucket(leaf, Bucket.EXPOSED_COMM)
    transfer = _by_row(rows[carried], ns[carried], len(table))
    classes, before, after = _progress(accounts, table, transfer, pipeline)
    delays = _delays(table, matching, arrivals, wait, before, after)
    mix = _mixtures(peers)
    shares = np.zeros((len(table), len(WAIT_LEAVES)))
    by_class: dict[int, Floats] = {}
    for delay in delays:
        if delay.culprit not in by_class:
            by_class[delay.culprit] = _by_class(classes, mix.get(delay.culprit, np.eye(len(WAIT_LEAVES))[0]))
        _resolve(delay, wait, shares, by_class[delay.culprit])
    return Blame(shares, _costs(classes, delays, wait))


def _by_row(rows: Array, ns: Array, size: int) -> Array:
    result = np.zeros(size, np.int64)
    np.add.at(result, rows, ns)
    return result


def _progress(
    accounts: Sequence[RankAccount], table: pd.DataFrame, transfer: Array, pipeline: Array
) -> tuple[tuple[Leaf, ...], Array, Array]:
    """Return the classes, and time by class up to the start and to the end of each communication.

    Only classes that occur on some rank, and those of exposed communication.
    """
    occurring = {cls for account in accounts for cls in account.progress_classes}
    classes = tuple(cls for cls in CLASSES if cls in occurring)
    both = np.zeros((2, len(table), len(classes) + 2), np.int64)
    filled = 0
    for account in accounts:
        rows = slice(filled, filled + len(account.progress))
        filled = rows.stop
        for column, cls in enumerate(account.progress_classes):
            both[:, rows, classes.index(Leaf(cls))] = account.progress[:, :, column].T
    ranks, start = table["rank"].to_numpy(dtype=np.int64), table["start_ns"].to_numpy(dtype=np.int64)
    order = np.lexsort((start, ranks))
    first = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    length = np.diff(np.append(first, len(order)))
    for column, value in enumerate((transfer, pipeline), len(classes)):
        through = np.cumsum(value[order])
        through -= np.repeat((through - value[order])[first], length)
        both[0, order, column], both[1, order, column] = through - value[order], through
    return (*classes, TRANSFER, PIPELINE), both[0], both[1]


def _delays(
    table: pd.DataFrame, matching: Matching, arrivals: Arrivals, wait: Array, before: Array, after: Array
) -> list[_Delay]:
    """Return the instances with waits in the order of their last arrival, with what delayed them."""
    instance = matching.instance
    ranks = table["rank"].to_numpy(dtype=np.int64)
    syncs = _Synchronisations(table, matching, arrivals)
    at = _Rows(instance, ranks)
    waiting = np.flatnonzero((wait > 0) & (instance >= 0))
    waits = _Waits(ranks, arrivals.aligned_ns, wait)
    order = waiting[np.argsort(instance[waiting], kind="stable")]
    found: list[_Delay] = []
    moment: list[int] = []
    for rows in np.split(order, np.flatnonzero(np.diff(instance[order])) + 1):
        number, culprit = int(instance[rows[0]]), int(arrivals.awaited_rank[rows[0]])
        own = int(at.of(number, culprit))
        common = syncs.previous(number)
        began = np.zeros((len(rows), before.shape[1]), np.int64)
        since = np.iinfo(np.int64).min
        own_began = began[0]
        if common is not None:
            began = after[at.of(common, ranks[rows])]
            own_before = int(at.of(common, culprit))
            own_began = after[own_before]
            since = int(arrivals.aligned_ns[own_before])
        excess = np.maximum((before[own] - own_began)[None, :] - (before[rows] - began), 0).astype(np.float64)
        inherited = waits.between(culprit, since, int(arrivals.aligned_ns[own]), common is not None)
        found.append(_Delay(rows, culprit, excess, inherited, wait[inherited].astype(np.float64)))
        moment.append(int(arrivals.aligned_ns[own]))
    return [found[index] for index in np.argsort(moment, kind="stable")]


class _Rows:
    """Finds the row of a rank in an instance; of several, the last."""

    def __init__(self, instance: Array, ranks: Array) -> None:
        self._ranks = int(ranks.max(initial=0)) + 1
        key = instance * self._ranks + ranks
        self._order = np.argsort(key, kind="stable")
        self._key = key[self._order]

    def of(self, instance: int, ranks: Array | int) -> npt.NDArray[np.intp]:
        """Return the rows.

        Raises:
            KeyError: a rank has no part in the instance.
        """
        wanted = np.asarray(instance * self._ranks + ranks)
        slot = np.searchsorted(self._key, wanted, side="right") - 1
        if (self._key[slot] != wanted).any():
            raise KeyError(f"a rank has no part in instance {instance}")
        return np.asarray(self._order[slot])


class _Waits:
    """The waits of each rank in the order of time."""

    def __init__(self, ranks: Array, arrival: Array, wait: Array) -> None:
        rows = np.flatnonzero(wait > 0)
        rows = rows[np.lexsort((arrival[rows], ranks[rows]))]
        parts = np.split(rows, np.flatnonzero(np.diff(ranks[rows])) + 1)
        self._rows = {int(ranks[own[0]]): own for own in parts if len(own)}
        self._arrival = arrival

    def between(self, rank: int, since: int, until: int, exclusive: bool) -> npt.NDArray[np.intp]:
        """Return the rows of a rank's waits that began after one arrival and before another."""
        rows = self._rows.get(rank)
        if rows is None:
            return np.empty(0, np.intp)
        when = self._arrival[rows]
        low = np.searchsorted(when, since, side="right" if exclusive else "left")
        return rows[low : np.searchsorted(when, until, side="left")]


class _Synchronisations:
    """Finds the last instance that ended before another's last arrival, in which all of its ranks took part."""

    def __init__(self, table: pd.DataFrame, matching: Matching, arrivals: Arrivals) -> None:
        usable = (matching.instance >= 0) & table["kind"].isin(SYNCHRONISING).to_numpy()
        codes, groups = coded(table["members"])
        frame = pd.DataFrame(
            {
                "instance": matching.instance[usable],
                "members": codes[usable],
                "ranks": table.loc[usable, "rank"].to_numpy(),
                "arrival": arrivals.aligned_ns[usable],
                "end": arrivals.aligned_ns[usable] + (table["end_ns"] - table["start_ns"]).to_numpy()[usable],
            }
        )
        traced = set(table["rank"].unique().tolist())
        sums = frame.groupby("instance").agg(present=("ranks", "nunique"), last=("arrival", "max"), end=("end", "max"))
        group = frame.drop_duplicates("instance").set_index("instance")["members"].reindex(sums.index).to_numpy()
        size = np.array([len(traced.intersection(ranks or ())) for ranks in groups])
        number, end = sums.index.to_numpy(), sums["end"].to_numpy()
        self._arrival = dict(zip(number.tolist(), sums["last"].tolist(), strict=True))
        self._group = dict(zip(number.tolist(), group.tolist(), strict=True))
        self._by_group: dict[int, Array] = {}
        complete = np.flatnonzero(sums["present"].to_numpy() == size[group]) if len(sums) else np.empty(0, np.intp)
        complete = complete[np.lexsort((number[complete], end[complete], group[complete]))]
        for own in np.split(complete, np.flatnonzero(np.diff(group[complete])) + 1):
            if len(own):
                self._by_group[int(group[own[0]])] = np.stack([end[own], number[own]], axis=1)
        self._ranks = {code: frozenset(groups[code] or ()) for code in {*self._by_group, *group.tolist()}}
        self._wider: dict[int, list[int]] = {}

    def previous(self, instance: int) -> int | None:
        """Return the number of that instance, None if there is none in the recording."""
        members = self._group.get(instance)
        if members is None:
            return None
        best: tuple[int, int] | None = None
        for group in self._around(members):
            found = self._by_group[group]
            slot = int(np.searchsorted(found[:, 0], self._arrival[instance], side="right")) - 1
            while slot >= 0 and found[slot, 1] == instance:
                slot -= 1
            if slot >= 0 and (best is None or found[slot, 0] > best[0]):
                best = int(found[slot, 0]), int(found[slot, 1])
        return best[1] if best else None

    def _around(self, members: int) -> list[int]:
        """Return the groups that hold all ranks of another."""
        if members not in self._wider:
            wanted = self._ranks[members]
            self._wider[members] = [group for group in self._by_group if wanted <= self._ranks[group]]
        return self._wider[members]


def _mixtures(peers: Peers) -> Mapping[int, Floats]:
    """Return by rank how its excess of compute divides into slow kernels and more work, as shares of `WAIT_LEAVES`."""
    result = {}
    for rank, own in peers.work.items():
        share = np.zeros(len(WAIT_LEAVES))
        total = own.excess_ns + own.more_ns
        share[0] = own.excess_ns / total if total > 0 else 1.0
        share[1] = 1.0 - share[0]
        result[rank] = share
    return result


def _leaf_of(cls: Leaf) -> Leaf:
    """Return the leaf of a wait that a class of the late rank's time caused."""
    if cls == TRANSFER:
        return Leaf.SLOW_LINK
    return Leaf.HOST_CAUSED if cls.bucket in (Bucket.HOST_GAP, Bucket.UNATTRIBUTED) else Leaf.LATE_RANK


def _by_class(classes: Sequence[Leaf], compute: Floats) -> Floats:
    """Return how each class of a late rank's time divides into `WAIT_LEAVES`; `compute` says it of its compute."""
    result = np.zeros((len(classes), len(WAIT_LEAVES)))
    for index, cls in enumerate(classes):
        if cls in (Leaf.NOT_SPLIT, Leaf.KERNELS):
            result[index] = compute
        else:
            result[index, WAIT_LEAVES.index(_leaf_of(cls))] = 1.0
    return result


def _resolve(delay: _Delay, wait: Array, shares: Floats, by_class: Floats) -> None:
    """Set the shares of one instance's waits; those that the culprit inherited are set already."""
    rate, unexplained = _rates(delay, wait[delay.rows].astype(np.float64))
    found = rate[:, None] * (delay.excess @ by_class + delay.inherited_ns @ shares[delay.inherited])
    found[:, WAIT_LEAVES.index(Leaf.JITTER)] += unexplained
    shares[delay.rows] = found / found.sum(axis=1, keepdims=True)


def _rates(delay: _Delay, wait: Floats) -> tuple[Floats, Floats]:
    """Return by waiting rank the factor from excess to wait, and the part of the wait that no excess explains."""
    total = delay.excess.sum(axis=1) + delay.inherited_ns.sum()
    rate = np.minimum(wait / np.maximum(total, 1.0), 1 / EXPLAINED) * (total > 0)
    return rate, np.maximum(wait - rate * total, 0.0)


def _costs(classes: Sequence[Leaf], delays: Sequence[_Delay], wait: Array) -> pd.DataFrame:
    """Hand the waits back in time to the ranks and classes that caused them; integers that add up to the waits."""
    burden = wait.astype(np.float64)
    costs: dict[tuple[int, int], float] = {}
    for delay in reversed(delays):
        own_wait = wait[delay.rows].astype(np.float64)
        weight = burden[delay.rows] / own_wait  # what it carries for others comes on top, in the same proportions
        rate, unexplained_ns = _rates(delay, own_wait)
        rate = rate * weight
        for cls, ns in zip(classes, rate @ delay.excess, strict=True):
            if ns > 0:
                costs[delay.culprit, int(cls)] = costs.get((delay.culprit, int(cls)), 0.0) + float(ns)
        unexplained = float((unexplained_ns * weight).sum())
        if unexplained > 0:
            key = delay.culprit, int(Leaf.JITTER)
            costs[key] = costs.get(key, 0.0) + unexplained
        burden[delay.inherited] += rate.sum() * delay.inherited_ns
    keys = sorted(costs)
    exact = np.array([costs[key] for key in keys])
    whole = np.floor(exact).astype(np.int64)
    missing = int(wait.sum()) - int(whole.sum())
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[:missing]] += 1
    frame = pd.DataFrame(keys, columns=["rank", "cls"])
    return frame.assign(ns=whole)
