"""Numerator and denominator of MFU: every factor and its source, whichever file declares it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import Audited
from traceaudit.cli import main
from traceaudit.errors import InputError, ModelFlopsError
from traceaudit.events import Device
from traceaudit.inventory import bytes_of, plan_of
from traceaudit.mfu.hardware import gpus, identify
from traceaudit.mfu.model import Run, declared, numerator
from traceaudit.mfu.model_files import read
from traceaudit.pipeline import analyze

Directory = Callable[[str], Path]
Json = dict[str, Any]

LLAMA_8B: Json = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}

# A config.json and the parameters that its model card prints: all, and active ones where experts are chosen.
CONFIGS: dict[str, tuple[Json, float, float | None]] = {
    "Llama 3 8B": (LLAMA_8B, 8.03e9, None),
    "Qwen2 0.5B, tied": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        0.494e9,
        None,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        124.4e6,
        None,
    ),
    "Mixtral 8x7B": (
        {
            "model_type": "mixtral",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46.7e9,
        12.9e9,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
        671.0e9,
        37.0e9,
    ),
}


def written(path: Path, content: object) -> Path:
    """Write JSON, or text as it is."""
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_follow_from_a_config_json(name: str, tmp_path: Path) -> None:
    """Dense, grouped queries, tied, experts and latent attention: the parameters on the model card."""
    config, params, active = CONFIGS[name]
    found = read(written(tmp_path / "config.json", config))
    assert found["params"] == pytest.approx(params, rel=0.012)
    assert found.get("active_params") == (None if active is None else pytest.approx(active, rel=0.02))


def test_a_config_json_does_not_declare_the_run(tmp_path: Path) -> None:
    """What a model could take is not what the run used: tokens and sequence length stay open."""
    found = read(written(tmp_path / "config.json", {**LLAMA_8B, "max_position_embeddings": 8192}))
    assert "seq_len" not in found
    assert "tokens_per_step" not in found


TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "selective"
"""


def test_torchtitan_declares_its_batch(tmp_path: Path) -> None:
    """Tokens of a step are the local batch times the replicas, which the world size tells."""
    run = declared([written(tmp_path / "train.toml", TORCHTITAN)], {})
    found = numerator(run, world_size=64)
    assert found is not None
    assert found.flops == 6 * run.values["params"] * 2 * 8192 * 16
    assert found.recompute == "selective"
    assert found.conventions["torchtitan"] == pytest.approx(5.791e10 * 2 * 8192 * 16, rel=2e-4)


MEGATRON = """
using world size: 512, data-parallel size: 8
------------------------ arguments ------------------------
  bf16 ............................................ True
  data_parallel_size .............................. 8
  ffn_hidden_size ................................. 28672
  global_batch_size ............................... 1024
  group_query_attention ........................... True
  hidden_size ..................................... 8192
  kv_channels ..................................... 128
  micro_batch_size ................................ 2
  num_attention_heads ............................. 64
  num_layers ...................................... 80
  num_query_groups ................................ 8
  padded_vocab_size ............................... 128256
  pipeline_model_parallel_size .................... 8
  position_embedding_type ......................... rope
  add_bias_linear ................................. False
  recompute_granularity ........................... full
  seq_length ...................................... 8192
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 8
  untie_embeddings_and_output_weights ............. True
  world_size ...................................... 512
-------------------- end of arguments ---------------------
"""


def test_megatron_declares_its_arguments(tmp_path: Path) -> None:
    """The list that Megatron prints at its start declares model, batch and layout."""
    run = declared([written(tmp_path / "train.log", MEGATRON)], {})
    assert run.values["params"] == pytest.approx(70.55e9, rel=0.001)
    assert run.values["tokens_per_step"] == 1024 * 8192
    assert run.degrees() == {"tp": 8, "pp": 8, "dp": 8}
    assert (run.values["microbatches"], run.values["recompute"], run.values["dtype"]) == (64, "full", "bf16")
    assert run.sources["params"] == "train.log"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", "[1]", "JSON object"),
        ("run.json", "{", "cannot be read as JSON"),
        ("train.toml", "a = ", "cannot be read as TOML"),
        ("train.toml", '[model]\nname = "llama9"', "--params"),
        ("config.json", '{"num_hidden_layers": 3}', "incomplete"),
    ],
)
def test_a_file_of_no_known_format_is_an_error(name: str, content: str, words: str, tmp_path: Path) -> None:
    """The message names the file or what to do."""
    with pytest.raises(InputError, match=words):
        read(written(tmp_path / name, content))


