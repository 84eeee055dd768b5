"""The difference of two runs: rows that add up, planted changes alone beyond noise, and a gate for CI."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import traceaudit as ta
from tests.conftest import Audited
from tests.runs import changed, jittered, result_of
from traceaudit.cli import main
from traceaudit.comparing.compare import LEVELS, NOISE, compare
from traceaudit.comparing.noise import Sample, critical, limit, outside
from traceaudit.errors import InputError, TraceAuditError
from traceaudit.leaves import Bucket
from traceaudit.simulate.job import Collective, Instruction, Job, Pause
from traceaudit.simulate.replicas import Replica, data_parallel

Result = dict[str, Any]
GPUS = 2


def a_run(
    seed: int, *, stall_ns: int = 0, slowness: int = 1_000, change: Callable[[Instruction], Instruction] | None = None
) -> Job:
    """Return a small run with jitter, with what a test plants in it."""
    replica = Replica(
        reduce="exposed",
        blocks=1,
        before_forward=lambda _: (Pause("data_loader", stall_ns),) if stall_ns else (),
        before_optimizer=(Pause("host_sync", 150_000),),
        slowness_permille=dict.fromkeys(range(GPUS), slowness),
    )
    job = data_parallel(GPUS, replica)
    return jittered(changed(job, change) if change is not None else job, seed)


def halved(instruction: Instruction) -> Instruction:
    """Return a collective of half the bytes, in half the time."""
    if isinstance(instruction, Collective):
        return replace(instruction, elements=instruction.elements // 2, transfer_ns=instruction.transfer_ns // 2)
    return instruction


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Return the result of the run in which nothing is planted."""
    return result_of(a_run(1), tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def sample(audited: Audited) -> Result:
    """Return the result of the sample, whose traces are those of the scenario."""
    return audited("run_28_mfu").result


def beyond_noise(data: Mapping[str, Any], level: str) -> dict[str, str]:
    """Return the verdicts of rows that changed, by name (of ranks: by bucket)."""
    rows = [row for row in data["rows"] if row["level"] == level and row["verdict"] != NOISE]
    return {row["bucket"] if level == "rank" else row["name"]: row["verdict"] for row in rows}


def row_of(data: Mapping[str, Any], level: str, name: str) -> dict[str, Any]:
    """Return a row."""
    found: dict[str, Any] = next(row for row in data["rows"] if (row["level"], row["name"]) == (level, name))
    return found


# Planted changes


def test_fewer_bytes_are_exposed_communication_and_nothing_else(base: Result, tmp_path: Path) -> None:
    """Collectives of half the length make exposed communication cheaper by half, and change no other row."""
    data = compare(base, result_of(a_run(2, change=halved), tmp_path / "run"))
    assert beyond_noise(data, "bucket") == {"exposed_comm": "better"}
    assert beyond_noise(data, "leaf") == {"dp": "better"}
    assert set(beyond_noise(data, "rank")) == {"exposed_comm"}
    assert beyond_noise(data, "group") == {"all_reduce, default_pg [0, 1]": "better"}
    assert beyond_noise(data, "family") == {"communication": "better"}
    row = row_of(data, "bucket", "exposed_comm")
    assert row["change_ns"] == pytest.approx(-row["before_ns"] / 2, rel=0.1)
    assert data["mfu_points"] == pytest.approx(row["mfu_points"], rel=0.1)


def test_a_slower_gpu_is_below_the_roof_and_nothing_else(base: Result, tmp_path: Path) -> None:
    """GPUs that are slower by a fifth lose time below the roof; all kernels but the optimizer's are slower."""
    data = compare(base, result_of(a_run(2, slowness=1_200), tmp_path / "run"))
    assert beyond_noise(data, "bucket") == {"sub_roofline": "worse"}
    assert set(beyond_noise(data, "rank")) == {"sub_roofline"}
    assert beyond_noise(data, "group") == {}
    assert "matmul" in beyond_noise(data, "family")
    assert "optimizer" not in beyond_noise(data, "family")
    assert data["mfu_points"] < 0


def test_one_slow_gpu_is_stragglers(base: Result, tmp_path: Path) -> None:
    """The time that the other rank waits for one slow GPU, and its own excess, are stragglers."""
    job = a_run(2)
    slow = replace(job, programs=(job.programs[0], replace(job.programs[1], slowness_permille=1_300)))
    data = compare(base, result_of(slow, tmp_path / "run"))
    assert beyond_noise(data, "bucket")["straggler"] == "worse"
    assert row_of(data, "bucket", "straggler")["change_ns"] > 0.9 * data["step"]["change_ns"]


def test_a_repaired_loader_is_host_gaps_and_nothing_else(base: Result, tmp_path: Path) -> None:
    """A stall of 3 ms in each step that is gone makes host gaps cheaper by it."""
    stalled = result_of(a_run(2, stall_ns=3_000_000), tmp_path / "run")
    data = compare(stalled, base)
    assert beyond_noise(data, "bucket") == {"host_gap": "better"}
    assert beyond_noise(data, "leaf") == {"data_loader": "better"}
    assert row_of(data, "leaf", "data_loader")["change_ns"] == pytest.approx(-3_000_000, rel=0.05)
    assert data["moved"] == []


@pytest.mark.parametrize("first", range(0, 60, 6))
def test_equal_runs_do_not_differ(first: int, tmp_path: Path) -> None:
    """Of 60 runs that differ by jitter alone, compared in 50 pairs, no row of any kind is beyond noise."""
    results = [result_of(a_run(seed), tmp_path / str(seed)) for seed in range(first, first + 6)]
    for before, after in pairwise(results):
        data = compare(before, after)
        assert not data["changed"]
        assert [row for row in data["rows"] if row["verdict"] != NOISE] == []


def test_what_is_lost_elsewhere_is_said(sample: Result) -> None:
    """A bucket that falls while another rises by as much: the difference says that it moved."""
    after = copy.deepcopy(sample)
    moved = 20_000_000  # of each step of each rank
    for step in after["job"]["by_step"]:
        step["leaves"]["exposed_comm.dp"] -= moved * step["ranks"]
        step["leaves"]["pipeline_bubble.warmup_drain"] += moved * step["ranks"]
    total = moved * sum(step["ranks"] for step in after["job"]["by_step"])
    after["job"]["buckets"]["exposed_comm"] -= total
    after["job"]["buckets"]["pipeline_bubble"] += total
    found = ta.diff(sample, after)
    assert found.data["moved"] == [{"from": "exposed_comm", "to": "pipeline_bubble", "ns": moved, "share": 1.0}]
    assert "100.0 % of what exposed communication lost (20.0 ms) reappears as pipeline bubbles." in found.headline
    assert found.data["mfu_points"] == 0
    assert "No change" not in found.headline


# Arithmetic


def test_mfu_points_of_the_buckets_add_up_to_the_change(base: Result, sample: Result) -> None:
    """Whatever differs, the parts of the buckets are the change of MFU; equal rows have none."""
    after = copy.deepcopy(sample)
    after["job"]["window_ns"] += 3 * 10**8
    after["job"]["buckets"]["host_gap"] += 3 * 10**8
    after["job"]["mfu"] = after["job"]["buckets"]["achieved"] / after["job"]["window_ns"]
    data = compare(sample, after)
    points = {row["name"]: row["mfu_points"] for row in data["rows"] if row["level"] == "bucket"}
    assert sum(points.values()) == pytest.approx(data["mfu_points"], abs=1e-9)
    assert {name for name, value in points.items() if value} == {"host_gap"}


def test_rows_are_means_of_the_ranks_steps(sample: Result) -> None:
    """A bucket's row is its sum over ranks and steps by their number; the buckets add up to the step."""
    data = compare(sample, sample)
    rows = {row["name"]: row["before_ns"] for row in data["rows"] if row["level"] == "bucket"}
    number = sum(len(rank["steps"]) for rank in sample["ranks"])
    assert rows == pytest.approx({name: ns / number for name, ns in sample["job"]["buckets"].items() if ns})
    assert sum(rows.values()) == pytest.approx(data["step"]["before_ns"])
    assert not data["changed"]


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30])
def test_the_critical_value_leaves_the_chance_outside(degrees: int) -> None:
    """Beyond the critical value lies the chance, by numerical integration of Student's density."""
    t = np.tan(np.linspace(-1, 1, 2_000_001) * (math.pi / 2 - 1e-9))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * np.exp(-(degrees + 1) / 2 * np.log1p(t**2 / degrees))
    edge = critical(0.01, degrees)
    within = np.abs(t) <= edge
    assert 1 - np.trapezoid(density[within], t[within]) == pytest.approx(0.01, rel=0.02)
    assert outside(edge, degrees) == pytest.approx(0.01, rel=1e-6)


