"""Train transformers' GPT-2 with accelerate and SSO, using FSDP2 on GPUs or DDP on CPUs.

    pip install . transformers accelerate
    torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py --steps 40

`prepare` shards the model and swaps the parameters in the optimizer's groups for sharded ones. The
optimizer replaces the whole model's state with sharded state in the first step, so create both on
the CPU. On CPUs, accelerate only supports DDP.
"""

import argparse

import corpus
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from spectrain import SpectralSphere, split_parameters
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    """Train, and print the first and last loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
        cpu_ram_efficient_loading=False,
    )
    gpu = torch.cuda.is_available()
    accelerator = Accelerator(cpu=not gpu, fsdp_plugin=plugin if gpu else None)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=corpus.VOCABULARY, n_embd=64, n_head=4, n_layer=2, n_positions=64,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = SpectralSphere(split_parameters(model, lr=3e-3), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    book = corpus.text()
    for step in range(steps):
        seed = step * accelerator.num_processes + accelerator.process_index
        tokens = corpus.batch(book, 8, 64, seed).to(accelerator.device)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in (0, steps - 1):
            accelerator.print(f"step {step} loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
