"""Collectives and the pipeline of a result as rows."""

from dataclasses import dataclass

from traceaudit.report import sentences
from traceaudit.report.formats import clean
from traceaudit.report.rows import Fact, Result


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind in one group."""

    group: str
    dim: str
    kind: str
    count: int
    bytes: int
    transfer_ns: int
    wait_ns: int
    exposed_ns: int
    busbw_gbps: float | None  # where sizes and arrivals are known
    transfer_estimate_ns: int | None  # where partners were not traced
    not_blocking_ns: int | None  # of the exposed time: the host was late as well


@dataclass(frozen=True)
class Work:
    """A piece of forward or backward work in the picture of a pipeline; times from the step's beginning."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start_ns: int
    end_ns: int
    recompute_ns: int


@dataclass(frozen=True)
class PipelineRow:
    """A pipeline: its shape and theory as facts, and why its waits are not divided, if they are not."""

    facts: list[Fact]
    undivided: str
    works: list[Work]


def collectives(result: Result) -> list[CollectiveRow]:
    """Return the collectives by group and kind, the most exposed first."""
    rows = [
        CollectiveRow(
            group=clean(entry["group"]),
            dim=clean(entry.get("dim") or ""),
            kind=clean(entry["kind"]).replace("_", " "),
            count=entry.get("count") or 0,
            bytes=entry.get("bytes") or 0,
            transfer_ns=entry.get("transfer_ns") or 0,
            wait_ns=entry.get("wait_ns") or 0,
            exposed_ns=entry.get("exposed_ns") or 0,
            busbw_gbps=entry.get("busbw_gbps"),
            transfer_estimate_ns=entry.get("transfer_estimate_ns"),
            not_blocking_ns=entry.get("not_blocking_ns"),
        )
        for entry in result.get("collectives", [])
    ]
    return sorted(rows, key=lambda row: -row.exposed_ns)


def pipeline(result: Result) -> PipelineRow | None:
    """Return the pipeline of the run, None without one."""
    found = result.get("pipeline")
    if not found:
        return None
    picture = found.get("picture") or {}
    columns = picture.get("columns", [])
    works = [Work(**dict(zip(columns, row, strict=True))) for row in picture.get("rows", [])]
    return PipelineRow(
        [Fact(name, value) for name, value in sentences.pipeline_facts(found)],
        clean(found.get("undivided_reason") or ""),
        works,
    )
