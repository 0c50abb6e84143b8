"""Record what a run's matrix rule orthogonalises, as data for the numerics of 16 bits.

    python scripts/bench/record_run.py --config configs/tiny_sso.yaml --output 512.safetensors \
        --steps 40 --record 1,10,40 train.precision=bf16 model.hidden=512

Trains the config, with overrides, and stores at a few steps every momentum that its Spectral Sphere
rule is about to solve for, with the top singular pair of its weight. Unlike record_momenta.py, it
runs the package itself: what it records are inputs, for which others compute what is exact.

The file holds, for the stack of each shape and step, `m.STEP.ROWSxCOLS.N` `[batch, rows, cols]` in
float16 (Frobenius norm sqrt(rows cols)), `u` and `v` of the same name in float32.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from parallel.comm import groups as process_groups
from scripts.command import add_config, command
from spectral import tangent
from spectral.rules import spectral_sphere
from training.build import build_data, build_trainer, with_vocabulary
from training.config import load_config

LIMIT = 4
"""Matrices of a stack that are kept."""


class Recorder:
    """Stands between the rule and its solver, and keeps what goes through while `step` is set."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.kept: dict[str, Tensor] = {}
        self.solve = tangent.solve_multipliers

    def __call__(
        self, problems: Sequence[tangent.TangentProblem], **options: Any
    ) -> list[tangent.TangentSolution]:
        """Solve as the rule would have."""
        if self.step is not None:
            for problem in problems:
                self.keep(*problem)
        return self.solve(problems, **options)

    def keep(self, m: Tensor, u: Tensor, v: Tensor) -> None:
        """Keep some matrices of a stack, and their vectors."""
        batch, rows, cols = m.shape
        name = f"{self.step}.{rows}x{cols}"
        name = f"{name}.{sum(key.startswith(f'm.{name}.') for key in self.kept)}"
        some = torch.linspace(0, batch - 1, min(batch, LIMIT)).long()
        self.kept[f"m.{name}"] = (m[some] * (rows * cols) ** 0.5).half()
        self.kept[f"u.{name}"], self.kept[f"v.{name}"] = u[some].float(), v[some].float()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--record", default="1,10,40", help="steps, with commas between them")
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Train and record."""
    options = parse(arguments)
    recorded = {int(step) for step in options.record.split(",")}
    groups = process_groups.initialize()
    config = with_vocabulary(load_config(options.config, options.overrides))
    trainer = build_trainer(config, groups, *build_data(config))
    recorder = Recorder()
    spectral_sphere.solve_multipliers = recorder  # type: ignore[attr-defined]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for step in range(1, options.steps + 1):
        recorder.step = step if step in recorded else None
        result = trainer.step(step - 1)
        print(f"step {step} loss {result.loss.item():.4f}", flush=True)
        if recorder.step is not None:
            save_file(recorder.kept, options.output)
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
