"""Compute kernels that run below what such kernels reach, where the traces say why."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from traceaudit.findings.finding import Confidence, Evidence, Finding
from traceaudit.findings.inputs import wrong_peak
from traceaudit.findings.seen import LEAF_OF, Seen
from traceaudit.leaves import Leaf
from traceaudit.mfu.kernel_table import REACH, UNFUSED
from traceaudit.report.formats import listed, percent, plural

SAVED_BY_MATRIX_UNITS = 0.75  # of a matrix product on plain cores; matrix units are at least four times as fast
OFF_TILE = 0.85  # of a matrix product's tiles or waves that do useful work, below which shapes cost
TILE = 32  # of m and n, below which a product cannot fill a tile
ALIGNED = 8  # elements of 16 bits that sizes should be multiples of, for 16-byte loads
FAR = 0.75  # of what kernels of a family reach, below which they are far from it
POINTWISE_SHARE = 0.08  # of the analysed time in unfused pointwise kernels, from which fusing them is worth a word
COPY_SHARE = 0.02
OPTIMIZER_SHARE = 0.02
HALF = 0.5  # of the traffic of two pointwise kernels, which fusing them saves
POINTWISE = re.compile(r"(?:vectorized|unrolled|legacy)_?elementwise_kernel|elementwise_kernel_with_index", re.I)
LOWER_BITS = ("bf16", "fp16", "fp8", "fp4")

Left = Mapping[Leaf, int]


def _from(leaf: Leaf, ns: float, left: Left) -> dict[Leaf, int]:
    """Claim time of a family; of compute that is not split where MFU is unknown."""
    return {(leaf if left[leaf] else Leaf.NOT_SPLIT): int(ns)}


def no_matrix_units(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield matrix products on plain cores of a GPU that has matrix units."""
    plain = seen.result.get("roofline", {}).get("matrix_units", {}).get("not_used_ns", 0)
    rates = seen.gpu.tflops if seen.gpu is not None else {}
    fast = max((rates[name] for name in ("tf32", "bf16", "fp16") if name in rates), default=0.0)
    if not plain or (rates and fast < 4 * rates.get("fp32", fast)):
        return
    rows = [
        row for row in seen.result.get("kernels", ()) if row["family"] == "matmul" and row.get("matrix_units") is False
    ]
    low = "bf16" if "bf16" in rates or not rates else "fp16"
    tf32 = " or allow TF32 for what has to stay in fp32 (torch.set_float32_matmul_precision('high')),"
    yield Finding(
        id="sub-roofline.no-tensor-cores",
        title="matrix products run without tensor cores",
        summary=f"{seen.share(plain)} is in matrix kernels whose names tell that they use plain cores.",
        action=f"Run them in {low} (torch.autocast),{tf32 if 'tf32' in rates else ''} and look for operands that are "
        "fp32 by accident.",
        verify="The names of the matrix kernels tell tensor cores (bf16, s1688, wgmma, tensorop), and they take a "
        "fraction of the time.",
        confidence=Confidence.ESTIMATED if rates else Confidence.SUSPECTED,
        claims=_from(Leaf.MATMUL, SAVED_BY_MATRIX_UNITS * plain, left),
        evidence=seen.of_kernels(rows),
    )


