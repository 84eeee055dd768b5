"""What the GPU rows of a rank are: computing, communicating or copying, of which family, launched by which call."""

import re
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.events import GPU_KINDS, Kind, Trace
from traceaudit.intervals import Array, Intervals
from traceaudit.leaves import Leaf
from traceaudit.nesting import innermost


class State(IntEnum):
    """What a GPU does at an instant; of several, the first of this list."""

    COMPUTE = 0
    COMMUNICATION = 1
    HOST_COPY = 2
    IDLE = 3


COMMUNICATION = re.compile(
    r"^(?:void )?(?:nccl|rccl|msccl|hccl)|oneRankReduce|^oneccl_|xccl::"
    r"|(?:deep_ep|dpsk::ep)::(?!.*get_dispatch_layout)"
    r"|\b(?:(?:hybrid_)?dispatch|(?:hybrid_)?combine|barrier|dispatch_copy_epilogue|combine_reduce_epilogue|engram_fetch)_impl"
    r"|(?:one_shot|two_shot|multimem)_\w*all_?(?:reduce|gather)|multimem_one_shot|all_to_all_vdev|nvshmem"
    r"|\b(?:barrier|put_signal|wait_signal)_kernel"
    r"|cross_device_reduce_[12]stage|allreduce_fusion_kernel|(?:one|two)ShotAllReduce"
    r"|^(?:void )?(?:aiter::)?(?:allgather|reduce_scatter)_|userbuffers_"
    r"|^gloo:"
)

# The collective that a kernel's name or an operator's argument tells; the first that matches.
COLLECTIVE_KINDS = (
    (re.compile(r"reduce_?scatter", re.I), "reduce_scatter"),
    (re.compile(r"all_?reduce|cross_device_reduce", re.I), "all_reduce"),
    (re.compile(r"all_?gather", re.I), "all_gather"),
    (re.compile(r"all_?to_?all|deep_ep|dpsk::ep|dispatch_impl|combine_impl", re.I), "all_to_all"),
    (re.compile(r"broadcast", re.I), "broadcast"),
    (re.compile(r"barrier", re.I), "barrier"),
    (re.compile(r"^(?:nccl:)?(?:send|recv|coalesced)\b|batch_isend_irecv"), "send_recv"),
    (re.compile(r"^(?:nccl:)?gather$"), "gather"),
    (re.compile(r"^(?:nccl:)?scatter$"), "scatter"),
    (re.compile(r"^(?:nccl:)?_?reduce(?:$|_)|nccl(?:Dev)?Kernel_Reduce_|ncclReduce(?:Ring|Tree)"), "reduce"),
)

