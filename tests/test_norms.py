"""The loss-spike watch: planted faults are found, clean logs stay quiet, and all formats are read."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from traceaudit.cli import main
from traceaudit.errors import InputError
from traceaudit.norms.baseline import WINDOW, baseline
from traceaudit.norms.read import read
from traceaudit.norms.training_log import TrainingLog, build
from traceaudit.norms.watch import alarms, follow, watch
from traceaudit.simulate.training_log import (
    FAULTS,
    training_log,
    write_csv,
    write_jsonl,
    write_megatron,
    write_torchtitan,
    write_trainer_state,
)

LOGS = Path(__file__).parent / "training_logs"
CLEAN_SEEDS, FAULT_SEEDS = range(200), range(1_000, 1_006)
# What a planted fault may be called, and how many rows later it may be noticed.
FOUND_AS = {
    "spike": (("spike",), 2),
    "divergence": (("divergence", "spike"), 250),
    "nan": (("not_finite",), 0),
    "drift": (("drift",), 250),
    "scale_collapse": (("scale_collapse",), 2),
}


def run(*arguments: str | Path) -> Result:
    """Run the command; an exception that is no exit fails the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def as_log(table: pd.DataFrame) -> TrainingLog:
    """Return a simulated table as if it had been read."""
    broken = {name: table[name].where(table[name].notna(), np.inf) for name in ("loss", "grad_norm")}
    whole = table.assign(**broken, skipped=np.nan, samples=np.nan)
    return TrainingLog("simulated", "simulated", whole, ("max_attention_logit",), (), ())


