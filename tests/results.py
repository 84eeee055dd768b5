"""Results of jobs whose every number is known, for the tests of what reports make of them."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

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


FINDINGS: list[tuple[str, str | None, float, str]] = [  # id, bucket, ms of a step of a rank, confidence
    ("exposed-comm.fsdp-prefetch", "exposed_comm", 25, "measured"),
    ("recompute.full", "recompute", 24, "measured"),
    ("pipeline.micro-batches", "pipeline_bubble", 22, "estimated"),
    ("host.data-loader", "host_gap", 5, "suspected"),
    ("inputs.no-stacks", None, 0, "suspected"),
]


def advice_of(window: int, mfu: float | None) -> Result:
    """Return findings, checks, walk-through and what to record next."""
    seen: Result = {"text": "the longest of 24", "rank": 5, "step": 4, "file": "rank5_trace.json.gz"}
    seen |= {"track": "stream 7", "start_ns": 1_732_000_000_123_456_789, "end_ns": 1_732_000_000_143_456_789}
    found: list[Result] = [
        {"id": name, "title": f"about {name}", "bucket": bucket, "leaf": None, "ns": round(ms * window / 200)}
        | {"share": ms / 200, "mfu_points": 100 * (mfu / (1 - ms / 200) - mfu) if mfu and ms else None}
        | {"ceiling_mfu": mfu / (1 - ms / 200) if mfu and ms else None, "confidence": confidence}
        | {"summary": f"why {name}", "action": f"do {name}", "verify": f"check {name}"}
        | {"evidence": [seen | {"name": "ncclDevKernel_AllGather_RING_LL"}] if ms else []}
        for name, bucket, ms, confidence in FINDINGS
    ]
    statuses = ["ok", "problem", "unknown"]
    checks = [
        {"item": item, "title": f"check {item}", "status": statuses[item % 3], "evidence": f"seen {item}"}
        | {"record_next": "profile_memory=True" if item % 3 == 2 else None}
        for item in range(1, 11)
    ]
    walk = [{"step": step, "title": f"look {step}", "status": "ok", "text": f"told {step}"} for step in (1, 2, 3)]
    record = {"text": "Record two steps.", "snippet": "with profile(record_shapes=True) as p:\n    p.step()"}
    return {"findings": found, "checklist": checks, "walk_through": walk, "record_next": record}


def timeline_of(count: int, step: int) -> Result:
    """Return a timeline of up to 16 ranks in which every rank computes, talks and waits in turn."""
    leaves = ["achieved.model_flops", "exposed_comm.fsdp", "host_gap.data_loader"]
    ranks = [
        {"rank": rank, "first_bin": rank, "leaf": [0, 1, 0, 2], "bins": [100, 40, 50, 10 - rank % 4]}
        for rank in range(min(count, 16))
    ]
    return {"step": step, "origin_ns": 0, "bin_ns": MS, "leaves": leaves, "ranks": ranks}


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
            "layout": {"pp": 2, "dp": 4},
            "versions": {"CUDA": "12.6", "NCCL": "2.21.5"},
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
            "conventions": [
                {"name": "6N", "formula": "6·N", "flops_per_step": 1.7616e18, "mfu": 0.28, "used": True},
                {"name": "palm", "formula": "6·N + 12·L·h·s", "flops_per_step": 2.2e18, "mfu": 0.35, "used": False},
            ]
            if mfu
            else [],
            "reconciliation": {"declared": 1.7616e18, "counted": 1.83e18, "difference": 1.7616 / 1.83 - 1}
            | {"ranks": count, "world_size": max(count, 8), "text": ""}
            if mfu
            else None,
            "by_step": [
                {"step": step, "mfu": 0.28 if mfu else None, "hfu": 0.345 if mfu else None}
                | {"window_ns": step_ns * count}
                for step in steps
            ],
            "mfu_median": 0.28 if mfu else None,
        },
        "clock": clock,
        "stragglers": culprits,
        "lateness": [{"rank": own["rank"], "step": steps[0], "ns": own["caused_ns"]} for own in culprits],
        "slow_links": [slow | {"excess_ns": 120 * MS}] if count > 1 else [],
        "collectives": [ring, group],
        "kernels": [flash, gemm],
        **deepcopy(BEHIND),
        **advice_of(window, means["achieved"] / 200 if mfu else None),
        "timeline": timeline_of(count, steps[0]),
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
    result["job"] |= {"layout": {HOSTILE: 2}, "versions": {HOSTILE: HOSTILE}}
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
    for entry in (*result["findings"], *result["checklist"], *result["walk_through"]):
        entry |= dict.fromkeys(
            entry.keys() & {"id", "title", "summary", "action", "verify", "evidence", "text"}, HOSTILE
        )
        entry |= dict.fromkeys(entry.keys() & {"confidence", "status", "bucket", "record_next"}, HOSTILE)
    seen = dict.fromkeys(("text", "file", "track", "name"), HOSTILE)
    for finding in result["findings"]:
        finding["evidence"] = [seen | {"rank": 1, "step": 3, "start_ns": 1, "end_ns": 2}]
    result["record_next"] = {"text": HOSTILE, "snippet": HOSTILE}
    result["timeline"]["leaves"] = [HOSTILE, f"exposed_comm.{HOSTILE}", "host_gap"]
    result["model"]["conventions"][1] |= {"name": HOSTILE, "formula": HOSTILE}
    result["clock"] |= {"method": HOSTILE, "not_aligned": [HOSTILE]}
    result["quality"]["unmatched_communications"][HOSTILE] = 1
    result["quality"]["warnings"].append(HOSTILE)
    result["job"]["leaves"].append({"bucket": "host_gap", "leaf": HOSTILE, "ns": MS, "share": 0.01})
    return result


CASES = {
    "usual": result_of(),
    "no MFU": result_of(mfu=False),
    "unreliable": result_of(reliable=False),
    "one rank": result_of(1),
    "many ranks": result_of(80),
    "hostile": hostile(),
}
every_case = pytest.mark.parametrize("result", CASES.values(), ids=CASES.keys())
