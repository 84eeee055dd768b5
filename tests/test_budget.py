"""The failure budget: goldens from the papers, agreement with played failures, and the command."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from traceaudit.budget import (
    Reliability,
    Saving,
    best_s,
    budget,
    daly_s,
    losses,
    observed,
    pause_of,
    wall_over_useful,
    young_s,
)
from traceaudit.cli import main
from traceaudit.errors import InputError
from traceaudit.simulate.failures import play

PAUSE, MTBF = 30.0, 10_800.0


def run(*arguments: str | Path) -> Result:
    """Run the command; an exception that is no exit fails the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_intervals_are_the_published_ones() -> None:
    """C = 30 s and MTBF = 3 h: Young 804.98 s, Daly 785.1 s."""
    assert round(young_s(PAUSE, MTBF), 2) == 804.98
    assert round(daly_s(PAUSE, MTBF), 1) == 785.1


def test_losses_differ_by_their_definition() -> None:
    """At the optimum: 7.45 % first order, 7.84 % over useful work, 7.27 % of the wall, 7.19 % by ETTR."""
    best = budget(Reliability(MTBF), Saving(PAUSE))["at_optimum"]
    shown = {name: round(100 * row["lost"], 2) for name, row in best.items()}
    assert shown == {"first_order": 7.45, "over_useful": 7.84, "of_wall": 7.27, "ettr": 7.19}


@pytest.mark.parametrize(
    ("restart", "over_useful", "of_wall", "ettr"),
    [(60, 8.44, 7.78, None), (300, 10.88, 9.81, 9.86), (600, 14.0, 12.28, 12.54)],
)
def test_restart_adds_to_the_loss(restart: float, over_useful: float, of_wall: float, ettr: float | None) -> None:
    """The table of losses with a restart, to two decimal places."""
    best = budget(Reliability(MTBF), Saving(PAUSE, restart))["at_optimum"]
    assert round(100 * best["over_useful"]["lost"], 2) == over_useful
    assert round(100 * best["of_wall"]["lost"], 2) == of_wall
    assert ettr is None or round(100 * best["ettr"]["lost"], 2) == ettr


def test_observed_failures_give_the_mtbf() -> None:
    """419 failures in 54 days on 16,384 GPUs: 3.093 h for the cluster, 50,677 h for a GPU, 264 days for a node."""
    seen = observed(419, 54, 16_384)
    assert seen.per_gpu_s is not None
    assert seen.per_node_s is not None
    assert (round(seen.mtbf_s / 3600, 3), round(seen.per_gpu_s / 3600)) == (3.093, 50_677)
    assert round(seen.per_node_s / 86_400) == 264


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("interval", "pause", "restart", "mtbf"),
    [(785.0, 30.0, 0.0, MTBF), (785.0, 30.0, 600.0, MTBF), (7_200.0, 300.0, 900.0, 7_200.0)],
)
def test_played_failures_agree_with_the_formula(
    interval: float, pause: float, restart: float, mtbf: float, seed: int
) -> None:
    """The mean of 100,000 checkpoints lies within three standard errors of Daly's exact formula."""
    played = play(interval, pause, restart, mtbf, seed=seed)
    expected = wall_over_useful(interval, Saving(pause, restart), mtbf)
    assert abs(played.wall_over_useful - expected) < 3 * played.standard_error
    assert played.failures > 5_000


@pytest.mark.parametrize("pause", [0.1, 30.0, 600.0])
def test_daly_is_near_the_exact_minimum(pause: float) -> None:
    """Neither the bisected minimum nor Daly's interval can be improved by moving away from it."""
    exact = best_s(pause, MTBF)
    least = wall_over_useful(exact, Saving(pause), MTBF)
    assert math.isclose(daly_s(pause, MTBF), exact, rel_tol=2e-3)
    assert min(wall_over_useful(exact * factor, Saving(pause), MTBF) for factor in (0.9, 1.1)) > least


def test_calendar_adds_up() -> None:
    """Productive time, pauses and failures are the whole wall; MFU less its losses is goodput."""
    calendar = budget(Reliability(MTBF), Saving(PAUSE, 300), mfu=0.4)["calendar"]
    assert math.isclose(calendar["productive"] + calendar["checkpoint_pauses"] + calendar["failures"], 1)
    *parts, goodput = [row["share"] for row in calendar["waterfall"]]
    assert math.isclose(sum(parts), goodput)
    assert math.isclose(goodput, 0.4 * calendar["productive"])


