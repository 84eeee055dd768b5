"""Reports are functions of the result: rows first, then what the terminal, the page and the figures make of them."""

import io
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from traceaudit.leaves import Leaf
from traceaudit.report import figures, formats, json_file, rows, sentences, terminal, words
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
    "straggler": {"host_caused": 6, "late_rank": 1, "slow_link": 1, "slow_gpu": 1},
    "host_gap": {"data_loader": 5, "launch_bound": 3, "host_sync": 2},
    "unattributed": {"launch_missing": 1},
}
CULPRITS: list[tuple[int, str, int, Result]] = [  # rank, cause, ms of a step of a rank that it costs, evidence
    (1, "host_pause", 6, {"leaf": "gc", "caused_ns_by_leaf": {"gc": 5, "launch_bound": 1}}),
    (5, "slow_gpu", 1, {"kernels": [{"name": "sm90_xmma_gemm", "ratio": 1.13, "excess_ns": 9}], "slower_share": 0.97}),
    (2, "slow_link", 1, {"links": [{"group": "mesh_tp [2, 3]", "kind": "all_reduce", "ratio": 2.0}]}),
]
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
    group |= {"busbw_gbps": 301.25, "transfer_estimate_ns": None}
    ring = group | {"group": "mesh_tp [0, 1]", "dim": "tp", "kind": "all_reduce", "exposed_ns": 216 * MS}
    ring |= {"busbw_gbps": None, "transfer_estimate_ns": 150 * MS}
    culprits: list[Result] = [
        {"rank": number, "cause": cause, "caused_ns": ms * MS * windows, "share": ms / 200, "own_ns": 30 * MS}
        | {"mfu_points": 100 * (0.28 / (1 - ms / 200) - 0.28) if mfu else None, "evidence": evidence}
        for number, cause, ms, evidence in CULPRITS
        if count > 1
    ]
    slow = {"group": "mesh_tp [2, 3]", "kind": "all_reduce", "bytes": 33_554_432, "count": 960, "ratio": 2.0}
    clock: Result = {"method": "one_host" if count > 1 else "none", "hosts": 1, "residual_ns": 1226}
    clock |= {"residual_p95_ns": 10_712, "violations": 0, "evidence": 28, "clock_free_disagreement": 4979}
    clock |= {"not_aligned": [], "max_drift_ppm": 0.0}
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
        "clock": clock,
        "stragglers": culprits,
        "lateness": [{"rank": own["rank"], "step": steps[0], "ns": own["caused_ns"]} for own in culprits],
        "slow_links": [slow | {"excess_ns": 120 * MS}] if count > 1 else [],
        "collectives": [ring, group],
        "kernels": [flash, gemm],
        "quality": {
            "reliable": reliable,
            "unattributed_share": 0.005 if reliable else 0.041,
            "dropped_events": 12,
            "repaired_files": ["rank3_trace.json.gz"],
            "missing": ["with_stack", "profile_memory"],
            "unmatched_communications": {"partners not traced": 12},
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
    for entry in (*result["kernels"], *result["collectives"], *result["slow_links"]):
        entry.update({name: HOSTILE for name in ("name", "group", "family", "kind", "dim") if name in entry})
    result["model"]["numerator"]["factors"].append({"name": HOSTILE, "value": HOSTILE, "source": HOSTILE})
    for number, culprit in enumerate(result["stragglers"]):
        kernels = [{"name": HOSTILE, "ratio": 1.1, "excess_ns": 1}]
        links = [{"group": HOSTILE, "kind": HOSTILE, "ratio": 2.0}]
        culprit["evidence"] = {"kernels": kernels, "links": links, "leaf": HOSTILE, "slower_share": 0.9}
        culprit["cause"] = HOSTILE if number == 0 else culprit["cause"]
    result["clock"] |= {"method": HOSTILE, "not_aligned": [HOSTILE]}
    result["quality"]["unmatched_communications"][HOSTILE] = 1
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


def test_both_views_of_the_waits_have_the_total_of_the_waterfall() -> None:
    """Where stragglers lost time and who caused it add up to the same row, however few parts are shown."""
    result = result_of()
    total = result["job"]["buckets"]["straggler"]
    for limit in (2, 3, 12):
        lost, caused = rows.where_lost(result, limit), rows.caused_by(result, limit)
        assert sum(part.ns for part in lost) == sum(part.ns for part in caused) == total
        assert max(len(lost), len(caused)) <= limit
    assert [part.title for part in rows.caused_by(result, 12)] == [
        "rank 1: host pause",
        "rank 5: slow GPU",
        "rank 2: slow link",
        "slow GPUs: own excess",
    ]
    assert rows.where_lost(result, 3)[-1].title == "6 other ranks"
    bar = next(row for row in rows.waterfall(result) if row.bucket == "straggler")
    assert sum(part.step_ns for part in rows.caused_by(result, 2)) == pytest.approx(bar.step_ns)


def test_tiny_parts_share_a_row() -> None:
    """Causes far below the largest are counted, not listed."""
    result = result_of()
    result["stragglers"] += [result["stragglers"][2] | {"rank": rank, "caused_ns": 1000} for rank in (6, 7)]
    assert rows.caused_by(result, 12)[-1].title == "2 other causes"
    assert rows.caused_by(result, 12)[-1].ns == 2000


def test_culprits_say_what_they_cost_and_why() -> None:
    """Waits are means in a step of any rank, the culprit's own excess is in a step of its own."""
    first, *_ = found = rows.culprits(result_of())
    assert [(row.rank, row.title) for row in found] == [(1, "host pause"), (5, "slow GPU"), (2, "slow link")]
    assert (first.caused_step_ns, first.own_step_ns, first.share) == (6 * MS, 10 * MS, 0.03)
    assert first.mfu_points == pytest.approx(28 * (1 / 0.97 - 1))
    assert rows.culprits(result_of(mfu=False))[0].mfu_points is None
    assert rows.culprits(result_of(1)) == []


@pytest.mark.parametrize(
    ("culprit", "text"),
    [
        (CULPRITS[0], "garbage collection, 30.0 ms more than its peers in 3 steps"),
        (CULPRITS[1], "97.0 % of its kernel time slower, by 30.0 ms in 3 steps, most in sm90_xmma_gemm (1.13x)"),
        (CULPRITS[2], "mesh_tp [2, 3]: all reduce 2.00x its peers'"),
        (
            (0, "host_pause", 1, {"leaf": "gc", "caused_ns_by_leaf": {"gc": 5, "launch_bound": 4, "compile": 1}}),
            "garbage collection, 30.0 ms more than its peers in 3 steps; also launch-bound",
        ),
        (
            (0, "slow_kernels", 1, {"kernels": [{"name": "void ns::f<int>(int)", "ratio": 1.2}]}),
            "30.0 ms slower in 3 steps, most in f (1.20x)",
        ),
        ((0, "more_work", 1, {}), "30.0 ms more kernel time than its peers in 3 steps"),
        ((0, "slow_link", 1, {"links": []}), ""),
        ((0, "jitter", 1, {}), ""),
        ((0, "moonlight", 1, {}), ""),
    ],
)
def test_evidence_fits_its_cause(culprit: tuple[int, str, int, Result], text: str) -> None:
    """Each cause has its own sentence; where the trace shows nothing there is none."""
    rank, cause, _, evidence = culprit
    assert sentences.evidence({"rank": rank, "cause": cause, "own_ns": 30 * MS, "evidence": evidence}, 3) == text


def test_lateness_has_every_rank_and_step() -> None:
    """Ranks that nobody waited for have a row of zeros."""
    late = rows.lateness(result_of())
    assert (late.ranks, late.steps) == (tuple(range(8)), (3, 4, 5))
    assert (sum(map(sum, late.ns)), late.ns[1][0]) == (8 * 24 * MS, 6 * 24 * MS)
    assert late.worst_first == [1, 2, 5]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {},
            "one host: clocks are shared; collectives end within 1.2 µs (median; p95 10.7 µs), none before its last "
            "participant arrived; waits by clocks and by durations alone differ by 5.0 µs (median)",
        ),
        (
            {"method": "collective_ends", "hosts": 2, "violations": 3, "max_drift_ppm": 2.34, "residual_p95_ns": 0}
            | {"clock_free_disagreement": None},
            "the clocks of 2 hosts are aligned on the ends of 28 collectives; collectives end together, 3 before its "
            "last participant arrived; clocks drift by up to 2.3 ppm",
        ),
        (
            {"method": "none", "hosts": 2, "evidence": 0, "clock_free_disagreement": None},
            "the clocks of 2 hosts could not be aligned: between hosts, waits are told from durations alone, and each "
            "rank's last step ends by itself",
        ),
    ],
)
def test_clocks_are_described(changed: Result, text: str) -> None:
    """One sentence has the method, how well it fits and what breaks it; without alignment it is a warning."""
    result = result_of()
    result["clock"] |= changed
    remark = next(row for row in rows.quality(result) if row.text == text)
    assert remark.is_warning == (result["clock"]["method"] == "none")
    assert "Clocks" in [fact.name for fact in rows.facts(result)]


