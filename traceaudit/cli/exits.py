"""How commands end: exit codes, and errors as messages."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from traceaudit.errors import TraceAuditError

EXIT_INPUT, EXIT_GATE, EXIT_UNRELIABLE = 1, 3, 4  # 2 is click's, for wrong usage


@contextmanager
def reported() -> Iterator[None]:
    """Turn an error of ours into a message and exit code 1."""
    try:
        yield
    except TraceAuditError as error:
        click.echo(f"traceaudit: {error}", err=True)
        sys.exit(EXIT_INPUT)
