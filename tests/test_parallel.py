"""Reading side by side, here or on a cluster, gives the bytes that reading one after the other gives."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from traceaudit.errors import InputError
from traceaudit.pipeline import analyze
from traceaudit.reading import parallel
from traceaudit.reading.cache import Cache
from traceaudit.reading.parallel import Outcome, Task, cores, free_memory, reduce_one, reduced, running
from traceaudit.reading.streams import Place
from traceaudit.report.json_file import to_json
from traceaudit.steps import Selection

Directory = Callable[[str], Path]
ROOT = Path(__file__).parents[1]


def tasks_of(directory: Path, cache: Cache | None = None, pattern: str = "rank*") -> list[Task]:
    """Return a task for each rank's file."""
    return [Task(Place(str(path)), path.stat().st_size, Selection(), cache) for path in sorted(directory.glob(pattern))]


@pytest.fixture
def run(simulated: Directory, tmp_path: Path) -> Path:
    """Return a copy of a run's traces, one of them unreadable and one cut short."""
    run = shutil.copytree(simulated("late_rank"), tmp_path / "run")
    first, second, *_ = sorted(run.glob("rank*"))
    first.write_bytes(b"no trace")
    second.write_bytes(second.read_bytes()[:-2000])
    return run


class Backwards(Executor):
    """Runs what it was given in the reverse order, when the first result is asked for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:  # noqa: ANN401
        """Put a call in the queue, and begin when all files of the run are in it."""
        future: Future[Any] = Future()
        self.waiting.append((future, fn, args))
        if len(self.waiting) == 4:
            for own, call, given in reversed(self.waiting):
                own.set_result(call(*given))
        return future


def test_the_order_of_completion_does_not_matter(run: Path) -> None:
    """One after the other, on threads, and backwards: the same bytes."""
    one = to_json(analyze(run, jobs=1).result)
    with ThreadPoolExecutor(3) as threads:
        assert to_json(analyze(run, executor=threads).result) == one
    assert to_json(analyze(run, executor=Backwards()).result) == one


def test_processes_give_the_same_bytes(run: Path) -> None:
    """Processes of this machine read what this one reads; a bad file is a row of quality there too."""
    one, two = analyze(run, jobs=1), analyze(run, jobs=2)
    assert to_json(two.result) == to_json(one.result)
    assert [entry["file"] for entry in two.result["quality"]["skipped_files"]] == ["rank0_trace.json.gz"]


def test_progress_counts_bytes(run: Path) -> None:
    """Progress ends at the bytes of all files."""
    calls: list[tuple[int, int, str]] = []
    with ThreadPoolExecutor(2) as threads:
        analyze(run, executor=threads, progress=lambda *call: calls.append(call))
    total = sum(path.stat().st_size for path in run.glob("rank*"))
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert calls[-1][:2] == (total, total)


def killed(task: Task) -> Outcome:
    """End the process that reads one of the files, as a system out of memory does."""
    if "rank1" in task.place.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return reduce_one(task)


def test_a_file_that_kills_its_process_loses_only_its_rank(
    simulated: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four files, one ends the process that reads it; the other three are read."""
    monkeypatch.setattr(parallel, "reduce_one", killed)
    tasks = tasks_of(simulated("late_rank"))
    with running(tasks, jobs=2) as workers:
        outcomes = reduced(tasks, workers)
    assert [outcome.account is not None for outcome in outcomes] == [True, False, True, True]
    assert "memory" in outcomes[1].reason


def test_a_script_without_a_guard_does_not_start_itself(simulated: Directory, tmp_path: Path) -> None:
    """New processes do not run the script that asked for them."""
    script = tmp_path / "script.py"
    script.write_text(
        f"print('begun', flush=True)\nimport traceaudit as ta\n"
        f"audit = ta.analyze({str(simulated('late_rank'))!r}, jobs=2)\n"
        "print(audit.result['job']['ranks_traced'])\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRACEAUDIT_CACHE": "off"},
    )
    assert done.stdout.split() == ["begun", "4"]


def children(pid: int) -> list[int]:
    """Return the processes that one started, directly or not."""
    found = []
    for state in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(state.read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found += [int(state.parent.name), *children(int(state.parent.name))]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_interrupting_ends_all_processes_and_leaves_no_unfinished_file(simulated: Directory, tmp_path: Path) -> None:
    """Ctrl-C in the middle of reading: no process and no half-written file remains, and the rest can be used."""
    many = tmp_path / "run"
    many.mkdir()
    source = sorted(simulated("run_28_mfu").glob("rank*"))[0]
    for rank in range(60):
        shutil.copy(source, many / f"rank{rank}_trace.json.gz")
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "traceaudit", "analyze", str(many), "--jobs", "2", "--cache", str(kept), "--quiet"]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(kept.glob("*.account.parquet"))) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    started = children(process.pid)
    assert len(started) >= 2
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
    files = [path.name for path in kept.iterdir()]
    assert files
    assert all(name.endswith(".parquet") for name in files)


