"""Whose work each kernel of a trace is: the innermost known operator around its launch, counted once."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing, thread_keys
from traceaudit.events import Kind, Trace
from traceaudit.flops.kernel_names import dtype_of, uses_tf32
from traceaudit.flops.memory import elementwise, foreach, generated, reads_all
from traceaudit.flops.operator import ELEMENTS, UNUSABLE, Operator, Work
from traceaudit.flops.registry import FORMULAS, FROM_FORWARD, PRODUCTS, work_of
from traceaudit.intervals import Array, Intervals
from traceaudit.leaves import Leaf
from traceaudit.nesting import parents

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
POINTWISE = re.compile(r"^(?!.*index).*(?:elementwise|[cC]opy|gelu|silu)")  # kernels that visit each element once
TEXTS = ("name", "dims", "types", "concrete")


@dataclass(frozen=True)
class Counted:
    """The work of each activity of a rank.

    Attributes:
        flops: model FLOPs of each activity, 0 where none are known; those of an operator stand on its longest kernel,
            those of several products on as many, in proportion to their time.
        executed: FLOPs that the hardware runs, placed alike; activities inferred from others have them as well.
        whole: FLOPs as `torch.utils.flop_counter` counts them, causal masks aside.
        bytes: least bytes moved, those of an operator shared by its kernels in proportion to their time; NaN unknown.
        dtype: element type ("bf16", ...) of what has FLOPs, "" where none is known.
        work: a number common to the kernels of one operator, -1 where neither FLOPs nor bytes are known.
        shape: [m, n, k] of matrix products, as text; "" elsewhere.
        operators: operators with matrix products that own a kernel and have shapes.
        unknown: those without usable shapes.
        inferred: activities that have the work of a kernel of the same name and grid, for want of a launch record.
        estimated: operators whose FLOPs are a bound (packed sequences).
    """

    flops: Floats
    executed: Floats
    whole: Floats
    bytes: Floats
    dtype: npt.NDArray[np.object_]
    work: Array
    shape: npt.NDArray[np.object_]
    operators: int
    unknown: int
    inferred: int
    estimated: int


def counted(trace: Trace, activities: pd.DataFrame) -> Counted:
    """Count the work of a rank's kernels, once each."""
    events = trace.events
    found = _nothing(len(activities))
    computing = np.flatnonzero(activities["state"].to_numpy() == State.COMPUTE)
    if not len(computing):
        return found
    owner = _owners(events, activities, computing)
    known = np.flatnonzero(owner >= 0)
    works = _works(events, activities, computing[known], owner[known])
    inner = _without_inner(events, np.array([row for row, work in works.items() if work and work.flops], np.int64))
    names = [str(name) for name in events["name"].cat.categories]
    codes = events["name"].cat.codes.to_numpy()
    rules = [_formula(name) for name in names]
    products = {row for row in works if rules[codes[row]] in PRODUCTS}
    usable = {row: work for row, work in works.items() if work and not (work.flops is None and work.bytes is None)}
    placed = {row: work for row, work in usable.items() if row not in inner}
    own = known[np.isin(owner[known], list(placed))]
    _place(found, placed, computing[own], owner[own], events, activities)
    _copies(found, events, activities, computing)
    ruled = np.array([rule is not None for rule in rules], np.bool_)
    asked = computing[(owner < 0) | ~ruled[codes[np.maximum(owner, 0)]]]
    inferred = _infer(found, events, activities, asked, computing)
    return Counted(
        **{name: getattr(found, name) for name in ("flops", "executed", "whole", "bytes", "dtype", "work", "shape")},
        operators=sum(bool(work.flops) or (row in products and work.flops == 0) for row, work in placed.items()),
        unknown=sum(row not in inner and (row not in usable or usable[row].flops is None) for row in products),
        inferred=inferred,
        estimated=sum(work.estimated for work in placed.values()),
    )


def _nothing(size: int) -> Counted:
    return Counted(
        flops=np.zeros(size),
        executed=np.zeros(size),
        whole=np.zeros(size),
        bytes=np.full(size, np.nan),
        dtype=np.full(size, "", dtype=object),
        work=np.full(size, -1, np.int64),
        shape=np.full(size, "", dtype=object),
        operators=0,
        unknown=0,
        inferred=0,
        estimated=0,
    )


