"""Pipelines whose work is measured in units, so that theory says how long each rank waits, and why."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from traceaudit.simulate.job import Collective, Fault, Group, Instruction, Job, Pause, RankProgram, Task, Wait
from traceaudit.simulate.kernels import matmul, memory_bound
from traceaudit.simulate.orders import ORDERS
from traceaudit.simulate.replicas import (
    DP_STREAM,
    HIDDEN,
    OPTIMIZER_NS,
    TOKENS,
    default_group,
    parallel,
    run_facts,
    written,
)
from traceaudit.simulate.workload import (
    Block,
    Layer,
    Program,
    Seat,
    optimizer,
    pipeline_pass,
    transfer_ns,
    zero_grad,
)

UNIT_NS = 1_000_000
WIDTH = 2 * HIDDEN  # of the layer that takes a unit


@dataclass(frozen=True)
class UnitPipeline:
    """A pipeline in which a forward of a stage takes a unit and a backward two, one for each half.

    A factor of a stage is more weights and one of a micro-batch more tokens, so the kernels have other shapes; `scale`
    stretches the same kernels. Stages are counted over the chunks, ranks by stage, then by replica. Without `metadata`
    messages look like Megatron's.
    """

    stages: int = 4  # of a rank each, but for the chunks
    microbatches: int = 8
    schedule: str = "1f1b"  # a key of `ORDERS`
    virtual_stages: int = 1
    replicas: int = 1
    annotated: bool | None = None  # None: as PyTorch does, where a rank has several stages or a backward two halves
    metadata: bool = True
    unit_ns: int = UNIT_NS
    stage_scale: Mapping[int, float] = field(default_factory=dict)
    microbatch_scale: Mapping[int, float] = field(default_factory=dict)
    scale: Callable[[int, int], float] = lambda _stage, _microbatch: 1.0
    slowness_permille: Mapping[int, int] = field(default_factory=dict)  # by rank
    pauses: Mapping[tuple[int, Task], int] = field(default_factory=dict)  # of the host, before a task of a rank
    transfer_ns: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stages * self.replicas

    @property
    def annotates(self) -> bool:
        """Whether rows name the tasks."""
        return self.schedule in ("interleaved", "zero_bubble") if self.annotated is None else self.annotated

    def stages_of(self, position: int) -> range:
        """Return the stages that a rank holds."""
        return range(position, self.stages * self.virtual_stages, self.stages)

    def width(self, stage: int) -> int:
        """Return the outputs of the stage's layer."""
        return round(WIDTH * self.unit_ns / UNIT_NS * self.stage_scale.get(stage, 1))

    def tokens(self, microbatch: int) -> int:
        """Return the tokens of a micro-batch."""
        return round(TOKENS * self.microbatch_scale.get(microbatch, 1))

    def params(self, stages: Sequence[int]) -> int:
        """Return the weights of stages."""
        return sum(WIDTH * self.width(stage) for stage in stages)

    def block(self, task: Task) -> Block:
        """Return one matmul and one activation, which take 0.9 and 0.1 units."""
        stage, microbatch = task.stage, task.microbatch
        work = self.stage_scale.get(stage, 1) * self.microbatch_scale.get(microbatch, 1) * self.scale(stage, microbatch)
        tenth_ns = round(work * self.unit_ns / 10_000) * 1_000
        tokens, width = self.tokens(microbatch), self.width(stage)
        mm = matmul(tokens, WIDTH, width, duration_ns=9 * tenth_ns)
        inputs = matmul(tokens, width, WIDTH, layout="nn", duration_ns=9 * tenth_ns)
        weights = matmul(WIDTH, tokens, width, layout="nt", duration_ns=10 * tenth_ns)
        gelu = memory_bound("aten::gelu", (tokens, width), tensors=2, duration_ns=tenth_ns)
        gelu_backward = memory_bound("aten::gelu_backward", (tokens, width), tensors=3, duration_ns=tenth_ns)
        return (
            Layer(mm, "MmBackward0", (inputs,), (weights,)),
            Layer(gelu, "GeluBackward0", (gelu_backward,)),
        )


def whole_pipeline(world_size: int) -> Group:
    """Return the group of all ranks of a pipeline."""
    return replace(default_group(world_size, alone=False), crosses_stages=True)


def stage_groups(shape: UnitPipeline) -> tuple[list[Group], list[Group]]:
    """Return the pipelines of the replicas, and the replicas of each stage; a replica alone has none of these."""
    rows = [tuple(range(first, first + shape.replicas)) for first in range(0, shape.world_size, shape.replicas)]
    pp, dp = ("mesh_pp", "mesh_dp") if shape.metadata else ("PIPELINE_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP")
    columns = [
        Group(str(1 + i), pp, "pp", column, DP_STREAM, crosses_stages=True, coalesced=not shape.metadata)
        for i, column in enumerate(zip(*rows, strict=True))
    ]
    shards = [Group(str(1 + shape.replicas + i), dp, "dp", row, DP_STREAM) for i, row in enumerate(rows)]
    return columns, shards if shape.replicas > 1 else []


