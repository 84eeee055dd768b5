"""Recording: which steps, with which switches, and how the files come into being."""

import gzip
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import profiler

from traceaudit.capture.description import Model, Values, configured, degrees_of, describe, modules_of, stages_of

MARKS = 4  # collectives before the first and after the last recorded step
GZIP_LEVEL = 4  # nearly as small as 9, three times as fast
TOGETHER_BYTES = 1 << 20  # compressed at a time: a call for each line takes several times as long
LOGGER = logging.getLogger("traceaudit.capture")


class CaptureWarning(UserWarning):
    """Something of the recording failed; training goes on."""


@contextmanager
def harmless(what: str) -> Iterator[None]:
    """Turn any failure of ours into a warning."""
    try:
        yield
    except Exception as error:  # training must not notice
        with suppress(Exception):  # not even where warnings are errors
            warnings.warn(f"traceaudit.capture: {what} failed: {error!r}", CaptureWarning, stacklevel=4)


def capture(
    directory: str | os.PathLike[str],
    *,
    model: Model = None,
    skip: int = 10,
    timed: int = 5,
    warmup: int = 1,
    steps: int = 3,
    first_step: int = 0,
    ranks: Iterable[int] | None = None,
    with_stack: bool = False,
    profile_memory: bool = False,
    marks: bool = True,
    log: Callable[[str], None] | None = None,
    force: bool = False,
    mesh: Any = None,  # noqa: ANN401  a DeviceMesh
    parallel: Mapping[str, int] | None = None,
    **known: Any,  # noqa: ANN401  names and values of run.json
) -> "Recorder":
    """Return a context manager that records some steps of training; call its ``step()`` after each optimizer step.

    All ranks must take as many steps: they meet by the count of steps, and `describe` sums the stages of a pipeline.

    Args:
        directory: where the files go, one run a directory; on a file system that all ranks see, or collect them there.
        model: for ``run.json``: sizes, element type, layout; a pipeline's rank gives the modules of its stages.
        skip: steps that run before anything is done: compilation, autotuning and caches settle.
        timed: steps that are timed without the profiler, so that its overhead is known; the device is synchronised
            before and after them.
        warmup: steps with the profiler on that are not kept.
        steps: steps that are recorded.
        first_step: number of the first step in this loop, as the training log counts.
        ranks: record on these ranks alone; all must run the recorder nevertheless. All by default; with fewer, waits
            for ranks that were not recorded cannot be told from transfers.
        with_stack: record Python stacks too; see the costs in the module's docstring.
        profile_memory: record the allocator too; see there.
        marks: let all ranks meet in a few tiny collectives before and after the recorded steps, which tie the clocks of
            their hosts. They use the default process group, whose communicator (with NCCL some 100 MB of a GPU) comes
            into being if nothing else uses it.
        log: called with one line a step; by default the logger ``traceaudit.capture``, at level INFO, on rank 0.
        force: overwrite the files of an earlier recording.
        mesh: the job's `DeviceMesh`, where the parameters do not tell it.
        parallel: degrees of parallelism, ``{"pp": 4, "dp": 8}``.
        **known: what is known of the run, by the names of ``run.json``; above all ``tokens_per_step`` of the whole job.
    """
    return Recorder(
        Path(directory),
        model,
        plan=(skip, timed, warmup, steps),
        first_step=first_step,
        ranks=None if ranks is None else frozenset(ranks),
        switches={"with_stack": with_stack, "profile_memory": profile_memory},
        marks=marks,
        log=log,
        force=force,
        facts={"mesh": mesh, "parallel": parallel, **known},
    )


