"""The contract between the reader and every later stage: which events there are and what their table holds.

`Trace.events` has one row for each event that began and ended in the file, sorted by start (ties: the longer first):

=================  ==========  ==========================================================================
column             dtype       meaning
=================  ==========  ==========================================================================
kind               int8        a `Kind`
name               category    as recorded
start_ns, end_ns   int64       absolute clock of the host, half-open
process, thread    int32       host rows: OS ids; GPU rows: device and stream as the file has them
stream             int32       GPU rows: CUDA stream (HIP: queue); -1 elsewhere
device             int32       GPU rows: device index; -1 elsewhere
correlation        int32       joins a launching call and what it launched; -1 where absent
external           int32       joins GPU rows and the operator that was active at launch; -1 where absent
bytes              int64       copies: bytes moved; -1 where absent
sequence           int32       operators: autograd sequence number; -1 where absent
forward_thread     int32       operators: logical forward thread of a backward operator, 0 in the forward; -1 absent
dims, types        category    operators: ``Input Dims`` and ``Input type`` as JSON text; missing where absent
concrete           category    operators: ``Concrete Inputs``, the scalars as JSON text; missing where absent
grid               category    kernels: launch grid as JSON text; missing where absent
collective         int32       row of `Trace.collectives`; -1 where absent
=================  ==========  ==========================================================================

An int32 column is int64 where a value does not fit.

`Trace.collectives` holds the arguments of collectives, on kernels and on the operators that launched them:
``collective`` (name as recorded), ``group`` (its name), ``group_description``, ``group_ranks`` (text), ``group_size``,
``dtype``, ``in_elements``, ``out_elements``, ``seq``, ``source_rank``, ``destination_rank`` and ``root`` (on operators:
the root of a rooted collective, the peer of a send or receive, else the own rank); -1 or "" where absent.

`Trace.waits` holds the recorded ``cudaStreamWaitEvent`` calls: ``stream`` that waits, ``correlation`` of the call,
``wait_stream`` and ``record``: the correlation of the call that recorded the event there; -1 where unresolved.
`Trace.memory` holds what the GPU's allocator had whenever it was asked (``profile_memory``): ``at_ns``, ``allocated``
and ``reserved`` bytes.
"""

import re
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


class Kind(IntEnum):
    """What recorded an event."""

    OTHER = 0  # not kept
    KERNEL = 1
    COPY = 2  # memcpy
    FILL = 3  # memset
    RUNTIME = 4  # a call of the CUDA or HIP runtime or driver, on the host
    OPERATOR = 5
    ANNOTATION = 6  # record_function on the host
    GPU_ANNOTATION = 7  # its shadow on a stream
    FRAME = 8  # a Python frame; only those that `frame_matters` keeps, and long ones
    SYNC = 9  # a synchronisation record on a stream
    OVERHEAD = 10  # the profiler's own


GPU_KINDS = (Kind.KERNEL, Kind.COPY, Kind.FILL)
HOST_KINDS = (Kind.RUNTIME, Kind.OPERATOR, Kind.ANNOTATION, Kind.FRAME)

# The categories the profiler writes, in lower case; 2021 files wrote some with capitals.
CATEGORIES = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "memcpy": Kind.COPY,
    "gpu_memset": Kind.FILL,
    "memset": Kind.FILL,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "xpu_driver": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME,
    "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "python_function": Kind.FRAME,
    "cuda_sync": Kind.SYNC,
    "overhead": Kind.OVERHEAD,
}

# Python frames that name the cause of a host gap; of the millions of others only those are kept that are long enough
# to show what the host did in a long gap.
FRAMES = re.compile(
    r"Python GC|function collect>|gc\.collect"
    r"|torch/serialization\.py\(\d+\): save|distributed/checkpoint/.*: (?:save|async_save)|dist_checkpointing/.*: save"
    r"|dataloader\.py\(\d+\): __next__|\.py\(\d+\): (?:get|next|fetch|load)_batch$"
    r"|monitored_barrier|store_(?:based_)?barrier|(?:broadcast|gather|scatter)_object|TCPStore"
    r"|torch/_dynamo/convert_frame\.py\(\d+\): |(?:benchmark_all_configs|autotune_to_one_config)$"
    r"|triton/compiler/compiler\.py\(\d+\): compile$"
)
LONG_FRAME_US = 200

BACKWARD_NODE = "autograd::engine::evaluate_function: "  # an operator named so runs one node of the backward
# Python frames that run the forward of a module or of a checkpoint; they are kept inside backward nodes, where they
# run it again.
RECOMPUTING_FRAME = re.compile(
    r"nn\.Module: |(?:.*/)?torch/utils/checkpoint\.py\(\d+\): recompute_fn$"
    r"|(?:.*/)?tensor_parallel/random\.py\(\d+\): _recompute$"
)


def frame_matters(name: str) -> bool:
    """Tell whether a Python frame names the cause of a host gap, so that it is kept however short."""
    return FRAMES.search(name) is not None


def frame_may_recompute(name: str) -> bool:
    """Tell whether a Python frame is kept however short where it lies inside a backward node."""
    return RECOMPUTING_FRAME.match(name) is not None


WAIT_FIELDS = ("stream", "correlation", "wait_stream", "record")
MEMORY_FIELDS = ("at_ns", "allocated", "reserved")


def _table(columns: tuple[str, ...]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame({name: pd.Series(dtype="int64") for name in columns})


@dataclass(frozen=True)
class Device:
    """The GPU of a rank as the file describes it; unknown numbers are 0."""

    name: str
    memory_bytes: int
    multiprocessors: int
    capability: tuple[int, int]
    warp_size: int


@dataclass(frozen=True)
class ProcessGroup:
    """A process group that the rank belongs to, from ``distributedInfo.pg_config``."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """Where a trace came from, as far as its file says.

    Attributes:
        file: the file's path.
        rank: from ``distributedInfo``, else the file's name; None where neither tells.
        world_size: ranks of the job; None where unknown.
        host: host name; None where unknown.
        processes: ids of the processes with host rows.
        device: the GPU; None where not described.
        groups: process groups by name.
        record_shapes: operator shapes were recorded.
        with_stack: Python stacks were recorded, which inflates host gaps.
        absolute_clock: times count from the epoch, so that ranks can be compared.
        job: whatever tells two jobs apart beyond rank and time (job name).
        base_ns: what was added to the file's own timestamps.
        versions: of the software, by name, as far as recorded.
    """

    file: Path
    rank: int | None
    world_size: int | None
    host: str | None
    processes: tuple[int, ...]
    device: Device | None
    groups: tuple[ProcessGroup, ...]
    record_shapes: bool
    with_stack: bool
    absolute_clock: bool
    job: str
    base_ns: int = 0
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Losses:
    """Events of one file that could not be used as they were, by what happened to them."""

    dropped: int = 0
    repaired: int = 0
    negative_durations: int = 0
    torn: bool = False


@dataclass(frozen=True)
class Trace:
    """The events of one rank on the absolute clock; the module's docstring describes the tables."""

    origin: Origin
    events: "pd.DataFrame"
    collectives: "pd.DataFrame"
    thread_names: dict[int, str]
    losses: Losses
    metadata: dict[str, Any] = field(default_factory=dict)
    waits: "pd.DataFrame" = field(default_factory=lambda: _table(WAIT_FIELDS))
    memory: "pd.DataFrame" = field(default_factory=lambda: _table(MEMORY_FIELDS))
