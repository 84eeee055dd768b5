"""From the result to the rows that every report draws: pure functions, no layout and no markup."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from traceaudit.report import sentences
from traceaudit.report.formats import clean, duration, listed, milliseconds, numbers, percent, plural, quantity
from traceaudit.report.words import (
    BUCKETS,
    NOT_SPLIT,
    WHOLE_BUCKET_LEAVES,
    bucket_words,
    cause_title,
    family_title,
    leaf_title,
)

Result: TypeAlias = Mapping[str, Any]

NAMED_LOSS = 0.01  # the headline names up to three losses, and none smaller than this
LEAST_PART = 0.005  # of the largest part: smaller ones share a row
_CLOCKS = {"one_host": "shared by one host", "collective_ends": "aligned", "none": "not aligned"}
NAMED_STRAGGLERS = 0.02  # stragglers from this share on are named by their culprit, if it caused half of the waits


@dataclass(frozen=True)
class LeafRow:
    """One cause of a bucket, summed over ranks and steps; ``step_ns`` is its mean in a step of a rank."""

    bucket: str
    leaf: str
    title: str
    ns: int
    share: float
    step_ns: float


@dataclass(frozen=True)
class WaterfallRow:
    """One bar: a level stands on zero (100 %, and what is left); a loss hangs from the end of the bar before it."""

    row: str
    bucket: str | None  # None for the bar of 100 %
    title: str
    is_level: bool
    start: float
    end: float
    share: float  # size, never negative
    step_ns: float
    leaves: tuple[LeafRow, ...]


@dataclass(frozen=True)
class RankRow:
    """One rank: its mean step and the share of its own windows that each bucket takes."""

    rank: int
    stage: int | None
    host: str
    file: str
    reliable: bool
    step_ns: float
    shares: dict[str, float]
    overlap: float | None  # share of its communication that compute hides
    clock_offset_ns: int  # own time minus aligned time


@dataclass(frozen=True)
class CulpritRow:
    """A rank and why it made others wait; times are means in a step, the waits in a step of any rank."""

    rank: int
    cause: str
    title: str
    caused_ns: int
    caused_step_ns: float
    share: float
    mfu_points: float | None
    own_step_ns: float  # the rank's own excess or pause over its peers
    evidence: str


@dataclass(frozen=True)
class PartRow:
    """A part of the straggler time: who lost it, or who caused it."""

    title: str
    ns: int
    share: float
    step_ns: float


@dataclass(frozen=True)
class Lateness:
    """How long others waited for each rank (rows) in each step (columns)."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    ns: tuple[tuple[int, ...], ...]

    @property
    def worst_first(self) -> list[int]:
        """The places of the ranks that anybody waited for, the longest wait first."""
        sums = [sum(row) for row in self.ns]
        return sorted((place for place, total in enumerate(sums) if total), key=lambda place: (-sums[place], place))


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
class LinkRow:
    """A group whose transfers of one kind and size took longer than those of its peers."""

    group: str
    kind: str
    bytes: int
    count: int
    ratio: float
    excess_ns: int
    text: str  # the comparison in a line


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


@dataclass(frozen=True)
class KernelRow:
    """All runs of one kernel; rates are of the runs whose work is known, and None without any.

    ``roof_share`` is the time that the roof which binds would take over the time taken, ``headroom`` what is above
    that time as a share of the step time.
    """

    name: str
    short_name: str
    family: str
    kind: str
    count: int
    ns: int
    flop_per_s: float | None
    byte_per_s: float | None
    roof_share: float | None
    bound: str
    headroom: float | None


@dataclass(frozen=True)
class Fact:
    """A named value and where it came from."""

    name: str
    value: str
    source: str = ""


@dataclass(frozen=True)
class QualityRow:
    """Something to know before trusting the numbers."""

    is_warning: bool
    text: str


def headline(result: Result) -> str:
    """Return the result in one sentence; whether it can be trusted comes first when it cannot."""
    job, level = result["job"], waterfall(result)[-1]
    number = main_number(result)
    if level.row != "mfu":
        number = f"MFU unknown, compute takes {percent(level.share)} of the step time"
    elif job.get("mixed_peak"):
        number += " of mixed peak"
    sentence = f"{number} on {_ranks_traced(job)}, {plural(len(job['steps']), 'step')}"
    if job.get("device_rows") == "cpu_operators":
        sentence += " (no GPU rows: CPU operators stand for the device)"
    bars = [row for row in waterfall(result) if not row.is_level]
    worst = [row for row in sorted(bars, key=lambda row: -row.share) if row.share >= NAMED_LOSS][:3]
    losses = [_loss(row, _main_culprit(result)) for row in worst]
    if losses:
        sentence += f": the largest {'losses are' if len(losses) > 1 else 'loss is'} {listed(losses)}"
    doubt = "" if is_reliable(result) else f"Attribution not reliable ({_doubt(result)}): "
    return f"{doubt}{sentence}."


