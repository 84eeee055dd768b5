"""``traceaudit inventory``: the bytes of a run on one GPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from traceaudit.cli.earlier_result import read_earlier, result_option
from traceaudit.cli.exits import reported
from traceaudit.cli.outputs import Pictured, pictured

if TYPE_CHECKING:
    from traceaudit.inventory import Plan

GB = 1e9


@click.command()
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="run.json, config.json, ..."
)
@click.option("--params", type=float, help="Parameters of the model, e.g. 70e9.")
@click.option("--layers", type=int, help="Layers.")
@click.option("--hidden", type=int, help="Hidden size.")
@click.option("--heads", type=int, help="Attention heads.")
@click.option("--kv-heads", type=int, help="Heads of keys and values, for the KV cache.")
@click.option("--seq-len", type=int, help="Sequence length.")
@click.option("--vocab", type=int, help="Vocabulary, for the logits.")
@click.option("--microbatch", type=int, help="Sequences of a micro-batch.  [default: 1]")
@click.option("--states", help="Optimizer: adam, adam-fp32-grads, adam-8bit, adam-fp32, momentum, ...  [default: adam]")
@click.option("--tp", type=int, help="Degree of tensor parallelism.")
@click.option("--pp", type=int, help="Degree of pipeline parallelism.")
@click.option("--dp", type=int, help="Degree of data parallelism.")
@click.option("--cp", type=int, help="Degree of context parallelism.")
@click.option("--virtual-stages", type=int, help="Stages of the pipeline on a rank.")
@click.option("--microbatches", type=int, help="Micro-batches of a step.")
@click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="Norms split over TP.  [default: no]")
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage over DP and CP; 3 is FSDP.  [default: 0]")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]), help="Recompute.  [default: none]")
@click.option("--kv-tokens", type=int, help="Tokens in a KV cache of two bytes a value.")
@click.option("--gpu-memory", type=float, metavar="GB", help="Memory of one GPU, 1e9 bytes.")
@result_option(", for measured memory and recompute.")
@click.option("--trace", help="Traces with memory events, for measured memory.")
@pictured
def inventory(
    config: Path | None,
    result_path: Path | None,
    trace: str | None,
    gpu_memory: float | None,
    outputs: Pictured,
    **sizes: Any,  # noqa: ANN401  the options
) -> None:
    """Fit before fast: the bytes of a run on one GPU, and what to divide by what to fit.

    Example: traceaudit inventory --config config.json --seq-len 8192 --tp 8 --dp 64 --zero 1 --gpu-memory 80
    """
    with reported():
        from traceaudit import inventory as inventories
        from traceaudit.report.inventory import lines, picture

        outputs.check()
        seen, memory = _measured(result_path, trace)
        room = gpu_memory * GB if gpu_memory else memory
        found = inventories.inventory(_plan(config, sizes), room, seen)
        outputs.give(found, lines(found), lambda: picture(found))


def _plan(config: Path | None, sizes: Mapping[str, Any]) -> "Plan":
    """Return the plan that a file and the options declare; an option beats the file."""
    from traceaudit.inventory import plan_of
    from traceaudit.mfu.model import declared

    run = declared([config] if config else [], sizes)
    plan = plan_of({**run.values, **run.degrees()})
    if plan is None:
        raise click.UsageError("pass --params, or a --config that tells the parameters")
    return plan


def _measured(result_path: Path | None, trace: str | None) -> tuple[dict[str, Any] | None, float | None]:
    """Return what was measured of memory, and the memory of the GPU where a trace names it."""
    from traceaudit.inventory import seen_in

    result = read_earlier(result_path)
    if trace is None:
        return (seen_in(result), None) if result is not None else (None, None)
    from traceaudit.reading.normalise import read_trace
    from traceaudit.reading.sources import find

    allocated, reserved, room = 0, 0, 0
    for source in find([trace]):
        found = read_trace(source.place)
        if len(found.memory):
            allocated = max(allocated, int(found.memory["allocated"].max()))
            reserved = max(reserved, int(found.memory["reserved"].max()))
        device = found.origin.device
        room = max(room, device.memory_bytes if device is not None else 0)
    peaks = {"allocated_peak_bytes": allocated or None, "reserved_peak_bytes": reserved or None}
    share = seen_in(result)["recompute_share"] if result is not None else None
    return {**peaks, "recompute_share": share}, room or None
