"""Train a small model built from torch.nn layers with SSO in a plain PyTorch loop.

    pip install .
    python examples/plain_loop.py --steps 100

torch's attention fuses queries, keys and values into a single weight. `split_parameters` detects
this and treats the query, key and value of each head as separate matrices.
"""

import argparse

import corpus
import torch
from spectrain import SpectralSphere, split_parameters
from torch import Tensor, nn


class Model(nn.Module):
    """A decoder made of torch's encoder layers with a causal mask."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(corpus.VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, corpus.VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, length, vocabulary]`."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    book, model = corpus.text(), Model()
    split = split_parameters(model, elementwise=[model.head], lr=3e-3)
    print(split)
    optimizer = SpectralSphere(split, lr=5e-3)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rates, total_steps=steps, cycle_momentum=False
    )
    for step in range(steps):
        tokens = corpus.batch(book, 16, 65, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
