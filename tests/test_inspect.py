"""Inspection of traces: what is missing is what was taken out, and what the list of real traces says."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import REAL_TRACES
from tests.rewriting import rewritten, shifted
from tests.test_real_traces import REFUSED, SETS
from traceaudit.cli import main
from traceaudit.errors import InputError
from traceaudit.inspection.holding import Holding, held
from traceaudit.inspection.inspect import inspect
from traceaudit.inspection.lacks import Level
from traceaudit.pipeline import analyze
from traceaudit.reading.streams import Place

ROOT = Path(__file__).parents[1]
MANIFEST = REAL_TRACES / "MANIFEST.tsv"
Event = dict[str, Any]
Simulated = Callable[[str], Path]


def manifest() -> list[dict[str, str]]:
    """Return the rows of real traces whose events were counted."""
    if not MANIFEST.is_file():
        return [{"set": "absent", "file": "absent"}]
    with MANIFEST.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file, delimiter="\t") if row["gpu_kernels"]]


def number(text: str) -> int:
    """Return a count of the list; nothing is none."""
    return int(text or 0)


# Where the list counts otherwise: marks of steps in a file that has nothing to attribute to them; a rank that only the
# file's name tells; steps that are told by the optimizer where nothing marks them.
STEPS_WITHOUT_DEVICE = {"hta-cpu-only", "hta-edge"}
BY_OPTIMIZER = {"kineto-resnet50-2021", "param-resnet-2080"}
FOREIGN = {"ptl-2020", "pippy-2022", "foreign-bytedance-pp", "foreign-aiu-tp4", "foreign-composer", "foreign-rocprof"}


@pytest.mark.parametrize("row", manifest(), ids=lambda row: f"{row['set']}/{row['file']}")
def test_counts_are_those_of_the_list(row: dict[str, str], real_traces: Path) -> None:
    """Kernels, communications, arguments, steps, shapes, stacks, memory, graphs, rank and size agree file by file."""
    outcome = held(Place(str(real_traces / row["set"] / row["file"])))
    if isinstance(outcome, str):
        assert row["set"] in FOREIGN
        assert "no event" in outcome
        return
    own = outcome[0]
    assert own.kernels == number(row["gpu_kernels"])
    assert own.communications == number(row["nccl_rccl_kernels"]) + number(row["other_comm_kernels"])
    assert own.described == number(row["kernels_with_collective_args"])
    assert (own.shaped > 0) == (row["record_shapes"] == "1")
    assert own.stacks == (number(row["python_stack_events"]) > 0)
    assert own.memory == (number(row["memory_events"]) > 0)
    assert own.graphs == number(row["graph_launches"])
    assert own.world_size == (int(row["world_size"]) if row["world_size"] else None)
    assert own.device == (row["device"] or None)
    if row["rank"]:
        assert own.rank == int(row["rank"])
    if own.marked_by == "optimizer":
        assert row["set"] in BY_OPTIMIZER
    elif own.kernels or row["set"] not in STEPS_WITHOUT_DEVICE:
        assert len(own.steps) == number(row["profiler_steps"])


@pytest.mark.parametrize("name", SETS)
def test_verdict_is_that_of_analyze(name: str, real_traces: Path) -> None:
    """What inspection calls usable, the analysis attributes; what it calls blocked, the analysis refuses."""
    assert inspect(real_traces / name).usable == (name not in REFUSED)


# Lacks beyond notes, checked by hand against what the files hold.
BY_HAND = {
    "torchtitan-fsdp4-h100": set(),
    "ao-ep2-b200": {"1 of 2 ranks have no trace"},
    "megatron-tp8-a100": {"communications without arguments"},
    "llama-tp2-4090": {"no marked steps", "no shapes", "communications without arguments"},
    "zoology-a100": {"no GPU rows, though the job ran on a GPU"},
    "mi210-gpu-only": {"no operators of the host", "no marked steps"},
    "hta-2of128": {"126 of 128 ranks have no trace", "communications without arguments"},
    "hta-mi250": set(),
    "foreign-composer": {"no trace of torch.profiler"},
    "torchrec-dlrm-a2a-tworuns": {
        "the files hold recordings of different times",
        "no shapes",
        "communications without arguments",
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_lacks_of_real_sets(name: str, real_traces: Path) -> None:
    """What is missing in a set is named, and nothing else is."""
    assert lacks(real_traces / name) == BY_HAND[name]


def lacks(path: Path) -> set[str]:
    """Return what costs certainty in some traces."""
    return {lack.what for lack in inspect(path).lacks if lack.level != Level.NOTE}


def notes(path: Path) -> set[str]:
    """Return what is only noted."""
    return {lack.what for lack in inspect(path).lacks if lack.level == Level.NOTE}


def without(matches: Callable[[Event], bool]) -> Callable[[dict[str, Any]], None]:
    """Return a change that takes events out."""

    def change(trace: dict[str, Any]) -> None:
        trace["traceEvents"] = [event for event in trace["traceEvents"] if not matches(event)]

    return change


def without_arguments(*names: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that takes arguments out of all events."""

    def change(trace: dict[str, Any]) -> None:
        for name in names:
            trace.pop(name, None)
            for event in trace["traceEvents"]:
                (event.get("args") or {}).pop(name, None)

    return change


