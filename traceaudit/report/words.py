"""The one table of what each bucket, leaf and cause is called, means and looks like, in every report."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Leaf:
    """One cause within a bucket: its title in running text and its meaning in one sentence."""

    title: str
    meaning: str


@dataclass(frozen=True)
class Bucket:
    """One place where time goes. Colours are Okabe and Ito's; the dict order below is the order of the waterfall."""

    title: str  # as in "the largest losses are exposed communication (12.3 %)"
    short: str  # heads a narrow column
    colour: str
    meaning: str
    leaves: dict[str, Leaf] = field(default_factory=dict)


BUCKETS: dict[str, Bucket] = {
    "achieved": Bucket(
        "achieved (MFU)",
        "MFU",
        "#009E73",
        "The time the model's FLOPs would take at the peak: what is left of 100 % when every loss is subtracted.",
        {"model_flops": Leaf("model FLOPs", "Model FLOPs of the step divided by the peak; recompute is not counted.")},
    ),
    "sub_roofline": Bucket(
        "sub-roofline kernels",
        "sub-roof",
        "#56B4E9",
        "Compute kernels ran, but slower than the peak allows.",
        {
            "memory_floor": Leaf("memory-bound floor", "Moving the bytes takes longer than the FLOPs at the peak."),
            "slowed_by_overlap": Leaf(
                "slowed by overlapped communication",
                "Kernels that ran longer than the same kernel does without communication beside it.",
            ),
            "matmul": Leaf("matmul", "Matrix multiplications below the peak."),
            "attention": Leaf("attention", "Attention kernels below the peak."),
            "norm": Leaf("norms", "Normalisation kernels."),
            "elementwise": Leaf("elementwise", "Pointwise kernels, reductions and fused chains of them."),
            "optimizer": Leaf("optimizer", "Kernels of the optimizer step."),
            "device_copy": Leaf("device copies", "Copies and fills within the GPU's own memory."),
            "other_kernels": Leaf("other kernels", "Compute kernels of no known family."),
            "not_split": Leaf(
                "compute, not split",
                "The whole compute time: without model FLOPs it cannot be split into achieved and lost.",
            ),
        },
    ),
    "exposed_comm": Bucket(
        "exposed communication",
        "comm",
        "#0072B2",
        "Data was on its way between GPUs while no compute kernel ran.",
        {
            "tp": Leaf("tensor parallel", "Transfer in groups that split single layers."),
            "dp": Leaf("data parallel", "Transfer between replicas, mostly of gradients."),
            "fsdp": Leaf("FSDP", "Gathering sharded parameters and scattering their gradients."),
            "pp": Leaf("pipeline transfer", "Activations and their gradients on their way between pipeline stages."),
            "cp": Leaf("context parallel", "Transfer between the parts of a split sequence."),
            "ep": Leaf("expert parallel", "Tokens on their way to and from their experts."),
            "other_comm": Leaf("other groups", "Transfer in groups of no known dimension."),
            "offload_copy": Leaf("offload copies", "Activations copied to host memory or back, under no compute."),
            "transfer_or_wait": Leaf(
                "transfer + wait (partners not traced)",
                "Communication with ranks that have no trace: transfer and waiting cannot be told apart.",
            ),
        },
    ),
    "pipeline_bubble": Bucket(
        "pipeline bubbles",
        "bubble",
        "#F0E442",
        "A pipeline stage had nothing to do, because of the schedule or because stages are unequal.",
        {
            "warmup_drain": Leaf("warm-up and drain", "Waiting that the schedule needs even if all stages are equal."),
            "stage_imbalance": Leaf("stage imbalance", "Further waiting because stages take unequally long."),
            "undivided": Leaf("not divided", "Waiting in the pipeline whose layout is not known."),
        },
    ),
    "recompute": Bucket(
        "recompute",
        "recomp",
        "#CC79A7",
        "Activations were computed a second time to save memory: work that MFU does not count.",
        {
            "kernels": Leaf("recomputed kernels", "Compute kernels of a recomputed region."),
            "communication": Leaf("recomputed communication", "Exposed transfer started by a recomputed region."),
        },
    ),
    "straggler": Bucket(
        "stragglers",
        "late",
        "#D55E00",
        "Ranks waited for a rank that came late to a collective, or a rank was slower than its peers.",
        {
            "late_rank": Leaf(
                "waiting for a late rank", "Waiting for a rank whose kernels were slower, or for no known reason."
            ),
            "slow_gpu": Leaf("slow GPU", "What the kernels of a slow GPU took longer than the same on its peers."),
            "data_imbalance": Leaf("data imbalance", "Waiting for a rank that had more work."),
            "host_caused": Leaf("caused by a host", "Waiting for a rank whose host paused or was late."),
            "slow_link": Leaf("slow link", "Waiting for a rank whose transfers were slower than those of its peers."),
            "jitter": Leaf("jitter", "Waiting for a rank that did nothing more than the one that waited."),
        },
    ),
    "host_gap": Bucket(
        "host gaps",
        "host",
        "#E69F00",
        "The GPU was idle because the host had not launched its next work in time.",
        {
            "data_loader": Leaf("data loader", "The host waited for the next batch."),
            "checkpoint": Leaf("checkpoint", "The host was saving a checkpoint."),
            "gc": Leaf("garbage collection", "Python's garbage collector ran."),
            "compile": Leaf("compile", "Code was compiled, tuned or loaded."),
            "allocator": Leaf("allocator", "Memory was allocated or freed by the driver."),
            "host_sync": Leaf("host sync", "The host waited for the GPU, and its queue of launches ran empty."),
            "launch_bound": Leaf("launch-bound", "The host launched work without pause, yet too slowly."),
            "input_copy": Leaf("input copies", "Inputs were copied to the GPU under no other work."),
            "launch_latency": Leaf("launch latency", "From the end of a launch to the start of its kernel."),
            "other_host": Leaf("other host work", "The host did something else."),
        },
    ),
    "unattributed": Bucket(
        "unattributed",
        "unattr",
        "#999999",
        "The trace does not say where this time went.",
        {
            "launch_missing": Leaf("launch record missing", "The work that ended the gap has no record of its launch."),
            "not_started": Leaf(
                "launched, not started", "Work was launched long before it started, for no known reason."
            ),
            "trace_cut": Leaf("trace cut", "A partner's recording had not begun or had already ended."),
            "other": Leaf("other", "Nothing above fits."),
        },
    ),
}

