"""Data-parallel runs, and what runs of all kinds have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceaudit.simulate.job import Collective, Group, Instruction, Job, RankProgram, Step, Wait
from traceaudit.simulate.kernels import GPU
from traceaudit.simulate.workload import (
    Program,
    backward,
    block_params,
    forward,
    optimizer,
    transfer_ns,
    transformer_block,
    zero_grad,
)

STEPS = (3, 4, 5)
TOKENS, HIDDEN, BLOCKS = 4_096, 4_096, 4  # of a rank's micro-batch and model in the small runs
OPTIMIZER_NS = 1_500_000
DP_STREAM, WORLD_STREAM = 20, 32
SMALL_ELEMENTS, SMALL_NS = 2, 20_000  # of the all-reduce of a scalar


def written(
    world_size: int,
    write: Callable[[Program, int, int], None],
    *,
    before: Callable[[Program, int], None] = lambda _program, _rank: None,
) -> list[tuple[int, Program]]:
    """Return the program of each rank: what is `before` the steps, then `write` adds one step of a rank at a time."""
    programs = [(rank, Program()) for rank in range(world_size)]
    for rank, program in programs:
        before(program, rank)
        for step in STEPS:
            program.add(Step(step))
            write(program, rank, step)
    return programs


def rank_programs(
    programs: Sequence[tuple[int, Program]], slowness_permille: Mapping[int, int]
) -> tuple[RankProgram, ...]:
    """Return what the ranks of a run without a pipeline do; ranks that are not named are not slow."""
    return tuple(
        RankProgram(rank, tuple(program.instructions), slowness_permille=slowness_permille.get(rank, 1_000))
        for rank, program in programs
    )


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
        "parallel": parallel(dp=world_size),
        "microbatches": 1,
        "virtual_stages": 1,
        "recompute": "none",
        "tokens_per_second": None,
        **facts,
    }


def parallel(*, pp: int = 1, tp: int = 1, dp: int = 1) -> dict[str, int]:
    """Return the degrees of parallelism as `run.json` names them."""
    return {"pp": pp, "tp": tp, "dp": dp, "cp": 1, "ep": 1}


def default_group(world_size: int, *, alone: bool = True) -> Group:
    """Return the group of all ranks, which is data parallel where it is `alone`."""
    dimension, stream = ("dp", DP_STREAM) if alone else ("other_comm", WORLD_STREAM)
    return Group("0", "default_pg", dimension, tuple(range(world_size)), stream)


def scalar(group: Group) -> Collective:
    """Return the all-reduce of a number, such as the loss or the norm of the gradients."""
    return Collective(group, "all_reduce", SMALL_ELEMENTS, SMALL_NS)


@dataclass(frozen=True)
class Replica:
    """How the ranks of a data-parallel run spend a step."""

    tokens: Callable[[int], int] = lambda _: TOKENS
    hidden: int = HIDDEN
    blocks: int = BLOCKS
    groups: int = 1  # of equal size, which reduce their gradients apart
    recompute: bool = False
    reduce: str = ""  # "", "exposed" or "hidden"
    scalars: bool = False  # reduce the loss and the norm of the gradients, too
    before_forward: Callable[[int], Sequence[Instruction]] = lambda _: ()  # by step
    in_forward: Callable[[int, int], Sequence[Instruction]] = lambda _rank, _step: ()  # after the first block
    before_optimizer: Sequence[Instruction] = ()
    slowness_permille: Mapping[int, int] = field(default_factory=dict)  # by rank


def data_parallel(world_size: int, replica: Replica, *planted: Mapping[str, Any]) -> Job:
    """Return a run in which each rank trains the same small model on its own micro-batch."""
    everyone = default_group(world_size, alone=replica.groups == 1)
    apart = separate_groups(world_size, replica.groups)
    groups = apart or (everyone,)
    hidden, one = replica.hidden, block_params(replica.hidden)
    params = replica.blocks * one

    def write(program: Program, rank: int, step: int) -> None:
        group = groups[rank * len(groups) // world_size]
        bucket = Collective(group, "all_reduce", one, transfer_ns(one), from_autograd=True)
        program.add(*replica.before_forward(step), zero_grad())
        block = transformer_block(replica.tokens(rank), hidden)
        saved = forward(program, [block])
        program.add(*replica.in_forward(rank, step))
        saved += forward(program, [block] * (replica.blocks - 1))
        if replica.scalars:
            program.add(scalar(group), Wait())
        under = replica.reduce == "hidden"
        backward(program, saved, recompute=replica.recompute, bucket=(lambda: bucket) if under else None)
        if replica.reduce == "exposed":
            program.add(Collective(group, "all_reduce", params, transfer_ns(params)))
        program.add(Wait())
        if replica.scalars:
            program.add(scalar(group), Wait())
        program.add(*replica.before_optimizer, optimizer(OPTIMIZER_NS))

    programs = rank_programs(written(world_size, write), replica.slowness_permille)
    facts = run_facts(
        params,
        sum(replica.tokens(rank) for rank in range(world_size)),
        world_size,
        layers=replica.blocks,
        hidden=hidden,
        heads=hidden // 128,
        seq_len=min(replica.tokens(rank) for rank in range(world_size)),
        parallel=parallel(dp=world_size // replica.groups),
        recompute="full" if replica.recompute else "none",
    )
    return Job(programs, (everyone, *apart) if world_size > 1 else (), facts, planted)


def separate_groups(world_size: int, count: int) -> tuple[Group, ...]:
    """Return groups of neighbouring ranks; none if they would be one."""
    size = world_size // count
    rows = [tuple(range(index * size, (index + 1) * size)) for index in range(count)] if count > 1 else []
    return tuple(Group(str(1 + index), "mesh_dp", "dp", row, DP_STREAM) for index, row in enumerate(rows))
