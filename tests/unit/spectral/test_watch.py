"""Matrices in a weight, detected in one forward pass (`split_parameters(model, example=...)`).

Each case is a module with known matrices; a step on the fused weight equals steps on the separate
matrices.
"""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from spectral import Muon, SpectralOptimizer, preconditioned, split_parameters

Pieces = Callable[[Tensor], Sequence[Tensor]]


class Module(nn.Module):
    """A module of layers and parameters, and the function that it computes. `layers` are names,
    inputs and outputs of linear layers without bias, such as "q 12 8, out 8 4"."""

    def __init__(self, forward: Callable[..., Any], layers: str = "", **members: Any) -> None:
        super().__init__()
        self.function = forward
        for layer in filter(None, layers.split(", ")):
            name, inputs, outputs = layer.split()
            setattr(self, name, linear(int(inputs), int(outputs)))
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                member = nn.Parameter(member)
            setattr(self, name, member)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def linear(*sizes: int) -> nn.Linear:
    return nn.Linear(*sizes, bias=False)


def heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def one_key(q: Tensor, k: Tensor) -> Tensor:
    """Return attention in which all heads have one key, which is also the value."""
    scores = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", scores, k).transpose(1, 2).flatten(2)


def fused_attention(m: Any, x: Tensor) -> Any:
    """Return attention by a kernel that a context manager chooses in the forward pass."""
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return m.out(attention(q, k, v))


def standardized(weight: Tensor) -> Tensor:
    variance, mean = torch.var_mean(weight, 1, keepdim=True)
    return (weight - mean) * (variance + 1e-5).rsqrt()


def single_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention by einsum, which sums over one token without a matrix product."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", scores, v).transpose(1, 2).flatten(2)


def rows(*pattern: int) -> Pieces:
    return lambda w: w.split([*pattern] * (len(w) // sum(pattern)))


def columns(*pattern: int) -> Pieces:
    return lambda w: [p.T for p in w.split([*pattern] * (w.shape[1] // sum(pattern)), 1)]


def whole(w: Tensor) -> list[Tensor]:
    return [w.flatten(1)]


def channels(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def fused_convolution(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(channels(y), 4) for y in m.to_qkv(x).chunk(3, 1))
    return m.out(attention(q, k, v))


def rotated(x: Tensor, size: int = 2) -> Tensor:
    """Apply rotary embedding to only the first half of each head."""
    turned, rest = x[..., : 2 * size], x[..., 2 * size :]
    half = torch.cat([-turned[..., size:], turned[..., :size]], -1)
    return torch.cat([turned * 0.6 + half * 0.8, rest], -1)


def rotary(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(y, 6) for y in m.qkv(x).chunk(3, -1))
    return m.out(attention(rotated(q), rotated(k), v))


def turned(x: Tensor) -> Tensor:
    """Apply rotary embedding to the two halves of each head separately."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * 0.6 - b * 0.8, b * 0.6 + a * 0.8], -1)


def rotary_halves(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    return m.out(attention(turned(q), turned(k), v))


def rotary_features(m: Any, x: Tensor) -> Any:
    """Return linear attention by features of rotated queries and keys."""
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    features = torch.ones(4, 5)
    q, k = (turned(y) @ features for y in (q, k))
    return m.out((q.exp() @ (k.exp().mT @ v)).transpose(1, 2).flatten(2))


def positioned(m: Any, x: Tensor, positions: Tensor) -> Any:
    """Return attention whose rotations come from positions in the example."""
    angles = (positions[..., None] * torch.ones(2))[:, None, :, :, None]
    table = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    table = table.unflatten(-1, (2, 2))[..., 0, :, :]

    def turn(y: Tensor) -> Tensor:
        pairs = y.unflatten(-1, (2, 1, 2))
        return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).flatten(-2)

    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    return m.out(attention(turn(q), turn(k), v))


def joint_attention(m: Any, x: Tensor) -> Any:
    """Return attention over two streams, each with layers of its own."""
    streams = [m.first(x).chunk(3, -1), m.second(x[:, :4]).chunk(3, -1)]
    parts = zip(*streams, strict=True)
    q, k, v = (torch.cat([heads(y, 4) for y in pair], 2) for pair in parts)
    return m.out(attention(q, k, v))


def complex_rotary(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    turn = torch.polar(torch.ones(2), torch.ones(2))
    q, k = (
        torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (2, 2)).contiguous()) * turn)
        for y in (q, k)
    )
    return m.out(attention(q.flatten(3), k.flatten(3), v))


def latent(m: Any, x: Tensor) -> Any:
    low, rope = m.down(x).split([6, 2], -1)
    nope, v = heads(m.up(low), 7).split([4, 3], -1)
    k = torch.cat([nope, rope[:, None].expand(-1, nope.shape[1], -1, -1)], -1)
    return m.out(attention(heads(m.q(x), 6), k, v))


def gated_attention(m: Any, x: Tensor) -> Any:
    q, gate = m.q(x).unflatten(-1, (-1, 8)).chunk(2, -1)
    k, v = heads(m.kv(x), 8).chunk(2, -1)
    return m.out(attention(q.transpose(1, 2), k, v) * gate.flatten(2).sigmoid())


def modulated(m: Any, x: Tensor, condition: Tensor) -> Any:
    a, b, c, d, e, f = m.ada(condition)[:, None].chunk(6, -1)
    x = x + c * m.first(m.norm(x) * (1 + b) + a)
    return m.head(x + f * m.second(m.norm(x) * (1 + e) + d))


def experts(m: Any, x: Tensor) -> Any:
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    mixed = torch.zeros_like(x)
    for e in range(len(m.gate_up)):
        token, slot = torch.where(chosen == e)
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, -1)
        made = F.linear(F.silu(gate) * up, m.down[e]) * probabilities[token, slot, None]
        mixed.index_add_(0, token, made)
    return m.head(x + mixed)


def chosen_experts(m: Any, x: Tensor) -> Any:
    """Return outputs of experts whose weights are looked up, cast and scaled for each token."""
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    gate_up, down = (2 * w[chosen].double() for w in (m.gate_up, m.down))
    gate, up = torch.einsum("tkoi,ti->tko", gate_up, x.double()).chunk(2, -1)
    made = torch.einsum("tkoi,tki->tko", down, F.silu(gate) * up)
    return m.head(x + (made.float() * probabilities[..., None]).sum(1))


def summed_experts(m: Any, x: Tensor) -> Any:
    """Return sums of experts' outputs, which one product computes."""
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    weights = m.weights[chosen].transpose(1, 2).flatten(2)  # [tokens, outputs, choices * inputs]
    inputs = (probabilities[..., None] * x[:, None]).flatten(1)
    return m.head(x + (weights @ inputs[..., None])[..., 0])


def merged_experts(m: Any, x: Tensor) -> Any:
    """Return outputs of a weighted sum of experts' weights."""
    shares = m.gate(x.mean(1)).softmax(-1)[..., None, None]
    return m.head(x @ (shares * m.weights).sum(1))


def banked_attention(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(x @ m.bank[i], 4) for i in range(3))
    return m.head(x + attention(q, k, v) @ m.bank[3])


def batched_experts(m: Any, x: Tensor) -> Any:
    y = torch.bmm(x.expand(3, -1, -1), m.gate_up)
    gate, up = y[..., ::2], y[..., 1::2]
    made = torch.bmm(gate.clamp(max=7) * up.sigmoid(), m.down)
    return m.head(x + (made * m.gate(x).softmax(-1).T[..., None]).sum(0))


def grouped_experts(m: Any, x: Tensor) -> Any:
    ends = torch.tensor([6, 9], dtype=torch.int32)
    y = F.grouped_mm(x.bfloat16(), m.gate_up.bfloat16().transpose(1, 2), offs=ends)
    gate, up = y.chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * up, m.down.bfloat16().transpose(1, 2), offs=ends)
    return m.head(x + made.float())


def convolution(groups: int) -> Pieces:
    return lambda w: [part.flatten(1) for part in w.chunk(groups)]


def transposed_convolution(groups: int) -> Pieces:
    return lambda w: [part.transpose(0, 1).flatten(1) for part in w.chunk(groups)]


def grouped_heads(m: Any, x: Tensor) -> Any:
    """Compute DeepSeek-V4's output: a product for each of three groups of inputs."""
    low = torch.bmm(x.view(-1, 3, 4).transpose(0, 1), m.down.weight.view(3, 4, 4).mT)
    return m.up(m.up(low.transpose(0, 1).reshape(*x.shape[:-1], 12)))


def recurrent(m: Any, x: Tensor) -> Any:
    return m.head(m.gru(x)[0])


def mixture(m: Any, x: Tensor) -> Any:
    """Compute a mixture of layers whose weights are stacked."""
    inner = torch.einsum("btd,ehd->beth", x, torch.stack([m.a1.weight, m.b1.weight])).relu()
    made = torch.einsum("beth,edh->betd", inner, torch.stack([m.a2.weight, m.b2.weight]))
    return m.head(x + torch.einsum("betd,bte->btd", made, m.gate(x).softmax(-1)))


def state_space(m: Any, x: Tensor) -> Any:
    """Compute the recurrence of Mamba-2 with inputs, `b`, `c` and time steps of one weight."""
    z, u, b, c, time = m.inner(x).split([8, 8, 3, 3, 2], -1)
    u, time = u.unflatten(-1, (2, 4)), F.softplus(time)
    state, outputs = torch.zeros(len(x), 2, 4, 3), []
    for t in range(4):
        written = torch.einsum("bh,bn,bhp->bhpn", time[:, t], b[:, t], u[:, t])
        state = torch.exp(-time[:, t])[..., None, None] * state + written
        outputs.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]).flatten(1))
    return m.out(torch.stack(outputs, 1) * F.silu(z[:, :4]))


def gated_streams(m: Any, x: Tensor) -> Any:
    """Mix three streams with a separate gate for each entry."""
    gates = m.up(m.down(x).relu()).sigmoid().unflatten(-1, (3, 4))
    return m.head((gates * x.unflatten(-1, (3, 4))).mean(-2))


def gated_heads(m: Any, x: Tensor) -> Any:
    """Return attention with one gate for each entry of a head, which all queries share."""
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    return m.out(attention(q * m.gate(x).sigmoid()[:, None], k, v))


def additive_attention(m: Any, x: Tensor) -> Any:
    scores = ((m.q(x)[:, :, None] + m.k(x)[:, None]).tanh() * m.scale).sum(-1)
    return m.head(scores.softmax(-1) @ x)


def scan_by_sums(m: Any, x: Tensor) -> Any:
    """Compute linear attention without a matrix product."""
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    state, outputs = torch.zeros(len(x), 2, 4, 4), []
    for t in range(4):
        state = 0.9 * state + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, :, None] * state).sum(2).flatten(1))
    return m.head(torch.stack(outputs, 1))


