"""The buckets of lost time and their leaves: the names that every table, report and `result.json` uses."""

from enum import IntEnum, StrEnum

import numpy as np
import numpy.typing as npt


class Bucket(StrEnum):
    """Where the time of a step went, in the order of the waterfall."""

    ACHIEVED = "achieved"
    SUB_ROOFLINE = "sub_roofline"
    EXPOSED_COMM = "exposed_comm"
    PIPELINE_BUBBLE = "pipeline_bubble"
    RECOMPUTE = "recompute"
    STRAGGLER = "straggler"
    HOST_GAP = "host_gap"
    UNATTRIBUTED = "unattributed"


BUCKETS = tuple(Bucket)


class Leaf(IntEnum):
    """One reason within a bucket; the lower-case name is the name outside."""

    MODEL_FLOPS = 0  # model FLOPs at the peak rate
    MATMUL = 10  # below the roof, by family of kernel
    ATTENTION = 11
    NORM = 12
    ELEMENTWISE = 13
    OPTIMIZER = 14
    DEVICE_COPY = 15
    OTHER_KERNELS = 16
    MEMORY_FLOOR = 18  # moving the bytes takes longer than the FLOPs at the peak
    SLOWED_BY_OVERLAP = 19  # beside communication, over the same kernel without it
    NOT_SPLIT = 17  # compute of a run whose model FLOPs or peak are unknown
    TP = 20  # transfer of exposed communication, by dimension of its process group
    DP = 21
    FSDP = 22
    PP = 23
    CP = 24
    EP = 25
    OTHER_COMM = 26
    OFFLOAD_COPY = 27
    TRANSFER_OR_WAIT = 28  # partners were not traced, or the collective could not be matched
    UNDIVIDED = 30  # waiting in a pipeline, whatever for
    WARMUP_DRAIN = 31  # the schedule's own cost
    STAGE_IMBALANCE = 32
    KERNELS = 40
    COMMUNICATION = 41
    LATE_RANK = 50  # waiting for a rank whose kernels were slower, or for no known reason
    SLOW_GPU = 51  # what the kernels of a slow GPU took over its peers'
    DATA_IMBALANCE = 52  # waiting for a rank that had more work
    HOST_CAUSED = 53  # waiting for a rank whose host paused
    SLOW_LINK = 54  # waiting for a rank whose transfers were slower
    JITTER = 55  # waiting for a rank that did nothing more than the waiting one
    DATA_LOADER = 60
    CHECKPOINT = 61
    GC = 62
    COMPILE = 63
    ALLOCATOR = 64
    HOST_SYNC = 65
    LAUNCH_BOUND = 66
    INPUT_COPY = 67
    LAUNCH_LATENCY = 68
    OTHER_HOST = 69
    LAUNCH_MISSING = 80
    NOT_STARTED = 81
    TRACE_CUT = 82
    OTHER = 83

    @property
    def bucket(self) -> Bucket:
        """The bucket that the leaf belongs to."""
        return BUCKETS[min(self // 10, 7)]

    @property
    def label(self) -> str:
        """The name of the leaf in `result.json`."""
        return self.name.lower()


def in_bucket(leaves: npt.ArrayLike, bucket: Bucket) -> npt.NDArray[np.bool_]:
    """Tell which leaves belong to a bucket.

    >>> in_bucket([Leaf.JITTER, Leaf.TP], Bucket.STRAGGLER).tolist()
    [True, False]
    """
    code, number = np.asarray(leaves), BUCKETS.index(bucket)
    inside = code >= 10 * number
    if number + 1 < len(BUCKETS):
        inside &= code < 10 * (number + 1)
    return np.asarray(inside, np.bool_)


FAMILIES = (
    Leaf.MATMUL,
    Leaf.ATTENTION,
    Leaf.NORM,
    Leaf.ELEMENTWISE,
    Leaf.OPTIMIZER,
    Leaf.DEVICE_COPY,
    Leaf.OTHER_KERNELS,
)
