"""Speed of training as a recipe says: tokens/s, MFU, memory, and each phase's share of a step.

    python scripts/bench/train.py --config configs/tiny_sso.yaml --steps 10 --json out.json
    torchrun --nproc-per-node 8 scripts/bench/train.py --config configs/llama1b_muon.yaml

The trainer is that of pretrain.py, built from the config and its `key=value` overrides; nothing is
saved or validated. `--synthetic` takes random tokens instead of the config's data.

MFU is model FLOPs per token (models/size.py: 6 per parameter of an active matrix, causal attention;
recomputation does not count) times tokens per second and device, over the device's dense bfloat16
peak (NVIDIA's data sheets, training/report/metrics.py; H100 SXM and H200: 989e12). For other
devices give --peak-flops, else it is null. Phases are timed by events on a GPU, which no step waits
for, and by the clock on a CPU; steps include the logging that the config asks for.

--profile writes a trace of one step and counts in it how often the host waits for the device; on a
CPU, how often and where it reads tensors.
"""

import argparse
import json
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", module=r"megatron\.")

from models.size import model_size  # noqa: E402
from parallel.comm import groups as process_groups  # noqa: E402
from parallel.comm.collectives import from_all  # noqa: E402
from scripts.bench.host_reads import HostReads  # noqa: E402
from scripts.bench.phases import Phases, mean, shares, watch  # noqa: E402
from spectral.kernels import device_name  # noqa: E402
from training.build import build_data, build_trainer, check_backend, with_vocabulary  # noqa: E402
from training.config import Config, check, load_config  # noqa: E402
from training.data.order import TrainingData  # noqa: E402
from training.errors import InputError, print_error  # noqa: E402
from training.loop import Trainer  # noqa: E402
from training.machine.facts import versions  # noqa: E402
from training.report.metrics import peak_flops, performance  # noqa: E402

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")


class RandomTokens(torch.utils.data.Dataset[Tensor]):
    """Windows `[length + 1]` of random tokens, the same for the same index."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocabulary, (self.length + 1,), generator=generator)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values over the file's")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--synthetic", action="store_true", help="random tokens, no data is read")
    parser.add_argument("--peak-flops", type=float, help="dense bf16 peak of one device, FLOP/s")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace of one step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_intermixed_args(arguments)
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    return options


def new_trainer(config: Config, groups: process_groups.Groups, synthetic: bool) -> Trainer:
    """The trainer that pretrain.py would build, without validation."""
    check_backend(config)
    if synthetic:
        assert config.model.vocab_size is not None
        tokens = RandomTokens(config.model.vocab_size, config.train.sequence_length)
        data = cast(TrainingData, tokens)
    else:
        data, _ = build_data(config)
    return build_trainer(config, groups, data, [])


def measure(trainer: Trainer, steps: int, warmup: int) -> dict[str, Any]:
    """Seconds per step, seconds per step of each phase, memory: of this rank."""
    device = trainer.groups.device
    phases = Phases(device)
    watch(trainer, phases)
    for _ in range(warmup):
        trainer.advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    phases.restart()
    for _ in range(steps):
        trainer.advance()
    found = {name: value / steps for name, value in phases.seconds().items()}
    seconds = (time.perf_counter() - begun) / steps
    return {"seconds": seconds, "phases": found, "peak_bytes": peak_bytes(device)}


def peak_bytes(device: torch.device) -> int:
    """The most memory that tensors took on a GPU since it was reset, or this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def summary(trainer: Trainer, ranks: list[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """The figures of all ranks together: the slowest decides, phases are means."""
    config = trainer.config
    tokens = config.train.global_batch * config.train.sequence_length
    flops = model_size(config.model, config.train.sequence_length).flops_per_token
    seconds = max(rank["seconds"] for rank in ranks)
    speed = performance(
        tokens=tokens, seconds=seconds, devices=len(ranks), flops_per_token=flops, peak=peak
    )
    phases = mean([rank["phases"] for rank in ranks])
    mfu = speed.get("perf/mfu")
    return {
        "tokens_per_second": speed["perf/tokens_per_sec"],
        "tokens_per_second_per_device": speed["perf/tokens_per_sec_per_gpu"],
        "mfu": None if mfu is None else mfu / 100,
        "seconds_per_step": seconds,
        "tokens_per_step": tokens,
        "flops_per_token": flops,
        "peak_flops": peak,
        "peak_memory_bytes": max(rank["peak_bytes"] for rank in ranks),
        "ranks": len(ranks),
        "phase_seconds": phases,
        "phase_shares": shares(phases),
    }


def profile(trainer: Trainer, trace: Path) -> dict[str, Any]:
    """How often a step that is not logged makes the host wait, and where; writes its trace on rank
    0. On a CPU the reads of tensors by the host are counted."""
    index = trainer.progress.step
    device = trainer.groups.device
    if device.type == "cpu":
        with HostReads() as reads:
            trainer.step(index)
        places = {place.replace(f"{ROOT}/", ""): n for place, n in reads.places.items()}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.step(index + 1)
    if device.type == "cuda":
        counts = {event.key: event.count for event in profiler.key_averages()}
        places = {k: n for k, n in counts.items() if any(wait in k for wait in WAITS)}
    if trainer.groups.rank == 0:
        profiler.export_chrome_trace(str(trace))
    return {"host_reads": sum(places.values()), "host_read_places": places}


def show(result: dict[str, Any]) -> None:
    """Print what a person reads."""
    mfu = "unknown" if result["mfu"] is None else f"{100 * result['mfu']:.1f}%"
    print(
        f"{result['tokens_per_second']:,.0f} tokens/s on {result['ranks']} x {result['device']}, "
        f"{1000 * result['seconds_per_step']:.1f} ms a step, MFU {mfu}, "
        f"peak {result['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    for name, share in result["phase_shares"].items():
        print(f"{name:<20}{1000 * result['phase_seconds'][name]:10.2f} ms{100 * share:8.1f}%")
    for place, count in result.get("host_read_places", {}).items():
        print(f"the host waits {count} times: {place}")


def run(options: argparse.Namespace, command: str) -> dict[str, Any] | None:
    """The result on rank 0, None on the others."""
    config = load_config(options.config, options.overrides)
    steps = options.warmup + options.steps
    # No step but the timed ones is the last, so that none is logged for that.
    train = replace(config.train, steps=max(config.train.steps, steps + 3), exit_step=None)
    config = with_vocabulary(replace(config, train=train))
    check(config, process_groups.world_size())
    layout = config.parallel
    groups = process_groups.initialize(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        context=layout.context,
        expert=layout.expert,
        timeout_seconds=layout.timeout_seconds,
    )
    try:
        trainer = new_trainer(config, groups, options.synthetic)
        name = device_name(groups.device)
        own = measure(trainer, options.steps, options.warmup)
        result = summary(trainer, from_all(own), options.peak_flops or peak_flops(name))
        if options.profile is not None:
            result |= profile(trainer, options.profile)
        result |= {
            "command": command,
            "device": name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "warmup": options.warmup,
            "steps": options.steps,
        }
        return result if groups.rank == 0 else None
    finally:
        process_groups.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code; rank 0 prints the result and writes it."""
    options = parse(arguments)
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        result = run(options, " ".join(["python scripts/bench/train.py", *words]))
    except InputError as error:
        print_error(error)
        return 2
    if result is not None:
        show(result)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