def channel_states(m: Any, x: Tensor) -> Any:
    """Compute a recurrence for each channel, as S4D does."""
    state, outputs = torch.zeros(len(x), 12, 3), []
    for u in m.inner(x).unbind(1):
        state = m.decay.sigmoid() * state + m.b * u[..., None]
        outputs.append(torch.einsum("bdn,dn->bd", state, m.c))
    return m.out(torch.stack(outputs, 1).relu())


x = torch.randn(2, 9, 12)
image = torch.randn(2, 8, 5, 5)
tokens = torch.randn(9, 8)


def relative(m: Any, x: Tensor) -> Any:
    """Compute attention whose logits include products with a table of relative positions."""
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    size = x.shape[1]
    places = F.pad(q @ m.positions.T, (0, 1)).flatten(-2)
    places = F.pad(places, (0, size - 1)).unflatten(-1, (size + 1, 2 * size - 1))
    scores = q @ k.mT + places[..., :size, size - 1 :]
    return m.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def viewed_in_place(m: Any, x: Tensor) -> Any:
    y = m.both(x)
    y.unsqueeze_(0)
    y.masked_fill_(torch.zeros(20, dtype=torch.bool), float("-inf"))
    gate, up = F.hardswish(y.squeeze_(0), inplace=True).chunk(2, -1)
    return m.out(gate.scatter(1, torch.zeros(2, 1, 10, dtype=torch.long), 0.5) * up)


def attention_by_sums(m: Any, x: Tensor) -> Any:
    """Compute attention with explicit inner products and sums over tokens."""
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1).softmax(-1)
    attended = (scores[..., None] * v[..., None, :, :]).sum(-2)
    return m.out(attended.transpose(1, 2).flatten(2))


def pooled(m: Any, x: Tensor) -> Any:
    """Compute attention with one query, whose logits are sums over all outputs."""
    scores = (m.q(x[:, :1]) * m.k(x)).sum(-1, keepdim=True) / m.size(x).norm(dim=-1, keepdim=True)
    return m.out((scores.softmax(1) * m.v(x)).sum(1))


def graph_attention(m: Any, x: Tensor) -> Any:
    """Compute attention whose logits are sums of two inner products with parameters."""
    z = heads(m.inner(x), 4)
    scores = (z * m.target).sum(-1)[..., None] + (z * m.source).sum(-1)[..., None, :]
    attended = (scores.softmax(-1)[..., None] * z[:, :, None]).sum(3)
    return m.out(attended.transpose(1, 2).flatten(2))


def spatial_gate(m: Any, x: Tensor) -> Any:
    y = m.first(x).relu()
    statistics = [y.max(1, keepdim=True).values, y.mean(1, keepdim=True)]
    return m.out(y * m.gate(torch.cat(statistics, 1)).sigmoid())


def attention_by_distances(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(y, 4) for y in m.qkv(x).chunk(3, -1))
    attended = (-torch.cdist(q, k)).softmax(-1) @ v
    return m.out(attended.transpose(1, 2).flatten(2))


def convolved_by_tokens(m: Any, x: Tensor) -> Any:
    """Compute ConvBERT's attention: a kernel per head and token sums values of nearby tokens."""
    values = F.unfold(m.values(x).transpose(1, 2)[..., None], (3, 1), padding=(1, 0))
    values = values.transpose(1, 2).reshape(-1, 4, 3)
    kernels = m.kernels(x).reshape(-1, 3, 1).softmax(1)
    return m.out((values @ kernels).reshape(*x.shape))


def mixed_scales(m: Any, x: Tensor) -> Any:
    """Compute CoAT's class tokens: a layer that sums over branches channel by channel."""
    scales = torch.stack([(m.stem(x) + layer(x))[:, 0] for layer in (m.a, m.b)], 1)
    return m.out(m.scales(scales)[:, 0])


