"""What a notebook shows of an audit: the headline and the waterfall, without style sheet or script."""

from markupsafe import Markup

from traceaudit.report.formats import milliseconds, percent
from traceaudit.report.headline import headline
from traceaudit.report.rows import Result, WaterfallRow, is_reliable, waterfall
from traceaudit.report.svg import element
from traceaudit.report.words import LEVEL_COLOUR, bucket_words

WIDTH, LABEL, NUMBERS, PITCH = 760.0, 180.0, 170.0, 26.0


def fragment(result: Result) -> str:
    """Return HTML for a cell's output; it takes the notebook's font and text colour."""
    sign = "" if is_reliable(result) else "⚠ "
    rows = waterfall(result)
    parts = [part for place, row in enumerate(rows) for part in _row(row, place * PITCH)]
    picture = element(
        "svg",
        element("title", "Waterfall"),
        *parts,
        viewBox=f"0 0 {WIDTH:g} {PITCH * len(rows):g}",
        width="100%",
        role="img",
        font_size=13,
        style=f"max-width: {WIDTH:g}px",
    )
    return element("div", element("p", element("b", sign + headline(result))), picture)


def _row(row: WaterfallRow, top: float) -> list[Markup]:
    """Return the title, bar and numbers of a row."""
    room, middle = WIDTH - LABEL - NUMBERS, top + PITCH / 2 + 4
    low, high = sorted((0.0 if row.is_level else row.start, row.end))
    text = {"fill": "currentColor", "y": middle}
    weight = "bold" if row.is_level else None
    return [
        element("text", row.title, x=LABEL - 10, text_anchor="end", font_weight=weight, **text),
        element(
            "rect",
            x=LABEL + room * low,
            width=max(room * (high - low), 1.0),
            y=top + 4,
            height=PITCH - 8,
            fill=bucket_words(row.bucket).colour if row.bucket else LEVEL_COLOUR,
            stroke="currentColor",
        ),
        element("text", percent(row.share), x=WIDTH - 100, text_anchor="end", font_weight=weight, **text),
        element("text", milliseconds(row.step_ns, 1), x=WIDTH - 4, text_anchor="end", **text),
    ]
