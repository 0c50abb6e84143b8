"""How long a checkpoint keeps training waiting: saved in the background, and waited for.

    python scripts/bench/checkpoint.py --config configs/tiny_sso.yaml model.hidden=1024
    torchrun --nproc-per-node 2 scripts/bench/checkpoint.py --config configs/tiny_sso.yaml

builds the model and optimizer of a config (no data is read) and saves it `--saves` times each way
to a temporary folder, or to one below `--folder`, in turn with:

    copy        every tensor of this rank's share copied to host memory of before, nothing else
    background  `begin` and `complete` of a save: what training waits for
    blocking    the same until everything is on the disk

Times are medians in seconds on the slowest rank. The first save of each kind does not count.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
# Python puts this folder first, whose spectral.py would hide the package of that name.
sys.path[0] = str(ROOT)
warnings.filterwarnings("ignore", module=r"megatron\.")

from parallel.checkpoint.state import sharded_state  # noqa: E402
from parallel.checkpoint.state_writer import first_rank  # noqa: E402
from parallel.comm import groups as process_groups  # noqa: E402
from parallel.comm.collectives import from_all  # noqa: E402
from parallel.comm.groups import Groups  # noqa: E402
from training.build import build_distributed_optimizer, build_parallel_model, with_vocabulary  # noqa: E402
from training.checkpoint.saving import Saver  # noqa: E402
from training.config import Config, check, load_config  # noqa: E402

SETTINGS = ("checkpoint.keep_last=1",)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--saves", type=int, default=5, help="saves that count, each way")
    parser.add_argument("--folder", metavar="DIR", help="where to save (default: temporary files)")
    parser.add_argument("--json", metavar="FILE", help="also write the result to FILE")
    return parser.parse_intermixed_args(arguments)


def seconds(call: Callable[[], object]) -> float:
    """The time of a call that all ranks begin together, on the slowest of them."""
    dist.barrier()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return max(from_all(time.perf_counter() - began))


class Bench:
    """One model, saved again and again."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self.model = build_parallel_model(config, groups)
        self.optimizer = build_distributed_optimizer(config, self.model)
        self.saver = Saver(config, groups, self.model, self.optimizer, {})
        self.step = 0
        self.copies: dict[str, torch.Tensor] = {}

    def bytes(self) -> int:
        """Bytes of all ranks' shares of a checkpoint's tensors."""
        state = sharded_state(self.model, self.optimizer)
        return sum(from_all(sum(part.data.nbytes for part in state.values())))

    def copy(self) -> None:
        """Copy this rank's share to host memory that is there."""
        for name, part in sharded_state(self.model, self.optimizer).items():
            if name not in self.copies:
                self.copies[name] = torch.empty_like(part.data, device="cpu")
            self.copies[name].copy_(part.data.detach())

    def begin(self) -> None:
        """Begin a save."""
        self.step += 1
        self.saver.begin({"step": self.step})

    def wait(self) -> None:
        """Wait until the save is on the disk."""
        self.saver.wait(lambda failed: any(from_all(failed)), lambda: None)

    def background(self) -> float:
        """Seconds for which training waits: to begin, and, when all is written, to complete."""
        began = seconds(self.begin)
        while any(from_all(self.saver.status()[1])):
            time.sleep(0.01)
        return began + seconds(self.saver.complete)

    def blocking(self) -> float:
        """Seconds of a save that is waited for."""

        def save() -> None:
            self.begin()
            self.wait()

        return seconds(save)


def measure(bench: Bench, saves: int) -> dict[str, float]:
    """The medians, and how they compare."""
    times: dict[str, list[float]] = {"copy": [], "background": [], "blocking": []}
    for _ in range(saves + 1):
        times["copy"].append(seconds(bench.copy))
        times["background"].append(bench.background())
        times["blocking"].append(bench.blocking())
    found = {name: statistics.median(values[1:]) for name, values in times.items()}
    found["background / copy"] = found["background"] / found["copy"]
    found["background / blocking"] = found["background"] / found["blocking"]
    return found


def start(config: Config) -> Groups:
    """The process groups of a config's layout."""
    parallel = config.parallel
    return process_groups.initialize(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints and writes the result."""
    options = parse(arguments)
    config = with_vocabulary(load_config(options.config, [*options.overrides, *SETTINGS]))
    check(config, process_groups.world_size())
    groups = start(config)
    folder = first_rank(lambda: tempfile.mkdtemp(dir=options.folder))
    try:
        bench = Bench(replace(config, run=replace(config.run, dir=folder)), groups)
        result = {"ranks": dist.get_world_size(), "mib": bench.bytes() / 2**20}
        result |= measure(bench, options.saves)
        if groups.rank == 0:
            report(result, options.json)
    finally:
        if groups.rank == 0:
            shutil.rmtree(folder)
        process_groups.shutdown()


def report(result: Mapping[str, float], file: str | None) -> None:
    """Print the result and writes it to a file, if there is to be one."""
    for name, value in result.items():
        print(f"{name:24} {value:10.3f}")
    if file is not None:
        Path(file).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