def main_number(result: Result) -> str:
    """Return the MFU, or without one the share of compute, in two or three words."""
    level = waterfall(result)[-1]
    return f"{percent(level.share)} {'MFU' if level.row == 'mfu' else 'compute'}"


def is_reliable(result: Result) -> bool:
    """Return whether the attribution as a whole can be trusted."""
    return bool(result.get("quality", {}).get("reliable", True))


def waterfall(result: Result) -> list[WaterfallRow]:
    """Return the bars from 100 % down to MFU, or down to the compute time when there is no MFU."""
    job, by_bucket = result["job"], defaultdict(list)
    for leaf in leaves(result):
        by_bucket[leaf.bucket].append(leaf)
    step_ns = _mean_step_ns(result)
    has_mfu = job["mfu"] is not None
    level_buckets = {"mfu": "achieved", "compute": "sub_roofline"}
    titles = {"peak": "peak" if has_mfu else "step time", "mfu": "MFU", "compute": NOT_SPLIT}
    rows: list[WaterfallRow] = []
    steps = job["waterfall"]
    for index, step in enumerate(steps):
        name, share = step["row"], float(step["share"])
        is_level = index in (0, len(steps) - 1)
        bucket = level_buckets.get(name) if is_level else name
        start = 0.0 if is_level else rows[-1].end
        end = share if is_level else start + share
        title = titles.get(name) or bucket_words(name).title
        causes = tuple(by_bucket[bucket]) if bucket else ()
        rows.append(WaterfallRow(name, bucket, title, is_level, start, end, abs(share), abs(share) * step_ns, causes))
    return rows


def leaves(result: Result) -> list[LeafRow]:
    """Return the causes that are not zero and say more than their bucket does, by bucket, largest first."""
    windows = _window_count(result)
    order = list(BUCKETS)
    rows = [
        LeafRow(
            entry["bucket"],
            entry["leaf"],
            clean(leaf_title(entry["bucket"], entry["leaf"]), 40),
            entry["ns"],
            entry["share"],
            entry["ns"] / windows,
        )
        for entry in result["job"].get("leaves", [])
        if entry["ns"] and entry["leaf"] not in WHOLE_BUCKET_LEAVES
    ]
    return sorted(rows, key=lambda row: (order.index(row.bucket) if row.bucket in order else len(order), -row.ns))


def ranks(result: Result) -> list[RankRow]:
    """Return one row a rank, in the order of the result."""
    return [_rank(entry) for entry in result.get("ranks", [])]


def worst_ranks(result: Result, limit: int) -> list[RankRow]:
    """Return the ranks that lost the largest share of their time, at most ``limit``, worst first."""
    kept = kept_bucket(result)
    return sorted(ranks(result), key=lambda row: (row.shares.get(kept, 0.0), row.rank))[:limit]


def kept_bucket(result: Result) -> str:
    """Return the bucket that is no loss: what was achieved, or without an MFU the compute time."""
    return "achieved" if result["job"]["mfu"] is not None else "sub_roofline"


def rank_buckets(result: Result) -> list[str]:
    """Return the buckets in which any rank spent time, in the order of the waterfall."""
    found = {bucket for row in ranks(result) for bucket, share in row.shares.items() if share}
    return [bucket for bucket in BUCKETS if bucket in found] + sorted(found - BUCKETS.keys())


def bucket_title(result: Result, bucket: str, short: bool = False) -> str:
    """Return what a bucket is called in this result: without an MFU, sub-roofline is the whole compute time."""
    if bucket == "sub_roofline" and result["job"]["mfu"] is None:
        return "compute" if short else NOT_SPLIT
    return bucket_words(bucket).short if short else bucket_words(bucket).title


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
        )
        for entry in result.get("collectives", [])
    ]
    return sorted(rows, key=lambda row: -row.exposed_ns)


