"""One rank on its way through the run: where its host and its GPU are, and the books.

`front_ns` is the instant up to which the GPU's time is booked. It only moves through `advance`, which books what it
passes, so that the leaves of a step add up to its window whatever a scenario does.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from traceaudit.simulate.job import Enter, Job, Pace, RankProgram, Step, Task
from traceaudit.simulate.recording import (
    Interval,
    Recording,
    SimulationError,
    Span,
    StepTruth,
    clipped,
    shared_ns,
    union,
)

CBID = {
    "cudaLaunchKernel": 211,
    "cudaLaunchKernelExC": 430,
    "cudaMemcpyAsync": 41,
    "cudaStreamSynchronize": 131,
    "cudaMalloc": 20,
    "cudaFree": 22,
    "cudaDeviceSynchronize": 165,
    "cudaEventRecord": 135,
    "cudaStreamWaitEvent": 147,
    "cudaGraphLaunch": 311,
}


@dataclass(frozen=True)
class Launch:
    """A launch call that has returned, and what links it to the GPU row."""

    end_ns: int
    correlation: int
    external: int


@dataclass(frozen=True)
class Section:
    """A part of the program that the rank is in; `external` is that of its annotation, if it has one."""

    entered: Enter
    external: int
    start_ns: int
    computed: int  # kernels before


@dataclass
class Rank:
    """The state of a rank."""

    program: RankProgram
    pace: Pace
    recording: Recording
    thread: int
    device: int  # index of the GPU on its host
    host_ns: int = 0
    front_ns: int = 0
    last_activity_ns: int = 0
    sending_until_ns: int = 0
    step_row: tuple[int, int] = (0, 0)  # host start and External id of the running ProfilerStep
    resume_leaf: str = ""  # of the communication the next kernel waited for
    refilling: str = ""  # between a host sync and the next launch call: what is charged for it
    causes: deque[tuple[int, int, str]] = field(default_factory=deque)  # what the host did, without holes
    sections: list[Section] = field(default_factory=list)
    streams: dict[int, int] = field(default_factory=dict)  # stream -> end of its last activity
    external_ids: Iterator[int] = field(default_factory=lambda: count(1))
    correlations: Iterator[int] = field(default_factory=lambda: count(30_001))
    compute: list[Interval] = field(default_factory=list)
    communication: list[Interval] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The rank's number."""
        return self.program.rank

    @property
    def task(self) -> Task | None:
        """The task of a pipeline that the rank is at."""
        return self.sections[-1].entered.task if self.sections else None


def new_rank(program: RankProgram, job: Job) -> Rank:
    """Return a rank before its first instruction."""
    process = 41_000 + program.rank
    recording = Recording(program.rank, program.stage, process, process, process + 7_000)
    return Rank(program, job.pace, recording, thread=process, device=program.rank % job.gpus_per_host)


# The host


def spend(rank: Rank, duration_ns: int, cause: str = "launch_bound") -> None:
    """Let host time pass on the running thread; the cause is charged for it if the GPU has nothing to do then."""
    if cause == "launch_bound" and rank.refilling:
        cause = rank.refilling
    end_ns = rank.host_ns + duration_ns
    rank.causes.append((rank.host_ns, end_ns, cause))
    rank.host_ns = end_ns


@contextmanager
def host_row(rank: Rank, category: str, name: str, args: Mapping[str, Any] | None = None) -> Iterator[int]:
    """Record a row that lasts as long as the host time spent inside; yields its External id."""
    external, start_ns = next(rank.external_ids), rank.host_ns
    yield external
    row_args = {"External id": external, "Record function id": 0, **(args or {})}
    process = rank.recording.process
    rank.recording.spans.append(Span(category, name, process, rank.thread, start_ns, rank.host_ns, row_args))


def runtime_call(
    rank: Rank, name: str, external: int, duration_ns: int | None = None, cause: str = "launch_bound"
) -> Launch:
    """Record a call of the CUDA runtime; without a duration, as long as a launch takes."""
    if duration_ns is None:
        rank.refilling, duration_ns = "", rank.pace.launch_ns
    start_ns, correlation = rank.host_ns, next(rank.correlations)
    spend(rank, duration_ns, cause)
    args = {"External id": external, "cbid": CBID[name], "correlation": correlation}
    process = rank.recording.process
    rank.recording.spans.append(Span("cuda_runtime", name, process, rank.thread, start_ns, rank.host_ns, args))
    return Launch(rank.host_ns, correlation, external)


# The books


