"""The simulator lays down what it promises: its answer is one that the definitions demand."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest

from traceaudit.errors import TraceAuditError
from traceaudit.simulate import SCENARIOS, Layout, play, simulate, truth, write_trace
from traceaudit.simulate.big_job import BigJob, big_job
from traceaudit.simulate.communication import SEND_STREAM
from traceaudit.simulate.job import (
    Clock,
    Collective,
    Enter,
    Group,
    Job,
    Node,
    RankProgram,
    Recv,
    Send,
    StartProfiler,
    Step,
    Task,
    Wait,
)
from traceaudit.simulate.kernels import PEAK_FLOP_PER_S
from traceaudit.simulate.kineto_rows import BASE_NS, ORIGIN_NS
from traceaudit.simulate.orders import ORDERS
from traceaudit.simulate.recording import Interval, Recording, Span, clipped, shared_ns, union
from traceaudit.simulate.schedules import UNIT_NS, UnitPipeline, unit_pipeline

LATENCY_NS, OVERHEAD_NS = 6_000, 12_000  # of a launch; head and call of an operator and that latency
EPOCH_LAYOUTS = (Layout.ARRAY, Layout.KINETO_2021)


@cache
def played(scenario: str) -> tuple[Job, tuple[Recording, ...]]:
    """Play a scenario once for all tests."""
    job = SCENARIOS[scenario].build()
    return job, play(job)


def leaf_ns(recording: Recording, leaf: str, *, step: int = 4) -> int:
    """Return what the truth holds under a leaf, or under all leaves of a bucket."""
    leaves = next(known.leaves for known in recording.steps if known.number == step)
    return sum(ns for name, ns in leaves.items() if name == leaf or name.startswith(f"{leaf}/"))


def is_communication(span: Span) -> bool:
    """Whether a kernel belongs to NCCL."""
    return span.name.startswith("nccl")


def gpu_spans(recording: Recording) -> list[Span]:
    """Return what ran on the GPU."""
    return [span for span in recording.spans if span.category in ("kernel", "gpu_memcpy")]


every_scenario = pytest.mark.parametrize("scenario", [name for name, known in SCENARIOS.items() if not known.large])


@every_scenario
def test_leaves_add_up_and_windows_abut(scenario: str) -> None:
    """Every nanosecond of a step is in one leaf, and steps follow each other; ranks that communicate end together."""
    job, recordings = played(scenario)
    for recording in recordings:
        for step, following in pairwise(recording.steps):
            assert step.end_ns == following.start_ns
        assert all(sum(step.leaves.values()) == step.end_ns - step.start_ns for step in recording.steps)
        last = max(span.end_ns for span in gpu_spans(recording))
        assert last == recording.steps[-1].end_ns
    tied = job.host if scenario == "host_alone" else lambda _: 0
    ends = {(tied(recording.rank), recording.steps[-1].end_ns) for recording in recordings}
    assert len(ends) == (2 if scenario == "host_alone" else 1)


@every_scenario
def test_truth_agrees_with_the_rows(scenario: str) -> None:
    """The state of the GPU counted from the rows is the truth summed by state, whatever the booking thought."""
    _, recordings = played(scenario)
    for recording in recordings:
        rows = gpu_spans(recording)
        kernels = [span for span in rows if span.category == "kernel"]
        compute = union((s.start_ns, s.end_ns) for s in kernels if not is_communication(s))
        communication = union((s.start_ns, s.end_ns) for s in kernels if is_communication(s))
        copies = union((s.start_ns, s.end_ns) for s in rows if s.category == "gpu_memcpy")
        for step in recording.steps:
            number, window = step.number, [(step.start_ns, step.end_ns)]
            compute_ns = shared_ns(compute, window)
            hidden_ns = shared_ns(compute, clipped(communication, *window[0]))
            idle_ns = window[0][1] - window[0][0] - shared_ns(union([*compute, *communication, *copies]), window)
            covered = union([*compute, *communication])
            alone_ns = shared_ns(union([*covered, *copies]), window) - shared_ns(covered, window)
            lost_ns = leaf_ns(recording, "unattributed", step=number)
            host_ns = leaf_ns(recording, "host_gap", step=number) + lost_ns - alone_ns
            computing = ("compute", "recompute", "straggler/slow_gpu")
            assert sum(leaf_ns(recording, leaf, step=number) for leaf in computing) == compute_ns
            assert step.overlapped_comm_ns == hidden_ns
            # Idle that is no host gap lies between a collective and the kernel that waited for it: 2 µs each.
            collectives = len(clipped(communication, *window[0]))
            assert idle_ns - host_ns in range(0, 2_000 * collectives + 1, 2_000)


@every_scenario
def test_rows_obey_cuda(scenario: str) -> None:
    """A kernel starts after its launch began, has one launch, and streams run one activity at a time."""
    _, recordings = played(scenario)
    for recording in recordings:
        calls = {s.args["correlation"]: s for s in recording.spans if s.category == "cuda_runtime"}
        streams: dict[int, list[Interval]] = defaultdict(list)
        for span in gpu_spans(recording):
            assert calls[span.args["correlation"]].start_ns <= span.start_ns < span.end_ns
            assert calls[span.args["correlation"]].args["External id"] == span.args["External id"]
            streams[span.thread].append((span.start_ns, span.end_ns))
        for intervals in streams.values():
            ordered = sorted(intervals)
            assert all(a[1] <= b[0] for a, b in pairwise(ordered))


@every_scenario
def test_the_host_has_no_holes(scenario: str) -> None:
    """Host rows below the steps touch each other, so that every instant of a gap has a cause."""
    _, recordings = played(scenario)
    for recording in recordings:
        host = [s for s in recording.spans if s.process == recording.process]
        steps = [(s.start_ns, s.end_ns) for s in host if s.name.startswith("ProfilerStep#")]
        rows = [(s.start_ns, s.end_ns) for s in host if not s.name.startswith("ProfilerStep#")]
        assert union(clipped(rows, steps[0][0], steps[-1][1])) == union(steps)
        assert len(steps) == len(recording.steps)


@every_scenario
def test_rows_nest_on_each_host_thread(scenario: str) -> None:
    """Two host rows of a thread are apart, or one lies in the other."""
    _, recordings = played(scenario)
    for recording in recordings:
        for thread in (recording.main_thread, recording.autograd_thread):
            open_ends: list[int] = []
            rows = [s for s in recording.spans if s.process == recording.process and s.thread == thread]
            for span in sorted(rows, key=lambda s: (s.start_ns, -s.end_ns)):
                while open_ends and open_ends[-1] <= span.start_ns:
                    open_ends.pop()
                assert not open_ends or span.end_ns <= open_ends[-1]
                open_ends.append(span.end_ns)


@every_scenario
def test_counted_flops_are_six_params_tokens(scenario: str) -> None:
    """Matmuls without recompute are exactly the declared model FLOPs, and MFU follows by plain arithmetic."""
    job, recordings = played(scenario)
    steps = [step for recording in recordings for step in recording.steps]
    counted = sum(step.matmul_flops for step in steps)
    assert counted == 3 * 6 * job.run["params"] * job.run["tokens_per_step"]
    seconds = sum(step.end_ns - step.start_ns for step in steps) / 1e9
    known = truth(scenario, "", job, recordings)
    assert known["mfu"] == pytest.approx(counted / (PEAK_FLOP_PER_S * seconds), rel=1e-12)


@pytest.mark.parametrize(
    ("scenario", "rank", "leaf", "expected_ns"),
    [
        ("compute_only", 0, "host_gap", 0),
        ("exposed_allreduce", 0, "exposed_comm/dp", 5_369_000 + 2_000),
        ("exposed_allreduce", 3, "straggler", 0),
        ("hidden_allreduce", 1, "exposed_comm", 0),
        ("late_rank", 2, "straggler", 0),
        ("slow_gpu", 3, "straggler/late_rank", 0),
        ("gc_pause", 6, "straggler", 0),
        ("slow_link", 2, "straggler", 0),
        ("slow_link", 2, "exposed_comm/tp", 16 * 448_000 * 5 // 2 + 15 * 2_000),
        ("loader_stall", 0, "host_gap/data_loader", 25_000_000 - OVERHEAD_NS),
        ("loader_stall", 0, "host_gap/launch_latency", LATENCY_NS),
        ("host_pauses", 0, "host_gap/allocator", 400_000 - OVERHEAD_NS),
        ("host_pauses", 0, "host_gap/host_sync", 2_000 + 150_000 - 4_000 - LATENCY_NS),
        ("pipeline_1f1b", 0, "pipeline_bubble/warmup_drain", 9 * UNIT_NS),
        ("run_28_mfu", 2, "host_gap/data_loader", 14_000_000 - OVERHEAD_NS),
    ],
)
def test_planted_losses_are_booked(scenario: str, rank: int, leaf: str, expected_ns: int) -> None:
    """A planted loss is in the truth to the nanosecond."""
    assert leaf_ns(played(scenario)[1][rank], leaf) == expected_ns


def test_others_wait_for_the_late_rank_as_long_as_it_works_more() -> None:
    """The wait of a rank is the late rank's work less its own."""
    _, recordings = played("late_rank")
    work = [leaf_ns(recording, "compute") for recording in recordings]
    waits = [leaf_ns(recording, "straggler/data_imbalance") for recording in recordings]
    assert waits == [work[2] - own for own in work]


