"""Reports are functions of the result: the rows that all of them show."""

import re

import pytest

from tests.results import CULPRITS, MS, Result, result_of
from traceaudit.leaves import Leaf
from traceaudit.report import (
    advice,
    behind,
    by_rank,
    culprits,
    factors,
    figures,
    formats,
    headline,
    kernels,
    remarks,
    rows,
    sentences,
    terminal,
    traffic,
    words,
)
from traceaudit.report.html import to_html


@pytest.mark.parametrize("mfu", [True, False])
def test_bars_chain_from_100_percent_to_what_is_left(mfu: bool) -> None:
    """Each loss starts where the bar before it ended, and the last one ends at the last level."""
    first, *losses, last = rows.waterfall(result_of(mfu=mfu))
    assert (first.start, first.end, first.is_level, last.is_level) == (0.0, 1.0, True, True)
    for before, row in zip([first, *losses], losses, strict=False):
        assert row.start == before.end
        assert row.start - row.end == pytest.approx(row.share)
    assert losses[-1].end == pytest.approx(last.end)
    assert last.row == ("mfu" if mfu else "compute")


@pytest.mark.parametrize("mfu", [True, False])
def test_shares_add_up(mfu: bool) -> None:
    """Losses and what is left are 100 %, for the job and for each rank; leaves are their bucket."""
    result = result_of(mfu=mfu)
    _, *bars = rows.waterfall(result)
    assert sum(row.share for row in bars) == pytest.approx(1)
    assert sum(row.step_ns for row in bars) == pytest.approx(200 * MS)
    for row in bars[:-1]:
        assert sum(leaf.share for leaf in row.leaves) == pytest.approx(row.share)
    for rank in by_rank.ranks(result):
        assert sum(rank.shares.values()) == pytest.approx(1)


def test_both_views_of_the_waits_have_the_total_of_the_waterfall() -> None:
    """Where stragglers lost time and who caused it add up to the same row, however few parts are shown."""
    result = result_of()
    total = result["job"]["buckets"]["straggler"]
    for limit in (2, 3, 12):
        lost, caused = culprits.where_lost(result, limit), culprits.caused_by(result, limit)
        assert sum(part.ns for part in lost) == sum(part.ns for part in caused) == total
        assert max(len(lost), len(caused)) <= limit
    assert [part.title for part in culprits.caused_by(result, 12)] == [
        "rank 1: host pause",
        "rank 5: slow GPU",
        "rank 2: slow link",
        "slow GPUs: own excess",
    ]
    assert culprits.where_lost(result, 3)[-1].title == "6 other ranks"
    bar = next(row for row in rows.waterfall(result) if row.bucket == "straggler")
    assert sum(part.step_ns for part in culprits.caused_by(result, 2)) == pytest.approx(bar.step_ns)


def test_tiny_parts_share_a_row() -> None:
    """Causes far below the largest are counted, not listed."""
    result = result_of()
    result["stragglers"] += [result["stragglers"][2] | {"rank": rank, "caused_ns": 1000} for rank in (6, 7)]
    assert culprits.caused_by(result, 12)[-1].title == "2 other causes"
    assert culprits.caused_by(result, 12)[-1].ns == 2000


def test_culprits_say_what_they_cost_and_why() -> None:
    """Waits are means in a step of any rank, the culprit's own excess is in a step of its own."""
    first, *_ = found = culprits.culprits(result_of())
    assert [(row.rank, row.title) for row in found] == [(1, "host pause"), (5, "slow GPU"), (2, "slow link")]
    assert (first.caused_step_ns, first.own_step_ns, first.share) == (6 * MS, 10 * MS, 0.03)
    assert first.mfu_points == pytest.approx(28 * (1 / 0.97 - 1))
    assert culprits.culprits(result_of(mfu=False))[0].mfu_points is None
    assert culprits.culprits(result_of(1)) == []


