"""Kernels of a recomputed forward are told from those of the backward around them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceaudit.account import account
from traceaudit.classify import activities
from traceaudit.leaves import Leaf
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise, read_trace
from traceaudit.recompute import recomputed
from traceaudit.simulate import simulate
from traceaudit.steps import Selection

Event = dict[str, Any]
NODE = "autograd::engine::evaluate_function: "
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
MAIN, AUTOGRAD = 1, 2


class Recorder:
    """Writes operators that launch kernels, one after another in time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0

    def operator(self, name: str, *beneath: Callable[[], None], tid: int = AUTOGRAD, **args: int) -> Callable[[], None]:
        """Return what records an operator around what runs beneath it."""

        def run() -> None:
            self.now += 1
            start = self.now
            for inner in beneath:
                inner()
            self.now += 1
            self._add(name, "cpu_op", tid, start, self.now - start, args)

        return run

    def frame(self, name: str, *beneath: Callable[[], None], tid: int = AUTOGRAD) -> Callable[[], None]:
        """Return what records a Python frame around what runs beneath it."""

        def run() -> None:
            self.now += 1
            start = self.now
            for inner in beneath:
                inner()
            self.now += 1
            self._add(name, "python_function", tid, start, self.now - start, {})

        return run

    def kernel(self, name: str, tid: int = AUTOGRAD) -> Callable[[], None]:
        """Return what records the launch of a kernel."""

        def run() -> None:
            self.now += 2
            number = self.now
            self._add("cudaLaunchKernel", "cuda_runtime", tid, number - 1, 1, {"correlation": number})
            args = {"stream": 7, "device": 0, "correlation": number}
            self.events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "pid": 0,
                    "tid": 7,
                    "ts": number + 10_000,
                    "dur": 1,
                    "args": args,
                }
            )

        return run

    def copy(self, size: int, tid: int = AUTOGRAD) -> Callable[[], None]:
        """Return what records a copy of some bytes from the host."""

        def run() -> None:
            self.kernel(f"Memcpy HtoD {size}", tid)()
            copied = self.events[-1]
            copied["cat"] = "gpu_memcpy"
            copied["args"]["bytes"] = size

        return run

    def _add(self, name: str, cat: str, tid: int, start: int, dur: int, args: dict[str, int]) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": start, "dur": dur, "args": args}
        )


@pytest.fixture
def record() -> Recorder:
    """Return an empty recording."""
    return Recorder()


@pytest.fixture
def again(record: Recorder, tmp_path: Path) -> Callable[..., dict[str, bool]]:
    """Return a function that tells for each kernel of some recorded calls whether it was recomputed."""

    def found(*calls: Callable[[], None]) -> dict[str, bool]:
        for call in calls:
            call()
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(record.events), encoding="utf-8")
        trace = normalise(load(path))
        table = activities(trace)
        names = trace.events["name"].astype(object).to_numpy()[table["row"].to_numpy()]
        return dict(zip(names.tolist(), recomputed(trace, table).tolist(), strict=True))

    return found


Again = Callable[..., dict[str, bool]]


def forward(record: Recorder, number: int, kernel: str, tid: int = AUTOGRAD) -> Callable[[], None]:
    """Return an operator as it runs in a forward: with the next sequence number and no forward thread."""
    args = {"Sequence number": number, "Fwd thread id": 0}
    return record.operator("aten::mm", record.kernel(kernel, tid), tid=tid, **args)


def own(record: Recorder, kernel: str, tid: int = AUTOGRAD) -> Callable[[], None]:
    """Return an operator of a backward node: it carries no number."""
    return record.operator("aten::mm", record.kernel(kernel, tid), tid=tid)