def test_a_slow_gpu_costs_what_its_kernels_take_longer() -> None:
    """A healthy rank waits for the excess of the slow one: the difference of their kernels, 12 % of a layer."""
    _, recordings = played("slow_gpu")

    def computing(recording: Recording) -> list[int]:
        spans = [span for span in gpu_spans(recording) if not is_communication(span)]
        spans = [span for span in spans if "multi_tensor_apply" not in span.name]  # the optimizer's are not slowed
        return [span.end_ns - span.start_ns for span in spans]

    healthy, slow = recordings[0], recordings[3]
    excess = sum(computing(slow)) - sum(computing(healthy))
    steps = len(slow.steps)  # equal ones, of which `leaf_ns` is one
    assert steps * leaf_ns(healthy, "straggler/late_rank") == excess
    assert steps * leaf_ns(slow, "straggler/slow_gpu") == excess
    assert excess == pytest.approx(0.12 * sum(computing(healthy)), abs=1_000 * len(computing(healthy)))


def is_recomputed(recording: Recording) -> set[int]:
    """Return the External ids of forward operators that ran again in the backward."""
    return {
        span.args["External id"]
        for span in recording.spans
        if span.thread == recording.autograd_thread
        and "Sequence number" in span.args
        and "evaluate_function" not in span.name
        and "Backward" not in span.name
    }


def kernel_times(recording: Recording) -> dict[object, list[tuple[int, bool]]]:
    """Return duration and whether it is recomputed of the compute kernels, by name, grid and shapes."""
    shapes = {s.args["External id"]: s.args.get("Input Dims") for s in recording.spans if s.category == "cpu_op"}
    again = is_recomputed(recording)
    times: dict[object, list[tuple[int, bool]]] = defaultdict(list)
    for span in gpu_spans(recording):
        if span.category == "kernel" and not is_communication(span):
            external = span.args["External id"]
            key = (span.name, span.args["grid"], shapes[external])
            times[key].append((span.end_ns - span.start_ns, external in again))
    return times


@every_scenario
def test_a_slow_gpu_is_one_by_definition(scenario: str) -> None:
    """The excess of a slow GPU is that of its kernels over its peers' same kernels, if nearly all are slower."""
    job, recordings = played(scenario)
    traced = [recording for recording in recordings if recording.rank not in job.lost_ranks]
    times = [kernel_times(recording) for recording in traced]
    slow = set()
    for recording, own in zip(traced, times, strict=True):
        compared_ns = slower_ns = excess_ns = 0
        for key, runs in own.items():
            if peers := [ns for other in times if other is not own for ns, _ in other.get(key, ())]:
                usual_ns = median_low(peers)
                compared_ns += sum(ns for ns, _ in runs)
                slower_ns += sum(ns for ns, _ in runs if ns > usual_ns * 1.05)
                excess_ns += sum(ns - usual_ns for ns, recomputed in runs if ns > usual_ns * 1.05 and not recomputed)
        is_slow = slower_ns > 0.8 * compared_ns
        assert recording.booked_ns("straggler/slow_gpu") == (excess_ns if is_slow else 0)
        slow |= {recording.rank} if is_slow else set()
    assert slow == {fact["rank"] for fact in job.planted if fact["kind"] == "slow_gpu"}


