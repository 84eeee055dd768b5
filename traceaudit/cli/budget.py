"""``traceaudit budget``: what failures and checkpoints cost, and its options as one option of `analyze`."""

import shlex
from pathlib import Path
from typing import Any

import click

from traceaudit.cli.earlier_result import read_earlier, result_option
from traceaudit.cli.exits import reported
from traceaudit.cli.options import Duration
from traceaudit.cli.outputs import Pictured, pictured
from traceaudit.errors import MissingFigureError


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
@result_option(": its MFU, and its checkpoint pause.")
@pictured
def budget(outputs: Pictured, result_path: Path | None, **figures: Any) -> None:  # noqa: ANN401  the options
    """Budget the failures: MTBF, checkpoint interval, lost time by each definition, goodput.

    Example: traceaudit budget --failures 419 --days 54 --gpus 16384 --pause 30s --restart 5min --mfu 40
    """
    with reported():
        from traceaudit.budget import from_figures
        from traceaudit.report.budget import lines, picture

        outputs.check()
        try:
            found = from_figures(figures, read_earlier(result_path))
        except MissingFigureError as error:
            raise click.UsageError(f"pass {error}") from error
        outputs.give(found, lines(found), lambda: picture(found))


class Figures(click.ParamType[dict[str, Any]]):
    """The options of `budget` as one text."""

    name = "figures"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Return the figures by name; what `budget` would refuse is a usage error."""
        if isinstance(value, dict):
            return value
        try:
            words = shlex.split(str(value))
            given = dict(budget.make_context("--budget", words, resilient_parsing=False).params)
        except (ValueError, click.UsageError) as error:
            self.fail(f"{value!r}: {error.format_message() if isinstance(error, click.UsageError) else error}", param)
        if not (given["mtbf"] or given["gpu_mtbf"] or (given["failures"] and given["days"])):
            self.fail(f"{value!r} does not tell how often the job fails: --mtbf, --gpu-mtbf, or --failures and --days")
        result, picture, json, _ = (given.pop(name) for name in ("result_path", "picture", "json", "force"))
        if result or picture or json:
            self.fail(f"{value!r}: --result, -o and --json have no place here; the traces are the result")
        return given
