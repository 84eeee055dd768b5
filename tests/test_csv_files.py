"""The tables as CSV: raw numbers that add up, and text that no spreadsheet runs."""

import csv
import io
from collections import defaultdict
from pathlib import Path

import pytest

from tests.results import Result, every_case, result_of
from traceaudit.cli.outputs import CSV_FILES
from traceaudit.report.csv_files import csv_files


def tables_of(result: Result) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file as a spreadsheet reads them."""
    return {
        name.removesuffix(".csv"): list(csv.DictReader(io.StringIO(content.decode())))
        for name, content in csv_files(result).items()
    }


@every_case
def test_every_table_has_a_file_and_every_row_its_columns(result: Result) -> None:
    """The files are those that the command announces; no row is longer or shorter than its header."""
    assert tuple(tables_of(result)) == CSV_FILES
    for content in csv_files(result).values():
        header, *rows = csv.reader(io.StringIO(content.decode()))
        assert {len(row) for row in rows} <= {len(header)}


@pytest.mark.parametrize("mfu", [True, False])
def test_nanoseconds_add_up(mfu: bool) -> None:
    """Leaves are their buckets, and the buckets of the ranks' steps are the windows."""
    result = result_of(mfu=mfu)
    found = tables_of(result)
    by_bucket: dict[str, int] = defaultdict(int)
    for row in found["leaves"]:
        by_bucket[row["bucket"]] += int(row["ns"])
    assert by_bucket == {bucket: ns for bucket, ns in result["job"]["buckets"].items() if ns}
    assert sum(int(row["ns"]) for row in found["ranks"]) == result["job"]["window_ns"]
    peak, *rows = found["waterfall"]
    assert int(peak["ns"]) == sum(int(row["ns"]) for row in rows)
    assert sum(float(row["share"]) for row in (peak, *rows[:-1])) == pytest.approx(float(rows[-1]["share"]))


def test_readme_names_every_column() -> None:
    """The README's table has each file with its columns."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name, content in csv_files(result_of()).items():
        columns = content.decode().split("\n", 1)[0].replace(",", ", ")
        assert f"| `{name}` | `{columns}`" in readme


def test_missing_values_are_empty() -> None:
    """No None, and no figure that is not known."""
    kernels = tables_of(result_of())["kernels"]
    assert [row["flops"] for row in kernels] == ["", "1100000000000000.0"]


def test_findings_have_their_evidence_in_a_cell() -> None:
    """A finding is a row, whatever its texts hold."""
    result = result_of()
    result["findings"][0]["action"] = 'a "quoted",\nbroken line'
    first, *rest = tables_of(result)["findings"]
    assert (first["id"], first["evidence"]) == ("exposed-comm.fsdp-prefetch", "the longest of 24")
    assert first["action"] == 'a "quoted",\ufffdbroken line'
    assert len(rest) == 4


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_names_are_no_formulas(name: str) -> None:
    """A spreadsheet shows what begins as a formula does as text."""
    result = result_of()
    result["kernels"][0]["name"] = name
    assert tables_of(result)["kernels"][0]["name"].startswith(("'", "\ufffd"))
