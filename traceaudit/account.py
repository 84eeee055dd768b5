"""One rank's account: all that the job needs to know of a trace, small enough to keep for every rank."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State, activities, enclosing, main_device
from traceaudit.events import GPU_KINDS, Kind, Losses, Origin, Trace
from traceaudit.flops import counted
from traceaudit.gaps import resolve
from traceaudit.intervals import Intervals, cross, elapsed
from traceaudit.leaves import Bucket, Leaf
from traceaudit.normalise import parse_ranks
from traceaudit.recompute import recomputed
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
        compute: ``step, family, recompute, dtype, ns, counted_ns, flops`` of compute time, of the part of it in kernels
            whose FLOPs are counted, and of those FLOPs.
        exposed: ``step, start_ns, end_ns, communication, trailing`` pieces owned by a communication; trailing ones
            are the idle time between its end and the kernel that depended on it.
        communications: one row a communication activity: ``start_ns, end_ns, kind, group, group_description,
            group_size, bytes, seq, source_rank, destination_rank, root, recompute``; ``group`` is a tuple of ranks or
            None.
        kernels: ``name, state, family, count, ns, flops`` summed over the windows.
        signatures: ``step, signature, name, family, count, ns`` of compute that was not recomputed; a signature is a
            hash of kernel, grid and shapes, equal on all ranks.
        progress: time by class (columns, `Leaf`; compute as NOT_SPLIT, recompute as KERNELS) from the beginning of the
            first window to the start and to the end of each communication: int64, communications x 2 x classes.
        memo: ``step, busy_ns, comm_ns, overlapped_comm_ns``.
        matrix_products: matrix products with shapes, and those without.
        tf32: fp32 matrix kernels whose names tell that they use TF32.
        sharded: the data parallelism is sharded (FSDP annotations).
        device: index of the rank's GPU on its host.
        other_devices: GPU rows on other devices.
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
    progress: npt.NDArray[np.int64]
    memo: pd.DataFrame
    matrix_products: tuple[int, int]
    tf32: bool
    sharded: bool
    device: int
    other_devices: int

    @property
    def rank(self) -> int:
        """The rank; only asked once every account of a job has one."""
        if self.origin.rank is None:
            raise ValueError("the rank of this account is not known yet")
        return self.origin.rank


def account(trace: Trace, selection: Selection) -> RankAccount:
    """Reduce a trace to its account."""
    table = activities(trace)
    events = trace.events
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    first, last = (int(starts[0]), int(ends.max())) if len(events) else (0, 0)
    if not len(table):
        return _without_gpu(trace, first, last)
    steps = step_windows(trace, table, selection)
    windows = steps.windows
    pieces = base_states(
        table,
        min(int(table["start_ns"].to_numpy()[0]), int(windows.start[0])),
        max(int(table["end_ns"].max()), int(windows.end[-1])),
    )
    idle = resolve(trace, table, pieces, steps.main_thread)
    again = recomputed(trace, table)
    products = counted(trace, table)
    communication = np.flatnonzero(table["state"].to_numpy() == State.COMMUNICATION)
    names = [str(name) for name in events["name"].cat.categories]
    return RankAccount(
        origin=trace.origin,
        losses=trace.losses,
        events=len(events),
        first_ns=first,
        last_ns=last,
        steps=steps,
        decided=_decided(idle, steps),
        compute=_compute(table, pieces, steps, again, products.flops, products.dtype),
        exposed=_exposed(pieces, idle, steps, communication),
        communications=_communications(trace, table, communication, again),
        kernels=_kernels(events, table, windows, products.flops),
        signatures=_signatures(events, table, pieces, steps, again),
        progress=_progress(table, pieces, idle, again, communication, int(windows.start[0])),
        memo=_memo(table, steps),
        matrix_products=(products.operators, products.unknown),
        tf32=any("tf32" in name or "s1688" in name for name in names),
        sharded=any(name.startswith(("FSDP::", "FullyShardedDataParallel")) for name in names),
        device=main_device(trace),
        other_devices=int((events["kind"].isin(GPU_KINDS) & (events["device"] != main_device(trace))).sum()),
    )


def _without_gpu(trace: Trace, first: int, last: int) -> RankAccount:
    none = pd.DataFrame()
    return RankAccount(
        origin=trace.origin,
        losses=trace.losses,
        events=len(trace.events),
        first_ns=first,
        last_ns=last,
        steps=None,
        decided=none,
        compute=none,
        exposed=none,
        communications=none,
        kernels=none,
        signatures=none,
        progress=np.empty((0, 2, 0), np.int64),
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
    table: pd.DataFrame,
    pieces: pd.DataFrame,
    steps: Steps,
    again: npt.NDArray[np.bool_],
    flops: npt.NDArray[np.float64],
    dtype: npt.NDArray[np.object_],
) -> pd.DataFrame:
    owned = pieces[pieces["state"] == State.COMPUTE]
    piece, window, part = _parts(owned, steps.windows)
    owner = owned["owner"].to_numpy()[piece]
    ns = part.end - part.start
    counted_ns = np.where(flops[owner] > 0, ns, 0)
    time = pd.DataFrame({"step": steps.step[window], "owner": owner, "ns": ns, "counted_ns": counted_ns, "flops": 0.0})
    starts = table["start_ns"].to_numpy()
    begun = cross(Intervals(starts, starts + 1), steps.windows)
    work = pd.DataFrame({"step": steps.step[begun.right], "owner": begun.left, "flops": flops[begun.left]})
    work = work.assign(ns=0, counted_ns=0)
    both = pd.concat([time, work[work["flops"] > 0]], ignore_index=True)
    owners = both["owner"].to_numpy()
    both = both.assign(
        family=table["family"].to_numpy()[owners].astype(np.int64), recompute=again[owners], dtype=dtype[owners]
    )
    return both.groupby(["step", "family", "recompute", "dtype"], as_index=False)[["ns", "counted_ns", "flops"]].sum()


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
            "step": steps.step[window],
            "start_ns": part.start,
            "end_ns": part.end,
            "communication": index.astype(np.int64),
            "trailing": table["trailing"].to_numpy(dtype=np.bool_)[piece],
        }
    )


def _communications(
    trace: Trace, table: pd.DataFrame, chosen: npt.NDArray[np.intp], again: npt.NDArray[np.bool_]
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
    group = np.empty(len(args), dtype=object)
    group[:] = [members[index] if has else None for index, has in zip(at, present, strict=True)]
    return pd.DataFrame(
        {
            "start_ns": rows["start_ns"].to_numpy(),
            "end_ns": rows["end_ns"].to_numpy(),
            "kind": rows["kind"].to_numpy(dtype=object),
            "direction": [str(name) if str(name) in ("send", "recv") else "" for name in column("collective", "")],
            "group": group,
            "group_description": column("group_description", ""),
            "group_size": column("group_size", -1).astype(np.int64),
            "bytes": np.where(elements >= 0, elements * size, -1),
            "seq": column("seq", -1).astype(np.int64),
            "source_rank": column("source_rank", -1).astype(np.int64),
            "destination_rank": column("destination_rank", -1).astype(np.int64),
            "root": rows["root"].to_numpy(),
            "stream": rows["stream"].to_numpy(),
            "recompute": again[chosen],
        }
    )


def _kernels(
    events: pd.DataFrame, table: pd.DataFrame, windows: Intervals, flops: npt.NDArray[np.float64]
) -> pd.DataFrame:
    activity, _, part = _parts(table, windows)
    frame = pd.DataFrame(
        {
            "name": events["name"].cat.codes.to_numpy()[table["row"].to_numpy()[activity]],
            "state": table["state"].to_numpy()[activity],
            "family": table["family"].to_numpy()[activity],
            "count": 1,
            "ns": part.end - part.start,
            "flops": flops[activity],
        }
    )
    frame = frame.groupby(["name", "state", "family"], as_index=False)[["count", "ns", "flops"]].sum()
    return frame.assign(name=events["name"].cat.categories.to_numpy(dtype=object)[frame["name"].to_numpy()])


def _signatures(
    events: pd.DataFrame, table: pd.DataFrame, pieces: pd.DataFrame, steps: Steps, again: npt.NDArray[np.bool_]
) -> pd.DataFrame:
    """Sum up owned compute time by what ran: kernel, grid, and the shapes of the operator that launched it."""
    owned = pieces[pieces["state"] == State.COMPUTE]
    piece, window, part = _parts(owned, steps.windows)
    owner = owned["owner"].to_numpy()[piece]
    kept = ~again[owner]
    rows = table["row"].to_numpy()
    shaped = np.flatnonzero((events["kind"].to_numpy() == Kind.OPERATOR) & events["dims"].notna().to_numpy())
    operator = enclosing(events, shaped, table["launch"].to_numpy())
    dims = np.where(operator >= 0, events["dims"].cat.codes.to_numpy()[np.maximum(operator, 0)], -1)
    codes = pd.DataFrame(
        {
            "name": events["name"].cat.codes.to_numpy()[rows],
            "grid": events["grid"].cat.codes.to_numpy()[rows],
            "dims": dims,
        }
    )
    distinct, inverse = np.unique(codes.to_numpy(), axis=0, return_inverse=True)
    texts = [
        "|".join(
            str(events[column].cat.categories[code]) if code >= 0 else ""
            for column, code in zip(codes, row, strict=True)
        )
        for row in distinct
    ]
    hashes = np.array([int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) for text in texts], np.int64)
    frame = pd.DataFrame(
        {
            "step": steps.step[window],
            "owner": owner,
            "signature": hashes[inverse.ravel()[owner]],
            "name": codes["name"].to_numpy()[owner],
            "family": table["family"].to_numpy()[owner].astype(np.int64),
            "ns": part.end - part.start,
        }
    )[kept]
    sums = frame.groupby(["step", "signature", "name", "family"], as_index=False).agg(
        count=("owner", "nunique"), ns=("ns", "sum")
    )
    named: pd.DataFrame = sums.assign(
        name=events["name"].cat.categories.to_numpy(dtype=object)[sums["name"].to_numpy()]
    )
    return named


def _progress(
    table: pd.DataFrame,
    pieces: pd.DataFrame,
    idle: pd.DataFrame,
    again: npt.NDArray[np.bool_],
    communication: npt.NDArray[np.intp],
    begun_ns: int,
) -> npt.NDArray[np.int64]:
    """Return the time of each class up to the start and the end of each communication."""
    computing = pieces[pieces["state"] == State.COMPUTE]
    redone = again[computing["owner"].to_numpy()]
    settled = idle[idle["after"] < 0]
    start = np.concatenate((computing["start_ns"].to_numpy(), settled["start_ns"].to_numpy()))
    end = np.concatenate((computing["end_ns"].to_numpy(), settled["end_ns"].to_numpy()))
    leaf = np.concatenate((np.where(redone, int(Leaf.KERNELS), int(Leaf.NOT_SPLIT)), settled["leaf"].to_numpy()))
    at = np.stack([table[name].to_numpy()[communication] for name in ("start_ns", "end_ns")], axis=1)
    result = np.zeros((*at.shape, len(CLASSES)), np.int64)
    for column, cls in enumerate(CLASSES):
        own = leaf == cls
        order = np.argsort(start[own], kind="stable")
        spans = Intervals(start[own][order], end[own][order])
        result[:, :, column] = elapsed(spans, at.ravel()).reshape(at.shape) - elapsed(spans, np.array([begun_ns]))[0]
    return result


def _memo(table: pd.DataFrame, steps: Steps) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": steps.step,
            "busy_ns": within(busy(table), steps.windows),
            "comm_ns": within(busy(table, State.COMMUNICATION), steps.windows),
            "overlapped_comm_ns": within(overlapped(table), steps.windows),
        }
    )
