"""Training logs with known faults: what `traceaudit norms` must find, and clean ones in which there is nothing.

Loss: a power law of the step (Kaplan et al. 2020, arXiv 2001.08361) with multiplicative noise, correlated from row to
row in some seeds and with heavier tails in others; gradient norms are log-normal. Both are noisier in the warm-up.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

WARM_UP = 100
FAULTS = ("spike", "double", "divergence", "drift", "restart", "lr_jump", "nan", "scale_collapse")


@dataclass(frozen=True)
class Planted:
    """A log and what is wrong with it: ``kind`` and the steps from ``start`` on; nothing for a clean one."""

    table: pd.DataFrame
    kind: str
    starts: tuple[int, ...]
    end: int


def training_log(seed: int, fault: str = "", rows: int = 1_200) -> Planted:
    """Return a simulated log; without a fault it may still have been resumed, or have had its learning rate raised."""
    random = np.random.default_rng(seed)
    step = np.arange(1, rows + 1)
    lr = 3e-4 * np.minimum(step / WARM_UP, 0.55 + 0.45 * np.cos(np.pi * np.clip(step / rows, 0, 1)))
    sigma, noise = _noise(random, rows)
    loss = (1.7 + 9.0 * (step + 8.0) ** -0.35) * (1 + sigma * noise)
    wild = 1 + 2 * np.exp(-step / 40)
    grad = np.exp(np.log(0.35 + 6 / (step + 10.0)) + 0.12 * wild * random.standard_normal(rows))
    scale = np.full(rows, 65_536.0)
    logits = 12 * (1 - np.exp(-step / 300)) + 0.3 * random.standard_normal(rows) + 3
    table = pd.DataFrame(
        {
            "step": step,
            "loss": loss,
            "grad_norm": grad,
            "lr": lr,
            "loss_scale": scale,
            "tokens": step * 4_194_304,
            "max_attention_logit": logits,
        }
    )
    if not fault:
        return Planted(_unharmed(table, random), "", (), rows)
    at = int(random.integers(rows // 3, rows // 2))
    return _FAULTS[fault](table, at, random)


def _noise(random: np.random.Generator, rows: int) -> tuple[float, Floats]:
    """Return the relative size of the loss's noise, and noise of variance one."""
    sigma = float(np.exp(random.uniform(np.log(0.003), np.log(0.02))))
    heavy, kept = bool(random.random() < 0.3), float(random.choice([0.0, 0.3, 0.7]))
    fresh = random.standard_t(8, rows) / np.sqrt(8 / 6) if heavy else random.standard_normal(rows)
    noise = np.empty(rows)
    last = 0.0
    for row in range(rows):
        last = kept * last + np.sqrt(1 - kept**2) * fresh[row]
        noise[row] = last
    return sigma, noise


