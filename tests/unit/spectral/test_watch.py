"""Matrices within weights, detected in one forward pass (`split_parameters(model, example=...)`).

Each case is a module with known matrices. A step of the fused weight equals the steps of the
separate matrices.
"""

import copy
import functools
import operator
import random
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from spectral import Muon, SpectralOptimizer, preconditioned, split_parameters
from tests.modules import linear, module

Pieces = Callable[[Tensor], Sequence[Tensor]]


def undecayed(w: Tensor) -> Sequence[Tensor]:
    """Stand for the division of a table or vector, which is no matrix and has no weight decay."""
    raise AssertionError


def pieces_of(division: str) -> Pieces | None:
    """Return the division that a string describes. "/4" means matrices of 4 rows, "/6+2" matrices
    of 6 and 2 rows in alternation, "T/4" matrices of 4 rows of the transpose, "=" one matrix, "-"
    no matrix, and "." a table or vector."""
    if division in "=-.":
        return {"=": lambda w: [w.flatten(1)], "-": None, ".": undecayed}[division]
    transpose, _, sizes = division.partition("/")
    pattern = [int(size) for size in sizes.split("+")]

    def cut(w: Tensor) -> Sequence[Tensor]:
        assert not (transpose and w.ndim == 4)
        lines = w.flatten(1) if w.ndim == 4 else (w.mT if transpose else w).flatten(0, -2)
        return lines.split(pattern * (len(lines) // sum(pattern)))

    return cut


def transposed(groups: int) -> Pieces:
    """Return a function that divides the weight of a transposed convolution."""
    return lambda w: [part.transpose(0, 1).flatten(1) for part in w.chunk(groups)]


torch.manual_seed(0)  # also for the weights of the cases below
x, image, tokens = torch.randn(2, 9, 12), torch.randn(2, 8, 5, 5), torch.randn(9, 8)
CASES: dict[str, tuple[nn.Module, Any, dict[str, Pieces | None]]] = {}
REFUSED: dict[str, tuple[nn.Module, str]] = {}
HALVED = "both 12 20 /10, out 10 12 -"
"""Layers of a case in which both halves of a layer's outputs are combined."""


def case(
    layers: str, example: Any = x, name: str = "", other: Any = None, **members: Any
) -> Callable[..., Any]:
    """Add a case. The expected divisions are given in `layers`, after the names and sizes, and in
    `other`."""

    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        model, expected = module(layers, forward, **members), dict(other or {})
        for weight, division in re.findall(r"([\w.]+)[^,]* ([=T/.-][/\d+]*)(?:,|$)", layers):
            bare = isinstance(operator.attrgetter(weight)(model), Tensor)
            expected[weight if bare else f"{weight}.weight"] = pieces_of(division)
        assert len(expected) > layers.count(","), f"{layers}: a weight without a division"
        assert (key := name or forward.__name__) not in CASES, key
        CASES[key] = model, example, expected
        return forward

    return add


def refused(message: str, layers: str = "", **members: Any) -> Callable[..., Any]:
    """Add a case whose forward pass raises an error."""

    def add(forward: Callable[..., Any]) -> Callable[..., Any]:
        assert forward.__name__ not in REFUSED
        REFUSED[forward.__name__] = module(layers, forward, **members), message
        return forward

    return add


def heads(x: Tensor, size: int = 4) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def qkv(m: Any, x: Tensor, size: int = 4) -> list[Tensor]:
    return [heads(y, size) for y in m.qkv(x).chunk(3, -1)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(q, k, v))


def attends(function: Callable[..., Tensor], layers: str = "qkv 12 36 /4, out 12 12 -") -> None:
    """Add a case of attention, computed by a function of q, k and v `[batch, head, token, 4]`."""
    forward = functools.wraps(function)(lambda m, x: m.out(joined(function(*qkv(m, x)))))
    case(layers)(forward)


attends_in_two_heads = functools.partial(attends, layers="qkv 12 24 /4, out 8 12 -")


@attends
def attention_by_a_kernel_that_a_context_manager_chooses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def turned(x: Tensor) -> Tensor:
    """Apply rotary embedding to the two halves of each head separately."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * 0.6 - b * 0.8, b * 0.6 + a * 0.8], -1)


@attends
def rotary_halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(turned(q), turned(k), v)


@attends
def features_of_rotary_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute linear attention on features of rotated queries and keys."""
    q, k = (turned(y) @ torch.ones(4, 5) for y in (q, k))
    return q.exp() @ (k.exp().mT @ v)


@attends_in_two_heads
def complex_rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turn = torch.polar(torch.ones(2), torch.ones(2))
    pairs = (torch.view_as_complex(y.unflatten(-1, (2, 2)).contiguous()) for y in (q, k))
    q, k = (torch.view_as_real(pair * turn).flatten(3) for pair in pairs)
    return F.scaled_dot_product_attention(q, k, v)


@attends
def explicit_inner_products_and_sums_over_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1).softmax(-1)
    return (scores[..., None] * v[..., None, :, :]).sum(-2)


@attends
def scores_of_distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    between = (q[..., :, None, :] - k[..., None, :, :]).square()
    return -between.unflatten(-1, (2, 2)).sum((-2, -1)).softmax(-1) @ v


@attends
def attention_by_distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-torch.cdist(q, k)).softmax(-1) @ v


LOOPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a loop over heads and queries": lambda q, k: q @ k.mT,
    "a loop over heads and queries, by distances": lambda q, k: (
        -(q[:, :, None] - k[:, None]).abs().sum(-1)
    ),
}
for name, scored in LOOPS.items():

    @case("qkv 12 36 /4, out 12 12 -", name=name)
    def a_loop(m: Any, x: Tensor, scored: Any = scored) -> Any:
        out = []
        for q, k, v in zip(*(y.unbind(1) for y in qkv(m, x)), strict=True):
            scores = scored(q, k).softmax(-1).unbind(1)
            out.append(torch.stack([(each[..., None] * v).sum(1) for each in scores], 1))
        return m.out(torch.cat(out, -1))


@case("qkv 12 36 /4, out 12 12 -")
def scores_of_distances_of_rotary_heads(m: Any, x: Tensor) -> Any:
    q, k, v = m.qkv(x).unflatten(-1, (3, 3, 4)).permute(3, 0, 2, 1, 4)
    between = turned(q)[..., :, None, :] - turned(k)[..., None, :, :]
    return m.out(joined(between.abs().neg().sum(-1).softmax(-1) @ v))


@case("inner 12 8 /4, codes 2x5x4 ., out 10 4 -")
def distances_of_two_heads_to_their_codes(m: Any, x: Tensor) -> Any:
    between = m.inner(x).unflatten(-1, (2, 1, 4)) - m.codes
    return m.out(between.square().sum(-1).neg().exp().flatten(-2))


@attends_in_two_heads
def a_scan_without_a_matrix_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = torch.zeros(len(q), q.shape[1], 4, 4), []
    for t in range(4):
        state = 0.9 * state + k[:, :, t, :, None] * v[:, :, t, None]
        outputs.append((q[:, :, t, :, None] * state).sum(2))
    return torch.stack(outputs, 2)


