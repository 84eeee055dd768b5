"""The reader finds in a file what the json module finds, and in a broken file all that can be found."""

import gzip
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceaudit.errors import InputError, NotATraceError, TraceAuditError
from traceaudit.events import CATEGORIES, Kind
from traceaudit.reading import chunks, streams
from traceaudit.reading.columns import RawTrace
from traceaudit.reading.decode import load
from traceaudit.reading.fields import COLLECTIVE_FIELDS, Args
from traceaudit.reading.fields import Event as EveryEvent
from traceaudit.reading.mending import decoded
from traceaudit.reading.normalise import normalise
from traceaudit.simulate import SCENARIOS, Layout, play, simulate
from traceaudit.simulate.kineto_file import WRITERS, Document
from traceaudit.simulate.kineto_rows import events as kineto_events
from traceaudit.simulate.kineto_rows import header

Event = dict[str, Any]
Row = tuple[object, ...]

# What the categories of the traces in this file are.
KINDS = {
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "memcpy": Kind.COPY,
    "cuda_runtime": Kind.RUNTIME,
    "runtime": Kind.RUNTIME,
    "cpu_op": Kind.OPERATOR,
    "operator": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
}
FIELDS = ("correlation", "stream", "device", "bytes", "sequence", "forward_thread")
NAMED = {"sequence": "Sequence number", "forward_thread": "Fwd thread id"}

every_layout = pytest.mark.parametrize("layout", Layout)
# Fixtures of a function serve all its examples: each example writes the file anew.
repeatable = settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def row(event: Event) -> Row:
    """Return what the reader must keep of an event that the json module read with decimals as `Decimal`."""
    args = event.get("args", {})
    dims = args.get("Input Dims", args.get("Input dims"))
    return (
        KINDS[event["cat"].lower()],
        event["name"],
        int(event["ts"] * 1_000),
        int(event["dur"] * 1_000),
        args.get("External id", args.get("external id", -1)),
        *(args.get(NAMED.get(field, field), -1) for field in FIELDS),
        dims,
        args.get("Input type"),
        args.get("Collective name"),
    )


def rows_of(events: list[Event]) -> list[Row]:
    """Return what the reader must keep of a list of events."""
    return [row(event) for event in events if event["ph"] == "X" and event["cat"].lower() in KINDS]


def rows(trace: RawTrace) -> list[Row]:
    """Return what the reader kept."""

    def parsed(code: int) -> object:
        return json.loads(trace.texts[code]) if code >= 0 else None

    columns = {name: column.tolist() for name, column in trace.columns.items()}
    return [
        (
            Kind(columns["kind"][i]),
            trace.texts[columns["name"][i]],
            *(columns[name][i] for name in ("ts", "dur", "external", *FIELDS)),
            parsed(columns["dims"][i]),
            parsed(columns["types"][i]),
            trace.collectives[columns["collective"][i]][0] if columns["collective"][i] >= 0 else None,
        )
        for i in range(len(columns["ts"]))
    ]


def names(trace: RawTrace) -> list[str]:
    """Return the names of the events in order."""
    return [trace.texts[code] for code in trace.columns["name"].tolist()]


def losses(trace: RawTrace) -> tuple[int, int, bool]:
    """Return what the reader says was lost: events dropped, events repaired, and whether the file is torn."""
    return trace.dropped, trace.repaired, trace.torn


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str | bytes], RawTrace]:
    """Return a function that loads a file with some content."""

    def loaded(content: str | bytes) -> RawTrace:
        path = tmp_path / "rank0.json"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load(path)

    return loaded


Read = Callable[[str | bytes], RawTrace]


def kernel(number: int, **more: object) -> Event:
    """Return a kernel that starts at `number` microseconds."""
    event: Event = {"ph": "X", "cat": "kernel", "name": f"kernel {number}", "pid": 0, "tid": 7, "ts": number, "dur": 1}
    return event | {"args": {"stream": 7, "correlation": number}} | more


def tight(content: object) -> str:
    """Return JSON without spaces."""
    return json.dumps(content, separators=(",", ":"))


def three_lines(*events: str) -> str:
    """Return a trace in the layout of the C++ writers, from events whose keys are JSON text."""
    return '{\n  "traceEvents": [\n  {\n    ' + "\n  },\n  {\n    ".join(events) + '\n  }\n  ],\n  "last": 1\n}'


