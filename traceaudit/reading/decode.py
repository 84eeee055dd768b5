"""Read one trace file into columns, in bounded memory, whatever wrote it.

A trace is a JSON list of events, one after another with the same bytes between them. The reader learns those bytes
from the first two events, cuts the (inflating) stream there, and decodes whole chunks of events into small typed
structs that hold only the fields later stages need. An event that is not JSON costs itself, not the file: unescaped
quotes in names and bare ``inf`` are repaired, a torn file keeps its complete events, and what is lost is counted.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import compress, count
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from traceaudit.errors import InputError, NotATraceError
from traceaudit.events import CATEGORIES, GPU_KINDS, LONG_FRAME_US, Kind, frame_matters, frame_may_recompute
from traceaudit.intervals import Array
from traceaudit.reading.streams import Inflating, Place, opened

BLOCK_BYTES = 2 << 20
HEAD_LIMIT_BYTES = 64 << 20
JOIN_LIMIT = 1_000  # pieces of a chunk joined to mend a cut inside an event
TIME_LIMIT_NS = 1 << 61  # so that start, base and length add up within int64

Number = int | float | str | None
Column = npt.NDArray[np.integer[Any]]  # of 8 or 32 bits, where the values fit
Mask = npt.NDArray[np.bool_]


NOTHING = msgspec.Raw()


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that later stages read; names as the profiler writes them."""

    external: int = msgspec.field(default=-1, name="External id")
    external_2021: int = msgspec.field(default=-1, name="external id")
    correlation: int = -1
    stream: int = -1
    device: int = -1
    bytes: int = -1
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=-1, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    dims_2021: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    grid: msgspec.Raw = NOTHING
    collective: str = msgspec.field(default="", name="Collective name")
    group: Number = msgspec.field(default="", name="Process Group Name")
    group_description: str = msgspec.field(default="", name="Process Group Description")
    group_ranks: str = msgspec.field(default="", name="Process Group Ranks")
    group_size: int = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    seq: int = msgspec.field(default=-1, name="Seq")
    source_rank: int = msgspec.field(default=-1, name="Src Rank")
    destination_rank: int = msgspec.field(default=-1, name="Dst Rank")
    root: int = msgspec.field(default=-1, name="Rank")
    wait_stream: int = msgspec.field(default=-1, name="wait_on_stream")
    record: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    device_type: int = msgspec.field(default=0, name="Device Type")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")
    name: Number = ""


