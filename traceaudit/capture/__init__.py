"""Record the right steps of a training run with the right switches; needs torch 2.4 or later.

Install it with ``pip install 'traceaudit[capture]'``.

In a training loop of your own::

    import traceaudit as ta

    with ta.capture("traces/run1", model=model, tokens_per_step=4_194_304) as recorder:
        for batch in loader:
            train_step(batch)
            recorder.step()

After ten steps it times five steps without the profiler, warms the profiler up for one and records three. The files
``rank{r}.pt.trace.json.gz`` and ``run.json`` then lie under the directory, for ``traceaudit analyze traces/run1``.
Every rank of the job must run it, with the same arguments. It never breaks training: whatever fails of it is a
warning (`CaptureWarning`).

`handler` is the same for a `torch.profiler.profile` of your own, `traceaudit.capture.recipes` for frameworks, and
`verify` says what a directory of traces lacks.

What it costs: while it records, the profiler adds 3 to 4 µs of host time an operator (torch 2.13, one core of a Xeon);
shapes add too little to measure. Stacks (``with_stack=True``) record every call of Python besides, so that host gaps
look larger than they are: record them in a second run once a host gap is to be explained. Memory events
(``profile_memory=True``) add an event for each allocation. An event takes about 400 bytes before compression, and
training pauses while the file is written. ``run.json`` holds the time of a step without the profiler, so that the
report can say what the recording cost.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceaudit.inspection.inspect import Inspection

if find_spec("torch") is None:
    raise ImportError("traceaudit.capture needs torch: pip install 'traceaudit[capture]'")

from traceaudit.capture.description import describe
from traceaudit.capture.recorder import CaptureWarning, Recorder, capture, handler

__all__ = ["CaptureWarning", "Recorder", "capture", "describe", "handler", "verify"]


def verify(directory: str) -> "Inspection":
    """Return what the traces under a directory hold, what they lack, what that costs and what to change.

    The same as ``traceaudit inspect DIRECTORY``.

    Raises:
        TraceAuditError: there is nothing to read.
    """
    from traceaudit.inspection.inspect import inspect  # reading is nothing that training processes should import

    return inspect(directory)


class _Callable(ModuleType):
    """Lets ``ta.capture(...)`` mean ``traceaudit.capture.capture(...)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Recorder:  # noqa: ANN401  those of `capture`
        """Return `capture` of the arguments."""
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
