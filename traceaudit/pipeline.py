"""The order of the stages: from trace files to an `Audit`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from traceaudit.account import RankAccount, account
from traceaudit.align import align, hosts
from traceaudit.arrivals import arrivals
from traceaudit.attribute import Job, attribute, windows
from traceaudit.audit import Audit
from traceaudit.collectives import gather, layout
from traceaudit.errors import InputError, TraceAuditError
from traceaudit.matching import match
from traceaudit.model import Run, declared, numerator, peak
from traceaudit.normalise import read_trace
from traceaudit.peers import compare
from traceaudit.roofline import split_compute
from traceaudit.sources import Source, find, one_job
from traceaudit.steps import Selection
from traceaudit.waterfall import result

Progress = Callable[[int, int, Path], None]


def analyze(
    traces: str | Path | Sequence[str | Path],
    *,
    config: str | Path | None = None,
    selection: Selection | None = None,
    ranks: frozenset[int] | None = None,
    progress: Progress | None = None,
    **model: Any,  # noqa: ANN401  the names and values of run.json
) -> Audit:
    """Attribute the lost time of a training run from the traces of its ranks.

    Args:
        traces: directories, files or glob patterns; ``.json`` and ``.json.gz``.
        config: a ``run.json``; without it, one that lies beside the traces is read.
        selection: steps to analyse; all that were recorded completely by default.
        ranks: ranks to analyse; all by default.
        progress: called with (files done, files in all, file) before each file.
        model: what is known about the run, by the names of ``run.json`` (``params``, ``tokens_per_step``, ``dtype``,
            ``gpu``, ``layers``, ``hidden``, ``seq_len``, ``pp``, ...), and ``peak_tflops`` (dense) and
            ``attention_flops``; beats what files say.

    Raises:
        TraceAuditError: the traces cannot be analysed; the message says what to do.
    """
    paths = [traces] if isinstance(traces, str | Path) else list(traces)
    chosen = selection or Selection()
    files = find(paths)
    run = declared(_configurations(paths, config), model)
    accounts, skipped = _accounts(files, chosen, progress)
    accounts, warnings = one_job(accounts)
    if ranks is not None:
        accounts = [own for own in accounts if own.rank in ranks]
        if not accounts:
            raise InputError("none of the selected ranks is among the traces.")
    return _attributed(_source(paths), accounts, run, chosen, skipped, warnings)


def _attributed(
    source: str,
    accounts: list[RankAccount],
    run: Run,
    selection: Selection,
    skipped: list[dict[str, str]],
    warnings: list[str],
) -> Audit:
    """Attribute the time of one job from the accounts of its ranks."""
    present = [own for own in accounts if own.steps is not None]
    if not present:
        raise InputError(
            f"{_names(accounts)}: no GPU activity on any rank; traceaudit attributes GPU time. "
            "Profile with ProfilerActivity.CUDA on a machine with a GPU."
        )
    world_size, sized = _world_size(accounts, run)
    plan = layout(accounts, world_size, run.degrees())
    communications = gather(present, world_size, plan, hosts(present)[0])
    matching = match(communications)
    arrived, clock = arrivals(communications, matching, align(present, communications, matching))
    table, left_out, notes = windows(present)
    peers = compare(present, table)
    job = Job(present, communications, matching, arrived, clock, plan, peers)
    rate, reason = peak(run, present)
    model = numerator(run)
    marked = {own.steps.marked_by for own in present if own.steps is not None}
    if model is not None and not selection.whole_trace and marked - {"ProfilerStep", "optimizer", "marker"}:
        rate, reason = None, "the traces have no whole steps, so that the declared FLOPs of a step cannot be placed"
    split = split_compute(present, table, rate, reason, model, world_size, peers.excess)
    attribution = attribute(job, table, split)
    quality = _quality(accounts, skipped, [*warnings, *notes, *sized, *split.warnings], marked, left_out, world_size)
    found = result(
        source=source,
        accounts=accounts,
        job=job,
        attribution=attribution,
        split=split,
        peak=rate,
        numerator=model,
        world_size=world_size,
        quality=quality,
    )
    return Audit(found, attribution)


def _configurations(paths: Sequence[str | Path], config: str | Path | None) -> list[Path]:
    if config is not None:
        return [Path(config)]
    places = {path if path.is_dir() else path.parent for path in map(Path, paths)}
    return sorted(place / "run.json" for place in places if (place / "run.json").is_file())


def _accounts(
    files: Sequence[Source], selection: Selection, progress: Progress | None
) -> tuple[list[RankAccount], list[dict[str, str]]]:
    """Return the accounts of the files that are traces; one bad file never loses the others."""
    accounts: list[RankAccount] = []
    skipped: list[dict[str, str]] = []
    for done, source in enumerate(files):
        if progress is not None:
            progress(done, len(files), source.path)
        try:
            own = account(read_trace(source.path), selection)
            if not own.events:
                raise InputError("no event in the categories that torch.profiler writes")
            accounts.append(own)
        except TraceAuditError as error:
            if len(files) == 1:
                raise InputError(f"{source.path.name}: {error}") from error
            skipped.append({"file": source.path.name, "reason": str(error)})
    if not accounts:
        reasons = "\n".join(f"  {entry['file']}: {entry['reason']}" for entry in skipped[:8])
        raise InputError(f"none of the {len(files)} files can be analysed:\n{reasons}")
    return _with_clock(accounts, skipped), skipped


def _with_clock(accounts: list[RankAccount], skipped: list[dict[str, str]]) -> list[RankAccount]:
    """Leave out a rank whose file lost the base of its clock, if others have theirs."""
    based = [own for own in accounts if own.origin.absolute_clock]
    if not based:
        return accounts
    for own in accounts:
        if not own.origin.absolute_clock:
            reason = "its clock cannot be compared: baseTimeNanoseconds is lost"
            skipped.append({"file": own.origin.file.name, "reason": reason})
    return based


def _world_size(accounts: Sequence[RankAccount], run: Run) -> tuple[int, list[str]]:
    """Return the number of ranks of the job, and a warning where it is a guess."""
    known = next((own.origin.world_size for own in accounts if own.origin.world_size), None)
    stated = run.number("world_size")
    size = known or (int(stated) if stated else None)
    if size is not None and size >= len(accounts):
        missing = size - len(accounts)
        return size, [f"{len(accounts):,} of {size:,} ranks traced; the others are not known"] if missing else []
    if len(accounts) > 1:
        return len(accounts), ["the traces do not tell the world size; the traced ranks are taken for the whole job"]
    return 1, []


def _quality(
    accounts: Sequence[RankAccount],
    skipped: list[dict[str, str]],
    warnings: list[str],
    marked: set[str],
    left_out: list[tuple[int | None, int, str]],
    world_size: int,
) -> dict[str, Any]:
    """Return what was missing, dropped, repaired or guessed."""
    notes = [*warnings]
    missing = []
    present = [own for own in accounts if own.steps is not None]
    idle = [own.rank for own in accounts if own.steps is None]
    if idle:
        notes.append(f"ranks without GPU activity are not attributed: {', '.join(map(str, idle[:16]))}")
    if not all(own.origin.record_shapes for own in present):
        missing.append("record_shapes")
    if any(own.origin.world_size is None for own in present):
        missing.append("distributedInfo")
    if marked & {"whole trace", "optimizer (partial step)"}:
        missing.append("ProfilerStep")
        notes.append("no steps are marked: the whole trace is one window; call profiler.step() or pass --step-marker")
    elif marked == {"optimizer"}:
        notes.append("no ProfilerStep: a step runs from the end of one optimizer step to the end of the next")
    if any(own.origin.with_stack for own in present):
        notes.append("Python stacks were recorded, which inflates host gaps")
    if sum(own.other_devices for own in present):
        notes.append("activity on other devices than each rank's own was left out")
    if any(own.communications["group"].isna().any() for own in present if len(own.communications)) and world_size > 1:
        notes.append("communications without recorded process group are taken to span all ranks")
    torn = [own.origin.file.name for own in accounts if own.losses.torn]
    notes += [f"{name}: the file is cut short; its complete events were used" for name in torn]
    negative = sum(own.losses.negative_durations for own in accounts)
    if negative:
        notes.append(f"{negative} events with negative duration count as empty")
    return {
        "reliable": not torn,
        "dropped_events": sum(own.losses.dropped for own in accounts),
        "repaired_events": sum(own.losses.repaired for own in accounts),
        "repaired_files": [own.origin.file.name for own in accounts if own.losses.repaired],
        "missing": missing,
        "warnings": notes,
        "steps_left_out": [{"rank": rank, "step": step, "reason": reason} for rank, step, reason in left_out],
        "skipped_files": skipped,
    }


def _source(paths: Sequence[str | Path]) -> str:
    names = [Path(path).name or str(path) for path in paths]
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _names(accounts: Sequence[RankAccount]) -> str:
    return ", ".join(own.origin.file.name for own in accounts[:4]) + (", …" if len(accounts) > 4 else "")


def load(path: str | Path) -> pd.DataFrame:
    """Return the events of one rank's file; `traceaudit.events` describes the columns.

    Raises:
        TraceAuditError: the file is no trace or cannot be read.
    """
    return read_trace(Path(path)).events
