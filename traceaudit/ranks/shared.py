"""Equal process groups of different accounts, kept in memory once.

Accounts come from other processes, each with its own copy of the tuples of ranks. A job of n ranks has groups of n
ranks, which each of its n accounts lists: n² numbers, unless they are shared as the accounts arrive.
"""

from dataclasses import replace

from traceaudit.account import RankAccount
from traceaudit.ranks.members import Ranks, categorical, coded


class SharedGroups:
    """The tuples of ranks seen so far."""

    def __init__(self) -> None:
        self._known: dict[Ranks, Ranks] = {}

    def of(self, account: RankAccount) -> RankAccount:
        """Return an account that holds the first of equal tuples instead of its own."""
        origin, table = account.origin, account.communications
        groups = tuple(replace(group, ranks=self._first(group.ranks)) for group in origin.groups)
        if len(table):
            codes, own = coded(table["group"])
            table = table.assign(group=categorical(codes, [self._first(ranks) for ranks in own if ranks is not None]))
        return replace(account, origin=replace(origin, groups=groups), communications=table)

    def _first(self, ranks: Ranks) -> Ranks:
        return self._known.setdefault(ranks, ranks)
