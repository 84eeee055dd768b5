"""What is planted is found first, each nanosecond is claimed once, and evidence can be found in the traces."""

import ast
import gzip
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import Audited
from traceaudit.audit import Audit
from traceaudit.errors import PartitionError
from traceaudit.findings.conclude import RULES, check, conclude
from traceaudit.findings.finding import LEAST_SHARE, MOST, MOST_EVIDENCE, Confidence, Finding
from traceaudit.findings.record_next import SNIPPET
from traceaudit.findings.seen import Seen, Witness
from traceaudit.leaves import Leaf
from traceaudit.pipeline import analyze
from traceaudit.simulate import SCENARIOS

Directory = Callable[[str], Path]
Row = dict[str, Any]

SMALL = [name for name, scenario in SCENARIOS.items() if not scenario.large]
CLEAN = [name for name in SMALL if not SCENARIOS[name].findings]
REAL = (
    "torchtitan-fsdp4-h100",
    "nanogpt-dp8-h100",
    "mi300-ddp-recompute",
    "hta-dlrm-a100",
    "torchrec-dlrm-a2a",
    "torchrec-dlrm-a2a-opt4",
    "llama-tp2-4090",
    "megatron-tp8-a100",
    "saf-a100",
    "lightllm-ep8-h200",
)
KEYS = {
    *("id", "title", "bucket", "leaf", "ns", "share", "mfu_points", "ceiling_mfu", "confidence", "summary"),
    *("claims", "evidence", "action", "verify"),
}


def losses(result: Row) -> list[Row]:
    """Return the findings that claim time."""
    return [row for row in result["findings"] if row["ns"]]


@pytest.mark.parametrize("scenario", SMALL)
def test_what_is_planted_is_found_and_nothing_else(scenario: str, audited: Audited, simulated: Directory) -> None:
    """The findings of a scenario are those planted in it, the most expensive first; a clean run has none."""
    planted = json.loads((simulated(scenario) / "truth.json").read_text())["findings"]
    assert [row["id"] for row in losses(audited(scenario).result)] == planted


@pytest.mark.parametrize("scenario", SMALL)
def test_claims_stay_within_the_truth(scenario: str, audited: Audited, simulated: Directory) -> None:
    """Findings claim no more of a leaf than was planted, as far as the truth names the leaf by itself."""
    truth = json.loads((simulated(scenario) / "truth.json").read_text())
    planted: dict[str, int] = defaultdict(int)
    for rank in truth["ranks"]:
        for step in rank["steps"] if rank["traced"] else ():
            for leaf, ns in step["leaves"].items():
                planted[leaf] += ns
    claimed: dict[str, int] = defaultdict(int)
    for row in losses(audited(scenario).result):
        for claim in row["claims"]:
            claimed[f"{claim['bucket']}/{claim['leaf']}"] += claim["ns"]
    steps = sum(len(rank["steps"]) for rank in truth["ranks"])
    for name in [leaf for leaf in claimed if leaf.startswith(("host_gap/", "exposed_comm/", "unattributed/"))]:
        if name in planted:
            assert claimed[name] <= planted[name] + steps * truth["tolerance_ns"], name


@pytest.mark.parametrize("scenario", CLEAN)
def test_a_clean_run_has_no_finding_at_all(scenario: str, audited: Audited) -> None:
    """Not even a note stands in the list of a run in which nothing is wrong."""
    assert audited(scenario).result["findings"] == []


