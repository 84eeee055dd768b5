"""Traces of training runs whose lost time is known by construction.

>>> simulate(Path("run"), "late_rank")  # doctest: +SKIP
PosixPath('run')
"""

import json
from pathlib import Path
from typing import Any

from traceaudit.simulate.clockwork import play
from traceaudit.simulate.kineto_file import Layout, write_trace
from traceaudit.simulate.recording import SimulationError
from traceaudit.simulate.scenarios import SCENARIOS, Scenario
from traceaudit.simulate.truth import truth

__all__ = ["SCENARIOS", "Layout", "Scenario", "SimulationError", "play", "simulate", "truth", "write_trace"]


def simulate(
    directory: Path,
    scenario: str,
    *,
    layout: Layout = Layout.KINETO,
    compress: bool = True,
    force: bool = False,
) -> Path:
    """Write the traces of a scenario, and beside them `run.json` and the answer in `truth.json`.

    Args:
        directory: where to write; created if need be.
        scenario: one of `SCENARIOS`.
        layout: which writer's files to produce.
        compress: gzip the traces.
        force: replace files that are there.

    Returns:
        The directory.

    Raises:
        SimulationError: there is no such scenario, or a file is there already.
    """
    if scenario not in SCENARIOS:
        raise SimulationError(f"no scenario {scenario!r}; there are: {', '.join(SCENARIOS)}")
    known = SCENARIOS[scenario]
    job = known.build()
    recordings = play(job)
    suffix = ".json.gz" if compress else ".json"
    traces = {
        directory / f"rank{recording.rank}_trace{suffix}": recording
        for recording in recordings
        if recording.rank not in job.lost_ranks
    }
    facts = {
        directory / "run.json": dict(job.run),
        directory / "truth.json": {
            **truth(known.name, known.description, job, recordings),
            "findings": list(known.findings),
        },
    }
    refuse_overwriting([*traces, *facts], force=force)
    directory.mkdir(parents=True, exist_ok=True)
    for path, recording in traces.items():
        write_trace(path, job, recording, layout)
    for path, content in facts.items():
        write_json(path, content)
    return directory


def refuse_overwriting(paths: list[Path], *, force: bool) -> None:
    """Raise if a file is there that would be replaced without `force`."""
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise SimulationError(f"{there[0]} exists; choose another directory or pass --force")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of facts for reading by eye."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
