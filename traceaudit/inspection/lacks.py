"""What single files lack: a table of rules, each with what the lack costs and what to change."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from traceaudit.inspection.holding import Holding

WHOLE = 0.95  # share of rows that carry something, from which on it counts as recorded


class Level(StrEnum):
    """How bad a lack is."""

    BLOCKS = "blocks"  # nothing can be attributed
    WEAKENS = "weakens"  # some of the time cannot be attributed, or only as an estimate
    NOTE = "note"  # evidence or convenience


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
class Rule:
    """What one file may lack."""

    what: str
    level: Level
    lacks: Callable[[Holding], bool]
    cost: str
    change: str


RULES: tuple[Rule, ...] = (
    Rule(
        "no GPU rows, though the job ran on a GPU",
        Level.BLOCKS,
        lambda own: not own.gpu_rows and own.gpu_job,
        "nothing of this rank can be attributed; it is never taken for an idle GPU",
        "profile with ProfilerActivity.CUDA; end other users of CUPTI (Nsight, DCGM profiling); record at least one "
        "whole step after a warm-up step",
    ),
    Rule(
        "no GPU rows and no marked steps",
        Level.BLOCKS,
        lambda own: not own.gpu_rows and not own.gpu_job and not own.on_host,
        "nothing can be attributed",
        "profile with ProfilerActivity.CUDA on a GPU; for a run on CPUs call profiler.step() after each step, or pass "
        "--whole-trace",
    ),
    Rule(
        "no GPU rows: CPU operators stand for the device",
        Level.WEAKENS,
        lambda own: own.on_host,
        "there is no peak, so no MFU without --peak-tflops; groups of several gloo communicators cannot be told apart",
        "nothing, if the run was on CPUs; else profile with ProfilerActivity.CUDA",
    ),
    Rule(
        "the file is cut short",
        Level.WEAKENS,
        lambda own: own.torn,
        "steps behind the cut are missing, and the attribution is called not reliable",
        "let the process end its export, or copy the file again",
    ),
    Rule(
        "no rows of the host",
        Level.WEAKENS,
        lambda own: bool(own.gpu_rows) and not own.operators and not own.launches and not own.linked,
        "idle time has no cause: all of it is unattributed; no steps, shapes or recompute",
        "add ProfilerActivity.CPU",
    ),
    Rule(
        "no operators of the host",
        Level.WEAKENS,
        lambda own: bool(own.gpu_rows) and not own.operators and bool(own.launches or own.linked),
        "no shapes, no recompute, and host gaps name calls of the runtime alone",
        "add ProfilerActivity.CPU",
    ),
    Rule(
        "GPU rows that were launched before the recording began",
        Level.NOTE,
        lambda own: own.queued > 0,
        "they belong to no step",
        "a warm-up step before the recorded ones; a GPU that lags far behind the host keeps some",
    ),
    Rule(
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
    Rule(
        "launches whose kernels are missing",
        Level.WEAKENS,
        lambda own: bool(own.gpu_rows) and own.launches - own.graphs > 0 and own.linked < WHOLE * own.launches,
        "time of the missing kernels reads as idle",
        "record fewer steps, so that the buffers of CUPTI suffice; end the recording after a synchronisation",
    ),
    Rule(
        "no marked steps",
        Level.WEAKENS,
        lambda own: (bool(own.gpu_rows) or own.on_host) and not own.steps,
        "the whole recording is one window: no time per step, no MFU from declared tokens",
        "call profiler.step() after each optimizer step, or name marks of your own with --step-marker",
    ),
    Rule(
        "steps cut by the recording",
        Level.WEAKENS,
        lambda own: bool(own.cut),
        "they are left out",
        "record one step more",
    ),
    Rule(
        "a single whole step",
        Level.NOTE,
        lambda own: len(own.steps) == 1,
        "what is typical and what is jitter cannot be told apart",
        "record three steps (active=3)",
    ),
    Rule(
        "no shapes",
        Level.WEAKENS,
        lambda own: (bool(own.gpu_rows) or own.on_host) and bool(own.operators) and not own.shaped,
        "model FLOPs must be declared, kernels have no roofline, kernels of ranks are compared by name and grid alone",
        "profile with record_shapes=True",
    ),
    Rule(
        "matrix products without shapes",
        Level.WEAKENS,
        lambda own: bool(own.shaped) and own.products_shaped < WHOLE * own.products,
        "their FLOPs are not counted",
        "profile with record_shapes=True from the first step of the recording on",
    ),
    Rule(
        "communications without arguments",
        Level.WEAKENS,
        lambda own: own.communications > 0 and own.described < WHOLE * own.communications,
        "groups are guessed (all ranks), sizes are unknown, and ranks are paired by order",
        "PyTorch 2.4 or later; no CUDA graphs around collectives; a warm-up step before the recorded ones",
    ),
    Rule(
        "communications without sequence numbers",
        Level.NOTE,
        lambda own: own.described > 0 and own.numbered < WHOLE * own.described,
        "ranks are paired by group, kind, size and order, and checked by how steadily they end",
        "a PyTorch of 2026 or later writes them",
    ),
    Rule(
        "kernels in CUDA graphs",
        Level.NOTE,
        lambda own: own.graphs > 0,
        "their operators are not recorded: shapes, recompute and groups inside are unknown",
        "record one run without graphs for the roofline",
    ),
    Rule(
        "rows of other devices",
        Level.NOTE,
        lambda own: own.other_devices > 0,
        "they are left out: a rank is one GPU",
        "one process a GPU",
    ),
    Rule(
        "the clock cannot be compared",
        Level.WEAKENS,
        lambda own: bool(own.events) and not own.absolute_clock,
        "waits are told by the shortest duration alone, or the rank is left out beside others",
        "keep baseTimeNanoseconds in the file",
    ),
    Rule(
        "no rank in the file",
        Level.NOTE,
        lambda own: own.rank is None,
        "ranks are numbered in the order of the files' names",
        "initialise torch.distributed before the profiler starts, or name the files rank0…, rank1…",
    ),
    Rule(
        "no name of the GPU",
        Level.NOTE,
        lambda own: bool(own.gpu_rows) and own.device is None,
        "the peak is not known",
        "pass --gpu or --peak-tflops",
    ),
    Rule(
        "Python stacks",
        Level.NOTE,
        lambda own: own.stacks,
        "they name the frame behind a host gap, but inflate host gaps while they are recorded",
        "judge the size of host gaps by a recording without stacks",
    ),
    Rule(
        "no Python stacks",
        Level.NOTE,
        lambda own: not own.stacks,
        "host gaps name a call or an annotation, not the line of Python",
        "record a second time with with_stack=True once a host gap is to be explained",
    ),
    Rule(
        "no synchronisation events",
        Level.NOTE,
        lambda own: bool(own.gpu_rows) and not own.syncs,
        "what a kernel waited for on another stream is told by what ended just before",
        "experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True)",
    ),
    Rule(
        "no memory events",
        Level.NOTE,
        lambda own: bool(own.gpu_rows) and not own.memory,
        "fragmentation and the fit into memory are unknown",
        "profile_memory=True, in a recording of its own",
    ),
    Rule(
        "rows that could not be used",
        Level.NOTE,
        lambda own: own.dropped + own.repaired > 0,
        "dropped rows are missing; repaired ones count",
        "nothing; PyTorch after July 2026 writes valid names",
    ),
)


def of_files(holdings: Sequence[Holding]) -> Iterator[Lack]:
    """Yield what some of the files lack, in the order of the rules."""
    for rule in RULES:
        lacking = [own for own in holdings if rule.lacks(own)]
        if lacking:
            ranks = sorted({own.rank for own in lacking if own.rank is not None})
            yield Lack(rule.what, rule.level, len(lacking), tuple(ranks[:16]), rule.cost, rule.change)
