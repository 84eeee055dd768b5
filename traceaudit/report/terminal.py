"""The report as text: plain when piped, coloured on a terminal, never wider than the console."""

from collections.abc import Container, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from traceaudit.report import behind, rows
from traceaudit.report.formats import clean, milliseconds, percent, plural
from traceaudit.report.words import bucket_words

LEAST_CAUSE = 0.005  # smaller leaves and culprits are left to the other reports
MOST_LEAVES = 3  # of a bucket
MOST_RANKS, WORST_RANKS = 16, 8
MOST_CULPRITS, MOST_LINKS = 5, 3
MOST_REMARKS = 12
MOST_BEHIND = 4  # lines of what stands behind host gaps, recompute and kernels
_SAID_ELSEWHERE = ("Traced", "Clocks")  # in the headline and among the remarks
_SHORTEST_BAR, _LONGEST_BAR = 10, 48  # cells; where there is less room there are no bars
_IN_ASCII = str.maketrans({"·": "*", "…": "~", "µ": "u", "\u00d7": "x", "\u2212": "-", "\u2013": "-"})


def print_report(result: rows.Result, console: Console) -> None:
    """Print the report on a console; file and kernel names in it are text, whatever markup they hold."""
    parts = [
        _head(result),
        _waterfall(result, console),
        _ranks(result),
        _culprits(result, console),
        _behind(result, console),
        _model(result),
        _quality(result),
    ]
    for number, part in enumerate(part for part in parts if part):
        for line in part if number == 0 else [Text(""), *part]:
            for fitting in _wrapped(_encodable(line, console.encoding), console):
                console.print(fitting, highlight=False, no_wrap=True, overflow="crop")


def bar(start: float, end: float, cells: int, ascii_only: bool = False) -> str:
    """Draw the stretch between two shares of one in half cells; what is not zero is visible.

    >>> bar(0.5, 1.0, 8), bar(0.0, 0.0625, 8), bar(0.9, 0.5, 8, ascii_only=True)
    ('    ████', '▌       ', '    ### ')
    """
    low, high = (min(max(edge, 0.0), 1.0) * 2 * cells for edge in sorted((start, end)))
    first, last = round(low), round(high)
    if end != start and first == last:
        first = min(first, 2 * cells - 1)
        last = first + 1
    halves = ["#" if first <= half < last else " " for half in range(2 * cells)]
    drawn = {"##": "█", "# ": "▌", " #": "▐", "  ": " "}
    in_ascii = {"##": "#", "# ": "#" if last - first == 1 else " ", " #": "#", "  ": " "}
    pairs = ["".join(halves[half : half + 2]) for half in range(0, 2 * cells, 2)]
    return "".join((in_ascii if ascii_only else drawn)[pair] for pair in pairs)


def _head(result: rows.Result) -> list[Text]:
    facts = " | ".join(f"{fact.name}: {fact.value}" for fact in rows.facts(result) if fact.name not in _SAID_ELSEWHERE)
    return [Text(rows.headline(result), "bold" if rows.is_reliable(result) else "bold red"), Text(facts, "dim")]


def _waterfall(result: rows.Result, console: Console) -> list[Text]:
    bars = rows.waterfall(result)
    shown = {row.row: [leaf for leaf in row.leaves if leaf.share >= LEAST_CAUSE][:MOST_LEAVES] for row in bars}
    titles = [row.title for row in bars] + [f"  {leaf.title}" for row in bars for leaf in shown[row.row]]
    label = max(map(len, titles))
    times = [milliseconds(row.step_ns) for row in bars]
    cells = min(_LONGEST_BAR, console.width - label - max(map(len, times)) - 14)
    width = cells if cells >= _SHORTEST_BAR else 0
    ascii_only = not console.encoding.startswith("utf")

    lines = [_heading("Where the time goes", "share of peak, ms a step of a rank", bars[-1].row == "mfu")]
    for row, time in zip(bars, times, strict=True):
        line = _line(f"{row.title:<{label}}  ", "bold" if row.is_level else "")
        if width:
            colour = bucket_words(row.bucket).colour if row.bucket else ""
            line.append(bar(row.start, row.end, width, ascii_only) + "  ", colour)
        line.append(f"{percent(row.share):>8}", "bold").append(f"  {time:>{max(map(len, times))}}")
        lines.append(line)
        for leaf in shown[row.row]:
            line = _line(f"  {leaf.title:<{label - 2}}  " + " " * (width + 2 if width else 0), "dim")
            line.append(f"{percent(leaf.share):>8}  {milliseconds(leaf.step_ns):>{max(map(len, times))}}", "dim")
            lines.append(line)
    return lines


def _ranks(result: rows.Result) -> list[Text]:
    everyone, buckets = rows.ranks(result), rows.rank_buckets(result)
    if not everyone:
        return []
    few = len(everyone) <= MOST_RANKS
    shown = everyone if few else rows.worst_ranks(result, WORST_RANKS)
    has_stage = any(row.stage is not None for row in everyone)
    head = ["rank", *(["stage"] if has_stage else []), "ms a step"]
    head += [rows.bucket_title(result, bucket, short=True) for bucket in buckets]
    table = [head]
    for row in shown:
        stage = ["" if row.stage is None else str(row.stage)] if has_stage else []
        shares = [f"{100 * row.shares.get(bucket, 0.0):.1f}" for bucket in buckets]
        time = milliseconds(row.step_ns).removesuffix(" ms")
        table.append([str(row.rank), *stage, time, *shares, *([] if row.reliable else ["not reliable"])])
    lines = [_heading("Ranks" if few else f"The {len(shown)} worst ranks", "% of the rank's own step time")]
    lines += [_line(text, "" if number else "dim") for number, text in enumerate(_aligned(table))]
    if not few:
        lines.append(_line(f"… {len(everyone) - len(shown):,} more", "dim"))
    return lines