class Event(msgspec.Struct, gc=False):
    """One trace event; times stay text, so that they become nanoseconds exactly."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Number = -1
    tid: Number = -1
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    args: Args | None = None


NO_ARGS = Args()
COLLECTIVE_FIELDS = (
    "collective",
    "group",
    "group_description",
    "group_ranks",
    "group_size",
    "dtype",
    "in_elements",
    "out_elements",
    "seq",
    "source_rank",
    "destination_rank",
    "root",
)
# Which kinds of rows can have which integer and which text arguments; on others they are not looked for.
CARRIERS: tuple[tuple[tuple[Kind, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ((Kind.OPERATOR, Kind.ANNOTATION), ("sequence", "forward_thread"), ("dims", "types", "concrete")),
    ((Kind.RUNTIME, *GPU_KINDS, Kind.GPU_ANNOTATION, Kind.SYNC, Kind.OVERHEAD), ("correlation",), ()),
    ((*GPU_KINDS, Kind.GPU_ANNOTATION, Kind.SYNC, Kind.OVERHEAD), ("stream", "device", "bytes"), ("grid",)),
)
INTEGER_ARGS = ("external", *(name for _, integers, _ in CARRIERS for name in integers))
TEXT_ARGS = tuple(name for _, _, texts in CARRIERS for name in texts)


@dataclass
class RawTrace:
    """The complete events of one file, as columns, with the file's own clock and vocabulary.

    Attributes:
        path: the file.
        metadata: every top-level key but the events; empty when the file is a bare list.
        columns: integer arrays of equal length: ``kind`` (`Kind`), ``name``, ``dims``, ``types``, ``concrete`` and
            ``grid`` (indices into `texts`, -1 where absent), ``ts`` and ``dur`` in nanoseconds, ``pid``, ``tid``,
            ``collective`` (row of `collectives`, -1 where absent) and the integer arguments of `Args`.
        texts: the distinct names and shapes.
        collectives: one tuple a collective's event, fields as `COLLECTIVE_FIELDS`.
        waits: one tuple a recorded stream-wait event, fields as `WAIT_FIELDS`.
        memory: one tuple a report of the GPU's allocator: time as written, allocated and reserved bytes.
        thread_names: native names by thread id.
        host_processes: ids of processes that wrote host rows.
        dropped: events lost (unreadable or with an unusable time).
        repaired: events that were readable only after a repair.
        torn: the file ends before its list does.
    """

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Array] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    collectives: list[tuple[Any, ...]] = field(default_factory=list)
    waits: list[tuple[int, ...]] = field(default_factory=list)
    memory: list[tuple[int, ...]] = field(default_factory=list)
    thread_names: dict[int, str] = field(default_factory=dict)
    dropped: int = 0
    repaired: int = 0
    torn: bool = False


def load(place: Path | Place) -> RawTrace:
    """Read a trace: JSON as it is, gzipped or zstd-compressed, from this machine, an archive or a remote store.

    Raises:
        NotATraceError: the file holds no list of events.
        InputError: the file cannot be opened.
    """
    place = Place(str(place)) if isinstance(place, Path) else place
    trace = RawTrace(place.path)
    try:
        with opened(place) as file:
            source = Inflating(file)
            with closing(_Ahead(source)) as ahead:
                text = _EventText(ahead)
                columns = _Columns(trace)
                for chunk in text:
                    columns.add(*_decode(chunk, text))
                trace.metadata = text.metadata()
            trace.torn = text.torn or source.torn
    except OSError as error:
        raise InputError(f"{place.name}: cannot be read: {error.strerror or error}") from error
    columns.finish()
    trace.dropped += text.dropped
    trace.repaired += text.repaired
    return trace


class _Ahead:
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


BARE_NUMBER = re.compile(rb"(:\s*)-?(?:inf|nan|Infinity|NaN|N/A)\b")
QUOTED_NAME = re.compile(rb'("name":\s*")(.*?)("\s*,\s*(?:\n|"(?:pid|ph|cat|tid|ts)"))', re.DOTALL)
ESCAPE_BEFORE_QUOTE = re.compile(rb'\\(?!["\\/bfnrtu])')


class _EventText:
    """Iterates over chunks of whole events; keeps the text around the list as metadata."""

    def __init__(self, source: _Ahead) -> None:
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
            closed = _object_end(b"{" + text)
            if closed is None:
                text = _repair(rest)
                closed = _object_end(b"{" + text)
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


def _object_end(text: bytes) -> int | None:
    """Return the offset after the JSON object that `text` begins with, or nothing if it is torn or not JSON."""
    decoded = text.decode("utf-8", "surrogateescape")
    try:
        end = json.JSONDecoder(strict=False).raw_decode(decoded)[1]
    except (ValueError, RecursionError):
        return None
    return len(decoded[:end].encode("utf-8", "surrogateescape"))


BORDER = re.compile(rb"(?:\n *)?\}\s*,\s*\{")


def _separator(buffer: bytes) -> bytes:
    """Return the bytes from the end of the first event to the brace of the second, with the indent before the end."""
    end = _object_end(buffer[: 1 << 20])
    if end is None:
        buffer = _repair(buffer[: 1 << 20])
        end = _object_end(buffer)
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


CHUNK_DECODER = msgspec.json.Decoder(list[Event])
EVENT_DECODER = msgspec.json.Decoder(Event)


def _decode(listed: memoryview, text: _EventText) -> tuple[list[Event], int, int]:
    """Return the events of a list, and how many were repaired and dropped."""
    if not (text.ended or text.carry):
        try:
            return CHUNK_DECODER.decode(listed), 0, 0
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
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


def _decode_one_by_one(chunk: bytes, text: _EventText) -> tuple[list[Event], int, int]:
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
            event = _plain(_repair(piece))
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


def _may_continue(pieces: list[bytes], text: _EventText) -> bool:
    """Tell whether the last pieces of a chunk may be an event that was cut at bytes inside it."""
    torn_inside = b"\n" not in text.separator
    return torn_inside and sum(map(len, pieces)) < BLOCK_BYTES


def _joined(pieces: list[bytes], separator: bytes) -> tuple[Event | None, int]:
    """Return the event that the first pieces form together, and how many beyond the first were used."""
    text = b"{" + separator.join(pieces) + b"}"
    end = _object_end(text)
    if end is None:
        return None, 0
    return _plain(text[:end]), text.count(separator, 0, end)


def _list_end(piece: bytes) -> tuple[bytes, bytes] | None:
    """Split a piece that runs past the end of the list into its last event and the text after the bracket."""
    closed = _object_end(piece)
    if closed is None or piece[closed:].lstrip()[:1] != b"]" or b'"ph"' not in piece[:closed]:
        return None  # without a phase it is part of a broken event
    return piece[:closed], piece[closed:].lstrip()[1:]


def _repair(piece: bytes) -> bytes:
    """Escape the quotes inside a name, drop escapes JSON does not know, and blank bare ``inf`` and ``nan``."""
    piece = BARE_NUMBER.sub(rb"\1null", piece)
    piece = ESCAPE_BEFORE_QUOTE.sub(rb"\\\\", piece)
    return QUOTED_NAME.sub(lambda m: m[1] + m[2].replace(b'\\"', b'"').replace(b'"', b'\\"') + m[3], piece)


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
            setattr(args, info.name, _integer(value, -1))
        elif info.type is msgspec.Raw:
            setattr(args, info.name, msgspec.Raw(json.dumps(value).encode()))
        else:
            setattr(args, info.name, value if isinstance(value, int) and info.type is not str else str(value))
    return args


def _integer(value: object, otherwise: int) -> int:
    try:
        value = float(value) if isinstance(value, str) and "." in value else value
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if -(1 << 63) <= number < 1 << 63 else otherwise


class _Kinds(dict[str | None, Kind]):
    """Kinds by category as written."""

    def __missing__(self, category: str | None) -> Kind:
        kind = self[category] = CATEGORIES.get(category or "") or CATEGORIES.get((category or "").lower(), Kind.OTHER)
        return kind


class _Matters(dict[str | None, bool]):
    """Whether Python frames matter, by name."""

    def __missing__(self, name: str | None) -> bool:
        matters = self[name] = frame_matters(name or "") or frame_may_recompute(name or "")
        return matters


class _Codes(dict[str | bytes | None, int]):
    """Numbers the distinct texts, whether they come as text or as bytes; none has the number -1 as bytes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self[b""] = -1

    def __missing__(self, key: str | bytes | None) -> int:
        if isinstance(key, str):
            self.texts.append(key)
            code = len(self.texts) - 1
        else:
            code = self[key.decode("utf-8", "replace") if key else ""]
        self[key] = code
        return code


