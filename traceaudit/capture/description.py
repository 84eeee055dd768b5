"""What ran, for ``run.json``: sizes of the model, layout of the job, versions."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from traceaudit import __version__

Model = Any  # a module, a PipelineStage, or a list of them
Values = dict[str, Any]

# Names that configurations of models give their sizes (Hugging Face, GPT-2, torchtitan, Megatron), by ours.
SIZES = {
    "layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "dim", "d_model"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "vocab": ("padded_vocab_size", "vocab_size"),
    "seq_len": ("max_seq_len", "seq_length", "n_positions", "max_position_embeddings", "block_size"),
}
CONFIGURATIONS = ("config", "model_args", "args", "params")  # attributes of models that hold one
TOP_K = ("top_k", "topk", "num_experts_per_tok", "moe_router_topk", "k")
LOW_PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16"}
DIMENSIONS = ("pp", "tp", "cp", "ep")  # of a device mesh; all others that are named dp are data parallelism


def describe(
    model: Model = None,
    *,
    mesh: Any = None,  # noqa: ANN401  a DeviceMesh
    parallel: Mapping[str, int] | None = None,
    **known: Any,  # noqa: ANN401  names and values of run.json
) -> Values:
    """Return the content of ``run.json`` as far as this rank alone can find it out.

    Args:
        model: the module, or the stages (`torch.distributed.pipelining`) or modules that a rank of a pipeline has;
            sharded by FSDP, DDP or tensor parallelism, or not.
        mesh: the job's `DeviceMesh`; found through the parameters where they are distributed tensors.
        parallel: degrees of parallelism, ``{"pp": 4, "dp": 8}``; beats the mesh.
        known: what is known already, by the names of ``run.json``; beats what is found.

    With a pipeline, parameters and layers are those of this rank's stages; `capture` and `handler` sum them up. With a
    mesh that does not cover the job, degrees and parameters are left out: this may be one stage of it.
    """
    modules = modules_of(model)
    given, mesh = mesh is not None, mesh if mesh is not None else _mesh_of(modules)
    world = dist.get_world_size() if _initialised() else 1
    degrees = {**degrees_of(model, mesh, world), **(parallel or {})}
    partial = mesh is not None and not given and not parallel and mesh.size() != world
    total, experts = _parameters(modules, degrees.get("tp", 1))
    total = 0 if partial else total
    found: Values = {
        "params": total or None,
        "active_params": _active(modules, total, experts) if total else None,
        **{name: _size(modules, name) for name in SIZES},
        "tokens_per_step": None,
        "dtype": _dtype(modules),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": world,
        "parallel": None if partial else degrees,
        "microbatches": None,
        "virtual_stages": len(modules) if len(modules) > 1 else None,
        "recompute": _recompute(modules),
        "tokens_per_second": None,
        "step_seconds": None,
        "device": _device(modules),
        "mesh": _mesh(mesh),
        "process_groups": _groups(),
        "versions": versions(),
    }
    return {**found, **{name: value for name, value in known.items() if value is not None}}


def versions() -> Values:
    """Return what the run was made with; None where there is no such thing."""
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    nccl: Any = torch.cuda.nccl.version() if on_gpu else None  # type: ignore[no-untyped-call]
    return {
        "traceaudit": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def modules_of(model: Model) -> list[nn.Module]:
    """Return the modules of a rank; those of stages of a pipeline where it has such."""
    if model is None:
        return []
    listed = [model] if isinstance(model, nn.Module) or hasattr(model, "submod") else list(model)
    return [getattr(own, "submod", own) for own in listed]


def stages_of(model: Model) -> list[Any]:
    """Return the stages of a pipeline (`torch.distributed.pipelining`) that a rank has, none where it has modules."""
    listed = model if isinstance(model, list | tuple) else [model]
    return [own for own in listed if hasattr(own, "submod") and hasattr(own, "group")]


def degrees_of(model: Model, mesh: Any, world: int) -> dict[str, int]:  # noqa: ANN401
    """Return the degrees of parallelism that a mesh or the stages of a pipeline tell; else all ranks are replicas."""
    told = _mesh(mesh)
    if told is None or not told["names"]:
        stages = stages_of(model)
        depth = dist.get_world_size(stages[0].group) if stages else 1
        return {"pp": depth, "dp": world // depth} if depth > 1 else {"dp": world}
    degrees = dict.fromkeys(("pp", "tp", "dp", "cp", "ep"), 1)
    for name, size in zip(told["names"], told["shape"], strict=True):
        key = next((own for own in DIMENSIONS if name == own or name.startswith(f"{own}_")), "dp")
        degrees[key] *= int(size)
    return degrees


def _all(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from module.modules()


def _parameters(modules: Sequence[nn.Module], tp: int) -> tuple[int, list[tuple[nn.Module, int]]]:
    """Return the parameters of the whole model, and of each set of experts (with the module that routes to it).

    Distributed tensors tell their whole size. Flat parameters of FSDP1 remember theirs; Megatron's tensor-parallel
    parameters are marked and count `tp` times.
    """
    flat = [handle.flat_param for module in _all(modules) if (handle := getattr(module, "_handle", None)) is not None]
    if flat:
        return sum(int(torch.Size(own._unpadded_unsharded_size).numel()) for own in flat), []
    seen: dict[int, int] = {}
    for module in modules:
        for parameter in module.parameters():
            sharded = tp if getattr(parameter, "tensor_model_parallel", False) else 1
            seen[id(parameter)] = parameter.numel() * sharded
    routed = [
        (module, own) for module in _all(modules) if isinstance(own := getattr(module, "experts", None), nn.Module)
    ]
    experts = [(module, sum(seen.get(id(weight), 0) for weight in own.parameters())) for module, own in routed]
    return sum(seen.values()), experts


def _active(modules: Sequence[nn.Module], total: int, experts: Sequence[tuple[nn.Module, int]]) -> int | None:
    """Return the parameters that work on one token; None without experts, or where a token's share is not known."""
    if not experts:
        return None
    idle = 0.0
    for module, size in experts:
        count, chosen = _number_of(module), _chosen(module, modules)
        if not count or not chosen:
            return None
        idle += size * (1 - min(chosen / count, 1))
    return round(total - idle)


