"""Give every nanosecond of every step of every rank to one leaf, and check that they add up (attribution rule 3)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.errors import PartitionError
from traceaudit.intervals import Array, Intervals, cross, outside, union
from traceaudit.leaves import Leaf
from traceaudit.memory import give_back
from traceaudit.mfu.roofline import Split
from traceaudit.ranks.align import Clock, by_rank
from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.blame import WAIT_LEAVES, Blame, blame
from traceaudit.ranks.bubbles import Bubbles, divide
from traceaudit.ranks.collectives import Layout
from traceaudit.ranks.instances import ROWS, Integers, small, stretches, summed
from traceaudit.ranks.links import transfers
from traceaudit.ranks.matching import Matching
from traceaudit.ranks.members import each
from traceaudit.ranks.owned import Owned
from traceaudit.ranks.peers import Peers

TRACE_CUT_SHARE = 0.01  # of the first step, above which it is left out: profilers began at different instants


@dataclass(frozen=True)
class Job:
    """The ranks of a job, matched and aligned: what attribution works on.

    Attributes:
        accounts: of the ranks with GPU activity.
        communications: of all of them (`traceaudit.ranks.collectives.gather`).
        matching, arrivals: of the rows of `communications`.
        clock: how the ranks' clocks relate.
        plan: pipeline stages and the like.
        peers: kernels of each rank against the others'.
        owned: what the accounts no longer hold; empty once it is attributed.
    """

    accounts: Sequence[RankAccount]
    communications: pd.DataFrame
    matching: Matching
    arrivals: Arrivals
    clock: Clock
    plan: Layout
    peers: Peers
    owned: Owned


@dataclass(frozen=True)
class Attribution:
    """The partition of the analysed steps.

    Attributes:
        windows: ``rank, step, start_ns, end_ns, window_ns``.
        ledger: ``rank, step, leaf, ns``; leaves of a rank's step add up to its window.
        exposed: ``rank, step, leaf, ns, row, from_ns`` of the time owned by communications; `from_ns` is where the
            stretch begins that the leaf was taken from, waits of several causes one after the other, since `begun_ns`.
        begun_ns: by rank, the beginning of its recording.
        waited: ``rank, step, leaf, ns`` of the waits at the last step's end.
        blame: origins of the waits for late ranks.
        bubbles: how the waits of a pipeline divide.
        carried: transfers by instance (`traceaudit.ranks.links.transfers`).
        left_out: (None, step, reason) of steps that turned out not to represent the run.
    """

    windows: pd.DataFrame
    ledger: pd.DataFrame
    exposed: pd.DataFrame
    begun_ns: Array
    blame: Blame
    bubbles: Bubbles
    carried: pd.DataFrame
    left_out: tuple[tuple[int | None, int, str], ...]
    waited: pd.DataFrame = field(default_factory=pd.DataFrame)


def windows(accounts: Sequence[RankAccount]) -> tuple[pd.DataFrame, list[tuple[int | None, int, str]], list[str]]:
    """Return the windows of the steps that every rank recorded, the steps left out, and warnings."""
    frames: list[pd.DataFrame] = []
    left_out: list[tuple[int | None, int, str]] = []
    for account in accounts:
        if account.steps is not None:
            steps = account.steps
            start, end = steps.windows
            frames.append(pd.DataFrame({"rank": account.rank, "step": steps.step, "start_ns": start, "end_ns": end}))
            left_out += [(account.rank, step, reason) for step, reason in steps.left_out]
    table = pd.concat(frames, ignore_index=True)
    table = table.assign(window_ns=table["end_ns"] - table["start_ns"])
    held = table.groupby("step")["rank"].nunique()
    common = held.index[held == len(frames)]
    if len(common) == 0:
        return table, left_out, ["the ranks have no step in common; each is attributed by its own steps"]
    left_out += [(None, int(step), "not recorded by every rank") for step in held.index.difference(common)]
    return table[table["step"].isin(common)].reset_index(drop=True), left_out, []


def with_common_end(table: pd.DataFrame, job: Job) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Let the last recorded step end for every rank at the same instant of the aligned clock.

    Returns the windows, ``rank, step, leaf, ns`` of the time that ranks waited at the end, and who ended last. Ends
    closer than the residual of the clocks are equal. Without aligned clocks each rank ends by itself.
    """
    none = pd.DataFrame({name: np.empty(0, np.int64) for name in ("rank", "step", "leaf", "ns")})
    last = int(table["step"].max())
    whole = all(
        own.steps is not None and own.steps.last_recorded and own.steps.step[-1] == last for own in job.accounts
    )
    tied = all(job.clock.aligned.get(own.rank, False) for own in job.accounts)
    if not (whole and tied and job.clock.usable):
        return table, none, -1
    rows = np.flatnonzero(table["step"].to_numpy() == last)
    rank, end = (table[name].to_numpy(dtype=np.int64)[rows] for name in ("rank", "end_ns"))
    aligned = end - job.clock.offsets(rank, end)
    missing = aligned.max() - aligned
    missing = np.where(missing > job.clock.residual_ns, missing, 0)
    ends = table["end_ns"].to_numpy(dtype=np.int64).copy()
    ends[rows] += missing
    leaf = Leaf.UNDIVIDED if job.plan.stage else Leaf.LATE_RANK
    waited = pd.DataFrame({"rank": rank, "step": last, "leaf": int(leaf), "ns": missing})
    extended = table.assign(end_ns=ends, window_ns=ends - table["start_ns"].to_numpy())
    return extended, waited[waited["ns"] > 0], int(rank[np.argmax(aligned)])


