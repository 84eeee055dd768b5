"""The communications of all ranks in one table, and what their process groups stand for."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.leaves import Leaf
from traceaudit.ranks.instances import Integers, first_rows, packed, renumbered
from traceaudit.ranks.members import Ranks, categorical, coded

# Descriptions of process groups (Megatron, DeviceMesh, DeepSpeed) and the dimension they span; the first that matches.
DIMENSIONS: tuple[tuple[re.Pattern[str], Leaf], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), leaf)
    for pattern, leaf in (
        (r"pipeline|(?:^|_)pp(?:$|_)|embedding_group", Leaf.PP),
        (r"expert_data|expert_dp", Leaf.DP),
        (r"expert_tensor", Leaf.TP),
        (r"expert|(?:^|_)ep(?:$|_)", Leaf.EP),
        (r"shard|fsdp", Leaf.FSDP),
        (r"data_parallel|replicate|(?:^|_)dp(?:$|_)|ddp", Leaf.DP),
        (r"context|(?:^|_)cp(?:$|_)", Leaf.CP),
        (r"tensor_and|model_parallel_group$(?<!tensor_model_parallel_group)", Leaf.OTHER_COMM),
        (r"tensor|(?:^|_)tp(?:$|_)", Leaf.TP),
    )
)
FOR_MATCHING = (
    "group_size",
    "seq",
    "source_rank",
    "destination_rank",
    "root",
    "host",
)  # columns of no use once matched
PIPELINE = re.compile(r"pipeline|(?:^|_)pp(?:$|_)", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out, as far as it is known.

    Attributes:
        stage: pipeline stage by rank; empty without a pipeline.
        chains: the pipelines, each its ranks in the order of the stages.
        whole: what the group of all ranks stands for: data parallelism in a job with nothing else.
        pipelined: there is, or may be, a pipeline.
        source: where the stages come from.
    """

    stage: dict[int, int]
    chains: tuple[tuple[int, ...], ...]
    whole: Leaf
    pipelined: bool
    source: str


def layout(accounts: Sequence[RankAccount], world_size: int | None, declared: Mapping[str, int]) -> Layout:
    """Infer the pipeline stage of each rank from its process groups, else from the declared degrees.

    Without groups the pipeline is taken as the outermost dimension of the rank order, as Megatron and DeviceMesh lay
    ranks out.
    """
    chains: set[tuple[int, ...]] = set()
    found: set[Leaf] = set()
    for account in accounts:
        for group in account.origin.groups:
            leaf = dimension_of(group.description)
            if leaf is not None and len(group.ranks) > 1:
                found.add(leaf)
            if PIPELINE.search(group.description) and len(group.ranks) > 1:
                chains.add(group.ranks)
    degrees = {"pp": Leaf.PP, "tp": Leaf.TP, "cp": Leaf.CP, "ep": Leaf.EP}
    found |= {leaf for name, leaf in degrees.items() if declared.get(name, 1) > 1}
    source = "process groups"
    depth = declared.get("pp", 1)
    if not chains and depth > 1 and world_size and world_size % depth == 0:
        wide = world_size // depth
        chains = {tuple(first + stage * wide for stage in range(depth)) for first in range(wide)}
        source = "declared degree; pipeline taken as the outermost dimension of the ranks"
    if not chains:
        chains = _by_partners(accounts)
        source = "partners of point-to-point communication" if chains else "none"
    stage = {rank: index for chain in chains for index, rank in enumerate(chain)}
    others = found - {Leaf.DP, Leaf.FSDP, Leaf.OTHER_COMM}
    alone = [degrees[name] for name in ("tp", "cp", "ep") if world_size and declared.get(name) == world_size]
    whole = alone[0] if alone else Leaf.OTHER_COMM if others else Leaf.DP
    return Layout(stage, tuple(sorted(chains)), whole, bool(stage) or Leaf.PP in found or not others, source)


