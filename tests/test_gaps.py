"""Idle time and lonely host copies get the leaves of attribution rule 3.4. Times in the tests are microseconds."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from traceaudit.classify import State, activities
from traceaudit.events import Trace
from traceaudit.idle.gaps import resolve
from traceaudit.intervals import union
from traceaudit.leaves import Leaf
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise, read_trace
from traceaudit.simulate import simulate
from traceaudit.timeline import base_states

Event = dict[str, Any]
Part = tuple[int, int, Leaf]  # start and end in microseconds

ANNOTATION, OPERATOR, CALL, FRAME = "user_annotation", "cpu_op", "cuda_runtime", "python_function"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
NODE = "autograd::engine::evaluate_function: MmBackward0"
TO_DEVICE, TO_HOST = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
MAIN = (9, 1)


def host(start: float, end: float, name: str, cat: str = ANNOTATION, tid: int = 1, **args: object) -> Event:
    """Return a host row."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": end - start, "args": args}


def gpu(start: float, end: float, name: str = "gemm", stream: int = 7, correlation: int = 0) -> Event:
    """Return a GPU row; its name tells whether it is a copy."""
    cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    args = {"stream": stream, "device": 0, "correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": end - start, "args": args}


def launched(launch: tuple[float, float], start: float, end: float, **more: Any) -> list[Event]:  # noqa: ANN401
    """Return a GPU row and the call that launched it, from and to; `tid` is the thread of the call."""
    number = round(start * 100) + more.get("stream", 7)
    call = "cudaMemcpyAsync" if more.get("name", "").startswith("Memcpy") else "cudaLaunchKernel"
    thread = more.pop("tid", 1)
    return [host(*launch, call, CALL, thread, correlation=number), gpu(start, end, correlation=number, **more)]


Resolve = Callable[..., list[Part]]


@pytest.fixture
def parts(tmp_path: Path) -> Resolve:
    """Return a function that gives the parts of a trace's idle time and host copies between two instants."""

    def found(events: list[Event], start: float, end: float, main_thread: tuple[int, int] | None = MAIN) -> list[Part]:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(events), encoding="utf-8")
        trace = normalise(load(path))
        rows = resolved(trace, round(start * 1_000), round(end * 1_000), main_thread)
        return joined([(a, b, leaf) for a, b, leaf, _ in rows])

    return found