def attribute(job: Job, table: pd.DataFrame, split: Split) -> Attribution:
    """Attribute the time of the given windows (`windows`) of a job.

    Raises:
        PartitionError: the leaves of a rank's step do not add up to its window.
    """
    exposed = _exposed(job)
    table, left_out = _without_cut_first_step(table, exposed)
    table, waited, last_rank = with_common_end(table, job)
    exposed = _inside(exposed, table)
    give_back()
    origins = blame(job.owned, job.communications, job.matching, job.arrivals, exposed, job.peers)
    parts = _by_cause(exposed, origins)
    del exposed
    exposed = _joined(parts)
    origins = replace(origins, shares=origins.shares[:0])  # they did what they are for, and are many
    sums = pd.concat([summed(exposed, ["rank", "step", "leaf"]), waited], ignore_index=True)
    bubbles = _divided(job, table, exposed, sums)
    decided = [account.decided.assign(rank=account.rank) for account in job.accounts]
    settled = sums[sums["leaf"] != Leaf.UNDIVIDED]
    ledger = pd.concat([*decided, split.leaves, settled, bubbles.parts], ignore_index=True)
    ledger = ledger.groupby(["rank", "step", "leaf"], as_index=False)[["ns"]].sum()
    ledger = ledger[ledger["ns"] != 0].merge(table[["rank", "step"]], on=["rank", "step"])
    check(table, ledger)
    return Attribution(
        windows=table,
        ledger=ledger.reset_index(drop=True),
        exposed=exposed,
        begun_ns=_begun(job),
        blame=_with_further(origins, waited, last_rank, bubbles),
        bubbles=bubbles,
        carried=transfers(job.communications, job.matching, job.arrivals),
        left_out=tuple(left_out),
        waited=waited,
    )


