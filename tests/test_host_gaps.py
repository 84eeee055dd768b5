"""What stands behind idle gaps: dependencies, calls, facts of each cause, and how the GPU was fed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Audited
from tests.test_gaps import CALL, FRAME, LATE, LOADER, MAIN, NCCL, OPERATOR, TO_HOST, gpu, host, launched
from traceaudit.account import account
from traceaudit.audit import Audit
from traceaudit.classify import activities
from traceaudit.events import Trace
from traceaudit.idle.calls import host_activity
from traceaudit.idle.edges import recorded_dependencies
from traceaudit.idle.facts import host_facts
from traceaudit.idle.gaps import resolve
from traceaudit.idle.launches import optimizer_loops, throughput
from traceaudit.idle.table import GAP_COLUMNS, named_gaps
from traceaudit.intervals import union
from traceaudit.leaves import Leaf
from traceaudit.pipeline import analyze
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise, read_trace
from traceaudit.simulate import SCENARIOS, play
from traceaudit.steps import Selection, Steps, step_windows
from traceaudit.timeline import base_states

Event = dict[str, Any]
Read = Callable[[list[Event]], Trace]
Directory = Callable[[str], Path]
Part = tuple[float, float, Leaf]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that writes events and reads them as a trace."""

    def trace_of(events: list[Event]) -> Trace:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(events), encoding="utf-8")
        return normalise(load(path))

    return trace_of


def parts_of(trace: Trace, main_thread: tuple[int, int] | None = MAIN) -> list[Part]:
    """Return the parts of the idle time of a trace in microseconds, joined where they touch and agree."""
    table = activities(trace)
    pieces = base_states(table, int(table["start_ns"].min()), int(table["end_ns"].max()))
    found = resolve(trace, table, pieces, main_thread).sort_values("start_ns")
    result: list[Part] = []
    for start, end, leaf in found[["start_ns", "end_ns", "leaf"]].itertuples(index=False):
        part = (int(start) / 1_000, int(end) / 1_000, Leaf(int(leaf)))
        if result and result[-1][1:] == (part[0], part[2]):
            part = (result.pop()[0], part[1], part[2])
        result.append(part)
    return result


def whole(trace: Trace) -> Steps:
    """Return the window of the whole trace."""
    return step_windows(trace, activities(trace), Selection(whole_trace=True))


# Dependencies on the GPU


def stream_wait(call: int, stream: int, other: int, record: int) -> Event:
    """Return the record of a stream-wait event."""
    args = {"stream": stream, "correlation": call, "wait_on_stream": other, "wait_on_cuda_event_record_corr_id": record}
    name = "Stream Wait Event"
    return {"ph": "X", "cat": "cuda_sync", "name": name, "pid": 0, "tid": stream, "ts": 40, "dur": 1, "args": args}


def row(number: int, start: float, end: float, stream: int = 7, name: str = "gemm") -> list[Event]:
    """Return a GPU row launched in time, with a correlation id of its own."""
    return [
        host(number, number + 0.5, "cudaLaunchKernel", CALL, correlation=number),
        gpu(start, end, name, stream, number),
    ]


# The activity on stream 20, from 90 to when, and the leaf of the idle time until the kernel at 400 that waited for it.
RELEASED = [
    (NCCL, 360, Leaf.LAUNCH_LATENCY, True),
    ("Memcpy HtoD (Pinned -> Device)", 360, Leaf.INPUT_COPY, False),
    ("Memcpy HtoD (Pinned -> Device)", 250, Leaf.INPUT_COPY, False),
    ("gemm", 360, Leaf.LAUNCH_LATENCY, False),
    ("gemm", 250, Leaf.NOT_STARTED, False),
]


@pytest.mark.parametrize(("name", "until", "leaf", "charged"), RELEASED)
def test_a_recorded_event_names_what_a_kernel_waited_for(
    read: Read, name: str, until: float, leaf: Leaf, charged: bool
) -> None:
    """However long after the awaited work the kernel starts, the class of that work is charged."""
    trace = read([*row(1, 10, 100), *row(2, 90, until, 20, name), stream_wait(4, 7, 20, 3), *row(5, 400, 500)])
    table = activities(trace)
    assert recorded_dependencies(trace, table).tolist() == [-1, -1, 1]
    found = resolve(trace, table, base_states(table, 10_000, 500_000), MAIN)
    last = found[found["end_ns"] == 400_000].iloc[0]
    assert (last["start_ns"], last["dependency"], last["after"]) == (until * 1_000, 1, 1 if charged else -1)
    assert charged or last["leaf"] == leaf


