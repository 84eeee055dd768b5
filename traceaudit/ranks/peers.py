"""Which ranks compute slower than their peers on the same work, and which have more of it (attribution rule 3.1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount

SLOWER = 1.05  # a kernel this much over its peers' median is slower
SLOW_SHARE = 0.8  # of the compared kernel time, above which it is the GPU that is slow
SHOWN_KERNELS = 3


@dataclass(frozen=True)
class RankWork:
    """The compute of one rank against its peers'.

    Attributes:
        compared_ns: in kernels that peers ran equally often.
        slower_ns: of it, in kernels slower than the peers'.
        excess_ns: over the peers, in all compared kernels that took longer.
        more_ns: beyond the median rank's compute, as far as slower kernels do not explain it.
        slow_gpu: the kernels are slower throughout.
        kernels: name, ratio to the peers and excess of the kernels with the largest excess.
    """

    compared_ns: int
    slower_ns: int
    excess_ns: int
    more_ns: int
    slow_gpu: bool
    kernels: tuple[tuple[str, float, int], ...]


@dataclass(frozen=True)
class Peers:
    """Kernels of each rank against the same kernels of the others.

    Attributes:
        excess: ``rank, step, family, ns`` that the kernels of slow GPUs took over their peers'.
        work: by rank.
    """

    excess: pd.DataFrame
    work: Mapping[int, RankWork]


def compare(accounts: Sequence[RankAccount], windows: pd.DataFrame, stage: Mapping[int, int]) -> Peers:
    """Compare kernels of the same name, grid and shapes that ran equally often in a step.

    Peers are the ranks of one pipeline stage: whether a stage is heavy or its only GPU slow cannot be told.
    """
    frames = [account.signatures.assign(rank=account.rank) for account in accounts if account.steps is not None]
    table = pd.concat(frames, ignore_index=True).merge(windows[["rank", "step"]], on=["rank", "step"])
    table = table.assign(stage=[stage.get(int(rank), 0) for rank in table["rank"]])
    same = table.groupby(["stage", "signature", "step", "count"])["ns"]
    size = same.transform("size")
    usual = np.where(size > 2, same.transform("median"), same.transform("min"))
    table = table.assign(compared=size > 1, usual=np.rint(usual).astype(np.int64))
    table = table.assign(excess_ns=np.where(table["compared"], table["ns"] - table["usual"], 0))
    work = _work(table)
    slow = [rank for rank, own in work.items() if own.slow_gpu]
    over = table[table["rank"].isin(slow) & (table["excess_ns"] > 0)]
    excess = over.groupby(["rank", "step", "family"], as_index=False)[["excess_ns"]].sum()
    return Peers(excess.rename(columns={"excess_ns": "ns"}), work)


def _work(table: pd.DataFrame) -> dict[int, RankWork]:
    slower = table["compared"] & (table["ns"] > SLOWER * table["usual"])
    frame = pd.DataFrame(
        {
            "rank": table["rank"],
            "stage": table["stage"],
            "ns": table["ns"],
            "compared": np.where(table["compared"], table["ns"], 0),
            "slower": np.where(slower, table["ns"], 0),
            "excess": np.maximum(table["excess_ns"], 0),
        }
    )
    stage = frame.groupby("rank")["stage"].first()
    sums = frame.groupby("rank")[["ns", "compared", "slower", "excess"]].sum()
    beyond = sums["ns"] - sums["ns"].groupby(stage).transform("median").round().astype(np.int64)
    more = np.maximum(beyond - sums["excess"], 0)
    kernels = _kernels(table)
    return {
        int(rank): RankWork(
            compared_ns=int(compared),
            slower_ns=int(slow),
            excess_ns=int(excess),
            more_ns=int(extra),
            slow_gpu=bool(compared > 0 and slow >= SLOW_SHARE * compared),
            kernels=kernels.get(int(rank), ()),
        )
        for rank, compared, slow, excess, extra in zip(
            sums.index.to_numpy(), sums["compared"], sums["slower"], sums["excess"], more, strict=True
        )
    }


def _kernels(table: pd.DataFrame) -> dict[int, tuple[tuple[str, float, int], ...]]:
    """Return the kernels of each rank that cost the most over its peers."""
    over = table[table["excess_ns"] > 0]
    sums = over.groupby(["rank", "name"], as_index=False)[["ns", "usual", "excess_ns"]].sum()
    sums = sums.sort_values(["rank", "excess_ns"], ascending=[True, False], kind="stable")
    result: dict[int, list[tuple[str, float, int]]] = {}
    for rank, name, ns, usual, excess in zip(
        *(sums[column] for column in ("rank", "name", "ns", "usual", "excess_ns")), strict=True
    ):
        own = result.setdefault(int(rank), [])
        if len(own) < SHOWN_KERNELS:
            own.append((str(name), int(ns) / max(int(usual), 1), int(excess)))
    return {rank: tuple(own) for rank, own in result.items()}