def test_what_if_names_what_wins() -> None:
    """Halving the pause wins, asynchronous saving wins more; a job that fails all the time loses everything."""
    rows = {row["name"]: row["wins"] for row in budget(Reliability(MTBF), Saving(PAUSE, 300))["what_if"]}
    assert 0 < rows["half_pause"] < rows["asynchronous"]
    assert rows["half_restart"] > 0
    assert losses(1e6, Saving(PAUSE), 10.0)["of_wall"] == 1.0


def test_pause_is_read_from_a_result() -> None:
    """A pause is the checkpoint leaf over the checkpoints that were taken on all ranks."""
    job = {"leaves": [{"leaf": "checkpoint", "ns": 8_000_000_000}], "window_ns": 80_000_000_000, "ranks_traced": 4}
    assert pause_of({"job": job}) == (2.0, 0.1)
    assert pause_of({"job": job, "host_facts": {"checkpoint": {"count": 8}}}) == (1.0, 0.1)
    with pytest.raises(InputError, match="--pause"):
        pause_of({"job": {**job, "leaves": []}})


def test_budget_command_prints_each_definition(tmp_path: Path) -> None:
    """The report holds every golden figure beside its definition; JSON and picture are written once."""
    found, picture = tmp_path / "budget.json", tmp_path / "budget.svg"
    result = run("budget", "--mtbf", "3h", "--pause", "30s", "--interval", "1h", "--json", found, "-o", picture)
    assert result.exit_code == 0
    for figure in ("804.98 s", "785.11 s", "7.45 %", "7.84 %", "7.27 %", "7.19 %"):
        assert figure in result.stdout
    assert json.loads(found.read_bytes())["kind"] == "budget"
    assert picture.read_text().startswith("<?xml")
    assert run("budget", "--mtbf", "3h", "--pause", "30s", "--json", found).exit_code == 1


def test_budget_joins_the_waterfall(simulated: Callable[[str], Path], tmp_path: Path) -> None:
    """The pause and MFU of a traced checkpoint are taken from result.json, and the pause is not lost twice."""
    result = tmp_path / "result.json"
    assert run("analyze", simulated("checkpoint_burst"), "--json", result, "--quiet").exit_code == 0
    answer = run("budget", "--gpus", "1024", "--gpu-mtbf", "50677h", "--result", result, "--json", "-")
    found = json.loads(answer.stdout)
    job = json.loads(result.read_bytes())["job"]
    paused = sum(leaf["ns"] for leaf in job["leaves"] if leaf["leaf"] == "checkpoint")
    assert math.isclose(found["saving"]["pause_s"], paused / 1e9)
    assert math.isclose(found["calendar"]["mfu_without_pauses"], job["mfu"] / (1 - paused / job["window_ns"]))


def test_analyze_adds_the_budget(simulated: Callable[[str], Path]) -> None:
    """`analyze --budget` gives what `budget --result` gives; figures that do not suffice cost a warning alone."""
    added = json.loads(run("analyze", simulated("checkpoint_burst"), "--budget", "--mtbf 3h", "--json", "-").stdout)
    calendar = added["budget"]["calendar"]
    job = added["job"]
    paused = sum(leaf["ns"] for leaf in job["leaves"] if leaf["leaf"] == "checkpoint")
    assert math.isclose(calendar["goodput"], job["mfu"] / (1 - paused / job["window_ns"]) * calendar["productive"])
    assert added["budget"]["saving"]["pause_s"] == paused / 1e9
    without = json.loads(run("analyze", simulated("compute_only"), "--budget", "--mtbf 3h", "--json", "-").stdout)
    assert "budget" not in without
    assert any("failure budget is left out" in warning for warning in without["quality"]["warnings"])


@pytest.mark.parametrize("figures", ["--pause 3s", "--mtbf soon", "--mtbf 3h --result x.json", "--mtbf '3h"])
def test_wrong_budget_figures_stop_before_the_work(figures: str) -> None:
    """Figures that `budget` would refuse are wrong usage of `analyze --budget`."""
    assert run("analyze", "sample_traces/run_28_mfu", "--budget", figures).exit_code == 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 2),
        (["--mtbf", "3h"], 2),
        (["--pause", "30s"], 2),
        (["--mtbf", "soon", "--pause", "30s"], 2),
        (["--mtbf", "3h", "--pause", "0s"], 1),
        (["--failures", "-1", "--days", "54", "--pause", "30s"], 1),
        (["--failures", "419", "--days", "54", "--pause", "30s", "-o", "budget.pdf"], 2),
        (["--mtbf", "3h", "--params", "70e9", "--storage-gbps", "100"], 0),
    ],
)
def test_budget_exit_codes(options: list[str], code: int) -> None:
    """0 fine, 1 impossible figures, 2 wrong usage."""
    assert run("budget", *options).exit_code == code
