"""The frame of every HTML page: one file that fetches nothing and runs nothing but its own script.

A page is a template that extends ``page.html.j2``; ``parts.html.j2`` has the macros for tables, facts and badges. The
policy in its head admits the one style sheet and the one script by their hashes. So there are no ``style`` attributes
in a page: colours and lengths of figures are attributes of SVG.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from traceaudit.report import formats, words

# The blank between a number and its unit, and between a rank or step and its number; not those of commands.
_TOGETHER = re.compile(
    r"(?<=\d) (?=%|[mµn]s\b|GB\b|points\b)|(?<![-\w]rank)(?<=\brank) (?=\d)|(?<![-\w]step)(?<=\bstep) (?=\d)"
)


def render(template: str, *, title: str, version: str, data: str = "", data_type: str = "", **context: Any) -> str:  # noqa: ANN401
    """Return the page of a template; every string in it is text.

    Args:
        template: its file name in ``templates/``; it extends ``page.html.j2``.
        title: of the window and the tab.
        version: of traceaudit, as the result has it.
        data: what the page carries for programs, already safe inside a ``<script>``; ``json_file`` makes it.
        data_type: the media type of `data`.
        context: what the template shows.
    """
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            version=version,
            data=Markup(data),  # noqa: S704  escaped for a script element by json_file
            data_type=data_type,
            **context,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("traceaudit.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        percent=formats.percent,
        ms=formats.milliseconds,
        duration=formats.duration,
        quantity=formats.quantity,
        plural=formats.plural,
        tidy=_tidy,
    )
    styles, script = _asset("page.css"), _asset("page.js")
    environment.globals.update(
        styles=Markup(styles),  # noqa: S704  our own files
        script=Markup(script),  # noqa: S704
        policy=(
            f"default-src 'none'; style-src {_hash(styles)}; script-src {_hash(script)}; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
        colour=lambda bucket: words.bucket_words(bucket).colour if bucket else words.LEVEL_COLOUR,
    )
    return environment


def _asset(name: str) -> str:
    return (files("traceaudit.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the source expression that admits an inline element of this text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _tidy(text: object) -> str:
    """Keep numbers and their units, and ranks and their numbers, on one line."""
    return _TOGETHER.sub("\u00a0", str(text))
