"""Kernels on the roofline: rows for ``kernels`` and ``roofline`` of the result."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, prod
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.classify import State, short_name
from traceaudit.flops.kernel_names import uses_matrix_units
from traceaudit.leaves import FAMILIES, Leaf
from traceaudit.mfu.model import Peak

# What kernels of a family reach in good runs, as a share of the roof that binds them: matmuls rarely exceed 75 % of
# peak, attention is lower, kernels bound by memory stream at 80 to 90 % of the bandwidth.
REACH = {
    Leaf.MATMUL: 0.75,
    Leaf.ATTENTION: 0.60,
    Leaf.NORM: 0.80,
    Leaf.ELEMENTWISE: 0.85,
    Leaf.OPTIMIZER: 0.80,
    Leaf.DEVICE_COPY: 0.85,
}
TILE = re.compile(r"(?:tilesize|MT|gemm_|bt|_)(\d{2,3})x(\d{2,3})(?:x\d+)?(?=[x_]|$)")
MULTIPLES = (128, 64, 32, 16, 8, 4, 2)
SHOWN_SHAPES = 60

# Names that tell that an operator which can be one kernel ran as several.
UNFUSED = (
    ("attention", "softmax", re.compile(r"softmax(?!.*(?:log_softmax|cross))", re.I)),
    ("norm", "rsqrt", re.compile(r"elementwise.*rsqrt|rsqrt_kernel", re.I)),
)


def kernel_rows(accounts: Sequence[RankAccount], peak: Peak | None, window_ns: int) -> list[dict[str, Any]]:
    """Return GPU activities by name, the longest in sum first, each against its own roofs.

    ``flops`` are those the hardware ran, ``bytes`` the least that the shapes need to move; ``roofline_share`` is the
    time that the roof which binds would take over the time it took, ``headroom`` what is above that time as a share of
    the analysed time: MFU points, were it all turned into model FLOPs. ``longest`` is the longest run, by the clock of
    its rank's file.
    """
    table = _with_roofs(_joined([own.kernels.assign(rank=own.rank) for own in accounts if own.steps is not None]), peak)
    keys, columns = (
        ["name", "state", "family"],
        ["count", "ns", "flops", "bytes", "known_ns", "compute_ns", "memory_ns"],
    )
    place = ["rank", "start_ns", "end_ns", "stream"]
    longest = table.assign(run_ns=table["end_ns"] - table["start_ns"])
    longest = longest.sort_values(["run_ns", "rank"], ascending=[False, True], kind="stable").drop_duplicates(keys)
    table = table.groupby(keys, as_index=False)[columns].sum().merge(longest[[*keys, *place]], on=keys)
    table = table.sort_values(["ns", "name"], ascending=[False, True], kind="stable")
    fields = (*keys, *columns, *place)
    rows = zip(*(table[column] for column in fields), strict=True)
    return [_row(dict(zip(fields, values, strict=True)), window_ns) for values in rows]


def _row(row: Mapping[str, Any], window_ns: int) -> dict[str, Any]:
    name, state, family, ns, known_ns = (row[key] for key in ("name", "state", "family", "ns", "known_ns"))
    flops, moved, compute_ns, memory_ns = (row[key] for key in ("flops", "bytes", "compute_ns", "memory_ns"))
    kind = State(int(state)).name.lower()
    roof = max(compute_ns, memory_ns)
    return {
        "name": str(name),
        "short_name": short_name(str(name)),
        "kind": kind,
        "family": Leaf(int(family)).label if state == State.COMPUTE else kind,
        "count": int(row["count"]),
        "ns": int(ns),
        "flops": float(flops) if flops > 0 else None,
        "bytes": float(moved) if moved > 0 else None,
        "tflops_per_s": float(flops / ns / 1e3) if flops > 0 and ns else None,
        "gb_per_s": float(moved / ns) if moved > 0 and ns else None,
        "known_share": float(known_ns / ns) if ns else None,
        "roofline_share": float(roof / known_ns) if roof > 0 and known_ns else None,
        "bound": _bound(compute_ns, memory_ns),
        "headroom": float(max(known_ns - roof, 0.0) / window_ns) if roof > 0 and window_ns else None,
        "matrix_units": uses_matrix_units(str(name)) if family == Leaf.MATMUL else None,
        "longest": {key: int(row[key]) for key in ("rank", "start_ns", "end_ns", "stream")},
    }


def _bound(compute_ns: float, memory_ns: float) -> str:
    if max(compute_ns, memory_ns) <= 0:
        return "unknown"
    return "compute" if compute_ns >= memory_ns else "memory"


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)


def _with_roofs(table: pd.DataFrame, peak: Peak | None) -> pd.DataFrame:
    """Add the time that the FLOPs take at their own peak and the bytes at the bandwidth; 0 where a rate is unknown."""
    rates = {dtype: (peak.flop_per_ns(dtype) if peak else None) for dtype in table["dtype"].unique()}
    rate = table["dtype"].map(lambda dtype: rates[dtype] or np.inf).astype(np.float64)
    bandwidth = peak.hbm_gbps if peak is not None and peak.hbm_gbps else np.inf
    return table.assign(compute_ns=table["flops"] / rate, memory_ns=table["bytes"] / bandwidth)


def roofline(accounts: Sequence[RankAccount], peak: Peak | None, coverage: float | None) -> dict[str, Any]:
    """Return how the kernels stand on the roofline by family, and facts about the shapes of matrix products."""
    table = _with_roofs(_joined([own.kernels for own in accounts if own.steps is not None]), peak)
    table = table[table["state"] == State.COMPUTE]
    rate = peak.flop_per_ns("") if peak is not None else None
    bandwidth = peak.hbm_gbps if peak is not None else None
    return {
        "coverage": coverage,
        "hbm_gbps": bandwidth,
        "ridge_flop_per_byte": rate / bandwidth if rate and bandwidth else None,
        "inferred_kernels": sum(own.counting.get("inferred", 0) for own in accounts),
        "estimated_operators": sum(own.counting.get("estimated", 0) for own in accounts),
        "families": [_family(family, table[table["family"] == family]) for family in FAMILIES],
        "matmuls": _matmuls(accounts, peak),
        "matrix_units": _units(table),
        "unfused": _unfused(table),
    }


def _family(family: Leaf, own: pd.DataFrame) -> dict[str, Any]:
    columns = ("ns", "known_ns", "flops", "bytes", "compute_ns", "memory_ns")
    ns, known, flops, moved, compute, memory = (float(own[column].sum()) for column in columns)
    roof = float(np.maximum(own["compute_ns"], own["memory_ns"]).sum())
    return {
        "family": family.label,
        "ns": int(ns),
        "known_share": known / ns if ns else None,
        "tflops_per_s": flops / ns / 1e3 if flops and ns else None,
        "gb_per_s": moved / ns if moved and ns else None,
        "roofline_share": roof / known if roof and known else None,
        "bound": _bound(compute, memory),
        "reach": REACH.get(family),
    }


def _units(table: pd.DataFrame) -> dict[str, int]:
    """Return the time of matrix kernels on matrix units (tensor cores), on plain ones, and not told by their names."""
    own = table[table["family"] == Leaf.MATMUL]
    used = own["name"].map(uses_matrix_units).to_numpy(dtype=object)
    ns = own["ns"].to_numpy(dtype=np.int64)
    return {
        key: int(ns[[value is wanted for value in used]].sum()) if len(ns) else 0
        for key, wanted in (("used_ns", True), ("not_used_ns", False), ("unknown_ns", None))
    }


def _unfused(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return operators that ran in pieces: a softmax kernel of its own, a norm of pointwise kernels."""
    found = []
    for what, evidence, pattern in UNFUSED:
        named = table["name"].map(lambda name, pattern=pattern: bool(pattern.search(name)))
        own = table[named.to_numpy(dtype=np.bool_) & ~table["name"].str.startswith("triton_").to_numpy(dtype=np.bool_)]
        if len(own):
            names = sorted({short_name(str(name)) for name in own["name"]})[:4]
            count, ns = int(own["count"].sum()), int(own["ns"].sum())
            found.append({"what": what, "evidence": evidence, "count": count, "ns": ns, "kernels": names})
    return found