@pytest.mark.parametrize(
    "edge",
    [
        stream_wait(6, 7, 20, 3),  # the wait was called after the kernel's launch
        stream_wait(4, 7, 20, 1),  # the event was recorded before the other stream's work was launched
        stream_wait(4, 7, 20, -1),  # unresolved
        stream_wait(4, 9, 20, 3),  # another stream waits
        stream_wait(4, 7, 7, 3),  # on itself
    ],
)
def test_an_event_that_did_not_hold_the_kernel_is_no_dependency(read: Read, edge: Event) -> None:
    """Order of calls and streams decides whom an event holds."""
    trace = read([*row(1, 10, 100), *row(2, 90, 360, 20, NCCL), edge, *row(5, 400, 500)])
    assert recorded_dependencies(trace, activities(trace)).tolist() == [-1, -1, -1]
    assert parts_of(trace) == [(360, 400, Leaf.LAUNCH_LATENCY)]


def test_of_several_events_the_work_that_ended_last_counts(read: Read) -> None:
    """A kernel behind two events was released by the later of the two."""
    events = [*row(1, 10, 100), *row(2, 90, 300, 20), *row(3, 90, 350, 21), *row(9, 400, 500)]
    trace = read([*events, stream_wait(5, 7, 20, 4), stream_wait(7, 7, 21, 6)])
    table = activities(trace)
    named = recorded_dependencies(trace, table)[-1]
    assert table["stream"].to_numpy()[named] == 21


# CUDA graphs, and what was queued before


def graph(call: tuple[float, float], *nodes: tuple[float, float], name: str = "cudaGraphLaunch") -> list[Event]:
    """Return a graph's launch and its kernels."""
    return [host(*call, name, CALL, correlation=77), *(gpu(*node, correlation=77) for node in nodes)]


def test_the_kernels_of_a_graph_wait_for_each_other_not_for_the_host(read: Read) -> None:
    """While the graph's launch call still runs, gaps between its kernels are the GPU's."""
    nodes = [(130, 150), (151, 170), (175, 190)]
    events = [*launched((0, 2), 10, 100), *graph((110, 300), *nodes)]
    assert parts_of(read(events)) == [
        (100, 110, Leaf.OTHER_HOST),
        (110, 130, Leaf.LAUNCH_BOUND),
        (150, 151, Leaf.LAUNCH_LATENCY),
        (170, 175, Leaf.LAUNCH_LATENCY),
    ]


def test_a_long_hole_in_a_graph_is_the_hosts_only_while_its_call_runs(read: Read) -> None:
    """HIP enqueues node by node: above 100 µs, a hole under the call waits for it; one behind it is not explained."""
    nodes = [(130, 150), (290, 300), (500, 520)]
    events = [*launched((0, 2), 10, 129), *graph((20, 280), *nodes, name="hipGraphLaunch")]
    assert parts_of(read(events)) == [
        (129, 130, Leaf.LAUNCH_BOUND),
        (150, 280, Leaf.LAUNCH_BOUND),
        (280, 290, Leaf.LAUNCH_LATENCY),
        (300, 500, Leaf.NOT_STARTED),
    ]


def test_work_queued_before_the_recording_was_launched_in_time(read: Read) -> None:
    """A kernel without a launch before the first linked one of its stream did not wait for the host."""
    events = [gpu(10, 100), gpu(150, 200), *launched((300, 310), 320, 400), gpu(500, 600)]
    assert parts_of(read(events)) == [
        (100, 150, Leaf.LAUNCH_LATENCY),
        (200, 300, Leaf.OTHER_HOST),
        (300, 310, Leaf.LAUNCH_BOUND),
        (310, 320, Leaf.LAUNCH_LATENCY),
        (400, 500, Leaf.LAUNCH_MISSING),
    ]


LAUNCHES = [
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipModuleLaunchKernel",
    "hipExtLaunchKernel",
]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_way_to_launch_ends_the_refilling_of_the_queue(read: Read, name: str, recorded: bool) -> None:
    """Launches of the runtime, the driver and HIP are launches, also where the kernel's record is lost."""
    cat = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else CALL
    events = [*launched((0, 2), 10, 100), host(50, 120, "cudaStreamSynchronize", CALL)]
    events += [host(200, 210, name, cat, correlation=5)] + ([gpu(220, 300, correlation=5)] if recorded else [])
    found = parts_of(read([*events, *launched((395, 398), 400, 500)]))
    assert found[0] == (100, 200, Leaf.HOST_SYNC)
    assert found[1][:2] == (200, 210)
    assert found[1][2] == Leaf.LAUNCH_BOUND


def test_a_kernel_that_starts_before_its_call_is_launched_when_it_starts(read: Read) -> None:
    """Clocks of host and GPU may differ by some µs: the gap before such a kernel is the host's to its end."""
    found = parts_of(read([*launched((0, 2), 10, 100), host(101, 399, LOADER), *launched((402, 410), 400, 500)]))
    assert found == [(100, 101, Leaf.OTHER_HOST), (101, 399, Leaf.DATA_LOADER), (399, 400, Leaf.OTHER_HOST)]


# What the host did


