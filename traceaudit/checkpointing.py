"""What the activation checkpointing of a run is: how much it recomputes, of which modules, and what is only suspected.

Suspicions never count as recompute. There are three: an operator that only a forward calls, inside a backward node
(`traceaudit.recompute`, rule 3); a compiled backward with more than twice the matrix products of its forward; and, in
traces without operators of the backward, more forward kernels of a kind than backward ones (rule 4). They know the
time of what they name alone, so that the estimate is a lower bound.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing, thread_keys
from traceaudit.events import Kind, Trace
from traceaudit.intervals import Array, Intervals, cross
from traceaudit.leaves import Leaf
from traceaudit.nesting import parents
from traceaudit.recompute import COMPILED, Backward, Mask, Recompute, Rule, backward_of
from traceaudit.steps import Steps

FULL_SHARE = 0.6  # of the forward's matmul and attention kernels; the head, and what stops early, is never recomputed
MODULES_SHOWN = 32
COLUMNS = ("step", "part", "rule", "flavour", "module", "regions", "kernels", "dense", "cached", "ns")

PRODUCT = re.compile(r"^aten::(?:mm|addmm|_scaled_mm)(?:\.\w+)?$")
GRAPH = re.compile(rf"^{COMPILED}(?:Backward)?$")
DISPATCH_MODE = re.compile(r"^PythonDispatchMode$")
UNSHARD = re.compile(r"^FSDP::pre_backward \((.*?)\)")
NOT_A_MODULE = re.compile(r"^(?:nccl:|FSDP::|ProfilerStep#|Optimizer\.|symm_mem|## Call )")
MODULE = re.compile(r"^nn\.Module: ")
INSTANCE = re.compile(r"_\d+$")

# Kernels that come once a forward and once a backward: names of both, the kinds in which rule 4 compares their counts.
PAIRS = (
    (
        "attention",
        re.compile(r"(?:flash|fmha|attn|attention).*(?:fwd|forward)|(?:fwd|forward).*(?:flash|fmha|attn)", re.I),
    ),
    ("norm", re.compile(r"(?:layer|rms)_?norm.*(?:fwd|forward)|vectorized_layer_norm_kernel", re.I)),
    ("softmax", re.compile(r"softmax.*(?:fwd|forward)", re.I)),
)
BACKWARD_PAIRS = (
    re.compile(r"(?:flash|fmha|attn|attention).*(?:bwd|backward)|(?:bwd|backward).*(?:flash|fmha|attn)", re.I),
    re.compile(r"(?:layer|rms)_?norm.*(?:bwd|backward|grad_input)", re.I),
    re.compile(r"softmax.*(?:bwd|backward)", re.I),
)
REASONS = {
    "names": "operators that only a forward calls run in the backward, without sign of grad mode",
    "compiled": "a compiled backward has more than twice the matrix products of its forward",
    "kernels": "more forward kernels of attention, norm or softmax ran than backward ones",
}


def summary(trace: Trace, activities: pd.DataFrame, found: Recompute, steps: Steps) -> pd.DataFrame:
    """Sum up by step what was recomputed, what the forward ran, and what is suspected.

    Columns: ``step``, ``part`` ("recomputed", "forward", "suspected"), ``rule``, ``flavour`` (of a suspicion: its key
    in `REASONS`), ``module``, ``regions``, ``kernels`` and ``dense`` (compute kernels, and those of matrix products and
    attention), ``cached`` (operators of a region whose result a selective checkpoint had kept) and ``ns``.
    """
    events = trace.events
    backward = backward_of(events)
    begun = cross(Intervals(*(activities[name].to_numpy() for name in ("start_ns", "end_ns"))), steps.windows)
    first = np.unique(begun.left, return_index=True)[1]
    step = np.full(len(activities), -1, np.int64)
    step[begun.left[first]] = steps.step[begun.right[first]]
    computing = (activities["state"].to_numpy() == State.COMPUTE) & (step >= 0)
    work = pd.DataFrame(
        {
            "step": step,
            "region": found.region,
            "rule": found.rule.astype(np.int64),
            "kernels": 1,
            "dense": activities["family"].isin((Leaf.MATMUL, Leaf.ATTENTION)).astype(np.int64),
            "ns": (activities["end_ns"] - activities["start_ns"]).to_numpy(),
        }
    )
    parts = [_recomputed(events, work[computing & found.again], found)]
    launch = activities["launch"].to_numpy()
    if found.again.any():
        ahead = computing & (launch >= 0) & _in_forward(events, backward, launch)
        parts.append(work[ahead].assign(part="forward", rule=0, flavour="", module="", regions=0, cached=0))
    parts.append(_suspicion(work[computing & found.suspected], "names", Rule.NAMES))
    parts.append(_compiled(events, activities, work, computing))
    if not len(backward.nodes):
        parts.append(_by_kernels(events, activities, work, computing))
    table = pd.concat([part[list(COLUMNS)] for part in parts], ignore_index=True)
    keys = ["step", "part", "rule", "flavour", "module"]
    sums = table.groupby(keys, as_index=False)[["regions", "kernels", "dense", "cached", "ns"]].sum()
    return sums.astype({"ns": np.int64})


def _in_forward(events: pd.DataFrame, backward: Backward, launch: npt.NDArray[np.intp]) -> Mask:
    """Tell which calls run beneath an operator of the forward."""
    ahead = backward.numbered[backward.node_of < 0]
    return (enclosing(events, ahead, launch) >= 0) & (enclosing(events, backward.nodes, launch) < 0)


def _recomputed(events: pd.DataFrame, work: pd.DataFrame, found: Recompute) -> pd.DataFrame:
    """Return the recomputed kernels with what is known of their regions."""
    region = work["region"].to_numpy()
    known = region >= 0
    used = np.unique(region[known])
    own = found.regions.iloc[used]
    flavour, module = np.full(len(work), "unknown", dtype=object), np.full(len(work), "", dtype=object)
    slot = np.searchsorted(used, region[known])
    flavour[known] = own["flavour"].to_numpy(dtype=object)[slot]
    module[known] = _modules(events, own)[slot]
    first = np.zeros(len(work), np.int64)
    first[np.flatnonzero(known)[np.unique(region[known], return_index=True)[1]]] = 1
    cached = np.zeros(len(work), np.int64)
    cached[known] = _cached(events, own)[slot]
    return work.assign(part="recomputed", flavour=flavour, module=module, regions=first, cached=cached * first)


def _within(events: pd.DataFrame, regions: pd.DataFrame, rows: npt.NDArray[np.intp]) -> Array:
    """Return the index of the region around the start of each row on its thread, -1 for none."""
    keys, starts = thread_keys(events), events["start_ns"].to_numpy()
    node = regions["node"].to_numpy()
    result = np.full(len(rows), -1, np.int64)
    order = np.argsort(regions["start_ns"].to_numpy(), kind="stable")
    for key in np.unique(keys[node]):
        own = order[keys[node[order]] == key]
        asked = np.flatnonzero(keys[rows] == key)
        slot = np.searchsorted(regions["start_ns"].to_numpy()[own], starts[rows[asked]], side="right") - 1
        held = own[np.maximum(slot, 0)]
        inside = (slot >= 0) & (starts[rows[asked]] < regions["end_ns"].to_numpy()[held])
        result[asked] = np.where(inside, held, -1)
    return result


def _cached(events: pd.DataFrame, regions: pd.DataFrame) -> Array:
    """Count in each region the dispatches that ran nothing: a selective checkpoint had kept the result."""
    operators = np.flatnonzero(events["kind"].to_numpy() == Kind.OPERATOR)
    modes = operators[_matching(events, operators, DISPATCH_MODE)]
    above = enclosing(events, modes, np.setdiff1d(operators, modes))
    empty = np.setdiff1d(modes, above)
    around = _within(events, regions, empty)
    return np.bincount(around[around >= 0], minlength=len(regions)).astype(np.int64)


def _modules(events: pd.DataFrame, regions: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Name what each region recomputes: the FSDP unit last gathered before it, else its modules, else annotations."""
    kinds = events["kind"].to_numpy()
    annotations, frames = np.flatnonzero(kinds == Kind.ANNOTATION), np.flatnonzero(kinds == Kind.FRAME)
    result = np.full(len(regions), "", dtype=object)
    for rows in (
        annotations[~_matching(events, annotations, NOT_A_MODULE)],
        frames[_matching(events, frames, MODULE)],
    ):
        for index, names in _outermost_names(events, regions, rows).items():
            result[index] = " + ".join(dict.fromkeys(names))
    unit = _last_before(events, regions, annotations[_matching(events, annotations, UNSHARD)])
    for region in np.flatnonzero(unit >= 0):
        match = UNSHARD.match(str(events["name"].iloc[unit[region]]))
        result[region] = match[1] if match else result[region]
    return result