def _matmuls(accounts: Sequence[RankAccount], peak: Peak | None) -> list[dict[str, Any]]:
    """Return matrix products by kernel and shape, the longest first: alignment, tiles and waves."""
    frames = [own.shapes for own in accounts if own.steps is not None and len(own.shapes)]
    if not frames:
        return []
    keys = ["name", "dims", "grid", "dtype"]
    table = _joined(frames).groupby(keys, as_index=False)[["count", "ns", "executed"]].sum()
    table = table.sort_values(["ns", *keys], ascending=[False, *(True for _ in keys)], kind="stable").head(SHOWN_SHAPES)
    fields = (*keys, "count", "ns", "executed")
    rows = zip(*(table[field] for field in fields), strict=True)
    return [_matmul(dict(zip(fields, values, strict=True)), peak) for values in rows]


def _matmul(row: Mapping[str, Any], peak: Peak | None) -> dict[str, Any]:
    name, dims, grid, dtype = (str(row[key]) for key in ("name", "dims", "grid", "dtype"))
    ns, executed = int(row["ns"]), float(row["executed"])
    sizes = product_sizes(dims)
    rate = peak.flop_per_ns(dtype) if peak is not None else None
    return {
        "kernel": str(name),
        "short_name": short_name(str(name)),
        "dtype": dtype or None,
        "m": sizes[1] if sizes else None,
        "n": sizes[2] if sizes else None,
        "k": sizes[3] if sizes else None,
        "batch": sizes[0] if sizes else None,
        "count": int(row["count"]),
        "ns": int(ns),
        "tflops_per_s": float(executed / ns / 1e3) if ns else None,
        "peak_share": float(executed / rate / ns) if rate and ns else None,
        "matrix_units": uses_matrix_units(str(name)),
        "multiple_of": [multiple_of(size) for size in sizes[1:]] if sizes else None,
        **quantisation(str(name), sizes, str(grid), peak.multiprocessors if peak is not None else None),
    }


