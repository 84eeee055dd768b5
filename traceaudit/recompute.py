"""Which kernels run the forward again during the backward (activation checkpointing), and the rule that tells.

The rules, the strongest first; a region is decided by the first that finds it:

1. *numbers*: inside a backward node (``autograd::engine::evaluate_function``), an operator that carries an autograd
   sequence number and the forward thread id 0 runs as a forward, with grad mode on; a plain backward node runs with
   grad mode off and its own operators carry no number. Everything beneath inherits.
2. *frames* (stacks recorded): a module's call, or the recomputing function of a checkpoint, inside a backward node.
3. *names*: operators that only a forward calls, inside a backward node. They count where the trace has no sequence
   numbers at all; where it has them, rule 1 would have found a recomputed forward, and they are only suspected.

A backward with ``create_graph`` runs with grad mode on as a whole, so that its own operators carry numbers too: such
nodes are told by having no operator without a number, or by a later node that uses their numbers, and rule 1 is silent
there. Kernels alone (rule 4) and compiled graphs give no more than a suspicion: see `traceaudit.checkpointing`.
"""

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, enclosing, thread_keys
from traceaudit.events import BACKWARD_NODE, RECOMPUTING_FRAME, Kind, Trace
from traceaudit.intervals import Array, Intervals
from traceaudit.leaves import Leaf
from traceaudit.nesting import Index, parents

Mask = npt.NDArray[np.bool_]

SMALL_COPY_BYTES = 1 << 16  # a state of a random generator, or a flag; activations that come from the host are larger

# Operators that a forward calls and no formula of a backward; of a double backward only convolutions do (`TWICE`).
FORWARD_ONLY = re.compile(
    r"^aten::(?:linear|convolution|(?:native_)?layer_norm|_fused_rms_norm|embedding|scaled_dot_product_attention"
    r"|_scaled_dot_product_(?:flash|efficient|cudnn|fused)_attention(?:_\w+)?|_flash_attention_forward"
    r"|_efficient_attention_forward)$"
    r"|^flash_attn\w*::_flash_attn_(?:varlen_)?forward$|^FlashAttn(?:Varlen)?(?:QKVPacked)?Func$"
)
BACKWARD = re.compile(r"backward", re.I)
TWICE = re.compile(r"BackwardBackward")
COMPILED = "CompiledFunction"


class Rule(IntEnum):
    """What told that a kernel is recompute."""

    NONE = 0
    NUMBERS = 1
    FRAMES = 2
    NAMES = 3
    KERNELS = 4  # a suspicion only


@dataclass(frozen=True)
class Backward:
    """The backward of a trace, as rows of its events.

    Attributes:
        nodes: backward nodes.
        outer: for each node the node around it, the inner backward of a reentrant checkpoint; -1 at top level.
        calls: the operators that nodes apply (``MmBackward0``).
        numbered: operators with a sequence number and the forward thread id 0.
        node_of: for each of `numbered` the innermost node around it, -1 in the forward.
    """

    nodes: Index
    outer: Array
    calls: Index
    numbered: Index
    node_of: Array


@dataclass(frozen=True)
class Recompute:
    """What of a rank's work is recompute.

    Attributes:
        regions: stretches of a backward node that run the forward again, one row each: ``around`` (row of the
            operator applied by the node, or of the node, that holds it), ``node``, ``start_ns``, ``end_ns``, ``rule``
            (`Rule`) and ``flavour`` (``reentrant``, ``non_reentrant``, ``output_discarding``, ``unknown``).
        region: for each activity the row of `regions` that launched it, -1 for none; regions that launch nothing but
            communication and copies (the backward of a differentiable collective) are none.
        rule: for each activity the `Rule` that told, 0 for none.
        suspected: for each activity, whether a forward-only operator launched it in the backward, though by rule 1 no
            forward ran there.
    """

    regions: pd.DataFrame
    region: Array
    rule: npt.NDArray[np.int8]
    suspected: Mask

    @property
    def again(self) -> Mask:
        """Which activities are recompute."""
        return self.rule > 0


