"""How much time of each class every rank had spent when it began and when it left each communication."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.account import CLASSES
from traceaudit.intervals import Array
from traceaudit.leaves import Leaf
from traceaudit.memory import give_back
from traceaudit.ranks.instances import ROWS, Integers, small
from traceaudit.ranks.owned import Owned

TRANSFER, PIPELINE = Leaf.SLOW_LINK, Leaf.UNDIVIDED  # classes of exposed communication beside `CLASSES`


class Elapsed:
    """Sums of `RankAccount.progress`, and of exposed communication, for one class at a time.

    Attributes:
        classes: those that occur on some rank, and those of exposed communication.
    """

    def __init__(self, owned: Owned, table: pd.DataFrame, exposed: dict[Leaf, tuple[Integers, Integers]]) -> None:
        """Sort what is summed up.

        Args:
            owned: of the accounts, in the order of the table; `progress` is cleared.
            table: communications of all ranks.
            exposed: rows and lengths of exposed communication by class.
        """
        progress, offset = owned.progress, (2 * (np.cumsum(owned.counts) - owned.counts)).tolist()
        self._place = _joined(
            [small(own["place"].to_numpy(dtype=np.int64) + first) for own, first in zip(progress, offset, strict=True)]
        )
        self._cls = _joined([own["cls"].to_numpy() for own in progress])
        self._ns = _joined([small(own["ns"].to_numpy()) for own in progress])
        progress.clear()
        give_back()
        self._exposed = exposed
        occurring = set(np.unique(self._cls).tolist())
        self.classes = (*(cls for cls in CLASSES if cls in occurring), TRANSFER, PIPELINE)
        rank = table["rank"].to_numpy()
        edges = np.empty(2 * len(table), np.int64)
        edges[0::2], edges[1::2] = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
        self._order = small(np.lexsort((edges, np.repeat(rank, 2))))
        self._begun = np.flatnonzero(np.diff(rank, prepend=-1))
        self._rows = small(np.lexsort((table["start_ns"].to_numpy(), rank)))

    def of(self, cls: Leaf) -> tuple[Integers, Integers]:
        """Return the time of a class up to the start and up to the end of each communication; in 32 bits if it fits."""
        return self._of_exposed(*self._exposed[cls]) if cls in self._exposed else self._of_progress(cls)

    def _of_progress(self, cls: Leaf) -> tuple[Integers, Integers]:
        own = np.flatnonzero(self._cls == cls)
        place = self._place[own]  # ascending: of one rank after the other, each by time
        edges: Integers = np.empty(len(self._order), np.int32)
        for begin, end in self._stretches():
            first, last = np.searchsorted(place, (2 * begin, 2 * end))
            through = np.zeros(2 * (end - begin), np.int64)
            through[place[first:last] - 2 * begin] = self._ns[own[first:last]]
            self._sum(through, 2 * self._within(begin, end))
            edges = _holding(edges, through)
            edges[self._order[2 * begin : 2 * end]] = through
        return edges[0::2], edges[1::2]

    def _of_exposed(self, rows: Integers, ns: Integers) -> tuple[Integers, Integers]:
        value = small(by_row(rows, ns, len(self._rows)))
        after: Integers = np.empty(len(value), np.int32)
        for begin, end in self._stretches():
            rows = self._rows[begin:end]
            through = value[rows].astype(np.int64)
            self._sum(through, self._within(begin, end))
            after = _holding(after, through)
            after[rows] = through
        return after - value, after

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """Yield the rows of a few whole ranks at a time, so that what is summed up fills little memory."""
        begin = 0
        for end in [*self._begun[1:].tolist(), len(self._rows)]:
            if end - begin >= ROWS or end == len(self._rows):
                yield begin, end
                begin = end

    def _within(self, begin: int, end: int) -> npt.NDArray[np.intp]:
        """Return where ranks begin in a stretch."""
        first, last = np.searchsorted(self._begun, (begin, end))
        return self._begun[first:last] - begin

    def _sum(self, values: Array, begun: npt.NDArray[np.intp]) -> None:
        """Sum up in place, anew for each rank."""
        np.cumsum(values, out=values)
        before = np.concatenate(([0], values[begun[1:] - 1]))
        values -= np.repeat(before, np.diff(np.append(begun, len(values))))


def _holding(column: Integers, values: Array) -> Integers:
    """Return a column that can hold values that are not negative."""
    return column.astype(np.int64, copy=False) if values.max(initial=0) >= 1 << 31 else column


def by_row(rows: Integers, ns: Integers, size: int) -> Array:
    """Return the sum of each row."""
    result = np.zeros(size, np.int64)
    np.add.at(result, rows, ns)
    return result


def _joined(columns: Sequence[Integers]) -> Integers:
    filled = [column for column in columns if len(column)]
    return np.concatenate(filled) if filled else np.empty(0, np.int64)
