"""Time of a step of the library's optimizers, beside torch.optim and other libraries.

    python scripts/bench/library.py --peers FOLDER --json result.json
    torchrun --nproc-per-node 2 scripts/bench/library.py --peers FOLDER --layers 3 --hidden 128

`--peers` names a folder with checkouts of other projects under these names, each of which may be
left out: dion (microsoft/dion), keller_jordan (KellerJordan/Muon), emerging_optimizers
(NVIDIA-NeMo/Emerging-Optimizers), gram_newton_schulz (Dao-AILab/gram-newton-schulz, its own Muon
over torch's products).

In one process every optimizer steps the same weights on the same gradients with one thread, for
each of `--sets` (COUNTxROWSxCOLS, several with commas). All take turns, and a cell is the median of
processor time. The first column is each library by its defaults; "equal" are five steps of msign in
bfloat16 and each weight one matrix, as the peers have them.

Under torchrun all step a small Llama under FSDP2. Every collective of a training step is counted as
it is dispatched, those of FSDP2 with those of the optimizer; bytes are those that this rank sends,
by ring algorithms.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.measure import medians, print_table, record, timed, write_json
from scripts.command import add_json, command, whole_number
from spectral import AdamW, Muon, MuonPlusPlus, MuonSphere, SpectralSphere, split_parameters
from training.errors import InputError

CPU = torch.device("cpu")
PLAIN: Final[dict[str, Any]] = {"lr": 1e-3, "weight_decay": 0.0}
EQUAL: Final[dict[str, Any]] = {**PLAIN, "steps": 5, "msign_dtype": "bfloat16"}
SETS = (
    "32x64x1024", "1x1024x1024", "2x2816x1024", "1x1024x2816", "4x1024x4096",
    "10x1000x1000", "50x256x256", "200x64x64",
)  # fmt: skip
PEERS: Final[dict[str, tuple[str, str, str, dict[str, Any]]]] = {
    "dion Muon": ("dion", "dion", "Muon", {"nesterov": True}),
    "KellerJordan Muon": ("keller_jordan", "muon", "SingleDeviceMuon", {}),
    "Emerging-Optimizers Muon": (
        "emerging_optimizers", "emerging_optimizers.orthogonalized_optimizers", "Muon",
        {"nesterov": True},
    ),
    "gram-newton-schulz Muon": (
        "gram_newton_schulz", "gram_newton_schulz", "Muon", {"ns_use_kernels": False},
    ),
}  # fmt: skip
"""Name of a checkout, module, class and settings of each library."""
Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def own() -> dict[str, Make]:
    """What makes torch's optimizers and this library's, by name."""
    sso = {**EQUAL, "tolerance": 5e-3}
    return {
        "torch AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True, **PLAIN),
        "AdamW": lambda p: AdamW(p, **PLAIN),
        "torch Muon": lambda p: torch.optim.Muon(p, **PLAIN),
        "Muon": lambda p: Muon(p, **PLAIN),
        "Muon, equal": lambda p: Muon(p, **EQUAL),
        "MuonSphere": lambda p: MuonSphere(p, **PLAIN),
        "MuonSphere, equal": lambda p: MuonSphere(p, **EQUAL),
        "SpectralSphere": lambda p: SpectralSphere(p, **PLAIN),
        "SpectralSphere, equal": lambda p: SpectralSphere(p, **sso),
        "MuonPlusPlus": lambda p: MuonPlusPlus(p, **PLAIN),
    }


def peers(folder: Path | None) -> dict[str, Make]:
    """What makes the Muon of each checkout that `folder` has, by name; others are named."""
    if folder is None:
        return {}
    makers: dict[str, Make] = {}
    for name, (checkout, module, attribute, settings) in PEERS.items():
        if not (folder / checkout).is_dir():
            print(f"{name} left out: no {folder / checkout}")
            continue
        sys.path.insert(0, str((folder / checkout).resolve()))
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, SyntaxError) as error:
            print(f"{name} left out: {error}")
            continue
        makers[name] = partial(kind, **PLAIN, **settings)
    return makers


class Side:
    """An optimizer on weights of its own, equal to those of every other side."""

    def __init__(self, shapes: Sequence[tuple[int, int]], make: Make) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.optimizer = make(self.weights)
        self.turns = 0

    def turn(self) -> float:
        """Give all weights Gaussian gradients, take a step, and return its milliseconds."""
        self.turns += 1
        generator = torch.Generator().manual_seed(self.turns)
        for weight in self.weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        return timed(self.optimizer.step, CPU)[0]


def shapes(text: str) -> list[tuple[int, int]]:
    """Parse COUNTxROWSxCOLS[,...] into the shape of every weight."""
    found = []
    for part in text.split(","):
        try:
            count, rows, cols = map(int, part.split("x"))
        except ValueError:
            raise InputError(f"--sets must be COUNTxROWSxCOLS, got {text}") from None
        found += count * [(rows, cols)]
    return found


def one_process(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step by set and optimizer."""
    makers = own() | peers(options.peers)
    if options.only:
        makers = {name: make for name, make in makers.items() if name in options.only}
    found = {}
    for text in options.sets:
        sides = {name: Side(shapes(text), make) for name, make in makers.items()}
        found[text] = medians({name: side.turn for name, side in sides.items()}, options.steps)
        print_table([{text: name, "ms": ms} for name, ms in found[text].items()])
    return found


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
        kept = counts[rank] if counts else send.numel() // size
        return int((send.numel() - kept) * send.element_size())
    if "alltoall" in name:
        return sum(t.nbytes for i, t in enumerate(args[1]) if i != rank)
    if "allgather" in name or "reduce_scatter" in name:
        return nbytes(args[0] if "allgather" in name else args[1]) * (size - 1) // size
    return 0


