"""Convolutions: 2 · batch · outputs · channels out · channels in of a group · filter (`torch.utils.flop_counter`)."""

from math import prod

from traceaudit.flops.operator import Function, Operator, Work, moved


def forward(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Function:
    """Return the function of a convolution of ``args[0]`` with the filters ``args[1]``; the rest name its arguments."""

    def work(operator: Operator) -> Work:
        x, w = operator.shape(0), operator.shape(1)
        places = len(x) - 2
        if transposed is not None and operator.flag(transposed):
            return _transposed(operator)
        try:
            steps, pads, holes = (operator.integers(index, places) for index in (stride, padding, dilation))
        except ValueError:  # not recorded: the traffic is known, the result's size is not
            return Work(None, moved(operator, (0, 1)))
        size = [(x[2 + i] + 2 * pads[i] - holes[i] * (w[2 + i] - 1) - 1) // steps[i] + 1 for i in range(places)]
        result = x[0] * w[0] * prod(size)
        flops = 2.0 * result * prod(w[1:])
        return Work(flops, moved(operator, (0, 1), result * _element(operator)))

    return work


def _element(operator: Operator) -> float:
    try:
        return operator.element(0)
    except ValueError:
        return 0.0


def _transposed(operator: Operator) -> Work:
    """Each element of the input meets each filter: 2 · inputs · prod(weight without its first dimension)."""
    return Work(2.0 * operator.elements(0) * prod(operator.shape(1)[1:]), moved(operator, (0, 1)))


def transposed(operator: Operator) -> Work:
    """Return the work of a transposed convolution of ``args[0]``."""
    return _transposed(operator)


def backward(gradient: int, inputs: int, weight: int, mask: int | None, transposed: int | None = None) -> Function:
    """Return the function of a convolution's backward: one product for each gradient that the mask asks for."""

    def work(operator: Operator) -> Work:
        flipped = transposed is not None and operator.flag(transposed)
        product = 2.0 * operator.elements(inputs if flipped else gradient) * prod(operator.shape(weight)[1:])
        wanted = operator.text(mask).strip("[]").split(", ") if mask is not None else []
        products = sum(flag == "True" for flag in wanted[:2]) if wanted and wanted != [""] else 2
        traffic = moved(operator, (gradient, inputs, weight))
        return Work(products * product, None if traffic is None else 2 * traffic, operand=gradient, products=products)

    return work


def weight_gradient(operator: Operator) -> Work:
    """Return the work of ``cudnn_convolution_backward_weight(weight size, grad, input, ...)``."""
    size = operator.integers(0, 1) if operator.text(0) else None
    if size is None:  # of the filters nothing is recorded; the result's size is not known
        return Work(None, moved(operator, (1, 2)), operand=1)
    return Work(2.0 * operator.elements(1) * prod(size[1:]), moved(operator, (1, 2)), operand=1)


def input_gradient(operator: Operator) -> Work:
    """Return the work of ``cudnn_convolution_backward_input(input size, grad, weight, ...)``."""
    return Work(2.0 * operator.elements(1) * prod(operator.shape(2)[1:]), moved(operator, (1, 2)), operand=1)
