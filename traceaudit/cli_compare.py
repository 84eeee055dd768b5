"""The commands that show the attribution elsewhere, or against another: `overlay` and `diff`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from traceaudit.cli_parts import Numbers, Pattern, reported

if TYPE_CHECKING:
    from traceaudit.comparing.difference import Diff

EXIT_REGRESSION = 3

OVERLAY_HELP = "Open it in https://ui.perfetto.dev or chrome://tracing; with --with-traces in Perfetto 58.2 or later."


@click.command(epilog=OVERLAY_HELP)
@click.argument("traces", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to write it: .json.gz, or .tar with --with-traces.",
)
@click.option("--with-traces", is_flag=True, help="Bundle the ranks' own traces, shifted onto one timeline.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="What ran, as for analyze.")
@click.option("--steps", type=Numbers(), help="Steps to show, e.g. 3-7 or 5,6.")
@click.option("--step-marker", type=Pattern(), help="Regular expression of the annotations that begin a step.")
@click.option("--whole-trace", is_flag=True, help="Take each whole trace as one window.")
@click.option("--ranks", type=Numbers(), help="Ranks to show, e.g. 0-7.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that read.")
def overlay(
    traces: tuple[str, ...],
    output: Path,
    with_traces: bool,
    force: bool,
    config: str | None,
    steps: frozenset[int] | None,
    step_marker: str | None,
    whole_trace: bool,
    ranks: frozenset[int] | None,
    jobs: int | None,
) -> None:
    """Write the attribution as tracks for Perfetto, all ranks on one clock.

    Each rank has tracks of its steps, buckets, leaves, host gaps with their cause, waits with arrows from the rank that
    was late, pipeline work and recompute.
    """
    ending = ".tar" if with_traces else ".json.gz"
    if not output.name.endswith(ending):
        raise click.UsageError(f"{output}: the file {'with' if with_traces else 'without'} traces ends in {ending}")
    with reported():
        from traceaudit.audit import refuse_overwriting
        from traceaudit.overlay import write_bundle, write_overlay
        from traceaudit.pipeline import analyze
        from traceaudit.steps import Selection

        refuse_overwriting([output], force=force)
        audit = analyze(
            list(traces),
            config=config,
            selection=Selection(steps, step_marker, whole_trace),
            ranks=ranks,
            jobs=jobs,
            keep_pieces=True,
        )
        (write_bundle if with_traces else write_overlay)(audit, output, force=force)
    click.echo(f"wrote {output}", err=True)


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
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page.")
@click.option("--json", "json_path", help="Write the difference as JSON; - for standard output instead of text.")
@click.option("--markdown", "markdown_path", help="Write Markdown for a merge request; - for standard output.")
@click.option("--force", is_flag=True, help="Overwrite existing output files.")
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
    output: Path | None,
    json_path: str | None,
    markdown_path: str | None,
    force: bool,
    limits: tuple[tuple[str, float], ...],
    config: str | None,
    steps: frozenset[int] | None,
    jobs: int | None,
) -> None:
    """Say what changed between two runs: by bucket, leaf, rank, group and kernel, and what of it is noise.

    Example: traceaudit diff baseline.json trace_dir/ --markdown - --fail-on-regression 0.5
    """
    if json_path == "-" and markdown_path == "-":
        raise click.UsageError("--json - and --markdown - both want standard output")
    with reported():
        from traceaudit.audit import refuse_overwriting
        from traceaudit.comparing.difference import diff as compared
        from traceaudit.steps import Selection

        paths = [Path(path) for path in (json_path, markdown_path) if path not in (None, "-")]
        refuse_overwriting([output, *paths], force=force)
        found = compared(before, after, config=config, selection=Selection(steps), jobs=jobs)
        _answer(found, output, json_path, markdown_path, force=force)
        worse = found.regressions(dict(limits))
    for text in worse:
        click.echo(f"traceaudit: {text} (--fail-on-regression)", err=True)
    if worse:
        sys.exit(EXIT_REGRESSION)


def _answer(
    found: "Diff", output: Path | None, json_path: str | None, markdown_path: str | None, *, force: bool
) -> None:
    """Print the text, unless Markdown or JSON go to standard output, and write the files that were asked for."""
    from traceaudit.audit import write
    from traceaudit.report.difference import lines
    from traceaudit.report.json_file import to_json

    if json_path == "-":
        click.echo(to_json(found.data), nl=False)
    elif markdown_path == "-":
        click.echo(found.to_markdown(), nl=False)
    else:
        for line in lines(found.data):
            click.echo(line)
    if json_path not in (None, "-"):
        found.to_json(str(json_path), force=force)
    if markdown_path not in (None, "-"):
        write(Path(str(markdown_path)), found.to_markdown().encode(), force=force)
    if output is not None:
        found.to_html(output, force=force)


COMPARING = (overlay, diff)
