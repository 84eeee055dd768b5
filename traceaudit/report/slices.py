"""A picture of one step of one rank: where in time each bucket is."""

import pandas as pd
from matplotlib.axes import Axes

from traceaudit.report.figures import new_axes
from traceaudit.report.words import BUCKETS, bucket_words

MOST_BARS = 4_000  # of a bucket: beyond, neighbours closer than a pixel are drawn as one
_INK, _FAINT = "#1B2430", "#8A94A0"


def timeline(slices: pd.DataFrame, rank: int, step: int, ax: Axes | None = None) -> Axes:
    """Draw slices (``start_ns, end_ns, bucket`` of one step) as lanes, one a bucket, in the order of the waterfall."""
    shown = [bucket for bucket in BUCKETS if (slices["bucket"] == bucket).any()]
    ax = ax or new_axes(8.6, 0.9 + 0.34 * len(shown))
    start, end = int(slices["start_ns"].min()), int(slices["end_ns"].max())
    for lane, bucket in enumerate(shown):
        bars = merged(slices[slices["bucket"] == bucket], (end - start) // MOST_BARS)
        spans = [((first - start) / 1e6, (last - first) / 1e6) for first, last in bars]
        ax.broken_barh(spans, (lane - 0.36, 0.72), facecolors=bucket_words(bucket).colour)
    ax.set_yticks(range(len(shown)), [bucket_words(bucket).title for bucket in shown], fontsize=9.5, color=_INK)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlim(0, max((end - start) / 1e6, 1e-6))
    ax.set_xlabel(f"ms of step {step} on rank {rank}", fontsize=9, color=_INK)
    ax.tick_params(colors=_INK, labelsize=9)
    ax.spines[:].set_color(_FAINT)
    return ax


def merged(slices: pd.DataFrame, gap_ns: int) -> list[tuple[int, int]]:
    """Return start and end of runs of slices, by time, that are at most a gap apart."""
    start, end = (slices[name].to_numpy() for name in ("start_ns", "end_ns"))
    head = [True, *(start[1:] - end[:-1] > gap_ns).tolist()]
    last = [*head[1:], True]
    return list(zip(start[head].tolist(), end[last].tolist(), strict=True))
