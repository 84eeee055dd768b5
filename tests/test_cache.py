"""What was read is kept, found again, and never trusted when it is not what was written."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traceaudit.account import account
from traceaudit.events import Trace
from traceaudit.pipeline import analyze
from traceaudit.reading.cache import FOLDER, LEAST_BYTES, Cache, accounted, chosen
from traceaudit.reading.normalise import read_trace
from traceaudit.reading.packing import pack, unpack
from traceaudit.reading.streams import Place
from traceaudit.report.json_file import to_json
from traceaudit.simulate import SCENARIOS
from traceaudit.steps import Selection

Directory = Callable[[str], Path]


def equal(one: Any, other: Any) -> bool:  # noqa: ANN401  whatever stands in an account
    """Tell whether two values are of the same type and equal, tables and arrays by content and dtype."""
    if type(one) is not type(other):
        return False
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other)
        return True
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if is_dataclass(one):
        return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))


@pytest.fixture
def run(simulated: Directory, tmp_path: Path) -> Path:
    """Return a copy of a run's traces."""
    return shutil.copytree(simulated("late_rank"), tmp_path / "run")


@pytest.mark.parametrize("scenario", sorted(SCENARIOS)[::3])
def test_kept_accounts_equal_the_read_ones(scenario: str, simulated: Directory, tmp_path: Path) -> None:
    """An account is the same read, kept, and made from kept events, to the type of each value."""
    kept = Cache(tmp_path / "kept")
    path = sorted(simulated(scenario).glob("rank*"))[-1]
    place = Place(str(path))
    read = account(read_trace(place), Selection())
    found = []
    for source in ("trace", "account", "events"):
        if source == "events":
            next(kept.folders(place)[0].glob("*.account.parquet")).unlink()
        own, how = accounted(place, Selection(), kept)
        found.append(how.source)
        assert equal(own, read)
    assert found == ["trace", "account", "events"]


def test_kept_events_are_a_table(run: Path) -> None:
    """Other tools can read the kept events: names are texts, times are integers."""
    path = sorted(run.glob("rank*"))[0]
    trace = read_trace(path)
    accounted(Place(str(path)), Selection(), Cache())
    table = pq.read_table(run / FOLDER / f"{path.name}.events.parquet")
    assert table["name"].to_pylist() == trace.events["name"].tolist()
    assert table["start_ns"].to_pylist() == trace.events["start_ns"].tolist()


def test_result_is_the_same_cached_and_uncached(run: Path) -> None:
    """The second analysis reads no trace and gives the same bytes."""
    uncached = to_json(analyze(run, cache=False).result)
    first, second = analyze(run, cache=True), analyze(run, cache=True)
    assert uncached == to_json(first.result) == to_json(second.result)
    assert first.reading is not None
    assert second.reading is not None
    assert (first.reading.accounts_kept, second.reading.accounts_kept) == (0, second.reading.files)
    assert second.reading.cache_bytes > 0


def test_another_selection_reads_the_kept_events(run: Path) -> None:
    """Other steps need another account, not the trace."""
    analyze(run, cache=True)
    reading = analyze(run, cache=True, selection=Selection(whole_trace=True)).reading
    assert reading is not None
    assert reading.events_kept == reading.files


def test_a_changed_trace_is_read_again(run: Path) -> None:
    """A trace with other content, of the same size or not, is another trace."""
    path = sorted(run.glob("rank*"))[0]
    place, kept = Place(str(path)), Cache()
    accounted(place, Selection(), kept)
    before = path.stat()
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["traceEvents"].pop()
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    own, how = accounted(place, Selection(), kept)
    assert how.source == "trace"
    assert accounted(place, Selection(), kept)[1].source == "account"
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert accounted(place, Selection(), kept)[1].source == "trace"
    assert equal(accounted(place, Selection(), kept)[0], own)


