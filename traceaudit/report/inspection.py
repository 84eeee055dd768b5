"""What traces hold and lack, as text."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

WIDTH = 110
FILES = 64  # shown one by one
HEADS = {
    "blocks": "Missing, and nothing can be attributed without it",
    "weakens": "Missing, which costs certainty",
    "note": "To know",
}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of an inspection."""
    files, world = result["files"], result["world_size"]
    of = f" of {world:,}" if world is not None else ""
    verdict = "can be attributed" if result["usable"] else "cannot be attributed as they are"
    yield f"{len(files):,} traces, {result['ranks_traced']:,}{of} ranks: {verdict}."
    if files:
        yield ""
        yield from _table(files)
    for file in result["skipped"]:
        yield f"no trace: {file['file']}: {file['reason']}"
    for level, head in HEADS.items():
        lacks = [lack for lack in result["lacks"] if lack["level"] == level]
        if lacks:
            yield ""
            yield head
        for lack in lacks:
            yield from _lack(lack, len(files))


def _table(files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    head = ("file", "rank", "steps", "kernels", "launched", "shapes", "comm", "args", "stacks", "memory", "sync")
    rows = [head, *(_row(own) for own in files[:FILES])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        first, *rest = (
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((first, *rest)).rstrip()
    if len(files) > FILES:
        yield f"… {len(files) - FILES:,} more"


def _row(own: Mapping[str, Any]) -> tuple[str, ...]:
    name = str(own["file"])
    return (
        name if len(name) <= 48 else f"{name[:22]}…{name[-25:]}",
        "?" if own["rank"] is None else str(own["rank"]),
        str(len(own["steps"])) if own["steps"] else "none",
        f"{own['kernels']:,}",
        _share(own["linked"], own["gpu_rows"]),
        _share(own["shaped"], own["operators"]),
        f"{own['communications']:,}",
        _share(own["described"], own["communications"]),
        *("yes" if own[name] else "no" for name in ("stacks", "memory", "syncs")),
    )


def _share(part: int, whole: int) -> str:
    """Return a share in whole percent, never 100 % of less than all.

    >>> _share(999, 1000), _share(0, 0)
    ('99 %', '-')
    """
    return f"{100 * part // whole} %" if whole else "-"


def _lack(lack: Mapping[str, Any], files: int) -> Iterator[str]:
    some = 0 < lack["files"] < files
    where = f" ({lack['files']:,} of {files:,} files{_ranks(lack['ranks'])})" if some else ""
    yield from wrap(f"{lack['what']}{where}", WIDTH, initial_indent="  - ", subsequent_indent="    ")
    yield from wrap(f"costs: {lack['cost']}", WIDTH, initial_indent="      ", subsequent_indent="      ")
    yield from wrap(f"to do: {lack['change']}", WIDTH, initial_indent="      ", subsequent_indent="      ")


def _ranks(ranks: Sequence[int]) -> str:
    return f": ranks {', '.join(map(str, ranks))}{', …' if len(ranks) == 16 else ''}" if ranks else ""
