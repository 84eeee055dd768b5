"""What a simulated training job is made of: ranks, and for each a program of instructions in host order.

All times are integer nanoseconds. The scenarios keep every one a multiple of 1,000, so that the old layouts, whose
timestamps are whole microseconds, hold the same job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceaudit.simulate.rank import Rank

# The leaf of a wait by what holds up the rank waited for (attribution rules 3.2 and 5).
WAITS = {
    "slow_gpu": "straggler/late_rank",
    "more_work": "straggler/data_imbalance",
    "host_pause": "straggler/host_caused",
    "slow_link": "straggler/slow_link",
}


@dataclass(frozen=True)
class Kernel:
    """A compute kernel: its family is the row of the truth in which its time is booked."""

    name: str
    family: str
    duration_ns: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass(frozen=True)
class Op:
    """A host operator that launches one kernel.

    `flops` are those its shapes tell (0: not counted). `sequence` is the autograd number of a forward operator, None
    for the operators inside a backward node.
    """

    name: str
    kernel: Kernel
    dims: tuple[tuple[int, ...], ...] | None = None
    types: tuple[str, ...] = ()
    flops: int = 0
    sequence: int | None = None


@dataclass(frozen=True)
class Task:
    """What a stage of a pipeline does for one micro-batch; stages are counted over the chunks of all ranks.

    The kind is a forward (F), a backward (B), or a half of one: the gradient of the input (I) or of the weights (W).
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """Return it as torch.distributed.pipelining writes it: `2F0`."""
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Group:
    """A process group; `dimension` names its transfers in the truth, `crosses_stages` sends its waits to the bubble.

    The messages of a `coalesced` group are launched where the batch ends, so that nothing says what they are.
    """

    name: str
    description: str
    dimension: str
    ranks: tuple[int, ...]
    stream: int
    crosses_stages: bool = False
    coalesced: bool = False


@dataclass(frozen=True)
class Step:
    """Begin `ProfilerStep#number`, which ends the one before.

    A `cut` step was under way when the profiler started: what runs in it is recorded, but it has no row and no truth.
    """

    number: int
    cut: bool = False


@dataclass(frozen=True)
class StartProfiler:
    """Start the rank's profiler, later than those of the others: what it did so far is not in its trace."""


@dataclass(frozen=True)
class Ops:
    """Run operators one after the other on the main thread, under a user annotation if one is named."""

    ops: tuple[Op, ...]
    annotation: str = ""


@dataclass(frozen=True)
class Node:
    """Run a backward node on the autograd thread; `recomputed` are forward operators of a checkpoint, run first."""

    name: str
    sequence: int
    ops: tuple[Op, ...]
    recomputed: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Collective:
    """Launch a collective; `elements` is the size of the whole (unsharded) message in bf16."""

    group: Group
    kind: str
    elements: int
    transfer_ns: int
    from_autograd: bool = False


@dataclass(frozen=True)
class Wait:
    """Let the compute stream wait for every collective launched so far."""


@dataclass(frozen=True)
class Send:
    """Send what a task made to a peer; the transfer starts at once and does not hold up the compute that follows."""

    group: Group
    peer: int
    elements: int
    transfer_ns: int
    of: Task | None = None


@dataclass(frozen=True)
class Recv:
    """Receive what a task of a peer made; the compute that follows waits for the data."""

    group: Group
    peer: int
    elements: int
    of: Task | None = None


@dataclass(frozen=True)
class Pause:
    """Occupy the host (a row of `compute.PAUSES`) so that the GPU idles `gap_ns` before the operator that follows.

    With `host_ns` instead the host is occupied that long, and the GPU idles only once it has run dry.
    """

    cause: str
    gap_ns: int = 0
    host_ns: int = 0


@dataclass(frozen=True)
class Act:
    """Do something of a scenario's own: `run` is called with the rank and lays down rows and books."""

    run: Callable[["Rank"], None]


@dataclass(frozen=True)
class Enter:
    """Begin what belongs together until `Leave`: work of a task, if one is named; under an annotation, if named."""

    task: Task | None = None
    annotation: str = ""


