"""The ranks that made others wait, by what it cost, with causes and evidence (attribution rule 5)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.attribute import Attribution, Job
from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.ranks.collectives import group_label
from traceaudit.ranks.instances import summed
from traceaudit.ranks.links import SlowLink, slow_links
from traceaudit.ranks.members import coded
from traceaudit.ranks.peers import Peers
from traceaudit.ranks.where import Places

SHOWN_LINKS = 3
PLACED = 50  # of the most expensive culprits, those that are looked for in the traces
EXPLAINED = 0.2  # share of the waits for a rank's compute that its slower kernels or its further work must amount to


@dataclass(frozen=True)
class Culprit:
    """A rank and one cause of waits of others.

    Attributes:
        rank: who.
        cause: ``slow_gpu, slow_kernels, more_work, launch_order, host_pause, slow_link, pipeline, jitter`` or
            ``unknown``.
        caused_ns: waits of other ranks.
        own_ns: the rank's own excess or pause over its peers; 0 where there is none to name.
        evidence: kernels with their ratios, the host's leaf, or the link.
        where: its worst instance (`traceaudit.ranks.where`); None where it cannot be placed, and beyond `PLACED`.
    """

    rank: int
    cause: str
    caused_ns: int
    own_ns: int
    evidence: dict[str, Any]
    where: dict[str, Any] | None = None


def culprits(job: Job, attribution: Attribution) -> list[Culprit]:
    """Return who caused the waits for late ranks, the most expensive first; the costs add up to the waits."""
    known = _Known(job, attribution)
    costs = attribution.blame.costs
    groups: dict[tuple[int, str], dict[Leaf, int]] = {}
    computed = costs[costs["cls"].isin((Leaf.NOT_SPLIT, Leaf.KERNELS))].groupby("rank")["ns"].sum()
    waiting = max(len(job.accounts) - 1, 1)
    per_rank = {int(rank): int(ns) / waiting for rank, ns in zip(computed.index.to_numpy(), computed, strict=True)}
    for number, cls, ns in zip(costs["rank"], costs["cls"], costs["ns"], strict=True):
        rank, leaf = _origin(int(number), Leaf(int(cls)), known)
        leaf = known.longest_pause(rank) if leaf == Leaf.HOST_CAUSED else leaf
        by_leaf = groups.setdefault((rank, _cause(rank, leaf, job.peers, per_rank.get(rank, 0.0))), {})
        by_leaf[leaf] = by_leaf.get(leaf, 0) + int(ns)
    found = [
        _culprit(rank, cause, by_leaf, known) for (rank, cause), by_leaf in groups.items() if any(by_leaf.values())
    ]
    found.sort(key=lambda culprit: (-culprit.caused_ns, culprit.rank, culprit.cause))
    places = Places(job, attribution)
    placed = [
        replace(one, where=places.worst(one.rank, one.cause, one.evidence, known.links.get(one.rank, ())))
        for one in found[:PLACED]
    ]
    return placed + found[PLACED:]


class _Known:
    """What is asked about one rank after the other, worked out for all of them at once."""

    def __init__(self, job: Job, attribution: Attribution) -> None:
        self.peers = job.peers
        self._job = job
        self._attribution = attribution

    @cached_property
    def links(self) -> dict[int, list[SlowLink]]:
        """The slow links that a rank is part of, the most expensive first, `SHOWN_LINKS` at most."""
        found: dict[int, list[SlowLink]] = {}
        for link in slow_links(self._attribution.carried):
            for rank in link.members:
                own = found.setdefault(rank, [])
                if len(own) < SHOWN_LINKS:
                    own.append(link)
        return found

    @cached_property
    def awaited(self) -> dict[int, int]:
        """By rank, the rank that it waited for the longest in its point-to-point communications."""
        table, arrivals = self._job.communications, self._job.arrivals
        rows = np.flatnonzero(table["pipeline"].to_numpy(dtype=np.bool_) & arrivals.known)
        waited = arrivals.awaited_ns[rows] - table["start_ns"].to_numpy()[rows]
        rank, partner = table["rank"].to_numpy()[rows], arrivals.awaited_rank[rows]
        waits = (waited > 0) & (partner != rank)
        frame = pd.DataFrame({"rank": rank[waits], "partner": partner[waits], "ns": waited[waits]}, copy=False)
        sums = summed(frame, ["rank", "partner"]).sort_values(["rank", "ns"], ascending=[True, False], kind="stable")
        first = sums.drop_duplicates("rank")
        return dict(zip(first["rank"].tolist(), first["partner"].tolist(), strict=True))

    @cached_property
    def _beyond(self) -> dict[Leaf, dict[int, int]]:
        """By leaf and rank, how much more the rank has than the median of the ranks, where it has any."""
        ledger = self._attribution.ledger
        traced = self._attribution.windows["rank"].nunique()
        result: dict[Leaf, dict[int, int]] = {}
        sums = ledger.groupby(["leaf", "rank"], as_index=False)[["ns"]].sum()
        for code in sums["leaf"].unique().tolist():
            own = sums[sums["leaf"] == code]
            ns = own["ns"].to_numpy()
            median = int(np.median(np.append(ns, np.zeros(traced - len(ns), np.int64))))
            result[Leaf(code)] = dict(zip(own["rank"].tolist(), np.maximum(ns - median, 0).tolist(), strict=True))
        return result

    def beyond_peers(self, rank: int, leaf: Leaf) -> int:
        """Return how much more of a leaf a rank has than the median of the ranks."""
        return self._beyond.get(leaf, {}).get(rank, 0)

    def longest_pause(self, rank: int) -> Leaf:
        """Return the host's leaf that a rank has most of beyond its peers: what a pipeline waited for, if any."""
        leaves = [leaf for leaf in Leaf if leaf.bucket == Bucket.HOST_GAP]
        longest = max(leaves, key=lambda leaf: self.beyond_peers(rank, leaf))
        return longest if self.beyond_peers(rank, longest) else Leaf.OTHER_HOST