def unit_pipeline(shape: UnitPipeline) -> Job:
    """Return the run: its gradients are reduced over the replicas of a stage, their norm over all ranks."""
    everyone = whole_pipeline(shape.world_size)
    columns, shards = stage_groups(shape)

    def write(program: Program, rank: int, _step: int) -> None:
        def before(task: Task) -> Sequence[Instruction]:
            gap_ns = shape.pauses.get((rank, task))
            return [Pause("data_loader", gap_ns)] if gap_ns else []

        position, replica = divmod(rank, shape.replicas)
        order = ORDERS[shape.schedule](position, shape.stages, shape.microbatches, shape.virtual_stages)
        seat = Seat(position, columns[replica], elements, shape.transfer_ns, shape.virtual_stages)
        program.add(zero_grad())
        blocks = {task: [shape.block(task)] for task in order}
        pipeline_pass(program, seat, order, blocks.__getitem__, annotated=shape.annotates, before=before)
        if shards:
            gradients = shape.params(shape.stages_of(position))
            program.add(Collective(shards[position], "all_reduce", gradients, transfer_ns(gradients)), Wait())
        program.add(Collective(everyone, "all_reduce", 1, 20_000), Wait(), optimizer(OPTIMIZER_NS))

    def elements(microbatch: int) -> int:
        return shape.tokens(microbatch) * HIDDEN

    programs = tuple(
        RankProgram(rank, tuple(program.instructions), rank // shape.replicas, shape.slowness_permille.get(rank, 1_000))
        for rank, program in written(shape.world_size, write)
    )
    stages = range(shape.stages * shape.virtual_stages)
    facts = run_facts(
        shape.params(stages),
        shape.replicas * sum(shape.tokens(microbatch) for microbatch in range(shape.microbatches)),
        shape.world_size,
        layers=len(stages),
        parallel=parallel(pp=shape.stages, dp=shape.replicas),
        microbatches=shape.microbatches,
        virtual_stages=shape.virtual_stages,
    )
    return Job(programs, (everyone, *columns, *shards), facts)


# The scenarios


def pipeline_1f1b() -> Job:
    """Return the balanced golden case: a step of 33 units, 9 of them waits on every rank."""
    return unit_pipeline(UnitPipeline())


def pipeline_gpipe() -> Job:
    """Return the same work with all forwards before all backwards, which takes as long."""
    return unit_pipeline(UnitPipeline(schedule="gpipe"))


def pipeline_interleaved() -> Job:
    """Return the same work with two half stages a rank, which halves the waits."""
    return unit_pipeline(UnitPipeline(schedule="interleaved", virtual_stages=2, unit_ns=UNIT_NS // 2))


def pipeline_zero_bubble() -> Job:
    """Return the same work with each backward split in two halves, which leaves a third of the waits."""
    return unit_pipeline(UnitPipeline(schedule="zero_bubble"))


def pipeline_heavy_stage() -> Job:
    """Return a run whose last stage has half as many weights again as each of the others."""
    job = unit_pipeline(UnitPipeline(stage_scale={3: 1.5}))
    return replace(job, planted=({"kind": "heavy_stage", "stage": 3, "permille": 1_500},))


def pipeline_heavy_microbatch() -> Job:
    """Return a run one of whose micro-batches has three times the tokens of the others."""
    job = unit_pipeline(UnitPipeline(microbatch_scale={4: 3}))
    return replace(job, planted=({"kind": "heavy_microbatch", "microbatch": 4, "permille": 3_000},))


def pipeline_host_pause() -> Job:
    """Return a run in which one rank's data loader is late in the middle of every step."""
    rank, task, gap_ns = 2, Task(2, "F", 5), 3 * UNIT_NS
    job = unit_pipeline(UnitPipeline(pauses={(rank, task): gap_ns}))
    planted = {"kind": "host_pause", "rank": rank, "task": str(task), "gap_ns": gap_ns}
    return replace(job, planted=(planted,), fault=Fault("host_pause", (rank,), "host_gap/data_loader"))


def pipeline_transfer() -> Job:
    """Return a run whose messages take a tenth of a unit."""
    job = unit_pipeline(UnitPipeline(transfer_ns=UNIT_NS // 10))
    return replace(job, planted=({"kind": "transfer", "dimension": "pp", "ns": UNIT_NS // 10},))


def pipeline_slow_rank() -> Job:
    """Return two pipelines, one of which has a slow GPU in its second stage."""
    slow, permille = 3, 1_300
    job = unit_pipeline(UnitPipeline(replicas=2, slowness_permille={slow: permille}))
    planted = {"kind": "slow_gpu", "rank": slow, "slowness_permille": permille}
    return replace(job, planted=(planted,), fault=Fault("slow_gpu", (slow,), "straggler/slow_gpu"))


def pipeline_coalesced() -> Job:
    """Return the balanced case with messages that say nothing about themselves."""
    return unit_pipeline(UnitPipeline(metadata=False))
