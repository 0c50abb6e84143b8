"""Train a model with Muon under FSDP2, save a checkpoint and resume from it.

    pip install .
    torchrun --nproc-per-node 2 examples/torchtitan_fsdp2.py --steps 40

The order is the same as in torchtitan: build the model on the meta device, `fully_shard` each
layer, initialise the weights, then create the optimizer from the sharded parameters. Optimizer
state is sharded as well, so torch.distributed.checkpoint can load it on any number of ranks.
"""

import argparse
import gc
import tempfile

import corpus
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain_loop import Model
from spectrain import Muon, split_parameters
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build() -> tuple[nn.Module, Muon]:
    """Return a sharded model and its optimizer."""
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, float("norm" in name and name.endswith("weight")))
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return model, Muon(split_parameters(model, elementwise=[model.head], lr=3e-3), lr=2e-2)


def train(model: nn.Module, optimizer: Muon, first: int, last: int) -> float:
    """Train on this rank's batches and return the last loss."""
    book = corpus.text()
    for step in range(first, last):
        tokens = corpus.batch(book, 8, 65, step * dist.get_world_size() + dist.get_rank())
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    """Train for half the steps, save a checkpoint, load it, and train for the other half."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model, optimizer = build()
    train(model, optimizer, 0, steps // 2)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    model, optimizer = build()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    loss = train(model, optimizer, steps // 2, steps)
    if dist.get_rank() == 0:
        print(f"step {steps - 1} loss {loss:.3f}")
    # Free everything that holds a process group: gloo's threads must end before Python exits.
    del model, optimizer, weights, state
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
