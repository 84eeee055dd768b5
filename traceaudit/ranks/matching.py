"""Which communications of different ranks are one collective (attribution rule 3.2).

With sequence numbers, a collective instance is (process group, sequence number). Without, the communications of a group
are paired in order, and the order is checked: windows are shifted or cut when a rank's recording began late, ended
early or lost a stretch. The ends of one collective agree between ranks up to a constant, the offset of their clocks
(none on one host); of all shifts that pair equal kinds and sizes, the one with the steadiest differences of ends is
right.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.intervals import Array
from traceaudit.ranks.instances import Instances, Integers, packed
from traceaudit.ranks.members import coded

ENDING_TOGETHER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})

SLACK = 16  # positions tried beyond the difference of counts
AGREEMENT = 0.9  # share of pairs with equal kind and size below which a shift is none
PARTIAL_AGREEMENT = 0.3  # below which it does not hold even for a part of the sequence
STEADY_NS = 1_000  # spread of the differences of ends that the fit cannot tell from none
ONE_CLOCK_NS = 20_000_000  # ends of one collective on one host do not lie further apart
STRAY_NS = 1_000_000  # a pair whose ends differ by this much more than the others' is not one collective


@dataclass(frozen=True)
class Matching:
    """Instances of collectives, by row of the table of communications.

    Attributes:
        instance: number of the instance, -1 where unmatched.
        complete: every member of the group was traced and has the instance.
        unmatched: communications that were not paired, by reason.
        rows: the same, sorted by instance.
    """

    instance: Integers
    complete: npt.NDArray[np.bool_]
    unmatched: dict[str, int]
    rows: Instances


def match(table: pd.DataFrame) -> Matching:
    """Match the communications of the ranks; `table` is that of `traceaudit.ranks.collectives.gather`."""
    size = len(table)
    if not size:
        none = np.empty(0, np.int32)
        return Matching(none, np.empty(0, np.bool_), {}, Instances.of(none, none))
    passing = (table["kind"] == "send_recv").to_numpy()
    anonymous = passing & (table["direction"] == "").to_numpy()  # partners not recorded
    label = np.full(size, -1, np.int64)  # position in the reference sequence of its group, or sequence number
    group = coded(table["members"])[0].astype(np.int64) * 2 + passing
    numbered = table["seq"].to_numpy() >= 0
    label[numbered] = _by_number(table if numbered.all() else table[numbered], group[numbered])
    label[anonymous] = -1
    if not numbered.all():
        columns = _Columns(table, ~numbered)
        for rows in _groups(group, np.flatnonzero(~numbered & ~anonymous)):
            label[rows] = _by_order(columns, rows)
    return _instances(table, group * 2 + numbered, label, anonymous)


def _groups(group: Array, rows: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    order = rows[np.argsort(group[rows], kind="stable")]
    if not len(order):
        return []
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _by_number(table: pd.DataFrame, group: Array) -> Array:
    """Return labels from sequence numbers; several communications of one number count in order."""
    key = packed(group, _way(table), table["seq"].to_numpy())
    rank = table["rank"].to_numpy()
    order = np.lexsort((rank, key))
    again = (np.diff(key[order], prepend=-1) == 0) & (np.diff(rank[order], prepend=-1) == 0)
    if again.any():
        begun = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
        repeat = np.empty(len(order), np.int64)
        repeat[order] = np.arange(len(order)) - begun
        key = packed(key, repeat)
    return np.asarray(pd.factorize(key, sort=True)[0], np.int64)


def _way(table: pd.DataFrame) -> Integers:
    """Return what tells point-to-point traffic of one pair apart by direction: the sender; -2 without a direction."""
    sending, undirected = ((table["direction"] == way).to_numpy() for way in ("send", ""))
    source = np.where(sending, table["rank"].to_numpy(), table["source_rank"].to_numpy())
    source[undirected] = -2
    return source


def _pairs(one: Array, other: Integers) -> Array:
    """Return numbers that are equal where both values are."""
    return np.asarray(one * (int(other.max(initial=0)) + 4) + other + 3, np.int64)


class _Columns:
    """What pairing in order looks at, as arrays."""

    def __init__(self, table: pd.DataFrame, chosen: npt.NDArray[np.bool_]) -> None:
        kind = table["kind"].to_numpy(dtype=object)
        self.rank = table["rank"].to_numpy(dtype=np.int64)
        self.start = table["start_ns"].to_numpy(dtype=np.int64)
        self.end = table["end_ns"].to_numpy(dtype=np.int64)
        self.kind = np.where(kind == "", -1, _pairs(pd.factorize(kind)[0], _way(table)))
        sizes = np.where(kind == "all_to_all", -1, table["bytes"].to_numpy(dtype=np.int64))
        self.size = np.where(chosen, sizes, -1)
        self.together = np.isin(kind, sorted(ENDING_TOGETHER))
        self.host = table["host"].to_numpy(dtype=np.int64)


def _by_order(columns: _Columns, rows: npt.NDArray[np.intp]) -> Array:
    """Return for the communications of one group their position in the longest rank's sequence, -1 for none."""
    order = rows[np.lexsort((columns.start[rows], columns.rank[rows]))]
    sequences = np.split(order, np.flatnonzero(np.diff(columns.rank[order])) + 1)
    reference = max(sequences, key=len)
    position = np.full(len(rows), -1, np.int64)
    where = np.argsort(rows)
    for sequence in sequences:
        at = where[np.searchsorted(rows[where], sequence)]
        position[at] = np.arange(len(sequence)) if sequence is reference else _placed(columns, sequence, reference)
    return position


