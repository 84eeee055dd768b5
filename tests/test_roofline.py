"""Kernels stand on the roofline, and the leaves below it add up to the compute time exactly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Audited
from traceaudit.audit import Audit
from traceaudit.classify import family_of, short_name
from traceaudit.events import Kind
from traceaudit.flops import Operator, Work, register, work_of
from traceaudit.flops.registry import FORMULAS
from traceaudit.leaves import Leaf
from traceaudit.mfu.kernel_table import multiple_of, quantisation
from traceaudit.pipeline import analyze

Event = dict[str, Any]
BF16, FP8, FLOAT = "c10::BFloat16", "c10::Float8_e4m3fn", "float"
H100 = {"name": "NVIDIA H100 80GB HBM3", "numSms": 132, "id": 0}
PEAK, BANDWIDTH = 989.4e3, 3350  # FLOP and bytes a nanosecond

# Operator, shapes, types, scalars; FLOPs, what the hardware runs of them, the model's, and bytes.
Case = tuple[str, list[Any], list[str], list[str], float, float, float, float]
T = [BF16] * 6
CASES: list[Case] = [
    ("aten::mm", [[3, 5], [5, 7]], T, [], 210, 210, 210, 2 * (15 + 35 + 21)),
    ("aten::_scaled_mm", [[3, 5], [5, 7]], [FP8, FP8], [], 210, 210, 210, 15 + 35 + 2 * 21),
    ("aten::_grouped_mm", [[6, 5], [2, 5, 7], [2]], [BF16, BF16, "int"], [], 420, 420, 420, 2 * (30 + 70 + 42)),
    ("aten::_grouped_mm", [[5, 6], [6, 7], [2]], [BF16, BF16, "int"], [], 420, 420, 420, 2 * (30 + 42 + 35)),
    (
        "aten::_scaled_dot_product_flash_attention",
        [[2, 4, 8, 16], [2, 4, 8, 16], [2, 4, 8, 16], [], []],
        T,
        ["", "", "", "0.", "True"],
        2 * 2 * 4 * 64 * 32,
        2 * 4 * 64 * 32,
        2 * 4 * 64 * 32,
        2 * 4 * 1024,
    ),
    (
        "aten::_scaled_dot_product_flash_attention_backward",  # grouped queries: 4 heads share one key
        [[1, 4, 8, 16], [1, 4, 8, 16], [1, 1, 8, 16], [1, 1, 8, 16]],
        T,
        [],
        2 * 4 * 64 * 80,
        2 * 4 * 64 * 80,
        2 * 2 * 4 * 64 * 32,
        2 * 2 * (512 + 128 + 128 + 512),
    ),
    (
        "flash_attn::_flash_attn_forward",
        [[2, 8, 4, 16], [2, 8, 4, 16], [2, 8, 4, 16], [], [], []],
        T,
        ["", "", "", "0.", "0.25", "False"],
        2 * 2 * 4 * 64 * 32,
        2 * 2 * 4 * 64 * 32,
        2 * 2 * 4 * 64 * 32,
        2 * 4 * 1024,
    ),
    (
        "flash_attn::_flash_attn_varlen_forward",  # 16 tokens of two sequences: at least 8 keys each
        [[16, 4, 16], [16, 4, 16], [16, 4, 16], [3], [3], [], [], [], [], []],
        [BF16, BF16, BF16, "int", "int"],
        ["", "", "", "", "", "12", "12", "0.", "0.25", "True"],
        2 * 4 * 16 * 8 * 32,
        4 * 16 * 8 * 32,
        4 * 16 * 8 * 32,
        2 * 4 * 1024,
    ),
    (
        "aten::convolution_backward",  # only the weights' gradient, of two groups
        [[2, 6, 4, 4], [2, 4, 4, 4], [6, 2, 3, 3]],
        T,
        ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2", "[False, True, False]"],
        2 * 192 * 18,
        2 * 192 * 18,
        2 * 192 * 18,
        2 * 2 * (192 + 128 + 108),
    ),
    ("_Linear", [[7, 5], [2, 3, 5]], T, [], 2 * 6 * 35, 2 * 6 * 35, 2 * 6 * 35, 2 * (35 + 30 + 42)),
    ("aten::native_layer_norm", [[4, 8], [], [8], [8], []], [BF16, "ScalarList", BF16, BF16], [], 0, 0, 0, 2 * 64),
    ("aten::_softmax", [[4, 8], [], []], [FLOAT, "Scalar", "Scalar"], [], 0, 0, 0, 4 * 64),
    ("aten::copy_", [[4, 8], [4, 8], []], [FLOAT, BF16, "Scalar"], [], 0, 0, 0, 4 * 32 + 2 * 32),
    ("aten::embedding", [[1000, 8], [3], []], [BF16, "long int"], [], 0, 0, 0, 3 * 8 + 2 * 3 * 8 * 2),
    ("aten::cat", [[[4, 8], [2, 8]], []], ["TensorList", "Scalar"], [], 0, 0, 0, 2 * 4 * 48),
    ("aten::_fused_adamw_", [[[5]], [[5]], [[5]], [[5]]], ["TensorList"] * 4, [], 0, 0, 0, 4 * 7 * 5),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_work_follows_from_shapes(case: Case) -> None:
    """FLOPs as counted, as executed and as the model's, and the least bytes."""
    name, dims, types, concrete, flops, executed, model, moved = case
    found = work_of(Operator(name, dims, types, concrete))
    assert found is not None
    assert (found.flops, found.hardware_flops, found.model_flops, found.bytes) == (flops, executed, model, moved)