def test_hosts_that_no_evidence_ties_are_named() -> None:
    """Up to eight by name, the others by number; a single rank has no clocks to compare."""
    result = result_of()
    result["clock"] |= {"method": "collective_ends", "hosts": 11, "not_aligned": [f"n{host}" for host in range(10)]}
    warnings = [row.text for row in rows.quality(result) if row.is_warning]
    assert "clocks not aligned with the first host's: n0, n1, n2, n3, n4, n5, n6, n7 and 2 others" in warnings
    assert not [row for row in rows.quality(result_of(1)) if "clock" in row.text]


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


@pytest.mark.parametrize(
    ("cause", "straggler_ms", "caused_ms", "named"),
    [
        ("host_pause", 30, 20, "stragglers (15.0 %, mostly rank 1: host pause)"),
        ("host_pause", 30, 14, "stragglers (15.0 %)"),  # less than half
        ("host_pause", 3, 3, None),  # too little to matter
        ("slow_gpu", 30, 15, "stragglers (15.0 %, mostly rank 1: slow GPU)"),  # half of the waits: one is its own
    ],
)
def test_headline_names_the_rank_behind_most_waits(
    cause: str, straggler_ms: int, caused_ms: int, named: str | None
) -> None:
    """Stragglers of two percent and more are named by the culprit of at least half of the waits."""
    result = result_of()
    result["job"]["buckets"]["straggler"] = straggler_ms * MS * 24
    row = next(row for row in result["job"]["waterfall"] if row["row"] == "straggler")
    row["share"] = -straggler_ms / 200
    result["job"]["leaves"] = [{"bucket": "straggler", "leaf": "slow_gpu", "ns": MS * 24, "share": 0.005}]
    result["job"]["leaves"] += [{"bucket": "straggler", "leaf": "jitter", "ns": MS, "share": 0.0}]
    result["stragglers"] = [result["stragglers"][0] | {"cause": cause, "caused_ns": caused_ms * MS * 24}]
    assert (named or "mostly rank") in rows.headline(result) or named is None
    assert ("mostly rank" in rows.headline(result)) == bool(named and "mostly rank" in named)


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
    assert (rows.culprits(bare), rows.slow_links(bare), rows.lateness(bare).ranks) == ([], [], ())
    assert rows.caused_by(bare, 12) == [rows.PartRow("slow GPUs: own excess", 24 * MS, 0.005, MS)]
    assert rows.quality(bare) == []
    assert "Ranks" not in printed(bare)
    assert not re.search("<h2[^>]*>(Ranks|Stragglers|Kernels|Collectives|How|Why|Before)", to_html(bare))