def test_false_alarms_are_as_rare_as_stated() -> None:
    """Of 20,000 pairs of unchanged rows of three steps, at most one in a hundred is beyond its noise."""
    random = np.random.default_rng(5)
    alarms = 0
    for _ in range(20_000):
        one, other = random.normal(1e6, 5e5, 3), random.normal(1e6, 5e5, 3)
        noise = limit(Sample(one.mean(), one.tolist()), Sample(other.mean(), other.tolist()), 1, 1e6)
        assert noise is not None
        alarms += abs(one.mean() - other.mean()) > noise
    assert alarms <= 0.01 * 20_000 + 3 * math.sqrt(0.01 * 20_000)
    assert alarms > 0  # the limit is no wall


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6), st.lists(st.floats(0, 1e9), min_size=1, max_size=6))
def test_noise_is_symmetric_and_grows_with_the_rows(one: list[float], other: list[float]) -> None:
    """Which run comes first does not matter; the more rows are looked at, the more must each differ."""
    samples = Sample(float(np.mean(one)), one), Sample(float(np.mean(other)), other)
    noise = limit(*samples, 1, 1e6)
    assert noise == limit(samples[1], samples[0], 1, 1e6)
    assert (noise is None) == (len(one) + len(other) < 3)
    many = limit(*samples, 10 * LEVELS, 1e6)
    assert noise is None or (many is not None and many >= noise)


