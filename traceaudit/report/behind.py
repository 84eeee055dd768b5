"""What stands behind host gaps and recompute: the calls and facts of the result as rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.report.formats import call_title, clean, duration, listed, percent, plural, quantity, times
from traceaudit.report.rows import Fact, Result
from traceaudit.report.words import FLAVOURS, RECOMPUTE_RULES, SLOW_LOADERS, gap_title

MOST_MODULES = 12
NAMED_HOST_GAP = 0.02  # of the step time, from which the terminal names the calls behind host gaps


@dataclass(frozen=True)
class GapRow:
    """The idle time of all traced GPUs behind one call; rank and place are those with most of it."""

    title: str  # of the leaf
    call: str
    full_call: str
    where: str
    full_where: str
    ns: int
    share: float
    count: int
    longest_ns: int
    rank: int | None


@dataclass(frozen=True)
class Recompute:
    """What was computed again, as facts; a suspicion stands apart, because no bucket counts it."""

    facts: list[Fact]
    suspected: str


def host_gaps(result: Result) -> list[GapRow]:
    """Return the calls behind idle GPUs, those with the most time first."""
    window = max(1, result["job"]["window_ns"])
    found = [
        GapRow(
            title=clean(gap_title(str(entry["leaf"])), 40),
            call=call_title(entry.get("call") or "not recorded"),
            full_call=clean(entry.get("call") or "", 500),
            where=call_title(entry.get("inside") or ""),
            full_where=clean(entry.get("inside") or "", 500),
            ns=entry["ns"],
            share=entry["ns"] / window,
            count=entry.get("count") or 0,
            longest_ns=entry.get("longest_ns") or 0,
            rank=entry.get("rank"),
        )
        for entry in result.get("host_gaps") or []
        if entry["ns"]
    ]
    return sorted(found, key=lambda row: -row.ns)


def host_facts(result: Result) -> list[Fact]:
    """Return what is known of each cause of host gaps beside its time, in a line each; silent where nothing is."""
    about, window = result.get("host_facts") or {}, max(1, result["job"]["window_ns"])
    lines = {
        "Data loader": _loader(about.get("data_loader") or {}),
        "Checkpoint": _checkpoint(about.get("checkpoint") or {}),
        "Garbage collection": _counted(about.get("gc") or {}, "collection"),
        "Compile": _counted(about.get("compile") or {}, "call"),
        "Allocator": _allocator(about.get("allocator") or {}),
        "Host syncs": _syncs(about.get("host_sync") or {}),
        "Launch-bound": _launches(about.get("launch_bound") or {}, window),
        "Optimizer": _optimizer(about.get("optimizer") or {}),
        "Unattributed": _reasons(about.get("unattributed") or {}),
        "Profiler": _profiler((result.get("quality") or {}).get("profiler_overhead") or {}),
    }
    return [Fact(name, text) for name, parts in lines.items() if (text := "; ".join(part for part in parts if part))]


def throughput(result: Result) -> list[Fact]:
    """Return how the host fed the GPUs: medians over the ranks."""
    about = result.get("throughput") or {}
    found = []
    if about.get("kernels_per_step"):
        rate = f" ({about['kernels_per_ms']:,.1f} a millisecond)" if about.get("kernels_per_ms") else ""
        found.append(Fact("Kernels a step", f"{about['kernels_per_step']:,.0f}{rate}"))
    if about.get("kernel_ns_median"):
        every = about.get("launch_interval_ns_median")
        ratio = times(every / about["kernel_ns_median"]) if every else ""
        launched = f"; a launch every {duration(every)}, {ratio} as long" if every else ""
        found.append(Fact("Median kernel", f"{duration(about['kernel_ns_median'])}{launched}"))
    delays = about.get("launch_delay_ns") or {}
    known = [f"{name} {duration(delays[name])}" for name in ("p50", "p90", "p99") if delays.get(name) is not None]
    if known:
        found.append(Fact("From launch to start", ", ".join(known)))
    queue = []
    if about.get("queue_depth_mean") is not None:
        queue.append(f"{about['queue_depth_mean']:,.1f} launches deep")
    if about.get("queue_depth_max") is not None:
        queue.append(f"{about['queue_depth_max']:,.0f} at most")
    if about.get("queue_empty_share") is not None:
        queue.append(f"empty {percent(about['queue_empty_share'])} of the time")
    return [*found, Fact("Queue", ", ".join(queue))] if queue else found


def recompute(result: Result) -> Recompute | None:
    """Return what activation checkpointing costs and how that is known, None where nothing was recomputed."""
    about = result.get("recompute") or {}
    suspected = _suspicion(about.get("suspected") or {})
    if not about.get("share"):
        return Recompute([], suspected) if suspected else None
    sent = about.get("communication_ns")
    cost = f"{percent(about['share'])} of the step time" + (f", {duration(sent)} of it communication" if sent else "")
    found = {"Cost": cost, "MFU without it": _points(about), "Setting": _setting(about)}
    if about.get("forward_share"):
        found["Ran again"] = f"{percent(about['forward_share'])} of the forward's matmul and attention kernels"
    found["Known from"] = RECOMPUTE_RULES.get(about.get("rule") or 0, "")
    names = [clean(name, 60) for name in about.get("modules") or []]
    more = [plural(len(names) - MOST_MODULES, "other")] if len(names) > MOST_MODULES else []
    found["Modules"] = listed([*names[:MOST_MODULES], *more]) if names else ""
    return Recompute([Fact(name, text) for name, text in found.items() if text], suspected)


def recompute_line(result: Result) -> str:
    """Return the recompute in one line; empty without it."""
    about = result.get("recompute") or {}
    if not about.get("share"):
        return ""
    points = f", {_points(about)} without it" if _points(about) else ""
    setting = f": {_setting(about)}" if _setting(about) else ""
    return f"recompute {percent(about['share'])}{points}{setting}"


def _loader(about: Mapping[str, Any]) -> Iterator[str]:
    slow = [SLOW_LOADERS[name] for name in str(about.get("slow") or "").split(", ") if name in SLOW_LOADERS]
    waited, copied = about.get("gap_ns"), about.get("input_copy_ns")
    if not (slow or waited or copied):
        return
    yield listed(slow)
    yield f"the GPU waited {duration(waited)} for batches" if waited else ""
    yield f"{duration(copied)} for copies of inputs" if copied else ""
    pageable = (about.get("copies") or {}).get("pageable") or {}
    if pageable.get("count"):
        size = quantity(pageable.get("bytes") or 0, "B")
        yield f"{_counts(pageable['count'], 'copy', 'copies')} from pageable memory ({size})"


def _checkpoint(about: Mapping[str, Any]) -> Iterator[str]:
    bursts, behind = about.get("bursts") or 0, about.get("bursts_asynchronous") or 0
    if not (about.get("gap_ns") or about.get("count") or bursts):
        return
    yield f"the GPU waited {duration(about.get('gap_ns') or 0)}"
    if bursts:
        how = "asynchronous" if behind == bursts else f"{behind} asynchronous" if behind else "not asynchronous"
        size = f" of {quantity(about['burst_bytes'], 'B')}" if about.get("burst_bytes") else ""
        yield f"{plural(bursts, 'run')} of copies to the host{size}, {how}"


def _counted(about: Mapping[str, Any], noun: str) -> Iterator[str]:
    if about.get("count"):
        waited = about.get("gap_ns") or 0
        within = f" of {duration(about['ns'])}" if about.get("ns") else ""
        yield f"{plural(about['count'], noun)}{within}; the GPU waited {duration(waited)}"


def _allocator(about: Mapping[str, Any]) -> Iterator[str]:
    asked, freed = about.get("allocations") or 0, about.get("frees") or 0
    if asked or freed:
        steady = (about.get("allocations_in_steady_steps") or 0) + (about.get("frees_in_steady_steps") or 0)
        late = f", {steady:,} of them after the first step, where none is needed" if steady else ""
        yield f"{plural(asked, 'allocation')} and {plural(freed, 'free')} by the driver{late}"
    if about.get("retries"):
        yield _counts(about["retries"], "retry", "retries") + " after memory ran out"
    if about.get("reserved_peak_bytes"):
        unused = about.get("unused_share_at_peak")
        share = f", {percent(unused)} of it unused (fragmentation)" if unused else ""
        yield f"{quantity(about['reserved_peak_bytes'], 'B')} reserved at the peak{share}"


def _syncs(about: Mapping[str, Any]) -> Iterator[str]:
    if about.get("count"):
        often = about.get("per_step") or 0.0
        rate = f" ({often:,.1f} a step of the rank with most)" if often else ""
        idled = f", which idled {duration(about['gap_ns'])} behind them" if about.get("gap_ns") else ""
        yield f"{plural(about['count'], 'wait')} of the host for the GPU{rate}{idled}"


def _launches(about: Mapping[str, Any], window: int) -> Iterator[str]:
    most = about.get("cuda_graphs_would_win_ns")
    if about.get("gap_ns"):
        yield f"the GPU waited {duration(about['gap_ns'])} for launches"
    if most:
        yield f"CUDA graphs would win at most {duration(most)}, {percent(most / window)} of the step time"
        if about.get("tokens_per_step"):
            yield f"{about['tokens_per_step']:,.0f} tokens a step"


def _optimizer(about: Mapping[str, Any]) -> Iterator[str]:
    styles = [clean(style, 20) for style in str(about.get("style") or "").split(", ") if style]
    if styles and about.get("kernels_per_step"):
        each = about["kernels_per_step"]
        count = plural(int(each), "kernel") if float(each).is_integer() else f"{each:,.1f} kernels"
        yield f"{listed(styles)}, {count} a step"


def _reasons(about: Mapping[str, Any]) -> Iterator[str]:
    for reason, ns in sorted(about.items(), key=lambda item: -item[1])[:6]:
        if ns:
            yield f"{duration(ns)}: {clean(reason, 120)}"


def _profiler(about: Mapping[str, Any]) -> Iterator[str]:
    declared, measured = about.get("declared_step_ns"), about.get("measured_step_ns")
    if declared and measured:
        source = f" ({clean(about['source'], 60)})" if about.get("source") else ""
        yield (
            f"a step takes {duration(measured)} with it and {duration(declared)} without{source}: "
            f"{100 * (measured / declared - 1):+.1f} %"
        )
    if about.get("overhead_in_gaps_ns"):
        yield f"its own work fills {duration(about['overhead_in_gaps_ns'])} of the gaps"


def _points(about: Mapping[str, Any]) -> str:
    points = about.get("mfu_points")
    return f"{points:+.1f} points" if points is not None and abs(points) >= 0.05 else ""


def _setting(about: Mapping[str, Any]) -> str:
    regions = about.get("regions")
    parts = [clean(about.get("setting") or "", 40), FLAVOURS.get(str(about.get("flavour")), "")]
    parts.append(plural(regions, "region") if regions else "")
    return ", ".join(part for part in parts if part)


def _suspicion(about: Mapping[str, Any]) -> str:
    if not about.get("reason"):
        return ""
    size = f"; at least {percent(about['share'])} of the step time" if about.get("share") else ""
    points = f", {_points(about)}" if _points(about) else ""
    return f"{clean(about['reason'], 400)}{size}{points}"


def _counts(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