def test_lists_that_were_lost_are_unknown() -> None:
    """More than 30 tensors are recorded as an empty list: the bytes are unknown, not none."""
    assert work_of(Operator("aten::_fused_adamw_", [[], [], [], []], ["TensorList"] * 4, [])) is None


def test_users_register_operators(write: "Write") -> None:
    """A registered function counts its operator's kernels, and one that raises leaves them unknown."""
    register("mylib::pairs", lambda operator: Work(2.0 * operator.elements(0) ** 2, operator.bytes(0)))
    try:
        events = [operator("mylib::pairs", 0, 10, [[1000]], [BF16]), *kernel(2, 50, "pairs_kernel")]
        events += [operator("mylib::pairs", 20, 30, [[]], [""]), *kernel(22, 50, "pairs_kernel")]
        entry = named(write(events), "pairs_kernel")
    finally:
        del FORMULAS["mylib::pairs"]
    assert (entry["flops"], entry["bytes"]) == (2e6, 2e3)
    assert entry["known_share"] == 0.5


def operator(name: str, start: int, end: int, dims: object, types: object, concrete: object = None) -> Event:
    """Return an operator on the only thread."""
    args = {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete or []}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 1, "ts": start, "dur": end - start, "args": args}


def kernel(launch: int, length: int, name: str, start: int | None = None, stream: int = 7) -> list[Event]:
    """Return a kernel and the call that launches it; kernels follow their launches by a millisecond."""
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 1, "ts": launch, "dur": 1}
    begin = launch + 1_000 if start is None else start
    row = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": length}
    number = {"correlation": launch + 1}
    grid = {"grid": [64, 1, 1], "stream": stream, "device": 0}
    return [{**call, "args": number}, {**row, "args": {**number, **grid}}]


