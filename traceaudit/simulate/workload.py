"""Programs of ranks: transformer blocks forward and backward, and the passes of a pipeline around them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from traceaudit.simulate.job import (
    Collective,
    Enter,
    Group,
    Instruction,
    Leave,
    Node,
    Op,
    Ops,
    Recv,
    Send,
    Task,
)
from traceaudit.simulate.kernels import PEAK_FLOP_PER_S, SM_COUNT, kernel_ns, matmul, memory_bound, micros, opaque

ATTENTION_PERMILLE = 450  # of the peak that attention reaches
LINK_BYTES_PER_S = 300_000_000_000


@dataclass(frozen=True)
class Layer:
    """A forward operator, the name of its backward node and what that runs for its input, then for its weights."""

    forward: Op
    node: str
    backward: tuple[Op, ...]
    weights: tuple[Op, ...] = ()

    def part(self, kind: str) -> tuple[Op, ...]:
        """Return what a whole backward runs (B), or one for the input (I) or the weights (W) alone."""
        return {"B": (*self.backward, *self.weights), "I": self.backward, "W": self.weights}[kind]


Block = tuple[Layer, ...]
Saved = list[tuple[Block, list[int]]]  # blocks that ran forward, with the sequence numbers of their operators


@dataclass
class Program:
    """A rank's program while it is written."""

    instructions: list[Instruction] = field(default_factory=list)
    sequence: Iterator[int] = field(default_factory=lambda: count(1_001))

    def add(self, *instructions: Instruction) -> None:
        """Append instructions."""
        self.instructions.extend(instructions)


def linear(tokens: int, inputs: int, outputs: int, *, bias: bool = False) -> Layer:
    """Return a linear layer, whose backward takes two matmuls of the same FLOPs."""
    backward, weights = matmul(tokens, outputs, inputs, layout="nn"), matmul(inputs, tokens, outputs, layout="nt")
    node = "AddmmBackward0" if bias else "MmBackward0"
    return Layer(matmul(tokens, inputs, outputs, bias=bias), node, (backward,), (weights,))


def norm(tokens: int, hidden: int) -> Layer:
    """Return a layer norm."""
    backward = memory_bound("aten::native_layer_norm_backward", (tokens, hidden), tensors=3)
    forward = memory_bound("aten::native_layer_norm", (tokens, hidden), tensors=2)
    return Layer(forward, "NativeLayerNormBackward0", (backward,))