def halves(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Compute a layer whose halves are combined by a function of two tensors."""
    return lambda: Module(
        lambda m, x: m.out(function(*m.both(x).chunk(2, -1))), "both 12 20, out 10 12"
    )


EXPERTS: dict[str, Any] = {
    "gate_up": lambda w: [h for e in w for h in e.chunk(2)], "down": lambda w: [*w]
}  # fmt: skip
"""The matrices of experts in two parameters."""
CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Pieces | None]]] = {
    "attention by sums": (
        lambda: Module(attention_by_sums, "qkv 12 36, out 12 12"),
        x,
        {"qkv.weight": rows(4)},
    ),
    "attention with one query": (
        lambda: Module(pooled, "q 12 12, k 12 12, size 12 6, v 12 12, out 12 4"),
        x,
        {f"{name}.weight": whole for name in ("q", "k", "size", "v")},
    ),
    "attention with parameters as keys": (
        lambda: Module(
            graph_attention,
            "inner 12 12, out 12 12",
            **{name: torch.randn(3, 1, 4) for name in ("source", "target")},
        ),
        x,
        {"inner.weight": rows(4), "source": None, "target": None},
    ),
    "a gate from the maximum of all channels": (
        lambda: Module(
            spatial_gate,
            first=nn.Conv2d(8, 6, 3, bias=False),
            gate=nn.Conv2d(2, 1, 1),
            out=nn.Conv2d(6, 4, 1),
        ),
        image,
        {"first.weight": whole},
    ),
    "a kernel of each head": (
        lambda: Module(convolved_by_tokens, "values 12 12, kernels 12 9, out 12 12"),
        x,
        {"values.weight": rows(4), "kernels.weight": rows(3)},
    ),
    "a sum over branches by a layer": (
        lambda: Module(
            mixed_scales, "stem 12 12, a 12 12, b 12 12, out 12 2", scales=nn.Conv1d(2, 1, 1)
        ),
        x,
        {"a.weight": whole, "b.weight": whole},
    ),
    "branches that are weighed": (
        lambda: Module(
            lambda m, x: m.out(
                (
                    m.both(x).unflatten(1, (2, 4))
                    * m.weigh(x.mean((2, 3), keepdim=True)).unflatten(1, (2, 4)).softmax(1)
                ).sum(1)
            ),
            both=nn.Conv2d(8, 8, 3, groups=2),
            weigh=nn.Conv2d(8, 8, 1),
            out=nn.Conv2d(4, 4, 1),
        ),
        image,
        {"both.weight": convolution(2), "weigh.weight": whole},
    ),
    "a power": (halves(lambda a, b: a.abs() ** b), x, {"both.weight": rows(10)}),
    "a minimum": (halves(torch.minimum), x, {"both.weight": rows(10)}),
    "an angle": (halves(torch.atan2), x, {"both.weight": rows(10)}),
    "a mean and its noise": (
        halves(lambda a, b: a + b.exp() * torch.randn_like(b)),
        x,
        {"both.weight": rows(10)},
    ),
    "an addition after an activation": (
        halves(lambda a, b: F.silu(a) + b),
        x,
        {"both.weight": rows(10)},
    ),
    "a product of exponents": (
        halves(lambda a, b: (F.logsigmoid(a) + F.softplus(b).log()).logcumsumexp(1).exp()),
        x,
        {"both.weight": rows(10)},
    ),
    "an addition for each pair of tokens": (
        halves(lambda a, b: a[:, :, None] + b[:, None]),
        x,
        {"both.weight": rows(10)},
    ),
    "rotary halves": (
        lambda: Module(rotary_halves, "qkv 12 36, out 12 4"),
        x,
        {"qkv.weight": rows(4)},
    ),
    "random features of rotary heads": (
        lambda: Module(rotary_features, "qkv 12 36, out 12 4"),
        x,
        {"qkv.weight": rows(4)},
    ),
    "experts with several slots": (
        lambda: Module(
            lambda m, x: x @ m.slots @ torch.cat([m.a(x[:, :2]), m.b(x[:, 2:4])], 1),
            "a 12 6, b 12 6",
            slots=torch.randn(12, 4),
        ),
        x,
        {"a.weight": whole, "b.weight": whole},
    ),
    "tokens mixed by heads": (
        lambda: Module(
            lambda m, x: m.out(
                x * torch.einsum("bnhd,hmn->bmhd", x.unflatten(-1, (3, 4)), m.mix).flatten(2)
            ),
            "out 12 4",
            mix=torch.randn(3, x.shape[1], x.shape[1]),
        ),
        x,
        {"mix": lambda w: w.unbind()},
    ),
    "a sum of branches": (
        lambda: Module(
            lambda m, x: m.out(m.parts(x).unflatten(-1, (2, 6)).sum(-2).relu()),
            "parts 12 12, out 6 12",
        ),
        x,
        {"parts.weight": whole},
    ),
    "a product with a table": (
        lambda: Module(
            lambda m, x: m.out(attention(heads(m.q(m.tokens), 4), *[heads(m.kv(x), 4)] * 2)),
            "q 12 12, kv 12 12, out 12 12",
            tokens=torch.randn(2, 5, 12),
        ),
        x,
        {"tokens": None, "q.weight": rows(4), "kv.weight": rows(4)},
    ),
    "glu": (
        lambda: Module(
            lambda m, x: m.out(F.glu(m.both(x), 1)),
            both=nn.Conv2d(8, 20, 1, bias=False),
            out=nn.Conv2d(10, 8, 3),
        ),
        image,
        {"both.weight": convolution(2), "out.weight": None},
    ),
    "a chunk and a product": (
        lambda: Module(
            lambda m, x: m.last(m.out((h := m.both(x).chunk(2, -1))[0] * F.gelu(h[1]))),
            "both 12 20, out 10 12, last 12 3",
        ),
        x,
        {"both.weight": rows(10), "out.weight": whole, "last.weight": None},
    ),
    "a fused convolution": (
        lambda: Module(fused_convolution, "out 8 8", to_qkv=nn.Conv2d(8, 24, 1)),
        image,
        {"to_qkv.weight": convolution(6), "out.weight": None},
    ),
    "rotary of a part": (
        lambda: Module(rotary, "qkv 12 36, out 12 12"),
        x,
        {"qkv.weight": rows(6)},
    ),
    "complex rotary": (
        lambda: Module(complex_rotary, "qkv 12 24, out 8 12"),
        x,
        {"qkv.weight": rows(4)},
    ),
    "columns of two weights": (
        lambda: Module(latent, "down 12 8, up 6 14, q 12 12, out 6 12"),
        x,
        {"down.weight": rows(6, 2), "up.weight": rows(4, 3), "q.weight": rows(6)},
    ),
    "gates of heads": (
        lambda: Module(gated_attention, "q 12 16, kv 12 16, out 8 12"),
        x,
        {"q.weight": rows(4), "kv.weight": rows(4)},
    ),
    "six modulations": (
        lambda: Module(
            modulated, "ada 5 72, first 12 12, second 12 12, head 12 2", norm=nn.LayerNorm(12)
        ),
        (x, torch.randn(2, 5)),
        {"ada.weight": rows(12), "first.weight": whole, "second.weight": whole},
    ),
    "experts by index": (
        lambda: Module(
            experts, "gate 8 3, head 8 4", gate_up=torch.randn(3, 12, 8), down=torch.randn(3, 8, 6)
        ),
        tokens,
        {"gate.weight": None, **EXPERTS},
    ),
    "experts looked up, cast and scaled": (
        lambda: Module(
            chosen_experts,
            "gate 8 3, head 8 4",
            gate_up=torch.randn(3, 12, 8),
            down=torch.randn(3, 8, 6),
        ),
        tokens,
        {"gate.weight": None, **EXPERTS},
    ),
    "experts without tokens": (
        lambda: Module(
            experts,
            "gate 8 40, head 8 4",
            gate_up=torch.randn(40, 12, 8),
            down=torch.randn(40, 8, 6),
        ),
        tokens,
        EXPERTS,
    ),
    "a bank of queries, keys and values": (
        lambda: Module(
            lambda m, x: m.out(attention(*(heads(x @ w, 4) for w in m.bank))),
            "out 12 4",
            bank=torch.randn(3, 12, 12),
        ),
        x,
        {"bank": lambda w: [p.T for e in w for p in e.split(4, 1)]},
    ),
    "batched experts [e, in, out], interleaved": (
        lambda: Module(
            batched_experts,
            "gate 8 3, head 8 4",
            gate_up=torch.randn(3, 8, 12),
            down=torch.randn(3, 6, 8),
        ),
        tokens,
        {
            "gate_up": lambda w: [e[:, j::2].T for e in w for j in (0, 1)],
            "down": lambda w: [e.T for e in w],
        },
    ),
    "experts whose inputs are weighed": (
        lambda: Module(
            lambda m, x: m.head(x + ((x * m.gate(x).sigmoid().T[..., None]) @ m.experts).sum(0)),
            "gate 8 3, head 8 4",
            experts=torch.randn(3, 8, 8),
        ),
        tokens,
        {"experts": lambda w: [e.T for e in w], "head.weight": None},
    ),
    "grouped experts": (
        lambda: Module(
            grouped_experts,
            "head 16 4",
            gate_up=torch.randn(2, 32, 16),
            down=torch.randn(2, 16, 16),
        ),
        torch.randn(9, 16),
        EXPERTS,
    ),
    "a mixture of stacked weights": (
        lambda: Module(mixture, "a1 12 6, b1 12 6, a2 6 12, b2 6 12, gate 12 2, head 12 4"),
        x,
        {"a1.weight": whole, "a2.weight": whole, "b2.weight": whole, "gate.weight": None},
    ),
    "gates of streams": (
        lambda: Module(gated_streams, "down 12 5, up 5 12, head 4 4"),
        x,
        {"down.weight": whole, "up.weight": whole},
    ),
    "additive attention": (
        lambda: Module(additive_attention, "q 12 8, k 12 8, head 12 4", scale=torch.randn(8)),
        x,
        {"q.weight": whole, "k.weight": whole},
    ),
    "a scan by sums": (
        lambda: Module(scan_by_sums, "qkv 12 24, head 8 4"),
        x,
        {"qkv.weight": rows(4)},
    ),
    "inputs, gates and steps of a recurrence": (
        lambda: Module(state_space, "inner 12 24, out 8 12"),
        x,
        {"inner.weight": rows(8, 4, 4, 3, 3, 2), "out.weight": None},
    ),
    "a recurrence of channels": (
        lambda: Module(
            channel_states,
            "inner 12 12, out 12 4",
            **{name: torch.randn(12, 3) for name in ("b", "c", "decay")},
        ),
        x,
        {"inner.weight": whole, "b": None, "c": None, "decay": None},
    ),
    "a head whose outputs are scaled": (
        lambda: Module(
            lambda m, x: (F.normalize(y := m.head(m.first(x)), dim=-1), y * x[..., :1]),
            "first 12 12, head 12 4",
        ),
        x,
        {"first.weight": whole, "head.weight": None},
    ),
    "an [in, out] weight": (
        lambda: Module(
            lambda m, x: m.out(attention(*(heads(y, 4) for y in (x @ m.fused).chunk(3, -1)))),
            "out 8 12",
            fused=torch.randn(12, 24),
        ),
        x,
        {"fused": columns(4)},
    ),
    "groups of a convolution": (
        lambda: Module(
            lambda m, x: m.out(m.grouped(x).relu()),
            grouped=nn.Conv2d(8, 12, 3, groups=2, bias=False),
            out=nn.Conv2d(12, 4, 1),
        ),
        image,
        {"grouped.weight": convolution(2)},
    ),
    "a depthwise convolution": (
        lambda: Module(
            lambda m, x: m.out(m.depthwise(m.first(x))),
            first=nn.Conv2d(8, 8, 1),
            depthwise=nn.Conv2d(8, 8, 3, groups=8),
            out=nn.Conv2d(8, 4, 1),
        ),
        image,
        {"first.weight": convolution(1), "depthwise.weight": None},
    ),
    "transposed convolutions": (
        lambda: Module(
            lambda m, x: m.out(m.second(m.first(x))),
            first=nn.ConvTranspose2d(8, 6, 2, stride=2),
            second=nn.ConvTranspose2d(6, 12, 2, groups=3),
            out=nn.Conv2d(12, 4, 1),
        ),
        image,
        {"first.weight": transposed_convolution(1), "second.weight": transposed_convolution(3)},
    ),
    "a weight that is normed": (
        lambda: Module(
            lambda m, x: m.out(F.glu(m.both(x))), "out 10 12", both=weight_norm(linear(12, 20))
        ),
        x,
        {
            "both.parametrizations.weight.original0": None,
            "both.parametrizations.weight.original1": rows(10),
        },
    ),
    "attention by a fused kernel": (
        lambda: Module(fused_attention, "qkv 12 36, out 12 12"),
        x,
        {"qkv.weight": rows(4), "out.weight": None},
    ),
    "a weight that is divided by its norm": (
        lambda: Module(
            lambda m, x: m.out(F.glu(F.linear(x, F.normalize(m.both.weight)))),
            "both 12 20, out 10 12",
        ),
        x,
        {"both.weight": rows(10), "out.weight": None},
    ),
    "a quantized weight": (
        lambda: Module(
            lambda m, x: m.out(
                F.glu(F.linear(x, torch.fake_quantize_per_tensor_affine(m.both.weight, 1, 0, 0, 9)))
            ),
            "both 12 20, out 10 12",
        ),
        x,
        {"both.weight": rows(10), "out.weight": None},
    ),
    "a standardized weight": (
        lambda: Module(
            lambda m, x: m.out(F.glu(F.linear(x, standardized(m.both.weight)))),
            "both 12 20, out 10 12",
        ),
        x,
        {"both.weight": rows(10), "out.weight": None},
    ),
    "attention with positions of the example": (
        lambda: Module(positioned, "qkv 12 36, out 12 12"),
        (x, torch.rand(2, 9)),
        {"qkv.weight": rows(4), "out.weight": None},
    ),
    "attention over two streams": (
        lambda: Module(joint_attention, "first 12 36, second 12 36, out 12 12"),
        x,
        {"first.weight": rows(4), "second.weight": rows(4), "out.weight": None},
    ),
    "attention to a single token": (
        lambda: Module(
            lambda m, x: m.out(
                single_token(*(heads(y, 4) for y in (m.q(x), *m.kv(x[:, :1]).chunk(2, -1))))
            ),
            "q 12 12, kv 12 24, out 12 12",
        ),
        x,
        {"q.weight": rows(4), "kv.weight": rows(4)},
    ),
    "queries of several heads and one key": (
        lambda: Module(
            lambda m, x: m.out(one_key(heads(m.q(x), 4), m.k(x))), "q 12 12, k 12 4, out 12 12"
        ),
        x,
        {"q.weight": rows(4), "k.weight": whole},
    ),
    "a stream that layers take whole and in blocks": (
        lambda: Module(
            lambda m, x: m.out(y := m.first(x)) + m.gate(y.unflatten(-1, (3, 4))).flatten(-2),
            "first 12 12, gate 4 4, out 12 12",
        ),
        x,
        {"first.weight": whole},
    ),
    "a weight with a spectral norm by a hook": (
        lambda: Module(
            lambda m, x: m.out(F.glu(m.both(x))),
            "out 10 12",
            both=nn.utils.spectral_norm(linear(12, 20)).eval(),
        ),
        x,
        {"both.weight_orig": rows(10)},
    ),
    "a view of a weight": (
        lambda: Module(
            lambda m, x: m.out(
                attention(q := torch.einsum("btd,hde->bhte", x, m.q), q, heads(m.v(x), 4))
            ),
            "v 12 12, out 12 12",
            q=torch.randn(3, 12, 4),
        ),
        x,
        {"q": lambda w: [h.T for h in w], "v.weight": rows(4)},
    ),
    "a group of heads for each part of a weight": (
        lambda: Module(grouped_heads, "down 4 12, up 12 12"),
        x,
        {"down.weight": rows(4)},
    ),
    "parts of a weight": (
        lambda: Module(
            lambda m, x: m.out(F.linear(x, m.both[:10]) * F.linear(x, m.both[10:])),
            "out 10 12",
            both=torch.randn(20, 12),
        ),
        x,
        {"both": rows(10)},
    ),
    "two weights as one": (
        lambda: Module(
            lambda m, x: m.out(F.glu(F.linear(x, torch.cat([m.a.weight, m.b.weight])))),
            "a 12 10, b 12 10, out 10 12",
        ),
        x,
        {"a.weight": whole, "b.weight": whole},
    ),
    "multi-head attention": (
        lambda: Module(
            lambda m, x: m.out(m.attention(x, x, x)[0]),
            "out 12 12",
            attention=nn.MultiheadAttention(12, 3, batch_first=True).eval(),
        ),
        x,
        {"attention.in_proj_weight": rows(4), "attention.out_proj.weight": whole},
    ),
    "an encoder layer": (
        lambda: nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval(),
        x,
        {
            "self_attn.in_proj_weight": rows(4),
            "self_attn.out_proj.weight": whole,
            "linear1.weight": whole,
            "linear2.weight": whole,
        },
    ),
    "a recurrent layer": (
        lambda: Module(recurrent, "head 5 2", gru=nn.GRU(12, 5)),
        x,
        {"gru.weight_ih_l0": rows(5), "gru.weight_hh_l0": rows(5)},
    ),
    "a table of relative positions": (
        lambda: Module(relative, "qkv 12 24, out 8 12", positions=torch.randn(17, 4)),
        x,
        {"qkv.weight": rows(4), "positions": None},
    ),
    "a view in place": (
        lambda: Module(viewed_in_place, "both 12 20, out 10 12"),
        x,
        {"both.weight": rows(10)},
    ),
    "a tied head": (
        lambda: Module(
            lambda m, i: F.linear(m.inner(m.table(i)), m.table.weight),
            "inner 12 12",
            table=nn.Embedding(7, 12),
        ),
        torch.tensor([[1, 2, 3]]),
        {"table.weight": None, "inner.weight": whole},
    ),
    "tables": (
        lambda: Module(
            lambda m, x: m.head(
                m.first(m.tokens.expand(len(x), -1, -1) + m.bias[torch.tensor([0, 3])].mean())
                + m.second(x[:, :4] + m.positions[:4])
            ),
            "first 12 12, second 12 12, head 12 2",
            tokens=torch.randn(1, 4, 12),
            positions=torch.randn(20, 12),
            bias=torch.randn(5, 3),
        ),
        x,
        {"tokens": None, "positions": None, "bias": None, "first.weight": whole},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_steps_on_the_matrices_apart(name: str) -> None:
    build, example, expected = CASES[name]
    torch.manual_seed(0)
    model = build()
    split = split_parameters(model, example=example)
    units = {n: g.get("units") for g in split for n, _ in g["params"]}
    for weight, pieces in expected.items():
        assert (units[weight] is None) == (pieces is None), f"{weight}: {split}"
        if pieces is not None:
            _compare(model.get_parameter(weight).detach().double(), units[weight], pieces)
    assert all(row.reason for row in split.rows)
    # One sequence shows the same matrices; the view in place has fixed sizes.
    if isinstance(example, Tensor) and len(example) > 1 and name != "a view in place":
        one = split_parameters(model, example=example[:1])
        assert {n: g.get("units") for g in one for n, _ in g["params"]} == units


SCORES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "added": lambda m, scores: scores + m.table,
    "subtracted": lambda m, scores: m.table - scores,
    "multiplied": lambda m, scores: m.table * scores,
    "added in place": lambda m, scores: scores.softmax(-1).add_(m.table),
    "where positive": lambda m, scores: torch.where(scores > 0, scores, m.table),
    "looked up": lambda m, scores: (
        scores + m.table.flatten()[torch.arange(m.table.numel())].view_as(scores)
    ),
}


@pytest.mark.parametrize("form", ["tensor", "function"])
@pytest.mark.parametrize("combine", SCORES)
def test_a_table_of_the_shape_of_one_sequence_is_no_weight(combine: str, form: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x + m.start), 4) for layer in (m.q, m.k, m.v))
        scores = SCORES[combine](m, q @ k.mT)
        return m.head(m.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))

    one = x[:1]
    table, start = torch.randn(1, 3, one.shape[1], one.shape[1]), torch.randn_like(one)
    model = Module(
        forward, "q 12 12, k 12 12, v 12 12, out 12 12, head 12 2", table=table, start=start
    )
    split = split_parameters(model, example=one if form == "tensor" else lambda: model(one))
    found = {n: g.get("units", {}).get("rows") for g in split for n, _ in g["params"]}
    assert found == {
        **dict.fromkeys(("table", "start", "head.weight")),
        **dict.fromkeys(("q.weight", "k.weight", "v.weight"), [4]),
        "out.weight": [],
    }


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda gate, made: (gate[..., None] * made).sum(-2),
    "a product from the left": lambda gate, made: (gate.unsqueeze(-2) @ made).squeeze(-2),
    "a product from the right": lambda gate, made: (made.mT @ gate.unsqueeze(-1)).squeeze(-1),
    "an einsum": lambda gate, made: torch.einsum("...e,...ed->...d", gate, made),
}
MIXTURES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, int]]] = {
    "layers": (lambda m, x: torch.stack([m.a(x), m.b(x), m.c(x)], -2), {"a": 1, "b": 1, "c": 1}),
    "layers and the input": (lambda m, x: torch.stack([m.a(x), m.b(x), x], -2), {"a": 1, "b": 1}),
    "layers, added to one": (
        lambda m, x: torch.stack([m.a(x), m.b(x), m.c(x)], -2) + m.d(x)[..., None, :],
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ),
    "a layer": (lambda m, x: m.fused(x).unflatten(-1, (3, 12)), {"fused": 3}),
    "a stack, by an einsum": (lambda m, x: torch.einsum("btd,edh->bteh", x, m.w), {"w": 3}),
    "a stack, by a batched product": (
        lambda m, x: (
            (x.flatten(0, 1).expand(3, -1, -1) @ m.w).unflatten(1, x.shape[:2]).movedim(0, 2)
        ),
        {"w": 3},
    ),
    "a stack, by a product that repeats it": (
        lambda m, x: (x[:, None] @ m.w).transpose(1, 2),
        {"w": 3},
    ),
    "two stacks": (
        lambda m, x: ((x[:, None] @ m.w).relu() @ m.v).transpose(1, 2),
        {"w": 3, "v": 3},
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_same_matrices_however_it_is_written(name: str, spelling: str) -> None:
    made, matrices = MIXTURES[name]
    layers: dict[str, Any] = {key: linear(12, 12) for key in "abcd"}
    layers |= {"fused": linear(12, 36), "w": torch.randn(3, 12, 12), "v": torch.randn(3, 12, 12)}
    model = Module(
        lambda m, x: m.head(SPELLINGS[spelling](m.gate(x).softmax(-1), made(m, x))),
        "gate 12 3, head 12 4",
        **{key: layers[key] for key in matrices},
    )
    rows = {row.name.partition(".")[0]: row for row in split_parameters(model, example=x).rows}
    assert {key: rows[key].matrices for key in matrices} == matrices
    assert {rows[key].matrix for key in matrices} == {(12, 12)}
    # The gate has one output for each matrix, or one vector of outputs for a weight.
    assert rows["gate"].rule == ("spectral" if name == "a layer" else "adamw")


def _compare(start: Tensor, units: Any, pieces: Pieces) -> None:
    fused, gradient = nn.Parameter(start.clone()), torch.randn_like(start)
    parts = [nn.Parameter(piece.clone()) for piece in pieces(start)]
    fused.grad = gradient
    for part, own in zip(parts, pieces(gradient), strict=True):
        part.grad = own.clone()
    settings: Any = {"rule": "muon", "lr": 0.1}
    SpectralOptimizer([{"params": [fused], "units": units}], **settings).step()
    SpectralOptimizer(parts, **settings).step()
    for part, stepped in zip(parts, pieces(fused.detach()), strict=True):
        torch.testing.assert_close(stepped, part.detach(), rtol=1e-9, atol=1e-11)


class Stateful(nn.Module):
    """A module with all kinds of state that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 6, 1)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Conv1d(6, 4, 1)
        self.register_buffer("cache", None)
        self.register_buffer("seen", torch.zeros(2))
        self.plain = torch.zeros(3)
        self.counts = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.clone()
        self.seen += 1
        self.plain += 1
        self.counts.append(len(self.counts))
        self.late = x
        random.random()
        return x + self.second(F.dropout(self.norm(self.first(x)).relu(), training=True))


