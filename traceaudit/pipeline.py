"""The order of the stages: from trace files to an `Audit`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from traceaudit.account import RankAccount, without_gpu
from traceaudit.attribute import Attribution, Job, attribute, windows
from traceaudit.audit import Audit
from traceaudit.budget import from_figures
from traceaudit.errors import InputError, MissingFigureError
from traceaudit.findings import conclusions, witness
from traceaudit.host_device import WARNING as ON_HOST
from traceaudit.idle.summary import facts, gap_table, profiler_overhead
from traceaudit.inventory import inventory, plan_of, seen_in
from traceaudit.memory import give_back
from traceaudit.mfu.model import Run, declared, numerator, peak
from traceaudit.mfu.roofline import Split, split_compute
from traceaudit.norms.read import read
from traceaudit.norms.training_log import TrainingLog
from traceaudit.norms.watch import watch
from traceaudit.ranks.align import align, hosts
from traceaudit.ranks.arrivals import arrivals
from traceaudit.ranks.collectives import FOR_MATCHING, gather, layout
from traceaudit.ranks.matching import match
from traceaudit.ranks.owned import Owned, without_owned
from traceaudit.ranks.peers import compare
from traceaudit.ranks.setting import degrees, versions
from traceaudit.reading.archives import kept_open
from traceaudit.reading.beside import models
from traceaudit.reading.beside import training_log as log_beside
from traceaudit.reading.cache import chosen as chosen_cache
from traceaudit.reading.normalise import read_trace
from traceaudit.reading.parallel import Progress, Reading, Task, reduced, running
from traceaudit.reading.sources import configurations, find, one_job
from traceaudit.reading.streams import Place
from traceaudit.slices import Slicer
from traceaudit.steps import Selection
from traceaudit.strips import strips
from traceaudit.unprofiled import against_log
from traceaudit.waterfall import result


@kept_open()
def analyze(
    traces: str | Path | Sequence[str | Path],
    *,
    config: str | Path | None = None,
    selection: Selection | None = None,
    ranks: frozenset[int] | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    executor: Executor | None = None,
    cache: str | Path | bool | None = None,
    keep_pieces: bool = False,
    progress: Progress | None = None,
    budget: Mapping[str, Any] | None = None,
    training_log: str | Path | None = None,
    **model: Any,  # noqa: ANN401  the names and values of run.json
) -> Audit:
    """Attribute the lost time of a training run from the traces of its ranks.

    Args:
        traces: directories, files, glob patterns or URLs that fsspec knows; ``.json``, ``.json.gz``, ``.json.zst``, and
            ``.zip`` or ``.tar`` archives of them.
        config: a ``run.json``; without it, one that lies beside the traces is read.
        selection: steps to analyse; all that were recorded completely by default.
        ranks: ranks to analyse; all by default.
        jobs: processes that read; as many as cores and free memory allow by default, and none for small jobs.
        scheduler: address of a Dask cluster whose workers read the traces instead; they must reach them.
        executor: any other executor whose workers read the traces instead.
        cache: keep what was read: True, False or a folder; by default `TRACEAUDIT_CACHE` from the environment, else
            beside traces that take long to read.
        keep_pieces: keep where in time everything was, for `traceaudit.overlay` and `Audit.timeline`, which else reads
            the rank's trace again.
        progress: called with (bytes done, bytes in all, name of a file) as files are done.
        budget: figures for the failure budget (`traceaudit.budget.from_figures`), such as ``mtbf`` and ``restart`` in
            seconds; MFU, GPUs and the checkpoint pause come from the traces.
        training_log: log of the run (`traceaudit.norms.read`), for what the traces cannot tell: spikes, norms.
        model: what is known about the run, by the names of ``run.json`` (``params``, ``tokens_per_step``, ``dtype``,
            ``gpu``, ``layers``, ``hidden``, ``seq_len``, ``pp``, ...), and ``peak_tflops`` (dense) and
            ``attention_flops``; beats what files say.

    Raises:
        TraceAuditError: the traces cannot be analysed; the message says what to do.
    """
    paths = [traces] if isinstance(traces, str | Path) else list(traces)
    chosen = selection or Selection()
    log = read(training_log) if training_log is not None else None
    norms = watch(log) if log is not None else None
    files = find(paths)
    with configurations([] if config is not None else paths) as found:
        run = declared([Path(config)] if config is not None else [*models(paths), *found], model)
    log, unread = (log, []) if log is not None else log_beside(paths)
    kept = chosen_cache(cache, sum(source.size for source in files))
    tasks = [Task(source.place, source.size, chosen, kept, keep_pieces) for source in files]
    with running(tasks, jobs=jobs, scheduler=scheduler, executor=executor) as workers:
        accounts, skipped, reading = _accounts(tasks, workers, progress)
    accounts, warnings = one_job(accounts)
    warnings += unread
    if ranks is not None:
        accounts = [own for own in accounts if own.rank in ranks]
        if not accounts:
            raise InputError("none of the selected ranks is among the traces.")
    beside = Beside(budget, norms, log, {task.place.path: replace(task, keep_pieces=True) for task in tasks})
    audit = _attributed(_source(paths), accounts, run, chosen, skipped, warnings, reading, beside)
    places = {source.place.path: source.place for source in files}
    return replace(audit, places={own.rank: places[own.origin.file] for own in accounts})


@dataclass(frozen=True)
class Beside:
    """What is known of the run beside its accounts.

    Attributes:
        budget: figures for the failure budget.
        norms: what its log says of the training, where one was given.
        log: the same log, or one that lies beside the traces.
        tasks: by path, to read a trace again with its pieces.
    """

    budget: Mapping[str, Any] | None = None
    norms: Mapping[str, Any] | None = None
    log: TrainingLog | None = None
    tasks: Mapping[Path, Task] = field(default_factory=dict)


def _add_budget(result: dict[str, Any], figures: Mapping[str, Any]) -> None:
    """Add the failure budget; figures that do not suffice cost a warning, not the report."""
    try:
        result["budget"] = from_figures(figures, result)
    except InputError as error:
        wanted = f"it needs {error}" if isinstance(error, MissingFigureError) else str(error)
        result["quality"]["warnings"].append(f"the failure budget is left out: {wanted}")


def _attributed(
    source: str,
    accounts: list[RankAccount],
    run: Run,
    selection: Selection,
    skipped: list[dict[str, str]],
    warnings: list[str],
    reading: Reading | None = None,
    beside: Beside | None = None,
) -> Audit:
    """Attribute the time of one job from the accounts of its ranks."""
    accounts, on_host = _devices(accounts)
    present = [own for own in accounts if own.steps is not None]
    if not present:
        raise InputError(
            f"{_names(accounts)}: no GPU activity on any rank; traceaudit attributes GPU time. "
            "Profile with ProfilerActivity.CUDA on a machine with a GPU; a run on CPUs needs marked steps "
            "(profiler.step() or --step-marker), or --whole-trace."
        )
    world_size, sized = _world_size(accounts, run)
    plan = layout(accounts, world_size, run.degrees())
    communications = gather(present, world_size, plan, hosts(present)[0])
    owned = Owned.of(present)
    accounts[:] = without_owned(accounts)  # in place: whoever holds the list would keep them twice
    present = [own for own in accounts if own.steps is not None]
    give_back()
    matching = match(communications)
    arrived, clock = arrivals(communications, matching, align(present, communications, matching))
    communications = communications.drop(columns=[*FOR_MATCHING], errors="ignore")
    give_back()
    table, left_out, notes = windows(present)
    peers = compare(present, table, plan.stage)
    job = Job(present, communications, matching, arrived, clock, plan, peers, owned)
    model = numerator(run, world_size)
    rate, reason = peak(run, present, asked=model is not None and not on_host)
    reason = "there is no table of peaks for CPUs; pass --peak-tflops X" if on_host and rate is None else reason
    marked = {own.steps.marked_by for own in present if own.steps is not None}
    if model is not None and not selection.whole_trace and marked - {"ProfilerStep", "optimizer", "marker"}:
        rate, reason = None, "the traces have no whole steps, so that the declared FLOPs of a step cannot be placed"
    split = split_compute(present, table, rate, reason, model, world_size, peers.excess)
    attribution = attribute(job, table, split)
    warnings = [*([ON_HOST] if on_host else []), *warnings, *notes, *sized, *split.warnings]
    assumed = world_size > 1 and len(communications) > 0 and bool(communications["assumed"].any())
    quality = _quality(accounts, skipped, warnings, marked, left_out, assumed=assumed)
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
    found["job"]["layout"] = degrees(present, run.degrees())
    found["job"]["versions"] = versions(present, run)
    found["job"]["device_rows"] = "cpu_operators" if on_host else "gpu"
    step_ns = found["job"]["step_ns_median"]
    found["host_facts"] = facts(present, run.number("tokens_per_step"))
    beside = beside or Beside()
    found["log"] = against_log(beside.log, run, found) if beside.log is not None else None
    found["quality"]["profiler_overhead"] = profiler_overhead(present, step_ns, *_step_without(run, found["log"]))
    gaps = gap_table(present)
    _add_beside(found, beside, run, present)
    found.update(conclusions(found, witness(job, attribution, gaps)))
    culprits = [int(row["rank"]) for row in found["stragglers"]]
    found["timeline"] = strips(job, attribution, split.by_family, culprits)
    return Audit(found, attribution, gaps, reading, slicer=_slicer(job, attribution, split, beside.tasks))


def _add_beside(found: dict[str, Any], beside: Beside, run: Run, accounts: Sequence[RankAccount]) -> None:
    """Add failure budget, training log, memory of the GPUs and byte inventory, as far as they are known."""
    if beside.budget is not None:
        _add_budget(found, beside.budget)
    if beside.norms is not None:
        found["norms"] = dict(beside.norms)
    sizes = [own.origin.device.memory_bytes for own in accounts if own.origin.device is not None]
    gpu_bytes = min((size for size in sizes if size > 0), default=None)
    found["memory"] = {"gpu_bytes": gpu_bytes}
    found["inventory"] = _inventory(found, run, accounts, gpu_bytes)


def _inventory(
    found: Mapping[str, Any], run: Run, accounts: Sequence[RankAccount], gpu_bytes: int | None
) -> dict[str, Any] | None:
    """Return the byte inventory of the declared model with the recompute that was seen; None where sizes lack."""
    seen = {"recompute": found["recompute"]["setting"] or "none", "zero": 3 if all(o.sharded for o in accounts) else 0}
    declaration = {**run.values, **run.degrees(), **seen}  # noqa: PD011  no pandas
    try:
        plan = plan_of(declaration)
        return None if plan is None else inventory(plan, gpu_bytes, seen_in(found))
    except (InputError, TypeError, ValueError):  # a size is missing or no number; MFU has its own complaint
        return None


def _devices(accounts: list[RankAccount]) -> tuple[list[RankAccount], bool]:
    """Return the accounts, and whether operators of the CPU stand for the devices: only where no rank has GPU rows.

    The list is changed in place: whoever holds it would keep what is given up later.
    """
    with_gpu = any(own.steps is not None and not own.on_host for own in accounts)
    if not with_gpu:
        return accounts, any(own.on_host for own in accounts)
    accounts[:] = [
        without_gpu(own.origin, own.losses, own.events, own.first_ns, own.last_ns) if own.on_host else own
        for own in accounts
    ]
    return accounts, False


def _slicer(job: Job, attribution: Attribution, split: Split, tasks: Mapping[Path, Task]) -> Slicer:
    """Return what tells where in time the leaves are; the job stays in memory only with its pieces."""
    kept = {own.rank: own for own in job.accounts if len(own.pieces)}
    again = {own.rank: tasks[own.origin.file] for own in job.accounts if own.origin.file in tasks}
    return Slicer(attribution, split.by_family, again, kept, job if kept else None)


def _step_without(run: Run, log: Mapping[str, Any] | None) -> tuple[float | None, str]:
    """Return the seconds of a step without the profiler as declared, else by the log, and where they come from."""
    seconds = run.number("step_seconds")
    if seconds is not None:
        return seconds, f"step_seconds, {run.sources['step_seconds']}"
    tokens, rate = run.number("tokens_per_step"), run.number("tokens_per_second")
    if tokens is not None and rate is not None:
        return tokens / rate, f"tokens_per_step ÷ tokens_per_second, {run.sources['tokens_per_second']}"
    if log is not None and log["step_seconds"]:
        return log["step_seconds"], f"median of {log['rows']:,} rows, {Path(log['file']).name}"
    return None, ""


def _accounts(
    tasks: Sequence[Task], workers: Executor | None, progress: Progress | None
) -> tuple[list[RankAccount], list[dict[str, str]], Reading]:
    """Return the accounts of the files that are traces; one bad file never loses the others."""
    outcomes = reduced(tasks, workers, progress)
    accounts = [outcome.account for outcome in outcomes if outcome.account is not None]
    skipped = [
        {"file": task.place.name, "reason": outcome.reason}
        for task, outcome in zip(tasks, outcomes, strict=True)
        if outcome.account is None
    ]
    if not accounts and len(tasks) == 1:
        raise InputError(f"{skipped[0]['file']}: {skipped[0]['reason']}")
    if not accounts:
        reasons = "\n".join(f"  {entry['file']}: {entry['reason']}" for entry in skipped[:8])
        raise InputError(f"none of the {len(tasks)} files can be analysed:\n{reasons}")
    return _with_clock(accounts, skipped), skipped, Reading.of(outcomes)


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
    *,
    assumed: bool,
) -> dict[str, Any]:
    """Return what was missing, dropped, repaired or guessed; `assumed` are the members of some communications."""
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
    if assumed:
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
    return read_trace(Place(str(path))).events
