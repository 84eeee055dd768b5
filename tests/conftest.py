"""What the tests share: simulated runs, and the real traces beside the project."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from traceaudit.simulate import simulate

REAL_TRACES = Path(__file__).parents[2] / "shared" / "traces"


@pytest.fixture(scope="session", autouse=True)
def _no_cache() -> None:
    """Write nothing beside traces unless a test asks for it."""
    os.environ["TRACEAUDIT_CACHE"] = "off"


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a scenario's name to the directory of its traces, written once for all test processes."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "simulated"
    shared.mkdir(exist_ok=True)

    def directory(scenario: str) -> Path:
        run = shared / scenario
        with (shared / f"{scenario}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not run.is_dir():
                simulate(shared / f"{scenario}.new", scenario, force=True).rename(run)
        return run

    return directory


@pytest.fixture(scope="session")
def real_traces() -> Path:
    """Return the folder of real traces; skip where it is absent, fail in CI."""
    if not REAL_TRACES.is_dir():
        reason = "the folder of real traces (shared/traces beside the project) is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return REAL_TRACES
