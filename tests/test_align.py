"""One clock for all ranks: offsets and drift of hosts, fitted on the ends of collectives."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceaudit.account import account
from traceaudit.ranks.align import _fitted, _violations, align
from traceaudit.ranks.arrivals import arrivals
from traceaudit.ranks.collectives import gather, layout
from traceaudit.ranks.instances import Instances
from traceaudit.ranks.matching import Matching, match
from traceaudit.reading.normalise import read_trace
from traceaudit.steps import Selection

Directory = Callable[[str], Path]


def evidence(ends: np.ndarray, offsets: np.ndarray) -> pd.DataFrame:
    """Return ends of collectives (rows) on hosts (columns), each on its own clock; NaN where a host takes no part."""
    rows = [
        (instance, host, ends[instance] + offsets[instance, host])
        for instance in range(len(ends))
        for host in range(offsets.shape[1])
        if not np.isnan(offsets[instance, host])
    ]
    table = pd.DataFrame(rows, columns=["instance", "host", "end"])
    return table.assign(rank=table["host"], transfer=10.0)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
    offsets=st.lists(st.integers(-(10**9), 10**9), min_size=2, max_size=12),
    noise=st.integers(0, 5_000),
    seed=st.integers(0, 100),
)
def test_offsets_are_recovered_within_the_noise(offsets: list[int], noise: int, seed: int) -> None:
    """Constant offsets of hosts come back within the jitter of the ends."""
    random = np.random.default_rng(seed)
    ends = np.sort(random.integers(0, 10**8, 60)).astype(np.float64)
    shifts = np.array(offsets, np.float64) + random.uniform(-noise, noise, (60, len(offsets)))
    fitted, tied = _fitted(evidence(ends, shifts), len(offsets))
    assert tied.all()
    planted = np.array(offsets) - offsets[0]
    assert np.abs(fitted[:, 0] - planted).max() <= 2 * noise + 1


def test_outliers_do_not_move_the_fit() -> None:
    """A third of the collectives leaving late on one host changes its offset by no more than the others' jitter."""
    random = np.random.default_rng(1)
    ends = np.arange(60) * 1e6
    shifts = np.zeros((60, 4)) + random.uniform(-100, 100, (60, 4))
    shifts[:, 2] += 5e5
    shifts[::3, 2] += 3e6
    fitted, _ = _fitted(evidence(ends, shifts), 4)
    assert abs(fitted[2, 0] - 5e5) < 300


def test_drift_is_recovered() -> None:
    """A clock that runs 20 ppm fast is seen as such, over a recording long enough."""
    ends = np.arange(30) * 5e7
    shifts = np.stack([np.zeros(30), 1e6 + 20e-6 * ends], axis=1)
    fitted, _ = _fitted(evidence(ends, shifts), 2)
    assert fitted[1, 1] == pytest.approx(20e-6, rel=0.01)
    assert fitted[1, 0] == pytest.approx(1e6, abs=100)


def test_chain_of_hosts_is_tied_and_an_island_is_not() -> None:
    """Hosts that share collectives only with neighbours are tied over them; one that shares none is not."""
    offsets = np.full((30, 4), np.nan)
    offsets[:10, :2] = [0, 700]
    offsets[10:20, 1:3] = [700, -400]
    offsets[20:, 3] = 9_000
    fitted, tied = _fitted(evidence(np.arange(30) * 1e6, offsets), 4)
    assert tied.tolist() == [True, True, True, False]
    assert np.abs(fitted[:3, 0] - [0, 700, -400]).max() < 1


def test_end_before_the_last_arrival_is_a_violation() -> None:
    """No collective ends before its last participant arrived; offsets that say so are counted."""
    table = pd.DataFrame(
        {
            "rank": [0, 1],
            "host": [0, 1],
            "kind": "all_reduce",
            "start_ns": [0, 40_000],
            "end_ns": [50_000, 90_000],
        }
    )
    instance = np.zeros(2, np.int32)
    matching = Matching(instance, np.ones(2, np.bool_), {}, Instances.of(instance, np.arange(2)))
    assert _violations(table, matching, np.zeros((2, 2)), {}, 0)[0] == 0
    assert _violations(table, matching, np.array([[0.0, 0.0], [-20_000.0, 0.0]]), {}, 0)[0] == 1


def test_clock_free_waits_agree_with_perfect_clocks(simulated: Directory) -> None:
    """Where all participants leave together, durations alone give the same waits as clocks."""
    accounts = [account(read_trace(path), Selection()) for path in sorted(simulated("slow_gpu").glob("rank*"))]
    table = gather(accounts, 8, layout(accounts, 8, {}), dict.fromkeys(range(8), 0))
    matching = match(table)
    _, clock = arrivals(table, matching, align(accounts, table, matching))
    assert clock.disagreement_ns == 0
