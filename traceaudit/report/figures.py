"""Figures of the result, drawn without pyplot: the same result gives the same bytes."""

import io
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from traceaudit.report import by_rank, kernels, rows, traffic
from traceaudit.report.formats import clean, milliseconds, percent, quantity
from traceaudit.report.words import LEVEL_COLOUR, WORK, bucket_words, family_colour

MOST_BARS = 64  # ranks drawn as bars; more become a heat map
MOST_COLUMNS = 256  # of a heat map; more ranks share a column (of lateness: a row)
MOST_LABELLED_STEPS = 16  # of the lateness of few ranks; more leave no room for numbers
WORST_LABELLED = 6  # of many ranks
MOST_NAMED_POINTS = 4
_INK, _FAINT = "#1B2430", "#8A94A0"


def waterfall(result: rows.Result, ax: Axes | None = None) -> Axes:
    """Draw the bars from 100 % down to MFU, each with its share and its milliseconds a step."""
    bars = rows.waterfall(result)
    ax = ax or new_axes(8.6, 0.9 + 0.42 * len(bars))
    for place, row in enumerate(bars):
        left, width = min(row.start, row.end), abs(row.end - row.start)
        colour = bucket_words(row.bucket).colour if row.bucket else LEVEL_COLOUR
        ax.barh(place, width, left=left, height=0.68, color=colour, edgecolor=_INK, linewidth=0.8)
        if place + 1 < len(bars):
            ax.plot([row.end, row.end], [place + 0.34, place + 0.66], color=_FAINT, linewidth=0.8)
        label = f"{percent(row.share)}  ·  {milliseconds(row.step_ns, 1)}"
        # Beside the bar, on the side with more room: the text never lies on a colour.
        on_right = 1 - max(row.start, row.end) > left
        x, anchor = (max(row.start, row.end) + 0.012, "left") if on_right else (left - 0.012, "right")
        if row.row == "peak":
            x, anchor = 0.5, "center"
        ax.text(x, place, label, ha=anchor, va="center", color=_INK, fontsize=9.5)
    ax.set_yticks(range(len(bars)), [row.title for row in bars], fontsize=10.5, color=_INK)
    for tick, row in zip(ax.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if row.is_level else "normal")
    ax.set_ylim(len(bars) - 0.5, -0.5)
    _share_axis(ax, "share of peak" if bars[-1].row == "mfu" else "share of step time")
    return ax


def heatmap(result: rows.Result, ax: Axes | None = None) -> Axes:
    """Draw how long others waited for each rank in each step; of many ranks only the worst are named."""
    late = by_rank.lateness(result)
    few = len(late.ranks) <= MOST_BARS
    size = 1 if few else math.ceil(len(late.ranks) / MOST_COLUMNS)
    # The worst of the ranks that share a row, not their mean, in which one late rank would vanish.
    heat = [
        [max(column) / 1e6 for column in zip(*late.ns[first : first + size], strict=True)]
        for first in range(0, len(late.ns), size)
    ]
    ax = ax or new_axes(8.6, 1.2 + (0.27 * len(heat) if few else 4.2))
    most = max((ms for row in heat for ms in row), default=0.0)
    extent = (-0.5, len(late.steps) - 0.5, len(heat) * size - 0.5, -0.5)
    image = ax.imshow(
        heat, cmap="cividis", aspect="auto", vmin=0.0, vmax=most or 1.0, extent=extent, interpolation="nearest"
    )
    shown = len(late.steps) <= MOST_LABELLED_STEPS
    if few and shown:
        _number_cells(ax, heat, most)
    places = range(len(late.ranks)) if few else _apart(late.worst_first, len(late.ranks) // 24)[:WORST_LABELLED]
    ax.set_yticks(list(places), [f"rank {late.ranks[place]}" for place in places])
    stride = math.ceil(len(late.steps) / MOST_LABELLED_STEPS)
    ax.set_xticks(range(0, len(late.steps), stride), [str(step) for step in late.steps[::stride]])
    shared = f"; a row is the worst of {size} ranks" if size > 1 else ""
    ax.set_xlabel(f"step{shared}", fontsize=9, color=_INK)
    ax.spines[:].set_color(_FAINT)
    ax.tick_params(colors=_INK, length=0 if few else 3, labelsize=9)
    slender = max(20.0, 1.3 * len(heat)) if few else 20.0  # so that the scale is as tall as the map
    scale = ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.015, aspect=slender)
    scale.set_label("ms that others waited", fontsize=9, color=_INK)
    scale.ax.tick_params(labelsize=8, colors=_INK)
    scale.outline.set_edgecolor(_FAINT)
    return ax


