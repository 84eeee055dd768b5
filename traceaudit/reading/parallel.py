"""Reduces traces to accounts side by side: in this process, in processes of this machine, or on a cluster.

The same function runs everywhere, through the interface of `concurrent.futures`. Results come back in the order of the
files, whoever was done first; a file that cannot be read, or that ends its process, is a reason and not the end.
"""

import multiprocessing
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from traceaudit.account import RankAccount
from traceaudit.errors import InputError, TraceAuditError
from traceaudit.ranks.shared import Shared
from traceaudit.reading.archives import keep_open
from traceaudit.reading.cache import Cache, Kept, account_bytes, accounted
from traceaudit.reading.streams import Place
from traceaudit.steps import Selection

Progress = Callable[[int, int, str], None]

ALONE_BYTES = 24 << 20  # of all traces together, below which starting processes takes longer than it saves
FILE_BYTES = 3 << 18  # that take about as long to read as what each file costs beside its size
KEPT_BYTES = 24 << 20  # of the same in the cache
PROCESS_BYTES, MEMORY_FACTOR = 250 << 20, 8  # memory of a reading process: this, and so many times its stored file
INTERRUPTED_S = 5  # that processes have to end in when interrupted
CONNECT_S = 20  # that a cluster has to answer in
RETRIES = 3  # of a file whose worker failed or was lost


READ = Kept("trace", 0)


@dataclass(frozen=True)
class Task:
    """A trace to reduce.

    Attributes:
        place: where it lies.
        size: bytes as stored.
        selection: which of its steps.
        cache: where what was read is kept; None for nowhere.
        keep_pieces: the account says where in time everything was.
    """

    place: Place
    size: int
    selection: Selection
    cache: Cache | None
    keep_pieces: bool = False


@dataclass(frozen=True)
class Outcome:
    """The account of a trace, or the reason why there is none."""

    account: RankAccount | None
    reason: str = ""
    kept: Kept = READ


@dataclass(frozen=True)
class Reading:
    """How the traces of an analysis were read.

    Attributes:
        files: in all.
        accounts_kept, events_kept: of them, whose account, or whose events, were in the cache.
        cache_bytes: of the cache files that were read or written.
    """

    files: int
    accounts_kept: int
    events_kept: int
    cache_bytes: int

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> "Reading":
        """Sum up."""
        sources = [outcome.kept.source for outcome in outcomes]
        return Reading(
            files=len(outcomes),
            accounts_kept=sources.count("account"),
            events_kept=sources.count("events"),
            cache_bytes=sum(outcome.kept.bytes for outcome in outcomes),
        )


def reduce_one(task: Task) -> Outcome:
    """Return the account of one trace; runs wherever there is a worker."""
    try:
        own, kept = accounted(task.place, task.selection, task.cache, keep_pieces=task.keep_pieces)
    except TraceAuditError as error:
        return Outcome(None, str(error))
    except MemoryError:
        return Outcome(None, "there is not enough memory to read it")
    if not own.events:
        return Outcome(None, "no event in the categories that torch.profiler writes")
    return Outcome(own, kept=kept)


def reduced(tasks: Sequence[Task], workers: Executor | None, progress: Progress | None = None) -> list[Outcome]:
    """Return the outcomes of tasks in their order; `workers` of None is this process."""
    total = sum(task.size for task in tasks)
    shared = Shared()
    if workers is None:
        outcomes, done = [], 0
        for task in tasks:
            if progress is not None:
                progress(done, total, task.place.name)
            outcomes.append(_sharing(reduce_one(task), shared))
            done += task.size
        return outcomes
    return _collected(tasks, workers, progress, total, shared)


def _sharing(outcome: Outcome, shared: Shared) -> Outcome:
    return outcome if outcome.account is None else replace(outcome, account=shared.of(outcome.account))


def _collected(
    tasks: Sequence[Task], workers: Executor, progress: Progress | None, total: int, shared: Shared
) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    waiting = _in_turn(tasks)
    for attempt in range(1 + RETRIES):
        failed: dict[int, Exception] = {}
        for index, outcome in _results(tasks, waiting, workers):
            if isinstance(outcome, Outcome):
                found[index] = _sharing(outcome, shared)
                if progress is not None:
                    progress(sum(tasks[done].size for done in found), total, tasks[index].place.name)
            else:
                failed[index] = outcome
        waiting = sorted(failed)
        if not waiting or any(isinstance(error, BrokenExecutor) for error in failed.values()):
            break
        if attempt == RETRIES:
            return _filled(tasks, found, failed)
    found.update((index, _sharing(_alone(tasks[index]), shared)) for index in waiting)
    return [found[index] for index in range(len(tasks))]


def _in_turn(tasks: Sequence[Task]) -> list[int]:
    """Return the order to read in: the largest first, but in their order those that an archive is inflated up to."""
    largest: dict[str, int] = defaultdict(int)
    for task in tasks:
        if task.place.inflated_up_to:
            largest[task.place.address] = max(largest[task.place.address], task.size)
    return sorted(range(len(tasks)), key=lambda index: -largest.get(tasks[index].place.address, tasks[index].size))


