"""The ten checks, the walk-through, and what they ask for where the traces cannot answer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import Audited
from traceaudit.cli import main
from traceaudit.pipeline import analyze
from traceaudit.simulate import SCENARIOS

Directory = Callable[[str], Path]

SMALL = [name for name, scenario in SCENARIOS.items() if not scenario.large]


def status(result: dict[str, Any], item: int) -> str:
    """Return the status of an item of the checklist."""
    return str(result["checklist"][item - 1]["status"])


@pytest.mark.parametrize("scenario", SMALL)
def test_ten_items_with_evidence(scenario: str, audited: Audited) -> None:
    """There are ten items in order, each with evidence; an open one says what to record."""
    rows = audited(scenario).result["checklist"]
    assert [row["item"] for row in rows] == list(range(1, 11))
    assert all(row["title"] and row["evidence"] and row["status"] in ("ok", "problem", "unknown") for row in rows)
    assert all((row["record_next"] is not None) == (row["status"] == "unknown") for row in rows)


@pytest.mark.parametrize("scenario", SMALL)
def test_walk_through_is_in_the_experts_order(scenario: str, audited: Audited) -> None:
    """The steps go from peak and numerator over gaps, communication, ends and late ranks to the kernels."""
    rows = audited(scenario).result["walk_through"]
    order = (
        "denominator",
        "numerator",
        "recompute",
        "represent",
        "Gaps",
        "overlapped",
        "ends",
        "late",
        "FlashAttention",
    )
    told = [row["title"] for row in rows]
    places = [
        next(place for place, title in enumerate(told) if word.lower() in title.lower())
        for word in order
        if word != "represent"
    ]
    assert places == sorted(places)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["text"] and row["status"] in ("ok", "problem", "unknown") for row in rows)


@pytest.mark.parametrize(
    ("scenario", "item", "expected"),
    [
        ("compute_only", 2, "ok"),  # 54 %
        ("run_28_mfu", 2, "problem"),
        ("compute_only", 3, "ok"),
        ("launch_bound", 3, "problem"),  # products that do not fill a tile
        ("compute_only", 4, "ok"),
        ("loader_stall", 4, "problem"),
        ("exposed_allreduce", 4, "problem"),
        ("compute_only", 5, "ok"),  # there is none
        ("hidden_allreduce", 5, "ok"),
        ("exposed_allreduce", 5, "problem"),
        ("compute_only", 6, "unknown"),
        ("compute_only", 7, "unknown"),
        ("compute_only", 8, "unknown"),
        ("compute_only", 9, "unknown"),
        ("allocator_retry", 9, "problem"),
        ("compute_only", 10, "ok"),
        ("launch_bound", 10, "problem"),
    ],
)
def test_items_answer_what_was_planted(scenario: str, item: int, expected: str, audited: Audited) -> None:
    """Each item is a problem in the runs where it was planted, and none in those where it was not."""
    assert status(audited(scenario).result, item) == expected


@pytest.mark.parametrize(
    ("scenario", "word", "expected"),
    [
        ("recompute", "recompute", "problem"),
        ("compute_only", "recompute", "ok"),
        ("gc_alone", "gaps", "problem"),
        ("exposed_allreduce", "overlapped", "problem"),
        ("hidden_allreduce", "overlapped", "ok"),
        ("pipeline_1f1b", "ends", "problem"),
        ("slow_gpu", "late", "problem"),
        ("hidden_allreduce", "late", "ok"),
    ],
)
def test_walk_through_tells_what_was_planted(scenario: str, word: str, expected: str, audited: Audited) -> None:
    """The four signatures and recompute are problems where they were planted."""
    row = next(row for row in audited(scenario).result["walk_through"] if word in row["title"].lower())
    assert row["status"] == expected


def test_training_log_answers_items_6_and_8(simulated: Directory, tmp_path: Path) -> None:
    """A log with a gradient norm and no spike makes item 8 ok; one with a spike, a problem."""
    rows = [{"step": step, "loss": 5 - step / 100 + 0.01 * (step % 3), "grad_norm": 1.0} for step in range(1, 101)]
    log = tmp_path / "train.jsonl"
    log.write_text("\n".join(json.dumps(row) for row in rows))
    result = analyze(simulated("compute_only"), training_log=log).result
    assert (status(result, 6), status(result, 8)) == ("unknown", "ok")
    assert result["norms"]["log"]["rows"] == 100
    for row in rows[80:84]:
        row["loss"] = 9.0
    log.write_text("\n".join(json.dumps(row) for row in rows))
    assert status(analyze(simulated("compute_only"), training_log=log).result, 8) == "problem"


def test_training_log_on_the_command_line(simulated: Directory, tmp_path: Path) -> None:
    """`--training-log` takes a log that `norms` reads; what is none is an error with exit code 1."""
    log = tmp_path / "train.csv"
    log.write_text("step,loss,grad_norm\n" + "\n".join(f"{step},{4 - step / 50},1.0" for step in range(1, 60)))
    arguments = ["analyze", str(simulated("compute_only")), "--training-log", str(log), "--json", "-"]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0
    assert status(json.loads(outcome.stdout), 8) == "ok"
    log.write_text("")
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 1
    assert "train.csv" in outcome.stderr


def test_failure_budget_answers_item_7(simulated: Directory) -> None:
    """With figures item 7 says what is lost, in the words of `traceaudit budget`."""
    figures = {"mtbf": 10_800.0, "pause": 30.0, "interval": 800.0}
    result = analyze(simulated("compute_only"), budget=figures).result
    assert status(result, 7) == "ok"
    assert result["checklist"][6]["evidence"] == result["budget"]["checklist"][0]["evidence"]
    seldom = analyze(simulated("compute_only"), budget={**figures, "interval": 8_000.0}).result
    assert status(seldom, 7) == "problem"


def test_open_checks_ask_for_a_recording(audited: Audited) -> None:
    """Traces without memory events ask for them, and the snippet turns them on."""
    found = audited("compute_only").result["record_next"]
    assert "memory events" in found["text"]
    assert "profile_memory=True" in found["snippet"]


def test_measured_memory_answers_items_1_and_9(real_traces: Path) -> None:
    """Where allocator events were recorded, both items rest on them and not on a formula."""
    result = analyze(real_traces / "switch-moe-a100" / "trace_8batch.json.gz").result
    facts = result["host_facts"]["allocator"]
    assert facts["reserved_peak_bytes"] >= facts["allocated_peak_bytes"] > 0
    assert status(result, 1) == "ok"
    assert "reserved" in result["checklist"][0]["evidence"]
    assert result["checklist"][8]["status"] in ("ok", "problem")
