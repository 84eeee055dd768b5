"""The waterfall of a result as rows, and what every other table needs: pure functions, no layout and no markup."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from traceaudit.report.formats import clean, plural
from traceaudit.report.words import BUCKETS, NOT_SPLIT, WHOLE_BUCKET_LEAVES, bucket_words, leaf_title

Result: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Fact:
    """A named value and where it came from."""

    name: str
    value: str
    source: str = ""


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
    """One bar: a level stands on zero (100 %, and what is left); a loss hangs from the end of the bar before it.

    `ceiling` is what MFU would be if the row vanished, None for levels and without an MFU; ceilings are not added up.
    """

    row: str
    bucket: str | None  # None for the bar of 100 %
    title: str
    is_level: bool
    start: float
    end: float
    share: float  # size, never negative
    step_ns: float
    leaves: tuple[LeafRow, ...]
    ns: int
    ceiling: float | None


def is_reliable(result: Result) -> bool:
    """Return whether the attribution as a whole can be trusted."""
    return bool(result.get("quality", {}).get("reliable", True))


def waterfall(result: Result) -> list[WaterfallRow]:
    """Return the bars from 100 % down to MFU, or down to the compute time when there is no MFU."""
    job, by_bucket = result["job"], defaultdict(list)
    for leaf in leaves(result):
        by_bucket[leaf.bucket].append(leaf)
    step_ns = mean_step_ns(result)
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
        ns = job["buckets"].get(bucket, 0) if bucket else job["window_ns"]
        ceiling = None if is_level or not has_mfu or not -1 < share < 0 else job["mfu"] / (1 + share)
        rows.append(
            WaterfallRow(
                name, bucket, title, is_level, start, end, abs(share), abs(share) * step_ns, causes, ns, ceiling
            )
        )
    return rows


def leaves(result: Result) -> list[LeafRow]:
    """Return the causes that are not zero and say more than their bucket does, by bucket, largest first."""
    windows = window_count(result)
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


def bucket_title(result: Result, bucket: str, short: bool = False) -> str:
    """Return what a bucket is called in this result: without an MFU, sub-roofline is the whole compute time."""
    if bucket == "sub_roofline" and result["job"]["mfu"] is None:
        return "compute" if short else NOT_SPLIT
    return bucket_words(bucket).short if short else bucket_words(bucket).title


def kept_bucket(result: Result) -> str:
    """Return the bucket that is no loss: what was achieved, or without an MFU the compute time."""
    return "achieved" if result["job"]["mfu"] is not None else "sub_roofline"


def ranks_traced(job: Mapping[str, Any]) -> str:
    """Return how many ranks of how many have a trace."""
    traced, world = job["ranks_traced"], job["world_size"]
    return f"{traced:,} of {plural(world, 'rank')}" if world >= traced else plural(traced, "rank")


def window_count(result: Result) -> int:
    """Return the number of steps of ranks that are added up."""
    windows = sum(len(entry.get("steps", [])) for entry in result.get("ranks", []))
    return windows or max(1, result["job"]["ranks_traced"] * len(result["job"]["steps"]))


def mean_step_ns(result: Result) -> float:
    """Return the mean length of a step of a rank."""
    return float(result["job"]["window_ns"] / window_count(result))
