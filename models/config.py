"""The model section of a run config: model shape and weight initialisation."""

from collections.abc import Iterator
from functools import lru_cache
from math import sqrt
from typing import Annotated, Final, Literal

import torch
from pydantic import Field

from models.blocks.activation import ACTIVATIONS
from models.section import (
    LARGEST_INTEGER,
    AtLeast0,
    Check,
    Count,
    Positive,
    Section,
    Whole,
    ignored,
)

Size = Annotated[int, Field(ge=1, le=1 << 20)]
Width = Annotated[int, Field(ge=1, le=1 << 24)]
Rows = Annotated[int, Field(ge=1, le=1 << 26)]
Parts = Annotated[int, Field(ge=1, le=1 << 14)]

MOST_IN_ALL_LAYERS: Final = 1 << 18
"""Limit on the total number of heads in all layers, and on the total number of experts."""


LLAMA3_KEYS: Final = ("low_freq_factor", "high_freq_factor")


class InitConfig(Section):
    """Weight initialisation."""

    std: Positive | None = 0.02
    """Standard deviation of the normal distribution that initialises every matrix except embedding
    and head; null = `min(1, sqrt(rows / cols)) / sqrt(cols)`, as in spectral muP."""
    spectral: bool = True
    """Rescale every matrix except embedding and head to spectral norm `radius`, as in the SSO
    paper."""
    radius: Literal["spectral_mup", "align_adam_rms", "spectral_kaiming"] = "spectral_mup"
    """Formula for the initial spectral norm of a matrix; see docs/spectral.md."""
    radius_scaler: Positive = 1.0
    """Multiplier for the radius; c in the SSO paper."""
    depth_scaled: bool = False
    """Reduce the std of some matrices according to `depth_scaling`; must be false if `spectral` is
    true."""
    depth_scaling: Literal["layers", "layer"] = "layers"
    """layers: divide the std of o and down by sqrt(2 * layers); layer: divide the std of o, up and
    down in layer l, counted from 0, by sqrt(2 * (l + 1)), as in the PC paper."""
    embedding_std: Positive = 0.02
    """Standard deviation of the initial embedding."""
    head_std: AtLeast0 = 0.02
    """Standard deviation of the initial output head."""

    def checks(self) -> Iterator[Check]:
        """Reject keys that have no effect."""
        if self.spectral:
            unused = ("std", "depth_scaled", "depth_scaling")
            yield from ignored(self, *unused, when="with spectral true")
        shaped = self.std is None and self.depth_scaled
        rule = "must be false if std is null, got true: the std then depends on the matrix shape"
        yield "depth_scaled", shaped, rule