def memory(name: str, start: float, end: float) -> Event:
    """Return a call for memory."""
    return host(start, end, name, CALL)


RETRY = [memory("cudaDeviceSynchronize", 150, 200), memory("cudaFree", 210, 300), memory("cudaMalloc", 310, 400)]


@pytest.mark.parametrize(
    ("rows", "span"),
    [
        (RETRY, [(150_000, 400_000)]),
        ([memory("cudaMalloc", 120, 140), *RETRY], [(120_000, 400_000)]),
        (RETRY[:2], []),  # frees without asking again
        (RETRY[::2], []),  # no free
        ([*RETRY[:2], host(302, 305, "cudaLaunchKernel", CALL), RETRY[2]], []),  # work between
        ([memory("cudaFree", 100, 150), memory("cudaMalloc", 200, 400)], [(100_000, 400_000)]),
    ],
)
def test_a_retry_of_the_allocator_is_its_own_with_the_waiting(
    read: Read, rows: list[Event], span: list[tuple[int, int]]
) -> None:
    """Frees and an allocation after them with nothing between but waiting; without those, waiting is waiting."""
    trace = read([*LATE, *rows])
    found = host_activity(trace, activities(trace))
    assert [tuple(map(int, pair)) for spans in found.retries.values() for pair in zip(*spans, strict=True)] == span
    waiting = any(len(spans.start) for spans in found.causes[Leaf.HOST_SYNC].values())
    assert waiting == (not span)


def copies(count: int, size: int, *, back: bool = False, wait: bool = True) -> list[Event]:
    """Return copies to the host launched in a row, of `size` bytes each, and what follows them."""
    events = [*launched((0, 2), 5, 10)]
    names = [TO_HOST] * count + (["Memcpy HtoD (Pinned -> Device)"] * count if back else [])
    for index, name in enumerate(names):
        call, copy = launched((20 + index, 20.5 + index), 100 + 10 * index, 110 + 10 * index, name=name, stream=20)
        copy["args"]["bytes"] = size
        events += [call, copy]
    end = 100 + 10 * len(names)
    if wait:
        events.append(host(90, end + 5, "cudaStreamSynchronize", CALL))
    return [*events, *launched((end + 100, end + 102), end + 110, end + 120)]


MANY, LARGE = (20, 1 << 20), (2, 300_000_000)
BURSTS = [
    (copies(*MANY), Leaf.CHECKPOINT, [True]),
    (copies(*LARGE), Leaf.CHECKPOINT, [True]),
    (copies(*MANY, wait=False), Leaf.CHECKPOINT, [False]),
    (copies(19, 1 << 20), Leaf.HOST_SYNC, []),  # few and small
    (copies(40, 4), Leaf.HOST_SYNC, []),  # metrics that are read together
    (copies(*MANY, back=True), Leaf.HOST_SYNC, []),  # state that lives on the host
    (copies(1, 500_000_000, wait=False), Leaf.CHECKPOINT, [False]),
    (copies(1, 499_999_999, wait=False), Leaf.OFFLOAD_COPY, []),
]


@pytest.mark.parametrize(("events", "leaf", "awaited"), BURSTS)
def test_a_burst_of_copies_to_the_host_is_a_checkpoint(
    read: Read, events: list[Event], leaf: Leaf, awaited: list[bool]
) -> None:
    """Many or large copies in a row with nothing launched between, that do not come back, save the state."""
    trace = read(events)
    found = host_activity(trace, activities(trace))
    assert found.bursts.awaited.tolist() == awaited
    copying = [part for part in parts_of(trace) if part[0] < 105 <= part[1]]
    assert [part[2] for part in copying] == [leaf]


def test_the_host_between_and_behind_a_checkpoints_copies_saves_it(read: Read) -> None:
    """From the first copy's launch to the next launch the time is the checkpoint's, unless a loader takes it."""
    events = [*copies(*MANY), host(320, 340, LOADER)]
    found = [part for part in parts_of(read(events)) if part[0] >= 95]
    assert found == [
        (100, 320, Leaf.CHECKPOINT),
        (320, 340, Leaf.DATA_LOADER),
        (340, 400, Leaf.CHECKPOINT),
        (400, 402, Leaf.LAUNCH_BOUND),
        (402, 410, Leaf.LAUNCH_LATENCY),
    ]


def test_loading_of_kernels_is_compile(read: Read) -> None:
    """The profiler's rows of lazy loading have no thread: they belong to the call in which they begin."""
    rows = [host(200, 600, "cudaLaunchKernel", CALL), host(190, 890, "aten::mm", OPERATOR)]
    loading = {**host(300, 500, "Lazy Function Loading", "overhead"), "pid": -1, "tid": 0}
    elsewhere = {**host(650, 700, "Lazy Function Loading", "overhead"), "pid": -1, "tid": 0}
    buffers = {**host(210, 250, "Activity Buffer Request", "overhead"), "pid": -1, "tid": 0}
    trace = read([*LATE, *rows, loading, elsewhere, buffers])
    assert [part for part in parts_of(trace) if part[2] == Leaf.COMPILE] == [(300, 500, Leaf.COMPILE)]


