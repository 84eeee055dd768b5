"""A device timeline for runs on CPUs: their traces have no GPU rows, so that operators and gloo stand in for them.

A trace qualifies if nothing in it speaks of a GPU (no device, no call of a GPU runtime, no name of a GPU library) and
its steps are marked: a GPU job that lost its GPU rows must not read as a run on CPUs.

What stands for what:

- **kernels**: the own time of operators on the threads that compute: the one that marks the steps and those that run
  backward nodes. Wrappers (backward nodes, composite operators, calls of ``c10d``) and views compute nothing; what a
  data loader or the saving of a checkpoint runs stays the host's.
- **communication**: the ``gloo:*`` annotations, from the start of the work to its end; a send or receive from its call,
  which may block, to the end of the wait for it. The calls of ``c10d``, issued in the same order, tell kind and peer.
  The process group is recorded nowhere: it is known where a rank has no two of different members, and there its
  communications are numbered within each marked step, so that the ranks' can be matched.
- **launches**: one a kernel, at its start, so that any gap before it is the host's.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from traceaudit.classify import thread_keys
from traceaudit.events import BACKWARD_NODE, Kind, ProcessGroup, Trace
from traceaudit.idle.calls import CAUSES, by_name
from traceaudit.intervals import Array, Intervals, covers, union
from traceaudit.leaves import Leaf
from traceaudit.nesting import Index, innermost
from traceaudit.reading.fields import COLLECTIVE_FIELDS
from traceaudit.steps import OPTIMIZER_STEP, PROFILER_STEP, Selection

WARNING = "no GPU rows: CPU operators stand for the device"

GPU_NAME = re.compile(r"nccl|rccl|cudnn|miopen|cuda|\bhip|_for_gpu|triton", re.I)
TRANSPORT = re.compile(r"^gloo:")
ISSUING = re.compile(r"^c10d::(?!monitored_barrier|barrier)")
POINT_TO_POINT = re.compile(r"^gloo:(send|recv)")
# Operators that do work themselves; all else wraps others, or makes tensors and views of them.
WORKING = re.compile(
    r"^(?!aten::(?:linear|matmul|einsum|layer_norm|batch_norm|rms_norm|scaled_dot_product_attention|conv\d?d?|_?convolution"
    r"|cross_entropy_loss|nll_loss(?:_nd)?|dropout|to|_to_copy|reshape|contiguous|flatten|type_as|item|ones|zeros"
    r"|empty\w*|new_\w+|\w+_like|view\w*|_unsafe_view|_reshape_alias|as_strided\w*|t|transpose|permute|movedim|expand\w*"
    r"|select|slice|narrow|chunk|split\w*|unbind|unflatten|unsqueeze\w*|squeeze\w*|detach\w*|alias|lift_fresh|resolve_\w+"
    r"|result_type|set_|resize_|size|stride|numel|is_\w+|record_stream|_has_\w+)$)(?!c10d::|autograd::|torch::)\w+::"
    r"|^(?:graph_\d+_)?cpp_fused"
)
READING_BACK = re.compile(r"^aten::(?:item|_local_scalar_dense|is_nonzero|nonzero|equal)$")
HOST_WORK = (Leaf.DATA_LOADER, Leaf.CHECKPOINT)
ELEMENTS = {"double": "Double", "float": "Float", "c10::BFloat16": "BFloat16", "c10::Half": "Half", "int": "Int"}
LAUNCH = "host launch"
TEXT_COLUMNS = ("name", "dims", "types", "concrete", "grid")
STEP_NUMBERS = 100_000  # sequence numbers of a step
COMMUNICATION_STREAM = 1000  # streams of communication are numbered from here, one a thread


def on_host(trace: Trace, selection: Selection) -> Trace | None:
    """Return a trace of a run on CPUs with rows that stand for its device, None where it is none."""
    if not _ran_on_cpus(trace, selection):
        return None
    events = trace.events
    compute = _computing(events)
    spans = np.flatnonzero((events["kind"].to_numpy() == Kind.ANNOTATION) & by_name(events, TRANSPORT))
    if not len(compute):
        return None
    issued = _issued(events, spans)
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    called = starts[np.where((issued >= 0) & by_name(events, POINT_TO_POINT)[spans], issued, spans)]
    collectives = _arguments(trace, spans, issued)
    kept = ~by_name(events, READING_BACK)
    kept[spans] = False
    host = events[kept]
    communication = _rows_of(
        events,
        spans,
        start=called,
        end=ends[spans],
        stream=_streams(events, spans),
        collective=np.arange(len(spans)) + len(trace.collectives),
    )
    rows = pd.concat([compute, communication], ignore_index=True)
    rows = rows[rows["end_ns"] > rows["start_ns"]]
    rows = rows.assign(correlation=np.arange(1, len(rows) + 1))
    main = events["thread"].to_numpy()[compute["source"].to_numpy()[0]]
    launches = rows.assign(
        kind=np.int8(Kind.RUNTIME),
        name=LAUNCH,
        end_ns=rows["start_ns"],
        thread=np.where(rows["collective"] >= 0, main, rows["thread"]),
        collective=-1,
    ).assign(stream=-1, device=-1)
    table = _sorted([host, rows.assign(process=0, thread=rows["stream"]), launches], events)
    return replace(trace, events=table, collectives=pd.concat([trace.collectives, collectives], ignore_index=True))


def _ran_on_cpus(trace: Trace, selection: Selection) -> bool:
    """Tell whether nothing speaks of a GPU, and steps are marked or were chosen."""
    events = trace.events
    kinds = events["kind"].to_numpy()
    names = events["name"].cat.categories
    backend = str((trace.metadata.get("distributedInfo") or {}).get("backend", ""))
    if trace.origin.device is not None or (kinds == Kind.RUNTIME).any() or "nccl" in backend:
        return False
    if any(GPU_NAME.search(str(name)) for name in names[np.unique(events["name"].cat.codes[kinds != Kind.FRAME])]):
        return False
    marked = any(PROFILER_STEP.match(str(name)) or OPTIMIZER_STEP.match(str(name)) for name in names)
    return marked or selection.whole_trace or selection.marker is not None


def _computing(events: pd.DataFrame) -> pd.DataFrame:
    """Return the own time of operators that compute, as rows of kernels, those of the main thread first."""
    keys, kinds = thread_keys(events), events["kind"].to_numpy()
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    operators = kinds == Kind.OPERATOR
    working = operators & by_name(events, WORKING)
    host = np.zeros(len(events), np.bool_)
    for leaf, sorts, pattern in CAUSES:
        if leaf in HOST_WORK:
            host |= np.isin(kinds, sorts) & by_name(events, pattern)
    parts = []
    for stream, key in enumerate(_threads(events, keys)):
        own = np.flatnonzero(operators & (keys == key))
        spans = Intervals(starts[own], ends[own])
        bounds = np.unique(np.concatenate((spans.start, spans.end)))
        owner = innermost(spans, bounds[:-1])
        row = own[np.maximum(owner, 0)]
        aside = np.flatnonzero(host & (keys == key))
        loading = covers(union(starts[aside], ends[aside]), bounds[:-1])
        chosen = (owner >= 0) & working[row] & ~loading
        begin, finish = bounds[:-1][chosen], bounds[1:][chosen]
        parts.append(_rows_of(events, row[chosen], start=begin, end=finish, stream=np.full(len(begin), stream)))
    return pd.concat(parts, ignore_index=True) if parts else events.iloc[:0]


def _threads(events: pd.DataFrame, keys: Array) -> list[int]:
    """Return the threads that compute: the one that marks steps, else runs most operators, and the backward's."""
    kinds = events["kind"].to_numpy()
    marks = np.flatnonzero(by_name(events, PROFILER_STEP) | by_name(events, OPTIMIZER_STEP))
    operators = keys[kinds == Kind.OPERATOR]
    if not len(operators):
        return []
    values, counts = np.unique(operators, return_counts=True)
    main = int(keys[marks[0]]) if len(marks) else int(values[np.argmax(counts)])
    backward = np.unique(keys[(kinds == Kind.OPERATOR) & by_name(events, re.compile("^" + re.escape(BACKWARD_NODE)))])
    return [main, *(int(key) for key in backward if key != main)]


