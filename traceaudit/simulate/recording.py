"""What the simulator lays down for a rank: rows of the trace, and the truth about each step."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from traceaudit.errors import TraceAuditError
from traceaudit.simulate.job import Group, Task

Interval = tuple[int, int]

POOL = "pipeline_bubble/undivided"  # where the waits of a pipeline are booked until they are divided


class SimulationError(TraceAuditError):
    """The scenario asks for something the simulator cannot lay down with one clear answer."""


@dataclass(frozen=True, slots=True)
class Span:
    """A row of the trace with a duration; `process` and `thread` are device and stream on the GPU."""

    category: str
    name: str
    process: int
    thread: int
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Booked:
    """Time that was booked under a leaf, for the task that the rank was at."""

    leaf: str
    task: Task | None
    ns: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A message left the rank."""

    peer: int
    number: int
    transfer_ns: int


@dataclass(frozen=True, slots=True)
class Received:
    """The rank went on when a message was there."""

    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class Met:
    """The rank went on when all ranks of a group had arrived at a collective."""

    group: Group
    number: int


@dataclass
class StepTruth:
    """Where the nanoseconds of one step of one rank went, booked as they are laid down.

    `awaited` holds the waits for ranks of the same stage once more, by the rank waited for. `journal` holds the
    bookings in order, and what tied the rank to others.
    """

    number: int
    start_ns: int
    end_ns: int = 0
    leaves: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    matmul_flops: int = 0
    overlapped_comm_ns: int = 0
    cut: bool = False
    awaited: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    journal: list[Booked | Sent | Received | Met] = field(default_factory=list)

    def book(self, leaf: str, task: Task | None, ns: int) -> None:
        """Book time under a leaf."""
        self.leaves[leaf] += ns
        self.journal.append(Booked(leaf, task, ns))


@dataclass
class Recording:
    """Everything known about one rank at the end of the run; its profiler started at `begun_ns`."""

    rank: int
    stage: int
    process: int
    main_thread: int
    autograd_thread: int
    spans: list[Span] = field(default_factory=list)
    steps: list[StepTruth] = field(default_factory=list)
    begun_ns: int = 0

    def booked_ns(self, leaf: str) -> int:
        """Return what is booked under a leaf, or under all leaves of a bucket."""
        return sum(
            ns for step in self.steps for name, ns in step.leaves.items() if name == leaf or name.startswith(f"{leaf}/")
        )


def check(recording: Recording) -> None:
    """Raise unless the leaves of every step add up to its window and none is negative."""
    for step in recording.steps:
        window, booked = step.end_ns - step.start_ns, sum(step.leaves.values())
        if booked != window or any(ns < 0 for ns in step.leaves.values()):
            raise SimulationError(
                f"rank {recording.rank}, step {step.number}: {booked} ns booked in a window of {window} ns"
            )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same instants as disjoint intervals in order.

    >>> union([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def shared_ns(left: Sequence[Interval], right: Sequence[Interval]) -> int:
    """Return how long two sets of disjoint ordered intervals hold at once.

    >>> shared_ns([(0, 10)], [(2, 5), (8, 12)])
    5
    """
    total, i, j = 0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def clipped(intervals: Iterable[Interval], start_ns: int, end_ns: int) -> list[Interval]:
    """Return the parts of the intervals that lie in a window."""
    return [(max(a, start_ns), min(b, end_ns)) for a, b in intervals if a < end_ns and b > start_ns]
