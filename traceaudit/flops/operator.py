"""What a trace says of one operator, and the work that follows from it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

# Names of element types in traces: bytes an element, and the column of the peak table they run at ("" none).
ELEMENTS: dict[str, tuple[float, str]] = {
    "c10::BFloat16": (2, "bf16"),
    "c10::Half": (2, "fp16"),
    "float": (4, "fp32"),
    "double": (8, ""),
    "c10::Float8_e4m3fn": (1, "fp8"),
    "c10::Float8_e5m2": (1, "fp8"),
    "c10::Float8_e4m3fnuz": (1, "fp8"),
    "c10::Float8_e5m2fnuz": (1, "fp8"),
    "c10::Float8_e8m0fnu": (1, "fp8"),
    "c10::Float4_e2m1fn_x2": (1, "fp4"),  # two elements a byte; dims count bytes
    "long int": (8, ""),
    "long": (8, ""),
    "long unsigned int": (8, ""),
    "int": (4, ""),
    "short int": (2, ""),
    "unsigned char": (1, ""),
    "signed char": (1, ""),
    "bool": (1, ""),
    "c10::complex<float>": (8, ""),
}
PACKED = "c10::Float4_e2m1fn_x2"
UNUSABLE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)  # shapes that do not tell


@dataclass(frozen=True)
class Operator:
    """One operator as recorded: arguments count from 0.

    Attributes:
        name: without overload.
        dims: ``Input Dims``; of a tensor its shape, of a list of tensors their shapes, [] of anything else.
        types: ``Input type``; shorter than `dims` where it was not recorded.
        concrete: ``Concrete Inputs``, the scalars as text, "" for tensors; [] where not recorded.
        element_bytes: bytes of an element whose type was not recorded, 0 where nothing tells.
    """

    name: str
    dims: list[Any]
    types: list[str]
    concrete: list[str]
    element_bytes: float = 0

    def shape(self, index: int) -> list[int]:
        """Return the shape of a tensor argument.

        Raises:
            ValueError: the argument is no tensor with a recorded shape.
        """
        shape = self.dims[index]
        if shape == [] and index < len(self.types) and self.types[index] in ELEMENTS:
            return []  # a tensor without dimensions
        if not isinstance(shape, list) or not shape or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"argument {index} of {self.name} has no shape")
        return list(shape)

    def elements(self, index: int) -> int:
        """Return the elements of a tensor argument."""
        return prod(self.shape(index))

    def element(self, index: int) -> float:
        """Return the bytes of an element of an argument.

        Raises:
            ValueError: nothing tells its type.
        """
        kind = self.types[index] if index < len(self.types) else ""
        size = ELEMENTS[kind][0] if kind in ELEMENTS else self.element_bytes
        if not size:
            raise ValueError(f"argument {index} of {self.name} has no known element type")
        return size

    def bytes(self, index: int) -> float:
        """Return the bytes of a tensor argument, or of a list of tensors."""
        listed = self.dims[index]
        if isinstance(listed, list) and listed and isinstance(listed[0], list):
            return sum(prod(shape) for shape in listed) * (self.element_bytes or 4)
        return self.elements(index) * self.element(index)

    def tensors(self) -> Iterator[int]:
        """Iterate over the arguments that are tensors, or lists of them, with recorded shapes."""
        for index, shape in enumerate(self.dims):
            if isinstance(shape, list) and shape and not self._scalar(index):
                yield index

    def _scalar(self, index: int) -> bool:
        return index < len(self.types) and self.types[index].startswith("Scalar")

    def text(self, index: int) -> str:
        """Return a scalar argument as text, "" where it was not recorded."""
        return self.concrete[index] if index < len(self.concrete) else ""

    def flag(self, index: int) -> bool:
        """Return a flag; one that was not recorded is not set."""
        return self.text(index) == "True"

    def integers(self, index: int, length: int) -> list[int]:
        """Return a list of integers, a single one repeated.

        Raises:
            ValueError: it was not recorded.
        """
        found = json.loads(self.text(index) or "null")
        if not isinstance(found, list) or not all(type(value) is int for value in found) or not found:
            raise ValueError(f"argument {index} of {self.name} was not recorded")
        return found * length if len(found) == 1 else found


@dataclass(frozen=True)
class Work:
    """The work of one operator.

    Attributes:
        flops: of its matrix products as `torch.utils.flop_counter` counts them, masks aside; None where not known.
        bytes: the least it must move to and from memory: each tensor once; None where not known.
        executed: FLOPs that the hardware runs (causal attention skips half of the scores); `flops` where None.
        model: FLOPs that count as the model's (attention backward is twice its forward); `executed` where None.
        operand: the argument whose element type picks the peak.
        products: separate matrix products, each with a kernel of its own.
        estimated: a bound stands for what the trace does not hold (lengths of packed sequences).
    """

    flops: float | None
    bytes: float | None = None
    executed: float | None = None
    model: float | None = None
    operand: int = 0
    products: int = 1
    estimated: bool = False

    @property
    def hardware_flops(self) -> float:
        """FLOPs that the hardware runs, 0 where not known."""
        return self.executed if self.executed is not None else self.flops or 0.0

    @property
    def model_flops(self) -> float:
        """FLOPs that count as the model's, 0 where not known."""
        return self.model if self.model is not None else self.hardware_flops


Function = Callable[[Operator], Work]


def moved(operator: Operator, arguments: tuple[int, ...], extra: float = 0) -> float | None:
    """Return the bytes of some arguments, nothing where a size is not known."""
    try:
        return sum(operator.bytes(index) for index in arguments) + extra
    except UNUSABLE:
        return None
