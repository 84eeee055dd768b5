"""Where in time the leaves are: the attribution of a rank as slices that do not overlap.

Some leaves are amounts and not stretches: model FLOPs at the peak, the memory floor, the parts of a pipeline's waits,
the causes of a wait. They are laid into the stretches that they were taken from, by convention: each kernel is divided
in the proportions in which its family's time of the step is, each undivided wait in those of all such waits of the
step, each wait for a late rank in those of its causes; within one stretch they follow each other in the order of the
leaves. The sums by rank, step and leaf are those of the ledger, to the nanosecond.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.attribute import Attribution, Job
from traceaudit.errors import InputError, PartitionError
from traceaudit.intervals import Array
from traceaudit.leaves import FAMILIES, Leaf
from traceaudit.reading.parallel import Task, reduce_one

COLUMNS = ("step", "start_ns", "end_ns", "leaf", "name", "row")


@dataclass(frozen=True)
class Slicer:
    """Tells where in time the leaves of each rank are.

    Attributes:
        attribution: of the job.
        by_family: what the compute time of each family became (`traceaudit.mfu.roofline.Split`).
        tasks: by rank, to read a trace again whose account did not keep its pieces.
        accounts: by rank, of those that kept them.
        job: kept together with the pieces; None without.
    """

    attribution: Attribution
    by_family: pd.DataFrame
    tasks: Mapping[int, Task]
    accounts: Mapping[int, RankAccount]
    job: Job | None = None

    def of(self, rank: int) -> pd.DataFrame:
        """Return the slices of a rank: `COLUMNS`, by time; see `slices`.

        Raises:
            InputError: the rank was not analysed, or its trace cannot be read any more.
        """
        if rank in self.accounts:
            return slices(rank, self.accounts[rank].pieces, self.attribution, self.by_family)
        if rank not in self.tasks:
            raise InputError(f"rank {rank} is not among the analysed ranks.")
        outcome = reduce_one(self.tasks[rank])
        if outcome.account is None:
            raise InputError(f"{self.tasks[rank].place.name}: {outcome.reason}")
        return slices(rank, outcome.account.pieces, self.attribution, self.by_family)


def slices(rank: int, pieces: pd.DataFrame, attribution: Attribution, by_family: pd.DataFrame) -> pd.DataFrame:
    """Return the time of a rank as slices that partition its windows: `COLUMNS`, by time, on the rank's own clock.

    ``leaf`` is a `Leaf`, ``name`` the kernel, copy or what ended a gap, ``row`` the communication in the job's table,
    -1 elsewhere. `pieces` are those of the rank's account.

    Raises:
        PartitionError: the slices do not add up to the ledger.
    """
    windows = attribution.windows[attribution.windows["rank"] == rank]
    own = pieces[pieces["step"].isin(windows["step"])].assign(row=-1)
    family = own["leaf"].isin([int(leaf) for leaf in FAMILIES])
    exposed = exposed_slices(rank, attribution, windows)
    pooled = exposed["leaf"] == Leaf.UNDIVIDED
    bubbles = attribution.bubbles.parts
    parts = [
        own[~family],
        _families(own[family], by_family[by_family["rank"] == rank]),
        exposed[~pooled],
        _pooled(exposed[pooled], bubbles[bubbles["rank"] == rank]),
    ]
    found = pd.concat([part[list(COLUMNS)] for part in parts if len(part)], ignore_index=True)
    found = found.astype({"leaf": np.int64, "row": np.int64}).sort_values("start_ns", kind="stable", ignore_index=True)
    _check(rank, found, windows, attribution.ledger)
    return found


def _families(pieces: pd.DataFrame, amounts: pd.DataFrame) -> pd.DataFrame:
    """Divide the compute of each step and family in the proportions of what that family's time became."""
    parts = [pieces.iloc[:0]]
    divided = dict(iter(amounts.groupby(["step", "family"])))
    for key, own in pieces.groupby(["step", "leaf"]):
        became = divided.get(key)
        if became is not None:
            parts.append(_laid(own, became.groupby("leaf")["ns"].sum()))
    return pd.concat(parts, ignore_index=True)


