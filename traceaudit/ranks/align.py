"""One clock for all ranks (attribution rule 4).

Ranks of one host share its clock; the offsets between hosts, and their drift, are fitted robustly on the ends of small
collectives that every participant leaves together. No collective ends before its last participant arrived: offsets
that would break that are corrected, and what remains broken is counted. What the fit leaves between the ends is the
residual: waits shorter than it cannot be told from transfers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.intervals import Array
from traceaudit.ranks.instances import Instances, Integers
from traceaudit.ranks.matching import ENDING_TOGETHER, Matching

Floats = npt.NDArray[np.float64]

ROUNDS = 30  # of the alternating medians; they settle in a few
DRIFT_SPAN_NS = 200_000_000  # recordings shorter than this tell no drift
LEAST_EVIDENCE, AMPLE_EVIDENCE = 4, 12  # collectives that a drift needs, and that make it easy to believe
DRIFT_GAIN, DRIFT_GAIN_OF_FEW = (
    2.0,
    8.0,
)  # factor by which a drift must reduce the residual, with ample evidence or less
STEEPEST_DRIFT = 5e-4  # of real clocks
EVIDENCE_ROWS = 1 << 21  # ends of collectives that the fit uses; more make it no better
VIOLATED_SHARE = 0.1  # of the collectives, above which the fit is not used


@dataclass(frozen=True)
class Clock:
    """How the ranks' clocks relate.

    Attributes:
        method: "one_host", "collective_ends", or "none" (a single rank, or no evidence).
        host: host of each rank, by number.
        hosts: names of the hosts.
        offset_ns: by rank, at `epoch_ns`: own time minus aligned time.
        drift: by rank, nanoseconds per nanosecond.
        epoch_ns: instant at which offsets hold exactly.
        aligned: by rank: tied to the first host by evidence.
        residual_ns: median distance of a rank's end from its collective's, over the evidence; 0 without.
        residual_p95_ns: its 95th percentile.
        violations: collectives that end before their last participant arrived, by more than the residual.
        evidence: collectives the fit rests on.
        disagreement_ns: median difference between waits by clocks and clock-free waits; None where not comparable.
    """

    method: str
    host: dict[int, int]
    hosts: tuple[str, ...]
    offset_ns: dict[int, float]
    drift: dict[int, float]
    epoch_ns: int
    aligned: dict[int, bool]
    residual_ns: int
    residual_p95_ns: int
    violations: int
    evidence: int
    disagreement_ns: int | None = None

    def offsets(self, rank: Integers, instant: Array) -> Array:
        """Return own minus aligned time for ranks at instants of their own clocks."""
        offset, drift = (by_rank(values, np.float64)[rank] for values in (self.offset_ns, self.drift))
        drift *= instant - self.epoch_ns
        drift += offset
        return np.asarray(np.rint(drift, out=drift), np.int64)

    @property
    def usable(self) -> bool:
        """Instants of different hosts can be compared."""
        return self.method in ("one_host", "collective_ends")


def by_rank(values: Mapping[int, object], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return values by rank as an array; ranks without one have that of zero.

    >>> by_rank({0: 1.5, 2: 2.5}, np.float64).tolist()
    [1.5, 0.0, 2.5]
    """
    result = np.zeros(max(values, default=-1) + 1, dtype)
    result[list(values)] = list(values.values())
    return result