@pytest.mark.parametrize(
    ("scenario", "ranks", "cause", "leaf"),
    [
        ("late_rank", {2}, "more_work", "data_imbalance"),
        ("slow_gpu", {3}, "slow_gpu", "late_rank"),
        ("missing_rank", {3}, "slow_gpu", "late_rank"),
        ("clock_offset", {5}, "slow_gpu", "late_rank"),
        ("clock_drift", {5}, "slow_gpu", "late_rank"),
        ("host_alone", {5}, "slow_gpu", "late_rank"),
        ("dropped_first", {5}, "slow_gpu", "late_rank"),
        ("gc_pause", {6}, "host_pause", "host_caused"),
        ("slow_link", {2, 3}, "slow_link", "slow_link"),
    ],
)
def test_all_waits_are_the_culprits(scenario: str, ranks: set[int], cause: str, leaf: str) -> None:
    """The waits of the others are booked by their cause, and add up to what the culprits caused."""
    job, recordings = played(scenario)
    known = truth(scenario, "", job, recordings)
    waits: dict[str, int] = defaultdict(int)
    for rank in known["ranks"]:
        for step in rank["steps"] if rank["traced"] else ():
            for name, ns in step["leaves"].items():
                assert ns > 0
                if name.startswith("straggler/") and name != "straggler/slow_gpu":
                    assert rank["rank"] not in ranks
                    waits[name] += ns
    assert waits == {f"straggler/{leaf}": sum(entry["caused_ns"] for entry in known["caused"])}
    assert {entry["rank"] for entry in known["caused"]} == ranks
    assert {entry["cause"] for entry in known["caused"]} == {cause}
    # Each waits for its culprit as long as that one has more to do; after a pause, also for the launch that ends it.
    groups = {"host_alone": 3, "missing_rank": 6, "late_rank": 3, "slow_link": 3}
    launches_ns = OVERHEAD_NS if cause == "host_pause" else 0
    for entry in known["caused"]:
        assert entry["caused_ns"] == groups.get(scenario, 7) * (entry["own_ns"] + launches_ns)


def test_runs_without_a_fault_have_no_waits() -> None:
    """Where nothing is planted, no rank waits for another; where everything is, the leaves of waits are mixed."""
    for scenario in ("exposed_allreduce", "hidden_allreduce", "recompute"):
        job, recordings = played(scenario)
        assert truth(scenario, "", job, recordings)["caused"] == []
        assert sum(recording.booked_ns("straggler") for recording in recordings) == 0
    job, recordings = played("run_28_mfu")
    known = truth("run_28_mfu", "", job, recordings)
    assert known["straggler_leaves_mixed"] is known["pipeline_leaves_mixed"] is True
    for scenario in ("recompute", "pipeline_1f1b"):
        assert not {"straggler_leaves_mixed", "pipeline_leaves_mixed"} & truth(scenario, "", *played(scenario)).keys()


def test_the_garbage_collector_holds_the_launching_thread() -> None:
    """One row of 30 ms on the main thread starves the GPU; the other ranks have no such row."""
    _, recordings = played("gc_pause")
    rows = [(r.rank, s) for r in recordings for s in r.spans if s.category == "python_function"]
    assert [(rank, span.name, span.end_ns - span.start_ns) for rank, span in rows] == [(6, "Python GC", 30_000_000)]
    assert rows[0][1].thread == recordings[6].main_thread
    assert 20_000_000 < leaf_ns(recordings[6], "host_gap/gc") < 30_000_000


def test_a_missing_trace_hides_what_follows_the_last_arrival() -> None:
    """Without one rank's trace, the time after the last traced arrival is transfer or wait; all else is the same."""
    for whole, known in zip(played("slow_gpu")[1], played("missing_rank")[1], strict=True):
        for step, other in zip(whole.steps, known.steps, strict=True):
            renamed = {
                leaf.replace("exposed_comm/dp", "exposed_comm/transfer_or_wait"): ns for leaf, ns in step.leaves.items()
            }
            assert other.leaves == renamed


def collectives(recording: Recording) -> list[Span]:
    """Return the kernels of collectives in order."""
    kernels = [span for span in gpu_spans(recording) if is_communication(span)]
    return sorted(kernels, key=lambda span: span.start_ns)


def test_a_late_profiler_loses_one_collective_and_no_truth() -> None:
    """Rank 3 lacks all rows of the first collective, before its first step, and the truth stays what it was."""
    job, recordings = played("dropped_first")
    late, other = recordings[3], recordings[2]
    assert [span.args["Seq"] for span in collectives(other)[:3]] == [0, 1, 2]
    assert [span.args["Seq"] for span in collectives(late)[:3]] == [1, 2, 3]
    assert len(collectives(late)) == len(collectives(other)) - 1
    for name in ("record_param_comms", "nccl:all_reduce", "cudaLaunchKernelExC"):
        rows = [sum(span.name == name for span in recording.spans) for recording in (late, other)]
        assert rows[0] < rows[1]
    assert late.begun_ns > collectives(other)[0].end_ns + 70_706  # where its profiler's own row begins
    assert min(span.start_ns for span in late.spans) >= late.begun_ns
    assert late.steps[0].start_ns > collectives(other)[2].end_ns
    everyone = [
        replace(program, instructions=tuple(i for i in program.instructions if not isinstance(i, StartProfiler)))
        for program in job.programs
    ]
    whole = play(replace(job, programs=tuple(everyone)))
    assert [recording.steps for recording in recordings] == [recording.steps for recording in whole]


