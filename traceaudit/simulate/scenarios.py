"""The scenarios: small training runs, each with one thing to find, and one with all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from traceaudit.simulate.big_job import BigJob, big_job
from traceaudit.simulate.faults import (
    clock_drift,
    clock_offset,
    dropped_first,
    gc_pause,
    host_alone,
    missing_rank,
    slow_gpu,
    slow_link,
)
from traceaudit.simulate.hosts import (
    allocator_retry,
    checkpoint_async,
    checkpoint_burst,
    gc_alone,
    graph_replay,
    launch_missing,
    loader_pageable,
    loader_pinned,
    recompile,
    stalled_rank,
    stream_wait,
    sync_per_layer,
)
from traceaudit.simulate.job import Collective, Fault, Group, Job, Pace, Pause, RankProgram, Wait
from traceaudit.simulate.orders import one_f_one_b
from traceaudit.simulate.replicas import (
    DP_STREAM,
    OPTIMIZER_NS,
    TOKENS,
    Replica,
    data_parallel,
    parallel,
    run_facts,
    written,
)
from traceaudit.simulate.schedules import (
    pipeline_1f1b,
    pipeline_coalesced,
    pipeline_gpipe,
    pipeline_heavy_microbatch,
    pipeline_heavy_stage,
    pipeline_host_pause,
    pipeline_interleaved,
    pipeline_slow_rank,
    pipeline_transfer,
    pipeline_zero_bubble,
    whole_pipeline,
)
from traceaudit.simulate.workload import (
    Program,
    Seat,
    backward,
    block_params,
    forward,
    optimizer,
    pipeline_pass,
    transfer_ns,
    transformer_block,
    zero_grad,
)


@dataclass(frozen=True)
class Scenario:
    """A run that can be simulated; a `large` one writes a thousand files, which takes a minute or two.

    `findings` are the ids of what is planted, the most expensive first, and there is nothing else to find: how the run
    is built (exposed reductions, few micro-batches) belongs to it like the fault.
    """

    name: str
    description: str
    build: Callable[[], Job]
    findings: tuple[str, ...] = ()
    large: bool = False


# Data parallel runs


def compute_only() -> Job:
    """Return a run that only computes."""
    return data_parallel(1, Replica())


def exposed_allreduce() -> Job:
    """Return a run whose gradients are reduced after the backward."""
    return data_parallel(4, Replica(reduce="exposed"))


def hidden_allreduce() -> Job:
    """Return a run whose gradients are reduced under the backward."""
    return data_parallel(4, Replica(reduce="hidden"))


def late_rank() -> Job:
    """Return a run in which one rank has a quarter more tokens than the others."""
    late, tokens = 2, TOKENS * 5 // 4
    planted = {"kind": "more_work", "rank": late, "tokens": tokens, "tokens_of_others": TOKENS}
    replica = Replica(tokens=lambda rank: tokens if rank == late else TOKENS, reduce="exposed")
    job = data_parallel(4, replica, planted)
    return replace(job, fault=Fault("more_work", (late,), "compute"))


def loader_stall() -> Job:
    """Return a run whose data loader is late at the head of each step."""
    stalls = {3: 5_000_000, 4: 25_000_000, 5: 40_000_000}
    planted = [{"kind": "loader_stall", "rank": 0, "step": step, "gap_ns": gap} for step, gap in stalls.items()]
    replica = Replica(before_forward=lambda step: (Pause("data_loader", stalls[step]),))
    return data_parallel(1, replica, *planted)


def host_pauses() -> Job:
    """Return a run whose host allocates memory and reads the loss in every step."""
    allocation, reading = Pause("allocator", 400_000), Pause("host_sync", 150_000)
    planted = [{"kind": pause.cause, "rank": 0, "gap_ns": pause.gap_ns} for pause in (allocation, reading)]
    replica = Replica(before_forward=lambda _: (allocation,), before_optimizer=(reading,))
    return data_parallel(1, replica, *planted)


def recompute() -> Job:
    """Return a run that checkpoints every block."""
    return data_parallel(2, Replica(recompute=True, reduce="exposed"))


def launch_bound() -> Job:
    """Return a run whose kernels are shorter than the host's work between them."""
    tokens, hidden, blocks = 64, 512, 6

    def write(program: Program, _rank: int, _step: int) -> None:
        program.add(zero_grad(2_000))
        saved = forward(program, [transformer_block(tokens, hidden)] * blocks)
        backward(program, saved)
        program.add(optimizer(3_000))

    programs = tuple(RankProgram(rank, tuple(program.instructions)) for rank, program in written(1, write))
    facts = run_facts(blocks * block_params(hidden), tokens, 1, layers=blocks, hidden=hidden, heads=8, seq_len=tokens)
    return Job(programs, (), facts, pace=Pace(op_head_ns=14_000))


# A run at 28 % MFU

SLOW_RANK, SLOWNESS_PERMILLE = 5, 1_100
LOADER_STALLS = {  # (step, rank of the first stage) -> gap
    (4, 0): 9_000_000,
    (4, 1): 9_000_000,
    (4, 2): 14_000_000,
    (4, 3): 9_000_000,
    (5, 3): 20_000_000,
}