def test_a_pass_leaves_everything_as_it_was() -> None:
    model = Stateful()
    model.norm.eval()
    model.norm.weight.requires_grad_(False)
    model.norm.running_mean.fill_(float("nan"))
    model.first.weight.grad = torch.ones_like(model.first.weight)
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes, keys = [m.training for m in model.modules()], [sorted(vars(m)) for m in model.modules()]
    example = torch.randn(2, 4, 3)
    rng, own = torch.get_rng_state(), random.getstate()
    split = split_parameters(model, example=example)
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == own
    assert [m.training for m in model.modules()] == modes
    assert [sorted(vars(m)) for m in model.modules()] == keys
    assert model.cache is None and model.counts == [0] and not model.plain.any()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)
    assert not model.norm.weight.requires_grad and model.first.weight.grad.eq(1).all()
    assert calls == [False]
    assert len(split.matrices) == 2
    assert torch.backends.mha.get_fastpath_enabled()


class Nested(nn.Module):
    """A module that writes to its attributes' contents and to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(3, 4), linear(4, 3)
        self.caches = [torch.zeros(4), (torch.zeros(4),)]
        self.named = {"tensors": [torch.zeros(4)], "counts": {"calls": 0}}
        self.shared = self.named["tensors"]
        self.array = np.zeros(2)
        self.generators = [torch.Generator(), random.Random(0), np.random.default_rng(0)]

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        hidden = self.first(x) + torch.randn(4, generator=self.generators[0])
        for tensor in (self.caches[0], self.caches[1][0], self.named["tensors"][0]):
            tensor.add_(1)
        assert self.shared[0].all()  # the tensor is still the same object
        self.named["counts"]["calls"] += 1
        self.array += self.generators[1].random() + self.generators[2].random()
        return x + self.second(hidden.relu())


def test_a_pass_leaves_what_is_in_containers_and_generators_as_it_was() -> None:
    model, example = Nested(), torch.zeros(2, 3)
    split_parameters(model, example=example)
    assert not example.any()
    assert not any(t.any() for t in (model.caches[0], model.caches[1][0], model.shared[0]))
    assert model.shared is model.named["tensors"] and model.named["counts"] == {"calls": 0}
    assert not model.array.any()
    fresh = Nested().generators
    assert torch.equal(model.generators[0].get_state(), fresh[0].get_state())
    assert [g.random() for g in model.generators[1:]] == [g.random() for g in fresh[1:]]


class Elements(TorchDispatchMode):
    """A mode that counts the elements that operations write, including operations of inner
    modes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.count += t.numel()
        return result