def _plain(name: str) -> str:
    """Return the name of an operator without its overload.

    >>> _plain("aten::mm.out"), _plain("torch::autograd::CppNode<a.b>")
    ('aten::mm', 'torch::autograd::CppNode<a.b>')
    """
    return name if "<" in name else name.split(".")[0]


def _owners(events: pd.DataFrame, activities: pd.DataFrame, computing: Rows) -> Array:
    """Return for computing activities the operator whose work they do, -1 for none.

    That is the innermost operator with a formula; failing that, the innermost with shapes at all, of which the kernel
    itself tells what it does (`_by_kernel`).
    """
    categories = [str(name) for name in events["name"].cat.categories]
    codes = events["name"].cat.codes.to_numpy()
    operator = events["kind"].to_numpy() == Kind.OPERATOR
    ruled = np.array([_formula(name) is not None for name in categories], np.bool_)
    launch = activities["launch"].to_numpy()[computing]
    first = enclosing(events, np.flatnonzero(operator & ruled[codes]), launch)
    shaped = np.flatnonzero(operator & events["dims"].notna().to_numpy())
    return np.where(first >= 0, first, enclosing(events, shaped, launch))


def _formula(name: str) -> str | None:
    """Return the name under which the registry has an operator; a Triton launch ends with a number."""
    plain = _plain(name)
    if plain in FORMULAS:
        return plain
    base, _, number = plain.rpartition("_")
    return base if number.isdigit() and base in FORMULAS else None


def _works(events: pd.DataFrame, activities: pd.DataFrame, kernels: Rows, owner: Array) -> dict[int, Work | None]:
    """Return the work of each owning operator; equal operators are computed once."""
    length = (activities["end_ns"] - activities["start_ns"]).to_numpy()[kernels]
    order = np.argsort(length, kind="stable")
    longest = dict(zip(owner[order].tolist(), kernels[order].tolist(), strict=True))
    codes = {name: events[name].cat.codes.to_numpy() for name in TEXTS}
    names = events["name"].cat.categories
    distinct = [events[name].cat.categories.tolist() for name in TEXTS[1:]]
    rows = activities["row"].to_numpy()
    families = activities["family"].to_numpy()
    sources = {row: row for row in longest} | _forwards(events, owner)
    cache: dict[tuple[int, ...], Work | None] = {}
    found: dict[int, Work | None] = {}
    for row, kernel in longest.items():
        source = sources[row]
        key = (*(int(codes[name][source]) for name in TEXTS), int(codes["name"][row]), int(codes["name"][rows[kernel]]))
        if key not in cache:
            kernel_name = str(names[codes["name"][rows[kernel]]])
            recorded = [texts[code] if code >= 0 else None for texts, code in zip(distinct, key[1:4], strict=True)]
            operator = _operator(recorded, str(names[codes["name"][row]]), kernel_name)
            cache[key] = _work(operator, kernel_name, int(families[kernel])) if operator else None
        found[row] = cache[key]
    return found


def _operator(recorded: Sequence[object], name: str, kernel: str) -> Operator | None:
    """Return an operator as recorded (shapes, types, scalars), nothing without readable shapes."""
    dims, types, concrete = recorded
    try:
        shapes = json.loads(str(dims))
        kinds = json.loads(types) if isinstance(types, str) else []
        values = json.loads(concrete) if isinstance(concrete, str) else []
    except UNUSABLE:
        return None
    if not all(isinstance(value, list) for value in (shapes, kinds, values)):
        return None
    return Operator(
        _formula(name) or _plain(name),
        shapes,
        [str(kind) for kind in kinds],
        [str(v) for v in values],
        dtype_of(kernel)[1],
    )


def _work(operator: Operator, kernel: str, family: int) -> Work | None:
    if operator.name in FORMULAS:
        return work_of(operator)
    return _by_kernel(operator, kernel, family)


def _by_kernel(operator: Operator, kernel: str, family: int) -> Work | None:
    """Return the work of an operator without a formula, if its kernel is of a kind that tells it."""
    try:
        if operator.name.startswith("triton_") or (operator.name.startswith(kernel) and "::" not in kernel):
            return generated(operator)
        if operator.name.startswith("aten::_foreach_"):
            return foreach(operator)
        if "reduce_kernel" in kernel or "Reduce" in kernel:
            return reads_all(operator)
        if family in (Leaf.ELEMENTWISE, Leaf.DEVICE_COPY) and POINTWISE.search(kernel):
            return elementwise(operator)
    except UNUSABLE:
        return None
    return None