def _results(
    tasks: Sequence[Task], chosen: Sequence[int], workers: Executor
) -> Iterator[tuple[int, Outcome | Exception]]:
    """Yield what becomes of tasks as they are done: an outcome, or what the worker failed with."""
    futures: dict[Future[Outcome], int] = {}
    try:
        with _without_main():
            for index in chosen:
                try:
                    futures[workers.submit(reduce_one, tasks[index])] = index
                except BrokenExecutor as error:
                    yield index, error
        for future in as_completed(futures):
            index = futures.pop(future)  # which else would hold what it returned to the end
            try:
                yield index, future.result()
            except Exception as error:  # whatever a worker fails with, or a cluster that lost it
                yield index, error
    finally:
        for future in futures:
            future.cancel()


def _filled(tasks: Sequence[Task], found: dict[int, Outcome], failed: dict[int, Exception]) -> list[Outcome]:
    """Return the outcomes in order, with the reasons of those that failed to the last."""
    reasons = {
        index: Outcome(None, f"the worker that read it failed: {type(error).__name__}: {error}")
        for index, error in failed.items()
    }
    return [found.get(index) or reasons[index] for index in range(len(tasks))]


def _alone(task: Task) -> Outcome:
    """Reduce a trace in a process of its own, which may be the one that ends it."""
    with _processes(1) as workers, suppress(BrokenExecutor):
        with _without_main():
            future = workers.submit(reduce_one, task)
        return future.result()
    return Outcome(None, "the process that read it ended; there may not be enough memory")


@contextmanager
def running(
    tasks: Sequence[Task], *, jobs: int | None = None, scheduler: str | None = None, executor: Executor | None = None
) -> Iterator[Executor | None]:
    """Give the executor for some tasks, None for this process; one that was started here ends here.

    Raises:
        InputError: the cluster cannot be reached.
    """
    if executor is not None:
        yield executor
    elif scheduler is not None:
        with _cluster(scheduler) as workers:
            yield workers
    else:
        count = _count(tasks, jobs)
        if count < 2:
            yield None
            return
        with _processes(count) as workers:
            yield workers


def _count(tasks: Sequence[Task], jobs: int | None) -> int:
    """Return how many processes to read with; 1 for this process alone."""
    if jobs is not None:
        return min(jobs, len(tasks))
    if sum(task.size + FILE_BYTES for task in tasks) < ALONE_BYTES or _all_kept(tasks):
        return 1
    each = PROCESS_BYTES + MEMORY_FACTOR * max(task.size for task in tasks)
    memory = free_memory()
    return max(min(cores(), len(tasks), memory // each if memory is not None else len(tasks)), 1)


def _all_kept(tasks: Sequence[Task]) -> bool:
    """Tell whether the accounts are in the cache, and so few that unpacking them is quicker than starting processes."""
    left = KEPT_BYTES
    for task in tasks:
        own = None if task.cache is None or task.keep_pieces else account_bytes(task.place, task.selection, task.cache)
        left -= KEPT_BYTES if own is None else own
        if left <= 0:
            return False
    return True


def cores() -> int:
    """Return the cores that this process may use: of its affinity, and of its group's quota."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _numbers("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[1] > 0:
        allowed = min(allowed, max(-(-quota[0] // quota[1]), 1))
    return allowed


def free_memory() -> int | None:
    """Return the bytes that are free for this process; None where the system does not tell."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")))
    limit, used = _numbers("/sys/fs/cgroup/memory.max"), _numbers("/sys/fs/cgroup/memory.current")
    if limit and used:
        found.append(max(limit[0] - used[0], 0))
    return min(found, default=None)


def _numbers(path: str) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(word) for word in Path(path).read_text().split()]
    return []


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    """Start processes; if interrupted, end them before going on."""
    before = set(multiprocessing.active_children())
    workers = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        yield workers
    except BaseException:
        workers.shutdown(wait=False, cancel_futures=True)
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.terminate()
        for child in children:
            child.join(INTERRUPTED_S)
            child.kill()
        raise
    workers.shutdown()


def _begin() -> None:
    """Leave Ctrl-C to the process that started this one, and tidy up when that says so."""
    keep_open()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep new processes from running the user's script again: none of it is needed there.

    Without this, a script that calls `analyze` outside of ``if __name__ == "__main__"`` would start itself.
    """
    main = sys.modules.get("__main__")
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        if main is not None:
            sys.modules["__main__"] = main


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError as error:
        raise InputError("--scheduler needs Dask: pip install 'traceaudit[scale]'") from error
    try:
        client = Client(address, timeout=CONNECT_S)
    except Exception as error:  # timeouts, names, versions: whatever the library raises
        raise InputError(f"no Dask scheduler at {address}: {error}") from error
    try:
        yield client.get_executor(pure=False, retries=RETRIES)
    finally:
        client.close()
