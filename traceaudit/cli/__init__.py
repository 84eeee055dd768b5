"""The command line: a thin skin over the package, with a module for each command.

What commands share has modules, too: `options`, `outputs`, `progress`, `exits` and `earlier_result`. What is slow to
import is imported where a command runs, so that ``traceaudit --help`` is quick.
"""

import click

from traceaudit import __version__
from traceaudit.cli.analyze import EPILOG, analyze
from traceaudit.cli.budget import budget
from traceaudit.cli.devices import devices
from traceaudit.cli.diff import diff
from traceaudit.cli.inspect import inspect
from traceaudit.cli.inventory import inventory
from traceaudit.cli.norms import norms
from traceaudit.cli.overlay import overlay
from traceaudit.cli.report import report
from traceaudit.cli.simulate import simulate


@click.group(epilog=EPILOG)
@click.version_option(__version__, prog_name="traceaudit")
def main() -> None:
    """Where did the missing MFU go? Attribute the lost time of a training run from its torch.profiler traces."""


for command in (analyze, report, inspect, diff, overlay, budget, norms, inventory, simulate, devices):
    main.add_command(command)