# Families of compute kernels by name; the first that matches. Operators stand for kernels in runs on CPUs.
FAMILY_NAMES = (
    (
        re.compile(
            r"^aten::(?:\w*(?<!num)(?<!__)mm|matmul|linear|mv|addmv|dot|einsum|\w*convolution\w*)(?:_backward)?(?:\.|$)"
        ),
        Leaf.MATMUL,
    ),
    (
        re.compile(
            r"^aten::(?:copy_|clone|contiguous|cat|stack|split\w*|to|_to_copy|fill_|zero_|zeros\w*|ones\w*|full\w*|empty\w*"
            r"|index_select|embedding\w*|gather|scatter\w*)(?:\.|$)|^fsdp::"
        ),
        Leaf.DEVICE_COPY,
    ),
    (
        re.compile(
            r"^aten::(?:add|sub|mul|div|pow|sqrt|rsqrt|exp|log|tanh|sigmoid|relu|gelu|silu|where|neg|lerp|addcmul|addcdiv"
            r"|dropout|native_dropout|threshold)\w*(?:\.|$)|^(?:graph_\d+_)?cpp_fused"
        ),
        Leaf.ELEMENTWISE,
    ),
    (re.compile(r"get_dispatch_layout|moe_(?:align|sum|permute)|topk|radixSort|bitonicSort", re.I), Leaf.OTHER_KERNELS),
    (re.compile(r"multi_tensor_apply|adam|lamb_|_sgd|distributed_fused", re.I), Leaf.OPTIMIZER),
    (
        re.compile(
            r"flash|fmha|attention|attn_|sdpa|paged_|efficient_attn|AttentionKernel|BatchPrefill|BatchDecode|\bmla_"
            r"|BatchMLA|fmla_|splitkv|aotriton.*attn|cudnn_generated_fort_native_sdpa|triton_tem_fused.*flex",
            re.I,
        ),
        Leaf.ATTENTION,
    ),
    (
        re.compile(r"layer_?norm|rms_?norm|batch_?norm|group_?norm|\bbn_|_norm_|LayerNorm|normalize_kernel", re.I),
        Leaf.NORM,
    ),
    (
        re.compile(
            r"gemm|gemv|\bbmm_|xmma|nvjet|wgmma|hmma|cijk_|cutlass|cublas|matmul|split_?k|_mm_|_mm\b|winograd|implicit_con"
            r"|conv(?:olution|\dd|_|bwd|fwd)|dgrad|wgrad|miopen.*conv|ck_tile.*gemm|igemm|deep_gemm|tensile|matmul_ogs"
            r"|linear_\w*kernel|triton_tem_fused_\w*mm",
            re.I,
        ),
        Leaf.MATMUL,
    ),
    (
        re.compile(
            r"memcpy|memset|copybuffer|fillbuffer|memory_copy|catarray|direct_copy|copy_kernel|_copy_|split_with_sizes"
            r"|transpose_?\d|nchwToNhwc|nhwcToNchw|FillFunctor|chunk_cat",
            re.I,
        ),
        Leaf.DEVICE_COPY,
    ),
    (
        re.compile(
            r"elementwise|triton_poi|pointwise|unrolled|vectorized|gelu|silu|swiglu|act_and_mul|dropout|rotary|rope"
            r"|quant(?:ize|_)|cast_",
            re.I,
        ),
        Leaf.ELEMENTWISE,
    ),
)

TO_DEVICE = re.compile(r"HtoD|Host -> Device|HOST_TO_DEVICE")
TO_HOST = re.compile(r"DtoH|Device -> Host|DEVICE_TO_HOST")
BETWEEN_DEVICES = re.compile(r"PtoP|Peer")
NCCL_ANNOTATION = re.compile(r"^nccl:|^symm_mem|^fused_(?:all_gather|matmul_reduce)")


def state_of(name: str, kind: int) -> State:
    """Return what a GPU row does, by its name and kind.

    >>> state_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", Kind.KERNEL).name
    'COMMUNICATION'
    """
    if TO_DEVICE.search(name) or TO_HOST.search(name):
        if kind == Kind.COPY or name.startswith("MEMORY_COPY"):
            return State.HOST_COPY
    elif kind == Kind.COPY and BETWEEN_DEVICES.search(name):
        return State.COMMUNICATION
    if kind == Kind.KERNEL and COMMUNICATION.search(name):
        return State.COMMUNICATION
    return State.COMPUTE


def family_of(name: str, kind: int) -> Leaf:
    """Return the family of a compute kernel by its name.

    >>> family_of("void flash_fwd_kernel<...>", Kind.KERNEL).label
    'attention'
    """
    if kind != Kind.KERNEL:
        return Leaf.DEVICE_COPY
    return next((family for pattern, family in FAMILY_NAMES if pattern.search(name)), Leaf.OTHER_KERNELS)


NAMESPACES = re.compile(r"(?:\(anonymous namespace\)|at|native|c10|cuda|cutlass|cudnn|std|detail|internal|impl)::")
WORKER = re.compile(r"(\w+?)(?:Functor|KernelImpl|_kernel_cuda(?:_impl)?|CUDAKernel|FunctorOnSelf_add|Op(?=<))")
MANGLED = re.compile(r"^_ZN?K?(?=\d)")


def short_name(name: str) -> str:
    """Return a kernel's name for people: demangled, without return type, namespaces, template and call arguments.

    The functor that tells what a generic kernel does stays, in brackets.

    >>> short_name("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(int)>(int)")
    'vectorized_elementwise_kernel[Gelu]'
    >>> short_name("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256EEEvPT0_")
    'aiter::add_rmsnorm_quant_kernel'
    >>> short_name("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT")
    'nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT'
    """
    if MANGLED.match(name):
        return _demangled(name)
    text = name.removeprefix("void ").removeprefix("__global__ ")
    text = NAMESPACES.sub("", text)
    head = re.split(r"[<(]", text, maxsplit=1)[0].strip() or text
    rest = text[len(head) :]
    worker = WORKER.search(rest) if rest.startswith("<") and head != "Kernel" else None
    if head in ("Kernel", "Kernel2", "kernel", "device_kernel"):  # CUTLASS: the argument is what it is
        inner = re.match(r"<\s*([\w:]+)", rest)
        return inner[1] if inner else head
    return f"{head}[{worker[1]}]" if worker else head


