"""What the tests share: simulated runs, and the real traces beside the project."""

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
    """Return a function from a scenario's name to the directory of its traces, written once."""
    written: dict[str, Path] = {}

    def directory(scenario: str) -> Path:
        if scenario not in written:
            written[scenario] = simulate(tmp_path_factory.mktemp(scenario) / "run", scenario)
        return written[scenario]

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
