"""What one file holds becomes absolute nanoseconds in one order, and the file's origin is told from what it says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceaudit.events import Device, Kind, ProcessGroup, Trace
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise, parse_ranks, rank_in_name

Event = dict[str, Any]
BASE_NS = 1_759_300_074_000_000_000
DAY_US = 24 * 60 * 60 * 10**6
Read = Callable[..., Trace]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that normalises a file with some events and other keys."""

    def normalised(events: list[Event], name: str = "trace.json", **keys: object) -> Trace:
        path = tmp_path / name
        path.write_text(json.dumps({**keys, "traceEvents": events}), encoding="utf-8")
        return normalise(load(path))

    return normalised


def event(category: str, start: float, length: float, **args: object) -> Event:
    """Return an event, times in microseconds."""
    place = {"pid": args.pop("pid", 0), "tid": args.pop("tid", 7)}
    named = {"ph": "X", "cat": category, "name": f"{category} {start}", **place}
    return named | {"ts": start, "dur": length, "args": args}


# File names (kineto_traces.md 1.6) and the rank that each tells.
FILE_NAMES = [
    ("rank7_trace.json", 7),  # torchtitan
    ("rank7_trace.json.gz", 7),
    ("rank000012_trace.json.gz", 12),
    ("rank-31.json.gz", 31),  # Megatron
    ("rank-3.json", 3),  # NeMo
    ("profile_4.json", 4),  # Accelerate
    ("rank5.20.pt.trace.json", 5),  # Composer: rank and batch
    ("rank-6-step-120.chrome_trace.json.gz", 6),  # OLMo-core
    ("primus_rank_9_step_5.json", 9),  # Primus
    ("trace_rank[2].json", 2),
    ("Rank 8.json", 8),
    ("dump_kineto_11.json.gz", 11),
    ("host_851.1759300074123456789.pt.trace.json", None),  # tensorboard handler: process and time
    ("host_851.1759300074123.pt.trace.json.gz", None),
    ("libkineto_activities_4242.json", None),  # on-demand: process
    ("job-17_4242.json", None),  # dynolog: process
    ("my_profile_4.json", None),
    ("trace.json", None),
    ("step3.json", None),
]


@pytest.mark.parametrize(("name", "rank"), FILE_NAMES)
def test_a_file_name_tells_the_rank_if_its_writer_puts_it_there(name: str, rank: int | None) -> None:
    """Each producer's pattern gives the rank; ids of processes and times of writing never pass for one."""
    assert rank_in_name(name) == rank


@pytest.mark.parametrize(
    ("distributed", "name", "rank"),
    [
        ({"rank": 3, "world_size": 8}, "rank7_trace.json", 3),
        ({"rank": "3"}, "trace.json", 3),
        ({}, "rank7_trace.json", 7),
        ({"rank": None}, "rank7_trace.json", 7),
        ({"rank": "three"}, "rank7_trace.json", 7),
        ("rank 3", "rank7_trace.json", 7),
        (None, "trace.json", None),
    ],
)
def test_the_file_says_its_rank_better_than_its_name(
    read: Read, distributed: object, name: str, rank: int | None
) -> None:
    """The rank of ``distributedInfo`` counts before that of the name; a rank that neither tells is unknown."""
    assert read([event("kernel", 0, 1)], name, distributedInfo=distributed).origin.rank == rank


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ([0, 4, 8], (0, 4, 8)),
        ("[0, 4, 8]", (0, 4, 8)),
        ("[]", ()),
        ([], ()),
        ("", ()),
        ("[0, 1, 2, ..., 63]", None),
        ("[0, 1, 2, ...]", None),
        ("0-7", None),
        ('{"a": 1}', None),
        ("[[0]]", None),
        (["a"], None),
        ("[" * 100_000, None),
        (None, None),
        (7, None),
    ],
)
def test_ranks_of_a_group_are_read_unless_cut_short(value: object, ranks: tuple[int, ...] | None) -> None:
    """A list of ranks may stand as a list or as text; one that was truncated or is none is unknown."""
    assert parse_ranks(value) == ranks


