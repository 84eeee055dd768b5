"""Lay down collectives and messages: when they run on each rank, and who waits for whom."""

from dataclasses import dataclass, field
from typing import Any

from traceaudit.simulate.job import Collective, Group, Job, Recv, Send, Task
from traceaudit.simulate.kernels import kernel_args
from traceaudit.simulate.nccl import BLOCK, COALESCED, GRID, KERNEL_ARGUMENTS, KINDS, collective_args, comms_op_args
from traceaudit.simulate.rank import (
    Launch,
    Rank,
    advance,
    fill_gap,
    gpu_row,
    host_row,
    links,
    runtime_call,
    spend,
    wait_for,
)
from traceaudit.simulate.recording import POOL, Met, Received, Sent, SimulationError, Span

SEND_STREAM, RECV_STREAM = 24, 28  # apart, so that a send in flight does not hold up a receive
SHORTEST_P2P_NS = 5_000


@dataclass
class Meeting:
    """One collective of a group: when each rank's kernel started, and so when it ends for all."""

    size: int
    transfer_ns: int
    starts: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all ranks have launched their kernel."""
        return len(self.starts) == self.size

    @property
    def end_ns(self) -> int:
        """End of all kernels."""
        return max(self.starts.values()) + self.transfer_ns

    def last(self, lost_ranks: frozenset[int]) -> tuple[int, int]:
        """Return when the last kernel started, and of which rank, as far as the traces show."""
        arrivals = ((start_ns, rank) for rank, start_ns in self.starts.items() if rank not in lost_ranks)
        return max(arrivals, default=(0, -1))


@dataclass(frozen=True)
class Part:
    """A rank's part in a collective that its compute has not waited for yet."""

    instruction: Collective
    number: int
    meeting: Meeting
    launch: Launch
    args: dict[str, Any]


@dataclass
class World:
    """What the ranks pass to each other, and the numbers of what they passed."""

    job: Job
    meetings: dict[tuple[Group, int], Meeting] = field(default_factory=dict)
    arrivals: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (from, to, number) -> instant
    messages: dict[tuple[int, int, int], Task | None] = field(default_factory=dict)  # ... -> what made it
    counters: dict[tuple[str, int, object], int] = field(default_factory=dict)  # (what, rank, group or peer)
    parts: dict[int, list[Part]] = field(default_factory=dict)

    def next_number(self, what: str, rank: Rank, other: Group | int) -> int:
        """Return the number of the rank's next collective with a group, or message to or from a peer."""
        return self.counters.get((what, rank.number, other), 0)

    def count(self, what: str, rank: Rank, other: Group | int) -> None:
        """Move on to the next number."""
        self.counters[what, rank.number, other] = self.next_number(what, rank, other) + 1


def launch_communication(
    world: World, rank: Rank, kind: str, instruction: Collective | Send | Recv, number: int
) -> tuple[Launch, dict[str, Any]]:
    """Run the operator and the launch call; returns what its kernel will carry."""
    if instruction.group.coalesced and not isinstance(instruction, Collective):
        return launch_batch(rank), {}
    peer = None if isinstance(instruction, Collective) else instruction.peer
    seq = number if world.job.sequence_numbers else None
    args = collective_args(kind, instruction.group, instruction.elements, seq, peer)
    own = comms_op_args(args, instruction.group, rank.number if peer is None else peer)
    with host_row(rank, "cpu_op", "record_param_comms", own) as external:
        spend(rank, rank.pace.collective_head_ns)
        with host_row(rank, "user_annotation", KINDS[kind].annotation):
            spend(rank, rank.pace.op_head_ns)
            launch = runtime_call(rank, "cudaLaunchKernelExC", external)
            spend(rank, rank.pace.op_tail_ns)
    return launch, args


def launch_batch(rank: Rank) -> Launch:
    """Launch a message where its batch ends: under an annotation, without an operator."""
    with host_row(rank, "user_annotation", COALESCED) as external:
        spend(rank, rank.pace.collective_head_ns)
        launch = runtime_call(rank, "cudaLaunchKernelExC", external)
        spend(rank, rank.pace.op_tail_ns)
    return launch


def communication_row(rank: Rank, kind: str, stream: int, part: tuple[Launch, dict[str, Any]], when: range) -> None:
    """Record a communication kernel and the shadow of its annotation, which is a little longer."""
    launch, args = part
    start_ns, end_ns = when.start, when.stop
    names, device = KINDS[kind], rank.device
    all_args = {**links(rank, launch, stream), **kernel_args(GRID, BLOCK), **args}
    gpu_row(rank, Span("kernel", names.kernel + KERNEL_ARGUMENTS, device, stream, start_ns, end_ns, all_args))
    rank.communication.append((start_ns, end_ns))
    shadow = {"External id": launch.external}
    annotation = names.annotation if args else COALESCED
    rank.recording.spans.append(
        Span("gpu_user_annotation", annotation, device, stream, start_ns - 1, end_ns + 1, shadow)
    )


