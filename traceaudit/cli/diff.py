"""``traceaudit diff``: say what changed between two runs."""

import sys
from pathlib import Path

import click

from traceaudit.cli.exits import EXIT_GATE, reported
from traceaudit.cli.options import Numbers
from traceaudit.cli.outputs import FILE, FORCE, STANDARD_OUTPUT, answer, files, json_option
from traceaudit.output_files import refuse_overwriting


class Limit(click.ParamType[tuple[str, float]]):
    """What may get worse by how much: ``0.5`` (MFU) or ``host_gap=0.5``."""

    name = "points"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Return what is limited, and the limit; wrong text is a usage error."""
        if isinstance(value, tuple):
            return value
        from traceaudit.comparing.gate import MFU
        from traceaudit.comparing.measured import BUCKETS

        name, _, text = str(value).rpartition("=")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if not 0 <= limit < float("inf") or name not in ("", MFU, *BUCKETS):
            self.fail(f"{value!r} is neither a number nor BUCKET=number; buckets: {', '.join(BUCKETS)}", param, ctx)
        return name or MFU, limit


DIFF_HELP = (
    "BEFORE and AFTER are a result.json, a report of analyze, or traces. Exit codes: 0 fine; 1 the runs could not be "
    "read or compared; 2 wrong usage; 3 --fail-on-regression tripped."
)


@click.command(epilog=DIFF_HELP)
@click.argument("before", type=click.Path())
@click.argument("after", type=click.Path())
@click.option("-o", "--output", "html", type=FILE, help="Write an HTML page.")
@json_option("the difference")
@click.option("--markdown", help="Write Markdown for a merge request; - for standard output.")
@FORCE
@click.option(
    "--fail-on-regression",
    "limits",
    type=Limit(),
    multiple=True,
    metavar="[BUCKET=]PCT",
    help="Exit with 3 if MFU falls, or a bucket costs, more MFU points than this, and more than noise; repeatable.",
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="What ran, for traces as for analyze.")
@click.option("--steps", type=Numbers(), help="Steps of traces to analyse, e.g. 3-7 or 5,6.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that read traces.")
def diff(
    before: str,
    after: str,
    html: Path | None,
    json: str | None,
    markdown: str | None,
    force: bool,
    limits: tuple[tuple[str, float], ...],
    config: str | None,
    steps: frozenset[int] | None,
    jobs: int | None,
) -> None:
    """Say what changed between two runs: by bucket, leaf, rank, group and kernel, and what of it is noise.

    Example: traceaudit diff baseline.json trace_dir/ --markdown - --fail-on-regression 0.5
    """
    if json == markdown == STANDARD_OUTPUT:
        raise click.UsageError("--json - and --markdown - both want standard output")
    with reported():
        from traceaudit.comparing.difference import diff as compared
        from traceaudit.report.difference import lines, to_html
        from traceaudit.report.json_file import to_json
        from traceaudit.steps import Selection

        refuse_overwriting(files([html, json, markdown]), force=force)
        found = compared(before, after, config=config, selection=Selection(steps), jobs=jobs)
        answer(
            lines(found.data),
            (json, lambda: to_json(found.data)),
            (markdown, found.to_markdown),
            (html, lambda: to_html(found.data)),
            force=force,
        )
        worse = found.regressions(dict(limits))
    for text in worse:
        click.echo(f"traceaudit: {text} (--fail-on-regression)", err=True)
    if worse:
        sys.exit(EXIT_GATE)
