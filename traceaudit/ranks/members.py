"""Rows of one process group, told apart by their tuple of ranks without looking at each rank of each row.

Groups can have thousands of members and tables millions of rows, which share few tuples: what depends on the group is
computed once for each.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Ranks = tuple[int, ...]


def coded(members: Iterable[Ranks | None]) -> tuple[npt.NDArray[np.integer[Any]], list[Ranks | None]]:
    """Return for each row the number of its tuple, and the distinct tuples.

    Categories keep their numbers, among which -1 is no tuple; others are numbered in the order of first appearance.

    >>> codes, distinct = coded([(0, 1), (2, 3), (0, 1)])
    >>> codes.tolist(), distinct
    ([0, 1, 0], [(0, 1), (2, 3)])
    """
    if isinstance(members, pd.Series) and isinstance(members.dtype, pd.CategoricalDtype):
        return members.cat.codes.to_numpy(), members.cat.categories.tolist()
    rows = members if isinstance(members, list) else list(members)
    same = np.fromiter(map(id, rows), np.int64, len(rows))
    _, first, inverse = np.unique(same, return_index=True, return_inverse=True)
    numbers: dict[Ranks | None, int] = {}
    code = np.empty(len(first), np.int64)
    for place in np.argsort(first, kind="stable"):
        code[place] = numbers.setdefault(rows[first[place]], len(numbers))
    return code[inverse], list(numbers)


def each(members: Iterable[Ranks], function: Callable[[Ranks], object]) -> npt.NDArray[np.generic]:
    """Return what a function says of each row's tuple, asked once for each distinct one.

    >>> each([(0, 1), (2,), (0, 1)], len).tolist()
    [2, 1, 2]
    """
    codes, distinct = coded(members)
    found = np.array([function(ranks) for ranks in distinct if ranks is not None])
    return np.asarray(found[codes])


def categorical(codes: npt.NDArray[np.integer[Any]], groups: Sequence[Ranks]) -> "pd.Categorical[Any]":
    """Return a column of tuples of ranks as the number of each row's tuple; -1 is missing.

    >>> categorical(np.array([0, -1]), [(0, 1)]).tolist()
    [(0, 1), nan]
    """
    distinct = np.empty(len(groups), dtype=object)
    distinct[:] = groups
    index: Any = pd.Index(distinct, tupleize_cols=False)  # not an index of several levels
    return pd.Categorical.from_codes(codes, index)
