"""How communication looks in a trace: names and arguments of the operators, annotations and kernels of NCCL."""

from dataclasses import dataclass
from typing import Any

from traceaudit.simulate.job import Group

KERNEL_ARGUMENTS = "(ncclDevKernelArgsStorage<4096ul>)"
COALESCED = "nccl:coalesced"  # annotation of messages that are launched as a batch
GRID, BLOCK = (24, 1, 1), (544, 1, 1)
LISTED_RANKS = 30  # the profiler cuts longer lists


@dataclass(frozen=True)
class Kind:
    """Names of one kind of communication, and which side of the message is one rank's shard."""

    collective_name: str
    annotation: str
    kernel: str
    sharded_in: bool = False
    sharded_out: bool = False


KINDS = {
    "all_reduce": Kind("allreduce", "nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    "all_gather": Kind("_allgather_base", "nccl:_all_gather_base", "ncclDevKernel_AllGather_RING_LL", sharded_in=True),
    "reduce_scatter": Kind(
        "_reduce_scatter_base",
        "nccl:_reduce_scatter_base",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
        sharded_out=True,
    ),
    "send": Kind("send", "nccl:send", "ncclDevKernel_SendRecv"),
    "recv": Kind("recv", "nccl:recv", "ncclDevKernel_SendRecv"),
}


def listed(ranks: tuple[int, ...]) -> str:
    """Return the ranks of a group as the profiler writes them.

    >>> listed((0, 4))
    '[0, 4]'
    """
    if len(ranks) <= LISTED_RANKS:
        return str(list(ranks))
    return f"{str(list(ranks[: LISTED_RANKS - 1]))[:-1]}, ..., {ranks[-1]}]"


def collective_args(kind: str, group: Group, elements: int, seq: int | None, peer: int | None) -> dict[str, Any]:
    """Return the arguments a kernel shares with its `record_param_comms`; `elements` is the unsharded message."""
    names, size = KINDS[kind], len(group.ranks)
    args: dict[str, Any] = {
        "Collective name": names.collective_name,
        "In msg nelems": elements // size if names.sharded_in else elements,
        "Out msg nelems": elements // size if names.sharded_out else elements,
        "Group size": size,
        "dtype": "BFloat16",
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": listed(group.ranks),
    }
    if peer is not None:
        args["Src Rank" if kind == "recv" else "Dst Rank"] = peer
    if seq is not None:
        args["Seq"] = seq
    return args


def comms_op_args(args: dict[str, Any], group: Group, rank_or_peer: int) -> dict[str, Any]:
    """Return the arguments of `record_param_comms`: those of the kernel and what only the operator has."""
    stride = group.ranks[1] - group.ranks[0] if len(group.ranks) > 1 else 1
    own = {"Rank": rank_or_peer, "Global rank start": group.ranks[0], "Global rank stride": stride}
    dims = {"Input Dims": [[args["In msg nelems"]]], "Input type": ["c10::BFloat16"]}
    return {**args, **own, **dims}
