"""What traces hold and what they lack, what each lack costs in certainty, and how to record it.

Nothing is attributed here: the files are read, counted and held against what attribution would need of them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from traceaudit.account import RankAccount, without_gpu
from traceaudit.classify import State, activities, main_device
from traceaudit.errors import InputError, TraceAuditError
from traceaudit.events import GPU_KINDS, Kind, Trace
from traceaudit.host_device import on_host
from traceaudit.idle.calls import by_name
from traceaudit.mfu.model import declared
from traceaudit.reading.normalise import read_trace
from traceaudit.reading.parallel import Progress, Task, running
from traceaudit.reading.sources import configurations, find, one_job
from traceaudit.reading.streams import Inflating, Place, opened
from traceaudit.steps import LAUNCH_CALL, Selection, queued_before, step_windows

WHOLE = 0.95  # share of rows that carry something, from which on it counts as recorded
FEW_STEPS = 2  # below which a step cannot be compared with another
APART = 0.01  # of a step by which recordings may begin apart

Facts = dict[str, Any]


class Level(StrEnum):
    """How bad a lack is."""

    BLOCKS = "blocks"  # nothing can be attributed
    WEAKENS = "weakens"  # some of the time cannot be attributed, or only as an estimate
    NOTE = "note"  # evidence or convenience


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
    """Return what a file holds, and an empty account that tells its job and rank; or why it is no trace."""
    try:
        trace = read_trace(place)
    except TraceAuditError as error:
        return str(error)
    events = trace.events
    starts, ends = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    if not len(events):
        return "no event in the categories that torch.profiler writes"
    first, last = int(starts[0]), int(ends.max())
    empty = without_gpu(trace.origin, trace.losses, len(events), first, last)
    frames, stacks, memory = _mentioned(place, (b'"python_function"', b'"Call stack"', b'"[memory]"'))
    facts = {**_identity(trace, first, last), **_rows(trace), **_steps(trace)}
    return Holding(**facts, stacks=frames or stacks, memory=memory), empty


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


def _steps(trace: Trace) -> Facts:
    """Return the steps as `analyze` would see them."""
    standing = None if (trace.events["kind"].isin(GPU_KINDS)).any() else on_host(trace, Selection())
    used = standing or trace
    table = activities(used)
    if not len(table):
        return {"steps": (), "marked_by": None, "cut": (), "step_ns": None, "first_step_ns": None, "on_host": False}
    found = step_windows(used, table, Selection())
    marked = found.marked_by not in ("whole trace", "optimizer (partial step)")
    length = found.windows.end - found.windows.start
    return {
        "steps": tuple(int(step) for step in found.step) if marked else (),
        "marked_by": found.marked_by,
        "cut": tuple(f"step {step}: {reason}" for step, reason in found.left_out),
        "step_ns": int(np.median(length)) if marked and len(length) else None,
        "first_step_ns": int(found.windows.start[0]) if marked and len(length) else None,
        "on_host": standing is not None,
    }


@dataclass(frozen=True)
class Lack:
    """Something that traces lack.

    Attributes:
        what: the lack.
        level: how bad it is.
        files: how many files lack it.
        ranks: of those with a known rank, at most 16.
        cost: what it costs in certainty.
        change: what to change to record it.
    """

    what: str
    level: Level
    files: int
    ranks: tuple[int, ...]
    cost: str
    change: str


@dataclass(frozen=True)
class _Rule:
    """What one file may lack."""

    what: str
    level: Level
    lacks: Callable[[Holding], bool]
    cost: str
    change: str


RULES: tuple[_Rule, ...] = (
    _Rule(
        "no GPU rows, though the job ran on a GPU",
        Level.BLOCKS,
        lambda own: not own.gpu_rows and own.gpu_job,
        "nothing of this rank can be attributed; it is never taken for an idle GPU",
        "profile with ProfilerActivity.CUDA; end other users of CUPTI (Nsight, DCGM profiling); record at least one "
        "whole step after a warm-up step",
    ),
    _Rule(
        "no GPU rows and no marked steps",
        Level.BLOCKS,
        lambda own: not own.gpu_rows and not own.gpu_job and not own.on_host,
        "nothing can be attributed",
        "profile with ProfilerActivity.CUDA on a GPU; for a run on CPUs call profiler.step() after each step, or pass "
        "--whole-trace",
    ),
    _Rule(
        "no GPU rows: CPU operators stand for the device",
        Level.WEAKENS,
        lambda own: own.on_host,
        "there is no peak, so no MFU without --peak-tflops; groups of several gloo communicators cannot be told apart",
        "nothing, if the run was on CPUs; else profile with ProfilerActivity.CUDA",
    ),
    _Rule(
        "the file is cut short",
        Level.WEAKENS,
        lambda own: own.torn,
        "steps behind the cut are missing, and the attribution is called not reliable",
        "let the process end its export, or copy the file again",
    ),
    _Rule(
        "no rows of the host",
        Level.WEAKENS,
        lambda own: bool(own.gpu_rows) and not own.operators and not own.launches and not own.linked,
        "idle time has no cause: all of it is unattributed; no steps, shapes or recompute",
        "add ProfilerActivity.CPU",
    ),
    _Rule(
        "no operators of the host",
        Level.WEAKENS,
        lambda own: bool(own.gpu_rows) and not own.operators and bool(own.launches or own.linked),
        "no shapes, no recompute, and host gaps name calls of the runtime alone",
        "add ProfilerActivity.CPU",
    ),
    _Rule(
        "GPU rows that were launched before the recording began",
        Level.NOTE,
        lambda own: own.queued > 0,
        "they belong to no step",
        "a warm-up step before the recorded ones; a GPU that lags far behind the host keeps some",
    ),
    _Rule(
        "GPU rows without a record of their launch",
        Level.WEAKENS,
        lambda own: (
            bool(own.launches or own.operators)
            and own.gpu_rows > own.queued
            and own.linked < WHOLE * (own.gpu_rows - own.queued)
        ),
        "idle time before such a row is unattributed (launch_missing), and its step is told by its own start",
        "record with ProfilerActivity.CPU and CUDA together; let nothing filter cuda_runtime rows out of the file",
    ),
    _Rule(
        "launches whose kernels are missing",
        Level.WEAKENS,
        lambda own: bool(own.gpu_rows) and own.launches - own.graphs > 0 and own.linked < WHOLE * own.launches,
        "time of the missing kernels reads as idle",
        "record fewer steps, so that the buffers of CUPTI suffice; end the recording after a synchronisation",
    ),
    _Rule(
        "no marked steps",
        Level.WEAKENS,
        lambda own: (bool(own.gpu_rows) or own.on_host) and not own.steps,
        "the whole recording is one window: no time per step, no MFU from declared tokens",
        "call profiler.step() after each optimizer step, or name marks of your own with --step-marker",
    ),
    _Rule(
        "steps cut by the recording",
        Level.WEAKENS,
        lambda own: bool(own.cut),
        "they are left out",
        "record one step more",
    ),
    _Rule(
        "a single whole step",
        Level.NOTE,
        lambda own: len(own.steps) == 1,
        "what is typical and what is jitter cannot be told apart",
        "record three steps (active=3)",
    ),
    _Rule(
        "no shapes",
        Level.WEAKENS,
        lambda own: (bool(own.gpu_rows) or own.on_host) and bool(own.operators) and not own.shaped,
        "model FLOPs must be declared, kernels have no roofline, kernels of ranks are compared by name and grid alone",
        "profile with record_shapes=True",
    ),
    _Rule(
        "matrix products without shapes",
        Level.WEAKENS,
        lambda own: bool(own.shaped) and own.products_shaped < WHOLE * own.products,
        "their FLOPs are not counted",
        "profile with record_shapes=True from the first step of the recording on",
    ),
    _Rule(
        "communications without arguments",
        Level.WEAKENS,
        lambda own: own.communications > 0 and own.described < WHOLE * own.communications,
        "groups are guessed (all ranks), sizes are unknown, and ranks are paired by order",
        "PyTorch 2.4 or later; no CUDA graphs around collectives; a warm-up step before the recorded ones",
    ),
    _Rule(
        "communications without sequence numbers",
        Level.NOTE,
        lambda own: own.described > 0 and own.numbered < WHOLE * own.described,
        "ranks are paired by group, kind, size and order, and checked by how steadily they end",
        "a PyTorch of 2026 or later writes them",
    ),
    _Rule(
        "kernels in CUDA graphs",
        Level.NOTE,
        lambda own: own.graphs > 0,
        "their operators are not recorded: shapes, recompute and groups inside are unknown",
        "record one run without graphs for the roofline",
    ),
    _Rule(
        "rows of other devices",
        Level.NOTE,
        lambda own: own.other_devices > 0,
        "they are left out: a rank is one GPU",
        "one process a GPU",
    ),
    _Rule(
        "the clock cannot be compared",
        Level.WEAKENS,
        lambda own: bool(own.events) and not own.absolute_clock,
        "waits are told by the shortest duration alone, or the rank is left out beside others",
        "keep baseTimeNanoseconds in the file",
    ),
    _Rule(
        "no rank in the file",
        Level.NOTE,
        lambda own: own.rank is None,
        "ranks are numbered in the order of the files' names",
        "initialise torch.distributed before the profiler starts, or name the files rank0…, rank1…",
    ),
    _Rule(
        "no name of the GPU",
        Level.NOTE,
        lambda own: bool(own.gpu_rows) and own.device is None,
        "the peak is not known",
        "pass --gpu or --peak-tflops",
    ),
    _Rule(
        "Python stacks",
        Level.NOTE,
        lambda own: own.stacks,
        "they name the frame behind a host gap, but inflate host gaps while they are recorded",
        "judge the size of host gaps by a recording without stacks",
    ),
    _Rule(
        "no Python stacks",
        Level.NOTE,
        lambda own: not own.stacks,
        "host gaps name a call or an annotation, not the line of Python",
        "record a second time with with_stack=True once a host gap is to be explained",
    ),
    _Rule(
        "no synchronisation events",
        Level.NOTE,
        lambda own: bool(own.gpu_rows) and not own.syncs,
        "what a kernel waited for on another stream is told by what ended just before",
        "experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True)",
    ),
    _Rule(
        "no memory events",
        Level.NOTE,
        lambda own: bool(own.gpu_rows) and not own.memory,
        "fragmentation and the fit into memory are unknown",
        "profile_memory=True, in a recording of its own",
    ),
    _Rule(
        "rows that could not be used",
        Level.NOTE,
        lambda own: own.dropped + own.repaired > 0,
        "dropped rows are missing; repaired ones count",
        "nothing; PyTorch after July 2026 writes valid names",
    ),
)


@dataclass(frozen=True)
class Inspection:
    """What traces hold and lack.

    Attributes:
        files: what each file holds.
        skipped: (file, reason) of files that are no traces.
        lacks: what is missing, the worst first.
        ranks_traced, world_size: of the job; 1 and None where files do not tell.
    """

    files: tuple[Holding, ...]
    skipped: tuple[tuple[str, str], ...]
    lacks: tuple[Lack, ...]
    ranks_traced: int
    world_size: int | None

    @property
    def usable(self) -> bool:
        """Whether `analyze` can attribute anything."""
        return not any(lack.level == Level.BLOCKS and lack.files >= len(self.files) for lack in self.lacks)

    @property
    def table(self) -> pd.DataFrame:
        """One row a file, columns the attributes of `Holding`."""
        return pd.DataFrame([asdict(own) for own in self.files], columns=[field.name for field in fields(Holding)])

    @property
    def result(self) -> Facts:
        """The content of ``--json``."""
        return {
            "usable": self.usable,
            "ranks_traced": self.ranks_traced,
            "world_size": self.world_size,
            "lacks": [{**asdict(lack), "ranks": list(lack.ranks)} for lack in self.lacks],
            "files": [{**asdict(own), "steps": list(own.steps), "cut": list(own.cut)} for own in self.files],
            "skipped": [{"file": file, "reason": reason} for file, reason in self.skipped],
        }

    def __str__(self) -> str:
        """Return the text of ``traceaudit inspect``."""
        from traceaudit.report.inspection import lines

        return "\n".join(lines(self.result))


def inspect(
    traces: str | Path | Sequence[str | Path], *, jobs: int | None = None, progress: Progress | None = None
) -> Inspection:
    """Say what traces hold and what they lack.

    Args:
        traces: directories, files, glob patterns or URLs, as for `traceaudit.analyze`.
        jobs: processes that read; as many as cores and free memory allow by default.
        progress: called with (bytes done, bytes in all, name of a file).

    Raises:
        InputError: there is no file to read.
    """
    paths = [traces] if isinstance(traces, str | Path) else list(traces)
    sources = find(paths)
    places = [source.place for source in sources]
    done, whole = 0, sum(source.size for source in sources)
    found: list[tuple[Holding, RankAccount]] = []
    skipped: list[tuple[str, str]] = []
    tasks = [Task(source.place, source.size, Selection(), None) for source in sources]
    with running(tasks, jobs=jobs) as workers:
        outcomes = map(held, places) if workers is None else workers.map(held, places)
        for source, outcome in zip(sources, outcomes, strict=True):
            done += source.size
            if progress is not None:
                progress(done, whole, source.place.name)
            if isinstance(outcome, str):
                skipped.append((source.place.name, outcome))
            else:
                found.append(outcome)
    holdings = tuple(holding for holding, _ in found)
    sizes = {own.world_size for own in holdings} - {None}
    ranks = {own.rank for own in holdings} - {None}
    lacks = [
        *_of_job(holdings, [account for _, account in found], paths),
        *(lack for rule in RULES if (lack := _applied(rule, holdings)) is not None),
    ]
    lacks.sort(key=lambda lack: list(Level).index(lack.level))
    size = max((size for size in sizes if size is not None), default=None)
    return Inspection(holdings, tuple(skipped), tuple(lacks), len(ranks) or min(len(holdings), 1), size)


def _applied(rule: _Rule, holdings: Sequence[Holding]) -> Lack | None:
    lacking = [own for own in holdings if rule.lacks(own)]
    if not lacking:
        return None
    ranks = sorted({own.rank for own in lacking if own.rank is not None})
    return Lack(rule.what, rule.level, len(lacking), tuple(ranks[:16]), rule.cost, rule.change)


def _of_job(holdings: Sequence[Holding], accounts: list[RankAccount], paths: Sequence[str | Path]) -> Iterator[Lack]:
    """Yield what the files lack together."""
    if not holdings:
        yield Lack(
            "no trace of torch.profiler",
            Level.BLOCKS,
            0,
            (),
            "nothing can be attributed",
            "pass what the profiler wrote",
        )
        return
    try:
        one_job(accounts)
    except InputError as error:
        cost = "they are refused: time of different recordings must not be added up"
        yield Lack(_first_line(error), Level.BLOCKS, len(holdings), (), cost, "name the files of one recording")
    yield from _untraced(holdings)
    yield from _begun_apart(holdings)
    with configurations(paths) as found:
        try:
            known = declared(found, {})
        except TraceAuditError as error:
            yield Lack(_first_line(error), Level.WEAKENS, 0, (), "it cannot be used", "mend run.json, or pass --config")
            return
    if {"params", "tokens_per_step"} - known.sources.keys():
        yield Lack(
            "no run.json that tells parameters and tokens",
            Level.NOTE,
            len(holdings),
            (),
            "MFU rests on counted FLOPs where shapes cover the run, else it is unknown",
            "record with traceaudit.capture, or pass --params and --tokens-per-step",
        )


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].rstrip(":;. ").removesuffix("; analyse one at a time by naming its files")


def _untraced(holdings: Sequence[Holding]) -> Iterator[Lack]:
    """Yield a lack if ranks of the job have no file, or if nothing tells how many there are."""
    ranks = {own.rank for own in holdings if own.rank is not None}
    sizes = [own.world_size for own in holdings if own.world_size is not None]
    if sizes and len(ranks) < max(sizes):
        missing = [rank for rank in range(min(max(sizes), 100_000)) if rank not in ranks]
        yield Lack(
            f"{max(sizes) - len(ranks):,} of {max(sizes):,} ranks have no trace",
            Level.WEAKENS,
            len(holdings),
            tuple(missing[:16]),
            "waits for them cannot be told from transfers, and a straggler among them is not seen",
            "record all ranks, or at least all of one process group (one pipeline, one data-parallel group)",
        )
    if not sizes and len(holdings) > 1:
        yield Lack(
            "the size of the job is not recorded",
            Level.NOTE,
            len(holdings),
            (),
            "the traced ranks are taken for the whole job",
            "initialise torch.distributed before the profiler starts",
        )


def _begun_apart(holdings: Sequence[Holding]) -> Iterator[Lack]:
    """Yield a lack if, on one host, a first step began well before all recordings had."""
    hosts: dict[str, list[Holding]] = {}
    for own in holdings:
        if own.absolute_clock and own.host is not None and own.first_step_ns is not None:
            hosts.setdefault(own.host, []).append(own)
    early = [
        max(own.first_ns for own in group) - min(own.first_step_ns or 0 for own in group) for group in hosts.values()
    ]
    step = min((own.step_ns for group in hosts.values() for own in group if own.step_ns), default=0)
    if early and max(early) > APART * step:
        yield Lack(
            f"a recording begins {max(early) / 1e6:.1f} ms into the first step of another",
            Level.NOTE,
            len(holdings),
            (),
            "waits for a rank that was not recorded yet are trace_cut; the first step may be left out",
            "record one step more; traceaudit.capture lets all ranks meet before the first",
        )