def decayed_scan(axis: int, read: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes linear attention whose state decays along its keys (-1) or
    values (-2)."""

    def scan(m: Any, x: Tensor) -> Tensor:
        q, k, v, decay = (heads(y)[..., None] for y in m.qkv(x).chunk(4, -1))
        state, outputs = torch.zeros(len(x), 3, 4, 4), []
        for t in range(4):
            factor = decay[:, :, t].sigmoid().transpose(-1, axis)
            state = factor * state + k[:, :, t] * v[:, :, t].mT
            outputs.append(read(q[:, :, t], state).flatten(1))
        return m.out(torch.stack(outputs, 1))

    return scan


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda q, state: (q * state).sum(2),
    "a product": lambda q, state: q.mT @ state,
}
for spelling, read in READS.items():
    for decaying, axis in (("keys", -1), ("values", -2)):
        name = f"{decaying} that decay, read by {spelling}"
        case("qkv 12 48 /4, out 12 12 -", name=name)(decayed_scan(axis, read))


NEAR = (torch.arange(9)[:, None] + torch.arange(3)) % 9
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inner products": lambda q, k: (q * k[:, :, NEAR[:, 1]] / 2).sum(-1),
    "means of joined heads": lambda q, k: (
        (joined(q) * joined(k[:, :, NEAR[:, 1]])).unflatten(-1, (3, 4)).mean(-1).mT
    ),
    "distances": lambda q, k: (q - k[:, :, NEAR[:, 1]]).square().sum(-1),
    "inner products with near tokens": lambda q, k: (
        (q[:, :, :, None] * k[:, :, NEAR]).sum(-1).logsumexp(-1)
    ),
}
for name, scored in PAIRS.items():
    case("q 12 12 /4, k 12 12 /4, v 12 12 /4, out 12 12 -", name=f"edges of a graph, by {name}")(
        lambda m, x, f=scored: m.out(
            joined(f(heads(m.q(x)), heads(m.k(x)))[..., None] * heads(m.v(x)))
        )
    )


@case("qkv 12 36 /6, out 12 12 -")
def rotary_of_the_first_half_of_each_head(m: Any, x: Tensor) -> Any:
    def rotated(y: Tensor) -> Tensor:
        half = torch.cat([-y[..., 2:4], y[..., :2]], -1)
        return torch.cat([y[..., :4] * 0.6 + half * 0.8, y[..., 4:]], -1)

    q, k, v = qkv(m, x, 6)
    return m.out(attention(rotated(q), rotated(k), v))


@case("q 12 8 /2, k 12 8 /2, v 12 12 /4, out 12 12 -")
def heads_that_share_two_columns(m: Any, x: Tensor) -> Any:
    def shared(y: Tensor) -> Tensor:
        return torch.cat([y[:, None, :, :2].expand(-1, 3, -1, -1), heads(y[..., 2:], 2)], -1)

    return m.out(attention(shared(m.q(x)), shared(m.k(x)), heads(m.v(x))))


@case("qkv 12 36 /4, out 12 12 -", (x, torch.rand(2, 9)))
def rotations_by_positions_of_the_example(m: Any, x: Tensor, positions: Tensor) -> Any:
    angles = (positions[..., None] * torch.ones(2))[:, None, :, :, None]
    table = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
    table = table.unflatten(-1, (2, 2))[..., 0, :, :]

    def turn(y: Tensor) -> Tensor:
        pairs = y.unflatten(-1, (2, 1, 2))
        return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).flatten(-2)

    q, k, v = qkv(m, x)
    return m.out(attention(turn(q), turn(k), v))


@case("first 12 36 /4, second 12 36 /4, out 12 12 -")
def attention_over_two_streams(m: Any, x: Tensor) -> Any:
    streams = [m.first(x).chunk(3, -1), m.second(x[:, :4]).chunk(3, -1)]
    parts = zip(*streams, strict=True)
    return m.out(attention(*(torch.cat([heads(y) for y in pair], 2) for pair in parts)))


@case("q 12 12 /4, k 12 4 =, out 12 12 -")
def queries_of_several_heads_and_one_key_that_is_the_value(m: Any, x: Tensor) -> Any:
    q, k = heads(m.q(x)), m.k(x)
    scores = torch.einsum("bhid,bjd->bhij", q, k).softmax(-1)
    return m.out(joined(torch.einsum("bhij,bjd->bhid", scores, k)))


@case("q 12 12 /4, kv 12 24 /4, out 12 12 -")
def attention_to_a_single_token(m: Any, x: Tensor) -> Any:
    """Compute attention with einsums that sum over a single token, without a matmul."""
    q, k, v = (heads(y) for y in (m.q(x), *m.kv(x[:, :1]).chunk(2, -1)))
    scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return m.out(joined(torch.einsum("bhij,bhjd->bhid", scores, v)))


@case("down 12 8 /6+2, up 6 14 /4+3, q 12 12 /6, out 6 12 -")
def columns_of_two_weights(m: Any, x: Tensor) -> Any:
    """Compute latent attention."""
    low, rope = m.down(x).split([6, 2], -1)
    nope, v = heads(m.up(low), 7).split([4, 3], -1)
    k = torch.cat([nope, rope[:, None].expand(-1, nope.shape[1], -1, -1)], -1)
    return m.out(attention(heads(m.q(x), 6), k, v))


@case("q 12 16 /4, kv 12 16 /4, out 8 12 -")
def gates_of_heads(m: Any, x: Tensor) -> Any:
    q, gate = m.q(x).unflatten(-1, (-1, 8)).chunk(2, -1)
    k, v = heads(m.kv(x), 8).chunk(2, -1)
    return m.out(attention(q.transpose(1, 2), k, v) * gate.flatten(2).sigmoid())


@case("q 12 12 /4, kv 12 12 /4, out 12 12 -, tokens 2x5x12 .")
def a_product_with_a_table(m: Any, x: Tensor) -> Any:
    return m.out(attention(heads(m.q(m.tokens)), *[heads(m.kv(x))] * 2))


@case("gates 12 2 -, qkv 12 36 /4, out 12 12 -")
def attention_between_two_gates(m: Any, x: Tensor) -> Any:
    before, after = m.gates(x).chunk(2, -1)
    return m.out(attention(*qkv(m, x * before)) * after)


@case("q 12 12 =, k 12 12 =, size 12 6 =, v 12 12 =, out 12 4 -")
def attention_with_one_query(m: Any, x: Tensor) -> Any:
    scores = (m.q(x[:, :1]) * m.k(x)).sum(-1, keepdim=True) / m.size(x).norm(dim=-1, keepdim=True)
    return m.out((scores.softmax(1) * m.v(x)).sum(1))


@case("inner 12 12 /4, out 12 12 -, source 3x1x4 ., target 3x1x4 .")
def attention_with_parameters_as_keys(m: Any, x: Tensor) -> Any:
    z = heads(m.inner(x))
    scores = (z * m.target).sum(-1)[..., None] + (z * m.source).sum(-1)[..., None, :]
    return m.out(joined((scores.softmax(-1)[..., None] * z[:, :, None]).sum(3)))


@case("q 12 8 =, k 12 8 =, head 12 4 -, scale 8 .")
def additive_attention(m: Any, x: Tensor) -> Any:
    scores = ((m.q(x)[:, :, None] + m.k(x)[:, None]).tanh() * m.scale).sum(-1)
    return m.head(scores.softmax(-1) @ x)


@case("qkv 12 24 /4, out 8 12 -, positions 17x4 .")
def a_table_of_relative_positions(m: Any, x: Tensor) -> Any:
    (q, k, v), size = qkv(m, x), x.shape[1]
    places = F.pad(q @ m.positions.T, (0, 1)).flatten(-2)
    places = F.pad(places, (0, size - 1)).unflatten(-1, (size + 1, 2 * size - 1))
    scores = q @ k.mT + places[..., :size, size - 1 :]
    return m.out(joined(scores.softmax(-1) @ v))


@case("qkv 12 24 /4, out 8 12 -, keys 19x4 ., values 19x4 .")
def relative_positions_of_keys_and_values(m: Any, x: Tensor) -> Any:
    (q, k, v), places = qkv(m, x), torch.arange(x.shape[1])
    places = places[:, None] - places + 9
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, m.keys[places])
    weights = scores.softmax(-1)
    return m.out(joined(weights @ v + torch.einsum("bhij,ijd->bhid", weights, m.values[places])))


@case("out 12 4 -, bank 3x12x12 T/4")
def a_bank_of_queries_keys_and_values(m: Any, x: Tensor) -> Any:
    return m.out(attention(*(heads(x @ w) for w in m.bank)))


@case("out 8 12 -, fused 12x24 T/4")
def an_in_out_weight(m: Any, x: Tensor) -> Any:
    return m.out(attention(*(heads(y) for y in (x @ m.fused).chunk(3, -1))))


@case("v 12 12 /4, out 12 12 -, q 3x12x4 T/4")
def a_view_of_a_weight(m: Any, x: Tensor) -> Any:
    q = torch.einsum("btd,hde->bhte", x, m.q)
    return m.out(attention(q, q, heads(m.v(x))))


ATTENTION = nn.MultiheadAttention(12, 3, batch_first=True).eval()
ENCODER = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()


@case("a.in_proj_weight /4, a.out_proj =, out 12 12 -", a=ATTENTION)
def multi_head_attention(m: Any, x: Tensor) -> Any:
    return m.out(m.a(x, x, x)[0])


@case("m.self_attn.in_proj_weight /4, m.self_attn.out_proj =, m.linear1 =, m.linear2 =", m=ENCODER)
def an_encoder_layer(m: Any, x: Tensor) -> Any:
    return m.m(x)


ALONE = {"self_attn.in_proj_weight": pieces_of("/4"), "linear1.weight": pieces_of("=")}
CASES["an encoder layer, alone"] = ENCODER, x, ALONE


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": lambda values, kernels: values @ kernels.mT,
    "a sum": lambda values, kernels: (values * kernels).sum(-1),
}
for name, weighed in KERNELS.items():

    @case("values 12 12 /4, kernels 12 9 /3, out 12 12 -", name=f"a kernel of each head, by {name}")
    def a_kernel_of_each_head(m: Any, x: Tensor, weighed: Any = weighed) -> Any:
        """Compute ConvBERT's attention: kernels per head and token add up nearby values."""
        values = F.unfold(m.values(x).transpose(1, 2)[..., None], (3, 1), padding=(1, 0))
        values = values.transpose(1, 2).reshape(-1, 4, 3)
        kernels = m.kernels(x).reshape(-1, 1, 3).softmax(2)
        return m.out(weighed(values, kernels).reshape(*x.shape))


HALVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a power": lambda a, b: a.abs() ** b,
    "a minimum": torch.minimum,
    "an angle": torch.atan2,
    "a choice of the larger": lambda a, b: torch.where(a > b, a, b),
    "an interpolation": lambda a, b: torch.lerp(torch.ones(10), a, b.sigmoid()),
    "a product with a quotient": lambda a, b: a * b * torch.div(7, 2, rounding_mode="floor"),
    "a mean and its noise": lambda a, b: a + b.exp() * torch.randn_like(b),
    "an addition after an activation": lambda a, b: F.silu(a) + b,
    "exponents": lambda a, b: (F.logsigmoid(a) + F.softplus(b).log()).logcumsumexp(1).exp(),
    "an addition for each pair of tokens": lambda a, b: a[:, :, None] + b[:, None],
}
for name, combined in HALVES.items():
    case(HALVED, name=name)(lambda m, x, f=combined: m.out(f(*m.both(x).chunk(2, -1))))


