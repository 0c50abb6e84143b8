"""Measure how long training waits for a checkpoint, saved in the background and blocking.

    python scripts/bench/checkpoint.py --config configs/tiny_sso.yaml model.hidden=512
    torchrun --nproc-per-node 2 scripts/bench/checkpoint.py --config configs/tiny_sso.yaml

Builds the model and optimizer of a config (no data is read) and saves them `--repeats` times in
each of three ways, to a temporary folder or to one in `--folder`:

    copy        this rank's share is copied to host memory that exists, and nothing else
    background  `begin` and `complete` of a save: the time for which training waits
    blocking    the same until everything is on disk

Times are medians in seconds on the slowest rank, without the first save of each kind.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from parallel.checkpoint.state import sharded_state
from parallel.checkpoint.state_writer import first_rank
from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups, shutdown
from scripts.bench.record import record, write_json
from scripts.bench.timing import Call
from scripts.bench.trainer import new_trainer, start
from scripts.command import add_config, add_json, command
from training.build import with_vocabulary
from training.checkpoint.saving import Saver
from training.config import Config, load_config


class SavedTrainer:
    """A trainer that is saved repeatedly."""

    def __init__(self, config: Config, groups: Groups) -> None:
        trainer = new_trainer(config, groups, synthetic=True)
        self.model, self.optimizer = trainer.model, trainer.optimizer
        self.saver = Saver(config, groups, self.model, self.optimizer, {})
        self.step = 0
        self.copies: dict[str, torch.Tensor] = {}

    def bytes(self) -> int:
        """Bytes of all tensors of a checkpoint."""
        state = sharded_state(self.model, self.optimizer)
        return sum(from_all(sum(part.data.nbytes for part in state.values())))

    def copy(self) -> None:
        """Copy this rank's share to host memory."""
        for name, part in sharded_state(self.model, self.optimizer).items():
            if name not in self.copies:
                self.copies[name] = torch.empty_like(part.data, device="cpu")
            self.copies[name].copy_(part.data.detach())

    def begin(self) -> None:
        """Begin a save in the background."""
        self.step += 1
        self.saver.begin({"step": self.step})

    def background(self) -> float:
        """Seconds for which training waits: to begin, and, once all is written, to complete."""
        began = seconds(self.begin)
        while any(from_all(self.saver.status()[1])):
            time.sleep(0.01)
        return began + seconds(self.saver.complete)

    def save(self) -> None:
        """Save and wait until it is on disk."""
        self.begin()
        self.saver.wait(lambda failed: any(from_all(failed)), lambda: None)


def seconds(call: Call) -> float:
    """Time a call that all ranks begin together, on the slowest of them."""
    dist.barrier()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return max(from_all(time.perf_counter() - began))


def measure(saved: SavedTrainer, repeats: int) -> dict[str, float]:
    """The medians and their ratios."""
    turns = [
        (seconds(saved.copy), saved.background(), seconds(saved.save)) for _ in range(repeats + 1)
    ]
    copy, background, blocking = map(statistics.median, zip(*turns[1:], strict=True))
    return {
        "copy": copy,
        "background": background,
        "blocking": blocking,
        "background / copy": background / copy,
        "background / blocking": background / blocking,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    parser.add_argument("--repeats", type=int, default=5, help="saves to measure (default: 5)")
    parser.add_argument("--folder", metavar="DIR", help="where to save (default: temporary files)")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write the result on rank 0."""
    options = parse(arguments)
    config = load_config(options.config, [*options.overrides, "checkpoint.keep_last=1"])
    config = with_vocabulary(config)
    groups = start(config)
    folder = first_rank(lambda: tempfile.mkdtemp(dir=options.folder))
    try:
        saved = SavedTrainer(replace(config, run=replace(config.run, dir=folder)), groups)
        figures = {"ranks": dist.get_world_size(), "mib": saved.bytes() / 2**20}
        figures |= measure(saved, options.repeats)
        if groups.rank == 0:
            for name, value in figures.items():
                print(f"{name:24} {value:10.3f}")
            figures = record("scripts/bench/checkpoint.py", arguments, groups.device, figures)
            write_json(options.json, figures)
    finally:
        if groups.rank == 0:
            shutil.rmtree(folder)
        shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
