"""``traceaudit report``: write the reports of an earlier analysis again."""

from pathlib import Path

import click

from traceaudit.cli.exits import reported
from traceaudit.cli.outputs import Reports, reports


@click.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@reports
@click.option("--quiet", is_flag=True, help="Print no report.")
def report(result: Path, outputs: Reports, quiet: bool) -> None:
    """Write the reports of an earlier analysis again.

    RESULT is a result.json of `analyze`, or an HTML report, which has it inside.
    """
    from traceaudit.report.json_file import read_result

    with reported():
        outputs.check()
        outputs.write(read_result(result), quiet=quiet)