def recompute(trace: Trace, activities: pd.DataFrame) -> Recompute:
    """Find the activities that a recomputed region launched."""
    events = trace.events
    backward = backward_of(events)
    found = regions(events, backward)
    launch = activities["launch"].to_numpy()
    region = _inside(events, backward, found, launch)
    state, family = activities["state"].to_numpy(), activities["family"].to_numpy()
    working = (state == State.COMPUTE) & (family != Leaf.DEVICE_COPY)
    region = np.where(np.isin(region, region[working]), region, -1)
    large = (state == State.HOST_COPY) & (events["bytes"].to_numpy()[activities["row"].to_numpy()] > SMALL_COPY_BYTES)
    region = np.where(large, -1, region)
    rule = np.where(region >= 0, found["rule"].to_numpy()[region] if len(found) else 0, 0).astype(np.int8)
    named = (enclosing(events, _forward_only(events, backward), launch) >= 0) & (region < 0) & (state == State.COMPUTE)
    if not len(backward.numbered):
        rule[named] = Rule.NAMES
        named = np.zeros_like(named)
    return Recompute(found, region, rule, named)


def recomputed(trace: Trace, activities: pd.DataFrame) -> Mask:
    """Tell which activities are recompute."""
    return recompute(trace, activities).again


def recomputed_operators(trace: Trace) -> Mask:
    """Tell which rows of a trace are operators that a recomputed region runs, whether they launch kernels or not."""
    events = trace.events
    backward = backward_of(events)
    operators = np.flatnonzero(events["kind"].to_numpy() == Kind.OPERATOR)
    result = np.zeros(len(events), np.bool_)
    result[operators] = _inside(events, backward, regions(events, backward), operators) >= 0
    return result


def backward_of(events: pd.DataFrame) -> Backward:
    """Return the nodes of the backward and the operators with numbers."""
    operator = events["kind"].to_numpy() == Kind.OPERATOR
    sequence, forward = events["sequence"].to_numpy(), events["forward_thread"].to_numpy()
    node = operator & _named(events, re.compile(re.escape(BACKWARD_NODE)))
    nodes = np.flatnonzero(node)
    numbered = np.flatnonzero(operator & (sequence >= 0) & (forward == 0))
    applied = _applied(events)[events["name"].cat.codes.to_numpy()] if len(events) else operator
    calls = np.flatnonzero(operator & (((sequence >= 0) & (forward > 0)) | applied) & ~node)
    return Backward(nodes, _outer(events, nodes), calls, numbered, enclosing(events, nodes, numbered))


def regions(events: pd.DataFrame, backward: Backward) -> pd.DataFrame:
    """Return the stretches of backward nodes that run the forward again; columns as in `Recompute.regions`."""
    by_number = _numbered_regions(events, backward)
    by_frame = _spans(events, backward, _recomputing_frames(events), Rule.FRAMES)
    both = pd.concat([by_number, by_frame], ignore_index=True)
    merged = both.groupby("around", as_index=False).agg(
        node=("node", "first"),
        start_ns=("start_ns", "min"),
        end_ns=("end_ns", "max"),
        rule=("rule", "min"),
    )
    return merged.assign(flavour=_flavours(events, backward, merged))


def _named(events: pd.DataFrame, pattern: re.Pattern[str]) -> Mask:
    """Tell which rows have a name that begins with a pattern."""
    matching = np.array([pattern.match(str(name)) is not None for name in events["name"].cat.categories], np.bool_)
    return matching[events["name"].cat.codes.to_numpy()] if len(events) else np.zeros(0, np.bool_)


def _applied(events: pd.DataFrame) -> Mask:
    """Tell for each distinct name whether a node applies an operator of that name."""
    names = [str(name) for name in events["name"].cat.categories]
    applied = {name.removeprefix(BACKWARD_NODE) for name in names if name.startswith(BACKWARD_NODE)}
    return np.array([name in applied for name in names], np.bool_)