def backward(
    record: Recorder, number: int, kernel: str, *before: Callable[[], None], tid: int = AUTOGRAD, thread: int = 1
) -> Callable[[], None]:
    """Return a backward node: what runs before its own work, then the operator with its number, and inner ones."""
    args = {"Sequence number": number, "Fwd thread id": thread}
    inner = record.operator("aten::mm", record.kernel(kernel, tid), tid=tid)  # inner operators carry no number
    own = record.operator("MmBackward0", *before, inner, tid=tid, **args)
    return record.operator(NODE + "MmBackward0", own, tid=tid)


def test_a_plain_backward_recomputes_nothing(record: Recorder, again: Again) -> None:
    """Neither the forward nor the backward of a layer is recompute."""
    calls = [forward(record, 10, "forward", tid=MAIN), backward(record, 10, "backward")]
    assert again(*calls) == {"forward": False, "backward": False}


def test_a_forward_inside_a_backward_node_is_recomputed(record: Recorder, again: Again) -> None:
    """Non-reentrant checkpoints run the forward in the first node that needs it; the node's own work is none."""
    calls = [
        forward(record, 10, "forward", tid=MAIN),
        backward(record, 10, "backward 1", forward(record, 0, "recomputed 1"), forward(record, 1, "recomputed 2")),
        backward(record, 9, "backward 2"),
    ]
    assert again(*calls) == {
        "forward": False,
        "recomputed 1": True,
        "recomputed 2": True,
        "backward 1": False,
        "backward 2": False,
    }


def test_everything_beneath_a_recomputed_operator_is_recomputed(record: Recorder, again: Again) -> None:
    """Operators beneath carry no number of their own, and inherit."""
    inner = record.operator("aten::copy_", record.kernel("beneath"))
    outer = record.operator("aten::to", inner, **{"Sequence number": 900, "Fwd thread id": 0})
    assert again(backward(record, 10, "backward", outer)) == {"beneath": True, "backward": False}


def test_a_reentrant_checkpoint_recomputes_before_its_inner_backward(record: Recorder, again: Again) -> None:
    """The forward again is recompute although its numbers are consumed; the nodes that consume them are not."""
    node = record.operator(
        NODE + "CheckpointFunctionBackward",
        record.operator(
            "CheckpointFunctionBackward",
            forward(record, 900, "recomputed 1"),
            forward(record, 901, "recomputed 2"),
            backward(record, 901, "inner 2"),
            backward(record, 900, "inner 1"),
            **{"Sequence number": 10, "Fwd thread id": 1},
        ),
    )
    calls = [forward(record, 10, "forward", tid=MAIN), node]
    assert again(*calls) == {
        "forward": False,
        "recomputed 1": True,
        "recomputed 2": True,
        "inner 2": False,
        "inner 1": False,
    }


def test_a_forward_inside_a_nested_node_is_a_checkpoint_in_a_checkpoint(record: Recorder, again: Again) -> None:
    """Inner backward nodes run no forward of their own, but where one does, an inner checkpoint recomputes."""
    inner = backward(record, 900, "inner", forward(record, 950, "in the inner node"))
    node = record.operator(
        NODE + "CheckpointFunctionBackward",
        record.operator("CheckpointFunctionBackward", forward(record, 900, "recomputed"), inner),
    )
    assert again(node) == {"recomputed": True, "in the inner node": True, "inner": False}


def test_a_forward_in_a_hook_is_recomputed_for_a_later_node(record: Recorder, again: Again) -> None:
    """Megatron's output-discarding checkpoint recomputes in a hook; a node inside a later one uses the numbers."""
    work = record.operator("MmBackward0", own(record, "backward"))
    hook = record.operator(NODE + "MmBackward0", forward(record, 900, "recomputed"), work)
    inner = backward(record, 900, "inner", thread=2)
    name = "CheckpointWithoutOutputFunctionBackward"
    later = record.operator(NODE + name, record.operator(name, inner))
    assert again(hook, later) == {"recomputed": True, "backward": False, "inner": False}


