"""Logs beside the traces: the speed without the profiler, in the frameworks' formats, against the traced steps."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import traceaudit as ta
from tests.conftest import Audited
from traceaudit.cli import main
from traceaudit.norms.read import read
from traceaudit.simulate.replicas import TOKENS

RANKS = 4  # of the scenario exposed_allreduce, whose step takes as long on all of them
SECONDS = (0.9, 0.04, 0.05, 0.04, 0.03, 0.04)  # of the steps in a log; the first one compiles
USUAL = 0.04  # their median without the first
JOB_TOKENS = TOKENS * RANKS


def titan(seconds: Sequence[float]) -> str:
    """Return console lines of torchtitan, with its colours: tokens a second of a GPU."""
    lines = ["[titan] 2026-01-05 10:00:00,001 - root - INFO - Training starts at step 1.\n"]
    for step, each in enumerate(seconds, start=1):
        lines.append(
            f"[titan] 2026-01-05 10:00:{step:02},123 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.1234  "
            f"\x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[36mmemory: 47.21GiB(59.70%)  "
            f"\x1b[34mtps: {round(JOB_TOKENS / each / RANKS):,}  \x1b[36mtflops: 300.45  \x1b[35mmfu: 30.38%\x1b[39m\n"
        )
    return "".join(lines)


def megatron(seconds: Sequence[float]) -> str:
    """Return console lines of Megatron-LM: milliseconds of an iteration, and the batch in sequences."""
    return "".join(
        f" [2026-01-05 10:00:{step:02}] iteration {step:8}/     100 | consumed samples: {step * RANKS:12} | "
        f"elapsed time per iteration (ms): {each * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 | "
        f"learning rate: 3.000000E-04 | global batch size: {RANKS:5} | lm loss: 8.123400E+00 | loss scale: 1.0 | "
        "grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for step, each in enumerate(seconds, start=1)
    )


def trainer_state(seconds: Sequence[float]) -> str:
    """Return the state that the Trainer of transformers saves at the end: steps a second of the whole run."""
    rows: list[dict[str, Any]] = [{"step": step, "loss": 8.1, "grad_norm": 1.2} for step in range(1, len(seconds))]
    last = {"step": len(seconds), "train_loss": 8.0, "train_runtime": 4.0, "train_steps_per_second": 1 / USUAL}
    return json.dumps({"log_history": [*rows, last], "global_step": len(seconds), "save_steps": 500})


def composer(seconds: Sequence[float]) -> str:
    """Return JSON Lines with the names of Composer's speed monitor: tokens a second of the job and of a GPU."""
    return "".join(
        json.dumps(
            {
                "step": step,
                "loss/train/total": 8.1,
                "loss": 8.1,
                "throughput/tokens_per_sec": JOB_TOKENS / each,
                "throughput/device/tokens_per_sec": JOB_TOKENS / each / RANKS,
                "throughput/device/mfu": 0.31,
            }
        )
        + "\n"
        for step, each in enumerate(seconds, start=1)
    )


def with_clock(seconds: Sequence[float]) -> str:
    """Return JSON Lines of W&B's history: a clock, and a row every other step."""
    ends = np.cumsum(seconds)
    return "".join(
        json.dumps({"_step": step, "_runtime": float(end), "loss": 8.1}) + "\n"
        for step, end in list(enumerate(ends, start=1))[::2]
    )


FORMATS: dict[str, tuple[str, Callable[[Sequence[float]], str], float]] = {
    "torchtitan": ("train.log", titan, USUAL),
    "megatron": ("train.log", megatron, USUAL),
    "transformers": ("trainer_state.json", trainer_state, USUAL),
    "composer": ("train.jsonl", composer, USUAL),
    "wandb": ("train.jsonl", with_clock, 0.035),  # steps 3 and 5 begin 0.09 and 0.07 s after the rows before
}


