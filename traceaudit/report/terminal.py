"""The report as text: plain when piped, coloured on a terminal, never wider than the console."""

from collections.abc import Container, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from traceaudit.report import advice, behind, by_rank, culprits, factors, headline, kernels, remarks, rows
from traceaudit.report.formats import clean, milliseconds, percent, plural
from traceaudit.report.words import bucket_words

LEAST_CAUSE = 0.005  # smaller leaves and culprits are left to the other reports
LINES = {
    "head": 5,
    "waterfall": 14,
    "findings": 7,
    "culprits": 5,
    "model": 2,
    "quality": 3,
}  # 40 with the blank lines between
FULL_WIDTH = 80  # cells, from which on the report has at most so many lines
MOST_FINDINGS, MOST_CULPRITS, MOST_CALLS = 3, 3, 3
LEAST_EVIDENCE = 16  # cells
LEAST_SPREAD = 0.005  # between what ranks achieve, from which it is told
_SAID_ELSEWHERE = ("Traced", "Clocks", "Versions")  # in the headline and among the remarks
_SHORTEST_BAR, _LONGEST_BAR = 10, 48  # cells; where there is less room there are no bars
_IN_ASCII = str.maketrans({"·": "*", "…": "~", "µ": "u", "\u00d7": "x", "\u2212": "-", "\u2013": "-"})


def print_report(result: rows.Result, console: Console) -> None:
    """Print the report on a console; file and kernel names in it are text, whatever markup they hold."""
    parts = {
        "head": _head(result),
        "waterfall": _waterfall(result, console),
        "findings": _findings(result, console) or _behind(result, console),
        "culprits": _culprits(result, console),
        "model": _model(result, console),
        "quality": _quality(result),
    }
    for name, lines in parts.items():
        apart = [Text("")] if lines and name not in ("head", "quality") else []
        for line in (*apart, *_limited(lines, console, LINES[name])):
            console.print(line, highlight=False, no_wrap=True, overflow="crop")


def _limited(lines: Sequence[Text], console: Console, most: int) -> list[Text]:
    """Return the lines as they fit into the width, and no more of them than a report of a screen has room for."""
    fitting = [part for line in lines for part in _wrapped(_encodable(line, console.encoding), console)]
    if len(fitting) <= most or console.width < FULL_WIDTH:
        return fitting
    more = f"  … {plural(len(fitting) - most + 1, 'line')} more in the other reports"
    return [*fitting[: most - 1], _encodable(_line(more, "dim"), console.encoding)]


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
    facts = [f"{fact.name}: {fact.value}" for fact in headline.facts(result) if fact.name not in _SAID_ELSEWHERE]
    facts += [text for text in (_spread(result),) if text]
    style = "bold" if rows.is_reliable(result) else "bold red"
    return [Text(headline.headline(result), style), Text(" | ".join(facts), "dim")]


def _spread(result: rows.Result) -> str:
    """Return what the worst and the best rank achieve, where they differ."""
    kept = rows.kept_bucket(result)
    shares = sorted((row.shares.get(kept, 0.0), row.rank) for row in by_rank.ranks(result) if row.reliable)
    if len(shares) < 2 or shares[-1][0] - shares[0][0] < LEAST_SPREAD:
        return ""
    (least, worst), (most, best) = shares[0], shares[-1]
    return f"Ranks: {percent(least)} (rank {worst}) to {percent(most)} (rank {best})"


def _waterfall(result: rows.Result, console: Console) -> list[Text]:
    bars = rows.waterfall(result)
    room = LINES["waterfall"] - len(bars) - 1
    leaves = sorted((leaf for row in bars for leaf in row.leaves), key=lambda leaf: -leaf.share)
    largest = [leaf for leaf in leaves if leaf.share >= LEAST_CAUSE][:room]
    shown = {row.row: [leaf for leaf in row.leaves if leaf in largest] for row in bars}
    titles = [row.title for row in bars] + [f"  {leaf.title}" for leaf in largest]
    label = max(map(len, titles))
    times = [milliseconds(row.step_ns) for row in bars]
    span = max(map(len, times))
    cells = min(_LONGEST_BAR, console.width - label - span - 14)
    width = cells if cells >= _SHORTEST_BAR else 0
    ascii_only = not console.encoding.startswith("utf")

    lines = [_heading("Where the time goes", "share of peak, ms a step of a rank", bars[-1].row == "mfu")]
    for row, time in zip(bars, times, strict=True):
        line = _line(f"{row.title:<{label}}  ", "bold" if row.is_level else "")
        if width:
            colour = bucket_words(row.bucket).colour if row.bucket else ""
            line.append(bar(row.start, row.end, width, ascii_only) + "  ", colour)
        lines.append(line.append(f"{percent(row.share):>8}", "bold").append(f"  {time:>{span}}"))
        for leaf in shown[row.row]:
            line = _line(f"  {leaf.title:<{label - 2}}  " + " " * (width + 2 if width else 0), "dim")
            lines.append(line.append(f"{percent(leaf.share):>8}  {milliseconds(leaf.step_ns):>{span}}", "dim"))
    return lines


