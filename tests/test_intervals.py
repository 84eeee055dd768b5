"""Interval arithmetic agrees with a ruler: an interval is the set of the integer ticks that it contains."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceaudit.intervals import (
    Intervals,
    complement,
    covers,
    cross,
    difference,
    elapsed,
    empty,
    intersection,
    outside,
    total,
    union,
)

Pairs = list[tuple[int, int]]
RULER = range(-15, 16)
tick = st.integers(RULER.start, RULER.stop - 1)
any_pairs = st.lists(st.tuples(tick, tick), max_size=8)  # in any order; some empty, some with the end first
spans = st.lists(st.tuples(tick, tick).map(lambda pair: (min(pair), max(pair))), max_size=8)
repeatable = settings(derandomize=True, deadline=None)


def intervals(pairs: Pairs) -> Intervals:
    """Return pairs as a set of intervals."""
    return Intervals(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))


def merged(pairs: Pairs) -> Intervals:
    """Return the union of pairs."""
    return union(*intervals(pairs))


def ticks(*sets: Intervals) -> set[int]:
    """Return the ticks that some sets of intervals contain."""
    return {
        t for found in sets for a, b in zip(found.start.tolist(), found.end.tolist(), strict=True) for t in range(a, b)
    }


def is_union(found: Intervals) -> bool:
    """Whether members are sorted, neither overlap nor touch, and none is empty."""
    return bool((found.end > found.start).all() and (found.start[1:] > found.end[:-1]).all())


@given(any_pairs)
@repeatable
def test_union_holds_the_ticks_of_its_members(pairs: Pairs) -> None:
    """A union is canonical, contains what its members contain, and its length counts every tick once."""
    found = merged(pairs)
    expected = {t for a, b in pairs for t in range(a, b)}
    assert ticks(found) == expected
    assert total(found) == len(expected)
    assert is_union(found)


@given(any_pairs, tick, tick)
@repeatable
def test_complement_holds_the_other_ticks_of_a_range(pairs: Pairs, start: int, end: int) -> None:
    """A complement is the range without the cover, nothing where the range is empty."""
    found = complement(merged(pairs), start, end)
    assert ticks(found) == set(range(start, end)) - ticks(merged(pairs))
    assert is_union(found)


@given(spans, any_pairs)
@repeatable
def test_cross_finds_every_common_part_and_where_it_came_from(left: Pairs, right: Pairs) -> None:
    """Each tick that a member on the left shares with one on the right is in exactly one part with their indices."""
    members = merged(right)
    found = cross(intervals(left), members)
    parts = zip(found.left.tolist(), found.right.tolist(), found.start.tolist(), found.end.tolist(), strict=True)
    seen = Counter((i, j, t) for i, j, a, b in parts for t in range(a, b))
    expected = {
        (i, j, t)
        for i, (a, b) in enumerate(left)
        for j, (c, d) in enumerate(zip(members.start.tolist(), members.end.tolist(), strict=True))
        for t in range(max(a, c), min(b, d))
    }
    assert seen == dict.fromkeys(expected, 1)
    assert (found.end > found.start).all()


@given(spans, st.lists(tick, max_size=8, unique=True).map(sorted))
@repeatable
def test_cross_splits_at_members_that_touch(left: Pairs, borders: list[int]) -> None:
    """Members on the right may touch: a part ends at each border between them."""
    touching = intervals(list(pairwise(borders)))
    found = cross(intervals(left), touching)
    assert all(
        not any(a < border < b for border in borders)
        for a, b in zip(found.start.tolist(), found.end.tolist(), strict=True)
    )
    inside = set(range(borders[0], borders[-1])) if borders else set()
    assert ticks(Intervals(found.start, found.end)) == ticks(intervals(left)) & inside


@given(spans, any_pairs)
@repeatable
def test_outside_keeps_of_each_interval_what_the_cover_leaves(left: Pairs, cover: Pairs) -> None:
    """Each member on the left keeps its own ticks outside the cover, once."""
    found = outside(intervals(left), merged(cover))
    parts = zip(found.left.tolist(), found.start.tolist(), found.end.tolist(), strict=True)
    seen = Counter((i, t) for i, a, b in parts for t in range(a, b))
    expected = {(i, t) for i, (a, b) in enumerate(left) for t in range(a, b)} - {
        (i, t) for i in range(len(left)) for t in ticks(merged(cover))
    }
    assert seen == dict.fromkeys(expected, 1)


@given(any_pairs, any_pairs)
@repeatable
def test_intersection_and_difference_part_a_union_in_two(left: Pairs, right: Pairs) -> None:
    """What two unions share and what only the first holds are the ticks of the first."""
    both, rest = intersection(merged(left), merged(right)), difference(merged(left), merged(right))
    assert ticks(both) == ticks(merged(left)) & ticks(merged(right))
    assert ticks(rest) == ticks(merged(left)) - ticks(merged(right))
    assert total(both) + total(rest) == total(merged(left))


@given(any_pairs)
@repeatable
def test_covers_tells_each_tick(pairs: Pairs) -> None:
    """An instant is covered when its tick is in the union."""
    found = covers(merged(pairs), np.array(RULER, np.int64))
    assert {t for t, inside in zip(RULER, found.tolist(), strict=True) if inside} == ticks(merged(pairs))


@given(any_pairs)
@repeatable
def test_elapsed_counts_the_ticks_before_an_instant(pairs: Pairs) -> None:
    """What has elapsed of some spans before an instant is the number of their ticks below it."""
    spans = merged(pairs)
    found = elapsed(spans, np.array(RULER, np.int64)).tolist()
    assert found == [sum(t < instant for t in ticks(spans)) for instant in RULER]


@pytest.mark.parametrize("far", [0, 1_759_300_074_000_000_000, 1 << 61])
def test_arithmetic_is_exact_at_any_distance_from_zero(far: int) -> None:
    """Nanoseconds since the epoch do not fit a float; intervals stay exact."""
    cover = union(np.array([far + 1, far + 5]), np.array([far + 3, far + 6]))
    assert [part.tolist() for part in complement(cover, far, far + 7)] == [
        [far, far + 3, far + 6],
        [far + 1, far + 5, far + 7],
    ]
    assert total(cover) == 3


def test_no_intervals_are_a_union() -> None:
    """The empty union has no length, covers nothing and takes nothing away."""
    some = merged([(0, 4)])
    assert total(empty()) == 0
    assert not covers(empty(), np.array([0, 1])).any()
    assert ticks(difference(some, empty())) == ticks(some)
    assert not len(intersection(some, empty()).start)
