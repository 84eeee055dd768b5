"""The byte inventory: goldens from the papers, what fits, and findings from measured memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from traceaudit.cli import main
from traceaudit.errors import InputError
from traceaudit.inventory import STATES, Plan, bytes_of, in_flight, inventory, layer_bytes, seen_in, state_bytes

GPT3 = Plan(175e9, 96, 12_288, 96, 2_048)
SPLIT = replace(GPT3, tp=8, pp=8, sequence_parallel=True)


def test_layer_of_gpt3_is_the_published_one() -> None:
    """GPT-3, s = 2048, b = 1: 2.869 GB a layer, of which the scores are 80 of 114 parts."""
    assert round(layer_bytes(GPT3) / 1e9, 3) == 2.869
    assert layer_bytes(GPT3) / layer_bytes(replace(GPT3, recompute="selective")) == (34 + 80) / 34


def test_first_stage_of_gpt3_is_the_published_one() -> None:
    """TP 8 with sequence parallel: 34.4 GB on the first stage, 10.27 GB with selective recompute."""
    assert round(layer_bytes(SPLIT) * in_flight(SPLIT) / 1e9, 1) == 34.4
    light = replace(SPLIT, recompute="selective")
    assert round(layer_bytes(light) * in_flight(light) / 1e9, 2) == 10.27


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"tp": 1, "sequence_parallel": False}, 34 + 80),
        ({"tp": 8, "sequence_parallel": False}, 10 + 24 / 8 + 80 / 8),
        ({"tp": 8, "sequence_parallel": True}, (34 + 80) / 8),
        ({"tp": 8, "sequence_parallel": True, "recompute": "selective"}, 34 / 8),
        ({"tp": 8, "recompute": "full"}, 2),
    ],
)
def test_rows_of_korthikanti_table_2(changes: dict[str, object], parts: float) -> None:
    """Bytes of a layer in parts of s·b·h."""
    assert layer_bytes(replace(GPT3, **changes)) == pytest.approx(parts * 2_048 * 12_288)  # type: ignore[arg-type]


def test_pipeline_holds_micro_batches() -> None:
    """The first stage holds all layers' worth; interleaving adds (p - 1)/(p v); few micro-batches hold less."""
    assert in_flight(SPLIT) == 96
    assert in_flight(replace(SPLIT, virtual_stages=2)) == 96 * (1 + 7 / 16)
    assert in_flight(replace(SPLIT, microbatches=2)) == 24


@pytest.mark.parametrize(("params", "terabytes"), [(70e9, 1.12), (405.85e9, 6.49)])
def test_states_are_16_bytes_a_parameter(params: float, terabytes: float) -> None:
    """70B: 1.12 TB of states, 405B: 6.49 TB."""
    assert round(sum(state_bytes(Plan(params)).values()) / 1e12, 2) == terabytes
    assert [STATES[name].total for name in ("adam", "adam-fp32-grads", "adam-both-grads")] == [16, 18, 20]


def test_zero_divides_what_the_paper_says() -> None:
    """7.5B on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB for ZeRO stages 0 to 3."""
    sizes = [sum(state_bytes(Plan(7.5e9, dp=64, zero=stage)).values()) / 1e9 for stage in range(4)]
    assert [round(size, 1) for size in sizes] == [120.0, 31.4, 16.6, 1.9]


def test_logits_and_cache_are_counted() -> None:
    """FP32 logits of one micro-batch, and keys and values of two bytes for each layer and token."""
    found = bytes_of(replace(GPT3, vocab=51_200, kv_tokens=1_000, kv_heads=8, head_dim=128))
    assert found["logits"] == 4 * 2_048 * 51_200
    assert found["kv_cache"] == 2 * 2 * 96 * 8 * 128 * 1_000


def test_changes_are_offered_until_it_fits() -> None:
    """A model that one change cannot fit gets several, one upon the other."""
    found = inventory(Plan(70e9, 80, 8_192, 64, 8_192, dp=8), 80e9)
    assert found["fits"] is False
    assert [row["fits"] for row in found["changes"]].count(True) == 1
    assert " + " in found["changes"][-1]["title"]
    assert found["checklist"][0]["status"] == "problem"


def test_measured_memory_gives_findings() -> None:
    """Recompute that memory does not need, and reserved memory far above allocated, are findings."""
    seen = {"allocated_peak_bytes": 30_000_000_000, "reserved_peak_bytes": 60_000_000_000, "recompute_share": 0.2}
    found = inventory(replace(SPLIT, recompute="full"), 80e9, seen)
    assert [row["id"] for row in found["findings"]] == ["memory.recompute-not-needed", "memory.fragmentation"]
    tight = inventory(SPLIT, 40e9, {**seen, "allocated_peak_bytes": 59_000_000_000})
    assert tight["findings"] == []


@pytest.mark.parametrize(
    "plan", [Plan(0), Plan(1e9, layers=4), Plan(1e9, recompute="some"), Plan(1e9, states="nadam"), Plan(1e9, tp=0)]
)
def test_impossible_plans_are_errors(plan: Plan) -> None:
    """What the formulas cannot use is named."""
    with pytest.raises(InputError):
        inventory(plan)


def test_inventory_command(simulated: Callable[[str], Path], tmp_path: Path) -> None:
    """Sizes come from a file and from options; the picture and the JSON are written."""
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"params": 175e9, "layers": 96, "hidden": 12_288, "heads": 96, "seq_len": 2_048}))
    options = ["--config", config, "--tp", "8", "--pp", "8", "--sequence-parallel", "--gpu-memory", "80"]
    picture = tmp_path / "bytes.png"
    result = CliRunner().invoke(main, ["inventory", *map(str, options), "-o", str(picture)])
    assert result.exit_code == 0, result.output
    assert "34.43 GB" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    trace = str(simulated("compute_only"))
    result = CliRunner().invoke(main, ["inventory", "--params", "1e9", "--trace", trace, "--json", "-"])
    assert json.loads(result.stdout)["seen"]["allocated_peak_bytes"] is None
    assert CliRunner().invoke(main, ["inventory"]).exit_code == 2


def test_peaks_are_read_from_a_result() -> None:
    """The allocator's peaks and the share of recompute stand in result.json."""
    allocator = {"allocated_peak_bytes": 5, "reserved_peak_bytes": 9}
    job = {"buckets": {"recompute": 25}, "window_ns": 100}
    seen = seen_in({"job": job, "host_facts": {"allocator": allocator}})
    assert seen == {**allocator, "recompute_share": 0.25}