def _pooled(pieces: pd.DataFrame, amounts: pd.DataFrame) -> pd.DataFrame:
    """Divide the pipeline's waits of each step in the proportions of what they became."""
    parts = [pieces.iloc[:0]]
    divided = dict(iter(amounts.groupby("step")))
    for step, own in pieces.groupby("step"):
        if step in divided:
            parts.append(_laid(own, divided[step].groupby("leaf")["ns"].sum()))
    return pd.concat(parts, ignore_index=True)


def _laid(pieces: pd.DataFrame, amounts: "pd.Series[int]") -> pd.DataFrame:
    """Cut pieces so that each is divided in the proportions of amounts, which add up to them exactly."""
    start = pieces["start_ns"].to_numpy(dtype=np.int64)
    left = pieces["end_ns"].to_numpy(dtype=np.int64) - start
    frames = []
    for leaf, amount in zip(amounts.index.to_numpy(), amounts.to_numpy(), strict=True):
        taken = proportional(left, int(amount))
        frames.append(pieces.assign(start_ns=start, end_ns=start + taken, leaf=leaf)[taken > 0])
        start, left = start + taken, left - taken
    return pd.concat(frames, ignore_index=True)


def proportional(length: Array, amount: int) -> Array:
    """Take an amount out of lengths, from each in proportion, in whole nanoseconds and never more than it has.

    >>> proportional(np.array([10, 20, 31]), 30).tolist(), proportional(np.array([5, 1]), 6).tolist()
    ([5, 10, 15], [5, 1])
    """
    whole = int(length.sum())
    if amount >= whole:
        return length.copy()
    marks = np.rint(np.cumsum(length) * (amount / whole)).astype(np.int64)
    taken = np.minimum(np.diff(marks, prepend=0), length)
    missing = amount - int(taken.sum())  # of rounding
    room = length - taken if missing > 0 else taken
    moved = np.diff(np.minimum(np.cumsum(room), abs(missing)), prepend=0)
    return np.asarray(taken + np.sign(missing) * moved, np.int64)


def exposed_slices(rank: int, attribution: Attribution, windows: pd.DataFrame) -> pd.DataFrame:
    """Return the time owned by communications, and the waits at the last step's end; of `windows` of the rank.

    Waits of a pipeline are `Leaf.UNDIVIDED` here. Columns: `COLUMNS`.
    """
    table = attribution.exposed
    own = table[(table["rank"] == rank).to_numpy() & table["step"].isin(windows["step"]).to_numpy()]
    own = own.sort_values(["from_ns", "leaf"], kind="stable")
    begun, ns = (own[name].to_numpy(dtype=np.int64) for name in ("from_ns", "ns"))
    begun = begun + attribution.begun_ns[rank]
    before = np.cumsum(ns) - ns
    head = np.concatenate(([True], begun[1:] != begun[:-1])) if len(begun) else np.empty(0, np.bool_)
    start = begun + before - before[head][np.cumsum(head) - 1]
    waited = attribution.waited
    last = waited[waited["rank"] == rank].merge(windows[["step", "end_ns"]], on="step")
    tail = {"start_ns": last["end_ns"] - last["ns"], "end_ns": last["end_ns"]}
    return pd.concat(
        [
            own.assign(start_ns=start, end_ns=start + ns, name="")[list(COLUMNS)],
            last.assign(**tail, name="", row=-1)[list(COLUMNS)],
        ],
        ignore_index=True,
    )


def _check(rank: int, found: pd.DataFrame, windows: pd.DataFrame, ledger: pd.DataFrame) -> None:
    """Raise unless slices are disjoint and their sums are the ledger's."""
    start, end = found["start_ns"].to_numpy(), found["end_ns"].to_numpy()
    sums = (found["end_ns"] - found["start_ns"]).groupby([found["step"], found["leaf"]]).sum()
    wanted = ledger[ledger["rank"] == rank].set_index(["step", "leaf"])["ns"]
    differing = sums.sub(wanted, fill_value=0)
    if (differing != 0).any() or (end[:-1] > start[1:]).any() or sums.sum() != windows["window_ns"].sum():
        raise PartitionError(
            f"rank {rank}: its slices differ from its leaves. "
            "This is a fault of traceaudit; please report it with the trace."
        )