def test_rows_are_in_the_order_of_what_they_cost() -> None:
    """Collectives by exposure, kernels by time, ranks by what they achieve."""
    result = result_of(20)
    assert [row.dim for row in rows.collectives(result)] == ["fsdp", "tp"]
    assert [row.busbw_gbps for row in rows.collectives(result)] == [301.25, None]
    assert [row.transfer_estimate_ns for row in rows.collectives(result)] == [None, 150 * MS]
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
    assert words.cause_title("solar_flare") == "solar flare"


def test_every_leaf_of_the_attribution_has_words() -> None:
    """Each leaf is described in its bucket, and no title of a bucket's leaves occurs twice."""
    for leaf in Leaf:
        assert leaf.label in words.BUCKETS[leaf.bucket].leaves
    for bucket in words.BUCKETS.values():
        assert len({leaf.title for leaf in bucket.leaves.values()}) == len(bucket.leaves)
    for same in ("slow_gpu", "slow_link", "jitter"):
        assert words.CAUSES[same].title == words.BUCKETS["straggler"].leaves[same].title


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
    """Eight ranks with leaves in all buckets, culprits and ten remarks take about 70 lines; so do many ranks."""
    assert len(printed(result_of()).splitlines()) <= 72
    assert len(printed(result_of(80)).splitlines()) <= 72
    assert "… 72 more" in printed(result_of(80))


