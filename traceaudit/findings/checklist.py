"""The ten checks before trusting a number, answered from the traces as far as they go."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from traceaudit.findings.seen import Seen
from traceaudit.inventory import allocator_item
from traceaudit.leaves import Leaf
from traceaudit.report.formats import percent, quantity

Row: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = tuple[str, str, str | None]  # status, evidence, what to record next

HEALTHY_MFU = 0.40  # of a large run in bf16
FULL = 0.95  # of the GPU's memory reserved at the peak, above which it does not fit well
KNOWN = 0.5  # of the compute time with known FLOPs or bytes, from which the roofline tells something
PACE = 0.05  # of the time in host gaps or exposed communication, from which they set the pace
FEW_TOKENS = 1_000  # a step and GPU
NO_TRAINING = "no training step was recorded"


def checklist(seen: Seen, found: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the ten items with status, evidence, and what to record where the status is unknown."""
    rows = []
    for item, (title, check) in enumerate(CHECKS, 1):
        status, evidence, wanted = check(seen, found)
        rows.append(
            {
                "item": item,
                "title": title,
                "status": status,
                "evidence": evidence,
                "record_next": wanted if status == "unknown" else None,
            }
        )
    return rows


def _ids(found: Sequence[Row], *prefixes: str) -> list[str]:
    return [row["title"] for row in found if row["id"].startswith(prefixes)]


def _fit(seen: Seen, _: Sequence[Row]) -> Answer:
    whole = (seen.result.get("memory") or {}).get("gpu_bytes")
    facts = seen.facts("allocator")
    reserved, allocated = facts.get("reserved_peak_bytes"), facts.get("allocated_peak_bytes")
    if whole and reserved and allocated:
        told = f"at the peak {quantity(reserved, 'B')} of {quantity(whole, 'B')} reserved"
        told += f", {quantity(allocated, 'B')} allocated"
        return ("problem" if reserved > FULL * whole else "ok"), told, None
    inventory = seen.result.get("inventory") or {}
    wanted = "profile_memory=True; or declare the model (--params, --layers, --hidden, --seq-len, heads in run.json)"
    if not inventory:
        return "unknown", "neither memory events nor a declared model", wanted
    told = next(row["evidence"] for row in inventory["checklist"] if row["item"] == 1)
    if inventory["fits"]:
        return "ok", told, None
    more = "; it ran, so something is sharded or kept elsewhere" if inventory["fits"] is False else ""
    return "unknown", told + more, "profile_memory=True; or `traceaudit inventory` with the sharding (--zero)"


def _mfu(seen: Seen, found: Sequence[Row]) -> Answer:
    job, model = seen.result["job"], seen.result["model"]
    mfu, hfu = job["mfu"], job["hfu"]
    if mfu is None:
        return (
            "unknown",
            f"no MFU: {model.get('reason') or 'peak or model FLOPs are not known'}",
            ("record_shapes=True, or declare --params and --tokens-per-step; --gpu or --peak-tflops"),
        )
    doubts = _ids(found, "input.peak", "input.numerator", "input.high-mfu", "input.above-peak")
    hfu_told = f"HFU with recompute {percent(hfu)}" if hfu is not None else "HFU not known"
    told = f"MFU {percent(mfu)} ({(model.get('numerator') or {}).get('formula', '')}), {hfu_told}; healthy is near 40 %"
    if doubts:
        return "problem", f"{told}; {doubts[0]}", None
    if seen.training is False:
        return "ok", f"{told} in training; {NO_TRAINING}", None
    return ("ok" if mfu >= HEALTHY_MFU else "problem"), told, None


def _roofline(seen: Seen, found: Sequence[Row]) -> Answer:
    coverage = seen.result.get("roofline", {}).get("coverage")
    titles = _ids(found, "sub-roofline.")
    known = f"FLOPs or bytes are known for {percent(coverage or 0.0)} of the compute time"
    if titles:
        return "problem", f"{titles[0]}; {known}", None
    if (coverage or 0.0) < KNOWN:
        return "unknown", known, "record_shapes=True"
    families = seen.result["roofline"]["families"]
    reached = [
        f"{row['family']} {percent(row['roofline_share'])}" for row in families if row["roofline_share"] and row["ns"]
    ]
    return "ok", f"share of the roof: {', '.join(reached)}; {known}", None