def hosts(accounts: Sequence[RankAccount]) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return the host of each rank: by name, else a new one begins where a GPU index occurs again."""
    numbers: dict[str, int] = {}
    result: dict[int, int] = {}
    used: set[int] = set()
    unnamed = 0
    for account in sorted(accounts, key=lambda own: own.rank):
        name = account.origin.host
        if name is None:
            if account.device in used:
                used, unnamed = set(), unnamed + 1
            used.add(account.device)
            name = f"host {unnamed} (by GPU indices)"
        result[account.rank] = numbers.setdefault(name, len(numbers))
    return result, tuple(numbers)


def align(accounts: Sequence[RankAccount], table: pd.DataFrame, matching: Matching) -> Clock:
    """Fit the clocks of the hosts on matched collectives; `table` is that of `traceaudit.ranks.collectives.gather`."""
    host, names = hosts(accounts)
    epoch = min(account.first_ns for account in accounts)
    evidence = _evidence(table, matching, epoch)
    offset = np.zeros((len(names), 2))
    tied = np.zeros(len(names), np.bool_)
    tied[0] = True
    if len(names) > 1 and len(evidence):
        spanning = evidence[evidence.groupby("instance")["host"].transform("nunique") > 1]
        if len(spanning):
            offset, tied = _fitted(spanning, len(names))
    ranks = sorted(host)
    own = _per_gpu(evidence, offset)
    before, after = (_violations(table, matching, offset, extra, epoch) for extra in ({}, own))
    if after[0] >= before[0]:
        own, after = {}, before
    residuals = _residuals(evidence, offset, own, tied)
    residual = int(np.median(residuals)) if len(residuals) else 0
    broken = int((after[1] > max(residual, 1)).sum())
    method = "one_host" if len(names) == 1 else "collective_ends" if tied.sum() > 1 else "none"
    checked = len(after[1])
    if method == "collective_ends" and checked and broken > VIOLATED_SHARE * checked:
        method = "none"
    if len(ranks) == 1:
        method = "none"
    return Clock(
        method=method,
        host=host,
        hosts=names,
        offset_ns={rank: float(offset[host[rank], 0]) + own.get(rank, 0.0) for rank in ranks},
        drift={rank: float(offset[host[rank], 1]) for rank in ranks},
        epoch_ns=epoch,
        aligned={rank: bool(tied[host[rank]]) and method != "none" for rank in ranks},
        residual_ns=residual,
        residual_p95_ns=int(np.percentile(residuals, 95)) if len(residuals) else 0,
        violations=broken,
        evidence=int(evidence["instance"].nunique()) if len(evidence) else 0,
    )


def _evidence(table: pd.DataFrame, matching: Matching, epoch: int) -> pd.DataFrame:
    """Return rank, host and end (from the epoch) of the collectives whose ends agree best: the short ones.

    Large messages leave a ring or a tree at different instants, by real milliseconds. All-to-all and point-to-point
    are used only if there is nothing else. Of very many collectives an even sample is used.
    """
    columns = ["instance", "rank", "host", "end", "transfer"]
    if not len(table):
        return pd.DataFrame(columns=columns)
    rank, host, end = (table[name].to_numpy() for name in ("rank", "host", "end_ns"))
    together = table["kind"].isin(ENDING_TOGETHER).to_numpy() & (matching.instance >= 0)
    rows = matching.rows
    if together.any() and not together[rows.rows].all():
        rows = Instances.of(np.where(together, matching.instance, -1), rank)
    several = rows.ranks(rank) > 1
    if not several.any():
        return pd.DataFrame(columns=columns)
    transfer = rows.min(end - table["start_ns"].to_numpy())
    spanning = several & (rows.min(host) < rows.max(host))
    limit = 2 * float(np.percentile(transfer[spanning if spanning.any() else several], 25))
    chosen = np.flatnonzero(several & (transfer <= limit))
    chosen = chosen[:: max(-(-int(rows.sizes[chosen].sum()) // EVIDENCE_ROWS), 1)]
    kept = np.zeros(len(rows) + 1, np.bool_)  # the last one is for rows of no instance
    kept[chosen] = True
    row = np.flatnonzero(kept[rows.place])
    place = rows.place[row]
    return pd.DataFrame(
        {
            "instance": rows.number[place],
            "rank": rank[row],
            "host": host[row],
            "end": (end[row] - epoch).astype(np.float64),
            "transfer": transfer[place],
        }
    )


def _fitted(evidence: pd.DataFrame, count: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return offset and drift of each host against the first, and which hosts are tied to it.

    Alternating medians: the instant of a collective is the median of its ends, the offset of a host the median of what
    its ends differ from those instants. The hosts' ends are first reduced to one an instance.
    """
    ends = evidence.groupby(["instance", "host"], as_index=False)[["end"]].median()
    tied = _tied(ends, count)
    instance = pd.factorize(ends["instance"])[0]
    host, end = ends["host"].to_numpy(dtype=np.int64), ends["end"].to_numpy()
    offset = _starting_offsets(instance, host, end, count)
    for _ in range(ROUNDS):
        moment = _medians(instance, end - offset[host])
        fitted = (
            pd.Series(end - moment[instance]).groupby(host).median().reindex(range(count), fill_value=0.0).to_numpy()
        )
        fitted = np.where(tied, fitted - fitted[0], 0.0).astype(np.float64)
        settled = np.abs(fitted - offset).max() < 0.5
        offset = np.asarray(fitted, np.float64)
        if settled:
            break
    moment = _medians(instance, end - offset[host])
    lines = _drifts(instance, host, end - moment[instance] - offset[host], moment, count)
    lines[~tied] = 0.0
    return np.stack([offset + lines[:, 0], lines[:, 1]], axis=1), tied


def _medians(instance: npt.NDArray[np.intp], value: Floats) -> Floats:
    return np.asarray(pd.Series(value).groupby(instance).median(), np.float64)


def _starting_offsets(instance: npt.NDArray[np.intp], host: Array, end: Floats, count: int) -> Floats:
    """Return rough offsets by walking the hosts along shared collectives, from the first host on."""
    offset = np.full(count, np.nan)
    offset[0] = 0.0
    frame = pd.DataFrame({"instance": instance, "host": host, "end": end})
    for _ in range(count):
        known = frame[~np.isnan(offset[frame["host"].to_numpy()])]
        moment = (known["end"] - offset[known["host"].to_numpy()]).groupby(known["instance"]).median()
        unknown = frame[np.isnan(offset[frame["host"].to_numpy()])]
        apart = unknown["end"] - moment.reindex(unknown["instance"]).to_numpy()
        found = apart.groupby(unknown["host"]).median().dropna()
        if not len(found):
            break
        offset[found.index.to_numpy(dtype=np.int64)] = found.to_numpy()
    return np.asarray(np.nan_to_num(offset), np.float64)


