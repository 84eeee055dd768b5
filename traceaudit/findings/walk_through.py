"""The way an expert reads a slow run, in order, with what these traces say at each step."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from traceaudit.findings.seen import Seen
from traceaudit.leaves import Leaf
from traceaudit.report.formats import clean, percent, plural

Row: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = tuple[str, str]  # status and text

FLASH_2 = re.compile(r"flash_(?:fwd|bwd)|Flash_(?:fwd|bwd)_kernel_traits|pytorch_flash", re.I)
HOPPER = re.compile(r"H100|H200|H800|H20\b|GH200", re.I)
FEW_STEPS = 3


def walk_through(seen: Seen, found: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the steps with status and text."""
    answers = [(title, *look(seen, found)) for title, look in LOOKS]
    return [
        {"step": number, "title": title, "status": status, "text": text}
        for number, (title, status, text) in enumerate(answers, 1)
    ]


def _of(found: Sequence[Row], *prefixes: str) -> list[Row]:
    return [row for row in found if row["id"].startswith(prefixes)]


def _named(rows: Sequence[Row], otherwise: str) -> Answer:
    """Return a problem that names findings by title and share, else that all is well."""
    if not rows:
        return "ok", otherwise
    told = [row["title"] + (f" ({percent(row['share'])})" if row["ns"] else "") for row in rows[:3]]
    return "problem", "; ".join(told) + "."


def _denominator(seen: Seen, found: Sequence[Row]) -> Answer:
    peak = seen.result["model"].get("peak")
    if peak is None or not peak.get("tflops"):
        return (
            "unknown",
            f"The peak is not known: {clean(seen.result['model'].get('reason') or 'GPU not in the table')}.",
        )
    doubts = _of(found, "input.peak", "input.above-peak")
    told = (
        f"{peak['tflops']:g} TFLOP/s dense {peak['dtype']}, {clean(peak['gpu'] or 'GPU')}; {clean(peak['source'], 80)}."
    )
    return ("problem", f"{told} {_named(doubts, '')[1]}") if doubts else ("ok", told)


def _numerator(seen: Seen, found: Sequence[Row]) -> Answer:
    used = seen.result["model"].get("numerator")
    if used is None:
        return "unknown", "Model FLOPs are not known: declare --params and --tokens-per-step, or record shapes."
    attention = "with attention" if used["attention_flops"] else "without attention"
    told = f"{used['source']}: {clean(used['formula'], 120)}, {attention}."
    both = seen.result["model"].get("reconciliation")
    told += f" {both['text'].capitalize()}." if both else ""
    doubts = _of(found, "input.numerator", "input.high-mfu")
    return ("problem", f"{told} {_named(doubts, '')[1]}") if doubts else ("ok", told)


def _recompute(seen: Seen, found: Sequence[Row]) -> Answer:
    rows = _of(found, "recompute.")
    hfu = seen.result["job"]["hfu"]
    beside = f" HFU is {percent(hfu)}." if hfu is not None else ""
    if rows and rows[0]["id"] == "recompute.suspected":
        return "unknown", f"{rows[0]['summary']}{beside}"
    status, text = _named(rows, "No recompute was seen.")
    return status, text + beside


def _sample(seen: Seen, found: Sequence[Row]) -> Answer:
    job = seen.result["job"]
    told = f"{job['ranks_traced']:,} of {plural(job['world_size'], 'rank')}, {plural(len(job['steps']), 'step')}."
    doubts = _of(found, "input.profiler-overhead", "input.unlike-steps")
    if doubts or not seen.result["quality"]["reliable"]:
        doubt = _named(doubts, "The attribution is not reliable.")[1]
        return "problem", f"{told} {doubt}"
    if len(job["steps"]) < FEW_STEPS or "ProfilerStep" in seen.result["quality"].get("missing", ()):
        return "unknown", f"{told} Too few marked steps to tell whether they stand for the run."
    return "ok", told


