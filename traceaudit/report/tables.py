"""The tables of the report's page: which columns each has, and how many of its rows a page can take."""

from collections.abc import Mapping, Sequence
from typing import Any

from traceaudit.report import advice, behind, by_rank, culprits, factors, kernels, rows, traffic
from traceaudit.report.formats import clean, percent, plural, times
from traceaudit.report.table import Cell, Column, Columns, Table, ms, number, rate, share, size, span, table
from traceaudit.report.words import BUCKETS, leaf_title

MOST_RANKS, WORST_RANKS, BEST_RANKS = 64, 40, 3
MOST_CULPRITS, MOST_PARTS, MOST_LINKS = 20, 12, 20
LEAST_CULPRIT = 0.0005  # what would be written as less than 0.1 %
MOST_KERNELS, MOST_GAPS, MOST_GROUPS = 60, 20, 60
MOST_EVIDENCE = 12


def waterfall(result: rows.Result) -> Table:
    """Return the waterfall with all its leaves; the rows of a bucket add up to it."""
    found: list[tuple[str, str, float, float, int]] = []
    for bar in rows.waterfall(result):
        found.append((bar.title, "", bar.share, bar.step_ns, bar.ns))
        found += [(bar.title, leaf.title, leaf.share, leaf.step_ns, leaf.ns) for leaf in bar.leaves]
    columns: Columns[tuple[str, str, float, float, int]] = (
        Column("Row", lambda row: row[0], "text"),
        Column("Leaf", lambda row: row[1] or "all of it", "text"),
        Column("Share", lambda row: share(row[2])),
        Column("ms a step of a rank", lambda row: ms(row[3], 3)),
        Column("ns in all", lambda row: number(row[4]), hint="summed over steps and ranks, as in result.json"),
    )
    return table("Waterfall and leaves", columns, found)


def ranks(result: rows.Result) -> Table:
    """Return where the time of each rank goes; of many the worst, and the best few to hold them against."""
    everyone = by_rank.ranks(result)
    shown, left_out = everyone, ""
    if len(everyone) > MOST_RANKS:
        ordered = by_rank.worst_ranks(result, len(everyone))
        shown = ordered[:WORST_RANKS] + ordered[-BEST_RANKS:]
        left_out = (
            f"The {WORST_RANKS} ranks that lost most and the {BEST_RANKS} that lost least; "
            f"{len(everyone) - len(shown):,} others are in the data of this page."
        )
    has_offsets = any(row.clock_offset_ns for row in everyone)
    columns: Columns[by_rank.RankRow] = [
        Column("Rank", lambda row: Cell(str(row.rank), row.rank)),
        Column("Stage", lambda row: number(row.stage)),
        Column("Mean step", lambda row: ms(row.step_ns)),
        *(_bucket_column(result, bucket) for bucket in by_rank.rank_buckets(result)),
        Column("overlap", lambda row: share(row.overlap), hint="share of its communication under compute"),
        Column("clock", lambda row: span(row.clock_offset_ns) if has_offsets else "", hint="how far it is ahead"),
        Column("Trace", _trace, "text"),
    ]
    return table("Ranks", columns, shown, left_out)


def _bucket_column(result: rows.Result, bucket: str) -> Column[by_rank.RankRow]:
    return Column(rows.bucket_title(result, bucket), lambda row: share(row.shares.get(bucket, 0.0)))


def _trace(row: by_rank.RankRow) -> str:
    return row.file + (f" on {row.host}" if row.host else "") + ("" if row.reliable else " (not reliable)")


def stragglers(result: rows.Result) -> Table:
    """Return who made others wait, without those whose cost would be written as less than 0.1 %."""
    found = culprits.culprits(result)
    shown = [row for row in found if row.share >= LEAST_CULPRIT][:MOST_CULPRITS]
    rest = found[len(shown) :]
    left_out = ""
    if rest:
        left_out = f"And {plural(len(rest), 'other')}, {percent(sum(row.share for row in rest))} together."
    columns: Columns[culprits.CulpritRow] = (
        Column("Rank", lambda row: Cell(str(row.rank), row.rank)),
        Column("Cause", lambda row: row.title, "text"),
        Column("Share", lambda row: share(row.share)),
        Column("Waits caused", lambda row: ms(row.caused_step_ns, 3), hint="mean in a step of a rank"),
        Column("MFU points", lambda row: points(row.mfu_points), hint="if these waits alone vanished; not added up"),
        Column("Own", lambda row: ms(row.own_step_ns or None, 3), hint="what it took longer, in a step of its own"),
        Column("Evidence", lambda row: row.evidence, "text"),
    )
    return table("Who made the others wait", columns, shown, left_out)


