"""Nesting of calls on one thread agrees with asking every span about every other."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from traceaudit.intervals import Intervals
from traceaudit.nesting import innermost, is_leaf, parents

Pairs = list[tuple[int, int]]
LAST = 14


def laminar(pairs: Pairs) -> Pairs:
    """Keep each pair that is nested in or apart from all those kept before; sort by start, the longer first."""
    kept: Pairs = []
    for start, end in pairs:
        if all(end <= a or b <= start or (a <= start and end <= b) or (start <= a and b <= end) for a, b in kept):
            kept.append((start, end))
    return sorted(kept, key=lambda pair: (pair[0], -pair[1]))


# Families of spans of one thread; equal and empty spans are among them, as files with whole microseconds have many.
instants = st.integers(0, LAST)
families = st.lists(st.tuples(instants, instants).map(lambda pair: (min(pair), max(pair))), max_size=14).map(laminar)
repeatable = settings(derandomize=True, deadline=None, max_examples=300)


def as_intervals(pairs: Pairs) -> Intervals:
    """Return pairs as intervals."""
    return Intervals(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))


def encloses(pairs: Pairs, outer: int, inner: int) -> bool:
    """Whether a span lies around another and still runs when it begins; of equal ones, the first around the others."""
    (a, b), (start, end) = pairs[outer], pairs[inner]
    return a <= start < b and end <= b and (outer < inner if (a, b) == (start, end) else True)


def shortest(pairs: Pairs, among: list[int]) -> int:
    """Return the shortest of some spans (of equal ones the last), -1 if there are none."""
    return min(among, key=lambda i: (pairs[i][1] - pairs[i][0], -i), default=-1)


@given(families)
@repeatable
def test_the_parent_is_the_shortest_span_around(pairs: Pairs) -> None:
    """A span's parent is the shortest of the others around it."""
    everyone = range(len(pairs))
    expected = [shortest(pairs, [o for o in everyone if o != i and encloses(pairs, o, i)]) for i in everyone]
    assert parents(as_intervals(pairs)).tolist() == expected


@given(families)
@repeatable
def test_the_innermost_span_is_the_shortest_that_contains_an_instant(pairs: Pairs) -> None:
    """An instant belongs to the shortest span that contains it, to none outside all of them."""
    asked = range(-1, LAST + 2)
    expected = [shortest(pairs, [i for i, (a, b) in enumerate(pairs) if a <= t < b]) for t in asked]
    assert innermost(as_intervals(pairs), np.array(asked, np.int64)).tolist() == expected


@given(families)
@repeatable
def test_leaves_are_the_parents_of_none(pairs: Pairs) -> None:
    """A span is a leaf if no other is beneath it."""
    everyone = range(len(pairs))
    expected = [not any(o != i and encloses(pairs, i, o) for o in everyone) for i in everyone]
    assert is_leaf(as_intervals(pairs)).tolist() == expected


def test_an_empty_span_is_nobodys_parent() -> None:
    """A call of less than a microsecond has no duration in old files, and hides nothing that follows it."""
    spans = as_intervals([(0, 9), (5, 5), (6, 7)])
    assert parents(spans).tolist() == [-1, 0, 0]
    assert innermost(spans, np.array([5, 6, 8])).tolist() == [0, 2, 0]