def matmul_shapes(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield matrix products whose sizes are off the alignment, the tile or the wave; of these the worst counts."""
    found = [(lost, why, row) for row in seen.result.get("roofline", {}).get("matmuls", ()) for lost, why in _lost(row)]
    found.sort(key=lambda entry: -entry[0])
    whole = sum(lost for lost, _, _ in found)
    rows = [
        Evidence(f"m, n, k = {row['m']}, {row['n']}, {row['k']}: {why}; {row['count']:,} runs", name=row["kernel"])
        for _, why, row in found
    ]
    yield Finding(
        id="sub-roofline.matmul-shapes",
        title="sizes of matrix products are off the tile or the wave",
        summary=f"{plural(len(found), 'shape')} do work that is thrown away, or leave multiprocessors without work.",
        action="Pad vocabulary, hidden and batch sizes to multiples of 64 (128 is better); choose the batch so that "
        "tiles fill whole waves of the GPU; fuse small products (QKV, gate and up) into one.",
        verify="The same products reach more of the peak; total kernel time falls although FLOPs rise a little.",
        confidence=Confidence.ESTIMATED,
        claims=_from(Leaf.MATMUL, whole, left),
        evidence=tuple(rows),
    )


def _lost(row: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the largest loss of a product to its shape, and why, if there is one."""
    ns, reasons = row["ns"], []
    tile, wave = row.get("tile_efficiency"), row.get("wave_efficiency")
    if tile is not None and tile < OFF_TILE:
        reasons.append((ns * (1 - tile), f"{percent(1 - tile)} of the tiles' work overhangs the edges"))
    if wave is not None and wave < OFF_TILE and (row.get("waves") or 0) > 1:
        reasons.append((ns * (1 - wave), f"{row['waves']:.2f} waves: the last one leaves the GPU partly idle"))
    least = min(row["multiple_of"]) if row.get("multiple_of") else ALIGNED
    short = 1 - (row.get("peak_share") or 1.0) / REACH[Leaf.MATMUL]
    small = min(row["m"] or TILE, row["n"] or TILE)
    if small < TILE and short > 0:
        reasons = [(ns * short, f"{small} is too small to fill a tile: {percent(row['peak_share'])} of peak")]
    elif least < ALIGNED and row.get("dtype") in LOWER_BITS and short > 0:
        reasons.append((ns * short, f"a size is no multiple of {ALIGNED}: {percent(row['peak_share'])} of peak"))
    if reasons:
        yield max(reasons)


def far_below(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield families whose known kernels reach far less of the roof that binds them than such kernels do."""
    if any(wrong_peak(seen, left)):  # a wrong roof says nothing of the kernels below it
        return
    for row in seen.result.get("roofline", {}).get("families", ()):
        leaf, share, reach = LEAF_OF[row["family"]], row["roofline_share"], row["reach"]
        if leaf not in (Leaf.MATMUL, Leaf.ATTENTION) or not share or not reach or share >= FAR * reach:
            continue
        own = [
            kernel
            for kernel in seen.result.get("kernels", ())
            if kernel["family"] == row["family"] and (kernel["roofline_share"] or 1.0) < FAR * reach
        ]
        estimated = bool(seen.result["roofline"]["estimated_operators"]) and leaf == Leaf.ATTENTION
        counted = " FLOPs of packed sequences are counted at their least." if estimated else ""
        hint = {
            Leaf.MATMUL: "Find the shapes that are slow: small, thin or batched products. Fuse or batch them, enlarge "
            "the batch, and try another layout or library (TORCHINDUCTOR max-autotune).",
            Leaf.ATTENTION: "Use a current FlashAttention (SDPA's flash or cuDNN backend; version 3 on Hopper), with "
            "the causal mask passed as is_causal rather than as a tensor, and head sizes of 64 or 128; short sequences "
            "and few heads do not fill the GPU.",
        }[leaf]
        yield Finding(
            id=f"sub-roofline.{row['family']}-below-reach",
            title=f"{row['family']} kernels stay far below what such kernels reach",
            summary=f"Where FLOPs or bytes are known ({percent(row['known_share'])} of their time) they reach "
            f"{percent(share)} of the roof that binds them; {percent(reach)} is usual.{counted}",
            action=hint,
            verify="The family's share of its roof rises.",
            confidence=Confidence.SUSPECTED if estimated else Confidence.ESTIMATED,
            claims=_from(leaf, row["ns"] * row["known_share"] * (1 - share / reach), left),
            evidence=seen.of_kernels(own),
        )


def unfused(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield attention and norms that ran in pieces."""
    attention = any(
        row["family"] == "attention" and row["ns"] for row in seen.result.get("roofline", {}).get("families", ())
    )
    for what, _, pattern in UNFUSED:
        rows = [
            row
            for row in seen.result.get("kernels", ())
            if row["kind"] == "compute" and pattern.search(row["name"]) and not row["name"].startswith("triton_")
        ]
        claims: dict[Leaf, int] = {}
        for row in rows:
            leaf = LEAF_OF[row["family"]] if left[LEAF_OF[row["family"]]] else Leaf.NOT_SPLIT
            claims[leaf] = claims.get(leaf, 0) + int(row["ns"])
        if not rows:
            continue
        action = {
            "attention": "Call torch.nn.functional.scaled_dot_product_attention with a backend that fuses it (flash, "
            "cuDNN, efficient); a bias or a mask tensor can force the slow one (torch.nn.attention.sdpa_kernel tells).",
            "norm": "Use the fused norm (torch.nn.RMSNorm with torch.compile, Apex, Liger or Transformer Engine) "
            "instead of pow, mean, rsqrt and mul.",
        }[what]
        yield Finding(
            id=f"sub-roofline.unfused-{what}",
            title=f"{what} runs in pieces",
            summary=f"Kernels that a fused {what} does not need take {seen.share(sum(row['ns'] for row in rows))}"
            + (": the scores are written to memory and read again." if what == "attention" else "."),
            action=action,
            verify=f"The named kernels are gone, and one {what} kernel stands in their place.",
            confidence=Confidence.SUSPECTED if what == "attention" and attention else Confidence.ESTIMATED,
            claims=claims,
            evidence=seen.of_kernels(rows),
        )


def pointwise(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield chains of pointwise kernels that a compiler would fuse; half of their time is claimed."""
    rows = [
        row
        for row in seen.result.get("kernels", ())
        if row["family"] == Leaf.ELEMENTWISE.label and POINTWISE.search(row["name"])
    ]
    whole = sum(int(row["ns"]) for row in rows)
    if whole < POINTWISE_SHARE * seen.window_ns:
        return
    most = int(HALF * whole)
    first = min(most, left[Leaf.ELEMENTWISE])
    claims = {Leaf.ELEMENTWISE: first, Leaf.MEMORY_FLOOR: most - first}
    yield Finding(
        id="sub-roofline.pointwise",
        title="pointwise kernels are not fused",
        summary=f"{seen.share(whole)} is in pointwise kernels of eager mode, each of which reads and writes its whole "
        "tensor. Fusing two of them saves about half, which is what is counted.",
        action="torch.compile the blocks, or use fused kernels for bias, activation, dropout, rotary embedding and "
        "residual; keep them in bf16.",
        verify="Fewer pointwise kernels a step, and triton_ kernels in their place.",
        confidence=Confidence.ESTIMATED,
        claims=claims if left[Leaf.ELEMENTWISE] or left[Leaf.MEMORY_FLOOR] else {Leaf.NOT_SPLIT: most},
        evidence=seen.of_kernels(rows),
    )


def unfused_optimizer(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield an optimizer that runs a few kernels for each tensor, or each operation for all tensors apart."""
    facts = seen.facts("optimizer")
    style = facts.get("style")
    own = left[Leaf.OPTIMIZER]
    if style not in ("loop", "foreach") or own < OPTIMIZER_SHARE * seen.window_ns:
        return
    yield Finding(
        id="sub-roofline.unfused-optimizer",
        title="the optimizer is not fused",
        summary=f"It runs {facts['kernels_per_step']:,.0f} kernels a step ({style}) and reads its states several "
        "times. A fused one reads them once; half of its time is counted.",
        action="Pass fused=True to torch.optim.AdamW (foreach=True is second best), or use the framework's fused "
        "optimizer; shard the states over the data-parallel ranks.",
        verify="A few multi_tensor_apply kernels with Fused in their names, and this row halves.",
        confidence=Confidence.ESTIMATED,
        claims={Leaf.OPTIMIZER: int(HALF * own)},
        evidence=seen.of_kernels([row for row in seen.result.get("kernels", ()) if row["family"] == "optimizer"]),
    )


def slowed(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield what kernels take longer beside communication."""
    yield Finding(
        id="sub-roofline.slowed-by-overlap",
        title="kernels run slower beside communication",
        summary="The same kernels with the same shapes are faster when no communication runs beside them: both share "
        "multiprocessors and memory bandwidth.",
        action="Give communication fewer multiprocessors (NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS), or use copy engines "
        "or the network's own reduction (SHARP) where there are; overlap with kernels bound by compute.",
        verify="The kernels' medians beside communication and without it come closer.",
        confidence=Confidence.ESTIMATED,
        claims={Leaf.SLOWED_BY_OVERLAP: left[Leaf.SLOWED_BY_OVERLAP]},
        evidence=seen.of_ledger(Leaf.SLOWED_BY_OVERLAP, "longer than without communication"),
    )


def device_copies(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield copies inside the GPU's memory where they are much."""
    if left[Leaf.DEVICE_COPY] < COPY_SHARE * seen.window_ns:
        return
    rows: Sequence[Mapping[str, Any]] = [
        row for row in seen.result.get("kernels", ()) if row["family"] == "device_copy"
    ]
    names = sorted({row["short_name"] for row in rows})[:2]
    yield Finding(
        id="sub-roofline.device-copies",
        title="tensors are copied within the GPU's memory",
        summary=f"{listed(names)} move tensors that stay on the GPU." if names else "Tensors are moved on the GPU.",
        action="Avoid .contiguous(), cat, casts and layout changes between operators: keep one memory format and one "
        "element type, write into views, fuse casts (torch.compile).",
        verify="Fewer copies a step, and this row shrinks.",
        confidence=Confidence.MEASURED,
        claims={Leaf.DEVICE_COPY: left[Leaf.DEVICE_COPY]},
        evidence=seen.of_kernels(rows),
    )


RULES = (no_matrix_units, unfused, matmul_shapes, far_below, pointwise, unfused_optimizer, slowed, device_copies)