def damaged(path: Path) -> None:
    """Change bytes throughout."""
    content = bytearray(path.read_bytes())
    for at in range(50, len(content), 97):
        content[at] ^= 0x5A
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Lose the end."""
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path: Path) -> None:
    """Lose everything."""
    path.write_bytes(b"")


def edited(path: Path) -> None:
    """Change numbers by hand, and keep all the rest as it was."""
    table = pq.read_table(path)
    name = next(name for name in table.column_names if "start_ns" in name)
    values = table[name].combine_chunks()
    if pa.types.is_list(values.type):
        changed = pa.array([[value + 1_000 for value in row] for row in values.to_pylist()], values.type)
    else:
        changed = pa.array([value + 1_000 for value in values.to_pylist()], values.type)
    index = table.column_names.index(name)
    pq.write_table(table.set_column(index, name, changed), path)


def foreign(path: Path) -> None:
    """Put another table there."""
    pq.write_table(pa.table({"name": ["kernel"], "start_ns": [1]}), path)


def of_another_reader(path: Path) -> None:
    """Let it be written by another version."""
    table = pq.read_table(path)
    told = {**table.schema.metadata, b"traceaudit.reader": b"0"}
    pq.write_table(table.replace_schema_metadata(told), path)


@pytest.mark.parametrize("harm", [damaged, cut, emptied, edited, foreign, of_another_reader])
def test_a_harmed_file_is_not_used_and_written_anew(harm: Callable[[Path], None], run: Path) -> None:
    """Whatever is not exactly what was written for this trace is read again from the trace."""
    path = sorted(run.glob("rank*"))[0]
    place, kept = Place(str(path)), Cache()
    own, _ = accounted(place, Selection(), kept)
    for file in (run / FOLDER).iterdir():
        harm(file)
    again, how = accounted(place, Selection(), kept)
    assert how.source == "trace"
    assert equal(again, own)
    assert accounted(place, Selection(), kept)[1].source == "account"


def test_no_unfinished_file_is_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way leaves nothing, and the analysis goes on."""

    def broken(table: object, path: Path, **_: object) -> None:
        path.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / "home"))
    analyze(run, cache=True)
    assert [path for path in run.rglob("*") if path.is_file() and path.suffix in (".part", ".parquet")] == []


def test_traces_that_cannot_be_written_beside_are_kept_in_the_users_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder is read-only, the user's cache folder serves, and several runs in it do not mix."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (run / FOLDER).write_text("in the way")
    path = sorted(run.glob("rank*"))[0]
    other = shutil.copytree(run, tmp_path / "other")
    for folder in (run, other):
        place = Place(str(folder / path.name))
        assert [accounted(place, Selection(), Cache())[1].source for _ in range(2)] == ["trace", "account"]
    assert len(list((tmp_path / "home" / "traceaudit").iterdir())) == 4


def test_the_cache_is_for_long_reads_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small jobs leave no files; a flag beats the environment, which beats the size."""
    monkeypatch.delenv("TRACEAUDIT_CACHE")
    assert chosen(None, LEAST_BYTES - 1) is None
    assert chosen(None, LEAST_BYTES) == Cache()
    assert chosen(False, LEAST_BYTES) is None
    assert chosen(tmp_path, 0) == Cache(tmp_path)
    monkeypatch.setenv("TRACEAUDIT_CACHE", "off")
    assert chosen(None, LEAST_BYTES) is None
    assert chosen(True, 0) == Cache()
    monkeypatch.setenv("TRACEAUDIT_CACHE", str(tmp_path))
    assert chosen(None, 0) == Cache(tmp_path)


def test_packed_values_come_back_of_their_types() -> None:
    """Tuples, sets, odd keys, infinities, missing values and categories survive."""
    table = pd.DataFrame(
        {
            "group": pd.Series([(0, 1), None, (0, 1)], dtype=object),
            "name": pd.Series(["a", None, "b"], dtype="str"),
            "kind": pd.Categorical.from_codes([1, -1, 0], categories=pd.Index(["y", "x"])),
            "few": np.array([1, 2, 3], np.int8),
            "real": [1.5, np.nan, np.inf],
        },
        index=[4, 2, 9],
    )
    value = {"a": [1, (2, "x")], 3: {"$tuple": 1}, "b": float("inf"), "c": {4, 5}, "d": table, "e": np.zeros((2, 0, 3))}
    text, arrays = pack(value)
    found = unpack(text, arrays, dict)
    assert equal({**found, "c": set(found["c"])}, value)


def test_a_trace_holds_the_tables_that_are_kept(run: Path) -> None:
    """Each part of a trace comes back from the kept events, those that are added later too."""
    path = sorted(run.glob("rank*"))[0]
    place = Place(str(path))
    kept = Cache()
    accounted(place, Selection(), kept)
    from traceaudit.reading.cache import _identity, _trace

    trace, how = _trace(kept, place, _identity(place))
    assert how.source == "events"
    assert isinstance(trace, Trace)
    assert equal(trace, read_trace(place))