def multiple_of(size: int) -> int:
    """Return the largest tile step that divides a size.

    >>> [multiple_of(size) for size in (4096, 50257, 1000)]
    [128, 1, 8]
    """
    return next((step for step in MULTIPLES if size % step == 0), 1)


def product_sizes(dims: str) -> tuple[int, int, int, int] | None:
    """Return batch, m, n and k of the product whose operands are among some shapes.

    >>> product_sizes("[[7], [3, 5], [5, 7], [], []]"), product_sizes("[[64, 3, 7, 7]]")
    ((1, 3, 7, 5), None)
    """
    try:
        shapes = [shape for shape in json.loads(dims) if isinstance(shape, list) and len(shape) in (2, 3)]
        pairs = [(a, b) for a, b in pairwise(shapes) if a[-1] == b[-2] and len(a) == len(b)]
        a, b = pairs[-1] if len(shapes) == 3 and len(pairs) == 2 else pairs[0]
        return (a[0] if len(a) == 3 else 1), int(a[-2]), int(b[-1]), int(a[-1])
    except (IndexError, TypeError, ValueError):
        return None


def quantisation(
    name: str, sizes: tuple[int, int, int, int] | None, grid: str, multiprocessors: int | None
) -> dict[str, Any]:
    """Return what a product loses to tiles that overhang its edges, and to a last wave that does not fill the GPU.

    The tile is the one the kernel's name tells; its blocks are counted from it, else taken from the grid.

    >>> found = quantisation("gemm_128x256_x", (1, 4096, 4096, 64), "", 132)
    >>> found["tile"], found["tile_efficiency"], round(found["waves"], 2), round(found["wave_efficiency"], 2)
    ([128, 256], 1.0, 3.88, 0.97)
    """
    match = TILE.search(name)
    tile = [int(match[1]), int(match[2])] if match else None
    blocks = efficiency = None
    if tile and sizes:
        batch, m, n, _ = sizes
        counts = min((ceil(m / a) * ceil(n / b) for a, b in (tile, tile[::-1])), default=0)
        blocks = batch * counts
        efficiency = batch * m * n / (blocks * tile[0] * tile[1]) if blocks else None
    elif grid:
        try:
            blocks = prod(json.loads(grid))
        except (TypeError, ValueError):
            blocks = None
    waves = blocks / multiprocessors if blocks and multiprocessors else None
    return {
        "tile": tile,
        "tile_efficiency": efficiency,
        "waves": waves,
        "wave_efficiency": waves / ceil(waves) if waves else None,
    }
