"""Programs of ranks: transformer blocks forward and backward, and the 1F1B schedule around them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from traceaudit.simulate.job import Collective, Group, Instruction, Node, Op, Ops, Recv, Send
from traceaudit.simulate.kernels import PEAK_FLOP_PER_S, SM_COUNT, kernel_ns, matmul, memory_bound, micros, opaque

ATTENTION_PERMILLE = 450  # of the peak that attention reaches
LINK_BYTES_PER_S = 300_000_000_000


@dataclass(frozen=True)
class Layer:
    """A forward operator, the name of its backward node and what that runs."""

    forward: Op
    node: str
    backward: tuple[Op, ...]


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
    backward = (matmul(tokens, outputs, inputs, layout="nn"), matmul(inputs, tokens, outputs, layout="nt"))
    node = "AddmmBackward0" if bias else "MmBackward0"
    return Layer(matmul(tokens, inputs, outputs, bias=bias), node, backward)


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
    program: Program, saved: Saved, *, recompute: bool = False, bucket: Callable[[], Collective] | None = None
) -> None:
    """Run blocks backward, last first.

    With `recompute` each block is a checkpoint, whose forward runs again in its first node. A `bucket` of gradients
    is launched in the middle of each block.
    """
    for block, sequences in reversed(saved):
        recomputed = numbered(program, block) if recompute else ()
        for index, (layer, sequence) in enumerate(reversed(list(zip(block, sequences, strict=True)))):
            program.add(Node(layer.node, sequence, layer.backward, recomputed if index == 0 else ()))
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
    """A rank's place in the pipeline: `peers` are the ranks of its column, by stage."""

    stage: int
    group: Group
    elements: int = 0
    transfer_ns: int = 0

    @property
    def previous(self) -> int | None:
        """Rank of the stage before."""
        return self.group.ranks[self.stage - 1] if self.stage else None

    @property
    def following(self) -> int | None:
        """Rank of the stage after."""
        return self.group.ranks[self.stage + 1] if self.stage + 1 < len(self.group.ranks) else None


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the order of forward (F) and backward (B) work of a stage.

    >>> one_f_one_b(0, 2, 3)
    [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", index) for index in range(ahead)]
    for index in range(microbatches - ahead):
        order += [("F", index + ahead), ("B", index)]
    return order + [("B", index) for index in range(microbatches - ahead, microbatches)]


def pipeline_pass(
    program: Program,
    seat: Seat,
    microbatches: int,
    blocks: Callable[[int], Sequence[Block]],
    *,
    recompute: bool = False,
    before_forward: Callable[[int], Sequence[Instruction]] = lambda _: (),
) -> None:
    """Run all micro-batches of a step in 1F1B order; `before_forward` adds work between a receive and its forward."""
    saved: dict[int, Saved] = {}
    for kind, index in one_f_one_b(seat.stage, len(seat.group.ranks), microbatches):
        source, target = (seat.previous, seat.following) if kind == "F" else (seat.following, seat.previous)
        if source is not None:
            program.add(Recv(seat.group, source, seat.elements))
        if kind == "F":
            program.add(*before_forward(index))
            saved[index] = forward(program, blocks(index))
        else:
            backward(program, saved.pop(index), recompute=recompute)
        if target is not None:
            program.add(Send(seat.group, target, seat.elements, seat.transfer_ns))
