"""Attention: two products forward, five backward, of which one repeats the forward's scores inside the kernel.

Causal masks: the hardware runs about half of the square, which counts as executed and as the model's; the whole square
is kept beside it (`Work.flops`), as `torch.utils.flop_counter` and PaLM count it.
"""

import re

from traceaudit.flops.operator import UNUSABLE, Function, Operator, Work

NUMBER = re.compile(r"^-?\d+$")


def scores(tokens: float, keys: float, heads: int, qk: int, v: int, *, backward: bool) -> tuple[float, float]:
    """Return the executed FLOPs over `tokens` queries of `keys` keys each, and the model's.

    >>> scores(10, 10, 1, 8, 8, backward=False), scores(10, 10, 1, 8, 8, backward=True)
    ((3200.0, 3200.0), (8000.0, 6400.0))
    """
    pairs = 2.0 * heads * tokens * keys
    if backward:
        return pairs * (3 * qk + 2 * v), 2 * pairs * (qk + v)
    return pairs * (qk + v), pairs * (qk + v)


def kept_by_causal(queries: int, keys: int, *, bottom_right: bool) -> float:
    """Return the share of the scores that a causal mask keeps, the diagonal counted half.

    >>> kept_by_causal(8, 8, bottom_right=True), kept_by_causal(2, 8, bottom_right=True)
    (0.5, 0.875)
    """
    shorter = min(queries, keys)
    below = queries * keys - shorter * shorter / 2 if bottom_right and queries <= keys else shorter * shorter / 2
    if not bottom_right and queries > keys:
        below += (queries - keys) * keys
    return below / max(queries * keys, 1)


def dense(
    first: int, causal: int | None, *, heads_first: bool, backward: bool = False, bottom_right: bool = False
) -> Function:
    """Return the function of an attention operator over equally long sequences.

    Args:
        first: argument of the queries; keys and values follow.
        causal: argument of the causal flag; None where there is none.
        heads_first: [batch, heads, sequence, dim], else [batch, sequence, heads, dim].
        backward: of the operator that returns gradients.
        bottom_right: the causal diagonal ends at the last key.
    """

    def work(operator: Operator) -> Work:
        q, k, v = (operator.shape(first + offset) for offset in range(3))
        if len(q) == 3 and not heads_first:
            return packed(first, None, causal, backward=backward)(operator)
        if len(q) != 4 or len(k) != 4 or len(v) != 4:
            raise ValueError("no batch of sequences")
        sequence, heads = (2, 1) if heads_first else (1, 2)
        whole, model = scores(q[0] * q[sequence], k[sequence], q[heads], q[3], v[3], backward=backward)
        kept = 1.0
        if causal is not None and (operator.flag(causal) or _mask_type(operator, causal)):
            edge = bottom_right or operator.text(causal) == "2"
            kept = kept_by_causal(q[sequence], k[sequence], bottom_right=edge)
        traffic = _traffic(operator, first, backward=backward)
        return Work(whole, traffic, executed=kept * whole, model=kept * model, operand=first)

    return work


def _mask_type(operator: Operator, index: int) -> bool:
    """Tell whether a custom mask type (efficient attention) is a causal one."""
    return operator.text(index) in ("1", "2")


def packed(first: int, offsets: int | None, causal: int | None, *, backward: bool = False) -> Function:
    """Return the function of attention over packed sequences [tokens, heads, dim], whose lengths are not recorded.

    The sum of their squares lies between tokens² ÷ sequences and tokens · longest: the least stands, marked as an
    estimate. Without `causal`, the first flag after the tensors is the causal one; a window that follows it bounds the
    keys.
    """

    def work(operator: Operator) -> Work:
        q, k, v = (operator.shape(first + offset) for offset in range(3))
        if len(q) == 4:
            found = causal if causal is not None else _first_flag(operator)
            return dense(first, found, heads_first=False, backward=backward, bottom_right=True)(operator)
        if len(q) != 3 or len(v) != 3:
            raise ValueError("no packed sequences")
        starts = offsets if offsets is not None else _offsets(operator)
        keys = k[0] / max(operator.shape(starts)[0] - 1, 1)
        flag = causal if causal is not None else _first_flag(operator)
        is_causal = flag is not None and operator.flag(flag)
        left = operator.text(flag + 1) if flag is not None else ""
        whole, whole_model = scores(q[0], keys, q[1], q[2], v[2], backward=backward)
        share = 0.5 if is_causal else 1.0
        if NUMBER.match(left) and 0 < int(left) < keys:
            share = min(share, (int(left) + 1) / keys)
        traffic = _traffic(operator, first, backward=backward)
        return Work(whole, traffic, executed=share * whole, model=share * whole_model, operand=first, estimated=True)

    return work


def _offsets(operator: Operator) -> int:
    """Return the argument of the cumulative lengths: the first integer vector."""
    return next(
        index
        for index in operator.tensors()
        if index < len(operator.types) and operator.types[index] == "int" and len(operator.shape(index)) == 1
    )


def _first_flag(operator: Operator) -> int | None:
    return next((index for index, text in enumerate(operator.concrete) if text in ("True", "False")), None)


def _traffic(operator: Operator, first: int, *, backward: bool) -> float | None:
    """Return the bytes of queries, keys, values and the result; backward, of their gradients as well."""
    try:
        q, v = operator.shape(first), operator.shape(first + 2)
        element = max(operator.element(first), 2)
    except UNUSABLE:
        return None
    sizes = [operator.elements(first + offset) for offset in range(3)]
    result = sizes[0] // max(q[-1], 1) * v[-1]
    return element * (sum(sizes) + result) * (2 if backward else 1)


def fused(*, backward: bool = False) -> Function:
    """Return the function of Transformer Engine's fused attention.

    Its arguments change between releases: the first three tensors of equal rank 3 or 4 and equal last dimension are
    queries, keys and values, the first scalar integer the longest sequence.
    """

    def work(operator: Operator) -> Work:
        tensors = [i for i in operator.tensors() if len(operator.shape(i)) in (3, 4)]
        first = next(i for i in tensors if {i, i + 1, i + 2} <= set(tensors))
        q, v = operator.shape(first), operator.shape(first + 2)
        longest = next(int(text) for text in operator.concrete if NUMBER.match(text) and int(text) > 1)
        tokens = operator.elements(first) // (q[-1] * q[-2])
        whole, model = scores(tokens, longest, q[-2], q[-1], v[-1], backward=backward)
        share = 0.5 if any("causal" in text for text in operator.concrete) else 1.0
        traffic = _traffic(operator, first, backward=backward)
        return Work(whole, traffic, executed=share * whole, model=share * model, operand=first, estimated=len(q) == 3)

    return work
