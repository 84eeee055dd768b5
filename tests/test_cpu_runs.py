"""Jobs trained on two CPU processes over gloo, recorded by `traceaudit.capture`: planted faults are found.

Times depend on the machine, so that expectations are shares with a wide margin, counts, and sums that are exact.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import alone, common, once
from traceaudit.audit import Audit
from traceaudit.errors import TraceAuditError
from traceaudit.flops.counting import counted_on_host
from traceaudit.host_device import WARNING, on_host
from traceaudit.inspection.inspect import inspect
from traceaudit.pipeline import analyze
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise, read_trace
from traceaudit.steps import Selection

torch = importlib.import_module("torch") if os.environ.get("CI") == "true" else pytest.importorskip("torch")
job = importlib.import_module("tests.cpu_job")

ROOT = Path(__file__).parents[1]
WARMUP_STEPS = job.SKIP + job.TIMED + job.WARMUP
Train = Callable[..., Path]
Attributed = Callable[..., Audit]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Give a function that trains a job with faults and returns what it left, once for all test processes."""
    shared = common(tmp_path_factory, "cpu_jobs")
    command = [sys.executable, "-m", "tests.cpu_job"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as jobs:
        assert jobs.stdin is not None
        assert jobs.stdout is not None
        asked, answers = jobs.stdin, jobs.stdout

        def trained(*scenario: str) -> Path:
            directory = shared / "-".join(scenario)
            with alone(directory) as missing:
                if missing:
                    new = directory.with_suffix(".new")
                    new.mkdir()
                    asked.write(json.dumps([str(new), *scenario]) + "\n")
                    asked.flush()
                    assert json.loads(answers.readline()) == [0, 0]
                    new.rename(directory)
            return directory

        yield trained
        asked.close()


@pytest.fixture(scope="module")
def attributed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Attributed:
    """Give a function that trains a job with faults and returns its analysis, whose leaves add up to its windows."""
    shared = common(tmp_path_factory, "audited_cpu_jobs")
    audited = once(shared, lambda name: train(*name.split("-")) / "traces")

    def audit_of(*scenario: str) -> Audit:
        audit = audited("-".join(scenario))
        found = audit.result["job"]
        assert found["buckets"] == {
            bucket: sum(leaf["ns"] for leaf in found["leaves"] if leaf["bucket"] == bucket)
            for bucket in found["buckets"]
        }
        assert sum(found["buckets"].values()) == found["window_ns"]
        assert found["device_rows"] == "cpu_operators"
        assert WARNING in audit.result["quality"]["warnings"]
        assert WARNING in audit.headline
        assert audit.mfu is None
        return audit

    return audit_of


def share(audit: Audit, bucket: str, *leaves: str) -> float:
    """Return the share of some leaves of a bucket, of all of it without names."""
    rows = [row for row in audit.result["job"]["leaves"] if row["bucket"] == bucket]
    return float(sum(row["share"] for row in rows if not leaves or row["leaf"] in leaves))


PARALLEL = {"ddp": "dp", "fsdp": "fsdp"}
PIPELINES = {  # jobs, and their virtual stages
    ("gpipe",): 1,
    ("1f1b", "imbalance", "checkpoint"): 1,
    ("interleaved", "imbalance"): 2,
}


@pytest.mark.parametrize("kind", PARALLEL)
def test_data_parallel_jobs_are_attributed(kind: str, attributed: Attributed) -> None:
    """Communication stands under the right dimension, all collectives are matched, nothing is unattributed."""
    audit = attributed(kind)
    found = audit.result["job"]
    assert found["steps"] == list(range(WARMUP_STEPS, WARMUP_STEPS + job.STEPS))[-len(found["steps"]) :]
    assert (found["ranks_traced"], found["world_size"]) == (2, 2)
    exposed = {row["leaf"] for row in found["leaves"] if row["bucket"] == "exposed_comm" and row["ns"]}
    assert exposed == {PARALLEL[kind]}
    assert found["buckets"]["unattributed"] < 0.02 * found["window_ns"]
    assert not [text for text in audit.result["quality"]["warnings"] if "not matched" in text]
    assert found["buckets"]["recompute"] == 0


@pytest.mark.parametrize("kind", PARALLEL)
def test_a_slow_loader_is_found(kind: str, attributed: Attributed) -> None:
    """A pause of the data set is the data loader's, for about as long as it was planted, on both ranks."""
    audit = attributed(kind, "loader", "checkpoint")
    steps = audit.leaves.groupby(["rank", "step"])["ns"].sum()
    loading = audit.leaves[audit.leaves["leaf"] == "data_loader"].groupby(["rank", "step"])["ns"].sum()
    assert len(loading) == len(steps)
    assert loading.min() >= job.PAUSE * 1e9 * 0.95  # the clocks of sleep and profiler differ a little
    assert share(audit, "host_gap", "data_loader") == pytest.approx(loading.sum() / steps.sum())


def test_a_late_rank_is_found(attributed: Attributed) -> None:
    """A pause of one rank is its host gap and the other's wait, charged to the rank that paused."""
    audit = attributed("ddp", "late")
    leaves = audit.leaves.groupby(["rank", "bucket"])["ns"].sum()
    steps = audit.leaves["step"].nunique()
    paused = job.LATE_PAUSE * 1e9 * steps
    assert leaves[job.LATE_RANK, "host_gap"] >= 0.9 * paused
    assert leaves[1 - job.LATE_RANK, "straggler"] >= 0.7 * paused
    worst = audit.stragglers.groupby("rank")["caused_ns"].sum()
    assert worst.idxmax() == job.LATE_RANK
    causes = audit.stragglers[audit.stragglers["rank"] == job.LATE_RANK].set_index("cause")["caused_ns"]
    assert causes.idxmax() == "host_pause"


@pytest.mark.parametrize("job_of", [("ddp", "loader"), ("fsdp", "loader"), ("1f1b", "imbalance")])
def test_checkpoints_are_found(job_of: tuple[str, str], attributed: Attributed) -> None:
    """Every layer runs again in every backward: full recompute, non-reentrant."""
    found = attributed(*job_of, "checkpoint").result["recompute"]
    assert (found["setting"], found["flavour"], found["rule"]) == ("full", "non_reentrant", 1)
    assert found["kernels_ns"] > 0


@pytest.mark.parametrize("job_of", PIPELINES)
def test_pipelines_are_found(job_of: tuple[str, ...], attributed: Attributed) -> None:
    """Stages, micro-batches and virtual stages are those of the job, every message is matched, waits are bubbles."""
    audit = attributed(*job_of)
    found = audit.result["pipeline"]
    virtual = PIPELINES[job_of]
    assert (found["stages"], found["microbatches"], found["virtual_stages"]) == (2, job.MICROBATCHES, virtual)
    assert found["theory"] == 1 / (virtual * job.MICROBATCHES)
    assert not [text for text in audit.result["quality"]["warnings"] if "not matched" in text]
    kinds = {row["kind"] for row in audit.result["collectives"]}
    assert "send_recv" in kinds
    assert share(audit, "pipeline_bubble") > 0


@pytest.mark.parametrize("job_of", [own for own in PIPELINES if "imbalance" in own])
def test_a_heavy_stage_is_found(job_of: tuple[str, ...], attributed: Attributed) -> None:
    """The stage that was given many times the layers works the longest."""
    found = attributed(*job_of).result["pipeline"]
    assert found["heaviest_stage"] == job.LATE_RANK
    assert found["heaviest_ratio"] > 1.1


def test_counted_flops_are_those_of_flop_counter(train: Train) -> None:
    """The FLOPs of a step, counted from the shapes in its trace, are what torch's own counter finds in the model.

    It does not know attention on CPUs: 4 · batch · heads · length² · head size, and 2.5 times that in the backward.
    """
    directory = train("ddp")
    trace = normalise(load(directory / "traces" / "rank0.pt.trace.json.gz"))
    work = counted_on_host(trace)
    counter = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    torch.manual_seed(0)
    model = job.Transformer()
    batch = torch.zeros(job.BATCH, job.LENGTH + 1, dtype=torch.int64)
    with counter:
        job.loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
    attention = work["name"].str.contains("attention")
    forward = 4 * job.BATCH * job.LENGTH**2 * job.WIDTH
    assert work["flops"][~attention].sum() == job.STEPS * counter.get_total_flops()
    assert work["flops"][attention].sum() == job.STEPS * job.LAYERS * 3.5 * forward


def test_counted_and_declared_flops_agree(train: Train) -> None:
    """6 · parameters · tokens of run.json and the counted model FLOPs of both ranks differ by what is no product."""
    directory = train("ddp")
    run = json.loads((directory / "traces" / "run.json").read_text())
    audit = analyze(directory / "traces", peak_tflops=1.0, dtype="fp32")
    assert audit.mfu is not None
    steps = audit.result["job"]["steps"]
    window = audit.result["job"]["window_ns"]
    declared = 6 * run["params"] * run["tokens_per_step"]
    assert audit.mfu == pytest.approx(declared * len(steps) / (1e3 * window), rel=1e-6)
    seen = sum(kernel["flops"] or 0 for kernel in audit.result["kernels"]) / len(steps)
    assert seen == pytest.approx(declared, rel=0.1)


def test_run_json_tells_the_job(train: Train) -> None:
    """Parameters are those of the whole model, also of shards and of all stages of a pipeline."""
    jobs = {("ddp",): 4, ("fsdp",): 4, ("gpipe",): 4, ("interleaved", "imbalance"): 1 + job.HEAVIER + 1 + 1}  # layers
    for scenario, layers in jobs.items():
        run = json.loads((train(*scenario) / "traces" / "run.json").read_text())
        assert run["params"] == sum(weight.numel() for weight in job.Transformer(layers).parameters())
        assert (run["layers"], run["world_size"]) == (layers, 2)
        assert run["step_seconds"] > 0
        assert run["versions"]["torch"] == str(torch.__version__)
        assert run["parallel"].get("pp", 1) == (2 if scenario in PIPELINES else 1)
        assert run["virtual_stages"] == (2 if "interleaved" in scenario else None)
        assert run["process_groups"]
        assert all(group["ranks"] == [0, 1] for group in run["process_groups"])


def test_each_step_has_a_line(train: Train) -> None:
    """The log tells the step, its time and its tokens, and what the recorder did."""
    lines = json.loads((train("ddp") / "lines0.json").read_text())
    phases = [line.rpartition("phase=")[2] for line in lines]
    assert phases == [
        *["free"] * job.SKIP,
        *["timed"] * job.TIMED,
        *["warmup"] * job.WARMUP,
        *["recorded"] * job.STEPS,
    ]
    for number, line in enumerate(lines):
        values = dict(word.split("=") for word in line.split()[1:])
        assert values["step"] == str(number)
        rate = float(values["seconds"]) * float(values["tokens_per_second"])
        assert rate == pytest.approx(job.TOKENS, rel=0.01)


def test_inspection_finds_nothing_amiss(train: Train) -> None:
    """What the recorder wrote lacks nothing but a GPU."""
    found = inspect(train("ddp") / "traces")
    assert found.usable
    assert {lack.what for lack in found.lacks if lack.level != "note"} == {WARNING}


def test_clock_marks_surround_the_steps(train: Train) -> None:
    """Ranks meet before the first recorded step and after the last, outside every step."""
    events = read_trace(train("ddp") / "traces" / "rank0.pt.trace.json.gz").events
    steps = events[events["name"].astype(str).str.startswith("ProfilerStep#")]
    calls = events[events["name"] == "c10d::allreduce_"]["start_ns"].to_numpy()
    assert (calls < steps["start_ns"].min()).sum() == (calls >= steps["end_ns"].max()).sum() == 4


def test_device_rows_partition_the_operators(train: Train) -> None:
    """Rows that stand for kernels lie inside operators of their name, overlap on no thread, and have a launch each."""
    trace = read_trace(train("ddp") / "traces" / "rank0.pt.trace.json.gz")
    standing = on_host(trace, Selection())
    assert standing is not None
    rows = standing.events[(standing.events["stream"] >= 0) & (standing.events["stream"] < 1000)]
    order = rows.sort_values("start_ns")
    assert (order["start_ns"].to_numpy()[1:] >= order["end_ns"].to_numpy()[:-1]).all()
    launches = standing.events[(standing.events["name"] == "host launch")]
    assert np.isin(rows["correlation"], launches["correlation"]).all()
    products = rows[rows["name"] == "aten::mm"]
    operators = trace.events[trace.events["name"] == "aten::mm"]
    spent = (operators["end_ns"] - operators["start_ns"]).sum()
    assert 0.5 * spent < (products["end_ns"] - products["start_ns"]).sum() <= spent


def changed(directory: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write a job's first trace changed."""
    gzip = importlib.import_module("gzip")
    content = json.loads(gzip.decompress((directory / "traces" / "rank0.pt.trace.json.gz").read_bytes()))
    change(content)
    path = target / "rank0.json"
    path.write_text(json.dumps(content))
    return path


def with_device(content: dict[str, Any]) -> None:
    """Let the file name a GPU."""
    content["deviceProperties"] = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]


def with_launches(content: dict[str, Any]) -> None:
    """Let the host launch kernels that have no row."""
    first = next(event for event in content["traceEvents"] if event.get("cat") == "cpu_op")
    content["traceEvents"].append({**first, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {}})


def with_nccl(content: dict[str, Any]) -> None:
    """Let the job use NCCL."""
    content["distributedInfo"]["backend"] = "nccl"


def without_steps(content: dict[str, Any]) -> None:
    """Leave out what marks steps."""
    marks = ("ProfilerStep#", "Optimizer.")
    content["traceEvents"] = [event for event in content["traceEvents"] if not str(event.get("name")).startswith(marks)]


@pytest.mark.parametrize("change", [with_device, with_launches, with_nccl, without_steps])
def test_a_gpu_job_without_gpu_rows_is_no_cpu_job(
    change: Callable[[dict[str, Any]], None], train: Train, tmp_path: Path
) -> None:
    """Whatever speaks of a GPU, or of no training steps, keeps the error."""
    path = changed(train("ddp"), tmp_path, change)
    with pytest.raises(TraceAuditError, match="no GPU activity"):
        analyze(path)


def test_a_rank_without_gpu_rows_beside_one_that_has_some_is_left_out(
    train: Train, simulated: Callable[[str], Path], tmp_path: Path
) -> None:
    """CPU operators stand for a device only where no rank has GPU rows."""
    from traceaudit.account import account
    from traceaudit.pipeline import _devices

    with_gpu = account(read_trace(next(simulated("late_rank").glob("*.json.gz"))), Selection())
    on_cpu = account(read_trace(train("ddp") / "traces" / "rank0.pt.trace.json.gz"), Selection())
    assert on_cpu.on_host
    assert on_cpu.steps is not None
    kept, standing = _devices([with_gpu, on_cpu])
    assert not standing
    assert [own.steps is None for own in kept] == [False, True]