Write = Callable[[list[Event]], Audit]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that analyses a trace of some events, on an H100, as one window."""

    def analysed(events: list[Event]) -> Audit:
        content = {"deviceProperties": [H100], "record_shapes": 1, "traceEvents": events}
        (tmp_path / "rank0.json").write_text(json.dumps(content), encoding="utf-8")
        return analyze(tmp_path / "rank0.json")

    return analysed


def named(audit: Audit, name: str) -> Event:
    """Return the row of a kernel."""
    return next(entry for entry in audit.result["kernels"] if entry["name"] == name)


def leaves(audit: Audit) -> dict[str, int]:
    """Return the leaves of sub-roofline and achieved time."""
    return {
        leaf["leaf"]: leaf["ns"]
        for leaf in audit.result["job"]["leaves"]
        if leaf["bucket"] in ("sub_roofline", "achieved")
    }


MM = [[4096, 4096], [4096, 4096]]
MM_NS = 2 * 4096**3 / PEAK  # 138.9 µs


def test_a_compute_bound_kernel(write: Write) -> None:
    """A product at 69 % of peak is bound by compute; the rest of its time is its headroom."""
    audit = write([operator("aten::mm", 0, 10, MM, [BF16, BF16]), *kernel(2, 200, "nvjet_tst_128x256_64x4_TNT")])
    entry = named(audit, "nvjet_tst_128x256_64x4_TNT")
    assert entry["bound"] == "compute"
    assert entry["roofline_share"] == pytest.approx(MM_NS / 200e3)
    assert entry["tflops_per_s"] == pytest.approx(2 * 4096**3 / 200e3 / 1e3)
    assert entry["headroom"] == pytest.approx(1 - MM_NS / 200e3)
    assert leaves(audit) == {"model_flops": round(MM_NS), "matmul": 200_000 - round(MM_NS)}
    assert audit.result["model"]["roofline_coverage"] == 1.0


def test_a_memory_bound_kernel_has_a_floor(write: Write) -> None:
    """What moving the bytes takes is the floor, the rest is below the roof; both are whole nanoseconds."""
    events = [
        operator("aten::mm", 0, 10, MM, [BF16, BF16]),
        *kernel(2, 200, "nvjet_tst_128x256_64x4_TNT"),
        operator("aten::native_layer_norm", 20, 30, [[8192, 8192], [], [8192], [8192], []], [BF16] * 4),
        *kernel(202, 100, "vectorized_layer_norm_kernel"),
    ]
    events[-2]["ts"] = 22  # launched within the norm, queued behind the product
    audit = write(events)
    floor = int(2 * 2 * 8192 * 8192 // BANDWIDTH)
    found = leaves(audit)
    assert found["memory_floor"] == floor
    assert found["norm"] == 100_000 - floor
    entry = named(audit, "vectorized_layer_norm_kernel")
    assert (entry["bound"], entry["flops"]) == ("memory", None)
    assert entry["roofline_share"] == pytest.approx(floor / 100e3, abs=1e-5)


def test_a_floor_never_exceeds_the_kernel(write: Write) -> None:
    """A kernel that found its data in the cache is faster than the floor: all of its time is floor, not more."""
    events = [
        operator("aten::mm", 0, 10, MM, [BF16, BF16]),
        *kernel(2, 200, "nvjet_tst_128x256_64x4_TNT"),
        operator("aten::_softmax", 20, 30, [[8192, 8192], [], []], [BF16, "Scalar", "Scalar"]),
        *kernel(22, 10, "softmax_warp_forward", start=1_300),
    ]
    found = leaves(write(events))
    assert found["memory_floor"] == 10_000
    assert sum(found.values()) == 210_000


def overlapped(beside: int, alone: int, longer: int) -> list[Event]:
    """Return products of 200 µs, of which some run beside a collective and take longer."""
    events: list[Event] = []
    for index in range(beside + alone):
        at = 1_000 * index
        busy = index < beside
        events.append(operator("aten::mm", at, at + 10, MM, [BF16, BF16]))
        length = 200 + longer if busy else 200
        events += kernel(at + 2, length, "nvjet_tst_128x256_64x4_TNT", start=at + 1_100)
        if busy:
            events += kernel(at + 12, length, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 1_100, stream=20)
    return events


@pytest.mark.parametrize(("beside", "alone", "longer", "slowed"), [(5, 6, 50, 250_000), (4, 6, 50, 0), (5, 6, 0, 0)])
def test_kernels_beside_communication_are_slowed(
    beside: int, alone: int, longer: int, slowed: int, write: Write
) -> None:
    """The time over the median of the same kernel alone, with five runs on each side; fewer are not compared."""
    found = leaves(write(overlapped(beside, alone, longer)))
    assert found.get("slowed_by_overlap", 0) == slowed
    assert sum(found.values()) == (beside + alone) * 200_000 + beside * longer * 1_000


def test_mixed_element_types_have_their_own_peaks(write: Write) -> None:
    """A product in fp8 takes half the time of one in bf16, and the result says that the peak is a mixed one."""
    events = [
        operator("aten::mm", 0, 10, MM, [BF16, BF16]),
        *kernel(2, 300, "nvjet_tst_128x256_64x4_TNT"),
        operator("aten::_scaled_mm", 20, 30, MM, [FP8, FP8]),
        *kernel(22, 300, "nvjet_qqtst_128x256_128x4_TNT", start=1_400),
    ]
    audit = write(events)
    assert audit.result["job"]["mixed_peak"] is True
    expected = 2 * 4096**3 * (1 / PEAK + 1 / 1978.9e3)
    assert leaves(audit)["model_flops"] == pytest.approx(expected, abs=2)
    assert audit.result["model"]["peak"]["mixed"].keys() == {"bf16", "fp8"}


def test_attention_backward_counts_twice_its_forward(write: Write) -> None:
    """The model's FLOPs of a flash backward are 4 of its 5 products; the fifth is HFU's."""
    heads = [[4, 16, 2048, 128]] * 4
    name = "aten::_scaled_dot_product_flash_attention_backward"
    flags = [""] * 11 + ["True"]
    events = [operator(name, 0, 10, heads, [BF16] * 4, flags), *kernel(2, 900, "flash_bwd_kernel")]
    job = write(events).result["job"]
    assert job["hfu"] == pytest.approx(1.25 * job["mfu"], rel=1e-4)


def test_kernels_without_an_operator_have_the_work_of_their_like(write: Write) -> None:
    """A kernel queued before the recording has the FLOPs of the same name and grid, but they are not the model's."""
    events = [
        operator("aten::mm", 0, 10, MM, [BF16, BF16]),
        *kernel(2, 200, "nvjet_tst_128x256_64x4_TNT"),
        kernel(50, 200, "nvjet_tst_128x256_64x4_TNT", start=1_300)[1],
    ]
    audit = write(events)
    assert named(audit, "nvjet_tst_128x256_64x4_TNT")["flops"] == 2 * 2 * 4096**3
    assert audit.result["roofline"]["inferred_kernels"] == 1
    assert audit.result["model"]["counted_flops_per_step"] == 2 * 4096**3


