"""The attribution as tracks for Perfetto or chrome://tracing, alone or in one archive with the traces behind it.

The overlay is a file of the trace event format: one process a rank, tracks for steps, buckets, leaves, host gaps,
waits, who was awaited, pipeline work and recompute, on the aligned clock. Timestamps are microseconds with three
decimals from `origin_ns`, so that nanoseconds are exact; slices of a track never overlap. Within a rank one offset
holds for the whole recording, that of its middle: a drift of 20 µs a second moves the ends of a second by 10 µs.

Perfetto (58.2 and later) merges files in an archive by its ``perfetto_manifest``, which holds the offset of each
(https://perfetto.dev/docs/reference/perfetto-manifest). It applies none to a compressed file, so that traces are
stored inflated.
"""

import gzip
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pandas as pd

from traceaudit import __version__
from traceaudit.account import RankAccount
from traceaudit.attribute import Job
from traceaudit.audit import Audit
from traceaudit.errors import InputError
from traceaudit.intervals import Array
from traceaudit.leaves import Bucket, Leaf
from traceaudit.output_files import created
from traceaudit.ranks.collectives import group_label
from traceaudit.reading.streams import Inflating, Place, opened
from traceaudit.slices import Slicer

TRACKS = ("steps", "buckets", "leaves", "host gaps", "waits", "awaited", "pipeline", "recompute")
OVERLAY, MANIFEST = "attribution.json", "perfetto_manifest.json"


@dataclass(frozen=True)
class _Shown:
    """What all ranks of an overlay share."""

    slicer: Slicer
    job: Job
    gaps: pd.DataFrame
    origin_ns: int
    offset_ns: Mapping[int, int]


def write_overlay(audit: Audit, path: Path, *, force: bool = False) -> None:
    """Write the overlay of an audit that kept its pieces, gzipped.

    Raises:
        InputError: the file exists and `force` is not set, it cannot be written, or the pieces are not there.
    """
    shown = _shown(audit)
    with created(path, force=force) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        for part in _text(shown):
            packed.write(part.encode())


def write_bundle(audit: Audit, path: Path, *, force: bool = False) -> None:
    """Write a ``.tar`` of the overlay, the traces behind it and the manifest that puts them on one timeline.

    Raises:
        InputError: as `write_overlay`, or a trace cannot be read any more.
    """
    shown = _shown(audit)
    names = _member_names(shown)
    with created(path, force=force) as file, tarfile.open(fileobj=file, mode="w") as archive:
        manifest = json.dumps(_manifest(audit, shown, names), indent=1, ensure_ascii=False).encode()
        _add(archive, MANIFEST, [manifest])
        _add(archive, OVERLAY, (part.encode() for part in _text(shown)))
        for rank, name in names.items():
            _add(archive, name, _inflated(shown.slicer.tasks[rank].place))


def _shown(audit: Audit) -> _Shown:
    slicer = audit.slicer
    if slicer is None or slicer.job is None:
        raise InputError("the overlay needs the pieces of the traces: analyze(..., keep_pieces=True).")
    offset = {rank: _offset(own, slicer.job) for rank, own in sorted(slicer.accounts.items())}
    origin = min(own.first_ns - offset[rank] for rank, own in slicer.accounts.items())
    return _Shown(slicer, slicer.job, audit.gaps, origin, offset)


