"""Divide the waits of a pipeline by reason: its work is run again, each time under conditions closer to the real ones.

Each run books what it makes a rank wait beyond the run before, as far as the real wait is not used up (rules 3.3).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from traceaudit.simulate.job import Group, Task
from traceaudit.simulate.recording import POOL, Booked, Met, Received, Recording, Sent, SimulationError, StepTruth


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a rank without a break; what is no task of the pipeline is a kind by its place in the step."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    ns: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which the rank neither worked nor waited for others: its host was late."""

    ns: int


Item = Work | Gap | Sent | Received | Met


@dataclass(frozen=True)
class Replay:
    """A run under easier conditions: work that is alike takes its mean, hosts and links may cost nothing."""

    leaf: str  # for what it adds to the waits of the run before
    alike: Callable[[Work], tuple[object, ...]]
    gaps: bool = False
    transfers: bool = False


def itself(work: Work) -> tuple[object, ...]:
    """Return what tells the work from all other, so that its mean is its own time."""
    return work.kind, work.stage, work.microbatch, work.rank


REPLAYS = (
    Replay("pipeline_bubble/warmup_drain", lambda work: (work.kind,)),
    Replay("pipeline_bubble/stage_imbalance", lambda work: (work.kind, work.stage)),
    Replay("straggler/data_imbalance", lambda work: (work.kind, work.stage, work.microbatch)),
    Replay("straggler/late_rank", itself),
    Replay("straggler/host_caused", itself, gaps=True),
    Replay("exposed_comm/pp", itself, gaps=True, transfers=True),
)


def divide(recordings: Sequence[Recording]) -> None:
    """Book the waits of each step under their reasons; the last run must wait exactly as long as the real one."""
    for steps in zip(*(recording.steps for recording in recordings), strict=True):
        if len({step.start_ns for step in steps}) > 1:
            raise SimulationError(f"step {steps[0].number}: the ranks of a pipeline must begin together")
        pairs = list(zip(recordings, steps, strict=True))
        lanes = {recording.rank: items(recording, step) for recording, step in pairs}
        waits = [waited(lanes, replay) for replay in REPLAYS]
        for recording, step in pairs:
            share_out(recording.rank, step, [run[recording.rank] for run in waits])


def share_out(rank: int, step: StepTruth, waits: Sequence[int]) -> None:
    """Move a rank's waits from the pool to the leaves of the replays."""
    left_ns = step.leaves.pop(POOL, 0)
    if waits[-1] != left_ns:
        raise SimulationError(f"rank {rank}, step {step.number}: waits {left_ns} ns, in a replay {waits[-1]} ns")
    for replay, before_ns, wait_ns in zip(REPLAYS, [0, *waits], waits, strict=False):
        share_ns = min(left_ns, max(0, wait_ns - before_ns))
        step.leaves[replay.leaf] += share_ns
        left_ns -= share_ns


# The real run as items


def items(recording: Recording, step: StepTruth) -> list[Item]:
    """Return what a rank did in a step in order, without its waits; gaps within a piece of work come before it."""
    found: list[Item] = []
    others, piece = 0, list[Booked]()
    for event in [*step.journal, None]:
        if piece and not (isinstance(event, Booked) and event.task == piece[0].task):
            found.append(Gap(sum(booked.ns for booked in piece if is_gap(booked.leaf))))
            work_ns = sum(booked.ns for booked in piece if not is_gap(booked.leaf))
            if work_ns:
                found.append(work_of(recording, piece[0].task, others, work_ns))
                others += piece[0].task is None
            piece = []
        if isinstance(event, Booked):
            piece += [] if is_wait(event.leaf) else [event]
        elif event is not None:
            found.append(event)
    return found


def work_of(recording: Recording, task: Task | None, others: int, ns: int) -> Work:
    """Return work on a task, or else other work: the clearing of gradients, collectives, the optimizer."""
    if task is None:
        return Work(recording.rank, f"other {others}", recording.stage, 0, ns)
    return Work(recording.rank, task.kind, task.stage, task.microbatch, ns)


def is_wait(leaf: str) -> bool:
    """Whether time under a leaf was waiting for other ranks, which a replay finds by itself."""
    return leaf == POOL or (leaf.startswith("straggler/") and leaf != "straggler/slow_gpu")


def is_gap(leaf: str) -> bool:
    """Whether the rank did nothing for the time under a leaf; a message it sends meanwhile changes nothing."""
    return leaf.startswith("host_gap/") or leaf == "exposed_comm/pp"


# The run again


@dataclass
class Lane:
    """A rank on its way through a replay."""

    todo: deque[Item]
    now_ns: int = 0
    waited_ns: int = 0


@dataclass
class Ties:
    """What the ranks of a replay know of each other."""

    sent: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (from, to, number) -> instant of arrival
    met: defaultdict[tuple[Group, int], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))


def waited(lanes: Mapping[int, Sequence[Item]], replay: Replay) -> dict[int, int]:
    """Return how long each rank waits for messages and collectives across stages."""
    work_ns = means((item for todo in lanes.values() for item in todo if isinstance(item, Work)), replay.alike)
    running, ties = {rank: Lane(deque(todo)) for rank, todo in lanes.items()}, Ties()
    queue = deque(running)
    while queue:
        rank = queue.popleft()
        lane = running[rank]
        while lane.todo and (ready_ns := ready(ties, rank, lane)) is not None:
            item = lane.todo.popleft()
            if not isinstance(item, Met) or item.group.crosses_stages:
                lane.waited_ns += ready_ns - lane.now_ns
            lane.now_ns = ready_ns
            match item:
                case Work():
                    lane.now_ns += work_ns[replay.alike(item)]
                case Gap():
                    lane.now_ns += item.ns if replay.gaps else 0
                case Sent():
                    transfer_ns = item.transfer_ns if replay.transfers else 0
                    ties.sent[rank, item.peer, item.number] = lane.now_ns + transfer_ns
        if lane.todo:
            queue.append(rank)
    return {rank: lane.waited_ns for rank, lane in running.items()}


def ready(ties: Ties, rank: int, lane: Lane) -> int | None:
    """Return when a rank can go on with its next item; None if others must get further first."""
    match lane.todo[0]:
        case Received(peer=peer, number=number):
            arrival_ns = ties.sent.get((peer, rank, number))
            return None if arrival_ns is None else max(lane.now_ns, arrival_ns)
        case Met(group=group, number=number):
            arrivals = ties.met[group, number]
            arrivals[rank] = lane.now_ns
            return max(arrivals.values()) if len(arrivals) == len(group.ranks) else None
    return lane.now_ns


def means(works: Iterable[Work], alike: Callable[[Work], tuple[object, ...]]) -> dict[tuple[object, ...], int]:
    """Return the mean time of work that is alike, rounded down to a nanosecond."""
    times: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for work in works:
        times[alike(work)].append(work.ns)
    return {key: sum(ns) // len(ns) for key, ns in times.items()}
