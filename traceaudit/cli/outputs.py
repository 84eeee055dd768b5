"""Where the answer of a command goes: the terminal, and files that are not overwritten unasked."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from traceaudit.cli.options import Command, Option, together
from traceaudit.errors import InputError
from traceaudit.output_files import refuse_overwriting, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STANDARD_OUTPUT = "-"
CSV_FILES = ("waterfall", "leaves", "ranks", "kernels", "collectives", "stragglers", "findings", "gaps")

Target: TypeAlias = Path | str | None  # a file; standard output, which then gets nothing else; or nowhere
Form: TypeAlias = tuple[Target, Callable[[], str | bytes]]  # of an answer: where it goes, and what makes it

FORCE = click.option("--force", is_flag=True, help="Overwrite existing output files.")
FILE = click.Path(dir_okay=False, path_type=Path)


def json_option(what: str) -> Option:
    """Return the option that asks for JSON, in a file or instead of the text."""
    return click.option("--json", help=f"Write {what} as JSON; - for standard output instead of text.")


def files(targets: Iterable[Target]) -> list[Path]:
    """Return the targets that are files."""
    return [Path(target) for target in targets if target is not None and target != STANDARD_OUTPUT]


def show(tell: Callable[[], None], forms: Sequence[Form], *, quiet: bool = False) -> None:
    """Print what goes to standard output: the form that was asked for there, else the text unless `quiet` is set."""
    alone = [make for target, make in forms if target == STANDARD_OUTPUT]
    if alone:
        click.echo(alone[0](), nl=False)
    elif not quiet:
        tell()


def save(forms: Iterable[Form], *, force: bool) -> None:
    """Write the forms that go to files; what is not asked for is not made.

    Raises:
        InputError: a file exists and `force` is not set, or it cannot be written.
    """
    for target, make in forms:
        for path in files([target]):
            content = make()
            write(path, content.encode() if isinstance(content, str) else content, force=force)


def answer(lines: Iterable[str], *forms: Form, force: bool, quiet: bool = False) -> None:
    """Print the lines, or what goes to standard output instead, and write the files that were asked for."""
    show(lambda: click.echo("\n".join(lines)), forms, quiet=quiet)
    save(forms, force=force)


def gathered(outputs: type[Any], *options: Option) -> Option:
    """Return what adds options whose values a command gets as its `outputs`: a data class with a field for each."""
    names = [field.name for field in fields(outputs)]

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_outputs(**given: Any) -> None:  # noqa: ANN401  whatever the command takes
            command(outputs=outputs(**{name: given.pop(name) for name in names}), **given)

        return together(*options)(with_outputs)

    return add


@dataclass(frozen=True)
class Pictured:
    """Where an answer with a picture goes."""

    picture: Path | None
    json: str | None
    force: bool

    def check(self) -> None:
        """Fail before the work, not after it.

        Raises:
            InputError: a file exists.
            click.UsageError: the picture is of no known format.
        """
        if self.picture is not None and self.picture.suffix.lower() not in (".svg", ".png"):
            raise click.UsageError(f"{self.picture}: a picture ends in .svg or .png")
        refuse_overwriting(files([self.picture, self.json]), force=self.force)

    def give(self, result: Mapping[str, Any], lines: Iterable[str], draw: Callable[[], "Axes"]) -> None:
        """Print the text, or the JSON if it goes to standard output, and write the files that were asked for."""
        from traceaudit.report.json_file import to_json

        def drawn() -> str | bytes:
            from traceaudit.report.figures import png, svg

            as_png = self.picture is not None and self.picture.suffix.lower() == ".png"
            return png(draw()) if as_png else svg(draw())

        answer(lines, (self.json, lambda: to_json(result)), (self.picture, drawn), force=self.force)


pictured = gathered(
    Pictured,
    click.option("-o", "--output", "picture", type=FILE, help="Write a picture: .svg or .png."),
    json_option("the result"),
    FORCE,
)


@dataclass(frozen=True)
class Reports:
    """Where the reports of an analysis go."""

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
        refuse_overwriting(self._files(), force=self.force)

    def write(self, result: Mapping[str, Any], *, quiet: bool) -> None:
        """Write the files, and the report to standard output unless something else goes there, or `quiet` is set."""
        if self.csv is not None:
            _make(self.csv)
        forms = list(self._forms(result))
        save(forms, force=self.force)
        show(lambda: _print(result), forms, quiet=quiet)
        if not quiet:
            folder = [] if self.csv is None else [self.csv]
            for path in (*(path for path in self._files() if path.parent != self.csv), *folder):
                click.echo(f"wrote {path}", err=True)

    def _forms(self, result: Mapping[str, Any]) -> Iterator[Form]:
        from traceaudit.report.csv_files import csv_files
        from traceaudit.report.figures import png, waterfall
        from traceaudit.report.html import to_html
        from traceaudit.report.json_file import to_json
        from traceaudit.report.markdown import to_markdown

        yield self.json, lambda: to_json(result)
        yield self.html, lambda: to_html(result)
        yield self.markdown, lambda: to_markdown(result)
        yield self.png, lambda: png(waterfall(result))
        if self.csv is not None:
            tables = csv_files(result)
            yield from ((self.csv / name, functools.partial(tables.__getitem__, name)) for name in tables)

    def _files(self) -> list[Path]:
        tables = [self.csv / f"{name}.csv" for name in CSV_FILES] if self.csv is not None else []
        return files([self.json, self.markdown, self.html, self.png, *tables])


reports = gathered(
    Reports,
    click.option("-o", "--output", "html", type=FILE, help="Write the HTML report."),
    click.option("--json", help="Write result.json; - for standard output instead of the report."),
    click.option(
        "--csv",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Write the tables as CSV files into this folder.",
    ),
    click.option("--markdown", metavar="PATH", help="Write the text of a ticket; - for standard output, as above."),
    click.option("--png", type=FILE, help="Write the waterfall as a picture."),
    FORCE,
)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from error


def _print(result: Mapping[str, Any]) -> None:
    from rich.console import Console

    from traceaudit.report.terminal import print_report

    print_report(result, Console())
