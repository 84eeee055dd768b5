"""The commands beside `analyze`: what failures, spikes and bytes cost a run beyond its step."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from traceaudit.errors import InputError, MissingFigureError, TraceAuditError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from traceaudit.inventory import Plan

EXIT_INPUT, EXIT_SPIKE = 1, 3
FIGURES = (
    "gpus",
    "gpus_per_node",
    "mtbf",
    "gpu_mtbf",
    "failures",
    "days",
    "pause",
    "write",
    "restart",
    "interval",
    "copy_pause",
    "params",
    "bytes_per_param",
    "storage_gbps",
    "mfu",
)  # what `traceaudit.budget.from_figures` takes
GB = 1e9
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "": 1.0}

Command = TypeVar("Command", bound=Callable[..., None])


class Duration(click.ParamType[float]):
    """A duration such as ``30``, ``30s``, ``13min``, ``3h`` or ``54d``; seconds without a unit."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds; wrong text is a usage error."""
        found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(ms|s|min|m|h|d|)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no duration such as 30s, 13min or 3h", param, ctx)
        return float(found[1]) * UNITS[found[2]]


def _outputs(command: Command) -> Command:
    """Add the options that say where the answer goes."""
    for option in (
        click.option("--force", is_flag=True, help="Overwrite existing output files."),
        click.option("--json", "json_path", help="Write the result as JSON; - for standard output instead of text."),
        click.option(
            "-o",
            "--output",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write a picture: .svg or .png.",
        ),
    ):
        command = option(command)
    return command


def _answer(
    result: Mapping[str, Any],
    lines: Iterable[str],
    draw: Callable[[], "Axes"],
    *,
    output: Path | None,
    json_path: str | None,
    force: bool,
) -> None:
    """Print the text, or the JSON if it goes to standard output, and write the files that were asked for."""
    from traceaudit.audit import write
    from traceaudit.report.json_file import to_json

    if json_path == "-":
        click.echo(to_json(result), nl=False)
    else:
        for line in lines:
            click.echo(line)
    if json_path not in (None, "-"):
        write(Path(str(json_path)), to_json(result), force=force)
    if output is not None:
        write(output, _drawn(draw(), output), force=force)


def _drawn(axes: "Axes", output: Path) -> bytes:
    from traceaudit.report.figures import png, svg

    return png(axes) if output.suffix.lower() == ".png" else svg(axes).encode()


def _check_outputs(output: Path | None, json_path: str | None, *, force: bool) -> None:
    """Fail before the work, not after it."""
    if output is not None and output.suffix.lower() not in (".svg", ".png"):
        raise click.UsageError(f"{output}: a picture ends in .svg or .png")
    for path in (output, Path(json_path) if json_path and json_path != "-" else None):
        if path is not None and path.exists() and not force:
            raise InputError(f"{path} exists; pass --force to overwrite it.")


def _guarded(work: Callable[[], int]) -> None:
    """Run a command; an error of ours is a message and exit code 1."""
    try:
        code = work()
    except TraceAuditError as error:
        click.echo(f"traceaudit: {error}", err=True)
        code = EXIT_INPUT
    if code:
        sys.exit(code)


