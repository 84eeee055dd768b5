"""FLOPs are counted from recorded shapes, once for each matrix product."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceaudit.classify import activities
from traceaudit.flops import Counted, counted
from traceaudit.reading.decode import load
from traceaudit.reading.normalise import normalise, read_trace
from traceaudit.simulate import SCENARIOS, simulate

Event = dict[str, Any]
Shape = list[int]
BF16 = "c10::BFloat16"


def operator(name: str, start: int, end: int, dims: object = None, types: object = None) -> Event:
    """Return an operator on the only thread."""
    args = {"Input Dims": dims, "Input type": types}
    args = {key: value for key, value in args.items() if value is not None}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 1, "ts": start, "dur": end - start, "args": args}


def kernel(launch: int, length: int = 1, name: str = "nvjet_gemm") -> list[Event]:
    """Return a kernel and the call that launches it at an instant."""
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 1, "ts": launch, "dur": 1}
    row = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": launch + 1_000, "dur": length}
    number = {"correlation": launch + 1}
    return [{**call, "args": number}, {**row, "args": {**number, "stream": 7, "device": 0}}]


Count = Callable[[list[Event]], Counted]


@pytest.fixture
def count(tmp_path: Path) -> Count:
    """Return a function that counts the FLOPs of a trace of some events."""

    def found(events: list[Event]) -> Counted:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(events), encoding="utf-8")
        trace = normalise(load(path))
        return counted(trace, activities(trace))

    return found


# An operator, the shapes of its arguments, and the FLOPs: 2 for each product of the sum over k, written out.
PRODUCTS = [
    ("aten::mm", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),
    ("aten::addmm", [[7], [3, 5], [5, 7], [], []], 2 * 3 * 5 * 7),
    ("aten::bmm", [[4, 3, 5], [4, 5, 7]], 2 * 4 * 3 * 5 * 7),
    ("aten::baddbmm", [[4, 3, 7], [4, 3, 5], [4, 5, 7], [], []], 2 * 4 * 3 * 5 * 7),
    ("aten::mm.default", [[3, 5], [5, 7]], 2 * 3 * 5 * 7),  # names with overloads
    ("aten::addmm.out", [[7], [3, 5], [5, 7]], 2 * 3 * 5 * 7),
    ("aten::mm", [[1, 1], [1, 1]], 2),
    ("aten::mm", [[8_192, 28_672], [28_672, 131_072]], 2 * 8_192 * 28_672 * 131_072),
]


@pytest.mark.parametrize(("name", "dims", "flops"), PRODUCTS)
def test_a_matrix_product_has_two_flops_for_each_product_of_elements(
    count: Count, name: str, dims: list[Shape], flops: int
) -> None:
    """2·m·k·n, times the batch; terms that are added, scalars and overloads change nothing."""
    found = count([operator(name, 0, 10, dims), *kernel(2)])
    assert found.flops.tolist() == [flops]
    assert (found.operators, found.unknown) == (1, 0)


@given(
    st.sampled_from(["aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"]), *(st.integers(1, 9) for _ in range(4))
)
@settings(derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_formulas_agree_with_numpys_count(count: Count, name: str, batch: int, m: int, k: int, n: int) -> None:
    """The FLOPs of any shapes are those that numpy counts for the same sum over products."""
    batched = "bmm" in name
    left, right, result = ([batch, *shape] if batched else [*shape] for shape in ([m, k], [k, n], [m, n]))
    expression = "bmk,bkn->bmn" if batched else "mk,kn->mn"
    report = np.einsum_path(expression, np.ones(left), np.ones(right), optimize=["einsum_path", (0, 1)])[1]
    expected = next(line for line in report.splitlines() if "Naive FLOP count" in line).split(":")[1]
    dims = [result, left, right] if "add" in name else [left, right]
    found = count([operator(name, 0, 10, dims), *kernel(2)])
    assert found.flops[0] == pytest.approx(float(expected), rel=1e-3)  # numpy prints four digits


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        ([BF16, BF16], "bf16"),
        (["c10::Half", "c10::Half"], "fp16"),
        (["float", "float"], "fp32"),
        (["c10::Float8_e4m3fn", "c10::Float8_e4m3fn"], "fp8"),
        (["double", "double"], ""),
        ([], ""),
        (None, ""),
    ],
)
def test_the_element_type_is_that_of_the_left_matrix(count: Count, types: list[str] | None, dtype: str) -> None:
    """Recorded types name the column of the peak table; others name none, and the FLOPs still count."""
    found = count([operator("aten::mm", 0, 10, [[3, 5], [5, 7]], types), *kernel(2)])
    assert found.dtype.tolist() == [dtype]
    assert found.flops.tolist() == [210]


def test_a_product_inside_another_is_counted_once(count: Count) -> None:
    """Dispatch modes record an operator twice, and composites call what they are made of: the innermost counts."""
    dims = [[3, 5], [5, 7]]
    events = [
        operator("aten::linear", 0, 40, [[3, 5], [7, 5], [7]]),
        operator("aten::addmm", 5, 35, [[7], *dims]),
        operator("PythonDispatchMode", 6, 34),
        operator("aten::addmm", 10, 30, [[7], *dims]),
        *kernel(20),
    ]
    found = count(events)
    assert found.flops.sum() == 2 * 3 * 5 * 7
    assert (found.operators, found.unknown) == (1, 0)


def test_a_product_of_several_kernels_stands_on_the_longest(count: Count) -> None:
    """Split-k products launch a reduction as well; the FLOPs stand once, on the kernel that does the work."""
    product = operator("aten::mm", 0, 500, [[3, 5], [5, 7]])
    assert count([product, *kernel(2, 3), *kernel(20, 30), *kernel(400, 5)]).flops.tolist() == [0, 210, 0]


def test_operators_with_equal_shapes_have_their_own_formulas(count: Count) -> None:
    """Which arguments are multiplied depends on the operator, not on the shapes alone."""
    dims = [[3, 5], [5, 7], [7, 9]]
    events = [operator("aten::mm", 0, 10, dims), *kernel(2), operator("aten::addmm", 20, 30, dims), *kernel(22)]
    assert count(events).flops.tolist() == [2 * 3 * 5 * 7, 2 * 5 * 7 * 9]


def test_products_that_launch_nothing_are_not_counted(count: Count) -> None:
    """Selective checkpoints show cached products with shapes but without kernels; they cost nothing."""
    cached = operator("aten::mm", 0, 10, [[3, 5], [5, 7]])
    found = count([cached, operator("aten::mm", 20, 30, [[1, 2], [2, 1]]), *kernel(22)])
    assert found.flops.tolist() == [4]
    assert found.operators == 1


def test_communication_inside_a_product_has_no_flops(count: Count) -> None:
    """Only kernels that compute bear FLOPs."""
    nccl = "ncclDevKernel_AllGather_RING_LL"
    found = count([operator("aten::mm", 0, 10, [[3, 5], [5, 7]]), *kernel(2, 90, nccl), *kernel(4, 1)])
    assert sorted(found.flops.tolist()) == [0, 210]
    assert found.flops.tolist()[0] == 0


@pytest.mark.parametrize(
    "dims", [None, [], [[3, 5]], [[3], [5, 7]], [[], []], "", [[[3, 5]], [[5, 7]]], [None, None], {"a": 1}]
)
def test_products_without_usable_shapes_are_counted_as_unknown(count: Count, dims: object) -> None:
    """A product whose shapes were not recorded has unknown FLOPs, not none; others are counted beside it."""
    events = [
        operator("aten::mm", 0, 10, dims),
        *kernel(2),
        operator("aten::mm", 20, 30, [[1, 2], [2, 1]]),
        *kernel(22),
    ]
    found = count(events)
    assert found.flops.tolist() == [0, 4]
    assert (found.operators, found.unknown) == (1, 1)


@pytest.mark.parametrize("name", ["aten::add", "aten::matmul", "aten::mm_like", "mm", "aten::_mm"])
def test_other_operators_have_no_flops(count: Count, name: str) -> None:
    """Only the products of the table are counted; composites are counted by their parts."""
    found = count([operator(name, 0, 10, [[3, 5], [5, 7]]), *kernel(2)])
    assert found.flops.tolist() == [0]
    assert (found.operators, found.unknown) == (0, 0)


def test_a_trace_without_gpu_rows_has_no_flops(count: Count) -> None:
    """There is nothing to count on."""
    found = count([operator("aten::mm", 0, 10, [[3, 5], [5, 7]])])
    assert (len(found.flops), found.operators, found.unknown) == (0, 0, 0)


def test_a_simulated_step_counts_six_flops_a_parameter_and_token(tmp_path: Path) -> None:
    """Counted shapes of a run without recompute agree with 6·params·tokens over its steps, exactly."""
    directory = simulate(tmp_path, "compute_only")
    run = SCENARIOS["compute_only"].build().run
    trace = read_trace(directory / "rank0_trace.json.gz")
    steps = trace.events["name"].astype(str).str.fullmatch(r"ProfilerStep#\d+").sum()
    assert counted(trace, activities(trace)).flops.sum() == steps * 6 * run["params"] * run["tokens_per_step"]
