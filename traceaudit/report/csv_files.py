"""The tables of a result as CSV: one file a table, raw numbers, the unit in the name of the column."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from traceaudit.report.formats import clean
from traceaudit.report.rows import Result, waterfall
from traceaudit.report.words import leaf_title

Entry: TypeAlias = Mapping[str, Any]

_BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_files(result: Result) -> dict[str, bytes]:
    """Return the content of each file by its name; a table that is empty has its header alone.

    Times are ns, shares are of one, missing values are empty. Text from traces that a spreadsheet would take for a
    formula begins with an apostrophe.
    """
    return {f"{name}.csv": _written(header, make(result)) for name, (header, make) in TABLES.items()}


def _waterfall(result: Result) -> Iterable[Sequence[object]]:
    for row in waterfall(result):
        yield row.row, row.title, -row.share if not row.is_level else row.share, row.ns, row.step_ns, row.ceiling


def _leaves(result: Result) -> Iterable[Sequence[object]]:
    for leaf in result["job"].get("leaves", []):
        title = leaf_title(leaf["bucket"], leaf["leaf"])
        yield leaf["bucket"], leaf["leaf"], title, leaf["ns"], leaf["share"]


def _ranks(result: Result) -> Iterable[Sequence[object]]:
    """Yield a row for each bucket of each step of each rank; where single steps are left out, for all steps in one."""
    for rank in result.get("ranks", []):
        about = rank["rank"], rank.get("host"), rank.get("stage"), rank.get("file")
        whole = [{"step": None, "window_ns": rank["window_ns"], "buckets": rank["buckets"]}]
        for step in rank.get("steps") or whole:
            for bucket, ns in step["buckets"].items():
                yield *about, step["step"], bucket, ns, step["window_ns"]


def _plain(key: str, *names: str) -> Callable[[Result], Iterable[Sequence[object]]]:
    """Return what makes the rows of a list in the result."""
    return lambda result: ([entry.get(name) for name in names] for entry in result.get(key) or [])


def _findings(result: Result) -> Iterable[Sequence[object]]:
    names = ("id", "title", "bucket", "leaf", "ns", "share", "mfu_points", "ceiling_mfu", "confidence")
    for entry in result.get("findings") or []:
        texts = [str(part.get("text") or "") for part in entry.get("evidence") or []]
        yield (
            *(entry.get(name) for name in names),
            *(entry.get(name) for name in ("summary", "action", "verify")),
            "; ".join(texts),
        )


TABLES: Mapping[str, tuple[Sequence[str], Callable[[Result], Iterable[Sequence[object]]]]] = {
    "waterfall": (("row", "title", "share", "ns", "mean_step_ns", "mfu_without_it"), _waterfall),
    "leaves": (("bucket", "leaf", "title", "ns", "share"), _leaves),
    "ranks": (("rank", "host", "stage", "file", "step", "bucket", "ns", "window_ns"), _ranks),
    "kernels": (
        ("name", "family", "count", "ns", "flops", "bytes", "known_share", "roofline_share", "bound", "headroom_share"),
        _plain(
            "kernels",
            *("name", "family", "count", "ns", "flops", "bytes", "known_share", "roofline_share", "bound", "headroom"),
        ),
    ),
    "collectives": (
        ("group", "dim", "kind", "count", "bytes", "transfer_ns", "wait_ns", "exposed_ns", "busbw_gb_per_s"),
        _plain(
            "collectives",
            *("group", "dim", "kind", "count", "bytes", "transfer_ns", "wait_ns", "exposed_ns", "busbw_gbps"),
        ),
    ),
    "stragglers": (
        ("rank", "cause", "caused_ns", "own_ns", "share", "mfu_points"),
        _plain("stragglers", "rank", "cause", "caused_ns", "own_ns", "share", "mfu_points"),
    ),
    "findings": (
        (
            *("id", "title", "bucket", "leaf", "ns", "share", "mfu_points", "ceiling_mfu", "confidence"),
            *("summary", "action", "verify", "evidence"),
        ),
        _findings,
    ),
    "gaps": (
        ("leaf", "call", "inside", "ns", "count", "longest_ns", "rank", "ranks"),
        _plain("host_gaps", "leaf", "call", "inside", "ns", "count", "longest_ns", "rank", "ranks"),
    ),
}


def _written(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return buffer.getvalue().encode()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = clean(value.encode("utf-8", "replace").decode(), 2000)
    return f"'{text}" if text.startswith(_BEGINS_A_FORMULA) else text
