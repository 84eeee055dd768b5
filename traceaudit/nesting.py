"""Which call encloses which on a host thread: spans of one thread are nested or disjoint."""

import numpy as np
import numpy.typing as npt

from traceaudit.intervals import Array, Intervals

Index = npt.NDArray[np.intp]


def parents(spans: Intervals) -> Index:
    """Return for each span the index of the innermost other span around it, -1 at top level.

    Spans must be sorted by start, the longer first among equals.

    >>> parents(Intervals(np.array([0, 1, 2, 6]), np.array([9, 5, 3, 7]))).tolist()
    [-1, 0, 1, 0]
    """
    size = len(spans.start)
    ended = np.searchsorted(np.sort(spans.end), spans.start, side="right")
    # Empty spans at the same instant that come later, or are the span itself, end there but enclose nothing before it.
    passed = np.concatenate(([0], np.cumsum(spans.end == spans.start)))
    ended -= passed[np.searchsorted(spans.start, spans.start, side="right")] - passed[:-1]
    depth = np.arange(size) - ended
    result = np.full(size, -1, np.intp)
    above = np.flatnonzero(depth <= 0)
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        slot = np.searchsorted(above, here) - 1
        result[here] = np.where(slot >= 0, above[np.maximum(slot, 0)], -1)
        above = here
    return result


def innermost(spans: Intervals, instant: Array) -> Index:
    """Return the index of the innermost span that contains each instant, -1 where none does.

    >>> innermost(Intervals(np.array([0, 1]), np.array([9, 5])), np.array([3, 5, 9])).tolist()
    [1, 0, -1]
    """
    found = np.searchsorted(spans.start, instant, side="right") - 1
    if not len(spans.start):
        return found
    above = parents(spans)
    while True:
        over = (found >= 0) & (spans.end[np.maximum(found, 0)] <= instant)
        if not over.any():
            return found
        found = np.where(over, above[np.maximum(found, 0)], found)


def is_leaf(spans: Intervals) -> npt.NDArray[np.bool_]:
    """Tell which spans have no other span beneath them; sorted as for `parents`."""
    following = np.concatenate((spans.start[1:], [np.iinfo(np.int64).max]))
    return following >= spans.end
