"""Compare optimizer step times of this library, torch.optim and other libraries.

    python scripts/bench/steps.py --sets 32x64x1024 1x1024x1024 --peers FOLDER --json result.json
    python scripts/bench/steps.py --config configs/llama1b_sso.yaml --shares 1 8 --graph
    torchrun --nproc-per-node 2 scripts/bench/steps.py --sets 12x256x256 --peers FOLDER

Each argument of `--sets` is a set of matrices: COUNTxROWSxCOLS, or several of these, separated by
commas. With `--config`, the script measures the matrices that the busiest rank owns, once for each
number of ranks in `--shares`. With `--config`, our rules use the recipe's settings and msign,
bfloat16 weights and float32 master weights. Without `--config`, our rules use the library's
defaults and float32 weights. Rows named "equal" use five msign steps in bfloat16, which is the
default in the other libraries. All other optimizers update float32 weights.

`--peers` is a folder with checkouts of other projects. The folder may contain the subfolders dion
(microsoft/dion), keller_jordan (KellerJordan/Muon), emerging_optimizers
(NVIDIA-NeMo/Emerging-Optimizers) and gram_newton_schulz (Dao-AILab/gram-newton-schulz). On a CPU,
the Muon of gram-newton-schulz uses torch matmuls. On a GPU, each project uses its own kernels.

All optimizers take turns updating identical weights with identical gradients on a single thread.
The table shows the median CPU time or, on a GPU, the median device time and host time. Under
torchrun, the weights are sharded by rows across all ranks, as with FSDP2. Each row of the table
then shows the mean CPU time per rank and the total bytes sent by all ranks. Only our optimizers and
dion's can update sharded weights.
"""

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.engine import import_engine

import_engine()

from scripts.bench.measure import in_turn, print_table, record, timed, write_json
from scripts.command import add_json, command, new_parser, warn_replaced, whole_number
from spectral import CapturedStep, SpectralOptimizer
from spectral.sharded.placement import Work, place
from spectral.singular_triplets import cold_start
from training.assignments import config_assignments, config_units
from training.config import Config, load_config
from training.errors import InputError

CPU = torch.device("cpu")
PLAIN: Final[dict[str, Any]] = {"lr": 1e-3, "weight_decay": 0.0}
EQUAL: Final[dict[str, Any]] = {"steps": 5, "msign_dtype": "bfloat16"}
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
"""Each library's checkout, module, class and settings, and the setting that enables its GPU
kernels."""
RULES = ("adamw", "muon", "muon_sphere", "spectral_sphere", "muon_plus_plus")
MSIGN = ("schedule", "steps", "msign_dtype")
"""The msign fields of a matrix rule, which determine most of the rule's cost."""
WARM_UP = 3
"""Number of untimed steps at the start. The third step captures the CUDA graph."""
ALIGNMENT = 0.6
"""Component of the gradient along Theta, the weight's top singular pair, in units of
min(shape)^-1/2. With this value, SSO's |f(0)| is 0.5, as during training. With random gradients,
every solver would converge faster than in training."""

Shapes = list[tuple[int, ...]]
Make = Callable[[list[Parameter]], torch.optim.Optimizer]


def library_options() -> dict[str, dict[str, Any]]:
    """Return the options of our rules, keyed by the name of the row in the table.

    Every rule is measured with its defaults. muon, muon_sphere and spectral_sphere are also
    measured in an "equal" row.
    """
    options: dict[str, dict[str, Any]] = {rule: {"rule": rule} for rule in RULES}
    for rule in ("muon", "muon_sphere", "spectral_sphere"):
        options[f"{rule}, equal"] = {"rule": rule, **EQUAL}
    options["spectral_sphere, equal"]["tolerance"] = 5e-3
    return options


def recipe_options(config: Config) -> dict[str, dict[str, Any]]:
    """Return the recipe's options for each of our rules.

    All rules use the msign options of the recipe's matrix rule. Raises InputError if a rule does
    not support these msign options.
    """
    optimizer, options = config.optimizer, {}
    main = vars(optimizer.rule(optimizer.matrix.rule))
    for name in RULES:
        rule = optimizer.rule(name)
        shared = {key: main[key] for key in MSIGN if key in main and key in vars(rule)}
        try:
            rule = replace(rule, **shared)
        except ValueError as error:
            raise InputError(
                f"rule {name} cannot use the msign options of rule {optimizer.matrix.rule}: {error}"
            ) from None
        options[name] = {"rule": name, "master_weights": True, **asdict(rule)}
    return options


