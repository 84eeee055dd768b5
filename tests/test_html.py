"""The page: complete without scripts, inert, small, and its numbers those of the result."""

import base64
import hashlib
import re
from copy import deepcopy
from html.parser import HTMLParser

import pytest

from tests.results import MS, Result, every_case, hostile, result_of
from traceaudit.report import lanes, tables
from traceaudit.report.html import to_html
from traceaudit.report.page import _tidy

KB = 1_000


class Elements(HTMLParser):
    """The elements of a page with their attributes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the element."""
        self.found.append((tag, dict(attrs)))


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Return the elements of a page."""
    parser = Elements()
    parser.feed(page)
    return parser.found


@every_case
def test_page_is_one_inert_file(result: Result) -> None:
    """A page is the same each time, refers to nothing outside, and opens no tag of a name."""
    page = to_html(result)
    assert page == to_html(deepcopy(result))
    assert page.count("<h1>") == page.count("<main ") == 1
    assert page.count("<script") == 2
    found = elements(page)
    assert {tag for tag, _ in found} & {"iframe", "object", "embed", "form", "base"} == set()
    for tag, attributes in found:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}, tag
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert "<img src=x" not in page


@every_case
def test_policy_admits_the_own_style_and_script_alone(result: Result) -> None:
    """The hashes are those of the one style sheet and the one script; nothing else may run or load."""
    page = to_html(result)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    allowed = dict(part.strip().split(" ", 1) for part in policy.replace("&#39;", "'").split(";"))
    for name, pattern in (("style-src", r"<style>(.*?)</style>"), ("script-src", r"<script>(.*?)</script>")):
        (text,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed.pop(name) == f"'sha256-{digest}'"
    assert allowed.pop("img-src") == "data:"
    assert set(allowed.values()) == {"'none'"}


def test_ids_are_unique_and_links_find_them() -> None:
    """Each link inside the page leads somewhere."""
    for result in (result_of(), hostile(), result_of(80, mfu=False)):
        found = elements(to_html(result))
        ids = [attributes["id"] for _, attributes in found if "id" in attributes]
        assert len(ids) == len(set(ids))
        links = {(attributes.get("href") or "")[1:] for tag, attributes in found if tag == "a"}
        assert links <= set(ids)


@pytest.mark.parametrize("mfu", [True, False])
def test_rows_of_the_waterfall_table_add_up(mfu: bool) -> None:
    """In the page's table the losses and what is left are the peak, and leaves are their bucket, in whole ns."""
    result = result_of(mfu=mfu)
    rows = tables.waterfall(result).rows
    ns = {(row[0].text, row[1].text): row[4].key or 0 for row in rows}
    whole = {bar: value for (bar, leaf), value in ns.items() if leaf == "all of it"}
    first, *bars = whole
    assert whole[first] == result["job"]["window_ns"] == sum(whole[bar] for bar in bars)
    for bar in bars:
        parts = [value for (name, leaf), value in ns.items() if name == bar and leaf != "all of it"]
        assert not parts or sum(parts) == whole[bar]


def test_page_shows_every_finding_with_what_to_do() -> None:
    """Title, price, confidence, action, check and the time range to look up stand in the page."""
    page = to_html(result_of())
    for name in ("exposed-comm.fsdp-prefetch", "recompute.full", "host.data-loader", "inputs.no-stacks"):
        for text in (f"About {name}", f"do {name}", f"check {name}", f"why {name}"):
            assert text in page
    assert "1732000000123456789" in page
    assert "+4.0 MFU points" in page
    assert page.count('<details class="finding"') == 5


def test_calendar_stands_below_the_waterfall() -> None:
    """With a failure budget, the page says what is left of MFU over the calendar."""
    from traceaudit.budget import from_figures

    result = result_of()
    assert 'id="budget"' not in to_html(result)
    result["budget"] = from_figures({"mtbf": 10_800.0, "pause": 30.0}, result)
    calendar = result["budget"]["calendar"]
    assert calendar["goodput"] == pytest.approx(calendar["productive"] * 0.28)
    page = to_html(result)
    assert "of the calendar" in page
    assert f"productive {100 * calendar['productive']:.1f}\u00a0%" in page