def run_28_mfu() -> Job:
    """Return two pipeline stages by four replicas, with every kind of loss at once."""
    stages, replicas, microbatches, blocks, hidden, tokens = 2, 4, 4, 6, 4_096, 4_096
    world_size = stages * replicas
    everyone = whole_pipeline(world_size)
    rows = [tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
    shards = [Group(str(1 + stage), "mesh_dp", "dp", row, DP_STREAM) for stage, row in enumerate(rows)]
    columns = [
        Group(str(3 + i), "mesh_pp", "pp", pair, 24, crosses_stages=True)
        for i, pair in enumerate(zip(*rows, strict=True))
    ]
    stage_params = blocks * block_params(hidden)
    sharded_ns = 2 * transfer_ns(stage_params)  # the replicas are on several switches
    block = transformer_block(tokens, hidden)

    def write(program: Program, rank: int, step: int) -> None:
        stage = rank // replicas
        seat = Seat(stage, columns[rank % replicas], lambda _: tokens * hidden, transfer_ns(tokens * hidden))
        order = one_f_one_b(stage, stages, microbatches)
        if gap := LOADER_STALLS.get((step, rank)):
            program.add(Pause("data_loader", gap))
        program.add(zero_grad(), Collective(shards[stage], "all_gather", stage_params, sharded_ns), Wait())
        pipeline_pass(program, seat, order, lambda _: [block] * blocks, recompute=True)
        program.add(Collective(shards[stage], "reduce_scatter", stage_params, sharded_ns), Wait())
        program.add(Collective(everyone, "all_reduce", 1, 100_000), Wait(), optimizer(2 * OPTIMIZER_NS))

    programs = tuple(
        RankProgram(
            rank, tuple(program.instructions), rank // replicas, SLOWNESS_PERMILLE if rank == SLOW_RANK else 1_000
        )
        for rank, program in written(world_size, write)
    )
    facts = run_facts(
        stages * stage_params,
        replicas * microbatches * tokens,
        world_size,
        layers=stages * blocks,
        parallel=parallel(pp=stages, dp=replicas),
        microbatches=microbatches,
        recompute="full",
    )
    planted = (
        {"kind": "slow_gpu", "rank": SLOW_RANK, "slowness_permille": SLOWNESS_PERMILLE},
        *(
            {"kind": "loader_stall", "rank": rank, "step": step, "gap_ns": gap}
            for (step, rank), gap in LOADER_STALLS.items()
        ),
    )
    return Job(programs, (everyone, *shards, *columns), facts, planted, mixed_waits=True)


UNHIDDEN, FEW_MICROBATCHES = "exposed-comm.dp-overlap", "pipeline-bubble.microbatches"

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("compute_only", "one rank that computes and never waits", compute_only),
        Scenario(
            "exposed_allreduce",
            "four ranks that reduce their gradients after the backward",
            exposed_allreduce,
            (UNHIDDEN,),
        ),
        Scenario("hidden_allreduce", "four ranks that reduce their gradients under the backward", hidden_allreduce),
        Scenario(
            "late_rank",
            "four ranks, three of which wait for one with more tokens",
            late_rank,
            ("straggler.data-imbalance", UNHIDDEN),
        ),
        Scenario("loader_stall", "one rank whose data loader is late", loader_stall, ("host-gap.data-loader",)),
        Scenario(
            "host_pauses",
            "one rank whose host allocates memory and reads the loss",
            host_pauses,
            ("host-gap.allocator",),
        ),
        Scenario(
            "launch_bound",
            "one rank whose kernels are shorter than their launches",
            launch_bound,
            ("host-gap.launch-bound", "sub-roofline.matmul-below-reach", "sub-roofline.matmul-shapes"),
        ),
        Scenario("recompute", "two ranks that recompute every block", recompute, ("recompute.full", UNHIDDEN)),
        Scenario(
            "pipeline_1f1b",
            "four pipeline stages, eight micro-batches, nothing but the bubble",
            pipeline_1f1b,
            (FEW_MICROBATCHES,),
        ),
        Scenario("pipeline_gpipe", "the same, all forwards before all backwards", pipeline_gpipe, (FEW_MICROBATCHES,)),
        Scenario(
            "pipeline_interleaved",
            "the same, each rank with two half stages",
            pipeline_interleaved,
            (FEW_MICROBATCHES,),
        ),
        Scenario(
            "pipeline_zero_bubble",
            "the same, the backward split in two halves",
            pipeline_zero_bubble,
            (FEW_MICROBATCHES,),
        ),
        Scenario(
            "pipeline_heavy_stage",
            "four pipeline stages, the last with more weights",
            pipeline_heavy_stage,
            ("pipeline-bubble.heavy-stage", FEW_MICROBATCHES),
        ),
        Scenario(
            "pipeline_heavy_microbatch",
            "four pipeline stages, a micro-batch is long",
            pipeline_heavy_microbatch,
            ("straggler.data-imbalance", FEW_MICROBATCHES),
        ),
        Scenario(
            "pipeline_host_pause",
            "four pipeline stages, the host of one pauses",
            pipeline_host_pause,
            (FEW_MICROBATCHES, "straggler.data-loader"),
        ),
        Scenario(
            "pipeline_transfer",
            "four pipeline stages, messages take a while",
            pipeline_transfer,
            (FEW_MICROBATCHES, "exposed-comm.pp-transfer"),
        ),
        Scenario(
            "pipeline_slow_rank",
            "two pipelines of four stages, one GPU is slow",
            pipeline_slow_rank,
            ("straggler.slow-gpu", FEW_MICROBATCHES, UNHIDDEN),
        ),
        Scenario(
            "pipeline_coalesced",
            "four pipeline stages, messages without metadata",
            pipeline_coalesced,
            (FEW_MICROBATCHES,),
        ),
        Scenario(
            "slow_gpu",
            "eight ranks, one with kernels that take 12 % longer",
            slow_gpu,
            ("straggler.slow-gpu", UNHIDDEN),
        ),
        Scenario(
            "gc_pause",
            "eight ranks, one of which collects garbage in the middle of a forward",
            gc_pause,
            ("straggler.gc", UNHIDDEN),
        ),
        Scenario(
            "slow_link",
            "tensor parallel pairs by four replicas; one pair's link is slow",
            slow_link,
            ("straggler.slow-link", "exposed-comm.tp", UNHIDDEN),
        ),
        Scenario(
            "missing_rank",
            "eight ranks, one slow, and one whose trace is missing",
            missing_rank,
            ("straggler.slow-gpu", "exposed-comm.partners-not-traced"),
        ),
        Scenario(
            "clock_offset",
            "two hosts whose clocks are 2 ms apart, and a slow rank",
            clock_offset,
            ("straggler.slow-gpu", UNHIDDEN),
        ),
        Scenario(
            "clock_drift",
            "two hosts whose clocks drift apart, and a slow rank",
            clock_drift,
            ("straggler.slow-gpu", UNHIDDEN),
        ),
        Scenario(
            "host_alone",
            "two hosts that never communicate, and a slow rank",
            host_alone,
            ("straggler.slow-gpu", UNHIDDEN),
        ),
        Scenario(
            "dropped_first",
            "eight ranks, one of which recorded a collective less",
            dropped_first,
            ("straggler.slow-gpu", UNHIDDEN),
        ),
        Scenario(
            "dropped_first_no_seq",
            "the same, by a profiler that does not number the collectives",
            lambda: dropped_first(sequence_numbers=False),
            ("straggler.slow-gpu", UNHIDDEN),
        ),
        Scenario(
            "loader_pinned",
            "one rank whose loader's workers are late; the copies are quick",
            loader_pinned,
            ("host-gap.data-loader", "host-gap.input-copy"),
        ),
        Scenario(
            "loader_pageable",
            "one rank whose batches come through slow pageable copies",
            loader_pageable,
            ("host-gap.input-copy",),
        ),
        Scenario(
            "checkpoint_burst",
            "one rank that saves its state and waits for every copy",
            checkpoint_burst,
            ("host-gap.checkpoint-pause",),
        ),
        Scenario("checkpoint_async", "one rank that saves its state under its compute", checkpoint_async),
        Scenario(
            "sync_per_layer", "one rank that reads a scalar after every block", sync_per_layer, ("host-gap.host-sync",)
        ),
        Scenario(
            "allocator_retry",
            "one rank whose allocator frees its cache to go on",
            allocator_retry,
            ("host-gap.allocator",),
        ),
        Scenario("gc_alone", "one rank that collects garbage in every step", gc_alone, ("host-gap.gc",)),
        Scenario("recompile", "one rank that compiles again in a step", recompile, ("host-gap.compile",)),
        Scenario("graph_replay", "one rank that replays a CUDA graph of many kernels", graph_replay),
        Scenario(
            "stream_wait",
            "one rank whose compute waits for a copy on another stream",
            stream_wait,
            ("host-gap.input-copy",),
        ),
        Scenario(
            "launch_missing",
            "one rank of which some launch records are lost",
            launch_missing,
            ("unattributed.launch-missing",),
        ),
        Scenario(
            "stalled_rank",
            "the run slow_gpu, but the rank is late for its data loader",
            stalled_rank,
            ("straggler.data-loader", UNHIDDEN),
        ),
        Scenario(
            "thousand_ranks",
            "1,024 ranks on 128 hosts, one slow; writes 1,024 files",
            lambda: big_job(BigJob()),
            ("exposed-comm.tp", UNHIDDEN, "straggler.slow-gpu", "exposed-comm.other"),
            large=True,
        ),
        Scenario(
            "run_28_mfu",
            "eight ranks at 28 % MFU: two stages by four replicas, all losses at once",
            run_28_mfu,
            (
                "recompute.full",
                FEW_MICROBATCHES,
                "exposed-comm.fsdp-prefetch",
                "straggler.slow-gpu",
                "straggler.data-loader",
            ),
        ),
    )
}
