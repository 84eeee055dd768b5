"""What a kernel waited for on the GPU, where the trace records it: stream-wait events (``cuda_sync`` rows)."""

import numpy as np
import pandas as pd

from traceaudit.events import Trace
from traceaudit.intervals import Array


def recorded_dependencies(trace: Trace, activities: pd.DataFrame) -> Array:
    """Return for each activity the one on another stream that a recorded event made it wait for, -1 if none.

    ``cudaStreamWaitEvent`` holds what is launched on its stream afterwards until all that had been launched on the
    other stream when the event was recorded has ended. Correlation ids count the calls of a process in order, so they
    tell what was launched before and after. Of several dependencies the one that ended last counts.
    """
    result = np.full(len(activities), -1, np.int64)
    waits = trace.waits
    usable = waits[(waits["wait_stream"] >= 0) & (waits["record"] > 0) & (waits["correlation"] > 0)]
    if not len(usable) or not len(activities):
        return result
    streams, correlations = activities["stream"].to_numpy(), activities["correlation"].to_numpy()
    ends = activities["end_ns"].to_numpy()
    held, awaited = [], []
    for (stream, other), calls in usable[usable["stream"] != usable["wait_stream"]].groupby(["stream", "wait_stream"]):
        waiting, source = (
            own[np.argsort(correlations[own], kind="stable")]
            for own in (np.flatnonzero((streams == name) & (correlations > 0)) for name in (stream, other))
        )
        after = np.searchsorted(correlations[waiting], calls["correlation"].to_numpy(), side="right")
        before = np.searchsorted(correlations[source], calls["record"].to_numpy(), side="left") - 1
        known = (after < len(waiting)) & (before >= 0)
        held.append(waiting[after[known]])
        awaited.append(source[before[known]])
    if held:
        kernel, dependency = np.concatenate(held), np.concatenate(awaited)
        order = np.argsort(ends[dependency], kind="stable")  # the last to be written stays
        result[kernel[order]] = dependency[order]
    return result