def _gaps(seen: Seen, found: Sequence[Row]) -> Answer:
    rows = _of(found, "host-gap.")
    idle = sum(seen.leaf_ns(leaf) for leaf in Leaf if leaf.bucket == "host_gap")
    return _named(rows, f"Gaps for the host are {seen.share(idle)}.")


def _communication(seen: Seen, found: Sequence[Row]) -> Answer:
    job = seen.result["job"]
    if not job["comm_ns"]:
        return ("ok" if job["world_size"] <= 1 else "unknown"), "No communication was recorded."
    hidden = job["overlapped_comm_ns"] / job["comm_ns"]
    return _named(_of(found, "exposed-comm."), f"{percent(hidden)} of the communication runs beneath compute.")


def _ends(seen: Seen, found: Sequence[Row]) -> Answer:
    pipeline = seen.result.get("pipeline")
    if pipeline is None:
        return "ok", "No pipeline was seen."
    rows = _of(found, "pipeline-bubble.")
    if pipeline.get("undivided_reason"):
        return "unknown", f"The waits are not divided: {clean(pipeline['undivided_reason'])}."
    return _named(rows, "The schedule's own waits are small.")


def _late(seen: Seen, found: Sequence[Row]) -> Answer:
    job = seen.result["job"]
    if job["ranks_traced"] < 2:
        if job["world_size"] > 1:
            return "unknown", "One rank was traced: who comes late cannot be seen."
        return "ok", "There is one rank."
    return _named(_of(found, "straggler."), "No rank makes others wait for much of the time.")


def _attention(seen: Seen, found: Sequence[Row]) -> Answer:
    rows = _of(found, "sub-roofline.unfused-attention", "sub-roofline.attention")
    if rows:
        return _named(rows, "")
    kernels = [row for row in seen.result.get("kernels", ()) if row["family"] == "attention"]
    if not kernels:
        return "unknown", "No attention kernel was recognised."
    names = {clean(row["short_name"], 60) for row in kernels[:2]}
    told = f"Fused: {', '.join(sorted(names))}."
    if HOPPER.search(str(seen.result["job"].get("gpu") or "")) and any(FLASH_2.search(row["name"]) for row in kernels):
        told += " These are kernels of FlashAttention 2; version 3 or cuDNN is faster on this GPU."
    return "ok", told


def _norms(seen: Seen, found: Sequence[Row]) -> Answer:
    rows = _of(found, "sub-roofline.unfused-norm", "sub-roofline.pointwise")
    if not rows and not any(row["kind"] == "compute" for row in seen.result.get("kernels", ())):
        return "unknown", "No compute kernel was recorded."
    return _named(rows, "No norm in pieces was seen.")


def _shapes(seen: Seen, found: Sequence[Row]) -> Answer:
    rows = _of(found, "sub-roofline.matmul", "sub-roofline.no-tensor-cores")
    shapes = [row for row in seen.result.get("roofline", {}).get("matmuls", ()) if row["m"]]
    if rows:
        return _named(rows, "")
    if not shapes:
        return "unknown", "Shapes were not recorded (record_shapes=True)."
    least = min(min(row["multiple_of"]) for row in shapes)
    return "ok", f"Sizes of {plural(len(shapes), 'product')} are multiples of {least}."


LOOKS: tuple[tuple[str, Callable[[Seen, Sequence[Row]], Answer]], ...] = (
    ("The denominator: is the peak dense?", _denominator),
    ("The numerator: six FLOPs a parameter and token?", _numerator),
    ("Is recompute on, and is it needed?", _recompute),
    ("A few steps on a few ranks: do they stand for the run?", _sample),
    ("Gaps between kernels: launches, data loader", _gaps),
    ("Communication that is not overlapped: buckets, prefetch", _communication),
    ("Long idle at the ends: micro-batches against depth", _ends),
    ("One rank late at every synchronisation: GPU, link, host", _late),
    ("Is attention a current FlashAttention?", _attention),
    ("Are norms and pointwise chains fused?", _norms),
    ("Are matrix products on the tile and on tensor cores?", _shapes),
)
