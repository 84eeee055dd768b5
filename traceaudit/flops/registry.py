"""Which operators have work, and how it follows from their shapes: one row an operator.

Names stand without overload. The innermost operator of the table around a kernel's launch owns the kernel, so that
composites (``aten::linear``, ``aten::matmul``, ``aten::scaled_dot_product_attention``) need no row. A new operator is
a row here, or a call of `register`, and a case in the tests.
"""

from collections.abc import Mapping

from traceaudit.flops import attention, convolution, matmul, memory
from traceaudit.flops.operator import UNUSABLE, Function, Operator, Work

MATMULS: dict[str, Function] = {
    "aten::mm": matmul.product(0, 1),
    "aten::addmm": matmul.product(1, 2),
    "aten::addmm_": matmul.product(1, 2),
    "aten::bmm": matmul.product(0, 1),
    "aten::baddbmm": matmul.product(1, 2),
    "aten::baddbmm_": matmul.product(1, 2),
    "aten::_addmm_activation": matmul.product(1, 2),
    "aten::_int_mm": matmul.product(0, 1),
    "aten::_scaled_mm": matmul.product(0, 1),
    "aten::_scaled_mm_v2": matmul.product(0, 1),
    "aten::_grouped_mm": matmul.grouped,
    "aten::_scaled_grouped_mm": matmul.grouped,
    "aten::_scaled_grouped_mm_v2": matmul.grouped,
    "_Linear": matmul.linear_any_order,  # Transformer Engine, whose products are no operators
    "_LayerNormLinear": matmul.linear_any_order,
    "_LinearBackward": matmul.backward_of_linear,
    "_LayerNormLinearBackward": matmul.backward_of_linear,
    "FusedDenseFunc": matmul.linear(0, 1),  # apex and flash-attn
}