def _outermost_names(events: pd.DataFrame, regions: pd.DataFrame, rows: npt.NDArray[np.intp]) -> dict[int, list[str]]:
    """Return by region the names of the rows in it that no other of them holds, without the numbers of instances."""
    around = _within(events, regions, rows)
    rows, around = rows[around >= 0], around[around >= 0]
    keys, starts, ends = (thread_keys(events), events["start_ns"].to_numpy(), events["end_ns"].to_numpy())
    found: dict[int, list[str]] = {}
    for key in np.unique(keys[rows]):
        own = np.flatnonzero(keys[rows] == key)
        above = parents(Intervals(starts[rows[own]], ends[rows[own]]))
        held = (above >= 0) & (around[own[np.maximum(above, 0)]] == around[own])
        for index in own[~held]:
            name = str(events["name"].iloc[rows[index]])
            cleaned = INSTANCE.sub("", MODULE.sub("", name)) if MODULE.match(name) else name
            found.setdefault(int(around[index]), []).append(cleaned)
    return found


def _last_before(events: pd.DataFrame, regions: pd.DataFrame, rows: npt.NDArray[np.intp]) -> Array:
    """Return for each region the last of some rows that began before it on its thread, -1 for none."""
    keys, starts = thread_keys(events), events["start_ns"].to_numpy()
    node, begin = regions["node"].to_numpy(), regions["start_ns"].to_numpy()
    result = np.full(len(regions), -1, np.int64)
    for key in np.unique(keys[rows]):
        own, asked = rows[keys[rows] == key], np.flatnonzero(keys[node] == key)
        slot = np.searchsorted(starts[own], begin[asked], side="right") - 1
        result[asked] = np.where(slot >= 0, own[np.maximum(slot, 0)], -1)
    return result