def test_a_backward_with_grad_mode_is_no_recompute_though_nothing_follows(record: Recorder, again: Again) -> None:
    """With create_graph all operators of the nodes carry numbers, whether or not a later node uses them."""
    nodes = [
        record.operator(NODE + "MulBackward0", record.operator("MulBackward0", forward(record, number, name)))
        for number, name in ((900, "first"), (901, "second"))
    ]
    assert again(*nodes) == {"first": False, "second": False}


def test_a_python_function_called_in_the_backward_is_no_recompute(record: Recorder, again: Again) -> None:
    """The call of a Python function carries a number with grad mode off too: the backward of one may call another."""
    called = record.operator("MyFunction", record.kernel("called"), **{"Sequence number": 900, "Fwd thread id": 0})
    assert again(backward(record, 10, "backward", called)) == {"called": False, "backward": False}


def test_what_runs_between_recomputed_operators_is_recomputed(record: Recorder, again: Again) -> None:
    """A kernel launched without an operator, between two of a region, belongs to it."""
    calls = backward(
        record,
        10,
        "backward",
        forward(record, 900, "recomputed 1"),
        record.kernel("between"),
        forward(record, 901, "recomputed 2"),
    )
    assert again(calls) == {"recomputed 1": True, "between": True, "recomputed 2": True, "backward": False}


def test_frames_tell_where_numbers_do_not(record: Recorder, again: Again) -> None:
    """A module that runs inside a backward node is recompute, whatever its operators carry."""
    module = record.frame("nn.Module: Block_3", own(record, "recomputed"))
    inner = record.operator(NODE + "MmBackward0", record.operator("MmBackward0", own(record, "inner")))
    node = record.operator(NODE + "MulBackward0", record.operator("MulBackward0", module, own(record, "own"), inner))
    outside = record.frame("nn.Module: Block_3", own(record, "forward", tid=MAIN), tid=MAIN)
    assert again(outside, node) == {"forward": False, "recomputed": True, "own": False, "inner": False}


def test_names_count_only_without_any_number(record: Recorder, again: Again) -> None:
    """A forward-only operator in the backward is recompute in a trace without numbers, else no more than suspected."""
    linear = record.operator("aten::linear", record.kernel("linear"))
    node = record.operator(NODE + "MulBackward0", record.operator("MulBackward0", linear, own(record, "own")))
    assert again(node) == {"linear": True, "own": False}
    with_number = again(forward(record, 10, "forward", tid=MAIN), node)
    assert with_number == {"linear": False, "own": False, "forward": False}


def test_a_region_that_only_communicates_and_copies_is_no_recompute(record: Recorder, again: Again) -> None:
    """The backward of a differentiable collective packs what it sends."""
    packed = forward(record, 900, "CatArrayBatchedCopy")
    calls = record.operator(NODE + "_AllToAllBackward", packed, forward(record, 901, NCCL), own(record, "own"))
    assert again(calls) == {"CatArrayBatchedCopy": False, NCCL: False, "own": False}


def test_small_copies_of_a_region_are_recompute(record: Recorder, again: Again) -> None:
    """The state of a random generator is the checkpoint's; activations that come from the host are not."""
    inside = (forward(record, 900, "recomputed 1"), record.copy(16), record.copy(1 << 24), forward(record, 901, "2"))
    assert again(backward(record, 10, "backward", *inside)) == {
        "recomputed 1": True,
        "Memcpy HtoD 16": True,
        "Memcpy HtoD 16777216": False,
        "2": True,
        "backward": False,
    }


def test_small_copies_of_a_region_are_booked_as_recompute(record: Recorder, tmp_path: Path) -> None:
    """Their time, where nothing else runs, is not a host gap's."""
    inside = (forward(record, 900, "recomputed 1"), record.copy(16), forward(record, 901, "recomputed 2"))
    backward(record, 10, "backward", *inside)()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(record.events), encoding="utf-8")
    decided = account(read_trace(path), Selection(whole_trace=True)).decided
    assert decided.loc[decided["leaf"] == Leaf.KERNELS, "ns"].tolist() == [1_000]


