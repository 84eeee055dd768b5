"""Runs in which one thing makes ranks late, and what may stand between it and a reader: clocks, lost rows and files."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from traceaudit.simulate.job import Clock, Collective, Fault, Group, Job, Pause, StartProfiler, Step, Wait
from traceaudit.simulate.replicas import (
    DP_STREAM,
    HIDDEN,
    OPTIMIZER_NS,
    TOKENS,
    Replica,
    data_parallel,
    default_group,
    parallel,
    rank_programs,
    run_facts,
    written,
)
from traceaudit.simulate.workload import (
    Block,
    Program,
    Saved,
    backward,
    forward,
    gelu,
    linear,
    norm,
    optimizer,
    transfer_ns,
    zero_grad,
)

RANKS = 8
SLOWNESS_PERMILLE = 1_120
TP_STREAM = 16
LARGE = 4 * TOKENS  # a micro-batch beside which reducing the gradients costs less than the fault
LINK_SLOWNESS_PERMILLE = 2_500


def slow_rank_facts(rank: int) -> dict[str, Any]:
    """Return the fact that a GPU is slow."""
    return {"kind": "slow_gpu", "rank": rank, "slowness_permille": SLOWNESS_PERMILLE}


def clock_facts(host: int, clock: Clock) -> dict[str, Any]:
    """Return the fact that a clock is wrong."""
    return {"kind": "clock", "host": f"host{host}", "offset_ns": clock.offset_ns, "drift_ppb": clock.drift_ppb}


def with_slow_rank(rank: int, replica: Replica, *planted: dict[str, Any]) -> Job:
    """Return a data-parallel run of eight ranks, one of which has a slow GPU."""
    slow = replace(replica, reduce="exposed", slowness_permille={rank: SLOWNESS_PERMILLE})
    job = data_parallel(RANKS, slow, slow_rank_facts(rank), *planted)
    return replace(job, fault=Fault("slow_gpu", (rank,), "straggler/slow_gpu"))


def on_two_hosts(job: Job, clock: Clock) -> Job:
    """Return the run on two machines, the second of which has this clock."""
    planted = (*job.planted, clock_facts(1, clock))
    return replace(job, gpus_per_host=job.world_size // 2, clocks={1: clock}, planted=planted)


def slow_gpu() -> Job:
    """Return a run in which the kernels of rank 3 take 12 % longer."""
    return with_slow_rank(3, Replica(tokens=lambda _: LARGE))


def clock_offset() -> Job:
    """Return a run in which a slow rank stands on a host whose clock is 2 ms behind."""
    return on_two_hosts(with_slow_rank(5, Replica(tokens=lambda _: LARGE, scalars=True)), Clock(-2_000_000))


def clock_drift() -> Job:
    """Return a run of more than a second in which the second host's clock is ahead, and gains 20 µs a second."""
    long = Replica(tokens=lambda _: 2 * TOKENS, hidden=2 * HIDDEN, blocks=5, scalars=True)
    return on_two_hosts(with_slow_rank(5, long), Clock(2_000_000, 20_000))


def host_alone() -> Job:
    """Return a run whose two hosts never communicate, so that nothing tells how far their clocks are apart."""
    return on_two_hosts(with_slow_rank(5, Replica(tokens=lambda _: LARGE, groups=2, scalars=True)), Clock(5_000_000))


def missing_rank() -> Job:
    """Return the run with a slow rank 3 without the trace of rank 7."""
    job = with_slow_rank(3, Replica(tokens=lambda _: LARGE), {"kind": "missing_rank", "rank": 7})
    return replace(job, lost_ranks=frozenset({7}))


def gc_pause() -> Job:
    """Return a run in which garbage collection holds up one rank's forward; hosts keep in step by reading the loss."""
    late, late_step, row_ns = 6, 4, 30_000_000
    pause = Pause("gc", host_ns=row_ns)
    replica = Replica(
        reduce="exposed",
        in_forward=lambda rank, step: [pause] if (rank, step) == (late, late_step) else [],
        before_optimizer=[Pause("host_sync", 150_000)],
    )
    job = data_parallel(RANKS, replica, {"kind": "gc_pause", "rank": late, "step": late_step, "row_ns": row_ns})
    return replace(job, fault=Fault("host_pause", (late,), "host_gap/gc"))


# A slow link


