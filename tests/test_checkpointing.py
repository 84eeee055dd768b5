"""What the report says of activation checkpointing, and what it only suspects."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from traceaudit.checkpointing import COLUMNS, recompute_row, summary
from traceaudit.classify import activities
from traceaudit.reading.normalise import read_trace
from traceaudit.recompute import recompute
from traceaudit.steps import Selection, step_windows


def kernels_only(names: Sequence[str], path: Path) -> pd.DataFrame:
    """Return the summary of a trace of nothing but kernels of 1 us, one after another."""
    args = {"stream": 7, "device": 0}
    row = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "dur": 1, "args": args}
    path.write_text(json.dumps([{**row, "name": name, "ts": 2 * number} for number, name in enumerate(names)]))
    return summarised(path)


def summarised(path: Path) -> pd.DataFrame:
    """Return the summary of one file."""
    trace = read_trace(path)
    table = activities(trace)
    return summary(trace, table, recompute(trace, table), step_windows(trace, table, Selection()))


def said(*rows: dict[str, Any], kernels_ns: int = 0, communication_ns: int = 0) -> dict[str, Any]:
    """Return what is said of some rows of a summary, in a window of 1,000 ns at an MFU of 40 %."""
    one = {"regions": 1, "kernels": 1, "dense": 1, "cached": 0, "ns": 100}
    usual = {"step": 0, "part": "recomputed", "rule": 1, "flavour": "non_reentrant", "module": "", **one}
    table = pd.DataFrame([{**usual, **row} for row in rows], columns=list(COLUMNS))
    return recompute_row([table], kernels_ns=kernels_ns, communication_ns=communication_ns, window_ns=1_000, mfu=0.4)


def test_nothing_recomputed_says_so() -> None:
    """A run without checkpoints has no rule, no setting and no cost."""
    found = said()
    assert (found["rule"], found["setting"], found["flavour"], found["modules"]) == (None, None, None, [])
    assert (found["share"], found["mfu_points"], found["suspected"]) == (0.0, 0.0, None)


def test_the_cost_is_what_mfu_would_gain() -> None:
    """A fifth of the step lost at an MFU of 40 % is worth 10 points."""
    found = said({}, kernels_ns=150, communication_ns=50)
    assert found["share"] == 0.2
    assert found["mfu_points"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("dense", "cached", "setting"), [(9, 0, "full"), (6, 0, "full"), (5, 0, "selective"), (9, 1, "selective")]
)
def test_the_setting_is_full_where_most_of_the_forward_runs_again(dense: int, cached: int, setting: str) -> None:
    """From 60 % of the forward's products on it is full, unless results were kept."""
    rows = ({"dense": dense, "cached": cached}, {"part": "forward", "rule": 0, "dense": 10})
    assert said(*rows, kernels_ns=100)["setting"] == setting


def test_the_rule_that_decided_most_time_is_shown() -> None:
    """Regions of one run may be found by different rules."""
    assert said({"rule": 1, "ns": 10}, {"rule": 2, "ns": 90}, kernels_ns=100)["rule"] == 2


def test_modules_are_in_natural_order_and_many_become_a_pattern() -> None:
    """Layer 10 comes after layer 2; a hundred layers are one line."""
    few = said(*({"module": f"layers.{number}"} for number in (10, 2, 1)))
    assert few["modules"] == ["layers.1", "layers.2", "layers.10"]
    assert said(*({"module": f"layers.{number}"} for number in range(100)))["modules"] == ["layers.*"]


def test_a_suspicion_costs_nothing_and_is_told() -> None:
    """What is suspected stands beside, with its reason and an estimate."""
    found = said({"part": "suspected", "rule": 3, "flavour": "names", "ns": 200, "kernels": 4})
    assert (found["rule"], found["kernels_ns"], found["share"]) == (None, 0, 0.0)
    suspected = found["suspected"]
    assert (suspected["rule"], suspected["estimated_ns"], suspected["share"]) == (3, 200, 0.2)
    assert suspected["mfu_points"] == pytest.approx(10.0)
    assert "forward" in suspected["reason"]


AHEAD, BACK, CONVERT = "flash_fwd_kernel<128>", "flash_bwd_dq_dk_dv_loop_kernel<128>", "flash_bwd_convert_dq<128>"


@pytest.mark.parametrize(
    ("names", "beyond"),
    [
        ([AHEAD] * 4 + [BACK, CONVERT] * 4, 0),
        ([AHEAD] * 4 + [AHEAD, BACK, CONVERT] * 4, 4),
        ([AHEAD, AHEAD, BACK, CONVERT] * 4, 4),  # micro-batches
        ([AHEAD] * 4, 0),  # inference
        (["vectorized_layer_norm_kernel"] * 6 + ["layer_norm_grad_input_kernel"] * 4, 2),
    ],
)
def test_kernels_alone_suspect_the_forward_ones_beyond_the_backward_ones(
    names: list[str], beyond: int, tmp_path: Path
) -> None:
    """Each backward kernel answers one forward kernel; what is more ran again (rule 4)."""
    table = kernels_only(names, tmp_path / "trace.json")
    assert set(table["part"]) <= {"suspected"}
    assert int(table["kernels"].sum()) == beyond
    assert int(table["ns"].sum()) == beyond * 1_000
    assert set(table["rule"]) <= {4}


# Sets of real traces by file: regions, matrix and attention kernels that ran again, those of the forward, and modules.
# ResNet-18 has 20 convolutions and a classifier; its four layers, all but the stem, are checkpointed: 19 of 21.
# The transformer has 6 layers of 7 products and an attention, and a head; every second layer is checkpointed.
REAL = {
    "mi300-ddp-recompute/rank0_iter16_18.json.gz": (12, 3 * 19, 3 * 21, {"Sequential"}),
    "torchtitan-fsdp4-h100/rank000002_trace.json.gz": (3, 3 * 8, 6 * 8 + 1, {"layers.1", "layers.3", "layers.5"}),
}


@pytest.mark.parametrize("name", list(REAL))
def test_real_checkpoints_run_the_kernels_of_their_layers_again(name: str, real_traces: Path) -> None:
    """The counts are those of the models' layers."""
    table = summarised(real_traces / name)
    redone, ahead = table[table["part"] == "recomputed"], table[table["part"] == "forward"]
    found = (int(redone["regions"].sum()), int(redone["dense"].sum()), int(ahead["dense"].sum()), set(redone["module"]))
    assert found == REAL[name]
    assert set(redone["rule"]) == {1}
    assert set(redone["flavour"]) == {"non_reentrant"}


@pytest.mark.parametrize(
    "name",
    [
        "nanogpt-rank0-h100/profile-rank0-trace.json.gz",  # compiled, with products hidden in a kernel of its own
        "hta-inductor-graph-a100/rank0.json.gz",
        "torchrec-dlrm-qcomm/host_58187.1698959174376874814.pt.trace.json.gz",  # differentiable collectives
    ],
)
def test_real_runs_without_checkpoints_recompute_nothing(name: str, real_traces: Path) -> None:
    """Nothing counts, nothing is suspected."""
    assert not len(summarised(real_traces / name))