def _findings(result: rows.Result, console: Console) -> list[Text]:
    """Name the largest findings, each in a line, and below it what to do."""
    found = advice.findings(result)
    if not found:
        return []
    has_points = any(row.mfu_points is not None for row in found)
    lines = [_heading("What to do first", "MFU points, ms a step of a rank" if has_points else "ms a step of a rank")]
    for row in found[:MOST_FINDINGS]:
        points = f"{'' if row.mfu_points is None else format(row.mfu_points, '+.1f'):>5}" if has_points else ""
        time = milliseconds(row.step_ns, 1).removesuffix(" ms") if row.ns else ""
        room = max(console.width - 18 - len(points) - len(row.confidence), 12)
        lines.append(
            _line(f"{points}  {time:>9}  {clean(row.title, room)}", "bold").append(f"  {row.confidence}", "dim")
        )
        lines.append(_line(f"{'':>{len(points) + 13}}{clean(row.first_step, max(console.width - 20, 1))}"))
    if len(found) > MOST_FINDINGS:
        lines[0].append(f"; {len(found) - MOST_FINDINGS:,} more in the other reports", "dim")
    return lines


def _culprits(result: rows.Result, console: Console) -> list[Text]:
    """Name who made others wait, a line each; slow links where they are no culprit's evidence."""
    found = [row for row in culprits.culprits(result) if row.share >= LEAST_CAUSE]
    if not found:
        links = [f"  {link.text}, {milliseconds(link.excess_ns, 1)} in all" for link in culprits.slow_links(result)]
        return [_heading("Slow links"), *map(_line, links[:MOST_CULPRITS])] if links else []
    about = "waits caused, ms a step of a rank"
    if len(found) > MOST_CULPRITS:
        rest = found[MOST_CULPRITS:]
        about += f"; {len(rest):,} more, {percent(sum(row.share for row in rest))} together"
    return [_heading("Who made the others wait", about), *_culprit_lines(found[:MOST_CULPRITS], console.width)]


def _culprit_lines(shown: Sequence[culprits.CulpritRow], width: int) -> Iterator[Text]:
    """Yield a table; of the evidence as much as fits beside the numbers."""
    has_points = any(row.mfu_points is not None for row in shown)
    table = [["rank", "cause", "ms a step", "share", *(["MFU points"] if has_points else [])]]
    for row in shown:
        points = ["" if row.mfu_points is None else f"{row.mfu_points:+.1f}"] if has_points else []
        time = milliseconds(row.caused_step_ns).removesuffix(" ms")
        table.append([str(row.rank), row.title, time, percent(row.share), *points])
    head, *numbers = _aligned(table, texts={1})
    yield _line(head, "dim")
    for text, row in zip(numbers, shown, strict=True):
        room = width - cell_len(text) - 2
        yield _line(text).append(
            f"  {clean(row.evidence, room)}" if row.evidence and room > LEAST_EVIDENCE else "", "dim"
        )


def _behind(result: rows.Result, console: Console) -> list[Text]:
    """Name the largest host gaps where they matter, the recompute and how kernels stand against their roofs."""
    facts = [text for text in (behind.recompute_line(result), kernels.kernel_line(result)) if text]
    matter = result["job"]["buckets"].get("host_gap", 0) >= behind.NAMED_HOST_GAP * result["job"]["window_ns"]
    gaps = behind.host_gaps(result)[:MOST_CALLS] if matter else []
    lines = [
        f"{gap.title}: {clean(gap.call, 48)}, {percent(gap.share)} in {plural(gap.count, 'gap')}"
        + (f", most on rank {gap.rank}" if gap.rank is not None else "")
        for gap in gaps
    ]
    # One line each: the end of what does not fit is in the other reports.
    shown = [_line(f"  {clean(text, max(console.width - 2, 1))}") for text in (*lines, *facts)]
    return [_heading("Behind the losses"), *shown] if shown else []


def _model(result: rows.Result, console: Console) -> list[Text]:
    """Say in two lines how MFU was got; the table of peaks lists its sources, of which the kind will do here."""
    facts = [
        f"{fact.name} {fact.value}" + (f" ({fact.source.split(': ')[0]})" if fact.source else "")
        for fact in factors.model(result)
    ]
    title = "How MFU was got: " if result["job"]["mfu"] is not None else "Why there is no MFU: "
    text = clean("; ".join(facts), max(2 * console.width - len(title) - 16, 40))
    return [Text(title, "bold").append(text, "not bold")] if facts else []


def _quality(result: rows.Result) -> list[Text]:
    return [
        Text("! " if remark.is_warning else "- ", "yellow" if remark.is_warning else "").append(remark.text)
        for remark in remarks.quality(result)
    ]


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
    indent = " " * (len(line.plain) - len(line.plain.lstrip()) + (2 if line.plain.startswith(("! ", "- ")) else 0))
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
