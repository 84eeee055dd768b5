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
from traceaudit.report import behind, figures, formats, json_file, rows, sentences, terminal, words
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
BEHIND: Result = {  # what stands behind host gaps, recompute and kernels
    "host_gaps": [
        {"leaf": "launch_bound", "call": "autograd::engine::evaluate_function: MmBackward0", "inside": ""}
        | {"ns": 48 * MS, "count": 240, "longest_ns": 300_000, "rank": 2, "ranks": 8},
        {"leaf": "data_loader", "call": "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"}
        | {"inside": "## forward ##", "ns": 120 * MS, "count": 5, "longest_ns": 20 * MS, "rank": 3, "ranks": 4},
        {"leaf": "not_started", "call": "", "inside": "", "ns": 0, "count": 1, "longest_ns": 0, "rank": 0, "ranks": 1},
    ],
    "host_facts": {
        "data_loader": {"gap_ns": 120 * MS, "count": 5, "slow": "workers, copy", "input_copy_ns": 2 * MS}
        | {"copies": {"pageable": {"count": 1, "bytes": 1_000_000, "ns": MS}}},
        "checkpoint": {"gap_ns": 30 * MS, "bursts": 3, "bursts_asynchronous": 2, "burst_bytes": 4_000_000_000},
        "gc": {"gap_ns": 5 * MS, "count": 1, "ns": 6 * MS},
        "compile": {"gap_ns": 0, "count": 0, "ns": 0},
        "allocator": {"gap_ns": 0, "allocations": 12, "frees": 1, "allocations_in_steady_steps": 2, "retries": 1}
        | {"frees_in_steady_steps": 0, "reserved_peak_bytes": 70_000_000_000, "unused_share_at_peak": 0.125},
        "host_sync": {"gap_ns": 48 * MS, "count": 44, "ns": 90 * MS, "per_step": 11.0},
        "launch_bound": {"gap_ns": 48 * MS, "cuda_graphs_would_win_ns": 96 * MS, "tokens_per_step": 65536.0},
        "optimizer": {"steps": 24, "kernels_per_step": 1.0, "style": "fused, loop"},
        "unattributed": {"no launch record": MS, "launched, and nothing recorded ran": 4 * MS},
        "moonlight": {"gap_ns": 7},
    },
    "throughput": {
        "kernels_per_step": 685.0,
        "kernels_per_ms": 1.6,
        "kernel_ns_median": 309_000.0,
        "launch_interval_ns_median": 618_000.0,
        "queue_depth_mean": 766.87,
        "queue_depth_max": 2052,
        "queue_empty_share": 0.007,
        "launch_delay_ns": {"p50": 447_000.0, "p90": 900_000.0, "p99": 989_500.0},
    },
    "recompute": {
        "rule": 1,
        "kernels_ns": 570 * MS,
        "communication_ns": 6 * MS,
        "share": 0.12,
        "mfu_points": 3.8,
        "setting": "full",
        "forward_share": 0.95,
        "flavour": "non_reentrant",
        "regions": 576,
        "modules": [f"layers.{number}" for number in range(14)],
        "suspected": {"rule": 3, "reason": "operators that only a forward calls", "share": 0.02, "mfu_points": 0.6},
    },
    "roofline": {
        "coverage": 0.87,
        "hbm_gbps": 3350.0,
        "families": [
            {"family": "device_copy", "ns": MS, "roofline_share": 0.8},
            {"family": "matmul", "ns": 1600 * MS, "roofline_share": 0.695},
            {"family": "attention", "ns": 420 * MS, "roofline_share": None},
        ],
        "matrix_units": {"used_ns": 1500 * MS, "not_used_ns": 100 * MS, "unknown_ns": 0},
        "unfused": [{"what": "attention", "evidence": "softmax", "count": 8, "ns": MS, "kernels": ["softmax"]}],
    },
}


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
    gemm |= {"ns": 1600 * MS, "flops": 1.1e15, "bytes": 1.6e12, "known_share": 1.0, "roofline_share": 0.695}
    gemm |= {"bound": "compute", "headroom": 0.1, "short_name": "nvjet_hsh_128x256_64x4"}
    flash: Result = {"name": "flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "family": "attention"}
    flash |= {"kind": "compute", "count": 1920, "ns": 420 * MS, "flops": None, "bound": "unknown"}
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
        **deepcopy(BEHIND),
        "quality": {
            "reliable": reliable,
            "unattributed_share": 0.005 if reliable else 0.041,
            "dropped_events": 12,
            "repaired_files": ["rank3_trace.json.gz"],
            "missing": ["with_stack", "profile_memory"],
            "unmatched_communications": {"partners not traced": 12},
            "warnings": ["rank 3: the file ends in the middle of an event"],
            "notes": ["the first step began before rank 2 was recorded"],
            "profiler_overhead": {"measured_step_ns": 200 * MS, "declared_step_ns": 160 * MS, "source": "run.json"},
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
        entry.update(
            {name: HOSTILE for name in ("name", "short_name", "group", "family", "kind", "dim") if name in entry}
        )
    for entry in result["kernels"]:
        entry |= {"bound": HOSTILE, "flops": 1e12, "bytes": 1e9, "headroom": 0.1}
    for entry in result["host_gaps"]:
        entry |= {"leaf": HOSTILE, "call": HOSTILE, "inside": HOSTILE}
    result["host_facts"]["unattributed"][HOSTILE] = MS
    result["host_facts"]["optimizer"]["style"] = result["host_facts"]["data_loader"]["slow"] = HOSTILE
    result["recompute"] |= {"setting": HOSTILE, "flavour": HOSTILE, "modules": [HOSTILE], "rule": 99}
    result["recompute"]["suspected"]["reason"] = HOSTILE
    result["roofline"]["families"].append({"family": HOSTILE, "ns": MS, "roofline_share": 0.5})
    result["roofline"]["unfused"][0] |= {"what": HOSTILE, "evidence": HOSTILE}
    result["model"]["peak"] |= {"dtype": HOSTILE, "mixed": {HOSTILE: {"share": 0.5, "tflops": 1e3}}}
    result["quality"]["profiler_overhead"]["source"] = HOSTILE
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


def test_mixed_peak_is_named() -> None:
    """MFU of several element types says so, and each has its peak."""
    result = result_of()
    result["job"]["mixed_peak"] = True
    result["model"]["peak"]["mixed"] = {
        "bf16": {"share": 0.75, "tflops": 989.4},
        "fp8": {"share": 0.25, "tflops": 1978.9},
    }
    assert rows.headline(result).startswith("28.0 % MFU of mixed peak on 8 of 8 ranks")
    fact = next(fact for fact in rows.model(result) if fact.name == "MFU of mixed peak")
    assert fact.source == "bf16 989.4 TFLOP/s (75.0 %), fp8 1,978.9 TFLOP/s (25.0 %)"


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
    assert (behind.host_gaps(bare), behind.host_facts(bare), behind.throughput(bare)) == ([], [], [])
    assert (behind.recompute(bare), behind.kernel_facts(bare), behind.roofline(bare)) == (None, [], None)
    assert not re.search("Ranks|Behind", printed(bare))
    assert not re.search(
        "<h2[^>]*>(Ranks|Stragglers|Host gaps|Recompute|Kernels|Collectives|How|Why|Before)", to_html(bare)
    )


def test_rows_are_in_the_order_of_what_they_cost() -> None:
    """Collectives by exposure, kernels by time, ranks by what they achieve."""
    result = result_of(20)
    assert [row.dim for row in rows.collectives(result)] == ["fsdp", "tp"]
    assert [row.busbw_gbps for row in rows.collectives(result)] == [301.25, None]
    assert [row.transfer_estimate_ns for row in rows.collectives(result)] == [None, 150 * MS]
    assert [row.family for row in rows.kernels(result)] == ["matmul", "attention"]
    assert rows.kernels(result)[0].flop_per_s == pytest.approx(1.1e15 / 1.6)
    assert [gap.rank for gap in behind.host_gaps(result)] == [3, 2]
    assert [row.rank for row in rows.worst_ranks(result, 3)] == [19, 18, 17]


def test_gaps_are_named_by_call_place_and_rank() -> None:
    """Wrappers and marks around a name go, the whole name stays beside it; what idled nobody has no row."""
    first, second = behind.host_gaps(result_of())
    assert (first.title, first.call, first.where) == (
        "data loader",
        "_MultiProcessingDataLoaderIter.__next__",
        "forward",
    )
    assert (first.ns, first.share, first.count, first.longest_ns) == (120 * MS, 0.025, 5, 20 * MS)
    assert (second.title, second.call, second.where) == ("launch-bound", "MmBackward0", "")
    assert second.full_call == "autograd::engine::evaluate_function: MmBackward0"
    assert words.gap_title("not_started") == "launched, not started"
    assert words.gap_title("coffee_break") == "coffee break"


def test_each_cause_of_host_gaps_has_its_facts_in_a_line() -> None:
    """Causes without facts, and those of a later version, have no line."""
    assert {fact.name: fact.value for fact in behind.host_facts(result_of())} == {
        "Data loader": "the loader's workers are slow and copies of inputs are slow; the GPU waited 120.0 ms for "
        "batches; 2.0 ms for copies of inputs; 1 copy from pageable memory (1.00 MB)",
        "Checkpoint": "the GPU waited 30.0 ms; 3 runs of copies to the host of 4.00 GB, 2 asynchronous",
        "Garbage collection": "1 collection of 6.0 ms; the GPU waited 5.0 ms",
        "Allocator": "12 allocations and 1 free by the driver, 2 of them after the first step, where none is needed; "
        "1 retry after memory ran out; 70.00 GB reserved at the peak, 12.5 % of it unused (fragmentation)",
        "Host syncs": "44 waits of the host for the GPU (11.0 a step of the rank with most), which idled 48.0 ms "
        "behind them",
        "Launch-bound": "the GPU waited 48.0 ms for launches; CUDA graphs would win at most 96.0 ms, 2.0 % of the "
        "step time; 65,536 tokens a step",
        "Optimizer": "fused and loop, 1 kernel a step",
        "Unattributed": "4.0 ms: launched, and nothing recorded ran; 1.0 ms: no launch record",
        "Profiler": "a step takes 200.0 ms with it and 160.0 ms without (run.json): +25.0 %",
    }


def test_throughput_says_how_the_gpus_were_fed() -> None:
    """Figures without evidence are left out."""
    result = result_of()
    assert [(fact.name, fact.value) for fact in behind.throughput(result)] == [
        ("Kernels a step", "685 (1.6 a millisecond)"),
        ("Median kernel", "309 µs; a launch every 618 µs, 2.00x as long"),
        ("From launch to start", "p50 447 µs, p90 900 µs, p99 990 µs"),
        ("Queue", "766.9 launches deep, 2,052 at most, empty 0.7 % of the time"),
    ]
    result["throughput"] = dict.fromkeys(result["throughput"]) | {"launch_delay_ns": dict.fromkeys(("p50", "p99"))}
    assert behind.throughput(result) == []


def test_recompute_says_what_it_costs_and_how_it_is_known() -> None:
    """A suspicion stands apart, and alone where nothing else was found."""
    result = result_of()
    found = behind.recompute(result)
    assert found is not None
    assert [(fact.name, fact.value) for fact in found.facts] == [
        ("Cost", "12.0 % of the step time, 6.0 ms of it communication"),
        ("MFU without it", "+3.8 points"),
        ("Setting", "full, non-reentrant, 576 regions"),
        ("Ran again", "95.0 % of the forward's matmul and attention kernels"),
        ("Known from", "sequence numbers of operators inside the backward"),
        ("Modules", ", ".join(f"layers.{number}" for number in range(12)) + " and 2 others"),
    ]
    assert found.suspected == "operators that only a forward calls; at least 2.0 % of the step time, +0.6 points"
    result["recompute"]["share"] = 0.0
    assert behind.recompute(result) == behind.Recompute([], found.suspected)
    assert "suspected, not counted" in to_html(result)
    assert "recompute 12" not in printed(result)
    result["recompute"]["suspected"] = None
    assert behind.recompute(result) is None
    assert '<h2 id="recompute">' not in to_html(result)


def test_kernels_stand_against_their_roofs() -> None:
    """Rates are of the runs whose work is known; the whole name stays beside the short one."""
    result = result_of()
    first, second = rows.kernels(result)
    assert (first.short_name, first.bound, first.roof_share, first.headroom) == (
        "nvjet_hsh_128x256_64x4",
        "compute",
        0.695,
        0.1,
    )
    assert first.byte_per_s == pytest.approx(1e12)
    assert (second.bound, second.flop_per_s, second.byte_per_s) == ("", None, None)
    result["kernels"][1]["known_share"] = 0.5
    assert rows.kernels(result)[0].byte_per_s == pytest.approx(2e12)
    assert [(fact.name, fact.value) for fact in behind.kernel_facts(result)] == [
        ("FLOPs or bytes known", "for 87.0 % of the compute time"),
        ("Share of the roof", "matmul 69.5 %, device copies 80.0 %"),
        ("Without matrix units", "6.2 % of the time of matrix products"),
        ("Ran in pieces", "attention (8 softmax kernels, 1.0 ms)"),
    ]
    assert f'title="{first.name}">{first.short_name}<' in to_html(result)


def test_roofline_has_kernels_with_flops_and_bytes() -> None:
    """Each element type has its peak; without kernels to place there is no figure."""
    result = result_of()
    result["model"]["peak"]["mixed"] = {"fp8": {"share": 0.4, "tflops": 1978.9}, "int4": {"share": 0, "tflops": None}}
    found = behind.roofline(result)
    assert found is not None
    assert (found.byte_per_s, found.peaks) == (3350e9, {"bf16": 989.4e12, "fp8": 1978.9e12})
    assert [(point.family, round(point.flop_per_byte, 1)) for point in found.points] == [("matmul", 687.5)]
    assert behind.roofline(result | {"kernels": result["kernels"][:1]}) is None
    axes = figures.roofline(result)
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == ["bf16 989.4 TFLOP/s", "fp8 1,978.9 TFLOP/s", "3,350 GB/s", "nvjet_hsh_128x256_64x4"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


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
    """Eight ranks with leaves in all buckets, culprits and ten remarks take about 75 lines; so do many ranks."""
    assert len(printed(result_of()).splitlines()) <= 78
    assert len(printed(result_of(80)).splitlines()) <= 78
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


def test_terminal_names_calls_only_where_host_gaps_matter() -> None:
    """From two percent of the step time on; recompute and kernels have a line each, all in at most six lines."""
    result = result_of()
    section = printed(result).split("\n\n")[4].splitlines()
    assert section == [
        "Behind the losses",
        "  data loader: _MultiProcessingDataLoaderIter.__next__, 2.5 % in 5 gaps, most on rank 3",
        "  launch-bound: MmBackward0, 1.0 % in 240 gaps, most on rank 2",
        "  recompute 12.0 %, +3.8 points without it: full, non-reentrant, 576 regions",
        "  kernels: work known for 87.0 % of compute; share of the roof: matmul 69.5 %, device copies 80.0 %",
    ]
    result["job"]["buckets"]["host_gap"] = result["job"]["window_ns"] // 51
    assert "MmBackward0" not in printed(result)
    assert "MmBackward0" in to_html(result)


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
        (figures.roofline, "FLOPs a byte"),
    ):
        first, second = (figures.svg(draw(result)) for _ in range(2))
        assert first == second
        assert text in first
        assert "<dc:date>" not in first
    assert figures.png(figures.waterfall(result), dpi=30).startswith(b"\x89PNG")


def test_figure_draws_on_axes_it_is_given() -> None:
    """A notebook can place a figure in its own."""
    from matplotlib.figure import Figure

    left, middle, right, last = Figure().subplots(1, 4)
    assert figures.waterfall(result_of(), left) is left
    assert figures.ranks(result_of(), middle) is middle
    assert figures.heatmap(result_of(), right) is right
    assert figures.roofline({"job": result_of()["job"]}, last) is last


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