def _pace(seen: Seen, _: Sequence[Row]) -> Answer:
    job = seen.result["job"]
    whole = max(seen.window_ns, 1)
    gaps, exposed = (job["buckets"][name] / whole for name in ("host_gap", "exposed_comm"))
    moved = seen.leaf_ns(Leaf.MEMORY_FLOOR) / whole
    told = f"gaps {percent(gaps)}, bytes {percent(moved)}, exposed communication {percent(exposed)} of the time"
    if not seen.result["quality"]["reliable"]:
        return "unknown", f"{told}; the attribution is not reliable", "enable_cuda_sync_events, all ranks, marked steps"
    return ("problem" if max(gaps, exposed) >= PACE else "ok"), told, None


def _overlap(seen: Seen, found: Sequence[Row]) -> Answer:
    job = seen.result["job"]
    if not job["comm_ns"]:
        alone = job["world_size"] <= 1
        wanted = "a rank of the whole job, with its collectives"
        return ("ok" if alone else "unknown"), "no communication was recorded", None if alone else wanted
    hidden = job["overlapped_comm_ns"] / job["comm_ns"]
    told = f"{percent(hidden)} of the communication runs beneath compute"
    titles = _ids(found, "exposed-comm.")
    if titles:
        return "problem", f"{told}; {titles[0]}", None
    return "ok", told, None


def _from_log(item: int) -> Callable[[Seen, Sequence[Row]], Answer]:
    """Return a check that a training log answers (`traceaudit.norms`)."""

    def check(seen: Seen, _: Sequence[Row]) -> Answer:
        wanted = "--training-log LOG (loss and gradient norm of every step); `traceaudit norms LOG --control LOG`"
        log = seen.result.get("norms")
        if log is None and seen.training is False:
            return "unknown", NO_TRAINING, None
        if log is None:
            return "unknown", "traces do not tell; no training log given", wanted
        row = next(row for row in log["checklist"] if row["item"] == item)
        return row["status"], row["evidence"], wanted

    return check


def _failures(seen: Seen, _: Sequence[Row]) -> Answer:
    budget = seen.result.get("budget")
    wanted = '--budget "--mtbf 3h --restart 5min --interval 30min", and a step that saves a checkpoint'
    if budget is None and seen.training is False:
        return "unknown", NO_TRAINING, None
    if budget is None:
        paused = seen.leaf_ns(Leaf.CHECKPOINT)
        told = f"; the traced steps hold a checkpoint pause, {seen.share(paused)}" if paused else ""
        return "unknown", f"no failure figures given{told}", wanted
    row = budget["checklist"][0]
    return row["status"], row["evidence"], wanted


def _allocator(seen: Seen, found: Sequence[Row]) -> Answer:
    row = allocator_item(seen.facts("allocator"))
    churn = _ids(found, "host-gap.allocator", "straggler.allocator")
    if churn:
        return "problem", f"{churn[0]}; {row['evidence']}", None
    return row["status"], row["evidence"], "profile_memory=True"


def _small_batch(seen: Seen, found: Sequence[Row]) -> Answer:
    tokens = seen.facts("launch_bound").get("tokens_per_step")
    each = f"{tokens / max(seen.result['job']['world_size'], 1):,.0f} tokens a step and GPU; " if tokens else ""
    bound = seen.leaf_ns(Leaf.LAUNCH_BOUND)
    told = f"{each}launch-bound {seen.share(bound)}"
    lost = [row["share"] for row in found if row["id"].endswith(".launch-bound")]
    if sum(lost) >= PACE:
        return "problem", told, None
    phase = seen.result.get("host_facts", {}).get("phase", {})
    if not phase.get("operators") and not bound:
        return "unknown", "no host activity was recorded", "ProfilerActivity.CPU beside CUDA"
    return "ok", told, None


CHECKS: tuple[tuple[str, Callable[[Seen, Sequence[Row]], Answer]], ...] = (
    ("Fit before fast", _fit),
    ("MFU, not tokens per second", _mfu),
    ("The kernel on the roofline", _roofline),
    ("Find the clock", _pace),
    ("Overlap or shard, never sum", _overlap),
    ("One precision change at a time, with a BF16 control", _from_log(6)),
    ("Budget the failures", _failures),
    ("Watch the norms", _from_log(8)),
    ("Allocator before GPUs", _allocator),
    ("Small batch is launch-bound", _small_batch),
)
