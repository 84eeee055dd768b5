"""Arithmetic on half-open intervals ``[start, end)`` of integer nanoseconds.

A *set* of intervals is a pair of int64 arrays ``(start, end)``. A *union* is such a set that is sorted,
disjoint and free of empty or touching members; `union` makes one.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.int64]


class Intervals(NamedTuple):
    """Starts and ends of intervals, two int64 arrays of equal length."""

    start: Array
    end: Array


class Crossing(NamedTuple):
    """Parts that two sets of intervals have in common: where each came from, and its extent."""

    left: npt.NDArray[np.intp]
    right: npt.NDArray[np.intp]
    start: Array
    end: Array


def empty() -> Intervals:
    """Return no intervals."""
    return Intervals(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Array, end: Array) -> Intervals:
    """Merge intervals that overlap or touch; empty ones vanish.

    >>> [part.tolist() for part in union(np.array([5, 0, 7]), np.array([7, 3, 9]))]
    [[0, 5], [3, 9]]
    """
    keep = end > start
    order = np.argsort(start[keep], kind="stable")
    start, end = start[keep][order], end[keep][order]
    if not len(start):
        return empty()
    reach = np.maximum.accumulate(end)
    opens = np.concatenate(([True], start[1:] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return Intervals(start[opens], reach[closes])


def total(intervals: Intervals) -> int:
    """Return the summed length in nanoseconds."""
    return int((intervals.end - intervals.start).sum())


def complement(cover: Intervals, start: int, end: int) -> Intervals:
    """Return the parts of ``[start, end)`` outside a union.

    >>> [part.tolist() for part in complement(Intervals(np.array([2]), np.array([5])), 0, 9)]
    [[0, 5], [2, 9]]
    """
    if end <= start:
        return empty()
    inside = (cover.end > start) & (cover.start < end)
    starts = np.concatenate(([start], cover.end[inside]))
    ends = np.concatenate((cover.start[inside], [end]))
    keep = ends > starts
    return Intervals(starts[keep], ends[keep])


def cross(left: Intervals, right: Intervals) -> Crossing:
    """Return every part of `left` that lies in a member of `right`, which must be sorted and disjoint.

    >>> cross(Intervals(np.array([0]), np.array([9])), Intervals(np.array([1, 5]), np.array([2, 12]))).end.tolist()
    [2, 9]
    """
    first = np.searchsorted(right.end, left.start, side="right")
    last = np.searchsorted(right.start, left.end, side="left")
    count = np.where(left.end > left.start, np.maximum(last - first, 0), 0)
    left_index = np.repeat(np.arange(len(left.start)), count)
    offset = np.arange(len(left_index)) - np.repeat(np.cumsum(count) - count, count)
    right_index = first[left_index] + offset
    start = np.maximum(left.start[left_index], right.start[right_index])
    end = np.minimum(left.end[left_index], right.end[right_index])
    return Crossing(left_index, right_index, start, end)


def outside(left: Intervals, cover: Intervals) -> Crossing:
    """Return every part of `left` that no member of the union `cover` touches; `right` is meaningless there."""
    low = np.int64(np.iinfo(np.int64).min)
    high = np.int64(np.iinfo(np.int64).max)
    holes = Intervals(np.concatenate(([low], cover.end)), np.concatenate((cover.start, [high])))
    return cross(left, holes)


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Return what two unions have in common."""
    common = cross(left, right)
    return Intervals(common.start, common.end)


def difference(left: Intervals, right: Intervals) -> Intervals:
    """Return the parts of one union outside another.

    >>> [part.tolist() for part in difference(union(np.array([0]), np.array([9])), union(np.array([2]), np.array([5])))]
    [[0, 5], [2, 9]]
    """
    rest = outside(left, right)
    return Intervals(rest.start, rest.end)


def covers(cover: Intervals, instant: Array) -> npt.NDArray[np.bool_]:
    """Tell for each instant whether a union contains it.

    >>> covers(Intervals(np.array([2]), np.array([5])), np.array([1, 2, 5])).tolist()
    [False, True, False]
    """
    if not len(cover.start):
        return np.zeros(len(instant), np.bool_)
    slot = np.searchsorted(cover.start, instant, side="right") - 1
    return np.asarray((slot >= 0) & (instant < cover.end[np.maximum(slot, 0)]))


def elapsed(spans: Intervals, instant: Array) -> Array:
    """Return how much of sorted, disjoint spans lies before each instant.

    >>> elapsed(Intervals(np.array([0, 5]), np.array([3, 9])), np.array([2, 4, 7])).tolist()
    [2, 3, 5]
    """
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(spans.end - spans.start)))
    if not len(spans.start):
        return np.zeros(len(instant), np.int64)
    count = np.searchsorted(spans.start, instant, side="right")
    last = np.maximum(count - 1, 0)
    beyond = np.where(count > 0, np.maximum(spans.end[last] - instant, 0), 0)
    return np.asarray(before[count] - beyond, np.int64)
