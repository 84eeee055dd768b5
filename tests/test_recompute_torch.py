"""Recompute in real profiles of every kind of checkpoint that torch has, against counts known from the model.

The profiles are made on the CPU. Where kernels are needed, each operator that did its work gets one on a made-up GPU.
"""

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traceaudit.checkpointing import recompute_row, summary
from traceaudit.classify import activities, enclosing
from traceaudit.events import BACKWARD_NODE, LONG_FRAME_US, Kind, Trace, frame_matters
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise
from traceaudit.recompute import recompute, recomputed_operators
from traceaudit.steps import Selection, step_windows

torch = importlib.import_module("torch") if os.environ.get("CI") == "true" else pytest.importorskip("torch")

Wrap = Callable[[Any, Any], Any]
Event = dict[str, Any]

BLOCKS = 3
PRODUCTS = 2  # a block has one aten::mm (no bias) and one aten::addmm
WIDTH = 16
KERNELS = {  # operators that would launch a kernel, and its name
    "aten::mm": "sm90_gemm_mm",
    "aten::addmm": "sm90_gemm_addmm",
    "aten::gelu": "vectorized_elementwise_kernel_gelu",
    "aten::native_layer_norm": "vectorized_layer_norm_kernel",
    "aten::bernoulli_": "distribution_elementwise_kernel",
}
KERNEL_NS = 1_000


def block() -> Any:  # noqa: ANN401  torch may be absent where this is type-checked
    """Return a block whose last operator needs everything before it, so that no checkpoint stops early."""
    nn = torch.nn
    return nn.Sequential(
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH, bias=False),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.Dropout(0.1),
    )


def checkpoint(run: Any, x: Any, **how: Any) -> Any:  # noqa: ANN401
    """Run something under torch's checkpoint."""
    return importlib.import_module("torch.utils.checkpoint").checkpoint(run, x, **how)


def plain(run: Any, x: Any) -> Any:  # noqa: ANN401
    """Run without a checkpoint."""
    return run(x)


def selective(run: Any, x: Any) -> Any:  # noqa: ANN401
    """Run under a selective checkpoint that keeps what matrix products give."""
    tools = importlib.import_module("torch.utils.checkpoint")
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return tools.CheckpointPolicy.MUST_SAVE if op in products else tools.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(tools.create_selective_checkpoint_contexts, policy)
    return checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def nested(run: Any, x: Any, *, use_reentrant: bool) -> Any:  # noqa: ANN401
    """Run under a checkpoint inside a checkpoint."""
    inner = partial(checkpoint, run, use_reentrant=use_reentrant)
    return checkpoint(inner, x, use_reentrant=use_reentrant)


def backward(model: Any, x: Any) -> None:  # noqa: ANN401
    """Run forward and backward."""
    model(x).pow(2).sum().backward()


def double_backward(model: Any, x: Any) -> None:  # noqa: ANN401
    """Differentiate the gradient of the input, as gradient penalties do."""
    (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def blocks(wrap: Wrap) -> Callable[[Any], Any]:
    """Return a model of blocks, each run under a checkpoint."""
    held = [block() for _ in range(BLOCKS)]

    def run(x: Any) -> Any:  # noqa: ANN401
        for one in held:
            x = wrap(one, x)
        return x

    return run


def wrapped(*, reentrant: bool) -> Any:  # noqa: ANN401
    """Return a model of blocks in the wrapper that FSDP users apply."""
    tools = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    kind = tools.CheckpointImpl.REENTRANT if reentrant else tools.CheckpointImpl.NO_REENTRANT
    return torch.nn.Sequential(*(tools.checkpoint_wrapper(block(), kind) for _ in range(BLOCKS)))


def sequential(*, use_reentrant: bool) -> Callable[[Any], Any]:
    """Return a model of four blocks in two segments, of which torch never checkpoints the last."""
    tools = importlib.import_module("torch.utils.checkpoint")
    model = torch.nn.Sequential(*(block() for _ in range(4)))
    return partial(tools.checkpoint_sequential, model, 2, use_reentrant=use_reentrant)


REENTRANT, PLAIN = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
MODELS: dict[str, Callable[[], Any]] = {
    "no checkpoint": lambda: blocks(plain),
    "reentrant": lambda: blocks(REENTRANT),
    "non-reentrant": lambda: blocks(PLAIN),
    "selective": lambda: blocks(selective),
    "sequential, reentrant": lambda: sequential(use_reentrant=True),
    "sequential, non-reentrant": lambda: sequential(use_reentrant=False),
    "wrapper, reentrant": lambda: wrapped(reentrant=True),
    "wrapper, non-reentrant": lambda: wrapped(reentrant=False),
    "nested, reentrant": lambda: blocks(partial(nested, use_reentrant=True)),
    "nested, non-reentrant": lambda: blocks(partial(nested, use_reentrant=False)),
}
# What each recomputes: matrix products, and how its checkpoint works.
EXPECTED = {
    "no checkpoint": (0, None),
    "reentrant": (BLOCKS * PRODUCTS, "reentrant"),
    "non-reentrant": (BLOCKS * PRODUCTS, "non_reentrant"),
    "selective": (0, "non_reentrant"),
    "sequential, reentrant": (2 * PRODUCTS, "reentrant"),
    "sequential, non-reentrant": (2 * PRODUCTS, "non_reentrant"),
    "wrapper, reentrant": (BLOCKS * PRODUCTS, "reentrant"),
    "wrapper, non-reentrant": (BLOCKS * PRODUCTS, "non_reentrant"),
    "nested, reentrant": (2 * BLOCKS * PRODUCTS, "reentrant"),  # the outer one's forward runs the inner one's too
    "nested, non-reentrant": (BLOCKS * PRODUCTS, "non_reentrant"),
}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """Return a function that profiles a model of `MODELS` once, and plays its operators on a made-up GPU."""
    made: dict[tuple[str, bool, bool], Trace] = {}

    def trace(name: str, *, stacks: bool = False, twice: bool = False) -> Trace:
        key = (name, stacks, twice)
        if key not in made:
            path = tmp_path_factory.mktemp("profile") / "trace.json"
            record(MODELS[name](), path, double_backward if twice else backward, stacks=stacks)
            made[key] = normalise(load(path))
        return made[key]

    return trace


def record(model: Any, path: Path, step: Callable[[Any, Any], None], *, stacks: bool = False) -> None:  # noqa: ANN401
    """Write the profile of the second step of a model, with kernels."""
    torch.manual_seed(0)
    x = torch.randn(8, WIDTH, requires_grad=True)
    step(model, x)
    profiler = torch.profiler
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU], record_shapes=True, with_stack=stacks
    ) as profiled:
        step(model, x)
    profiled.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    content["traceEvents"] += played(content["traceEvents"])
    path.write_text(json.dumps(content))


