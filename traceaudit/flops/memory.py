"""Operators bound by memory: no matrix products, and the least bytes that their tensors need to move."""

from math import prod

from traceaudit.flops.operator import Function, Operator, Work


def traffic(reads: tuple[int, ...], writes: tuple[int, ...]) -> Function:
    """Return the function of an operator that reads some arguments and writes results as large as others."""

    def work(operator: Operator) -> Work:
        return Work(0.0, sum(operator.bytes(index) for index in (*reads, *writes)), operand=(*reads, *writes)[0])

    return work


def elementwise(operator: Operator) -> Work:
    """Return the work of a pointwise operator: inputs read, a result of their common shape written."""
    tensors = list(operator.tensors())
    largest = max(tensors, key=operator.elements)
    rank = max(len(operator.shape(index)) for index in tensors)
    shapes = [[1] * (rank - len(operator.shape(index))) + operator.shape(index) for index in tensors]
    result = prod(max(sizes) for sizes in zip(*shapes, strict=True)) if all(map(all, shapes)) else 0
    written = result * operator.element(largest)
    return Work(0.0, sum(operator.bytes(index) for index in tensors) + written, operand=largest)


def reads_all(operator: Operator) -> Work:
    """Return the work of an operator that reads its tensors and writes little: a reduction."""
    tensors = list(operator.tensors())
    return Work(0.0, sum(operator.bytes(index) for index in tensors), operand=tensors[0])


def generated(operator: Operator) -> Work:
    """Return the work of a generated (Triton) kernel, whose arguments are the tensors it reads and writes.

    A table of embeddings is not read whole, nor are the scores that a loss picks from: the largest tensor of such a
    kernel is left out. A template with two
    matrices and their product among its arguments is a matrix product.
    """
    tensors = [index for index in operator.tensors() if len(operator.shape(index)) >= 1]
    if "_tem_" in operator.name and len(tensors) >= 3:
        a, b, c = (operator.shape(index) for index in (tensors[0], tensors[1], tensors[-1]))
        if len(a) == len(b) and a[-1] == b[-2] and c[-2:] == [a[-2], b[-1]]:
            moved = sum(operator.bytes(index) for index in tensors)
            return Work(2.0 * prod(a) * b[-1], moved, operand=tensors[0])
    sizes = {index: operator.bytes(index) for index in tensors}
    picks = "embedding" in operator.name or ("nll_loss" in operator.name and "backward" not in operator.name)
    if picks and len(sizes) > 1:
        sizes.pop(max(sizes, key=lambda index: sizes[index]))
    return Work(0.0, sum(sizes.values()), operand=tensors[0])


def embedding(operator: Operator) -> Work:
    """Return the work of a lookup: one row of the table read and written for each index."""
    row = operator.shape(0)[-1] * operator.element(0)
    return Work(0.0, operator.bytes(1) + 2 * operator.elements(1) * row)


def embedding_backward(operator: Operator) -> Work:
    """Return the work of a lookup's backward: gradients read, added to the rows of a table that is cleared first."""
    table = int(operator.text(2)) * operator.shape(0)[-1] * operator.element(0) if operator.text(2) else 0.0
    return Work(0.0, 2 * operator.bytes(0) + operator.bytes(1) + table)


def index_select(operator: Operator) -> Work:
    """Return the work of taking slices along one dimension (argument 1 names it, 2 holds the indices)."""
    shape = operator.shape(0)
    dim = int(operator.text(1)) if operator.text(1) else 0
    result = operator.elements(0) // max(shape[dim], 1) * operator.elements(2)
    return Work(0.0, 2 * result * operator.element(0) + operator.bytes(2))


def index(operator: Operator) -> Work:
    """Return the work of advanced indexing with one list of indices along the first dimension."""
    listed = operator.dims[1]
    if not listed or not isinstance(listed[0], list) or len([shape for shape in listed if shape]) != 1:
        raise ValueError("the indices have no shape")
    result = prod(next(shape for shape in listed if shape)) * prod(operator.shape(0)[1:])
    return Work(0.0, 2 * result * operator.element(0))


def gather(operator: Operator) -> Work:
    """Return the work of ``gather(self, dim, index)``."""
    return Work(0.0, operator.bytes(2) + 2 * operator.elements(2) * operator.element(0))


def scatter(operator: Operator) -> Work:
    """Return the work of ``scatter(self, dim, index, source)``: sources read, their places written."""
    return Work(0.0, operator.bytes(2) + operator.bytes(3) + operator.elements(3) * operator.element(0))


def index_put(operator: Operator) -> Work:
    """Return the work of ``index_put(self, indices, values, accumulate)``."""
    return Work(0.0, operator.bytes(2) * (3 if operator.flag(3) else 2), operand=2)


def resize(operator: Operator) -> Work:
    """Return the work of an upsampling whose argument 1 is the size of the result."""
    shape = operator.shape(0)
    size = operator.integers(1, len(shape) - 2)
    return Work(0.0, operator.bytes(0) + prod(shape[:2]) * prod(size) * operator.element(0))


def picked(scores: int, target: int) -> Function:
    """Return the function of a loss that reads or writes one score of each row."""

    def work(operator: Operator) -> Work:
        rows = operator.elements(target)
        return Work(0.0, operator.bytes(target) + rows * operator.element(scores), operand=scores)

    return work


def cast(operator: Operator) -> Work:
    """Return the work of a quantisation to 8 bits."""
    return Work(0.0, operator.bytes(0) + operator.elements(0))


def cat(operator: Operator) -> Work:
    """Return the work of joining a list of tensors: each read and written once."""
    return Work(0.0, 2 * operator.bytes(0))


def foreach(operator: Operator) -> Work:
    """Return the work of an operator on lists of tensors: all lists read, the first written; lists may be lost."""
    lists = [index for index in operator.tensors() if isinstance(operator.dims[index][0], list)]
    return Work(0.0, sum(operator.bytes(index) for index in lists) + operator.bytes(lists[0]), operand=lists[0])


def adam(operator: Operator) -> Work:
    """Return the work of fused Adam: parameters, gradients and two moments read, all but the gradients written."""
    return Work(0.0, sum(operator.bytes(index) for index in (0, 0, 1, 2, 2, 3, 3)))


def sgd(operator: Operator) -> Work:
    """Return the work of fused SGD: parameters and gradients read, parameters written; momentum if there is one."""
    lists = [i for i in operator.tensors() if isinstance(operator.dims[i][0], list)]
    written = [index for index in lists if index != 1]
    return Work(0.0, sum(operator.bytes(index) for index in (*lists, *written)))