class _Columns:
    """Turns decoded events into columns, chunk by chunk."""

    def __init__(self, trace: RawTrace) -> None:
        self._trace = trace
        self._parts: dict[str, list[Column]] = defaultdict(list)
        self._codes = _Codes()
        self._kinds = _Kinds()
        self._matters = _Matters()
        self._shared: dict[str, str] = {}
        self._words: defaultdict[str, int] = defaultdict(count(-1000, -1).__next__)

    def add(self, events: list[Event], repaired: int, dropped: int) -> None:
        """Append the events of a chunk that later stages read."""
        self._trace.repaired += repaired
        self._trace.dropped += dropped
        for event in [event for event in events if event.ph in ("M", "i")]:
            self._note(event)
        kept = [event for event in events if event.ph == "X"]
        kinds = np.fromiter(map(self._kinds.__getitem__, map(attrgetter("cat"), kept)), np.int8, len(kept))
        kept, kinds = _chosen(kept, kinds != Kind.OTHER, kinds)
        lengths, bad = _nanoseconds(list(map(attrgetter("dur"), kept)), missing=0)
        frames = kinds == Kind.FRAME
        if frames.any():
            wanted = ~frames | (~bad & (lengths >= LONG_FRAME_US * 1000))
            short = np.flatnonzero(~wanted)
            named = map(self._matters.__getitem__, [kept[index].name for index in short.tolist()])
            wanted[short] = np.fromiter(named, np.bool_, len(short))
            kept, kinds, lengths, bad = _chosen(kept, wanted, kinds, lengths, bad)
        if kept:
            self._append(kept, kinds, lengths, bad)

    def finish(self) -> None:
        """Join the chunks."""
        names = ("kind", "name", "ts", "dur", "pid", "tid", *TEXT_ARGS, "collective", *INTEGER_ARGS)
        self._trace.columns = {
            name: np.concatenate(self._parts.pop(name)) if name in self._parts else np.empty(0, np.int64)
            for name in names
        }
        self._trace.texts = self._codes.texts

    def _note(self, event: Event) -> None:
        """Keep what an event without a length says of later use."""
        args = event.args
        if args is None:
            return
        if event.ph == "M" and event.name == "thread_name":
            self._trace.thread_names[self._number(event.tid)] = str(args.name)
        elif event.ph == "i" and args.reserved >= 0 and args.device_type:
            at, bad = _nanoseconds([event.ts])
            if not bad[0]:
                self._trace.memory.append((int(at[0]), args.allocated, args.reserved))

    def _append(self, kept: list[Event], kinds: Column, lengths: Array, bad: Mask) -> None:
        starts, unusable = _nanoseconds(list(map(attrgetter("ts"), kept)))
        bad = bad | unusable
        self._trace.dropped += int(bad.sum())
        kept, kinds, starts, lengths = _chosen(kept, ~bad, kinds, starts, lengths)
        size = len(kept)
        parts = self._parts
        parts["ts"].append(starts)
        parts["dur"].append(lengths)
        parts["kind"].append(kinds)
        parts["name"].append(np.fromiter(map(self._codes.__getitem__, map(attrgetter("name"), kept)), np.int32, size))
        for name in ("pid", "tid"):
            parts[name].append(_compact(self._numbers(list(map(attrgetter(name), kept)))))
        inner = kinds != Kind.FRAME  # frames are many, and none of their arguments is read
        args = [event.args or NO_ARGS for event in compress(kept, inner.tolist())]
        parts["collective"].append(_spread(inner, self._collectives(args)))
        parts["external"].append(_spread(inner, _compact(_either(args, "external", "external_2021"))))
        for carriers, integers, texts in CARRIERS:
            rows = np.isin(kinds, carriers)
            own = list(compress(args, rows[inner].tolist()))
            for name in integers:
                parts[name].append(_spread(rows, _compact(_int64(list(map(attrgetter(name), own))))))
            for name in texts:
                parts[name].append(_spread(rows, self._texts(own, name)))
        self._note_waits(kinds[inner], args)

    def _note_waits(self, kinds: Column, args: list[Args]) -> None:
        for own in (args[index] for index in np.flatnonzero(kinds == Kind.SYNC)):
            if own.wait_stream >= 0:
                self._trace.waits.append((own.stream, own.correlation, own.wait_stream, own.record))

    def _texts(self, args: list[Args], name: str) -> Column:
        """Return the codes of a text argument; -1 where absent."""
        found = list(map(bytes, map(attrgetter(name), args)))
        if name != "dims" and not any(found):
            return np.full(len(found), -1, np.int32)
        if name == "dims" and b"" in found:
            found = [text or bytes(own.dims_2021) for text, own in zip(found, args, strict=True)]
        return np.fromiter(map(self._codes.__getitem__, found), np.int32, len(found))

    def _collectives(self, args: list[Args]) -> Column:
        """Store the arguments of collectives in their own table; return its rows, -1 for other events."""
        rows = np.fromiter(map(bool, map(attrgetter("collective"), args)), np.bool_, len(args))
        result = np.full(len(args), -1, np.int32)
        for index in np.flatnonzero(rows):
            result[index] = len(self._trace.collectives)
            values = (getattr(args[index], name) for name in COLLECTIVE_FIELDS)
            self._trace.collectives.append(
                tuple(_integer(v, -1) if isinstance(v, int) else self._once(v) for v in values)
            )
        return result

    def _once(self, value: Number) -> Number:
        """Return the first of equal texts: the lists of ranks are long and repeat."""
        return self._shared.setdefault(value, value) if isinstance(value, str) else value

    def _number(self, value: Number) -> int:
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            return value
        number = _integer(value, -(1 << 63))
        return number if number != -(1 << 63) else self._words[str(value)]

    def _numbers(self, values: list[Any]) -> Array:
        try:
            return np.fromiter(values, np.int64, len(values))
        except (TypeError, ValueError, OverflowError):
            return np.array([self._number(value) for value in values], np.int64)


