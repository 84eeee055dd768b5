"""GPU rows are told apart by names, arguments and the calls that launched them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceaudit.classify import State, activities, collective_kind, family_of, main_device, state_of
from traceaudit.events import Kind, Trace
from traceaudit.leaves import Leaf
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise

Event = dict[str, Any]

# Kernels of every library for communication (kineto_traces.md section 3) and the collective that each name tells.
COMMUNICATION = {
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",  # NCCL up to 2.7
    "ncclAllGatherRingLLKernel_copy_i8(ncclColl)": "all_gather",
    "ncclReduceScatterRingLLKernel_sum_f32(ncclColl)": "reduce_scatter",
    "ncclReduceRingLLKernel_sum_f32(ncclColl)": "reduce",
    "ncclBroadcastRingLLKernel_copy_i8(ncclColl)": "broadcast",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",  # up to 2.18
    "ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*)": "reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",  # since 2.19
    "ncclDevKernel_AllReduce_Sum_f32_TREE_LL(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_Reduce_Prod_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_AllGatherV_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "broadcast",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": "",
    "ncclSymDevKernel_AllReduce_LLMC_sum_bf16": "all_reduce",  # symmetric memory of NCCL
    "ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)": "all_gather",
    "ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16": "reduce_scatter",
    "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_f32": "all_reduce",
    "void oneRankReduce<FuncPreMulSum<float>>(void*, void*)": "",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "",  # RCCL
    "ncclDevKernelDebug_Generic(ncclDevKernelArgsStorage<4096ul>)": "",
    "mscclKernel_Sum_float_LL(ncclDevComm*)": "",
    "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)": "",
    "oneccl_allreduce_medium": "all_reduce",
    "void xccl::broadcast_kernel<float>": "broadcast",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)": "all_to_all",
    "void deep_ep::intranode::combine<__nv_bfloat16>(int4*)": "all_to_all",
    "void deep_ep::internode::notify_dispatch<false, 4>(int const*)": "all_to_all",
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)": "all_to_all",
    "void deep_ep::internode_ll::clean_low_latency_buffer<1024>(int*)": "all_to_all",
    "void deep_ep::intranode::cached_notify_combine<8>(void**)": "all_to_all",
    "void deep_ep::legacy::internode::combine<true>(void*)": "all_to_all",
    "void dpsk::ep::internode::dispatch<true>(int4*)": "all_to_all",
    "void hybrid_dispatch_impl<8, 7168>(void*)": "all_to_all",
    "hybrid_combine_impl": "all_to_all",
    "void dispatch_impl<8, 7168>(void*)": "all_to_all",
    "void combine_impl<8, 7168>(void*)": "all_to_all",
    "dispatch_copy_epilogue_impl": "",
    "combine_reduce_epilogue_impl": "",
    "engram_fetch_impl": "",
    "barrier_impl": "barrier",
    "void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16, 8>": "all_reduce",
    "void two_shot_all_reduce_kernel<float, 16, 8>": "all_reduce",
    "two_shot_all_reduce_kernel_inplace": "all_reduce",
    "void (anonymous namespace)::multimem_all_reduce_kernel<float, 16>": "all_reduce",
    "multimem_one_shot_all_reduce_kernel": "all_reduce",
    "multimem_all_gather_kernel": "all_gather",
    "(anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)": "barrier",
    "(anonymous namespace)::put_signal_kernel(unsigned int**, int, int, int, int, unsigned long)": "",
    "(anonymous namespace)::wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)": "",
    "all_to_all_vdev_2d_kernel": "all_to_all",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)": "all_reduce",
    "void aiter::cross_device_reduce_2stage<half, 4>": "all_reduce",
    "void aiter::allgather_lastdim<half, 8>": "all_gather",
    "void aiter::reduce_scatter_cross_device_store<half, 8>": "reduce_scatter",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8>": "all_reduce",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<half, 8>": "all_reduce",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop": "",
    "kuserbuffers_pushsend": "",
    "kuserbuffers_pullrecv": "",
}


@pytest.mark.parametrize(("name", "kind"), COMMUNICATION.items())
def test_kernels_that_communicate_are_known_by_name(name: str, kind: str) -> None:
    """A kernel of a communication library communicates, and tells its collective only where its name does."""
    assert state_of(name, Kind.KERNEL) == State.COMMUNICATION
    assert collective_kind(name) == kind


# Compute kernels and their families.
FAMILIES = {
    "void deep_ep::layout::get_dispatch_layout<256, 8>(long const*)": Leaf.OTHER_KERNELS,
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT": Leaf.MATMUL,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": Leaf.MATMUL,
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt": Leaf.MATMUL,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>": Leaf.MATMUL,
    "Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1": Leaf.MATMUL,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": Leaf.MATMUL,
    "sm80_xmma_wgrad_implicit_gemm_indexed_bf16": Leaf.MATMUL,
    "triton_tem_fused_mm_3": Leaf.MATMUL,
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>": Leaf.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": Leaf.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": Leaf.ATTENTION,
    "triton_tem_fused_flex_attention_1": Leaf.ATTENTION,
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>": Leaf.NORM,
    "triton_red_fused_native_layer_norm_0": Leaf.NORM,
    "void rms_norm_kernel<c10::BFloat16>": Leaf.NORM,
    "void at::native::batch_norm_collect_statistics_kernel<float>": Leaf.NORM,
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": Leaf.ELEMENTWISE,
    "triton_poi_fused_add_mul_7": Leaf.ELEMENTWISE,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": Leaf.DEVICE_COPY,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>": Leaf.DEVICE_COPY,
    "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel": Leaf.DEVICE_COPY,
    "__amd_rocclr_copyBuffer": Leaf.DEVICE_COPY,
    "__amd_rocclr_fillBufferAligned": Leaf.DEVICE_COPY,
    "MEMORY_COPY_DEVICE_TO_DEVICE": Leaf.DEVICE_COPY,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": Leaf.OPTIMIZER,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": Leaf.OTHER_KERNELS,
    "void (anonymous namespace)::softmax_warp_forward<float>": Leaf.OTHER_KERNELS,
    "my_reduce_scatter_like_kernel": Leaf.OTHER_KERNELS,
}


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_compute_kernels_have_a_family(name: str, family: Leaf) -> None:
    """A kernel that does not communicate computes, and its name tells its family or none."""
    assert state_of(name, Kind.KERNEL) == State.COMPUTE
    assert family_of(name, Kind.KERNEL) == family


# Copies and fills as CUDA and ROCm name them.
COPIES = [
    ("Memcpy HtoD (Pinned -> Device)", Kind.COPY, State.HOST_COPY),
    ("Memcpy HtoD (Pageable -> Device)", Kind.COPY, State.HOST_COPY),
    ("Memcpy DtoH (Device -> Pinned)", Kind.COPY, State.HOST_COPY),
    ("CopyHostToDevice (Host -> Device)", Kind.COPY, State.HOST_COPY),
    ("MEMORY_COPY_HOST_TO_DEVICE", Kind.KERNEL, State.HOST_COPY),
    ("MEMORY_COPY_DEVICE_TO_HOST", Kind.KERNEL, State.HOST_COPY),
    ("MEMORY_COPY_DEVICE_TO_DEVICE", Kind.KERNEL, State.COMPUTE),
    ("Memcpy DtoD (Device -> Device)", Kind.COPY, State.COMPUTE),
    ("Memcpy PtoP (Device -> Device)", Kind.COPY, State.COMMUNICATION),
    ("Memset (Device)", Kind.FILL, State.COMPUTE),
    ("Memset (Unknown)", Kind.FILL, State.COMPUTE),
    ("void my_DtoH_kernel()", Kind.KERNEL, State.COMPUTE),
]


@pytest.mark.parametrize(("name", "kind", "state"), COPIES)
def test_copies_are_told_apart_by_where_they_go(name: str, kind: Kind, state: State) -> None:
    """Copies to and from the host are host copies, between GPUs communication, within one GPU compute."""
    assert state_of(name, kind) == state


@pytest.mark.parametrize("kind", [Kind.COPY, Kind.FILL])
def test_copies_and_fills_are_one_family(kind: Kind) -> None:
    """Copies and fills that count as compute are device copies, whatever their names."""
    assert family_of("Memcpy DtoD (Device -> Device)", kind) == Leaf.DEVICE_COPY


# Collectives as operators' arguments and annotations name them.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "send": "send_recv",
    "recv": "send_recv",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "wait": "",
    "init": "",
    "": "",
    "nccl:all_reduce": "all_reduce",
    "nccl:_all_gather_base": "all_gather",
    "nccl:_reduce_scatter_base": "reduce_scatter",
    "nccl:all_to_all": "all_to_all",
    "nccl:broadcast": "broadcast",
    "nccl:send 1->2": "send_recv",
    "nccl:recv 1<-2": "send_recv",
    "nccl:coalesced": "send_recv",
    "nccl:reduce": "reduce",
}


@pytest.mark.parametrize(("name", "kind"), COLLECTIVES.items())
def test_recorded_names_tell_the_kind_of_a_collective(name: str, kind: str) -> None:
    """Every name that PyTorch records for a collective has one of the ten kinds, or none where it moves nothing."""
    assert collective_kind(name) == kind


# The table of activities


Read = Callable[[list[Event]], Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads a trace of some events."""

    def loaded(events: list[Event]) -> Trace:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(events), encoding="utf-8")
        return normalise(load(path))

    return loaded


