"""What is likely wrong where declared model FLOPs and the traces contradict each other."""

from collections.abc import Mapping

import numpy as np

from traceaudit.mfu.model import Numerator, Peak

APART = 0.10  # declared over counted FLOPs, beyond which a warning names the difference
SEEN = 0.01  # of the compute time recomputed, from which recompute is on
NEAR = 0.15  # of a whole ratio, within which it is taken for the cause


def too_much_declared(
    step: int, needed: int, available: int, model: Numerator, peak: Peak, counted: float, world_size: int
) -> str:
    """Return why a step's declared FLOPs cannot be right: they need more time at peak than the ranks computed."""
    ratio = needed / max(available, 1)
    factors = ", ".join(f"{name} = {value:g} ({source})" for name, value, source in model.factors)
    return (
        f"step {step}: the declared FLOPs need {needed / 1e6:.3f} ms at the peak of {peak.tflops[peak.dtype]:g} "
        f"TFLOP/s {peak.dtype} ({peak.source}), but the traced ranks computed only {available / 1e6:.3f} ms without "
        f"recompute: {ratio:.2f} times too much, an MFU above 100 % of the compute time. Likely: "
        f"{_likely(ratio, model, peak, counted, world_size)}. Check {factors}; is the peak dense, do the tokens count "
        "one optimizer step of the whole job, and is the model the one that was traced?"
    )


def _likely(ratio: float, model: Numerator, peak: Peak, counted: float, world_size: int) -> str:
    """Return the mistake that explains the ratio best; the counted FLOPs of the job decide where they are known."""
    beyond = model.flops / counted if counted > 0 else None
    faster = [dtype for dtype, rate in peak.tflops.items() if rate >= ratio * peak.tflops[peak.dtype]]
    if beyond is not None and world_size > 1 and abs(beyond / world_size - 1) < NEAR:
        return f"the tokens were multiplied by the {world_size:,} ranks once too often"
    if beyond is not None and abs(beyond - 1) < APART and faster:
        return f"the wrong element type: the shapes agree with the FLOPs, which fit at the {faster[-1]} peak"
    if beyond is not None and abs(beyond - 1) < APART:
        return "the wrong peak: the shapes agree with the declared FLOPs"
    if beyond is not None and beyond > 1 + APART:
        return (
            f"wrong params or tokens: the shapes give {counted:.4g} FLOPs a step, {beyond:.2f} times less than "
            "declared (tokens of several steps or of another job, or all experts instead of the active ones?)"
        )
    return "tokens of more than one step, all experts instead of the active ones, or the peak of another element type"


def counted_beyond_declared(
    model: Numerator, counted: Mapping[int, float], attention: float, scale: float, *, covered: bool
) -> list[str]:
    """Return a warning if declared FLOPs differ from those counted on the traced ranks, scaled to the job.

    Attention kernels count only if the declared formula has attention (`attention`: their share). Where not all matrix
    kernels are counted (`covered`), more declared than counted FLOPs are no contradiction.
    """
    steps = [flops for flops in counted.values() if flops > 0]
    if not steps:
        return []
    job = float(np.median(steps)) * scale * (1.0 if model.attention else 1.0 - attention)
    off = model.flops / job - 1 if job else 0.0
    if abs(off) <= APART or (off > 0 and not covered):
        return []
    why = "params or tokens declared too high" if off > 0 else "params or tokens declared too low"
    return [
        f"the declared {model.flops:.4g} FLOPs a step differ by {off:+.1%} from the {job:.4g} that the shapes in the "
        f"traces give ({model.formula}): {why}, or a model that is not the traced one; the declared ones rule"
    ]


def recompute_differs(model: Numerator, recomputed_ns: int, own_ns: int) -> list[str]:
    """Return a warning if recompute was seen and not declared, or declared and not seen."""
    share = recomputed_ns / max(recomputed_ns + own_ns, 1)
    stated = model.recompute
    if share > SEEN and stated in ("none", "False"):
        return [f"recompute is declared as none, yet {share:.1%} of the compute time is recompute; MFU leaves it out"]
    if share <= SEEN and stated in ("full", "selective"):
        return [f"recompute is declared as {stated}, yet {share:.1%} of the compute time was seen to be recompute"]
    return []
