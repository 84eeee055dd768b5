"""The report as one HTML file that fetches nothing: the page of a performance ticket."""

from dataclasses import dataclass
from typing import Any

from traceaudit.report import (
    advice,
    behind,
    budget,
    factors,
    headline,
    json_file,
    kernels,
    lanes,
    page,
    remarks,
    roofline,
    rows,
    tables,
    traffic,
    words,
)
from traceaudit.report.formats import clean

MOST_REMARKS = 60
FIRST_FINDINGS = 3


@dataclass(frozen=True)
class Calendar:
    """What is left of MFU over the calendar: the productive share of the time, times MFU."""

    productive: float
    goodput: float | None
    lines: tuple[str, ...]


def to_html(result: rows.Result) -> str:
    """Return the report as one page; equal results give equal pages.

    The result travels inside (`json_file.from_html` reads it back); where it is very large, without its least needed
    parts, which the page names.
    """
    block = json_file.to_block(result)
    found = advice.findings(result)
    return page.render(
        "report.html.j2",
        title=f"{headline.main_number(result)}: {clean(result.get('source') or 'traceaudit', 80)}",
        version=clean(result.get("traceaudit_version", ""), 40),
        data=block.data,
        data_type=block.media_type,
        left_out=block.left_out,
        **_head(result),
        findings=[(row, tables.evidence(row)) for row in found],
        first_findings=found[:FIRST_FINDINGS],
        checks=advice.checklist(result),
        walk=advice.walk_through(result),
        statuses=advice.STATUSES,
        confidences=advice.CONFIDENCES,
        record_next=advice.record_next(result),
        calendar=_calendar(result),
        **_figures(result),
        **_tables(result),
        recompute=behind.recompute(result),
        kernel_facts=kernels.kernel_facts(result),
        gap_facts=[
            (title, facts)
            for title, facts in (
                ("Causes", behind.host_facts(result)),
                ("How the GPUs were fed", behind.throughput(result)),
            )
            if facts
        ],
        pipeline=traffic.pipeline(result),
        definitions=tables.definitions(),
        causes=list(words.CAUSES.values()),
    )


def _head(result: rows.Result) -> dict[str, Any]:
    """Return what the top of the page shows, and what not to trust."""
    remarks_found = remarks.quality(result)
    return {
        "source": clean(result.get("source") or ""),
        "number": headline.main_number(result),
        "sentence": headline.headline(result),
        "reliable": rows.is_reliable(result),
        "has_mfu": result["job"]["mfu"] is not None,
        "facts": headline.facts(result),
        "waterfall": rows.waterfall(result),
        "model": factors.model(result),
        "remarks": remarks_found[:MOST_REMARKS],
        "remark_count": len(remarks_found),
        "warning_count": sum(remark.is_warning for remark in remarks_found),
    }


def _figures(result: rows.Result) -> dict[str, Any]:
    return {
        "rank_figure": lanes.rank_shares(result),
        "late_figure": lanes.waited_for(result),
        "timeline_figure": lanes.timeline(result),
        "timeline_step": (result.get("timeline") or {}).get("step"),
        "pipeline_figure": lanes.pipeline(result),
        "roofline_plane": roofline.plane(result),
    }


def _tables(result: rows.Result) -> dict[str, Any]:
    return {
        "waterfall_table": tables.waterfall(result),
        "rank_table": tables.ranks(result),
        "straggler_table": tables.stragglers(result),
        "straggler_views": tables.straggler_views(result),
        "link_table": tables.slow_links(result),
        "timeline_table": tables.timeline(result),
        "collective_table": tables.collectives(result),
        "kernel_table": tables.kernel_table(result),
        "gap_table": tables.host_gaps(result),
        "convention_table": tables.conventions(result),
        "step_table": tables.by_step(result),
    }


def _calendar(result: rows.Result) -> Calendar | None:
    """Return the failure budget beside the waterfall; None without one."""
    found = result.get("budget") or {}
    calendar = found.get("calendar") or {}
    if calendar.get("productive") is None:
        return None
    return Calendar(calendar["productive"], calendar.get("goodput"), tuple(budget.lines(found)))