def _outer(events: pd.DataFrame, nodes: Index) -> Array:
    keys = thread_keys(events)[nodes]
    starts, ends = events["start_ns"].to_numpy()[nodes], events["end_ns"].to_numpy()[nodes]
    outer = np.full(len(nodes), -1, np.int64)
    for key in np.unique(keys):
        own = np.flatnonzero(keys == key)
        above = parents(Intervals(starts[own], ends[own]))
        outer[own] = np.where(above >= 0, nodes[own[np.maximum(above, 0)]], -1)
    return outer


def _inside(events: pd.DataFrame, backward: Backward, found: pd.DataFrame, calls: npt.NDArray[np.intp]) -> Array:
    """Return the region that each call runs in, -1 for none; nodes inside a region are no part of it."""
    if not len(found):
        return np.full(len(calls), -1, np.int64)
    around = enclosing(events, np.union1d(backward.nodes, backward.calls), calls)
    region = pd.Index(found["around"]).get_indexer(pd.Index(around))
    at = events["start_ns"].to_numpy()[np.maximum(calls, 0)]
    start, end = found["start_ns"].to_numpy()[region], found["end_ns"].to_numpy()[region]
    return np.where((region >= 0) & (around >= 0) & (at >= start) & (at < end), region, -1).astype(np.int64)


def _spans(events: pd.DataFrame, backward: Backward, rows: npt.NDArray[np.intp], rule: Rule) -> pd.DataFrame:
    """Return for each operator or frame in a backward node its span and what holds it."""
    around = enclosing(events, np.union1d(backward.nodes, backward.calls), rows)
    node = enclosing(events, backward.nodes, rows)
    kept = (around >= 0) & (node >= 0)
    return pd.DataFrame(
        {
            "around": around[kept],
            "node": node[kept],
            "start_ns": events["start_ns"].to_numpy()[rows[kept]],
            "end_ns": events["end_ns"].to_numpy()[rows[kept]],
            "rule": np.full(int(kept.sum()), int(rule), np.int64),
        }
    )


def _recomputing_frames(events: pd.DataFrame) -> npt.NDArray[np.intp]:
    return np.flatnonzero((events["kind"].to_numpy() == Kind.FRAME) & _named(events, RECOMPUTING_FRAME))


def _forward_only(events: pd.DataFrame, backward: Backward) -> npt.NDArray[np.intp]:
    """Return the operators inside backward nodes that only a forward calls."""
    rows = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & _without_overload(events, FORWARD_ONLY))
    node = enclosing(events, backward.nodes, rows)
    twice = np.array([TWICE.search(str(name)) is not None for name in events["name"].cat.categories], np.bool_)
    again = twice[events["name"].cat.codes.to_numpy()[np.maximum(node, 0)]] if len(events) else node < 0
    return rows[(node >= 0) & ~again]


def _without_overload(events: pd.DataFrame, pattern: re.Pattern[str]) -> Mask:
    matching = [
        pattern.match(str(name).split(".")[0]) is not None and BACKWARD.search(str(name)) is None
        for name in events["name"].cat.categories
    ]
    return np.array(matching, np.bool_)[events["name"].cat.codes.to_numpy()] if len(events) else np.zeros(0, np.bool_)


def _numbered_regions(events: pd.DataFrame, backward: Backward) -> pd.DataFrame:
    """Return the spans of operators that run as a forward inside a backward node (rule 1)."""
    inside = backward.node_of >= 0
    rows, node = backward.numbered[inside], backward.node_of[inside]
    with_inner = np.isin(node, backward.outer)
    plain = np.isin(node, _plain_nodes(events, backward)) & ~_consumed(events, backward, rows, node)
    # The call of a Python function carries a number even with grad mode off: such calls alone are no evidence.
    names = [str(name) for name in events["name"].cat.categories]
    dispatched = np.array(["::" in name or name == COMPILED for name in names], np.bool_)
    proven = dispatched[events["name"].cat.codes.to_numpy()[rows]] if len(events) else inside
    kept = (with_inner | plain) & np.isin(node, node[proven | with_inner])
    return _spans(events, backward, rows[kept], Rule.NUMBERS)