def compact(*events: str) -> str:
    """Return a trace with an event a line."""
    return '{"traceEvents":[\n{' + "},\n{".join(events) + '}\n],"last":1}'


def on_one_line(*events: str) -> str:
    """Return a trace without line ends."""
    return '{"traceEvents":[{' + "},{".join(events) + '}],"last":1}'


PLACES = {
    "three_lines": three_lines,
    "compact": compact,
    "one_line": on_one_line,
}
every_place = pytest.mark.parametrize("place", PLACES)


# Whole files


@cache
def simulated(layout: Layout) -> bytes:
    """Return the first rank's file of a run with collectives and shapes, in a layout."""
    job = SCENARIOS["exposed_allreduce"].build()
    recording = play(job)[0]
    return WRITERS[layout](Document(header(job, recording), kineto_events(job, recording), "trace", "host")).encode()


@cache
def brief(layout: Layout) -> bytes:
    """Return a small trace in a layout: 6 host rows, 16 GPU rows, launches and flows, and all that is no row."""
    job = SCENARIOS["exposed_allreduce"].build()
    recording = play(job)[0]
    every = kineto_events(job, recording)
    host = [event for event in every if event.get("cat") == "cpu_op"][:6]
    linked = [event for event in every if event.get("cat") in ("kernel", "cuda_runtime", "ac2g")][:16]
    rest = [event for event in every if event["ph"] in "Mi"][-8:]
    return WRITERS[layout](Document(header(job, recording), host + linked + rest, "trace", "host")).encode()


def by_json(content: bytes) -> tuple[list[Event], dict[str, Any]]:
    """Return the events and the other keys of a file as the json module reads them, decimals exactly."""
    found = json.loads(content, parse_float=Decimal)
    if isinstance(found, list):
        return found, {}
    return found.pop("traceEvents"), found


@pytest.mark.parametrize("suffix", ["", ".gz"])
@every_layout
def test_every_layout_is_read_as_the_json_module_reads_it(layout: Layout, suffix: str, tmp_path: Path) -> None:
    """All events and all other keys of every writer's file are there, unchanged, and nothing is said to be lost."""
    directory = simulate(tmp_path, "exposed_allreduce", layout=layout, compress=bool(suffix))
    path = directory / f"rank1_trace.json{suffix}"
    content = gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()
    events, keys = by_json(content)
    trace = load(path)
    assert rows(trace) == rows_of(events)
    assert trace.metadata == keys
    assert losses(trace) == (0, 0, False)


@every_layout
def test_threads_and_processes_are_told_apart(layout: Layout, read: Read) -> None:
    """Integer ids are kept, and text in their place (streams of 2021) gives one negative integer a text."""
    events, _ = by_json(brief(layout))
    kept = [event for event in events if event["ph"] == "X" and event["cat"].lower() in KINDS]
    trace = read(brief(layout))
    for field in ("pid", "tid"):
        pairs = {(event[field], code) for event, code in zip(kept, trace.columns[field].tolist(), strict=True)}
        assert len({value for value, _ in pairs}) == len({code for _, code in pairs}) == len(pairs)
        assert all(value == code if isinstance(value, int) else code < 0 for value, code in pairs)
    native = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {tid: name for tid, name in native.items() if isinstance(tid, int)}.items() <= trace.thread_names.items()


def test_the_arguments_of_collectives_are_kept(read: Read) -> None:
    """Each argument of a collective stands in its field; absent ones are -1 or empty."""
    args = {
        "Collective name": "allreduce",
        "Process Group Name": "3",
        "Process Group Description": "mesh_dp",
        "Process Group Ranks": "[0, 4]",
        "Group size": 2,
        "dtype": "BFloat16",
        "In msg nelems": 10,
        "Out msg nelems": 20,
        "Seq": 7,
        "Src Rank": 1,
        "Dst Rank": 2,
        "Rank": 4,
    }
    trace = read(tight([kernel(1, args=args), kernel(2), kernel(3, args={"Collective name": "barrier"})]))
    absent = {"collective": "barrier", "group": "", "group_description": "", "group_ranks": "", "dtype": ""}
    assert trace.columns["collective"].tolist() == [0, -1, 1]
    assert trace.collectives[0] == tuple(args.values())
    assert trace.collectives[1] == tuple(absent.get(field, -1) for field in COLLECTIVE_FIELDS)