def _culprits(result: rows.Result, console: Console) -> list[Text]:
    found, links = rows.culprits(result), rows.slow_links(result)
    shown = [row for row in found if row.share >= LEAST_CAUSE][:MOST_CULPRITS]
    lines = []
    if shown:
        lines.append(_heading("Who made the others wait", "waits caused, ms a step of a rank"))
        lines += _culprit_lines(shown, console.width)
        rest = found[len(shown) :]
        if rest:
            lines.append(_line(f"… {len(rest):,} more, {percent(sum(row.share for row in rest))} together", "dim"))
    elif links:
        lines.append(_heading("Slow links"))
    if not any(row.cause == "slow_link" and row.evidence for row in shown):  # else the evidence has them
        lines += [
            Text(f"  slow link: {link.text}, {milliseconds(link.excess_ns, 1)} in all") for link in links[:MOST_LINKS]
        ]
    return lines


def _culprit_lines(shown: Sequence[rows.CulpritRow], width: int) -> Iterator[Text]:
    """Yield a table whose evidence stands beside the numbers if all of it fits there, else below them."""
    has_points = any(row.mfu_points is not None for row in shown)
    table = [["rank", "cause", "ms a step", "share", *(["MFU points"] if has_points else [])]]
    for row in shown:
        points = ["" if row.mfu_points is None else f"{row.mfu_points:+.1f}"] if has_points else []
        time = milliseconds(row.caused_step_ns).removesuffix(" ms")
        table.append([str(row.rank), row.title, time, percent(row.share), *points])
    head, *numbers = _aligned(table, texts={1})
    fits = all(cell_len(f"{text}  {row.evidence}") <= width for text, row in zip(numbers, shown, strict=True))
    yield _line(head, "dim")
    for text, row in zip(numbers, shown, strict=True):
        line = _line(text)
        yield line.append(f"  {row.evidence}", "dim") if fits and row.evidence else line
        if row.evidence and not fits:
            yield Text("      ").append(row.evidence, "dim")


def _behind(result: rows.Result, console: Console) -> list[Text]:
    """Name the largest host gaps where they matter, the recompute and how kernels stand against their roofs."""
    facts = [text for text in (behind.recompute_line(result), behind.kernel_line(result)) if text]
    matter = result["job"]["buckets"].get("host_gap", 0) >= behind.NAMED_HOST_GAP * result["job"]["window_ns"]
    gaps = behind.host_gaps(result)[: MOST_BEHIND - len(facts)] if matter else []
    lines = [
        f"{gap.title}: {clean(gap.call, 48)}, {percent(gap.share)} in {plural(gap.count, 'gap')}"
        + (f", most on rank {gap.rank}" if gap.rank is not None else "")
        for gap in gaps
    ]
    # One line each: the end of what does not fit is in the other reports.
    shown = [_line(f"  {clean(text, max(console.width - 2, 1))}") for text in (*lines, *facts)]
    return [_heading("Behind the losses"), *shown] if shown else []


def _model(result: rows.Result) -> list[Text]:
    # Of a source that lists where the table has its figure, the kind will do; the other reports have it whole.
    facts = [
        f"{fact.name}: {fact.value}" + (f" ({fact.source.split(': ')[0]})" if fact.source else "")
        for fact in rows.model(result)
    ]
    title = "How MFU was got" if result["job"]["mfu"] is not None else "Why there is no MFU"
    return [_line(title, "bold"), Text("  " + " | ".join(facts))] if facts else []


def _quality(result: rows.Result) -> list[Text]:
    remarks = rows.quality(result)
    if not remarks:
        return []
    lines = [_heading("Before you trust it")]
    for remark in remarks[:MOST_REMARKS]:
        lines.append(Text("  ! " if remark.is_warning else "  - ", "yellow" if remark.is_warning else ""))
        lines[-1].append(remark.text)
    if len(remarks) > MOST_REMARKS:
        lines.append(_line(f"  … {len(remarks) - MOST_REMARKS:,} more", "dim"))
    return lines


def _heading(title: str, about: str = "", of_peak: bool = True) -> Text:
    about = about if of_peak else about.replace("of peak", "of step time")
    return _line(title, "bold").append(f"   {about}" if about else "", "dim")


def _line(text: str, style: str = "") -> Text:
    # Style as a span, not as the text's base, so that what is appended does not inherit it.
    return Text(no_wrap=True, overflow="crop").append(text, style)


def _aligned(table: Sequence[Sequence[str]], texts: Container[int] = ()) -> Iterator[str]:
    """Yield the rows with their cells to the right, those of `texts` to the left."""
    widths = [max(cell_len(row[column]) for row in table if column < len(row)) for column in range(len(table[0]))]
    for row in table:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False)]
        cells = [
            cell + blank if column in texts else blank + cell
            for column, (cell, blank) in enumerate(zip(row, blanks, strict=False))
        ]
        yield "  ".join(cells + list(row[len(widths) :]))


def _wrapped(line: Text, console: Console) -> Iterator[Text]:
    if line.no_wrap:
        line.truncate(console.width, overflow="crop")
        line.rstrip()
        yield line
        return
    indent = " " * (len(line.plain) - len(line.plain.lstrip()) + (2 if line.plain.startswith(("  !", "  -")) else 0))
    parts = line.wrap(console, max(console.width - len(indent), 10), overflow="fold")
    for number, part in enumerate(parts):
        part.rstrip()
        yield part if number == 0 else Text(indent) + part


def _encodable(line: Text, encoding: str) -> Text:
    if encoding.startswith("utf"):
        return line
    # Character by character, or the spans of the text would move; what has no equal here becomes a question mark.
    line.plain = line.plain.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
    return line