def pipeline(result: rows.Result, ax: Axes | None = None) -> Axes:
    """Draw the work of one pipeline in one step: stages over time, in their order, with the waits in between."""
    found = traffic.pipeline(result)
    works = found.works if found else []
    seats = sorted({work.rank for work in works}, key=lambda rank: min(w.stage for w in works if w.rank == rank))
    ax = ax or new_axes(8.6, 1.3 + 0.42 * max(len(seats), 1))
    span = max((work.end_ns for work in works), default=1) / 1e6
    drawn: dict[str, BarContainer] = {}
    for work in works:
        place, start, length = seats.index(work.rank), work.start_ns / 1e6, (work.end_ns - work.start_ns) / 1e6
        again = min(work.recompute_ns / 1e6, length)
        for kind, left, width in (("R", start, again), (work.kind, start + again, length - again)):
            if width > 0:
                name, colour = WORK.get(kind, WORK["O"])
                bar = ax.barh(place, width, 0.78, left, color=colour, edgecolor=_INK, linewidth=0.4)
                drawn.setdefault(name, bar)
        if work.kind != "O" and length > 0.018 * span:
            text = str(work.microbatch)
            ax.text(start + length / 2, place, text, ha="center", va="center", fontsize=7.5, color=_INK)
    ax.set_yticks(range(len(seats)), [f"stage {_stages(works, rank)}\nrank {rank}" for rank in seats], fontsize=8.5)
    ax.set_ylim(len(seats) - 0.45, -0.55)
    ax.set_xlim(0, span)
    ax.set_xlabel("ms from the step's beginning; white is waiting, numbers are micro-batches", fontsize=9, color=_INK)
    ax.tick_params(colors=_INK, length=0, labelsize=8.5)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(_FAINT)
    order = [name for name, _ in WORK.values() if name in drawn]
    handles = [drawn[name] for name in order]
    ax.legend(handles, order, loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=8.5)
    return ax


def roofline(result: rows.Result, ax: Axes | None = None) -> Axes:
    """Draw kernels by FLOPs a byte and FLOPs a second, both logarithmic, below the roofs of bandwidth and peaks."""
    found = kernels.roofline(result) or kernels.Roofline([], None, {})
    ax = ax or new_axes(8.6, 4.4)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _roofs(ax, found)
    longest = max((point.ns for point in found.points), default=1)
    for family in dict.fromkeys(point.family for point in found.points):
        own = [point for point in found.points if point.family == family]
        ax.scatter(
            [point.flop_per_byte for point in own],
            [point.flop_per_s for point in own],
            [24 + 280 * point.ns / longest for point in own],
            color=family_colour(family),
            edgecolor=_INK,
            linewidth=0.6,
            alpha=0.8,
            label=clean(family, 24),
            zorder=3,
        )
    _name_points(ax, found.points)
    ax.set_xlabel("FLOPs a byte; the area is the kernel's time", fontsize=9, color=_INK)
    ax.set_ylabel("FLOPs a second", fontsize=9, color=_INK)
    ax.yaxis.set_major_formatter(lambda value, _: quantity(value, "FLOP/s").replace(".00", ""))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_formatter("")
    ax.yaxis.set_minor_formatter("")
    ax.tick_params(colors=_INK, labelsize=8.5, which="both")
    ax.grid(color="#E3E7EC", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_FAINT)
    if found.points:
        legend = ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=8.5)
        for handle in legend.legend_handles:
            handle.set_sizes([40.0])  # type: ignore[union-attr]  # a scatter's handle
    return ax


