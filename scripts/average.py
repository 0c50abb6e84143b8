#!/usr/bin/env python
"""Average the weights of a run's checkpoints into a new checkpoint. See docs/running.md.

scripts/average.py runs/tiny_sso averaged/tiny --last 3
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from any folder

from scripts.command import command, new_parser, output_path, whole_number
from training.errors import BrokenCheckpointError, InputError, near_name
from training.json_file import real_path
from training.report.text import progress

if TYPE_CHECKING:
    from training.checkpoint.stored_checkpoint import CheckpointInfo


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the average. Print which checkpoints were averaged, and the override that starts a run
    from the average."""
    options = parse(arguments)
    with progress(lambda: "importing PyTorch and megatron-core, reading checkpoints"):
        from models.engine import import_engine  # deferred: slow import

        import_engine()
        from scripts.weights_only import average

        infos, left_out = chosen(options.run, options.output, options.steps, options.last)
        count, decay = len(infos), options.ema
        if decay is None:
            weights = [1 / count] * count
        else:
            # An exponential moving average, initialized to the first checkpoint and updated with
            # each later one as `average = decay * average + (1 - decay) * checkpoint`.
            weights = [decay ** (count - 1 - i) * (1 - decay if i else 1.0) for i in range(count)]
        pairs = zip(infos, weights, strict=True)
        print("average = " + " + ".join(f"{w:.4g} * step {info.step}" for info, w in pairs))
        for text in left_out:
            print(f"not averaged: {text}")
        norms = average(infos, weights, options.output, on_sphere=options.on_sphere)
        for text in dropped(infos[-1], norms, options.on_sphere):
            print(text)
        print(
            f"wrote {options.output}; to start a run from it, set "
            + shlex.quote(f"checkpoint.initialize_from={options.output}")
        )
    return 0


def chosen(
    run: Path, output: Path, requested: Sequence[int] | None, last: int | None
) -> tuple[list["CheckpointInfo"], list[str]]:
    """Return the checkpoints to average, sorted by step, and a description of each checkpoint that
    is left out.

    Raises InputError if a requested step has no checkpoint, if the output is inside a run's
    checkpoint folder, or if fewer than two checkpoints remain. Raises BrokenCheckpointError if a
    requested checkpoint is broken.
    """
    from training.checkpoint.checkpoints import FOLDER, read_checkpoint, step_folder, steps

    if not (run / FOLDER).is_dir():
        requirement = f"contain {FOLDER}" if run.exists() else "exist"
        raise InputError(f"the run folder {run} must {requirement}{near_name(run)}")
    if real_path(output).parent.name == FOLDER:
        raise InputError(
            f"the output must not be in a run's {FOLDER}, got {output}: the run would treat the "
            "output as one of its checkpoints"
        )
    existing = steps(run)
    missing = [step for step in requested or () if step not in existing]
    if missing:
        present = ", ".join(map(str, existing)) or "none"
        raise InputError(f"{run} has no checkpoint at step {missing[0]}; available: {present}")
    infos, broken = [], {}
    for step in sorted(set(requested or existing)):
        try:
            infos.append(read_checkpoint(step_folder(run, step)))
        except BrokenCheckpointError as error:
            if requested is not None:
                raise
            broken[step] = f"step {step} (broken): {error}"
    if last is not None and len(infos) < last:
        raise InputError(
            f"--last must be at most {len(infos)}, the number of checkpoints in {run}, got {last}"
        )
    infos = infos[-last:] if last is not None else infos
    if len(infos) < 2:
        raise InputError(f"{run} must contain at least two checkpoints, got {len(infos)}")
    explained = {info.step for info in infos} | broken.keys()
    unchosen = ", ".join(f"step {step}" for step in existing if step not in explained)
    return infos, [*broken.values(), *([unchosen] if unchosen else [])]


def dropped(last: "CheckpointInfo", norms: Sequence[float], on_sphere: bool) -> Iterator[str]:
    """Yield lines to print: the state that averaging discards, and the norms of averaged
    matrices."""
    yield (
        "the average contains no optimizer state, random number generator state or data position, "
        "so runs cannot resume from it"
    )
    if last.config.pc is not None:
        yield "PC layers were replaced by the averages of PC(W), and the config now sets pc: null"
    if norms:
        text = f"after averaging, the spectral norms of {len(norms)} sphere-rule matrices are "
        text += f"{min(norms):.4f} to {max(norms):.4f} times their radius"
        yield (
            f"{text}; the matrices were rescaled to the radius"
            if on_sphere
            else f"{text}; pass --on-sphere to rescale the matrices to the radius"
        )
    elif on_sphere:
        yield "--on-sphere had no effect: this model has no matrix with a sphere rule"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("output", type=output_path, metavar="OUT", help="new checkpoint folder")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--steps",
        type=whole_number(),
        nargs="+",
        metavar="STEP",
        help="checkpoint steps to average (default: all complete checkpoints)",
    )
    choice.add_argument(
        "--last", type=whole_number(2), metavar="N", help="average the N newest checkpoints"
    )
    parser.add_argument(
        "--ema",
        type=share,
        metavar="DECAY",
        help="take an exponential moving average with this decay (default: uniform average)",
    )
    parser.add_argument(
        "--on-sphere",
        action="store_true",
        help="rescale each matrix of a sphere rule to the radius of its sphere",
    )
    options = parser.parse_args(arguments)
    if options.steps is not None and len(set(options.steps)) < max(2, len(options.steps)):
        parser.error(f"--steps requires at least two distinct steps, got {options.steps}")
    return options


def share(text: str) -> float:
    """Parse a number strictly between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a number in (0, 1), got {text!r:.40}")
    return value


if __name__ == "__main__":
    sys.exit(main())
