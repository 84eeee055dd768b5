"""Reports are functions of the result: rows first, then what the terminal, the page and the figures make of them."""

import io
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import pytest
from rich.cells import cell_len
from rich.console import Console

from traceaudit.report import figures, formats, json_file, rows, terminal, words
from traceaudit.report.html import to_html

Result = dict[str, Any]
MS = 1_000_000
HOSTILE = "</script><img src=x onerror=alert(1)>[red]x[/red] \x1b[31m Größe 漢字 \u202e" + "very_long_" * 60
LEAVES = {  # ms of a step of one rank of 200 ms
    "achieved": {"model_flops": 56},
    "sub_roofline": {"matmul": 18, "attention": 11, "elementwise": 6, "norm": 1},
    "exposed_comm": {"fsdp": 25, "tp": 9, "pp": 2},
    "pipeline_bubble": {"warmup_drain": 22, "stage_imbalance": 6},
    "recompute": {"kernels": 24},
    "straggler": {"late_rank": 8, "jitter": 1},
    "host_gap": {"data_loader": 5, "launch_bound": 3, "host_sync": 2},
    "unattributed": {"launch_missing": 1},
}
SKEW = {"achieved": -1, "straggler": 1}  # ms times (rank - mean rank): later ranks achieve less


def result_of(count: int = 8, steps: Sequence[int] = (3, 4, 5), mfu: bool = True, reliable: bool = True) -> Result:
    """Return the result of a job whose every number follows from the tables above by adding and multiplying."""
    means = {bucket: sum(parts.values()) for bucket, parts in LEAVES.items()}
    parts = dict(LEAVES)
    if not mfu:
        parts |= {"achieved": {}, "sub_roofline": {"not_split": means["achieved"] + means["sub_roofline"]}}
        means |= {"achieved": 0, "sub_roofline": means["achieved"] + means["sub_roofline"]}
    windows, step_ns = count * len(steps), 200 * MS
    window = windows * step_ns

    def rank(number: int) -> Result:
        skew = dict.fromkeys(means, 0)
        if mfu:
            skew |= {name: round(sign * 8 * MS * (2 * number - count + 1) / count) for name, sign in SKEW.items()}
        each = {bucket: ms * MS + skew[bucket] for bucket, ms in means.items()}
        in_steps = [{"step": step, "window_ns": step_ns, "buckets": each} for step in steps]
        total = {bucket: ns * len(steps) for bucket, ns in each.items()}
        about: Result = {"rank": number, "host": f"node{number // 8:02}", "file": f"rank{number}_trace.json.gz"}
        about |= {"stage": number * 2 // count, "clock_offset_ns": 0, "reliable": True}
        comm = {"busy_ns": 150 * MS, "comm_ns": 80 * MS, "overlapped_comm_ns": 32 * MS}
        return about | {"steps": in_steps, "buckets": total, "window_ns": step_ns * len(steps)} | comm

    losses = [name for name in means if name != "achieved" and (mfu or name != "sub_roofline")]
    waterfall: list[Result] = [{"row": "peak", "share": 1.0}]
    waterfall += [{"row": name, "share": -means[name] / 200} for name in losses]
    last: Result = {"row": "mfu", "share": means["achieved"] / 200} if mfu else {"row": "compute"}
    waterfall.append({"share": means["sub_roofline"] / 200} | last)
    leaves = [
        {"bucket": bucket, "leaf": leaf, "ns": ms * MS * windows, "share": ms / 200}
        for bucket, inside in parts.items()
        for leaf, ms in inside.items()
    ]
    factors: list[Result] = [{"name": "params", "value": 7e10, "source": "run.json"}]
    factors.append({"name": "tokens per step", "value": 4194304, "source": "declared"})
    numerator: Result = {"source": "declared", "formula": "6·params·tokens", "flops_per_step": 1.7616e18}
    numerator |= {"attention_flops": False, "factors": factors}
    peak = {"tflops": 989.4, "dtype": "bf16", "gpu": "NVIDIA H100 80GB HBM3", "source": "NVIDIA H100 datasheet, dense"}
    group: Result = {"group": "mesh_fsdp [0, 1, 2, 3]", "dim": "fsdp", "kind": "all_gather", "count": 960}
    group |= {"bytes": 412 * 10**9, "transfer_ns": 900 * MS, "wait_ns": 120 * MS, "exposed_ns": 600 * MS}
    ring = group | {"group": "mesh_tp [0, 1]", "dim": "tp", "kind": "all_reduce", "exposed_ns": 216 * MS}
    gemm: Result = {
        "name": "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
        "family": "matmul",
        "kind": "compute",
        "count": 7680,
    }
    gemm |= {"ns": 1600 * MS, "flops": 1.1e15}
    flash: Result = {"name": "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "family": "attention"}
    flash |= {"kind": "compute", "count": 1920, "ns": 420 * MS, "flops": None}
    return {
        "schema_version": 1,
        "traceaudit_version": "0.1.0",
        "source": "runs/llama-70b/traces/iteration_5",
        "job": {
            "ranks_traced": count,
            "world_size": max(count, 8),
            "steps": list(steps),
            "window_ns": window,
            "step_ns_median": step_ns,
            "mfu": means["achieved"] / 200 if mfu else None,
            "hfu": 0.345 if mfu else None,
            "gpu": "NVIDIA H100 80GB HBM3",
            "buckets": {bucket: ms * MS * windows for bucket, ms in means.items()},
            "leaves": leaves,
            "waterfall": waterfall,
            "comm_ns": 80 * MS * windows,
            "overlapped_comm_ns": 32 * MS * windows,
        },
        "ranks": [rank(number) for number in range(count)],
        "model": {
            "split": mfu,
            "reason": None if mfu else "no model FLOPs: pass --params and --tokens-per-step, or record shapes",
            "peak": peak if mfu else None,
            "numerator": numerator if mfu else {"source": None},
            "declared_flops_per_step": 1.7616e18 if mfu else None,
            "counted_flops_per_step": 1.83e18 if mfu else None,
        },
        "clock": {"method": "none", "note": "raw clocks: each rank's last step ends by itself"},
        "collectives": [ring, group],
        "kernels": [flash, gemm],
        "quality": {
            "reliable": reliable,
            "unattributed_share": 0.005 if reliable else 0.041,
            "dropped_events": 12,
            "repaired_files": ["rank3_trace.json.gz"],
            "missing": ["with_stack", "profile_memory"],
            "warnings": ["rank 3: the file ends in the middle of an event"],
            "notes": ["the first step began before rank 2 was recorded"],
            "steps_left_out": [{"rank": rank, "step": 2, "reason": "cut by the profiler"} for rank in (0, 1, 2, 5)],
            "skipped_files": [{"file": "notes.json", "reason": "not a trace"}],
        },
    }


def hostile() -> Result:
    """Return a result in which every text from outside tries to be more than text."""
    result = result_of()
    result["source"] = HOSTILE
    result["job"]["gpu"] = HOSTILE
    for entry in result["ranks"]:
        entry |= {"host": HOSTILE, "file": HOSTILE}
    for entry in (*result["kernels"], *result["collectives"]):
        entry.update({name: HOSTILE for name in ("name", "group", "family", "kind", "dim") if name in entry})
    result["model"]["numerator"]["factors"].append({"name": HOSTILE, "value": HOSTILE, "source": HOSTILE})
    result["quality"]["warnings"].append(HOSTILE)
    result["job"]["leaves"].append({"bucket": "host_gap", "leaf": HOSTILE, "ns": MS, "share": 0.01})
    return result


def printed(result: Result, width: int = 100, encoding: str = "utf-8", terminal_colours: bool = False) -> str:
    """Return what the terminal report writes into a stream of an encoding."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    colours: Literal["truecolor", "auto"] = "truecolor" if terminal_colours else "auto"
    console = Console(file=stream, width=width, force_terminal=terminal_colours, color_system=colours)
    terminal.print_report(result, console)
    stream.flush()
    return raw.getvalue().decode(encoding)


CASES = {
    "usual": result_of(),
    "no MFU": result_of(mfu=False),
    "unreliable": result_of(reliable=False),
    "one rank": result_of(1),
    "many ranks": result_of(80),
    "hostile": hostile(),
}
every_case = pytest.mark.parametrize("result", CASES.values(), ids=CASES.keys())


@pytest.mark.parametrize("mfu", [True, False])
def test_bars_chain_from_100_percent_to_what_is_left(mfu: bool) -> None:
    """Each loss starts where the bar before it ended, and the last one ends at the last level."""
    first, *losses, last = rows.waterfall(result_of(mfu=mfu))
    assert (first.start, first.end, first.is_level, last.is_level) == (0.0, 1.0, True, True)
    for before, row in zip([first, *losses], losses, strict=False):
        assert row.start == before.end
        assert row.start - row.end == pytest.approx(row.share)
    assert losses[-1].end == pytest.approx(last.end)
    assert last.row == ("mfu" if mfu else "compute")


@pytest.mark.parametrize("mfu", [True, False])
def test_shares_add_up(mfu: bool) -> None:
    """Losses and what is left are 100 %, for the job and for each rank; leaves are their bucket."""
    result = result_of(mfu=mfu)
    _, *bars = rows.waterfall(result)
    assert sum(row.share for row in bars) == pytest.approx(1)
    assert sum(row.step_ns for row in bars) == pytest.approx(200 * MS)
    for row in bars[:-1]:
        assert sum(leaf.share for leaf in row.leaves) == pytest.approx(row.share)
    for rank in rows.ranks(result):
        assert sum(rank.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (
            result_of(),
            "28.0 % MFU on 8 of 8 ranks, 3 steps: the largest losses are sub-roofline kernels (18.0 %, mostly matmul), "
            "exposed communication (18.0 %, mostly FSDP) and pipeline bubbles (14.0 %, mostly warm-up and drain).",
        ),
        (
            result_of(1, [7], mfu=False),
            "MFU unknown, compute takes 46.0 % of the step time on 1 of 8 ranks, 1 step: the largest losses are "
            "exposed communication (18.0 %, mostly FSDP), pipeline bubbles (14.0 %, mostly warm-up and drain) and "
            "recompute (12.0 %).",
        ),
    ],
)
def test_headline_names_the_number_and_the_largest_losses(result: Result, sentence: str) -> None:
    """One sentence has the number, what was measured, and up to three losses."""
    assert rows.headline(result) == sentence


def test_headline_says_first_that_it_cannot_be_trusted() -> None:
    """An unreliable result begins with that, and why."""
    start = "Attribution not reliable (4.1 % of the time is unattributed): 28.0 % MFU on 8 of 8 ranks"
    assert rows.headline(result_of(reliable=False)).startswith(start)


def test_a_job_without_losses_has_none_in_its_headline() -> None:
    """Nothing is named a loss that is below one percent."""
    result = result_of()
    result["job"] |= {
        "mfu": 1.0,
        "leaves": [],
        "waterfall": [{"row": "peak", "share": 1.0}, {"row": "mfu", "share": 1}],
    }
    assert rows.headline(result) == "100.0 % MFU on 8 of 8 ranks, 3 steps."


def test_bare_result_has_no_rows_for_what_it_does_not_hold() -> None:
    """What a result does not say is not shown, by any report."""
    bare = {"job": result_of()["job"]}
    assert (rows.ranks(bare), rows.kernels(bare), rows.collectives(bare), rows.model(bare)) == ([], [], [], [])
    assert rows.quality(bare) == []
    assert "Ranks" not in printed(bare)
    assert not re.search("<h2[^>]*>(Ranks|Kernels|Collectives|How|Why|Before)", to_html(bare))


def test_rows_are_in_the_order_of_what_they_cost() -> None:
    """Collectives by exposure, kernels by time, ranks by what they achieve."""
    result = result_of(20)
    assert [row.dim for row in rows.collectives(result)] == ["fsdp", "tp"]
    assert [row.family for row in rows.kernels(result)] == ["matmul", "attention"]
    assert rows.kernels(result)[0].flop_per_s == pytest.approx(1.1e15 / 1.6)
    assert [row.rank for row in rows.worst_ranks(result, 3)] == [19, 18, 17]


def test_quality_lists_warnings_before_notes_and_joins_ranks() -> None:
    """The same step left out on several ranks is one remark."""
    remarks = rows.quality(result_of())
    assert [row.is_warning for row in remarks] == sorted((row.is_warning for row in remarks), reverse=True)
    assert "step 2 left out on ranks 0 to 2, 5: cut by the profiler" in [row.text for row in remarks]


def test_unknown_bucket_and_leaf_keep_their_own_names() -> None:
    """A result of a later version is still readable."""
    assert words.bucket_words("cosmic_rays").title == "cosmic rays"
    assert words.leaf_title("host_gap", "coffee_break") == "coffee break"


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


def test_terminal_report_is_about_a_screen() -> None:
    """Eight ranks take fewer than sixty lines with a leaf in every bucket, and so do many ranks."""
    assert len(printed(result_of()).splitlines()) < 60
    assert len(printed(result_of(80)).splitlines()) < 60
    assert "… 72 more" in printed(result_of(80))


def test_markup_in_names_is_text_in_the_terminal() -> None:
    """Neither rich's markup nor an escape sequence of a name has an effect."""
    text = printed(hostile(), 200, terminal_colours=True)
    assert "[red]x[/red]" in text
    assert "\x1b[31m" not in text


@every_case
def test_page_is_one_inert_file(result: Result) -> None:
    """The page holds the result, runs nothing, opens no tag of a name, and is the same each time."""
    page = to_html(result)
    assert page == to_html(deepcopy(result))
    data = re.findall(r'<script type="application/json" id="traceaudit-result">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data[0]) == result
    assert page.count("<script") == page.count("<h1>") == page.count("<main>") == 1
    assert "<img src=x" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert len(page) < 1_000_000


def test_page_of_many_ranks_stays_small() -> None:
    """Above its limit the embedded result leaves single steps out, and the page says so."""
    result = result_of(1024, range(6))
    page = to_html(result)
    assert "single steps are left out" in page
    assert len(page) < 1_000_000


@every_case
def test_figures_are_reproducible(result: Result) -> None:
    """The same result gives the same SVG, whose text is text."""
    for draw in (figures.waterfall, figures.ranks):
        first, second = (figures.svg(draw(result)) for _ in range(2))
        assert first == second
        assert "pipeline bubbles" in first
        assert "<dc:date>" not in first
    assert figures.png(figures.waterfall(result), dpi=30).startswith(b"\x89PNG")


def test_figure_draws_on_axes_it_is_given() -> None:
    """A notebook can place a figure in its own."""
    from matplotlib.figure import Figure

    left, right = Figure().subplots(1, 2)
    assert figures.waterfall(result_of(), left) is left
    assert figures.ranks(result_of(), right) is right


def test_json_keeps_order_and_survives_bad_file_names() -> None:
    """The file parses back to the result, in its order; an undecodable name costs one character, not the file."""
    result = result_of()
    data = json_file.to_json(result)
    assert list(json.loads(data)) == list(result)
    assert json.loads(data) == result
    assert json.loads(json_file.to_json({"file": "rank\udcff.json"})) == {"file": "rank?.json"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formats.percent(-0.0), "0.0 %"),
        (formats.percent(1), "100.0 %"),
        (formats.percent(0.0004), "<0.1 %"),
        (formats.milliseconds(1_234_567), "1.235 ms"),
        (formats.quantity(1_234_000, "B"), "1.23 MB"),
        (formats.numbers([]), ""),
        (formats.numbers([7, 5, 6, 1]), "1, 5 to 7"),
        (formats.clean("a\u202eb\x00c"), "a\ufffdb\ufffdc"),
        (terminal.bar(0.5, 0.5001, 4), "  ▌ "),
        (terminal.bar(1.0, 0.9999, 4), "   ▐"),
    ],
)
def test_formats(written: str, expected: str) -> None:
    """Numbers, foreign text and bars are written as expected."""
    assert written == expected