# What is known


def cut_to(result: Result, steps: int) -> Result:
    """Return a result of fewer steps, as if no more had been recorded."""
    kept = copy.deepcopy(result)
    numbers = kept["job"]["steps"][:steps]
    kept["job"]["steps"] = numbers
    kept["job"]["by_step"] = [step for step in kept["job"]["by_step"] if step["step"] in numbers]
    for rank in kept["ranks"]:
        rank["steps"] = [step for step in rank["steps"] if step["step"] in numbers]
    share = sum(step["window_ns"] for step in kept["job"]["by_step"]) / result["job"]["window_ns"]
    kept["job"]["window_ns"] = round(result["job"]["window_ns"] * share)
    kept["job"]["buckets"] = {name: round(ns * share) for name, ns in result["job"]["buckets"].items()}
    return kept


def test_single_steps_tell_no_spread(sample: Result) -> None:
    """With one step on each side the noise is unknown, and the difference says so."""
    data = compare(cut_to(sample, 1), cut_to(sample, 1))
    assert row_of(data, "bucket", "host_gap")["noise_ns"] is None
    assert any("spread of the steps is not known" in note for note in data["notes"])
    assert "unknown" in ta.diff(cut_to(sample, 1), cut_to(sample, 1)).to_markdown()


def test_a_change_in_every_step_that_is_not_certain_is_a_hint(audited: Audited) -> None:
    """A loader that stalls 5, 25 and 40 ms in three steps is within noise of none, and the headline says what it is."""
    found = ta.diff(audited("loader_stall"), audited("compute_only"))
    row = row_of(found.data, "bucket", "host_gap")
    assert (row["verdict"], row["separated"]) == (NOISE, True)
    assert "In host gaps every step of one run lies beyond all of the other" in found.headline


def older(result: Result) -> Result:
    """Return a result as a version wrote it that had no sums by step."""
    kept = copy.deepcopy(result)
    for name in ("by_step", "versions"):
        del kept["job"][name]
    return {name: value for name, value in kept.items() if name not in ("timeline", "throughput")}