def category(*names: str) -> Callable[[Event], bool]:
    """Return whether an event is of some categories."""
    return lambda event: event.get("cat") in names


GPU = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVE = ("Collective name", "Process Group Name", "Process Group Ranks", "Group size", "In msg nelems", "dtype")
TAKEN_OUT: dict[str, tuple[Callable[[dict[str, Any]], None], set[str]]] = {
    "nothing": (lambda trace: None, set()),
    "GPU rows": (without(category(*GPU)), {"no GPU rows, though the job ran on a GPU"}),
    "operators": (without(category("cpu_op")), {"no operators of the host"}),
    "launches": (without(category("cuda_runtime")), {"GPU rows without a record of their launch"}),
    "most kernels": (
        without(lambda event: event.get("cat") == "kernel" and int(event["args"]["correlation"]) % 10 > 0),
        {"launches whose kernels are missing"},
    ),
    "marks": (
        without(lambda event: str(event.get("name")).startswith(("ProfilerStep#", "Optimizer."))),
        {"no marked steps"},
    ),
    "shapes": (without_arguments("Input Dims", "record_shapes"), {"no shapes"}),
    "arguments of collectives": (without_arguments(*COLLECTIVE), {"communications without arguments"}),
    "the base of the clock": (without_arguments("baseTimeNanoseconds"), {"the clock cannot be compared"}),
}


@pytest.mark.parametrize("what", TAKEN_OUT)
def test_what_was_taken_out_is_missing(what: str, simulated: Simulated, tmp_path: Path) -> None:
    """A change of every file of a complete run is named, on all its ranks, and nothing else is."""
    change, expected = TAKEN_OUT[what]
    found = inspect(rewritten(simulated("late_rank"), tmp_path / "run", change))
    named = {lack.what for lack in found.lacks if lack.level != Level.NOTE}
    assert named == expected
    assert found.usable == (what != "GPU rows")
    for lack in found.lacks:
        assert lack.cost
        assert lack.change
        if lack.what in expected:
            assert (lack.files, lack.ranks) == (4, (0, 1, 2, 3))


def test_missing_ranks_are_counted(simulated: Simulated, tmp_path: Path) -> None:
    """The ranks without a file are named."""
    run = rewritten(simulated("late_rank"), tmp_path / "run", lambda trace: None)
    (run / "rank2_trace.json.gz").unlink()
    found = inspect(run)
    (lack,) = [lack for lack in found.lacks if lack.level != Level.NOTE]
    assert (lack.what, lack.ranks) == ("1 of 4 ranks have no trace", (2,))
    assert (found.ranks_traced, found.world_size, found.usable) == (3, 4, True)


def test_two_recordings_are_blocked(simulated: Simulated, tmp_path: Path) -> None:
    """Files of two times must not be added up."""

    def later(trace: dict[str, Any]) -> None:
        trace["baseTimeNanoseconds"] += 3600 * 10**9

    rewritten(simulated("late_rank"), tmp_path / "first", lambda trace: None)
    rewritten(simulated("late_rank"), tmp_path / "second", later)
    found = inspect(tmp_path)
    assert "the files hold recordings of different times" in lacks(tmp_path)
    assert not found.usable


def far_apart(trace: dict[str, Any]) -> None:
    """Set the clock of a host an hour on."""
    shifted("host1", 3_600 * 10**9)(trace)


def another_step(trace: dict[str, Any]) -> None:
    """The same, in which that host recorded the steps a hundred later."""
    far_apart(trace)
    for row in trace["traceEvents"]:
        if trace["host_name"] == "host1" and str(row.get("name")).startswith("ProfilerStep#"):
            row["name"] = f"ProfilerStep#{int(row['name'].partition('#')[2]) + 100}"


