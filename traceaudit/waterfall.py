"""From the ledger to the result: the waterfall, the per-rank rows and every figure's origin, as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from traceaudit import __version__
from traceaudit.account import RankAccount
from traceaudit.attribute import Attribution, Job
from traceaudit.checkpointing import recompute_row
from traceaudit.idle.summary import host_gaps, throughput
from traceaudit.leaves import Bucket, Leaf
from traceaudit.mfu.kernel_table import kernel_rows, roofline
from traceaudit.mfu.model import Numerator, Peak, convention_formula
from traceaudit.mfu.roofline import Split
from traceaudit.ranks.align import Clock
from traceaudit.ranks.links import totals
from traceaudit.ranks.stragglers import as_rows, culprits, lateness, links_found

SCHEMA_VERSION = 1
UNRELIABLE_SHARE = 0.02  # unattributed time above which the attribution is not reliable
LOSSES = tuple(bucket for bucket in Bucket if bucket != Bucket.ACHIEVED)


def result(
    *,
    source: str,
    accounts: Sequence[RankAccount],
    job: Job,
    attribution: Attribution,
    split: Split,
    peak: Peak | None,
    numerator: Numerator | None,
    world_size: int,
    quality: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of ``result.json`` (schema version 1; see `traceaudit.leaves` for the names)."""
    ledger, windows = attribution.ledger, attribution.windows
    window = int(windows["window_ns"].sum())
    by_leaf = _by_leaf(ledger)
    memo = _memo(accounts, windows)
    buckets = _buckets(ledger)
    achieved, unattributed = buckets[Bucket.ACHIEVED], buckets[Bucket.UNATTRIBUTED]
    mfu = achieved / window if split.done else None
    hfu = None if mfu is None or split.recomputed_ns is None else mfu + split.recomputed_ns / window
    reliable = unattributed <= UNRELIABLE_SHARE * window and bool(quality.get("reliable", True))
    gpu = peak.gpu if peak is not None and peak.gpu else _gpu(accounts)
    return {
        "schema_version": SCHEMA_VERSION,
        "traceaudit_version": __version__,
        "source": source,
        "job": {
            "ranks_traced": int(windows["rank"].nunique()),
            "world_size": world_size,
            "steps": sorted(int(step) for step in windows["step"].unique()),
            "window_ns": window,
            "step_ns_median": int(windows["window_ns"].median()),
            "gpu": gpu,
            "mfu": mfu,
            "hfu": hfu,
            "mixed_peak": split.mixed,
            "buckets": {bucket.value: ns for bucket, ns in buckets.items()},
            "leaves": [
                {"bucket": leaf.bucket.value, "leaf": leaf.label, "ns": ns, "share": ns / window}
                for leaf, ns in by_leaf.items()
            ],
            "waterfall": _rows(buckets, window, split),
            "by_step": _by_step(ledger, windows),
            "comm_ns": int(memo["comm_ns"].sum()),
            "overlapped_comm_ns": int(memo["overlapped_comm_ns"].sum()),
        },
        "ranks": _ranks(accounts, job, attribution, memo),
        "model": _model(split, peak, numerator, accounts, attribution),
        "clock": _clock(job.clock),
        "stragglers": as_rows(culprits(job, attribution), window, mfu),
        "lateness": lateness(job, attribution),
        "slow_links": links_found(job, attribution),
        "pipeline": _pipeline(attribution),
        "recompute": _recompute(accounts, by_leaf, windows, mfu),
        "collectives": _collectives(job, attribution),
        "kernels": kernel_rows(accounts, peak, window),
        "roofline": roofline(accounts, peak, split.roofline_coverage),
        "host_gaps": host_gaps(accounts),
        "throughput": throughput(accounts),
        "quality": {
            **quality,
            "reliable": reliable,
            "unattributed_share": unattributed / window if window else 0.0,
            "unmatched_communications": job.matching.unmatched,
            "steps_left_out": [
                *quality.get("steps_left_out", []),
                *({"rank": rank, "step": step, "reason": reason} for rank, step, reason in attribution.left_out),
            ],
        },
    }


