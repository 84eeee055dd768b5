"""The communications of all ranks in one table, and what their process groups stand for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.leaves import Leaf

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
PIPELINE = re.compile(r"pipeline|(?:^|_)pp(?:$|_)", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out, as far as it is known.

    Attributes:
        stage: pipeline stage by rank; empty without a pipeline.
        whole: what the group of all ranks stands for: data parallelism in a job with nothing else.
        pipelined: there is, or may be, a pipeline.
        source: where the stages come from.
    """

    stage: dict[int, int]
    whole: Leaf
    pipelined: bool
    source: str


def layout(accounts: Sequence[RankAccount], world_size: int | None, declared: Mapping[str, int]) -> Layout:
    """Infer the pipeline stage of each rank from its process groups, else from the declared degrees.

    Without groups the pipeline is taken as the outermost dimension of the rank order, as Megatron and DeviceMesh lay
    ranks out.
    """
    stage: dict[int, int] = {}
    found: set[Leaf] = set()
    for account in accounts:
        for group in account.origin.groups:
            leaf = dimension_of(group.description)
            if leaf is not None and len(group.ranks) > 1:
                found.add(leaf)
            if PIPELINE.search(group.description) and len(group.ranks) > 1:
                stage.update({rank: index for index, rank in enumerate(group.ranks)})
    degrees = {"pp": Leaf.PP, "tp": Leaf.TP, "cp": Leaf.CP, "ep": Leaf.EP}
    found |= {leaf for name, leaf in degrees.items() if declared.get(name, 1) > 1}
    source = "process groups"
    depth = declared.get("pp", 1)
    if not stage and depth > 1 and world_size and world_size % depth == 0:
        stage = {account.rank: account.rank * depth // world_size for account in accounts}
        source = "declared degree; pipeline taken as the outermost dimension of the ranks"
    if not stage:
        source = "none"
    others = found - {Leaf.DP, Leaf.FSDP, Leaf.OTHER_COMM}
    alone = [degrees[name] for name in ("tp", "cp", "ep") if world_size and declared.get(name) == world_size]
    whole = alone[0] if alone else Leaf.OTHER_COMM if others else Leaf.DP
    return Layout(stage, whole, bool(stage) or Leaf.PP in found or not others, source)


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
    ``leaf`` (dimension, `Leaf`) and ``pipeline`` (point-to-point of a pipeline).
    """
    frames = []
    for account in accounts:
        if account.steps is not None:
            own = account.communications
            frames.append(own.assign(rank=account.rank, host=host[account.rank], sharded=account.sharded))
    table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    if not len(table):
        return table
    everyone = tuple(range(world_size)) if world_size else tuple(account.rank for account in accounts)
    described = {text: dimension_of(text) for text in table["group_description"].unique()}
    members, assumed, leaves, pipeline = [], [], [], []
    columns = ("rank", "kind", "direction", "group", "group_description", "source_rank", "destination_rank", "sharded")
    for rank, kind, direction, group, description, source, destination, sharded in zip(
        *(table[name] for name in columns), strict=True
    ):
        leaf = described[description]
        known = group if group is not None else everyone
        staged = kind == "send_recv" and _is_pipeline(leaf, known, plan)
        if kind == "send_recv" and direction:
            peer = source if direction == "recv" else destination
            if peer >= 0 and peer != rank:
                known = (min(rank, peer), max(rank, peer))
        members.append(known)
        assumed.append(group is None)
        pipeline.append(staged)
        leaves.append(int(_leaf(leaf, kind, known if group is not None else None, everyone, sharded, plan, staged)))
    result = table.assign(assumed=assumed, leaf=np.array(leaves, np.int64), pipeline=pipeline)
    result["members"] = members
    return result


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
