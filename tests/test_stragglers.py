"""Who made the others wait: planted culprits come back, whatever the clocks, the labels and the order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Audited
from tests.rewriting import relabelled, rewritten, shifted, shuffled
from traceaudit.audit import Audit
from traceaudit.pipeline import analyze
from traceaudit.reading.sources import APART_NS
from traceaudit.simulate import SCENARIOS

Directory = Callable[[str], Path]
SINGLE_FAULT = [
    "late_rank",
    "slow_gpu",
    "gc_pause",
    "slow_link",
    "missing_rank",
    "clock_offset",
    "clock_drift",
    "host_alone",
    "dropped_first",
    "dropped_first_no_seq",
]


def truth_of(directory: Path) -> dict[str, Any]:
    """Return the planted answer."""
    truth: dict[str, Any] = json.loads((directory / "truth.json").read_text())
    return truth


def buckets(audit: Audit) -> dict[str, int]:
    """Return the job's buckets."""
    found: dict[str, int] = audit.result["job"]["buckets"]
    return found


@pytest.mark.parametrize("scenario", SINGLE_FAULT)
def test_planted_culprit_is_named(scenario: str, simulated: Directory, audited: Audited) -> None:
    """The planted rank, its cause and the waits it caused come back, exact where the clocks are."""
    truth = truth_of(simulated(scenario))
    tolerance = truth["tolerance_ns"] * 100  # waits add up over ranks and steps
    found = audited(scenario).result["stragglers"][: len(truth["caused"])]
    assert [(one["rank"], one["cause"]) for one in found] == [(one["rank"], one["cause"]) for one in truth["caused"]]
    for one, planted in zip(found, truth["caused"], strict=True):
        assert one["caused_ns"] == pytest.approx(planted["caused_ns"], abs=tolerance, rel=0)
        assert one["own_ns"] == pytest.approx(planted["own_ns"], abs=tolerance, rel=0)


@pytest.mark.parametrize("scenario", [name for name, scenario in SCENARIOS.items() if not scenario.large])
def test_caused_equals_lost(scenario: str, audited: Audited) -> None:
    """The two views have equal totals: what culprits caused is what the others waited."""
    result = audited(scenario).result
    lost = sum(
        leaf["ns"] for leaf in result["job"]["leaves"] if leaf["bucket"] == "straggler" and leaf["leaf"] != "slow_gpu"
    )
    assert sum(one["caused_ns"] for one in result["stragglers"]) == lost


def test_slow_gpu_has_evidence(audited: Audited) -> None:
    """A slow GPU is named with kernels that are slower by the planted 12 %."""
    evidence = audited("slow_gpu").result["stragglers"][0]["evidence"]
    assert evidence["slower_share"] > 0.8
    assert all(1.05 < kernel["ratio"] < 1.15 for kernel in evidence["kernels"])


def test_pause_has_evidence(audited: Audited) -> None:
    """A pause is named with what the host did."""
    assert audited("gc_pause").result["stragglers"][0]["evidence"]["leaf"] == "gc"


def test_slow_link_is_listed(simulated: Directory, audited: Audited) -> None:
    """The pair whose transfers take longer than the other pairs' is a slow link, by as much as was planted."""
    links = audited("slow_link").result["slow_links"]
    (planted,) = truth_of(simulated("slow_link"))["planted"]
    assert {link["group"] for link in links} == {"mesh_tp [2, 3]"}
    assert all(link["ratio"] == pytest.approx(planted["slowness_permille"] / 1_000, rel=0.05) for link in links)


def test_slow_rank_behind_a_pipeline_is_found(audited: Audited) -> None:
    """In the 28 % run the other stage waits for rank 1, which waited for rank 5: rank 5 is the culprit."""
    worst = audited("run_28_mfu").result["stragglers"][0]
    assert (worst["rank"], worst["cause"]) == (5, "slow_gpu")