def _result_json(path: Path | None) -> dict[str, Any] | None:
    """Return a ``result.json`` of `analyze`."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON; expected the result.json of analyze: {error}") from error
    if not isinstance(found, dict) or "job" not in found:
        raise InputError(f'{path}: no "job" in it; expected the result.json of analyze.')
    return found


@click.command()
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs of the job.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True, help="GPUs of a host.")
@click.option("--mtbf", type=Duration(), help="Mean time between failures of the whole job, e.g. 3h.")
@click.option("--gpu-mtbf", type=Duration(), help="The same of one GPU, e.g. 50677h; needs --gpus.")
@click.option("--failures", type=float, help="Failures that were counted; needs --days.")
@click.option("--days", type=float, help="Days over which they were counted.")
@click.option("--pause", type=Duration(), help="How long training stands still at a checkpoint, e.g. 30s.")
@click.option("--write", type=Duration(), default="0", help="Asynchronous: writing behind the training.")
@click.option("--restart", type=Duration(), default="0", help="From a failure until training goes on.")
@click.option("--interval", type=Duration(), help="Training between checkpoints as it is now.")
@click.option("--copy-pause", type=Duration(), help="Pause that asynchronous saving would leave.")
@click.option("--params", type=float, help="Parameters of the model, for the size of a checkpoint.")
@click.option("--bytes-per-param", type=float, default=14.0, show_default=True, help="Bytes saved of each.")
@click.option("--storage-gbps", type=float, metavar="GB/S", help="What all writers reach together.")
@click.option("--mfu", type=float, metavar="MFU%", help="MFU of the steps, for goodput.")
@click.option(
    "--result",
    "result_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A result.json of analyze: its MFU, and its checkpoint pause.",
)
@_outputs
def budget(output: Path | None, json_path: str | None, force: bool, **given: Any) -> None:  # noqa: ANN401  the options
    """Budget the failures: MTBF, checkpoint interval, lost time by each definition, goodput.

    Example: traceaudit budget --failures 419 --days 54 --gpus 16384 --pause 30s --restart 5min --mfu 40
    """

    def work() -> int:
        from traceaudit.budget import from_figures
        from traceaudit.report.budget import lines, picture

        _check_outputs(output, json_path, force=force)
        try:
            found = from_figures({name: given[name] for name in FIGURES}, _result_json(given["result_path"]))
        except MissingFigureError as error:
            raise click.UsageError(f"pass {error}") from error
        _answer(found, lines(found), lambda: picture(found), output=output, json_path=json_path, force=force)
        return 0

    _guarded(work)


class Figures(click.ParamType[dict[str, Any]]):
    """The options of `budget` as one text."""

    name = "figures"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Return the figures by name; what `budget` would refuse is a usage error."""
        if isinstance(value, dict):
            return value
        try:
            words = shlex.split(str(value))
            given = budget.make_context("--budget", words, resilient_parsing=False).params
        except (ValueError, click.UsageError) as error:
            self.fail(f"{value!r}: {error.format_message() if isinstance(error, click.UsageError) else error}", param)
        if not (given["mtbf"] or given["gpu_mtbf"] or (given["failures"] and given["days"])):
            self.fail(f"{value!r} does not tell how often the job fails: --mtbf, --gpu-mtbf, or --failures and --days")
        if given["result_path"] or given["output"] or given["json_path"]:
            self.fail(f"{value!r}: --result, -o and --json have no place here; the traces are the result")
        return {name: given[name] for name in FIGURES}


