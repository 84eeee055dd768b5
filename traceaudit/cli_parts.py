"""What commands share: types of options, and errors as messages."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from traceaudit.errors import TraceAuditError

EXIT_INPUT = 1


class Numbers(click.ParamType[frozenset[int]]):
    """A set of numbers such as ``3-7`` or ``5,6``."""

    name = "numbers"

    def convert(
        self,
        value: object,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> frozenset[int]:
        """Return the numbers; wrong text is a usage error."""
        if isinstance(value, frozenset):
            return value
        found: set[int] = set()
        for part in str(value).split(","):
            low, _, high = part.strip().partition("-")
            if (
                not low.isdigit()
                or (high and not high.isdigit())
                or int(high or low) - int(low) not in range(1_000_000)
            ):
                self.fail(f"{value!r} is no list of numbers such as 3-7 or 5,6", param, ctx)
            found |= set(range(int(low), int(high or low) + 1))
        return frozenset(found)


class Pattern(click.ParamType[str]):
    """A regular expression."""

    name = "regex"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text of the expression; one that does not compile is a usage error."""
        try:
            re.compile(str(value))
        except re.error as error:
            self.fail(f"{value!r} is no regular expression: {error}", param, ctx)
        return str(value)


@contextmanager
def reported() -> Iterator[None]:
    """Turn an error of ours into a message and exit code 1."""
    try:
        yield
    except TraceAuditError as error:
        click.echo(f"traceaudit: {error}", err=True)
        sys.exit(EXIT_INPUT)
