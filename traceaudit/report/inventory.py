"""The byte inventory as text and as a picture."""

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from traceaudit.report.formats import percent, quantity

TITLES = {
    "weights": ("weights", "#0072B2"),
    "gradients": ("gradients", "#56B4E9"),
    "optimizer": ("optimizer states", "#009E73"),
    "activations": ("activations", "#E69F00"),
    "logits": ("logits", "#D55E00"),
    "kv_cache": ("KV cache", "#CC79A7"),
}
_INK = "#1B2430"


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report."""
    plan, states = result["plan"], result["states"]
    yield (
        f"States of the whole model: {quantity(states['model_bytes'], 'B')} "
        f"({states['bytes_per_param']:g} B a parameter: {states['title']})"
    )
    degrees = " ".join(f"{name}={plan[name]}" for name in ("tp", "pp", "dp", "cp", "virtual_stages") if plan[name] > 1)
    yield (
        f"On the fullest GPU (first stage), {degrees or 'one GPU a replica'}, ZeRO {plan['zero']}, recompute "
        f"{plan['recompute']}{', sequence parallel' if plan['sequence_parallel'] else ''}"
    )
    for name, size in result["bytes"].items():
        yield f"  {TITLES[name][0]:<20}{size / 1e9:>12,.2f} GB{percent(size / result['total_bytes']):>10}"
    yield f"  {'sum':<20}{result['total_bytes'] / 1e9:>12,.2f} GB"
    if result["layer_bytes"] is not None:
        yield f"  activations of a layer and micro-batch: {quantity(result['layer_bytes'], 'B')}"
    else:
        yield "  activations are left out: they need layers, hidden, heads and seq_len"
    if result["fits"] is not None:
        room = f"{result['usable_bytes'] / 1e9:.1f} GB usable of {result['gpu_bytes'] / 1e9:.1f} GB"
        yield f"{'Fits' if result['fits'] else 'Does not fit'}: {room}"
        yield "What to divide"
        for row in result["changes"]:
            yield f"  {row['total_bytes'] / 1e9:>12,.1f} GB  {'fits' if row['fits'] else '    '}  {row['title']}"
    yield from _seen(result)


def _seen(result: Mapping[str, Any]) -> Iterator[str]:
    seen = result["seen"] or {}
    if seen.get("allocated_peak_bytes"):
        reserved = seen.get("reserved_peak_bytes")
        more = f", {reserved / 1e9:.2f} GB reserved" if reserved else ""
        yield f"Measured peak: {seen['allocated_peak_bytes'] / 1e9:.2f} GB allocated{more}"
    elif result["seen"] is not None:
        yield "No memory was recorded: profile with profile_memory=True."
    for finding in result["findings"]:
        yield f"! {finding['title']}: {finding['evidence']}; {finding['action']}"


def picture(result: Mapping[str, Any]) -> Axes:
    """Draw the bytes as one bar, and each change below it as another, with the GPU's memory as a line."""
    rows = [("as planned", result["total_bytes"]), *((row["title"], row["total_bytes"]) for row in result["changes"])]
    axes = Figure(figsize=(8.6, 1.4 + 0.42 * len(rows)), layout="constrained").subplots()
    left = 0.0
    for name, size in result["bytes"].items():
        title, colour = TITLES[name]
        axes.barh(0, size / 1e9, left=left, color=colour, edgecolor=_INK, linewidth=0.6, label=title)
        left += size / 1e9
    for place, (_, size) in enumerate(rows[1:], start=1):
        axes.barh(place, size / 1e9, color="#C9D0D8", edgecolor=_INK, linewidth=0.6)
    if result["gpu_bytes"] is not None:
        axes.axvline(result["usable_bytes"] / 1e9, color=_INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows)), [title[:60] for title, _ in rows], fontsize=8.5, color=_INK)
    axes.invert_yaxis()
    axes.set_xlabel("GB on the fullest GPU; the dashed line is what is usable", fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=8.5)
    return axes
