"""The GPU idle for its host: one finding a cause, with the calls behind the longest gaps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from traceaudit.findings.finding import Confidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.report.formats import call_title, duration, plural, quantity

LATENCY_SHARE = 0.02  # of the analysed time: kernels follow each other late without a host that is late
MUCH = 4  # times the launch-bound time, up to which launch latency belongs to it; more is that of a CUDA graph
MANY_KERNELS = 50  # of an optimizer's step, above which its loop over tensors is worth a word


@dataclass(frozen=True)
class Host:
    """What to say of a leaf of host gaps; the subject is why others wait for a rank."""

    id: str
    subject: str
    title: str
    why: str
    action: str
    verify: str


HOST: Mapping[Leaf, Host] = {
    Leaf.DATA_LOADER: Host(
        "host-gap.data-loader",
        "slow data loader",
        "starved by the data loader",
        "The host waited for the next batch while the GPU had nothing to do.",
        "Measure the loader alone, without the model. Then raise num_workers and prefetch_factor, keep workers alive "
        "(persistent_workers=True), move decoding and tokenising out of the step, and read from faster storage.",
        "Iterating the loader alone is faster than the steps, and this row falls to nothing.",
    ),
    Leaf.CHECKPOINT: Host(
        "host-gap.checkpoint-pause",
        "saving a checkpoint",
        "training stands still while a checkpoint is saved",
        "The GPU idled while state was copied and saved. The share holds for the traced steps, not for the whole run.",
        "Save asynchronously (torch.distributed.checkpoint.async_save): the pause shrinks to a copy into pinned "
        "memory. Choose the interval by `traceaudit budget`.",
        "Trace a step that saves: the pause is the copy alone.",
    ),
    Leaf.GC: Host(
        "host-gap.gc",
        "garbage collection",
        "Python's garbage collector pauses the host",
        "A collection ran on the thread that launches, and the GPU ran dry meanwhile.",
        "Call gc.freeze() after the warm-up, gc.disable(), and gc.collect(1) on all ranks at the same step, "
        "every some hundred steps.",
        "No collection inside the traced steps; step times are even.",
    ),
    Leaf.COMPILE: Host(
        "host-gap.compile",
        "compilation",
        "code is compiled, tuned or loaded inside the steps",
        "The host compiled, autotuned or loaded a kernel for the first time while the GPU waited.",
        "Find what changes between steps with TORCH_LOGS=recompiles: shapes (mark them dynamic or pad them), Python "
        "values, modes. Warm up every shape before the steps that count.",
        "No compilation after the warm-up in TORCH_LOGS=recompiles.",
    ),
    Leaf.ALLOCATOR: Host(
        "host-gap.allocator",
        "allocator",
        "memory is taken from the driver inside the steps",
        "Calls of the driver for memory held up the launches; a steady step needs none.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True first. Then look for tensors of changing sizes and for "
        "torch.cuda.empty_cache() in the loop, and leave some memory free.",
        "No cudaMalloc and no cudaFree in steady steps; torch.cuda.memory_stats()['num_alloc_retries'] stays.",
    ),
    Leaf.HOST_SYNC: Host(
        "host-gap.host-sync",
        "synchronisation",
        "the host waits for the GPU inside the steps",
        "After each synchronisation the queue of launches is empty and has to be filled again.",
        "Remove .item(), .cpu(), print and if on GPU tensors from the steps, or do them every some steps on a copy "
        "(non_blocking=True); log without reading values. torch.cuda.set_sync_debug_mode('warn') lists them.",
        "torch.cuda.set_sync_debug_mode('error') passes over a whole step.",
    ),
    Leaf.LAUNCH_BOUND: Host(
        "host-gap.launch-bound",
        "slow launches",
        "launch-bound: the host launches more slowly than the GPU computes",
        "The host launched without pause, and the GPU had finished before the next launch came.",
        "Give the GPU more per launch: CUDA graphs (torch.compile(mode='reduce-overhead')), fusion, larger batches. "
        "Profile without stacks to see how much of it is the profiler's.",
        "Kernels queue up: the launch delay is far above the latency, and this row shrinks.",
    ),
    Leaf.INPUT_COPY: Host(
        "host-gap.input-copy",
        "late input copies",
        "inputs are copied to the GPU while it does nothing else",
        "The copy of a batch stood alone: neither compute nor communication ran beside it.",
        "Pin the batches (pin_memory=True), copy them with non_blocking=True on a stream of their own one step "
        "ahead, and move less: token ids, not one-hot rows or masks that the GPU can make.",
        "Copies run beneath the step before, and this row falls to nothing.",
    ),
    Leaf.OTHER_HOST: Host(
        "host-gap.stall",
        "a stalled host thread",
        "the host thread stalls",
        "The thread that launches did something else, and the GPU ran dry meanwhile.",
        "Look at the named calls in the viewer; record once with Python stacks (with_stack=True) if they have no "
        "name. Common: logging, files, a lock, a busy CPU, threads that are not pinned.",
        "The named gaps are gone.",
    ),
}


def host_gaps(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield a finding for each leaf of host gaps but launch latency, which belongs to launch-bound loops."""
    for leaf, about in HOST.items():
        claims = {leaf: left[leaf]}
        if leaf == Leaf.LAUNCH_BOUND:
            between = left[Leaf.LAUNCH_LATENCY]
            claims |= {Leaf.LAUNCH_LATENCY: between} if _starved(seen) and MUCH * left[leaf] >= between else {}
        title, details, action = _told(leaf, about, seen)
        yield Finding(
            id=about.id,
            title=title,
            summary=" ".join((about.why, *details)),
            action=action,
            verify=about.verify,
            confidence=_confidence(leaf, seen),
            claims=claims,
            evidence=seen.of_gaps([leaf]) or seen.of_ledger(leaf, "of it"),
        )


