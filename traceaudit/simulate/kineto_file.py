"""Trace files in the layouts that writers of different years produce, all holding the same events."""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from traceaudit.simulate.job import Job
from traceaudit.simulate.kernels import SM_COUNT
from traceaudit.simulate.kineto_rows import BASE_NS, Event, events, header
from traceaudit.simulate.recording import Recording


class Layout(StrEnum):
    """How a trace is written down."""

    KINETO = "kineto"  # C++ of 2025: fields of an event on three lines, the base time before the events
    KINETO_2021 = "kineto_2021"  # capital categories, absolute whole microseconds
    KINETO_2024 = "kineto_2024"  # as in 2025, the base time after the events
    KINETO_2026 = "kineto_2026"  # one key a line, stray blank lines, metadata first
    COMPACT = "compact"  # the Python exporter: one event a line
    ONE_LINE = "one_line"  # dumped again by some tool
    ARRAY = "array"  # legacy: a list of events, absolute whole microseconds


@dataclass(frozen=True)
class Document:
    """The content of a trace file, times in nanoseconds after `BASE_NS`."""

    header: dict[str, Any]
    events: list[Event]
    trace_name: str
    host_name: str


Keys = tuple[tuple[str, ...], ...]

dumped = json.JSONEncoder().encode  # with a space behind each comma and colon
tight = json.JSONEncoder(separators=(",", ":")).encode

# The keys of an event by phase, line by line, in the C++ layouts up to 2026.
LINES: dict[str, Keys] = {
    "X": (("ph", "cat", "name", "pid", "tid"), ("ts", "dur"), ("args",)),
    "s": (("ph", "id", "pid", "tid", "ts"), ("cat", "name")),
    "f": (("ph", "id", "pid", "tid", "ts"), ("cat", "name", "bp")),
    "M": (("name", "ph", "ts", "pid", "tid"), ("args",)),
    "i": (("name", "ph", "s"), ("pid", "tid", "ts")),
}
LINES_2021: dict[str, Keys] = {**LINES, "X": (("ph", "cat"), ("name", "pid", "tid"), ("ts", "dur"), ("args",))}

# What a category and an argument were called in 2021; other arguments of collectives were not yet there.
CATEGORIES_2021 = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "cuda_runtime": "Runtime",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "Trace": "Trace",
    "ac2g": "async",
}
LATER_CATEGORIES = ("gpu_user_annotation", "python_function", "cuda_sync", "overhead")
ARGS_2021 = {"Input Dims": "Input dims", "Input type": "Input type", "External id": "External id"}
GPU_ARGS_2021 = ("queued", "device", "context", "stream", "correlation", "grid", "block", "cbid", "bytes")


def decimal(ns: int) -> str:
    """Return nanoseconds as microseconds with exactly three decimals.

    >>> decimal(1_005)
    '1.005'
    """
    return f"{ns // 1_000}.{ns % 1_000:03d}"


