"""Divide the waits of a pipeline: the schedule's own cost, unequal stages, unequal data, slow ranks, hosts, transfers.

The order of forward and backward work that the traces show is replayed with the durations idealised less and less:
means of each kind of work, means of each stage, means of each micro-batch over the data-parallel replicas, measured
durations, host gaps put back, transfers put back. What each replay waits more than the one before is the cost of what
was put back, capped by what is left of the measured waits (attribution rule 3.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.intervals import Array
from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.ranks.align import Clock
from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.collectives import Layout

Floats = npt.NDArray[np.float64]

REPLAY_LIMIT = 0.05  # of the step, by which the last replay may miss it; beyond, the waits stay undivided
PASSES = ("F", "B", "I", "W")
PARTS = (Leaf.WARMUP_DRAIN, Leaf.STAGE_IMBALANCE, Leaf.DATA_IMBALANCE, Leaf.LATE_RANK, Leaf.HOST_CAUSED, Leaf.PP)


@dataclass(frozen=True)
class Bubbles:
    """What the replays say.

    Attributes:
        parts: ``rank, step, leaf, ns`` that replace the undivided waits; they add up to them.
        costs: ``rank, cls, ns``: waits of others by the rank and class that caused them, for the parts that stragglers
            are charged with.
        facts: stages, micro-batches, replay error and the like, for the report.
        picture: ``rank, stage, kind, microbatch, start_ns, end_ns, recompute_ns, step`` of one chain in one step, from
            the step's beginning.
        reason: why the waits stay undivided; "" where they do not, or where there is no pipeline.
    """

    parts: pd.DataFrame
    costs: pd.DataFrame
    facts: Mapping[str, object] = field(default_factory=dict)
    picture: pd.DataFrame = field(default_factory=pd.DataFrame)
    reason: str = ""


NO_PARTS = pd.DataFrame({name: np.empty(0, np.int64) for name in ("rank", "step", "leaf", "ns")})
NO_COSTS = pd.DataFrame({name: np.empty(0, np.int64) for name in ("rank", "cls", "ns")})


def divide(
    accounts: Sequence[RankAccount],
    windows: pd.DataFrame,
    communications: pd.DataFrame,
    arrivals: Arrivals,
    pieces: pd.DataFrame,
    pool: pd.DataFrame,
    plan: Layout,
    clock: Clock,
) -> Bubbles:
    """Divide the undivided waits (``rank, step, ns`` in `pool`) of a job.

    Args:
        accounts: of the ranks with GPU activity, in the order of `communications`.
        windows: ``rank, step, start_ns, window_ns``.
        communications: of all ranks.
        arrivals: of its rows.
        pieces: ``rank, start_ns, ns, leaf`` of exposed communication that is no pipeline wait.
        pool: what is to be divided.
        plan: which ranks form a pipeline, in the order of their stages.
        clock: for the picture.
    """
    if not len(pool) or not pool["ns"].sum():
        return Bubbles(NO_PARTS, NO_COSTS)
    work, reason = _work(accounts, windows, pieces, plan)
    if reason:
        return Bubbles(_undivided(pool), NO_COSTS, {"chains": len(plan.chains)}, reason=reason)
    latency = _latencies(work, communications, arrivals)
    parts, costs, errors = [], [], []
    for step, own in work.groupby("step", sort=True):
        found = _replays(own.assign(latency=latency[own.index]))
        if found is None:
            return Bubbles(_undivided(pool), NO_COSTS, reason="the observed order of work cannot be replayed")
        waits, length = found
        window = int(windows.loc[windows["step"] == step, "window_ns"].max())
        errors.append(abs(length - window) / window)
        mine = pool[pool["step"] == step]
        step_parts = _capped(mine, waits)
        parts.append(step_parts)
        costs.append(_costs(step_parts, own))
    facts = _facts(work, plan, pd.concat(parts, ignore_index=True), float(np.median(errors)))
    picture = _picture(work, windows, plan, clock)
    if np.median(errors) > REPLAY_LIMIT:
        reason = f"the replay of the observed order misses the step by {np.median(errors):.0%}"
        return Bubbles(_undivided(pool), NO_COSTS, facts, picture, reason)
    return Bubbles(pd.concat(parts, ignore_index=True), pd.concat(costs, ignore_index=True), facts, picture)


def _undivided(pool: pd.DataFrame) -> pd.DataFrame:
    return pool.assign(leaf=int(Leaf.UNDIVIDED))[["rank", "step", "leaf", "ns"]]


def _work(
    accounts: Sequence[RankAccount], windows: pd.DataFrame, pieces: pd.DataFrame, plan: Layout
) -> tuple[pd.DataFrame, str]:
    """Return the work of all ranks with its place in the pipeline, or why it has none.

    Adds ``rank, chain, place`` (order on the rank) and ``duration`` (compute, and communication inside the stage while
    it ran) to the columns of `traceaudit.schedule`. Communication between two pieces of work is a piece of its own, C.
    """
    if not plan.chains:
        return pd.DataFrame(), "no process group, declared degree or pair of partners tells the stages"
    frames = []
    spent = dict(iter(pieces.groupby("rank")))
    seat = {rank: (number, stage) for number, chain in enumerate(plan.chains) for stage, rank in enumerate(chain)}
    for account in accounts:
        if account.rank in seat and len(account.schedule):
            chain, stage = seat[account.rank]
            own = account.schedule.assign(rank=account.rank, chain=chain, seat=stage)
            own = own.assign(stage=np.where(own["stage"] >= 0, own["stage"], stage))
            frames.append(_with_communication(own, spent.get(account.rank, pieces.iloc[:0])))
    if not frames:
        return pd.DataFrame(), "no forward and backward work was recognised"
    work = pd.concat(frames, ignore_index=True).merge(windows[["rank", "step"]], on=["rank", "step"])
    depth = max(len(chain) for chain in plan.chains)
    if work["seat"].nunique() < depth:
        return pd.DataFrame(), f"only {work['seat'].nunique()} of {depth} stages were traced"
    counts = work[work["kind"] == "F"].groupby(["step", "rank"])["microbatch"].size()
    if not len(counts) or counts.min() < counts.max():
        return pd.DataFrame(), "the ranks ran different numbers of forwards in a step"
    return work.assign(place=work.groupby(["step", "rank"]).cumcount()), ""


def _with_communication(work: pd.DataFrame, pieces: pd.DataFrame) -> pd.DataFrame:
    """Add a rank's exposed communication to its work.

    Transfers belong to the work they interrupt, else they are a piece of their own, C. Waits for a late rank are
    neither work nor the pipeline's; sends that nothing waited for stand with the host's gaps.
    """
    leaf = pieces["leaf"].to_numpy(dtype=np.int64)
    late = in_bucket(leaf, Bucket.STRAGGLER)
    edges = [work[name].to_numpy(dtype=np.int64) for name in ("free_ns", "start_ns", "end_ns")]
    sent = _before(pieces[leaf == Leaf.PP], edges)
    carried = _before(pieces[~late & (leaf != Leaf.PP)], edges)
    waited = _before(pieces[late], edges)
    gap = work["gap_ns"].to_numpy(dtype=np.int64) + sent[2] - sent[1]
    own = work.assign(duration=(work["work_ns"] + carried[2] - carried[1]).astype(np.float64), gap_ns=gap, meets=False)
    number = work.groupby("step").cumcount()
    between = work.assign(kind="C", microbatch=number, start_ns=edges[0], end_ns=edges[1])
    between = between.assign(
        gap_ns=work["gap_before_ns"].to_numpy(dtype=np.int64) + sent[1] - sent[0],
        recompute_ns=0,
        work_ns=0,
        duration=(carried[1] - carried[0]).astype(np.float64),
        meets=(carried[1] - carried[0] + waited[1] - waited[0]) > 0,
    )
    both = pd.concat([between.assign(turn=2 * number), own.assign(turn=2 * number + 1)], ignore_index=True)
    return both.sort_values(["step", "turn"], kind="stable", ignore_index=True).drop(columns="turn")


def _before(pieces: pd.DataFrame, edges: Sequence[Array]) -> list[Array]:
    """Return how much of some pieces began before each of some instants."""
    order = np.argsort(pieces["start_ns"].to_numpy(dtype=np.int64), kind="stable")
    begun, length = (pieces[name].to_numpy(dtype=np.int64)[order] for name in ("start_ns", "ns"))
    before = np.concatenate(([0], np.cumsum(length)))
    return [np.asarray(before[np.searchsorted(begun, edge, side="left")], np.int64) for edge in edges]


def _latencies(work: pd.DataFrame, communications: pd.DataFrame, arrivals: Arrivals) -> Floats:
    """Return for each piece of work the transfer time of the last message that its rank received before it."""
    result = np.zeros(len(work))
    receiving = communications["pipeline"].to_numpy(dtype=np.bool_) & (communications["direction"] != "send").to_numpy()
    receiving &= arrivals.known
    start, end = (communications[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    transfer = end - np.maximum(arrivals.awaited_ns, start)
    ranks = communications["rank"].to_numpy()
    received = np.flatnonzero(receiving)
    received = received[np.lexsort((end[received], ranks[received]))]
    for rank, own in work[work["kind"] != "C"].groupby("rank"):
        rows = received[slice(*np.searchsorted(ranks[received], np.asarray(rank) + np.arange(2)))]
        begin = own["start_ns"].to_numpy(dtype=np.int64)
        slot = np.searchsorted(end[rows], begin, side="right") - 1
        before = np.concatenate(([np.iinfo(np.int64).min], own["end_ns"].to_numpy(dtype=np.int64)[:-1]))
        if len(rows):
            fresh = (slot >= 0) & (end[rows][np.maximum(slot, 0)] > before)
            result[own.index] = np.where(fresh, np.maximum(transfer[rows][np.maximum(slot, 0)], 0), 0)
    return result


def _replays(work: pd.DataFrame) -> tuple[pd.DataFrame, float] | None:
    """Return by rank how long each replay of one step waits, and the length of the last."""
    order = _Order(work)
    duration = work["duration"]
    passes = work["kind"].isin(PASSES)
    slot = work["microbatch"].where(passes, work.groupby(["rank", "kind"]).cumcount())
    kind = work["kind"] + np.where(passes, "", slot.astype(str))
    means = [
        duration.groupby(kind).transform("mean"),
        duration.groupby([work["stage"], kind]).transform("mean"),
        duration.groupby([work["stage"], kind, slot]).transform("mean"),
        duration,
    ]
    nothing = np.zeros(len(work))
    gaps = work["gap_ns"].to_numpy(dtype=np.float64)
    runs = [(mean.to_numpy(dtype=np.float64), nothing, nothing) for mean in means]
    runs += [(runs[-1][0], gaps, nothing), (runs[-1][0], gaps, work["latency"].to_numpy(dtype=np.float64))]
    waits = {}
    length = 0.0
    for leaf, (durations, pauses, latency) in zip(PARTS, runs, strict=True):
        played = order.play(durations, pauses, latency)
        if played is None:
            return None
        length, met = played
        busy = pd.Series(durations + pauses + met).groupby(work["rank"].to_numpy()).sum()
        waits[leaf] = length - busy
    return pd.DataFrame(waits), length


class _Order:
    """The observed order of one step's work on all ranks, and what each piece of it depends on."""

    def __init__(self, work: pd.DataFrame) -> None:
        rows = work.reset_index(drop=True)
        at = {
            key: index
            for index, key in enumerate(
                zip(rows["chain"], rows["kind"].replace("I", "B"), rows["stage"], rows["microbatch"], strict=True)
            )
        }
        last = int(rows["stage"].max())
        self._before: list[int] = []
        for index, (chain, kind, stage, microbatch) in enumerate(
            zip(rows["chain"], rows["kind"].replace("I", "B"), rows["stage"], rows["microbatch"], strict=True)
        ):
            wanted = (chain, "F", stage - 1, microbatch)
            if kind == "B":
                wanted = (chain, "B", stage + 1, microbatch) if stage < last else (chain, "F", stage, microbatch)
            found = at.get(wanted, -1) if kind in ("F", "B") else -1
            self._before.append(-1 if found == index else found)
        meetings = rows[(rows["kind"] == "C")].groupby(["seat", "microbatch"])
        self._meeting: list[list[int]] = [[] for _ in range(len(rows))]
        for _, group in meetings:
            if len(group) > 1 and group["meets"].all():
                for index in group.index:
                    self._meeting[index] = group.index.tolist()
        self._ranks = [group.index.tolist() for _, group in rows.sort_values("place").groupby("rank")]
        self._crosses = [
            before >= 0 and rows["rank"].iloc[before] != rows["rank"].iloc[index]
            for index, before in enumerate(self._before)
        ]

    def play(self, duration: Floats, pause: Floats, latency: Floats) -> tuple[float, Floats] | None:
        """Return when the last rank ends and how long each piece waited for its stage; nothing in a deadlock."""
        end = np.full(len(duration), np.nan)
        met = np.zeros(len(duration))
        arrived: dict[int, float] = {}
        queues = [list(reversed(rows)) for rows in self._ranks]
        free = [0.0] * len(queues)
        moved = True
        while moved:
            moved = False
            for number, queue in enumerate(queues):
                while queue:
                    index = queue[-1]
                    ready = self._ready(index, free[number] + pause[index], end, latency, arrived)
                    if ready is None:
                        break
                    if self._meeting[index]:
                        met[index] = ready - free[number] - pause[index]
                    end[index] = free[number] = ready + duration[index]
                    queue.pop()
                    moved = True
        if any(queues):
            return None
        return float(end.max()), met

    def _ready(self, index: int, free: float, end: Floats, latency: Floats, arrived: dict[int, float]) -> float | None:
        """Return when a piece can begin, nothing if what it needs has not run."""
        before = self._before[index]
        if before >= 0:
            if np.isnan(end[before]):
                return None
            return max(free, float(end[before]) + (float(latency[index]) if self._crosses[index] else 0.0))
        if self._meeting[index]:
            arrived[index] = free
            others = [arrived.get(other) for other in self._meeting[index]]
            return None if None in others else max(other for other in others if other is not None)
        return free


