"""One step of a few ranks as strips of bins on the aligned clock: ``timeline`` of the result."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.attribute import Attribution, Job
from traceaudit.intervals import Array, Intervals, cross
from traceaudit.leaves import FAMILIES, Leaf
from traceaudit.pieces import COARSE_BINS, COMMUNICATING
from traceaudit.slices import exposed_slices

SHOWN_RANKS = 16
BINS = 512  # of the step, over all ranks


def strips(
    job: Job, attribution: Attribution, by_family: pd.DataFrame, culprits: Sequence[int]
) -> dict[str, Any] | None:
    """Return one step of some ranks in bins, each with the leaf that took the most of it, in runs of equal bins.

    The step is the middle one of most ranks. A leaf that is an amount stands in all bins of what it was taken from
    (`traceaudit.slices`) if it is the largest there. At most `SHOWN_RANKS`: the worst of `culprits`, the lowest rank of
    each stage of a pipeline, then the lowest ranks. None where no rank can be shown.
    """
    windows = attribution.windows
    able = {own.rank: own for own in job.accounts if len(own.coarse)}
    asked = windows.assign(middle=windows["rank"].map({rank: own.coarse_step for rank, own in able.items()}))
    asked = asked[asked["step"] == asked["middle"]]
    if not len(asked):
        return None
    step = int(asked["step"].mode().iloc[0])
    at = asked[asked["step"] == step].set_index("rank")
    shown = _chosen(sorted(at.index.tolist()), job, culprits)
    start, end = (at.loc[shown, name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    shift = job.clock.offsets(np.array(shown, np.int64), start)
    origin = int((start - shift).min())
    bin_ns = max(-(-(int((end - shift).max()) - origin) // BINS), 1)
    names: dict[int, int] = {}
    rows = []
    for rank, begun, ended, offset in zip(shown, start.tolist(), end.tolist(), shift.tolist(), strict=True):
        codes, length = _codes(able[rank], step, attribution, by_family)
        first = round((begun - offset - origin) / bin_ns)
        count = max(round((ended - begun) / bin_ns), 1)
        middles = np.minimum(np.arange(count) * bin_ns + bin_ns // 2, ended - begun - 1)
        leaf, run = _runs(codes[np.minimum(middles * COARSE_BINS // length, COARSE_BINS)])
        places = [names.setdefault(code, len(names)) for code in leaf.tolist()]
        rows.append({"rank": rank, "first_bin": first, "leaf": places, "bins": run.tolist()})
    return {
        "step": step,
        "origin_ns": origin,
        "bin_ns": bin_ns,
        "leaves": [f"{Leaf(code).bucket.value}.{Leaf(code).label}" for code in names],
        "ranks": rows,
    }


def _chosen(ranks: Sequence[int], job: Job, culprits: Sequence[int]) -> list[int]:
    """Return the ranks to show: half of them culprits at most, so that there is something to compare them with."""
    stages: dict[int, int] = {}
    for rank in ranks:
        stages.setdefault(job.plan.stage.get(rank, 0), rank)
    worst = [rank for rank in dict.fromkeys(culprits) if rank in set(ranks)][: SHOWN_RANKS // 2]
    return list(dict.fromkeys([*worst, *(stages[stage] for stage in sorted(stages)), *ranks]))[:SHOWN_RANKS]


def _codes(own: RankAccount, step: int, attribution: Attribution, by_family: pd.DataFrame) -> tuple[Array, int]:
    """Return the leaf of each of a rank's coarse bins and of the wait behind them, and the ns that the bins cover."""
    if own.steps is None:
        raise ValueError("a rank without steps has no bins")
    place = int(np.flatnonzero(own.steps.step == step)[0])
    start, end = (int(edge[place]) for edge in own.steps.windows)
    coarse = np.append(own.coarse.astype(np.int64), COMMUNICATING)
    amounts = _of_step(by_family, own.rank, step)
    codes = coarse.copy()
    for family in FAMILIES:
        codes[coarse == family] = _largest(amounts[amounts["family"] == family], Leaf(family))
    windows = attribution.windows
    window = _of_step(windows, own.rank, step)
    exposed = exposed_slices(own.rank, attribution, window)
    pooled = _largest(_of_step(attribution.bubbles.parts, own.rank, step), Leaf.UNDIVIDED)
    leaf = np.where(exposed["leaf"] == Leaf.UNDIVIDED, pooled, exposed["leaf"]).astype(np.int64)
    edges = start + np.arange(COARSE_BINS + 1) * (end - start) // COARSE_BINS
    edges = np.append(edges, max(int(window["end_ns"].iloc[0]), end))
    cut = cross(
        Intervals(exposed["start_ns"].to_numpy(dtype=np.int64), exposed["end_ns"].to_numpy(dtype=np.int64)),
        Intervals(edges[:-1], edges[1:]),
    )
    ns = np.zeros((COARSE_BINS + 1, len(Leaf)), np.int64)
    order = np.array(sorted(Leaf), np.int64)
    np.add.at(ns, (cut.right, np.searchsorted(order, leaf[cut.left])), cut.end - cut.start)
    return np.where(coarse == COMMUNICATING, order[np.argmax(ns, axis=1)], codes), end - start


def _of_step(table: pd.DataFrame, rank: int, step: int) -> pd.DataFrame:
    return table[(table["rank"] == rank).to_numpy() & (table["step"] == step).to_numpy()]


def _largest(amounts: pd.DataFrame, otherwise: Leaf) -> int:
    """Return the leaf with the most time."""
    sums = amounts.groupby("leaf")["ns"].sum()
    return int(sums.index.to_numpy()[sums.to_numpy().argmax()]) if len(sums) else int(otherwise)


def _runs(values: Array) -> tuple[Array, Array]:
    """Return the values of runs of equal values, and how long each run is.

    >>> [part.tolist() for part in _runs(np.array([4, 4, 1]))]
    [[4, 1], [2, 1]]
    """
    head = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    return values[head], np.diff(np.append(head, len(values)))