def culprits(result: Result) -> list[CulpritRow]:
    """Return who made others wait and why, the most expensive first."""
    windows, all_steps = _window_count(result), len(result["job"]["steps"])
    own_steps = {entry["rank"]: len(entry.get("steps", [])) for entry in result.get("ranks", [])}
    rows = []
    for entry in result.get("stragglers", []):
        steps = max(1, own_steps.get(entry["rank"]) or all_steps)
        rows.append(
            CulpritRow(
                entry["rank"],
                entry["cause"],
                clean(cause_title(entry["cause"]), 40),
                entry["caused_ns"],
                entry["caused_ns"] / windows,
                entry["share"],
                entry.get("mfu_points"),
                (entry.get("own_ns") or 0) / steps,
                sentences.evidence(entry, steps),
            )
        )
    return sorted(rows, key=lambda row: -row.caused_ns)


def where_lost(result: Result, limit: int) -> list[PartRow]:
    """Return the straggler time by the rank that lost it, largest first; the tiny and those beyond the limit in one."""
    lost = [(f"rank {entry['rank']}", entry["buckets"].get("straggler", 0)) for entry in result.get("ranks", [])]
    return _parts(result, lost, limit, "other rank")


def caused_by(result: Result, limit: int) -> list[PartRow]:
    """Return the same time by who caused it and how, largest first; the tiny and those beyond the limit in one row.

    What a slow GPU took longer itself is no wait of others: it has its own row, so that both views have one total.
    """
    caused = [(f"rank {row.rank}: {row.title}", row.caused_ns) for row in culprits(result)]
    return _parts(result, [*caused, ("slow GPUs: own excess", _slow_gpu_ns(result))], limit, "other cause")


def lateness(result: Result) -> Lateness:
    """Return how long others waited for each traced rank in each step, whoever caused it."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for entry in result.get("lateness", []):
        found[entry["rank"], entry["step"]] += entry["ns"]
    everyone = sorted({entry["rank"] for entry in result.get("ranks", [])} | {rank for rank, _ in found})
    steps = sorted(set(result["job"]["steps"]) | {step for _, step in found})
    ns = tuple(tuple(found.get((rank, step), 0) for step in steps) for rank in everyone)
    return Lateness(tuple(everyone), tuple(steps), ns)


def slow_links(result: Result) -> list[LinkRow]:
    """Return the slow links, the one that cost most first."""
    rows = [
        LinkRow(
            clean(entry["group"]),
            clean(entry["kind"]).replace("_", " "),
            entry["bytes"],
            entry["count"],
            entry["ratio"],
            entry["excess_ns"],
            sentences.link(entry),
        )
        for entry in result.get("slow_links", [])
    ]
    return sorted(rows, key=lambda row: -row.excess_ns)


@dataclass(frozen=True)
class PipelineRow:
    """A pipeline: its shape and theory as facts, and why its waits are not divided, if they are not."""

    facts: list[Fact]
    undivided: str
    works: list[Work]


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


def kernels(result: Result) -> list[KernelRow]:
    """Return the kernels, those with the most time first."""
    return sorted(map(_kernel, result.get("kernels", [])), key=lambda row: -row.ns)


def _kernel(entry: Mapping[str, Any]) -> KernelRow:
    known_ns = entry["ns"] * (entry.get("known_share") or 1.0)
    rates = [1e9 * entry[work] / known_ns if entry.get(work) and known_ns else None for work in ("flops", "bytes")]
    bound = clean(entry.get("bound") or "", 20)
    return KernelRow(
        name=clean(entry["name"], 1000),
        short_name=clean(entry.get("short_name") or entry["name"], 80),
        family=clean(family_title(str(entry.get("family") or ""))),
        kind=clean(entry.get("kind") or ""),
        count=entry["count"],
        ns=entry["ns"],
        flop_per_s=rates[0],
        byte_per_s=rates[1],
        roof_share=entry.get("roofline_share"),
        bound="" if bound == "unknown" else bound,
        headroom=entry.get("headroom"),
    )


def facts(result: Result) -> list[Fact]:
    """Return what was measured, for the head of a report."""
    job = result["job"]
    found = [Fact("GPU", clean(job["gpu"]))] if job.get("gpu") else []
    found.append(Fact("Traced", _ranks_traced(job)))
    if all(isinstance(step, int) for step in job["steps"]):
        found.append(Fact("Steps", clean(numbers(job["steps"]), 40)))
    if job.get("step_ns_median"):
        found.append(Fact("Median step", milliseconds(job["step_ns_median"], 1)))
    if job.get("hfu") is not None:
        found.append(Fact("HFU", percent(job["hfu"]), "recomputed FLOPs counted too"))
    overlap = _overlap(job)
    if overlap is not None:
        found.append(Fact("Overlap", percent(overlap), "of communication runs under compute"))
    clock = result.get("clock", {})
    if sentences.clock(clock, job["ranks_traced"]):
        value = _CLOCKS.get(clock["method"]) or sentences.clock_method(clock)
        p95 = f"collectives end within {duration(clock['residual_p95_ns'])} (p95)" if clock.get("evidence") else ""
        found.append(Fact("Clocks", value, p95))
    return found


def model(result: Result) -> list[Fact]:
    """Return how MFU was got: every factor and its source, or why there is none."""
    found, about = [], result.get("model", {})
    if about.get("reason"):
        found.append(Fact("compute is not split", clean(about["reason"])))
    if peak := about.get("peak"):
        value = f"{peak['tflops']:,g} TFLOP/s, {clean(peak['dtype'])}"
        found.append(Fact("peak", value, _joined(peak.get("gpu"), peak.get("source"))))
    numerator = about.get("numerator") or {}
    if numerator.get("flops_per_step"):
        value, formula = quantity(numerator["flops_per_step"], "FLOP"), numerator.get("formula")
        found.append(Fact("model FLOPs a step", _joined(value, formula, separator=" = "), _joined(numerator["source"])))
        attention = "included" if numerator.get("attention_flops") else "not included"
        found.append(Fact("attention FLOPs", attention))
    found.extend(
        Fact(clean(factor["name"]), _number(factor["value"]), _joined(factor.get("source")))
        for factor in numerator.get("factors", [])
    )
    declared, counted = about.get("declared_flops_per_step"), about.get("counted_flops_per_step")
    if declared and counted:
        both = f"{quantity(declared, 'FLOP')} and {quantity(counted, 'FLOP')} a step"
        found.append(Fact("declared and counted", both, f"declared is {100 * (declared / counted - 1):+.1f} %"))
    if result["job"].get("mixed_peak"):
        peaks = _mixed((about.get("peak") or {}).get("mixed") or {})
        found.append(Fact("MFU of mixed peak", "each kernel at the peak of its element type", peaks))
    return found


def _mixed(peaks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the peak of each element type of a mixed run, and the share that ran in it."""
    known = [(clean(name, 20), peak) for name, peak in peaks.items() if peak.get("tflops") and peak.get("share")]
    return ", ".join(f"{name} {peak['tflops']:,g} TFLOP/s ({percent(peak['share'])})" for name, peak in known)


