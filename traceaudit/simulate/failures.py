"""A run under exponential failures, played attempt by attempt: what the exact formula must agree with."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Played:
    """Wall time over useful work, and the standard error of that."""

    wall_over_useful: float
    standard_error: float
    failures: int


def play(
    interval_s: float, pause_s: float, restart_s: float, mtbf_s: float, *, checkpoints: int = 100_000, seed: int = 0
) -> Played:
    """Take so many checkpoints; an attempt that a failure cuts short is lost, and the next one restarts first.

    A failure may come at any time, also in a pause or a restart. Only draws and comparisons: no formula is used.
    """
    random = np.random.default_rng(seed)
    wall = np.zeros(checkpoints)
    pending = np.arange(checkpoints)
    needed = interval_s + pause_s
    failures = 0
    while len(pending):
        until_failure = random.exponential(mtbf_s, len(pending))
        done = until_failure >= needed
        wall[pending] += np.where(done, needed, until_failure)
        pending = pending[~done]
        failures += len(pending)
        needed = restart_s + interval_s + pause_s
    ratio = wall / interval_s
    return Played(float(ratio.mean()), float(ratio.std(ddof=1) / np.sqrt(checkpoints)), failures)
