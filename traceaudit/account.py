"""One rank's account: all that the job needs to know of a trace, small enough to keep for every rank."""

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.checkpointing import summary
from traceaudit.classify import State, activities, main_device
from traceaudit.events import GPU_KINDS, Losses, Origin, Trace
from traceaudit.flops import Counted, counted
from traceaudit.host_device import on_host
from traceaudit.idle.blocking import not_blocking
from traceaudit.idle.calls import host_activity
from traceaudit.idle.facts import host_facts
from traceaudit.idle.gaps import resolve
from traceaudit.idle.launches import throughput
from traceaudit.idle.table import named_gaps
from traceaudit.intervals import Array, Intervals, cross, elapsed
from traceaudit.leaves import Bucket, Leaf
from traceaudit.memory import give_back
from traceaudit.mfu.kernel_work import (
    distinct,
    matrix_shapes,
    owned_compute,
    signature_codes,
    slowed_by_overlap,
    work_classes,
)
from traceaudit.pieces import coarse, decided_pieces
from traceaudit.ranks.instances import small
from traceaudit.ranks.members import categorical
from traceaudit.reading.normalise import parse_ranks
from traceaudit.recompute import recompute
from traceaudit.schedule import schedule
from traceaudit.steps import Selection, Steps, step_windows
from traceaudit.timeline import base_states, busy, overlapped, within

# Classes of time that a late rank can have spent more of than the rank that waits for it.
CLASSES = (
    Leaf.NOT_SPLIT,
    Leaf.KERNELS,
    Leaf.OFFLOAD_COPY,
    *(leaf for leaf in Leaf if leaf.bucket in (Bucket.HOST_GAP, Bucket.UNATTRIBUTED)),
)

DTYPE_BYTES = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "BFloat16": 2,
    "Half": 2,
    "Short": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}


@dataclass(frozen=True)
class RankAccount:
    """What one trace says about its rank, by step; times on the rank's own clock.

    Attributes:
        origin: where the trace came from.
        losses: events that could not be used.
        events: rows kept from the file.
        first_ns, last_ns: extent of the recording; 0 without events.
        steps: windows; None for a rank without GPU activity, which has no account beyond this.
        decided: ``step, leaf, ns`` of idle time and host copies.
        compute: ``step, family, recompute, dtype, ns, counted_ns, known_ns, flops, executed`` of compute time, of the
            parts of it in kernels whose FLOPs are counted and whose FLOPs or bytes are known, of the FLOPs that count
            as the model's, and of those that the hardware ran.
        work: compute by equal work (`kernel_work.work_classes`).
        overlap: what kernels took longer beside communication (`kernel_work.slowed_by_overlap`).
        shapes: matrix kernels by the shapes of their operator (`kernel_work.matrix_shapes`).
        counting: work that was inferred, and bounds that stand for unknown lengths, by name.
        exposed: ``step, start_ns, end_ns, communication, trailing`` pieces owned by a communication; trailing ones
            are the idle time between its end and the kernel that depended on it.
        communications: one row a communication activity: ``start_ns, end_ns, kind, group, group_description,
            group_size, bytes, seq, source_rank, destination_rank, root, recompute, not_blocking_ns`` (see
            `traceaudit.idle.blocking`); ``group`` is a tuple of ranks, or missing. Texts and groups are categories, and
            integers that fit have 32 bits: there are millions of rows.
        kernels: ``name, state, family, dtype, count, ns, flops, bytes, known_ns`` summed over the windows; `flops` as
            the hardware ran them; and of the longest run ``start_ns, end_ns, stream``.
        signatures: ``step, signature, name, family, count, ns`` of compute that was not recomputed; a signature is a
            hash of kernel, grid and shapes, equal on all ranks.
        progress: ``place, cls, ns``: time by class (`Leaf`; compute as NOT_SPLIT, recompute as KERNELS) between one
            start or end of a communication and the next. Places number starts and ends in the order of time
            (`edge_order`); at place 0 stands the time since the beginning of the first window.
        on_host: no GPU rows, and operators of the CPU stand for them (`traceaudit.host_device`).
        schedule: forward and backward work of a rank of a pipeline (`traceaudit.schedule`).
        memo: ``step, busy_ns, comm_ns, overlapped_comm_ns``.
        matrix_products: matrix products with shapes, and those without.
        tf32: fp32 matrix kernels whose names tell that they use TF32.
        sharded: the data parallelism is sharded (FSDP annotations).
        device: index of the rank's GPU on its host.
        other_devices: GPU rows on other devices.
        gaps: the largest idle gaps, columns `gap_table.GAP_COLUMNS`.
        host_gaps: idle time by leaf and call, columns `gap_table.SUM_COLUMNS`.
        host_facts: what `host_facts.host_facts` says.
        throughput: what `launches.throughput` says.
        recompute: what is known of the activation checkpointing, columns `checkpointing.COLUMNS`.
        coarse: one step in equal bins, `coarse_step` (`pieces.coarse`).
        pieces: where in time what is decided was, columns `pieces.COLUMNS`; empty unless asked for.
    """

    origin: Origin
    losses: Losses
    events: int
    first_ns: int
    last_ns: int
    steps: Steps | None
    decided: pd.DataFrame
    compute: pd.DataFrame
    exposed: pd.DataFrame
    communications: pd.DataFrame
    kernels: pd.DataFrame
    signatures: pd.DataFrame
    progress: pd.DataFrame
    schedule: pd.DataFrame
    memo: pd.DataFrame
    matrix_products: tuple[int, int]
    tf32: bool
    sharded: bool
    device: int
    other_devices: int
    gaps: pd.DataFrame = field(default_factory=pd.DataFrame)
    host_gaps: pd.DataFrame = field(default_factory=pd.DataFrame)
    host_facts: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    recompute: pd.DataFrame = field(default_factory=pd.DataFrame)
    work: pd.DataFrame = field(default_factory=pd.DataFrame)
    overlap: pd.DataFrame = field(default_factory=pd.DataFrame)
    shapes: pd.DataFrame = field(default_factory=pd.DataFrame)
    counting: dict[str, int] = field(default_factory=dict)
    on_host: bool = False
    coarse_step: int = -1
    coarse: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    pieces: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def rank(self) -> int:
        """The rank; only asked once every account of a job has one."""
        if self.origin.rank is None:
            raise ValueError("the rank of this account is not known yet")
        return self.origin.rank