def test_an_older_result_is_judged_by_its_ranks(base: Result, sample: Result) -> None:
    """Without sums by step the ranks' steps tell the same rows; leaves are judged by the noise of their bucket."""
    new, old = compare(sample, sample), compare(older(sample), sample)
    for name in ("exposed_comm", "straggler"):
        assert row_of(old, "bucket", name) == pytest.approx(row_of(new, "bucket", name))
    assert row_of(old, "leaf", "dp")["noise_ns"] == row_of(old, "bucket", "exposed_comm")["noise_ns"]


def test_a_result_without_ranks_is_compared_by_its_job(sample: Result) -> None:
    """A report that had to leave out its ranks still has its buckets; nothing tells their spread."""
    bare = {**older(sample), "ranks": []}
    data = compare(bare, bare)
    assert row_of(data, "bucket", "recompute")["before_ns"] > 0
    assert row_of(data, "bucket", "recompute")["noise_ns"] is None


def test_other_ranks_are_noise_too(sample: Result) -> None:
    """Where half of the ranks was traced, and another half before, the spread over ranks widens the noise."""

    def half(first: int) -> Result:
        kept = copy.deepcopy(sample)
        kept["ranks"] = kept["ranks"][first : first + 4]
        return kept

    same, other = compare(half(0), half(0)), compare(half(0), half(4))
    assert row_of(other, "bucket", "straggler")["noise_ns"] > row_of(same, "bucket", "straggler")["noise_ns"]
    assert "other ranks were traced: the spread over ranks counts as noise" in other["notes"]


# What can be compared


def with_factor(result: Result, name: str, value: float) -> Result:
    """Return a result with another factor of its model FLOPs."""
    kept = copy.deepcopy(result)
    for factor in kept["model"]["numerator"]["factors"]:
        if factor["name"] == name:
            factor["value"] = value
    return kept


def test_steps_of_more_tokens_are_normalised(sample: Result) -> None:
    """A run with twice the tokens a step that takes twice as long is the same run."""
    after = with_factor(sample, "tokens_per_step", 2 * 65_536)
    after["job"]["window_ns"] *= 2
    after["job"]["buckets"] = {name: 2 * ns for name, ns in after["job"]["buckets"].items()}
    for step in after["job"]["by_step"]:
        step["window_ns"] *= 2
        step["leaves"] = {name: 2 * ns for name, ns in step["leaves"].items()}
    for leaf in after["job"]["leaves"]:
        leaf["ns"] *= 2
    data = compare(sample, after)
    assert not data["changed"]
    assert beyond_noise(data, "leaf") == {}
    assert data["scale"] == 0.5
    [entry] = data["differences"]
    assert (entry["name"], entry["treatment"]) == ("tokens a rank and step", "normalised")


def test_other_hardware_layout_and_versions_are_named(sample: Result) -> None:
    """What differs beside the work stands in the difference, with both values."""
    after = copy.deepcopy(sample)
    after["job"] |= {"gpu": "NVIDIA H200", "world_size": 16, "versions": {"CUDA": "12.8"}}
    after = with_factor(after, "tokens_per_step", 2 * 65_536)
    before = copy.deepcopy(sample)
    before["job"]["versions"] = {"CUDA": "12.6"}
    found = {entry["name"]: entry for entry in compare(before, after)["differences"]}
    assert set(found) == {"GPU", "ranks of the job", "CUDA version"}
    assert (found["GPU"]["before"], found["GPU"]["after"]) == ("NVIDIA H100 SXM", "NVIDIA H200")


def test_another_model_is_refused(sample: Result) -> None:
    """Rows of runs that train different models are not compared; the message has both MFUs."""
    with pytest.raises(InputError, match=r"different models .* MFU is 28\.0% and 28\.0%"):
        compare(sample, with_factor(sample, "params", 7e9))


def test_other_work_without_tokens_is_refused(sample: Result) -> None:
    """Steps of more counted FLOPs cannot be compared unless the tokens are known."""
    sides = [copy.deepcopy(sample), copy.deepcopy(sample)]
    for side in sides:
        side["model"]["numerator"]["factors"] = []
    sides[1]["model"]["counted_flops_per_step"] *= 1.5
    with pytest.raises(InputError, match=r"1\.5 times the FLOPs .* --tokens-per-step"):
        compare(*sides)


