"""Trains a small transformer on two CPU processes over gloo and records it; started by tests as a program.

``python -m tests.cpu_job`` reads jobs from standard input, a JSON list a line: directory, kind of parallelism, faults
to plant. It answers each with the ranks' exit codes.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import traceaudit as ta
import traceaudit.capture  # before the ranks are forked, which would each import it

WORLD = 2
VOCAB, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 128, 4, 4, 64, 8
TOKENS = BATCH * LENGTH * WORLD  # of a step where each rank is a replica
SKIP, TIMED, WARMUP, STEPS = 1, 2, 1, 3
MICROBATCHES = 4
PAUSE, LATE_PAUSE = 0.15, 0.4  # seconds that a data set and a rank pause: much longer than a busy machine's jitter
LATE_RANK = 1
HEAVIER = 6  # times the layers of the other stages


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        """Make the weights."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer of ``batch x length x width``."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        fed: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + fed


class Transformer(nn.Module):
    """Layers of a transformer, with the embedding before the first and the head behind the last where asked for."""

    def __init__(self, layers: int = LAYERS, *, first: bool = True, last: bool = True, again: bool = False) -> None:
        """Make the layers; `again` checkpoints each."""
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH) if first else None
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False) if last else None
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of tokens, or activations."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x if self.head is None else self.head(x)


class Tokens(Dataset[Tensor]):
    """Random sequences; each batch takes `pause` seconds."""

    def __init__(self, pause: float) -> None:
        """Keep the pause."""
        self.pause = pause

    def __len__(self) -> int:
        """Return more than a job takes."""
        return 1000 * BATCH

    def __getitem__(self, index: int) -> Tensor:
        """Return a sequence."""
        time.sleep(self.pause / BATCH)
        return torch.full((LENGTH + 1,), index % VOCAB)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a batch."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def replicas(kind: str, faults: list[str]) -> tuple[Any, Callable[[Tensor], None]]:
    """Return the model of a data-parallel job, and its forward and backward."""
    model: Any = Transformer(again="checkpoint" in faults)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def run(batch: Tensor) -> None:
        loss: Any = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()

    return model, run


def pipeline(kind: str, faults: list[str]) -> tuple[list[Any], Callable[[Tensor], None]]:
    """Return a rank's stages of a pipeline, and its forward and backward; a planted imbalance gives stage 1 more."""
    rank = dist.get_rank()
    virtual = 2 if kind == "interleaved" else 1
    number = WORLD * virtual
    layers = [LAYERS // number] * number
    if "imbalance" in faults:
        layers[LATE_RANK] *= HEAVIER
    places = [rank + WORLD * turn for turn in range(virtual)]
    again = "checkpoint" in faults
    stages: list[Any] = [
        PipelineStage(
            Transformer(layers[place], first=place == 0, last=place == number - 1, again=again),
            place,
            number,
            torch.device("cpu"),
        )
        for place in places
    ]
    schedule: Any
    if virtual > 1:
        schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
    else:
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stages[0], MICROBATCHES, loss_fn=loss_of)

    def run(batch: Tensor) -> None:
        if rank == 0:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, 1:])

    return stages, run


def train(rank: int, directory: str, kind: str, faults: list[str]) -> None:
    """Train a few steps on one rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    piped = kind in ("gpipe", "1f1b", "interleaved")
    model: Any
    model, run = (pipeline if piped else replicas)(kind, faults)
    modules = [stage.submod for stage in model] if piped else [model]
    optimizer = torch.optim.AdamW([weight for module in modules for weight in module.parameters()], foreach=False)
    batches: Iterator[Tensor] = iter(DataLoader(Tokens(PAUSE if "loader" in faults else 0), batch_size=BATCH))
    lines: list[str] = []
    with ta.capture(
        f"{directory}/traces",
        model=model,
        tokens_per_step=TOKENS // WORLD if piped else TOKENS,
        seq_len=LENGTH,
        microbatches=MICROBATCHES if piped else None,
        skip=SKIP,
        timed=TIMED,
        warmup=WARMUP,
        steps=STEPS,
        log=lines.append,
    ) as recorder:
        for _ in range(SKIP + TIMED + WARMUP + STEPS):
            batch = next(batches)
            if "late" in faults and rank == LATE_RANK:
                time.sleep(LATE_PAUSE)
            run(batch)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    Path(directory, f"lines{rank}.json").write_text(json.dumps(lines))
    dist.barrier()
    dist.destroy_process_group()


def run(directory: str, kind: str, *faults: str) -> list[int | None]:
    """Run the ranks of a job and return their exit codes."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    ranks = [context.Process(target=train, args=(rank, directory, kind, list(faults))) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return codes


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), flush=True)