@pytest.mark.parametrize(
    ("culprit", "text"),
    [
        (CULPRITS[0], "garbage collection, 30.0 ms more than its peers in 3 steps"),
        (CULPRITS[1], "97.0 % of its kernel time slower, by 30.0 ms in 3 steps, most in sm90_xmma_gemm (1.13x)"),
        (CULPRITS[2], "mesh_tp [2, 3]: all reduce 2.00x its peers'"),
        (
            (0, "host_pause", 1, {"leaf": "gc", "caused_ns_by_leaf": {"gc": 5, "launch_bound": 4, "compile": 1}}),
            "garbage collection, 30.0 ms more than its peers in 3 steps; also launch-bound",
        ),
        (
            (0, "slow_kernels", 1, {"kernels": [{"name": "void ns::f<int>(int)", "ratio": 1.2}]}),
            "30.0 ms slower in 3 steps, most in f (1.20x)",
        ),
        ((0, "more_work", 1, {}), "30.0 ms more kernel time than its peers in 3 steps"),
        ((0, "slow_link", 1, {"links": []}), ""),
        ((0, "jitter", 1, {}), ""),
        ((0, "moonlight", 1, {}), ""),
    ],
)
def test_evidence_fits_its_cause(culprit: tuple[int, str, int, Result], text: str) -> None:
    """Each cause has its own sentence; where the trace shows nothing there is none."""
    rank, cause, _, evidence = culprit
    assert sentences.evidence({"rank": rank, "cause": cause, "own_ns": 30 * MS, "evidence": evidence}, 3) == text


def test_lateness_has_every_rank_and_step() -> None:
    """Ranks that nobody waited for have a row of zeros."""
    late = by_rank.lateness(result_of())
    assert (late.ranks, late.steps) == (tuple(range(8)), (3, 4, 5))
    assert (sum(map(sum, late.ns)), late.ns[1][0]) == (8 * 24 * MS, 6 * 24 * MS)
    assert late.worst_first == [1, 2, 5]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {},
            "one host: clocks are shared; collectives end within 1.2 µs (median; p95 10.7 µs), none before its last "
            "participant arrived; waits by clocks and by durations alone differ by 5.0 µs (median)",
        ),
        (
            {"method": "collective_ends", "hosts": 2, "violations": 3, "max_drift_ppm": 2.34, "residual_p95_ns": 0}
            | {"clock_free_disagreement": None},
            "the clocks of 2 hosts are aligned on the ends of 28 collectives; collectives end together, 3 before its "
            "last participant arrived; clocks drift by up to 2.3 ppm",
        ),
        (
            {"method": "none", "hosts": 2, "evidence": 0, "clock_free_disagreement": None},
            "the clocks of 2 hosts could not be aligned: between hosts, waits are told from durations alone, and each "
            "rank's last step ends by itself",
        ),
    ],
)
def test_clocks_are_described(changed: Result, text: str) -> None:
    """One sentence has the method, how well it fits and what breaks it; without alignment it is a warning."""
    result = result_of()
    result["clock"] |= changed
    remark = next(row for row in remarks.quality(result) if row.text == text)
    assert remark.is_warning == (result["clock"]["method"] == "none")
    assert "Clocks" in [fact.name for fact in headline.facts(result)]


def test_hosts_that_no_evidence_ties_are_named() -> None:
    """Up to eight by name, the others by number; a single rank has no clocks to compare."""
    result = result_of()
    result["clock"] |= {"method": "collective_ends", "hosts": 11, "not_aligned": [f"n{host}" for host in range(10)]}
    warnings = [row.text for row in remarks.quality(result) if row.is_warning]
    assert "clocks not aligned with the first host's: n0, n1, n2, n3, n4, n5, n6, n7 and 2 others" in warnings
    assert not [row for row in remarks.quality(result_of(1)) if "clock" in row.text]


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (
            result_of(),
            "28.0 % MFU on 8 of 8 ranks, 3 steps: the largest losses are sub-roofline kernels (18.0 %, mostly matmul), "
            "exposed communication (18.0 %, mostly FSDP) and pipeline bubbles (14.0 %, mostly warm-up and drain).",
        ),
        (
            result_of(1, [7], mfu=False),
            "MFU unknown, compute takes 46.0 % of the step time on 1 of 8 ranks, 1 step: the largest losses are "
            "exposed communication (18.0 %, mostly FSDP), pipeline bubbles (14.0 %, mostly warm-up and drain) and "
            "recompute (12.0 %).",
        ),
    ],
)
def test_headline_names_the_number_and_the_largest_losses(result: Result, sentence: str) -> None:
    """One sentence has the number, what was measured, and up to three losses."""
    assert headline.headline(result) == sentence