def _forwards(events: pd.DataFrame, owner: Array) -> dict[int, int]:
    """Return for backward operators that record only gradients the row of their forward."""
    names = events["name"].cat.categories
    codes = events["name"].cat.codes.to_numpy()
    backward = np.array([_plain(str(name)) in FROM_FORWARD for name in names], np.bool_)
    rows = np.unique(owner[backward[codes[owner]]])
    if not len(rows):
        return {}
    sequence = events["sequence"].to_numpy()
    wanted = set(FROM_FORWARD.values())
    forward = np.array([_plain(str(name)) in wanted for name in names], np.bool_)
    candidates = np.flatnonzero(forward[codes] & (sequence >= 0) & events["dims"].notna().to_numpy())
    last = {(int(sequence[row]), _plain(str(names[codes[row]]))): int(row) for row in candidates}
    found = {int(row): last.get((int(sequence[row]), FROM_FORWARD[_plain(str(names[codes[row]]))])) for row in rows}
    return {row: source for row, source in found.items() if source is not None}


def _without_inner(events: pd.DataFrame, rows: Array) -> set[int]:
    """Return those of some operators with FLOPs that enclose another of them: its FLOPs are the inner one's."""
    rows = np.sort(rows)
    keys = thread_keys(events)
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    outer: set[int] = set()
    for key in np.unique(keys[rows]):
        own = rows[keys[rows] == key]
        above = parents(Intervals(starts[own], ends[own]))
        nested = set(above[above >= 0].tolist())
        outer |= {int(own[index]) for index in nested}
    return outer


def _place(
    found: Counted,
    works: dict[int, Work],
    kernels: Rows,
    owner: Array,
    events: pd.DataFrame,
    activities: pd.DataFrame,
) -> None:
    """Put the work of operators on their kernels: FLOPs on the longest, bytes on all, in proportion to their time."""
    if not works:
        return
    rows = np.array(sorted(works), np.int64)
    slot = np.searchsorted(rows, owner)
    length = (activities["end_ns"] - activities["start_ns"]).to_numpy(dtype=np.int64)[kernels]
    order = np.lexsort((kernels, -length, slot))
    kernels, slot, length = kernels[order], slot[order], length[order]
    place = np.arange(len(slot)) - np.searchsorted(slot, slot)  # of a kernel among its operator's, the longest first
    products = np.array([works[row].products for row in rows.tolist()], np.int64)
    bearing = place < products[slot]
    moved = np.array([np.nan if (moved := works[row].bytes) is None else moved for row in rows.tolist()])
    found.bytes[kernels] = moved[slot] * length / np.bincount(slot, length)[slot]
    found.work[kernels] = rows[slot]
    kernels, slot, length = kernels[bearing], slot[bearing], length[bearing]
    time = length / np.bincount(slot, length)[slot]
    for column, values in (
        (found.flops, [works[row].model_flops for row in rows.tolist()]),
        (found.executed, [works[row].hardware_flops for row in rows.tolist()]),
        (found.whole, [works[row].flops or 0.0 for row in rows.tolist()]),
    ):
        column[kernels] = np.array(values)[slot] * time
    dense = found.whole[kernels] > 0
    kernels, row = kernels[dense], rows[slot[dense]]
    found.dtype[kernels] = _dtypes(events, activities["row"].to_numpy()[kernels], row, works)
    found.shape[kernels] = events["dims"].iloc[row].astype(object).to_numpy()


def _dtypes(events: pd.DataFrame, kernels: Rows, rows: Array, works: dict[int, Work]) -> npt.NDArray[np.object_]:
    """Return the element type of each kernel's products, once for each kind of operator and kernel."""
    names, types = events["name"].cat, events["types"].cat
    cache: dict[tuple[int, int, int], str] = {}
    found = np.full(len(rows), "", dtype=object)
    keys = zip(types.codes.to_numpy()[rows], names.codes.to_numpy()[kernels], rows.tolist(), strict=True)
    for index, (kind, name, row) in enumerate(keys):
        key = (int(kind), int(name), works[row].operand)
        if key not in cache:
            recorded = types.categories[key[0]] if key[0] >= 0 else None
            cache[key] = _dtype(recorded, key[2], str(names.categories[key[1]]))
        found[index] = cache[key]
    return found


