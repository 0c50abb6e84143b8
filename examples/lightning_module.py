"""Train a small LightningModule with MuonSphere and a learning rate schedule.

    pip install . lightning
    python examples/lightning_module.py --steps 60

Lightning steps the optimizer returned by `configure_optimizers`; gradient clipping and accumulation
work unchanged. Each parameter group has its own learning rate, and a `LambdaLR` scales them all.
"""

import argparse
import logging
import warnings
from typing import Any

import corpus
import lightning
import torch
from plain_loop import Model
from spectrain import MuonSphere, split_parameters
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LENGTH = 65


class Decoder(lightning.LightningModule):
    """The model from plain_loop.py."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model, self.steps = Model(), steps

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the mean loss over a batch of tokens `[batch, length + 1]`."""
        tokens = batch[0].long()
        logits = self.model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        if index % 20 == 0 or index == self.steps - 1:
            print(f"step {index} loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and a schedule that decays learning rates linearly to a tenth."""
        split = split_parameters(self.model, elementwise=[self.model.head], lr=3e-3)
        optimizer = MuonSphere(split, lr=5e-3)
        factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - 0.9 * s / self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": factor, "interval": "step"}}


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    torch.manual_seed(0)
    book = corpus.text()
    pieces = book[: len(book) // LENGTH * LENGTH].view(-1, LENGTH)
    loader = DataLoader(TensorDataset(pieces), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Decoder(steps), loader)


if __name__ == "__main__":
    main()