def standardized(weight: Tensor) -> Tensor:
    variance, mean = torch.var_mean(weight, 1, keepdim=True)
    return (weight - mean) * (variance + 1e-5).rsqrt()


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "divided by its norm": F.normalize,
    "quantized": lambda w: torch.fake_quantize_per_tensor_affine(w, 1, 0, 0, 9),
    "standardized": standardized,
    "ternary": lambda w: w.sign() * w.abs().mean(1, keepdim=True),
    "indexed": lambda w: w[torch.arange(20).roll(10)].index_select(1, torch.arange(12).flip(0)),
    "scaled to a largest element": lambda w: w / w.abs().amax(1, keepdim=True),
}
for name, computed in COMPUTED.items():
    case(HALVED, name=f"a weight that is {name}")(
        lambda m, x, f=computed: m.out(F.glu(F.linear(x, f(m.both.weight))))
    )


@case("both 12 20 /10, out 10 12 =, last 12 3 -")
def a_chunk_and_a_product(m: Any, x: Tensor) -> Any:
    gate, up = m.both(x).chunk(2, -1)
    return m.last(m.out(gate * F.gelu(up)))


def gate() -> Any:
    return module("both 12 20, out 10 12, last 12 3", a_chunk_and_a_product)


@case(HALVED)
def a_view_in_place(m: Any, x: Tensor) -> Any:
    y = m.both(x)
    y.unsqueeze_(0)
    y.masked_fill_(torch.zeros(20, dtype=torch.bool), float("-inf"))
    gate, up = F.hardswish(y.squeeze_(0), inplace=True).chunk(2, -1)
    return m.out(gate.scatter(1, torch.zeros(2, 1, 10, dtype=torch.long), 0.5) * up)


NORMED = "both.parametrizations.weight.original"
SPECTRAL = nn.utils.spectral_norm(linear(12, 20)).eval()


@case("both.weight_orig /10, out 10 12 -", name="a spectral norm by a hook", both=SPECTRAL)
@case(f"{NORMED}0 ., {NORMED}1 /10, out 10 12 -", both=weight_norm(linear(12, 20)))
def a_weight_that_is_normed(m: Any, x: Tensor) -> Any:
    return m.out(F.glu(m.both(x)))


@case("both 12 20 /10, out 10 12 -, step 1 .")
def a_weight_and_an_input_in_steps(m: Any, x: Tensor) -> Any:
    return m.out(F.glu(F.linear(x * m.step, m.both.weight / m.step)))


TASK = {"gains": nn.Embedding(3, 12), "scales": nn.Embedding(3, 20)}


@case("both 12 20 /10, out 10 12 -, gains -, scales -", (x, torch.tensor(1)), **TASK)
def a_weight_with_gains_of_a_task(m: Any, x: Tensor, task: Tensor) -> Any:
    weight = m.both.weight * m.gains(task) * m.scales(task)[:, None]
    return m.out(F.glu(F.linear(x, weight.double().float())))


@case("both 12 20 /10, out 10 12 -")
def a_weight_with_gains_of_the_example(m: Any, x: Tensor) -> Any:
    return m.out(F.glu(F.linear(x, m.both.weight * x.mean((0, 1)) / 2)))


@case("both 20x12 /10, out 10 12 -")
def parts_of_a_weight(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, m.both[:10]) * F.linear(x, m.both[10:]))


@case("a 12 10 =, b 12 10 =, out 10 12 -")
def two_weights_as_one(m: Any, x: Tensor) -> Any:
    return m.out(F.glu(F.linear(x, torch.cat([m.a.weight, m.b.weight]))))


@case("a 12 6 =, b 12 6 =, slots 12x4 -")
def experts_with_several_slots(m: Any, x: Tensor) -> Any:
    return x @ m.slots @ torch.cat([m.a(x[:, :2]), m.b(x[:, 2:4])], 1)


@case("inner 12 12 =, a 12 12 =, b 12 12 =, slots 12x4 -, out 12 4 -")
def experts_of_weighted_means_of_tokens(m: Any, x: Tensor) -> Any:
    x = m.inner(x)
    scores = x @ m.slots
    first, second = (scores.softmax(1).mT @ x).chunk(2, 1)
    return m.out(x + scores.softmax(-1) @ torch.cat([m.a(first), m.b(second)], 1))


@case("a 12 6 =, b 12 6 =, both 12 12 /6, out 6 4 -")
def products_of_tokens_for_each_channel(m: Any, x: Tensor) -> Any:
    pairs = (m.a(x), m.b(x)), m.both(x).chunk(2, -1)
    return m.out(sum(torch.einsum("ikc,jkc->ijc", *pair) for pair in pairs))


@case("parts 12 12 /4, out 4 4 -")
def parts_weighed_by_the_example(m: Any, x: Tensor) -> Any:
    return m.out((m.parts(x).unflatten(-1, (3, 4)) * x[..., :3, None].exp()).sum(-2))


@case("out 12 4 -, mix 3x9x9 /9")
def tokens_mixed_by_heads(m: Any, x: Tensor) -> Any:
    return m.out(x * torch.einsum("bnhd,hmn->bmhd", x.unflatten(-1, (3, 4)), m.mix).flatten(2))


@case("parts 12 12 =, out 6 12 -")
def a_sum_of_branches(m: Any, x: Tensor) -> Any:
    return m.out(m.parts(x).unflatten(-1, (2, 6)).sum(-2).relu())


@case("parts 12 24 =, out 6 4 -, gain 1 .")
def a_sum_of_branches_with_a_gain(m: Any, x: Tensor) -> Any:
    return m.out((m.parts(x).unflatten(-1, (4, 6)) * m.gain).sum(-2))


@case("inner 12 8 =, head 8 3 -, gain 1 .")
def a_head_whose_outputs_are_scaled_and_added(m: Any, x: Tensor) -> Any:
    return (m.head(m.inner(x).relu()) * m.gain).sum(-1)


SCORED = {
    "a sum of products": lambda a, b: (a * b).sum(-1),
    "a cosine": lambda a, b: F.cosine_similarity(a, b, dim=-1),
    "a probability": lambda a, b: ((a * b).mean(-1) + 1).sigmoid(),
}
"""Scores of pairs of vectors, as returned by recommenders."""
for name, scored in SCORED.items():

    @case("first 12 8 =, user 8 6 =, item 12 6 =", name=f"two towers and {name}")
    def two_towers(m: Any, x: Tensor, scored: Any = scored) -> Any:
        return scored(m.user(m.first(x).relu()), m.item(x))

    @case("first 12 8 =, user 8 6 =", name=f"a tower and {name}", table=nn.Embedding(7, 6))
    def a_tower(m: Any, x: Tensor, scored: Any = scored) -> Any:
        rows = m.table(torch.arange(x.shape[1]) % 7).expand(len(x), -1, -1)  # no function of x
        return torch.stack([scored(m.user(m.first(x).relu()), rows)], -1)

    @case("first 12 8 =, both 8 6 =", name=f"a tower of both inputs and {name}")
    def a_tower_of_both_inputs(m: Any, x: Tensor, scored: Any = scored) -> Any:
        return scored(m.both(m.first(x).relu()), m.both(m.first(x.flip(1)).relu()))


UNSCORED = {
    "an entropy": lambda y: (y.softmax(-1) * y.log_softmax(-1)).sum(-1),
    "the output of an action": lambda y: (y * F.one_hot(torch.arange(9) % 4, 4)).sum(-1),
    "a squared norm": lambda y: (y * y).sum(-1),
    "a loss": lambda y: (y * y.flip(1)).sum(-1).mean(),
}
for name, scored in UNSCORED.items():

    @case("first 12 8 =, head 8 4 -", name=f"a head and {name}")
    def a_head_and_a_sum(m: Any, x: Tensor, scored: Any = scored) -> Any:
        y = m.head(m.first(x).relu())
        return y, scored(y)


COPIED = {
    "one token": lambda q, k: q @ k.mT @ F.one_hot(torch.arange(9) % 4, 4).float(),
    "the tokens of each query": lambda q, k: torch.zeros(len(q), 9, 4).scatter_add(
        -1, (torch.arange(9) % 4).expand(len(q), 9, -1), (q @ k.mT).softmax(-1)
    ),
    "no token": lambda q, k: (q * k).sum(-1, keepdim=True),
}
"""Scores of tokens that are added to a head's outputs, as in pointer networks."""
for name, copied in COPIED.items():

    @case("q 12 8 =, k 12 8 =, head 12 4 -", name=f"a head and copies of {name}")
    def a_head_and_copies(m: Any, x: Tensor, copied: Any = copied) -> Any:
        return m.head(x) + copied(m.q(x), m.k(x))


@case("a 12 6 =, b 12 6 =, out 6 4 -")
def a_mean_of_layers(m: Any, x: Tensor) -> Any:
    return m.out(torch.stack([m.a(x), m.b(x)], -1).mean(-1))


@case("weight 6x12 =, other 6x8 T/8, third 8x8 =, out 8 4 -")
def matmuls_written_as_sums_of_products(m: Any, x: Tensor) -> Any:
    y = (2 * (x[..., None, :] * m.weight)).sum(-1)
    y = (y[..., None] * m.other).sum(-2, keepdim=True)[..., 0, :]
    return m.out((y[..., None, :] * m.third).mean(-1))