@given(st.lists(st.integers(0, 10**6), max_size=40))
@settings(derandomize=True, deadline=None)
def test_ranks_survive_being_written(ranks: list[int]) -> None:
    """Text that Python or C++ writes for a list of ranks gives the same ranks as the list."""
    assert parse_ranks(str(ranks)) == parse_ranks(ranks) == tuple(ranks)


@pytest.mark.parametrize("base", [BASE_NS, str(BASE_NS)])
def test_the_base_time_is_added_to_every_event(read: Read, base: object) -> None:
    """Times count from the epoch, whatever the file counts from, to the nanosecond."""
    trace = read([event("kernel", 1.5, 0.001), event("cpu_op", 2.002, 1)], baseTimeNanoseconds=base)
    assert trace.events["start_ns"].tolist() == [BASE_NS + 1_500, BASE_NS + 2_002]
    assert trace.events["end_ns"].tolist() == [BASE_NS + 1_501, BASE_NS + 3_002]
    assert trace.origin.absolute_clock


@pytest.mark.parametrize("base", [None, "soon", [1], -1, 10**30, 2**63])
def test_an_unusable_base_time_is_none(read: Read, base: object) -> None:
    """A base that is missing or no instant leaves the file's own clock, which no other rank shares."""
    trace = read([event("kernel", 1.5, 1)], baseTimeNanoseconds=base)
    assert trace.events["start_ns"].tolist() == [1_500]
    assert not trace.origin.absolute_clock


