"""Where did the missing MFU go?

`analyze` reads the traces that torch.profiler wrote on the ranks of a training run and attributes the lost time:
a waterfall from 100 % of peak FLOP/s down to the measured MFU, exact to the nanosecond.
"""

from typing import TYPE_CHECKING, Any

from traceaudit.errors import TraceAuditError

if TYPE_CHECKING:
    from traceaudit.audit import Audit
    from traceaudit.capture import capture
    from traceaudit.comparing.difference import Diff, diff
    from traceaudit.pipeline import analyze, load
    from traceaudit.steps import Selection

__version__ = "0.1.0"
__all__ = ["Audit", "Diff", "Selection", "TraceAuditError", "analyze", "capture", "diff", "load"]

_HOMES = {
    "Audit": "audit",
    "Diff": "comparing.difference",
    "Selection": "steps",
    "analyze": "pipeline",
    "diff": "comparing.difference",
    "load": "pipeline",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  whatever the name stands for
    """Import pandas and what needs it only when it is used."""
    from importlib import import_module

    if name == "capture":  # callable like a function; needs torch
        return import_module("traceaudit.capture")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"traceaudit.{_HOMES[name]}"), name)