def test_without_mfu_times_are_compared(audited: Audited) -> None:
    """Where MFU is unknown on one side, compute stands in one row and nothing has MFU points."""
    known = audited("compute_only").result
    unknown = copy.deepcopy(known)
    unknown["job"]["mfu"] = None
    found = ta.diff(unknown, known)
    assert found.data["mfu_points"] is None
    assert {row["name"] for row in found.data["rows"] if row["level"] == "bucket"} == {"sub_roofline", "host_gap"}
    assert found.rows["mfu_points"].isna().all()
    assert found.headline.startswith("No change beyond noise: A step")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ('{"schema_version": 2, "job": {}}', "schema version 2"),
        ('{"schema_version": 1, "job": {}}', "no job.window_ns"),
        (
            '{"schema_version": 1, "job": {"window_ns": 0, "buckets": {}, "steps": [], "ranks_traced": 0, "mfu": 0}}',
            "no step",
        ),
        ('["schema_version"]', "no result inside"),
    ],
)
def test_what_is_no_result_is_an_error(content: str, message: str, tmp_path: Path, sample: Result) -> None:
    """A file that holds no result ends in a message and not in a traceback."""
    path = tmp_path / "result.json"
    path.write_text(content if "schema_version" in content else content + ' "schema_version"')
    with pytest.raises(TraceAuditError, match=message):
        ta.diff(path, sample)


