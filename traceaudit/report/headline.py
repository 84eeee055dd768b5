"""The result in a sentence, and the facts at the head of a report."""

from traceaudit.report import sentences
from traceaudit.report.by_rank import hidden_share
from traceaudit.report.culprits import CulpritRow, main_culprit
from traceaudit.report.formats import clean, duration, listed, milliseconds, numbers, percent, plural
from traceaudit.report.rows import Fact, Result, WaterfallRow, is_reliable, ranks_traced, waterfall

NAMED_LOSS = 0.01  # the headline names up to three losses, and none smaller than this
_CLOCKS = {"one_host": "shared by one host", "collective_ends": "aligned", "none": "not aligned"}


def headline(result: Result) -> str:
    """Return the result in one sentence; whether it can be trusted comes first when it cannot."""
    job, level = result["job"], waterfall(result)[-1]
    number = main_number(result)
    if level.row != "mfu":
        number = f"MFU unknown, compute takes {percent(level.share)} of the step time"
    elif job.get("mixed_peak"):
        number += " of mixed peak"
    sentence = f"{number} on {ranks_traced(job)}, {plural(len(job['steps']), 'step')}"
    if job.get("device_rows") == "cpu_operators":
        sentence += " (no GPU rows: CPU operators stand for the device)"
    bars = [row for row in waterfall(result) if not row.is_level]
    worst = [row for row in sorted(bars, key=lambda row: -row.share) if row.share >= NAMED_LOSS][:3]
    losses = [_loss(row, main_culprit(result)) for row in worst]
    if losses:
        sentence += f": the largest {'losses are' if len(losses) > 1 else 'loss is'} {listed(losses)}"
    warning = "" if is_reliable(result) else f"Attribution not reliable ({doubt(result)}): "
    return f"{warning}{sentence}."


def main_number(result: Result) -> str:
    """Return the MFU, or without one the share of compute, in two or three words."""
    level = waterfall(result)[-1]
    return f"{percent(level.share)} {'MFU' if level.row == 'mfu' else 'compute'}"


def facts(result: Result) -> list[Fact]:
    """Return what was measured, for the head of a report."""
    job = result["job"]
    found = [Fact("GPU", clean(job["gpu"]))] if job.get("gpu") else []
    found.append(Fact("Traced", ranks_traced(job)))
    if job.get("layout"):
        found.append(Fact("Layout", ", ".join(f"{clean(name, 12)} {size}" for name, size in job["layout"].items())))
    if all(isinstance(step, int) for step in job["steps"]):
        found.append(Fact("Steps", clean(numbers(job["steps"]), 40)))
    if job.get("step_ns_median"):
        found.append(Fact("Median step", milliseconds(job["step_ns_median"], 1)))
    if job.get("hfu") is not None:
        found.append(Fact("HFU", percent(job["hfu"]), "recompute counted too"))
    overlap = hidden_share(job)
    if overlap is not None:
        found.append(Fact("Overlap", percent(overlap), "of communication under compute"))
    clock = result.get("clock", {})
    if sentences.clock(clock, job["ranks_traced"]):
        value = _CLOCKS.get(clock["method"]) or sentences.clock_method(clock)
        p95 = f"ends within {duration(clock['residual_p95_ns'])} (p95)" if clock.get("evidence") else ""
        found.append(Fact("Clocks", value, p95))
    if job.get("versions"):
        known = [f"{clean(name, 20)} {clean(version, 40)}" for name, version in job["versions"].items()]
        found.append(Fact("Versions", ", ".join(known)))
    return found


def doubt(result: Result) -> str:
    """Return why a result is not reliable, in a few words."""
    share = result.get("quality", {}).get("unattributed_share") or 0.0
    return f"{percent(share)} of the time is unattributed" if share >= NAMED_LOSS else "see the warnings"


def _loss(row: WaterfallRow, culprit: CulpritRow | None) -> str:
    if row.bucket == "straggler" and culprit:
        return f"{row.title} ({percent(row.share)}, mostly rank {culprit.rank}: {culprit.title})"
    first = row.leaves[0] if row.leaves else None
    mostly = f", mostly {first.title}" if first and len(row.leaves) > 1 and first.share >= row.share / 2 else ""
    return f"{row.title} ({percent(row.share)}{mostly})"
