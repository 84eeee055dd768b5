"""How much of each class a rank had spent by each start and end of its communications: as a loop over time sums it."""

import numpy as np
import pandas as pd
import pytest

from traceaudit.leaves import Leaf
from traceaudit.ranks import elapsed
from traceaudit.ranks.elapsed import PIPELINE, TRANSFER, Elapsed
from traceaudit.ranks.owned import Owned

CLASSES = (Leaf.NOT_SPLIT, Leaf.KERNELS)


@pytest.fixture(params=[(1 << 20, 1), (1, 1), (25, 1), (1, 1 << 26), (1 << 20, 1 << 26)])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[pd.DataFrame, list[pd.DataFrame]]:
    """Communications of four ranks, some at once, and the progress of each, in 32 bits or above.

    They are summed up few ranks at a time or all.
    """
    rows, scale = request.param
    monkeypatch.setattr(elapsed, "ROWS", rows)
    chance = np.random.default_rng(3)
    tables, progress = [], []
    for rank, count in enumerate((20, 1, 30, 11)):
        start = np.sort(chance.integers(0, 10_000, count)) * 10 + 1
        end = start + 10 * chance.integers(1, 800, count)  # no start is an end
        tables.append(pd.DataFrame({"rank": np.int32(rank), "start_ns": start, "end_ns": end}))
        parts = [
            pd.DataFrame(
                {
                    "place": place.astype(np.int32),
                    "cls": np.int16(cls),
                    "ns": scale * chance.integers(1, 99, len(place)),
                }
            )
            for cls in CLASSES
            for place in [np.flatnonzero(chance.random(2 * count) < 0.6)]
        ]
        progress.append(pd.concat(parts, ignore_index=True))
    return pd.concat(tables, ignore_index=True), progress


def owned(table: pd.DataFrame, progress: list[pd.DataFrame]) -> Owned:
    """Return what `Elapsed` takes, from tables that stay."""
    return Owned(table.groupby("rank").size().tolist(), [], list(progress))


def test_time_is_summed_up_to_each_edge(job: tuple[pd.DataFrame, list[pd.DataFrame]]) -> None:
    """The time of a class by an edge is what stands at this edge and at those of its rank before it."""
    table, progress = job
    none = np.empty(0, np.int32), np.empty(0, np.int64)
    found = Elapsed(owned(table, progress), table, {TRANSFER: none, PIPELINE: none})
    assert set(found.classes) == {*CLASSES, TRANSFER, PIPELINE}
    for cls in CLASSES:
        before, after = found.of(cls)
        for rank, spent in enumerate(progress):
            of_class = spent[spent["cls"] == cls]
            ns_at = dict(zip(of_class["place"].tolist(), of_class["ns"].tolist(), strict=True))
            rows = np.flatnonzero(table["rank"].to_numpy() == rank)
            start, end = (table[name].to_numpy()[rows].tolist() for name in ("start_ns", "end_ns"))
            edges = sorted([*start, *end])
            for row, *own in zip(rows.tolist(), start, end, strict=True):
                wanted = [sum(ns for place, ns in ns_at.items() if edges[place] <= edge) for edge in own]
                assert [before[row], after[row]] == wanted


def test_exposed_time_counts_from_the_start_of_its_communication(
    job: tuple[pd.DataFrame, list[pd.DataFrame]],
) -> None:
    """Before a communication stands what earlier ones of its rank own, after it also its own."""
    table, progress = job
    chance = np.random.default_rng(4)
    rows, ns = chance.integers(0, len(table), 90).astype(np.int32), chance.integers(1, 50, 90)
    none = np.empty(0, np.int32), np.empty(0, np.int64)
    before, after = Elapsed(owned(table, progress), table, {TRANSFER: (rows, ns), PIPELINE: none}).of(TRANSFER)
    own = np.zeros(len(table), np.int64)
    for row, length in zip(rows, ns, strict=True):
        own[row] += length
    for _, mine in table.groupby("rank"):
        done = 0
        for row in mine.sort_values("start_ns", kind="stable").index:
            assert (before[row], after[row]) == (done, done + own[row])
            done += own[row]


def test_progress_is_given_up(job: tuple[pd.DataFrame, list[pd.DataFrame]]) -> None:
    """Whoever holds the tables holds none of them afterwards."""
    table, progress = job
    none = np.empty(0, np.int32), np.empty(0, np.int64)
    held = owned(table, progress)
    Elapsed(held, table, {TRANSFER: none, PIPELINE: none})
    assert held.progress == []