def paths(value: object, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of the values in plain data, of lists the first one's, three deep."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*place, key)
        if len(place) < 2:
            yield from paths(item, (*place, key))


@pytest.mark.parametrize("instead", [None, "text", [], {}, -1])
def test_a_damaged_result_is_an_error_and_no_traceback(instead: object, sample: Result) -> None:
    """Whatever value is replaced by nonsense or missing, there is a difference or a message."""
    kept = ("schema_version", "job", "model", "collectives", "quality")
    needed = {**{name: sample[name] for name in kept}, "ranks": sample["ranks"][:2]}
    for place in list(paths(needed)):
        damaged = copy.deepcopy(needed)
        holder: Any = damaged
        for key in place[:-1]:
            holder = holder[key]
        if instead is None and isinstance(holder, dict):
            del holder[place[-1]]
        else:
            holder[place[-1]] = instead
        with suppress(TraceAuditError):
            found = ta.diff(needed, damaged)
            assert found.headline
            assert found.to_markdown()


# Reports


def test_names_from_traces_are_text_in_every_report(sample: Result) -> None:
    """A kernel's name with markup is escaped in HTML, and in Markdown."""
    after = copy.deepcopy(sample)
    after["kernels"].append(
        {"name": "<script>alert(1)</script>|x", "kind": "compute", "family": "matmul", "ns": 10**10}
    )
    found = ta.diff(sample, after)
    page = found.to_markdown()
    assert "&emsp;" in page or "matmul" in page
    assert "<script>alert" not in page
    assert r"\|x" in page
    assert "<script>alert" not in found._repr_html_()


def test_the_page_has_the_rows_and_fetches_nothing(sample: Result, base: Result, tmp_path: Path) -> None:
    """The HTML file holds headline, buckets and sections, escaped, and its data."""
    after = copy.deepcopy(sample)
    after["kernels"].append({"name": "<script>alert(1)</script>", "kind": "compute", "family": "matmul", "ns": 10**10})
    found = ta.diff(sample, after)
    found.to_html(tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text()
    assert "recompute" in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    found.to_html(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "diff.html").read_bytes()


def test_rows_are_a_table_in_milliseconds(sample: Result) -> None:
    """The DataFrame has a row for each bucket, in ms of a step of a rank."""
    rows = ta.diff(sample, sample).rows
    assert set(rows["level"]) >= {"bucket", "leaf", "group", "family", "kernel"}
    buckets = rows[rows["level"] == "bucket"].set_index("name")
    assert buckets.loc["achieved", "before_ms"] == pytest.approx(sample["job"]["buckets"]["achieved"] / 24 / 1e6)
    assert set(buckets.index) <= {bucket.value for bucket in Bucket}


# The command line


@pytest.fixture(scope="module")
def files(base: Result, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the results of a run and of one whose loader stalls for 3 ms, as files."""
    folder = tmp_path_factory.mktemp("files")
    stalled = result_of(a_run(2, stall_ns=3_000_000), folder / "run")
    paths = folder / "good.json", folder / "bad.json"
    for path, result in zip(paths, (base, stalled), strict=True):
        path.write_text(json.dumps(result))
    return paths


def test_the_gate_in_a_shell_script(files: tuple[Path, Path]) -> None:
    """Under set -e a regression ends a script with 3; the reverse, and a wide limit, let it go on."""
    good, bad = files
    program = f"{sys.executable} -m traceaudit"
    script = f"""
set -e
{program} diff {bad} {good} --fail-on-regression 0.5 > /dev/null
{program} diff {good} {bad} --fail-on-regression 50 --fail-on-regression straggler=0.1 > /dev/null
echo passed
{program} diff {good} {bad} --fail-on-regression host_gap=1 > /dev/null
echo not reached
"""
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (3, "passed\n")
    assert "host_gap costs" in ended.stderr


def test_the_gate_without_mfu_is_in_shares_of_the_step(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Where MFU is unknown a limit is a share of the step, of MFU the growth of the step."""
    results = [json.loads(path.read_text()) for path in files]
    for result in results:
        result["job"]["mfu"] = None
    found = ta.diff(*results)
    assert len(found.regressions({"mfu": 5.0, "host_gap": 5.0})) == 2
    assert found.regressions({"mfu": 90.0, "host_gap": 90.0}) == []
    with pytest.raises(InputError, match="is no bucket"):
        found.regressions({"nothing": 1.0})


def test_the_command_writes_what_was_asked_for(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Text, JSON, Markdown and HTML; existing files are refused; wrong limits and two outputs are usage errors."""
    good, bad = map(str, files)
    run = CliRunner()
    text = run.invoke(main, ["diff", good, bad])
    assert (text.exit_code, "host gaps +3" in text.stdout) == (0, True)
    markdown = run.invoke(main, ["diff", good, bad, "--markdown", "-"])
    assert markdown.stdout.startswith("## MFU")
    assert json.loads(run.invoke(main, ["diff", good, bad, "--json", "-"]).stdout)["changed"]
    page = str(tmp_path / "diff.html")
    assert run.invoke(main, ["diff", good, bad, "-o", page]).exit_code == 0
    again = run.invoke(main, ["diff", good, bad, "-o", page])
    assert (again.exit_code, "--force" in again.stderr) == (1, True)
    assert run.invoke(main, ["diff", good, bad, "--fail-on-regression", "nothing=1"]).exit_code == 2
    assert run.invoke(main, ["diff", good, bad, "--json", "-", "--markdown", "-"]).exit_code == 2
    assert run.invoke(main, ["diff", good, str(tmp_path / "absent")]).exit_code == 1


def test_a_report_and_traces_can_be_compared(
    simulated: Callable[[str], Path], audited: Audited, tmp_path: Path
) -> None:
    """An HTML report carries its result; traces are analysed."""
    traces = simulated("late_rank")
    audited("late_rank").to_html(tmp_path / "report.html")
    run = CliRunner().invoke(main, ["diff", str(tmp_path / "report.html"), str(traces), "--fail-on-regression", "0"])
    assert run.exit_code == 0
    assert run.stdout.startswith("No change beyond noise: MFU 40.5 %")


def test_an_analysis_says_what_changed_from_a_baseline(
    files: tuple[Path, Path], simulated: Callable[[str], Path], audited: Audited, tmp_path: Path
) -> None:
    """--baseline adds the headline of the difference; a baseline of other work is an error."""
    audited("late_rank").to_json(tmp_path / "baseline.json")
    run = CliRunner()
    same = run.invoke(main, ["analyze", str(simulated("late_rank")), "--baseline", str(tmp_path / "baseline.json")])
    assert (same.exit_code, "Against baseline.json: No change beyond noise" in same.stdout) == (0, True)
    other = run.invoke(main, ["analyze", str(simulated("late_rank")), "--baseline", str(files[0])])
    assert (other.exit_code, "different models" in other.stderr) == (1, True)
