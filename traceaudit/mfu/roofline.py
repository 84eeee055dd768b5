"""Split compute time: recomputed, achieved, memory floor, slowed by overlap, slow GPU, below the roof by family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.errors import ModelFlopsError
from traceaudit.intervals import Array
from traceaudit.leaves import FAMILIES, Leaf
from traceaudit.mfu.model import MIXED_SHARE, Numerator, Peak
from traceaudit.mfu.sanity import counted_beyond_declared, recompute_differs, too_much_declared

Matrix = npt.NDArray[np.float64]
COMPARED_COVERAGE = 0.95  # of matmul and attention time with counted FLOPs, from which they are held against declared
MIN_COVERAGE = 0.5  # of matmul and attention time with counted FLOPs, below which counting makes no MFU


@dataclass(frozen=True)
class Split:
    """The compute time of a job by leaf.

    Attributes:
        leaves: ``rank, step, leaf, ns``.
        done: compute was split; if not, `reason` says why.
        source: "declared" or "counted" where split.
        counted_flops: FLOPs counted from shapes without recompute, all traced ranks, by step.
        coverage: share of matmul and attention time in kernels whose FLOPs are counted; None without such kernels.
        roofline_coverage: share of compute time in kernels whose FLOPs or bytes are known; None without compute.
        mixed: achieved time is that of several element types, each at its own peak.
        recomputed_ns: time the counted recomputed FLOPs would take at the peak rate, and those that kernels run beyond
            the model's (the scores of attention, again in its backward); None where not known.
        recomputed_by_step: the same by step.
        warnings: what the reader should know.
        contradictions: those of them that say how declarations and traces contradict each other.
        by_family: ``rank, step, family, leaf, ns`` of compute that was not recomputed: what each family's time became.
    """

    leaves: pd.DataFrame
    done: bool
    reason: str
    source: str | None
    counted_flops: dict[int, float]
    coverage: float | None
    recomputed_ns: int | None
    warnings: tuple[str, ...]
    roofline_coverage: float | None = None
    mixed: bool = False
    recomputed_by_step: dict[int, int] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()
    by_family: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class _Work:
    """Compute by rank and step (rows) and family (columns), recompute apart."""

    keys: pd.DataFrame  # rank, step
    own: Array
    roof: Matrix  # counted FLOPs at peak, ns
    recompute: Array
    recompute_roof: Matrix
    flops: Matrix
    coverage: float | None
    slow: Array
    again: Matrix  # by row: FLOPs run beyond the model's, at peak, ns
    floor: Array
    overlap: Array
    roofline_coverage: float | None
    rates: frozenset[float]  # of the counted FLOPs, that matter


def split_compute(
    accounts: Sequence[RankAccount],
    windows: pd.DataFrame,
    peak: Peak | None,
    reason: str,
    model: Numerator | None,
    world_size: int,
    excess: pd.DataFrame,
) -> Split:
    """Split compute of the given windows (``rank, step``) as far as the peak and the model FLOPs are known.

    `excess` (``rank, step, family, ns``) is what kernels of slow GPUs took over their peers'; stragglers get it.

    Raises:
        ModelFlopsError: the declared FLOPs need more time at the peak rate than the ranks computed.
    """
    work = _work(accounts, windows, peak, excess)
    counted = dict(zip(work.keys["step"], work.flops, strict=True)) if len(work.keys) else {}
    counted = {int(step): float(work.flops[work.keys["step"] == step].sum()) for step in counted}
    has_shapes = bool(work.flops.sum() > 0)
    if peak is None:
        return _whole(work, reason, counted)
    if model is None and not has_shapes:
        return _whole(
            work,
            "no model FLOPs: declare --params and --tokens-per-step, or record shapes (record_shapes=True)",
            counted,
        )
    warnings: list[str] = []
    contradictions: list[str] = []
    if model is None and (work.coverage or 0.0) < MIN_COVERAGE:
        return _whole(
            work,
            f"FLOPs could be counted for only {work.coverage or 0.0:.0%} of the matmul and attention time; "
            "declare --params and --tokens-per-step",
            counted,
        )
    if model is None:
        achieved = np.rint(work.roof.sum(axis=1)).astype(np.int64)
        over = achieved > work.own.sum(axis=1)
        if over.any():
            return _whole(work, _too_much_counted(work, achieved, over, peak), counted)
        source = "counted"
    else:
        achieved, notes = _declared(work, model, peak, world_size)
        traced = len(np.unique(work.keys["rank"])) if len(work.keys) else 1
        attention = work.flops[:, 1].sum() / max(work.flops.sum(), 1.0)
        covered = (work.coverage or 0.0) >= COMPARED_COVERAGE
        contradictions += counted_beyond_declared(model, counted, attention, world_size / traced, covered=covered)
        contradictions += recompute_differs(model, int(work.recompute.sum()), int(work.own.sum()))
        warnings += [*notes, *contradictions]
        source = "declared"
    warnings += peak.notes
    leaves, by_family = _leaves(work, _by_family(work, achieved))
    known = has_shapes and bool((work.recompute == 0).all() or work.recompute_roof.sum() > 0)
    extra = work.recompute_roof + work.again
    by_step = {int(step): round(float(extra[work.keys["step"] == step].sum())) for step in counted}
    return Split(
        leaves,
        True,
        "",
        source,
        counted,
        work.coverage,
        round(float(extra.sum())) if known else None,
        tuple(warnings),
        work.roofline_coverage,
        len(peak.shares) > 1 or (source == "counted" and len(work.rates) > 1),
        by_step if known else {},
        tuple(contradictions),
        by_family,
    )


def _work(accounts: Sequence[RankAccount], windows: pd.DataFrame, peak: Peak | None, excess: pd.DataFrame) -> _Work:
    frames = [a.compute.assign(rank=a.rank) for a in accounts if a.steps is not None]
    keys = windows[["rank", "step"]].reset_index(drop=True)
    table = pd.concat(frames, ignore_index=True).merge(keys, on=["rank", "step"])
    rates = {dtype: (peak.flop_per_ns(dtype) if peak else None) for dtype in table["dtype"].unique()}
    fallback = peak.flop_per_ns("") if peak else None
    rate = np.array([rates[dtype] or fallback or np.inf for dtype in table["dtype"]], np.float64)
    row = pd.MultiIndex.from_frame(keys).get_indexer(pd.MultiIndex.from_frame(table[["rank", "step"]]))
    column = np.searchsorted([int(family) for family in FAMILIES], table["family"].to_numpy())
    again = table["recompute"].to_numpy(dtype=np.bool_)
    own = np.zeros((len(keys), len(FAMILIES)), np.int64)
    roof = np.zeros(own.shape)
    flops = np.zeros(own.shape)
    recompute = np.zeros(len(keys), np.int64)
    recompute_roof = np.zeros(len(keys))
    ns, work = table["ns"].to_numpy(dtype=np.int64), table["flops"].to_numpy()
    np.add.at(own, (row[~again], column[~again]), ns[~again])
    np.add.at(roof, (row[~again], column[~again]), (work / rate)[~again])
    np.add.at(flops, (row[~again], column[~again]), work[~again])
    np.add.at(recompute, row[again], ns[again])
    np.add.at(recompute_roof, row[again], (work / rate)[again])
    more = np.zeros(len(keys))
    executed = table["executed"].to_numpy()
    np.add.at(more, row[~again], ((executed - work) / rate)[~again])
    weights = pd.Series(work[~again]).groupby(rate[~again]).sum() if len(table) else pd.Series(dtype=float)
    mattering = frozenset(float(value) for value in weights.index[weights > MIXED_SHARE * weights.sum()])
    whole = int(table["ns"].sum())
    return _Work(
        keys,
        own,
        roof,
        recompute,
        recompute_roof,
        flops,
        _coverage(table[~again]),
        _by_row(keys, excess),
        np.maximum(more, 0.0),
        _floors(accounts, keys, peak),
        _by_row(keys, _joined([a.overlap.assign(rank=a.rank) for a in accounts if a.steps is not None])),
        int(table["known_ns"].sum()) / whole if whole else None,
        mattering,
    )


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)


def _by_row(keys: pd.DataFrame, table: pd.DataFrame) -> Array:
    """Return ``rank, step, family, ns`` as a matrix of rows `keys` and families."""
    own = table.merge(keys, on=["rank", "step"])
    result = np.zeros((len(keys), len(FAMILIES)), np.int64)
    row = pd.MultiIndex.from_frame(keys).get_indexer(pd.MultiIndex.from_frame(own[["rank", "step"]]))
    column = np.searchsorted([int(family) for family in FAMILIES], own["family"].to_numpy())
    np.add.at(result, (row, column), own["ns"].to_numpy(dtype=np.int64))
    return result


def _floors(accounts: Sequence[RankAccount], keys: pd.DataFrame, peak: Peak | None) -> Array:
    """Return the time that moving the bytes takes beyond the FLOPs at peak, capped by the time of the kernels."""
    table = _joined([a.work.assign(rank=a.rank) for a in accounts if a.steps is not None])
    if peak is None or peak.hbm_gbps is None or not len(table):
        return np.zeros((len(keys), len(FAMILIES)), np.int64)
    table = table[~table["recompute"].astype(np.bool_)]
    rate = {dtype: peak.flop_per_ns(dtype) or peak.flop_per_ns("") or np.inf for dtype in table["dtype"].unique()}
    flops = table["executed"] / table["dtype"].map(rate).astype(np.float64)
    each = np.maximum(0.0, table["bytes"] / peak.hbm_gbps - flops)  # GB/s are bytes a nanosecond
    floor = np.minimum(np.floor(each * table["count"]), table["ns"]).astype(np.int64)
    return _by_row(keys, table.assign(ns=floor))


def _coverage(table: pd.DataFrame) -> float | None:
    """Return the share of matmul and attention time in kernels whose FLOPs are counted."""
    dense = table[table["family"].isin((Leaf.MATMUL, Leaf.ATTENTION)) | (table["counted_ns"] > 0)]
    total = int(dense["ns"].sum())
    return int(dense["counted_ns"].sum()) / total if total else None


def _declared(work: _Work, model: Numerator, peak: Peak, world_size: int) -> tuple[Array, list[str]]:
    """Spread the declared FLOPs of each step over its ranks: by counted FLOPs where known, else equally."""
    rate = peak.mixed_flop_per_ns()
    if rate is None:
        raise ModelFlopsError(f"{peak.gpu} has no {peak.dtype} rate in the peak table; pass --peak-tflops.")
    achieved = np.zeros(len(work.keys), np.int64)
    available = work.own.sum(axis=1)
    notes: list[str] = []
    for step in work.keys["step"].unique():
        rows = np.flatnonzero(work.keys["step"] == step)
        total = round(model.flops / rate * len(rows) / world_size)
        weight = work.flops[rows].sum(axis=1)
        weight = weight if (weight > 0).all() else np.ones(len(rows))
        if total > available[rows].sum():
            counted = float(work.flops[rows].sum()) * world_size / len(rows)
            raise ModelFlopsError(
                too_much_declared(int(step), total, int(available[rows].sum()), model, peak, counted, world_size)
            )
        share = _shares(total, weight)
        if (share > available[rows]).any():
            notes.append(
                f"step {step}: the declared FLOPs spread over the ranks do not fit some ranks' compute time; "
                "the rest went to the others"
            )
        achieved[rows] = _fitted(share, available[rows])
    return achieved, notes


def _shares(total: int, weight: Matrix) -> Array:
    """Split an integer by weights, the largest remainders first.

    >>> _shares(10, np.array([1.0, 1.0, 1.0])).tolist()
    [4, 3, 3]
    """
    exact: Matrix = total * (weight / weight.sum())
    share = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - share), kind="stable")
    share[order[: total - int(share.sum())]] += 1
    return np.asarray(share, np.int64)


def _fitted(share: Array, limit: Array) -> Array:
    """Move what exceeds its limit to where there is room; the limits hold the total."""
    fitted = np.minimum(share, limit)
    rest = int((share - fitted).sum())
    while rest > 0:
        room = limit - fitted
        more = np.minimum(_shares(rest, room.astype(np.float64)), room)
        fitted = fitted + more
        rest -= int(more.sum())
    return fitted


def _by_family(work: _Work, achieved: Array) -> Array:
    """Spread achieved time over families: by counted FLOPs, else over matmul and attention by their time."""
    weight = np.where(work.roof.sum(axis=1, keepdims=True) > 0, work.roof, 0.0)
    guess = work.own.astype(np.float64)
    guess[:, 2:] = 0
    weight = np.where(weight.sum(axis=1, keepdims=True) > 0, weight, guess)
    sums = weight.sum(axis=1, keepdims=True)
    wanted = achieved[:, None] * np.divide(weight, sums, out=np.zeros_like(weight), where=sums > 0)
    taken = np.minimum(work.own, np.floor(wanted).astype(np.int64))
    rest = achieved - taken.sum(axis=1)
    for family in range(len(FAMILIES)):
        more = np.minimum(rest, work.own[:, family] - taken[:, family])
        taken[:, family] += more
        rest = rest - more
    return np.asarray(taken, np.int64)


def _leaves(work: _Work, taken: Array) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Give each family's time in the order of the rules; each leaf is capped by what those before it left.

    Returns the leaves, and what each family's time became.
    """
    left = work.own - taken
    floor = np.minimum(work.floor, left)
    overlap = np.minimum(work.overlap, left - floor)
    slow = np.minimum(work.slow, left - floor - overlap)
    below = left - floor - overlap - slow
    parts = {
        Leaf.MODEL_FLOPS: taken,
        Leaf.MEMORY_FLOOR: floor,
        Leaf.SLOWED_BY_OVERLAP: overlap,
        Leaf.SLOW_GPU: slow,
    }
    columns = [(Leaf.KERNELS, work.recompute), *((leaf, part.sum(axis=1)) for leaf, part in parts.items())]
    columns += [(family, below[:, index]) for index, family in enumerate(FAMILIES)]
    leaves = pd.concat([work.keys.assign(leaf=int(leaf), ns=ns) for leaf, ns in columns], ignore_index=True)
    return leaves, _family_parts(work.keys, parts, below)