@pytest.mark.parametrize("written_by", sorted(FORMATS))
def test_logs_of_the_frameworks_give_the_right_speed(
    written_by: str, simulated: Callable[[str], Path], tmp_path: Path
) -> None:
    """From each format follow the same tokens a second of the job, whatever it calls them."""
    name, write, seconds = FORMATS[written_by]
    (tmp_path / name).write_text(write(SECONDS))
    found = ta.analyze(simulated("exposed_allreduce"), training_log=tmp_path / name).result["log"]
    assert found["tokens_per_second"] == pytest.approx(JOB_TOKENS / seconds, rel=1e-3)
    assert found["step_seconds"] == pytest.approx(seconds, rel=1e-3)


def test_scalars_of_tensorboard_give_the_speed(simulated: Callable[[str], Path], tmp_path: Path) -> None:
    """What torchtitan writes to TensorBoard, by the library itself, is read the same."""
    writing = pytest.importorskip("tensorboard.summary")
    writer = writing.Writer(str(tmp_path / "tb"))
    for step, each in enumerate(SECONDS, start=1):
        for tag, value in (
            ("loss_metrics/global_avg_loss", 8.1),
            ("throughput(tps)", JOB_TOKENS / each / RANKS),
            ("mfu(%)", 30.38),
        ):
            writer.add_scalar(tag, value, step)
    writer.close()
    found = ta.analyze(simulated("exposed_allreduce"), training_log=tmp_path / "tb").result["log"]
    assert found["tokens_per_second"] == pytest.approx(JOB_TOKENS / USUAL, rel=1e-3)
    assert found["mfu_reported"] == pytest.approx(0.3038, rel=1e-3)


def step_seconds(result: dict[str, Any]) -> float:
    """Return the mean traced step."""
    ranks = result["ranks"]
    return float(sum(rank["window_ns"] for rank in ranks) / sum(len(rank["steps"]) for rank in ranks) / 1e9)


@pytest.mark.parametrize(
    ("factor", "words"),
    [(1.0, "are like the others"), (0.8, "take 25.0% longer"), (1.25, "are 20.0% shorter")],
)
def test_mfu_without_the_profiler_follows_from_the_step(
    factor: float, words: str, simulated: Callable[[str], Path], audited: Audited, tmp_path: Path
) -> None:
    """Equal FLOPs in a step of other seconds are another MFU, and the sentence says what the traced steps are."""
    plain = audited("exposed_allreduce").result
    assert plain["log"] is None
    seconds = factor * step_seconds(plain)
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 8.1, "step_time": seconds}) + "\n" for step in range(5))
    )
    result = ta.analyze(simulated("exposed_allreduce"), training_log=tmp_path / "train.jsonl").result
    log = result["log"]
    assert log["mfu_from_log"] == pytest.approx(plain["job"]["mfu"] / factor)
    assert log["difference"] == pytest.approx(plain["job"]["mfu"] * (1 / factor - 1), abs=1e-9)
    assert words in log["text"]
    overhead = result["quality"]["profiler_overhead"]
    assert overhead["declared_step_ns"] == pytest.approx(seconds * 1e9, abs=1)
    assert overhead["source"] == "median of 5 rows, train.jsonl"


@pytest.fixture
def copied(simulated: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a folder of traces that a test may put files into, without its run.json."""
    folder = tmp_path / "run"
    shutil.copytree(simulated("exposed_allreduce"), folder)
    (folder / "run.json").unlink()
    return folder


def test_log_and_configuration_are_read_where_they_lie_beside_the_traces(copied: Path) -> None:
    """Megatron's console log has both: its arguments tell parameters and tokens, its iterations the speed."""
    sizes = {
        "num_layers": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "seq_length": TOKENS,
        "global_batch_size": RANKS,
        "vocab_size": 0,
        "world_size": RANKS,
        "untie_embeddings_and_output_weights": "True",
        "position_embedding_type": "rope",
        "disable_bias_linear": "True",
    }
    arguments = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in sizes.items())
    (copied / "console.log").write_text(arguments + megatron(SECONDS))
    result = ta.analyze(copied).result
    assert result["log"]["tokens_per_second"] == pytest.approx(JOB_TOKENS / USUAL)
    assert result["log"]["format"] == "Megatron-LM console log"
    factors = {factor["name"]: factor for factor in result["model"]["numerator"]["factors"]}
    assert factors["tokens_per_step"]["value"] == JOB_TOKENS
    assert factors["params"]["source"] == "console.log"


