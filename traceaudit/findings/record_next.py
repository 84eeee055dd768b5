"""What to record next time, as a torch.profiler snippet that answers what these traces left open."""

from typing import Any

from traceaudit.findings.seen import Seen
from traceaudit.report.formats import listed

SNIPPET = """\
import os

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

rank = int(os.environ.get("RANK", 0))  # {ranks}
prof = profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(skip_first={skip}, wait=1, warmup=2, active={active}, repeat=1),
    on_trace_ready=tensorboard_trace_handler("traces", worker_name=f"rank{{rank}}"),
    record_shapes=True,  # FLOPs, bytes, tiles
    profile_memory={memory},  # {memory_why}
    with_stack={stack},  # {stack_why}
    experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True),  # what the GPU waited for
)
with prof:
    for step, batch in enumerate(loader):
        do_step(batch)  # yours
        prof.step()
        if step == {last}:
            break
"""
SKIP, WARMUP, ACTIVE = 10, 3, 4  # steps before, steps that the profiler warms up in, and steps recorded
FEW_STEPS = 3


def record_next(seen: Seen, open_questions: int) -> dict[str, Any] | None:
    """Return what to record next, and how; nothing where every question has its answer."""
    if not open_questions:
        return None
    wanted = _wanted(seen)
    stacks = _needs_stacks(seen)
    snippet = SNIPPET.format(
        ranks="start it on every rank, at the same step",
        skip=SKIP,
        active=ACTIVE,
        memory=True,
        memory_why="allocated against reserved",
        stack=stacks,
        stack_why="names the frames behind stalls; slows the host down" if stacks else "stacks slow the host down",
        last=SKIP + WARMUP + ACTIVE,
    )
    text = f"Record {listed(wanted)}." if wanted else "Record the same again with the options below."
    return {"text": text, "snippet": snippet}


def _wanted(seen: Seen) -> list[str]:
    """Return what these traces lack, in words."""
    job, quality = seen.result["job"], seen.result["quality"]
    missing = quality.get("missing", ())
    wanted = []
    if job["ranks_traced"] < job["world_size"]:
        wanted.append(f"all {job['world_size']:,} ranks, or whole groups of them (a host, a pipeline)")
    if "ProfilerStep" in missing:
        wanted.append("marked steps (prof.step() and a schedule)")
    if len(job["steps"]) < FEW_STEPS:
        wanted.append(f"{FEW_STEPS} steps or more after the warm-up")
    if "record_shapes" in missing:
        wanted.append("shapes (record_shapes=True)")
    if not seen.facts("allocator").get("reserved_peak_bytes"):
        wanted.append("memory events (profile_memory=True)")
    if seen.facts("unattributed"):
        wanted.append("synchronisation events (enable_cuda_sync_events)")
    if _needs_stacks(seen):
        wanted.append("Python stacks once (with_stack=True), for the stalls without a name")
    return wanted


def _needs_stacks(seen: Seen) -> bool:
    """Tell whether much of the host's time has no name and no stacks were recorded."""
    overhead = seen.result["quality"].get("profiler_overhead") or {}
    stalls = [row for row in seen.result["job"]["leaves"] if row["leaf"] == "other_host"]
    return not overhead.get("with_stack") and any(row["share"] > 0.02 for row in stalls)
