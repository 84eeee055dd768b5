"""The result as bytes of JSON."""

from collections.abc import Mapping
from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def to_json(result: Mapping[str, Any]) -> bytes:
    """Return the result as indented JSON in the order in which it was built, ending in a newline.

    File names that are not valid Unicode keep their readable part: orjson refuses lone surrogates.
    """
    options = _OPTIONS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(result, option=options)
    except TypeError:
        return orjson.dumps(_valid(result), option=options)


def to_data_block(result: Mapping[str, Any]) -> str:
    """Return the result as compact JSON that cannot end, or open a comment in, the ``<script>`` it stands in."""
    text = orjson.dumps(_valid(result), option=_OPTIONS).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _valid(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value
