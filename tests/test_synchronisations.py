"""The last common synchronisation is the one that a search through all instances finds."""

import numpy as np
import pandas as pd
import pytest

from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.instances import Instances
from traceaudit.ranks.members import categorical
from traceaudit.ranks.synchronisations import SYNCHRONISING, Synchronisations

GROUPS = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3), (3, 4)]  # rank 4 is not traced
KINDS = ["all_reduce", "all_to_all", "broadcast"]


def job(seed: int) -> tuple[pd.DataFrame, Instances, Arrivals]:
    """Return instances of groups by chance; a few lack a rank."""
    chance = np.random.default_rng(seed)
    rows = []
    for number in range(60):
        group, kind = int(chance.integers(len(GROUPS))), KINDS[int(chance.integers(len(KINDS)))]
        missing = int(chance.integers(40))
        rows += [
            (number, rank, group, kind, 100 * number + int(chance.integers(300)), int(chance.integers(1, 400)))
            for rank in GROUPS[group]
            if rank not in (4, missing)
        ]
    table = pd.DataFrame(rows, columns=["instance", "rank", "group", "kind", "start_ns", "length"])
    table = table.assign(
        end_ns=table["start_ns"] + table["length"],
        members=categorical(table["group"].to_numpy(), GROUPS),
        kind=pd.Categorical(table["kind"]),
    )
    start, yes = table["start_ns"].to_numpy(), np.ones(len(table), np.bool_)
    arrivals = Arrivals(start, table["rank"].to_numpy(), yes, start, ~yes)
    return table, Instances.of(table["instance"].to_numpy(), table["rank"].to_numpy()), arrivals


def searched(table: pd.DataFrame, instance: int) -> set[int]:
    """Return the instances that end last, at or before the last arrival of another, with all of its ranks."""
    own = table[table["instance"] == instance]
    if own["kind"].iloc[0] not in SYNCHRONISING:
        return set()
    arrival, wanted = own["start_ns"].max(), set(GROUPS[own["group"].iloc[0]])
    ends: dict[int, int] = {}
    for number, other in table.groupby("instance"):
        group = set(GROUPS[other["group"].iloc[0]])
        complete = set(other["rank"]) == group - {4} and other["kind"].iloc[0] in SYNCHRONISING
        if complete and group >= wanted and number != instance and other["end_ns"].max() <= arrival:
            ends[int(str(number))] = other["end_ns"].max()
    return {number for number, end in ends.items() if end == max(ends.values())}


@pytest.mark.parametrize("seed", range(6))
def test_the_last_synchronisation_before_an_arrival_is_found(seed: int) -> None:
    """For each instance it is one that ended last among those with all of its ranks."""
    table, rows, arrivals = job(seed)
    found = Synchronisations(table, rows, arrivals).previous(np.arange(len(rows)))
    for place, previous in enumerate(found.tolist()):
        wanted = searched(table, int(rows.number[place]))
        assert (int(rows.number[previous]) in wanted) if previous >= 0 else not wanted
    assert (found >= 0).any()
    assert (found < 0).any()
