"""What ran, from files people have: run.json, Hugging Face config.json, torchtitan TOML, Megatron arguments.

`read` returns values under the names of ``run.json``; parameters are computed from the sizes.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traceaudit.errors import InputError
from traceaudit.mfu.architecture import Architecture

Values = dict[str, Any]

DOTTED = re.compile(r"^(?:\[[^\]]*\]\s*|\d+:\s*)?\s*([a-z]\w*) \.{3,} ?(.*?)\s*$")  # as Megatron prints its arguments
FEW_MATRICES = ("gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "falcon", "phi", "bert", "starcoder2", "mpt")

# torchtitan names models by flavour; sizes from its model registry (torchtitan/models/llama3).
FLAVOURS: Mapping[tuple[str, str], Architecture] = {
    ("llama3", "8b"): Architecture(32, 4096, 32, 128256, 14336, kv_heads=8),
    ("llama3", "70b"): Architecture(80, 8192, 64, 128256, 28672, kv_heads=8),
    ("llama3", "405b"): Architecture(126, 16384, 128, 128256, 53248, kv_heads=8),
}


def read(file: Path) -> Values:
    """Return what a file declares.

    Raises:
        InputError: it is of no known format, or lacks what its format needs.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
    if file.suffix == ".toml":
        return _checked(file, _torchtitan, _parsed(file, text))
    dotted = [match for match in map(DOTTED.match, text.splitlines()) if match is not None]
    if dotted:
        return _checked(file, _megatron, {match[1]: _value(match[2]) for match in dotted})
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: expected a JSON object such as run.json.")
    if isinstance(found.get("text_config"), dict):
        found = found["text_config"]
    if "num_hidden_layers" in found or "n_layer" in found:
        return _checked(file, _hugging_face, found)
    if "num_layers" in found and "num_attention_heads" in found:
        return _checked(file, _megatron, found)
    return {name: value for name, value in found.items() if value is not None}


def _checked(file: Path, declared: Callable[[Mapping[str, Any]], Values], content: Mapping[str, Any]) -> Values:
    try:
        return declared(content)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{file}: the sizes of the model are incomplete or no numbers: {error}") from error


def _parsed(file: Path, text: str) -> Values:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: cannot be read as TOML: {error}") from error


