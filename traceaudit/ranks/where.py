"""Where in a rank's file the worst instance of what made others wait is, so that it can be looked at."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.attribute import Attribution, Job
from traceaudit.leaves import Bucket, Leaf, in_bucket

Place = dict[str, Any]


def worst_place(rank: int, cause: str, evidence: Mapping[str, Any], job: Job, attribution: Attribution) -> Place | None:
    """Return the place of a culprit's worst instance; None where nothing of it has one.

    Keys: ``rank, file, track, start_ns, end_ns, name, step``; times by the clock of the rank's file. It is the longest
    gap of a pausing host, the longest run of the kernel with the largest excess, the longest transfer over a slow link,
    and else the collective for which others waited for the rank the longest.
    """
    own = next((account for account in job.accounts if account.rank == rank), None)
    if own is None:
        return None
    steps = attribution.windows[attribution.windows["rank"] == rank]
    found = None
    if cause == "host_pause":
        found = _longest_gap(own, str(evidence.get("leaf")), steps)
    elif cause in ("slow_gpu", "slow_kernels") and evidence.get("kernels"):
        found = _longest_run(own, evidence["kernels"][0]["name"], steps)
    elif cause == "slow_link":
        found = _longest_transfer(rank, evidence, job, steps)
    found = found or _latest_arrival(rank, job, attribution, steps)
    return None if found is None else {"rank": rank, "file": own.origin.file.name, **found}


def _step_at(steps: pd.DataFrame, start_ns: int) -> int | None:
    """Return the step whose window holds an instant."""
    inside = steps[(steps["start_ns"] <= start_ns) & (steps["end_ns"] > start_ns)]
    return int(inside["step"].iloc[0]) if len(inside) else None


def _longest_gap(own: RankAccount, leaf: str, steps: pd.DataFrame) -> Place | None:
    gaps = own.gaps
    if not len(gaps):
        return None
    named = np.array([Leaf(int(code)).label == leaf for code in gaps["leaf"]], np.bool_)
    gaps = gaps[named & gaps["step"].isin(steps["step"]).to_numpy()]
    if not len(gaps):
        return None
    row = gaps.iloc[int(np.argmax((gaps["end_ns"] - gaps["start_ns"]).to_numpy()))]
    thread = int(row["thread"])
    return {
        "track": f"thread {thread}" if thread >= 0 else f"stream {int(row['stream'])}",
        "start_ns": int(row["start_ns"]),
        "end_ns": int(row["end_ns"]),
        "name": str(row["call"] or row["ended_by"]),
        "step": int(row["step"]),
    }


def _longest_run(own: RankAccount, name: str, steps: pd.DataFrame) -> Place | None:
    runs = own.kernels[own.kernels["name"] == name]
    if not len(runs):
        return None
    row = runs.iloc[int(np.argmax((runs["end_ns"] - runs["start_ns"]).to_numpy()))]
    return _on_stream(row, name, steps)


def _on_stream(row: "pd.Series[Any]", name: str, steps: pd.DataFrame) -> Place:
    return {
        "track": f"stream {int(row['stream'])}",
        "start_ns": int(row["start_ns"]),
        "end_ns": int(row["end_ns"]),
        "name": name,
        "step": _step_at(steps, int(row["start_ns"])),
    }


def _longest_transfer(rank: int, evidence: Mapping[str, Any], job: Job, steps: pd.DataFrame) -> Place | None:
    """Return the transfer over the rank's slow links that took longest from its last arrival on."""
    table = job.communications
    links = {(str(link["group"]), str(link["kind"])) for link in evidence.get("links", ())}
    rows = np.flatnonzero((table["rank"] == rank).to_numpy() & job.arrivals.known)
    kinds, members = table["kind"].to_numpy(dtype=object), table["members"].to_numpy(dtype=object)
    rows = np.array([row for row in rows if (str(list(members[row])), str(kinds[row])) in links], np.intp)
    if not len(rows):
        return None
    length = table["end_ns"].to_numpy()[rows] - job.arrivals.awaited_ns[rows]
    return _collective(int(rows[np.argmax(length)]), job, steps)


def _latest_arrival(rank: int, job: Job, attribution: Attribution, steps: pd.DataFrame) -> Place | None:
    """Return the rank's own part in the collective for which another waited for it the longest."""
    exposed = attribution.exposed
    rows = exposed["row"].to_numpy(dtype=np.int64)
    late = in_bucket(exposed["leaf"], Bucket.STRAGGLER) & (job.arrivals.awaited_rank[rows] == rank)
    if not late.any():
        return None
    waited = rows[late][np.argmax(exposed["ns"].to_numpy()[late])]
    same = job.matching.instance == job.matching.instance[waited]
    own = np.flatnonzero(same & (job.communications["rank"] == rank).to_numpy())
    return _collective(int(own[0]), job, steps) if len(own) else None


def _collective(row: int, job: Job, steps: pd.DataFrame) -> Place:
    entry = job.communications.iloc[row]
    return _on_stream(entry, str(entry["kind"] or "communication"), steps)
