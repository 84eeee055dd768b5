"""Lay down what a rank computes: operators, backward nodes, the kernels they launch, and pauses of the host."""

from contextlib import nullcontext
from typing import Any

from traceaudit.simulate.job import Enter, Node, Op, Ops, Pause
from traceaudit.simulate.kernels import kernel_args
from traceaudit.simulate.rank import (
    Launch,
    Rank,
    Section,
    advance,
    fill_gap,
    gpu_row,
    host_row,
    links,
    runtime_call,
    spend,
)
from traceaudit.simulate.recording import SimulationError, Span

COMPUTE_STREAM = 7
COPY_NS = 2_000
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def run_ops(rank: Rank, instruction: Ops) -> None:
    """Run operators of the main thread."""
    row = host_row(rank, "user_annotation", instruction.annotation) if instruction.annotation else nullcontext()
    with row:
        for op in instruction.ops:
            run_op(rank, op)


def run_node(rank: Rank, node: Node) -> None:
    """Run a backward node, first what its checkpoint recomputes, while the main thread is in the backward call."""
    args = {"Sequence number": node.sequence, "Fwd thread id": 1}
    rank.thread = rank.recording.autograd_thread
    with host_row(rank, "cpu_op", f"autograd::engine::evaluate_function: {node.name}", args):
        spend(rank, rank.pace.node_edge_ns)
        with host_row(rank, "cpu_op", node.name, args):
            spend(rank, rank.pace.node_edge_ns)
            for op in node.recomputed:
                run_op(rank, op, recomputed=True)
            for op in node.ops:
                run_op(rank, op)
            spend(rank, rank.pace.node_edge_ns)
        spend(rank, rank.pace.node_edge_ns)
    rank.thread = rank.recording.main_thread


def run_op(rank: Rank, op: Op, *, recomputed: bool = False) -> None:
    """Run an operator and the kernel it launches."""
    with host_row(rank, "cpu_op", op.name, op_args(op)) as external:
        spend(rank, rank.pace.op_head_ns)
        launch = runtime_call(rank, "cudaLaunchKernel", external)
        spend(rank, rank.pace.op_tail_ns)
    start_ns = compute_start(rank, launch)
    end_ns = start_ns + duration_on(rank, op)
    if not recomputed:  # the excess of a recomputed kernel stays with it
        advance(rank, f"compute/{op.kernel.family}", start_ns + op.kernel.duration_ns)
    advance(rank, "recompute/kernels" if recomputed else "straggler/slow_gpu", end_ns)
    if not recomputed:
        rank.recording.steps[-1].matmul_flops += op.flops
    args = {**links(rank, launch, COMPUTE_STREAM), **kernel_args(op.kernel.grid, op.kernel.block)}
    gpu_row(rank, Span("kernel", op.kernel.name, rank.device, COMPUTE_STREAM, start_ns, end_ns, args))
    rank.compute.append((start_ns, end_ns))


def op_args(op: Op) -> dict[str, Any]:
    """Return the arguments of an operator's row."""
    args: dict[str, Any] = {}
    if op.sequence is not None:
        args |= {"Sequence number": op.sequence, "Fwd thread id": 0}
    if op.dims is not None:
        concrete = ["1" if kind == "Scalar" else "" for kind in op.types]
        args |= {"Concrete Inputs": concrete, "Input type": op.types, "Input Dims": op.dims}
    return args


def duration_on(rank: Rank, op: Op) -> int:
    """Return how long the kernel takes on this rank, in whole microseconds."""
    if op.kernel.family == "optimizer":  # bound by memory: a low clock leaves it alone, so the ranks end together
        return op.kernel.duration_ns
    return op.kernel.duration_ns * rank.program.slowness_permille // 1_000_000 * 1_000


def compute_start(rank: Rank, launch: Launch) -> int:
    """Return when the next compute activity starts, with the time before it booked.

    Launched in time, it follows the one before, or `Pace.resume_ns` after the collective it waited for. Launched
    late, it starts one launch latency after the call returned, and the host is charged for the gap.
    """
    if launch.end_ns > rank.front_ns:
        fill_gap(rank, launch.end_ns, launch.end_ns + rank.pace.launch_latency_ns)
    elif rank.resume_leaf:
        advance(rank, rank.resume_leaf, rank.front_ns + rank.pace.resume_ns)
    rank.resume_leaf = ""
    return rank.front_ns


