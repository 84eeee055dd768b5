"""What to know before trusting a result: what was missing, dropped, repaired or guessed."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from traceaudit.report import sentences
from traceaudit.report.by_rank import ranks
from traceaudit.report.formats import clean, numbers, plural
from traceaudit.report.headline import doubt
from traceaudit.report.rows import Result, is_reliable, ranks_traced


@dataclass(frozen=True)
class QualityRow:
    """Something to know before trusting the numbers."""

    is_warning: bool
    text: str


def quality(result: Result) -> list[QualityRow]:
    """Return what was missing, dropped, repaired or guessed; warnings first."""
    texts = [QualityRow(True, clean(text, 500)) for text in _warnings(result)]
    return texts + [QualityRow(False, clean(text, 500)) for text in _notes(result)]


def _warnings(result: Result) -> Iterator[str]:
    about = result.get("quality", {})
    if not is_reliable(result):
        yield f"the attribution is not reliable: {doubt(result)}"
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
    if log := result.get("log"):
        yield f"{log['format']} {PurePath(log['file']).name}: {log['text']}"
    if about.get("missing"):
        yield f"not in the traces: {', '.join(map(str, about['missing']))}"
    if job["world_size"] > job["ranks_traced"]:
        yield f"{ranks_traced(job)} traced: nothing here speaks for the others"
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


def _clocks_compare(result: Result) -> bool:
    return str(result.get("clock", {}).get("method", "none")) != "none"