def _number_of(module: nn.Module) -> int | None:
    """Return how many experts a layer has: entries of a list, else the first dimension of stacked weights."""
    experts = module.experts
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    weights = experts.parameters() if isinstance(experts, nn.Module) else ()
    stacked = [int(weight.shape[0]) for weight in weights if weight.dim() == 3]
    told = getattr(experts, "num_experts", None)
    return int(told) if isinstance(told, int) else stacked[0] if stacked else None


def _chosen(module: nn.Module, modules: Sequence[nn.Module]) -> int | None:
    """Return how many experts see a token: told by the layer, its router, or the model's configuration."""
    places = [module, *module.children(), *_configurations(modules)]
    for place in places:
        for name in TOP_K:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _configurations(modules: Sequence[nn.Module]) -> list[object]:
    found = []
    for module in modules:
        while isinstance(inner := getattr(module, "module", None), nn.Module):  # DDP, Float16Module
            module = inner
        found += [value for name in CONFIGURATIONS if (value := getattr(module, name, None)) is not None]
    return found


def configured(modules: Sequence[nn.Module], name: str) -> int | None:
    """Return a size of the whole model from its configuration, None where that does not tell."""
    for configuration in _configurations(modules):
        for spelling in SIZES[name]:
            value = getattr(configuration, spelling, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _size(modules: Sequence[nn.Module], name: str) -> int | None:
    """Return a size of the model from its configuration, else from what it is made of."""
    if (told := configured(modules, name)) is not None:
        return told
    if name == "layers":
        stacks = [
            max((len(own) for own in module.modules() if _is_stack(own)), default=0)  # type: ignore[arg-type]
            for module in modules
        ]
        return sum(stacks) or None
    embedding = next((own for own in _all(modules) if isinstance(own, nn.Embedding)), None)
    if name == "vocab" and embedding is not None:
        return embedding.num_embeddings
    if name == "hidden" and embedding is not None:
        return embedding.embedding_dim
    if name == "heads":
        return next((own.num_heads for own in _all(modules) if isinstance(own, nn.MultiheadAttention)), None)
    return None


def _is_stack(module: nn.Module) -> bool:
    """Tell whether a module lists modules of one kind that have modules themselves: layers, not steps of one."""
    kinds = {type(getattr(own, "_checkpoint_wrapped_module", own)) for own in module.children()}
    listing = isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) == 1
    return listing and all(any(True for _ in own.children()) for own in module.children())


def _dtype(modules: Sequence[nn.Module]) -> str | None:
    """Return the element type of the products where modules tell it; fp32 weights may be cast, so they tell nothing."""
    for module in _all(modules):
        state = getattr(module, "_get_fsdp_state", None)
        policy = getattr(state(), "_mp_policy", None) if callable(state) else getattr(module, "mixed_precision", None)
        if (dtype := getattr(policy, "param_dtype", None)) in LOW_PRECISION:
            return LOW_PRECISION[dtype]
    for module in modules:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                return LOW_PRECISION.get(parameter.dtype)
    return None


def _recompute(modules: Sequence[nn.Module]) -> str | None:
    """Return "full" where every layer of the largest stack is checkpointed, "selective" where some are; else None."""
    if any(getattr(module, "is_gradient_checkpointing", False) for module in modules):
        return "full"
    wrapped = sum(type(own).__name__ == "CheckpointWrapper" for own in _all(modules))
    if not wrapped:
        return None
    layers = _size(modules, "layers") or 0
    return "full" if wrapped >= layers else "selective"


def _mesh_of(modules: Sequence[nn.Module]) -> Any:  # noqa: ANN401
    for module in modules:
        for parameter in module.parameters():
            if (mesh := getattr(parameter, "device_mesh", None)) is not None:
                return mesh
    return None


def _mesh(mesh: Any) -> Values | None:  # noqa: ANN401
    if mesh is None:
        return None
    return {"names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.mesh.shape)}


def _device(modules: Sequence[nn.Module]) -> str | None:
    for module in modules:
        for parameter in module.parameters():
            return str(parameter.device.type)
    return None


def _groups() -> list[Values]:
    """Return the process groups of this rank: description, backend, ranks."""
    if not _initialised():
        return []
    groups = dist.distributed_c10d._pg_map
    return [
        {"description": str(getattr(group, "group_desc", "")), "backend": str(told[0]), "ranks": _ranks(group)}
        for group, told in groups.items()
    ]


def _ranks(group: Any) -> list[int]:  # noqa: ANN401
    return sorted(dist.get_process_group_ranks(group))
