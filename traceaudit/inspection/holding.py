"""What one file holds: its job and rank, its rows by what can be done with them, and its steps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traceaudit.account import RankAccount, without_gpu
from traceaudit.classify import State, activities, main_device
from traceaudit.errors import TraceAuditError
from traceaudit.events import GPU_KINDS, Kind, Trace
from traceaudit.host_device import on_host
from traceaudit.idle.calls import by_name
from traceaudit.reading.normalise import read_trace
from traceaudit.reading.streams import Inflating, Place, opened
from traceaudit.steps import LAUNCH_CALL, Selection, Steps, queued_before, step_windows

Facts = dict[str, Any]


@dataclass(frozen=True)
class Holding:
    """What one file holds.

    Attributes:
        file: its name.
        rank, world_size: as recorded, or from the name; None where neither tells.
        host, device: names; None where not recorded.
        first_ns, last_ns: extent on the file's clock.
        absolute_clock: times count from the epoch, so that ranks can be compared.
        events: rows that could be used.
        dropped, repaired: rows that could not, and those that needed a repair; `torn`: the file ends early.
        kernels: kernels, of all devices; `gpu_rows` of the rank's own device, copies included.
        other_devices: rows of other devices.
        linked: of `gpu_rows`, those with a record of their launch; `queued`: launched before the recording began.
        launches: calls that launch a kernel; `graphs`: of them those of CUDA graphs.
        operators: operators of the host; `shaped`: those with shapes.
        products: matrix products, attention and convolutions; `products_shaped`: those with shapes.
        communications: communication on the GPU; `described`: those with arguments, `numbered`: with a sequence number.
        groups: process groups listed.
        steps: marked steps that are whole; `marked_by`: what marks them; `cut`: what was left out of them, and why.
        step_ns, first_step_ns: median length of a step, and the start of the first; None without steps.
        stacks, memory, syncs: Python stacks, the allocator and synchronisation events were recorded.
        on_host: a run on CPUs, whose operators can stand for a device.
        gpu_job: something in the file speaks of a GPU.
    """

    file: str
    rank: int | None
    world_size: int | None
    host: str | None
    device: str | None
    first_ns: int
    last_ns: int
    absolute_clock: bool
    events: int
    dropped: int
    repaired: int
    torn: bool
    kernels: int
    gpu_rows: int
    other_devices: int
    linked: int
    queued: int
    launches: int
    graphs: int
    operators: int
    shaped: int
    products: int
    products_shaped: int
    communications: int
    described: int
    numbered: int
    groups: int
    steps: tuple[int, ...]
    marked_by: str | None
    cut: tuple[str, ...]
    step_ns: int | None
    first_step_ns: int | None
    stacks: bool
    memory: bool
    syncs: bool
    on_host: bool
    gpu_job: bool


PRODUCTS = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm|\w*convolution|_scaled_dot_product_\w*attention\w*)$"
)
GRAPH = re.compile("GraphLaunch")


def held(place: Place) -> tuple[Holding, RankAccount] | str:
    """Return what a file holds, and an account that tells its job, rank and steps alone; or why it is no trace."""
    try:
        trace = read_trace(place)
    except TraceAuditError as error:
        return str(error)
    events = trace.events
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    if not len(events):
        return "no event in the categories that torch.profiler writes"
    first, last = int(starts[0]), int(ends.max())
    steps, standing = _windows(trace)
    own = replace(without_gpu(trace.origin, trace.losses, len(events), first, last), steps=steps)
    frames, stacks, memory = _mentioned(place, (b'"python_function"', b'"Call stack"', b'"[memory]"'))
    facts = {**_identity(trace, first, last), **_rows(trace), **_steps(steps), "on_host": standing}
    return Holding(**facts, stacks=frames or stacks, memory=memory), own


def _mentioned(place: Place, words: Sequence[bytes]) -> list[bool]:
    """Tell which words occur in a file at all: of Python frames and memory, the reader keeps few."""
    found = [False] * len(words)
    rest = b""
    with opened(place) as file:
        stream = Inflating(file)
        while (chunk := stream.part()) and not all(found):
            found = [before or word in rest + chunk for before, word in zip(found, words, strict=True)]
            rest = chunk[-max(map(len, words)) :]
    return found


def _identity(trace: Trace, first: int, last: int) -> Facts:
    origin, losses = trace.origin, trace.losses
    return {
        "file": origin.file.name,
        "rank": origin.rank,
        "world_size": origin.world_size,
        "host": origin.host,
        "device": origin.device.name if origin.device is not None and origin.device.name else None,
        "first_ns": first,
        "last_ns": last,
        "absolute_clock": origin.absolute_clock,
        "events": len(trace.events),
        "dropped": losses.dropped,
        "repaired": losses.repaired,
        "torn": losses.torn,
        "groups": len(origin.groups),
    }


def _rows(trace: Trace) -> Facts:
    """Return the counts of rows."""
    events = trace.events
    kinds = events["kind"].to_numpy()
    table = activities(trace)
    gpu = np.isin(kinds, GPU_KINDS)
    operator = kinds == Kind.OPERATOR
    shaped = operator & events["dims"].notna().to_numpy()
    products = operator & by_name(events, PRODUCTS)
    launches = (kinds == Kind.RUNTIME) & by_name(events, LAUNCH_CALL)
    communicating = (table["state"] == State.COMMUNICATION).to_numpy()
    arguments = table["collective"].to_numpy()[communicating]
    numbers = trace.collectives["seq"].to_numpy(dtype=np.int64)
    return {
        "kernels": int((kinds == Kind.KERNEL).sum()),
        "gpu_rows": len(table),
        "other_devices": int((gpu & (events["device"].to_numpy() != main_device(trace))).sum()),
        "linked": int((table["launch"] >= 0).sum()),
        "queued": int(queued_before(table).sum()) if len(table) else 0,
        "launches": int(launches.sum()),
        "graphs": int((launches & by_name(events, GRAPH)).sum()),
        "operators": int(operator.sum()),
        "shaped": int(shaped.sum()),
        "products": int(products.sum()),
        "products_shaped": int((products & shaped).sum()),
        "communications": int(communicating.sum()),
        "described": int((arguments >= 0).sum()),
        "numbered": int((numbers[arguments[arguments >= 0]] >= 0).sum()),
        "syncs": bool((kinds == Kind.SYNC).any()) or bool(len(trace.waits)),
        "gpu_job": bool(len(table)) or bool((kinds == Kind.RUNTIME).any()) or trace.origin.device is not None,
    }


def _windows(trace: Trace) -> tuple[Steps | None, bool]:
    """Return the steps as `analyze` would see them, and whether operators of the CPU stand for the device."""
    standing = None if (trace.events["kind"].isin(GPU_KINDS)).any() else on_host(trace, Selection())
    used = standing or trace
    table = activities(used)
    return (step_windows(used, table, Selection()), standing is not None) if len(table) else (None, False)


def _steps(found: Steps | None) -> Facts:
    """Return what the file tells of steps."""
    if found is None:
        return {"steps": (), "marked_by": None, "cut": (), "step_ns": None, "first_step_ns": None}
    marked = found.marked_by not in ("whole trace", "optimizer (partial step)")
    length = found.windows.end - found.windows.start
    return {
        "steps": tuple(int(step) for step in found.step) if marked else (),
        "marked_by": found.marked_by,
        "cut": tuple(f"step {step}: {reason}" for step, reason in found.left_out),
        "step_ns": int(np.median(length)) if marked and len(length) else None,
        "first_step_ns": int(found.windows.start[0]) if marked and len(length) else None,
    }
