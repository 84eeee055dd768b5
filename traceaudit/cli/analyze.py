"""``traceaudit analyze``: attribute the lost time of a run."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceaudit.cli.budget import Figures
from traceaudit.cli.exits import EXIT_GATE, EXIT_UNRELIABLE, reported
from traceaudit.cli.options import JOBS, selection, together
from traceaudit.cli.outputs import STANDARD_OUTPUT, Reports, reports
from traceaudit.cli.progress import progress

if TYPE_CHECKING:
    from traceaudit.audit import Audit

EPILOG = (
    "Exit codes: 0 fine; 1 the input could not be analysed; 2 wrong usage; 3 --fail-under tripped; "
    "4 --strict and the attribution is not reliable."
)

model_options = together(  # names and values of run.json
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
    click.option("--causal/--full-attention", default=None, help="Count only the causal half of it.  [default: full]"),
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


@click.command(epilog=EPILOG)
@click.argument("traces", nargs=-1, required=True)
@reports
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="What ran: a run.json, a Hugging Face config.json, a torchtitan TOML or printed Megatron arguments.",
)
@model_options
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
@selection("analyse")
@JOBS
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
    outputs: Reports,
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
        with progress(quiet=quiet) as shown:
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
                progress=shown,
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
        sys.exit(EXIT_GATE)
    if strict and not audit.result["quality"]["reliable"]:
        click.echo("traceaudit: the attribution is not reliable (--strict)", err=True)
        sys.exit(EXIT_UNRELIABLE)


def _tell_cache(audit: "Audit", *, quiet: bool) -> None:
    reading = audit.reading
    if reading is not None and reading.cache_bytes and not quiet:
        kept = reading.accounts_kept + reading.events_kept
        size = reading.cache_bytes / 1e6
        click.echo(f"cache: {kept} of {reading.files} traces were in it; {size:,.1f} MB read or written", err=True)