def _matching(events: pd.DataFrame, rows: npt.NDArray[np.intp], pattern: re.Pattern[str]) -> Mask:
    matching = np.array([pattern.match(str(name)) is not None for name in events["name"].cat.categories], np.bool_)
    return matching[events["name"].cat.codes.to_numpy()[rows]] if len(rows) else np.zeros(0, np.bool_)


def _suspicion(work: pd.DataFrame, reason: str, rule: Rule) -> pd.DataFrame:
    return work.assign(part="suspected", rule=int(rule), flavour=reason, module="", regions=0, cached=0)


def _compiled(events: pd.DataFrame, activities: pd.DataFrame, work: pd.DataFrame, computing: Mask) -> pd.DataFrame:
    """Suspect compiled backwards of the matrix products beyond twice those of their forwards.

    Forward and backward belong together by their sequence number. A product of the forward takes two in the backward,
    one of which contracts over the rows (the gradient of the weights): where the others are not more than those, the
    forward only hides products in kernels of its own. The time is that of the mean product.
    """
    rows = [work.iloc[:0]]
    operators = np.flatnonzero(events["kind"].to_numpy() == Kind.OPERATOR)
    graphs = operators[_matching(events, operators, GRAPH)]
    products = operators[_matching(events, operators, PRODUCT)]
    launch = np.where(computing, activities["launch"].to_numpy(), -1)
    product, graph = enclosing(events, products, launch), enclosing(events, graphs, launch)
    held = (product >= 0) & (graph >= 0)
    shape = {
        int(row): _shape(str(events["name"].iloc[row]), events["dims"].iloc[row]) for row in np.unique(product[held])
    }
    table = work[held].assign(
        product=product[held],
        sequence=events["sequence"].to_numpy()[graph[held]],
        back=events["forward_thread"].to_numpy()[graph[held]] > 0,
        rows=[shape[int(row)][0] for row in product[held]],
        contracted=[shape[int(row)][1] for row in product[held]],
    )
    for _, own in table[(table["sequence"] >= 0) & (table["rows"] >= 0)].groupby("sequence"):
        once = own.drop_duplicates("product")
        ahead, back = once[~once["back"]], once[once["back"]]
        weights = int(back["contracted"].isin(ahead["rows"]).sum())
        beyond = min(len(back) - 2 * len(ahead), len(back) - 2 * weights, len(ahead))
        if beyond > 0:
            ns = round(int(own.loc[own["back"], "ns"].sum()) * beyond / len(back))
            rows.append(back.iloc[:1].assign(kernels=beyond, dense=beyond, ns=ns))
    return _suspicion(pd.concat(rows), "compiled", Rule.NONE)


def _shape(name: str, dims: object) -> tuple[int, int]:
    """Return rows and contracted dimension of a product of two matrices, -1 where the trace does not tell.

    >>> _shape("aten::addmm", "[[8], [4, 16], [16, 8], [], []]")
    (4, 16)
    """
    try:
        left = json.loads(dims if isinstance(dims, str) else "[]")[1 if name.startswith("aten::addmm") else 0]
        rows, contracted = (int(size) for size in left)
    except (ValueError, IndexError, TypeError):
        return -1, -1
    return rows, contracted