def _by_leaf(ledger: pd.DataFrame) -> dict[Leaf, int]:
    leaves, place = np.unique(ledger["leaf"].to_numpy(), return_inverse=True)
    sums = np.zeros(len(leaves), np.int64)
    np.add.at(sums, place, ledger["ns"].to_numpy())
    return {Leaf(leaf): ns for leaf, ns in zip(leaves.tolist(), sums.tolist(), strict=True)}


def _buckets(ledger: pd.DataFrame) -> dict[Bucket, int]:
    sums = dict.fromkeys(Bucket, 0)
    for leaf, ns in _by_leaf(ledger).items():
        sums[leaf.bucket] += ns
    return sums


def _by_step(ledger: pd.DataFrame, windows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the leaves of each step, summed over its ranks."""
    sums = windows.groupby("step").agg(ranks=("rank", "nunique"), window_ns=("window_ns", "sum"))
    leaves = ledger.groupby(["step", "leaf"])["ns"].sum()
    return [
        {
            "step": int(step),
            "ranks": int(ranks),
            "window_ns": int(window),
            "leaves": {
                f"{Leaf(int(leaf)).bucket.value}.{Leaf(int(leaf)).label}": int(ns) for leaf, ns in leaves[step].items()
            },
        }
        for step, ranks, window in zip(sums.index.to_numpy(), sums["ranks"], sums["window_ns"], strict=True)
    ]


def _rows(buckets: Mapping[Bucket, int], window: int, split: Split) -> list[dict[str, Any]]:
    """Return the waterfall: from 100 % down by each bucket to MFU, or to the compute time where it is not split."""
    last = {"row": "mfu", "share": buckets[Bucket.ACHIEVED] / window}
    shown = [bucket for bucket in LOSSES if bucket != Bucket.UNATTRIBUTED or buckets[bucket]]
    if not split.done:
        shown.remove(Bucket.SUB_ROOFLINE)
        last = {"row": "compute", "share": buckets[Bucket.SUB_ROOFLINE] / window}
    return [
        {"row": "peak", "share": 1.0},
        *({"row": bucket.value, "share": -buckets[bucket] / window} for bucket in shown),
        last,
    ]


def _memo(accounts: Sequence[RankAccount], windows: pd.DataFrame) -> pd.DataFrame:
    frames = [account.memo.assign(rank=account.rank) for account in accounts if account.steps is not None]
    return pd.concat(frames, ignore_index=True).merge(windows[["rank", "step"]], on=["rank", "step"])


def _clock(clock: Clock) -> dict[str, Any]:
    """Return how the clocks were aligned; hosts that no evidence ties to the others are named."""
    alone = sorted({clock.hosts[clock.host[rank]] for rank, tied in clock.aligned.items() if not tied})
    return {
        "method": clock.method,
        "hosts": len(clock.hosts),
        "residual_ns": clock.residual_ns,
        "residual_p95_ns": clock.residual_p95_ns,
        "violations": clock.violations,
        "evidence": clock.evidence,
        "clock_free_disagreement": clock.disagreement_ns,
        "not_aligned": alone if len(clock.hosts) > 1 else [],
        "max_drift_ppm": max((abs(drift) * 1e6 for drift in clock.drift.values()), default=0.0),
    }


PICTURE_LIMIT = 4_000  # pieces of work shown; a chain of 64 stages and 30 micro-batches has as many


def _pipeline(attribution: Attribution) -> dict[str, Any] | None:
    """Return the shape of the pipeline, theory beside measurement, and its picture; None without one."""
    bubbles = attribution.bubbles
    if not bubbles.facts and not bubbles.reason:
        return None
    picture = bubbles.picture.head(PICTURE_LIMIT)
    columns = ("rank", "stage", "kind", "microbatch", "start_ns", "end_ns", "recompute_ns")
    return {
        **bubbles.facts,
        "undivided_reason": bubbles.reason or None,
        "picture": {
            "step": int(picture["step"].iloc[0]) if len(picture) else None,
            "columns": list(columns),
            "rows": picture[list(columns)].to_numpy(dtype=object).tolist() if len(picture) else [],
        },
    }


def _recompute(
    accounts: Sequence[RankAccount], by_leaf: Mapping[Leaf, int], windows: pd.DataFrame, mfu: float | None
) -> dict[str, Any]:
    """Return what activation checkpointing costs in the analysed steps, and what it is."""
    frames = [own.recompute.assign(rank=own.rank) for own in accounts if own.steps is not None and len(own.recompute)]
    return recompute_row(
        [pd.concat(frames, ignore_index=True).merge(windows[["rank", "step"]], on=["rank", "step"])] if frames else [],
        kernels_ns=by_leaf.get(Leaf.KERNELS, 0),
        communication_ns=by_leaf.get(Leaf.COMMUNICATION, 0),
        window_ns=int(windows["window_ns"].sum()),
        mfu=mfu,
    )


def _ranks(
    accounts: Sequence[RankAccount], job: Job, attribution: Attribution, memo: pd.DataFrame
) -> list[dict[str, Any]]:
    tables = (attribution.ledger, attribution.windows, memo)
    divided = [dict(iter(table.groupby("rank"))) for table in tables]
    none = [table.iloc[:0] for table in tables]
    return [
        _rank(own, job, [parts.get(own.rank, empty) for parts, empty in zip(divided, none, strict=True)])
        for own in accounts
    ]


def _rank(account: RankAccount, job: Job, tables: Sequence[pd.DataFrame]) -> dict[str, Any]:
    rank = account.rank
    own, windows, sums = tables
    return {
        "rank": rank,
        "host": account.origin.host,
        "file": account.origin.file.name,
        "stage": job.plan.stage.get(rank),
        "clock_offset_ns": round(job.clock.offset_ns.get(rank, 0.0)),
        "reliable": account.steps is not None,
        "window_ns": int(windows["window_ns"].sum()),
        "steps": [
            {"step": int(step), "window_ns": int(ns), "buckets": _named(_buckets(own[own["step"] == step]))}
            for step, ns in zip(windows["step"], windows["window_ns"], strict=True)
        ],
        "buckets": _named(_buckets(own)),
        "busy_ns": int(sums["busy_ns"].sum()),
        "comm_ns": int(sums["comm_ns"].sum()),
        "overlapped_comm_ns": int(sums["overlapped_comm_ns"].sum()),
    }


def _named(buckets: Mapping[Bucket, int]) -> dict[str, int]:
    return {bucket.value: ns for bucket, ns in buckets.items()}


def _gpu(accounts: Sequence[RankAccount]) -> str | None:
    names = {account.origin.device.name for account in accounts if account.origin.device and account.origin.device.name}
    return ", ".join(sorted(names)) or None


COUNTED = (
    "2·m·k·n of matrix products, attention (causal half; backward twice the forward) and convolutions in the traces, "
    "recompute left out"
)


def _model(
    split: Split,
    peak: Peak | None,
    numerator: Numerator | None,
    accounts: Sequence[RankAccount],
    attribution: Attribution,
) -> dict[str, Any]:
    counted = [flops for flops in split.counted_flops.values() if flops > 0]
    counted_per_step = float(np.median(counted)) if counted else None
    used = None
    if split.source == "declared" and numerator is not None:
        used = {
            "source": "declared",
            "formula": numerator.formula,
            "convention": numerator.convention,
            "flops_per_step": numerator.flops,
            "attention_flops": numerator.attention,
            "factors": [{"name": name, "value": value, "source": source} for name, value, source in numerator.factors],
        }
    elif split.source == "counted":
        used = {
            "source": "counted",
            "formula": COUNTED,
            "convention": "megatron",
            "flops_per_step": counted_per_step,
            "attention_flops": True,
            "factors": [],
        }
    steps = _mfu_by_step(split, attribution)
    shares = [row["mfu"] for row in steps if row["mfu"] is not None]
    return {
        "split": split.done,
        "reason": split.reason or None,
        "peak": None if peak is None else _peak(peak),
        "numerator": used,
        "declared_flops_per_step": numerator.flops if numerator else None,
        "counted_flops_per_step": counted_per_step,
        "counted_coverage": split.coverage,
        "roofline_coverage": split.roofline_coverage,
        "conventions": _conventions(numerator, steps),
        "reconciliation": _reconciliation(numerator, counted_per_step, accounts, attribution),
        "by_step": steps,
        "mfu_median": float(np.median(shares)) if shares else None,
        "recompute_declared": numerator.recompute if numerator else None,
        "contradictions": list(split.contradictions),
        "operators": {
            "counted": sum(own.matrix_products[0] for own in accounts),
            "unknown": sum(own.matrix_products[1] for own in accounts),
            "estimated": sum(own.counting.get("estimated", 0) for own in accounts),
        },
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {
        "tflops": peak.tflops.get(peak.dtype),
        "dtype": peak.dtype,
        "gpu": peak.gpu,
        "source": peak.source,
        "hbm_gbps": peak.hbm_gbps,
        "dense": True,
        "mixed": {
            name: {"share": share, "tflops": peak.tflops.get(name)} for name, share in sorted(peak.shares.items())
        },
        "notes": list(peak.notes),
    }


def _mfu_by_step(split: Split, attribution: Attribution) -> list[dict[str, Any]]:
    """Return MFU and HFU of each step over all its ranks."""
    window = attribution.windows.groupby("step")["window_ns"].sum()
    achieved = attribution.ledger[attribution.ledger["leaf"] == Leaf.MODEL_FLOPS].groupby("step")["ns"].sum()
    rows: list[dict[str, Any]] = []
    for step, ns in zip(window.index, window.to_numpy(), strict=True):
        mfu = float(achieved.get(step, 0)) / int(ns) if split.done and ns else None
        again = split.recomputed_by_step.get(int(step))
        hfu = None if mfu is None or again is None else mfu + again / int(ns)
        rows.append({"step": int(step), "mfu": mfu, "hfu": hfu, "window_ns": int(ns)})
    return rows


def _conventions(numerator: Numerator | None, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the declared FLOPs of a step under each convention, and what MFU would read with it."""
    if numerator is None:
        return []
    window = sum(row["window_ns"] for row in steps)
    known = [row["mfu"] * row["window_ns"] for row in steps if row["mfu"] is not None]
    mfu = sum(known) / window if known and window else None
    return [
        {
            "name": name,
            "formula": convention_formula(name),
            "flops_per_step": flops,
            "mfu": None if mfu is None else mfu * flops / numerator.flops,
            "used": name == numerator.convention,
        }
        for name, flops in numerator.conventions.items()
    ]


def _reconciliation(
    numerator: Numerator | None, counted: float | None, accounts: Sequence[RankAccount], attribution: Attribution
) -> dict[str, Any] | None:
    """Return declared beside counted FLOPs of a step, both of the traced ranks' share of the job."""
    if numerator is None or not counted:
        return None
    traced = int(attribution.windows["rank"].nunique())
    size = max([own.origin.world_size or 0 for own in accounts] + [traced])
    declared = numerator.flops * traced / size
    return {
        "declared": declared,
        "counted": counted,
        "difference": declared / counted - 1,
        "ranks": traced,
        "world_size": size,
        "text": (
            f"declared {declared:.4g} and counted {counted:.4g} FLOPs a step on {traced:,} of {size:,} ranks: "
            f"{declared / counted - 1:+.1%}; the declared ones rule"
        ),
    }


def _collectives(job: Job, attribution: Attribution) -> list[dict[str, Any]]:
    """Return communications by group and kind; bandwidths and estimates are null where they are not known."""
    table = totals(
        job.communications, attribution.exposed, attribution.carried, attribution.windows, job.matching.complete
    )
    if not len(table):
        return []
    figures = ("count", "bytes", "transfer_ns", "wait_ns", "exposed_ns", "not_blocking_ns")
    return [
        {
            "group": str(group),
            "dim": Leaf(int(leaf)).label,
            "kind": str(kind) or "unknown",
            **{name: int(value) for name, value in zip(figures, values, strict=True)},
            "busbw_gbps": None if np.isnan(bandwidth) else float(bandwidth),
            "transfer_estimate_ns": None if np.isnan(estimate) else int(estimate),
        }
        for group, leaf, kind, bandwidth, estimate, *values in zip(
            *(table[column] for column in ("group", "leaf", "kind", "busbw_gbps", "estimate_ns", *figures)), strict=True
        )
    ]
