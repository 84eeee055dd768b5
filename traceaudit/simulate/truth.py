"""What is known by construction about a simulated run, as `truth.json`."""

from collections.abc import Sequence
from statistics import median_low
from typing import Any

from traceaudit.simulate.job import Clock, Job
from traceaudit.simulate.kernels import PEAK_FLOP_PER_S
from traceaudit.simulate.recording import Recording, SimulationError, StepTruth

ROUNDING_NS = 1_000  # two nanoseconds for each of the some hundred edges of a step, by a clock that drifts


def truth(name: str, description: str, job: Job, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the truth about a run, in true time; the leaves of a step add up to its window."""
    known: dict[str, Any] = {
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
        "caused": caused(job, recordings),
        "clock": {"hosts": {f"host{host}": clock_truth(job.clocks.get(host, Clock())) for host in range(job.hosts)}},
        "tolerance_ns": tolerance_ns(job, recordings),
        "mfu": mfu(job, recordings),
    }
    if job.mixed_waits:
        known["straggler_leaves_mixed"] = True
        if job.pipelined:
            known["pipeline_leaves_mixed"] = True
    return known


def step_truth(step: StepTruth) -> dict[str, Any]:
    """Return the truth about one step of one rank."""
    return {
        "step": step.number,
        "window_ns": step.end_ns - step.start_ns,
        "leaves": {leaf: ns for leaf, ns in sorted(step.leaves.items()) if ns},
        "matmul_flops": step.matmul_flops,
        "overlapped_comm_ns": step.overlapped_comm_ns,
    }


def traced(job: Job, recordings: Sequence[Recording]) -> list[Recording]:
    """Return the recordings of which files are written."""
    return [recording for recording in recordings if recording.rank not in job.lost_ranks]


def caused(job: Job, recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Return what each culprit of a single fault cost: the waits of traced ranks, and its own excess or pause.

    A culprit alone caused all waits, also those for a rank that had waited for it; of several, each caused those for
    itself. Its own excess is what it has under the fault's leaf more than the median of the others.
    """
    fault = job.fault
    if fault is None:
        return []
    seen = traced(job, recordings)
    waits = [waited for recording in seen for step in recording.steps for waited in step.awaited.items()]
    usual_ns = median_low(
        recording.booked_ns(fault.own_leaf) for recording in seen if recording.rank not in fault.ranks
    )
    all_ns = sum(recording.booked_ns(job.waiting_leaf) for recording in seen)
    entries: list[dict[str, Any]] = []
    for rank in fault.ranks:
        alone = len(fault.ranks) == 1
        waited_ns = all_ns if alone else sum(ns for awaited, ns in waits if awaited == rank)
        own_ns = recordings[rank].booked_ns(fault.own_leaf) - usual_ns
        shared = {"group": list(fault.ranks)} if fault.together else {}
        entries.append({"rank": rank, "cause": fault.cause, "caused_ns": waited_ns, "own_ns": own_ns, **shared})
    if sum(entry["caused_ns"] for entry in entries) != all_ns:
        raise SimulationError("there are waits that none of the fault's ranks caused")
    return entries


def clock_truth(clock: Clock) -> dict[str, int]:
    """Return the error of a host's clock: it shows true time + offset + drift."""
    return {"offset_ns": clock.offset_ns, "drift_ppb": clock.drift_ppb}


def tolerance_ns(job: Job, recordings: Sequence[Recording]) -> int:
    """Return by how much a leaf of a step may differ from the truth: not at all, unless a clock drifts.

    Then no reader can know which clock runs true; each measures the same time differently by the drift.
    """
    drift_ppb = max((abs(clock.drift_ppb) for clock in job.clocks.values()), default=0)
    longest_ns = max(step.end_ns - step.start_ns for recording in recordings for step in recording.steps)
    return -(-longest_ns * drift_ppb // 1_000_000_000) + ROUNDING_NS if drift_ppb else 0


def mfu(job: Job, recordings: Sequence[Recording]) -> float | None:
    """Return 6·params·tokens ÷ (peak · summed windows) of the traced ranks; None without a model."""
    params, tokens = job.run.get("params"), job.run.get("tokens_per_step")
    if params is None or tokens is None:
        return None
    steps = [step for recording in traced(job, recordings) for step in recording.steps]
    flops = 6 * params * tokens * len(steps) // len(recordings)
    window_ns = sum(step.end_ns - step.start_ns for step in steps)
    return float(flops * 1_000_000_000 / (PEAK_FLOP_PER_S * window_ns))
