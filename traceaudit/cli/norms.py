"""``traceaudit norms``: watch the training log of a run."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from traceaudit.cli.exits import EXIT_GATE, reported
from traceaudit.cli.options import Duration
from traceaudit.cli.outputs import Pictured, pictured


@click.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.option("--control", type=click.Path(exists=True, path_type=Path), help="Log of the same run in BF16.")
@click.option("--tolerance", type=float, default=0.25, show_default=True, help="% that the loss may be above it.")
@click.option("--clip", type=click.FloatRange(min=0, min_open=True), help="Gradient norm at which the run clips.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), help="Steps between checkpoints.")
@click.option("--fail-on-spike", is_flag=True, help="Exit with 3 on an alarm: spike, divergence, NaN, scale collapse.")
@click.option("--follow", is_flag=True, help="Go on reading a growing log and print what is new.")
@click.option("--every", type=Duration(), default="10", show_default=True, help="How often --follow looks.")
@pictured
def norms(
    log: Path,
    control: Path | None,
    tolerance: float,
    clip: float | None,
    checkpoint_every: int | None,
    fail_on_spike: bool,
    follow: bool,
    every: float,
    outputs: Pictured,
) -> None:
    """Watch the norms: spikes, broken numbers, drift and restarts in a training log.

    LOG is JSON Lines, CSV, a console log of torchtitan, Megatron-LM or transformers, a trainer_state.json, TensorBoard
    event files, or the folder of a W&B run kept offline.
    """
    with reported():
        from traceaudit.norms.read import read
        from traceaudit.norms.watch import alarms, watch
        from traceaudit.report.norms import lines, picture

        other = read(control) if control is not None else None

        def judge(read_log: Any) -> dict[str, Any]:  # noqa: ANN401  a TrainingLog, imported late
            return watch(
                read_log, control=other, tolerance=tolerance / 100, clip=clip, checkpoint_every=checkpoint_every
            )

        if follow and (outputs.picture is not None or outputs.json is not None):
            raise click.UsageError("--follow prints what is new; -o and --json are for a log as it is")
        if follow:
            alarmed = _follow(log, judge, every, until_alarm=fail_on_spike)
        else:
            outputs.check()
            known = read(log)
            found = judge(known)
            outputs.give(found, lines(found), lambda: picture(found, known.table))
            alarmed = bool(alarms(found))
    if fail_on_spike and alarmed:
        sys.exit(EXIT_GATE)


def _follow(log: Path, judge: Callable[[Any], dict[str, Any]], every: float, *, until_alarm: bool) -> bool:
    """Print what is new until interrupted, or until the first alarm; return whether that was it."""
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
            if until_alarm and any(event["severity"] == ALARM for event in fresh):
                return True
    except KeyboardInterrupt:
        click.echo("traceaudit: stopped", err=True)
    return False
