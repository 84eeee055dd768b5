"""Types of options, and options that commands share."""

import re
from collections.abc import Callable
from typing import TypeAlias

import click

Command: TypeAlias = Callable[..., None]
Option: TypeAlias = Callable[[Command], Command]

JOBS = click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes that read.  [default: by cores and free memory]"
)
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "": 1.0}


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


class Duration(click.ParamType[float]):
    """A duration such as ``30``, ``30s``, ``13min``, ``3h`` or ``54d``; seconds without a unit."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds; wrong text is a usage error."""
        found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(ms|s|min|m|h|d|)", str(value).strip())
        if found is None:
            self.fail(f"{value!r} is no duration such as 30s, 13min or 3h", param, ctx)
        return float(found[1]) * UNITS[found[2]]


def together(*options: Option) -> Option:
    """Return what adds several options to a command, in the order in which its help lists them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def selection(verb: str) -> Option:
    """Return the options that choose which steps and ranks to analyse, or to show."""
    return together(
        click.option("--steps", type=Numbers(), help=f"Steps to {verb}, e.g. 3-7 or 5,6."),
        click.option("--step-marker", type=Pattern(), help="Regular expression of the annotations that begin a step."),
        click.option("--whole-trace", is_flag=True, help="Take each whole trace as one window."),
        click.option("--ranks", type=Numbers(), help=f"Ranks to {verb}, e.g. 0-7."),
    )
