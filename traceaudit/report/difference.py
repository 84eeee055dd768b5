"""The difference of two runs as text, Markdown and one HTML page; `traceaudit.comparing.compare` makes the data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from traceaudit.report import json_file, page
from traceaudit.report.formats import clean, listed, milliseconds, percent, plural
from traceaudit.report.markdown import escaped
from traceaudit.report.table import Cell, Column, Table, table
from traceaudit.report.words import bucket_words, family_title, leaf_title

Data = Mapping[str, Any]

NOISE = "within noise"
SECTIONS = (
    ("rank", "By rank", "Buckets of single ranks that changed beyond noise, the largest changes first."),
    ("group", "Groups of collectives", "Exposed time, waits included, a step of a rank."),
    ("family", "Families of kernels", "Time of GPU activities, whatever ran beside them."),
    ("kernel", "Kernels", "Time of GPU activities, whatever ran beside them."),
)
SHOWN = 8  # rows of a section in text and Markdown
FIGURES = ("before", "after", "change", "noise", "MFU points")
NAMED_CHANGES = 3  # in the headline
MINUS = "\u2212"


@dataclass(frozen=True)
class Line:
    """A row of a difference in words; times in nanoseconds of a step of a rank."""

    title: str
    bucket: str
    is_leaf: bool
    before_ns: float
    after_ns: float
    change_ns: float
    noise_ns: float | None
    mfu_points: float | None
    verdict: str


@dataclass(frozen=True)
class Section:
    """Rows of one kind, and how many of them stayed within noise and are not shown."""

    title: str
    about: str
    lines: tuple[Line, ...]
    unchanged: int


def headline(data: Data) -> str:
    """Return what changed in a sentence or two."""
    before, after, step = data["before"], data["after"], data["step"]
    scaled = "" if data["scale"] == 1 else ", at equal tokens"
    length = f"a step {_ms(step['before_ns'])} → {_ms(step['after_ns'])} ms{scaled}"
    level = length[0].upper() + length[1:]
    if data["mfu_points"] is not None:
        points = signed(data["mfu_points"], 1)
        level = f"MFU {percent(before['mfu'])} → {percent(after['mfu'])} ({points} points), {length}"
    changed = [row for row in _of_level(data, "bucket") if row["verdict"] != NOISE]
    changed.sort(key=lambda row: -abs(row["change_ns"]))
    if not data["changed"]:
        sentences = [f"No change beyond noise: {level}."]
    elif changed:
        parts = [f"{_title(row)} {signed(row['change_ns'] / 1e6, 1)} ms" for row in changed[:NAMED_CHANGES]]
        sentences = [f"{level}: {listed(parts)}."]
    else:
        sentences = [f"{level}."]
    unsure = [_title(row) for row in _of_level(data, "bucket") if row["separated"]]
    if unsure:
        sentences.append(
            f"In {listed(unsure)} every step of one run lies beyond all of the other, but so few steps that vary so "
            "much cannot tell it from noise: profile more."
        )
    return " ".join([*sentences, *moves(data)])


def moves(data: Data) -> list[str]:
    """Return where what a bucket lost came back, a sentence each."""
    return [
        f"{percent(move['share'])} of what {bucket_words(move['from']).title} lost ({_ms(move['ns'])} ms) reappears as "
        f"{bucket_words(move['to']).title}."
        for move in data["moved"]
    ]


def signed(value: float, digits: int) -> str:
    """Write a change with its sign.

    >>> signed(1.25, 1), signed(-0.04, 1), signed(-3.0, 1) == MINUS + "3.0"
    ('+1.2', '0.0', True)
    """
    text = f"{value:+,.{digits}f}"
    return f"{0:.{digits}f}" if float(text.replace(",", "")) == 0 else text.replace("-", MINUS)


def waterfall(data: Data) -> list[Line]:
    """Return the buckets, each followed by its leaves that changed beyond noise."""
    leaves = [row for row in _of_level(data, "leaf") if row["verdict"] != NOISE and row["name"] != "model_flops"]
    lines = []
    for row in _of_level(data, "bucket"):
        lines.append(_line(row))
        own = [leaf for leaf in leaves if leaf["bucket"] == row["bucket"] and leaf["name"] != "not_split"]
        lines += [_line(leaf) for leaf in sorted(own, key=lambda leaf: -abs(leaf["change_ns"]))]
    return lines


def sections(data: Data) -> list[Section]:
    """Return the other kinds of rows, as far as one of them changed."""
    found = []
    for level, title, about in SECTIONS:
        rows = _of_level(data, level)
        changed = tuple(_line(row) for row in rows if row["verdict"] != NOISE)
        if changed:
            found.append(Section(title, about, changed, len(rows) - len(changed)))
    return found


def _of_level(data: Data, level: str) -> list[Mapping[str, Any]]:
    return [row for row in data["rows"] if row["level"] == level]


def _line(row: Mapping[str, Any]) -> Line:
    columns = ("before_ns", "after_ns", "change_ns", "noise_ns", "mfu_points", "verdict")
    return Line(_title(row), row["bucket"], row["level"] == "leaf", *(row[name] for name in columns))


def _title(row: Mapping[str, Any]) -> str:
    level, name, bucket = row["level"], str(row["name"]), row["bucket"]
    if level == "bucket":
        return bucket_words(name).title
    if level == "leaf":
        return leaf_title(bucket, name)
    if level == "rank":
        return f"{clean(name)}, {bucket_words(bucket).title}"
    return family_title(name) if level == "family" else clean(name)


def _ms(ns: float) -> str:
    return milliseconds(ns, 1).removesuffix(" ms")


def _noise(line: Line) -> str:
    return "unknown" if line.noise_ns is None else f"±{milliseconds(line.noise_ns, 2).removesuffix(' ms')}"


def _points(line: Line) -> str:
    return "" if line.mfu_points is None else signed(line.mfu_points, 2)


def _cells(line: Line) -> tuple[str, ...]:
    """Return `FIGURES` of a row, and its verdict."""
    change = signed(line.change_ns / 1e6, 2)
    verdict = "" if line.verdict == NOISE else line.verdict
    return _ms(line.before_ns), _ms(line.after_ns), change, _noise(line), _points(line), verdict


# Text


def lines(data: Data) -> Iterator[str]:
    """Yield the difference as plain text."""
    yield headline(data)
    yield ""
    yield from _text_table(f"ms of {data['unit']}", waterfall(data))
    for section in sections(data):
        yield ""
        yield from _text_table(section.title, section.lines[:SHOWN])
        if len(section.lines) > SHOWN:
            yield f"  and {plural(len(section.lines) - SHOWN, 'other')}"
    remarks = _remarks(data)
    if remarks:
        yield ""
    yield from remarks


def _text_table(title: str, shown: Sequence[Line]) -> Iterator[str]:
    yield f"{clean(title, 44):<44} {'before':>10} {'after':>10} {'change':>10} {'noise':>10} {'MFU':>7}"
    for line in shown:
        name = f"{'  ' if line.is_leaf else ''}{line.title}"
        name = name if len(name) <= 44 else name[:43] + "…"
        *times, points, verdict = _cells(line)
        yield f"{name:<44} {' '.join(f'{text:>10}' for text in times)} {points:>7}  {verdict}".rstrip()


def _remarks(data: Data) -> list[str]:
    """Return what differs between the runs, and what to know before trusting the rows."""
    differing = [
        f"{clean(entry['name'])}: {clean(entry['before'])} → {clean(entry['after'])} ({entry['treatment']})"
        for entry in data["differences"]
    ]
    return [*differing, *(clean(note, 400) for note in data["notes"])]


# Markdown


def to_markdown(data: Data) -> str:
    """Return the difference for a merge request or a step summary."""
    parts = [f"## {escaped(_number(data))}", f"{escaped(headline(data))}"]
    parts.append(_markdown_table(waterfall(data)))
    for section in sections(data):
        more = len(section.lines) - SHOWN
        tail = f"\n\nAnd {plural(more, 'other')}." if more > 0 else ""
        parts.append(f"### {section.title}\n\n{_markdown_table(section.lines[:SHOWN])}{tail}")
    remarks = _remarks(data)
    if remarks:
        parts.append("### Between the runs\n\n" + "\n".join(f"- {escaped(text)}" for text in remarks))
    parts.append(f"Times are ms of {escaped(data['unit'])}. Made by traceaudit {escaped(data['traceaudit_version'])}.")
    return "\n\n".join(parts) + "\n"


def _number(data: Data) -> str:
    """Return the change in its shortest form."""
    if data["mfu_points"] is not None:
        return f"MFU {signed(data['mfu_points'], 1)} points"
    step = data["step"]
    return f"Step time {signed(100 * step['change_ns'] / step['before_ns'], 1)} %"


def _markdown_table(shown: Sequence[Line]) -> str:
    rows = [f"| | {' | '.join(FIGURES)} | |", "|---|---:|---:|---:|---:|---:|---|"]
    for line in shown:
        name = f"&emsp;{escaped(line.title)}" if line.is_leaf else escaped(line.title)
        *figures, verdict = _cells(line)
        rows.append(f"| {name} | {' | '.join(figures)} | {f'**{verdict}**' if verdict else ''} |")
    return "\n".join(rows)


# HTML


def to_html(data: Data) -> str:
    """Return the difference as one page; equal data give equal pages."""
    block = json_file.to_block(data)
    return page.render(
        "difference.html.j2",
        title=f"{_number(data)}: {clean(data['before']['source'], 60)} → {clean(data['after']['source'], 60)}",
        version=clean(data["traceaudit_version"], 40),
        data=block.data,
        data_type=block.media_type,
        number=_number(data),
        sentence=headline(data),
        sides=[("Before", _side(data["before"])), ("After", _side(data["after"]))],
        unit=data["unit"],
        whole=_table("Buckets, and leaves that changed", waterfall(data)),
        sections=[(part.title, part.about, _table(part.title, part.lines)) for part in sections(data)],
        moves=moves(data),
        remarks=_remarks(data),
    )


def to_fragment(data: Data) -> str:
    """Return headline and buckets as HTML for a notebook."""
    head = Markup("").join(Markup("<th>{}</th>").format(name) for name in ("", *FIGURES))
    body = [
        Markup("<tr><th>{}</th>{}</tr>").format(
            line.title, Markup("").join(Markup("<td>{}</td>").format(text) for text in _cells(line))
        )
        for line in waterfall(data)
    ]
    table = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, Markup("").join(body))
    return str(Markup("<p><b>{}</b></p>{}").format(headline(data), table))


def _side(side: Mapping[str, Any]) -> str:
    mfu = "MFU unknown" if side["mfu"] is None else f"MFU {percent(side['mfu'])}"
    traced = f"{plural(side['ranks_traced'], 'rank')} of {side['world_size'] or 'unknown':,}"
    doubt = "" if side["reliable"] else ", attribution not reliable"
    return f"{clean(side['source'])}: {mfu}, {plural(side['steps'], 'step')}, {traced}, {clean(side['gpu'])}{doubt}"


def _table(label: str, shown: Sequence[Line]) -> Table:
    def time(ns: float) -> Cell:
        return Cell(_ms(ns), ns)

    columns = (
        Column[Line]("", lambda line: ("\u2003" if line.is_leaf else "") + line.title, "text"),
        Column[Line]("before, ms", lambda line: time(line.before_ns)),
        Column[Line]("after, ms", lambda line: time(line.after_ns)),
        Column[Line]("change, ms", lambda line: Cell(signed(line.change_ns / 1e6, 2), line.change_ns)),
        Column[Line]("noise, ms", lambda line: Cell(_noise(line), line.noise_ns), "number", "what the spread explains"),
        Column[Line]("MFU points", lambda line: Cell(_points(line), line.mfu_points)),
        Column[Line]("", lambda line: "" if line.verdict == NOISE else line.verdict, "text"),
    )
    return table(label, columns, shown)