def test_a_double_backward_is_no_recompute(record: Recorder, again: Again) -> None:
    """Operators of a backward with create_graph look like forwards, but a later node consumes their numbers."""
    calls = [
        forward(record, 10, "forward", tid=MAIN),
        backward(record, 10, "first order", forward(record, 900, "differentiable")),
        backward(record, 900, "second order", thread=2),  # number 900 was given on the autograd thread
        backward(record, 9, "first order 2"),
        backward(record, 8, "first order 3"),
    ]
    assert again(*calls) == dict.fromkeys(
        ["forward", "first order", "differentiable", "second order", "first order 2", "first order 3"], False
    )


def test_equal_numbers_of_other_forward_threads_are_not_consumed(record: Recorder, again: Again) -> None:
    """Numbers count per thread: a node of the main forward consumes no number of the autograd thread."""
    calls = [
        forward(record, 10, "forward 10", tid=MAIN),
        forward(record, 11, "forward 11", tid=MAIN),
        backward(record, 11, "backward 11", forward(record, 10, "recomputed")),
        backward(record, 10, "backward 10"),
    ]
    assert again(*calls) == {
        "forward 10": False,
        "forward 11": False,
        "recomputed": True,
        "backward 11": False,
        "backward 10": False,
    }


def test_a_double_backward_on_the_forwards_own_thread_is_no_recompute(record: Recorder, again: Again) -> None:
    """Where forward and backward share a thread, a later use of a number on it is the consumption."""
    calls = [
        forward(record, 10, "forward", tid=MAIN),
        backward(record, 10, "first order", forward(record, 11, "differentiable", tid=MAIN), tid=MAIN),
        backward(record, 11, "second order", tid=MAIN),
    ]
    assert again(*calls) == dict.fromkeys(["forward", "first order", "differentiable", "second order"], False)


def test_a_region_that_only_communicates_is_no_recompute(record: Recorder, again: Again) -> None:
    """The backward of a differentiable collective is a collective again, not a forward that runs twice."""
    collective = forward(record, 900, NCCL)
    assert again(record.operator(NODE + "_AlltoAllSingleBackward", collective)) == {NCCL: False}


def test_communication_of_a_region_that_computes_is_recomputed(record: Recorder, again: Again) -> None:
    """A tensor-parallel layer that runs again reduces again."""
    calls = backward(record, 10, "backward", forward(record, 900, "recomputed"), forward(record, 901, NCCL))
    assert again(calls) == {"recomputed": True, NCCL: True, "backward": False}


def test_launches_of_other_threads_are_not_recomputed(record: Recorder, again: Again) -> None:
    """What another thread launches while a region runs belongs to that thread."""
    region = record.operator(
        "aten::mm",
        record.kernel("recomputed"),
        record.kernel("elsewhere", tid=MAIN),
        **{"Sequence number": 900, "Fwd thread id": 0},
    )
    assert again(backward(record, 10, "backward", region)) == {
        "recomputed": True,
        "elsewhere": False,
        "backward": False,
    }


def test_a_simulated_run_recomputes_its_forward_once(tmp_path: Path) -> None:
    """In a run that checkpoints every block, recomputed matrix products are as many as the forward's: a quarter.

    A layer has one product forward, one again and two backward.
    """
    trace = read_trace(simulate(tmp_path, "recompute") / "rank0_trace.json.gz")
    table = activities(trace)
    again = recomputed(trace, table)
    products = trace.events["name"].astype(object).str.contains("gemm|nvjet").to_numpy()[table["row"].to_numpy()]
    assert products.sum() == 4 * (again & products).sum() > 0


def test_a_simulated_run_without_checkpoints_recomputes_nothing(tmp_path: Path) -> None:
    """Ordinary forwards and backwards with sequence numbers are no recompute."""
    trace = read_trace(simulate(tmp_path, "compute_only") / "rank0_trace.json.gz")
    assert not recomputed(trace, activities(trace)).any()
