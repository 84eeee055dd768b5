"""``traceaudit inspect``: say what traces hold and what they lack."""

import sys

import click

from traceaudit.cli.exits import EXIT_INPUT, reported
from traceaudit.cli.options import JOBS
from traceaudit.cli.outputs import FORCE, answer, files, json_option
from traceaudit.cli.progress import progress
from traceaudit.output_files import refuse_overwriting


@click.command()
@click.argument("traces", nargs=-1, required=True)
@json_option("the answer")
@FORCE
@JOBS
@click.option("--quiet", is_flag=True, help="Print no text and no progress.")
def inspect(traces: tuple[str, ...], json: str | None, force: bool, jobs: int | None, quiet: bool) -> None:
    """Say what traces hold and what they lack, what that costs in certainty, and how to record it.

    TRACES are directories, files, glob patterns or URLs, as for analyze. Exits with 1 if nothing in them can be
    attributed.
    """
    from traceaudit.inspection.inspect import inspect as run
    from traceaudit.report.inspection import lines
    from traceaudit.report.json_file import to_json

    target = json or None  # an empty name asks for no file
    with reported():
        refuse_overwriting(files([target]), force=force)
        with progress(quiet=quiet) as shown:
            found = run(list(traces), jobs=jobs, progress=shown)
        answer(lines(found.result), (target, lambda: to_json(found.result)), force=force, quiet=quiet)
    if not found.usable:
        sys.exit(EXIT_INPUT)
