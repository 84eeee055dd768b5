"""The text of a performance ticket: headline, factors, waterfall, findings with actions, caveats, as Markdown."""

import re
from collections.abc import Iterator, Sequence

from traceaudit.report import advice, culprits, factors, headline, remarks, rows
from traceaudit.report.formats import clean, milliseconds, percent, plural

MOST_FINDINGS, MOST_EVIDENCE, MOST_CULPRITS, MOST_REMARKS = 8, 3, 5, 12
LEAST_LEAF = 0.005  # of the step time; smaller ones are in the other reports

_SPECIAL = re.compile(
    r"([\\`*_\[\]<>#!|~&$@]|:(?=//)|(?<=www)\.)"
)  # also what would become a link, a mention or a number


def to_markdown(result: rows.Result) -> str:
    """Return the ticket's text; names from traces are text, whatever Markdown or HTML they hold."""
    parts = (_head, _waterfall, _findings, _stragglers, _model, _caveats)
    blocks = ["\n".join(lines) for part in parts if (lines := list(part(result)))]
    version = escaped(result.get("traceaudit_version", ""))
    return "\n\n".join([*blocks, f"Made by traceaudit {version}."]) + "\n"


def escaped(text: object) -> str:
    r"""Return text that Markdown shows as it is.

    >>> escaped("a|b <b> `c` *d*")
    'a\\|b \\<b\\> \\`c\\` \\*d\\*'
    """
    return _SPECIAL.sub(r"\\\1", clean(text, 1000))


def _head(result: rows.Result) -> Iterator[str]:
    yield f"## {escaped(headline.main_number(result))}: {escaped(result.get('source') or 'run')}"
    yield ""
    yield ("" if rows.is_reliable(result) else "⚠ ") + escaped(headline.headline(result))
    yield ""
    for fact in headline.facts(result):
        source = f" ({escaped(fact.source)})" if fact.source else ""
        yield f"- {escaped(fact.name)}: **{escaped(fact.value)}**{source}"


def _waterfall(result: rows.Result) -> Iterator[str]:
    has_mfu = result["job"]["mfu"] is not None
    yield "### Where the time goes"
    yield ""
    head = ["row", "share of peak" if has_mfu else "share of step time", "ms a step of a rank"]
    body = []
    for row in rows.waterfall(result):
        name, ceiling = escaped(row.title), "" if row.ceiling is None else percent(row.ceiling)
        title = f"**{name}**" if row.is_level else name
        body.append([title, percent(row.share), milliseconds(row.step_ns).removesuffix(" ms"), ceiling])
        for leaf in row.leaves:
            if leaf.share >= LEAST_LEAF:
                time = milliseconds(leaf.step_ns).removesuffix(" ms")
                body.append([f"&emsp;{escaped(leaf.title)}", percent(leaf.share), time, ""])
    columns = 4 if has_mfu else 3
    yield from _table([*head, "MFU without it"][:columns], [cells[:columns] for cells in body])


def _findings(result: rows.Result) -> Iterator[str]:
    found = advice.findings(result)
    if not found:
        return
    yield "### What to do first"
    yield ""
    for number, row in enumerate(found[:MOST_FINDINGS], 1):
        points = f"{row.mfu_points:+.1f} MFU points, " if row.mfu_points is not None and row.ns else ""
        price = f"{points}{milliseconds(row.step_ns, 1)} a step, " if row.ns else ""
        yield f"{number}. **{escaped(row.title)}** ({price}{escaped(row.confidence)})"
        for name, text in (("", row.summary), ("Do: ", row.action), ("Check: ", row.verify)):
            if text:
                yield f"   - {name}{escaped(text)}"
        for seen in row.evidence[:MOST_EVIDENCE]:
            yield f"   - Seen: {escaped(_place(seen))}"
    if len(found) > MOST_FINDINGS:
        yield f"\n{plural(len(found) - MOST_FINDINGS, 'finding')} more in the report."


def _place(seen: advice.EvidenceRow) -> str:
    """Return where to see a piece of evidence, in a line."""
    parts = [
        seen.text,
        clean(seen.name, 80),
        f"rank {seen.rank}" if seen.rank is not None else "",
        f"step {seen.step}" if seen.step is not None else "",
        seen.file,
        seen.track,
        f"{seen.start_ns} to {seen.end_ns} ns" if seen.length else "",
    ]
    return ", ".join(part for part in parts if part)


def _stragglers(result: rows.Result) -> Iterator[str]:
    found = culprits.culprits(result)
    if not found:
        return
    yield "### Who made the others wait"
    yield ""
    body = [
        [
            str(row.rank),
            escaped(row.title),
            percent(row.share),
            milliseconds(row.caused_step_ns).removesuffix(" ms"),
            escaped(row.evidence),
        ]
        for row in found[:MOST_CULPRITS]
    ]
    yield from _table(["rank", "cause", "share", "ms a step of a rank", "evidence"], body)
    if rest := found[MOST_CULPRITS:]:
        yield f"\nAnd {plural(len(rest), 'other')}, {percent(sum(row.share for row in rest))} together."


def _model(result: rows.Result) -> Iterator[str]:
    found = factors.model(result)
    if not found:
        return
    yield "### How MFU was got" if result["job"]["mfu"] is not None else "### Why there is no MFU"
    yield ""
    yield from _table(
        ["factor", "value", "source"],
        [[escaped(fact.name), escaped(fact.value), escaped(fact.source)] for fact in found],
    )


def _caveats(result: rows.Result) -> Iterator[str]:
    found = remarks.quality(result)
    if not found:
        return
    yield "### Before you trust it"
    yield ""
    for remark in found[:MOST_REMARKS]:
        yield f"- {'**warning** ' if remark.is_warning else ''}{escaped(remark.text)}"
    if len(found) > MOST_REMARKS:
        yield f"- {len(found) - MOST_REMARKS:,} more in the report"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    numeric = [
        bool(body) and all(re.fullmatch(r"[-+<.,\d %]*", row[place]) for row in body) for place in range(len(head))
    ]
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---:' if right else '---' for right in numeric)}|"
    for row in body:
        yield f"| {' | '.join(row)} |"