def gpu(start: int, length: int = 1, name: str = "gemm", cat: str = "kernel", **args: object) -> Event:
    """Return a GPU row on stream 7 of device 0 unless `args` say otherwise."""
    args = {"stream": 7, "device": 0, **args}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": length, "args": args}


def host(start: int, length: int, name: str, cat: str = "cuda_runtime", tid: int = 1, **args: object) -> Event:
    """Return a host row."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": length, "args": args}


def record(start: int, length: int, name: str, tid: int = 1, **args: object) -> Event:
    """Return the operator that holds the arguments of a collective."""
    return host(start, length, "record_param_comms", "cpu_op", tid, **{"Collective name": name, **args})


def test_activities_are_sorted_by_start_stream_and_correlation(read: Read) -> None:
    """Rows that last are listed in one order, however the file has them; rows without length are no activity."""
    rows = [
        gpu(5, stream=9, correlation=1),
        gpu(5, stream=7, correlation=4),
        gpu(1, length=0, stream=1),
        gpu(5, stream=7, correlation=3),
        gpu(2, stream=20),
    ]
    table = activities(read(rows))
    assert list(zip(table["start_ns"], table["stream"], table["correlation"], strict=True)) == [
        (2_000, 20, -1),
        (5_000, 7, 3),
        (5_000, 7, 4),
        (5_000, 9, 1),
    ]


def test_only_the_device_with_most_rows_is_the_ranks(read: Read) -> None:
    """A rank is one GPU: rows of others that the process touched are left out."""
    trace = read([gpu(1, device=0), gpu(2, device=3), gpu(3, device=3)])
    assert main_device(trace) == 3
    assert activities(trace)["start_ns"].tolist() == [2_000, 3_000]


def test_without_gpu_rows_there_are_no_activities(read: Read) -> None:
    """A trace of the host alone has no device and an empty table."""
    trace = read([host(1, 1, "cudaLaunchKernel", correlation=1)])
    assert main_device(trace) == -1
    assert len(activities(trace)) == 0


def test_a_launch_is_the_call_with_the_same_correlation(read: Read) -> None:
    """Rows find their launch by correlation; 0 and a missing one join nothing; kernels of a graph share its launch."""
    trace = read(
        [
            host(0, 1, "cudaLaunchKernel", correlation=11),
            host(2, 1, "cudaGraphLaunch", correlation=12),
            host(4, 1, "cudaLaunchKernel", correlation=0),
            host(6, 1, "cudaLaunchKernel"),
            host(8, 1, "aten::mm", "cpu_op", correlation=13),
            *(gpu(20 + i, correlation=c) for i, c in enumerate([11, 12, 12, 0, 13, 99])),
            gpu(30),
        ]
    )
    starts = trace.events["start_ns"].tolist()
    launch = activities(trace)["launch"].tolist()
    assert [starts[row] if row >= 0 else None for row in launch] == [0, 2_000, 2_000, None, None, None, None]


def test_the_kind_of_a_collective_is_told_by_arguments_annotation_and_name_in_this_order(read: Read) -> None:
    """What PyTorch recorded counts before the annotation around the launch, and that before the kernel's name."""
    recorded: Event = {"Collective name": "_reduce_scatter_base"}
    generic, named = "ncclDevKernel_SendRecv(...)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)"
    trace = read(
        [
            host(0, 50, "nccl:coalesced", "user_annotation"),
            record(1, 9, "all_to_allv"),
            host(2, 1, "cudaLaunchKernel", correlation=1),  # annotation and operator around it
            host(20, 1, "cudaLaunchKernel", correlation=2),  # annotation alone
            host(60, 1, "cudaLaunchKernel", correlation=3),  # neither
            host(70, 1, "cudaLaunchKernel", correlation=4),
            gpu(100, name=generic, correlation=1),
            gpu(101, name=named, correlation=2),
            gpu(102, name=named, correlation=3),
            gpu(103, name=generic, correlation=4, **recorded),
            gpu(104, name=generic, correlation=5),
            gpu(105, name="gemm", correlation=1),
        ]
    )
    assert activities(trace)["kind"].tolist() == ["all_to_all", "send_recv", "all_reduce", "reduce_scatter", "", ""]


