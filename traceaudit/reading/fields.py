"""The fields of a trace event that later stages read, and which kinds of events have them."""

import msgspec

from traceaudit.events import GPU_KINDS, Kind

Number = int | float | str | None


NOTHING = msgspec.Raw()


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that later stages read; names as the profiler writes them."""

    external: int = msgspec.field(default=-1, name="External id")
    external_2021: int = msgspec.field(default=-1, name="external id")
    correlation: int = -1
    stream: int = -1
    device: int = -1
    bytes: int = -1
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=-1, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    dims_2021: msgspec.Raw = msgspec.field(default=NOTHING, name="Input dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    grid: msgspec.Raw = NOTHING
    collective: str = msgspec.field(default="", name="Collective name")
    group: Number = msgspec.field(default="", name="Process Group Name")
    group_description: str = msgspec.field(default="", name="Process Group Description")
    group_ranks: str = msgspec.field(default="", name="Process Group Ranks")
    group_size: int = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    in_elements: int = msgspec.field(default=-1, name="In msg nelems")
    out_elements: int = msgspec.field(default=-1, name="Out msg nelems")
    seq: int = msgspec.field(default=-1, name="Seq")
    source_rank: int = msgspec.field(default=-1, name="Src Rank")
    destination_rank: int = msgspec.field(default=-1, name="Dst Rank")
    root: int = msgspec.field(default=-1, name="Rank")
    wait_stream: int = msgspec.field(default=-1, name="wait_on_stream")
    record: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    device_type: int = msgspec.field(default=0, name="Device Type")
    allocated: int = msgspec.field(default=-1, name="Total Allocated")
    reserved: int = msgspec.field(default=-1, name="Total Reserved")
    name: Number = ""


class Event(msgspec.Struct, gc=False):
    """One trace event; times stay text, so that they become nanoseconds exactly."""

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