def test_processes_fit_cores_and_memory(simulated: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as cores, fewer if memory is short, none for few small files, never more than files or asked for."""
    task = tasks_of(simulated("compute_only"))[0]
    large = [Task(task.place, 100 << 20, task.selection, None)] * 10
    monkeypatch.setattr(parallel, "cores", lambda: 8)
    monkeypatch.setattr(parallel, "free_memory", lambda: 64 << 30)
    assert parallel._count(large, None) == 8
    assert parallel._count(large[:3], None) == 3
    assert parallel._count(large, 2) == 2
    assert parallel._count([task] * 10, None) == 1
    assert parallel._count([task] * 100, None) == 8
    monkeypatch.setattr(parallel, "free_memory", lambda: 3 << 30)
    assert parallel._count(large, None) == 2
    monkeypatch.setattr(parallel, "free_memory", lambda: 0)
    assert parallel._count(large, None) == 1


def test_accounts_that_are_all_in_the_cache_are_read_in_this_process(
    simulated: Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting processes takes longer than unpacking a few accounts; a trace that must be read again is read beside."""
    run = shutil.copytree(simulated("late_rank"), tmp_path / "run")
    large = [replace(task, size=100 << 20) for task in tasks_of(run, Cache(tmp_path / "kept"))]
    monkeypatch.setattr(parallel, "cores", lambda: 8)
    monkeypatch.setattr(parallel, "free_memory", lambda: 64 << 30)
    assert parallel._count(large, None) == len(large) > 1
    for task in large:
        reduce_one(task)
    sizes = [reduce_one(task).kept.bytes for task in large]
    assert parallel._count(large, None) == 1
    assert parallel._count([replace(task, keep_pieces=True) for task in large], None) == len(large)
    assert parallel._count([replace(task, selection=Selection(whole_trace=True)) for task in large], None) == len(large)
    with monkeypatch.context() as few:
        few.setattr(parallel, "KEPT_BYTES", sum(sizes) + 1)
        assert parallel._count(large, None) == 1
        few.setattr(parallel, "KEPT_BYTES", sum(sizes))
        assert parallel._count(large, None) == len(large)
    os.utime(large[-1].place.path, ns=(1, 1))
    assert parallel._count(large, None) == len(large)


def test_cores_and_memory_are_known() -> None:
    """This machine tells both."""
    assert cores() >= 1
    memory = free_memory()
    assert sys.platform != "linux" or (memory is not None and memory > 0)


# A cluster

WORKER = """
import sys
from distributed.cli.dask_worker import main
main([sys.argv[1], "--nthreads", "1", "--no-dashboard", "--no-nanny", "--local-directory", sys.argv[2]])
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Start a Dask scheduler and three workers, processes of their own on loopback; give address and workers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    address_file = tmp_path / "scheduler.json"
    scheduler = subprocess.Popen(
        [
            *(sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"),
            *("--no-dashboard", "--scheduler-file", str(address_file)),
        ],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    import json

    deadline = time.monotonic() + 30
    address = ""
    while not address and time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            address = json.loads(address_file.read_text())["address"]
        time.sleep(0.05)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(tmp_path / f"worker{number}")],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for number in range(3)
    ]
    yield address, workers
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


Cluster = tuple[str, list[subprocess.Popen[bytes]]]
of_dask = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning")


@of_dask
def test_a_cluster_gives_the_same_bytes_also_when_workers_die(cluster: Cluster, run: Path, tmp_path: Path) -> None:
    """Three workers read the traces; one of them is killed while files are read, another in an analysis."""
    address, workers = cluster
    one = to_json(analyze(run, jobs=1).result)
    assert to_json(analyze(run, scheduler=address).result) == one
    copies = 4
    many = tmp_path / "many"
    many.mkdir()
    for number in range(copies):
        for path in sorted(run.glob("rank*")):
            shutil.copy(path, many / f"copy{number}-{path.name}")
    tasks = tasks_of(many, pattern="copy*")
    here = reduced(tasks_of(run), None) * copies
    done: list[str] = []

    def kill_one(_: int, __: int, name: str) -> None:
        done.append(name)
        if len(done) == 3:
            workers[0].kill()

    with running(tasks, scheduler=address) as cluster_workers:
        there = reduced(tasks, cluster_workers, kill_one)
    assert workers[0].poll() is not None
    assert len(done) == len(tasks)
    assert [outcome.reason for outcome in there] == [outcome.reason for outcome in here]
    assert [outcome.account is None for outcome in there] == [outcome.account is None for outcome in here]
    killing = threading.Event()

    def kill_another(*_: object) -> None:
        if not killing.is_set():
            killing.set()
            workers[1].kill()

    assert to_json(analyze(run, scheduler=address, progress=kill_another).result) == one
    assert killing.is_set()


@of_dask
def test_no_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens is named."""
    monkeypatch.setattr(parallel, "CONNECT_S", 2)
    with pytest.raises(InputError, match="no Dask scheduler at"), running([], scheduler="tcp://127.0.0.1:9"):
        pass