def test_a_pass_costs_at_most_three_plain_ones() -> None:
    layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers, linear(64, 10)).eval()
    example = torch.randn(2, 32, 64)
    with Elements() as plain, torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        model(example)
        torch.backends.mha.set_fastpath_enabled(True)
    with Elements() as watched:
        split_parameters(model, example=example)
    assert plain.count < watched.count < 3 * plain.count


def test_units_and_elementwise_go_before_what_is_seen() -> None:
    model = CASES["glu"][0]()
    split = split_parameters(
        model, example=image, units={"both.weight": {"rows": [5]}}, elementwise=model.out
    )
    assert [(row.matrices, row.reason) for row in split.rows if row.rule != "adamw"] == [
        (4, "units")
    ]
    assert "elementwise" in str(split)


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping", "function", "half"])
def test_an_example_has_many_forms(form: str) -> None:
    model = CASES["a chunk and a product"][0]()

    def run() -> None:
        with torch.autocast("cpu", enabled=form == "half"):
            model(x)

    example = {"tensor": x, "tuple": (x,), "mapping": {"x": x}}.get(form, run)
    model.forward = lambda x: model.function(model, x)
    row = split_parameters(model, example=example).rows[0]
    assert (row.matrices, row.matrix) == (2, (10, 12))
    assert row.reason == "a product uses 10 columns at a time, a layer all"


