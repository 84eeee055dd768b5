"""Fit before fast: the bytes of a training run on one GPU, by formula, and what to change so that they fit.

Sources: Korthikanti et al. 2022 (arXiv 2205.05198) for activations, Rajbhandari et al. 2020 (arXiv 1910.02054) for
states and their sharding. Bytes are decimal: 1 GB is 1e9 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traceaudit import __version__
from traceaudit.errors import InputError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class States:
    """Bytes a parameter of weights, gradients and everything the optimizer keeps."""

    weights: float
    gradients: float
    optimizer: float
    title: str

    @property
    def total(self) -> float:
        """Bytes a parameter, all together."""
        return self.weights + self.gradients + self.optimizer


STATES = {
    "adam": States(2, 2, 12, "BF16 weights and gradients; FP32 weights and two moments"),
    "adam-fp32-grads": States(2, 4, 12, "BF16 weights; FP32 gradients, weights and two moments"),
    "adam-both-grads": States(2, 6, 12, "BF16 weights and gradients; FP32 gradients, weights and two moments"),
    "adam-bf16-moments": States(2, 2, 8, "BF16 weights, gradients and two moments; FP32 weights"),
    "adam-8bit": States(2, 2, 6, "BF16 weights and gradients; FP32 weights, two moments of one byte"),
    "adam-fp32": States(4, 4, 8, "all in FP32"),
    "momentum": States(2, 2, 8, "BF16 weights and gradients; FP32 weights and one moment (Muon, SGD)"),
}
RECOMPUTE = ("none", "selective", "full")
LEAST_FREE = 0.10  # of the GPU, kept free for NCCL, workspaces and fragmentation
FRAGMENTED = 0.20  # of the reserved bytes unused at the peak


@dataclass(frozen=True)
class Plan:
    """A model and how it is run, by the names of ``run.json``.

    Unlike `traceaudit.mfu.architecture.Architecture`, which computes the parameters from all sizes of a decoder, a plan
    has them declared, and sizes that are not known are 0.

    Attributes:
        params: parameters, all experts included.
        layers, hidden, heads, seq_len, vocab, microbatch: sizes.
        kv_heads, head_dim: for the KV cache; those of attention where not given.
        states: a key of `STATES`.
        tp, pp, dp, cp: degrees; `virtual_stages` a rank, `microbatches` a step.
        sequence_parallel: norms and dropouts are split over the tensor parallel ranks, too.
        zero: 0 nothing is sharded over `dp`, 1 optimizer states, 2 and gradients, 3 and weights (FSDP).
        recompute: "none", "selective" (attention's scores are not kept, as with FlashAttention), "full".
        kv_tokens: tokens held in a KV cache of two bytes a value, for inference or rollouts.
    """

    params: float
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    seq_len: int = 0
    vocab: int = 0
    microbatch: int = 1
    kv_heads: int | None = None
    head_dim: int | None = None
    states: str = "adam"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    virtual_stages: int = 1
    microbatches: int | None = None
    sequence_parallel: bool = False
    zero: int = 0
    recompute: str = "none"
    kv_tokens: int = 0


def state_bytes(plan: Plan) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer states on one GPU (ZeRO, sections 5 and 7).

    >>> [round(sum(state_bytes(Plan(7.5e9, dp=64, zero=stage)).values()) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    size, own = STATES[plan.states], plan.params / (plan.tp * plan.pp)
    split = [plan.dp * plan.cp if plan.zero >= stage else 1 for stage in (3, 2, 1)]
    parts = zip(
        ("weights", "gradients", "optimizer"), (size.weights, size.gradients, size.optimizer), split, strict=True
    )
    return {name: own * each / shards for name, each, shards in parts}


def layer_bytes(plan: Plan) -> float:
    """Return the activations that one layer keeps for one micro-batch on one GPU (Korthikanti, table 2).

    >>> f"{layer_bytes(Plan(175e9, 96, 12_288, 96, 2_048)) / 1e9:.3f} GB"
    '2.869 GB'
    """
    sbh = plan.seq_len / plan.cp * plan.microbatch * plan.hidden
    scores = 5 * plan.heads * plan.seq_len / plan.hidden if plan.recompute == "none" else 0.0
    if plan.recompute == "full":
        return 2 * sbh / (plan.tp if plan.sequence_parallel else 1)
    if plan.sequence_parallel:
        return sbh / plan.tp * (34 + scores)
    return sbh * (10 + 24 / plan.tp + scores / plan.tp)


def in_flight(plan: Plan) -> float:
    """Return the layers' activations that the first stage holds, in micro-batches times its layers (1F1B).

    The first of p stages holds p micro-batches of L/p layers; interleaved ones 1 + (p - 1)/(p v) times as much.
    """
    held = plan.pp if plan.microbatches is None else min(plan.pp, plan.microbatches)
    more = 1 + (plan.pp - 1) / (plan.pp * plan.virtual_stages) if plan.virtual_stages > 1 else 1.0
    return plan.layers / plan.pp * held * more


def bytes_of(plan: Plan) -> dict[str, float]:
    """Return the bytes on the fullest GPU by what they are for: the first stage, with the logits of the last if alone.

    Raises:
        InputError: a size that a formula needs is missing, or is not positive.
    """
    _check(plan)
    found = dict(state_bytes(plan))
    if plan.layers and plan.seq_len:
        found["activations"] = layer_bytes(plan) * in_flight(plan)
    if plan.vocab and plan.seq_len and plan.pp == 1:
        found["logits"] = 4.0 * plan.seq_len / plan.cp * plan.microbatch * plan.vocab / plan.tp
    if plan.kv_tokens:
        heads = plan.kv_heads or plan.heads
        width = plan.head_dim or plan.hidden // max(plan.heads, 1)
        found["kv_cache"] = 2.0 * 2 * plan.layers / plan.pp * max(heads / plan.tp, 1) * width * plan.kv_tokens
    return found


def _check(plan: Plan) -> None:
    if plan.states not in STATES or plan.recompute not in RECOMPUTE or plan.zero not in range(4):
        raise InputError(f"states are one of {', '.join(STATES)}; recompute of {', '.join(RECOMPUTE)}; ZeRO 0 to 3.")
    if plan.params <= 0 or min(plan.tp, plan.pp, plan.dp, plan.cp, plan.virtual_stages, plan.microbatch) < 1:
        raise InputError("parameters, degrees and micro-batch must be positive.")
    if (plan.layers or plan.seq_len) and not (plan.layers and plan.hidden and plan.heads and plan.seq_len):
        raise InputError("activations need --layers, --hidden, --heads and --seq-len together.")


def inventory(plan: Plan, gpu_bytes: float | None = None, seen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the byte inventory as plain data.

    Args:
        plan: the model and how it is run.
        gpu_bytes: memory of one GPU.
        seen: what was measured: ``allocated_peak_bytes``, ``reserved_peak_bytes``, ``recompute_share``, each or None.

    Raises:
        InputError: see `bytes_of`.
    """
    parts = bytes_of(plan)
    total = sum(parts.values())
    findings = _findings(plan, gpu_bytes, seen or {})
    usable = None if gpu_bytes is None else gpu_bytes * (1 - LEAST_FREE)
    size = STATES[plan.states]
    return {
        "schema_version": SCHEMA_VERSION,
        "traceaudit_version": __version__,
        "kind": "inventory",
        "plan": {name: getattr(plan, name) for name in Plan.__dataclass_fields__},
        "bytes": parts,
        "total_bytes": total,
        "layer_bytes": layer_bytes(plan) if plan.layers and plan.seq_len else None,
        "states": {"title": size.title, "bytes_per_param": size.total, "model_bytes": plan.params * size.total},
        "gpu_bytes": gpu_bytes,
        "usable_bytes": usable,
        "fits": None if usable is None else total <= usable,
        "changes": [] if usable is None else changes(plan, usable),
        "seen": dict(seen) if seen else None,
        "findings": findings,
        "checklist": _checklist(total, usable, seen or {}),
    }


def changes(plan: Plan, usable: float) -> list[dict[str, Any]]:
    """Return what can be divided by what: single changes, the least costly first, and then one upon the other."""
    rows = []
    steps = list(_single(plan))
    for title, changed in steps:
        rows.append(_row(title, changed, usable))
    if not any(row["fits"] for row in rows):
        titles: list[str] = []
        built = plan
        for title, change in _upon(plan):
            built, titles = change(built), [*titles, title]
            row = _row(" + ".join(titles), built, usable)
            if len(titles) > 1 and (row["fits"] or len(titles) == 4):
                rows.append(row)
            if row["fits"]:
                break
    return rows


def _row(title: str, plan: Plan, usable: float) -> dict[str, Any]:
    total = sum(bytes_of(plan).values())
    return {"title": title, "total_bytes": total, "fits": total <= usable}


def _single(plan: Plan) -> Sequence[tuple[str, Plan]]:
    found: list[tuple[str, Plan]] = []
    if plan.dp * plan.cp > 1:
        names = {1: "optimizer states", 2: "gradients, too", 3: "weights, too (FSDP)"}
        found += [
            (f"shard {names[zero]} over {plan.dp * plan.cp} ranks (ZeRO {zero})", replace(plan, zero=zero))
            for zero in range(plan.zero + 1, 4)
        ]
    if plan.tp > 1 and not plan.sequence_parallel:
        found.append(("sequence parallel", replace(plan, sequence_parallel=True)))
    if plan.recompute == "none":
        found.append(("recompute attention's scores (FlashAttention)", replace(plan, recompute="selective")))
    if plan.microbatch > 1:
        found.append(("half the micro-batch", replace(plan, microbatch=plan.microbatch // 2)))
    if plan.recompute != "full":
        found.append(("full recompute (a third more compute)", replace(plan, recompute="full")))
    if plan.tp < 8:
        found.append((f"tensor parallel {2 * plan.tp}", replace(plan, tp=2 * plan.tp)))
    if plan.layers >= 2 * plan.pp:
        found.append((f"pipeline of {2 * plan.pp} stages", replace(plan, pp=2 * plan.pp)))
    return found


def _upon(plan: Plan) -> Sequence[tuple[str, Any]]:
    """Return changes to be made one upon the other."""
    sharded = [("ZeRO 3", lambda now: replace(now, zero=3))] if plan.dp * plan.cp > 1 and plan.zero < 3 else []
    return [
        *sharded,
        ("attention's scores recomputed", lambda now: replace(now, recompute="selective")),
        ("tensor parallel 8 with sequence parallel", lambda now: replace(now, tp=8, sequence_parallel=True)),
        ("full recompute", lambda now: replace(now, recompute="full")),
    ]


def _findings(plan: Plan, gpu_bytes: float | None, seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what formulas and measured memory say together."""
    found = []
    allocated, reserved = seen.get("allocated_peak_bytes"), seen.get("reserved_peak_bytes")
    recomputes = plan.recompute == "full" or bool(seen.get("recompute_share") or 0)
    if recomputes and gpu_bytes and plan.layers and plan.seq_len:
        lighter = "selective" if plan.recompute == "full" else "none"
        without = replace(plan, recompute=lighter)
        needed = sum(bytes_of(without).values())
        if needed <= gpu_bytes * (1 - LEAST_FREE):
            found.append(
                {
                    "id": "memory.recompute-not-needed",
                    "title": "recompute is on but memory would do without",
                    "evidence": f"{needed / 1e9:.1f} GB of {gpu_bytes / 1e9:.0f} GB with recompute {lighter}",
                    "action": f"set recompute to {lighter}",
                }
            )
    return [*found, *fragmentation(allocated, reserved)]


def fragmentation(allocated: int | None, reserved: int | None) -> list[dict[str, Any]]:
    """Return a finding if much of the reserved memory is not allocated at the peak."""
    if not allocated or not reserved or (reserved - allocated) / reserved <= FRAGMENTED:
        return []
    return [
        {
            "id": "memory.fragmentation",
            "title": "reserved far above allocated: fragmentation",
            "evidence": f"{reserved / 1e9:.1f} GB reserved, {allocated / 1e9:.1f} GB allocated at the peak",
            "action": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before adding GPUs",
        }
    ]


def _checklist(total: float, usable: float | None, seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return items 1 and 9."""
    fits = "unknown" if usable is None else "ok" if total <= usable else "problem"
    room = "" if usable is None else f" of {usable / 1e9:.1f} GB usable"
    evidence = f"{total / 1e9:.1f} GB by formula{room}"
    return [{"item": 1, "title": "Fit before fast", "status": fits, "evidence": evidence}, allocator_item(seen)]


def allocator_item(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return item 9 from measured peaks: ``allocated_peak_bytes`` and ``reserved_peak_bytes``, each or None."""
    allocated, reserved = seen.get("allocated_peak_bytes"), seen.get("reserved_peak_bytes")
    fragmented = fragmentation(allocated, reserved)
    if fragmented:
        status, evidence = "problem", fragmented[0]["evidence"]
    elif allocated and reserved:
        status, evidence = "ok", "allocated close to reserved"
    else:
        status, evidence = "unknown", "no memory events (profile_memory)"
    return {"item": 9, "title": "Allocator before GPUs", "status": status, "evidence": evidence}


def plan_of(values: Mapping[str, Any]) -> Plan | None:
    """Return the plan that the values of a ``run.json`` and its degrees declare; None without parameters."""
    chosen = {name: values[name] for name in Plan.__dataclass_fields__ if values.get(name) is not None}
    if chosen.get("recompute") not in (None, *RECOMPUTE):
        chosen["recompute"] = "selective"  # frameworks name their modes; each keeps less than everything
    return Plan(**chosen) if "params" in chosen else None


def seen_in(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ``result.json`` says of memory: the allocator's peaks, and the share of time that is recompute."""
    facts = result.get("host_facts", {}).get("allocator", {})
    job = result["job"]
    return {
        "allocated_peak_bytes": facts.get("allocated_peak_bytes"),
        "reserved_peak_bytes": facts.get("reserved_peak_bytes"),
        "recompute_share": job["buckets"].get("recompute", 0) / job["window_ns"] if job["window_ns"] else None,
    }
