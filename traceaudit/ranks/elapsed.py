"""How much time of each class every rank had spent when it began and when it left each communication."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import CLASSES, RankAccount
from traceaudit.intervals import Array
from traceaudit.leaves import Leaf
from traceaudit.ranks.instances import Integers, small

TRANSFER, PIPELINE = Leaf.SLOW_LINK, Leaf.UNDIVIDED  # classes of exposed communication beside `CLASSES`


class Elapsed:
    """Sums of `RankAccount.progress`, and of exposed communication, for one class at a time.

    Attributes:
        classes: those that occur on some rank, and those of exposed communication.
    """

    def __init__(
        self, accounts: Sequence[RankAccount], table: pd.DataFrame, exposed: dict[Leaf, tuple[Integers, Array]]
    ) -> None:
        """Take the accounts in the order of the table, and rows and lengths of exposed communication by class."""
        owned = [own.progress for own in accounts]
        offset = 2 * np.cumsum([0, *(len(own.communications) for own in accounts)])
        self._place = small(
            _joined([own["place"].to_numpy() + first for own, first in zip(owned, offset, strict=False)])
        )
        self._cls = _joined([own["cls"].to_numpy() for own in owned])
        self._ns = _joined([own["ns"].to_numpy() for own in owned])
        self._exposed = exposed
        occurring = set(np.unique(self._cls).tolist())
        self.classes = (*(cls for cls in CLASSES if cls in occurring), TRANSFER, PIPELINE)
        rank = table["rank"].to_numpy()
        edges = np.empty(2 * len(table), np.int64)
        edges[0::2], edges[1::2] = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
        self._order = small(np.lexsort((edges, np.repeat(rank, 2))))
        self._begun = np.flatnonzero(np.diff(rank, prepend=-1))
        self._rows = small(np.lexsort((table["start_ns"].to_numpy(), rank)))

    def of(self, cls: Leaf) -> tuple[Array, Array]:
        """Return the time of a class up to the start and up to the end of each communication."""
        return self._of_exposed(*self._exposed[cls]) if cls in self._exposed else self._of_progress(cls)

    def _of_progress(self, cls: Leaf) -> tuple[Array, Array]:
        own = self._cls == cls
        through = np.zeros(len(self._order), np.int64)
        through[self._place[own]] = self._ns[own]
        self._sum(through, 2 * self._begun)
        edges = np.empty(len(through), np.int64)
        edges[self._order] = through
        return edges[0::2], edges[1::2]

    def _of_exposed(self, rows: Integers, ns: Array) -> tuple[Array, Array]:
        value = by_row(rows, ns, len(self._rows))
        through = value[self._rows]
        self._sum(through, self._begun)
        after = np.empty(len(value), np.int64)
        after[self._rows] = through
        return after - value, after

    def _sum(self, values: Array, begun: npt.NDArray[np.intp]) -> None:
        """Sum up in place, anew for each rank."""
        np.cumsum(values, out=values)
        before = np.concatenate(([0], values[begun[1:] - 1]))
        values -= np.repeat(before, np.diff(np.append(begun, len(values))))


def by_row(rows: Integers, ns: Array, size: int) -> Array:
    """Return the sum of each row."""
    result = np.zeros(size, np.int64)
    np.add.at(result, rows, ns)
    return result


def _joined(columns: Sequence[Integers]) -> Integers:
    filled = [column for column in columns if len(column)]
    return np.concatenate(filled) if filled else np.empty(0, np.int64)
