"""The base state of every instant agrees with attribution rule 2, asked tick by tick."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from traceaudit.classify import State
from traceaudit.intervals import Intervals
from traceaudit.timeline import base_states, busy, overlapped, within

LAST = 20
ACTIVE = (State.COMPUTE, State.COMMUNICATION, State.HOST_COPY)
repeatable = settings(derandomize=True, deadline=None, max_examples=120)


class Activity(NamedTuple):
    """A GPU row: its fields in the order in which activities are sorted, and its state."""

    start: int
    stream: int
    correlation: int
    end: int
    state: State


activity = st.builds(
    lambda start, length, stream, correlation, state: Activity(start, stream, correlation, start + length, state),
    st.integers(0, LAST - 8),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 99),
    st.sampled_from(ACTIVE),
)
activities = st.lists(activity, max_size=9).map(sorted)


def table(rows: list[Activity]) -> pd.DataFrame:
    """Return activities as `classify.activities` does, as far as the states of a rank need them."""
    return pd.DataFrame(
        {
            "start_ns": np.array([row.start for row in rows], np.int64),
            "end_ns": np.array([row.end for row in rows], np.int64),
            "stream": np.array([row.stream for row in rows], np.int64),
            "state": np.array([row.state for row in rows], np.int8),
        }
    )


def state_at(rows: list[Activity], tick: int) -> tuple[State, int]:
    """Return the state of an instant and the activity that owns it, by reading the rule aloud."""
    running = [i for i, row in enumerate(rows) if row.start <= tick < row.end]
    for state in ACTIVE:
        own = [i for i in running if rows[i].state == state]
        if not own:
            continue
        if state == State.COMMUNICATION:
            island_end = next(
                (t for t in range(tick, LAST + 1) if state_of_compute(rows, t)), LAST + 1
            )  # the next instant with compute, if there is one
            inside = [i for i in own if rows[i].end <= island_end]
            if inside:
                latest = max(rows[i].end for i in inside)
                return state, next(i for i in inside if rows[i].end == latest)
        return state, own[0]
    following = [i for i, row in enumerate(rows) if row.start > tick]
    return State.IDLE, following[0] if following else -1


def state_of_compute(rows: list[Activity], tick: int) -> bool:
    """Whether a compute kernel runs."""
    return any(row.state == State.COMPUTE and row.start <= tick < row.end for row in rows)


@given(activities)
@repeatable
def test_each_tick_has_the_state_and_owner_of_the_rule(rows: list[Activity]) -> None:
    """Compute before communication before host copies before idle; the rule's owner among those that run."""
    found = {
        tick: (State(state), owner)
        for start, end, state, owner in base_states(table(rows), 0, LAST).itertuples(index=False)
        for tick in range(start, end)
    }
    assert found == {tick: state_at(rows, tick) for tick in range(LAST)}


@given(activities, st.integers(0, 3), st.integers(0, 3))
@repeatable
def test_pieces_partition_the_range(rows: list[Activity], before: int, after: int) -> None:
    """Pieces follow each other without hole or overlap from the range's start to its end, and none is empty."""
    pieces = base_states(table(rows), -before, LAST + after)
    start, end = pieces["start_ns"].tolist(), pieces["end_ns"].tolist()
    assert start == [-before, *end[:-1]]
    assert end[-1] == LAST + after
    assert (pieces["end_ns"] > pieces["start_ns"]).all()


@given(activities)
@repeatable
def test_owners_run_throughout_their_pieces(rows: list[Activity]) -> None:
    """An activity owns only time within itself; an idle piece is owned by what begins at its end."""
    for start, end, state, owner in base_states(table(rows), 0, LAST).itertuples(index=False):
        if state != State.IDLE:
            assert rows[owner].start <= start < end <= rows[owner].end
            assert rows[owner].state == state
        elif owner >= 0:
            assert rows[owner].start == end


def test_the_communication_that_ends_an_island_owns_it() -> None:
    """Of two collectives before a kernel, the later one to end is what the kernel waited for; one beyond it is not."""
    rows = sorted(
        [
            Activity(0, 1, 1, 2, State.COMPUTE),
            Activity(10, 1, 5, 12, State.COMPUTE),
            Activity(1, 2, 2, 10, State.COMMUNICATION),  # ends with the island: inside
            Activity(2, 3, 3, 6, State.COMMUNICATION),
            Activity(1, 4, 4, 11, State.COMMUNICATION),  # ends under compute
        ]
    )
    pieces = base_states(table(rows), 0, 12)
    assert pieces.to_dict("list") == {
        "start_ns": [0, 2, 10],
        "end_ns": [2, 10, 12],
        "state": [State.COMPUTE, State.COMMUNICATION, State.COMPUTE],
        "owner": [0, 1, 4],
    }


def test_a_rank_without_activities_is_idle() -> None:
    """Nothing recorded is one idle piece that nothing ends."""
    assert base_states(table([]), 3, 8).to_numpy().tolist() == [[3, 8, State.IDLE, -1]]


@given(activities, st.lists(st.integers(0, LAST), max_size=5, unique=True).map(sorted))
@repeatable
def test_busy_and_overlapped_count_ticks_within_windows(rows: list[Activity], borders: list[int]) -> None:
    """Busy ticks have any activity, overlapped ones communication under compute; windows count their own."""
    windows = Intervals(np.array(borders[:-1], np.int64), np.array(borders[1:], np.int64))

    def runs(tick: int, *states: State) -> bool:
        return any(row.start <= tick < row.end and row.state in states for row in rows)

    both = [t for t in range(LAST) if runs(t, State.COMPUTE) and runs(t, State.COMMUNICATION)]
    anything = [t for t in range(LAST) if runs(t, *ACTIVE)]
    copying = [t for t in range(LAST) if runs(t, State.HOST_COPY)]
    for found, expected in (
        (overlapped(table(rows)), both),
        (busy(table(rows)), anything),
        (busy(table(rows), State.HOST_COPY), copying),
    ):
        counted = [sum(a <= t < b for t in expected) for a, b in pairwise(borders)]
        assert within(found, windows).tolist() == counted