@case("mix 9x9 =, out 12 4 -", (x, torch.ones(9, 9).tril().bool()))
def tokens_mixed_under_a_mask_of_the_example(m: Any, x: Tensor, mask: Tensor) -> Any:
    return m.out(m.mix * mask @ x)


@case("scale 9x12 ., inner 12 8 =, out 8 4 -")
def numbers_that_scale_rows_of_a_table(m: Any, x: Tensor) -> Any:
    return m.out(m.inner(x[..., :1] * m.scale).relu())


@case("layers 12x1x4 ., inner 12x4x4 T/4, out 4 2 -")
def a_layer_for_each_number(m: Any, x: Tensor) -> Any:
    y = (x.flatten(0, 1).T[..., None] @ m.layers).relu() @ m.inner
    return m.out(y.relu().sum(0))


@case("inner 12 4 =, out 4 12 -")
def quantization_without_a_table(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return m.out(y + (y.sign() - y).detach()), ((y > 0).int() * 2 ** torch.arange(4)).sum(-1)


@case("weight 6x12 ., inner 6 8 =, out 8 4 -")
def a_sum_of_products_changed_in_place(m: Any, x: Tensor) -> Any:
    return m.out(m.inner((x[..., None, :] * m.weight).exp_().sum(-1)))


@case("gate 12 1 ., up 12 8 =, down 8 12 =")
def a_residual_stream_that_begins_with_pooled_inputs(m: Any, x: Tensor) -> Any:
    pooled = (m.gate(x).softmax(1) * x).sum(1)
    return pooled + m.down(m.up(pooled).relu())


@case("tokens 1 24 ., inner 6 6 =, out 6 4 -", torch.randn(1, 1))
def tokens_of_one_number(m: Any, x: Tensor) -> Any:
    return m.out(m.inner(m.tokens(x).view(4, 6)).relu())


@case("stem 12 12 =, a 12 12 =, b 12 12 =, out 12 2 -, scales .", scales=nn.Conv1d(2, 1, 1))
def a_sum_over_branches_by_a_layer(m: Any, x: Tensor) -> Any:
    """Compute the class tokens of CoAT, in which a layer sums over branches, channel by channel."""
    scales = torch.stack([(m.stem(x) + layer(x))[:, 0] for layer in (m.a, m.b)], 1)
    return m.out(m.scales(scales)[:, 0])


CONDITIONED = "ada 5 72 /12, first 12 12 =, second 12 12 =, head 12 2 -"


@case(CONDITIONED, (x, torch.randn(2, 5)), norm=nn.LayerNorm(12))
def six_modulations(m: Any, x: Tensor, condition: Tensor) -> Any:
    a, b, c, d, e, f = m.ada(condition)[:, None].chunk(6, -1)
    x = x + c * m.first(m.norm(x) * (1 + b) + a)
    return m.head(x + f * m.second(m.norm(x) * (1 + e) + d))


@case("first 12 12 =, gate 4 4 -, out 12 12 -")
def a_stream_that_layers_take_whole_and_in_blocks(m: Any, x: Tensor) -> Any:
    y = m.first(x)
    return m.out(y) + m.gate(y.unflatten(-1, (3, 4))).flatten(-2)


@case("down 4 12 /4, up 12 12 =")
def a_group_of_heads_for_each_part_of_a_weight(m: Any, x: Tensor) -> Any:
    """Compute the output of DeepSeek-V4, with one matmul for each of three groups of inputs."""
    low = torch.bmm(x.view(-1, 3, 4).transpose(0, 1), m.down.weight.view(3, 4, 4).mT)
    return m.up(m.up(low.transpose(0, 1).reshape(*x.shape[:-1], 12)))


@case("down 12 5 =, up 5 12 =, head 4 4 -")
def separate_gates_for_each_entry_of_three_streams(m: Any, x: Tensor) -> Any:
    gates = m.up(m.down(x).relu()).sigmoid().unflatten(-1, (3, 4))
    return m.head((gates * x.unflatten(-1, (3, 4))).mean(-2))


@case("first 12 12 =, head 12 4 -")
def a_head_whose_outputs_are_scaled(m: Any, x: Tensor) -> Any:
    y = m.head(m.first(x))
    return F.normalize(y, dim=-1), y * x[..., :1]


@case("inner 12 12 =, table -", torch.tensor([[1, 2, 3]]), table=nn.Embedding(7, 12))
def a_tied_head(m: Any, i: Tensor) -> Any:
    return F.linear(m.inner(m.table(i)), m.table.weight)


TABLES = "tokens 1x4x12 ., positions 20x12 ., bias 5x3 ."


@case(f"first 12 12 =, second 12 12 =, head 12 2 -, {TABLES}")
def tables(m: Any, x: Tensor) -> Any:
    y = m.first(m.tokens.expand(len(x), -1, -1) + m.bias[torch.tensor([0, 3])].mean())
    return m.head(y + m.second(x[:, :4] + m.positions[:4]))


POSITIONS = {"positions": torch.arange(9), "a batch of positions": torch.arange(9)[None]}
for name, places in POSITIONS.items():

    @case("inner 12 6 =, table 9x6 ., out 9 4 -", name=f"all {name}")
    def a_product_with_all_positions(m: Any, x: Tensor, places: Tensor = places) -> Any:
        return m.out(m.inner(x) @ m.table[places].mT)


EXPERTS = "gate 8 3 -, head 8 4 -, gate_up 3x12x8 /6, down 3x8x6 /8"


IDLE = "gate 8 40 -, head 8 4 -, gate_up 40x12x8 /6, down 40x8x6 /8"


@case(EXPERTS, tokens)
@case(IDLE, tokens, "experts without tokens")
def experts_by_index(m: Any, x: Tensor) -> Any:
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    mixed = torch.zeros_like(x)
    for e in range(len(m.gate_up)):
        token, slot = torch.where(chosen == e)
        gate, up = F.linear(x[token], m.gate_up[e]).chunk(2, -1)
        made = F.linear(F.silu(gate) * up, m.down[e]) * probabilities[token, slot, None]
        mixed.index_add_(0, token, made)
    return m.head(x + mixed)


@case(EXPERTS, tokens)
def experts_looked_up_cast_and_scaled_for_each_token(m: Any, x: Tensor) -> Any:
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    gate_up, down = (2 * w[chosen].double() for w in (m.gate_up, m.down))
    gate, up = torch.einsum("tkoi,ti->tko", gate_up, x.double()).chunk(2, -1)
    made = torch.einsum("tkoi,tki->tko", down, F.silu(gate) * up)
    return m.head(x + (made.float() * probabilities[..., None]).sum(1))


APART = "gate 8 3 -, head 8 4 -, a 8 12 /6, b 8 12 /6, c 8 12 /6, down 24x6 /8"


@case(APART, (torch.randn(20, 8),))
def experts_of_separate_layers_looked_up_for_each_token(m: Any, x: Tensor) -> Any:
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    gate_up = torch.stack([layer.weight for layer in (m.a, m.b, m.c)])[chosen]
    gate, up = torch.einsum("tkoi,ti->tko", gate_up, x).chunk(2, -1)
    made = torch.einsum("tkoi,tki->tko", m.down.view(3, 8, 6)[chosen], F.silu(gate) * up)
    return m.head(x + (made * probabilities[..., None]).sum(1))


INTERLEAVED = {"gate_up": lambda w: [e[:, j::2].T for e in w for j in (0, 1)]}


@case("gate 8 3 -, head 8 4 -, gate_up 3x8x12, down 3x6x8 T/8", tokens, other=INTERLEAVED)
def batched_experts_in_out_interleaved(m: Any, x: Tensor) -> Any:
    y = torch.bmm(x.expand(3, -1, -1), m.gate_up)
    gate, up = y[..., ::2], y[..., 1::2]
    made = torch.bmm(gate.clamp(max=7) * up.sigmoid(), m.down)
    return m.head(x + (made * m.gate(x).softmax(-1).T[..., None]).sum(0))


@case("gate 8 3 =, head 8 4 -, experts 3x8x8 T/8", tokens)
def experts_whose_inputs_are_weighed(m: Any, x: Tensor) -> Any:
    return m.head(x + ((x * m.gate(x).sigmoid().T[..., None]) @ m.experts).sum(0))


@case("head 16 4 -, gate_up 2x32x16 /16, down 2x16x16 /16", torch.randn(9, 16))
def grouped_experts(m: Any, x: Tensor) -> Any:
    ends = torch.tensor([6, 9], dtype=torch.int32)
    y = F.grouped_mm(x.bfloat16(), m.gate_up.bfloat16().transpose(1, 2), offs=ends)
    gate, up = y.chunk(2, -1)
    made = F.grouped_mm(F.silu(gate) * up, m.down.bfloat16().transpose(1, 2), offs=ends)
    return m.head(x + made.float())


@case("a1 12 6 =, b1 12 6 =, a2 6 12 =, b2 6 12 =, gate 12 2 -, head 12 4 -")
def a_mixture_of_stacked_weights(m: Any, x: Tensor) -> Any:
    inner = torch.einsum("btd,ehd->beth", x, torch.stack([m.a1.weight, m.b1.weight])).relu()
    made = torch.einsum("beth,edh->betd", inner, torch.stack([m.a2.weight, m.b2.weight]))
    return m.head(x + torch.einsum("betd,bte->btd", made, m.gate(x).softmax(-1)))


@case("inner 12 24 /8+4+4+3+3+2, out 8 12 -")
def inputs_gates_and_steps_of_a_recurrence(m: Any, x: Tensor) -> Any:
    """Compute the recurrence of Mamba-2, in which one weight gives the inputs, `b`, `c` and the
    time steps."""
    z, u, b, c, time = m.inner(x).split([8, 8, 3, 3, 2], -1)
    u, time = u.unflatten(-1, (2, 4)), F.softplus(time)
    state, outputs = torch.zeros(len(x), 2, 4, 3), []
    for t in range(4):
        written = torch.einsum("bh,bn,bhp->bhpn", time[:, t], b[:, t], u[:, t])
        state = torch.exp(-time[:, t])[..., None, None] * state + written
        outputs.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]).flatten(1))
    return m.out(torch.stack(outputs, 1) * F.silu(z[:, :4]))


