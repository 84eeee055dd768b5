"""The last instance, before another one's last arrival, that brought all of its ranks together."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.intervals import Array
from traceaudit.ranks.arrivals import Arrivals
from traceaudit.ranks.instances import Instances, Integers
from traceaudit.ranks.matching import ENDING_TOGETHER
from traceaudit.ranks.members import coded

SYNCHRONISING = ENDING_TOGETHER | {"all_to_all"}


class Synchronisations:
    """Finds the last instance that ended before another's last arrival, in which all of its ranks took part."""

    def __init__(self, table: pd.DataFrame, rows: Instances, arrivals: Arrivals) -> None:
        rank = table["rank"].to_numpy()
        usable = table["kind"].isin(SYNCHRONISING).to_numpy()
        own = rows if usable[rows.rows].all() else Instances.of(np.where(usable, rows.place, -1), rank)
        length = (table["end_ns"] - table["start_ns"]).to_numpy()
        self._last = own.max(arrivals.aligned_ns)
        self._end = own.max(arrivals.aligned_ns + length)
        self._number = np.arange(len(rows)) if own is rows else own.number
        self._at = np.full(len(rows), -1, np.int64)
        self._at[self._number] = np.arange(len(own))
        codes, groups = coded(table["members"])
        self._group = codes[own.min(np.arange(len(table), dtype=np.int32))] if len(own) else codes[:0]
        self._ranks = [frozenset(ranks or ()) for ranks in groups]
        traced = set(np.unique(rank).tolist())
        size = np.array([len(traced.intersection(ranks)) for ranks in self._ranks], np.int64)
        complete = np.flatnonzero(own.ranks(rank) == size[self._group])
        complete = complete[np.lexsort((complete, self._end[complete], self._group[complete]))]
        self._by_group = {int(self._group[held[0]]): held for held in _split(complete, self._group[complete])}
        self._holders: dict[int, list[int]] = {}
        for group in self._by_group:
            for member in self._ranks[group]:
                self._holders.setdefault(member, []).append(group)

    def previous(self, places: Integers) -> Array:
        """Return for instances, by their place in the rows, the place of that other one; -1 for none."""
        found = np.full(len(places), -1, np.int64)
        best = np.full(len(places), np.iinfo(np.int64).min)
        at = self._at[places]
        known = np.flatnonzero(at >= 0)
        known = known[np.argsort(self._group[at[known]], kind="stable")]
        for asked in _split(known, self._group[at[known]]):
            own = at[asked]
            for group in self._around(int(self._group[own[0]])):
                held = self._by_group[group]
                slot = np.searchsorted(self._end[held], self._last[own], side="right") - 1
                slot -= (slot >= 0) & (held[slot] == own)
                chosen = held[slot]
                later = (slot >= 0) & (self._end[chosen] > best[asked])
                found[asked[later]] = self._number[chosen[later]]
                best[asked[later]] = self._end[chosen[later]]
        return found

    def _around(self, members: int) -> list[int]:
        """Return the groups that hold all ranks of another."""
        wanted = self._ranks[members]
        holders = self._holders.get(min(wanted), []) if wanted else list(self._by_group)
        return [group for group in holders if wanted <= self._ranks[group]]


def _split(values: npt.NDArray[np.intp], group: npt.NDArray[np.integer[Any]]) -> list[npt.NDArray[np.intp]]:
    """Cut values where their group, by which they are sorted, changes."""
    return np.split(values, np.flatnonzero(np.diff(group)) + 1) if len(values) else []