def test_times_of_old_files_are_absolute(read: Read) -> None:
    """Microseconds since the epoch need no base."""
    trace = read([event("kernel", BASE_NS // 1_000, 1)])
    assert trace.events["start_ns"].tolist() == [BASE_NS]
    assert trace.origin.absolute_clock


instants = st.tuples(st.integers(0, 20), st.integers(0, 5))


@given(st.lists(instants, max_size=12))
@settings(derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_are_sorted_by_start_the_longer_first(read: Read, times: list[tuple[int, int]]) -> None:
    """However a file orders its events, the table has one order, and no event is lost."""
    events = read([event("cpu_op", start, length) for start, length in times]).events
    found = [
        ((end - start) // -1_000, start // 1_000)
        for start, end in zip(events["start_ns"], events["end_ns"], strict=True)
    ]
    assert [(start, length) for length, start in found] == sorted((start, -length) for start, length in times)


def test_negative_durations_count_as_empty_and_are_counted(read: Read) -> None:
    """Old files have events that end before they start: they last no time, and the report tells how many."""
    trace = read([event("kernel", 5, -3), event("cpu_op", 6, -0.001), event("kernel", 7, 0), event("kernel", 8, 1)])
    assert (trace.events["end_ns"] - trace.events["start_ns"]).tolist() == [0, 0, 0, 1_000]
    assert trace.losses.negative_durations == 2
    assert trace.losses.dropped == 0


def test_gpu_records_longer_than_a_day_are_dropped(read: Read) -> None:
    """A kernel or copy of more than a day is a fault of the driver; a host call that long may be true."""
    rows = [event(category, 1, DAY_US + 1) for category in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")]
    trace = read([*rows, event("kernel", 2, DAY_US)])
    assert trace.events["kind"].tolist() == [Kind.OPERATOR, Kind.KERNEL]
    assert trace.losses.dropped == 3


def test_losses_of_the_reader_are_handed_on(read: Read) -> None:
    """What the reader dropped counts together with what is dropped here."""
    trace = read([event("kernel", 1, 1), event("kernel", 2, 1) | {"ts": "soon"}, event("kernel", 3, DAY_US * 2)])
    assert trace.losses.dropped == 2
    assert not trace.losses.torn


@pytest.mark.parametrize(
    ("name", "keys", "host"),
    [
        ("node17_851.1759300074123456789.pt.trace.json", {}, "node17"),
        ("rank3_node17_851.1759300074123456789.pt.trace.json", {}, "node17"),  # put in front by some launchers
        ("gpu-a_b_851.1759300074123.pt.trace.json", {}, "gpu-a_b"),
        ("node17_851.1759300074123456789.pt.trace.json", {"host_name": "node18"}, "node18"),
        ("rank3_trace.json", {}, None),
        ("libkineto_activities_4242.json", {}, None),
        ("trace.json", {"host_name": 17}, None),
    ],
)
def test_the_host_is_told_by_the_file_or_the_handlers_name(
    read: Read, name: str, keys: dict[str, object], host: str | None
) -> None:
    """The host name stands in the file since 2026, before that in the names that the tensorboard handler gives."""
    assert read([event("kernel", 0, 1)], name, **keys).origin.host == host


def test_gpu_rows_say_their_stream_and_device(read: Read) -> None:
    """Arguments tell stream and device; where they are absent, thread and process do; host rows have neither."""
    trace = read(
        [
            event("kernel", 0, 1, pid=2, tid=9, stream=7, device=1),
            event("kernel", 1, 1, pid=2, tid=9),
            event("gpu_memcpy", 2, 1, pid=0, tid=7, stream=0, device=0),
            event("gpu_user_annotation", 3, 1, pid=2, tid=9),
            event("cpu_op", 4, 1, pid=2, tid=9, stream=7, device=1),
        ]
    )
    assert trace.events["stream"].tolist() == [7, 9, 0, 9, -1]
    assert trace.events["device"].tolist() == [1, 2, 0, 2, -1]
    assert trace.events["process"].tolist() == [2, 2, 0, 2, 2]
    assert trace.origin.processes == (2,)


def test_names_and_shapes_are_categories_that_occur(read: Read) -> None:
    """Text columns hold the texts of their own events, and are missing where the event has none."""
    dims = [[2, 3], [3, 4]]
    trace = read([event("cpu_op", 0, 1, **{"Input Dims": dims}), event("kernel", 1, 1), event("kernel", 1, 1)])
    assert trace.events["name"].tolist() == ["cpu_op 0", "kernel 1", "kernel 1"]
    assert set(trace.events["name"].cat.categories) == {"cpu_op 0", "kernel 1"}
    assert json.loads(trace.events["dims"].iloc[0]) == dims
    assert trace.events["dims"].isna().tolist() == [False, True, True]
    assert trace.origin.record_shapes


def test_the_device_is_the_one_that_the_rank_used(read: Read) -> None:
    """Of the GPUs of the node, the one whose index the kernels have is the rank's."""
    listed = [
        {"id": index, "name": f"GPU {index}", "totalGlobalMem": 80, "computeMajor": 9, "computeMinor": 0}
        | {"numSms": 132, "warpSize": 32}
        for index in range(4)
    ]
    rows = [event("kernel", number, 1, device=2) for number in range(3)] + [event("kernel", 9, 1, device=1)]
    assert read(rows, deviceProperties=listed).origin.device == Device("GPU 2", 80, 132, (9, 0), 32)
    assert read([event("cpu_op", 1, 1)], deviceProperties=listed).origin.device == Device("GPU 0", 80, 132, (9, 0), 32)
    assert read(rows, deviceProperties=[]).origin.device is None
    assert read(rows, deviceProperties=[{"name": "A"}]).origin.device == Device("A", 0, 0, (0, 0), 0)


def test_process_groups_are_read_from_the_configuration(read: Read) -> None:
    """Groups have a name, a description and ranks; ranks that were cut short are unknown."""
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]},
        {"pg_name": "1", "pg_desc": "mesh_pp", "ranks": "[0, 1, ..., 9]"},
        {"uid": "2"},
        "odd",
    ]
    origin = read([event("kernel", 0, 1)], distributedInfo={"world_size": "16", "pg_config": groups}).origin
    assert origin.world_size == 16
    assert origin.groups == (
        ProcessGroup("0", "default_pg", (0, 1)),
        ProcessGroup("1", "mesh_pp", ()),
        ProcessGroup("", "", ()),
    )


def test_an_empty_trace_has_the_columns_of_every_other(read: Read) -> None:
    """Without events the tables are empty, not absent, and of the same types."""
    empty, other = read([]), read([event("kernel", 0, 1)])
    assert len(empty.events) == 0
    types = {name: other.events[name].dtype for name in other.events if name not in ("name", "dims", "types", "grid")}
    assert {name: empty.events[name].dtype for name in types} == types
    assert list(empty.events) == list(other.events)
    assert all(isinstance(empty.events[name].dtype, pd.CategoricalDtype) for name in ("name", "dims", "types"))
    assert not empty.origin.absolute_clock