def _dtype(types: object, operand: int, kernel: str) -> str:
    """Return the element type that picks the peak: the operand's, or what the kernel's name says."""
    kinds = json.loads(types) if isinstance(types, str) else []
    kind = str(kinds[operand]) if operand < len(kinds) else ""
    if kind in ELEMENTS:
        dtype = ELEMENTS[kind][1]
        return "tf32" if dtype == "fp32" and uses_tf32(kernel) else dtype
    return "" if kind else dtype_of(kernel)[0]


def _copies(found: Counted, events: pd.DataFrame, activities: pd.DataFrame, computing: Rows) -> None:
    """Copies and fills record their bytes: read and written, or written."""
    rows = activities["row"].to_numpy()[computing]
    kinds, moved = events["kind"].to_numpy()[rows], events["bytes"].to_numpy()[rows]
    for kind, times in ((Kind.COPY, 2), (Kind.FILL, 1)):
        own = computing[(kinds == kind) & (moved >= 0)]
        found.bytes[own] = times * moved[(kinds == kind) & (moved >= 0)]
        found.work[own] = rows[(kinds == kind) & (moved >= 0)]


def _infer(found: Counted, events: pd.DataFrame, activities: pd.DataFrame, asked: Rows, computing: Rows) -> int:
    """Give kernels of no known operator the work of those of the same name and grid, where that is unique.

    They were queued before the recording, or replayed by a graph. What is inferred never counts as model FLOPs.
    """
    rows = activities["row"].to_numpy()[computing]
    kernel = events["kind"].to_numpy()[rows] == Kind.KERNEL
    table = pd.DataFrame(
        {
            "activity": computing,
            "name": events["name"].cat.codes.to_numpy()[rows],
            "grid": events["grid"].cat.codes.to_numpy()[rows],
            "known": found.work[computing] >= 0,
            "asked": np.isin(computing, asked),
            "executed": found.executed[computing],
            "whole": found.whole[computing],
            "dtype": found.dtype[computing],
            "shape": found.shape[computing],
            "bytes": found.bytes[computing],
        }
    )[kernel]
    table = table[table["grid"] >= 0]
    seen = table[table["known"]]
    groups = seen.groupby(["name", "grid"])
    unique = groups[["shape", "executed"]].nunique().max(axis=1) == 1
    sample = groups[["executed", "whole", "dtype", "shape", "bytes"]].first()[unique]
    wanted = table[~table["known"] & table["asked"]]
    at = sample.index.get_indexer(pd.MultiIndex.from_frame(wanted[["name", "grid"]]))
    target = wanted["activity"].to_numpy()[at >= 0]
    source = sample.iloc[at[at >= 0]]
    for column in ("executed", "whole", "bytes", "dtype", "shape"):
        getattr(found, column)[target] = source[column].to_numpy()
    found.work[target] = activities["row"].to_numpy()[target]
    return len(target)


def counted_on_host(trace: Trace) -> pd.DataFrame:
    """Return the work of the operators of a trace by themselves, each taken to own its kernels: for traces of CPUs.

    Columns: ``row, name, flops`` (as `torch.utils.flop_counter` counts), ``executed``, ``model`` and ``bytes``. Of
    operators inside each other the innermost with FLOPs counts.
    """
    events = trace.events
    names = events["name"].astype(str)
    ruled = names.map(lambda name: _formula(name) is not None).to_numpy(dtype=np.bool_)
    rows = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & ruled)
    found = []
    for row in rows:
        recorded = [events[column].iloc[int(row)] for column in TEXTS[1:]]
        operator = _operator(recorded, str(names.iloc[row]), "")
        work = work_of(operator) if operator else None
        if work and work.flops:
            found.append(
                (int(row), str(names.iloc[row]), work.flops, work.hardware_flops, work.model_flops, work.bytes)
            )
    table = pd.DataFrame(found, columns=["row", "name", "flops", "executed", "model", "bytes"])
    outer = _without_inner(events, table["row"].to_numpy(dtype=np.int64))
    return table[~table["row"].isin(outer)].reset_index(drop=True)
