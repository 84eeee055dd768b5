"""The events of one rank's trace, in the order and with the fields of Kineto; the layouts write them down.

An event is a dict in which `ts` and `dur` are nanoseconds after `BASE_NS`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from traceaudit.simulate.job import Job
from traceaudit.simulate.kernels import GPU, SM_COUNT
from traceaudit.simulate.recording import Recording, Span

Event = dict[str, Any]
Shown = Callable[[int], int]  # true time in the run to time in the file

BASE_NS = 1_759_300_074_000_000_000  # a multiple of 7,889,238 s, as the profiler picks it
ORIGIN_NS = 6_322_354_285_936_137  # where the run begins; its last digits show whether a reader keeps nanoseconds
HOST_CATEGORIES = ("cpu_op", "user_annotation", "python_function")
LISTED_GPUS = 16  # the profiler names this many, present or not


def header(job: Job, recording: Recording) -> dict[str, Any]:
    """Return the keys of the file besides the events."""
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [device_properties(index) for index in range(job.gpus_per_host)],
        "cupti_version": 24,
        "cuda_runtime_version": 12060,
        "cuda_driver_version": 12080,
    }
    if job.groups:
        head["distributedInfo"] = distributed_info(job, recording.rank)
    if job.hosts > 1:  # older writers know no names of hosts; but only these tell several apart
        head["host_name"] = job.host_name(recording.rank)
    trace_id = f"{0x348DA645140E4551B4CE8DCD4CAF0000 + recording.rank:032X}"
    return {**head, "record_shapes": 1, "trace_id": trace_id}


def device_properties(index: int) -> dict[str, Any]:
    """Return what the profiler says about one GPU of the host."""
    return {
        "id": index,
        "name": GPU,
        "totalGlobalMem": 85028372480,
        "computeMajor": 9,
        "computeMinor": 0,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerMultiprocessor": 2048,
        "regsPerBlock": 65536,
        "warpSize": 32,
        "sharedMemPerBlock": 49152,
        "numSms": SM_COUNT,
        "regsPerMultiprocessor": 65536,
        "sharedMemPerBlockOptin": 232448,
        "sharedMemPerMultiprocessor": 233472,
    }


def distributed_info(job: Job, rank: int) -> dict[str, Any]:
    """Return the process groups a rank belongs to."""
    groups = [
        {
            "pg_name": group.name,
            "pg_desc": group.description,
            "backend_config": "cuda:nccl",
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for group in job.groups
        if rank in group.ranks
    ]
    return {
        "backend": "nccl",
        "rank": rank,
        "world_size": job.world_size,
        "pg_count": len(groups),
        "pg_config": groups,
        "nccl_version": "2.21.5",
    }


def events(job: Job, recording: Recording) -> list[Event]:
    """Return all events of a rank, by the clock of its host."""
    clock = job.clock(recording.rank)

    def shown(true_ns: int) -> int:
        return ORIGIN_NS + clock.shown(true_ns)

    spans = [span for span in recording.spans if (not job.lean or is_needed(span)) and not is_lost(job, span)]
    host = sorted(
        (span for span in spans if span.category in HOST_CATEGORIES),
        key=lambda span: (span.thread, span.start_ns, -span.end_ns, span.args.get("External id", 0)),
    )
    linked = sorted((span for span in spans if "correlation" in span.args), key=lambda span: span.args["correlation"])
    shadows = [span for span in spans if span.category == "gpu_user_annotation"]
    end_ns = shown(max(span.end_ns for span in spans)) + 250_000
    return [
        *(complete(span, shown) for span in host),
        *(event for event in with_flows(linked, shown) if not job.lean or event["ph"] == "X"),
        *(complete(span, shown) for span in shadows),
        *(() if job.lean else metadata(recording, shown(0))),
        *closing(shown(recording.begun_ns) - 70_706, end_ns),
    ]


def is_lost(job: Job, span: Span) -> bool:
    """Whether the profiler lost the record of a call."""
    call = span.category == "cuda_runtime" and job.lost_calls is not None
    return call and job.lost_calls is not None and job.lost_calls(span.args["correlation"])


def is_needed(span: Span) -> bool:
    """Whether a lean file holds a row; the kernels of collectives say all that their operators and shadows do."""
    if span.category == "user_annotation":
        return span.name.startswith("ProfilerStep#")
    return span.category != "gpu_user_annotation" and span.name != "record_param_comms"


def complete(span: Span, shown: Shown) -> Event:
    """Return the event of a row."""
    start_ns = shown(span.start_ns)
    return {
        "ph": "X",
        "cat": span.category,
        "name": span.name,
        "pid": span.process,
        "tid": span.thread,
        "ts": start_ns,
        "dur": shown(span.end_ns) - start_ns,
        "args": span.args,
    }


def with_flows(linked: Iterable[Span], shown: Shown) -> Iterator[Event]:
    """Return launch calls and GPU rows, each launch tied to what it launched by a flow."""
    rows = list(linked)
    launching = {span.args["correlation"] for span in rows if span.category != "cuda_runtime"}
    for span in rows:
        event = complete(span, shown)
        yield event
        flow = {key: event[key] for key in ("pid", "tid", "ts")}
        names = {"id": span.args["correlation"], "cat": "ac2g", "name": "ac2g"}
        if span.category != "cuda_runtime":
            yield {"ph": "f", **flow, **names, "bp": "e"}
        elif span.args["correlation"] in launching:
            yield {"ph": "s", **flow, **names}


def metadata(recording: Recording, ts: int) -> Iterator[Event]:
    """Return the names of processes, threads and streams."""
    processes = [(recording.process, "CPU", recording.process)]
    processes += [(index, f"GPU {index}", 5_000_000 + index) for index in range(LISTED_GPUS)]
    for pid, label, order in processes:
        for name, args in (
            ("process_name", {"name": "python"}),
            ("process_labels", {"labels": label}),
            ("process_sort_index", {"sort_index": order}),
        ):
            yield {"name": name, "ph": "M", "ts": ts, "pid": pid, "tid": 0, "args": args}
    threads = {
        (span.process, span.thread): f"stream {span.thread} " for span in recording.spans if "stream" in span.args
    }
    for thread, name in ((recording.main_thread, "python"), (recording.autograd_thread, "pt_autograd_0")):
        threads[recording.process, thread] = f"thread {thread} ({name})"
    for (pid, tid), name in sorted(threads.items()):
        yield {"name": "thread_name", "ph": "M", "ts": ts, "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "ts": ts, "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def closing(start_ns: int, end_ns: int) -> list[Event]:
    """Return the profiler's own rows: its span and the end of the recorded window."""
    spans, traces = {"pid": "Spans", "tid": "PyTorch Profiler"}, {"pid": "Traces", "tid": "Trace PyTorch Profiler"}
    whole = {"name": "PyTorch Profiler (0)", **spans, "ts": start_ns, "dur": end_ns - start_ns - 20_000}
    order = {"ts": start_ns, "pid": "Spans", "tid": 0, "args": {"sort_index": 536870912}}
    return [
        {"ph": "X", "cat": "Trace", **whole, "args": {"Op count": 0}},
        {"name": "process_sort_index", "ph": "M", **order},
        {"name": "Iteration Start: PyTorch Profiler", "ph": "i", "s": "g", **traces, "ts": start_ns},
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": end_ns},
    ]
