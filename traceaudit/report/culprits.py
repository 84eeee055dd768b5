"""Who made others wait, and why, as rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from traceaudit.report import sentences
from traceaudit.report.formats import clean, plural
from traceaudit.report.rows import Result, window_count
from traceaudit.report.words import cause_title

LEAST_PART = 0.005  # of the largest part: smaller ones share a row
NAMED_STRAGGLERS = 0.02  # stragglers from this share on are named by their culprit, if it caused half of the waits


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
class LinkRow:
    """A group whose transfers of one kind and size took longer than those of its peers."""

    group: str
    kind: str
    bytes: int
    count: int
    ratio: float
    excess_ns: int
    text: str  # the comparison in a line


def culprits(result: Result) -> list[CulpritRow]:
    """Return who made others wait and why, the most expensive first."""
    windows, all_steps = window_count(result), len(result["job"]["steps"])
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


def main_culprit(result: Result) -> CulpritRow | None:
    """Return the culprit that makes up most of the stragglers, if one does."""
    found = culprits(result)
    lost = result["job"]["buckets"].get("straggler", 0)
    if not found or lost < NAMED_STRAGGLERS * result["job"]["window_ns"]:
        return None
    # The own excess of slow GPUs belongs to the slow GPU, and speaks against any other culprit.
    whole = lost - (_slow_gpu_ns(result) if found[0].cause == "slow_gpu" else 0)
    return found[0] if 2 * found[0].caused_ns >= whole else None


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


def _slow_gpu_ns(result: Result) -> int:
    leaves = result["job"].get("leaves", [])
    return sum(entry["ns"] for entry in leaves if (entry["bucket"], entry["leaf"]) == ("straggler", "slow_gpu"))


def _parts(result: Result, parts: Sequence[tuple[str, int]], limit: int, noun: str) -> list[PartRow]:
    window, windows = max(1, result["job"]["window_ns"]), window_count(result)
    ordered = sorted(((title, ns) for title, ns in parts if ns), key=lambda part: -part[1])
    shown = sum(ns >= LEAST_PART * ordered[0][1] for _, ns in ordered)
    shown = shown if shown <= limit else limit - 1
    if rest := ordered[shown:]:
        ordered = [*ordered[:shown], (plural(len(rest), noun), sum(ns for _, ns in rest))]
    return [PartRow(title, ns, ns / window, ns / windows) for title, ns in ordered]
