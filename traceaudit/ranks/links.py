"""How fast process groups carried their messages, and which were slower than their peers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.leaves import Bucket, Leaf, in_bucket
from traceaudit.ranks.align import by_rank
from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.collectives import group_label
from traceaudit.ranks.elapsed import by_row
from traceaudit.ranks.instances import Instances, Integers, first_rows, packed, small, stretches, summed_parts
from traceaudit.ranks.matching import Matching
from traceaudit.ranks.members import coded, each

Floats = npt.NDArray[np.float64]

SLOWER = 1.1  # a group this much over the median of its peer groups has a slow link
PEER_GROUPS = 3  # groups of one kind, size and message that a comparison needs

# Bus bandwidth over algorithm bandwidth for n ranks, as NCCL's performance tests define it (PERFORMANCE.md).
BUS_FACTORS: Mapping[str, Callable[[Floats], Floats]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def transfers(table: pd.DataFrame, matching: Matching, arrivals: Arrivals) -> pd.DataFrame:
    """Return one row a matched instance of known arrival.

    Columns: ``instance, members, kind, leaf, bytes, ranks`` (in the group), ``transfer_ns`` (from the last arrival to
    the median end), ``bus_bytes`` (message size times the bus factor; 0 where the size is unknown).
    """
    usable = arrivals.known & (matching.instance >= 0)
    rows = matching.rows
    if not usable[rows.rows].all():
        rows = Instances.of(np.where(usable, matching.instance, -1), table["rank"].to_numpy())
    if not len(rows):
        return pd.DataFrame(
            columns=["instance", "members", "kind", "leaf", "bytes", "ranks", "transfer_ns", "bus_bytes"]
        )
    first = table.iloc[rows.min(np.arange(len(table), dtype=np.int32))]
    kind = first["kind"].to_numpy(dtype=object)
    ranks = each(first["members"], len).astype(np.int64)
    bytes_ = rows.max(table["bytes"].to_numpy())
    factor = np.ones(len(first))
    for name, bus in BUS_FACTORS.items():
        own = kind == name
        factor[own] = bus(ranks[own].astype(np.float64))
    transfer = rows.median(np.maximum(table["end_ns"].to_numpy() - arrivals.awaited_ns, 0))
    return pd.DataFrame(
        {
            "instance": rows.number,
            "members": first["members"].array,
            "kind": first["kind"].array,
            "leaf": first["leaf"].to_numpy(),
            "bytes": bytes_,
            "transfer_ns": transfer.round().astype(np.int64),
            "ranks": ranks,
            "bus_bytes": np.maximum(bytes_, 0) * factor,
        }
    )


def totals(
    table: pd.DataFrame,
    exposed: pd.DataFrame,
    carried: pd.DataFrame,
    windows: pd.DataFrame,
    complete: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """Sum up the communications of each group and kind that ran in the analysed windows.

    Columns: ``group`` (text), ``leaf, kind, count, bytes, exposed_ns, wait_ns, transfer_ns`` (exposed),
    ``not_blocking_ns`` (of the exposed time, `traceaudit.idle.blocking`), ``busbw_gbps`` (NaN where sizes or arrivals
    are unknown) and ``estimate_ns``: where partners were not traced, what the exposed time would be if each lasted as
    long as the shortest of its kind and size (NaN elsewhere).
    """
    if not len(table):
        return pd.DataFrame()
    inside = in_windows(table, windows)
    row = exposed["row"].to_numpy()
    waiting = in_bucket(exposed["leaf"], Bucket.STRAGGLER) | (exposed["leaf"] == Leaf.TRACE_CUT).to_numpy()
    waiting |= (exposed["leaf"] == Leaf.UNDIVIDED).to_numpy() & ~table["pipeline"].to_numpy(dtype=np.bool_)[row]
    owned = small(by_row(row, exposed["ns"].to_numpy(), len(table)))
    waited = small(by_row(row[waiting], exposed["ns"].to_numpy()[waiting], len(table)))
    estimate = _estimates(table, owned, complete)
    labels, labelled = _labels(table)

    def part(some: slice) -> pd.DataFrame:
        own, counted = table.iloc[some], inside[some]
        values = {
            "bytes": np.maximum(own["bytes"].to_numpy(), 0),
            "exposed_ns": owned[some],
            "wait_ns": waited[some],
            "not_blocking_ns": np.minimum(own["not_blocking_ns"].to_numpy(), owned[some]),
            "estimate": estimate[some],
            "partial": ~complete[some],
        }
        return pd.DataFrame(
            {
                "group": labels[some],
                "leaf": own["leaf"].to_numpy(),
                "kind": own["kind"].array,
                "count": counted,
                **{name: np.where(counted, column, 0) for name, column in values.items()},
            }
        )

    figures = ("count", "bytes", "exposed_ns", "wait_ns", "not_blocking_ns", "estimate", "partial")
    sums = summed_parts(map(part, stretches(len(table))), ["group", "leaf", "kind"], figures)
    sums = sums[sums["count"] > 0].reset_index(drop=True)
    sums = sums.assign(group=sums["group"].to_numpy(dtype=object), kind=sums["kind"].to_numpy(dtype=object))
    sums = sums.assign(
        transfer_ns=sums["exposed_ns"] - sums["wait_ns"],
        estimate_ns=np.where(sums["partial"] > 0, sums["estimate"], np.nan),
    )
    return _with_bandwidth(sums, carried, labelled).sort_values(
        "exposed_ns", ascending=False, kind="stable", ignore_index=True
    )


def in_windows(table: pd.DataFrame, windows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Tell which communications ran, at least in part, between the first and the last window of their rank."""
    rank = table["rank"].to_numpy()
    span = windows.groupby("rank").agg(low=("start_ns", "min"), high=("end_ns", "max"))
    low, high = (by_rank(dict(zip(span.index, span[name], strict=True)), np.int64) for name in ("low", "high"))
    known = rank < len(low)
    rank = np.where(known, rank, 0)
    return np.asarray(known & (table["end_ns"].to_numpy() > low[rank]) & (table["start_ns"].to_numpy() < high[rank]))


