"""The result as bytes of JSON, and inside a page."""

import base64
import gzip
import io
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from traceaudit.errors import InputError

PLAIN, PACKED = "application/json", "application/gzip+base64"
LARGEST_PLAIN = 250_000  # characters of JSON that a reader of the page's source may still want to see
LARGEST = {"few": 650_000, "many": 1_900_000}  # characters of a block, with up to 1,024 ranks and with more
FEW_RANKS = 1_024
MOST_UNPACKED = 1_000_000_000  # bytes

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_BLOCK = re.compile(r'<script type="(application/[a-z0-9+]+)" id="traceaudit-result">([^<]*)</script>')
_LEAST_NEEDED = (  # what a block leaves out until it is small enough, and what a page says of it
    ("ranks.steps", "single steps"),
    ("lateness", "waits by step"),
    ("throughput.ranks", "the feeding of single ranks"),
    ("stragglers.evidence", "the evidence of stragglers"),
    ("collectives", "collectives"),
    ("ranks.about", "names of the ranks' files"),
    ("stragglers", "stragglers"),
    ("timeline", "the timeline"),
    ("kernels", "kernels"),
    ("ranks", "ranks"),
)


@dataclass(frozen=True)
class Block:
    """A result as it stands in a page, and what of it does not."""

    data: str
    media_type: str
    left_out: tuple[str, ...] = ()


def to_json(result: Mapping[str, Any]) -> bytes:
    """Return the result as indented JSON in the order in which it was built, ending in a newline.

    File names that are not valid Unicode keep their readable part: orjson refuses lone surrogates.
    """
    return _dumped(result, _OPTIONS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def to_block(result: Mapping[str, Any]) -> Block:
    """Return the result as text that cannot end, or open a comment in, the ``<script>`` it stands in.

    A large result is packed; of one that is still too large for a ticket the least needed is left out, and named in
    its key ``left_out``.
    """
    limit = LARGEST["few" if len(result.get("ranks", [])) <= FEW_RANKS else "many"]
    left_out: tuple[str, ...] = ()
    text = _dumped(result, _OPTIONS)
    if len(text) <= LARGEST_PLAIN:
        plain = text.decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        return Block(plain, PLAIN)
    data = _packed(text)
    for place, name in _LEAST_NEEDED:
        if len(data) <= limit:
            break
        left_out = (*left_out, name)
        result = {**_without(result, place), "left_out": list(left_out)}
        data = _packed(_dumped(result, _OPTIONS))
    return Block(data, PACKED, left_out)


def from_html(text: str) -> dict[str, Any]:
    """Return the result that a page carries; what was left out of it is named in its key ``left_out``.

    Raises:
        InputError: the text is no page of this program, or its data are damaged.
    """
    found = _BLOCK.search(text)
    if found is None:
        raise InputError("no result inside: this is no report of traceaudit.")
    try:
        data = found[2].encode()
        result = orjson.loads(data if found[1] == PLAIN else _unpacked(data))
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"the result inside the report is damaged: {error}") from error
    if not isinstance(result, dict) or "job" not in result:
        raise InputError("the data inside the report are no result.")
    return result


def read_result(path: Path) -> dict[str, Any]:
    """Return the result in a ``result.json`` or in a report.

    Raises:
        InputError: the file cannot be read, or holds no result.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if content.lstrip()[:1] != b"{":
        try:
            return from_html(content.decode("utf-8", "replace"))
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    try:
        result = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if missing := [name for name in ("schema_version", "job") if name not in result]:
        raise InputError(f"{path}: no result of traceaudit analyze: {missing[0]} is missing.")
    return dict(result)


def _dumped(result: Mapping[str, Any], options: int) -> bytes:
    try:
        return orjson.dumps(result, option=options)
    except TypeError:
        return orjson.dumps(_valid(result), option=options)


def _packed(text: bytes) -> str:
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode()


def _unpacked(data: bytes) -> bytes:
    """Return what was packed, unless it grows beyond any result."""
    with gzip.GzipFile(fileobj=io.BytesIO(base64.b64decode(data, validate=True))) as packed:
        text = packed.read(MOST_UNPACKED + 1)
    if len(text) > MOST_UNPACKED:
        raise ValueError("it is larger than any result")
    return text


def _without(result: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the result without a part of it."""
    key, _, inside = place.partition(".")
    if not inside:
        return {name: value for name, value in result.items() if name != key}
    dropped = {"host", "file"} if inside == "about" else {inside}
    part = result.get(key)
    if isinstance(part, Mapping):
        return {**result, key: {name: value for name, value in part.items() if name not in dropped}}
    entries = [{name: value for name, value in entry.items() if name not in dropped} for entry in part or []]
    return {**result, key: entries}


def _valid(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value
