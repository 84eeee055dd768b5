"""Turns decoded events into columns, chunk by chunk."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress, count
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traceaudit.events import CATEGORIES, LONG_FRAME_US, Kind, frame_matters, frame_may_recompute
from traceaudit.intervals import Array
from traceaudit.reading.fields import (
    CARRIERS,
    COLLECTIVE_FIELDS,
    COLLECTIVE_KINDS,
    IGNORED,
    INSTANT,
    INTEGER_ARGS,
    NO_ARGS,
    ROWS,
    TEXT_ARGS,
    Args,
    Event,
    Number,
)
from traceaudit.reading.mending import integer
from traceaudit.reading.numbers import Column, Mask, nanoseconds


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


def _among(kinds: Iterable[Kind]) -> Mask:
    """Return a table that tells by kind whether it is one of these."""
    found = np.zeros(len(Kind), np.bool_)
    found[list(kinds)] = True
    return found


CARRYING = tuple((_among(kinds), integers, texts) for kinds, integers, texts in CARRIERS)
COLLECTIVE = _among(COLLECTIVE_KINDS)
COLLECTIVE_VALUES = attrgetter(*COLLECTIVE_FIELDS)
NOTED, NOTED_PHASES = -1, ("M", "i")
KNOWN = {**ROWS, **dict.fromkeys(IGNORED, Kind.OTHER), INSTANT: NOTED}


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


class Columns:
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
        kinds = self._kinds_of(events)
        for index in np.flatnonzero(kinds == NOTED):
            self._note(events[index])
        kept, kinds = _chosen(events, kinds > Kind.OTHER, kinds)
        lengths, bad = nanoseconds(list(map(attrgetter("dur"), kept)), missing=0)
        frames = kinds == Kind.FRAME
        if frames.any():
            wanted = ~frames | (~bad & (lengths >= LONG_FRAME_US * 1000))
            short = np.flatnonzero(~wanted)
            named = map(self._matters.__getitem__, [kept[index].name for index in short.tolist()])
            wanted[short] = np.fromiter(named, np.bool_, len(short))
            kept, kinds, lengths, bad = _chosen(kept, wanted, kinds, lengths, bad)
        if kept:
            self._append(kept, kinds, lengths, bad)

    def _kinds_of(self, events: list[Any]) -> Column:
        """Return what each event becomes: a row of some kind, nothing, or something that is noted beside the rows."""
        if not events or not isinstance(events[0], Event):
            return np.fromiter(map(KNOWN.__getitem__, map(type, events)), np.int8, len(events))
        kinds = [
            self._kinds[event.cat] if event.ph == "X" else NOTED if event.ph in NOTED_PHASES else Kind.OTHER
            for event in events
        ]
        return np.fromiter(kinds, np.int8, len(events))

    def finish(self) -> None:
        """Join the chunks."""
        names = ("kind", "name", "ts", "dur", "pid", "tid", *TEXT_ARGS, "collective", *INTEGER_ARGS)
        self._trace.columns = {
            name: np.concatenate(self._parts.pop(name)) if name in self._parts else np.empty(0, np.int64)
            for name in names
        }
        self._trace.texts = self._codes.texts

    def _note(self, event: Any) -> None:  # noqa: ANN401  an `Event` or an `INSTANT`
        """Keep what an event without a length says of later use."""
        args = event.args
        if args is None:
            return
        if event.ph == "M" and event.name == "thread_name":
            self._trace.thread_names[self._number(event.tid)] = str(args.name)
        elif event.ph == "i" and args.reserved >= 0 and args.device_type:
            at, bad = nanoseconds([event.ts])
            if not bad[0]:
                self._trace.memory.append((int(at[0]), args.allocated, args.reserved))

    def _append(self, kept: list[Event], kinds: Column, lengths: Array, bad: Mask) -> None:
        starts, unusable = nanoseconds(list(map(attrgetter("ts"), kept)))
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
        parts["collective"].append(_spread(inner, self._collectives(args, COLLECTIVE[kinds[inner]])))
        parts["external"].append(_spread(inner, _compact(_either(args, "external", "external_2021"))))
        for carriers, integers, texts in CARRYING:
            rows = carriers[kinds]
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
        found = _separate(list(map(attrgetter(name), args)))
        if name != "dims" and not any(found):
            return np.full(len(found), -1, np.int32)
        if name == "dims" and b"" in found:
            found = [text or bytes(own.dims_2021) for text, own in zip(found, args, strict=True)]
        return np.fromiter(map(self._codes.__getitem__, found), np.int32, len(found))

    def _collectives(self, args: list[Args], rows: Mask) -> Column:
        """Store the arguments of collectives, which some rows may be, in their own table; return its rows, else -1."""
        result = np.full(len(args), -1, np.int32)
        for index in np.flatnonzero(rows).tolist():
            if not args[index].collective:
                continue
            result[index] = len(self._trace.collectives)
            values = COLLECTIVE_VALUES(args[index])
            self._trace.collectives.append(
                tuple([integer(v, -1) if isinstance(v, int) else self._once(v) for v in values])
            )
        return result

    def _once(self, value: Number) -> Number:
        """Return the first of equal texts: the lists of ranks are long and repeat."""
        return self._shared.setdefault(value, value) if isinstance(value, str) else value

    def _number(self, value: Number) -> int:
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            return value
        number = integer(value, -(1 << 63))
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


def _separate(raws: list[msgspec.Raw]) -> list[bytes]:
    """Return texts as bytes; joined and split, which takes a third of the time, unless they hold the separator."""
    found = b"\0".join(raws).split(b"\0")
    return found if len(found) == len(raws) else list(map(bytes, raws))


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
        return np.array([integer(value, -1) for value in values], np.int64)