def _placed(columns: _Columns, sequence: npt.NDArray[np.intp], reference: npt.NDArray[np.intp]) -> Array:
    """Return the position in the reference of each communication of another rank."""
    slack = SLACK + abs(len(reference) - len(sequence))
    tried = [_Shift.of(columns, sequence, reference, shift) for shift in range(-SLACK, slack + 1)]
    fitting = [shift for shift in tried if shift.agreement >= AGREEMENT and shift.pairs * 2 >= len(sequence)]
    found = np.full(len(sequence), -1, np.int64)
    if fitting:
        steadiest = min(shift.spread_ns for shift in fitting)
        near = [shift for shift in fitting if shift.spread_ns <= 2 * steadiest + STEADY_NS]
        best = max(near, key=lambda shift: (shift.pairs, -abs(shift.offset_ns)))
        found = best.positions(columns, sequence, reference)
    if (found >= 0).sum() < min(len(sequence), len(reference)):  # something is lost in between: go by time alone
        for shift in tried:
            if shift.agreement >= PARTIAL_AGREEMENT and shift.together:
                other = shift.by_end(columns, sequence, reference, min(max(STEADY_NS, 20 * shift.spread_ns), STRAY_NS))
                found = other if (other >= 0).sum() > (found >= 0).sum() else found
    return found


