"""The command line: a thin skin over `traceaudit.analyze` and `traceaudit.simulate`."""

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from traceaudit import __version__
from traceaudit.cli_beyond import COMMANDS, Figures
from traceaudit.cli_compare import COMPARING
from traceaudit.cli_outputs import STANDARD_OUTPUT, Outputs, output_options
from traceaudit.cli_parts import EXIT_INPUT, Numbers, Pattern, reported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traceaudit.audit import Audit
    from traceaudit.reading.parallel import Progress

Command = TypeVar("Command", bound=Callable[..., None])

QUIET_S, QUIET_BYTES = 5, 10_000_000  # of reading without a line on how far it is
EXIT_BELOW, EXIT_UNRELIABLE = 3, 4

EPILOG = (
    "Exit codes: 0 fine; 1 the input could not be analysed; 2 wrong usage; 3 --fail-under tripped; "
    "4 --strict and the attribution is not reliable."
)


@click.group(epilog=EPILOG)
@click.version_option(__version__, prog_name="traceaudit")
def main() -> None:
    """Where did the missing MFU go? Attribute the lost time of a training run from its torch.profiler traces."""


def _model_options(command: Command) -> Command:
    """Add the options that describe the run; names and values of ``run.json``."""
    for option in reversed(
        (
            click.option("--params", type=float, help="Parameters of the model, e.g. 70e9."),
            click.option("--tokens-per-step", type=float, help="Tokens of one optimizer step, the whole job together."),
            click.option("--layers", type=float, help="Layers, for attention FLOPs."),
            click.option("--hidden", type=float, help="Hidden size, for attention FLOPs."),
            click.option("--seq-len", type=float, help="Sequence length, for attention FLOPs."),
            click.option("--dtype", help="Element type of the matrix products: bf16, fp16, fp8, tf32, fp32, fp4."),
            click.option(
                "--attention-flops/--no-attention-flops",
                default=None,
                help="Count attention on top of 6 x params x tokens.  [default: no]",
            ),
            click.option(
                "--causal/--full-attention", default=None, help="Count only the causal half of it.  [default: full]"
            ),
            click.option("--gpu", help="GPU model, where the traces do not name it."),
            click.option("--peak-tflops", type=float, help="Dense peak of one GPU, instead of the table."),
            click.option("--hbm-gbps", type=float, help="Memory bandwidth of one GPU in GB/s, instead of the table."),
            *(
                click.option(f"--{name}", type=click.IntRange(min=1), help=f"Degree of {meaning} parallelism.")
                for name, meaning in (
                    ("pp", "pipeline"),
                    ("tp", "tensor"),
                    ("dp", "data"),
                    ("cp", "context"),
                    ("ep", "expert"),
                )
            ),
        )
    ):
        command = option(command)
    return command


@main.command(epilog=EPILOG)
@click.argument("traces", nargs=-1, required=True)
@output_options
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="What ran: a run.json, a Hugging Face config.json, a torchtitan TOML or printed Megatron arguments.",
)
@_model_options
@click.option(
    "--budget",
    type=Figures(),
    metavar="FIGURES",
    help='Add the failure budget: options of `traceaudit budget` in quotes, e.g. "--mtbf 3h --restart 5min".',
)
@click.option(
    "--training-log",
    metavar="LOG",
    type=click.Path(exists=True),
    help="Log of the run, as `traceaudit norms` reads it, for checks that traces cannot answer.",
)
@click.option("--steps", type=Numbers(), help="Steps to analyse, e.g. 3-7 or 5,6.")
@click.option("--step-marker", type=Pattern(), help="Regular expression of the annotations that begin a step.")
@click.option("--whole-trace", is_flag=True, help="Take each whole trace as one window.")
@click.option("--ranks", type=Numbers(), help="Ranks to analyse, e.g. 0-7.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that read.  [default: by cores and free memory]")
@click.option("--scheduler", metavar="ADDRESS", help="Let the workers of this Dask cluster read the traces.")
@click.option(
    "--cache", type=click.Path(file_okay=False), help="Keep what was read here.  [default: beside the traces]"
)
@click.option("--no-cache", is_flag=True, help="Neither use nor keep what was read.")
@click.option("--quiet", is_flag=True, help="Print no report and no progress.")
@click.option("--baseline", type=click.Path(exists=True, dir_okay=False), help="Say what changed from this result.")
@click.option("--fail-under", type=float, metavar="MFU%", help="Exit with 3 if MFU is below, or unknown.")
@click.option("--strict", is_flag=True, help="Exit with 4 if the attribution is not reliable.")
def analyze(
    traces: tuple[str, ...],
    outputs: Outputs,
    config: str | None,
    budget: dict[str, Any] | None,
    training_log: str | None,
    steps: frozenset[int] | None,
    step_marker: str | None,
    whole_trace: bool,
    ranks: frozenset[int] | None,
    jobs: int | None,
    scheduler: str | None,
    cache: str | None,
    no_cache: bool,
    quiet: bool,
    baseline: str | None,
    fail_under: float | None,
    strict: bool,
    **model: float | str | bool | None,
) -> None:
    """Attribute the lost time of a run from the traces of its ranks.

    TRACES are directories, files, glob patterns or URLs such as s3://bucket/run (.json, .json.gz, .json.zst, and
    .zip or .tar of them).
    """
    from traceaudit.comparing.difference import diff, result_of
    from traceaudit.pipeline import analyze as run
    from traceaudit.steps import Selection

    if cache is not None and no_cache:
        raise click.UsageError("--cache and --no-cache exclude each other")
    with reported():
        outputs.check()
        before = result_of(baseline) if baseline is not None else None
        with _progress(quiet=quiet) as progress:
            audit = run(
                list(traces),
                config=config,
                selection=Selection(steps, step_marker, whole_trace),
                ranks=ranks,
                jobs=jobs,
                scheduler=scheduler,
                executor=None,
                keep_pieces=False,
                cache=False if no_cache else cache,
                progress=progress,
                budget=budget,
                training_log=training_log,
                **model,
            )
        outputs.write(audit.result, quiet=quiet)
        _tell_cache(audit, quiet=quiet)
        if before is not None:
            to_stderr = STANDARD_OUTPUT in (outputs.json, outputs.markdown)
            click.echo(f"Against {Path(str(baseline)).name}: {diff(before, audit).headline}", err=to_stderr)
    mfu = audit.mfu
    if fail_under is not None and (mfu is None or mfu * 100 < fail_under):
        reached = "unknown" if mfu is None else f"{mfu:.2%}"
        click.echo(f"traceaudit: MFU is {reached}, below --fail-under {fail_under:g} %", err=True)
        sys.exit(EXIT_BELOW)
    if strict and not audit.result["quality"]["reliable"]:
        click.echo("traceaudit: the attribution is not reliable (--strict)", err=True)
        sys.exit(EXIT_UNRELIABLE)


