"""From the ranks' accounts of their host gaps to the job's: which calls cost most, and how the GPUs were fed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.idle.table import GAP_COLUMNS
from traceaudit.leaves import Leaf

SHOWN = 40  # rows of host gaps in the result


def gap_table(accounts: Sequence[RankAccount]) -> pd.DataFrame:
    """Return the largest idle gaps of each rank: ``rank``, `GAP_COLUMNS` and ``ns``; times by the rank's own clock."""
    frames = [own.gaps.assign(rank=own.rank) for own in accounts if own.steps is not None and len(own.gaps)]
    if not frames:
        return pd.DataFrame(columns=["rank", *GAP_COLUMNS, "ns"])
    table = pd.concat(frames, ignore_index=True)
    table = table.assign(leaf=[Leaf(int(leaf)).label for leaf in table["leaf"]], ns=table["end_ns"] - table["start_ns"])
    return table[["rank", *GAP_COLUMNS, "ns"]]


def host_gaps(accounts: Sequence[RankAccount]) -> list[dict[str, Any]]:
    """Return idle time by leaf and call, the most first; ``rank`` and ``inside`` are those with most of it."""
    frames = [own.host_gaps.assign(rank=own.rank) for own in accounts if own.steps is not None and len(own.host_gaps)]
    if not frames:
        return []
    table = pd.concat(frames, ignore_index=True)
    most = table.sort_values(["ns", "rank"], ascending=[False, True], kind="stable").drop_duplicates(["leaf", "call"])
    sums = table.groupby(["leaf", "call"], as_index=False).agg(
        total=("ns", "sum"), count=("count", "sum"), longest_ns=("longest_ns", "max"), ranks=("rank", "nunique")
    )
    sums = sums.merge(most[["leaf", "call", "rank", "inside"]], on=["leaf", "call"])
    sums = sums.sort_values(["total", "leaf", "call"], ascending=[False, True, True], kind="stable").head(SHOWN)
    columns = ("leaf", "call", "inside", "total", "count", "longest_ns", "rank", "ranks")
    return [
        {
            "leaf": Leaf(int(leaf)).label,
            "call": str(call),
            "inside": str(inside),
            "ns": int(ns),
            "count": int(count),
            "longest_ns": int(longest),
            "rank": int(rank),
            "ranks": int(ranks),
        }
        for leaf, call, inside, ns, count, longest, rank, ranks in sums[list(columns)].itertuples(index=False)
    ]


# Figures of the job from those of its ranks; the others of `launches.throughput` stand by rank alone.
OVER_RANKS = (
    "kernels_per_step",
    "kernels_per_ms",
    "kernel_ns_median",
    "launch_interval_ns_median",
    "queue_depth_mean",
    "queue_empty_share",
)


def throughput(accounts: Sequence[RankAccount]) -> dict[str, Any]:
    """Return how the GPUs were fed: medians over the ranks (the deepest queue is the maximum), and each rank's own."""
    known = [own for own in accounts if own.steps is not None]
    if not known:
        return {}
    figures = [own.throughput for own in known]
    deepest = [found["queue_depth_max"] for found in figures if found["queue_depth_max"] is not None]
    return {
        **{name: _median([found[name] for found in figures]) for name in OVER_RANKS},
        "queue_depth_max": max(deepest, default=None),
        "launch_delay_ns": {
            share: _median([found["launch_delay_ns"][share] for found in figures]) for share in ("p50", "p90", "p99")
        },
        "ranks": [{"rank": own.rank, **own.throughput} for own in known],
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def facts(accounts: Sequence[RankAccount], tokens_per_step: float | None) -> dict[str, Any]:
    """Return the facts behind the host gaps, summed over the ranks; shares and medians are over ranks."""
    known = [own for own in accounts if own.steps is not None]
    merged: dict[str, Any] = {}
    for own in known:
        merged = _merged(merged, own.host_facts)
    if known and tokens_per_step is not None:
        merged["launch_bound"]["tokens_per_step"] = tokens_per_step
    return merged


MEANS = ("per_step", "kernels_per_step", "unused_share_at_peak")
PEAKS = ("reserved_peak_bytes", "allocated_peak_bytes")


def _merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Add up counts; of shares, averages and peaks the larger stays; words are listed once."""
    result = dict(left)
    for name, value in right.items():
        before = result.get(name)
        if before is None:
            result[name] = dict(value) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping):
            result[name] = _merged(before, value)
        elif value is None:
            continue
        elif isinstance(value, bool):
            result[name] = before or value
        elif isinstance(value, str):
            words = [word for word in (*str(before).split(", "), value) if word]
            result[name] = ", ".join(dict.fromkeys(words))
        else:
            result[name] = max(before, value) if name in (*MEANS, *PEAKS) else before + value
    return result


def profiler_overhead(
    accounts: Sequence[RankAccount], step_ns_median: int, step_seconds: float | None, source: str
) -> dict[str, Any]:
    """Return what profiling cost: its own rows in gaps, and the step against the declared one without a profiler.

    ``difference_ns`` is of one step; None where no step time without the profiler is declared.
    """
    known = [own for own in accounts if own.steps is not None]
    own = [account.host_facts["profiler"] for account in known]
    declared = None if step_seconds is None else round(step_seconds * 1e9)
    return {
        "with_stack": any(account.origin.with_stack for account in known),
        "record_shapes": any(account.origin.record_shapes for account in known),
        "overhead_in_gaps_ns": sum(found["overhead_in_gaps_ns"] for found in own),
        "final_sync_ns": max((found["final_sync_ns"] for found in own), default=0),
        "measured_step_ns": step_ns_median,
        "declared_step_ns": declared,
        "difference_ns": None if declared is None else step_ns_median - declared,
        "source": source if declared is not None else None,
    }