def _rows_of(
    events: pd.DataFrame, source: Index, *, start: Array, end: Array, stream: Array, collective: Array | int = -1
) -> pd.DataFrame:
    """Return rows of kernels that stand for rows of the host; ``source`` is their place among the events."""
    taken = events.iloc[source]
    return taken.assign(
        kind=np.int8(Kind.KERNEL),
        name=taken["name"].astype(object),
        start_ns=start,
        end_ns=end,
        stream=stream,
        device=0,
        external=-1,
        sequence=-1,
        forward_thread=-1,
        dims=None,
        types=None,
        concrete=None,
        collective=collective,
        source=source,
    )


def _streams(events: pd.DataFrame, spans: Index) -> Array:
    """Return a stream for each communication: one a thread."""
    return np.asarray(pd.factorize(thread_keys(events)[spans])[0] + COMMUNICATION_STREAM, np.int64)


def _issued(events: pd.DataFrame, spans: Index) -> Array:
    """Return for communications the call of ``c10d`` that issued each, as rows of events; -1 where that is not plain.

    Sends and receives start inside their call. Collectives are queued: they start in the order they were issued, so
    that the last one belongs to the last call, and so on backwards, while each starts after its call.
    """
    starts = events["start_ns"].to_numpy()
    calls = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & by_name(events, ISSUING))
    direct = by_name(events, POINT_TO_POINT)[spans]
    keys, ends = thread_keys(events), events["end_ns"].to_numpy()
    issued = np.full(len(spans), -1, np.int64)
    for key in np.unique(keys[spans[direct]]):
        own, asked = calls[keys[calls] == key], np.flatnonzero(direct & (keys[spans] == key))
        found = innermost(Intervals(starts[own], ends[own]), starts[spans[asked]])
        issued[asked] = np.where(found >= 0, own[np.maximum(found, 0)] if len(own) else -1, -1)
    queued = np.flatnonzero(~direct)
    rest = calls[~np.isin(calls, issued)]
    count = min(len(queued), len(rest))
    last, call = queued[len(queued) - count :], rest[len(rest) - count :]
    fits = bool(count) and bool((starts[call] <= starts[spans[last]]).all())
    if fits:
        issued[last] = call
    return issued


