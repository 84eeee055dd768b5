"""What `simulate` plants, `analyze` finds, to the nanosecond."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Audited
from traceaudit.audit import Audit
from traceaudit.pipeline import analyze
from traceaudit.simulate import SCENARIOS

Directory = Callable[[str], Path]


POOLED = ("exposed_comm/pp", "unattributed/other")  # into which the waits of a pipeline may divide, too


def truth_of(directory: Path) -> dict[str, Any]:
    """Return the planted answer."""
    truth: dict[str, Any] = json.loads((directory / "truth.json").read_text())
    return truth


def planted(truth: dict[str, Any]) -> dict[tuple[int, int, str], int]:
    """Return nanoseconds by rank, step and leaf; compute as one."""
    leaves: dict[tuple[int, int, str], int] = defaultdict(int)
    for rank in truth["ranks"]:
        for step in rank["steps"] if rank["traced"] else ():
            for leaf, ns in step["leaves"].items():
                leaves[rank["rank"], step["step"], grouped(truth, leaf)] += ns
    return dict(leaves)


def grouped(truth: dict[str, Any], leaf: str) -> str:
    """Return the name under which a leaf is compared: compute as one; waits as one where several causes mix."""
    bucket, name = leaf.split("/")
    if bucket in ("compute", "achieved", "sub_roofline"):
        return "compute"
    if truth.get("pipeline_leaves_mixed", False) and (bucket == "pipeline_bubble" or leaf in POOLED):
        return "waits"
    if truth.get("straggler_leaves_mixed", False) and bucket == "straggler" and name != "slow_gpu":
        return "waits"
    return leaf


def found(audit: Audit, truth: dict[str, Any]) -> dict[tuple[int, int, str], int]:
    """Return the same of an analysis."""
    leaves: dict[tuple[int, int, str], int] = defaultdict(int)
    for rank, step, bucket, leaf, ns in audit.leaves.itertuples(index=False):
        leaves[rank, step, grouped(truth, f"{bucket}/{leaf}")] += ns
    return dict(leaves)


SMALL = [name for name, scenario in SCENARIOS.items() if not scenario.large]


@pytest.mark.parametrize("scenario", SMALL)
def test_planted_time_comes_back(scenario: str, simulated: Directory, audited: Audited) -> None:
    """Every leaf of every rank and step equals the simulator's books; to the nanosecond, but for drifting clocks."""
    truth = truth_of(simulated(scenario))
    measured, expected = found(audited(scenario), truth), planted(truth)
    wrong = {
        key: (measured.get(key, 0), expected.get(key, 0))
        for key in measured.keys() | expected.keys()
        if abs(measured.get(key, 0) - expected.get(key, 0)) > truth["tolerance_ns"]
    }
    assert wrong == {}


@pytest.mark.parametrize("scenario", SMALL)
def test_achieved_time_is_flops_over_peak(scenario: str, simulated: Directory, audited: Audited) -> None:
    """Declared FLOPs come back as their time at 989.4 TFLOP/s, within the rounding of one nanosecond a rank's step."""
    audit = audited(scenario)
    run = json.loads((simulated(scenario) / "run.json").read_text())
    steps = len(audit.result["job"]["steps"])
    traced = audit.result["job"]["ranks_traced"] / run["world_size"]
    expected = 6 * run["params"] * run["tokens_per_step"] * steps * traced / 989.4e3
    achieved = audit.result["job"]["buckets"]["achieved"]
    assert abs(achieved - expected) <= steps * run["world_size"]


@pytest.mark.parametrize("scenario", ["compute_only", "late_rank", "recompute", "run_28_mfu"])
def test_counted_flops_leave_recompute_out(scenario: str, simulated: Directory) -> None:
    """Without declared FLOPs, those of the shapes are counted; the simulator knows them."""
    directory = simulated(scenario)
    audit = analyze(directory, config=empty_config(directory))
    per_step: dict[int, float] = defaultdict(float)
    for rank in truth_of(directory)["ranks"]:
        for step in rank["steps"]:
            per_step[step["step"]] += step["matmul_flops"]
    assert audit.result["model"]["numerator"]["source"] == "counted"
    assert audit.result["model"]["counted_flops_per_step"] == sorted(per_step.values())[len(per_step) // 2]


def empty_config(directory: Path) -> Path:
    """Return a configuration that declares nothing, so that run.json is not read."""
    path = directory.parent / "nothing.json"
    path.write_text("{}")
    return path


def test_run_28_mfu_has_its_mfu(simulated: Directory, audited: Audited) -> None:
    """The 28 % run reads 28 %, and recompute makes HFU higher."""
    result = audited("run_28_mfu").result
    assert round(result["job"]["mfu"], 3) == round(truth_of(simulated("run_28_mfu"))["mfu"], 3)
    assert result["job"]["hfu"] > result["job"]["mfu"]
    assert 0.277 < result["job"]["mfu"] < 0.283


def test_memo_of_hidden_communication(simulated: Directory, audited: Audited) -> None:
    """Communication under compute costs nothing and is shown as a memo."""
    audit = audited("hidden_allreduce")
    truth = truth_of(simulated("hidden_allreduce"))
    hidden = sum(step["overlapped_comm_ns"] for rank in truth["ranks"] for step in rank["steps"])
    assert audit.result["job"]["overlapped_comm_ns"] == hidden
    assert audit.result["job"]["buckets"]["exposed_comm"] == 0


def test_sample_is_what_the_simulator_writes(simulated: Directory) -> None:
    """The sample traces of the project are those of the scenario, byte for byte."""
    sample = Path(__file__).parents[1] / "sample_traces" / "run_28_mfu"
    written = simulated("run_28_mfu")
    names = sorted(path.name for path in written.iterdir())
    assert [name for name in names if (sample / name).read_bytes() != (written / name).read_bytes()] == []
