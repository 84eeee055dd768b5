"""Which communications are one collective: windows that are shifted or cut do not shift the pairing."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from traceaudit.ranks.matching import match


def communications(
    ends: list[list[int]], kinds: list[list[str]], sizes: list[list[int]], seq: list[list[int]] | None = None
) -> pd.DataFrame:
    """Return a table of communications of ranks 0, 1, ... in one group; each lasts 10 µs."""
    rows = [
        (rank, end - 10_000, end, kind, size, -1 if seq is None else seq[rank][index])
        for rank in range(len(ends))
        for index, (end, kind, size) in enumerate(zip(ends[rank], kinds[rank], sizes[rank], strict=True))
    ]
    table = pd.DataFrame(rows, columns=["rank", "start_ns", "end_ns", "kind", "bytes", "seq"])
    table = table.assign(direction="", source_rank=-1, host=table["rank"])
    table["members"] = [tuple(range(len(ends)))] * len(table)
    return table


def pairs(table: pd.DataFrame) -> set[tuple[tuple[int, int], ...]]:
    """Return matched instances as sets of (rank, position on the rank)."""
    instance = match(table).instance
    position = table.groupby("rank").cumcount()
    found: dict[int, list[tuple[int, int]]] = {}
    for number, rank, index in zip(instance, table["rank"], position, strict=True):
        if number >= 0:
            found.setdefault(int(number), []).append((int(rank), int(index)))
    return {tuple(sorted(members)) for members in found.values()}


irregular = st.lists(st.integers(50_000, 900_000), min_size=12, max_size=40)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    gaps=irregular,
    lost_first=st.integers(0, 5),
    lost_last=st.integers(0, 5),
    offset=st.integers(-(10**9), 10**9),
    jitter=st.lists(st.integers(-2_000, 2_000), min_size=40, max_size=40),
)
def test_cut_windows_pair_by_the_steadiest_ends(
    gaps: list[int], lost_first: int, lost_last: int, offset: int, jitter: list[int]
) -> None:
    """A rank that lost collectives at either end, on any clock, is paired with those it kept."""
    assume(len(set(gaps)) > 3)  # evenly spaced collectives look the same shifted by one
    ends = np.cumsum(gaps)
    count = len(ends)
    kept = range(lost_first, count - lost_last) if count - lost_last - lost_first >= 8 else range(count)
    other = [int(ends[index]) + offset + jitter[index] for index in kept]
    table = communications(
        [ends.tolist(), other],
        [["all_reduce"] * count, ["all_reduce"] * len(kept)],
        [[4096] * count, [4096] * len(kept)],
    )
    expected = {((0, index), (1, position)) for position, index in enumerate(kept)}
    assert pairs(table) == expected


@settings(derandomize=True, deadline=None, max_examples=40)
@given(gaps=irregular, lost=st.integers(3, 9), length=st.integers(1, 3))
def test_lost_stretch_leaves_the_rest_paired(gaps: list[int], lost: int, length: int) -> None:
    """A rank that lost a stretch in the middle, on a shared clock, is paired on both sides of it."""
    ends = np.cumsum(gaps)
    kept = [index for index in range(len(ends)) if not lost <= index < lost + length]
    other = [int(ends[index]) for index in kept]
    table = communications(
        [ends.tolist(), other],
        [["all_gather"] * len(ends), ["all_gather"] * len(kept)],
        [[1 + index % 5 for index in range(len(ends))], [1 + index % 5 for index in kept]],
    ).assign(host=0)
    assert pairs(table) == {((0, index), (1, position)) for position, index in enumerate(kept)}


def test_sequence_numbers_decide() -> None:
    """With sequence numbers, order and sizes do not matter."""
    table = communications(
        [[100_000, 200_000, 300_000], [200_000, 300_000, 400_000]],
        [["all_reduce"] * 3] * 2,
        [[8, 8, 8], [16, 8, 8]],
        [[4, 5, 6], [5, 6, 7]],
    )
    assert pairs(table) == {((0, 1), (1, 0)), ((0, 2), (1, 1))}
    assert match(table).unmatched == {"not recorded by the partners": 2}


def test_different_kinds_are_not_paired_blindly() -> None:
    """Sequences that do not agree in kind and size are unmatched, and counted."""
    table = communications(
        [[100_000, 200_000, 300_000], [100_000, 200_000, 300_000]],
        [["all_reduce"] * 3, ["all_gather"] * 3],
        [[8, 8, 8], [16, 16, 16]],
    )
    assert pairs(table) == set()
    assert sum(match(table).unmatched.values()) == 6


@pytest.mark.parametrize("unknown", [0, 1])
def test_unknown_sizes_pair_with_any(unknown: int) -> None:
    """Kernels queued before the recording have no arguments; they still count in the order."""
    sizes = [[8, 16, 32, 64], [8, 16, 32, 64]]
    sizes[unknown] = [-1, -1, 32, 64]
    table = communications([[100_000, 250_000, 300_000, 500_000]] * 2, [["all_reduce"] * 4] * 2, sizes)
    assert pairs(table) == {((0, index), (1, index)) for index in range(4)}