class MoEConfig(Section):
    """Mixture-of-experts layers and their routing."""

    experts: Parts
    """Number of routed experts per layer."""
    top_k: Parts
    """Number of routed experts per token; no tokens are dropped."""
    expert_ffn: Width
    """Feed-forward hidden size of each expert."""
    shared_experts: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    """Number of shared experts, which process every token. They are fused into one expert with
    hidden size `shared_experts * expert_ffn`."""
    shared_gate: bool = False
    """Multiply the shared experts' output by a learned per-token sigmoid gate."""
    dense_layers: Whole = 0
    """Number of leading layers with a dense feed-forward block of hidden size `ffn` instead of
    experts."""
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """Router score function; if top_k > 1, the scores of the selected experts are normalised to
    sum to 1."""
    expert_groups: Parts = 1
    """Number of equal-sized expert groups; a token is routed only to experts in its `top_groups`
    best groups."""
    top_groups: Parts = 1
    """Number of expert groups selected per token; groups are ranked by the sum of their `top_k /
    top_groups` highest scores."""
    routed_scale: Positive | None = None
    """Multiplier for the sum of the routed experts' outputs; null = the SSO paper's factor, which
    gives this sum the same variance as the shared experts' sum."""
    expert_bias: bool = True
    """Auxiliary-loss-free load balancing: add a per-expert bias to the scores used to select
    experts."""
    expert_bias_rate: AtLeast0 = 1e-3
    """Amount by which each expert's bias is raised or lowered per optimizer step."""
    sequence_aux_loss: AtLeast0 = 0.0
    """Coefficient of the per-sequence load-balancing loss; 0 = off."""
    global_aux_loss: AtLeast0 = 0.0
    """Coefficient of the load-balancing loss over the global batch; 0 = off. The loss uses the
    expert load of the previous step."""
    z_loss: AtLeast0 = 0.0
    """Coefficient of the squared log-sum-exp of the router logits; 0 = off."""
    backend: Literal["auto", "sequential", "grouped"] = "auto"
    """How a rank computes its experts. sequential: one expert at a time; grouped: grouped GEMMs;
    auto: grouped for bf16 on GPUs, otherwise sequential. Checkpoints do not depend on the backend.
    """

    def checks(self) -> Iterator[Check]:
        """Check the expert and routing keys against each other."""
        groups, used, experts = self.expert_groups, self.top_groups, self.experts
        yield "expert_groups", experts % groups, f"must divide experts = {experts}"
        yield "top_groups", used > groups, f"must be at most expert_groups = {groups}"
        yield "top_k", self.top_k > experts, f"must be at most experts = {experts}"
        few = used * (experts // groups) < self.top_k <= experts and experts % groups == 0
        rule = (
            f"must be at most {used * (experts // groups)}, the number of experts in "
            f"top_groups = {used} groups"
        )
        yield "top_k", few, rule
        yield "top_k", self.top_k < used, f"must be at least top_groups = {used}"
        lonely = self.shared_gate and self.shared_experts < 1
        yield "shared_gate", lonely, "must be false if shared_experts is 0"
        biased = self.expert_bias and self.score != "sigmoid"
        yield "expert_bias", biased, f"must be false with score {self.score}"


class LatentConfig(Section):
    """Multi-head latent attention: computes queries, keys and values from low-rank latents."""

    query_rank: Size | None = None
    """Rank of the query latent; null = project queries directly from the residual stream."""
    kv_rank: Size
    """Rank of the latent shared by keys and values."""
    nope_head_dim: Size
    """Number of non-rotary dimensions of a query or key head."""
    rope_head_dim: Annotated[Size, Field(multiple_of=2)]
    """Number of rotary dimensions of a query or key head; all heads share the rotary part of the
    key."""
    value_head_dim: Size
    """Dimension of a value head."""


class RopeScalingConfig(Section):
    """RoPE scaling for sequences longer than those in the original training."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: divide all frequencies by `factor`; llama3: divide low frequencies, as in Llama 3.1
    and 3.2; yarn: divide low frequencies, and scale queries and keys."""
    factor: Annotated[float, Field(ge=1, le=LARGEST_INTEGER)]
    """Divisor for the frequencies selected by `kind`."""
    original_max_position_embeddings: Count | None = None
    """Context length before the extension, in tokens; null for linear."""
    low_freq_factor: Positive | None = None
    """llama3: a frequency is low if it rotates fewer times than this number over the original
    length; other kinds: must be null."""
    high_freq_factor: Positive | None = None
    """llama3: a frequency is unchanged if it rotates more times than this number over the original
    length; other kinds: must be null."""
    beta_slow: Positive = 1.0
    """yarn: a frequency is low if it rotates fewer times than this number over the original
    length."""
    beta_fast: Positive = 32.0
    """yarn: a frequency is unchanged if it rotates more times than this number over the original
    length."""
    truncate: bool = True
    """yarn: round the bounds of the transition between unchanged and low frequencies to whole
    dimensions."""
    attention_factor: Positive | None = None
    """yarn: multiplier for rotated queries and keys; null = 0.1 ln(factor) + 1."""

    def checks(self) -> Iterator[Check]:
        """Check that the keys required by `kind` are set and that all keys not used by `kind` are
        null."""
        kinds: dict[str, tuple[str, ...]] = dict.fromkeys(LLAMA3_KEYS, ("llama3",))
        kinds["original_max_position_embeddings"] = "llama3", "yarn"
        for key, needed in kinds.items():
            wrong = (getattr(self, key) is None) == (self.kind in needed)
            value = "a number" if self.kind in needed else "null"
            yield key, wrong, f"must be {value} with kind {self.kind}"
        if self.kind != "yarn":
            unused = ("beta_slow", "beta_fast", "truncate", "attention_factor")
            yield from ignored(self, *unused, when=f"with kind {self.kind}")
        low, high = self.low_freq_factor or 0.0, self.high_freq_factor
        rule = f"must be above low_freq_factor = {low}"
        yield "high_freq_factor", self.kind == "llama3" and (high or low + 1) <= low, rule
        slow = self.beta_slow
        yield "beta_fast", self.beta_fast <= slow, f"must be above beta_slow = {slow}"


class ModelConfig(Section):
    """Model shape, and the options that are not fixed by the model family."""

    family: str = "llama"
    """Model family; see docs/models.md for a list."""
    layers: Annotated[int, Field(ge=1, le=10_000)]
    """Number of transformer layers."""
    hidden: Size
    """Hidden size: the width of the residual stream."""
    heads: Parts
    """Number of query heads."""
    kv_heads: Parts | None = None
    """Number of key/value heads (grouped-query attention); null = heads."""
    head_dim: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """Head dimension; null = hidden / heads."""
    ffn: Width
    """Hidden size of the feed-forward block: the number of rows in gate and in up."""
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    """Activation of the feed-forward block. swiglu: `silu(gate) * up`; geglu: `gelu(gate) * up`
    with the tanh approximation of gelu; relu2: `relu(up)^2`, without a gate."""
    qk_norm: bool = False
    """Apply an RMSNorm to every query and key head before the rotary embedding."""
    vocab_size: Rows | None = None
    """Vocabulary size; null = the vocabulary size in the data manifest."""
    vocab_multiple: Rows = 128
    """Pad embedding and head to a multiple of this many rows."""
    tie_embeddings: bool = False
    """Also use the embedding matrix as the output head. The matrix's role is `embedding`, so
    optimizer.head and init.head_std have no effect."""
    rope_base: Positive = 10000.0
    """Base of the rotary position embedding."""
    rope_scaling: RopeScalingConfig | None = None
    """RoPE scaling; null = none. Must be null for latent attention."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Attention projections with a bias, initialised to 0. qkv: queries, keys and values, as in
    Qwen2; all: also the output."""
    norm_epsilon: Positive = 1e-5
    """Epsilon of every RMSNorm."""
    query_pre_attn_scalar: Count | None = None
    """Attention scores are divided by the square root of this value; null = head_dim. Supported
    only by family gemma2."""
    attention_softcap: Positive | None = None
    """Soft cap c on attention scores, `c * tanh(score / c)`; null = none. Supported only by family
    gemma2."""
    final_softcap: Positive | None = None
    """Soft cap c on the logits, `c * tanh(logit / c)`; null = none. Supported only by family
    gemma2."""
    sliding_window: Count | None = None
    """Number of tokens that a token in layers 0, 2, 4, ... attends to, including itself; null = all
    previous tokens. Supported only by family gemma2."""
    latent: LatentConfig | None = None
    """Multi-head latent attention; required for families with latent attention, null for others."""
    moe: MoEConfig | None = None
    """Mixture-of-experts layers; required for families with experts, null for others."""
    init: InitConfig = InitConfig()
    """Weight initialisation."""
    attention_backend: Literal["sdpa", "transformer_engine"] = "sdpa"
    """Library used for attention and linear layers: PyTorch (sdpa), or Transformer Engine, which
    must be installed."""
    attention_kernel: Literal["auto", "flash_attention_3", "flash_attention_4"] = "auto"
    """Attention kernel for attention_backend sdpa. auto: one of PyTorch's kernels; other values:
    the FlashAttention package of that name, for bf16 on GPUs. auto never selects these packages,
    because they have not been benchmarked."""

    def checks(self) -> Iterator[Check]:
        """Check the conditions that apply to every family."""
        heads, moe = self.heads, self.moe
        for key, count in (("heads", heads), ("moe.experts", 0 if moe is None else moe.experts)):
            rule = f"times model.layers must be at most {MOST_IN_ALL_LAYERS}"
            many = self.layers * count > MOST_IN_ALL_LAYERS
            yield key, many, f"{rule}, got {count} times {self.layers}"
        yield "kv_heads", heads % self.query_groups, f"must divide heads = {heads}"
        uneven = self.latent is None and self.head_dim is None and self.hidden % heads
        yield "heads", uneven, f"must divide hidden = {self.hidden}, got {heads} (or set head_dim)"
        odd = not uneven and self.rotary_size % 2
        yield "head_dim", odd, f"must be even for rotary positions, got {self.rotary_size}"
        if self.tie_embeddings:
            unused = ignored(self.init, "head_std", when="with model.tie_embeddings true")
            yield from ((f"init.{key}", wrong, rule) for key, wrong, rule in unused)
        engine, backend = self.attention_backend != "sdpa", f"with {self.attention_backend}"
        yield "rope_scaling", engine and self.rope_scaling, f"must be null {backend}, got a section"
        all_biases = engine and self.attention_bias == "all"
        yield "attention_bias", all_biases, f"must be none or qkv {backend}"
        dense = moe is not None and moe.dense_layers >= self.layers
        packaged = self.attention_kernel != "auto"
        other = self.latent is not None or self.explicit_scores
        rule = "must be auto with latent attention, attention_softcap or sliding_window"
        yield "attention_kernel", packaged and other, rule
        engine = packaged and self.attention_backend != "sdpa"
        yield "attention_kernel", engine, "must be auto with attention_backend transformer_engine"
        yield "moe.dense_layers", dense, f"must be below layers = {self.layers}"

    @property
    def query_groups(self) -> int:
        """Number of key/value heads. If `kv_heads` is null, this is `heads`."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Dimension of a query or key head. Without latent attention, this is `head_dim`, which
        defaults to hidden / heads."""
        if self.latent is not None:
            return self.latent.nope_head_dim + self.latent.rope_head_dim
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_head_size(self) -> int:
        """Dimension of a value head."""
        return self.head_size if self.latent is None else self.latent.value_head_dim

    @property
    def rotary_size(self) -> int:
        """Number of rotary dimensions per head."""
        return self.head_size if self.latent is None else self.latent.rope_head_dim

    def mixture(self, layer: int) -> MoEConfig | None:
        """Return the expert config of layer `layer`, or None if the layer is dense."""
        return None if self.moe is None or layer < self.moe.dense_layers else self.moe

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a gate."""
        return ACTIVATIONS[self.activation].gated

    @property
    def explicit_scores(self) -> bool:
        """Whether attention materializes its scores instead of using a fused kernel."""
        return self.attention_softcap is not None or self.sliding_window is not None

    def window(self, layer: int) -> int | None:
        """Return the sliding-window size of layer `layer`, or None for full attention."""
        return None if layer % 2 else self.sliding_window

    @property
    def padded_vocab(self) -> int:
        """Number of rows in the embedding and in the head, including padding."""
        assert self.vocab_size is not None  # `with_vocabulary` has set it
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def scale_of(moe: MoEConfig) -> float:
    """Return the multiplier for the routed experts' sum. If `moe.routed_scale` is null, this is the
    SSO paper's factor."""
    if moe.routed_scale is None:
        return routed_scale(moe.experts, moe.top_k, moe.shared_experts, moe.score)
    return moe.routed_scale


@lru_cache
def routed_scale(experts: int, top_k: int, shared_experts: int, score: str = "sigmoid") -> float:
    """Return the factor M that equalizes the variances of the routed and shared experts' sums.

    A layer's output is `sum_shared e + M sum_topk g e`, where e is an expert's output and g is its
    gate. If the outputs e are independent with equal variance, M is the mean of `sqrt(shared) /
    sqrt(sum g^2)` over gates g that result from N(0, 1) logits ("Controlled LLM Training on
    Spectral Sphere", Listing 1). For sigmoid scores, 4 of 64 experts and 1 shared expert, M is
    1.998. M is estimated from 20,000 samples and rounded to 3 decimals, about the precision of the
    estimate. Without shared experts, M is 1.
    """
    if shared_experts == 0:
        return 1.0
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, experts, generator=generator, dtype=torch.float64)
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(dim=1)
    gates = scores.topk(top_k, dim=1).values
    if top_k > 1:  # a single expert's score is not normalised
        gates /= gates.sum(dim=1, keepdim=True)
    return round((sqrt(shared_experts) / gates.norm(dim=1)).mean().item(), 3)
