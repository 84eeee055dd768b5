"""Cuts the text of a trace into stretches of whole events, wherever its writer put the line breaks."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from traceaudit.errors import NotATraceError
from traceaudit.reading.repair import BARE_NUMBER, object_end, repaired_text
from traceaudit.reading.streams import Inflating

BLOCK_BYTES = 1 << 20  # decoded at a time, at least
HEAD_LIMIT_BYTES = 64 << 20


class Ahead:
    """Inflates the next block on a thread of its own while the last one is decoded."""

    def __init__(self, source: Inflating) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(1)
        self._next = self._thread.submit(source.part)

    def read(self) -> bytes:
        """Return the next block, or nothing at the end."""
        block = self._next.result()
        if block:
            self._next = self._thread.submit(self._source.part)
        return block

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown(cancel_futures=True)


class EventText:
    """Iterates over chunks of whole events; keeps the text around the list as metadata."""

    def __init__(self, source: Ahead) -> None:
        self._source = source
        self._head = b""
        self._tail = b""
        self.separator = b""
        self.torn = False
        self.ended = False
        self.dropped = 0
        self.repaired = 0
        self.carry = b""

    def __iter__(self) -> Iterator[memoryview]:
        """Yield lists of whole events as JSON; each is gone when the next one is asked for."""
        first = self._open_list()
        if not first:
            return
        self.separator = _separator(first)
        room = _Room(first[1:])
        while not self.ended:
            cut = room.text.rfind(self.separator, 2, room.end)
            if cut >= 0:
                yield room.list_to(cut)
                room.drop_to(cut + len(self.separator))
            if not self._filled(room):
                break
        rest = room.rest()
        if self.ended:
            self._tail += self.separator  # the cut was behind the list
            while rest and len(self._tail) < HEAD_LIMIT_BYTES:
                self._tail += rest
                rest = self._source.read()
            return
        for last in self._last(rest):
            yield memoryview(b"[{" + last + b"}]")

    def _filled(self, room: "_Room") -> bool:
        """Read a block into the room; tell whether there was more to read."""
        begun = room.end
        while room.end - begun < BLOCK_BYTES and (more := self._source.read()):
            if room.end > HEAD_LIMIT_BYTES + BLOCK_BYTES:
                raise NotATraceError(f"an event of more than {HEAD_LIMIT_BYTES >> 20} MiB; not a profiler trace")
            room.add(more)
        return room.end > begun

    def metadata(self) -> dict[str, Any]:
        """Return the top-level keys beside the events, as far as they can be read."""
        if self._head.lstrip()[:1] == b"[":
            return {}
        text = self._head + b"]" + (self._tail if self._tail else b"}")
        for attempt in (text, BARE_NUMBER.sub(rb"\1null", text).replace(b'/"', b"'")):
            try:
                found = json.loads(attempt.decode("utf-8", "replace"), strict=False)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                found.pop("traceEvents", None)
                return found
        return _salvage(text.decode("utf-8", "replace"))

    def end(self, tail: bytes) -> None:
        """Note that the list of events closed; `tail` is what follows the bracket."""
        self.ended = True
        self._tail = tail

    def extend_tail(self, text: bytes) -> None:
        """Note text behind the list."""
        self._tail += text

    def _open_list(self) -> bytes:
        """Read up to the first event; return the buffer from its brace on, or nothing if the list is empty."""
        buffer = b""
        while True:
            more = self._source.read()
            buffer += more
            opened = _list_start(buffer)
            if opened is not None and (len(buffer) - opened > 1 << 17 or not more):
                break
            if not more or len(buffer) > HEAD_LIMIT_BYTES:
                if opened is None:
                    raise NotATraceError('no "traceEvents" list and no list at top level; not a profiler trace')
                break
        self._head, rest = buffer[:opened], buffer[opened:].lstrip()
        if rest[:1] == b"]":
            self.end(rest[1:])
            return b""
        if rest[:1] != b"{":
            if rest:
                raise NotATraceError("the list of trace events holds no objects; not a profiler trace")
            self.torn = True
            return b""
        return rest

    def _last(self, rest: bytes) -> Iterator[bytes]:
        """Yield the events behind the last separator, which may have separators of their own, and note the tail."""
        while True:
            if self.carry:
                rest, self.carry = self.carry + self.separator + rest, b""
            text = rest
            closed = object_end(b"{" + text)
            if closed is None:
                text = repaired_text(rest)
                closed = object_end(b"{" + text)
                self.repaired += closed is not None
            if closed is None:
                broken, found, rest = rest.partition(self.separator)
                self.dropped += bool(broken.strip())
                if found:
                    continue
                self.torn = True
                return
            yield text[: closed - 2]
            behind = text[closed - 1 :].lstrip()
            following = behind[1:].lstrip()
            if behind[:1] == b"]" and b'"ph"' in text[:closed]:
                self.end(behind[1:])
                return
            if behind[:1] != b"," or following[:1] != b"{":  # the list is not closed
                self.torn = True
                return
            self.separator = _separator(following)
            first, *more = following[1:].rsplit(self.separator, 1)
            if more:
                yield first
            rest = more[0] if more else first


class _Room:
    """Memory that events are collected and decoded in, so that it need not be asked for, and filled, again and again.

    Attributes:
        text: an opening bracket and brace, and what follows the brace in the file.
        end: where that ends.
    """

    def __init__(self, text: bytes) -> None:
        self.text = bytearray(2 * BLOCK_BYTES)
        self.text[:2] = b"[{"
        self.end = 2
        self.add(text)

    def add(self, text: bytes) -> None:
        """Append text."""
        if self.end + len(text) > len(self.text):
            self.text = self.text[: self.end] + bytes(self.end + len(text))
        memoryview(self.text)[self.end : self.end + len(text)] = text
        self.end += len(text)

    def list_to(self, cut: int) -> memoryview:
        """Return the events before a separator as a list; its brackets overwrite the separator."""
        view = memoryview(self.text)
        view[cut : cut + 2] = b"}]"
        return view[: cut + 2]

    def drop_to(self, begin: int) -> None:
        """Drop what precedes an offset."""
        view = memoryview(self.text)
        rest = bytes(view[begin : self.end])
        view[2 : 2 + len(rest)] = rest
        self.end = 2 + len(rest)

    def rest(self) -> bytes:
        """Return the text as it is in the file."""
        return bytes(self.text[2 : self.end])


LIST_START = re.compile(rb'"traceEvents"\s*:\s*\[')


def _list_start(buffer: bytes) -> int | None:
    """Return the offset just after the bracket that opens the events."""
    lead = len(buffer) - len(buffer.lstrip())
    if buffer[lead : lead + 1] == b"[":
        return lead + 1
    opened = LIST_START.search(buffer)
    return opened.end() if opened else None


BORDER = re.compile(rb"(?:\n *)?\}\s*,\s*\{")


def _separator(buffer: bytes) -> bytes:
    """Return the bytes from the end of the first event to the brace of the second, with the indent before the end."""
    end = object_end(buffer[: 1 << 20])
    if end is None:
        buffer = repaired_text(buffer[: 1 << 20])
        end = object_end(buffer)
    if end is None:
        borders = Counter(BORDER.findall(buffer))
        return borders.most_common(1)[0][0] if borders else b"},{"
    following = buffer.find(b"{", end)
    if following < 0 or buffer[end:following].strip() != b",":
        return b"},{"
    body = buffer[: end - 1]
    indent = body[len(body.rstrip(b" ")) :]
    newline = b"\n" if body.rstrip(b" ").endswith(b"\n") else b""
    return (newline + indent if newline else b"") + buffer[end - 1 : following + 1]


SALVAGED = ("baseTimeNanoseconds", "distributedInfo", "deviceProperties", "host_name", "record_shapes", "with_stack")


def _salvage(text: str) -> dict[str, Any]:
    """Return the values of the most needed keys from metadata that is not JSON as a whole."""
    found: dict[str, Any] = {}
    decoder = json.JSONDecoder(strict=False)
    for key in SALVAGED:
        match = re.search(rf'"{key}"\s*:\s*', text)
        if match is None:
            continue
        try:
            found[key] = decoder.raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):
            continue
    return found