@pytest.mark.parametrize("scenario", SMALL)
def test_notes_about_steps_are_true(scenario: str, audited: Audited, simulated: Directory) -> None:
    """A note that steps are not alike stands where, in the truth, one is half as long again as the median."""
    truth = json.loads((simulated(scenario) / "truth.json").read_text())
    sums: dict[int, int] = defaultdict(int)
    for rank in truth["ranks"]:
        for step in rank["steps"] if rank["traced"] else ():
            sums[step["step"]] += step["window_ns"]
    lengths = sorted(sums.values())
    notes = [row["id"] for row in audited(scenario).result["findings"] if not row["ns"]]
    assert notes == (["input.unlike-steps"] if lengths[-1] > 1.5 * lengths[len(lengths) // 2] else [])


def sound(audit: Audit) -> None:
    """Check what holds for every list of findings."""
    result = audit.result
    leaves = {row["leaf"]: row["ns"] for row in result["job"]["leaves"]}
    claimed: dict[str, int] = defaultdict(int)
    windows = audit.attribution.windows
    span = windows.groupby("rank").agg(low=("start_ns", "min"), high=("end_ns", "max"))
    files = {rank["rank"]: rank["file"] for rank in result["ranks"]}
    assert len(result["findings"]) <= MOST
    assert [row["ns"] for row in result["findings"]] == sorted((row["ns"] for row in result["findings"]), reverse=True)
    for row in result["findings"]:
        assert row.keys() == KEYS
        assert row["ns"] == sum(claim["ns"] for claim in row["claims"])
        assert row["ns"] == 0 or row["ns"] >= LEAST_SHARE * result["job"]["window_ns"]
        assert row["confidence"] in [*Confidence]
        assert all(row[name] for name in ("title", "summary", "action", "verify"))
        assert len(row["evidence"]) <= MOST_EVIDENCE
        assert row["evidence"] or row["id"].startswith("input.")
        for claim in row["claims"]:
            claimed[claim["leaf"]] += claim["ns"]
        for evidence in row["evidence"]:
            if evidence["rank"] is not None:
                assert evidence["file"] == files[evidence["rank"]]
            if evidence["start_ns"] is not None:
                low, high = (int(span.loc[evidence["rank"], name]) for name in ("low", "high"))
                assert evidence["start_ns"] < evidence["end_ns"]
                assert evidence["start_ns"] < high
                assert evidence["end_ns"] > low
    assert all(ns <= leaves[leaf] for leaf, ns in claimed.items())


@pytest.mark.parametrize("scenario", SMALL)
def test_each_nanosecond_is_claimed_once(scenario: str, audited: Audited) -> None:
    """Claims of a leaf add up to no more than the leaf; the list is sorted, and evidence lies in the rank's windows."""
    sound(audited(scenario))


@pytest.mark.parametrize("name", REAL)
def test_findings_of_real_traces_are_sound(name: str, audited_real: Audited) -> None:
    """The same holds for real traces, and each of these has something to find."""
    audit = audited_real(name)
    sound(audit)
    assert losses(audit.result)


@pytest.mark.parametrize("name", ["llama-tp2-4090", "lightllm-ep8-h200", "b200-1of8"])
def test_inference_gets_no_training_advice(name: str, audited_real: Audited) -> None:
    """Where only forwards were recorded, nobody is told to change gradients, optimizer, recompute or micro-batches."""
    result = audited_real(name).result
    told = json.dumps([result["findings"], result["record_next"], *(row["record_next"] for row in result["checklist"])])
    words = ("gradient", "optimizer", "backward", "recompute", "micro-batch", "FSDP", "DDP", "checkpoint", "train_step")
    assert [word for word in words if word in told] == []


def test_worst_culprit_can_be_found_in_its_file(audited: Audited, simulated: Directory) -> None:
    """The place of a culprit's worst instance is a row of its file: name, beginning and end."""
    where = audited("slow_gpu").result["stragglers"][0]["where"]
    trace = json.loads(gzip.decompress((simulated("slow_gpu") / where["file"]).read_bytes()))
    base = trace.get("baseTimeNanoseconds", 0)
    spans = {
        (event["name"], round(float(event["ts"]) * 1_000) + base, round(float(event["dur"]) * 1_000))
        for event in trace["traceEvents"]
        if event.get("cat") == "kernel"
    }
    assert (where["name"], where["start_ns"], where["end_ns"] - where["start_ns"]) in spans


@pytest.mark.parametrize("scenario", SMALL)
def test_culprits_have_a_place(scenario: str, audited: Audited) -> None:
    """Whoever caused waits has a place in its own file and windows, on a stream or a thread."""
    audit = audited(scenario)
    for entry in audit.result["stragglers"]:
        where, windows = entry["where"], audit.attribution.windows
        own = windows[windows["rank"] == entry["rank"]]
        if where is None:  # no arrival of their own have waits inside a pipeline, and those within the clocks' noise
            assert audit.result["pipeline"] or entry["share"] < 1e-6
            continue
        assert where["rank"] == entry["rank"]
        assert where["track"].startswith(("stream ", "thread "))
        assert where["start_ns"] < int(own["end_ns"].max())
        assert where["end_ns"] > int(own["start_ns"].min())


def test_pause_is_placed_where_it_was_planted(audited: Audited, simulated: Directory) -> None:
    """The longest pause of a late loader lies in the step for which it was planted the longest."""
    longest = max(
        (entry for entry in json.loads((simulated("run_28_mfu") / "truth.json").read_text())["planted"]),
        key=lambda entry: entry.get("gap_ns", 0),
    )
    entry = next(row for row in audited("run_28_mfu").result["stragglers"] if row["cause"] == "host_pause")
    assert (entry["where"]["rank"], entry["where"]["step"]) == (longest["rank"], longest["step"])


def test_points_follow_rule_6(audited: Audited) -> None:
    """The ceiling of a finding is MFU / (1 - share), and its points are what is above MFU."""
    result = audited("run_28_mfu").result
    for row in losses(result):
        ceiling = result["job"]["mfu"] / (1 - row["share"])
        assert row["ceiling_mfu"] == pytest.approx(ceiling)
        assert row["mfu_points"] == pytest.approx(100 * (ceiling - result["job"]["mfu"]))


def test_claiming_twice_is_an_error() -> None:
    """Two findings that claim more of a leaf than there is break the law, and production says so."""
    one = Finding("a", "", "", "", "", Confidence.MEASURED, {Leaf.DP: 60})
    check([one], {Leaf.DP: 60})
    with pytest.raises(PartitionError, match="claimed twice"):
        check([one, one], {Leaf.DP: 119})
    with pytest.raises(PartitionError, match="claimed twice"):
        check([Finding("b", "", "", "", "", Confidence.MEASURED, {Leaf.DP: -1})], {Leaf.DP: 60})


def test_small_losses_are_counted_and_not_listed(audited: Audited) -> None:
    """Below half a percent of the time a loss is no finding; how many there were stands beside the list."""
    result = audited("host_pauses").result
    synchronising = next(row for row in result["job"]["leaves"] if row["leaf"] == "host_sync")
    assert 0 < synchronising["share"] < LEAST_SHARE
    assert "host-gap.host-sync" not in [row["id"] for row in result["findings"]]
    assert result["findings_left_out"]["small"] >= 1


def test_rules_bear_an_empty_job() -> None:
    """No rule needs more than the keys that every result has."""
    job = {"window_ns": 0, "leaves": [], "mfu": None, "hfu": None, "world_size": 1, "steps": [], "ranks_traced": 1}
    result = {"job": job, "model": {}, "quality": {}}
    none = pd.DataFrame(columns=["rank", "step", "leaf", "kind", "ns", "start_ns", "end_ns"])
    seen = Seen(result, Witness(none, none.iloc[:0], none, none))
    assert len(RULES) > 15
    assert conclude(seen).rows == []


@pytest.mark.parametrize(
    ("peak", "ids"),
    [(1_979.0, ["input.peak"]), (989.4, []), (700.0, ["input.peak"])],
)
def test_a_peak_that_is_not_the_dense_one_is_noted(peak: float, ids: list[str], simulated: Directory) -> None:
    """The headline figure with sparsity, or any other than the table's, is a note."""
    result = analyze(simulated("compute_only"), peak_tflops=peak).result
    rows = [row for row in result["findings"] if row["id"] == "input.peak"]
    assert [row["id"] for row in rows] == ids
    if peak == 1_979.0:
        assert "sparsity" in rows[0]["summary"]


def test_contradicted_declarations_are_noted(simulated: Directory) -> None:
    """Tokens declared a fifth too low contradict the shapes, and recompute that is not there is missed."""
    result = analyze(simulated("compute_only"), tokens_per_step=3_277, recompute="full").result
    texts = [row["summary"] for row in result["findings"] if row["id"] == "input.numerator"]
    assert len(texts) == 2
    assert "too low" in texts[0]
    assert "declared as full" in texts[1]


def test_recompute_that_memory_does_without_says_so(audited: Audited) -> None:
    """The model would fit into 80 GB without recompute, by formula; the finding says by how much."""
    row = audited("recompute").result["findings"][0]
    assert row["id"] == "recompute.full"
    assert "memory would do without" in row["summary"]


def test_a_slow_gpu_is_no_heavy_stage(audited: Audited) -> None:
    """Stage imbalance that one slow GPU makes belongs to the GPU, not to the layers of its stage."""
    rows = losses(audited("pipeline_slow_rank").result)
    claims = {claim["leaf"]: row["id"] for row in rows for claim in row["claims"]}
    assert claims["stage_imbalance"] == "straggler.slow-gpu"


def test_findings_are_a_table_in_python(audited: Audited) -> None:
    """`Audit.findings` has a row a finding; without one it is empty."""
    assert list(audited("recompute").findings["id"]) == list(SCENARIOS["recompute"].findings)
    assert len(audited("compute_only").findings) == 0


def test_snippet_is_python(audited: Audited) -> None:
    """What to record next is a script that parses, with no field left open."""
    found = audited("run_28_mfu").result["record_next"]
    ast.parse(found["snippet"])
    assert "{" not in found["snippet"].replace('f"rank{rank}"', "")
    assert "profile_memory=True" in found["text"]


def test_snippet_records_a_trace(audited: Audited, tmp_path: Path) -> None:
    """Run as it is on a loop of one's own, the snippet writes the trace of as many steps as it says."""
    pytest.importorskip("torch")
    snippet = audited("run_28_mfu").result["record_next"]["snippet"]
    own = "import torch\nloader = range(100)\ndef do_step(_):\n    torch.ones(8, 8) @ torch.ones(8, 8)\n"
    script = tmp_path / "record.py"
    script.write_text(own + snippet)
    subprocess.run([sys.executable, "-W", "ignore", str(script)], cwd=tmp_path, check=True, timeout=120)
    (trace,) = (tmp_path / "traces").iterdir()
    names = {event.get("name") for event in json.loads(trace.read_bytes())["traceEvents"]}
    assert {f"ProfilerStep#{step}" for step in range(13, 17)} <= names
    assert "aten::mm" in names


def test_snippet_has_its_fields() -> None:
    """The template asks for what `record_next` decides, and for nothing else."""
    fields = {"ranks", "skip", "active", "memory", "memory_why", "stack", "stack_why", "last"}
    assert SNIPPET.format(**dict.fromkeys(fields, 1))
