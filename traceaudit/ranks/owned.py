"""The tables of accounts that one stage needs and no later one: given up as soon as it is done."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from traceaudit.account import RankAccount


@dataclass(frozen=True)
class Owned:
    """Tables of all ranks with GPU activity, in the order of their accounts; who has used one clears it.

    Attributes:
        counts: communications of each.
        exposed: `RankAccount.exposed`.
        progress: `RankAccount.progress`.
    """

    counts: list[int]
    exposed: list[pd.DataFrame]
    progress: list[pd.DataFrame]

    @staticmethod
    def of(accounts: Sequence[RankAccount]) -> "Owned":
        """Return the tables of accounts, which then forget them (`without_owned`)."""
        counts = [len(own.communications) for own in accounts]
        return Owned(counts, [own.exposed for own in accounts], [own.progress for own in accounts])


def without_owned(accounts: Sequence[RankAccount]) -> list[RankAccount]:
    """Return accounts without these tables, and without the communications, which stand in the table of all."""
    none = pd.DataFrame()
    return [replace(own, communications=none, exposed=none, progress=none) for own in accounts]
