"""Whether a difference of means is more than the spread of the steps: Student's test, with a floor.

The steps of both runs are taken to spread alike (pooled variance), so that a run of one step can be held against one of
many. All rows of a comparison share their false alarms (Bonferroni): the chance that any unchanged row is called
changed is at most `FALSE_ALARMS`, were the spread normal. Pauses in single steps make it wider than that, and the test
the more careful.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

FALSE_ALARMS = 0.01  # of a whole comparison
FLOOR = 0.001  # of the step: what is smaller is no change, however steady the steps are
UNKNOWN_FLOOR = 0.02  # the same where nothing tells the spread; few steps tell it badly, so that it falls with them
LEAST_STEPS = 3  # of each run, to be told apart without a test
MOST_DEGREES = 200  # of freedom, from which Student's distribution is taken to be normal


@dataclass(frozen=True)
class Sample:
    """What the steps of a run say of one quantity.

    Attributes:
        mean: over the steps.
        steps: their values.
        sampling: variance of the mean since only some of the ranks were traced.
    """

    mean: float
    steps: Sequence[float]
    sampling: float = 0.0


def limit(before: Sample, after: Sample, rows: int, step: float) -> float | None:
    """Return how large a difference of means noise can explain; None where nothing tells the spread.

    Args:
        before: of one run.
        after: of the other.
        rows: how many rows are looked at together.
        step: time of a step, for the floor.
    """
    sizes = len(before.steps), len(after.steps)
    degrees = sum(sizes) - 2
    if degrees < 1 or min(sizes) < 1:
        return None
    squares = _squares(before.steps) + _squares(after.steps)
    variance = squares / degrees * (1 / sizes[0] + 1 / sizes[1]) + before.sampling + after.sampling
    return max(critical(FALSE_ALARMS / max(rows, 1), degrees) * math.sqrt(variance), least(degrees) * step)


def _squares(values: Sequence[float]) -> float:
    """Return the sum of squared distances from the mean; there are many ranks, and few steps of each."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def least(degrees: int) -> float:
    """Return the share of the step below which nothing counts as a change.

    >>> least(1), least(4), least(98)
    (0.02, 0.005, 0.001)
    """
    return max(UNKNOWN_FLOOR / degrees, FLOOR)


def separated(before: Sample, after: Sample, step: float) -> bool:
    """Tell whether all steps of one run lie beyond all of the other, by more than the floor; at least three of each.

    That happens by chance to one row in ten of three steps each: a hint, not a finding.
    """
    if min(len(before.steps), len(after.steps)) < LEAST_STEPS:
        return False
    apart = max(min(before.steps) - max(after.steps), min(after.steps) - max(before.steps))
    return apart > FLOOR * step


@cache
def critical(chance: float, degrees: int) -> float:
    """Return what |t| exceeds with a chance, by halving.

    >>> round(critical(0.05, 4), 3), round(critical(0.001, 1), 2)
    (2.776, 636.62)
    """
    low, high = 0.0, 1.0
    while outside(high, degrees) > chance and high < 1e9:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if outside(middle, degrees) > chance else (low, middle)
    return high


def outside(t: float, degrees: int) -> float:
    """Return the chance that Student's |t| is larger (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    if degrees > MOST_DEGREES:
        return math.erfc(t / math.sqrt(2))
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, cosine) if degrees % 2 else (1.0, 1.0)
    for number in range(3 if degrees % 2 else 2, degrees, 2):
        term *= cosine * cosine * (number - 1) / number
        total += term
    if degrees == 1:
        return 1 - 2 * angle / math.pi
    return 1 - (2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total)