def test_facts_about_matrix_shapes(write: Write) -> None:
    """Sizes, what divides them, tiles and waves, and whether tensor cores ran."""
    dims = [[4096, 4096], [4096, 50257]]
    events = [operator("aten::mm", 0, 10, dims, [FLOAT, FLOAT]), *kernel(2, 90_000, "ampere_sgemm_128x64_nn")]
    row = write(events).result["roofline"]["matmuls"][0]
    assert (row["m"], row["n"], row["k"]) == (4096, 50257, 4096)
    assert row["multiple_of"] == [128, 1, 128]
    assert row["matrix_units"] is False
    assert row["tile"] == [128, 64]
    assert row["tile_efficiency"] == pytest.approx(50257 / 50304, rel=1e-4)


def test_pieces_of_attention_and_norms_are_facts(write: Write) -> None:
    """A softmax of its own and a reciprocal root by itself tell of attention and norms that were not fused."""
    events = [
        *kernel(2, 30, "void softmax_warp_forward<float>"),
        *kernel(60, 20, "void vectorized_elementwise_kernel<4, rsqrt_kernel_cuda>"),
        *kernel(120, 20, "triton_red_fused__softmax_0"),
    ]
    found = write(events).result["roofline"]["unfused"]
    assert [(row["what"], row["ns"]) for row in found] == [("attention", 30_000), ("norm", 20_000)]


def test_quantisation_in_waves() -> None:
    """133 tiles on 132 multiprocessors take two waves, the second almost empty."""
    found = quantisation("gemm_128x128_nn", (1, 128 * 133, 128, 64), "", 132)
    assert found["waves"] == pytest.approx(133 / 132)
    assert found["wave_efficiency"] == pytest.approx(133 / 264)
    assert multiple_of(96) == 32


# Kernel names as traces have them, and as people read them.
NAMES = {
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<CUDAFunctor_add<float>>>(int)": (
        "elementwise_kernel"
    ),
    "void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(Params)": (
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8"
    ),
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>, true>(Flash_fwd_params)": "flash_fwd_kernel",
    "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16EEvPT_": "sgl_hip::activation::act_and_mul_kernel",
    "triton_poi_fused_add_0": "triton_poi_fused_add_0",
    "Memcpy DtoD (Device -> Device)": "Memcpy DtoD",
}


@pytest.mark.parametrize(("name", "short"), NAMES.items())
def test_names_for_people(name: str, short: str) -> None:
    """Templates, arguments, namespaces and mangling go; what tells the kernel stays."""
    assert short_name(name).startswith(short)


def test_simulated_runs_close_exactly(audited: Audited) -> None:
    """Achieved time and all leaves below the roof are the compute time, with a floor among them."""
    audit = audited("recompute")
    job = audit.result["job"]
    assert sum(leaf["ns"] for leaf in job["leaves"]) == job["window_ns"]
    assert leaves(audit)["memory_floor"] > 0


# Kernels of the libraries that trainings use, beyond those of PyTorch itself, and their family.
FAMILIES = {
    "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<int>": Leaf.ATTENTION,
    "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausal": Leaf.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128": Leaf.ATTENTION,
    "void deep_gemm::fp8_gemm_kernel<4096u, 7168u>": Leaf.MATMUL,
    "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x64x256_s3_et128x64_swiGlu_dynBatch_sm100f": Leaf.MATMUL,
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": Leaf.MATMUL,
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1": Leaf.MATMUL,
    "igemm_wrw_gtcx2_nhwc_bf16_bx0_ex1_bt256x128x16": Leaf.MATMUL,
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<float>": Leaf.NORM,
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E": Leaf.NORM,
    "void (anonymous namespace)::act_and_mul_kernel<__nv_bfloat16>": Leaf.ELEMENTWISE,
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>": Leaf.ELEMENTWISE,
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false>": Leaf.DEVICE_COPY,
    "void deep_ep::layout::get_dispatch_layout<256, 8>(long const*)": Leaf.OTHER_KERNELS,
}


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_kernels_of_other_libraries_have_a_family(name: str, family: Leaf) -> None:
    """CUTLASS, cuDNN, Transformer Engine, FlashInfer, DeepGEMM, DeepEP, Triton, MIOpen and aiter."""
    assert family_of(name, Kind.KERNEL) == family