def loud(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events that are alarms or warnings."""
    return [event for event in result["events"] if event["severity"] != "note"]


def test_clean_logs_raise_no_alarm() -> None:
    """200 clean logs of 1,200 rows, some resumed, some with a raised learning rate: no alarm and no warning."""
    noisy = {seed: loud(watch(as_log(training_log(seed).table))) for seed in CLEAN_SEEDS}
    assert {seed: events for seed, events in noisy.items() if events} == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    """Every planted fault is found, and no other spike is."""
    for seed in FAULT_SEEDS:
        planted = training_log(seed, fault)
        kinds, late = FOUND_AS[planted.kind]
        events = [event for event in loud(watch(as_log(planted.table))) if event["kind"] in kinds]
        begun = [event["step"] for event in events]
        near = [any(abs(step - start) <= late for step in begun) for start in planted.starts]
        assert all(near), (seed, planted.starts, begun)
        assert len(events) == len(planted.starts), (seed, planted.starts, begun)


def test_a_spike_says_what_to_do() -> None:
    """Rewind to the checkpoint before the precursor, skip the data from there to the recovery."""
    planted = training_log(3, "spike")
    event = alarms(watch(as_log(planted.table), checkpoint_every=100))[0]
    start = planted.starts[0]
    assert event["precursor"]["steps_before"] == 2
    assert event["rewind_to"] == (start - 3) // 100 * 100
    assert event["skip_steps"][0] == start - 2
    assert event["skip_tokens"][0] == (start - 3) * 4_194_304
    assert event["recovered"]
    assert event["steps_lost"] == event["end_step"] - start + 1
    assert event["clipping"]["caught"] == "yes"


@pytest.mark.parametrize(("clip", "caught"), [(None, "yes"), (1.0, "yes"), (100.0, "no")])
def test_clipping_is_judged_by_its_value(clip: float | None, caught: str) -> None:
    """A clip above the norm of the update before the spike would not have touched it."""
    assert alarms(watch(as_log(training_log(3, "spike").table), clip=clip))[0]["clipping"]["caught"] == caught


def test_clipping_cannot_catch_a_usual_norm() -> None:
    """Where the gradient norm was usual, clipping would not have helped; where it is not logged, nobody knows."""
    planted = training_log(3, "spike")
    calm = training_log(3).table["grad_norm"].iloc[: len(planted.table)].to_numpy()
    event = alarms(watch(as_log(planted.table.assign(grad_norm=calm))))[0]
    assert event["clipping"]["caught"] == "no"
    unknown = as_log(planted.table)
    unknown = TrainingLog("", "", unknown.table.assign(grad_norm=np.nan), (), (), ())
    assert alarms(watch(unknown))[0]["clipping"]["caught"] == "unknown"


def test_a_rewound_spike_costs_the_steps_run_again() -> None:
    """Steps lost are those between the checkpoint resumed from and the last step before."""
    planted = training_log(5, "restart")
    event = alarms(watch(as_log(planted.table)))[0]
    assert event["rewound"]
    assert event["steps_lost"] == 60


def test_a_bad_resume_is_a_warning() -> None:
    """Replayed steps whose loss is above what it was before are named; the same steps again are not."""
    planted = training_log(5, "restart")
    table = planted.table
    again = np.arange(len(table)) > int(np.flatnonzero(np.diff(table["step"]) < 0)[0])
    worse = table.assign(loss=table["loss"] + np.where(again, 0.05, 0.0))
    assert [event["severity"] for event in watch(as_log(table))["events"] if event["kind"] == "resume"] == ["note"]
    assert "resume" in [event["kind"] for event in loud(watch(as_log(worse)))]


def test_verdicts_are_causal() -> None:
    """A spike is the same whether the log ends after it or goes on."""
    planted = training_log(3, "spike")
    whole = alarms(watch(as_log(planted.table)))[0]
    cut = alarms(watch(as_log(planted.table.iloc[: planted.end + 60])))[0]
    assert {name: whole[name] for name in ("step", "end_step", "usual", "scales")} == {
        name: cut[name] for name in ("step", "end_step", "usual", "scales")
    }


def test_windows_leave_out_what_is_outside() -> None:
    """A spike as long as the window does not change what is usual after it; a level that stays becomes usual."""
    random = np.random.default_rng(0)
    values = 2 + 0.01 * random.standard_normal(600)
    values[200:260] += 1
    found = baseline(values, np.full(600, 8.0), 0.01)
    assert found.outside.nonzero()[0].tolist() == list(range(200, 260))
    values[200:] = 3 + 0.01 * random.standard_normal(400)
    found = baseline(values, np.full(600, 8.0), 0.01)
    assert found.outside.sum() == 2 * WINDOW
    assert found.settled_at == (200 + 2 * WINDOW - 1,)


def test_a_level_that_stays_is_no_recovery() -> None:
    """A loss that steps up for good is a divergence, not a spike that went away."""
    table = training_log(3).table
    stepped = table.assign(loss=table["loss"] + np.where(np.arange(len(table)) >= 600, 0.5, 0.0))
    events = alarms(watch(as_log(stepped)))
    assert [(event["kind"], event["step"], event["recovered"]) for event in events] == [("divergence", 601, False)]


def test_overflows_that_scaling_skips_are_no_alarm() -> None:
    """An infinite gradient norm with a halved loss scale is FP16 training at work."""
    table = training_log(4).table.iloc[:300].reset_index(drop=True)
    row = np.arange(len(table))
    table = table.assign(
        grad_norm=table["grad_norm"].where(row != 200, np.inf), loss_scale=np.where(row >= 200, 32_768.0, 65_536.0)
    )
    result = watch(as_log(table))
    assert loud(result) == []
    assert result["log"]["overflows_skipped"] == 1


@pytest.mark.parametrize(("excess", "diverged"), [(0.0, False), (0.001, False), (0.01, True)])
def test_a_run_is_held_against_its_control(excess: float, diverged: bool) -> None:
    """One percent above the control at equal tokens is found, a tenth of the tolerance and noise are not."""
    control = training_log(7).table
    random = np.random.default_rng(1)
    noise = 1 + 0.002 * random.standard_normal(len(control))
    other = control.assign(loss=control["loss"] * noise * (1 + excess))
    result = watch(as_log(other), control=as_log(control))
    assert result["control"]["diverged"] is diverged
    assert ("control" in [event["kind"] for event in alarms(result)]) is diverged
    assert "one-sided t test" in result["control"]["test"]


def test_control_must_overlap() -> None:
    """Logs with nothing in common are an error."""
    table = training_log(7).table
    with pytest.raises(InputError, match="at equal tokens"):
        watch(as_log(table.iloc[:300]), control=as_log(table.iloc[600:]))


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        ("log.jsonl", write_jsonl, "JSON Lines"),
        ("log.csv", write_csv, "CSV"),
        ("titan.log", write_torchtitan, "torchtitan"),
        ("megatron.log", write_megatron, "Megatron-LM"),
        ("trainer_state.json", write_trainer_state, "trainer_state.json"),
    ],
)
def test_each_format_gives_the_same_verdict(name: str, write: Any, words: str, tmp_path: Path) -> None:  # noqa: ANN401
    """What wrote the log does not matter."""
    planted = training_log(3, "spike")
    write(tmp_path / name, planted.table)
    log = read(tmp_path / name)
    assert words in log.format
    assert len(log.table) == len(planted.table)
    assert [event["step"] for event in alarms(watch(log))] == list(planted.starts)


@pytest.mark.parametrize("folder", ["tensorboard_torch", "tensorboard_summary", "wandb_offline"])
def test_files_of_the_real_libraries_are_read(folder: str) -> None:
    """TensorBoard's two kinds of scalars and W&B's history hold the spike of step 150."""
    result = watch(read(LOGS / folder))
    assert result["log"]["rows"] == 200
    assert [(event["kind"], event["step"]) for event in alarms(result)] == [("spike", 150)]
    assert alarms(result)[0]["precursor"]["steps_before"] == 2


def test_state_of_the_real_trainer_is_read() -> None:
    """The Trainer's log has loss, gradient norm and learning rate, and says when it saved."""
    log = read(LOGS / "trainer_state.json")
    first = log.table.iloc[0]
    assert (first["step"], first["loss"], first["grad_norm"]) == (1, 3.4581315517425537, 1.1378270387649536)
    assert first["lr"] == 5e-05
    assert (len(log.table), log.checkpoints) == (60, (60,))


@pytest.mark.filterwarnings("ignore")
def test_what_tensorboard_writes_now_is_read(tmp_path: Path) -> None:
    """The installed TensorBoard writes what the reader expects."""
    pytest.importorskip("tensorboard")
    writer = importlib.import_module("tensorboard.summary").Writer(str(tmp_path))
    for step in range(1, 40):
        writer.add_scalar("train/loss", 5 - step / 100, step)
    writer.close()
    log = read(tmp_path)
    assert log.table["step"].tolist() == list(range(1, 40))
    assert np.allclose(log.table["loss"], [5 - step / 100 for step in range(1, 40)])


MEGATRON = (
    " iteration      110/    1000 | consumed samples:          440 | elapsed time per iteration (ms): 974.9 | "
    "learning rate: 1.462E-04 | global batch size:     4 | lm loss: 8.111837E+00 | loss scale: 16384.0 | "
    "grad norm: 6.753 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
TITAN = (
    "[rank0]:[titan] 2026-02-01 10:00:00,123 - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  7.8593  "
    "\x1b[38;2;180;60;0mgrad_norm:  2.4731  \x1b[36mmemory: 47.88GiB(60.47%)  \x1b[34mtps: 5,762  "
    "\x1b[36mtflops: 333.01  \x1b[35mmfu: 33.68%\x1b[39m"
)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (MEGATRON, {"step": 110, "loss": 8.111837, "grad_norm": 6.753, "lr": 1.462e-4, "samples": 440}),
        ("[default3]:" + MEGATRON, {"step": 110, "loss_scale": 16_384.0, "skipped": 0}),
        (MEGATRON.replace(" iteration", " [2026-08-01 09:31:44] iteration"), {"step": 110, "loss": 8.111837}),
        (MEGATRON.replace("6.753", "nan"), {"grad_norm": np.inf}),
        (TITAN, {"step": 20, "loss": 7.8593, "grad_norm": 2.4731}),
        ("iter 120: loss 3.2051, time 410.20ms, mfu 37.10%", {"step": 120, "loss": 3.2051}),
        ("step 7, loss: 9.24 | lr 6.0e-04 | norm: 1.25", {"step": 7, "loss": 9.24, "lr": 6e-4, "grad_norm": 1.25}),
        ('{"iteration": 3, "train": {"loss": 2.5}, "grad_norm": NaN}', {"step": 3, "loss": 2.5, "grad_norm": np.inf}),
        ("{'loss': '2.5', 'grad_norm': nan, 'learning_rate': 1e-05}", {"step": 1, "loss": 2.5, "grad_norm": np.inf}),
    ],
)
def test_lines_people_have(line: str, values: dict[str, float], tmp_path: Path) -> None:
    """Console lines of frameworks, with their colours and prefixes."""
    path = tmp_path / "run.log"
    path.write_text("starting\n" + line + "\nvalidate step: 20  loss: 99.0\nstep: 21  loss: 7.8", encoding="utf-8")
    table = read(path).table
    assert len(table) == 1
    assert {name: table.loc[0, name] for name in values} == values