def resolved(
    trace: Trace, start_ns: int, end_ns: int, main_thread: tuple[int, int] | None = MAIN
) -> list[tuple[int, int, Leaf, int]]:
    """Return the parts in microseconds in order, each with the activity that is charged with it."""
    table = activities(trace)
    found = resolve(trace, table, base_states(table, start_ns, end_ns), main_thread).sort_values("start_ns")
    found = found[["start_ns", "end_ns", "leaf", "after"]]
    rows = ([int(value) for value in row] for row in found.itertuples(index=False))
    return [(start // 1_000, end // 1_000, Leaf(leaf), after) for start, end, leaf, after in rows]


def joined(parts: list[Part]) -> list[Part]:
    """Join parts that touch and have the same leaf."""
    result: list[Part] = []
    for start, end, leaf in parts:
        if result and result[-1][1:] == (start, leaf):
            result[-1] = (result[-1][0], end, leaf)
        else:
            result.append((start, end, leaf))
    return result


# The host was late: the GPU is idle from 100 to 920, and the launch that ends it takes from 900 to 910.

LATE = [*launched((0, 2), 10, 100), *launched((900, 910), 920, 1_000)]
TAIL = [(900, 910, Leaf.LAUNCH_BOUND), (910, 920, Leaf.LAUNCH_LATENCY)]
# One row of the launching thread from 150 to 880, and what that time is charged to.
CAUSES = [
    (LOADER, ANNOTATION, Leaf.DATA_LOADER),
    ("enumerate(DataPipe)#MyPipe", ANNOTATION, Leaf.DATA_LOADER),
    ("torch/utils/data/dataloader.py(701): __next__", FRAME, Leaf.DATA_LOADER),
    ("get_batch", ANNOTATION, Leaf.DATA_LOADER),
    ("save_checkpoint", ANNOTATION, Leaf.CHECKPOINT),
    ("checkpoint: save", ANNOTATION, Leaf.CHECKPOINT),
    ("torch/serialization.py(850): save", FRAME, Leaf.CHECKPOINT),
    ("torch/distributed/checkpoint/state_dict_saver.py(90): save", FRAME, Leaf.CHECKPOINT),
    ("Python GC", FRAME, Leaf.GC),
    ("<built-in function collect>", FRAME, Leaf.GC),
    ("_compile.compile_inner (dynamo_timed)", OPERATOR, Leaf.COMPILE),
    ("cuModuleLoadData", CALL, Leaf.COMPILE),
    ("cudaMalloc", CALL, Leaf.ALLOCATOR),
    ("cudaFree", CALL, Leaf.ALLOCATOR),
    ("hipHostMalloc", CALL, Leaf.ALLOCATOR),
    ("cuMemCreate", CALL, Leaf.ALLOCATOR),
    ("gloo:all_reduce", ANNOTATION, Leaf.LATE_RANK),
    ("monitored_barrier", ANNOTATION, Leaf.LATE_RANK),
    ("aten::add", OPERATOR, Leaf.LAUNCH_BOUND),
    ("cudaEventRecord", CALL, Leaf.LAUNCH_BOUND),
    ("my own annotation", ANNOTATION, Leaf.OTHER_HOST),
    ("checkpoint", ANNOTATION, Leaf.OTHER_HOST),  # activation checkpointing saves no file
]


@pytest.mark.parametrize(("name", "category", "leaf"), CAUSES)
def test_the_host_is_late_by_what_it_did(parts: Resolve, name: str, category: str, leaf: Leaf) -> None:
    """The gap up to the launch is charged to what the launching thread did, the rest of it to other, none is lost."""
    to_launch = Leaf.LAUNCH_BOUND if category in (CALL, OPERATOR) else Leaf.OTHER_HOST  # 20 µs part no two calls
    expected = [(100, 150, Leaf.OTHER_HOST), (150, 880, leaf), (880, 900, to_launch), *TAIL]
    assert parts([*LATE, host(150, 880, name, category)], 10, 1_000) == joined(expected)


def test_a_profiler_step_is_no_cause(parts: Resolve) -> None:
    """The mark of a step around everything tells nothing about a gap."""
    assert parts([*LATE, host(0, 2_000, "ProfilerStep#3")], 10, 1_000) == [(100, 900, Leaf.OTHER_HOST), *TAIL]


@pytest.mark.parametrize(
    ("outer", "inner", "first"),
    [
        ("save_checkpoint", LOADER, Leaf.CHECKPOINT),
        (LOADER, "save_checkpoint", Leaf.CHECKPOINT),
        (LOADER, "Python GC", Leaf.DATA_LOADER),
        ("Python GC", "cudaMalloc", Leaf.GC),
        ("(dynamo_timed)", "cudaMalloc", Leaf.COMPILE),
        ("cudaStreamSynchronize", "cudaMalloc", Leaf.ALLOCATOR),
        ("gloo:broadcast", "cudaMalloc", Leaf.ALLOCATOR),
        ("gloo:broadcast", "cudaStreamSynchronize", Leaf.LATE_RANK),
    ],
)
def test_of_several_causes_the_first_of_the_rule_takes_an_instant(
    parts: Resolve, outer: str, inner: str, first: Leaf
) -> None:
    """Where two causes hold at once, the order of the rule decides, not which encloses the other."""

    def category(name: str) -> str:
        return CALL if name.startswith("cuda") else FRAME if name == "Python GC" else ANNOTATION

    rows = [host(200, 800, outer, category(outer)), host(400, 600, inner, category(inner))]
    assert (400, 600, first) in split([400, 600], parts([*LATE, *rows], 10, 1_000))


def split(borders: list[int], found: list[Part]) -> list[Part]:
    """Cut parts at some instants."""
    return [
        (a, b, leaf)
        for start, end, leaf in found
        for a, b in pairwise([start, *(border for border in borders if start < border < end), end])
    ]


def test_a_synchronisation_is_charged_with_the_refilling_of_the_queue(parts: Resolve) -> None:
    """From the end of the awaited work to the next launch the host is late because it waited."""
    assert parts([*LATE, host(50, 300, "cudaStreamSynchronize", CALL)], 10, 1_000) == [
        (100, 900, Leaf.HOST_SYNC),
        *TAIL,
    ]


def test_only_a_launch_refills_the_queue(parts: Resolve) -> None:
    """Calls between a synchronisation and the next launch do not end what it is charged with."""
    rows = [host(50, 120, "cudaDeviceSynchronize", CALL), host(400, 410, "cudaEventRecord", CALL)]
    assert parts([*LATE, *rows], 10, 1_000) == [(100, 900, Leaf.HOST_SYNC), *TAIL]


def test_refilling_ends_where_another_cause_holds_and_at_the_next_launch(parts: Resolve) -> None:
    """A loader behind a synchronisation keeps its time; what follows the next launch is not the synchronisation's."""
    rows = [host(50, 120, "aten::item", OPERATOR), host(200, 300, LOADER)]
    rows += [host(400, 410, "cudaLaunchKernel", CALL)]  # without a GPU record
    assert parts([*LATE, *rows], 10, 1_000) == [
        (100, 200, Leaf.HOST_SYNC),
        (200, 300, Leaf.DATA_LOADER),
        (300, 400, Leaf.HOST_SYNC),
        (400, 410, Leaf.LAUNCH_BOUND),
        (410, 900, Leaf.OTHER_HOST),
        *TAIL,
    ]


def test_a_copy_from_pageable_memory_blocks_the_host(parts: Resolve) -> None:
    """The call of a pageable copy waits for it, and the queue refills behind it."""
    copy = launched((50, 140), 100, 130, name="Memcpy HtoD (Pageable -> Device)", stream=9)
    assert parts([*LATE, *copy], 10, 1_000) == [
        (100, 130, Leaf.INPUT_COPY),
        (130, 900, Leaf.HOST_SYNC),
        *TAIL,
    ]


@pytest.mark.parametrize(("hole", "joined"), [(99, True), (100, True), (101, False)])
def test_operators_back_to_back_are_launch_bound(parts: Resolve, hole: int, joined: bool) -> None:
    """Python between two calls belongs to the loop of launches, up to 100 µs; more is something else."""
    rows = [host(110, 300, "aten::add", OPERATOR), host(300 + hole, 890, "aten::mul", OPERATOR)]
    inside = [] if joined else [(110, 300, Leaf.LAUNCH_BOUND), (300, 300 + hole, Leaf.OTHER_HOST)]
    last = (110 if joined else 300 + hole, 910, Leaf.LAUNCH_BOUND)
    assert parts([*LATE, *rows], 10, 1_000) == [(100, 110, Leaf.OTHER_HOST), *inside, last, TAIL[1]]


# A gap of 5 ms

SLOW_CALLS = [
    # what the host did, and the parts
    ([host(200, 1_200, "aten::copy_", OPERATOR)], [(200, 1_200, Leaf.LAUNCH_BOUND)]),  # 1 ms is not above 1 ms
    ([host(200, 1_201, "aten::copy_", OPERATOR)], []),
    (
        [host(200, 4_000, "aten::copy_", OPERATOR), host(300, 3_900, "aten::fill_", OPERATOR)],
        [(200, 300, Leaf.LAUNCH_BOUND), (3_900, 4_000, Leaf.LAUNCH_BOUND)],
    ),
    (
        [
            host(200, 4_000, "aten::copy_", OPERATOR),
            *(host(200 + 950 * i, 1_150 + 950 * i, "aten::fill_", OPERATOR) for i in range(4)),
        ],
        [(200, 4_000, Leaf.LAUNCH_BOUND)],
    ),
]


@pytest.mark.parametrize(("rows", "loops"), SLOW_CALLS)
def test_a_call_with_nothing_beneath_it_for_long_is_no_loop(
    parts: Resolve, rows: list[Event], loops: list[Part]
) -> None:
    """A call above 1 ms without calls beneath it is a stalled host; with short calls beneath, it is at work."""
    events = [*launched((0, 2), 10, 100), *rows, *launched((4_900, 4_910), 4_920, 5_000)]
    found = [part for part in parts(events, 10, 5_000) if part[1] <= 4_900 or part[0] < 4_900]
    assert [part for part in found if part[2] == Leaf.LAUNCH_BOUND] == loops
    assert all(part[2] in (Leaf.LAUNCH_BOUND, Leaf.OTHER_HOST) for part in found)
    assert sum(end - start for start, end, _ in found) == 4_900 - 100


@pytest.mark.parametrize(("kernel", "leaf"), [("new kernel", Leaf.COMPILE), ("gemm", Leaf.OTHER_HOST)])
def test_a_long_first_launch_of_a_kernel_loads_it(parts: Resolve, kernel: str, leaf: Leaf) -> None:
    """A launch above 1 ms is lazy loading if its kernel was never launched before, else a stalled host."""
    events = [*launched((0, 2), 10, 100), *launched((200, 4_910), 4_920, 5_000, name=kernel)]
    expected = [(100, 200, Leaf.OTHER_HOST), (200, 4_910, leaf), (4_910, 4_920, Leaf.LAUNCH_LATENCY)]
    if leaf == Leaf.OTHER_HOST:
        expected[:2] = [(100, 4_910, leaf)]
    assert parts(events, 10, 5_000) == expected


# Launched, and then


@pytest.mark.parametrize(
    ("latency", "leaf"), [(5, Leaf.LAUNCH_LATENCY), (100, Leaf.LAUNCH_LATENCY), (101, Leaf.NOT_STARTED)]
)
@pytest.mark.parametrize("late", [True, False])
def test_a_launched_kernel_that_does_not_start_waits_for_something_unknown(
    parts: Resolve, late: bool, latency: int, leaf: Leaf
) -> None:
    """Up to 100 µs between launch or idleness and start are launch latency, more is not started."""
    launch = (200, 210) if late else (50, 60)  # in the gap, or before it
    idle_from = 210 if late else 100
    events = [*launched((0, 2), 10, 100), *launched(launch, idle_from + latency, 900)]
    head = [(100, 200, Leaf.OTHER_HOST), (200, 210, Leaf.LAUNCH_BOUND)] if late else []
    assert parts(events, 10, 900) == [*head, (idle_from, idle_from + latency, leaf)]


def test_a_launch_that_ends_as_the_gap_begins_was_in_time(parts: Resolve) -> None:
    """Intervals are half-open: a kernel launched at the instant the GPU falls idle had been launched."""
    events = [*launched((0, 2), 10, 100), *launched((90, 100), 103, 900)]
    assert parts(events, 10, 900) == [(100, 103, Leaf.LAUNCH_LATENCY)]


def test_a_launch_that_outlasts_its_kernels_start_ends_with_the_gap(parts: Resolve) -> None:
    """The call may return after the kernel has begun: the gap is the host's to its end."""
    events = [*launched((0, 2), 10, 100), *launched((50, 400), 150, 900)]
    assert parts(events, 10, 900) == [(100, 150, Leaf.LAUNCH_BOUND)]


def test_a_gap_before_a_kernel_without_a_launch_record_is_unattributed(parts: Resolve) -> None:
    """Without a launch nothing tells whether the host was late, whatever it did."""
    events = [*launched((0, 2), 10, 100), host(100, 800, LOADER), gpu(900, 1_000)]
    assert parts(events, 10, 1_000) == [(100, 900, Leaf.LAUNCH_MISSING)]


NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
# What ran on another stream until how long before the kernel's start, and the leaf of the idle time between them.
RELEASED = [
    (NCCL, 2, True, Leaf.LAUNCH_LATENCY),
    (NCCL, 5, True, Leaf.LAUNCH_LATENCY),
    (NCCL, 6, False, Leaf.LAUNCH_LATENCY),
    ("gemm", 2, False, Leaf.LAUNCH_LATENCY),
    (TO_DEVICE, 2, False, Leaf.INPUT_COPY),
    (TO_HOST, 2, False, Leaf.OFFLOAD_COPY),
]


@pytest.mark.parametrize(("name", "before", "charged", "leaf"), RELEASED)
def test_a_kernel_launched_in_time_waits_for_another_stream(
    tmp_path: Path, name: str, before: int, charged: bool, leaf: Leaf
) -> None:
    """What ended on another stream at most 5 µs before a kernel's start released it: a collective is charged."""
    path = tmp_path / "trace.json"
    events = [*launched((0, 2), 10, 100), *launched((20, 30), 90, 400 - before, name=name, stream=20)]
    path.write_text(json.dumps([*events, *launched((40, 50), 400, 500)]), encoding="utf-8")
    found = resolved(normalise(load(path)), 10_000, 500_000)
    assert found[-1] == (400 - before, 400, leaf, 1 if charged else -1)


def test_what_ended_on_the_kernels_own_stream_does_not_release_it(tmp_path: Path) -> None:
    """A stream runs in order: its own previous activity is no dependency to charge."""
    path = tmp_path / "trace.json"
    events = [*launched((0, 2), 10, 60, stream=9), *launched((3, 5), 60, 100, name=NCCL)]
    path.write_text(json.dumps([*events, *launched((20, 30), 102, 400)]), encoding="utf-8")
    assert resolved(normalise(load(path)), 10_000, 400_000) == [(100, 102, Leaf.LAUNCH_LATENCY, -1)]


def test_ties_of_kernels_that_end_a_gap_go_to_the_lowest_stream(parts: Resolve) -> None:
    """Of two kernels that start together, the one on the lower stream tells why the GPU was idle."""
    events = [*launched((0, 2), 10, 100), *launched((50, 60), 200, 300, stream=9), gpu(200, 300, stream=8)]
    assert parts(events, 10, 300) == [(100, 200, Leaf.LAUNCH_MISSING)]


# Host copies that run alone


def copy(name: str, launch: tuple[float, float] = (20, 22), stream: int = 20) -> list[Event]:
    """Return a copy that is seen alone from 100 to 300."""
    return launched(launch, 90, 300, name=name, stream=stream)


# Rows around a copy that is launched from 20 to 22, its name, and its leaf.
COPIES = [
    ([], TO_DEVICE, Leaf.INPUT_COPY),
    ([host(15, 30, NODE, OPERATOR)], TO_DEVICE, Leaf.OFFLOAD_COPY),  # activations come back for the backward
    ([host(15, 30, "aten::to", OPERATOR)], TO_DEVICE, Leaf.INPUT_COPY),
    ([], TO_HOST, Leaf.OFFLOAD_COPY),
    ([host(30, 310, "cudaStreamSynchronize", CALL)], TO_HOST, Leaf.HOST_SYNC),
    ([host(30, 299, "cudaStreamSynchronize", CALL)], TO_HOST, Leaf.HOST_SYNC),  # nothing launched since
    ([host(18, 310, "aten::_local_scalar_dense", OPERATOR)], TO_HOST, Leaf.HOST_SYNC),
    ([], "Memcpy DtoH (Device -> Pageable)", Leaf.HOST_SYNC),
    ([host(10, 350, "save_checkpoint")], TO_HOST, Leaf.CHECKPOINT),
    ([host(10, 350, "save_checkpoint")], TO_DEVICE, Leaf.CHECKPOINT),
    ([host(10, 15, "save_checkpoint")], TO_HOST, Leaf.OFFLOAD_COPY),
]


@pytest.mark.parametrize(("rows", "name", "leaf"), COPIES)
def test_a_lonely_host_copy_has_the_leaf_of_its_purpose(
    parts: Resolve, rows: list[Event], name: str, leaf: Leaf
) -> None:
    """Copies are input, offloaded activations, a checkpoint, or awaited by the host."""
    events = [*launched((0, 2), 10, 100), *rows, *copy(name), *launched((305, 308), 320, 400)]
    found = parts(events, 10, 300)
    assert found == [(100, 300, leaf)]


def test_a_run_of_copies_ended_by_a_synchronisation_belongs_to_it_as_a_whole(parts: Resolve) -> None:
    """Copies down that follow each other on a stream are awaited if one of them is; those after a kernel are not."""
    events = [
        *launched((0, 1), 10, 50, name=TO_HOST, stream=20),
        *launched((1, 2), 50, 60, stream=20),  # a kernel parts the run
        *launched((2, 3), 60, 100, name=TO_HOST, stream=20),
        *launched((3, 4), 100, 200, name=TO_HOST, stream=20),
        host(190, 210, "cudaEventSynchronize", CALL),
        *launched((215, 216), 220, 300, name=TO_DEVICE, stream=20),
    ]
    assert parts(events, 10, 300) == [
        (10, 50, Leaf.OFFLOAD_COPY),
        (60, 215, Leaf.HOST_SYNC),  # with the refilling of the queue
        (215, 216, Leaf.LAUNCH_BOUND),
        (216, 220, Leaf.LAUNCH_LATENCY),
        (220, 300, Leaf.INPUT_COPY),
    ]


# Other threads


def test_a_blocked_launching_thread_is_charged_with_what_the_other_did(parts: Resolve) -> None:
    """While the launching thread runs nothing, the cause is looked for on the other threads."""
    events = [
        *launched((0, 2), 10, 100, tid=2),
        *launched((900, 910), 920, 1_000, tid=2),
        host(150, 880, LOADER, tid=1),
    ]
    assert parts(events, 10, 1_000) == [
        (100, 150, Leaf.OTHER_HOST),
        (150, 880, Leaf.DATA_LOADER),
        (880, 900, Leaf.OTHER_HOST),
        *TAIL,
    ]


def test_a_thread_may_be_blocked_in_every_gap(parts: Resolve) -> None:
    """What another thread did counts in each gap in which the launching thread ran nothing."""
    events = [
        *launched((0, 2), 10, 100, tid=2),
        host(100, 295, LOADER, tid=1),
        *launched((295, 298), 300, 400, tid=2),
        host(400, 595, LOADER, tid=1),
        *launched((595, 598), 600, 700, tid=2),
    ]
    assert [part for part in parts(events, 10, 700) if part[2] == Leaf.DATA_LOADER] == [
        (100, 295, Leaf.DATA_LOADER),
        (400, 595, Leaf.DATA_LOADER),
    ]


def test_a_launching_thread_at_work_is_not_charged_with_what_another_did(parts: Resolve) -> None:
    """A loader beside a thread that launches back to back delays nothing."""
    events = [
        *launched((0, 2), 10, 100, tid=2),
        host(90, 500, "aten::add", OPERATOR, tid=2),
        *launched((900, 910), 920, 1_000, tid=2),
        host(150, 880, LOADER, tid=1),
    ]
    assert parts(events, 10, 1_000) == [
        (100, 500, Leaf.LAUNCH_BOUND),
        (500, 880, Leaf.DATA_LOADER),
        (880, 900, Leaf.OTHER_HOST),
        *TAIL,
    ]


def test_threads_of_other_processes_are_other_threads(parts: Resolve) -> None:
    """The same thread id in another process is another thread."""
    events = [*LATE, host(150, 880, "aten::add", OPERATOR), host(150, 880, LOADER) | {"pid": 10}]
    assert parts(events, 10, 1_000) == [(100, 150, Leaf.OTHER_HOST), (150, 910, Leaf.LAUNCH_BOUND), TAIL[1]]


# The tail


@pytest.mark.parametrize("main_thread", [MAIN, None])
def test_idle_time_that_nothing_ends_is_the_main_threads(parts: Resolve, main_thread: tuple[int, int] | None) -> None:
    """Behind the last activity, the host is charged by what the thread of the marks did, else the launching one."""
    events = [*launched((0, 2), 10, 100), host(150, 450, LOADER), host(150, 450, "aten::add", OPERATOR, tid=2)]
    assert parts(events, 10, 500, main_thread) == [
        (100, 150, Leaf.OTHER_HOST),
        (150, 450, Leaf.DATA_LOADER),
        (450, 500, Leaf.OTHER_HOST),
    ]


def test_a_main_thread_at_work_behind_the_last_activity_is_not_charged_with_what_another_did(parts: Resolve) -> None:
    """The tail is what the thread of the marks did, even if it never launched anything."""
    events = [*launched((0, 2), 10, 100, tid=2), host(100, 500, "aten::add", OPERATOR), host(100, 500, LOADER, tid=2)]
    assert parts(events, 10, 500) == [(100, 500, Leaf.LAUNCH_BOUND)]
    assert parts(events, 10, 500, main_thread=None) == [(100, 500, Leaf.DATA_LOADER)]


def test_the_head_before_the_first_activity_is_a_gap_like_others(parts: Resolve) -> None:
    """A data loader at the head of the range delays the first kernel."""
    events = [host(0, 80, LOADER), *launched((90, 92), 95, 200)]
    assert parts(events, 0, 200) == [
        (0, 80, Leaf.DATA_LOADER),
        (80, 90, Leaf.OTHER_HOST),
        (90, 92, Leaf.LAUNCH_BOUND),
        (92, 95, Leaf.LAUNCH_LATENCY),
    ]


def test_a_busy_gpu_has_no_parts(parts: Resolve) -> None:
    """Without idle time or host copies there is nothing to resolve."""
    assert parts(launched((0, 2), 10, 100), 10, 100) == []


@pytest.mark.parametrize("scenario", ["loader_stall", "host_pauses", "launch_bound", "hidden_allreduce", "recompute"])
def test_parts_partition_idle_time_and_host_copies(scenario: str, tmp_path: Path) -> None:
    """Every nanosecond that is idle or a lonely copy is in exactly one part."""
    trace = read_trace(simulate(tmp_path, scenario) / "rank0_trace.json.gz")
    table = activities(trace)
    pieces = base_states(table, int(table["start_ns"].min()) - 1_000_000, int(table["end_ns"].max()) + 1_000_000)
    found = resolve(trace, table, pieces, None)
    wanted = pieces[pieces["state"].isin((State.IDLE, State.HOST_COPY))]
    expected, cover = (union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()) for rows in (wanted, found))
    assert cover.start.tolist() == expected.start.tolist()
    assert cover.end.tolist() == expected.end.tolist()
    assert (found["end_ns"] - found["start_ns"]).sum() == (wanted["end_ns"] - wanted["start_ns"]).sum()
    assert (found["end_ns"] > found["start_ns"]).all()
