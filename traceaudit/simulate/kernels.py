"""Kernels and operators as PyTorch 2.6 on an H100 names them, and how long they take here."""

from math import prod
from typing import Any

from traceaudit.simulate.job import Kernel, Op

GPU = "NVIDIA H100 80GB HBM3"
# Dense bf16 of the SXM part, and its bandwidth; sources: traceaudit/data/device_peaks.tsv.
PEAK_FLOP_PER_S = 989_400_000_000_000
BYTES_PER_S = 3_350_000_000_000
SM_COUNT = 132
MATMUL_PERMILLE = 675  # of the peak that a matmul reaches
BANDWIDTH_PERMILLE = 850  # of the bandwidth that the kernels bound by memory reach
SHORTEST_KERNEL_NS = 2_000
BF16 = "c10::BFloat16"

MATMUL = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_{}_n_tilesize128x128x64_warpgroupsize1x1x1"
    "_execute_segment_k_off_kernel__5x_cublas"
)
NATIVE = "void at::native::(anonymous namespace)::"
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{0}(at::TensorIteratorBase&, at::native::GeluType)"
    "::{{lambda()#1}}::operator()() const::{{lambda()#4}}::operator()() const::{{lambda(c10::BFloat16)#1}}, "
    "std::array<char*, 2ul> >(int, at::native::{0}(at::TensorIteratorBase&, at::native::GeluType), "
    "std::array<char*, 2ul>)"
)
FLASH_FORWARD = "Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>"
FLASH_BACKWARD = "Flash_bwd_kernel_traits<128, 64, 128, 8, false, false, cutlass::bfloat16_t>"
FOREACH = (
    NATIVE + "multi_tensor_apply_kernel<at::native::(anonymous namespace)::{0}>(at::native::(anonymous namespace)::{0})"
)

# Name and family of the kernel behind each operator; the layout of its operands is filled in for a matmul.
KERNELS = {
    "aten::native_layer_norm": (
        NATIVE + "vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float, c10::BFloat16 const*)",
        "norm",
    ),
    "aten::native_layer_norm_backward": (
        NATIVE + "layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float, false>(c10::BFloat16 const*, int)",
        "norm",
    ),
    "aten::gelu": (ELEMENTWISE.format("GeluCUDAKernelImpl"), "elementwise"),
    "aten::gelu_backward": (ELEMENTWISE.format("GeluBackwardCUDAKernelImpl"), "elementwise"),
    "fused_attention::forward": (
        f"void flash_fwd_kernel<{FLASH_FORWARD}, false, true>(Flash_fwd_params)",
        "attention",
    ),
    "fused_attention::backward": (
        f"void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<{FLASH_BACKWARD}>(Flash_bwd_params)",
        "attention",
    ),
    "aten::_fused_adamw_": (FOREACH.format("FusedOptimizerTensorListMetadata<4>"), "optimizer"),
    "aten::_foreach_zero_": (FOREACH.format("TensorListMetadata<1>"), "optimizer"),
}


def micros(numerator: int, denominator: int) -> int:
    """Return a number of seconds, given as a fraction, in nanoseconds rounded up to whole microseconds.

    >>> micros(1, 300_000)
    4000
    """
    return -(-numerator * 1_000_000 // denominator) * 1_000


def kernel_ns(work: int, per_s: int, permille: int) -> int:
    """Return how long a kernel takes that reaches some permille of a rate; none is shorter than 2 µs."""
    return max(SHORTEST_KERNEL_NS, micros(work * 1_000, per_s * permille))


def matmul(m: int, k: int, n: int, *, layout: str = "tn", bias: bool = False, duration_ns: int | None = None) -> Op:
    """Return `aten::mm` of [m, k] and [k, n] (`aten::addmm` with a bias); its FLOPs are counted."""
    flops = 2 * m * k * n
    if duration_ns is None:
        duration_ns = kernel_ns(flops, PEAK_FLOP_PER_S, MATMUL_PERMILLE)
    grid = (-(-n // 128), -(-m // 128), 1)
    kernel = Kernel(MATMUL.format(layout), "matmul", duration_ns, grid, (384, 1, 1))
    dims: tuple[tuple[int, ...], ...] = ((m, k), (k, n))
    if bias:
        return Op("aten::addmm", kernel, ((n,), *dims, (), ()), (BF16, BF16, BF16, "Scalar", "Scalar"), flops)
    return Op("aten::mm", kernel, dims, (BF16, BF16), flops)


def memory_bound(name: str, dims: tuple[int, ...], *, tensors: int, duration_ns: int | None = None) -> Op:
    """Return an operator whose kernel reads and writes `tensors` bf16 tensors of these dimensions."""
    kernel_name, family = KERNELS[name]
    if duration_ns is None:
        duration_ns = kernel_ns(2 * prod(dims) * tensors, BYTES_PER_S, BANDWIDTH_PERMILLE)
    kernel = Kernel(kernel_name, family, duration_ns, (-(-prod(dims) // 1024), 1, 1), (128, 1, 1))
    return Op(name, kernel, (dims,), (BF16,))


def opaque(name: str, duration_ns: int, grid: tuple[int, int, int] = (SM_COUNT, 1, 1)) -> Op:
    """Return an operator of which the trace does not show the shapes, so that its FLOPs cannot be counted."""
    kernel_name, family = KERNELS[name]
    return Op(name, Kernel(kernel_name, family, duration_ns, grid, (128, 1, 1)))


def kernel_args(grid: tuple[int, int, int], block: tuple[int, int, int]) -> dict[str, Any]:
    """Return the launch parameters of a kernel's row."""
    blocks = prod(grid)
    return {
        "registers per thread": 96,
        "shared memory": 0,
        "blocks per SM": round(blocks / SM_COUNT, 6),
        "warps per SM": round(blocks * prod(block) / 32 / SM_COUNT, 6),
        "grid": grid,
        "block": block,
        "est. achieved occupancy %": 0,
    }
