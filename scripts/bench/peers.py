"""Time and state of one step of Muon in one process, beside other libraries.

    python scripts/bench/peers.py [--dion PATH] [--emerging PATH] [--keller PATH] [--json FILE]

All step the matrices of the same small Llama, without what AdamW takes, on the same gradients with
one thread. They take turns, and the smallest processor time of each counts: other work on the
machine makes steps slower, none faster. Times of different runs must not be compared.

Libraries differ in what a step is: how many steps of which polynomial, in which dtype, and whether
a fused projection is one matrix or one for each head. `spread` is what comes of it, the largest
singular value of an update over the smallest, for a weight that all take for one matrix and a
Gaussian gradient; 1 is exact.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.record import record, write_json
from scripts.bench.timing import timed
from scripts.command import add_json, command, whole_number
from spectral import Muon, ParameterSplit, SpectralSphere, split_parameters
from training.report.table import table

CPU = torch.device("cpu")
PLAIN: Final[dict[str, Any]] = {"lr": 1e-3, "weight_decay": 0.0}
"""With no decay a step changes weights by the update alone."""
Make = Callable[[ParameterSplit], torch.optim.Optimizer]


@dataclass
class Row:
    """Processor time of a step, bytes of state for each element of a matrix, and the spread.

    The spread is None where an update is not the polar factor of the momentum.
    """

    name: str
    milliseconds: float
    state_bytes: float
    spread: float | None


def own() -> dict[str, Make]:
    """Return what makes torch's optimizers and this library's, by name."""
    five = {"steps": 5, **PLAIN}
    return {
        "torch AdamW": lambda split: torch.optim.AdamW(split.matrices, **PLAIN),
        "Muon": lambda split: Muon(of_matrices(split), **PLAIN),
        "Muon, whole weights, 5 steps": lambda split: Muon(split.matrices, **five),
        "Muon, whole weights, 5 steps in bfloat16": lambda split: Muon(
            split.matrices, msign_dtype="bfloat16", **five
        ),
        "SpectralSphere": lambda split: SpectralSphere(of_matrices(split), **PLAIN),
        "torch Muon": lambda split: torch.optim.Muon(split.matrices, **PLAIN),
    }


def of_matrices(split: ParameterSplit) -> list[dict[str, Any]]:
    """Return the groups without those for AdamW."""
    return [group for group in split if "rule" not in group]


def peers(dion: Path | None, emerging: Path | None, keller: Path | None) -> dict[str, Make]:
    """Return what makes the optimizers of the checkouts that are given."""
    found: dict[str, Make] = {}
    sys.path[:0] = [str(path) for path in (dion, emerging, keller) if path is not None]
    if dion is not None:
        from dion import Muon as Dion  # type: ignore[import-not-found]

        found["dion Muon"] = lambda split: Dion(split.matrices, nesterov=True, **PLAIN)
    if emerging is not None:
        from emerging_optimizers.orthogonalized_optimizers import (  # type: ignore[import-not-found]
            Muon as Emerging,
        )

        found["Emerging-Optimizers Muon"] = lambda split: Emerging(
            split.matrices, nesterov=True, **PLAIN
        )
    if keller is not None:
        from muon import SingleDeviceMuon  # type: ignore[import-not-found]

        found["KellerJordan Muon"] = lambda split: SingleDeviceMuon(split.matrices, **PLAIN)
    return found


class Side:
    """An optimizer on a model of its own."""

    def __init__(self, hidden: int, layers: int, make: Make) -> None:
        self.split = split_parameters(llama(hidden, layers))
        self.optimizer = make(self.split)

    def step(self) -> None:
        """Take one step on the same gradients as every other side."""
        self.optimizer.step()

    def new_gradients(self, seed: int) -> None:
        """Give all matrices Gaussian gradients."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.split.matrices:
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    def spread(self) -> float:
        """Return the spread of the first update of the last matrix."""
        weight = self.split.matrices[-1]
        before = weight.detach().clone()
        self.new_gradients(0)
        self.step()
        values = torch.linalg.svdvals((weight.detach() - before).double())
        return float(values[0] / values[-1])

    def state_bytes(self) -> float:
        """Return the bytes of state for each element of a matrix."""
        state = self.optimizer.state.values()
        held = sum(x.nbytes for entry in state for x in entry.values() if isinstance(x, Tensor))
        return held / sum(parameter.numel() for parameter in self.split.matrices)


def llama(hidden: int, layers: int) -> nn.Module:
    """Return a Llama of bytes, equal on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def measure(makers: dict[str, Make], hidden: int, layers: int, steps: int) -> list[Row]:
    """Return a row for each optimizer."""
    sides = {name: Side(hidden, layers, make) for name, make in makers.items()}
    spreads = {name: side.spread() for name, side in sides.items()}  # also warms up
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(1, steps + 1):
        for name, side in sides.items():
            side.new_gradients(step)
            times[name].append(timed(side.step, CPU)[0])
    return [
        Row(name, min(times[name]), side.state_bytes(), spreads[name] if "Muon" in name else None)
        for name, side in sides.items()
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, place in (
        ("dion", "microsoft/dion"),
        ("emerging", "NVIDIA-NeMo/Emerging-Optimizers"),
        ("keller", "KellerJordan/Muon"),
    ):
        parser.add_argument(
            f"--{name}", type=Path, metavar="PATH", help=f"checkout of github.com/{place}"
        )
    parser.add_argument("--hidden", type=whole_number(128), default=256, metavar="N", help="width")
    parser.add_argument("--layers", type=whole_number(), default=4, metavar="N", help="depth")
    parser.add_argument("--steps", type=whole_number(), default=10, metavar="N", help="steps timed")
    add_json(parser)
    return parser.parse_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each optimizer, and write them."""
    given = parse(arguments)
    torch.set_num_threads(1)
    makers = own() | peers(given.dion, given.emerging, given.keller)
    rows = measure(makers, given.hidden, given.layers, given.steps)
    print(
        table(
            ("optimizer", "ms", "state bytes", "spread"),
            [
                (
                    row.name,
                    f"{row.milliseconds:.1f}",
                    f"{row.state_bytes:.2f}",
                    "" if row.spread is None else f"{row.spread:.3f}",
                )
                for row in rows
            ],
        )
    )
    figures = {"hidden": given.hidden, "layers": given.layers, "rows": [*map(asdict, rows)]}
    write_json(given.json, record("scripts/bench/peers.py", arguments, CPU, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