def nbytes(value: Any) -> int:
    """Sum the bytes of a tensor, or of tensors in lists."""
    return value.nbytes if isinstance(value, Tensor) else sum(map(nbytes, value))


def llama(hidden: int, layers: int, mesh: DeviceMesh) -> nn.Module:
    """Return a Llama of bytes sharded over all ranks, equal on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_makers(folder: Path | None, mesh: DeviceMesh) -> dict[str, Callable[[nn.Module], Any]]:
    """What makes each optimizer of a sharded model, by name.

    "equal" takes each weight for one matrix, as dion does, and sends bfloat16.
    """
    sent: dict[str, Any] = {"exchange_dtype": torch.bfloat16}
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "torch AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3),
        "Muon": lambda model: Muon(split_parameters(model)),
        "Muon, equal": lambda model: Muon(whole_weights(model), **EQUAL, **sent),
        "MuonSphere": lambda model: MuonSphere(split_parameters(model)),
        "SpectralSphere": lambda model: SpectralSphere(split_parameters(model)),
        "SpectralSphere, bfloat16 sent": lambda model: SpectralSphere(
            split_parameters(model), **sent
        ),
        "MuonPlusPlus": lambda model: MuonPlusPlus(split_parameters(model)),
    }
    if folder is not None and (folder / "dion").is_dir():
        sys.path.insert(0, str((folder / "dion").resolve()))
        dion = import_module("dion").Muon
        makers["dion Muon"] = lambda model: dion(
            [
                {"params": split_parameters(model).matrices},
                {"params": split_parameters(model).others, "algorithm": "adamw", "lr": 1e-3},
            ],
            distributed_mesh=mesh,
            nesterov=True,
        )
    return makers


def whole_weights(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of a model with each weight as one matrix."""
    split = split_parameters(model)
    return [{"params": split.matrices}, {"params": split.others, "rule": "adamw", "lr": 1e-3}]


class ShardedSide:
    """A model under FSDP2 with its optimizer."""

    def __init__(
        self, hidden: int, layers: int, mesh: DeviceMesh, make: Callable[[nn.Module], Any]
    ) -> None:
        self.model = llama(hidden, layers, mesh)
        self.optimizer = make(self.model)
        self.sent: Counter[str] = Counter()
        self.turns = 0

    def turn(self) -> float:
        """Take a training step; return the processor milliseconds of `step()` on this rank."""
        self.turns += 1
        generator = torch.Generator().manual_seed(self.turns * dist.get_world_size())
        tokens = torch.randint(256, (dist.get_world_size(), 32), generator=generator)
        tokens = tokens[dist.get_rank()][None]
        with Traffic() as traffic:
            self.optimizer.zero_grad()
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            dist.barrier()
            spent, _ = timed(self.optimizer.step, CPU)
        self.sent = traffic.sent
        return spent


def sharded(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Bytes that this rank sends in a training step, and median milliseconds of `step()`."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    makers = sharded_makers(options.peers, mesh)
    sides = {
        name: ShardedSide(options.hidden, options.layers, mesh, make)
        for name, make in makers.items()
    }
    times = medians({name: side.turn for name, side in sides.items()}, options.steps)
    found = {}
    for name, side in sides.items():
        found[name] = {
            "sent_bytes": sum(side.sent.values()),
            "optimizer_bytes": sum(size for kind, size in side.sent.items() if "alltoall" in kind),
            "ms": times[name],
        }
    base = found["torch AdamW"]["sent_bytes"]
    if dist.get_rank() == 0:
        print_table(
            [
                {"optimizer": name, **figures, "of AdamW's bytes": figures["sent_bytes"] / base}
                for name, figures in found.items()
            ]
        )
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder of checkouts")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NxRxC", help="sets of weights")
    parser.add_argument("--only", nargs="+", help="optimizers in one process")
    parser.add_argument("--hidden", type=whole_number(128), default=256, help="width")
    parser.add_argument("--layers", type=whole_number(), default=4, help="depth")
    parser.add_argument("--steps", type=whole_number(), default=10, help="steps timed")
    add_json(parser)
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each optimizer, and write them."""
    options = parse(arguments)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    figures = sharded(options) if ranks > 1 else one_process(options)
    if ranks == 1 or dist.get_rank() == 0:
        content = {"ranks": ranks, "figures": figures}
        write_json(options.json, record("scripts/bench/library.py", arguments, CPU, content))
    if ranks > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