def test_a_long_copy_loads_no_kernel(read: Read) -> None:
    """A call above 1 ms that launches a copy is no first launch of code."""
    events = [
        *launched((0, 2), 10, 100),
        *launched((200, 4_900), 4_890, 5_000, name="Memcpy HtoD (Pageable -> Device)"),
    ]
    assert Leaf.COMPILE not in {leaf for *_, leaf in parts_of(read(events))}


@pytest.mark.parametrize(("step_end", "taken"), [(1_050, True), (3_000, False)])
def test_the_profilers_own_synchronisation_is_not_the_runs(read: Read, step_end: float, taken: bool) -> None:
    """The last synchronisation of the device, behind all launches and steps, is the profiler's."""
    final = host(1_100, 2_000, "cudaDeviceSynchronize", CALL)
    trace = read([*LATE, host(0, step_end, "ProfilerStep#3"), host(150, 160, "cudaDeviceSynchronize", CALL), final])
    found = host_activity(trace, activities(trace)).final_sync
    assert (found >= 0) == taken
    assert not taken or trace.events["start_ns"].to_numpy()[found] == 1_100_000


def test_a_queue_drained_by_the_main_thread_is_refilled_by_the_backwards(read: Read) -> None:
    """Until the first launch of a thread that was idle, the time is the synchronisation's; if it worked, its own."""
    sync = host(50, 300, "cudaStreamSynchronize", CALL)
    first = launched((900, 910), 920, 1_000, tid=2)
    node = host(700, 950, "autograd::engine::evaluate_function: MmBackward0", OPERATOR, tid=2)
    idle = parts_of(read([*launched((0, 2), 10, 100), sync, node, *first]))
    assert idle == [(100, 900, Leaf.HOST_SYNC), (900, 910, Leaf.LAUNCH_BOUND), (910, 920, Leaf.LAUNCH_LATENCY)]
    at_work = host(250, 950, "autograd::engine::evaluate_function: MmBackward0", OPERATOR, tid=2)
    busy = parts_of(read([*launched((0, 2), 10, 100), sync, at_work, *first]))
    assert busy[:2] == [(100, 250, Leaf.HOST_SYNC), (250, 910, Leaf.LAUNCH_BOUND)]


# Long Python frames


def test_long_frames_are_kept_and_name_no_cause(read: Read) -> None:
    """A frame of 200 µs shows what ran; it neither makes a cause nor hides that a thread was blocked."""
    short, long = (host(150, 150 + length, f"train.py({length}): f", FRAME) for length in (199, 200))
    trace = read([*LATE, short, long])
    kept = set(trace.events["name"])
    assert kept & {"train.py(199): f", "train.py(200): f"} == {"train.py(200): f"}
    other = [*launched((0, 2), 10, 100, tid=2), *launched((900, 910), 920, 1_000, tid=2), host(150, 880, LOADER)]
    blocked = parts_of(read([*other, host(0, 2_000, "threading.py(320): wait", FRAME, tid=2)]))
    assert (150, 880, Leaf.DATA_LOADER) in blocked


@pytest.mark.parametrize(
    ("frame", "leaf"),
    [
        ("torch/_dynamo/convert_frame.py(900): _compile", Leaf.COMPILE),
        ("torch/_inductor/runtime/triton_heuristics.py(980): autotune_to_one_config", Leaf.COMPILE),
        ("torch/_inductor/compile_fx.py(1200): forward", Leaf.OTHER_HOST),  # compiled code at work
        ("megatron/training/training.py(77): get_batch", Leaf.DATA_LOADER),
        ("torch/distributed/distributed_c10d.py(2500): broadcast_object_list", Leaf.LATE_RANK),
        ("wandb/sdk/wandb_run.py(1900): log", Leaf.OTHER_HOST),
    ],
)
def test_frames_tell_causes(read: Read, frame: str, leaf: Leaf) -> None:
    """A Python frame that does one of the named things is a cause like an annotation."""
    found = parts_of(read([*LATE, host(150, 880, frame, FRAME)]))
    assert any(part[0] <= 150 and part[1] >= 880 and part[2] == leaf for part in found)


# The table of gaps


def gaps_of(trace: Trace) -> tuple[Any, Any]:
    """Return the largest gaps and the sums of a trace."""
    table, steps = activities(trace), whole(trace)
    pieces = base_states(table, int(table["start_ns"].min()), int(table["end_ns"].max()))
    doing = host_activity(trace, table)
    return named_gaps(trace, table, resolve(trace, table, pieces, MAIN, doing), steps, doing)


