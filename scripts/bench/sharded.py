"""Bytes and time of the library's optimizers under FSDP2, beside AdamW and dion's Muon.

    torchrun --nproc-per-node 2 scripts/bench/sharded.py [--dion path/to/dion] [--hidden 256]

Every collective of a training step of a small Llama is counted as it is dispatched, those of FSDP2
with those of the optimizer. Bytes are those that this rank sends, by ring algorithms.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.peers import llama
from scripts.command import command, whole_number
from spectral import SpectralOptimizer, split_parameters
from training.errors import InputError

RULES = ("muon", "muon_sphere", "spectral_sphere", "muon_plus_plus")


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends, by collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, counted if it is a collective."""
        name = func.name()
        if name.startswith("c10d::"):
            self.sent[name] += sent_bytes(name, args)
        return func(*args, **(kwargs or {}))


def sent_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that one rank of a collective sends."""
    size, rank = dist.get_world_size(), dist.get_rank()
    if "allreduce" in name:
        return sum(2 * t.nbytes * (size - 1) // size for t in args[0])
    if "alltoall_base" in name:
        send, counts = args[1], args[4]
        own = counts[rank] if counts else send.numel() // size
        return int((send.numel() - own) * send.element_size())
    if "alltoall" in name:
        return sum(t.nbytes for i, t in enumerate(args[1]) if i != rank)
    if "allgather" in name or "reduce_scatter" in name:
        return nbytes(args[0] if "allgather" in name else args[1]) * (size - 1) // size
    return 0


def nbytes(value: Any) -> int:
    """Sum the bytes of a tensor, or of tensors in lists."""
    return value.nbytes if isinstance(value, Tensor) else sum(map(nbytes, value))


def build(hidden: int, layers: int, mesh: DeviceMesh) -> nn.Module:
    """Return a Llama sharded over all ranks, equal on every call."""
    model = llama(hidden, layers)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizers(dion: Path | None, mesh: DeviceMesh) -> dict[str, Callable[[nn.Module], Any]]:
    """Return what makes each optimizer, by name."""
    found: dict[str, Callable[[nn.Module], Any]] = {
        "torch AdamW": lambda model: torch.optim.AdamW(model.parameters()),
        "adamw": lambda model: SpectralOptimizer(model.parameters(), rule="adamw", lr=1e-3),
    }
    for rule in RULES:
        found[rule] = lambda model, rule=rule: SpectralOptimizer(  # type: ignore[misc]
            split_parameters(model), rule=rule
        )
    for rule in ("muon", "spectral_sphere"):
        found[f"{rule} bf16"] = lambda model, rule=rule: SpectralOptimizer(  # type: ignore[misc]
            split_parameters(model), rule=rule, exchange_dtype=torch.bfloat16
        )
    if dion is not None:
        if not (dion / "dion").is_dir():
            raise InputError(f"--dion must be a checkout with a folder dion, got {dion}")
        sys.path.insert(0, str(dion.resolve()))
        from dion import Muon as DionMuon  # type: ignore[import-not-found]

        def dions(model: nn.Module) -> Any:
            split = split_parameters(model)
            groups = [
                {"params": split.matrices},
                {"params": split.others, "algorithm": "adamw", "lr": 1e-3},
            ]
            return DionMuon(groups, distributed_mesh=mesh, nesterov=True)

        found["dion Muon"] = dions
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--dion", type=Path, metavar="PATH", help="checkout of github.com/microsoft/dion"
    )
    parser.add_argument("--hidden", type=whole_number(), default=256, metavar="N", help="width")
    parser.add_argument("--layers", type=whole_number(), default=4, metavar="N", help="depth")
    parser.add_argument("--steps", type=whole_number(), default=5, metavar="N", help="steps timed")
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each optimizer."""
    given = parse(arguments)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = 0
    for name, make in optimizers(given.dion, mesh).items():
        model = build(given.hidden, given.layers, mesh)
        optimizer = make(model)
        sent, seconds = measure(model, optimizer, given.steps)
        base = base or sum(sent.values())
        if dist.get_rank() == 0:
            own = sum(v for k, v in sent.items() if "alltoall" in k)
            print(
                f"{name:20} {sum(sent.values()):>12,} bytes  {sum(sent.values()) / base:5.2f} of "
                f"AdamW's  {own:>12,} by all-to-all  {1e3 * seconds:8.1f} ms in step()",
                flush=True,
            )
    dist.destroy_process_group()
    return 0


def measure(model: nn.Module, optimizer: Any, steps: int) -> tuple[Counter[str], float]:
    """Return the bytes of the last step by collective, and the shortest time of `step()`."""
    seconds = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(256, (1, 32), generator=generator)
        with Traffic() as traffic:
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    return traffic.sent, min(seconds)


if __name__ == "__main__":
    sys.exit(main())
