"""msign and whole optimizer steps of equal units in one batch, beside one unit after another.

    python scripts/bench/batched.py --units 32x128x2048 --dtype bfloat16

On a GPU if there is one, else on the CPU. Small matrices one by one leave a GPU waiting for the
host; a batch is one launch per product. Times are medians, in milliseconds, by the device's events
or on a CPU by the clock.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.timing import milliseconds  # noqa: E402
from spectral.polar import msign  # noqa: E402
from spectral.rules import RULES  # noqa: E402

KINDS = ("muon", "muon_sphere", "spectral_sphere")

Step = Callable[[], object]


def stepper(kind: str, dtype: str, weight: Tensor, gradient: Tensor) -> Step:
    """A call that steps `weight` `[batch, rows, cols]` by a rule; the gradient is copied first."""
    rule = RULES[kind](msign_dtype=dtype, steps=8)  # type: ignore[call-arg]
    state = rule.init_state(weight)
    return lambda: rule.step(weight, gradient.clone(), state, lr=1e-3, weight_decay=0.1)


def in_turn(calls: Sequence[Step]) -> None:
    """Run one call after another."""
    for call in calls:
        call()


def main(arguments: list[str] | None = None) -> None:
    """Print a line for msign and for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", default="32x128x2048", metavar="BxRxC")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = tuple(map(int, options.units.split("x")))
    weight, gradient = torch.randn(2, *shape, device=device)
    orthogonal = partial(msign, dtype=getattr(torch, options.dtype))
    pairs: dict[str, tuple[Step, Sequence[Step]]] = {
        "msign": (partial(orthogonal, gradient), [partial(orthogonal, g[None]) for g in gradient])
    }
    for kind in KINDS:
        single: Sequence[Step] = [
            stepper(kind, options.dtype, w[None].clone(), g[None])
            for w, g in zip(weight, gradient, strict=True)
        ]
        pairs[kind] = (stepper(kind, options.dtype, weight.clone(), gradient), single)
    print(f"{options.units}, {options.dtype}, {device.type}, torch {torch.__version__}")
    for name, (together, single) in pairs.items():
        batch = milliseconds(together, device, options.repeats)
        alone = milliseconds(partial(in_turn, single), device, options.repeats)
        print(
            f"{name:<18}in one batch {batch:9.3f} ms   one by one {alone:9.3f} ms"
            f"   {alone / batch:6.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