@pytest.mark.parametrize(
    ("cause", "straggler_ms", "caused_ms", "named"),
    [
        ("host_pause", 30, 20, "stragglers (15.0 %, mostly rank 1: host pause)"),
        ("host_pause", 30, 14, "stragglers (15.0 %)"),  # less than half
        ("host_pause", 3, 3, None),  # too little to matter
        ("slow_gpu", 30, 15, "stragglers (15.0 %, mostly rank 1: slow GPU)"),  # half of the waits: one is its own
    ],
)
def test_headline_names_the_rank_behind_most_waits(
    cause: str, straggler_ms: int, caused_ms: int, named: str | None
) -> None:
    """Stragglers of two percent and more are named by the culprit of at least half of the waits."""
    result = result_of()
    result["job"]["buckets"]["straggler"] = straggler_ms * MS * 24
    row = next(row for row in result["job"]["waterfall"] if row["row"] == "straggler")
    row["share"] = -straggler_ms / 200
    result["job"]["leaves"] = [{"bucket": "straggler", "leaf": "slow_gpu", "ns": MS * 24, "share": 0.005}]
    result["job"]["leaves"] += [{"bucket": "straggler", "leaf": "jitter", "ns": MS, "share": 0.0}]
    result["stragglers"] = [result["stragglers"][0] | {"cause": cause, "caused_ns": caused_ms * MS * 24}]
    assert (named or "mostly rank") in headline.headline(result) or named is None
    assert ("mostly rank" in headline.headline(result)) == bool(named and "mostly rank" in named)


def test_mixed_peak_is_named() -> None:
    """MFU of several element types says so, and each has its peak."""
    result = result_of()
    result["job"]["mixed_peak"] = True
    result["model"]["peak"]["mixed"] = {
        "bf16": {"share": 0.75, "tflops": 989.4},
        "fp8": {"share": 0.25, "tflops": 1978.9},
    }
    assert headline.headline(result).startswith("28.0 % MFU of mixed peak on 8 of 8 ranks")
    fact = next(fact for fact in factors.model(result) if fact.name == "MFU of mixed peak")
    assert fact.source == "bf16 989.4 TFLOP/s (75.0 %), fp8 1,978.9 TFLOP/s (25.0 %)"


def test_headline_says_first_that_it_cannot_be_trusted() -> None:
    """An unreliable result begins with that, and why."""
    start = "Attribution not reliable (4.1 % of the time is unattributed): 28.0 % MFU on 8 of 8 ranks"
    assert headline.headline(result_of(reliable=False)).startswith(start)


def test_a_job_without_losses_has_none_in_its_headline() -> None:
    """Nothing is named a loss that is below one percent."""
    result = result_of()
    result["job"] |= {
        "mfu": 1.0,
        "leaves": [],
        "waterfall": [{"row": "peak", "share": 1.0}, {"row": "mfu", "share": 1}],
    }
    assert headline.headline(result) == "100.0 % MFU on 8 of 8 ranks, 3 steps."


