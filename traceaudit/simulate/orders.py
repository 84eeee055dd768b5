"""The orders in which a rank of a pipeline works through the micro-batches of a step.

A rank at position r of p holds the stages r, r + p, r + 2p, ... of the model: its chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from traceaudit.simulate.job import Task
from traceaudit.simulate.recording import SimulationError


def alternating(forwards: Sequence[Task], backwards: Sequence[Task], ahead: int) -> list[Task]:
    """Return some forwards ahead, then a forward and a backward in turn, then the backwards that are left."""
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + list(backwards[len(forwards) - ahead :])


def tasks(stage: int, kind: str, microbatches: int) -> list[Task]:
    """Return the work of one kind on all micro-batches."""
    return [Task(stage, kind, index) for index in range(microbatches)]


def one_f_one_b(position: int, ranks: int, microbatches: int, chunks: int = 1) -> list[Task]:
    """Return 1F1B: as many forwards ahead as there are stages to come.

    >>> " ".join(map(str, one_f_one_b(0, 2, 3)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    one_chunk(chunks)
    forwards, backwards = tasks(position, "F", microbatches), tasks(position, "B", microbatches)
    return alternating(forwards, backwards, min(ranks - position - 1, microbatches))


def gpipe(position: int, _ranks: int, microbatches: int, chunks: int = 1) -> list[Task]:
    """Return GPipe: all forwards, then all backwards.

    >>> " ".join(map(str, gpipe(1, 2, 2)))
    '1F0 1F1 1B0 1B1'
    """
    one_chunk(chunks)
    return [*tasks(position, "F", microbatches), *tasks(position, "B", microbatches)]


def interleaved(position: int, ranks: int, microbatches: int, chunks: int) -> list[Task]:
    """Return interleaved 1F1B: each chunk takes as many micro-batches as there are ranks, then the next has its turn.

    >>> " ".join(map(str, interleaved(1, 2, 2, 2)))
    '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """
    if microbatches % ranks:
        raise SimulationError(f"an interleaved schedule of {ranks} ranks cannot take {microbatches} micro-batches")
    turns = [
        (chunk, first + index)
        for first in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for index in range(ranks)
    ]
    forwards = [Task(position + chunk * ranks, "F", index) for chunk, index in turns]
    backwards = [Task(position + (chunks - 1 - chunk) * ranks, "B", index) for chunk, index in turns]
    ahead = 2 * (ranks - position - 1) + (chunks - 1) * ranks
    return alternating(forwards, backwards, min(ahead, len(forwards)))


def zero_bubble(position: int, ranks: int, microbatches: int, chunks: int = 1) -> list[Task]:
    """Return ZB-H1: 1F1B with the backward split; the gradients of weights fill what would be waits at the end.

    A rank puts off as many of them as there are stages before it.

    >>> " ".join(map(str, zero_bubble(1, 2, 3)))
    '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2'
    """
    one_chunk(chunks)
    forwards, inputs = tasks(position, "F", microbatches), tasks(position, "I", microbatches)
    weights, order = count(), []
    for task in alternating(forwards, inputs, min(ranks - position - 1, microbatches)):
        order.append(task)
        if task.kind == "I" and task.microbatch >= position:
            order.append(Task(position, "W", next(weights)))
    return order + [Task(position, "W", index) for index in range(next(weights), microbatches)]


def one_chunk(chunks: int) -> None:
    """Raise where a schedule of one stage a rank is asked for more."""
    if chunks != 1:
        raise SimulationError(f"only the interleaved schedule takes {chunks} stages a rank")


Order = Callable[[int, int, int, int], list[Task]]  # of position, ranks, micro-batches and chunks
ORDERS: Mapping[str, Order] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
