"""Lanes: what pages draw one below the other on a common axis, as SVG that follows the page's width and colours.

Places are percentages, so that text keeps its size on any screen. A lane of very many cells is an image, one pixel a
cell. Nothing is told by colour alone: lanes have labels and notes, and each figure has its table.
"""

import base64
import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.colors import to_hex
from matplotlib.image import imsave

from traceaudit.report import by_rank, traffic
from traceaudit.report.formats import clean, milliseconds, numbers, percent, plural
from traceaudit.report.rows import Result, bucket_title, kept_bucket
from traceaudit.report.svg import element, stretches
from traceaudit.report.words import DARK_BUCKETS, WORK, bucket_words, leaf_title

MOST_LANES = 64  # ranks with a lane of their own; of more, each lane shows all of them
MOST_CELLS = 2048  # of an image; more ranks share a cell
MOST_STEPS = 24  # lanes of steps
MOST_NUMBERED = 16  # steps, whose cells have room for numbers
LEAST_NUMBERED = 0.055  # of a lane's length, from which a stretch has room for a number
_ON_LIGHT, _ON_DARK = "#17202b", "#ffffff"


@dataclass(frozen=True)
class Lane:
    """A line of a figure; the note stands at its end."""

    label: str
    drawing: Markup
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """Lanes on a common axis; `caption` says what the axis and the colours are, `alt` what can be seen."""

    lanes: tuple[Lane, ...]
    alt: str
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()  # colour and name
    axis: Markup | None = None
    scale: tuple[str, str, str] | None = None  # image of the colours, least, most

    @property
    def has_notes(self) -> bool:
        """Whether any lane has a note."""
        return any(lane.note for lane in self.lanes)


def rank_shares(result: Result) -> Figure | None:
    """Draw where the time of each rank goes: a bar a rank, or of many ranks an image a bucket; None without ranks."""
    everyone = by_rank.ranks(result)
    if not everyone:
        return None
    return _rank_bars(result, everyone) if len(everyone) <= MOST_LANES else _rank_images(result, everyone)


def _rank_bars(result: Result, everyone: Sequence[by_rank.RankRow]) -> Figure:
    buckets = by_rank.rank_buckets(result)
    lanes = []
    for row in everyone:
        parts, start = [], 0.0
        for bucket in buckets:
            size = row.shares.get(bucket, 0.0)
            title = f"{bucket_title(result, bucket)} {percent(size)}"
            text = f"{100 * size:.0f}" if size >= LEAST_NUMBERED else ""
            if size:
                parts.append(_stretch(start, size, bucket_words(bucket).colour, text, title, bucket in DARK_BUCKETS))
            start += size
        lanes.append(Lane(f"rank {row.rank}", _lane(parts), "" if row.reliable else "not reliable"))
    legend = tuple((bucket_words(bucket).colour, bucket_title(result, bucket)) for bucket in buckets)
    alt = "Share of each bucket in the time of each rank; the table has the numbers."
    return Figure(tuple(lanes), alt, "Percent of the rank's own step time.", legend)


def _rank_images(result: Result, everyone: Sequence[by_rank.RankRow]) -> Figure:
    """Draw an image a bucket, each on its own scale; of ranks that share a cell the worst shows, not the mean."""
    lanes = []
    for bucket in by_rank.rank_buckets(result):
        shares = np.array([row.shares.get(bucket, 0.0) for row in everyone])
        kept = bucket == kept_bucket(result)
        least, most = float(shares.min()), float(shares.max())
        worst = everyone[int(shares.argmin() if kept else shares.argmax())].rank
        cells = _shared(shares, np.min if kept else np.max)
        text = f"{percent(least)} to {percent(most)}, {'least' if kept else 'most'} on rank {worst}"
        lanes.append(Lane(bucket_title(result, bucket), _image(cells, least, most), text))
    each = math.ceil(len(everyone) / MOST_CELLS)
    shared = f"; a cell is the worst of {each} ranks" if each > 1 else ""
    alt = f"Share of each bucket over the ranks: {'; '.join(f'{lane.label} {lane.note}' for lane in lanes)}."
    caption = (
        f"Each column is a rank, in order from {everyone[0].rank} to {everyone[-1].rank}{shared}. Each row has its own "
        "scale, from its least (dark) to its most (light)."
    )
    return Figure(tuple(lanes), alt, caption, scale=(_scale_image(), "least", "most"))