def _offset(own: RankAccount, job: Job) -> int:
    """Return own minus aligned time of a rank, in the middle of its recording."""
    middle = np.array([(own.first_ns + own.last_ns) // 2], np.int64)
    return int(job.clock.offsets(np.array([own.rank], np.int64), middle)[0])


def _member_names(shown: _Shown) -> dict[int, str]:
    """Return the names of the traces in the archive; ranks without a readable trace are left out."""
    ranks = [rank for rank in shown.offset_ns if rank in shown.slicer.tasks]
    return {rank: f"rank{rank}/{_plain(shown.slicer.tasks[rank].place.name)}" for rank in ranks}


def _plain(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".zst")


def _manifest(audit: Audit, shown: _Shown, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the manifest; an offset says how much later a file's own zero is on the overlay's timeline."""
    traces = [
        {
            "path": name,
            "machine": {"name": f"rank {rank}"},
            "clocks": {
                "sync_to": {"file": OVERLAY},
                "offset_ns": shown.slicer.accounts[rank].origin.base_ns - shown.offset_ns[rank] - shown.origin_ns,
            },
        }
        for rank, name in names.items()
    ]
    clock = audit.result["clock"]
    return {
        "perfetto_manifest": {
            "version": 1,
            "files": [{"path": OVERLAY, "machine": {"name": "attribution"}}, *traces],
            "attributes": {
                "traceaudit.version": __version__,
                "traceaudit.source": str(audit.result["source"]),
                "traceaudit.clock": str(clock["method"]),
                "traceaudit.clock_residual_ns": int(clock["residual_ns"]),
            },
        }
    }


def _inflated(place: Place) -> Iterator[bytes]:
    try:
        with opened(place) as file:
            stream = Inflating(file)
            while part := stream.part():
                yield part
    except OSError as error:
        raise InputError(f"{place.name}: cannot be read: {error.strerror or error}") from error


def _add(archive: tarfile.TarFile, name: str, parts: Iterable[bytes]) -> None:
    """Add a file whose size is only known once it is there."""
    with TemporaryFile() as passing:
        for part in parts:
            passing.write(part)
        entry = tarfile.TarInfo(name)
        entry.size = passing.tell()
        passing.seek(0)
        archive.addfile(entry, passing)


# The text of the overlay


def _text(shown: _Shown) -> Iterator[str]:
    """Yield the file: events of one rank after the other."""
    clock = shown.job.clock
    about = {"origin_ns": shown.origin_ns, "clock": clock.method, "clock_residual_ns": clock.residual_ns}
    yield f'{{"displayTimeUnit":"ns","otherData":{json.dumps({"traceaudit": __version__, **about})},"traceEvents":['
    waits, awaited, flows = _waits(shown)
    first = True
    for rank, own in shown.slicer.accounts.items():
        tracks = _tracks(shown, own, waits.get(rank), awaited.get(rank))
        events = [*_names(own, shown), *(line for track in TRACKS for line in _slices(rank, track, tracks[track]))]
        yield ("" if first else ",") + "\n" + ",\n".join(events)
        first = False
    for line in flows:
        yield ",\n" + line
    yield "\n]}\n"


def _us(ns: int) -> str:
    """Write nanoseconds as microseconds, exactly.

    >>> _us(1_234_567), _us(5)
    ('1234.567', '0.005')
    """
    return f"{ns // 1000}.{ns % 1000:03d}"


def _names(own: RankAccount, shown: _Shown) -> list[str]:
    stage = shown.job.plan.stage.get(own.rank)
    staged = f", stage {stage}" if stage is not None else ""
    named: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {own.rank}: attribution"}),
        ("process_labels", 0, {"labels": f"{own.origin.host or 'host unknown'}{staged}"}),
        ("process_sort_index", 0, {"sort_index": own.rank}),
    ]
    for number, track in enumerate(TRACKS, start=1):
        named += [("thread_name", number, {"name": track}), ("thread_sort_index", number, {"sort_index": number})]
    return [
        json.dumps({"ph": "M", "name": name, "pid": own.rank, "tid": number, "args": args})
        for name, number, args in named
    ]


def _slices(rank: int, track: str, table: pd.DataFrame) -> Iterator[str]:
    """Yield the slices of a track (``at_ns, ns, name, args``); texts are escaped once each."""
    head = f'{{"ph":"X","cat":"traceaudit","pid":{rank},"tid":{TRACKS.index(track) + 1},"ts":'
    known: dict[str, str] = {}
    for at, ns, name, args in zip(*(table[column].tolist() for column in ("at_ns", "ns", "name", "args")), strict=True):
        text = known.get(name)
        if text is None:
            text = known[name] = json.dumps(name)
        yield f'{head}{_us(at)},"dur":{_us(ns)},"name":{text}{args}}}'


def _args(values: Mapping[str, Any]) -> str:
    """Return the text of arguments behind a slice's name; what is empty or unknown is left out."""
    kept = {name: value for name, value in values.items() if value not in (None, "", -1)}
    return f',"args":{json.dumps(kept)}' if kept else ""


def _track(start: Array, end: Array, names: Sequence[str], args: Sequence[str] | str = "") -> pd.DataFrame:
    return pd.DataFrame({"at_ns": start, "ns": end - start, "name": names, "args": args})


def _tracks(
    shown: _Shown, own: RankAccount, waits: pd.DataFrame | None, awaited: pd.DataFrame | None
) -> dict[str, pd.DataFrame]:
    """Return the tracks of a rank by name, all times on the overlay's clock."""
    shift = shown.offset_ns[own.rank] + shown.origin_ns
    found = shown.slicer.of(own.rank)
    start, end = (found[name].to_numpy() - shift for name in ("start_ns", "end_ns"))
    leaf = found["leaf"].to_numpy()
    titles = {code: (Leaf(code).bucket.value, Leaf(code).label) for code in np.unique(leaf).tolist()}
    bucket = np.array([titles[code][0] for code in leaf.tolist()], dtype=object)
    step = found["step"].to_numpy()
    windows = shown.slicer.attribution.windows
    windows = windows[windows["rank"] == own.rank]
    begun, ended = (windows[name].to_numpy(dtype=np.int64) - shift for name in ("start_ns", "end_ns"))
    none = _track(start[:0], end[:0], [])
    fine = _args_of_leaves(titles, leaf, found["name"].to_numpy(dtype=object))
    again = np.flatnonzero(bucket == Bucket.RECOMPUTE)
    return {
        "steps": _track(begun, ended, [f"step {number}" for number in windows["step"]]),
        "buckets": _joined(start, end, bucket, step),
        "leaves": _track(start, end, [titles[code][1] for code in leaf.tolist()], fine),
        "host gaps": _gaps(shown, own.rank, found, shift),
        "waits": none if waits is None else waits,
        "awaited": none if awaited is None else awaited,
        "pipeline": _work(own, shift, none),
        "recompute": _joined(
            start[again], end[again], np.array([titles[code][1] for code in leaf[again].tolist()], object), step[again]
        ),
    }


def _args_of_leaves(titles: Mapping[int, tuple[str, str]], leaf: Array, names: Any) -> list[str]:  # noqa: ANN401  texts
    """Return the arguments of slices of leaves: equal ones are written once."""
    known: dict[tuple[int, str], str] = {}
    result = []
    for code, name in zip(leaf.tolist(), names.tolist(), strict=True):
        text = known.get((code, name))
        if text is None:
            text = known[code, name] = _args({"bucket": titles[code][0], "activity": name})
        result.append(text)
    return result


def _joined(start: Array, end: Array, name: "np.ndarray[Any, Any]", step: Array) -> pd.DataFrame:
    """Join slices that touch and have the same name and step."""
    if not len(start):
        return _track(start, end, [])
    head = np.concatenate(([True], (name[1:] != name[:-1]) | (start[1:] != end[:-1]) | (step[1:] != step[:-1])))
    last = np.concatenate((head[1:], [True]))
    args = [_args({"step": number}) for number in step[head].tolist()]
    return _track(start[head], end[last], name[head].tolist(), args)


def _gaps(shown: _Shown, rank: int, found: pd.DataFrame, shift: int) -> pd.DataFrame:
    """Return the idle time of the host's making, the largest gaps with the call behind them."""
    code = found["leaf"].to_numpy()
    chosen = np.array([Leaf(leaf).bucket in (Bucket.HOST_GAP, Bucket.UNATTRIBUTED) for leaf in code.tolist()], np.bool_)
    own = found[chosen & (found["row"].to_numpy() < 0)]
    gaps = shown.gaps[shown.gaps["rank"] == rank] if len(shown.gaps) else shown.gaps
    columns = ("call", "inside", "frame", "thread", "dependency")
    told = {
        (start, leaf): dict(zip(columns, values, strict=True))
        for start, leaf, *values in zip(
            *(gaps[name].tolist() for name in ("start_ns", "leaf", *columns) if name in gaps), strict=True
        )
    }
    labels = [Leaf(leaf).label for leaf in own["leaf"].tolist()]
    args = [
        _args({"ended_by": ender, **told.get((start, label), {})})
        for start, label, ender in zip(own["start_ns"].tolist(), labels, own["name"].tolist(), strict=True)
    ]
    return _track(own["start_ns"].to_numpy() - shift, own["end_ns"].to_numpy() - shift, labels, args)


def _work(own: RankAccount, shift: int, none: pd.DataFrame) -> pd.DataFrame:
    """Return forward and backward work of a pipeline; pieces that would overlap end where the next begins."""
    if not len(own.schedule):
        return none
    work = own.schedule.sort_values("start_ns", kind="stable")
    start, end = (work[name].to_numpy(dtype=np.int64) - shift for name in ("start_ns", "end_ns"))
    end = np.minimum(end, np.append(start[1:], end[-1:].max()))
    names = [f"{kind}{number}" for kind, number in zip(work["kind"], work["microbatch"], strict=True)]
    columns = ("step", "stage", "microbatch", "recompute_ns")
    args = [_args(dict(zip(columns, values, strict=True))) for values in work[list(columns)].to_numpy().tolist()]
    track = _track(start, end, names, args)
    return track.iloc[np.flatnonzero(end > start)]


# Waits, whom they were for, and the arrows between them


def _waits(shown: _Shown) -> tuple[dict[int, pd.DataFrame], dict[int, pd.DataFrame], list[str]]:
    """Return the tracks of waits and of being awaited, by rank, and the events of the arrows from one to the other.

    A rank is awaited from the first other that waits for it until the last of them goes on.
    """
    frames = [_waits_of(shown, rank) for rank in shown.slicer.accounts]
    table = pd.concat(frames, ignore_index=True)
    waits = dict(zip(shown.slicer.accounts, frames, strict=True))
    known = table[table["awaited"].isin(list(shown.offset_ns)) & (table["awaited"] != table["rank"])]
    known = known.assign(end=known["at_ns"] + known["ns"])
    groups = known.groupby(["awaited", "instance"], as_index=False).agg(
        at_ns=("at_ns", "min"), end=("end", "max"), count=("rank", "nunique"), what=("what", "first")
    )
    awaited: dict[int, pd.DataFrame] = {}
    flows: list[str] = []
    for rank in groups["awaited"].unique().tolist():
        own = groups[groups["awaited"] == rank].sort_values("end", kind="stable")
        end = own["end"].to_numpy(dtype=np.int64)
        start = np.maximum(own["at_ns"].to_numpy(dtype=np.int64), np.concatenate((end[:1] * 0, end[:-1])))
        names = [
            f"awaited by {count} {'rank' if count == 1 else 'ranks'}: {what}"
            for count, what in zip(own["count"].tolist(), own["what"].tolist(), strict=True)
        ]
        awaited[rank] = _track(start, end, names).iloc[np.flatnonzero(end > start)]
        at = dict(zip(own["instance"].tolist(), zip(start.tolist(), end.tolist(), strict=True), strict=True))
        flows += _arrows(known[known["awaited"] == rank], rank, at)
    return waits, awaited, flows


def _arrows(waits: pd.DataFrame, culprit: int, at: Mapping[int, tuple[int, int]]) -> Iterator[str]:
    """Yield an arrow from where a rank was awaited to each wait for it, drawn just before both end."""
    for key, rank, instance, end in zip(
        *(waits[name].tolist() for name in ("key", "rank", "instance", "end")), strict=True
    ):
        start, last = at[instance]
        when = min(last, end) - 1
        if last <= start or when < start:
            continue
        common = f'"cat":"traceaudit","name":"waited for","id":{key},"ts":{_us(when)}'
        yield f'{{"ph":"s",{common},"pid":{culprit},"tid":{TRACKS.index("awaited") + 1}}}'
        yield f'{{"ph":"f","bp":"e",{common},"pid":{rank},"tid":{TRACKS.index("waits") + 1}}}'


def _waits_of(shown: _Shown, rank: int) -> pd.DataFrame:
    """Return the waits of a rank: each stretch of one communication, or at the end of the last step, as one slice."""
    table, arrivals = shown.job.communications, shown.job.arrivals
    own = shown.slicer.of(rank)
    bucket = [Leaf(leaf).bucket for leaf in own["leaf"].tolist()]
    waiting = np.isin(bucket, (Bucket.STRAGGLER, Bucket.PIPELINE_BUBBLE)) & (own["name"] == "").to_numpy()
    own = own[waiting]
    start, end, row = (own[name].to_numpy(dtype=np.int64) for name in ("start_ns", "end_ns", "row"))
    new = np.concatenate(([True], (row[1:] != row[:-1]) | (start[1:] != end[:-1]))) if len(own) else waiting[:0]
    number = np.cumsum(new) - 1
    last = np.concatenate((new[1:], [True])) if len(own) else new
    parts: list[dict[str, int]] = [{} for _ in range(int(new.sum()))]
    for place, leaf, ns in zip(number.tolist(), own["leaf"].tolist(), (end - start).tolist(), strict=True):
        parts[place][f"{Leaf(leaf).label}_ns"] = parts[place].get(f"{Leaf(leaf).label}_ns", 0) + ns
    heads = row[new]
    at = np.maximum(heads, 0)
    told = (heads >= 0) & (arrivals.known[at] if len(arrivals.known) else False)
    awaited = np.where(told, arrivals.awaited_rank[at] if len(arrivals.known) else -1, -1)
    instance = np.where(heads >= 0, shown.job.matching.instance[at] if len(table) else -1, -1)
    what = [_what(table, int(place)) if place >= 0 else "the end of the last step" for place in heads]
    names = [f"waits for rank {who}" if who >= 0 else "waits" for who in awaited.tolist()]
    args = [
        _args({"in": text, "awaited_rank": who, **leaves})
        for text, who, leaves in zip(what, awaited.tolist(), parts, strict=True)
    ]
    shift = shown.offset_ns[rank] + shown.origin_ns
    slices = _track(start[new] - shift, end[last] - shift, names, args)
    keys = rank * 10_000_000 + np.arange(len(slices)) + 1
    return slices.assign(rank=rank, awaited=awaited, instance=instance, what=what, key=keys)


def _what(table: pd.DataFrame, row: int) -> str:
    own = table.iloc[row]
    label = group_label(str(own["group_description"]), own["members"] or (), assumed=bool(own["assumed"]))
    return f"{own['kind'] or 'communication'}, {label}"