def _demangled(name: str) -> str:
    """Return the nested name at the head of an Itanium-mangled one; ``_GLOBAL__N_1`` and the like are left out.

    >>> _demangled("_Z28flash_fwd_splitkv_mla_kernelI19FlashMlaKernelTrait")
    'flash_fwd_splitkv_mla_kernel'
    """
    at = MANGLED.match(name)
    position = at.end() if at else 0
    parts: list[str] = []
    while (length := re.match(r"\d+", name[position:])) is not None:
        begin = position + length.end()
        parts.append(name[begin : begin + int(length[0])])
        position = begin + int(length[0])
        if not name.startswith("_ZN"):
            break
    return "::".join(part for part in parts if not part.startswith("_GLOBAL_")) or name


def collective_kind(name: str) -> str:
    """Return the kind of collective a name tells, "" where it tells none.

    >>> collective_kind("_allgather_base"), collective_kind("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")
    ('all_gather', '')
    """
    return next((kind for pattern, kind in COLLECTIVE_KINDS if pattern.search(name)), "")


def activities(trace: Trace) -> pd.DataFrame:
    """Return the GPU rows of the rank's device that last, sorted by start, stream and correlation.

    Columns: ``row`` (in `Trace.events`), ``start_ns``, ``end_ns``, ``stream``, ``correlation``, ``state`` (`State`),
    ``family`` (`Leaf`), ``to_host`` and ``pageable`` (host copies), ``launch`` (row of the launching call, -1 where
    there is no record), ``collective`` (row of `Trace.collectives`, -1), ``kind`` (of the collective, "") and ``root``.
    """
    events = trace.events
    kinds = events["kind"].to_numpy()
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    device = main_device(trace)
    row = np.flatnonzero(np.isin(kinds, GPU_KINDS) & (ends > starts) & (events["device"].to_numpy() == device))
    stream, correlation = events["stream"].to_numpy()[row], events["correlation"].to_numpy()[row]
    row = row[np.lexsort((correlation, stream, starts[row]))]
    table = pd.DataFrame(
        {
            "row": row,
            "start_ns": starts[row],
            "end_ns": ends[row],
            "stream": events["stream"].to_numpy()[row],
            "correlation": events["correlation"].to_numpy()[row],
            **_by_name(events, row),
            "launch": launches(events, row),
        }
    )
    return _with_collectives(trace, table)


def main_device(trace: Trace) -> int:
    """Return the device with the most GPU rows, -1 if there are none."""
    events = trace.events
    device = events["device"].to_numpy()[np.isin(events["kind"].to_numpy(), GPU_KINDS)]
    if not len(device):
        return -1
    values, counts = np.unique(device, return_counts=True)
    return int(values[np.argmax(counts)])


