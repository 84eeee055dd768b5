"""The scenarios: small training runs, each with one thing to find, and one with all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceaudit.simulate.job import Collective, Group, Job, Pace, Pause, RankProgram, Step, Wait
from traceaudit.simulate.kernels import GPU, matmul, memory_bound
from traceaudit.simulate.workload import (
    Block,
    Layer,
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

STEPS = (3, 4, 5)
TOKENS, HIDDEN, BLOCKS = 4_096, 4_096, 4  # of a rank's micro-batch and model in the small runs
OPTIMIZER_NS = 1_500_000
DP_STREAM, WORLD_STREAM = 20, 32


@dataclass(frozen=True)
class Scenario:
    """A run that can be simulated."""

    name: str
    description: str
    build: Callable[[], Job]


def written(world_size: int, write: Callable[[Program, int, int], None]) -> list[tuple[int, Program]]:
    """Return the program of each rank, `write` adding one step of a rank at a time."""
    programs = [(rank, Program()) for rank in range(world_size)]
    for rank, program in programs:
        for step in STEPS:
            program.add(Step(step))
            write(program, rank, step)
    return programs


def run_facts(params: int, tokens_per_step: int, world_size: int, **facts: object) -> dict[str, Any]:
    """Return `run.json`; `params` are the weights that take part in matmuls, so that 6·params·tokens is exact."""
    return {
        "params": params,
        "active_params": None,
        "layers": BLOCKS,
        "hidden": HIDDEN,
        "heads": 32,
        "seq_len": TOKENS,
        "vocab": None,
        "tokens_per_step": tokens_per_step,
        "dtype": "bf16",
        "gpu": GPU,
        "world_size": world_size,
        "parallel": {"pp": 1, "tp": 1, "dp": world_size, "cp": 1, "ep": 1},
        "microbatches": 1,
        "virtual_stages": 1,
        "recompute": "none",
        "tokens_per_second": None,
        **facts,
    }


def default_group(world_size: int, *, pipelined: bool = False) -> Group:
    """Return the group of all ranks, which is data parallel where nothing else is."""
    dimension, stream = ("other_comm", WORLD_STREAM) if pipelined else ("dp", DP_STREAM)
    return Group("0", "default_pg", dimension, tuple(range(world_size)), stream, crosses_stages=pipelined)


# Data parallel runs


@dataclass(frozen=True)
class Replica:
    """How the ranks of a data-parallel run spend a step."""

    tokens: Callable[[int], int] = lambda _: TOKENS
    recompute: bool = False
    reduce: str = ""  # "", "exposed" or "hidden"
    before_forward: Callable[[int], Sequence[Pause]] = lambda _: ()
    before_optimizer: Sequence[Pause] = ()


def data_parallel(world_size: int, replica: Replica, *planted: Mapping[str, Any]) -> Job:
    """Return a run in which each rank trains the same small model on its own micro-batch."""
    group = default_group(world_size)
    params = BLOCKS * block_params(HIDDEN)
    whole = Collective(group, "all_reduce", params, transfer_ns(params))
    one = block_params(HIDDEN)
    bucket = Collective(group, "all_reduce", one, transfer_ns(one), from_autograd=True)

    def write(program: Program, rank: int, step: int) -> None:
        program.add(*replica.before_forward(step), zero_grad())
        saved = forward(program, [transformer_block(replica.tokens(rank), HIDDEN)] * BLOCKS)
        hidden = replica.reduce == "hidden"
        backward(program, saved, recompute=replica.recompute, bucket=(lambda: bucket) if hidden else None)
        if replica.reduce == "exposed":
            program.add(whole)
        program.add(Wait(), *replica.before_optimizer, optimizer(OPTIMIZER_NS))

    programs = tuple(RankProgram(rank, tuple(program.instructions)) for rank, program in written(world_size, write))
    tokens = sum(replica.tokens(rank) for rank in range(world_size))
    facts = run_facts(params, tokens, world_size, recompute="full" if replica.recompute else "none")
    return Job(programs, (group,) if world_size > 1 else (), facts, planted)


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
    return data_parallel(4, replica, planted)


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


# Pipelines

UNIT_NS = 1_000_000


@dataclass(frozen=True)
class UnitPipeline:
    """A pipeline in which work is measured in units of 1 ms: a forward takes one, a backward two, before scaling."""

    stages: int = 4
    microbatches: int = 8
    scale: Callable[[int, int], float] = lambda _stage, _microbatch: 1.0
    pauses: Mapping[tuple[int, int], int] = field(
        default_factory=dict
    )  # (stage, micro-batch) -> host pause before its forward
    transfer_ns: int = 0


def unit_block(scale: float) -> Block:
    """Return one matmul and one activation that take a unit forward and two backward."""
    small_ns = 100_000
    mm_ns, width = round(scale * UNIT_NS) - small_ns, 2 * HIDDEN
    mm = matmul(TOKENS, width, width, duration_ns=mm_ns)
    grads = tuple(
        matmul(*shape, layout=layout, duration_ns=mm_ns)
        for shape, layout in (((TOKENS, width, width), "nn"), ((width, TOKENS, width), "nt"))
    )
    gelu = memory_bound("aten::gelu", (TOKENS, width), tensors=2, duration_ns=small_ns)
    gelu_backward = memory_bound("aten::gelu_backward", (TOKENS, width), tensors=3, duration_ns=2 * small_ns)
    return (Layer(mm, "MmBackward0", grads), Layer(gelu, "GeluBackward0", (gelu_backward,)))


def unit_pipeline(shape: UnitPipeline) -> Job:
    """Return a 1F1B run of one rank a stage, closed by the all-reduce of the gradient norm."""
    everyone = default_group(shape.stages, pipelined=True)
    column = Group("1", "mesh_pp", "pp", everyone.ranks, DP_STREAM, crosses_stages=True)

    def write(program: Program, stage: int, step: int) -> None:
        seat = Seat(stage, column, TOKENS * HIDDEN, shape.transfer_ns)
        program.add(zero_grad())
        pipeline_pass(
            program,
            seat,
            shape.microbatches,
            lambda microbatch: [unit_block(shape.scale(stage, microbatch))],
            before_forward=lambda microbatch: [
                Pause("data_loader", gap) for gap in [shape.pauses.get((stage, microbatch))] if gap
            ],
        )
        program.add(Collective(everyone, "all_reduce", 1, 20_000), Wait(), optimizer(OPTIMIZER_NS))

    written_programs = written(shape.stages, write)
    programs = tuple(RankProgram(rank, tuple(program.instructions), rank) for rank, program in written_programs)
    params, tokens = shape.stages * (2 * HIDDEN) ** 2, shape.microbatches * TOKENS
    parallel = {"pp": shape.stages, "tp": 1, "dp": 1, "cp": 1, "ep": 1}
    facts = run_facts(
        params, tokens, shape.stages, layers=shape.stages, parallel=parallel, microbatches=shape.microbatches
    )
    return Job(programs, (everyone, column), facts)


def pipeline_1f1b() -> Job:
    """Return the balanced golden case: a step of 33 units, 9 of them waits on every rank."""
    return unit_pipeline(UnitPipeline())


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
    everyone = default_group(world_size, pipelined=True)
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
        seat = Seat(stage, columns[rank % replicas], tokens * hidden, transfer_ns(tokens * hidden))
        if gap := LOADER_STALLS.get((step, rank)):
            program.add(Pause("data_loader", gap))
        program.add(zero_grad(), Collective(shards[stage], "all_gather", stage_params, sharded_ns), Wait())
        pipeline_pass(program, seat, microbatches, lambda _: [block] * blocks, recompute=True)
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
        parallel={"pp": stages, "tp": 1, "dp": replicas, "cp": 1, "ep": 1},
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
    return Job(programs, (everyone, *shards, *columns), facts, planted)


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("compute_only", "one rank that computes and never waits", compute_only),
        Scenario("exposed_allreduce", "four ranks that reduce their gradients after the backward", exposed_allreduce),
        Scenario("hidden_allreduce", "four ranks that reduce their gradients under the backward", hidden_allreduce),
        Scenario("late_rank", "four ranks, three of which wait for one with more tokens", late_rank),
        Scenario("loader_stall", "one rank whose data loader is late", loader_stall),
        Scenario("host_pauses", "one rank whose host allocates memory and reads the loss", host_pauses),
        Scenario("launch_bound", "one rank whose kernels are shorter than their launches", launch_bound),
        Scenario("recompute", "two ranks that recompute every block", recompute),
        Scenario("pipeline_1f1b", "four pipeline stages, eight micro-batches, nothing but the bubble", pipeline_1f1b),
        Scenario("run_28_mfu", "eight ranks at 28 % MFU: two stages by four replicas, all losses at once", run_28_mfu),
    )
}