def test_bare_result_has_no_rows_for_what_it_does_not_hold() -> None:
    """What a result does not say is not shown, by any report."""
    bare = {"job": result_of()["job"]}
    assert (by_rank.ranks(bare), kernels.kernels(bare), traffic.collectives(bare), factors.model(bare)) == (
        [],
        [],
        [],
        [],
    )
    assert (culprits.culprits(bare), culprits.slow_links(bare), by_rank.lateness(bare).ranks) == ([], [], ())
    assert culprits.caused_by(bare, 12) == [culprits.PartRow("slow GPUs: own excess", 24 * MS, 0.005, MS)]
    assert remarks.quality(bare) == []
    assert (behind.host_gaps(bare), behind.host_facts(bare), behind.throughput(bare)) == ([], [], [])
    assert (behind.recompute(bare), kernels.kernel_facts(bare), kernels.roofline(bare)) == (None, [], None)
    assert (advice.findings(bare), advice.checklist(bare), advice.record_next(bare)) == ([], [], None)
    ids = re.findall(r'<section id="([a-z-]+)"', to_html(bare))
    assert ids == ["waterfall", "numbers", "definitions"]


def test_rows_are_in_the_order_of_what_they_cost() -> None:
    """Collectives by exposure, kernels by time, ranks by what they achieve."""
    result = result_of(20)
    assert [row.dim for row in traffic.collectives(result)] == ["fsdp", "tp"]
    assert [row.busbw_gbps for row in traffic.collectives(result)] == [301.25, None]
    assert [row.transfer_estimate_ns for row in traffic.collectives(result)] == [None, 150 * MS]
    assert [row.family for row in kernels.kernels(result)] == ["matmul", "attention"]
    assert kernels.kernels(result)[0].flop_per_s == pytest.approx(1.1e15 / 1.6)
    assert [gap.rank for gap in behind.host_gaps(result)] == [3, 2]
    assert [row.rank for row in by_rank.worst_ranks(result, 3)] == [19, 18, 17]


def test_gaps_are_named_by_call_place_and_rank() -> None:
    """Wrappers and marks around a name go, the whole name stays beside it; what idled nobody has no row."""
    first, second = behind.host_gaps(result_of())
    assert (first.title, first.call, first.where) == (
        "data loader",
        "_MultiProcessingDataLoaderIter.__next__",
        "forward",
    )
    assert (first.ns, first.share, first.count, first.longest_ns) == (120 * MS, 0.025, 5, 20 * MS)
    assert (second.title, second.call, second.where) == ("launch-bound", "MmBackward0", "")
    assert second.full_call == "autograd::engine::evaluate_function: MmBackward0"
    assert words.gap_title("not_started") == "launched, not started"
    assert words.gap_title("coffee_break") == "coffee break"


def test_each_cause_of_host_gaps_has_its_facts_in_a_line() -> None:
    """Causes without facts, and those of a later version, have no line."""
    assert {fact.name: fact.value for fact in behind.host_facts(result_of())} == {
        "Data loader": "the loader's workers are slow and copies of inputs are slow; the GPU waited 120.0 ms for "
        "batches; 2.0 ms for copies of inputs; 1 copy from pageable memory (1.00 MB)",
        "Checkpoint": "the GPU waited 30.0 ms; 3 runs of copies to the host of 4.00 GB, 2 asynchronous",
        "Garbage collection": "1 collection of 6.0 ms; the GPU waited 5.0 ms",
        "Allocator": "12 allocations and 1 free by the driver, 2 of them after the first step, where none is needed; "
        "1 retry after memory ran out; 70.00 GB reserved at the peak, 12.5 % of it unused (fragmentation)",
        "Host syncs": "44 waits of the host for the GPU (11.0 a step of the rank with most), which idled 48.0 ms "
        "behind them",
        "Launch-bound": "the GPU waited 48.0 ms for launches; CUDA graphs would win at most 96.0 ms, 2.0 % of the "
        "step time; 65,536 tokens a step",
        "Optimizer": "fused and loop, 1 kernel a step",
        "Unattributed": "4.0 ms: launched, and nothing recorded ran; 1.0 ms: no launch record",
        "Profiler": "a step takes 200.0 ms with it and 160.0 ms without (run.json): +25.0 %",
    }


