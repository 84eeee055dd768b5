"""Which kernels run the forward again during the backward (activation checkpointing).

Rule 1: inside a backward node (``autograd::engine::evaluate_function``), an operator that carries an autograd sequence
number and the forward thread id 0 runs as a forward; so does everything beneath it. Operators whose number a later
backward node consumes belong to a double backward instead, unless a reentrant checkpoint encloses them.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing, thread_keys
from traceaudit.events import Kind, Trace
from traceaudit.intervals import Array, Intervals, covers, union
from traceaudit.nesting import parents

NODE = "autograd::engine::evaluate_function"
REENTRANT = "CheckpointFunctionBackward"


def recomputed(trace: Trace, activities: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tell which activities a recomputed region launched.

    A region that launches nothing but communication (the backward of a differentiable collective) is none.
    """
    events = trace.events
    result = np.zeros(len(activities), np.bool_)
    roots = _roots(trace)
    if not len(roots):
        return result
    keys = thread_keys(events)
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    launch = activities["launch"].to_numpy()
    for key in np.unique(keys[roots]):
        own = roots[keys[roots] == key]
        spans = union(starts[own], ends[own])
        asked = np.flatnonzero((launch >= 0) & (keys[np.maximum(launch, 0)] == key))
        inside = asked[covers(spans, starts[launch[asked]])]
        region = _enclosing_node(events, launch[inside])
        computing = activities["state"].to_numpy()[inside] == State.COMPUTE
        result[inside] = np.isin(region, region[computing])
    return result


def _enclosing_node(events: pd.DataFrame, calls: npt.NDArray[np.intp]) -> Array:
    """Return the backward node around each call."""
    return enclosing(events, _rows(events, NODE), calls)


def _rows(events: pd.DataFrame, prefix: str) -> npt.NDArray[np.intp]:
    """Return the rows of the operators whose name begins with a prefix."""
    starting = np.array([str(name).startswith(prefix) for name in events["name"].cat.categories], np.bool_)
    operator = events["kind"].to_numpy() == Kind.OPERATOR
    return np.flatnonzero(operator & starting[events["name"].cat.codes.to_numpy()])


def _roots(trace: Trace) -> npt.NDArray[np.intp]:
    """Return the operators that run as a forward inside a backward node."""
    events = trace.events
    sequence, forward = events["sequence"].to_numpy(), events["forward_thread"].to_numpy()
    candidates = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & (sequence >= 0) & (forward == 0))
    nodes = _rows(events, NODE)
    if not len(candidates) or not len(nodes):
        return candidates[:0]
    around = enclosing(events, nodes, candidates)
    inner = _nested(events, nodes)
    candidates = candidates[(around >= 0) & ~np.isin(around, inner)]
    reentrant = enclosing(events, _rows(events, REENTRANT), candidates) >= 0
    return candidates[reentrant | ~_consumed(events, candidates)]


def _nested(events: pd.DataFrame, nodes: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return the backward nodes inside another one: the inner backward of a reentrant checkpoint."""
    keys = thread_keys(events)[nodes]
    starts, ends = events["start_ns"].to_numpy()[nodes], events["end_ns"].to_numpy()[nodes]
    inner = np.zeros(len(nodes), np.bool_)
    for key in np.unique(keys):
        own = np.flatnonzero(keys == key)
        inner[own] = parents(Intervals(starts[own], ends[own])) >= 0
    return nodes[inner]


def _consumed(events: pd.DataFrame, candidates: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Tell which operators' sequence numbers a later backward node uses: those of a double backward.

    Numbers count per thread, so a node consumes a candidate's number only if it belongs to another forward thread than
    the bulk of the backward, or if forward and backward share one thread.
    """
    sequence, forward = events["sequence"].to_numpy(), events["forward_thread"].to_numpy()
    keys, starts = thread_keys(events), events["start_ns"].to_numpy()
    backward = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & (sequence >= 0) & (forward > 0))
    if not len(backward) or not len(candidates):
        return np.zeros(len(candidates), np.bool_)
    main = np.bincount(forward[backward]).argmax()
    plain = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & (sequence >= 0) & (forward == 0))
    outside = plain[enclosing(events, _rows(events, NODE), plain) < 0]
    shared = np.isin(keys[candidates], keys[outside])
    result = np.zeros(len(candidates), np.bool_)
    for users, asked in ((backward[forward[backward] != main], ~shared), (backward, shared)):
        last_use = pd.Series(starts[users]).groupby(sequence[users]).max()
        latest = last_use.reindex(sequence[candidates]).fillna(-1).to_numpy()
        result |= asked & (latest > starts[candidates])
    return result
