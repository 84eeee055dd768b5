"""Runs whose GPU idles for one reason on the host or between streams, each planted with its exact cost."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from traceaudit.simulate.compute import COMPUTE_STREAM, compute_start, duration_on
from traceaudit.simulate.faults import LARGE, RANKS, SLOWNESS_PERMILLE, slow_gpu
from traceaudit.simulate.job import Act, Fault, Instruction, Job, Kernel, Node, Op, Ops, Pause, Step
from traceaudit.simulate.kernels import KERNELS, SM_COUNT, kernel_args
from traceaudit.simulate.rank import (
    Launch,
    Rank,
    advance,
    fill_gap,
    gpu_row,
    host_row,
    links,
    new_rank,
    runtime_call,
    spend,
)
from traceaudit.simulate.recording import SimulationError, Span
from traceaudit.simulate.replicas import STEPS, Replica, data_parallel

COPY_STREAM = 13
STAGE_NS, RETURN_NS = 20_000, 2_000  # of a pageable copy's call: before the copy starts and after it ended
LATE_RANK = 3
UP = "Memcpy HtoD ({} -> Device)"
DOWN = "Memcpy DtoH (Device -> {})"
WRITING = "<built-in method write of _io.BufferedWriter object at 0x7f3c5c1d2f40>"


def copy_row(rank: Rank, launch: Launch, name: str, stream: int, when: range, size: int) -> None:
    """Record a copy between host and device."""
    args = {**links(rank, launch, stream), "bytes": size, "memory bandwidth (GB/s)": size / len(when)}
    gpu_row(rank, Span("gpu_memcpy", name, rank.device, stream, when.start, when.stop, args))


def blocking_copy(rank: Rank, name: str, size: int, copy_ns: int, leaf: str) -> None:
    """Copy from or to pageable memory: the call returns when the copy has ended.

    Its staging, the rest of the call and the refilling of the queue are charged to the copy's leaf if that is one of
    the host's doing, else to the synchronisation.
    """
    cause = "host_sync" if leaf == "input_copy" else leaf
    with host_row(rank, "cpu_op", "aten::copy_") as external:
        spend(rank, rank.pace.op_head_ns, "launch_bound" if rank.refilling != cause else cause)
        begun_ns, correlation = rank.host_ns, next(rank.correlations)
        spend(rank, STAGE_NS, cause)
        start_ns = max(rank.host_ns, rank.front_ns)
        fill_gap(rank, start_ns, start_ns)
        advance(rank, f"host_gap/{leaf}", start_ns + copy_ns)
        spend(rank, start_ns + copy_ns + RETURN_NS - rank.host_ns, cause)
        args = {"External id": external, "cbid": 41, "correlation": correlation}
        process, when = rank.recording.process, range(start_ns, start_ns + copy_ns)
        rank.recording.spans.append(
            Span("cuda_runtime", "cudaMemcpyAsync", process, rank.thread, begun_ns, rank.host_ns, args)
        )
        copy_row(rank, Launch(begun_ns, correlation, external), name, COMPUTE_STREAM, when, size)
    rank.refilling = cause


def asynchronous_copy(
    rank: Rank, name: str, size: int, copy_ns: int, stream: int, ready_ns: int
) -> tuple[Launch, range]:
    """Launch a copy from or to pinned memory, which starts when its data are ready and the stream's last has ended."""
    with host_row(rank, "cpu_op", "aten::copy_") as external:
        spend(rank, rank.pace.op_head_ns)
        launch = runtime_call(rank, "cudaMemcpyAsync", external)
        spend(rank, rank.pace.op_tail_ns)
    start_ns = max(rank.streams.get(stream, 0), launch.end_ns + rank.pace.launch_latency_ns, ready_ns)
    when = range(start_ns, start_ns + copy_ns)
    copy_row(rank, launch, name, stream, when, size)
    return launch, when


# The data loader and its copies

BATCH_BYTES, BATCH_NS, LOADING_NS = 256 << 20, 20_000_000, 12_000_000


def pageable_batch(rank: Rank) -> None:
    """Copy a batch from pageable memory."""
    blocking_copy(rank, UP.format("Pageable"), BATCH_BYTES, BATCH_NS, "input_copy")