def test_lost_collectives_look_like_others_and_come_without_rhythm() -> None:
    """Without numbers, size and spacing alone tell the collectives apart, and the spacing does not repeat."""
    _, recordings = played("dropped_first_no_seq")
    kernels = collectives(recordings[3])
    assert all("Seq" not in span.args for span in recordings[3].spans)
    step = kernels[2:8]
    sizes = [span.args["In msg nelems"] for span in step]
    assert sorted(sizes.count(size) for size in set(sizes)) == [1, 2, 3]
    assert collectives(recordings[0])[0].args["In msg nelems"] == max(sizes)
    gaps = [after.start_ns - before.end_ns for before, after in pairwise(step)]
    assert len(set(gaps[:4])) > 2


def test_recompute_is_the_forward_once_more() -> None:
    """Recomputed kernels run under evaluate_function on the autograd thread, with numbers no node consumes."""
    job, recordings = played("recompute")
    forward_ns = sum(
        span.end_ns - span.start_ns
        for span in gpu_spans(recordings[0])
        if "fwd" in span.name or "_tn_" in span.name or "GeluCUDA" in span.name or "vectorized_layer" in span.name
    )
    recomputed_ns = sum(leaf_ns(recordings[0], "recompute/kernels", step=step) for step in (3, 4, 5))
    assert forward_ns == 2 * recomputed_ns
    nodes = [item for item in job.programs[0].instructions if isinstance(item, Node)]
    again = {op.sequence for node in nodes for op in node.recomputed}
    assert again
    assert again.isdisjoint(node.sequence for node in nodes)
    rows = [span for span in recordings[0].spans if span.args.get("Sequence number") in again]
    assert {span.thread for span in rows} == {recordings[0].autograd_thread}


# Pipelines

WARMUP_DRAIN, STAGE_IMBALANCE = "pipeline_bubble/warmup_drain", "pipeline_bubble/stage_imbalance"
DIVIDED = (
    WARMUP_DRAIN,
    STAGE_IMBALANCE,
    "straggler/data_imbalance",
    "straggler/late_rank",
    "straggler/host_caused",
    "exposed_comm/pp",
)