# Declared values, the formula and the FLOPs of a step.
NUMERATORS: list[tuple[Json, str, float]] = [
    ({"params": 7e9, "tokens_per_step": 1e6}, "6·params·tokens", 4.2e16),
    ({"params": 47e9, "active_params": 13e9, "tokens_per_step": 1e6}, "6·active_params·tokens", 7.8e16),
    (
        {"params": 1e9, "tokens_per_step": 10, "layers": 2, "hidden": 8, "seq_len": 4, "attention_flops": True},
        "6·params·tokens + 12·layers·hidden·seq_len·tokens (whole attention)",
        6e10 + 12 * 2 * 8 * 4 * 10,
    ),
    (
        {
            "params": 1e9,
            "tokens_per_step": 10,
            "layers": 2,
            "heads": 3,
            "head_dim": 5,
            "hidden": 8,
            "seq_len": 4,
            "attention_flops": True,
            "causal": True,
        },
        "6·params·tokens + 6·layers·heads·head_dim·seq_len·tokens (causal half)",
        6e10 + 6 * 2 * 15 * 4 * 10,
    ),
]


@pytest.mark.parametrize(("values", "formula", "flops"), NUMERATORS)
def test_declared_flops_say_their_formula(values: Json, formula: str, flops: float) -> None:
    """The convention is in the formula, and each factor is listed with its source."""
    found = numerator(Run(values, dict.fromkeys(values, "declared")))
    assert found is not None
    assert (found.formula, found.flops) == (formula, flops)
    assert {name for name, _, _ in found.factors} <= values.keys()


def test_attention_without_sizes_is_an_error() -> None:
    """Attention FLOPs that were asked for need the sizes they follow from."""
    values = {"params": 1e9, "tokens_per_step": 10.0, "attention_flops": True}
    with pytest.raises(InputError, match="--layers"):
        numerator(Run(values, dict.fromkeys(values, "declared")))


