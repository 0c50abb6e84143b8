"""Record optimizer momenta of a tiny GPT: makes momenta.safetensors.

Random matrices are the easiest input of the multiplier solver: a Gaussian momentum is nearly
orthogonal to the top singular direction of a Gaussian weight. Momenta of training are not. This
script trains a 3-layer byte-level model on English text with a slow, exact Spectral Sphere step
(float64 SVD for the top singular pair, the multiplier and the update; "Controlled LLM Training on
Spectral Sphere", algorithm 1 with Nesterov momentum) and stores, at a few steps, the momentum that
is about to be orthogonalised and the weight it belongs to. It shares no code with `spectral/`, so
that tests do not compare that code with itself.

    python tests/data/record_momenta.py --corpus examples/data/kjv.txt.xz

The file holds `momentum.{i}` (Frobenius norm scaled to sqrt(rows * cols)) and `weight.{i}` in
float16, the weight's top singular pair `u.{i}`, `v.{i}` in float32 (gaps are near 0.5%, which
rounded weights do not keep), and the metadata entry `samples`: a JSON list, in the order of i, of
{step, module, at_zero, multiplier}. The last two are f(0) and its float64 root for the stored,
Frobenius-normalised momentum.
"""

import argparse
import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, FFN, CONTEXT, BATCH, VOCABULARY = 3, 128, 4, 256, 128, 16, 256
RECORDED_LAYER = LAYERS // 2


def read_corpus(paths: list[Path]) -> Tensor:
    """Read the bytes of text files in order, `[bytes]`; .xz and .gz are decompressed."""
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    parts = []
    for path in paths:
        with openers.get(path.suffix, open)(path, "rb") as file:
            parts.append(file.read())
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8).long()