@case("inner 12 12 =, out 12 4 -, b 12x3 ., c 12x3 ., decay 12x3 .")
def a_recurrence_of_channels(m: Any, x: Tensor) -> Any:
    """Compute a separate recurrence for each channel, as in S4D."""
    state, outputs = torch.zeros(len(x), 12, 3), []
    for u in m.inner(x).unbind(1):
        state = m.decay.sigmoid() * state + m.b * u[..., None]
        outputs.append(torch.einsum("bdn,dn->bd", state, m.c))
    return m.out(torch.stack(outputs, 1).relu())


@case("steps 12 12 =, read 12 3 =, out 12 4 -, decay 12x3 .")
def a_recurrence_whose_decay_depends_on_tokens(m: Any, x: Tensor) -> Any:
    """Compute Mamba's recurrence."""
    decays = (m.steps(x).sigmoid()[..., None] * -m.decay.exp()).exp()
    state, outputs = torch.zeros(len(x), 12, 3), []
    for u, decay, read in zip(x.unbind(1), decays.unbind(1), m.read(x).unbind(1), strict=True):
        state = decay * state + u[..., None]
        outputs.append((state @ read[..., None])[..., 0])
    return m.out(torch.stack(outputs, 1))


@case("both 12 24 /12, filters 4 12 =, out 12 4 -")
def a_long_convolution_by_fourier_transforms(m: Any, x: Tensor) -> Any:
    """Compute the convolution of Hyena, whose filters are the outputs of a network."""
    gate, y = m.both(x).chunk(2, -1)
    y = torch.fft.rfft(y, 18, 1) * torch.fft.rfft(m.filters(torch.randn(9, 4)), 18, 0)
    return m.out(gate * torch.fft.irfft(y, 18, 1)[:, :9])


GATES = "rnn.weight_ih_l0 /5, rnn.weight_hh_l0 /5"


@case(f"{GATES}, head 5 2 -", rnn=nn.GRU(12, 5))
@case(f"{GATES}, rnn.weight_hr_l0 =, head 3 2 -", name="an LSTM", rnn=nn.LSTM(12, 5, proj_size=3))
def a_recurrent_layer(m: Any, x: Tensor) -> Any:
    return m.head(m.rnn(x)[0])


@case("inner 12 12 =, out 7 4 -")
def a_fourier_transform_of_columns(m: Any, x: Tensor) -> Any:
    return m.out(torch.fft.rfft(m.inner(x)).abs())


@case("inner 12 12 =, out 12 4 -")
def a_filter_of_low_frequencies(m: Any, x: Tensor) -> Any:
    y = torch.fft.rfft(m.inner(x), dim=1)
    low = torch.zeros_like(y)
    for i in range(2):
        low[:, i] = y[:, i] / (i + 1)
    return m.out(torch.fft.irfft(low, 9, 1))