def two_ways(m: Any, x: Tensor) -> Tensor:
    y = m.both(x)
    return m.a(torch.cat([y[..., :4], y[..., 8:12]], -1)) + m.b(
        y[..., [4, 5, 6, 7, 12, 13, 14, 15]]
    )


@torch.library.custom_op("spectrain_tests::product", mutates_args=())
def hidden(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


UNUSED = Module(lambda m, x: m.used(x), "used 12 4, unused 12 4")
EDGES = torch.eye(x.shape[1]).to_sparse()
REFUSED: dict[str, tuple[nn.Module, str]] = {
    "not used": (
        UNUSED,
        "^unused.weight: the forward pass did not use it\n.*units.*elementwise.*example",
    ),
    "a part that is dropped": (
        Module(lambda m, x: m.out(m.both(x)[..., :8]), "both 12 12, out 8 4"),
        "^both.weight: 4 of its 12 outputs are unused\n",
    ),
    "distances larger than the example's": (
        Module(
            lambda m, x: m.out((m.q(x) @ m.k(x).mT + (x @ m.far)[..., :9]).softmax(-1) @ m.v(x)),
            "q 12 12, k 12 12, v 12 12, out 12 4",
            far=torch.randn(12, 20),
        ),
        "^far: 11 of its 20 outputs are unused\n",
    ),
    "sets": (
        Module(two_ways, "both 12 16, a 8 4, b 8 4"),
        "both.weight: .*: 0-3, 8-11; 4-7, 12-15",
    ),
    "outputs along two axes": (
        Module(
            lambda m, x: (
                m.a(m.both(x).unflatten(-1, (2, 4))).sum((2, 3))
                + m.b(m.both(x).unflatten(-1, (2, 4)).mT).sum((2, 3))
            ),
            "both 12 8, a 4 3, b 2 3",
        ),
        "^both.weight: operations on two axes would divide it",
    ),
    "a hidden product": (
        Module(lambda m, x: m.out(hidden(x, m.weight)), "out 6 4", weight=torch.ones(6, 12)),
        "weight: spectrain_tests.product.default hides",
    ),
    "tokens that a frozen layer takes": (
        Module(
            lambda m, x: m.out(attention(*(heads(y, 4) for y in (m.q(x), *[m.kv(m.tokens)] * 2)))),
            "q 12 12, out 12 12",
            tokens=torch.randn(1, 6, 12),
            kv=linear(12, 12).requires_grad_(False),
        ),
        "^tokens: a product with a weight that is frozen or given hides",
    ),
    "a weight of products of factors": (
        Module(
            lambda m, x: m.out(F.linear(x, (m.a @ m.b) * (m.c @ m.d))),
            "out 12 4",
            a=torch.randn(12, 2),
            b=torch.randn(2, 12),
            c=torch.randn(12, 2),
            d=torch.randn(2, 12),
        ),
        "^a: a product with a weight .*\nb: a product .*\nc: a product .*\nd: a product",
    ),
    "a Kronecker product of factors": (
        Module(
            lambda m, x: m.out(F.linear(x, torch.kron(m.a, m.b @ m.c))),
            "out 12 4",
            a=torch.randn(3, 3),
            b=torch.randn(4, 2),
            c=torch.randn(2, 4),
        ),
        "b: a product with a weight .*\nc: a product with a weight",
    ),
    "an expert without tokens": (
        Module(
            lambda m, x: m.out(x).index_add(
                0, torch.tensor([]).long(), m.expert(x[x[:, 0, 0] > 9])
            ),
            "expert 12 8, out 12 8",
        ),
        "^expert.weight: no token of the forward pass used it",
    ),
    "sparse tensors": (
        Module(lambda m, x: m.out(EDGES @ m.first(x[0])), "first 12 8, out 8 4"),
        "^first.weight: aten.* of sparse tensors hides",
    ),
    "distances": (
        Module(attention_by_distances, "qkv 12 36, out 12 12"),
        "qkv.weight: aten.*dist.* hides",
    ),
    "inference mode": (
        Module(torch.inference_mode()(lambda m, x: m.out(m.first(x))), "first 12 8, out 8 4"),
        "inference mode, which hides matrix products: use torch.no_grad",
    ),
    "a shape alone": (
        Module(lambda m, x: m.out(torch.zeros_like(m.first(x))), "first 12 8, out 8 4"),
        "first.weight: its outputs were neither used nor",
    ),
    "a hidden consumer": (
        Module(lambda m, x: m.out(hidden(m.first(x), torch.ones(6, 8))), "first 12 8, out 6 4"),
        "first.weight: spectrain_tests.product.default hides",
    ),
    "outputs that nothing takes": (
        Module(lambda m, x: (m.side(x), m.used(x))[1], "side 12 4, used 12 4"),
        "side.weight: its outputs were neither used nor",
    ),
    "on the meta device": (nn.Linear(12, 4, device="meta"), "weight is on the meta device"),
    "a weight of two": (
        Module(
            lambda m, x: m.out(F.linear(x, m.frozen + 2 * (m.b @ m.a))),
            "out 8 4",
            frozen=nn.Parameter(torch.randn(8, 12), requires_grad=False),
            a=torch.randn(2, 12),
            b=torch.randn(8, 2),
        ),
        "a: a sum with a weight hides the use of the weight's outputs\nb: a sum with a weight",
    ),
    "a maximum of parts": (
        Module(
            lambda m, x: m.out(m.pieces(x).unflatten(-1, (6, 4)).amax(-1)), "pieces 12 24, out 6 4"
        ),
        "pieces.weight: amax of a part of the outputs hides",
    ),
    "a maximum of parts and its place": (
        Module(
            lambda m, x: m.out(m.pieces(x).unflatten(-1, (4, 6)).max(-2).values),
            "pieces 12 24, out 6 4",
        ),
        "pieces.weight: max of a part of the outputs hides",
    ),
    "a product of complex numbers": (
        Module(
            lambda m, x: m.out((x.cfloat() @ torch.view_as_complex(m.waves)).real),
            "out 6 4",
            waves=torch.randn(12, 6, 2),
        ),
        "waves: a product of complex numbers hides",
    ),
    "a mean of parts": (
        Module(
            lambda m, x: m.head(m.out(m.pieces(x).unflatten(-1, (2, 6)).mean(-2))),
            "pieces 12 12, out 6 8, head 8 3",
        ),
        "pieces.weight: its outputs were neither used nor",
    ),
    "complex numbers": (
        Module(
            lambda m, x: m.out((x.to(torch.complex64) @ m.weight).abs()),
            "out 6 4",
            weight=torch.randn(12, 6, dtype=torch.complex64),
        ),
        "weight must be real",
    ),
    "a fused LSTM": (
        Module(lambda m, x: m.out(m.lstm(x)[0]), "out 5 4", lstm=nn.LSTM(12, 5)),
        r"lstm.weight_ih_l0: aten.\S*(lstm|rnn)\S* hides the use[\s\S]*units=",
    ),
    "an index of a layer's outputs": (
        Module(
            lambda m, x: m.out(m.table[(m.gate(x)[..., 0].sigmoid() * 4).long()]),
            "gate 12 2, out 8 4",
            table=torch.randn(5, 8),
        ),
        "gate.weight: aten.index.Tensor, which uses the outputs as an index, hides",
    ),
    "counts of a layer's outputs": (
        Module(
            lambda m, x: m.out(m.table[(m.gate(x) > 0).sum(-1)]),
            "gate 12 3, out 8 4",
            table=torch.randn(4, 8),
        ),
        "gate.weight: aten.sum.* hides",
    ),
    "a gate that all heads of queries share": (
        Module(gated_heads, "qkv 12 36, gate 12 4, out 12 4"),
        "^qkv.weight: operations on two axes",
    ),
    "blocks that alternate along both axes": (
        Module(
            lambda m, x: m.out(torch.cat([x[..., i::2] @ m.both[i::2, i::2] for i in (0, 1)], -1)),
            "out 10 4",
            both=torch.randn(12, 10),
        ),
        "both: a product with 6 of its 12 inputs hides",
    ),
    "a bank of values and outputs": (
        Module(banked_attention, "head 12 4", bank=torch.randn(4, 12, 12)),
        "bank: its stacked matrices are divided in different ways",
    ),
    "experts in the inputs of one product": (
        Module(
            lambda m, x: summed_experts(m, x.flatten(0, 1)),
            "gate 12 3, head 12 4",
            weights=torch.randn(3, 12, 12),
        ),
        "weights: a product with 24 of its 36 inputs hides",
    ),
    "merged experts": (
        Module(merged_experts, "gate 12 3, head 12 4", weights=torch.randn(3, 12, 12)),
        "weights: a product with activations, which may choose a weight, hides",
    ),
    "one matrix of two axes": (
        Module(
            lambda m, x: m.out(torch.einsum("btd,hde->bthe", x, m.q).flatten(2)),
            "out 12 12",
            q=torch.randn(3, 12, 4),
        ),
        "q: .*outputs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_refused(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        split_parameters(model, example=x)


def test_an_example_that_trains_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(linear(12, 8), nn.ReLU(), linear(8, 12), linear(12, 4))
    weights = [model[i].weight for i in (0, 2, 3)]
    weights[0].grad = torch.ones_like(weights[0])
    before, numbers = copy.deepcopy(model.state_dict()), np.random.get_state()

    def example() -> None:
        model(x)
        np.random.rand()
        with torch.enable_grad():
            sum(weight.square().sum() for weight in weights).backward()
        torch.optim.SGD(weights, lr=0.1).step()
        weights[2].data = torch.zeros(4, 12)
        model.zero_grad()
        model.requires_grad_(False)

    assert len(split_parameters(model, example=example).matrices) == 2
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(weight.requires_grad for weight in weights)
    assert weights[0].grad.eq(1).all() and weights[1].grad is None
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numbers, strict=True))


def test_a_failed_example_leaves_weights_as_they_were() -> None:
    model = linear(12, 12)
    before = model.weight.detach().clone()

    def example() -> None:
        model.weight.zero_()
        raise RuntimeError("stops")

    with pytest.raises(RuntimeError, match="stops"):
        split_parameters(model, example=example)
    assert torch.equal(model.weight, before)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused() -> None:
    from torch.nn.attention import flex_attention

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (-1, 4)).transpose(1, 2).chunk(3, 1)
        return m.out(flex_attention.flex_attention(q, k, v).transpose(1, 2).flatten(2))

    model = Module(forward, "qkv 12 36, out 12 12")
    with pytest.raises(ValueError, match="qkv.weight: flex_attention hides"):
        split_parameters(model, example=x)


