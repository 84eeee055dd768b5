"""Text that is almost JSON, as profilers have written it."""

import json
import re

BARE_NUMBER = re.compile(rb"(:\s*)-?(?:inf|nan|Infinity|NaN|N/A)\b")
QUOTED_NAME = re.compile(rb'("name":\s*")(.*?)("\s*,\s*(?:\n|"(?:pid|ph|cat|tid|ts)"))', re.DOTALL)
ESCAPE_BEFORE_QUOTE = re.compile(rb'\\(?!["\\/bfnrtu])')


def repaired_text(piece: bytes) -> bytes:
    """Escape the quotes inside a name, drop escapes JSON does not know, and blank bare ``inf`` and ``nan``."""
    piece = BARE_NUMBER.sub(rb"\1null", piece)
    piece = ESCAPE_BEFORE_QUOTE.sub(rb"\\\\", piece)
    return QUOTED_NAME.sub(lambda m: m[1] + m[2].replace(b'\\"', b'"').replace(b'"', b'\\"') + m[3], piece)


def object_end(text: bytes) -> int | None:
    """Return the offset after the JSON object that `text` begins with, or nothing if it is torn or not JSON."""
    decoded = text.decode("utf-8", "surrogateescape")
    try:
        end = json.JSONDecoder(strict=False).raw_decode(decoded)[1]
    except (ValueError, RecursionError):
        return None
    return len(decoded[:end].encode("utf-8", "surrogateescape"))
