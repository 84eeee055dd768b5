"""From what one file holds to a `Trace`: absolute nanoseconds, one order, one vocabulary, and who wrote it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.events import GPU_KINDS, HOST_KINDS, Device, Kind, Losses, Origin, ProcessGroup, Trace
from traceaudit.intervals import Array
from traceaudit.load import COLLECTIVE_FIELDS, RawTrace

YEAR_2001_NS = 978_307_200 * 10**9
DAY_NS = 86_400 * 10**9

# File names as training frameworks write them; the first that matches gives the rank.
RANK_IN_NAME = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"rank[-_. ]?\[?(\d+)",  # torchtitan, Megatron, NeMo, Composer, OLMo-core, Primus
        r"^profile_(\d+)\.json",  # Accelerate
        r"_kineto_(\d+)\.json",  # Megatron dumps
    )
)
RANK_PREFIX = re.compile(r"^rank[-_]?\d+[-_.]", re.IGNORECASE)  # put before the host by some launchers
HANDLER_NAME = re.compile(r"^(?P<host>.+)_(?P<process>\d+)\.\d+\.pt\.trace\.json")  # tensorboard_trace_handler


def normalise(raw: RawTrace) -> Trace:
    """Return the events of a file on the absolute clock, sorted by start.

    Negative durations become zero and GPU records longer than a day (a known fault of the driver's tracing) are
    dropped; both are counted.
    """
    columns = raw.columns
    kind, length = columns["kind"], columns["dur"]
    absurd = np.isin(kind, GPU_KINDS) & (length > DAY_NS)
    negative = length < 0
    base = _integer(raw.metadata.get("baseTimeNanoseconds")) or 0
    base = base if 0 <= base < 1 << 62 else 0  # else the sum of base, start and length may not fit int64
    start = columns["ts"] + base
    length = np.where(negative, 0, length)
    order = np.lexsort((-length, start))
    order = order[~absurd[order]]
    events = _table(raw, order, start, start + length)
    losses = Losses(
        dropped=raw.dropped + int(absurd.sum()),
        repaired=raw.repaired,
        negative_durations=int(negative.sum()),
        torn=raw.torn,
    )
    collectives = pd.DataFrame(raw.collectives, columns=list(COLLECTIVE_FIELDS))
    return Trace(_origin(raw, events), events, collectives, raw.thread_names, losses, raw.metadata)


def _table(raw: RawTrace, order: Array, start: Array, end: Array) -> pd.DataFrame:
    columns = raw.columns
    gpu = np.isin(columns["kind"][order], [*GPU_KINDS, Kind.GPU_ANNOTATION, Kind.SYNC])
    stream, device = columns["stream"][order], columns["device"][order]
    process, thread = columns["pid"][order], columns["tid"][order]
    return pd.DataFrame(
        {
            "kind": columns["kind"][order].astype(np.int8),
            "name": _categorical(raw.texts, columns["name"][order]),
            "start_ns": start[order],
            "end_ns": end[order],
            "process": process,
            "thread": thread,
            "stream": np.where(gpu, np.where(stream >= 0, stream, thread), -1),
            "device": np.where(gpu, np.where(device >= 0, device, process), -1),
            "correlation": columns["correlation"][order],
            "external": columns["external"][order],
            "bytes": columns["bytes"][order],
            "sequence": columns["sequence"][order],
            "forward_thread": columns["forward_thread"][order],
            "dims": _categorical(raw.texts, columns["dims"][order]),
            "types": _categorical(raw.texts, columns["types"][order]),
            "grid": _categorical(raw.texts, columns["grid"][order]),
            "collective": columns["collective"][order],
        }
    )


def _categorical(texts: list[str], codes: Array) -> pd.Categorical:
    """Return a categorical of the texts that occur among `codes`; -1 is missing."""
    used = np.unique(codes[codes >= 0])
    compact = np.where(codes >= 0, np.searchsorted(used, codes), -1)
    return pd.Categorical.from_codes(compact, categories=pd.Index([texts[code] for code in used], dtype=object))


def _origin(raw: RawTrace, events: pd.DataFrame) -> Origin:
    metadata = raw.metadata
    distributed = metadata.get("distributedInfo")
    distributed = distributed if isinstance(distributed, Mapping) else {}
    host_rows = events["kind"].isin(HOST_KINDS)
    processes = events.loc[host_rows, "process"].unique()
    starts = events["start_ns"].to_numpy()
    rank = _integer(distributed.get("rank"))
    return Origin(
        file=raw.path,
        rank=rank if rank is not None else rank_in_name(raw.path.name),
        world_size=_integer(distributed.get("world_size")),
        host=_host(metadata, raw.path.name),
        processes=tuple(int(process) for process in processes),
        device=_device(metadata, events),
        groups=_groups(distributed),
        record_shapes=bool(metadata.get("record_shapes")) or bool(events["dims"].notna().any()),
        with_stack=bool(metadata.get("with_stack")),
        absolute_clock=bool(len(starts)) and int(starts[0]) > YEAR_2001_NS,
        job=str(metadata.get("PT_PROFILER_JOB_NAME", "")),
    )


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file name tells, if any.

    >>> rank_in_name("rank000012_trace.json.gz"), rank_in_name("host_851.175.pt.trace.json")
    (12, None)
    """
    for pattern in RANK_IN_NAME:
        match = pattern.search(name)
        if match:
            return int(match[1])
    return None


def _host(metadata: Mapping[str, Any], name: str) -> str | None:
    if isinstance(metadata.get("host_name"), str):
        return str(metadata["host_name"])
    match = HANDLER_NAME.match(name)
    return RANK_PREFIX.sub("", match["host"]) if match else None


def _device(metadata: Mapping[str, Any], events: pd.DataFrame) -> Device | None:
    """Return the description of the GPU the rank ran on; every GPU of the node is listed."""
    listed = metadata.get("deviceProperties")
    described = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    if not described:
        return None
    used = events.loc[events["kind"].isin(GPU_KINDS), "device"]
    own = int(used.mode().iloc[0]) if len(used) else None
    chosen = next((entry for entry in described if _integer(entry.get("id")) == own), described[0])
    return Device(
        name=str(chosen.get("name", "")),
        memory_bytes=_integer(chosen.get("totalGlobalMem")) or 0,
        multiprocessors=_integer(chosen.get("numSms")) or 0,
        capability=(_integer(chosen.get("computeMajor")) or 0, _integer(chosen.get("computeMinor")) or 0),
        warp_size=_integer(chosen.get("warpSize")) or 0,
    )


def _groups(distributed: Mapping[str, Any]) -> tuple[ProcessGroup, ...]:
    listed = distributed.get("pg_config")
    groups = []
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, Mapping):
            ranks = parse_ranks(entry.get("ranks"))
            description = str(entry.get("pg_desc", "") or "")
            groups.append(ProcessGroup(str(entry.get("pg_name", "")), description, ranks or ()))
    return tuple(groups)


def parse_ranks(value: object) -> tuple[int, ...] | None:
    """Return the ranks of a group given as a list or as its text; None where the list was cut short.

    >>> parse_ranks("[0, 4]"), parse_ranks("[0, 1, ..., 63]")
    ((0, 4), None)
    """
    if isinstance(value, str):
        if "..." in value:
            return None
        try:
            value = json.loads(value or "[]")
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not all(isinstance(rank, int) for rank in value):
        return None
    return tuple(value)


def _integer(value: object) -> int | None:
    """Return an integer that metadata may hold as number or text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


def read_trace(path: Path) -> Trace:
    """Read and normalise one file."""
    from traceaudit.load import load

    return normalise(load(path))