@pytest.mark.parametrize(("count", "limit_kb"), [(8, 1_000), (512, 1_000), (16_384, 3_000)])
def test_page_stays_small(count: int, limit_kb: int) -> None:
    """A ticket takes the page of any job; the numbers of many ranks differ, as those of a real one do."""
    result = uneven(result_of(count, range(3, 7)))
    page = to_html(result)
    assert len(page.encode()) <= limit_kb * KB
    assert page.count("<tr>") < 1_000


def test_ranks_beyond_those_shown_are_counted() -> None:
    """Of many ranks the worst and the best few stand in the table; so do culprits, and the rest are numbers."""
    result = result_of(300)
    result["stragglers"] += [result["stragglers"][0] | {"rank": rank, "caused_ns": 1} for rank in range(10, 250)]
    found = tables.ranks(result)
    assert len(found.rows) == 43
    assert found.left_out == (
        "The 40 ranks that lost most and the 3 that lost least; 257 others are in the data of this page."
    )
    assert tables.stragglers(result).left_out.startswith("And 223 others, ")


def test_figures_of_few_ranks_have_a_lane_each_and_of_many_an_image_a_bucket() -> None:
    """Both say the same in words; an image names the rank that is worst."""
    few, many = lanes.rank_shares(result_of()), lanes.rank_shares(result_of(300))
    assert few is not None
    assert many is not None
    assert [lane.label for lane in few.lanes] == [f"rank {rank}" for rank in range(8)]
    assert many.lanes[0].label == "achieved (MFU)"
    assert many.lanes[0].note == "24.0 % to 32.0 %, least on rank 299"
    assert 'src="data:image/png' in many.lanes[0].drawing


def test_lanes_of_a_timeline_are_as_long_as_their_bins() -> None:
    """The longest rank fills the width; each leaf is one path, with its name."""
    found = lanes.timeline(result_of())
    assert found is not None
    assert len(found.lanes) == 8
    widths = {re.findall(r'viewBox="0 0 (\d+) 1"', lane.drawing)[0] for lane in found.lanes}
    assert widths == {str(max(rank + 200 - rank % 4 for rank in range(8)))}
    assert re.findall(r'd="([^"]+)"', found.lanes[0].drawing)[0] == "M0 0h100v1h-100zM140 0h50v1h-50z"
    assert "host gaps: data loader" in found.lanes[0].drawing
    assert lanes.timeline(result_of() | {"timeline": None}) is None


def test_cells_of_waits_have_their_numbers() -> None:
    """What others waited for a rank in a step stands in its cell, and the sum at the end."""
    found = lanes.waited_for(result_of())
    assert found is not None
    assert found.lanes[1].note == "144.0 ms"  # 6 ms of a step, of 8 ranks, in 3 steps
    assert ">144.0<" in found.lanes[1].drawing
    assert found.scale is not None
    assert found.scale[1:] == ("0 ms", "144.0 ms")
    assert lanes.waited_for(result_of() | {"lateness": []}) is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("rank 5 took 3.2 ms of step 4", "rank_5 took 3.2_ms of step_4"),
        ("10 % and 4 GB, 1 nsight", "10_% and 4_GB, 1 nsight"),
        ("run --rank 0 --step 3", "run --rank 0 --step 3"),
    ],
)
def test_numbers_keep_their_units(text: str, kept: str) -> None:
    """No line ends between a number and its unit; commands can be copied as they are."""
    assert _tidy(text) == kept.replace("_", "\u00a0")


def uneven(result: Result) -> Result:
    """Return a result whose ranks differ in every number, and of which every rank is waited for."""
    chance = 12345
    for rank in result["ranks"]:
        for entry in (*rank["steps"], rank):
            for name in entry["buckets"]:
                chance = (chance * 1_103_515_245 + 12_345) % 2**31
                entry["buckets"][name] += chance % MS
        rank["host"] = f"node-{chance % 99_991:05}.cluster"
    result["lateness"] = [
        {"rank": rank["rank"], "step": step["step"], "ns": step["buckets"]["straggler"]}
        for rank in result["ranks"]
        for step in rank["steps"]
    ]
    kernel = result["kernels"][0]
    result["kernels"] = [kernel | {"name": f"{kernel['name']}_{number}", "ns": number} for number in range(400)]
    result["stragglers"] = [result["stragglers"][0] | {"rank": rank["rank"]} for rank in result["ranks"]]
    return result