def _inside(exposed: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the ranks and steps of a table of windows."""
    steps = np.unique(table["step"].to_numpy())
    held = np.zeros((int(table["rank"].max()) + 1, len(steps) + 1), np.bool_)  # the last one is for no such step
    held[table["rank"].to_numpy(), np.searchsorted(steps, table["step"].to_numpy())] = True
    step = exposed["step"].to_numpy()
    slot = np.minimum(np.searchsorted(steps, step), len(steps) - 1)
    rank = np.minimum(exposed["rank"].to_numpy(), len(held) - 1)
    inside = held[rank, np.where(steps[slot] == step, slot, len(steps))] & (rank == exposed["rank"].to_numpy())
    if inside.all():
        return exposed
    kept: pd.DataFrame = exposed[inside].reset_index(drop=True)
    return kept


def _divided(job: Job, table: pd.DataFrame, exposed: pd.DataFrame, waits: pd.DataFrame) -> Bubbles:
    """Divide the waits of a pipeline by replays of the observed order of work."""
    pool = waits[waits["leaf"] == Leaf.UNDIVIDED].groupby(["rank", "step"], as_index=False)[["ns"]].sum()
    own = exposed[exposed["leaf"] != Leaf.UNDIVIDED] if len(pool) else exposed.iloc[:0]
    own = own.assign(start_ns=own["from_ns"].to_numpy() + _begun(job)[own["rank"].to_numpy()])
    return divide(job.accounts, table, job.communications, job.arrivals, own, pool, job.plan, job.clock)


def _with_further(origins: Blame, waited: pd.DataFrame, last_rank: int, bubbles: Bubbles) -> Blame:
    """Add the costs of a pipeline's stragglers, and charge the waits at the last step's end to who ended last."""
    late = int(waited.loc[waited["leaf"] == Leaf.LATE_RANK, "ns"].sum())
    end = pd.DataFrame({"rank": [last_rank], "cls": [int(Leaf.LATE_RANK)], "ns": [late]})
    costs = [part for part in (origins.costs, bubbles.costs, end[end["ns"] > 0]) if len(part)]
    return Blame(origins.shares, pd.concat(costs, ignore_index=True) if costs else origins.costs)


def _by_cause(exposed: pd.DataFrame, origins: Blame) -> list[pd.DataFrame]:
    """Divide the waits for late ranks by their causes, in whole nanoseconds.

    Returns:
        The table with the largest part of each wait, and the other parts.
    """
    leaf, ns = exposed["leaf"].to_numpy().copy(), exposed["ns"].to_numpy().copy()
    late = np.flatnonzero(leaf == Leaf.LATE_RANK)
    others = []
    for stretch in stretches(len(late)):
        some = late[stretch]
        waits = exposed.iloc[some]
        shares = origins.shares[waits["row"].to_numpy()]
        parts = np.floor(shares * ns[some][:, None]).astype(np.int64)
        largest = np.argmax(shares, axis=1)
        held = np.arange(len(some)), largest
        ns[some] -= parts.sum(axis=1) - parts[held]
        leaf[some] = np.array(WAIT_LEAVES, np.int8)[largest]
        parts[held] = 0
        begin_ns = waits["from_ns"].to_numpy()
        others += [_part(waits, cause, begin_ns, begin_ns + parts[:, index]) for index, cause in enumerate(WAIT_LEAVES)]
    return [exposed.assign(leaf=leaf, ns=ns), *others]


def check(table: pd.DataFrame, ledger: pd.DataFrame) -> None:
    """Raise if the leaves of any rank's step do not partition its window.

    Raises:
        PartitionError: they do not add up, or one is negative.
    """
    sums = ledger.groupby(["rank", "step"])["ns"].sum()
    window = table.set_index(["rank", "step"])["window_ns"]
    error = sums.reindex(window.index).fillna(0).astype(np.int64) - window
    wrong = error[error != 0]
    if len(wrong):
        (rank, step), difference = wrong.index[0], int(wrong.iloc[0])
        raise PartitionError(
            f"rank {rank}, step {step}: the leaves differ from the window by {difference} ns. "
            "This is a fault of traceaudit; please report it with the trace."
        )
    if (ledger["ns"] < 0).any():
        raise PartitionError("a leaf is negative. This is a fault of traceaudit; please report it with the trace.")


def _exposed(job: Job) -> pd.DataFrame:
    """Return ``rank, step, row, leaf, from_ns, ns`` of time owned by communications; ``row`` in their table.

    ``from_ns`` is where the part with this leaf begins, since the rank's recording began.
    """
    owned, begun = job.owned.exposed, _begun(job)
    offset = np.cumsum(np.array(job.owned.counts, np.int64)) - job.owned.counts
    parts = [
        pd.DataFrame({name: np.empty(0, dtype or np.int32) for name, dtype in EXPOSED.items()}),
        *(
            _since(part, begun)
            for some in _some_at_a_time([len(own) for own in owned])
            for part in _exposed_of(job, owned[some], [own.rank for own in job.accounts[some]], offset[some])
        ),
    ]
    owned.clear()
    return _joined(parts)


def _begun(job: Job) -> Array:
    return by_rank({account.rank: account.first_ns for account in job.accounts}, np.int64)


def _since(part: pd.DataFrame, begun: Array) -> pd.DataFrame:
    """Return a table of `EXPOSED` with times since each rank's recording began, which often fit in 32 bits."""
    first = begun[part["rank"].to_numpy()]
    return part.assign(from_ns=small(part["from_ns"].to_numpy() - first))


EXPOSED = {
    "rank": np.int32,
    "step": np.int32,
    "row": np.int32,
    "leaf": np.int8,
    "from_ns": None,
    "ns": None,
}  # None: of 32 bits if it fits


def _some_at_a_time(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield stretches of things that have `ROWS` rows together, or little more."""
    begun = held = 0
    for index, size in enumerate(sizes):
        held += size
        if held >= ROWS or index + 1 == len(sizes):
            yield slice(begun, index + 1)
            begun, held = index + 1, 0


def _exposed_of(job: Job, tables: Sequence[pd.DataFrame], ranks: Sequence[int], offset: Array) -> list[pd.DataFrame]:
    """Return the parts of some ranks' time, of which `offset` are the first rows among the communications."""
    owned = [own for own in zip(tables, ranks, offset.tolist(), strict=True) if len(own[0])]
    if not owned:
        return []
    pieces = pd.DataFrame(
        {
            "rank": np.repeat(np.array([rank for _, rank, _ in owned], np.int32), [len(own) for own, _, _ in owned]),
            "row": np.concatenate([own["communication"].to_numpy() + first for own, _, first in owned]),
            **{
                name: np.concatenate([own[name].to_numpy() for own, _, _ in owned])
                for name in ("step", "start_ns", "end_ns", "trailing")
            },
        },
        copy=False,
    )
    pipeline = job.communications["pipeline"].to_numpy(dtype=np.bool_)[pieces["row"].to_numpy()]
    if not pipeline.any():
        return _collective_parts(job, pieces)
    return [*_pipeline_parts(pieces[pipeline], job.communications), *_collective_parts(job, pieces[~pipeline])]


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    """Join tables of the columns of `EXPOSED` column by column, giving up the parts, so that memory holds them once."""
    columns = [[part[name].to_numpy(dtype=dtype, copy=False) for part in parts] for name, dtype in EXPOSED.items()]
    parts.clear()
    columns.reverse()
    table = pd.DataFrame({name: np.concatenate(columns.pop()) for name in EXPOSED}, copy=False)
    give_back()
    return table


def _part(pieces: pd.DataFrame, leaf: Array | Leaf, begin: Integers, end: Integers) -> pd.DataFrame:
    ns = end - begin
    kept = np.flatnonzero(ns)
    code = np.full(len(kept), int(leaf), np.int8) if isinstance(leaf, Leaf) else leaf[kept].astype(np.int8)
    columns = {name: pieces[name].to_numpy()[kept] for name in ("rank", "step", "row")}
    return pd.DataFrame({**columns, "from_ns": begin[kept], "leaf": code, "ns": small(ns[kept])}, copy=False)


def _pipeline_parts(pieces: pd.DataFrame, communications: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the point-to-point time of a pipeline: undivided, but for sends while no receive is pending."""
    sending = (communications["direction"] == "send").to_numpy()[pieces["row"].to_numpy()]
    parts = [_length(pieces[~sending], Leaf.UNDIVIDED)]
    own = communications[communications["rank"].isin(pieces["rank"].unique())]
    receiving = own.loc[(own["kind"] == "send_recv") & (own["direction"] != "send"), ["rank", "start_ns", "end_ns"]]
    waiting = dict(iter(receiving.groupby("rank")))
    for rank, sent in pieces[sending].groupby("rank"):
        held = waiting.get(rank, receiving.iloc[:0])
        pending = union(held["start_ns"].to_numpy(), held["end_ns"].to_numpy())
        span = Intervals(sent["start_ns"].to_numpy(dtype=np.int64), sent["end_ns"].to_numpy(dtype=np.int64))
        for common, leaf in ((cross(span, pending), Leaf.UNDIVIDED), (outside(span, pending), Leaf.PP)):
            parts.append(_part(sent.iloc[common.left], leaf, common.start, common.end))
    return parts


def _length(pieces: pd.DataFrame, leaf: Leaf) -> pd.DataFrame:
    return _part(pieces, leaf, *(pieces[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns")))


def _collective_parts(job: Job, pieces: pd.DataFrame) -> list[pd.DataFrame]:
    """Split time in collectives at the last arrival: waiting before it, transfer after.

    Waits shorter than the residual of the clocks stay transfer, as does a kernel that ended more than that before the
    last arrival: it did not wait for it.
    """
    communications, arrivals = job.communications, job.arrivals
    row = pieces["row"].to_numpy(dtype=np.int64)
    start, end = (pieces[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    trailing = pieces["trailing"].to_numpy(dtype=np.bool_)
    awaited = arrivals.awaited_ns[row]
    left_early = communications["end_ns"].to_numpy()[row] < awaited - job.clock.residual_ns
    told_apart = awaited - communications["start_ns"].to_numpy()[row] > job.clock.residual_ns
    waits = arrivals.known[row] & ~trailing & ~left_early & told_apart
    turn = np.where(waits, np.clip(awaited, start, end), start)
    cut = np.where(waits, np.clip(_recorded_from(job, row), start, turn), start)
    staged = _spans_stages(communications["members"].iloc[row], job.plan)
    wait_leaf = np.where(staged, int(Leaf.UNDIVIDED), int(Leaf.LATE_RANK))
    transfer_leaf = communications["leaf"].to_numpy()[row]
    recompute = communications["recompute"].to_numpy(dtype=np.bool_)[row]
    transfer_leaf = np.where(recompute, int(Leaf.COMMUNICATION), transfer_leaf)
    certain = job.matching.complete[row] & arrivals.known[row]
    transfer_leaf = np.where(certain, transfer_leaf, int(Leaf.TRANSFER_OR_WAIT))
    return [
        _part(pieces, Leaf.TRACE_CUT, start, cut),
        _part(pieces, wait_leaf, cut, turn),
        _part(pieces, transfer_leaf, turn, end),
    ]


def _recorded_from(job: Job, row: Array) -> Array:
    """Return when the awaited rank's recording began, on the clock of each row's rank."""
    awaited = job.arrivals.awaited_rank[row]
    begun = _begun(job)[awaited]
    rank = job.communications["rank"].to_numpy()[row]
    own = begun - job.clock.offsets(awaited, begun) + job.clock.offsets(rank, begun)
    return np.where(job.arrivals.by_duration[row], np.iinfo(np.int64).min, own)


def _spans_stages(members: "pd.Series[Any]", plan: Layout) -> npt.NDArray[np.bool_]:
    """Tell of which communications the members are of more than one pipeline stage."""
    if not plan.stage:
        return np.zeros(len(members), np.bool_)

    def spans(ranks: tuple[int, ...]) -> bool:
        return len({plan.stage[rank] for rank in ranks if rank in plan.stage}) > 1

    return np.asarray(each(members, spans), np.bool_)


def _without_cut_first_step(
    table: pd.DataFrame, exposed: pd.DataFrame
) -> tuple[pd.DataFrame, list[tuple[int | None, int, str]]]:
    """Leave out the first step if ranks waited in it for profilers that began later, and others remain."""
    first = int(table["step"].min())
    length = int(table.loc[table["step"] == first, "window_ns"].sum())
    cut = int(exposed.loc[(exposed["step"] == first) & (exposed["leaf"] == Leaf.TRACE_CUT), "ns"].sum())
    if table["step"].nunique() < 2 or cut <= TRACE_CUT_SHARE * length:
        return table, []
    reason = f"{cut / length:.1%} of it is waiting for ranks whose recording began later"
    return table[table["step"] != first].reset_index(drop=True), [(None, first, reason)]
