"""The part of a rank's account about its kernels: work by class, shapes of matrix products, slowing by overlap."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing
from traceaudit.events import Kind
from traceaudit.flops import Counted
from traceaudit.intervals import Array, Intervals, cross, elapsed
from traceaudit.leaves import Leaf
from traceaudit.steps import Steps
from traceaudit.timeline import busy

MIN_SAMPLES = 5  # runs of a kernel beside communication, and without, below which they are not compared
SLOWER = 1.02  # medians closer than this are the same

Flags = npt.NDArray[np.bool_]


def signature_codes(events: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return what makes two runs the same kernel at work: codes of ``name``, ``grid`` and the operator's ``dims``."""
    rows = table["row"].to_numpy()
    shaped = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & events["dims"].notna().to_numpy())
    operator = enclosing(events, shaped, table["launch"].to_numpy())
    return pd.DataFrame(
        {
            "name": events["name"].cat.codes.to_numpy()[rows],
            "grid": events["grid"].cat.codes.to_numpy()[rows],
            "dims": np.where(operator >= 0, events["dims"].cat.codes.to_numpy()[np.maximum(operator, 0)], -1),
        }
    )


def distinct(codes: pd.DataFrame) -> Array:
    """Return one number a row that equal rows have in common."""
    return np.asarray(codes.groupby(list(codes)).ngroup(), np.int64)


def owned_compute(pieces: pd.DataFrame, steps: Steps) -> pd.DataFrame:
    """Return ``step, owner, ns`` of compute time, by piece, cut at the windows."""
    owned = pieces[pieces["state"] == State.COMPUTE]
    common = cross(Intervals(owned["start_ns"].to_numpy(), owned["end_ns"].to_numpy()), steps.windows)
    return pd.DataFrame(
        {
            "step": steps.step[common.right],
            "owner": owned["owner"].to_numpy()[common.left],
            "ns": common.end - common.start,
        }
    )


def work_classes(table: pd.DataFrame, time: pd.DataFrame, again: Flags, work: Counted) -> pd.DataFrame:
    """Sum up compute by equal work: ``step, family, recompute, dtype, executed, bytes, count, ns``.

    A row stands for `count` operators, each of which runs `executed` FLOPs and moves at least `bytes`; the family is
    that of the operator's longest kernel. Time of kernels without known work is left out.
    """
    owner = time["owner"].to_numpy()
    known = work.work[owner] >= 0
    frame = time[known].assign(work=work.work[owner[known]])
    order = np.lexsort((-(table["end_ns"] - table["start_ns"]).to_numpy(), work.work))
    heads = pd.Series(order, index=work.work[order])
    heads = heads[~heads.index.duplicated()]
    sums = pd.DataFrame({"work": work.work, "executed": work.executed, "bytes": np.nan_to_num(work.bytes)})
    sums = sums[sums["work"] >= 0].groupby("work").sum()
    instance = frame.groupby(["step", "work"], as_index=False)[["ns"]].sum()
    head = heads.reindex(instance["work"]).to_numpy(dtype=np.int64)
    totals = sums.reindex(instance["work"])
    instance = instance.assign(
        family=table["family"].to_numpy()[head].astype(np.int64),
        recompute=again[head],
        dtype=work.dtype[head],
        executed=np.rint(totals["executed"].to_numpy()),
        bytes=np.rint(totals["bytes"].to_numpy()),
        count=1,
    )
    keys = ["step", "family", "recompute", "dtype", "executed", "bytes"]
    classes: pd.DataFrame = instance.groupby(keys, as_index=False)[["count", "ns"]].sum()
    return classes


def slowed_by_overlap(table: pd.DataFrame, time: pd.DataFrame, again: Flags, signature: Array) -> pd.DataFrame:
    """Return ``step, family, ns`` that kernels took beside communication over their median without it.

    Compared are runs of the same kernel and shapes on this rank, at least `MIN_SAMPLES` on each side.
    """
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    communicating = busy(table, State.COMMUNICATION)
    covered = elapsed(communicating, end) - elapsed(communicating, start) > 0
    compute = (table["state"].to_numpy() == State.COMPUTE) & ~again
    frame = pd.DataFrame({"signature": signature, "covered": covered, "length": end - start})[compute]
    beside = frame[frame["covered"]].groupby("signature")["length"].agg(["size", "median"])
    without = frame[~frame["covered"]].groupby("signature")["length"].agg(["size", "median"])
    both = without.add_suffix("_alone").join(beside.add_suffix("_beside"), how="inner")
    enough = (both["size_alone"] >= MIN_SAMPLES) & (both["size_beside"] >= MIN_SAMPLES)
    alone = both["median_alone"][enough & (both["median_beside"] > SLOWER * both["median_alone"])]
    owner = time["owner"].to_numpy()
    own = time.assign(signature=signature[owner], covered=covered[owner], family=table["family"].to_numpy()[owner])
    own = own[own["covered"] & own["signature"].isin(alone.index) & ~again[owner]]
    runs = own.groupby(["step", "family", "signature", "owner"], as_index=False)[["ns"]].sum()
    length = (end - start)[runs["owner"].to_numpy()]
    over = length - alone.reindex(runs["signature"]).to_numpy()
    runs = runs.assign(over=over)
    sums = runs.groupby(["step", "family", "signature"], as_index=False)[["ns", "over"]].sum()
    sums = sums.assign(ns=np.clip(np.rint(sums["over"]), 0, sums["ns"]).astype(np.int64))
    found: pd.DataFrame = sums.groupby(["step", "family"], as_index=False)[["ns"]].sum()
    return found.astype({"family": np.int64})


def matrix_shapes(events: pd.DataFrame, table: pd.DataFrame, time: pd.DataFrame, work: Counted) -> pd.DataFrame:
    """Return ``name, dims, grid, dtype, count, ns, executed`` of matrix kernels whose operator's shapes are known."""
    bearing = (work.executed > 0) & (table["family"].to_numpy() == Leaf.MATMUL)
    ns = np.bincount(time["owner"].to_numpy(), time["ns"].to_numpy(), minlength=len(table))
    chosen = np.flatnonzero(bearing & (ns > 0))
    rows = table["row"].to_numpy()[chosen]
    frame = pd.DataFrame(
        {
            "name": events["name"].iloc[rows].astype(object).to_numpy(),
            "dims": work.shape[chosen],
            "grid": events["grid"].iloc[rows].astype(object).fillna("").to_numpy(),
            "dtype": work.dtype[chosen],
            "count": 1,
            "ns": ns[chosen].astype(np.int64),
            "executed": work.executed[chosen],
        }
    )
    keys = ["name", "dims", "grid", "dtype"]
    shapes: pd.DataFrame = frame.groupby(keys, as_index=False)[["count", "ns", "executed"]].sum()
    return shapes