# The golden cases of the definitions: the run, its step, and its waits by stage for each reason, in units.
EVEN = [9.0] * 4
GOLDEN: dict[str, tuple[UnitPipeline, float, dict[str, list[float]]]] = {
    "balanced": (UnitPipeline(), 33, {WARMUP_DRAIN: EVEN}),
    "last stage slower": (
        UnitPipeline(stage_scale={3: 1.5}),
        45,
        {WARMUP_DRAIN: [10.125, 10.125, 10.125, 9], STAGE_IMBALANCE: [10.875, 10.875, 10.875, 0]},
    ),
    "stage 1 slower": (
        UnitPipeline(scale=lambda stage, _: 1.5 if stage == 1 else 1),
        42,
        {WARMUP_DRAIN: [10.125, 6, 10.125, 10.125], STAGE_IMBALANCE: [7.875, 0, 7.875, 7.875]},
    ),
    "micro-batch 4 bigger": (
        UnitPipeline(microbatch_scale={4: 3}),
        54,
        {WARMUP_DRAIN: [11.25] * 4, "straggler/data_imbalance": [12.75] * 4},
    ),
    "host pause": (
        UnitPipeline(pauses={(2, Task(2, "F", 5)): 3 * UNIT_NS}),
        36,
        # A send of rank 2 runs while its host pauses: that is communication, and no wait.
        {WARMUP_DRAIN: EVEN, "straggler/host_caused": [3, 3, 0, 3], "exposed_comm/pp": [0, 0, 0.005, 0]},
    ),
    "transfer": (
        UnitPipeline(transfer_ns=UNIT_NS // 10),
        34.6,
        {WARMUP_DRAIN: EVEN, "exposed_comm/pp": [1.6] * 4},
    ),
}
FIXED_NS = 50_000 + 1_500_000 + 20_000 + 2_000  # clearing, optimizer, closing all-reduce and its resumption


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_pipeline_waits(case: str) -> None:
    """A pipeline of four stages and eight micro-batches waits as long as theory says, for the reasons it says."""
    shape, step_units, waits = GOLDEN[case]
    recordings = play(unit_pipeline(shape))
    for step in (3, 4, 5):
        for leaf in DIVIDED:
            expected = [round(units * UNIT_NS) for units in waits.get(leaf, [0] * 4)]
            assert [leaf_ns(recording, leaf, step=step) for recording in recordings] == expected
    windows = {recording.steps[1].end_ns - recording.steps[1].start_ns for recording in recordings}
    assert windows == {round(step_units * UNIT_NS) + FIXED_NS}


@pytest.mark.parametrize(
    ("scenario", "totals"),
    [
        ("pipeline_1f1b", {WARMUP_DRAIN: 36}),
        ("pipeline_coalesced", {WARMUP_DRAIN: 36}),
        ("pipeline_gpipe", {WARMUP_DRAIN: 36}),
        ("pipeline_heavy_stage", {WARMUP_DRAIN: 39.375, STAGE_IMBALANCE: 32.625}),
        ("pipeline_heavy_microbatch", {WARMUP_DRAIN: 45, "straggler/data_imbalance": 51}),
        ("pipeline_host_pause", {WARMUP_DRAIN: 36, "straggler/host_caused": 9, "exposed_comm/pp": 0.005}),
        ("pipeline_transfer", {WARMUP_DRAIN: 36, "exposed_comm/pp": 6.4}),
    ],
)
def test_pipeline_scenarios_are_the_golden_cases(scenario: str, totals: dict[str, float]) -> None:
    """The scenarios hold the totals of the definitions."""
    _, recordings = played(scenario)
    for leaf in DIVIDED:
        total_ns = sum(leaf_ns(recording, leaf) for recording in recordings)
        assert total_ns == round(totals.get(leaf, 0) * UNIT_NS)


@pytest.mark.parametrize(
    ("shape", "bubble_units"),
    [
        *((UnitPipeline(stages=p, microbatches=m), 3 * (p - 1)) for p, m in ((2, 4), (4, 8), (4, 3), (6, 7))),
        *((UnitPipeline(stages=p, microbatches=m, schedule="gpipe"), 3 * (p - 1)) for p, m in ((2, 3), (4, 8))),
        *(
            (UnitPipeline(stages=p, microbatches=m, schedule="interleaved", virtual_stages=v), 3 * (p - 1))
            for p, m, v in ((3, 6, 2), (4, 8, 2), (4, 4, 3))
        ),
        *((UnitPipeline(stages=p, microbatches=m, schedule="zero_bubble"), p - 1) for p, m in ((2, 4), (4, 8), (3, 9))),
    ],
)
def test_balanced_schedules_wait_as_in_theory(shape: UnitPipeline, bubble_units: int) -> None:
    """Each rank waits (p - 1)(F + B), of a chunk where it has several; (p - 1)(F + B - 2W) where weights fill in."""
    recordings = play(unit_pipeline(shape))
    ideal_ns = 3 * shape.microbatches * shape.virtual_stages * UNIT_NS
    for recording in recordings:
        waits_ns = leaf_ns(recording, WARMUP_DRAIN)
        assert waits_ns == bubble_units * UNIT_NS
        assert leaf_ns(recording, "pipeline_bubble") == waits_ns
        assert recording.steps[1].end_ns - recording.steps[1].start_ns == ideal_ns + waits_ns + FIXED_NS
    if shape.schedule != "zero_bubble":
        share = (shape.stages - 1) / (shape.virtual_stages * shape.microbatches)
        assert waits_ns / ideal_ns == pytest.approx(share, rel=1e-12)


def test_half_stages_halve_the_waits() -> None:
    """The interleaved scenario is the work of 1F1B in halves, and waits (p - 1) ÷ (v·m) of it."""
    _, recordings = played("pipeline_interleaved")
    assert [leaf_ns(recording, WARMUP_DRAIN) for recording in recordings] == [4.5 * UNIT_NS] * 4
    compute = [leaf_ns(recording, "compute") for recording in recordings]
    assert compute == [leaf_ns(recording, "compute") for recording in played("pipeline_1f1b")[1]]


def test_a_slow_rank_delays_its_pipeline_and_its_replicas() -> None:
    """Ranks of its pipeline wait for messages, those of the other one for gradients of their stage; it waits least."""
    job, recordings = played("pipeline_slow_rank")
    slow = 3
    work_ns = 24 * UNIT_NS
    assert leaf_ns(recordings[slow], "straggler/slow_gpu") == work_ns * 3 // 10
    waits = [sum(leaf_ns(r, leaf) for leaf in DIVIDED) for r in recordings]
    assert [wait - waits[slow] for wait in waits] == [0 if r.rank == slow else work_ns * 3 // 10 for r in recordings]
    # Every stage seems equal with kinds at their means, so what a rank waits then is the balanced bubble of the mean.
    mean_ns = 9 * UNIT_NS * 83 // 80
    assert {leaf_ns(recording, WARMUP_DRAIN) for recording in recordings} == {7_200_000, 9 * UNIT_NS, mean_ns}
    (culprit,) = truth("pipeline_slow_rank", "", job, recordings)["caused"]
    assert culprit["caused_ns"] == sum(recording.booked_ns("straggler/late_rank") for recording in recordings)
    assert (culprit["rank"], culprit["cause"], culprit["own_ns"]) == (slow, "slow_gpu", 3 * work_ns * 3 // 10)


def test_a_host_pause_is_its_ranks_doing() -> None:
    """What the other stages wait after a pause in a pipeline is caused by the rank that paused."""
    (culprit,) = truth("pipeline_host_pause", "", *played("pipeline_host_pause"))["caused"]
    assert (culprit["rank"], culprit["cause"], culprit["caused_ns"]) == (2, "host_pause", 3 * 9 * UNIT_NS)


def test_replicas_alike_wait_like_one() -> None:
    """Balanced replicas have the waits of a single pipeline, and reduce the gradients of each stage."""
    job = unit_pipeline(UnitPipeline(stages=2, microbatches=4, replicas=2))
    recordings = play(job)
    assert [recording.stage for recording in recordings] == [0, 0, 1, 1]
    assert [leaf_ns(recording, WARMUP_DRAIN) for recording in recordings] == [3 * UNIT_NS] * 4
    assert [leaf_ns(recording, "straggler") for recording in recordings] == [0] * 4
    assert len({leaf_ns(recording, "exposed_comm/dp") for recording in recordings} - {0}) == 1
    dimensions = [(group.description, group.ranks) for group in job.groups]
    assert dimensions[1:] == [("mesh_pp", (0, 2)), ("mesh_pp", (1, 3)), ("mesh_dp", (0, 1)), ("mesh_dp", (2, 3))]


@pytest.mark.parametrize("schedule", ORDERS)
def test_orders_do_all_work_once(schedule: str) -> None:
    """Each stage sees each micro-batch once a kind, forward first; of a split backward the input's half first."""
    chunks = 2 if schedule == "interleaved" else 1
    kinds = "FIW" if schedule == "zero_bubble" else "FB"
    for position in range(4):
        order = ORDERS[schedule](position, 4, 8, chunks)
        stages = range(position, 4 * chunks, 4)
        assert len(order) == len(set(order)) == len(kinds) * 8 * chunks
        places = {task: place for place, task in enumerate(order)}
        for stage in stages:
            for microbatch in range(8):
                own = [places[Task(stage, kind, microbatch)] for kind in kinds]
                assert own == sorted(own)


def test_schedules_that_do_not_fit_are_errors() -> None:
    """Chunks need the interleaved schedule, and that as many micro-batches as its ranks take in turn."""
    with pytest.raises(TraceAuditError, match="2 stages a rank"):
        unit_pipeline(UnitPipeline(virtual_stages=2))
    with pytest.raises(TraceAuditError, match="6 micro-batches"):
        unit_pipeline(UnitPipeline(schedule="interleaved", virtual_stages=2, microbatches=6))


def test_messages_that_cross_are_errors() -> None:
    """A rank that expects another message than the one sent has no truth."""
    pair = Group("0", "mesh_pp", "pp", (0, 1), 20)
    programs = (
        RankProgram(0, (Step(3), Send(pair, 1, 1, 0, Task(0, "F", 0)))),
        RankProgram(1, (Step(3), Recv(pair, 0, 1, Task(0, "F", 1)))),
    )
    with pytest.raises(TraceAuditError, match="expects 0F1 and would receive 0F0"):
        play(Job(programs, (pair,), {}))


def annotations(recording: Recording) -> list[Span]:
    """Return the rows of the host that name work and messages of a pipeline."""
    return [s for s in recording.spans if s.category == "user_annotation" and s.name.startswith("PP:")]


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name.startswith("pipeline_")])
def test_annotations_name_all_work(scenario: str) -> None:
    """Where a rank has several stages or split backwards, each launch of its work is inside the row that names it."""
    job, recordings = played(scenario)
    annotated = scenario in ("pipeline_interleaved", "pipeline_zero_bubble")
    for program, recording in zip(job.programs, recordings, strict=True):
        tasks = [item.task for item in program.instructions if isinstance(item, Enter) and item.task]
        named = annotations(recording)
        if not annotated:
            assert tasks
            assert named == []
            continue
        rows = [span for span in named if "SEND" not in span.name and "RECV" not in span.name]
        assert [span.name for span in rows] == [f"PP:{task}" for task in tasks]
        calls = [s for s in recording.spans if s.name == "cudaLaunchKernel"]
        within = [[c for c in calls if row.start_ns <= c.start_ns and c.end_ns <= row.end_ns] for row in rows]
        sizes = {"F": 2, "B": 3, "I": 2, "W": 1}
        assert [len(found) for found in within] == [sizes[task.kind] for task in tasks]
        threads = [{call.thread for call in found} for found in within]
        own, other = {recording.main_thread}, {recording.autograd_thread}
        assert threads == [own if task.kind == "F" else other for task in tasks]
        assert len(calls) == sum(map(len, within)) + 2 * 3  # clearing and optimizer
        messages = [span for span in named if span not in rows]
        launched = [s for s in recording.spans if s.name in ("nccl:send", "nccl:recv") and "stream" not in s.args]
        host = [s for s in launched if s.category == "user_annotation"]
        assert len(messages) == len(host)
        for row, inner in zip(messages, host, strict=True):
            assert row.start_ns <= inner.start_ns < inner.end_ns <= row.end_ns
            assert ("SEND" in row.name) == (inner.name == "nccl:send")


def test_annotations_of_messages_name_the_stage_of_the_rank() -> None:
    """Rank 3 of four holds stages 3 and 7: it passes on forwards of stage 3 to the first rank, and none of stage 7."""
    _, recordings = played("pipeline_interleaved")
    names = {span.name.rstrip("0123456789") for span in annotations(recordings[3])}
    of_stage_3 = {"PP:3F", "PP:3B", "PP:3RECV_F", "PP:3SEND_F", "PP:3RECV_B", "PP:3SEND_B"}
    assert names == of_stage_3 | {"PP:7F", "PP:7B", "PP:7RECV_F", "PP:7SEND_B"}
    sent = {s.args["Dst Rank"] for s in gpu_spans(recordings[3]) if s.args.get("Collective name") == "send"}
    assert sent == {0, 2}
    shadows = [s for s in recordings[3].spans if s.category == "gpu_user_annotation" and s.name.startswith("PP:")]
    assert {span.name.rstrip("0123456789") for span in shadows} == {"PP:3F", "PP:7F"}


def test_coalesced_messages_say_nothing() -> None:
    """Messages launched as a batch have no operator and no arguments of a collective; time and truth are the same."""
    _, recordings = played("pipeline_coalesced")
    for recording, other in zip(recordings, played("pipeline_1f1b")[1], strict=True):
        assert [step.leaves for step in recording.steps] == [step.leaves for step in other.steps]
        messages = [span for span in gpu_spans(recording) if "SendRecv" in span.name]
        assert messages
        assert not any("Process Group Name" in span.args or "Collective name" in span.args for span in messages)
        operators = [span for span in recording.spans if span.name == "record_param_comms"]
        assert {span.args["Collective name"] for span in operators} == {"allreduce"}
        for category in ("user_annotation", "gpu_user_annotation"):
            names = [s.name for s in recording.spans if s.category == category and s.name.startswith("nccl:")]
            assert names.count("nccl:coalesced") == len(messages)
            assert set(names) == {"nccl:coalesced", "nccl:all_reduce"}


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("scenario", ["pipeline_zero_bubble", "pipeline_coalesced"])
def test_every_layout_takes_pipelines(layout: Layout, scenario: str, tmp_path: Path) -> None:
    """Each layout is valid JSON with all kernels and the rows that name the work."""
    write_trace(tmp_path / "trace.json", *_rank_of(scenario, 1), layout)
    content = loaded(tmp_path / "trace.json")
    events = content if layout is Layout.ARRAY else content["traceEvents"]
    recording = played(scenario)[1][1]
    assert sum(event.get("cat", "").lower() == "kernel" for event in events) == len(gpu_spans(recording))
    host = [e for e in events if e["name"].startswith("PP:") and e.get("cat") != "gpu_user_annotation"]
    assert len(host) == len(annotations(recording))


def test_run_28_mfu_is_at_28_percent() -> None:
    """The big scenario has the MFU of its name, and every loss it promises."""
    job, recordings = played("run_28_mfu")
    assert truth("run_28_mfu", "", job, recordings)["mfu"] == pytest.approx(0.28, abs=0.003)
    found = {leaf for recording in recordings for step in recording.steps for leaf, ns in step.leaves.items() if ns}
    assert found >= {
        "compute/matmul",
        "recompute/kernels",
        "straggler/late_rank",
        "pipeline_bubble/undivided",
        "exposed_comm/dp",
        "exposed_comm/other_comm",
        "host_gap/data_loader",
        "host_gap/launch_latency",
    }


def test_an_exposed_send_is_communication() -> None:
    """A send that runs while the host pauses is exposed, not part of the gap."""
    _, recordings = played("pipeline_host_pause")
    assert leaf_ns(recordings[2], "exposed_comm/pp") > 0
    assert leaf_ns(recordings[2], "host_gap") + leaf_ns(recordings[2], "exposed_comm/pp") == 3 * UNIT_NS
    assert any(span.thread == SEND_STREAM for span in gpu_spans(recordings[2]))


# Files


def loaded(path: Path) -> Any:  # noqa: ANN401
    """Return the JSON of a file, gzipped or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("layout", Layout)
def test_layouts_are_json_and_hold_the_same_events(layout: Layout, tmp_path: Path) -> None:
    """Each layout is valid, and its kernels are those laid down, to the resolution of its timestamps."""
    job, recordings = played("exposed_allreduce")
    write_trace(tmp_path / "rank1_trace.json", job, recordings[1], layout)
    content = loaded(tmp_path / "rank1_trace.json")
    events = content if layout is Layout.ARRAY else content["traceEvents"]
    kernels = [event for event in events if event.get("cat", "").lower() == "kernel"]
    base_us = (BASE_NS + ORIGIN_NS) // 1_000 if layout in EPOCH_LAYOUTS else ORIGIN_NS / 1_000
    found = sorted((round(event["ts"] - base_us), round(event["dur"]), event["name"]) for event in kernels)
    spans = [span for span in recordings[1].spans if span.category == "kernel"]
    assert found == sorted((s.start_ns // 1_000, (s.end_ns - s.start_ns) // 1_000, s.name) for s in spans)
    if layout not in EPOCH_LAYOUTS:
        assert content["baseTimeNanoseconds"] == BASE_NS
        assert content["distributedInfo"]["rank"] == 1


@pytest.mark.parametrize(("layout", "before"), [(Layout.KINETO, True), (Layout.KINETO_2024, False)])
def test_base_time_stands_on_its_side_of_the_events(layout: Layout, before: bool, tmp_path: Path) -> None:
    """Writers of 2024 put the base time after the events, later ones before them."""
    job, recordings = played("compute_only")
    write_trace(tmp_path / "trace.json", job, recordings[0], layout)
    text = (tmp_path / "trace.json").read_text()
    assert (text.index("baseTimeNanoseconds") < text.index("traceEvents")) is before
    assert "distributedInfo" not in text
    assert '"ts": 6322354285936.137, "dur": ' in text


def test_kernels_of_collectives_say_what_they_are(tmp_path: Path) -> None:
    """A message names its peer, and a collective its group and number."""
    write_trace(tmp_path / "trace.json", *_rank_of("pipeline_1f1b", 1))
    kernels = [e for e in loaded(tmp_path / "trace.json")["traceEvents"] if e["name"].startswith("ncclDevKernel")]
    args = {event["args"]["Collective name"]: event["args"] for event in kernels}
    assert {event["args"].get("Src Rank") for event in kernels if "Recv" in event["name"]} == {0, 2, None}
    assert args["send"]["Dst Rank"] in (0, 2)
    assert args["allreduce"]["Process Group Ranks"] == "[0, 1, 2, 3]"
    assert args["allreduce"]["Seq"] == 2


def _rank_of(scenario: str, rank: int) -> tuple[Job, Recording]:
    job, recordings = played(scenario)
    return job, recordings[rank]


def test_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    """Nothing in the files depends on when or where they were written."""
    first, second = (simulate(tmp_path / name, "late_rank") for name in ("first", "second"))
    names = sorted(path.name for path in first.iterdir())
    assert names == [*(f"rank{rank}_trace.json.gz" for rank in range(4)), "run.json", "truth.json"]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    """A file in the way stops the writing before it begins."""
    (tmp_path / "run.json").write_text("mine")
    with pytest.raises(TraceAuditError, match="exists"):
        simulate(tmp_path, "compute_only")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    simulate(tmp_path, "compute_only", compress=False, force=True)
    assert loaded(tmp_path / "run.json")["gpu"] == "NVIDIA H100 80GB HBM3"
    assert loaded(tmp_path / "truth.json")["ranks"][0]["steps"][1]["step"] == 4
    assert (tmp_path / "rank0_trace.json").exists()


def test_unknown_scenario_names_the_known(tmp_path: Path) -> None:
    """A misspelt scenario is answered with the list."""
    with pytest.raises(TraceAuditError, match="late_rank"):
        simulate(tmp_path, "later_rank")


def test_run_28_mfu_fits_into_three_megabytes(tmp_path: Path) -> None:
    """The big scenario stays small on disk."""
    directory = simulate(tmp_path / "run", "run_28_mfu")
    assert sum(path.stat().st_size for path in directory.iterdir()) < 3_000_000


def test_clock_error_shifts_the_file_alone(tmp_path: Path) -> None:
    """A host's clock error is in its timestamps; the truth does not know it."""
    job, recordings = played("late_rank")
    off = replace(job, clocks={0: Clock(offset_ns=123_456, drift_ppb=1_000)})
    write_trace(tmp_path / "right.json", job, recordings[0], Layout.KINETO)
    write_trace(tmp_path / "off.json", off, recordings[0], Layout.KINETO)
    starts = [
        [round(e["ts"] * 1_000) for e in loaded(tmp_path / name)["traceEvents"] if e.get("cat") == "kernel"]
        for name in ("right.json", "off.json")
    ]
    shifts = [after - before for before, after in zip(*starts, strict=True)]
    assert abs(shifts[0] - 123_456) <= 2
    assert 100 < shifts[-1] - shifts[0] < 200  # 1 µs a second over 0.16 s
    known, shifted = (truth("late_rank", "", each, recordings) for each in (job, off))
    assert shifted["ranks"] == known["ranks"]
    assert shifted["clock"] == {"hosts": {"host0": {"offset_ns": 123_456, "drift_ppb": 1_000}}}
    assert (known["tolerance_ns"], shifted["tolerance_ns"]) == (0, 1_000 + 53)  # a millionth of 52.5 ms


@pytest.mark.parametrize("scenario", ["clock_offset", "clock_drift", "host_alone"])
def test_each_host_has_its_name_and_its_clock(scenario: str, tmp_path: Path) -> None:
    """Files name their host; a small all-reduce ends at one instant, which the clocks show as far apart as they are."""
    job, recordings = played(scenario)
    shown = []
    for rank in (0, 7):
        write_trace(tmp_path / f"{rank}.json", job, recordings[rank])
        content = loaded(tmp_path / f"{rank}.json")
        assert content["host_name"] == f"host{rank // 4}"
        assert len(content["deviceProperties"]) == 4
        kernels = [e for e in content["traceEvents"] if e.get("cat") == "kernel" and "AllReduce" in e["name"]]
        assert {e["args"]["device"] for e in kernels} == {rank % 4}
        shown.append([round((e["ts"] + e["dur"]) * 1_000) for e in kernels if e["args"]["In msg nelems"] == 2])
    assert len(shown[0]) == len(shown[1]) == 6  # the loss and the norm of the gradients in each step
    hosts = truth(scenario, "", job, recordings)["clock"]["hosts"]
    assert hosts["host0"] == {"offset_ns": 0, "drift_ppb": 0}
    if scenario != "host_alone":
        small = [span for span in collectives(recordings[0]) if span.args["In msg nelems"] == 2]
        for span, before, after in zip(small, *shown, strict=True):
            drifted_ns = span.end_ns * hosts["host1"]["drift_ppb"] // 1_000_000_000
            assert abs(after - before - hosts["host1"]["offset_ns"] - drifted_ns) <= 2


def test_drift_is_seen_over_more_than_a_second() -> None:
    """The run whose clocks drift lasts long enough, and the truth says how close a reader can come."""
    job, recordings = played("clock_drift")
    assert recordings[0].steps[-1].end_ns > 1_000_000_000
    assert 5_000 < truth("clock_drift", "", job, recordings)["tolerance_ns"] < 20_000
    assert truth("clock_offset", "", *played("clock_offset"))["tolerance_ns"] == 0


def test_hosts_alone_share_no_collective() -> None:
    """The group of all ranks exists, and nothing runs in it."""
    job, recordings = played("host_alone")
    assert len(job.groups[0].ranks) == 8
    used = {span.args["Process Group Ranks"] for recording in recordings for span in collectives(recording)}
    assert used == {"[0, 1, 2, 3]", "[4, 5, 6, 7]"}


def test_a_lost_rank_has_no_file(tmp_path: Path) -> None:
    """The trace of a rank that was not recorded is absent, and the truth says so."""
    directory = simulate(tmp_path / "run", "missing_rank")
    assert sorted(path.name for path in directory.glob("rank*")) == [f"rank{rank}_trace.json.gz" for rank in range(7)]
    assert [rank["traced"] for rank in loaded(directory / "truth.json")["ranks"]] == [True] * 7 + [False]


@pytest.mark.parametrize("layout", Layout)
def test_every_layout_takes_rows_of_python(layout: Layout, tmp_path: Path) -> None:
    """Rows of Python's functions are left out where there were none yet."""
    write_trace(tmp_path / "trace.json", *_rank_of("gc_pause", 6), layout)
    content = loaded(tmp_path / "trace.json")
    events = content if layout is Layout.ARRAY else content["traceEvents"]
    found = [event["name"] for event in events if event.get("cat") == "python_function"]
    assert found == ([] if layout is Layout.KINETO_2021 else ["Python GC"])


# A run of many hosts


def test_big_job_is_the_small_one_with_more_hosts(tmp_path: Path) -> None:
    """The scenario of a thousand ranks, here of 32: every wait is the slow rank's doing, directly or through others."""
    size = BigJob(hosts=4, layers=8, slow_rank=21)
    job = big_job(size)
    recordings = play(job)
    known = truth("big", "", job, recordings)
    assert [entry["rank"] for entry in known["caused"]] == [21]
    direct_ns = sum(step.awaited[21] for recording in recordings for step in recording.steps)
    assert 0 < direct_ns < known["caused"][0]["caused_ns"]  # ranks of other hosts wait for the slow one's neighbours
    offsets = [host["offset_ns"] for host in known["clock"]["hosts"].values()]
    assert len(set(offsets)) == 4
    assert all(abs(offset) <= 2_000_000 for offset in offsets)
    write_trace(tmp_path / "lean.json", job, recordings[21])
    events = loaded(tmp_path / "lean.json")["traceEvents"]
    assert {event["ph"] for event in events if event["pid"] == recordings[21].process} == {"X"}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) == len(gpu_spans(recordings[21]))
    assert {e["args"]["Process Group Description"] for e in kernels if "nccl" in e["name"]} == {
        "mesh_tp",
        "mesh_dp",
        "default_pg",
    }


def test_thousand_ranks_is_large() -> None:
    """The scenario for tests of scale is the only one to be left out of the rest."""
    assert [name for name, known in SCENARIOS.items() if known.large] == ["thousand_ranks"]
    assert BigJob().world_size == 1_024


def test_a_profiler_cannot_start_in_the_middle_of_work() -> None:
    """Rows that are cut in two have no clear truth."""
    with pytest.raises(TraceAuditError, match="profiler"):
        play(Job((RankProgram(0, (Step(3), StartProfiler())),), (), {}))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """A job that cannot end is an error, not a hang."""
    pair = Group("0", "default_pg", "dp", (0, 1), 20)
    programs = (
        RankProgram(0, (Step(3), Recv(pair, 1, 1))),
        RankProgram(1, (Step(3), Collective(pair, "all_reduce", 1, 1_000), Wait())),
    )
    with pytest.raises(TraceAuditError, match=r"ranks \[0, 1\]|ranks \[1, 0\]"):
        play(Job(programs, (pair,), {}))
