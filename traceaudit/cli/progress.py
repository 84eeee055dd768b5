"""How far the reading is: a bar on a terminal, elsewhere a line now and then."""

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traceaudit.reading.parallel import Progress

QUIET_S, QUIET_BYTES = 5, 10_000_000  # of reading without a line on how far it is


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
def progress(*, quiet: bool) -> "Iterator[Progress | None]":
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