def _capped(pool: pd.DataFrame, waits: pd.DataFrame) -> pd.DataFrame:
    """Give each replay's further waits to its leaf, each capped by what is left of the measured waits."""
    rest = pool["ns"].to_numpy(dtype=np.int64).copy()
    ranks = pool["rank"].to_numpy()
    base = np.zeros(len(pool))
    rows = []
    for leaf in PARTS:
        now = waits[leaf].reindex(ranks).fillna(0.0).to_numpy()
        taken = np.minimum(rest, np.rint(np.maximum(now - base, 0.0)).astype(np.int64))
        base = np.maximum(base, now)
        rest = rest - taken
        rows.append(pool[["rank", "step"]].assign(leaf=int(leaf), ns=taken))
    rows.append(pool[["rank", "step"]].assign(leaf=int(Leaf.OTHER), ns=rest))
    parts = pd.concat(rows, ignore_index=True)
    kept: pd.DataFrame = parts[parts["ns"] > 0]
    return kept


def _costs(parts: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """Charge the parts that are stragglers' to the ranks whose work, data or host exceeded the others'."""
    slot = work["microbatch"].where(work["kind"].isin(PASSES), work["place"])
    usual = work["duration"].groupby([work["stage"], work["kind"], slot]).transform("mean")
    even = work["duration"].groupby([work["stage"], work["kind"]]).transform("mean")
    over = {
        Leaf.LATE_RANK: (Leaf.NOT_SPLIT, (work["duration"] - usual).clip(lower=0.0)),
        Leaf.DATA_IMBALANCE: (Leaf.DATA_IMBALANCE, (usual - even).clip(lower=0.0)),
        Leaf.HOST_CAUSED: (Leaf.HOST_CAUSED, work["gap_ns"].astype(np.float64)),
    }
    rows = []
    for leaf, (cls, excess) in over.items():
        lost = parts[parts["leaf"] == leaf]
        total = int(lost["ns"].sum())
        by_rank = excess.groupby(work["rank"]).sum()
        if not total:
            continue
        weight = by_rank.to_numpy(dtype=np.float64)
        if leaf == Leaf.HOST_CAUSED:  # what every rank's host does alike delays nobody more than the others
            weight = weight - weight.min()
        if weight.sum() <= 0:
            cls, weight = Leaf.JITTER, np.ones(len(by_rank))
        share = np.floor(total * weight / weight.sum()).astype(np.int64)
        share[np.argmax(weight)] += total - int(share.sum())
        rows.append(pd.DataFrame({"rank": by_rank.index.to_numpy(), "cls": int(cls), "ns": share}))
    found: pd.DataFrame = pd.concat(rows, ignore_index=True) if rows else NO_COSTS
    return found


def _facts(work: pd.DataFrame, plan: Layout, parts: pd.DataFrame, error: float) -> dict[str, object]:
    """Return the shape of the pipeline and the theory beside the measurement.

    Bubble over ideal time is (p - 1)/m for GPipe and 1F1B, (p - 1)/(v·m) interleaved (Narayanan et al., SC'21).
    """
    stages = max(len(chain) for chain in plan.chains)
    virtual = int(work["stage"].max()) + 1
    chunks = max(virtual // stages, 1)
    forwards = work[work["kind"] == "F"].groupby(["step", "rank"])["microbatch"].size()
    microbatches = max(int(forwards.max()) // chunks, 1)
    passes = work[work["kind"].isin(PASSES)]
    ideal = float(passes.groupby(["step", "rank"])["duration"].sum().sum())
    warmup = int(parts.loc[parts["leaf"] == Leaf.WARMUP_DRAIN, "ns"].sum())
    by_stage = passes.groupby("seat")["duration"].sum() / passes.groupby("seat")["rank"].nunique()
    split = bool(passes["kind"].isin(("I", "W")).any())
    theory = None if split else (stages - 1) / (chunks * microbatches)
    heaviest = int(by_stage.index.to_numpy()[np.argmax(by_stage.to_numpy())])
    return {
        "stages": stages,
        "microbatches": microbatches,
        "virtual_stages": chunks,
        "chains": len(plan.chains),
        "layout_source": plan.source,
        "replay_error": error,
        "theory": theory,
        "theory_formula": None if split else "(p-1)/m" if chunks == 1 else "(p-1)/(v·m)",
        "theory_doubled_microbatches": None if theory is None else theory / 2,
        "measured": warmup / ideal if ideal else None,
        "stage_work_ns": [round(float(ns) / max(work["step"].nunique(), 1)) for ns in by_stage],
        "heaviest_stage": heaviest,
        "heaviest_ratio": float(by_stage.max() / by_stage.mean()),
    }


def _picture(work: pd.DataFrame, windows: pd.DataFrame, plan: Layout, clock: Clock) -> pd.DataFrame:
    """Return the work of the first chain in the step of median length, from the chain's first window's start on."""
    lengths = windows.groupby("step")["window_ns"].max()
    step = int(lengths.index.to_numpy()[np.argmin((lengths - lengths.median()).abs().to_numpy())])
    chosen = work[(work["step"] == step) & (work["chain"] == work["chain"].min()) & (work["kind"] != "C")]
    begun = windows[(windows["step"] == step) & windows["rank"].isin(chosen["rank"])]
    first = begun["start_ns"].to_numpy(dtype=np.int64)
    origin = int((first - clock.offsets(begun["rank"].to_numpy(dtype=np.int64), first)).min())
    ranks = chosen["rank"].to_numpy(dtype=np.int64)
    start, end = (chosen[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns"))
    shift = clock.offsets(ranks, start) + origin
    frame = chosen[["rank", "stage", "kind", "microbatch", "recompute_ns"]]
    timed: pd.DataFrame = frame.assign(start_ns=start - shift, end_ns=end - shift, step=step)
    return timed.reset_index(drop=True)