@click.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--control", type=click.Path(exists=True, path_type=Path), help="Log of the same run in BF16.")
@click.option("--tolerance", type=float, default=0.25, show_default=True, help="% that the loss may be above it.")
@click.option("--clip", type=click.FloatRange(min=0, min_open=True), help="Gradient norm at which the run clips.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), help="Steps between checkpoints.")
@click.option("--fail-on-spike", is_flag=True, help="Exit with 3 on an alarm: spike, divergence, NaN, scale collapse.")
@click.option("--follow", is_flag=True, help="Go on reading a growing log and print what is new.")
@click.option("--every", type=Duration(), default="10", show_default=True, help="How often --follow looks.")
@_outputs
def norms(
    log: Path,
    control: Path | None,
    tolerance: float,
    clip: float | None,
    checkpoint_every: int | None,
    fail_on_spike: bool,
    follow: bool,
    every: float,
    output: Path | None,
    json_path: str | None,
    force: bool,
) -> None:
    """Watch the norms: spikes, broken numbers, drift and restarts in a training log.

    LOG is JSON Lines, CSV, a console log of torchtitan, Megatron-LM or transformers, a trainer_state.json, TensorBoard
    event files, or the folder of a W&B run kept offline.
    """

    def work() -> int:
        from traceaudit.norms.read import read
        from traceaudit.norms.watch import alarms, watch
        from traceaudit.report.norms import lines, picture

        other = read(control) if control is not None else None

        def judge(read_log: Any) -> dict[str, Any]:  # noqa: ANN401  a TrainingLog, imported late
            return watch(
                read_log, control=other, tolerance=tolerance / 100, clip=clip, checkpoint_every=checkpoint_every
            )

        if follow and (output is not None or json_path is not None):
            raise click.UsageError("--follow prints what is new; -o and --json are for a log as it is")
        if follow:
            return _follow(log, judge, every, fail=fail_on_spike)
        _check_outputs(output, json_path, force=force)
        known = read(log)
        found = judge(known)
        _answer(
            found, lines(found), lambda: picture(found, known.table), output=output, json_path=json_path, force=force
        )
        return EXIT_SPIKE if fail_on_spike and alarms(found) else 0

    _guarded(work)


def _follow(log: Path, judge: Callable[[Any], dict[str, Any]], every: float, *, fail: bool) -> int:
    """Print what is new until interrupted; return 3 at the first alarm if asked to."""
    import time

    from traceaudit.norms.watch import ALARM, follow
    from traceaudit.report.norms import event_lines

    def pause() -> bool:
        time.sleep(every)
        return True

    try:
        for found, fresh in follow(log, pause, judge):
            for event in fresh:
                for line in event_lines(event):
                    click.echo(line)
            click.echo(f"step {found['log']['last_step']:,}, loss {found['log']['loss_last']}", err=True)
            if fail and any(event["severity"] == ALARM for event in fresh):
                return EXIT_SPIKE
    except KeyboardInterrupt:
        click.echo("traceaudit: stopped", err=True)
    return 0


@click.command()
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="run.json, config.json, ..."
)
@click.option("--params", type=float, help="Parameters of the model, e.g. 70e9.")
@click.option("--layers", type=int, help="Layers.")
@click.option("--hidden", type=int, help="Hidden size.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--kv-heads", type=int, help="Heads of keys and values, for the KV cache.")
@click.option("--seq-len", type=int, help="Sequence length.")
@click.option("--vocab", type=int, help="Vocabulary, for the logits.")
@click.option("--microbatch", type=int, help="Sequences of a micro-batch.  [default: 1]")
@click.option("--states", help="Optimizer: adam, adam-fp32-grads, adam-8bit, adam-fp32, momentum, ...  [default: adam]")
@click.option("--tp", type=int, help="Degree of tensor parallelism.")
@click.option("--pp", type=int, help="Degree of pipeline parallelism.")
@click.option("--dp", type=int, help="Degree of data parallelism.")
@click.option("--cp", type=int, help="Degree of context parallelism.")
@click.option("--virtual-stages", type=int, help="Stages of the pipeline on a rank.")
@click.option("--microbatches", type=int, help="Micro-batches of a step.")
@click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="Norms split over TP.  [default: no]")
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage over DP and CP; 3 is FSDP.  [default: 0]")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]), help="Recompute.  [default: none]")
@click.option("--kv-tokens", type=int, help="Tokens in a KV cache of two bytes a value.")
@click.option("--gpu-memory", type=float, metavar="GB", help="Memory of one GPU, 1e9 bytes.")
@click.option(
    "--result",
    "result_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A result.json of analyze, for measured memory and recompute.",
)
@click.option("--trace", help="Traces with memory events, for measured memory.")
@_outputs
def inventory(
    config: Path | None,
    result_path: Path | None,
    trace: str | None,
    gpu_memory: float | None,
    output: Path | None,
    json_path: str | None,
    force: bool,
    **sizes: Any,  # noqa: ANN401  the options
) -> None:
    """Fit before fast: the bytes of a run on one GPU, and what to divide by what to fit.

    Example: traceaudit inventory --config config.json --seq-len 8192 --tp 8 --dp 64 --zero 1 --gpu-memory 80
    """

    def work() -> int:
        from traceaudit import inventory as inventories
        from traceaudit.report.inventory import lines, picture

        _check_outputs(output, json_path, force=force)
        seen, memory = _measured(result_path, trace)
        room = gpu_memory * GB if gpu_memory else memory
        found = inventories.inventory(_plan(config, sizes), room, seen)
        _answer(found, lines(found), lambda: picture(found), output=output, json_path=json_path, force=force)
        return 0

    _guarded(work)


def _plan(config: Path | None, sizes: Mapping[str, Any]) -> "Plan":
    """Return the plan that a file and the options declare; an option beats the file."""
    from traceaudit.inventory import plan_of
    from traceaudit.mfu.model import declared

    run = declared([config] if config else [], sizes)
    plan = plan_of({**run.values, **run.degrees()})
    if plan is None:
        raise click.UsageError("pass --params, or a --config that tells the parameters")
    return plan


def _measured(result_path: Path | None, trace: str | None) -> tuple[dict[str, Any] | None, float | None]:
    """Return what was measured of memory, and the memory of the GPU where a trace names it."""
    from traceaudit.inventory import seen_in

    result = _result_json(result_path)
    if trace is None:
        return (seen_in(result), None) if result is not None else (None, None)
    from traceaudit.reading.normalise import read_trace
    from traceaudit.reading.sources import find

    allocated, reserved, room = 0, 0, 0
    for source in find([trace]):
        found = read_trace(source.place)
        if len(found.memory):
            allocated = max(allocated, int(found.memory["allocated"].max()))
            reserved = max(reserved, int(found.memory["reserved"].max()))
        device = found.origin.device
        room = max(room, device.memory_bytes if device is not None else 0)
    peaks = {"allocated_peak_bytes": allocated or None, "reserved_peak_bytes": reserved or None}
    share = seen_in(result)["recompute_share"] if result is not None else None
    return {**peaks, "recompute_share": share}, room or None


COMMANDS = (budget, norms, inventory)