def test_terminal_names_culprits_with_evidence_where_it_fits() -> None:
    """Beside the numbers on a wide console, below them on a narrow one; no section without culprits or slow links."""
    wide, narrow = printed(result_of(), 160), printed(result_of(), 70)
    assert "   1  host pause      6.000  3.0 %        +0.9  garbage collection, 30.0 ms" in wide
    assert "\n      garbage collection, 30.0 ms more than its peers in 3 steps\n" in narrow
    assert "120.0 ms in all" not in wide  # the slow link is evidence
    unblamed = printed(result_of() | {"stragglers": []})
    assert "Slow links\n  slow link: mesh_tp [2, 3]: all reduce 2.00x its peers', 120.0 ms in all" in unblamed
    assert "MFU points" not in printed(result_of(mfu=False))
    assert "made the others wait" not in printed(result_of(1))


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
    assert ('<h2 id="stragglers">' in page) == bool(result["stragglers"])
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert len(page) < 1_000_000


def test_page_of_many_ranks_stays_small() -> None:
    """Above its limit the embedded result leaves single steps out, and the page says so."""
    result = result_of(1024, range(6))
    result["lateness"] = [{"rank": rank, "step": step, "ns": MS} for rank in range(1024) for step in range(6)]
    page = to_html(result)
    assert "single steps are left out" in page
    assert len(page) < 1_000_000


@every_case
def test_figures_are_reproducible(result: Result) -> None:
    """The same result gives the same SVG, whose text is text."""
    for draw, text in (
        (figures.waterfall, "pipeline bubbles"),
        (figures.ranks, "pipeline bubbles"),
        (figures.heatmap, "ms that others waited"),
    ):
        first, second = (figures.svg(draw(result)) for _ in range(2))
        assert first == second
        assert text in first
        assert "<dc:date>" not in first
    assert figures.png(figures.waterfall(result), dpi=30).startswith(b"\x89PNG")


def test_figure_draws_on_axes_it_is_given() -> None:
    """A notebook can place a figure in its own."""
    from matplotlib.figure import Figure

    left, middle, right = Figure().subplots(1, 3)
    assert figures.waterfall(result_of(), left) is left
    assert figures.ranks(result_of(), middle) is middle
    assert figures.heatmap(result_of(), right) is right


@pytest.mark.parametrize(("count", "labels"), [(8, [f"rank {rank}" for rank in range(8)]), (300, ["rank 1"])])
def test_heat_map_names_all_of_few_ranks_and_the_worst_of_many(count: int, labels: list[str]) -> None:
    """A rank whose label would touch that of a worse one has none; cells of few ranks have their numbers."""
    axes = figures.heatmap(result_of(count))
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert bool(axes.texts) == (count == 8)
    (image,) = axes.images
    assert np.asarray(image.get_array()).max() == pytest.approx(6 * 3 * count)  # ms: all that rank 1 caused
    assert image.get_cmap().name == "cividis"


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
        (formats.duration(99_960), "100 µs"),
        (formats.duration(999_600), "1.0 ms"),
        (formats.kernel_title("void <unnamed>::f<g>(h)"), "f"),
        (formats.kernel_title("(lambda)"), "(lambda)"),
        (formats.numbers([7, 5, 6, 1]), "1, 5 to 7"),
        (formats.clean("a\u202eb\x00c"), "a\ufffdb\ufffdc"),
        (terminal.bar(0.5, 0.5001, 4), "  ▌ "),
        (terminal.bar(1.0, 0.9999, 4), "   ▐"),
    ],
)
def test_formats(written: str, expected: str) -> None:
    """Numbers, foreign text and bars are written as expected."""
    assert written == expected