def _by_partners(accounts: Sequence[RankAccount]) -> set[tuple[int, ...]]:
    """Return pipelines from who sends to whom: paths of partners, the rank that sends first at the head."""
    partners: dict[int, set[int]] = {}
    sends_first: set[int] = set()
    for account in accounts:
        own = account.communications
        if account.steps is None or not len(own) or not own["direction"].cat.categories.isin(("send", "recv")).any():
            continue
        directed = own[own["direction"].isin(("send", "recv"))]
        if not len(directed):
            continue
        peers = np.where(directed["direction"] == "send", directed["destination_rank"], directed["source_rank"])
        for peer in {int(peer) for peer in peers if peer >= 0 and peer != account.rank}:
            partners.setdefault(account.rank, set()).add(peer)
            partners.setdefault(peer, set()).add(account.rank)
        begun = directed[directed["start_ns"] >= int(account.steps.windows.start[0])]
        if len(begun) and begun["direction"].to_numpy()[0] == "send":
            sends_first.add(account.rank)
    ends = [rank for rank, others in partners.items() if len(others) == 1 and rank in sends_first]
    chains = set()
    for head in ends:
        path = [head]
        while following := [rank for rank in sorted(partners[path[-1]]) if rank not in path]:
            path.append(following[0])
        chains.add(tuple(path))
    heads = {chain[0] for chain in chains}
    return {chain for chain in chains if chain[-1] not in heads and all(len(partners[rank]) <= 2 for rank in chain)}


def dimension_of(description: str) -> Leaf | None:
    """Return the dimension a process group's description names, if it names one.

    >>> [dimension_of(text) for text in ("TENSOR_MODEL_PARALLEL_GROUP", "default_pg")]
    [<Leaf.TP: 20>, None]
    """
    return next((leaf for pattern, leaf in DIMENSIONS if pattern.search(description)), None)


def gather(
    accounts: Sequence[RankAccount], world_size: int | None, plan: Layout, host: Mapping[int, int]
) -> pd.DataFrame:
    """Return the communications of all ranks in one table.

    Columns beside those of `RankAccount.communications`: ``rank``, ``host`` (number), ``members`` (tuple of ranks; for
    a send or receive its pair; all ranks where nothing tells), ``assumed`` (the members are a guess),
    ``leaf`` (dimension, `Leaf`) and ``pipeline`` (point-to-point of a pipeline). ``group`` became ``members``.
    """
    present = [account for account in accounts if account.steps is not None and len(account.communications)]
    if not present:
        return pd.DataFrame()
    length = [len(own.communications) for own in present]
    columns: dict[str, Any] = {
        str(name): _concatenated([own.communications[name] for own in present])
        for name in present[0].communications
        if name != "group"
    }
    columns["rank"] = np.repeat(np.array([own.rank for own in present], np.int32), length)
    columns["host"] = np.repeat(np.array([host[own.rank] for own in present], np.int32), length)
    sharded = np.repeat(np.array([own.sharded for own in present], np.bool_), length)
    everyone = tuple(range(world_size)) if world_size else tuple(account.rank for account in accounts)
    codes, groups = _grouped([own.communications["group"] for own in present])
    kind, kinds = columns["kind"].codes, columns["kind"].categories
    description, descriptions = columns["group_description"].codes, columns["group_description"].categories
    described = [dimension_of(str(text)) for text in descriptions]

    def staged_of(row: int) -> bool:
        known = groups[codes[row]]
        leaf = described[description[row]]
        return bool(kinds[kind[row]] == "send_recv") and _is_pipeline(leaf, everyone if known is None else known, plan)

    staged = np.asarray(_by_distinct((codes, kind, description), staged_of), np.bool_)
    whose, members = _members(columns, codes, groups, everyone)
    assumed = np.array([group is None for group in groups], np.bool_)[codes]

    def leaf_of(row: int) -> int:
        known = None if assumed[row] else members[whose[row]]
        leaf = described[description[row]]
        return int(_leaf(leaf, kinds[kind[row]], known, everyone, bool(sharded[row]), plan, bool(staged[row])))

    leaves = _by_distinct((whose, assumed, kind, description, sharded, staged), leaf_of)
    columns["assumed"], columns["leaf"], columns["pipeline"] = assumed, np.asarray(leaves, np.int16), staged
    places, kept = renumbered(whose, len(members))
    columns["members"] = categorical(places, [members[old] for old in kept])
    return pd.DataFrame(columns, copy=False)


