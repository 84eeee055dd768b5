"""Give every nanosecond of every step of every rank to one leaf, and check that they add up (attribution rule 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.collectives import Instances, Layout
from traceaudit.errors import PartitionError
from traceaudit.intervals import Array, Intervals, cross, outside, union
from traceaudit.leaves import Leaf
from traceaudit.roofline import Split

TRACE_CUT_SHARE = 0.01  # of the first step, above which it is left out: profilers began at different instants


@dataclass(frozen=True)
class Attribution:
    """The partition of the analysed steps.

    Attributes:
        windows: ``rank, step, start_ns, end_ns, window_ns``.
        ledger: ``rank, step, leaf, ns``; leaves of a rank's step add up to its window.
        collectives: ``group, leaf, kind, count, bytes, transfer_ns, wait_ns, exposed_ns`` summed over ranks.
        left_out: (None, step, reason) of steps that turned out not to represent the run.
    """

    windows: pd.DataFrame
    ledger: pd.DataFrame
    collectives: pd.DataFrame
    left_out: tuple[tuple[int | None, int, str], ...]


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


def attribute(
    accounts: Sequence[RankAccount],
    communications: pd.DataFrame,
    instances: Instances,
    plan: Layout,
    table: pd.DataFrame,
    split: Split,
) -> Attribution:
    """Attribute the time of the given windows (`windows`) of a job whose ranks were matched.

    Raises:
        PartitionError: the leaves of a rank's step do not add up to its window.
    """
    present = [account for account in accounts if account.steps is not None]
    exposed = _exposed(present, communications, instances, plan)
    decided = pd.concat([account.decided.assign(rank=account.rank) for account in present], ignore_index=True)
    parts = [decided, split.leaves, exposed[["rank", "step", "leaf", "ns"]]]
    ledger = pd.concat(parts, ignore_index=True).groupby(["rank", "step", "leaf"], as_index=False)[["ns"]].sum()
    ledger = ledger[ledger["ns"] != 0]
    ledger = ledger.merge(table[["rank", "step"]], on=["rank", "step"])
    table, ledger, dropped = _without_cut_first_step(table, ledger)
    kept = exposed.merge(table[["rank", "step"]], on=["rank", "step"])
    check(table, ledger)
    return Attribution(
        windows=table,
        ledger=ledger.reset_index(drop=True),
        collectives=_collective_totals(communications, kept, table),
        left_out=tuple(dropped),
    )


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


def _exposed(
    accounts: Sequence[RankAccount], communications: pd.DataFrame, instances: Instances, plan: Layout
) -> pd.DataFrame:
    """Return ``rank, step, leaf, ns, row`` of the time owned by communications; ``row`` in `communications`."""
    columns = ["rank", "step", "start_ns", "end_ns", "row", "trailing"]
    frames, offset = [pd.DataFrame(columns=columns).astype(np.int64)], 0
    for account in accounts:
        own = account.exposed
        frames.append(own.assign(rank=account.rank, row=own["communication"] + offset)[columns])
        offset += len(account.communications)
    pieces = pd.concat(frames, ignore_index=True)
    if not len(pieces):
        return pd.DataFrame({name: np.empty(0, np.int64) for name in ("rank", "step", "leaf", "ns", "row")})
    row = pieces["row"].to_numpy(dtype=np.int64)
    pipeline = communications["pipeline"].to_numpy(dtype=np.bool_)[row]
    parts = [
        _pipeline_parts(pieces[pipeline], communications),
        _collective_parts(accounts, pieces[~pipeline], communications, instances, plan),
    ]
    return pd.concat(parts, ignore_index=True)


def _part(pieces: pd.DataFrame, leaf: Array | Leaf, ns: Array) -> pd.DataFrame:
    code = np.full(len(pieces), int(leaf), np.int64) if isinstance(leaf, Leaf) else leaf
    return pieces[["rank", "step", "row"]].assign(leaf=code, ns=ns)


def _pipeline_parts(pieces: pd.DataFrame, communications: pd.DataFrame) -> pd.DataFrame:
    """Return the point-to-point time of a pipeline: undivided, but for sends while no receive is pending."""
    row = pieces["row"].to_numpy(dtype=np.int64)
    sending = communications["direction"].to_numpy(dtype=object)[row] == "send"
    parts = [_length(pieces[~sending], Leaf.UNDIVIDED)]
    for rank, own in pieces[sending].groupby("rank"):
        mine = (communications["rank"] == rank) & (communications["kind"] == "send_recv")
        waiting = communications[mine & (communications["direction"] != "send")]
        pending = union(waiting["start_ns"].to_numpy(), waiting["end_ns"].to_numpy())
        span = Intervals(own["start_ns"].to_numpy(dtype=np.int64), own["end_ns"].to_numpy(dtype=np.int64))
        for common, leaf in ((cross(span, pending), Leaf.UNDIVIDED), (outside(span, pending), Leaf.PP)):
            parts.append(_part(own.iloc[common.left], leaf, common.end - common.start))
    return pd.concat(parts, ignore_index=True)


def _length(pieces: pd.DataFrame, leaf: Leaf) -> pd.DataFrame:
    return _part(pieces, leaf, (pieces["end_ns"] - pieces["start_ns"]).to_numpy(dtype=np.int64))


def _collective_parts(
    accounts: Sequence[RankAccount],
    pieces: pd.DataFrame,
    communications: pd.DataFrame,
    instances: Instances,
    plan: Layout,
) -> pd.DataFrame:
    """Split time in collectives at the last arrival: waiting before it, transfer after."""
    row = pieces["row"].to_numpy(dtype=np.int64)
    start, end = (pieces[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    trailing = pieces["trailing"].to_numpy(dtype=np.bool_)
    awaited, matched = instances.awaited_ns[row], instances.instance[row] >= 0
    left_early = communications["end_ns"].to_numpy()[row] < awaited
    waits = matched & ~trailing & ~left_early
    turn = np.where(waits, np.clip(awaited, start, end), start)
    begun = pd.Series({account.rank: account.first_ns for account in accounts})
    recorded = begun.reindex(instances.awaited_rank[row]).fillna(0).to_numpy(dtype=np.int64)
    cut = np.where(waits, np.clip(recorded, start, turn), start)
    staged = _spans_stages(communications, plan)[row]
    wait_leaf = np.where(staged, int(Leaf.UNDIVIDED), int(Leaf.LATE_RANK))
    transfer_leaf = communications["leaf"].to_numpy()[row]
    transfer_leaf = np.where(
        communications["recompute"].to_numpy(dtype=np.bool_)[row], int(Leaf.COMMUNICATION), transfer_leaf
    )
    transfer_leaf = np.where(instances.traced[row], transfer_leaf, int(Leaf.TRANSFER_OR_WAIT))
    return pd.concat(
        [
            _part(pieces, Leaf.TRACE_CUT, cut - start),
            _part(pieces, wait_leaf, turn - cut),
            _part(pieces, transfer_leaf, end - turn),
        ],
        ignore_index=True,
    )


def _spans_stages(communications: pd.DataFrame, plan: Layout) -> npt.NDArray[np.bool_]:
    """Tell which communications join ranks of more than one pipeline stage."""
    stages: dict[tuple[int, ...], bool] = {}
    for members in communications["members"]:
        if members not in stages:
            stages[members] = len({plan.stage[rank] for rank in members if rank in plan.stage}) > 1
    return np.array([stages[members] for members in communications["members"]], np.bool_)


def _without_cut_first_step(
    table: pd.DataFrame, ledger: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, list[tuple[int | None, int, str]]]:
    """Leave out the first step if ranks waited in it for profilers that began later, and others remain."""
    first = int(table["step"].min())
    length = int(table.loc[table["step"] == first, "window_ns"].sum())
    cut = int(ledger.loc[(ledger["step"] == first) & (ledger["leaf"] == Leaf.TRACE_CUT), "ns"].sum())
    if table["step"].nunique() < 2 or cut <= TRACE_CUT_SHARE * length:
        return table, ledger, []
    reason = f"{cut / length:.1%} of it is waiting for ranks whose recording began later"
    return table[table["step"] != first], ledger[ledger["step"] != first], [(None, first, reason)]


WAITS = (Leaf.LATE_RANK, Leaf.TRACE_CUT)


def _collective_totals(communications: pd.DataFrame, exposed: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Sum up the communications of each group and kind that ran in the analysed windows."""
    if not len(communications):
        return pd.DataFrame()
    span = table.groupby("rank").agg(low=("start_ns", "min"), high=("end_ns", "max"))
    span = span.reindex(communications["rank"])
    inside = (communications["end_ns"].to_numpy() > span["low"].to_numpy()) & (
        communications["start_ns"].to_numpy() < span["high"].to_numpy()
    )
    waiting = exposed["leaf"].isin(WAITS).to_numpy() | (
        (exposed["leaf"] == Leaf.UNDIVIDED).to_numpy()
        & ~communications["pipeline"].to_numpy(dtype=np.bool_)[exposed["row"].to_numpy(dtype=np.int64)]
    )
    by_row = pd.DataFrame(
        {
            "row": exposed["row"].to_numpy(dtype=np.int64),
            "exposed_ns": exposed["ns"].to_numpy(dtype=np.int64),
            "wait_ns": np.where(waiting, exposed["ns"], 0).astype(np.int64),
        }
    )
    by_row = by_row.groupby("row").sum().reindex(range(len(communications)), fill_value=0)
    labels = [
        f"{text + ' ' if text else ''}{_ranks(members)}{' (assumed)' if assumed else ''}"
        for text, members, assumed in zip(
            communications["group_description"], communications["members"], communications["assumed"], strict=True
        )
    ]
    frame = pd.DataFrame(
        {
            "group": labels,
            "leaf": communications["leaf"].to_numpy(),
            "kind": communications["kind"].to_numpy(dtype=object),
            "count": 1,
            "bytes": np.maximum(communications["bytes"].to_numpy(), 0),
            "exposed_ns": by_row["exposed_ns"].to_numpy(),
            "wait_ns": by_row["wait_ns"].to_numpy(),
        }
    )[inside]
    totals = frame.groupby(["group", "leaf", "kind"], as_index=False).sum()
    totals = totals.assign(transfer_ns=totals["exposed_ns"] - totals["wait_ns"])
    return totals.sort_values("exposed_ns", ascending=False, kind="stable", ignore_index=True)


def _ranks(members: tuple[int, ...]) -> str:
    """Return a short text for the ranks of a group."""
    if len(members) <= 8:
        return str(list(members))
    return f"[{members[0]}, {members[1]}, …, {members[-1]}] ({len(members)} ranks)"
