"""The fields of a trace event that later stages read, and which kinds of events have them."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Any, Literal

import msgspec

from traceaudit.events import CATEGORIES, GPU_KINDS, Kind

Number = int | float | str | None


NOTHING = msgspec.Raw()


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that later stages read; names as the profiler writes them, and mostly its order.

    The decoder looks for a name from the last one found on, so that names in order are found at once.
    """

    external: int = msgspec.field(default=-1, name="External id")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=-1, name="Fwd thread id")
    collective: str = msgspec.field(default="", name="Collective name")
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    group_size: int = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    group: Number = msgspec.field(default="", name="Process Group Name")
    group_description: str = msgspec.field(default="", name="Process Group Description")
    group_ranks: str = msgspec.field(default="", name="Process Group Ranks")
    root: int = msgspec.field(default=-1, name="Rank")
    source_rank: int = msgspec.field(default=-1, name="Src Rank")
    destination_rank: int = msgspec.field(default=-1, name="Dst Rank")
    seq: int = msgspec.field(default=-1, name="Seq")
    concrete: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    wait_stream: int = msgspec.field(default=-1, name="wait_on_stream")
    record: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    device: int = -1
    stream: int = -1
    correlation: int = -1
    grid: msgspec.Raw = NOTHING
    bytes: int = -1
    device_type: int = msgspec.field(default=0, name="Device Type")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")
    name: Number = ""
    external_2021: int = msgspec.field(default=-1, name="external id")
    dims_2021: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")


class Event(msgspec.Struct, gc=False):
    """One trace event of whatever category; times stay text, so that they become nanoseconds exactly."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Number = -1
    tid: Number = -1
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    args: Args | None = None


NO_ARGS = Args()
COLLECTIVE_FIELDS = (
    "collective",
    "group",
    "group_description",
    "group_ranks",
    "group_size",
    "dtype",
    "in_elements",
    "out_elements",
    "seq",
    "source_rank",
    "destination_rank",
    "root",
)
# Which kinds of rows can have which integer and which text arguments; on others they are not looked for.
CARRIERS: tuple[tuple[tuple[Kind, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ((Kind.OPERATOR, Kind.ANNOTATION), ("sequence", "forward_thread"), ("dims", "types", "concrete")),
    ((Kind.RUNTIME, *GPU_KINDS, Kind.GPU_ANNOTATION, Kind.SYNC, Kind.OVERHEAD), ("correlation",), ()),
    ((*GPU_KINDS, Kind.GPU_ANNOTATION, Kind.SYNC, Kind.OVERHEAD), ("stream", "device", "bytes"), ("grid",)),
)
INTEGER_ARGS = ("external", *(name for _, integers, _ in CARRIERS for name in integers))
TEXT_ARGS = tuple(name for _, _, texts in CARRIERS for name in texts)
COLLECTIVE_KINDS = tuple(kind for kind in Kind if kind not in (Kind.OTHER, Kind.FRAME, Kind.RUNTIME))


def _of_category(category: str, phases: Any, names: Sequence[str], arguments: Sequence[str]) -> type[msgspec.Struct]:  # noqa: ANN401  a Literal
    """Return a class for the events of one category, which has some fields of `Event` and of `Args`."""
    fields: list[Any] = [("ph", phases), *_chosen(Event, names)]
    if arguments:
        own: Any = msgspec.defstruct(f"{category}_args", _chosen(Args, arguments), gc=False)
        fields.append(("args", own | None, None))
    return msgspec.defstruct(category, fields, tag_field="cat", tag=category, gc=False)


def _chosen(cls: type[msgspec.Struct], names: Sequence[str]) -> list[tuple[str, Any, Any]]:
    return [
        (own.name, own.type, msgspec.field(default=own.default, name=own.encode_name))
        for own in msgspec.structs.fields(cls)
        if own.name in names
    ]


def _read_arguments(kind: Kind) -> list[str]:
    """Return the arguments that are read of a kind of rows."""
    if kind == Kind.FRAME:
        return []
    found = ["external", "external_2021"]
    for kinds, integers, texts in CARRIERS:
        found += [*integers, *texts] if kind in kinds else []
    found += COLLECTIVE_FIELDS if kind in COLLECTIVE_KINDS else ()
    found += ["dims_2021"] if "dims" in found else []
    return found + (["wait_stream", "record"] if kind == Kind.SYNC else [])


# Classes for the events that nearly all chunks consist of, told apart by their category while they are decoded, so that
# none is given fields that are not read of it. A chunk that holds another event is decoded as `Event`s.
ROWS = {
    _of_category(category, Literal["X"], ("name", "pid", "tid", "ts", "dur"), _read_arguments(kind)): kind
    for category, kind in CATEGORIES.items()
}
IGNORED = (
    *(
        _of_category(category, Literal["s", "t", "f"], (), ())
        for category in ("ac2g", "fwdbwd", "async", "async_cpu_to_gpu", "async_gpu")
    ),
    _of_category("Trace", Literal["X"], (), ()),
)
INSTANT = _of_category("cpu_instant_event", Literal["i"], ("ts",), ("device_type", "allocated", "reserved"))
KNOWN_EVENTS: Any = GenericAlias(list, (reduce(or_, (*ROWS, *IGNORED, INSTANT)),))
