"""Train a Llama model with the transformers Trainer and Muon++.

    pip install . transformers accelerate
    python examples/hf_trainer.py --steps 60

The Trainer accepts any optimizer and creates the learning rate schedule for it. `units` in the
parameter groups specifies the rows of each head.
"""

import argparse
import tempfile
from typing import Any

import corpus
import torch
from spectrain import MuonPlusPlus, split_parameters
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 64


class Book(Dataset[dict[str, Tensor]]):
    """Consecutive sequences from the corpus, with labels for the Trainer."""

    def __init__(self) -> None:
        text = corpus.text().long()
        self.pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    """Train, and print the first and last logged loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=corpus.VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    split = split_parameters(model, lr=3e-3)
    print(split)
    options: dict[str, Any] = {"output_dir": tempfile.mkdtemp(), "report_to": "none"}
    arguments = TrainingArguments(
        max_steps=steps, per_device_train_batch_size=16, logging_steps=10, save_strategy="no",
        lr_scheduler_type="cosine", warmup_steps=5, max_grad_norm=1.0, use_cpu=True, **options,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=Book(), optimizers=(MuonPlusPlus(split, lr=5e-3), None)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"step 10 loss {float(losses[0]):.3f}")
    print(f"step {steps} loss {float(losses[-1]):.3f}")


if __name__ == "__main__":
    main()
