"""The result as JSON, in a file and in a page."""

import json
from pathlib import Path

import pytest

from tests.results import Result, every_case, result_of
from traceaudit.errors import InputError
from traceaudit.report import json_file
from traceaudit.report.html import to_html


def page_of(result: Result) -> str:
    """Return a page that holds the result and nothing else."""
    block = json_file.to_block(result)
    return f'<script type="{block.media_type}" id="traceaudit-result">{block.data}</script>'


def test_json_keeps_order_and_survives_bad_file_names() -> None:
    """The file parses back to the result, in its order; an undecodable name costs one character, not the file."""
    result = result_of()
    data = json_file.to_json(result)
    assert list(json.loads(data)) == list(result)
    assert json.loads(data) == result
    assert json.loads(json_file.to_json({"file": "rank\udcff.json"})) == {"file": "rank?.json"}


@every_case
def test_page_gives_its_result_back(result: Result) -> None:
    """What a page carries is the result, as text where it is small and packed where it is large."""
    assert json_file.from_html(to_html(result)) == result


@pytest.mark.parametrize(("count", "media_type"), [(8, json_file.PLAIN), (512, json_file.PACKED)])
def test_large_results_are_packed(count: int, media_type: str) -> None:
    """Packing loses nothing."""
    result = result_of(count)
    block = json_file.to_block(result)
    assert (block.media_type, block.left_out) == (media_type, ())
    assert json_file.from_html(page_of(result)) == result


def test_block_leaves_out_the_least_needed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single steps go first, ranks last; what is left out is named inside."""
    result = result_of(512)
    size = len(json_file.to_block(result).data)
    monkeypatch.setitem(json_file.LARGEST, "few", size - 1)
    found = json_file.from_html(page_of(result))
    assert found["left_out"] == ["single steps"]
    assert found["ranks"] == [{key: rank[key] for key in rank if key != "steps"} for rank in result["ranks"]]
    assert found["job"] == result["job"]
    monkeypatch.setitem(json_file.LARGEST, "few", 10)
    assert "ranks" not in json_file.from_html(page_of(result))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<p>a page of something else</p>", "no report of traceaudit"),
        (page_of(result_of()).replace('"job"', '"jab"', 1), "no result"),
        (page_of(result_of())[:9_000] + "</script>", "damaged"),
        (page_of(result_of(512)).replace("H4sI", "H4sJ", 1), "damaged"),
        (page_of(result_of(512))[:9_000] + "</script>", "damaged"),
    ],
    ids=["foreign", "no job", "cut", "not gzip", "cut gzip"],
)
def test_damaged_pages_are_errors(text: str, message: str) -> None:
    """A page that holds no whole result says so."""
    with pytest.raises(InputError, match=message):
        json_file.from_html(text)


def test_result_is_read_from_json_and_from_a_page(tmp_path: Path) -> None:
    """Both files that an analysis writes can be read again; others are errors that name the file."""
    result = result_of()
    for name, content in (("r.json", json_file.to_json(result)), ("r.html", to_html(result).encode())):
        (tmp_path / name).write_bytes(content)
        assert json_file.read_result(tmp_path / name) == result
    for content in (b"", b"{", b"{}", b"[]", b"<html>", b"\xff"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(InputError, match="other"):
            json_file.read_result(tmp_path / "other")
    with pytest.raises(InputError, match="cannot be read"):
        json_file.read_result(tmp_path)