NAMED = [
    # rows of the host, and leaf, call, what is around it and frame of the largest part
    ([host(150, 880, LOADER)], Leaf.DATA_LOADER, LOADER, "", ""),
    (
        [host(120, 890, "clip"), host(130, 880, "aten::item", OPERATOR), host(140, 870, "cudaStreamSynchronize", CALL)],
        Leaf.HOST_SYNC,
        "aten::item",
        "clip",
        "",
    ),
    (
        [host(120, 890, "aten::to", OPERATOR), host(140, 870, "cudaStreamSynchronize", CALL)],
        Leaf.HOST_SYNC,
        "cudaStreamSynchronize",
        "aten::to",
        "",
    ),
    ([host(60, 95, "cudaDeviceSynchronize", CALL)], Leaf.HOST_SYNC, "cudaDeviceSynchronize", "", ""),  # refilling
    (
        [host(110, 890, "Optimizer.step#AdamW.step"), host(115, 885, "aten::add", OPERATOR)],
        Leaf.LAUNCH_BOUND,
        "aten::add",
        "Optimizer.step#AdamW.step",
        "",
    ),
    ([host(101, 899, "forward")], Leaf.OTHER_HOST, "forward", "", ""),
    (
        [
            host(101, 899, "step"),
            host(102, 898, "train.py(10): step", FRAME),
            host(103, 897, "wandb/sdk/wandb_run.py(1900): log", FRAME),
        ],
        Leaf.OTHER_HOST,
        "wandb/sdk/wandb_run.py(1900): log",
        "step",
        "wandb/sdk/wandb_run.py(1900): log",
    ),
    ([], Leaf.OTHER_HOST, "", "", ""),
    ([host(0, 2_000, "ProfilerStep#3")], Leaf.OTHER_HOST, "", "", ""),
]


@pytest.mark.parametrize(("rows", "leaf", "call", "inside", "frame"), NAMED)
def test_a_gap_shows_call_place_and_frame(
    read: Read, rows: list[Event], leaf: Leaf, call: str, inside: str, frame: str
) -> None:
    """The call that took most of a gap, the annotation or operator around it, and the Python frame."""
    largest, sums = gaps_of(read([*LATE, *rows]))
    assert tuple(largest.columns) == GAP_COLUMNS
    longest = largest.iloc[int((largest["end_ns"] - largest["start_ns"]).to_numpy().argmax())]
    assert (longest["leaf"], longest["call"], longest["inside"], longest["frame"]) == (leaf, call, inside, frame)
    assert (longest["thread"], longest["ended_by"], longest["stream"]) == (1, "gemm", 7)
    first = sums.iloc[0]
    assert (first["leaf"], first["call"], first["inside"], first["count"]) == (leaf, call, inside, 1)
    assert sums["ns"].sum() == 820_000
    assert first["longest_ns"] == first["ns"]


def test_a_gap_of_the_gpu_shows_launch_and_dependency(read: Read) -> None:
    """Latency names the launch; what a kernel waited for stands beside it with its stream."""
    events = [*row(1, 10, 100), *row(2, 90, 360, 20, "Memcpy HtoD (Pinned -> Device)")]
    largest, _ = gaps_of(read([*events, stream_wait(4, 7, 20, 3), *row(5, 400, 500), *row(6, 502, 600)]))
    waited, latency = largest.iloc[-2], largest.iloc[-1]
    assert (waited["leaf"], waited["dependency"], waited["dependency_stream"]) == (
        Leaf.INPUT_COPY,
        "Memcpy HtoD (Pinned -> Device)",
        20,
    )
    assert (latency["leaf"], latency["call"], latency["thread"]) == (Leaf.LAUNCH_LATENCY, "cudaLaunchKernel", -1)


def test_a_cause_on_another_thread_is_named(read: Read) -> None:
    """What a blocked launching thread waited for is named, although another thread did it."""
    events = [*launched((0, 2), 10, 100, tid=2), *launched((900, 910), 920, 1_000, tid=2), host(150, 880, LOADER)]
    _, sums = gaps_of(read(events))
    assert (sums.iloc[0]["leaf"], sums.iloc[0]["call"]) == (Leaf.DATA_LOADER, LOADER)


# How the GPU was fed


def test_throughput_of_a_small_trace(read: Read) -> None:
    """Delays, depth of the queue and kernels are those counted by hand."""
    events = [*launched((0, 10), 20, 60), *launched((20, 30), 60, 100), *launched((40, 50), 100, 120)]
    trace = read(events)
    found = throughput(trace, activities(trace), whole(trace))
    assert found["window_ns"] == 100_000  # from 20 to 120
    assert (found["activities"], found["launches"], found["graph_kernels"]) == (3, 3, 0)
    assert found["launch_delay_ns"] == {"p50": 30_000, "p90": 50_000, "p99": 50_000}
    assert (found["kernel_ns_median"], found["launch_interval_ns_median"]) == (40_000, 20_000)
    # one waits from 30 to 60, one from 50 to 100: at most 2
    assert found["queue_depth_max"] == 2
    assert found["queue_depth_mean"] == pytest.approx((30 + 50) / 100)
    assert found["queue_empty_share"] == pytest.approx(0.3)
    assert found["kernels_per_ms"] == pytest.approx(30)


