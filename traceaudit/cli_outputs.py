"""Where the results of a command go: the terminal, and files that are not overwritten unasked."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from traceaudit.errors import InputError

STANDARD_OUTPUT = "-"
CSV_FILES = ("waterfall", "leaves", "ranks", "kernels", "collectives", "stragglers", "findings", "gaps")


@dataclass(frozen=True)
class Outputs:
    """The files that were asked for; ``-`` is standard output, which then gets nothing else."""

    html: Path | None
    json: str | None
    csv: Path | None
    markdown: str | None
    png: Path | None
    force: bool

    def check(self) -> None:
        """Fail before the work, not after it.

        Raises:
            InputError: a file exists.
            click.UsageError: two outputs share standard output.
        """
        if self.json == self.markdown == STANDARD_OUTPUT:
            raise click.UsageError("--json - and --markdown - exclude each other")
        for path in self._paths():
            if path.exists() and not self.force:
                raise InputError(f"{path} exists; pass --force to overwrite it.")

    def write(self, result: Mapping[str, Any], *, quiet: bool) -> None:
        """Write the files, and the report to standard output unless something else goes there, or `quiet` is set."""
        from traceaudit.audit import write
        from traceaudit.report.json_file import to_json
        from traceaudit.report.markdown import to_markdown

        if self.csv is not None:
            _make(self.csv)
        for path, content in self._files(result):
            write(path, content, force=self.force)
        if self.json == STANDARD_OUTPUT:
            click.echo(to_json(result), nl=False)
        elif self.markdown == STANDARD_OUTPUT:
            click.echo(to_markdown(result), nl=False)
        elif not quiet:
            _print(result)
        if not quiet:
            folder = [] if self.csv is None else [self.csv]
            for path in (*(path for path in self._paths() if path.parent != self.csv), *folder):
                click.echo(f"wrote {path}", err=True)

    def _files(self, result: Mapping[str, Any]) -> Iterator[tuple[Path, bytes]]:
        """Yield each file with its content; what is not asked for is not made."""
        from traceaudit.report.csv_files import csv_files
        from traceaudit.report.figures import png, waterfall
        from traceaudit.report.html import to_html
        from traceaudit.report.json_file import to_json
        from traceaudit.report.markdown import to_markdown

        if self.json not in (None, STANDARD_OUTPUT):
            yield Path(str(self.json)), to_json(result)
        if self.html is not None:
            yield self.html, to_html(result).encode()
        if self.markdown not in (None, STANDARD_OUTPUT):
            yield Path(str(self.markdown)), to_markdown(result).encode()
        if self.png is not None:
            yield self.png, png(waterfall(result))
        if self.csv is not None:
            yield from ((self.csv / name, content) for name, content in csv_files(result).items())

    def _paths(self) -> list[Path]:
        named = [path for path in (self.json, self.markdown) if path not in (None, STANDARD_OUTPUT)]
        files = [path for path in (self.html, self.png) if path is not None]
        tables = [self.csv / f"{name}.csv" for name in CSV_FILES] if self.csv is not None else []
        return [*(Path(str(path)) for path in named), *files, *tables]


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say where results go; the command gets them as `outputs`."""

    @functools.wraps(command)
    def with_outputs(
        output: Path | None,
        json_path: str | None,
        csv_dir: Path | None,
        markdown: str | None,
        png: Path | None,
        *,
        force: bool,
        **others: Any,  # noqa: ANN401  whatever the command takes
    ) -> None:
        command(outputs=Outputs(output, json_path, csv_dir, markdown, png, force), **others)

    file = click.Path(dir_okay=False, path_type=Path)
    decorated: Callable[..., None] = with_outputs
    for option in reversed(
        (
            click.option("-o", "--output", type=file, help="Write the HTML report."),
            click.option("--json", "json_path", help="Write result.json; - for standard output instead of the report."),
            click.option(
                "--csv",
                "csv_dir",
                type=click.Path(file_okay=False, path_type=Path),
                metavar="DIR",
                help="Write the tables as CSV files into this folder.",
            ),
            click.option(
                "--markdown", metavar="PATH", help="Write the text of a ticket; - for standard output, as above."
            ),
            click.option("--png", type=file, help="Write the waterfall as a picture."),
            click.option("--force", is_flag=True, help="Overwrite existing output files."),
        )
    ):
        decorated = option(decorated)
    return decorated


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from error


def _print(result: Mapping[str, Any]) -> None:
    from rich.console import Console

    from traceaudit.report.terminal import print_report

    print_report(result, Console())