def _by_name(events: pd.DataFrame, row: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[np.generic]]:
    """Classify the distinct names once, then take by code."""
    kinds = events["kind"].to_numpy()[row]
    codes = events["name"].cat.codes.to_numpy()[row].astype(np.int64)
    pairs, inverse = np.unique(codes * 16 + kinds, return_inverse=True)
    names = [(str(events["name"].cat.categories[pair // 16]), int(pair % 16)) for pair in pairs]
    states = np.array([state_of(*name) for name in names], np.int8)
    families = np.array([family_of(*name) for name in names], np.int8)
    to_host = np.array([TO_HOST.search(name) is not None for name, _ in names], np.bool_)
    pageable = np.array(["pageable" in name.lower() for name, _ in names], np.bool_)
    return {
        "state": states[inverse] if len(row) else np.empty(0, np.int8),
        "family": families[inverse] if len(row) else np.empty(0, np.int8),
        "to_host": to_host[inverse] if len(row) else np.empty(0, np.bool_),
        "pageable": pageable[inverse] if len(row) else np.empty(0, np.bool_),
    }


def launches(events: pd.DataFrame, row: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return for GPU rows the row of the runtime call with their correlation id, -1 where none was recorded."""
    correlations = events["correlation"].to_numpy()
    calls = np.flatnonzero((events["kind"].to_numpy() == Kind.RUNTIME) & (correlations > 0))
    calls = calls[np.argsort(correlations[calls], kind="stable")]
    wanted = correlations[row]
    if not len(calls):
        return np.full(len(row), -1, np.intp)
    slot = np.minimum(np.searchsorted(correlations[calls], wanted), len(calls) - 1)
    return np.where((correlations[calls][slot] == wanted) & (wanted > 0), calls[slot], -1)


def _with_collectives(trace: Trace, table: pd.DataFrame) -> pd.DataFrame:
    """Add the arguments and the kind of each communication, and copies that belong to a collective."""
    events = trace.events
    names = events["name"].cat.categories.to_numpy(dtype=object)
    codes = events["name"].cat.codes.to_numpy()
    state = table["state"].to_numpy().copy()
    collective = events["collective"].to_numpy()[table["row"]]
    operator, annotation = _launching_collectives(trace, table["launch"].to_numpy())
    linked = np.where(operator >= 0, events["collective"].to_numpy()[np.maximum(operator, 0)], -1)
    collective = np.where((collective < 0) & (state == State.COMMUNICATION), linked, collective)
    copies = np.isin(events["kind"].to_numpy()[table["row"]], (Kind.COPY, Kind.FILL)) & (state == State.COMPUTE)
    state[copies & (annotation >= 0) & (operator >= 0)] = State.COMMUNICATION
    kind = np.full(len(table), "", dtype=object)
    from_args = trace.collectives["collective"].map(collective_kind).to_numpy(dtype=object)
    by_name = np.array([collective_kind(str(name)) for name in names], dtype=object)
    rows = table["row"].to_numpy()
    for index in np.flatnonzero(state == State.COMMUNICATION):
        kind[index] = (
            (from_args[collective[index]] if collective[index] >= 0 else "")
            or (by_name[codes[annotation[index]]] if annotation[index] >= 0 else "")
            or by_name[codes[rows[index]]]
        )
    communicating = state == State.COMMUNICATION
    roots = trace.collectives["root"].to_numpy(dtype=np.int64)
    root = np.where(communicating & (linked >= 0), roots[np.maximum(linked, 0)] if len(roots) else -1, -1)
    return table.assign(state=state, collective=np.where(communicating, collective, -1), kind=kind, root=root)


def _launching_collectives(trace: Trace, launch: npt.NDArray[np.intp]) -> tuple[Array, Array]:
    """Return for launching calls the rows of the ``record_param_comms`` and of the annotation around them, or -1."""
    events = trace.events
    names = events["name"].cat.categories
    codes = events["name"].cat.codes.to_numpy()
    kinds = events["kind"].to_numpy()
    record = np.array([name == "record_param_comms" for name in names], np.bool_)
    marked = np.array([NCCL_ANNOTATION.search(str(name)) is not None for name in names], np.bool_)
    host = np.isin(kinds, (Kind.OPERATOR, Kind.ANNOTATION))
    return (
        enclosing(events, np.flatnonzero(host & record[codes]), launch),
        enclosing(events, np.flatnonzero(host & marked[codes]), launch),
    )


def enclosing(events: pd.DataFrame, spans: npt.NDArray[np.intp], calls: npt.NDArray[np.intp]) -> Array:
    """Return for each call the innermost of some spans around its start on its thread, as rows of events; -1 if none.

    `spans` are rows in the order of the table; a call of -1 has no span.
    """
    result = np.full(len(calls), -1, np.int64)
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    thread = thread_keys(events)
    for key in np.unique(thread[spans]):
        own = spans[thread[spans] == key]
        asked = np.flatnonzero((calls >= 0) & (thread[np.maximum(calls, 0)] == key))
        found = innermost(Intervals(starts[own], ends[own]), starts[calls[asked]])
        result[asked] = np.where(found >= 0, own[np.maximum(found, 0)], -1)
    return result


def thread_keys(events: pd.DataFrame) -> Array:
    """Return one integer a row that tells host threads apart."""
    process, thread = events["process"].to_numpy(), events["thread"].to_numpy()
    return np.asarray(process * np.int64(1_000_003) + thread)
