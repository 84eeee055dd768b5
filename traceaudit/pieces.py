"""The base states of a rank as pieces in time that have a leaf, or a family of kernels, already: fine, and coarse."""

import numpy as np
import numpy.typing as npt
import pandas as pd

from traceaudit.classify import State
from traceaudit.intervals import Intervals, cross
from traceaudit.leaves import Leaf
from traceaudit.steps import Steps

COARSE_BINS = 512
COMMUNICATING = 255  # what a collective, or idle time charged to one, counts as: only the job can tell its leaf

COLUMNS = ("step", "start_ns", "end_ns", "leaf", "name")


def decided_pieces(
    events: pd.DataFrame,
    table: pd.DataFrame,
    pieces: pd.DataFrame,
    idle: pd.DataFrame,
    steps: Steps,
    again: npt.NDArray[np.bool_],
) -> pd.DataFrame:
    """Return the pieces of a rank that no communication owns, cut at the windows, with the columns `COLUMNS`.

    ``leaf`` of compute is the family of its kernel, or `Leaf.KERNELS` where it was recomputed. ``name`` is that of the
    kernel or copy; of idle time that of the activity that ended it, "" where none did.
    """
    owned = _owned(table, pieces, idle, again)
    owned = owned[owned["leaf"].to_numpy() != COMMUNICATING]
    cut = cross(Intervals(owned["start_ns"].to_numpy(), owned["end_ns"].to_numpy()), steps.windows)
    names = np.append(events["name"].cat.categories.to_numpy(dtype=object), "")
    codes = np.append(events["name"].cat.codes.to_numpy()[table["row"].to_numpy()], -1)
    found = pd.DataFrame(
        {
            "step": steps.step[cut.right],
            "start_ns": cut.start,
            "end_ns": cut.end,
            "leaf": owned["leaf"].to_numpy()[cut.left],
            "name": names[codes[owned["activity"].to_numpy()[cut.left]]],
        },
        columns=list(COLUMNS),
    )
    return found.sort_values("start_ns", kind="stable", ignore_index=True)


def coarse(
    table: pd.DataFrame, pieces: pd.DataFrame, idle: pd.DataFrame, steps: Steps, again: npt.NDArray[np.bool_]
) -> tuple[int, npt.NDArray[np.uint8]]:
    """Return one step of a rank, the middle one, as `COARSE_BINS` equal bins: what took the most time of each.

    The codes are those of ``leaf`` in `decided_pieces`, and `COMMUNICATING`.
    """
    middle = len(steps.step) // 2
    start, end = (int(edge[middle]) for edge in steps.windows)
    owned = _owned(table, pieces, idle, again)
    owned = owned[(owned["end_ns"].to_numpy() > start) & (owned["start_ns"].to_numpy() < end)]
    edges = start + np.arange(COARSE_BINS + 1) * (end - start) // COARSE_BINS
    cut = cross(Intervals(owned["start_ns"].to_numpy(), owned["end_ns"].to_numpy()), Intervals(edges[:-1], edges[1:]))
    codes, leaf = np.unique(owned["leaf"].to_numpy()[cut.left], return_inverse=True)
    ns = np.zeros((COARSE_BINS, max(len(codes), 1)), np.int64)
    np.add.at(ns, (cut.right, leaf), cut.end - cut.start)
    codes = codes if len(codes) else np.array([Leaf.OTHER], np.uint8)
    return int(steps.step[middle]), codes[np.argmax(ns, axis=1)].astype(np.uint8)


def _owned(table: pd.DataFrame, pieces: pd.DataFrame, idle: pd.DataFrame, again: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """Return ``start_ns, end_ns, leaf, activity`` of all base states; ``activity`` is -1 where no activity names it."""
    computing = pieces[pieces["state"] == State.COMPUTE]
    owner = computing["owner"].to_numpy()
    carrying = pieces[pieces["state"] == State.COMMUNICATION]
    parts = (
        (computing, np.where(again[owner], int(Leaf.KERNELS), table["family"].to_numpy()[owner]), owner),
        (carrying, np.full(len(carrying), COMMUNICATING), carrying["owner"].to_numpy()),
        (
            idle,
            np.where(idle["after"].to_numpy() >= 0, COMMUNICATING, idle["leaf"].to_numpy()),
            idle["ender"].to_numpy(),
        ),
    )
    return pd.DataFrame(
        {
            "start_ns": np.concatenate([part["start_ns"].to_numpy() for part, _, _ in parts]),
            "end_ns": np.concatenate([part["end_ns"].to_numpy() for part, _, _ in parts]),
            "leaf": np.concatenate([leaf for _, leaf, _ in parts]).astype(np.uint8),
            "activity": np.concatenate([activity for _, _, activity in parts]).astype(np.int64),
        }
    )