def waited_for(result: Result) -> Figure | None:
    """Draw how long others waited for each rank in each step; None where nobody waited."""
    late = by_rank.lateness(result)
    worst = late.worst_first
    if not worst:
        return None
    ns = np.array(late.ns, dtype=np.int64)
    most = int(ns.max())
    waits = [f"rank {late.ranks[place]} {milliseconds(int(ns[place].sum()), 1)}" for place in worst[:5]]
    alt = f"Time that others waited for each rank, by step. In all steps, the longest first: {', '.join(waits)}."
    scale = (_scale_image(), "0 ms", milliseconds(most, 1))
    if len(late.ranks) <= MOST_LANES:
        lanes = [
            Lane(f"rank {rank}", _cells(row, most), milliseconds(int(row.sum()), 1) if row.any() else "")
            for rank, row in zip(late.ranks, ns, strict=True)
        ]
        many = f"One cell a step, from {late.steps[0]} to {late.steps[-1]}, in ms; at the end the sum of all steps."
        caption = many if len(late.steps) > 1 else f"In ms, in step {late.steps[0]}."
        return Figure(tuple(lanes), alt, caption, scale=scale)
    costly = sorted(np.argsort(-ns.sum(axis=0), kind="stable")[:MOST_STEPS].tolist())
    lanes = [
        Lane(
            f"step {late.steps[place]}",
            _image(_shared(ns[:, place], np.max), 0, most),
            f"most for rank {late.ranks[int(ns[:, place].argmax())]}, {milliseconds(int(ns[:, place].max()), 1)}",
        )
        for place in costly
    ]
    left = len(late.steps) - len(costly)
    caption = f"Each column is a rank, in order from {late.ranks[0]} to {late.ranks[-1]}." + (
        f" The steps with most waits; {plural(left, 'step')} more." if left else ""
    )
    return Figure(tuple(lanes), alt, caption, scale=scale)


def timeline(result: Result) -> Figure | None:
    """Draw what each rank did in one step, in stretches of one leaf; None without a timeline."""
    found = result.get("timeline") or {}
    lanes = [(entry, _runs(entry)) for entry in found.get("ranks") or []]
    length = max((runs[-1][0] + runs[-1][1] for _, runs in lanes if runs), default=0)
    if not length:
        return None
    leaves = [str(leaf) for leaf in found.get("leaves") or []]
    used = sorted({place for _, runs in lanes for _, _, place in runs if place < len(leaves)})
    buckets = list(dict.fromkeys(leaves[place].partition(".")[0] for place in used))
    drawn = tuple(Lane(f"rank {entry['rank']}", _timeline_lane(runs, leaves, length)) for entry, runs in lanes)
    span_ns = length * (found.get("bin_ns") or 0)
    shown = numbers([entry["rank"] for entry, _ in lanes])
    alt = f"What ranks {shown} did over {milliseconds(span_ns, 1)} of step {found.get('step')}, coloured by bucket."
    caption = (
        f"One aligned clock; a pixel column stands for at least {milliseconds(found.get('bin_ns') or 0)}, and has "
    )
    caption += "the colour of what took most of it."
    legend = tuple((bucket_words(bucket).colour, clean(bucket_title(result, bucket), 60)) for bucket in buckets)
    return Figure(drawn, alt, caption, legend, _axis(span_ns))


