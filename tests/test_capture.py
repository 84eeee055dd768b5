"""Recording a training loop: what is written, and that training never notices."""

import ast
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import traceaudit as ta
from traceaudit.pipeline import analyze
from traceaudit.reading.normalise import read_trace

torch = importlib.import_module("torch") if os.environ.get("CI") == "true" else pytest.importorskip("torch")
capture = importlib.import_module("traceaudit.capture")
recipes = importlib.import_module("traceaudit.capture.recipes")
recorder_module = importlib.import_module("traceaudit.capture.recorder")

WIDTH = 8
ROOT = Path(__file__).parents[1]
SHORT: dict[str, Any] = {"skip": 1, "timed": 2, "warmup": 1, "steps": 2}
WHOLE = sum(SHORT.values())


def layer() -> Any:  # noqa: ANN401  torch may be absent where this is type-checked
    """Return a small layer."""
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())


def model_of(layers: int = 3) -> Any:  # noqa: ANN401
    """Return a model of layers."""
    return torch.nn.Sequential(*(torch.nn.Sequential(layer()) for _ in range(layers)))


@pytest.fixture
def loop() -> Callable[..., list[float]]:
    """Return a function that trains some steps, calling something after each, and returns the losses."""

    def trained(after: Callable[[], object], steps: int = WHOLE) -> list[float]:
        torch.manual_seed(0)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(steps):
            loss = model(torch.ones(4, WIDTH)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            after()
        return losses

    return trained


Loop = Callable[..., list[float]]


def steps_in(path: Path) -> list[str]:
    """Return the marks of steps in a trace."""
    names = read_trace(path).events["name"].astype(str)
    return sorted(set(names[names.str.startswith("ProfilerStep#")]))


def test_the_right_steps_are_recorded(loop: Loop, tmp_path: Path) -> None:
    """Steps count as the training log does; shapes are on; nothing is left beside the trace and run.json."""
    with ta.capture(tmp_path / "run", model=model_of(), tokens_per_step=32, first_step=100, **SHORT) as recorder:
        loop(recorder.step)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank0.pt.trace.json.gz", "run.json"]
    assert recorder.path == tmp_path / "run" / "rank0.pt.trace.json.gz"
    assert steps_in(recorder.path) == ["ProfilerStep#104", "ProfilerStep#105"]
    trace = read_trace(recorder.path)
    assert (trace.origin.record_shapes, trace.origin.with_stack, trace.origin.rank) == (True, False, 0)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["tokens_per_step"] == 32
    assert run["step_seconds"] == recorder.step_seconds
    assert run["params"] == 3 * (WIDTH * WIDTH + WIDTH)


def test_the_report_says_what_the_recording_cost(loop: Loop, tmp_path: Path) -> None:
    """The step time without the profiler is read from run.json and held against the recorded one."""
    with ta.capture(tmp_path, model=model_of(), tokens_per_step=32, **SHORT) as recorder:
        loop(recorder.step)
    audit = analyze(tmp_path)
    overhead = audit.result["quality"]["profiler_overhead"]
    assert recorder.step_seconds is not None
    assert overhead["declared_step_ns"] == pytest.approx(recorder.step_seconds * 1e9, abs=1)
    assert overhead["difference_ns"] == audit.result["job"]["step_ns_median"] - overhead["declared_step_ns"]


def test_training_is_the_same(loop: Loop, tmp_path: Path) -> None:
    """The losses are those without a recorder."""
    bare = loop(lambda: None)
    with ta.capture(tmp_path, model=model_of(), with_stack=True, profile_memory=True, **SHORT) as recorder:
        assert loop(recorder.step) == bare


class BrokenError(RuntimeError):
    """A failure of the test's own."""


def broken(*args: object, **kwargs: object) -> None:
    """Fail."""
    raise BrokenError("planted")


BREAKS = {
    "the description": (recorder_module, "describe"),
    "the profiler's preparation": (torch.profiler.profiler._KinetoProfile, "prepare_trace"),
    "the profiler's start": (torch.profiler.profiler._KinetoProfile, "start_trace"),
    "the profiler's stop": (torch.profiler.profiler._KinetoProfile, "stop_trace"),
    "the export": (torch.profiler.profiler._KinetoProfile, "export_chrome_trace"),
    "the file system": (Path, "mkdir"),
    "the mark of a step": (torch.profiler.record_function, "__enter__"),
    "the clock of the device": (recorder_module, "_synchronise"),
    "the settings": (recorder_module, "_settings"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_no_failure_of_ours_reaches_training(
    what: str, loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks is one warning or more, and the loop runs to its end."""
    bare = loop(lambda: None)
    holder, name = BREAKS[what]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = ta.capture(tmp_path / "run", model=model_of(), **SHORT)
        if what == "the mark of a step":  # the optimizer makes marks of its own
            monkeypatch.setattr(recorder_module.profiler, "record_function", broken)
        else:
            monkeypatch.setattr(holder, name, broken)
        with recorder:
            assert loop(recorder.step) == bare
    assert [own for own in caught if own.category is capture.CaptureWarning]
    monkeypatch.undo()
    loop(lambda: None)  # nothing of the profiler is still on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loop(lambda: None)


def test_warnings_as_errors_do_not_reach_training(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where warnings are errors."""
    monkeypatch.setattr(recorder_module, "describe", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ta.capture(tmp_path, model=model_of(), **SHORT) as recorder:
            loop(recorder.step)


def test_a_log_that_fails_does_not_reach_training(loop: Loop, tmp_path: Path) -> None:
    """The user's own function may fail as well."""
    with pytest.warns(capture.CaptureWarning, match="planted"), ta.capture(tmp_path, log=broken, **SHORT) as recorder:
        loop(recorder.step)
    assert recorder.path is not None


def test_an_error_of_the_training_passes(loop: Loop, tmp_path: Path) -> None:
    """It is not changed, nothing is written, and the profiler is off."""

    def after() -> None:
        recorder.step()
        if recorder._done == WHOLE - 1:
            broken()

    with pytest.raises(BrokenError), ta.capture(tmp_path / "run", **SHORT) as recorder:
        loop(after)
    assert not (tmp_path / "run").exists()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loop(lambda: None)


def test_a_loop_that_ends_early_is_told(loop: Loop, tmp_path: Path) -> None:
    """Whole steps that were recorded are kept, and a warning says how many."""
    with (
        pytest.warns(capture.CaptureWarning, match="1 of 2 were recorded"),
        ta.capture(tmp_path, model=model_of(), **SHORT) as recorder,
    ):
        loop(recorder.step, WHOLE - 1)
    assert recorder.path is not None
    assert steps_in(recorder.path) == ["ProfilerStep#4"]  # the one that was cut is not marked
    with (
        pytest.warns(capture.CaptureWarning, match="0 of 2 were recorded"),
        ta.capture(tmp_path / "none", **SHORT) as recorder,
    ):
        loop(recorder.step, 1)
    assert recorder.path is None


def test_no_recording_is_overwritten(loop: Loop, tmp_path: Path) -> None:
    """An earlier file stays, with a warning, unless it is forced."""
    file = tmp_path / "rank0.pt.trace.json.gz"
    file.write_bytes(b"earlier")
    with pytest.warns(capture.CaptureWarning, match="exists"), ta.capture(tmp_path, **SHORT) as recorder:
        loop(recorder.step)
    assert file.read_bytes() == b"earlier"
    with ta.capture(tmp_path, force=True, **SHORT) as recorder:
        loop(recorder.step)
    assert len(steps_in(file)) == SHORT["steps"]


def test_a_rank_that_is_not_chosen_records_nothing(loop: Loop, tmp_path: Path) -> None:
    """It only counts."""
    with ta.capture(tmp_path / "run", ranks=[7], **SHORT) as recorder:
        loop(recorder.step)
    assert not (tmp_path / "run").exists()


def test_the_logger_has_a_line_a_step(loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a function of the user's, the logger `traceaudit.capture` does."""
    with caplog.at_level(logging.INFO, "traceaudit.capture"), ta.capture(tmp_path, **SHORT) as recorder:
        loop(recorder.step)
    assert len(caplog.messages) == WHOLE
    assert all(re.fullmatch(r"traceaudit step=\d+ seconds=\d+\.\d+ phase=\w+", line) for line in caplog.messages)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_handler_writes_each_cycle(loop: Loop, tmp_path: Path) -> None:
    """A profiler of the user's own: the first cycle in the directory, the second in a folder, each with run.json."""
    ready = capture.handler(tmp_path, model=model_of(), tokens_per_step=32)
    profile = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=2),
        on_trace_ready=ready,
        record_shapes=True,
    )
    with profile:
        loop(profile.step, 4)
    for folder, step in ((tmp_path, "ProfilerStep#1"), (tmp_path / "cycle2", "ProfilerStep#3")):
        assert steps_in(folder / "rank0.pt.trace.json.gz") == [step]
        assert json.loads((folder / "run.json").read_text())["tokens_per_step"] == 32


class Routed(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer of experts, as a list or stacked."""

    def __init__(self, experts: int, top_k: int, *, stacked: bool) -> None:
        """Make the weights."""
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Linear(WIDTH, experts, bias=False)
        if stacked:
            self.experts = torch.nn.Module()
            self.experts.w = torch.nn.Parameter(torch.zeros(experts, WIDTH, WIDTH))
        else:
            self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(experts))


@pytest.mark.parametrize("stacked", [False, True])
def test_active_parameters_of_experts(stacked: bool) -> None:
    """Of eight experts two work on a token; the router always does."""
    run = capture.describe(torch.nn.Sequential(Routed(8, 2, stacked=stacked), torch.nn.Linear(WIDTH, 1, bias=False)))
    expert = WIDTH * WIDTH
    assert run["params"] == 8 * expert + 8 * WIDTH + WIDTH
    assert run["active_params"] == 2 * expert + 8 * WIDTH + WIDTH


def test_tied_weights_count_once() -> None:
    """An output layer that shares the embedding's weights adds none."""
    embedding, head = torch.nn.Embedding(16, WIDTH), torch.nn.Linear(WIDTH, 16, bias=False)
    head.weight = embedding.weight
    run = capture.describe(torch.nn.ModuleDict({"embedding": embedding, "head": head}))
    assert (run["params"], run["vocab"], run["hidden"]) == (16 * WIDTH, 16, WIDTH)


@pytest.mark.parametrize(
    ("attribute", "sizes"),
    [
        ("config", {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "vocab_size": 128256}),
        ("config", {"n_layer": 80, "n_embd": 8192, "n_head": 64, "vocab_size": 128256}),
        ("model_args", {"n_layers": 80, "dim": 8192, "n_heads": 64, "vocab_size": 128256}),
    ],
)
def test_sizes_come_from_the_configuration(attribute: str, sizes: dict[str, int]) -> None:
    """Names of Hugging Face, GPT-2 and torchtitan."""
    model = model_of()
    setattr(model, attribute, SimpleNamespace(**sizes))
    run = capture.describe(model)
    assert [run[name] for name in ("layers", "hidden", "heads", "vocab")] == [80, 8192, 64, 128256]


def test_sizes_come_from_the_modules() -> None:
    """The longest list of like modules is the layers; attention tells its heads."""
    attention = torch.nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True)
    run = capture.describe(torch.nn.TransformerEncoder(attention, 5, enable_nested_tensor=False))
    assert (run["layers"], run["heads"]) == (5, 2)
    assert capture.describe(model_of(3))["layers"] == 3


def test_element_types_are_told_only_where_sure() -> None:
    """Weights in bf16 are multiplied in bf16; weights in fp32 may be cast."""
    assert capture.describe(model_of().to(torch.bfloat16))["dtype"] == "bf16"
    assert capture.describe(model_of())["dtype"] is None


def test_checkpoints_are_told() -> None:
    """Every layer wrapped is full recompute, some are selective."""
    tools = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = model_of(3)
    assert capture.describe(model)["recompute"] is None
    model[0] = tools.checkpoint_wrapper(model[0])
    assert capture.describe(model)["recompute"] == "selective"


@pytest.mark.parametrize(
    ("names", "shape", "degrees"),
    [
        (
            ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
            (2, 2, 4, 1, 8),
            {"pp": 2, "tp": 8, "dp": 8, "cp": 1, "ep": 1},
        ),
        (("dp_shard",), (4,), {"pp": 1, "tp": 1, "dp": 4, "cp": 1, "ep": 1}),
        (None, (4,), {"dp": 1}),
    ],
)
def test_degrees_come_from_the_mesh(names: tuple[str, ...] | None, shape: tuple[int, ...], degrees: object) -> None:
    """Dimensions that are named dp multiply; a mesh without names tells nothing."""
    mesh = SimpleNamespace(mesh_dim_names=names, mesh=torch.zeros(shape), size=lambda: 1)
    assert capture.describe(model_of(), mesh=mesh)["parallel"] == degrees


def test_what_is_known_beats_what_is_found() -> None:
    """Parameters that are given are kept."""
    run = capture.describe(model_of(), params=7e9, parallel={"tp": 8})
    assert (run["params"], run["parallel"]) == (7e9, {"dp": 1, "tp": 8})


def test_each_call_counts_a_step(tmp_path: Path) -> None:
    """torchtitan, Megatron: each call of the function is a step, the model is found in its arguments."""

    def train_step(data: object, model: Any) -> object:  # noqa: ANN401
        """Run a step."""
        model(torch.ones(1, WIDTH)).sum().backward()
        return data

    stepped = recipes.each_call(train_step, tmp_path, model=lambda args, kwargs: args[1], **SHORT)
    model = model_of()
    assert [stepped(number, model) for number in range(WHOLE)] == list(range(WHOLE))
    assert stepped.__doc__ == train_step.__doc__
    assert len(steps_in(tmp_path / "rank0.pt.trace.json.gz")) == SHORT["steps"]
    assert json.loads((tmp_path / "run.json").read_text())["params"] == 3 * (WIDTH * WIDTH + WIDTH)


def test_hugging_face_callback(tmp_path: Path) -> None:
    """The trainer's events count steps; its batch and the sequence length give the tokens."""
    callback = recipes.hugging_face(str(tmp_path), seq_len=16, **SHORT)
    arguments = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2, world_size=1)
    callback.on_train_begin(arguments, None, None, model=model_of(), optimizer=None)
    for _ in range(WHOLE):
        callback.on_step_end(arguments, None, None, model=None)
    callback.on_train_end(arguments, None, None, model=None)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["tokens_per_step"], run["seq_len"]) == (4 * 2 * 16, 16)


def test_lightning_callback(tmp_path: Path) -> None:
    """A batch that had no optimizer step (accumulation) is no step."""
    callback = recipes.lightning(str(tmp_path), **SHORT)
    trainer = SimpleNamespace(global_step=0)
    callback.on_train_start(trainer, model_of())
    for batch in range(2 * WHOLE):
        trainer.global_step = batch // 2
        callback.on_train_batch_end(trainer, None, None, None, batch)
    assert callback.recorder.path is None
    trainer.global_step += 1
    callback.on_train_batch_end(trainer, None, None, None, 0)
    callback.on_train_end(trainer, None)
    assert len(steps_in(tmp_path / "rank0.pt.trace.json.gz")) == SHORT["steps"]


def test_recipes_are_subclasses_where_the_framework_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer calls events that the callback does not have: those of its base class."""

    class TrainerCallback:
        """Stands for that of transformers."""

        def on_log(self) -> str:
            """Answer."""
            return "base"

    monkeypatch.setitem(__import__("sys").modules, "transformers", SimpleNamespace(TrainerCallback=TrainerCallback))
    assert recipes.hugging_face(str(tmp_path)).on_log() == "base"


def test_verify_inspects(loop: Loop, tmp_path: Path) -> None:
    """What was recorded lacks no steps and no shapes."""
    with ta.capture(tmp_path, model=model_of(), tokens_per_step=32, **SHORT) as recorder:
        loop(recorder.step)
    found = capture.verify(str(tmp_path))
    assert found.usable
    assert found.files[0].steps == (4, 5)
    assert "CPU operators stand for the device" in str(found)


def test_only_capture_imports_torch() -> None:
    """No other module of the package does, so that the analysis runs without it."""
    found = set()
    for path in (ROOT / "traceaudit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [own.name for own in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {path.parent.name for name in names if name.split(".")[0] == "torch"}
    assert found == {"capture"}


def test_training_does_not_import_what_only_reading_needs() -> None:
    """The recorder leaves pandas, pyarrow and matplotlib to whoever reads the traces."""
    script = "import sys, traceaudit.capture; print({'pandas', 'pyarrow', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