def _by_kernels(events: pd.DataFrame, activities: pd.DataFrame, work: pd.DataFrame, computing: Mask) -> pd.DataFrame:
    """Suspect the forward kernels beyond the backward ones of their kind, by step (rule 4).

    One backward may launch several kernels: the commonest counts. Micro-batches of a pipeline need no telling apart.
    """
    codes = events["name"].cat.codes.to_numpy()[activities["row"].to_numpy()]
    names = [str(name) for name in events["name"].cat.categories]
    rows: list[pd.DataFrame] = []
    for (_, forward), backward in zip(PAIRS, BACKWARD_PAIRS, strict=True):
        is_back = np.array([backward.search(name) is not None for name in names], np.bool_)[codes] & computing
        is_ahead = (
            np.array([forward.search(name) is not None for name in names], np.bool_)[codes] & computing & ~is_back
        )
        base = np.array([re.split(r"[<(]", name.removeprefix("void "))[0] for name in names], dtype=object)[codes]
        for step, own in work[is_ahead].groupby("step"):
            back = pd.Series(base[is_back & (work["step"] == step).to_numpy()]).value_counts()
            ahead = pd.Series(base[is_ahead & (work["step"] == step).to_numpy()]).value_counts()
            beyond = int(ahead.max() - back.max()) if len(back) else 0
            if beyond > 0:
                ns = round(int(own["ns"].sum()) * beyond / int(ahead.max()))
                rows.append(own.iloc[:1].assign(kernels=beyond, dense=0, ns=ns))
    return _suspicion(pd.concat(rows) if rows else work.iloc[:0], "kernels", Rule.KERNELS)


def recompute_row(
    tables: Sequence[pd.DataFrame], *, kernels_ns: int, communication_ns: int, window_ns: int, mfu: float | None
) -> dict[str, Any]:
    """Return what `result.json` says of recompute, from the summaries of the analysed steps of all ranks."""
    table = pd.concat([pd.DataFrame(columns=list(COLUMNS)), *tables], ignore_index=True) if tables else pd.DataFrame()
    part = table["part"] if len(table) else pd.Series(dtype=object)
    redone, ahead, doubtful = (table[part == name] for name in ("recomputed", "forward", "suspected"))
    total = kernels_ns + communication_ns
    dense, dense_ahead = (int(own["dense"].sum()) if len(own) else 0 for own in (redone, ahead))
    share = min(dense / dense_ahead, 1.0) if dense_ahead and total else None
    return {
        "rule": _largest(redone, "rule"),
        "kernels_ns": kernels_ns,
        "communication_ns": communication_ns,
        "share": total / window_ns if window_ns else 0.0,
        "mfu_points": _points(total, window_ns, mfu),
        "setting": _setting(redone, share),
        "forward_share": share,
        "flavour": _largest(redone, "flavour"),
        "regions": int(redone["regions"].sum()) if len(redone) else 0,
        "modules": _module_list(redone),
        "suspected": _suspected(doubtful, window_ns, mfu),
    }


def _largest(redone: pd.DataFrame, column: str) -> Any:  # noqa: ANN401  a rule or a flavour
    if not len(redone):
        return None
    sums = redone.groupby(column)["ns"].sum()
    found = sums.index[int(np.argmax(sums.to_numpy()))]
    return found if isinstance(found, str) else int(found)


def _points(ns: int, window_ns: int, mfu: float | None) -> float | None:
    """Return what MFU would gain if the time vanished (attribution rule 6), in points."""
    if mfu is None or ns >= window_ns:
        return None
    return 100 * (mfu / (1 - ns / window_ns) - mfu)


def _setting(redone: pd.DataFrame, share: float | None) -> str | None:
    if not len(redone) or share is None:
        return None
    return "selective" if share < FULL_SHARE or int(redone["cached"].sum()) else "full"


def _module_list(redone: pd.DataFrame) -> list[str]:
    """Return the modules in their natural order; numbers give way to stars where there are many."""
    names = sorted({str(name) for name in redone["module"]} - {""}) if len(redone) else []
    if len(names) > MODULES_SHOWN:
        names = sorted({re.sub(r"\d+", "*", name) for name in names})
    return sorted(names, key=_natural)[:MODULES_SHOWN]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts ``layers.2`` before ``layers.10``."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _suspected(doubtful: pd.DataFrame, window_ns: int, mfu: float | None) -> dict[str, Any] | None:
    """Return what may be recompute and is not counted; None without a suspicion."""
    if not len(doubtful):
        return None
    ns = int(doubtful["ns"].sum())
    hints = [str(name) for name in doubtful.groupby("flavour")["ns"].sum().sort_values(ascending=False).index]
    rule = int(doubtful.loc[doubtful["flavour"] == hints[0], "rule"].iloc[0])
    return {
        "rule": rule or None,
        "hints": hints,
        "estimated_ns": ns,
        "share": ns / window_ns if window_ns else 0.0,
        "mfu_points": _points(ns, window_ns, mfu),
        "kernels": int(doubtful["kernels"].sum()),
        "reason": "; ".join(REASONS[hint] for hint in hints),
    }
