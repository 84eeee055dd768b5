"""The report as one HTML file that fetches nothing and runs nothing."""

import base64
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes

from traceaudit.report import behind, figures, formats, json_file, rows, words

MOST_KERNELS = 40
MOST_RANKS, WORST_RANKS = 64, 40
MOST_CULPRITS, MOST_PARTS, MOST_LINKS = 20, 12, 20
LEAST_CULPRIT = 0.0005  # what would be written as less than 0.1 %
MOST_REMARKS = 60
MOST_GAPS = 12
LARGEST_DATA = 600_000  # characters of embedded JSON; above it, single steps stay out, so that a ticket takes the file


@dataclass(frozen=True)
class Picture:
    """A figure as a data URI, and what it says for those who do not see it."""

    source: str
    alt: str


def to_html(result: rows.Result) -> str:
    """Return the report as one page; equal results give equal pages.

    The result travels inside, as JSON in ``#traceaudit-result``; where it is very large, without its single steps.
    """
    environment = Environment(
        loader=PackageLoader("traceaudit.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        percent=formats.percent,
        ms=formats.milliseconds,
        duration=formats.duration,
        quantity=formats.quantity,
        bandwidth=formats.bandwidth,
        times=formats.times,
        plural=formats.plural,
    )
    everyone, kernels, quality = rows.ranks(result), rows.kernels(result), rows.quality(result)
    few = len(everyone) <= MOST_RANKS
    data, has_steps = _data_block(result)
    return environment.get_template("report.html.j2").render(
        version=formats.clean(result.get("traceaudit_version", "")),
        source=formats.clean(result.get("source", "")),
        number=rows.main_number(result),
        headline=rows.headline(result),
        reliable=rows.is_reliable(result),
        has_mfu=result["job"]["mfu"] is not None,
        facts=rows.facts(result),
        waterfall=rows.waterfall(result),
        waterfall_picture=_waterfall_picture(result),
        ranks=everyone if few else rows.worst_ranks(result, WORST_RANKS),
        rank_count=len(everyone),
        rank_buckets=rows.rank_buckets(result),
        rank_picture=_rank_picture(result) if everyone else None,
        bucket_title=lambda bucket: rows.bucket_title(result, bucket),
        colour=lambda bucket: words.bucket_words(bucket).colour if bucket else words.LEVEL_COLOUR,
        **_stragglers(result),
        **_pipeline(result),
        collectives=rows.collectives(result),
        **_host(result),
        recompute=behind.recompute(result),
        kernels=kernels[:MOST_KERNELS],
        kernel_count=len(kernels),
        kernel_facts=behind.kernel_facts(result),
        roofline_picture=_roofline_picture(result),
        model=rows.model(result),
        quality=quality[:MOST_REMARKS],
        quality_count=len(quality),
        definitions=words.BUCKETS,
        causes=words.CAUSES,
        has_steps=has_steps,
        data=Markup(data),  # noqa: S704  escaped for a script element by to_data_block
    )


def _stragglers(result: rows.Result) -> dict[str, Any]:
    """Return what the section on stragglers shows, if anything."""
    culprits, links = rows.culprits(result), rows.slow_links(result)
    lost, caused = rows.where_lost(result, MOST_PARTS), rows.caused_by(result, MOST_PARTS)
    shown = [row for row in culprits if row.share >= LEAST_CULPRIT][:MOST_CULPRITS]
    late = bool(rows.lateness(result).worst_first)
    return {
        "has_stragglers": bool(culprits or links or late),
        "culprits": shown,
        "culprits_left": culprits[len(shown) :],
        "views": [("Where lost", "Rank", lost), ("Caused by", "Rank and cause", caused)] if culprits else [],
        "late_picture": _late_picture(result) if late else None,
        "slow_links": links[:MOST_LINKS],
        "slow_link_count": len(links),
    }


def _pipeline(result: rows.Result) -> dict[str, Any]:
    """Return what the section on the pipeline shows, if there is one."""
    found = rows.pipeline(result)
    drawn = None
    if found is not None and found.works:
        alt = "Forward and backward work of one pipeline in one step, by stage over time; the facts stand below."
        drawn = _picture(figures.pipeline(result), alt)
    return {"pipeline": found, "pipeline_picture": drawn}


def _host(result: rows.Result) -> dict[str, Any]:
    """Return what the section on host gaps shows, if anything."""
    gaps = behind.host_gaps(result)
    return {
        "gaps": gaps[:MOST_GAPS],
        "gap_count": len(gaps),
        "gap_facts": [
            (title, facts)
            for title, facts in (
                ("Causes", behind.host_facts(result)),
                ("How the GPUs were fed", behind.throughput(result)),
            )
            if facts
        ],
    }


def _data_block(result: rows.Result) -> tuple[str, bool]:
    data = json_file.to_data_block(result)
    if len(data) <= LARGEST_DATA:
        return data, True
    ranks = [{name: value for name, value in entry.items() if name != "steps"} for entry in result.get("ranks", [])]
    kept = {name: value for name, value in result.items() if name != "lateness"}
    return json_file.to_data_block({**kept, "ranks": ranks}), False


def _waterfall_picture(result: rows.Result) -> Picture:
    bars = rows.waterfall(result)
    parts = [f"{row.title} {formats.percent(row.share)}" for row in bars]
    return _picture(figures.waterfall(result), f"Waterfall: {', '.join(parts)}. The table below has the same numbers.")


def _rank_picture(result: rows.Result) -> Picture:
    return _picture(figures.ranks(result), "Share of each bucket in the time of each rank, as in the table below.")


def _late_picture(result: rows.Result) -> Picture:
    late = rows.lateness(result)
    waits = [
        f"rank {late.ranks[place]} {formats.milliseconds(sum(late.ns[place]), 1)}" for place in late.worst_first[:5]
    ]
    alt = f"Time that others waited for each rank, by step. In all steps, the longest first: {', '.join(waits)}."
    return _picture(figures.heatmap(result), alt)


def _roofline_picture(result: rows.Result) -> Picture | None:
    if behind.roofline(result) is None:
        return None
    alt = "Kernels by FLOPs a byte and FLOPs a second under the roofs of bandwidth and peak; the table has the numbers."
    return _picture(figures.roofline(result), alt)


def _picture(axes: Axes, alt: str) -> Picture:
    data = base64.b64encode(figures.svg(axes).encode()).decode()
    return Picture(f"data:image/svg+xml;base64,{data}", alt)