class Recorder:
    """Records some steps of training; made by `capture`.

    Attributes:
        path: the file of this rank, once it is written; None before.
        step_seconds: mean seconds of a step without the profiler, once they were timed.
    """

    def __init__(
        self,
        directory: Path,
        model: Model,
        *,
        plan: tuple[int, int, int, int],
        first_step: int,
        ranks: frozenset[int] | None,
        switches: dict[str, bool],
        marks: bool,
        log: Callable[[str], None] | None,
        force: bool,
        facts: Values,
    ) -> None:
        """Keep the plan; nothing happens before the context is entered."""
        self.path: Path | None = None
        self.step_seconds: float | None = None
        skip, timed, warmup, steps = (max(int(length), 0) for length in plan)
        self._timing = range(skip, skip + timed)
        self._warming = range(skip + timed, skip + timed + warmup)
        self._recording = range(self._warming.stop, self._warming.stop + steps)
        self._directory, self._model, self._facts = directory, model, facts
        self._first, self._ranks, self._switches, self._force = first_step, ranks, switches, force
        self._log = log
        self._meeting: torch.Tensor | None = None
        self._marks = marks
        self._profile: Any = None
        self._mark: Any = None
        self._run: Values = {}
        self._done = self._recorded = 0
        self._begun = self._timed_from = 0.0
        self._on = False

    def __enter__(self) -> Self:
        """Find out what runs; the loop's first step begins."""
        with harmless("the preparation"):
            self._prepare()
        with harmless("the first step"):
            self._boundary()
        self._begun = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write what was recorded if the loop ended early; after an error of the training, nothing."""
        if self._profile is None and not (self._on and self._done < self._recording.stop):
            return
        with harmless("the end of the recording"):
            planned, self._on = len(self._recording), False
            whole = self._recorded
            self._close_mark()
            if self._profile is not None and self._done >= self._recording.start:
                self._profile.stop_trace()
                if kind is None and whole:
                    self._write(unfinished=self._first + self._done)
            self._profile = None
            if kind is None:
                warnings.warn(
                    f"traceaudit.capture: the loop ended after {self._done} steps; {whole} of {planned} were "
                    "recorded; lower skip, timed or steps.",
                    CaptureWarning,
                    stacklevel=3,
                )

    def step(self) -> None:
        """Say that an optimizer step is done; call it on every rank."""
        with harmless(f"the line of step {self._first + self._done}"):
            self._tell()
        with harmless("the mark of a step"):
            self._close_mark()
        self._done += 1
        with harmless(f"the recording at step {self._first + self._done}"):
            self._boundary()
        self._begun = time.perf_counter()

    def _prepare(self) -> None:
        self._file = self._directory / f"rank{rank()}.pt.trace.json.gz"
        if self._marks and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._meeting = torch.zeros(1, device=_device_of_collectives())
        self._run = described(self._model, **self._facts)
        self._rate = _peak_flops(self._run)
        if self._file.exists() and not self._force:
            raise FileExistsError(f"{self._file} exists; give another directory, or force=True")
        self._on = self._ranks is None or rank() in self._ranks

    def _boundary(self) -> None:
        """Do what is due between two steps. Collectives depend on the count of steps alone: no rank may miss one."""
        at = self._done
        if at in (self._warming.start, self._recording.stop):
            self._meet()
        with harmless("the profiler"):
            self._switch(at)
        if at == self._recording.start:
            self._meet()
        if at in self._recording and self._profile is not None:
            self._mark = profiler.record_function(f"ProfilerStep#{self._first + at}")
            self._mark.__enter__()

    def _switch(self, at: int) -> None:
        """Time, warm up, start or stop the profiler, on a rank that records."""
        if not self._on:
            return
        if at in (self._timing.start, self._timing.stop) and len(self._timing):
            _synchronise()
            now = time.perf_counter()
            if at == self._timing.stop:
                self.step_seconds = (now - self._timed_from) / len(self._timing)
            self._timed_from = now
        try:
            if at == self._warming.start:
                self._profile = profiler.profiler._KinetoProfile(**_settings(**self._switches))
                self._profile.prepare_trace()
            if at == self._recording.start:
                self._profile.start_trace()
            if at == self._recording.stop:
                self._on = False
                self._profile.stop_trace()
                self._write()
                self._profile = None
        except BaseException:
            self._profile, self._on = None, False
            raise

    def _meet(self) -> None:
        """Let all ranks leave a few collectives together."""
        if self._meeting is not None:
            for _ in range(MARKS):
                dist.all_reduce(self._meeting)

    def _close_mark(self) -> None:
        if self._mark is not None:
            mark, self._mark = self._mark, None
            mark.__exit__(None, None, None)
            self._recorded += 1

    def _write(self, unfinished: int | None = None) -> None:
        self._run["step_seconds"] = self._facts.get("step_seconds") or self.step_seconds
        recorded = min(self._ranks) if self._ranks else 0
        write(self._profile, self._file, self._run if rank() == recorded else None, unfinished)
        self.path = self._file

    def _tell(self) -> None:
        """Write the line of a step."""
        if self._log is None and (rank() or not LOGGER.isEnabledFor(logging.INFO)):
            return
        seconds = time.perf_counter() - self._begun
        tokens, params = self._run.get("tokens_per_step"), self._run.get("active_params") or self._run.get("params")
        line = f"step={self._first + self._done} seconds={seconds:.4f}"
        if tokens:
            line += f" tokens_per_second={tokens / seconds:.0f}"
        if tokens and params and self._rate:
            line += f" mfu={6 * params * tokens / seconds / self._rate:.4f}"
        (self._log or LOGGER.info)(f"traceaudit {line} phase={self._phase()}")

    def _phase(self) -> str:
        spans = {"timed": self._timing, "warmup": self._warming, "recorded": self._recording}
        return next((name for name, span in spans.items() if self._done in span), "free")


def handler(
    directory: str | os.PathLike[str],
    *,
    model: Model = None,
    force: bool = False,
    mesh: Any = None,  # noqa: ANN401  a DeviceMesh
    parallel: Mapping[str, int] | None = None,
    **known: Any,  # noqa: ANN401  names and values of run.json
) -> Callable[[Any], None]:
    """Return a function for ``on_trace_ready`` of `torch.profiler.profile` that writes this rank's file.

    Call it on every rank before the profiler starts; arguments are those of `capture`. The first cycle's files lie in
    the directory itself, those of further cycles in ``cycle2``, ``cycle3``, …, each with its ``run.json``.
    """
    home = Path(directory)
    cycle = 0
    run: Values = {}
    with harmless("the description of the run"):
        run.update(described(model, mesh=mesh, parallel=parallel, **known))

    def ready(profile: Any) -> None:  # noqa: ANN401  a torch.profiler.profile
        nonlocal cycle
        cycle += 1
        with harmless("writing the trace"):
            file = (home if cycle == 1 else home / f"cycle{cycle}") / f"rank{rank()}.pt.trace.json.gz"
            if file.exists() and not force:
                raise FileExistsError(f"{file} exists; give another directory, or force=True")
            write(profile, file, run if rank() == 0 else None)

    return ready


def described(model: Model, **facts: Any) -> Values:  # noqa: ANN401
    """Return `describe`, with parameters and layers of all stages where there is a pipeline: one collective.

    All ranks must call it: whether they meet depends on the arguments alone, not on what goes wrong on one of them.
    """
    run: Values = {"world_size": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1}
    with harmless("the description of the model"):
        run = describe(model, **facts)
    mesh, stages = facts.get("mesh"), stages_of(model)
    degrees = {**degrees_of(model, mesh, run["world_size"]), **(facts.get("parallel") or {})}
    if model is None or degrees.get("pp", 1) == 1:
        return run
    named = mesh is not None and "pp" in (mesh.mesh_dim_names or ())
    group = stages[0].group if stages else mesh["pp"].get_group() if mesh is not None and named else None
    parts = ["params", "active_params", *(["layers"] if configured(modules_of(model), "layers") is None else [])]
    names = [name for name in parts if facts.get(name) is None]
    if not stages and not named and degrees["pp"] != run["world_size"]:
        warnings.warn(
            "traceaudit.capture: this rank holds a part of a pipeline; pass its stages as model=, or pass params=.",
            CaptureWarning,
            stacklevel=4,
        )
        return {**run, **dict.fromkeys(names)}
    sums = torch.tensor([run.get(name) or 0 for name in names], dtype=torch.int64, device=_device_of_collectives())
    dist.all_reduce(sums, group=group)
    return {**run, **{name: int(total) or None for name, total in zip(names, sums.tolist(), strict=True)}}


def write(profile: Any, file: Path, run: Values | None, unfinished: int | None = None) -> None:  # noqa: ANN401
    """Write the trace of a torch profile, and ``run.json`` beside it; each appears whole or not at all.

    The mark of an `unfinished` step is renamed: it is none.
    """
    mark = b'"ProfilerStep#%d"' % (-1 if unfinished is None else unfinished)
    file.parent.mkdir(parents=True, exist_ok=True)
    plain, packed = (file.with_name(f".{file.name}.{os.getpid()}.{kind}.part") for kind in ("plain", "packed"))
    try:
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=GZIP_LEVEL) as target:
            while lines := source.readlines(TOGETHER_BYTES):  # whole lines, so that no mark is cut
                target.write(b"".join(lines).replace(mark, b'"unfinished step"'))
        packed.replace(file)
        if run is not None:
            packed.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
            packed.replace(file.with_name("run.json"))
    finally:
        for part in (plain, packed):
            part.unlink(missing_ok=True)


def rank() -> int:
    """Return the rank of this process: of the job, else of its launcher, else 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    told = os.environ.get("RANK", "0")
    return int(told) if told.isdigit() else 0


def _settings(*, with_stack: bool, profile_memory: bool) -> Values:
    """Return arguments of the profiler: shapes always, and the synchronisation events of CUDA where there are any."""
    settings: Values = {"record_shapes": True, "with_stack": with_stack, "profile_memory": profile_memory}
    activities = [profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(profiler.ProfilerActivity.CUDA)
        with suppress(AttributeError, TypeError):  # before 2.4, or renamed
            settings["experimental_config"] = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    elif hasattr(torch, "xpu") and torch.xpu.is_available():
        activities.append(profiler.ProfilerActivity.XPU)
    return {**settings, "activities": activities}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif hasattr(torch, "xpu") and torch.xpu.is_available():
        torch.xpu.synchronize()


def _device_of_collectives() -> torch.device:
    """Return a device whose tensors the default process group moves."""
    on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _peak_flops(run: Values) -> float | None:
    """Return the dense peak of the job in FLOP/s, None where it is not known."""
    from traceaudit.mfu.hardware import find

    gpu = find(str(run["gpu"])) if run.get("gpu") else None
    rate = gpu.tflops.get(run.get("dtype") or "bf16") if gpu else None
    return rate * 1e12 * run["world_size"] if rate else None