def spectral(weights: list[Parameter], **settings: Any) -> SpectralOptimizer:
    """Return a spectral optimizer that treats each weight as one matrix."""
    return SpectralOptimizer([{"params": weights, "units": {}}], **settings)


def torch_optimizers(msign_steps: int) -> dict[str, Make]:
    """Return factories for torch's optimizers, by name."""
    return {
        "torch AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True, **PLAIN),
        "torch Muon": lambda p: torch.optim.Muon(p, ns_steps=msign_steps, **PLAIN),
    }


def peers(folder: Path | None, device: torch.device) -> dict[str, Make]:
    """Return a Muon factory for each checkout in `folder`. Print which libraries are missing."""
    if folder is None:
        return {}
    makers: dict[str, Make] = {}
    for name, (checkout, module, attribute, settings, kernels) in PEERS.items():
        if not (folder / checkout).is_dir():
            print(f"{name} skipped: {folder / checkout} does not exist")
            continue
        sys.path.insert(0, str((folder / checkout).resolve()))
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, SyntaxError) as error:
            print(f"{name} skipped: {error}")
            continue
        own_kernels = {kernels: device.type == "cuda"} if kernels else {}
        makers[name] = partial(kind, **PLAIN, **settings, **own_kernels)
    return makers


def aligned(count: int, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return weights and gradients, both `[count, rows, cols]`.

    The weights have a spectral norm of sqrt(rows / cols). Each gradient is aligned with its
    weight's top singular pair, as in training (see `ALIGNMENT`).
    """
    rows, cols = shape
    generator = torch.Generator(device).manual_seed(rows * cols)
    weight = torch.randn(count, rows, cols, generator=generator, device=device)
    sigma, u, v = cold_start(weight)
    weight *= (rows / cols) ** 0.5 / sigma[:, None, None]
    gradient = torch.randn(weight.shape, generator=generator, device=device)
    gradient /= (rows * cols) ** 0.5
    gradient += ALIGNMENT / min(rows, cols) ** 0.5 * u[:, :, None] * v[:, None]
    return weight, gradient


class Side:
    """An optimizer to compare, with its own copy of the weights and gradients.

    The weights are sharded by rows across `mesh`, unless `mesh` is None. `graph` captures the steps
    of our optimizers in a CUDA graph.
    """

    def __init__(
        self,
        shapes: Shapes,
        make: Make,
        device: torch.device,
        *,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype = torch.float32,
        graph: bool = False,
    ) -> None:
        self.device, self.sharded = device, mesh is not None
        weights = []
        for shape, count in Counter(shapes).items():
            for pair in zip(*aligned(count, shape, device), strict=True):
                whole = [matrix.to(dtype) for matrix in pair]
                if mesh is not None:
                    whole = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in whole]
                weights.append(Parameter(whole[0]))
                weights[-1].grad = whole[1]
        optimizer = make(weights)
        graphed = graph and isinstance(optimizer, SpectralOptimizer)
        self.step = CapturedStep(optimizer) if graphed else optimizer.step  # type: ignore[arg-type]

    def turn(self) -> tuple[float, float]:
        """Take a step and return its device and host times in ms, averaged over ranks."""
        if not self.sharded:
            synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
            return timed(self.step, self.device, synchronize)
        dist.barrier()
        spent = torch.tensor(timed(self.step, CPU)[0])
        dist.all_reduce(spent)
        mean = float(spent) / dist.get_world_size()
        return mean, mean

    def sent(self) -> float:
        """Take a step. Return the total number of bytes sent by all ranks."""
        with torch.compiler.set_stance("force_eager"), Traffic() as traffic:  # type: ignore[no-untyped-call]
            self.step()
        total = torch.tensor(float(traffic.sent))
        dist.all_reduce(total)
        return float(total)


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends to other ranks in all-to-alls and all-gathers."""

    sent = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation. For a collective, count the bytes of the second argument that are sent
        to other ranks."""
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


def parsed_shapes(text: str) -> Shapes:
    """Parse COUNTxROWSxCOLS[,...] into a list with one shape per weight."""
    shapes: Shapes = []
    for part in text.split(","):
        try:
            count, rows, cols = map(int, part.split("x"))
        except ValueError:
            raise InputError(f"--sets must be COUNTxROWSxCOLS[,...], got {text}") from None
        shapes += count * [(rows, cols)]
    return shapes


def measure(shapes: Shapes, options: argparse.Namespace, config: Config | None) -> dict[str, Any]:
    """Return each optimizer's median step time (ms) and, on several ranks, the bytes sent."""
    device, mesh = torch.device(options.device), None
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = library_options() if config is None else recipe_options(config)
    shared = {**PLAIN, "nonfinite": "skip", "lr": torch.tensor(PLAIN["lr"], device=device)}
    dtype = torch.float32 if config is None else torch.bfloat16
    sides = {}
    for name, settings in ours.items():
        if settings["rule"] not in options.rules:
            continue
        if mesh is not None and name.endswith("equal"):
            settings["exchange_dtype"] = torch.bfloat16
        make = partial(spectral, **{**(shared if options.graph else PLAIN), **settings})
        sides[name] = Side(shapes, make, device, mesh=mesh, dtype=dtype, graph=options.graph)
    others = peers(options.peers, device)
    if mesh is None:
        msign_steps = 5 if config is None else ours["muon"]["steps"]
        others |= torch_optimizers(msign_steps)
    else:
        others = {
            name: partial(make, distributed_mesh=mesh)  # type: ignore[call-arg]
            for name, make in others.items()
            if name == "dion Muon"
        }
    sides |= {name: Side(shapes, make, device, mesh=mesh) for name, make in others.items()}
    turns = in_turn({name: side.turn for name, side in sides.items()}, options.repeats, WARM_UP)
    rows = {}
    for name, spent in turns.items():
        whole, host = (statistics.median(times) for times in zip(*spent, strict=True))
        rows[name] = {"ms": whole}
        if device.type == "cuda":
            rows[name]["host ms"] = host
        if mesh is not None:
            rows[name]["bytes"] = sides[name].sent()
    return rows


def cases(options: argparse.Namespace) -> dict[str, tuple[Shapes, Config | None]]:
    """Return the matrix shapes and the recipe (None with --sets) of each case, keyed by name."""
    if options.config is None:
        return {text: (parsed_shapes(text), None) for text in options.sets}
    # Setting the vocabulary size lets the config load without data. The size hardly matters,
    # because the embedding and head rarely use a matrix rule.
    config = load_config(options.config, ["model.vocab_size=100352", *options.overrides])
    warn_replaced(options.overrides)
    assign = config_assignments(config)
    matrices = {unit.name: unit for unit in config_units(config) if assign(unit).has_owner}
    works = [Work(u.name, assign(u).cost(u.shape), {0: u.numel}) for u in matrices.values()]
    found: dict[str, tuple[Shapes, Config | None]] = {}
    for ranks in options.shares:
        placed = place("auto", works, ranks)
        fullest = placed.loads.index(max(placed.loads))
        owned = [unit.shape for name, unit in matrices.items() if placed.owners[name] == fullest]
        found[f"{config.run.name}, fullest of {ranks}"] = owned, config
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="NxRxC", help="matrix sets")
    parser.add_argument("--config", type=Path, help="recipe to measure instead of --sets")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides")
    parser.add_argument(
        "--shares",
        type=whole_number(),
        nargs="+",
        default=[1, 8],
        help="numbers of ranks; for each number, measure the matrices of the rank with the highest "
        "load (default: 1 8)",
    )
    parser.add_argument("--peers", type=Path, help="folder with checkouts of other libraries")
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=RULES,
        default=RULES,
        help="rules to compare; by default, all of them",
    )
    parser.add_argument(
        "--repeats", type=whole_number(), default=10, help="number of timed steps (default: 10)"
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="capture steps of spectrain's optimizers in CUDA graphs",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all optimizers, print a table per set and write the JSON file."""
    options = parse(arguments)
    ranks, device = int(os.environ.get("WORLD_SIZE", "1")), torch.device(options.device)
    if ranks > 1 and device.type != "cpu":
        raise InputError(f"--device must be cpu under torchrun, got {device}")
    if options.graph and device.type != "cuda":
        raise InputError(f"--graph requires CUDA, got device {device}")
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    results: dict[str, Mapping[str, Any]] = {}
    for case, (shapes, config) in cases(options).items():
        results[case] = measure(shapes, options, config)
        if ranks == 1 or dist.get_rank() == 0:
            print_table([{case: name, **row} for name, row in results[case].items()])
    if ranks == 1 or dist.get_rank() == 0:
        content = {"ranks": ranks, "figures": results}
        write_json(options.json, record("scripts/bench/steps.py", arguments, device, content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