def test_throughput_says_how_the_gpus_were_fed() -> None:
    """Figures without evidence are left out."""
    result = result_of()
    assert [(fact.name, fact.value) for fact in behind.throughput(result)] == [
        ("Kernels a step", "685 (1.6 a millisecond)"),
        ("Median kernel", "309 µs; a launch every 618 µs, 2.00x as long"),
        ("From launch to start", "p50 447 µs, p90 900 µs, p99 990 µs"),
        ("Queue", "766.9 launches deep, 2,052 at most, empty 0.7 % of the time"),
    ]
    result["throughput"] = dict.fromkeys(result["throughput"]) | {"launch_delay_ns": dict.fromkeys(("p50", "p99"))}
    assert behind.throughput(result) == []


def test_recompute_says_what_it_costs_and_how_it_is_known() -> None:
    """A suspicion stands apart, and alone where nothing else was found."""
    result = result_of()
    found = behind.recompute(result)
    assert found is not None
    assert [(fact.name, fact.value) for fact in found.facts] == [
        ("Cost", "12.0 % of the step time, 6.0 ms of it communication"),
        ("MFU without it", "+3.8 points"),
        ("Setting", "full, non-reentrant, 576 regions"),
        ("Ran again", "95.0 % of the forward's matmul and attention kernels"),
        ("Known from", "sequence numbers of operators inside the backward"),
        ("Modules", ", ".join(f"layers.{number}" for number in range(12)) + " and 2 others"),
    ]
    assert found.suspected == "operators that only a forward calls; at least 2.0 % of the step time, +0.6 points"
    result["recompute"]["share"] = 0.0
    assert behind.recompute(result) == behind.Recompute([], found.suspected)
    assert "suspected, not counted" in to_html(result)
    assert behind.recompute_line(result) == ""
    result["recompute"]["suspected"] = None
    assert behind.recompute(result) is None
    assert '<section id="recompute"' not in to_html(result)


def test_kernels_stand_against_their_roofs() -> None:
    """Rates are of the runs whose work is known; the whole name stays beside the short one."""
    result = result_of()
    first, second = kernels.kernels(result)
    assert (first.short_name, first.bound, first.roof_share, first.headroom) == (
        "nvjet_hsh_128x256_64x4",
        "compute",
        0.695,
        0.1,
    )
    assert first.byte_per_s == pytest.approx(1e12)
    assert (second.bound, second.flop_per_s, second.byte_per_s) == ("", None, None)
    result["kernels"][1]["known_share"] = 0.5
    assert kernels.kernels(result)[0].byte_per_s == pytest.approx(2e12)
    assert [(fact.name, fact.value) for fact in kernels.kernel_facts(result)] == [
        ("FLOPs or bytes known", "for 87.0 % of the compute time"),
        ("Share of the roof", "matmul 69.5 %, device copies 80.0 %"),
        ("Without matrix units", "6.2 % of the time of matrix products"),
        ("Ran in pieces", "attention (8 softmax kernels, 1.0 ms)"),
    ]