def unnamed_hosts(trace: dict[str, Any]) -> None:
    """The same, in which nothing tells the hosts apart."""
    far_apart(trace)
    del trace["host_name"]


@pytest.mark.parametrize(
    ("change", "one"), [(lambda trace: None, True), (far_apart, True), (another_step, False), (unnamed_hosts, False)]
)
def test_clocks_far_apart_are_one_recording_by_their_steps(
    change: Callable[[dict[str, Any]], None], one: bool, simulated: Simulated, tmp_path: Path
) -> None:
    """An hour between hosts is a wrong clock if they recorded the same steps of other ranks: said, and analysed."""
    run = rewritten(simulated("clock_offset"), tmp_path / "run", change)
    assert inspect(run).usable is one
    if one:
        warnings = analyze(run).result["quality"]["warnings"]
        assert sum("3,600 s apart" in text for text in warnings) == (change is far_apart)
    else:
        with pytest.raises(InputError, match="different times"):
            analyze(run)


def test_a_torn_file_and_a_foreign_one(simulated: Simulated, tmp_path: Path) -> None:
    """A file that ends early is told, one that is no trace is listed with its reason."""
    run = rewritten(simulated("late_rank"), tmp_path / "run", lambda trace: None)
    torn = run / "rank1_trace.json.gz"
    torn.write_bytes(torn.read_bytes()[:-2000])
    (run / "notes.json").write_text('{"a": 1}')
    found = inspect(run)
    assert [(lack.what, lack.ranks) for lack in found.lacks if lack.what == "the file is cut short"] == [
        ("the file is cut short", (1,))
    ]
    assert [file for file, _ in found.skipped] == ["notes.json"]


def test_run_json_is_asked_for(simulated: Simulated, tmp_path: Path) -> None:
    """Without it a note says what it is for; with it there is none."""
    wanted = "no run.json that tells parameters and tokens"
    run = rewritten(simulated("late_rank"), tmp_path / "run", lambda trace: None)
    assert wanted not in notes(run)
    (run / "run.json").unlink()
    assert wanted in notes(run)
    (run / "run.json").write_text("{")
    assert any("cannot be read" in what for what in lacks(run))


def test_table_and_text(simulated: Simulated) -> None:
    """One row a file with the documented columns; the text names each lack, its cost and what to do."""
    found = inspect(simulated("late_rank"))
    assert list(found.table.columns) == list(Holding.__annotations__)
    assert len(found.table) == 4
    text = str(found)
    assert text.startswith("4 traces, 4 of 4 ranks: can be attributed.")
    assert all(lack.what in text for lack in found.lacks)
    assert text.count("costs: ") == text.count("to do: ") == len(found.lacks)


def test_processes_change_nothing(simulated: Simulated) -> None:
    """Read by two processes, the answer is the same."""
    assert inspect(simulated("late_rank"), jobs=2) == inspect(simulated("late_rank"), jobs=1)


def test_command(simulated: Simulated, tmp_path: Path) -> None:
    """Text, JSON on standard output and in a file; exit code 1 where nothing can be attributed or read."""
    run = str(simulated("late_rank"))
    text = CliRunner().invoke(main, ["inspect", run])
    assert text.exit_code == 0
    assert "To know" in text.output
    printed = CliRunner().invoke(main, ["inspect", run, "--json", "-"])
    assert json.loads(printed.stdout) == inspect(run).result
    path = tmp_path / "inspection.json"
    assert CliRunner().invoke(main, ["inspect", run, "--json", str(path), "--quiet"]).output == ""
    assert json.loads(path.read_text()) == inspect(run).result
    again = CliRunner().invoke(main, ["inspect", run, "--json", str(path)])
    assert (again.exit_code, "--force" in again.output) == (1, True)
    assert CliRunner().invoke(main, ["inspect", str(tmp_path / "nothing")]).exit_code == 1
    (tmp_path / "foreign.json").write_text('{"traceEvents": []}')
    assert CliRunner().invoke(main, ["inspect", str(tmp_path / "foreign.json")]).exit_code == 1


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    """A directory without traces."""
    with pytest.raises(InputError, match="no trace files"):
        inspect(tmp_path)


def test_inspection_imports_no_torch(simulated: Simulated) -> None:
    """It runs where only the analysis is installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from traceaudit.inspection.inspect import inspect\n"
        f"print(inspect({str(simulated('late_rank'))!r}).usable)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True"
