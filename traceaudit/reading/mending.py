"""Decodes stretches of events, and one by one where one of them is damaged: it costs itself, not the file."""

import json
from contextlib import suppress
from typing import Any

import msgspec

from traceaudit.reading import chunks
from traceaudit.reading.chunks import EventText
from traceaudit.reading.fields import KNOWN_EVENTS, Args, Event, Number
from traceaudit.reading.repair import object_end, repaired_text

JOIN_LIMIT = 1_000  # pieces of a chunk joined to mend a cut inside an event


KNOWN_DECODER = msgspec.json.Decoder(KNOWN_EVENTS)
CHUNK_DECODER = msgspec.json.Decoder(list[Event])
EVENT_DECODER = msgspec.json.Decoder(Event)


def decoded(listed: memoryview, text: EventText) -> tuple[list[Any], int, int]:
    """Return the events of a list, and how many were repaired and dropped.

    They are instances of the classes for each category or, where one of them has none, all of them are an `Event`.
    """
    if not (text.ended or text.carry):
        for decoder in (KNOWN_DECODER, CHUNK_DECODER):
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return decoder.decode(listed), 0, 0
    chunk = bytes(listed[2:-2])
    if text.ended:
        text.extend_tail(text.separator + chunk)
        return [], 0, 0
    if not text.carry:
        return _decode_one_by_one(chunk, text)
    chunk, text.carry = text.carry + text.separator + chunk, b""
    try:
        return CHUNK_DECODER.decode(b"[{" + chunk + b"}]"), 0, 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_one_by_one(chunk, text)


def _decode_one_by_one(chunk: bytes, text: EventText) -> tuple[list[Event], int, int]:
    """Decode a chunk that holds something unusual, event by event, mending what can be mended."""
    events: list[Event] = []
    repaired = dropped = 0
    pieces = chunk.split(text.separator)
    at = 0
    while at < len(pieces):
        piece = b"{" + pieces[at] + b"}"
        event = _plain(piece)
        if event is None and (closed := _list_end(b"{" + pieces[at])) is not None:
            event = _plain(closed[0])
            text.end(text.separator.join([closed[1], *pieces[at + 1 :]]))
            at = len(pieces)
        if event is None and at < len(pieces):
            event = _plain(repaired_text(piece))
            repaired += event is not None
        if event is None and at < len(pieces):
            event, used = _joined(pieces[at : at + JOIN_LIMIT], text.separator)
            if event is None and at + JOIN_LIMIT >= len(pieces) and _may_continue(pieces[at:], text):
                text.carry = text.separator.join(pieces[at:])
                break
            at += used
        if event is None:
            dropped += 1
        else:
            events.append(event)
        at += 1
    return events, repaired, dropped


def _may_continue(pieces: list[bytes], text: EventText) -> bool:
    """Tell whether the last pieces of a chunk may be an event that was cut at bytes inside it."""
    torn_inside = b"\n" not in text.separator
    return torn_inside and sum(map(len, pieces)) < chunks.BLOCK_BYTES


def _joined(pieces: list[bytes], separator: bytes) -> tuple[Event | None, int]:
    """Return the event that the first pieces form together, and how many beyond the first were used."""
    text = b"{" + separator.join(pieces) + b"}"
    end = object_end(text)
    if end is None:
        return None, 0
    return _plain(text[:end]), text.count(separator, 0, end)


def _list_end(piece: bytes) -> tuple[bytes, bytes] | None:
    """Split a piece that runs past the end of the list into its last event and the text after the bracket."""
    closed = object_end(piece)
    if closed is None or piece[closed:].lstrip()[:1] != b"]" or b'"ph"' not in piece[:closed]:
        return None  # without a phase it is part of a broken event
    return piece[:closed], piece[closed:].lstrip()[1:]


def _plain(piece: bytes) -> Event | None:
    """Decode one event, coercing fields of an unexpected type; nothing if it is not JSON."""
    try:
        return EVENT_DECODER.decode(piece)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:  # decimals stay text, so that times are exact
        found = json.loads(piece.decode("utf-8", "replace"), strict=False, parse_float=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    args = found.get("args")
    return Event(
        ph=str(found.get("ph", "")),
        cat=str(found.get("cat", "")),
        name=str(found.get("name", "")).encode("utf-8", "replace").decode(),
        pid=_scalar(found.get("pid", -1)),
        tid=_scalar(found.get("tid", -1)),
        ts=msgspec.Raw(json.dumps(found.get("ts")).encode()),
        dur=msgspec.Raw(json.dumps(found.get("dur")).encode()),
        args=_coerced_args(args) if isinstance(args, dict) else None,
    )


def _scalar(value: object) -> Number:
    return value if isinstance(value, int | float | str) else -1


def _coerced_args(found: dict[str, Any]) -> Args:
    """Build `Args` from arguments of any type; a value that does not fit its field is left out."""
    args = Args()
    for info in msgspec.structs.fields(Args):
        value = found.get(info.encode_name)
        if value is None:
            continue
        if info.type is int:
            setattr(args, info.name, integer(value, -1))
        elif info.type is msgspec.Raw:
            setattr(args, info.name, msgspec.Raw(json.dumps(value).encode()))
        else:
            setattr(args, info.name, value if isinstance(value, int) and info.type is not str else str(value))
    return args


def integer(value: object, otherwise: int) -> int:
    """Return a value of any type as an integer of 64 bits, or something else where it is none."""
    try:
        value = float(value) if isinstance(value, str) and "." in value else value
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if -(1 << 63) <= number < 1 << 63 else otherwise