def _starved(seen: Seen) -> bool:
    """Tell whether kernels are shorter than the time between their launches, so that each waits for its own."""
    fed = seen.result.get("throughput", {})
    kernel, apart = fed.get("kernel_ns_median"), fed.get("launch_interval_ns_median")
    return bool(kernel and apart and kernel < apart)


def _confidence(leaf: Leaf, seen: Seen) -> Confidence:
    """A launch-bound loop is in part the profiler's own, and more so with stacks; a stall without a name is a guess."""
    if leaf == Leaf.LAUNCH_BOUND:
        return Confidence.SUSPECTED if _with_stack(seen) else Confidence.ESTIMATED
    if leaf == Leaf.OTHER_HOST and not _calls(leaf, seen):
        return Confidence.SUSPECTED
    return Confidence.MEASURED


def _with_stack(seen: Seen) -> bool:
    return bool(seen.result.get("quality", {}).get("profiler_overhead", {}).get("with_stack"))


def _calls(leaf: Leaf, seen: Seen) -> list[Mapping[str, Any]]:
    rows = seen.result.get("host_gaps", ())
    return [row for row in rows if row["leaf"] == leaf.label and row["call"]]


def _told(leaf: Leaf, about: Host, seen: Seen) -> tuple[str, list[str], str]:
    """Return title, further sentences and action where the facts say more than the leaf."""
    title, action = about.title, about.action
    details = [f"Most of it: {call_title(row['call'])}." for row in _calls(leaf, seen)[:1]]
    match leaf:
        case Leaf.DATA_LOADER:
            facts = seen.facts("data_loader")
            if facts.get("slow") == "training process":
                title += ": batches are made in the training process"
                action = "Make batches in worker processes: num_workers > 0 with persistent_workers=True. " + action
            elif facts.get("slow") == "workers":
                title += ": its workers are slow"
        case Leaf.INPUT_COPY:
            pageable = seen.facts("data_loader").get("copies", {}).get("pageable", {})
            if pageable.get("count"):
                title += ": the copies come from pageable memory"
                details.append(
                    f"{quantity(pageable['bytes'], 'B')} came from pageable memory, {pageable['count']:,} times."
                )
        case Leaf.ALLOCATOR:
            facts = seen.facts("allocator")
            if facts.get("retries"):
                title = "the allocator frees its cache and asks again"
                times = plural(int(facts["retries"]), "time")
                details.append(f"{times} in the traced steps: memory runs out, or empty_cache() is called.")
            unused = facts.get("unused_share_at_peak")
            if unused:
                details.append(
                    f"{quantity(facts['reserved_peak_bytes'], 'B')} reserved at the peak, {unused:.0%} unused."
                )
        case Leaf.HOST_SYNC:
            per_step = seen.facts("host_sync").get("per_step")
            details += [f"{per_step:,.0f} synchronising calls a step on a rank."] if per_step else []
        case Leaf.LAUNCH_BOUND:
            action = f"Fuse the optimizer (fused=True). {action}" if _loops(seen) else action
            title = title if _starved(seen) else "the host is late with launches in places"
            details += _launches(seen)
        case Leaf.COMPILE if len(seen.result["job"]["steps"]) == 1:
            details.append("Only one step or the whole trace was analysed, so this may be the warm-up: record later.")
        case Leaf.CHECKPOINT:
            size = seen.facts("checkpoint").get("burst_bytes")
            details += [f"{quantity(size, 'B')} were copied to the host."] if size else []
    return title, details, action


def _loops(seen: Seen) -> bool:
    """Tell whether the optimizer launches a few kernels for each of many tensors."""
    facts = seen.facts("optimizer")
    return facts.get("style") == "loop" and (facts.get("kernels_per_step") or 0) > MANY_KERNELS


def _launches(seen: Seen) -> list[str]:
    fed = seen.result.get("throughput", {})
    kernel, apart = fed.get("kernel_ns_median"), fed.get("launch_interval_ns_median")
    words = []
    if kernel and apart:
        words.append(f"Kernels last {duration(kernel)} and are launched every {duration(apart)} (medians).")
    tokens = seen.facts("launch_bound").get("tokens_per_step")
    if tokens and tokens / max(seen.result["job"]["world_size"], 1) < 1_000:
        words.append(f"{tokens:,.0f} tokens a step are few: CUDA graphs and fusion are the whole optimisation.")
    if _loops(seen):
        words.append(f"The optimizer alone launches {seen.facts('optimizer')['kernels_per_step']:,.0f} kernels a step.")
    if _with_stack(seen):
        words.append("Python stacks were recorded, which slows launches down.")
    return words


def latency(seen: Seen, left: Mapping[Leaf, int]) -> Iterator[Finding]:
    """Yield launch latency where it is much without a launch-bound loop: short kernels that depend on each other."""
    if left[Leaf.LAUNCH_LATENCY] < LATENCY_SHARE * seen.window_ns:
        return
    yield Finding(
        id="host-gap.launch-latency",
        title="the GPU waits between kernels that were launched in time or just late",
        summary="Each gap is short, from the end of a launch or of another kernel to the start of the next; "
        "there are many of them because kernels are short." + " ".join(["", *_launches(seen)[:1]]),
        action="Fewer and longer kernels: fusion (torch.compile), CUDA graphs, larger batches.",
        verify="Fewer kernels a step, and this row shrinks.",
        confidence=Confidence.ESTIMATED,
        claims={Leaf.LAUNCH_LATENCY: left[Leaf.LAUNCH_LATENCY]},
        evidence=seen.of_gaps([Leaf.LAUNCH_LATENCY]),
    )


RULES = (host_gaps, latency)