def test_roofline_has_kernels_with_flops_and_bytes() -> None:
    """Each element type has its peak; without kernels to place there is no figure."""
    result = result_of()
    result["model"]["peak"]["mixed"] = {"fp8": {"share": 0.4, "tflops": 1978.9}, "int4": {"share": 0, "tflops": None}}
    found = kernels.roofline(result)
    assert found is not None
    assert (found.byte_per_s, found.peaks) == (3350e9, {"bf16": 989.4e12, "fp8": 1978.9e12})
    assert [(point.family, round(point.flop_per_byte, 1)) for point in found.points] == [("matmul", 687.5)]
    assert kernels.roofline(result | {"kernels": result["kernels"][:1]}) is None
    axes = figures.roofline(result)
    texts = [text.get_text().strip() for text in axes.texts]
    assert texts == ["bf16 989.4 TFLOP/s", "fp8 1,978.9 TFLOP/s", "3,350 GB/s", "nvjet_hsh_128x256_64x4"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_quality_lists_warnings_before_notes_and_joins_ranks() -> None:
    """The same step left out on several ranks is one remark."""
    found = remarks.quality(result_of())
    assert [row.is_warning for row in found] == sorted((row.is_warning for row in found), reverse=True)
    assert "step 2 left out on ranks 0 to 2, 5: cut by the profiler" in [row.text for row in found]


def test_unknown_bucket_and_leaf_keep_their_own_names() -> None:
    """A result of a later version is still readable."""
    assert words.bucket_words("cosmic_rays").title == "cosmic rays"
    assert words.leaf_title("host_gap", "coffee_break") == "coffee break"
    assert words.cause_title("solar_flare") == "solar flare"


def test_every_leaf_of_the_attribution_has_words() -> None:
    """Each leaf is described in its bucket, and no title of a bucket's leaves occurs twice."""
    for leaf in Leaf:
        assert leaf.label in words.BUCKETS[leaf.bucket].leaves
    for bucket in words.BUCKETS.values():
        assert len({leaf.title for leaf in bucket.leaves.values()}) == len(bucket.leaves)
    for same in ("slow_gpu", "slow_link", "jitter"):
        assert words.CAUSES[same].title == words.BUCKETS["straggler"].leaves[same].title


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formats.percent(-0.0), "0.0 %"),
        (formats.percent(1), "100.0 %"),
        (formats.percent(0.0004), "<0.1 %"),
        (formats.milliseconds(1_234_567), "1.235 ms"),
        (formats.quantity(1_234_000, "B"), "1.23 MB"),
        (formats.numbers([]), ""),
        (formats.duration(99_960), "100 µs"),
        (formats.duration(999_600), "1.0 ms"),
        (formats.kernel_title("void <unnamed>::f<g>(h)"), "f"),
        (formats.kernel_title("(lambda)"), "(lambda)"),
        (formats.numbers([7, 5, 6, 1]), "1, 5 to 7"),
        (formats.clean("a\u202eb\x00c"), "a\ufffdb\ufffdc"),
        (terminal.bar(0.5, 0.5001, 4), "  ▌ "),
        (terminal.bar(1.0, 0.9999, 4), "   ▐"),
    ],
)
def test_formats(written: str, expected: str) -> None:
    """Numbers, foreign text and bars are written as expected."""
    assert written == expected


def test_findings_say_what_they_cost_and_where_to_see_it() -> None:
    """Largest first; the time is a mean in a step of a rank; anchors differ even where ids do not."""
    result = result_of()
    result["findings"][1]["id"] = result["findings"][0]["id"]
    first, second, *_, last = advice.findings(result)
    assert (first.title, first.step_ns, first.share) == ("About exposed-comm.fsdp-prefetch", 25 * MS, 0.125)
    assert first.mfu_points == pytest.approx(28 * (1 / 0.875 - 1))
    assert first.evidence[0].length == "20.0 ms"
    assert first.anchor == "finding-1-exposed-comm-fsdp-prefetch" != second.anchor
    assert (last.ns, last.mfu_points, last.evidence) == (0, None, ())


def test_checks_of_unknown_status_are_unknown() -> None:
    """A status that no report knows is no praise."""
    result = result_of()
    result["checklist"][0]["status"] = "splendid"
    first, second, *_ = advice.checklist(result)
    assert (first.status, second.status, second.record_next) == ("unknown", "unknown", "profile_memory=True")
    assert [row.text for row in advice.walk_through(result)] == ["told 1", "told 2", "told 3"]


def test_code_to_record_next_keeps_its_lines() -> None:
    """Line breaks and indents stay, control characters do not."""
    found = advice.record_next({"record_next": {"text": None, "snippet": "a:\n\tb\x1b"}})
    assert found == advice.RecordNext("", "a:\n    b\ufffd")


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        ("Short.", "Short."),
        ("", "why recompute.full"),
        (
            "First do this" + " and that" * 13 + ". Then do the other thing, and more.",
            "First do this" + " and that" * 13 + ".",
        ),
        ("word " * 60, ("word " * 60)[:149] + "…"),
    ],
)
def test_first_step_is_what_a_glance_takes_in(action: str, shown: str) -> None:
    """Whole sentences where they fit, else the beginning; the summary where nothing can be done."""
    result = result_of()
    result["findings"][1]["action"] = action
    assert advice.findings(result)[1].first_step == shown