def quality(result: Result) -> list[QualityRow]:
    """Return what was missing, dropped, repaired or guessed; warnings first."""
    texts = [QualityRow(True, clean(text, 500)) for text in _warnings(result)]
    return texts + [QualityRow(False, clean(text, 500)) for text in _notes(result)]


def _warnings(result: Result) -> Iterator[str]:
    about = result.get("quality", {})
    if not is_reliable(result):
        yield f"the attribution is not reliable: {_doubt(result)}"
    doubtful = [row.rank for row in ranks(result) if not row.reliable]
    if doubtful:
        yield f"not reliable on {plural(len(doubtful), 'rank')}: {numbers(doubtful)}"
    yield from about.get("warnings", [])
    for skipped in about.get("skipped_files", []):
        yield f"{skipped['file']} was skipped: {skipped['reason']}"
    if about.get("dropped_events"):
        yield f"{plural(about['dropped_events'], 'event')} dropped"
    if about.get("repaired_files"):
        yield f"damaged and repaired: {', '.join(map(str, about['repaired_files']))}"
    if apart := sentences.not_aligned(result.get("clock", {})):
        yield apart
    if not _clocks_compare(result) and (
        clock := sentences.clock(result.get("clock", {}), result["job"]["ranks_traced"])
    ):
        yield clock


