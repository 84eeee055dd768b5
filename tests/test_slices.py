"""Slices: where in time the leaves are, exactly, and one step of some ranks in bins."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes

from tests.conftest import Audited
from traceaudit.audit import Audit
from traceaudit.errors import InputError, PartitionError
from traceaudit.leaves import Leaf
from traceaudit.pieces import COARSE_BINS
from traceaudit.slices import proportional, slices
from traceaudit.strips import BINS, SHOWN_RANKS

SCENARIOS = ("late_rank", "loader_stall", "recompute", "run_28_mfu", "pipeline_heavy_stage", "clock_drift", "gc_pause")
REAL = ("megatron-tp8-a100", "mi300-ddp-recompute", "torchrec-dlrm-a2a-opt4", "hta-ddp-v100")


def ledger(audit: Audit, rank: int) -> pd.DataFrame:
    """Return the leaves of a rank by step."""
    own = audit.leaves[audit.leaves["rank"] == rank]
    return own.groupby(["step", "bucket", "leaf"], as_index=False)[["ns"]].sum()


def summed(found: pd.DataFrame) -> pd.DataFrame:
    """Return slices summed as the ledger is."""
    with_ns = found.assign(ns=found["end_ns"] - found["start_ns"])
    return with_ns.groupby(["step", "bucket", "leaf"], as_index=False)[["ns"]].sum()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_slices_add_up_to_the_ledger_and_partition_the_windows(scenario: str, audited: Audited) -> None:
    """On every rank the slices of a step cover its window without overlap, and sum up to its leaves to the ns."""
    audit = audited(scenario, keep_pieces=True)
    windows = audit.attribution.windows
    for rank in sorted(windows["rank"].unique()):
        found = audit.slices(int(rank))
        pd.testing.assert_frame_equal(summed(found), ledger(audit, int(rank)), check_dtype=False)
        own = windows[windows["rank"] == rank].sort_values("start_ns")
        for step, start, end in zip(own["step"], own["start_ns"], own["end_ns"], strict=True):
            mine = found[found["step"] == step]
            assert mine["start_ns"].tolist() == [start, *mine["end_ns"].tolist()[:-1]]
            assert mine["end_ns"].iloc[-1] == end


@pytest.mark.parametrize("name", REAL)
def test_slices_of_real_traces_add_up(name: str, audited_real: Audited) -> None:
    """What holds of simulated runs holds of recorded ones."""
    audit = audited_real(name, keep_pieces=True)
    for own in audit.result["ranks"]:
        found = audit.slices(own["rank"])
        pd.testing.assert_frame_equal(summed(found), ledger(audit, own["rank"]), check_dtype=False)
        assert (found["end_ns"].to_numpy()[:-1] <= found["start_ns"].to_numpy()[1:]).all()


def test_slices_are_where_the_simulation_planted_them(audited: Audited) -> None:
    """The stall of the data loader lies at the head of each step, as one slice of the planted length and more."""
    audit = audited("loader_stall")
    found = audit.slices(0)
    for step, planted in {3: 5_000_000, 4: 25_000_000, 5: 40_000_000}.items():
        own = found[found["step"] == step]
        stalls = own[own["leaf"] == "data_loader"]
        start, end = (stalls[name].to_numpy() for name in ("start_ns", "end_ns"))
        longest = int(np.argmax(end - start))
        window = own["end_ns"].iloc[-1] - own["start_ns"].iloc[0]
        assert end[longest] - start[longest] == pytest.approx(planted, rel=0.02)
        assert start[longest] - own["start_ns"].iloc[0] < 0.02 * window


def test_a_trace_is_read_again_for_its_slices(audited: Audited) -> None:
    """An audit that kept no pieces gives the same slices as one that did."""
    kept, not_kept = audited("late_rank", keep_pieces=True), audited("late_rank")
    assert not_kept.slicer is not None
    assert not not_kept.slicer.accounts
    pd.testing.assert_frame_equal(kept.slices(2), not_kept.slices(2))


def test_no_slices_without_the_trace(audited: Audited) -> None:
    """A rank that was not analysed, and a result without traces, are errors that say so."""
    audit = audited("late_rank")
    with pytest.raises(InputError, match="rank 9 is not among"):
        audit.slices(9)
    with pytest.raises(InputError, match="no traces behind it"):
        replace(audit, slicer=None).slices(0)


def test_slices_that_miss_the_ledger_raise(audited: Audited) -> None:
    """A piece that is lost on the way is found out."""
    audit = audited("late_rank", keep_pieces=True)
    assert audit.slicer is not None
    pieces = audit.slicer.accounts[0].pieces
    with pytest.raises(PartitionError, match="rank 0: its slices differ"):
        slices(0, pieces.iloc[1:], audit.attribution, audit.slicer.by_family)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=30), st.floats(0, 1))
def test_proportional_parts_are_whole_and_complete(lengths: list[int], share: float) -> None:
    """The parts add up to the amount, none is negative or longer than its piece, each is within 2 ns of its share."""
    length = np.array(lengths, np.int64)
    amount = int(share * length.sum())
    taken = proportional(length, amount)
    assert int(taken.sum()) == amount
    assert ((taken >= 0) & (taken <= length)).all()
    exact = length * (amount / length.sum())
    assert np.abs(taken - exact).max() <= 2 + 1e-9 * length.sum()


def bins(audit: Audit, rank: int) -> list[str]:
    """Return the leaf of each bin of a rank in the timeline of the result."""
    timeline = audit.result["timeline"]
    own = next(row for row in timeline["ranks"] if row["rank"] == rank)
    names = [timeline["leaves"][place] for place in own["leaf"]]
    return [name for name, run in zip(names, own["bins"], strict=True) for _ in range(run)]


def test_the_coarse_timeline_agrees_with_the_slices(audited: Audited) -> None:
    """What is a stretch takes as many bins as its slices have time, to a few bins."""
    audit = audited("gc_pause")
    timeline = audit.result["timeline"]
    assert timeline["step"] == 4  # the middle one of 3, 4, 5
    for rank, leaf in ((6, "host_gap.gc"), (0, "straggler.host_caused")):
        found = audit.slices(rank)
        own = found[(found["step"] == 4) & (found["bucket"] + "." + found["leaf"] == leaf)]
        ns = int((own["end_ns"] - own["start_ns"]).sum())
        assert ns > 0
        assert bins(audit, rank).count(leaf) == pytest.approx(ns / timeline["bin_ns"], abs=3)


def test_the_coarse_timeline_is_aligned(audited: Audited) -> None:
    """Ranks whose clocks are 2 ms apart begin in the same bin, since they begin their steps together."""
    timeline = audited("clock_offset").result["timeline"]
    assert 4 * timeline["bin_ns"] < 2_000_000
    assert {row["first_bin"] for row in timeline["ranks"]} <= {0, 1}


def test_the_coarse_timeline_is_small(audited: Audited) -> None:
    """A rank's bins are a byte each; the result has few ranks, culprits first, and no more bins than it says."""
    audit = audited("run_28_mfu", keep_pieces=True)
    assert audit.slicer is not None
    assert all(own.coarse.nbytes == COARSE_BINS for own in audit.slicer.accounts.values())
    timeline = audit.result["timeline"]
    assert timeline["ranks"][0]["rank"] == audit.result["stragglers"][0]["rank"]
    assert len(timeline["ranks"]) <= SHOWN_RANKS
    assert all(row["first_bin"] + sum(row["bins"]) <= BINS + 1 for row in timeline["ranks"])
    assert all(len(row["leaf"]) == len(row["bins"]) for row in timeline["ranks"])
    names = {f"{leaf.bucket.value}.{leaf.label}" for leaf in Leaf}
    assert set(timeline["leaves"]) <= names


def test_the_timeline_of_a_rank_is_drawn_lane_by_lane(audited: Audited) -> None:
    """The picture has a lane for each bucket of the step, in the order of the waterfall."""
    audit = audited("late_rank")
    drawn = audit.timeline(0, 4)
    assert isinstance(drawn, Axes)
    titles = [label.get_text() for label in drawn.get_yticklabels()]
    assert titles[0] == "achieved (MFU)"
    assert "stragglers" in titles
    with pytest.raises(InputError, match="step 99 is not among"):
        audit.timeline(0, 99)