ATTENTION: dict[str, Function] = {
    "aten::_scaled_dot_product_flash_attention": attention.dense(0, 4, heads_first=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention.dense(0, 4, heads_first=True),
    "aten::_scaled_dot_product_efficient_attention": attention.dense(0, 6, heads_first=True),
    "aten::_scaled_dot_product_cudnn_attention": attention.dense(0, 6, heads_first=True),
    "aten::_scaled_dot_product_fused_attention_overrideable": attention.dense(0, 5, heads_first=True),
    "aten::_flash_attention_forward": attention.dense(0, 8, heads_first=False),
    "aten::_efficient_attention_forward": attention.dense(0, 9, heads_first=False),
    "aten::_cudnn_attention_forward": attention.dense(0, 10, heads_first=True),
    "aten::_scaled_dot_product_flash_attention_backward": attention.dense(1, 11, heads_first=True, backward=True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention.dense(
        1, 7, heads_first=True, backward=True
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": attention.dense(1, 11, heads_first=True, backward=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": attention.dense(1, 14, heads_first=True, backward=True),
    "aten::_flash_attention_backward": attention.dense(1, 11, heads_first=False, backward=True),
    "aten::_efficient_attention_backward": attention.dense(1, 14, heads_first=False, backward=True),
    "flash_attn::_flash_attn_forward": attention.dense(0, 5, heads_first=False, bottom_right=True),
    "flash_attn::_flash_attn_backward": attention.dense(1, 11, heads_first=False, backward=True, bottom_right=True),
    "flash_attn::_flash_attn_varlen_forward": attention.packed(0, 3, 9),
    "flash_attn::_flash_attn_varlen_backward": attention.packed(1, 9, 15, backward=True),
    "flash_attn_3::_flash_attn_forward": attention.packed(0, None, None),
    "flash_attn_3::_flash_attn_backward": attention.packed(1, None, None, backward=True),
    "flash_attn_3::fwd": attention.packed(0, None, None),
    "flash_attn_3::bwd": attention.packed(1, None, None, backward=True),
    "FlashAttnFunc": attention.dense(0, 5, heads_first=False, bottom_right=True),
    "FlashAttnVarlenFunc": attention.packed(0, 3, 9),
    "FusedAttnFunc": attention.fused(),
    "FusedAttnFuncBackward": attention.fused(backward=True),
}

CONVOLUTIONS: dict[str, Function] = {
    "aten::convolution": convolution.forward(3, 4, 5, transposed=6),
    "aten::_convolution": convolution.forward(3, 4, 5, transposed=6),
    "aten::convolution_overrideable": convolution.forward(3, 4, 5, transposed=6),
    "aten::mkldnn_convolution": convolution.forward(4, 3, 5),
    "aten::slow_conv2d_forward": convolution.forward(4, 5, 99),
    "aten::cudnn_convolution": convolution.forward(3, 2, 4),
    "aten::miopen_convolution": convolution.forward(4, 3, 5),
    "aten::miopen_depthwise_convolution": convolution.forward(4, 3, 5),
    "aten::_conv_depthwise2d": convolution.forward(4, 5, 6),
    "aten::cudnn_convolution_transpose": convolution.transposed,
    "aten::convolution_backward": convolution.backward(0, 1, 2, 10, transposed=7),
    "aten::convolution_backward_overrideable": convolution.backward(0, 1, 2, 9, transposed=6),
    "aten::mkldnn_convolution_backward": convolution.backward(1, 0, 2, 7),
    "aten::cudnn_convolution_backward": convolution.backward(1, 0, 2, None),
    "aten::cudnn_convolution_backward_input": convolution.input_gradient,
    "aten::cudnn_convolution_backward_weight": convolution.weight_gradient,
}

_SAME = memory.traffic((0,), (0,))
_TWO_IN = memory.traffic((0, 1), (0,))
MEMORY: dict[str, Function] = {
    "aten::native_layer_norm": memory.traffic((0,), (0,)),
    "aten::native_layer_norm_backward": memory.traffic((0, 1), (1,)),
    "aten::_fused_rms_norm": _SAME,
    "aten::_fused_rms_norm_backward": memory.traffic((0, 1), (1,)),
    "aten::native_group_norm": _SAME,
    "aten::native_group_norm_backward": memory.traffic((0, 1), (1,)),
    "aten::native_batch_norm": _SAME,
    "aten::cudnn_batch_norm": _SAME,
    "aten::miopen_batch_norm": _SAME,
    "aten::_batch_norm_with_update": _SAME,
    "aten::native_batch_norm_backward": memory.traffic((0, 1), (1,)),
    "aten::cudnn_batch_norm_backward": memory.traffic((0, 1), (1,)),
    "aten::miopen_batch_norm_backward": memory.traffic((0, 1), (1,)),
    "aten::batch_norm_backward": memory.traffic((0, 1), (1,)),
    "FusedLayerNormAffineFunction": _SAME,  # apex
    "FusedRMSNormAffineFunction": _SAME,
    "_LayerNorm": _SAME,  # Transformer Engine
    "_RMSNorm": _SAME,
    "_C::rms_norm": memory.traffic((1,), (0,)),  # vLLM: the result comes first
    "_C::fused_add_rms_norm": memory.traffic((0, 1), (0, 1)),
    "aten::_softmax": _SAME,
    "aten::_log_softmax": _SAME,
    "aten::_softmax_backward_data": _TWO_IN,
    "aten::_log_softmax_backward_data": _TWO_IN,
    "aten::_masked_softmax": _SAME,
    "ScaledUpperTriangMaskedSoftmax": _SAME,  # Megatron
    "ScaledMaskedSoftmax": _SAME,
    "aten::nll_loss_forward": memory.picked(0, 1),
    "aten::nll_loss_backward": memory.picked(1, 2),
    "CrossEntropyFunction": memory.traffic((0,), (0,)),  # in place, with its gradient (Liger)
    "aten::copy_": memory.traffic((1,), (0,)),
    "aten::fill_": memory.traffic((), (0,)),
    "aten::zero_": memory.traffic((), (0,)),
    "aten::cat": memory.cat,
    "aten::_foreach_copy_": memory.foreach,
    "aten::split_with_sizes_copy": _SAME,
    "fsdp::split_with_sizes_copy": _SAME,
    "fsdp::all_gather_copy_in": memory.cat,
    "fsdp::chunk_cat": memory.cat,
    "aten::_chunk_cat": memory.cat,
    "aten::embedding": memory.embedding,
    "aten::embedding_dense_backward": memory.embedding_backward,
    "aten::index_select": memory.index_select,
    "aten::index": memory.index,
    "aten::index_put_": memory.index_put,
    "aten::_index_put_impl_": memory.index_put,
    "aten::gather": memory.gather,
    "aten::scatter": memory.scatter,
    "aten::scatter_": memory.scatter,
    "aten::scatter_add": memory.scatter,
    "aten::scatter_add_": memory.scatter,
    "aten::sort": _SAME,
    "aten::topk": memory.traffic((0,), ()),
    "aten::cumsum": _SAME,
    "aten::native_dropout": _SAME,
    "aten::native_dropout_backward": _TWO_IN,
    "aten::max_pool2d_with_indices": memory.traffic((0,), ()),
    "aten::max_pool2d_with_indices_backward": memory.traffic((0,), (1,)),
    "aten::_adaptive_avg_pool2d": memory.traffic((0,), ()),
    "aten::_adaptive_avg_pool2d_backward": memory.traffic((0,), (1,)),
    "aten::upsample_bilinear2d": memory.resize,
    "aten::upsample_nearest2d": memory.resize,
    "aten::upsample_bicubic2d": memory.resize,
    "aten::clamp_min_": _SAME,
    "aten::_fused_adam_": memory.adam,
    "aten::_fused_adamw_": memory.adam,
    "aten::_fused_sgd_": memory.sgd,
    "_C::rotary_embedding": memory.traffic((1, 2), (1, 2)),
    "_C_cache_ops::reshape_and_cache_flash": memory.traffic((0, 1), (0, 1)),
    "_C::static_scaled_fp8_quant": memory.traffic((1,), (0,)),
    "_C::dynamic_scaled_fp8_quant": memory.traffic((1,), (0,)),
    "_C::silu_and_mul": memory.traffic((1,), (0,)),
    "vllm::unified_attention_with_output": memory.traffic((0, 1, 2), (3,)),  # lengths are not recorded
    "fbgemm::permute_2D_sparse_data": memory.traffic((1, 2), (1, 2)),
    "fbgemm::FloatToFP8RowwiseQuantized": memory.cast,
}

# Backward operators that record only gradients: the shapes of their forward, found by the autograd sequence number.
FROM_FORWARD: dict[str, str] = {
    "_LinearBackward": "_Linear",
    "_LayerNormLinearBackward": "_LayerNormLinear",
    "FusedAttnFuncBackward": "FusedAttnFunc",
}

PRODUCTS = frozenset({*MATMULS, *ATTENTION, *CONVOLUTIONS})  # with FLOPs, where their shapes tell

FORMULAS: dict[str, Function] = {**MATMULS, **ATTENTION, **CONVOLUTIONS, **MEMORY}


def register(name: str, function: Function) -> None:
    """Teach the counter an operator, or replace what it knows of one.

    Args:
        name: the operator as traces name it, without overload (``mylib::fused_mlp``); of a Triton kernel, the name of
            its function.
        function: takes an `Operator` and returns its `Work`; one that raises ValueError or IndexError for shapes it
            cannot use leaves that operator unknown.

    >>> from traceaudit.flops import Operator, Work, register, work_of
    >>> register("mylib::outer", lambda operator: Work(2.0 * operator.elements(0) * operator.elements(1)))
    >>> work_of(Operator("mylib::outer", [[3], [5]], [], [])).flops
    30.0
    """
    FORMULAS[name] = function


def work_of(operator: Operator, formulas: Mapping[str, Function] | None = None) -> Work | None:
    """Return the work of an operator, nothing where the table has no row or the shapes do not tell."""
    function = (FORMULAS if formulas is None else formulas).get(operator.name)
    try:
        return function(operator) if function else None
    except UNUSABLE:
        return None
    except StopIteration:
        return None
