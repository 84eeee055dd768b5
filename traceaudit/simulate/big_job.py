"""A run of many hosts, with few and short rows a rank."""

from dataclasses import dataclass
from zlib import crc32

from traceaudit.simulate.job import Clock, Collective, Fault, Group, Job, Wait
from traceaudit.simulate.replicas import (
    DP_STREAM,
    default_group,
    parallel,
    rank_programs,
    run_facts,
    scalar,
    written,
)
from traceaudit.simulate.workload import (
    Block,
    Program,
    Saved,
    backward,
    forward,
    linear,
    optimizer,
    transfer_ns,
    zero_grad,
)

TP_STREAM = 16
OPTIMIZER_NS = 50_000  # short, so that a slow GPU is slow for nearly all its time


@dataclass(frozen=True)
class BigJob:
    """The size of a run that is tensor parallel inside its hosts and data parallel across them."""

    hosts: int = 128
    gpus_per_host: int = 8
    layers: int = 16  # each a row-parallel matmul, so one tensor-parallel all-reduce forward and one backward
    hidden: int = 8_192
    tokens: int = 2_048
    slow_rank: int = 517
    slowness_permille: int = 1_120
    clock_spread_ns: int = 2_000_000
    seed: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.gpus_per_host


def big_job(size: BigJob) -> Job:
    """Return a run with one slow rank, on hosts whose clocks are off by up to the spread.

    A rank takes part in two collectives a layer and three more in each step.
    """
    world_size, tp = size.world_size, size.gpus_per_host
    everyone = default_group(world_size, alone=False)
    rows = [tuple(range(host * tp, (host + 1) * tp)) for host in range(size.hosts)]
    tensor = [Group(f"tp{host}", "mesh_tp", "tp", row, TP_STREAM) for host, row in enumerate(rows)]
    data = [Group(f"dp{i}", "mesh_dp", "dp", row, DP_STREAM) for i, row in enumerate(zip(*rows, strict=True))]
    layer: Block = (linear(size.tokens, size.hidden // tp, size.hidden),)
    params, activations = size.layers * size.hidden**2, size.tokens * size.hidden
    gradients, activations_ns = params // tp, transfer_ns(activations)

    def write(program: Program, rank: int, _step: int) -> None:
        host, gpu = divmod(rank, tp)
        program.add(zero_grad())
        saved: Saved = []
        for _ in range(size.layers):
            saved += forward(program, [layer])
            program.add(Collective(tensor[host], "all_reduce", activations, activations_ns), Wait())
        program.add(scalar(everyone), Wait())
        for one in reversed(saved):
            backward(program, [one])
            program.add(Collective(tensor[host], "all_reduce", activations, activations_ns), Wait())
        program.add(Collective(data[gpu], "all_reduce", gradients, transfer_ns(gradients)), Wait())
        program.add(scalar(everyone), Wait(), optimizer(OPTIMIZER_NS))

    facts = run_facts(
        params,
        size.hosts * size.tokens,
        world_size,
        layers=size.layers,
        hidden=size.hidden,
        seq_len=size.tokens,
        parallel=parallel(tp=tp, dp=size.hosts),
    )
    return Job(
        rank_programs(written(world_size, write), {size.slow_rank: size.slowness_permille}),
        (everyone, *tensor, *data),
        facts,
        planted=({"kind": "slow_gpu", "rank": size.slow_rank, "slowness_permille": size.slowness_permille},),
        clocks={host: Clock(offset_ns(size, host)) for host in range(size.hosts)},
        gpus_per_host=tp,
        fault=Fault("slow_gpu", (size.slow_rank,), "straggler/slow_gpu"),
        lean=True,
    )


def offset_ns(size: BigJob, host: int) -> int:
    """Return how far a host's clock is off: whole microseconds within the spread, drawn by the seed."""
    spread_us = size.clock_spread_ns // 1_000
    return (crc32(f"{size.seed} {host}".encode()) % (2 * spread_us + 1) - spread_us) * 1_000
