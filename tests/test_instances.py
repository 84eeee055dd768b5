"""Rows by instance: every answer is that of a plain loop over the rows."""

import numpy as np
import pandas as pd
import pytest

from traceaudit.ranks import instances
from traceaudit.ranks.instances import Instances, packed, sliced, small, summed


@pytest.fixture(params=range(8))
def rows(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Instances (-1: none), ranks and values of some rows, by chance; of no row at all in the first case."""
    chance = np.random.default_rng(request.param)
    size = 40 * request.param
    return (
        chance.integers(-1, 12, size).astype(np.int32),
        chance.integers(0, 5, size).astype(np.int32),
        chance.integers(-1_000, 1_000, size),
    )


def by_instance(instance: np.ndarray, values: np.ndarray) -> dict[int, list[int]]:
    """Return the values of each instance, in the order of rows."""
    found: dict[int, list[int]] = {}
    for number, value in zip(instance.tolist(), values.tolist(), strict=True):
        if number >= 0:
            found.setdefault(number, []).append(value)
    return dict(sorted(found.items()))


def test_extremes_and_medians_are_those_of_a_loop(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Largest, smallest and middle value, size and number of different ranks of each instance."""
    instance, rank, values = rows
    found, held = Instances.of(instance, rank), by_instance(instance, values)
    assert found.number.tolist() == list(held)
    assert found.sizes.tolist() == [len(own) for own in held.values()]
    assert found.max(values).tolist() == [max(own) for own in held.values()]
    assert found.min(values).tolist() == [min(own) for own in held.values()]
    assert found.any(values > 900).tolist() == [max(own) > 900 for own in held.values()]
    assert found.ranks(rank).tolist() == [len(set(own)) for own in by_instance(instance, rank).values()]
    if held:
        assert found.median(values).tolist() == [float(np.median(own)) for own in held.values()]


def test_rows_of_an_instance_stand_in_the_order_of_ranks(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Rows are sorted by instance, rank and row, and each row knows its place."""
    instance, rank, _ = rows
    found = Instances.of(instance, rank)
    wanted = sorted((number, own, row) for row, (number, own) in enumerate(zip(instance, rank, strict=True)))
    assert found.rows.tolist() == [row for number, _, row in wanted if number >= 0]
    places = {number: place for place, number in enumerate(found.number.tolist())}
    assert found.place.tolist() == [places.get(number, -1) for number in instance.tolist()]


def test_what_is_said_of_an_instance_reaches_its_rows(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Rows without an instance get the other value."""
    instance, rank, values = rows
    found, held = Instances.of(instance, rank), by_instance(instance, values)
    spread = found.spread(found.max(values), -7)
    assert spread.tolist() == [max(held[number]) if number >= 0 else -7 for number in instance.tolist()]


def test_packed_numbers_order_and_tell_apart_as_columns_do() -> None:
    """Also where the columns' ranges do not fit into 64 bits together."""
    chance = np.random.default_rng(5)
    for scale in (3, 1 << 20, 1 << 40):
        columns = [chance.integers(-scale, scale, 200) for _ in range(3)]
        columns[0][:100] = columns[0][100:]
        key = packed(*columns).tolist()
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        assert sorted(range(200), key=lambda row: key[row]) == sorted(range(200), key=lambda row: rows[row])
        assert len(set(key)) == len(set(rows))


def test_sums_of_stretches_are_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table summed up a few rows at a time gives what it gives at once."""
    chance = np.random.default_rng(6)
    table = pd.DataFrame({"a": chance.integers(0, 4, 500), "b": chance.integers(0, 4, 500), "ns": np.arange(500)})
    wanted: dict[tuple[int, int], int] = {}
    for first, second, ns in table.itertuples(index=False):
        wanted[first, second] = wanted.get((first, second), 0) + ns
    for rows in (1 << 20, 64, 500, 499):
        monkeypatch.setattr(instances, "ROWS", rows)
        found = summed(table, ["a", "b"])
        assert {(first, second): ns for first, second, ns in found.itertuples(index=False)} == wanted


def test_only_what_fits_is_kept_in_32_bits() -> None:
    """The ends of the range of 32 bits fit, what lies beyond does not."""
    fits, beyond = np.array([-(1 << 31), (1 << 31) - 1]), np.array([1 << 31])
    assert small(fits).dtype == np.int32
    assert small(fits).tolist() == fits.tolist()
    assert small(beyond).dtype == np.int64
    assert small(beyond).tolist() == beyond.tolist()


def test_stretches_follow_each_other() -> None:
    """Stretches may overlap and be empty."""
    first, size = np.array([4, 9, 2]), np.array([3, 0, 4])
    wanted = [row for begin, count in zip(first, size, strict=True) for row in range(begin, begin + count)]
    assert sliced(first, size).tolist() == wanted