def _notes(result: Result) -> Iterator[str]:
    about, job = result.get("quality", {}), result["job"]
    if about.get("missing"):
        yield f"not in the traces: {', '.join(map(str, about['missing']))}"
    if job["world_size"] > job["ranks_traced"]:
        yield f"{_ranks_traced(job)} traced: nothing here speaks for the others"
    left_out: dict[tuple[object, object], list[int | None]] = defaultdict(list)
    for entry in about.get("steps_left_out", []):
        left_out[entry["step"], entry["reason"]].append(entry.get("rank"))
    for (step, reason), on in left_out.items():
        known = [rank for rank in on if rank is not None]
        where = f" on {'rank' if len(known) == 1 else 'ranks'} {numbers(known)}" if known else ""
        yield f"step {step} left out{where}: {reason}"
    yield from about.get("notes", [])
    for reason, count in about.get("unmatched_communications", {}).items():
        yield f"{plural(count, 'communication')} not matched between ranks: {reason}"
    if _clocks_compare(result) and (clock := sentences.clock(result.get("clock", {}), job["ranks_traced"])):
        yield clock


def _doubt(result: Result) -> str:
    share = result.get("quality", {}).get("unattributed_share") or 0.0
    return f"{percent(share)} of the time is unattributed" if share >= NAMED_LOSS else "see the warnings"


def _clocks_compare(result: Result) -> bool:
    return str(result.get("clock", {}).get("method", "none")) != "none"


def _main_culprit(result: Result) -> CulpritRow | None:
    """Return the culprit that makes up most of the stragglers, if one does."""
    found = culprits(result)
    lost = result["job"]["buckets"].get("straggler", 0)
    if not found or lost < NAMED_STRAGGLERS * result["job"]["window_ns"]:
        return None
    # The own excess of slow GPUs belongs to the slow GPU, and speaks against any other culprit.
    whole = lost - (_slow_gpu_ns(result) if found[0].cause == "slow_gpu" else 0)
    return found[0] if 2 * found[0].caused_ns >= whole else None


def _slow_gpu_ns(result: Result) -> int:
    leaves = result["job"].get("leaves", [])
    return sum(entry["ns"] for entry in leaves if (entry["bucket"], entry["leaf"]) == ("straggler", "slow_gpu"))


def _parts(result: Result, parts: Sequence[tuple[str, int]], limit: int, noun: str) -> list[PartRow]:
    window, windows = max(1, result["job"]["window_ns"]), _window_count(result)
    ordered = sorted(((title, ns) for title, ns in parts if ns), key=lambda part: -part[1])
    shown = sum(ns >= LEAST_PART * ordered[0][1] for _, ns in ordered)
    shown = shown if shown <= limit else limit - 1
    if rest := ordered[shown:]:
        ordered = [*ordered[:shown], (plural(len(rest), noun), sum(ns for _, ns in rest))]
    return [PartRow(title, ns, ns / window, ns / windows) for title, ns in ordered]


def _loss(row: WaterfallRow, culprit: CulpritRow | None) -> str:
    if row.bucket == "straggler" and culprit:
        return f"{row.title} ({percent(row.share)}, mostly rank {culprit.rank}: {culprit.title})"
    first = row.leaves[0] if row.leaves else None
    mostly = f", mostly {first.title}" if first and len(row.leaves) > 1 and first.share >= row.share / 2 else ""
    return f"{row.title} ({percent(row.share)}{mostly})"


def _rank(entry: Mapping[str, Any]) -> RankRow:
    window = entry["window_ns"]
    return RankRow(
        entry["rank"],
        entry.get("stage"),
        clean(entry.get("host") or ""),
        clean(entry.get("file") or ""),
        entry.get("reliable", True),
        window / max(1, len(entry.get("steps", []))),
        {bucket: ns / window if window else 0.0 for bucket, ns in entry["buckets"].items()},
        _overlap(entry),
        entry.get("clock_offset_ns") or 0,
    )


def _ranks_traced(job: Mapping[str, Any]) -> str:
    traced, world = job["ranks_traced"], job["world_size"]
    return f"{traced:,} of {plural(world, 'rank')}" if world >= traced else plural(traced, "rank")


def _window_count(result: Result) -> int:
    windows = sum(len(entry.get("steps", [])) for entry in result.get("ranks", []))
    return windows or max(1, result["job"]["ranks_traced"] * len(result["job"]["steps"]))


def _mean_step_ns(result: Result) -> float:
    return float(result["job"]["window_ns"] / _window_count(result))


def _overlap(entry: Mapping[str, Any]) -> float | None:
    total, hidden = entry.get("comm_ns"), entry.get("overlapped_comm_ns")
    return hidden / total if total and hidden is not None else None


def _joined(*parts: object, separator: str = "; ") -> str:
    return separator.join(clean(part) for part in parts if part)


def _number(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,g}"
    return clean(value)