def enter(rank: Rank, part: Enter) -> None:
    """Enter a part of the program."""
    external = next(rank.external_ids) if part.annotation else 0
    rank.sections.append(Section(part, external, rank.host_ns, len(rank.compute)))


def leave(rank: Rank) -> None:
    """Leave a part of the program, and record its annotation.

    The profiler repeats an annotation over the kernels that its own thread launched: those of a forward.
    """
    part = rank.sections.pop()
    name, args = part.entered.annotation, {"External id": part.external, "Record function id": 0}
    if not name:
        return
    process, spans = rank.recording.process, rank.recording.spans
    spans.append(Span("user_annotation", name, process, rank.thread, part.start_ns, rank.host_ns, args))
    kernels = rank.compute[part.computed :]
    if kernels and part.entered.task and part.entered.task.kind == "F":
        start_ns, end_ns, shadow = kernels[0][0] - 1, kernels[-1][1] + 1, {"External id": part.external}
        spans.append(Span("gpu_user_annotation", name, rank.device, COMPUTE_STREAM, start_ns, end_ns, shadow))


def run_pause(rank: Rank, pause: Pause) -> None:
    """Hold the host for its time, or until the GPU has idled so long that the next operator ends a gap of `gap_ns`."""
    PAUSES[pause.cause](rank, pause)


def remaining(rank: Rank, pause: Pause) -> int:
    """Return how long to pause from now: by the host's time, else the gap less what the operator that ends it takes."""
    if pause.host_ns:
        return pause.host_ns
    pace, gap_ns = rank.pace, pause.gap_ns
    end_ns = rank.front_ns + gap_ns - pace.op_head_ns - pace.launch_ns - pace.launch_latency_ns
    if end_ns <= rank.host_ns:
        raise SimulationError(f"rank {rank.number}: the host is too far behind for a pause of {gap_ns} ns")
    return end_ns - rank.host_ns


def load_data(rank: Rank, pause: Pause) -> None:
    """Wait for a batch of the data loader."""
    with host_row(rank, "user_annotation", LOADER):
        spend(rank, remaining(rank, pause), "data_loader")


def collect_garbage(rank: Rank, pause: Pause) -> None:
    """Let Python's garbage collector run, which the profiler records like a function of Python."""
    start_ns, process = rank.host_ns, rank.recording.process
    spend(rank, remaining(rank, pause), "gc")
    rank.recording.spans.append(
        Span("python_function", "Python GC", process, rank.thread, start_ns, rank.host_ns, {"Python id": 1})
    )


def allocate(rank: Rank, pause: Pause) -> None:
    """Ask the driver for memory."""
    with host_row(rank, "cpu_op", "aten::empty") as external:
        runtime_call(rank, "cudaMalloc", external, remaining(rank, pause), "allocator")


def read_scalar(rank: Rank, pause: Pause) -> None:
    """Read a scalar (`loss.item()`): its copy, the wait for it and the refilling of the queue are the sync's."""
    with host_row(rank, "cpu_op", "aten::item"), host_row(rank, "cpu_op", "aten::_local_scalar_dense") as external:
        launch = runtime_call(rank, "cudaMemcpyAsync", external)
        start_ns = compute_start(rank, launch)
        advance(rank, "host_gap/host_sync", start_ns + COPY_NS)
        args = {**links(rank, launch, COMPUTE_STREAM), "bytes": 4, "memory bandwidth (GB/s)": 4 / COPY_NS}
        name = "Memcpy DtoH (Device -> Pageable)"
        gpu_row(rank, Span("gpu_memcpy", name, rank.device, COMPUTE_STREAM, start_ns, rank.front_ns, args))
        runtime_call(rank, "cudaStreamSynchronize", external, remaining(rank, pause), "host_sync")
        rank.refilling = "host_sync"


# What holds the host; the key is the leaf under host_gap.
PAUSES = {"data_loader": load_data, "gc": collect_garbage, "allocator": allocate, "host_sync": read_scalar}
