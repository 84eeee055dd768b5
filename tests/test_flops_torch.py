"""Counted FLOPs equal `torch.utils.flop_counter` on profiles that torch writes here, causal masks aside."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceaudit.flops import counted_on_host
from traceaudit.reading.normalise import read_trace

if os.environ.get("CI") == "true":
    import torch  # CI installs it; a test that quietly skipped would prove nothing
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of its profiler and its functions

Step = Callable[[], Any]
HIDDEN, HEADS, TOKENS, BATCH = 32, 4, 12, 2


class Layer(torch.nn.Module):  # type: ignore[misc, unused-ignore]  # torch may be absent where types are checked
    """A layer of a transformer: attention by heads, then two matrices."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = torch.nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = torch.nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:  # noqa: ANN401  tensors
        """Return the layer's result."""
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Small(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Patches by a convolution, two layers, and a head; the layers recomputed on request."""

    def __init__(self, *, causal: bool, recompute: str) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, HIDDEN, kernel_size=(2, 3), stride=2, padding=1, groups=1)
        self.layers = torch.nn.ModuleList([Layer(causal=causal) for _ in range(2)])
        self.head = torch.nn.Linear(HIDDEN, 7)
        self.recompute = recompute

    def forward(self, image: Any) -> Any:  # noqa: ANN401  tensors
        """Return the scores of an image's patches."""
        from torch.utils.checkpoint import checkpoint

        x = self.patches(image).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant") if self.recompute else layer(x)
        return self.head(x)


def torch_counts(step: Step) -> dict[str, int]:
    """Return the FLOPs that torch counts, by operator; attention on CPUs, which it leaves out, by its own formulas."""
    from torch.utils import flop_counter

    def forward(*shapes: Any, **_: Any) -> int:  # noqa: ANN401  shapes of tensors, and scalars
        count: Callable[..., int] = flop_counter.sdpa_flop_count
        return int(count(*shapes[:3]))

    def backward(*shapes: Any, **_: Any) -> int:  # noqa: ANN401
        count: Callable[..., int] = flop_counter.sdpa_backward_flop_count
        return int(count(*shapes[:4]))

    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=attention) as counter:
        step()
    return {str(name): int(flops) for name, flops in counter.get_flop_counts()["Global"].items()}


def traced_counts(step: Step, path: Path) -> dict[str, float]:
    """Return the FLOPs that traceaudit counts in the profile of a step, by operator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step()
    profile.export_chrome_trace(str(path))
    table = counted_on_host(read_trace(path))
    return {str(name): float(flops) for name, flops in table.groupby("name")["flops"].sum().items()}


@pytest.mark.parametrize("recompute", ["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_training_step_of_a_small_transformer(causal: bool, recompute: str, tmp_path: Path) -> None:
    """Forward, backward and recompute: as many FLOPs as torch counts, whose counter ignores causal masks.

    Recompute runs to its end here: the operator at which torch would stop it early is recorded and runs nothing, which
    only its lack of kernels shows, and operators on a CPU have none.
    """
    from torch.utils.checkpoint import set_checkpoint_early_stop

    torch.manual_seed(0)
    model = Small(causal=causal, recompute=recompute)
    image = torch.randn(BATCH, 3, 6, 9, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        with set_checkpoint_early_stop(False):
            model(image).sum().backward()

    expected, found = torch_counts(step), traced_counts(step, tmp_path / "trace.json")
    assert sum(found.values()) == sum(expected.values()) > 0


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_mask_halves_what_is_executed(causal: bool, tmp_path: Path) -> None:
    """A causal mask halves what runs; the backward runs 2.5 times the forward, of which 2 are the model's."""
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))

    def step() -> None:
        functions.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

    path = tmp_path / "trace.json"
    traced_counts(step, path)
    table = counted_on_host(read_trace(path))
    share = 0.5 if causal else 1.0
    assert table["executed"].sum() == share * table["flops"].sum()
    forward = 2 * 2 * 16 * 16 * (8 + 8)
    assert table["flops"].tolist() == [forward, 2.5 * forward]
    assert table["model"].tolist() == [share * forward, share * 2 * forward]


def operands(*shapes: tuple[int, ...]) -> list[Any]:
    """Return tensors of some shapes."""
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


functions: Any = torch.nn.functional  # called with lists of operands, which its types do not foresee

# Steps whose operators torch counts: matrix products of each kind, and convolutions with their backward.
STEPS: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(*operands((3, 5), (5, 7))),
    "addmm": lambda: torch.addmm(*operands((7,), (3, 5), (5, 7))),
    "bmm": lambda: torch.bmm(*operands((4, 3, 5), (4, 5, 7))),
    "baddbmm": lambda: torch.baddbmm(*operands((4, 3, 7), (4, 3, 5), (4, 5, 7))),
    "einsum": lambda: torch.einsum("bij,bjk->bik", *operands((4, 3, 5), (4, 5, 7))),
    "linear": lambda: functions.linear(*operands((2, 6, 5), (7, 5), (7,))),
    "conv1d": lambda: functions.conv1d(*operands((2, 4, 11), (6, 4, 3)), stride=2, padding=1),
    "conv2d": lambda: functions.conv2d(*operands((2, 4, 9, 8), (6, 4, 3, 2)), padding=(1, 0), dilation=2),
    "conv3d": lambda: functions.conv3d(*operands((1, 2, 5, 6, 7), (3, 2, 2, 2, 2))),
    "conv_transpose2d": lambda: functions.conv_transpose2d(*operands((2, 4, 5, 5), (4, 6, 3, 3)), stride=2),
    "grouped queries": lambda: functions.scaled_dot_product_attention(
        *operands((1, 4, 8, 16), (1, 4, 24, 16), (1, 4, 24, 16))
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_operators_forward_and_backward(name: str, tmp_path: Path) -> None:
    """Each kind of product has the FLOPs that torch counts, forward and backward."""

    def step() -> None:
        STEPS[name]().sum().backward()

    expected, found = torch_counts(step), traced_counts(step, tmp_path / "trace.json")
    assert sum(found.values()) == sum(expected.values())
