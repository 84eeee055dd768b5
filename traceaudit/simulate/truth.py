"""What is known by construction about a simulated run, as `truth.json`."""

from collections.abc import Sequence
from typing import Any

from traceaudit.simulate.job import Job
from traceaudit.simulate.kernels import PEAK_FLOP_PER_S
from traceaudit.simulate.recording import Recording, StepTruth


def truth(name: str, description: str, job: Job, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the truth about a run; the leaves of a step add up to its window."""
    return {
        "scenario": name,
        "description": description,
        "ranks": [
            {
                "rank": recording.rank,
                "stage": recording.stage,
                "traced": recording.rank not in job.lost_ranks,
                "steps": [step_truth(step) for step in recording.steps],
            }
            for recording in recordings
        ],
        "planted": list(job.planted),
        "mfu": mfu(job, recordings),
    }


def step_truth(step: StepTruth) -> dict[str, Any]:
    """Return the truth about one step of one rank."""
    return {
        "step": step.number,
        "window_ns": step.end_ns - step.start_ns,
        "leaves": {leaf: ns for leaf, ns in sorted(step.leaves.items()) if ns},
        "matmul_flops": step.matmul_flops,
        "overlapped_comm_ns": step.overlapped_comm_ns,
    }


def mfu(job: Job, recordings: Sequence[Recording]) -> float | None:
    """Return 6·params·tokens ÷ (peak · summed windows); None without a model."""
    params, tokens = job.run.get("params"), job.run.get("tokens_per_step")
    if params is None or tokens is None:
        return None
    steps = [step for recording in recordings for step in recording.steps]
    flops = 6 * params * tokens * len(steps) // len(recordings)
    window_ns = sum(step.end_ns - step.start_ns for step in steps)
    return float(flops * 1_000_000_000 / (PEAK_FLOP_PER_S * window_ns))