def advance(rank: Rank, leaf: str, until_ns: int) -> None:
    """Move the front to an instant and book what lies between; the tail of a step is cut off for that step."""
    start_ns, steps = rank.front_ns, rank.recording.steps
    if until_ns <= start_ns:
        return
    boundary_ns = steps[-1].start_ns
    if start_ns < boundary_ns:
        steps[-2].book(leaf, rank.task, min(until_ns, boundary_ns) - start_ns)
    if until_ns > boundary_ns:
        steps[-1].book(leaf, rank.task, until_ns - max(start_ns, boundary_ns))
    rank.front_ns = until_ns


def wait_for(rank: Rank, awaited: int, leaf: str, until_ns: int) -> None:
    """Book waiting for a rank until an instant."""
    waiting_ns = until_ns - rank.front_ns
    if waiting_ns > 0:
        rank.recording.steps[-1].awaited[awaited] += waiting_ns
        advance(rank, leaf, until_ns)


def fill_gap(rank: Rank, launch_end_ns: int, start_ns: int) -> None:
    """Book the idle time before an activity that starts at `start_ns`.

    A send still in flight is exposed communication; until the launch call returned, what the host did; then latency.
    """
    advance(rank, "exposed_comm/pp", min(rank.sending_until_ns, start_ns))
    for _, end_ns, cause in rank.causes:
        advance(rank, f"host_gap/{cause}", min(end_ns, launch_end_ns, start_ns))
    advance(rank, "host_gap/launch_latency", start_ns)
    while rank.causes and rank.causes[0][1] <= rank.front_ns:
        rank.causes.popleft()


def gpu_row(rank: Rank, span: Span) -> None:
    """Record an activity of the GPU."""
    if span.start_ns < rank.streams.get(span.thread, 0):
        raise SimulationError(f"rank {rank.number}: {span.name} overlaps the activity before it on its stream")
    if span.start_ns < rank.recording.steps[-1].start_ns:
        raise SimulationError(f"rank {rank.number}: {span.name} starts before the step that launched it")
    rank.recording.spans.append(span)
    rank.streams[span.thread] = span.end_ns
    rank.last_activity_ns = max(rank.last_activity_ns, span.end_ns)


def links(rank: Rank, launch: Launch, stream: int) -> dict[str, Any]:
    """Return the arguments that tie a GPU row to its launch."""
    return {
        "External id": launch.external,
        "queued": 0,
        "device": rank.device,
        "context": 1,
        "stream": stream,
        "correlation": launch.correlation,
    }


# The steps


def begin_step(rank: Rank, step: Step) -> None:
    """Begin a step: the window opens when the host is there and what it launched before has ended."""
    end_profiler_step(rank)
    start_ns = max(rank.host_ns, rank.last_activity_ns)
    rank.recording.steps.append(StepTruth(step.number, start_ns, cut=step.cut))
    if len(rank.recording.steps) == 1:
        rank.front_ns = rank.host_ns
    rank.step_row = (rank.host_ns, next(rank.external_ids))


def start_profiler(rank: Rank) -> None:
    """Forget the rows so far; nothing may be running that the profiler would see the end of."""
    if rank.last_activity_ns > rank.host_ns or not all(step.cut for step in rank.recording.steps):
        raise SimulationError(f"rank {rank.number}: the profiler can only start before the steps, on an idle GPU")
    rank.recording.spans.clear()
    rank.recording.begun_ns = rank.host_ns


def end_profiler_step(rank: Rank) -> None:
    """Record the row of the step that the host leaves, if it has one."""
    if not rank.recording.steps or rank.recording.steps[-1].cut:
        return
    start_ns, external = rank.step_row
    name, process = f"ProfilerStep#{rank.recording.steps[-1].number}", rank.recording.process
    args = {"External id": external, "Record function id": 0}
    rank.recording.spans.append(Span("user_annotation", name, process, process, start_ns, rank.host_ns, args))


def finish(rank: Rank, end_ns: int) -> None:
    """Close the last step at the instant common to the ranks, and fill in what needs the whole run."""
    steps = rank.recording.steps
    compute, communication = union(rank.compute), union(rank.communication)
    for step, window_end_ns in zip(steps, [*(later.start_ns for later in steps[1:]), end_ns], strict=True):
        step.end_ns = window_end_ns
        inside = clipped(communication, step.start_ns, step.end_ns)
        step.overlapped_comm_ns = shared_ns(compute, inside)
    rank.recording.steps = [step for step in steps if not step.cut]
