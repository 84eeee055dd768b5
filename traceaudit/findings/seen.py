"""What the rules look at: the result, and the small tables that tell where in the traces something was."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.attribute import Attribution, Job
from traceaudit.findings.finding import MOST_EVIDENCE, Evidence
from traceaudit.intervals import Array
from traceaudit.leaves import Leaf
from traceaudit.mfu.hardware import Gpu, find, gpus
from traceaudit.ranks.collectives import group_label
from traceaudit.ranks.elapsed import by_row
from traceaudit.ranks.instances import summed
from traceaudit.ranks.links import in_windows
from traceaudit.report.formats import call_title, clean, duration, percent, quantity

BACKWARD_KERNEL = re.compile(r"bwd|backward|dgrad|wgrad|multi_tensor_apply|adam", re.I)
LEAF_OF = {leaf.label: leaf for leaf in Leaf}


@dataclass(frozen=True)
class Witness:
    """Tables that the result has no room for.

    Attributes:
        ledger: ``rank, step, leaf, ns, start_ns, end_ns``: the leaves of each step, and its window.
        gaps: the largest idle gaps (`traceaudit.idle.summary.gap_table`).
        exposed: the communications that owned the most time, by leaf and kind: ``rank, step, leaf, kind, ns, start_ns,
            end_ns, stream, bytes, group``.
        carried: ``leaf, kind, count, ns``: communications in the steps by dimension, and how long they ran in sum,
            hidden or not.
    """

    ledger: pd.DataFrame
    gaps: pd.DataFrame
    exposed: pd.DataFrame
    carried: pd.DataFrame


def witness(job: Job, attribution: Attribution, gaps: pd.DataFrame) -> Witness:
    """Return the tables behind the findings, small enough to keep."""
    table = job.communications
    windows = attribution.windows[["rank", "step", "start_ns", "end_ns"]]
    ledger = attribution.ledger.merge(windows, on=["rank", "step"])
    if not len(table):
        none = pd.DataFrame(columns=["rank", "step", "leaf", "kind", "ns", "start_ns", "end_ns", "stream", "bytes"])
        return Witness(ledger, gaps, none.assign(group=""), pd.DataFrame(columns=["leaf", "kind", "ns"]))
    owned = _owning_most(table, attribution.exposed)
    rows = owned["row"].to_numpy(dtype=np.int64)
    columns = {name: table[name].to_numpy()[rows] for name in ("rank", "start_ns", "end_ns", "stream", "bytes")}
    chosen = table.iloc[rows]
    groups = [
        group_label(str(description), members, assumed=bool(assumed))
        for description, members, assumed in zip(
            *(chosen[name].to_numpy(dtype=object) for name in ("group_description", "members", "assumed")), strict=True
        )
    ]
    return Witness(ledger, gaps, owned.assign(**columns, group=groups), _carried(job, attribution))


def _owning_most(table: pd.DataFrame, exposed: pd.DataFrame) -> pd.DataFrame:
    """Return ``row, leaf, ns, step, kind`` of the communications that own the most of each leaf, by kind.

    A leaf at a time, so that what is summed up by communication is in memory once.
    """
    kinds = table["kind"].cat.codes.to_numpy()
    leaf, row = (exposed[name].to_numpy() for name in ("leaf", "row"))
    found = []
    for code in np.unique(leaf).tolist():
        own = np.flatnonzero(leaf == code)
        ns = by_row(row[own], exposed["ns"].to_numpy()[own], len(table))
        owns = np.zeros(len(table), np.bool_)
        owns[row[own]] = True
        owning = np.flatnonzero(owns)
        for kind in np.unique(kinds[owning]).tolist():
            most = owning[kinds[owning] == kind]
            most = most[_largest(ns[most])]
            first = [int(own[np.argmax(row[own] == one)]) for one in most]
            step = exposed["step"].to_numpy()[first]
            found.append(pd.DataFrame({"row": most, "leaf": code, "ns": ns[most], "step": step, "kind": kind}))
    none = pd.DataFrame({name: np.empty(0, np.int64) for name in ("row", "leaf", "ns", "step", "kind")})
    owned = pd.concat(found, ignore_index=True) if found else none
    owned = owned.sort_values(["ns", "row", "leaf"], ascending=[False, True, True], kind="stable")
    return owned.assign(kind=table["kind"].cat.categories.to_numpy(dtype=object)[owned["kind"].to_numpy()])


def _largest(values: Array) -> Array:
    """Return where the largest values stand, the first of equal ones first; `MOST_EVIDENCE` at most."""
    least = np.partition(values, -min(MOST_EVIDENCE, len(values)))[-min(MOST_EVIDENCE, len(values))]
    large = np.flatnonzero(values >= least)
    return np.asarray(large[np.argsort(-values[large], kind="stable")][:MOST_EVIDENCE])


def _carried(job: Job, attribution: Attribution) -> pd.DataFrame:
    table = job.communications
    inside = in_windows(table, attribution.windows)
    ns = np.where(inside, (table["end_ns"] - table["start_ns"]).to_numpy(), 0)
    frame = pd.DataFrame(
        {"leaf": table["leaf"].to_numpy(), "kind": table["kind"].array, "count": inside, "ns": ns}, copy=False
    )
    sums = summed(frame, ["leaf", "kind"], ("count", "ns"))
    sums = sums[sums["count"] > 0].reset_index(drop=True)
    return sums.assign(kind=sums["kind"].astype(str))


@dataclass(frozen=True)
class Seen:
    """The result under construction and its witness, with the questions that rules ask of them."""

    result: Mapping[str, Any]
    witness: Witness

    @property
    def window_ns(self) -> int:
        """The analysed time, all ranks and steps together."""
        return int(self.result["job"]["window_ns"])

    @property
    def step_count(self) -> int:
        """Number of analysed steps of all ranks together."""
        return max(sum(len(rank.get("steps", ())) for rank in self.result.get("ranks", ())), 1)

    @property
    def training(self) -> bool | None:
        """Whether a training step was recorded: True, False (only forwards), or None where nothing tells."""
        phase = self.result.get("host_facts", {}).get("phase", {})
        kernels = self.result.get("kernels", ())
        if phase.get("backward") or phase.get("optimizer") or phase.get("train"):
            return True
        if any(BACKWARD_KERNEL.search(row["name"]) for row in kernels if row["kind"] == "compute"):
            return True
        return False if phase.get("operators") else None

    @property
    def gpu(self) -> Gpu | None:
        """The row of the peak table for the job's GPU, which has either the table's name or that of the traces."""
        name = str((self.result["model"].get("peak") or {}).get("gpu") or self.result["job"].get("gpu") or "")
        return next((gpu for gpu in gpus() if gpu.name == name), None) or find(name)

    @cached_property
    def _ns_by_rank(self) -> dict[tuple[int, int], int]:
        sums = self.witness.ledger.groupby(["rank", "leaf"], as_index=False)[["ns"]].sum()
        return {(rank, leaf): ns for rank, leaf, ns in zip(*(sums[name].tolist() for name in sums), strict=True)}

    def leaf_ns_of(self, rank: int, leaf: Leaf) -> int:
        """Return a rank's time in a leaf."""
        return self._ns_by_rank.get((rank, int(leaf)), 0)

    def leaf_ns(self, leaf: Leaf) -> int:
        """Return the job's time in a leaf."""
        return sum(int(row["ns"]) for row in self.result["job"]["leaves"] if LEAF_OF[row["leaf"]] == leaf)

    def share(self, ns: float) -> str:
        """Return an amount of time as a share of the analysed time, in words."""
        return f"{percent(ns / self.window_ns if self.window_ns else 0.0)} of the time"

    def facts(self, name: str) -> Mapping[str, Any]:
        """Return the facts behind a cause of host gaps."""
        found: Mapping[str, Any] = self.result.get("host_facts", {}).get(name, {})
        return found

    def of_gaps(self, leaves: Collection[Leaf], ranks: Collection[int] | None = None) -> tuple[Evidence, ...]:
        """Return the longest idle gaps of some leaves as evidence."""
        table = self.witness.gaps
        if not len(table):
            return ()
        chosen = table[table["leaf"].isin([leaf.label for leaf in leaves])]
        if ranks is not None:
            chosen = chosen[chosen["rank"].isin(list(ranks))]
        chosen = chosen.sort_values(["ns", "rank", "start_ns"], ascending=[False, True, True], kind="stable")
        return tuple(gap_evidence(row) for row in chosen.head(MOST_EVIDENCE).to_dict("records"))

    def of_communications(self, leaves: Collection[Leaf], kinds: Collection[str] | None = None) -> tuple[Evidence, ...]:
        """Return the communications that owned the most time of some leaves as evidence."""
        table = self.witness.exposed
        chosen = table[table["leaf"].isin([int(leaf) for leaf in leaves])]
        if kinds is not None:
            chosen = chosen[chosen["kind"].isin(list(kinds))]
        chosen = chosen.sort_values("ns", ascending=False, kind="stable").head(MOST_EVIDENCE)
        return tuple(_communication_evidence(row) for row in chosen.to_dict("records"))

    def of_ledger(self, leaf: Leaf, what: str) -> tuple[Evidence, ...]:
        """Return the ranks' steps with the most time of a leaf as evidence."""
        table, columns = self.witness.ledger, ("rank", "step", "ns", "start_ns", "end_ns")
        chosen = table[table["leaf"] == leaf].sort_values(["ns", "rank"], ascending=[False, True], kind="stable")
        return tuple(
            Evidence(f"{duration(ns)} {what} in this step", int(rank), int(step), None, int(start), int(end))
            for rank, step, ns, start, end in chosen[list(columns)].head(MOST_EVIDENCE).itertuples(index=False)
        )

    def of_kernels(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Evidence, ...]:
        """Return kernels, each at its longest run, as evidence; rows are those of the result."""
        ordered = sorted(rows, key=lambda row: -row["ns"])[:MOST_EVIDENCE]
        return tuple(kernel_evidence(row, self.window_ns) for row in ordered)


