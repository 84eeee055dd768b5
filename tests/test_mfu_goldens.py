"""MFU and HFU of public reports follow from their configurations by our formulas."""

import pytest

from traceaudit.mfu.architecture import Architecture
from traceaudit.mfu.model_files import FLAVOURS

A100, TPU_V4, H100 = 312e12, 275e12, 989.5e12


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    """Return a GPT of Korthikanti et al. (arXiv 2205.05198), table 3: vocabulary 51,200, feed-forward of 4 hidden."""
    return Architecture(layers, hidden, heads, 51_200, 4 * hidden, gated=False, tied=True)


# Model, GPUs, batch, seconds an iteration, and the MFU and HFU of tables 5: sequences of 2,048, selective recompute.
KORTHIKANTI = {
    "22B": (gpt(48, 6_144, 64), 8, 4, 1.10, 41.5, 43.7),
    "175B": (gpt(96, 12_288, 96), 64, 64, 13.75, 51.4, 52.8),
    "530B": (gpt(105, 20_480, 128), 280, 280, 37.83, 56.0, 57.0),
    "1T": (gpt(128, 25_600, 160), 512, 512, 71.49, 56.3, 57.0),
}


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikanti(name: str) -> None:
    """MFU and HFU of the four models, within what rounding the seconds and percentages to print leaves."""
    model, gpus, batch, seconds, mfu, hfu = KORTHIKANTI[name]
    tokens = batch * 2_048
    rate = seconds * gpus * A100
    assert 100 * model.matmul_flops(tokens, 2_048) / rate == pytest.approx(mfu, abs=0.3)
    assert 100 * model.matmul_flops(tokens, 2_048, recompute="selective") / rate == pytest.approx(hfu, abs=0.3)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_matmul_flops_are_the_published_formula(name: str) -> None:
    """72·B·L·s·h²·(1 + s/6h + V/12hL), and with selective recompute s/3h, from the sizes of the matrices."""
    model, _, batch, _, _, _ = KORTHIKANTI[name]
    h, layers, s = model.hidden, model.layers, 2_048
    for recompute, part in (("none", s / (6 * h)), ("selective", s / (3 * h))):
        expected = 72 * batch * layers * s * h**2 * (1 + part + model.vocab / (12 * h * layers))
        assert model.matmul_flops(batch * s, s, recompute=recompute) == pytest.approx(expected, rel=1e-12)


def test_full_recompute_runs_the_layers_forward_once_more() -> None:
    """A fourth third of the layers' FLOPs; the logits are not recomputed."""
    model = gpt(96, 12_288, 96)
    plain, full = (model.matmul_flops(1, 2_048, recompute=kind) for kind in ("none", "full"))
    logits = 6 * model.vocab * model.hidden
    assert full - logits == pytest.approx(4 / 3 * (plain - logits))


def test_palm_540b() -> None:
    """46.2 % MFU and 45.7 % without attention, from 238.3 thousand tokens/s on 6,144 TPUs (arXiv 2204.02311, B).

    The report does not say what its rematerialisation repeats; HFU 57.8 % lies between none of the forward and all.
    """
    palm = Architecture(118, 18_432, 48, 256_000, 4 * 18_432, head_dim=256, kv_heads=1, gated=True, tied=True)
    assert palm.params() == pytest.approx(540.35e9, rel=0.001)
    rate = 6_144 * TPU_V4 / 238.3e3
    assert 100 * palm.flops_per_token("palm", 2_048) / rate == pytest.approx(46.2, abs=0.1)
    assert 100 * palm.flops_per_token("6N", 2_048) / rate == pytest.approx(45.7, abs=0.1)
    mfu = palm.matmul_flops(1, 2_048) / rate
    assert 100 * mfu < 57.8 < 100 * palm.matmul_flops(1, 2_048, recompute="full") / rate


# Convention and tokens/s of each GPU at 400 TFLOP/s a GPU (Llama 3, table 4: 405B on 16,384 H100, sequences of 8,192).
LLAMA_3_405B = {"6N": 164.3, "megatron": 157.7, "palm": 151.6}


@pytest.mark.parametrize(("convention", "tokens"), LLAMA_3_405B.items())
def test_llama_3_405b(convention: str, tokens: float) -> None:
    """One rate of FLOPs is three rates of tokens: the convention alone moves MFU by 8 %."""
    llama = FLAVOURS["llama3", "405b"]
    assert llama.params() == pytest.approx(405.85e9, rel=1e-4)
    assert 400e12 / llama.flops_per_token(convention, 8_192) == pytest.approx(tokens, abs=0.1)


@pytest.mark.parametrize(("tflops", "mfu"), [(430, 43.5), (400, 40.4), (380, 38.4)])
def test_llama_3_rates(tflops: float, mfu: float) -> None:
    """The published TFLOP/s a GPU over the dense peak; the report rounds them to 43, 41 and 38 %."""
    assert 100 * tflops * 1e12 / H100 == pytest.approx(mfu, abs=0.05)


# Flavour and FLOPs a token at a sequence of 8,192, as torchtitan counts them.
TORCHTITAN = {"8b": 5.791e10, "70b": 4.814e11, "405b": 2.6254e12}


@pytest.mark.parametrize(("flavour", "flops"), TORCHTITAN.items())
def test_torchtitan_flops_a_token(flavour: str, flops: float) -> None:
    """6·(N - embedding) + 12·L·H·Q·T of the three flavours of Llama 3."""
    assert FLAVOURS["llama3", flavour].flops_per_token("torchtitan", 8_192) == pytest.approx(flops, rel=2e-4)


@pytest.mark.parametrize(("tokens", "mfu"), [(5_762, 33.7), (6_667, 39.0)])
def test_torchtitan_8b(tokens: float, mfu: float) -> None:
    """5,762 tokens/s a GPU are 33.7 % (6,667 with compilation are 39.0 %)."""
    flops = FLAVOURS["llama3", "8b"].flops_per_token("torchtitan", 8_192)
    assert 100 * flops * tokens / H100 == pytest.approx(mfu, abs=0.05)
