"""Play a job: run the programs of all ranks against each other and lay down rows and truth.

A rank runs until it needs something from a rank that has not got so far, then the next one runs. Nothing but the
data passed (arrivals at a collective, a message sent) ties the ranks together, so the order of running has no effect.
"""

from collections import deque
from collections.abc import Sequence
from itertools import chain

from traceaudit.simulate.communication import World, join, receive, run_send, wait
from traceaudit.simulate.compute import enter, leave, run_node, run_ops, run_pause
from traceaudit.simulate.job import (
    Act,
    Collective,
    Enter,
    Instruction,
    Job,
    Leave,
    Node,
    Ops,
    Pause,
    Recv,
    Send,
    StartProfiler,
    Step,
    Wait,
)
from traceaudit.simulate.rank import (
    Rank,
    advance,
    begin_step,
    end_profiler_step,
    finish,
    new_rank,
    start_profiler,
    wait_for,
)
from traceaudit.simulate.recording import POOL, Recording, SimulationError, check
from traceaudit.simulate.replay import divide


def play(job: Job) -> tuple[Recording, ...]:
    """Run the job to its end and return what each rank recorded."""
    world = World(job)
    ranks = [new_rank(program, job) for program in job.programs]
    queue = deque((rank, deque(rank.program.instructions)) for rank in ranks)
    idle_turns = 0
    while queue:
        rank, todo = queue.popleft()
        before = len(todo)
        while todo and execute(world, rank, todo[0]):
            todo.popleft()
        if todo:
            queue.append((rank, todo))
        idle_turns = 0 if len(todo) < before else idle_turns + 1
        if idle_turns > len(queue):
            raise SimulationError(f"ranks {[rank.number for rank, _ in queue]} wait for each other")
    close(world, ranks)
    recordings = tuple(rank.recording for rank in ranks)
    if job.pipelined and not job.mixed_waits:
        divide(recordings)
    for recording in recordings:
        check(recording)
    return recordings


def execute(world: World, rank: Rank, instruction: Instruction) -> bool:
    """Run an instruction; False, with nothing changed, if another rank must get further first."""
    match instruction:
        case Step():
            begin_step(rank, instruction)
        case StartProfiler():
            start_profiler(rank)
        case Ops():
            run_ops(rank, instruction)
        case Node():
            run_node(rank, instruction)
        case Pause():
            run_pause(rank, instruction)
        case Send():
            run_send(world, rank, instruction)
        case Recv():
            return receive(world, rank, instruction)
        case Collective():
            return join(world, rank, instruction)
        case Wait():
            return wait(world, rank)
        case Enter():
            enter(rank, instruction)
        case Leave():
            leave(rank)
        case Act():
            instruction.run(rank)
    return True


def close(world: World, ranks: Sequence[Rank]) -> None:
    """End the last step of ranks that are tied together at the instant the last of them ends."""
    for tied in tied_ranks(world, ranks):
        end_ns, last = max((rank.last_activity_ns, rank.number) for rank in tied)
        for rank in tied:
            end_profiler_step(rank)
            if rank.host_ns > rank.last_activity_ns or world.parts.get(rank.number):
                raise SimulationError(f"rank {rank.number}: the last step must end with an activity that is waited for")
            if world.job.pipelined:
                advance(rank, POOL, end_ns)
            else:
                wait_for(rank, last, world.job.waiting_leaf, end_ns)
            finish(rank, end_ns)


def tied_ranks(world: World, ranks: Sequence[Rank]) -> list[list[Rank]]:
    """Return the ranks in sets that communicated, directly or through others.

    No clock is common to two sets, so each ends by itself.
    """
    sets = {rank.number: {rank.number} for rank in ranks}
    collectives = {group.ranks for group, _ in world.meetings}
    messages = {(sender, receiver) for sender, receiver, _ in world.arrivals}
    for members in chain(collectives, messages):
        joined = set().union(*(sets[member] for member in members))
        sets |= dict.fromkeys(joined, joined)
    by_number = {rank.number: rank for rank in ranks}
    return [[by_number[number] for number in sorted(tied)] for first, tied in sets.items() if first == min(tied)]
