"""Where in a rank's file the worst instance of what made others wait is, so that it can be looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.attribute import Attribution, Job
from traceaudit.intervals import Array
from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.ranks.instances import stretches
from traceaudit.ranks.links import SlowLink
from traceaudit.ranks.members import coded

Place = dict[str, Any]


class Places:
    """Finds the worst instances of culprits; what concerns all ranks is looked up once."""

    def __init__(self, job: Job, attribution: Attribution) -> None:
        self._job = job
        self._windows = attribution.windows
        self._accounts = {own.rank: own for own in job.accounts}
        self._awaited = _longest_awaited(job, attribution.exposed)

    def worst(self, rank: int, cause: str, evidence: Mapping[str, Any], links: Sequence[SlowLink]) -> Place | None:
        """Return the place of a culprit's worst instance; None where nothing of it has one.

        Keys: ``rank, file, track, start_ns, end_ns, name, step``; times by the clock of the rank's file. It is the
        longest gap of a pausing host, the longest run of the kernel with the largest excess, the longest transfer over
        one of the slow `links`, and else the collective for which others waited for the rank the longest.
        """
        own = self._accounts.get(rank)
        if own is None:
            return None
        steps = self._windows[self._windows["rank"] == rank]
        found = None
        if cause == "host_pause":
            found = _longest_gap(own, str(evidence.get("leaf")), steps)
        elif cause in ("slow_gpu", "slow_kernels") and evidence.get("kernels"):
            found = _longest_run(own, evidence["kernels"][0]["name"], steps)
        elif cause == "slow_link":
            found = self._longest_transfer(rank, links, steps)
        found = found or self._latest_arrival(rank, steps)
        return None if found is None else {"rank": rank, "file": own.origin.file.name, **found}

    def _longest_transfer(self, rank: int, links: Sequence[SlowLink], steps: pd.DataFrame) -> Place | None:
        """Return the transfer over the rank's slow links that took longest from its last arrival on."""
        table, arrivals = self._job.communications, self._job.arrivals
        rows = np.flatnonzero(table["rank"].to_numpy() == rank)
        rows = rows[arrivals.known[rows]]
        mine = table.iloc[rows]
        codes, groups = coded(mine["members"])
        slow = {(groups.index(link.members), link.kind) for link in links if link.members in groups}
        rows = rows[[pair in slow for pair in zip(codes.tolist(), mine["kind"], strict=True)]]
        if not len(rows):
            return None
        length = table["end_ns"].to_numpy()[rows] - arrivals.awaited_ns[rows]
        return self._collective(int(rows[np.argmax(length)]), steps)

    def _latest_arrival(self, rank: int, steps: pd.DataFrame) -> Place | None:
        """Return the rank's own part in the collective for which another waited for it the longest."""
        waited = int(self._awaited[rank]) if rank < len(self._awaited) else -1
        if waited < 0:
            return None
        table, rows = self._job.communications, self._job.matching.rows
        place = int(rows.place[waited])
        same = rows.rows[rows.first[place] : rows.first[place] + rows.sizes[place]]
        own = same[table["rank"].to_numpy()[same] == rank]
        return self._collective(int(own[0]), steps) if len(own) else None

    def _collective(self, row: int, steps: pd.DataFrame) -> Place:
        entry = self._job.communications.iloc[row]
        return _on_stream(entry, str(entry["kind"] or "communication"), steps)


def _longest_awaited(job: Job, exposed: pd.DataFrame) -> Array:
    """Return by rank the row of the longest wait for its arrival, the first of equal ones; -1 where nobody waited."""
    size = int(job.arrivals.awaited_rank.max(initial=-1)) + 1
    longest, found = np.full((2, size), -1, np.int64)
    for stretch in stretches(len(exposed)):
        some = exposed.iloc[stretch]
        late = in_bucket(some["leaf"], Bucket.STRAGGLER)
        row, ns = (some[name].to_numpy(dtype=np.int64)[late] for name in ("row", "ns"))
        awaited = job.arrivals.awaited_rank[row]
        order = np.lexsort((np.arange(len(row)), -ns, awaited))
        first = order[np.flatnonzero(np.diff(awaited[order], prepend=-1))]
        first = first[ns[first] > longest[awaited[first]]]
        longest[awaited[first]], found[awaited[first]] = ns[first], row[first]
    return found


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