def _runs(entry: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return the stretches of a rank as first bin, length and leaf."""
    start, runs = int(entry.get("first_bin") or 0), []
    for leaf, size in zip(entry.get("leaf") or [], entry.get("bins") or [], strict=False):
        runs.append((start, int(size), int(leaf)))
        start += int(size)
    return runs


def _timeline_lane(runs: Sequence[tuple[int, int, int]], leaves: Sequence[str], length: int) -> Markup:
    by_leaf: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for start, size, leaf in runs:
        by_leaf[leaf].append((start, size))
    paths = []
    for leaf, parts in sorted(by_leaf.items()):
        bucket, _, name = (leaves[leaf] if leaf < len(leaves) else "unattributed.other").partition(".")
        title = clean(f"{bucket_words(bucket).title}: {leaf_title(bucket, name)}", 120)
        paths.append(element("path", element("title", title), d=stretches(parts), fill=bucket_words(bucket).colour))
    return element("svg", *paths, class_="lane", viewBox=f"0 0 {length} 1", preserveAspectRatio="none")


def pipeline(result: Result) -> Figure | None:
    """Draw the work of one pipeline in one step, by stage over time; None without one."""
    found = traffic.pipeline(result)
    if found is None or not found.works:
        return None
    works, span = found.works, max(max(work.end_ns for work in found.works), 1)
    first = {work.rank: min(other.stage for other in works if other.rank == work.rank) for work in works}
    lanes, used = [], set()
    for rank in sorted(first, key=lambda rank: (first[rank], rank)):
        parts = []
        for work in (work for work in works if work.rank == rank):
            again = min(work.recompute_ns, work.end_ns - work.start_ns)
            middle = work.start_ns + again
            pieces = [("R", work.start_ns, middle)] if again else []
            for kind, start, end in [*pieces, (work.kind, middle, work.end_ns)]:
                kind = kind if kind in WORK else "O"
                used.add(kind)
                title = f"{WORK[kind][0]}, micro-batch {work.microbatch}, {milliseconds(end - start)}"
                number = str(work.microbatch) if kind in "FBI" and (end - start) > 0.018 * span else ""
                parts.append(_stretch(start / span, (end - start) / span, WORK[kind][1], number, title))
        stages = sorted({work.stage for work in works if work.rank == rank})
        lanes.append(Lane(f"stage {numbers(stages)}, rank {rank}", _lane(parts)))
    legend = tuple((colour, name) for kind, (name, colour) in WORK.items() if kind in used)
    caption = "Numbers are micro-batches; where nothing is drawn the stage waits or communicates."
    alt = "Forward and backward work of one pipeline in one step, by stage over time; the facts stand below."
    return Figure(tuple(lanes), alt, caption, legend, _axis(span))


def _stretch(start: float, size: float, fill: str, text: str, title: str, dark: bool = False) -> Markup:
    """Return a stretch of a lane from a share of its length on, with a number in its middle."""
    box = element(
        "rect", element("title", title), x=f"{100 * start:.3f}%", width=f"{100 * size:.3f}%", height="100%", fill=fill
    )
    if not text:
        return box
    ink = _ON_DARK if dark else _ON_LIGHT
    return box + element("text", text, x=f"{100 * (start + size / 2):.2f}%", y="50%", class_="on", color=ink)


def _lane(parts: Sequence[Markup]) -> Markup:
    return element("svg", *parts, class_="lane outlined")


def _cells(row: np.ndarray[Any, Any], most: int) -> Markup:
    """Return a lane of coloured cells with their numbers, if there are few."""
    few, width, parts = len(row) <= MOST_NUMBERED, 1 / len(row), []
    for place, ns in enumerate(row.tolist()):
        text = f"{ns / 1e6:,.1f}" if few and ns >= 50_000 else ""
        level = ns / most
        if not ns:
            continue
        parts.append(_stretch(place * width, width, _heat(level), text, milliseconds(ns), level <= 0.55))
    return _lane(parts)


def _axis(span_ns: float) -> Markup | None:
    """Return the axis of a lane: five times from its beginning."""
    if span_ns <= 0:
        return None
    digits = 0 if span_ns >= 50_000_000 else 2
    places = [(0, "start"), (25, "middle"), (50, "middle"), (75, "middle"), (100, "end")]
    texts = [
        element("text", milliseconds(share * span_ns / 100, digits), x=f"{share}%", y="50%", text_anchor=anchor)
        for share, anchor in places
    ]
    return element("svg", *texts, class_="axis", aria_hidden="true")


def _shared(values: np.ndarray[Any, Any], choose: Callable[..., Any]) -> np.ndarray[Any, Any]:
    """Return at most `MOST_CELLS` values, each chosen from as many neighbours."""
    each = math.ceil(len(values) / MOST_CELLS)
    return np.array([choose(values[first : first + each]) for first in range(0, len(values), each)])


def _image(values: np.ndarray[Any, Any], least: float, most: float) -> Markup:
    source = _png(values[np.newaxis, :].astype(float), least, most if most > least else least + 1)
    return element("img", src=source, alt="", class_="lane pixels")


def _png(values: np.ndarray[Any, Any], least: float, most: float) -> str:
    buffer = io.BytesIO()
    imsave(buffer, values, cmap="cividis", vmin=least, vmax=most, format="png", metadata={"Software": ""})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@cache
def _scale_image() -> str:
    return _png(np.linspace(0, 1, 64)[np.newaxis, :], 0, 1)


def _heat(level: float) -> str:
    return to_hex(mpl.colormaps["cividis"](min(max(level, 0.0), 1.0)))
