"""What the tests share: simulated runs, and the real traces beside the project."""

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from traceaudit.audit import Audit
from traceaudit.pipeline import analyze
from traceaudit.simulate import simulate

REAL_TRACES = Path(__file__).parents[2] / "shared" / "traces"


@pytest.fixture(scope="session", autouse=True)
def _no_cache() -> None:
    """Write nothing beside traces unless a test asks for it."""
    os.environ["TRACEAUDIT_CACHE"] = "off"


def common(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder of that name which all test processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Let one test process at a time make a path; gives whether it must still be made."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not path.exists()


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a scenario's name to the directory of its traces, written once for all test processes."""
    shared = common(tmp_path_factory, "simulated")

    def directory(scenario: str) -> Path:
        run = shared / scenario
        with alone(run) as missing:
            if missing:
                simulate(shared / f"{scenario}.new", scenario, force=True).rename(run)
        return run

    return directory


class Audited(Protocol):
    """The analysis of something that was analysed before in this run of the tests, or now; each caller's own copy."""

    def __call__(self, name: str, *, keep_pieces: bool = False) -> Audit:
        """Return the analysis by the name of what is analysed."""


def once(shared: Path, directory: Callable[[str], Path], cache: Path | None = None) -> Audited:
    """Return a function that analyses a directory with no other arguments, once for all test processes."""

    def audit(name: str, *, keep_pieces: bool = False) -> Audit:
        kept = shared / f"{name.replace('/', ' ')}{' with pieces' if keep_pieces else ''}"
        with alone(kept) as missing:
            if missing:
                new = kept.with_name(f"{kept.name}.new")
                new.write_bytes(pickle.dumps(analyze(directory(name), cache=cache, keep_pieces=keep_pieces)))
                new.rename(kept)
        found: Audit = pickle.loads(kept.read_bytes())  # noqa: S301  written above
        return found

    return audit


@pytest.fixture(scope="session")
def audited(simulated: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Return a function from a scenario's name to its analysis, made once for all test processes."""
    return once(common(tmp_path_factory, "audited"), simulated)


@pytest.fixture(scope="session")
def audited_real(real_traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Audited:
    """Return a function from a set of real traces, or a file of one, to its analysis, made once likewise.

    Each file is read once, too: an analysis of its set takes what was kept of an analysis of it alone, or the reverse.
    """
    shared = common(tmp_path_factory, "audited_real")
    return once(shared, real_traces.__truediv__, shared / "cache")


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Return the folder of real traces; skip where it is absent, fail in CI."""
    if not REAL_TRACES.is_dir():
        reason = "the folder of real traces (shared/traces beside the project) is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return REAL_TRACES