def _arguments(trace: Trace, spans: Index, issued: Array) -> pd.DataFrame:
    """Return the rows of `Trace.collectives` of communications."""
    events = trace.events
    group = _only_group(trace.origin.groups)
    step = _steps(events, issued)
    counted: Counter[tuple[int, str, int]] = Counter()
    columns = {name: events[name].astype(object).to_numpy() for name in ("name", "dims", "types", "concrete")}
    rows = {}
    order = np.lexsort((events["start_ns"].to_numpy()[spans], events["start_ns"].to_numpy()[issued]))
    for place, span, call in zip(order.tolist(), spans[order].tolist(), issued[order].tolist(), strict=True):
        told = columns["name"][call].removeprefix("c10d::") if call >= 0 else columns["name"][span][len("gloo:") :]
        kind = str(told).rstrip("_").removesuffix("_any_source")
        dtype, elements = _size(columns["dims"][span], columns["types"][span])
        peer = _peer(columns["concrete"][call] if call >= 0 else None, group) if kind in ("send", "recv") else -1
        turn = (step[call], kind if peer >= 0 else "", peer)
        numbered = call >= 0 and group is not None and turn[0] >= 0
        counted[turn] += 1
        rows[place] = {
            "collective": kind,
            "group": group.name if group else "",
            "group_description": group.description if group else "",
            "group_ranks": json.dumps(list(group.ranks)) if group else "",
            "group_size": len(group.ranks) if group else -1,
            "dtype": dtype,
            "in_elements": elements,
            "out_elements": -1,
            "seq": turn[0] * STEP_NUMBERS + counted[turn] if numbered else -1,
            "source_rank": peer if kind == "recv" else -1,
            "destination_rank": peer if kind == "send" else -1,
            "root": -1,
        }
    return pd.DataFrame([rows[place] for place in range(len(spans))], columns=list(COLLECTIVE_FIELDS))


def _steps(events: pd.DataFrame, rows: Array) -> dict[int, int]:
    """Return the number of the marked step in which each of some rows began, -1 outside all."""
    names = events["name"].cat.categories
    numbers = np.array([int(mark[1]) if (mark := PROFILER_STEP.match(str(name))) else -1 for name in names], np.int64)
    number = numbers[events["name"].cat.codes.to_numpy()]
    marks = np.flatnonzero((number >= 0) & (events["kind"].to_numpy() == Kind.ANNOTATION))
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    found = innermost(Intervals(starts[marks], ends[marks]), starts[rows])
    step = np.where((found >= 0) & (rows >= 0), number[marks[np.maximum(found, 0)]] if len(marks) else -1, -1)
    return dict(zip(rows.tolist(), step.tolist(), strict=True))


def _only_group(groups: Sequence[ProcessGroup]) -> ProcessGroup | None:
    """Return the one group of a rank, None where it has several of different members: nothing tells which was used."""
    wide = [group for group in groups if len(group.ranks) > 1]
    return wide[0] if len({group.ranks for group in wide}) == 1 else None


def _size(dims: object, types: object) -> tuple[str, int]:
    """Return element type and elements of what is communicated, "" and -1 where not recorded."""
    try:
        shapes, kinds = json.loads(str(dims)), json.loads(str(types))
        elements = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes if shape)
    except (ValueError, TypeError, RecursionError):
        return "", -1
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    return ELEMENTS.get(kind, kind), elements


def _peer(concrete: object, group: ProcessGroup | None) -> int:
    """Return the rank that a send or receive names (the third argument of the call, counted within its group)."""
    try:
        place = int(json.loads(str(concrete))[2])
    except (ValueError, TypeError, IndexError, RecursionError):
        return -1
    if group is None:
        return place
    return group.ranks[place] if 0 <= place < len(group.ranks) else -1


def _sorted(parts: Sequence[pd.DataFrame], like: pd.DataFrame) -> pd.DataFrame:
    """Return rows in one table with the columns and order of `traceaudit.events`; launches come behind what runs."""
    table = pd.concat(
        [part.assign(**{name: part[name].astype(object) for name in TEXT_COLUMNS}) for part in parts], ignore_index=True
    )[list(like.columns)]
    length = (table["end_ns"] - table["start_ns"]).to_numpy()
    order = np.lexsort((-length, table["start_ns"].to_numpy()))
    table = table.iloc[order].reset_index(drop=True)
    for name in like.columns:
        if name in TEXT_COLUMNS:
            table[name] = pd.Categorical(table[name])
        else:
            table[name] = table[name].astype(like[name].dtype if name != "correlation" else np.int64)
    return table