def _concatenated(columns: Sequence["pd.Series[Any]"]) -> Any:  # noqa: ANN401  an array or categories
    """Return columns of several tables as one; categories become those of all, sorted."""
    if not isinstance(columns[0].dtype, pd.CategoricalDtype):
        return np.concatenate([column.to_numpy() for column in columns])
    texts = sorted({text for column in columns for text in column.cat.categories})
    number = {text: code for code, text in enumerate(texts)}
    codes = [np.array([number[text] for text in own.cat.categories], np.int32)[own.cat.codes] for own in columns]
    return pd.Categorical.from_codes(np.concatenate(codes), pd.Index(texts))


def _grouped(columns: Sequence["pd.Series[Any]"]) -> tuple[Integers, list[Ranks | None]]:
    """Return for each row the number of its group, in the order of first appearance, and the distinct groups."""
    numbers: dict[Ranks | None, int] = {None: 0}
    parts = []
    for column in columns:
        own, groups = coded(column)
        place = np.array([numbers.setdefault(group, len(numbers)) for group in (*groups, None)], np.int32)
        parts.append(place[own])  # -1, no group, is the last one
    codes, old = renumbered(np.concatenate(parts), len(numbers))
    distinct = list(numbers)
    return codes, [distinct[number] for number in old]


def _by_distinct(codes: Sequence[npt.NDArray[Any]], function: Callable[[int], object]) -> npt.NDArray[np.generic]:
    """Return what a function says of each row, asked for one row of each combination of codes."""
    number, distinct = pd.factorize(packed(*(code.view(np.int8) if code.dtype == np.bool_ else code for code in codes)))
    return np.array([function(int(row)) for row in first_rows(number, len(distinct))])[number]


def _members(
    columns: Mapping[str, Any], codes: Integers, groups: Sequence[Ranks | None], everyone: Ranks
) -> tuple[Integers, list[Ranks]]:
    """Return for each row the number of its members, and the members: its group, or the pair of a send or receive."""
    numbers: dict[Ranks, int] = {}
    of_group = np.array(
        [numbers.setdefault(everyone if own is None else own, len(numbers)) for own in groups], np.int32
    )
    found = of_group[codes]
    direction = columns["direction"]
    paired = np.flatnonzero((columns["kind"] == "send_recv") & (direction != ""))
    rank = columns["rank"][paired]
    peer = np.where((direction == "recv")[paired], columns["source_rank"][paired], columns["destination_rank"][paired])
    known = (peer >= 0) & (peer != rank)
    paired, rank, peer = paired[known], rank[known], peer[known]
    pairs = np.stack([np.minimum(rank, peer), np.maximum(rank, peer)], axis=1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    of_pair = [numbers.setdefault((int(low), int(high)), len(numbers)) for low, high in distinct]
    found[paired] = np.array(of_pair, np.int32)[inverse.ravel()]
    return found, list(numbers)


def _is_pipeline(leaf: Leaf | None, group: tuple[int, ...], plan: Layout) -> bool:
    """Tell whether point-to-point traffic in a group belongs to a pipeline: by name, else by the stages it joins."""
    if leaf is not None:
        return leaf == Leaf.PP
    return len({plan.stage.get(rank) for rank in group}) > 1 or plan.pipelined


def _leaf(
    leaf: Leaf | None,
    kind: str,
    group: tuple[int, ...] | None,
    everyone: tuple[int, ...],
    sharded: bool,
    plan: Layout,
    staged: bool,
) -> Leaf:
    """Return the dimension of a communication; a group that is not known names none."""
    if staged:
        return Leaf.PP
    if leaf is None:
        spans_all = len(group or ()) == len(everyone) or (
            group is None and plan.whole not in (Leaf.DP, Leaf.OTHER_COMM)
        )
        leaf = plan.whole if spans_all else Leaf.OTHER_COMM
        if leaf == Leaf.DP and kind in ("all_to_all", "send_recv"):
            leaf = Leaf.OTHER_COMM
    if leaf == Leaf.DP and sharded and kind in ("all_gather", "reduce_scatter"):
        return Leaf.FSDP
    return leaf


def group_label(description: str, members: tuple[int, ...], *, assumed: bool) -> str:
    """Return a short text for a process group.

    >>> group_label("mesh_dp", (0, 1), assumed=False)
    'mesh_dp [0, 1]'
    """
    ranks = str(list(members))
    if len(members) > 8:
        ranks = f"[{members[0]}, {members[1]}, …, {members[-1]}] ({len(members)} ranks)"
    return f"{description + ' ' if description else ''}{ranks}{' (assumed)' if assumed else ''}"