def pinned_batch(rank: Rank) -> None:
    """Copy a batch from pinned memory, on the stream that computes."""
    with host_row(rank, "cpu_op", "aten::copy_") as external:
        spend(rank, rank.pace.op_head_ns)
        launch = runtime_call(rank, "cudaMemcpyAsync", external)
        spend(rank, rank.pace.op_tail_ns)
    start_ns = compute_start(rank, launch)
    advance(rank, "host_gap/input_copy", start_ns + BATCH_NS // 20)
    when = range(start_ns, rank.front_ns)
    copy_row(rank, launch, UP.format("Pinned"), COMPUTE_STREAM, when, BATCH_BYTES // 20)


def loader_pageable() -> Job:
    """Return a run whose batches come in time, but through slow pageable copies."""
    planted = {"kind": "pageable_copies", "rank": 0, "copy_ns": BATCH_NS, "bytes": BATCH_BYTES}
    return data_parallel(1, Replica(before_forward=lambda _: (Act(pageable_batch),)), planted)


def loader_pinned() -> Job:
    """Return a run whose loader's workers are late, while the copies are pinned and quick."""
    pauses = (Pause("data_loader", host_ns=4 * LOADING_NS), Act(pinned_batch))
    planted = {"kind": "loader_stall", "rank": 0, "row_ns": 4 * LOADING_NS}
    return data_parallel(1, Replica(before_forward=lambda _: pauses), planted)


# Checkpoints

TENSORS, TENSOR_BYTES, TENSOR_NS, WRITE_NS = 24, 64 << 20, 4_000_000, 3_000_000


def save_tensors(rank: Rank) -> None:
    """Copy tensor by tensor to pageable memory and write each to a file, with no annotation that says so."""
    for index in range(TENSORS):
        if index:  # the head of the first operator is launching like any other
            rank.refilling = "checkpoint"
        blocking_copy(rank, DOWN.format("Pageable"), TENSOR_BYTES, TENSOR_NS, "checkpoint")
        start_ns = rank.host_ns
        spend(rank, WRITE_NS, "checkpoint")
        span = Span("python_function", WRITING, rank.recording.process, rank.thread, start_ns, rank.host_ns, {})
        rank.recording.spans.append(span)


def in_step(step: int, run: Callable[[Rank], None]) -> Callable[[int], Sequence[Instruction]]:
    """Return what a replica does before the forward: something in one step."""
    return lambda number: (Act(run),) if number == step else ()


def checkpoint_burst() -> Job:
    """Return a run that saves its state at the head of a step, waiting for every copy."""
    planted = {"kind": "checkpoint", "rank": 0, "step": 4, "copies": TENSORS, "bytes": TENSORS * TENSOR_BYTES}
    return data_parallel(1, Replica(before_forward=in_step(4, save_tensors)), planted)


def copy_under_compute(rank: Rank) -> None:
    """Copy the state to pinned memory on a stream of its own, while the GPU computes what it was given before."""
    begun_ns = rank.recording.steps[-1].start_ns
    for _ in range(TENSORS):
        _, when = asynchronous_copy(rank, DOWN.format("Pinned"), 1 << 20, 40_000, COPY_STREAM, begun_ns)
        if when.stop > rank.front_ns:
            raise SimulationError(f"rank {rank.number}: the copies outlast the compute that hides them")


def checkpoint_async() -> Job:
    """Return a run that saves its state without waiting for it."""

    def in_forward(_rank: int, step: int) -> Sequence[Instruction]:
        return (Act(copy_under_compute),) if step == 4 else ()

    planted = {"kind": "checkpoint", "rank": 0, "step": 4, "copies": TENSORS, "asynchronous": True}
    return data_parallel(1, Replica(in_forward=in_forward), planted)


# Synchronisation, allocator, garbage collector, compiler

SYNC_NS, COLLECTION_NS, COMPILE_NS, LOAD_NS = 120_000, 25_000_000, 80_000_000, 3_000_000


def sync_per_layer() -> Job:
    """Return a run that reads a scalar after every block of its forward."""
    job = data_parallel(1, Replica(), {"kind": "host_sync", "rank": 0, "gap_ns": SYNC_NS})
    pause = Pause("host_sync", SYNC_NS)

    def after_blocks(instruction: Instruction) -> tuple[Instruction, ...]:
        block = isinstance(instruction, Ops) and len(instruction.ops) > 1
        return (instruction, pause) if block else (instruction,)

    return with_instructions(job, 0, after_blocks)


def with_instructions(job: Job, rank: int, change: Callable[[Instruction], tuple[Instruction, ...]]) -> Job:
    """Return the job with the instructions of a rank replaced one by one."""
    own = job.programs[rank]
    instructions = tuple(new for old in own.instructions for new in change(old))
    programs = (*job.programs[:rank], replace(own, instructions=instructions), *job.programs[rank + 1 :])
    return replace(job, programs=programs)


def retry_allocation(rank: Rank) -> None:
    """Run out of memory: wait for the GPU, free what is cached, and ask again."""
    with host_row(rank, "cpu_op", "aten::empty") as external:
        spend(rank, rank.pace.op_head_ns)
        runtime_call(rank, "cudaMalloc", external, 50_000, "allocator")
        drained_ns = max(rank.front_ns - rank.host_ns, 0) + 5_000
        runtime_call(rank, "cudaDeviceSynchronize", external, drained_ns, "allocator")
        for _ in range(6):
            runtime_call(rank, "cudaFree", external, 300_000, "allocator")
        runtime_call(rank, "cudaMalloc", external, 400_000, "allocator")
        spend(rank, rank.pace.op_tail_ns)


def allocator_retry() -> Job:
    """Return a run whose allocator has to free its cache in a step."""

    def in_forward(_rank: int, step: int) -> Sequence[Instruction]:
        return (Act(retry_allocation),) if step == 5 else ()

    return data_parallel(1, Replica(in_forward=in_forward), {"kind": "allocator_retry", "rank": 0, "step": 5})


def gc_alone() -> Job:
    """Return a run of one rank that collects garbage in every step."""
    planted = {"kind": "gc", "rank": 0, "gap_ns": COLLECTION_NS}
    return data_parallel(1, Replica(before_optimizer=(Pause("gc", COLLECTION_NS),)), planted)


def small_kernel(name: str, duration_ns: int) -> Kernel:
    """Return an elementwise kernel."""
    return Kernel(name, "elementwise", duration_ns, (SM_COUNT, 1, 1), (128, 1, 1))


def kernel_row(rank: Rank, launch: Launch, kernel: Kernel, start_ns: int, leaf: str = "compute") -> None:
    """Record a kernel at the front, and book it."""
    advance(rank, f"{leaf}/{kernel.family}", start_ns + kernel.duration_ns)
    args = {**links(rank, launch, COMPUTE_STREAM), **kernel_args(kernel.grid, kernel.block)}
    gpu_row(rank, Span("kernel", kernel.name, rank.device, COMPUTE_STREAM, start_ns, rank.front_ns, args))
    rank.compute.append((start_ns, rank.front_ns))


def compile_again(rank: Rank) -> None:
    """Compile a graph for a new shape, and load its kernel at the first launch."""
    with host_row(rank, "cpu_op", "_compile.compile_inner (dynamo_timed)"):
        spend(rank, COMPILE_NS, "compile")
    with host_row(rank, "cpu_op", "triton_poi_fused_add_7") as external:
        spend(rank, rank.pace.op_head_ns)
        launch = runtime_call(rank, "cudaLaunchKernel", external, LOAD_NS, "compile")
        spend(rank, rank.pace.op_tail_ns)
    kernel_row(rank, launch, small_kernel("triton_poi_fused_add_7", 100_000), compute_start(rank, launch))


def recompile() -> Job:
    """Return a run that compiles again in its second step."""
    planted = {"kind": "compile", "rank": 0, "step": 4, "compile_ns": COMPILE_NS, "load_ns": LOAD_NS}
    return data_parallel(1, Replica(before_forward=in_step(4, compile_again)), planted)


# What the GPU does by itself

NODES, NODE_NS, BETWEEN_NODES_NS, GRAPH_CALL_NS, GRAPH_LEAD_NS = 400, 5_000, 1_000, 900_000, 60_000


def replay_graph(rank: Rank) -> None:
    """Replay a CUDA graph, whose kernels start while its launch call still runs; drain the queue first."""
    pause_ns = max(rank.front_ns - rank.host_ns, 0) + 40_000
    with host_row(rank, "cpu_op", "aten::empty") as external:
        runtime_call(rank, "cudaStreamSynchronize", external, pause_ns, "host_sync")
    rank.refilling = "host_sync"
    with host_row(rank, "cpu_op", "CUDAGraph::replay") as external:
        spend(rank, 10_000)
        rank.refilling = ""
        begun_ns = rank.host_ns
        call = runtime_call(rank, "cudaGraphLaunch", external, GRAPH_CALL_NS)
    start_ns = begun_ns + GRAPH_LEAD_NS
    fill_gap(rank, start_ns, start_ns)
    kernel = small_kernel(KERNELS["aten::gelu"][0], NODE_NS)
    for index in range(NODES):
        if index:
            advance(rank, "host_gap/launch_latency", rank.front_ns + BETWEEN_NODES_NS)
        kernel_row(rank, call, kernel, rank.front_ns)


def graph_replay() -> Job:
    """Return a run that replays a CUDA graph of many kernels at the head of each step."""
    planted = {"kind": "graph", "rank": 0, "kernels": NODES, "between_kernels_ns": BETWEEN_NODES_NS}
    return data_parallel(1, Replica(before_forward=lambda _: (Act(replay_graph),)), planted)


PREFETCH_NS, RELEASE_NS = 8_000_000, 40_000


def wait_for_copy(rank: Rank) -> None:
    """Copy on a stream of its own, behind what was computed before, and let the computing stream wait for the copy.

    The kernel follows much later than usual, so that only the recorded event tells what it waited for.
    """
    launch, when = asynchronous_copy(rank, UP.format("Pinned"), 64 << 20, PREFETCH_NS, COPY_STREAM, rank.front_ns)
    if when.start > rank.front_ns:
        fill_gap(rank, launch.end_ns, when.start)
    advance(rank, "host_gap/input_copy", when.stop + RELEASE_NS - rank.pace.resume_ns)
    rank.resume_leaf = "host_gap/input_copy"
    with host_row(rank, "cpu_op", "aten::record_stream") as external:
        record = runtime_call(rank, "cudaEventRecord", external)
        start_ns = rank.host_ns
        wait = runtime_call(rank, "cudaStreamWaitEvent", external)
    args = {
        "External id": external,
        "cuda_sync_kind": "Stream Wait Event",
        "wait_on_stream": COPY_STREAM,
        "wait_on_cuda_event_record_corr_id": record.correlation,
        "wait_on_cuda_event_id": 1,
        "stream": COMPUTE_STREAM,
        "correlation": wait.correlation,
        "device": rank.device,
        "context": 1,
    }
    rank.recording.spans.append(
        Span("cuda_sync", "Stream Wait Event", rank.device, COMPUTE_STREAM, start_ns, rank.host_ns, args)
    )


def stream_wait() -> Job:
    """Return a run whose compute waits for a copy on another stream, as recorded events say."""
    planted = {"kind": "stream_wait", "rank": 0, "copy_ns": PREFETCH_NS, "release_ns": RELEASE_NS}
    return data_parallel(1, Replica(before_forward=lambda _: (Act(wait_for_copy),)), planted)


LOST_NS = 700_000


def launch_missing() -> Job:
    """Return a run in which the profiler lost the records of some launches, behind pauses of the host."""
    lost: set[int] = set()

    def late_kernel(rank: Rank) -> None:
        with host_row(rank, "user_annotation", "somewhere"):
            spend(rank, max(rank.front_ns - rank.host_ns, 0) + LOST_NS, "other_host")
        with host_row(rank, "cpu_op", "aten::gelu") as external:
            spend(rank, rank.pace.op_head_ns)
            launch = runtime_call(rank, "cudaLaunchKernel", external)
            spend(rank, rank.pace.op_tail_ns)
        lost.add(launch.correlation)
        start_ns = launch.end_ns + rank.pace.launch_latency_ns
        advance(rank, "unattributed/launch_missing", start_ns)
        kernel_row(rank, launch, small_kernel(KERNELS["aten::gelu"][0], 30_000), start_ns)

    replica = Replica(in_forward=lambda _rank, _step: (Act(late_kernel),))
    job = data_parallel(1, replica, {"kind": "launch_missing", "rank": 0})
    return replace(job, lost_calls=lost.__contains__)


# The same step time for two reasons


def stalled_rank() -> Job:
    """Return the run with a slow GPU, but for the reason: the same rank loses the same time to its data loader.

    At the head of the first step the GPU idles for its first launch in any case.
    """
    slow = slow_gpu()
    excess_ns, pace = own_excess_ns(slow), slow.pace
    first_ns = pace.op_head_ns + pace.launch_ns + pace.launch_latency_ns

    def after_step(instruction: Instruction) -> tuple[Instruction, ...]:
        if not isinstance(instruction, Step):
            return (instruction,)
        return (instruction, Pause("data_loader", excess_ns + (first_ns if instruction.number == STEPS[0] else 0)))

    planted: dict[str, Any] = {"kind": "loader_stall", "rank": LATE_RANK, "gap_ns": excess_ns}
    job = with_instructions(
        data_parallel(RANKS, Replica(tokens=lambda _: LARGE, reduce="exposed"), planted), LATE_RANK, after_step
    )
    return replace(job, fault=Fault("host_pause", (LATE_RANK,), "host_gap/data_loader"))


def own_excess_ns(job: Job) -> int:
    """Return what the kernels of a step of the slow rank take over the others'."""
    program = job.programs[LATE_RANK]
    if program.slowness_permille != SLOWNESS_PERMILLE:
        raise SimulationError(f"rank {LATE_RANK} is not the slow one")
    rank = new_rank(program, job)
    steps = sum(isinstance(instruction, Step) for instruction in program.instructions)
    ops: list[Op] = []
    for instruction in program.instructions:
        if isinstance(instruction, Ops | Node):
            ops += instruction.ops
    return sum(duration_on(rank, op) - op.kernel.duration_ns for op in ops) // steps
