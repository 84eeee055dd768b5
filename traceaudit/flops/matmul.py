"""Matrix products: 2·m·k·n multiply-adds, times the batch where there is one."""

from traceaudit.flops.operator import PACKED, Function, Operator, Work, moved


def product(left: int, right: int) -> Function:
    """Return the function of an operator that computes ``args[left] @ args[right]``, batched or not."""

    def work(operator: Operator) -> Work:
        a, b = operator.shape(left), operator.shape(right)
        if len(a) != len(b) or len(a) not in (2, 3):
            raise ValueError("no matrices")
        batch = a[0] if len(a) == 3 else 1
        packed = 2 if left < len(operator.types) and operator.types[left] == PACKED else 1
        flops = 2.0 * batch * a[-2] * a[-1] * packed * b[-1]
        return Work(flops, _traffic(operator, left, right, batch * a[-2] * b[-1]), operand=left)

    return work


def _traffic(operator: Operator, left: int, right: int, result: int) -> float | None:
    """Return the bytes of both operands and the result; a result of 8-bit operands has 16 bits."""
    try:
        element = max(operator.element(left), 2)
    except ValueError:
        return None
    return moved(operator, (left, right), result * element)


def grouped(operator: Operator) -> Work:
    """Return the work of a grouped product: rows of all groups together, padding included (offsets are not recorded).

    [M, K] x [G, K, N] (forward and input gradient), [M, K] x [K, N] (weight gradient, K of all groups together).
    """
    a, b = operator.shape(0), operator.shape(1)
    groups = a[0] if len(a) == len(b) == 3 else 1
    flops = 2.0 * groups * a[-2] * a[-1] * b[-1]
    return Work(flops, _traffic(operator, 0, 1, groups * a[-2] * b[-1]))


def linear(inputs: int, weight: int) -> Function:
    """Return the function of a fused linear layer: ``input [..., k]``, ``weight [n, k]``."""

    def work(operator: Operator) -> Work:
        a, b = operator.shape(inputs), operator.shape(weight)
        if a[-1] != b[-1]:
            raise ValueError("input and weight do not fit")
        rows = operator.elements(inputs) // max(a[-1], 1)
        return Work(2.0 * rows * b[-1] * b[0], _traffic(operator, inputs, weight, rows * b[0]), operand=inputs)

    return work


def linear_any_order(operator: Operator) -> Work:
    """Return the work of a Transformer Engine linear, whose weight and input change places between releases."""
    shapes = [(index, operator.shape(index)) for index in list(operator.tensors())[:4]]
    weight = next(index for index, shape in shapes if len(shape) == 2)
    for index, shape in shapes:
        if index != weight and len(shape) >= 2 and shape[-1] == operator.shape(weight)[-1]:
            # of two matrices that fit either way, the product is the same
            return linear(index, weight)(operator)
    raise ValueError("no input fits the weight")


def backward_of_linear(operator: Operator) -> Work:
    """Return the work of the backward of a linear layer, from the shapes of its forward: both gradients."""
    forward = linear_any_order(operator)
    traffic = None if forward.bytes is None else 2 * forward.bytes
    return Work(2 * (forward.flops or 0.0), traffic, operand=forward.operand, products=2)