def rotary(x: Tensor) -> Tensor:
    """Apply rotary position embedding to `[batch, heads, time, head_dim]`."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Block(nn.Module):
    """One pre-norm transformer block; the optimizer treats every matrix as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            m(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class TinyGPT(nn.Module):
    """A byte-level language model of `LAYERS` blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def polar(x: Tensor) -> Tensor:
    """The exact polar factor of one matrix."""
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def tangent_direction(m: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, float, float]:
    """The update direction `[rows, cols]`, its multiplier, and f at multiplier 0, for |M|_F = 1.

    Root of f(x) = u^T polar(M + x u v^T) v, safeguarded false position (Illinois) in the interval
    of the pinching bound |x + a| <= sqrt(a^2 + (p + q)^2), a = u^T M v, p and q the norms of the
    remaining parts of M^T u and M v.
    """
    m = m / m.norm()
    a = torch.dot(u, m @ v)
    spread = (m.T @ u - a * v).norm() + (m @ v - a * u).norm()
    reach = 1.01 * float(torch.hypot(a, spread))
    low, high = -float(a) - reach, -float(a) + reach

    def evaluate(x: float) -> tuple[float, Tensor]:
        direction = polar(m + x * torch.outer(u, v))
        return float(u @ direction @ v), direction

    f_low, f_high = evaluate(low)[0], evaluate(high)[0]
    at_zero = evaluate(0.0)[0]
    root, f_root, direction = 0.0, at_zero, m
    for _ in range(60):
        root = (low * f_high - high * f_low) / (f_high - f_low)
        f_root, direction = evaluate(root)
        if abs(f_root) < 1e-9:
            break
        if f_root > 0:
            high, f_high, f_low = root, f_root, 0.5 * f_low
        else:
            low, f_low, f_high = root, f_root, 0.5 * f_high
    return direction, root, at_zero


class ExactSphere:
    """The Spectral Sphere step by float64 SVD, on the matrices of the blocks."""

    def __init__(self, modules: dict[str, nn.Linear], lr: float, momentum: float) -> None:
        self.modules, self.lr, self.momentum = modules, lr, momentum
        self.buffers = {name: torch.zeros_like(m.weight) for name, m in modules.items()}
        for module in modules.values():
            nn.init.normal_(module.weight)
            rows, cols = module.weight.shape
            norm = torch.linalg.matrix_norm(module.weight, 2)
            module.weight.data *= math.sqrt(rows / cols) / norm

    @torch.no_grad()
    def step(self) -> dict[str, dict[str, Tensor]]:
        """Take a step; by module the momentum, its weight and that weight's top pair u, v."""
        seen = {}
        for name, module in self.modules.items():
            weight, buffer = module.weight, self.buffers[name]
            grad = weight.grad
            assert grad is not None
            buffer.lerp_(grad, 1 - self.momentum)
            nesterov = torch.lerp(grad, buffer, self.momentum)
            radius = math.sqrt(weight.shape[0] / weight.shape[1])
            left, sigma, right = torch.linalg.svd(weight.double(), full_matrices=False)
            weight *= radius / sigma[0].float()
            u, v = left[:, 0], right[0]
            seen[name] = {"momentum": nesterov, "weight": weight.clone(), "u": u, "v": v}
            direction, _, _ = tangent_direction(nesterov.double(), u, v)
            weight -= self.lr * radius * direction.float()
        return seen


def store(
    found: dict[str, Tensor],
    what: dict[str, Any],
    tensors: dict[str, Tensor],
    samples: list[dict[str, Any]],
) -> None:
    """Append one sample, rounded as it will be read, with the exact solution for the rounded
    values."""
    i = len(samples)
    momentum = found["momentum"]
    momentum = (momentum * (momentum.numel() ** 0.5 / momentum.norm())).half()
    u, v = found["u"].float(), found["v"].float()
    _, multiplier, at_zero = tangent_direction(momentum.double(), u.double(), v.double())
    stored = {"momentum": momentum, "weight": found["weight"].half(), "u": u, "v": v}
    tensors.update({f"{key}.{i}": value.contiguous() for key, value in stored.items()})
    samples.append(what | {"at_zero": at_zero, "multiplier": multiplier})
    print(samples[-1], flush=True)


def train(
    text: Tensor, steps: int, recorded: set[int], lr: float
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Train; the recorded tensors and, in the same order, what each one is."""
    model = TinyGPT()
    matrices = {
        f"blocks.{i}.{name}": module
        for i, block in enumerate(model.blocks)
        for name, module in block.named_children()
        if isinstance(module, nn.Linear)
    }
    owned = {id(m.weight) for m in matrices.values()}
    sphere = ExactSphere(matrices, lr, momentum=0.9)
    adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in owned], lr=lr / 5)
    tensors: dict[str, Tensor] = {}
    samples: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        start = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1))
        window = text[start + torch.arange(CONTEXT + 1)]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        model.zero_grad(set_to_none=True)
        loss.backward()
        for name, found in sphere.step().items():
            if step in recorded and name.startswith(f"blocks.{RECORDED_LAYER}."):
                store(found, {"step": step, "module": name}, tensors, samples)
        adamw.step()
        if step % 20 == 0 or step == 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    return tensors, samples


def main() -> None:
    """Train, record and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, help=".txt, .gz or .xz")
    parser.add_argument("--out", type=Path, default=Path("tests/data/momenta.safetensors"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--record", type=int, nargs="+", default=[20, 80, 159, 160])
    parser.add_argument("--lr", type=float, default=2e-2)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    if outside := [step for step in args.record if not 1 <= step <= args.steps]:
        parser.error(f"--record must lie in 1..{args.steps}, got {outside}")
    torch.manual_seed(args.seed)
    tensors, samples = train(read_corpus(args.corpus), args.steps, set(args.record), args.lr)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out, metadata={"samples": json.dumps(samples)})
    print(f"{len(samples)} samples, {args.out.stat().st_size / 1e6:.2f} MB in {args.out}")


if __name__ == "__main__":
    main()