def straggler_views(result: rows.Result) -> list[Table]:
    """Return the straggler time by who lost it and by who caused it; both have one total."""
    if not culprits.culprits(result):
        return []
    lost, caused = culprits.where_lost(result, MOST_PARTS), culprits.caused_by(result, MOST_PARTS)
    return [_parts("Where lost", "Rank", lost), _parts("Caused by", "Rank and cause", caused)]


def _parts(label: str, what: str, found: Sequence[culprits.PartRow]) -> Table:
    longest = max((part.ns for part in found), default=1)
    total = culprits.PartRow(
        "stragglers in all",
        sum(part.ns for part in found),
        sum(part.share for part in found),
        sum(part.step_ns for part in found),
    )
    columns: Columns[culprits.PartRow] = (
        Column(what, lambda row: row.title, "text"),
        Column("Share", lambda row: share(row.share)),
        Column("ms a step of a rank", lambda row: ms(row.step_ns, 3)),
        Column("", lambda row: Cell(" ", row.ns / longest), "graph"),
    )
    return table(label, columns, found, total=total)


def slow_links(result: rows.Result) -> Table:
    """Return the groups whose transfers took longer than those of their peers."""
    columns: Columns[culprits.LinkRow] = (
        Column("Group", lambda row: row.group, "name"),
        Column("Kind", lambda row: row.kind, "text"),
        Column("Message", lambda row: size(row.bytes)),
        Column("Count", lambda row: number(row.count)),
        Column("To its peers", lambda row: Cell(times(row.ratio), row.ratio)),
        Column("Longer by, in all", lambda row: ms(row.excess_ns)),
    )
    return _first("Slow links", columns, culprits.slow_links(result), MOST_LINKS)


def collectives(result: rows.Result) -> Table:
    """Return the collectives by group and kind, those that are exposed most first."""
    columns: Columns[traffic.CollectiveRow] = (
        Column("Group", lambda row: row.group, "name"),
        Column("Dimension", lambda row: leaf_title("exposed_comm", row.dim) if row.dim else "", "text"),
        Column("Kind", lambda row: row.kind, "text"),
        Column("Count", lambda row: number(row.count)),
        Column("Bytes", lambda row: size(row.bytes)),
        Column("Transfer", lambda row: ms(row.transfer_ns)),
        Column("Wait", lambda row: ms(row.wait_ns)),
        Column("Exposed", lambda row: ms(row.exposed_ns), hint="no compute kernel ran"),
        Column("Not blocking", lambda row: ms(row.not_blocking_ns), hint="the host was late as well"),
        Column("Exposed, estimate", lambda row: ms(row.transfer_estimate_ns), hint="partners were not traced"),
        Column("Bus bandwidth", lambda row: rate(row.busbw_gbps)),
    )
    return _first("Collectives", columns, traffic.collectives(result), MOST_GROUPS)


def kernel_table(result: rows.Result) -> Table:
    """Return the kernels with the most time."""
    columns: Columns[kernels.KernelRow] = (
        Column("Kernel", lambda row: Cell(row.short_name, None, row.name), "name"),
        Column("Family", lambda row: row.family or row.kind, "text"),
        Column("Count", lambda row: number(row.count)),
        Column("Time", lambda row: ms(row.ns)),
        Column("TFLOP/s", lambda row: number(row.flop_per_s and row.flop_per_s / 1e12, "{:,.1f}")),
        Column("GB/s", lambda row: number(row.byte_per_s and row.byte_per_s / 1e9, "{:,.0f}")),
        Column("Of roof", lambda row: share(row.roof_share), hint="the roof that binds: peak or bandwidth"),
        Column("Bound", lambda row: row.bound, "text"),
        Column("Headroom", lambda row: share(row.headroom), hint="time above the roof, of the step time"),
    )
    return _first("Kernels", columns, kernels.kernels(result), MOST_KERNELS)


