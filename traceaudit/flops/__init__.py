"""FLOPs and bytes of the operators that own kernels, from the shapes in the trace.

`register` teaches the counter another operator.
"""

from traceaudit.flops.counting import Counted, counted, counted_on_host
from traceaudit.flops.operator import Function, Operator, Work
from traceaudit.flops.registry import FORMULAS, register, work_of

__all__ = ["FORMULAS", "Counted", "Function", "Operator", "Work", "counted", "counted_on_host", "register", "work_of"]