def test_a_graph_is_one_launch_of_many_kernels(read: Read) -> None:
    """The kernels of a graph count as kernels, its launch as one with the delay of the first."""
    trace = read([*launched((0, 2), 10, 100), *graph((60, 70), (130, 150), (151, 170), (175, 190))])
    found = throughput(trace, activities(trace), whole(trace))
    assert (found["activities"], found["launches"], found["graph_kernels"]) == (4, 2, 3)
    assert found["launch_delay_ns"]["p99"] == 60_000
    assert found["queue_depth_max"] == 1


@pytest.mark.parametrize(
    ("kernel", "style"),
    [
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4> >", "fused"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2> >", "foreach"),
        ("void vectorized_elementwise_kernel<4>", "loop"),
    ],
)
def test_the_optimizers_style_shows_in_its_kernels(read: Read, kernel: str, style: str) -> None:
    """Fused, foreach, or kernels for each tensor; counted a step."""
    inside = [event for i in range(3) for event in launched((200 + i, 200.5 + i), 300 + i, 301 + i, name=kernel)]
    trace = read([*launched((0, 2), 10, 290), host(190, 250, "Optimizer.step#AdamW.step"), *inside])
    found = optimizer_loops(trace, activities(trace), whole(trace))
    assert found == {"steps": 1, "kernels_per_step": 3.0, "style": style}


# The simulated causes and their facts


def facts_of(directory: Path) -> dict[str, Any]:
    """Return the facts of the first rank."""
    facts: dict[str, Any] = account(read_trace(directory / "rank0_trace.json.gz"), Selection()).host_facts
    return facts


@pytest.mark.parametrize(
    ("scenario", "slow"),
    [("loader_pinned", "workers"), ("loader_stall", "workers"), ("loader_pageable", "copy"), ("compute_only", "")],
)
def test_it_is_told_whether_workers_or_copies_are_slow(scenario: str, slow: str, simulated: Directory) -> None:
    """A late loader and a slow copy are different faults."""
    loader = facts_of(simulated(scenario))["data_loader"]
    assert loader["slow"] == slow
    assert loader["copies"]["pageable"]["count"] == (3 if slow == "copy" else 0)


def test_facts_of_a_checkpoint(simulated: Directory) -> None:
    """One burst, its bytes, and whether the host waited."""
    waited, under = (facts_of(simulated(name))["checkpoint"] for name in ("checkpoint_burst", "checkpoint_async"))
    assert (waited["bursts"], waited["bursts_asynchronous"], waited["burst_bytes"]) == (1, 0, 24 * (64 << 20))
    assert (under["bursts"], under["bursts_asynchronous"], under["gap_ns"]) == (1, 1, 0)


def test_facts_of_an_allocator_that_ran_full(simulated: Directory) -> None:
    """A retry in a steady step, with its calls."""
    found = facts_of(simulated("allocator_retry"))["allocator"]
    assert (found["retries"], found["allocations_in_steady_steps"], found["frees_in_steady_steps"]) == (1, 2, 6)
    assert found["reserved_peak_bytes"] is None


def test_reserved_memory_is_set_against_allocated(read: Read) -> None:
    """Reports of the GPU's allocator give both peaks; those of the CPU's do not count."""
    report = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 9, "tid": 1, "s": "t"}
    sizes = [(50, 600, 1_000, 1), (60, 500, 2_000, 1), (70, 900, 9_000, 0)]
    events = [
        {**report, "ts": at, "args": {"Total Allocated": used, "Total Reserved": held, "Device Type": kind, "Bytes": 8}}
        for at, used, held, kind in sizes
    ]
    trace = read([*LATE, *events])
    assert trace.memory.to_numpy().tolist() == [[50_000, 600, 1_000], [60_000, 500, 2_000]]
    table, steps = activities(trace), whole(trace)
    doing = host_activity(trace, table)
    idle = resolve(trace, table, base_states(table, 10_000, 1_000_000), MAIN, doing)
    found = host_facts(trace, table, idle, steps, doing)["allocator"]
    assert (found["reserved_peak_bytes"], found["allocated_peak_bytes"]) == (2_000, 600)
    assert found["unused_share_at_peak"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("scenario", "leaf", "call"),
    [
        ("loader_pinned", "data_loader", LOADER),
        ("checkpoint_burst", "checkpoint", "Memcpy DtoH (Device -> Pageable)"),
        ("sync_per_layer", "host_sync", "aten::item"),
        ("allocator_retry", "allocator", "cudaFree"),
        ("gc_alone", "gc", "Python GC"),
        ("recompile", "compile", "_compile.compile_inner (dynamo_timed)"),
        ("loader_pageable", "input_copy", "Memcpy HtoD (Pageable -> Device)"),
        ("graph_replay", "launch_latency", "cudaGraphLaunch"),
        ("stream_wait", "input_copy", "Memcpy HtoD (Pinned -> Device)"),
        ("launch_missing", "launch_missing", ""),
    ],
)
def test_the_planted_call_heads_its_leaf(scenario: str, leaf: str, call: str, audited: Audited) -> None:
    """In the result, the leaf's largest row is the planted call; rows of a leaf add up to the leaf."""
    result = audited(scenario).result
    own = [found for found in result["host_gaps"] if found["leaf"] == leaf]
    assert own[0]["call"] == call
    planted = next(found["ns"] for found in result["job"]["leaves"] if found["leaf"] == leaf)
    assert sum(found["ns"] for found in own) == planted


