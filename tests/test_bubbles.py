"""Waits of a pipeline divide as the golden cases say: 1F1B, four stages, eight micro-batches, F = 1, B = 2 units."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Audited
from traceaudit.audit import Audit
from traceaudit.pipeline import analyze
from traceaudit.simulate import play, write_trace
from traceaudit.simulate.job import Task
from traceaudit.simulate.schedules import UnitPipeline, unit_pipeline

UNIT_NS = 1_000_000
OVERHEAD_NS = 50_000  # kernels of sends and receives, and launches around a pause, are not free: 5 µs each

# case: (waits per rank and step, in units; division of their sum). From attribution rule 3.3.
GOLDEN: dict[str, tuple[UnitPipeline, list[float], dict[str, float]]] = {
    "balanced": (UnitPipeline(), [9, 9, 9, 9], {"warmup_drain": 36}),
    "last stage x1.5": (
        UnitPipeline(scale=lambda stage, _: 1.5 if stage == 3 else 1.0),
        [21, 21, 21, 9],
        {"warmup_drain": 39.375, "stage_imbalance": 32.625},
    ),
    "stage 1 x1.5": (
        UnitPipeline(scale=lambda stage, _: 1.5 if stage == 1 else 1.0),
        [18, 6, 18, 18],
        {"warmup_drain": 36.375, "stage_imbalance": 23.625},
    ),
    "micro-batch 4 x3": (
        UnitPipeline(scale=lambda _, microbatch: 3.0 if microbatch == 4 else 1.0),
        [24, 24, 24, 24],
        {"warmup_drain": 45, "data_imbalance": 51},
    ),
    "host pause": (
        UnitPipeline(pauses={(2, Task(2, "F", 5)): 3 * UNIT_NS}),
        [12, 12, 9, 12],
        {"warmup_drain": 36, "host_caused": 9},
    ),
    "transfer 0.1 a hop": (
        UnitPipeline(transfer_ns=UNIT_NS // 10),
        [10.6, 10.6, 10.6, 10.6],
        {"warmup_drain": 36, "pp": 6.4},
    ),
}
WAITS = ("warmup_drain", "stage_imbalance", "data_imbalance", "late_rank", "host_caused", "pp", "undivided")


def anonymous(trace: dict[str, Any]) -> None:
    """Remove what describes the process groups: the layout must come from who sends to whom."""
    for group in trace["distributedInfo"]["pg_config"]:
        group["pg_desc"] = "undefined"
    for event in trace["traceEvents"]:
        if "Process Group Description" in (event.get("args") or {}):
            event["args"]["Process Group Description"] = "undefined"


Case = tuple[str, Path, Audit]


@pytest.fixture(scope="module", params=GOLDEN)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return the name of a golden case, the directory of its traces and their analysis."""
    name = str(request.param)
    directory = tmp_path_factory.mktemp("golden")
    job = unit_pipeline(GOLDEN[name][0])
    for rank, recording in enumerate(play(job)):
        write_trace(directory / f"rank{rank}_trace.json.gz", job, recording)
    return name, directory, analyze(directory)


def divided(audit: Audit) -> dict[str, float]:
    """Return the waits of a step in the middle by leaf, in units, summed over ranks."""
    leaves = audit.leaves
    sums = leaves[leaves["step"] == sorted(set(leaves["step"]))[1]].groupby("leaf")["ns"].sum()
    return {leaf: sums[leaf] / UNIT_NS for leaf in WAITS if leaf in sums.index and sums[leaf] > OVERHEAD_NS}


def test_golden_case_divides_as_it_should(case: Case) -> None:
    """The waits of each golden case divide into the parts of the table."""
    name, _, audit = case
    assert divided(audit) == pytest.approx(GOLDEN[name][2], abs=OVERHEAD_NS / UNIT_NS)


def test_golden_case_waits_per_rank(case: Case) -> None:
    """Every rank waits what the table says."""
    name, _, audit = case
    leaves = audit.leaves
    middle = leaves[(leaves["step"] == sorted(set(leaves["step"]))[1]) & leaves["leaf"].isin((*WAITS, "other"))]
    waits = middle.groupby("rank")["ns"].sum() / UNIT_NS
    assert waits.tolist() == pytest.approx(GOLDEN[name][1], abs=OVERHEAD_NS / UNIT_NS)


def test_golden_case_without_described_groups(case: Case, tmp_path: Path) -> None:
    """The stages are found from who sends to whom, with the same division."""
    name, directory, _ = case
    for path in directory.glob("rank*"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        anonymous(trace)
        (tmp_path / path.name).write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    audit = analyze(tmp_path)
    assert audit.result["pipeline"]["layout_source"] == "partners of point-to-point communication"
    assert divided(audit) == pytest.approx(GOLDEN[name][2], abs=OVERHEAD_NS / UNIT_NS)


def test_theory_stands_beside_the_measurement(audited: Audited) -> None:
    """For a balanced 1F1B the measured bubble is (p - 1)/m of the ideal time."""
    pipeline = audited("pipeline_1f1b").result["pipeline"]
    assert (pipeline["stages"], pipeline["microbatches"], pipeline["theory"]) == (4, 8, 3 / 8)
    assert pipeline["measured"] == pytest.approx(3 / 8, rel=0.01)
    assert pipeline["replay_error"] < 0.01


def test_untraced_stage_leaves_the_waits_undivided(simulated: Callable[[str], Path], tmp_path: Path) -> None:
    """Without a trace of some stage there is no replay, and the report says so."""
    for path in simulated("pipeline_1f1b").glob("rank[012]*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    result = analyze(tmp_path).result
    assert "3 of 4 stages" in result["pipeline"]["undivided_reason"]
    leaves = {leaf["leaf"] for leaf in result["job"]["leaves"] if leaf["bucket"] == "pipeline_bubble"}
    assert leaves == {"undivided"}
