"""The ``result.json`` of an earlier analysis, as commands that build on it take it."""

import json
from pathlib import Path
from typing import Any

import click

from traceaudit.cli.options import Option
from traceaudit.errors import InputError


def result_option(use: str) -> Option:
    """Return the option that names one; `use` ends the sentence of what it is for."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    return click.option("--result", "result_path", type=file, help=f"A result.json of analyze{use}")


def read_earlier(path: Path | None) -> dict[str, Any] | None:
    """Return a ``result.json`` of `analyze`.

    Raises:
        InputError: the file is none.
    """
    if path is None:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON; expected the result.json of analyze: {error}") from error
    if not isinstance(found, dict) or "job" not in found:
        raise InputError(f'{path}: no "job" in it; expected the result.json of analyze.')
    return found