def _family_parts(keys: pd.DataFrame, parts: Mapping[Leaf, Array], rest: Array | None = None) -> pd.DataFrame:
    """Return ``rank, step, family, leaf, ns``; the leaf of the rest is the family's own."""
    families = np.array([int(family) for family in FAMILIES], np.int16)
    frames = []
    for leaf, ns in (*parts.items(), (None, rest)):
        if ns is not None:
            row, column = np.nonzero(ns)
            own = families[column] if leaf is None else int(leaf)
            frames.append(keys.iloc[row].assign(family=families[column], leaf=own, ns=ns[row, column]))
    return pd.concat(frames, ignore_index=True)


def _whole(work: _Work, reason: str, counted: dict[int, float]) -> Split:
    slow = np.minimum(work.slow, work.own)
    whole = work.own - slow
    columns = [(Leaf.KERNELS, work.recompute), (Leaf.NOT_SPLIT, whole.sum(axis=1)), (Leaf.SLOW_GPU, slow.sum(axis=1))]
    leaves = pd.concat([work.keys.assign(leaf=int(leaf), ns=ns) for leaf, ns in columns], ignore_index=True)
    by_family = _family_parts(work.keys, {Leaf.NOT_SPLIT: whole, Leaf.SLOW_GPU: slow})
    return Split(
        leaves,
        False,
        reason,
        None,
        counted,
        work.coverage,
        None,
        (),
        work.roofline_coverage,
        by_family=by_family,
    )


def _too_much_counted(work: _Work, achieved: Array, over: npt.NDArray[np.bool_], peak: Peak) -> str:
    worst = int(np.argmax(np.where(over, achieved - work.own.sum(axis=1), 0)))
    rank, step = (int(work.keys[name].to_numpy()[worst]) for name in ("rank", "step"))
    ratio = achieved[worst] / max(int(work.own[worst].sum()), 1)
    return (
        f"the FLOPs counted on rank {rank}, step {step} exceed the peak of {peak.tflops[peak.dtype]:g} TFLOP/s "
        f"{peak.dtype} by {ratio:.2f} times; the peak or the element type is wrong: pass --peak-tflops or --dtype"
    )