def _unharmed(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
    """Return the log as it is, resumed with the same data, or with a raised learning rate that it bears."""
    what = int(random.integers(3))
    at = int(random.integers(len(table) // 3, len(table) * 2 // 3))
    if what == 1:
        return _replayed(table, at, 60, random)
    if what == 2:
        rows = np.arange(len(table))
        after = rows >= at
        bump = np.where(after, 0.02 * np.exp(-(rows - at) / 15.0), 0.0)
        return table.assign(lr=np.where(after, 2, 1) * table["lr"], loss=table["loss"] * (1 + bump))
    return table


def _replayed(table: pd.DataFrame, at: int, back: int, random: np.random.Generator) -> pd.DataFrame:
    """Return the log of a run that failed at a row and was resumed: the same data, sums in another order."""
    again = table.iloc[at - back :]
    again = again.assign(loss=again["loss"] * (1 + 1e-4 * random.standard_normal(len(again))))
    return pd.concat([table.iloc[:at], again], ignore_index=True)


def _spiked(table: pd.DataFrame, at: int, height: float, width: int) -> pd.DataFrame:
    """Add a spike that decays; the gradient norm rises two rows before it."""
    rows = np.arange(len(table))
    shape = np.where(rows >= at, np.exp(-(rows - at) / width), 0.0)
    early = np.where(rows >= at - 2, np.exp(-np.abs(rows - at) / width), 0.0)
    return table.assign(loss=table["loss"] + height * shape, grad_norm=table["grad_norm"] * (1 + 9 * early))


def _spike(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    height, width = float(random.uniform(0.6, 3.0)), int(random.integers(1, 12))
    return Planted(_spiked(table, at, height, width), "spike", (at + 1,), at + 1)


def _double(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    other = at + int(random.integers(60, 120))
    return Planted(_spiked(_spiked(table, at, 1.5, 4), other, 1.0, 4), "spike", (at + 1, other + 1), other + 1)


def _divergence(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    """Grow away slowly, then fast, and never come back."""
    rows = np.arange(len(table))
    pace = float(random.uniform(60, 120))
    away = np.where(rows >= at, 0.02 * np.expm1(np.maximum(rows - at, 0) / pace), 0.0)
    loss = np.minimum(table["loss"].to_numpy() + away, 11.0)
    return Planted(table.assign(loss=loss, grad_norm=table["grad_norm"] * (1 + 2 * away)), "divergence", (at + 1,), 0)


def _drift(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    """Let the attention logits grow by a constant share a step, and leave the loss alone."""
    growth = np.exp(np.maximum(np.arange(len(table)) - at, 0) / float(random.uniform(250, 400)))
    return Planted(table.assign(max_attention_logit=table["max_attention_logit"] * growth), "drift", (at + 1,), 0)


def _restart(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    """Spike, rewind to before it and run the steps again without it."""
    bad = _spiked(table, at, 2.0, 6).iloc[: at + 20]
    again = table.iloc[at - 40 :]
    again = again.assign(loss=again["loss"] * (1 + 1e-4 * random.standard_normal(len(again))))
    return Planted(pd.concat([bad, again], ignore_index=True), "spike", (at + 1,), at + 1)


def _lr_jump(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    """Raise the learning rate to more than the run bears."""
    raised = np.where(np.arange(len(table)) >= at, float(random.uniform(3, 6)), 1.0)
    return Planted(_spiked(table, at + 3, 2.5, 15).assign(lr=table["lr"] * raised), "spike", (at + 4,), at + 4)


def _nan(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    broken = np.arange(len(table)) >= at
    loss = np.where(broken, np.nan, table["loss"])
    return Planted(table.assign(loss=loss, grad_norm=np.where(broken, np.inf, table["grad_norm"])), "nan", (at + 1,), 0)


def _scale_collapse(table: pd.DataFrame, at: int, random: np.random.Generator) -> Planted:
    """Halve the loss scale every other step down to one."""
    halvings = np.clip((np.arange(len(table)) - at) // 2 + 1, 0, 16)
    return Planted(table.assign(loss_scale=65_536.0 * 0.5**halvings), "scale_collapse", (at + 1,), 0)


_FAULTS = {
    "spike": _spike,
    "double": _double,
    "divergence": _divergence,
    "drift": _drift,
    "restart": _restart,
    "lr_jump": _lr_jump,
    "nan": _nan,
    "scale_collapse": _scale_collapse,
}


def write_jsonl(path: Path, table: pd.DataFrame) -> None:
    """Write JSON Lines as Python's json does: what is not finite is NaN or Infinity."""
    rows = table.to_dict(orient="records")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table with a head line."""
    table.to_csv(path, index=False, na_rep="nan", lineterminator="\n")


def write_torchtitan(path: Path, table: pd.DataFrame) -> None:
    """Write the console of torchtitan, with its colours."""
    lines = [
        f"[titan] 2026-01-01 00:00:00,000 - root - INFO - "
        f"\x1b[31mstep: {row['step']:2}  \x1b[32mloss: {row['loss']:7.4f}  "
        f"\x1b[38;2;180;60;0mgrad_norm: {row['grad_norm']:7.4f}  \x1b[36mmemory: 40.11GiB(42.24%)  "
        f"\x1b[34mtps: 5,762  \x1b[36mtflops: 333.10  \x1b[35mmfu: 33.68%\x1b[39m\n"
        for row in table.to_dict(orient="records")
    ]
    path.write_text("".join(lines), encoding="utf-8")


def write_megatron(path: Path, table: pd.DataFrame) -> None:
    """Write the console of Megatron-LM, with a checkpoint every hundred steps."""
    lines = []
    for row in table.to_dict(orient="records"):
        lines.append(
            f"[default7]: [2026-01-01 00:00:00] iteration {row['step']:8d}/{len(table):8d} | consumed samples: "
            f"{row['step'] * 512:12d} | elapsed time per iteration (ms): 1510.4 | learning rate: {row['lr']:.6E} | "
            f"global batch size: {512:5d} | lm loss: {row['loss']:.6E} | loss scale: {row['loss_scale']:.1f} | "
            f"grad norm: {row['grad_norm']:.3f} | number of skipped iterations: {0:3d} | "
            f"number of nan iterations: {0:3d} |\n"
        )
        if row["step"] % 100 == 0:
            lines.append(f"  successfully saved checkpoint from iteration {row['step']:7d} to out/ [ t 1/1, p 1/1 ]\n")
    path.write_text("".join(lines), encoding="utf-8")


def write_trainer_state(path: Path, table: pd.DataFrame) -> None:
    """Write the ``trainer_state.json`` of the Trainer of transformers."""
    history = table[["step", "loss", "grad_norm"]].assign(learning_rate=table["lr"]).to_dict(orient="records")
    state = {"global_step": len(table), "save_steps": 100, "log_history": history}
    path.write_text(json.dumps(state, indent=2), encoding="utf-8")