def convolution(*sizes: int, groups: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(*sizes, groups=groups, bias=False)


@case("both /10, out -", image, both=convolution(8, 20, 1, bias=False), out=convolution(10, 8, 3))
def glu(m: Any, x: Tensor) -> Any:
    return m.out(F.glu(m.both(x), 1))


@case("to_qkv /4, out 8 8 -", image, to_qkv=convolution(8, 24, 1))
def a_fused_convolution(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(y.flatten(2).transpose(1, 2)) for y in m.to_qkv(x).chunk(3, 1))
    return m.out(attention(q, k, v))


GATED = {
    "first": convolution(8, 6, 3, bias=False),
    "gate": convolution(2, 1, 1),
    "out": convolution(6, 4, 1),
}


@case("first =, out -", image, **GATED)
def a_gate_from_the_maximum_of_all_channels(m: Any, x: Tensor) -> Any:
    y = m.first(x).relu()
    statistics = [y.max(1, keepdim=True).values, y.mean(1, keepdim=True)]
    return m.out(y * m.gate(torch.cat(statistics, 1)).sigmoid())


WEIGHED = {"both": convolution(8, 8, 3, groups=2), "weigh": convolution(8, 8, 1)}


@case("both /4, weigh =, out -", image, **WEIGHED, out=convolution(4, 4, 1))
def branches_that_are_weighed(m: Any, x: Tensor) -> Any:
    weights = m.weigh(x.mean((2, 3), keepdim=True)).unflatten(1, (2, 4)).softmax(1)
    return m.out((m.both(x).unflatten(1, (2, 4)) * weights).sum(1))


@case("low 12 8 /4, high /12, out 24 4 -", high=convolution(8, 24, 1, groups=2))
def two_adapters_in_one(m: Any, x: Tensor) -> Any:
    """Compute loralib's adapter for a weight that contains queries and values."""
    return m.out(m.high(m.low(x).mT[..., None])[..., 0].mT)


@case("inner 12 8 =, last 2x8x6 -")
def a_head_of_two_entries_of_a_stack(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    waves = zip((y.sin(), y.cos()), m.last, strict=True)
    return sum(torch.einsum("btd,de->bte", *pair) for pair in waves)


TWO = convolution(8, 12, 3, groups=2, bias=False)


@case("both /6, out -", image, both=TWO, out=convolution(12, 4, 1))
def groups_of_a_convolution(m: Any, x: Tensor) -> Any:
    return m.out(m.both(x).relu())


DEPTHWISE = {"first": convolution(8, 8, 1), "second": convolution(8, 8, 3, groups=8)}
TURNED = {"first": nn.ConvTranspose2d(8, 6, 2, 2), "second": nn.ConvTranspose2d(6, 12, 2, groups=3)}
OTHER = {"first.weight": transposed(1), "second.weight": transposed(3)}


@case("first =, second ., out -", image, **DEPTHWISE, out=convolution(8, 4, 1))
@case("out -", image, "transposed ones", OTHER, **TURNED, out=convolution(12, 4, 1))
def a_depthwise_convolution(m: Any, x: Tensor) -> Any:
    return m.out(m.second(m.first(x)))


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_steps_on_the_matrices_apart(name: str) -> None:
    model, example, expected = CASES[name]
    split = split_parameters(model, example=example)
    units = {n: g.get("units") for g in split for n, _ in g["params"]}
    decays = {n: "weight_decay" not in g for g in split for n, _ in g["params"]}
    for weight, pieces in expected.items():
        assert (units[weight] is None) == (pieces in (None, undecayed)), f"{weight}: {split}"
        assert decays[weight] == (pieces is not undecayed), f"{weight}: {split}"
        if units[weight] is not None:
            _compare(model.get_parameter(weight).detach().double(), units[weight], pieces)
    assert all(row.reason for row in split.rows)
    # One sequence shows the same matrices; the view in place has fixed sizes.
    if isinstance(example, Tensor) and len(example) > 1 and name != "a_view_in_place":
        one = split_parameters(model, example=example[:1])
        assert {n: g.get("units") for g in one for n, _ in g["params"]} == units


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
        q, k, v = (heads(layer(x + m.start)) for layer in (m.q, m.k, m.v))
        scores = SCORES[combine](m, q @ k.mT)
        return m.head(m.out(joined(scores.softmax(-1) @ v)))

    one = x[:1]
    table, start = f"table 1x3x{x.shape[1]}x{x.shape[1]}", f"start 1x{x.shape[1]}x12"
    layers = f"q 12 12, k 12 12, v 12 12, out 12 12, head 12 2, {table}, {start}"
    model = module(layers, forward)
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
        dict.fromkeys("abcd", 1),
    ),
    "a layer": (lambda m, x: m.fused(x).unflatten(-1, (3, 12)), {"fused": 3}),
    "a stack, by an einsum": (lambda m, x: torch.einsum("btd,edh->bteh", x, m.w), {"w": 3}),
    "a stack, by a batched product": (
        lambda m, x: (
            (x.flatten(0, 1).expand(3, -1, -1) @ m.w).unflatten(1, x.shape[:2]).movedim(0, 2)
        ),
        {"w": 3},
    ),
    "a stack that is repeated": (lambda m, x: (x[:, None] @ m.w).transpose(1, 2), {"w": 3}),
    "two stacks": (
        lambda m, x: ((x[:, None] @ m.w).relu() @ m.v).transpose(1, 2),
        {"w": 3, "v": 3},
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_the_same_matrices_however_it_is_written(name: str, spelling: str) -> None:
    made, matrices = MIXTURES[name]
    sizes = {"fused": "12 36", "w": "3x12x12", "v": "3x12x12"}
    layers = [f"{name} {sizes.get(name, '12 12')}" for name in matrices]
    model = module(
        ", ".join(["gate 12 3", "head 12 4", *layers]),
        lambda m, x: m.head(SPELLINGS[spelling](m.gate(x).softmax(-1), made(m, x))),
    )
    rows = {row.name.partition(".")[0]: row for row in split_parameters(model, example=x).rows}
    assert {key: rows[key].matrices for key in matrices} == matrices
    assert {rows[key].matrix for key in matrices} == {(12, 12)}
    # The gate has one output for each matrix, or one vector of outputs for a weight.
    assert rows["gate"].rule == ("spectral" if name == "a layer" else "adamw")


class Stateful(nn.Module):
    """A module with every kind of state that a forward pass may change."""

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
    """A module that writes to its input and to the contents of its attributes."""

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
    """A mode that counts the elements written by operations, including operations of inner
    modes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
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


STACKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a stack": lambda m, x: x.flatten(0, 1).expand(len(m.stack), -1, -1) @ m.stack,
    "a stack that is repeated": lambda m, x: x[:, None] @ m.stack,
}


@pytest.mark.parametrize("name", STACKED)
def test_entries_of_a_stack_are_not_followed_one_by_one(name: str) -> None:
    def operations(entries: int) -> int:
        def forward(m: Any, x: Tensor) -> Tensor:
            before, made = watched.operations, STACKED[name](m, x)
            counts.append(watched.operations - before)
            return m.out(made.sum(-3))

        counts = list[int]()
        model = module(f"out 12 4, stack {entries}x12x12", forward)
        with Elements() as watched:
            split_parameters(model, example=x)
        return counts[0]

    assert operations(32) - operations(4) < 30 * (32 - 4)  # only the record of their columns


def test_a_pass_keeps_no_activations_alive() -> None:
    kept = list[weakref.ref[Any]]()

    def forward(m: Any, x: Tensor) -> Tensor:
        for i in range(6):
            gate = m.get_submodule(f"a{i}")(x)
            gate.mul_(x.sigmoid())
            x = x + m.get_submodule(f"b{i}")(gate)
            kept.extend(weakref.ref(t.untyped_storage()) for t in (gate, x))
        del gate
        assert sum(storage() is not None for storage in kept) == 1
        return m.out(x)

    names = [f"{name}{i}" for i in range(6) for name in "ab"]
    model = module(", ".join(["out 12 4", *(f"{name} 12 12" for name in names)]), forward)
    assert len(split_parameters(model, example=x).matrices) == len(names)
    assert len(kept) == len(names)


def test_units_and_elementwise_go_before_what_is_seen() -> None:
    model = CASES["glu"][0]
    units = {"both.weight": {"rows": [5]}, "*.weight": {"rows": [5]}}
    split = split_parameters(model, example=image, units=units, elementwise=model.out)
    rows = [(row.matrices, row.reason) for row in split.rows if row.rule != "adamw"]
    assert rows == [(4, "units")]
    assert "elementwise" in str(split)
    heads = module("inner 12 8, a 8 4, b 8 4", lambda m, x: m.a(y := m.inner(x)) + m.b(y))
    rules = [r.rule for r in split_parameters(heads, example=x, elementwise=heads.b).rows]
    assert rules == ["spectral", "adamw", "adamw"]
    flat = module("inner 12 12, out 4 4, flat 60", a_flat_weight)
    rules = [r.rule for r in split_parameters(flat, example=x, elementwise=flat.flat).rows]
    assert sorted(rules) == ["adamw", "adamw", "spectral"]


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping", "function", "half"])
def test_an_example_has_many_forms(form: str) -> None:
    model = gate()

    def run() -> None:
        with torch.autocast("cpu", enabled=form == "half"):
            model(x)

    example = {"tensor": x, "tuple": (x,), "mapping": {"x": x}}.get(form, run)
    row = split_parameters(model, example=example).rows[0]
    assert (row.matrices, row.matrix) == (2, (10, 12))
    assert row.reason == "a product uses 10 columns at a time, a layer all"


UNUSED = (
    "unused.weight: the forward pass did not use this weight\n(.*\n)*- example.*\n(.*\n)*- elementw"
)


@refused(UNUSED, "used 12 4, unused 12 4")
def not_used(m: Any, x: Tensor) -> Any:
    return m.used(x)


@refused("both.weight: 4 of this weight's 12 outputs are unused\n", "both 12 12, out 8 4")
def a_part_that_is_dropped(m: Any, x: Tensor) -> Any:
    return m.out(m.both(x)[..., :8])


OVER = "q 12 12, k 12 12, v 12 12, out 12 4, far 12x20"


@refused("far: 11 of this weight's 20 outputs are unused\n", OVER)
def distances_larger_than_those_of_the_example(m: Any, x: Tensor) -> Any:
    return m.out((m.q(x) @ m.k(x).mT + (x @ m.far)[..., :9]).softmax(-1) @ m.v(x))


@refused(r"both.weight: .* got .* \[0, 1, 2, 3, 8, 9, 10, 11\], .*", "both 12 16, a 8 4, b 8 4")
def sets(m: Any, x: Tensor) -> Any:
    y = m.both(x)
    first = torch.cat([y[..., :4], y[..., 8:12]], -1)
    return m.a(first) + m.b(y[..., [4, 5, 6, 7, 12, 13, 14, 15]])


@refused(
    "both.weight: this weight's outputs are combined along two axes", "both 12 8, a 4 3, b 2 3"
)
def outputs_along_two_axes(m: Any, x: Tensor) -> Any:
    y, z = (m.both(x).unflatten(-1, (2, 4)) for _ in range(2))
    return m.a(y).sum((2, 3)) + m.b(z.mT).sum((2, 3))


@refused(
    "qkv.weight: this weight's outputs are combined along two axes",
    "qkv 12 36, gate 12 4, out 12 4",
)
def a_gate_for_each_entry_of_a_head_that_all_queries_share(m: Any, x: Tensor) -> Any:
    q, k, v = qkv(m, x)
    return m.out(attention(q * m.gate(x).sigmoid()[:, None], k, v))


@torch.library.custom_op("spectrain_tests::product", mutates_args=())
def hidden(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


@refused("weight: spectrain_tests.product.default makes the use", "out 6 4, weight 6x12")
def a_hidden_product(m: Any, x: Tensor) -> Any:
    return m.out(hidden(x, m.weight))


@refused("first.weight: spectrain_tests.product.default makes the use", "first 12 8, out 6 4")
def a_hidden_consumer(m: Any, x: Tensor) -> Any:
    return m.out(hidden(m.first(x), torch.ones(6, 8)))


FROZEN = linear(12, 12).requires_grad_(False)
FLAT = "flat: a product uses a part of this vector as a 12x4 matrix: store each"


@refused(FLAT, "inner 12 12, out 4 4, flat 60")
def a_flat_weight(m: Any, x: Tensor) -> Any:
    return m.out(m.inner(x) @ (2 * m.flat[12:]).view(12, 4))


PADDED = "far: a matmul with a padded weight makes the use"


@refused(PADDED, "q 12 12, out 12 4, far 5x12")
def a_padded_table_of_distances(m: Any, x: Tensor) -> Any:
    return m.out((m.q(x) @ F.pad(m.far, (0, 0, 2, 2)).T).softmax(-1) @ x)


ACROSS = "qkv.weight: matrix products of activations use overlapping sets of this weight's outputs"


@refused(ACROSS, "qkv 12 36, out 12 12")
def rotary_across_heads(m: Any, x: Tensor) -> Any:
    q, k, v = m.qkv(x).chunk(3, -1)
    return m.out(attention(*(heads(y) for y in (turned(q), turned(k), v))))


OVER_TOKENS_FIRST = "qkv.weight: a layer over tokens before attention makes the use"


@refused(OVER_TOKENS_FIRST, "qkv 12 36, mix 9 5, out 12 12")
def attention_to_mixed_tokens(m: Any, x: Tensor) -> Any:
    q, k, v = qkv(m, x)
    return m.out(attention(q, m.mix(k.mT).mT, m.mix(v.mT).mT))


GIVEN = "tokens: a product with a frozen weight or an embedding makes the use"


@refused(GIVEN, "q 12 12, out 12 12, tokens 1x6x12", kv=FROZEN)
def tokens_that_a_frozen_layer_takes(m: Any, x: Tensor) -> Any:
    return m.out(attention(heads(m.q(x)), *[heads(m.kv(m.tokens))] * 2))


FACTORS = "\n".join(f"{name}: a product with a weight .*" for name in "abcd")


@refused(FACTORS, "out 12 4, a 12x2, b 2x12, c 12x2, d 2x12")
def a_weight_of_products_of_factors(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, (m.a @ m.b) * (m.c @ m.d)))


TWO_FACTORS = "\n".join(f"{name}: a matmul with a product of two weights makes.*" for name in "ab")


@refused(TWO_FACTORS, "out 12 4, a 12x3, b 3x12")
def a_weight_of_two_factors(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, 2 * (m.a @ m.b)))


COMPUTED_WEIGHT = "a weight computed from activations or several weights makes the use"
KRONECKER = (
    "a: a product with activations.*\nb: a product with a weight .*\nc: a product with a weight"
)


@refused(KRONECKER, "out 12 4, a 3x3, b 4x2, c 2x4")
def a_kronecker_product_of_factors(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, torch.kron(m.a, m.b @ m.c)))


SEVERAL = f"a: {COMPUTED_WEIGHT}.*\nb: {COMPUTED_WEIGHT}"


@refused(SEVERAL, "out 6 4, a 6x12, b 6x12")
def a_weight_that_is_a_sum_of_weights(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, m.a + m.b))


@refused(SEVERAL, "out 8 4, a 2x4x3, b 2x2x4")
def a_weight_that_is_a_sum_of_kronecker_products(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, torch.kron(m.a[0], m.b[0]) + torch.kron(m.a[1], m.b[1])))


LORA = "a: a sum with a weight makes the use of this weight's .*\nb: a sum with a weight"
TRAINED = f"{LORA}.*\nbase.weight: a sum with a weight makes the use"
BASE = nn.Parameter(torch.randn(8, 12), requires_grad=False)


@refused(TRAINED, "base 12 8, out 8 4, a 2x12, b 8x2")
def a_trained_weight_and_a_product_of_factors(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, 1 * m.base.weight + 2 * (m.b @ m.a)))


@refused(LORA, "out 8 4, a 2x12, b 8x2", frozen=BASE)
def a_weight_of_two(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(x, m.frozen + 2 * (m.b @ m.a)))


@refused("code.weight: a layer uses this weight's outputs, but an operation", "code 12 8, out 8 4")
def a_sparse_code_of_the_largest_outputs(m: Any, x: Tensor) -> Any:
    values, chosen = (y := m.code(x).relu()).topk(3)
    return m.out(torch.zeros_like(y).scatter(-1, chosen, values))


@refused(
    "expert.weight: the forward pass multiplied no token by this weight", "expert 12 8, out 12 8"
)
def an_expert_without_tokens(m: Any, x: Tensor) -> Any:
    return m.out(x).index_add(0, torch.tensor([]).long(), m.expert(x[x[:, 0, 0] > 9]))


@refused(f"weight: {COMPUTED_WEIGHT}", "style 12 6, weight 4x6, out 4 3")
def a_weight_whose_inputs_activations_scale(m: Any, x: Tensor) -> Any:
    weights = m.weight * m.style(x[:, 0])[:, None]
    return m.out(x[..., :6] @ (weights * weights.square().sum(-1, keepdim=True).rsqrt()).mT)


CHANGED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added in proportion": lambda weight, style: weight + weight * style,
    "added": lambda weight, style: weight + style,
    "divided": lambda weight, style: weight / style,
}
for name, changed in CHANGED.items():

    def a_weight_that_activations_change(m: Any, x: Tensor, changed: Any = changed) -> Any:
        return m.out(x[..., :6] @ changed(m.weight, m.style(x[:, 0])[:, None]).mT)

    a_weight_that_activations_change.__name__ += f", {name}"
    refused(f"weight: {COMPUTED_WEIGHT}", "style 12 6, weight 4x6, out 4 3")(
        a_weight_that_activations_change
    )


@refused("weight: a sum of products makes the use", "weight 3x5x4, out 15 4")
def groups_in_one_sum_of_products(m: Any, x: Tensor) -> Any:
    return m.out((x.unflatten(-1, (3, 1, 4)) * m.weight).sum(-1).flatten(-2))


@refused("mix: a sum .*unclear\nup.weight: a sum of products", "up 12 16, mix 9x9, out 8 4")
def a_sum_of_products_over_tokens(m: Any, x: Tensor) -> Any:
    gate, y = (m.mix[..., None] * m.up(x)[:, None]).sum(2).chunk(2, -1)
    return m.out(F.silu(gate) * y)


@refused("left: a sum of products makes the use", "left 6x4, right 12x4, out 6 4")
def a_weight_computed_by_a_sum_of_products(m: Any, x: Tensor) -> Any:
    return m.out(x @ (m.left[:, None] * m.right).sum(-1).mT)


@refused("weight: a sum of products makes the use", "weight 12x12, out 12 4")
def a_sum_of_transposed_products(m: Any, x: Tensor) -> Any:
    return m.out((x[..., None, :] * m.weight).mT.sum(-1))


@refused("up.weight: .* no division into matrices matches this use", "up 12 8, down 8 4")
def a_gradient_as_outputs(m: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        energy = m.up(y := x.clone().requires_grad_()).relu().square().sum()
        return m.down(m.up(y - torch.autograd.grad(energy, y)[0]))


PAIRED = nn.Bilinear(4, 4, 3)


@refused(
    "pairs.weight: a bilinear form makes the use .*outputs unclear\npass split_parameters",
    "a 12 4, b 12 4, out 3 4",
    pairs=PAIRED,
)
def a_bilinear_layer(m: Any, x: Tensor) -> Any:
    return m.out(m.pairs(m.a(x), m.b(x)))


EDGES = torch.eye(x.shape[1]).to_sparse()


@refused("first.weight: aten.* of sparse tensors makes the use", "first 12 8, out 8 4")
def sparse_tensors(m: Any, x: Tensor) -> Any:
    return m.out(EDGES @ m.first(x[0]))


INFERENCE = "the forward pass must not run in inference mode, .*: use torch.no_grad"


@refused(INFERENCE, "first 12 8, out 8 4")
def inference_mode(m: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        return m.out(m.first(x))


@refused("first.weight: the forward pass neither used nor returned", "first 12 8, out 8 4")
def a_shape_alone(m: Any, x: Tensor) -> Any:
    return m.out(torch.zeros_like(m.first(x)))


@refused("side.weight: the forward pass neither used nor returned", "side 12 4, used 12 4")
def outputs_that_nothing_takes(m: Any, x: Tensor) -> Any:
    m.side(x)
    return m.used(x)


MEAN = "pieces.weight: the forward pass neither used .*, except perhaps in a mean or norm"


@refused(MEAN, "pieces 12 12, out 6 8, head 8 3")
def a_mean_of_parts(m: Any, x: Tensor) -> Any:
    return m.head(m.out(m.pieces(x).unflatten(-1, (2, 6)).mean(-2)))


@refused("pieces.weight: amax of part of the outputs makes the use", "pieces 12 24, out 6 4")
def a_maximum_of_parts(m: Any, x: Tensor) -> Any:
    return m.out(m.pieces(x).unflatten(-1, (6, 4)).amax(-1))


@refused("pieces.weight: max of part of the outputs makes the use", "pieces 12 24, out 6 4")
def a_maximum_of_parts_and_its_place(m: Any, x: Tensor) -> Any:
    return m.out(m.pieces(x).unflatten(-1, (4, 6)).max(-2).values)


@refused("waves: a product of complex numbers makes the use", "out 6 4, waves 12x6x2")
def a_product_of_complex_numbers(m: Any, x: Tensor) -> Any:
    return m.out((x.cfloat() @ torch.view_as_complex(m.waves)).real)


WAVES = nn.Parameter(torch.randn(12, 6, dtype=torch.cfloat))


@refused("weight must be real", "out 6 4", weight=WAVES)
def complex_numbers(m: Any, x: Tensor) -> Any:
    return m.out((x.cfloat() @ m.weight).abs())


INDEX = "gate.weight: aten.index.Tensor, which uses the outputs as an index, makes the use"


@refused(INDEX, "gate 12 2, out 8 4, table 5x8")
def an_index_of_the_outputs_of_a_layer(m: Any, x: Tensor) -> Any:
    return m.out(m.table[(m.gate(x)[..., 0].sigmoid() * 4).long()])


@refused(INDEX, "gate 12 3, out 8 4, table 4x8")
def counts_of_the_outputs_of_a_layer(m: Any, x: Tensor) -> Any:
    return m.out(m.table[(m.gate(x) > 0).sum(-1)])


@refused("both: a product with 6 of the weight's 12 inputs makes the use", "out 10 4, both 12x10")
def blocks_that_alternate_along_both_axes(m: Any, x: Tensor) -> Any:
    return m.out(torch.cat([x[..., i::2] @ m.both[i::2, i::2] for i in (0, 1)], -1))


STACK = "bank: the matrices in this stack are divided in different ways"


@refused(STACK, "head 12 4, bank 4x12x12")
def a_bank_of_values_and_outputs(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(x @ m.bank[i]) for i in range(3))
    return m.head(x + attention(q, k, v) @ m.bank[3])


@refused(STACK, "head 12 4, bank 4x12x12")
def a_bank_of_fused_values_and_outputs(m: Any, x: Tensor) -> Any:
    q, k, v = (heads(y) for y in F.linear(x, m.bank[:3].flatten(end_dim=1)).chunk(3, -1))
    return m.head(x + attention(q, k, v) @ m.bank[3].T)


CHOSEN = "gate 12 3, head 12 4, weights 3x12x12"


@refused("weights: a product with 24 of the weight's 36 inputs makes the use", CHOSEN)
def sums_of_outputs_of_experts_in_one_product(m: Any, x: Tensor) -> Any:
    x = x.flatten(0, 1)
    probabilities, chosen = m.gate(x).softmax(-1).topk(2)
    weights = m.weights[chosen].transpose(1, 2).flatten(2)  # [tokens, outputs, choices * inputs]
    inputs = (probabilities[..., None] * x[:, None]).flatten(1)
    return m.head(x + (weights @ inputs[..., None])[..., 0])


@refused("weights: a product with activations, which may choose a weight, makes the use", CHOSEN)
def merged_experts(m: Any, x: Tensor) -> Any:
    shares = m.gate(x.mean(1)).softmax(-1)[..., None, None]
    return m.head(x @ (shares * m.weights).sum(1))


@refused("q: .*outputs", "out 12 12, q 3x12x4")
def one_matrix_of_two_axes(m: Any, x: Tensor) -> Any:
    return m.out(torch.einsum("btd,hde->bthe", x, m.q).flatten(2))


@refused("qkv.weight: flex_attention makes the use", "qkv 12 36, out 12 12")
def flexible_attention(m: Any, x: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return m.out(joined(flex_attention(*qkv(m, x))))


META = nn.Linear(12, 4, device="meta")
REFUSED["on the meta device"] = (
    META,
    "the model cannot run on `example`, .* weight is on the meta device: split",
)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seen_is_refused(name: str) -> None:
    model, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{message}"):
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


class Frozen(dict[str, Any]):
    """A mapping that rejects changes, like the configs in diffusers."""

    def update(self, *_: Any) -> None:
        raise TypeError("frozen")


def test_attributes_that_refuse_changes_do_not_stop_the_watch() -> None:
    model = nn.Sequential(linear(12, 8), linear(8, 4))
    model.config = Frozen(width=8)
    assert len(split_parameters(model, example=x).matrices) == 1


class Late(nn.Module):
    """A module that creates a layer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(12, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.second is None:
            self.second = linear(8, 4)
        return self.second(self.first(x))


def test_weights_without_a_shape_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"the forward pass must not create parameters, got second\.weight: run the model",
    ):
        split_parameters(Late(), example=x)
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        split_parameters(nn.Sequential(nn.LazyLinear(4)))


def test_units_match_a_name_with_brackets() -> None:
    model = nn.ModuleDict({"a[0]": linear(12, 8)})
    split = split_parameters(model, units={"a[0].weight": {"rows": [2]}})
    assert split.rows[0].matrices == 4


def test_preconditioned_layers_are_followed() -> None:
    model = module("gate_up_proj 12 20, out 10 12", lambda m, x: m.out(F.glu(m.gate_up_proj(x))))
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
    "a correlation": lambda y, x: (y.flatten(0, 1).mT @ x.flatten(0, 1)).fill_diagonal_(0).diag(),
    "relative to their mean": lambda y, x: y - y.mean(-1, keepdim=True).expand_as(y),
    "added to a scaled input": lambda y, x: 0.6 * x + 0.8 * y,
    "averaged over tokens": lambda y, x: x.softmax(1).mT @ y,
    "a density": lambda y, x: ((x[..., :6] - y[..., :6]) / y[..., 6:].exp()).square(),
    "a distance of two inputs": lambda y, x: F.pairwise_distance(y, y.flip(1)),
    "a distance from a frozen layer": lambda y, x: (y - FROZEN(x)).pow(2).sum(-1),
    "with a gate": lambda y, x: y[..., :11].softmax(-1) * y[..., 11:].sigmoid(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_head_may_end_in_a_loss_or_correct_the_input(name: str) -> None:
    model = module(
        "inner 12 8, out 8 12",
        lambda m, x: ERRORS[name](m.out(m.inner(x).relu()), x),
        frozen=FROZEN,
    )
    rules = {row.name: row.rule for row in split_parameters(model, example=x).rows}
    assert rules == {"inner.weight": "spectral", "out.weight": "adamw"}


def test_a_stream_of_sums_ends_without_a_head() -> None:
    """In a model that returns hidden states, the outputs of the last layers are added to other
    outputs, and the layers are matrices."""
    model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 16), nn.LayerNorm(12)).eval()
    assert len(split_parameters(model, example=x).matrices) == 4
    perceptron = nn.Sequential(linear(12, 8), nn.ReLU(), linear(8, 3))
    split = split_parameters(perceptron, example=x)
    reasons = ["a layer uses all columns", "its outputs reach no further layer: a head"]
    assert [row.reason for row in split.rows] == reasons
    Muon(split, lr=0.1)
    duel = module(
        "inner 12 8, actions 8 4, value 8 1",
        lambda m, x: m.actions(y := m.inner(x).relu()) + m.value(y).repeat(1, 1, 4),
    )
    assert [row.rule for row in split_parameters(duel, example=x).rows] == [
        "spectral",
        "adamw",
        "adamw",
    ]
    two = module("a 12 3, b 12 3", lambda m, x: (m.a(x) + m.b(x)) / 2)
    with pytest.raises(ValueError, match="Module has no parameter for the optimizer's rule"):
        split_parameters(two, example=x)


@pytest.mark.slow  # the import of torch's compiler
def test_a_compiled_model_is_seen_as_the_plain_one() -> None:
    split = split_parameters(torch.compile(gate()), example=x)
    assert split.rows[0].matrices == 2


def test_weights_that_share_a_storage_are_refused() -> None:
    model = nn.Sequential(linear(12, 12), linear(12, 12))
    both = torch.randn(2, 12, 12)
    for layer, weight in zip(model, both, strict=True):
        layer.weight.data = weight
    with pytest.raises(ValueError, match=r"^1.weight shares its storage.*clone.*omit `example`"):
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

    model: Any = gate()
    if kind == "ddp":
        split = split_parameters(nn.parallel.DistributedDataParallel(model), example=x)
        assert split.rows[0].matrices == 2 and split.replicas is not None
        others = torch.distributed.new_group([0])
        assert Muon(split)._replicas is split.replicas
        assert Muon(split, replicas=others)._replicas is others is not split.replicas
        return
    alone, split = copy.deepcopy(model), split_parameters(model, example=x)
    split.groups[0]["lr"] = 0.03
    early = Muon(split)
    assert early.param_groups[0]["lr"] == 0.03
    if kind == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        model.both.weight = nn.Parameter(distribute_tensor(model.both.weight, mesh, [Shard(0)]))
    with pytest.raises(
        ValueError, match="both.weight is sharded: split the model before sharding it"
    ):
        split_parameters(model, example=x)
    model.both.weight.grad = torch.zeros_like(model.both.weight)
    with pytest.raises(ValueError, match="both.weight was replaced after the optimizer was"):
        early.step()
    # A split made before sharding has the sharded parameters.
    for one, groups in ((alone, split_parameters(alone, example=x)), (model, split)):
        optimizer = Muon(groups, lr=0.03)
        for parameter in one.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    torch.testing.assert_close(model.both.weight.full_tensor(), alone.both.weight)
    del model.both
    with pytest.raises(ValueError, match="both.weight was removed, renamed or reshaped"):
        Muon(split)


ACTIVATIONS = "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish"
ACTIVATIONS += " relu relu6 rrelu selu sigmoid silu softplus softshrink softsign tanhshrink"


def test_columns_pass_an_activation_with_a_parameter() -> None:
    model = nn.Sequential(linear(12, 8), nn.PReLU(8), linear(8, 4))
    split = split_parameters(model, example=x[0])
    assert split.rows[0].reason.endswith("a layer uses all columns")


@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_columns_pass_an_activation(name: str) -> None:
    model = module("first 12 8, out 8 4", lambda m, x: m.out(getattr(F, name)(m.first(x))))
    assert split_parameters(model, example=x).rows[0].reason.endswith("a layer uses all columns")


def test_the_place_of_a_maximum_among_columns_is_a_choice() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        most, where = m.most(x).max(-1, keepdim=True)
        least, there = m.least(x).min(-1, keepdim=True)
        return m.out(m.first(x) * most * where + least * there * m.place(x).argmin(-1)[..., None])

    model = module("most 12 3, least 12 3, place 12 3, first 12 8, out 8 4", forward)
    assert all("chooses" in r.reason for r in split_parameters(model, example=x).rows[:3])


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

    model = module("gate 12 4, first 12 8, out 8 4", forward)
    gate = split_parameters(model, example=x).rows[0]
    assert (gate.rule, gate.reason) == ("adamw", "an operation chooses among its columns")


PLACES = torch.tensor([0, 2, 2, 1, 0])
OVER_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: h.max(1).values,
    "max, axis kept": lambda h: h.max(-2, keepdim=True).values,
    "topk": lambda h: h.topk(2, 1).values,
    "sort": lambda h: h.sort(1).values,
    "argsort": lambda h: h.gather(1, h.argsort(1)),
    "argmax": lambda h: h.gather(1, h.argmax(1, keepdim=True)),
    "sum of groups": lambda h: torch.zeros(2, 3, 8).index_add(1, PLACES, h, alpha=0.5),
    "mean of groups": lambda h: torch.zeros(2, 3, 8).scatter_reduce(
        1, PLACES[:, None].expand_as(h), h, "mean", include_self=False
    ),
    "maximum of lengths": lambda h: h * (h < h.long().max()),
    "larger of lengths": lambda h: h * (h < torch.max(h.long(), (2 * h).long())),
}


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_a_choice_among_tokens_is_none_among_columns(name: str) -> None:
    model = module("first 12 8, out 8 4", lambda m, x: m.out(OVER_TOKENS[name](m.first(x))))
    first = split_parameters(model, example=torch.randn(2, 5, 12)).rows[0]
    assert (first.rule, first.matrices) == ("spectral", 1)
    assert first.reason.endswith(" uses all columns")


def test_a_wrong_example_is_named_where_the_model_fails() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        split_parameters(nn.Linear(4, 4), example=torch.randn(2, 5))
    assert "forward pass on `example`" in raised.value.__notes__[0]
