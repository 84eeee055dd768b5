"""The ranks of a result as rows: where the time of each goes, and how long others waited for it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.report.formats import clean
from traceaudit.report.rows import Result, kept_bucket
from traceaudit.report.words import BUCKETS


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


def ranks(result: Result) -> list[RankRow]:
    """Return one row a rank, in the order of the result."""
    return [_rank(entry) for entry in result.get("ranks", [])]


def worst_ranks(result: Result, limit: int) -> list[RankRow]:
    """Return the ranks that lost the largest share of their time, at most ``limit``, worst first."""
    kept = kept_bucket(result)
    return sorted(ranks(result), key=lambda row: (row.shares.get(kept, 0.0), row.rank))[:limit]


def rank_buckets(result: Result) -> list[str]:
    """Return the buckets in which any rank spent time, in the order of the waterfall."""
    found = {bucket for row in ranks(result) for bucket, share in row.shares.items() if share}
    return [bucket for bucket in BUCKETS if bucket in found] + sorted(found - BUCKETS.keys())


def lateness(result: Result) -> Lateness:
    """Return how long others waited for each traced rank in each step, whoever caused it."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for entry in result.get("lateness", []):
        found[entry["rank"], entry["step"]] += entry["ns"]
    everyone = sorted({entry["rank"] for entry in result.get("ranks", [])} | {rank for rank, _ in found})
    steps = sorted(set(result["job"]["steps"]) | {step for _, step in found})
    ns = tuple(tuple(found.get((rank, step), 0) for step in steps) for rank in everyone)
    return Lateness(tuple(everyone), tuple(steps), ns)


def hidden_share(entry: Mapping[str, Any]) -> float | None:
    """Return how much of the communication of a rank, or of the job, runs under compute; None without any."""
    total, hidden = entry.get("comm_ns"), entry.get("overlapped_comm_ns")
    return hidden / total if total and hidden is not None else None


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
        hidden_share(entry),
        entry.get("clock_offset_ns") or 0,
    )