CAUSES: dict[str, Leaf] = {  # why a rank made others wait
    "slow_gpu": Leaf("slow GPU", "Its kernels took longer throughout than the same kernels did on its peers."),
    "slow_kernels": Leaf("slow kernels", "Some of its kernels took longer than the same kernels did on its peers."),
    "more_work": Leaf("more work", "It had more to compute than its peers, because data or stages are unequal."),
    "launch_order": Leaf("launch order", "It computed first what the others computed after they began to communicate."),
    "host_pause": Leaf("host pause", "Its host paused, or launched its work late."),
    "slow_link": Leaf("slow link", "Its transfers took longer than those of its peers."),
    "pipeline": Leaf("pipeline", "It waited inside the pipeline, whose waits are not divided."),
    "jitter": Leaf("jitter", "It did nothing more than the ranks that waited."),
    "unknown": Leaf("unknown", "It was late, and the trace does not say why."),
}

RECOMPUTE_RULES = {  # what told that kernels run the forward again, the strongest first
    1: "sequence numbers of operators inside the backward",
    2: "Python frames inside the backward",
    3: "names of operators that only a forward calls",
    4: "counts of forward and backward kernels",
}
FLAVOURS = {  # of activation checkpointing
    "reentrant": "reentrant",
    "non_reentrant": "non-reentrant",
    "output_discarding": "output-discarding",
}
SLOW_LOADERS = {
    "workers": "the loader's workers are slow",
    "training process": "batches are made in the training process",
    "copy": "copies of inputs are slow",
}

WORK = {  # kinds of work in a pipeline: name and colour, of the palette of the buckets
    "F": ("forward", "#56B4E9"),
    "R": ("recompute (its share)", "#CC79A7"),
    "B": ("backward", "#009E73"),
    "I": ("backward, inputs", "#009E73"),
    "W": ("backward, weights", "#E69F00"),
    "O": ("other", "#C9D0D8"),
}
FAMILY_COLOURS = {  # of the titles of families, of the same palette; any other family is grey
    "matmul": "#0072B2",
    "attention": "#E69F00",
    "norms": "#CC79A7",
    "elementwise": "#009E73",
    "optimizer": "#F0E442",
    "device copies": "#56B4E9",
}

DARK_BUCKETS = {"exposed_comm"}  # too dark for dark text
NOT_SPLIT = "compute, not split"
LEVEL_COLOUR = "#DDE3EA"  # the bar of 100 %, which is no bucket
WHOLE_BUCKET_LEAVES = {"model_flops", "not_split"}  # leaves that only repeat their bucket


def bucket_words(bucket: str) -> Bucket:
    """Return the words for a bucket; one that a later version added is called by its own name."""
    return BUCKETS.get(bucket) or Bucket(_spoken(bucket), _spoken(bucket), "#999999", "")


def leaf_title(bucket: str, leaf: str) -> str:
    """Return the title of a leaf of a bucket, or its own name when it is not in the table."""
    known = bucket_words(bucket).leaves.get(leaf)
    return known.title if known else _spoken(leaf)


def gap_title(leaf: str) -> str:
    """Return the title of a leaf of idle time, whichever bucket it is in."""
    known = [bucket for bucket in ("host_gap", "unattributed", "straggler") if leaf in BUCKETS[bucket].leaves]
    return leaf_title(known[0] if known else "host_gap", leaf)


def family_title(family: str) -> str:
    """Return the title of a family of kernels."""
    return leaf_title("sub_roofline", family)


def family_colour(title: str) -> str:
    """Return the colour of a family of kernels by its title."""
    return FAMILY_COLOURS.get(title, "#999999")


def cause_title(cause: str) -> str:
    """Return the title of a cause of waits, or its own name when it is not in the table."""
    known = CAUSES.get(cause)
    return known.title if known else _spoken(cause)


def _spoken(name: str) -> str:
    return name.replace("_", " ")