def test_saved_checkpoints_are_read(tmp_path: Path) -> None:
    """Megatron-LM says from which iteration, torchtitan after which step."""
    path = tmp_path / "run.log"
    saved = "  successfully saved checkpoint from iteration     100 to out/ [ t 1/1, p 1/1 ]"
    path.write_text(f"{MEGATRON}\n{saved}\n{TITAN}\nFinished saving the checkpoint in 2.41 seconds.\n")
    assert read(path).checkpoints == (20, 100)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.log", b"", "empty"),
        ("noise.log", b"\x00\xff\x1b[31m nothing\n", "no loss"),
        ("other.jsonl", b'{"step": 1, "speed": 2}\n', "it holds"),
        ("torn.tfevents", b"\x18\x00\x00", "no loss"),
        ("torn.wandb", b":W&B\xe1\xbe\x00\x01\x02", "no loss"),
    ],
)
def test_what_is_no_log_is_an_error(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    """The message says what was found instead."""
    (tmp_path / name).write_bytes(content)
    result = run("norms", tmp_path / name)
    assert (result.exit_code, words in result.stderr) == (1, True), result.stderr


def test_torn_files_keep_what_is_whole() -> None:
    """A log that is being written gives the rows before the tear."""
    for folder, reader in (("tensorboard_torch", "event_files"), ("wandb_offline", "wandb_runs")):
        data = next((LOGS / folder).iterdir()).read_bytes()
        module = importlib.import_module(f"traceaudit.norms.{reader}")
        parse = module.scalars if reader == "event_files" else module.history
        whole = list(parse(data))
        for cut in range(1, 200, 7):
            torn = list(parse(data[: len(data) - cut]))
            assert torn == whole[: len(torn)]


def test_rows_without_a_step_are_counted() -> None:
    """A log without steps is numbered, and the report says so."""
    log = build("", "test", [{"loss": 3.0}, {"loss": 2.9}])
    assert log.table["step"].tolist() == [1, 2]
    assert log.remarks == ("no step column: rows are counted from 1",)


def test_norms_command(tmp_path: Path) -> None:
    """Exit code 3 on request, the picture, and JSON that is alone on standard output."""
    path, picture = tmp_path / "run.jsonl", tmp_path / "run.svg"
    write_jsonl(path, training_log(3, "spike").table)
    result = run("norms", path, "--fail-on-spike", "-o", picture)
    assert result.exit_code == 3
    for words in ("loss spike", "rewind to step", "skip the data of steps", "would clipping have caught it?"):
        assert words in result.stdout
    assert picture.read_text().startswith("<?xml")
    found = json.loads(run("norms", path, "--json", "-").stdout)
    assert [item["item"] for item in found["checklist"]] == [6, 8]
    write_jsonl(tmp_path / "clean.jsonl", training_log(3).table)
    assert run("norms", tmp_path / "clean.jsonl", "--fail-on-spike").exit_code == 0
    assert run("norms", tmp_path / "absent.jsonl").exit_code == 1


def test_follow_says_only_what_is_new(tmp_path: Path) -> None:
    """A growing file is judged as it grows; each spike is told once."""
    planted = training_log(3, "double", rows=800)
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(row) + "\n" for row in planted.table.to_dict(orient="records")]
    cuts = iter(range(100, len(lines) + 1, 100))

    def grow() -> bool:
        cut = next(cuts, None)
        if cut is not None:
            path.write_text("".join(lines[:cut]) + '{"step": 9')
        return cut is not None

    told = [event["step"] for _, fresh in follow(path, grow, watch) for event in fresh if event["severity"] == "alarm"]
    assert sorted(set(told)) == list(planted.starts)
    assert len(told) <= len(planted.starts) + 1  # one may be told again when it is over


def test_follow_exits_at_the_first_alarm(tmp_path: Path) -> None:
    """With --fail-on-spike the command ends with 3 as soon as there is an alarm."""
    path = tmp_path / "run.jsonl"
    write_jsonl(path, training_log(3, "spike").table)
    assert run("norms", path, "--follow", "--fail-on-spike", "--every", "10ms").exit_code == 3
    assert run("norms", path, "--follow", "--json", "-").exit_code == 2