def _plain_nodes(events: pd.DataFrame, backward: Backward) -> Index:
    """Return the nodes that run with grad mode off: they have own operators without a number.

    A node whose own work has no operator counts too if the nodes before and after it on its thread do.
    """
    nodes, starts = backward.nodes, events["start_ns"].to_numpy()
    operator = events["kind"].to_numpy() == Kind.OPERATOR
    operator[nodes], operator[backward.calls], operator[backward.numbered] = False, False, False
    bare = np.flatnonzero(operator)
    node = enclosing(events, nodes, bare)
    bare, node = bare[node >= 0], node[node >= 0]
    above = enclosing(events, backward.numbered, bare)
    own = (above < 0) | (starts[np.maximum(above, 0)] < starts[node])
    plain = np.isin(nodes, node[own])
    numbered = np.isin(nodes, backward.node_of) & ~plain
    busy = np.flatnonzero(plain | numbered)
    keys = thread_keys(events)[nodes[busy]]
    busy = busy[np.argsort(keys, kind="stable")]
    keys = np.sort(keys, kind="stable")
    same = keys[1:] == keys[:-1]
    off = plain[busy]
    before = np.concatenate(([False], np.where(same, off[:-1], False)))
    after = np.concatenate((np.where(same, off[1:], False), [False]))
    alone = np.zeros(len(nodes), np.bool_)
    alone[busy] = (before & after)[: len(busy)]
    return nodes[plain | (numbered & alone)]


def _consumed(events: pd.DataFrame, backward: Backward, rows: Index, node: Array) -> Mask:
    """Tell which operators' numbers a later top-level node uses: those of a double backward.

    Numbers count per thread, so a node uses a number of the autograd thread only if it belongs to another forward
    thread than the bulk of the backward, or if forward and backward share one thread. Of the operators with one number
    the last creates the node. Nodes inside another node that use a number are a reentrant checkpoint's.
    """
    sequence, forward = events["sequence"].to_numpy(), events["forward_thread"].to_numpy()
    keys, starts, ends = thread_keys(events), events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    users = backward.calls[sequence[backward.calls] >= 0]
    top = backward.nodes[backward.outer < 0]
    users = users[np.isin(enclosing(events, backward.nodes, users), top)]
    result = np.zeros(len(rows), np.bool_)
    if not len(users) or not len(rows):
        return result
    main = np.bincount(forward[users]).argmax()
    shared = np.isin(keys[rows], keys[backward.numbered[backward.node_of < 0]])
    for own, asked in ((users[forward[users] != main], ~shared), (users, shared)):
        last_use = pd.Series(starts[own]).groupby(sequence[own]).max()
        latest = last_use.reindex(sequence[rows]).fillna(-1).to_numpy()
        result |= asked & (latest >= ends[node])
    return np.asarray(result & (_creators(events, backward, rows) == node))


def _creators(events: pd.DataFrame, backward: Backward, rows: Index) -> Array:
    """Return the node around the last operator with the number of each row, on its thread."""
    sequence, keys = events["sequence"].to_numpy(), thread_keys(events)
    all_numbers = pd.MultiIndex.from_arrays([keys[backward.numbered], sequence[backward.numbered]])
    last = ~all_numbers.duplicated(keep="last")
    slot = all_numbers[last].get_indexer(pd.MultiIndex.from_arrays([keys[rows], sequence[rows]]))
    return np.asarray(backward.node_of[last][slot], np.int64)


def _flavours(events: pd.DataFrame, backward: Backward, found: pd.DataFrame) -> npt.NDArray[np.object_]:
    """Return how each region's checkpoint works: its inner backward is in the same node, in another, or absent."""
    node = found["node"].to_numpy()
    flavour = np.full(len(found), "non_reentrant", dtype=object)
    if any("CheckpointWithoutOutput" in str(name) for name in events["name"].cat.categories):
        sequence = events["sequence"].to_numpy()
        inner = np.isin(enclosing(events, backward.nodes, backward.calls), backward.nodes[backward.outer >= 0])
        used = np.isin(sequence[backward.numbered], sequence[backward.calls[inner]])
        flavour[np.isin(node, backward.node_of[used])] = "output_discarding"
    flavour[np.isin(node, backward.outer)] = "reentrant"
    return flavour