def _tell_cache(audit: "Audit", *, quiet: bool) -> None:
    reading = audit.reading
    if reading is not None and reading.cache_bytes and not quiet:
        kept = reading.accounts_kept + reading.events_kept
        size = reading.cache_bytes / 1e6
        click.echo(f"cache: {kept} of {reading.files} traces were in it; {size:,.1f} MB read or written", err=True)


class _Lines:
    """Says on stderr how far the reading is, at each tenth, once it has taken a few seconds."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._tenths = 0

    def __call__(self, done: int, total: int, name: str) -> None:
        """Take note of bytes read, in all, and of the file at hand."""
        tenths = 10 * done // max(total, 1)
        long = total >= QUIET_BYTES and time.monotonic() - self._begun > QUIET_S
        if long and tenths > self._tenths:
            from traceaudit.report.formats import clean

            self._tenths = tenths
            click.echo(f"reading: {10 * tenths} % of {total / 1e6:,.0f} MB, {clean(name)}", err=True)


@contextmanager
def _progress(*, quiet: bool) -> "Iterator[Progress | None]":
    """Show a bar on a terminal; elsewhere a line for each tenth of a reading that takes a while."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if quiet:
        yield None
        return
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def report(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"reading {name}".replace("[", "\\["))

        yield report


@main.command()
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@output_options
@click.option("--quiet", is_flag=True, help="Print no report.")
def report(result: Path, outputs: Outputs, quiet: bool) -> None:
    """Write the reports of an earlier analysis again.

    RESULT is a result.json of `analyze`, or an HTML report, which has it inside.
    """
    from traceaudit.report.json_file import read_result

    with reported():
        outputs.check()
        outputs.write(read_result(result), quiet=quiet)


@main.command()
@click.argument("traces", nargs=-1, required=True)
@click.option("--json", "json_path", help="Write the answer as JSON; - for standard output instead of text.")
@click.option("--force", is_flag=True, help="Overwrite existing output files.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that read.  [default: by cores and free memory]")
@click.option("--quiet", is_flag=True, help="Print no text and no progress.")
def inspect(traces: tuple[str, ...], json_path: str | None, force: bool, jobs: int | None, quiet: bool) -> None:
    """Say what traces hold and what they lack, what that costs in certainty, and how to record it.

    TRACES are directories, files, glob patterns or URLs, as for analyze. Exits with 1 if nothing in them can be
    attributed.
    """
    from traceaudit.audit import write
    from traceaudit.errors import InputError
    from traceaudit.inspection.inspect import inspect as run
    from traceaudit.report.json_file import to_json

    with reported():
        path = Path(json_path) if json_path and json_path != "-" else None
        if path is not None and path.exists() and not force:
            raise InputError(f"{path} exists; pass --force to overwrite it.")
        with _progress(quiet=quiet) as progress:
            found = run(list(traces), jobs=jobs, progress=progress)
        if json_path == "-":
            click.echo(to_json(found.result), nl=False)
        elif not quiet:
            click.echo(str(found))
        if path is not None:
            write(path, to_json(found.result), force=force)
    if not found.usable:
        sys.exit(EXIT_INPUT)


@main.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--scenario", help="Which fault to plant; without it, the scenarios are listed.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def simulate(directory: Path, scenario: str | None, force: bool) -> None:
    """Write the traces of a simulated run whose lost time is known.

    Beside the traces stand run.json, which `analyze` reads, and truth.json with the planted answer.
    """
    from traceaudit.simulate import SCENARIOS
    from traceaudit.simulate import simulate as run

    if scenario is None or scenario not in SCENARIOS:
        listed = "\n".join(f"  {name:<22} {entry.description}" for name, entry in SCENARIOS.items())
        raise click.UsageError(f"choose a --scenario:\n{listed}")
    with reported():
        run(directory, scenario, force=force)
    click.echo(f"wrote {directory}; next: traceaudit analyze {directory}", err=True)


@main.command()
@click.option("--sources", is_flag=True, help="Print where the figures come from as well.")
def devices(sources: bool) -> None:
    """Print the table of dense peak rates and memory bandwidths, one GPU a line.

    A ~ stands before a figure that its source leaves in doubt, - where a GPU has no such rate.
    """
    from traceaudit.mfu.hardware import table_rows

    head, *rows = table_rows()
    shown = len(head) - 2
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(shown)]
    for row in (head, *rows):
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip())
        if sources and row is not head:
            click.echo(f"    {row[shown]}" + (f" ({row[shown + 1]})" if row[shown + 1] else ""))


for beyond in (*COMMANDS, *COMPARING):
    main.add_command(beyond)


if __name__ == "__main__":
    main()
