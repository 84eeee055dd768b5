"""Model FLOPs counted from the shapes of the operators that own kernels.

Formulas: 2·m·k·n multiply-adds of a matrix product, times the batch where there is one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing
from traceaudit.events import Kind, Trace


def _product(left: int, right: int) -> Callable[[list[list[int]]], int]:
    """Return the FLOPs of ``dims[left] @ dims[right]``, with one leading batch dimension if they have three."""

    def flops(dims: list[list[int]]) -> int:
        a, b = dims[left], dims[right]
        batch = a[0] if len(a) == 3 else 1
        return 2 * batch * a[-2] * a[-1] * b[-1]

    return flops


# Operators with FLOPs, by name without overload; arguments count from 0 in ``Input Dims``.
FORMULAS: dict[str, tuple[int, int]] = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
}

# Names of element types in traces, and the column of the peak table that they run at.
DTYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}


@dataclass(frozen=True)
class Counted:
    """FLOPs by activity of a rank: each operator's FLOPs stand on its longest kernel.

    Attributes:
        flops: FLOPs of each activity, 0 where none are known.
        dtype: element type ("bf16", ...), "" where none is known.
        operators: matrix products seen that own a kernel and have shapes.
        unknown: matrix products that own a kernel but have no usable shapes.
    """

    flops: npt.NDArray[np.float64]
    dtype: npt.NDArray[np.object_]
    operators: int
    unknown: int


def counted(trace: Trace, activities: pd.DataFrame) -> Counted:
    """Count FLOPs of matrix products, once each: for the innermost counted operator around a kernel's launch."""
    events = trace.events
    size = len(activities)
    flops, dtype = np.zeros(size), np.full(size, "", dtype=object)
    names = events["name"].cat.categories
    known = np.array([str(name).split(".")[0] in FORMULAS for name in names], np.bool_)
    operators = np.flatnonzero(
        (events["kind"].to_numpy() == Kind.OPERATOR) & known[events["name"].cat.codes.to_numpy()]
    )
    computing = np.flatnonzero(activities["state"].to_numpy() == State.COMPUTE)
    if not len(operators) or not len(computing):
        return Counted(flops, dtype, 0, 0)
    owner = enclosing(events, operators, activities["launch"].to_numpy()[computing])
    kernels = pd.DataFrame({"activity": computing, "operator": owner}).query("operator >= 0")
    length = (activities["end_ns"] - activities["start_ns"]).to_numpy()
    kernels = kernels.assign(length=length[kernels["activity"]]).sort_values("length", kind="stable")
    kernels = kernels.drop_duplicates("operator", keep="last")
    unknown = 0
    cache: dict[tuple[int, int, int], tuple[float, str] | None] = {}
    codes = [events[name].cat.codes.to_numpy() for name in ("name", "dims", "types")]
    for activity, operator in zip(kernels["activity"], kernels["operator"], strict=True):
        key = (int(codes[0][operator]), int(codes[1][operator]), int(codes[2][operator]))
        if key not in cache:
            name, dims, types = (events[column].iloc[operator] for column in ("name", "dims", "types"))
            cache[key] = _of_operator(str(name), dims, types)
        found = cache[key]
        if found is None:
            unknown += 1
        else:
            flops[activity], dtype[activity] = found
    return Counted(flops, dtype, len(kernels) - unknown, unknown)


def _of_operator(name: str, dims_text: object, types_text: object) -> tuple[float, str] | None:
    """Return FLOPs and element type of one operator, nothing if its shapes do not tell."""
    left, right = FORMULAS[name.split(".")[0]]
    try:
        dims = json.loads(str(dims_text))
        types = json.loads(types_text) if isinstance(types_text, str) else []
        flops = float(_product(left, right)(dims))
        dtype = str(types[left]) if left < len(types) else ""
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return flops, DTYPES.get(dtype, "")