def played(events: list[Event]) -> list[Event]:
    """Return launches and kernels of the operators that did their work themselves.

    An operator under a dispatch mode is recorded twice: the outer one only passes the call on.
    """
    operators = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    modes = [event for event in operators if event["name"] == "PythonDispatchMode"]
    result: list[Event] = []
    working = [
        event for event in operators if event["name"] in KERNELS and not any(holds(event, mode) for mode in modes)
    ]
    for number, event in enumerate(sorted(working, key=lambda one: float(one["ts"])), start=1):
        at = nanoseconds(event["ts"]) + nanoseconds(event["dur"]) - 1
        thread = {"ph": "X", "pid": event["pid"], "tid": event["tid"], "ts": at / 1e3, "dur": 0.001}
        result.append({**thread, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": number}})
        start = nanoseconds(operators[-1]["ts"]) + 10**9 + number * 2 * KERNEL_NS
        args = {"correlation": number, "stream": 7, "device": 0}
        kernel = {"ph": "X", "pid": 0, "tid": 7, "ts": start / 1e3, "dur": KERNEL_NS / 1e3}
        result.append({**kernel, "cat": "kernel", "name": KERNELS[event["name"]], "args": args})
    return result


def nanoseconds(text: object) -> int:
    """Return microseconds as whole nanoseconds."""
    return round(float(str(text)) * 1e3)


def holds(outer: Event, inner: Event) -> bool:
    """Tell whether an event lies inside another on its thread."""
    begin, end = float(outer["ts"]), float(outer["ts"]) + float(outer["dur"])
    return bool(outer["tid"] == inner["tid"] and begin <= float(inner["ts"]) < end)


def row(trace: Trace) -> dict[str, Any]:
    """Return what the report would say of recompute."""
    table = activities(trace)
    found = recompute(trace, table)
    steps = step_windows(trace, table, Selection(whole_trace=True))
    ns = int(found.again.sum()) * KERNEL_NS
    facts = summary(trace, table, found, steps)
    return recompute_row([facts], kernels_ns=ns, communication_ns=0, window_ns=10 * max(ns, 1), mfu=0.45)


def kernels(trace: Trace, word: str) -> tuple[int, int]:
    """Return how many kernels of a name there are, and how many of them are recompute."""
    table = activities(trace)
    named = trace.events["name"].astype(str).str.contains(word).to_numpy()[table["row"].to_numpy()]
    return int(named.sum()), int((named & recompute(trace, table).again).sum())


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_recomputed_products_are_those_of_the_model(name: str, stacks: bool, profile: Callable[..., Trace]) -> None:
    """As many products run again as the checkpointed blocks have; those of the backward are none of them."""
    trace = profile(name, stacks=stacks)
    products, flavour = EXPECTED[name]
    forward = (4 if name.startswith("sequential") else BLOCKS) * PRODUCTS
    assert kernels(trace, "gemm") == (3 * forward + products, products)
    found = row(trace)
    assert (found["flavour"], found["rule"]) == (flavour, None if flavour is None else 1)
    assert found["suspected"] is None


@pytest.mark.parametrize("name", list(MODELS))
def test_recomputed_operators_are_those_of_the_model(name: str, profile: Callable[..., Trace]) -> None:
    """The forward of a checkpointed block runs its norm again, whether or not a GPU is there."""
    trace = profile(name)
    norms = (trace.events["name"] == "aten::layer_norm").to_numpy() & recomputed_operators(trace)
    again = {"no checkpoint": 0, "sequential": 2, "nested, reentrant": 2 * BLOCKS}
    expected = next((count for start, count in again.items() if name.startswith(start)), BLOCKS)
    assert norms.sum() == expected


def test_a_selective_checkpoint_owns_no_kernels_of_what_it_kept(profile: Callable[..., Trace]) -> None:
    """Products were kept, all else ran again; their operators stand in the trace without a kernel."""
    trace = profile("selective")
    assert kernels(trace, "gelu") == (2 * BLOCKS, BLOCKS)
    assert kernels(trace, "layer_norm") == (2 * BLOCKS, BLOCKS)
    outer = trace.events["name"].isin(("aten::mm", "aten::addmm")).to_numpy() & recomputed_operators(trace)
    assert outer.sum() == BLOCKS * PRODUCTS
    assert row(trace)["setting"] == "selective"


@pytest.mark.parametrize("name", ["reentrant", "non-reentrant", "wrapper, non-reentrant"])
def test_checkpointing_every_block_is_the_full_setting(name: str, profile: Callable[..., Trace]) -> None:
    """All products of the forward run again."""
    found = row(profile(name))
    assert (found["setting"], found["forward_share"]) == ("full", 1.0)
    assert found["mfu_points"] == pytest.approx(100 * (0.45 / 0.9 - 0.45))


def test_checkpointing_half_the_blocks_is_a_selective_setting(profile: Callable[..., Trace]) -> None:
    """Two blocks of four run again."""
    found = row(profile("sequential, non-reentrant"))
    assert (found["setting"], found["forward_share"], found["regions"]) == ("selective", 0.5, 1)


def test_stacks_tell_the_modules(profile: Callable[..., Trace]) -> None:
    """With stacks the outermost modules that ran again are named; without, nothing is."""
    assert row(profile("non-reentrant", stacks=True))["modules"] == ["Sequential"]
    assert row(profile("reentrant", stacks=True))["modules"] == ["Sequential"]
    assert row(profile("non-reentrant"))["modules"] == []


@pytest.mark.parametrize("stacks", [False, True])
def test_a_double_backward_recomputes_nothing(stacks: bool, profile: Callable[..., Trace]) -> None:
    """With create_graph the backward's own operators carry numbers; none is recompute, nor suspected to be."""
    found = row(profile("no checkpoint", stacks=stacks, twice=True))
    assert (found["rule"], found["regions"], found["suspected"]) == (None, 0, None)


def test_a_double_backward_over_checkpoints_is_told_by_stacks(profile: Callable[..., Trace]) -> None:
    """Each of the two backwards runs the forward again: numbers tell it in the second, stacks in both.

    Without stacks the first one's is suspected only.
    """
    assert kernels(profile("non-reentrant", stacks=True, twice=True), "gemm")[1] == 2 * BLOCKS * PRODUCTS
    bare = profile("non-reentrant", twice=True)
    assert kernels(bare, "gemm")[1] == BLOCKS * PRODUCTS
    suspected = row(bare)["suspected"]
    assert suspected["rule"] == 3
    assert suspected["kernels"] >= BLOCKS * PRODUCTS


def test_modules_of_the_forward_are_not_kept(profile: Callable[..., Trace]) -> None:
    """Short frames of modules stay only inside nodes of the backward."""
    events = profile("non-reentrant", stacks=True).events
    frames = events[events["kind"] == Kind.FRAME]
    short = frames[(frames["end_ns"] - frames["start_ns"] < LONG_FRAME_US * 1000)]
    rows = short.index[
        [name.startswith("nn.Module: ") and not frame_matters(name) for name in short["name"].astype(str)]
    ]
    nodes = np.flatnonzero(events["name"].astype(str).str.startswith(BACKWARD_NODE))
    assert len(rows)
    assert (enclosing(events, nodes, rows.to_numpy()) >= 0).all()


@pytest.mark.filterwarnings("ignore")  # of the compiler, of no concern here
@pytest.mark.parametrize("wrap", [plain, PLAIN])
def test_a_compiled_checkpoint_is_suspected(wrap: Wrap, tmp_path: Path) -> None:
    """A compiled backward shows no forward, only more products than twice the forward's: it counts nothing."""
    model = torch.compile(blocks(wrap), backend="aot_eager_decomp_partition")
    record(model, tmp_path / "trace.json", backward)
    torch.compiler.reset()
    trace = normalise(load(tmp_path / "trace.json"))
    found = row(trace)
    assert (found["rule"], found["regions"]) == (None, 0)
    beyond = kernels(trace, "gemm")[0] - 3 * BLOCKS * PRODUCTS
    assert (beyond > 0) == (wrap is PLAIN)
    assert (found["suspected"] or {"kernels": 0})["kernels"] == beyond
