"""What to do about a result as rows: findings, the ten checks, the walk-through and what to record next.

The result has them as other modules decided them; a result of an earlier version has none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.report.formats import clean, duration
from traceaudit.report.rows import Result, window_count

CONFIDENCES = {
    "measured": "The time was measured in the traces.",
    "estimated": "The time follows from measurements by a model; it may be off.",
    "suspected": "The traces hint at it; how much time it costs is not known for certain.",
}
GLANCE, SHORTEST = 150, 25  # characters
STATUSES = {"ok": ("✓", "ok"), "problem": ("!", "problem"), "unknown": ("?", "unknown")}


@dataclass(frozen=True)
class EvidenceRow:
    """Where in the traces a finding can be seen; times are of the file's own clock."""

    text: str
    name: str
    rank: int | None
    step: int | None
    file: str
    track: str
    start_ns: int | None
    end_ns: int | None

    @property
    def length(self) -> str:
        """The length of the time range; empty without one."""
        known = self.start_ns is not None and self.end_ns is not None
        return duration(self.end_ns - self.start_ns) if known else ""  # type: ignore[operator]


@dataclass(frozen=True)
class FindingRow:
    """A reason for lost time: what it costs, how sure that is, where to see it, what to do, how to check."""

    anchor: str
    title: str
    bucket: str | None
    share: float
    ns: int
    step_ns: float
    mfu_points: float | None
    ceiling_mfu: float | None
    confidence: str
    summary: str
    action: str
    verify: str
    evidence: tuple[EvidenceRow, ...]

    @property
    def first_step(self) -> str:
        """The beginning of the action, or of the summary where there is none: as much as a glance takes in."""
        text = self.action or self.summary
        if len(text) <= GLANCE:
            return text
        ends = [found.start() for found in re.finditer(r"[.;] ", text[:GLANCE])]
        whole = [end for end in ends if end >= SHORTEST and text.count("(", 0, end) == text.count(")", 0, end)]
        return f"{text[: whole[-1]]}." if whole else clean(text, GLANCE)


@dataclass(frozen=True)
class CheckRow:
    """One of the ten checks, or a step of the walk-through."""

    number: int
    title: str
    status: str  # of `STATUSES`
    text: str
    record_next: str


@dataclass(frozen=True)
class RecordNext:
    """What the next recording should hold, and how to record it."""

    text: str
    snippet: str


def findings(result: Result) -> list[FindingRow]:
    """Return the findings, largest first; those that explain no time stand at the end, in their order."""
    windows, window = window_count(result), max(1, result["job"]["window_ns"])
    rows = [
        FindingRow(
            anchor=f"finding-{number}-{re.sub('[^a-z0-9]+', '-', str(entry.get('id', '')).lower())[:60].strip('-')}",
            title=_capital(clean(entry.get("title") or entry.get("id") or "finding", 160)),
            bucket=entry.get("bucket"),
            share=entry["share"] if entry.get("share") is not None else (entry.get("ns") or 0) / window,
            ns=entry.get("ns") or 0,
            step_ns=(entry.get("ns") or 0) / windows,
            mfu_points=entry.get("mfu_points"),
            ceiling_mfu=entry.get("ceiling_mfu"),
            confidence=clean(entry.get("confidence") or "suspected", 20),
            summary=clean(entry.get("summary") or "", 800),
            action=clean(entry.get("action") or "", 800),
            verify=clean(entry.get("verify") or "", 800),
            evidence=tuple(map(_evidence, entry.get("evidence") or [])),
        )
        for number, entry in enumerate(result.get("findings") or [], 1)
    ]
    return sorted(rows, key=lambda row: -row.ns)


def checklist(result: Result) -> list[CheckRow]:
    """Return the checks to make before a number is trusted."""
    return [_check(entry, "item", "evidence") for entry in result.get("checklist") or []]


def walk_through(result: Result) -> list[CheckRow]:
    """Return what an expert who reads the traces would say, step by step."""
    return [_check(entry, "step", "text") for entry in result.get("walk_through") or []]


def record_next(result: Result) -> RecordNext | None:
    """Return what to record next; None where nothing is missing."""
    found = result.get("record_next") or {}
    text, snippet = clean(found.get("text") or "", 1200), _code(found.get("snippet") or "")
    return RecordNext(text, snippet) if text or snippet else None


def _evidence(entry: Mapping[str, Any]) -> EvidenceRow:
    return EvidenceRow(
        text=clean(entry.get("text") or "", 400),
        name=clean(entry.get("name") or "", 300),
        rank=entry.get("rank"),
        step=entry.get("step"),
        file=clean(entry.get("file") or ""),
        track=clean(entry.get("track") or "", 60),
        start_ns=entry.get("start_ns"),
        end_ns=entry.get("end_ns"),
    )


def _check(entry: Mapping[str, Any], number: str, text: str) -> CheckRow:
    status = entry.get("status")
    return CheckRow(
        entry.get(number) or 0,
        clean(entry.get("title") or "", 160),
        str(status) if status in STATUSES else "unknown",
        clean(entry.get(text) or "", 800),
        clean(entry.get("record_next") or "", 400),
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(text: object) -> str:
    """Return lines of code without control characters."""
    return "\n".join(clean(line.replace("\t", "    "), 200) for line in str(text).split("\n")[:80]).strip("\n")
