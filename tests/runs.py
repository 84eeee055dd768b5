"""Simulated runs with jitter, for tests of what is noise: equal programs, and no two kernels equally long."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traceaudit.pipeline import analyze
from traceaudit.simulate import play, write_trace
from traceaudit.simulate import write_json as write_facts
from traceaudit.simulate.job import Collective, Instruction, Job, Node, Op, Ops, Pause

Change = Callable[[Instruction], Instruction]


def changed(job: Job, change: Change) -> Job:
    """Return a run with each of its instructions changed."""
    programs = [replace(program, instructions=tuple(map(change, program.instructions))) for program in job.programs]
    return replace(job, programs=tuple(programs))


def jittered(job: Job, seed: int, spread: float = 0.02) -> Job:
    """Return a run whose kernels, transfers and pauses vary; of a collective alike on all ranks."""
    programs = []
    for program in job.programs:
        own, common = np.random.default_rng([seed, program.rank]), np.random.default_rng([seed, 1 << 20])
        instructions = tuple(_varied(instruction, own, common, spread) for instruction in program.instructions)
        programs.append(replace(program, instructions=instructions))
    return replace(job, programs=tuple(programs))


def _varied(
    instruction: Instruction, own: np.random.Generator, common: np.random.Generator, spread: float
) -> Instruction:
    def times(ns: int, random: np.random.Generator) -> int:
        return max(round(ns * (1 + spread * random.standard_normal()) / 1000), 1) * 1000 if ns else 0

    def varied(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(
            replace(op, kernel=replace(op.kernel, duration_ns=times(op.kernel.duration_ns, own))) for op in ops
        )

    if isinstance(instruction, Ops):
        return replace(instruction, ops=varied(instruction.ops))
    if isinstance(instruction, Node):
        return replace(instruction, ops=varied(instruction.ops), recomputed=varied(instruction.recomputed))
    if isinstance(instruction, Collective):
        return replace(instruction, transfer_ns=times(instruction.transfer_ns, common))
    if isinstance(instruction, Pause):
        return replace(instruction, gap_ns=times(instruction.gap_ns, own), host_ns=times(instruction.host_ns, own))
    return instruction


def result_of(job: Job, folder: Path) -> dict[str, Any]:
    """Write the traces of a run into an empty folder and return the result of their analysis."""
    folder.mkdir(parents=True)
    for recording in play(job):
        write_trace(folder / f"rank{recording.rank}_trace.json", job, recording)
    write_facts(folder / "run.json", dict(job.run))
    return analyze(folder).result