def _value(text: str) -> Any:  # noqa: ANN401  a number, a flag or text
    """Return the value of an argument as Megatron prints it.

    >>> [_value(text) for text in ("32", "True", "None", "1e-05", "bf16")]
    [32, True, None, 1e-05, 'bf16']
    """
    known = {"True": True, "False": False, "None": None}
    if text in known:
        return known[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _described(model: Architecture, seq_len: object) -> Values:
    """Return the values that follow from the sizes of a model."""
    return {
        "params": model.params(),
        "active_params": model.params(active=True) if model.experts else None,
        "embedding_params": 0 if model.tied else model.embedding_params(),
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": (model.qk_dim + model.v_dim) / 2,
        "vocab": model.vocab,
        "seq_len": seq_len,
    }


def _kept(values: Values) -> Values:
    return {name: value for name, value in values.items() if value is not None}


def _hugging_face(config: Mapping[str, Any]) -> Values:
    """Return what a ``config.json`` of transformers declares; names of several model families."""

    def first(*names: str, default: Any = None) -> Any:  # noqa: ANN401  as the file has it
        return next((config[name] for name in names if config.get(name) is not None), default)

    hidden, heads = int(first("hidden_size", "n_embd", "d_model")), int(first("num_attention_heads", "n_head"))
    kind = str(config.get("model_type", ""))
    plain = any(kind.startswith(name) for name in FEW_MATRICES) and not kind.startswith("phi3")
    experts = int(first("num_local_experts", "n_routed_experts", "num_experts", default=0))
    expert_ffn = int(first("moe_intermediate_size", "expert_ffn", default=0)) or int(
        first("intermediate_size", default=0)
    )
    layers = int(first("num_hidden_layers", "n_layer"))
    shared = int(first("n_shared_experts", default=0)) * expert_ffn
    shared = shared or int(first("shared_expert_intermediate_size", default=0))
    rope = int(first("qk_rope_head_dim", default=0))
    no_rope = int(first("qk_nope_head_dim", default=0))
    model = Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=int(first("vocab_size", default=0)),
        ffn=int(first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)),
        head_dim=rope + no_rope if rope else int(first("head_dim", default=hidden // heads)),
        kv_heads=int(first("num_key_value_heads", "num_kv_heads", default=heads)),
        v_head_dim=first("v_head_dim"),
        gated=not plain,
        tied=bool(first("tie_word_embeddings", default=plain)),
        positions=int(first("n_positions", default=0)) if plain else 0,
        experts=experts,
        top_k=int(first("num_experts_per_tok", "moe_top_k", default=0)),
        expert_ffn=expert_ffn if experts else 0,
        shared_ffn=shared if experts else 0,
        dense_layers=int(first("first_k_dense_replace", default=0)) if experts else 0,
        q_rank=int(first("q_lora_rank", default=0)),
        kv_rank=int(first("kv_lora_rank", default=0)),
        rope_dim=rope,
        biased=plain,
    )
    dtype = first("torch_dtype", "dtype")
    # max_position_embeddings is what the model could take, not what the run used: the sequence length stays open
    return _kept({**_described(model, None), "dtype": dtype})


def _torchtitan(config: Mapping[str, Any]) -> Values:
    """Return what a TOML file of torchtitan declares: the flavour's sizes, batch, layout and recompute."""
    about = {name: config.get(name, {}) for name in ("model", "training", "parallelism", "activation_checkpoint")}
    model = about["model"]
    key = (str(model.get("name", "")).lower(), str(model.get("flavor", "")).lower())
    if key not in FLAVOURS:
        listed = ", ".join(f"{name} {flavour}" for name, flavour in FLAVOURS)
        raise InputError(f"torchtitan model {key[0]!r} {key[1]!r} is not known ({listed}); pass --params instead.")
    training, parallel = about["training"], about["parallelism"]
    seq_len = int(training.get("seq_len", 2048))
    batch = int(training.get("global_batch_size", -1))
    local = training.get("local_batch_size", training.get("batch_size"))
    shard = int(parallel.get("data_parallel_shard_degree", -1))
    replicas = int(parallel.get("data_parallel_replicate_degree", 1))
    degrees = {
        "dp": shard * replicas if shard > 0 else None,
        "tp": parallel.get("tensor_parallel_degree", 1),
        "pp": parallel.get("pipeline_parallel_degree", 1),
        "cp": parallel.get("context_parallel_degree", 1),
        "ep": parallel.get("expert_parallel_degree", 1),
    }
    return _kept(
        {
            **_described(FLAVOURS[key], seq_len),
            "tokens_per_step": batch * seq_len if batch > 0 else None,
            "local_tokens": int(local) * seq_len if local else None,
            "parallel": _kept(degrees),
            "recompute": about["activation_checkpoint"].get("mode"),
        }
    )


def _megatron(arguments: Mapping[str, Any]) -> Values:
    """Return what the arguments of a Megatron run declare."""
    hidden, heads = int(arguments["hidden_size"]), int(arguments["num_attention_heads"])
    grouped = bool(arguments.get("group_query_attention"))
    seq_len, batch = arguments.get("seq_length"), arguments.get("global_batch_size")
    experts = int(arguments.get("num_experts") or 0)
    ffn = int(arguments.get("ffn_hidden_size") or 4 * hidden)
    model = Architecture(
        layers=int(arguments["num_layers"]),
        hidden=hidden,
        heads=heads,
        vocab=int(arguments.get("padded_vocab_size") or arguments.get("vocab_size") or 0),
        ffn=ffn,
        head_dim=int(arguments.get("kv_channels") or hidden // heads),
        kv_heads=int(arguments["num_query_groups"]) if grouped and arguments.get("num_query_groups") else heads,
        gated=bool(arguments.get("swiglu")),
        tied=not arguments.get("untie_embeddings_and_output_weights"),
        positions=int(arguments.get("max_position_embeddings") or 0) if _learned(arguments) else 0,
        experts=experts,
        top_k=int(arguments.get("moe_router_topk") or 0),
        expert_ffn=int(arguments.get("moe_ffn_hidden_size") or ffn) if experts else 0,
        shared_ffn=int(arguments.get("moe_shared_expert_intermediate_size") or 0) if experts else 0,
        biased=not arguments.get("disable_bias_linear", not arguments.get("add_bias_linear", True)),
    )
    degrees = {
        "tp": arguments.get("tensor_model_parallel_size"),
        "pp": arguments.get("pipeline_model_parallel_size"),
        "dp": arguments.get("data_parallel_size"),
        "cp": arguments.get("context_parallel_size"),
        "ep": arguments.get("expert_model_parallel_size"),
    }
    dtype = "bf16" if arguments.get("bf16") else "fp16" if arguments.get("fp16") else None
    micro, dp = arguments.get("micro_batch_size"), arguments.get("data_parallel_size")
    microbatches = int(batch) // (int(micro) * int(dp)) if batch and micro and dp else None
    return _kept(
        {
            **_described(model, seq_len),
            "tokens_per_step": int(batch) * int(seq_len) if batch and seq_len else None,
            "dtype": dtype,
            "world_size": arguments.get("world_size"),
            "parallel": _kept(degrees),
            "microbatches": microbatches,
            "recompute": arguments.get("recompute_granularity") or "none",
        }
    )


def _learned(arguments: Mapping[str, Any]) -> bool:
    kind = arguments.get("position_embedding_type", "learned_absolute")
    return kind == "learned_absolute" and not arguments.get("use_rotary_position_embeddings")