def slow_link() -> Job:
    """Return a run of tensor parallel pairs, one of which has a slow link, by four data-parallel replicas."""
    slow, width, layers = (2, 3), HIDDEN // 2, 4
    pairs = [(first, first + 1) for first in range(0, RANKS, 2)]
    tensor = [Group(str(1 + i), "mesh_tp", "tp", pair, TP_STREAM) for i, pair in enumerate(pairs)]
    data = [Group(str(5 + i), "mesh_dp", "dp", row, DP_STREAM) for i, row in enumerate(zip(*pairs, strict=True))]
    halves: list[Block] = [
        (norm(LARGE, HIDDEN), linear(LARGE, HIDDEN, inner), gelu(LARGE, inner), linear(LARGE, inner, HIDDEN))
        for inner in (width, 4 * width)  # in the place of attention, and the feed-forward part
    ]
    params = 2 * layers * sum(2 * HIDDEN * inner for inner in (width, 4 * width))
    activations, once_ns = LARGE * HIDDEN, transfer_ns(LARGE * HIDDEN)

    def write(program: Program, rank: int, _step: int) -> None:
        both, ns = tensor[rank // 2], once_ns * LINK_SLOWNESS_PERMILLE // 1_000 if rank in slow else once_ns
        program.add(zero_grad())
        saved: Saved = []
        for half in halves * layers:
            saved += forward(program, [half])
            program.add(Collective(both, "all_reduce", activations, ns), Wait())
        for layer in reversed(saved):
            backward(program, [layer])
            program.add(Collective(both, "all_reduce", activations, ns, from_autograd=True), Wait())
        gradients = params // 2
        program.add(Collective(data[rank % 2], "all_reduce", gradients, transfer_ns(gradients)), Wait())
        program.add(optimizer(OPTIMIZER_NS))

    facts = run_facts(params, LARGE * RANKS // 2, RANKS, layers=layers, parallel=parallel(tp=2, dp=RANKS // 2))
    return Job(
        rank_programs(written(RANKS, write), {}),
        (default_group(RANKS, alone=False), *tensor, *data),
        facts,
        planted=(
            {"kind": "slow_link", "ranks": list(slow), "dimension": "tp", "slowness_permille": LINK_SLOWNESS_PERMILLE},
        ),
        fault=Fault("slow_link", slow, "exposed_comm/tp", together=True),
    )


# A collective that one rank did not record

WIDTHS = (4, 1, 4, 2, 4, 1)  # of the feed-forward blocks, in units of the hidden size: no rhythm repeats


def feed_forward(times: int) -> Block:
    """Return a feed-forward block."""
    inner = times * HIDDEN
    return (norm(LARGE, HIDDEN), linear(LARGE, HIDDEN, inner), gelu(LARGE, inner), linear(LARGE, inner, HIDDEN))


def dropped_first(*, sequence_numbers: bool = True) -> Job:
    """Return a run in which rank 3's profiler starts a collective later than the others, in the step before."""
    late, lossy = 5, 3
    group = default_group(RANKS)

    def reduce(times: int) -> Sequence[Collective | Wait]:
        elements = 2 * times * HIDDEN**2
        return Collective(group, "all_reduce", elements, transfer_ns(elements)), Wait()

    def before(program: Program, rank: int) -> None:
        # Of the size of others, so that pairing by order goes wrong; reading it holds the host until it has ended.
        program.add(Step(2, cut=True), *reduce(WIDTHS[0]), Pause("host_sync", 150_000))
        if rank == lossy:
            program.add(StartProfiler())
        program.add(*reduce(WIDTHS[0]), *reduce(WIDTHS[1]), optimizer(OPTIMIZER_NS))

    def write(program: Program, _rank: int, _step: int) -> None:
        program.add(zero_grad())
        saved = forward(program, [feed_forward(times) for times in WIDTHS])
        for layer, times in reversed(list(zip(saved, WIDTHS, strict=True))):
            backward(program, [layer])
            program.add(*reduce(times))
        program.add(optimizer(OPTIMIZER_NS))

    params = sum(2 * times * HIDDEN**2 for times in WIDTHS)
    return Job(
        rank_programs(written(RANKS, write, before=before), {late: SLOWNESS_PERMILLE}),
        (group,),
        run_facts(params, LARGE * RANKS, RANKS, layers=len(WIDTHS)),
        planted=(slow_rank_facts(late), {"kind": "lost_collective", "rank": lossy, "count": 1}),
        sequence_numbers=sequence_numbers,
        fault=Fault("slow_gpu", (late,), "straggler/slow_gpu"),
    )