def whole(ns: int) -> str:
    """Return nanoseconds as whole microseconds, rounded down like the profiler's.

    >>> whole(1_999)
    '1'
    """
    return str(ns // 1_000)


def fields(event: Event, keys: Iterable[str], stamp: Callable[[int], str]) -> list[str]:
    """Return the keys of an event as JSON, `ts` and `dur` by `stamp`."""
    return [f'"{key}": {stamp(event[key]) if key in ("ts", "dur") else dumped(event[key])}' for key in keys]


def lines(event: Event, table: dict[str, Keys], stamp: Callable[[int], str]) -> str:
    """Return an event as the C++ writers lay it out."""
    rows = []
    for keys in table[event["ph"]]:
        if keys == ("args",):
            rows.append(f'    "args": {{\n      {dumped(event["args"])[1:-1]}\n    }}')
        else:
            rows.append("    " + ", ".join(fields(event, keys, stamp)))
    return "  {\n" + ",\n".join(rows) + "\n  }"


# The properties of a GPU, line by line; the last line is the part that only CUDA adds.
DEVICE_LINES: Keys = (
    ("id", "name", "totalGlobalMem"),
    ("computeMajor", "computeMinor"),
    ("maxThreadsPerBlock", "maxThreadsPerMultiprocessor"),
    ("regsPerBlock", "warpSize"),
    ("sharedMemPerBlock", "numSms"),
    ("regsPerMultiprocessor", "sharedMemPerBlockOptin", "sharedMemPerMultiprocessor"),
)


def device_lines(device: dict[str, Any]) -> str:
    """Return the properties of a GPU as the C++ writers lay them out."""
    *common, cuda = (", ".join(f"{dumped(key)}: {dumped(device[key])}" for key in keys) for keys in DEVICE_LINES)
    return "    {\n      " + ",\n      ".join(common) + f"\n    , {cuda}\n    }}"


def head_lines(head: dict[str, Any], last: dict[str, Any]) -> str:
    """Return the file up to the events; the keys of `last` stand right before them."""
    devices = ",\n".join(device_lines(device) for device in head["deviceProperties"])
    others = {key: value for key, value in head.items() if key not in ("schemaVersion", "deviceProperties")}
    return (
        f'\n  {{\n    "schemaVersion": {head["schemaVersion"]},\n    "deviceProperties": [\n{devices}\n    ],\n'
        + "".join(f"      {dumped(key)}: {dumped(value)},\n" for key, value in others.items())
        + "".join(f"  {dumped(key)}: {dumped(value)},\n" for key, value in last.items())
    )


def kineto(document: Document) -> str:
    """Write the layout of 2025."""
    head = head_lines(document.header, {"displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS})
    body = ",\n".join(lines(event, LINES, decimal) for event in document.events)
    return f'{head}  "traceEvents": [\n{body}\n  ],\n  "traceName": {dumped(document.trace_name)}\n}}'


def kineto_2024(document: Document) -> str:
    """Write the layout of 2024, in which the base time follows the events."""
    head = head_lines(document.header, {})
    body = ",\n".join(lines(event, LINES, decimal) for event in document.events)
    last = {"traceName": document.trace_name, "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
    tail = ",\n".join(f"  {dumped(key)}: {dumped(value)}" for key, value in last.items())
    return f'{head}  "traceEvents": [\n{body}\n  ],\n{tail}\n}}'


def kineto_2026(document: Document) -> str:
    """Write the layout of 2026."""
    own = {key: value for key, value in document.header.items() if key != "host_name"}
    last = {"host_name": document.host_name, "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
    head = head_lines(own, last)
    ordered = sorted(document.events, key=lambda event: event["ph"] != "M")
    body = ",\n".join(one_key_a_line(event) for event in ordered)
    return f'{head}\n  "traceEvents": [\n{body}\n\n  ],"traceName": {dumped(document.trace_name)} }}\n'


def one_key_a_line(event: Event) -> str:
    """Return an event as of 2026."""
    keys = sorted((key for row in LINES[event["ph"]] for key in row if key != "args"), key=lambda key: key != "ph")
    text = ",\n".join(f"    {field}" for field in fields(event, keys, decimal))
    if "args" in event:
        args = ",\n".join(f"      {dumped(key)}: {dumped(value)}" for key, value in event["args"].items())
        text += f'\n\n    ,\n    "args": {{\n{args}\n    }}'
    return f"  {{\n{text}\n\n  }}"


def compact(document: Document) -> str:
    """Write the layout of the Python exporter, which puts the number of SMs where the threads of one belong."""
    devices = [
        {
            key: SM_COUNT if key == "maxThreadsPerMultiprocessor" else value
            for key, value in device.items()
            if key != "numSms"
        }
        for device in document.header["deviceProperties"]
    ]
    head = {**document.header, "deviceProperties": devices, "displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
    for absent in {"trace_id", "host_name"} & head.keys():
        del head[absent]
    keys = "".join(f"{dumped(key)}:{tight(value)},\n" for key, value in head.items())
    body = ",\n".join(one_line_event(event) for event in document.events)
    return f'{{{keys}"traceEvents":[\n{body}\n],"traceName":{dumped(document.trace_name)}}}\n'


def one_line_event(event: Event) -> str:
    """Return an event on one line without spaces."""
    parts = [f'"{key}":{decimal(value) if key in ("ts", "dur") else tight(value)}' for key, value in event.items()]
    return "{" + ",".join(parts) + "}"


def one_line(document: Document) -> str:
    """Write everything on one line, as a tool does that loads and dumps the file."""
    floats = [
        {key: float(decimal(value)) if key in ("ts", "dur") else value for key, value in event.items()}
        for event in document.events
    ]
    times = {"displayTimeUnit": "ms", "baseTimeNanoseconds": BASE_NS}
    return tight({**document.header, **times, "traceEvents": floats, "traceName": document.trace_name})


def absolute(event: Event) -> Event:
    """Return an event by the epoch's clock."""
    return {**event, "ts": event["ts"] + BASE_NS}


def array(document: Document) -> str:
    """Write a bare list of events."""
    return dumped(
        [
            {key: value // 1_000 if key in ("ts", "dur") else value for key, value in absolute(event).items()}
            for event in document.events
        ]
    )


def kineto_2021(document: Document) -> str:
    """Write the layout of 2021."""
    old = [as_of_2021(absolute(event)) for event in document.events if event.get("cat") not in LATER_CATEGORIES]
    body = ",\n".join(lines(event, LINES_2021, whole) for event in old)
    return f'\n{{\n  "schemaVersion": 1,\n  "traceEvents": [\n{body}\n]}}'


def as_of_2021(event: Event) -> Event:
    """Return an event with the names of 2021; streams are text there."""
    event = dict(event)
    if "cat" in event:
        event["cat"] = CATEGORIES_2021[event["cat"]]
    if event["ph"] in "sf":
        event["name"] = "launch"
    if event.get("cat") in ("Kernel", "Memcpy") or event["ph"] == "f":
        event["tid"] = f"stream {event['tid']}"
    if event.get("cat") == "Operator":
        event["args"] = {ARGS_2021[key]: value for key, value in event["args"].items() if key in ARGS_2021}
    elif event.get("cat") in ("Kernel", "Memcpy", "Runtime"):
        args = event["args"]
        event["args"] = {key: args[key] for key in GPU_ARGS_2021 if key in args} | {"external id": args["External id"]}
    return event


WRITERS: dict[Layout, Callable[[Document], str]] = {
    Layout.KINETO: kineto,
    Layout.KINETO_2021: kineto_2021,
    Layout.KINETO_2024: kineto_2024,
    Layout.KINETO_2026: kineto_2026,
    Layout.COMPACT: compact,
    Layout.ONE_LINE: one_line,
    Layout.ARRAY: array,
}


def write_trace(path: Path, job: Job, rank: Recording, layout: Layout = Layout.KINETO) -> None:
    """Write the trace of one rank, gzipped if the name ends in .gz; the same run gives the same bytes."""
    name = f"/profiles/rank{rank.rank}_trace.json"
    document = Document(header(job, rank), events(job, rank), name, job.host_name(rank.rank))
    data = WRITERS[layout](document).encode()
    path.write_bytes(gzip.compress(data, compresslevel=6, mtime=0) if path.suffix == ".gz" else data)