@pytest.mark.parametrize("block", [200, 1_000, 5_003])
@every_layout
def test_the_size_of_the_blocks_read_does_not_matter(
    layout: Layout, block: int, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file read in blocks smaller than an event gives the same events: no event is lost at a border."""
    content = simulated(layout)
    whole = read(content)
    monkeypatch.setattr(chunks, "BLOCK_BYTES", block)
    monkeypatch.setattr(streams, "INFLATED_BYTES", block)
    for packed in (content, gzip.compress(content, 1)):
        trace = read(packed)
        assert rows(trace) == rows(whole)
        assert trace.metadata == whole.metadata
        assert losses(trace) == (0, 0, False)


# Times


def exact_ns(text: str) -> int:
    """Return microseconds as nanoseconds by rational arithmetic, halves to even."""
    return round(Fraction(text) * 1_000)


digits = st.text("0123456789", max_size=9)
numbers = st.builds(
    lambda sign, whole, decimals, exponent: f"{sign}{whole}{decimals and '.'}{decimals}{exponent}",
    st.sampled_from(["", "-"]),
    st.integers(0, 10**13),
    st.one_of(st.just(""), st.integers(0, 999).map("{:03d}".format), digits),
    st.sampled_from(["", "", "", "e0", "E+2", "e-3", "e2"]),
)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
@repeatable
def test_microseconds_become_nanoseconds_exactly(read: Read, times: list[tuple[str, str]]) -> None:
    """Whatever decimals, exponents and signs stand in a file: each time is the nearest nanosecond."""
    events = [f'{{"ph":"X","cat":"kernel","name":"k","ts":{ts},"dur":{dur}}}' for ts, dur in times]
    trace = read("[" + ",".join(events) + "]")
    assert trace.columns["ts"].tolist() == [exact_ns(ts) for ts, _ in times]
    assert trace.columns["dur"].tolist() == [exact_ns(dur) for _, dur in times]


@pytest.mark.parametrize(
    ("ts", "expected"),
    [
        ("1700000000000000.123", 1_700_000_000_000_000_123),  # more digits than a float has
        ("7889237999999.999", 7_889_237_999_999_999),
        ('"12.5"', 12_500),  # as text
        ('"1700000000000000.123"', 1_700_000_000_000_000_123),
        ("-0.001", -1),
        ("0.0005", 0),  # halves go to the even nanosecond
        ("0.0015", 2),
        ("1e3", 1_000_000),
    ],
)
@pytest.mark.parametrize("stream", ["7", '"7"'])  # text in place of a number takes the event another way
def test_a_time_has_one_meaning(ts: str, expected: int, stream: str, read: Read) -> None:
    """A time is the same nanosecond whatever else is unusual about its event."""
    trace = read(f'[{{"ph":"X","cat":"kernel","name":"k","ts":{ts},"dur":1.5,"args":{{"stream":{stream}}}}}]')
    assert trace.columns["ts"].tolist() == [expected]
    assert trace.columns["dur"].tolist() == [1_500]
    assert trace.columns["stream"].tolist() == [7]
    assert trace.dropped == 0


@pytest.mark.parametrize(
    "ts",
    [
        "1e999999999",
        "-1e999999999",
        "1e999999",
        "1e400",
        "18446744073709551",
        "18446744073709551.000",
        "9223372036854775807",
        "1" * 5_000,
        "null",
        '"soon"',
        '"1,2"',
        '"NaN"',
        '"inf"',
        '""',
        "[1]",
        "true",
        None,
    ],
)
def test_an_event_without_a_usable_time_is_dropped_alone(ts: str | None, read: Read) -> None:
    """Times beyond int64, no numbers and missing starts cost their event and no other, and are counted."""
    start = f'"ts":{ts},' if ts is not None else ""
    event = f'{{"ph":"X","cat":"kernel","name":"lost",{start}"dur":1}}'
    trace = read(f"[{tight(kernel(1))},{event},{tight(kernel(2))}]")
    assert names(trace) == ["kernel 1", "kernel 2"]
    assert trace.columns["ts"].tolist() == [1_000, 2_000]
    assert losses(trace) == (1, 0, False)


@pytest.mark.parametrize("dur", ["", '"dur":null,'])
def test_an_event_without_a_duration_has_none(dur: str, read: Read) -> None:
    """A missing duration is zero."""
    trace = read(f'[{{"ph":"X","cat":"kernel","name":"k",{dur}"ts":1.5}},{tight(kernel(2))}]')
    assert trace.columns["dur"].tolist() == [0, 1_000]
    assert trace.columns["ts"].tolist() == [1_500, 2_000]


# Broken events

NAME = '"ph": "X", "cat": "kernel", "name": "{}", "pid": 0, "tid": 7,\n    "ts": 5, "dur": 1'
ARGS = '"ph": "X", "cat": "kernel", "name": "odd", "pid": 0, "tid": 7, "ts": 5, "dur": 1, "args": {{{}}}'
# An event's keys, the name that must be read, and how many repairs that takes.
MENDED = {
    "quotes in the name": (NAME.format('a "quoted" name'), 'a "quoted" name', 1),
    "some of them escaped": (NAME.format(r"a \"half\" quoted\" \"name"), 'a "half" quoted" "name', 0),
    "escaped and bare quotes": (NAME.format(r'a \"b\" "c"'), 'a "b" "c"', 1),
    "a comma behind a quote": (NAME.format('f("a", b)'), 'f("a", b)', 1),
    "a backslash of Windows": (NAME.format(r"C:\work\x.py"), r"C:\work\x.py", 1),
    "bare inf": (ARGS.format('"blocks per SM": inf, "stream": 7'), "odd", 1),
    "bare -inf": (ARGS.format('"blocks per SM": -inf'), "odd", 1),
    "bare nan": (ARGS.format('"warps per SM": nan, "stream": 7'), "odd", 1),
    "bare N/A": (ARGS.format('"occupancy": N/A'), "odd", 1),
    "a tab": (NAME.format("a\tb"), "a\tb", 0),
    "a lone surrogate": (NAME.format(r"a\ud800b"), "a?b", 0),
}


@pytest.mark.parametrize("at", [0, 1, 2])
@every_place
@pytest.mark.parametrize("case", MENDED)
def test_what_json_forbids_in_an_event_is_mended(case: str, place: str, at: int, read: Read) -> None:
    """An event with a known malformation is read, wherever it stands, beside its neighbours; repairs are counted."""
    keys, name, repaired = MENDED[case]
    texts = [tight(kernel(number))[1:-1] for number in range(2)]
    texts.insert(at, keys if place == "three_lines" else keys.replace("\n    ", ""))
    trace = read(PLACES[place](*texts))
    expected = ["kernel 0", "kernel 1"]
    expected.insert(at, name)
    assert names(trace) == expected
    assert trace.columns["ts"][at] == 5_000
    assert losses(trace) == (0, repaired, False)
    assert trace.metadata == {"last": 1}


@pytest.mark.parametrize("at", [0, 1, 2])
@every_place
def test_bytes_that_are_not_utf8_are_replaced(place: str, at: int, read: Read) -> None:
    """A name with bytes that are no UTF-8 keeps its other letters."""
    texts = [tight(kernel(number))[1:-1] for number in range(3)]
    content = PLACES[place](*texts).encode().replace(f"kernel {at}".encode(), b"caf\xe9 \xff")
    trace = read(content)
    assert names(trace)[at] == "caf\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"
    assert len(names(trace)) == 3
    assert losses(trace) == (0, 0, False)


@pytest.mark.parametrize("at", [0, 1])
@every_place
def test_an_event_beyond_repair_costs_itself(place: str, at: int, read: Read) -> None:
    """An event that is no JSON is dropped and counted; those around it stay."""
    texts = [tight(kernel(number))[1:-1] for number in range(4)]
    texts.insert(at, '"ph": "X", "cat": kernel: oops')
    trace = read(PLACES[place](*texts))
    assert names(trace) == [f"kernel {number}" for number in range(4)]
    assert losses(trace)[:2] == (1, 0)
    assert trace.metadata == {"last": 1}


# An argument's value in JSON, and what it must become.
ARGUMENTS = [
    ("stream", "12", 12),
    ("stream", '"12"', 12),
    ("stream", "12.0", 12),
    ("stream", '"twelve"', -1),
    ("stream", "null", -1),
    ("stream", '""', -1),
    ("correlation", "[12]", -1),
    ("correlation", '{"a": 1}', -1),
    ("correlation", str(2**63 - 1), 2**63 - 1),
    ("correlation", str(2**63), -1),
    ("correlation", str(2**64), -1),
    ("correlation", "1" + "0" * 30, -1),
    ("bytes", "true", 1),
    ("bytes", "1e400", -1),
]


@pytest.mark.parametrize(("field", "value", "expected"), ARGUMENTS)
def test_an_argument_of_an_unexpected_type_is_read_or_left_out(
    field: str, value: str, expected: int, read: Read
) -> None:
    """An argument is the integer it means, or absent; the event and its other arguments stay."""
    args = f'{{"device":3,"{field}":{value}}}'
    odd = f'{{"ph":"X","cat":"kernel","name":"odd","pid":0,"tid":7,"ts":1,"dur":1,"args":{args}}}'
    trace = read(f"[{odd},{tight(kernel(2))}]")
    assert names(trace) == ["odd", "kernel 2"]
    assert trace.columns[field][0] == expected
    assert trace.columns["device"][0] == 3
    assert losses(trace) == (0, 0, False)


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"args": None}, "kernel 1"), ({"args": {}}, "kernel 1"), ({"args": [1]}, "kernel 1"), ({"name": None}, "")],
)
def test_missing_parts_of_an_event_are_empty(changes: Event, name: str, read: Read) -> None:
    """Arguments or a name that are null or missing are none."""
    trace = read(tight([kernel(1, **changes), kernel(2)]))
    assert names(trace) == [name, "kernel 2"]
    assert trace.columns["stream"].tolist() == [-1 if "args" in changes else 7, 7]


@pytest.mark.parametrize("size", ["7", '"7"', str(2**70)])
def test_a_group_has_one_name_whatever_else_is_unusual(size: str, read: Read) -> None:
    """The name of a process group is not changed by another argument's type."""
    args = f'{{"Collective name":"allreduce","Process Group Name":5,"Group size":{size}}}'
    trace = read(f'[{{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{args}}}]')
    found = dict(zip(COLLECTIVE_FIELDS, trace.collectives[0], strict=True))
    assert found["group"] == 5
    assert found["group_size"] == (7 if "7" in size[:2] else -1)


def test_events_nested_beyond_reason_are_dropped(read: Read) -> None:
    """An argument a hundred thousand lists deep costs its event, not the file."""
    deep = '{"ph":"X","cat":"kernel","name":"deep","ts":1,"dur":1,"args":{"x":' + "[" * 10**5 + "]" * 10**5 + "}}"
    trace = read(f"[{tight(kernel(1))},{deep},{tight(kernel(2))}]")
    assert names(trace) == ["kernel 1", "kernel 2"]
    assert trace.dropped == 1


# What looks like a border between events but is none

INSIDE: dict[str, Event] = {
    "list of objects": {"x": [{"a": 1}, {"b": 2}]},
    "long list of objects": {"x": [{"a": number} for number in range(40)]},
    "text": {"x": "},{ }, { }]"},
    "both": {"x": [{"a": "},{"}, {"b": '"},{"'}]},
}


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("case", INSIDE)
@every_place
def test_borders_inside_an_event_do_not_split_it(
    place: str, case: str, at: int, count: int, odd: bool, read: Read
) -> None:
    """Nested objects and text that look like a border are part of their event, first, last or only one."""
    events = [kernel(number, args=INSIDE[case] if number == at % count else {}) for number in range(count)]
    if odd:
        events.append(kernel(9, args={"stream": "7"}))  # makes the reader decode one by one
    trace = read(PLACES[place](*(tight(event)[1:-1] for event in events)))
    assert names(trace) == [event["name"] for event in events]
    assert losses(trace) == (0, 0, False)
    assert trace.metadata == {"last": 1}


@pytest.mark.parametrize("block", [1_000, 4_000, chunks.BLOCK_BYTES])
def test_borders_inside_events_do_not_matter_at_the_borders_of_blocks(
    block: int, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that ends inside a nested list or a text loses nothing."""
    monkeypatch.setattr(chunks, "BLOCK_BYTES", block)
    monkeypatch.setattr(streams, "INFLATED_BYTES", block)
    inside = list(INSIDE.values())
    events = [kernel(number, args={"stream": 1, **inside[number % 4]}) for number in range(1_500)]
    trace = read(tight({"traceEvents": events, "baseTimeNanoseconds": 5}))
    assert names(trace) == [event["name"] for event in events]
    assert losses(trace) == (0, 0, False)
    assert trace.metadata == {"baseTimeNanoseconds": 5}


def test_events_appended_in_another_layout_are_read(read: Read) -> None:
    """A tool that adds events behind those of the profiler need not copy its layout."""
    first = three_lines(*(tight(kernel(number))[1:-1] for number in range(3))).removesuffix('\n  ],\n  "last": 1\n}')
    later = ",\n".join(tight(kernel(number)) for number in range(3, 9))
    trace = read(f'{first},\n{later} , {tight(kernel(9))}\n  ],\n  "last": 1\n}}')
    assert names(trace) == [f"kernel {number}" for number in range(10)]
    assert losses(trace) == (0, 0, False)
    assert trace.metadata == {"last": 1}


# The keys beside the events


@pytest.mark.parametrize("indent", [None, 1, 2, 4])
@pytest.mark.parametrize("after", [False, True])
def test_keys_before_and_behind_the_events_are_read(indent: int | None, after: bool, read: Read) -> None:
    """Keys may stand on either side of the events, also lists of objects that look like them."""
    keys = {
        "deviceProperties": [{"id": number, "name": "GPU"} for number in range(4)],
        "baseTimeNanoseconds": 1_759_300_074_000_000_000,
        "distributedInfo": {"rank": 3, "pg_config": [{"pg_name": "0"}, {"pg_name": "1"}]},
    }
    events = {"traceEvents": [kernel(1), kernel(2), kernel(3)]}
    trace = read(json.dumps(events | keys if after else keys | events, indent=indent))
    assert trace.metadata == keys
    assert names(trace) == ["kernel 1", "kernel 2", "kernel 3"]
    assert losses(trace) == (0, 0, False)


def test_a_long_tail_of_objects_is_read_whole(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list behind the events, longer than a block, is no list of events."""
    monkeypatch.setattr(chunks, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(streams, "INFLATED_BYTES", 1_000)
    keys = {"logs": [{"line": number, "text": "x" * 50} for number in range(4_000)], "rank": 1}
    trace = read(tight({"traceEvents": [kernel(1), kernel(2)], **keys}))
    assert trace.metadata == keys
    assert names(trace) == ["kernel 1", "kernel 2"]


def test_unreadable_keys_do_not_cost_the_readable_ones(read: Read) -> None:
    """Metadata pasted in unchecked leaves the keys that later stages need."""
    content = (
        f'{{"note": oops, "traceEvents": [{tight(kernel(1))}], "distributedInfo": {{"rank": 3}}, "occupancy": inf, '
        '"deviceProperties": [{"id": 0}], "baseTimeNanoseconds": 17}'
    )
    assert read(content).metadata == {
        "distributedInfo": {"rank": 3},
        "deviceProperties": [{"id": 0}],
        "baseTimeNanoseconds": 17,
    }


@pytest.mark.parametrize(
    ("value", "expected"), [("inf", None), ("nan", None), ("N/A", None), (r'"a /"quoted/" word"', "a 'quoted' word")]
)
def test_known_faults_of_metadata_are_mended(value: str, expected: object, read: Read) -> None:
    """Bare numbers and the profiler's broken escapes leave all keys readable."""
    trace = read(f'{{"odd": {value}, "traceEvents": [{tight(kernel(1))}], "rank": 1}}')
    assert trace.metadata == {"odd": expected, "rank": 1}


# Files that hold no events

NO_TRACES = {
    "empty": b"",
    "blank": b" \n\t ",
    "text": b"hello",
    "number": b"17",
    "object": b'{"a": [1, 2], "b": [{"ph": "X"}]}',
    "events are null": b'{"traceEvents": null, "b": [{"ph": "X"}]}',
    "events are an object": b'{"traceEvents": {"ph": "X"}}',
    "a list of numbers": b"[1, 2]",
    "events are numbers": b'{"traceEvents": [1, 2]}',
    "cut before the events": b'{"schemaVersion": 1, "traceEv',
    "cut before the list": b'{"schemaVersion": 1, "traceEvents": ',
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", NO_TRACES)
def test_what_is_no_trace_is_an_error(case: str, packed: bool, read: Read) -> None:
    """A file without a list of events is refused, and the message says so."""
    with pytest.raises(NotATraceError, match="not a profiler trace"):
        read(gzip.compress(NO_TRACES[case]) if packed else NO_TRACES[case])


@pytest.mark.parametrize("content", ["[]", " [ ]\n", '{"traceEvents": []}', '{"traceEvents":[\n  ]\n}'])
def test_a_trace_may_be_empty(content: str, read: Read) -> None:
    """A list without events is a trace without events."""
    trace = read(content)
    assert rows(trace) == []
    assert losses(trace) == (0, 0, False)


def test_events_of_other_phases_and_categories_are_not_kept(read: Read) -> None:
    """Begin and end events, flows, counters and unknown categories are neither kept nor counted as lost."""
    others = [kernel(1, ph=phase) for phase in "BEsfiC"] + [kernel(2, cat="ac2g"), kernel(3, cat=None)]
    trace = read(tight(others))
    assert rows(trace) == []
    assert losses(trace) == (0, 0, False)


def test_an_event_of_an_unknown_category_changes_nothing_for_the_others(read: Read) -> None:
    """Every argument is read of every kind of event alike, whether the events around it are well known or not."""
    values = {int: 5, str: "text", msgspec.Raw: [[2, 3]]}
    args = {own.encode_name: values.get(own.type, 7) for own in msgspec.structs.fields(Args)}
    events = [kernel(number, cat=category, dur=300, args=args) for number, category in enumerate(CATEGORIES)]
    events += [kernel(50, cat="ac2g", ph="s"), kernel(51, cat="cpu_instant_event", ph="i", args=args)]
    known = read(tight(events))
    mixed = read(tight([*events, kernel(60, cat="unheard of")]))
    assert len(rows(known)) == len(CATEGORIES)
    assert {name: column.tolist() for name, column in known.columns.items()} == {
        name: column.tolist() for name, column in mixed.columns.items()
    }
    for part in ("texts", "collectives", "waits", "memory"):
        assert getattr(known, part) == getattr(mixed, part) != []


def test_events_of_known_categories_are_given_only_the_fields_that_are_read_of_them() -> None:
    """A frame is decoded without its arguments, a chunk that holds an unknown category as events of all fields."""
    text = cast(chunks.EventText, SimpleNamespace(ended=False, carry=b""))
    frame = kernel(1, cat="python_function")
    (own,), *lost = decoded(memoryview(tight([frame]).encode()), text)
    assert (own.name, hasattr(own, "args"), lost) == ("kernel 1", False, [0, 0])
    both, *lost = decoded(memoryview(tight([frame, kernel(2, cat="unheard of")]).encode()), text)
    assert ([type(one) for one in both], lost) == ([EveryEvent, EveryEvent], [0, 0])


def test_python_frames_are_kept_if_they_name_a_cause(read: Read) -> None:
    """Of the frames of Python, those of garbage collection, checkpoints and data loaders are kept."""
    kept = ["Python GC", "<built-in function collect>", "torch/serialization.py(650): save"]
    kept.append("torch/utils/data/dataloader.py(630): __next__")
    frames = [*kept, "train.py(3): step", "<built-in method item>"]
    trace = read(tight([kernel(number, cat="python_function", name=name) for number, name in enumerate(frames)]))
    assert names(trace) == kept
    assert set(trace.columns["kind"].tolist()) == {Kind.FRAME}


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """A missing file and a directory are named in the error."""
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(InputError, match=path.name):
            load(path)


# Torn and damaged files


def event_ends(content: bytes) -> tuple[list[tuple[int, Event]], int, int]:
    """Return where each event of a file ends, where its list begins, and where it ends, by the json module."""
    text = content.decode("ascii")
    key = text.find('"traceEvents"')
    opened = text.index("[", max(key, 0)) + 1
    decoder = json.JSONDecoder(parse_float=Decimal)
    at = opened
    found: list[tuple[int, Event]] = []
    while True:
        at = next(i for i in range(at, len(text)) if text[i] not in " \n,")
        if text[at] == "]":
            return found, opened, at + 1
        event, at = decoder.raw_decode(text, at)
        found.append((at, event))


def cuts(content: bytes, step: int) -> list[int]:
    """Return places to cut a file: at a stride, and around the ends of the events and of the list."""
    ends, opened, closed = event_ends(content)
    near = [end + shift for end, _ in ends for shift in (-1, 0, 1, 2)]
    return sorted({*range(0, len(content), step), *near, opened, opened + 1, closed - 1, closed, len(content)})


@every_layout
def test_a_torn_file_keeps_its_complete_events(layout: Layout, read: Read) -> None:
    """Wherever a file ends, the events before that are read, and it is torn if its list was not closed."""
    content = brief(layout)
    ends, opened, closed = event_ends(content)
    for cut in cuts(content, 53):
        if cut < opened:
            with pytest.raises(NotATraceError):
                read(content[:cut])
            continue
        trace = read(content[:cut])
        assert rows(trace) == rows_of([event for end, event in ends if end <= cut]), cut
        assert trace.torn == (cut < closed), cut
        assert trace.repaired == 0


@every_layout
def test_a_torn_gzip_keeps_its_complete_events(layout: Layout, read: Read) -> None:
    """Wherever a gzipped file ends, the events in what inflates are read, and it is torn."""
    content = brief(layout)
    packed = gzip.compress(content, mtime=0)
    ends, opened, _ = event_ends(content)
    for cut in range(2, len(packed), 23):
        inflated = len(zlib.decompressobj(31).decompress(packed[:cut]))
        if inflated < opened:
            with pytest.raises(NotATraceError):
                read(packed[:cut])
            continue
        trace = read(packed[:cut])
        assert rows(trace) == rows_of([event for end, event in ends if end <= inflated])
        assert trace.torn


@pytest.mark.parametrize("trailing", [b"", b"\0", bytes(1_000), b"garbage", b"\x1f\x8b"])
@pytest.mark.parametrize("members", [1, 2, 7])
def test_a_gzip_may_have_several_members_and_padding(members: int, trailing: bytes, read: Read) -> None:
    """The members of a gzip are one text; what follows the last of them is not part of it."""
    content = brief(Layout.KINETO)
    size = len(content) // members + 1
    packed = b"".join(gzip.compress(content[at : at + size]) for at in range(0, len(content), size))
    trace = read(packed + trailing)
    assert rows(trace) == rows_of(by_json(content)[0])
    assert (trace.dropped, trace.repaired) == (0, 0)
    assert trace.torn == (trailing == b"\x1f\x8b")  # another member begins there


def test_a_gzip_with_a_wrong_checksum_is_read_and_torn(read: Read) -> None:
    """Events that inflate are read even where the checksum does not fit, and the file is called torn."""
    packed = bytearray(gzip.compress(brief(Layout.KINETO)))
    packed[-8] ^= 0xFF
    trace = read(bytes(packed))
    assert rows(trace) == rows_of(by_json(brief(Layout.KINETO))[0])
    assert trace.torn


def test_a_damaged_gzip_keeps_the_events_before_the_damage(read: Read) -> None:
    """Zeros in the middle of a gzip cost what lies behind them; the events that inflate from before it are read."""
    content = simulated(Layout.KINETO)
    packed = gzip.compress(content)
    half = len(packed) // 2
    intact = len(zlib.decompressobj(31).decompress(packed[:half]))
    expected = rows_of([event for end, event in event_ends(content)[0] if end <= intact])
    trace = read(packed[:half] + bytes(64) + packed[half + 64 :])
    assert len(expected) > 100
    assert rows(trace)[: len(expected)] == expected
    assert trace.torn


# Anything at all


def survives(read: Read, content: bytes) -> None:
    """Load and normalise; an error must be one that tells the user what to do."""
    with suppress(TraceAuditError):
        trace = read(content)
        events = normalise(trace).events
        assert (events["end_ns"] >= events["start_ns"]).all()
        assert np.isin(trace.columns["kind"], list(Kind)).all()


@given(st.binary(max_size=400), st.sampled_from([b"", b"[", b'{"traceEvents":[', b'[{"ph":"X",', b"\x1f\x8b\x08"]))
@repeatable
def test_arbitrary_bytes_are_read_or_refused(read: Read, noise: bytes, start: bytes) -> None:
    """No content of a file raises anything but an error for the user."""
    survives(read, start + noise)


mutations = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from(["flip", "insert", "delete", "cut"]),
        st.one_of(
            st.binary(min_size=1, max_size=4),
            st.sampled_from(
                [b'"', b"{", b"}", b"]", b"[", b"},{", b"\\", b",", b"1e999999999", b"-", b"null", b"9" * 40]
            ),
        ),
    ),
    min_size=1,
    max_size=5,
)


def mutated(content: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    """Return a file after some damage."""
    for place, how, text in changes:
        at = place % (len(content) + 1)
        end = {"flip": at + len(text), "insert": at, "delete": at + 7 * len(text), "cut": len(content)}[how]
        content = content[:at] + (text if how in ("flip", "insert") else b"") + content[end:]
    return content


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", [Layout.KINETO, Layout.COMPACT, Layout.ONE_LINE])
@given(mutations)
@repeatable
def test_a_mutated_trace_is_read_or_refused(
    read: Read, layout: Layout, packed: bool, changes: list[tuple[int, str, bytes]]
) -> None:
    """A trace with bytes changed, added or lost raises nothing but an error for the user."""
    content = gzip.compress(brief(layout), mtime=0) if packed else brief(layout)
    survives(read, mutated(content, changes))
