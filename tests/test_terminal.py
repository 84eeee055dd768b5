"""The terminal report: the story in forty lines, plain where it is piped."""

import io
import re
from typing import Literal

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.results import Result, every_case, hostile, result_of
from traceaudit.report import terminal


def printed(result: Result, width: int = 100, encoding: str = "utf-8", terminal_colours: bool = False) -> str:
    """Return what the terminal report writes into a stream of an encoding."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    colours: Literal["truecolor", "auto"] = "truecolor" if terminal_colours else "auto"
    console = Console(file=stream, width=width, force_terminal=terminal_colours, color_system=colours)
    terminal.print_report(result, console)
    stream.flush()
    return raw.getvalue().decode(encoding)


@every_case
@pytest.mark.parametrize("width", [30, 60, 100, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_terminal_report_fits(result: Result, width: int, encoding: str) -> None:
    """No line is wider than the console, ends in blanks or steers the terminal, in any encoding."""
    text = printed(result, width, encoding)
    assert max(map(cell_len, text.split("\n"))) <= width
    assert not re.search(r" $", text, re.MULTILINE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    assert text.isascii() or encoding == "utf-8"


@every_case
@pytest.mark.parametrize("width", [80, 100, 160])
def test_terminal_report_has_forty_lines(result: Result, width: int) -> None:
    """The story fits on a screen, however much there is to tell."""
    assert len(printed(result, width).splitlines()) <= 40


def test_terminal_says_what_to_do_first() -> None:
    """Three findings with points, time and confidence, each with its action; the others are counted."""
    section = next(part for part in printed(result_of()).split("\n\n") if part.startswith("What to do first"))
    assert section.splitlines() == [
        "What to do first   MFU points, ms a step of a rank; 2 more in the other reports",
        " +4.0       25.0  About exposed-comm.fsdp-prefetch  measured",
        "                  do exposed-comm.fsdp-prefetch",
        " +3.8       24.0  About recompute.full  measured",
        "                  do recompute.full",
        " +3.5       22.0  About pipeline.micro-batches  estimated",
        "                  do pipeline.micro-batches",
    ]
    assert "+4.0" not in printed(result_of(mfu=False))


def test_terminal_names_culprits_in_a_line_each() -> None:
    """As much evidence as fits stands beside the numbers; no section without culprits or slow links."""
    wide, narrow = printed(result_of(), 160), printed(result_of(), 80)
    assert "   1  host pause      6.000  3.0 %        +0.9  garbage collection, 30.0 ms" in wide
    assert "+0.9  garbage collection, 30.0 ms mor…\n" in narrow
    assert "120.0 ms in all" not in wide  # the slow link is evidence
    unblamed = printed(result_of() | {"stragglers": []})
    assert "Slow links\n  mesh_tp [2, 3]: all reduce 2.00x its peers', 120.0 ms in all" in unblamed
    assert "made the others wait" not in printed(result_of(1))


def test_terminal_tells_how_far_ranks_are_apart() -> None:
    """The best and the worst rank are named where they differ; in results_of, later ranks achieve less."""
    assert "Ranks: 24.5 % (rank 7) to 31.5 % (rank 0)" in printed(result_of(), 200)
    assert "Ranks:" not in printed(result_of(1))


def test_terminal_without_findings_names_calls_only_where_host_gaps_matter() -> None:
    """From two percent of the step time on; recompute and kernels have a line each."""
    result = result_of() | {"findings": []}
    section = printed(result).split("\n\n")[2].splitlines()
    assert section == [
        "Behind the losses",
        "  data loader: _MultiProcessingDataLoaderIter.__next__, 2.5 % in 5 gaps, most on rank 3",
        "  launch-bound: MmBackward0, 1.0 % in 240 gaps, most on rank 2",
        "  recompute 12.0 %, +3.8 points without it: full, non-reentrant, 576 regions",
        "  kernels: work known for 87.0 % of compute; share of the roof: matmul 69.5 %, device copies 80.0 %",
    ]
    result["job"]["buckets"]["host_gap"] = result["job"]["window_ns"] // 51
    assert "MmBackward0" not in printed(result)


def test_markup_in_names_is_text_in_the_terminal() -> None:
    """Neither rich's markup nor an escape sequence of a name has an effect."""
    text = printed(hostile(), 200, terminal_colours=True)
    assert "[red]x[/red]" in text
    assert "\x1b[31m" not in text
