"""What the files lack together: one recording, all ranks from the same moment on, and the model that ran."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from traceaudit.account import RankAccount
from traceaudit.errors import InputError, TraceAuditError
from traceaudit.inspection.holding import Holding
from traceaudit.inspection.lacks import Lack, Level
from traceaudit.mfu.model import declared
from traceaudit.reading.sources import configurations, one_job

APART = 0.01  # of a step by which recordings may begin apart


def of_job(holdings: Sequence[Holding], accounts: list[RankAccount], paths: Sequence[str | Path]) -> Iterator[Lack]:
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
