"""From the result to the rows that every report draws: pure functions, no layout and no markup."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from traceaudit.report.formats import clean, listed, milliseconds, numbers, percent, plural, quantity
from traceaudit.report.words import BUCKETS, NOT_SPLIT, WHOLE_BUCKET_LEAVES, bucket_words, leaf_title

Result: TypeAlias = Mapping[str, Any]

NAMED_LOSS = 0.01  # the headline names up to three losses, and none smaller than this


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


@dataclass(frozen=True)
class KernelRow:
    """All runs of one kernel; ``flop_per_s`` where its FLOPs are known."""

    name: str
    family: str
    kind: str
    count: int
    ns: int
    flop_per_s: float | None


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
    sentence = f"{number} on {_ranks_traced(job)}, {plural(len(job['steps']), 'step')}"
    bars = [row for row in waterfall(result) if not row.is_level]
    worst = [row for row in sorted(bars, key=lambda row: -row.share) if row.share >= NAMED_LOSS][:3]
    losses = [_loss(row) for row in worst]
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
            clean(entry["group"]),
            clean(entry.get("dim") or ""),
            clean(entry["kind"]).replace("_", " "),
            *(int(entry.get(name) or 0) for name in ("count", "bytes", "transfer_ns", "wait_ns", "exposed_ns")),
        )
        for entry in result.get("collectives", [])
    ]
    return sorted(rows, key=lambda row: -row.exposed_ns)


def kernels(result: Result) -> list[KernelRow]:
    """Return the kernels, those with the most time first."""
    rows = []
    for entry in result.get("kernels", []):
        flops, ns = entry.get("flops"), entry["ns"]
        flop_per_s = flops / ns * 1e9 if flops and ns else None
        family, kind = clean(entry.get("family") or ""), clean(entry.get("kind") or "")
        rows.append(KernelRow(clean(entry["name"]), family, kind, entry["count"], ns, flop_per_s))
    return sorted(rows, key=lambda row: -row.ns)


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
    return found


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
    if note := result.get("clock", {}).get("note"):
        yield f"clocks: {note}"


def _doubt(result: Result) -> str:
    share = result.get("quality", {}).get("unattributed_share") or 0.0
    return f"{percent(share)} of the time is unattributed" if share >= NAMED_LOSS else "see the warnings"


def _loss(row: WaterfallRow) -> str:
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