@dataclass(frozen=True)
class Leave:
    """End what was entered last."""


Instruction = Step | StartProfiler | Ops | Node | Collective | Wait | Send | Recv | Pause | Act | Enter | Leave


@dataclass(frozen=True)
class Pace:
    """How long the host takes; an operator is its head, the launch call and its tail."""

    op_head_ns: int = 2_000
    launch_ns: int = 4_000
    op_tail_ns: int = 1_000
    node_edge_ns: int = 1_000  # entering or leaving each of the two rows of an autograd node
    collective_head_ns: int = 8_000
    launch_latency_ns: int = 6_000  # end of the launch call to the start of the kernel on an idle GPU
    resume_ns: int = 2_000  # end of a collective to the start of the compute that waited for it


@dataclass(frozen=True)
class Clock:
    """The error of a host's clock: what it shows is true time + offset + drift."""

    offset_ns: int = 0
    drift_ppb: int = 0  # nanoseconds a second

    def shown(self, true_ns: int) -> int:
        """Return what the clock shows at a true instant, counted like it from the start of the run."""
        return true_ns + self.offset_ns + true_ns * self.drift_ppb // 1_000_000_000


@dataclass(frozen=True)
class RankProgram:
    """What one rank does, in host order; `slowness_permille` stretches its kernels except the optimizer's.

    To be the slow GPU of the definitions, it is more than 5 % slower than others that run the same kernels.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    stage: int = 0
    slowness_permille: int = 1_000


@dataclass(frozen=True)
class Fault:
    """The one thing wrong with a run: every wait for a late rank is its doing.

    `ranks` are the culprits. Their own excess over the other ranks, or their pause, is booked under `own_leaf` (a
    leaf or a whole bucket). `together` says that the fault is one that they share, such as a link.
    """

    cause: str  # a key of WAITS
    ranks: tuple[int, ...]
    own_leaf: str
    together: bool = False


@dataclass(frozen=True)
class Job:
    """A whole run: programs of all ranks, the facts of `run.json` and the facts planted for the truth.

    With `mixed_waits` several faults make ranks wait, and the truth does not say which wait is whose, nor divides
    those of a pipeline. A `lean` run's files hold what the attribution rests on and nothing else.
    """

    programs: tuple[RankProgram, ...]
    groups: tuple[Group, ...]
    run: Mapping[str, Any]
    planted: tuple[Mapping[str, Any], ...] = ()
    pace: Pace = field(default_factory=Pace)
    clocks: Mapping[int, Clock] = field(default_factory=dict)  # by host
    lost_ranks: frozenset[int] = frozenset()  # their files are not written
    sequence_numbers: bool = True  # whether collectives carry `Seq`
    gpus_per_host: int = 8
    fault: Fault | None = None
    mixed_waits: bool = False
    lean: bool = False
    lost_calls: Callable[[int], bool] | None = None  # which launch calls' records are lost, by correlation id

    @property
    def world_size(self) -> int:
        """Number of ranks, traced or not."""
        return len(self.programs)

    @property
    def pipelined(self) -> bool:
        """Whether there is more than one pipeline stage."""
        return len({program.stage for program in self.programs}) > 1

    @property
    def hosts(self) -> int:
        """Number of machines."""
        return self.host(self.world_size - 1) + 1

    @property
    def waiting_leaf(self) -> str:
        """The leaf of a wait for a late rank."""
        if self.mixed_waits:
            return WAITS["slow_gpu"]
        return WAITS[self.fault.cause] if self.fault else "straggler/jitter"

    def host(self, rank: int) -> int:
        """Return the number of the machine a rank runs on."""
        return rank // self.gpus_per_host

    def host_name(self, rank: int) -> str:
        """Return the name of the machine a rank runs on."""
        return f"host{self.host(rank)}"

    def clock(self, rank: int) -> Clock:
        """Return the clock of the rank's host."""
        return self.clocks.get(self.host(rank), Clock())