def _roofs(ax: Axes, found: kernels.Roofline) -> None:
    """Draw the bandwidth up to the highest peak, and each peak from where the bandwidth meets it."""
    peaks, slope = sorted(found.peaks.items(), key=lambda peak: (peak[1], peak[0])), found.byte_per_s
    ridges = [peak / slope for _, peak in peaks] if slope else []
    places = [point.flop_per_byte for point in found.points] + ridges
    rates = [point.flop_per_s for point in found.points] + [peak for _, peak in peaks]
    left, right = min(places, default=1.0) / 3, max(places, default=1.0) * 4
    bottom, top = min(rates, default=1.0) / 8, max(rates, default=1.0) * 2.5
    ax.set_xlim(left, right)
    ax.set_ylim(bottom, top)
    for dtype, peak in peaks:
        ax.plot([peak / slope if slope else left, right], [peak, peak], color=_INK, linewidth=1.2)
        text = f" {dtype} {peak / 1e12:,.5g} TFLOP/s"
        ax.text(right, peak, text, va="center", fontsize=8.5, color=_INK, parse_math=False)
    if slope:
        ridge = max(ridges, default=right)
        ax.plot([left, ridge], [left * slope, ridge * slope], color=_INK, linewidth=1.2)
        middle = math.sqrt(max(left, bottom / slope) * ridge)  # of what is seen of it
        text, at = f"{slope / 1e9:,.5g} GB/s", (middle, middle * slope)
        ax.annotate(text, at, (-5, 3), textcoords="offset points", ha="right", fontsize=8.5, color=_INK)


def _name_points(ax: Axes, points: Sequence[kernels.Point]) -> None:
    """Name the kernels with the most headroom, but none beside one that is named already."""
    into = ax.transScale + ax.transLimits  # to shares of the axes
    named: dict[str, float] = {}
    for point in sorted(points, key=lambda point: -point.headroom)[:12]:
        at = (point.flop_per_byte, point.flop_per_s)
        x, y = into.transform(at)
        if point.headroom <= 0 or point.title in named or any(abs(y - other) < 0.06 for other in named.values()):
            continue
        named[point.title] = y
        away, side = (-10, "right") if x > 0.6 else (10, "left")
        ax.annotate(
            point.title,
            at,
            (away, -3),
            textcoords="offset points",
            ha=side,
            fontsize=8,
            color=_INK,
            zorder=2.5,
            parse_math=False,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        )
        if len(named) == MOST_NAMED_POINTS:
            return


def _stages(works: Sequence[traffic.Work], rank: int) -> str:
    """Return the stages a rank works on, as text."""
    stages = sorted({work.stage for work in works if work.rank == rank})
    return ", ".join(map(str, stages[:4])) + ("…" if len(stages) > 4 else "")


def svg(drawn: Axes | Figure) -> str:
    """Return the figure as SVG without date or version, so that it can be compared."""
    buffer = io.StringIO()
    with _style():
        _root(drawn).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def png(drawn: Axes | Figure, dpi: float = 150) -> bytes:
    """Return the figure as PNG, the form that tickets show inline."""
    buffer = io.BytesIO()
    with _style():
        _root(drawn).savefig(buffer, format="png", dpi=dpi, metadata={"Software": None}, facecolor="white")
    return buffer.getvalue()


def _number_cells(ax: Axes, heat: Sequence[Sequence[float]], most: float) -> None:
    for place, row in enumerate(heat):
        for column, ms in enumerate(row):
            if ms >= 0.05:
                ink = _INK if ms > 0.55 * most else "white"  # the lower half of cividis is dark
                ax.text(column, place, f"{ms:,.1f}", ha="center", va="center", fontsize=8, color=ink)


def _apart(places: Sequence[int], distance: int) -> list[int]:
    """Return the places whose labels do not touch that of an earlier one."""
    kept: list[int] = []
    for place in places:
        if all(abs(place - other) > distance for other in kept):
            kept.append(place)
    return kept


def _share_axis(ax: Axes, label: str) -> None:
    ax.set_xlim(0, 1)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"], fontsize=9, color=_INK)
    ax.set_xlabel(label, fontsize=9, color=_INK)
    ax.tick_params(length=0)
    ax.grid(axis="x", color="#E3E7EC", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(_FAINT)


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "svg.hashsalt": "traceaudit",
            "svg.fonttype": "none",  # text stays text: small, sharp and searchable
            "font.family": "DejaVu Sans",  # comes with matplotlib, so the layout is the same everywhere
        }
    )


def _root(drawn: Axes | Figure) -> Figure:
    figure = drawn if isinstance(drawn, Figure) else drawn.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes are in no figure any more; draw them again")
    return figure


def new_axes(width: float, height: float) -> Axes:
    """Return axes of a figure of their own, of a size in inches; in a notebook, a figure that the cell shows."""
    with _style():
        if "ipykernel" in sys.modules:
            from matplotlib import pyplot as plt

            return plt.figure(figsize=(width, height), layout="constrained").subplots()
        return Figure(figsize=(width, height), layout="constrained").subplots()