def account(trace: Trace, selection: Selection, *, keep_pieces: bool = False) -> RankAccount:
    """Reduce a trace to its account; with `keep_pieces` it says where in time everything was."""
    give_back()  # what reading took
    table = activities(trace)
    events = trace.events
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    first, last = (int(starts[0]), int(ends.max())) if len(events) else (0, 0)
    if not len(table):
        standing = on_host(trace, selection)
        if standing is None:
            return without_gpu(trace.origin, trace.losses, len(events), first, last)
        standing_for = account(standing, selection, keep_pieces=keep_pieces)
        return replace(standing_for, events=len(events), first_ns=first, last_ns=last, on_host=True)
    steps = step_windows(trace, table, selection)
    windows = steps.windows
    pieces = base_states(
        table,
        min(int(table["start_ns"].to_numpy()[0]), int(windows.start[0])),
        max(int(table["end_ns"].max()), int(windows.end[-1])),
    )
    host = host_activity(trace, table)
    redone = recompute(trace, table)
    again = redone.again
    idle = _with_recompute(resolve(trace, table, pieces, steps.main_thread, host), pieces, again)
    gaps, host_gaps = named_gaps(trace, table, idle, steps, host)
    give_back()
    products = counted(trace, table)
    codes = signature_codes(events, table)
    signature = distinct(codes)
    time = owned_compute(pieces, steps)
    communication = np.flatnonzero(table["state"].to_numpy() == State.COMMUNICATION)
    give_back()
    names = [str(name) for name in events["name"].cat.categories]
    coarse_step, coarsely = coarse(table, pieces, idle, steps, again)
    finely = decided_pieces(events, table, pieces, idle, steps, again) if keep_pieces else pd.DataFrame()
    return RankAccount(
        origin=trace.origin,
        losses=trace.losses,
        events=len(events),
        first_ns=first,
        last_ns=last,
        steps=steps,
        decided=_decided(idle, steps),
        compute=_compute(table, time, steps, again, products),
        exposed=_exposed(pieces, idle, steps, communication),
        communications=_communications(
            trace, table, communication, again, not_blocking(events, table, pieces, host)[communication]
        ),
        kernels=_kernels(events, table, windows, products),
        signatures=_signatures(events, table, time, codes, signature, again),
        progress=_progress(table, pieces, idle, again, communication, int(windows.start[0])),
        schedule=schedule(trace, table, pieces, idle, steps, again),
        memo=_memo(table, steps),
        matrix_products=(products.operators, products.unknown),
        work=work_classes(table, time, again, products),
        overlap=slowed_by_overlap(table, time, again, signature),
        shapes=matrix_shapes(events, table, time, products),
        counting={"inferred": products.inferred, "estimated": products.estimated},
        tf32=any("tf32" in name or "s1688" in name for name in names),
        sharded=any(name.startswith(("FSDP::", "FullyShardedDataParallel")) for name in names),
        device=main_device(trace),
        other_devices=int((events["kind"].isin(GPU_KINDS) & (events["device"] != main_device(trace))).sum()),
        gaps=gaps,
        host_gaps=host_gaps,
        host_facts=host_facts(trace, table, idle, steps, host),
        throughput=throughput(trace, table, steps),
        recompute=summary(trace, table, redone, steps),
        coarse_step=coarse_step,
        coarse=coarsely,
        pieces=finely,
    )


