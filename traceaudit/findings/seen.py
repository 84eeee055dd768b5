"""What the rules look at: the result, and the small tables that tell where in the traces something was."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.attribute import Attribution, Job
from traceaudit.findings.finding import MOST_EVIDENCE, Evidence
from traceaudit.leaves import Leaf
from traceaudit.mfu.hardware import Gpu, find, gpus
from traceaudit.ranks.collectives import group_label
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
    owned = attribution.exposed.groupby(["row", "leaf"], as_index=False).agg(ns=("ns", "sum"), step=("step", "first"))
    rows = owned["row"].to_numpy(dtype=np.int64)
    owned = owned.assign(kind=table["kind"].to_numpy(dtype=object)[rows])
    owned = owned.sort_values(["ns", "row"], ascending=[False, True], kind="stable")
    owned = owned.groupby(["leaf", "kind"], sort=False).head(MOST_EVIDENCE)
    rows = owned["row"].to_numpy(dtype=np.int64)
    columns = {name: table[name].to_numpy()[rows] for name in ("rank", "start_ns", "end_ns", "stream", "bytes")}
    groups = [
        group_label(str(description), members, assumed=bool(assumed))
        for description, members, assumed in zip(
            *(table[name].to_numpy(dtype=object)[rows] for name in ("group_description", "members", "assumed")),
            strict=True,
        )
    ]
    return Witness(ledger, gaps, owned.assign(**columns, group=groups), _carried(job, attribution))


def _carried(job: Job, attribution: Attribution) -> pd.DataFrame:
    table = job.communications
    span = attribution.windows.groupby("rank").agg(low=("start_ns", "min"), high=("end_ns", "max"))
    span = span.reindex(table["rank"].to_numpy())
    low, high = span["low"].to_numpy(), span["high"].to_numpy()
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    frame = pd.DataFrame({"leaf": table["leaf"], "kind": table["kind"].astype(str), "count": 1, "ns": end - start})
    inside = (end > low) & (start < high)
    return frame[inside].groupby(["leaf", "kind"], as_index=False)[["count", "ns"]].sum()


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
