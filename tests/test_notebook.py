"""What a notebook shows of an audit."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pandas as pd

from tests.results import Result, every_case, result_of
from traceaudit.attribute import Attribution
from traceaudit.audit import Audit
from traceaudit.report import rows
from traceaudit.report.notebook import fragment


@every_case
def test_fragment_is_the_headline_and_the_waterfall(result: Result) -> None:
    """It is well-formed, has no script, and a bar and a share for each row of the waterfall."""
    root = ElementTree.fromstring(fragment(result))  # noqa: S314  our own text
    tags = [element.tag for element in root.iter()]
    assert tags.count("rect") == len(rows.waterfall(result))
    assert set(tags) == {"div", "p", "b", "svg", "title", "text", "rect"}
    texts = [element.text or "" for element in root.iter("text")]
    for row in rows.waterfall(result):
        assert row.title in texts
        assert f"{100 * row.share:.1f} %" in texts


def test_bars_chain() -> None:
    """A loss ends where the next one begins."""
    bars = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', fragment(result_of()))
    losses = [(float(x), float(width)) for x, width in bars[1:-1]]
    for (x, _), (following, width) in pairwise(losses):
        assert abs(following + width - x) < 0.05


def test_audit_shows_it() -> None:
    """A notebook asks an audit for its HTML."""
    result = result_of()
    audit = Audit(result, Attribution.__new__(Attribution), pd.DataFrame())
    assert audit._repr_html_() == fragment(result)
