"""``traceaudit overlay``: show the attribution in Perfetto."""

from pathlib import Path

import click

from traceaudit.cli.exits import reported
from traceaudit.cli.options import selection
from traceaudit.cli.outputs import FILE
from traceaudit.output_files import refuse_overwriting

OVERLAY_HELP = "Open it in https://ui.perfetto.dev or chrome://tracing; with --with-traces in Perfetto 58.2 or later."


@click.command(epilog=OVERLAY_HELP)
@click.argument("traces", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    required=True,
    type=FILE,
    help="Where to write it: .json.gz, or .tar with --with-traces.",
)
@click.option("--with-traces", is_flag=True, help="Bundle the ranks' own traces, shifted onto one timeline.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="What ran, as for analyze.")
@selection("show")
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
