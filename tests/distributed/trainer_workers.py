"""Functions that the ranks run in the transformers Trainer test."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from spectral import SpectralSphere, split_parameters


def tiny_llama() -> LlamaForCausalLM:
    """Return a tiny model with the same random weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


class SpectralTrainer(Trainer):
    """A Trainer that creates its own optimizer, as required under FSDP."""

    def create_optimizer(self, model: Any = None) -> SpectralSphere:
        """Create the optimizer for the model, whether sharded or not."""
        self.optimizer = SpectralSphere(split_parameters(model or self.model, lr=1e-3), lr=2e-2)
        return self.optimizer


def trained() -> dict[str, Any]:
    """Train with the Trainer under FSDP2. Return the whole weights, the first and the last loss,
    and the names of sharded parameters.

    accelerate only starts FSDP2 on accelerators, so these processes pretend to be accelerators.
    """
    options: dict[str, Any] = {"output_dir": tempfile.mkdtemp(), "report_to": "none"}
    arguments = TrainingArguments(
        max_steps=4, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        max_grad_norm=1.0, use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    state = Accelerator(cpu=True).state
    for each in (PartialState(), state):
        each.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    rows = torch.arange(32 * 16).view(32, 16) % 61
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = SpectralTrainer(tiny_llama(), arguments, train_dataset=data)
    trainer.train()
    wrapped = trainer.model_wrapped
    parameters = dict(wrapped.named_parameters())
    whole: dict[str, Tensor] = {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in parameters.items()
    }
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "weights": whole,
        "losses": losses,
        "sharded": all(isinstance(value, DTensor) for value in parameters.values()),
        "ranks": dist.get_world_size(),
    }
