"""The layout of a job and its versions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Audited
from traceaudit import analyze
from traceaudit.reading.normalise import _versions


@pytest.mark.parametrize(
    ("metadata", "distributed", "found"),
    [
        (
            {"cuda_runtime_version": 12060, "cuda_driver_version": 13000},
            {"nccl_version": "2.27.5"},
            (("CUDA", "12.6"), ("driver", "13.0"), ("NCCL", "2.27.5")),
        ),
        ({"hip_runtime_version": 60443483}, {}, (("HIP", "6.4"),)),
        ({"cuda_runtime_version": "many", "hip_runtime_version": 0}, {"nccl_version": 2}, ()),
    ],
)
def test_versions_are_read_as_they_are_spoken(
    metadata: dict[str, object], distributed: dict[str, object], found: tuple[tuple[str, str], ...]
) -> None:
    """The numbers of CUDA and HIP become major and minor version; what is no version is none."""
    assert _versions(metadata, distributed) == found


def test_layout_and_versions_of_a_run(audited: Audited) -> None:
    """Degrees follow from the process groups, versions from the files."""
    job = audited("pipeline_1f1b").result["job"]
    assert job["layout"]["pp"] == 4
    assert job["versions"]["NCCL"] == "2.21.5"
    assert job["versions"]["CUDA"] == "12.6"


def test_declared_layout_stands_in_where_groups_are_not_named(simulated: Callable[[str], Path]) -> None:
    """What the user declares is the layout where the traces do not tell it."""
    assert analyze(simulated("compute_only"), tp=2).result["job"]["layout"]["tp"] == 2
