"""Figures of the result, drawn without pyplot: the same result gives the same bytes."""

import io
import math
from contextlib import AbstractContextManager

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from traceaudit.report import rows
from traceaudit.report.formats import milliseconds, percent
from traceaudit.report.words import LEVEL_COLOUR, bucket_words

MOST_BARS = 64  # ranks drawn as bars; more become a heat map
MOST_COLUMNS = 256  # of the heat map; more ranks share a column
_INK, _FAINT = "#1B2430", "#8A94A0"


def waterfall(result: rows.Result, ax: Axes | None = None) -> Axes:
    """Draw the bars from 100 % down to MFU, each with its share and its milliseconds a step."""
    bars = rows.waterfall(result)
    ax = ax or _new_axes(8.6, 0.9 + 0.42 * len(bars))
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


def ranks(result: rows.Result, ax: Axes | None = None) -> Axes:
    """Draw where each rank's time goes: stacked bars, or a heat map when the ranks are many."""
    if len(rows.ranks(result)) > MOST_BARS:
        return _rank_heat(result, ax)
    return _rank_bars(result, ax)


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


def _rank_bars(result: rows.Result, ax: Axes | None) -> Axes:
    everyone, buckets = rows.ranks(result), rows.rank_buckets(result)
    pitch = 0.3 if len(everyone) <= 16 else 0.19
    ax = ax or _new_axes(8.6, 1.35 + pitch * len(everyone))
    left = [0.0] * len(everyone)
    for bucket in buckets:
        shares = [row.shares.get(bucket, 0.0) for row in everyone]
        colour = bucket_words(bucket).colour
        name = rows.bucket_title(result, bucket)
        ax.barh(range(len(everyone)), shares, 0.78, left, color=colour, edgecolor=_INK, linewidth=0.6, label=name)
        for place, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 0.045:
                ink = "white" if bucket == "exposed_comm" else _INK  # the one colour too dark for dark text
                text = f"{100 * share:.0f}"
                ax.text(start + share / 2, place, text, ha="center", va="center", fontsize=8, color=ink)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    names = [f"rank {row.rank}" + ("" if row.reliable else " (not reliable)") for row in everyone]
    ax.set_yticks(range(len(everyone)), names, fontsize=9 if pitch > 0.2 else 7.5, color=_INK)
    ax.set_ylim(len(everyone) - 0.45, -0.55)
    _share_axis(ax, "share of the rank's step time")
    ax.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8.5, labelcolor=_INK, handlelength=1.1
    )
    return ax


def _rank_heat(result: rows.Result, ax: Axes | None) -> Axes:
    everyone, buckets = rows.ranks(result), rows.rank_buckets(result)
    ax = ax or _new_axes(8.6, 1.4 + 0.36 * len(buckets))
    size = math.ceil(len(everyone) / MOST_COLUMNS)
    columns = [everyone[first : first + size] for first in range(0, len(everyone), size)]
    # The worst of the ranks that share a column, not their mean, in which one bad rank would vanish.
    worst = [min if bucket == rows.kept_bucket(result) else max for bucket in buckets]
    heat = [
        [choose(row.shares.get(bucket, 0.0) for row in column) for column in columns]
        for bucket, choose in zip(buckets, worst, strict=True)
    ]
    extent = (0.0, float(len(columns) * size), len(buckets) - 0.5, -0.5)
    image = ax.imshow(heat, cmap="cividis", aspect="auto", vmin=0.0, extent=extent, interpolation="nearest")
    ax.set_yticks(range(len(buckets)), [rows.bucket_title(result, bucket) for bucket in buckets], fontsize=9.5)
    each = f", worst of each {size}" if size > 1 else ""
    ax.set_xlabel(f"ranks in order{each}", fontsize=9, color=_INK)
    ax.spines[:].set_color(_FAINT)
    ax.tick_params(colors=_INK, length=0, labelsize=9)
    scale = ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.015, format=lambda share, _: f"{100 * share:.0f} %")
    scale.ax.tick_params(labelsize=8, colors=_INK)
    scale.outline.set_edgecolor(_FAINT)
    return ax


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


def _new_axes(width: float, height: float) -> Axes:
    with _style():
        return Figure(figsize=(width, height), layout="constrained").subplots()
