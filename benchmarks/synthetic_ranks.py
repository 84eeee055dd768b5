"""Accounts of a large job without its traces: what the cross-rank step works on, made in memory.

Each host has eight ranks that reduce over tensor parallelism; every fifth collective spans the ranks with the same
place on every host. Ranks arrive late by chance, and each collective ends for all its ranks after the last has arrived.
"""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount, account, compact
from traceaudit.intervals import Intervals
from traceaudit.leaves import Leaf
from traceaudit.ranks.members import categorical
from traceaudit.ranks.shared import Shared
from traceaudit.reading.normalise import read_trace
from traceaudit.simulate import simulate
from traceaudit.steps import Selection, Steps

GPUS = 8  # of a host
WIDE_EVERY = 5  # collectives, of which one spans hosts
PERIOD_NS, LATE_NS, TRANSFER_NS = 2_000_000, 200_000, 300_000
BEGUN_NS = 1_790_000_000 * 10**9


def accounts(ranks: int, collectives: int, seed: int = 0) -> list[RankAccount]:
    """Return the accounts of a job of `ranks` ranks that ran `collectives` collectives each in one step."""
    template = _template()
    start, end, wide = _times(ranks, collectives, np.random.default_rng(seed))
    groups = [tuple(range(host * GPUS, (host + 1) * GPUS)) for host in range(ranks // GPUS)]
    across = [tuple(range(place, ranks, GPUS)) for place in range(GPUS)]
    shared = Shared()
    return [
        shared.of(
            _account(
                template, rank, ranks, start[:, rank], end[:, rank], wide, groups[rank // GPUS], across[rank % GPUS]
            )
        )
        for rank in range(ranks)
    ]


def _template() -> RankAccount:
    with tempfile.TemporaryDirectory() as folder:
        directory = simulate(Path(folder) / "run", "exposed_allreduce")
        return account(read_trace(sorted(directory.glob("rank*"))[0]), Selection())


def _times(ranks: int, collectives: int, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts and ends, collectives x ranks, and which of the collectives span hosts."""
    wide = np.arange(collectives) % WIDE_EVERY == WIDE_EVERY - 1
    start = np.empty((collectives, ranks), np.int64)
    end = np.empty((collectives, ranks), np.int64)
    for number in range(collectives):
        begun = BEGUN_NS + number * PERIOD_NS
        start[number] = begun + chance.integers(0, LATE_NS, ranks)
        shape = (ranks // GPUS, GPUS)
        last = start[number].reshape(shape).max(axis=0 if wide[number] else 1, keepdims=True)
        end[number] = (np.broadcast_to(last, shape) + TRANSFER_NS).ravel() + chance.integers(0, 500, ranks)
    return start, end, wide


def _account(
    template: RankAccount,
    rank: int,
    ranks: int,
    start: np.ndarray,
    end: np.ndarray,
    wide: np.ndarray,
    group: tuple[int, ...],
    across: tuple[int, ...],
) -> RankAccount:
    count = len(start)
    window = Intervals(np.array([BEGUN_NS - PERIOD_NS]), np.array([BEGUN_NS + (count + 1) * PERIOD_NS]))
    exposed_ns = int((end - start).sum())
    own = template.communications
    communications = own.iloc[np.zeros(count, np.intp)].reset_index(drop=True)
    communications = compact(
        communications.assign(
            start_ns=start,
            end_ns=end,
            kind="all_reduce",
            direction="",
            group_description=np.where(wide, "mesh_dp", "mesh_tp"),
            group_size=np.where(wide, len(across), len(group)),
            group=categorical(wide.astype(np.int8), [group, across]),
            bytes=np.where(wide, 1 << 26, 1 << 22),
            seq=np.arange(count),
        )
    )
    computing = np.concatenate(([start[0] - window.start[0]], start[1:] - end[:-1]))
    places = np.arange(0, 2 * count, 2, dtype=np.int32)
    progress = pd.DataFrame({"place": places, "cls": np.int16(Leaf.NOT_SPLIT), "ns": computing})
    rest = int(window.end[0] - window.start[0]) - exposed_ns
    compute = template.compute.iloc[:1].assign(step=0, ns=rest)
    return dataclasses.replace(
        template,
        origin=dataclasses.replace(
            template.origin,
            file=Path(f"rank{rank}.json.gz"),
            rank=rank,
            world_size=ranks,
            host=f"host{rank // GPUS}",
            processes=(rank,),
            groups=(),
        ),
        steps=Steps(np.array([0]), window, "ProfilerStep", None),
        first_ns=int(window.start[0]),
        last_ns=int(window.end[0]),
        decided=template.decided.iloc[:0],
        compute=compute,
        exposed=pd.DataFrame(
            {
                "step": np.zeros(count, np.int32),
                "start_ns": start,
                "end_ns": end,
                "communication": np.arange(count, dtype=np.int32),
                "trailing": False,
            }
        ),
        communications=communications,
        signatures=template.signatures.iloc[:8].assign(step=0),
        progress=progress,
        memo=template.memo.iloc[:1].assign(step=0),
        device=rank % GPUS,
        **{
            name: getattr(template, name).iloc[:0]
            for name in ("schedule", "gaps", "host_gaps", "work", "overlap", "shapes", "recompute")
        },
    )
