"""Parameters and FLOPs of a transformer from its sizes, under the conventions that reports use.

Conventions (per token, forward and backward): ``6N`` 6·N (Kaplan et al. 2020); ``palm`` 6·N + 12·L·H·Q·T, the whole
attention square (Chowdhery et al. 2022, appendix B); ``megatron`` the same with the causal half, 6·L·H·Q·T;
``torchtitan`` 6·(N - embedding) + 6·L·H·(d_qk + d_v)·T. N are active parameters where experts are chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CONVENTIONS: Mapping[str, str] = {
    "6N": "6·N",
    "palm": "6·N + 12·layers·heads·head_dim·seq_len (whole attention)",
    "megatron": "6·N + 6·layers·heads·head_dim·seq_len (causal half)",
    "torchtitan": "6·(N - embedding) + 12·layers·heads·head_dim·seq_len (whole attention)",
}


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder.

    Attributes:
        layers, hidden, heads, head_dim, vocab: as they say; head_dim is that of queries and keys.
        ffn: width of the dense feed-forward.
        kv_heads: heads of keys and values (GQA, MQA); `heads` where None.
        v_head_dim: of values; `head_dim` where None.
        gated: the feed-forward has three matrices (SwiGLU), else two.
        tied: input and output embedding are one.
        positions: learned position embeddings.
        experts, top_k, expert_ffn: of layers with experts; 0 experts is a dense model.
        shared_ffn: width of the experts that every token passes.
        dense_layers: layers that have the dense feed-forward in a model with experts.
        q_rank, kv_rank, rope_dim: of latent attention (MLA); 0 is none. `head_dim` includes `rope_dim`.
        biased: linear layers and norms have biases.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int
    head_dim: int = 0
    kv_heads: int | None = None
    v_head_dim: int | None = None
    gated: bool = True
    tied: bool = False
    positions: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    biased: bool = False

    @property
    def qk_dim(self) -> int:
        """The dimension of a head's queries and keys."""
        return self.head_dim or self.hidden // self.heads

    @property
    def v_dim(self) -> int:
        """The dimension of a head's values."""
        return self.v_head_dim or self.qk_dim

    @property
    def kv_dim(self) -> int:
        """The dimension of the keys and values of all heads together."""
        return (self.kv_heads or self.heads) * (self.qk_dim + self.v_dim)

    def attention_params(self) -> int:
        """Return the parameters of one layer's attention."""
        h, width = self.hidden, self.heads * self.qk_dim
        output = self.heads * self.v_dim * h
        if self.kv_rank:
            no_rope = self.qk_dim - self.rope_dim
            query = h * self.q_rank + self.q_rank + self.q_rank * width if self.q_rank else h * width
            latent = h * (self.kv_rank + self.rope_dim) + self.kv_rank
            return query + latent + self.kv_rank * self.heads * (no_rope + self.v_dim) + output
        biases = width + self.kv_dim + h if self.biased else 0
        return h * width + h * self.kv_dim + output + biases

    def ffn_params(self, width: int) -> int:
        """Return the parameters of a feed-forward of a width."""
        return (3 if self.gated else 2) * self.hidden * width + (self.hidden + width if self.biased else 0)

    def embedding_params(self) -> int:
        """Return the parameters of the input embedding: looked up, not multiplied."""
        return (self.vocab + self.positions) * self.hidden

    def params(self, *, active: bool = False) -> int:
        """Return the parameters, of experts only the chosen ones if `active`."""
        norm = self.hidden * (2 if self.biased else 1)
        total = self.layers * (self.attention_params() + 2 * norm) + norm + self.embedding_params()
        total += 0 if self.tied else self.vocab * self.hidden
        with_experts = self.layers - self.dense_layers if self.experts else 0
        total += (self.layers - with_experts) * self.ffn_params(self.ffn)
        routed = (self.top_k if active else self.experts) * self.ffn_params(self.expert_ffn)
        shared = self.ffn_params(self.shared_ffn) if self.shared_ffn else 0
        return total + with_experts * (routed + shared + self.hidden * self.experts)

    def attention_flops(self, seq_len: float, *, causal: bool) -> float:
        """Return the attention FLOPs of a token, forward and backward, beside the projections."""
        whole = 6.0 * self.layers * self.heads * (self.qk_dim + self.v_dim) * seq_len
        return whole / 2 if causal else whole

    def flops_per_token(self, convention: str, seq_len: float) -> float:
        """Return the model FLOPs of a token under a convention of `CONVENTIONS`."""
        active = self.params(active=True)
        if convention == "torchtitan" and not self.tied:
            active -= self.embedding_params()
        attention = 0.0 if convention == "6N" else self.attention_flops(seq_len, causal=convention == "megatron")
        return 6.0 * active + attention

    def matmul_flops(self, tokens: float, seq_len: float, *, recompute: str = "none") -> float:
        """Return what the matrix products of a step take, biases and norms aside (Korthikanti et al. 2022).

        With `recompute` "full", the layers run forward once more; with "selective", the core of the attention is
        counted twice, as that paper counts it.

        >>> from traceaudit.mfu.architecture import Architecture
        >>> gpt = Architecture(layers=48, hidden=6144, heads=64, vocab=51200, ffn=4 * 6144, gated=False)
        >>> expected = 72 * 4 * 48 * 2048 * 6144**2 * (1 + 2048 / (6 * 6144) + 51200 / (12 * 6144 * 48))
        >>> round(gpt.matmul_flops(4 * 2048, 2048) / expected, 9)
        1.0
        """
        width = self.heads * self.qk_dim
        attention = self.hidden * (width + self.kv_dim) + self.heads * self.v_dim * self.hidden
        layer = 6.0 * (attention + (3 if self.gated else 2) * self.hidden * self.ffn) * self.layers
        core = self.attention_flops(seq_len, causal=False)
        logits = 6.0 * self.vocab * self.hidden
        again = {"none": 0.0, "selective": core, "full": (layer + core) / 3}[recompute]
        return tokens * (layer + core + logits + again)