def gap_evidence(row: Mapping[Any, Any]) -> Evidence:
    """Return an idle gap as evidence."""
    call, inside, frame = (str(row[name] or "") for name in ("call", "inside", "frame"))
    words = f"GPU idle for {duration(row['ns'])}"
    words += f": {call_title(call)}" if call else ""
    words += f" in {call_title(inside)}" if inside and inside != call else ""
    words += f" at {clean(frame, 80)}" if frame and not frame.startswith("<built-in") else ""
    thread, stream = int(row["thread"]), int(row["stream"])
    track = f"thread {thread}" if thread >= 0 else f"stream {stream}" if stream >= 0 else None
    return Evidence(
        words,
        rank=int(row["rank"]),
        step=int(row["step"]),
        track=track,
        start_ns=int(row["start_ns"]),
        end_ns=int(row["end_ns"]),
        name=call or str(row["ended_by"]) or None,
    )


def _communication_evidence(row: Mapping[Any, Any]) -> Evidence:
    size = f" of {quantity(int(row['bytes']), 'B')}" if row["bytes"] > 0 else ""
    kind = str(row["kind"] or "communication").replace("_", " ")
    return Evidence(
        f"{kind}{size} in {clean(row['group'], 60)}: {duration(row['ns'])} under no compute",
        rank=int(row["rank"]),
        step=int(row["step"]),
        track=f"stream {int(row['stream'])}",
        start_ns=int(row["start_ns"]),
        end_ns=int(row["end_ns"]),
        name=str(row["group"]),
    )


def kernel_evidence(row: Mapping[str, Any], window_ns: int) -> Evidence:
    """Return a kernel at its longest run as evidence."""
    at = row.get("longest") or {}
    share = percent(row["ns"] / window_ns) if window_ns else ""
    return Evidence(
        f"{clean(row['short_name'], 60)}: {row['count']:,} runs, {share} of the time"
        + (f", the longest {duration(at['end_ns'] - at['start_ns'])}" if at else ""),
        rank=at.get("rank"),
        track=f"stream {at['stream']}" if at else None,
        start_ns=at.get("start_ns"),
        end_ns=at.get("end_ns"),
        name=row["name"],
    )