def test_a_graphs_replay_has_no_phantom_idle(simulated: Directory, audited: Audited) -> None:
    """Between the kernels of a graph the GPU's own latency passes, whatever its launch call does meanwhile."""
    found = audited("graph_replay").gaps
    latency = found[found["leaf"] == "launch_latency"]
    assert (latency["thread"] == -1).all()
    trace = read_trace(simulated("graph_replay") / "rank0_trace.json.gz")
    own = account(trace, Selection())
    assert own.throughput["graph_kernels"] == 3 * 400


def test_a_stalled_loader_and_a_slow_gpu_of_the_same_step_time_are_told_apart(audited: Audited) -> None:
    """Both runs take the same time, every rank and step; one lost it to kernels, the other to the data loader."""
    windows = [
        [[step.end_ns - step.start_ns for step in recording.steps] for recording in play(SCENARIOS[name].build())]
        for name in ("slow_gpu", "stalled_rank")
    ]
    assert windows[0] == windows[1]
    slow, stalled = (audited(name) for name in ("slow_gpu", "stalled_rank"))
    excess, late = leaves(slow)["slow_gpu"], leaves(stalled)["data_loader"]
    hosts = [audit.result["job"]["buckets"]["host_gap"] for audit in (slow, stalled)]
    assert hosts[1] - hosts[0] == excess  # the launch that ends a stall is not the loader's
    assert 0.99 < late / excess <= 1
    assert "data_loader" not in leaves(slow)
    assert "slow_gpu" not in leaves(stalled)
    causes = [{found["cause"] for found in audit.result["stragglers"]} for audit in (slow, stalled)]
    assert causes == [{"slow_gpu"}, {"host_pause"}]


def leaves(audit: Audit) -> dict[str, int]:
    """Return the nanoseconds of the job by leaf."""
    return {found["leaf"]: found["ns"] for found in audit.result["job"]["leaves"] if found["ns"]}


def test_lost_launches_are_named_as_the_reason(simulated: Directory) -> None:
    """Unattributed time says what the trace lacks."""
    found = facts_of(simulated("launch_missing"))["unattributed"]
    assert list(found) == ["no launch record"]


def behind_a_wait() -> list[Event]:
    """Return a kernel that starts late, launched behind a wait for an event."""
    return [*row(1, 10, 100), host(3, 4, "cudaStreamWaitEvent", CALL, correlation=4), *row(5, 400, 500)]


REASONS = [
    ([*row(1, 10, 100), *row(2, 400, 500)], "launched, and nothing recorded ran"),
    (behind_a_wait(), "waited for an event behind which nothing is recorded"),
    ([*row(1, 10, 100), *graph((2, 90), (110, 120), (320, 330))], "kernels of a CUDA graph are not recorded"),
    ([*row(1, 10, 100), *row(99, 400, 500)], "rows were taken out of the file"),  # 2 of 99 calls
    ([*row(1, 10, 100), gpu(400, 500)], "no launch record"),
]


@pytest.mark.parametrize(("events", "reason"), REASONS)
def test_unattributed_idle_time_says_what_the_trace_lacks(read: Read, events: list[Event], reason: str) -> None:
    """A kernel that was launched and did not start, or has no launch, has one of five reasons."""
    trace = read(events)
    found = account(trace, Selection(whole_trace=True)).host_facts["unattributed"]
    assert list(found) == [reason]
    assert found[reason] in (200_000, 300_000)


def test_the_profilers_cost_is_the_difference_to_a_declared_step(simulated: Directory, audited: Audited) -> None:
    """With a declared step time the difference stands in the result; a declared rate of tokens does as well."""
    run = simulated("loader_stall")
    measured = audited("loader_stall").result["quality"]["profiler_overhead"]
    assert (measured["declared_step_ns"], measured["difference_ns"]) == (None, None)
    step_ns = measured["measured_step_ns"]
    found = analyze(run, step_seconds=(step_ns - 1_000_000) / 1e9).result["quality"]["profiler_overhead"]
    assert found["difference_ns"] == 1_000_000
    tokens = json.loads((run / "run.json").read_text())["tokens_per_step"]
    rated = analyze(run, tokens_per_second=tokens / (step_ns / 1e9) * 2).result["quality"]["profiler_overhead"]
    assert rated["difference_ns"] == pytest.approx(step_ns / 2, abs=2)


