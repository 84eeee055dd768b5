"""From what one file holds to a `Trace`: absolute nanoseconds, one order, one vocabulary, and who wrote it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.events import (
    BACKWARD_NODE,
    GPU_KINDS,
    HOST_KINDS,
    LONG_FRAME_US,
    MEMORY_FIELDS,
    WAIT_FIELDS,
    Device,
    Kind,
    Losses,
    Origin,
    ProcessGroup,
    Trace,
    frame_matters,
    frame_may_recompute,
)
from traceaudit.intervals import Array, covers, union
from traceaudit.reading.columns import RawTrace
from traceaudit.reading.fields import COLLECTIVE_FIELDS
from traceaudit.reading.streams import Place

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


def normalise(raw: RawTrace, *, consume: bool = False) -> Trace:
    """Return the events of a file on the absolute clock, sorted by start.

    Negative durations become zero and GPU records longer than a day (a known fault of the driver's tracing) are
    dropped; both are counted. `consume` takes the columns out of `raw` one by one, so that memory holds them once.
    """
    columns = raw.columns
    kind, length = columns["kind"], columns.pop("dur") if consume else columns["dur"]
    absurd = np.isin(kind, GPU_KINDS) & (length > DAY_NS)
    negative = length < 0
    base = _integer(raw.metadata.get("baseTimeNanoseconds")) or 0
    base = base if 0 <= base < 1 << 62 else 0  # else the sum of base, start and length may not fit int64
    start = (columns.pop("ts") if consume else columns["ts"]) + base
    length = np.where(negative, 0, length)
    order = _by_start(start, length)
    order = order[~(absurd | _forward_frames(raw, start, length))[order]]
    end = start + length
    del kind, length
    events = _table(raw, order, start, end, consume=consume)
    losses = Losses(
        dropped=raw.dropped + int(absurd.sum()),
        repaired=raw.repaired,
        negative_durations=int(negative.sum()),
        torn=raw.torn,
    )
    collectives = pd.DataFrame(raw.collectives, columns=list(COLLECTIVE_FIELDS))
    return Trace(
        _origin(raw, events, base),
        events,
        collectives,
        raw.thread_names,
        losses,
        raw.metadata,
        waits=_integers(raw.waits, WAIT_FIELDS),
        memory=_integers([(at + base, *sizes) for at, *sizes in raw.memory], MEMORY_FIELDS),
    )


def _by_start(start: Array, length: Array) -> Array:
    """Return the rows sorted by start, the longer ones first, as in the file where both are equal.

    Most files are nearly sorted already, which the sort by start alone makes use of.
    """
    order = np.argsort(start, kind="stable")
    same = start[order[1:]] == start[order[:-1]]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    own = order[tied]
    order[tied] = own[np.lexsort((-length[own], start[own]))]
    return order


def _forward_frames(raw: RawTrace, start: Array, length: Array) -> npt.NDArray[np.bool_]:
    """Tell which rows are short frames of modules that run in no backward node: nothing is told by them."""
    kind, name = raw.columns["kind"], raw.columns["name"]
    short = np.zeros(len(kind), np.bool_)
    frames = np.flatnonzero((kind == Kind.FRAME) & (length < LONG_FRAME_US * 1000))
    if not len(frames):
        return short
    modules = np.array([frame_may_recompute(text) and not frame_matters(text) for text in raw.texts], np.bool_)
    backward = np.array([text.startswith(BACKWARD_NODE) for text in raw.texts], np.bool_)
    frames = frames[modules[name[frames]]]
    nodes = np.flatnonzero((kind == Kind.OPERATOR) & (name >= 0))
    nodes = nodes[backward[name[nodes]]]
    process, thread = raw.columns["pid"], raw.columns["tid"]
    short[frames] = True
    for one in np.unique(thread[frames]):
        asked, own = frames[thread[frames] == one], nodes[thread[nodes] == one]
        for other in np.unique(process[asked]):
            held, spans = asked[process[asked] == other], own[process[own] == other]
            short[held] = ~covers(union(start[spans], start[spans] + length[spans]), start[held])
    return short


def _integers(rows: Sequence[tuple[int, ...]], columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(np.array(rows, np.int64).reshape(-1, len(columns)), columns=list(columns))


def _table(raw: RawTrace, order: Array, start: Array, end: Array, *, consume: bool) -> pd.DataFrame:
    columns = raw.columns if consume else dict(raw.columns)

    def taken(name: str) -> Array:
        return columns.pop(name)[order]

    kind = taken("kind").astype(np.int8)
    gpu = np.isin(kind, [*GPU_KINDS, Kind.GPU_ANNOTATION, Kind.SYNC])
    process, thread = taken("pid"), taken("tid")
    table: dict[str, Any] = {
        "kind": kind,
        "name": _categorical(raw.texts, taken("name")),
        "start_ns": start[order],
        "end_ns": end[order],
        "process": _compact(process),
        "thread": _compact(thread),
    }
    for name, otherwise in (("stream", thread), ("device", process)):
        found = taken(name)
        table[name] = _compact(np.where(gpu, np.where(found >= 0, found, otherwise), -1))
    for name in ("correlation", "external"):
        table[name] = _compact(taken(name))
    table["bytes"] = taken("bytes").astype(np.int64)  # sums of which need all bits
    for name in ("sequence", "forward_thread"):
        table[name] = _compact(taken(name))
    for name in ("dims", "types", "concrete", "grid"):
        table[name] = _categorical(raw.texts, taken(name))
    table["collective"] = _compact(taken("collective"))
    return pd.DataFrame(table, copy=False)


def _compact(column: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Return integers in 32 bits if they fit."""
    if not len(column) or (column.min() >= -(1 << 31) and column.max() < 1 << 31):
        return column.astype(np.int32, copy=False)
    return column


def _categorical(texts: list[str], codes: Array) -> pd.Categorical:
    """Return a categorical of the texts that occur among `codes`; -1 is missing."""
    used = np.flatnonzero(np.bincount(codes + 1, minlength=len(texts) + 1)[1:])
    place = np.full(len(texts) + 1, -1, np.int32)  # the last one is for -1
    place[used] = np.arange(len(used))
    categories = pd.Index([texts[code] for code in used], dtype=object)
    return pd.Categorical.from_codes(place[codes], categories=categories)


def _origin(raw: RawTrace, events: pd.DataFrame, base_ns: int) -> Origin:
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
        base_ns=base_ns,
        versions=_versions(metadata, distributed),
    )


def _versions(metadata: Mapping[str, Any], distributed: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the versions that the profiler recorded; CUDA and HIP write theirs as one number."""
    found = []
    for name, key, major in (
        ("CUDA", "cuda_runtime_version", 1_000),
        ("driver", "cuda_driver_version", 1_000),
        ("HIP", "hip_runtime_version", 10_000_000),
    ):
        number = _integer(metadata.get(key))
        if number is not None and number > 0:
            found.append((name, f"{number // major}.{number % major // (major // 100)}"))
    nccl = distributed.get("nccl_version")
    return (*found, ("NCCL", nccl)) if isinstance(nccl, str) and nccl else tuple(found)


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


def read_trace(place: Path | Place) -> Trace:
    """Read and normalise one file."""
    from traceaudit.reading.decode import load

    return normalise(load(place), consume=True)