@dataclass(frozen=True)
class _Shift:
    """One way to pair two sequences: element i of the one with element i + shift of the other."""

    shift: int
    pairs: int
    agreement: float
    offset_ns: int
    spread_ns: int
    together: bool  # rests on kinds that all ranks leave together

    @staticmethod
    def of(columns: _Columns, sequence: npt.NDArray[np.intp], reference: npt.NDArray[np.intp], shift: int) -> "_Shift":
        own, other = _overlap(sequence, reference, shift)
        if not len(own):
            return _Shift(shift, 0, 0.0, 0, 0, False)
        alike = _alike(columns, own, other)
        if not alike.any():
            return _Shift(shift, len(own), 0.0, 0, 0, False)
        apart = columns.end[own] - columns.end[other]
        together = alike & columns.together[own]
        apart = apart[together if together.any() else alike]
        one_clock = columns.host[own[0]] == columns.host[other[0]]
        offset = 0 if one_clock else int(np.median(apart))
        spread = int(np.median(np.abs(apart - offset)))
        if one_clock and spread > ONE_CLOCK_NS:
            return _Shift(shift, len(own), 0.0, 0, spread, False)
        return _Shift(shift, len(own), float(alike.mean()), offset, spread, bool(together.any()))

    def positions(self, columns: _Columns, sequence: npt.NDArray[np.intp], reference: npt.NDArray[np.intp]) -> Array:
        """Return positions by this shift; where it does not hold throughout, by the time of each end."""
        own, other = _overlap(sequence, reference, self.shift)
        place = np.arange(len(sequence)) + self.shift
        place = np.where((place >= 0) & (place < len(reference)), place, -1)
        apart = np.abs(columns.end[own] - columns.end[other] - self.offset_ns)
        limit = max(STRAY_NS, 20 * self.spread_ns)
        stray = columns.together[own] & (apart > limit)
        if not (stray.any() or not _alike(columns, own, other).all()):
            return place
        return self.by_end(columns, sequence, reference, limit)

    def by_end(
        self, columns: _Columns, sequence: npt.NDArray[np.intp], reference: npt.NDArray[np.intp], limit: int
    ) -> Array:
        """Pair each communication with the one of the reference that ended closest, if it is alike and near."""
        ends = columns.end[reference]
        order = np.argsort(ends, kind="stable")
        wanted = columns.end[sequence] - self.offset_ns
        right = np.clip(np.searchsorted(ends[order], wanted), 0, len(order) - 1)
        place = np.full(len(sequence), -1, np.int64)
        best = np.full(len(sequence), limit + 1, np.int64)
        for step in (-2, -1, 0, 1):
            candidate = order[np.clip(right + step, 0, len(order) - 1)]
            apart = np.abs(ends[candidate] - wanted)
            better = _alike(columns, sequence, reference[candidate]) & (apart < best)
            place, best = np.where(better, candidate, place), np.where(better, apart, best)
        twice = pd.Series(best).groupby(place).rank(method="first").to_numpy() > 1
        return np.where(twice, -1, place)


def _overlap(
    sequence: npt.NDArray[np.intp], reference: npt.NDArray[np.intp], shift: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    low, high = max(0, -shift), min(len(sequence), len(reference) - shift)
    if high <= low:
        return sequence[:0], reference[:0]
    return sequence[low:high], reference[low + shift : high + shift]


def _alike(columns: _Columns, own: npt.NDArray[np.intp], other: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Tell which pairs have equal kinds and sizes, as far as both are known."""
    kinds = (columns.kind[own] == columns.kind[other]) | (columns.kind[own] < 0) | (columns.kind[other] < 0)
    sizes = (columns.size[own] == columns.size[other]) | (columns.size[own] < 0) | (columns.size[other] < 0)
    return np.asarray(kinds & sizes)


def _instances(table: pd.DataFrame, group: Array, label: Array, anonymous: npt.NDArray[np.bool_]) -> Matching:
    placed = label >= 0
    instance = np.full(len(table), -1, np.int32)
    instance[placed] = pd.factorize(packed(group[placed], label[placed]), sort=True)[0]
    rank = table["rank"].to_numpy()
    codes, groups = coded(table["members"])
    expected = np.array([len(ranks or ()) for ranks in groups])[codes]
    found = Instances.of(instance, rank)
    present = found.spread(found.ranks(rank), 0)
    alone = placed & (present < 2) & (expected > 1)
    traced = set(np.unique(rank).tolist())
    partners = np.array([len(traced.intersection(ranks or ())) > 1 for ranks in groups], np.bool_)[codes]
    reasons = {
        "partners not traced": alone & ~partners,
        "not recorded by the partners": alone & partners,
        "point-to-point without recorded partners": anonymous,
        "no agreement with the partners' order": ~placed & ~anonymous,
    }
    if alone.any():
        instance[alone] = -1
        found = Instances.of(instance, rank)
    return Matching(
        instance,
        (instance >= 0) & (present == expected),
        {reason: int(rows.sum()) for reason, rows in reasons.items() if rows.any()},
        found,
    )