def test_what_is_declared_beats_what_lies_beside(copied: Path) -> None:
    """Options beat a configuration beside the traces; a log that is given beats one that is found."""
    config = {"num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 1000}
    (copied / "config.json").write_text(json.dumps(config))
    (copied / "train.log").write_text(titan(SECONDS))
    other = copied.parent / "other.log"
    other.write_text(titan([2 * each for each in SECONDS]))
    result = ta.analyze(copied, params=8e8, tokens_per_step=JOB_TOKENS, training_log=other).result
    factors = {factor["name"]: factor["value"] for factor in result["model"]["numerator"]["factors"]}
    assert factors["params"] == 8e8
    assert result["log"]["tokens_per_second"] == pytest.approx(JOB_TOKENS / USUAL / 2, rel=1e-3)


@pytest.fixture(scope="module")
def plain(simulated: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of one rank's trace that nothing lies beside."""
    trace = shutil.copy(simulated("exposed_allreduce") / "rank0_trace.json.gz", tmp_path_factory.mktemp("plain"))
    return ta.analyze(trace).result


@pytest.mark.parametrize(
    "content", ["", "not a log\n", "{", "\x00\xff" * 100, "step: 1 loss: 8.0\nstep: 2 loss: 7.9\n"]
)
def test_other_files_beside_the_traces_do_no_harm(
    content: str, simulated: Callable[[str], Path], tmp_path: Path, plain: dict[str, Any]
) -> None:
    """Whatever is called a log or a configuration and is none changes nothing."""
    for name in (
        "train.log",
        "config.json",
        "train.toml",
        "trainer_state.json",
        "events.out.tfevents.1",
        "run-a.wandb",
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
    shutil.copy(simulated("exposed_allreduce") / "rank0_trace.json.gz", tmp_path)
    result = ta.analyze(tmp_path).result
    assert result["log"] is None
    assert result["job"] == plain["job"]
    assert result["model"] == plain["model"]


def test_a_torn_log_beside_the_traces_is_named(copied: Path) -> None:
    """What its name calls a training log, and nobody can read, is a warning; any other ``.log`` is none."""
    for name in ("stderr.log", "trainer_state.json", "events.out.tfevents.1"):
        (copied / name).write_text('{"log_history": [')
    warnings = [line for line in ta.analyze(copied).result["quality"]["warnings"] if "training log" in line]
    assert [line.split()[0] for line in warnings] == ["trainer_state.json", "events.out.tfevents.1"]
    assert not any(str(copied) in line for line in warnings)


def test_a_log_without_speed_says_nothing(simulated: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses alone are no speed; zero and broken values are none either."""
    rows = [{"step": 1, "loss": 8.0, "tps": 0}, {"step": 2, "loss": 8.0, "tps": "nan"}, {"step": 3, "loss": 7.0}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(read(tmp_path / "train.jsonl").speed) == 0
    assert ta.analyze(simulated("compute_only"), training_log=tmp_path / "train.jsonl").result["log"] is None


def test_the_command_takes_a_log(simulated: Callable[[str], Path], tmp_path: Path) -> None:
    """--training-log serves the speed as well as the norms."""
    (tmp_path / "train.log").write_text(titan(SECONDS))
    run = CliRunner().invoke(
        main, ["analyze", str(simulated("late_rank")), "--training-log", str(tmp_path / "train.log"), "--json", "-"]
    )
    found = json.loads(run.stdout)["log"]
    assert found["format"] == "torchtitan console log"
    assert found["rows"] == len(SECONDS)
