"""What accounts have in common, kept in memory once.

Accounts come from other processes, each with its own copy of everything. A job of n ranks has groups of n ranks, which
each of its n accounts lists: n² numbers, unless they are shared as the accounts arrive. Of the small tables, the names
of the columns take more than what is in them.
"""

from dataclasses import fields, replace
from typing import Any

import pandas as pd

from traceaudit.account import RankAccount
from traceaudit.ranks.members import Ranks, categorical, coded


class Shared:
    """Groups, names of columns, and tables without rows that were seen so far."""

    def __init__(self) -> None:
        self._groups: dict[Ranks, Ranks] = {}
        self._columns: dict[tuple[str, ...], pd.Index[Any]] = {}
        self._empty: dict[tuple[Any, ...], pd.DataFrame] = {}

    def of(self, account: RankAccount) -> RankAccount:
        """Return an account that holds the first of what is equal instead of its own."""
        origin = account.origin
        groups = tuple(replace(group, ranks=self._group(group.ranks)) for group in origin.groups)
        tables = {own.name: getattr(account, own.name) for own in fields(account)}
        changed: dict[str, Any] = {
            name: self._table(table) for name, table in tables.items() if isinstance(table, pd.DataFrame)
        }
        communications = changed["communications"]
        if len(communications):
            codes, own = coded(communications["group"])
            shared = [self._group(ranks) for ranks in own if ranks is not None]
            changed["communications"] = communications.assign(group=categorical(codes, shared))
        return replace(account, origin=replace(origin, groups=groups), **changed)

    def _group(self, ranks: Ranks) -> Ranks:
        return self._groups.setdefault(ranks, ranks)

    def _table(self, table: pd.DataFrame) -> pd.DataFrame:
        names = tuple(table.columns)
        if not len(table):
            return self._empty.setdefault((names, *table.dtypes), table)
        return table.set_axis(self._columns.setdefault(names, table.columns), axis=1)