def test_gaps_of_an_audit_are_a_table(audited: Audited) -> None:
    """The largest gaps of every rank, with words for leaves."""
    audit = audited("late_rank")
    assert set(audit.gaps["rank"]) <= {0, 1, 2, 3}
    assert (audit.gaps["ns"] == audit.gaps["end_ns"] - audit.gaps["start_ns"]).all()
    fed = audit.result["throughput"]
    assert [own["rank"] for own in fed["ranks"]] == [0, 1, 2, 3]
    assert fed["kernels_per_step"] > 0


# Real traces


GRAPHS = [
    "mi300-sglang-decode/sglang_Qwen3-8B_decode.json.gz",
    "deepseek-r1-decode/b300-TP-0-DECODE.trace.json.gz",
    "deepseek-r1-decode/mi300-TP-0-DECODE.trace.json.gz",
    "ao-vit-cudagraph/vit_bfloat16_a.json.gz",
]


@pytest.mark.parametrize("name", GRAPHS)
def test_real_graph_replays_have_no_phantom_idle(name: str, real_traces: Path) -> None:
    """Idle is what no row covers; before a graph's later kernels it is the host's only while the call enqueues."""
    trace = read_trace(real_traces / name)
    table = activities(trace)
    first, last = int(table["start_ns"].min()), int(table["end_ns"].max())
    found = resolve(trace, table, base_states(table, first, last), None)
    covered = union(table["start_ns"].to_numpy(), table["end_ns"].to_numpy())
    alone = int((found["end_ns"] - found["start_ns"])[found["ender"] >= 0].sum())
    copies = table[table["state"] == 2]
    lonely = int((copies["end_ns"] - copies["start_ns"]).sum())
    assert alone - lonely <= last - first - int((covered.end - covered.start).sum()) <= alone
    launch = table["launch"].to_numpy()
    late = found[found["thread"] >= 0]
    ender = late["ender"].to_numpy()
    later = np.ones(len(table), np.bool_)
    later[np.unique(launch, return_index=True)[1]] = False
    inside = late[later[ender] & (launch[ender] >= 0)]
    ends = trace.events["end_ns"].to_numpy()[launch[inside["ender"].to_numpy()]]
    assert (inside["end_ns"].to_numpy() <= ends).all()


# A profile made here


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_real_loader_shows_in_a_profile(workers: int, tmp_path: Path) -> None:
    """The time in which a slow DataLoader makes a batch is the data loader's, seen from a GPU that idles."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "profile.json"
    profile_slow_loader(torch, path, workers)
    content = json.loads(path.read_text())
    rows = [e for e in content["traceEvents"] if str(e.get("name", "")).startswith("enumerate(DataLoader)")]
    assert rows
    thread, process = rows[0]["tid"], rows[0]["pid"]
    begun, ended = min(e["ts"] for e in rows), max(e["ts"] + e["dur"] for e in rows)
    for number, at in ((900_001, begun - 10), (900_002, ended + 10)):  # a GPU that had nothing to do meanwhile
        call = host(at, at + 2, "cudaLaunchKernel", CALL, thread, correlation=number) | {"pid": process}
        content["traceEvents"] += [call, gpu(at + 4, at + 5, correlation=number)]
    path.write_text(json.dumps(content))
    trace = normalise(load(path))
    doing = host_activity(trace, activities(trace))
    spans = union(*(np.concatenate(ends) for ends in zip(*doing.causes[Leaf.DATA_LOADER].values(), strict=True)))
    asked = sum(e["dur"] for e in rows) * 1_000
    assert int((spans.end - spans.start).sum()) == pytest.approx(asked, rel=0.02)
    gap = [part for part in parts_of(trace, None) if part[2] == Leaf.DATA_LOADER]
    assert sum(end - start for start, end, _ in gap) * 1_000 == pytest.approx(asked, rel=0.02)
    _, sums = gaps_of(trace)
    assert sums.iloc[0]["leaf"] == Leaf.DATA_LOADER
    assert sums.iloc[0]["call"].startswith("enumerate(DataLoader)#_")


def profile_slow_loader(torch: Any, path: Path, workers: int) -> None:  # noqa: ANN401  an optional module
    """Profile a few steps of a tiny model whose samples take 5 ms each."""
    from time import sleep

    class Slow:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:  # noqa: ANN401
            sleep(0.005)
            return torch.full((4,), float(index))

    model = torch.nn.Linear(4, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=workers):
            model(batch).sum().backward()
    profiler.export_chrome_trace(str(path))