def host_gaps(result: rows.Result) -> Table:
    """Return the calls behind idle GPUs."""
    columns: Columns[behind.GapRow] = (
        Column("Call", lambda row: Cell(row.call, None, row.full_call), "name"),
        Column("Cause", lambda row: row.title, "text"),
        Column("Inside", lambda row: Cell(row.where, None, row.full_where), "name"),
        Column("Idle", lambda row: ms(row.ns)),
        Column("Share", lambda row: share(row.share)),
        Column("Gaps", lambda row: number(row.count)),
        Column("Longest", lambda row: span(row.longest_ns)),
        Column("Rank", lambda row: number(row.rank, "{}"), hint="with most of it"),
    )
    return _first("Host gaps", columns, behind.host_gaps(result), MOST_GAPS)


def conventions(result: rows.Result) -> Table:
    """Return what MFU would read under other conventions."""
    columns: Columns[factors.Convention] = (
        Column("Convention", lambda row: row.name + (" (used)" if row.is_used else ""), "text"),
        Column("Formula", lambda row: row.formula, "text"),
        Column("FLOPs a step", lambda row: size(row.flops, "FLOP")),
        Column("MFU", lambda row: share(row.mfu)),
    )
    return table("MFU under other conventions", columns, factors.conventions(result))


def by_step(result: rows.Result) -> Table:
    """Return MFU and HFU of each step."""
    columns: Columns[factors.StepRow] = (
        Column("Step", lambda row: Cell(str(row.step), row.step)),
        Column("MFU", lambda row: share(row.mfu)),
        Column("HFU", lambda row: share(row.hfu)),
        Column("Mean step", lambda row: ms(row.step_ns)),
        Column("", lambda row: Cell(" ", row.mfu) if row.mfu is not None else "", "graph"),
    )
    return _first("MFU by step", columns, factors.by_step(result), 60)


def timeline(result: rows.Result) -> Table:
    """Return where the time of the timeline's ranks went in its step: what the picture shows, in numbers."""
    found = result.get("timeline") or {}
    shown = [entry["rank"] for entry in found.get("ranks") or []]
    of_rank = {entry["rank"]: entry for entry in result.get("ranks", [])}
    steps = [
        (rank, step)
        for rank in shown
        for step in of_rank.get(rank, {}).get("steps", [])
        if step["step"] == found.get("step")
    ]
    buckets = [name for name in by_rank.rank_buckets(result) if any(step["buckets"].get(name) for _, step in steps)]
    columns: Columns[tuple[int, Mapping[str, Any]]] = [
        Column("Rank", lambda row: Cell(str(row[0]), row[0])),
        Column("Step", lambda row: ms(row[1]["window_ns"], 3)),
        *(_step_column(result, bucket) for bucket in buckets),
    ]
    return table(f"Step {found.get('step')} in numbers", columns, steps)


def _step_column(result: rows.Result, bucket: str) -> Column[tuple[int, Mapping[str, Any]]]:
    return Column(rows.bucket_title(result, bucket), lambda row: ms(row[1]["buckets"].get(bucket, 0), 3))


def evidence(finding: advice.FindingRow) -> Table:
    """Return where a finding can be seen, with times to paste into a viewer."""
    columns: Columns[advice.EvidenceRow] = (
        Column("What", lambda row: row.text, "text"),
        Column("Name", lambda row: Cell(clean(row.name, 80), None, row.name), "name"),
        Column("Rank", lambda row: number(row.rank, "{}")),
        Column("Step", lambda row: number(row.step, "{}")),
        Column("File", lambda row: row.file, "name"),
        Column("Track", lambda row: row.track, "text"),
        Column("From, ns", lambda row: number(row.start_ns, "{}"), hint="on the clock of the file"),
        Column("To, ns", lambda row: number(row.end_ns, "{}"), hint="on the clock of the file"),
        Column("Length", lambda row: row.length, "text"),
    )
    return _first(f"Evidence: {finding.title}", columns, finding.evidence, MOST_EVIDENCE)


def definitions() -> list[tuple[str, str, str, list[tuple[str, str]]]]:
    """Return the buckets with colour, title, meaning and the meaning of each leaf."""
    return [
        (words.colour, words.title, words.meaning, [(leaf.title, leaf.meaning) for leaf in words.leaves.values()])
        for words in BUCKETS.values()
    ]


def points(value: float | None) -> Cell:
    """Write MFU points."""
    return Cell("") if value is None else Cell(f"{value:+.1f}", value)


def _first(label: str, columns: Sequence[Column[Any]], found: Sequence[Any], limit: int) -> Table:
    """Return the table of the first rows, and how many there are besides."""
    rest = len(found) - limit
    left_out = f"And {plural(rest, 'other')}, in the data of this page." if rest > 0 else ""
    return table(label, columns, found[:limit], left_out)