class Frozen(dict[str, Any]):
    """A mapping that refuses changes, like configs of diffusers."""

    def update(self, *_: Any) -> None:
        raise TypeError("frozen")


def test_attributes_that_refuse_changes_do_not_stop_the_watch() -> None:
    model = nn.Sequential(linear(12, 8), linear(8, 4))
    model.config = Frozen(width=8)
    assert len(split_parameters(model, example=x).matrices) == 1


class Late(nn.Module):
    """A module that creates a layer in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(12, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.second is None:
            self.second = linear(8, 4)
        return self.second(self.first(x))


def test_weights_without_a_shape_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the forward pass creates second\.weight: run the model before"
    ):
        split_parameters(Late(), example=x)
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        split_parameters(nn.Sequential(nn.LazyLinear(4)))


def test_units_match_a_name_with_brackets() -> None:
    model = nn.ModuleDict({"a[0]": linear(12, 8)})
    split = split_parameters(model, units={"a[0].weight": {"rows": [2]}})
    assert split.rows[0].matrices == 4


def test_preconditioned_layers_are_followed() -> None:
    model = Module(lambda m, x: m.out(F.glu(m.gate_up_proj(x))), "gate_up_proj 12 20, out 10 12")
    preconditioned(model, blocks=["gate_up_proj"], level=1)
    row = split_parameters(model, example=x).rows[0]
    assert row.name == "gate_up_proj.parametrizations.weight.original" and row.matrices == 2


ERRORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda y, x: (y - x).square().mean(),
    "of noise": lambda y, x: (torch.randn_like(y) - y).abs().mean(-1).sum(),
    "likelihood": lambda y, x: F.gaussian_nll_loss(y[..., :6], x[..., :6], y[..., 6:].exp()),
    "likelihood of each token": lambda y, x: F.gaussian_nll_loss(
        y[..., :6], x[..., :6], y[..., 6:].exp(), reduction="none"
    ).mean(-1),
    "entropy": lambda y, x: F.binary_cross_entropy_with_logits(y, x.sigmoid()),
    "divergence": lambda y, x: F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    "added to a scaled input": lambda y, x: 0.6 * x + 0.8 * y,
    "averaged over tokens": lambda y, x: x.softmax(1).mT @ y,
    "a density": lambda y, x: ((x[..., :6] - y[..., :6]) / y[..., 6:].exp()).square(),
    "with a gate": lambda y, x: y[..., :11].softmax(-1) * y[..., 11:].sigmoid(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_head_may_end_in_a_loss_or_correct_the_input(name: str) -> None:
    model = Module(lambda m, x: ERRORS[name](m.out(m.inner(x).relu()), x), "inner 12 8, out 8 12")
    rules = {row.name: row.rule for row in split_parameters(model, example=x).rows}
    assert rules == {"inner.weight": "spectral", "out.weight": "adamw"}


def test_a_stream_of_sums_ends_without_a_head() -> None:
    """A model of hidden states: its last layers are added to others and are matrices."""
    model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 16), nn.LayerNorm(12)).eval()
    assert len(split_parameters(model, example=x).matrices) == 4
    perceptron = nn.Sequential(linear(12, 8), nn.ReLU(), linear(8, 3))
    split = split_parameters(perceptron, example=x)
    assert [row.reason for row in split.rows] == [
        "a layer uses all columns",
        "its outputs reach no further layer: a head",
    ]
    Muon(split, lr=0.1)
    two = Module(lambda m, x: (m.a(x) + m.b(x)) / 2, "a 12 3, b 12 3")
    with pytest.raises(ValueError, match="no parameter of Module uses the optimizer's rule"):
        split_parameters(two, example=x)


@pytest.mark.slow  # the import of torch's compiler
def test_a_compiled_model_is_seen_as_the_plain_one() -> None:
    split = split_parameters(torch.compile(CASES["a chunk and a product"][0]()), example=x)
    assert split.rows[0].matrices == 2


def test_weights_that_share_a_storage_are_refused() -> None:
    model = nn.Sequential(linear(12, 12), linear(12, 12))
    both = torch.randn(2, 12, 12)
    for layer, weight in zip(model, both, strict=True):
        layer.weight.data = weight
    with pytest.raises(ValueError, match=r"^1.weight shares its storage.*clone.*omit example"):
        split_parameters(model, example=x)


@pytest.fixture
def mesh(tmp_path: Any) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["fully_shard", "distribute_tensor", "ddp"])
def test_models_of_several_ranks(kind: str, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    model: Any = CASES["a chunk and a product"][0]()
    if kind == "ddp":
        split = split_parameters(nn.parallel.DistributedDataParallel(model), example=x)
        assert split.rows[0].matrices == 2 and split.replicas is not None
        return
    if kind == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        model.both.weight = nn.Parameter(distribute_tensor(model.both.weight, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="both.weight is sharded: split before sharding"):
        split_parameters(model, example=x)


ACTIVATIONS = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu"
)
ACTIVATIONS += " relu6 rrelu selu sigmoid silu softplus softshrink softsign tanhshrink"


def test_columns_pass_an_activation_with_a_parameter() -> None:
    model = nn.Sequential(linear(12, 8), nn.PReLU(8), linear(8, 4))
    split = split_parameters(model, example=x[0])
    assert split.rows[0].reason.endswith("a layer uses all columns")


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_columns_pass_an_activation(name: str) -> None:
    model = Module(lambda m, x: m.out(getattr(F, name)(m.first(x))), "first 12 8, out 8 4")
    assert split_parameters(model, example=x).rows[0].reason.endswith("a layer uses all columns")


def test_the_place_of_a_maximum_among_columns_is_a_choice() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        most, where = m.most(x).max(-1, keepdim=True)
        least, there = m.least(x).min(-1, keepdim=True)
        return m.out(m.first(x) * most * where + least * there * m.place(x).argmin(-1)[..., None])

    model = Module(forward, "most 12 3, least 12 3, place 12 3, first 12 8, out 8 4")
    assert all("router" in r.reason for r in split_parameters(model, example=x).rows[:3])


THRESHOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda h: h * (h >= h.topk(2).values[..., -1:]),
    "sort": lambda h: h * (h >= h.sort(descending=True).values[..., 1:2]),
    "max": lambda h: h * (h == h.max(-1, keepdim=True).values),
    "amax": lambda h: h.where(h.amax(-1, keepdim=True) <= h, 0.0),
    "topk of groups": lambda h: h.unflatten(-1, (2, 2)).topk(1).values.flatten(-2),
    "sort of groups": lambda h: h.unflatten(-1, (2, 2)).sort(-1).values.flatten(-2),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_outputs_compared_with_the_largest_outputs_are_a_router(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        gates = THRESHOLDS[name](m.gate(x).softmax(-1)).sum(-1, keepdim=True)
        return m.out(m.first(x) * gates), m.gate(x)

    model = Module(forward, "gate 12 4, first 12 8, out 8 4")
    gate = split_parameters(model, example=x).rows[0]
    assert gate.rule == "adamw" and gate.reason.endswith(": a router")


OVER_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: h.max(1).values,
    "max, axis kept": lambda h: h.max(-2, keepdim=True).values,
    "topk": lambda h: h.topk(2, 1).values,
    "sort": lambda h: h.sort(1).values,
    "argsort": lambda h: h.gather(1, h.argsort(1)),
    "argmax": lambda h: h.gather(1, h.argmax(1, keepdim=True)),
}


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_a_choice_among_tokens_is_none_among_columns(name: str) -> None:
    model = Module(lambda m, x: m.out(OVER_TOKENS[name](m.first(x))), "first 12 8, out 8 4")
    first = split_parameters(model, example=torch.randn(2, 5, 12)).rows[0]
    assert (first.rule, first.matrices) == ("spectral", 1)
    assert first.reason == "a layer uses all columns"


def test_a_wrong_example_is_named_where_the_model_fails() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        split_parameters(nn.Linear(4, 4), example=torch.randn(2, 5))
    assert "forward pass of example" in raised.value.__notes__[0]
