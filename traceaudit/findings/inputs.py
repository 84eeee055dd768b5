"""What is doubtful about the numbers themselves: notes on peak, numerator and recording that claim no time."""

from collections.abc import Iterator, Mapping
from typing import Any

from traceaudit.findings.finding import Confidence, Evidence, Finding
from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.mfu.hardware import sparse_of
from traceaudit.report.formats import clean, duration, percent, times

PEAK_APART = 0.02  # a given peak this far from the table's is another one
ABOVE_ROOF = 1.05  # of the peak, above which a kernel's FLOPs or its peak are wrong
HIGH_MFU, HIGH_AT_SCALE, SCALE = 0.65, 0.50, 512  # MFU that nobody publishes; that usually counts something else
OVERHEAD = 0.02  # of a step that profiling may take
UNLIKE = 1.5  # times the median step, above which a step is not like the others

Left = Mapping[Leaf, int]


def _note(number: str, title: str, summary: str, action: str, verify: str, sure: Confidence, *evidence: str) -> Finding:
    return Finding(
        id=f"input.{number}",
        title=title,
        summary=summary,
        action=action,
        verify=verify,
        confidence=sure,
        evidence=tuple(Evidence(text) for text in evidence),
    )


def wrong_peak(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield a peak that is not the dense one of the GPU and element type."""
    del left
    peak: Mapping[str, Any] = seen.result["model"].get("peak") or {}
    gpu = seen.gpu
    rate, dtype = peak.get("tflops"), str(peak.get("dtype"))
    known = gpu.tflops.get(dtype) if gpu is not None else None
    if gpu is None or not rate or not known or abs(rate / known - 1) <= PEAK_APART:
        return
    sparse = sparse_of(rate, gpu)
    title = f"the peak of {rate:g} TFLOP/s is not the dense {dtype} peak of {gpu.name}"
    why = f"The table has {known:g}; with it MFU reads {times(rate / known)} as high."
    if sparse:
        why = f"It is the figure with 2:4 sparsity for {sparse}. {why}"
    yield _note(
        "peak",
        title,
        why,
        f"Pass --peak-tflops {known:g}, or leave it out.",
        "Peak and table agree (`traceaudit devices --sources`).",
        Confidence.MEASURED if sparse else Confidence.SUSPECTED,
        f"peak from {clean(peak.get('source', ''))}",
    )


def doubtful_numerator(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield declared FLOPs or recompute that the traces contradict."""
    del left
    for text in seen.result["model"].get("contradictions") or ():
        yield _note(
            "numerator",
            "what was declared and what the traces show contradict each other",
            text[:1].upper() + text[1:] + ".",
            "Check parameters, active experts, tokens of one optimizer step of the whole job, and recompute.",
            "Declared and counted FLOPs agree within 10 %.",
            Confidence.MEASURED,
            str((seen.result["model"].get("reconciliation") or {}).get("text", text)),
        )


def high_mfu(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield an MFU above what runs of this size reach."""
    del left
    job = seen.result["job"]
    mfu = job["mfu"]
    if mfu is None or mfu <= (HIGH_AT_SCALE if job["world_size"] >= SCALE else HIGH_MFU):
        return
    yield _note(
        "high-mfu",
        f"an MFU of {percent(mfu)} is more than runs like this reach",
        "A healthy run at scale is near 40 %; above 50 % it usually counts something else: recompute, the whole "
        "attention square, a smaller peak, or tokens of more than one step.",
        "Go through peak and numerator factor by factor.",
        "Tokens per second times FLOPs per token over GPUs times peak gives the same number.",
        Confidence.SUSPECTED,
        f"{seen.result['model']['numerator']['formula']}" if seen.result["model"].get("numerator") else "",
    )


def above_peak(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield matrix kernels that would be faster than the peak."""
    del left
    rows = [
        row
        for row in seen.result.get("kernels", ())
        if row["bound"] == "compute" and (row["roofline_share"] or 0.0) > ABOVE_ROOF
    ]
    whole = sum(int(row["ns"]) for row in rows)
    if not rows or whole < 0.01 * seen.window_ns:
        return
    worst = max(rows, key=lambda row: row["roofline_share"])
    yield Finding(
        id="input.above-peak",
        title="kernels run faster than the peak allows",
        summary=f"The fastest reaches {percent(worst['roofline_share'])} of the peak of its element type: the "
        "peak or the element type is wrong, or its FLOPs are counted too high.",
        action="Check --gpu, --dtype and --peak-tflops.",
        verify="No kernel is above its roof.",
        confidence=Confidence.SUSPECTED,
        evidence=seen.of_kernels(rows),
    )


def profiler_overhead(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield a profile that slowed the run down."""
    del left
    found = seen.result["quality"].get("profiler_overhead") or {}
    step = found.get("measured_step_ns") or 0
    slower, own = found.get("difference_ns") or 0, found.get("overhead_in_gaps_ns") or 0
    host = sum(seen.leaf_ns(leaf) for leaf in (Leaf.LAUNCH_BOUND, Leaf.OTHER_HOST))
    reasons = []
    if step and slower > OVERHEAD * step:
        reasons.append(f"the step is {duration(slower)} longer than without the profiler ({clean(found['source'])})")
    if own > OVERHEAD * seen.window_ns:
        reasons.append(f"the profiler's own rows fill {seen.share(own)} of idle time")
    if found.get("with_stack") and host > 0.05 * seen.window_ns:
        reasons.append("Python stacks were recorded, and much of the time is the host's")
    if not reasons:
        return
    yield _note(
        "profiler-overhead",
        "profiling slowed the run down",
        "; ".join(reasons).capitalize() + ". Host gaps are smaller without it.",
        "Record without stacks and without memory events for the numbers; use a second recording with them for causes.",
        "The step with the profiler is as long as without it.",
        Confidence.MEASURED if slower or own else Confidence.SUSPECTED,
    )


def unlike_steps(seen: Seen, left: Left) -> Iterator[Finding]:
    """Yield steps that are much longer than the median one."""
    del left
    steps = seen.result["model"].get("by_step") or []
    lengths = sorted(row["window_ns"] for row in steps)
    usual = lengths[len(lengths) // 2] if lengths else 0
    long = [row for row in steps if row["window_ns"] > UNLIKE * usual]
    if len(steps) < 3 or not long:
        return
    worst = max(long, key=lambda row: row["window_ns"])
    yield _note(
        "unlike-steps",
        "some of the traced steps do not represent the run",
        f"Step {worst['step']} takes {times(worst['window_ns'] / usual)} the median. Sums over few steps give its loss "
        "too much weight.",
        "Look at the steps apart (--steps), and record more of them before deciding by shares.",
        "The median step's MFU is near the mean's.",
        Confidence.MEASURED,
        *(f"step {row['step']}: {times(row['window_ns'] / usual)} the median" for row in long[:4]),
    )


RULES = (wrong_peak, doubtful_numerator, high_mfu, above_peak, profiler_overhead, unlike_steps)