def without_gpu(origin: Origin, losses: Losses, events: int, first: int, last: int) -> RankAccount:
    """Return the account of a rank without GPU activity."""
    none = pd.DataFrame()
    return RankAccount(
        origin=origin,
        losses=losses,
        events=events,
        first_ns=first,
        last_ns=last,
        steps=None,
        decided=none,
        compute=none,
        exposed=none,
        communications=none,
        kernels=none,
        signatures=none,
        progress=none,
        schedule=none,
        memo=none,
        matrix_products=(0, 0),
        tf32=False,
        sharded=False,
        device=-1,
        other_devices=0,
    )


def _parts(table: pd.DataFrame, windows: Intervals) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Intervals]:
    """Cut pieces at the windows: indices of piece and window, and the extents."""
    common = cross(Intervals(table["start_ns"].to_numpy(), table["end_ns"].to_numpy()), windows)
    return common.left, common.right, Intervals(common.start, common.end)


def _with_recompute(idle: pd.DataFrame, pieces: pd.DataFrame, again: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """Give host copies of a recomputed region, the states of its random generators, to recompute."""
    copying = pieces[pieces["state"] == State.HOST_COPY]
    redone = copying["start_ns"].to_numpy()[again[copying["owner"].to_numpy()]]
    if not len(redone):
        return idle
    leaf = idle["leaf"].to_numpy()
    return idle.assign(leaf=np.where(np.isin(idle["start_ns"].to_numpy(), redone), int(Leaf.KERNELS), leaf))


def _decided(idle: pd.DataFrame, steps: Steps) -> pd.DataFrame:
    piece, window, part = _parts(idle, steps.windows)
    settled = idle["after"].to_numpy()[piece] < 0
    frame = pd.DataFrame(
        {
            "step": steps.step[window][settled],
            "leaf": idle["leaf"].to_numpy()[piece][settled].astype(np.int64),
            "ns": (part.end - part.start)[settled],
        }
    )
    return frame.groupby(["step", "leaf"], as_index=False)[["ns"]].sum()


def _compute(
    table: pd.DataFrame, time: pd.DataFrame, steps: Steps, again: npt.NDArray[np.bool_], work: Counted
) -> pd.DataFrame:
    owner, ns = time["owner"].to_numpy(), time["ns"].to_numpy()
    spent = pd.DataFrame(
        {
            "step": time["step"],
            "owner": owner,
            "ns": ns,
            "counted_ns": np.where(work.flops[owner] > 0, ns, 0),
            "known_ns": np.where(work.work[owner] >= 0, ns, 0),
            "flops": 0.0,
            "executed": 0.0,
        }
    )
    starts = table["start_ns"].to_numpy()
    begun = cross(Intervals(starts, starts + 1), steps.windows)
    done = pd.DataFrame({"step": steps.step[begun.right], "owner": begun.left, "ns": 0, "counted_ns": 0, "known_ns": 0})
    done = done.assign(flops=work.flops[begun.left], executed=work.executed[begun.left])
    both = pd.concat([spent, done[done["executed"] > 0]], ignore_index=True)
    owners = both["owner"].to_numpy()
    both = both.assign(
        family=table["family"].to_numpy()[owners].astype(np.int64), recompute=again[owners], dtype=work.dtype[owners]
    )
    columns = ["ns", "counted_ns", "known_ns", "flops", "executed"]
    return both.groupby(["step", "family", "recompute", "dtype"], as_index=False)[columns].sum()


def _exposed(
    pieces: pd.DataFrame, idle: pd.DataFrame, steps: Steps, communication: npt.NDArray[np.intp]
) -> pd.DataFrame:
    owned = pieces[pieces["state"] == State.COMMUNICATION][["start_ns", "end_ns", "owner"]].assign(trailing=False)
    after = idle[idle["after"] >= 0][["start_ns", "end_ns", "after"]].rename(columns={"after": "owner"})
    table = pd.concat([owned, after.assign(trailing=True)], ignore_index=True)
    piece, window, part = _parts(table, steps.windows)
    index = np.searchsorted(communication, table["owner"].to_numpy()[piece])
    return pd.DataFrame(
        {
            "step": steps.step[window].astype(np.int32),
            "start_ns": part.start,
            "end_ns": part.end,
            "communication": index.astype(np.int32),
            "trailing": table["trailing"].to_numpy(dtype=np.bool_)[piece],
        }
    )


def _communications(
    trace: Trace,
    table: pd.DataFrame,
    chosen: npt.NDArray[np.intp],
    again: npt.NDArray[np.bool_],
    not_blocking_ns: Array,
) -> pd.DataFrame:
    """Resolve the arguments of each communication; group members cut short are completed from the job's groups."""
    rows = table.iloc[chosen]
    listed = {group.name: group for group in trace.origin.groups}
    # one look at each distinct set of arguments
    arguments = trace.collectives
    args = rows["collective"].to_numpy()
    members: list[tuple[int, ...] | None] = []
    seen: dict[tuple[str, str], tuple[int, ...] | None] = {}
    for text, name in zip(arguments["group_ranks"], arguments["group"].astype(str), strict=True):
        key = (str(text), name)
        if key not in seen:
            known = parse_ranks(text) if text else None
            seen[key] = known or (listed[name].ranks if name in listed else None) or None
        members.append(seen[key])
    present = args >= 0
    at = np.maximum(args, 0)

    def column(name: str, otherwise: int | str) -> npt.NDArray[np.object_]:
        result = np.full(len(args), otherwise, dtype=object)
        result[present] = arguments[name].to_numpy(dtype=object)[args[present]]
        return result

    size = np.array([DTYPE_BYTES.get(str(name), 1) for name in column("dtype", "")], np.int64)
    elements = np.maximum(column("in_elements", -1).astype(np.int64), column("out_elements", -1).astype(np.int64))
    groups = list(dict.fromkeys(members[index] for index in np.unique(at[present]) if members[index] is not None))
    number = {group: code for code, group in enumerate(groups)}
    code_of = np.array([-1 if own is None else number[own] for own in (*members, None)], np.int64)
    return compact(
        pd.DataFrame(
            {
                "start_ns": rows["start_ns"].to_numpy(),
                "end_ns": rows["end_ns"].to_numpy(),
                "kind": rows["kind"].to_numpy(dtype=object),
                "direction": [str(name) if str(name) in ("send", "recv") else "" for name in column("collective", "")],
                "group": categorical(code_of[args], groups),
                "group_description": column("group_description", ""),
                "group_size": column("group_size", -1).astype(np.int64),
                "bytes": np.where(elements >= 0, elements * size, -1),
                "seq": column("seq", -1).astype(np.int64),
                "source_rank": column("source_rank", -1).astype(np.int64),
                "destination_rank": column("destination_rank", -1).astype(np.int64),
                "root": rows["root"].to_numpy(),
                "stream": rows["stream"].to_numpy(),
                "recompute": again[chosen],
                "not_blocking_ns": not_blocking_ns,
            }
        )
    )


def compact(communications: pd.DataFrame) -> pd.DataFrame:
    """Return `RankAccount.communications` with texts as categories and in 32 bits what fits."""
    texts = ("kind", "direction", "group_description")
    integers = ("group_size", "seq", "source_rank", "destination_rank", "root", "stream", "not_blocking_ns")
    return communications.assign(
        **{name: pd.Categorical(communications[name].to_numpy(dtype=object)) for name in texts},
        **{name: small(communications[name].to_numpy(dtype=np.int64)) for name in integers},
    )


def _kernels(events: pd.DataFrame, table: pd.DataFrame, windows: Intervals, work: Counted) -> pd.DataFrame:
    activity, _, part = _parts(table, windows)
    ns = part.end - part.start
    frame = pd.DataFrame(
        {
            "name": events["name"].cat.codes.to_numpy()[table["row"].to_numpy()[activity]],
            "state": table["state"].to_numpy()[activity],
            "family": table["family"].to_numpy()[activity],
            "dtype": work.dtype[activity],
            "count": 1,
            "ns": ns,
            "flops": work.executed[activity],
            "bytes": np.nan_to_num(work.bytes[activity]),
            "known_ns": np.where(work.work[activity] >= 0, ns, 0),
        }
    )
    keys, columns = ["name", "state", "family", "dtype"], ["count", "ns", "flops", "bytes", "known_ns"]
    longest = frame[keys].iloc[np.argsort(-ns, kind="stable")].drop_duplicates(keys)
    at = activity[longest.index.to_numpy()]
    places = {name: table[name].to_numpy()[at].astype(np.int64) for name in ("start_ns", "end_ns", "stream")}
    frame = frame.groupby(keys, as_index=False)[columns].sum().merge(longest.assign(**places), on=keys)
    return frame.assign(name=events["name"].cat.categories.to_numpy(dtype=object)[frame["name"].to_numpy()])


def _signatures(
    events: pd.DataFrame,
    table: pd.DataFrame,
    time: pd.DataFrame,
    codes: pd.DataFrame,
    signature: Array,
    again: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """Sum up owned compute time by what ran: kernel, grid, and the shapes of the operator that launched it."""
    owner = time["owner"].to_numpy()
    texts_of = [[*map(str, events[column].cat.categories), ""] for column in codes]  # the last one for a code of -1
    first = codes.iloc[np.unique(signature, return_index=True)[1]]
    texts = ["|".join(own[code] for own, code in zip(texts_of, row, strict=True)) for row in first.to_numpy().tolist()]
    hashes = np.array([int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) for text in texts], np.int64)
    frame = pd.DataFrame(
        {
            "step": time["step"],
            "signature": hashes[signature[owner]],
            "name": codes["name"].to_numpy()[owner],
            "family": table["family"].to_numpy()[owner].astype(np.int64),
            "count": ~time.duplicated(["step", "owner"]),  # one of several pieces of a run in a step
            "ns": time["ns"],
        }
    )[~again[owner]]
    sums = frame.groupby(["step", "signature", "name", "family"], as_index=False)[["count", "ns"]].sum()
    named: pd.DataFrame = sums.assign(
        name=events["name"].cat.categories.to_numpy(dtype=object)[sums["name"].to_numpy()]
    )
    return named


def edge_order(start: Array, end: Array) -> npt.NDArray[np.intp]:
    """Return the starts and ends of communications in the order of time: 2 x row for a start, 2 x row + 1 for an end.

    >>> edge_order(np.array([0, 3]), np.array([5, 4])).tolist()
    [0, 2, 3, 1]
    """
    return np.argsort(np.stack([start, end], axis=1).ravel(), kind="stable")


def _progress(
    table: pd.DataFrame,
    pieces: pd.DataFrame,
    idle: pd.DataFrame,
    again: npt.NDArray[np.bool_],
    communication: npt.NDArray[np.intp],
    begun_ns: int,
) -> pd.DataFrame:
    computing = pieces[pieces["state"] == State.COMPUTE]
    redone = again[computing["owner"].to_numpy()]
    settled = idle[idle["after"] < 0]
    start = np.concatenate((computing["start_ns"].to_numpy(), settled["start_ns"].to_numpy()))
    end = np.concatenate((computing["end_ns"].to_numpy(), settled["end_ns"].to_numpy()))
    leaf = np.concatenate((np.where(redone, int(Leaf.KERNELS), int(Leaf.NOT_SPLIT)), settled["leaf"].to_numpy()))
    edges = [table[name].to_numpy()[communication] for name in ("start_ns", "end_ns")]
    instant = np.stack(edges, axis=1).ravel()[edge_order(*edges)]
    parts = []
    for cls in CLASSES:
        own = leaf == cls
        order = np.argsort(start[own], kind="stable")
        spans = Intervals(start[own][order], end[own][order])
        ns = np.diff(elapsed(spans, instant), prepend=elapsed(spans, np.array([begun_ns])))
        place = np.flatnonzero(ns)
        parts.append(pd.DataFrame({"place": place.astype(np.int32), "cls": np.int16(cls), "ns": ns[place]}))
    return pd.concat(parts, ignore_index=True)


def _memo(table: pd.DataFrame, steps: Steps) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": steps.step,
            "busy_ns": within(busy(table), steps.windows),
            "comm_ns": within(busy(table, State.COMMUNICATION), steps.windows),
            "overlapped_comm_ns": within(overlapped(table), steps.windows),
        }
    )