def _labels(table: pd.DataFrame) -> tuple[pd.Categorical, dict[tuple[int, ...], str]]:
    """Return the text of each row's group, and the text by members (the last one, if they go by several)."""
    codes, members = coded(table["members"])
    description, descriptions = pd.factorize(table["group_description"])
    assumed = table["assumed"].to_numpy(dtype=np.bool_)
    number, distinct = pd.factorize(packed(codes, description, assumed.view(np.int8)))
    texts = []
    for row in first_rows(number, len(distinct)):
        ranks = members[codes[row]] or ()
        texts.append(group_label(str(descriptions[description[row]]), ranks, assumed=bool(assumed[row])))
    last = np.zeros(len(distinct), np.int64)
    last[number] = np.arange(len(number))  # of equal rows, the last one is kept
    by_members = {(members[codes[row]] or ()): texts[number[row]] for row in np.sort(last)}
    place, names = pd.factorize(np.array(texts, dtype=object), sort=True)
    return pd.Categorical.from_codes(place[number], pd.Index(names)), by_members


def _estimates(table: pd.DataFrame, owned: Integers, complete: npt.NDArray[np.bool_]) -> Integers:
    """Return the exposed time of communications with untraced partners, capped by the shortest comparable duration."""
    if complete.all():
        return np.zeros(len(table), np.int32)
    length = (table["end_ns"] - table["start_ns"]).to_numpy()
    ranks = each(table["members"], len).astype(np.int64)
    like, distinct = pd.factorize(packed(pd.factorize(table["kind"])[0], table["bytes"].to_numpy(), ranks))
    shortest = np.full(len(distinct), np.iinfo(np.int64).max)
    np.minimum.at(shortest, like, length)
    return small(np.where(complete, 0, np.minimum(owned, shortest[like])))


def _with_bandwidth(sums: pd.DataFrame, carried: pd.DataFrame, labelled: Mapping[tuple[int, ...], str]) -> pd.DataFrame:
    if not len(carried):
        return sums.assign(busbw_gbps=np.nan)
    sized = carried[(carried["bus_bytes"] > 0) & (carried["transfer_ns"] > 0)]
    rate = sized.assign(group=[labelled[members] for members in sized["members"]])
    rate = rate.groupby(["group", "leaf", "kind"], as_index=False)[["bus_bytes", "transfer_ns"]].sum()
    rate = rate.assign(busbw_gbps=rate["bus_bytes"] / rate["transfer_ns"]).drop(columns=["bus_bytes", "transfer_ns"])
    joined: pd.DataFrame = sums.merge(rate, on=["group", "leaf", "kind"], how="left")
    return joined


@dataclass(frozen=True)
class SlowLink:
    """A group whose transfers took longer than those of peer groups with the same kind, size and message.

    Attributes:
        members: ranks of the group.
        kind, bytes, count: of its transfers.
        ratio: to the peers' median.
        excess_ns: over it, all transfers together.
    """

    members: tuple[int, ...]
    kind: str
    bytes: int
    count: int
    ratio: float
    excess_ns: int


def slow_links(carried: pd.DataFrame) -> list[SlowLink]:
    """Return the slow links, the most expensive first."""
    known = carried[carried["bytes"] > 0] if len(carried) else carried
    if not len(known):
        return []
    keys = ["kind", "bytes", "ranks", "leaf"]
    groups = known.groupby([*keys, "members"], as_index=False, observed=True).agg(
        usual=("transfer_ns", "median"), count=("transfer_ns", "size")
    )
    peers = groups.groupby(keys, observed=True)["usual"]
    groups = groups.assign(peer=peers.transform("median"), groups=peers.transform("size"))
    slow = groups[(groups["groups"] >= PEER_GROUPS) & (groups["usual"] > SLOWER * groups["peer"])]
    columns = ("members", "kind", "bytes", "count", "usual", "peer")
    found = [
        SlowLink(members, str(kind), int(size), int(count), usual / max(peer, 1), round((usual - peer) * count))
        for members, kind, size, count, usual, peer in zip(*(slow[name] for name in columns), strict=True)
    ]
    return sorted(found, key=lambda link: (-link.excess_ns, link.kind, link.bytes, len(link.members), link.members))