def test_a_launch_on_another_thread_belongs_to_no_collective_there(read: Read) -> None:
    """An operator is around the launches of its own thread alone."""
    trace = read(
        [
            record(0, 50, "allreduce", tid=1, Rank=3),
            host(2, 1, "cudaLaunchKernel", tid=2, correlation=1),
            host(3, 1, "cudaLaunchKernel", tid=1, correlation=2),
            gpu(100, name="ncclDevKernel_Generic(...)", correlation=1),
            gpu(101, name="ncclDevKernel_Generic(...)", correlation=2),
        ]
    )
    table = activities(trace)
    assert table["kind"].tolist() == ["", "all_reduce"]
    assert table["root"].tolist() == [-1, 3]
    assert (table["collective"] >= 0).tolist() == [False, True]


@pytest.mark.parametrize(
    ("around", "state"),
    [
        (
            [record(0, 9, "_allgather_base"), host(0, 9, "nccl:_all_gather_base", "user_annotation")],
            State.COMMUNICATION,
        ),
        ([host(0, 9, "nccl:_all_gather_base", "user_annotation")], State.COMPUTE),
        ([], State.COMPUTE),
    ],
)
def test_a_copy_launched_by_a_collective_communicates(read: Read, around: list[Event], state: State) -> None:
    """Collectives by copy engines move data by copies; a copy that no collective launched is compute."""
    copy = gpu(20, name="Memcpy DtoD (Device -> Device)", cat="gpu_memcpy", correlation=1)
    table = activities(read([*around, host(2, 1, "cudaMemcpyAsync", correlation=1), copy]))
    assert table["state"].tolist() == [state]


def test_host_copies_say_their_direction_and_memory(read: Read) -> None:
    """A host copy goes to the host or from it, and pageable memory makes the host wait."""
    names = ["Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pageable -> Device)"]
    table = activities(read([gpu(i, name=name, cat="gpu_memcpy") for i, name in enumerate(names)]))
    assert table["to_host"].tolist() == [True, True, False]
    assert table["pageable"].tolist() == [True, False, True]
