"""Rows of one table by the instance they belong to, sorted once: what many questions about instances start from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.intervals import Array

ROWS = 1 << 20  # looked at at a time

Integers = npt.NDArray[np.integer[Any]]
Values = npt.NDArray[np.generic]


def packed(*columns: Integers) -> Array:
    """Return one integer a row, which orders and tells apart the rows as the columns do, the first one foremost.

    >>> packed(np.array([1, 0, 1]), np.array([-1, 5, 7])).tolist()
    [9, 6, 17]
    """
    key: Array = np.zeros(len(columns[0]), np.int64)
    wide = 1  # distinct values of the key, at most
    for column in columns:
        low = int(column.min(initial=0))
        width = int(column.max(initial=0)) - low + 1
        if wide * width >= 1 << 62:
            key, distinct = pd.factorize(key, sort=True)
            wide = len(distinct)
        if wide * width >= 1 << 62:
            column, values = pd.factorize(column, sort=True)
            low, width = 0, len(values)
        key *= width
        key += column
        key -= low
        wide *= width
    return np.asarray(key, np.int64)


def summed(table: pd.DataFrame, keys: list[str], values: Sequence[str] = ("ns",)) -> pd.DataFrame:
    """Return sums of values by keys; a stretch of the table at a time, so that what grouping takes stays small."""
    return summed_parts((table.iloc[some] for some in stretches(len(table))), keys, values)


def summed_parts(parts: Iterable[pd.DataFrame], keys: list[str], values: Sequence[str]) -> pd.DataFrame:
    """Return the same of a table that comes in parts, one at least."""
    sums = [part.groupby(keys, as_index=False, observed=True)[list(values)].sum() for part in parts]
    if len(sums) == 1:
        return sums[0]
    return pd.concat(sums, ignore_index=True).groupby(keys, as_index=False, observed=True)[list(values)].sum()


def stretches(rows: int) -> list[slice]:
    """Return the stretches in which rows are looked at, so that what is derived from them fills little memory."""
    return [slice(begin, begin + ROWS) for begin in range(0, max(rows, 1), ROWS)]


def small(column: Integers) -> Integers:
    """Return integers in 32 bits if they fit."""
    if not len(column) or (column.min() >= -(1 << 31) and column.max() < 1 << 31):
        return column.astype(np.int32, copy=False)
    return column


def sliced(first: Integers, size: Integers) -> Array:
    """Return the numbers of stretches of rows, one stretch after the other.

    >>> sliced(np.array([10, 20]), np.array([2, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    begin = np.cumsum(size, dtype=np.int64) - size
    return np.asarray(np.arange(int(size.sum()), dtype=np.int64) + np.repeat(first - begin, size))


@dataclass(frozen=True)
class Instances:
    """The rows that have an instance, in the order of instances, those of one instance in the order of ranks.

    Attributes:
        rows: numbers of the rows.
        first: where each instance begins among them.
        number: of each instance, ascending.
        place: of each row of the table, the index of its instance in `number`; -1 without one.
    """

    rows: Integers
    first: Array
    number: Integers
    place: Integers

    @staticmethod
    def of(instance: Integers, rank: Integers) -> "Instances":
        """Sort the rows of a table; a negative instance is none."""
        rows = small(np.lexsort((rank, instance)))
        rows = rows[int(np.count_nonzero(instance < 0)) :]
        own = instance[rows]
        first = np.flatnonzero(np.diff(own, prepend=-1))
        place = np.full(len(instance), -1, np.int32)
        place[rows] = np.repeat(np.arange(len(first), dtype=np.int32), np.diff(np.append(first, len(rows))))
        return Instances(rows, first, own[first], place)

    def __len__(self) -> int:
        """Return how many instances there are."""
        return len(self.first)

    @property
    def sizes(self) -> Array:
        """Rows of each instance."""
        return np.diff(np.append(self.first, len(self.rows)))

    def max(self, values: Values) -> Any:  # noqa: ANN401  an array like `values`
        """Return the largest value of each instance; `values` has one for each row of the table."""
        return np.maximum.reduceat(values[self.rows], self.first) if len(self) else values[:0]

    def min(self, values: Values) -> Any:  # noqa: ANN401  an array like `values`
        """Return the smallest value of each instance."""
        return np.minimum.reduceat(values[self.rows], self.first) if len(self) else values[:0]

    def any(self, values: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Tell for each instance whether it is true of a row."""
        return np.asarray(np.logical_or.reduceat(values[self.rows], self.first) if len(self) else values[:0])

    def median(self, values: Array) -> npt.NDArray[np.float64]:
        """Return the median of each instance."""
        order = np.lexsort((values[self.rows], self.place[self.rows]))
        own = values[self.rows[order]]
        low, high = self.first + (self.sizes - 1) // 2, self.first + self.sizes // 2
        return np.asarray((own[low] + own[high]) / 2)

    def ranks(self, rank: Integers) -> Array:
        """Return how many different ranks take part in each instance."""
        if not len(self):
            return np.empty(0, np.int64)
        own = rank[self.rows]
        other = np.diff(own, prepend=-1) != 0
        other[self.first] = True
        return np.asarray(np.add.reduceat(other, self.first, dtype=np.int64))

    def spread(self, values: Values, otherwise: Values | int | bool) -> Any:  # noqa: ANN401  an array like `values`
        """Return for each row of the table what is said of its instance, or something else where it has none."""
        if not len(self):
            return np.broadcast_to(np.asarray(otherwise, values.dtype), len(self.place)).copy()
        return np.where(self.place >= 0, values[self.place], otherwise)


def renumbered(codes: Integers, count: int) -> tuple[Integers, Array]:
    """Return codes in the order of first appearance, and the old code of each; codes that do not occur are dropped.

    >>> [part.tolist() for part in renumbered(np.array([2, 0, 2]), 4)]
    [[0, 1, 0], [2, 0]]
    """
    seen = np.full(count, len(codes), np.int64)
    seen[codes[::-1]] = np.arange(len(codes))[::-1]  # of equal codes, the first row is written last
    old = np.argsort(seen, kind="stable")[: int(np.count_nonzero(seen < len(codes)))]
    new = np.full(count, -1, np.int64)
    new[old] = np.arange(len(old))
    return small(new)[codes], old


def first_rows(codes: Integers, count: int) -> Array:
    """Return the first row of each code; the number of rows for one that does not occur."""
    seen = np.full(count, len(codes), np.int64)
    seen[codes[::-1]] = np.arange(len(codes))[::-1]
    return seen
