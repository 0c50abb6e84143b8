"""Time of a step of the library's optimizers, beside torch.optim and other libraries.

    python scripts/bench/library.py --peers FOLDER --json result.json
    python scripts/bench/library.py --peers FOLDER --device cuda --sets 24x2048x2048
    torchrun --nproc-per-node 2 scripts/bench/library.py --peers FOLDER --sets 12x256x256

`--peers` names a folder with checkouts of other projects under these names, each of which may be
left out: dion (microsoft/dion), keller_jordan (KellerJordan/Muon), emerging_optimizers
(NVIDIA-NeMo/Emerging-Optimizers), gram_newton_schulz (Dao-AILab/gram-newton-schulz, its own Muon
over torch's products).

Every optimizer steps the same weights on the same gradients with one thread, for each of `--sets`
(COUNTxROWSxCOLS, several with commas). All take turns, and a cell is the median of processor time,
on a GPU of the device's. Each library has its defaults, and on a GPU its own kernels; "equal" are
five steps of msign in bfloat16 and each weight one matrix, as the peers have them.

Under torchrun the weights are sharded over all ranks by rows, as by FSDP2, and ours and dion's step
them: the mean of the ranks' processor time, and bytes that they send.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.measure import medians, print_table, record, timed, write_json
from scripts.command import add_json, command, whole_number
from spectral import AdamW, Muon, MuonPlusPlus, MuonSphere, SpectralSphere
from training.errors import InputError

CPU = torch.device("cpu")
PLAIN: Final[dict[str, Any]] = {"lr": 1e-3, "weight_decay": 0.0}
EQUAL: Final[dict[str, Any]] = {**PLAIN, "steps": 5, "msign_dtype": "bfloat16"}
SETS = (
    "32x64x1024", "1x1024x1024", "2x2816x1024", "1x1024x2816", "4x1024x4096",
    "10x1000x1000", "50x256x256", "200x64x64",
)  # fmt: skip
PEERS: Final[dict[str, tuple[str, str, str, dict[str, Any], str | None]]] = {
    "dion Muon": ("dion", "dion", "Muon", {"nesterov": True}, "use_triton"),
    "KellerJordan Muon": ("keller_jordan", "muon", "SingleDeviceMuon", {}, None),
    "Emerging-Optimizers Muon": (
        "emerging_optimizers", "emerging_optimizers.orthogonalized_optimizers", "Muon",
        {"nesterov": True}, "use_syrk",
    ),
    "gram-newton-schulz Muon": (
        "gram_newton_schulz", "gram_newton_schulz", "Muon", {}, "ns_use_kernels",
    ),
}  # fmt: skip
"""Checkout, module, class, settings of each library, and what turns on its kernels for GPUs."""
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


def peers(folder: Path | None, device: torch.device) -> dict[str, Make]:
    """What makes the Muon of each checkout that `folder` has, by name; others are named."""
    if folder is None:
        return {}
    makers: dict[str, Make] = {}
    for name, (checkout, module, attribute, settings, kernels) in PEERS.items():
        if not (folder / checkout).is_dir():
            print(f"{name} left out: no {folder / checkout}")
            continue
        sys.path.insert(0, str((folder / checkout).resolve()))
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, SyntaxError) as error:
            print(f"{name} left out: {error}")
            continue
        own_kernels = {kernels: device.type == "cuda"} if kernels else {}
        makers[name] = partial(kind, **PLAIN, **settings, **own_kernels)
    return makers


class Side:
    """An optimizer on weights of its own, equal to those of every other side."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        make: Make,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.mesh, self.device = mesh, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.weights = [Parameter(self._drawn(shape)) for shape in shapes]
        self.optimizer = make(self.weights)

    def turn(self) -> float:
        """Give all weights Gaussian gradients, take a step, and return its milliseconds."""
        for weight in self.weights:
            weight.grad = self._drawn(weight.shape)
        if self.mesh is None:
            return timed(self.optimizer.step, self.device)[0]
        dist.barrier()
        spent = torch.tensor(timed(self.optimizer.step, CPU)[0])
        dist.all_reduce(spent)
        return float(spent) / dist.get_world_size()

    def _drawn(self, shape: Sequence[int]) -> Tensor:
        whole = torch.randn(shape, generator=self.generator, device=self.device)
        return whole if self.mesh is None else distribute_tensor(whole, self.mesh, [Shard(0)])


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends to others in all-to-alls and all-gathers."""

    sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation; of a collective the second argument is what it sends."""
        name, size = func.name(), dist.get_world_size()
        if name == "c10d::alltoall_base_":
            kept = args[4][dist.get_rank()] if args[4] else args[1].numel() // size
            self.sent += (args[1].numel() - kept) * args[1].element_size()
        elif name == "c10d::alltoall_":
            self.sent += sum(x.nbytes for i, x in enumerate(args[1]) if i != dist.get_rank())
        elif name.startswith("c10d::") and "allgather" in name:
            sent = args[1] if isinstance(args[1], Tensor) else args[1][0]
            self.sent += sent.nbytes * (size - 1)
        return func(*args, **(kwargs or {}))


def sharded(options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Median milliseconds of a step and the bytes of one, by set and optimizer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wire: dict[str, Any] = {"exchange_dtype": torch.bfloat16}
    makers: dict[str, Make] = {
        "Muon, equal": lambda p: Muon(p, **EQUAL, **wire),
        "SpectralSphere, equal": lambda p: SpectralSphere(p, **EQUAL, **wire),
    }
    makers |= {
        name: partial(make, distributed_mesh=mesh)  # type: ignore[call-arg]
        for name, make in peers(options.peers, CPU).items()
        if name == "dion Muon"
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for text in options.sets:
        sides = {name: Side(shapes(text), make, CPU, mesh) for name, make in makers.items()}
        times = medians({name: side.turn for name, side in sides.items()}, options.steps)
        found[text] = {}
        for name, side in sides.items():
            with torch.compiler.set_stance("force_eager"), Traffic() as traffic:  # type: ignore[no-untyped-call]
                side.turn()
            sent = torch.tensor(float(traffic.sent))
            dist.all_reduce(sent)
            found[text][name] = {"ms": times[name], "bytes": float(sent)}
        if dist.get_rank() == 0:
            print_table([{text: name, **figures} for name, figures in found[text].items()])
    return found


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
    device = torch.device(options.device)
    makers = own() | peers(options.peers, device)
    found = {}
    for text in options.sets:
        sides = {name: Side(shapes(text), make, device) for name, make in makers.items()}
        found[text] = medians({name: side.turn for name, side in sides.items()}, options.steps)
        print_table([{text: name, "ms": ms} for name, ms in found[text].items()])
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="folder of checkouts")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NxRxC", help="sets of weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=whole_number(), default=10, help="steps timed")
    add_json(parser)
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each optimizer, and write them."""
    options = parse(arguments)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and options.device != "cpu":
        raise InputError(f"--device must be cpu under torchrun, got {options.device}")
    content = {"ranks": ranks, "figures": sharded(options) if ranks > 1 else one_process(options)}
    if ranks == 1 or dist.get_rank() == 0:
        device = torch.device(options.device)
        write_json(options.json, record("scripts/bench/library.py", arguments, device, content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