def _chosen(events: list[Event], rows: Mask, *columns: Any) -> Any:  # noqa: ANN401  arrays of any types
    """Return the chosen events and rows of columns."""
    if rows.all():
        return events, *columns
    return list(compress(events, rows.tolist())), *(column[rows] for column in columns)


def _either(args: list[Args], name: str, older: str) -> Array:
    """Return an integer argument by its name, else by the one that it had before."""
    found = _int64(list(map(attrgetter(name), args)))
    absent = np.flatnonzero(found < 0)
    if len(absent):
        found[absent] = np.maximum(found[absent], _int64([getattr(args[index], older) for index in absent]))
    return found


def _spread(rows: Mask, values: Column) -> Column:
    """Return a column with values in the chosen rows, -1 elsewhere."""
    result = np.full(len(rows), -1, values.dtype)
    result[rows] = values
    return result


def _compact(column: Array) -> Column:
    """Return integers in 32 bits if they fit; joined chunks take the wider type."""
    if len(column) and column.min() >= -(1 << 31) and column.max() < 1 << 31:
        return column.astype(np.int32)
    return column


def _int64(values: list[int]) -> Array:
    """Return integers as a column; -1 for those that are none of 64 bits."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except OverflowError:
        return np.array([_integer(value, -1) for value in values], np.int64)


DOT, COMMA = ord("."), ord(",")


def _nanoseconds(raws: list[msgspec.Raw], missing: int | None = None) -> tuple[Array, Mask]:
    """Return microsecond texts as exact integer nanoseconds, and which of them are no usable number.

    A value beyond `TIME_LIMIT_NS` is unusable; an absent one or null is too, unless `missing` stands for it.
    """
    found = _decimals(b",".join(raws), len(raws))
    if found is not None:
        return found, np.zeros(len(raws), np.bool_)
    texts = list(map(bytes, raws))
    exact = [missing if missing is not None and text in (b"", b"null") else _exact(text) for text in texts]
    bad = np.array([value is None for value in exact], np.bool_)
    return np.array([value or 0 for value in exact], np.int64), bad


def _decimals(joined: bytes, size: int) -> Array | None:
    """Read numbers between commas that all have three decimals, or none, in thousandths; nothing if they do not."""
    text = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(text == COMMA), len(text))
    dots = np.flatnonzero(text == DOT)
    digits = int(((text >= ord("0")) & (text <= ord("9"))).sum())
    if len(ends) != size or digits + len(dots) + size - 1 != len(text):
        return None
    width = np.diff(ends, prepend=-1) - 1
    if len(dots) == size and width.min() > 4 and width.max() <= 20 and (dots == ends - 4).all():
        values = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
    elif not len(dots) and width.min() > 0 and width.max() <= 15:
        values = np.fromstring(joined, np.int64, sep=",") * 1000
    else:
        return None
    return values if values.max() < TIME_LIMIT_NS else None


def _exact(text: bytes) -> int | None:
    """Return one microsecond text as nanoseconds, rounded half to even below one; nothing if it is no usable number."""
    try:
        value = Decimal(text.decode().strip('"'))
        if not value.is_finite() or value.adjusted() > 16:  # as an integer, 1e999999999 fills the memory
            return None
        number = int((value * 1000).to_integral_value())
    except (ArithmeticError, ValueError):
        return None
    return number if abs(number) < TIME_LIMIT_NS else None


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