def started(rank: Rank, launch: Launch, stream: int, ready_ns: int) -> int:
    """Return when a communication kernel starts whose data are there at `ready_ns`."""
    ready_ns = max(ready_ns, rank.streams.get(stream, 0))
    return ready_ns if launch.end_ns <= ready_ns else launch.end_ns + rank.pace.launch_latency_ns


def join(world: World, rank: Rank, instruction: Collective) -> bool:
    """Launch a rank's part of a collective, behind the compute launched so far."""
    group = instruction.group
    parts = world.parts.setdefault(rank.number, [])
    before = [part.meeting for part in parts if part.instruction.group.stream == group.stream]
    if not all(meeting.complete for meeting in before):
        return False
    number = world.next_number("collective", rank, group)
    world.count("collective", rank, group)
    if instruction.from_autograd:
        rank.thread = rank.recording.autograd_thread
    launch, args = launch_communication(world, rank, instruction.kind, instruction, number)
    rank.thread = rank.recording.main_thread
    meeting = world.meetings.setdefault((group, number), Meeting(len(group.ranks), instruction.transfer_ns))
    ready_ns = max([rank.front_ns, *(earlier.end_ns for earlier in before)])
    meeting.starts[rank.number] = started(rank, launch, group.stream, ready_ns)
    parts.append(Part(instruction, number, meeting, launch, args))
    return True


def wait(world: World, rank: Rank) -> bool:
    """Hold the compute stream until the collectives launched so far have ended, and book what is exposed."""
    parts = world.parts.get(rank.number, [])
    if not all(part.meeting.complete for part in parts):
        return False
    if len({part.instruction.group.stream for part in parts}) > 1:
        raise SimulationError(f"rank {rank.number}: waits for collectives of several streams at once")
    for part in parts:
        end_with(world.job, rank, part)
    parts.clear()
    return True


def end_with(job: Job, rank: Rank, part: Part) -> None:
    """Record a collective and book its exposed part: waiting until the last rank arrives, then transfer.

    Where a member is not traced, what follows the last traced arrival may be either.
    """
    group, meeting = part.instruction.group, part.meeting
    start_ns = meeting.starts[rank.number]
    when = range(start_ns, meeting.end_ns)
    communication_row(rank, part.instruction.kind, group.stream, (part.launch, part.args), when)
    if start_ns > rank.front_ns:
        fill_gap(rank, part.launch.end_ns, start_ns)
    transfer = "transfer_or_wait" if job.lost_ranks.intersection(group.ranks) else group.dimension
    if meeting.end_ns > rank.front_ns:
        rank.resume_leaf = f"exposed_comm/{transfer}"
    arrival_ns, last = meeting.last(job.lost_ranks)
    rank.recording.steps[-1].journal.append(Met(group, part.number))
    if group.crosses_stages:
        advance(rank, POOL, arrival_ns)
    else:
        wait_for(rank, last, job.waiting_leaf, arrival_ns)
    advance(rank, f"exposed_comm/{transfer}", meeting.end_ns)


def run_send(world: World, rank: Rank, send: Send) -> None:
    """Send what the compute launched so far produces; compute goes on meanwhile."""
    number = world.next_number("send", rank, send.peer)
    world.count("send", rank, send.peer)
    part = launch_communication(world, rank, "send", send, number)
    start_ns = started(rank, part[0], SEND_STREAM, rank.front_ns)
    if part[0].end_ns > rank.front_ns:
        fill_gap(rank, part[0].end_ns, start_ns)
    rank.sending_until_ns = start_ns + max(send.transfer_ns, SHORTEST_P2P_NS)
    communication_row(rank, "send", SEND_STREAM, part, range(start_ns, rank.sending_until_ns))
    world.arrivals[rank.number, send.peer, number] = start_ns + send.transfer_ns
    world.messages[rank.number, send.peer, number] = send.of
    rank.recording.steps[-1].journal.append(Sent(send.peer, number, send.transfer_ns))


def receive(world: World, rank: Rank, recv: Recv) -> bool:
    """Receive: a message that is there is taken under the compute before, one that is not holds the GPU up."""
    number = world.next_number("recv", rank, recv.peer)
    message = recv.peer, rank.number, number
    if message not in world.arrivals:
        return False
    if world.messages[message] != recv.of:
        raise SimulationError(f"rank {rank.number}: expects {recv.of} and would receive {world.messages[message]}")
    world.count("recv", rank, recv.peer)
    part = launch_communication(world, rank, "recv", recv, number)
    arrival_ns = world.arrivals[message]
    ready_ns = rank.front_ns if arrival_ns > rank.front_ns else rank.front_ns - SHORTEST_P2P_NS
    start_ns = started(rank, part[0], RECV_STREAM, ready_ns)
    if start_ns > rank.front_ns:
        fill_gap(rank, part[0].end_ns, start_ns)
    end_ns = max(arrival_ns, start_ns + SHORTEST_P2P_NS)
    communication_row(rank, "recv", RECV_STREAM, part, range(start_ns, end_ns))
    if end_ns > rank.front_ns:
        rank.resume_leaf = ""  # what the next kernel waits for is the message, and it follows at once
    rank.recording.steps[-1].journal.append(Received(recv.peer, number))
    advance(rank, POOL, end_ns)
    return True