def _origin(rank: int, cls: Leaf, known: _Known) -> tuple[int, Leaf]:
    """Return whom a cost goes back to: waits in a pipeline to the rank waited for, if it was slow or had more work."""
    passed = [rank]
    while cls == Leaf.UNDIVIDED:
        partner = known.awaited.get(passed[-1])
        if partner is None or partner in passed:
            break
        work = known.peers.work.get(partner)
        if work is not None and (work.slow_gpu or work.more_ns):
            return partner, Leaf.NOT_SPLIT
        passed.append(partner)
    return rank, cls


def _cause(rank: int, cls: Leaf, peers: Peers, waited_ns: float) -> str:
    """Return the name of a cause; `waited_ns` is what each other rank waited for the rank's compute, on average.

    Compute that made others wait, but is neither slower nor more than theirs, only ran before the communication that
    they began before it.
    """
    if cls in (Leaf.NOT_SPLIT, Leaf.KERNELS):
        own = peers.work.get(rank)
        if own is not None and own.excess_ns + own.more_ns < EXPLAINED * waited_ns:
            return "launch_order"
        if own is not None and own.more_ns > own.excess_ns:
            return "more_work"
        return "slow_gpu" if own is not None and own.slow_gpu else "slow_kernels"
    if cls.bucket == Bucket.HOST_GAP:
        return "host_pause"
    return {
        Leaf.SLOW_LINK: "slow_link",
        Leaf.UNDIVIDED: "pipeline",
        Leaf.JITTER: "jitter",
        Leaf.DATA_IMBALANCE: "more_work",
    }.get(cls, "unknown")


def _culprit(rank: int, cause: str, by_leaf: Mapping[Leaf, int], known: _Known) -> Culprit:
    own = 0
    evidence: dict[str, Any] = {}
    work = known.peers.work.get(rank)
    if cause == "more_work" and work is not None:
        own = work.more_ns
    elif cause in ("slow_gpu", "slow_kernels") and work is not None:
        own = work.excess_ns
        kernels = [{"name": name, "ratio": ratio, "excess_ns": ns} for name, ratio, ns in work.kernels]
        evidence = {"kernels": kernels, "slower_share": work.slower_ns / max(work.compared_ns, 1)}
    elif cause == "host_pause":
        worst = max(by_leaf, key=lambda leaf: by_leaf[leaf])
        own = known.beyond_peers(rank, worst)
        evidence = {"leaf": worst.label, "caused_ns_by_leaf": {leaf.label: ns for leaf, ns in by_leaf.items()}}
    elif cause == "slow_link":
        slow = known.links.get(rank, [])
        own = sum(link.excess_ns for link in slow)
        evidence = {
            "links": [
                {"group": group_label("", link.members, assumed=False), "kind": link.kind, "ratio": link.ratio}
                for link in slow
            ]
        }
    return Culprit(rank, cause, sum(by_leaf.values()), own, evidence)


def links_found(job: Job, attribution: Attribution) -> list[dict[str, Any]]:
    """Return the slow links as plain rows."""
    slow = slow_links(attribution.carried)
    described = _descriptions(job.communications) if slow else {}
    return [
        {
            "group": group_label(str(described.get(link.members, "")), link.members, assumed=False),
            "kind": link.kind,
            "bytes": link.bytes,
            "count": link.count,
            "ratio": link.ratio,
            "excess_ns": link.excess_ns,
        }
        for link in slow
    ]


def _descriptions(table: pd.DataFrame) -> dict[tuple[int, ...], str]:
    """Return the description of each group, the last one if it goes by several."""
    codes, members = coded(table["members"])
    last = np.full(len(members), -1, np.int64)
    last[codes] = np.arange(len(codes))  # of equal codes, the last row is written last
    return {
        ranks: str(table["group_description"].iloc[row])
        for ranks, row in zip(members, last.tolist(), strict=True)
        if ranks is not None and row >= 0
    }


def lateness(job: Job, attribution: Attribution) -> list[dict[str, int]]:
    """Return by rank and step how long others waited for the rank's arrival, directly: the heat map's cells."""
    exposed = attribution.exposed
    late = np.flatnonzero(in_bucket(exposed["leaf"], Bucket.STRAGGLER))
    step, row, ns = (exposed[name].to_numpy()[late] for name in ("step", "row", "ns"))
    frame = pd.DataFrame({"rank": job.arrivals.awaited_rank[row], "step": step, "ns": ns}, copy=False)
    sums = summed(frame, ["rank", "step"])
    return [{"rank": int(rank), "step": int(step), "ns": int(ns)} for rank, step, ns in sums.itertuples(index=False)]


def as_rows(found: Sequence[Culprit], window_ns: int, mfu: float | None) -> list[dict[str, Any]]:
    """Return culprits as plain rows, with what MFU would gain if their waits vanished (attribution rule 6)."""
    return [
        {
            "rank": culprit.rank,
            "cause": culprit.cause,
            "caused_ns": culprit.caused_ns,
            "own_ns": culprit.own_ns,
            "share": culprit.caused_ns / window_ns,
            "mfu_points": None if mfu is None else 100 * (mfu / (1 - culprit.caused_ns / window_ns) - mfu),
            "evidence": culprit.evidence,
            "where": culprit.where,
        }
        for culprit in found
    ]
