"""What was read from a trace, kept as Parquet, so that the next analysis need not read the trace again.

For each trace there is one file with its events, as `traceaudit.events` describes them, and one for each selection of
steps with the rank's account. A file tells which trace it belongs to (size, time of change or ETag, first and last
64 KiB) and which version of the reader wrote it, and holds a digest of its own content: one that belongs to something
else, is damaged or was written by hand is not used, and written anew. Every file may be deleted at any time.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints
from uuid import uuid4

import numpy as np
import pandas as pd

from traceaudit import __version__, events
from traceaudit.account import RankAccount, account
from traceaudit.errors import InputError
from traceaudit.events import Trace
from traceaudit.reading.normalise import read_trace
from traceaudit.reading.packing import Arrays, pack, unpack, unpack_each
from traceaudit.reading.streams import Place, remote
from traceaudit.steps import Selection

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = ".traceaudit"
LEAST_BYTES = 32 << 20  # of all traces together, below which reading them again is as quick
EDGE_BYTES = 64 << 10
IDENTITY, READER, CONTENT, DIGEST = (
    f"traceaudit.{name}".encode() for name in ("identity", "reader", "content", "digest")
)
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class Cache:
    """Where read traces are kept.

    Attributes:
        directory: the folder; None for ``.traceaudit`` beside each trace, or the user's cache folder where that cannot
            be written.
    """

    directory: Path | None = None

    def folders(self, place: Place) -> list[Path]:
        """Return the folders to look in and to write to, the first that works."""
        if self.directory is not None:
            return [self.directory]
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "traceaudit"
        return [own] if place.remote else [Path(place.address).parent / FOLDER, own]


@dataclass(frozen=True)
class Kept:
    """How an account was come by.

    Attributes:
        source: "account" or "events" where that was in the cache, "trace" where the trace was read.
        bytes: of the cache files that were read or written.
    """

    source: str
    bytes: int


def chosen(asked: str | Path | bool | None, total_bytes: int) -> Cache | None:
    """Return the cache to use: as asked for (True, False or a folder), else as the environment says, else by size."""
    if asked is None and (told := os.environ.get("TRACEAUDIT_CACHE")):
        asked = False if told in ("off", "0") else told
    if asked is None:
        asked = total_bytes >= LEAST_BYTES
    if isinstance(asked, bool):
        return Cache() if asked else None
    return Cache(Path(asked).absolute())


def accounted(
    place: Place, selection: Selection, kept: Cache | None, *, keep_pieces: bool = False
) -> tuple[RankAccount, Kept]:
    """Return the account of a trace, from the cache if it is there; what had to be computed is put there.

    An account with its pieces is large and seldom asked for: only the events behind it are kept.

    Raises:
        TraceAuditError: the trace cannot be read.
    """
    if kept is None:
        return account(read_trace(place), selection, keep_pieces=keep_pieces), Kept("trace", 0)
    try:
        about = _identity(place)
    except OSError:  # the reader will say it better
        return account(read_trace(place), selection, keep_pieces=keep_pieces), Kept("trace", 0)
    if keep_pieces:
        trace, found_in = _trace(kept, place, about)
        return account(trace, selection, keep_pieces=True), found_in
    label = f"{_label(selection)}.account"
    found = _read(kept, place, label, about)
    if found is not None:
        with suppress(*UNUSABLE):
            return _account(found, place), Kept("account", found.size)
    trace, written = _trace(kept, place, about)
    own = account(trace, selection)
    with suppress(*UNPACKABLE):  # something in it cannot be packed: it is computed anew each time
        text, arrays = pack(own)
        table = {name: [array] for name, array in arrays.items()}
        written = replace(
            written, bytes=written.bytes + _write(kept, place, label, about, _one_row(table), text, arrays)
        )
    return own, written


def account_bytes(place: Place, selection: Selection, kept: Cache) -> int | None:
    """Return the size of the cache file that holds the account of a trace, nothing if there is none to be used."""
    with suppress(OSError, InputError):
        found = _found(kept, place, f"{_label(selection)}.account", _identity(place))
        return None if found is None else found.stat().st_size
    return None


def _trace(kept: Cache, place: Place, about: str) -> tuple[Trace, Kept]:
    found = _read(kept, place, "events", about)
    if found is not None:
        with suppress(*UNUSABLE):
            return _events(found, place), Kept("events", found.size)
    trace = read_trace(place)
    with suppress(*UNPACKABLE):
        return trace, Kept("trace", _keep_events(kept, place, about, trace))
    return trace, Kept("trace", 0)


def _keep_events(kept: Cache, place: Place, about: str, trace: Trace) -> int:
    text, arrays = pack({name: getattr(trace, name) for name in _types()})
    beside = {name: [array.dtype.str, array.tolist()] for name, array in arrays.items()}
    columns = {str(name): _codes(trace.events[name]) for name in trace.events}
    content = _json([text.decode(), beside, {name: _categories(trace.events[name]) for name in columns}])
    return _write(kept, place, "events", about, _rows(trace.events), content, columns)


@dataclass(frozen=True)
class _File:
    table: "pa.Table"
    content: bytes
    digest: bytes
    size: int


UNPACKABLE = (TypeError, ValueError, OverflowError)
# What reading a damaged or foreign file raises; pyarrow's errors are children of these.
UNUSABLE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, NotImplementedError, zlib.error)


def _read(kept: Cache, place: Place, label: str, about: str) -> _File | None:
    """Return a cache file of this trace and this reader, nothing if there is none."""
    import pyarrow.parquet as pq

    for path in _candidates(kept, place, label):
        with suppress(*UNUSABLE), pq.ParquetFile(path, memory_map=False) as file:
            told = file.schema_arrow.metadata or {}
            if _is_of(told, about):
                return _File(file.read(), zlib.decompress(told[CONTENT]), told[DIGEST], path.stat().st_size)
    return None


def _found(kept: Cache, place: Place, label: str, about: str) -> Path | None:
    """Return where there is a cache file of this trace and this reader, as far as its head tells."""
    import pyarrow.parquet as pq

    for path in _candidates(kept, place, label):
        with suppress(*UNUSABLE):
            if _is_of(pq.read_schema(path, memory_map=False).metadata or {}, about):
                return path
    return None


def _candidates(kept: Cache, place: Place, label: str) -> Iterator[Path]:
    for folder in kept.folders(place):
        path = folder / _name(place, label, beside=folder.name == FOLDER and kept.directory is None)
        with suppress(OSError, ValueError):
            if path.is_file():
                yield path


def _is_of(told: Mapping[bytes, bytes], about: str) -> bool:
    return (told[IDENTITY], told[READER]) == (about.encode(), reader_version().encode())


def _account(found: _File, place: Place) -> RankAccount:
    arrays = {
        name: found.table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for name in found.table.column_names
    }
    _check(found, arrays)
    own = unpack(found.content, arrays, RankAccount)
    return replace(own, origin=replace(own.origin, file=place.path))


def _events(found: _File, place: Place) -> Trace:
    text, beside, categories = _parsed(found.content)
    columns: dict[str, Any] = {}
    arrays: Arrays = {}
    for name in found.table.column_names:
        column = found.table[name].combine_chunks()
        if categories[name] is None:
            columns[name] = arrays[name] = column.to_numpy(zero_copy_only=False)
            continue
        index = pd.Index(categories[name], dtype=object)
        places = np.append(index.get_indexer(pd.Index(column.dictionary.to_pylist(), dtype=object)), -1)
        codes = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        arrays[name] = places[codes].astype(np.int32)
        columns[name] = pd.Categorical.from_codes(arrays[name], categories=index)
    _check(found, arrays)
    others = {name: np.array(values, np.dtype(dtype)) for name, (dtype, values) in beside.items()}
    parts = unpack_each(text.encode(), others, _types())
    origin = replace(parts.pop("origin"), file=place.path)
    return Trace(origin=origin, events=pd.DataFrame(columns, copy=False), **parts)


@cache
def _types() -> dict[str, Any]:
    """Return the types of the parts of a trace, whose annotations name pandas without importing it."""
    return {name: kind for name, kind in get_type_hints(Trace, {**vars(events), "pd": pd}).items() if name != "events"}


def _check(found: _File, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    if _digest(found.content, arrays) != found.digest:
        raise ValueError("the content is not what was written")


def _digest(content: bytes, arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    total = blake2b(content, digest_size=16)
    for name in sorted(arrays):
        total.update(f"{name} {arrays[name].dtype.str} ".encode())
        total.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return total.hexdigest().encode()


def _write(
    kept: Cache,
    place: Place,
    label: str,
    about: str,
    table: "pa.Table",
    content: bytes,
    arrays: Mapping[str, np.ndarray[Any, Any]],
) -> int:
    """Write a cache file under a temporary name and put it in its place; return its size, 0 if it cannot be written."""
    import pyarrow.parquet as pq

    told = {
        IDENTITY: about,
        READER: reader_version(),
        CONTENT: zlib.compress(content, 1),
        DIGEST: _digest(content, arrays),
    }
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **told})
    for folder in kept.folders(place):
        path = folder / _name(place, label, beside=folder.name == FOLDER and kept.directory is None)
        passing = path.with_name(f"{path.name}.{uuid4().hex[:8]}.part")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                pq.write_table(table, passing, compression="zstd", compression_level=1)
                passing.replace(path)
            finally:
                passing.unlink(missing_ok=True)
        except OSError:  # read-only, or full
            continue
        return path.stat().st_size
    return 0


def _name(place: Place, label: str, *, beside: bool) -> str:
    """Return the name of a cache file; in a folder that serves many, places tell traces of one name apart."""
    apart = (
        f"{place.address}\0{place.member}" if not beside else place.member and f"{place.path.parent}\0{place.member}"
    )
    mark = blake2b(apart.encode(), digest_size=8).hexdigest() + "-" if apart else ""
    name = place.name if not (beside and place.member) else f"{Path(place.address).name}-{place.name}"
    return f"{mark}{name}.{label}.parquet"


def _label(selection: Selection) -> str:
    if selection == Selection():
        return "all"
    told = repr((sorted(selection.steps) if selection.steps is not None else None, replace(selection, steps=None)))
    return blake2b(told.encode(), digest_size=6).hexdigest()


def _identity(place: Place) -> str:
    """Return what tells this content of a file from another.

    Raises:
        InputError: the store of a remote file cannot be reached.
        OSError: the file cannot be read.
    """
    if place.remote:
        store, path = remote(place.address)
        try:
            told = store.info(path)
            size = int(told.get("size") or 0)
            edges = store.cat_file(path, start=0, end=min(EDGE_BYTES, size))
            edges += store.cat_file(path, start=max(size - EDGE_BYTES, 0), end=size)
        except Exception as error:  # whatever a store's library raises
            raise OSError(str(error)) from error
        version = repr([(key, str(told[key])) for key in VERSIONS if key in told])
    else:
        with open(place.address, "rb") as file:
            state = os.fstat(file.fileno())
            size, version = state.st_size, str(state.st_mtime_ns)
            edges = file.read(EDGE_BYTES)
            file.seek(max(size - EDGE_BYTES, 0))
            edges += file.read(EDGE_BYTES)
    edge = blake2b(edges, digest_size=16).hexdigest()
    return repr((size, version, edge, place.member))


@cache
def reader_version() -> str:
    """Return a digest of the source of this package: whatever changes a result makes another reader."""
    total = blake2b(f"{__version__} {pd.__version__} {np.__version__}".encode(), digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        if "report" not in path.parts[-2:] and "simulate" not in path.parts[-2:]:
            total.update(path.name.encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def _one_row(columns: Mapping[str, list[np.ndarray[Any, Any]]]) -> "pa.Table":
    import pyarrow as pa

    return pa.table(
        {name: pa.array(values, pa.list_(pa.from_numpy_dtype(values[0].dtype))) for name, values in columns.items()}
    )


def _rows(table: pd.DataFrame) -> "pa.Table":
    import pyarrow as pa

    columns = {}
    for name in table:
        column = table[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            codes = column.cat.codes.to_numpy().astype(np.int32)
            texts = pa.array(column.cat.categories.to_numpy(dtype=object), pa.string())
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), texts)
        else:
            columns[name] = pa.array(column.to_numpy())
    return pa.table(columns)


def _codes(column: "pd.Series[Any]") -> np.ndarray[Any, Any]:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy().astype(np.int32)
    return column.to_numpy()


def _categories(column: "pd.Series[Any]") -> list[str] | None:
    return [str(text) for text in column.cat.categories] if isinstance(column.dtype, pd.CategoricalDtype) else None


def _json(value: object) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


def _parsed(content: bytes) -> Any:  # noqa: ANN401  JSON
    import msgspec

    return msgspec.json.decode(content)