def test_every_factor_is_in_the_result(audited: Audited) -> None:
    """Peak, formula, factors, the other conventions and the reconciliation with the shapes."""
    result = audited("recompute").result
    model = result["model"]
    assert model["numerator"]["convention"] == "6N"
    assert [factor["name"] for factor in model["numerator"]["factors"]] == ["params", "tokens_per_step"]
    assert model["peak"]["hbm_gbps"] == 3350
    assert [row["name"] for row in model["conventions"] if row["used"]] == ["6N"]
    assert model["conventions"][0]["mfu"] == pytest.approx(result["job"]["mfu"])
    assert "of" in model["reconciliation"]["text"]
    assert model["mfu_median"] == pytest.approx(
        sorted(row["mfu"] for row in model["by_step"])[len(model["by_step"]) // 2]
    )
    assert all(row["hfu"] > row["mfu"] for row in model["by_step"])


def test_an_unknown_gpu_is_an_error_where_mfu_is_asked_for(simulated: Directory, tmp_path: Path) -> None:
    """With declared FLOPs the peak is asked for; without, the report has no MFU and says why."""
    traces = tmp_path / "traces"
    traces.mkdir()
    content = json.loads(_gunzipped(simulated("compute_only") / "rank0_trace.json.gz"))
    for device in content["deviceProperties"]:
        device["name"] = "Abacus 3000"
    (traces / "rank0_trace.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="--peak-tflops"):
        analyze(traces, params=1e9, tokens_per_step=1e4)
    result = analyze(traces).result
    assert result["job"]["mfu"] is None
    assert "--peak-tflops" in result["model"]["reason"]
    assert analyze(traces, params=1e6, tokens_per_step=1e3, peak_tflops=100.0).mfu is not None


def _gunzipped(path: Path) -> bytes:
    import gzip

    return gzip.decompress(path.read_bytes())


def test_a_sparse_peak_is_named(simulated: Directory, audited: Audited) -> None:
    """1979 TFLOP/s is the headline of an H100 with sparsity: a warning says that MFU reads half."""
    dense, sparse = audited("compute_only"), analyze(simulated("compute_only"), peak_tflops=1979.0)
    assert dense.mfu is not None
    assert sparse.mfu == pytest.approx(dense.mfu * 989.4 / 1979, rel=1e-4)
    assert any("2:4-sparse bf16" in warning for warning in sparse.result["quality"]["warnings"])


# What is declared wrongly, and the words that name the mistake.
MISTAKES: list[tuple[str, Json, str]] = [
    ("hidden_allreduce", {"tokens_factor": "ranks"}, "multiplied by the"),
    ("compute_only", {"params_factor": 12}, "times less than declared"),
    ("compute_only", {"peak_tflops": 300.0}, "the wrong peak: the shapes agree"),
    ("compute_only", {"dtype": "fp32"}, "the wrong element type"),
]


@pytest.mark.parametrize(("scenario", "wrong", "words"), MISTAKES)
def test_flops_that_do_not_fit_name_the_likely_mistake(
    scenario: str, wrong: Json, words: str, simulated: Directory
) -> None:
    """Too many FLOPs for the compute time are an error, not a clipped bar; the shapes tell which factor is wrong."""
    directory = simulated(scenario)
    run = json.loads((directory / "run.json").read_text())
    values = dict(wrong)
    if values.pop("tokens_factor", None):
        values["tokens_per_step"] = run["tokens_per_step"] * run["world_size"]
    if factor := values.pop("params_factor", None):
        values["params"] = run["params"] * factor
    with pytest.raises(ModelFlopsError, match=words):
        analyze(directory, **values)


def test_declared_flops_far_from_the_shapes_are_a_warning(simulated: Directory, audited: Audited) -> None:
    """A quarter fewer parameters than the matrices in the trace have: the declared ones rule, with a warning."""
    directory = simulated("compute_only")
    run = json.loads((directory / "run.json").read_text())
    quiet = audited("compute_only").result["quality"]["warnings"]
    result = analyze(directory, params=run["params"] * 0.75).result
    assert not any("differ by" in warning for warning in quiet)
    assert any("declared too low" in warning for warning in result["quality"]["warnings"])


@pytest.mark.parametrize(
    ("scenario", "stated", "words"),
    [("recompute", "none", "declared as none"), ("compute_only", "full", "declared as full")],
)
def test_recompute_that_contradicts_the_declaration_is_a_warning(
    scenario: str, stated: str, words: str, simulated: Directory
) -> None:
    """Recompute that runs undeclared, or is declared and does not run."""
    result = analyze(simulated(scenario), recompute=stated).result
    assert any(words in warning for warning in result["quality"]["warnings"])


# Capability, multiprocessors and memory of GPUs whose traces have no name, and the row they are.
NAMELESS = [
    ((9, 0), 132, 84_900_000_000, "NVIDIA H100 SXM"),
    ((9, 0), 132, 150_000_000_000, "NVIDIA H200 SXM"),
    ((9, 0), 114, 84_900_000_000, "NVIDIA H100 PCIe"),
    ((8, 0), 108, 85_000_000_000, "NVIDIA A100 80GB SXM"),
    ((8, 0), 108, 42_400_000_000, "NVIDIA A100 40GB"),
    ((7, 0), 80, 34_079_637_504, None),  # SXM or PCIe: their peaks differ
    ((9, 5), 256, 309_000_000_000, None),  # MI350X or MI355X
]


@pytest.mark.parametrize(("capability", "multiprocessors", "memory", "name"), NAMELESS)
def test_properties_that_fit_one_peak_identify_a_gpu(
    capability: tuple[int, int], multiprocessors: int, memory: int, name: str | None
) -> None:
    """Without a name, properties tell the GPU only where they leave one peak possible."""
    found = identify(Device("", memory, multiprocessors, capability, 32))
    assert (found.name if found else None) == name


def test_devices_prints_the_table() -> None:
    """One GPU a line with its dense peaks; sources on request."""
    result = CliRunner().invoke(main, ["devices"])
    line = next(line for line in result.output.splitlines() if line.startswith("NVIDIA H100 SXM"))
    assert line.split()[3:] == ["67", "494.5", "989.4", "989.4", "1978.9", "-", "3350", "132"]
    assert result.output.count("\n") == 1 + len(gpus())
    assert "torchtitan" in CliRunner().invoke(main, ["devices", "--sources"]).output


def test_grouped_queries_make_the_cache_small(tmp_path: Path) -> None:
    """The cache of a Llama 70B holds keys and values of its 8 key-value heads of 128 in two bytes, on 80 layers."""
    config = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    plan = plan_of({**read(written(tmp_path / "config.json", config)), "seq_len": 100, "kv_tokens": 100})
    assert plan is not None
    assert bytes_of(plan)["kv_cache"] == 2 * 2 * 80 * 8 * 128 * 100
