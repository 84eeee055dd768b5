"""The ranks that made others wait, by what it cost, with causes and evidence (attribution rule 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.attribute import Attribution, Job
from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.ranks.collectives import group_label
from traceaudit.ranks.instances import summed
from traceaudit.ranks.links import SlowLink, slow_links
from traceaudit.ranks.peers import Peers
from traceaudit.ranks.where import worst_place

SHOWN_LINKS = 3
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
        where: its worst instance (`traceaudit.ranks.where`); None where it cannot be placed.
    """

    rank: int
    cause: str
    caused_ns: int
    own_ns: int
    evidence: dict[str, Any]
    where: dict[str, Any] | None = None


def culprits(job: Job, attribution: Attribution) -> list[Culprit]:
    """Return who caused the waits for late ranks, the most expensive first; the costs add up to the waits."""
    costs = attribution.blame.costs
    links = slow_links(attribution.carried)
    groups: dict[tuple[int, str], dict[Leaf, int]] = {}
    computed = costs[costs["cls"].isin((Leaf.NOT_SPLIT, Leaf.KERNELS))].groupby("rank")["ns"].sum()
    waiting = max(len(job.accounts) - 1, 1)
    per_rank = {int(rank): int(ns) / waiting for rank, ns in zip(computed.index.to_numpy(), computed, strict=True)}
    for number, cls, ns in zip(costs["rank"], costs["cls"], costs["ns"], strict=True):
        rank, leaf = _origin(int(number), Leaf(int(cls)), job)
        leaf = _longest_pause(rank, attribution) if leaf == Leaf.HOST_CAUSED else leaf
        by_leaf = groups.setdefault((rank, _cause(rank, leaf, job.peers, per_rank.get(rank, 0.0))), {})
        by_leaf[leaf] = by_leaf.get(leaf, 0) + int(ns)
    found = [
        _culprit(rank, cause, by_leaf, job, attribution, links)
        for (rank, cause), by_leaf in groups.items()
        if any(by_leaf.values())
    ]
    return sorted(found, key=lambda culprit: (-culprit.caused_ns, culprit.rank, culprit.cause))


def _origin(rank: int, cls: Leaf, job: Job) -> tuple[int, Leaf]:
    """Return whom a cost goes back to: waits in a pipeline to the rank waited for, if it was slow or had more work."""
    passed = [rank]
    while cls == Leaf.UNDIVIDED:
        partner = _awaited_in_pipeline(passed[-1], job)
        if partner is None or partner in passed:
            break
        work = job.peers.work.get(partner)
        if work is not None and (work.slow_gpu or work.more_ns):
            return partner, Leaf.NOT_SPLIT
        passed.append(partner)
    return rank, cls


def _awaited_in_pipeline(rank: int, job: Job) -> int | None:
    """Return the rank that another waited for the longest in its point-to-point communications."""
    table = job.communications
    own = np.flatnonzero(
        (table["rank"] == rank).to_numpy() & table["pipeline"].to_numpy(dtype=np.bool_) & job.arrivals.known
    )
    partner = job.arrivals.awaited_rank[own]
    waits = np.maximum(job.arrivals.awaited_ns[own] - table["start_ns"].to_numpy(dtype=np.int64)[own], 0)
    others = partner != rank
    if not (waits[others] > 0).any():
        return None
    ranks, inverse = np.unique(partner[others], return_inverse=True)
    return int(ranks[np.argmax(np.bincount(inverse, waits[others]))])


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


def _culprit(
    rank: int,
    cause: str,
    by_leaf: dict[Leaf, int],
    job: Job,
    attribution: Attribution,
    links: Sequence[SlowLink],
) -> Culprit:
    own = 0
    evidence: dict[str, Any] = {}
    work = job.peers.work.get(rank)
    if cause == "more_work" and work is not None:
        own = work.more_ns
    elif cause in ("slow_gpu", "slow_kernels") and work is not None:
        own = work.excess_ns
        kernels = [{"name": name, "ratio": ratio, "excess_ns": ns} for name, ratio, ns in work.kernels]
        evidence = {"kernels": kernels, "slower_share": work.slower_ns / max(work.compared_ns, 1)}
    elif cause == "host_pause":
        worst = max(by_leaf, key=lambda leaf: by_leaf[leaf])
        own = _beyond_peers(rank, worst, attribution)
        evidence = {"leaf": worst.label, "caused_ns_by_leaf": {leaf.label: ns for leaf, ns in by_leaf.items()}}
    elif cause == "slow_link":
        slow = [link for link in links if rank in link.members][:SHOWN_LINKS]
        own = sum(link.excess_ns for link in slow)
        evidence = {
            "links": [{"group": str(list(link.members)), "kind": link.kind, "ratio": link.ratio} for link in slow]
        }
    place = worst_place(rank, cause, evidence, job, attribution)
    return Culprit(rank, cause, sum(by_leaf.values()), own, evidence, place)


def _longest_pause(rank: int, attribution: Attribution) -> Leaf:
    """Return the host's leaf that a rank has most of beyond its peers: what a pipeline waited for, if anything did."""
    leaves = [leaf for leaf in Leaf if leaf.bucket == Bucket.HOST_GAP]
    beyond = [_beyond_peers(rank, leaf, attribution) for leaf in leaves]
    return leaves[int(np.argmax(beyond))] if max(beyond) else Leaf.OTHER_HOST


def _beyond_peers(rank: int, leaf: Leaf, attribution: Attribution) -> int:
    """Return how much more of a leaf a rank has than the median of the ranks."""
    ledger = attribution.ledger
    ranks = sorted(int(number) for number in attribution.windows["rank"].unique())
    sums = ledger[ledger["leaf"] == leaf].groupby("rank")["ns"].sum().reindex(ranks, fill_value=0)
    return max(int(sums.loc[rank]) - int(np.median(sums.to_numpy())), 0)


def links_found(job: Job, attribution: Attribution) -> list[dict[str, Any]]:
    """Return the slow links as plain rows."""
    described: dict[tuple[int, ...], str] = {}
    slow = slow_links(attribution.carried)
    if slow:
        named = job.communications[["members", "group_description"]].drop_duplicates("members", keep="last")
        described = dict(zip(named["members"], named["group_description"], strict=True))
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