def test_untraced_partner_is_not_guessed(audited: Audited) -> None:
    """After the last traced arrival, transfer and wait cannot be told apart; the shortest instance is an estimate."""
    result = audited("missing_rank").result
    leaves = {leaf["leaf"] for leaf in result["job"]["leaves"] if leaf["bucket"] == "exposed_comm"}
    assert leaves == {"transfer_or_wait"}
    row = next(row for row in result["collectives"] if row["exposed_ns"])
    assert 0 < row["transfer_estimate_ns"] <= row["exposed_ns"]


def test_offsets_of_hosts_come_back(simulated: Directory, audited: Audited) -> None:
    """The planted offset of a host is recovered within the residual, and the residual is small."""
    result = audited("clock_offset").result
    offsets = {rank["host"]: rank["clock_offset_ns"] for rank in result["ranks"]}
    planted = truth_of(simulated("clock_offset"))["clock"]["hosts"]
    assert result["clock"]["method"] == "collective_ends"
    for host, clock in planted.items():
        assert abs(offsets[host] - clock["offset_ns"]) <= max(result["clock"]["residual_ns"], 1)


def test_host_without_evidence_is_named(audited: Audited) -> None:
    """A host that shares no collective with the others is not aligned, and said so."""
    clock = audited("host_alone").result["clock"]
    assert (clock["method"], clock["hosts"], clock["not_aligned"]) == ("none", 2, ["host0", "host1"])


NEARLY_APART_NS = APART_NS - 10**9  # a second less than what, but for the steps, would be two recordings


@pytest.mark.parametrize("offset_ns", [1, -1_000_003, NEARLY_APART_NS, -NEARLY_APART_NS, 3_600 * 10**9])
def test_offset_of_a_host_changes_nothing(
    offset_ns: int, simulated: Directory, audited: Audited, tmp_path: Path
) -> None:
    """Any constant offset of one host's clock leaves every bucket as it is, within the residual."""
    moved = analyze(rewritten(simulated("clock_offset"), tmp_path / "run", shifted("host1", offset_ns)))
    limit = moved.result["clock"]["residual_ns"] * len(moved.leaves)
    assert all(abs(buckets(moved)[name] - ns) <= limit for name, ns in buckets(audited("clock_offset")).items())


@pytest.mark.parametrize("scenario", ["slow_gpu", "run_28_mfu", "slow_link", "dropped_first_no_seq"])
def test_order_of_events_changes_nothing(scenario: str, simulated: Directory, audited: Audited, tmp_path: Path) -> None:
    """A file promises no order of its events."""
    shuffled_run = analyze(rewritten(simulated(scenario), tmp_path / "run", shuffled(7)))
    assert shuffled_run.result["job"] == audited(scenario).result["job"]
    assert shuffled_run.result["stragglers"] == audited(scenario).result["stragglers"]


@pytest.mark.parametrize("scenario", ["slow_gpu", "gc_pause", "slow_link"])
def test_labels_of_ranks_change_nothing(scenario: str, simulated: Directory, audited: Audited, tmp_path: Path) -> None:
    """With other numbers for the ranks, the same leaves and the same culprit under its new number."""
    source = simulated(scenario)
    plain = audited(scenario)
    renamed = analyze(rewritten(source, tmp_path / "run", relabelled(lambda rank: (rank * 3 + 1) % 8)))
    assert buckets(renamed) == buckets(plain)
    one, other = renamed.result["stragglers"][0], plain.result["stragglers"][0]
    assert one["caused_ns"] == other["caused_ns"]
    assert one["cause"] == other["cause"]
    planted = {(culprit["rank"] * 3 + 1) % 8 for culprit in truth_of(source)["caused"]}
    assert one["rank"] in planted


def test_every_common_collective_of_a_shifted_set_is_matched(audited_real: Audited) -> None:
    """76, 81 and 84 collectives on ranks of one job: they agree only from the end, and all common ones are matched."""
    result = audited_real("nanogpt-dp8-h100").result
    assert result["quality"]["unmatched_communications"] == {}
    assert all(leaf["leaf"] != "transfer_or_wait" for leaf in result["job"]["leaves"])
