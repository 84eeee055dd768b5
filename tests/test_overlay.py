"""The overlay: tracks that a trace viewer opens, with the totals of the result, and the archive that merges traces."""

import gzip
import json
import tarfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import Audited
from traceaudit.audit import Audit
from traceaudit.cli import main
from traceaudit.errors import InputError
from traceaudit.overlay import MANIFEST, OVERLAY, write_bundle, write_overlay
from traceaudit.pipeline import analyze

Directory = Callable[[str], Path]
Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """Return the events of an overlay; timestamps as they are written, not as floats."""
    found: list[Event] = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    return found


def written(audit: Audit, folder: Path) -> list[Event]:
    """Write an overlay and read it back."""
    write_overlay(audit, folder / "overlay.json.gz")
    return read(folder / "overlay.json.gz")


def by_track(events: list[Event]) -> dict[tuple[int, str], list[Event]]:
    """Return the slices of each rank and track, by time."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    tracks: dict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return {key: sorted(own, key=lambda event: Decimal(event["ts"])) for key, own in tracks.items()}


def totals(slices: list[Event]) -> dict[str, int]:
    """Return the nanoseconds of slices by name."""
    sums: dict[str, int] = defaultdict(int)
    for event in slices:
        ns = event["dur"] * 1000
        assert ns == int(ns)
        sums[event["name"]] += int(ns)
    return dict(sums)


def check(audit: Audit, events: list[Event]) -> None:
    """Hold an overlay against its result, and against the trace event format."""
    tracks = by_track(events)
    for own in audit.result["ranks"]:
        wanted = {name: ns for name, ns in own["buckets"].items() if ns}
        assert totals(tracks[own["rank"], "buckets"]) == wanted
        leaves = audit.leaves[audit.leaves["rank"] == own["rank"]].groupby("leaf")["ns"].sum()
        assert totals(tracks[own["rank"], "leaves"]) == leaves.to_dict()
    for own in tracks.values():
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in own)
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(own))
    ends = [event for event in events if event["ph"] in "sf"]
    starts = {event["id"]: event for event in ends if event["ph"] == "s"}
    assert len(starts) * 2 == len(ends)
    names = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    for event in ends:
        track = tracks[event["pid"], "awaited" if event["ph"] == "s" else "waits"]
        assert any(slice_["ts"] <= event["ts"] < slice_["ts"] + slice_["dur"] for slice_ in track)
        assert event["ts"] >= starts[event["id"]]["ts"]
        assert (event["pid"], event["tid"]) in names


def test_the_overlay_of_the_sample_has_the_totals_of_its_result(audited: Audited, tmp_path: Path) -> None:
    """On every rank each bucket and leaf sums up to the result to the ns; slices of a track never overlap."""
    audit = audited("run_28_mfu", keep_pieces=True)
    events = written(audit, tmp_path)
    check(audit, events)
    tracks = by_track(events)
    assert {rank for rank, _ in tracks} == set(range(8))
    work = [event["name"] for event in tracks[0, "pipeline"] if event["args"]["step"] == 4]
    assert [name for name in work if name[0] in "FB"] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]  # 1F1B
    assert set(totals(tracks[0, "recompute"])) == {"kernels"}


@pytest.mark.parametrize("name", ["megatron-tp8-a100", "lightllm-ep8-h200", "torchrec-dlrm-a2a-opt4"])
def test_the_overlay_of_real_ranks_has_the_totals_of_its_result(
    name: str, audited_real: Audited, tmp_path: Path
) -> None:
    """What holds of the sample holds of recorded runs of four and eight ranks."""
    audit = audited_real(name, keep_pieces=True)
    check(audit, written(audit, tmp_path))


def test_arrows_come_from_the_rank_that_was_late(audited: Audited, tmp_path: Path) -> None:
    """Where one rank has more work, all arrows of waits above a microsecond start on it."""
    audit = audited("late_rank", keep_pieces=True)
    events = written(audit, tmp_path)
    arrows = [event for event in events if event["ph"] == "s"]
    assert {event["pid"] for event in arrows} == {2}
    assert {event["pid"] for event in events if event["ph"] == "f"} == {0, 1, 3}
    waits = by_track(events)[0, "waits"]
    assert {event["name"] for event in waits} == {"waits for rank 2"}
    assert all(event["args"]["data_imbalance_ns"] > 0 for event in waits)


def test_gaps_name_their_cause(audited: Audited, tmp_path: Path) -> None:
    """The stall of a data loader stands on the track of host gaps with the call behind it."""
    audit = audited("loader_stall", keep_pieces=True)
    gaps = by_track(written(audit, tmp_path))[0, "host gaps"]
    stalls = [event for event in gaps if event["name"] == "data_loader" and event["dur"] > 1000]
    assert len(stalls) == 3
    assert all("DataLoader" in event["args"]["call"] for event in stalls)


def test_ranks_stand_on_the_aligned_clock(audited: Audited, tmp_path: Path) -> None:
    """Hosts whose clocks are 2 ms apart begin their first step within 100 µs of each other."""
    audit = audited("clock_offset", keep_pieces=True)
    tracks = by_track(written(audit, tmp_path))
    begun = [tracks[rank, "steps"][0]["ts"] for rank in range(8)]
    assert max(begun) - min(begun) < 100


def test_names_from_a_trace_are_escaped(audited: Audited, tmp_path: Path) -> None:
    """A kernel whose name would end the JSON is read back as it was."""
    audit = audited("compute_only", keep_pieces=True)
    assert audit.slicer is not None
    own = audit.slicer.accounts[0]
    bad = '"},{"ph":"X" \\ \x1b'
    slicer = replace(audit.slicer, accounts={0: replace(own, pieces=own.pieces.assign(name=bad))})
    tracks = by_track(written(replace(audit, slicer=slicer), tmp_path))
    assert {event["args"]["activity"] for event in tracks[0, "leaves"]} == {bad}


def test_the_same_traces_give_the_same_bytes(simulated: Directory, audited: Audited, tmp_path: Path) -> None:
    """No time of writing and no order of chance is in the file."""
    again = analyze(simulated("late_rank"), keep_pieces=True)
    for name, audit in (("one", audited("late_rank", keep_pieces=True)), ("two", again)):
        write_overlay(audit, tmp_path / f"{name}.json.gz")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


def test_the_bundle_puts_traces_and_overlay_on_one_timeline(audited: Audited, tmp_path: Path) -> None:
    """With the offset of the manifest, each rank's compute kernels begin where its slices of compute do, to the ns."""
    audit = audited("clock_offset", keep_pieces=True)
    write_bundle(audit, tmp_path / "bundle.tar")
    with tarfile.open(tmp_path / "bundle.tar") as archive:
        content = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert content[MANIFEST].startswith(b'{\n "perfetto_manifest"')
    manifest = json.loads(content[MANIFEST])["perfetto_manifest"]
    assert manifest["version"] == 1
    listed = {entry["path"]: entry for entry in manifest["files"]}
    assert set(listed) == set(content) - {MANIFEST}
    assert all(isinstance(value, str | int) for value in manifest["attributes"].values())
    tracks = by_track(json.loads(content[OVERLAY], parse_float=Decimal)["traceEvents"])
    traces = {name: entry for name, entry in listed.items() if name != OVERLAY}
    assert len(traces) == 8
    for name, entry in traces.items():
        rank = int(entry["machine"]["name"].removeprefix("rank "))
        assert entry["clocks"]["sync_to"] == {"file": OVERLAY}
        events = json.loads(content[name], parse_float=Decimal)["traceEvents"]
        kernels = {
            int(event["ts"] * 1000) + entry["clocks"]["offset_ns"]
            for event in events
            if event.get("cat") == "kernel" and "gemm" in event["name"]
        }
        begun = {
            int(event["ts"] * 1000)
            for event in tracks[rank, "leaves"]
            if "gemm" in event.get("args", {}).get("activity", "") and event["name"] == "model_flops"
        }
        assert begun
        assert begun <= kernels


