"""``traceaudit simulate``: write the traces of a run whose lost time is known."""

from pathlib import Path

import click

from traceaudit.cli.exits import reported


@click.command()
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