def attention(tokens: int, hidden: int) -> Layer:
    """Return causal attention over one sequence; the backward takes 2.5 times the forward.

    Without shapes the grid alone tells longer sequences from slower kernels; at 4,096 tokens it fills the GPU once.
    """
    grid = (-(-tokens * SM_COUNT // 4_096), 1, 1)
    duration_ns = kernel_ns(2 * tokens * tokens * hidden, PEAK_FLOP_PER_S, ATTENTION_PERMILLE)
    backward_ns = duration_ns * 5 // 2_000 * 1_000
    backward = opaque("fused_attention::backward", backward_ns, grid)
    return Layer(opaque("fused_attention::forward", duration_ns, grid), "FusedAttentionBackward", (backward,))


def gelu(tokens: int, width: int) -> Layer:
    """Return the activation between the two halves of the feed-forward part."""
    backward = memory_bound("aten::gelu_backward", (tokens, width), tensors=3)
    return Layer(memory_bound("aten::gelu", (tokens, width), tensors=2), "GeluBackward0", (backward,))


def transformer_block(tokens: int, hidden: int) -> Block:
    """Return a block of 12·hidden² weights for one micro-batch."""
    return (
        norm(tokens, hidden),
        linear(tokens, hidden, 3 * hidden),
        attention(tokens, hidden),
        linear(tokens, hidden, hidden),
        norm(tokens, hidden),
        linear(tokens, hidden, 4 * hidden),
        gelu(tokens, 4 * hidden),
        linear(tokens, 4 * hidden, hidden, bias=True),
    )


def block_params(hidden: int) -> int:
    """Return the weights of a block that take part in matmuls."""
    return 12 * hidden**2


def numbered(program: Program, block: Block) -> tuple[Op, ...]:
    """Return the block's forward operators with the next sequence numbers."""
    return tuple(replace(layer.forward, sequence=next(program.sequence)) for layer in block)


def forward(program: Program, blocks: Sequence[Block]) -> Saved:
    """Run blocks forward; returns what their backward needs."""
    saved: Saved = []
    for block in blocks:
        ops = numbered(program, block)
        program.add(Ops(ops))
        saved.append((block, [op.sequence or 0 for op in ops]))
    return saved


def backward(
    program: Program,
    saved: Saved,
    *,
    kind: str = "B",
    recompute: bool = False,
    bucket: Callable[[], Collective] | None = None,
) -> None:
    """Run blocks backward, last first: all of it (B), or what is for the input (I) or the weights (W).

    With `recompute` each block is a checkpoint, whose forward runs again in its first node. A `bucket` of gradients
    is launched in the middle of each block.
    """
    for block, sequences in reversed(saved):
        recomputed = numbered(program, block) if recompute and kind != "W" else ()
        for index, (layer, sequence) in enumerate(reversed(list(zip(block, sequences, strict=True)))):
            if ops := layer.part(kind):
                program.add(Node(layer.node, sequence, ops, recomputed if index == 0 else ()))
            if bucket is not None and index == len(block) // 2:
                program.add(bucket())


def zero_grad(duration_ns: int = 50_000) -> Ops:
    """Return the clearing of gradients, long enough for the host to get ahead."""
    return Ops((opaque("aten::_foreach_zero_", duration_ns),), "Optimizer.zero_grad#AdamW.zero_grad")


def optimizer(duration_ns: int) -> Ops:
    """Return the optimizer's step."""
    return Ops((opaque("aten::_fused_adamw_", duration_ns),), "Optimizer.step#AdamW.step")


def transfer_ns(elements: int) -> int:
    """Return how long a bf16 message takes on the links, in whole microseconds."""
    return micros(2 * elements, LINK_BYTES_PER_S)


# The pipeline


@dataclass(frozen=True)
class Seat:
    """A rank's place in a pipeline of which `group` has the ranks in order; each holds as many stages as chunks."""

    position: int
    group: Group
    elements: Callable[[int], int] = lambda _: 0  # of the messages of a micro-batch
    transfer_ns: int = 0
    chunks: int = 1

    def peer(self, stage: int) -> int | None:
        """Return the rank that holds a stage; None if there is no such stage."""
        ranks = self.group.ranks
        return ranks[stage % len(ranks)] if 0 <= stage < len(ranks) * self.chunks else None


def pipeline_pass(
    program: Program,
    seat: Seat,
    order: Sequence[Task],
    blocks: Callable[[Task], Sequence[Block]],
    *,
    recompute: bool = False,
    annotated: bool = False,
    before: Callable[[Task], Sequence[Instruction]] = lambda _: (),
) -> None:
    """Run all micro-batches of a step in an order; `before` adds what comes between a receive and its task.

    Where it is `annotated`, rows name each task and message as the multi-stage schedules of PyTorch do.
    """
    saved: dict[tuple[int, int], Saved] = {}
    for task in order:
        model = (task.stage, task.microbatch)
        onward = 1 if task.kind == "F" else -1
        if task.kind != "W":
            program.add(*receive(seat, task, task.stage - onward, annotated=annotated))
        program.add(*before(task), Enter(task, f"PP:{task}" if annotated else ""))
        if task.kind == "F":
            saved[model] = forward(program, blocks(task))
        else:
            backward(program, saved[model], kind=task.kind, recompute=recompute)
        program.add(Leave())
        if task.kind != "W":
            program.add(*send(seat, task, task.stage + onward, annotated=annotated))


def receive(seat: Seat, task: Task, source: int, *, annotated: bool) -> list[Instruction]:
    """Return how a rank gets what a task needs, if another stage makes it."""
    peer = seat.peer(source)
    if peer is None:
        return []
    message = Recv(seat.group, peer, seat.elements(task.microbatch), replace(task, stage=source))
    return [Enter(annotation=message_name("RECV", task)), message, Leave()] if annotated else [message]


def send(seat: Seat, task: Task, target: int, *, annotated: bool) -> list[Instruction]:
    """Return how a rank passes on what a task made, if another stage needs it."""
    peer = seat.peer(target)
    if peer is None:
        return []
    message = Send(seat.group, peer, seat.elements(task.microbatch), seat.transfer_ns, task)
    return [Enter(annotation=message_name("SEND", task)), message, Leave()] if annotated else [message]


def message_name(verb: str, task: Task) -> str:
    """Return the annotation of a message.

    >>> message_name("RECV", Task(2, "I", 5))
    'PP:2RECV_B5'
    """
    return f"PP:{task.stage}{verb}_{'F' if task.kind == 'F' else 'B'}{task.microbatch}"