def test_the_command_writes_both(simulated: Directory, tmp_path: Path) -> None:
    """The overlay and the bundle are written once; an existing file is refused without --force, a wrong ending too."""
    run = CliRunner()
    traces = str(simulated("late_rank"))
    target = str(tmp_path / "overlay.json.gz")
    assert run.invoke(main, ["overlay", traces, "-o", target, "--ranks", "0-1"]).exit_code == 0
    assert {rank for rank, _ in by_track(read(Path(target)))} == {0, 1}
    again = run.invoke(main, ["overlay", traces, "-o", target])
    assert (again.exit_code, "--force" in again.stderr) == (1, True)
    assert run.invoke(main, ["overlay", traces, "-o", str(tmp_path / "x.tar")]).exit_code == 2
    tar = str(tmp_path / "x.tar")
    assert run.invoke(main, ["overlay", traces, "-o", tar, "--with-traces", "--ranks", "2"]).exit_code == 0
    with tarfile.open(tar) as archive:
        assert len(archive.getnames()) == 3


def test_an_overlay_needs_pieces(audited: Audited, tmp_path: Path) -> None:
    """An audit without its pieces cannot be written, and says how to have them."""
    with pytest.raises(InputError, match="keep_pieces=True"):
        write_overlay(audited("late_rank"), tmp_path / "overlay.json.gz")
    assert not (tmp_path / "overlay.json.gz").exists()