def _tied(ends: pd.DataFrame, count: int) -> npt.NDArray[np.bool_]:
    """Tell which hosts share collectives with the first, directly or over others."""
    tied = np.zeros(count, np.bool_)
    tied[0] = True
    while True:
        touched = ends.loc[tied[ends["host"].to_numpy(dtype=np.int64)], "instance"].unique()
        reached = ends.loc[ends["instance"].isin(touched), "host"].to_numpy(dtype=np.int64)
        if tied[reached].all():
            return tied
        tied[reached] = True


def _drifts(instance: npt.NDArray[np.intp], host: Array, residual: Floats, moment: Floats, count: int) -> Floats:
    """Return intercept and drift of each host's residual against the first host, zero where no drift explains it.

    A drift needs evidence that spans enough time; the less there is, the more it must explain.
    """
    lines = np.zeros((count, 2))
    when = moment[instance]
    for number in range(count):
        own = host == number
        if own.sum() < LEAST_EVIDENCE or np.ptp(when[own]) < DRIFT_SPAN_NS:
            continue
        slope = _slope(when[own], residual[own])
        straight = residual[own] - slope * when[own]
        intercept = float(np.median(straight))
        gain = DRIFT_GAIN if own.sum() >= AMPLE_EVIDENCE else DRIFT_GAIN_OF_FEW
        left = np.median(np.abs(straight - intercept))
        if abs(slope) < STEEPEST_DRIFT and left * gain < np.median(np.abs(residual[own])):
            lines[number] = intercept, slope
    return np.asarray(lines - lines[0], np.float64)


def _slope(when: Floats, value: Floats) -> float:
    """Return a robust slope: between the medians of the first and the last third (Tukey's resistant line)."""
    order = np.argsort(when)
    third = max(len(order) // 3, 1)
    early, late = order[:third], order[-third:]
    run = float(np.median(when[late]) - np.median(when[early]))
    return float(np.median(value[late]) - np.median(value[early])) / run if run > 0 else 0.0


def _corrected(evidence: pd.DataFrame, offset: Floats, own: dict[int, float]) -> Floats:
    """Return ends on the aligned clock, from the epoch."""
    host, end = evidence["host"].to_numpy(dtype=np.intp), evidence["end"].to_numpy(dtype=np.float64)
    aligned = end - offset[host, 0]
    if offset[:, 1].any():
        aligned -= offset[host, 1] * end
    if own:
        rank = evidence["rank"].to_numpy(dtype=np.intp)
        aligned -= by_rank({int(rank.max(initial=0)): 0.0, **own}, np.float64)[rank]
    return np.asarray(aligned)


def _residuals(evidence: pd.DataFrame, offset: Floats, own: dict[int, float], tied: npt.NDArray[np.bool_]) -> Floats:
    """Return how far each rank's end lies from its collective's median end."""
    chosen = evidence[tied[evidence["host"].to_numpy(dtype=np.int64)]] if len(evidence) else evidence
    if not len(chosen):
        return np.empty(0)
    value = pd.Series(_corrected(chosen, offset, own), chosen.index)
    apart = value - value.groupby(chosen["instance"]).transform("median")
    return np.asarray(apart.abs(), np.float64)


def _per_gpu(evidence: pd.DataFrame, offset: Floats) -> dict[int, float]:
    """Return a further offset of each GPU: timestamps of one host's GPUs can differ."""
    if not len(evidence):
        return {}
    value = pd.Series(_corrected(evidence, offset, {}), evidence.index)
    apart = value - value.groupby(evidence["instance"]).transform("median")
    found = apart.groupby(evidence["rank"]).median()
    return {int(rank): float(ns) for rank, ns in zip(found.index.to_numpy(), found.to_numpy(), strict=True)}


def _violations(
    table: pd.DataFrame, matching: Matching, offset: Floats, own: dict[int, float], epoch: int
) -> tuple[int, Floats]:
    """Return how many collectives end before their last participant arrived, and each one's overlap."""
    if not len(table):
        return 0, np.empty(0)
    rank = table["rank"].to_numpy()
    chosen = (matching.instance >= 0) & table["kind"].isin(ENDING_TOGETHER).to_numpy()
    rows = matching.rows
    if not chosen[rows.rows].all():
        rows = Instances.of(np.where(chosen, matching.instance, -1), rank)
    if not len(rows):
        return 0, np.empty(0)
    frame = table[["rank", "host"]]
    last, first = (
        pick(_corrected(frame.assign(end=table[name] - epoch), offset, own))
        for pick, name in ((rows.max, "start_ns"), (rows.min, "end_ns"))
    )
    early = last - first
    return int((early > 0).sum()), np.asarray(early)
